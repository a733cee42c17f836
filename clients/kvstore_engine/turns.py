"""What agents do, told to whoever keeps their contexts: the local table, the chains, and the cache service.

The service is told by workers, in order for each session; nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.core.events import SignalKind
from kvstore.core.hashing import TokenChain
from kvstore.errors import KVStoreError
from kvstore_engine.contexts import Contexts
from kvstore_engine.hbm import HbmTable
from kvstore_engine.sequence import TurnEnd
from kvstore_engine.store import ContextStore
from kvstore_engine.transfers import Transfers


class Turns:
    """Called by the scheduler's thread. A request without a session (an empty one) is nobody's turn."""

    def __init__(self, hbm: HbmTable, contexts: Contexts, store: ContextStore | None, transfers: Transfers) -> None:
        self._hbm = hbm
        self._contexts = contexts
        self._store = store
        self._transfers = transfers

    def begin(self, session: str) -> None:
        """A request came."""
        if not session:
            return
        self._hbm.open(session)
        kind = self._contexts.begin_turn(session)
        self._hbm.signal(session, kind)
        self._tell(session, lambda store: store.signal(session, kind))

    def end(self, session: str, chain: TokenChain, end: TurnEnd, output_tokens: int) -> None:
        """It was answered with `output_tokens` tokens; `end` says what the agent does next."""
        if not session or session not in self._contexts:
            return
        kind = SignalKind.TOOL_START if end.tool else SignalKind.TURN_END
        self._contexts.end_turn(session, chain, end.tool)
        try:
            self._hbm.signal(session, kind, end.tool, end.expected_s, output_tokens)
        except KVStoreError:  # ended by its owner meanwhile
            return
        self._tell(session, lambda store: store.signal(session, kind, end.tool, end.expected_s, output_tokens))

    def fork(self, parent: str, session: str) -> None:
        """Raises UnknownSession, InvalidField."""
        self._hbm.fork(parent, session)
        self._contexts.fork(parent, session)
        self._tell(session, lambda store: store.fork(parent, session))

    def close(self, session: str) -> None:
        """The session won't come back. Raises UnknownSession."""
        self._hbm.end(session)
        self._contexts.end(session)
        self._tell(session, lambda store: store.end(session))

    def _tell(self, session: str, call: Callable[[ContextStore], None]) -> None:
        store = self._store
        if store is not None:
            self._transfers.write(session, lambda: call(store), lambda _: None)
