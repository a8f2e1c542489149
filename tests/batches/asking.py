"""A client of the batch socket as small as can be: one request at a time, or as many as one likes."""

from __future__ import annotations

import array
import os
import socket
from pathlib import Path
from types import TracebackType
from typing import Self

from kvfs.service.messages import (
    LARGEST_MESSAGE,
    MOST_DESCRIPTORS,
    SOCKET,
    Answer,
    Codes,
    Commit,
    Create,
    Created,
    Failed,
    Hello,
    Open,
    Opened,
    Request,
    decode_answer,
    encode,
)

SECONDS = 20


class Asking:
    """Owns the connected socket."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.socket.settimeout(SECONDS)
        self.truncated = False
        self._number = 0

    @classmethod
    def connect(cls, mountpoint: Path) -> Self:
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connected.connect(str(mountpoint / SOCKET))
        asking = cls(connected)
        asking.greet()
        return asking

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def number(self) -> int:
        self._number += 1
        return self._number

    def greet(self) -> Answer:
        return self.ask(Hello(self.number()))[0]

    def send(self, request: Request) -> None:
        self.socket.send(encode(request))

    def receive(self) -> tuple[Answer, list[int]]:
        """The next answer, and the descriptors that came with it, which are the caller's."""
        packet, ancillary, flags, _ = self.socket.recvmsg(
            LARGEST_MESSAGE, socket.CMSG_SPACE(4 * MOST_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
        )
        descriptors = array.array("i")
        for _, _, content in ancillary:
            descriptors.frombytes(content[: len(content) // 4 * 4])
        self.truncated = bool(flags & socket.MSG_CTRUNC)
        if not packet:
            raise EOFError
        return decode_answer(packet)[1], list(descriptors)

    def ask(self, request: Request) -> tuple[Answer, list[int]]:
        self.send(request)
        answer, descriptors = self.receive()
        assert answer.number == request.number
        return answer, descriptors

    def codes(self, request: Request) -> list[int]:
        answer, descriptors = self.ask(request)
        assert isinstance(answer, Codes), answer
        assert not descriptors
        return answer.codes

    def failure(self, request: Request) -> Failed:
        answer, descriptors = self.ask(request)
        assert isinstance(answer, Failed), answer
        assert not descriptors
        return answer

    # What takes more than one step

    def create(self, contents: list[bytes]) -> list[int]:
        """Drafts with these bytes, closed; their numbers."""
        answer, descriptors = self.ask(Create(self.number(), [len(one) for one in contents]))
        assert isinstance(answer, Created), answer
        for fd, content in zip(descriptors, contents, strict=True):
            assert os.pwrite(fd, content, 0) == len(content)
            os.close(fd)
        return answer.drafts

    def put(self, pages: dict[bytes, bytes], mode: int = 0o644) -> list[int]:
        """The codes of a commit of these pages."""
        drafts = self.create(list(pages.values()))
        return self.codes(Commit(self.number(), drafts, list(pages), mode))

    def open(self, keys: list[bytes], wait_seconds: float = 0.0) -> tuple[Opened, list[int]]:
        answer, descriptors = self.ask(Open(self.number(), keys, wait_seconds))
        assert isinstance(answer, Opened), answer
        return answer, descriptors

    def read(self, key: bytes) -> bytes | None:
        """The bytes of a page; None for a miss."""
        answer, descriptors = self.open([key])
        if not descriptors:
            assert answer.codes != [0]
            return None
        try:
            return os.pread(descriptors[0], answer.sizes[0], 0)
        finally:
            os.close(descriptors[0])
