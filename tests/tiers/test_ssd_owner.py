from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.errors import TierInUse, TierUnusable
from kvfs.tiers import ssd_owner
from tests.conftest import LogGuard
from tests.tiers.conftest import needs_root
from tests.tiers.ssds import attach, check_accounts, mounted_disk, pages, read, store, tree


def owner_file(directory: Path) -> dict[str, object]:
    text = (directory / ".kvfs-owner").read_bytes()
    assert len(text) == 512
    loaded: dict[str, object] = json.loads(text)
    return loaded


def test_a_missing_directory_is_made_for_its_owner_alone(ssd: Path) -> None:
    tier = attach(ssd)
    assert ssd.stat().st_mode & 0o7777 == 0o700
    assert sorted(os.listdir(ssd)) == [".kvfs-owner", ".kvfs-quarantine", ".kvfs-temporary"]
    assert tier.direct
    assert not tier.suspect
    assert tier.attribute_prefix == "trusted.kvfs."
    check_accounts(tier)
    tier.close()


def test_the_directory_says_who_has_it_and_how_the_last_stop_was(ssd: Path) -> None:
    tier = attach(ssd)
    store(tier, b"a/page", b"x" * 5000)
    held = owner_file(ssd)
    assert (held["mount"], held["process"], held["clean"]) == ("/mnt/of-a-test", os.getpid(), False)
    assert (held["layout"], held["tier"]) == (ssd_owner.LAYOUT, tier.identity)
    tier.close_cleanly()
    left = owner_file(ssd)
    assert (left["process"], left["clean"], left["tier"]) == (0, True, held["tier"])
    tier = attach(ssd)
    assert tier.identity == held["tier"]
    assert not tier.suspect
    assert tier.accounts.is_counted
    check_accounts(tier)
    tier.close()
    tier = attach(ssd)
    assert tier.suspect
    assert not tier.accounts.is_counted
    assert pages(tier) == {b"a/page"}
    check_accounts(tier)
    tier.close()


def test_pages_stay_suspect_over_a_clean_stop_until_all_were_checked(ssd: Path) -> None:
    attach(ssd).close()
    for _ in range(2):
        tier = attach(ssd)
        assert tier.suspect
        pages(tier)
        tier.close_cleanly()
    tier = attach(ssd)
    pages(tier)
    tier.suspect = False
    tier.close_cleanly()
    tier = attach(ssd)
    assert not tier.suspect
    tier.close()


def test_an_uncounted_tier_never_stops_cleanly(ssd: Path) -> None:
    attach(ssd).close()
    tier = attach(ssd)
    tier.suspect = False
    tier.close_cleanly()
    assert owner_file(ssd)["clean"] is False


def test_a_second_owner_is_refused_and_told_who_has_it(ssd: Path) -> None:
    tier = attach(ssd)
    before = tree(ssd)
    with pytest.raises(
        TierInUse, match=rf"^{ssd} is in use by the mount /mnt/of-a-test \(process {os.getpid()}"
    ):
        attach(ssd)
    (ssd / ".kvfs-owner").rename(ssd.parent / "taken-away")
    with pytest.raises(TierInUse, match="in use by another kvfs"):
        attach(ssd)
    (ssd.parent / "taken-away").rename(ssd / ".kvfs-owner")
    assert tree(ssd) == before
    tier.close()
    attach(ssd).close()


