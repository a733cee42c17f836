"""When will this context be needed again? A model of waiting times that learns online, from nothing.

A *wait* begins when a session stops (tool call, end of turn, or simply the last request) and ends with its next
request. Time since then, its age, is cut into octaves: bin k covers [EDGES_NS[k], EDGES_NS[k + 1]). In each bin a
wait either ends (1) or survives (0), so predicting a wait is predicting a few coin flips, one hazard p[k] a bin.

    contexts of the wait         counts per context and bin          mixed hazard          worth of keeping
    (stop, pace, output ...) --> events E[row, k], exposure X[row, k] --> p[k] --> index[k] = max over t of P(end <=
    t) / E[min(end, t)]

Each context keeps its own counts, shrunk first by how it compares with the pooled curve in the bins around, then
toward the pooled curve at that bin. The contexts' log-odds, relative to the pooled ones, are added with weights per
bin that follow the gradient of the log loss (context mixing, as in PAQ: Mahoney, "Adaptive weighing of context models
for lossless data compression", 2005). So no set of classes has to be right everywhere. See `curve` for the index.

The context of one that waits may be needed by *another* session too (the same prompt asked again): one `Curve` for all
waits tells what that adds, as long as nobody has come. Without it, prompts that many ask once each would be worth
nothing at first sight.

Log-odds of a context's bin are worked out when its counts change and kept, so predicting is adding a few kept numbers.
Old waits are few and matter most to large tiers: from REFRESH_BIN on the index is made anew in each bin, and from
FINE_BIN on it moves in quarters of a bin. Plain lists and floats: at ten contexts they beat arrays several times.

Not for: blocks whose use has nothing to do with sessions. They have no wait and rank below everything that has one.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import exp, log
from typing import Any, TypeAlias

from kvstore.core.eviction import learned
from kvstore.core.eviction.curve import (
    COUNT_MAX,
    EDGES_NS,
    LAST_BIN,
    NO_INDEX,
    NUM_BINS,
    Curve,
    index_curve,
    pooled,
)

Key: TypeAlias = tuple[object, ...]

CONTEXT_WEIGHT = 4.0
"""How many waits the pooled hazard is worth against a context's own counts."""
RATIO_WEIGHT = 4.0
"""How many expected events it takes to believe that a context is faster or slower than the pool."""
RATIO_MAX = 4.0
MIX_START = 0.3
MIX_RATE = 0.02
ROWS_MAX = 1 << 17
KEPT_ROWS_MAX = 1 << 12
"""How many contexts, those with the most evidence first, are worth remembering over a restart."""
REFRESH_BIN = 8
"""From this bin on (128 s) the index is made anew when a wait enters a bin."""
FINE_BIN = 5
"""From this bin on (16 s) the index moves between bins in FINE_STEPS steps."""
FINE_STEPS = 4

_PAD = 2
"""Empty bins on both sides of a row, so that sums over neighbours need no limits."""


class Wait:
    """One running wait. `worth` is that of the context's blocks now."""

    __slots__ = ("alone", "bin", "extra", "index", "live", "owner", "rows", "start_ns", "step", "worth")

    def __init__(self, owner: object, start_ns: int, rows: list[Row], index: list[int]) -> None:
        self.owner = owner
        self.start_ns = start_ns
        self.rows = rows
        """[M] counts of each context."""
        self.index = index
        """[K] by what was known when the wait began, or entered its present bin."""
        self.bin = 0
        self.step = 0
        """Quarters of the bin that have passed."""
        self.worth = index[0]
        self.extra = NO_INDEX
        """What the chance that others come to the same context adds, where nobody has yet."""
        self.alone = False
        """Nobody else has used the end of the context so far."""
        self.live = True


class Row:
    """Counts of one context. Lists are padded: bin k is at k + _PAD."""

    __slots__ = ("events", "exposed", "signs")

    def __init__(self) -> None:
        self.events = [0.0] * (NUM_BINS + 2 * _PAD)
        self.exposed = [0.0] * (NUM_BINS + 2 * _PAD)
        self.signs = [0.0] * NUM_BINS
        """[K] log-odds relative to the pool."""


NOTHING_SEEN = Row()


def clip(p: float) -> float:
    """Away from 0 and 1, where log-odds end."""
    return 1e-5 if p < 1e-5 else 0.999 if p > 0.999 else p


