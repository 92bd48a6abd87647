"""What the forward kernels have in common: their arguments and launch, who loads, and where work tiles come from."""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as helpers
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum

from fmha.jit.arguments import NUMBERS, SHAPES, SIZES, STRIDE_ELEMENTS
from fmha.kernels.common import numbers
from fmha.kernels.common.listing import THREADS, Lengths, List
from fmha.kernels.common.rings import RaggedCopy
from schedules.domain import DOMAINS, Bounds, Visits
from schedules.forward import Load
from schedules.scores import SCORES
from schedules.tiling import TiledConfig
from schedules.work import RaggedWork, Work, work_of

LN2 = math.log(2.0)


LOG2_E = math.log2(math.e)


# Of Q, K, V and O: how many rows a ragged work tile has, and where they end.
EXTENTS = (
    lambda work: (work.seqlen_q, work.start_q + work.seqlen_q),
    *[lambda work: (work.seqlen_k, work.start_k + work.seqlen_k)] * 2,
    lambda work: (work.rows, work.start_q + work.rows),
)


class TmaLoad(Load):
    """The producer warp."""

    def __init__(self, rings, lends, domain, grid) -> None:
        self.q, self.k, self.v = rings  # q: a ring for each warpgroup
        self.lends = lends
        self.domain, self.grid = domain, grid
        self.lane = cute.arch.lane_idx()

    def first_work(self) -> Work | RaggedWork:
        return self.grid.first()

    @cute.jit
    def ask(self):
        asked = Int32(0)
        if self.lane == 0:
            asked = self.grid.count()
        return asked

    def next_work(self, asked: Int32) -> Work | RaggedWork:
        return self.grid.work_taken(cute.arch.shuffle_sync(asked, 0))

    def visits(self, work: Work | RaggedWork) -> Visits:
        return uniform(self.domain.visits(work.q_tile, self.grid.bounds(work)))

    def tile(self, visits: Visits, position: int) -> int:
        return self.domain.tile(visits, position)


class Grid:
    """The work tiles of a batch of equal sequences. The integer at address `counter` counts those taken, from `base`
    on."""

    def __init__(self, shape, bounds: Bounds, counter: Int64, base: Int32) -> None:
        self.shape = shape  # (q_tiles, heads, batches, group)
        self.whole = bounds
        self.counter, self.base = counter, base

    def bounds(self, work: Work) -> Bounds:
        return self.whole

    def first(self) -> Work:
        return work_of(cute.arch.block_idx()[0], *self.shape)

    def count(self) -> Int32:
        counter = cute.make_ptr(Int32, self.counter, cute.AddressSpace.gmem, assumed_align=4)
        return Int32(cute.arch.atomic_add(counter.llvm_ptr, Int32(1)))

    def work_taken(self, taken: Int32) -> Work:
        return work_of(cute.arch.grid_dim()[0] + (taken - self.base), *self.shape)


def uniform(visits: Visits) -> Visits:
    """In uniform registers: they are live over all loops, and are not worked out anew for every tile."""
    return Visits(*(n if isinstance(n, int) else cute.arch.make_warp_uniform(n) for n in visits))


class Logits:
    """The run-time numbers that scores, and a row's sum of weights, depend on."""

    def __init__(self, scale_log2, cap_factor, sinks: Int64, slopes: Int64, heads: Int32, slopes_batch: Int32) -> None:
        self.scale_log2 = scale_log2
        self.cap_factor = cap_factor
        self.cap_linear = scale_log2 * cap_factor
        self.cap_cubic = self.cap_linear * cap_factor * cap_factor * -numbers.CUBIC
        self.least_slope = self.cap_linear * (1 - numbers.CUBIC * numbers.SMALL * numbers.SMALL)
        self.sinks = sinks
        self.slopes = slopes
        self.heads = heads
        self.slopes_batch = slopes_batch  # from a batch entry to the next, in elements

    @cute.jit
    def sink(self, work: Work) -> Float32:
        """The head's, log2; minus infinity where there is none."""
        found = Float32(-Float32.inf)
        if self.sinks != 0 and work.valid != 0:
            found = self.read(self.sinks, work.head)
        return found * LOG2_E

    @cute.jit
    def slope(self, work: Work) -> Float32:
        found = Float32(0.0)
        if work.valid != 0:
            found = self.read(self.slopes, work.batch * self.slopes_batch + work.head)
        return found * LOG2_E / self.scale_log2

    def read(self, address: Int64, index: Int32) -> Float32:
        numbers = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4)
        return cute.make_tensor(numbers + index, cute.make_layout(1))[0]


