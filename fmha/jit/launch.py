"""From tensors to a running kernel: plans, which hold all of a call that its data pointers do not decide.

A call looks its plan up by shapes, strides, dtypes, devices and options, so only a call with new ones is validated.
The launch itself is one TVM-FFI call, which takes numbers only: addresses, a stream, and where sizes and strides are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmha.jit import layout
from fmha.jit.arguments import Layout, Sizes, listing_words
from fmha.jit.counter import LAUNCHING, current
from fmha.jit.layout import ALIGNMENT
from fmha.problem import Problem

MAX_PLANS = 4096  # a serving loop with a new length in every call must not grow for ever


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call gives back: an output like q, contiguous unless the caller brings one, and the LSE if asked for."""

    shape: tuple[int, ...]  # [B, Sq, Hq, D], D of v, or packed [Tq, Hq, D]
    device: torch.device
    return_lse: bool
    row_major: bool  # q is, in every mode, and of that shape: a size of 1 makes torch call odd strides contiguous
    reach: tuple[int, ...]  # bytes from the first to the last element of q, k, v and the caller's `out`

    def new_output(self, q: Tensor) -> Tensor:
        if self.row_major:
            return torch.empty_like(q)  # faster without the format
        return q.new_empty(self.shape)

    def new_lse(self) -> Tensor:
        *batch, seqlen_q, heads, _ = self.shape
        return torch.empty((*batch, heads, seqlen_q), dtype=torch.float32, device=self.device)

    def refuse_overlap(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, names: Sequence[str] = "qkv") -> None:
        """ValueError if `out` shares memory with an input, which would be overwritten before it is read."""
        start = out.data_ptr()
        end = start + self.reach[3]
        for name, tensor, reach in zip(names, (q, k, v), self.reach, strict=False):
            at = tensor.data_ptr()
            if at < end and start < at + reach and layout.share_memory(tensor, out):
                inputs = f"{names[0]}, {names[1]} or {names[2]}"
                raise ValueError(f"out overlaps {name} in memory; it may share no element with {inputs}")


Lengths = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""cu_seqlens_q and _k, seqused_q and _k, int32."""

NO_LENGTHS: Lengths = (None, None, None, None)


def address(tensor: Tensor | None) -> int:
    """0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """The plan of a call that a kernel answers."""

    answer: Answer
    function: Callable[..., None]
    scale_log2: float
    cap_factor: float
    work_tiles: int
    numbers: tuple[int, ...]  # `fmha.jit.arguments.NUMBERS`
    sizes: Sizes  # where all tensors are used as they are, and outputs that the caller does not bring are contiguous
    inputs_in_place: bool  # the kernel can address q, k and v as they are, wherever they are aligned
    out_in_place: bool  # and the caller's `out`
    listing_words: int = 0  # of the list of a ragged batch's sequences, int32
    keys: int | None = None  # that a sequence may have, where k and v are in pages

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        lengths: Lengths = NO_LENGTHS,
    ) -> Tensor | tuple[Tensor, Tensor]:
        answer = self.answer
        device = answer.device
        if device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(q, k, v, out, sinks, slopes, lengths)
        if out is not None:
            answer.refuse_overlap(q, k, v, out)
        sizes: Sizes | None = self.sizes
        q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if not self.inputs_in_place or (q_at | k_at | v_at) % ALIGNMENT:
            q, k, v = layout.addressable(q), layout.addressable(k), layout.addressable(v)
            q_at, k_at, v_at = q.data_ptr(), k.data_ptr(), v.data_ptr()
            sizes = None
        if out is None or not self.out_in_place:
            o = answer.new_output(q)
        elif layout.aligned(out):
            o = out
        else:
            o = answer.new_output(q)
            sizes = None
        if sizes is None:
            sizes = Sizes([Layout.of(x) for x in (q, k, v, o)], *self.numbers, keys=self.keys)
        lse = answer.new_lse() if answer.return_lse else None
        sinks = None if sinks is None else sinks.contiguous()
        slopes = None if slopes is None else slopes.contiguous()
        tensors = sizes.address, q_at, k_at, v_at, o.data_ptr(), address(lse), address(sinks), address(slopes)
        factors = self.scale_log2, self.cap_factor
        if self.listing_words:
            listing = torch.empty(self.listing_words, dtype=torch.int32, device=device)
            kept = [None if x is None else x.contiguous() for x in lengths]
            stream = torch._C._cuda_getCurrentRawStream(device.index)
            self.function(*tensors, *factors, listing.data_ptr(), 0, stream, *map(address, kept))
        else:
            with LAUNCHING:
                counter = current(device)
                self.function(*tensors, *factors, counter.address, counter.base, counter.stream, 0, 0, 0, 0)
                counter.advance(self.work_tiles)
        if out is not None and out is not o:
            o = out.copy_(o)
        return o if lse is None else (o, lse)


