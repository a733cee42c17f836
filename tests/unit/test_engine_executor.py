"""The promise under everything else: equal chunk boundaries give equal bits, whoever else is in the batch, wherever the
blocks lie.
"""

from __future__ import annotations

import random

import pytest
import torch

from kvstore_engine.executor import Executor, Work, rows_are_alike
from kvstore_engine.model import LoadedModel
from kvstore_engine.pool import KVPool
from kvstore_engine.testing import tiny_config, tiny_model

SIZE = 16


def make(dtype: str, slots: int = 64) -> tuple[LoadedModel, KVPool, Executor]:
    config = tiny_config(dtype=dtype, pool_bytes=slots * 16384)
    model = tiny_model(config)
    pool = KVPool(model.keyspace, slots * model.keyspace.slot_bytes, model.device)
    return model, pool, Executor(model, pool, max_batch=8, threads=1)


def tokens(n: int, seed: int = 1) -> list[int]:
    return [random.Random(seed).randrange(1, 512) for _ in range(n)] if n else []


def prefill(executor: Executor, ids: list[int], ends: list[int], slots: list[int]) -> torch.Tensor:
    start, logits = 0, torch.empty(0)
    for end in ends:
        logits = executor.prefill(Work(ids[start:end], start, slots))
        start = end
    return logits


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_agrees_with_the_model_itself(dtype: str) -> None:
    model, _, executor = make(dtype)
    ids = tokens(100)
    logits = prefill(executor, ids, [32, 64, 96, 100], list(range(10, 20)))
    model.causal_lm.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = model.causal_lm(torch.tensor([ids])).logits[0, -1].float()
    tolerance = 3e-2 if dtype == "bfloat16" else 1e-4
    assert torch.allclose(logits, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_of_one_and_of_eight_give_the_same_logits(dtype: str) -> None:
    _, _, executor = make(dtype)
    works = []
    for i in range(8):
        ids, slots = tokens(20 + 7 * i, seed=i), list(range(8 * i, 8 * i + 8))
        prefill(executor, ids, [len(ids)], slots)
        works.append(Work([7 + i], len(ids), slots))
    alone = [executor.decode([work])[0] for work in works]
    together = executor.decode(works)
    backwards = executor.decode(works[::-1])
    for i in range(8):
        assert torch.equal(alone[i], together[i])
        assert torch.equal(alone[i], backwards[7 - i])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_same_boundaries_in_other_slots_give_the_same_bits(dtype: str) -> None:
    _, _, executor = make(dtype)
    ids = tokens(75)
    first = prefill(executor, ids, [32, 64, 75], list(range(5)))
    again = prefill(executor, ids, [32, 64, 75], [40, 3, 22, 60, 11])
    assert torch.equal(first, again)


def test_restored_bytes_in_other_slots_continue_with_the_same_bits() -> None:
    """Poison all slots, put the first four blocks elsewhere: the rest computes as if nothing had happened."""
    _, pool, executor = make("bfloat16")
    ids = tokens(75)
    expected = prefill(executor, ids, [64, 75], list(range(5)))
    kept = pool.host_view()[:4].copy()
    for slot in range(pool.num_slots):
        pool.fill(slot, 0xFF)  # NaN
    target = [50, 20, 33, 7]
    for source, slot in enumerate(target):
        pool.host_view()[slot] = kept[source]
    logits = executor.prefill(Work(ids[64:], 64, [*target, 9]))
    assert torch.equal(logits, expected)


def test_what_was_never_written_can_not_be_read() -> None:
    """Slots beyond a context's last token are masked, whatever bytes they hold."""
    _, pool, executor = make("bfloat16")
    ids = tokens(20)
    clean = prefill(executor, ids, [20], [1, 2])
    for slot in range(pool.num_slots):
        pool.fill(slot, 0xFF)  # NaN
    assert torch.equal(prefill(executor, ids, [20], [5, 6]), clean)


def test_products_of_padded_rows_treat_rows_alike() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(3))
    assert rows_are_alike(weight.to(torch.bfloat16), [8, 16, 32, 64])
