"""``kvfs simulate`` as a person and a script use it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvfs.cli
from kvfs.errors import KvfsError
from kvfs.simulation.plot import write_plot
from kvfs.simulation.replay import Outcome

Run = Callable[..., tuple[int, str, str]]

REQUESTS = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2, 5], [4, 6], [0, 1, 3]]
POLICIES = ["default", "lru", "fifo", "s3fifo", "arc", "optimum"]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvfs", "simulate", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            kvfs.cli.main()
        out, err = capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return call


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"timestamp": 0, "hash_ids": ids}) + "\n" for ids in REQUESTS))
    return path


def test_json_for_one_size(run: Run, trace: Path) -> None:
    code, out, err = run(trace, "--pool-blocks", "7", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert list(found["policies"]) == POLICIES
    assert (found["requests"], found["references"], found["distinct_blocks"]) == (6, 16, 7)
    assert found["policies"]["default"] == {
        "pool_blocks": 7,
        "hit_rate": 0.5625,
        "second_half_hit_rate": round(7 / 9, 6),
        "hits": 9,
        "references": 16,
    }


def test_json_for_several_sizes_has_lists(run: Run, trace: Path) -> None:
    code, out, _ = run(trace, "--pool-blocks", "7, 2,7", "--policy", "lru", "--json")
    assert code == 0
    policies = json.loads(out)["policies"]
    assert [one["pool_blocks"] for one in policies.pop("lru")] == [2, 7]
    assert not policies


def test_some_policies(run: Run, trace: Path) -> None:
    _, out, _ = run(trace, "--pool-blocks", "3", "--policy", "optimum", "--policy", "lru", "--json")
    assert list(json.loads(out)["policies"]) == ["lru", "optimum"]
    _, out, _ = run(trace, "--pool-blocks", "3", "--policy", "lru", "--policy", "all", "--json")
    assert list(json.loads(out)["policies"]) == POLICIES


def test_a_table_for_people(run: Run, trace: Path) -> None:
    code, out, err = run(trace, "--pool-blocks", "7")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"{trace}: 6 requests, 16 blocks, 7 of them distinct"
    assert lines[1].split() == ["pool", "blocks", "policy", "hit", "rate", "2nd", "half"]
    assert lines[2].split() == ["7", "default", "0.5625", "0.7778"]
    assert [line.split()[0] for line in lines[3:]] == POLICIES[1:]


def test_a_sweep_over_pool_sizes_is_drawn(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    blocks = list(range(300))
    path.write_text("".join(json.dumps({"hash_ids": blocks}) + "\n" for _ in range(2)))
    code, out, _ = run(path, "--policy", "optimum")
    assert code == 0
    sizes = [3, 6, 15, 30, 60, 150]
    table, _, chart = out.partition("\n\n")
    assert [int(line.split()[0]) for line in table.splitlines()[2:]] == sizes
    lines = chart.splitlines()
    assert lines[::2] == [f"{size} blocks" for size in sizes]
    bars = [line.count("█") for line in lines[1::2]]
    assert bars == [1, 2, 5, 10, 20, 50]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--pool-blocks", "0"], 2, "from 1 on, separated by commas: not '0'"),
        (["--pool-blocks", "10,-3"], 2, "not '10,-3'"),
        (["--pool-blocks", "64G"], 2, "not '64G'"),
        (["--pool-blocks", ""], 2, "not ''"),
        (["--pool-blocks", "9" * 5000], 2, "from 1 on"),
        (["--policy", "lfu"], 2, "'lfu' is not one of 'default', 'lru'"),
        (["--plot", "x.gif"], 2, "--plot writes .png, .svg, .pdf files, by their name: not 'x.gif'"),
        (["--plot", ""], 2, "--plot writes .png, .svg, .pdf files, by their name: not ''"),
        (["--plot", "/nowhere/x.png"], 2, "there is no directory /nowhere"),
    ],
)
def test_wrong_arguments_are_one_line(
    run: Run, trace: Path, arguments: list[str], code: int, message: str
) -> None:
    found, out, err = run(trace, *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert len(err) < 300


def test_a_trace_may_come_from_standard_input(trace: Path) -> None:
    command = [sys.executable, "-m", "kvfs", "simulate", "--policy", "lru", "--pool-blocks", "3"]
    from_file = subprocess.run([*command, trace], capture_output=True, text=True, check=True, timeout=60)
    piped = subprocess.run(
        [*command, "-"], input=trace.read_text(), capture_output=True, text=True, check=True, timeout=60
    )
    with trace.open() as lines:
        redirected = subprocess.run(
            [*command, "-"], stdin=lines, capture_output=True, text=True, check=True, timeout=60
        )
    assert piped.stdout == redirected.stdout == from_file.stdout.replace(str(trace), "/dev/stdin")


def test_an_unreadable_trace_is_one_line(run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"hash_ids": [1]}\n{"prompt": "hello"}\n')
    for path, message in (
        (tmp_path / "none", "cannot be read: No such file or directory"),
        (bad, "line 2, is no request of a trace: Object missing required field `hash_ids`"),
    ):
        code, out, err = run(path)
        assert (code, out) == (2, "")
        assert err == f"kvfs: {path}{' ' if path.name == 'none' else ', '}{message}\n"


def test_it_says_that_matplotlib_is_missing(run: Run, trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(trace, "--plot", trace.with_suffix(".png"))
    assert (code, out) == (6, "")
    assert err == "kvfs: --plot needs matplotlib: pip install 'kvfs[plot]'\n"


def test_a_picture(run: Run, trace: Path) -> None:
    picture = trace.with_suffix(".png")
    code, out, _ = run(trace, "--pool-blocks", "2,4,7", "--plot", picture)
    assert code == 0
    assert "█" not in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    outcome = Outcome("lru", 1, 1, 2, 1, 1)
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(KvfsError, match=r"cannot write .*taken\.png: Is a directory"):
        write_plot([outcome], "trace", tmp_path / "taken.png")


def test_it_needs_nothing_of_a_mount(trace: Path) -> None:
    """Neither its modules nor its time."""
    code = """
import sys, kvfs.cli
kvfs.cli.run(kvfs.cli._kvfs, "kvfs")
print(sorted({"trio", "pyfuse3", "matplotlib", "kvfs.pool"} & set(sys.modules)))
"""
    command = [sys.executable, "-c", code, "simulate", str(trace)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{trace}: 6 requests")
    assert lines[-1] == "[]"


def test_a_bar_on_a_terminal(trace: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvfs", "simulate", str(trace), "--json"]
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        assert process.stdout is not None
        found = json.loads(process.stdout.read())
        shown = b""
        try:
            while some := os.read(ours, 4096):
                shown += some
        except OSError:  # the other end is closed
            pass
        os.close(ours)
    assert process.returncode == 0
    assert list(found["policies"]) == POLICIES
    assert b"replaying" in shown
