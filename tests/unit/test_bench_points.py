"""Long sweeps: finished points are kept, found again only where everything that decides them is the same, and a
stopped run goes on. Cases: halves of the sessions and seeds."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tarfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kvstore_bench import points, sweep
from kvstore_bench.cli import app, parse_seeds
from kvstore_bench.points import Kept, Point, point_key, trace_digest
from kvstore_bench.rows import Row
from kvstore_bench.sweep import Simulator
from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.load import load
from kvstore_bench.traces.model import RawRequest, Trace, build
from kvstore_bench.traces.split import only

DATA = Path(__file__).parents[1] / "data" / "traces" / "mooncake-conversation-1500.jsonl.xz"
SWEEP = ["hitrate", "--trace", str(DATA), "-p", "leaf-lru", "-p", "fifo", "-c", "1%", "-c", "5%"]


def agents() -> Trace:
    """Parents with sub-agents, 40 requests."""
    requests = []
    for number in range(40):
        name = f"s{number % 6}"
        ids = np.array([number % 6, 100 + number], np.int64)
        parent = f"s{number % 6 - 3}" if number % 6 >= 3 else ""
        requests.append(RawRequest(number * 10**9, name, ids, 128, parent=parent))
    return build("agents", requests, 64)


def test_a_kept_point_is_the_point_that_was_simulated(tmp_path: Path) -> None:
    trace = load(DATA).head(300)
    with Kept(tmp_path / "points") as kept:
        first = Simulator(trace, kept).point("fifo", 500)
    with Kept(tmp_path / "points") as kept:
        again = Simulator(trace, kept).point("fifo", 500)
        assert again.kept and not first.kept and len(kept.found) == 1
        assert again.runs.tolist() == first.runs.tolist()
        assert replace(again, runs=first.runs, kept=False) == first
        assert not Simulator(trace, kept).point("fifo", 501).kept
        assert not Simulator(trace, kept).point("sieve", 500).kept
        assert not Simulator(load(DATA).head(299), kept).point("fifo", 500).kept


def test_every_part_of_a_trace_and_the_code_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = agents()
    seen = {trace_digest(trace)}
    for name in ("times_ns", "session", "ids", "input_tokens", "output_tokens", "stop", "tool", "end", "service_ns"):
        array = getattr(trace, name).copy()
        array[-1] = not array[-1] if array.dtype == np.bool_ else array[-1] + 1
        seen.add(trace_digest(replace(trace, **{name: array})))
    seen |= {trace_digest(replace(trace, block_tokens=65)), trace_digest(replace(trace, partial_last=True))}
    assert len(seen) == 12
    before = point_key("t", "fifo", 1)
    monkeypatch.setattr(points, "code_digest", lambda: "other")
    assert point_key("t", "fifo", 1) != before


def test_ctrl_c_is_one_line_and_a_second_start_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, rows = tmp_path / "points", tmp_path / "rows.json"
    whole = CliRunner().invoke(app, [*SWEEP, "--json", str(tmp_path / "whole.json")])
    simulate = sweep.Simulator._simulate
    done: list[str] = []

    def two_only(self: Simulator, policy: str, capacity: int) -> Point:
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(policy)
        return simulate(self, policy, capacity)

    monkeypatch.setattr(sweep.Simulator, "_simulate", two_only)
    stopped = CliRunner().invoke(app, [*SWEEP, "--resume", str(file)])
    assert (
        stopped.exit_code == 130
        and "2 finished points are kept" in stopped.stderr
        and "Traceback" not in stopped.stderr
    )
    assert len(stopped.stderr.strip().splitlines()) == 1
    monkeypatch.setattr(sweep.Simulator, "_simulate", simulate)
    again = CliRunner().invoke(app, [*SWEEP, "--resume", str(file), "--json", str(rows)])
    assert again.exit_code == 0 and whole.exit_code == 0 and "2 points taken" in again.stderr
    assert again.stdout.count(")*") == 2
    found, expected = json.loads(rows.read_text()), json.loads((tmp_path / "whole.json").read_text())
    assert [r.pop("note", "") for r in found].count("from the resume file") == 4
    assert found == expected


def lines_of(tmp_path: Path) -> Path:
    file = tmp_path / "points"
    assert CliRunner().invoke(app, [*SWEEP, "--resume", str(file)]).exit_code == 0
    return file


def test_a_line_cut_by_a_kill_is_simulated_again(tmp_path: Path) -> None:
    file = lines_of(tmp_path)
    file.write_bytes(file.read_bytes()[:-20])
    again = CliRunner().invoke(app, [*SWEEP, "--resume", str(file)])
    assert again.exit_code == 0 and "3 points taken" in again.stderr
    assert "4 points taken" in CliRunner().invoke(app, [*SWEEP, "--resume", str(file)]).stderr


def test_a_damaged_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = lines_of(tmp_path)
    file.write_bytes(file.read_bytes().replace(b'"policy": "fifo"', b'"policy": "lifo"', 1))
    done = CliRunner().invoke(app, [*SWEEP, "--resume", str(file)])
    assert done.exit_code == 2 and "points:4: is damaged" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"hello\n", b'{"timestamp": 0}\n', b"\x00\xff" * 50, b"no line end"])
def test_another_file_is_never_written_to(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "notes"
    file.write_bytes(content)
    done = CliRunner().invoke(app, [*SWEEP, "--resume", str(file)])
    assert done.exit_code == 2 and "is no file of finished points" in done.stderr
    assert file.read_bytes() == content


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    with Kept(tmp_path / "points"), pytest.raises(TraceError, match="in use by another run"):
        Kept(tmp_path / "points")


# ---- cases -----------------------------------------------------------------------------------------------------------


def test_halves_hold_all_requests_once_and_keep_families_together() -> None:
    trace = agents()
    even, odd = only(trace, "even"), only(trace, "odd")
    assert even.num_requests + odd.num_requests == trace.num_requests
    assert set(even.session_names) == {"s0", "s2", "s3", "s5"} and set(odd.session_names) == {"s1", "s4"}
    assert even.parent.tolist() == [-1, -1, 0, 1]
    for half in (even, odd):
        assert half.times_ns[0] == 0 and half.num_blocks == len(set(half.ids.tolist())) == half.ids.max() + 1
        assert half.offsets[-1] == len(half.ids) and half.end.sum() == half.num_sessions


def test_the_blocks_of_a_half_are_those_of_its_requests() -> None:
    trace = load(DATA).head(400)
    half = only(trace, "odd")
    rows = [r for r in range(400) if trace.session_names[trace.session[r]] in set(half.session_names)]
    renamed: dict[int, int] = {}
    for mine, r in enumerate(rows):
        ids = trace.ids[trace.offsets[r] : trace.offsets[r + 1]].tolist()
        ours = half.ids[half.offsets[mine] : half.offsets[mine + 1]].tolist()
        assert [renamed.setdefault(i, len(renamed)) for i in ids] == ours


def test_seeds_as_people_write_them() -> None:
    assert parse_seeds("7,8, 9") == parse_seeds("7-9") == (7, 8, 9)
    assert parse_seeds("") == ()
    for bad in ("x", "9-7", "1-1000", "-3", "1.5"):
        with pytest.raises(TraceError, match="--seeds"):
            parse_seeds(bad)


def sessions_archive(path: Path) -> Path:
    """Twelve sessions without start times, each of 6 growing requests."""
    with tarfile.open(path, "w") as archive:
        for number in range(12):
            requests = [
                {"t": 40.0 * k, "in": 640 + 64 * k, "out": 5, "stop": "tool_use", "hash_ids": list(range(10 + k))}
                for k in range(6)
            ]
            value = {"id": f"a{number}", "block_size": 64, "models": ["m"], "requests": requests}
            content = json.dumps(value).encode()
            entry = tarfile.TarInfo(f"a{number}.json")
            entry.size = len(content)
            archive.addfile(entry, BytesIO(content))
    return path


def test_gap_closed_shows_each_seed_and_half_and_the_swing(tmp_path: Path) -> None:
    path, rows = sessions_archive(tmp_path / "runs.tar"), tmp_path / "rows.json"
    command = ["compare", "--gap-closed", "-t", str(path), "-c", "20%", "--span-hours", "0.1", "--seeds", "7-8"]
    done = CliRunner().invoke(app, [*command, "--sessions", "even,odd", "--json", str(rows)])
    assert done.exit_code in (0, 1), done.output
    for word in ("seed 7, even sessions", "seed 8, odd sessions", "mean", "from - to"):
        assert word in done.stdout
    names = {row["name"].split("/")[0] for row in json.loads(rows.read_text())}
    assert names == {f"runs, seed {seed}, {half} sessions" for seed in (7, 8) for half in ("even", "odd")}


def test_seeds_of_a_trace_with_times_are_one_case() -> None:
    done = CliRunner().invoke(app, ["compare", "--gap-closed", "-t", str(DATA), "-c", "5%", "--seeds", "1,2,3"])
    assert done.exit_code == 0 and "carries its own times" in done.stderr and "seed 2" not in done.stdout


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_counts_print_whole_and_measured_values_with_decimals() -> None:
    assert Row("tokens_equal", 24, "turns").text == "24 turns"
    assert Row("restored", 1622.0, "blocks").text == "1,622 blocks"
    assert Row("ttft", 2.0, "s").text == "2.00 s"
    assert Row("half", 0.5, "blocks").text == "0.50 blocks"
    assert Row("gone", None, "s", note="no disk").text == "no disk"


ENDLESS = """
import signal, sys
import numba, numpy as np
from kvstore_bench.sweep import aside

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job inherits it ignored


@numba.njit(nogil=True)
def spin(cells):
    while cells[0] != 0:
        cells[0] = (cells[0] * 3 + 1) | 1


spin(np.zeros(1, np.int64))


def work():
    print("up", flush=True)
    spin(np.ones(1, np.int64))


try:
    aside(work)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_control_c_gets_through_compiled_code() -> None:
    child = subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "up\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (130, "")


def test_what_fails_aside_fails_here() -> None:
    def work() -> int:
        raise MemoryError

    with pytest.raises(MemoryError):
        sweep.aside(work)
    assert sweep.aside(lambda: 3) == 3
