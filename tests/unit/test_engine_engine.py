"""The engine's thread and door, the store workers, and the mover of device pools."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvstore.errors import InvalidField, LimitExceeded, SetupError, Unavailable, UnknownSession
from kvstore_engine.client_store import ServiceStore
from kvstore_engine.engine import Engine
from kvstore_engine.sampling import SamplingParams, nucleus
from kvstore_engine.sequence import EndEvent, RequestEvent
from kvstore_engine.testing import MemoryStore, tiny_config, tiny_model
from kvstore_engine.transfers import Transfers

FEW = SamplingParams(max_tokens=4, ignore_eos=True)
MANY = SamplingParams(max_tokens=400, ignore_eos=True)


def make(store: Any = None, **changes: Any) -> Engine:
    config = tiny_config(**changes)
    return Engine(config, tiny_model(config), store)


@pytest.mark.parametrize(
    ("ids", "sampling", "field"),
    [
        ([], FEW, "prompt"),
        ([1, 512], FEW, "prompt"),
        ([1] * 1100, FEW, "messages"),
        ([1], SamplingParams(max_tokens=5000), "messages"),
    ],
)
def test_a_bad_prompt_is_refused_at_the_door(ids: list[int], sampling: SamplingParams, field: str) -> None:
    with make() as engine, pytest.raises(InvalidField, match=f"^{field}"):
        engine.generate(ids, sampling)


def test_a_full_queue_refuses_at_the_door() -> None:
    with make(max_queue=1, max_batch=1) as engine:
        hold = threading.Event()
        busy = threading.Thread(target=engine.call, args=(lambda s: hold.wait(),))
        busy.start()
        ends: list[RequestEvent] = []
        for _ in range(2):
            engine.submit([1, 2], FEW, ends.append)
        with pytest.raises(LimitExceeded, match="max_queue"):
            engine.submit([1, 2], FEW, ends.append)
        hold.set()
        busy.join()
        assert engine.wait_quiet(20)
        assert sum(isinstance(e, EndEvent) for e in ends) == 2


def test_closing_a_stream_cancels_its_request() -> None:
    with make() as engine:
        stream = engine.stream([1, 2, 3], MANY)
        next(stream)
        stream.close()
        assert engine.wait_quiet(20)
        assert engine.counters.ends["cancelled"] == 1


def test_unknown_sessions_are_named() -> None:
    with make() as engine:
        with pytest.raises(UnknownSession):
            engine.end_session("nobody")
        with pytest.raises(UnknownSession):
            engine.fork_session("nobody", "child")


def test_a_bug_in_the_thread_ends_every_request_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    engine = make()
    ends: list[RequestEvent] = []
    ended = threading.Event()

    def on_event(event: RequestEvent) -> None:
        ends.append(event)
        if isinstance(event, EndEvent):
            ended.set()

    def bug(_: object) -> None:
        raise ZeroDivisionError("planted")

    engine.submit([1, 2, 3], MANY, on_event)
    with pytest.raises(Unavailable, match="planted"):
        engine.call(bug)
    assert ended.wait(20)
    end = ends[-1]
    assert isinstance(end, EndEvent) and "planted" in end.error
    assert "planted" in engine.failure
    with pytest.raises(Unavailable):
        engine.submit([1], FEW, ends.append)
    engine.close()


def test_close_finishes_offloads_and_is_idempotent() -> None:
    store = MemoryStore()
    engine = make(store)
    engine.generate(list(range(1, 50)), FEW)
    engine.close()
    engine.close()
    assert store.num_offloads == 1


def test_a_pool_that_can_not_be_had_is_a_setup_error() -> None:
    with pytest.raises(SetupError, match="pool_bytes"):
        make(pool_bytes=1 << 60)


def test_stats_reach_the_store() -> None:
    store = MemoryStore()
    with make(store) as engine:
        engine.generate(list(range(1, 50)), FEW)
    assert store.last_stats is not None
    assert store.last_stats.capacity_bytes == 64 * 4096


# ---- workers


def test_writes_of_a_session_keep_their_order() -> None:
    inbox: list[Callable[[], None]] = []
    transfers = Transfers(inbox.append, lambda error: None, workers=3)
    seen: dict[str, list[int]] = {"a": [], "b": []}
    for i in range(50):
        for name in seen:
            transfers.write(name, lambda name=name, i=i: seen[name].append(i), lambda _: None)
    transfers.close()
    assert seen == {"a": list(range(50)), "b": list(range(50))}
    for done in inbox:
        done()
    assert transfers.num_pending == 0


def test_a_failure_is_none_and_a_bug_is_told() -> None:
    inbox: list[Callable[[], None]] = []
    told: list[BaseException] = []
    results: list[object] = []
    transfers = Transfers(inbox.append, told.append, workers=1)

    def fail(error: BaseException) -> None:
        raise error

    transfers.read(lambda: fail(Unavailable("away")), results.append)
    transfers.read(lambda: fail(ZeroDivisionError()), results.append)
    transfers.write("s", lambda: fail(OSError("disk")), results.append)
    for worker in (transfers._reads, transfers._writes):
        worker.shutdown(wait=True)
    for done in inbox:
        done()
    assert results == [None, None, None]
    assert [type(e) for e in told] == [ZeroDivisionError]
    assert transfers.num_failed == 2


def test_a_store_that_is_away_at_the_start_is_a_miss() -> None:
    config = tiny_config()
    model = tiny_model(config)
    store = ServiceStore("unix:/nowhere/kv.sock", model.keyspace, restore_timeout_s=0.2, offload_timeout_s=0.2)
    with Engine(config, model, store) as engine:
        end = engine.generate(list(range(1, 50)), FEW, session="s")
        assert end.usage.cached_tokens == 0
        assert engine.wait_quiet(20)
        assert engine.stats()["store_failures"] > 0


def test_nucleus_keeps_the_smallest_set() -> None:
    p = torch.tensor([0.1, 0.5, 0.15, 0.25])
    assert nucleus(p, 0.7).tolist() == pytest.approx([0, 0.5, 0, 0.25])
    assert nucleus(p, 0.01).tolist() == pytest.approx([0, 0.5, 0, 0])
