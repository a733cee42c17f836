"""The reference simulators against libCacheSim, reference by reference, and kvcache-simulator, token by token."""

from __future__ import annotations

import importlib
import lzma
from pathlib import Path

import numpy as np
import pytest

from kvstore_bench.flat import bounds, classic
from kvstore_bench.flat.runs import leading_runs
from kvstore_bench.traces.load import load
from kvstore_bench.traces.model import Trace

SHIPPED = Path(__file__).parents[1] / "data" / "traces"
NUM_REQUESTS = 1500
CAPACITIES = (150, 1000, 5000)


def shipped(name: str) -> Trace:
    path = SHIPPED / name
    if not path.exists():
        pytest.skip(f"tests/data/traces/{name} is missing")
    return load(path).head(NUM_REQUESTS)


@pytest.fixture(scope="module", params=["mooncake-conversation-1500.jsonl.xz", "mooncake-synthetic-1500.jsonl.xz"])
def trace(request: pytest.FixtureRequest) -> Trace:
    return shipped(request.param)


def reference_hits(trace: Trace, name: str, capacity: int) -> int:
    lib = pytest.importorskip("libcachesim", reason="libcachesim isn't installed")
    following = bounds.next_uses(trace.ids, trace.num_blocks)
    cache, request, hits = getattr(lib, name)(cache_size=capacity), lib.Request(), 0
    for position, block in enumerate(trace.ids.tolist()):
        request.obj_id, request.obj_size, request.clock_time = block + 1, 1, position
        upcoming = int(following[position])
        request.next_access_vtime = upcoming if upcoming < trace.num_references else 1 << 62
        hits += bool(cache.get(request))
    return hits


@pytest.mark.parametrize("capacity", CAPACITIES)
@pytest.mark.parametrize("name", ["FIFO", "LRU", "LFU", "Sieve", "ARC", "Belady", "GDSF"])
def test_hits_equal_libcachesim(trace: Trace, name: str, capacity: int) -> None:
    ids, num_blocks = trace.ids, trace.num_blocks
    ours = {
        "FIFO": lambda: classic.queue_hits(ids, num_blocks, capacity, False),
        "LRU": lambda: classic.queue_hits(ids, num_blocks, capacity, True),
        "LFU": lambda: classic.frequency_hits(ids, num_blocks, capacity, False),
        "Sieve": lambda: classic.sieve_hits(ids, num_blocks, capacity),
        "ARC": lambda: classic.arc_hits(ids, num_blocks, capacity),
        "GDSF": lambda: classic.frequency_hits(ids, num_blocks, capacity, True),
        "Belady": lambda: classic.belady_admit_hits(ids, bounds.next_uses(ids, num_blocks), capacity),
    }[name]()
    assert int(ours.sum()) == reference_hits(trace, name, capacity)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_optimum_is_never_below_any_policy(trace: Trace, capacity: int) -> None:
    ids, num_blocks = trace.ids, trace.num_blocks
    best = int(bounds.belady(ids, num_blocks, capacity).sum())
    for hits in (
        classic.belady_admit_hits(ids, bounds.next_uses(ids, num_blocks), capacity),
        classic.s3fifo_hits(ids, num_blocks, capacity),
        classic.tinylfu_hits(ids, num_blocks, capacity),
        classic.arc_hits(ids, num_blocks, capacity),
    ):
        assert int(hits.sum()) <= best


@pytest.mark.parametrize("policy", ["fifo", "optimal"])
@pytest.mark.parametrize("name", ["mooncake-conversation-1500.jsonl.xz", "mooncake-synthetic-1500.jsonl.xz"])
def test_tokens_equal_kvcache_simulator(name: str, policy: str) -> None:
    plans = pytest.importorskip("kvcache_sim.plan", reason="kvcache-simulator isn't installed")
    traces, policies = importlib.import_module("kvcache_sim.trace"), importlib.import_module("kvcache_sim.policies")
    trace = shipped(name)
    text = lzma.decompress((SHIPPED / name).read_bytes()).decode().splitlines()
    plan = plans.build_execution_plan(traces.parse_trace_lines(text, block_size=512), 0.5)
    begin = plan.warmup_requests
    for capacity in (150, 1000, 4000):
        theirs = policies.simulate_policy(plan, policy, capacity)
        if policy == "fifo":
            runs = classic.fifo_runs(trace.ids, trace.offsets, trace.num_blocks, capacity)
        else:
            runs = leading_runs(bounds.belady(trace.ids, trace.num_blocks, capacity), trace.offsets)
        tokens = np.minimum(runs * trace.block_tokens, trace.input_tokens)[begin:]
        assert int(tokens.sum()) == theirs.hitTokens


def test_stack_distances_equal_a_leaf_first_simulation() -> None:
    generator = np.random.default_rng(3)
    paths, fresh = [[0]], 1
    for _ in range(300):
        base = paths[int(generator.integers(len(paths)))]
        keep = int(generator.integers(1, len(base) + 1))
        grown = int(generator.integers(0, 4))
        paths.append(base[:keep] + list(range(fresh, fresh + grown)))
        fresh += grown
    offsets = np.cumsum([0] + [len(path) for path in paths])
    ids = np.array([block for path in paths for block in path], np.int32)
    distances = bounds.leaf_lru_distances(ids, offsets, fresh)
    for capacity in (5, 20, 60):
        order: list[int] = []
        for number, path in enumerate(paths):
            inside = set(order[-capacity:])
            expected = [block in inside for block in path]
            got = distances[offsets[number] : offsets[number + 1]]
            assert [0 < d <= capacity for d in got.tolist()] == expected
            for block in reversed(path):
                if block in order:
                    order.remove(block)
                order.append(block)
