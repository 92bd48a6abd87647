"""What paged attention has of its own on Hopper: rings that `cp.async` fills from pages, and the shares of the CTAs.

A producer warpgroup copies 16 bytes a thread and instruction, whatever the size of a page, and a ring's full barrier
completes when the copies of all its threads have landed. They are written by the generic proxy and read by wgmma, so
who waits for them also fences (PTX: async proxy).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from fmha.kernels.sm90.barriers import QueryRing, TmaRing
from fmha.kernels.sm90.listing import read
from schedules.decode import PagedRing
from schedules.domain import Ascending
from schedules.forward import Slot
from schedules.splits import Rows, Split, Splitter
from schedules.tiling import ELEMENT_BYTES, WARPGROUP, BlockConfig, swizzle_bytes

CHUNK = 8  # elements of 16 bytes
NO_PAGE = -1


class Place(NamedTuple):
    """Where elements of a tensor lie: an address, and strides in elements."""

    address: Int64
    outer: Int64  # of a batch entry, or of a page
    row: Int32  # of a query, or of a page's slot
    head: Int32
    chunk: Int32  # from 8 elements of a row to the next 8
    dims: Int32  # elements of a row: those of the tile behind them are zeros

    def at(self, outer: Int32, row: Int32, head: Int32, column: Int32) -> Int64:
        """The address of the 8 elements `column`."""
        inner = Int64(row) * self.row + Int64(head) * self.head + Int64(column) * self.chunk
        return self.address + (Int64(outer) * self.outer + inner) * ELEMENT_BYTES

    def inside(self, page: Int32, inner: Int32) -> Int64:
        """That of an element of a page, of which there are fewer than 2^31."""
        return self.address + (Int64(page) * self.outer + inner) * ELEMENT_BYTES


def swizzled(row: Int32, column: Int32, rows: int, width: int = 128) -> Int32:
    """The byte of a tile of `rows` rows where the 16 bytes `column` of one are: blocks of `width` bytes a row follow one
    another, and in each the chunks are permuted by the address bits from 128 up (PTX: swizzling modes)."""
    inside = width // 16
    at = column // inside * (rows * width) + row * width
    return at + ((column ^ (row * width // 128)) % inside) * 16


class Filled(TmaRing):
    """A ring that the threads of a warpgroup fill. `posting` is 1 where one more arrival says that a split is posted."""

    posting = 0

    def init(self) -> None:
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, WARPGROUP + self.posting)
            cute.arch.mbarrier_init(self.empty + stage, self.release_arrivals)

    def commit(self, slot: Slot) -> None:
        cute.arch.cp_async_mbarrier_arrive_noinc(self.full + slot.stage)

    def wait(self, slot: Slot) -> None:
        super().wait(slot)
        cute.arch.fence_view_async_shared()


class RowRing(Filled, PagedRing):
    """K or V, whose rows are `rows` keys of a tile."""

    def __init__(
        self, barriers, config: BlockConfig, dims: int, start: cute.Pointer, place: Place, pages: Pages
    ) -> None:
        """`dims` are those of the tile, `start` is where the slots begin."""
        tile_bytes = config.tile_n * dims * ELEMENT_BYTES
        super().__init__(barriers, config.stages, tile_bytes, WARPGROUP // 32)
        self.rows = config.tile_n
        self.columns = dims // CHUNK
        self.start = Int32(start.toint())
        self.place = place
        self.pages = pages

    def gather(self, slot: Slot, split: Split, position: int, pages: Int32) -> None:
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = thread % 32, thread // 32
        rows = self.rows // 4  # of a warp
        first_key = (split.tile + position) * self.rows + warp * rows
        head = split.head * self.place.head
        to = self.start + slot.stage * self.stage_bytes
        for step in range(rows * self.columns // 32):
            row, column = self.of(step * 32 + lane, rows)
            page = cute.arch.shuffle_sync(pages, row)
            at = ((first_key + row) & self.pages.page_mask) * self.place.row + column * self.place.chunk + head
            seen = (page != NO_PAGE) & (column * CHUNK < self.place.dims)
            copy_16(to + swizzled(warp * rows + row, column, self.rows), self.place.inside(page, at), whole(seen))

    def of(self, index: Int32, rows: int) -> tuple[Int32, Int32]:
        """Row and column of a warp's chunk: neighbours in memory for neighbouring threads."""
        if self.pages.by_columns:  # a page has all slots' first 8 elements, then all slots' next 8
            return index % rows, index // rows
        return index // self.columns, index % self.columns


