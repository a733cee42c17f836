"""The default model itself, once: loads offline, agrees with transformers, and keeps its bits through a restore."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import pytest
import torch

from kvstore.errors import SetupError
from kvstore_bench import demo, demo_script
from kvstore_engine.chat import render
from kvstore_engine.config import engine_config
from kvstore_engine.engine import Engine
from kvstore_engine.model import LoadedModel, find_gguf, load_model
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.testing import MemoryStore

pytestmark = pytest.mark.slow
CONFIG = engine_config(pool_bytes=24 * 737_280, context_tokens_max=600)
GREEDY = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def model() -> Iterator[LoadedModel]:
    try:
        find_gguf()
    except SetupError as error:
        pytest.skip(str(error))
    yield load_model(CONFIG)


def test_it_answers_and_its_context_survives_eviction(model: LoadedModel) -> None:
    store = MemoryStore()
    question = [{"role": "user", "content": "What is the capital of France? " * 30}]
    ids = render(model.tokenizer, question, [])
    other = render(model.tokenizer, [{"role": "user", "content": "Count to ten. " * 130}], [])
    with Engine(CONFIG, model, store) as engine:
        first = engine.generate(ids, GREEDY, session="a")
        assert "Paris" in first.text
        engine.generate(other, GREEDY)
        assert engine.wait_quiet(60)
        again = engine.generate(ids, GREEDY, session="a")
        assert again.usage.dram_tokens > 0
        assert again.tokens == first.tokens
        fresh = engine.generate(ids, GREEDY, use_cache=False, plan=again.plan)
        assert fresh.usage.cached_tokens == 0
        assert fresh.tokens == first.tokens


def test_the_committed_sample_is_enough_for_the_demo(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo_script, "TRACE", tmp_path / "none")
    usual = {name: known.default for name, known in signature(demo.run).parameters.items()}
    scripts = demo_script.load_scripts(model.tokenizer, usual["agents"], usual["turns"], usual["context_tokens"])
    assert len({tuple(script.calls[0].tokens) for script in scripts}) == usual["agents"]


def test_it_agrees_with_transformers(model: LoadedModel) -> None:
    ids = render(model.tokenizer, [{"role": "user", "content": "Name three rivers."}], [])
    with Engine(CONFIG, model) as engine:
        said = engine.generate(ids, GREEDY)
    model.causal_lm.set_attn_implementation("eager")
    tokens = list(ids)
    for _ in said.tokens:
        with torch.inference_mode():
            tokens.append(int(model.causal_lm(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert tuple(tokens[len(ids) :]) == said.tokens
