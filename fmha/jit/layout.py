"""Questions about memory layouts: can TMA address this one, and do these two share memory? Strides are in elements."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

ALIGNMENT = 16  # bytes: TMA's, of the base address and of every stride (CUDA driver API, cuTensorMapEncodeTiled)
MAX_STRIDE_BYTES = 1 << 40  # exclusive, likewise
OVERLAP_WORK = 1_000_000  # steps of NumPy's exact search, a fraction of a second


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides; a mode of size 0 counts as 1, as in torch."""
    return tuple(math.prod(max(size, 1) for size in shape[i + 1 :]) for i in range(len(shape)))


def addressable_strides(shape: Sequence[int], strides: Sequence[int], element_bytes: int) -> tuple[int, ...] | None:
    """Strides for the same layout that TMA takes, or None if there are none. The last one is 1.

    A mode of size 1 may have any stride, since it is never stepped along: where TMA would object to it, it becomes the
    row-major one. A stride of 0 in another (from `expand`) is not taken: the kernel has not been proven with one.
    """
    taken = tuple(
        plain if size == 1 and not _takes(stride * element_bytes) else stride
        for size, stride, plain in zip(shape, strides, contiguous_strides(shape), strict=True)
    )
    return taken if all(_takes(stride * element_bytes) for stride in taken[:-1]) else None


def _takes(stride_bytes: int) -> bool:
    return 0 < stride_bytes < MAX_STRIDE_BYTES and stride_bytes % ALIGNMENT == 0


def in_place(tensor: torch.Tensor) -> bool:
    """Whether the kernel runs on `tensor` as it is, neither through a view nor on a copy, wherever it is aligned."""
    return addressable_strides(tensor.shape, tensor.stride(), tensor.element_size()) == tensor.stride()


def aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0


def addressable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values where TMA can read them: `tensor`, a view of it with other strides, or a contiguous copy."""
    strides = addressable_strides(tensor.shape, tensor.stride(), tensor.element_size())
    if strides is None or not aligned(tensor):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor if strides == tensor.stride() else tensor.as_strided(tensor.shape, strides)


def reach(tensor: torch.Tensor) -> int:
    """Bytes from the start of its first to the end of its last element; 0 for an empty tensor."""
    if tensor.numel() == 0:
        return 0
    return tensor.element_size() * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))


def self_overlaps(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two elements of a tensor may share memory: False only if each stride steps past all smaller ones."""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride <= reach:
            return 0 not in shape
        reach += stride * (size - 1)
    return False


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of `a` and one of `b` lie at the same address.

    Exact, also for interleaved views such as the slices of a packed QKV tensor, except that a layout too hard to
    decide counts as shared.
    """
    return _share_memory(_layout(a), _layout(b), b.data_ptr() - a.data_ptr())


Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # shape, strides, bytes of an element


def _layout(tensor: torch.Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), tensor.element_size()


@functools.lru_cache(maxsize=1024)
def _share_memory(a: Layout, b: Layout, distance: int) -> bool:
    """The Diophantine question is NumPy's to answer; it looks at the addresses, never at what is there."""
    base = 1 << 60  # far from 0 on both sides, and from any real array
    try:
        ghosts = _ghost(base, a), _ghost(base + distance, b)
        return np.shares_memory(*ghosts, max_work=OVERLAP_WORK)  # type: ignore[arg-type]  # the stub knows only -1 and 0
    except np.exceptions.TooHardError:
        return True


def _ghost(address: int, layout: Layout) -> np.ndarray:
    """An array with this layout at an address that is never read."""
    shape, strides, element_bytes = layout
    interface = {
        "version": 3,
        "shape": shape,
        "strides": tuple(stride * element_bytes for stride in strides),
        "typestr": f"|V{element_bytes}",
        "data": (address, True),
    }
    return np.asarray(type("Ghost", (), {"__array_interface__": interface})())
