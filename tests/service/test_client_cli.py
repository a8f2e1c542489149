"""``kvfs put``, ``get`` and ``cat``."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfs.errors import KvfsError, NotMounted, UsageError
from tests.mounted.running import MIB, KvfsMount, environment_for_kvfs

PAGE = os.urandom(MIB)


@pytest.fixture(scope="module")
def mount(scratch: Path) -> Iterator[KvfsMount]:
    with KvfsMount(scratch / "client-cli", 128 * MIB, "--mode", "0755") as shared:
        yield shared
        shared.umount()


def run(*arguments: str | Path, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "kvfs", *map(str, arguments)]
    return subprocess.run(
        command,
        input=given,
        env=environment_for_kvfs(),
        cwd="/",
        capture_output=True,
        timeout=30,
        check=False,
    )


def test_through_the_standard_streams(mount: KvfsMount) -> None:
    page = mount.path / "streams/page"
    put = run("put", page, given=PAGE)
    assert (put.returncode, put.stdout, put.stderr) == (0, b"", b"")
    assert page.read_bytes() == PAGE
    got = run("get", page)
    assert (got.returncode, got.stdout, got.stderr) == (0, PAGE, b"")


def test_through_files(mount: KvfsMount, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(PAGE)
    assert run("put", mount.path / "files/page", source).returncode == 0
    assert run("get", mount.path / "files/page", target).returncode == 0
    assert target.read_bytes() == PAGE


def test_cat_of_several(mount: KvfsMount) -> None:
    first, second = mount.path / "cat-1", mount.path / "cat-2"
    run("put", first, given=b"first ")
    run("put", second, given=b"second")
    assert run("cat", first, second, first).stdout == b"first secondfirst "


def test_a_missing_page_is_one_line(mount: KvfsMount, tmp_path: Path) -> None:
    target = tmp_path / "untouched"
    target.write_bytes(b"as it was")
    for arguments in (("get", mount.path / "missing", target), ("cat", mount.path / "missing")):
        ended = run(*arguments)
        assert ended.returncode == KvfsError.exit_code
        assert ended.stderr.startswith(b"kvfs: missing is not on ")
        assert ended.stderr.count(b"\n") == 1
        assert ended.stdout == b""
    assert target.read_bytes() == b"as it was"


def test_paths_that_name_no_page(mount: KvfsMount, tmp_path: Path) -> None:
    for verb in ("put", "get", "cat"):
        assert run(verb, tmp_path / "file").returncode == NotMounted.exit_code
        assert run(verb, mount.path).returncode == UsageError.exit_code
        assert run(verb, mount.path / ".kvfs/status").returncode == UsageError.exit_code
        assert run(verb, "").returncode == UsageError.exit_code
    assert run("put", mount.path / "page", tmp_path / "missing").returncode == UsageError.exit_code
    assert run("put", mount.path / "page", given=b"").returncode == UsageError.exit_code
    assert run("get", mount.path / "page", tmp_path).returncode == KvfsError.exit_code
