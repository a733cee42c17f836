"""Token chains: incremental or from scratch, the same everywhere and for ever."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.hashing import DIGEST_BYTES, HASH_BYTES, ExtraKey, TokenChain, check_tokens, common_prefix
from kvstore.core.keyspace import Keyspace
from kvstore.errors import InvalidField

GOLDEN = Path(__file__).parents[1] / "golden"
SPACES = {c["name"]: Keyspace(**c["fields"]) for c in json.loads((GOLDEN / "keyspaces.json").read_text())}
SMALL = Keyspace(**json.loads((GOLDEN / "keyspaces.json").read_text())[0]["fields"] | {"block_tokens": 4})

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
extras = st.lists(st.builds(ExtraKey, st.integers(0, 40), st.binary(max_size=6)), max_size=4)


def fresh(token_ids: Sequence[int], extra: Sequence[ExtraKey] = ()) -> TokenChain:
    chain = TokenChain(SMALL, extra)
    chain.extend(token_ids)
    return chain


def same(a: TokenChain, b: TokenChain) -> bool:
    return (a.hashes, a.digests, a.tokens.tolist()) == (b.hashes, b.digests, b.tokens.tolist())


def num_common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@given(tokens, extras, st.lists(st.integers(0, 40), max_size=6))
def test_in_pieces_or_at_once(ids: list[int], extra: list[ExtraKey], cuts: list[int]) -> None:
    chain = TokenChain(SMALL, extra)
    edges = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    added = sum(chain.extend(ids[a:b]) for a, b in pairwise(edges))
    assert same(chain, fresh(ids, extra))
    assert added == chain.num_blocks == len(ids) // 4
    assert len(chain.hashes) == HASH_BYTES * chain.num_blocks
    assert len(chain.digests) == DIGEST_BYTES * chain.num_blocks


@given(tokens, extras, st.data())
def test_truncated_and_grown_again(ids: list[int], extra: list[ExtraKey], data: st.DataObject) -> None:
    keep, more = data.draw(st.integers(0, len(ids))), data.draw(tokens)
    chain = fresh(ids, extra)
    chain.truncate(keep)
    assert same(chain, fresh(ids[:keep], extra))
    chain.extend(more)
    assert same(chain, fresh(ids[:keep] + more, extra))


@given(tokens, tokens, extras, st.integers(0, 40))
def test_update_keeps_the_common_prefix(old: list[int], tail: list[int], extra: list[ExtraKey], shared: int) -> None:
    new = old[:shared] + tail
    chain = fresh(old, extra)
    kept = chain.update(new)
    assert same(chain, fresh(new, extra))
    assert kept == num_common(old, new)


@given(tokens, tokens, tokens, extras)
def test_a_copy_goes_its_own_way(ids: list[int], left: list[int], right: list[int], extra: list[ExtraKey]) -> None:
    chain = fresh(ids, extra)
    other = chain.copy()
    chain.extend(left)
    other.extend(right)
    assert same(chain, fresh(ids + left, extra))
    assert same(other, fresh(ids + right, extra))


@given(tokens, st.data())
def test_a_changed_token_changes_its_block_and_all_after(ids: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, max(len(ids) - 1, 0)))
    if not ids:
        return
    changed = [*ids]
    changed[at] ^= data.draw(st.integers(1, 2**32 - 1))
    a, b = fresh(ids), fresh(changed)
    for index in range(a.num_blocks):
        assert (a.hash_at(index) == b.hash_at(index)) == (index < at // 4)
        same_digest = a.digests[index * 32 : index * 32 + 32] == b.digests[index * 32 : index * 32 + 32]
        assert same_digest == (index != at // 4)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8), st.integers(0, 7), st.binary(max_size=8))
def test_an_extra_key_changes_its_block(ids: list[int], position: int, value: bytes) -> None:
    plain, keyed = fresh(ids), fresh(ids, [ExtraKey(position, value)])
    assert (plain.hash_at(0) == keyed.hash_at(0)) == (position >= 4)
    assert plain.hash_at(1) != keyed.hash_at(1)


def test_order_of_extra_keys_given_does_not_matter() -> None:
    keys = [ExtraKey(1, b"a"), ExtraKey(1, b"b"), ExtraKey(6, b"c")]
    assert same(fresh(range(8), keys), fresh(range(8), keys[::-1]))


def test_another_keyspace_hashes_otherwise() -> None:
    firsts = set()
    for keyspace in SPACES.values():
        chain = TokenChain(keyspace)
        chain.extend(range(64))
        firsts.add(chain.hash_at(0))
    assert len(firsts) == len(SPACES)


@pytest.mark.parametrize("dtype", ["<u4", ">u4", "i8", "u2", "u8"])
def test_any_integer_array_gives_the_same(dtype: str) -> None:
    ids = list(range(1000, 1016))
    chain = TokenChain(SMALL)
    chain.extend(np.array(ids, dtype=dtype))
    assert same(chain, fresh(ids))


def test_tokens_view_is_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        fresh(range(8)).tokens[0] = 1


@pytest.mark.parametrize("bad", [[-1], [2**32], [0, 1, 2**40], [1.5], ["a"], [[1, 2]], [None]])
def test_ids_out_of_range_are_refused_and_change_nothing(bad: list[Any]) -> None:
    chain = fresh(range(6))
    with pytest.raises(InvalidField, match="token_ids"):
        chain.extend(bad)
    assert same(chain, fresh(range(6)))


@pytest.mark.parametrize("length", [-1, 7])
def test_truncating_outside_is_refused(length: int) -> None:
    with pytest.raises(InvalidField, match="num_tokens"):
        fresh(range(6)).truncate(length)


def test_the_message_names_the_first_bad_position() -> None:
    with pytest.raises(InvalidField, match="-3 at position 2"):
        check_tokens([1, 2, -3, -4])


@given(tokens, tokens)
def test_common_prefix_is_that_of_lists(a: list[int], b: list[int]) -> None:
    assert common_prefix(check_tokens(a), check_tokens(b)) == num_common(a, b)


# ---- golden vectors --------------------------------------------------------------------------------------------------


def golden_mismatches() -> list[str]:
    """Names of golden chains that this process computes otherwise."""
    golden = json.loads((GOLDEN / "block_hashes.json").read_text())
    wrong = []
    for case in golden["chains"]:
        extra = [ExtraKey(position, text.encode()) for position, text in golden["extra_keys"][case["extra_keys"]]]
        chain = TokenChain(SPACES[case["keyspace"]], extra)
        chain.extend(golden["tokens"][case["tokens"]])
        blocks = [[chain.hash_at(i).hex(), chain.digests[32 * i : 32 * i + 32].hex()] for i in range(chain.num_blocks)]
        if (len(blocks), blocks[:2] + blocks[2:][-1:]) != (case["num_blocks"], case["blocks"]):
            wrong.append(f"{case['keyspace']} / {case['tokens']} / {case['extra_keys']}")
    return wrong


def test_golden_vectors() -> None:
    assert golden_mismatches() == []


def test_golden_files_are_those_of_the_reference() -> None:
    for name, content in runpy.run_path(str(GOLDEN / "reference.py"))["make"]().items():
        assert json.loads((GOLDEN / name).read_text()) == json.loads(json.dumps(content)), name


@pytest.mark.parametrize(
    "environment",
    [
        {"PYTHONHASHSEED": "0", "LC_ALL": "C"},
        {"PYTHONHASHSEED": "12345", "LC_ALL": "C.UTF-8", "PYTHONUTF8": "0"},
        {"PYTHONHASHSEED": "4294967295", "LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8"},
        {"PYTHONHASHSEED": "random", "LC_ALL": "POSIX", "PYTHONIOENCODING": "latin-1", "PYTHONOPTIMIZE": "1"},
    ],
    ids=lambda e: f"{e['PYTHONHASHSEED']}-{e['LC_ALL']}",
)
def test_golden_vectors_in_another_process(environment: dict[str, str]) -> None:
    code = f"import runpy; print(runpy.run_path({__file__!r})['golden_mismatches']())"
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == "[]"
