from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from kvfs import mounts, syscalls
from kvfs.errors import MountpointError, OutOfRoom, UsageError
from tests.namespaces import skip_unless_namespaces_can_be_private
from tests.tiers.conftest import mounted_tmpfs, needs_root
from tests.tiers.drams import MEBIBYTE, attach, is_oversized, write

pytestmark = needs_root


def shared_memory_bytes() -> int:
    """What all tmpfs files of the host occupy."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) << 10
    raise AssertionError


def test_a_new_tier_is_a_private_tmpfs(state: Path) -> None:
    tier = attach(state)
    assert tier.name == "dram"
    assert tier.is_private
    assert tier.attribute_prefix == "trusted.kvfs."
    assert state.stat().st_mode & 0o7777 == 0o700
    wanted = {"nosuid", "nodev", "noexec", "huge=within_size", "noswap", "inode64"}
    assert wanted <= set(tier.options) | set(tier.missing)
    room = tier.room()
    assert room.total_bytes == room.free_bytes == 64 * MEBIBYTE
    assert room.total_inodes == 1 << 18
    assert not is_oversized(tier)
    tier.close()
    assert mounts.find(state) == []
    assert os.listdir(state) == []


def test_writing_is_seen_in_the_room_at_once(state: Path) -> None:
    tier = attach(state)
    write(tier, b"page", 3 * MEBIBYTE)
    assert tier.room().used_bytes == 3 * MEBIBYTE
    fd = tier.open(b"page", os.O_RDONLY)
    tier.unlink(b"page")
    assert tier.room().used_bytes == 3 * MEBIBYTE, "an unlinked file that is open still occupies memory"
    os.close(fd)
    assert tier.room().used_bytes == 0
    tier.account(12345)
    assert tier.room().used_bytes == 0, "a private tier needs no telling"
    tier.close()


def test_closing_frees_the_memory_though_another_namespace_holds_the_mount(state: Path) -> None:
    skip_unless_namespaces_can_be_private()
    tier = attach(state, 256 * MEBIBYTE)
    size = 128 * MEBIBYTE
    tier.mkdir(b"d")
    write(tier, b"d/page", size)
    process = subprocess.Popen(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", "echo ready; exec sleep 60"],
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        before = shared_memory_bytes()
        tier.close()
        assert mounts.find(state) == []
        mounted_there = Path(f"/proc/{process.pid}/mountinfo").read_text()
        assert str(state) in mounted_there
        assert before - shared_memory_bytes() > size * 0.9
    finally:
        process.kill()
        process.communicate()


def test_a_tier_in_use_is_unmounted_all_the_same(state: Path) -> None:
    tier = attach(state)
    write(tier, b"page", MEBIBYTE)
    fd = tier.open(b"page", os.O_RDONLY)
    before = os.pread(fd, MEBIBYTE, 0)
    tier.close()
    assert mounts.find(state) == []
    assert os.pread(fd, MEBIBYTE, 0) == before, "who has a page open keeps it"
    os.close(fd)


def test_closing_twice_or_after_somebody_else_unmounted_is_no_failure(state: Path) -> None:
    tier = attach(state)
    syscalls.umount2(state, syscalls.MNT_DETACH)
    tier.close()
    tier.close()
    with mounted_tmpfs(state) as other:
        tier = attach(state)
        tier.close(keep=True)
        (other / "kept").touch()
        tier.close()
        assert (other / "kept").exists()


def test_a_foreign_mount_on_top_is_not_unmounted(state: Path) -> None:
    tier = attach(state)
    with mounted_tmpfs(state):
        tier.close()
        assert mounts.find(state)[-1].source == "kvfs-test"
    syscalls.umount2(state)


def test_kept_pages_and_their_attributes_are_found_again(state: Path) -> None:
    tier = attach(state)
    tier.mkdir(b"d")
    write(tier, b"d/page", MEBIBYTE)
    tier.set_attribute(b"d/page", "digest", b"d")
    tier.close(keep=True)
    assert len(mounts.find(state)) == 1
    tier = attach(state)
    assert len(mounts.find(state)) == 1
    assert {found.path: found.attributes for found in tier.walk()} == {
        b"d": {},
        b"d/page": {"digest": b"d"},
    }
    tier.close()


def test_after_a_crash_the_next_process_takes_the_tmpfs_over(state: Path) -> None:
    child = os.fork()
    if not child:
        write(attach(state), b"page", MEBIBYTE)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    tier = attach(state, 128 * MEBIBYTE)
    assert tier.stat(b"page").st_size == MEBIBYTE
    assert tier.room().total_bytes == 128 * MEBIBYTE
    tier.close()


def test_a_smaller_pool_that_everything_fits_into_is_given_at_once(state: Path) -> None:
    tier = attach(state, 64 * MEBIBYTE)
    write(tier, b"page", 10 * MEBIBYTE)
    tier.close(keep=True)
    tier = attach(state, 16 * MEBIBYTE)
    assert not is_oversized(tier)
    assert tier.room().total_bytes == 16 * MEBIBYTE
    tier.close()


def test_a_smaller_pool_waits_until_enough_is_evicted(state: Path) -> None:
    tier = attach(state, 64 * MEBIBYTE)
    for number in range(8):
        write(tier, b"%d" % number, 4 * MEBIBYTE)
    tier.close(keep=True)
    tier = attach(state, 16 * MEBIBYTE)
    assert is_oversized(tier)
    assert tier.target_bytes == 16 * MEBIBYTE
    assert tier.room().total_bytes == 64 * MEBIBYTE
    with pytest.raises(OutOfRoom, match=r"holds 32\.0 MiB, more than the pool of 16\.0 MiB"):
        tier.resize(16 * MEBIBYTE)
    for number in range(4):
        tier.unlink(b"%d" % number)
    tier.resize(16 * MEBIBYTE)
    assert not is_oversized(tier)
    assert tier.room().total_bytes == 16 * MEBIBYTE
    assert tier.room().free_bytes == 0
    assert len(tier.list(b"")) == 4
    tier.close()


def test_more_files_than_a_smaller_pool_plans_for_are_no_obstacle(state: Path) -> None:
    tier = attach(state, 5 << 30)
    assert tier.room().total_inodes == 327_680
    for number in range(270_000):
        os.close(tier.create(b"%d" % number))
    tier.resize(64 * MEBIBYTE)
    room = tier.room()
    assert room.total_bytes == 64 * MEBIBYTE
    assert room.total_inodes >= 270_000
    tier.close()


def test_a_pool_that_is_no_whole_number_of_pages_is_not_oversized(state: Path) -> None:
    tier = attach(state, 10 * MEBIBYTE + 1)
    assert not is_oversized(tier)
    tier.close()


def test_another_filesystem_in_its_place_is_refused_and_left_alone(state: Path) -> None:
    state.mkdir(parents=True)
    syscalls.mount("proc", state, "proc", 0)
    try:
        with pytest.raises(MountpointError, match="proc from proc"):
            attach(state)
        assert len(mounts.find(state)) == 1
    finally:
        syscalls.umount2(state)


def test_a_numa_node_that_is_not_there_mounts_nothing(state: Path) -> None:
    with pytest.raises(UsageError, match="NUMA"):
        attach(state, numa="77")
    assert not state.exists()


@pytest.mark.parametrize(("numa", "option"), [("interleave", "mpol=interleave"), ("0", "mpol=bind")])
def test_memory_policy_reaches_the_kernel(state: Path, numa: str, option: str) -> None:
    tier = attach(state, numa=numa)
    assert any(one.startswith(option) for one in tier.options)
    tier.close()


def test_a_lookup_stays_fast_among_many_files(state: Path) -> None:
    """The floor of everything above: loose bounds, so that a busy machine does not fail it."""
    tier = attach(state, 256 * MEBIBYTE)
    paths = [b"%02x/%d" % (number % 64, number) for number in range(20_000)]
    for number in range(64):
        tier.mkdir(b"%02x" % number)
    for path in paths:
        fd = tier.create(path)
        tier.set_attribute(fd, "digest", b"x" * 60)
        tier.set_attribute(fd, "owner", b"100644 0 0")
        os.close(fd)
    start = time.process_time()
    for path in paths:
        tier.stat(path)
    assert (time.process_time() - start) / len(paths) < 20e-6
    start = time.process_time()
    assert sum(len(found.attributes) for found in tier.walk()) == 40_000
    assert (time.process_time() - start) / len(paths) < 80e-6
    tier.close()
