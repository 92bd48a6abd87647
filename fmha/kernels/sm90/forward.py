"""The forward kernel for Hopper: the roles of `schedules.forward` lowered onto TMA, wgmma and mbarriers. Its arguments
are those of `ForwardLaunch`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator

from fmha.kernels.common import numbers
from fmha.kernels.common.forward import EXTENTS, LN2, ForwardLaunch, Grid, Logits, TmaLoad, Whole, uniform
from fmha.kernels.common.listing import RaggedGrid
from fmha.kernels.common.rings import Copy, PagedCopy, QueryRing, RaggedCopy, Table, TileRing
from fmha.kernels.sm90 import softmax, wgmma
from fmha.kernels.sm90.barriers import PingPong, ValueRing
from schedules.domain import Bounds, Section, Visits
from schedules.forward import FLOOR, LARGE_PART, Attend, JointLoad, Slot
from schedules.tiling import (
    ELEMENT_BYTES,
    ROWS_PER_WARPGROUP,
    TOLD_BYTES,
    WARPGROUP,
    BlockConfig,
    producer_warps,
)
from schedules.work import RaggedWork, Work

WARPS_PER_WARPGROUP = WARPGROUP // 32


class TmaJointLoad(JointLoad, TmaLoad):
    """One of several producer warps, of which each copies its pieces of every tile."""

    def __init__(self, rings, lends, domain, grid, told: cute.Tensor, warpgroups: int, warps: int) -> None:
        TmaLoad.__init__(self, rings, lends, domain, grid)
        self.leads = cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0
        self.told_at = told  # in shared memory
        self.barrier = PingPong.FIRST + 2 * warpgroups  # behind those of turns and of O's
        self.warps = warps

    @cute.jit
    def count(self):
        number = Int32(0)
        if self.lane == 0:
            number = self.grid.count()
        return number

    def nothing(self) -> Int32:
        return Int32(0)

    @cute.jit
    def tell(self, number: Int32):
        if self.lane == 0:
            self.write(number)

    def write(self, number: Int32) -> None:
        self.told_at[0] = number

    def told(self) -> Int32:
        return self.told_at[0]

    def meet(self) -> None:
        cute.arch.barrier(barrier_id=self.barrier, number_of_threads=32 * self.warps)

    def numbered(self, number: Int32) -> RaggedWork:
        return self.grid.work_taken(number)


class WgmmaAttend(Attend):
    """A consumer warpgroup. Register tensors: `s` (64 x tile_n), `weights` likewise, `p` in pairs, `o` (64 x head_dim,
    and behind it the row sums, where the PV MMA makes them), `reference` and `row_sum`.

    An optimistic one takes the references that it finds, and then looks at the highest exponent bits of P. That they
    are set should be rare, and yet no weight that is a large part of its row's sum should be without: rounded as P
    rounds it, it makes the error twice as large as where references are maxima and the largest weight is 1, exactly.
    """

    def __init__(self, kernel, rings, turn, operands, store, grid, logits, index) -> None:
        self.kernel = kernel
        self.q, self.k, self.v = rings
        self.turn = turn
        self.sq, self.sk, self.sv = operands
        self.store = store
        self.domain, self.grid = kernel.domain, grid
        self.score, self.logits = kernel.score, logits
        self.scale_log2 = logits.scale_log2
        self.index = index
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.lane = cute.arch.lane_idx()

        config = kernel.config
        self.s = kernel.qk.make_fragment_C(kernel.qk.partition_shape_C((ROWS_PER_WARPGROUP, config.tile_n)))
        self.o = cute.make_rmem_tensor((config.value_dim + config.ones) // 2, Float32)
        self.p = cute.make_rmem_tensor(config.tile_n // 4, Int32)
        self.optimistic, self.lends = config.ones > 0, config.lends
        self.weights = cute.make_rmem_tensor(config.tile_n // 2, Float32) if self.optimistic else self.s
        self.reference = cute.make_rmem_tensor(softmax.ROWS, Float32)  # log2, scaled
        self.grown = cute.make_rmem_tensor(softmax.ROWS, Float32)  # the same, this tile included
        self.row_sum = cute.make_rmem_tensor(softmax.ROWS, Float32)  # of this thread's columns
        self.top = cute.make_rmem_tensor(softmax.ROWS, Float32)  # this thread's largest weight of a row in the tile
        self.mended = cute.make_rmem_tensor(1, Int32)  # tiles of the work tile, by this warp
        self.sink = cute.make_rmem_tensor(1, Float32)  # log2
        self.slope = cute.make_rmem_tensor(1, Float32)  # in units of S
        self.capped = cute.make_rmem_tensor(1, Int32)  # whether S is; otherwise it will be in the exponentials
        # Scores of the body are capped in the exponentials, by a polynomial, and afterwards it is found out whether all
        # were small enough for it: tanh is an instruction of the unit that exponentiates, which has no time for it.
        self.caps_late = self.score.softcap and self.optimistic and not self.score.alibi
        self.least_slope = cute.make_rmem_tensor(1, Float32)  # of what caps a thread's scores
        self.shift = cute.make_rmem_tensor(softmax.ROWS, Float32)  # of what S holds, log2: ALiBi's part of a row

    def row(self, work: Work, r: int) -> Int32:
        """The query that row `r` of this thread is."""
        tile = work.q_tile * self.kernel.config.tile_m + self.index * ROWS_PER_WARPGROUP
        return tile + (self.thread // 32) * 16 + self.lane // 4 + 8 * r

    def visits(self, work: Work) -> Visits:
        return uniform(self.domain.visits(work.q_tile, self.grid.bounds(work)))

    def start(self) -> None:
        self.o.fill(0.0)
        self.row_sum.fill(0.0)
        self.mended.fill(0)
        self.least_slope.fill(0.0)
        for r in range(softmax.ROWS):
            self.reference[r] = cute.arch.fmax(self.needed(r), Float32(FLOOR))

    def fence(self) -> None:
        warpgroup.fence()

    def issue_qk(self, q_slot: Slot, slot: Slot) -> None:
        wgmma.multiply_shared(self.s, self.sq, self.q.place(q_slot), self.sk, slot.stage, self.kernel.dtype)

    def issue_pv(self, slot: Slot) -> None:
        wgmma.multiply_registers(self.o, self.p, self.sv, slot.stage, self.kernel.dtype)

    def commit(self) -> None:
        warpgroup.commit_group()

    def retire(self, pending: int) -> None:
        warpgroup.wait_group(pending)

    def take_up(self, work: Work) -> None:
        self.sink[0] = self.logits.sink(work)
        if self.score.alibi:
            self.slope[0] = self.logits.slope(work)

    def change_scores(self, work: Work, tile: int, section: Section) -> None:
        if self.score.softcap:
            if section is Section.BODY and self.caps_late:
                self.capped[0] = 0  # but by `exponents`
            else:
                self.cap()
        if self.score.alibi:
            self.penalise(work, tile, section)

    def cap(self) -> None:
        self.capped[0] = 1
        numbers.cap(self.s, self.logits.cap_factor)

    def cap_again(self, tile: int) -> None:
        self.cap()
        self.exponents(tile)
        self.pack_p()

    def penalise(self, work: Work, tile: int, section: Section) -> None:
        bounds = self.grid.bounds(work)
        start = tile * self.kernel.config.tile_n
        own = bounds.seqlen_k - bounds.seqlen_q  # the key at a query's own place, less the query
        distances = [start - (self.row(work, r) + own) for r in range(softmax.ROWS)]
        if section is Section.BODY:  # whose keys are all on one side of a query
            before = distances[0] < 0
            self.penalise_side(distances, numbers.select(before, self.slope[0], -self.slope[0]))
        else:
            softmax.penalise(self.s, self.slope[0], distances, self.lane)
            self.shift.fill(0.0)

    def penalise_side(self, distances, slope: Float32) -> None:
        softmax.penalise_side(self.s, slope)
        for r in range(softmax.ROWS):
            self.shift[r] = slope * self.scale_log2 * Float32(distances[r] + 2 * (self.lane % 4))

    def scaled(self, r: int, score: Float32) -> Float32:
        """What S holds, as the softmax takes it, in log2."""
        found = score * self.scale_log2
        if self.caps_late:
            light = score * (score * score * self.logits.cap_cubic + self.logits.cap_linear)
            return numbers.select(self.capped[0] != 0, found, light)
        return found + self.shift[r] if self.score.alibi else found

    def mask(self, work: Work, tile: int, section: Section) -> None:
        start = tile * self.kernel.config.tile_n
        rows = [self.row(work, r) for r in range(softmax.ROWS)]
        bounds = self.grid.bounds(work)
        softmax.mask_right(self.s, [self.domain.hi(row, bounds) - start for row in rows], self.lane)
        if section is Section.LEFT:
            softmax.mask_left(self.s, [self.domain.lo(row, bounds) - start for row in rows], self.lane)

    def needed(self, r: int) -> Float32:
        """The reference that a row would get for the present tile."""
        found = self.largest_score(r)
        if self.score.alibi:  # of which each thread's columns have a part of their own
            found = softmax.quad_reduce(self.scaled(r, found), cute.arch.fmax)
        else:
            found = self.scaled(r, softmax.quad_reduce(found, cute.arch.fmax))
        return found - softmax.LIMIT if self.optimistic else found

    def largest_score(self, r: int) -> Float32:
        """This thread's of a row."""
        return softmax.row_reduce(self.s, r, cute.arch.fmax)

    def row_max(self) -> Boolean:
        grew = None
        for r in range(softmax.ROWS):
            self.grown[r] = cute.arch.fmax(self.needed(r), self.reference[r])
            row_grew = self.grown[r] > self.reference[r] + self.kernel.config.rescale_above
            grew = row_grew if grew is None else numbers.either(grew, row_grew)
        return cute.arch.vote_any_sync(grew)

    def rescale(self) -> None:
        for r in range(softmax.ROWS):
            shrink = cute.math.exp2(self.reference[r] - self.grown[r], fastmath=True)
            self.reference[r] = self.grown[r]
            self.row_sum[r] = self.row_sum[r] * shrink
            self.scale_o(r, shrink)

    def scale_o(self, r: int, factor: Float32) -> None:
        """A row of O, and the row sum where it stands behind O."""
        for column in range(softmax.columns(self.o)):
            at = softmax.element(r, column)
            self.o[at] = self.o[at] * factor

    def exponents(self, tile: int) -> None:
        if self.caps_late:
            self.capped_exponents()
        else:
            self.plain_exponents()
        if not self.optimistic:
            for r in range(softmax.ROWS):
                self.row_sum[r] = self.row_sum[r] + softmax.row_reduce(self.weights, r, softmax.add)

    def plain_exponents(self) -> None:
        for r in range(softmax.ROWS):
            reference = self.reference[r] - self.shift[r] if self.score.alibi else self.reference[r]
            for column in range(softmax.columns(self.s)):
                at = softmax.element(r, column)
                self.weights[at] = cute.math.exp2(self.s[at] * self.scale_log2 - reference, fastmath=True)

    @cute.jit
    def capped_exponents(self):
        if self.capped[0] != 0:
            self.plain_exponents()
        else:
            self.capping_exponents()

    def capping_exponents(self) -> None:
        slopes = []
        for r in range(softmax.ROWS):
            for column in range(softmax.columns(self.s)):
                at = softmax.element(r, column)
                slopes.append(self.s[at] * self.s[at] * self.logits.cap_cubic + self.logits.cap_linear)
                self.weights[at] = cute.math.exp2(self.s[at] * slopes[-1] - self.reference[r], fastmath=True)
        self.least_slope[0] = softmax.least(slopes)

    def pack_p(self) -> None:
        softmax.pack(self.weights, self.p, self.kernel.dtype)

    def foresee(self, tiles: Int32) -> None:
        """The largest weight, 2 here, is taken for an outlier: there may be no other one like it in the row."""
        for r in range(softmax.ROWS):
            total = softmax.quad_reduce(softmax.row_reduce(self.weights, r, softmax.add), softmax.add)
            largest = 2.0**softmax.LIMIT
            self.lower(r, self.steps(Float32(largest), largest + (total - largest) * Float32(tiles)))

    def steps(self, top: Float32, total: Float32) -> Int32:
        """How many powers of two a row's weights must go down until 2^LIMIT is about a large part of `total`, and `top`
        is less than twice as much. `1.5` rounds to the nearest power."""
        most = cute.arch.fmax(cute.arch.fmax(total * (1.5 * LARGE_PART), top), Float32(2.0**softmax.LIMIT))
        _, bias = softmax.EXPONENT[self.kernel.dtype]
        return cutlass.min(softmax.floor_log2(most) - softmax.LIMIT, Int32(bias - 1))

    def lower(self, r: int, steps: Int32) -> None:
        """The weights of a row in P, and with them the reference. Exact but for what float16 has no exponents for."""
        self.reference[r] = self.reference[r] + Float32(steps)
        factors = softmax.pair_of_powers_of_2(-steps, self.kernel.dtype)
        for i in range(r, cute.size(self.p), softmax.ROWS):
            self.p[i] = numbers.multiply_pair(self.p[i], factors, self.kernel.dtype)

    def outgrown(self) -> Boolean:
        past = softmax.past_limit(self.p)
        if self.caps_late:
            past = numbers.either(past, self.capped_badly())
        return cute.arch.vote_any_sync(past)

    def capped_badly(self) -> Boolean:
        """Whether a score of this thread is too large for the polynomial that has capped it."""
        return (self.capped[0] == 0) & (self.least_slope[0] < self.logits.least_slope)

    @cute.jit
    def mend(self, tile: int):
        if const_expr(self.caps_late):
            if cute.arch.vote_any_sync(self.capped_badly()):
                self.cap_again(tile)
            if self.outgrown():
                self.mend_rows(tile)
        else:
            self.mend_rows(tile)

    @cute.jit
    def mend_rows(self, tile: int):
        self.mended[0] = self.mended[0] + 1
        for r in cutlass.range_constexpr(softmax.ROWS):
            largest = self.scaled(r, self.largest_score(r)) - self.reference[r]
            self.top[r] = cute.math.exp2(largest, fastmath=True)
        if cute.arch.vote_any_sync(cute.arch.fmax(self.top[0], self.top[1]) > 2.0 ** softmax.MOST[self.kernel.dtype]):
            self.row_max()
            self.rescale()
            self.exponents(tile)
            self.pack_p()
        else:
            for r in cutlass.range_constexpr(softmax.ROWS):
                self.mend_row(r)

    def mend_row(self, r: int) -> None:
        """O and the sum move by what the largest weight is rounded by, too, if that is a large part of the sum. Where
        maxima go on growing, the reference goes ahead of them."""
        top, total = softmax.quad_reduce(self.top[r], cute.arch.fmax), self.total(r)
        rounded = top.to(self.kernel.dtype).to(Float32)
        ratio = numbers.select(top > total * LARGE_PART, rounded * cute.arch.rcp_approx(top), Float32(1.0))
        grows = self.mended[0] > softmax.MENDED_EXACTLY
        ahead = numbers.select(grows, Float32(2.0 ** softmax.AHEAD[self.kernel.dtype]), Float32(1.0))
        steps = self.steps(top * ahead, total)
        self.lower(r, steps)
        self.reference[r] = self.reference[r] - cute.math.log2(ratio, fastmath=True)
        self.scale_o(r, ratio * softmax.power_of_2(-steps))

    def total(self, r: int) -> Float32:
        """The sum of a row."""
        if self.optimistic:
            return self.o[softmax.element(r, self.kernel.config.value_dim // 4)]
        return softmax.quad_reduce(self.row_sum[r], softmax.add)

    def normalise(self, work: Work) -> None:
        for r in range(softmax.ROWS):
            row, total = self.row(work, r), self.total(r)
            bounds, sink = self.grid.bounds(work), self.sink[0]
            blind = self.domain.hi(row, bounds) <= cutlass.max(self.domain.lo(row, bounds), 0)
            if self.kernel.ragged:
                past = row >= bounds.seqlen_q
                blind, sink = numbers.either(blind, past), numbers.select(past, Float32(-Float32.inf), sink)
            # The sink is a logit more, whose value is 0: the larger of it and the reference counts as 1.
            largest = cute.arch.fmax(self.reference[r], self.sink[0])
            shrink = cute.math.exp2(self.reference[r] - largest, fastmath=True)
            beside = cute.math.exp2(self.sink[0] - largest, fastmath=True)
            total = total * shrink + beside
            factor = cute.arch.rcp_approx(total) * shrink
            for column in range(self.kernel.config.value_dim // 4):
                at = softmax.element(r, column)
                self.o[at] = numbers.select(blind, Float32(0.0), self.o[at] * factor)
            if not self.optimistic:
                lse = (largest + cute.math.log2(total, fastmath=True)) * LN2
                self.store.lse(work, row, numbers.select(blind, sink * LN2, lse), self.lane)

    def o_place(self, slot: Slot) -> Int32:
        """The slot that O leaves through, among V's or Q's."""
        return slot.stage if self.lends else self.q.place(slot)

    def stage_o(self, slot: Slot) -> None:
        pv = self.kernel.pv
        shape = pv.partition_shape_C((ROWS_PER_WARPGROUP, self.kernel.config.value_dim))
        rounded = cute.make_rmem_tensor(pv.make_fragment_C(shape).layout, self.kernel.dtype)
        softmax.pack(self.o, cute.recast_tensor(rounded, Int32), self.kernel.dtype)
        self.store.stage(rounded, self.thread, self.o_place(slot))

    def publish_o(self) -> None:
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(
            barrier_id=PingPong.FIRST + self.kernel.config.consumers + self.index,
            number_of_threads=WARPGROUP,
        )

    def store_o(self, slot: Slot, work: Work) -> None:
        tile = work.q_tile * self.kernel.config.consumers + self.index
        self.store.start(work, self.thread, tile, self.o_place(slot))

    def drain(self) -> None:
        self.store.drain(self.thread)


class OutputStore:
    """The way of O from registers through shared to global memory, and that of the LSE."""

    def __init__(self, kernel: ForwardKernel, copy, so: cute.Tensor, lse: Int64, heads: Int32, rows: Int32):
        self.kernel = kernel
        self.copy = copy
        self.so = so  # (64, head_dim, slot), swizzled
        self.lse_address = lse
        self.heads = heads
        self.rows = rows  # of Q

    def stage(self, rounded: cute.Tensor, thread: Int32, place: Int32) -> None:
        atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), self.kernel.dtype)
        copy = cute.make_tiled_copy_C(atom, self.kernel.pv).get_slice(thread)
        cute.copy(atom, copy.retile(rounded), copy.partition_D(self.so[None, None, place]))

    @cute.jit
    def start(self, work: Work, thread: Int32, tile: Int32, place: Int32):
        """By one warp, the same that drains."""
        if thread < 32:
            cute.copy(self.copy.atom, self.copy.shared[None, place], self.copy.at(work, tile, work.head))
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def drain(self, thread: Int32):
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def lse(self, work: Work, row: Int32, value: Float32, lane: Int32):
        rows = work.rows if const_expr(self.kernel.ragged) else self.rows
        if lane % 4 == 0 and row < rows and self.lse_address != 0:
            self.write_lse(work, row, value)

    def write_lse(self, work: Work, row: Int32, value: Float32) -> None:
        line = Int64(work.entry) * self.heads + work.head
        row = work.start_q + row if self.kernel.ragged else row
        lse = cute.make_ptr(Float32, self.lse_address, cute.AddressSpace.gmem, assumed_align=4)
        cute.make_tensor(lse + (line * self.rows + row), cute.make_layout(1))[0] = value


def mma_shapes(dtype: type[cutlass.Numeric], config: BlockConfig) -> tuple[cute.TiledMma, cute.TiledMma]:
    """S = Q K^T from shared memory; O += P V with P from registers: whose registers hold which elements."""
    rows, k_major, mn_major = ROWS_PER_WARPGROUP, OperandMajorMode.K, OperandMajorMode.MN

    def mma(columns, v_major, source):
        one = (1, 1, 1)  # a warpgroup each, side by side
        return sm90.make_trivial_tiled_mma(dtype, dtype, k_major, v_major, Float32, one, (rows, columns), source)

    qk = mma(config.tile_n, k_major, warpgroup.OperandSource.SMEM)
    return qk, mma(config.value_dim, mn_major, warpgroup.OperandSource.RMEM)


class ForwardKernel(ForwardLaunch):
    """Compiles to one cubin for (dtype, mask, score, ragged or not, block config)."""

    q_rows = ROWS_PER_WARPGROUP

    def __init__(self, dtype, mask: str, score: str, ragged: bool, config: BlockConfig, paged: int = 0) -> None:
        super().__init__(dtype, mask, score, ragged, config, paged)
        self.producers = producer_warps(paged)

    def mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        return mma_shapes(self.dtype, self.config)

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
        self.qk, self.pv = mmas
        if const_expr(not self.ragged):  # those that TMA has: others cost registers
            whole = Whole.of(*tensors[:2])
        allocator = SmemAllocator()
        barriers = allocator.allocate_array(cutlass.Int64, self.config.barriers)
        posted = allocator.allocate_tensor(Int32, cute.make_layout((len(self.work._fields), self.config.q_slots)), 16)
        joint = self.producers > 1
        told = allocator.allocate_tensor(Int32, cute.make_layout(1), TOLD_BYTES) if const_expr(joint) else None
        shared, value_bytes = self._shared_memory(allocator, layouts)
        *operands, so = shared
        copies = self._copies(atoms, tensors, shared, units, table)
        index = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_WARPGROUP - 1
        q_rings, k, v = self._rings(barriers, posted, copies, index, heads_per_kv_head=whole.heads // whole.kv_heads)

        turn = PingPong(index, self.config.consumers)
        store = OutputStore(self, copies[3], so, lse, whole.heads, whole.seqlen_q)
        bounds = Bounds(whole.seqlen_q, whole.seqlen_k, *sides)
        if const_expr(self.ragged):
            grid = RaggedGrid(counter, group_or_sequences, whole.heads, self.config.tile_m, bounds)
        else:
            q_tiles = cute.ceil_div(whole.seqlen_q, self.config.tile_m)
            grid = Grid((q_tiles, whole.heads, whole.batch, group_or_sequences), bounds, counter, base)
        attend, load = self._roles(
            (self, (q_rings[-1], k, v), turn, self._operands(*operands), store, grid, Logits(*logits), index),
            ((q_rings[:-1], k, v), self.config.lends, self.domain, grid),
        )
        if const_expr(joint):
            beside = told, self.config.consumers, self.producers
            load = TmaJointLoad((q_rings[:-1], k, v), self.config.lends, self.domain, grid, *beside)
        Cta(self.config, (*q_rings[:-1], k, v), turn, load, attend).run(value_bytes)

    def _roles(self, attend, load) -> tuple[WgmmaAttend, TmaLoad]:
        """From their arguments; `trace` has others."""
        return WgmmaAttend(*attend), TmaLoad(*load)

    def _shared_memory(self, allocator: SmemAllocator, layouts) -> tuple[list[cute.Tensor], cute.Pointer]:
        """The slots of Q, K and V, those that O leaves through, which are Q's or V's, and where V's begin."""
        config = self.config
        row = config.head_dim * ELEMENT_BYTES
        ways = (  # slots, and bytes from one to the next
            (config.q_slots, ROWS_PER_WARPGROUP * row),
            (config.stages, config.tile_n * row),
            (config.stages, config.value_slots.slot),
        )
        sizes = ways[0][0] * ways[0][1], ways[1][0] * ways[1][1], config.value_slots.bytes
        starts = [allocator.allocate(size, 1024) for size in sizes]
        leaving = 2 if config.lends else 0
        starts.append(starts[leaving])
        shared = [
            _slots(start, layout, slots, step // ELEMENT_BYTES, self.dtype)
            for start, layout, (slots, step) in zip(starts, layouts, (*ways, ways[leaving]), strict=True)
        ]
        return shared, starts[2]

    def _copies(self, atoms, tensors, shared, units, table) -> list[Copy] | list[RaggedCopy]:
        """Those of Q, K, V and O."""
        rows, keys, dims, value_dims = (
            ROWS_PER_WARPGROUP,
            self.config.tile_n,
            self.config.head_dim,
            self.config.value_dim,
        )
        by_rows, by_columns = (None, 0, None, None), (0, None, None, None)  # of (S, D, H, B); V is (D, S, H, B)
        cuts = (
            ((rows, dims), by_rows),
            ((keys, dims), by_rows),
            ((value_dims, keys), by_columns),
            ((rows, value_dims), by_rows),
        )
        if self.ragged:
            every = list(zip(atoms, shared, tensors, cuts, EXTENTS, units, strict=True))
            found = [RaggedCopy(*one) for one in every]
            if self.paged:
                found[1:3] = [PagedCopy(*one[:4], one[5], Table(*table), self.paged) for one in every[1:3]]
            return found
        copies = []
        for atom, tensor, slots, (tile, at) in zip(atoms, tensors, shared, cuts, strict=True):
            tiles = cute.group_modes(cute.local_tile(tensor, tile, at), 0, 2)
            one = cute.make_layout(1)  # CTA: no multicast
            copies.append(Copy(atom, *cpasync.tma_partition(atom, 0, one, cute.group_modes(slots, 0, 2), tiles)))
        return copies

    def _rings(self, barriers, posted, copies, index, heads_per_kv_head) -> tuple[list[QueryRing], TileRing, ValueRing]:
        """Those of every warpgroup's Q, and last that of warpgroup `index`; K's and V's."""
        config = self.config
        warps = config.consumers * WARPS_PER_WARPGROUP
        row_bytes, value_row_bytes = (dims * ELEMENT_BYTES for dims in (config.head_dim, config.value_dim))
        query_bytes = ROWS_PER_WARPGROUP * row_bytes
        q, k, v, _ = copies
        q_rings = [
            QueryRing(barriers, config.q_stages, query_bytes, q, posted, self.work, warpgroup, config.consumers)
            for warpgroup in (*range(config.consumers), index)
        ]
        k_barriers = barriers + 2 * config.q_slots
        v_barriers = k_barriers + 2 * config.stages
        k_ring = TileRing(k_barriers, config.stages, config.tile_n * row_bytes, warps, k, heads_per_kv_head)
        v_ring = ValueRing(v_barriers, config.stages, config.tile_n * value_row_bytes, warps, v, heads_per_kv_head)
        return q_rings, k_ring, v_ring

    def _operands(self, sq, sk, sv) -> tuple[wgmma.Operand, wgmma.Operand, wgmma.Operand]:
        rows, keys, dims = ROWS_PER_WARPGROUP, self.config.tile_n, self.config.head_dim
        v = wgmma.across_k(sv, keys, self.config.value_slots)
        return wgmma.along_k(sq, rows, dims), wgmma.along_k(sk, keys, dims), v


class Cta:
    """The roles of one CTA, and which warps play them: warpgroup 0 loads, the others attend."""

    def __init__(self, config: BlockConfig, rings, turn: PingPong, load: TmaLoad, attend: WgmmaAttend) -> None:
        self.config = config
        self.rings = rings
        self.turn = turn
        self.load = load
        self.attend = attend

    def init_barriers(self) -> None:
        for ring in self.rings:
            ring.init()
        cute.arch.mbarrier_init_fence()

    def fill_ones(self, start: cute.Pointer, thread: Int32) -> None:
        """The blocks of ones beside V, 16 bytes a thread and step."""
        slots, dtype = self.config.value_slots, self.attend.kernel.dtype
        ones = cute.make_rmem_tensor(4, Int32)
        ones.fill({cutlass.BFloat16: 0x3F803F80, cutlass.Float16: 0x3C003C00}[dtype])
        for at in slots.ones_at():
            words = cute.recast_ptr(start + at, dtype=Int32)
            block = cute.make_tensor(words, cute.make_layout((4, slots.block // 16), stride=(1, 4)))
            for first in range(0, slots.block // 16, self.config.threads):
                self.fill(ones, block, thread + first)

    @cute.jit
    def fill(self, ones: cute.Tensor, block: cute.Tensor, index: Int32):
        if index < block.shape[1]:
            cute.autovec_copy(ones, block[None, index])

    @cute.jit
    def run(self, value_bytes: cute.Pointer):
        """`value_bytes` is where the slots of V begin."""
        thread = cute.arch.thread_idx()[0]
        if thread == 0:
            self.init_barriers()
        self.fill_ones(value_bytes, thread)
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        warp_index = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp_index < WARPS_PER_WARPGROUP:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp_index < self.attend.kernel.producers:
                self.load.run()
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            if warp_index >= self.config.consumers * WARPS_PER_WARPGROUP:
                self.turn.seed()
            self.attend.run()


def _slots(start: cute.Pointer, one, slots: int, step: int, dtype) -> cute.Tensor:
    """Tiles in shared memory, `step` elements apart, from the layout of one."""
    layout = cute.make_layout((*one.outer.shape[:2], slots), stride=(*one.outer.stride[:2], step))
    return cute.make_tensor(cute.recast_ptr(start, one.inner, dtype=dtype), layout)
