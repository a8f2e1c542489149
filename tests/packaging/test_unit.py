"""The unit for systemd: it is well formed, and fits what the daemon does."""

from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from kvfs import daemon
from kvfs.config import load_config
from kvfs.errors import exit_codes
from kvfs.mounts import escape_path
from kvfs.sizes import parse_duration

REPOSITORY = Path(__file__).resolve().parents[2]
UNIT = REPOSITORY / "packaging" / "systemd" / "kvfs@.service"
#: Each gives a service a mount namespace of its own, in which nobody else would see the mount.
HIDING = {
    "BindPaths", "BindReadOnlyPaths", "DynamicUser", "ExecPaths", "InaccessiblePaths", "MountAPIVFS",
    "NoExecPaths", "PrivateDevices", "PrivateIPC", "PrivateMounts", "PrivateTmp", "PrivateUsers",
    "ProcSubset", "ProtectControlGroups", "ProtectHome", "ProtectHostname", "ProtectKernelLogs",
    "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc", "ProtectSystem", "ReadOnlyPaths",
    "ReadWritePaths", "RootDirectory", "RootImage", "RuntimeDirectory", "TemporaryFileSystem",
}  # fmt: skip


@pytest.fixture
def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=")
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    assert set(unit) - {"DEFAULT"} == {"Unit", "Service", "Install"}
    return unit["Service"]


def need(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} comes with systemd, which is not installed here: the unit is not used either")


def test_systemd_understands_it(tmp_path: Path) -> None:
    need("systemd-analyze")
    unit = tmp_path / "kvfs@mnt-kv.service"
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/kvfs", "/bin/true"))
    ended = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_instances_are_named_as_state_directories_and_settings_are(tmp_path: Path) -> None:
    need("systemd-escape")
    for path in ("/mnt/kv", "/mnt/kv-a", "/a b/c", "/.kv/x_y:z", "/mnt/schön"):
        ended = subprocess.run(
            ["systemd-escape", "--path", path], capture_output=True, text=True, check=True, timeout=60
        )
        assert ended.stdout == f"{escape_path(Path(path))}\n"


def test_nothing_hides_the_mount(service: configparser.SectionProxy) -> None:
    assert not HIDING & set(service)


def test_it_ends_in_time_for_the_ssd(service: configparser.SectionProxy, tmp_path: Path) -> None:
    settings = tmp_path / "kvfs.toml"
    settings.touch()
    flush = load_config(tmp_path, {"ssd": str(tmp_path)}, {}, settings).flush_timeout_seconds
    assert parse_duration(service["TimeoutStopSec"]) > flush + daemon.END_SECONDS


def test_a_restart_keeps_what_a_stop_frees(service: configparser.SectionProxy) -> None:
    assert service["RestartKillSignal"] == daemon.KEEP_SIGNAL.name
    assert service.get("KillSignal", "SIGTERM") in [number.name for number in daemon.END_SIGNALS]
    assert service["Type"] == "notify"
    assert "WatchdogSec" in service


def test_only_mistakes_keep_it_from_starting_again(service: configparser.SectionProxy) -> None:
    prevented = {int(code) for code in service["RestartPreventExitStatus"].split()}
    assert prevented <= {row.code for row in exit_codes()}
    assert not prevented & {0, 1, 10, 70}
    assert service["Restart"] == "on-failure"
    assert int(service["OOMScoreAdjust"]) == daemon.OOM_SCORE_ADJUSTMENT
