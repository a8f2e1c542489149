from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvfs.config import Memory, load_config
from kvfs.errors import NotPermitted, StateInUse, Unavailable
from kvfs.mounts import escape_path
from kvfs.state import LOG_LIMIT_BYTES, StateDirectory, all_states

HOLD = """
import sys
from pathlib import Path
from kvfs.state import StateDirectory
state = StateDirectory(Path(sys.argv[1]))
state.acquire()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    return StateDirectory.for_mountpoint(Path("/mnt/kv-a"), tmp_path / "base")


def hold(state: StateDirectory) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_it_is_named_after_the_mountpoint(state: StateDirectory) -> None:
    assert state.path.name == "mnt-kv\\x2da"


@pytest.mark.parametrize(
    ("path", "name"),
    [("/", "-"), ("/mnt/kv", "mnt-kv"), ("/a b", "a\\x20b"), ("/.x", "\\x2ex"), ("/ä", "\\xc3\\xa4")],
)
def test_names_are_those_of_systemd(path: str, name: str) -> None:
    assert escape_path(Path(path)) == name


def test_long_names_are_cut_and_still_differ(tmp_path: Path) -> None:
    names = {escape_path(Path("/mnt") / ("ä" * 200) / last) for last in ("a", "b")}
    assert len(names) == 2
    assert all(len(name) == 200 for name in names)


def test_one_process_holds_it_and_is_known(state: StateDirectory) -> None:
    assert state.daemon_pid() is None
    with hold(state) as process:
        assert state.daemon_pid() == process.pid
        with pytest.raises(StateInUse, match=str(process.pid)):
            state.acquire()
        process.kill()
    assert state.daemon_pid() is None
    assert state.exists()
    state.acquire()
    assert state.daemon_pid() == os.getpid()
    state.release()
    assert state.daemon_pid() is None


def test_it_is_private(state: StateDirectory) -> None:
    state.acquire()
    assert state.path.stat().st_mode & 0o777 == 0o700
    assert (state.path / "lock").stat().st_mode & 0o777 == 0o600
    state.remove()
    assert not state.exists()
    assert list(state.path.parent.iterdir()) == []
    state.remove()


def test_the_default_base_goes_with_its_last_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "kvfs-1000"
    monkeypatch.setattr("kvfs.state.default_state_dir", lambda _: base)
    one, other = (StateDirectory.for_mountpoint(Path(path)) for path in ("/mnt/a", "/mnt/b"))
    one.acquire()
    other.acquire()
    one.remove()
    assert all_states(base)[0].path == other.path
    other.remove()
    assert not base.exists()
    one.remove()
    chosen = StateDirectory.for_mountpoint(Path("/mnt/a"), tmp_path / "chosen")
    chosen.acquire()
    chosen.remove()
    assert (tmp_path / "chosen").is_dir()


def test_a_base_that_another_removes_at_this_moment_is_made_again(
    state: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_parent, calls = StateDirectory._make_parent, []

    def make_and_lose(self: StateDirectory, advice: str) -> None:
        make_parent(self, advice)
        calls.append(advice)
        if len(calls) < 3:
            self.path.parent.rmdir()

    monkeypatch.setattr(StateDirectory, "_make_parent", make_and_lose)
    assert state.create()
    assert len(calls) == 3


def test_somebody_elses_directory_is_refused(state: StateDirectory, tmp_path: Path) -> None:
    state.path.parent.mkdir()
    (tmp_path / "trap").mkdir()
    state.path.symlink_to(tmp_path / "trap")
    with pytest.raises(NotPermitted, match="not a directory of yours"):
        state.acquire()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_directory_inside_somebody_elses_is_refused(state: StateDirectory) -> None:
    state.path.parent.mkdir()
    os.chown(state.path.parent, 12345, 12345)
    with pytest.raises(NotPermitted, match="belongs to somebody else"):
        state.create()


def test_a_place_that_cannot_hold_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Unavailable, match="cannot be made"):
        StateDirectory.for_mountpoint(Path("/mnt/kv"), tmp_path / "file").create()


def test_whoever_waited_for_a_removed_lock_starts_afresh(state: StateDirectory) -> None:
    state.acquire()
    descriptor = os.open(state.path / "lock", os.O_RDWR)
    state.remove()
    assert not state._is_lock_file(descriptor)
    os.close(descriptor)
    other = StateDirectory(state.path)
    other.acquire()
    assert other.daemon_pid() == os.getpid()
    other.remove()


def test_a_directory_that_holds_something_unknown_is_not_lost(state: StateDirectory) -> None:
    state.acquire()
    (state.dram).mkdir()
    (state.dram / "page").write_text("bytes")
    with pytest.raises(OSError, match="not empty"):
        state.remove()
    assert (state.dram / "page").read_text() == "bytes"
    assert state.daemon_pid() == os.getpid()
    state.release()


def test_keeping_is_asked_for_once(state: StateDirectory) -> None:
    state.create()
    assert not state.take_keep()
    state.ask_keep()
    assert state.take_keep()
    assert not state.take_keep()
    state.ask_keep()
    state.withdraw_keep()
    assert not state.take_keep()


def test_the_configuration_is_remembered(state: StateDirectory, tmp_path: Path) -> None:
    empty = tmp_path / "empty.toml"
    empty.write_text("")
    config = load_config(Path("/mnt/kv-a"), {}, {}, empty, Memory(1 << 40, 1 << 40))
    assert state.read_config() is None
    state.create()
    state.write_config(config)
    assert state.read_config() == config
    (state.path / "config.json").write_text("{")
    assert state.read_config() is None


def test_the_log_is_bounded(state: StateDirectory) -> None:
    state.create()
    for size, kept in ((LOG_LIMIT_BYTES, True), (LOG_LIMIT_BYTES + 1, False)):
        state.log.write_bytes(b"x" * size)
        descriptor = state.open_log()
        os.write(descriptor, b"line\n")
        os.close(descriptor)
        assert (state.log.stat().st_size > LOG_LIMIT_BYTES) == kept
        assert state.log.read_bytes().endswith(b"line\n")


def test_all_states(state: StateDirectory, tmp_path: Path) -> None:
    assert all_states(tmp_path / "base") == []
    state.create()
    (tmp_path / "base" / ".going").mkdir()
    assert [found.path for found in all_states(tmp_path / "base")] == [state.path]
