"""The names of the SSD tier: directories and files come, go and move."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

from kvfs import syscalls
from kvfs.errors import NotStorable
from kvfs.tiers.directories import Directory
from kvfs.tiers.ssd_base import AttributeTexts, Move, Renaming, SsdBase, new_identity, occupied
from kvfs.tiers.ssd_directory import MARK, is_ours
from kvfs.tiers.ssd_names import TEMPORARY, binding, prefixes
from kvfs.tiers.ssd_record import Record


class SsdTree(SsdBase):
    """A file is ours by its mark, and belongs to its names by the bindings in its record. What is not ours is
    as good as absent to those who look, and in the way of those who store: it is never changed or replaced.
    """

    # Directories

    def mkdir(self, path: bytes) -> None:
        self.make_directory(path, {})

    def make_directory(self, path: bytes, attributes: AttributeTexts) -> None:
        """A new directory, which appears with its attributes. Raises FileExistsError."""
        with self.lock:
            directory, name = self._locate(path)
            with contextlib.suppress(FileNotFoundError):
                os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
                raise FileExistsError(path)
            record = Record(identity=new_identity())
            record.names = (binding(self._identity(path.rpartition(b"/")[0]), name),)
            place, temporary = self.beside(TEMPORARY), b"%d" % next(self._serial)
            os.mkdir(temporary, 0o700 | MARK, dir_fd=place.fd)
            try:
                self.describe(place.proc + temporary, record, attributes)
                self._step("directory")
                with self._growth(directory):
                    os.rename(temporary, name, src_dir_fd=place.fd, dst_dir_fd=directory.fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.rmdir(temporary, dir_fd=place.fd)
                raise
            self._directories.forget(path)  # somebody else may have removed the one that we knew
            status = os.stat(name, dir_fd=directory.fd, follow_symlinks=False)
            self.accounts.changed(status.st_ino, 0, occupied(status))

    def beside(self, name: bytes) -> Directory:
        """A directory of the tier's own beside the tree, made where it is missing."""
        with self.lock:
            try:
                return self._living(name)
            except FileNotFoundError:
                os.mkdir(name, 0o700 | MARK, dir_fd=self.root_fd)
                return self._directories.get(name)

    def _living(self, path: bytes) -> Directory:
        """A directory that is there now: one that we had open may have been removed behind our back."""
        directory = self._directories.get(path)
        if not os.fstat(directory.fd).st_nlink:
            self._directories.forget(path)
            directory = self._directories.get(path)
        return directory

    def rmdir(self, path: bytes) -> None:
        with self.lock:
            directory, name = self._locate(path)
            with self._growth(directory), self._losing(directory, name):
                os.rmdir(name, dir_fd=directory.fd)
            self._directories.forget(path)

    def enter(self, path: bytes, parents: Sequence[AttributeTexts] = ()) -> Directory:
        """The directory at ``path``, made with those on the way to it where they are missing.

        ``parents`` are the attributes of each, from the top. A directory that lost its identity gets a new
        one: what is in it will be found to be misplaced. Raises NotStorable where something is not ours.
        """
        with self.lock:
            for depth, prefix in enumerate(prefixes(path)):
                try:
                    directory = self._living(prefix)
                except FileNotFoundError:
                    self.make_directory(prefix, parents[depth] if depth < len(parents) else {})
                    continue
                except NotADirectoryError:
                    self._unlink_stale(prefix)
                    self.make_directory(prefix, parents[depth] if depth < len(parents) else {})
                    continue
                if not is_ours(os.fstat(directory.fd)):
                    raise NotStorable(f"{prefix!r} on the SSD is not a directory of ours")
            self._identity(path)
            return self._directories.get(path)

    def _unlink_stale(self, path: bytes) -> None:
        """A page of ours is where there is a directory now."""
        try:
            self.unlink(path)
        except FileNotFoundError:
            raise NotStorable(f"{path!r} on the SSD is not a directory of ours") from None

    # Files

    def link(self, old: bytes, new: bytes) -> None:
        with self.lock:
            old_directory, old_name = self._locate(old)
            self._status(old_directory, old_name)
            new_directory, new_name = self._locate(new)
            self._identity(new.rpartition(b"/")[0])
            bound = self._binding(new_directory.fd, new_name)
            fd = self._open_any(old_directory, old_name)
            try:
                self._bind(fd, add=(bound,))
                with self._growth(new_directory):
                    os.link(
                        old_name,
                        new_name,
                        src_dir_fd=old_directory.fd,
                        dst_dir_fd=new_directory.fd,
                        follow_symlinks=False,
                    )
                status = os.fstat(fd)
                self.accounts.count(status.st_ino, occupied(status))
            finally:
                os.close(fd)

    def unlink(self, path: bytes) -> None:
        with self.lock:
            directory, name = self._locate(path)
            with self._growth(directory), self._losing(directory, name):
                os.unlink(name, dir_fd=directory.fd)

    def rename(self, old: bytes, new: bytes, flags: int = 0) -> None:
        """Renames what is ours, over what is ours or to a free name. Raises NotStorable where something else
        is in the way."""
        with self.lock:
            old_directory, old_name = self._locate(old)
            new_directory, new_name = self._locate(new)
            status = self._status(old_directory, old_name)
            if self._is_same_file(status, new_directory, new_name):
                if flags & syscalls.RENAME_NOREPLACE:
                    raise FileExistsError(new)
                return  # POSIX: both names stay
            self._identity(new.rpartition(b"/")[0])
            renamings = [Renaming(old_directory, old_name, new_directory, new_name)]
            paths = [(old, new)]
            if flags & syscalls.RENAME_EXCHANGE:
                self._status(new_directory, new_name)
                self._identity(old.rpartition(b"/")[0])
                renamings.append(Renaming(new_directory, new_name, old_directory, old_name))
                paths.append((new, old))
            with self._between_names(renamings) as descriptors:
                with self._growth(old_directory, new_directory), contextlib.ExitStack() as ends:
                    if not flags and self._stands_in_place(new_directory, new_name):
                        ends.enter_context(self._losing(new_directory, new_name))
                    syscalls.renameat2(old_directory.fd, old_name, new_directory.fd, new_name, flags)
                statuses = [os.fstat(fd) for fd in descriptors]
            self._moved([Move(*path, status) for path, status in zip(paths, statuses, strict=True)])

    def _moved(self, moves: Sequence[Move]) -> None:
        for move in moves:
            # It may have come to a place that a walk has passed already.
            self.accounts.count(move.status.st_ino, occupied(move.status))
            if stat.S_ISDIR(move.status.st_mode):
                self._directories.forget(move.old)
                self._directories.forget(move.new)
        if self.walker is not None:
            self.walker.moved(moves)
