"""`kvstore`: one command that starts every part.

Each command imports its part when it is called. So `kvstore --help` is quick, `kvstore fsck` needs no torch, and a part
that isn't installed is a line that says how to get it.

What a person sees when something is wrong is decided here and nowhere else:

    error meant for people    one line on stderr                   exit 2
    anything unexpected       one line that says it is our bug     exit 70
    Ctrl-C                    nothing                              exit 130

A traceback shows with --debug or KVSTORE_DEBUG=1 only.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

from kvstore.errors import InvalidField, KVStoreError, SetupError

EXIT_USER, EXIT_BUG, EXIT_INTERRUPTED = 2, 70, 130

EXTRAS = {"kvstore_engine": "engine", "kvstore_gpu": "gpu", "kvstore_bench": "bench"}
"""Extra that brings what a package of ours needs."""

MEASUREMENTS = {
    "restore": ("kvstore_bench.measure_restore", "Restored contexts against recomputed ones: time to the first token."),
    "io": ("kvstore_bench.measure_io", "Every data path of this machine against its limit, measured in the same run."),
    "acquire": ("kvstore_bench.measure_acquire", "A lookup with a lease, by length of the context."),
    "peers": ("kvstore_bench.measure_peers", "The same blocks through other stores, as far as they are installed."),
}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, no_args_is_help=True)
sessions = typer.Typer(no_args_is_help=True, help="Sessions of a running service.")
app.add_typer(sessions, name="sessions")

PASS_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
"""Hand all arguments, `--help` too, to a command that is built when it is called."""

Address = Annotated[
    str | None,
    typer.Option(
        envvar="KVSTORE_CLIENT_ADDRESS",
        help="unix:/path/kvstore.sock or host:port; default: the socket of a service with the same settings",
        metavar="ADDRESS",
    ),
]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", help="folder of the service's data; default: where it would keep it", metavar="DIR"),
]


@app.callback()
def _options(debug: Annotated[bool, typer.Option(help="tracebacks for errors that are bugs")] = False) -> None:
    """Keeps the KV cache of LLM agents in HBM, DRAM and NVMe, and gives it back verified."""
    if debug:
        os.environ["KVSTORE_DEBUG"] = "1"


# ---- services --------------------------------------------------------------------------------------------------------


@app.command(context_settings=PASS_ON)
def serve(ctx: typer.Context) -> None:
    """The node service: DRAM and NVMe tiers behind a unix socket and TCP."""
    from kvstore import config, flags

    def run(path: Path | None, given: dict[str, Any]) -> int:
        settings = config.load(path, given)
        return int(part("kvstore_server.main").run(settings))

    flags.start(flags.from_model(config.ServiceConfig, serve.__doc__ or "", run), "serve", ctx.args)


@app.command(context_settings=PASS_ON)
def engine(ctx: typer.Context) -> None:
    """The included decode engine, OpenAI-compatible over HTTP."""
    from kvstore import flags

    settings = part("kvstore_engine.config")

    def run(path: Path | None, given: dict[str, Any]) -> int:
        values = _toml(path) | given
        return int(part("kvstore_engine.main").serve(settings.engine_config(**values)) or 0)

    flags.start(flags.from_model(settings.EngineConfig, engine.__doc__ or "", run), "engine", ctx.args)


@app.command(context_settings=PASS_ON)
def demo(ctx: typer.Context) -> None:
    """Eight agents with tools, a real model, and a cache too small for them: watch contexts sink and rise."""
    _start_module("kvstore_bench.demo", "demo", ctx.args)


@app.command(context_settings=PASS_ON)
def bench(ctx: typer.Context) -> None:
    """Hit rates and capacity plans from traces; restore, io and peers measured on this machine."""
    from kvstore import flags

    name = ctx.args[0] if ctx.args else ""
    if name in MEASUREMENTS:
        return _start_module(MEASUREMENTS[name][0], f"bench {name}", ctx.args[1:])
    traces: typer.Typer = part("kvstore_bench.cli").app
    for known, (_, text) in MEASUREMENTS.items():
        traces.command(known, help=text, context_settings=PASS_ON)(_listed_only)
    flags.start(traces, "bench", ctx.args or ["--help"])


def _listed_only() -> None:
    """Stands in the help of `kvstore bench`; `bench` starts the real command."""


def _start_module(module: str, name: str, args: list[str]) -> None:
    from kvstore import flags

    target = part(module)
    flags.start(getattr(target, "app", None) or flags.from_function(target.run), name, args)


# ---- looking after ---------------------------------------------------------------------------------------------------


@app.command()
def fsck(
    data_dir: DataDir = None,
    repair: Annotated[bool, typer.Option("--repair", help="mend what was found; nothing is guessed")] = False,
) -> None:
    """Check a data directory whose service is stopped. Exit status 1 when something wrong is left."""
    from kvstore import progress
    from kvstore.config import default_data_dir
    from kvstore.tiers.fsck import fsck as check

    with progress.bars() as show:
        report = check(data_dir or default_data_dir(), repair=repair, progress=show)
    print("\n".join(report.lines()))
    raise typer.Exit(int(not (report.ok or report.repaired)))


@app.command()
def doctor(data_dir: DataDir = None) -> None:
    """Which data paths this machine has, and what the others are missing."""
    from kvstore import doctor as findings

    raise typer.Exit(findings.run(data_dir))


@app.command()
def explain(session: str, address: Address = None) -> None:
    """Where the context of SESSION stops being resident, and why."""
    from kvstore import console

    console.explain(address, session)


@sessions.command("list")
def list_sessions(
    activity: Annotated[str, typer.Option(help="only those in this state")] = "", address: Address = None
) -> None:
    """All sessions: state, tool, and where their blocks are."""
    from kvstore import console

    if activity and activity not in console.activities():
        raise InvalidField("activity", f"{activity!r} is no state", f"use one of {', '.join(console.activities())}")
    console.list_sessions(address, activity)


@sessions.command("end")
def end_session(session: str, address: Address = None) -> None:
    """End SESSION: blocks that only it held are the first to go."""
    from kvstore import console

    console.end_session(address, session)


@sessions.command("export")
def export_session(session: str, name: str, address: Address = None) -> None:
    """Give the context of SESSION a NAME that outlives it."""
    from kvstore import console

    console.export_session(address, session, name)


@sessions.command("resume")
def resume_session(name: str, session: str, address: Address = None) -> None:
    """Open SESSION at the context called NAME."""
    from kvstore import console

    console.resume_session(address, name, session)


@app.command()
def version() -> None:
    """Version of this distribution."""
    from importlib import metadata

    try:
        print(f"kvstore {metadata.version('kvstore')}")
    except metadata.PackageNotFoundError:
        print("kvstore, from a source tree that isn't installed")


# ---- plumbing --------------------------------------------------------------------------------------------------------


def part(name: str) -> ModuleType:
    """Import a part of this distribution. Raises SetupError when something that it stands on isn't installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if missing.startswith("kvstore"):
            raise
        extra = EXTRAS.get(name.partition(".")[0])
        wanted = f"kvstore[{extra}]" if extra else "kvstore"
        raise SetupError(f"{missing} isn't installed, {name} needs it: pip install '{wanted}'") from None