class Whole(NamedTuple):
    """Sizes of the tensors q and k."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, q: cute.Tensor, k: cute.Tensor) -> Whole:
        """From (S, D, H, B)."""
        (rows, _, heads, batch), (keys, _, kv_heads, _) = q.shape, k.shape
        return cls(batch, rows, keys, heads, kv_heads)


def _piece(layout, keys: int, count: int):
    """Of a tile in shared memory, `count` keys, which are mode `keys`: rows of a swizzle's width follow one another."""
    outer = layout.outer
    shape, stride = list(outer.shape), list(outer.stride)
    shape[keys], stride[keys] = count, outer.stride[keys][0]
    piece = cute.make_layout(tuple(shape), stride=tuple(stride))
    return cute.make_composed_layout(layout.inner, layout.offset, piece)


class ForwardLaunch:
    """What a forward kernel is made from, its arguments and its launch. `kernel` is the architecture's own.

    sizes                    the address on the host of `fmha.jit.arguments.SIZES`, an int64 each
    q, o    [B, Sq, Hq, D]   16-bit, by address; any strides whose last is 1 and whose others are multiples of 16 bytes
    k, v    [B, Sk, Hkv, D]  likewise
    lse                      the address of a contiguous [B, Hq, Sq] of float32, natural logarithm; 0 for none. Kernels
                             with columns of ones write none: their row sums are of rounded weights
    sinks                    the address of a contiguous [Hq] of float32: logits beside each row's scores; 0 for none
    slopes                   the address of a contiguous [B, Hq] of float32, or of [Hq] where "slopes batch" is 0, for
                             kernels with ALiBi
    scale_log2               what makes a score of q k^T, or of the cap's tanh, one of base 2
    cap_factor               what q k^T is multiplied by before that tanh, for kernels with a softcap
    counter                  the address of an int32 that is `base` when the kernel starts and grows by the work tiles;
                             in a ragged batch, of room for the list of its sequences
    lengths                  in a ragged batch, the addresses of cu_seqlens_q and _k and of seqused_q and _k, contiguous
                             int32, or 0

    The CTAs, one a multiprocessor, compute work tiles of `tile_m` queries of one head until a counter says that there
    are no more. Batch, lengths, head counts, strides, scale and the width of the last tile are run-time values; a head
    dim below that of the tile is filled up with zeros by TMA and clipped when O is stored.
    """

    q_rows: int  # of Q that TMA copies at a time, and of O

    def __init__(
        self,
        dtype: type[cutlass.Numeric],
        mask: str,
        score: str,
        ragged: bool,
        config: TiledConfig,
        paged: int = 0,
    ) -> None:
        self.paged = paged
        self.dtype = dtype
        self.score = SCORES[score]
        self.ragged = ragged
        self.config = config
        self.domain = DOMAINS[mask](config.tile_m, config.tile_n, nearest_first=self.score.alibi)
        self.work = RaggedWork if ragged else Work

    def mmas(self) -> tuple:
        """What the kernel is given of its MMAs."""
        return ()

    def _arguments(self, sizes: Int64, addresses) -> tuple[list[cute.Tensor], list, Whole, list[Int32]]:
        """Tensors (S, D, H, B) at their addresses, the units of ragged ones, their sizes, and the numbers that lie
        behind on the host."""
        at = cute.make_ptr(Int64, sizes, cute.AddressSpace.generic, assumed_align=8)
        numbers = cute.make_tensor(at, cute.make_layout(len(SIZES)))
        found = {name: numbers[i] for i, name in enumerate(SIZES)}
        tensors, units = [], []
        for name, address in zip("qkvo", addresses, strict=True):
            shape = [Int32(found[size]) for size in SHAPES[name]]
            strides = [cute.assume(found[f"{name} {mode}"], divby=STRIDE_ELEMENTS) for mode in ("batch", "row", "head")]
            batch, rows, heads, dims = shape
            if self.paged and name in "kv":
                batch, rows = Int32(found["pages"]), Int32(found["page"])
            by_batch, by_row, by_head = strides
            layout = cute.make_layout((rows, dims, heads, batch), stride=(by_row, 1, by_head, by_batch))
            if self.ragged:
                unit = cute.assume(found[f"{name} unit"], divby=STRIDE_ELEMENTS)
                of_row, of_entry = Int32(by_row // unit), Int32(by_batch // unit)
                shape = RaggedCopy.ROWS, dims, (batch - 1) * of_entry + rows * of_row + 1, RaggedCopy.ROWS + 1, heads
                wrap = cute.assume(RaggedCopy.WRAP - by_row, divby=STRIDE_ELEMENTS)
                layout = cute.make_layout(shape, stride=(by_row, 1, unit, wrap, by_head))
                units.append((of_row, of_entry))
            pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
            tensors.append(cute.make_tensor(pointer, layout))
        whole = Whole(*(Int32(found[name]) for name in Whole._fields))
        return tensors, units, whole, [Int32(found[name]) for name in NUMBERS]

    @cute.jit
    def __call__(
        self,
        sizes: Int64,
        q: Int64,
        k: Int64,
        v: Int64,
        o: Int64,
        lse: Int64,
        sinks: Int64,
        slopes: Int64,
        scale_log2: Float32,
        cap_factor: Float32,
        counter: Int64,
        base: Int32,
        stream,
        cu_seqlens_q: Int64,
        cu_seqlens_k: Int64,
        seqused_q: Int64,
        seqused_k: Int64,
    ):
        config = self.config
        rows, keys, dims, value_dims = self.q_rows, config.tile_n, config.head_dim, config.value_dim
        (q, k, v, o), units, whole, numbers = self._arguments(sizes, (q, k, v, o))
        head_group, multiprocessors, left, right, slopes_batch, sequences, packed, _, _, *paging, least = numbers
        v = cute.make_tensor(v.iterator, cute.select(v.layout, mode=[1, 0, *range(2, cute.rank(v))]))
        by_rows, by_columns = LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR
        layouts = (  # of one slot of Q, K, V and O
            helpers.make_smem_layout_a(by_rows, (rows, keys, dims), self.dtype, 1),
            helpers.make_smem_layout_b(by_rows, (rows, keys, dims), self.dtype, 1),
            helpers.make_smem_layout_b(by_columns, (rows, value_dims, keys), self.dtype, 1),
            helpers.make_smem_layout_a(by_rows, (rows, keys, value_dims), self.dtype, 1),
        )

        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        tiles = (rows, dims), (keys, dims), (value_dims, keys), (rows, value_dims)
        shared = [cute.slice_(layout, (None, None, 0)) for layout in layouts]
        if const_expr(self.paged):
            tiles = tiles[0], (self.paged, dims), (value_dims, self.paged), tiles[3]
            shared = [shared[0], _piece(shared[1], 0, self.paged), _piece(shared[2], 1, self.paged), shared[3]]
        copies = [
            cpasync.make_tiled_tma_atom(way, tensor, layout, tile)
            for way, tensor, layout, tile in zip((load, load, load, save), (q, k, v, o), shared, tiles, strict=True)
        ]
        atoms, tensors = zip(*copies, strict=True)

        q_tiles = cute.ceil_div(whole.seqlen_q, config.tile_m) * whole.batch
        if const_expr(self.ragged):
            q_tiles = q_tiles + packed * (sequences + 2)  # at most
            starts_k = Int64(0) if const_expr(self.paged) else cu_seqlens_k
            self.list_sequences(
                (cu_seqlens_q, starts_k, seqused_q, seqused_k),
                (sequences, whole.seqlen_q, whole.seqlen_k, head_group, q_tiles, least),
                counter,
                packed,
            ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)
        self.kernel(
            atoms,
            tensors,
            layouts,
            units,
            whole if const_expr(self.ragged) else (),
            (cu_seqlens_k, paging[1], paging[0]) if const_expr(self.paged) else (),
            self.mmas(),
            lse,
            (scale_log2, cap_factor, sinks, slopes, whole.heads, slopes_batch),
            sequences if const_expr(self.ragged) else head_group,
            (left, right),
            counter,
            base,
        ).launch(
            grid=(cutlass.min(q_tiles * whole.heads, multiprocessors), 1, 1),
            block=(config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def list_sequences(self, addresses, sizes, listing: Int64, packed: Int32):
        List(Lengths(addresses, *sizes, self.config.tile_m), listing, packed).make()
