"""The batch socket of a real mount: other users, killed clients and daemons, the end of the mount."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from kvfs.errors import NotPermitted
from kvfs.service.messages import ABSENT, DONE, Abort, Commit, Create, Created, Exists, Open
from kvfs.steps import COMMIT_STEPS
from tests.batches.asking import Asking
from tests.mounted.children import as_user
from tests.mounted.conftest import MakeMount
from tests.mounted.running import (
    MIB,
    REPOSITORY,
    KvfsMount,
    environment_for_kvfs,
    is_alive,
    mountinfo,
    wait_sealed,
    wait_until,
)

FORBIDDEN = NotPermitted.errno


def _key(mount: KvfsMount, path: Path) -> bytes:
    return os.fsencode(path.relative_to(mount.path))


def _service(mount: KvfsMount) -> dict[str, int]:
    found: dict[str, int] = mount.status()["batch_socket"]
    return found


def test_what_is_put_by_one_way_is_read_by_the_other(mount: KvfsMount, directory: Path) -> None:
    content = os.urandom(3 * MIB + 5)
    with Asking.connect(mount.path) as client:
        (directory / "written").write_bytes(content)
        wait_sealed(directory / "written")
        assert client.read(_key(mount, directory / "written")) == content
        assert not (directory / "put").exists()  # the kernel remembers that
        assert client.put(
            {_key(mount, directory / "put"): content, _key(mount, directory / "new/put"): b"1"}
        ) == [
            DONE,
            DONE,
        ]
        assert (directory / "put").read_bytes() == content
        assert os.listdir(directory / "new") == ["put"]
        with open(directory / "put", "rb") as old:
            assert client.put({_key(mount, directory / "put"): b"new"}) == [DONE]
            assert (directory / "put").read_bytes() == b"new"
            assert old.read() == content
        assert os.stat(directory / "put").st_size == 3


@pytest.mark.as_root
def test_each_key_is_checked_as_the_mount_would(mount: KvfsMount, directory: Path) -> None:
    for name in ("open", "closed"):
        (directory / name).write_bytes(b"bytes")
        (directory / name).chmod(0o644 if name == "open" else 0o600)
    (directory / "locked").mkdir(mode=0o700)
    (directory / "locked/page").write_bytes(b"bytes")
    (directory / "theirs").mkdir()
    os.chown(directory / "theirs", 65534, 65534)
    wait_sealed(directory / "open", directory / "closed", directory / "locked/page")
    keys = [_key(mount, directory / name) for name in ("open", "closed", "locked/page", "absent")]

    def work() -> None:
        with Asking.connect(mount.path) as client:
            answer, descriptors = client.open(keys)
            assert answer.codes == [DONE, FORBIDDEN, FORBIDDEN, ABSENT]
            assert os.pread(descriptors[0], 9, 0) == b"bytes"
            assert client.codes(Exists(client.number(), keys)) == [DONE, DONE, FORBIDDEN, ABSENT]
            assert client.put({keys[3]: b"1"}) == [FORBIDDEN]
            assert client.put({_key(mount, directory / "theirs/page"): b"1"}, 0o640) == [DONE]

    as_user(work)
    status = (directory / "theirs/page").stat()
    assert (status.st_mode & 0o777, status.st_uid, status.st_gid) == (0o640, 65534, 65534)


def test_nobody_makes_or_removes_anything_beside_the_socket(mount: KvfsMount) -> None:
    for change in (
        partial(os.mknod, mount.path / ".kvfs/socket", 0o140600),
        partial(os.mknod, mount.path / ".kvfs/other", 0o140600),
        (mount.path / ".kvfs/socket").unlink,
    ):
        with pytest.raises(OSError, match=r"Operation not permitted|File exists"):
            change()


CLIENT = """
import os, sys
from pathlib import Path
from kvfs.service.messages import Create
from tests.batches.asking import Asking
client = Asking.connect(Path(sys.argv[1]))
client.create([b"x" * (1 << 20)] * 8)
client.ask(Create(client.number(), [1 << 20]))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_client_that_is_killed_leaves_nothing(mount: KvfsMount) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(mount.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment_for_kvfs(),
        cwd=REPOSITORY,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert _service(mount)["drafts"] == 9
        assert mount.used_bytes() >= 9 * MIB
        child.send_signal(signal.SIGKILL)
    wait_until(lambda: _service(mount)["drafts"] == 0, 5, "the drafts are gone")
    wait_until(lambda: mount.used_bytes() < 9 * MIB, 5, "their memory is free")
    assert _service(mount)["draft_bytes"] == 0


def test_a_client_that_may_open_few_files_asks_again(mount: KvfsMount, directory: Path) -> None:
    keys = [_key(mount, directory / str(number)) for number in range(40)]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Asking.connect(mount.path) as client:
        assert client.put({key: key for key in keys}) == [DONE] * 40
        used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 10, before[1]))
        try:
            seen: list[bytes] = []
            while left := keys[len(seen) :]:
                answer, descriptors = client.open(left)
                assert answer.codes == [DONE] * len(left)
                assert client.truncated == (len(descriptors) < len(left))
                assert descriptors
                for fd in descriptors:
                    seen.append(os.pread(fd, 4096, 0))
                    os.close(fd)
            assert seen == keys
            created, descriptors = client.ask(Create(client.number(), [100] * 40))
            assert isinstance(created, Created)
            for fd in descriptors:
                os.close(fd)
            assert len(descriptors) < len(created.drafts) == 40
            assert client.codes(Abort(client.number(), created.drafts)) == [DONE] * 40
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.as_root
def test_the_mount_can_be_unmounted_while_clients_are_connected(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.mount()
    with Asking.connect(mount.path) as client:
        client.put({b"page": b"bytes"})
        _, [fd] = client.open([b"page"])
        subprocess.run(["umount", mount.path], check=True)
        assert not mountinfo(mount.path)
        wait_until(lambda: not is_alive(mount.daemon_pid), 10, "the daemon has ended")
        with pytest.raises((EOFError, ConnectionError)):
            client.ask(Exists(client.number(), [b"page"]))
        assert os.pread(fd, 9, 0) == b"bytes"
        os.close(fd)


def test_the_next_daemon_has_what_was_committed_and_nothing_else(make_mount: MakeMount) -> None:
    mount = make_mount()
    mount.mount()
    with Asking.connect(mount.path) as client:
        assert client.put({b"a/page": b"committed"}) == [DONE]
        _, [fd] = client.open([b"a/page"])
        memory = mmap.mmap(fd, 9, prot=mmap.PROT_READ)
        os.close(fd)
        client.create([b"never committed"])
        mount.kill_daemon()
        assert memory[:] == b"committed"
        with pytest.raises((EOFError, ConnectionError)):
            client.ask(Exists(client.number(), [b"a/page"]))
    mount.remount()
    with Asking.connect(mount.path) as client:
        assert client.read(b"a/page") == b"committed"
        assert memory[:] == b"committed"
        assert os.listdir(mount.path) == ["a"]
        memory.close()
        assert client.put({b"a/page": b"anew"}) == [DONE]
    mount.umount()


@pytest.mark.parametrize("step", COMMIT_STEPS)
def test_a_commit_is_cut_short(make_mount: MakeMount, step: str) -> None:
    mount = make_mount(64 * MIB, environment={"KVFS_KILL_AT": f"{step}:3"})
    mount.mount()
    with Asking.connect(mount.path) as client:
        assert client.put({b"one": b"old", b"other": b"old"}) == [DONE] * 2
        drafts = client.create([b"new one", b"new other"])
        client.send(Commit(client.number(), drafts, [b"one", b"other"]))
        with pytest.raises((EOFError, ConnectionError)):
            client.receive()
    wait_until(lambda: not is_alive(mount.daemon_pid), 10, "the daemon has died")
    mount.environment.clear()
    mount.remount()
    assert sorted(os.listdir(mount.path)) == ["one", "other"]
    assert (mount.path / "one").read_bytes() == (b"new one" if step == "commit.named" else b"old")
    assert (mount.path / "other").read_bytes() == b"old"
    mount.umount()


@pytest.mark.deadline(120)
def test_pages_on_the_ssd_are_brought_up_for_an_open(make_mount: MakeMount, scratch: Path) -> None:
    ssd = scratch / "ssd-of-the-batch-socket"
    arguments = ("--ssd", str(ssd), "--ssd-capacity", "256M", "--ssd-write-delay", "0s", "--settle", "0s")
    mount = make_mount(64 * MIB, *arguments)
    mount.mount()
    keys = [b"page-%d" % number for number in range(20)]
    with Asking.connect(mount.path) as client:
        for key in keys:
            assert client.put({key: key * (MIB // 8)}) == [DONE]
        for key in keys:
            path = mount.path / os.fsdecode(key)
            wait_until(lambda path=path: _leaves(path), 20, f"{path} is on the SSD only")  # type: ignore[misc]
        answer, descriptors = client.open([*keys, b"absent"])
        assert answer.codes == [DONE] * len(keys) + [ABSENT]
        for key, fd, size in zip(keys, descriptors, answer.sizes, strict=False):
            assert os.pread(fd, size, 0) == key * (MIB // 8)
            os.close(fd)
    mount.umount()


def _leaves(path: Path) -> bool:
    try:
        os.setxattr(path, "user.kvfs.evict", b"1")
    except OSError:
        return False
    return os.getxattr(path, "user.kvfs.tier") == b"ssd"


def test_the_socket_lies_below_the_mount(mount: KvfsMount) -> None:
    """That of an ordinary user by a symlink: a socket keeps its mount busy, and only root can copy one."""
    path = mount.path / ".kvfs/socket"
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert path.is_symlink() == (os.geteuid() != 0)
    assert "socket" in os.listdir(path.parent)


def test_status_tells_of_the_socket(mount: KvfsMount) -> None:
    with Asking.connect(mount.path) as client:
        client.send(Open(client.number(), [b"never"], 5))
        wait_until(lambda: _service(mount)["waiting"] == 1, 5, "a request waits")
        assert _service(mount)["connections"] == 1
        assert "batch socket:" in (mount.path / ".kvfs/status").read_text()
        assert client.failure(Commit(client.number(), [1], [b"a"])).number
    wait_until(lambda: _service(mount)["connections"] == 0, 5, "the connection has ended")
