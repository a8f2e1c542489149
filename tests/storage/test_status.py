"""What status and metrics tell of an SSD tier."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvfs.config import Memory, load_config
from kvfs.fs.channel import KernelChannel
from kvfs.observe.metrics import Metrics
from kvfs.observe.status import Status
from kvfs.opening import Openings
from kvfs.policy.admission import Admission
from kvfs.pool import Pool
from kvfs.storage.storage import Storage
from kvfs.storage.unstored import NOT_REUSED
from kvfs.storage.wear import DAY, HOUR, LastDay, Wear
from tests.pool.files import MIB, page, pattern, read, wait_until
from tests.storage.disks import stored

CHANNEL = SimpleNamespace(
    passthrough_active=False,
    passthrough_reason="",
    statistics=lambda: {"answered": 0, "forwarded": 0},
    invalidations=SimpleNamespace(dropped=0),
)


@pytest.fixture
def status(pool: Pool, tmp_path: Path) -> Status:
    (tmp_path / "kvfs.toml").touch()
    memory = Memory(total=100 << 30, available=40 << 30)
    config = load_config(tmp_path, {"pool": "1G"}, {}, tmp_path / "kvfs.toml", memory)
    return Status(config, pool, cast(KernelChannel, CHANNEL))


async def test_the_ssd_is_told_of(pool: Pool, storage: Storage, openings: Openings, status: Status) -> None:
    await stored(pool, b"one", pattern(MIB))
    other = await stored(pool, b"other", pattern(2 * MIB))
    await read(openings, other)
    storage.demotions._admission = Admission("reuse")
    entry = await page(pool, b"unread", pattern(3 * MIB, 2))
    await wait_until(lambda: storage.demotions.unstored.is_left_out(entry, NOT_REUSED))
    await storage.wear.count()
    lines = dict(line.split(": ", 1) for line in status.text().splitlines() if ": " in line)
    values = {name.strip(): value.strip() for name, value in lines.items()}
    assert "; 0 B not there yet; left out: 3.0 MiB not-reused" in values["SSD"]
    assert values["SSD traffic"].startswith("3.0 MiB written (3.0 MiB in the last day, ")
    assert re.fullmatch(r"1\.0 MiB within the hour, as of \S+ m?s ago", values["SSD, never read"])
    assert values["ssd_write_delay_seconds"] == "30.0 (default)"
    families = text_string_to_metric_families(Metrics(status).text().decode())
    samples = {
        (sample.name, next(iter(sample.labels.values()), "")): sample.value
        for family in families
        for sample in family.samples
    }
    assert samples["kvfs_ssd_left_out_bytes", NOT_REUSED] == 3 * MIB
    assert samples["kvfs_ssd_never_read_bytes", "<1h"] == MIB
    assert samples["kvfs_ssd_never_read_bytes", "older"] == 0
    assert samples["kvfs_ssd_written_bytes_per_day", ""] > 0
    assert samples["kvfs_tier_written_bytes_total", "ssd"] == 3 * MIB


async def test_what_was_not_counted_yet_is_told_as_such(storage: Storage, status: Status) -> None:
    storage.wear = Wear(storage)
    assert "SSD, never read:    not counted yet\n" in status.text()


def test_the_last_day_is_the_last_24_hours() -> None:
    began = 1000.5 * HOUR
    day = LastDay(began)
    for hour in range(48):
        day.add(10, began + hour * HOUR)
        day.add(1, began + hour * HOUR + 60)
    now = began + 47 * HOUR + 60
    assert day.total(now) == 24 * 11
    assert day.a_day(now) == 24 * 11
    assert day.total(now + 12 * HOUR) == 12 * 11
    assert day.total(now + 2 * DAY) == 0
    assert len(day._hours) == 24


def test_a_rate_is_of_the_time_since_the_mount() -> None:
    day = LastDay(0.0)
    day.add(100, 1800.0)
    assert day.a_day(1800.0) == 2400
    assert day.a_day(2.0 * HOUR) == 1200
    assert day.a_day(12.0 * HOUR) == 200
