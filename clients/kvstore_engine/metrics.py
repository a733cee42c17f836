"""The engine's Prometheus metrics, read from its counters when somebody scrapes. Nothing here can fail a request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore_engine.engine import Engine

TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class EngineCollector:
    """Yields metric families for one engine. Label sets are fixed: tiers, states, ends."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        up = GaugeMetricFamily("kvstore_engine_up", "1 while the engine's thread runs")
        up.add_metric([], 0 if self._engine.failure else 1)
        yield up
        try:
            yield from self._families()
        except KVStoreError:  # closed, or failed: `up` has said it
            return

    def _families(self) -> Iterator[Metric]:
        c, stats = self._engine.counters, self._engine.stats()
        tokens = CounterMetricFamily(
            "kvstore_engine_prompt_tokens", "prompt tokens by where KV came from", labels=["tier"]
        )
        for tier in ("hbm", "dram", "nvme", "computed"):
            tokens.add_metric([tier], c.prompt_tokens[tier])
        yield tokens
        jobs = GaugeMetricFamily("kvstore_engine_requests", "requests by state", labels=["state"])
        for state in ("waiting", "restoring", "running", "saving"):
            jobs.add_metric([state], stats[state])
        yield jobs
        ends = CounterMetricFamily("kvstore_engine_requests_ended", "requests by how they ended", labels=["reason"])
        for reason, count in list(c.ends.items()):
            ends.add_metric([reason], count)
        yield ends
        gauges = (
            ("slots", "slots of the pool", stats["slots"]),
            ("slots_used", "slots that hold a block", stats["slots_used"]),
            ("sessions", "sessions known", stats["sessions"]),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"kvstore_engine_{name}", text, value=value)
        totals = (
            ("generated_tokens", "tokens sampled", c.generated_tokens),
            ("restores", "restores that ended", c.num_restores),
            ("restores_late", "restores given up by their deadline", c.num_restores_late),
            ("chunks_ahead", "chunks begun before their restore was judged", c.num_ahead),
            ("chunks_ahead_dropped", "of these, those thrown away", c.num_ahead_dropped),
            ("restore_seconds", "time in restores", c.restore_seconds),
            ("offloaded_blocks", "blocks acknowledged by the store", c.offloaded_blocks),
            ("offloads_short", "offloads not taken in full", c.num_offloads_short),
            ("preemptions", "sequences that gave way", c.num_preemptions),
            ("refused", "requests refused by a full queue", c.num_refused),
            ("store_failures", "store calls that failed", stats["store_failures"]),
        )
        for name, text, total in totals:
            yield CounterMetricFamily(f"kvstore_engine_{name}", text, value=total)


def make_registry(engine: Engine) -> tuple[CollectorRegistry, Histogram]:
    """A registry of the engine's own, and the TTFT histogram that the server fills."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    ttft = Histogram(
        "kvstore_engine_ttft_seconds",
        "arrival to first token",
        ["cached"],
        buckets=TTFT_BUCKETS,
        registry=registry,
    )
    return registry, ttft
