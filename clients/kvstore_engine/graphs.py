"""CUDA graphs for decode steps: one replay instead of a thousand launches, kept only where it proves equal and faster.

A graph repeats the launches of one step with the very addresses they had. A step reads nothing that moves: `Inputs` and
pool stay where they are, all else is made inside the step, in the graph's own memory. There is one graph for each
bucket of `Decoder`. Before any is used:

    fill A: run      fill B: run      fill A: replay = run?      fill B: replay = run?

logits and new KV alike, bit for bit. (Replays come after both runs, so that nothing a run leaves behind is taken for
the replay's own.) One that differs ends the use of all. Then both are timed, and each bucket keeps the faster.

What replays is behind `Capturer`, so that tests can put a recorder in the place of CUDA (`recording.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvstore_engine.decode import Decoder, trials
from kvstore_engine.executor import Work
from kvstore_engine.model import first_line

log = logging.getLogger(__name__)
WARM_UPS = 2
TIMED = 5


class Capturer(Protocol):
    """What records a step so that it can be replayed."""

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Run `step` to warm up, then record it: what replays it, and where each replay leaves its result. May raise
        anything."""

    def milliseconds(self, work: Callable[[], object]) -> float:
        """How long the device takes for it, launches included; best of a few."""


class CudaCapturer:
    """torch's CUDA graphs, all in one pool of memory: they never run at the same time, and no result is kept."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See `Capturer`."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            for _ in range(WARM_UPS):
                step()
        current.wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        # Other threads go on copying blocks: their driver calls must not break the capture.
        options = {"pool": self._memory, "stream": self._side, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, **options):
            result = step()
        return graph.replay, result

    def milliseconds(self, work: Callable[[], object]) -> float:
        """See `Capturer`."""
        found = []
        for _ in range(TIMED):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            found.append(float(first.elapsed_time(last)))
        return min(found)


CAPTURERS: dict[str, Callable[[torch.device], Capturer]] = {"cuda": CudaCapturer}
"""By kind of device. (Tests add the CPU.)"""


@dataclass(frozen=True)
class Graph:
    """One captured step."""

    replay: Callable[[], None]
    logits: torch.Tensor
    addresses: tuple[int, ...]


class Graphs:
    """Those of one decoder. For the decoder's thread."""

    def __init__(self, decoder: Decoder, capturer: Capturer) -> None:
        self._decoder, self._capturer = decoder, capturer
        self.kept: dict[int, Graph] = {}
        """By number of pieces."""

    def replay(self, num_splits: int) -> torch.Tensor | None:
        """Logits of one step over the decoder's inputs, valid until the next; None when the step must be run."""
        graph = self.kept.get(num_splits)
        if graph is None:
            return None
        if graph.addresses != self._decoder.addresses():
            log.warning("CUDA graphs: pool or inputs have moved; steps are run from now on")
            self.kept.clear()
            return None
        graph.replay()
        return graph.logits

    def capture(self, num_splits: int) -> None:
        """Keep a graph for this many pieces."""
        replay, logits = self._capturer.capture(lambda: self._decoder.run(num_splits))
        self.kept[num_splits] = Graph(replay, logits, self._decoder.addresses())

    def equal(self, num_splits: int) -> bool:
        """Does a replay give what a run gives, for two inputs? Overwrites what lies in the pool."""
        inputs = [self._trials(num_splits, seed) for seed in (1, 2)]
        runs = [self._outcome(made, lambda: self._decoder.run(num_splits)) for made in inputs]
        replays = [self._outcome(made, lambda: self.replay(num_splits)) for made in inputs]
        differ = not torch.equal(runs[0][0], runs[1][0])  # else they'd prove nothing
        pairs = zip(runs, replays, strict=True)
        return differ and all(torch.equal(a, b) for run, replay in pairs for a, b in zip(run, replay, strict=True))

    def keep_if_faster(self, num_splits: int) -> str:
        """Time both over what `equal` left in the inputs, and drop the graph unless it wins. Says what was found."""
        run = self._capturer.milliseconds(lambda: self._decoder.run(num_splits))
        replay = self._capturer.milliseconds(lambda: self.replay(num_splits))
        if replay >= run:
            del self.kept[num_splits]
        return f"{run:.2f} -> {replay:.2f} ms"

    def _trials(self, num_splits: int, seed: int) -> list[Work]:
        """Rows whose longest context needs this bucket; the last row is padding in one of two."""
        most = min(num_splits * self._decoder.split_tokens, self._decoder.context_tokens_max)
        count = self._decoder.num_rows - seed % 2
        lengths = [most - seed, *(1 + (seed * 37 + 101 * row) % most for row in range(1, count))]
        return trials(self._decoder.pool, [max(1, n) for n in lengths], self._decoder.vocab_size, seed)

    def _outcome(self, made: list[Work], step: Callable[[], torch.Tensor | None]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the bytes of the slots that were written, over noise that is the same each time."""
        pool, generator = self._decoder.pool, torch.Generator().manual_seed(3)
        slots = sorted({slot for trial in made for slot in trial.slots})
        for index in range(pool.keyspace.num_layers):
            layer = pool.layer(index)
            layer[slots] = (
                torch.randn(len(slots), *layer.shape[1:], generator=generator).to(layer.dtype).to(pool.device)
            )
        self._decoder.inputs.fill(made)
        logits = step()
        assert logits is not None
        return logits[: len(made)].clone(), pool.raw[[trial.slots[-1] for trial in made]].clone()


def adopt(decoder: Decoder) -> None:
    """Let a decoder replay its steps, if that is possible, right and faster here; say in the log what was decided. For
    pools that hold nothing yet: they are empty again afterwards."""
    make = CAPTURERS.get(decoder.pool.device.type)
    if make is None:
        return
    try:
        graphs = Graphs(decoder, make(decoder.pool.device))
        why = _try_all(graphs, decoder.buckets())
    except Exception as error:  # the driver's, or an operation that can't be captured
        why = f"capture failed ({first_line(error)})"
    if why:
        log.warning("CUDA graphs: %s; decode steps are run", why)
    else:
        decoder.replay = graphs.replay
    decoder.inputs.fill([])
    decoder.pool.raw.zero_()


def _try_all(graphs: Graphs, buckets: list[int]) -> str:
    """Why none can be used; empty when some can."""
    told = []
    for num_splits in buckets:
        graphs.capture(num_splits)
        if not graphs.equal(num_splits):
            return f"a replay differs from the step it stands for ({num_splits} pieces)"
        told.append(f"{num_splits}: {graphs.keep_if_faster(num_splits)}")
    if not graphs.kept:
        return f"replays aren't faster (by pieces of context: {', '.join(told)})"
    log.info("CUDA graphs: %d of %d sizes of step are replayed (%s)", len(graphs.kept), len(told), ", ".join(told))
    return ""
