"""Decoding on a device: one token for each row, by the kernel of `kvstore_gpu` that reads the pool where it lies.

    host:    works --fill--> rows (ids, positions, lengths), table          a few small copies
    device:  rows, table --model, kernel--> new K and V in the pool, logits

What changes from step to step lies in `Inputs`, tensors that never move, and a step has always the same shape, so that
a CUDA graph can hold it (`graphs.py`). How many pieces the longest context is cut into decides how large a step is;
that number is rounded up to a power of two (`bucket`), which changes no bit of the result.

The kernel is a torch operator, so that whoever records a step sees it. It counts places in 64 bits: no pool is too
large for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvstore_engine.attention import BeforeLayer, PagedBatch, Scratch, Segment, at_once, paged_attention
from kvstore_engine.executor import Work
from kvstore_engine.model import first_line
from kvstore_engine.pool import KVPool

if TYPE_CHECKING:
    from kvstore_gpu.decode import PagedDecode

log = logging.getLogger(__name__)
TOLERANCE = 0.03
"""Largest difference from exact attention over values of unit variance, in bf16."""
AttentionFunction = Callable[..., tuple[torch.Tensor, None]]


# ---- the kernel, as a torch operator ---------------------------------------------------------------------------------


def on_device(device: torch.device) -> PagedDecode:
    """The kernel on a CUDA device. Raises Unavailable, BuildError."""
    from kvstore_gpu.decode import PagedDecode
    from kvstore_gpu.kernels import CudaKernels

    return PagedDecode(CudaKernels(device))


MAKERS: dict[str, Callable[[torch.device], PagedDecode]] = {"cuda": on_device}
"""By kind of device. (Tests add the CPU, with the kernel compiled for the host.)"""
_loaded: dict[torch.device, PagedDecode] = {}

_library = torch.library.Library("kvstore_engine", "DEF")
_library.define(
    "paged_decode(Tensor query, Tensor key, Tensor value, Tensor(a!) layer, Tensor table, Tensor lengths, float scale, "
    "int num_splits) -> Tensor"
)


@torch.library.impl(_library, "paged_decode", "CompositeExplicitAutograd")
def _paged_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    num_splits: int,
) -> torch.Tensor:
    from kvstore_gpu.decode import scratch_floats

    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    num_rows, num_heads, dim = query.shape
    size = scratch_floats(num_rows, num_heads, dim, num_splits)
    scratch = torch.empty(size, dtype=torch.float32, device=query.device)
    _loaded[layer.device].attend(layer, table, lengths, query, out, scratch, scale, num_splits, (key, value))
    return out


class DecodeBatch:
    """What a decode step tells the attention function; see `PagedBatch`."""

    def __init__(self, pool: KVPool, inputs: Inputs, num_splits: int, before_layer: BeforeLayer = at_once) -> None:
        self.pool, self.inputs, self.num_splits, self.before_layer = pool, inputs, num_splits, before_layer


def decode_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    kv_batch: DecodeBatch,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As `attention.paged_attention`, for a `DecodeBatch`: one new token a row."""
    kv_batch.before_layer(module.layer_idx)
    layer, inputs = kv_batch.pool.layer(module.layer_idx), kv_batch.inputs
    rows = (part[0].transpose(0, 1) for part in (query, key, value))
    out = torch.ops.kvstore_engine.paged_decode(
        *rows, layer, inputs.table, inputs.lengths, scaling, kv_batch.num_splits
    )
    return out.unsqueeze(0), None


def register(chunks: str) -> str:
    """Make known to transformers: this for decode steps, the attention of name `chunks` for all else. Returns its name;
    again is a no-op."""
    from transformers import AttentionInterface

    steps: AttentionFunction = decode_attention
    others: AttentionFunction = AttentionInterface()[chunks]

    def attend(*args: Any, kv_batch: DecodeBatch | PagedBatch, **options: Any) -> tuple[torch.Tensor, None]:
        function = steps if isinstance(kv_batch, DecodeBatch) else others
        return function(*args, kv_batch=kv_batch, **options)

    AttentionInterface.register(f"{chunks}_decode", attend)
    return f"{chunks}_decode"


# ---- a step ----------------------------------------------------------------------------------------------------------


