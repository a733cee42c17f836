"""What the demo's agents say: prompts of real coding-agent runs, call after call.

From the whole trace when it lies beside the source tree (`../shared/traces`), else from the sample in `tests/data`,
else (a copy of the package without its tree) from made-up text. `Script.source` says which, and the demo prints it.
"""

from __future__ import annotations

import json
import lzma
import random
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import SetupError
from kvstore.testing.service import ServiceProcess
from kvstore_engine.chat import render

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT.parent / "shared" / "traces" / "lmcache-miniswe.tar.xz"
SAMPLE = ROOT / "tests" / "data" / "miniswe-sample.json.xz"

_COMMAND = re.compile(r"```bash\s+(?:cd \S+ && )?([a-z_]+)")


@dataclass(frozen=True)
class Call:
    """One call of the model: the prompt's tokens, and the tool that the agent really ran after it."""

    tokens: list[int]
    tool: str


@dataclass(frozen=True)
class Script:
    """One agent's calls. Each prompt extends the one before."""

    name: str
    calls: list[Call]
    source: str


def start(service: ServiceProcess) -> None:
    """Start the service. Raises SetupError with the last line that it said."""
    try:
        service.start()
    except RuntimeError as error:
        said = str(error).strip().splitlines()
        raise SetupError(f"service: {said[-1] if said else 'ended without a word'}; see --data-dir") from None


Run = tuple[str, list[tuple[str, str]]]
"""Session id, and (prompt, answer) of each call."""


def load_scripts(
    tokenizer: Any, num_agents: int, num_turns: int, tokens_max: int, trace: Path | None = None
) -> list[Script]:
    """Scripts of `num_agents` agents, each with `num_turns` prompts of at most `tokens_max` tokens.

    Raises SetupError when the source holds fewer that fit.
    """
    source, runs = _runs(trace)
    scripts: list[Script] = []
    for _, calls in runs:
        if len(scripts) == num_agents:
            break
        script = _script(tokenizer, f"agent-{len(scripts) + 1}", calls, num_turns, tokens_max, source)
        if script is not None:
            scripts.append(script)
    if len(scripts) < num_agents:
        raise SetupError(
            f"agents: {source} has {len(scripts)} runs with {num_turns} prompts of up to {tokens_max} tokens; "
            "ask for fewer agents or turns, or more tokens"
        )
    return scripts


def load_text(tokenizer: Any, num_tokens: int) -> list[int]:
    """`num_tokens` tokens of the same prompts, one run after another."""
    tokens: list[int] = []
    _, runs = _runs(None)
    for _, calls in runs:
        tokens += tokenizer(max((prompt for prompt, _ in calls), key=len), add_special_tokens=False)["input_ids"]
        if len(tokens) >= num_tokens:
            break
    return tokens[:num_tokens]


def _script(
    tokenizer: Any, name: str, calls: list[tuple[str, str]], num_turns: int, tokens_max: int, source: str
) -> Script | None:
    made: list[Call] = []
    for prompt, answer in calls[:num_turns]:
        tokens = render(tokenizer, [{"role": "user", "content": prompt}], [])
        if len(tokens) > tokens_max:
            return None
        found = _COMMAND.search(answer)
        made.append(Call(tokens, found[1] if found else "bash"))
    return Script(name, made, source) if len(made) == num_turns else None


def _runs(trace: Path | None) -> tuple[str, Iterator[Run]]:
    wanted = trace or TRACE
    if wanted.is_file():
        return f"the trace {wanted.name}", _from_trace(wanted)
    if trace is not None:
        raise SetupError(f"trace: {trace} isn't there; give the path of lmcache-miniswe.tar.xz, or leave it out")
    if SAMPLE.is_file():
        return f"the sample {SAMPLE.name}", _from_sample(SAMPLE)
    return "made-up text (no trace found)", _made_up()


def _from_trace(path: Path) -> Iterator[Run]:
    with tarfile.open(path, "r:xz") as archive:
        members = sorted((m for m in archive.getmembers() if m.isfile()), key=lambda m: m.name)
        for member in members:
            file = archive.extractfile(member)
            assert file is not None
            rows = sorted((json.loads(line) for line in file), key=lambda r: r["timestamp"])
            yield rows[0]["session_id"], [(r["input"], r["output"]) for r in rows]


def _from_sample(path: Path) -> Iterator[Run]:
    for run in json.loads(lzma.decompress(path.read_bytes()))["runs"]:
        prompt, calls = "", []
        for call in run["calls"]:
            prompt += call["adds"]
            calls.append((prompt, call["output"]))
        yield run["session_id"], calls


def _made_up() -> Iterator[Run]:
    words = "the agent reads a file edits one line runs its tests and looks at what they say before it goes on".split()
    for number in range(64):
        rng = random.Random(number)
        prompt, calls = " ".join(rng.choices(words, k=1100)), []
        for _ in range(8):
            calls.append((prompt, "```bash\npytest\n```"))
            prompt += "\n" + " ".join(rng.choices(words, k=90))
        yield f"{number:032x}", calls
