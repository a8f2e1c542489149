"""How soon a mount serves the pages of its SSD after a start, and how soon it knows all of them."""

from __future__ import annotations

import compileall
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import track

import kvfs
from benches.measure import MIB, Row, time_text
from kvfs.copies.direct import DirectCopier
from kvfs.interleaved import finish
from kvfs.page import OWNER, digest_of
from kvfs.state import StateDirectory
from kvfs.tiers.ssd import SsdPlace, SsdTier
from kvfs.tiers.ssd_pages import NewPage
from tests.mounted.running import KvfsMount, wait_until

PAGES = 100_000
SIZE = 4096
IN_A_DIRECTORY = 1000
CAPACITY = 2 << 30
ROUNDS = 3
FIRST_READ_MUST = 1.0
WALK_MUST = 5.0
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def content_of(number: int) -> bytes:
    return number.to_bytes(8, "little") * (SIZE // 8)


def path_of(number: int) -> bytes:
    return b"pages/%d/%d" % (number // IN_A_DIRECTORY, number)


def measure_restarts(base: Path, ssd: Path) -> Iterator[Row]:
    """After a clean unmount, what DRAM had is gone: every page is on the SSD alone, as after a reboot."""
    options = ("--ssd", str(ssd), "--ssd-capacity", str(CAPACITY))
    compileall.compile_dir(Path(kvfs.__file__).parent, quiet=1)  # as pip does when it installs
    with KvfsMount(base / "restart", 64 * MIB, *options) as mount:
        mount.umount()
        fill(ssd, mount)
        for what, forget in (("", False), (", cold disk", True)):
            yield from rows(mount, ssd, what, forget=forget)


def fill(ssd: Path, mount: KvfsMount) -> None:
    """Stores the pages as a mount would, without one: it takes a third of the time."""
    state = StateDirectory.for_mountpoint(mount.path, mount.state_base)
    tier = SsdTier.attach(SsdPlace(ssd, CAPACITY, mount.path, state.dram, mount.state_base))
    copier, file, directory = DirectCopier(), {OWNER: b"100644 0 0"}, {OWNER: b"40755 0 0"}
    source = os.memfd_create("page")
    try:
        what = f"storing {PAGES} pages"
        for number in track(range(PAGES), what, console=Console(file=sys.stderr), transient=True):
            content = content_of(number)
            os.pwrite(source, content, 0)
            page = NewPage(digest_of(content), file, time.time_ns(), time.time_ns())
            written = finish(tier.write_page(page, source, copier.write))
            tier.publish_page(written, [(path_of(number), [directory, directory])])
    finally:
        os.close(source)
        tier.close()
        copier.close()


def rows(mount: KvfsMount, ssd: Path, what: str, *, forget: bool) -> Iterator[Row]:
    first, walks, processor, plain = [], [], [], []
    for number in range(ROUNDS):
        settle(forget=forget)
        plain.append(walk_plainly(ssd))
        settle(forget=forget)
        start = time.perf_counter()
        mount.mount()
        wanted = (number * 2 + 1) * PAGES // (2 * ROUNDS)
        if (mount.path / os.fsdecode(path_of(wanted))).read_bytes() != content_of(wanted):
            raise AssertionError(f"page {wanted} is not as it was stored")
        first.append(time.perf_counter() - start)
        wait_until(lambda: mount.status()["tiers"]["ssd"]["working"], 120, "all is walked")
        walks.append(time.perf_counter() - start)
        processor.append(processor_seconds(mount.daemon_pid))
        pages = sum(tier["pages"] for tier in mount.status()["tiers"].values())  # each where it is read from
        if pages != PAGES:
            raise AssertionError(f"{pages} pages are known, not {PAGES}")
        mount.umount()
    walk, used, limit = (statistics.median(values) for values in (walks, processor, plain))
    read = statistics.median(first)
    name = f"restart with {PAGES} pages{what}"
    note = f"processor {used:.1f} s, find {limit:.1f} s"
    yield Row(f"{name}: first read", time_text(read), "", read, FIRST_READ_MUST, unit="s", better="lower")
    yield Row(f"{name}: all walked", time_text(walk), note, walk, WALK_MUST, unit="s", better="lower")


def settle(*, forget: bool) -> None:
    """Nothing is left to be written; with ``forget``, the kernel knows nothing of the disk any more."""
    os.sync()
    if forget:
        DROP_CACHES.write_text("3")


def walk_plainly(directory: Path) -> float:
    """Seconds to ask for every file of a tree once."""
    start = time.perf_counter()
    subprocess.run(["find", directory, "-size", "+1G"], check=True)
    return time.perf_counter() - start


def processor_seconds(pid: int) -> float:
    """What a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
