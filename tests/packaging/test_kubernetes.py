"""The manifests for Kubernetes: their parts fit each other, and the daemon."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvfs.config import Config, Memory, load_config
from kvfs.daemon import END_SECONDS
from kvfs.mounts import escape_path

MANIFESTS = Path(__file__).resolve().parents[2] / "packaging" / "kubernetes"
MOUNTPOINT = Path("/mnt/kvfs/kv")
MEMORY = Memory(total=1 << 40, available=1 << 39)


def documents(name: str) -> dict[str, dict[str, Any]]:
    """The documents of a file by kind."""
    return {document["kind"]: document for document in yaml.safe_load_all((MANIFESTS / name).read_text())}


@pytest.fixture
def pod() -> dict[str, Any]:
    spec = documents("daemonset.yaml")["DaemonSet"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"].items() <= labels.items()
    return dict(spec["template"]["spec"])


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["containers"]
    return dict(container)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """What the daemon makes of the settings, where the disk is there."""
    (name,) = documents("daemonset.yaml")["ConfigMap"]["data"]
    assert name == f"{escape_path(MOUNTPOINT)}.toml"
    text = documents("daemonset.yaml")["ConfigMap"]["data"][name]
    file = tmp_path / name
    file.write_text(text.replace(tomllib.loads(text)["ssd"], str(tmp_path)))
    return load_config(MOUNTPOINT, {}, {}, file, MEMORY)


def volumes(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {volume["name"]: volume for volume in pod["volumes"]}


def quantity(text: str) -> int:
    return int(text.removesuffix("Gi")) << 30


def test_every_document_has_a_name_and_a_namespace_that_is_made() -> None:
    found = documents("daemonset.yaml")
    namespace = found.pop("Namespace")["metadata"]["name"]
    assert set(found) == {"ConfigMap", "DaemonSet"}
    for document in found.values():
        assert document["metadata"]["namespace"] == namespace
        assert document["metadata"]["name"]


def test_the_settings_are_mounted_where_the_daemon_looks(
    pod: dict[str, Any], container: dict[str, Any]
) -> None:
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == "/etc/kvfs"]
    assert volumes(pod)[mount["name"]]["configMap"]["name"] == "kvfs"


def test_the_mount_and_the_dram_reach_the_node(pod: dict[str, Any], container: dict[str, Any]) -> None:
    """Under the same paths there; and the volume is not the mountpoint, which may be dead."""
    shared = {
        mount["mountPath"]: volumes(pod)[mount["name"]]["hostPath"]
        for mount in container["volumeMounts"]
        if mount.get("mountPropagation") == "Bidirectional"
    }
    assert shared == {
        "/mnt/kvfs": {"path": "/mnt/kvfs", "type": "DirectoryOrCreate"},
        "/run/kvfs": {"path": "/run/kvfs", "type": "DirectoryOrCreate"},
    }
    assert MOUNTPOINT.parent == Path("/mnt/kvfs")
    assert container["securityContext"]["privileged"] is True
    assert container["args"][0].endswith(f"exec kvfs mount --foreground {MOUNTPOINT}")


def test_it_sees_the_processes_of_engines(pod: dict[str, Any]) -> None:
    assert pod["hostPID"] is True


def test_the_memory_holds_the_whole_pool(container: dict[str, Any], config: Config) -> None:
    for which in ("requests", "limits"):
        assert quantity(container["resources"][which]["memory"]) >= config.pool_bytes + (1 << 30)


def test_the_ssd_is_a_volume_that_is_never_made(pod: dict[str, Any], container: dict[str, Any]) -> None:
    settings = tomllib.loads(documents("daemonset.yaml")["ConfigMap"]["data"]["mnt-kvfs-kv.toml"])
    (mount,) = [
        mount
        for mount in container["volumeMounts"]
        if Path(mount["mountPath"]) in Path(settings["ssd"]).parents
    ]
    assert volumes(pod)[mount["name"]]["hostPath"] == {"path": mount["mountPath"], "type": "Directory"}


def test_the_owner_is_a_number(config: Config) -> None:
    assert config.owner_uid == config.owner_gid == 1000


def test_it_has_the_time_that_it_needs(pod: dict[str, Any], config: Config) -> None:
    assert pod["terminationGracePeriodSeconds"] > config.flush_timeout_seconds + END_SECONDS


@pytest.mark.parametrize("probe", ["startupProbe", "readinessProbe", "livenessProbe"])
def test_probes_ask_the_mount(container: dict[str, Any], probe: str) -> None:
    assert container[probe]["exec"]["command"] == ["kvfs", "status", str(MOUNTPOINT)]
    assert container[probe]["timeoutSeconds"] > 5, "kvfs status itself waits so long"


def test_engines_see_mounts_come_and_go(pod: dict[str, Any]) -> None:
    engine = documents("engine.yaml")["Pod"]["spec"]
    assert engine["nodeSelector"] == pod["nodeSelector"]
    (volume,) = engine["volumes"]
    assert volume["hostPath"]["path"] == "/mnt/kvfs"
    for container in (*engine["initContainers"], *engine["containers"]):
        (mount,) = container["volumeMounts"]
        assert mount == {"name": "kvfs", "mountPath": "/mnt/kvfs", "mountPropagation": "HostToContainer"}
        assert str(MOUNTPOINT) in " ".join(container["args"])
