"""The forward kernel of Blackwell: the roles of `schedules.forward_tmem` lowered onto TMA, tcgen05 and mbarriers.

Its arguments are those of `ForwardLaunch`. It has been compiled, simulated and inspected, and never run:
there was no such chip.

    warps   0-3, 4-7  the softmax of a Q tile each
            8-11      the correction of O
            12        MMAs, and the allocation of tensor memory
            13        loads
            14        stores
            15        idle, as registers are given to four warps at a time
    tensor memory, in columns: S of both Q tiles, then O of both; P is where the first half of S was
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from fmha.kernels.common import numbers
from fmha.kernels.common.forward import EXTENTS, LN2, ForwardLaunch, Grid, Logits, TmaLoad, Whole, uniform
from fmha.kernels.common.listing import RaggedGrid
from fmha.kernels.common.numbers import opaque
from fmha.kernels.common.paged import swizzled
from fmha.kernels.common.rings import Copy, RaggedCopy
from fmha.kernels.sm100 import softmax, tcgen05
from fmha.kernels.sm100.barriers import (
    WARPS,
    Barrier,
    Family,
    HandedRing,
    InTmem,
    QueryTileRing,
    ReleasedByMmas,
    TileRingOfMmas,
)
from schedules.domain import Bounds, Section, Visits
from schedules.forward import Slot
from schedules.forward_tmem import PAIR, Correct, Multiply, Softmax, Store, TmemRole
from schedules.tiling import ELEMENT_BYTES, WARPGROUP, TmemConfig, swizzle_bytes
from schedules.work import Work

CORRECT, MULTIPLY, LOAD, STORE = 8, 12, 13, 14  # warps: the first of each role


class Shared:
    """What the roles of a CTA have in common: the kernel, its rings and signals, and where things are."""

    def __init__(self, kernel, rings, signals, notes, tmem, grid, logits, lse, place) -> None:
        self.kernel = kernel
        self.q, self.k, self.v, self.factors, self.staged = rings
        self.scores, self.weights, self.outputs = signals
        self.notes = notes  # (thread, sum or reference, Q tile), in shared memory
        self.tmem = tmem
        self.grid, self.logits, self.lse = grid, logits, lse
        self.place = place  # Operands of Q, K and V, and where O is staged


class Tcgen05Role(InTmem, TmemRole):
    """What is lowered alike for all of them."""

    def __init__(self, shared: Shared) -> None:
        self.shared, self.kernel, self.config = shared, shared.kernel, shared.kernel.config
        self.q, self.scores, self.weights, self.outputs = shared.q, shared.scores, shared.weights, shared.outputs
        self.factors, self.staged = shared.factors, shared.staged
        self.domain, self.grid = shared.kernel.domain, shared.grid
        self.tmem = shared.tmem
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP

    def visits(self, work: Work) -> Visits:
        return uniform(self.domain.visits(work.q_tile, self.grid.bounds(work)))

    def row(self, work: Work, index: Int32 | int) -> Int32:
        """The query that this thread has of a Q tile."""
        return work.q_tile * self.config.tile_m + index * self.config.q_rows + self.thread

    def o_column(self, index: int) -> int:
        return len(PAIR) * self.config.tile_n + index * self.config.value_dim


class Tcgen05Multiply(Multiply, Tcgen05Role):
    """The warp that issues MMAs, of which one thread does so."""

    def __init__(self, shared: Shared) -> None:
        Tcgen05Role.__init__(self, shared)
        self.q = [ReleasedByMmas(shared.q[i]) for i in PAIR]
        self.k, self.v = shared.k, shared.v
        self.sq, self.sk, self.sv = shared.place[:3]
        rows, dtype = self.config.q_rows, shared.kernel.dtype
        self.qk = tcgen05.instruction(rows, self.config.tile_n, dtype)
        self.pv = tcgen05.instruction(rows, self.config.value_dim, dtype, across=True)

    def alone(self):
        return cute.arch.elect_one()

    def issue_qk(self, i: int, q_slot: Slot, slot: Slot) -> None:
        # A zero that ptxas does not know for one: else it computes the descriptors of every step of Q once and for all,
        # and has no registers for them.
        a = self.sq.at(self.q[i].place(q_slot)) + Int64(slot.stage >> 8)
        b, d = self.sk.at(slot.stage), self.shared.tmem + i * self.config.tile_n
        for step, (of_q, of_k) in enumerate(zip(self.sq.steps, self.sk.steps, strict=True)):
            tcgen05.multiply(d, a + of_q, b + of_k, self.qk, step > 0)

    def issue_pv(self, i: int, slot: Slot, before: Int32) -> None:
        a = self.shared.tmem + i * self.config.tile_n + (slot.stage >> 8)
        b, d = self.sv.at(slot.stage), self.shared.tmem + self.o_column(i)
        for step, of_v in enumerate(self.sv.steps):
            more = before if step == 0 else True
            tcgen05.multiply(d, a + step * tcgen05.K_COLUMNS, b + of_v, self.pv, more)


class Tcgen05Softmax(softmax.RowSoftmax, Softmax, Tcgen05Role):
    """The warpgroup of a Q tile."""

    def __init__(self, shared: Shared, index: Int32) -> None:
        Tcgen05Role.__init__(self, shared)
        config, kernel = self.config, shared.kernel
        self.hold_row(config.tile_n, kernel.dtype, shared.logits.scale_log2, config.rescale_above)
        self.index = index
        self.score = kernel.score
        self.at = self.lanes(index * config.tile_n)
        self.slope = cute.make_rmem_tensor(1, Float32)

    def take_up(self, work: Work) -> None:
        if self.score.alibi:
            self.slope[0] = self.shared.logits.slope(work)

    def load_s(self) -> None:
        self.load_row(self.at)

    def change_scores(self, work: Work, tile: int, section: Section) -> None:
        if self.score.softcap:
            numbers.cap(self.s, self.shared.logits.cap_factor)
        if self.score.alibi:
            bounds = self.grid.bounds(work)
            own = self.row(work, self.index) + bounds.seqlen_k - bounds.seqlen_q
            softmax.penalise(self.s, self.slope[0], tile * self.config.tile_n - own)

    def mask(self, work: Work, tile: int, section: Section) -> None:
        row, bounds, start = self.row(work, self.index), self.grid.bounds(work), tile * self.config.tile_n
        begin = self.domain.lo(row, bounds) - start if section is Section.LEFT else None
        softmax.mask(self.s, self.domain.hi(row, bounds) - start, begin)

    def write_factor(self) -> None:
        self.shared.notes[self.thread, 0, self.index] = self.factor[0]

    def exponents(self, tile: int, section: Section) -> None:
        """In masked tiles none by polynomial: they are few, and registers for both would have to be spilled."""
        self.store_weights(self.at, self.config.polynomials if section is Section.BODY else 0)

    def write_sum(self) -> None:
        self.shared.notes[self.thread, 0, self.index] = self.whole_sum()
        self.shared.notes[self.thread, 1, self.index] = self.reference[0]


class Tcgen05Correct(Correct, Tcgen05Role):
    """The warpgroup of the correction: a thread has a row of each Q tile."""

    def __init__(self, shared: Shared) -> None:
        Tcgen05Role.__init__(self, shared)
        self.at = [self.lanes(self.o_column(i)) for i in PAIR]
        self.note = cute.make_rmem_tensor(2, Float32)
        self.so = shared.place[3]
        self.lse = shared.lse

    def read_factor(self, i: int) -> Boolean:
        self.note[0] = self.shared.notes[self.thread, 0, i]
        return cute.arch.vote_any_sync(self.note[0] < 1.0)

    def rescale(self, i: int) -> None:
        softmax.shrink(self.at[i], self.config.value_dim, self.note[0])

    def read_sum(self, i: int) -> None:
        self.note[0], self.note[1] = self.shared.notes[self.thread, 0, i], self.shared.notes[self.thread, 1, i]

    def stage_o(self, i: int, slot: Slot, work: Work) -> None:
        factor = self.finish(i, work)
        width = swizzle_bytes(self.config.value_dim)
        row = opaque(self.thread)  # lest ptxas keep the place of every chunk over all work tiles, and spill
        start = self.so + slot.stage * (self.config.q_rows * self.config.value_dim * ELEMENT_BYTES)
        for column in range(0, self.config.value_dim, softmax.FEW):
            found = tcgen05.arrived(tcgen05.load(self.at[i] + column, softmax.FEW))
            words = []
            for j in range(0, softmax.FEW, 2):
                words.append(numbers.pack_16bit(found[j] * factor, found[j + 1] * factor, self.kernel.dtype))
            for j in range(0, len(words), 4):
                at = swizzled(row, Int32(column // 8 + j // 4), self.config.q_rows, width)
                tcgen05.write_shared(start + at, words[j : j + 4])

    def finish(self, i: int, work: Work) -> Float32:
        """What O is multiplied by. The LSE goes where it belongs. The sink is a logit more, whose value is 0."""
        total, reference = self.note[0], self.note[1]
        row, bounds, sink = self.row(work, i), self.grid.bounds(work), self.shared.logits.sink(work)
        blind = self.domain.hi(row, bounds) <= cutlass.max(self.domain.lo(row, bounds), 0)
        past = row >= bounds.seqlen_q
        blind = numbers.either(blind, past)
        largest = cute.arch.fmax(reference, sink)
        shrink = cute.math.exp2(reference - largest, fastmath=True)
        total = total * shrink + cute.math.exp2(sink - largest, fastmath=True)
        lse = (largest + cute.math.log2(total, fastmath=True)) * LN2
        beyond = numbers.select(past, Float32(-Float32.inf), sink)
        self.lse.write(work, row, numbers.select(blind, beyond * LN2, lse))
        return numbers.select(blind, Float32(0.0), cute.arch.rcp_approx(total) * shrink)

    def publish_o(self) -> None:
        cute.arch.fence_view_async_shared()


class TmaStore(Store, Tcgen05Role):
    """The warp that stores O."""

    def __init__(self, shared: Shared, copy: Copy | RaggedCopy) -> None:
        Tcgen05Role.__init__(self, shared)
        self.copy = copy

    def store_o(self, i: int, slot: Slot, work: Work) -> None:
        tile = work.q_tile * len(PAIR) + i
        cute.copy(self.copy.atom, self.copy.shared[None, slot.stage], self.copy.at(work, tile, work.head))
        cute.arch.cp_async_bulk_commit_group()

    def drain(self) -> None:
        cute.arch.cp_async_bulk_wait_group(0, read=True)


class Lse:
    """Where LSEs go, if anywhere: float32 [B, Hq, Sq] or [Hq, T]."""

    def __init__(self, address: Int64, heads: Int32, rows: Int32, ragged: bool) -> None:
        self.address, self.heads, self.rows, self.ragged = address, heads, rows, ragged

    @cute.jit
    def write(self, work: Work, row: Int32, value: Float32):
        rows = work.rows if const_expr(self.ragged) else self.rows
        if row < rows and self.address != 0:
            self.put(work, row, value)

    def put(self, work: Work, row: Int32, value: Float32) -> None:
        line = Int64(work.entry) * self.heads + work.head
        row = work.start_q + row if self.ragged else row
        lse = cute.make_ptr(Float32, self.address, cute.AddressSpace.gmem, assumed_align=4)
        cute.make_tensor(lse + (line * self.rows + row), cute.make_layout(1))[0] = value


class ForwardKernel(ForwardLaunch):
    """Compiles to one cubin for (dtype, mask, score, ragged or not, block config)."""

    def __init__(self, dtype, mask: str, score: str, ragged: bool, config: TmemConfig, paged: int = 0) -> None:
        super().__init__(dtype, mask, score, ragged, config, paged)
        self.q_rows = config.q_rows

    @cute.kernel
    def kernel(
        self,
        atoms,
        tensors,
        layouts,
        units,
        whole,
        table,
        mmas,
        lse: Int64,
        logits,
        group_or_sequences: Int32,
        sides,
        counter: Int64,
        base: Int32,
    ):
        config = self.config
        if const_expr(not self.ragged):  # those that TMA has: others cost registers
            whole = Whole.of(*tensors[:2])
        allocator = SmemAllocator()
        barriers = allocator.allocate_array(cutlass.Int64, config.barriers)
        hold = allocator.allocate_array(Int32, 4)  # the address of tensor memory
        posted = allocator.allocate_tensor(Int32, cute.make_layout((len(self.work._fields), config.q_slots)), 16)
        notes = allocator.allocate_tensor(Float32, cute.make_layout((config.q_rows, 2, len(PAIR))), 16)
        starts, slots = self._slots(allocator, layouts)
        copies = self._tile_copies(atoms, tensors, slots, units)
        rings, signals = self._barriers(barriers, posted, copies, whole.heads // whole.kv_heads)

        bounds = Bounds(whole.seqlen_q, whole.seqlen_k, *sides)
        if const_expr(self.ragged):
            grid = RaggedGrid(counter, group_or_sequences, whole.heads, config.tile_m, bounds)
        else:
            q_tiles = cute.ceil_div(whole.seqlen_q, config.tile_m)
            grid = Grid((q_tiles, whole.heads, whole.batch, group_or_sequences), bounds, counter, base)
        start_up(rings, signals, hold)
        cute.arch.sync_threads()
        tmem = cute.arch.make_warp_uniform(cute.make_tensor(hold, cute.make_layout(1))[0])
        place = (
            tcgen05.along_k(starts[0], config.q_rows, config.head_dim),
            tcgen05.along_k(starts[1], config.tile_n, config.head_dim),
            tcgen05.across_k(starts[2], config.tile_n, config.value_dim),
            Int32(starts[3].toint()),
        )
        lses = Lse(lse, whole.heads, whole.seqlen_q, self.ragged)
        shared = Shared(self, rings, signals, notes, tmem, grid, Logits(*logits), lses, place)
        q, k, v, *_ = rings
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        Cta(
            config,
            warp,
            Tcgen05Softmax(shared, warp // WARPS),
            Tcgen05Correct(shared),
            Tcgen05Multiply(shared),
            TmaLoad(([q[i] for i in PAIR], k, v), False, self.domain, grid),
            TmaStore(shared, copies[3]),
        ).run(hold)

    def _slots(self, allocator: SmemAllocator, layouts):
        """Of Q, K, V and O: where they begin, and all of them as a tensor."""
        config = self.config
        starts, slots = [], []
        for layout, (count, tile) in zip(layouts, config.tiles, strict=True):
            start = allocator.allocate(count * tile, 1024)
            one = layout.outer
            whole = cute.make_layout((*one.shape[:2], count), stride=(*one.stride[:2], tile // ELEMENT_BYTES))
            starts.append(start)
            slots.append(cute.make_tensor(cute.recast_ptr(start, layout.inner, dtype=self.dtype), whole))
        return starts, slots

    def _tile_copies(self, atoms, tensors, slots, units) -> list[Copy] | list[RaggedCopy]:
        """Those of Q, K, V and O."""
        config = self.config
        by_rows, by_columns = (None, 0, None, None), (0, None, None, None)  # of (S, D, H, B); V is (D, S, H, B)
        cuts = (
            ((config.q_rows, config.head_dim), by_rows),
            ((config.tile_n, config.head_dim), by_rows),
            ((config.value_dim, config.tile_n), by_columns),
            ((config.q_rows, config.value_dim), by_rows),
        )
        if self.ragged:
            return [RaggedCopy(*one) for one in zip(atoms, slots, tensors, cuts, EXTENTS, units, strict=True)]
        found = []
        for atom, tensor, slot, (tile, at) in zip(atoms, tensors, slots, cuts, strict=True):
            cut = cute.group_modes(cute.local_tile(tensor, tile, at), 0, 2)
            one = cute.make_layout(1)  # CTA: no multicast
            found.append(Copy(atom, *cpasync.tma_partition(atom, 0, one, cute.group_modes(slot, 0, 2), cut)))
        return found

    def _barriers(self, barriers, posted, copies, heads_per_kv_head):
        """Every ring, and every signal, by where its barriers begin."""
        config, tiles = self.config, len(PAIR)
        at = [0]

        def take(count: int):
            at[0] += count
            return barriers + (at[0] - count)

        (_, q_bytes), (_, k_bytes), (_, v_bytes), _ = config.tiles
        q_at = take(tiles * 2 * config.q_stages)
        kind = self.work

        def query_ring(index):
            # Those of the first one are read by the correction and by the store, too.
            warps = WARPS if isinstance(index, int) and index > 0 else 2 * WARPS + 1
            return QueryTileRing(q_at, config.q_stages, q_bytes, copies[0], posted, kind, index, tiles, warps)

        k, v = (
            TileRingOfMmas(take(2 * config.stages), config.stages, size, copy, heads_per_kv_head)
            for size, copy in ((k_bytes, copies[1]), (v_bytes, copies[2]))
        )
        factors_at = take(tiles * 2)
        staged = HandedRing(take(2 * config.o_stages), config.o_stages, WARPS, 1)
        signals_at = [(take(tiles), arrivals) for arrivals in (1, 2 * WARPS, 1)]
        signals = [Family(lambda i, a=a, n=n: Barrier(a + i, n)) for a, n in signals_at]
        factors = Family(lambda i: HandedRing(factors_at + 2 * i, 1, WARPS, WARPS))
        return (Family(query_ring), k, v, factors, staged), signals


@cute.jit
def start_up(rings, signals, hold):
    """Barriers, by one thread, and tensor memory, by one warp."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    if cute.arch.thread_idx()[0] == 0:
        init_barriers(rings, signals)
    if warp == MULTIPLY:
        cute.arch.alloc_tmem(tcgen05.COLUMNS, hold)
        cute.arch.relinquish_tmem_alloc_permit()


