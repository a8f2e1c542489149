"""Mounts for the tests, and the proof that they leave nothing behind."""

from __future__ import annotations

import os
import platform
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mounted.running import (
    MIB,
    KvfsMount,
    is_alive,
    mounts_below,
    processes_of_this_run,
    scratch_directory,
    wait_until,
)
from tests.mounted.watchdog import Watchdog

POOL = 256 * MIB
#: How the bytes move: through the kernel, or through the daemon.
MODES = {"passthrough": {}, "daemon-io": {"KVFS_PASSTHROUGH": "off"}}
#: Seconds that a test may take before its daemons are killed, unless it is marked otherwise.
DEADLINE = 60

MakeMount = Callable[..., KvfsMount]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "deadline(seconds): how long a test with a mount may take")
    config.addinivalue_line("markers", "as_root: needs root")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("as_root") and os.geteuid() != 0:
        pytest.skip("needs root")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no usable /dev/fuse on this machine")


@pytest.fixture(scope="session", autouse=True)
def _device_for_everyone() -> Iterator[None]:
    """Distributions let every user open /dev/fuse by a rule of udev; where no udev runs, the tests do."""
    device = Path("/dev/fuse")
    mode = stat.S_IMODE(device.stat().st_mode) if device.exists() else 0o666
    if os.geteuid() == 0 and mode & 0o666 != 0o666:
        device.chmod(0o666)
        yield
        device.chmod(mode)
    else:
        yield


@pytest.fixture(scope="session")
def watchdog() -> Iterator[Watchdog]:
    dog = Watchdog()
    yield dog
    dog.close()


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """A directory for everything. When all tests are done no mount, process or state is left of them."""
    with scratch_directory() as base:
        yield base
        mounts, processes = mounts_below(base), processes_of_this_run()
        states = [str(path) for path in base.glob("*/state/*")]
        assert not mounts, f"mounts left behind: {mounts}"
        assert not processes, f"processes left behind: {processes}"
        assert not states, f"state left behind: {states}"


@pytest.fixture(autouse=True)
def deadline(request: pytest.FixtureRequest, watchdog: Watchdog) -> Iterator[None]:
    """No test hangs for ever on a daemon that does not answer."""
    marker = request.node.get_closest_marker("deadline")
    watchdog.begin(marker.args[0] if marker else DEADLINE)
    yield
    if watchdog.end():
        pytest.fail("the test took too long; its daemons were killed")


def machine_has_passthrough() -> bool:
    major, minor = map(int, platform.release().split(".")[:2])
    return os.geteuid() == 0 and (major, minor) >= (6, 9)


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """How the bytes move."""
    return str(request.param)


@pytest.fixture(scope="module")
def mount(request: pytest.FixtureRequest, scratch: Path, mode: str) -> Iterator[KvfsMount]:
    """A mount that the tests of a module share, each in its own directory."""
    name = f"{request.module.__name__.rpartition('.')[2]}-{mode}"
    with KvfsMount(scratch / name, POOL, "--mode", "0755", environment=MODES[mode]) as shared:
        active = shared.status()["passthrough"]
        if mode == "passthrough" and not active["active"] and not machine_has_passthrough():
            pytest.skip(f"no passthrough on this machine: {active['reason']}")
        assert active["active"] == (mode == "passthrough"), active
        yield shared
        log = shared.log
        shared.umount()
    assert "Traceback" not in log, log
    assert not any(map(is_alive, shared.pids))


@pytest.fixture
def directory(request: pytest.FixtureRequest, mount: KvfsMount) -> Iterator[Path]:
    """An empty directory on the shared mount, and afterwards room again."""
    path = mount.path / request.node.name[:200].replace("/", "-")
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture
def empty_pool(mount: KvfsMount) -> Iterator[KvfsMount]:
    """The shared mount with nothing in it, for tests that count."""
    assert os.listdir(mount.path) == []
    wait_until(lambda: mount.used_bytes() < 4 * MIB, 5, "the pool is empty")
    yield mount
    for name in os.listdir(mount.path):
        path = mount.path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@pytest.fixture
def make_mount(request: pytest.FixtureRequest, scratch: Path) -> Iterator[MakeMount]:
    """Mounts of a test's own, not yet mounted: ``make_mount(pool_bytes, *arguments, environment=…)``."""
    made: list[KvfsMount] = []

    def make(pool_bytes: int = POOL, *arguments: str, environment: dict[str, str] | None = None) -> KvfsMount:
        name = "".join(c if c.isalnum() else "-" for c in request.node.name)[:60]
        one = KvfsMount(scratch / f"{name}-{len(made)}", pool_bytes, *arguments, environment=environment)
        made.append(one)
        return one

    yield make
    for one in made:
        one.close()
        assert not any(map(is_alive, one.pids)), f"a daemon of {one.path} is left"
