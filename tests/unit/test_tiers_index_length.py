"""An index whose file is shorter than its last page number: nothing is missing, or something is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.errors import SetupError
from kvstore.tiers.index_lmdb import BlockIndex


def used_and_freed(folder: Path) -> Path:
    """Many rows come and go: the last pages are freed, and some never written."""
    index = BlockIndex.open(folder)
    for number in range(50):
        index.put_sessions({f"s{number}-{k}": {"a": "x" * 200} for k in range(50)})
    index.put_sessions({f"s{number}-{k}": None for number in range(49) for k in range(50)})
    index.close()
    return folder / "data.mdb"


def test_pages_that_were_never_written_are_no_damage(tmp_path: Path) -> None:
    data = used_and_freed(tmp_path)
    before = data.stat().st_size
    index = BlockIndex.open(tmp_path)
    needed = (int(index._env.info()["last_pgno"]) + 1) * 4096
    assert before < needed == data.stat().st_size
    assert len(index.sessions()) == 50
    index.put_sessions({f"t{k}": {"b": "y" * 200} for k in range(500)})
    assert len(index.sessions()) == 550
    index.close()


def test_a_file_that_was_cut_is_refused_and_left_alone(tmp_path: Path) -> None:
    data = used_and_freed(tmp_path)
    os.truncate(data, 3 * 4096)
    with pytest.raises(SetupError, match=r"was cut: 12288 bytes of \d+; run `kvstore fsck --repair`"):
        BlockIndex.open(tmp_path)
    assert data.stat().st_size == 3 * 4096
