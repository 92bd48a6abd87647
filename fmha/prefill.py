"""Long sequences of queries over a paged KV cache: those get the forward kernel, which reads pages through TMA.

A query tile of it has 128 queries or so of one head, and its K and V come from L2 as often as there are tiles; the
kernel for decoding has 64 rows, of all heads that share K and V, and splits the keys. So from `LEAST_ROWS` queries on a
sequence is this one's. Both run where a packed batch may have sequences of either kind, and each leaves the other's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fmha.attention import MAX_RAGGED, MAX_SEQUENCES, kernel_function
from fmha.checks import MAX_SIZE
from fmha.jit import launch, layout
from fmha.jit.arguments import Layout, Sizes, listing_words
from fmha.jit.library import pick
from fmha.paging import Pages
from fmha.problem import PagedProblem, Problem, supports
from schedules.domain import mask_of
from schedules.tiling import Extent
from schedules.work import keys_in_l2

LEAST_ROWS = 128  # queries: where 16k keys of one sequence take either kernel 110 us
LEAST_PAGE = 16  # slots: the rows of a piece that TMA copies


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


def plan(
    problem: PagedProblem,
    q: Tensor,
    pages: tuple[Pages, Pages],
    table: Tensor,
    options: tuple[bool, tuple[int | None, int | None], bool],
    strides: tuple[tuple[int, ...] | None, tuple[int, ...] | None],
    packed: bool,
) -> Prefill | None:
    """The plan where a sequence may have `LEAST_ROWS` queries and the kernel takes the pages, else None. `options` are
    causal, the window, and whether LSEs are wanted; `strides` those of q and the output, None for contiguous ones."""
    k, v = pages
    causal, window, lse = options
    (*batch, tokens, heads, head_dim), sequences = q.shape, table.shape[0]
    if not packed and len(batch) == 0:
        return None
    most_keys = table.shape[1] * k.page
    if tokens < LEAST_ROWS or k.page < LEAST_PAGE or problem.layout != "rows":
        return None
    mask, bounds = mask_of(causal, window, tokens, most_keys)
    long = Problem(problem.dtype, head_dim, mask, problem.score, problem.head_dim_v, ragged=True, paged=True)
    device = launch.describe_device(q.device)
    if supports(long, device.arch):
        return None
    shapes = [(p.pages, p.page, p.heads, p.dims) for p in pages]
    layouts = [Layout(shape, (p.outer, p.row, p.head, 1)) for shape, p in zip(shapes, pages, strict=True)]
    o_shape = (*q.shape[:-1], v.dims)

    def around(q_strides: tuple[int, ...] | None, o_strides: tuple[int, ...] | None) -> list[Layout]:
        ends = [
            Layout.padded(shape, layout.contiguous_strides(shape) if strides is None else strides)
            for shape, strides in ((q.shape, q_strides), (o_shape, o_strides))
        ]
        return [ends[0], *layouts, ends[1]]

    about = max(1, tokens // sequences) if packed else tokens
    many = sequences * heads, device.multiprocessors
    config = pick(long, device.arch, Extent(mask, about, most_keys, *many, lse, bounds.left, bounds.right)).config
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
        kernel_function(long, config, device.arch, q.device),
        Sizes(around(*strides), *numbers, keys=most_keys),
        Sizes(around(None, None), *numbers, keys=most_keys),
        listing_words(sequences),
    )
