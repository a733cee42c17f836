"""Restore or recompute, from measured rates; and both at once when that is fastest.

For a context of `end` tokens of which [0, held) can be restored, a plan computes [0, x) while [x, m) is being restored,
then computes
[m, end):

    tokens   0 ........ x ................ m ........ end
             | compute  |     restore      | compute  |
             |<-- at the same time ------->|  after   |
    time   = max(compute(0, x), restore(x, m)) + compute(m, end)

`restore` is a fixed cost plus time a block by the tier it lies in; `compute` grows with position, since each token
attends to all before it: a*n + b*(sum of positions). x = 0 is plain restore, m = 0 plain recompute. Everything is
measured by the engine that uses the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.types import Tier

DECAY = 0.9
"""Weight of what was known before, at each new sample."""
FEW_BLOCKS = 8
"""Restores below this size are mostly fixed cost."""
MARGIN = 0.9
"""A plan that splits the work must beat the simpler ones by this factor."""


@dataclass
class ComputeRate:
    """Seconds of prefill as `a * tokens + b * (sum of positions)`: decayed least squares over measured chunks."""

    _xx: float = 0.0
    _xy: float = 0.0
    _yy: float = 0.0
    _xt: float = 0.0
    _yt: float = 0.0
    a: float = 0.0
    b: float = 0.0

    @property
    def known(self) -> bool:
        """Was anything measured yet?"""
        return self.a > 0 or self.b > 0

    def sample(self, first: int, last: int, seconds: float) -> None:
        """A chunk [first, last) took `seconds`."""
        n, p = _tokens_and_positions(first, last)
        if n <= 0 or seconds <= 0:
            return
        for name, value in (("_xx", n * n), ("_xy", n * p), ("_yy", p * p), ("_xt", n * seconds), ("_yt", p * seconds)):
            setattr(self, name, DECAY * getattr(self, name) + value)
        self._solve()

    def _solve(self) -> None:
        """Both coefficients when the samples tell them apart and neither is negative; else one of them."""
        det = self._xx * self._yy - self._xy * self._xy
        if det > 1e-9 * self._xx * self._yy:
            a = (self._xt * self._yy - self._yt * self._xy) / det
            b = (self._yt * self._xx - self._xt * self._xy) / det
            if a >= 0 and b >= 0:
                self.a, self.b = a, b
                return
        self.a, self.b = self._xt / self._xx, 0.0

    def seconds(self, first: int, last: int) -> float:
        """Time to compute tokens [first, last)."""
        n, p = _tokens_and_positions(first, last)
        return self.a * n + self.b * p


def _blend(old: float, new: float) -> float:
    return DECAY * old + (1 - DECAY) * new if old else new


def _tokens_and_positions(first: int, last: int) -> tuple[float, float]:
    n = max(0, last - first)
    return float(n), n * (first + last) / 2.0


@dataclass
class RestoreRate:
    """Seconds of a restore: `fixed` + seconds a block of each tier; decayed averages."""

    fixed: float = 0.0
    block_dram: float = 0.0
    block_nvme: float = 0.0

    def sample(self, num_dram: int, num_nvme: int, seconds: float) -> None:
        """A restore of that many blocks took `seconds`.

        A small one tells about the fixed cost only: spread over its few blocks that would look like a slow tier. Mixed
        ones are split by what is known of the tiers.
        """
        count = num_dram + num_nvme
        if count == 0 or seconds <= 0:
            return
        moving = self.seconds([Tier.DRAM] * num_dram + [Tier.NVME] * num_nvme) - self.fixed
        if count < FEW_BLOCKS:
            self.fixed = _blend(self.fixed, max(0.0, seconds - moving))
            return
        spent = max(seconds - self.fixed, seconds / 2)
        for name, n in (("block_dram", num_dram), ("block_nvme", num_nvme)):
            old = getattr(self, name)
            if n:
                setattr(self, name, _blend(old, old * spent / moving if old and moving > 0 else spent / count))

    def relax(self, factor: float) -> None:
        """Believe a little less in what was measured, since nothing new is measured while plans avoid restoring."""
        self.block_dram *= factor
        self.block_nvme *= factor

    def seconds(self, tiers: Sequence[Tier]) -> float:
        """Time to restore blocks lying in these tiers. A tier never measured counts as the other one."""
        dram = self.block_dram or self.block_nvme
        nvme = self.block_nvme or self.block_dram
        num_nvme = sum(t == Tier.NVME for t in tiers)
        return self.fixed * bool(tiers) + num_nvme * nvme + (len(tiers) - num_nvme) * dram


@dataclass(frozen=True, slots=True)
class Plan:
    """Compute blocks [begin, first), restore [first, last), compute the rest; times in seconds, as predicted."""

    first: int
    last: int
    seconds: float
    recompute_seconds: float


def plan(
    tiers: Sequence[Tier],
    end_tokens: int,
    block_tokens: int,
    compute: ComputeRate,
    restore: RestoreRate,
    begin: int = 0,
    unit_blocks: int = 1,
) -> Plan:
    """The fastest plan for a context of `end_tokens`, of which blocks [0, begin) are there already.

    `tiers[i]` is where block `begin + i` can be restored from. `unit_blocks`: the split is at multiples of this (an
    engine's chunk). Before compute was measured everything held is restored. O(n) in blocks.
    """
    last = begin + len(tiers)
    alone = compute.seconds(begin * block_tokens, end_tokens)
    rest = compute.seconds(last * block_tokens, end_tokens)
    everything = Plan(begin, last, restore.seconds(tiers) + rest, alone)
    if not tiers or not compute.known:
        return everything
    best = everything if everything.seconds <= alone else Plan(begin, begin, alone, alone)
    done, left = begin, restore.seconds(tiers)
    for first in range((begin // unit_blocks + 1) * unit_blocks, last, unit_blocks):
        left -= restore.seconds(tiers[done - begin : first - begin]) - restore.fixed
        done = first
        front = compute.seconds(begin * block_tokens, first * block_tokens)
        split = Plan(first, last, max(front, left) + rest, alone)
        if split.seconds < (best.seconds if begin < best.first < last else best.seconds * MARGIN):
            best = split
        if front > left:
            break
    return best
