"""One request on its way through the scheduler, and what its owner hears about it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from kvstore.core.hashing import TokenChain
from kvstore_client.layers import LayerGate
from kvstore_engine.hbm import Hold
from kvstore_engine.sampling import Sampler, SamplingParams
from kvstore_engine.store import RestoreResult, StoreLease
from kvstore_engine.text import TextStream

Span = tuple[int, int]
"""Token positions `[start, end)` that were computed in one forward."""


class FinishReason:
    """How a request ended; the first two are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True)
class TurnEnd:
    """What the agent does after a turn: waits for `tool` when it is named, else it is idle."""

    tool: str = ""
    expected_s: float = 0.0


def idle_after(text: str) -> TurnEnd:
    """The default: the turn is over."""
    return TurnEnd()


@dataclass
class Usage:
    """Where a request's tokens came from; prompt = hbm + dram + nvme + computed, each token once.

    Times in ns of the engine's clock.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    hbm_tokens: int = 0
    dram_tokens: int = 0
    nvme_tokens: int = 0
    num_preemptions: int = 0
    arrived_ns: int = 0
    first_token_ns: int = 0
    restore_ns: int = 0
    """Time from asking the store to having the blocks; 0 when nothing was asked."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.hbm_tokens + self.dram_tokens + self.nvme_tokens

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were."""
        return self.prompt_tokens - self.cached_tokens

    @property
    def ttft_s(self) -> float:
        """Arrival to first token; 0 before there is one."""
        return (self.first_token_ns - self.arrived_ns) / 1e9 if self.first_token_ns else 0.0


@dataclass(frozen=True)
class TokensEvent:
    """New output. `text` may be empty while a character or a stop text is incomplete."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class EndEvent:
    """Nothing comes after this.

    `plan` are the spans that computed the whole context, in order, or None when unknown.
    """

    reason: str
    usage: Usage
    tokens: tuple[int, ...]
    text: str
    plan: tuple[Span, ...] | None = None
    error: str = ""


RequestEvent = TokensEvent | EndEvent


@dataclass(frozen=True)
class Request:
    """What to compute. `on_event` is called from the scheduler's thread and must not block."""

    id: str
    tokens: Sequence[int]
    sampling: SamplingParams
    on_event: Callable[[RequestEvent], None]
    session: str = ""
    on_end: Callable[[str], TurnEnd] = idle_after
    timeout_s: float = 600.0
    use_cache: bool = True
    """False: neither look for cached blocks nor leave any."""
    plan: tuple[Span, ...] | None = None
    """Compute the prompt in exactly these spans (those of an earlier run)."""


@dataclass(frozen=True)
class Ahead:
    """A chunk that was computed over blocks which nobody had judged yet: rows in slots of the hold, and float32 logits
    `[vocab]` of its last token.

    Nobody may look at it before all those blocks are known to be right.
    """

    span: Span
    logits: torch.Tensor


class State(IntEnum):
    """Where a sequence is."""

    WAITING = 0
    RESTORING = 1
    RUNNING = 2
    SAVING = 3
    """Preempted; its blocks are on the way down."""
    DONE = 4


@dataclass
class Job:
    """The scheduler's view of a request.

    `tokens` are prompt and output; KV exists for the first `num_computed` of them.
    """

    request: Request
    chain: TokenChain
    tokens: list[int]
    sampler: Sampler
    stream: TextStream
    deadline_ns: int
    usage: Usage
    state: State = State.WAITING
    hold: Hold | None = None
    num_computed: int = 0
    spans: list[Span] | None = field(default_factory=list)
    """Spans that computed what is in the hold, cached blocks' included; None once an unknown block was used."""
    store_lease: StoreLease | None = None
    restore_deadline_ns: int = 0
    restore_began_ns: int = 0
    restored: RestoreResult = field(default_factory=lambda: RestoreResult(0))
    front_end: int = 0
    """While RESTORING: compute up to this token meanwhile, since the blocks from there on are on their way."""
    restore_end: int = 0
    """While RESTORING: the token behind the blocks that are on their way."""
    tail: RestoreResult | None = None
    """What came of those, when it came before the front was computed."""
    gate: LayerGate | None = None
    """While RESTORING, where those blocks may come by layers: until the chunk behind them was begun."""
    ahead: Ahead | None = None
    """While RESTORING: that chunk."""
    accounted: bool = False
    num_new: int = 0
    """Tokens that its session didn't have before: what it will probably have to compute."""
    served_ns: int = 0
    """When it last was admitted or computed a chunk."""

    @property
    def num_prompt(self) -> int:
        """Tokens of the request."""
        return len(self.request.tokens)

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        """Known tokens without KV."""
        return len(self.tokens) - self.num_computed
