"""cuFile, by the package KvikIO.

Between a file and the memory of the host, KvikIO moves bytes by POSIX calls in threads of its own. What
cuFile adds, a way from the SSD that leaves out the processor, ends in the memory of a GPU. KvikIO is given
the file on the SSD, by its descriptor, and never a path of the mount.

Importing it takes half a second and needs no GPU; moving bytes needs the CUDA driver, libcuda.so.1.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

from kvfs.copies.copier import DEPTH, Copier, Lane
from kvfs.errors import Unavailable, told_in_words

CUFILE: Final = "cufile"
GPU_DIRECT_STORAGE: Final = "/proc/driver/nvidia-fs"
"""Of the kernel module without which cuFile is POSIX calls."""


def import_kvikio() -> ModuleType:
    """The package. Raises Unavailable where there is none, or where what it needs is missing."""
    if importlib.util.find_spec("kvikio") is None:
        raise Unavailable("KvikIO is not installed: pip install kvfs[cufile]")
    try:
        importlib.import_module("kvikio.defaults")
        return importlib.import_module("kvikio")
    except Exception as error:  # whatever a native library has to say of this host
        raise Unavailable(f"KvikIO cannot be imported: {error}") from error


class _Reading:
    """A chunk that KvikIO moves."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def wait(self) -> int:
        try:
            return int(self._future.get())
        except RuntimeError as error:
            if "EOF" in str(error):  # the file is shorter than it was when the copy began
                return 0
            raise _translated(error) from error


class _KvikioLane:
    """A file that KvikIO has opened."""

    def __init__(self, file: Any, size: int, *, writing: bool) -> None:
        self._file = file
        self._size = size
        self._writing = writing

    def start(self, memory: memoryview, offset: int) -> _Reading:
        try:
            if self._writing:
                return _Reading(self._file.pwrite(memory, size=len(memory), file_offset=offset))
            length = min(len(memory), self._size - offset)  # to KvikIO the end of a file is a failure
            return _Reading(self._file.pread(memory[:length], size=length, file_offset=offset))
        except RuntimeError as error:
            raise _translated(error) from error


def _translated(error: RuntimeError) -> Exception:
    return told_in_words(str(error)) or error


class CufileCopier(Copier):
    """Moves several chunks at once, in the threads of KvikIO."""

    name = CUFILE

    def __init__(self) -> None:
        """Raises Unavailable where KvikIO cannot be had."""
        super().__init__()
        self._kvikio = import_kvikio()
        self._kvikio.defaults.set(
            {"num_threads": DEPTH, "auto_direct_io_read": True, "auto_direct_io_write": True}
        )

    @property
    def mode(self) -> str:
        """ "gds" where KvikIO would use GPUDirect Storage, else "posix"."""
        return "posix" if self._kvikio.defaults.is_compat_mode_preferred() else "gds"

    @contextlib.contextmanager
    def open_lane(self, fd: int, size: int, *, writing: bool, idle: bool) -> Iterator[Lane]:
        try:
            file = self._kvikio.CuFile(f"/proc/self/fd/{fd}", "r+" if writing else "r")
        except RuntimeError as error:
            raise _translated(error) from error
        try:
            yield _KvikioLane(file, size, writing=writing)
        finally:
            file.close()
            if not writing:  # what does not fill a block is read through the page cache
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
