"""kvfs in a container, as packaging/kubernetes has it: mounts that propagate to the node and to engines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.operations import pattern
from tests.mounted.running import MIB, environment_for_kvfs, scratch_directory, wait_sealed, wait_until
from tests.namespaces import skip_unless_namespaces_can_be_private

pytestmark = pytest.mark.as_root
DATA = pattern(31, MIB)


class Node:
    """A mount namespace with what two volumes of type hostPath would be, and namespaces made from it."""

    def __init__(self, base: Path) -> None:
        self.volumes = base / "node"
        self.volumes.mkdir()
        self.box = base / "box"
        self.box.mkdir()
        self._sleepers: list[subprocess.Popen[bytes]] = []
        self.namespace = self._hold(
            "unshare", "-m", "sh", "-c",
            f"mount -t tmpfs node {self.volumes} && mount --make-rshared {self.volumes} && "
            f"mkdir {self.volumes}/mnt {self.volumes}/run && echo ready && exec cat",
        )  # fmt: skip
        self.engine_namespace = self._hold(
            *self.entering(), "unshare", "-m", "--propagation", "slave", "sh", "-c", "echo ready && exec cat"
        )

    def _hold(self, *words: str) -> int:
        holder = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._sleepers.append(holder)
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        return holder.pid

    def entering(self) -> tuple[str, ...]:
        return ("nsenter", "-m", "-t", str(self.namespace))

    @property
    def mount(self) -> Path:
        """The mount, as an engine in its container sees it."""
        return Path(f"/proc/{self.engine_namespace}/root{self.volumes}/mnt/kv")

    def mounts(self) -> list[str]:
        """The types of what is mounted in the volumes of the node."""
        lines = Path(f"/proc/{self.namespace}/mountinfo").read_text().splitlines()
        inner = [line for line in lines if f" {self.volumes}/" in line]
        return sorted(line.partition(" - ")[2].split()[0] for line in inner)

    def start(self) -> subprocess.Popen[bytes]:
        """The container: its own root, volumes that propagate both ways, the daemon as its only process."""
        steps = (
            f"mount -t tmpfs box {self.box}",
            f"mkdir {self.box}/mnt",
            "mount -t tmpfs run /run",
            "mkdir /run/kvfs",
            f"mount --rbind {self.volumes}/mnt {self.box}/mnt",
            f"mount --rbind {self.volumes}/run /run/kvfs",
            f"mkdir {self.box}/mnt/kv 2>/dev/null || true",
            f"exec {sys.executable} -P -m kvfs mount -f {self.box}/mnt/kv --pool 64M",
        )
        words = ["unshare", "-m", "--propagation", "unchanged", "sh", "-ec", "; ".join(steps)]
        return subprocess.Popen(
            [*self.entering(), *words],
            env=environment_for_kvfs(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )

    def serves(self) -> bool:
        try:
            return (self.mount / ".kvfs/status").exists()
        except OSError:
            return False

    def close(self) -> None:
        for sleeper in reversed(self._sleepers):
            sleeper.communicate(b"")


@pytest.fixture
def node() -> Iterator[Node]:
    skip_unless_namespaces_can_be_private()
    with scratch_directory() as base:
        node = Node(base)
        yield node
        node.close()


def test_engines_see_the_mount_come_back_after_the_container_was_killed(node: Node) -> None:
    """The DRAM belongs to the node; the dead mount is cleared, there and in the containers of engines."""
    container = node.start()
    wait_until(node.serves, 20, "the engine sees the mount")
    (node.mount / "page").write_bytes(DATA)
    wait_sealed(node.mount / "page")
    for _ in range(2):
        container.kill()
        container.communicate()
        with pytest.raises(OSError, match="Transport endpoint is not connected"):
            os.listdir(node.mount)
        assert node.mounts() == ["fuse.kvfs", "tmpfs"]
        container = node.start()
        wait_until(node.serves, 20, "the engine sees the mount again")
        assert (node.mount / "page").read_bytes() == DATA
        assert node.mounts() == ["fuse.kvfs", "tmpfs"]
    container.send_signal(signal.SIGTERM)
    _, said = container.communicate(timeout=20)
    assert container.returncode == 0
    assert b"Traceback" not in said
    assert node.mounts() == []
    assert os.listdir(node.mount.parent / "kv") == []
    assert os.listdir(node.mount.parents[1] / "run") == []


def test_doctor_tells_that_other_containers_cannot_be_seen() -> None:
    """Their processes close files under numbers that mean nothing here: who was killed is not known."""
    skip_unless_namespaces_can_be_private()

    ended = subprocess.run(
        ["unshare", "-p", "-f", "--mount-proc", sys.executable, "-m", "kvfs", "doctor", "--json"],
        env=environment_for_kvfs(), cwd="/", capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    (check,) = [check for check in json.loads(ended.stdout) if check["name"] == "processes"]
    assert check["ok"] is None
    assert "hostPID" in check["remedy"]
