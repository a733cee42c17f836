"""`session` on traces that no agent makes: never much below leaf-first LRU, and the same decisions in both forms."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_bench.flat import hostile
from kvstore_bench.flat.learned import session_hits
from kvstore_bench.flat.overlap import overlapped
from kvstore_bench.replay import replay_machine
from kvstore_bench.sweep import Simulator

SHARES = (0.005, 0.02, 0.1, 0.3)
ALLOWED = dict.fromkeys(hostile.KINDS, 0.003) | {"drifting_prompts": 0.01}
"""How much of all tokens may be lost to leaf-first LRU. In one kind the first few hundred requests, before anything is
learned, cost more than the rest gains back at some size."""


@pytest.mark.parametrize("kind", sorted(hostile.KINDS))
def test_never_much_below_leaf_first_lru(kind: str) -> None:
    trace = hostile.make(kind, 1)
    simulator = Simulator(trace)
    for share in SHARES:
        capacity = max(10, int(trace.num_blocks * share))
        lru = simulator.point("leaf-lru", capacity)
        for policy in ("session", "session+ends"):
            mine = simulator.point(policy, capacity)
            assert mine.tokens >= lru.tokens - ALLOWED[kind], f"{kind}, {policy}, at {share:.1%}"


@pytest.mark.parametrize("kind", sorted(hostile.KINDS))
def test_machine_and_compiled_form_agree(kind: str) -> None:
    trace = hostile.make(kind, 2, 500)
    for share in (0.02, 0.2):
        capacity = max(10, int(trace.num_blocks * share))
        for ends in (False, True):
            found = replay_machine(trace, "session", capacity, signal_ends=ends).hits
            assert found.tolist() == session_hits(trace, capacity, signal_ends=ends).tolist()


@pytest.mark.parametrize("ends", [False, True])
def test_prompts_asked_by_many_once_each_are_kept_like_by_lru(ends: bool) -> None:
    """What a model of sessions alone gets wrong: nobody returns, yet every prompt is needed again. Who says that a
    session ended doesn't say that nobody else will ask the same."""
    trace = hostile.make("echoes", 3)
    capacity = trace.num_blocks // 20
    hits = session_hits(trace, capacity, signal_ends=ends)
    assert int(hits.sum()) >= 0.99 * int(Simulator(trace).point("leaf-lru", capacity).runs.sum())
    assert np.count_nonzero(hits) > 0.7 * trace.num_requests


def test_overlapped_sessions_keep_their_gaps_and_blocks() -> None:
    trace = hostile.make("clockwork", 1, 400)
    moved = overlapped(trace, 50.0, 3)
    assert moved.num_requests == trace.num_requests
    assert moved.num_blocks == trace.num_blocks
    for name in trace.session_names:
        before = trace.times_ns[trace.session == trace.session_names.index(name)]
        after = moved.times_ns[moved.session == moved.session_names.index(name)]
        assert np.allclose(np.diff(before), np.diff(after), atol=1e4)
    starts = [moved.times_ns[moved.session == s][0] for s in range(moved.num_sessions)]
    assert max(starts) - min(starts) <= 50 * 10**9
