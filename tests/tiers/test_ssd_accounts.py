from __future__ import annotations

import random
import threading

import pytest

from kvfs.errors import TierFull, TierUncounted
from kvfs.tiers.base import Room
from kvfs.tiers.ssd_accounts import Accounts

MEBIBYTE = 1 << 20


def filesystem(free: int, total: int = 1000 * MEBIBYTE, free_inodes: int = 100) -> Room:
    return Room(total, free, 1000, free_inodes, 4096)


def counted(capacity: int, free: int = 900 * MEBIBYTE, used: int = 0) -> Accounts:
    accounts = Accounts(capacity, filesystem(free))
    accounts.trust(used)
    return accounts


def test_what_is_reserved_counts_as_used() -> None:
    accounts = counted(10 * MEBIBYTE, used=4 * MEBIBYTE)
    reservation = accounts.reserve(3 * MEBIBYTE)
    room = accounts.room()
    assert (room.total_bytes, room.free_bytes) == (10 * MEBIBYTE, 3 * MEBIBYTE)
    assert accounts.used_bytes == 4 * MEBIBYTE
    reservation.release()
    reservation.release()
    assert accounts.room().free_bytes == 6 * MEBIBYTE


def test_beyond_the_capacity_it_says_how_much_is_missing() -> None:
    accounts = counted(10 * MEBIBYTE, used=4 * MEBIBYTE)
    accounts.reserve(5 * MEBIBYTE)
    with pytest.raises(TierFull, match=r"no room for 3\.0 MiB") as full:
        accounts.reserve(3 * MEBIBYTE)
    assert full.value.missing_bytes == 2 * MEBIBYTE + accounts.slack_bytes
    assert full.value.missing_inodes == 0
    accounts.changed(1, full.value.missing_bytes, 0)
    accounts.reserve(3 * MEBIBYTE)


def test_pages_leave_some_room_to_directories_and_attributes() -> None:
    accounts = counted(10 * MEBIBYTE)
    assert 0 < accounts.slack_bytes < MEBIBYTE
    accounts.reserve(10 * MEBIBYTE - accounts.slack_bytes)
    with pytest.raises(TierFull):
        accounts.reserve(1)
    accounts.changed(1, 0, accounts.slack_bytes + 4096)
    assert accounts.excess_bytes == 4096


def test_a_disk_that_others_fill_bounds_it_too() -> None:
    accounts = counted(10 * MEBIBYTE, free=2 * MEBIBYTE, used=4 * MEBIBYTE)
    assert accounts.room().total_bytes == 6 * MEBIBYTE
    assert accounts.room().used_bytes == 4 * MEBIBYTE
    with pytest.raises(TierFull) as full:
        accounts.reserve(3 * MEBIBYTE)
    assert full.value.missing_bytes == MEBIBYTE + accounts.slack_bytes


def test_a_disk_without_inodes_is_full() -> None:
    accounts = counted(10 * MEBIBYTE)
    accounts.filesystem = filesystem(900 * MEBIBYTE, free_inodes=0)
    with pytest.raises(TierFull) as full:
        accounts.reserve(4096)
    assert (full.value.missing_bytes, full.value.missing_inodes) == (0, 1)
    accounts.filesystem = Room(1000 * MEBIBYTE, 900 * MEBIBYTE, 0, 0, 4096)  # btrfs says this
    accounts.reserve(4096)


def test_a_capacity_that_became_smaller_shows_an_excess_and_never_more_used_than_there_is() -> None:
    accounts = counted(10 * MEBIBYTE, used=14 * MEBIBYTE)
    assert accounts.excess_bytes == 4 * MEBIBYTE
    assert accounts.room().total_bytes == accounts.room().used_bytes == 14 * MEBIBYTE
    with pytest.raises(TierFull) as full:
        accounts.reserve(MEBIBYTE)
    assert full.value.missing_bytes == 5 * MEBIBYTE + accounts.slack_bytes


def test_a_file_larger_than_reserved_must_fit() -> None:
    accounts = counted(10 * MEBIBYTE)
    reservation = accounts.reserve(8 * MEBIBYTE)
    accounts.enlarge(reservation, 9 * MEBIBYTE)
    accounts.enlarge(reservation, MEBIBYTE)
    assert accounts.reserved_bytes == 9 * MEBIBYTE
    with pytest.raises(TierFull) as full:
        accounts.enlarge(reservation, 12 * MEBIBYTE)
    assert full.value.missing_bytes == 2 * MEBIBYTE
    reservation.release()
    assert accounts.reserved_bytes == 0


def test_before_counting_only_what_the_filesystem_has_left_is_sure() -> None:
    accounts = Accounts(900 * MEBIBYTE, filesystem(free=300 * MEBIBYTE))
    assert not accounts.is_counted
    assert accounts.used_bytes == 700 * MEBIBYTE
    accounts.reserve(150 * MEBIBYTE)
    with pytest.raises(TierUncounted, match="still being counted"):
        accounts.reserve(50 * MEBIBYTE)
    accounts.begin_count()
    accounts.count(1, 5 * MEBIBYTE)
    accounts.end_count()
    assert accounts.used_bytes == 5 * MEBIBYTE
    accounts.reserve(90 * MEBIBYTE)  # the filesystem has as much


def test_an_abandoned_count_changes_nothing() -> None:
    accounts = counted(10 * MEBIBYTE, used=4096)
    accounts.begin_count()
    accounts.count(1, MEBIBYTE)
    accounts.abandon_count()
    assert accounts.used_bytes == 4096
    assert accounts.is_counted


@pytest.mark.parametrize("seed", range(20))
def test_counting_while_everything_changes_gives_the_truth(seed: int) -> None:
    """A model: files by inode, which a walk meets in any order while others come, change and go."""
    randomly = random.Random(seed)
    files = {inode: randomly.randrange(1, 100) * 4096 for inode in range(200)}
    accounts = counted(1 << 40, used=123 * 4096)  # wrong, as after somebody deleted files by hand
    accounts.begin_count()
    to_meet = list(files)
    randomly.shuffle(to_meet)
    while to_meet:
        action = randomly.random()
        if action < 0.3:
            inode = to_meet.pop()
            if inode in files:
                accounts.count(inode, files[inode])
        elif action < 0.5:  # a new file, perhaps with a number that was in use before
            inode = randomly.choice([n for n in range(300) if n not in files])
            files[inode] = randomly.randrange(1, 100) * 4096
            accounts.changed(inode, 0, files[inode])
            if randomly.random() < 0.5:
                to_meet.append(inode)
        elif action < 0.8 and files:
            inode = randomly.choice(list(files))
            accounts.changed(inode, files.pop(inode), 0)
        elif files:
            inode = randomly.choice(list(files))
            before, files[inode] = files[inode], randomly.randrange(1, 100) * 4096
            accounts.changed(inode, before, files[inode])
    for inode, size in files.items():
        accounts.count(inode, size)
    accounts.end_count()
    assert accounts.used_bytes == sum(files.values())


def test_threads_never_reserve_more_than_there_is() -> None:
    accounts = counted(64 * 4096)
    granted: list[int] = []

    def take() -> None:
        for _ in range(200):
            try:
                accounts.reserve(4096)
            except TierFull:
                continue
            granted.append(1)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 63
    assert accounts.reserved_bytes == accounts.capacity_bytes - accounts.slack_bytes
