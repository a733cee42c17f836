"""Engine and service together: what is restored, from wherever and after whatever, continues with the same bits.

A tiny random model, a real service process. Logits are compared as digests of their bytes.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvstore.core.keyspace import Keyspace
from kvstore.testing.service import ServiceProcess
from kvstore_client import client
from kvstore_client.layers import LayerGate
from kvstore_engine import device, restores
from kvstore_engine import scheduler as scheduler_module
from kvstore_engine.client_store import ServiceStore
from kvstore_engine.config import EngineConfig
from kvstore_engine.engine import Engine
from kvstore_engine.sampling import Sampler, SamplingParams
from kvstore_engine.sequence import EndEvent, TurnEnd
from kvstore_engine.store import NullStore
from kvstore_engine.testing import TINY, tiny_config, tiny_model
from kvstore_gpu import hand
from kvstore_gpu.arena import Arena, PoolSpec
from kvstore_gpu.testing import Behind, LateCopies, Pinning

MIB = 1 << 20
GREEDY = SamplingParams(max_tokens=6, ignore_eos=True)
CONFIG = tiny_config(pool_bytes=40 * 4096, restore_timeout_s=20, offload_timeout_s=20)


class RecordingSampler(Sampler):
    """Digests of all logits that tokens were chosen from, in order of requests' creation."""

    made: list[RecordingSampler]

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self.digests: list[str] = []
        self.made.append(self)

    def choose(self, logits: torch.Tensor) -> int:
        self.digests.append(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
        return super().choose(logits)


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RecordingSampler]:
    RecordingSampler.made = []
    monkeypatch.setattr(scheduler_module, "Sampler", RecordingSampler)
    return RecordingSampler.made


