"""Standard output that cannot be written, whatever the verb."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """One whose results are longer than what is buffered."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"hash_ids": [number, number + 1]}) + "\n" for number in range(300)))
    return path


def kvfs(arguments: str, trace: Path, stdout: int) -> tuple[int, str]:
    """The exit code, and what is on stderr."""
    words = [word.replace("TRACE", str(trace)) for word in arguments.split()]
    done = subprocess.run(
        [sys.executable, "-m", "kvfs", *words], stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60
    )
    return done.returncode, done.stderr


VERBS = (
    "--version",
    "mount --help",
    "status",
    "simulate TRACE --policy lru",
    "simulate TRACE --json --pool-blocks " + ",".join(map(str, range(1, 90))) + " --policy lru",
)


@pytest.mark.parametrize("arguments", VERBS)
def test_a_full_disk_is_one_line(arguments: str, trace: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    code, err = kvfs(arguments, trace, full)
    os.close(full)
    assert (code, err) == (1, "kvfs: standard output cannot be written: No space left on device\n")


@pytest.mark.parametrize("arguments", VERBS)
def test_a_reader_that_has_gone_is_no_error(arguments: str, trace: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code, err = kvfs(arguments, trace, writer)
    os.close(writer)
    assert (code, err) == (0, "")


def test_a_mistake_is_still_told_where_nobody_reads(trace: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code, err = kvfs("status /", trace, writer)
    os.close(writer)
    assert code == 8
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", VERBS)
def test_a_closed_descriptor_is_no_error(arguments: str, trace: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "kvfs"]
        + [word.replace("TRACE", str(trace)) for word in arguments.split()],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
