"""How an engine's own KV pool lies in memory, told by strides.

A block-first slot is `[layer][k|v][token][head][row]`, contiguous. Engines differ in the order of the same axes, in
how many tokens their blocks hold and in whether K and V share a tensor. All of that is strides, so one description
and one kernel serve them: the caller names the axes of its per-layer tensors, `EnginePool.describe` reads the
strides.

    vLLM, FlashAttention      ("kv", "block", "token", "head", "dim")      per layer
    vLLM/SGLang, FlashInfer   ("block", "kv", "token", "head", "dim")      per layer, NHD
    the same, HND             ("block", "kv", "head", "token", "dim")
    K and V packed last       unflatten the last axis to (2, dim): ("block", "head", "token", "kv", "dim")
    layer-first in one tensor pass `list(tensor)`: ("kv", "block", "token", "head", "dim")
    MLA                       ("block", "token", "dim")

Block numbers become byte offsets on the host (`chunk_offsets`). A *chunk* is the run of tokens that an engine block
and one of our blocks have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvstore_gpu.errors import LayoutError

U64Array = npt.NDArray[np.uint64]
_AXES = frozenset({"kv", "block", "token", "head", "dim"})


@dataclass(frozen=True)
class BlockShape:
    """One block of `num_layers` layers; `row_bytes` is head_dim (or the MLA latent) times the item size."""

    num_layers: int
    num_kv: int
    block_tokens: int
    num_heads: int
    row_bytes: int

    @property
    def slice_bytes(self) -> int:
        """Bytes of all of one layer's K and V of a block: the unit of checksums and of layer-wise restore."""
        return self.num_kv * self.block_tokens * self.num_heads * self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of a block, without the padding of its slot."""
        return self.num_layers * self.slice_bytes


@dataclass(frozen=True)
class EnginePool:
    """An engine's pool: one base address per layer, and byte strides inside a layer.

    `layers` holds the tensors alive. `engine_block_tokens` and ours must divide one another.
    """

    shape: BlockShape
    layers: tuple[torch.Tensor, ...]
    num_blocks: int
    engine_block_tokens: int
    block_stride: int
    kv_stride: int
    token_stride: int
    head_stride: int

    @classmethod
    def describe(cls, layers: Sequence[torch.Tensor], axes: Sequence[str], block_tokens: int) -> EnginePool:
        """Read shape and strides off the per-layer tensors.

        Raises: LayoutError when axes are unknown, layers differ, or the last axis isn't contiguous.
        """
        first = _check_layers(layers, axes)
        item = first.element_size()
        size = dict(zip(axes, first.shape, strict=True))
        stride = {axis: int(first.stride(i)) * item for i, axis in enumerate(axes)}
        engine_tokens = int(size["token"])
        if max(engine_tokens, block_tokens) % min(engine_tokens, block_tokens):
            raise LayoutError(f"engine blocks of {engine_tokens} tokens and ours of {block_tokens} don't divide")
        shape = BlockShape(
            len(layers), int(size.get("kv", 1)), block_tokens, int(size.get("head", 1)), int(size["dim"]) * item
        )
        strides = (stride["block"], stride.get("kv", 0), stride["token"], stride.get("head", 0))
        return cls(shape, tuple(layers), int(size["block"]), engine_tokens, *strides)

    @property
    def chunk_tokens(self) -> int:
        """Tokens that lie together in an engine block and in one of ours."""
        return min(self.engine_block_tokens, self.shape.block_tokens)

    @property
    def num_chunks(self) -> int:
        """Chunks in one of our blocks."""
        return self.shape.block_tokens // self.chunk_tokens

    def layer_bases(self) -> U64Array:
        """`[layer]` addresses."""
        return np.array([t.data_ptr() for t in self.layers], dtype=np.uint64)

    def chunk_offsets(self, block_table: Sequence[int] | npt.NDArray[Any], num_slots: int) -> U64Array:
        """`[slot, chunk]` byte offsets within a layer, from the engine's block table of one sequence.

        `block_table` covers `num_slots` of our blocks from the sequence's first token on.
        Raises: LayoutError when the table is too short or names a block that the pool lacks.
        """
        table = np.asarray(block_table, dtype=np.int64)
        token = np.arange(num_slots * self.num_chunks, dtype=np.int64) * self.chunk_tokens
        index = token // self.engine_block_tokens
        if len(index) and int(index[-1]) >= len(table):
            raise LayoutError(f"{num_slots} blocks need {int(index[-1]) + 1} engine blocks; the table has {len(table)}")
        blocks = table[index]
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self.num_blocks:
            raise LayoutError(f"the block table leaves the pool of {self.num_blocks} blocks")
        offsets = blocks * self.block_stride + token % self.engine_block_tokens * self.token_stride
        return offsets.reshape(num_slots, self.num_chunks).astype(np.uint64)

    def merged(self) -> tuple[int, int, int]:
        """(tokens, heads, row_bytes) of a chunk after rows that lie end to end became one."""
        tokens, heads, row = self.chunk_tokens, self.shape.num_heads, self.shape.row_bytes
        if heads == 1 or self.head_stride == row:
            heads, row = 1, heads * row
        if heads == 1 and (tokens == 1 or self.token_stride == row):
            tokens, row = 1, tokens * row
        return tokens, heads, row

    def window(self, layer: int, offset: int) -> torch.Tensor:
        """uint8 view `[kv, token, head, row]` of one chunk of one layer."""
        flat = self.layers[layer].detach().view(torch.uint8)
        shape = self.shape
        sizes = (shape.num_kv, self.chunk_tokens, shape.num_heads, shape.row_bytes)
        strides = (self.kv_stride, self.token_stride, self.head_stride, 1)
        return torch.as_strided(flat, sizes, strides, int(flat.storage_offset()) + offset)


def _check_layers(layers: Sequence[torch.Tensor], axes: Sequence[str]) -> torch.Tensor:
    if not layers:
        raise LayoutError("a pool has at least one layer")
    unknown = set(axes) - _AXES
    if unknown or len(set(axes)) != len(axes) or not {"block", "token", "dim"} <= set(axes) or axes[-1] != "dim":
        raise LayoutError(f"axes {tuple(axes)}: each of block, token, dim once, kv and head if there are any, dim last")
    first = layers[0]
    if first.dim() != len(axes) or first.stride(-1) != 1:
        raise LayoutError(f"tensor of shape {tuple(first.shape)} doesn't fit axes {tuple(axes)} with dim contiguous")
    if any(t.shape != first.shape or t.stride() != first.stride() or t.dtype != first.dtype for t in layers):
        raise LayoutError("layers differ in shape, strides or dtype")
    return first
