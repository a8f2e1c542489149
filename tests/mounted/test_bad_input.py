"""What a person gets wrong: one line that says what to do, the exit code of its kind, nothing mounted."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mounted.children import as_user, skip_unless_users_can_run_kvfs
from tests.mounted.conftest import MakeMount
from tests.mounted.operations import USER_ID
from tests.mounted.running import MIB, KvfsMount, environment_for_kvfs, mounts_below, run_kvfs
from tests.namespaces import skip_unless_namespaces_can_be_private

USAGE, CONFIG, MOUNTPOINT, UNAVAILABLE, NOT_PERMITTED = 2, 3, 4, 6, 9


def assert_refused(ended: subprocess.CompletedProcess[str], code: int, mount: KvfsMount, *words: str) -> None:
    """One line on stderr with these words, the exit code, no mount, no state."""
    assert ended.returncode == code, (ended.returncode, ended.stdout, ended.stderr)
    assert ended.stdout == ""
    lines = ended.stderr.splitlines()
    assert len(lines) == 1, ended.stderr
    for word in words:
        assert word in lines[0], lines[0]
    assert mounts_below(mount.path.parent) == []
    assert list(mount.state_base.iterdir()) == []


@pytest.mark.parametrize("pool", ["12Q", "many", "", "-1G", "0", "1000P", "300%"])
def test_a_pool_that_makes_no_sense(make_mount: MakeMount, pool: str) -> None:
    mount = make_mount()
    ended = run_kvfs("mount", mount.path, "--pool", pool, "--state-dir", mount.state_base)
    assert_refused(ended, USAGE, mount, "pool")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-option"],
        ["-o", "no-such-option"],
        ["--hugepages", "perhaps"],
        ["--mode", "rwx"],
        ["--owner", "nobody-of-this-name"],
        ["--numa", "elsewhere"],
        ["--reserve-percent", "120"],
    ],
)
def test_an_option_that_makes_no_sense(make_mount: MakeMount, arguments: list[str]) -> None:
    mount = make_mount()
    assert_refused(mount.try_mount(*arguments), USAGE, mount)


def test_a_mountpoint_that_is_missing(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.path.rmdir()
    assert_refused(mount.try_mount(), MOUNTPOINT, mount, str(mount.path))


def test_a_mountpoint_that_is_a_file(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.path.rmdir()
    mount.path.touch()
    assert_refused(mount.try_mount(), MOUNTPOINT, mount, str(mount.path))


def test_a_mountpoint_that_is_not_empty(make_mount: MakeMount) -> None:
    mount = make_mount()
    (mount.path / "somebody's").touch()
    assert_refused(mount.try_mount(), MOUNTPOINT, mount, str(mount.path))
    assert os.listdir(mount.path) == ["somebody's"]


def test_no_mountpoint_at_all() -> None:
    ended = run_kvfs("mount")
    assert ended.returncode == USAGE
    assert len(ended.stderr.splitlines()) <= 4


def test_an_unknown_verb() -> None:
    ended = run_kvfs("mounted")
    assert ended.returncode == USAGE
    assert len(ended.stderr.splitlines()) <= 4


def test_an_unknown_key_in_the_file(make_mount: MakeMount, tmp_path: Path) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text('hugepage = "off"\n')
    mount = make_mount()
    assert_refused(mount.try_mount("--config", str(file)), CONFIG, mount, "hugepage", "hugepages", str(file))


@pytest.mark.parametrize("text", ["pool = [", 'pool = "12Q"', "pool = true"])
def test_a_file_that_makes_no_sense(make_mount: MakeMount, tmp_path: Path, text: str) -> None:
    file = tmp_path / "kvfs.toml"
    file.write_text(text)
    mount = make_mount()
    ended = run_kvfs("mount", mount.path, "--state-dir", mount.state_base, "--config", file)
    assert_refused(ended, CONFIG, mount, str(file))


def test_a_file_that_is_missing(make_mount: MakeMount, tmp_path: Path) -> None:
    mount = make_mount()
    assert_refused(mount.try_mount("--config", str(tmp_path / "none")), CONFIG, mount, "none")


def test_an_environment_variable_that_makes_no_sense(make_mount: MakeMount) -> None:
    mount = make_mount(environment={"KVFS_HUGEPAGES": "perhaps"})
    assert_refused(mount.try_mount(), CONFIG, mount, "KVFS_HUGEPAGES")


def in_a_machine_without(missing: str, mount: KvfsMount) -> subprocess.CompletedProcess[str]:
    """``kvfs mount`` in a mount namespace where a file is not there."""
    words = [sys.executable, "-m", "kvfs", "mount", mount.path, "--pool", "64M"]
    words += ["--state-dir", mount.state_base]
    command = " ".join(shlex.quote(str(word)) for word in words)
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", f"{missing} && exec {command}"],
        env=environment_for_kvfs(), cwd="/", capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.as_root
def test_no_fuse_device(make_mount: MakeMount) -> None:
    skip_unless_namespaces_can_be_private()
    mount = make_mount()
    hide = (
        "mount -t tmpfs dev /dev && mknod /dev/null c 1 3 && mknod /dev/urandom c 1 9 && mkdir /dev/shm "
        "&& chmod 666 /dev/null /dev/urandom && mount -t tmpfs shm /dev/shm"
    )
    assert_refused(in_a_machine_without(hide, mount), UNAVAILABLE, mount, "/dev/fuse")


@pytest.mark.as_root
def test_an_ordinary_user_without_fusermount3(make_mount: MakeMount) -> None:
    """Whoever is not root is mounted by fusermount3; the line names what to install."""
    skip_unless_users_can_run_kvfs()
    mount = make_mount()
    for path in (mount.path, mount.state_base):
        os.chown(path, USER_ID, USER_ID)
    bare = mount.path.parent / "bin"
    bare.mkdir()
    words = [sys.executable, "-m", "kvfs", "mount", mount.path, "--pool", "64M"]
    words += ["--state-dir", mount.state_base]
    ended = subprocess.run(
        [str(word) for word in words],
        env=environment_for_kvfs({"PATH": str(bare), "HOME": str(bare)}),
        cwd="/", capture_output=True, text=True, timeout=60, check=False,
        user=USER_ID, group=USER_ID, extra_groups=[],
    )  # fmt: skip
    assert_refused(ended, UNAVAILABLE, mount, "fusermount3")


@pytest.mark.as_root
def test_only_who_mounted_and_root_unmount(make_mount: MakeMount) -> None:
    skip_unless_users_can_run_kvfs()
    mount = make_mount(128 * MIB, "--owner", f"{USER_ID}:{USER_ID}")
    mount.mount()

    def attempt() -> None:
        for options in ([], ["-z"]):
            ended = run_kvfs("umount", mount.path, *options)
            assert ended.returncode == NOT_PERMITTED, ended
            said = f"kvfs: {mount.path} was mounted by root: sudo kvfs umount {mount.path}\n"
            assert ended.stderr == said

    as_user(attempt)
    assert mount.status()["pid"] == mount.daemon_pid
    mount.umount()
