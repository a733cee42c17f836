"""A DRAM arena is pinned when it is first seen, and let go of when its owner lets go."""

from __future__ import annotations

import mmap
import queue
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvstore_gpu.pins import Pins


class Region:
    def __init__(self, arena: FakeArena, memory: np.ndarray) -> None:
        self.arena, self.address = arena, memory.ctypes.data

    def close(self) -> None:
        self.arena.words.put(("unregistered", self.address))


class FakeArena:
    """Counts what is asked of an arena."""

    def __init__(self, needs_pinned: bool = True, fails: bool = False) -> None:
        self.words: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.backend: Any = SimpleNamespace(needs_pinned=needs_pinned, enter=lambda: None)
        self.fails = fails
        self.threads = set[str]()

    def pin(self, memory: np.ndarray) -> Region:
        self.threads.add(threading.current_thread().name)
        if self.fails:
            raise OSError("no")
        self.words.put(("registered", memory.ctypes.data))
        return Region(self, memory)

    def forget_pinned(self, region: Region) -> None:
        self.words.put(("forgotten", region.address))

    def said(self) -> list[str]:
        return [self.words.get_nowait()[0] for _ in range(self.words.qsize())]


def mapping() -> np.ndarray:
    """As a client maps an arena: a part of a mapping."""
    return np.frombuffer(mmap.mmap(-1, 1 << 16), dtype=np.uint8)[: 1 << 15]


def pins_of(arena: FakeArena) -> Pins:
    return Pins(arena)  # type: ignore[arg-type]


def test_a_mapping_is_pinned_once_by_another_thread_and_let_go_of_at_the_end() -> None:
    arena = FakeArena()
    pins, memory = pins_of(arena), mapping()
    for _ in range(3):
        pins.see(memory)
    assert arena.words.get(timeout=10) == ("registered", memory.ctypes.data)
    pins.close()
    assert arena.said() == ["forgotten", "unregistered"]
    assert threading.current_thread().name not in arena.threads


def test_it_is_unregistered_when_the_client_lets_go_of_it() -> None:
    arena = FakeArena()
    pins, memory, other = pins_of(arena), mapping(), mapping()
    address = memory.ctypes.data
    pins.see(memory)
    pins.see(other)
    assert [arena.words.get(timeout=10)[0] for _ in range(2)] == ["registered", "registered"]
    del memory
    assert arena.words.get(timeout=10) == ("forgotten", address)
    assert arena.words.get(timeout=10) == ("unregistered", address)
    pins.close()
    assert arena.said() == ["forgotten", "unregistered"]


def test_what_is_gone_before_its_turn_is_never_pinned() -> None:
    arena = FakeArena()
    held, go = threading.Event(), threading.Event()

    def enter() -> None:
        held.set()
        assert go.wait(10)

    arena.backend.enter = enter
    pins, memory = pins_of(arena), mapping()
    pins.see(memory)
    assert held.wait(10)
    del memory
    go.set()
    pins.close()
    assert arena.said() == []


def test_a_failure_costs_speed_only() -> None:
    arena = FakeArena(fails=True)
    pins, memory = pins_of(arena), mapping()
    pins.see(memory)
    pins.close()
    assert arena.said() == []


def test_nothing_is_pinned_where_nothing_needs_it() -> None:
    arena = FakeArena(needs_pinned=False)
    pins, memory = pins_of(arena), mapping()
    pins.see(memory)
    pins.close()
    assert arena.said() == []
