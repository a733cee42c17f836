"""The demo's parts that need no model: where its prompts come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import SetupError
from kvstore_bench import demo_script
from kvstore_bench.demo_script import load_scripts, load_text
from kvstore_engine.testing import ByteTokenizer

SIZES = {"num_agents": 2, "num_turns": 3, "tokens_max": 20_000}


def test_the_committed_sample_stands_in_for_the_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_script, "TRACE", tmp_path / "none")
    scripts = load_scripts(ByteTokenizer(), **SIZES)
    assert "sample" in scripts[0].source
    for script in scripts:
        for before, after in zip(script.calls, script.calls[1:], strict=False):
            shared = len(before.tokens) - len("\n<assistant>")
            assert after.tokens[:shared] == before.tokens[:shared]
            assert after.tool


def test_the_sample_says_the_same_as_the_trace(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = shared / "traces" / "lmcache-miniswe.tar.xz"
    if not trace.is_file():
        pytest.skip(f"no {trace.name}: given data is missing")
    whole = dict(demo_script._from_trace(trace))
    for session, calls in demo_script._from_sample(demo_script.SAMPLE):
        assert calls == whole[session][: len(calls)]


def test_without_any_data_text_is_made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_script, "TRACE", tmp_path / "none")
    monkeypatch.setattr(demo_script, "SAMPLE", tmp_path / "none")
    assert "made-up" in load_scripts(ByteTokenizer(), **SIZES)[0].source
    assert len(load_text(ByteTokenizer(), 4000)) == 4000


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="trace"):
        load_scripts(ByteTokenizer(), **SIZES, trace=tmp_path / "none")