class ResumeModel:
    """Learns hazards from waits and tells the index of running ones. One instance may serve several tiers.

    Guarantees: deterministic; `begin`, `end` and `advance` must see non-decreasing times. Memory is bounded by
    `ROWS_MAX` rows; contexts beyond that share one row, which is reset by none.
    """

    def __init__(self, num_contexts: int) -> None:
        self._rows: dict[tuple[int, Key], Row] = {}
        self._others = Curve()
        """When other sessions come to the context of one that waits."""
        self._overflow = Row()
        self._pool_events = [0.0] * NUM_BINS
        self._pool_exposed = [0.0] * NUM_BINS
        self._rates = [0.0] * (NUM_BINS + 2 * _PAD)
        """Padded: pooled events an exposure."""
        self._bases = [0.0] * NUM_BINS
        """[K] pooled hazards."""
        self._levels = [0.0] * NUM_BINS
        """[K] their log-odds."""
        self._weights = [[MIX_START] * NUM_BINS for _ in range(num_contexts)]
        self._timers: list[tuple[int, int, int, Wait]] = []
        """(due, start, tie) of each wait's next step."""
        self._seq = 0
        for k in range(NUM_BINS):
            self._pool_changed(k)

    def begin(self, owner: object, keys: list[Key], now_ns: int, alone: bool, extra: int) -> Wait:
        """A wait with these contexts (one key per context, in a fixed order) starts now. `extra`: what others' use of
        its context is worth until it comes to another bin."""
        rows = [self._row(number, key) for number, key in enumerate(keys)]
        wait = Wait(owner, now_ns, rows, self._index(rows, 0))
        wait.alone, wait.extra = alone, extra
        self._arm(wait)
        return wait

    def promise(self, keys: list[Key]) -> int:
        """What a wait with these contexts would be worth at its beginning, to its own session."""
        return self._index([self._rows.get((number, key), NOTHING_SEEN) for number, key in enumerate(keys)], 0)[0]

    @property
    def company(self) -> int:
        """What other sessions' use of a lone context is worth when its wait begins."""
        return self._others.worth[0]

    def end(self, wait: Wait, now_ns: int) -> None:
        """The session came back. `advance(now_ns)` must have been called."""
        k = wait.bin
        wait.live = False
        if k == 0:
            self._enter(wait.rows, 0)
            if wait.alone:
                self._others.expose(0)
        self._learn(wait.rows, k, 1.0)
        for row in wait.rows:
            row.events[k + _PAD] += 1.0
        self._pool_events[k] += 1.0
        self._pool_changed(k)
        self._weigh(wait.rows, k)

    def joined(self, wait: Wait) -> None:
        """Another session came to the whole context, while this one waits."""
        if not wait.alone:
            return
        if wait.bin == 0:
            self._others.expose(0)
        self._others.use(wait.bin)
        wait.alone = False

    def forget(self, wait: Wait) -> None:
        """The wait is over without an outcome (ended, or described anew)."""
        wait.live = False

    def drop_context(self, number: int, key: Key) -> None:
        """A context will never be asked for again (a session that ended)."""
        self._rows.pop((number, key), None)

    def advance(self, now_ns: int) -> list[Wait]:
        """Let waits grow older up to `now_ns`; returns those whose worth may have changed."""
        changed: list[Wait] = []
        timers = self._timers
        while timers and timers[0][0] <= now_ns:
            wait = heappop(timers)[3]
            if wait.live:
                before = wait.worth, wait.extra
                self._grow_older(wait)
                if (wait.worth, wait.extra) != before:
                    changed.append(wait)
        return changed

    def _grow_older(self, wait: Wait) -> None:
        k, index = wait.bin, wait.index
        if k >= FINE_BIN and wait.step + 1 < FINE_STEPS:
            wait.step += 1
            wait.worth = index[k] + (index[k + 1] - index[k]) * wait.step // FINE_STEPS
        else:
            self._cross(wait)
            wait.worth = wait.index[wait.bin]
        self._arm(wait)

    def _cross(self, wait: Wait) -> None:
        k = wait.bin
        if k == 0:
            self._enter(wait.rows, 0)
        self._learn(wait.rows, k, 0.0)
        wait.bin, wait.step = k + 1, 0
        self._enter(wait.rows, k + 1)
        if wait.alone:
            if k == 0:
                self._others.expose(0)
            self._others.expose(k + 1)
        wait.extra = self._others.worth[k + 1]
        if k + 1 >= REFRESH_BIN:
            wait.index = self._index(wait.rows, k + 1)

    def _arm(self, wait: Wait) -> None:
        k = wait.bin
        if k == LAST_BIN:
            return
        self._seq += 1
        low, high = EDGES_NS[k], EDGES_NS[k + 1]
        age_ns = high if k < FINE_BIN else low + (high - low) // FINE_STEPS * (wait.step + 1)
        heappush(self._timers, (wait.start_ns + age_ns, wait.start_ns, self._seq, wait))

    def _row(self, number: int, key: Key) -> Row:
        row = self._rows.get((number, key))
        if row is not None:
            return row
        if len(self._rows) >= ROWS_MAX:
            return self._overflow
        row = self._rows[(number, key)] = Row()
        return row

    # ---- over a restart

    def learned(self) -> dict[str, Any]:
        """Counts and weights, for `learned.pack`. Waits that are running leave what they have shown so far."""
        by_evidence = sorted(self._rows.items(), key=lambda item: -sum(item[1].exposed))[:KEPT_ROWS_MAX]
        inner = slice(_PAD, _PAD + NUM_BINS)
        return {
            "bins": NUM_BINS,
            "pool": [learned.trimmed(self._pool_events), learned.trimmed(self._pool_exposed)],
            "weights": self._weights,
            "others": self._others.learned(),
            "rows": [
                [number, list(key), learned.trimmed(row.events[inner]), learned.trimmed(row.exposed[inner])]
                for (number, key), row in by_evidence
                if any(row.exposed)
            ],
        }

    def adopt(self, content: dict[str, Any]) -> None:
        """Start from what `learned` gave. Call it before the first wait. Raises ValueError and changes nothing when
        the content has another shape."""
        weights = [learned.finite(row) for row in learned.as_list(content.get("weights"))]
        if content.get("bins") != NUM_BINS or [len(row) for row in weights] != [NUM_BINS] * len(self._weights):
            raise ValueError("what was learned has other bins or contexts than this version")
        events, exposed = learned.pair(content.get("pool"), NUM_BINS)
        rows = dict(self._adopted(entry) for entry in learned.as_list(content.get("rows"))[:ROWS_MAX])
        self._others.adopt(content.get("others"))
        self._pool_events, self._pool_exposed, self._weights, self._rows = events, exposed, weights, rows
        for k in range(NUM_BINS):
            self._pool_changed(k)
        for k in range(NUM_BINS):
            self._weigh([row for row in rows.values() if any(row.exposed[k : k + 2 * _PAD + 1])], k)

    def _adopted(self, entry: object) -> tuple[tuple[int, Key], Row]:
        number, key, *both = learned.as_list(entry)
        if not isinstance(number, int) or not 0 <= number < len(self._weights):
            raise ValueError("what was learned names a context that isn't there")
        events, exposed = learned.pair(both, NUM_BINS)
        padding = [0.0] * _PAD
        row = Row()
        row.events, row.exposed = padding + events + padding, padding + exposed + padding
        return (number, learned.key(key)), row

    # ---- learning

    def _enter(self, rows: list[Row], k: int) -> None:
        """A wait with these contexts reaches bin k."""
        at = k + _PAD
        for row in rows:
            row.exposed[at] += 1.0
            if row.exposed[at] > COUNT_MAX:
                row.exposed[at] *= 0.5
                row.events[at] *= 0.5
        self._pool_exposed[k] += 1.0
        if self._pool_exposed[k] > COUNT_MAX:
            self._pool_exposed[k] *= 0.5
            self._pool_events[k] *= 0.5
        self._pool_changed(k)
        self._weigh(rows, k)

    def _pool_changed(self, k: int) -> None:
        """Pooled hazards of the bins that lean on bin k."""
        events, exposed = self._pool_events, self._pool_exposed
        self._rates[k + _PAD] = (events[k] + 0.1) / (exposed[k] + 1.0)
        for j in range(k, min(k + 3, NUM_BINS)):
            self._bases[j] = pooled(events, exposed, j)
            base = clip(self._bases[j])
            self._levels[j] = log(base / (1.0 - base))

    def _weigh(self, rows: list[Row], k: int) -> None:
        """What each context says about bin k by its counts: the ratio to the pool in the bins around as prior."""
        base, level = self._bases[k], self._levels[k]
        r0, r1, _, r3, r4 = self._rates[k : k + 5]
        for row in rows:
            e0, e1, events, e3, e4 = row.events[k : k + 5]
            x0, x1, exposed, x3, x4 = row.exposed[k : k + 5]
            seen = RATIO_WEIGHT + e0 + e1 + e3 + e4
            expected = RATIO_WEIGHT + x0 * r0 + x1 * r1 + x3 * r3 + x4 * r4
            ratio = seen / expected
            guess = base * (ratio if ratio < RATIO_MAX else RATIO_MAX)
            own = clip((events + CONTEXT_WEIGHT * (guess if guess < 0.9 else 0.9)) / (exposed + CONTEXT_WEIGHT))
            row.signs[k] = log(own / (1.0 - own)) - level

    def _learn(self, rows: list[Row], k: int, outcome: float) -> None:
        mixed = self._levels[k]
        for weights, row in zip(self._weights, rows, strict=True):
            mixed += weights[k] * row.signs[k]
        step = MIX_RATE * (outcome - hazard_of(mixed))
        for weights, row in zip(self._weights, rows, strict=True):
            weights[k] += step * row.signs[k]

    def _index(self, rows: list[Row], first: int) -> list[int]:
        """[K] the index by present counts, from bin `first` on."""
        bins = slice(first, NUM_BINS - 1)
        mixed = self._levels[bins]
        for weights, row in zip(self._weights, rows, strict=True):
            signs = row.signs[bins]
            mixed = [a + b * c for a, b, c in zip(mixed, weights[bins], signs)]  # noqa: B905 - hot, cut alike above
        return index_curve([0.0] * first + [hazard_of(value) for value in mixed], first)


def hazard_of(log_odds: float) -> float:
    """Kept away from 0 and 1. Conditions instead of min and max: this runs at every bin of every prediction."""
    p = 1.0 / (1.0 + exp(-log_odds))
    return 1e-6 if p < 1e-6 else 0.9999 if p > 0.9999 else p
