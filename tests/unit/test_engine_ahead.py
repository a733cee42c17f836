"""The chunk behind a restore that is still on its way: it counts when every byte was right, and leaves no trace if not.

The store brings a layer's bytes at the moment when somebody waits for that layer, and the rest when it's let go. Until
then NaN lies in the slots. Logits are compared as digests of their bytes.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from kvstore.errors import Unavailable
from kvstore_client.layers import LayerGate
from kvstore_engine import device, restores
from kvstore_engine import scheduler as scheduler_module
from kvstore_engine.config import Attention
from kvstore_engine.executor import Executor, Work
from kvstore_engine.pool import KVPool
from kvstore_engine.sampling import Sampler, SamplingParams
from kvstore_engine.sequence import EndEvent
from kvstore_engine.store import RestoreResult, StoreLease
from kvstore_engine.testing import GREEDY, MemoryStore, Rig, ids_of, tiny_config, tiny_model

NUM_LAYERS = 4
NAN = 0xFF


class LayeredStore(MemoryStore):
    """Blocks come by layers. `rest`: cleared, a restore waits before it brings what nobody waited for; `start`: before
    it tells of any layer.

    `num_told`: layers that the engine hears of. `rotten_layers` come with other bytes than they should from block
    `bad_block` on (counted from the first that is restored), and the verdict says so. `fail_after_layer`: what was
    asked for last when the store breaks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.start, self.rest = threading.Event(), threading.Event()
        self.start.set()
        self.rest.set()
        self.num_told = NUM_LAYERS
        self.rotten_layers: set[int] = set()
        self.bad_block = 0
        self.fail_after_layer = -1
        self.asked = [threading.Event() for _ in range(NUM_LAYERS)]
        self.gates: list[LayerGate | None] = []

    def restore(
        self,
        lease: StoreLease,
        first: int,
        last: int,
        pool: KVPool,
        slots: Sequence[int],
        gate: LayerGate | None = None,
    ) -> RestoreResult:
        self.gates.append(gate)
        if gate is None:
            return super().restore(lease, first, last, pool, slots)
        hashes: list[bytes] = lease.token  # type: ignore[assignment]
        blocks = [np.frombuffer(self.blocks[h], dtype=np.uint8) for h in hashes[first:last]]
        for slot in slots:
            pool.fill(slot, NAN)
        assert self.start.wait(60)
        told = gate.part(last - first)
        write = partial(self._write, pool, blocks, list(slots))
        for layer in range(self.num_told):
            told(layer + 1, partial(write, layer))
        if self.fail_after_layer >= 0:
            assert self.asked[self.fail_after_layer].wait(60)
            raise Unavailable("store: away")
        assert self.rest.wait(60)
        self._check()
        for layer in range(NUM_LAYERS):
            write(layer)
        return self._result(self.bad_block if self.rotten_layers else last - first)

    def _write(self, pool: KVPool, blocks: list[np.ndarray], slots: list[int], layer: int) -> None:
        size = pool.keyspace.slice_bytes
        part = slice(layer * size, (layer + 1) * size)
        for index, (block, slot) in enumerate(zip(blocks, slots, strict=True)):
            rot = layer in self.rotten_layers and index >= self.bad_block
            pool.host_view()[slot][part] = block[part] ^ (1 if rot else 0)
        self.asked[layer].set()


class RecordingSampler(Sampler):
    """Digests of all logits that a request's tokens were chosen from."""

    made: list[RecordingSampler]

    def __init__(self, params: SamplingParams) -> None:
        super().__init__(params)
        self.digests: list[str] = []
        self.made.append(self)

    def choose(self, logits: torch.Tensor) -> int:
        self.digests.append(hashlib.sha256(logits.numpy().tobytes()).hexdigest())
        return super().choose(logits)