class Inputs:
    """Everything that changes from step to step, on the pool's device, always in the same place.

    `ids`, `positions` and `lengths` are int64 `[num_rows]`, `table` is int32 `[num_rows, blocks]`. Rows without work
    have length 0.
    """

    def __init__(self, pool: KVPool, num_rows: int, context_tokens_max: int) -> None:
        self._size = pool.keyspace.block_tokens
        num_blocks = -(-context_tokens_max // self._size)
        self.rows = torch.zeros(3, num_rows, dtype=torch.int64, device=pool.device)
        self.table = torch.zeros(num_rows, num_blocks, dtype=torch.int32, device=pool.device)
        self._slots: list[list[int]] = [[] for _ in range(num_rows)]
        """What the table holds."""

    @property
    def ids(self) -> torch.Tensor:
        return self.rows[0]

    @property
    def positions(self) -> torch.Tensor:
        return self.rows[1]

    @property
    def lengths(self) -> torch.Tensor:
        return self.rows[2]

    def addresses(self) -> tuple[int, ...]:
        """Where they lie."""
        return self.rows.data_ptr(), self.table.data_ptr()

    def fill(self, works: Sequence[Work]) -> None:
        """Enqueue the copies for one step."""
        rows = [(work.tokens[0], work.start, work.start + 1) for work in works]
        rows += [(0, 0, 0)] * (len(self._slots) - len(works))
        _send(torch.tensor(rows).t().contiguous(), self.rows)
        for row, work in enumerate(works):
            self._fill_table(row, list(work.slots[: work.start // self._size + 1]))

    def _fill_table(self, row: int, slots: list[int]) -> None:
        held = self._slots[row]
        same = len(held) if slots[: len(held)] == held else 0
        if same < len(slots):
            _send(torch.tensor(slots[same:], dtype=torch.int32), self.table[row, same : len(slots)])
        self._slots[row] = slots


def _send(source: torch.Tensor, target: torch.Tensor) -> None:
    """Host to device without a wait: torch keeps the pinned memory until the copy is through."""
    target.copy_(source.pin_memory() if target.device.type == "cuda" else source, non_blocking=True)


class Decoder:
    """Decode steps of one model over one pool. For one thread."""

    def __init__(self, causal_lm: Any, pool: KVPool, num_rows: int, context_tokens_max: int) -> None:
        from kvstore_gpu.decode import SPLIT, splits_of

        self._lm, self.pool, self.num_rows = causal_lm, pool, num_rows
        self.split_tokens, self.vocab_size = SPLIT, int(causal_lm.config.vocab_size)
        self.context_tokens_max = min(context_tokens_max, pool.num_slots * pool.keyspace.block_tokens)
        self._splits_of, self.num_splits_max = splits_of, splits_of(self.context_tokens_max)
        self.inputs = Inputs(pool, num_rows, self.context_tokens_max)
        self.replay: Callable[[int], torch.Tensor | None] = no_graph
        """A graph's logits for this many pieces, or None."""

    def bucket(self, num_tokens: int) -> int:
        """Pieces that a step is made for when its longest context is `num_tokens`."""
        return min(1 << (self._splits_of(num_tokens) - 1).bit_length(), self.num_splits_max)

    def buckets(self) -> list[int]:
        """All of them, the smallest first."""
        return [*(1 << i for i in range((self.num_splits_max - 1).bit_length())), self.num_splits_max]

    def step(self, works: Sequence[Work], before_layer: BeforeLayer = at_once) -> torch.Tensor:
        """float32 logits `[len(works), vocab]`, the caller's own. What `before_layer` raises is passed on."""
        num_splits = self.bucket(max(work.start for work in works) + 1)
        self.inputs.fill(works)
        logits = self.replay(num_splits) if before_layer is at_once else None
        if logits is not None:
            return logits[: len(works)].clone()
        return self.run(num_splits, before_layer)[: len(works)]

    def run(self, num_splits: int, before_layer: BeforeLayer = at_once) -> torch.Tensor:
        """The model over what `inputs` holds; float32 logits `[num_rows, vocab]`. What a graph captures."""
        with torch.inference_mode():
            out = self._lm.model(
                input_ids=self.inputs.ids[None],
                position_ids=self.inputs.positions[None],
                kv_batch=DecodeBatch(self.pool, self.inputs, num_splits, before_layer),
                use_cache=False,
                attention_mask=None,
            )
            logits: torch.Tensor = self._lm.lm_head(out.last_hidden_state[0])
            return logits.float()

    def addresses(self) -> tuple[int, ...]:
        """Of all that a step reads and that isn't the model's, nor made in the step."""
        return self.pool.raw.data_ptr(), *self.inputs.addresses()


def no_graph(num_splits: int) -> torch.Tensor | None:
    """Every step is run."""
    return None


# ---- is it right? ----------------------------------------------------------------------------------------------------


def works(pool: KVPool, num_heads: int, scaling: float) -> bool:
    """Is there a kernel, and does it agree with exact attention on this machine, within `TOLERANCE`? Says in the log
    why not. Overwrites the pool: ask before it is used."""
    make = MAKERS.get(pool.device.type)
    if make is None:
        return False
    try:
        why = _load(make, pool, num_heads) or _misfit(difference(pool, num_heads, scaling))
    except Exception as error:  # a compiler's or a driver's error may be anything
        why = f"fails here ({first_line(error)})"
    if why:
        log.warning("attention: our decode kernel %s; torch's or exact attention decodes", why)
    return not why


def _load(make: Callable[[torch.device], PagedDecode], pool: KVPool, num_heads: int) -> str:
    from kvstore_gpu.decode import obstacle

    layer = pool.layer(0)
    why = obstacle(layer, num_heads)
    if not why:
        _loaded[layer.device] = make(layer.device)
    return why and f"can't read this pool: {why}"


def _misfit(worst: float) -> str:
    return "" if worst <= TOLERANCE else f"is off by {worst:.3g} here"


def trials(pool: KVPool, lengths: Sequence[int], vocab: int, seed: int) -> list[Work]:
    """One token at the end of made-up contexts of these lengths, as many as the pool has slots for.

    They lie in at most 64 slots, the first and the last of the pool among them. Each ends in a slot of its own; before
    that, the same slot may stand many times.
    """
    generator = torch.Generator().manual_seed(seed)
    found = torch.randperm(pool.num_slots, generator=generator)[:62].tolist()
    slots = [pool.num_slots - 1, *(slot for slot in found if 0 < slot < pool.num_slots - 1), 0]
    count = min(len(lengths), len(slots) - 1, 32)
    shared, made = slots[count:], list[Work]()
    for own, length in zip(slots[:count], lengths, strict=False):
        num_before = (length - 1) // pool.keyspace.block_tokens
        picks = torch.randint(len(shared), (num_before,), generator=generator).tolist()
        token = int(torch.randint(vocab, (1,), generator=generator))
        made.append(Work([token], length - 1, [*(shared[pick] for pick in picks), own]))
    return made


def difference(pool: KVPool, num_heads: int, scaling: float) -> float:
    """Largest difference from exact attention in the last layer, over contexts of one piece and of several."""
    from kvstore_gpu.decode import SPLIT, splits_of

    size, index = pool.keyspace.block_tokens, pool.keyspace.num_layers - 1
    made = trials(pool, [2 * SPLIT + 5, size - 1, SPLIT, size + 1], 1, seed=1)
    segments = [Segment(row, t.start, 1, torch.tensor(t.slots, device=pool.device)) for row, t in enumerate(made)]
    layer, generator = pool.layer(index), torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(layer.dtype).to(pool.device)

    used = sorted({slot for trial in made for slot in trial.slots})
    layer[used] = random(len(used), *layer.shape[1:])
    for trial in made:
        layer[trial.slots[-1], :, trial.start % size + 1 :] = float("nan")
    kv_heads, dim = layer.shape[3:]
    query, key, value = (random(1, heads, len(made) + 1, dim) for heads in (num_heads, kv_heads, kv_heads))
    module = type("Module", (), {"layer_idx": index})
    inputs = Inputs(pool, len(made) + 1, max(trial.start for trial in made) + 1)
    inputs.fill(made)
    with torch.inference_mode():
        exactly = PagedBatch(pool, Scratch(pool.device), segments)
        exact, _ = paged_attention(module, query, key, value, None, scaling, exactly)
        batch = DecodeBatch(pool, inputs, splits_of(2 * SPLIT + 5))
        found, _ = decode_attention(module, query, key, value, None, scaling, batch)
    pool.raw[used] = 0
    return float((found.float() - exact.float()).abs().max())
