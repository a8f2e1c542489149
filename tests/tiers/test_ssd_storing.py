from __future__ import annotations

import fcntl
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvfs.errors import DamagedPage, NoSuchPage, NotStorable, TierFull
from kvfs.interleaved import Work, finish
from kvfs.page import DIGEST, OWNER, SPARSE, Digest, Owner, digest_of
from kvfs.tiers import ssd_directory
from kvfs.tiers.ssd import SsdTier
from kvfs.tiers.ssd_base import STEPS
from kvfs.tiers.ssd_record import HITS
from tests.conftest import LogGuard
from tests.tiers.ssds import (
    DIRECTORY,
    FILE,
    MEBIBYTE,
    attach,
    check_accounts,
    copy,
    named,
    new_page,
    pages,
    read,
    source,
    store,
    temporaries,
    write,
)


@pytest.fixture
def tier(ssd: Path) -> Iterator[SsdTier]:
    made = attach(ssd)
    yield made
    made.close()


SIZES = [1, 511, 4095, 4096, 4097, 65536, 2 * MEBIBYTE, 2 * MEBIBYTE + 1]


@pytest.mark.parametrize("size", SIZES)
def test_a_page_is_a_file_of_its_bytes(tier: SsdTier, size: int) -> None:
    content = os.urandom(size)
    occupied = store(tier, b"a/b/page", content)
    path = tier.directory / "a/b/page"
    assert path.read_bytes() == content
    status = path.stat()
    assert (status.st_size, status.st_blocks * 512) == (size, occupied)
    assert stat.S_IMODE(status.st_mode) & 0o777 == 0o600
    assert read(tier, b"a/b/page") == content
    assert temporaries(tier.directory) == []
    check_accounts(tier)


def test_all_that_is_known_of_a_page_comes_with_it(tier: SsdTier) -> None:
    attributes = FILE | {SPARSE: b"1", HITS: b"17", "user.mine": b"\0\xff", "pin": b"1"}
    store(tier, b"a/page", b"content", attributes)
    opened = tier.open_page(b"a/page")
    try:
        assert opened.digest == digest_of(b"content")
        assert opened.record.owner == Owner(0o100640, 1000, 1001)
        assert (opened.record.sparse, opened.record.hits) == (True, 17)
        assert opened.attributes == {"user.mine": b"\0\xff", "pin": b"1"}
        assert (opened.status.st_atime_ns, opened.status.st_mtime_ns) == (1_000_000_000, 2_000_000_001)
    finally:
        os.close(opened.fd)
    assert tier.get_attribute(b"a/page", DIGEST) == digest_of(b"content").format().encode()
    assert tier.get_attribute(b"a", OWNER) == DIRECTORY[OWNER]


def test_a_page_takes_one_attribute_and_no_block_for_it(tier: SsdTier) -> None:
    store(tier, b"page", b"x" * 4096, FILE | {HITS: b"1"})
    path = tier.directory / "page"
    assert os.listxattr(path) == ["trusted.kvfs.page"]
    assert path.stat().st_blocks * 512 == 4096


def test_bytes_bypass_the_page_cache(tier: SsdTier) -> None:
    flags: list[int] = []

    def note(source_fd: int, target_fd: int, size: int) -> Work[Digest]:
        flags.append(fcntl.fcntl(target_fd, fcntl.F_GETFL))
        return copy(source_fd, target_fd, size)

    with source(b"content") as fd:
        tier.publish_page(finish(tier.write_page(new_page(b"content"), fd, note)), named(b"page"))
    assert flags[0] & os.O_DIRECT
    opened = tier.open_page(b"page", os.O_RDONLY | os.O_DIRECT)
    assert fcntl.fcntl(opened.fd, fcntl.F_GETFL) & os.O_DIRECT
    os.close(opened.fd)


def test_reading_a_page_leaves_the_time_of_its_use(tier: SsdTier) -> None:
    store(tier, b"page", b"content")
    read(tier, b"page")
    assert tier.stat(b"page").st_atime_ns == 1_000_000_000


def test_several_names_are_one_file(tier: SsdTier) -> None:
    content = os.urandom(100_000)
    names = named(b"a/one", b"b/two", b"three")
    occupied = tier.publish_page(write(tier, content), names)
    inodes = {tier.stat(path).st_ino for path, _ in names}
    assert len(inodes) == 1
    assert all(read(tier, path) == content for path, _ in names)
    assert tier.accounts.used_bytes < occupied + 100_000
    check_accounts(tier)
    tier.unlink(b"a/one")
    assert read(tier, b"b/two") == content
    tier.unlink(b"b/two")
    tier.unlink(b"three")
    check_accounts(tier)


def test_a_page_replaces_what_has_its_names(tier: SsdTier) -> None:
    store(tier, b"a/one", b"old" * 10_000)
    tier.publish_page(write(tier, b"linked"), named(b"two", b"three"))
    tier.make_directory(b"four", DIRECTORY)
    tier.publish_page(write(tier, b"new"), named(b"a/one", b"three", b"four"))
    assert [read(tier, path) for path in (b"a/one", b"three", b"four", b"two")] == [b"new"] * 3 + [b"linked"]
    assert tier.stat(b"two").st_nlink == 1
    check_accounts(tier)


