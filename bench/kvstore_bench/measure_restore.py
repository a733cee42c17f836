"""`kvstore bench restore`: time to the first token of a context restored from NVMe, against computing it again.

One run measures both, on the same engine and the same prompt:

    recomputed   no cache, no store: prefill of the whole context
    restored     the service was stopped and started after the offload, so its DRAM is empty and the page cache is
                 not in the way (the slab is read with O_DIRECT); the engine is new, so its own cache is empty

A run in which a single block came from anywhere but NVMe is invalid.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from rich.console import Console

from kvstore.errors import SetupError
from kvstore.testing.service import ServiceProcess
from kvstore_bench.demo_script import load_text, start
from kvstore_bench.inputs import ROUNDS_MAX, check_places, check_whole
from kvstore_bench.rows import EXIT_INVALID, Row, exit_status, show, write_json
from kvstore_engine.client_store import ServiceStore
from kvstore_engine.config import EngineConfig, engine_config
from kvstore_engine.engine import Engine
from kvstore_engine.model import LoadedModel, load_model
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.sequence import EndEvent

MIB = 1 << 20
GOAL = 20.0
ONE = SamplingParams(max_tokens=1, ignore_eos=True)
QUIET_S = 120.0


def run(
    tokens: int = 4000,
    rounds: int = 3,
    threads: int = 1,
    data_dir: Path | None = None,
    json: Path | None = None,
) -> int:
    """Restored contexts against recomputed ones: time to the first token."""
    check_places(data_dir, json)
    check_whole("tokens", tokens, 64, 8000)
    check_whole("rounds", rounds, 1, ROUNDS_MAX)
    console = Console()
    config = engine_config(threads=threads, restore_plan="always")
    model = load_model(config)
    ids = load_text(model.tokenizer, tokens)
    size = -(-(tokens + 1) // config.block_tokens) * model.keyspace.slot_bytes
    config = config.model_copy(update={"pool_bytes": size})
    console.print(f"{tokens} tokens are {size / MIB:.0f} MiB of KV; {rounds} rounds, {threads} thread(s) ...")
    with tempfile.TemporaryDirectory(prefix="kvstore-restore-", dir=data_dir) as folder:
        service = ServiceProcess(
            Path(folder), dram_bytes=2 * size, nvme_bytes=4 * size, segment_bytes=8 * MIB, lease_ttl_s=10
        )
        service.options |= {"huge_pages": "auto", "direct_io": "on"}
        try:
            _check_disk(Path(folder))
            start(service)
            rows = _measure(config, model, service, ids, rounds)
        except SetupError as error:
            console.print(f"invalid: {error}", style="red")
            return EXIT_INVALID
        finally:
            service.stop()
    show(console, "time to first token", rows)
    if json is not None:
        write_json(json, rows)
    return exit_status(rows)


def _check_disk(folder: Path) -> None:
    """Raises SetupError when the folder lies in memory: that would be no restore from NVMe."""
    kinds: dict[str, str] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        kinds[mount] = kind
    place = folder.resolve()
    while str(place) not in kinds:
        place = place.parent
    if kinds[str(place)] in ("tmpfs", "ramfs"):
        raise SetupError(f"{folder} lies in memory ({kinds[str(place)]}); give --data-dir on a disk")


def _measure(
    config: EngineConfig, model: LoadedModel, service: ServiceProcess, ids: list[int], rounds: int
) -> list[Row]:
    with _engine(config, model, service) as engine:
        engine.generate(ids, ONE)  # offloads at its end
        if not engine.wait_quiet(QUIET_S):
            raise SetupError("the context was not offloaded in time; use a faster disk or fewer tokens")
    recomputed: list[EndEvent] = []
    restored: list[EndEvent] = []
    for _ in range(rounds):
        service.stop()  # empties DRAM
        start(service)
        with _engine(config, model, service) as engine:  # and this starts with an empty pool
            restored.append(engine.generate(ids, ONE))
            recomputed.append(engine.generate(ids, ONE, use_cache=False))
    _check(restored, recomputed, len(ids), config.block_tokens)
    return _rows(restored, recomputed, len(ids), model.keyspace.block_bytes // config.block_tokens)


def _engine(config: EngineConfig, model: LoadedModel, service: ServiceProcess) -> Engine:
    store = ServiceStore(
        service.address, model.keyspace, restore_timeout_s=30, offload_timeout_s=QUIET_S, device=model.device
    )
    return Engine(config, model, store)


def _check(restored: list[EndEvent], recomputed: list[EndEvent], num_tokens: int, block_tokens: int) -> None:
    """Raises SetupError when the run didn't measure what it says."""
    wanted = (num_tokens - 1) // block_tokens * block_tokens
    for end in restored:
        if end.usage.nvme_tokens != wanted:
            raise SetupError(f"{end.usage.nvme_tokens} of {wanted} tokens came from NVMe; nothing was measured")
    if any(end.usage.cached_tokens for end in recomputed):
        raise SetupError("the recomputed run used a cache; nothing was measured")


def _rows(restored: list[EndEvent], recomputed: list[EndEvent], num_tokens: int, token_bytes: int) -> list[Row]:
    fast = statistics.median(end.usage.ttft_s for end in restored)
    slow = statistics.median(end.usage.ttft_s for end in recomputed)
    waits = statistics.median(end.usage.restore_ns / 1e9 for end in restored)
    bytes_moved = restored[0].usage.nvme_tokens * token_bytes
    same = sum(a.tokens == b.tokens for a, b in zip(restored, recomputed, strict=True))
    return [
        Row("ttft_recomputed", slow, "s"),
        Row("ttft_restored", fast, "s"),
        Row("restore_wait", waits, "s"),
        Row("restore_rate", bytes_moved / waits / 1e9, "GB/s"),
        Row("recompute_rate", num_tokens / slow, "tokens/s"),
        Row("restored_tokens_nvme", restored[0].usage.nvme_tokens, "tokens", limit=num_tokens),
        Row("first_token_equal", same, "rounds", limit=len(restored), goal=1.0),
        Row("speedup", slow / fast, "x", goal=GOAL),
    ]
