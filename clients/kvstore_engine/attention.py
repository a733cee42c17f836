"""Attention through block tables, registered with transformers under `NAME`.

One forward holds several sequences packed in one row `[1, total]`. Each is a `Segment`: rows of new tokens, and the
slots of its whole context. Per layer the function writes the rows' K and V into the pool, then attends for each segment
over what its slots hold.

A row's result doesn't depend on who else is in the batch, nor (where the machine's matrix products treat rows alike,
which is checked in tests) on how the context was cut into chunks:
- every row is reduced over keys in the same order, over whole blocks; keys behind it are masked to weight 0, which adds
  exactly 0;
- queries are cut into tiles of `TILE` rows, which bounds the score matrix and leaves each row's arithmetic alone;
- a tile's rows are padded to a multiple of `ROWS`, since narrow products take other code paths.

Scores are in the model's dtype and the softmax in float32, as in transformers' own eager attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvstore_engine.pool import KVPool

NAME = "kvstore_paged"
TILE = 64
ROWS = 8

BeforeLayer = Callable[[int], None]
"""Called with a layer's index before its KV is touched; returns when what is enqueued from then on may touch it."""


def at_once(layer: int) -> None:
    """All layers are there."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of a forward.

    Rows `[row, row + length)` of the batch are its tokens at positions `[start, start + length)`. `slots` is int64
    `[num_blocks]` on the pool's device and covers all positions up to the last row's.
    """

    row: int
    start: int
    length: int
    slots: torch.Tensor


class Scratch:
    """Buffers that are used again: fresh memory would be touched for the first time in every layer of every step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, name: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """Contiguous, content undefined, valid until the next `get` of the same name."""
        size = 1
        for n in shape:
            size *= n
        held = self._held.get((name, dtype))
        if held is None or held.numel() < size:
            held = self._held[name, dtype] = torch.empty(size + size // 4, dtype=dtype, device=self._device)
        return held[:size].view(shape)


class PagedBatch:
    """What the attention function needs to know about one forward; passed through the model as `kv_batch`.

    Every attention function calls `before_layer` first. What it raises ends the forward.
    """

    def __init__(
        self, pool: KVPool, scratch: Scratch, segments: list[Segment], before_layer: BeforeLayer = at_once
    ) -> None:
        self.segments = segments
        self.before_layer = before_layer
        self.scratch = scratch
        self.block_tokens = pool.keyspace.block_tokens
        self.pool = pool
        self.num_rows = sum(s.length for s in segments)
        self.plan: Any = None
        """What another attention works out once for all layers."""
        positions = torch.cat([torch.arange(s.start, s.start + s.length, device=pool.device) for s in segments])
        blocks = torch.div(positions, self.block_tokens, rounding_mode="floor")
        tables = [s.slots[blocks[s.row : s.row + s.length]] for s in segments]
        self._write = (torch.cat(tables), positions - blocks * self.block_tokens)
        self.positions = positions

    def store(self, layer: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write the real rows of `key` and `value`, `[rows, kv_heads, head_dim]`, into the pool's layer view."""
        layer[:, 0][self._write] = key[: self.num_rows]
        layer[:, 1][self._write] = value[: self.num_rows]


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    kv_batch: PagedBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """`query [1, heads, rows, head_dim]`, `key` and `value [1, kv_heads, rows, head_dim]` -> `[1, rows, heads,
    head_dim]`.

    Mutates the pool. Rows beyond the segments are padding: they come back as zeros.
    """
    kv_batch.before_layer(module.layer_idx)
    layer = kv_batch.pool.layer(module.layer_idx)
    kv_batch.store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    rows = query[0].transpose(0, 1)
    out = torch.zeros_like(rows, memory_format=torch.contiguous_format)
    for segment in kv_batch.segments:
        part = slice(segment.row, segment.row + segment.length)
        attend(kv_batch, layer, segment, rows[part], out[part], scaling)
    return out.unsqueeze(0), None


def gather(batch: PagedBatch, layer: torch.Tensor, which: int, slots: torch.Tensor) -> torch.Tensor:
    """K (0) or V (1) of a context as contiguous `[kv_heads, tokens, head_dim]`, in scratch memory.

    Two steps, whole blocks and then heads first, in words of 8 bytes: together half the time of what `bmm` does with a
    strided operand.
    """
    num_blocks, (_, _, tokens, heads, dim) = len(slots), layer.shape
    blocks = batch.scratch.get("blocks", layer.dtype, num_blocks, tokens, heads, dim)
    torch.index_select(layer[:, which], 0, slots, out=blocks)
    target = batch.scratch.get("kv"[which], layer.dtype, heads, num_blocks, tokens, dim)
    target.view(torch.int64).copy_(blocks.view(torch.int64).permute(2, 0, 1, 3))
    return target.view(heads, num_blocks * tokens, dim)


def attend(
    batch: PagedBatch, layer: torch.Tensor, segment: Segment, rows: torch.Tensor, out: torch.Tensor, scaling: float
) -> None:
    """Attention of one segment; `rows` and `out` are `[length, heads, head_dim]`."""
    key, value = (gather(batch, layer, which, segment.slots) for which in (0, 1))
    value[:, segment.start + segment.length :] = (
        0  # never written: whatever lies there, weight 0 times NaN would be NaN
    )
    size = batch.block_tokens
    for first in range(0, segment.length, TILE):
        last = min(first + TILE, segment.length)
        visible = -(-(segment.start + last) // size) * size
        part = key[:, :visible], value[:, :visible]
        attend_tile(batch.scratch, rows[first:last], out[first:last], *part, segment.start + first, scaling)


def attend_tile(
    scratch: Scratch,
    rows: torch.Tensor,
    out: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    scaling: float,
) -> None:
    """One tile: `rows [n, heads, dim]` at positions from `start`; `key`, `value [kv_heads, visible, dim]`."""
    n, heads, dim = rows.shape
    kv_heads, visible, _ = key.shape
    group = heads // kv_heads
    used = group * n
    padded = -(-used // ROWS) * ROWS
    query = scratch.get("query", rows.dtype, kv_heads, padded, dim)
    query[:, used:] = 0
    grouped = query[:, :used].view(kv_heads, group, n, dim)
    torch.mul(rows.view(n, kv_heads, group, dim).permute(1, 2, 0, 3), scaling, out=grouped)
    scores = torch.bmm(query, key.transpose(1, 2), out=scratch.get("scores", rows.dtype, kv_heads, padded, visible))
    mask_future(scores[:, :used].view(kv_heads, group, n, visible), start)
    weights = torch.softmax(scores, -1, out=scratch.get("weights", rows.dtype, kv_heads, padded, visible))
    result = torch.bmm(weights, value, out=scratch.get("result", rows.dtype, kv_heads, padded, dim))
    out.view(n, kv_heads, group, dim).copy_(result[:, :used].view(kv_heads, group, n, dim).permute(2, 0, 1, 3))


def mask_future(scores: torch.Tensor, start: int) -> None:
    """Minus infinity where a key lies behind its query; `scores [kv_heads, group, n, visible]`, queries from position
    `start`.
    """
    n, visible = scores.shape[2:]
    positions = torch.arange(start, visible, device=scores.device)
    future = positions[None, :] > torch.arange(start, start + n, device=scores.device)[:, None]
    scores[..., start:].masked_fill_(future, float("-inf"))


def register() -> None:
    """Make `NAME` known to transformers; again is a no-op."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, paged_attention)
