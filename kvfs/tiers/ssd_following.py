"""Names on the SSD follow those of the mount: what is stored there moves, vanishes and gets links with them.

The mount has changed already and is right. A name that was never stored is no error: each function says
whether there was anything on the SSD. What lies under a name that the mount has given to something else is
stale, and goes. Each may be interrupted anywhere by a crash: what was on the SSD is then under its old name
or the new one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence

from kvfs.errors import AttributeMissing, KvfsError, NotStorable, means_in_the_way, means_too_large
from kvfs.syscalls import RENAME_EXCHANGE
from kvfs.tiers.ssd_base import AttributeTexts
from kvfs.tiers.ssd_directory import is_ours
from kvfs.tiers.ssd_names import is_reserved
from kvfs.tiers.ssd_tree import SsdTree

_ABSENT = (FileNotFoundError, NotADirectoryError)


def _status(tier: SsdTree, path: bytes) -> os.stat_result | None:
    """What of ours has a name."""
    if is_reserved(path):
        return None
    try:
        status = tier.stat(path)
    except _ABSENT:
        return None
    return status if is_ours(status) else None


def unlink(tier: SsdTree, path: bytes) -> bool:
    """A file lost a name."""
    status = _status(tier, path)
    if status is None or stat.S_ISDIR(status.st_mode):
        return False
    with contextlib.suppress(FileNotFoundError):
        tier.unlink(path)
    return True


def rmdir(tier: SsdTree, path: bytes) -> bool:
    """An empty directory went. One in which something lies that is not ours stays."""
    if _status(tier, path) is None:
        return False
    try:
        tier.rmdir(path)
    except OSError as error:
        if isinstance(error, FileNotFoundError) or means_in_the_way(error):
            return False
        raise
    return True


def mkdir(
    tier: SsdTree, path: bytes, attributes: AttributeTexts, parents: Sequence[AttributeTexts] = ()
) -> bool:
    """A directory was made, or has other attributes now; ``parents`` as for ``enter``. False for a name that
    the SSD cannot have."""
    if is_reserved(path):
        return False
    with tier.lock:
        tier.enter(path.rpartition(b"/")[0], parents)
        try:
            tier.make_directory(path, attributes)
        except FileExistsError:
            if not is_ours(tier.stat(path)):
                raise NotStorable(f"{path!r} on the SSD is not ours") from None
            for name, value in attributes.items():
                tier.set_attribute(path, name, value)
    return True


def set_attribute(tier: SsdTree, path: bytes, name: str, value: bytes) -> bool:
    """A file or directory has another attribute, in the text form of ``kvfs.page``."""
    if _status(tier, path) is None:
        return False
    try:
        tier.set_attribute(path, name, value)
    except _ABSENT:
        return False
    return True


def remove_attribute(tier: SsdTree, path: bytes, name: str) -> bool:
    """A file or directory lost an attribute."""
    if _status(tier, path) is None:
        return False
    try:
        tier.remove_attribute(path, name)
    except (*_ABSENT, AttributeMissing):
        return False
    return True


def link(tier: SsdTree, old: bytes, new: bytes, parents: Sequence[AttributeTexts] = ()) -> bool:
    """A file got another name."""
    with tier.lock:
        _remove(tier, new)
        if is_reserved(new) or _status(tier, old) is None:
            return False
        tier.enter(new.rpartition(b"/")[0], parents)
        tier.link(old, new)
    return True


def rename(
    tier: SsdTree,
    old: bytes,
    new: bytes,
    flags: int = 0,
    parents: Sequence[AttributeTexts] = (),
    old_parents: Sequence[AttributeTexts] = (),
) -> bool:
    """A file, or a directory with all that is below, got another name; two of them exchanged theirs where
    ``flags`` has RENAME_EXCHANGE. ``parents`` as for ``enter``, of ``new``, and ``old_parents`` of
    ``old``."""
    with tier.lock:
        one, other = _status(tier, old), _status(tier, new)
        if old == new:
            return one is not None
        if flags & RENAME_EXCHANGE:
            if one is not None and other is not None:
                tier.rename(old, new, RENAME_EXCHANGE)
                return True
            if one is None:
                old, new, one, other, parents = new, old, other, None, old_parents
        if one is None or is_reserved(new):
            _remove(tier, old)
            _remove(tier, new)
            return False
        if other is not None and stat.S_IFDIR in (stat.S_IFMT(one.st_mode), stat.S_IFMT(other.st_mode)):
            _remove(tier, new)
        try:
            tier.enter(new.rpartition(b"/")[0], parents)
            tier.rename(old, new)
        except (OSError, KvfsError) as error:
            # The SSD can never have the new name. Under its old one it would come back after a restart.
            if isinstance(error, KvfsError) or means_in_the_way(error) or means_too_large(error):
                _remove(tier, old)
            raise
    return True


def _remove(tier: SsdTree, path: bytes) -> None:
    """Takes away what of ours has a name; a directory with all that is ours in it."""
    status = _status(tier, path)
    if status is None:
        return
    if stat.S_ISDIR(status.st_mode):
        for found in reversed(list(tier.walk(path))):
            if found.is_directory:
                rmdir(tier, found.path)
            else:
                unlink(tier, found.path)
        rmdir(tier, path)
    else:
        unlink(tier, path)
