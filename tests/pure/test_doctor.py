from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvfs import doctor, mounts, syscalls
from kvfs.cli.doctor import command, plain
from kvfs.doctor import Check, fuse, limits, memory
from kvfs.mounts import MountEntry
from kvfs.tiers import tmpfs


def settings(**known: str) -> Callable[[str], str | None]:
    """A /proc and /sys in which only the files with these names exist."""
    return lambda path: known.get(os.path.basename(path))


def refusing(number: int) -> Callable[..., int]:
    def refuse(*_arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return refuse


def test_every_check_has_a_name_of_its_own_and_tells_what_it_found() -> None:
    checks = doctor.examine()
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert all(check.found for check in checks)
    for check in checks:
        if check.ok is False:
            assert check.consequence, check.name
            assert check.remedy, check.name


def test_an_ordinary_user_is_told_once_which_checks_do_not_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_root", lambda: True)
    all_names = [check.name for check in doctor.examine()]
    monkeypatch.setattr(doctor, "is_root", lambda: False)
    note, *rest = doctor.examine()
    left_out = [name for name in all_names if name not in [check.name for check in rest]]
    assert (note.name, note.ok) == ("user", None)
    assert f"{', '.join(left_out[:-1])} and {left_out[-1]} do not apply" in note.found
    assert "sudo kvfs doctor" in note.remedy


def test_nothing_is_mounted_left_behind_or_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> tuple[object, ...]:
        return (
            sorted(os.listdir("/proc/self/fd")),
            Path("/proc/self/oom_score_adj").read_text(),
            resource.getrlimit(resource.RLIMIT_NOFILE),
        )

    monkeypatch.setattr(syscalls, "mount", refusing(1))
    doctor.examine()  # the first time, modules are loaded
    before = state()
    doctor.examine()
    assert state() == before


def test_json_has_an_object_for_each_check() -> None:
    result = CliRunner().invoke(command, ["--json"])
    checks = json.loads(result.stdout)
    assert {"name", "ok", "found", "consequence", "remedy"} <= set(checks[0])
    assert {check["ok"] for check in checks} <= {True, False, None}
    assert "passthrough" in [check["name"] for check in checks]


def test_what_prevents_mounting_is_told_by_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for ok, needed, code in ((False, True, 6), (False, False, 0), (True, True, 0), (None, True, 0)):
        checks = [Check("thing", ok, "found", "so", "do", needed=needed)]
        monkeypatch.setattr(doctor, "examine", lambda checks=checks: checks)
        assert CliRunner().invoke(command, []).exit_code == code


def test_plain_text_is_one_line_a_check_with_advice_below() -> None:
    text = plain([Check("one", True, "fine"), Check("longer", False, "word " * 40, "slow", "buy another")])
    lines = text.splitlines()
    assert lines[0] == "ok    one     fine"
    assert lines[1].startswith("bad   longer  word")
    assert lines[-2:] == [" " * 14 + "so: slow", " " * 14 + "do: buy another"]
    assert max(map(len, lines)) <= 100


def test_no_fuse_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fuse, "_DEVICE", str(tmp_path / "missing"))
    check = fuse.device()
    assert check.prevents_mounting
    assert "--device /dev/fuse" in check.remedy
    assert "No such file" in fuse.passthrough_refusal()
    assert fuse.passthrough().ok is False


def test_a_fuse_device_that_is_shut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "open", refusing(13))
    check = fuse.device()
    assert check.prevents_mounting
    assert "Permission denied" in check.found


def test_passthrough_without_the_right_to_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "make_filesystem", refusing(1))
    check = fuse.passthrough()
    assert check.ok is False
    assert "not permitted" in check.found or "denied" in check.found
    assert "6.9" in check.remedy


def test_no_fusermount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    for root, ok in ((True, None), (False, False)):
        monkeypatch.setattr(fuse, "is_root", lambda root=root: root)
        check = fuse.fusermount()
        assert check.ok is ok
        assert check.prevents_mounting is (not root)


def test_a_fusermount_that_is_not_setuid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "fusermount3"
    program.touch(0o755)
    monkeypatch.setattr(shutil, "which", lambda _name: str(program))
    assert fuse.fusermount().ok is None
    program.chmod(0o4755)
    monkeypatch.setattr(fuse, "_MTAB", program)
    assert fuse.fusermount().ok is True


def test_a_fusermount_without_mtab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "fusermount3"
    program.touch()
    program.chmod(0o4755)
    monkeypatch.setattr(shutil, "which", lambda _name: str(program))
    monkeypatch.setattr(fuse, "_MTAB", tmp_path / "mtab")
    for root, ok in ((True, None), (False, False)):
        monkeypatch.setattr(fuse, "is_root", lambda root=root: root)
        check = fuse.fusermount()
        assert check.ok is ok
        assert check.prevents_mounting is (not root)
        assert "ln -s" in check.remedy


