"""Orders of the heap-based policies on hand-made candidates."""

from __future__ import annotations

import pytest

from kvstore.core.blocks import Block, Share
from kvstore.core.eviction import POLICIES, make_policy
from kvstore.core.eviction.heap import BlockHeap
from kvstore.core.eviction.session import SessionActivity
from kvstore.core.sessions import Session
from kvstore.core.types import Activity, BlockHash, SessionId, Tier


def make_block(number: int, last_ns: int, session: Session | None = None) -> Block:
    block = Block(BlockHash(number.to_bytes(16, "little")), None, 0, Share("", 4096))
    block.last_access_ns = last_ns
    block.last_session = session
    if session is not None:
        block.num_tips = 1
    return block


def test_unknown_policy_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValueError, match="leaf-lru"):
        make_policy("nope", Tier.DRAM)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_empty_policy_has_no_victim_and_discard_is_idempotent(name: str) -> None:
    policy = make_policy(name, Tier.DRAM)
    assert policy.victim(0) is None
    block = make_block(1, 5)
    policy.add(block, 5)
    assert policy.victim(6) is block
    policy.discard(block, 6)
    policy.discard(block, 6)
    assert policy.victim(6) is None


def test_leaf_lru_evicts_by_last_use_and_follows_touches() -> None:
    policy = make_policy("leaf-lru", Tier.DRAM)
    old, new = make_block(1, 10), make_block(2, 20)
    policy.add(new, 20)
    policy.add(old, 20)
    assert policy.victim(20) is old
    old.last_access_ns = 30
    policy.touch(old, None, 30)
    assert policy.victim(30) is new
    policy.evicted(new, 31)
    assert policy.victim(31) is old


def test_session_end_makes_its_blocks_the_first_victims() -> None:
    policy = make_policy("session", Tier.DRAM)
    first, second = (Session(SessionId(name), 0, None, 0) for name in "ab")
    first.activity = second.activity = Activity.IDLE
    first.num_blocks = second.num_blocks = 1
    policy.signal(first, 0)
    policy.signal(second, 0)
    older, newer = make_block(1, 10, first), make_block(2, 20, second)
    policy.add(older, 20)
    policy.add(newer, 20)
    second.activity = Activity.ENDED
    policy.signal(second, 21)
    assert policy.victim(21) is newer


def test_heap_stays_bounded_under_many_key_changes() -> None:
    heap: BlockHeap[int] = BlockHeap()
    blocks = [make_block(i, 0) for i in range(10)]
    for key in range(10_000):
        heap.put(blocks[key % 10], key)
    assert len(heap._heap) < 100
    assert heap.peek() == (9990, blocks[0])


def test_session_admits_what_is_worth_as_much_as_the_victim() -> None:
    policy = SessionActivity()
    ended, idle = (Session(SessionId(name), 0, None, 0) for name in "ab")
    idle.activity, idle.num_blocks = Activity.IDLE, 2
    policy.signal(idle, 0)
    policy.add(make_block(1, 10, idle), 20)
    ended.activity = Activity.ENDED
    policy.signal(ended, 21)
    assert policy.admits(idle, 21)
    assert not policy.admits(ended, 21)
    assert policy.admits(Session(SessionId("new"), 0, None, 21), 21)
