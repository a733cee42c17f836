"""Restore or recompute: the planner of the core, fed with what this engine measures."""

from __future__ import annotations

from kvstore.core.planner import ComputeRate, Plan, RestoreRate, plan
from kvstore.core.types import Tier
from kvstore_engine.store import RestoreResult

RELAX = 0.8
"""Applied to the estimate each time it makes the engine recompute: a store that was slow once is tried again."""


class Rates:
    """Measured by the scheduler's thread, used by it.

    Which tier a leased block lies in is known only once it is located, so all count as the slower one.
    """

    def __init__(self, block_tokens: int, chunk_tokens: int, always: bool) -> None:
        self._size = block_tokens
        self._unit = chunk_tokens // block_tokens
        self._always = always
        self.compute = ComputeRate()
        self.restore = RestoreRate()

    def plan(self, begin: int, last: int, end_tokens: int) -> Plan:
        """What to do with blocks [begin, last) that the store holds, of a context of `end_tokens` tokens."""
        if self._always:
            return Plan(begin, last, 0.0, 0.0)
        held = [Tier.NVME] * (last - begin)
        chosen = plan(held, end_tokens, self._size, self.compute, self.restore, begin, self._unit)
        if held and chosen.first == chosen.last:
            self.restore.relax(RELAX)
        return chosen

    def restored(self, result: RestoreResult) -> None:
        """A restore ended; a failed one says nothing about speed."""
        nvme = min(result.num_nvme, result.num_ok)
        self.restore.sample(result.num_ok - nvme, nvme, result.seconds)

    def late(self, num_blocks: int, seconds: float) -> None:
        """A restore was given up after `seconds`: it is at least that slow."""
        self.restore.sample(0, num_blocks, seconds)