@pytest.fixture(autouse=True)
def _arena_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools as on a device, in memory that the store can write into; patience that no test runs out of by chance."""
    RecordingSampler.made = []
    monkeypatch.setattr(scheduler_module, "Sampler", RecordingSampler)
    monkeypatch.setattr(device, "ON_ARENA", {"cpu", "cuda"})
    monkeypatch.setattr(restores, "AHEAD_WAIT_S", 3600.0)


def rig_on(store: LayeredStore, slots: int = 20, **changes: object) -> Rig:
    return Rig(store, slots, NUM_LAYERS, **changes)


def compute(rig: Rig, ids: list[int], **options: object) -> tuple[EndEvent, list[str]]:
    """A request from its start to its end, and the digests of its logits."""
    name = f"r{len(rig.events)}"
    rig.submit(name, ids, **options)  # type: ignore[arg-type]
    (end,) = rig.run(name)
    return end, RecordingSampler.made[-1].digests


def computed(end: EndEvent, ids: list[int]) -> list[str]:
    """Digests of an engine without a store that computes with the same cuts."""
    assert end.plan is not None
    again, digests = compute(rig_on(LayeredStore(), slots=40), ids, use_cache=False, plan=end.plan)
    assert again.tokens == end.tokens
    return digests


def forgotten(store: LayeredStore, ids: list[int], slots: int = 20, **changes: object) -> tuple[Rig, EndEvent]:
    """An engine that computed `ids` once, and has them in its store only."""
    rig = rig_on(store, slots, **changes)
    first, _ = compute(rig, ids)
    rig.forget()
    assert rig.scheduler.counters.num_ahead == 0
    store.gates.clear()
    return rig, first


def turn_until(rig: Rig, what: Callable[[], bool]) -> None:
    for _ in range(2_000):
        if what():
            return
        rig.scheduler.turn(0.05)
    raise AssertionError("it never came")


def begun_ahead(rig: Rig, store: LayeredStore, ids: list[int], **options: object) -> None:
    """Submit "b", and turn until its chunk was computed while the restore is held."""
    store.rest.clear()
    rig.submit("b", ids, **options)  # type: ignore[arg-type]
    turn_until(rig, lambda: rig.scheduler.counters.num_ahead == 1)
    rig.scheduler.turn()
    assert rig.scheduler.counters.num_ahead == 1  # one try for each restore


def settled(rig: Rig, store: LayeredStore) -> None:
    store.rest.set()
    rig.settle()
    assert store.num_live_leases == 0


@pytest.mark.parametrize("num_tokens", [49, 50, 64, 65, 97, 100, 129, 150])
def test_computed_ahead_restored_whole_and_computed_are_the_same_bits(num_tokens: int) -> None:
    """From one token behind the restored blocks to several chunks."""
    ids = ids_of(num_tokens)
    store = LayeredStore()
    rig, first = forgotten(store, ids)
    begun_ahead(rig, store, ids)
    (job,) = rig.scheduler.restoring
    assert job.ahead is not None and job.hold is not None and job.hold.num_sealed == 0  # held, and nobody knows of it
    assert rig.events["b"] == [] and RecordingSampler.made[-1].digests == []
    store.rest.set()
    (ahead,) = rig.run("b")
    by_layers = RecordingSampler.made[-1].digests
    assert ahead.usage.dram_tokens == (num_tokens - 1) // 16 * 16
    assert ahead.usage.dram_tokens + ahead.usage.computed_tokens == num_tokens
    assert (rig.scheduler.counters.num_ahead, rig.scheduler.counters.num_ahead_dropped) == (1, 0)
    settled(rig, store)

    plain = LayeredStore()
    other, _ = forgotten(plain, ids, layerwise_restore="off")
    whole, at_once = compute(other, ids)
    assert plain.gates == [None] and whole.usage.dram_tokens == ahead.usage.dram_tokens
    assert ahead.tokens == whole.tokens == first.tokens
    assert ahead.plan == whole.plan
    assert by_layers == at_once == computed(ahead, ids)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("kind", ["exact", "paged"])
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_every_attention_asks_before_it_touches_a_layer(kind: Attention, num_tokens: int) -> None:
    config = tiny_config()
    model = tiny_model(config, num_hidden_layers=NUM_LAYERS)
    pool = KVPool(model.keyspace, 4 * model.keyspace.slot_bytes, model.device)
    executor = Executor(model, pool, 8, 1, kind)
    work = Work(ids_of(num_tokens), 0, [2, 1])
    asked: list[int] = []

    def before_layer(layer: int) -> None:
        assert not pool.layer(layer).any()
        if layer == 2:
            raise Unavailable("it won't come")
        asked.append(layer)

    with pytest.raises(Unavailable):
        executor.prefill(work, before_layer)
    assert asked == [0, 1]
    assert [bool(pool.layer(layer).any()) for layer in range(NUM_LAYERS)] == [True, True, False, False]
    executor.prefill(work)
    assert all(pool.layer(layer).any() for layer in range(NUM_LAYERS))


def test_a_layer_that_is_not_waited_for_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail."""
    ids = ids_of(100)
    store = LayeredStore()
    rig, _ = forgotten(store, ids)
    monkeypatch.setattr(LayerGate, "before_layer", lambda gate, layer: None)
    begun_ahead(rig, store, ids)
    store.rest.set()
    rig.run("b")
    assert RecordingSampler.made[-1].digests[0] != computed_first(ids)
    settled(rig, store)


