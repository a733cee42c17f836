"""What eviction has learned survives a restart of the node, whatever became of it on the disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.config import ServiceConfig
from kvstore.core import events
from kvstore.core.events import SignalKind
from kvstore.core.eviction import learned
from kvstore.core.keyspace import Keyspace
from kvstore.core.state import Pool
from kvstore.core.types import BlockHash, SessionId, Tier
from kvstore.lessons import Learner
from kvstore.runtime import Runtime
from kvstore.testing.node import SMALL

KEYSPACE = Keyspace(
    model="m",
    weights_digest="5f" * 16,
    tokenizer_digest="a1" * 16,
    kv_dtype="bfloat16",
    num_layers=2,
    num_kv_heads=1,
    head_dim=64,
    rope="none",
    block_tokens=16,
)
DRAM = "learned/dram/session"


def runtime(folder: Path) -> Runtime:
    return Runtime(ServiceConfig(**SMALL | {"data_dir": folder / "data", "socket": folder / "kv.sock"}))


def teach(node: Runtime) -> None:
    """A session that waits for its tool, and comes back."""
    node.register(KEYSPACE.encode())
    session = SessionId("a")
    node.session_event(events.OpenSession(session, KEYSPACE.id))
    dram_of(node).policy(node.machine.space(KEYSPACE.id).share)  # as the first block would
    context = [BlockHash(bytes([number] * 16)) for number in range(4)]
    for _ in range(3):
        node.acquire(events.Acquire(KEYSPACE.id, context, "engine", 10**9, session))
        node.session_event(events.Signal(session, SignalKind.TOOL_START, "bash", -1, 7))
        node.session_event(events.Signal(session, SignalKind.TURN_START, "", -1, -1))


def test_the_depth_at_which_tokens_cost_twice_is_known_again_after_a_restart(tmp_path: Path) -> None:
    config = SMALL | {"data_dir": tmp_path / "data", "socket": tmp_path / "kv.sock", "recompute_doubles_at": 33}
    for life in range(2):
        node = Runtime(ServiceConfig(**config))
        if not life:
            node.register(KEYSPACE.encode())
        assert node.machine.space(KEYSPACE.id).share.doubles_at == 3  # blocks of 16 tokens
        node.close()


def dram_of(node: Runtime) -> Pool:
    pool = node.machine.pool(Tier.DRAM)
    assert pool is not None
    return pool


def lesson(node: Runtime) -> dict[str, Any]:
    """Of the DRAM tier's policy, made anew."""
    policy = dram_of(node).config.policy(Tier.DRAM)
    assert isinstance(policy, Learner)
    return learned.unpack("session", policy.dump())


def test_a_restarted_node_knows_what_it_knew(tmp_path: Path) -> None:
    node = runtime(tmp_path)
    teach(node)
    assert not any(map(any, lesson(node)["waits"]["pool"]))  # nothing kept yet: a new policy is a beginner
    node.close()
    node = runtime(tmp_path)
    events_seen, waits_seen = lesson(node)["waits"]["pool"]
    node.close()
    assert sum(events_seen) == 3
    assert sum(waits_seen) >= 3


@pytest.mark.parametrize("damage", [b"", b"nonsense", "cut"])
def test_damaged_lessons_are_no_obstacle(tmp_path: Path, damage: bytes | str) -> None:
    node = runtime(tmp_path)
    teach(node)
    node.close()
    node = runtime(tmp_path)
    assert node.data is not None
    kept = node.data.index.get_meta(DRAM)
    assert kept is not None
    node.data.index.put_meta(DRAM, kept[:-9] if isinstance(damage, str) else damage)
    assert not any(map(any, lesson(node)["waits"]["pool"]))
    node.close()


def test_a_node_without_nvme_learns_anew(tmp_path: Path) -> None:
    config = ServiceConfig(**SMALL | {"data_dir": tmp_path, "socket": tmp_path / "kv.sock", "nvme_bytes": 0})
    node = Runtime(config)
    teach(node)
    node.close()
    assert not (tmp_path / "index").exists()
