"""Runs recorded one after the other, as if agents had worked side by side.

In a trace where the next run starts when the last has ended (LMCache's agent runs as shipped), the context used last is
always the one used next: leaf-first LRU is the optimum and no policy can do better. Sessions that overlap are what a
service sees. So each session keeps its own gaps, and its start is drawn uniformly over a span, in the order of the
sessions' names, from a seeded generator.

    python -m kvstore_bench.flat.overlap --trace FILE --span 300 --seed 7     the share closed, with starts so drawn
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from kvstore_bench.sweep import Simulator, gap_closed
from kvstore_bench.traces.load import load
from kvstore_bench.traces.model import RawRequest, Stop, Trace, build

SHARES = (0.01, 0.02, 0.05, 0.1)


def overlapped(trace: Trace, span_s: float, seed: int) -> Trace:
    """The same sessions with starts drawn anew, uniformly over `span_s` seconds."""
    generator = np.random.default_rng(seed)
    first = np.zeros(trace.num_sessions, np.int64)
    first[trace.session[::-1]] = trace.times_ns[::-1]
    start = {name: int(generator.uniform(0.0, 1e9 * span_s)) for name in sorted(trace.session_names)}
    requests = [
        RawRequest(
            time_ns=start[trace.session_names[s]] + int(trace.times_ns[r] - first[s]),
            session=trace.session_names[s],
            ids=trace.ids[trace.offsets[r] : trace.offsets[r + 1]].astype(np.int64),
            input_tokens=int(trace.input_tokens[r]),
            output_tokens=int(trace.output_tokens[r]),
            stop=Stop(int(trace.stop[r])),
            tool=trace.tool_names[trace.tool[r]] if trace.tool[r] >= 0 else "",
        )
        for r, s in enumerate(trace.session.tolist())
    ]
    return build(f"{trace.name} over {span_s:g} s", requests, trace.block_tokens, partial_last=trace.partial_last)


def closed(trace: Trace) -> list[str]:
    """A line for each capacity: what leaf-first LRU and the optimum save, and the shares of the distance closed."""
    simulator = Simulator(trace)
    lines = []
    for share in SHARES:
        size = max(1, int(trace.num_blocks * share))
        lru, mine, ends, best = (
            simulator.point(name, size).tokens for name in ("leaf-lru", "session", "session+ends", "optimum")
        )
        shares = [gap_closed(lru, best, value) for value in (mine, ends)]
        told = ["-" if one is None else f"{one:.0%}" for one in shares]
        lines.append(f"{share:>5.0%}  leaf-lru {lru:.1%}  optimum {best:.1%}  closed {told[0]}, with ends {told[1]}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvstore_bench.flat.overlap")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--span", type=float, default=300.0, help="seconds over which the sessions start")
    parser.add_argument("--seed", type=int, default=7)
    asked = parser.parse_args()
    trace = overlapped(load(asked.trace), asked.span, asked.seed)
    print(trace.name, f"seed {asked.seed}", *closed(trace), sep="\n")


if __name__ == "__main__":
    main()
