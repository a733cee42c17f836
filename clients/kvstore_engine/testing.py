"""Help for tests: models that are made in a second, and a store that lives in this process.

The models are random, made from a seed; their bytes go through exactly the code that real ones go through.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvstore.core.events import SignalKind
from kvstore.core.hashing import TokenChain
from kvstore.core.types import Durability
from kvstore.errors import Unavailable
from kvstore_engine.config import EngineConfig
from kvstore_engine.model import DTYPES, LoadedModel, wrap_model
from kvstore_engine.pool import KVPool
from kvstore_engine.store import PoolStats, RestoreResult, StoreLease

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

    def restore(self, lease: StoreLease, first: int, last: int, pool: KVPool, slots: Sequence[int]) -> RestoreResult:
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
