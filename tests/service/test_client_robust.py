"""The client where things go wrong: the daemon is killed, limits are low, the mount is none."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import kvfs
from kvfs.errors import NoSuchPage, NotMounted, NotPermitted, TooManyFiles, TooManyMappings, UsageError
from tests.mounted.children import as_user
from tests.mounted.conftest import MakeMount
from tests.mounted.running import MIB, KvfsMount, environment_for_kvfs, run_kvfs, wait_sealed

PAGE = os.urandom(2 * MIB)


@pytest.fixture(scope="module")
def mount(scratch: Path) -> Iterator[KvfsMount]:
    with KvfsMount(scratch / "robust", 256 * MIB, "--mode", "0755") as shared:
        yield shared
        gc.collect()
        shared.umount()


@contextmanager
def at_most(limit: int, value: int) -> Iterator[None]:
    """A lower soft limit for this process."""
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def in_child(mount: KvfsMount, program: str, *arguments: str) -> None:
    """Runs a program of Python with the client of the mount as ``kv``."""
    begin = "import kvfs, os, sys\nkv = kvfs.connect(sys.argv[1])\n"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", begin + program, str(mount.path), *arguments],
        env=environment_for_kvfs(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_pages_stay_valid_when_the_daemon_is_killed_and_mounted_again(make_mount: MakeMount) -> None:
    with make_mount(128 * MIB) as mount, kvfs.connect(mount.path) as kv:
        kv.put("mapped", PAGE)
        kv.put("opened", PAGE)
        wait_sealed(mount.path / "mapped", mount.path / "opened")
        with kv.open_batch(["mapped"]) as pages, kv.open_batch(["opened"]) as unmapped:
            view = pages["mapped"]
            mount.kill_daemon()
            assert view == PAGE
            with pytest.raises(NotMounted, match="kvfs mount"):
                kv.get("mapped")
            with pytest.raises(NotMounted):
                kv.exists(["mapped"])
            with pytest.raises(NotMounted):
                kv.put("new", PAGE)
            with pytest.raises(NotMounted, match="kvfs mount"):
                kvfs.connect(mount.path)
            mount.remount()
            assert kv.get("mapped") == PAGE
            kv.put("new", PAGE)
            assert kv.match_prefix(["mapped", "new"]) == 2
            memory = bytearray(len(PAGE))
            unmapped.read_into("opened", memory)
            assert memory == PAGE
            assert view == PAGE
            del view
        gc.collect()


def test_a_batch_of_more_pages_than_descriptors(mount: KvfsMount) -> None:
    keys = [f"many/{number}" for number in range(400)]
    with kvfs.connect(mount.path) as kv:
        for number, key in enumerate(keys):
            kv.put(key, b"%d" % number)
        before = descriptors()
        limit = 2 * before + 64  # the client takes half, whatever else this process has open
        assert limit // 2 < len(keys)
        with at_most(resource.RLIMIT_NOFILE, limit), kv.open_batch(keys) as pages:
            assert pages.missing == ()
            for number, key in enumerate(keys):
                assert pages[key] == b"%d" % number
        assert descriptors() == before
        kv.delete(keys)


def test_no_descriptor_at_all(mount: KvfsMount) -> None:
    with kvfs.connect(mount.path) as kv:
        kv.put("nofile", PAGE)
        with at_most(resource.RLIMIT_NOFILE, 3), pytest.raises(TooManyFiles):
            kv.get("nofile")
        assert kv.get("nofile") == PAGE


def test_nothing_is_left_open(mount: KvfsMount) -> None:
    with kvfs.connect(mount.path) as kv:
        kv.put("left", PAGE)
        before = descriptors()
        for _ in range(3):
            with kv.open_batch(["left", "missing"]):
                pass
            with kv.open_batch(["left"]) as pages:
                pages.map()
            kv.open_batch(["left"])  # let go without a word
            with kv.create_batch({"left": 4}) as drafts:
                drafts["left"][:] = b"last"
            with pytest.raises(UsageError):
                kv.create_batch({"fine": 4, "not//fine": 4})
            with pytest.raises(UsageError):
                kv.open_batch(["left", "not//fine"])
        gc.collect()
        assert descriptors() == before


def test_more_mappings_than_the_kernel_allows(mount: KvfsMount) -> None:
    with kvfs.connect(mount.path) as kv:
        kv.put("space", PAGE)
        with (
            kv.open_batch(["space"]) as pages,
            at_most(resource.RLIMIT_AS, MIB),
            pytest.raises(TooManyMappings, match="max_map_count"),
        ):
            pages.map()
        assert kv.get("space") == PAGE


def test_a_forked_child_goes_on(mount: KvfsMount) -> None:
    program = """
