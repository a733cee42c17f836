"""The same client for asyncio. Calls run on a few threads, since what takes long in them (copies, disk reads,
checksums) does so outside the interpreter's lock anyway."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvstore.core.hashing import TokenChain, Tokens
from kvstore.core.keyspace import Keyspace
from kvstore.core.types import Durability
from kvstore_client.client import Client
from kvstore_client.pool import Pool
from kvstore_client.session import Session
from kvstore_client.values import Offloaded, Restored

P = ParamSpec("P")
T = TypeVar("T")
THREADS = 16


class AsyncClient:
    """`async with await AsyncClient.connect(address) as client: ...`"""

    def __init__(self, client: Client) -> None:
        self.sync = client
        """The client underneath; its methods may be called from threads."""
        self._threads = ThreadPoolExecutor(THREADS, "kvstore-client")

    @classmethod
    async def connect(cls, address: str, *, timeout_s: float = 10.0, io_threads: int = 8) -> AsyncClient:
        """Raises Unavailable when the service doesn't answer."""
        return cls(await asyncio.to_thread(Client, address, timeout_s=timeout_s, io_threads=io_threads))

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call of this client on its threads."""
        work = functools.partial(call, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def register(self, keyspace: Keyspace) -> None:
        """Make a keyspace known."""
        await self.run(self.sync.register, keyspace)

    async def session(self, session_id: str, keyspace: Keyspace) -> AsyncSession:
        """Open a session."""
        return AsyncSession(self, await self.run(self.sync.session, session_id, keyspace))

    async def match(self, chain: TokenChain) -> int:
        """Leading blocks that the service holds."""
        return await self.run(self.sync.match, chain)

    async def close(self) -> None:
        """Disconnect."""
        await self.run(self.sync.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncSession:
    """`Session` with awaitable calls; the token chain stays synchronous."""

    def __init__(self, client: AsyncClient, session: Session) -> None:
        self._client = client
        self.sync = session
        self.id = session.id

    @property
    def chain(self) -> TokenChain:
        """The context's chain."""
        return self.sync.chain

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.run(self.sync.__exit__)

    async def match(self, token_ids: Tokens) -> int:
        """Tokens of this prompt that the service could restore."""
        return await self._client.run(self.sync.match, token_ids)

    async def restore(
        self, pool: Pool, slots: Sequence[int], first: int = 0, timeout_s: float | None = None
    ) -> Restored:
        """Bring blocks from `first` on into the pool."""
        return await self._client.run(self.sync.restore, pool, slots, first, timeout_s)

    async def offload(
        self, pool: Pool, slots: Sequence[int], durability: Durability = Durability.DRAM, timeout_s: float | None = None
    ) -> Offloaded:
        """Copy down what the service lacks."""
        return await self._client.run(self.sync.offload, pool, slots, durability, timeout_s)

    async def turn_start(self) -> None:
        """The model is called."""
        await self._client.run(self.sync.turn_start)

    async def tool_start(self, tool: str, expected_s: float = 0.0, output_tokens: int = 0) -> str:
        """The agent waits for a tool."""
        return await self._client.run(self.sync.tool_start, tool, expected_s, output_tokens)

    async def tool_end(self) -> None:
        """The tool returned."""
        await self._client.run(self.sync.tool_end)

    async def turn_end(self, output_tokens: int = 0) -> None:
        """The agent waits for its user."""
        await self._client.run(self.sync.turn_end, output_tokens)

    async def stopped(self, output_tokens: int = 0) -> None:
        """The model stopped; what the agent does next isn't known."""
        await self._client.run(self.sync.stopped, output_tokens)

    async def fork(self, session_id: str) -> AsyncSession:
        """A sub-agent that shares this context."""
        return AsyncSession(self._client, await self._client.run(self.sync.fork, session_id))

    async def end(self) -> int:
        """The session won't come back."""
        return await self._client.run(self.sync.end)
