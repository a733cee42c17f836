"""The simulator is the service: a trace replayed through a real service process hits what its simulation hits."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.types import SLOT_ALIGN
from kvstore.testing.service import ServiceProcess, wait_for
from kvstore_bench.record import Recorder, follow
from kvstore_bench.replay import KEYSPACE, Replayer, Turn, replay_machine
from kvstore_bench.traces.load import load
from kvstore_bench.traces.model import RawRequest, Stop, Trace, build
from kvstore_bench.traces.own import write_file
from kvstore_client import Client, HostPool

SHIPPED = Path(__file__).parents[1] / "data" / "traces" / "mooncake-conversation-1500.jsonl.xz"
TINY = Keyspace(
    model="tiny",
    weights_digest="a" * 32,
    tokenizer_digest="b" * 32,
    kv_dtype="bfloat16",
    num_layers=1,
    num_kv_heads=1,
    head_dim=64,
    rope="theta=10000",
    block_tokens=16,
)


def shipped() -> Trace:
    if not SHIPPED.exists():
        pytest.skip(f"tests/data/traces/{SHIPPED.name} is missing")
    return load(SHIPPED).head(220)


def agents() -> Trace:
    """Sessions that share heads, grow, change what they said before, stop for tools and come back."""
    generator = np.random.default_rng(11)
    paths: dict[int, list[int]] = {}
    requests, fresh = [], 1000
    for number in range(300):
        session = int(generator.integers(24))
        path = paths.get(session, [session % 3, 10 + session % 3])
        if generator.random() < 0.15:
            path = path[: int(generator.integers(1, len(path) + 1))]
        path = path + list(range(fresh, fresh + int(generator.integers(0, 9))))
        fresh += 9
        paths[session] = path
        stop = (Stop.UNKNOWN, Stop.TOOL, Stop.TURN)[session % 3]
        requests.append(RawRequest(number * 10**9, f"s{session}", np.array(path, np.int64), 16 * len(path), stop=stop))
    return build("agents", requests, 16)


def ids_of(trace: Trace, r: int) -> list[int]:
    first = int(trace.offsets[r])
    return [int(i) for i in trace.ids[first : first + int(trace.full_blocks()[r])]]


def chain_of(ids: list[int]) -> TokenChain:
    """A context whose block `i` is made of the number `ids[i]`: ids stand for whole prefixes, so do hashes."""
    chain = TokenChain(TINY)
    chain.extend(np.repeat(np.array(ids, "<u4"), TINY.block_tokens))
    return chain


class Live:
    """The trace's sessions at a running service."""

    def __init__(self, client: Client, num_slots: int) -> None:
        self.client = client
        client.register(TINY)
        self.pool = HostPool(np.zeros(num_slots * TINY.slot_bytes, np.uint8), TINY.slot_bytes)
        self.open: set[str] = set()

    def use(self, ids: list[int], name: str, stop: Stop) -> int:
        """One request as an engine makes it; returns how many leading blocks were there."""
        session = self.client.session(name, TINY)
        session.chain = chain_of(ids)
        session.turn_start()
        with session.acquire() as lease:
            found = lease.num_blocks if lease is not None else 0
            if stop == Stop.TOOL:
                session.tool_start("bash")
            elif stop == Stop.TURN:
                session.turn_end()
            else:
                session.stopped()
            if found < len(ids):
                session.offload(self.pool, range(len(ids)))
        return found


@pytest.mark.parametrize("policy", ["leaf-lru", "s3-fifo"])
@pytest.mark.parametrize(("make", "capacity"), [(shipped, 1024), (agents, 256)])
def test_a_service_hits_what_its_simulation_hits(tmp_path: Path, policy: str, make: object, capacity: int) -> None:
    trace: Trace = make()  # type: ignore[operator]
    size = capacity * SLOT_ALIGN
    assert TINY.slot_bytes == SLOT_ALIGN
    service = ServiceProcess(tmp_path, dram_bytes=size, nvme_bytes=0, segment_bytes=size, lease_ttl_s=60)
    service.options["dram_policy"] = policy
    replayer = Replayer(policy, capacity, trace.num_blocks)
    service.start()
    try:
        with Client(service.address) as client:
            live = Live(client, int(trace.full_blocks().max()))
            hits = 0
            for r in range(trace.num_requests):
                ids, stop = ids_of(trace, r), Stop(int(trace.stop[r]))
                if not ids:
                    continue
                name = trace.session_names[trace.session[r]]
                expected = replayer.use([replayer.hashes[i] for i in ids], name, Turn(stop, "", -1, False), r + 1)
                assert live.use(ids, name, stop) == expected, f"request {r}"
                hits += expected
            assert 0 < hits < trace.num_references, "something was found, something was evicted"
            for r in range(trace.num_requests):
                ids = ids_of(trace, r)
                there = replayer.machine.match(KEYSPACE, [replayer.hashes[i] for i in ids])
                assert client.match(chain_of(ids)) == there, "the same blocks are there in the end"
    finally:
        service.stop()


