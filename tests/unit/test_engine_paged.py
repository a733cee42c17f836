"""Attention over block tables: the same results as exact attention, and the same tokens in an engine."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from kvstore.core.keyspace import Keyspace
from kvstore.errors import SetupError
from kvstore_engine import paged
from kvstore_engine.engine import Engine
from kvstore_engine.pool import KVPool
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.testing import MemoryStore, tiny_config, tiny_model

CPU = torch.device("cpu")
EXACT_HEADS = 6


def pool_of(dtype: str, block_tokens: int = 16, kv_heads: int = 3, head_dim: int = 64) -> KVPool:
    keyspace = Keyspace(
        model="m",
        weights_digest="5f" * 16,
        tokenizer_digest="a1" * 16,
        kv_dtype=dtype,
        num_layers=2,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope="none",
        block_tokens=block_tokens,
    )
    return KVPool(keyspace, 9 * keyspace.slot_bytes, CPU)


@pytest.fixture(autouse=True)
def _uncompiled_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without")
        yield


@pytest.mark.parametrize("block_tokens", [8, 16, 32])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", paged.TOLERANCE)])
def test_it_agrees_with_exact_attention(dtype: str, most: float, block_tokens: int) -> None:
    pool = pool_of(dtype, block_tokens)
    assert not paged.obstacle(pool.layer(0))
    assert paged.difference(pool, EXACT_HEADS, 0.125) <= most
    assert not pool.raw.any()  # the pool is as empty as before


def test_what_other_sequences_hold_is_never_read() -> None:
    """Poison in every other slot changes nothing."""
    pool = pool_of("float32")
    clean = paged.difference(pool, EXACT_HEADS, 0.125)
    pool.raw.view(torch.float32)[:] = 1e6
    assert paged.difference(pool, EXACT_HEADS, 0.125) == clean


def test_a_wrong_table_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with keys of another layer it does."""
    pool = pool_of("float32")
    right = paged.token_rows
    monkeypatch.setattr(paged, "token_rows", lambda layer, which: right(layer, 1 - which))
    assert not paged.works(pool, EXACT_HEADS, 0.125)


def test_what_was_never_written_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: with NaN behind the contexts, and nobody who clears it, it does."""
    pool = pool_of("float32")
    over_tables = paged._over_tables

    def uncleared(query: torch.Tensor, layer: torch.Tensor, plan: paged.Plan, scaling: float) -> torch.Tensor:
        nothing = torch.zeros(0, dtype=torch.int64)
        return over_tables(query, layer, replace(plan, unwritten=(nothing, nothing)), scaling)

    monkeypatch.setattr(paged, "_over_tables", uncleared)
    assert not paged.works(pool, EXACT_HEADS, 0.125)


def test_slots_of_broken_rows_are_refused() -> None:
    pool = pool_of("bfloat16", block_tokens=8, kv_heads=1, head_dim=24)  # 1,536 bytes, padded to 4,096
    assert "whole number" in paged.obstacle(pool.layer(0))
    assert not paged.works(pool, 2, 0.2)


def test_pools_that_the_kernels_cannot_count_are_refused() -> None:
    """2^31 elements, as the pool of a large device has: places would wrap around."""
    one = 2 * 2 * 16 * 8 * 128  # elements of a slot: layers, k and v, tokens, heads, dim
    for num_slots, fine in ((paged.ELEMENTS_MAX // one - 1, True), (paged.ELEMENTS_MAX // one, False)):
        slots = torch.empty(1, device="meta").as_strided((num_slots, 2, 16, 8, 128), (one, 16384, 1024, 128, 1))
        assert (paged.obstacle(slots) == "") is fine


def test_a_compiler_that_gives_up_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(attention="paged")
    model, greedy = tiny_model(config), SamplingParams(max_tokens=4, ignore_eos=True)
    prompt = [3 + i for i in range(60)]
    with Engine(config, model, MemoryStore()) as engine:
        want = engine.generate(prompt, greedy).tokens

        def gives_up(*_: object) -> torch.Tensor:
            raise RuntimeError("recompile_limit reached")

        monkeypatch.setattr(paged, "_attend", gives_up)
        assert engine.generate(prompt, greedy, use_cache=False).tokens == want


@pytest.mark.slow
def test_compiled_it_agrees_too(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++: torch can't compile")
    monkeypatch.setattr(paged, "COMPILE_ON", {"cpu"})
    assert paged.difference(pool_of("float32"), EXACT_HEADS, 0.125) <= 1e-5


def test_an_engine_restores_the_same_tokens() -> None:
    """The output gate: computed, restored and computed again with the same cuts."""
    config = tiny_config(attention="paged", pool_bytes=1 << 20)
    model = tiny_model(config)
    greedy = SamplingParams(max_tokens=8, ignore_eos=True)
    prompt = [7 + i % 200 for i in range(150)]
    with Engine(config, model, MemoryStore()) as engine:
        first = engine.generate(prompt, greedy, session="a")
        for other in range(6):
            engine.generate([11 + other + i % 190 for i in range(150)], greedy)
        assert engine.wait_quiet(30)
        again = engine.generate(prompt, greedy, session="a")
        fresh = engine.generate(prompt, greedy, use_cache=False, plan=again.plan)
    assert again.usage.cached_tokens > 0
    assert again.tokens == first.tokens == fresh.tokens


def test_asked_for_and_impossible_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "works", lambda *_: False)
    config = tiny_config(attention="paged")
    with pytest.raises(SetupError, match="attention"):
        Engine(config, tiny_model(config), MemoryStore())