@pytest.mark.parametrize(
    ("text", "ok"),
    [("user_allow_other\n", True), ("# user_allow_other\n", None), ("", None), (None, None)],
)
def test_user_allow_other(
    text: str | None, ok: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    configuration = tmp_path / "fuse.conf"
    if text is not None:
        configuration.write_text(text)
    monkeypatch.setattr(fuse, "_CONFIGURATION", configuration)
    assert fuse.other_users().ok is ok


@pytest.mark.parametrize(("pages", "ok"), [("256", True), ("128", True), ("32", False)])
def test_largest_request(pages: str, ok: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "read_setting", settings(max_pages_limit=pages))
    assert fuse.request_size().ok is (ok or os.sysconf("SC_PAGE_SIZE") > 4096)


@pytest.mark.parametrize(
    ("shmem_enabled", "length", "ok", "word"),
    [
        ("always within_size advise [never] deny force", "2097152", True, "never"),
        ("always within_size advise never [deny] force", "2097152", False, "deny"),
        ("always within_size advise [never] deny force", "536870912", None, "512.0 MiB"),
    ],
)
def test_transparent_hugepages(
    shmem_enabled: str, length: str, ok: bool | None, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "read_setting", settings(shmem_enabled=shmem_enabled, hpage_pmd_size=length))
    check = memory.transparent_hugepages()
    assert check.ok is ok
    assert word in check.found


def test_a_kernel_without_transparent_hugepages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "read_setting", settings())
    assert memory.transparent_hugepages().ok is False


@pytest.mark.parametrize(
    ("swaps", "ok"),
    [
        ("Filename Type Size Used Priority", None),
        ("Filename Type Size Used Priority\n/swap file 1048576 0 -2", False),
    ],
)
def test_noswap_refused_matters_where_there_is_swap(
    swaps: str, ok: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(syscalls, "make_filesystem", refusing(22))
    monkeypatch.setattr(memory, "read_setting", settings(swaps=swaps))
    assert memory.noswap().ok is ok
    assert memory.swap().found == ("none" if ok is None else "1.0 GiB")


def test_no_private_tmpfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "make_filesystem", refusing(1))
    check = memory.private_tmpfs()
    assert check.ok is False
    assert "/dev/shm" in check.consequence
    assert memory.hugepages().ok is False


def test_numa(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tmpfs, "memory_nodes", lambda: [0, 1])
    check = memory.numa()
    assert check.ok is None
    assert "node 1" in check.found
    assert "--numa interleave" in check.remedy


def cgroup(tmp_path: Path, fstype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("rw", "memory") if fstype == "cgroup" else ("rw",)
    entry = MountEntry(1, "/", tmp_path, fstype, fstype, options, "0:99")
    again = MountEntry(2, "/", tmp_path, fstype, fstype, options, "0:99")
    monkeypatch.setattr(mounts, "read_mountinfo", lambda: [entry, again])


@pytest.mark.parametrize(
    ("fstype", "name", "unlimited"),
    [("cgroup2", "memory.max", "max"), ("cgroup", "memory.limit_in_bytes", "9223372036854771712")],
)
def test_limits_of_memory_cgroups(
    fstype: str, name: str, unlimited: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroup(tmp_path, fstype, monkeypatch)
    groups = {".": unlimited, "a": str(512 << 20), "a/b": str(128 << 20), "c": unlimited, "d": "junk"}
    for group, limit in groups.items():
        (tmp_path / group).mkdir(exist_ok=True)
        (tmp_path / group / name).write_text(limit + "\n")
    check = limits.limited_cgroups()
    assert check.ok is None
    assert check.found == "a/b (128.0 MiB), a (512.0 MiB)"
    (tmp_path / "a" / "b" / name).unlink()
    (tmp_path / "a" / name).write_text(unlimited)
    assert limits.limited_cgroups().ok is True


def test_the_tightest_limit_among_the_ancestors_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cgroup(tmp_path, "cgroup2", monkeypatch)
    own = [
        line.split(":", 2)[2]
        for line in Path("/proc/self/cgroup").read_text().splitlines()
        if line.startswith("0::")
    ]
    if not own:
        pytest.skip("this process is in no unified cgroup")
    group = tmp_path / own[0].lstrip("/")
    group.mkdir(parents=True, exist_ok=True)
    assert limits.own_limit() is None
    assert limits.memory_cgroup().ok is True
    (group / "memory.max").write_text("max")
    (tmp_path / "memory.max").write_text(str(256 << 20))
    assert limits.own_limit() == (256 << 20, tmp_path)
    check = limits.memory_cgroup()
    assert check.ok is None
    assert "256.0 MiB" in check.found
    assert "charges a page to the cgroup of whoever writes it" in check.consequence


def test_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text("0\n")
    monkeypatch.setattr(limits, "_OOM_SCORE", score)
    assert limits.out_of_memory().ok is True
    assert score.read_text() == "0\n"


def test_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_reachable_files", lambda: 1024)
    assert limits.open_files().ok is False
    monkeypatch.setattr(limits, "_reachable_files", lambda: 1 << 20)
    assert limits.open_files().ok is True


def test_whether_processes_elsewhere_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.stat("/proc/self/ns/pid").st_ino
    monkeypatch.setattr(limits, "_HOST_PROCESSES", own)
    assert limits.processes().ok is True
    monkeypatch.setattr(limits, "_HOST_PROCESSES", own + 1)
    assert limits.processes().ok is None
