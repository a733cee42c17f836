"""The demo's live table: each agent, where its blocks are, how its last turn began."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvstore.core.hashing import TokenChain
from kvstore.errors import KVStoreError
from kvstore_bench.demo_agents import Agent
from kvstore_client import Client
from kvstore_engine.engine import Engine
from kvstore_engine.sequence import Usage

LEAST = {"state": 14, "last prompt": 24}
"""Widths that keep the table from jumping while it's alive."""


@dataclass(frozen=True)
class Places:
    """Blocks of one context by tier. A block may have copies in several."""

    hbm: int = 0
    dram: int = 0
    nvme: int = 0


class Whereabouts:
    """Asks the engine and the service where contexts are."""

    def __init__(self, engine: Engine, client: Client) -> None:
        self._engine = engine
        self._client = client
        self._chains: dict[tuple[int, int], TokenChain] = {}

    def of(self, agents: Sequence[Agent]) -> dict[int, Places]:
        """By agent number. What can't be asked now is left out."""
        found: dict[int, Places] = {}
        with contextlib.suppress(KVStoreError):
            below = {s.session_id: s for s in self._client.list_sessions()}
            chains = {a.number: self._chain(a) for a in agents}
            above = self._engine.call(lambda s: {n: s.hbm.match(c, c.num_blocks) for n, c in chains.items()})
            for agent in agents:
                info = below.get(agent.session)
                dram, nvme = (info.num_blocks_dram, info.num_blocks_nvme) if info is not None else (0, 0)
                found[agent.number] = Places(above[agent.number], dram, nvme)
        return found

    def _chain(self, agent: Agent) -> TokenChain:
        key = (agent.number, agent.index)
        if key not in self._chains:
            self._chains[key] = TokenChain(self._engine.keyspace)
            self._chains[key].extend(agent.script.calls[agent.index].tokens)
        return self._chains[key]


def how(usage: Usage) -> str:
    """Where a turn's prompt came from, in a few words."""
    if not usage.cached_tokens:
        return "computed"
    tiers = (("hbm", usage.hbm_tokens), ("dram", usage.dram_tokens), ("nvme", usage.nvme_tokens))
    return "restored " + " ".join(f"{name} {tokens}" for name, tokens in tiers if tokens)


def table(agents: Sequence[Agent], places: dict[int, Places], title: str) -> Table:
    """The table as it stands now."""
    out = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("agent", "state", "turn", "tokens", "hbm", "dram", "nvme", "last prompt", "TTFT"):
        left = name in ("agent", "state", "last prompt")
        out.add_column(name, justify="left" if left else "right", min_width=LEAST.get(name))
    for agent in agents:
        at = places.get(agent.number, Places())
        last = agent.turns[-1].end.usage if agent.turns else None
        out.add_row(
            agent.script.name,
            agent.state,
            f"{agent.index + 1}/{len(agent.script.calls)}",
            str(agent.num_tokens),
            str(at.hbm or ""),
            str(at.dram or ""),
            str(at.nvme or ""),
            how(last) if last else "",
            f"{last.ttft_s:.2f} s" if last else "",
        )
    return out
