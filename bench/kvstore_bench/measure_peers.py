"""`kvstore bench peers`: the same blocks through kvstore and through every other store that is installed.

    get        out of memory into the pool           put   out of the pool into memory
    cold get   out of files into the pool, page cache bypassed or dropped

For each peer the paths run in turns with kvstore's, on the same pools, and who goes first alternates; a row is median
against median. kvstore always goes the whole way an engine goes: requests to a service in another process, leases,
records, checksums. "verified" in a row's name says who verified: `verified`, kvstore did and the peer, as it comes,
did not; `both verified`, the peer's bytes went through the same checksums; `neither verified`, kvstore's checksums
were left out for the comparison.

After the rounds the target is poisoned and read once more through each. When kvstore's bytes are wrong, or came from
another tier than the row says, the run is invalid (exit 2); when a peer's are, or it isn't installed, its row says so
and the run goes on.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console

from kvstore.errors import InvalidField, SetupError
from kvstore.sizes import format_bytes
from kvstore.tiers.files import probe_direct
from kvstore_bench.inputs import ROUNDS_MAX, block_sizes, check_places, check_whole
from kvstore_bench.measure_io import scratch, timed
from kvstore_bench.peers import files, lmcache_local, lmcache_server, mooncake, ours, redis_server
from kvstore_bench.peers.blocks import Blocks, keyspace_of
from kvstore_bench.peers.store import Goal, Peer, PeerFailed, Store
from kvstore_bench.rows import EXIT_INVALID, Row, exit_status, show, write_json

NUM_BLOCKS_MAX = 1 << 20
PEERS: list[Peer] = [*mooncake.PEERS, *lmcache_local.PEERS, *redis_server.PEERS, *files.PEERS]
SMALL_BYTES, SMALL_SHARE = 64 << 10, 0.75


@dataclass
class Duel:
    """One path of kvstore and of a peer, timed in turns. Both are already open and filled."""

    goal: Goal
    ours: ours.Ours
    theirs: Store
    ours_s: list[float] = field(default_factory=list)
    theirs_s: list[float] = field(default_factory=list)

    def round(self, number: int) -> None:
        """One turn each."""
        turns: list[Callable[[], None]] = [lambda: self._our_turn(number), lambda: self._their_turn(number)]
        for turn in turns if number % 2 else reversed(turns):
            turn()

    def _our_turn(self, number: int) -> None:
        self.ours.settle()
        if self.goal.path == "put":
            self.ours.prepare(number)
            self.ours_s.append(timed(lambda: self.ours.put(number)))
            self.ours.forget(number)
        else:
            self.ours_s.append(timed(lambda: self.ours.get(self.goal.ours)))

    def _their_turn(self, number: int) -> None:
        if self.goal.path == "put":
            self.theirs_s.append(timed(lambda: self.theirs.put(number)))
            self.theirs.forget(number)
        else:
            self.theirs.cool()
            self.theirs_s.append(timed(lambda: self.theirs.get(self.goal.verify)))

    def row(self, name: str, blocks: Blocks) -> Row:
        """Median against median, GB/s."""
        total = blocks.total_bytes / 1e9
        return Row(name, total / median(self.ours_s), "GB/s", total / median(self.theirs_s), goal_of(self.goal, blocks))


def goal_of(goal: Goal, blocks: Blocks) -> float | None:
    """Three quarters for small blocks."""
    if goal.ratio is None:
        return None
    return round(goal.ratio * (SMALL_SHARE if blocks.block_bytes <= SMALL_BYTES else 1), 4)


def row_name(goal: Goal, peer: Peer, blocks: Blocks) -> str:
    """`NAME: get, 256 x 2MiB, WHO`."""
    return f"{peer.name}: {goal.path}, {blocks.num_blocks} x {format_bytes(blocks.block_bytes)}, {goal.who}"


def measure_peer(peer: Peer, rigs: dict[str, ours.Ours], blocks: Blocks, rounds: int, folder: Path) -> list[Row]:
    """Rows of one peer. Raises SetupError when kvstore itself failed."""
    names = [row_name(goal, peer, blocks) for goal in peer.goals]
    lack = peer.missing()
    if lack is not None:
        return [Row(name, None, "", note=f"absent ({lack}); {peer.install}") for name in names]
    try:
        with peer.open(blocks, folder) as store:
            store.put(0)
            duels = [Duel(goal, rigs[goal.path], store) for goal in peer.goals]
            for duel in duels:  # warm-up, not counted
                duel.round(1)
                duel.ours_s.clear()
                duel.theirs_s.clear()
            for number in range(2, rounds + 2):
                for duel in duels:
                    duel.round(number)
            if any(goal.path != "put" for goal in peer.goals):
                _prove(store, blocks)
            return [duel.row(name, blocks) for name, duel in zip(names, duels, strict=True)]
    except PeerFailed as error:
        return [Row(name, None, "", note=f"failed: {error}") for name in names]


def _prove(store: Store, blocks: Blocks) -> None:
    """The peer's last get really moved the bytes. Raises PeerFailed."""
    blocks.poison()
    store.get(False)
    if not blocks.same():
        raise PeerFailed("it returned other bytes than it was given")


