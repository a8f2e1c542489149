"""The command line as far as it goes without a mount: its words, its exit codes, how it starts a daemon."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvfs.cli
from kvfs.cli import mount as mount_verb
from kvfs.errors import exit_codes

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    for name in [name for name in os.environ if name.startswith("KVFS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "kvfs.toml").write_text("")
    monkeypatch.setenv("KVFS_CONFIG", str(tmp_path / "kvfs.toml"))
    monkeypatch.setenv("KVFS_STATE_DIR", str(tmp_path / "state"))

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvfs", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            kvfs.cli.main()
        out, err = capfd.readouterr()
        code = caught.value.code
        assert isinstance(code, int)
        return code, out, err

    return call


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    path = tmp_path / "mnt"
    path.mkdir()
    return path


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """``daemon(script)`` puts a shell script in the place of the interpreter that would run the daemon."""
    monkeypatch.setattr(mount_verb, "_check_machine", lambda: None)

    def replace(script: str) -> None:
        program = tmp_path / "daemon.sh"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))

    return replace


def test_help_shows_verbs_and_exit_codes(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    for word in ("mount", "umount", "status", "doctor", "verify", "gc", "evict", "prefetch"):
        assert f"\n  {word}" in out
    for row in exit_codes():
        assert f"\n  {row.code}  " in out


def test_without_a_verb_it_shows_the_help_and_fails(run: Run) -> None:
    code, _, err = run()
    assert code == 2
    assert "Usage: kvfs" in err


@pytest.mark.parametrize("verb", ["mount", "umount", "status", "verify", "gc", "evict", "prefetch"])
def test_every_verb_has_help(run: Run, verb: str) -> None:
    code, out, _ = run(verb, "--help")
    assert code == 0
    assert out.startswith(f"Usage: kvfs {verb}")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["remount"], 2, "no such command 'remount': see kvfs --help"),
        (["mount"], 2, "missing argument 'MNT': see kvfs mount --help"),
        (["mount", "{mnt}", "--poool", "1G"], 2, "no such option"),
        (["mount", "{mnt}", "--pool", "1X"], 2, "--pool: '1X' is not a size"),
        (["mount", "{mnt}", "--pool", "900%"], 2, "more than there is"),
        (["mount", "{mnt}", "--pool", "900P"], 2, "of memory here; choose less"),
        (["mount", "{mnt}", "-o", "quick"], 2, "mount option 'quick' is unknown"),
        (["mount", "{mnt}", "--config", "/nowhere.toml"], 3, "no such configuration file"),
        (["mount", "{mnt}/missing", "--pool", "8M"], 4, "mkdir -p"),
        (["mount", ""], 2, "the mountpoint is empty: name a directory"),
        (["umount", ""], 2, "the mountpoint is empty: name a directory"),
        (["status", ""], 2, "the mountpoint is empty: name a directory"),
        (
            ["mount", "{mnt}", "--numa", "9999"],
            2,
            "--numa 9999: write interleave, or a NUMA node of this host",
        ),
        (["mount", "{mnt}", "-o", "fsname=one\ntwo"], 2, "write fsname=NAME"),
        (["mount", "/proc", "--pool", "8M"], 4, "proc from proc is mounted there"),
        (["umount", "{mnt}"], 8, "nothing is mounted at"),
        (["umount", "/proc"], 8, "/proc is proc, not kvfs"),
        (["status", "{mnt}"], 8, "nothing is mounted at"),
        (["verify"], 2, "missing argument 'MNT'"),
        (["verify", "{mnt}"], 8, "nothing is mounted at"),
        (["gc", "/proc", "--delete"], 8, "/proc is proc, not kvfs"),
        (["evict"], 2, "missing argument 'PATH…'"),
        (["evict", "{mnt}/missing"], 2, "No such file or directory"),
        (["evict", "/proc/self/status"], 8, "is on proc, not on a mount of kvfs"),
        (["prefetch", ""], 2, "the path is empty"),
    ],
)
def test_a_mistake_is_one_line(
    run: Run, mountpoint: Path, tmp_path: Path, arguments: list[str], code: int, words: str
) -> None:
    found, out, err = run(*(argument.format(mnt=mountpoint) for argument in arguments))
    assert (found, out) == (code, "")
    assert words in err
    assert err.startswith("kvfs: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("missing", "advice"),
    [("fusermount3", "apt-get install fuse3"), ("/etc/mtab", "ln -s ../proc/self/mounts /etc/mtab")],
)
def test_what_an_ordinary_user_needs_to_mount(
    run: Run, mountpoint: Path, monkeypatch: pytest.MonkeyPatch, missing: str, advice: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "access", lambda *_: True)
    monkeypatch.setattr(os.path, "exists", lambda path: path != missing)
    monkeypatch.setattr("shutil.which", lambda name: None if name == missing else name)
    code, _, err = run("mount", mountpoint, "--pool", "8M")
    assert (code, err.count("\n")) == (6, 1)
    assert err.startswith(f"kvfs: {missing} is not there")
    assert advice in err


def test_a_memory_node_that_is_not_there_is_an_error_of_who_named_it(
    run: Run, mountpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFS_NUMA", "9999")
    code, _, err = run("mount", mountpoint)
    assert (code, err.count("\n")) == (3, 1)
    assert err.startswith("kvfs: environment KVFS_NUMA: --numa 9999: write interleave, or a NUMA node")
    monkeypatch.delenv("KVFS_NUMA")
    (tmp_path / "kvfs.toml").write_text("numa = 9999")
    code, _, err = run("mount", mountpoint)
    assert (code, err.count("\n")) == (3, 1)
    assert f"file {tmp_path / 'kvfs.toml'}: " in err


def test_a_large_pool_is_warned_about(run: Run, mountpoint: Path, daemon: Callable[[str], None]) -> None:
    daemon('echo ready >/proc/$$/fd/"$KVFS_READY_FD"')
    code, _, err = run("mount", mountpoint, "--pool", "90%")
    assert code == 0
    assert err.startswith("kvfs: warning: the pool of ")
    assert err.count("\n") == 1


def test_it_returns_when_the_daemon_is_ready(
    run: Run, mountpoint: Path, daemon: Callable[[str], None], tmp_path: Path
) -> None:
    daemon(f'cat /proc/$$/fd/"$5" >{tmp_path}/config; echo words; echo ready >/proc/$$/fd/"$KVFS_READY_FD"')
    code, out, err = run("mount", mountpoint, "--pool", "64M", "-o", "ro", "-o", "noatime")
    assert (code, err) == (0, "")
    assert out == f"{mountpoint} serves 64.0 MiB of DRAM\n"
    config = json.loads((tmp_path / "config").read_text())
    assert config["mountpoint"] == str(mountpoint)
    assert config["mount_options"] == ["ro", "noatime"]
    [state] = (tmp_path / "state").iterdir()
    assert (state / "daemon.log").read_text() == "words\n"


@pytest.mark.parametrize(
    ("script", "code", "line"),
    [
        (
            'echo "error 6 no hugepages: see kvfs doctor" >/proc/$$/fd/"$KVFS_READY_FD"; exit 6',
            6,
            "kvfs: no hugepages: see kvfs doctor\n",
        ),
        (
            "echo trace; echo 'ValueError: broken'; exit 70",
            10,
            "kvfs: the daemon did not start: ValueError: broken\n",
        ),
        ("exit 3", 10, "kvfs: the daemon did not start: it left no word in its log (exit status 3)\n"),
        ('echo "error" >/proc/$$/fd/"$KVFS_READY_FD"; echo odd', 10, "kvfs: the daemon did not start: odd\n"),
    ],
)
def test_a_daemon_that_does_not_start_leaves_its_reason_and_nothing_else(
    run: Run,
    mountpoint: Path,
    daemon: Callable[[str], None],
    tmp_path: Path,
    script: str,
    code: int,
    line: str,
) -> None:
    daemon(script)
    assert run("mount", mountpoint, "--pool", "64M") == (code, "", line)
    assert list((tmp_path / "state").iterdir()) == []


def test_what_was_there_before_stays_when_the_daemon_does_not_start(
    run: Run, mountpoint: Path, daemon: Callable[[str], None], tmp_path: Path
) -> None:
    daemon('echo ready >/proc/$$/fd/"$KVFS_READY_FD"')
    assert run("mount", mountpoint, "--pool", "64M")[0] == 0
    [state] = (tmp_path / "state").iterdir()
    daemon("echo late news; exit 1")
    assert run("mount", mountpoint, "--pool", "64M")[0] == 10
    assert (state / "daemon.log").read_text() == "late news\n"


def test_a_bug_is_a_trace(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("kvfs.cli.status._all_mounts", fail)
    code, _, err = run("status")
    assert code == 70
    assert err.startswith("Traceback")
    assert err.endswith("ZeroDivisionError: a bug\n")


def test_an_interrupt_is_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvfs.cli.status._all_mounts", interrupt)
    assert run("status") == (130, "", "kvfs: interrupted\n")


def test_status_of_a_host_without_mounts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfs.mounts.read_mountinfo", list)
    assert run("status") == (0, "no kvfs is mounted here\n", "")
    assert run("status", "--json") == (0, "[]\n", "")
