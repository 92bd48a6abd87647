"""Long sequences of queries over a paged KV cache: those get the forward kernel, which reads pages through TMA.

A query tile of it has 128 queries or so of one head, and its K and V come from L2 as often as there are tiles; the
kernel for decoding has 64 rows, of all heads that share K and V, and splits the keys. So from `LEAST_ROWS` queries on a
sequence is this one's. Both run where a packed batch may have sequences of either kind, and each leaves the other's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fmha.attention import MAX_RAGGED, MAX_SEQUENCES, kernel_function
from fmha.checks import MAX_SIZE
from fmha.jit import launch, layout
from fmha.jit.arguments import Layout, Sizes, listing_words
from fmha.jit.library import pick
from fmha.paging import Pages
from fmha.problem import PIECES, PagedProblem, Problem, Variant, supports
from schedules.domain import Bounds, mask_of
from schedules.splits import UNLIMITED
from schedules.tiling import Extent
from schedules.work import keys_in_l2

LEAST_ROWS = 128  # queries: an estimate of where the kernels are as fast, for one sequence of 16k keys; not measured
LEAST_PAGE = min(PIECES)  # slots
LONG = 4096  # of everything, for a kernel that does not depend on the batch


@dataclass(frozen=True, slots=True, eq=False)
class Prefill:
    """The launch of the forward kernel, beside that of the kernel for decoding or alone."""

    function: Callable[..., None]
    sizes: Sizes
    copied: Sizes  # where q and the output are contiguous
    words: int  # of the list of sequences

    def __call__(self, addresses: tuple[int, ...], factors: tuple[float, float], vectors: tuple[int, ...]) -> None:
        """On the current stream. `addresses` are those of q, K, V, the output, LSEs and sinks, `vectors` those of
        cu_seqlens_q, the page table and the lengths."""
        device = torch.cuda.current_device()
        listing = torch.empty(self.words, dtype=torch.int32, device=torch.device("cuda", device))
        stream = torch._C._cuda_getCurrentRawStream(device)
        starts, table, lengths = vectors
        taken = listing.data_ptr(), 0, stream
        self.function(*addresses, 0, *factors, *taken, starts, table, 0, lengths)


class Call(NamedTuple):
    """What of a call decides whether the forward kernel takes it, and which one."""

    tokens: int  # of all sequences where they are packed, else of each
    most_keys: int
    heads: int
    sequences: int
    packed: bool
    page: int
    causal: bool
    window: tuple[int | None, int | None]
    lse: bool
    invariant: bool = False  # the kernel must be the same whatever else is in the batch

    def variant(self, problem: PagedProblem, arch: str, multiprocessors: int) -> Variant | None:
        """The kernel, or None where the one for decoding takes all of it."""
        if self.tokens < LEAST_ROWS or self.most_keys < 1 or self.page < LEAST_PAGE or problem.layout != "rows":
            return None
        mask, bounds = self.mask()
        dims = problem.head_dim, mask, problem.score, problem.head_dim_v
        long = Problem(problem.dtype, *dims, ragged=True, paged=LEAST_PAGE)
        if supports(long, arch):
            return None
        about = max(1, self.tokens // self.sequences) if self.packed else self.tokens
        sizes = about, self.most_keys, self.sequences * self.heads
        sizes = (LONG, LONG, LONG) if self.invariant else sizes
        extent = Extent(mask, *sizes, multiprocessors, self.lse, bounds.left, bounds.right)
        config = pick(long, arch, extent).config
        piece = max(piece for piece in PIECES if self.page >= piece and config.takes(piece))
        return Variant(replace(long, paged=piece), config)

    def mask(self) -> tuple[str, Bounds]:
        sizes = (UNLIMITED, UNLIMITED) if self.invariant else (self.tokens, self.most_keys)
        return mask_of(self.causal, self.window, *sizes)


def plan(
    problem: PagedProblem,
    q: Tensor,
    pages: tuple[Pages, Pages],
    table: Tensor,
    options: tuple[bool, tuple[int | None, int | None], bool, bool],
    strides: tuple[tuple[int, ...] | None, tuple[int, ...] | None],
    packed: bool,
) -> Prefill | None:
    """The plan where a sequence may have `LEAST_ROWS` queries and the kernel takes the pages, else None. `options`
    are causal, the window, whether LSEs are wanted, and whether the kernel must not depend on the batch; `strides`
    those of q and the output, None for contiguous ones."""
    k, v = pages
    (*batch, tokens, heads, _), sequences = q.shape, table.shape[0]
    if k.pages == 0 or (not packed and len(batch) == 0):
        return None
    most_keys = table.shape[1] * k.page
    call = Call(tokens, most_keys, heads, sequences, packed, k.page, *options)
    device = launch.describe_device(q.device)
    variant = call.variant(problem, device.arch, device.multiprocessors)
    if variant is None:
        return None
    config, (mask, bounds) = variant.config, call.mask()
    shapes = [(p.pages, p.page, p.heads, p.dims) for p in pages]
    layouts = [Layout(shape, (p.outer, p.row, p.head, 1)) for shape, p in zip(shapes, pages, strict=True)]
    o_shape = (*q.shape[:-1], v.dims)

    def around(q_strides: tuple[int, ...] | None, o_strides: tuple[int, ...] | None) -> list[Layout]:
        ends = [
            Layout.padded(shape, layout.contiguous_strides(shape) if strides is None else strides)
            for shape, strides in ((q.shape, q_strides), (o_shape, o_strides))
        ]
        return [ends[0], *layouts, ends[1]]

    kv_bytes_per_key = q.element_size() * k.heads * (k.dims + v.dims) // heads
    q_tiles = -(-tokens // config.tile_m) * (1 if packed else sequences) + packed * (sequences + 2)
    fits = (
        sequences <= MAX_SEQUENCES
        and max(tokens, most_keys) <= MAX_RAGGED
        and max(each.units for each in around(*strides)) <= MAX_SIZE
        and q_tiles * heads <= MAX_SIZE
        and all(
            0 < s and s % 8 == 0
            for each in layouts
            for s, n in zip(each.strides, each.shape[:3], strict=False)
            if n > 1
        )
    )
    if not fits:
        return None
    group = keys_in_l2(mask == "causal", kv_bytes_per_key, device.l2_bytes)
    numbers = (
        *(group, device.multiprocessors, bounds.left, bounds.right, 0, sequences, int(packed)),
        *(k.pages, k.page, k.page.bit_length() - 1, table.stride(0) if sequences > 1 else 0),
        LEAST_ROWS if packed else 0,
    )
    return Prefill(
        kernel_function(variant.problem, config, device.arch, q.device),
        Sizes(around(*strides), *numbers, keys=most_keys),
        Sizes(around(None, None), *numbers, keys=most_keys),
        listing_words(sequences),
    )