def computed_first(ids: list[int]) -> str:
    cuts = tuple((at, min(at + 32, len(ids))) for at in range(0, len(ids), 32))
    return compute(rig_on(LayeredStore(), slots=40), ids, use_cache=False, plan=cuts)[1][0]


@pytest.mark.parametrize("bad_block", [0, 3])
def test_wrong_bytes_in_the_last_layer_reach_no_answer(bad_block: int) -> None:
    ids = ids_of(100)
    store = LayeredStore()
    rig, first = forgotten(store, ids)
    store.rotten_layers, store.bad_block = {NUM_LAYERS - 1}, bad_block
    begun_ahead(rig, store, ids)
    store.rest.set()
    (second,) = rig.run("b")
    digests = RecordingSampler.made[-1].digests
    assert second.usage.dram_tokens == bad_block * 16
    assert (rig.scheduler.counters.num_ahead, rig.scheduler.counters.num_ahead_dropped) == (1, 1)
    assert second.tokens == first.tokens
    assert digests == computed(second, ids)
    settled(rig, store)


@pytest.mark.parametrize("what", ["late", "cancelled", "timeout"])
def test_given_up_in_the_middle_it_leaves_nothing_behind(what: str) -> None:
    ids = ids_of(100)
    store = LayeredStore()
    rig, first = forgotten(store, ids)
    begun_ahead(rig, store, ids)
    hold = rig.scheduler.restoring[0].hold
    assert hold is not None
    slots = list(hold.slots)
    if what == "cancelled":
        assert rig.scheduler.cancel("b")
    else:
        rig.ahead_ns += (10 if what == "late" else 601) * 10**9
    (end,) = rig.run("b")
    assert (rig.scheduler.counters.num_ahead, rig.scheduler.counters.num_ahead_dropped) == (1, 1)
    if what == "late":
        assert end.usage.cached_tokens == 0
        assert end.tokens == first.tokens
        assert RecordingSampler.made[-1].digests == computed(end, ids)
    else:
        assert (end.reason, end.tokens) == (what, ())
    assert hold.slots == slots  # the transfer may still write
    settled(rig, store)
    assert not hold.slots


@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 2])
def test_a_store_that_breaks_between_layers_ends_the_wait(layer: int) -> None:
    """The engine waits for a layer that nobody will tell it of; the end of the restore lets it go."""
    ids = ids_of(100)
    store = LayeredStore()
    rig, first = forgotten(store, ids)
    store.num_told, store.fail_after_layer = layer + 1, layer
    second, digests = compute(rig, ids)
    assert (rig.scheduler.counters.num_ahead, rig.scheduler.counters.num_ahead_dropped) == (1, 1)
    assert second.usage.cached_tokens == 0
    assert second.tokens == first.tokens
    assert digests == computed(second, ids)
    settled(rig, store)


