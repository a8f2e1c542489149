"""A mount by somebody who is not root: slower, never wrong, and never above its cap."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.mounted.children import skip_unless_users_can_run_kvfs, start, wait
from tests.mounted.operations import USER_ID, pattern
from tests.mounted.running import MIB, KvfsMount, is_alive, mountinfo, wait_sealed, wait_until

pytestmark = [pytest.mark.as_root, pytest.mark.deadline(120)]
DATA = pattern(31, MIB)
POOL = 128 * MIB


def as_ordinary_user(base: Path, work: object) -> None:
    """Run ``work`` on a mount of an ordinary user."""
    assert callable(work)
    skip_unless_users_can_run_kvfs()
    if not os.path.exists("/etc/mtab"):
        pytest.skip("fusermount3 does not mount: there is no /etc/mtab")
    base.mkdir()
    os.chown(base, USER_ID, USER_ID)

    def scenario() -> None:
        environment = {"HOME": str(base), "XDG_RUNTIME_DIR": str(base), "USER": "somebody"}
        with KvfsMount(base / "own", POOL, environment=environment) as mount:
            work(mount)
            mount.umount()
            assert not list(mount.state_base.iterdir())

    left = set(os.listdir("/dev/shm"))
    assert wait(start(scenario, user=USER_ID)) == 0
    assert set(os.listdir("/dev/shm")) <= left, "files are left on /dev/shm"


def test_it_serves_and_says_what_is_lost(scratch: Path) -> None:
    def work(mount: KvfsMount) -> None:
        path = mount.path / "page"
        path.write_bytes(DATA)
        wait_sealed(path)
        assert path.read_bytes() == DATA
        assert path.stat().st_uid == USER_ID
        status = mount.status()
        assert not status["passthrough"]["active"]
        assert status["passthrough"]["reason"]
        (fields,) = mountinfo(mount.path)
        assert fields[-3] == "fuse.kvfs"

    as_ordinary_user(scratch / "serves", work)


def test_its_cap_is_kept(scratch: Path) -> None:
    def work(mount: KvfsMount) -> None:
        for number in range(300):
            (mount.path / f"{number}").write_bytes(DATA)
            if number % 50 == 49:
                assert mount.used_bytes() <= POOL
        assert mount.status()["evictions"] > 0
        assert (mount.path / "299").read_bytes() == DATA

    as_ordinary_user(scratch / "cap", work)


def test_its_pages_survive_a_kill(scratch: Path) -> None:
    def work(mount: KvfsMount) -> None:
        path = mount.path / "page"
        path.write_bytes(DATA)
        wait_sealed(path)
        mount.kill_daemon()
        mount.remount()
        assert path.read_bytes() == DATA
        assert len(mountinfo(mount.path)) == 1
        os.kill(mount.daemon_pid, 15)
        wait_until(lambda: not is_alive(mount.daemon_pid), 10, "the daemon has ended")
        mount.mount()

    as_ordinary_user(scratch / "kill", work)
