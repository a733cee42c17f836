"""Attention that reads the pool where it lies: no copy of a context, whatever its length. What a CUDA engine uses for
chunks of prompts, and for decode steps where `decode.py` can't be used.

The pool is block-first, so one layer's keys aren't contiguous. But a slot is a whole number `R` of token rows long, and
so all keys of a layer are one long strided row of tokens, of which each slot shows `block_tokens`:

    token of slot s, place t  ->  row s * R + t of  pool[layer offset:].as_strided((rows, heads, dim), (width, dim, 1))

torch's `flex_attention` walks such a row by block tables: `kv_indices` names the blocks of each sequence (slot * R /
block_tokens). A mask says what a token is to a sequence: by the slot's depth in its context, or nothing; so the result
is right even where the tables are ignored, as torch does without its compiler. Sequences of equal length of new rows
are a batch; keys and values are shared by all of it.

Bits differ from `attention.py`'s, and may depend on the cut into chunks; restored and computed contexts still agree,
since both are read from the same slots in the same order.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from kvstore_engine.attention import PagedBatch, Scratch, Segment, paged_attention
from kvstore_engine.model import first_line
from kvstore_engine.pool import KVPool

log = logging.getLogger(__name__)
NAME = "kvstore_paged_flex"
QUERY_BLOCK = 64
TOLERANCE = 0.03
"""Largest difference from exact attention over values of unit variance, in bf16."""
ELEMENTS_MAX = 1 << 31
"""torch's kernels work out places in int32 (2.11 to 2.13): beyond it they would read other places, or crash."""
NOT_MINE = 1 << 20
"""Depth of a slot in contexts that don't hold it: behind every query."""
COMPILE_ON = {"cuda"}
"""Kinds of devices for which it is compiled. Elsewhere torch makes the whole score matrix: for tests only."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all layers of one forward share."""

    mask: BlockMask
    num_sequences: int
    num_rows: int
    """New rows of each sequence."""
    unwritten: tuple[torch.Tensor, torch.Tensor]
    """Slots and places behind the contexts, in their last blocks: weight 0 times NaN would be NaN."""


def obstacle(layer: torch.Tensor) -> str:
    """Why a pool, by its first layer `[num_slots, 2, tokens, heads, dim]`, can't be read as one row of tokens; empty
    when it can."""
    num_slots, _, tokens, heads, dim = layer.shape
    if layer.stride(0) % (tokens * heads * dim):
        return "a slot is no whole number of blocks of token rows"
    if num_slots * layer.stride(0) >= ELEMENTS_MAX:
        return f"the pool has {num_slots * layer.stride(0)} elements, torch's kernels count to {ELEMENTS_MAX}"
    return ""


