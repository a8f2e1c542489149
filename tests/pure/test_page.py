from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.page import Digest, Owner, digest_of

KNOWN = "xxh3-128:99aa06d3014798d86001c324468d497f:0"


def test_the_digest_of_nothing_is_the_published_one() -> None:
    assert digest_of(b"").format() == KNOWN


def test_every_kind_of_buffer_has_the_same_digest() -> None:
    content = bytes(range(256)) * 64
    with mmap.mmap(-1, len(content)) as mapping:
        mapping[:] = content
        assert (
            digest_of(content)
            == digest_of(bytearray(content))
            == digest_of(memoryview(content))
            == digest_of(memoryview(content).cast("I"))
            == digest_of(mapping)
        )
    assert digest_of(content).size == len(content)


def test_one_bit_or_one_byte_more_is_another_digest() -> None:
    assert digest_of(b"\0" * 4096) != digest_of(b"\0" * 4095 + b"\1")
    assert digest_of(b"\0" * 4096) != digest_of(b"\0" * 4097)


@given(st.binary(max_size=300))
def test_a_digest_survives_its_text_form(content: bytes) -> None:
    digest = digest_of(content)
    assert Digest.parse(digest.format()) == digest
    assert Digest.parse(str(digest).encode()) == digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        "xxh3-128",
        KNOWN + " ",
        KNOWN + "\n",
        KNOWN.upper(),
        KNOWN.replace("xxh3", "sha1"),
        KNOWN[:-2],
        KNOWN + "0",
        KNOWN[:-1] + "-1",
        "xxh3-128:99aa:0",
        b"\xff\xfe",
        KNOWN[:-1] + "\N{ARABIC-INDIC DIGIT THREE}",
    ],
)
def test_what_is_no_digest_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"not a digest|ascii"):
        Digest.parse(text)


@given(
    st.sampled_from([0o100000, 0o040000, 0o120000, 0o140000, 0o010000]),
    st.integers(0, 0o7777),
    st.integers(0, 2**32 - 1),
)
def test_an_owner_survives_its_text_form(kind: int, permissions: int, identifier: int) -> None:
    owner = Owner(kind | permissions, identifier, 0)
    assert Owner.parse(owner.format()) == owner
    assert Owner.parse(str(owner).encode()) == owner


def test_an_owner_is_written_as_people_read_it() -> None:
    assert Owner(0o100644, 1000, 1001).format() == "100644 1000 1001"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "644 0 0",
        "100644 0",
        "100644 0 0 0",
        "100644 -1 0",
        "100644 4294967296 0",
        "777777 0 0",
        "100648 0 0",
        b"\xff",
    ],
)
def test_what_is_no_owner_is_refused(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"not an owner|ascii"):
        Owner.parse(text)