def test_who_reads_a_page_that_is_replaced_keeps_it(tier: SsdTier) -> None:
    store(tier, b"page", b"old")
    opened = tier.open_page(b"page")
    store(tier, b"page", b"new")
    assert os.pread(opened.fd, 100, 0) == b"old"
    os.close(opened.fd)


def test_a_written_page_has_no_name_before_it_is_published(tier: SsdTier) -> None:
    written = write(tier, b"content")
    assert pages(tier) == set()
    assert len(temporaries(tier.directory)) == 1
    assert tier.accounts.reserved_bytes > 0
    with pytest.raises(NoSuchPage):
        tier.open_page(b"page")
    tier.publish_page(written, named(b"page"))
    assert pages(tier) == {b"page"}
    check_accounts(tier)


def test_an_abandoned_page_leaves_nothing(tier: SsdTier) -> None:
    written = write(tier, b"content")
    tier.abandon_page(written)
    tier.abandon_page(written)
    assert temporaries(tier.directory) == []
    with pytest.raises(NoSuchPage):
        tier.publish_page(written, named(b"page"))
    check_accounts(tier)


def test_bytes_that_changed_on_the_way_leave_nothing(tier: SsdTier) -> None:
    with (
        source(b"changed") as fd,
        pytest.raises(DamagedPage, match="a page to be stored is xxh3-128") as damaged,
    ):
        finish(tier.write_page(new_page(b"content"), fd, copy))
    assert damaged.value.reason == "bytes"
    assert temporaries(tier.directory) == []
    check_accounts(tier)


@pytest.mark.parametrize("step", STEPS)
def test_a_disk_that_fails_at_any_step_leaves_nothing_and_storing_again_works(ssd: Path, step: str) -> None:
    failing = True

    def fail(reached: str) -> None:
        if failing and reached == step:
            raise OSError(5, "Input/output error")

    tier = attach(ssd, step=fail)
    store_old = b"old" * 5000
    failing = False
    store(tier, b"a/page", store_old)
    failing = True
    while_published = step in ("directory", "described", "renamed")
    if while_published:
        written = write(tier, b"new" * 9000)
        with pytest.raises(OSError, match="Input/output error"):
            tier.publish_page(written, named(b"a/page", b"b/c/link"))
        assert (tier.accounts.reserved_bytes > 0) == (step != "renamed")
        tier.abandon_page(written)
    else:
        with pytest.raises(OSError, match="Input/output error"):
            write(tier, b"new" * 9000)
    assert temporaries(ssd) == []
    expected = b"new" * 9000 if step == "renamed" else store_old
    assert read(tier, b"a/page") == expected
    assert pages(tier) == {b"a/page"}
    check_accounts(tier)
    failing = False
    tier.publish_page(write(tier, b"again"), named(b"a/page", b"b/c/link"))
    assert read(tier, b"b/c/link") == b"again"
    check_accounts(tier)
    tier.close()


@pytest.mark.parametrize("step", ["directory", "described", "renamed"])
def test_publishing_that_the_disk_refused_can_be_tried_again(ssd: Path, step: str) -> None:
    failures = 2

    def fail(reached: str) -> None:
        nonlocal failures
        if reached == step and failures:
            failures -= 1
            raise OSError(5, "Input/output error")

    tier = attach(ssd, step=fail)
    written = write(tier, b"content")
    for _ in range(failures if step != "renamed" else 1):
        with pytest.raises(OSError, match="Input/output error"):
            tier.publish_page(written, named(b"a/page", b"b/link"))
    failures = 0
    tier.publish_page(written, named(b"a/page", b"b/link"))
    assert read(tier, b"a/page") == read(tier, b"b/link") == b"content"
    assert tier.stat(b"a/page").st_nlink == 2
    assert temporaries(ssd) == []
    check_accounts(tier)
    tier.close()


def test_names_that_the_tier_needs_are_refused(tier: SsdTier) -> None:
    for path in (b".kvfs-owner", b".kvfs-temporary/page", b".kvfs/status", b"lost+found/page"):
        with pytest.raises(NotStorable, match="own"):
            store(tier, path, b"content")
        with pytest.raises(NoSuchPage):
            tier.open_page(path)
    assert temporaries(tier.directory) == []
    check_accounts(tier)


