"""The tools that people copy and check files with."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounted.operations import pattern
from tests.mounted.running import MIB, KvfsMount, wait_until
from tests.mounted.tree import differences, snapshot

pytestmark = pytest.mark.deadline(120)


def run(*command: str | Path) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"


def needs(tool: str) -> None:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")


@pytest.fixture
def plain(scratch: Path) -> Iterator[Path]:
    """A directory outside of the mount."""
    path = scratch / "plain"
    path.mkdir()
    yield path
    shutil.rmtree(path)


def make_tree(top: Path) -> None:
    """Files of many sizes, links of both kinds, modes, owners, times and attributes."""
    (top / "d/e").mkdir(parents=True)
    (top / "empty-directory").mkdir(mode=0o711)
    for number, size in enumerate([0, 1, 4096, 100_000, 2 * MIB + 5]):
        path = top / f"d/{number}"
        path.write_bytes(pattern(number, size) if size < MIB else pattern(number, MIB) * 2 + b"tail!")
        os.setxattr(path, "user.number", str(number).encode())
        path.chmod(0o600 + number)
    os.link(top / "d/3", top / "hard-link")
    os.symlink("d/3", top / "symlink")
    os.symlink("nowhere", top / "dangling")
    os.mkfifo(top / "fifo", 0o640)
    os.setxattr(top / "d", "user.of-a-directory", b"\0\xff")
    if os.geteuid() == 0:
        os.chown(top / "d/2", 1000, 2000)
        os.lchown(top / "symlink", 1000, 2000)
    for name in ("d/1", "d/3", "d/e", "symlink"):
        os.utime(top / name, ns=(2 * 10**18, 10**9), follow_symlinks=False)


def copy_with_cp(source: Path, target: Path) -> None:
    run("cp", "-a", source, target)


def copy_with_rsync(source: Path, target: Path) -> None:
    needs("rsync")
    run("rsync", "-aXH", f"{source}/", f"{target}/")
    run("rsync", "-aXH", "--delete", f"{source}/", f"{target}/")


def copy_with_tar(source: Path, target: Path) -> None:
    archive = target.with_suffix(".tar")
    run("tar", "--xattrs", "--xattrs-include=user.*", "-C", source, "-cf", archive, ".")
    target.mkdir()
    run("tar", "--xattrs", "--xattrs-include=user.*", "-C", target, "-xpf", archive)
    archive.unlink()


@pytest.mark.parametrize("copy", [copy_with_cp, copy_with_rsync, copy_with_tar])
def test_a_tree_copied_in_and_out_again_is_the_same(
    mount: KvfsMount, directory: Path, plain: Path, copy: object
) -> None:
    assert callable(copy)
    make_tree(plain / "source")
    before = snapshot(str(plain / "source"))
    copy(plain / "source", directory / "inside")
    assert not differences(before, snapshot(str(directory / "inside")))
    wait_until(lambda: not mount.status()["unsealed"], 10, "everything is sealed")
    copy(directory / "inside", directory / "copy")
    copy(directory / "copy", plain / "back")
    assert not differences(before, snapshot(str(plain / "back")))


@pytest.mark.parametrize(
    "job",
    [
        ["--rw=write", "--bs=1m", "--ioengine=psync"],
        ["--rw=write", "--bs=64k", "--ioengine=psync", "--direct=1"],
        ["--rw=randwrite", "--bs=4k", "--ioengine=psync", "--size=8m"],
        ["--rw=randwrite", "--bs=16k-128k", "--ioengine=mmap"],
        ["--rw=write", "--bs=128k", "--ioengine=libaio", "--iodepth=8", "--direct=1"],
        ["--rw=randrw", "--bs=64k", "--ioengine=pvsync2", "--nrfiles=4"],
    ],
    ids=" ".join,
)
def test_fio_reads_what_it_wrote(directory: Path, job: list[str]) -> None:
    needs("fio")
    common = ["--name=job", f"--directory={directory}", "--size=32m", "--numjobs=2", "--group_reporting"]
    check = ["--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--verify_state_save=0"]
    run("fio", *common, *check, *job)


def test_fio_verifies_pages_in_another_run(mount: KvfsMount, directory: Path) -> None:
    """Written by one process, sealed, and verified by another that only reads."""
    needs("fio")
    job = ["fio", "--name=job", f"--directory={directory}", "--size=16m", "--bs=256k", "--verify=crc32c"]
    job += ["--verify_fatal=1", "--verify_state_save=0", "--ioengine=psync"]
    run(*job, "--rw=write", "--do_verify=0")
    wait_until(lambda: not mount.status()["unsealed"], 10, "everything is sealed")
    run(*job, "--rw=read", "--do_verify=1")


def test_everyday_commands(directory: Path) -> None:
    script = """
        set -e
        echo one > a; echo two >> a; test "$(cat a)" = "one
two"
        cp a b; cmp a b; mv b c; ln c d; ln -s c e; test "$(readlink e)" = c
        dd if=/dev/urandom of=random bs=1M count=3 2>dd.log; rm dd.log
        dd if=random of=copy bs=64k 2>/dev/null; cmp random copy
        dd if=/dev/zero of=copy bs=4k count=1 seek=3 conv=notrunc 2>/dev/null
        test "$(stat -c %s copy)" = "$(stat -c %s random)"
        truncate -s 1M sized; test "$(stat -c %s sized)" = 1048576
        split -b 1M random part-; cat part-* | cmp - random
        sha256sum * > ../sums; mv ../sums sums; sha256sum -c --quiet sums
        mkdir -p x/y/z; touch x/y/z/file; find . -name file | grep -q x/y/z/file
        tail -c 3 a | head -c 2 > f; install -m 600 a g; test "$(stat -c %a g)" = 600
        flock a true; sync a; sync -f a; tee h < a > /dev/null; cmp a h
        rm -r x; rm -f missing; ls -la > /dev/null; ls -1U | wc -l | grep -q 1
    """
    done = subprocess.run(["sh", "-c", script], cwd=directory, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
