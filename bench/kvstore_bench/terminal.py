"""What all trace commands share at the terminal: consoles, bars, errors in one line, reading what was asked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstore_bench.models import Model
from kvstore_bench.rows import duration
from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.load import load
from kvstore_bench.traces.model import Trace
from kvstore_bench.traces.options import ReadOptions
from kvstore_bench.traces.split import only

out = Console()
err = Console(stderr=True)

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class Asked:
    """How traces are to be read: one case for each of `seeds` and `sessions`. `resume`: the file of finished points."""

    options: ReadOptions
    form: str = ""
    lenient: bool = False
    seeds: tuple[int, ...] = ()
    sessions: tuple[str, ...] = ("all",)
    resume: Path | None = None
    model: Model | None = None

    @property
    def token_bytes(self) -> int:
        """KV bytes of a token; 0 where no model was named."""
        return self.model.kv_bytes_per_token if self.model is not None else 0


def said(function: F) -> F:
    """Turn input errors into one line and exit status 2, Ctrl-C into one line and 130."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TraceError as error:
            say(f"error: {error}", "red")
            raise typer.Exit(2) from None
        except OSError as error:
            say(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}", "red")
            raise typer.Exit(2) from None
        except MemoryError:
            say("error: not enough memory: take fewer capacities, or a part of the trace", "red")
            raise typer.Exit(2) from None
        except KeyboardInterrupt as stopped:
            say(str(stopped) or "interrupted", "yellow")
            raise typer.Exit(130) from None

    return wrapper  # type: ignore[return-value]


def say(text: str, style: str = "") -> None:
    """One line on stderr."""
    err.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def check_outputs(*paths: Path | None) -> None:
    """Hours of work aren't lost to a mistyped folder: raises TraceError before it begins."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise TraceError(str(path), "is a folder", mend="name a file in it")
        if not path.parent.is_dir():
            raise TraceError(str(path), f"there is no folder {path.parent}", mend="make it, or name another")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise TraceError(str(path), "can't be written", mend="name a file that you may write")


def progress() -> Progress:
    """Bars on stderr, gone when done; none where nobody watches."""
    text = TextColumn("{task.description}", markup=False)
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def read(path: Path, options: ReadOptions, form: str, lenient: bool) -> Trace:
    """Load one trace with a bar, and say what was skipped or assumed."""
    with progress() as bar:
        task = bar.add_task(f"reading {path.name}", total=None)
        trace = load(
            path, options, form=form, lenient=lenient, progress=lambda count: bar.update(task, completed=count)
        )
    if trace.skipped:
        say(f"{path}: skipped {trace.skipped} bad records")
    for note in trace.notes:
        say(f"{path}: {note}", "yellow")
    return trace


def cases(path: Path, asked: Asked) -> Iterator[Trace]:
    """The trace of a file, once for each seed and each choice of sessions; named after them where there are several."""
    from kvstore_bench.points import trace_digest

    seeds = asked.seeds or (asked.options.seed,)
    first = ""
    for seed in seeds:
        trace = read(path, replace(asked.options, seed=seed), asked.form, asked.lenient)
        if len(seeds) > 1:
            digest = trace_digest(trace)
            if digest == first:
                say(f"{path}: carries its own times, so seeds change nothing; one is enough", "yellow")
                return
            first = first or digest
            trace.name += f", seed {seed}"
        for which in asked.sessions:
            yield only(trace, which)


@contextmanager
def finished_points(resume: Path | None) -> Iterator[Any]:
    """The file of finished points (None without one). Says what is kept at Ctrl-C, and at the end what was found."""
    from kvstore_bench.points import Kept

    if resume is None:
        yield None
        return
    with Kept(resume) as kept:
        try:
            yield kept
        except KeyboardInterrupt:
            text = f"interrupted: {len(kept)} finished points are kept in {resume}; the same command goes on from there"
            raise KeyboardInterrupt(text) from None
        if kept.found:
            say(f"{len(kept.found)} points taken from {resume}, not simulated again")


def describe(trace: Trace) -> str:
    """One line on a trace."""
    return (
        f"{trace.num_requests:,} requests of {trace.num_sessions:,} sessions over {duration(int(trace.times_ns[-1]))}, "
        f"{trace.num_references:,} block references, "
        f"{trace.num_blocks:,} distinct blocks of {trace.block_tokens} tokens"
    )