def init_barriers(rings, signals) -> None:
    q, k, v, factors, staged = rings
    for ring in (*(q[i] for i in PAIR), k, v, *(factors[i] for i in PAIR), staged):
        ring.init()
    for signal in signals:
        for i in PAIR:
            signal[i].init()
    cute.arch.mbarrier_init_fence()


class Cta:
    """The roles of one CTA, by warps."""

    def __init__(self, config: TmemConfig, warp: Int32, softmax, correct, multiply, load, store) -> None:
        self.config, self.warp = config, warp
        self.softmax, self.correct, self.multiply, self.load, self.store = softmax, correct, multiply, load, store

    @cute.jit
    def run(self, hold: cute.Pointer):
        if self.warp < CORRECT:
            cute.arch.setmaxregister_increase(self.config.softmax_registers)
            self.softmax.run()
        elif self.warp < MULTIPLY:
            cute.arch.setmaxregister_decrease(self.config.correct_registers)
            self.correct.run()
        else:
            cute.arch.setmaxregister_decrease(self.config.other_registers)
            if self.warp == MULTIPLY:
                self.multiply.run()
            elif self.warp == LOAD:
                self.load.run()
            elif self.warp == STORE:
                self.store.run()
        cute.arch.sync_threads()
        if self.warp == MULTIPLY:
            self.free(hold)

    def free(self, hold: cute.Pointer) -> None:
        cute.arch.dealloc_tmem(cute.arch.retrieve_tmem_ptr(Float32, 16, hold), tcgen05.COLUMNS)
