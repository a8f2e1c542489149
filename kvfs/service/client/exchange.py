"""Requests that wait for their answers, matched by number. Its only I/O is to close what nobody waits for."""

from __future__ import annotations

import array
import os
import socket
from itertools import count
from typing import Final, Generic, TypeVar

from kvfs.service.client.runtime import Event

Answer = TypeVar("Answer")

_NUMBER: Final = array.array("i").itemsize


class Waiting(Generic[Answer]):
    """A request under way: its number, and what came of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.answer: Answer | None = None
        self.descriptors: list[int] = []
        self.error: Exception | None = None
        self.is_done = False
        self.woken: Event | None = None
        """Set by whoever waits while another receives: for its answer, or for its turn to receive."""


class Exchange(Generic[Answer]):
    """The requests of one connection. Numbers are never used twice, so an answer that comes after its request
    was given up is nobody else's. Not locked: the runtime guards it."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._waiting: dict[int, Waiting[Answer]] = {}
        self.is_received = False
        """Whether somebody is receiving for all."""

    def begin(self) -> Waiting[Answer]:
        waiting: Waiting[Answer] = Waiting(next(self._numbers))
        self._waiting[waiting.number] = waiting
        return waiting

    def give_up(self, waiting: Waiting[Answer]) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(waiting.number, None)
        close_all(waiting.descriptors)

    def settle(self, number: int, answer: Answer, descriptors: list[int]) -> None:
        """An answer came, with descriptors that whoever waits takes over."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            close_all(descriptors)
            return
        waiting.answer, waiting.descriptors = answer, descriptors
        self._wake(waiting)

    def fail(self, error: Exception) -> None:
        """No answer will come any more."""
        while self._waiting:
            waiting = self._waiting.popitem()[1]
            waiting.error = error
            self._wake(waiting)

    def pass_on(self) -> None:
        """Whoever received stops; one of those that wait goes on."""
        self.is_received = False
        for waiting in self._waiting.values():
            if waiting.woken is not None:
                waiting.woken.set()
                return

    @staticmethod
    def _wake(waiting: Waiting[Answer]) -> None:
        waiting.is_done = True
        if waiting.woken is not None:
            waiting.woken.set()


def close_all(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def descriptors_in(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    """The descriptors that came beside a message; ours to close from now on."""
    found = array.array("i")
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(content[: len(content) // _NUMBER * _NUMBER])
    return found.tolist()