kv.put("fork", b"before")
child = os.fork()
kv.put(f"fork-{'parent' if child else 'child'}", b"x" * 1000)
for _ in range(100):
    assert kv.get("fork") == b"before"
    assert kv.exists(["fork", "none"]) == [True, False]
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert kv.exists(["fork-parent", "fork-child"]) == [True, True]
"""
    in_child(mount, program)


def test_threads_never_get_what_is_anothers(mount: KvfsMount) -> None:
    failures: list[BaseException] = []
    contents = {f"threads/{number}": bytes([number]) * (100 + 37 * number) for number in range(40)}
    with kvfs.connect(mount.path) as kv:
        for key, content in contents.items():
            kv.put(key, content)
        keys = list(contents)

        def work(first: int) -> None:
            try:
                for turn in range(60):
                    key = keys[(first * 7 + turn) % len(keys)]
                    assert kv.get(key) == contents[key]
                    some = keys[first::3]
                    with kv.open_batch([*some, f"missing-{turn}"]) as pages:
                        assert all(pages[key] == contents[key] for key in some)
                    assert kv.match_prefix([*keys[:first], "missing", key]) == first
                    kv.put(f"threads/own-{first}", bytes([first]) * 50)
                    assert kv.get(f"threads/own-{first}") == bytes([first]) * 50
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_a_page_is_never_seen_before_its_bytes(mount: KvfsMount) -> None:
    """Whoever polls sees nothing, the old page or the new one, whole."""
    program = """
first, second = bytes([1]) * (8 << 20), bytes([2]) * (4 << 20)
for turn in range(20):
    kv.put("polled", second if turn % 2 else first)
"""
    seen: set[tuple[int, bytes]] = set()
    with kvfs.connect(mount.path) as kv:
        writer = threading.Thread(target=in_child, args=(mount, program))
        writer.start()
        while writer.is_alive():
            if kv.exists("polled"):
                content = kv.get("polled")
                assert content == content[:1] * len(content)
                seen.add((len(content), content[:1]))
        writer.join()
    assert seen <= {(8 * MIB, b"\1"), (4 * MIB, b"\2")}
    assert seen


def test_of_many_writers_of_one_key_one_whole_page_stays(mount: KvfsMount) -> None:
    program = """
for turn in range(50):
    kv.put("contested", sys.argv[2].encode() * 100_000)
"""
    with kvfs.connect(mount.path) as kv:
        writers = [threading.Thread(target=in_child, args=(mount, program, str(n))) for n in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert kv.get("contested") in [str(number).encode() * 100_000 for number in range(4)]
        assert [name for name in os.listdir(mount.path) if "put" in name] == []


def test_paths_that_are_no_mount(mount: KvfsMount, tmp_path: Path) -> None:
    with pytest.raises(NotMounted, match="nothing is mounted"):
        kvfs.connect(tmp_path)
    with pytest.raises(NotMounted, match="proc"):
        kvfs.connect("/proc")
    with pytest.raises(UsageError):
        kvfs.connect("")
    (mount.path / "sub").mkdir(exist_ok=True)
    with pytest.raises(NotMounted):
        kvfs.connect(mount.path / "sub")


@pytest.mark.as_root
def test_who_may_not_is_told_so(make_mount: MakeMount) -> None:
    with make_mount(64 * MIB, "--mode", "0755") as mount:
        with kvfs.connect(mount.path) as kv:
            kv.put("secret/page", b"x")
        (mount.path / "secret").chmod(0o700)
        as_user(lambda: forbidden(mount.path))
        mount.path.chmod(0o700)
        as_user(lambda: cannot_enter(mount.path))


def forbidden(path: Path) -> None:
    with kvfs.connect(path) as kv:
        for call in (
            lambda: kv.get("secret/page"),
            lambda: kv.open_batch(["secret/page"]),
            lambda: kv.exists(["secret/page"]),
            lambda: kv.put("page", b"y"),
            lambda: kv.create_batch({"page": 1}),
            lambda: kv.delete(["secret/page"]),
        ):
            with pytest.raises(NotPermitted, match="page"):
                call()


def cannot_enter(path: Path) -> None:
    with pytest.raises(NotPermitted, match="cannot be entered by you"):
        kvfs.connect(path)


def test_importing_is_light() -> None:
    heavy = ("trio", "pyfuse3", "torch", "asyncio", "numpy", "xxhash")
    program = f"""
import sys, kvfs
light = set(sys.modules)
assert not light & {set(heavy)}, light & {set(heavy)}
assert not any(name.startswith("kvfs.") for name in light), light
kvfs.connect
loaded = set(sys.modules) & {set(heavy[:5])}
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], env=environment_for_kvfs(), timeout=30, check=True)


def test_a_full_pool_is_told(make_mount: MakeMount) -> None:
    from kvfs.errors import FileTooLarge, OutOfRoom

    with make_mount(64 * MIB) as mount, kvfs.connect(mount.path) as kv:
        with pytest.raises((OutOfRoom, FileTooLarge)):
            kv.put("larger", bytes(48 * MIB))
        assert not kv.exists("larger")
        assert os.listdir(mount.path) == []
        kv.put("fits", PAGE)
        assert kv.get("fits") == PAGE
        with pytest.raises(NoSuchPage):
            kv.get("larger")
    assert run_kvfs("status", mount.path).returncode == NotMounted.exit_code
