"""What must hold of a pool whenever no task is in the middle of something."""

from __future__ import annotations

import os

from kvfs.index import DRAFT, SEALED, STORED, UNCHECKED, Directory
from kvfs.pool import Pool
from kvfs.tiers.base import Found
from tests.pool.faces import KernelFace


def files_on_tier(pool: Pool) -> dict[bytes, Found]:
    return {found.path: found for found in pool.tier.walk()}


def check_pool(pool: Pool, face: KernelFace) -> None:
    """The index, the tier, the eviction order, the holdings and the kernel's side agree."""
    assert face.faults == []
    check_names(pool, face)
    check_states(pool)
    check_holdings(pool, face)


def check_names(pool: Pool, face: KernelFace) -> None:
    paths: dict[bytes, int] = {}
    told: dict[tuple[int, bytes], int] = {}
    for entry in pool.index.entries():
        for parent, name in entry.names():
            assert parent.children[name] is entry
            if entry.state != STORED:
                paths[parent.child_path(name)] = entry.number
            told[parent.number, name] = entry.number
    on_tier = files_on_tier(pool)
    assert set(paths) == set(on_tier)
    inodes: dict[int, int] = {}
    for path, number in paths.items():
        assert inodes.setdefault(number, on_tier[path].inode) == on_tier[path].inode, path
    assert len(set(inodes.values())) == len(inodes)
    assert face.names == told


def check_states(pool: Pool) -> None:
    ordered = set(pool.policy.victims())
    pinned = {entry for entry in pool.index.entries() if pool.lifetimes.is_pinned(entry)}
    assert not ordered & pinned
    assert pool.lifetimes.pinned_bytes == sum(entry.size for entry in pinned) <= pool.lifetimes.budget_bytes
    ordered |= {entry for entry in pinned if entry.state != STORED}
    assert len(ordered) == len(pool.policy)
    for entry in pool.index.entries():
        is_page = entry.state in (SEALED, UNCHECKED) and entry.parent is not None
        assert (entry in ordered) == is_page, entry.state
        assert (entry in pool.drafts) <= (entry.state == DRAFT)
        holding = entry.holding
        assert (entry in pool.writing) == (holding is not None and holding.writers > 0)
        if isinstance(entry, Directory):
            assert holding is None
    for entry in (*ordered, *pool.drafts, *pool.writing):
        assert pool.index.by_number(entry.number) is entry


def check_holdings(pool: Pool, face: KernelFace) -> None:
    idle = set(pool.idle._idle)
    ids: list[int] = []
    ready = 0
    for entry in pool.index.entries():
        holding = entry.holding
        if entry.ready_id:
            assert holding is None
            assert entry.state == SEALED
            assert entry.parent is not None
            ready += 1
            ids.append(entry.ready_id)
        if holding is None:
            assert entry not in idle
            assert (entry.number in face.records) == (entry.ready_id != 0)
            continue
        ids.append(holding.backing_id)
        assert holding.readers >= 0
        assert (holding.write_fd >= 0) == (holding.writers > 0)
        if entry in idle:
            assert entry.state == SEALED
            assert entry.parent is not None
            assert not holding.in_use
        else:
            kept = holding.until_forgotten and entry.parent is None and entry.lookups > 0
            assert holding.in_use or holding.sealing or face.opens(entry) or kept, (
                f"{entry.name!r} is held, and nobody would ever let go of it: state {entry.state}, "
                f"{entry.lookups} look-ups, named {entry.parent is not None}, sized {holding.sized}, "
                f"kept {holding.until_forgotten}, failure {holding.failure!r}, "
                f"{os.fstat(holding.read_fd).st_size} bytes"
            )
    numbers = {entry.number for entry in pool.index.entries()}
    assert set(face.records) <= numbers
    assert len(face.directories) == len(pool.directories)
    assert set(face.directories) <= numbers
    assert sorted(face.ids) == sorted(backing_id for backing_id in ids if backing_id)
    assert pool.idle.ready == ready
