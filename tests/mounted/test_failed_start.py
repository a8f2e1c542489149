"""A daemon that fails after it has mounted: one line, nothing left mounted, nobody hangs."""

from __future__ import annotations

import mmap
import time

from tests.mounted.conftest import MakeMount
from tests.mounted.operations import pattern
from tests.mounted.running import MIB, mountinfo, wait_sealed

DATA = pattern(3, MIB)


def test_a_smaller_pool_whose_pages_are_all_in_use_is_refused(make_mount: MakeMount) -> None:
    mount = make_mount(128 * MIB)
    mount.mount()
    paths = [mount.path / f"page-{number}" for number in range(40)]
    mappings = []
    for path in paths:
        path.write_bytes(DATA)
    wait_sealed(*paths)
    for path in paths:
        with path.open("rb") as file:
            mappings.append(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    mount.kill_daemon()
    start = time.monotonic()
    ended = mount.try_mount(pool_bytes=16 * MIB)
    assert time.monotonic() - start < 15
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert "the pool cannot shrink to 16.0 MiB: pages of 40.0 MiB are in use" in line
    assert "larger --pool" in line
    assert mountinfo(mount.path) == []
    assert all(mapping[:] == DATA for mapping in mappings)
    for mapping in mappings:
        mapping.close()
    mount.mount()
    assert all(path.read_bytes() == DATA for path in paths)
    mount.umount()
