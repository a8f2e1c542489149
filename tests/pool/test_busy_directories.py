"""Directories in which names come and go: the channel tells their attributes, as long as they are there."""

from __future__ import annotations

import os
import stat

import pytest

from kvfs import busy_directories
from kvfs.page import Owner
from kvfs.pool import Pool
from tests.pool import files
from tests.pool.faces import KernelFace
from tests.pool.files import page


async def test_a_directory_is_told_of_once_something_is_made_in_it(pool: Pool, face: KernelFace) -> None:
    directory = files.mkdir(pool, b"directory")
    assert set(face.directories) == {pool.index.root.number}
    await page(pool, b"page", b"bytes", directory)
    fd = face.directories[directory.number]
    assert os.path.samestat(os.fstat(fd), pool.status(directory))
    files.mkdir(pool, b"below", directory)
    assert os.fstat(fd).st_nlink == 3, "as it is now"


async def test_it_is_no_more_once_it_is_gone(pool: Pool, face: KernelFace) -> None:
    root = pool.index.root
    directory = files.mkdir(pool, b"directory")
    await page(pool, b"page", b"bytes", directory)
    pool.names.rename(root, b"directory", root, b"moved", 0)
    assert set(face.directories) == {root.number, directory.number}
    os.close(pool.names.unlink(directory, b"page"))
    pool.names.remove_directory(root, b"moved")
    assert set(face.directories) == {root.number}


async def test_a_change_of_owner_is_told(pool: Pool, face: KernelFace) -> None:
    directory = files.mkdir(pool, b"directory")
    await page(pool, b"page", b"bytes", directory)
    fd = face.directories.pop(directory.number)
    pool.set_owner(directory, Owner(stat.S_IFDIR | 0o700, 7, 8))
    assert face.directories[directory.number] == fd


async def test_so_many_keep_a_descriptor(
    pool: Pool, face: KernelFace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy_directories, "LIMIT", 3)
    made = [files.mkdir(pool, b"%d" % number) for number in range(5)]
    for directory in made:
        await page(pool, b"page", b"bytes", directory)
    await page(pool, b"another", b"bytes", made[2])
    assert set(face.directories) == {made[number].number for number in (2, 3, 4)}
    await page(pool, b"another", b"bytes", made[0])
    assert set(face.directories) == {made[number].number for number in (0, 2, 4)}
