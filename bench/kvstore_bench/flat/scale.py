"""What a decision costs in a large tier: `python -m kvstore_bench.flat.scale --policy session`.

Many sessions, each with a path of its own, come back in random order at the pace a tier of that size sees (every
session about once in `--gap` seconds). A request is what the machine tells a policy: it runs, its tip leaves the
candidates, one block grows, it is touched, it waits, and the new tip is a candidate; then one victim leaves. All times
are CPU times of this process, with garbage collection off, medians and means over `--requests` of them; the time of
waits that grow older between two requests is part of the request that comes next.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path

import numpy as np

from kvstore.core.blocks import Block, Residency, Share
from kvstore.core.eviction import POLICIES, make_policy
from kvstore.core.eviction.protocol import EvictionPolicy
from kvstore.core.sessions import Session
from kvstore.core.types import Activity, BlockHash, ResidencyState, SessionId, Slot, Tier
from kvstore_bench.rows import Row, row, write_json

SHARE = Share("", 4096)
READY = ResidencyState.READY


class Crowd:
    """Sessions of one tier, each at the end of its own path of blocks."""

    def __init__(self, policy: EvictionPolicy, num_sessions: int, num_blocks: int, gap_s: float, seed: int) -> None:
        self.policy = policy
        self.generator = np.random.default_rng(seed)
        self.step_ns = int(1e9 * gap_s / num_sessions)
        self.now_ns = 0
        self.num_blocks = 0
        self.sessions = [Session(SessionId(str(i)), 0, None, 0) for i in range(num_sessions)]
        for session in self.sessions:
            for _ in range(num_blocks // num_sessions - 1):
                session.tip = self._grown(session)
            self.request(session)

    def _grown(self, session: Session) -> Block:
        self.num_blocks += 1
        block = Block(BlockHash(self.num_blocks.to_bytes(16, "little")), session.tip, 0, SHARE)
        block.residencies[Tier.DRAM] = Residency(Slot(0), READY, 0)
        block.last_session, block.last_access_ns = session, self.now_ns
        if session.tip is not None:
            session.tip.kids.append(block)  # type: ignore[union-attr]
        return block

    def request(self, session: Session) -> None:
        """All that a policy hears of one request."""
        self.now_ns += self.step_ns
        policy, now = self.policy, self.now_ns
        session.activity = Activity.RUNNING
        policy.signal(session, now)
        old = session.tip
        if old is not None:
            policy.discard(old, now)
            old.num_tips = 0
        tip = session.tip = self._grown(session)
        tip.num_tips = 1
        policy.touch(tip, session, now)
        session.output_tokens = int(self.generator.integers(10, 2000))
        session.activity = Activity.TOOL_WAIT if self.generator.random() < 0.8 else Activity.IDLE
        policy.signal(session, now)
        policy.add(tip, now)

    def evict(self) -> None:
        """One victim leaves; its parent is a candidate then."""
        block = self.policy.victim(self.now_ns)
        assert block is not None
        session, parent = block.last_session, block.parent
        self.policy.evicted(block, self.now_ns)
        if parent is None or session is None:
            return
        parent.kids.remove(block)
        parent.num_tips += block.num_tips
        session.tip = parent
        self.policy.add(parent, self.now_ns)

    def next_session(self) -> Session:
        """Anyone, but most often one of few that are busy: agents call tools again and again."""
        busy = self.generator.random() < 0.5
        return self.sessions[int(self.generator.integers(len(self.sessions) // 100 if busy else len(self.sessions)))]


def measure(policy: str, num_blocks: int, num_sessions: int, gap_s: float, num_requests: int, seed: int) -> list[Row]:
    """Rows of one size."""
    gc.disable()
    begin = time.process_time()
    crowd = Crowd(make_policy(policy, Tier.DRAM), num_sessions, num_blocks, gap_s, seed)
    built = time.process_time() - begin
    requests, victims = np.zeros(num_requests), np.zeros(num_requests)
    for i in range(num_requests):
        session = crowd.next_session()
        begin = time.process_time()
        crowd.request(session)
        middle = time.process_time()
        crowd.evict()
        requests[i], victims[i] = middle - begin, time.process_time() - middle
    gc.enable()
    name = f"{policy}/{num_blocks} blocks/{num_sessions} sessions"
    return [
        row(f"{name}/built", built, "s"),
        row(f"{name}/request mean", 1e6 * float(requests.mean()), "us"),
        row(f"{name}/request p50", 1e6 * float(np.median(requests)), "us"),
        row(f"{name}/request p99", 1e6 * float(np.percentile(requests, 99)), "us"),
        row(f"{name}/victim mean", 1e6 * float(victims.mean()), "us"),
        row(f"{name}/victim p99", 1e6 * float(np.percentile(victims, 99)), "us"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m kvstore_bench.flat.scale", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--policy", default="session", choices=sorted(POLICIES))
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--gap", type=float, default=3600.0, help="seconds between requests of a session")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows = measure(asked.policy, asked.blocks, asked.sessions, asked.gap, asked.requests, asked.seed)
    for one in rows:
        print(f"{one.name:<50} {one.text:>16}", flush=True)
    if asked.json is not None:
        write_json(asked.json, rows)


if __name__ == "__main__":
    main()
