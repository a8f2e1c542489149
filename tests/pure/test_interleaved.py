"""Work that waits in between, and what is begun meanwhile."""

from __future__ import annotations

import pytest

from kvfs.interleaved import Work, at_once, finish, interleave


class Disk:
    """Notes what is begun and ended."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def work(self, name: str, error: Exception | None = None, waits: int = 1) -> Work[str]:
        self.seen.append(f"begin {name}")
        for _ in range(waits):
            yield
        if error is not None:
            raise error
        self.seen.append(f"end {name}")
        return name.upper()


def test_finish_waits_and_returns_the_result() -> None:
    disk = Disk()
    assert finish(disk.work("a", waits=3)) == "A"
    assert disk.seen == ["begin a", "end a"]
    with pytest.raises(OSError, match="full"):
        finish(disk.work("b", OSError("full")))


def test_what_never_waits_is_work_too() -> None:
    assert finish(at_once(lambda a, b: a + b)(1, b=2)) == 3
    with pytest.raises(ZeroDivisionError):
        finish(at_once(lambda: 1 / 0)())


def test_the_next_is_begun_while_one_waits() -> None:
    disk = Disk()
    assert [result.unwrap() for result in interleave(map(disk.work, "abc"), 2)] == ["A", "B", "C"]
    assert disk.seen == ["begin a", "begin b", "end a", "begin c", "end b", "end c"]


def test_one_at_a_time() -> None:
    disk = Disk()
    assert [result.unwrap() for result in interleave(map(disk.work, "ab"), 1)] == ["A", "B"]
    assert disk.seen == ["begin a", "end a", "begin b", "end b"]


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("waits", [0, 1])
def test_a_failure_is_the_result_of_that_work_alone(most: int, waits: int) -> None:
    disk = Disk()
    failure = OSError("disk")
    works = [disk.work("a"), disk.work("b", failure, waits), at_once(lambda: "C")(), disk.work("d", waits=0)]
    results = list(interleave(works, most))
    assert [results[place].unwrap() for place in (0, 2, 3)] == ["A", "C", "D"]
    with pytest.raises(OSError, match="disk") as caught:
        results[1].unwrap()
    assert caught.value is failure


def test_nothing_to_do() -> None:
    assert list(interleave([], 2)) == []
