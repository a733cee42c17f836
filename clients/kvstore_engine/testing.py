"""Help for tests: models that are made in a second, and a store that lives in this process.

The models are random, made from a seed; their bytes go through exactly the code that real ones go through. `Rig` drives
a scheduler turn by turn in the test's own thread.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore.core.events import SignalKind
from kvstore.core.hashing import TokenChain
from kvstore.core.types import Durability
from kvstore.errors import Unavailable
from kvstore_client.layers import LayerGate
from kvstore_engine.config import EngineConfig
from kvstore_engine.executor import Executor
from kvstore_engine.hbm import HbmTable
from kvstore_engine.model import DTYPES, LoadedModel, wrap_model
from kvstore_engine.pool import KVPool
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.scheduler import Scheduler
from kvstore_engine.sequence import EndEvent, Request, RequestEvent, Span, TurnEnd
from kvstore_engine.store import ContextStore, NullStore, PoolStats, RestoreResult, StoreLease

GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "eos_token_id": 0,
}


def tiny_model(config: EngineConfig, seed: int = 0, tokenizer: Any = None, **changes: Any) -> LoadedModel:
    """A random Llama with `TINY`'s shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    causal_lm = LlamaForCausalLM(LlamaConfig(**{**TINY, **changes})).to(DTYPES[config.dtype])
    digest = hashlib.blake2b(f"tiny {seed} {sorted(changes.items())}".encode(), digest_size=32).hexdigest()
    return wrap_model(causal_lm, tokenizer, config, digest, digest)


def tiny_config(**changes: Any) -> EngineConfig:
    """A pool of 64 blocks of 16 tokens, chunks of 32."""
    values: dict[str, Any] = {
        "model": "tiny",
        "block_tokens": 16,
        "chunk_tokens": 32,
        "pool_bytes": 64 * 4096,
        "max_batch": 8,
        "restore_plan": "always",  # a model this small computes as fast as it restores
    }
    return EngineConfig(**{**values, **changes})


def ids_of(n: int, seed: int = 1) -> list[int]:
    """`n` random tokens, from a seed."""
    rng = random.Random(seed)
    return [rng.randrange(1, 512) for _ in range(n)]


