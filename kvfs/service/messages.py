"""What the client and the daemon say to each other over the batch socket, and how much at once. Pure.

The socket is `.kvfs/socket` below the mount, of type SOCK_SEQPACKET: a message is one packet, an array in
msgpack whose first element tells its kind. Each request carries a number that its client chooses, and exactly
one answer carries it back; answers come in any order, so many requests may be under way on one connection.
The first message of a connection is a `Hello`, and nothing else is sent before its `Welcome` has come.

A key is the path of a page below the mount, as bytes, without "/" at either end, "." or "..". Keys are
handled in order. To the socket only pages exist: what is still being written is absent, under whatever name.

Descriptors come beside the answer (SCM_RIGHTS), one for each thing that the answer says has one, in order. A
client that may open no more files gets fewer (MSG_CTRUNC): the last ones are missing. What they were of is
not lost: it closes some, and asks again for what it did not get.

**Who splits.** The client: no message is longer than `LARGEST_MESSAGE` bytes, names more than `MOST_KEYS`
keys, or, where the answer has descriptors or describes pages, more than `MOST_DESCRIPTORS` (each request says
which). `split_keys` and `split_sizes` do it. A request above a limit is refused whole. The daemon may answer
`Open` and `OpenStored` for fewer keys than were asked for, at least for the first: the rest is to be asked
for again.

**Failures.** A code is 0, or the errno of a class in `kvfs.errors`, which `kvfs.errors.from_errno` gives
back. An answer has a code for each key, and `Failed` one for a whole request, of which nothing was done then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from kvfs.errors import NoSuchPage, UsageError

VERSION: Final = 1
"""Goes up when an older peer would misunderstand. A field that is added at the end with a default needs
none."""
SOCKET: Final = ".kvfs/socket"
"""Below the mount."""

LARGEST_MESSAGE: Final = 1 << 16
"""Bytes."""
MOST_KEYS: Final = 1024
MOST_DESCRIPTORS: Final = 253
"""The kernel passes no more with one message."""
LONGEST_KEY: Final = 3999
"""Bytes."""
LONGEST_WAIT: Final = 30.0
"""Seconds that one request may wait for pages; who waits longer asks again."""

DONE: Final = 0
ABSENT: Final = NoSuchPage.errno
"""The code of a key without a page: a miss."""

_OVERHEAD: Final = 128
"""Bytes of a request besides its keys and numbers, at most."""
_KEY_OVERHEAD: Final = 3
_LARGEST_NUMBER: Final = 9
"""Bytes of an integer, at most."""


class _Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    number: int
    """Of the request, chosen by the client; at least 1."""


# Requests


class Hello(_Message, frozen=True, array_like=True, gc=False, tag=0):
    """Answered by `Welcome`; by `Failed` (VersionMismatch) where the daemon does not speak that version,
    which then closes the connection. The same in all versions."""

    version: int = VERSION


class Exists(_Message, frozen=True, array_like=True, gc=False, tag=1):
    """Which keys have pages. Answered by `Codes`: 0, `ABSENT`, or why it may not be known."""

    keys: list[bytes]


class MatchPrefix(_Message, frozen=True, array_like=True, gc=False, tag=2):
    """How many keys have pages, from the first on without a gap. Answered by `Count`."""

    keys: list[bytes]


class Open(_Message, frozen=True, array_like=True, gc=False, tag=3):
    """Opens pages for reading; at most `MOST_DESCRIPTORS`. Answered by `Opened`.

    What is only on the SSD is brought into DRAM first. With ``wait_seconds``, at most `LONGEST_WAIT`, the
    answer comes when no key is absent any more, or after that time.
    """

    keys: list[bytes]
    wait_seconds: float = 0.0


class Create(_Message, frozen=True, array_like=True, gc=False, tag=4):
    """Makes drafts of so many bytes, each at least 1; at most `MOST_DESCRIPTORS`. Answered by `Created`.

    All of them or none: `Failed` with OutOfRoom, or FileTooLarge above half of the pool. Their memory is
    allocated. They have no name, belong to the connection, and go with it.
    """

    sizes: list[int]


class Commit(_Message, frozen=True, array_like=True, gc=False, tag=5):
    """Makes drafts pages: ``drafts[i]`` under ``keys[i]``. Answered by `Codes`, one for each key.

    First the client lets go of them: no descriptor of a draft may be open, no writable mapping (PageInUse).
    Either all codes are 0, or none is (keys that are not to blame have the code of one that is): then there
    is no new page and the drafts stay, to be committed again or aborted. The one exception is a tier that
    fails in the middle: keys with 0 are pages then, and their drafts gone.
    A page that has a key is replaced; who reads it keeps it. Directories on the way are made.
    ``mode`` is the permission bits of the pages, the umask applied; directories get x where it has r.
    """

    drafts: list[int]
    keys: list[bytes]
    mode: int = 0o644


class Abort(_Message, frozen=True, array_like=True, gc=False, tag=6):
    """Drops drafts. Answered by `Codes`, one for each: 0, or `ABSENT` for one that is not there (any
    more)."""

    drafts: list[int]


class Prefetch(_Message, frozen=True, array_like=True, gc=False, tag=7):
    """Brings pages into DRAM soon. Answered at once by `Codes`: 0 for those that are there or will be tried,
    `ABSENT`, or Busy's for those beyond what may wait. What is not begun within 30 s is given up."""

    keys: list[bytes]


class Touch(_Message, frozen=True, array_like=True, gc=False, tag=8):
    """Counts as if the pages had been opened now. Answered by `Codes`."""

    keys: list[bytes]


