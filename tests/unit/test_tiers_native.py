"""The compiled helper agrees with the xxhash package, and its absence changes nothing but speed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore.tiers import native
from kvstore.tiers.moves import checksums_of


@pytest.fixture(scope="module")
def helper() -> native.Native:
    found = native.load()
    if found is None:
        pytest.skip("no C compiler: the helper can't be built")
    return found


def address(array: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    return int(array.ctypes.data)


@given(
    size=st.integers(native.SLICE_BYTES_MIN, 5000),
    count=st.integers(1, 5),
    source_shift=st.integers(0, 70),
    target_shift=st.integers(0, 70),
    seed=st.integers(0, 2**32 - 1),
)
def test_copies_and_hashes(
    helper: native.Native, size: int, count: int, source_shift: int, target_shift: int, seed: int
) -> None:
    total = size * count
    source = np.random.default_rng(seed).integers(0, 256, total + 140, dtype=np.uint8)
    target = np.full(total + 140, 0xA5, dtype=np.uint8)
    expected = b"".join(
        xxhash.xxh3_64_intdigest(source[at : at + size].tobytes()).to_bytes(8, "little")
        for at in range(source_shift, source_shift + total, size)
    )
    span = (address(target) + target_shift, address(source) + source_shift, total, size)
    assert helper.copy([span]) == expected
    assert helper.hash([span]) == expected
    assert np.array_equal(target[target_shift : target_shift + total], source[source_shift : source_shift + total])
    assert (target[:target_shift] == 0xA5).all()
    assert (target[target_shift + total :] == 0xA5).all()


def test_many_spans(helper: native.Native) -> None:
    source = np.random.default_rng(0).integers(0, 256, 64 << 10, dtype=np.uint8)
    target = np.zeros_like(source)
    spans = [(address(target) + at, address(source) + at, 8192, 1024) for at in range(0, 64 << 10, 8192)]
    assert helper.copy(spans) == checksums_of(source.data, 1024)
    assert np.array_equal(source, target)
    assert helper.hash([]) == b""


def test_a_helper_that_differs_is_not_used(helper: native.Native) -> None:
    class Wrong(native.Native):
        def __init__(self) -> None:
            self._copy, self._hash = helper._copy, helper._hash

        def hash(self, spans: object) -> bytes:
            return bytes(8)

    assert native.agrees(helper)
    assert not native.agrees(Wrong())


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert native._load() is None


def test_a_cache_that_others_can_write_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "kvstore").mkdir()
    os.chmod(tmp_path / "kvstore", 0o777)
    folder = native._cache_folder()
    assert tmp_path not in folder.parents
    folder.rmdir()
    os.chmod(tmp_path / "kvstore", 0o700)
    assert native._cache_folder() == tmp_path / "kvstore"


def test_built_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, helper: native.Native) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = native._built()
    before = first.stat().st_mtime_ns
    assert native._built() == first
    assert first.stat().st_mtime_ns == before
    assert [p.name for p in first.parent.iterdir()] == [first.name]
