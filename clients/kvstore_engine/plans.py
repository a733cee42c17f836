"""Which forwards computed a block: chunk boundaries by block hash.

KV bits depend on how a context was cut into chunks (on most machines, in bfloat16). An honest comparison of two runs
computes with the same cuts, so each sealed block's are remembered, and a whole context's can be put together and
replayed.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.core.types import BlockHash
from kvstore_engine.sequence import Span

NUM_MAX = 200_000


class PlanBook:
    """Spans of the blocks sealed last."""

    def __init__(self, block_tokens: int, num_max: int = NUM_MAX) -> None:
        self._size = block_tokens
        self._max = num_max
        self._spans: OrderedDict[BlockHash, tuple[Span, ...]] = OrderedDict()

    def note(self, block: BlockHash, index: int, spans: list[Span] | None) -> None:
        """Block `index` of a context was sealed; `spans` are those of the context so far.

        A known block keeps its first spans.
        """
        if spans is None or block in self._spans:
            return
        first, last = index * self._size, (index + 1) * self._size
        self._spans[block] = tuple(s for s in spans if s[0] < last and s[1] > first)
        if len(self._spans) > self._max:
            self._spans.popitem(last=False)

    def of(self, blocks: list[BlockHash]) -> list[Span] | None:
        """Spans of a path of blocks, each once, in order; None when one isn't known."""
        found: dict[Span, None] = {}
        for block in blocks:
            spans = self._spans.get(block)
            if spans is None:
                return None
            found.update(dict.fromkeys(spans))
        return list(found)


def next_span(start: int, end: int, chunk: int) -> Span:
    """From `start` to the next absolute multiple of `chunk`, or to `end`."""
    return start, min(end, (start // chunk + 1) * chunk)


def planned_span(plan: tuple[Span, ...], computed: int) -> Span | None:
    """The first span of a plan that goes beyond `computed` tokens."""
    return next((s for s in plan if s[1] > computed), None)
