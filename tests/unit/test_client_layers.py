"""Layers as they come: a gate opens when all blocks are on their way, and whoever waits at it isn't left there."""

from __future__ import annotations

import threading

import pytest

from kvstore.errors import Unavailable
from kvstore_client.layers import LayerGate


class Opened:
    """Counts calls."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


def test_it_opens_when_the_first_layers_of_all_blocks_are_on_their_way() -> None:
    opened, waited = Opened(), list[str]()
    gate = LayerGate(5, opened, patience_s=0.0)
    first, second = gate.part(2), gate.part(3)
    first(2, lambda: waited.append("first, 0 and 1"))
    assert not gate.open
    second(1, lambda: waited.append("second, 0"))
    assert gate.open and opened.count == 1
    gate.before_layer(0)
    assert waited == ["first, 0 and 1", "second, 0"]
    with pytest.raises(Unavailable):  # of the second batch; and there is no patience
        gate.before_layer(1)
    second(4, lambda: waited.append("second, 1 to 3"))
    gate.before_layer(1)
    assert waited[-2:] == ["first, 0 and 1", "second, 1 to 3"]
    assert opened.count == 1


def test_blocks_that_come_another_way_keep_it_shut() -> None:
    gate = LayerGate(5, Opened(), patience_s=0.0)
    gate.part(4)(8, lambda: None)
    assert not gate.open


@pytest.mark.parametrize("how", ["a layer", "the end"])
def test_a_waiting_thread_goes_on(how: str) -> None:
    gate = LayerGate(1, Opened(), patience_s=30.0)
    told, seen = gate.part(1), list[str]()
    told(1, lambda: None)

    def wait() -> None:
        try:
            gate.before_layer(1)
            seen.append("a layer")
        except Unavailable:
            seen.append("the end")

    thread = threading.Thread(target=wait)
    thread.start()
    if how == "a layer":
        told(2, lambda: None)
    else:
        gate.close()
    thread.join(20)
    assert seen == [how]


def test_the_end_closes_it_and_leaves_what_has_come() -> None:
    waited = list[int]()
    gate = LayerGate(1, Opened(), patience_s=30.0)
    told = gate.part(1)
    told(1, lambda: waited.append(1))
    gate.close()
    gate.close()
    assert not gate.open
    gate.before_layer(0)
    assert waited == [1]
    with pytest.raises(Unavailable):
        gate.before_layer(1)


def test_patience_is_for_all_layers_together() -> None:
    gate = LayerGate(1, Opened(), patience_s=0.01)
    gate.part(1)(1, lambda: None)
    with pytest.raises(Unavailable):
        gate.before_layer(1)
    assert gate.patience_s < 1e-3