def test_what_is_not_ours_is_never_replaced_or_entered(tier: SsdTier) -> None:
    (tier.directory / "file").write_text("mine")
    (tier.directory / "directory").mkdir()
    (tier.directory / "directory" / "deep").write_text("mine")
    (tier.directory / "link").symlink_to("/etc")
    for path in (b"file", b"directory", b"directory/new", b"file/below", b"link", b"link/below"):
        with pytest.raises(NotStorable, match=r"not ours|of ours|cannot be stored"):
            store(tier, path, b"content")
        with pytest.raises(NoSuchPage):
            tier.open_page(path)
    assert (tier.directory / "file").read_text() == "mine"
    assert os.listdir(tier.directory / "directory") == ["deep"]
    assert os.readlink(tier.directory / "link") == "/etc"
    assert temporaries(tier.directory) == []


def test_a_stale_page_gives_way_to_a_directory(tier: SsdTier) -> None:
    store(tier, b"a", b"stale")
    store(tier, b"a/page", b"content")
    assert pages(tier) == {b"a/page"}
    check_accounts(tier)


def test_a_name_or_an_attribute_that_does_not_fit_is_no_full_disk(tier: SsdTier) -> None:
    with pytest.raises(NotStorable, match="cannot be stored on the SSD: File name too long"):
        store(tier, b"n" * 256, b"content")
    on_ext4 = ssd_directory.filesystem_of(tier.root_fd) == "ext4"
    for size in (60_000, 70_000) if on_ext4 else (70_000,):  # XFS takes up to 64 KiB for each
        attributes = FILE | {f"user.{number}": b"x" * size for number in range(3)}
        with pytest.raises(NotStorable, match="attribute user"):
            store(tier, b"a/page", b"content", attributes)
    assert pages(tier) == set()
    assert temporaries(tier.directory) == []
    check_accounts(tier)


def test_attributes_that_need_a_block_are_in_the_accounts(tier: SsdTier) -> None:
    store(tier, b"page", b"content", FILE | {"user.mine": b"x" * 2000})
    check_accounts(tier)
    tier.set_attribute(b"page", "user.more", b"y" * 1500)
    check_accounts(tier)
    tier.remove_attribute(b"page", "user.mine")
    tier.remove_attribute(b"page", "user.more")
    check_accounts(tier)
    with pytest.raises(NotStorable):
        tier.set_attribute(b"page", "user.huge", b"x" * 70_000)


def test_a_page_larger_than_the_tier_is_never_tried(ssd: Path) -> None:
    tier = attach(ssd, MEBIBYTE)
    with pytest.raises(NotStorable, match=r"1\.0 MiB is larger than the SSD tier"):
        tier.reserve(MEBIBYTE)
    tier.close()


def test_o_direct_that_is_refused_later_is_given_up_with_one_warning(
    tier: SsdTier, expect_log: LogGuard
) -> None:
    def refuse(source_fd: int, target_fd: int, size: int) -> Work[Digest]:
        if fcntl.fcntl(target_fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return copy(source_fd, target_fd, size)

    expect_log("pages go through the page cache: it was refused: Invalid argument")
    for number in range(3):
        with source(b"content") as fd:
            written = finish(tier.write_page(new_page(b"content"), fd, refuse))
        tier.publish_page(written, named(b"%d" % number))
    assert not tier.direct
    assert len(expect_log.lines) == 1
    assert temporaries(tier.directory) == []
    assert len(pages(tier)) == 3
    check_accounts(tier)


def test_many_threads_store_the_same_and_other_pages(tier: SsdTier) -> None:
    problems: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(40):
                content = os.urandom(1000 * (1 + turn % 7))
                store(tier, b"same/page", content)
                store(tier, b"%d/%d" % (number, turn % 3), content)
                if turn % 5 == 4:
                    tier.unlink(b"%d/%d" % (number, turn % 3))
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    for path in pages(tier):
        read(tier, path)
    assert temporaries(tier.directory) == []
    check_accounts(tier)


def test_a_full_tier_says_how_much_to_evict_and_then_takes_the_page(ssd: Path) -> None:
    tier = attach(ssd, 4 * MEBIBYTE)
    for number in range(3):
        store(tier, b"%d" % number, os.urandom(MEBIBYTE))
    with pytest.raises(TierFull) as full:
        tier.reserve(2 * MEBIBYTE)
    assert MEBIBYTE < full.value.missing_bytes < MEBIBYTE + 200_000
    tier.unlink(b"0")
    tier.unlink(b"1")
    reservation = tier.reserve(2 * MEBIBYTE)
    content = os.urandom(2 * MEBIBYTE)
    with source(content) as fd:
        written = finish(tier.write_page(new_page(content), fd, copy, reservation))
        tier.publish_page(written, named(b"3"))
    check_accounts(tier)
    assert tier.accounts.used_bytes <= 4 * MEBIBYTE
    tier.close()


components = st.binary(min_size=1, max_size=40).filter(
    lambda name: not {0, 47} & set(name) and name not in (b".", b"..")
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(min_size=1, max_size=20_000), names=st.lists(components, min_size=1, max_size=4))
def test_any_bytes_under_any_name(tier: SsdTier, content: bytes, names: list[bytes]) -> None:
    path = b"/".join([b"%d" % len(tier.list(b"")), *names])
    store(tier, path, content)
    assert read(tier, path) == content
