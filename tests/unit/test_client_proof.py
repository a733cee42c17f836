"""Records are judged by the chain, pages at once."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.core.hashing import TokenChain
from kvstore.core.keyspace import Keyspace
from kvstore.core.record import NO_PARENT, Record
from kvstore_client.proof import checksums_of_records

KEYSPACE = Keyspace(
    model="m",
    weights_digest="0" * 32,
    tokenizer_digest="0" * 32,
    kv_dtype="bfloat16",
    num_layers=3,
    num_kv_heads=1,
    head_dim=8,
    rope="r",
    block_tokens=4,
)


@pytest.fixture
def chain() -> TokenChain:
    chain = TokenChain(KEYSPACE)
    chain.extend(np.arange(40))
    return chain


def record(chain: TokenChain, i: int) -> Record:
    sums = np.arange(3 * i, 3 * i + 3, dtype="<u8").tobytes()
    parent = chain.hash_at(i - 1) if i else NO_PARENT
    return Record(KEYSPACE.id, chain.hash_at(i), parent, i, chain.digest_at(i), KEYSPACE.slice_bytes, sums)


@pytest.mark.parametrize("first", [0, 4])
def test_right_records_give_their_checksums(chain: TokenChain, first: int) -> None:
    sums, wrong = checksums_of_records([record(chain, i).encode() for i in range(first, 10)], chain, first)
    assert not wrong
    assert sums.tolist() == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(first, 10)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"keyspace": bytes(32)}, "keyspace differs"),
        ({"hash": bytes(16)}, "another block's record"),
        ({"parent": bytes(16)}, "another block's record"),
        ({"depth": 9}, "another block's record"),
        ({"digest": bytes(32)}, "token digest differs"),
        ({"slice_bytes": 1}, "layout differs"),
        ({"checksums": bytes(16)}, "layout differs"),
    ],
)
def test_a_record_that_differs_in_any_field_is_named(chain: TokenChain, change: dict[str, object], words: str) -> None:
    records = [record(chain, i) for i in range(10)]
    records[5] = records[5]._replace(**change)
    sums, wrong = checksums_of_records([r.encode() for r in records], chain, 0)
    assert list(wrong) == [5] and words in wrong[5]
    assert sums[6].tolist() == [18, 19, 20]


def test_damaged_records_are_refused_or_their_checksums_fail_later(chain: TokenChain) -> None:
    good = [record(chain, i).encode() for i in range(10)]
    for at in range(112):
        bad = bytearray(good[3])
        bad[at] ^= 1
        _, wrong = checksums_of_records([*good[:3], bytes(bad), *good[4:]], chain, 0)
        assert list(wrong) == [3]
    _, wrong = checksums_of_records([b"", *good[1:]], chain, 0)
    assert list(wrong) == [0]


def test_no_records(chain: TokenChain) -> None:
    sums, wrong = checksums_of_records([], chain, 0)
    assert len(sums) == 0 and not wrong
