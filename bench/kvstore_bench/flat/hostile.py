"""Traces that no agent would make, from a seed: what a policy that learns from sessions could fall for.

Each is a stream of (seconds, session, path of blocks, stop); see the functions for what is hostile about it. `session`
must not lose to leaf-first LRU on any of them by more than a hair; a test holds it to that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from kvstore_bench.traces.model import RawRequest, Stop, Trace, build

BLOCK_TOKENS = 64
Made = tuple[float, object, list[int], Stop]
"""Seconds, session, blocks (numbers stand for whole prefixes), why the model stopped."""
Random = np.random.Generator


def prompt(number: int, length: int) -> list[int]:
    """The blocks of one of many prompts that share nothing."""
    return [(number + 1) << 24 | k for k in range(length)]


def zipf(generator: Random, count: int, exponent: float, size: int) -> list[int]:
    """Draws from 0 .. size - 1, the first the most frequent."""
    weights = 1.0 / np.arange(1, size + 1) ** exponent
    return [int(x) for x in generator.choice(size, count, p=weights / weights.sum())]


def zipf_prompts(generator: Random, count: int) -> Iterator[Made]:
    """No sessions at all: popular prompts come again and again, each request by itself."""
    for i, number in enumerate(zipf(generator, count, 0.9, count // 4)):
        yield 1.0 * i, i, prompt(number, 1 + number % 13), Stop.UNKNOWN


def drifting_prompts(generator: Random, count: int) -> Iterator[Made]:
    """Popularity moves on: what was asked often is soon asked no more."""
    for i, number in enumerate(zipf(generator, count, 1.1, 400)):
        yield 1.0 * i, i, prompt(number + i // 8, 1 + number % 7), Stop.UNKNOWN


def scans(generator: Random, count: int) -> Iterator[Made]:
    """Sweeps over all prompts in turn, between popular ones."""
    popular = zipf(generator, count, 1.0, 300)
    for i in range(count):
        number = 1000 + i % 1200 if i % 1600 < 1200 else popular[i]
        yield 1.0 * i, i, prompt(number, 6), Stop.UNKNOWN


def one_shots(generator: Random, count: int) -> Iterator[Made]:
    """Sessions of one request that share a head; in between, some that talk."""
    heads = generator.integers(0, 8, count)
    talks: dict[int, int] = {}
    for i in range(count):
        if i % 4:
            yield 1.0 * i, ("once", i), prompt(int(heads[i]), 5) + prompt(10_000 + i, 8), Stop.TURN
        else:
            who = int(generator.integers(max(0, i // 40 - 4), i // 40 + 1))
            talks[who] = talks.get(who, 0) + 3
            yield 1.0 * i, who, prompt(int(who % 8), 5) + prompt(1_000_000 + who, talks[who]), Stop.TURN


def changing_gaps(generator: Random, count: int) -> Iterator[Made]:
    """Half of the sessions return soon and half late; in the middle they change places."""
    made: list[Made] = []
    for who in range(count // 25):
        now = float(generator.uniform(0.0, count * 0.8))
        for turn in range(25):
            late = (who % 2 == 0) != (now > count / 2)
            now += float(generator.exponential(300.0 if late else 5.0))
            made.append((now, who, prompt(who, 4 + 2 * turn), (Stop.TOOL, Stop.TURN)[who % 2]))
    return iter(sorted(made, key=lambda one: one[0]))


def misled(generator: Random, count: int) -> Iterator[Made]:
    """For an hour every stop of one kind is followed by a return; then by none, and the other kind returns."""
    made: list[Made] = []
    for i in range(count // 4):
        now = float(i * 4)
        kind = i % 2
        returns = (now < count / 2) == (kind == 0)
        for turn in range(4 if returns else 1):
            made.append((now, i, prompt(i, 8 + turn), (Stop.TOOL, Stop.TURN)[kind]))
            now += float(generator.uniform(40.0, 160.0))
    return iter(sorted(made, key=lambda one: one[0]))


def random_tree(generator: Random, count: int) -> Iterator[Made]:
    """Random paths down a tree of shared prefixes, no sessions: deep reuse by chance alone."""
    for i in range(count):
        path, node = [], 1
        for _ in range(int(generator.integers(2, 9))):
            node = node * 4 + min(3, int(generator.geometric(0.5)) - 1)
            path.append(node)
        yield 1.0 * i, i, path, Stop.UNKNOWN


def random_tree_sessions(generator: Random, count: int) -> Iterator[Made]:
    """The same, by sessions that jump from path to path and wait for no reason."""
    for number, (now, _, path, _) in enumerate(random_tree(generator, count)):
        yield now, int(generator.integers(40)), path, (Stop.TOOL, Stop.TURN)[number % 2]


def shared_documents(generator: Random, count: int) -> Iterator[Made]:
    """Long documents that many sessions ask about, a few questions each."""
    documents = zipf(generator, count, 0.8, 150)
    for i in range(count):
        head = prompt(documents[i - i % 3], 30 + documents[i - i % 3] % 40)
        yield 5.0 * i, i // 3, head + prompt(100_000 + i // 3, 1 + i % 3), Stop.TURN


def echoes(generator: Random, count: int) -> Iterator[Made]:
    """Each prompt is asked a few times within a minute by different sessions, then never again: LRU's best case."""
    made: list[Made] = []
    for i in range(count // 4):
        for _ in range(4):
            at = 4.0 * i + float(generator.exponential(30.0))
            made.append((at, len(made), prompt(i, 12), Stop.UNKNOWN))
    return iter(sorted(made, key=lambda one: one[0]))


def clockwork(generator: Random, count: int) -> Iterator[Made]:
    """Agents that come back every five minutes to the second, and as many that never do."""
    made: list[Made] = []
    for who in range(count // 20):
        start = float(generator.uniform(0.0, count))
        rounds = 39 if who % 2 else 1
        for turn in range(rounds):
            made.append((start + 300.0 * turn, who, prompt(who, 10 + turn // 4), Stop.TOOL))
    return iter(sorted(made, key=lambda one: one[0]))


def restless(generator: Random, count: int) -> Iterator[Made]:
    """Sessions that rewrite their context: every request branches off near the head."""
    for i in range(count):
        who = int(generator.integers(30)) + 30 * (i // 600)
        keep = int(generator.integers(1, 6))
        yield 2.0 * i, who, prompt(who, keep) + prompt(50_000 + i, 10), (Stop.TOOL, Stop.TURN)[i % 2]


def doubles(generator: Random, count: int) -> Iterator[Made]:
    """Prompts asked exactly twice, the second time after a wait that any age predicts wrongly: short or very long."""
    made: list[Made] = []
    for i in range(count // 2):
        now = 2.0 * i
        gap = 3.0 if generator.random() < 0.7 else float(generator.uniform(600.0, 900.0))
        made.append((now, (i, 0), prompt(i, 10), Stop.UNKNOWN))
        made.append((now + gap, (i, 1), prompt(i, 10), Stop.UNKNOWN))
    return iter(sorted(made, key=lambda one: one[0]))


KINDS: dict[str, Callable[[Random, int], Iterator[Made]]] = {
    made.__name__: made
    for made in (
        zipf_prompts,
        drifting_prompts,
        scans,
        one_shots,
        changing_gaps,
        misled,
        random_tree,
        random_tree_sessions,
        shared_documents,
        echoes,
        clockwork,
        restless,
        doubles,
    )
}


def make(kind: str, seed: int, num_requests: int = 12_000) -> Trace:
    """The trace of one kind, of about `num_requests` requests."""
    names: dict[tuple[int, ...], int] = {}
    requests = []
    for seconds, session, path, stop in KINDS[kind](np.random.default_rng(seed), num_requests):
        ids = [names.setdefault(tuple(path[: k + 1]), len(names)) for k in range(len(path))]
        requests.append(
            RawRequest(int(seconds * 1e9), str(session), np.array(ids, np.int64), BLOCK_TOKENS * len(ids), 50, stop)
        )
    return build(kind, requests, BLOCK_TOKENS)