@pytest.fixture(params=["host pool", "arena"])
def pools(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways that blocks get into a pool: in place, and by the hand of a device.

    The device is host memory that nobody but its hand addresses, and that only pinned memory is copied to and from.
    """
    if request.param == "arena":
        monkeypatch.setattr(device, "ON_ARENA", {"cpu", "cuda"})
        monkeypatch.setattr(device, "make_arena", behind)
        monkeypatch.setattr(device, "choose_path", lambda hand, folder: None)  # without a driver cuFile may hang
    return str(request.param)


def behind(keyspace: Keyspace, num_slots: int, _: torch.device) -> Arena:
    spec = PoolSpec(num_slots, keyspace.num_layers, keyspace.slice_bytes)
    return Behind.create(spec, backend=Pinning())


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ServiceProcess]:
    process = ServiceProcess(tmp_path, dram_bytes=MIB, nvme_bytes=32 * MIB, segment_bytes=MIB // 4, lease_ttl_s=1)
    process.options["dram_policy"] = "leaf-lru"  # what sinks is then plain to see
    process.start()
    yield process
    process.stop()


def engine_on(service: ServiceProcess | None, config: EngineConfig = CONFIG) -> Engine:
    model = tiny_model(config)
    if service is None:
        return Engine(config, model, NullStore())
    store = ServiceStore(
        service.address,
        model.keyspace,
        restore_timeout_s=config.restore_timeout_s,
        offload_timeout_s=config.offload_timeout_s,
        device=model.device,
    )
    return Engine(config, model, store)


def ids_of(n: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 512) for _ in range(n)]


def turn(engine: Engine, ids: list[int], session: str = "", tool: str = "") -> EndEvent:
    end = engine.generate(ids, GREEDY, session=session, on_end=lambda text: TurnEnd(tool))
    assert engine.wait_quiet(60)
    return end


def forget(engine: Engine, seed: int = 99) -> None:
    """Fill the pool, and thus the local cache, with something else."""
    turn(engine, ids_of(engine.pool.num_slots * 16 - 8, seed), session=f"filler-{seed}")


def fresh_digests(end: EndEvent, ids: list[int]) -> list[str]:
    """Logits of a run without a store that computes with the same boundaries."""
    assert end.plan is not None
    with engine_on(None) as engine:
        again = engine.generate(ids, GREEDY, use_cache=False, plan=end.plan)
    assert again.tokens == end.tokens
    assert again.usage.cached_tokens == 0
    return RecordingSampler.made[-1].digests


def test_restored_from_each_tier_equals_fresh_compute(
    pools: str, service: ServiceProcess, recorded: list[RecordingSampler]
) -> None:
    with engine_on(service) as engine:
        first = turn(engine, ids_of(200, 1), session="a", tool="bash")
        longer = [*ids_of(200, 1), *first.tokens, *ids_of(30, 2)]

        hbm = turn(engine, longer, session="a", tool="bash")
        assert (hbm.usage.hbm_tokens, hbm.usage.dram_tokens, hbm.usage.nvme_tokens) == (192, 0, 0)
        in_hbm = recorded[-1].digests
        assert in_hbm == fresh_digests(hbm, longer)

        forget(engine)
        dram = turn(engine, longer, session="a")  # idle now: first among those that sink
        assert dram.usage.dram_tokens == 224
        in_dram = recorded[-1].digests

        for seed in range(100, 110):  # 10 x 39 blocks of 4 KiB through 1 MiB of DRAM
            forget(engine, seed)
        nvme = turn(engine, longer)  # no session, so that nothing is prefetched to DRAM first
        assert nvme.usage.nvme_tokens > 0
        assert nvme.usage.nvme_tokens + nvme.usage.dram_tokens == 224
        in_nvme = recorded[-1].digests

        assert in_dram == in_nvme == fresh_digests(nvme, longer)
        assert hbm.tokens == dram.tokens == nvme.tokens
        counters = engine.counters
        assert counters.restored_blocks_dram > 0 and counters.restored_blocks_nvme > 0


def test_a_new_engine_and_a_restarted_service_continue_the_session(
    service: ServiceProcess, recorded: list[RecordingSampler]
) -> None:
    ids = ids_of(200, 1)
    with engine_on(service) as engine:
        first = turn(engine, ids, session="a", tool="bash")
    service.kill()
    service.start()
    longer = [*ids, *first.tokens, *ids_of(30, 2)]
    with engine_on(service) as engine:
        second = turn(engine, longer, session="a")
        assert second.usage.nvme_tokens + second.usage.dram_tokens == 192
    restored = recorded[-1].digests
    assert first.plan is not None
    # The new engine doesn't know how the first one cut its chunks; the test does.
    cuts = tuple(s for s in first.plan if s[0] < 192)
    with engine_on(None) as engine:
        again = engine.generate(longer, GREEDY, use_cache=False, plan=(*cuts, (192, 224), (224, len(longer))))
    assert again.tokens == second.tokens
    assert recorded[-1].digests == restored


def test_fork_and_supersession_give_the_bits_of_fresh_compute(
    service: ServiceProcess, recorded: list[RecordingSampler]
) -> None:
    ids = ids_of(160, 1)
    with engine_on(service) as engine:
        turn(engine, ids, session="parent", tool="agent")
        forget(engine)
        engine.fork_session("parent", "child")
        forked = turn(engine, [*ids, *ids_of(40, 3)], session="child")
        assert forked.usage.dram_tokens + forked.usage.nvme_tokens == 160
        assert recorded[-1].digests == fresh_digests(forked, [*ids, *ids_of(40, 3)])

        forget(engine, 98)
        compacted = [*ids[:64], *ids_of(50, 4)]  # the context was cut and continued otherwise
        superseded = turn(engine, compacted, session="parent")
        assert superseded.usage.cached_tokens == 64
        assert recorded[-1].digests == fresh_digests(superseded, compacted)


def test_eight_restored_together_equal_each_alone(service: ServiceProcess, recorded: list[RecordingSampler]) -> None:
    config = tiny_config(pool_bytes=100 * 4096, restore_timeout_s=20, offload_timeout_s=20)
    prompts = {f"s{i}": ids_of(100 + 9 * i, 50 + i) for i in range(8)}
    with engine_on(service, config) as engine:
        for session, ids in prompts.items():
            turn(engine, ids, session=session, tool="bash")
        forget(engine)
        streams = {s: engine.stream(ids, GREEDY, session=s) for s, ids in prompts.items()}
        together: dict[str, EndEvent] = {}
        for session, stream in streams.items():
            together[session] = next(e for e in stream if isinstance(e, EndEvent))
        batch = {s: sampler.digests for s, sampler in zip(prompts, recorded[-8:], strict=True)}
        assert all(end.usage.cached_tokens > 0 for end in together.values())
    for session, ids in prompts.items():
        assert fresh_digests(together[session], ids) == batch[session]


def test_kill_of_the_service_costs_time_and_nothing_else(pools: str, service: ServiceProcess) -> None:
    ids = ids_of(200, 1)
    with engine_on(service) as engine:
        first = turn(engine, ids, session="a", tool="bash")
        service.kill()
        forget(engine)
        second = turn(engine, ids, session="a", tool="bash")
        assert second.usage.cached_tokens == 0
        assert second.tokens == first.tokens
        service.start()
        for _ in range(600):  # the client comes back by itself
            forget(engine)
            third = turn(engine, ids, session="a", tool="bash")
            assert third.tokens == first.tokens
            if third.usage.cached_tokens:
                break
        assert third.usage.nvme_tokens + third.usage.dram_tokens == 192


# ---- by layers


@pytest.fixture(params=range(3))
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools whose layers come one by one, in any order that events leave free, and only when they are waited for."""

    def make(keyspace: Keyspace, num_slots: int, _: torch.device) -> Arena:
        spec = PoolSpec(num_slots, keyspace.num_layers, keyspace.slice_bytes)
        return Behind.create(spec, backend=LateCopies(request.param))

    monkeypatch.setattr(device, "ON_ARENA", {"cpu", "cuda"})
    monkeypatch.setattr(device, "make_arena", make)
    monkeypatch.setattr(device, "choose_path", lambda hand, folder: None)
    monkeypatch.setattr(hand, "GROUP_BYTES", 1)
    monkeypatch.setattr(restores, "AHEAD_WAIT_S", 3600.0)


def ahead_of_the_verdict(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> tuple[EndEvent, list[int], list[str]]:
    """A turn that the service has in DRAM; the verdict on what it restores is held until the chunk behind it was
    computed. Its end, its prompt, digests of its logits."""
    ids = ids_of(200, 1)
    first = turn(engine, ids, session="a", tool="bash")
    forget(engine)
    longer = [*ids, *first.tokens, *ids_of(30, 2)]
    assert engine.pool.arena is not None
    backend = engine.pool.arena.backend
    assert isinstance(backend, LateCopies)
    compute = scheduler_module.Scheduler._compute_ahead

    def then_let_go(scheduler: scheduler_module.Scheduler) -> None:
        compute(scheduler)
        if scheduler.counters.num_ahead and not backend.rest.is_set():
            backend.rest.set()

    monkeypatch.setattr(scheduler_module.Scheduler, "_compute_ahead", then_let_go)
    backend.rest.clear()
    end = turn(engine, longer, session="a")
    return end, longer, RecordingSampler.made[-1].digests


def test_computed_while_its_layers_come_is_the_same_bits(
    late: None, service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_on(service) as engine:
        end, ids, digests = ahead_of_the_verdict(engine, monkeypatch)
        assert (engine.counters.num_ahead, engine.counters.num_ahead_dropped) == (1, 0)
        assert end.usage.dram_tokens == 192
        assert end.usage.computed_tokens == len(ids) - 192
    assert digests == fresh_digests(end, ids)


def test_by_layers_in_several_batches_is_the_same_bits(
    late: None, service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are located and moved a few at a time; whether a chunk begins before the last of them is up to chance."""
    monkeypatch.setattr(client, "PAGE_BLOCKS", 5)
    with engine_on(service) as engine:
        for number in range(4):
            ids = [*ids_of(200, 1), *ids_of(10 * number, 2)]
            turn(engine, ids, session="a", tool="bash")
            forget(engine)
            end = turn(engine, ids, session="a", tool="bash")
            assert end.usage.dram_tokens >= 192
            digests = RecordingSampler.made[-1].digests
            assert digests == fresh_digests(end, ids)
            forget(engine)


def test_layers_that_nobody_waits_for_are_seen(
    late: None, service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    monkeypatch.setattr(LayerGate, "before_layer", lambda gate, layer: None)
    with engine_on(service) as engine:
        end, ids, digests = ahead_of_the_verdict(engine, monkeypatch)
    assert end.plan is not None
    with engine_on(None) as engine:
        engine.generate(ids, GREEDY, use_cache=False, plan=end.plan)
    assert RecordingSampler.made[-1].digests[0] != digests[0]


def before_the_last_layer(monkeypatch: pytest.MonkeyPatch, what: Callable[[], object]) -> None:
    """Do it when all other layers have been used, and that one isn't on its way yet."""
    wait = LayerGate.before_layer

    def before_layer(gate: LayerGate, layer: int) -> None:
        if layer == TINY["num_hidden_layers"] - 1:
            what()
        wait(gate, layer)

    monkeypatch.setattr(LayerGate, "before_layer", before_layer)


def test_rot_in_the_last_layer_reaches_no_answer(
    late: None, service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_on(service) as engine:
        store = engine.store
        assert isinstance(store, ServiceStore)

        def rot() -> None:
            """What the client restores from is the service's memory."""
            shared = store._connected()._attached().arena.array
            size = engine.keyspace.slice_bytes
            shared[(engine.keyspace.num_layers - 1) * size :: engine.pool.stride] ^= 1

        before_the_last_layer(monkeypatch, rot)
        end, ids, digests = ahead_of_the_verdict(engine, monkeypatch)
        assert (engine.counters.num_ahead, engine.counters.num_ahead_dropped) == (1, 1)
        assert end.usage.cached_tokens == 0
    assert digests == fresh_digests(end, ids)


def test_a_service_killed_between_layers_reaches_no_answer(
    late: None, service: ServiceProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had promised lies in memory that outlives it, and is judged like any other bytes."""
    with engine_on(service) as engine:
        before_the_last_layer(monkeypatch, service.kill)
        end, ids, digests = ahead_of_the_verdict(engine, monkeypatch)
        assert engine.counters.num_ahead == 1
    assert digests == fresh_digests(end, ids)
