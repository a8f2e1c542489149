"""What comes of a request: the answer, the descriptors beside it, and what is to be counted once it is
sent."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfs.errors import KvfsError, NoSuchPage, StalePage
from kvfs.index import Entry
from kvfs.service.messages import Answer


@dataclass(slots=True)
class Reply:
    """``descriptors`` are closed once they are sent. ``used`` pages were opened for reading, ``missed`` keys
    looked for in vain: both are counted afterwards, because nobody has to wait for that."""

    answer: Answer
    descriptors: list[int] = field(default_factory=list)
    used: Sequence[Entry] = ()
    missed: Sequence[bytes] = ()

    def close(self) -> None:
        while self.descriptors:
            os.close(self.descriptors.pop())


def code_of(error: KvfsError | OSError) -> int:
    """The code by which a client is told of an error. What was replaced or evicted meanwhile is absent."""
    if isinstance(error, StalePage):
        return NoSuchPage.errno
    return error.errno or KvfsError.errno
