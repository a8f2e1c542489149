"""What the daemon tells of itself, of a pool and a channel that no kernel uses."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from kvfs.config import Memory, load_config
from kvfs.fs.channel import KernelChannel
from kvfs.observe.metrics import Metrics
from kvfs.observe.status import Status
from kvfs.pool import Pool
from tests.pure.plain import plain_pool

MEMORY = Memory(total=100 << 30, available=40 << 30)


@dataclass
class Described:
    """A status, and what it describes."""

    status: Status
    pool: Pool
    channel: KernelChannel


@pytest.fixture
def described(tmp_path: Path) -> Iterator[Described]:
    tier, file = tmp_path / "tier", tmp_path / "kvfs.toml"
    tier.mkdir()
    file.write_text("")
    config = load_config(tmp_path, {"pool": "1G"}, {"KVFS_PASSTHROUGH": "off"}, file, MEMORY)
    pool = plain_pool(tier)
    kernel, device = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = KernelChannel(device.detach(), pool.tier.root_fd, passthrough_off="switched off", statfs=True)
    pool.attach_face(channel)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            pool.start(nursery)
            nursery.cancel_scope.cancel()

    trio.run(main)
    yield Described(Status(config, pool, channel), pool, channel)
    kernel.close()
    channel.stop()
    pool.tier.close(keep=False)


def test_status_has_what_the_documentation_promises(described: Described) -> None:
    status = described.status.read()
    assert status["pid"] == os.getpid()
    assert status["passthrough"] == {"active": False, "reason": "switched off"}
    assert not status["hugepages"]["active"]
    assert status["tiers"]["dram"]["pages"] == 0
    assert 0 <= status["tiers"]["dram"]["used_bytes"] <= status["tiers"]["dram"]["capacity_bytes"]
    for key in ("drafts", "unsealed", "evictions", "evicted_bytes"):
        assert status[key] == 0
    assert status["hits"] == {"dram": 0}
    assert status["misses"] == status["failures"] == {}
    assert status["requests"] == {
        "answered": 0,
        "forwarded": 0,
        "reply_errors": 0,
        "names_not_invalidated": 0,
    }
    assert json.loads(json.dumps(status)) == {**status, "config": json.loads(json.dumps(status["config"]))}


def test_every_setting_is_told_with_its_origin(described: Described) -> None:
    config = described.status.read()["config"]
    assert config["pool_bytes"] == {"value": 1 << 30, "origin": "flag"}
    assert config["passthrough"] == {"value": "off", "origin": "environment KVFS_PASSTHROUGH"}
    assert config["hugepages"]["origin"] == "default"
    text = described.status.text()
    assert "pool_bytes:       1.0 GiB (flag)" in text
    assert "mode:             0770 (default)" in text


def test_what_is_off_is_told_with_its_reason(described: Described) -> None:
    described.status.degraded.append("read-ahead stays as it is: no permission")
    described.pool.evictor.stuck = True
    lines = described.status.read()["degraded"]
    assert lines == [
        "read-ahead stays as it is: no permission",
        "passthrough is off: switched off; the daemon moves the bytes",
        "hugepages are off: a plain directory",
        "the reserve cannot be kept: every page left is in use",
    ]
    text = described.status.text()
    for line in lines:
        assert f"degraded:           {line}\n" in text


def test_the_text_says_it_in_words(described: Described) -> None:
    counters = described.pool.counters
    counters.hits = 12
    counters.misses.update(evicted=3, corrupt=1)
    counters.failures.update({"holes": 1, "killed": 2, "no-room": 3, "io-error": 4})
    counters.evictions, counters.evicted_bytes = 4, 5 << 20
    lines = dict(line.split(":", 1) for line in described.status.text().splitlines())
    values = {name: value.strip() for name, value in lines.items()}
    assert values["hits"] == "12"
    assert values["misses"] == "1 corrupt, 3 evicted"
    assert values["failures"] == "1 with holes, 4 unreadable, 2 killed, 3 without room"
    assert values["evictions"] == "4, 5.0 MiB"
    assert values["passthrough"] == "off: switched off"


def test_one_page_is_not_pages(described: Described, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ", 0 pages; " in described.status.text()
    monkeypatch.setattr(Pool, "pages", 1)
    assert ", 1 page; " in described.status.text()


def samples(text: bytes) -> dict[tuple[str, str], float]:
    """Every sample by its name and the value of its label."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text.decode()):
        assert family.documentation
        for sample in family.samples:
            found[sample.name, next(iter(sample.labels.values()), "")] = sample.value
    return found


def test_the_metrics_are_the_status(described: Described) -> None:
    counters = described.pool.counters
    counters.hits, counters.sealed, counters.sealed_bytes = 12, 5, 500
    counters.misses.update(evicted=3, corrupt=1)
    counters.failures["holes"] = 2
    metrics = Metrics(described.status)
    values = samples(metrics.text())
    assert values["kvfs_hits_total", ""] == 12
    assert values["kvfs_misses_total", "evicted"] == 3
    assert values["kvfs_misses_total", "corrupt"] == 1
    assert values["kvfs_failures_total", "holes"] == 2
    assert values["kvfs_sealed_pages_total", ""] == 5
    assert values["kvfs_passthrough_active", ""] == 0
    assert values["kvfs_degraded", ""] == len(described.status.read()["degraded"]) > 0
    assert values["kvfs_tier_capacity_bytes", "dram"] == described.pool.tier.room().total_bytes
    assert {name for name, _ in values if name.startswith("kvfs_requests")} == {"kvfs_requests_total"}
    counters.hits += 1
    assert samples(metrics.text())["kvfs_hits_total", ""] == 13


def test_a_line_for_a_service_manager(described: Described) -> None:
    line = described.status.line()
    assert " of DRAM used; passthrough is off: switched off; " in line
    assert "\n" not in line


def test_what_the_channel_counted_is_told_at_once(
    described: Described, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched: list[list[tuple[int, int]]] = [[(1, 7)]]

    def take() -> list[tuple[int, int]]:
        return touched.pop() if touched else []

    monkeypatch.setattr(described.channel, "take_touched", take)
    status: dict[str, Any] = described.status.read()
    assert status["hits"] == {"dram": 7}
