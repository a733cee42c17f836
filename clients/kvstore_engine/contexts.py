"""Sessions as the engine knows them: the token chain of each context, and whether its agent waits for a tool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.core.events import SignalKind
from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace

NUM_MAX = 10_000
"""Chains kept; a session beyond that is hashed anew when it comes back."""


@dataclass
class Context:
    """One session. `tool` is the tool it waits for, "" when none."""

    chain: TokenChain
    tool: str = ""


class Contexts:
    """Chains by session id, those used last."""

    def __init__(self, keyspace: Keyspace, num_max: int = NUM_MAX) -> None:
        self._keyspace = keyspace
        self._max = num_max
        self._held: OrderedDict[str, Context] = OrderedDict()

    def __contains__(self, session: str) -> bool:
        return session in self._held

    def __len__(self) -> int:
        return len(self._held)

    def chain(self, session: str, tokens: Sequence[int]) -> tuple[TokenChain, int]:
        """A chain of `tokens`, hashing only what is new to the session, and how many tokens that kept.

        The caller owns the chain. Raises InvalidField on bad token ids.
        """
        known = self._held.get(session) if session else None
        chain = known.chain.copy() if known else TokenChain(self._keyspace)
        return chain, chain.update(tokens)

    def begin_turn(self, session: str) -> SignalKind:
        """A request came: the tool's end if the agent waited for one, else a new turn."""
        context = self._held.get(session)
        if context is None:
            context = self._held[session] = Context(TokenChain(self._keyspace))
            if len(self._held) > self._max:
                self._held.popitem(last=False)
        self._held.move_to_end(session)
        kind = SignalKind.TOOL_END if context.tool else SignalKind.TURN_START
        context.tool = ""
        return kind

    def end_turn(self, session: str, chain: TokenChain, tool: str) -> None:
        """The turn's whole context, and what the agent waits for."""
        self._held[session] = Context(chain, tool)

    def fork(self, parent: str, session: str) -> None:
        """The child starts with the parent's chain."""
        known = self._held.get(parent)
        self._held[session] = Context(known.chain.copy() if known else TokenChain(self._keyspace))

    def end(self, session: str) -> None:
        """Forget it."""
        self._held.pop(session, None)
