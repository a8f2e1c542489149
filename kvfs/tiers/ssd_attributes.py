"""Attributes of the SSD tier: the common ones packed into one record, all others as they are."""

from __future__ import annotations

import os
import threading

from kvfs.errors import AttributeMissing, DamagedPage
from kvfs.tiers.attributes import KernelAttributes, Target
from kvfs.tiers.ssd_record import TEXTS, Record

RECORD = "page"


class RecordAttributes(KernelAttributes):
    """Extended attributes in which digest, owner, sparse and hits lie together, in the attribute "page".

    Reading a record that was damaged raises DamagedPage. Any thread may ask; changes wait for each other.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self._record = prefix + RECORD
        self._lock = threading.Lock()

    # The record as a whole

    def record(self, target: Target) -> Record:
        """Raises AttributeMissing where there is none."""
        return self._parse(super().get(target, RECORD), target)

    @staticmethod
    def _parse(value: bytes, target: Target) -> Record:
        try:
            return Record.unpack(value)
        except ValueError as error:
            raise DamagedPage(f"{target!r}: {error}", "attributes") from None

    def write(self, target: Target, record: Record) -> None:
        super().set(target, RECORD, record.pack())

    def update_hits(self, target: Target, hits: int) -> None:
        """Raises AttributeMissing where there is no record."""
        with self._lock:
            record = self.record(target)
            record.hits = hits
            self.write(target, record)

    def bind(self, target: Target, add: tuple[int, ...] = (), drop: tuple[int, ...] = ()) -> None:
        """Adds and removes names of what is at ``target``; nothing happens where there is no record."""
        with self._lock:
            try:
                record = self.record(target)
            except AttributeMissing:
                return
            kept = tuple(name for name in record.names if name not in drop and name not in add)
            if kept + add != record.names:
                record.names = kept + add
                self.write(target, record)

    # One attribute

    def get(self, target: Target, name: str) -> bytes:
        if name not in TEXTS:
            return super().get(target, name)
        try:
            return self.record(target).texts()[name]
        except KeyError:
            raise AttributeMissing(f"{target!r} has no attribute {name}") from None

    def set(self, target: Target, name: str, value: bytes) -> None:
        """Raises ValueError for a value of a packed attribute that is not in its text form."""
        if name not in TEXTS:
            super().set(target, name, value)
            return
        with self._lock:
            try:
                record = self.record(target)
            except AttributeMissing:
                record = Record()
            record.set_text(name, value)
            self.write(target, record)

    def remove(self, target: Target, name: str) -> None:
        if name not in TEXTS:
            super().remove(target, name)
            return
        with self._lock:
            record = self.record(target)
            if name not in record.texts():
                raise AttributeMissing(f"{target!r} has no attribute {name}")
            record.remove_text(name)
            self.write(target, record)

    def names(self, target: Target) -> list[str]:
        names = super().names(target)
        if RECORD not in names:
            return names
        names.remove(RECORD)
        return [*self.record(target).texts(), *names]

    def all(self, fd: int) -> dict[str, bytes]:
        """A record that was damaged is shown as the attribute "page"."""
        record, others = self.examine(fd)
        if record is not None:
            others.update(record.texts())
        return others

    def unparsed(self, fd: int) -> dict[str, bytes]:
        """All attributes as they are, the record among them as "page"."""
        return super().all(fd)

    def examine(self, fd: int) -> tuple[Record | None, dict[str, bytes]]:
        """The record, and the other attributes by name. A record that was damaged is among the others."""
        record = None
        others: dict[str, bytes] = {}
        for name in os.listxattr(fd):
            if name == self._record:
                value = os.getxattr(fd, name)
                try:
                    record = Record.unpack(value)
                except ValueError:
                    others[RECORD] = value
            elif name.startswith(self.prefix):
                others[name.removeprefix(self.prefix)] = os.getxattr(fd, name)
        return record, others
