"""`kvstore bench`: hit rates, comparisons and capacity plans from traces.

    load traces -> simulate points -> table on the terminal (+ --json rows, + --html page)

Input errors are one line on stderr and exit status 2; a promise that doesn't hold is exit status 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvstore_bench.capacities import parse_capacity
from kvstore_bench.hardware import load_hardware
from kvstore_bench.models import load_model
from kvstore_bench.rows import Row, exit_code, row, write_json
from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.load import FORMATS, load
from kvstore_bench.traces.model import Trace
from kvstore_bench.traces.options import HOUR_S, ReadOptions

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
out = Console()
err = Console(stderr=True)

F = TypeVar("F", bound=Callable[..., Any])
NEVER_BELOW = -0.003
"""Share of tokens by which `session` may fall behind leaf-first LRU."""

Traces = Annotated[list[Path], typer.Option("--trace", "-t", help="trace file, folder or archive; may be repeated")]
Capacities = Annotated[list[str], typer.Option("--capacity", "-c", help="5%, 4096 (blocks) or 64GiB (with --model)")]
Policies = Annotated[list[str], typer.Option("--policy", "-p", help="policy name; may be repeated; `all` for all")]
Form = Annotated[str, typer.Option("--format", help=f"one of {', '.join(FORMATS)}; told from the file by default")]
Seed = Annotated[int, typer.Option(help="places sessions that carry no start time")]
Span = Annotated[float, typer.Option("--span-hours", help="over how long such sessions start", min=0.001, max=8760)]
Tokens = Annotated[int, typer.Option("--block-tokens", help="tokens per block, where the format leaves it open", min=0)]
Tokenizer = Annotated[str, typer.Option(help="tokenizer folder or name, for traces of text")]
Lenient = Annotated[bool, typer.Option("--lenient", help="skip bad records and count them")]
ModelName = Annotated[str, typer.Option("--model", help="preset or path to config.json; gives bytes per token")]
KvDtype = Annotated[str, typer.Option("--kv-dtype", help="KV dtype when it isn't the weights'")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="write rows for machines here")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="write a self-contained report here")]


def said(function: F) -> F:
    """Turn input errors into one line and exit status 2."""

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TraceError as error:
            err.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
            raise typer.Exit(2) from None
        except OSError as error:
            err.print(f"error: {error.filename}: {error.strerror}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            err.print("interrupted")
            raise typer.Exit(130) from None

    return wrapper  # type: ignore[return-value]


def progress() -> Progress:
    """Bars on stderr, gone when done."""
    text = TextColumn("{task.description}")
    columns = (SpinnerColumn(), text, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True)


def read(path: Path, options: ReadOptions, form: str, lenient: bool) -> Trace:
    """Load one trace with a bar, and say what was skipped or assumed."""
    with progress() as bar:
        task = bar.add_task(f"reading {path.name}", total=None)
        trace = load(
            path, options, form=form, lenient=lenient, progress=lambda count: bar.update(task, completed=count)
        )
    if trace.skipped:
        err.print(f"{path}: skipped {trace.skipped} bad records", markup=False)
    for note in trace.notes:
        err.print(f"{path}: {note}", style="yellow", markup=False, soft_wrap=True)
    return trace


def describe(trace: Trace) -> str:
    """One line on a trace."""
    hours = float(trace.times_ns[-1]) / 3.6e12
    return (
        f"{trace.num_requests:,} requests of {trace.num_sessions:,} sessions over {hours:.1f} h, "
        f"{trace.num_references:,} block references, "
        f"{trace.num_blocks:,} distinct blocks of {trace.block_tokens} tokens"
    )


@app.command()
@said
def hitrate(
    trace: Traces,
    policy: Policies = ["infinite", "optimum", "session", "leaf-lru"],  # noqa: B006
    capacity: Capacities = ["1%", "2%", "5%", "10%"],  # noqa: B006
    form: Form = "",
    seed: Seed = 7,
    span_hours: Span = 8.0,
    block_tokens: Tokens = 0,
    tokenizer: Tokenizer = "",
    lenient: Lenient = False,
    model: ModelName = "",
    kv_dtype: KvDtype = "",
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Hit rates by policy and capacity: blocks, and tokens saved (only the leading run of a request counts)."""
    options = ReadOptions(span_hours * HOUR_S, seed, block_tokens, tokenizer)
    sweep_command(trace, policy, capacity, options, form, lenient, model, kv_dtype, json, html)


