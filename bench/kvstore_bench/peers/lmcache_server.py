"""LMCache's server, engine-driven over shared memory: retrieve and lookup of a 2,048-token context, 47 MB of KV.

The server is a process of its own; this one plays the worker and the scheduler of an engine, with the adapters that
its vLLM connector uses. Its pool is layer-first, as vLLM's is, and holds the same bytes as ours. Our side acquires,
restores (verified) and releases the same context; our lookup starts from token ids and hashes all of them, as its
server does, though a turn of ours hashes only what is new.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.errors import SetupError
from kvstore.testing.service import free_port
from kvstore_bench.measure_io import scratch, timed
from kvstore_bench.peers import lmcache_local, ours
from kvstore_bench.peers.blocks import Blocks
from kvstore_bench.peers.store import PeerFailed, absent_module, listens, process
from kvstore_bench.rows import Row

NAME = "LMCache server, shared memory"
INSTALL = lmcache_local.INSTALL
NUM_TOKENS, BLOCK_TOKENS, CHUNK_TOKENS = 2048, 16, 256
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 30, 3, 64
GOAL = 1.5
NUM_LOOKUPS = 40
WAIT_S = 30.0
ROWS = f"{NAME}: retrieve, 47 MB, verified", f"{NAME}: lookup, {NUM_TOKENS} tokens"


def missing() -> str | None:
    """What is lacking."""
    lmcache_local.quiet()
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    return absent_module("lmcache.integration.vllm.vllm_multi_process_adapter")


class Server:
    """A connected engine: its pool has a source and a target half."""

    def __init__(self, worker: Any, scheduler: Any, blocks: Blocks, tokens: list[int]) -> None:
        self._worker = worker
        self._scheduler = scheduler
        self._tokens = tokens
        self._num_requests = 0
        n = blocks.num_blocks
        self._source, self._target = range(1, n + 1), range(n + 1, 2 * n + 1)  # block 0 means "none" to it
        self._caches = _layer_first(blocks)
        worker.register_kv_caches(self._caches, layout_hints={})
        context = worker.transfer_ctx.engine_driven_context
        if "Shm" not in type(context).__name__:
            raise PeerFailed(f"it chose {type(context).__name__}, not shared memory")

    def store(self) -> None:
        """Source half -> server. Raises PeerFailed."""
        self._worker.submit_store_request("store", self._op(self._source, NUM_TOKENS), None)
        self._settle(self._worker.store_futures.pop("store"), "store")

    def lookup(self) -> str:
        """Look the context up, which locks it; `end` lets go. Returns the request. Raises PeerFailed."""
        self._num_requests += 1
        name = f"request-{self._num_requests}"
        self._scheduler.maybe_submit_lookup_request(name, self._tokens)
        end = time.monotonic() + WAIT_S
        while (found := self._scheduler.check_lookup_result(name)) is None:
            if time.monotonic() > end:
                raise PeerFailed("a lookup gave no answer")
        if found != NUM_TOKENS:
            raise PeerFailed(f"{found} of {NUM_TOKENS} tokens are there")
        return name

    def retrieve(self, name: str) -> None:
        """Server -> target half. Raises PeerFailed."""
        event = self._worker.create_recorded_event()
        self._worker.submit_retrieve_request(name, self._op(self._target, NUM_TOKENS), event)
        future, _ = self._worker.retrieve_futures.pop(name)
        self._settle(future, "retrieve")

    def end(self, name: str) -> None:
        """Untimed."""
        self._scheduler.end_session(name)
        self._scheduler.cleanup_lookup_result(name)

    def poison(self) -> None:
        """Clear the target half."""
        for cache in self._caches.values():
            cache[:, self._target.start :] = 0

    def same(self) -> bool:
        """Whether the target half holds the source half, bit by bit (random bits hold NaN, which equals nothing)."""
        import torch

        n, bits = self._target.start, [cache.view(torch.int16) for cache in self._caches.values()]
        return all(torch.equal(b[:, 1:n], b[:, n:]) for b in bits)

    def _op(self, block_ids: range, num_tokens: int) -> Any:
        from lmcache.integration.vllm.vllm_multi_process_adapter import LoadStoreOp

        return LoadStoreOp(token_ids=self._tokens, block_ids=[list(block_ids)], start=0, end=num_tokens)

    def _settle(self, future: Any, what: str) -> None:
        if not future.result(timeout=WAIT_S):
            raise PeerFailed(f"{what} failed")


def _layer_first(blocks: Blocks) -> dict[str, Any]:
    """Our source blocks as vLLM lays them out: a layer is `[2, 1 + 2 * blocks, tokens, heads, dim]` bf16."""
    import torch

    k = blocks.keyspace
    shape = (blocks.num_blocks, k.num_layers, 2, k.block_tokens, k.num_kv_heads, k.head_dim)
    source = torch.from_numpy(blocks.source).view(torch.int16).view(shape)[blocks.slots]
    caches = {}
    for layer in range(k.num_layers):
        cache = torch.zeros((2, 1 + 2 * blocks.num_blocks, *shape[3:]), dtype=torch.int16)
        cache[:, 1 : 1 + blocks.num_blocks] = source[:, layer].transpose(0, 1)
        caches[f"model.layers.{layer}"] = cache.view(torch.bfloat16)
    return caches


@contextlib.contextmanager
def _server(blocks: Blocks, tokens: list[int], folder: Path) -> Iterator[Server]:
    import torch
    from lmcache.integration.vllm import vllm_multi_process_adapter as adapters

    torch.set_num_threads(1)  # its copies are many and small; more threads wait for each other
    port = free_port()
    options = {
        "host": "127.0.0.1",
        "port": port,
        "http-host": "127.0.0.1",
        "http-port": free_port(),
        "prometheus-port": free_port(),
        "chunk-size": CHUNK_TOKENS,
        "l1-size-gb": 1,
        "eviction-policy": "LRU",
        "supported-transfer-mode": "engine_driven",
        "shm-name": f"kvstore-bench-{os.getpid()}",
        "max-workers": 4,
    }
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "lmcache.cli.main", "server", *flags]
    with process(command, folder / "server.log", lambda: listens(port)):
        url, context = f"tcp://127.0.0.1:{port}", importlib.import_module("zmq").Context()
        alone = adapters.ParallelStrategy(False, 1, 0, 1, 1, 1)
        scheduler = adapters.LMCacheMPSchedulerAdapter([url], context, "bench", BLOCK_TOKENS, alone)
        mode = {"lmcache.mp.mp_transfer_mode": "engine_driven"}
        worker = adapters.LMCacheMPWorkerAdapter(url, context, "bench", BLOCK_TOKENS, alone, extra_config=mode)
        try:
            yield Server(worker, scheduler, blocks, tokens)
        finally:
            worker.shutdown()
            scheduler.shutdown()


def keyspace() -> Keyspace:
    """SmolLM2-135M's shape."""
    return Keyspace(
        model="bench-small",
        weights_digest="0" * 32,
        tokenizer_digest="0" * 32,
        kv_dtype="bfloat16",
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        rope="none",
        block_tokens=BLOCK_TOKENS,
    )


