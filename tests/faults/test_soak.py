"""The soak's short form, bounded by what it does and not by the clock; `make soak` runs the long one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kvstore.runtime
from kvstore.testing.soak.__main__ import main
from kvstore.testing.soak.tally import MUST_BE_ZERO


@pytest.mark.parametrize(
    ("part", "bound", "row"),
    [
        ("machine", "--operations=30000", "operations"),
        ("disk", "--faults=300", "faults_injected"),
        ("kills", "--kills=3", "service_kills"),
    ],
)
def test_soak_in_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str, bound: str, row: str
) -> None:
    """Each part ends by itself, prints its table, writes rows of the one form, and finds nothing that must not be."""
    monkeypatch.setattr(kvstore.runtime, "REVIVE_AFTER_S", kvstore.runtime.REVIVE_AFTER_S)
    out = tmp_path / "rows.json"
    status = main(["--only", part, bound, "--minutes", "5", "--seed", "7", "--json", str(out)])
    assert status == 0, capsys.readouterr().out
    rows = {r["name"]: r for r in json.loads(out.read_text())}
    assert rows[row]["value"] >= int(bound.partition("=")[2])
    assert all(rows[name] | {"value": 0, "ok": True} == rows[name] for name in MUST_BE_ZERO)
    assert {frozenset(r) for r in rows.values()} == {
        frozenset({"name", "value", "unit", "limit", "ratio", "goal", "ok"})
    }
