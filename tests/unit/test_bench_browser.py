"""The HTML reports in a real browser: nothing from elsewhere, nothing cut off, no label over another, on any width."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore_bench.cli import app

TRACE = Path(__file__).parents[1] / "data" / "traces" / "mooncake-conversation-1500.jsonl.xz"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REPORTS = {
    "hitrate": ["hitrate", "--policy", "session", "--policy", "leaf-lru", "-c", "1%", "-c", "10%"],
    "compare": ["compare", "-c", "0.5%", "-c", "1%", "-c", "5%", "-c", "20%"],
    "plan": ["plan", "--model", "llama-3-70b"],
}
CHARTS = {"hitrate": 2, "compare": 2, "plan": 2}
PROBE = """
<script>
const seen = {errors: window.errors, fetched: performance.getEntriesByType('resource').map(e => e.name)};
const page = document.documentElement;
seen.width = innerWidth;
seen.overflow = page.scrollWidth - page.clientWidth;
const cut = [], over = [];
const charts = [...document.querySelectorAll('svg')];
for (const chart of charts) {
  const frame = chart.getBoundingClientRect();
  const labels = [...chart.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
  for (const [text, box] of labels)
    if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.bottom > frame.bottom + 1 || !box.width)
      cut.push(text);
  labels.forEach(([text, a], i) => labels.slice(i + 1).forEach(([other, b]) => {
    if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)
      over.push(text + ' / ' + other);
  }));
}
seen.charts = charts.filter(e => e.getBoundingClientRect().width > 300).length;
seen.shapes = charts.reduce((n, e) => n + e.querySelectorAll('path, polyline, rect, circle').length, 0);
seen.cut = cut; seen.over = over;
const verdict = document.createElement('pre');
verdict.id = 'verdict';
verdict.textContent = JSON.stringify(seen);
document.body.append(verdict);
</script>
"""
CATCHER = "<script>window.errors = []; window.onerror = message => { window.errors.push(String(message)); };</script>"


@pytest.fixture(scope="module")
def browser() -> str:
    for name in BROWSERS:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    made = {}
    for name, arguments in REPORTS.items():
        made[name] = folder / f"{name}.html"
        done = CliRunner().invoke(app, [*arguments, "--trace", str(TRACE), "--html", str(made[name])])
        assert done.exit_code in (0, 1), done.output
    return made


def look(browser: str, page: Path, width: int, folder: Path) -> dict[str, Any]:
    """Open a copy of the page with a probe in it, and bring back what the probe saw."""
    text = page.read_text()
    assert text.count("</head>") == text.count("</body>") == 1
    copy = folder / f"{page.stem}-{width}.html"
    copy.write_text(text.replace("</head>", CATCHER + "</head>").replace("</body>", PROBE + "</body>"))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},900", "--dump-dom", copy.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="verdict">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return seen


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", sorted(REPORTS))
def test_report_reads_well(browser: str, pages: dict[str, Path], name: str, width: int, tmp_path: Path) -> None:
    seen = look(browser, pages[name], width, tmp_path)
    assert seen["errors"] == [] and seen["fetched"] == []
    assert seen["overflow"] <= 0, f"wider than {seen['width']} px"
    assert seen["charts"] == CHARTS[name] and seen["shapes"] > 10
    assert seen["cut"] == [] and seen["over"] == []


def test_the_probe_sees_what_it_looks_for(browser: str, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<!doctype html><html><head></head><body><div style="width:3000px">x</div><script>nothing()</script>'
        '<svg width="400" height="50"><text x="5" y="20">one</text><text x="8" y="20">two</text>'
        '<text x="390" y="20">cut off</text></svg></body></html>'
    )
    seen = look(browser, page, 800, tmp_path)
    assert seen["errors"] and seen["overflow"] > 0
    assert "cut off" in seen["cut"] and "one / two" in seen["over"]
