"""What a model is, told by the content of its files, which are read again only when they have changed."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

import msgspec

from kvfs.engine_shims.identity import Content
from kvfs.errors import IncompleteIdentity

PATTERNS = (
    "*.json",  # configuration, index of the weights, tokenizer
    "*.jinja",
    "*.model",
    "*.tiktoken",
    "*.txt",
    "*.py",
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.gguf",
)
"""The files that decide what a model computes, in its directory itself."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


class _Known(msgspec.Struct, frozen=True, array_like=True):
    """The digest of a file that had this size and this time of its last change."""

    size: int
    mtime_ns: int
    ctime_ns: int
    sha256: str


def default_store() -> Path:
    """Where digests are kept: below XDG_CACHE_HOME."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "kvfs" / "weights.json"


def content_of(model: Path, store: Path | None = None) -> Content:
    """The digests of a model's files, or of the one file that it is.

    Reads every file whose size or times are not those of the last time; ``store`` is where these are kept.
    A store that cannot be read or written costs time, nothing else. Raises IncompleteIdentity.
    """
    store = store or default_store()
    known = _load(store)
    found = {}
    try:
        for path in _files(model):
            found[path.name] = known[str(path.resolve())] = _digest(path, known.get(str(path.resolve())))
    except OSError as error:
        raise IncompleteIdentity(f"the model cannot be read: {error}") from None
    if not any(name.endswith(WEIGHTS) for name in found):
        raise IncompleteIdentity(f"{model} has no weights ({', '.join(WEIGHTS)})")
    _save(store, known)
    return Content(files={name: one.sha256 for name, one in found.items()})


def _files(model: Path) -> list[Path]:
    if model.is_dir():
        return sorted({path for pattern in PATTERNS for path in model.glob(pattern) if path.is_file()})
    return [model]


def _digest(path: Path, known: _Known | None) -> _Known:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        stamp = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if known is not None and (known.size, known.mtime_ns, known.ctime_ns) == stamp:
            return known
        return _Known(*stamp, hashlib.file_digest(file, "sha256").hexdigest())


def _load(store: Path) -> dict[str, _Known]:
    with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(store.read_bytes(), type=dict[str, _Known])
    return {}


def _save(store: Path, known: dict[str, _Known]) -> None:
    there = {path: one for path, one in known.items() if os.path.exists(path)}
    with suppress(OSError):
        store.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=store.parent, delete=False) as file:
            file.write(msgspec.json.encode(there))
        os.replace(file.name, store)
