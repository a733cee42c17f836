"""Logits to a token: greedy, or temperature and nucleus with a generator of the request's own."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch

from kvstore.errors import InvalidField


@dataclass(frozen=True)
class SamplingParams:
    """How to choose and when to stop. Raises InvalidField on construction."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        check("max_tokens", self.max_tokens >= 1, self.max_tokens, "use 1 or more")
        check("temperature", 0.0 <= self.temperature <= 2.0, self.temperature, "use 0 to 2")
        check("top_p", 0.0 < self.top_p <= 1.0, self.top_p, "use a number above 0 and up to 1")
        check("stop", len(self.stop) <= 4 and all(self.stop), list(self.stop), "use up to 4 non-empty strings")
        check("seed", self.seed is None or abs(self.seed) < 2**63, self.seed, "use a 64-bit integer")


def check(field: str, holds: bool, value: object, mend: str) -> None:
    """Raises InvalidField unless `holds`."""
    if not holds:
        raise InvalidField(field, f"{value!r} is out of range", mend)


class Sampler:
    """Chooses one request's tokens. The same seed and logits give the same tokens, whoever else is in the batch."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        self._generator.manual_seed(params.seed if params.seed is not None else secrets.randbits(62))

    def choose(self, logits: torch.Tensor) -> int:
        """`logits` float32 `[vocab]`."""
        if self._params.temperature == 0.0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.cpu() / self._params.temperature, -1)
        if self._params.top_p < 1.0:
            probabilities = nucleus(probabilities, self._params.top_p)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero everything outside the smallest set of most likely tokens that holds `top_p` of the mass."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ordered[before >= top_p] = 0.0
    return torch.zeros_like(probabilities).scatter_(0, order, ordered)
