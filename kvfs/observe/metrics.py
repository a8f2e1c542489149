"""Metrics in Prometheus' text format, read from the same status that people see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kvfs.observe.status import Status


class _StatusCollector(Collector):
    def __init__(self, status: Status) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status.read()
        for name, key, documentation in (
            ("capacity_bytes", "capacity_bytes", "Bytes that the tier can hold."),
            ("used_bytes", "used_bytes", "Bytes in use, those of unlinked but mapped pages included."),
            ("reserve_bytes", "reserve_bytes", "Bytes kept free for writers."),
            ("pages", "pages", "Pages in DRAM; on the SSD those that are only there."),
            ("unstored_bytes", "unstored_bytes", "Bytes of pages that are not on the tier yet."),
            ("quarantined_files", "quarantined", "Damaged files that were set aside."),
            ("working", "working", "Whether the tier takes pages and follows what happens to names."),
        ):
            yield _by_tier(GaugeMetricFamily, name, key, documentation, status["tiers"])
        for name, key, documentation in (
            ("written_bytes", "written_bytes", "Bytes of pages copied to the tier."),
            ("read_bytes", "read_bytes", "Bytes of pages brought up from the tier."),
            ("evicted_bytes", "evicted_bytes", "Bytes of pages evicted from the tier."),
        ):
            yield _by_tier(CounterMetricFamily, name, key, documentation, status["tiers"])
        yield from _of_the_ssd(status["tiers"].get("ssd"))
        for name, documentation, value in (
            ("pinned_pages", "Pages that stay in DRAM.", status["pinned"]["pages"]),
            ("pinned_bytes", "Bytes of pages that stay in DRAM.", status["pinned"]["bytes"]),
            ("pin_budget_bytes", "Bytes that may be pinned.", status["pinned"]["budget_bytes"]),
            ("expiring_pages", "Pages that will expire.", status["expiring"]["pages"]),
            ("drafts", "Files being written.", status["drafts"]),
            ("unsealed", "Drafts without a writer that wait for their digest.", status["unsealed"]),
            ("degraded", "How many things are off or fail: the status names them.", len(status["degraded"])),
            ("uptime_seconds", "Seconds since the mount.", status["uptime_seconds"]),
            ("passthrough_active", "Whether the kernel moves the bytes.", status["passthrough"]["active"]),
            ("hugepages_active", "Whether pages lie on hugepages.", status["hugepages"]["active"]),
        ):
            yield GaugeMetricFamily(f"kvfs_{name}", documentation, value=float(value))
        for name, documentation, value in (
            ("hits", "Opens for reading of sealed pages.", status["hits"]["dram"]),
            ("evictions", "Pages evicted.", status["evictions"]),
            ("evicted_bytes", "Bytes evicted.", status["evicted_bytes"]),
            ("sealed_pages", "Drafts that became pages.", status["sealed"]["pages"]),
            ("sealed_bytes", "Bytes of drafts that became pages.", status["sealed"]["bytes"]),
        ):
            yield CounterMetricFamily(f"kvfs_{name}", documentation, value=value)
        for name, documentation in (
            ("misses", "Searches for a page that was not there or was damaged, by reason."),
            ("failures", "Drafts dropped instead of sealed, by reason."),
        ):
            family = CounterMetricFamily(f"kvfs_{name}", documentation, labels=["reason"])
            for reason, count in status[name].items():
                family.add_metric([reason], count)
            yield family
        requests = CounterMetricFamily("kvfs_requests", "Requests, by who answered.", labels=["by"])
        requests.add_metric(["channel"], status["requests"]["answered"])
        requests.add_metric(["python"], status["requests"]["forwarded"])
        yield requests
        yield from _of_the_batch_socket(status.get("batch_socket"))


def _of_the_batch_socket(batches: dict[str, Any] | None) -> Iterator[Metric]:
    connections = GaugeMetricFamily("kvfs_batch_connections", "Clients connected to the batch socket.")
    waiting = GaugeMetricFamily("kvfs_batch_waiting", "Requests to the batch socket that wait for something.")
    drafts = GaugeMetricFamily("kvfs_batch_draft_bytes", "Bytes of drafts that clients have not committed.")
    requests = CounterMetricFamily("kvfs_batch_requests", "Requests to the batch socket.", labels=["kind"])
    failed = CounterMetricFamily("kvfs_batch_failed", "Requests to the batch socket that failed whole.")
    if batches is not None:
        connections.add_metric([], batches["connections"])
        waiting.add_metric([], batches["waiting"])
        drafts.add_metric([], batches["draft_bytes"])
        failed.add_metric([], batches["failed"])
        for kind, count in batches["requests"].items():
            requests.add_metric([kind], count)
    yield from (connections, waiting, drafts, requests, failed)


def _of_the_ssd(ssd: dict[str, Any] | None) -> Iterator[Metric]:
    """What only an SSD tier has; families without samples where there is none."""
    oldest = GaugeMetricFamily(
        "kvfs_ssd_unstored_seconds", "For how long pages have been meant for the SSD and not there, at most."
    )
    rate = GaugeMetricFamily(
        "kvfs_ssd_written_bytes_per_day", "Bytes a day written to the SSD, at the rate of the last day."
    )
    never_read = GaugeMetricFamily(
        "kvfs_ssd_never_read_bytes",
        "Bytes of pages on the SSD that nobody has read since they were stored, by age.",
        labels=["age"],
    )
    left_out = GaugeMetricFamily(
        "kvfs_ssd_left_out_bytes", "Bytes of pages in DRAM that the SSD is not to have.", labels=["reason"]
    )
    not_written = CounterMetricFamily(
        "kvfs_ssd_not_written", "Pages that the SSD refused, by reason.", labels=["reason"]
    )
    if ssd is not None:
        oldest.add_metric([], ssd["unstored_seconds"])
        rate.add_metric([], ssd["written_a_day_bytes"])
        for age, pages in ssd["never_read"].items():
            never_read.add_metric([age], pages["bytes"])
        for reason, pages in ssd["left_out"].items():
            left_out.add_metric([reason], pages["bytes"])
        for reason, count in ssd["not_written"].items():
            not_written.add_metric([reason], count)
    yield from (oldest, rate, never_read, left_out, not_written)


def _by_tier(
    family: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    key: str,
    documentation: str,
    tiers: dict[str, dict[str, Any]],
) -> Metric:
    metric = family(f"kvfs_tier_{name}", documentation, labels=["tier"])
    for tier, values in tiers.items():
        if key in values:
            metric.add_metric([tier], values[key])
    return metric


class Metrics:
    """The text of .kvfs/metrics."""

    def __init__(self, status: Status) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_StatusCollector(status))

    def text(self) -> bytes:
        return generate_latest(self._registry)
