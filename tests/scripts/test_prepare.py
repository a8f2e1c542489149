"""Preparing the engines' environments: what is complete works, what fails says so in one line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mounted.running import is_alive, wait_until
from tests.scripts.fakes import REPOSITORY, FakeEngines, press_control_c, start_script

PREPARE = REPOSITORY / "tests" / "engines" / "prepare"
TORCH = "torch==2.13.0+cpu"
OWN_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.fixture
def engines(tmp_path: Path) -> FakeEngines:
    return FakeEngines(tmp_path / "engines")


def prepare(engines: FakeEngines, *parts: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", PREPARE, engines.directory, *parts],
        env=engines.environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def assert_failed(engines: FakeEngines, ended: subprocess.CompletedProcess[str], *words: str) -> None:
    """One line on stderr, nothing that looks complete, and the log that the line names."""
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1, ended.stderr
    for word in (*words, str(engines.directory / "log")):
        assert word in ended.stderr
    assert engines.made() == {"log"}


@pytest.mark.parametrize("part", ["transformers", "vllm"])
def test_what_is_complete_is_left_alone(engines: FakeEngines, part: str) -> None:
    first = prepare(engines, part)
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout.count("\n") == 1
    assert engines.made() == {part, f"{part}.complete"}
    calls = engines.pip_calls()
    again = prepare(engines, part)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    assert engines.pip_calls() == calls


def test_torch_comes_from_where_pip_looks(engines: FakeEngines) -> None:
    assert prepare(engines, "transformers").returncode == 0
    assert [TORCH in call for call in engines.pip_calls()] == [True, False]
    assert not [call for call in engines.pip_calls() if OWN_INDEX in call]


def test_else_torch_comes_from_its_own_index(engines: FakeEngines) -> None:
    engines.behave(f'pip() {{ case "$*" in *{OWN_INDEX}*) ;; *{TORCH}*) return 1 ;; esac; }}')
    assert prepare(engines, "transformers").returncode == 0
    there, own_index, rest = engines.pip_calls()
    assert OWN_INDEX not in there + rest
    assert f"--index-url {OWN_INDEX} {TORCH}" in own_index


def test_without_a_torch_for_cpus_nothing_else_is_downloaded(engines: FakeEngines) -> None:
    engines.behave('pip() { echo looking; echo "ERROR: no matching distribution"; return 1; }')
    ended = prepare(engines, "transformers")
    assert_failed(engines, ended, TORCH, OWN_INDEX, "ERROR: no matching distribution")
    assert len(engines.pip_calls()) == 2


def test_what_cannot_be_imported_is_not_complete(engines: FakeEngines) -> None:
    engines.behave("imports() { echo Traceback; echo 'AssertionError: torch is for CUDA'; return 1; }")
    assert_failed(engines, prepare(engines, "transformers"), "does not work", "torch is for CUDA")


@pytest.mark.parametrize("moment", ["pip", "imports"])
def test_control_c_leaves_nothing(engines: FakeEngines, tmp_path: Path, moment: str) -> None:
    """Neither what was begun, nor what runs, nor what pip has in a temporary directory."""
    pid_file = tmp_path / "pid"
    engines.behave(
        f"{moment}() {{ trap '' INT TERM; : >$TMPDIR/unpacked; sleep 600 & echo $! >{pid_file}; wait; }}"
    )
    process = start_script(
        "sh", PREPARE, engines.directory, "transformers",
        environment=engines.environment(), directory=tmp_path,
    )  # fmt: skip
    wait_until(lambda: pid_file.exists() and bool(pid_file.read_text()), 10, f"{moment} runs")
    status, seconds = press_control_c(process)
    assert status == 130
    assert seconds < 5
    assert (tmp_path / "stderr").read_text() == "prepare: interrupted\n"
    assert not is_alive(int(pid_file.read_text()))
    assert engines.made() == set()


def test_an_unknown_part_is_refused(engines: FakeEngines) -> None:
    ended = prepare(engines, "everything")
    assert ended.returncode == 1
    assert ended.stderr.startswith("prepare: there is no part 'everything'")
