"""What a launch function takes besides addresses: sizes and strides, in an array on the host.

A tensor in the call costs the host half a microsecond, an integer a fiftieth of that; and these are the same in every
call of a plan.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

STRIDE_ELEMENTS = 8  # strides other than the last, which is 1, are multiples of it: 16 bytes

SHAPES: Mapping[str, Sequence[str]] = {
    "q": ("batch", "seqlen_q", "heads", "head_dim"),
    "k": ("batch", "seqlen_k", "kv_heads", "head_dim"),
    "v": ("batch", "seqlen_k", "kv_heads", "head_dim_v"),
    "o": ("batch", "seqlen_q", "heads", "head_dim_v"),
}
# `left` and `right` are those of `schedules.domain.Bounds`, "slopes batch" is 0 where all batch entries share slopes.
# In a ragged batch the head group is what `schedules.work.keys_in_l2` says, and of `sequences` one behind the other in
# one entry `packed` is 1.
# Of a paged one k and v are [pages, page, Hkv, D], and seqlen_k is what a sequence may have; sequences of fewer queries
# than `least rows` are left to another kernel.
NUMBERS = (
    *("head_group", "multiprocessors", "left", "right", "slopes batch", "sequences", "packed"),
    *("pages", "page", "page shift", "table row", "least rows"),
)
SIZES = (
    *("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v"),
    *(f"{name} {mode}" for name in SHAPES for mode in ("batch", "row", "head")),  # strides, in elements
    *(f"{name} unit" for name in SHAPES),  # that strides of batch and row are multiples of
    *NUMBERS,
)

# Of paged attention. "outer" is the step of a batch entry, or of a page; "chunk" that of 8 elements of a row. Packed
# sequences are two more, for the rows of none.
PAGED_SIZES = (
    *("sequences", "tokens", "most keys", "kv_heads", "group", "head_dim", "head_dim_v"),
    *(f"{name} {mode}" for name in SHAPES for mode in ("outer", "row", "head", "chunk")),
    *("table row", "page shift", "left", "right", "splits", "least rows", "ctas", "part rows", "parts"),
)

# Of new tokens for pages. "token" and "token head" are steps of tokens. A CTA has `width` chunks, of 16 bytes, each of
# `abreast` tokens, and, if `several`, of so many times more as its config has in flight.
WRITE_SIZES = (
    *("tokens", "slots", "slot bytes", "page shift"),
    *(f"{name} {what}" for name in "kv" for what in ("token", "token head", "outer", "row", "head", "chunk")),
    *(f"{name} {what}" for name in "kv" for what in ("columns", "chunks")),
    *("ctas", "chunk groups", "abreast", "width", "several"),
)

# The list of a ragged batch (`fmha.kernels.common.listing`), in int32.
COUNTER, TOTAL, LISTED, FIRST = 0, 1, 2, 4
RECORD = 8


def records_at(sequences: int) -> int:
    """Behind the numbers of the first tiles: those of the sequences, of two for rows of none, and one more."""
    return FIRST + (sequences + 3 + 3) // 4 * 4


def listing_words(sequences: int) -> int:
    return records_at(sequences) + RECORD * (sequences + 2)


class HostNumbers:
    """An array of int64 on the host, and its address. It must live until the call returns."""

    __slots__ = ("address", "numbers")

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = array("q", numbers)
        self.address = self.numbers.buffer_info()[0]


class Sizes(HostNumbers):
    """Those of `SIZES`."""

    __slots__ = ()

    def __init__(self, layouts: Sequence[Layout], *numbers: int, keys: int | None = None) -> None:
        """`layouts` are those of q, k, v and o, `numbers` those that `NUMBERS` names, but for the last ones where k and
        v are not in pages; where they are, `keys` is how many a sequence may have."""
        (batch, seqlen_q, heads, head_dim), (_, seqlen_k, kv_heads, head_dim_v) = layouts[0].shape, layouts[2].shape
        shapes = batch, seqlen_q, seqlen_k if keys is None else keys, heads, kv_heads, head_dim, head_dim_v
        numbers += (0,) * (len(NUMBERS) - len(numbers))
        strides = (stride for layout in layouts for stride in layout.strides[:3])
        units = (layout.unit for layout in layouts)
        super().__init__((*shapes, *strides, *units, *numbers))
        assert len(self.numbers) == len(SIZES), f"the numbers are {', '.join(NUMBERS)}"


class Layout(NamedTuple):
    """Of a tensor [B, S, H, D]."""

    shape: Sequence[int]
    strides: Sequence[int]

    @classmethod
    def of(cls, tensor: Any) -> Layout:
        return cls.padded(tensor.shape, tensor.stride())

    @classmethod
    def padded(cls, shape: Sequence[int], strides: Sequence[int]) -> Layout:
        """One of [S, H, D] is that of a batch of one."""
        if len(shape) == 3:
            return cls((1, *shape), (strides[0], *strides))
        return cls(shape, strides)

    @property
    def unit(self) -> int:
        """What steps of a row and of an entry are multiples of: in these the rows of a ragged batch are counted."""
        return max(1, math.gcd(*self.strides[:2]) if self.shape[0] > 1 else self.strides[1])

    @property
    def units(self) -> int:
        """Up to the end of the last row."""
        batch, rows, *_ = self.shape
        return ((batch - 1) * self.strides[0] + rows * self.strides[1]) // self.unit
