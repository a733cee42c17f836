"""Causes of misses, on a trace small enough to say each by hand; and that they add up on a real one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstore_bench.cli import app
from kvstore_bench.losses import FIRST_SIGHT, NAMES
from kvstore_bench.lossview import Pair, main_policy, sentence
from kvstore_bench.sweep import Simulator
from kvstore_bench.traces.load import load
from kvstore_bench.traces.model import RawRequest, Stop, Trace, build

DATA = Path(__file__).parents[1] / "data" / "traces" / "mooncake-conversation-1500.jsonl.xz"


def story() -> Trace:
    """Blocks of 64 tokens. a: tool call, 30 s; end of turn, 20 min; back to a branch it had left. b shares a's head."""

    def at(seconds: int, session: str, ids: list[int], tokens: int, stop: Stop, service_s: int = 0) -> RawRequest:
        array = np.array(ids, np.int64)
        return RawRequest(seconds * 10**9, session, array, tokens, stop=stop, service_ns=service_s * 10**9)

    requests = [
        at(0, "a", [1, 2, 3], 192, Stop.TOOL, 5),
        at(35, "a", [1, 2, 4], 200, Stop.TURN),  # 30 s after the answer; 8 tokens are behind the last full block
        at(1300, "a", [1, 2, 3, 5], 256, Stop.TURN),  # 1, 2: its last context; 3: a branch left before
        at(1305, "b", [1, 6], 128, Stop.UNKNOWN),  # 1: another session's
    ]
    return build("story", requests, 64)


def by_name(trace: Trace, runs: list[int]) -> dict[str, int]:
    from kvstore_bench.losses import causes, lost

    found = lost(trace, causes(trace), np.array(runs, np.int64))
    return {NAMES[c]: int(tokens) for c, tokens in enumerate(found.tokens) if tokens}


def test_each_cause_of_a_small_story() -> None:
    assert by_name(story(), [0, 0, 0, 0]) == {
        "after a tool call, 10-60 s": 128,
        "after a turn's end, over 15 min": 128,
        "an older branch, over 15 min": 64,
        "another's prefix, under 10 s": 64,
        "first sight": 192 + 72 + 64 + 64,
    }


def test_what_was_found_is_not_lost() -> None:
    assert by_name(story(), [0, 2, 3, 1]) == {"first sight": 192 + 72 + 64 + 64}


@pytest.mark.parametrize("policy", ["session", "leaf-lru", "optimum", "infinite"])
def test_causes_add_up_to_all_that_was_missed(policy: str) -> None:
    simulator = Simulator(load(DATA))
    point = simulator.point(policy, 1500)
    lost = simulator.lost(point)
    assert lost.missed == pytest.approx(1.0 - point.tokens)
    ceiling = simulator.point("infinite", 1500)
    assert lost.share(FIRST_SIGHT) == pytest.approx(1.0 - ceiling.tokens)


def test_the_policy_looked_into() -> None:
    assert main_policy(["infinite", "fifo", "session"]) == "session"
    assert main_policy(["optimum", "fifo", "arc"]) == "fifo"
    assert main_policy(["optimum"]) == "session", "bounds alone: what the service would do"


def test_a_capacity_in_words() -> None:
    simulator = Simulator(story())
    pair = Pair("4", "fifo", simulator.lost(simulator.point("fifo", 1)), simulator.lost(simulator.point("optimum", 6)))
    text = sentence(pair)
    assert "never seen before" in text and "a context that came back after" in text
    assert "does no better" in sentence(Pair("4", "optimum", pair.mine, pair.mine))
    assert sentence(Pair("9", "x", pair.best, pair.best)).endswith("evicted.")


def test_losses_on_the_terminal_in_rows_and_on_the_page(tmp_path: Path) -> None:
    rows, page = tmp_path / "rows.json", tmp_path / "page.html"
    command = ["hitrate", "-t", str(DATA), "-p", "session", "-c", "1%", "--losses"]
    done = CliRunner().invoke(app, [*command, "--json", str(rows), "--html", str(page)])
    assert done.exit_code == 0, done.output
    assert "first sight" in done.stdout and "optimum" in done.stdout and "which no cache can help" in done.stdout
    found = {row["name"]: row["value"] for row in json.loads(rows.read_text())}
    for policy in ("session", "optimum"):
        parts = [v for name, v in found.items() if name.startswith(f"mooncake-conversation-1500/{policy}/1%/missed: ")]
        assert len(parts) > 3
    saved = found["mooncake-conversation-1500/session/1%/tokens"]
    mine = [v for name, v in found.items() if "/session/1%/missed: " in name]
    assert sum(mine) == pytest.approx(1.0 - saved)
    assert "Where the misses come from" in page.read_text()
