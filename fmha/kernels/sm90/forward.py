"""The forward kernel for Hopper: the roles of `schedules.forward` lowered onto TMA, wgmma and mbarriers.

    sizes                    the address on the host of `fmha.jit.arguments.SIZES`, an int64 each
    q, o    [B, Sq, Hq, D]   16-bit, by address; any strides whose last is 1 and whose others are multiples of 16 bytes
    k, v    [B, Sk, Hkv, D]  likewise
    lse                      the address of a contiguous [B, Hq, Sq] of float32, natural logarithm; 0 for none. Kernels
                             with columns of ones write none: their row sums are of rounded weights
    counter                  the address of an int32 that is `base` when the kernel starts and grows by the work tiles

The CTAs, one a multiprocessor, compute work tiles of `tile_m` queries of one head until a counter says that there are
no more. Batch, lengths, head counts, strides, scale and the width of the last tile are run-time values; a head dim
below that of the tile is filled up with zeros by TMA and clipped when O is stored.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warp, warpgroup
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum

from fmha.jit.arguments import SHAPES, SIZES, STRIDE_ELEMENTS
from fmha.kernels.sm90 import softmax, wgmma
from fmha.kernels.sm90.barriers import Copy, PingPong, QueryRing, TileRing, ValueRing
from schedules.domain import DOMAINS, Visits
from schedules.forward import FLOOR, LARGE_PART, Attend, Load, Slot
from schedules.tiling import ELEMENT_BYTES, ROWS_PER_WARPGROUP, WARPGROUP, BlockConfig
from schedules.work import Work, work_of

LN2 = math.log(2.0)
WARPS_PER_WARPGROUP = WARPGROUP // 32


class TmaLoad(Load):
    """The producer warp. The integer at address `counter` counts the work tiles taken, from `base` on."""

    def __init__(self, rings, lends, domain, lengths, grid, counter, base) -> None:
        self.q, self.k, self.v = rings  # q: a ring for each warpgroup
        self.lends = lends
        self.domain = domain
        self.seqlen_q, self.seqlen_k = lengths
        self.grid = grid  # (q_tiles, heads, batches, group)
        self.counter = counter
        self.base = base
        self.lane = cute.arch.lane_idx()

    def first_work(self) -> Work:
        return work_of(cute.arch.block_idx()[0], *self.grid)

    @cute.jit
    def ask(self):
        asked = Int32(0)
        if self.lane == 0:
            asked = self.count()
        return asked

    def count(self) -> Int32:
        counter = cute.make_ptr(Int32, self.counter, cute.AddressSpace.gmem, assumed_align=4)
        return Int32(cute.arch.atomic_add(counter.llvm_ptr, Int32(1)))

    def next_work(self, asked: Int32) -> Work:
        taken = cute.arch.shuffle_sync(asked, 0) - self.base
        return work_of(cute.arch.grid_dim()[0] + taken, *self.grid)

    def visits(self, work: Work) -> Visits:
        return self.domain.visits(work.q_tile, self.seqlen_q, self.seqlen_k)


class WgmmaAttend(Attend):
    """A consumer warpgroup. Register tensors: `s` (64 x tile_n), `weights` likewise, `p` in pairs, `o` (64 x head_dim,
    and behind it the row sums, where the PV MMA makes them), `reference` and `row_sum`.

    An optimistic one takes the references that it finds, and then looks at the highest exponent bits of P. That they
    are set should be rare, and yet no weight that is a large part of its row's sum should be without: rounded as P
    rounds it, it makes the error twice as large as where references are maxima and the largest weight is 1, exactly.
    """

    def __init__(self, kernel, rings, turn, operands, store, lengths, scale_log2, index) -> None:
        self.kernel = kernel
        self.q, self.k, self.v = rings
        self.turn = turn
        self.sq, self.sk, self.sv = operands
        self.store = store
        self.domain = kernel.domain
        self.seqlen_q, self.seqlen_k = lengths
        self.scale_log2 = scale_log2
        self.index = index
        self.thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.lane = cute.arch.lane_idx()

        config = kernel.config
        self.s = kernel.qk.make_fragment_C(kernel.qk.partition_shape_C((ROWS_PER_WARPGROUP, config.tile_n)))
        self.o = cute.make_rmem_tensor((config.head_dim + config.ones) // 2, Float32)
        self.p = cute.make_rmem_tensor(config.tile_n // 4, Int32)
        self.optimistic, self.lends = config.ones > 0, config.lends
        self.weights = cute.make_rmem_tensor(config.tile_n // 2, Float32) if self.optimistic else self.s
        self.reference = cute.make_rmem_tensor(softmax.ROWS, Float32)  # log2, scaled
        self.grown = cute.make_rmem_tensor(softmax.ROWS, Float32)  # the same, this tile included
        self.row_sum = cute.make_rmem_tensor(softmax.ROWS, Float32)  # of this thread's columns
        self.top = cute.make_rmem_tensor(softmax.ROWS, Float32)  # this thread's largest weight of a row in the tile
        self.mended = cute.make_rmem_tensor(1, Int32)  # tiles of the work tile, by this warp

    def row(self, work: Work, r: int) -> Int32:
        """The query that row `r` of this thread is."""
        tile = work.q_tile * self.kernel.config.tile_m + self.index * ROWS_PER_WARPGROUP
        return tile + (self.thread // 32) * 16 + self.lane // 4 + 8 * r

    def visits(self, work: Work) -> Visits:
        return self.domain.visits(work.q_tile, self.seqlen_q, self.seqlen_k)

    def start(self) -> None:
        self.o.fill(0.0)
        self.row_sum.fill(0.0)
        self.mended.fill(0)
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

    def mask(self, work: Work, tile: int) -> None:
        start = tile * self.kernel.config.tile_n
        limits = [self.domain.hi(self.row(work, r), self.seqlen_q, self.seqlen_k) - start for r in range(softmax.ROWS)]
        softmax.mask_right(self.s, limits, self.lane)

    def needed(self, r: int) -> Float32:
        """The reference that a row would get for the present tile."""
        found = softmax.quad_reduce(self.largest_score(r), cute.arch.fmax) * self.scale_log2
        return found - softmax.LIMIT if self.optimistic else found

    def largest_score(self, r: int) -> Float32:
        """This thread's of a row."""
        return softmax.row_reduce(self.s, r, cute.arch.fmax)

    def row_max(self) -> Boolean:
        grew = None
        for r in range(softmax.ROWS):
            self.grown[r] = cute.arch.fmax(self.needed(r), self.reference[r])
            row_grew = self.grown[r] > self.reference[r] + self.kernel.config.rescale_above
            grew = row_grew if grew is None else softmax.either(grew, row_grew)
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
        for r in range(softmax.ROWS):
            for column in range(softmax.columns(self.s)):
                at = softmax.element(r, column)
                self.weights[at] = cute.math.exp2(self.s[at] * self.scale_log2 - self.reference[r], fastmath=True)
        if not self.optimistic:
            for r in range(softmax.ROWS):
                self.row_sum[r] = self.row_sum[r] + softmax.row_reduce(self.weights, r, softmax.add)

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
            self.p[i] = softmax.multiply_pair(self.p[i], factors, self.kernel.dtype)

    def outgrown(self) -> Boolean:
        return cute.arch.vote_any_sync(softmax.past_limit(self.p))

    @cute.jit
    def mend(self, tile: int):
        self.mended[0] = self.mended[0] + 1
        for r in cutlass.range_constexpr(softmax.ROWS):
            largest = self.largest_score(r) * self.scale_log2 - self.reference[r]
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
        ratio = softmax.select(top > total * LARGE_PART, rounded * cute.arch.rcp_approx(top), Float32(1.0))
        grows = self.mended[0] > softmax.MENDED_EXACTLY
        ahead = softmax.select(grows, Float32(2.0 ** softmax.AHEAD[self.kernel.dtype]), Float32(1.0))
        steps = self.steps(top * ahead, total)
        self.lower(r, steps)
        self.reference[r] = self.reference[r] - cute.math.log2(ratio, fastmath=True)
        self.scale_o(r, ratio * softmax.power_of_2(-steps))

    def total(self, r: int) -> Float32:
        """The sum of a row."""
        if self.optimistic:
            return self.o[softmax.element(r, self.kernel.config.head_dim // 4)]
        return softmax.quad_reduce(self.row_sum[r], softmax.add)

    def normalise(self, work: Work) -> None:
        for r in range(softmax.ROWS):
            row, total = self.row(work, r), self.total(r)
            blind = self.domain.hi(row, self.seqlen_q, self.seqlen_k) <= 0
            inverse = cute.arch.rcp_approx(total)
            for column in range(self.kernel.config.head_dim // 4):
                at = softmax.element(r, column)
                self.o[at] = softmax.select(blind, Float32(0.0), self.o[at] * inverse)
            if not self.optimistic:
                lse = (self.reference[r] + cute.math.log2(total, fastmath=True)) * LN2
                self.store.lse(work, row, softmax.select(blind, Float32(-Float32.inf), lse), self.lane)

    def o_place(self, slot: Slot) -> Int32:
        """The slot that O leaves through, among V's or Q's."""
        return slot.stage if self.lends else self.q.place(slot)

    def stage_o(self, slot: Slot) -> None:
        pv = self.kernel.pv
        shape = pv.partition_shape_C((ROWS_PER_WARPGROUP, self.kernel.config.head_dim))
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

    def __init__(self, kernel: ForwardKernel, copy: Copy, so: cute.Tensor, lse: Int64, heads: Int32, rows: Int32):
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
            cute.copy(self.copy.atom, self.copy.shared[None, place], self.copy.tiles[None, tile, work.head, work.batch])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def drain(self, thread: Int32):
        if thread < 32:
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def lse(self, work: Work, row: Int32, value: Float32, lane: Int32):
        if lane % 4 == 0 and row < self.rows and self.lse_address != 0:
            self.write_lse(work, row, value)

    def write_lse(self, work: Work, row: Int32, value: Float32) -> None:
        line = Int64(work.batch) * self.heads + work.head
        lse = cute.make_ptr(Float32, self.lse_address, cute.AddressSpace.gmem, assumed_align=4)
        cute.make_tensor(lse + (line * self.rows + row), cute.make_layout(1))[0] = value


class ForwardKernel:
    """Compiles to one cubin for (dtype, mask, block config)."""

    def __init__(self, dtype: type[cutlass.Numeric], mask: str, config: BlockConfig) -> None:
        self.dtype = dtype
        self.config = config
        self.domain = DOMAINS[mask](config.tile_m, config.tile_n)

    def _mma_shapes(self) -> None:
        """S = Q K^T from shared memory; O += P V with P from registers: whose registers hold which elements."""
        rows, k_major, mn_major = ROWS_PER_WARPGROUP, OperandMajorMode.K, OperandMajorMode.MN

        def mma(columns, v_major, source):
            one = (1, 1, 1)  # a warpgroup each, side by side
            return sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, k_major, v_major, Float32, one, (rows, columns), source
            )

        self.qk = mma(self.config.tile_n, k_major, warpgroup.OperandSource.SMEM)
        self.pv = mma(self.config.head_dim, mn_major, warpgroup.OperandSource.RMEM)

    def _arguments(self, sizes: Int64, addresses) -> tuple[list[cute.Tensor], Int32, Int32]:
        """Tensors at their addresses, and the two numbers that lie behind their sizes on the host."""
        at = cute.make_ptr(Int64, sizes, cute.AddressSpace.generic, assumed_align=8)
        numbers = cute.make_tensor(at, cute.make_layout(len(SIZES)))
        found = {name: numbers[i] for i, name in enumerate(SIZES)}
        tensors = []
        for name, address in zip("qkvo", addresses, strict=True):
            shape = [Int32(found[size]) for size in SHAPES[name]]
            strides = [cute.assume(found[f"{name} {mode}"], divby=STRIDE_ELEMENTS) for mode in ("batch", "row", "head")]
            pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=16)
            tensors.append(cute.make_tensor(pointer, cute.make_layout(tuple(shape), stride=(*strides, 1))))
        return tensors, Int32(found["head_group"]), Int32(found["multiprocessors"])

    @cute.jit
    def __call__(
        self,
        sizes: Int64,
        q: Int64,
        k: Int64,
        v: Int64,
        o: Int64,
        lse: Int64,
        scale_log2: Float32,
        counter: Int64,
        base: Int32,
        stream,
    ):
        config = self.config
        rows, keys, dims = ROWS_PER_WARPGROUP, config.tile_n, config.head_dim
        self._mma_shapes()
        (q, k, v, o), head_group, multiprocessors = self._arguments(sizes, (q, k, v, o))
        q, k, v, o = [
            _modes(t, order)
            for t, order in ((q, (1, 3, 2, 0)), (k, (1, 3, 2, 0)), (v, (3, 1, 2, 0)), (o, (1, 3, 2, 0)))
        ]
        sq_layout = sm90.make_smem_layout_a(
            LayoutEnum.ROW_MAJOR, (rows, keys, dims), self.dtype, config.q_stages * config.consumers
        )
        sk_layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (rows, keys, dims), self.dtype, config.stages)
        sv_layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, (rows, dims, keys), self.dtype, 1)

        load, save = cpasync.CopyBulkTensorTileG2SOp(), cpasync.CopyBulkTensorTileS2GOp()
        stage = (None, None, 0)
        q_atom, q_tma = cpasync.make_tiled_tma_atom(load, q, cute.slice_(sq_layout, stage), (rows, dims))
        k_atom, k_tma = cpasync.make_tiled_tma_atom(load, k, cute.slice_(sk_layout, stage), (keys, dims))
        v_atom, v_tma = cpasync.make_tiled_tma_atom(load, v, cute.slice_(sv_layout, stage), (dims, keys))
        o_atom, o_tma = cpasync.make_tiled_tma_atom(save, o, cute.slice_(sq_layout, stage), (rows, dims))

        work_tiles = cute.ceil_div(q.shape[0], config.tile_m) * q.shape[2] * q.shape[3]
        self.kernel(
            (q_atom, k_atom, v_atom, o_atom),
            (q_tma, k_tma, v_tma, o_tma),
            (sq_layout, sk_layout, sv_layout),
            (self.qk, self.pv),
            lse,
            scale_log2,
            head_group,
            counter,
            base,
        ).launch(
            grid=(cutlass.min(work_tiles, multiprocessors), 1, 1),
            block=(config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        atoms,
        tensors,
        layouts,
        mmas,
        lse: Int64,
        scale_log2: Float32,
        head_group: Int32,
        counter: Int64,
        base: Int32,
    ):
        self.qk, self.pv = mmas
        mq, mk, _, _ = tensors  # (S, D, H, B)
        allocator = SmemAllocator()
        barriers = allocator.allocate_array(cutlass.Int64, self.config.barriers)
        posted = allocator.allocate_tensor(Int32, cute.make_layout((len(Work._fields), self.config.q_slots)), 16)
        shared = [allocator.allocate_tensor(self.dtype, layout.outer, 1024, layout.inner) for layout in layouts[:2]]
        value_bytes = allocator.allocate(self.config.value_slots.bytes, 1024)
        step = self.config.value_slots.slot // ELEMENT_BYTES
        shared.append(_slots(value_bytes, layouts[2], self.config.stages, step, self.dtype))
        so = _slots(value_bytes, layouts[0], self.config.stages, step, self.dtype) if self.config.lends else shared[0]
        copies = self._copies(atoms, tensors, (*shared, so))
        index = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // WARPS_PER_WARPGROUP - 1
        q_rings, k, v = self._rings(barriers, posted, copies, index, heads_per_kv_head=mq.shape[2] // mk.shape[2])

        turn = PingPong(index, self.config.consumers)
        store = OutputStore(self, copies[3], so, lse, mq.shape[2], mq.shape[0])
        lengths = (mq.shape[0], mk.shape[0])
        grid = (cute.ceil_div(mq.shape[0], self.config.tile_m), mq.shape[2], mq.shape[3], head_group)
        attend, load = self._roles(
            (self, (q_rings[-1], k, v), turn, self._operands(*shared), store, lengths, scale_log2, index),
            ((q_rings[:-1], k, v), self.config.lends, self.domain, lengths, grid, counter, base),
        )
        Cta(self.config, (*q_rings[:-1], k, v), turn, load, attend).run(value_bytes)

    def _roles(self, attend, load) -> tuple[WgmmaAttend, TmaLoad]:
        """From their arguments; `trace` has others."""
        return WgmmaAttend(*attend), TmaLoad(*load)

    def _copies(self, atoms, tensors, shared) -> list[Copy]:
        """Those of Q, K, V and O."""
        rows, keys, dims = ROWS_PER_WARPGROUP, self.config.tile_n, self.config.head_dim
        by_rows = (None, 0, None, None)  # of (S, D, H, B); V is (D, S, H, B)
        cuts = (((rows, dims), by_rows), ((keys, dims), by_rows), ((dims, keys), (0, None, None, None)))
        copies = []
        for atom, tensor, slots, (tile, at) in zip(atoms, tensors, shared, (*cuts, cuts[0]), strict=True):
            tiles = cute.group_modes(cute.local_tile(tensor, tile, at), 0, 2)
            one = cute.make_layout(1)  # CTA: no multicast
            copies.append(Copy(atom, *cpasync.tma_partition(atom, 0, one, cute.group_modes(slots, 0, 2), tiles)))
        return copies

    def _rings(self, barriers, posted, copies, index, heads_per_kv_head) -> tuple[list[QueryRing], TileRing, ValueRing]:
        """Those of every warpgroup's Q, and last that of warpgroup `index`; K's and V's."""
        config = self.config
        warps = config.consumers * WARPS_PER_WARPGROUP
        row_bytes = config.head_dim * self.dtype.width // 8
        q, k, v, _ = copies
        q_rings = [
            QueryRing(barriers, config.q_stages, ROWS_PER_WARPGROUP * row_bytes, q, posted, warpgroup, config.consumers)
            for warpgroup in (*range(config.consumers), index)
        ]
        k_barriers = barriers + 2 * config.q_slots
        v_barriers = k_barriers + 2 * config.stages
        k_ring = TileRing(k_barriers, config.stages, config.tile_n * row_bytes, warps, k, heads_per_kv_head)
        v_ring = ValueRing(v_barriers, config.stages, config.tile_n * row_bytes, warps, v, heads_per_kv_head)
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
            if warp_index == 0:
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


def _modes(tensor: cute.Tensor, order: tuple[int, ...]) -> cute.Tensor:
    """The same tensor with its modes in another order."""
    return cute.make_tensor(tensor.iterator, cute.select(tensor.layout, mode=list(order)))