def _toml(path: Path | None) -> dict[str, Any]:
    from kvstore.config import read_toml

    return read_toml(path) if path else {}


def meant_for_people(error: BaseException) -> bool:
    """Whether the text of `error` was written for people: its class stands in an `errors` module of ours."""
    homes = [cls.__module__ for cls in type(error).__mro__]
    return any(home.startswith("kvstore") and home.endswith("errors") for home in homes)


def guarded(call: Callable[[], object]) -> int:
    """Exit status of `call`, after one line on stderr when it failed (see the table at the top)."""
    try:
        call()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains while it ends
        return EXIT_USER
    except Exception as error:
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    debug = os.environ.get("KVSTORE_DEBUG", "") not in ("", "0")
    if debug:
        traceback.print_exc()
    if isinstance(error, KVStoreError) or meant_for_people(error):
        return _say(str(error), EXIT_USER)
    if isinstance(error, OSError) and error.strerror:
        return _say(f"{error.filename or 'system call'}: {error.strerror.lower()}", EXIT_USER)
    how = "" if debug else "; run it again with KVSTORE_DEBUG=1 and report what it prints"
    return _say(f"{type(error).__name__}: {error}; this is a bug{how}", EXIT_BUG)


def _say(text: str, status: int) -> int:
    print("kvstore:", " ".join(text.split()), file=sys.stderr)
    return status


def main() -> None:
    """Entry point of the `kvstore` script and of `python -m kvstore`."""
    sys.exit(guarded(lambda: app(prog_name="kvstore")))