class Pin(_Message, frozen=True, array_like=True, gc=False, tag=9):
    """Keeps pages in DRAM, and brings them there; or no longer does, with ``pinned`` false. Left to the owner
    of each, and to root. Answered by `Codes`; a pin outlives the connection."""

    keys: list[bytes]
    pinned: bool = True


class Delete(_Message, frozen=True, array_like=True, gc=False, tag=10):
    """Takes the names away; who reads a page keeps it. Answered by `Codes`, 0 where there was a file."""

    keys: list[bytes]


class Stat(_Message, frozen=True, array_like=True, gc=False, tag=11):
    """What is known of pages; at most `MOST_DESCRIPTORS`. Answered by `Stats`."""

    keys: list[bytes]


class OpenStored(_Message, frozen=True, array_like=True, gc=False, tag=12):
    """Opens the pages' files on the SSD, O_DIRECT, for reading past DRAM; at most `MOST_DESCRIPTORS`.
    Answered by `OpenedStored`; `ABSENT` for a page without a copy there. Who reads has to compare the
    digest."""

    keys: list[bytes]


# Answers


class Welcome(_Message, frozen=True, array_like=True, gc=False, tag=0):
    """``version`` is what both speak. ``is_read_only``: descriptors for reading cannot be opened anew for
    writing, which a daemon without the right to mount cannot promise to its own user."""

    version: int
    is_read_only: bool


class Failed(_Message, frozen=True, array_like=True, gc=False, tag=1):
    """Nothing of a request was done. ``text`` is one line for a person. With the number 0 it answers a
    message that cannot be read, or what came before the hello; the connection is then closed."""

    code: int
    text: str


class Codes(_Message, frozen=True, array_like=True, gc=False, tag=2):
    """``codes[i]`` says what came of the i-th key (of `Abort`: of the i-th draft)."""

    codes: list[int]


class Count(_Message, frozen=True, array_like=True, gc=False, tag=3):
    """``code`` says why counting ended at that key, where it is neither the last nor merely absent; else
    0."""

    count: int
    code: int = DONE


class Opened(_Message, frozen=True, array_like=True, gc=False, tag=4):
    """Of the first ``len(codes)`` keys; those beyond are to be asked for again. A descriptor comes for each
    code 0, in order. ``sizes[i]`` is the size of the page in bytes, 0 where there is none."""

    codes: list[int]
    sizes: list[int]


class Created(_Message, frozen=True, array_like=True, gc=False, tag=5):
    """A number for each draft, never used again on this connection, and a descriptor (O_RDWR) for each, in
    order. A draft of which the descriptor did not come is of no use: abort it."""

    drafts: list[int]


class PageStatus(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``size`` in bytes; ``digest`` as "xxh3-128:HEX:SIZE"; ``tier`` is where it is read from, "dram" or
    "ssd"; ``hits`` how often it was opened for reading."""

    size: int
    digest: str
    tier: str
    hits: int
    is_pinned: bool


class Stats(_Message, frozen=True, array_like=True, gc=False, tag=6):
    """``pages[i]`` is None where ``codes[i]`` is not 0."""

    codes: list[int]
    pages: list[PageStatus | None]


class OpenedStored(_Message, frozen=True, array_like=True, gc=False, tag=7):
    """As `Opened`; ``digests[i]`` as in `PageStatus`, empty where there is none."""

    codes: list[int]
    sizes: list[int]
    digests: list[str]


Request: TypeAlias = (
    Hello
    | Exists
    | MatchPrefix
    | Open
    | Create
    | Commit
    | Abort
    | Prefetch
    | Touch
    | Pin
    | Delete
    | Stat
    | OpenStored
)
Answer: TypeAlias = Welcome | Failed | Codes | Count | Opened | Created | Stats | OpenedStored

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    """One packet."""
    return _encoder.encode(message)


def decode_request(packet: bytes | memoryview) -> Request:
    """Raises UsageError for what is no request."""
    try:
        return _requests.decode(packet)
    except msgspec.MsgspecError as error:
        raise UsageError(f"a message that is no request: {error}") from None


def decode_answer(packet: bytes) -> tuple[int, Answer]:
    """The number of the request, and the answer. Raises UsageError for what is no answer."""
    try:
        answer = _answers.decode(packet)
    except msgspec.MsgspecError as error:
        raise UsageError(f"a message that is no answer: {error}") from None
    return answer.number, answer


def split_keys(keys: Sequence[bytes], most: int = MOST_KEYS, beside: int = 0) -> Iterator[slice]:
    """Cuts keys into runs that fit into one request each. ``most`` is the limit of keys of that request, and
    ``beside`` how many integers go along with each key (`Commit`: 1). Raises UsageError for a key that is too
    long. No keys, no runs."""
    start, length = 0, _OVERHEAD
    for place, key in enumerate(keys):
        if len(key) > LONGEST_KEY:
            raise UsageError(f"a key has at most {LONGEST_KEY} bytes, not {len(key)}")
        more = len(key) + _KEY_OVERHEAD + beside * _LARGEST_NUMBER
        if place - start == most or length + more > LARGEST_MESSAGE:
            yield slice(start, place)
            start, length = place, _OVERHEAD
        length += more
    if keys:
        yield slice(start, len(keys))


def split_sizes(sizes: Sequence[int]) -> Iterator[slice]:
    """The same for the sizes of `Create`."""
    for start in range(0, len(sizes), MOST_DESCRIPTORS):
        yield slice(start, min(start + MOST_DESCRIPTORS, len(sizes)))
