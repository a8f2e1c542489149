"""``kvfs umount``: says who is busy, or takes the mount down and waits until its daemon is gone."""

from __future__ import annotations

import errno as numbers
import os
import sys
from pathlib import Path

import click

from kvfs import mounts
from kvfs.cli.control import find_state, is_dead, require_mount
from kvfs.cli.release import release_state
from kvfs.cli.server import Server, server_of
from kvfs.config import chosen_state_dir
from kvfs.errors import Busy, DaemonFailed, KvfsError, NotMounted
from kvfs.state import StateDirectory

END_DEADLINE_SECONDS = 60.0
"""For the end of a daemon, after what it may copy to an SSD before."""


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
    with server_of(state) as server:
        if mounts.find(path) and (server is not None or not is_dead(path)):
            _take_down(path, state, server, lazy, keep)
            return
        if server is not None:
            raise NotMounted(
                f"nothing is mounted at {path} any more; process {server.pid} serves those who opened files "
                "before that, and ends after them"
            )
    _clear(path, state, keep)


def _clear(mountpoint: Path, state: StateDirectory, keep: bool) -> None:
    """Takes away what a daemon that is gone has left: a dead mount, DRAM, or both."""
    if not state.exists():
        require_mount(mountpoint)
    mounts.clear_dead(mountpoint)
    if keep:
        print(f"no daemon served {mountpoint}; its DRAM is kept for the next mount there")
    elif release_state(state):
        print(f"no daemon served {mountpoint}; the DRAM that an earlier one left is freed")


def _take_down(
    mountpoint: Path, state: StateDirectory, server: Server | None, lazy: bool, keep: bool
) -> None:
    """Unmounts what lives, and waits until its daemon has ended."""
    with state.listening() as report:
        _unmount(mountpoint, state, server, lazy, keep)
        for line in report().splitlines():
            print(f"kvfs: warning: {line}", file=sys.stderr)


def _unmount(mountpoint: Path, state: StateDirectory, server: Server | None, lazy: bool, keep: bool) -> None:
    entry = require_mount(mountpoint)
    config = state.read_config()
    deadline = END_DEADLINE_SECONDS + (
        config.flush_timeout_seconds if config is not None and config.ssd else 0
    )
    users = mounts.holders(entry.device) if lazy else []
    if keep:
        state.ask_keep()
    try:
        mounts.unmount(mountpoint, lazy)
    except (OSError, KvfsError) as error:
        if keep:
            state.withdraw_keep()
        if isinstance(error, OSError) and error.errno == numbers.EBUSY:
            raise Busy(_who_is_busy(mountpoint, entry.device)) from None
        raise
    if any(user.is_known for user in users):
        print(
            f"{mountpoint} is detached; the daemon ends when the last of these lets go:",
            *(f"  {user.pid} {user.name}: {user.what}" for user in users),
            sep="\n",
        )
    elif server is not None and not server.wait(deadline):
        raise DaemonFailed(
            f"{mountpoint} is unmounted, but its daemon, process {server.pid}, has not ended within "
            f"{deadline:g} s: see {state.log}"
        )


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
