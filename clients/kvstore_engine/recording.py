"""A stand-in for CUDA graphs on a CPU, for tests: every torch operation of a step is recorded with the very tensors it
had, and done again at replay.

As with a graph, memory is what counts: a replay reads the recorded tensors, whatever the program's variables mean by
then, and results go where the recorded ones lie. Numbers that Python worked out are frozen. What a capture forbids (a
value that the host asks for, data that comes from the host) is an error here too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FORBIDDEN = ("aten.item", "aten._local_scalar_dense", "aten.is_nonzero", "aten.lift_fresh", "aten.nonzero")


class Recorder(TorchDispatchMode):
    """While it is entered, records; `replay` does it all again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(function).rpartition(".")[0] in FORBIDDEN:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        """In the recorded order, over what the recorded tensors hold now."""
        with torch.inference_mode():
            for function, args, kwargs, recorded in self.calls:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(recorded), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and not shares(old, new):
                        old.copy_(new)


def shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same memory: a view, or a result that was written in place."""
    return bool(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr())


class RecordingCapturer:
    """A `graphs.Capturer` over `Recorder`. Time is what the test says it is."""

    def __init__(self, milliseconds: Iterator[float]) -> None:
        self._milliseconds = milliseconds
        self.num_replays = 0

    def capture(self, step: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See `graphs.Capturer`."""
        step()
        recorder = Recorder()
        with recorder:
            result = step()

        def replay() -> None:
            self.num_replays += 1
            recorder.replay()

        return replay, result

    def milliseconds(self, work: Callable[[], object]) -> float:
        """The next figure; the work is done once."""
        work()
        return next(self._milliseconds)
