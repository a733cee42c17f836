"""kvstore itself, as an engine uses it: a service in a process of its own, bytes moved by the client.

    warm      a service without NVMe; get: acquire + restore + release out of its DRAM; put: offload of a new context
    cold      a service whose blocks are on NVMe only (it was restarted); get: the same calls, read with O_DIRECT

Every restore is verified, since that's the only kind there is. For comparing like with like, `verify=False` takes the
checksums out of the copies on their way to the transfer engine; no user can do that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore.core.hashing import TokenChain
from kvstore.core.types import Durability, Tier
from kvstore.errors import SetupError
from kvstore.testing.service import ServiceProcess, wait_for
from kvstore.tiers.tables import Table, TableTransfer
from kvstore.tiers.transfer import Copy, Priority, Transfer, TransferEngine
from kvstore_bench.peers.blocks import Blocks
from kvstore_client import Client

SEGMENT_BYTES = 64 << 20
LEASE_TTL_S = 120.0
TIMEOUT_S = 120.0


class _Unverified(TransferEngine):
    """Moves without looking."""

    def submit(self, copies: Sequence[Copy], priority: Priority, deadline_s: float | None = None) -> Transfer:
        return super().submit([replace(copy, checksums=None) for copy in copies], priority, deadline_s)

    def submit_table(self, table: Table, priority: Priority, deadline_s: float | None = None) -> TableTransfer:
        return super().submit_table(replace(table, checksums=None), priority, deadline_s)


class Ours:
    """A client that holds the blocks as one context. `tier`: where gets have to come from."""

    def __init__(self, client: Client, blocks: Blocks, tier: Tier, chain: TokenChain) -> None:
        self._client = client
        self._blocks = blocks
        self._tier = tier
        self._chain = chain
        self._plain, self._engines = client._engine, _Unverified(8)
        self._chains: dict[int, TokenChain] = {}
        self._num_chains = 0
        self.moved_bytes = 0
        """Verified bytes that gets brought from the tier asked for."""

    def settle(self) -> None:
        """Untimed: wait until the client's life line stands. A peer that held the interpreter for long breaks it."""
        wait_for(lambda: self._client.boot_epoch, "the client to be attached")

    def prepare(self, number: int) -> None:
        """Untimed: hash the context of put(number), as a turn would have done."""
        self._num_chains += 1  # a context that was never stored, whatever `number` was put before
        self._chains[number] = chain_of(self._blocks, self._num_chains)
        self._client.open(f"put-{number}", self._blocks.keyspace.id)

    def put(self, number: int) -> None:
        """Offload to DRAM. Raises SetupError."""
        blocks, chain = self._blocks, self._chains[number]
        source, _ = blocks.pools
        done = self._client.offload(chain, blocks.num_blocks, source, blocks.slots, f"put-{number}")
        if done.num_copied != blocks.num_blocks:
            raise SetupError(f"bench: {done.num_copied} of {blocks.num_blocks} blocks were offloaded: {done.errors}")

    def get(self, verify: bool = True) -> None:
        """Acquire, restore, release. Raises SetupError when a block came from elsewhere or not at all."""
        client, blocks = self._client, self._blocks
        client._engine = self._plain if verify else self._engines
        lease = client.acquire(self._chain)
        if lease is None:
            raise SetupError("bench: the service holds nothing of the context")
        _, target = blocks.pools
        got = client.restore(lease, self._chain, 0, lease.num_blocks, target, blocks.slots)
        client.release(lease)
        client._engine = self._plain
        from_tier = got.num_nvme if self._tier == Tier.NVME else got.num_dram
        if from_tier != blocks.num_blocks:
            raise SetupError(f"bench: {from_tier} of {blocks.num_blocks} blocks came from {self._tier.label}: {got}")
        self.moved_bytes += blocks.total_bytes

    def match(self, chain: TokenChain) -> int:
        """Blocks of a context that a lookup finds."""
        return self._client.match(chain)

    def cool(self) -> None:
        """Nothing to do: reads are O_DIRECT."""

    def forget(self, number: int) -> None:
        """End the session; its blocks are the first to be evicted."""
        self._client.end(f"put-{number}")


def tokens_of(blocks: Blocks, seed: int) -> npt.NDArray[np.int64]:
    """Token ids of a context as long as the blocks."""
    return np.random.default_rng(seed).integers(0, 50_000, blocks.num_blocks * blocks.keyspace.block_tokens)


def chain_of(blocks: Blocks, seed: int) -> TokenChain:
    """The same, hashed."""
    chain = TokenChain(blocks.keyspace)
    chain.extend(tokens_of(blocks, seed))
    return chain


def _room(total_bytes: int, contexts: float) -> int:
    return (int(contexts * total_bytes) // SEGMENT_BYTES + 2) * SEGMENT_BYTES


def _service(folder: Path, dram_bytes: int, nvme_bytes: int) -> ServiceProcess:
    service = ServiceProcess(
        folder, dram_bytes=dram_bytes, nvme_bytes=nvme_bytes, segment_bytes=SEGMENT_BYTES, lease_ttl_s=LEASE_TTL_S
    )
    service.options["huge_pages"] = "auto"
    return service


@contextlib.contextmanager
def warm(blocks: Blocks, folder: Path) -> Iterator[Ours]:
    """Blocks in DRAM, and room for two more sets."""
    service = _service(folder, _room(blocks.total_bytes, 3), 0)
    chain = chain_of(blocks, 0)
    with _running(service), Client(service.address, timeout_s=TIMEOUT_S) as client:
        client.register(blocks.keyspace)
        client.open("hot", blocks.keyspace.id)  # an open session outlives the ended ones that puts were made in
        _offload(client, chain, blocks, Durability.DRAM, "hot")
        yield Ours(client, blocks, Tier.DRAM, chain)


@contextlib.contextmanager
def cold(blocks: Blocks, folder: Path) -> Iterator[Ours]:
    """Blocks on NVMe only."""
    service = _service(folder, _room(blocks.total_bytes, 1), _room(blocks.total_bytes, 2))
    chain = chain_of(blocks, 0)
    with _running(service):
        with Client(service.address, timeout_s=TIMEOUT_S) as client:
            client.register(blocks.keyspace)
            _offload(client, chain, blocks, Durability.SYNCED, "")
        service.stop()
        service.start()
        with Client(service.address, timeout_s=TIMEOUT_S) as client:
            client.register(blocks.keyspace)
            yield Ours(client, blocks, Tier.NVME, chain)


def _offload(client: Client, chain: TokenChain, blocks: Blocks, durability: Durability, session: str) -> None:
    source, _ = blocks.pools
    done = client.offload(chain, blocks.num_blocks, source, blocks.slots, session, durability)
    if done.num_blocks != blocks.num_blocks:
        raise SetupError(f"bench: {done.num_blocks} of {blocks.num_blocks} blocks were stored: {done.errors}")


@contextlib.contextmanager
def _running(service: ServiceProcess) -> Iterator[None]:
    try:
        service.start()
        yield
    except RuntimeError as error:
        raise SetupError(f"bench: {error}") from None
    finally:
        service.stop()
