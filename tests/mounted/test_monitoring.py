"""The example of alerts speaks of metrics that a mount really has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.mounted.conftest import MakeMount
from tests.mounted.running import MIB

ALERTS = Path(__file__).resolve().parents[2] / "packaging" / "prometheus" / "alerts.yaml"
SEVERITIES = ("critical", "warning", "info")


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    return list(group["rules"])


@pytest.fixture
def metrics(make_mount: MakeMount, tmp_path: Path) -> Iterator[str]:
    mount = make_mount(64 * MIB, "--ssd", str(tmp_path / "disk"), "--ssd-capacity", "128M")
    mount.mount()
    yield (mount.path / ".kvfs/metrics").read_text()
    mount.umount()


def test_alerts_are_about_metrics_that_exist(metrics: str) -> None:
    names: set[str] = set()
    labels: set[tuple[str, str]] = set()
    for family in text_string_to_metric_families(metrics):
        names.add(family.name + ("_total" if family.type == "counter" else ""))
        labels.update(pair for sample in family.samples for pair in sample.labels.items())
    labels.add(("reason", "corrupt"))
    for rule in rules():
        used = set(re.findall(r"\bkvfs_\w+", rule["expr"]))
        assert used, rule
        assert used <= names, rule
        assert set(re.findall(r'(\w+)="(\w+)"', rule["expr"])) <= labels, rule


def test_every_alert_says_what_is_wrong_and_is_explained() -> None:
    manual = (ALERTS.parents[2] / "docs" / "operations.md").read_text()
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    for rule in rules():
        assert rule["labels"]["severity"] in SEVERITIES
        assert rule["annotations"]["summary"]
        assert f"`{rule['alert']}`" in manual, rule["alert"]
