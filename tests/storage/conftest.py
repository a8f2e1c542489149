"""A pool in process with an SSD tier: a real tmpfs, and a directory of the disk that the tests are on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.pool import Pool
from kvfs.storage.storage import Storage
from kvfs.tiers.dram import DramTier
from kvfs.tiers.ssd import SsdTier
from kvfs.verification import Verifier
from tests.pool.checks import check_pool
from tests.pool.conftest import (  # noqa: F401
    ROOT_OWNER,
    _root_and_lease_breaks,
    face,
    open_files,
    openings,
    place,
    pytest_pyfunc_call,
    short_retry,
    tier,
)
from tests.pool.faces import KernelFace
from tests.storage.disks import check_storage, let_threads_end, storage_of
from tests.tiers.ssds import attach

CAPACITY = 256 << 20


@pytest.fixture
def ssd(
    open_files: None,  # noqa: F811
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> Iterator[SsdTier]:
    """Of 256 MiB, or of what the test gives as an indirect parameter."""
    attached = attach(tmp_path / "ssd", getattr(request, "param", CAPACITY))
    yield attached
    attached.close()


@pytest.fixture
def pool(tier: DramTier, ssd: SsdTier, face: KernelFace) -> Iterator[Pool]:  # noqa: F811
    """A pool that runs while the test does, and that must be in order at the end."""
    pool = Pool(tier, ROOT_OWNER)
    storage_of(pool, ssd)
    pool.attach_face(face)
    yield pool
    assert pool.storage is not None
    let_threads_end(pool.storage)
    try:
        check_pool(pool, face)
        check_storage(pool)
    finally:
        pool.close()
        face.end()


@pytest.fixture
def storage(pool: Pool) -> Storage:
    assert pool.storage is not None
    return pool.storage


@pytest.fixture
def verifier(pool: Pool) -> Verifier:
    return Verifier(pool)
