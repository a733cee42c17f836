"""The node service's configuration: one class, three sources, one truth.

    flags of `kvstore serve`  >  environment KVSTORE_*  >  TOML file  >  defaults

`ServiceConfig` is the only list of settings: the flags, the environment names and the error texts are made from it.
`load` merges the sources; a bare `ServiceConfig(...)` reads nothing but its arguments, so tests and embedded use see no
environment.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvstore.core.eviction import POLICIES
from kvstore.core.types import SLOT_ALIGN
from kvstore.errors import InvalidField
from kvstore.sizes import disk_bytes, memory_bytes, parse_bytes

ENV_PREFIX = "KVSTORE_"
NOT_SETTINGS = ("CONFIG", "DEBUG")
"""Variables with our prefix that mean something else: the path of the TOML file, and tracebacks."""
OTHER_PARTS = ("BENCH_", "CLIENT_", "DEMO_", "ENGINE_", "GPU_", "TEST_")
"""Prefixes of variables that belong to other programs of this distribution."""

SOCKET_PATH_MAX = 100
"""A unix socket's path may have 107 bytes; the descriptor socket beside it is named `<socket>.fd`."""

_MIB = 1 << 20
_SHARE = 4
"""Default tiers take one part in this many of what is there."""


def _whole_slots(value: int) -> int:
    if value % SLOT_ALIGN:
        raise ValueError(f"{value} is no multiple of {SLOT_ALIGN}")
    return value


def _policy(value: str) -> str:
    if value not in POLICIES:
        raise ValueError(f"{value!r} is no policy; known: {', '.join(sorted(POLICIES))}")
    return value


Size = Annotated[int, BeforeValidator(parse_bytes)]
Policy = Annotated[str, AfterValidator(_policy)]
Switch = Literal["auto", "on", "off"]


def default_data_dir() -> Path:
    """Where a service keeps its data that was told nothing."""
    return Path(os.environ.get("XDG_DATA_HOME") or "~/.local/share").expanduser().absolute() / "kvstore"


class TenantQuota(BaseModel):
    """What one tenant may hold on this node; a field left out has no limit of its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dram_bytes: Size | None = Field(default=None, ge=0, description="DRAM this tenant may hold")
    nvme_bytes: Size | None = Field(default=None, ge=0, description="NVMe this tenant may hold")


class ServiceConfig(BaseSettings):
    """Everything a node service can be told. Immutable; sizes are bytes once read ("8GiB" when written).

    Raises pydantic's ValidationError when made directly; `load` turns that into one `InvalidField`.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=True)

    data_dir: Path = Field(
        default_factory=default_data_dir,
        description="folder of the NVMe tier and its index; one service at a time",
    )
    socket: Path = Field(
        default_factory=lambda data: data["data_dir"] / "kvstore.sock",
        description="unix socket for engines on this host; default kvstore.sock in data_dir",
    )
    host: str = Field(default="127.0.0.1", min_length=1, description="address for TCP and metrics")
    port: int = Field(default=0, ge=0, le=65535, description="TCP port for gRPC; 0 is off")
    metrics_port: int = Field(default=9435, ge=0, le=65535, description="port of Prometheus' /metrics; 0 is off")

    segment_bytes: Annotated[Size, AfterValidator(_whole_slots)] = Field(
        default=64 * _MIB, ge=SLOT_ALIGN, le=1 << 30, description="unit in which a pool is given to a block size"
    )
    dram_bytes: Size = Field(
        default_factory=lambda data: _share(memory_bytes(), data["segment_bytes"]),
        ge=_MIB,
        description="DRAM arena; default a quarter of the memory",
    )
    nvme_bytes: Size = Field(
        default_factory=lambda data: _share(disk_bytes(data["data_dir"]), data["segment_bytes"]),
        ge=0,
        description="cap of the NVMe tier, 0 is off; default a quarter of the free disk",
    )
    nvme_reserve_bytes: Size = Field(
        default=1024 * _MIB, ge=0, description="free disk that is never used, whatever the cap says"
    )
    direct_io: Switch = Field(default="auto", description="O_DIRECT for the NVMe tier; auto probes")
    huge_pages: Switch = Field(default="auto", description="huge pages for the DRAM arena; on refuses to start without")
    io_threads: int = Field(default=8, ge=1, le=256, description="threads that read and write NVMe")
    scrub_bytes_per_s: Size = Field(
        default=8 * _MIB, ge=0, description="rate of re-reading NVMe in idle time; 0 is off"
    )

    dram_policy: Policy = Field(default="session", description="eviction policy of DRAM")
    nvme_policy: Policy = Field(default="session", description="eviction policy of NVMe")
    recompute_doubles_at: int = Field(
        default=0,
        ge=0,
        description="tokens into a context at which one more takes twice as long to compute as the first: blocks then "
        "count by the time they save (`kvstore bench plan` says it for a model); 0: all tokens count alike",
    )
    write_behind_watermark: float = Field(
        default=0.7, ge=0, le=1, description="share of DRAM without a copy on NVMe above which blocks are copied down"
    )

    lease_ttl_s: float = Field(default=30.0, ge=0.1, le=3600, description="seconds a lease lives without renewal")
    max_leases: int = Field(default=65_536, ge=1, description="leases at once")
    max_sessions: int = Field(default=100_000, ge=1, description="sessions at once, idle ones included")
    max_request_blocks: int = Field(default=131_072, ge=1, le=1 << 20, description="blocks in one request")
    tenants: dict[str, TenantQuota] = Field(default_factory=dict, description="quotas by tenant name")
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least severity logged")

    @field_validator("data_dir", "socket")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @field_validator("socket")
    @classmethod
    def _short(cls, value: Path) -> Path:
        if len(os.fsencode(value)) > SOCKET_PATH_MAX:
            raise ValueError(f"{value} is longer than the {SOCKET_PATH_MAX} bytes a unix socket's path may have")
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments only; `load` brings the other sources in."""
        return (init_settings,)


def load(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> ServiceConfig:
    """The configuration of this process. `path`: TOML file, else the one KVSTORE_CONFIG names, else none.

    `overrides`: values by field name, flags as a rule; None means "not given". Raises InvalidField, one line: the
    field, what is wrong with it, and the mend; for an unknown key the closest known one.
    """
    path = path or (Path(os.environ[f"{ENV_PREFIX}CONFIG"]) if os.environ.get(f"{ENV_PREFIX}CONFIG") else None)
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    merged = (_from_file(path) if path else {}) | _from_environment() | given
    _refuse_unknown(given, ServiceConfig.model_fields, "")
    try:
        return ServiceConfig(**merged)
    except ValidationError as error:
        raise _invalid(error) from None


def _share(total_bytes: int, segment_bytes: int) -> int:
    return max(total_bytes // _SHARE // segment_bytes, 1) * segment_bytes


def read_toml(path: Path) -> dict[str, Any]:
    """Content of a TOML file. Raises InvalidField naming the file and the line."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidField("config", f"can't read {path}: {error.strerror}", "give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidField("config", f"{path} is no TOML: {error}", "mend that line") from None


