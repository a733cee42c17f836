"""Readers: every format to the common form, and bad input named by file, line and field."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore_bench.cli import app
from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.load import detect, load
from kvstore_bench.traces.model import Stop

MOONCAKE = {"timestamp": 0, "input_length": 1100, "output_length": 10, "hash_ids": [1, 2, 3]}
SESSION = {
    "id": "t1", "models": ["m"], "block_size": 64, "tool_tokens": 64, "system_tokens": 0,
    "requests": [
        {"t": 0.0, "type": "n", "in": 130, "out": 5, "hash_ids": [1, 2], "stop": "tool_use", "api_time": 1.5},
        {"t": 9.0, "type": "subagent", "agent_id": "a", "tool_tokens": 0, "system_tokens": 0, "requests": [
            {"t": 1.0, "type": "n", "in": 64, "out": 5, "hash_ids": [9], "stop": "end_turn"}]},
        {"t": 20.0, "type": "n", "in": 200, "out": 5, "hash_ids": [1, 2, 3], "stop": "end_turn"},
    ],
}  # fmt: skip


def write_lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_mooncake_sessions_are_found_by_extension(tmp_path: Path) -> None:
    later = {"timestamp": 5000, "input_length": 1700, "output_length": 1, "hash_ids": [1, 2, 7, 8]}
    other = {"timestamp": 6000, "input_length": 900, "output_length": 1, "hash_ids": [1, 11]}
    trace = load(write_lines(tmp_path / "m.jsonl", MOONCAKE, later, other))
    assert trace.session.tolist() == [0, 0, 1]
    assert trace.partial_last and trace.full_blocks().tolist() == [2, 3, 1]
    assert trace.times_ns.tolist() == [0, 5_000_000_000, 6_000_000_000]


def test_kvtester_shares_heads_and_splits_sub_agents(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    with tarfile.open(path, "w") as archive:
        for name in ("a.json", "b.json"):
            content = json.dumps({**SESSION, "id": name}).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    trace = load(path)
    assert trace.num_sessions == 4 and trace.block_tokens == 64
    assert trace.num_blocks == 7  # one shared head block; of each session two blocks and one of its sub-agent
    assert sorted(trace.stop.tolist()) == [Stop.TOOL] * 2 + [Stop.TURN] * 4
    assert int(trace.end.sum()) == 4


def test_bailian_chat_and_lmcache(tmp_path: Path) -> None:
    first = {"chat_id": 1, "parent_chat_id": -1, "timestamp": 1.0, "input_length": 20, "hash_ids": [1, 2], "turn": 1}
    second = {"chat_id": 2, "parent_chat_id": 1, "timestamp": 9.0, "input_length": 40, "hash_ids": [1, 3, 4], "turn": 2}
    trace = load(write_lines(tmp_path / "b.jsonl", first, second))
    assert trace.session.tolist() == [0, 0] and trace.block_tokens == 16
    hello = {"role": "user", "content": "hello " * 100}
    answer = {"role": "assistant", "content": "hi"}
    chat = [{"timestamp": 1, "messages": [hello]}, {"timestamp": 5, "messages": [hello, answer, hello]}]
    trace = load(write_lines(tmp_path / "c.jsonl", *chat))
    assert trace.num_sessions == 1 and trace.notes
    agent = [
        {"timestamp": k * 1_000_000, "input": "x" * (600 + 300 * k), "output": "y", "session_id": "z"} for k in (1, 2)
    ]
    trace = load(write_lines(tmp_path / "l.jsonl", *agent))
    assert trace.num_requests == 2 and trace.ids[0] == trace.ids[int(trace.offsets[1])]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_packed_traces_and_a_round_trip_through_the_own_format(tmp_path: Path, pack: Any) -> None:
    plain = write_lines(tmp_path / "m.jsonl", MOONCAKE)
    (tmp_path / "m.bin").write_bytes(pack(plain.read_bytes()))
    output = tmp_path / "own.jsonl.xz"
    result = CliRunner().invoke(app, ["convert", "--trace", str(tmp_path / "m.bin"), "--output", str(output)])
    assert result.exit_code == 0, result.output
    one, other = load(plain), load(output)
    assert detect(output) == "own"
    assert one.ids.tolist() == other.ids.tolist() and one.full_blocks().tolist() == other.full_blocks().tolist()


BAD = {
    "empty": (b"", "is empty"),
    "cut": (b'{"timestamp": 0, "input_length": 1100, "hash_', "isn't valid JSON"),
    "no field": (b'{"timestamp": 0, "hash_ids": [1]}', "'input_length': is missing"),
    "wrong type": (b'{"timestamp": 0, "input_length": "x", "hash_ids": [1]}', "'input_length': expected a number"),
    "negative": (b'{"timestamp": 0, "input_length": -4, "hash_ids": [1]}', "outside"),
    "too large": (b'{"timestamp": 0, "input_length": 9e99, "hash_ids": [1]}', "outside"),
    "nan": (b'{"timestamp": NaN, "input_length": 512, "hash_ids": [1]}', "'timestamp'"),
    "nested": (b'{"timestamp": 0, "input_length": 512, "hash_ids": [[1]]}', "'hash_ids'"),
    "huge id": (b'{"timestamp": 0, "input_length": 512, "hash_ids": [99999999999999999999]}', "'hash_ids'"),
    "mismatch": (b'{"timestamp": 0, "input_length": 9000, "hash_ids": [1]}', "--block-tokens"),
    "unknown": (b'{"a": 1}', "no known trace format"),
    "list": (b"[1, 2]", "expected a JSON object"),
    "cut xz": (lzma.compress(b"x" * 5000)[:60], "truncated or corrupt"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, case: str) -> None:
    content, expected = BAD[case]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=r"bad\.jsonl"):
        load(path)
    result = CliRunner().invoke(app, ["hitrate", "--trace", str(path)])
    assert result.exit_code == 2
    said = result.stderr.strip().splitlines()
    assert len(said) == 1 and expected in said[0] and "bad.jsonl" in said[0]


def test_lenient_skips_and_counts(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", MOONCAKE)
    path.write_text(path.read_text() + "{broken\n" + json.dumps(MOONCAKE) + "\n")
    with pytest.raises(TraceError, match=r"m\.jsonl:2"):
        load(path)
    trace = load(path, lenient=True)
    assert trace.num_requests == 2 and trace.skipped == 1


@pytest.mark.parametrize("arguments", [["--capacity", "lots"], ["--capacity", "1GiB"], ["--policy", "nope"]])
def test_bad_arguments_are_named(tmp_path: Path, arguments: list[str]) -> None:
    path = write_lines(tmp_path / "m.jsonl", MOONCAKE)
    result = CliRunner().invoke(app, ["hitrate", "--trace", str(path), *arguments])
    assert result.exit_code == 2 and arguments[0] in result.stderr


def test_a_cut_archive_gives_what_is_before_the_cut_when_lenient(tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl.xz"
    whole = "\n".join(json.dumps(MOONCAKE | {"timestamp": n, "hash_ids": [n * 7, n * n]}) for n in range(20_000))
    path.write_bytes(lzma.compress(whole.encode())[:-400])
    with pytest.raises(TraceError, match="truncated or corrupt"):
        load(path)
    trace = load(path, lenient=True)
    assert 0 < trace.num_requests < 20_000 and trace.skipped == 1 and "truncated" in trace.notes[0]


@pytest.mark.parametrize("output", ["missing/rows", "."])
@pytest.mark.parametrize("option", ["--json", "--html"])
def test_where_nothing_can_be_written_is_said_before_the_work(tmp_path: Path, option: str, output: str) -> None:
    done = CliRunner().invoke(app, ["hitrate", "-t", "unread", option, str(tmp_path / output)])
    assert done.exit_code == 2 and "folder" in done.stderr and "unread" not in done.stderr


def test_no_cache_is_larger_than_a_billion_blocks(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "m.jsonl", MOONCAKE)
    done = CliRunner().invoke(app, ["hitrate", "-t", str(path), "-p", "fifo", "-c", "9" * 30])
    assert done.exit_code == 2 and "--capacity" in done.stderr
    assert CliRunner().invoke(app, ["hitrate", "-t", str(path), "-p", "fifo", "-c", "9" * 12 + "%"]).exit_code == 2
