"""The well-known policies on hand-made leaves and paths: what each one is about, and what a parent inherits."""

from __future__ import annotations

import pytest

from kvstore.core.blocks import Block, Residency, Share
from kvstore.core.eviction import POLICIES, make_policy
from kvstore.core.eviction.protocol import EvictionPolicy
from kvstore.core.eviction.w_tinylfu import Sketch
from kvstore.core.sessions import Session
from kvstore.core.types import Activity, BlockHash, ResidencyState, SessionId, Slot, Tier

SHARE = Share("", 4096)


class Leaves:
    """Blocks that come, are used, and go, under one policy of DRAM."""

    def __init__(self, name: str, capacity: int = 100) -> None:
        self.policy: EvictionPolicy = make_policy(name, Tier.DRAM)
        sized = getattr(self.policy, "sized", None)
        if sized is not None:
            sized(capacity)
        self.now = 0
        self.blocks: dict[str, Block] = {}

    def bring(self, *names: str, parent: str = "") -> None:
        """Blocks that are candidates at once; a parent stops being one."""
        for name in names:
            above = self.blocks[parent] if parent else None
            block = Block(BlockHash(name.encode().ljust(16)), above, 0, SHARE)
            block.residencies[Tier.DRAM] = Residency(Slot(0), ResidencyState.READY, 0)
            self.blocks[name] = block
            if above is not None:
                self.policy.discard(above, self.now)
            block.last_access_ns = self.now
            self.policy.add(block, self.now)
            self.use(name)

    def use(self, *names: str) -> None:
        for name in names:
            self.now += 1
            self.blocks[name].last_access_ns = self.now
            self.policy.touch(self.blocks[name], None, self.now)

    def evict(self) -> str:
        """Evict the victim as the machine does; its name."""
        victim = self.policy.victim(self.now)
        assert victim is not None and self.policy.victim(self.now) is victim, "asking twice gives the same"
        self.policy.evicted(victim, self.now)
        victim.residencies[Tier.DRAM] = None
        if victim.parent is not None:
            victim.parent.last_access_ns = max(victim.parent.last_access_ns, victim.last_access_ns)
            self.policy.add(victim.parent, self.now)
        return victim.hash.decode().strip()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_candidate_leaves_once(name: str) -> None:
    leaves = Leaves(name)
    leaves.bring("a", "b", "c")
    leaves.bring("c1", parent="c")
    leaves.bring("c2", parent="c1")
    leaves.use("a", "c2", "a")
    gone = [leaves.evict() for _ in range(5)]
    assert sorted(gone) == ["a", "b", "c", "c1", "c2"]
    assert gone.index("c2") < gone.index("c1") < gone.index("c"), "children before parents"
    assert leaves.policy.victim(leaves.now) is None


def test_fifo_goes_by_arrival_whatever_is_used() -> None:
    leaves = Leaves("fifo")
    leaves.bring("a", "b")
    leaves.use("a", "a")
    assert [leaves.evict(), leaves.evict()] == ["a", "b"]


def test_fifo_gives_a_parent_the_age_of_its_oldest_child() -> None:
    leaves = Leaves("fifo")
    leaves.bring("a", "b")
    leaves.bring("a1", parent="a")
    leaves.bring("c")
    assert [leaves.evict() for _ in range(4)] == ["b", "a1", "a", "c"]


def test_lru_goes_by_last_use() -> None:
    leaves = Leaves("lru")
    leaves.bring("a", "b", "c")
    leaves.use("a")
    assert [leaves.evict() for _ in range(3)] == ["b", "c", "a"]


def test_lfu_counts_uses_and_hands_them_to_the_parent() -> None:
    leaves = Leaves("lfu")
    leaves.bring("a", "b", "c")
    leaves.bring("a1", parent="a")
    leaves.use("a1", "a1", "b", "b", "c")
    assert leaves.evict() == "c"
    assert [leaves.evict() for _ in range(3)] == ["a1", "b", "a"], "3 uses each, a1 reached them first; a has 4"


