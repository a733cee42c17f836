"""Text to blocks: chained hashes over fixed runs of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash

from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.model import I64

STAND_IN_BYTES = 4

Encode = Callable[[str], Any]


class Blocks:
    """Cuts texts into blocks of `block_tokens`. Without a tokenizer 4 bytes stand in for a token."""

    def __init__(self, tokenizer: str, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._encode: Encode | None = load_tokenizer(tokenizer) if tokenizer else None

    @property
    def note(self) -> str:
        """What a report must say about token counts; empty with a real tokenizer."""
        return "" if self._encode else f"tokens are estimated: {STAND_IN_BYTES} bytes of UTF-8 each (no --tokenizer)"

    def count(self, text: str) -> int:
        if self._encode is not None:
            return len(self._encode(text))
        return len(text.encode("utf-8", "replace")) // STAND_IN_BYTES

    def of(self, text: str) -> tuple[I64, int]:
        """(ids of the full blocks, number of tokens)."""
        if self._encode is not None:
            data, unit = np.asarray(self._encode(text), np.uint32).tobytes(), 4
        else:
            data, unit = text.encode("utf-8", "replace"), STAND_IN_BYTES
        step, out, digest = self.block_tokens * unit, [], 0
        for start in range(0, len(data) - step + 1, step):
            digest = xxhash.xxh3_64_intdigest(data[start : start + step], seed=digest)
            out.append(digest)
        return np.array(out, np.uint64).view(np.int64), len(data) // unit


def load_tokenizer(name: str) -> Encode:
    """The encoder of a tokenizer folder or name. Raises TraceError when it can't be loaded."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise TraceError(name, "tokenizers need transformers", mend="pip install transformers") from None
    try:
        loaded: Any = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(name, f"isn't a tokenizer: {first}", mend="name a folder with tokenizer.json") from None
    return lambda text: loaded.encode(text, add_special_tokens=False)
