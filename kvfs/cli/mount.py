"""``kvfs mount``: checks what can be checked, starts the daemon, and returns when the mount serves."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvfs import config as configuration
from kvfs import mounts
from kvfs.cli.control import find_state, is_dead, read_status
from kvfs.cli.release import release_state
from kvfs.cli.server import server_of
from kvfs.config import Config
from kvfs.errors import (
    AlreadyMounted,
    ConfigError,
    DaemonFailed,
    KvfsError,
    MountpointError,
    NotMounted,
    NotPermitted,
    StateInUse,
    Unavailable,
    UsageError,
    from_exit_code,
)
from kvfs.notify import ServiceManager
from kvfs.sizes import format_size
from kvfs.state import StateDirectory
from kvfs.tiers import tmpfs

END_DEADLINE_SECONDS = 10.0


@click.command("mount", short_help="Mount a pool of DRAM at a directory.")
@click.argument("mountpoint", metavar="MNT")
@click.option(
    "--pool", metavar="SIZE", help="DRAM: 64G, 512M, or a share of all memory, 50%. [25% of what is free]"
)
@click.option("-f", "--foreground", is_flag=True, default=None, help="Stay in the foreground, log to stderr.")
@click.option(
    "-o",
    "--options",
    metavar="OPT,…",
    multiple=True,
    help="Mount options: ro, noexec, noatime, allow_other, allow_root, default_permissions, fsname=NAME; "
    "what fstab lines carry besides (defaults, _netdev, nofail, x-…) is accepted.",
)
@click.option(
    "--hugepages",
    metavar="prefer|require|off",
    help="Whether the DRAM consists of 2 MiB pages; require refuses to start without them. [prefer]",
)
@click.option(
    "--numa", metavar="interleave|NODE", help="Where the memory comes from. [the writer's own node]"
)
@click.option(
    "--owner", metavar="USER:GROUP", help="Owner of the root directory. [who called sudo, else you]"
)
@click.option("--mode", metavar="0770", help="Permission bits of the root directory. [0770]")
@click.option("--reserve-percent", metavar="N", help="Part of the pool kept free for writers. [5]")
@click.option("--pin-percent", metavar="N", help="Part of the pool that pinned pages may take. [25]")
@click.option(
    "--protected-percent",
    metavar="N",
    help="Part of the pool that pages which were used again may take before they leave first. [100]",
)
@click.option(
    "--ssd", metavar="DIR", help="A directory on an SSD to which pages go down; it is made if missing. [none]"
)
@click.option(
    "--ssd-capacity", metavar="SIZE", help="What may be used there: 2T, or a share of its filesystem. [90%]"
)
@click.option(
    "--ssd-read-path",
    metavar="auto|cufile|uring|direct",
    help="How pages move between the SSD and DRAM; what does not work here gives way to the next. [auto]",
)
@click.option(
    "--ssd-write-policy",
    metavar="all|reuse",
    help="Which pages are copied to the SSD: every one, or those that were stored or read again. [all]",
)
@click.option(
    "--ssd-write-delay",
    metavar="TIME",
    help="How long a page may be in DRAM only: what is removed by then is never written. [30s]",
)
@click.option("--settle", metavar="TIME", help="How long a page is in DRAM only at least: temporaries. [1s]")
@click.option("--io-timeout", metavar="TIME", help="How long a read waits for the SSD, at least 100ms. [30s]")
@click.option(
    "--flush-timeout", metavar="TIME", help="How long unmounting may copy what the SSD has not yet. [60s]"
)
@click.option(
    "--discard-incompatible",
    is_flag=True,
    default=None,
    help="Delete the pages of an SSD directory that another layout of kvfs filled.",
)
@click.option(
    "--keep", is_flag=True, default=None, help="Leave the DRAM for the next mount at a clean unmount."
)
@click.option(
    "--passthrough", metavar="auto|off", help="Whether the kernel moves the bytes by itself. [auto]"
)
@click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error. [info]")
@click.option("--state-dir", metavar="DIR", help="Where locks, logs and the DRAM of mounts live. [/run/kvfs]")
@click.option(
    "--config",
    "file",
    metavar="FILE",
    help="Read settings from this TOML file. [/etc/kvfs/mnt-kv.toml for /mnt/kv, else /etc/kvfs.toml]",
)
def command(mountpoint: str, file: str | None, options: tuple[str, ...], **flags: Any) -> None:
    """Mount a pool of DRAM at the empty directory MNT, and return when it serves.

    Run by root, every user can reach the mount as far as its permissions go, and reads and writes run at
    memory speed where the kernel can do that (Linux 6.9 or later). Run by anyone else, only that user can
    reach it, and it is slower: kvfs doctor says what is lost.

    Pages left by a crash, or by umount --keep, are served again. A dead kvfs mount at MNT is cleared first.
    """
    config, state = prepare(mountpoint, {**flags, "options": options or None}, file)
    if config.foreground:
        from kvfs.daemon import run

        run(config, state, manager=ServiceManager.from_environment(os.environ))
        return
    start(config, state)
    announce(config)


def prepare(
    mountpoint: str, flags: Mapping[str, object], file: str | None = None
) -> tuple[Config, StateDirectory]:
    """What a mount would run with, by ``flags`` as given at a command line, and its state, not made yet.

    Clears what a dead daemon left on the mountpoint. Raises KvfsError where nothing can be mounted there.
    """
    path = mounts.resolve_mountpoint(mountpoint)
    config = configuration.load_config(path, flags, os.environ, Path(file) if file is not None else None)
    _check_numa(config)
    warning = configuration.pool_warning(config, configuration.read_memory())
    if warning is not None:
        print(f"kvfs: warning: {warning}", file=sys.stderr)
    state = StateDirectory.for_mountpoint(path, config.state_dir)
    _check_place(path, state)
    _check_machine()
    return config, state


def _check_numa(config: Config) -> None:
    """Which nodes there are, only the machine knows; who named one that is not there hears of it as of any
    other setting that is wrong."""
    try:
        tmpfs.memory_policy(config.numa)
    except UsageError as error:
        origin = config.origins["numa"]
        if origin == "flag":
            raise
        raise ConfigError(f"{origin}: {error}") from None


def _check_place(mountpoint: Path, state: StateDirectory) -> None:
    """Refuses a mountpoint that is in use or cannot be used; clears what a dead daemon left on it."""
    entries = mounts.find(mountpoint)
    if entries and entries[-1].fstype != mounts.FSTYPE:
        raise MountpointError(
            f"{mountpoint}: {entries[-1].fstype} from {entries[-1].source} is mounted there; "
            "unmount it first, or choose another mountpoint"
        )
    with server_of(find_state(mountpoint, None) if entries and not state.exists() else state) as server:
        dying = server is None or server.is_dying() or (entries and is_dead(mountpoint))
        if server is not None and not (dying and server.wait(END_DEADLINE_SECONDS)):
            if entries:
                raise AlreadyMounted(
                    f"{mountpoint} is already served by process {server.pid}: see kvfs status {mountpoint}"
                )
            raise StateInUse(
                f"process {server.pid} still serves programs that opened files on an earlier mount at "
                f"{mountpoint}: end them, or mount elsewhere"
            )
    if entries and not is_dead(mountpoint):
        raise AlreadyMounted(f"{mountpoint} is already served: see kvfs status {mountpoint}")
    mounts.clear_dead(mountpoint)
    # Where pages wait to be served again, programs may have written into the bare directory meanwhile.
    waiting = bool(mounts.find(state.dram))
    mounts.check_mountpoint(mountpoint, may_hold_files=waiting)
    if waiting and os.listdir(mountpoint):
        print(
            f"kvfs: warning: files that were written into the bare {mountpoint} are hidden", file=sys.stderr
        )


def _check_machine() -> None:
    if not os.path.exists("/dev/fuse"):
        raise Unavailable(
            "/dev/fuse is not there: load it with modprobe fuse, or give the container --device /dev/fuse"
        )
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise NotPermitted("/dev/fuse cannot be opened by you: use sudo, or join the group that owns it")
    if os.geteuid() == 0:
        return
    if shutil.which("fusermount3") is None:
        raise Unavailable("fusermount3 is not there, and only root mounts without it: apt-get install fuse3")
    if not os.path.exists("/etc/mtab"):
        raise Unavailable(
            "/etc/mtab is not there, and fusermount3 needs it: as root, ln -s ../proc/self/mounts /etc/mtab"
        )


def start(config: Config, state: StateDirectory) -> None:
    """Starts the daemon and waits until it serves; else raises its reason, and leaves nothing behind."""
    created = state.create()
    log = state.open_log()
    log_start = os.fstat(log).st_size
    process: subprocess.Popen[bytes] | None = None
    ready, ready_for_daemon = os.pipe()
    try:
        with contextlib.ExitStack() as ours:
            ours.callback(os.close, log)
            ours.callback(os.close, ready_for_daemon)
            given = os.memfd_create("config")
            ours.callback(os.close, given)
            os.write(given, configuration.to_json(config))
            os.lseek(given, 0, os.SEEK_SET)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvfs.daemon", "--config-json", str(given)],
                pass_fds=(given, ready_for_daemon),
                env={**os.environ, "KVFS_READY_FD": str(ready_for_daemon)},
                cwd="/",
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        with open(ready, "rb") as answers:
            answer = answers.readline().decode(errors="replace").strip()
        if answer != "ready":
            raise _reason(answer, process, state, log_start)
    except BaseException:
        if process is not None:
            _end(process)
        with contextlib.suppress(KvfsError):
            mounts.clear_dead(config.mountpoint)
        if created:
            release_state(state)
        raise
    # The daemon outlives this process by design: it is not ours to wait for.
    process.returncode = 0


def _reason(
    answer: str, process: subprocess.Popen[bytes], state: StateDirectory, log_start: int
) -> KvfsError:
    """What the daemon said went wrong, or the last line it left in its log when it said nothing."""
    kind, _, rest = answer.partition(" ")
    code, _, line = rest.partition(" ")
    if kind == "error" and code.isdecimal():
        return from_exit_code(int(code), line)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_DEADLINE_SECONDS)
    with open(state.log, "rb") as log:
        log.seek(log_start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    last = lines[-1] if lines else f"it left no word in its log (exit status {process.returncode})"
    return DaemonFailed(f"the daemon did not start: {last}")


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def announce(config: Config) -> None:
    """Says on standard output what was mounted, and what is off."""
    for warning in configuration.ssd_warnings(config):
        print(f"kvfs: warning: {warning}", file=sys.stderr)
    words = [f"{config.mountpoint} serves {format_size(config.pool_bytes)} of DRAM"]
    if config.ssd:
        words.append(f"{format_size(config.ssd_capacity_bytes)} of SSD in {config.ssd}")
    # The mount may already be someone else's business: unmounted again, or not readable by this user.
    with contextlib.suppress(NotMounted, NotPermitted, DaemonFailed):
        status = read_status(config.mountpoint)
        for name in ("hugepages", "passthrough"):
            feature = status.get(name, {})
            reason = "" if feature.get("active") else f" ({feature.get('reason')})"
            words.append(f"{name} {'on' if feature.get('active') else 'off'}{reason}")
    print(", ".join(words))
