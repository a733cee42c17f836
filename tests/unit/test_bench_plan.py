"""Sizes of models, hardware files, and a plan whose figures can be checked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore_bench.capacities import parse_capacity
from kvstore_bench.cli import app
from kvstore_bench.hardware import load_hardware
from kvstore_bench.models import load_model
from kvstore_bench.traces.errors import TraceError

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
