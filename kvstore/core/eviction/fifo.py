"""First in, first out: the candidate whose block came in longest ago goes, used or not.

Source: the oldest rule there is; Belady, "A study of replacement algorithms for a virtual-storage computer", 1966.
Flat form: `kvstore_bench.flat.classic`. There a context's head, which came in first, goes first and takes the use of
everything behind it along. Here only leaves go, so a context leaves from its end, when its *oldest* part has come up.

Not for: agents. A long conversation is old by nature, and most likely to return. It is here as a lower bound.
"""

from __future__ import annotations

from kvstore.core.eviction.queues import QueuePolicy


class Fifo(QueuePolicy):
    """Victim: the candidate that came in first."""

    name = "fifo"
