"""Paged attention of a few queries on Blackwell: the roles of `schedules.decode_tmem` on cp.async and tcgen05.

Its arguments are those of `DecodeLaunch`. It has been compiled, simulated and inspected, and never run:
there was no such chip.

    warps   0-3  fetch
            4-7  decode, a thread for each row of a Q tile
            8    MMAs, and the allocation of tensor memory
            9-11 idle, as registers are given to four warps at a time
    tensor memory, in columns: S of two tiles, then O; P is where the first half of S was
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from fmha.kernels.common import numbers
from fmha.kernels.common.decode import DecodeLaunch, Leaving, Outputs, PagedFetch, Parts
from fmha.kernels.common.forward import Logits
from fmha.kernels.common.paged import VALUE_SWIZZLE, ColumnRing, Pages, Place, RowRing, SplitRing, WarpSplitter
from fmha.kernels.sm100 import softmax, tcgen05
from fmha.kernels.sm100.barriers import WARPS, Barrier, InTmem, ReleasedByMmas, commit
from schedules.decode_tmem import Decode, Multiply
from schedules.domain import Section
from schedules.forward import Ring, Slot
from schedules.splits import Place as Kept
from schedules.splits import Split
from schedules.tiling import S_STAGES, WARPGROUP, TmemPagedConfig

DECODE, MULTIPLY = 4, 8  # warps: the first of each role


class ReleasedByCommit:
    """K or V: the MMAs that read a slot release it."""

    def __init__(self, *ring: Any) -> None:
        super().__init__(*ring)
        self.release_arrivals = 1

    def release(self, slot: Slot) -> None:
        commit(self, slot)


class KeyRing(ReleasedByCommit, RowRing):
    """K, and V where its rows are keys."""


class ValueColumnRing(ReleasedByCommit, ColumnRing):
    """vLLM's V."""


class SharedSplitRing(SplitRing):
    """Q. Besides the MMAs, the warps that decode release a slot, as soon as they know the split."""

    def __init__(self, *ring: Any) -> None:
        super().__init__(*ring)
        self.release_arrivals = 1 + self.RELEASING_LANES * WARPS


class Scores(Ring):
    """S of two tiles, in tensor memory: a barrier each, for it to be there."""

    stages = S_STAGES

    def __init__(self, barriers: cute.Pointer) -> None:
        self.full = barriers

    def init(self) -> None:
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, 1)

    def commit(self, slot: Slot) -> None:
        tcgen05.commit(self.full + slot.stage)

    def wait(self, slot: Slot) -> None:
        cute.arch.mbarrier_wait(self.full + slot.stage, slot.parity)

    def acquire(self, slot: Slot) -> None:
        raise NotImplementedError("that S was read is known before")

    load = release = acquire  # type: ignore[assignment]


class Tcgen05Multiply(InTmem, Multiply):
    """The warp that issues MMAs, of which one thread does so."""

    def __init__(self, kernel, rings, signals, operands, tmem: Int32) -> None:
        q, self.k, self.v = rings
        self.q = ReleasedByMmas(q)
        self.scores, self.weights, self.products = signals
        self.sq, self.sk, self.sv = operands
        self.config, self.tmem = kernel.config, tmem
        rows = self.config.tile_m
        self.qk = tcgen05.instruction(rows, self.config.tile_n, kernel.dtype)
        self.pv = tcgen05.instruction(rows, self.config.value_dim, kernel.dtype, across=self.sv.across)

    def alone(self):
        return cute.arch.elect_one()

    def s_at(self, s: Slot) -> Int32:
        return self.tmem + s.stage * self.config.tile_n

    def issue_qk(self, q_slot: Slot, slot: Slot, s: Slot) -> None:
        a, b = self.sq.at(self.q.place(q_slot)), self.sk.at(slot.stage)
        for step, (of_q, of_k) in enumerate(zip(self.sq.steps, self.sk.steps, strict=True)):
            tcgen05.multiply(self.s_at(s), a + of_q, b + of_k, self.qk, step > 0)

    def issue_pv(self, slot: Slot, s: Slot, before: Int32) -> None:
        b, d = self.sv.at(slot.stage), self.tmem + S_STAGES * self.config.tile_n
        for step, of_v in enumerate(self.sv.steps):
            more = before if step == 0 else True
            tcgen05.multiply(d, self.s_at(s) + step * tcgen05.K_COLUMNS, b + of_v, self.pv, more)


