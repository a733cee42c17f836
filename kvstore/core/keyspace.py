"""Keyspaces: everything that decides what KV bytes mean, and its canonical encoding.

Two blocks may be exchanged only when every field here is equal. Equal size is never enough. Unresolved values ("auto",
empty digests) are refused, because two machines may resolve them differently.

Encoding, version 1: b"kvstore-keyspace\\x01", then for each field in order of its tag
`tag u8 | type u8 ('s' or 'i') | length u32 LE | value` with strings in UTF-8 and integers as signed 64-bit LE. A field
at its neutral value is encoded like any other, so that no two different field sets share an encoding.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, fields
from functools import cached_property

from kvstore.core.types import SLOT_ALIGN, KeyspaceId
from kvstore.errors import InvalidField

MAGIC = b"kvstore-keyspace\x01"

ITEM_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
"""KV dtypes by their torch names, and bytes per element."""

LAYOUTS = {"block-first": 1, "block-first-mla": 1}
"""Layout id -> newest version this build understands. `[layer][k|v][token][kv_head][head_dim]` and
`[layer][token][latent]`."""

_HEX = frozenset("0123456789abcdef")
MAX_TEXT_BYTES = 4096


@dataclass(frozen=True)
class Keyspace:
    """What makes KV bytes comparable.

    Digests are lower-case hex of at least 128 bits. `rope` is the canonical text of all rope parameters. `latent_dim`
    is the width of an MLA latent row (compressed KV and rope part together) and 0 for ordinary attention; then
    `num_kv_heads` and `head_dim` describe one rank's share. Raises `InvalidField` on construction when a field is
    unknown or unresolved.
    """

    model: str
    weights_digest: str
    tokenizer_digest: str
    kv_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    rope: str
    block_tokens: int = 32
    layout: str = "block-first"
    layout_version: int = 1
    weights_epoch: int = 0
    latent_dim: int = 0
    tp_size: int = 1
    tp_rank: int = 0
    pp_size: int = 1
    pp_rank: int = 0
    adapter_digest: str = ""
    tenant: str = "default"

    def __post_init__(self) -> None:
        self._check_types()
        _check_texts(self)
        _check_shape(self)
        _check_ranks(self)

    def _check_types(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            wanted = int if f.type == "int" else str
            if type(value) is not wanted:
                raise InvalidField(f.name, f"is {type(value).__name__}", f"give {wanted.__name__}")

    def encode(self) -> bytes:
        """Canonical bytes; equal if and only if all fields are equal."""
        parts = [MAGIC]
        for tag, f in enumerate(fields(self)):
            value = getattr(self, f.name)
            kind, raw = (b"i", struct.pack("<q", value)) if isinstance(value, int) else (b"s", value.encode())
            parts.append(bytes([tag]) + kind + struct.pack("<I", len(raw)) + raw)
        return b"".join(parts)

    @classmethod
    def decode(cls, raw: bytes) -> Keyspace:
        """Inverse of `encode`. Raises InvalidField when `raw` is of another version or damaged."""
        if not raw.startswith(MAGIC):
            raise InvalidField("keyspace", "unknown encoding version", "use a client of this release")
        names = [f.name for f in fields(cls)]
        values: dict[str, int | str] = {}
        at = len(MAGIC)
        try:
            while at < len(raw):
                tag, kind, length = struct.unpack_from("<BcI", raw, at)
                at += 6
                body = raw[at : at + length]
                if len(body) != length or tag != len(values):
                    raise ValueError
                values[names[tag]] = struct.unpack("<q", body)[0] if kind == b"i" else body.decode()
                at += length
            found = cls(**values)  # type: ignore[arg-type]
            if found.encode() != raw:
                raise ValueError
            return found
        except (struct.error, ValueError, IndexError, TypeError):
            raise InvalidField("keyspace", "damaged encoding", "send Keyspace.encode() unchanged") from None

    @cached_property
    def id(self) -> KeyspaceId:
        """32 bytes: BLAKE2b-256 of the encoding."""
        return KeyspaceId(hashlib.blake2b(self.encode(), digest_size=32).digest())

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer of one block, K and V together: the unit of checksums."""
        width = self.latent_dim if self.latent_dim else 2 * self.num_kv_heads * self.head_dim
        return self.block_tokens * width * ITEM_BYTES[self.kv_dtype]

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block."""
        return self.num_layers * self.slice_bytes

    @property
    def slot_bytes(self) -> int:
        """`block_bytes` rounded up to the slot alignment."""
        return -(-self.block_bytes // SLOT_ALIGN) * SLOT_ALIGN


def _check_texts(k: Keyspace) -> None:
    for name in ("model", "rope", "tenant"):
        value = getattr(k, name)
        if not value or value == "auto":
            raise InvalidField(name, f"{value!r} is unresolved", "give the value the engine really uses")
    for name in ("model", "rope", "tenant", "adapter_digest"):
        if len(getattr(k, name).encode()) > MAX_TEXT_BYTES:
            raise InvalidField(name, "too long", f"keep it under {MAX_TEXT_BYTES} bytes")
    for name in ("weights_digest", "tokenizer_digest", "adapter_digest"):
        value = getattr(k, name)
        if name == "adapter_digest" and not value:
            continue
        if len(value) < 32 or not _HEX.issuperset(value):
            raise InvalidField(
                name, f"{value[:20]!r} is no hex digest", "give a lower-case hex digest of 128 bits or more"
            )
    if k.kv_dtype not in ITEM_BYTES:
        raise InvalidField("kv_dtype", f"{k.kv_dtype!r} is not a resolved dtype", f"use one of {', '.join(ITEM_BYTES)}")


def _check_shape(k: Keyspace) -> None:
    newest = LAYOUTS.get(k.layout)
    if newest is None:
        raise InvalidField("layout", f"{k.layout!r} is unknown", f"use one of {', '.join(LAYOUTS)}")
    if not 1 <= k.layout_version <= newest:
        raise InvalidField("layout_version", f"{k.layout_version} is unknown", f"this build knows 1 to {newest}")
    if (k.layout == "block-first-mla") != (k.latent_dim > 0):
        raise InvalidField(
            "latent_dim", f"{k.latent_dim} does not fit layout {k.layout!r}", "set it for MLA layouts only"
        )
    for name, low, high in (
        ("block_tokens", 1, 4096),
        ("num_layers", 1, 1024),
        ("num_kv_heads", 1, 1024),
        ("head_dim", 1, 4096),
        ("latent_dim", 0, 65536),
        ("weights_epoch", 0, 1 << 62),
    ):
        _check_range(k, name, low, high)


def _check_ranks(k: Keyspace) -> None:
    for kind in ("tp", "pp"):
        _check_range(k, f"{kind}_size", 1, 65536)
        _check_range(k, f"{kind}_rank", 0, getattr(k, f"{kind}_size") - 1)


def _check_range(k: Keyspace, name: str, low: int, high: int) -> None:
    value = getattr(k, name)
    if not low <= value <= high:
        raise InvalidField(name, f"{value} is out of range", f"use {low} to {high}")