def measure(rounds: int, parent: Path) -> list[Row]:
    """Two rows. Raises SetupError when kvstore itself failed."""
    lack = missing()
    if lack is not None:
        return [Row(name, None, "", note=f"absent ({lack}); {INSTALL}") for name in ROWS]
    blocks = Blocks(keyspace(), NUM_TOKENS // BLOCK_TOKENS)
    tokens = [int(t) for t in ours.tokens_of(blocks, 0)]
    with scratch(parent) as folder, ours.warm(blocks, folder) as rig, scratch(parent) as room:
        try:
            with _server(blocks, tokens, room) as server:
                return _duel(rig, server, blocks, tokens, rounds)
        except PeerFailed as error:
            return [Row(name, None, "", note=f"failed: {error}") for name in ROWS]


def _duel(rig: ours.Ours, server: Server, blocks: Blocks, tokens: list[int], rounds: int) -> list[Row]:
    server.store()
    retrieves = _Times()
    lookups = _Times()
    for _ in range(rounds + 1):
        retrieves.ours.append(timed(rig.get))
        name = server.lookup()
        server.poison()
        retrieves.theirs.append(timed(lambda name=name: server.retrieve(name)))  # type: ignore[misc]
        server.end(name)
        if not server.same():
            raise PeerFailed("it returned other bytes than it was given")
        _lookups(rig, server, blocks, tokens, lookups)
    blocks.poison()
    rig.get()
    if not blocks.same():
        raise SetupError("bench: kvstore returned other bytes than it was given")
    total = blocks.total_bytes / 1e9
    return [
        Row(ROWS[0], total / median(retrieves.ours[1:]), "GB/s", total / median(retrieves.theirs[1:]), GOAL),
        Row(ROWS[1], 1 / median(lookups.ours), "1/s", 1 / median(lookups.theirs), GOAL),
    ]


class _Times:
    """Seconds of either side."""

    def __init__(self) -> None:
        self.ours: list[float] = []
        self.theirs: list[float] = []


def _lookups(rig: ours.Ours, server: Server, blocks: Blocks, tokens: list[int], times: _Times) -> None:
    """In turns."""
    for _ in range(NUM_LOOKUPS):
        started = time.perf_counter()
        name = server.lookup()
        times.theirs.append(time.perf_counter() - started)
        server.end(name)
        started = time.perf_counter()
        chain = TokenChain(blocks.keyspace)
        chain.extend(tokens)
        found = rig.match(chain)
        times.ours.append(time.perf_counter() - started)
        if found != blocks.num_blocks:
            raise SetupError(f"bench: a lookup found {found} of {blocks.num_blocks} blocks")
