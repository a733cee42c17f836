"""KV bytes per token and prefill cost of models, from their configs.

GQA keeps K and V of every KV head of every layer: 2 x layers x kv_heads x head_dim x bytes. MLA keeps one latent and
the shared rope part: layers x (kv_lora_rank + rope_dim) x bytes. Any `config.json` in the manner of Hugging Face is
read the same way as the presets.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_bench.traces.errors import TraceError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "float8_e4m3fn": 1, "int8": 1}


F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Model:
    """What a plan needs to know of a model. `active_params`: weights that one token goes through."""

    name: str
    num_layers: int
    attention_width: int
    """Query heads x (size of a key + size of a value): what one pair of tokens costs attention, in multiply-adds."""
    kv_bytes_per_token: int
    active_params: float
    basis: str
    """How the KV size came about, for the report."""

    @property
    def doubles_at(self) -> int:
        """Tokens into a context at which one more costs twice what the first did, since attention costs as much as the
        weights."""
        return round(self.active_params / (self.num_layers * self.attention_width))

    def prefill_flops(self, start: F64, tokens: F64) -> F64:
        """FLOPs to prefill `tokens` tokens after `start` cached ones: weights, and attention by position."""
        pairs = tokens * start + tokens * tokens / 2.0
        return 2.0 * self.active_params * tokens + 2.0 * self.num_layers * self.attention_width * pairs


PRESETS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
        "torch_dtype": "bfloat16", "active_params": 8.03e9,
    },
    "llama-3-70b": {
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192,
        "torch_dtype": "bfloat16", "active_params": 70.6e9,
    },
    "qwen2.5-32b": {
        "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8, "hidden_size": 5120,
        "torch_dtype": "bfloat16", "active_params": 32.8e9,
    },
    "deepseek-v3": {
        "num_hidden_layers": 61, "num_attention_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "torch_dtype": "bfloat16",
        "active_params": 37e9,
    },
    "smollm2-135m": {
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576,
        "torch_dtype": "bfloat16", "active_params": 135e6,
    },
}  # fmt: skip


def load_model(name: str, kv_dtype: str = "") -> Model:
    """A preset by name, or a config.json by path. Raises TraceError with what is missing."""
    if name in PRESETS:
        return from_config(name, PRESETS[name], kv_dtype)
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise TraceError(name, "is no known model", mend=f"use {', '.join(PRESETS)} or a path to config.json")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise TraceError(str(path), f"isn't valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise TraceError(str(path), "expected a JSON object")
    return from_config(str(path), config, kv_dtype)


def from_config(name: str, config: dict[str, Any], kv_dtype: str = "") -> Model:
    """Derive a model from the fields of its config; those of a multimodal one lie in its `text_config`."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    layers, hidden = _whole(name, config, "num_hidden_layers"), _whole(name, config, "hidden_size")
    heads = _whole(name, config, "num_attention_heads")
    dtype = kv_dtype or str(config.get("torch_dtype") or config.get("dtype") or "bfloat16")
    if dtype not in DTYPE_BYTES:
        field = "--kv-dtype" if kv_dtype else "torch_dtype"
        raise TraceError(name, f"unknown KV dtype {dtype!r}", field=field, mend=f"use {', '.join(DTYPE_BYTES)}")
    width = DTYPE_BYTES[dtype]
    head_dim = _whole(name, config, "head_dim", hidden // heads)
    kv_heads = _whole(name, config, "num_key_value_heads", heads)
    if config.get("kv_lora_rank"):
        rope = _whole(name, config, "qk_rope_head_dim")
        latent = _whole(name, config, "kv_lora_rank") + rope
        size, basis = layers * latent * width, f"MLA: {layers} layers x {latent} latent x {width} B ({dtype})"
        key = _whole(name, config, "qk_nope_head_dim", head_dim) + rope
        attention = heads * (key + _whole(name, config, "v_head_dim", head_dim))
    else:
        size = 2 * layers * kv_heads * head_dim * width
        basis = f"GQA: K and V x {layers} layers x {kv_heads} KV heads x {head_dim} x {width} B ({dtype})"
        attention = 2 * heads * head_dim
    params = config.get("active_params") or _active_params(name, config, layers, hidden, (heads + kv_heads) * head_dim)
    return Model(name, layers, attention, size, float(params), basis)


def _active_params(name: str, config: dict[str, Any], layers: int, hidden: int, heads: int) -> float:
    """Weights that a token goes through: attention, and the dense or the chosen experts' feed-forward part."""
    inner = _whole(name, config, "intermediate_size", 4 * hidden)
    if config.get("num_experts_per_tok"):
        chosen = _whole(name, config, "num_experts_per_tok") + int(config.get("n_shared_experts") or 0)
        inner = chosen * _whole(name, config, "moe_intermediate_size", inner)
    vocabulary = _whole(name, config, "vocab_size", 32000)
    return float(layers * (2 * hidden * heads + 3 * hidden * inner) + vocabulary * hidden)


def _whole(name: str, config: dict[str, Any], field: str, default: int | None = None) -> int:
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise TraceError(name, f"expected a positive whole number, found {value!r}", field=field)
    return value
