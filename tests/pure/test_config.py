from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvfs.config import Config, Memory, from_json, load_config, pool_warning, ssd_warnings, to_json
from kvfs.errors import ConfigError, UsageError
from kvfs.settings import parse_mount_options

MEMORY = Memory(total=100 << 30, available=40 << 30)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvfs.toml"
    path.write_text("")
    return path


def load(
    file: Path, flags: dict[str, object] | None = None, environment: dict[str, str] | None = None
) -> Config:
    return load_config(Path("/mnt/kv"), flags or {}, environment or {}, file, MEMORY)


def test_defaults(file: Path) -> None:
    config = load(file)
    assert config.pool_bytes == 10 << 30
    assert (config.hugepages, config.numa, config.mode, config.keep) == ("prefer", "", 0o770, False)
    assert (config.owner_uid, config.owner_gid) == (os.getuid(), os.getgid())
    assert config.mount_options == ()
    assert set(config.origins.values()) == {"default", "argument"}
    assert set(config.origins) == set(Config.__dataclass_fields__) - {"origins"}


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(file: Path) -> None:
    file.write_text('pool = "1G"\nhugepages = "off"\nkeep = true\n')
    config = load(file, {"pool": "3G"}, {"KVFS_POOL": "2G", "KVFS_HUGEPAGES": "require"})
    assert config.pool_bytes == 3 << 30
    assert config.hugepages == "require"
    assert config.keep is True
    assert config.numa == ""
    origins = config.origins
    assert origins["pool_bytes"] == "flag"
    assert origins["hugepages"] == "environment KVFS_HUGEPAGES"
    assert origins["keep"] == f"file {file}"
    assert origins["numa"] == "default"


def test_an_empty_variable_and_an_absent_flag_count_as_not_given(file: Path) -> None:
    config = load(file, {"pool": None, "keep": None}, {"KVFS_POOL": ""})
    assert config.origins["pool_bytes"] == config.origins["keep"] == "default"


