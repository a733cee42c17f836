"""Tokens to text, piece by piece, and stop texts that may be cut across pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 6
"""Tokens decoded again before a new one, since a tokenizer may join a token with those before it."""


class TextStream:
    """Turns one request's output tokens into text deltas.

    `tokenizer` needs `decode(ids, skip_special_tokens)`; with None the text stays empty (models without a tokenizer).
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._prefix = 0
        """Where decoding starts, and up to where its text was already taken."""
        self._read = 0
        self._held = ""
        self.text = ""
        """All text released so far; never contains a stop text."""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that `token` makes certain; empty after a stop text was met (`stopped`)."""
        self._tokens.append(token)
        return self._release(self._new_text(), final=False)

    def finish(self) -> str:
        """The rest, broken characters included."""
        return self._release(self._new_text(final=True), final=True)

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _new_text(self, final: bool = False) -> str:
        if self._tokenizer is None:
            return ""
        before = self._decode(self._tokens[self._prefix : self._read])
        after = self._decode(self._tokens[self._prefix :])
        if not final and after.endswith(REPLACEMENT):  # half a character
            return ""
        self._read = len(self._tokens)
        self._prefix = max(self._prefix, self._read - CONTEXT_TOKENS)
        return after[len(before) :]

    def _release(self, new: str, final: bool) -> str:
        if self.stopped:
            return ""
        held = self._held + new
        at = min((i for i in (held.find(s) for s in self._stop) if i >= 0), default=-1)
        if at >= 0:
            self.stopped = True
            out, self._held = held[:at], ""
        else:
            keep = 0 if final else partial_stop(held, self._stop)
            out, self._held = held[: len(held) - keep], held[len(held) - keep :]
        self.text += out
        return out


def partial_stop(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `stops`."""
    longest = 0
    for stop in stops:
        for n in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:n]):
                longest = n
                break
    return longest
