"""What the image is made of is there, and reaches its builder."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "packaging" / "Containerfile").read_text()


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (REPOSITORY / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    sources = [
        source for line in re.findall(r"^COPY (?!--)(.+) \S+$", TEXT, re.MULTILINE) for source in line.split()
    ]
    for source in sources:
        assert (REPOSITORY / source).exists()
        assert f"!{source}" in ignored
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert {"pyproject.toml", "kvfs", project["readme"], *project["license-files"]} == set(sources)


def test_the_programs_that_it_links_to_are_installed() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r"/opt/kvfs/bin/(\S+) /(?:usr/local/bin|sbin)/\1", TEXT)) == set(project["scripts"])
