"""Decode steps by our own kernel (here compiled for the host), and steps that are captured and replayed (here by a
recorder): the same results as exact attention, the same bits in every batch, the same tokens in an engine.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from kvstore.core.keyspace import Keyspace
from kvstore_engine import decode, graphs, paged
from kvstore_engine.decode import Decoder
from kvstore_engine.engine import Engine
from kvstore_engine.executor import Executor, Work
from kvstore_engine.model import wrap_model
from kvstore_engine.pool import KVPool
from kvstore_engine.recording import Recorder, RecordingCapturer
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.testing import TINY, MemoryStore, tiny_config, tiny_model
from kvstore_gpu.decode import PagedDecode
from kvstore_gpu.errors import Unavailable
from kvstore_gpu.kernels import HostKernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def host_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    try:
        kernel = PagedDecode(HostKernels())
    except Unavailable as error:
        pytest.skip(str(error))
    monkeypatch.setitem(decode.MAKERS, "cpu", lambda device: kernel)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without")
        yield


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> RecordingCapturer:
    """Steps are captured and replayed, and replays are faster."""
    made = RecordingCapturer(itertools.cycle([2.0, 1.0]))
    monkeypatch.setitem(graphs.CAPTURERS, "cpu", lambda device: made)
    return made


def pool_of(dtype: str, num_slots: int = 9, block_tokens: int = 16, kv_heads: int = 3, head_dim: int = 64) -> KVPool:
    keyspace = Keyspace(
        model="m",
        weights_digest="5f" * 16,
        tokenizer_digest="a1" * 16,
        kv_dtype=dtype,
        num_layers=2,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope="none",
        block_tokens=block_tokens,
    )
    return KVPool(keyspace, num_slots * keyspace.slot_bytes, CPU)


def make(dtype: str = "bfloat16", kind: Any = "paged", cuda_graphs: Any = "off", seed: int = 0) -> Executor:
    config = tiny_config(dtype=dtype)
    model = tiny_model(config, seed)
    pool = KVPool(model.keyspace, 64 * model.keyspace.slot_bytes, model.device)
    return Executor(model, pool, 8, 1, kind, cuda_graphs)


def contexts(executor: Executor, starts: Sequence[int]) -> list[Work]:
    """Prefilled contexts of these lengths, each with one token to come."""
    works, first = [], 0
    for i, start in enumerate(starts):
        slots = list(range(first, first := first + start // 16 + 2))[::-1]
        executor.prefill(Work([1 + (7 * i + j) % 500 for j in range(start)], 0, slots))
        works.append(Work([9 + i], start, slots))
    return works


# ---- the kernel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [2, 3, 9, 80])
@pytest.mark.parametrize("block_tokens", [8, 32, 256])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", decode.TOLERANCE)])
def test_it_agrees_with_exact_attention(dtype: str, most: float, block_tokens: int, num_slots: int) -> None:
    pool = pool_of(dtype, num_slots, block_tokens)
    assert decode.works(pool, 6, 0.125)
    assert decode.difference(pool, 6, 0.125) <= most
    assert not pool.raw.any()  # the pool is as empty as before


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    pool = pool_of("float32")
    right = KVPool.layer
    monkeypatch.setattr(decode.DecodeBatch, "pool", property(lambda batch: pool, lambda batch, value: None), False)
    assert decode.works(pool, 6, 0.125)

    class Elsewhere:
        """A pool whose layers are one too low."""

        def layer(self, index: int) -> torch.Tensor:
            return right(pool, index - 1)

    monkeypatch.setattr(decode.DecodeBatch, "pool", property(lambda batch: Elsewhere(), lambda batch, value: None))
    assert not decode.works(pool, 6, 0.125)
    assert "our decode kernel is off by" in caplog.text


def test_what_can_not_be_had_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing(device: torch.device) -> PagedDecode:
        raise Unavailable("CUDA kernels", "cupy is missing", "pip install cupy-cuda13x")

    assert not decode.works(pool_of("bfloat16", kv_heads=2), 3, 0.125)
    assert "don't share" in caplog.text
    monkeypatch.setitem(decode.MAKERS, "cpu", missing)
    assert not decode.works(pool_of("bfloat16"), 3, 0.125)
    assert "cupy is missing" in caplog.text


def test_pools_that_torch_can_not_count_decode_by_our_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks copy their contexts then; decode steps don't."""
    assert make().pool.num_slots and make()._lm.config._attn_implementation == f"{paged.NAME}_decode"
    monkeypatch.setattr(paged, "ELEMENTS_MAX", 1)
    executor = make()
    assert executor._lm.config._attn_implementation == "kvstore_paged_decode"
    assert executor.decoder is not None
    monkeypatch.delitem(decode.MAKERS, "cpu")
    with pytest.raises(Exception, match="doesn't work here"):
        make()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cuda_graphs", ["off", "auto"])