class Tcgen05Decode(InTmem, Leaving, softmax.RowSoftmax, Decode):
    """The warpgroup of the Q tile."""

    def __init__(self, kernel, q: SharedSplitRing, signals, splitter, logits, outputs, parts, tmem: Int32) -> None:
        config = kernel.config
        self.q = q
        self.scores, self.weights, self.products = signals
        self.set_out(kernel, splitter, logits, outputs, parts)
        self.hold_row(config.tile_n, kernel.dtype, logits.scale_log2, config.rescale_above)
        self.domain, self.score, self.tmem = kernel.domain, kernel.score, tmem
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.s_at, self.o_at = self.lanes(0), self.lanes(S_STAGES * config.tile_n)
        self.sink = cute.make_rmem_tensor(1, Float32)  # log2

    def place_of(self, s: Slot) -> Int32:
        return self.s_at + s.stage * self.kernel.config.tile_n

    def packed(self, split: Split) -> tuple[Int32, Int32]:
        """This thread's query, and its head."""
        return self.packed_row(split, self.thread)

    def take_up(self, split: Split) -> None:
        self.sink[0] = self.sink_of(self.packed(split)[1])

    def load_s(self, s: Slot) -> None:
        self.load_row(self.place_of(s))

    def change_scores(self, split: Split, tile: int, section: Section) -> None:
        numbers.cap(self.s, self.logits.cap_factor)

    def mask(self, split: Split, tile: int, section: Section) -> None:
        query, bounds = self.packed(split)[0], self.splitter.bounds(split)
        start = tile * self.kernel.config.tile_n
        begin = self.domain.lo(query, bounds) - start if section is Section.LEFT else None
        softmax.mask(self.s, self.domain.hi(query, bounds) - start, begin)

    def exponents(self, s: Slot) -> None:
        """By MUFU alone: memory takes longer."""
        self.store_weights(self.place_of(s), 0)

    def shrinks(self) -> Boolean:
        return cute.arch.vote_any_sync(self.factor[0] < 1.0)

    def rescale(self) -> None:
        softmax.shrink(self.o_at, self.kernel.config.value_dim, self.factor[0])

    def o(self) -> list[tuple[int, list[Float32]]]:
        """Some columns at a time, by the first. All lanes of a warp load together."""
        columns = range(0, self.kernel.config.value_dim, softmax.FEW)
        return ((column, tcgen05.arrived(tcgen05.load(self.o_at + column, softmax.FEW))) for column in columns)

    def write(self, split: Split) -> None:
        query, head = self.packed(split)
        total = self.whole_sum()
        factor, lse = self.outputs.finish(split, query, total, self.reference[0], self.sink[0], self.splitter)
        for column, values in self.o():
            words = [
                numbers.pack_16bit(values[i] * factor, values[i + 1] * factor, self.kernel.dtype)
                for i in range(0, len(values), 2)
            ]
            self.write_columns(split, query, head, column, words)
        self.write_lse(split, query, head, lse)

    @cute.jit
    def write_columns(self, split: Split, query: Int32, head: Int32, column: cutlass.Constexpr, words):
        if query < split.rows:
            for i in cutlass.range_constexpr(0, len(words), 4):
                self.outputs.store(split, query, head, Int32(column + 2 * i), words[i : i + 4])

    @cute.jit
    def write_lse(self, split: Split, query: Int32, head: Int32, lse: Float32):
        if query < split.rows:
            self.outputs.store_lse(split, query, head, lse)

    def write_part(self, split: Split, place: Kept) -> None:
        total = self.whole_sum()
        for column, values in self.o():
            self.write_part_columns(place, column, values)
        self.write_part_sum(place, total)

    @cute.jit
    def write_part_columns(self, place: Kept, column: cutlass.Constexpr, values):
        if self.thread < self.parts.rows:
            for i in cutlass.range_constexpr(0, len(values), 4):
                self.parts.store(place.own, self.thread, Int32(column + i), values[i : i + 4])

    @cute.jit
    def write_part_sum(self, place: Kept, total: Float32):
        if self.thread < self.parts.rows:
            self.parts.store_sum(place.own, self.thread, total, self.reference[0])


