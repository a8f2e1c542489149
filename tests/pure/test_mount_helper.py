"""mount.kvfs as far as it goes without a mount: what it makes of options, and its exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvfs.cli import mount_helper
from kvfs.errors import KvfsError, UsageError, exit_codes


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("", {}),
        ("rw", {"options": ["rw"]}),
        ("rw,pool=64G,ssd=/nvme/kv", {"options": ["rw"], "pool": "64G", "ssd": "/nvme/kv"}),
        ("ssd-capacity=2T,ssd_read_path=direct", {"ssd_capacity": "2T", "ssd_read_path": "direct"}),
        ('ssd="/nvme/a,b",pool=25%', {"ssd": "/nvme/a,b", "pool": "25%"}),
        ("keep,discard-incompatible", {"keep": True, "discard_incompatible": True}),
        ("keep=no", {"keep": "no"}),
        ("owner=alice:users,mode=0750", {"owner": "alice:users", "mode": "0750"}),
        ("config=/etc/other.toml", {"config": "/etc/other.toml"}),
        ("pool=1G,pool=2G", {"pool": "2G"}),
        (
            "rw,nosuid,noatime,_netdev,nofail,user=alice,owner",
            {"options": ["rw", "nosuid", "noatime", "_netdev", "nofail", "user=alice", "owner"]},
        ),
        ("x-mount.mkdir,comment=a", {"options": ["x-mount.mkdir", "comment=a"]}),
    ],
)  # fmt: skip
def test_options_become_settings(text: str, settings: dict[str, Any]) -> None:
    assert mount_helper.parse_options(text) == settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pol=64G", "'pol=64G' is unknown: did you mean pool=…?"),
        ("size=64G", "'size=64G' is unknown"),
        ("pool", "'pool' needs a value"),
        ("config", "'config' needs a value"),
        ("foreground", "'foreground' is unknown"),
        ("uid=5", "'uid=5' is unknown"),
        ("context=a", "'context=a' is unknown"),
        ("options=ro", "'options=ro' is unknown"),
    ],
)
def test_what_is_unknown_is_refused_unless_told_to_be_sloppy(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        mount_helper.parse_options(f"rw,{text}")
    assert mount_helper.parse_options(f"rw,{text}", sloppy=True) == {"options": ["rw"]}


def test_a_remount_is_refused_in_any_case() -> None:
    with pytest.raises(KvfsError, match="cannot be remounted"):
        mount_helper.parse_options("rw,remount,pool=1G", sloppy=True)


def test_every_exit_code_has_one_of_mount() -> None:
    codes = {row.code: mount_helper.exit_code(row.code) for row in exit_codes()}
    assert set(codes.values()) == {0, 1, 4, 8, 32}
    assert [code for code, of_mount in codes.items() if of_mount == 0] == [0]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, list[str]]]:
    """Runs mount.kvfs; returns its exit code and the lines on standard error."""
    monkeypatch.setenv("KVFS_STATE_DIR", str(tmp_path / "state"))

    def call(*arguments: str | Path) -> tuple[int, list[str]]:
        monkeypatch.setattr(sys, "argv", ["/sbin/mount.kvfs", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            mount_helper.main()
        out, err = capfd.readouterr()
        assert out == ""
        assert isinstance(caught.value.code, int)
        return caught.value.code, err.splitlines()

    return call


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ("rw,pol=64G", 1, "did you mean pool"),
        ("rw,pool=12Q", 1, "12Q"),
        ("rw,hugepages=perhaps", 1, "perhaps"),
        ("rw,config=/no/such/file", 1, "/no/such/file"),
        ("ro,remount", 32, "cannot be remounted"),
        ("rw,pool=64M", 32, "does not exist"),
    ],
)
def test_a_mistake_is_one_line(
    run: Callable[..., tuple[int, list[str]]], tmp_path: Path, options: str, code: int, words: str
) -> None:
    got, lines = run("kvfs", tmp_path / "missing", "-o", options)
    assert got == code
    (line,) = lines
    assert line.startswith("mount.kvfs: ")
    assert words in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["kvfs"], ["kvfs", "/mnt", "-N", "5"]])
def test_wrong_arguments(run: Callable[..., tuple[int, list[str]]], arguments: list[str]) -> None:
    code, lines = run(*arguments)
    assert code == 1
    assert len(lines) == 1


def test_a_source_with_a_comma(run: Callable[..., tuple[int, list[str]]], tmp_path: Path) -> None:
    code, lines = run("a,b", tmp_path)
    assert (code, len(lines)) == (1, 1)
    assert "'a,b'" in lines[0]