@app.command()
@said
def compare(
    trace: Traces,
    capacity: Capacities = ["0.2%", "0.5%", "1%", "2%", "5%", "10%"],  # noqa: B006
    policy: Policies = ["all"],  # noqa: B006
    gap_closed: Annotated[
        bool, typer.Option("--gap-closed", help="share of the distance from leaf-first LRU to the optimum")
    ] = False,
    form: Form = "",
    seed: Seed = 7,
    span_hours: Span = 8.0,
    block_tokens: Tokens = 0,
    tokenizer: Tokenizer = "",
    lenient: Lenient = False,
    model: ModelName = "",
    kv_dtype: KvDtype = "",
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Policies side by side over capacities."""
    options = ReadOptions(span_hours * HOUR_S, seed, block_tokens, tokenizer)
    if gap_closed:
        gap_command(trace, capacity, options, form, lenient, model, kv_dtype, json)
    else:
        sweep_command(trace, policy, capacity, options, form, lenient, model, kv_dtype, json, html)


@app.command()
@said
def plan(
    trace: Annotated[Path, typer.Option("--trace", "-t", help="trace file, folder or archive")],
    model: Annotated[str, typer.Option("--model", help="preset or path to config.json")] = "llama-3-8b",
    hardware: Annotated[str, typer.Option("--hardware", help="preset or JSON file")] = "h100-1",
    policy: Annotated[str, typer.Option("--policy", "-p", help="policy the service would run")] = "session",
    target_ttft: Annotated[float, typer.Option("--target-ttft", help="p99 in seconds", min=0.0)] = 2.0,
    form: Form = "",
    seed: Seed = 7,
    span_hours: Span = 8.0,
    block_tokens: Tokens = 0,
    tokenizer: Tokenizer = "",
    lenient: Lenient = False,
    kv_dtype: KvDtype = "",
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """How much DRAM and NVMe to buy, and why."""
    from kvstore_bench.plan import Planner, decide
    from kvstore_bench.planned import plan_page, plan_rows, print_plan
    from kvstore_bench.sweep import Simulator

    options = ReadOptions(span_hours * HOUR_S, seed, block_tokens, tokenizer)
    known_model, node = load_model(model, kv_dtype), load_hardware(hardware)
    check_policies([policy])
    loaded = read(trace, options, form, lenient)
    planner = Planner(Simulator(loaded), known_model, node, policy)
    with progress() as bar:
        task = bar.add_task("planning", total=len(planner.grid()))
        result = decide(list(planner.evaluate(lambda: bar.advance(task))), planner, target_ttft)
    print_plan(out, result, planner, describe(loaded))
    if json is not None:
        write_json(json, plan_rows(result))
    if html is not None:
        html.write_text(plan_page(result, planner, describe(loaded)).render(), encoding="utf-8")


@app.command()
@said
def convert(
    trace: Annotated[Path, typer.Option("--trace", "-t", help="trace file, folder or archive")],
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write; .gz and .xz are compressed")],
    form: Form = "",
    seed: Seed = 7,
    span_hours: Span = 8.0,
    block_tokens: Tokens = 0,
    tokenizer: Tokenizer = "",
    lenient: Lenient = False,
) -> None:
    """Any readable trace to the own format."""
    from kvstore_bench.traces.own import write_file

    loaded = read(trace, ReadOptions(span_hours * HOUR_S, seed, block_tokens, tokenizer), form, lenient)
    with progress() as bar:
        task = bar.add_task(f"writing {output.name}", total=loaded.num_requests)
        write_file(loaded, output, lambda: bar.advance(task))
    out.print(f"{output}: {describe(loaded)}", markup=False, soft_wrap=True)


@app.command()
@said
def record(
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write; .gz and .xz are compressed")],
    address: Annotated[str, typer.Option("--address", help="of the service: unix:/path/to/socket")],
    seconds: Annotated[float, typer.Option(help="0: until interrupted", min=0.0)] = 0.0,
    block_tokens: Annotated[int, typer.Option("--block-tokens", help="tokens per block of its keyspace", min=1)] = 32,
) -> None:
    """A running service's sessions, requests and hashes as a trace in the own format."""
    from kvstore.errors import KVStoreError
    from kvstore_bench.record import record as watch
    from kvstore_bench.traces.own import write_file

    try:
        trace = watch(address, seconds, block_tokens, output.name)
    except KVStoreError as error:
        raise TraceError(address, str(error)) from None
    if not trace.num_requests:
        raise TraceError(address, "no request of a session was seen", mend="record while agents work")
    write_file(trace, output)
    out.print(f"{output}: {describe(trace)}", markup=False, soft_wrap=True)


def check_policies(names: list[str]) -> list[str]:
    """`all` becomes all of them. Raises TraceError for an unknown one."""
    from kvstore_bench.sweep import MACHINE_POLICIES, POLICIES

    if names == ["all"]:
        return list(POLICIES)
    for name in names:
        if name not in POLICIES and name not in MACHINE_POLICIES:
            known = ", ".join(POLICIES + MACHINE_POLICIES)
            raise TraceError("--policy", f"unknown policy {name!r}", mend=f"use {known}")
    return names


def sweep_command(
    traces: list[Path],
    policies: list[str],
    capacities: list[str],
    options: ReadOptions,
    form: str,
    lenient: bool,
    model: str,
    kv_dtype: str,
    json: Path | None,
    html: Path | None,
) -> None:
    """Points of all traces: table, rows, page."""
    from kvstore_bench.swept import print_points, sweep_page, sweep_points

    names = check_policies(policies)
    token_bytes = load_model(model, kv_dtype).kv_bytes_per_token if model else 0
    page = None
    rows: list[Row] = []
    for path in traces:
        trace = read(path, options, form, lenient)
        sizes = [parse_capacity(text, trace.num_blocks, token_bytes * trace.block_tokens) for text in capacities]
        with progress() as bar:
            task = bar.add_task(f"simulating {trace.name}", total=len(names) * len(sizes))
            points = sweep_points(trace, names, sizes, partial(bar.advance, task))
        print_points(out, trace, describe(trace), points, capacities)
        rows += [
            row(f"{trace.name}/{p.policy}/{text}/{what}", value, "share")
            for text, at in zip(capacities, sizes, strict=True)
            for p in points
            if p.capacity == at
            for what, value in (("tokens", p.tokens), ("blocks", p.blocks))
        ]
        if html is not None:
            page = sweep_page(page, trace, describe(trace), points, sizes)
    if json is not None:
        write_json(json, rows)
    if html is not None and page is not None:
        html.write_text(page.render(), encoding="utf-8")


def gap_command(
    traces: list[Path],
    capacities: list[str],
    options: ReadOptions,
    form: str,
    lenient: bool,
    model: str,
    kv_dtype: str,
    json: Path | None,
) -> None:
    """The share of the distance to the optimum, one line per trace, with and without ends signalled."""
    from kvstore_bench.sweep import Simulator, gap_closed

    token_bytes = load_model(model, kv_dtype).kv_bytes_per_token if model else 0
    rows: list[Row] = []
    for path in traces:
        trace = read(path, options, form, lenient)
        simulator = Simulator(trace)
        table = Table(title=f"{trace.name}: {describe(trace)}", title_justify="left")
        for head in ("capacity", "leaf-lru", "session", "+ends", "optimum", "closed", "closed, +ends"):
            table.add_column(head, justify="right")
        for text in capacities:
            size = parse_capacity(text, trace.num_blocks, token_bytes * trace.block_tokens)
            lru, mine, ends, best = (
                simulator.point(name, size).tokens for name in ("leaf-lru", "session", "session+ends", "optimum")
            )
            shares = [gap_closed(lru, best, value) for value in (mine, ends)]
            table.add_row(text, *(f"{v:.1%}" for v in (lru, mine, ends, best)), *map(percent, shares))
            rows.append(row(f"{trace.name}/{text}/closed", shares[0], "share"))
            rows.append(row(f"{trace.name}/{text}/closed+ends", shares[1], "share"))
            rows.append(row(f"{trace.name}/{text}/session-minus-lru", mine - lru, "share", goal=NEVER_BELOW))
        out.print(table)
    if json is not None:
        write_json(json, rows)
    if code := exit_code(rows):
        raise typer.Exit(code)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


if __name__ == "__main__":
    sys.exit(app())
