"""Tables: many small copies as columns of numbers."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.errors import ChecksumMismatch, InvalidField, Unavailable
from kvstore.tiers.moves import checksums_of
from kvstore.tiers.tables import Table, usable
from kvstore.tiers.transfer import Priority, TransferEngine

SLICE, BLOCK, COUNT = 4096, 4 * 4096, 300
pytestmark = pytest.mark.skipif(not usable(SLICE), reason="needs a C compiler for the helper")


@pytest.fixture
def engine() -> TransferEngine:
    engine = TransferEngine(2)
    yield engine
    engine.close()


def make(seed: int = 1) -> Table:
    draw = np.random.default_rng(seed)
    source = draw.integers(0, 256, COUNT * BLOCK, dtype=np.uint8)
    sums = [checksums_of(source[i * BLOCK : (i + 1) * BLOCK].data, SLICE) for i in range(COUNT)]
    return Table(
        source,
        np.arange(COUNT) * BLOCK,
        np.full(COUNT * BLOCK, 0xA5, dtype=np.uint8),
        draw.permutation(COUNT) * BLOCK,
        BLOCK,
        SLICE,
        np.frombuffer(b"".join(sums), dtype="<u8").reshape(COUNT, -1),
    )


def blocks(array: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    return array.reshape(COUNT, BLOCK)[offsets // BLOCK]


def test_every_row_lands_and_its_checksums_come_back(engine: TransferEngine) -> None:
    table = make()
    done = engine.submit_table(table, Priority.READ).wait(30)
    assert not done.errors
    assert np.array_equal(blocks(table.target, table.target_offsets), blocks(table.source, table.source_offsets))
    assert np.array_equal(done.checksums, table.checksums)


def test_only_rows_with_wrong_bytes_fail(engine: TransferEngine) -> None:
    table = make()
    for row, at in ((7, 0), (250, BLOCK - 1)):
        table.source[row * BLOCK + at] ^= 1
    errors = engine.submit_table(table, Priority.READ).wait(30).errors
    assert sorted(errors) == [7, 250]
    assert all(isinstance(error, ChecksumMismatch) for error in errors.values())
    assert "slice 0" in str(errors[7]) and "slice 3" in str(errors[250])


def test_a_passed_deadline_and_a_closed_engine_are_named(engine: TransferEngine) -> None:
    table = make()
    errors = engine.submit_table(table, Priority.READ, -1.0).wait(30).errors
    assert len(errors) == COUNT and all(isinstance(error, Unavailable) for error in errors.values())
    assert (table.target == 0xA5).all()
    engine.close()
    with pytest.raises(Unavailable):
        engine.submit_table(table, Priority.READ)


@pytest.mark.parametrize("change", ["source", "target", "negative", "slices", "sums", "read-only"])
def test_places_that_cannot_be_are_refused(engine: TransferEngine, change: str) -> None:
    table = make()
    if change == "source":
        table.source_offsets[3] = COUNT * BLOCK - BLOCK + 1
    elif change == "target":
        table.target_offsets[3] = COUNT * BLOCK
    elif change == "negative":
        table.target_offsets[3] = -BLOCK
    elif change == "slices":
        table.slice_bytes = 4095
    elif change == "sums":
        table.checksums = table.checksums[:, 1:]
    else:
        table.target.flags.writeable = False
    with pytest.raises(InvalidField):
        engine.submit_table(table, Priority.READ)
    assert engine.queued_bytes(Priority.READ) == 0


def test_an_empty_table_is_done(engine: TransferEngine) -> None:
    table = make()
    empty = Table(table.source, table.source_offsets[:0], table.target, table.target_offsets[:0], BLOCK, SLICE)
    assert not engine.submit_table(empty, Priority.READ).wait(0).errors
