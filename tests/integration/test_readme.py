"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"


def test_the_example_for_engines_runs(capsys: pytest.CaptureFixture[str]) -> None:
    [code] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(code, str(README), "exec"), {"__name__": "readme"})
    assert "0 25 of 25 blocks came back" in capsys.readouterr().out


def test_every_link_leads_somewhere() -> None:
    for target in re.findall(r"\]\((docs/[^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target
