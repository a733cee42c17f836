"""One forward of the model over segments of several sequences.

What is computed depends only on the *lengths* of the segments, never on who else is there. That's what makes equal
chunk boundaries give equal bits:
- a segment of more than one token (a prefill chunk) runs alone, with exactly its rows;
- segments of one token (decode) run together, in a batch padded to a fixed number of rows, full or not;
- logits are always taken from a batch of that same fixed number of rows.

Matrix products of one shape give a row the same bits wherever it stands; tests check it on the machine they run on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvstore.errors import SetupError
from kvstore_engine import attention
from kvstore_engine.attention import ROWS, BeforeLayer, PagedBatch, Scratch, Segment, at_once
from kvstore_engine.config import Attention, CudaGraphs
from kvstore_engine.model import LoadedModel, head_dim
from kvstore_engine.pool import KVPool

if TYPE_CHECKING:
    from kvstore_engine.decode import Decoder


@dataclass(frozen=True, slots=True)
class Work:
    """New tokens of one sequence: `tokens` at positions from `start`, over the context in `slots` (pool indices)."""

    tokens: Sequence[int]
    start: int
    slots: Sequence[int]


@dataclass(frozen=True, slots=True)
class Choice:
    """The name that transformers knows an attention by, and whether decode steps are `decode.py`'s."""

    name: str
    own_decode: bool = False


def choose_attention(shape: Any, pool: KVPool, wanted: Attention) -> Choice:
    """On a device "auto" means over block tables, where that is right: decode steps by our own kernel, else by torch's;
    chunks by torch's, else exact.

    Raises SetupError when "paged" was asked for and neither works. Overwrites the pool.
    """
    attention.register()
    if wanted == "exact" or (wanted == "auto" and pool.device.type == "cpu"):
        return Choice(attention.NAME)
    from kvstore_engine import decode, paged

    paged.register()
    heads, scaling = shape.num_attention_heads, head_dim(shape) ** -0.5
    own = decode.works(pool, heads, scaling)
    chunks = paged.NAME if paged.works(pool, heads, scaling) else attention.NAME
    if wanted == "paged" and not own and chunks == attention.NAME:
        raise SetupError('attention: "paged" doesn\'t work here, the log says why; use "auto" or "exact"')
    return Choice(decode.register(chunks), own_decode=True) if own else Choice(chunks)


class Executor:
    """Runs the model. Owned by one thread."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KVPool,
        max_batch: int,
        threads: int,
        kind: Attention = "exact",
        graphs: CudaGraphs = "off",
    ) -> None:
        torch.set_num_threads(threads)  # counts for the calling thread
        self._lm: Any = model.causal_lm
        self.pool = pool
        self.num_rows = -(-max_batch // ROWS) * ROWS
        self._scratch = Scratch(pool.device)
        choice = choose_attention(self._lm.config, pool, kind)
        self._lm.set_attn_implementation(choice.name)
        self.decoder: Decoder | None = self._make_decoder(model, graphs) if choice.own_decode else None

    def _make_decoder(self, model: LoadedModel, graphs: CudaGraphs) -> Decoder:
        from kvstore_engine import decode
        from kvstore_engine.graphs import adopt

        decoder = decode.Decoder(self._lm, self.pool, self.num_rows, model.context_tokens_max)
        if graphs == "auto":
            adopt(decoder)
        return decoder

    def prefill(self, work: Work, before_layer: BeforeLayer = at_once) -> torch.Tensor:
        """Compute one chunk; float32 logits `[vocab]` of its last token.

        Passes on what `before_layer` raises; nothing but rows of `work` was written then.
        """
        count = len(work.tokens)
        if count == 1 and self.decoder is not None:
            return self.decoder.step([work], before_layer)[0]
        hidden = self._forward([work], count if count > 1 else self.num_rows, before_layer)
        return self._logits(hidden[count - 1 : count])[0]

    def decode(self, works: Sequence[Work]) -> torch.Tensor:
        """One token for each of at most `num_rows` sequences; float32 logits `[len(works), vocab]`."""
        assert len(works) <= self.num_rows and all(len(w.tokens) == 1 for w in works)
        if self.decoder is not None:
            return self.decoder.step(works)
        return self._logits(self._forward(works, self.num_rows)[: len(works)])

    def _forward(self, works: Sequence[Work], num_rows: int, before_layer: BeforeLayer = at_once) -> torch.Tensor:
        batch, tokens, positions = self._pack(works, num_rows)
        batch.before_layer = before_layer
        with torch.inference_mode():
            out = self._lm.model(
                input_ids=tokens[None],
                position_ids=positions[None],
                kv_batch=batch,
                use_cache=False,
                attention_mask=None,
            )
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    def _pack(self, works: Sequence[Work], num_rows: int) -> tuple[PagedBatch, torch.Tensor, torch.Tensor]:
        device, size = self.pool.device, self.pool.keyspace.block_tokens
        segments: list[Segment] = []
        tokens: list[int] = []
        for work in works:
            num_blocks = -(-(work.start + len(work.tokens)) // size)
            slots = torch.tensor(work.slots[:num_blocks], dtype=torch.int64, device=device)
            assert len(slots) == num_blocks
            segments.append(Segment(len(tokens), work.start, len(work.tokens), slots))
            tokens.extend(work.tokens)
        batch = PagedBatch(self.pool, self._scratch, segments)
        ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        ids[: len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        positions = torch.zeros(num_rows, dtype=torch.int64, device=device)
        positions[: len(tokens)] = batch.positions
        return batch, ids, positions

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.new_zeros(self.num_rows, hidden.shape[1])
        rows[: len(hidden)] = hidden
        with torch.inference_mode():
            logits: torch.Tensor = self._lm.lm_head(rows)
        return logits[: len(hidden)].float()


def rows_are_alike(weight: torch.Tensor, counts: Sequence[int]) -> bool:
    """Whether a product with `weight [out, in]` gives each row the same bits for every number of rows in `counts`."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(counts), weight.shape[1], generator=generator).to(weight)
    whole = torch.nn.functional.linear(rows, weight)
    return all(torch.equal(torch.nn.functional.linear(rows[-n:], weight), whole[-n:]) for n in counts)
