"""Continuous batching, restore, preemption, ends. The scheduler is driven turn by turn in the test's own thread."""

from __future__ import annotations

import pytest

from kvstore.core.hashing import TokenChain
from kvstore.errors import LimitExceeded
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.testing import GREEDY, MemoryStore, Rig, ids_of


def alone(ids: list[int], sampling: SamplingParams = GREEDY, **changes: object) -> tuple[int, ...]:
    """What a fresh engine says."""
    rig = Rig(**changes)
    rig.submit("a", ids, sampling)
    (end,) = rig.run("a")
    rig.scheduler.close()
    return end.tokens


def test_eight_together_say_what_each_says_alone() -> None:
    rig = Rig()
    prompts = {f"r{i}": ids_of(10 + 23 * i, seed=i) for i in range(8)}
    for name, ids in prompts.items():
        rig.submit(name, ids)
    ends = rig.run(*prompts)
    for end, ids in zip(ends, prompts.values(), strict=True):
        assert end.tokens == alone(ids)
        assert end.reason == "length"
    rig.settle()


def test_second_request_hits_the_first_ones_blocks() -> None:
    rig = Rig()
    ids = ids_of(100)
    rig.submit("a", ids)
    (first,) = rig.run("a")
    rig.submit("b", ids)
    (second,) = rig.run("b")
    assert second.tokens == first.tokens
    assert (first.usage.hbm_tokens, second.usage.hbm_tokens) == (0, 96)
    assert second.usage.computed_tokens == 4
    rig.settle()


def test_a_whole_cached_prompt_still_computes_its_last_token() -> None:
    rig = Rig()
    ids = ids_of(64)
    for name in ("a", "b"):
        rig.submit(name, ids)
    first, second = rig.run("a", "b")
    rig.submit("c", ids)
    (third,) = rig.run("c")
    assert third.usage.hbm_tokens == 48
    assert first.tokens == second.tokens == third.tokens


@pytest.mark.parametrize("tier", ["dram", "nvme"])
def test_restored_turn_says_what_a_fresh_one_says(tier: str) -> None:
    store = MemoryStore()
    store.tier = tier
    rig = Rig(store, slots=16)
    ids = ids_of(100)
    rig.submit("a", ids, session="s", tool="bash")
    (first,) = rig.run("a")
    rig.forget()
    longer = [*ids, *first.tokens, *ids_of(10, seed=5)]
    rig.submit("b", longer, session="s")
    (second,) = rig.run("b")
    assert second.usage.hbm_tokens == 0
    restored = second.usage.nvme_tokens if tier == "nvme" else second.usage.dram_tokens
    assert restored == second.usage.cached_tokens == 96
    assert second.plan is not None
    fresh = Rig()
    fresh.submit("c", longer, use_cache=False, plan=second.plan)
    assert fresh.run("c")[0].tokens == second.tokens
    rig.settle()
    assert store.num_live_leases == 0
    kinds = [kind for session, kind, _ in store.signals if session == "s"]
    assert kinds == ["TURN_START", "TOOL_START", "TOOL_END", "TURN_END"]


def test_a_rotten_block_shortens_the_prefix() -> None:
    store = MemoryStore()
    rig = Rig(store, slots=16)
    ids = ids_of(100)
    rig.submit("a", ids)
    (first,) = rig.run("a")
    rig.forget()
    store.rotten = {2}
    rig.submit("b", ids)
    (second,) = rig.run("b")
    assert second.usage.dram_tokens == 32
    assert second.tokens == first.tokens
    rig.settle()


def test_a_failing_store_is_a_miss() -> None:
    store = MemoryStore()
    rig = Rig(store, slots=16)
    ids = ids_of(100)
    rig.submit("a", ids, session="s")
    (first,) = rig.run("a")
    rig.forget()
    store.fail = True
    rig.submit("b", ids, session="s")
    (second,) = rig.run("b")
    assert second.usage.cached_tokens == 0
    assert second.tokens == first.tokens
    rig.settle()


def test_a_late_restore_is_given_up_and_its_slots_stay_claimed() -> None:
    store = MemoryStore()
    rig = Rig(store, slots=20)
    ids = ids_of(100)
    rig.submit("a", ids)
    (first,) = rig.run("a")
    rig.forget()
    store.gate.clear()
    rig.submit("b", ids)
    while not rig.scheduler.restoring or rig.scheduler.restoring[0].store_lease is None:
        rig.scheduler.turn(0.05)
    rig.ahead_ns += 10 * 10**9
    (second,) = rig.run("b")
    assert second.usage.cached_tokens == 0
    assert second.tokens == first.tokens
    assert rig.scheduler.counters.num_restores_late == 1
    assert not rig.scheduler.quiet
    store.gate.set()
    rig.settle()
    assert store.num_live_leases == 0