class MemoryStore:
    """Keeps blocks in a dictionary. Tests can hold its calls at a gate, make it fail, or make bytes rot.

    `fail` makes every call raise Unavailable; `gate` is waited for before each restore and offload; `rotten` are
    positions whose blocks are reported as bad; `tier` is where blocks are said to come from.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.signals: list[tuple[str, str, str]] = []
        self.fail = False
        self.gate = threading.Event()
        self.gate.set()
        self.rotten: set[int] = set()
        self.tier = "dram"
        self.num_live_leases = 0
        self.num_offloads = 0
        self.last_stats: PoolStats | None = None
        self._lock = threading.Lock()

    def _check(self) -> None:
        if self.fail:
            raise Unavailable("store: away")

    def acquire(self, session: str, chain: TokenChain, num_blocks: int) -> StoreLease | None:
        self._check()
        count = 0
        while count < num_blocks and chain.hash_at(count) in self.blocks:
            count += 1
        if not count:
            return None
        with self._lock:
            self.num_live_leases += 1
        return StoreLease(count, [bytes(chain.hash_at(i)) for i in range(count)])

    def restore(
        self,
        lease: StoreLease,
        first: int,
        last: int,
        pool: KVPool,
        slots: Sequence[int],
        gate: LayerGate | None = None,
    ) -> RestoreResult:
        self.gate.wait()
        self._check()
        hashes: list[bytes] = lease.token  # type: ignore[assignment]
        for count, (index, slot) in enumerate(zip(range(first, last), slots, strict=True)):
            if index in self.rotten:
                return self._result(count)
            pool.host_view()[slot] = np.frombuffer(self.blocks[hashes[index]], dtype=np.uint8)
        return self._result(last - first)

    def _result(self, count: int) -> RestoreResult:
        return RestoreResult(count, count if self.tier == "dram" else 0, count if self.tier == "nvme" else 0)

    def release(self, lease: StoreLease) -> None:
        with self._lock:
            self.num_live_leases -= 1

    def offload(
        self, session: str, chain: TokenChain, last: int, pool: KVPool, slots: Sequence[int], durability: Durability
    ) -> int:
        self.gate.wait()
        self._check()
        for index in range(last):
            self.blocks.setdefault(bytes(chain.hash_at(index)), pool.host_view()[slots[index]].tobytes())
        self.num_offloads += 1
        return last

    def signal(
        self, session: str, kind: SignalKind, tool: str = "", expected_s: float = 0.0, output_tokens: int = 0
    ) -> None:
        self._check()
        self.signals.append((session, kind.name, tool))

    def fork(self, parent: str, session: str) -> None:
        self.signals.append((session, "FORK", parent))

    def end(self, session: str) -> None:
        self.signals.append((session, "END", ""))

    def report(self, stats: PoolStats) -> None:
        self.last_stats = stats

    def close(self) -> None:
        self.gate.set()


class Rig:
    """A scheduler with a tiny model, and a clock that the test can push."""

    def __init__(
        self, store: ContextStore | None = None, slots: int = 64, num_layers: int = 2, **changes: object
    ) -> None:
        self.config: EngineConfig = tiny_config(**changes)
        model = tiny_model(self.config, num_hidden_layers=num_layers)
        self.pool = KVPool(model.keyspace, slots * model.keyspace.slot_bytes, model.device)
        executor = Executor(model, self.pool, self.config.max_batch, 1)
        self.ahead_ns = 0
        clock = lambda: time.monotonic_ns() + self.ahead_ns  # noqa: E731
        self.hbm = HbmTable(self.pool, "leaf-lru", clock)
        self.store = store or NullStore()
        self.scheduler = Scheduler(self.config, executor, self.hbm, self.store, None, model.eos_ids, clock)
        self.events: dict[str, list[RequestEvent]] = {}

    def submit(
        self,
        name: str,
        ids: list[int],
        sampling: SamplingParams = GREEDY,
        session: str = "",
        use_cache: bool = True,
        plan: tuple[Span, ...] | None = None,
        tool: str = "",
    ) -> None:
        """Queue a request; `events[name]` gets what its owner hears."""
        seen = self.events[name] = []
        on_end = lambda text: TurnEnd(tool)  # noqa: E731
        request = Request(name, ids, sampling, seen.append, session, on_end, use_cache=use_cache, plan=plan)
        self.scheduler.submit(request)

    def end_of(self, name: str) -> EndEvent | None:
        """How a request ended; None while it hasn't."""
        last = self.events[name][-1] if self.events[name] else None
        return last if isinstance(last, EndEvent) else None

    def run(self, *names: str) -> list[EndEvent]:
        """Turn until all named requests have ended."""
        for _ in range(2_000):
            ends = [self.end_of(name) for name in names]
            if all(ends):
                return [e for e in ends if e is not None]
            self.scheduler.turn(0.05)
        raise AssertionError(f"no end of {names}")

    def settle(self) -> None:
        """Turn until no transfer runs; then nothing may be claimed."""
        for _ in range(2_000):
            if self.scheduler.quiet:
                self.scheduler.turn()
                break
            self.scheduler.turn(0.05)
        assert self.hbm.num_holds == 0
        self.hbm.machine.check_invariants()

    def forget(self) -> None:
        """Empty the pool's cache by computing something else through all of it."""
        self.settle()
        self.submit("filler", ids_of(self.pool.num_slots * 16 - 1, seed=99), SamplingParams(max_tokens=1))
        self.run("filler")
        self.settle()


class ByteTokenizer:
    """One token a byte, and a chat template that knows only role and content. Token 0 is the end."""

    chat_template = "role: content"

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> str:
        """Each message as `<role>content\\n`."""
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes beyond 255 and the end token have no text."""
        return bytes(i for i in ids if 0 < i < 256).decode(errors="replace")


def save_tiny_model(directory: Path, seed: int = 0) -> None:
    """A tiny random model with a byte-level tokenizer and a chat template, as a directory that any engine can load."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(BPE({"<end>": 0, **{c: i + 1 for i, c in enumerate(alphabet)}}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    tokenizer.save_pretrained(str(directory))
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**TINY)).to(torch.bfloat16).save_pretrained(str(directory))
