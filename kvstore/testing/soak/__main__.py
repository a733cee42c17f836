"""Command line of the soak; see the package for what it does."""

from __future__ import annotations

import argparse
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvstore.testing.soak.disk import soak_disk
from kvstore.testing.soak.kills import soak_kills
from kvstore.testing.soak.machine import soak_machine
from kvstore.testing.soak.tally import Tally

PARTS = {"machine": 0.15, "disk": 0.4, "kills": 0.45}
"""Parts in order, and their shares of the time."""
Stop = Callable[[], bool]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Flags."""
    parser = argparse.ArgumentParser(
        "kvstore.testing.soak", description="Random work under faults, judged byte by byte."
    )
    parser.add_argument("--minutes", type=float, default=10, help="how long at most, all parts together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=list(PARTS), action="append", help="run this part (may be given again)")
    parser.add_argument("--operations", type=int, default=0, help="end the machine part after so many")
    parser.add_argument("--faults", type=int, default=0, help="end the disk part after so many")
    parser.add_argument("--kills", type=int, default=0, help="end the kills part after so many of the service")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--verbose", action="store_true", help="show what the node logs")
    return parser.parse_args(arguments)


def run_part(name: str, tally: Tally, given: argparse.Namespace, stop: Stop) -> None:
    """One part, until `stop()` or its own bound."""
    if name == "machine":
        soak_machine(tally, given.seed, stop, given.operations)
    elif name == "disk":
        soak_disk(tally, given.seed, stop, given.faults)
    else:
        soak_kills(tally, given.seed, stop, given.kills)


def state_of(tally: Tally) -> str:
    """One line of progress."""
    c = tally.counts
    return (
        f"{c['operations']:,} operations, {c['blocks_written']:,} blocks written, {c['blocks_verified']:,} verified, "
        f"{tally.num_faults:,} faults, {c['service_kills']} kills, {c['wrong_bytes_blocks']} wrong"
    )


def watched(name: str, tally: Tally, work: Callable[[], None], console: Console) -> None:
    """Run `work` and show how it goes."""
    ended = threading.Event()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name)

        def show() -> None:
            while not ended.wait(0.5):
                progress.update(task, description=f"{name}: {state_of(tally)}")

        shower = threading.Thread(target=show, daemon=True)
        shower.start()
        try:
            work()
        finally:
            ended.set()
            shower.join()
    console.print(f"{name}: {state_of(tally)}")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when everything that must be zero is."""
    given = parse(arguments)
    # A log that keeps its records keeps the errors in them, and with those what their frames hold: arenas, descriptors.
    logging.disable(logging.NOTSET if given.verbose else logging.CRITICAL)
    try:
        return _soak(given)
    finally:
        logging.disable(logging.NOTSET)


def _soak(given: argparse.Namespace) -> int:
    console = Console()
    tally = Tally()
    parts = given.only or list(PARTS)
    whole = sum(PARTS[name] for name in parts)
    for name in parts:
        end = time.monotonic() + given.minutes * 60 * PARTS[name] / whole
        part = name
        watched(
            part,
            tally,
            lambda part=part, end=end: run_part(part, tally, given, lambda: time.monotonic() > end),  # type: ignore[misc]
            console,
        )
    console.print(tally.table())
    for problem in tally.problems:
        console.print(f"  {problem}", markup=False)
    if given.json:
        tally.write(given.json)
    return 0 if tally.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