def test_others_compute_while_one_restores() -> None:
    store = MemoryStore()
    rig = Rig(store, slots=20)
    ids = ids_of(100)
    rig.submit("a", ids)
    rig.run("a")
    rig.forget()
    store.gate.clear()
    rig.submit("b", ids)
    rig.submit("c", ids_of(40, seed=7), use_cache=False)
    rig.run("c")
    assert rig.end_of("b") is None
    store.gate.set()
    (end,) = rig.run("b")
    assert end.usage.dram_tokens == 96


@pytest.mark.parametrize("with_store", [True, False])
def test_preemption_changes_nothing_in_what_is_said(with_store: bool) -> None:
    store = MemoryStore()
    rig = Rig(store if with_store else None, slots=16)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = {f"r{i}": ids_of(60, seed=i) for i in range(4)}
    for name, ids in prompts.items():
        rig.submit(name, ids, sampling)
    ends = rig.run(*prompts)
    assert rig.scheduler.counters.num_preemptions > 0
    if with_store:
        assert rig.scheduler.counters.restored_blocks_dram > 0
    for end, ids in zip(ends, prompts.values(), strict=True):
        assert end.tokens == alone(ids, sampling)
    rig.settle()


def test_sampling_depends_on_the_seed_only() -> None:
    sampling = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=11, ignore_eos=True)
    other = SamplingParams(max_tokens=12, temperature=1.0, top_p=0.9, seed=12, ignore_eos=True)
    ids = ids_of(30)
    rig = Rig()
    for name, chosen in (("a", sampling), ("b", other), ("c", sampling)):
        rig.submit(name, ids, chosen)
    a, b, c = rig.run("a", "b", "c")
    assert a.tokens == c.tokens == alone(ids, sampling)
    assert a.tokens != b.tokens


def test_cancel_at_every_stage_leaves_nothing_behind() -> None:
    for turns in range(12):
        store = MemoryStore()
        rig = Rig(store, slots=16)
        rig.submit("a", ids_of(60))
        rig.run("a")
        rig.submit("b", ids_of(120))
        for _ in range(turns):
            rig.scheduler.turn()
        rig.scheduler.cancel("b")
        (end,) = rig.run("b")
        assert end.reason in ("cancelled", "length")
        rig.settle()
        assert store.num_live_leases == 0


def test_deadline_ends_a_request() -> None:
    rig = Rig()
    rig.submit("a", ids_of(100), SamplingParams(max_tokens=900, ignore_eos=True))
    rig.scheduler.turn()
    rig.ahead_ns += 601 * 10**9
    (end,) = rig.run("a")
    assert end.reason == "timeout"
    rig.settle()


def test_a_full_queue_refuses() -> None:
    rig = Rig(max_queue=2)
    rig.submit("a", ids_of(10))
    rig.submit("b", ids_of(10))
    with pytest.raises(LimitExceeded, match="max_queue"):
        rig.submit("c", ids_of(10))
    rig.run("a", "b")


def test_fork_shares_the_parents_blocks() -> None:
    rig = Rig()
    ids = ids_of(64)
    rig.submit("a", ids, session="parent")
    rig.run("a")
    rig.scheduler.turns.fork("parent", "child")
    rig.submit("b", [*ids, 3, 4, 5], session="child")
    (second,) = rig.run("b")
    assert second.usage.hbm_tokens == 64
    rig.scheduler.turns.close("child")
    rig.scheduler.turns.close("parent")
    rig.settle()


def test_plans_put_a_context_together_again() -> None:
    """Blocks computed by different requests with different cuts: the plan names them all, and replaying it gives the
    same tokens.
    """
    rig = Rig()
    ids = ids_of(150)
    rig.submit("a", ids[:70])
    rig.run("a")
    rig.submit("b", ids[:120])
    rig.run("b")
    rig.submit("c", ids)
    (end,) = rig.run("c")
    assert end.plan is not None
    assert end.plan[:5] == ((0, 32), (32, 64), (64, 96), (96, 120), (112, 128))
    fresh = Rig()
    fresh.submit("d", ids, use_cache=False, plan=end.plan)
    (again,) = fresh.run("d")
    assert again.tokens == end.tokens
    assert again.usage.cached_tokens == 0