class ColumnRing(Filled, PagedRing):
    """vLLM's V: rows are elements of the head dim, and columns 8 keys."""

    def __init__(self, barriers, config: BlockConfig, dims: int, start: cute.Pointer, place: Place, pages: Pages) -> None:
        super().__init__(barriers, config.stages, config.tile_n * dims * ELEMENT_BYTES, WARPGROUP // 32)
        self.rows, self.dims = config.tile_n, dims
        self.width = swizzle_bytes(config.tile_n)
        self.start = Int32(start.toint())
        self.place = place
        self.pages = pages

    def gather(self, slot: Slot, split: Split, position: int, pages: Int32) -> None:
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane, warp = thread % 32, thread // 32
        columns = self.rows // 4 // CHUNK  # of a warp
        first_key = (split.tile + position) * self.rows + warp * columns * CHUNK
        head = split.head * self.place.head
        to = self.start + slot.stage * self.stage_bytes
        for step in range(self.dims * columns // 32):
            index = step * 32 + lane
            row, column = index // columns, index % columns
            key = first_key + column * CHUNK
            page = cute.arch.shuffle_sync(pages, column * CHUNK)
            at = (key & self.pages.page_mask) + row * self.place.chunk + head
            seen = (page != NO_PAGE) & (row < self.place.dims)
            keys = cutlass.min(cutlass.max(split.end_key - key, 0), CHUNK)
            size = whole(seen) // 16 * keys * ELEMENT_BYTES
            place = swizzled(row, warp * columns + column, self.dims, self.width)
            copy_16(to + place, self.place.inside(page, at), size)


class SplitRing(Filled, QueryRing):
    """Q: 64 rows, which are queries of all heads that share a KV head, and the split that they are for."""

    posting = 1

    def __init__(self, barriers, config: BlockConfig, start: cute.Pointer, place: Place, posted, group: Int32) -> None:
        super().__init__(barriers, config.q_stages, config.tile_m * config.head_dim * ELEMENT_BYTES, None, posted,
                         Split, 0, 1)  # fmt: skip
        self.rows = config.tile_m
        self.columns = config.head_dim // CHUNK
        self.start = Int32(start.toint())
        self.q = place
        self.group = group

    def place(self, slot: Slot) -> Int32:
        return slot.stage

    @cute.jit
    def post(self, slot: Slot, split: Split):
        if cute.arch.thread_idx()[0] % WARPGROUP == 0:
            self.write(slot, split)

    def write(self, slot: Slot, split: Split) -> None:
        for i, field in enumerate(split):
            self.posted[i, slot.stage] = Int32(field)
        cute.arch.mbarrier_arrive(self.full + slot.stage)

    def load(self, slot: Slot, split: Split, tile: int) -> None:
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        to = self.start + slot.stage * self.stage_bytes
        for step in range(self.rows * self.columns // WARPGROUP):
            index = step * WARPGROUP + thread
            row, column = index // self.columns, index % self.columns
            packed = tile * self.rows + row
            token = packed // self.group
            head = split.head * self.group + packed - token * self.group
            seen = (token < split.seqlen_q) & (column * CHUNK < self.q.dims)
            address = self.q.at(split.entry, split.start_q + token, head, column)
            copy_16(to + swizzled(row, column, self.rows), address, whole(seen))

    def release(self, slot: Slot) -> None:
        cute.arch.mbarrier_arrive(self.empty + slot.stage)


class Pages:
    """Which page a key is in."""

    def __init__(self, tile_n: int, table: Int64, table_row: Int32, shift: Int32, by_columns: bool) -> None:
        self.tile_n = tile_n
        self.table = table
        self.table_row = table_row  # entries from a sequence to the next
        self.shift = shift  # log2 of a page's slots
        self.page_mask = (Int32(1) << shift) - 1
        self.by_columns = by_columns

    @cute.jit
    def look_up(self, split: Split, position: Int32) -> Int32:
        """The page of a key that this lane has of its warp's; `NO_PAGE` if no query of the Q tile sees it."""
        found = Int32(NO_PAGE)
        lane = cute.arch.lane_idx()
        warp = cute.arch.thread_idx()[0] % WARPGROUP // 32
        rows = self.tile_n // 4
        if position < split.end and lane < rows:
            key = (split.tile + position) * self.tile_n + warp * rows + lane
            # A column of 8 keys is copied if one of them is seen. They are all in one page.
            last = key | (CHUNK - 1) if const_expr(self.by_columns) else key
            if last >= split.first_key and key < split.end_key:
                found = read(self.table, split.batch * self.table_row + (key >> self.shift))
        return found


class WarpSplitter(Splitter):
    """All lanes of a warp together, 32 sequences at a time."""

    def __init__(self, domain, tile_m: int, numbers, seq_lens: Int64, cu_seqlens_q: Int64) -> None:
        self.domain, self.tile_m = domain, tile_m
        self.sequences, self.tokens, self.most_keys, self.heads, self.group, *rest = numbers
        self.left, self.right, self.splits = rest
        self.ctas = cute.arch.grid_dim()[0]
        self.cta = cute.arch.block_idx()[0]
        self.seq_lens, self.cu_seqlens_q = seq_lens, cu_seqlens_q

    @cute.jit
    def rows(self, batch: Int32) -> Rows:
        """As `schedules.simulate_decode.Batch.rows`. Whatever the numbers are, nothing lies outside of q."""
        entry, start, end, keys = batch, Int32(0), self.tokens, Int32(0)
        packed = self.cu_seqlens_q != 0
        sequences = self.sequences
        if packed:
            sequences = sequences - 2
            entry = Int32(0)
            start = read(self.cu_seqlens_q, cutlass.min(batch, sequences)) if batch != sequences else Int32(0)
            behind = batch + 1 if batch < sequences else Int32(0)
            end = read(self.cu_seqlens_q, behind) if batch <= sequences else self.tokens
            start = cutlass.min(cutlass.max(start, 0), self.tokens)
            end = cutlass.min(cutlass.max(end, start), self.tokens)
        if batch < sequences:
            keys = cutlass.min(cutlass.max(read(self.seq_lens, batch), 0), self.most_keys)
        queries = end - start if batch < sequences else Int32(0)
        return Rows(entry, start, end - start, queries, keys)

    @cute.jit
    def total(self) -> Int32:
        lane = cute.arch.lane_idx()
        units = Int32(0)
        for first in cutlass.range(0, self.sequences, 32, unroll=1):
            if first + lane < self.sequences:
                units = units + self.units(first + lane)
        for distance in cutlass.range_constexpr(5):
            units = units + cute.arch.shuffle_sync_bfly(units, offset=1 << distance)
        return units

    @cute.jit
    def seek(self, unit: Int32) -> tuple[Int32, Int32]:
        lane = cute.arch.lane_idx()
        batch, base, before = Int32(0), Int32(0), Int32(0)
        for first in cutlass.range(0, self.sequences, 32, unroll=1):
            if before <= unit:
                units = Int32(0)
                if first + lane < self.sequences:
                    units = self.units(first + lane)
                end = units
                for step in cutlass.range_constexpr(5):
                    other = cute.arch.shuffle_sync_up(end, offset=1 << step, mask_and_clamp=0)
                    end = end + (other if lane >= 1 << step else Int32(0))
                end = end + before
                passed = cute.arch.popc(cute.arch.vote_ballot_sync(end <= unit))
                batch = first + passed if passed < 32 else batch
                start = cute.arch.shuffle_sync(end - units, passed % 32)
                base = start if passed < 32 else base
                before = cute.arch.shuffle_sync(end, 31)
        return batch, base


def whole(seen: Boolean) -> Int32:
    """Bytes to copy of 16: all or none."""
    return Boolean(seen).to(Int32) * 16


@dsl_user_op
def copy_16(to: Int32, address: Int64, size: Int32, *, loc=None, ip=None) -> None:
    """16 bytes, asynchronous, past L1: the first `size` from `address`, and zeros. With a size of 0 nothing is read
    (PTX: cp.async)."""
    llvm.inline_asm(
        None,
        [value.ir_value(loc=loc, ip=ip) for value in (Int32(to), Int64(address), Int32(size))],
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        "r,l,r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