def test_batch_of_one_and_of_eight_give_the_same_logits(
    dtype: str, cuda_graphs: str, recorder: RecordingCapturer
) -> None:
    executor, exact = make(dtype, cuda_graphs=cuda_graphs), make(dtype, "exact")
    starts = [20, 3, 300, 16, 15, 31, 1, 64]
    works, same = contexts(executor, starts), contexts(exact, starts)
    before = recorder.num_replays
    alone = [executor.decode([work])[0] for work in works]
    together, backwards = executor.decode(works), executor.decode(works[::-1])
    for i in range(8):
        assert torch.equal(alone[i], together[i])
        assert torch.equal(executor.prefill(works[i]), together[i])
        assert torch.equal(alone[i], backwards[7 - i])
    assert (recorder.num_replays > before) is (cuda_graphs == "auto")
    most = 3e-2 if dtype == "bfloat16" else 1e-5
    assert torch.allclose(together, exact.decode(same), atol=most, rtol=most)


def test_layers_are_asked_for_before_they_are_touched() -> None:
    executor = make()
    asked: list[int] = []
    work = contexts(executor, [40])[0]
    want = executor.prefill(work)
    assert torch.equal(executor.prefill(work, asked.append), want)
    assert asked == [0, 1]


def gate(model_seed: int, **changes: Any) -> None:
    """The output gate: computed, restored and computed again with the same cuts."""
    config = tiny_config(attention="paged", pool_bytes=1 << 20, **changes)
    model = tiny_model(config, model_seed)
    greedy = SamplingParams(max_tokens=24, ignore_eos=True)
    prompt = [7 + i % 200 for i in range(150)]
    with Engine(config, model, MemoryStore()) as engine:
        first = engine.generate(prompt, greedy, session="a")
        for other in range(6):
            engine.generate([11 + other + i % 190 for i in range(150)], greedy)
        assert engine.wait_quiet(30)
        again = engine.generate(prompt, greedy, session="a")
        fresh = engine.generate(prompt, greedy, use_cache=False, plan=again.plan)
    assert again.usage.cached_tokens > 0
    assert again.tokens == first.tokens == fresh.tokens


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_an_engine_restores_the_same_tokens(dtype: str) -> None:
    gate(3, dtype=dtype)


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Mistral"])
def test_other_families_agree_with_exact_attention(family: str, recorder: RecordingCapturer) -> None:
    import transformers

    shape = {**TINY, "sliding_window": None} if family == "Mistral" else TINY
    torch.manual_seed(1)
    causal_lm = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**shape))
    model = wrap_model(causal_lm, None, tiny_config(dtype="float32"), "5f" * 32, "5f" * 32)
    found = []
    for kind in ("exact", "paged"):
        pool = KVPool(model.keyspace, 64 * model.keyspace.slot_bytes, model.device)
        executor = Executor(model, pool, 8, 1, kind, "auto")
        found.append(executor.decode(contexts(executor, [50, 3])))
    assert recorder.num_replays > 0
    assert torch.allclose(*found, atol=1e-5)


# ---- captured steps --------------------------------------------------------------------------------------------------


def test_an_engine_restores_the_same_tokens_by_replays(recorder: RecordingCapturer) -> None:
    gate(4)
    assert recorder.num_replays > 60


def test_a_session_is_the_same_run_or_replayed(recorder: RecordingCapturer) -> None:
    """Tokens one after another, across blocks and buckets, in a batch that changes."""
    found = []
    for cuda_graphs in ("off", "auto"):
        executor = make(cuda_graphs=cuda_graphs)
        works, logits = contexts(executor, [250, 30, 5]), []
        for step in range(12):
            part = works if step % 3 else works[step % 2 :]
            logits.append(executor.decode(part))
            grown = [Work([1 + step], work.start + 1, work.slots) for work in part]
            works = [*works[: len(works) - len(part)], *grown]
        found.append(torch.cat(logits))
    assert torch.equal(*found)


