"""Showing where misses come from: a policy and the optimum beside each other, in words, a table and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvstore_bench.losses import FIRST_SIGHT, GAPS, NAMES, Lost
from kvstore_bench.report import Page
from kvstore_bench.rows import Row

BOUNDS = ("optimum", "infinite", "belady")
HEAD = ("missed tokens", "last used")
ALL = "all misses"
UNITS = "Share of all input tokens (of the missed ones), by what the block's session did since it last had it."
PHRASES = (
    "a context that came back after a tool call",
    "a context that came back after the end of a turn",
    "a context that came back after a stop the trace doesn't name",
    "a branch that its session had left behind and took up again",
    "a prefix that another session had used last",
)
SEEN = 0.0005
"""Share of input tokens below which a cause isn't shown."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One capacity: what a policy loses, and what the best possible one loses."""

    capacity: str
    policy: str
    mine: Lost
    best: Lost


def main_policy(policies: Sequence[str]) -> str:
    """The policy to look into: `session` where it's there, else the first that could run."""
    real = [name for name in policies if name not in BOUNDS]
    return "session" if "session" in real or not real else real[0]


def shown(pairs: Sequence[Pair]) -> list[int]:
    """Causes that matter at one capacity at least."""
    return [c for c in range(len(NAMES)) if any(max(p.mine.share(c), p.best.share(c)) >= SEEN for p in pairs)]


def cell(lost: Lost, cause: int) -> str:
    """Share of all input tokens, and of the missed ones."""
    return f"{lost.share(cause):.1%} ({lost.of_missed(cause):.0%})" if lost.tokens[cause] else "-"


def header(pairs: Sequence[Pair]) -> list[str]:
    """Two columns of words, two of figures a capacity."""
    return [*HEAD, *(text for p in pairs for text in (f"{p.policy} {p.capacity}", f"optimum {p.capacity}"))]


def lines(pairs: Sequence[Pair]) -> list[list[str]]:
    """One line a cause, then the sum. What a cause shares with the line before is left out."""
    body, before = [], ""
    for cause in shown(pairs):
        why, _, gap = NAMES[cause].rpartition(", ") if cause != FIRST_SIGHT else (NAMES[cause], "", "")
        cells = (cell(lost, cause) for p in pairs for lost in (p.mine, p.best))
        body.append([why if why != before else "", gap, *cells])
        before = why
    return [*body, [ALL, "", *(f"{lost.missed:.1%}" for p in pairs for lost in (p.mine, p.best))]]


def loss_tables(pairs: Sequence[Pair]) -> list[Table]:
    """As wide as a terminal: two capacities a table."""
    tables = []
    for start in range(0, len(pairs), 2):
        part = pairs[start : start + 2]
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for number, head in enumerate(header(part)):
            head = head if number < len(HEAD) else head.replace(" ", "\n", 1)
            table.add_column(head, justify="left" if number < len(HEAD) else "right", no_wrap=True)
        for line in lines(part):
            table.add_row(*line, style="bold" if line[0] == ALL else None)
        tables.append(table)
    return tables


def loss_rows(name: str, pairs: Sequence[Pair]) -> list[Row]:
    """Shares of all input tokens, of every cause that occurs."""
    return [
        Row(f"{name}/{policy}/{p.capacity}/missed: {NAMES[c]}", lost.share(c), "share")
        for p in pairs
        for policy, lost in ((p.policy, p.mine), ("optimum", p.best))
        for c in range(len(NAMES))
        if lost.tokens[c]
    ]


def sentence(pair: Pair) -> str:
    """One capacity in words."""
    mine, best = pair.mine, pair.best
    new = mine.share(FIRST_SIGHT)
    text = (
        f"At {pair.capacity}, {pair.policy} misses {mine.missed:.1%} of all input tokens: {new:.1%} were never seen "
        f"before, which no cache can help; {mine.missed - new:.1%} had been there and were evicted"
    )
    most = max(range(FIRST_SIGHT), key=lambda c: mine.tokens[c])
    if mine.share(most) < SEEN:
        return text + "."
    text += f"; the largest part, {mine.share(most):.1%}, {phrase(most)}"
    excess = [mine.share(c) - best.share(c) for c in range(FIRST_SIGHT)]
    gap = mine.missed - best.missed
    if gap < SEEN:
        return text + ". The optimum does no better."
    where = max(range(FIRST_SIGHT), key=excess.__getitem__)
    return (
        f"{text}. The optimum, which knows the future, misses {gap:.1%} less; the largest part of that, "
        f"{excess[where]:.1%}, {phrase(where)}."
    )


def phrase(cause: int) -> str:
    """A cause as the end of a sentence."""
    return f"is {PHRASES[cause // len(GAPS)]}, last used {GAPS[cause % len(GAPS)]} before"


def sentences(pairs: Sequence[Pair]) -> list[str]:
    """At most three capacities: the one most is missed at, the middle, the one least is."""
    ranked = sorted(pairs, key=lambda pair: -pair.mine.missed)
    return [sentence(ranked[at]) for at in sorted({0, len(ranked) // 2, len(ranked) - 1})]


def loss_section(page: Page, pairs: Sequence[Pair]) -> None:
    """The part of a page."""
    page.subheading("Where the misses come from")
    page.bullets(sentences(pairs))
    page.text(UNITS)
    page.table(header(pairs), lines(pairs), len(lines(pairs)) - 1)
