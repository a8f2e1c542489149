"""What the daemon says of itself: one dictionary, and the text that people read."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfs import __version__
from kvfs.config import Config
from kvfs.sizes import format_count, format_duration, format_size

if TYPE_CHECKING:
    from kvfs.fs.channel import KernelChannel
    from kvfs.pool import Pool
    from kvfs.service.listening import BatchSocket


_WORDS = {"holes": "with holes", "io-error": "unreadable", "no-room": "without room"}
"""Reasons as they are read after a number, where that is not what programs know them by."""
WIDTH = 20
"""Columns before the value in the text."""


class Status:
    """Reads the parts of a running daemon."""

    def __init__(
        self, config: Config, pool: Pool, channel: KernelChannel, batches: BatchSocket | None = None
    ) -> None:
        self._config = config
        self._pool = pool
        self._channel = channel
        self._batches = batches
        self._started = time.monotonic()
        self.degraded: list[str] = []
        """What is off for the life of this daemon, each with its reason."""

    def read(self) -> dict[str, Any]:
        """The content of status.json."""
        pool, counters = self._pool, self._pool.counters
        pool.uses.collect()
        room = pool.tier.room()
        return {
            "mount": str(self._config.mountpoint),
            "pid": os.getpid(),
            "version": __version__,
            "uptime_seconds": round(time.monotonic() - self._started, 3),
            "passthrough": {
                "active": self._channel.passthrough_active,
                "reason": self._channel.passthrough_reason,
            },
            "hugepages": {
                "active": pool.tier.hugepages_active,
                "reason": pool.tier.hugepages_reason,
                "small_page_files": counters.small_page_files,
            },
            "tiers": {
                "dram": {
                    "capacity_bytes": room.total_bytes,
                    "used_bytes": room.used_bytes,
                    "reserve_bytes": pool.evictor.reserve_bytes,
                    "pages": pool.pages,
                    "options": list(pool.tier.options),
                    "missing": dict(pool.tier.missing),
                },
                **({} if pool.storage is None else {"ssd": pool.storage.statistics()}),
            },
            **pool.lifetimes.statistics(),
            "drafts": len(pool.writing),
            "unsealed": pool.unsealed,
            "sealed": {"pages": counters.sealed, "bytes": counters.sealed_bytes},
            "adopted": {"pages": counters.adopted, "dropped_drafts": counters.dropped_at_start},
            "hits": {"dram": counters.hits},
            "misses": dict(counters.misses),
            "evictions": counters.evictions,
            "evicted_bytes": counters.evicted_bytes,
            "failures": dict(counters.failures),
            "requests": {
                **self._channel.statistics(),
                "names_not_invalidated": self._channel.invalidations.dropped,
            },
            **({} if self._batches is None else {"batch_socket": self._batches.statistics()}),
            "degraded": self._degraded(),
            "config": self.config(),
        }

    def line(self) -> str:
        """How the mount does in one line, for a service manager."""
        status = self.read()
        dram, ssd = status["tiers"]["dram"], status["tiers"].get("ssd")
        parts = [f"{format_size(dram['used_bytes'])} of {format_size(dram['capacity_bytes'])} of DRAM used"]
        if ssd is not None:
            parts.append(
                f"{format_size(ssd['used_bytes'])} of {format_size(ssd['capacity_bytes'])} of the SSD, "
                f"{format_size(ssd['unstored_bytes'])} not there yet"
            )
        return "; ".join([", ".join(parts), *status["degraded"]])

    def _degraded(self) -> list[str]:
        lines = list(self.degraded)
        if reason := self._channel.passthrough_reason:
            lines.append(f"passthrough is off: {reason}; the daemon moves the bytes")
        if not self._pool.tier.hugepages_active:
            lines.append(f"hugepages are off: {self._pool.tier.hugepages_reason}")
        lines += [f"{option} is missing: {reason}" for option, reason in self._pool.tier.missing.items()]
        if self._pool.storage is not None:
            lines += self._pool.storage.degraded()
        if self._batches is not None:
            lines += self._batches.degraded()
        if self._pool.evictor.stuck:
            lines.append("the reserve cannot be kept: every page left is in use")
        return lines

    def config(self) -> dict[str, dict[str, Any]]:
        """Every setting with its value and where it came from."""
        origins = self._config.origins
        return {
            field.name: {
                "value": _plain(getattr(self._config, field.name)),
                "origin": origins.get(field.name, "default"),
            }
            for field in dataclasses.fields(self._config)
            if field.name != "origins"
        }

    def text(self) -> str:
        """The content of .kvfs/status."""
        status = self.read()
        dram = status["tiers"]["dram"]
        used, capacity = dram["used_bytes"], dram["capacity_bytes"]
        pages = format_count(dram["pages"], "page")
        misses = sum(status["misses"].values())
        lines = [
            ("mount", f"{status['mount']}, process {status['pid']}, version {status['version']}"),
            ("up", format_duration(status["uptime_seconds"])),
            (
                "DRAM",
                f"{format_size(used)} of {format_size(capacity)} used ({used / max(capacity, 1):.0%}), "
                f"{pages}; {format_size(dram['reserve_bytes'])} kept free for writers",
            ),
            *_ssd_lines(status["tiers"].get("ssd")),
            ("pinned", _pinned(status["pinned"])),
            ("expiring", format_count(status["expiring"]["pages"], "page")),
            ("drafts", f"{status['drafts']} being written, {status['unsealed']} waiting for their digest"),
            ("hits", f"{status['hits']['dram']}"),
            ("misses", _counts(status["misses"]) if misses else "0"),
            ("evictions", f"{status['evictions']}, {format_size(status['evicted_bytes'])}"),
            ("failures", _counts(status["failures"]) or "0"),
            *_batch_lines(status.get("batch_socket")),
            ("passthrough", _feature(status["passthrough"])),
            ("hugepages", _feature(status["hugepages"])),
        ]
        lines += [("degraded", line) for line in status["degraded"]]
        lines += [("settings", ""), *(_setting(name, entry) for name, entry in status["config"].items())]
        return "".join(f"{name + ': ':<{WIDTH}}{value}".rstrip() + "\n" for name, value in lines)


def _batch_lines(batches: dict[str, Any] | None) -> list[tuple[str, str]]:
    if batches is None:
        return []
    if not batches["active"]:
        return [("batch socket", _feature(batches))]
    connections = format_count(batches["connections"], "connection")
    requests = format_count(sum(batches["requests"].values()), "request")
    return [
        (
            "batch socket",
            f"{connections}; {requests}, {batches['waiting']} waiting, {batches['failed']} failed",
        )
    ]


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _ssd_lines(ssd: dict[str, Any] | None) -> list[tuple[str, str]]:
    if ssd is None:
        return []
    used, capacity = ssd["used_bytes"], ssd["capacity_bytes"]
    last_day, a_day = format_size(ssd["written_last_day_bytes"]), format_size(ssd["written_a_day_bytes"])
    return [
        (
            "SSD",
            f"{format_size(used)} of {format_size(capacity)} used ({used / max(capacity, 1):.0%}), "
            f"{format_count(ssd['pages'], 'page')} only there; "
            f"{format_size(ssd['unstored_bytes'])} not there yet{_left_out(ssd['left_out'])}",
        ),
        (
            "SSD traffic",
            f"{format_size(ssd['written_bytes'])} written ({last_day} in the last day, {a_day} a day at that "
            f"rate), "
            f"{format_size(ssd['read_bytes'])} read by {ssd['read_path']}; "
            f"{ssd['evictions']} evictions, {format_size(ssd['evicted_bytes'])}",
        ),
        ("SSD, never read", _never_read(ssd)),
    ]


_AGES = {"<1h": "within the hour", "<1d": "since a day", "<7d": "since a week", "older": "for longer"}


def _never_read(ssd: dict[str, Any]) -> str:
    """Bytes by age, as they were counted last: that is done once in a while."""
    counted = ssd["never_read_counted_seconds_ago"]
    if counted is None:
        return "not counted yet"
    ages = {age: pages["bytes"] for age, pages in ssd["never_read"].items() if pages["pages"]}
    sizes = ", ".join(f"{format_size(size)} {_AGES[age]}" for age, size in ages.items()) or "0 B"
    return f"{sizes}, as of {format_duration(counted)} ago"


def _left_out(reasons: dict[str, dict[str, int]]) -> str:
    """What is in DRAM and is not to be on the SSD, with the reasons."""
    words = [f"{format_size(one['bytes'])} {reason}" for reason, one in reasons.items() if one["pages"]]
    return f"; left out: {', '.join(words)}" if words else ""


def _pinned(pinned: dict[str, int]) -> str:
    size, budget = format_size(pinned["bytes"]), format_size(pinned["budget_bytes"])
    return f"{format_count(pinned['pages'], 'page')}, {size} of at most {budget}"


def _setting(name: str, entry: dict[str, Any]) -> tuple[str, str]:
    value = entry["value"]
    if name in ("pool_bytes", "ssd_capacity_bytes"):
        value = format_size(value)
    elif name == "mode":
        value = f"{value:04o}"
    elif isinstance(value, tuple):
        value = ",".join(value)
    return f"  {name}", f"{value} ({entry['origin']})"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {_WORDS.get(name, name)}" for name, count in sorted(counts.items()))


def _feature(feature: dict[str, Any]) -> str:
    reason = f": {feature['reason']}" if feature["reason"] else ""
    return ("on" if feature["active"] else "off") + reason
