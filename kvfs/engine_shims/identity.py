"""What makes the bytes that two engines cache interchangeable: written down, and hashed.

Pages of one identity lie below ``pages/<identity>/``, with the manifest that it is the hash of beside them,
for people. Two engines share pages if, and only if, every field is equal. A field has no default: an engine
shim that does not know one cannot start. ``None`` says that there is none of it, where a field allows that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from kvfs.errors import IncompleteIdentity

FORMAT = 1
"""The layout of the manifest itself, and of what it says."""
HEX_DIGITS = 32
"""Of the SHA-256: 128 bits, which nobody meets twice by accident and nobody can aim at in practice."""

Count = Annotated[int, msgspec.Meta(ge=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Sha256 = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class _Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that must all be given, and no others."""


class Engine(_Section, frozen=True):
    """Who lays the bytes out, and its version where the layout depends on it."""

    name: Text
    version: Text


class Repository(_Section, frozen=True, tag="repository", tag_field="from"):
    """A model that is named by where it comes from, at one commit."""

    repository: Text
    commit: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{40}([0-9a-f]{24})?$")]


class Content(_Section, frozen=True, tag="content", tag_field="from"):
    """A model that is named by what it is: the SHA-256 of each file by its name.

    Configuration, index, tokenizer, code and weights: see ``weights.content_of``.
    """

    files: Annotated[dict[Text, Sha256], msgspec.Meta(min_length=1)]


class Computation(_Section, frozen=True):
    """What decides which numbers are computed."""

    dtype: Text
    quantization: Text | None
    attention: Text
    """The backend that computes attention: their results differ in the last bits."""
    rope_scaling: dict[str, Any] | None
    adapters: dict[Text, Sha256] | None
    """LoRA adapters of every request, by name; those of single requests are in the block hash."""


class Hashing(_Section, frozen=True):
    """How an engine names a block: equal names must mean equal tokens."""

    algorithm: Text
    seed: str


class KvGroup(_Section, frozen=True):
    """Layers that keep the same kind of state, in the order in which their pages hold them."""

    kind: Literal["full_attention", "mla", "sliding_window", "checkpoint"]
    layers: Annotated[list[Text], msgspec.Meta(min_length=1)]
    page_tokens: Count
    window_tokens: Count | None
    heads: Count | None
    """Heads of keys and values on one rank; None where state is not kept by heads."""
    head_size: Count | None
    dtype: Text
    page_bytes: Count


class Representation(_Section, frozen=True):
    """How numbers become bytes."""

    layout: Text
    byte_order: Literal["little", "big"]
    tensor_parallel: Count
    pipeline_parallel: Count
    context_parallel: Count
    groups: Annotated[list[KvGroup], msgspec.Meta(min_length=1)]


class Manifest(_Section, frozen=True):
    """Everything that must be equal for pages to be shared."""

    format: Literal[1]
    engine: Engine
    model: Repository | Content
    computation: Computation
    hashing: Hashing
    representation: Representation
    scope: str | None
    """Whom the pages are for, where not everybody: a tenant."""
    salt: Sha256 | None
    """Of a secret that keeps this cache apart: ``hash_of_salt``, so that the manifest does not tell it."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Manifest:
        """From plain values. Raises IncompleteIdentity, which names the field that is at fault."""
        try:
            return msgspec.convert({"format": FORMAT, **_plain(fields)}, cls)
        except msgspec.ValidationError as error:
            raise IncompleteIdentity(f"no identity for this engine: {error}") from None

    @classmethod
    def read(cls, text: bytes) -> Manifest:
        """From the JSON of a file. Raises IncompleteIdentity."""
        try:
            fields = msgspec.json.decode(text, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise IncompleteIdentity(f"this is no manifest: {error}") from None
        return cls.of(fields)

    def canonical(self) -> bytes:
        """JSON without spaces, keys in order: equal manifests are equal bytes."""
        return msgspec.json.encode(self, order="sorted")

    @property
    def identity(self) -> str:
        """The name of the directory of its pages: 32 hexadecimal digits."""
        return hashlib.sha256(self.canonical()).hexdigest()[:HEX_DIGITS]

    def text(self) -> bytes:
        """For ``manifest.json``: the same for people."""
        return msgspec.json.format(self.canonical(), indent=2) + b"\n"


def hash_of_salt(salt: str) -> str:
    return hashlib.sha256(salt.encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Numbers as JSON has them: a factor of 8.0 is one of 8, wherever it was read from."""
    match value:
        case Mapping():
            return {name: _plain(one) for name, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case float() if value.is_integer():
            return int(value)
        case _:
            return value