def test_what_a_service_announces_is_the_trace_that_was_replayed(tmp_path: Path) -> None:
    trace = agents().head(120)
    service = ServiceProcess(tmp_path, dram_bytes=2048 * SLOT_ALIGN, nvme_bytes=0, segment_bytes=2048 * SLOT_ALIGN)
    service.start()
    try:
        with Client(service.address) as client:
            live = Live(client, int(trace.full_blocks().max()))
            for r in range(trace.num_requests):
                live.use(ids_of(trace, r), trace.session_names[trace.session[r]], Stop(int(trace.stop[r])))
            client.end(trace.session_names[trace.session[-1]])
            recorder, stop = Recorder(sequence=1), threading.Event()  # 1: all that happened since the first event
            thread = threading.Thread(target=follow, args=(client, recorder, stop))
            thread.start()
            wait_for(lambda: recorder.asked and recorder.asked[-1].end, "the last session's end to be announced")
            stop.set()
        thread.join()
    finally:
        service.stop()
    recorded = recorder.trace("recorded", TINY.block_tokens)
    assert recorded.ids.tolist() == trace.ids.tolist() and recorded.offsets.tolist() == trace.offsets.tolist()
    assert [recorded.session_names[s] for s in recorded.session] == [trace.session_names[s] for s in trace.session]
    assert recorded.stop.tolist() == trace.stop.tolist()
    assert recorded.input_tokens.tolist() == trace.input_tokens.tolist()


def test_a_recorded_trace_replayed_hits_what_the_service_hit(tmp_path: Path) -> None:
    """Agents that fork sub-agents, in a tier too small for them: recorded, written, read again and replayed."""
    capacity = 256
    size = capacity * SLOT_ALIGN
    service = ServiceProcess(tmp_path, dram_bytes=size, nvme_bytes=0, segment_bytes=size, lease_ttl_s=60)
    service.options["dram_policy"] = "leaf-lru"
    trace, hits = agents(), []
    service.start()
    try:
        with Client(service.address) as client:
            live = Live(client, int(trace.full_blocks().max()))
            for r in range(trace.num_requests):
                ids, name = ids_of(trace, r), trace.session_names[trace.session[r]]
                hits.append(live.use(ids, name, Stop(int(trace.stop[r]))))
                if r % 60 == 59:
                    client.fork(name, f"{name}-sub-{r}")
                    hits.append(live.use([*ids, 50_000 + r], f"{name}-sub-{r}", Stop.UNKNOWN))
            client.end(name)
            recorder, stop = Recorder(sequence=1), threading.Event()
            thread = threading.Thread(target=follow, args=(client, recorder, stop))
            thread.start()
            wait_for(lambda: any(asked.end for asked in recorder.asked), "the last session's end to be announced")
            stop.set()
        thread.join()
    finally:
        service.stop()
    write_file(recorder.trace("recorded", TINY.block_tokens), tmp_path / "recorded.jsonl.gz")
    recorded = load(tmp_path / "recorded.jsonl.gz")
    assert replay_machine(recorded, "leaf-lru", capacity).hits.tolist() == hits
    assert 0 < sum(hits) < recorded.num_references, "something was found, something was evicted"
    parents = {recorded.session_names[s]: recorded.session_names[p] for s, p in enumerate(recorded.parent) if p >= 0}
    assert len(parents) == 5 and all(child.startswith(f"{parent}-sub-") for child, parent in parents.items())