def test_the_pool_is_empty_after_the_trial(recorder: RecordingCapturer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        executor = make(cuda_graphs="auto")
    assert executor.decoder is not None and executor.decoder.buckets() == [1, 2, 4]
    assert not executor.pool.raw.any() and not executor.decoder.inputs.lengths.any()
    assert "3 of 3 sizes of step are replayed (1: 2.00 -> 1.00 ms, 2: 2.00 -> 1.00 ms" in caplog.text


def test_what_is_not_faster_is_not_kept(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    times = RecordingCapturer(iter([2.0, 1.0, 2.0, 2.5, 2.0, 2.0]))
    monkeypatch.setitem(graphs.CAPTURERS, "cpu", lambda device: times)
    with caplog.at_level(logging.INFO):
        executor = make(cuda_graphs="auto")
    assert "1 of 3 sizes" in caplog.text
    works, before = contexts(executor, [300, 20]), times.num_replays
    executor.decode(works)
    assert times.num_replays == before  # two pieces: run
    executor.decode(works[1:])
    assert times.num_replays == before + 1
    times._milliseconds = itertools.repeat(1.0)
    assert make(cuda_graphs="auto").decoder.replay is decode.no_graph
    assert "replays aren't faster" in caplog.text


def test_a_capture_that_fails_costs_speed_only(
    recorder: RecordingCapturer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Decoder.run

    def asks(decoder: Decoder, num_splits: int, *rest: Any) -> torch.Tensor:
        logits = run(decoder, num_splits, *rest)
        assert float(logits[0, 0]) < 1e9  # the host asks a device that is being recorded
        return logits

    monkeypatch.setattr(Decoder, "run", asks)
    executor = make(cuda_graphs="auto")
    assert "capture failed (operation not permitted when stream is capturing" in caplog.text
    assert executor.decode(contexts(executor, [20])).isfinite().all()
    assert executor.decoder is not None and executor.decoder.replay is decode.no_graph


def test_rope_that_looks_at_positions_is_not_captured(
    recorder: RecordingCapturer, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config()
    model = tiny_model(config, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    pool = KVPool(model.keyspace, 64 * model.keyspace.slot_bytes, model.device)
    assert Executor(model, pool, 8, 1, "paged", "auto").decoder is not None
    assert "capture failed (operation not permitted when stream is capturing: aten.is_nonzero" in caplog.text


def stale_inputs(decoder: Decoder) -> Callable[[Sequence[Work]], None]:
    """A `fill` that makes the inputs anew each time, as scratch memory that grows does."""
    fill = decoder.inputs.fill

    def filling(works: Sequence[Work]) -> None:
        decoder.inputs.rows = decoder.inputs.rows.clone()
        fill(works)

    return filling


def test_a_buffer_that_moves_is_seen_by_the_comparison(
    recorder: RecordingCapturer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Were addresses not looked at, replays would read what was: bits differ, and no graph is used."""
    executor = make()
    decoder = executor.decoder
    assert decoder is not None
    monkeypatch.setattr(decoder.inputs, "fill", stale_inputs(decoder))
    monkeypatch.setattr(Decoder, "addresses", lambda decoder: ())
    graphs.adopt(decoder)
    assert "a replay differs from the step it stands for" in caplog.text
    assert decoder.replay is decode.no_graph


def test_inputs_that_moved_are_noticed_before_a_replay(
    recorder: RecordingCapturer, caplog: pytest.LogCaptureFixture
) -> None:
    executor, run = make(cuda_graphs="auto"), make()
    works = contexts(executor, [40, 70])
    want = run.decode(contexts(run, [40, 70]))
    assert torch.equal(executor.decode(works), want)
    before = recorder.num_replays
    assert executor.decoder is not None
    executor.decoder.inputs.table = executor.decoder.inputs.table.clone()
    assert torch.equal(executor.decode(works), want)
    assert recorder.num_replays == before
    assert "have moved" in caplog.text


def test_a_capture_on_a_device_is_asked_for_as_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmed up on a side stream that waits for the work before, other threads' calls allowed, one pool of memory."""
    said: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device | None = None, name: str = "side") -> None:
            self.name = name

        def wait_stream(self, other: Stream) -> None:
            said.append(f"{self.name} waits for {other.name}")

    class CUDAGraph(Recorder):
        """Records, as torch's does between begin and end."""

    @contextlib.contextmanager
    def within(thing: Any, **options: Any) -> Iterator[None]:
        with thing if isinstance(thing, Recorder) else contextlib.nullcontext():
            said.append(options if isinstance(thing, Recorder) else f"on {thing.name}")
            yield

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("record")

        def synchronize(self) -> None:
            """At once."""

        def elapsed_time(self, last: Event) -> float:
            return 3.0

    faked = {"Stream": Stream, "CUDAGraph": CUDAGraph, "stream": within, "graph": within, "Event": Event}
    faked |= {"current_stream": lambda device: Stream(name="main"), "graph_pool_handle": lambda: (0, 1)}
    for name, value in faked.items():
        monkeypatch.setattr(torch.cuda, name, value)
    capturer = graphs.CudaCapturer(torch.device("cuda:0"))
    held = torch.ones(2)
    replay, result = capturer.capture(lambda: held + 1)
    options = {"pool": (0, 1), "stream": capturer._side, "capture_error_mode": "thread_local"}
    assert said == ["side waits for main", "on side", "main waits for side", options]
    held.fill_(4.0)
    replay()
    assert result.tolist() == [5.0, 5.0]
    assert capturer.milliseconds(replay) == 3.0


def test_the_recorder_reads_memory_and_not_names() -> None:
    """What makes it a stand-in: a replay sees new values in old places, and not new places."""
    held = {"a": torch.ones(3)}
    replay, result = RecordingCapturer(iter(())).capture(lambda: (held["a"] * 2).relu_() + 1)
    held["a"].fill_(5.0)
    replay()
    assert result.tolist() == [11.0] * 3
    held["a"] = torch.full((3,), 7.0)
    replay()
    assert result.tolist() == [11.0] * 3
    for forbidden in (lambda: held["a"] * held["a"].max().item(), lambda: torch.tensor([1.0]) + held["a"]):
        with pytest.raises(RuntimeError, match="not permitted"):
            RecordingCapturer(iter(())).capture(forbidden)
