"""Prometheus metrics of a node. Counting never raises, and label values come from fixed sets.

Counters and histograms are bumped where things happen; gauges are read from the machine when somebody scrapes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

LATENCY_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
REASONS = ("evicted", "corrupt", "orphan", "copy failed", "not filled", "evicted: no room below", "retired")

ALARM_BLOCKS = 1_000
"""Stored and asked for before "never hit" means something."""
log = logging.getLogger(__name__)
Rows = Iterable[tuple[dict[str, str], float]]


class Metrics:
    """All series of one node, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._num_asked = self._num_matched = self._num_sealed = 0
        self._hits = self._counter("hit_blocks", "Blocks served to restores", ["tier"])
        self._matched = self._counter("matched_blocks", "Blocks found by Acquire", [])
        self._asked = self._counter("requested_blocks", "Blocks asked for by Acquire", [])
        self._bytes = self._counter("moved_bytes", "Bytes moved", ["tier", "direction"])
        self._evictions = self._counter("evictions", "Copies that left a tier", ["tier", "reason"])
        self._failures = self._counter("failures", "Failures by kind", ["kind"])
        self._offloads = self._counter("sealed_blocks", "Blocks sealed by clients", [])
        self._dropped = self._counter("dropped_blocks", "Blocks that found no room when a client offloaded them", [])
        self._rpc = Histogram(
            "kvstore_rpc_seconds", "Time in a call", ["method"], registry=self.registry, buckets=LATENCY_BUCKETS
        )
        self._move = Histogram(
            "kvstore_move_seconds",
            "Time of a move",
            ["source", "target"],
            registry=self.registry,
            buckets=LATENCY_BUCKETS,
        )

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"kvstore_{name}", text, labels, registry=self.registry)

    def gauges(self, read: Callable[[], Iterable[tuple[str, str, Rows]]]) -> None:
        """`read() -> (name, help, [(labels, value)])` is called at each scrape."""
        self.registry.register(_Gauges(read))

    def hits(self, tier: str, num_blocks: int) -> None:
        """Blocks handed to a restore."""
        _bump(self._hits.labels(tier), num_blocks)

    def acquired(self, num_requested: int, num_matched: int) -> None:
        """One Acquire."""
        _bump(self._asked, num_requested)
        _bump(self._matched, num_matched)
        self._num_asked += _count(num_requested)
        self._num_matched += _count(num_matched)

    def moved(self, tier: str, direction: str, num_bytes: int) -> None:
        """`direction` is "in" or "out"."""
        _bump(self._bytes.labels(tier, direction), num_bytes)

    def evicted(self, tier: str, reason: str, num_blocks: int = 1) -> None:
        """READY copies left a tier."""
        _bump(self._evictions.labels(tier, reason if reason in REASONS else "other"), num_blocks)

    def failed(self, kind: str, count: int = 1) -> None:
        """`kind`: the class name of a KVStoreError, or another fixed word."""
        _bump(self._failures.labels(kind), count)

    def sealed(self, num_blocks: int) -> None:
        """Blocks a client offloaded."""
        _bump(self._offloads, num_blocks)
        self._num_sealed += _count(num_blocks)

    @property
    def never_hit(self) -> bool:
        """Much was stored, much was asked for, and nothing was ever found: whoever asks hashes otherwise than whoever
        stores."""
        return not self._num_matched and min(self._num_sealed, self._num_asked) >= ALARM_BLOCKS

    def dropped(self, num_blocks: int) -> None:
        """Blocks an offload had to leave out."""
        _bump(self._dropped, num_blocks)

    def rpc(self, method: str, seconds: float) -> None:
        """One call."""
        _observe(self._rpc.labels(method), seconds)

    def move(self, source: str, target: str, seconds: float) -> None:
        """One background move."""
        _observe(self._move.labels(source, target), seconds)


def _count(value: float) -> int:
    return int(value) if math.isfinite(value) and value > 0 else 0


def _bump(counter: Counter, value: float) -> None:
    if _count(value):
        counter.inc(_count(value))


def _observe(histogram: Histogram, seconds: float) -> None:
    if math.isfinite(seconds):
        histogram.observe(max(0.0, seconds))


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Iterable[tuple[str, str, Rows]]]) -> None:
        self._read = read

    def collect(self) -> Iterable[GaugeMetricFamily]:
        try:
            families = list(self._read())
        except Exception:  # a figure less, never a failed scrape or a failed call
            log.exception("reading gauges failed")
            return
        for name, text, rows in families:
            family = GaugeMetricFamily(f"kvstore_{name}", text, labels=None)
            for labels, value in rows:
                family.add_sample(f"kvstore_{name}", labels, value)
            yield family
