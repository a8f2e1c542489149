"""What the mount tells of itself: control files, attributes of pages, du and df."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.mounted.operations import pattern
from tests.mounted.running import MIB, PAGE, KvfsMount, wait_sealed, wait_until

DATA = pattern(23, MIB)


def test_control_files_are_found_but_not_listed(mount: KvfsMount) -> None:
    control = mount.path / ".kvfs"
    assert ".kvfs" not in os.listdir(mount.path)
    assert control.is_dir()
    assert {"status", "status.json", "metrics", "config"} <= set(os.listdir(control))
    for name in os.listdir(control):
        path = control / name
        if not path.is_file():
            assert name == "socket"
            continue
        text = path.read_text()
        assert text
        assert text.endswith("\n")
    found = subprocess.run(["find", str(mount.path), "-name", "*kvfs*"], capture_output=True, check=True)
    assert str(control).encode() not in found.stdout.splitlines()


def test_status_has_what_is_promised(mount: KvfsMount, mode: str) -> None:
    status = mount.status()
    assert status["mount"] == str(mount.path)
    assert status["pid"] == mount.daemon_pid
    assert status["version"]
    assert status["uptime_seconds"] >= 0
    for feature in ("passthrough", "hugepages"):
        assert isinstance(status[feature]["active"], bool)
        assert status[feature]["active"] or status[feature]["reason"]
    assert status["passthrough"]["active"] == (mode == "passthrough")
    dram = status["tiers"]["dram"]
    assert 0 <= dram["used_bytes"] <= dram["capacity_bytes"] <= mount.pool_bytes
    assert dram["pages"] == 0
    for number in ("drafts", "unsealed", "evictions"):
        assert status[number] >= 0
    assert status["hits"]["dram"] >= 0
    for reasons in ("misses", "failures"):
        assert all(count >= 0 for count in status[reasons].values())
    assert all({"value", "origin"} <= set(entry) for entry in status["config"].values())
    assert json.loads((mount.path / ".kvfs/config").read_text()) == status["config"]


def test_why_passthrough_is_off_is_said(mount: KvfsMount, mode: str) -> None:
    if mode == "daemon-io":
        assert "KVFS_PASSTHROUGH" in mount.status()["passthrough"]["reason"]


def test_metrics_are_prometheus_text(mount: KvfsMount, directory: Path) -> None:
    (directory / "page").write_bytes(DATA)
    wait_sealed(directory / "page")
    families = list(text_string_to_metric_families((mount.path / ".kvfs/metrics").read_text()))
    samples = [sample for family in families for sample in family.samples]
    assert samples
    for family in families:
        assert family.name.startswith(("kvfs_", "process_", "python_")), family.name
        assert family.documentation
    for sample in samples:
        assert not any("page" in str(value) and "/" in str(value) for value in sample.labels.values())
    used = [sample.value for sample in samples if "used" in sample.name and sample.name.endswith("bytes")]
    assert any(value >= MIB for value in used)


def test_a_page_tells_its_digest_tier_hits_and_seal(mount: KvfsMount, directory: Path) -> None:
    path = directory / "page"
    path.write_bytes(DATA)
    wait_sealed(path)
    assert {f"user.kvfs.{name}" for name in ("digest", "tier", "hits", "sealed")} <= set(os.listxattr(path))
    assert os.getxattr(path, "user.kvfs.tier") == b"dram"
    assert os.getxattr(path, "user.kvfs.sealed")
    before = int(os.getxattr(path, "user.kvfs.hits"))
    hits = mount.status()["hits"]["dram"]
    for _ in range(25):
        assert path.read_bytes() == DATA
    wait_until(lambda: int(os.getxattr(path, "user.kvfs.hits")) == before + 25, 5, "25 more hits of the page")
    assert mount.status()["hits"]["dram"] >= hits + 25


def test_a_draft_shows_no_digest(mount: KvfsMount, directory: Path) -> None:
    path = directory / "draft"
    with open(path, "wb", buffering=0) as file:
        file.write(DATA)
        assert "user.kvfs.digest" not in os.listxattr(path)
        with pytest.raises(OSError, match="No data available"):
            os.getxattr(path, "user.kvfs.digest")
        assert mount.status()["drafts"] >= 1


def test_du_and_df_agree_to_within_a_page_for_each_file(mount: KvfsMount, directory: Path) -> None:
    before = mount.used_bytes()
    sizes = [1, 100, 4096, 4097, 100_000, MIB, 2 * MIB, 5 * MIB + 3]
    for number, size in enumerate(sizes * 4):
        (directory / f"{number}").write_bytes((DATA * 6)[:size])
    wait_sealed(*directory.iterdir())
    command = ["du", "-s", "--block-size=1", str(directory)]
    measured = int(subprocess.run(command, capture_output=True, check=True).stdout.split()[0])
    used = mount.used_bytes() - before
    assert abs(measured - used) <= PAGE * (len(sizes) * 4 + 1), (measured, used)
    assert 0 <= used - sum(sizes) * 4 <= PAGE * (len(sizes) * 4 + 1)
    apparent = sum(path.stat().st_size for path in directory.iterdir())
    assert apparent == sum(sizes) * 4


def test_used_is_nothing_again_when_all_is_removed(mount: KvfsMount, directory: Path) -> None:
    before = mount.used_bytes()
    for number in range(50):
        (directory / f"{number}").write_bytes(DATA)
    assert mount.used_bytes() - before >= 50 * MIB
    subprocess.run(["rm", "-r", *map(str, directory.iterdir())], check=True)
    wait_until(lambda: mount.used_bytes() - before <= PAGE, 5, "the room is back")


def test_statfs_names_what_it_is(mount: KvfsMount) -> None:
    room = os.statvfs(mount.path)
    assert room.f_namemax == 255
    assert room.f_bsize >= PAGE
    assert 0 < room.f_bavail <= room.f_bfree <= room.f_blocks
    command = ["df", "--output=source,fstype,size", "-B1", str(mount.path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[1].split() == ["kvfs", "fuse.kvfs", str(mount.pool_bytes)]
