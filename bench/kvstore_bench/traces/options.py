"""How to read a trace, and what was left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.source import _read_all, open_packed

HOUR_S = 3600.0


@dataclass(slots=True)
class ReadOptions:
    """`span_s` and `seed` place sessions that carry no arrival time; `block_tokens` 0 means as the format says."""

    span_s: float = 8 * HOUR_S
    seed: int = 7
    block_tokens: int = 0
    tokenizer: str = ""
    is_archive: bool = True
    partial_last: bool = False

    def block_tokens_or(self, found: int) -> int:
        """The block size asked for, or the first one found from now on."""
        if self.block_tokens == 0:
            self.block_tokens = found
        return self.block_tokens

    def single(self, path: Path) -> bytes:
        """The whole of one packed file."""
        with open_packed(path) as stream:
            return _read_all(str(path), stream)


@dataclass(slots=True)
class Skips:
    """Bad records: raised at once, or counted when lenient. Keeps the first few complaints."""

    lenient: bool = False
    count: int = 0
    first: list[str] = field(default_factory=list)

    def take(self, error: TraceError) -> None:
        if not self.lenient:
            raise error
        self.count += 1
        if len(self.first) < 5:
            self.first.append(str(error))
