"""What a directory tree looks like from outside, in a form that can be compared between two filesystems."""

from __future__ import annotations

import hashlib
import os
import stat

#: Times that a test sets on purpose lie before this; all others are only 'recent'.
SET_BY_HAND_NS = 10**18


def time_class(nanoseconds: int) -> int | str:
    """A time that was set by hand exactly, any other as 'recent'."""
    return nanoseconds if nanoseconds < SET_BY_HAND_NS else "recent"


def stat_fields(found: os.stat_result) -> tuple[object, ...]:
    """Type and mode, links, owner, size, time of modification.

    Not the size of directories, a filesystem's own business; nor the time of fifos, which the kernel sets by
    itself when bytes pass and does not tell; nor the time of access, which the mount keeps as the last use.
    """
    size = None if stat.S_ISDIR(found.st_mode) else found.st_size
    modified = "a fifo's own" if stat.S_ISFIFO(found.st_mode) else time_class(found.st_mtime_ns)
    return oct(found.st_mode), found.st_nlink, found.st_uid, found.st_gid, size, modified


def user_attributes(path: str) -> dict[str, bytes]:
    """The user.* attributes that programs set; not those by which the mount tells of a page."""
    names = os.listxattr(path, follow_symlinks=False)
    own = [name for name in names if name.startswith("user.") and not name.startswith("user.kvfs.")]
    return {name: os.getxattr(path, name, follow_symlinks=False) for name in sorted(own)}


def content(path: str, found: os.stat_result) -> str | None:
    """A digest of a file's bytes, or the target of a symlink."""
    if stat.S_ISLNK(found.st_mode):
        return os.readlink(path)
    if not stat.S_ISREG(found.st_mode):
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def snapshot(root: str) -> dict[str, object]:
    """Everything below ``root`` by relative path; names of one file share the first of its names."""
    first_names: dict[int, str] = {}
    tree: dict[str, object] = {}
    pending = [root]
    while pending:
        directory = pending.pop()
        for name in sorted(os.listdir(directory)):
            path = f"{directory}/{name}"
            relative = os.path.relpath(path, root)
            found = os.lstat(path)
            same_as = first_names.setdefault(found.st_ino, relative)
            tree[relative] = stat_fields(found), same_as, user_attributes(path), content(path, found)
            if stat.S_ISDIR(found.st_mode):
                pending.append(path)
    return tree


def differences(expected: dict[str, object], seen: dict[str, object]) -> list[str]:
    """One line for each path in which two snapshots differ."""
    return [
        f"{path!r}: expected {expected.get(path, 'nothing')}, seen {seen.get(path, 'nothing')}"
        for path in sorted(expected.keys() | seen.keys())
        if expected.get(path) != seen.get(path)
    ]
