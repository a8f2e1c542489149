from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from kvfs import mounts, syscalls
from kvfs.errors import MountpointError, UsageError
from kvfs.tiers import tmpfs
from tests.tiers.conftest import mounted_tmpfs, needs_root


def refuse(*refused: str) -> object:
    """A kernel that does not know these options."""
    genuine = syscalls.make_filesystem

    def make_filesystem(fstype: str, options: Mapping[str, str | None]) -> int:
        for option in options:
            if option in refused:
                raise OSError(22, f"tmpfs: Unknown parameter '{option}'")
        return genuine(fstype, options)

    return make_filesystem


def test_memory_policy() -> None:
    nodes = tmpfs.memory_nodes()
    assert tmpfs.memory_policy("") == ""
    assert tmpfs.memory_policy("interleave") == "mpol=interleave"
    assert tmpfs.memory_policy(str(nodes[0])) == f"mpol=bind:{nodes[0]}"


@pytest.mark.parametrize("numa", ["1023", "-1", "all", "0,1", "²"])
def test_a_node_that_is_not_there_is_the_users_mistake(numa: str) -> None:
    with pytest.raises(UsageError, match=r"NUMA node of this host that has memory: \d"):
        tmpfs.memory_policy(numa)


@pytest.mark.parametrize(
    ("text", "nodes"), [("0\n", [0]), ("0-3\n", [0, 1, 2, 3]), ("0,2-3,8\n", [0, 2, 3, 8])]
)
def test_node_lists(text: str, nodes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "has_memory").write_text(text)
    monkeypatch.setattr(tmpfs, "_NODES", tmp_path)
    assert tmpfs.memory_nodes() == nodes
    monkeypatch.setattr(tmpfs, "_NODES", tmp_path / "missing")
    assert tmpfs.memory_nodes() == [0]


@needs_root
def test_every_option_of_this_kernel_is_usable_or_missing_with_a_reason() -> None:
    options = tmpfs.probe_options("prefer", "interleave")
    wanted = {"huge=within_size", "noswap", "inode64", "mpol=interleave"}
    assert set(options.usable) | set(options.missing) == wanted
    assert all(options.missing.values())
    assert "huge=never" in tmpfs.probe_options("off", "").usable


@needs_root
def test_what_an_old_kernel_lacks_is_left_out_and_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(syscalls, "make_filesystem", refuse("noswap", "huge"))
    options = tmpfs.probe_options("prefer", "")
    assert options.usable == ["inode64"]
    assert set(options.missing) == {"noswap", "huge=within_size"}
    assert "Unknown parameter 'noswap'" in options.missing["noswap"]
    tmpfs.mount(tmp_path, 4 << 20, options)
    try:
        entry = tmpfs.top(tmp_path)
        assert entry is not None
        assert {"inode64", "mode=700", "nosuid", "nodev", "noexec"} <= set(entry.options)
        assert not any(option.startswith(("huge", "noswap")) for option in entry.options)
    finally:
        syscalls.umount2(tmp_path)


@pytest.mark.parametrize(
    ("pool_bytes", "least", "inodes"),
    [(1 << 20, 0, 1 << 18), (1 << 30, 0, 1 << 18), (64 << 30, 0, 4 << 20), (1 << 30, 300_000, 300_000)],
)
def test_the_number_of_files_follows_the_size(pool_bytes: int, least: int, inodes: int) -> None:
    assert tmpfs.limits(pool_bytes, least) == f"size={pool_bytes},nr_inodes={inodes}"


@needs_root
def test_only_a_tmpfs_is_taken_for_one(tmp_path: Path) -> None:
    assert tmpfs.top(tmp_path) is None
    with mounted_tmpfs(tmp_path):
        entry = tmpfs.top(tmp_path)
        assert entry is not None
        assert entry.fstype == "tmpfs"
        syscalls.mount("proc", tmp_path, "proc", 0)
        try:
            with pytest.raises(MountpointError, match="proc from proc is mounted where the DRAM tier"):
                tmpfs.top(tmp_path)
        finally:
            syscalls.umount2(tmp_path)
    assert mounts.find(tmp_path) == []


@needs_root
def test_an_adopted_tmpfs_gets_what_it_still_can(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path, "size=8m,huge=never,mpol=interleave"):
        options = tmpfs.probe_options("prefer", "")
        assert "noswap" in options.usable
        tmpfs.adopt(tmp_path, options)
        present = mounts.find(tmp_path)[-1].options
        assert "huge=within_size" in present
        assert "noswap" not in present
        assert "mpol=local" in present
        assert "noswap" not in options.usable
        assert "mounted without it before" in options.missing["noswap"]
        tmpfs.adopt(tmp_path, tmpfs.probe_options("off", "0"))
        present = mounts.find(tmp_path)[-1].options
        assert not any(option.startswith("huge=") for option in present)
        assert "mpol=bind:0" in present
