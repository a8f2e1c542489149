"""What docs/client.md shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.mounted.conftest import MakeMount
from tests.mounted.running import MIB, REPOSITORY, environment_for_kvfs


def blocks(language: str) -> str:
    text = (REPOSITORY / "docs/client.md").read_text()
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE))


def test_the_python_blocks(make_mount: MakeMount) -> None:
    with make_mount(128 * MIB) as mount:
        program = blocks("python").replace("/mnt/kv", str(mount.path))
        assert program.count("connect") == 3
        subprocess.run(
            [sys.executable, "-W", "error", "-c", program], env=environment_for_kvfs(), timeout=30, check=True
        )


def test_the_shell_block(make_mount: MakeMount, tmp_path: Path) -> None:
    with make_mount(128 * MIB) as mount:
        (tmp_path / "FILE").write_bytes(b"page")
        for name in ("one", "two"):
            (mount.path / "model").mkdir(exist_ok=True)
            (mount.path / "model" / name).write_text(name)
        script = blocks("sh").replace("/mnt/kv", str(mount.path))
        script = re.sub(r"^kvfs ", f"{sys.executable} -m kvfs ", script, flags=re.MULTILINE)
        shown = subprocess.run(
            ["sh", "-ec", script],
            cwd=tmp_path,
            env=environment_for_kvfs(),
            timeout=30,
            check=True,
            capture_output=True,
            text=True,
        )
        assert shown.stdout == "onetwo"
        assert (tmp_path / "FILE").read_bytes() == b"page"
