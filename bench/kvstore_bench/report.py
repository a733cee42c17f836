"""One self-contained HTML page: no scripts, no fonts, no network; charts are inline SVG that read in light and dark."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

COLOURS = ("#990099", "#ff9900", "#8a6d3b", "#666666", "#22aa99", "#dd4477", "#66aa00", "#6633cc", "#e67300")
"""For names that have no fixed colour; none of these is one."""
FIXED = {
    "infinite": "#999999",
    "optimum": "#109618",
    "session": "#3366cc",
    "session+ends": "#0099c6",
    "leaf-lru": "#dc3912",
}
DASHED = {"infinite": "2 4", "optimum": "6 4"}
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 860, 360, 56, 44, 12, 150

STYLE = """
:root{color-scheme:light dark;--line:#8884;--soft:#8882}
body{font:16px/1.5 system-ui,sans-serif;max-width:960px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin:0 0 .2rem}h2{font-size:1.2rem;margin:2rem 0 .5rem}p.sub{opacity:.7;margin:0 0 1rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9rem;width:100%}
th,td{padding:.25rem .6rem;text-align:right;border-bottom:1px solid var(--line)}
th:first-child,td:first-child{text-align:left}table.words th,table.words td{text-align:left;vertical-align:top}
tr.best{background:var(--soft);font-weight:600}
td,th{white-space:nowrap}.words td,.words th{white-space:normal;min-width:8rem}
svg{display:block;width:100%;min-width:640px;height:auto;font:12px system-ui,sans-serif}svg text{fill:currentColor}
li{margin:.3rem 0}.wide{overflow-x:auto}
"""


@dataclass(slots=True)
class Series:
    """One line of a chart: x and y of its points."""

    name: str
    points: list[tuple[float, float]] = field(default_factory=list)


@dataclass(slots=True)
class Page:
    """A report under construction."""

    title: str
    subtitle: str
    parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self.parts.append(f"<h2>{html.escape(text)}</h2>")

    def subheading(self, text: str) -> None:
        self.parts.append(f"<h3>{html.escape(text)}</h3>")

    def text(self, text: str) -> None:
        self.parts.append(f"<p>{html.escape(text)}</p>")

    def bullets(self, items: Sequence[str]) -> None:
        self.parts.append("<ul>" + "".join(f"<li>{html.escape(item)}</li>" for item in items) + "</ul>")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], best: int = -1, words: bool = False) -> None:
        """`best`: the row to stand out. `words`: cells are text, not figures."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
        body = ""
        for number, cells in enumerate(rows):
            mark = ' class="best"' if number == best else ""
            body += f"<tr{mark}>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>"
        kind = ' class="words"' if words else ""
        self.parts.append(
            f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    def svg(self, picture: str) -> None:
        self.parts.append(f'<div class="wide">{picture}</div>')

    def render(self) -> str:
        """The whole page."""
        title = html.escape(self.title)
        head = f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        head += (
            f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head><body>'
        )
        head += f'<h1>{title}</h1><p class="sub">{html.escape(self.subtitle)}</p>'
        return f"{head}{''.join(self.parts)}</body></html>\n"


def colour(name: str, number: int) -> str:
    return FIXED.get(name, COLOURS[number % len(COLOURS)])


def _frame(x_label: str, x_ticks: list[tuple[float, str]], y_ticks: list[tuple[float, str]]) -> str:
    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    out = ""
    for y, label in y_ticks:
        out += f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="currentColor" opacity=".15"/>'
        out += f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    for x, label in x_ticks:
        out += f'<line x1="{x:.1f}" y1="{floor}" x2="{x:.1f}" y2="{floor + 4}" stroke="currentColor"/>'
        out += f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle">{label}</text>'
    middle, label = (LEFT + right) / 2, html.escape(x_label)
    return out + f'<text x="{middle:.0f}" y="{HEIGHT - 6}" text-anchor="middle" opacity=".7">{label}</text>'


def short(x: float) -> str:
    """A number on an axis."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def ticks_apart(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Without those whose labels would touch the one before; the last always stays."""
    kept: list[tuple[float, str]] = []
    for x, label in reversed(ticks):
        if not kept or kept[-1][0] - x >= 4 * (len(label) + len(kept[-1][1])):
            kept.append((x, label))
    return kept[::-1]


def line_chart(series: list[Series], x_label: str) -> str:
    """Shares (0 to 1) over positive x on a logarithmic axis, a legend at the right ordered by the last value."""
    xs = sorted({x for one in series for x, _ in one.points})
    low, high = math.log10(xs[0]), math.log10(xs[-1])
    span = high - low or 1.0

    def across(x: float) -> float:
        return LEFT + (WIDTH - RIGHT - LEFT) * (math.log10(x) - low) / span

    def up(y: float) -> float:
        return TOP + (HEIGHT - BOTTOM - TOP) * (1.0 - y)

    out = _frame(
        x_label, ticks_apart([(across(x), short(x)) for x in xs]), [(up(y / 5), f"{y * 20} %") for y in range(6)]
    )
    ranked = sorted(enumerate(series), key=lambda pair: -max(pair[1].points)[1])
    for place, (number, one) in enumerate(ranked):
        path = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in sorted(one.points))
        ink, dash = colour(one.name, number), DASHED.get(one.name, "")
        out += f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="2" stroke-dasharray="{dash}"/>'
        for x, y in one.points:
            tip = html.escape(f"{one.name}: {y:.1%} at {short(x)}")
            out += f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{ink}"><title>{tip}</title></circle>'
        y = TOP + 10 + 18 * place
        out += f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 8}" width="12" height="4" fill="{ink}"/>'
        out += f'<text x="{WIDTH - RIGHT + 32}" y="{y}">{html.escape(one.name)}</text>'
    return _svg(out, "Tokens saved by capacity")


def stacked_chart(
    names: Sequence[str],
    columns: list[tuple[str, list[float]]],
    x_label: str,
    title: str = "Where tokens came from over time",
) -> str:
    """Shares that sum to 1 at most, one column a time slice; names from the bottom up."""
    inks = ("#109618", "#3366cc", "#ff9900", "#dc3912")
    width = (WIDTH - RIGHT - LEFT) / max(1, len(columns))
    tall = HEIGHT - BOTTOM - TOP
    out, ticks = "", []
    for number, (label, shares) in enumerate(columns):
        x, base = LEFT + number * width, float(HEIGHT - BOTTOM)
        for k, share in enumerate(shares):
            size = tall * share
            base -= size
            tip = html.escape(f"{label}: {names[k]} {share:.1%}")
            out += f'<rect x="{x:.2f}" y="{base:.2f}" width="{width:.2f}" height="{size:.2f}" fill="{inks[k % 4]}">'
            out += f"<title>{tip}</title></rect>"
        if number % max(1, len(columns) // 8) == 0:
            ticks.append((x + width / 2, label))
    for k, name in enumerate(names):
        y = TOP + 10 + 18 * (len(names) - 1 - k)
        out += f'<rect x="{WIDTH - RIGHT + 14}" y="{y - 9}" width="10" height="10" fill="{inks[k % 4]}"/>'
        out += f'<text x="{WIDTH - RIGHT + 32}" y="{y}">{html.escape(name)}</text>'
    frame = _frame(x_label, ticks, [(TOP + tall * (1 - y / 4), f"{y * 25} %") for y in range(5)])
    return _svg(out + frame, title)


def _svg(inside: str, title: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title)}">{inside}</svg>'