class DecodeKernel(DecodeLaunch):
    """Compiles to one cubin for (dtype, score, layout, block config)."""

    @cute.kernel
    def kernel(self, places, mmas, sizes, table, lengths, logits, lse: Int64, parts):
        config = self.config
        q, k, v, o = (Place(*place) for place in places)
        allocator = SmemAllocator()
        barriers = allocator.allocate_array(cutlass.Int64, config.barriers)
        hold = allocator.allocate_array(Int32, 4)  # the address of tensor memory
        posted = allocator.allocate_tensor(Int32, cute.make_layout((len(Split._fields), config.q_stages)), 16)
        arrived = allocator.allocate_tensor(Int32, cute.make_layout(1), 16)
        sq, sk, sv = (allocator.allocate(count * size, 1024) for count, size in config.tiles)

        splitter = WarpSplitter(self.domain, config.tile_m, sizes, *lengths)
        heads = splitter.heads * splitter.group
        pages = Pages(config.tile_n, *table, self.by_columns)
        k_at = barriers + 2 * config.q_stages
        v_at = k_at + 2 * config.stages
        signals_at = v_at + 2 * config.stages
        value_ring = ValueColumnRing if self.by_columns else KeyRing
        rings = (
            SharedSplitRing(barriers, config, sq, q, posted, splitter.group),
            KeyRing(k_at, config, config.head_dim, sk, k, pages),
            value_ring(v_at, config, config.value_dim, sv, v, pages),
        )
        one_a_tile = signals_at + S_STAGES
        signals = Scores(signals_at), Barrier(one_a_tile, WARPS), Barrier(one_a_tile + 1, 1)
        start_up((*rings, *signals), hold)
        cute.arch.sync_threads()
        tmem = cute.arch.make_warp_uniform(cute.make_tensor(hold, cute.make_layout(1))[0])
        operands = (tcgen05.along_k(sq, config.tile_m, config.head_dim), *self._operands(sk, sv))
        decode = Tcgen05Decode(
            self,
            rings[0],
            signals,
            splitter,
            Logits(*logits, Int64(0), heads, Int32(0)),
            Outputs(o, lse, heads, splitter.tokens, self.domain),
            Parts(*parts, config.value_dim, arrived),
            tmem,
        )
        multiply = Tcgen05Multiply(self, rings, signals, operands, tmem)
        Cta(config, PagedFetch(rings, splitter, pages), decode, multiply).run(hold)

    def _operands(self, sk: cute.Pointer, sv: cute.Pointer) -> tuple[tcgen05.Operand, tcgen05.Operand]:
        config = self.config
        if self.by_columns:
            k = tcgen05.in_blocks(sk, config.tile_n, config.head_dim, 16)
            return k, tcgen05.in_blocks(sv, config.value_dim, config.tile_n, VALUE_SWIZZLE)
        k = tcgen05.along_k(sk, config.tile_n, config.head_dim)
        return k, tcgen05.across_k(sv, config.tile_n, config.value_dim)


@cute.jit
def start_up(barriers, hold):
    """Barriers, by one thread, and tensor memory, by one warp."""
    if cute.arch.thread_idx()[0] == 0:
        init_barriers(barriers)
    if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == MULTIPLY:
        cute.arch.alloc_tmem(tcgen05.COLUMNS, hold)
        cute.arch.relinquish_tmem_alloc_permit()


def init_barriers(barriers) -> None:
    for each in barriers:
        each.init()
    cute.arch.mbarrier_init_fence()


class Cta:
    """The roles of one CTA, by warps."""

    def __init__(self, config: TmemPagedConfig, fetch, decode, multiply) -> None:
        self.config = config
        self.fetch, self.decode, self.multiply = fetch, decode, multiply
        self.warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

    @cute.jit
    def run(self, hold: cute.Pointer):
        splitter = self.fetch.splitter
        self.fetch.pages.prefetch(splitter.sequences, splitter.seq_lens)
        # As on Hopper: what the kernel before writes is read from here on.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if self.warp < DECODE:
            cute.arch.setmaxregister_increase(self.config.fetch_registers)
            self.fetch.run()
        elif self.warp < MULTIPLY:
            cute.arch.setmaxregister_increase(self.config.decode_registers)
            self.decode.run()
        else:
            cute.arch.setmaxregister_decrease(self.config.other_registers)
            if self.warp == MULTIPLY:
                self.multiply.run()
        cute.arch.sync_threads()
        if self.warp == MULTIPLY:
            self.free(hold)

    def free(self, hold: cute.Pointer) -> None:
        cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, hold), tcgen05.COLUMNS)
