"""The demo's agents: threads that call the model, then wait for their tool.

    arriving --> thinking --turn over--> in tool --tool returns--> thinking ... --> done

They arrive one after another, each when the one before has had its first answer, as users do who don't all come in the
same second; so a resumed turn competes with other turns and one new context, on a fast machine and on a slow one.

Tools take as long as a seeded draw says, in units of what the agent's first answer took: some less than one, most
several, long enough for the context to sink.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from kvstore_bench.demo_script import Script
from kvstore_engine.engine import Engine
from kvstore_engine.sampling import SamplingParams
from kvstore_engine.sequence import EndEvent, TurnEnd

SHORT, LONG = (0.3, 1.0), (3.0, 6.0)
"""Units that a tool takes."""
LONG_SHARE = 0.6
UNIT_S_MIN = 1.0


@dataclass(frozen=True)
class Turn:
    """One finished call: the agent, which of its calls, the prompt, what came of it."""

    agent: int
    index: int
    tokens: list[int]
    end: EndEvent

    @property
    def resumed(self) -> bool:
        """Did the context exist before?"""
        return self.index > 0


class Agent(threading.Thread):
    """One agent. The view reads its public attributes, which only this thread writes."""

    def __init__(
        self, number: int, script: Script, engine: Engine, sampling: SamplingParams, seed: int, before: Agent | None
    ) -> None:
        super().__init__(name=script.name, daemon=True)
        self.number = number
        self.script = script
        self.session = f"demo-{number + 1}"
        self.state = "arriving"
        self.index = 0
        self.turns: list[Turn] = []
        self.error = ""
        self._engine = engine
        self._sampling = sampling
        self._rng = random.Random(seed * 1000 + number)
        self._halt = threading.Event()
        self._before = before
        self._unit_s = UNIT_S_MIN
        self.answered = threading.Event()
        """Set with the first answer, or when there won't be one."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the context it is working on."""
        return len(self.script.calls[min(self.index, len(self.script.calls) - 1)].tokens)

    def stop(self) -> None:
        """Don't wait for the tool any more, and make no further calls."""
        self._halt.set()

    def run(self) -> None:
        """All calls of the script."""
        try:
            if self._before is not None:
                self._before.answered.wait()
            for index, call in enumerate(self.script.calls):
                self.index = index
                self._think(index, call.tokens, call.tool)
                if self._halt.is_set():
                    break
            self.state = "done"
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            self.state = "failed"
        finally:
            self.answered.set()

    def _think(self, index: int, tokens: list[int], tool: str) -> None:
        last = index == len(self.script.calls) - 1
        units = self._rng.uniform(*(LONG if self._rng.random() < LONG_SHARE else SHORT))
        after = TurnEnd() if last else TurnEnd(tool=tool, expected_s=units * self._unit_s)
        began = time.monotonic()
        self.state = "thinking"
        end = self._engine.generate(tokens, self._sampling, session=self.session, on_end=lambda text: after)
        self.turns.append(Turn(self.number, index, tokens, end))
        self.answered.set()
        if index == 0:
            self._unit_s = max(UNIT_S_MIN, time.monotonic() - began)
        if not last:
            wait_s = units * self._unit_s
            self.state = f"in {tool} {wait_s:.0f} s"
            self._halt.wait(wait_s)
