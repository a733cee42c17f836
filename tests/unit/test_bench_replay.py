"""The machine replayed by trace gives the hits of the one-pass curve, request by request."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_bench.flat import bounds
from kvstore_bench.flat.runs import leading_runs
from kvstore_bench.models import load_model
from kvstore_bench.replay import replay_machine
from kvstore_bench.residency import residency_columns
from kvstore_bench.sweep import Simulator
from kvstore_bench.traces.model import RawRequest, Stop, Trace, build


def growing_sessions(seed: int) -> Trace:
    generator = np.random.default_rng(seed)
    paths: dict[int, list[int]] = {}
    requests, fresh = [], 100
    for number in range(500):
        session = int(generator.integers(30))
        path = paths.get(session, [session % 3])
        if generator.random() < 0.1:
            path = path[: int(generator.integers(1, len(path) + 1))]
        path = path + list(range(fresh, fresh + int(generator.integers(1, 5))))
        fresh = path[-1] + 1
        paths[session] = path
        ids = np.array(path, np.int64)
        requests.append(RawRequest(number * 10**9, f"s{session}", ids, 64 * len(path), stop=Stop.TOOL))
    return build("growing", requests, 64)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("capacity", [100, 300, 1000])
def test_leaf_lru_in_the_machine_equals_the_stack_distances(seed: int, capacity: int) -> None:
    trace = growing_sessions(seed)
    distances = bounds.leaf_lru_distances(trace.ids, trace.offsets, trace.num_blocks)
    expected = leading_runs(((distances > 0) & (distances <= capacity)).astype(np.uint8), trace.offsets)
    assert replay_machine(trace, "leaf-lru", capacity).hits.tolist() == expected.tolist()


def test_the_services_own_policies_can_be_swept() -> None:
    simulator = Simulator(growing_sessions(1))
    flat, machine = (simulator.point(name, 300) for name in ("leaf-lru", "machine:leaf-lru"))
    assert machine.runs.tolist() == flat.runs.tolist() and machine.tokens == flat.tokens
    assert 0 < simulator.point("machine:tool-ttl", 300).tokens < simulator.point("infinite", 300).tokens


def test_counting_by_time_saves_compute_at_the_price_of_tokens() -> None:
    simulator = Simulator(growing_sessions(1), model=load_model("smollm2-135m"))
    by_count, by_time = (simulator.point(name, 150) for name in ("session", "session-time"))
    assert simulator.compute(by_time.runs) > simulator.compute(by_count.runs)
    assert simulator.compute(simulator.trace.full_blocks()) == 1.0


def test_residency_counts_every_block_of_a_full_tier() -> None:
    columns = residency_columns(growing_sessions(2), "leaf-lru", 200)
    assert len(columns) > 10
    assert all(0.0 < sum(shares) <= 1.0 for _, shares in columns)
    assert sum(columns[-1][1]) == 1.0
