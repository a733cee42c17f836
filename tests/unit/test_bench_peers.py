"""`kvstore bench peers`: its arithmetic, what it does with absent, failing and lying peers, and one small real run."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidField, SetupError
from kvstore_bench import measure_acquire, measure_peers
from kvstore_bench.peers import files, lmcache_server, ours
from kvstore_bench.peers.blocks import Blocks, keyspace_of
from kvstore_bench.peers.store import Goal, Peer, PeerFailed
from kvstore_bench.rows import Row, exit_status

KIB = 1 << 10


@pytest.fixture(scope="module")
def blocks() -> Blocks:
    return Blocks(keyspace_of(64 * KIB), 8)


class Memory:
    """A store in a dictionary."""

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.kept: dict[tuple[int, int], bytes] = {}
        self.calls: list[str] = []

    def put(self, number: int) -> None:
        self.calls.append(f"put {number}")
        for i in range(self.blocks.num_blocks):
            self.kept[number, i] = bytes(self.blocks.view(self.blocks.source, i))

    def get(self, verify: bool) -> None:
        self.calls.append(f"get {verify}")
        for i in range(self.blocks.num_blocks):
            self.blocks.view(self.blocks.target, i)[:] = self.kept[0, i]

    def cool(self) -> None:
        self.calls.append("cool")

    def forget(self, number: int) -> None:
        for i in range(self.blocks.num_blocks):
            del self.kept[number, i]


class Idle(Memory):
    """Says yes and does nothing."""

    def get(self, verify: bool) -> None:
        pass


class Losing(Memory):
    def get(self, verify: bool) -> None:
        raise PeerFailed("3 of 8 objects are gone")


def peer(kind: type[Memory], goals: list[Goal], missing: str | None = None) -> Peer:
    @contextlib.contextmanager
    def opener(blocks: Blocks, folder: Path) -> Iterator[Memory]:
        yield kind(blocks)

    return Peer("a dictionary", "pip install nothing", lambda: missing, opener, goals)


def rows_of(one: Peer, blocks: Blocks, tmp_path: Path) -> list[Row]:
    rig: Any = Memory(blocks)
    rig.put(0)
    rig.settle = rig.prepare = lambda *_: None
    return measure_peers.measure_peer(one, {"get": rig, "put": rig}, blocks, 1, tmp_path)


def test_a_peer_that_is_there_gets_a_row_a_goal(blocks: Blocks, tmp_path: Path) -> None:
    rows = rows_of(peer(Memory, [Goal("get", 1.0, True), Goal("put", None)]), blocks, tmp_path)
    assert [row.name for row in rows] == [
        "a dictionary: get, 8 x 64KiB, both verified",
        "a dictionary: put, 8 x 64KiB, verified",
    ]
    assert all(row.value and row.limit and row.ratio for row in rows)
    assert rows[0].goal == 0.75, "three quarters for small blocks"
    assert rows[1].ok is None


@pytest.mark.parametrize(
    ("one", "words"),
    [
        (peer(Memory, [Goal("get", 1.0)], "no such module"), "absent (no such module); pip install nothing"),
        (peer(Losing, [Goal("get", 1.0)]), "3 of 8 objects are gone"),
        (peer(Idle, [Goal("get", 1.0)]), "other bytes than it was given"),
    ],
)
def test_absent_failing_and_lying_peers_are_named_and_fail_nothing(
    one: Peer, words: str, blocks: Blocks, tmp_path: Path
) -> None:
    rows = rows_of(one, blocks, tmp_path)
    assert [row.value for row in rows] == [None]
    assert words in rows[0].text
    assert rows[0].ok is None and exit_status(rows) == 0
    assert rows[0].as_json()["value"] is None


def test_our_own_wrong_bytes_make_the_run_invalid(blocks: Blocks) -> None:
    rig: Any = Idle(blocks)
    rig.moved_bytes, rig.settle = 1, lambda: None
    rig.get = lambda: None
    with pytest.raises(SetupError, match="other bytes"):
        measure_peers.prove_ours(rig, blocks)


def test_unknown_peers_and_sizes_are_refused() -> None:
    with pytest.raises(InvalidField, match="names no peer"):
        measure_peers.wanted_peers("nobody")
    assert measure_peers.wanted_peers("redis") and measure_peers.wanted_peers(lmcache_server.NAME) == []
    with pytest.raises(InvalidField, match="sizes"):
        keyspace_of(3)


def test_blocks_know_their_places_and_their_bytes(blocks: Blocks) -> None:
    blocks.poison()
    assert not blocks.same() and not blocks.verify(3)
    for i in range(blocks.num_blocks):
        blocks.view(blocks.target, i)[:] = blocks.view(blocks.source, i)
    assert blocks.same() and all(blocks.verify(i) for i in range(blocks.num_blocks))
    assert sorted(blocks.slots) == list(range(8)) != blocks.slots


def test_memory_paths_of_ours_move_what_they_say(blocks: Blocks, tmp_path: Path) -> None:
    with ours.warm(blocks, tmp_path) as rig:
        for verify in (True, False):
            blocks.poison()
            rig.get(verify)
            assert blocks.same()
        rig.prepare(1)
        rig.put(1)
        rig.forget(1)
        assert rig.moved_bytes == 2 * blocks.total_bytes


def test_a_small_run_against_plain_files(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    status = measure_peers.run(1, "64KiB", 8, "plain files", tmp_path, out)
    if status == 2:
        pytest.skip("this file system can't do O_DIRECT")
    assert status == 0
    rows = json.loads(out.read_text())
    assert [row["name"].partition(":")[0] for row in rows] == [files.PEERS[0].name] * 2
    assert all(row["value"] > 0 and row["ratio"] > 0 for row in rows)


def test_acquire_is_measured_against_its_floor() -> None:
    rows = measure_acquire.measure([16, 64], 3, lambda _text: None)
    assert [row.name for row in rows][:2] == ["Acquire, 16 blocks, p50", "Acquire, 16 blocks, p99"]
    assert all(row.value and row.value > 0 for row in rows)


@pytest.mark.parametrize(
    ("extras", "ok"), [([0.4, 0.6], True), ([0.1, 6.0], True), ([0.1, 6.5], False), ([-1, 1], True)]
)
def test_growth_is_held_against_that_of_the_context(extras: list[float], ok: bool) -> None:
    assert measure_acquire.growth_row([512, 32768], extras).ok is ok
