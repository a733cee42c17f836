"""`kvstore demo`: eight agents, a real model, and tiers too small for them.

1. A node service starts in a process of its own; the engine runs here.
2. Agents replay real prompts. While they wait for tools their contexts sink to DRAM and NVMe; when the tool returns
they rise. 3. The same resumed turns are computed again by an engine without store and cache, with the chunk boundaries
that the
   first run recorded. Every output token must be equal.

Every figure at the end comes from counters of this run.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.progress import track
from rich.table import Table

from kvstore.errors import InvalidField
from kvstore.testing.service import ServiceProcess
from kvstore_bench.demo_agents import Agent, Turn
from kvstore_bench.demo_script import Script, load_scripts, start
from kvstore_bench.demo_view import Whereabouts, table
from kvstore_bench.rows import EXIT_INVALID, Row, exit_status, show, write_json
from kvstore_client import Client
from kvstore_engine.client_store import ServiceStore
from kvstore_engine.config import EngineConfig, engine_config
from kvstore_engine.engine import Engine
from kvstore_engine.model import LoadedModel, load_model
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.store import NullStore

MIB = 1 << 20
REFRESH_S = 0.5
QUIET_S = 60.0
REPLY_TOKENS = 16


@dataclass(frozen=True)
class Sizes:
    """Tiers by the number of contexts of the largest size that fit into each."""

    context_bytes: int
    hbm: float = 2.5
    dram: float = 2.0
    nvme: float = 24.0

    def of(self, contexts: float) -> int:
        """Bytes, in whole MiB."""
        return round(contexts * self.context_bytes / MIB + 1) * MIB


@dataclass(frozen=True)
class Outcome:
    """What the first run left."""

    turns: list[Turn]
    prompt_tokens: dict[str, int]
    restored_blocks: dict[str, int]
    seconds: float
    failures: list[str]

    @property
    def resumed(self) -> list[Turn]:
        """Turns whose context existed before."""
        return [t for t in self.turns if t.resumed]


def run(
    agents: int = 8,
    turns: int = 4,
    context_tokens: int = 2700,
    seed: int = 1,
    threads: int = 1,
    data_dir: Path | None = None,
    trace: Path | None = None,
    json: Path | None = None,
) -> int:
    """Eight agents with tools, a real model, and a cache too small for them: watch contexts sink and rise."""
    if agents < 1 or turns < 2 or context_tokens < 256:
        raise InvalidField("agents, turns, context_tokens", "too small", "use at least 1, 2 and 256")
    console = Console()
    began = time.monotonic()
    console.print("Loading the model (converted once on first use, which takes half a minute) ...")
    config = engine_config(threads=threads, context_tokens_max=context_tokens + REPLY_TOKENS + 64)
    model = load_model(config)
    scripts = load_scripts(model.tokenizer, agents, turns, context_tokens, trace)
    console.print(f"Prompts from {scripts[0].source}.")
    with tempfile.TemporaryDirectory(prefix="kvstore-demo-", dir=data_dir) as folder:
        first = _with_service(Path(folder), console, config, model, scripts, seed, context_tokens)
    if first.failures:
        console.print("\n".join(first.failures), style="red")
        return EXIT_INVALID
    equal, again = _compute_again(console, config, model, first.resumed, context_tokens)
    rows = _rows(first, equal, again, time.monotonic() - began)
    _summary(console, first, again)
    show(console, "demo", rows)
    if json is not None:
        write_json(json, rows)
    return exit_status(rows)


# ---- the first run ---------------------------------------------------------------------------------------------------


def _with_service(
    folder: Path,
    console: Console,
    config: EngineConfig,
    model: LoadedModel,
    scripts: Sequence[Script],
    seed: int,
    context_tokens: int,
) -> Outcome:
    sizes = Sizes(context_bytes(model, context_tokens))
    service = ServiceProcess(
        folder, dram_bytes=sizes.of(sizes.dram), nvme_bytes=sizes.of(sizes.nvme), segment_bytes=8 * MIB, lease_ttl_s=10
    )
    service.options["huge_pages"] = "auto"
    service.options["io_threads"] = 4
    try:
        start(service)
        store = ServiceStore(
            service.address, model.keyspace, restore_timeout_s=10, offload_timeout_s=60, device=model.device
        )
        hbm = config.model_copy(update={"pool_bytes": sizes.of(sizes.hbm), "max_batch": 4})
        console.print(
            f"{len(scripts)} agents with contexts of up to {sizes.context_bytes // MIB} MiB; room for "
            f"{sizes.hbm:g} of them in hbm, {sizes.dram:g} in dram, {sizes.nvme:g} on nvme. "
            f"Block: {model.keyspace.block_bytes // 1024} KiB."
        )
        with Engine(hbm, model, store) as engine, Client(service.address) as client:
            return _replay(console, engine, client, scripts, seed)
    finally:
        service.stop()


def context_bytes(model: LoadedModel, context_tokens: int) -> int:
    """Bytes of the blocks of a context."""
    return -(-context_tokens // model.keyspace.block_tokens) * model.keyspace.slot_bytes


def _replay(console: Console, engine: Engine, client: Client, scripts: Sequence[Script], seed: int) -> Outcome:
    sampling = SamplingParams(max_tokens=REPLY_TOKENS, ignore_eos=True)
    agents: list[Agent] = []
    for number, script in enumerate(scripts):
        agents.append(Agent(number, script, engine, sampling, seed, agents[-1] if agents else None))
    where = Whereabouts(engine, client)
    began = time.monotonic()
    for agent in agents:
        agent.start()

    def title() -> str:
        return f"{len(agents)} agents, {time.monotonic() - began:.0f} s"

    try:
        with Live(table(agents, {}, title()), console=console, auto_refresh=False) as live:
            while any(a.is_alive() for a in agents):
                live.update(table(agents, where.of(agents), title()), refresh=True)
                agents[0].join(REFRESH_S) if agents[0].is_alive() else time.sleep(REFRESH_S)
            live.update(table(agents, where.of(agents), title()), refresh=True)
    finally:
        for agent in agents:
            agent.stop()
    engine.wait_quiet(QUIET_S)
    return _outcome(agents, engine, time.monotonic() - began)


def _outcome(agents: Sequence[Agent], engine: Engine, seconds: float) -> Outcome:
    size = engine.keyspace.block_tokens
    counters = engine.counters
    turns = [t for a in agents for t in a.turns]
    hbm_of_resumed = sum(t.end.usage.hbm_tokens for t in turns if t.resumed)
    restored = {
        "hbm": hbm_of_resumed // size,
        "dram": counters.restored_blocks_dram,
        "nvme": counters.restored_blocks_nvme,
    }
    failures = [f"{a.script.name}: {a.error}" for a in agents if a.error]
    return Outcome(turns, dict(counters.prompt_tokens), restored, seconds, failures)


# ---- the second run --------------------------------------------------------------------------------------------------


def _compute_again(
    console: Console, config: EngineConfig, model: LoadedModel, turns: Sequence[Turn], context_tokens: int
) -> tuple[int, list[float]]:
    """Resumed turns, one at a time, without store and cache: how many gave the same tokens, and their TTFTs."""
    sampling = SamplingParams(max_tokens=REPLY_TOKENS, ignore_eos=True)
    size = context_bytes(model, context_tokens + 256)
    equal, ttft = 0, []
    with Engine(config.model_copy(update={"pool_bytes": size}), model, NullStore()) as engine:
        for turn in track(turns, "Computing resumed turns again, without a store", console=console, transient=True):
            end = engine.generate(turn.tokens, sampling, use_cache=False, plan=turn.end.plan)
            assert end.usage.cached_tokens == 0
            equal += turn.end.plan is not None and end.tokens == turn.end.tokens
            ttft.append(end.usage.ttft_s)
    return equal, ttft


# ---- figures ---------------------------------------------------------------------------------------------------------


def _rows(first: Outcome, equal: int, again: Sequence[float], seconds: float) -> list[Row]:
    restored = [t.end.usage.ttft_s for t in first.resumed if t.end.usage.cached_tokens]
    total = sum(first.prompt_tokens.values())
    reused = total - first.prompt_tokens.get("computed", 0)
    rows = [Row("tokens_equal", equal, "turns", limit=len(first.resumed), goal=1.0)]
    rows += [Row(f"restored_blocks_{tier}", n, "blocks", goal=1) for tier, n in first.restored_blocks.items()]
    rows += [Row(f"prompt_tokens_{tier}", n, "tokens") for tier, n in first.prompt_tokens.items()]
    rows.append(Row("prompt_tokens_reused", reused, "tokens", limit=total))
    for name, values in (("restored", restored), ("recomputed", again)):
        for q in (50, 99):
            value = float(np.percentile(values, q)) if values else None
            rows.append(Row(f"ttft_{name}_p{q}", value, "s", note="" if values else "no such turn"))
    rows += [Row("seconds_agents", first.seconds, "s"), Row("seconds_total", seconds, "s")]
    return rows


def _summary(console: Console, first: Outcome, again: Sequence[float]) -> None:
    out = Table(title="resumed turns", title_justify="left")
    for name in ("agent", "turn", "tokens", "hbm", "dram", "nvme", "computed", "TTFT", "recomputed"):
        out.add_column(name, justify="right")
    for turn, ttft in zip(first.resumed, again, strict=True):
        u = turn.end.usage
        sources = (u.hbm_tokens, u.dram_tokens, u.nvme_tokens, u.computed_tokens)
        numbers = [turn.agent + 1, turn.index + 1, u.prompt_tokens, *sources]
        out.add_row(*map(str, numbers), f"{u.ttft_s:.2f} s", f"{ttft:.2f} s")
    console.print(out)
    console.print(
        "TTFT is with all agents at once; recomputed is one turn at a time with the machine to itself, "
        f"on {os.cpu_count()} cores."
    )
