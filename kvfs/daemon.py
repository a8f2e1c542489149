"""The daemon: puts the parts of a mount together, serves, and takes them down in order."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import stat
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyfuse3
import trio

from kvfs import adoption, from_outside, mounts
from kvfs import config as configuration
from kvfs.config import Config
from kvfs.copies.choosing import choose
from kvfs.errors import EXIT_BUG, KvfsError
from kvfs.fs import mounting
from kvfs.fs.channel import KernelChannel, raise_descriptor_limit
from kvfs.fs.control import ControlFiles
from kvfs.fs.files import Files
from kvfs.fs.operations import Operations
from kvfs.notify import ServiceManager, notes_the_time
from kvfs.observe.metrics import Metrics
from kvfs.observe.status import Status
from kvfs.page import OWNER, Owner
from kvfs.pool import Pool
from kvfs.sealing import ignore_lease_breaks
from kvfs.service.listening import BatchSocket
from kvfs.service.server import Service
from kvfs.state import StateDirectory
from kvfs.steps import step
from kvfs.storage.storage import Storage
from kvfs.storage.turns import begin_turn
from kvfs.storage.upkeep import leftovers_text
from kvfs.tiers.dram import DramTier
from kvfs.tiers.ssd import SsdPlace, SsdTier

log = logging.getLogger("kvfs.daemon")

OOM_SCORE_ADJUSTMENT = -800
"""The daemon is small, and its end hurts every engine: the kernel should look for its victim elsewhere."""
END_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
KEEP_SIGNAL = signal.SIGUSR1
"""Unmounts as the others do, and leaves the DRAM for the next mount: what a restart sends."""
MAX_TASKS = 1000
"""Requests in work at once. pyfuse3's default of 99 lets slow ones hold up quick ones."""
MAX_IDLE_PAGES = 16384
DETACH_SECONDS = 5.0
"""How long programs may go on using a mount that was told to end, before its connection is cut."""
POLL_GROWTH_SECONDS = 0.005
REPORT_SECONDS = 15.0
"""How often a service manager without a watchdog hears how the mount does."""
END_SECONDS = 60.0
"""For the end of the daemon, besides what may be copied to an SSD: files of many GiB take seconds to free."""


@dataclass(frozen=True, slots=True)
class _Parts:
    """What serves once the kernel has been asked for the mount."""

    channel: KernelChannel
    files: Files
    status: Status
    control: ControlFiles
    batches: BatchSocket