@pytest.mark.parametrize("then", ["good", "late"])
def test_layers_that_nobody_tells_of_cost_no_more_than_patience(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever tells has died, or is slow. The restore itself may still end well."""
    ids = ids_of(100)
    store = LayeredStore()
    rig, first = forgotten(store, ids)
    monkeypatch.setattr(restores, "AHEAD_WAIT_S", 0.001)
    store.num_told = 2
    begun_ahead(rig, store, ids)
    assert rig.scheduler.counters.num_ahead_dropped == 1
    assert rig.scheduler.restoring[0].ahead is None
    if then == "good":
        store.rest.set()
    else:
        rig.ahead_ns += 10 * 10**9
    (second,) = rig.run("b")
    assert second.usage.cached_tokens == (96 if then == "good" else 0)
    assert second.tokens == first.tokens
    assert RecordingSampler.made[-1].digests == computed(second, ids)
    settled(rig, store)


def test_blocks_that_the_store_lacks_are_computed_behind_the_chunk() -> None:
    """It holds only the beginning of what could be restored; the chunk begins there."""
    ids = ids_of(70)
    longer = [*ids, *ids_of(80, seed=4)]
    store = LayeredStore()
    rig, _ = forgotten(store, ids)
    begun_ahead(rig, store, longer)
    store.rest.set()
    (second,) = rig.run("b")
    assert second.usage.dram_tokens == 64
    assert rig.scheduler.counters.num_ahead_dropped == 0
    assert RecordingSampler.made[-1].digests == computed(second, longer)
    settled(rig, store)


def test_an_engine_with_other_work_asks_for_whole_blocks() -> None:
    ids = ids_of(100)
    store = LayeredStore()
    rig, first = forgotten(store, ids, slots=40)
    rig.submit("other", ids_of(40, seed=7), SamplingParams(max_tokens=60, ignore_eos=True), use_cache=False)
    turn_until(rig, lambda: bool(rig.scheduler.running))
    second, _ = compute(rig, ids)
    assert store.gates == [None]
    assert second.usage.dram_tokens == 96 and second.tokens == first.tokens
    rig.run("other")
    settled(rig, store)


def test_work_that_comes_meanwhile_goes_first() -> None:
    """The engine's thread isn't there to wait for layers while somebody else could run."""
    ids = ids_of(100)
    store = LayeredStore()
    rig, first = forgotten(store, ids, slots=40)
    store.start.clear()
    store.rest.clear()
    rig.submit("b", ids)
    turn_until(rig, lambda: bool(store.gates))
    rig.submit("other", ids_of(40, seed=7), SamplingParams(max_tokens=60, ignore_eos=True), use_cache=False)
    turn_until(rig, lambda: bool(rig.scheduler.running))
    store.start.set()
    (gate,) = store.gates
    assert gate is not None
    turn_until(rig, lambda: gate.open)
    for _ in range(5):
        rig.scheduler.turn()
    assert rig.scheduler.running and rig.scheduler.counters.num_ahead == 0
    rig.run("other")
    turn_until(rig, lambda: rig.scheduler.counters.num_ahead == 1)
    store.rest.set()
    (second,) = rig.run("b")
    assert second.tokens == first.tokens
    settled(rig, store)


def test_the_front_is_computed_before_the_chunk_behind_the_restore() -> None:
    """A split restore: front computed, middle restored by layers, the chunk behind it ahead of the verdict."""
    ids = ids_of(400)
    store = LayeredStore()
    rig, first = forgotten(store, ids, slots=40)
    rig.scheduler.rates._always = False
    for _ in range(50):
        rig.scheduler.rates.compute.sample(0, 32, 0.2)
        rig.scheduler.rates.restore.sample(10, 0, 1.0)
    begun_ahead(rig, store, ids)
    (job,) = rig.scheduler.restoring
    assert 0 < job.front_end <= job.num_computed < job.restore_end == 384
    store.rest.set()
    (second,) = rig.run("b")
    assert rig.scheduler.counters.num_restores_split == 1
    assert 0 < second.usage.dram_tokens < 384
    assert second.tokens == first.tokens
    assert RecordingSampler.made[-1].digests == computed(second, ids)
    settled(rig, store)


def test_a_plan_that_would_write_over_what_is_restored_waits() -> None:
    ids = ids_of(100)
    store = LayeredStore()
    rig, first = forgotten(store, ids)
    second, _ = compute(rig, ids, plan=((0, 50), (50, 100)))
    assert store.gates != [None]
    assert rig.scheduler.counters.num_ahead == 0
    assert second.usage.dram_tokens == 96 and len(second.tokens) == len(first.tokens)
    settled(rig, store)


def test_whatever_comes_in_between_the_answers_are_right() -> None:
    """Requests, cancels, rot and late restores in any order; every answer is what a fresh engine says."""
    said: dict[int, tuple[int, ...]] = {}
    for seed in range(6):
        rng = random.Random(seed)
        store = LayeredStore()
        rig = rig_on(store, slots=24)
        asked: dict[str, int] = {}
        for step in range(60):
            store.rotten_layers = {rng.randrange(NUM_LAYERS)} if rng.random() < 0.2 else set()
            store.bad_block = rng.randrange(3)
            (store.rest.set if rng.random() < 0.7 else store.rest.clear)()
            if len([n for n in asked if rig.end_of(n) is None]) < 3 and rng.random() < 0.5:
                asked[name := f"{seed}-{step}"] = which = rng.randrange(5)
                rig.submit(name, ids_of(40 + 17 * which, seed=which), session=f"s{which}")
            if rng.random() < 0.1 and asked:
                rig.scheduler.cancel(rng.choice(list(asked)))
            if rng.random() < 0.1:
                rig.ahead_ns += 6 * 10**9
            for _ in range(rng.randrange(4)):
                rig.scheduler.turn(0.01)
        store.rest.set()
        rig.run(*asked)
        for name, which in asked.items():
            end = rig.end_of(name)
            assert end is not None
            if end.reason == "length":
                assert end.tokens == said.setdefault(which, end.tokens)
        settled(rig, store)
    for which, tokens in said.items():
        fresh, _ = compute(rig_on(LayeredStore()), ids_of(40 + 17 * which, seed=which))
        assert fresh.tokens == tokens and len(tokens) == GREEDY.max_tokens
