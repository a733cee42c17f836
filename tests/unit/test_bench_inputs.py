"""What people get wrong when they start a measurement is said before it works, with the option's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidField
from kvstore_bench import measure_acquire, measure_io, measure_peers
from kvstore_bench.inputs import block_sizes, check_places
from kvstore_bench.traces.errors import TraceError

IO, ACQUIRE, PEERS = measure_io.run, measure_acquire.run, measure_peers.run


@pytest.mark.parametrize(
    ("run", "given", "named"),
    [
        (IO, {"sizes": "0"}, "sizes"),
        (IO, {"sizes": "1000"}, "sizes"),
        (IO, {"sizes": "128MiB"}, "sizes"),
        (IO, {"sizes": ""}, "sizes"),
        (IO, {"rounds": 0}, "rounds"),
        (IO, {"data_dir": Path("/nonexistent")}, "data_dir"),
        (IO, {"data_dir": Path("/proc")}, "data_dir"),
        (ACQUIRE, {"lengths": "-5"}, "lengths"),
        (ACQUIRE, {"lengths": "999999999999"}, "lengths"),
        (ACQUIRE, {"rounds": -1}, "rounds"),
        (PEERS, {"sizes": "0"}, "sizes"),
        (PEERS, {"num_blocks": 10**11}, "num_blocks"),
        (PEERS, {"num_blocks": -1}, "num_blocks"),
    ],
)
def test_wrong_input_names_its_option(run: Any, given: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidField, match=named):
        run(**given)


def test_places_are_looked_at_first(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InvalidField, match="data_dir"):
        check_places(file, None)
    with pytest.raises(TraceError, match="no folder"):
        check_places(tmp_path, tmp_path / "missing" / "rows")


def test_sizes_as_people_write_them() -> None:
    assert block_sizes("2MiB, 64KiB", 64 << 20) == [2 << 20, 64 << 10]
