"""A session handle: one agent's context, its token chain, and the signals an engine sends for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvstore.core.hashing import TokenChain, Tokens
from kvstore.core.keyspace import Keyspace
from kvstore.core.types import Durability
from kvstore.errors import Unavailable
from kvstore_api.v1 import kvstore_pb2 as pb
from kvstore_client.pool import Pool
from kvstore_client.values import Lease, Offloaded, Restored

if TYPE_CHECKING:
    from kvstore_client.client import Client

Kind = pb.SignalRequest


class Session:
    """Owned by one thread at a time. Leaving the `with` block ends the session."""

    def __init__(self, client: Client, session_id: str, keyspace: Keyspace, chain: TokenChain | None = None) -> None:
        self._client = client
        self.id = session_id
        self.chain = chain or TokenChain(keyspace)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Unavailable):
            self.end()

    def update(self, token_ids: Tokens) -> int:
        """Make the context equal `token_ids`, hashing only what is new. Returns the tokens kept from before."""
        return self.chain.update(token_ids)

    def match(self, token_ids: Tokens) -> int:
        """Tokens of this prompt that the service could restore."""
        self.update(token_ids)
        return self._client.match(self.chain) * self.chain.keyspace.block_tokens

    @contextlib.contextmanager
    def acquire(self) -> Iterator[Lease | None]:
        """A lease on what the service holds of the context, released on exit; None when it holds nothing."""
        lease = self._client.acquire(self.chain, self.id)
        try:
            yield lease
        finally:
            if lease is not None:
                self._client.release(lease)

    def restore(self, pool: Pool, slots: Sequence[int], first: int = 0, timeout_s: float | None = None) -> Restored:
        """Bring blocks from `first` on into the pool, as many as the service holds and `slots` has room for."""
        with self.acquire() as lease:
            if lease is None:
                return Restored(0)
            last = min(lease.num_blocks, first + len(slots))
            if last <= first:
                return Restored(0)
            wanted = slots[: last - first]
            return self._client.restore(lease, self.chain, first, last, pool, wanted, timeout_s)

    def offload(
        self,
        pool: Pool,
        slots: Sequence[int],
        durability: Durability = Durability.DRAM,
        timeout_s: float | None = None,
    ) -> Offloaded:
        """Copy down what the service lacks; `slots[i]` holds block `i` of the context."""
        return self._client.offload(self.chain, len(slots), pool, slots, self.id, durability, timeout_s)

    def turn_start(self) -> None:
        """The model is called."""
        self._client.signal(self.id, Kind.TURN_START)

    def tool_start(self, tool: str, expected_s: float = 0.0, output_tokens: int = 0) -> str:
        """The agent waits for a tool. Returns what became of `expected_s`: none, accepted, clipped, refused.

        `output_tokens`: how many tokens the model just wrote, which helps to tell when it will be back; 0 for unknown.
        """
        return self._client.signal(self.id, Kind.TOOL_START, tool, expected_s, output_tokens)

    def tool_end(self) -> None:
        """The tool returned."""
        self._client.signal(self.id, Kind.TOOL_END)

    def turn_end(self, output_tokens: int = 0) -> None:
        """The agent waits for its user."""
        self._client.signal(self.id, Kind.TURN_END, output_tokens=output_tokens)

    def stopped(self, output_tokens: int = 0) -> None:
        """The model stopped, and the engine doesn't know whether for a tool or for the user."""
        self._client.signal(self.id, Kind.STOPPED, output_tokens=output_tokens)

    def fork(self, session_id: str) -> Session:
        """A sub-agent that shares this context."""
        self._client.fork(self.id, session_id)
        return Session(self._client, session_id, self.chain.keyspace, self.chain.copy())

    def supersede(self, token_ids: Tokens) -> None:
        """The context was compacted or replaced by this one: what only the old one held may go."""
        self.update(token_ids)
        self._client.supersede(self.id, self.chain)

    def end(self) -> int:
        """The session won't come back. Returns how many blocks nobody holds any more."""
        return self._client.end(self.id)