def test_an_empty_path_of_an_ssd_is_not_taken_for_no_ssd(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^KVFS_SSD: an empty path is no directory"):
        load(file, environment={"KVFS_SSD": ""})


def test_delays_may_be_none_at_all(file: Path) -> None:
    config = load(file, {"settle": "0", "ssd_write_delay": "0s", "flush_timeout": "0", "io_timeout": "100ms"})
    assert config.settle_seconds == config.ssd_write_delay_seconds == config.flush_timeout_seconds == 0
    assert config.io_timeout_seconds == 0.1


def test_a_mount_may_have_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the place of the host's; a file that is named takes the place of both."""
    (tmp_path / "kvfs").mkdir()
    monkeypatch.setattr("kvfs.config.DEFAULT_DIRECTORY", tmp_path / "kvfs")
    monkeypatch.setattr("kvfs.config.DEFAULT_FILE", tmp_path / "kvfs.toml")
    (tmp_path / "kvfs.toml").write_text('pool = "1G"\nhugepages = "off"\n')
    (tmp_path / "kvfs" / r"mnt-kv\x2da.toml").write_text('pool = "2G"\n')
    (tmp_path / "named.toml").write_text('pool = "3G"\n')
    pools = [
        load_config(Path(mountpoint), {}, {}, named, MEMORY).pool_bytes >> 30
        for mountpoint, named in (
            ("/mnt/kv", None), ("/mnt/kv-a", None), ("/mnt/kv-a", tmp_path / "named.toml")
        )
    ]  # fmt: skip
    assert pools == [1, 2, 3]
    assert load_config(Path("/mnt/kv-a"), {}, {}, None, MEMORY).hugepages == "prefer"


def test_the_owner_is_who_called_sudo(file: Path) -> None:
    config = load(file, environment={"SUDO_UID": "1000", "SUDO_GID": "1001"})
    assert (config.owner_uid, config.owner_gid) == (1000, 1001)


@pytest.mark.parametrize(
    ("text", "ids"), [("root", (0, 0)), ("root:root", (0, 0)), ("12345:54321", (12345, 54321)), ("0", (0, 0))]
)
def test_owners(file: Path, text: str, ids: tuple[int, int]) -> None:
    config = load(file, {"owner": text})
    assert (config.owner_uid, config.owner_gid) == ids


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("pool", "64X", "--pool: .*not a size"),
        ("pool", "101G", "--pool: .*more than the 100.0 GiB of memory"),
        ("pool", "1M", "--pool: .*too little"),
        ("pool", "120%", "--pool: .*more than there is"),
        ("hugepages", "yes", "--hugepages: .*prefer, require, off"),
        ("numa", "left", "--numa: .*interleave"),
        ("owner", "nobody-like-that", "--owner: there is no user"),
        ("owner", "root:", "--owner: .*USER:GROUP"),
        ("owner", ":root", "--owner: .*USER:GROUP"),
        ("owner", "root:no-such-group", "--owner: there is no group"),
        ("owner", "99999999999", "--owner: .*largest id"),
        ("mode", "rwx", "--mode: .*octal"),
        ("mode", "0888", "--mode: .*octal"),
        ("reserve_percent", "0", "--reserve-percent: .*reserve"),
        ("pin_percent", "80", "--pin-percent: .*at most 75 percent"),
        ("protected_percent", "101", "--protected-percent: .*from 0 to 100"),
        ("protected_percent", "nan", "--protected-percent: .*from 0 to 100"),
        ("ssd_write_policy", "some", "--ssd-write-policy: 'some' is none of all, reuse"),
        ("ssd_write_delay", "soon", "--ssd-write-delay: 'soon' is not a time"),
        ("settle", "inf", "--settle: 'inf' is not a time"),
        ("io_timeout", "0", "--io-timeout: '0' is too short for any disk: at least 100ms"),
        ("io_timeout", "99ms", "--io-timeout: '99ms' is too short for any disk: at least 100ms"),
        ("state_dir", "", "--state-dir: .*empty path"),
        ("ssd", "", "--ssd: an empty path is no directory: without an SSD, leave it out"),
        ("options", "ro,quick", "--options: .*'quick' is unknown"),
        ("options", "fsname=", "--options: .*write fsname=NAME"),
        ("options", "fsname=one\ntwo", r"--options: .*'fsname=one\\ntwo': write fsname=NAME"),
        ("options", f"fsname={'x' * 201}", "--options: .*NAME is 1 to 200 printable characters"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(file: Path, name: str, value: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load(file, {name: value})
    assert "\n" not in str(caught.value)


def test_a_wrong_variable_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^KVFS_POOL: 'lots' is not a size"):
        load(file, environment={"KVFS_POOL": "lots"})
    with pytest.raises(ConfigError, match=r"^environment KVFS_POOL: .*more than"):
        load(file, environment={"KVFS_POOL": "1P"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("poool = 1", "unknown key 'poool': did you mean 'pool'"),
        ("log-level = 'info'", "unknown key 'log-level': did you mean 'log_level'"),
        ("zzz = 1", "unknown key 'zzz': known are pool"),
        ("pool = [", "not TOML"),
        ("mode = 770", "mode: 770 must be text"),
        ("keep = 'perhaps'", "keep: 'perhaps' is neither yes nor no: write true or false"),
        ("keep = 1", "keep: 1 is neither yes nor no: write true or false"),
        ("hugepages = true", "hugepages: True must be text"),
        ("settle = nan", "settle: nan is not a time"),
        ("io_timeout = inf", "io_timeout: inf is not a time"),
        ("io_timeout = 0.05", "io_timeout: 0.05 is too short"),
        ("ssd = ''", "ssd: an empty path is no directory"),
        ("reserve_percent = [5]", r"reserve_percent: \[5\] is not a percentage"),
    ],
)
def test_a_wrong_file_is_named_with_its_key(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        load(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "flag"),
    [("pool", "pool = true", "1G"), ("keep", "keep = 1", True), ("mode", "mode = 7", "0700")],
)
def test_what_a_flag_overrides_is_checked_all_the_same(
    file: Path, name: str, text: str, flag: object
) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"{file}: {name}: "):
        load(file, {name: flag})
    file.write_text("")
    with pytest.raises(ConfigError, match=r"^KVFS_MODE: "):
        load(file, {"mode": "0700"}, {"KVFS_MODE": "rwx"})


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(Path("/mnt/kv"), {}, {"KVFS_CONFIG": str(tmp_path / "missing.toml")}, None, MEMORY)


def test_values_of_a_file(file: Path) -> None:
    file.write_text(
        'pool = "50%"\nnuma = "interleave"\nmode = "0750"\nkeep = true\nreserve_percent = 7.5\n'
        'options = ["ro", "fsname=cache"]\nlog_level = "debug"\nstate_dir = "/srv/kvfs"\n'
    )
    config = load(file)
    assert config.pool_bytes == 50 << 30
    assert (config.numa, config.mode, config.keep, config.reserve_percent) == ("interleave", 0o750, True, 7.5)
    assert config.mount_options == ("ro", "fsname=cache")
    assert (config.log_level, config.state_dir) == ("debug", Path("/srv/kvfs"))
    file.write_text("pool = 1073741824")
    assert load(file).pool_bytes == 1 << 30


def test_mount_options() -> None:
    assert parse_mount_options("defaults,ro,_netdev,nofail,x-systemd.automount,nosuid,ro") == ("ro",)
    assert parse_mount_options("ro,rw,noatime") == ("noatime",)
    assert parse_mount_options(["allow_other", "fsname=a,fsname=b"]) == ("allow_other", "fsname=b")
    assert parse_mount_options("") == ()
    assert parse_mount_options("noexec,exec,noatime,atime,user=alice,users,comment=mine") == ()
    everywhere = "suid,dev,sync,async,dirsync,strictatime,lazytime,relatime,diratime,iversion,nomand,silent"
    assert parse_mount_options(f"noatime,{everywhere},nosymfollow") == ("nosymfollow",)
    for wrong in ("size=1G", "context=a", "uid=5", "fsname=", "allow_other,allow_root"):
        with pytest.raises(UsageError, match=wrong.split(",")[0]):
            parse_mount_options(wrong)


def test_a_large_pool_is_warned_about(file: Path) -> None:
    assert pool_warning(load(file, {"pool": "70G"}), MEMORY) is None
    warning = pool_warning(load(file, {"pool": "71G"}), MEMORY)
    assert warning is not None
    assert "71%" in warning


def test_a_path_that_is_not_utf8_is_refused(file: Path) -> None:
    with pytest.raises(UsageError, match="UTF-8"):
        load_config(Path(os.fsdecode(b"/mnt/\xff")), {}, {}, file, MEMORY)


def test_json_there_and_back(file: Path) -> None:
    config = load(file, {"pool": "3G", "options": "ro", "numa": "0"}, {"KVFS_PASSTHROUGH": "off"})
    assert from_json(to_json(config)) == config
    with pytest.raises(ConfigError, match="not a configuration"):
        from_json(b'{"mountpoint": 5}')


# The SSD


def load_ssd(file: Path, ssd: Path | str, capacity: str | None = None, pool: str = "1G") -> Config:
    return load(file, {"pool": pool, "ssd": str(ssd), "ssd_capacity": capacity})


def test_the_capacity_is_a_share_of_the_filesystem(file: Path, tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    for ssd in (tmp_path, tmp_path / "missing"):
        config = load_ssd(file, ssd, "50%")
        assert config.ssd_capacity_bytes == int(room.f_blocks * room.f_frsize * 0.5)
    assert load_ssd(file, tmp_path, "64M").ssd_capacity_bytes == 64 << 20


@pytest.mark.parametrize(
    ("ssd", "capacity", "words"),
    [
        ("/tmp", "63M", r"^--ssd-capacity: 63\.0 MiB is too little: at least 64\.0 MiB"),
        ("/tmp", "120%", "^--ssd-capacity: '120%' is more than there is"),
        ("/proc", "50%", "^--ssd /proc: its filesystem has no room to give"),
        ("/proc", None, "^--ssd /proc: its filesystem has no room to give"),
        ("/no/such/directory", None, "is the disk mounted"),
    ],
)
def test_a_capacity_that_cannot_be(file: Path, ssd: str, capacity: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_ssd(file, ssd, capacity)


def test_a_capacity_in_the_file_that_is_too_little_is_named(file: Path) -> None:
    file.write_text('ssd = "/tmp"\nssd_capacity = "1M"\n')
    with pytest.raises(ConfigError, match=f"^file {file}: 1.0 MiB is too little"):
        load(file)


def test_what_may_not_be_meant_of_the_ssd_is_warned_about(file: Path, tmp_path: Path) -> None:
    assert ssd_warnings(load(file)) == []
    assert ssd_warnings(load_ssd(file, tmp_path, "1G")) == []
    (small,) = ssd_warnings(load_ssd(file, tmp_path, "1G", pool="2G"))
    assert "1.0 GiB is smaller than the pool of 2.0 GiB" in small
    (memory,) = ssd_warnings(load_ssd(file, "/dev/shm/missing", "1G"))
    assert "/dev/shm/missing is in memory (tmpfs)" in memory
