"""Who is at the other end of a connection, and what the mount would let them do."""

from __future__ import annotations

import array
import socket
import stat
from dataclasses import dataclass
from typing import Final

from kvfs.index import Directory, Entry
from kvfs.page import Owner

READ: Final = 4
WRITE: Final = 2
SEARCH: Final = 1

_CREDENTIALS: Final = array.array("i", (0, 0, 0))
_SO_PEERGROUPS: Final = 59
_MOST_GROUPS: Final = 256
"""Python reads no longer option of a socket than this of 4 bytes each."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A process as it was when it connected: user, groups (its own and the supplementary ones), and
    number."""

    uid: int
    gid: int
    groups: frozenset[int]
    pid: int

    @classmethod
    def of(cls, connected: socket.socket) -> Peer:
        """What the kernel says of the other end. Of more than 256 supplementary groups none counts."""
        size = _CREDENTIALS.itemsize * len(_CREDENTIALS)
        pid, uid, gid = memoryview(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)).cast(
            "I"
        )
        try:
            further = connected.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
        except OSError:  # too many for the answer: fewer rights, never more
            further = b""
        return cls(uid, gid, frozenset((gid, *memoryview(further).cast("I"))), pid)

    def may(self, owner: Owner, wanted: int) -> bool:
        """Whether the mode of an entry lets them do what is ``wanted`` (READ | WRITE | SEARCH)."""
        if self.uid == 0:
            return True
        shift = 6 if self.uid == owner.uid else 3 if owner.gid in self.groups else 0
        return wanted & (owner.mode >> shift) == wanted

    def may_replace(self, directory: Directory, entry: Entry) -> bool:
        """Whether they may take a name away in a directory that they may write to: in a sticky one only their
        own, or if it is theirs."""
        is_sticky = directory.owner.mode & stat.S_ISVTX
        return not is_sticky or self.uid in (0, entry.owner.uid, directory.owner.uid)
