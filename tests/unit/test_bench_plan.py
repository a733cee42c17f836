"""Sizes of models, hardware files, and a plan whose figures can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstore_bench.appendix import appendix
from kvstore_bench.capacities import parse_capacity
from kvstore_bench.cli import app
from kvstore_bench.hardware import GIB, Hardware, load_hardware
from kvstore_bench.models import load_model
from kvstore_bench.plan import Planner
from kvstore_bench.reasons import decide
from kvstore_bench.sweep import Simulator
from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.model import RawRequest, Stop, Trace, build

TRACE = Path(__file__).parents[1] / "data" / "traces" / "mooncake-conversation-1500.jsonl.xz"


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        ("llama-3-8b", "", 128 * 1024),
        ("llama-3-8b", "fp8", 64 * 1024),
        ("llama-3-70b", "", 320 * 1024),
        ("deepseek-v3", "", 61 * 576 * 2),
        ("smollm2-135m", "", 23_040),
    ],
)
def test_kv_bytes_per_token_follow_from_the_config(name: str, dtype: str, size: int) -> None:
    assert load_model(name, dtype).kv_bytes_per_token == size


@pytest.mark.parametrize("name", ["llama-3-8b", "deepseek-v3", "smollm2-135m"])
def test_a_token_costs_twice_the_first_where_attention_costs_what_the_weights_do(name: str) -> None:
    model = load_model(name)
    start, one = np.array([0.0, float(model.doubles_at)]), np.array([1.0, 1.0])
    first, deep = model.prefill_flops(start, one)
    assert deep / first == pytest.approx(2.0, rel=1e-3)


def test_counting_by_time_needs_a_model(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", "--trace", str(TRACE), "--policy", "session-time"])
    assert result.exit_code == 2 and "--model" in result.stderr


def test_capacities_in_every_unit() -> None:
    assert parse_capacity("5%", 2000, 0) == 100
    assert parse_capacity("4096", 2000, 0) == 4096
    assert parse_capacity("1 GiB", 2000, 1 << 20) == 1024
    with pytest.raises(TraceError, match="--model"):
        parse_capacity("1GiB", 2000, 0)


def test_hardware_file_names_the_bad_field(tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    path.write_text(json.dumps({"base": "l40s-1", "dram_gib_max": -1}))
    with pytest.raises(TraceError, match="dram_gib_max"):
        load_hardware(str(path))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "0", "true", '"fast"'])
def test_what_is_divided_by_is_a_number_above_zero(tmp_path: Path, value: str) -> None:
    path = tmp_path / "node.json"
    path.write_text('{"gpu_flops": ' + value + "}")
    with pytest.raises(TraceError, match="gpu_flops"):
        load_hardware(str(path))


def test_a_config_gives_attention_and_active_parameters(tmp_path: Path) -> None:
    llama = load_model("llama-3-8b")
    assert llama.attention_width == 2 * 32 * 128
    assert load_model("deepseek-v3").attention_width == 128 * (128 + 64 + 128)
    config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    config |= {"intermediate_size": 14336, "vocab_size": 128256}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": config}))
    assert load_model(str(tmp_path)).active_params == pytest.approx(8.03e9 - 128256 * 4096, rel=0.01)
    path.write_text(json.dumps(config | {"num_key_value_heads": "eight"}))
    with pytest.raises(TraceError, match="num_key_value_heads"):
        load_model(str(path))


def two_sessions() -> Trace:
    """Blocks of 64 tokens: `a` comes twice, `b` once in between, an hour in all."""

    def at(seconds: int, session: str, ids: list[int], stop: Stop) -> RawRequest:
        return RawRequest(seconds * 10**9, session, np.array(ids, np.int64), 64 * len(ids), stop=stop)

    requests = [at(0, "a", [1, 2, 3], Stop.TOOL), at(1800, "b", [7, 8], Stop.TURN)]
    return build("two", [*requests, at(3600, "a", [1, 2, 3, 4], Stop.TURN)], 64)


def node(block_bytes: int, hbm_blocks: float) -> Hardware:
    """One GPU of 1e12 FLOP/s; HBM of so many blocks; round prices."""
    base = load_hardware("l40s-1")
    gib = block_bytes / GIB
    changed = replace(base, gpu_flops=2e12, utilization=0.5, hbm_gib=hbm_blocks * gib, gpu_usd_hour=3.6)
    return replace(changed, dram_usd_gib_month=10.0, nvme_usd_gib_month=1.0, dram_gib_max=8 * gib, nvme_gib_max=8 * gib)


def test_every_figure_of_a_small_plan_by_hand() -> None:
    trace, model = two_sessions(), load_model("smollm2-135m")
    block = 64 * model.kv_bytes_per_token
    planner = Planner(Simulator(trace), model, node(block, 2.5), "leaf-lru")
    mix = planner.mix(0.0, 6 * block / GIB)

    def seconds(cached: int, total: int) -> float:
        new, width = total - cached, 2 * 9 * 64
        return (2 * 135e6 * new + 2 * 30 * width * (new * cached + new * new / 2)) / 1e12

    # all six blocks fit: the last request finds 3 of its 4; HBM's 2 blocks find none of them under leaf-first LRU
    times = [seconds(0, 192), seconds(0, 128), seconds(192, 256) + 3 * block / 6e9 + 0.0005]
    assert mix.tokens_saved == pytest.approx(192 / 576) and mix.saved_nvme == pytest.approx(192 / 576)
    assert mix.gpu_seconds == pytest.approx(seconds(0, 192) + seconds(0, 128) + seconds(192, 256))
    assert mix.gpu_seconds_saved == pytest.approx(seconds(0, 256) - seconds(192, 256))
    assert mix.ttft_p50 == pytest.approx(float(np.percentile(times, 50)))
    assert mix.ttft_p99 == pytest.approx(float(np.percentile(times, 99)))
    assert mix.usd_month == pytest.approx(6 * block / GIB)
    usd = mix.gpu_seconds * 0.001 + mix.usd_month / 730
    assert mix.usd_per_million_tokens == pytest.approx(usd / 576 * 1e6)
    assert mix.usd_per_session == pytest.approx(usd / 2)
    assert mix.nvme_writes_tib_day == pytest.approx(6 * block * 24 / (1 << 40))
    assert mix.nvme_endurance_used == pytest.approx(24.0)
    lines = {line[0]: line for line in appendix(planner, mix)}
    assert lines["blocks found"][1] == "3" and lines["GPU seconds saved"][3].count(" - ") == 1
    assert lines["wear (endurance used)"][1] == "24x"
    assert lines["blocks in HBM; with DRAM; with NVMe"][1] == "2; 2; 6"


def test_deep_tokens_cost_more_and_the_reasons_say_so_and_what_is_caught() -> None:
    trace, model = two_sessions(), load_model("smollm2-135m")
    planner = Planner(Simulator(trace), model, node(64 * model.kv_bytes_per_token, 2.5), "leaf-lru")
    first, deep = planner.prefill_s(np.array([0.0, 1e5]), np.array([64.0, 1e5 + 64]))
    assert deep > 2 * first
    plan = decide(list(planner.evaluate()), planner, 60.0)
    text = " ".join(plan.reasons)
    assert plan.best is not None and plan.best.ttft_p99 <= 60.0 and plan.best.nvme_endurance_used <= 1.0
    assert f"{deep / first:.1f} times as long" in text
    assert "a context that came back after a tool call, last used over 15 min before" in text
    none = decide(plan.mixes, planner, 0.0)
    assert none.best is None and "No mix meets" in " ".join(none.reasons)


def test_a_plan_goes_on_from_kept_points(tmp_path: Path) -> None:
    command = ["plan", "--trace", str(TRACE), "--policy", "leaf-lru", "--resume", str(tmp_path / "points")]
    first, again = (CliRunner().invoke(app, command) for _ in range(2))
    assert first.exit_code == again.exit_code == 0 and first.stdout == again.stdout
    assert "points taken from" in again.stderr and "points taken from" not in first.stderr


def test_plan_writes_rows_and_a_page_without_outside_references(tmp_path: Path) -> None:
    rows, page = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = ["plan", "--trace", str(TRACE), "--policy", "leaf-lru", "--target-ttft", "60"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(rows), "--html", str(page)])
    assert result.exit_code == 0, result.output
    found = {row["name"]: row for row in json.loads(rows.read_text())}
    assert set(found["best/tokens_saved"]) == {"name", "value", "unit", "limit", "ratio", "goal", "ok"}
    saved = [row["value"] for name, row in found.items() if name.endswith("/tokens_saved") and name.startswith("dram")]
    assert max(saved) <= 1.0 and min(saved) >= 0.0
    text = page.read_text()
    assert "http" not in text and "<script" not in text and text.count("<svg") == 2
    assert "Appendix" in text and found["best/usd_per_session"]["unit"] == "USD"
