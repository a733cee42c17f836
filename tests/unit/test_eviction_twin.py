"""The compiled `session` simulator finds what the machine finds under its default policy, request by request."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore_bench.flat.learned import session_hits
from kvstore_bench.replay import replay_machine
from kvstore_bench.traces.load import load
from kvstore_bench.traces.model import RawRequest, Stop, Trace, build

SHIPPED = Path(__file__).parents[1] / "data" / "traces"


def made_up(seed: int, num_requests: int = 600) -> Trace:
    """Sessions that grow, branch, share heads, stop for tools and end; block ids stand for whole prefixes."""
    generator = np.random.default_rng(seed)
    paths: dict[int, list[int]] = {}
    requests, now, fresh = [], 0.0, 1000
    for _ in range(num_requests):
        now += float(generator.exponential(3.0))
        number = int(generator.integers(40))
        head = number % 4
        path = paths.get(number) or [head * 10 + k for k in range(1 + head)]
        if generator.random() < 0.1:
            path = path[: int(generator.integers(1, len(path) + 1))]
        grown = int(generator.integers(0, 6))
        path = path + list(range(fresh, fresh + grown))
        fresh += grown
        paths[number] = path
        stop = (Stop.UNKNOWN, Stop.TOOL, Stop.TURN)[number % 3]
        ids = np.array(path, np.int64)
        requests.append(
            RawRequest(int(now * 1e9), f"s{number}", ids, 64 * len(path), int(generator.integers(5, 500)), stop=stop)
        )
    return build("made up", requests, 64)


def same(trace: Trace, capacity: int, ends: bool, doubles_at: int = 0) -> bool:
    found = replay_machine(trace, "session", capacity, signal_ends=ends, doubles_at=doubles_at).hits
    return found.tolist() == session_hits(trace, capacity, signal_ends=ends, doubles_at=doubles_at).tolist()


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_equal_hits_on_made_up_sessions(seed: int, ends: bool) -> None:
    trace = made_up(seed)
    for capacity in (10, 30, 120, 400):
        assert same(trace, capacity, ends)


@pytest.mark.parametrize("doubles_at", [1, 20])
def test_equal_hits_where_deep_blocks_count_more(doubles_at: int) -> None:
    trace = made_up(5)
    for capacity in (30, 120, 400):
        assert same(trace, capacity, False, doubles_at)
    by_count, by_time = (int(session_hits(trace, 120, doubles_at=at).sum()) for at in (0, doubles_at))
    assert by_time != by_count


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("name", ["mooncake-conversation-1500.jsonl.xz", "mooncake-synthetic-1500.jsonl.xz"])
def test_equal_hits_on_slices_of_shipped_traces(name: str, ends: bool) -> None:
    if not (SHIPPED / name).exists():
        pytest.skip(f"tests/data/traces/{name} is missing")
    trace = load(SHIPPED / name).head(700)
    for share in (0.03, 0.1):
        capacity = int(trace.num_blocks * share)
        assert same(trace, capacity, ends)
