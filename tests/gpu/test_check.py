"""The self-check runs to the end without a device, and its measuring code runs at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_gpu.check import speed, verify
from kvstore_gpu.check.__main__ import main
from kvstore_gpu.check.rows import NotHere, Results, Row, compared, plain
from kvstore_gpu.check.speed import Sizes

KEYS = {"name", "value", "unit", "limit", "ratio", "goal", "ok"}


def test_the_whole_check_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    arguments = ["--device", "cpu", "--small", "--folder", str(tmp_path), "--json", str(target)]
    assert main(arguments) == 0
    rows = json.loads(target.read_text())
    assert all(set(row) == KEYS for row in rows)
    assert all(row["ok"] is not False for row in rows)
    out = capsys.readouterr().out
    assert "skipped: decode slower while restoring: no CUDA device" in out
    assert "CUDA driver" in out
    assert "BROKEN" not in out


def test_measuring_code_runs_on_a_cpu(tmp_path: Path) -> None:
    small = Sizes.small()
    rows = speed.transfers("cpu", small)
    rows += speed.kernels("cpu", small, 1.0, 1e9)
    rows += speed.restore("cpu", small)
    rows += speed.background("cpu", small)
    rows += speed.storage("cpu", small, tmp_path)[0]
    rows += verify.order("cpu")
    assert len(rows) >= 15
    assert all(row.value is not None and row.value >= 0 for row in rows if "slower" not in row.name)
    assert next(row for row in rows if "don't verify" in row.name).ok
    with pytest.raises(NotHere):
        verify.ipc("cpu")


def test_goals_decide_the_exit_status() -> None:
    results = Results(seconds=60)
    results.run("good", lambda: [plain("a", 0, "", 0), compared("b", 95, "GB/s", 100, 0.95)])
    assert results.status == 0
    results.run("bad", lambda: [compared("c", 94, "GB/s", 100, 0.95)])
    assert results.status == 1

    def broken() -> list[Row]:
        raise ValueError("no")

    results.run("broken", broken)
    assert results.status == 2
    assert "BROKEN:  broken: ValueError: no" in results.table()


def test_an_item_that_would_begin_too_late_is_skipped() -> None:
    results = Results(seconds=-1)
    results.run("late", lambda: [plain("a", 0, "", 0)])
    assert results.rows == []
    assert results.skipped[0][0] == "late"


def test_the_package_imports_neither_cupy_nor_kvikio() -> None:
    script = (
        "import sys, pkgutil, importlib, kvstore_gpu\n"
        "for module in pkgutil.walk_packages(kvstore_gpu.__path__, 'kvstore_gpu.'):\n"
        "    if not module.name.endswith('__main__'): importlib.import_module(module.name)\n"
        "assert not {'cupy', 'cupy_backends', 'kvikio', 'libkvikio'} & set(sys.modules)\n"
        "import torch\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
