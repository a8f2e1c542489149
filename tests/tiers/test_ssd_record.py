from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.page import DIGEST, OWNER, SPARSE, Digest, Owner
from kvfs.tiers.ssd_names import binding, is_reserved, prefixes
from kvfs.tiers.ssd_record import HITS, MOST_HITS, Record

ROOM_IN_AN_INODE = 88 - 16 - 12
"""What ext4 leaves in an inode of 256 bytes, less the head of an attribute and its name "kvfs.page"."""

digests = st.builds(Digest, st.binary(min_size=16, max_size=16).map(bytes.hex), st.integers(0, 2**63))
owners = st.builds(
    Owner, st.integers(0o10000, 0o177777), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)
)
identities = st.integers(0, 2**64 - 1)
records = st.builds(
    Record,
    st.none() | digests,
    st.none() | owners,
    st.booleans(),
    st.integers(0, MOST_HITS),
    identities,
    st.lists(identities, max_size=5).map(tuple),
)


@given(records)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    assert Record.unpack(record.pack()) == record


@given(records, st.data())
def test_any_changed_bit_is_noticed(record: Record, data: st.DataObject) -> None:
    value = bytearray(record.pack())
    position = data.draw(st.integers(0, 8 * len(value) - 1))
    value[position // 8] ^= 1 << position % 8
    with pytest.raises(ValueError, match="record"):
        Record.unpack(bytes(value))


@given(st.binary(max_size=80))
def test_what_is_no_record_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match="record"):
        Record.unpack(value)


@given(records, st.integers(1, 40))
def test_a_record_that_is_cut_short_is_refused(record: Record, missing: int) -> None:
    with pytest.raises(ValueError, match="record"):
        Record.unpack(record.pack()[:-missing])


def test_a_page_with_two_names_fits_into_an_inode() -> None:
    page = Record(Digest("ab" * 16, 1 << 40), Owner(0o100644, 1 << 31, 1 << 31), True, MOST_HITS, 0, (1, 2))
    assert len(page.pack()) <= ROOM_IN_AN_INODE


@given(digests, owners, st.integers(0, MOST_HITS))
def test_texts_are_those_of_every_tier(digest: Digest, owner: Owner, hits: int) -> None:
    texts = {
        DIGEST: digest.format().encode(),
        OWNER: owner.format().encode(),
        SPARSE: b"1",
        HITS: b"%d" % hits,
    }
    record = Record()
    try:
        Owner.parse(texts[OWNER])
    except ValueError:
        del texts[OWNER]
    for name, text in texts.items():
        record.set_text(name, text)
    if not hits:
        del texts[HITS]
    assert record.texts() == texts
    for name in texts:
        record.remove_text(name)
    assert record == Record()


@pytest.mark.parametrize(("name", "text"), [(DIGEST, b"md5:1:2"), (OWNER, b"root"), (HITS, b"many")])
def test_texts_that_do_not_parse_are_refused(name: str, text: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a|invalid literal"):
        Record().set_text(name, text)


def test_more_hits_than_can_be_kept_are_the_most() -> None:
    record = Record()
    record.set_text(HITS, b"%d" % (1 << 40))
    assert record.hits == MOST_HITS
    assert Record.unpack(Record(hits=1 << 40).pack()).hits == MOST_HITS


def test_a_binding_depends_on_directory_and_name() -> None:
    assert len({binding(identity, name) for identity in (1, 2, 3) for name in (b"a", b"b", b"ab")}) == 9


def test_names_on_the_way() -> None:
    assert list(prefixes(b"a/bc/d")) == [b"a", b"a/bc", b"a/bc/d"]
    assert list(prefixes(b"a")) == [b"a"]
    assert list(prefixes(b"")) == []


def test_reserved_names() -> None:
    for path in (b".kvfs", b".kvfs-owner", b".kvfs-temporary/1", b".kvfs-of-tomorrow/x", b"lost+found/1"):
        assert is_reserved(path)
    for path in (b"", b"kvfs", b"a/.kvfs-owner", b"a/lost+found", b"lost+found2"):
        assert not is_reserved(path)
