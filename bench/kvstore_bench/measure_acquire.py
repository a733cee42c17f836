"""`kvstore bench acquire`: how long a lookup with a lease takes, over the unix socket, by length of the context.

    Acquire    match + lease + session, for a context that is resident in full (then released, untimed)
    Match      the floor: as many hashes that nobody stored, so the service parses them and finds nothing

Turns alternate. A turn of either sends all hashes, 16 bytes a block, so both grow with their transfer; what Acquire
takes beyond Match is the search and the lease, and that must grow slower than the context.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.errors import InvalidField, SetupError
from kvstore.testing.service import ServiceProcess
from kvstore_bench.inputs import ROUNDS_MAX, check_places, check_whole
from kvstore_bench.rows import EXIT_INVALID, Row, exit_status, show, write_json
from kvstore_client import Client, HostPool

LENGTH_MAX = 1 << 20
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
GOAL_LENGTH, GOAL_MS = 8192, 2.0
EXTRA_MS_MIN = 0.05
"""What Acquire takes beyond Match is taken for at least this: less can't be told from noise."""
SLOTS = 64
SEGMENT_BYTES = 16 << 20

KEYSPACE = Keyspace(
    model="bench",
    weights_digest="0" * 32,
    tokenizer_digest="0" * 32,
    kv_dtype="bfloat16",
    num_layers=1,
    num_kv_heads=2,
    head_dim=64,
    rope="none",
    block_tokens=8,
)
"""Blocks of 4 KiB: the index is measured here, not the bytes."""


def chain_of(num_blocks: int, seed: int) -> TokenChain:
    """A context of random tokens."""
    chain = TokenChain(KEYSPACE)
    chain.extend(np.random.default_rng(seed).integers(0, 50_000, num_blocks * KEYSPACE.block_tokens))
    return chain


@contextlib.contextmanager
def service(num_blocks: int) -> Iterator[tuple[Client, TokenChain]]:
    """A service that holds one context in DRAM. Raises SetupError."""
    dram_bytes = (num_blocks * KEYSPACE.slot_bytes // SEGMENT_BYTES + 2) * SEGMENT_BYTES
    with tempfile.TemporaryDirectory(prefix="kvstore-") as name:
        process = ServiceProcess(
            Path(name), dram_bytes=dram_bytes, nvme_bytes=0, segment_bytes=SEGMENT_BYTES, lease_ttl_s=60
        )
        try:
            process.start()
            with Client(process.address, timeout_s=60) as client:
                yield client, _fill(client, num_blocks)
        except RuntimeError as error:
            raise SetupError(f"bench: {error}") from None
        finally:
            process.stop()


def _fill(client: Client, num_blocks: int) -> TokenChain:
    client.register(KEYSPACE)
    client.open("agent", KEYSPACE.id)
    chain = chain_of(num_blocks, 0)
    pool = HostPool(np.zeros(SLOTS * KEYSPACE.slot_bytes, dtype=np.uint8), KEYSPACE.slot_bytes)
    done = client.offload(chain, num_blocks, pool, [i % SLOTS for i in range(num_blocks)], "agent")
    if done.num_blocks != num_blocks:
        raise SetupError(f"bench: {done.num_blocks} of {num_blocks} blocks were stored: {done.errors}")
    return chain


def acquire(client: Client, chain: TokenChain, num_blocks: int) -> float:
    """Milliseconds of one Acquire. Raises SetupError when it found less."""
    started = time.perf_counter()
    lease = client.acquire(chain, "agent", num_blocks)
    seconds = time.perf_counter() - started
    if lease is None or lease.num_blocks != num_blocks:
        raise SetupError(f"bench: Acquire found {lease.num_blocks if lease else 0} of {num_blocks} blocks")
    client.release(lease)
    return seconds * 1e3


def match(client: Client, unknown: TokenChain) -> float:
    """Milliseconds of one Match that finds nothing."""
    started = time.perf_counter()
    found = client.match(unknown)
    seconds = time.perf_counter() - started
    if found:
        raise SetupError("bench: a context that nobody stored was found")
    return seconds * 1e3


def measure(lengths: Sequence[int], rounds: int, say: Callable[[str], None]) -> list[Row]:
    """Rows by length, and the growth. Raises SetupError."""
    rows: list[Row] = []
    extras: list[float] = []
    with service(max(lengths)) as (client, chain):
        for num_blocks in lengths:
            unknown = chain_of(num_blocks, 1)
            times = np.array(
                [(acquire(client, chain, num_blocks), match(client, unknown)) for _ in range(rounds)], dtype=np.float64
            )
            (p50, floor), (p99, _) = np.percentile(times, 50, axis=0), np.percentile(times, 99, axis=0)
            say(f"{num_blocks} blocks: Acquire p50 {p50:.2f} ms, p99 {p99:.2f} ms; Match {floor:.2f} ms")
            rows += length_rows(num_blocks, float(p50), float(p99), float(floor))
            extras.append(float(p50 - floor))
    if len(lengths) > 1:
        rows.append(growth_row(lengths, extras))
    return rows


def length_rows(num_blocks: int, p50: float, p99: float, floor: float) -> list[Row]:
    """Median with its goal, and the tail. The floor has a row of its own, since the goal is on the value."""
    goal = GOAL_MS if num_blocks == GOAL_LENGTH else None
    return [
        Row(f"Acquire, {num_blocks} blocks, p50", p50, "ms", goal=goal, lower_is_better=True),
        Row(f"Acquire, {num_blocks} blocks, p99", p99, "ms"),
        Row(f"Match of unknown hashes, {num_blocks} blocks, p50", floor, "ms"),
    ]


def growth_row(lengths: Sequence[int], extras: Sequence[float]) -> Row:
    """How often what Acquire takes beyond Match multiplied, against how often the context did."""
    times = max(extras[-1], EXTRA_MS_MIN) / max(extras[0], EXTRA_MS_MIN)
    name = f"Acquire beyond the hashes' transfer, growth from {lengths[0]} to {lengths[-1]} blocks"
    return Row(name, times, "times", lengths[-1] / lengths[0], goal=1.0, lower_is_better=True)


def run(rounds: int = 300, lengths: str = "", json: Path | None = None) -> int:
    """Acquire over the unix socket, by length of the context."""
    console = Console()
    check_places(None, json)
    check_whole("rounds", rounds, 1, ROUNDS_MAX)
    try:
        wanted = [int(text) for text in lengths.split(",")] if lengths else list(LENGTHS)
    except ValueError:
        raise InvalidField("lengths", repr(lengths), "give numbers of blocks such as 512,8192") from None
    for length in wanted:
        check_whole("lengths", length, 1, LENGTH_MAX)
    try:
        rows = measure(wanted, max(10, rounds), lambda text: console.print(text, style="dim", highlight=False))
    except SetupError as error:
        console.print(f"invalid: {error}", style="red")
        return EXIT_INVALID
    show(console, "Acquire over the unix socket", rows)
    if json is not None:
        write_json(json, rows)
    return exit_status(rows)
