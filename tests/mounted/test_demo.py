"""The demo on a real mount, with an engine that writes two pages and computes nothing."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mounted.running import (
    environment_for_kvfs,
    is_alive,
    mounts_below,
    processes_of_this_run,
    wait_until,
)
from tests.scripts.fakes import REPOSITORY, FakeEngines, press_control_c, start_script, write_script

pytestmark = pytest.mark.as_root
SUMMARY = "time to first token: 2 s cold, 1 s warm"
ENGINE = f"""
engine() {{
    mkdir -p "$2"
    for page in 1 2 3 4 5; do echo "$1" >"$2/$page.kv"; done
    echo "   answer of $1"
    [ "$1" = cold ] || echo "{SUMMARY}" >"$(dirname -- "$3")/summary"
}}
"""


class Demo:
    """The demo with a kvfs from this checkout; what it prints, and what it leaves."""

    def __init__(self, base: Path) -> None:
        self.base = base
        base.mkdir(mode=0o755)
        self.engines = FakeEngines(base / "engines", ENGINE)
        self.kvfs = base / "bin" / "kvfs"
        self.kvfs.parent.mkdir()
        self.before_kvfs("")
        self.there_before = self.places()

    def before_kvfs(self, script: str) -> None:
        """What happens at the beginning of every verb."""
        command = shlex.join([sys.executable, "-m", "kvfs"])
        write_script(self.kvfs, f'#!/bin/sh\n{script}\nexec {command} "$@"\n')

    def start(self) -> subprocess.Popen[str]:
        environment = environment_for_kvfs({**self.engines.environment(), "KVFS": str(self.kvfs)})
        environment.pop("SUDO_USER", None)
        return start_script("sh", REPOSITORY / "demo" / "run", environment=environment, directory=self.base)

    @property
    def output(self) -> str:
        return (self.base / "stdout").read_text()

    @property
    def errors(self) -> str:
        return (self.base / "stderr").read_text()

    @staticmethod
    def places() -> set[str]:
        """Directories and mounts of demos."""
        directories = map(str, Path("/tmp").glob("kvfs-demo.*"))
        return {*directories, *(point for point in mounts_below(Path("/tmp")) if "kvfs-demo." in point)}

    def assert_nothing_is_left(self) -> None:
        assert self.places() <= self.there_before
        assert not [words for words in processes_of_this_run().values() if "kvfs-demo." in words]


@pytest.fixture
def demo(scratch: Path, request: pytest.FixtureRequest) -> Demo:
    return Demo(scratch / request.node.name)


def test_it_shows_what_lies_on_the_mount_and_ends_with_one_line(demo: Demo) -> None:
    assert demo.start().wait(50) == 0, demo.errors
    assert demo.errors == ""
    lines = demo.output.splitlines()
    assert lines[-1] == SUMMARY
    assert lines.index("   answer of cold") < lines.index("   answer of warm")
    assert [line.split()[-1] for line in lines if line.startswith("   -rw")] == ["1.kv", "2.kv", "3.kv"]
    assert "user.kvfs.sealed" in demo.output
    assert "   passthrough: " in demo.output
    assert "settings:" not in demo.output
    demo.assert_nothing_is_left()


def test_an_engine_that_fails_is_shown(demo: Demo) -> None:
    demo.engines.behave("engine() { echo no memory >&2; exit 3; }")
    assert demo.start().wait(50) == 1
    assert demo.errors == "no memory\ndemo: the engine failed; what it said last is above\n"
    demo.assert_nothing_is_left()


def test_a_mount_that_fails_is_shown(demo: Demo) -> None:
    demo.before_kvfs("echo kvfs: no memory >&2; exit 6")
    assert demo.start().wait(50) == 1
    assert demo.errors == "kvfs: no memory\ndemo: kvfs did not mount\n"
    demo.assert_nothing_is_left()


def test_control_c_while_the_engine_computes(demo: Demo) -> None:
    """Also when the engine does not listen, and has a page open."""
    demo.engines.behave(
        'engine() { trap "" INT TERM; mkdir -p "$2"; exec 5>"$2/1.kv"; sleep 600 & echo begun $!; wait; }'
    )
    process = demo.start()
    wait_until(lambda: "begun" in demo.output, 40, "the engine computes")
    status, seconds = press_control_c(process)
    assert (status, demo.errors) == (130, "demo: interrupted\n")
    assert seconds < 10
    assert not is_alive(int(demo.output.split()[-1]))
    demo.assert_nothing_is_left()


def test_control_c_while_it_mounts(demo: Demo) -> None:
    begun = demo.base / "begun"
    demo.before_kvfs(f"touch {begun}; sleep 0.5")
    process = demo.start()
    wait_until(begun.exists, 40, "it mounts")
    status, _ = press_control_c(process)
    assert (status, demo.errors.count("\n")) == (130, 1)
    assert demo.errors.startswith("demo: interrupted; what has begun")
    assert "answer" not in demo.output
    demo.assert_nothing_is_left()


def test_control_c_while_it_prepares(demo: Demo) -> None:
    begun = demo.base / "begun"
    demo.engines.behave(f"pip() {{ touch {begun}; sleep 600; }}")
    process = demo.start()
    wait_until(begun.exists, 40, "it prepares")
    status, seconds = press_control_c(process)
    assert (status, demo.errors) == (130, "prepare: interrupted\n")
    assert seconds < 5
    assert demo.engines.made() == set()
    demo.assert_nothing_is_left()