@dataclass(frozen=True, slots=True, eq=False)
class Blank:
    """The plan of a call without a query, or without a key to see: the output is 0, and the LSE minus infinity, or the
    sink of those queries that there are."""

    answer: Answer
    ragged: bool = False  # then there is no query, or no sequence: rows of none have no sink

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        lengths: Lengths = NO_LENGTHS,
    ) -> Tensor | tuple[Tensor, Tensor]:
        answer = self.answer
        if out is not None:
            answer.refuse_overlap(q, k, v, out)
        o = (answer.new_output(q) if out is None else out).zero_()
        if not answer.return_lse:
            return o
        lse = answer.new_lse()
        return o, lse.fill_(-torch.inf) if sinks is None or self.ragged else lse.copy_(sinks[:, None].expand_as(lse))


Plan = Launch | Blank

PLANS: dict[Hashable, Callable[..., Any]] = {}  # those of paged calls are `fmha.paged.PagedLaunch`


def remember(signature: Hashable, plan: Callable[..., Any]) -> None:
    """Keeps a plan. When there are too many all are dropped: making one takes microseconds, ranking them would too."""
    if len(PLANS) >= MAX_PLANS:
        PLANS.clear()
    PLANS[signature] = plan


@dataclass(frozen=True)
class Device:
    """What planning asks of a device: its architecture, such as "sm_90a" or "cpu", and its sizes."""

    arch: str
    l2_bytes: int = 0
    multiprocessors: int = 0


@functools.cache
def describe_device(device: torch.device) -> Device:
    """`device` must have an index if it is a CUDA device, as that of a tensor has."""
    if device.type != "cuda" or torch.version.cuda is None:  # torch calls AMD's devices cuda, too
        return Device(device.type)
    properties = torch.cuda.get_device_properties(device)
    suffix = "a" if properties.major >= 9 else ""
    return Device(
        f"sm_{properties.major}{properties.minor}{suffix}", properties.L2_cache_size, properties.multi_processor_count
    )


def current_architecture() -> str | None:
    """That of the current CUDA device, None if there is none."""
    if not torch.cuda.is_available():
        return None
    return describe_device(torch.device("cuda", torch.cuda.current_device())).arch


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is capturing the current stream of `device`."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def touch(function: Callable[..., None], problem: Problem) -> None:
    """Launches a kernel for one query and one key on the current device: the driver loads its code at the first launch,
    which must not be one that a CUDA graph captures."""
    device = torch.device("cuda", torch.cuda.current_device())
    dims = problem.head_dim, problem.head_dim, problem.value_dim, problem.value_dim
    tensors = [torch.zeros((1, 1, 1, dim), dtype=getattr(torch, problem.dtype), device=device) for dim in dims]
    sizes = Sizes([Layout.of(tensor) for tensor in tensors], 1, 1, 0, 0, 0, 1, 0, 1, 1)
    slopes = torch.zeros(1, device=device)
    stream = torch.cuda.current_stream(device).cuda_stream
    room = torch.zeros(listing_words(1), dtype=torch.int32, device=device)
    addresses = (tensor.data_ptr() for tensor in tensors)
    vectors = 0, slopes.data_ptr()
    taken = room.data_ptr(), 0
    zero = torch.zeros(1, dtype=torch.int32, device=device).data_ptr()
    lengths = (0, zero, 0, zero) if problem.paged else (0, 0, 0, 0)  # a page table, and no key
    function(sizes.address, *addresses, 0, *vectors, 1.0, 1.0, *taken, stream, *lengths)


def from_dlpack(name: str, array: Any) -> Tensor:
    """Argument `name` as a torch tensor over the same memory. TypeError if torch cannot take it through DLPack."""
    if isinstance(array, Tensor):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(
            f"{name} is a {type(array).__name__}; a torch tensor or another array with __dlpack__ is needed"
        )
    try:
        return torch.from_dlpack(array)
    except Exception as error:  # producers raise what they like
        raise TypeError(f"{name} is a {type(array).__name__} that torch.from_dlpack does not take: {error}") from error


def to_library_of(array: Any, tensor: Tensor) -> Any:
    """`tensor` as an array of the library that `array` comes from, if its array namespace has from_dlpack."""
    if isinstance(array, Tensor) or not hasattr(array, "__array_namespace__"):
        return tensor
    convert = getattr(array.__array_namespace__(), "from_dlpack", None)
    return tensor if convert is None else convert(tensor)
