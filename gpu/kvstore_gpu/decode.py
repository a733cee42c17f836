"""Attention of one new token per sequence, over the pool where it lies: `cuda/decode.cu` behind one call.

A batch has a fixed number of rows. What changes from step to step lies in tensors that the caller keeps in one place
(block table, lengths, the new tokens), so that a CUDA graph can hold the call:

    table    int32 `[rows, blocks]`: slots of each row's context
    lengths  int64 `[rows]`: tokens of it, the new one included; 0: the row is padding and gets zeros

A context is cut every `SPLIT` tokens, always at the same places, and the pieces are joined first to last: a row's bits
depend on its own tokens, not on the batch, nor on where its blocks lie. Places are counted in 64 bits.
"""

from __future__ import annotations

import numpy as np
import torch

from kvstore_gpu.errors import LayoutError
from kvstore_gpu.kernels import Launch, SourceKernels, address, u32

SPLIT = 256
"""Tokens; as KV_SPLIT in decode.cu."""
THREADS = 128
TURNS = (1, 2, 4, 8)
"""Query heads of a group that a thread block takes at a time."""
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
PARTS_MAX = 64


def splits_of(num_tokens: int) -> int:
    """Pieces of a context of so many tokens."""
    return -(-num_tokens // SPLIT)


def scratch_floats(num_rows: int, num_heads: int, dim: int, num_splits: int) -> int:
    """float32 values that a call needs for what its pieces sum up to."""
    return num_rows * num_heads * num_splits * (dim + 2)


def obstacle(layer: torch.Tensor, num_heads: int) -> str:
    """Why a layer of a pool, `[num_slots, 2, block_tokens, kv_heads, dim]`, can't be read by the kernel; empty when it
    can."""
    kv_heads, dim = layer.shape[3:]
    if layer.dtype not in NAMES:
        return f"no kernel for {layer.dtype}"
    row_bytes = dim * layer.element_size()
    if row_bytes % 16 or row_bytes > 16 * PARTS_MAX or layer.stride(4) != 1:
        return f"a head of {dim} values is no row of 16 to {16 * PARTS_MAX} bytes in steps of 16"
    if layer.data_ptr() % 16 or any(stride * layer.element_size() % 16 for stride in layer.stride()[:4]):
        return "tokens don't lie at multiples of 16 bytes"
    if num_heads % kv_heads:
        return f"{num_heads} heads don't share {kv_heads} evenly"
    return ""


class PagedDecode:
    """The kernel on a device, or on the host for tests. Enqueues on the current stream and never waits."""

    def __init__(self, kernels: SourceKernels) -> None:
        self._kernels = kernels
        self.name = kernels.name

    def attend(
        self,
        layer: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
        scratch: torch.Tensor,
        scale: float,
        num_splits: int,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """`query [rows, heads, dim]` over the contexts -> `out`, the same shape, contiguous.

        `new` is K and V of the rows' last tokens, `[rows, kv_heads, dim]`: they are written into the pool first. No
        two rows may have their last token in the same place. `num_splits` covers the longest context; which larger
        number is given changes no bit. `scratch` is float32, `scratch_floats` of it. Raises: LayoutError.
        """
        check(layer, table, lengths, query, out, scratch, num_splits, new)
        (num_rows, num_heads, dim), kv_heads = query.shape, layer.shape[3]
        size, form = layer.element_size(), NAMES[layer.dtype]
        query = readable(query)
        key, value = (readable(part) for part in new) if new is not None else (None, None)
        counts = (layer.shape[2], num_rows, kv_heads, num_heads // kv_heads, dim, num_splits)
        stats = scratch[num_rows * num_heads * num_splits * dim :]
        args = (
            address(layer),
            *(np.uint64(stride * size) for stride in layer.stride()[:4]),
            address(table),
            np.uint64(table.stride(0)),
            address(lengths),
            *map(u32, counts),
            *rows_of(query),
            *rows_of(key),
            *rows_of(value),
            np.float32(scale),
            address(scratch),
            address(stats),
        )
        turn = next((turn for turn in TURNS if turn >= num_heads // kv_heads), TURNS[-1])
        grid = num_rows * kv_heads * num_splits
        self._kernels.launch(Launch(f"kv_decode_{form}_{turn}", grid, THREADS, args, ()))
        join = (address(scratch), address(stats), address(lengths), address(out))
        tail = map(u32, (num_rows, num_heads, dim, num_splits))
        self._kernels.launch(Launch(f"kv_join_{form}", num_rows * num_heads, THREADS, (*join, *tail), ()))


def readable(rows: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, dim]` that can be read 16 bytes at a time: itself, or a copy."""
    size = rows.element_size()
    fits = rows.stride(2) == 1 and rows.data_ptr() % 16 == 0
    return rows if fits and not any(stride * size % 16 for stride in rows.stride()[:2]) else rows.contiguous()


def rows_of(rows: torch.Tensor | None) -> tuple[np.uint64, np.uint64, np.uint64]:
    """Address, bytes from row to row, and from head to head; zeros for none."""
    if rows is None:
        return np.uint64(0), np.uint64(0), np.uint64(0)
    size = rows.element_size()
    return address(rows), np.uint64(rows.stride(0) * size), np.uint64(rows.stride(1) * size)


def check(
    layer: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    query: torch.Tensor,
    out: torch.Tensor,
    scratch: torch.Tensor,
    num_splits: int,
    new: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Raises: LayoutError when shapes don't fit together. A kernel can't say so, nor look into tables for us."""
    num_rows, num_heads, dim = query.shape
    why = obstacle(layer, num_heads)
    if why:
        raise LayoutError(why)
    kv_heads = layer.shape[3]
    fine = (
        table.dtype == torch.int32 and table.dim() == 2 and table.stride(1) == 1,
        lengths.dtype == torch.int64 and lengths.is_contiguous() and lengths.shape == (num_rows,),
        len(table) == num_rows and dim == layer.shape[4] and query.dtype == out.dtype == layer.dtype,
        out.shape == query.shape and out.is_contiguous(),
        new is None or all(part.shape == (num_rows, kv_heads, dim) and part.dtype == layer.dtype for part in new),
        scratch.dtype == torch.float32 and scratch.is_contiguous() and scratch.data_ptr() % 16 == 0,
        scratch.numel() >= scratch_floats(num_rows, num_heads, dim, num_splits),
    )
    if not all(fine):
        what = ("table", "lengths", "rows", "out", "new rows", "scratch", "scratch's size")
        raise LayoutError(f"decode: the {what[fine.index(False)]} don't fit")


def reference(
    layer: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, query: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same in plain tensor operations, in float64 on the host: `[rows, heads, dim]`."""
    num_rows, num_heads, dim = query.shape
    out = torch.zeros(num_rows, num_heads, dim, dtype=torch.float64)
    for row, length in enumerate(lengths.tolist()):
        slots = table[row, : -(-length // layer.shape[2])].to(torch.int64)
        if not length:
            continue
        both = layer[slots].transpose(0, 1).flatten(1, 2)[:, :length].double().cpu()  # [2, token, kv_head, dim]
        keys, values = both.repeat_interleave(num_heads // layer.shape[3], dim=2)
        scores = torch.einsum("hd,thd->ht", query[row].double().cpu() * scale, keys)
        out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), values)
    return out
