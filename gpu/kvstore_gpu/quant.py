"""Smaller copies for the lower tiers: FP8 or INT8 with a scale for each (layer, k|v, head). Opt-in, off by default.

A quantised block is another kind of bytes, so it has a layout id of its own and never shares a keyspace with exact
blocks. It stays block-first and sliced by layer, so checksums, layer-wise restore and slots work as ever:

    slice of one layer:  [scales: float32 [kv][head]] [values: 1 byte [kv][token][head][dim]]

K and V are scaled apart because their ranges differ by an order of magnitude in real models. Scales are symmetric
(no zero point): amax / 127 for INT8, amax / 448 for FP8 (e4m3). Plain tensor operations: one code for host and device.

Error, for x in one (layer, kv, head) with scale s, before rounding to the engine's dtype:

    int8   |x' - x| <= s / 2
    fp8    |x' - x| <= max(|x| / 16, s / 1024)      3 bits of mantissa; below 2^-6 steps of 2^-9
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch

from kvstore_gpu.errors import LayoutError

INT8_MAX = 127.0
FP8_MAX = 448.0


class Format(Enum):
    """How a value is stored; the value is the layout id that goes into the keyspace."""

    INT8 = "block-first/int8-layer-kv-head/1"
    FP8 = "block-first/fp8e4m3-layer-kv-head/1"

    @property
    def layout_id(self) -> str:
        """Part of the keyspace: never equal to an exact layout's."""
        return self.value


@dataclass(frozen=True)
class Codec:
    """Quantise and dequantise blocks `[layer][kv][token][head][dim]` of a 16- or 32-bit float dtype."""

    format: Format
    num_layers: int
    num_kv: int
    block_tokens: int
    num_heads: int
    head_dim: int

    @property
    def scale_bytes(self) -> int:
        """Bytes of one layer's scales."""
        return 4 * self.num_kv * self.num_heads

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer of a quantised block."""
        return self.scale_bytes + self.num_kv * self.block_tokens * self.num_heads * self.head_dim

    @property
    def slot_bytes(self) -> int:
        """Bytes of a quantised block."""
        return self.num_layers * self.slice_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(layers, kv, tokens, heads, dim)."""
        return self.num_layers, self.num_kv, self.block_tokens, self.num_heads, self.head_dim

    def quantise(self, blocks: torch.Tensor) -> torch.Tensor:
        """`[block, layer, kv, token, head, dim]` -> uint8 `[block, slot_bytes]`, on the same device.

        Raises: LayoutError for another shape, or when a value isn't finite: no scale could hold it.
        """
        if tuple(blocks.shape[1:]) != self.shape:
            raise LayoutError(f"blocks of shape {tuple(blocks.shape[1:])}, not {self.shape}")
        exact = blocks.float()
        amax = exact.abs().amax(dim=(3, 5))  # [block, layer, kv, head]
        if not bool(torch.isfinite(amax).all()):
            raise LayoutError("a block with NaN or infinity can't be quantised")
        top = INT8_MAX if self.format is Format.INT8 else FP8_MAX
        scale = (amax / top).clamp_min(torch.finfo(torch.float32).tiny)
        values = self._encode(exact / scale[:, :, :, None, :, None])
        num = blocks.shape[0]
        head = scale.contiguous().view(num, self.num_layers, -1).view(torch.uint8)
        tail = values.contiguous().view(torch.uint8).view(num, self.num_layers, -1)
        return torch.cat((head, tail), dim=2).view(num, self.slot_bytes)

    def dequantise(self, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Undo `quantise`, up to the error above and rounding to `dtype`."""
        num = slots.shape[0]
        layers = slots[:, : self.slot_bytes].reshape(num, self.num_layers, self.slice_bytes)
        head = layers[:, :, : self.scale_bytes].contiguous().view(torch.float32)
        scale = head.view(num, self.num_layers, self.num_kv, 1, self.num_heads, 1)
        stored = torch.int8 if self.format is Format.INT8 else torch.float8_e4m3fn
        values = layers[:, :, self.scale_bytes :].contiguous().view(stored).view(num, *self.shape)
        return (values.float() * scale).to(dtype)

    def bound(self, blocks: torch.Tensor) -> torch.Tensor:
        """Largest error that dequantising may show before rounding to a dtype, for each value."""
        exact = blocks.float()
        amax = exact.abs().amax(dim=(3, 5))[:, :, :, None, :, None]
        if self.format is Format.INT8:
            return (amax / INT8_MAX / 2).expand_as(exact)
        return torch.maximum(exact.abs() / 16, amax / FP8_MAX / 1024)

    def _encode(self, scaled: torch.Tensor) -> torch.Tensor:
        if self.format is Format.INT8:
            return scaled.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
        return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class Error:
    """What quantising cost: against each (layer, kv, head)'s largest value, and in the mean square."""

    worst_of_amax: float
    relative_rms: float
    worst_of_bound: float
    bytes_saved: float


def measure(codec: Codec, blocks: torch.Tensor) -> Error:
    """Quantise, dequantise in float32, compare. `worst_of_bound` above 1 would be a bug."""
    exact = blocks.float()
    back = codec.dequantise(codec.quantise(blocks), torch.float32)
    difference = (back - exact).abs()
    amax = exact.abs().amax(dim=(3, 5))[:, :, :, None, :, None].clamp_min(1e-30)
    rms = difference.square().mean().sqrt() / exact.square().mean().sqrt().clamp_min(1e-30)
    over = difference / codec.bound(blocks).clamp_min(1e-30)
    saved = 1 - codec.slot_bytes * blocks.shape[0] / (blocks.numel() * blocks.element_size())
    return Error(float((difference / amax).max()), float(rms), float(over.max()), saved)
