"""Many programs at once ask for more than a mount can move: it takes what it has room for, and no more."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from pathlib import Path

import pytest

from tests.faults.small_mounts import SIZE, data, serving
from tests.mounted.running import MIB, wait_sealed

pytestmark = [pytest.mark.as_root, pytest.mark.deadline(120)]

READERS = 40
WRITERS = 8
#: A chunk or two of each page that is read or written at that moment, and what a copy of a page in C needs.
MOST_MEMORY = 128 * MIB


def peak_bytes(pid: int) -> int:
    """The most memory that a process has had, its mappings of files aside."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return (int(fields["VmHWM"].split()[0]) - int(fields["RssFile"].split()[0])) << 10


def test_a_full_pool_is_no_failure_of_the_ssd(base: Path) -> None:
    """One writer takes most of DRAM again and again, four readers ask for pages of the SSD meanwhile: none
    hears of anything but ENOSPC."""
    with serving(base, base, pool_bytes=48 * MIB) as mount:
        paths = [mount.path / f"{number:02}" for number in range(20)]
        for number, path in enumerate(paths):
            path.write_bytes(data(number) * 2)
        wait_sealed(*paths, seconds=60)
        mount.wait_stored()
        end, failures, served = time.monotonic() + 8, list[str](), list[int]()

        def write() -> None:
            while time.monotonic() < end:
                try:
                    (mount.path / "writer").write_bytes(bytes(40 * MIB))
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EFBIG):
                        failures.append(f"writer: {error}")
                (mount.path / "writer").unlink(missing_ok=True)

        def read(reader: int) -> None:
            chance = random.Random(reader)
            while time.monotonic() < end:
                number = chance.randrange(len(paths))
                try:
                    content = paths[number].read_bytes()
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        failures.append(f"{paths[number]}: {error}")
                    continue
                served.append(number)
                if content != data(number) * 2:
                    failures.append(f"{paths[number]}: {len(content)} other bytes")

        threads = [threading.Thread(target=write)]
        threads += [threading.Thread(target=read, args=(reader,)) for reader in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures[:5]
        assert len(served) > 20
        assert "SSD tier fails" not in mount.log
        assert not mount.is_troubled()


def test_forty_readers_and_eight_writers_share_a_small_pool(base: Path) -> None:
    """Four times what DRAM holds is read and written at once: right bytes or ENOSPC, and a daemon that keeps
    its size."""
    with serving(base, base, "--io-timeout", "30s") as mount:
        paths = [mount.path / f"{number:02}" for number in range(60)]
        for number, path in enumerate(paths):
            path.write_bytes(data(number))
        wait_sealed(*paths, seconds=60)
        mount.wait_stored()
        before = peak_bytes(mount.daemon_pid)
        failures: list[str] = []
        served = [0] * READERS

        def read(reader: int) -> None:
            chance = random.Random(reader)
            for _ in range(10):
                number = chance.randrange(len(paths))
                try:
                    content = paths[number].read_bytes()
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        failures.append(f"{paths[number]}: {error}")
                    continue
                served[reader] += 1
                if content != data(number):
                    failures.append(f"{paths[number]}: {len(content)} other bytes")

        def write(writer: int) -> None:
            for number in range(8):
                path = mount.path / f"writer-{writer}-{number}"
                try:
                    path.write_bytes(data(writer))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        failures.append(f"{path}: {error}")

        programs = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
        programs += [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
        for program in programs:
            program.start()
        for program in programs:
            program.join()
        assert not failures, (failures[:3], mount.log[-3000:])
        assert sum(served) > READERS * 5
        assert peak_bytes(mount.daemon_pid) - before < MOST_MEMORY
        assert mount.tier("dram")["used_bytes"] <= 64 * MIB
        assert mount.tier("ssd")["read_bytes"] > 20 * SIZE
        room = os.statvfs(mount.path)
        assert 0 <= room.f_bfree <= room.f_blocks
