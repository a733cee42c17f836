"""On a machine with a CUDA device: everything the self-check verifies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvstore_gpu.check import decode, verify
from kvstore_gpu.check.rows import Row

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ITEMS = [
    verify.kernels,
    decode.right,
    verify.copies,
    verify.layers,
    verify.hand,
    verify.order,
    verify.ipc,
    verify.quantised,
]


@pytest.mark.parametrize("item", ITEMS)
def test_the_device_agrees_with_the_host(item: Callable[[str], list[Row]]) -> None:
    rows = item("cuda:0")
    assert all(row.ok is not False for row in rows), rows
