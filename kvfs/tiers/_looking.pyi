Look = tuple[int, int, int, int, int, int, int, int, bytes]
"""Mode, device, inode, links, size, blocks of 512 bytes, times of modification and of access in nanoseconds,
and the attribute."""

def look_at(dir_fd: int, names: tuple[bytes, ...], flags: int, attribute: str, /) -> list[Look | None]: ...
