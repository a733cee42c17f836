"""The planner against brute force, and its rate estimates against known machines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.planner import ComputeRate, RestoreRate, plan
from kvstore.core.types import Tier

BLOCK = 32
tiers_of = st.lists(st.sampled_from([Tier.DRAM, Tier.NVME]), max_size=40)


def machine(a: float, b: float) -> ComputeRate:
    rate = ComputeRate()
    for first in (0, 256, 512, 1024, 4096):
        rate.sample(first, first + 256, a * 256 + b * 256 * (first + 128))
    return rate


def test_compute_rate_finds_both_coefficients() -> None:
    rate = machine(1e-3, 1e-7)
    assert abs(rate.seconds(0, 8192) / (1e-3 * 8192 + 1e-7 * 8192 * 4096) - 1) < 1e-6


def test_compute_rate_is_never_negative_on_noise() -> None:
    rate = ComputeRate()
    for first, seconds in ((0, 1.0), (256, 0.4), (512, 0.1)):
        rate.sample(first, first + 256, seconds)
        assert rate.seconds(0, 10_000) > 0
        assert rate.seconds(5_000, 10_000) > 0


def test_restore_rate_tells_tiers_apart() -> None:
    rate = RestoreRate()
    for _ in range(60):
        rate.sample(100, 0, 0.1)
        rate.sample(0, 100, 1.0)
    assert abs(rate.seconds([Tier.DRAM] * 10) - 0.01) < 1e-3
    assert abs(rate.seconds([Tier.NVME] * 10) - 0.1) < 1e-2


def test_fast_store_restores_everything_and_slow_one_nothing() -> None:
    compute = machine(1e-3, 1e-7)
    held = [Tier.NVME] * 100
    fast = plan(held, 100 * BLOCK + 10, BLOCK, compute, RestoreRate(0.001, 1e-4, 1e-4))
    assert (fast.first, fast.last) == (0, 100)
    slow = plan(held, 100 * BLOCK + 10, BLOCK, compute, RestoreRate(60.0, 1.0, 1.0))
    assert (slow.first, slow.last) == (0, 0)
    assert slow.seconds == slow.recompute_seconds


def test_comparable_rates_meet_in_the_middle() -> None:
    compute = machine(1e-3, 0.0)
    both = plan([Tier.NVME] * 100, 100 * BLOCK, BLOCK, compute, RestoreRate(0.0, 0.032, 0.032))
    assert 40 <= both.first <= 60 and both.last == 100
    assert both.seconds < 0.6 * both.recompute_seconds


@given(tiers_of, st.integers(0, 200), st.floats(1e-5, 1e-2), st.floats(0, 1e-6), st.floats(1e-4, 1), st.floats(1e-4, 1))
def test_no_simple_plan_is_better(tiers: list[Tier], extra: int, a: float, b: float, dram: float, nvme: float) -> None:
    compute, restore = machine(a, b), RestoreRate(0.001, dram, nvme)
    end = len(tiers) * BLOCK + extra
    chosen = plan(tiers, end, BLOCK, compute, restore)
    everything = restore.seconds(tiers) + compute.seconds(len(tiers) * BLOCK, end)
    assert chosen.seconds <= everything * (1 + 1e-9)
    assert chosen.seconds <= compute.seconds(0, end) * (1 + 1e-9) or not tiers or not compute.known
    assert 0 <= chosen.first <= chosen.last <= len(tiers)


def test_before_anything_is_measured_what_is_held_is_restored() -> None:
    first = plan([Tier.DRAM] * 5, 200, BLOCK, ComputeRate(), RestoreRate())
    assert (first.first, first.last) == (0, 5)


def test_what_is_there_already_is_neither_restored_nor_computed() -> None:
    compute = machine(1e-3, 0.0)
    both = plan([Tier.DRAM] * 60, 100 * BLOCK, BLOCK, compute, RestoreRate(0.0, 0.032, 0.032), begin=40, unit_blocks=8)
    assert both.last == 100
    assert both.first % 8 == 0 and 64 <= both.first <= 72
    assert both.recompute_seconds == compute.seconds(40 * BLOCK, 100 * BLOCK)
    slow = plan([Tier.DRAM] * 60, 100 * BLOCK, BLOCK, compute, RestoreRate(60.0, 1.0, 1.0), begin=40)
    assert slow.first == slow.last == 40


def test_a_small_restore_says_nothing_about_a_large_one() -> None:
    compute, restore = machine(1e-3, 0.0), RestoreRate()
    restore.sample(1, 0, 0.3)  # one block, late for whatever reason
    chosen = plan([Tier.NVME] * 80, 80 * BLOCK, BLOCK, compute, restore)
    assert (chosen.first, chosen.last) == (0, 80)
    restore.sample(80, 0, 0.38)
    assert 0.0005 < restore.block_dram < 0.003
