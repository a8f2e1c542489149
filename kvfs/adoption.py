"""What a daemon finds in its tier at the start: pages to serve again, drafts to drop."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvfs.garbage import making_what_stays
from kvfs.index import OTHER, UNCHECKED, Directory, Entry
from kvfs.page import DIGEST, OWNER, PIN, RESERVED, TTL, Digest, Owner
from kvfs.sizes import format_count, format_size

if TYPE_CHECKING:
    from kvfs.pool import Pool
    from kvfs.tiers.base import Found

log = logging.getLogger("kvfs.adoption")


def adopt(pool: Pool) -> None:
    """Fills the index from the tier. A file without a digest is a draft whose writer is gone: it is deleted.

    Pages enter the eviction order by the time of their last use, which the tmpfs keeps as the access time.
    """
    with making_what_stays(lambda: pool.counters.adopted):
        _adopt(pool)


def _adopt(pool: Pool) -> None:
    by_inode: dict[int, Entry] = {}
    pages: list[tuple[int, Entry]] = []
    root = {name: pool.tier.get_attribute(b"", name) for name in pool.tier.list_attributes(b"")}
    marked: list[tuple[Entry, Mapping[str, bytes]]] = [(pool.index.root, root)]
    """What may be pinned or expire."""
    total = 0
    doomed: list[bytes] = []
    for found in pool.tier.walk():
        parent_path, _, name = found.path.rpartition(b"/")
        parent = pool.index.find(parent_path)
        owner = _owner(found)
        # What has a name of our own was on its way to another one.
        if not isinstance(parent, Directory) or owner is None or found.path.startswith(RESERVED):
            if found.is_directory:
                doomed.append(found.path)
            _drop(pool, found)
            continue
        if found.inode in by_inode and found.links > 1:
            pool.index.add_link(by_inode[found.inode], parent, name)
            continue
        if found.is_directory or not stat.S_ISREG(owner.mode):
            entry = pool.index.add(parent, name, owner, OTHER)
        else:
            digest = _digest(found)
            if digest is None:
                _drop(pool, found)
                continue
            entry = pool.index.add(parent, name, owner, UNCHECKED)
            entry.size = pool.index.intern_size(digest.size)
            pages.append((max(found.atime_ns, found.mtime_ns), entry))
            total += found.blocks * 512
        if found.links > 1:
            by_inode[found.inode] = entry
        if PIN in found.attributes or TTL in found.attributes:
            marked.append((entry, found.attributes))
    for path in reversed(doomed):
        pool.tier.rmdir(path)
    pages.sort(key=lambda page: page[0])
    pool.policy.restore([(entry, entry.hits) for _, entry in pages])
    for entry, attributes in marked:
        pool.lifetimes.found(entry, attributes)
    for _, entry in pages:
        pool.evictor.note_size(entry.size)
    pool.counters.adopted = len(pages)
    if pages or pool.counters.dropped_at_start:
        log.info(
            "adopted %s, %s; dropped %s",
            format_count(len(pages), "page"),
            format_size(total),
            format_count(pool.counters.dropped_at_start, "draft"),
        )


def _owner(found: Found) -> Owner | None:
    """The shown owner; None for a file that cannot be one of ours."""
    text = found.attributes.get(OWNER)
    try:
        owner = None if text is None else Owner.parse(text)
    except ValueError:
        owner = None
    if found.is_directory:
        if owner is None or not stat.S_ISDIR(owner.mode):
            owner = Owner(stat.S_IFDIR | 0o755, os.geteuid(), os.getegid())
    elif owner is not None and stat.S_ISDIR(owner.mode):
        owner = None
    return owner


def _digest(found: Found) -> Digest | None:
    text = found.attributes.get(DIGEST)
    if text is None:
        return None
    try:
        digest = Digest.parse(text)
    except ValueError:
        return None
    return digest if digest.size == found.size else None


def _drop(pool: Pool, found: Found) -> None:
    pool.counters.dropped_at_start += 1
    if not found.is_directory:
        with pool.tier.keeping_times([found.path.rpartition(b"/")[0]]):
            pool.tier.unlink(found.path)