class Daemon:
    """One mount from start to end."""

    def __init__(
        self,
        config: Config,
        state: StateDirectory,
        tier: DramTier,
        ssd: SsdTier | None = None,
        manager: ServiceManager | None = None,
    ) -> None:
        self._config = config
        self._state = state
        self._tier = tier
        self._manager = manager or ServiceManager()
        descriptors = raise_descriptor_limit()
        owner = Owner(stat.S_IFDIR | config.mode, config.owner_uid, config.owner_gid)
        self._pool = Pool(
            tier,
            owner,
            reserve_percent=config.reserve_percent,
            pin_percent=config.pin_percent,
            protected_percent=config.protected_percent,
            idle_limit=min(MAX_IDLE_PAGES, max(64, descriptors // 4)),
            idle_limit_without_ids=max(64, descriptors // 2),
        )
        if ssd is not None:
            copies = choose(config.ssd_read_path, ssd.root_fd, direct=ssd.direct)
            Storage(
                self._pool,
                ssd,
                write=partial(copies.write, idle=True),
                write_at_once=copies.write,
                read=copies.read,
                read_path=copies.statistics,
                settle_seconds=config.settle_seconds,
                write_delay_seconds=config.ssd_write_delay_seconds,
                write_policy=config.ssd_write_policy,
                io_timeout=config.io_timeout_seconds,
            )
        adoption.adopt(self._pool)
        self._device = ""
        self._ended = trio.Event()
        self._is_flushed = False

    @property
    def is_flushed(self) -> bool:
        """Whether the SSD has all that it is to have, and the mount ended in order."""
        return self._is_flushed

    def run(self, ready: int | None) -> None:
        """Serves until the mount is gone. ``ready`` is a descriptor to tell when it answers."""
        config = self._config
        self._tier.set_attribute(b"", OWNER, self._pool.index.root.owner.format().encode())
        connection = mounting.mount(config.mountpoint, config.mount_options)
        try:
            channel = KernelChannel(
                connection,
                self._tier.root_fd,
                passthrough_off=_passthrough_off(config),
                statfs=self._tier.is_private and self._pool.storage is None,
            )
            self._device = mounting.find_device(config.mountpoint)
            self._serve(channel, ready)
        finally:
            with suppress(OSError):
                if mounting.find_device(config.mountpoint) == self._device != "":
                    mounts.unmount(config.mountpoint, lazy=True)

    def _serve(self, channel: KernelChannel, ready: int | None) -> None:
        pool, config = self._pool, self._config
        pool.attach_face(channel)
        files = Files(pool)
        channel.set_limits(files.file_limit, None)
        if (storage := pool.storage) is not None:
            channel.set_names_complete(False)
            storage.on_walked = partial(channel.set_names_complete, True)
        service = Service(pool, files.openings, files.catch_up)
        batches = BatchSocket(service, config.mountpoint, self._state.path)
        status = Status(config, pool, channel, batches)
        metrics = Metrics(status)
        control = ControlFiles(
            {
                b"status": lambda: status.text().encode(),
                b"status.json": lambda: (json.dumps(status.read(), indent=2) + "\n").encode(),
                b"metrics": metrics.text,
                b"config": lambda: (json.dumps(status.config(), indent=2) + "\n").encode(),
            },
            (config.owner_uid, config.owner_gid),
            {b"leftovers": partial(leftovers_text, pool)},
        )
        channel.start()
        session = f"/dev/fd/{channel.session_fd}"
        pyfuse3.init(Operations(pool, files, control), session, set())
        try:
            parts = _Parts(channel, files, status, control, batches)
            trio.run(self._main, parts, ready, strict_exception_groups=True)
        except BaseException as error:
            self._cut()
            raise _only(error) from None
        finally:
            pyfuse3.close(unmount=False)
            batches.close()
            pool.close()
            channel.stop()

    def _cut(self) -> None:
        """Ends the kernel's side at once, for which the channel waits; the pages stay."""
        with suppress(OSError):
            mounting.abort(self._device)
        with suppress(OSError):
            mounts.unmount(self._config.mountpoint, lazy=True)

    async def _main(self, parts: _Parts, ready: int | None) -> None:
        channel, files = parts.channel, parts.files
        async with trio.open_nursery() as nursery:
            self._pool.start(nursery)
            if not self._tier.is_private:
                self._pool.evictor.on_evicted = partial(self._renew_budget, channel)
                nursery.start_soon(self._watch_growth, channel)
            nursery.start_soon(self._watch_signals)
            nursery.start_soon(self._watch_end, channel)
            nursery.start_soon(files.run, channel.news_fd)
            nursery.start_soon(self._start, parts, ready, nursery)
            await pyfuse3.main(max_tasks=MAX_TASKS)
            files.catch_up()
            self._tell_stopping()
            await self._flush()
            nursery.cancel_scope.cancel()

    async def _flush(self) -> None:
        """At a clean end the SSD gets what it has not yet."""
        storage = self._pool.storage
        if storage is None:
            return
        with trio.move_on_after(self._config.flush_timeout_seconds):
            await storage.demotions.finish()
            self._is_flushed = True
        if missing := storage.missing():
            log.warning("%s", missing)
            self._state.report(missing)

    async def _start(self, parts: _Parts, ready: int | None, nursery: trio.Nursery) -> None:
        """Brings the pool to its size, then tells that the mount answers, once it does."""
        status = parts.status
        if self._tier.oversized:
            await self._pool.evictor.shrink()
        await from_outside.ask(self._config.mountpoint)
        if reason := mounting.widen_read_ahead(self._device):  # the kernel sets its own when it starts
            status.degraded.append(reason)
        await parts.batches.open(parts.control.link_socket)
        nursery.start_soon(parts.batches.serve, self._device)
        log.info("serving %s", self._config.mountpoint)
        if ready is not None:
            os.write(ready, b"ready\n")
            os.close(ready)
        self._manager.tell(READY=1, STATUS=status.line())
        if self._manager.is_listening:
            await self._report(status)

    async def _report(self, status: Status) -> None:
        """Gives signs of life for as long as the mount answers: one that hangs is to be restarted."""
        pause = self._manager.watchdog_seconds / 3 or REPORT_SECONDS
        while True:
            await trio.sleep(pause)
            with suppress(OSError):  # of a connection that ends: others see to that
                await from_outside.ask(self._config.mountpoint)
            self._manager.tell(WATCHDOG=1, STATUS=status.line())

    def _tell_stopping(self) -> None:
        """Asks the service manager for the time that copying to the SSD may take, whatever its own limit."""
        flush = self._config.flush_timeout_seconds if self._pool.storage is not None else 0.0
        self._manager.tell(
            STOPPING=1, STATUS="unmounting", EXTEND_TIMEOUT_USEC=int((flush + END_SECONDS) * 1e6)
        )

    async def _watch_end(self, channel: KernelChannel) -> None:
        """The kernel's side has ended: libfuse must hear of it before the pair is closed."""
        await trio.lowlevel.wait_readable(channel.ended_fd)
        self._ended.set()
        pyfuse3.terminate()

    async def _watch_signals(self) -> None:
        with trio.open_signal_receiver(*END_SIGNALS, KEEP_SIGNAL) as signals:
            async for number in signals:
                log.info("%s: unmounting", signal.Signals(number).name)
                if number == KEEP_SIGNAL:
                    self._state.ask_keep()
                self._tell_stopping()
                await self._end()

    async def _end(self) -> None:
        """Unmounts; programs that still use the mount get a little time."""
        if self._ended.is_set():
            return  # somebody has unmounted it, and the SSD gets what it has not yet
        if mounting.find_device(self._config.mountpoint) == self._device:  # else it was detached before
            try:
                await trio.to_thread.run_sync(mounts.unmount, self._config.mountpoint)
            except OSError as error:
                log.warning("%s is in use (%s): detached", self._config.mountpoint, error.strerror)
                await trio.to_thread.run_sync(mounts.unmount, self._config.mountpoint, True)
        with trio.move_on_after(DETACH_SECONDS):
            await self._ended.wait()
            return
        log.warning("programs still use the mount: its connection is cut")
        mounting.abort(self._device)

    async def _watch_growth(self, channel: KernelChannel) -> None:
        """Bounds writes on a tier whose limit is ours to keep: the kernel would let it grow."""
        while True:
            self._renew_budget(channel)
            await trio.sleep(POLL_GROWTH_SECONDS)

    def _renew_budget(self, channel: KernelChannel) -> None:
        self._tier.account(channel.take_growth())
        channel.set_limits(self._tier.target_bytes // 2, self._tier.room().free_bytes)


def _passthrough_off(config: Config) -> str:
    """Why passthrough is not asked for; empty if it is."""
    if config.passthrough == "off":
        return f"switched off ({config.origins.get('passthrough', 'default')})"
    if os.geteuid() != 0:
        return "the kernel grants it only to root"
    return ""


def _only(error: BaseException) -> BaseException:
    """The one error in a group of one, however deep."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def run(
    config: Config,
    state: StateDirectory,
    ready: int | None = None,
    manager: ServiceManager | None = None,
) -> None:
    """Serves a mount in this process until it is unmounted. Raises KvfsError when it cannot start."""
    time = "" if notes_the_time(sys.stderr.fileno(), os.environ) else "%(asctime)s "
    logging.basicConfig(
        level=config.log_level.upper(), format=f"{time}%(levelname)s %(name)s: %(message)s", force=True
    )
    ignore_lease_breaks()
    _protect_from_oom()
    created = state.create()
    state.acquire()
    state.write_config(config)
    keep = False
    tier: DramTier | None = None
    ssd: SsdTier | None = None
    try:
        tier = DramTier.attach(state.dram, config.pool_bytes, config.hugepages, config.numa)
        keep = not created or bool(tier.list(b""))
        if config.ssd:
            ssd = SsdTier.attach(_ssd_place(config, state))
            begin_turn(tier, ssd)
        daemon = Daemon(config, state, tier, ssd, manager)
        daemon.run(ready)
        keep = config.keep
        if ssd is not None and daemon.is_flushed:
            ssd.close_cleanly()
    finally:
        if ssd is not None:
            ssd.close()
        keep = state.take_keep() or keep
        if tier is not None:
            tier.close(keep=keep)
        if keep:
            state.release()
        else:
            state.remove()
    log.info("unmounted %s%s", config.mountpoint, ", DRAM kept" if keep else "")


def _ssd_place(config: Config, state: StateDirectory) -> SsdPlace:
    return SsdPlace(
        Path(config.ssd),
        config.ssd_capacity_bytes,
        config.mountpoint,
        state.dram,
        config.state_dir,
        discard_incompatible=config.discard_incompatible,
        step=lambda name: step(f"ssd.{name}"),
    )


def _protect_from_oom() -> None:
    with suppress(PermissionError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(str(OOM_SCORE_ADJUSTMENT))


def main() -> None:
    """``python -m kvfs.daemon --config-json FD``: what `kvfs mount` starts in the background."""
    parser = argparse.ArgumentParser(prog="kvfs.daemon")
    parser.add_argument("--config-json", type=int, required=True, metavar="FD")
    descriptor = parser.parse_args().config_json
    with open(descriptor, "rb") as file:
        config = configuration.from_json(file.read())
    ready = int(os.environ.pop("KVFS_READY_FD"))
    os.set_inheritable(ready, False)
    state = StateDirectory.for_mountpoint(config.mountpoint, config.state_dir)
    try:
        run(config, state, ready)
    except KvfsError as error:
        line = " ".join(str(error).split())
        with suppress(OSError):
            os.write(ready, f"error {error.exit_code} {line}\n".encode())
        log.error("%s", line)  # noqa: TRY400
        sys.exit(error.exit_code)
    except Exception:
        log.exception("the daemon ends: this is a bug")
        sys.exit(EXIT_BUG)


if __name__ == "__main__":
    main()
