"""``kvfs umount``: says who is busy, or takes the mount down and waits until its daemon is gone."""

from __future__ import annotations

import errno as numbers
import os
import select
import time
from contextlib import ExitStack
from pathlib import Path

import click

from kvfs import mounts
from kvfs.cli.control import find_state, require_mount
from kvfs.cli.release import release_state
from kvfs.config import chosen_state_dir
from kvfs.errors import Busy, DaemonFailed, KvfsError, NotMounted
from kvfs.state import StateDirectory

END_DEADLINE_SECONDS = 60.0


@click.command("umount", short_help="Unmount, and free the DRAM.")
@click.argument("mountpoint", metavar="MNT")
@click.option(
    "-z", "--lazy", is_flag=True, help="Take the mount away at once, although programs still use it."
)
@click.option("--keep", is_flag=True, help="Keep the DRAM: the next mount at MNT finds its pages there.")
@click.option(
    "--state-dir", metavar="DIR", help="The --state-dir that the mount was given, if it was. [found]"
)
def command(mountpoint: str, lazy: bool, keep: bool, state_dir: str | None) -> None:
    """Unmount MNT and wait until its daemon is gone; the DRAM is freed.

    If programs still use it, they are listed and nothing changes; with -z it disappears from the tree at once
    and lives on, hidden, until the last of them lets go. On a mount whose daemon has died, and where --keep
    or a crash left DRAM behind, this frees it.
    """
    path = mounts.resolve_mountpoint(mountpoint)
    state = find_state(path, chosen_state_dir(state_dir, os.environ))
    pid = state.daemon_pid()
    if not mounts.find(path):
        if pid is not None:
            raise NotMounted(
                f"nothing is mounted at {path} any more; process {pid} serves those who opened files before "
                "that, and ends after them"
            )
        if state.exists():
            if keep:
                raise NotMounted(f"nothing is mounted at {path}; its DRAM is kept already")
            release_state(state)
            print(f"freed the DRAM that an earlier mount at {path} left behind")
            return
    entry = require_mount(path)
    if pid is None and mounts.is_dead(path):
        mounts.unmount(path, lazy=True)
        freed = not keep and release_state(state)
        print(
            f"{path} was dead and is unmounted; its DRAM is {'freed' if freed else 'kept for the next mount'}"
        )
        return
    users = mounts.holders(entry.device)
    if keep:
        state.ask_keep()
    try:
        mounts.unmount(path, lazy)
    except (OSError, KvfsError) as error:
        if keep:
            state.withdraw_keep()
        if isinstance(error, OSError) and error.errno == numbers.EBUSY:
            raise Busy(_who_is_busy(path, entry.device)) from None
        raise
    _wait(path, state, pid, users if lazy else [])


def _who_is_busy(mountpoint: Path, device: str) -> str:
    lines = [f"  {holder.pid} {holder.name}: {holder.what}" for holder in mounts.holders(device)]
    lines += [
        f"  a mount: {entry.fstype} on {entry.mountpoint}"
        for entry in mounts.read_mountinfo()
        if mountpoint in entry.mountpoint.parents
    ]
    if not lines:
        lines = (
            ["  nobody that you may see: sudo shows more"]
            if os.geteuid()
            else ["  nobody any more: try again"]
        )
    return "\n".join([f"{mountpoint} is in use; end these programs, or use -z:", *lines])


def _wait(mountpoint: Path, state: StateDirectory, pid: int | None, users: list[mounts.Holder]) -> None:
    """Returns when the daemon has ended; with ``users`` it only says that it ends after them."""
    if users:
        print(
            f"{mountpoint} is detached; the daemon ends when the last of these lets go:",
            *(f"  {user.pid} {user.name}: {user.what}" for user in users),
            sep="\n",
        )
        return
    if pid is None:
        return
    deadline = time.monotonic() + END_DEADLINE_SECONDS
    with ExitStack() as cleanup:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        cleanup.callback(os.close, descriptor)
        # The number may have been reused between reading it and opening it: only a holder of the lock counts.
        if state.daemon_pid() != pid:
            return
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise DaemonFailed(
                f"{mountpoint} is unmounted, but its daemon, process {pid}, has not ended within "
                f"{END_DEADLINE_SECONDS:g} s: see {state.log}"
            )
