from __future__ import annotations

import errno
from pathlib import Path

from kvfs import errors


def test_exit_codes_are_the_published_ones() -> None:
    assert [row.code for row in errors.exit_codes()] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 70, 130]
    assert len({row.meaning for row in errors.exit_codes()}) == len(errors.exit_codes())


def test_kinds_that_share_an_exit_code_are_the_same_kind() -> None:
    assert errors.AlreadyMounted.exit_code == errors.StateInUse.exit_code == 5
    assert issubclass(errors.AlreadyMounted, errors.StateInUse)


def test_the_data_side_speaks_errno() -> None:
    assert errors.NoSuchPage.errno == errno.ENOENT
    assert errors.StalePage.errno == errno.ESTALE
    assert errors.OutOfRoom.errno == errno.ENOSPC
    assert errors.TierFull.errno == errors.TierUncounted.errno == errno.ENOSPC
    assert errors.FileTooLarge.errno == errno.EFBIG
    assert errors.CorruptPage.errno == errors.DamagedPage.errno == errors.TierFailed.errno == errno.EIO
    assert errors.NameTooLong.errno == errno.ENAMETOOLONG
    assert errors.AttributeMissing.errno == errno.ENODATA
    assert errors.NotSupported.errno == errors.NotStorable.errno == errno.EOPNOTSUPP


def test_the_readme_has_the_table() -> None:
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    rows = [f"| {row.code} | {row.meaning} |" for row in errors.exit_codes()]
    assert "\n".join(rows) in readme
