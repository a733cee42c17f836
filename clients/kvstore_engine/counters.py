"""What an engine counts. Plain numbers, written by the scheduler's thread; readers see each one whole."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from kvstore_engine.sequence import Usage
from kvstore_engine.store import RestoreResult

TTFT_KEPT = 4096


@dataclass
class Counters:
    """Totals since start."""

    prompt_tokens: Counter[str] = field(default_factory=Counter)
    """Prompt tokens of admitted requests by where their KV came from: hbm, dram, nvme, computed. Each token once."""
    computed_tokens: int = 0
    """Tokens that went through the model, output included."""
    generated_tokens: int = 0
    restored_tokens_dram: int = 0
    restored_tokens_nvme: int = 0
    restored_blocks_dram: int = 0
    restored_blocks_nvme: int = 0
    restore_seconds: float = 0.0
    offloaded_blocks: int = 0
    """Blocks that the store acknowledged, counted at each turn's end (most were held already)."""
    num_offloads_short: int = 0
    """Offloads that the store didn't take in full."""
    num_restores: int = 0
    num_restores_late: int = 0
    num_restores_split: int = 0
    """Restores that met with computation in the middle."""
    num_restores_declined: int = 0
    """Times that recomputing was the faster plan."""
    num_ahead: int = 0
    """Chunks begun before the restore that they follow was judged."""
    num_ahead_dropped: int = 0
    """Of these, thrown away: a layer didn't come in time, or the restore was short, late or not wanted any more."""
    num_preemptions: int = 0
    num_refused: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    ttft_s: deque[tuple[bool, float]] = field(default_factory=lambda: deque(maxlen=TTFT_KEPT))
    """(had cached tokens, seconds) of the last requests."""

    def note_restore(self, result: RestoreResult, block_tokens: int) -> None:
        """A restore ended, well or not."""
        nvme = min(result.num_nvme, result.num_ok)
        self.num_restores += 1
        self.restored_blocks_nvme += nvme
        self.restored_blocks_dram += result.num_ok - nvme
        self.restored_tokens_nvme += nvme * block_tokens
        self.restored_tokens_dram += (result.num_ok - nvme) * block_tokens
        self.restore_seconds += result.seconds

    def note_offload(self, num_held: int | None, num_blocks: int) -> None:
        """An offload of `num_blocks` ended with `num_held` of them acknowledged; None: the store failed."""
        self.offloaded_blocks += num_held or 0
        self.num_offloads_short += (num_held or 0) < num_blocks

    def note_prompt(self, usage: Usage) -> None:
        """It is known where a request's prompt comes from."""
        self.prompt_tokens["hbm"] += usage.hbm_tokens
        self.prompt_tokens["dram"] += usage.dram_tokens
        self.prompt_tokens["nvme"] += usage.nvme_tokens
        self.prompt_tokens["computed"] += usage.computed_tokens

    def note_ttft(self, usage: Usage) -> None:
        """A first token came."""
        self.ttft_s.append((usage.cached_tokens > 0, usage.ttft_s))

    def note_end(self, reason: str, usage: Usage) -> None:
        """A request ended."""
        self.ends[reason] += 1