def test_chain_of_a_session_is_the_chain_of_its_tokens() -> None:
    rig = Rig()
    ids = ids_of(50)
    rig.submit("a", ids, session="s")
    (end,) = rig.run("a")
    chain = TokenChain(rig.pool.keyspace)
    chain.extend([*ids, *end.tokens])
    known, kept = rig.scheduler.contexts.chain("s", [*ids, *end.tokens, 7])
    assert known.hash_at(2) == chain.hash_at(2)
    assert kept == 55


def test_a_resumed_turn_is_not_kept_waiting_by_cold_ones() -> None:
    """Order of first tokens: least to compute first, until somebody lost patience."""
    rig = Rig(max_batch=1)
    ids = ids_of(64)
    rig.submit("first", ids, session="s")
    (first,) = rig.run("first")
    for name in ("cold1", "cold2"):
        rig.submit(name, ids_of(300, seed=ord(name[-1])))
    rig.submit("resumed", [*ids, *first.tokens, 9], session="s")
    rig.run("resumed")
    assert rig.end_of("cold1") is None and rig.end_of("cold2") is None
    rig.submit("again", [*ids, *first.tokens, 9, 10], session="s")
    rig.ahead_ns += 31 * 10**9
    rig.run("cold1")
    assert rig.end_of("again") is None
    rig.run("cold2", "again")


def rates_that_split(rig: Rig) -> None:
    """Restoring a block takes as long as computing one: the best plan is half and half."""
    rig.scheduler.rates._always = False
    for _ in range(50):
        rig.scheduler.rates.compute.sample(0, 32, 0.2)
        rig.scheduler.rates.restore.sample(10, 0, 1.0)


def test_computing_and_restoring_meet_in_the_middle() -> None:
    store = MemoryStore()
    rig = Rig(store, slots=40)
    ids = ids_of(400)
    rig.submit("a", ids, session="s")
    (first,) = rig.run("a")
    rig.forget()
    rates_that_split(rig)
    store.gate.clear()
    rig.submit("b", ids, session="s")
    while not rig.scheduler.restoring or rig.scheduler.restoring[0].num_computed < 96:
        rig.scheduler.turn(0.01)  # computes while the restore is held at the gate
    store.gate.set()
    (second,) = rig.run("b")
    assert rig.scheduler.counters.num_restores_split == 1
    assert 0 < second.usage.dram_tokens < 384
    assert second.usage.dram_tokens + second.usage.computed_tokens == 400
    assert second.tokens == first.tokens
    rig.settle()


@pytest.mark.parametrize("what", ["late", "cancelled", "cut short"])
def test_a_split_restore_may_end_in_any_way(what: str) -> None:
    store = MemoryStore()
    rig = Rig(store, slots=64)  # room for the claim of a late restore, and for the new one
    ids = ids_of(400)
    rig.submit("a", ids)
    (first,) = rig.run("a")
    rig.forget()
    rates_that_split(rig)
    store.gate.clear()
    if what == "cut short":
        store.rotten.add(20)
    rig.submit("b", ids)
    while not rig.scheduler.restoring or rig.scheduler.restoring[0].num_computed < 64:
        rig.scheduler.turn(0.01)
    if what == "late":
        rig.ahead_ns += 10 * 10**9
    if what == "cancelled":
        assert rig.scheduler.cancel("b")
    if what != "late":
        store.gate.set()
    (second,) = rig.run("b")
    store.gate.set()
    rig.settle()
    assert store.num_live_leases == 0
    if what != "cancelled":
        assert second.tokens == first.tokens


def test_a_store_slower_than_computing_is_declined_and_tried_again() -> None:
    store = MemoryStore()
    rig = Rig(store, slots=40)
    ids = ids_of(400)
    rig.submit("a", ids)
    rig.run("a")
    rates = rig.scheduler.rates
    rates._always = False
    rates.late(10, 50.0)
    for number in range(60):
        rig.forget()
        rig.submit(f"b{number}", ids)
        rig.run(f"b{number}")
        if rig.scheduler.counters.num_restores:
            break
    assert rig.scheduler.counters.num_restores_declined > 0
    assert rig.scheduler.counters.num_restores > 0
