"""What a launch function takes besides addresses: sizes and strides, in an array on the host.

A tensor in the call costs the host half a microsecond, an integer a fiftieth of that; and these are the same in every
call of a plan.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

STRIDE_ELEMENTS = 8  # strides other than the last, which is 1, are multiples of it: 16 bytes

SHAPES: Mapping[str, Sequence[str]] = {
    "q": ("batch", "seqlen_q", "heads", "head_dim"),
    "k": ("batch", "seqlen_k", "kv_heads", "head_dim"),
    "v": ("batch", "seqlen_k", "kv_heads", "head_dim"),
    "o": ("batch", "seqlen_q", "heads", "head_dim"),
}
SIZES = (
    *("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim"),
    *(f"{name} {mode}" for name in SHAPES for mode in ("batch", "row", "head")),  # strides, in elements
    *("head_group", "multiprocessors"),
)


class Sizes:
    """The array, and its address. It must live until the call returns."""

    __slots__ = ("address", "numbers")

    def __init__(self, layouts: Sequence[Layout], head_group: int, multiprocessors: int) -> None:
        """`layouts` are those of q, k, v and o."""
        (batch, seqlen_q, heads, head_dim), (_, seqlen_k, kv_heads, _) = layouts[0].shape, layouts[1].shape
        shapes = batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim
        strides = (stride for layout in layouts for stride in layout.strides[:3])
        self.numbers = array("q", (*shapes, *strides, head_group, multiprocessors))
        self.address = self.numbers.buffer_info()[0]


class Layout(NamedTuple):
    """Of a tensor [B, S, H, D]."""

    shape: Sequence[int]
    strides: Sequence[int]

    @classmethod
    def of(cls, tensor: Any) -> Layout:
        return cls(tensor.shape, tensor.stride())
