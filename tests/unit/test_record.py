"""Records: round trip, and every single damaged byte is noticed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core.record import BadRecord, decode_record
from kvstore.testing import oracle


@given(
    name=st.text(max_size=20),
    num_slices=st.integers(1, 40),
    slice_bytes=st.integers(1, 300),
    depth=st.integers(0, 2**32 - 1),
)
def test_round_trip(name: str, num_slices: int, slice_bytes: int, depth: int) -> None:
    record = oracle.make_record(name, num_slices, slice_bytes, depth=depth)
    assert decode_record(record.encode()) == record


def test_every_damaged_byte_is_noticed() -> None:
    raw = oracle.make_record("x", 3, 100).encode()
    for at in range(len(raw)):
        damaged = bytearray(raw)
        damaged[at] ^= 1
        with pytest.raises(BadRecord):
            decode_record(bytes(damaged))


@pytest.mark.parametrize("length", [0, 4, 111, 119, 143])
def test_cut_records(length: int) -> None:
    with pytest.raises(BadRecord):
        decode_record(oracle.make_record("x", 3, 100).encode()[:length])


def test_oracle_tells_blocks_apart() -> None:
    """Whatever differs in the identity, the payload differs."""
    base = oracle.make_record("x", 2, 4096)
    others = [
        oracle.make_record("y", 2, 4096),
        oracle.make_record("x", 2, 4096, depth=1),
        oracle.make_record("x", 2, 4096, keyspace="other"),
        oracle.make_record("x", 2, 4096, parent=base.hash),
    ]
    payload = oracle.stream(base, base.payload_bytes)
    assert oracle.verify(base, payload) is None
    assert all(oracle.verify(other, payload) is not None for other in others)


def test_poison_is_in_no_payload() -> None:
    record = oracle.make_record("x", 8, 4096)
    array = oracle.stream(record, record.payload_bytes).copy()
    oracle.poison(array[5000:5016])
    assert oracle.verify(record, array) == 5000
