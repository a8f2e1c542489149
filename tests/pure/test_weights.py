"""A model is what its files hold; what was read is read again only when it has changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from kvfs.engine_shims.weights import content_of
from kvfs.errors import IncompleteIdentity


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "code.py", "model-1.safetensors", "model-2.safetensors"):
        (directory / name).write_text(name)
    (directory / "README.md").write_text("says nothing to the engine")
    return directory


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "weights.json"


def test_every_file_that_decides_counts(model: Path, store: Path) -> None:
    files = content_of(model, store).files
    assert files == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in model.iterdir()
        if path.name != "README.md"
    }
    assert list(files) == sorted(files)


def test_a_model_of_one_file(tmp_path: Path, store: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    assert content_of(file, store).files == {"model.gguf": hashlib.sha256(b"weights").hexdigest()}


def test_files_are_read_once(model: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = content_of(model, store)
    read = []
    genuine = hashlib.file_digest

    def digest(file: object, name: str) -> object:
        read.append(os.path.basename(file.name))  # type: ignore[attr-defined]
        return genuine(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", digest)
    assert content_of(model, store) == first
    assert read == []
    (model / "config.json").write_text("other json!")  # as long as before
    assert content_of(model, store) != first
    assert read == ["config.json"]


def test_a_file_that_was_given_its_old_time_back_is_read(model: Path, store: Path) -> None:
    path = model / "model-1.safetensors"
    first, status = content_of(model, store), path.stat()
    path.write_text("model-X.safetensors")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert content_of(model, store) != first


@pytest.mark.parametrize("kept", [b"", b"[]", b'{"/x": 5}', b"\xff"])
def test_a_store_that_makes_no_sense_is_done_without(model: Path, store: Path, kept: bytes) -> None:
    first = content_of(model, store)
    store.write_bytes(kept)
    assert content_of(model, store) == first
    assert content_of(model, store / "below a file") == first


def test_what_is_gone_is_forgotten(model: Path, store: Path, tmp_path: Path) -> None:
    content_of(model, store)
    model.rename(tmp_path / "moved")
    content_of(tmp_path / "moved", store)
    assert str(model / "config.json") not in store.read_text()
    assert os.listdir(store.parent) == [store.name]


def test_what_is_no_model(tmp_path: Path, store: Path) -> None:
    with pytest.raises(IncompleteIdentity, match="cannot be read"):
        content_of(tmp_path / "missing", store)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(IncompleteIdentity, match="no weights"):
        content_of(tmp_path, store)