def test_gdsf_forgets_old_counts() -> None:
    leaves = Leaves("gdsf")
    leaves.bring("often")
    leaves.use(*["often"] * 4)
    gone = []
    for number in range(12):
        leaves.bring(f"n{number}")
        leaves.use(f"n{number}")
        leaves.bring(f"m{number}")
        gone += [leaves.evict(), leaves.evict()]
    assert "often" in gone
    lfu = Leaves("lfu")
    lfu.bring("often")
    lfu.use(*["often"] * 4)
    for number in range(12):
        lfu.bring(f"n{number}", f"m{number}")
        assert {lfu.evict(), lfu.evict()} == {f"n{number}", f"m{number}"}


def test_sieve_spares_what_was_used_and_leaves_it_in_place() -> None:
    leaves = Leaves("sieve")
    leaves.bring("a", "b", "c", "d")
    leaves.use("a", "c")
    assert leaves.evict() == "b"
    leaves.bring("e")
    assert leaves.evict() == "d", "the hand goes on from b, passing c"
    assert leaves.evict() == "e"
    assert leaves.evict() == "a", "second round: a's use was forgotten when the hand passed"


def test_s3_fifo_promotes_what_is_used_again_and_remembers_what_was_not() -> None:
    leaves = Leaves("s3-fifo")
    leaves.bring("a", "b", "c")
    leaves.use("a")
    assert leaves.evict() == "b", "a moved to main"
    leaves.bring("b")
    leaves.bring("d")
    assert [leaves.evict(), leaves.evict()] == ["c", "d"], "b came back from the ghosts, straight into main"


def test_arc_grows_the_list_whose_ghosts_return() -> None:
    leaves = Leaves("arc", capacity=4)
    leaves.bring("a", "b")
    leaves.use("a")
    leaves.bring("c", "d")
    assert leaves.evict() == "b", "used once, and the first list has no claim yet"
    leaves.bring("b")
    leaves.bring("e")
    assert leaves.evict() == "c"
    leaves.bring("c")
    assert [leaves.evict() for _ in range(3)] == ["a", "b", "d"], "two of five is what the first list may hold by now"


def test_tinylfu_lets_a_newcomer_in_only_over_a_rarer_one() -> None:
    leaves = Leaves("w-tinylfu")
    leaves.bring("a", "b")
    leaves.use("a", "a", "b")
    leaves.bring("c")
    assert leaves.evict() == "b", "a enters main, which is empty; b meets it and is the rarer"
    leaves.bring("d", "e")
    assert [leaves.evict() for _ in range(3)] == ["c", "d", "a"]


def test_sketch_remembers_and_forgets() -> None:
    sketch = Sketch(1000)
    one, other = BlockHash(b"1".ljust(16)), BlockHash(b"2".ljust(16))
    sketch.raise_to(one, 9)
    sketch.raise_to(other, 40)
    assert (sketch.count(one), sketch.count(other)) == (9, 15)
    sketch.halve()
    assert (sketch.count(one), sketch.count(other)) == (4, 7)


def test_tool_wait_pins_until_its_time_is_over() -> None:
    policy = make_policy("tool-ttl", Tier.DRAM)
    second = 10**9
    waiting, idle = (Session(SessionId(name), 0, None, 0) for name in "ab")
    waiting.activity, idle.activity = Activity.TOOL_WAIT, Activity.IDLE
    blocks = []
    for number, session in enumerate((waiting, idle)):
        block = Block(BlockHash(bytes([number]) * 16), None, 0, SHARE)
        block.last_access_ns, block.last_session, block.num_tips = number, session, 1
        session.tip = block
        policy.add(block, 1)
        blocks.append(block)
    older, newer = blocks
    assert policy.victim(second) is newer
    assert policy.victim(61 * second) is older, "the time is over"
    waiting.since_ns, waiting.expected_ns = 61 * second, 100 * second
    policy.signal(waiting, 61 * second)
    assert policy.victim(260 * second) is newer, "twice what the agent expected"
    waiting.activity = Activity.RUNNING
    policy.signal(waiting, 260 * second)
    assert policy.victim(260 * second) is older


def test_notes_of_blocks_lost_unseen_are_swept() -> None:
    leaves = Leaves("lfu")
    for number in range(5000):
        name = f"x{number}"
        leaves.bring(name)
        leaves.policy.discard(leaves.blocks[name], leaves.now)
        leaves.blocks.pop(name).residencies[Tier.DRAM] = None
    assert len(leaves.policy._notes) < 2500  # type: ignore[attr-defined]
