"""What has gone wrong elsewhere with pages on a disk: wrong bytes, lost pages, drifting sums, leftovers."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.crashing import CrashingMount, disk_usage
from tests.faults.small_mounts import SIZE, Mount, data, serving
from tests.mounted.running import MIB, is_alive, mountinfo, run_kvfs, wait_sealed, wait_until
from tests.mounted.test_reports_room import disk_usage as mounted_usage

pytestmark = [pytest.mark.as_root, pytest.mark.deadline(180)]

DAMAGED = 12
CAPACITY = 200 * MIB


def stored(mount: Mount, count: int) -> list[Path]:
    """Pages in one directory that the SSD has."""
    paths = [mount.path / "pages" / f"{number:03}" for number in range(count)]
    paths[0].parent.mkdir(exist_ok=True)
    for number, path in enumerate(paths):
        path.write_bytes(data(number))
    wait_sealed(*paths[-10:])
    mount.wait_stored()
    return paths


# Right length, wrong bytes


def flip(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(SIZE // 2)
        byte = opened.read(1)[0]
        opened.seek(SIZE // 2)
        opened.write(bytes([byte ^ 1]))


def cut(file: Path) -> None:
    os.truncate(file, SIZE // 2)


def swap(file: Path) -> None:
    other, third = file.with_name("001"), file.with_name("third")
    file.rename(third)
    other.rename(file)
    third.rename(other)


def lose_attributes(file: Path) -> None:
    for name in os.listxattr(file):
        os.removexattr(file, name)


@pytest.mark.parametrize("is_mounted", [False, True], ids=["unmounted", "mounted"])
@pytest.mark.parametrize("harm", [flip, cut, swap, lose_attributes])
def test_right_length_and_wrong_bytes_are_a_miss_and_never_read(
    base: Path, harm: Callable[[Path], None], is_mounted: bool
) -> None:
    """Whatever somebody does to the file of a page: the first read finds nothing, the file is set aside, the
    reason counted. The lookup after that is a miss too, and storing the page again makes it a hit."""
    file = base / "kvfs/pages/000"
    with serving(base, base) as mount:
        page = stored(mount, 3)[0]
        if is_mounted:
            for path in page.parent.iterdir():
                os.setxattr(path, "user.kvfs.evict", b"1")
            harm(file)
            require_miss(mount, page)
    if is_mounted:
        return
    harm(file)
    with serving(base, base, number=2) as mount:
        require_miss(mount, mount.path / "pages/000")


def require_miss(mount: Mount, page: Path) -> None:
    with pytest.raises(FileNotFoundError):
        page.read_bytes()
    assert not page.exists(), "after a failed load the name is absent: nobody tries it again and again"
    assert page.name not in os.listdir(page.parent)
    wait_until(lambda: sum(mount.tier("ssd")["damaged"].values()) >= 1, 10, "the damage is counted")
    assert mount.tier("ssd")["quarantined"] >= 1
    assert (page.parent / "002").read_bytes() == data(2), "others are as they were"
    page.write_bytes(data(0))
    wait_sealed(page)
    assert page.read_bytes() == data(0)
    mount.wait_stored()
    os.setxattr(page, "user.kvfs.evict", b"1")
    assert page.read_bytes() == data(0)


def test_verify_names_the_page_with_wrong_bytes_and_exits_non_zero(base: Path) -> None:
    """Harmed while nothing was mounted, and asked about before anybody reads it."""
    with serving(base, base) as mount:
        stored(mount, 3)
    flip(base / "kvfs/pages/001")
    with serving(base, base, number=2) as mount:
        ended = run_kvfs("verify", mount.path)
        assert ended.returncode == DAMAGED
        assert "pages/001" in ended.stdout
        assert "pages/000" not in ended.stdout
        assert run_kvfs("verify", mount.path, "--repair").returncode == DAMAGED
        assert run_kvfs("verify", mount.path).returncode == 0
        assert not (mount.path / "pages/001").exists()


# Counters


def test_ten_thousand_stores_removes_evictions_and_overwrites_keep_the_accounts(base: Path) -> None:
    """What df says is what du finds and what the status shows, at every moment within the total; at the end
    nothing is used, and storing works."""
    chance = random.Random(4)
    sizes = [100, 4096, 5000, 65_536, 300_000, MIB]
    with serving(base, base) as mount:
        top = mount.path / "churn"
        top.mkdir()
        for number in range(10_000):
            path = top / f"{chance.randrange(250)}"
            what = chance.random()
            if what < 0.25:
                path.unlink(missing_ok=True)
            elif what < 0.35 and path.exists():
                with_suppressed_busy(path)
            else:
                path.write_bytes(data(number)[: chance.choice(sizes)])
            if number % 100 == 0:
                room = os.statvfs(mount.path)
                assert 0 <= room.f_bfree <= room.f_blocks
            if number % 2500 == 2499:
                require_agreement(mount, base / "kvfs")
        shutil.rmtree(top)
        wait_until(lambda: mount.used_bytes() <= MIB, 20, "nothing is used when all is removed")
        mount.wait_stored()
        require_agreement(mount, base / "kvfs")
        assert mount.tier("ssd")["pages"] == mount.tier("dram")["pages"] == 0
        for path in stored(mount, 5):
            os.setxattr(path, "user.kvfs.evict", b"1")


def with_suppressed_busy(path: Path) -> None:
    try:
        os.setxattr(path, "user.kvfs.evict", b"1")
    except OSError as error:
        if error.strerror != "Device or resource busy":
            raise


def require_agreement(mount: Mount, ssd: Path) -> None:
    mount.wait_stored()
    assert mount.status()["unsealed"] == 0
    found, files = mounted_usage(mount.path)
    slack = (files + 32) * 4096 * 2  # directories and attributes take room that no file shows
    assert abs(mount.used_bytes() - found) <= slack, (mount.used_bytes(), found)
    assert mount.tier("ssd")["used_bytes"] == disk_usage(ssd)
    assert abs(disk_usage(ssd) - found) <= slack


def test_files_removed_by_hand_lower_the_usage_again(base: Path) -> None:
    """Behind the back of a live mount: misses, a daemon alive; once counted anew the sums are right, and
    storing works as on an empty disk."""
    with serving(base, base) as mount:
        paths = stored(mount, 60)
        for path in paths:
            os.setxattr(path, "user.kvfs.evict", b"1")
        for path in paths[:40]:
            (base / "kvfs/pages" / path.name).unlink()
        for number, path in enumerate(paths):
            if number < 20:
                with pytest.raises(FileNotFoundError):
                    path.read_bytes()
            elif number >= 40:
                assert path.read_bytes() == data(number)
        for number in range(100, 160):  # more than both tiers hold: what is gone is evicted, too
            (mount.path / f"{number}").write_bytes(data(number))
        assert is_alive(mount.daemon_pid)
        assert run_kvfs("verify", mount.path, "--repair").returncode in (0, DAMAGED)
        mount.wait_stored()
        assert mount.tier("ssd")["used_bytes"] == disk_usage(base / "kvfs")
        assert not any(path.exists() for path in paths[:40])
        assert mount.status()["misses"]["vanished"] >= 20
        assert 0 <= mount.used_bytes() <= CAPACITY


def test_a_restart_after_a_kill_knows_names_sizes_usage_and_recency(base: Path) -> None:
    """Nine tenths full, killed, DRAM lost: the disk alone brings everything back, and evicts the oldest."""
    mount = CrashingMount(base / "mount", base / "ssd", *AT_ONCE, "--ssd-capacity", str(CAPACITY))
    try:
        mount.start()
        (mount.path / "pages").mkdir()
        count = CAPACITY * 9 // 10 // SIZE
        paths = [mount.path / "pages" / f"{number:03}" for number in range(count)]
        for number, path in enumerate(paths):
            path.write_bytes(data(number))
            os.utime(path, (1_000_000_000 + number, 1_000_000_000 + number))
        mount.wait_settled()
        for path in paths[:20]:
            os.utime(path)
        mount.wait_settled()
        before = {path.name: path.stat().st_size for path in paths}
        used = mount.tier("ssd")["used_bytes"]
        mount.kill()
        mount.reboot()
        mount.start()
        assert {path.name: path.stat().st_size for path in (mount.path / "pages").iterdir()} == before
        wait_until(lambda: mount.tier("ssd")["used_bytes"] == used, 10, "the usage is known")
        for number in range(200, 230):
            (mount.path / f"{number}").write_bytes(data(number))
        mount.wait_settled()
        left = [path.exists() for path in paths]
        assert not all(left), "evicting works"
        assert sum(left[:20]) >= 18, "what was used last is there"
        for number, path in enumerate(paths):
            if path.exists():
                assert path.read_bytes() == data(number)
        mount.end()
    finally:
        mount.close()
        assert mount.process is not None
        mount.process.wait(10)


AT_ONCE = ("--settle", "0s", "--ssd-write-delay", "0s", "--ssd-read-path", "direct")


# Names and bytes


def test_a_listed_page_has_all_of_its_bytes_while_pages_move_up_and_down(base: Path) -> None:
    """Its size and content come from the tier that has it whole; never an empty one from the other."""
    with serving(base, base) as mount:
        paths = stored(mount, 40)
        over = threading.Event()
        failures: list[str] = []

        def move() -> None:
            chance = random.Random(1)
            while not over.is_set():
                with_suppressed_busy(chance.choice(paths))

        mover = threading.Thread(target=move)
        mover.start()
        try:
            began = time.monotonic()
            while time.monotonic() < began + 8:
                for name in os.listdir(mount.path / "pages"):
                    path = mount.path / "pages" / name
                    size = path.stat().st_size
                    content = path.read_bytes()
                    if not size == len(content) == SIZE or content != data(int(name)):
                        failures.append(f"{name}: {size} bytes, {len(content)} read")
        finally:
            over.set()
            mover.join()
        assert not failures
        assert mount.tier("ssd")["read"] > 20
        assert len(os.listdir(mount.path / "pages")) == 40


def test_what_was_written_and_never_read_is_shown_and_misses_have_reasons(base: Path) -> None:
    with serving(base, base) as mount:
        paths = stored(mount, 10)
        for path in paths:
            os.setxattr(path, "user.kvfs.evict", b"1")
        for path in paths[:3]:
            path.read_bytes()
        mount.umount()
        flip(base / "kvfs/pages/005")
        mount.mount()
        for name in ("absent", "pages/005"):
            with pytest.raises(FileNotFoundError):
                (mount.path / name).read_bytes()
        status = mount.status()
        assert status["misses"]["corrupt"] == 1
        wait_until(lambda: unread(mount) == 7, 10, "what nobody has read is counted, by its age")
        assert "never read" in (mount.path / ".kvfs/status").read_text()


def unread(mount: Mount) -> int:
    pages = {age: row["pages"] for age, row in mount.tier("ssd")["never_read"].items()}
    assert sum(pages.values()) == pages["<1h"]
    return int(pages["<1h"])


def test_cufile_without_a_gpu_moves_the_same_bytes_and_says_how(base: Path) -> None:
    """Asked for where there is no driver: the mount comes up, by a way that works, and status says why."""
    with serving(base, base, "--ssd-read-path", "cufile") as mount:
        paths = stored(mount, 5)
        for path in paths:
            os.setxattr(path, "user.kvfs.evict", b"1")
        for number, path in enumerate(paths):
            assert path.read_bytes() == data(number)
        ssd = mount.tier("ssd")
        assert ssd["read"] == 5
        assert ssd["read_path"].startswith("cufile") or "cufile" in ssd["read_path_reason"]


# Ends


def test_a_clean_end_frees_dram_and_keeps_the_disk(base: Path) -> None:
    """--keep keeps DRAM too; nothing else is left, and gc takes away only what it knows."""
    with serving(base, base) as mount:
        stored(mount, 5)
        mount.umount("--keep")
        assert mountinfo(mount.dram)
        mount.mount()
        assert mount.status()["adopted"]["pages"] == 5
        mine = base / "kvfs/pages/mine.txt"
        mine.write_text("somebody's")
        left = base / "kvfs/.kvfs-temporary/left"
        left.write_bytes(data(1))
        left.chmod(0o1600)
        found = json.loads(run_kvfs("gc", mount.path, "--json").stdout)["ssd"]
        assert [row["path"] for row in found["foreign"]["files"]] == ["pages/mine.txt"]
        assert [row["path"] for row in found["temporaries"]["files"]] == [".kvfs-temporary/left"]
        assert run_kvfs("gc", mount.path, "--delete").returncode == 0
        assert mine.read_text() == "somebody's"
        assert not left.exists()
        dram = mount.dram
    assert not mountinfo(dram)
    assert not mountinfo(mount.path)
    assert not list(mount.state_base.iterdir())
    assert sorted(path.name for path in (base / "kvfs/pages").iterdir()) == [
        *(f"{number:03}" for number in range(5)),
        "mine.txt",
    ]