def rows_of_slot(pool: KVPool) -> int:
    """R: token rows from one slot to the next."""
    return int(pool.layer(0).stride(0) // (pool.keyspace.num_kv_heads * pool.keyspace.head_dim))


def token_rows(layer: torch.Tensor, which: int) -> torch.Tensor:
    """Keys (0) or values (1) of a layer `[num_slots, 2, tokens, heads, dim]` as `[1, heads, rows, dim]`, no copy."""
    num_slots, _, tokens, heads, dim = layer.shape
    width = heads * dim
    rows = (num_slots - 1) * (layer.stride(0) // width) + tokens
    offset = layer.storage_offset() + which * layer.stride(1)
    return layer.as_strided((1, heads, rows, dim), (rows * width, dim, width, 1), offset)


def make_plan(pool: KVPool, segments: list[Segment], scratch: Scratch) -> Plan:
    """Block tables of sequences with the same number of new rows. Blocks that all rows of a tile see are told apart and
    not masked; but not for single rows, which torch spreads over a device by the length of the other table.

    torch wants a table as wide as the whole row of tokens has blocks (a thousandth of the pool's size); only its
    beginning is written, and read.
    """
    tokens, per_slot, device = pool.keyspace.block_tokens, rows_of_slot(pool), pool.device
    num_rows = segments[0].length
    assert all(segment.length == num_rows for segment in segments)
    num_tiles = -(-num_rows // QUERY_BLOCK)
    length = (pool.num_slots - 1) * per_slot + tokens
    shape = len(segments), 1, num_tiles, length // tokens
    whole, partly = (scratch.get(name, torch.int32, *shape) for name in ("whole blocks", "partly visible blocks"))
    depth = torch.full((len(segments), pool.num_slots), NOT_MINE, dtype=torch.int32, device=device)
    num_whole, num_partly = (torch.zeros(shape[:3], dtype=torch.int32) for _ in range(2))
    for at, segment in enumerate(segments):
        blocks = (segment.slots * (per_slot // tokens)).to(torch.int32)
        depth[at, segment.slots] = torch.arange(len(segment.slots), dtype=torch.int32, device=device)
        for tile in range(num_tiles):
            first = (segment.start + tile * QUERY_BLOCK + 1) // tokens if num_rows > 1 else 0
            last = -(-(segment.start + min((tile + 1) * QUERY_BLOCK, num_rows)) // tokens)
            num_whole[at, 0, tile], num_partly[at, 0, tile] = first, last - first
            whole[at, 0, tile, :first] = blocks[:first]
            partly[at, 0, tile, : last - first] = blocks[first:last]
    starts = torch.tensor([segment.start for segment in segments], device=device)

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        place = kv % per_slot
        return (place < tokens) & (depth[b, kv // per_slot] * tokens + place <= starts[b] + q)

    mask = BlockMask.from_kv_blocks(
        num_partly.to(device),
        partly,
        num_whole.to(device),
        whole,
        BLOCK_SIZE=(QUERY_BLOCK, tokens),
        mask_mod=visible,
        seq_lengths=(num_rows, length),
        compute_q_blocks=False,
    )
    return Plan(mask, len(segments), num_rows, _behind(segments, tokens))


def _behind(segments: list[Segment], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    slots, places = [], []
    for segment in segments:
        used = (segment.start + segment.length - 1) % tokens + 1
        rest = torch.arange(used, tokens, device=segment.slots.device)
        slots.append(segment.slots[-1].expand(len(rest)))
        places.append(rest)
    return torch.cat(slots), torch.cat(places)


def flex_paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    kv_batch: PagedBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As `attention.paged_attention`: writes the new rows into the pool, then attends over it."""
    kv_batch.before_layer(module.layer_idx)
    layer = kv_batch.pool.layer(module.layer_idx)
    kv_batch.store(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    plan: Plan | None = kv_batch.plan
    if plan is None:
        plan = kv_batch.plan = make_plan(kv_batch.pool, kv_batch.segments, kv_batch.scratch)
    try:
        return _over_tables(query, layer, plan, scaling), None
    except (RuntimeError, TypeError, ValueError) as error:  # the compiler's, when it meets a new shape
        _say_once(first_line(error))
        return paged_attention(module, query, key, value, attention_mask, scaling, kv_batch)


@functools.cache
def _say_once(error: str) -> None:
    log.warning("attention: over block tables failed (%s); contexts are copied instead", error)


def _over_tables(query: torch.Tensor, layer: torch.Tensor, plan: Plan, scaling: float) -> torch.Tensor:
    layer[:, 1][plan.unwritten] = 0
    used = plan.num_sequences * plan.num_rows
    _, heads, _, dim = query.shape
    rows = query[0, :, :used].reshape(heads, plan.num_sequences, plan.num_rows, dim).transpose(0, 1)
    result = _attend(rows, token_rows(layer, 0), token_rows(layer, 1), plan, scaling)
    out = torch.zeros_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
    out[:used] = result.permute(0, 2, 1, 3).reshape(used, heads, dim)
    return out.unsqueeze(0)


def _attend(rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan, scaling: float) -> torch.Tensor:
    """`rows [sequences, heads, n, dim]` -> the same shape."""
    call: Any = flex_attention
    options: dict[str, Any] = {}
    if rows.device.type in COMPILE_ON:
        call = compiled(rows.device.type)
    if rows.device.type == "cuda":
        options = {"kernel_options": {"BLOCK_M": QUERY_BLOCK, "BLOCK_N": min(plan.mask.BLOCK_SIZE[1], 64)}}
    grouped = rows.shape[1] != key.shape[1]
    out = call(rows, key, value, block_mask=plan.mask, scale=scaling, enable_gqa=grouped, **options)
    assert isinstance(out, torch.Tensor)
    return out


@functools.cache
def compiled(kind: str) -> Any:
    """One function for all shapes on a device; torch's C++ templates want them fixed. Whole or not at all: torch would
    quietly run it uncompiled otherwise, which makes the score matrix of the whole pool."""
    return torch.compile(flex_attention, dynamic=kind == "cuda", fullgraph=True)


def register() -> None:
    """Make `NAME` known to transformers; again is a no-op."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, flex_paged_attention)


def works(pool: KVPool, num_heads: int, scaling: float) -> bool:
    """Does it agree with exact attention on this machine, within `TOLERANCE`? Overwrites the pool: ask before the pool
    is used. Says in the log why not."""
    why = obstacle(pool.layer(0)) or _misfit(pool, num_heads, scaling)
    if why:
        log.warning("attention by torch: %s; chunks copy their contexts instead", why)
    return not why


def _misfit(pool: KVPool, num_heads: int, scaling: float) -> str:
    """Why the results here can't be used; empty when they can."""
    try:
        worst = difference(pool, num_heads, scaling)
    except Exception as error:  # a compiler's error may be anything
        return f"over block tables fails here ({first_line(error)})"
    return "" if worst <= TOLERANCE else f"over block tables is off by {worst:.3g} here"


def difference(pool: KVPool, num_heads: int, scaling: float) -> float:
    """Largest difference from exact attention: one chunk, then two single tokens, over a few scattered slots."""
    tokens = pool.keyspace.block_tokens
    num_blocks = min(4, pool.num_slots)
    slots = torch.randperm(pool.num_slots, generator=torch.Generator().manual_seed(1))[:num_blocks].to(pool.device)
    length = num_blocks * tokens
    cases = [
        [Segment(0, tokens, length - tokens - 3, slots)],
        [Segment(0, length - 2, 1, slots), Segment(1, tokens - 1, 1, slots[:1])],
    ]
    generator = torch.Generator().manual_seed(2)
    layer = pool.layer(0)
    noise = torch.randn(num_blocks, *layer.shape[1:], generator=generator).to(layer.dtype).to(pool.device)
    found = []
    for segments in cases:
        layer[slots] = noise
        found.append(_worst(pool, segments, num_heads, scaling, generator))
    pool.raw[slots] = 0
    return float(torch.tensor(found).max())  # NaN where one is: Python's max would lose it


class _Layer:
    layer_idx = 0


def _worst(pool: KVPool, segments: list[Segment], num_heads: int, scaling: float, generator: torch.Generator) -> float:
    num_rows = sum(segment.length for segment in segments)
    kv_heads, dim = pool.keyspace.num_kv_heads, pool.keyspace.head_dim

    def random(heads: int) -> torch.Tensor:
        values = torch.randn(1, heads, num_rows, dim, generator=generator)
        return values.to(pool.layer(0).dtype).to(pool.device)

    rows = random(num_heads), random(kv_heads), random(kv_heads)
    with torch.inference_mode():
        batch = PagedBatch(pool, Scratch(pool.device), segments)
        exact = paged_attention(_Layer, *rows, None, scaling, batch)[0]
        layer = pool.layer(0)
        plan = make_plan(pool, segments, batch.scratch)
        layer[:, 1][plan.unwritten] = float("nan")
        found = _over_tables(rows[0], layer, plan, scaling)
    return float((found.float() - exact.float()).abs().max())
