"""What `session` has learned survives as bytes, and bad bytes change nothing."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from kvstore.core.eviction import learned
from kvstore.core.eviction.session import SessionActivity
from kvstore_bench.replay import replay_machine
from kvstore_bench.traces.model import RawRequest, Stop, Trace, build


def talks(seed: int, num_sessions: int = 120) -> Trace:
    """Tool calls return after about 20 s; turns never do."""
    generator = np.random.default_rng(seed)
    requests, fresh = [], 0
    for number in range(num_sessions):
        now, stop = 5.0 * number, (Stop.TOOL, Stop.TURN)[number % 2]
        for turn in range(4 if stop == Stop.TOOL else 1):
            ids = np.arange(fresh, fresh + 6 + turn)
            requests.append(RawRequest(int(now * 1e9), f"{seed}/{number}", ids, 64 * len(ids), 50, stop))
            now += float(generator.uniform(40.0, 80.0))
        fresh += 16
    return build("talks", requests, 64)


def num_hits(policy: SessionActivity, trace: Trace, capacity: int = 60) -> int:
    return int(replay_machine(trace, policy, capacity).hits.sum())


def taught() -> SessionActivity:
    policy = SessionActivity()
    num_hits(policy, talks(1))
    return policy


def test_a_loaded_policy_starts_with_what_another_learned() -> None:
    trace = talks(2, 40)
    loaded = SessionActivity()
    loaded.load(taught().dump())
    assert num_hits(loaded, trace) > num_hits(SessionActivity(), trace)


def test_dump_of_what_was_loaded_is_the_same() -> None:
    data = taught().dump()
    policy = SessionActivity()
    policy.load(data)
    assert learned.unpack("session", policy.dump()) == learned.unpack("session", data)


def test_an_empty_policy_can_be_kept_too() -> None:
    policy = SessionActivity()
    policy.load(SessionActivity().dump())
    trace = talks(3, 40)
    assert num_hits(policy, trace) == num_hits(SessionActivity(), trace)


def repacked(change: object) -> bytes:
    content = learned.unpack("session", taught().dump())
    assert callable(change)
    change(content)
    return learned.pack("session", content)


def cut_pool(content: dict[str, dict[str, object]]) -> None:
    content["waits"]["pool"] = [[1.0]]


def too_many_ends(content: dict[str, dict[str, object]]) -> None:
    content["waits"]["pool"] = [[5.0], [1.0]]


def unknown_context(content: dict[str, dict[str, object]]) -> None:
    content["waits"]["rows"] = [[99, [1], [0], [1]]]


def negative(content: dict[str, dict[str, object]]) -> None:
    content["shared"]["events"] = [[-1.0]] * 6


def fewer_classes(content: dict[str, dict[str, object]]) -> None:
    content["shared"]["events"] = [[1.0]] * 5


def other_bins(content: dict[str, dict[str, object]]) -> None:
    content["waits"]["bins"] = 3


def no_waits(content: dict[str, object]) -> None:
    del content["waits"]


@pytest.mark.parametrize(
    "change", [cut_pool, too_many_ends, unknown_context, negative, fewer_classes, other_bins, no_waits]
)
def test_another_shape_is_refused(change: object) -> None:
    with pytest.raises(ValueError):
        SessionActivity().load(repacked(change))


def test_damage_is_refused_or_harmless_and_changes_nothing() -> None:
    data = taught().dump()
    trace = talks(4, 20)
    policy = SessionActivity()
    for at in range(0, len(data), max(1, len(data) // 60)):
        damaged = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        with pytest.raises(ValueError):
            policy.load(damaged)
        with pytest.raises(ValueError):
            policy.load(data[:at])
    assert num_hits(policy, trace) == num_hits(SessionActivity(), trace)


@pytest.mark.parametrize(
    "text", ["[]", "{}", "[" * 100_000, '{"kind":"session","version":2}', "nonsense", '{"a":1e999}']
)
def test_what_isnt_a_dump_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        SessionActivity().load(zlib.compress(text.encode()))


def test_a_dump_followed_by_something_is_refused() -> None:
    with pytest.raises(ValueError):
        SessionActivity().load(taught().dump() + b"x")