def prove_ours(rig: ours.Ours, blocks: Blocks) -> None:
    """So did ours. Raises SetupError."""
    blocks.poison()
    rig.settle()
    rig.get()
    if not blocks.same() or not rig.moved_bytes:
        raise SetupError("bench: kvstore returned other bytes than it was given")


def measure_size(block_bytes: int, num_blocks: int, peers: Sequence[Peer], rounds: int, parent: Path) -> Iterator[Row]:
    """Rows for one block size, as they come."""
    blocks = Blocks(keyspace_of(block_bytes), num_blocks)
    for paths, opener in ((("get", "put"), ours.warm), (("cold get",), ours.cold)):
        chosen = [p for p in peers if any(g.path in paths for g in p.goals)]
        if not chosen:
            continue
        with scratch(parent) as folder, opener(blocks, folder) as rig:
            for peer in chosen:
                with scratch(parent) as room:
                    yield from measure_peer(peer, dict.fromkeys(paths, rig), blocks, rounds, room)
            prove_ours(rig, blocks)


def wanted_peers(only: str) -> list[Peer]:
    """Peers whose name contains one of the comma-separated words. Raises InvalidField when none does."""
    words = [word.strip().lower() for word in only.split(",") if word.strip()]
    found = [p for p in PEERS if not words or any(word in p.name.lower() for word in words)]
    if not found and not any(word in lmcache_server.NAME.lower() for word in words):
        raise InvalidField("only", f"{only!r} names no peer", f"known: {', '.join(p.name for p in PEERS)}")
    return found


def measure(
    rounds: int, sizes: Sequence[int], num_blocks: int, only: str, data_dir: Path, console: Console
) -> list[Row]:
    """All rows. Raises SetupError when the run can't be valid."""
    if not probe_direct(data_dir):
        raise SetupError(f"bench: {data_dir} can't do O_DIRECT, so the page cache would be measured; give --data-dir")
    rows: list[Row] = []
    peers = wanted_peers(only)
    for block_bytes in sizes:
        count = max(8, num_blocks * sizes[0] // block_bytes)
        console.print(f"{count} x {format_bytes(block_bytes)}, {rounds} rounds ...", style="dim")
        for row in measure_size(block_bytes, count, peers, rounds, data_dir):
            console.print(f"  {row.name}: {row.text}", style="dim", highlight=False)
            rows.append(row)
    if not only or any(word.strip().lower() in lmcache_server.NAME.lower() for word in only.split(",")):
        rows += lmcache_server.measure(rounds, data_dir)
    return rows


def run(
    rounds: int = 5,
    sizes: str = "2MiB,64KiB",
    num_blocks: int = 256,
    only: str = "",
    data_dir: Path | None = None,
    json: Path | None = None,
) -> int:
    """The same blocks through kvstore and through other stores, as far as they are installed.

    --num-blocks counts blocks of the first size; others get as many bytes. --only: words of peers' names.
    """
    console = Console()
    check_places(data_dir, json)
    check_whole("rounds", rounds, 1, ROUNDS_MAX)
    check_whole("num_blocks", num_blocks, 8, NUM_BLOCKS_MAX)
    wanted = block_sizes(sizes, 2 << 20)
    try:
        with _work_folder(data_dir) as folder:
            rows = measure(rounds, wanted, num_blocks, only, folder, console)
    except SetupError as error:
        console.print(f"invalid: {error}", style="red")
        return EXIT_INVALID
    show(console, "kvstore (achieved) against other stores (limit)", rows)
    if json is not None:
        write_json(json, rows)
    return exit_status(rows)


@contextlib.contextmanager
def _work_folder(given: Path | None) -> Iterator[Path]:
    """Where files and sockets go. Sockets want short paths."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="kvstore-", dir="/var/tmp") as name:
        yield Path(name)
