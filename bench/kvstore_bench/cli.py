"""`kvstore bench`: hit rates, comparisons and capacity plans from traces.

    load traces -> simulate points -> table on the terminal (+ --json rows, + --html page)

Input errors are one line on stderr and exit status 2; a promise that doesn't hold is exit status 1.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvstore_bench.hardware import load_hardware
from kvstore_bench.models import load_model
from kvstore_bench.rows import write_json
from kvstore_bench.terminal import Asked, check_outputs, describe, finished_points, out, progress, read, said
from kvstore_bench.traces.errors import TraceError
from kvstore_bench.traces.load import FORMATS
from kvstore_bench.traces.options import HOUR_S, ReadOptions
from kvstore_bench.traces.split import CHOICES, only

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
SEEDS_MAX = 100
GAP_MEND = "leave --policy and --html out"

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
Losses = Annotated[bool, typer.Option("--losses", help="where the misses come from, beside the optimum's")]
Sessions = Annotated[str, typer.Option("--sessions", help="all, even, odd, or several: even,odd")]
Seeds = Annotated[str, typer.Option("--seeds", help="several seeds, each a case of its own: 7,8,9 or 7-9")]
Resume = Annotated[Path | None, typer.Option("--resume", help="keep finished points here, and go on from them")]


def asked_for(
    options: ReadOptions,
    form: str,
    lenient: bool,
    model: str,
    kv_dtype: str,
    seeds: str = "",
    sessions: str = "all",
    resume: Path | None = None,
) -> Asked:
    """Check what was asked. Raises TraceError that names the option."""
    known = load_model(model, kv_dtype) if model else None
    halves = tuple(dict.fromkeys(word.strip() for word in sessions.split(",")))
    for word in halves:
        if word not in CHOICES:
            raise TraceError("--sessions", f"{word!r} is unknown", mend=f"use {', '.join(CHOICES)}, or even,odd")
    return Asked(options, form, lenient, parse_seeds(seeds), halves, resume, known)


def parse_seeds(text: str) -> tuple[int, ...]:
    """`7,8,9`, `7-9` or both. Raises TraceError."""
    seeds: list[int] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        first, _, last = word.partition("-")
        if not first.isdigit() or not (last or first).isdigit() or len(word) > 12:
            raise TraceError("--seeds", f"can't read {word!r}", mend="use 7,8,9 or 7-9")
        found = range(int(first), int(last or first) + 1)
        if not 0 < len(found) <= SEEDS_MAX:
            raise TraceError("--seeds", f"{word!r} is {len(found)} seeds", mend=f"name 1 to {SEEDS_MAX}")
        seeds += found
    return tuple(dict.fromkeys(seeds))


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
    losses: Losses = False,
    sessions: Sessions = "all",
    seeds: Seeds = "",
    resume: Resume = None,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Hit rates by policy and capacity: blocks, and tokens saved (only the leading run of a request counts)."""
    from kvstore_bench.swept import sweep_command

    check_outputs(json, html)
    options = ReadOptions(span_hours * HOUR_S, seed, block_tokens, tokenizer)
    asked = asked_for(options, form, lenient, model, kv_dtype, seeds, sessions, resume)
    sweep_command(trace, check_policies(policy, model), capacity, asked, losses, json, html)


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
    losses: Losses = False,
    sessions: Sessions = "all",
    seeds: Seeds = "",
    resume: Resume = None,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """Policies side by side over capacities."""
    from kvstore_bench.closed import gap_command
    from kvstore_bench.swept import sweep_command

    check_outputs(json, html)
    options = ReadOptions(span_hours * HOUR_S, seed, block_tokens, tokenizer)
    asked = asked_for(options, form, lenient, model, kv_dtype, seeds, sessions, resume)
    if not gap_closed:
        return sweep_command(trace, check_policies(policy, model), capacity, asked, losses, json, html)
    if policy != ["all"] or html is not None:
        raise TraceError("--gap-closed", "compares its own four policies, on the terminal and in --json", mend=GAP_MEND)
    gap_command(trace, capacity, asked, losses, json)


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
    sessions: Sessions = "all",
    resume: Resume = None,
    json: JsonFile = None,
    html: HtmlFile = None,
) -> None:
    """How much DRAM and NVMe to buy, and why."""
    from kvstore_bench.plan import Planner
    from kvstore_bench.planned import plan_page, plan_rows, print_plan
    from kvstore_bench.reasons import decide
    from kvstore_bench.sweep import Simulator

    check_outputs(json, html)
    options = ReadOptions(span_hours * HOUR_S, seed, block_tokens, tokenizer)
    known_model, node = load_model(model, kv_dtype), load_hardware(hardware)
    check_policies([policy], model)
    loaded = only(read(trace, options, form, lenient), sessions)
    with finished_points(resume) as kept, progress() as bar:
        planner = Planner(Simulator(loaded, kept, known_model), known_model, node, policy)
        task = bar.add_task("planning", total=len(planner.grid()))
        result = decide(list(planner.evaluate(lambda: bar.advance(task))), planner, target_ttft)
        page = plan_page(result, planner, describe(loaded)) if html is not None else None
    print_plan(out, result, planner, describe(loaded))
    if json is not None:
        write_json(json, plan_rows(result))
    if html is not None and page is not None:
        html.write_text(page.render(), encoding="utf-8")


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
    sessions: Sessions = "all",
) -> None:
    """Any readable trace to the own format."""
    from kvstore_bench.traces.own import write_file

    check_outputs(output)
    loaded = only(read(trace, ReadOptions(span_hours * HOUR_S, seed, block_tokens, tokenizer), form, lenient), sessions)
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
    from kvstore_bench.record import record as watch
    from kvstore_bench.traces.own import write_file

    check_outputs(output)
    trace = watch(address, seconds, block_tokens, output.name)
    if not trace.num_requests:
        raise TraceError(address, "no request was seen", mend="record while agents work")
    write_file(trace, output)
    out.print(f"{output}: {describe(trace)}", markup=False, soft_wrap=True)


def check_policies(names: list[str], model: str) -> list[str]:
    """`all` becomes all of them. Raises TraceError for an unknown one, and for one that needs a model without it."""
    from kvstore_bench.sweep import BY_TIME, MACHINE_POLICIES, POLICIES

    if names == ["all"]:
        return [name for name in POLICIES if model or name not in BY_TIME]
    for name in names:
        if name in BY_TIME and not model:
            raise TraceError("--policy", f"{name} counts computing time", mend="name the model with --model")
        if name not in POLICIES and name not in MACHINE_POLICIES:
            known = ", ".join(POLICIES + MACHINE_POLICIES)
            raise TraceError("--policy", f"unknown policy {name!r}", mend=f"use {known}")
    return names


if __name__ == "__main__":
    sys.exit(app())
