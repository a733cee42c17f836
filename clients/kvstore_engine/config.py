"""Everything that can be set about an engine; unknown keys are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvstore.core.eviction import POLICIES
from kvstore.errors import InvalidField
from kvstore.sizes import parse_bytes

DEFAULT_MODEL = "smollm2-135m-instruct"

Positive = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=3600)]


Attention = Literal["auto", "exact", "paged"]
CudaGraphs = Literal["auto", "off"]


class EngineConfig(BaseModel):
    """Settings of one engine process. Sizes in bytes or tokens, times in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    model: str = DEFAULT_MODEL
    """`smollm2-135m-instruct`, or a directory with a Llama-family model that transformers can load."""
    served_name: str = ""
    """Name in the API; empty: the last part of `model`."""
    cache_dir: Path | None = None
    """Where the default model is converted to; None: $XDG_CACHE_HOME/kvstore."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=1, le=256)] = 1
    """Torch threads. More than one helps only on an otherwise idle machine: they spin against whatever else runs."""
    pool_bytes: Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)] = 512 << 20
    """Size of the KV pool, the hbm tier."""
    block_tokens: Annotated[int, Field(ge=8, le=256, multiple_of=8)] = 32
    attention: Attention = "auto"
    """How contexts are read. exact: gathered, equal bits however they were cut; paged: where they lie in the pool, for
    devices; auto: exact on a CPU, else paged where it proves right."""
    cuda_graphs: CudaGraphs = "auto"
    """auto: decode steps on a device are captured once and replayed, where that proves equal and faster."""
    chunk_tokens: Positive = 256
    """Prefill ends at absolute multiples of this, so that results don't depend on what else was running."""
    context_tokens_max: int = 0
    """Longest context served; 0: what the model and the pool can hold."""
    max_batch: Annotated[int, Field(ge=1, le=256)] = 8
    max_queue: Annotated[int, Field(ge=1, le=100_000)] = 256
    max_tokens_default: Positive = 256
    request_timeout_s: Seconds = 600.0
    patience_s: Seconds = 30.0
    """Requests with little to compute go first, until one has waited this long."""

    store: str = ""
    """Address of the node service (`unix:/path` or `host:port`); empty: no store."""
    durability: Literal["dram", "nvme", "synced"] = "nvme"
    restore_timeout_s: Seconds = 5.0
    """A restore later than this is given up and the rest recomputed."""
    offload_timeout_s: Seconds = 30.0
    store_workers: Annotated[int, Field(ge=1, le=32)] = 2
    restore_plan: Literal["measured", "always"] = "measured"
    """Restore or recompute, or both at once, by measured rates; or restore whatever the store holds."""
    layerwise_restore: Literal["auto", "off"] = "auto"
    """auto: pools on a device take blocks from DRAM layer by layer, and the first chunk behind them is computed
    meanwhile; it counts only if every byte was right. off: restores are whole before anything is computed."""
    restore_blocks_min: Positive = 1
    """Don't ask the store for less than this many blocks."""
    tenant: str = "default"
    eviction: str = "session"
    """Victim order of the hbm tier."""
    recompute_doubles_at: Annotated[int, Field(ge=0)] = 0
    """Tokens into a context at which one more takes twice as long to compute as the first: blocks of the hbm tier then
    count by the time they save. 0: all count alike."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0: any free port."""

    @field_validator("eviction")
    @classmethod
    def _known_policy(cls, value: str) -> str:
        if value not in POLICIES:
            raise ValueError(f"{value!r} is no policy; known: {', '.join(sorted(POLICIES))}")
        return value

    @model_validator(mode="after")
    def _chunks_are_whole_blocks(self) -> EngineConfig:
        if self.chunk_tokens % self.block_tokens:
            raise ValueError(f"chunk_tokens: {self.chunk_tokens} is no multiple of block_tokens {self.block_tokens}")
        return self

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_name or Path(self.model).name


def engine_config(**values: object) -> EngineConfig:
    """Build a config. Raises InvalidField naming the first wrong key."""
    try:
        return EngineConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"]) or first["msg"].removeprefix("Value error, ").split(":")[0]
        raise InvalidField(name, first["msg"], "see EngineConfig for what is allowed") from None
