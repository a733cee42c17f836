"""Quantised copies: within their bound, sliced by layer, never mistaken for exact ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_gpu.errors import LayoutError
from kvstore_gpu.quant import Codec, Format, measure

ROUNDING = 1e-5  # float32 arithmetic of scale and product


def codec(form: Format) -> Codec:
    return Codec(form, num_layers=3, num_kv=2, block_tokens=8, num_heads=2, head_dim=16)


def blocks(form: Format, seed: int, num: int = 2, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Heads of very different ranges, with outliers, as in real models."""
    source = torch.Generator().manual_seed(seed)
    shape = (num, *codec(form).shape)
    heads = torch.exp(3 * torch.randn((*shape[:3], 1, shape[4], 1), generator=source))
    values = torch.randn(shape, generator=source) * heads
    values[..., 0] *= 20
    return values.to(dtype)


@pytest.mark.parametrize("form", list(Format))
@given(seed=st.integers(0, 2**31))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_error_stays_within_its_bound(form: Format, seed: int) -> None:
    found = measure(codec(form), blocks(form, seed))
    assert found.worst_of_bound <= 1 + ROUNDING
    assert found.bytes_saved > 0.4


@pytest.mark.parametrize("form", list(Format))
def test_a_layer_needs_only_its_own_slice(form: Format) -> None:
    exact, c = blocks(form, 1), codec(form)
    slots = c.quantise(exact)
    assert slots.shape == (2, c.slot_bytes)
    damaged = slots.clone()
    damaged[:, : c.slice_bytes] = 0xA5
    whole, rest = c.dequantise(slots, torch.bfloat16), c.dequantise(damaged, torch.bfloat16)
    assert torch.equal(whole[:, 1:], rest[:, 1:])
    assert not torch.equal(whole[:, 0], rest[:, 0])


@pytest.mark.parametrize("form", list(Format))
def test_padding_and_zeros(form: Format) -> None:
    c = codec(form)
    zeros = torch.zeros((1, *c.shape), dtype=torch.bfloat16)
    padded = torch.nn.functional.pad(c.quantise(zeros), (0, 100))
    assert torch.equal(c.dequantise(padded, torch.bfloat16), zeros)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_no_scale_holds_is_refused(value: float) -> None:
    exact = blocks(Format.INT8, 2)
    exact[0, 1, 0, 3, 1, 5] = value
    with pytest.raises(LayoutError, match="infinity"):
        codec(Format.INT8).quantise(exact)


def test_layouts_have_their_own_ids() -> None:
    assert len({form.layout_id for form in Format}) == 2
    with pytest.raises(LayoutError, match="shape"):
        codec(Format.FP8).quantise(torch.zeros(1, 2, 2, 8, 2, 16))