def test_another_process_is_refused_and_takes_over_when_the_owner_is_killed(ssd: Path) -> None:
    program = (
        "import sys, pathlib; from tests.tiers.ssds import attach; tier = attach(pathlib.Path(sys.argv[1])); "
        "print('taken', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, ssd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"taken\n"
        with pytest.raises(TierInUse, match=rf"process {child.pid} "):
            attach(ssd)
    finally:
        child.kill()
        child.communicate(timeout=10)
    tier = attach(ssd)
    assert tier.suspect
    tier.close()


def test_a_long_name_of_the_mount_is_cut_not_refused(ssd: Path) -> None:
    for mountpoint in (Path("/mnt/" + "x" * 3000), Path("/mnt/" + '"\\' * 200)):
        tier = attach(ssd, mountpoint=mountpoint)
        held = owner_file(ssd)
        assert str(mountpoint).startswith(str(held["mount"]))
        assert len(str(held["mount"])) > 20
        tier.close()


def test_no_descriptor_is_left_whatever_happens(ssd: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tier = attach(ssd)
    for _ in range(3):
        with pytest.raises(TierInUse):
            attach(ssd)
    tier.close()
    tier.close()
    assert tier.root_fd == -1
    (ssd / ".kvfs-owner").write_bytes(b"{}")
    with pytest.raises(TierUnusable):
        attach(ssd)
    assert len(os.listdir("/proc/self/fd")) == before


# Layouts


def set_layout(directory: Path, layout: int) -> None:
    text = json.loads((directory / ".kvfs-owner").read_bytes())
    text = {"layout": layout, "prefix": "trusted.kvfs.", "of tomorrow": True} if layout > 1 else text
    (directory / ".kvfs-owner").write_text(json.dumps(text | {"layout": layout}).ljust(512))


def test_an_older_layout_is_read_and_becomes_ours(ssd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = attach(ssd)
    store(tier, b"page", b"content")
    tier.close_cleanly()
    monkeypatch.setattr("kvfs.tiers.ssd_owner.LAYOUT", 2)
    monkeypatch.setattr("kvfs.tiers.ssd.LAYOUT", 2)
    tier = attach(ssd)
    assert owner_file(ssd)["layout"] == 2
    assert read(tier, b"page") == b"content"
    tier.close()
    monkeypatch.setattr("kvfs.tiers.ssd_owner.LAYOUT", 4)
    monkeypatch.setattr("kvfs.tiers.ssd_owner.OLDEST_LAYOUT", 3)
    with pytest.raises(TierUnusable, match="has layout 2, this kvfs has"):
        attach(ssd)


def test_a_newer_layout_is_refused_and_nothing_changes(ssd: Path) -> None:
    tier = attach(ssd)
    store(tier, b"a/page", b"content")
    tier.close_cleanly()
    set_layout(ssd, 2)
    before = tree(ssd)
    with pytest.raises(TierUnusable, match=r"has layout 2, this kvfs has 1.*--discard-incompatible"):
        attach(ssd)
    assert tree(ssd) == before


def test_a_newer_layout_can_be_discarded_but_for_what_is_not_ours(ssd: Path, expect_log: LogGuard) -> None:
    tier = attach(ssd)
    for path in (b"a/page", b"b/page", b"page"):
        store(tier, path, b"content")
    (ssd / "a" / "notes").write_text("mine")
    tier.close_cleanly()
    set_layout(ssd, 2)
    expect_log("1 files or directories that are not ours, and stay: a/notes")
    tier = attach(ssd, discard_incompatible=True)
    assert sorted(path.name for path in ssd.rglob("*") if not path.name.startswith(".kvfs")) == ["a", "notes"]
    assert not tier.suspect
    assert owner_file(ssd)["layout"] == ssd_owner.LAYOUT
    store(tier, b"a/page", b"new")
    tier.close_cleanly()


def test_an_owner_file_that_cannot_be_read_is_refused_and_can_be_removed(ssd: Path) -> None:
    tier = attach(ssd)
    store(tier, b"page", b"content")
    tier.close_cleanly()
    for text in (b"", b"\0" * 512, b'{"layout": "new"}'):
        (ssd / ".kvfs-owner").write_bytes(text)
        with pytest.raises(TierUnusable, match=r"\.kvfs-owner cannot be read; remove it"):
            attach(ssd)
    (ssd / ".kvfs-owner").unlink()
    tier = attach(ssd)
    assert tier.suspect
    assert read(tier, b"page") == b"content"
    tier.close()


def test_what_a_killed_process_left_of_its_owner_file_goes(ssd: Path) -> None:
    attach(ssd).close()
    (ssd / ".kvfs-owner.12345").touch()
    attach(ssd).close()
    assert not (ssd / ".kvfs-owner.12345").exists()


@needs_root
def test_a_disk_that_takes_no_more_is_let_go_all_the_same(tmp_path: Path, expect_log: LogGuard) -> None:
    expect_log("could not be left in order: Read-only file system")
    with mounted_disk(tmp_path / "disk", "ext4", 64) as directory:
        tier = attach(directory / "tier", 32 << 20)
        store(tier, b"page", b"content")
        subprocess.run(["mount", "-o", "remount,ro", directory], check=True)
        tier.close_cleanly()
        assert tier.root_fd == -1
        subprocess.run(["mount", "-o", "remount,rw", directory], check=True)
        tier = attach(directory / "tier", 32 << 20)
        assert tier.suspect
        assert pages(tier) == {b"page"}
        tier.close()
