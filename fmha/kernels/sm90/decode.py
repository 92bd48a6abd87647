"""Paged attention of a few queries on Hopper: the roles of `schedules.decode` lowered onto cp.async and wgmma. Its
arguments are those of `DecodeLaunch`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from fmha.kernels.common import numbers
from fmha.kernels.common.decode import DecodeLaunch, Leaving, Outputs, PagedFetch, Parts
from fmha.kernels.common.forward import Logits
from fmha.kernels.common.paged import VALUE_SWIZZLE, ColumnRing, Pages, Place, RowRing, SplitRing, WarpSplitter
from fmha.kernels.sm90 import softmax, wgmma
from fmha.kernels.sm90.barriers import PingPong
from fmha.kernels.sm90.forward import WgmmaAttend, mma_shapes
from schedules.decode import Decode
from schedules.splits import Place as Kept
from schedules.splits import Split
from schedules.tiling import ELEMENT_BYTES, WARPGROUP

WARPS = WARPGROUP // 32


class WgmmaDecode(Leaving, Decode, WgmmaAttend):
    """The consumer warpgroup. A thread has rows of several queries and heads."""

    def __init__(self, kernel, rings, operands, splitter, logits, outputs, parts) -> None:
        turn = PingPong(Int32(0), 1)
        WgmmaAttend.__init__(self, kernel, rings, turn, operands, None, splitter, logits, Int32(0))
        self.set_out(kernel, splitter, logits, outputs, parts)
        self.sinks = cute.make_rmem_tensor(softmax.ROWS, Float32)  # log2

    def local(self, r: int) -> Int32:
        """Row `r` of this thread in its Q tile."""
        return (self.thread // 32) * 16 + self.lane // 4 + 8 * r

    def packed(self, split: Split, r: int) -> tuple[Int32, Int32]:
        return self.packed_row(split, self.local(r))

    def row(self, split: Split, r: int) -> Int32:
        return self.packed(split, r)[0]

    def take_up(self, split: Split) -> None:
        for r in range(softmax.ROWS):
            self.sinks[r] = self.sink_of(self.packed(split, r)[1])

    @cute.jit
    def write(self, split: Split):
        for r in cutlass.range_constexpr(softmax.ROWS):
            query, head = self.packed(split, r)
            total = self.total(r)
            factor, lse = self.outputs.finish(split, query, total, self.reference[r], self.sinks[r], self.splitter)
            if query < split.rows:
                self.write_row(split, r, query, head, factor)
            if query < split.rows and self.lane % 4 == 0:
                self.outputs.store_lse(split, query, head, lse)

    def write_row(self, split: Split, r: int, query: Int32, head: Int32, factor: Float32) -> None:
        for at, column in self.pairs(r):
            words = [numbers.pack_16bit(self.o[at] * factor, self.o[at + 1] * factor, self.kernel.dtype)]
            self.outputs.store(split, query, head, column, words)

    def pairs(self, r: int) -> list[tuple[int, Int32]]:
        """Of O: two elements of a row of this thread, and their columns."""
        count = self.kernel.config.value_dim // 8
        return [(softmax.element(r, 2 * i), 8 * i + 2 * (self.lane % 4)) for i in range(count)]

    @cute.jit
    def write_part(self, split: Split, place: Kept):
        for r in cutlass.range_constexpr(softmax.ROWS):
            total = self.total(r)
            if self.local(r) < self.parts.rows:
                self.write_part_row(place, r)
            if self.local(r) < self.parts.rows and self.lane % 4 == 0:
                self.parts.store_sum(place.own, self.local(r), total, self.reference[r])

    def write_part_row(self, place: Kept, r: int) -> None:
        for at, column in self.pairs(r):
            self.parts.store(place.own, self.local(r), column, [self.o[at], self.o[at + 1]])


class DecodeKernel(DecodeLaunch):
    """Compiles to one cubin for (dtype, score, layout, block config)."""

    def mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        return mma_shapes(self.dtype, self.config)

    @cute.kernel
    def kernel(self, places, mmas, sizes, table, lengths, logits, lse: Int64, parts):
        self.qk, self.pv = mmas
        config = self.config
        q, k, v, o = (Place(*place) for place in places)
        allocator = SmemAllocator()
        barriers = allocator.allocate_array(cutlass.Int64, config.barriers)
        posted = allocator.allocate_tensor(Int32, cute.make_layout((len(Split._fields), config.q_stages)), 16)
        arrived = allocator.allocate_tensor(Int32, cute.make_layout(1), 16)
        sq, sk, sv = self._shared_memory(allocator)

        splitter = WarpSplitter(self.domain, config.tile_m, sizes, *lengths)
        heads = splitter.heads * splitter.group
        pages = Pages(config.tile_n, *table, self.by_columns)
        k_barriers = barriers + 2 * config.q_stages
        value_ring = ColumnRing if self.by_columns else RowRing
        rings = (
            SplitRing(barriers, config, sq, q, posted, splitter.group),
            RowRing(k_barriers, config, config.head_dim, sk, k, pages),
            value_ring(k_barriers + 2 * config.stages, config, config.value_dim, sv, v, pages),
        )
        k_and_v = self._operands(sk, sv)
        operands = (wgmma.along_k(sq, config.tile_m, config.head_dim), *k_and_v)
        decode = WgmmaDecode(
            self,
            rings,
            operands,
            splitter,
            Logits(*logits, Int64(0), heads, Int32(0)),
            Outputs(o, lse, heads, splitter.tokens, self.domain),
            Parts(*parts, config.value_dim, arrived),
        )
        Cta(rings, PagedFetch(rings, splitter, pages), decode).run()

    def _operands(self, sk: cute.Pointer, sv: cute.Pointer) -> tuple[wgmma.Operand, wgmma.Operand]:
        config = self.config
        if self.by_columns:
            k = wgmma.in_blocks(sk, config.tile_n, config.head_dim, 16)
            return k, wgmma.in_blocks(sv, config.value_dim, config.tile_n, VALUE_SWIZZLE)
        k = wgmma.along_k(sk, config.tile_n, config.head_dim)
        return k, wgmma.across_k(sv, config.tile_n, config.value_slots)

    def _shared_memory(self, allocator: SmemAllocator) -> tuple[cute.Pointer, cute.Pointer, cute.Pointer]:
        """Where the slots of Q, K and V begin."""
        config = self.config
        row = config.head_dim * ELEMENT_BYTES
        sizes = (
            config.q_stages * config.tile_m * row,
            config.stages * config.tile_n * row,
            config.value_slots.bytes,
        )
        return tuple(allocator.allocate(size, 1024) for size in sizes)


class Cta:
    """The roles of one CTA: warpgroup 0 fetches, the other one decodes."""

    def __init__(self, rings, fetch: PagedFetch, decode: WgmmaDecode) -> None:
        self.rings = rings
        self.fetch = fetch
        self.decode = decode

    def init_barriers(self) -> None:
        for ring in self.rings:
            ring.init()
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def run(self):
        if cute.arch.thread_idx()[0] == 0:
            self.init_barriers()
        cute.arch.sync_threads()
        splitter = self.fetch.splitter
        self.fetch.pages.prefetch(splitter.sequences, splitter.seq_lens)
        # The kernel before may still be running, and what it writes is read from here on. The one behind is told that
        # its CTAs may start wherever those of this one have ended: it will wait at the same place.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) < WARPS:
            self.fetch.run()
        else:
            self.decode.run()
