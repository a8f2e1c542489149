"""Equal manifests have one identity, others have another, and nothing can be left out."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvfs.engine_shims.identity import Manifest, hash_of_salt
from kvfs.errors import IncompleteIdentity

GROUP: dict[str, Any] = {
    "kind": "sliding_window",
    "layers": ["model.layers.0", "model.layers.2"],
    "page_tokens": 64,
    "window_tokens": 1023,
    "heads": 8,
    "head_size": 128,
    "dtype": "bfloat16",
    "page_bytes": 524288,
}
FIELDS: dict[str, Any] = {
    "engine": {"name": "vllm", "version": "0.32.0"},
    "model": {"from": "repository", "repository": "org/model", "commit": "0" * 40},
    "computation": {
        "dtype": "bfloat16",
        "quantization": None,
        "attention": "torch_sdpa",
        "rope_scaling": {"type": "yarn", "factor": 8.0},
        "adapters": {"legal": "a" * 64},
    },
    "hashing": {"algorithm": "sha256_cbor", "seed": "0"},
    "representation": {
        "layout": "NHD",
        "byte_order": "little",
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "context_parallel": 1,
        "groups": [GROUP],
    },
    "scope": "tenant",
    "salt": hash_of_salt("secret"),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every field, sections too."""
    for key, one in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict):
            yield (*path, key)
        if isinstance(one, dict | list) and key not in ("rope_scaling", "adapters", "layers"):
            yield from places(one, (*path, key))


def changed(path: tuple[Any, ...], *value: Any) -> dict[str, Any]:
    """``FIELDS`` with another value in one place, or without it."""
    fields = copy.deepcopy(FIELDS)
    section: Any = fields
    for key in path[:-1]:
        section = section[key]
    if value:
        section[path[-1]] = value[0]
    else:
        del section[path[-1]]
    return fields


OTHERS = {
    "kind": "full_attention",
    "byte_order": "big",
    "from": "content",
    "commit": "1" * 40,
    "rope_scaling": None,
    "adapters": {"legal": "b" * 64},
    "quantization": "fp8",
    "layers": ["model.layers.2", "model.layers.0"],
    "salt": hash_of_salt("another"),
}


def other(path: tuple[Any, ...]) -> Any:
    value: Any = FIELDS
    for key in path:
        value = value[key]
    if path[-1] in OTHERS:
        return OTHERS[path[-1]]
    return value + 1 if isinstance(value, int) else f"{value}x"


LEAVES = [
    path
    for path in places(FIELDS)
    if path not in [("engine",), ("model",), ("computation",), ("hashing",), ("representation",)]
    and path[-1] not in ("groups", "from")
]


@pytest.mark.parametrize("path", LEAVES, ids=str)
def test_every_field_makes_another_identity(path: tuple[Any, ...]) -> None:
    assert Manifest.of(changed(path, other(path))).identity != Manifest.of(FIELDS).identity


@pytest.mark.parametrize("path", list(places(FIELDS)), ids=str)
def test_no_field_can_be_left_out(path: tuple[Any, ...]) -> None:
    with pytest.raises(IncompleteIdentity) as caught:
        Manifest.of(changed(path))
    assert str(path[-1]) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("engine", "version"), "", "$.engine.version"),
        (("engine", "version"), None, "$.engine.version"),
        (("engine", "built"), "today", "built"),
        (("representation", "groups"), [], "$.representation.groups"),
        (("representation", "groups", 0, "page_tokens"), 0, "$.representation.groups[0].page_tokens"),
        (("model", "commit"), "main", "$.model.commit"),
        (("salt",), "secret", "$.salt"),
        (("format",), 2, "$.format"),
    ],
)
def test_what_is_impossible_is_named(path: tuple[Any, ...], value: Any, named: str) -> None:
    with pytest.raises(IncompleteIdentity) as caught:
        Manifest.of(changed(path, value))
    assert named in str(caught.value)


def test_order_and_the_form_of_numbers_do_not_matter() -> None:
    backwards = dict(reversed(FIELDS.items()))
    assert Manifest.of(backwards).identity == Manifest.of(FIELDS).identity
    whole = changed(("computation", "rope_scaling"), {"factor": 8, "type": "yarn"})
    assert Manifest.of(whole).identity == Manifest.of(FIELDS).identity


def test_the_identity_is_that_of_earlier_releases() -> None:
    """Should this change, every page that is stored becomes a miss."""
    assert Manifest.of(FIELDS).identity == "68bf30ad1d9d3d837d3a060dda13f98f"


def test_what_is_written_for_people_is_read_back() -> None:
    manifest = Manifest.of(FIELDS)
    text = manifest.text()
    assert json.loads(text)["engine"] == FIELDS["engine"]
    assert b"secret" not in text
    assert Manifest.read(text) == manifest


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"{}", b"null"])
def test_what_is_no_manifest(text: bytes) -> None:
    with pytest.raises(IncompleteIdentity):
        Manifest.read(text)
