"""Why a trace could not be read, in one line: where, which field, what is wrong, and what would mend it."""

from __future__ import annotations


class TraceError(ValueError):
    """A trace that can't be used. `line` is 1-based, 0 when it concerns the whole file."""

    def __init__(self, path: str, problem: str, *, line: int = 0, field: str = "", mend: str = "") -> None:
        self.path, self.line, self.field, self.problem, self.mend = path, line, field, problem, mend
        where = path + (f":{line}" if line else "") + (f": field {field!r}" if field else "")
        super().__init__(f"{where}: {problem}" + (f" ({mend})" if mend else ""))
