from __future__ import annotations

import gc

import pytest

from kvfs.garbage import MANY, making_what_stays


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("count", [MANY - 1, MANY])
def test_what_stays_is_not_looked_through_if_it_is_much(collects: bool, count: int) -> None:
    was_collecting, frozen = gc.isenabled(), gc.get_freeze_count()
    (gc.enable if collects else gc.disable)()
    try:
        with making_what_stays(lambda: count):
            assert not gc.isenabled()
            stays = [[] for _ in range(100)]  # type: ignore[var-annotated]
        assert gc.isenabled() is collects
        assert (gc.get_freeze_count() >= frozen + len(stays)) is (count >= MANY)
    finally:
        gc.unfreeze()
        (gc.enable if was_collecting else gc.disable)()


def test_a_failure_changes_nothing_of_that() -> None:
    with pytest.raises(ValueError, match="fails"), making_what_stays(lambda: 0):
        raise ValueError("fails")
    assert gc.isenabled()