def _from_file(path: Path) -> dict[str, Any]:
    content = read_toml(path)
    _refuse_unknown(content, ServiceConfig.model_fields, f" in {path}")
    return content


def _from_environment() -> dict[str, Any]:
    names = [n.removeprefix(ENV_PREFIX) for n in os.environ if n.startswith(ENV_PREFIX)]
    mine = [n.lower() for n in names if n not in NOT_SETTINGS and not n.startswith(OTHER_PARTS)]
    _refuse_unknown(mine, ServiceConfig.model_fields, " in the environment", ENV_PREFIX)
    try:
        return EnvSettingsSource(ServiceConfig, env_prefix=ENV_PREFIX, case_sensitive=False)()
    except SettingsError as error:
        raise InvalidField(f"{ENV_PREFIX}TENANTS", str(error), "give a JSON object of quotas by tenant name") from None


def _refuse_unknown(keys: Iterable[str], known: Iterable[str], where: str, prefix: str = "") -> None:
    known = list(known)
    for key in keys:
        if key not in known:
            raise InvalidField(_shown(key, prefix), f"unknown setting{where}", _closest(key, known, prefix))


def _closest(key: str, known: list[str], prefix: str = "") -> str:
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {_shown(close[0], prefix)}?"
    return f"known are {', '.join(_shown(k, prefix) for k in sorted(known))}"


def _shown(key: str, prefix: str) -> str:
    return prefix + key.upper() if prefix else key


def _invalid(error: ValidationError) -> InvalidField:
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return InvalidField(name, "unknown setting", _closest(str(first["loc"][-1]), list(TenantQuota.model_fields)))
    reason = first.get("ctx", {}).get("error")
    problem = str(reason) if reason else f"{first['input']!r}: {_lowered(first['msg'])}"
    return InvalidField(name, problem, f"it is: {_description(first['loc'])}")


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]


def _description(loc: tuple[int | str, ...]) -> str:
    fields = TenantQuota.model_fields if loc[0] == "tenants" else ServiceConfig.model_fields
    return next((fields[p].description or "" for p in reversed(loc) if p in fields), "quotas by tenant name")
