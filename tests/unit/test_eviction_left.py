"""Branches nobody holds: their heads outlive their ends where others come back to heads only."""

from __future__ import annotations

import pytest

from kvstore.core.blocks import Block, Share
from kvstore.core.eviction.curve import NO_INDEX
from kvstore.core.eviction.left import ENDED, ENDED_DISCOUNT, LEFT, LeftBranches
from kvstore.core.eviction.reach import COUNT_MAX, NUM_LENGTHS, Reach, length_class, size_class
from kvstore.core.types import BlockHash

SECOND = 1_000_000_000


def chain(num_blocks: int, parent: Block | None = None) -> list[Block]:
    blocks: list[Block] = []
    for _ in range(num_blocks):
        block = Block(BlockHash(bytes(16)), parent, 0, Share("", 4096))
        if parent is not None:
            parent.kids.append(block)  # type: ignore[union-attr]
        blocks.append(block)
        parent = block
    return blocks


def learned_from_heads(kind: int) -> LeftBranches:
    """64 branches of 16 blocks; every other one is used after three seconds, its first two blocks only."""
    left = LeftBranches()
    for number in range(64):
        blocks = chain(16)
        left.leave(blocks[-1], kind, 0, 0)
        left.advance(3 * SECOND)
        if number % 2:
            left.use(blocks[1])
        left.evicted(blocks[-1])
        left.advance(60 * SECOND)
    return left


@pytest.mark.parametrize("kind", [LEFT, ENDED])
def test_the_head_of_a_branch_is_worth_more_than_its_end(kind: int) -> None:
    left = learned_from_heads(kind)
    blocks = chain(16)
    left.leave(blocks[-1], kind, 0, 0)
    worth = []
    for at in range(15, 0, -1):
        worth.append(left.worth(blocks[at]))
        branch = left.evicted(blocks[at])
        assert branch is not None
        left.inherit(blocks[at - 1], branch)
    end, head = worth[0], worth[-1]
    assert end is not None and head is not None and head > end > NO_INDEX


def test_an_end_counts_less_than_the_same_evidence_of_a_branch_left() -> None:
    worth = []
    for kind in (LEFT, ENDED):
        left, blocks = learned_from_heads(kind), chain(16)
        left.leave(blocks[-1], kind, 0, 0)
        worth.append(left.worth(blocks[-1]))
    assert worth[0] - worth[1] == ENDED_DISCOUNT  # type: ignore[operator]


def test_a_use_in_the_middle_cuts_the_part_above_off() -> None:
    left, blocks = LeftBranches(), chain(8)
    left.leave(blocks[-1], LEFT, 0, 0)
    left.use(blocks[3])
    branch = left.evicted(blocks[4])
    assert branch is None  # the leaf is still the last block
    branch = left.evicted(blocks[7])
    assert branch is not None and branch.base == 4
    left.inherit(blocks[3], branch)
    assert blocks[3] not in left
    left.inherit(blocks[4], branch)
    assert blocks[4] in left


def test_a_use_of_the_whole_ends_the_branch() -> None:
    left, blocks = LeftBranches(), chain(3)
    left.leave(blocks[-1], LEFT, 0, 0)
    left.use(blocks[-1])
    assert blocks[-1] not in left
    assert left.advance(10 * SECOND) == []


def test_a_use_beside_the_branch_is_none_of_it() -> None:
    left, blocks = LeftBranches(), chain(4)
    side = chain(2, blocks[1])
    left.leave(blocks[-1], LEFT, 2, 0)
    left.use(blocks[1])  # two kids: not the branch's
    left.use(side[-1])
    branch = left.evicted(blocks[-1])
    assert branch is not None and branch.base == 2


def test_classes_are_octaves() -> None:
    assert [size_class(n) for n in (1, 2, 3, 4, 1000, 1 << 30)] == [0, 1, 1, 2, 9, 11]
    assert length_class(1 << 30) == NUM_LENGTHS - 1


def test_counts_fade() -> None:
    reach = Reach()
    for _ in range(int(COUNT_MAX) + 1):
        reach.expose(2, 4, 3)
    exposed = reach.learned()["branches"][NUM_LENGTHS + 2]
    assert exposed[2][3] == (COUNT_MAX + 1) / 2


@pytest.mark.parametrize("damage", [{}, {"branches": []}, {"branches": [[[1]]] * 16}, {"branches": 3}])
def test_damaged_lessons_change_nothing(damage: object) -> None:
    reach = Reach()
    reach.expose(0, 1, 0)
    before = reach.learned()
    with pytest.raises(ValueError, match=r"learned|list"):
        reach.adopt(damage)
    assert reach.learned() == before
