"""Session activity: what an agent is doing, and since when.

    OPEN --turn start--> RUNNING --tool start--> TOOL_WAIT --tool end--> RUNNING --turn end--> IDLE ... --end--> ENDED

A session is a path of blocks in a tree, named by its deepest block (the tip). A fork starts at its parent's tip and
shares the prefix. Policies read these records; only the machine writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.core.types import Activity, SessionId

if TYPE_CHECKING:
    from kvstore.core.blocks import Block


class Session:
    """One agent's context and its recent history. Times are in ns of the machine's clock."""

    __slots__ = (
        "activity",
        "expected_ns",
        "id",
        "num_blocks",
        "num_found",
        "num_requests",
        "output_tokens",
        "parent",
        "since_ns",
        "space",
        "tip",
        "tool",
        "touched_ns",
    )

    def __init__(self, session_id: SessionId, space: int, parent: Session | None, now_ns: int) -> None:
        self.id = session_id
        self.space = space
        self.parent = parent
        self.activity = Activity.OPEN
        self.since_ns = now_ns
        """When `activity` was entered."""
        self.tool = ""
        """Name of the tool being waited for; empty when unknown or not waiting."""
        self.expected_ns = -1
        """How long the agent said the wait would take, from `since_ns`; -1 when it didn't say."""
        self.tip: Block | None = None
        self.touched_ns = now_ns
        self.num_requests = 0
        """Turn starts, tool returns, and contexts asked for without either."""
        self.num_blocks = 0
        """Blocks of its context, as it last asked for it or wrote it; what is cached of them ends at `tip`."""
        self.num_found = 0
        """How many of them, from the first on, were cached when it last asked."""
        self.output_tokens = -1
        """How many tokens the model wrote in the turn that just ended; -1 when nobody said."""
