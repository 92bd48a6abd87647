"""What paged attention has of its own: rings that `cp.async` fills from pages, and the shares of the CTAs.

A producer warpgroup copies 16 bytes a thread and instruction, whatever the size of a page, and a ring's full barrier
completes when the copies of all its threads have landed. They are written by the generic proxy and read by wgmma, so
who waits for them also fences (PTX: async proxy).
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import dsl_user_op

from fmha.kernels.common.memory import read
from fmha.kernels.common.rings import QueryRing, TmaRing
from schedules.decode import PagedRing
from schedules.forward import Slot
from schedules.splits import MAX_UNITS, Line, Rows, Split, Splitter
from schedules.tiling import ELEMENT_BYTES, WARPGROUP, BlockConfig

CHUNK = 8  # elements of 16 bytes
VALUE_SWIZZLE = 32  # bytes: 16 of vLLM's values, which are as many as one MMA multiplies along
NO_PAGE = -1
GRANULE = 16  # keys, that are looked up together if a page has as many
LINE_WORDS = 32  # int32 of a line of L2
PREFETCHED = 1024  # lines of a page table


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
    """The byte of a tile of `rows` rows where the 16 bytes `column` of one are: blocks of `width` bytes a row follow
    one another, and in each the chunks are permuted by the address bits from 128 up (PTX: swizzling modes)."""
    inside = width // 16
    at = column // inside * (rows * width) + row * width
    return at + ((column ^ (row * width // 128)) % inside) * 16


def interleaved(row: Int32, column: Int32, rows: int) -> Int32:
    """The same without a swizzle, all rows' first 16 bytes, then all rows' next: to write them there where neighbours
    in memory are the same 16 bytes of neighbouring rows takes two thirds of the time."""
    return (column * rows + row) * 16


class Filled(TmaRing):
    """A ring that the threads of a warpgroup fill. `posting` is 1 where one more arrival says what was posted."""

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


class TileRing(Filled, PagedRing):
    """K or V. A warp copies a quarter of the keys of a tile, 16 bytes a lane and step.

    Where every key of a tile is seen and all `GRANULE` keys of a granule are in one page, its addresses are that of its
    page and a step from one copy to the next; otherwise each copy works its own out.
    """

    blocks = 1  # of a group, each with steps of its own

    def __init__(
        self, barriers, config: BlockConfig, dims: int, start: cute.Pointer, place: Place, pages: Pages
    ) -> None:
        """`dims` are those of the tile, `start` is where the slots begin."""
        super().__init__(barriers, config.stages, config.tile_n * dims * ELEMENT_BYTES, WARPGROUP // 32)
        self.keys = config.tile_n
        self.warp_keys = config.tile_n // 4
        self.group = min(GRANULE, self.warp_keys)
        self.dims = dims
        self.start = Int32(start.toint())
        self.place = place
        self.pages = pages
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        self.lane, self.warp = thread % 32, thread // 32

    @cute.jit
    def gather(self, slot: Slot, split: Split, position: Int32, pages: Window):
        first = (split.tile + position) * self.keys
        whole_groups = self.pages.page_mask >= self.group - 1
        if first >= split.first_key and first + self.keys <= split.end_key and whole_groups:
            self.copy_groups(slot, split, first, pages)
        else:
            self.copy_chunks(slot, split, first, pages)

    def copy_groups(self, slot: Slot, split: Split, first: Int32, pages: Window) -> None:
        to = self.start + slot.stage * self.stage_bytes
        steps = self.group * self.dims // CHUNK // 32
        for group in range(self.warp_keys // self.group):
            page = self.pages.of(pages, group * self.group)
            inside = (first + self.warp * self.warp_keys + group * self.group) & self.pages.page_mask
            address = None
            for step in range(steps):
                row, column = self.of(step * 32 + self.lane, self.group)
                if step % (steps // self.blocks) == 0:
                    address = self.place.inside(page, self.offset(inside, row, column) + split.head * self.place.head)
                size = whole(self.has(row, column))
                copy_16(to + self.slot_byte(group * self.group, row, column), address, size)
                address = address + Int64(self.step(self.group) * ELEMENT_BYTES)

    def copy_chunks(self, slot: Slot, split: Split, first: Int32, pages: Window) -> None:
        to = self.start + slot.stage * self.stage_bytes
        for step in range(self.warp_keys * self.dims // CHUNK // 32):
            row, column = self.of(step * 32 + self.lane, self.warp_keys)
            key = self.key(row, column)
            page = self.pages.of(pages, key)
            key = first + self.warp * self.warp_keys + key
            at = self.offset(key & self.pages.page_mask, row, column, key_is_row=True) + split.head * self.place.head
            seen = (page != NO_PAGE) & self.has(row, column)
            size = whole(seen) // 16 * self.bytes_of(split.first_key - key, split.end_key - key)
            copy_16(to + self.slot_byte(0, row, column), self.place.inside(page, at), size)


class RowRing(TileRing):
    """K or V, whose rows are keys."""

    def __init__(
        self, barriers, config: BlockConfig, dims: int, start: cute.Pointer, place: Place, pages: Pages
    ) -> None:
        super().__init__(barriers, config, dims, start, place, pages)
        self.columns = dims // CHUNK  # of a block, of which a row's lanes begin with the first
        if not pages.by_columns and 32 % self.columns:
            self.columns = 128 // ELEMENT_BYTES // CHUNK
            self.blocks = dims // CHUNK // self.columns

    def of(self, index: Int32, rows: int) -> tuple[Int32, Int32]:
        """Row and column of a warp's chunk: neighbours in memory for neighbouring threads."""
        if self.pages.by_columns:  # a page has all slots' first 8 elements, then all slots' next 8
            return index % rows, index // rows
        block = index // (rows * self.columns)
        return index // self.columns - block * rows, block * self.columns + index % self.columns

    def key(self, row: Int32, column: Int32) -> Int32:
        return row

    def has(self, row: Int32, column: Int32) -> Boolean:
        return column * CHUNK < self.place.dims

    def bytes_of(self, before: Int32, behind: Int32) -> Int32:
        return whole((before <= 0) & (behind > 0))

    def offset(self, inside: Int32, row: Int32, column: Int32, key_is_row: bool = False) -> Int32:
        """In a page, of the chunk that is `row` slots behind slot `inside`, or, with `key_is_row`, in that slot."""
        return (inside if key_is_row else inside + row) * self.place.row + column * self.place.chunk

    def step(self, rows: int) -> Int32:
        """From a copy to the next one, in elements."""
        if self.pages.by_columns:
            return 32 // rows * self.place.chunk
        return 32 // self.columns * self.place.row

    def slot_byte(self, before: int, row: Int32, column: Int32) -> Int32:
        key = self.warp * self.warp_keys + before + row
        return interleaved(key, column, self.keys) if self.pages.by_columns else swizzled(key, column, self.keys)


class ColumnRing(TileRing):
    """vLLM's V: rows are elements of the head dim, and columns 8 keys, all of a page."""

    def of(self, index: Int32, keys: int) -> tuple[Int32, Int32]:
        columns = keys // CHUNK
        return index // columns, index % columns

    def key(self, row: Int32, column: Int32) -> Int32:
        return column * CHUNK

    def has(self, row: Int32, column: Int32) -> Boolean:
        return row < self.place.dims

    def bytes_of(self, before: Int32, behind: Int32) -> Int32:
        """Of 8 keys, of which `behind` are there."""
        return cutlass.min(cutlass.max(behind, 0), CHUNK) * ELEMENT_BYTES

    def offset(self, inside: Int32, row: Int32, column: Int32, key_is_row: bool = False) -> Int32:
        return (inside if key_is_row else inside + column * CHUNK) + row * self.place.chunk

    def step(self, keys: int) -> Int32:
        return 32 * CHUNK // keys * self.place.chunk

    def slot_byte(self, before: int, row: Int32, column: Int32) -> Int32:
        place = (self.warp * self.warp_keys + before) // CHUNK + column
        return swizzled(row, place, self.dims, VALUE_SWIZZLE)


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
        rows = split.seqlen_q * self.group - tile * self.rows
        for step in range(self.rows * self.columns // WARPGROUP):
            self.load_step(slot, split, tile, step, rows)

    @cute.jit
    def load_step(self, slot: Slot, split: Split, tile: Int32, step: cutlass.Constexpr, rows: Int32):
        """As much as the warpgroup copies at a time. Rows behind the last one are zeros."""
        if step * WARPGROUP // self.columns < rows:
            self.copy_rows(slot, split, tile, step, rows)
        else:
            self.clear_rows(slot, step)

    def copy_rows(self, slot: Slot, split: Split, tile: Int32, step: int, rows: Int32) -> None:
        row, column, to = self.at(slot, step)
        packed = tile * self.rows + row
        token = packed // self.group
        head = split.head * self.group + packed - token * self.group
        seen = (row < rows) & (column * CHUNK < self.q.dims)
        copy_16(to, self.q.at(split.entry, split.start_q + token, head, column), whole(seen))

    def clear_rows(self, slot: Slot, step: int) -> None:
        copy_16(self.at(slot, step)[2], self.q.address, Int32(0))

    def at(self, slot: Slot, step: int) -> tuple[Int32, Int32, Int32]:
        """Row and column of this thread's chunk, and where it goes."""
        index = cute.arch.thread_idx()[0] % WARPGROUP + step * WARPGROUP
        row, column = index // self.columns, index % self.columns
        return row, column, self.start + slot.stage * self.stage_bytes + swizzled(row, column, self.rows)

    def release(self, slot: Slot) -> None:
        cute.arch.mbarrier_arrive(self.empty + slot.stage)


class Window(NamedTuple):
    """What a lane knows of the page table: an entry of the tiles that are copied now, and one of those to come."""

    now: Int32
    ahead: Int32
    at: Int32  # the lane that has the first entry of the present tile


class Pages:
    """Which page a key is in. A warp copies some keys of every tile, in granules that are within a page, and its lanes
    have the entries of 32 granules each time: of up to 32 tiles."""

    def __init__(self, tile_n: int, table: Int64, table_row: Int32, shift: Int32, by_columns: bool) -> None:
        self.tile_n = tile_n
        self.warp_keys = tile_n // 4
        self.granule = min(GRANULE, self.warp_keys)  # at most
        self.table = table
        self.table_row = table_row  # entries from a sequence to the next
        self.shift = shift  # log2 of a page's slots
        self.page_mask = (Int32(1) << shift) - 1
        self.by_columns = by_columns
        self.granule_shift = cutlass.min(shift, self.granule.bit_length() - 1)
        self.each = self.warp_keys >> self.granule_shift  # granules of a warp's in a tile
        self.each_shift = (self.warp_keys.bit_length() - 1) - self.granule_shift

    def open(self, split: Split) -> Window:
        tiles = Int32(32) >> self.each_shift
        return Window(self.read(split, split.begin), self.read(split, split.begin + tiles), Int32(0))

    @cute.jit
    def turn(self, split: Split, position: Int32, window: Window) -> Window:
        now, ahead, at = window.now, window.ahead, window.at + self.each
        if at == 32:
            tiles = Int32(32) >> self.each_shift
            now, ahead, at = ahead, self.read(split, position + tiles), Int32(0)
        return Window(now, ahead, at)

    def of(self, window: Window, key: Int32) -> Int32:
        """The page of the warp's key number `key` of the tile."""
        return cute.arch.shuffle_sync(window.now, window.at + (key >> self.granule_shift))

    @cute.jit
    def read(self, split: Split, position: Int32) -> Int32:
        """This lane's entry of the 32 from the tile at `position` on; `NO_PAGE` if nobody sees a key of it."""
        found = Int32(NO_PAGE)
        lane = cute.arch.lane_idx()
        warp = cute.arch.thread_idx()[0] % WARPGROUP // 32
        tile = position + (lane >> self.each_shift)
        granule = lane & (self.each - 1)
        key = (split.tile + tile) * self.tile_n + warp * self.warp_keys + (granule << self.granule_shift)
        behind = key + (Int32(1) << self.granule_shift)
        if tile < split.end and behind > split.first_key and key < split.end_key:
            found = read(self.table, split.batch * self.table_row + (key >> self.shift))
        return found

    @cute.jit
    def prefetch(self, sequences: Int32, seq_lens: Int64):
        """The lengths, and a small table of pages, come into L2 before they are asked for: a line a thread, by all
        threads of all CTAs together. Who writes them may still be running; that is no matter in L2."""
        line = cute.arch.block_idx()[0] * cute.arch.block_dim()[0] + cute.arch.thread_idx()[0]
        lines = (sequences * self.table_row + LINE_WORDS - 1) // LINE_WORDS
        if line < lines and lines <= PREFETCHED:
            prefetch(self.table + Int64(line) * (4 * LINE_WORDS))
        if line < (sequences + LINE_WORDS - 1) // LINE_WORDS:
            prefetch(seq_lens + Int64(line) * (4 * LINE_WORDS))


class WarpSplitter(Splitter):
    """All lanes of a warp together, 32 sequences at a time."""

    def __init__(self, domain, tile_m: int, numbers, seq_lens: Int64, cu_seqlens_q: Int64) -> None:
        self.domain, self.tile_m = domain, tile_m
        self.sequences, self.tokens, self.most_keys, self.heads, self.group, *rest = numbers
        self.left, self.right, self.splits, self.least_rows, self.parts = rest
        self.ctas = cute.arch.grid_dim()[0]
        self.cta = cute.arch.block_idx()[0]
        self.seq_lens, self.cu_seqlens_q = seq_lens, cu_seqlens_q

    @cute.jit
    def rows(self, batch: Int32) -> Rows:
        """As `schedules.simulate_decode.Batch.rows`, but those of `least_rows` or more, if that is not 0, are another
        kernel's. Whatever the numbers are, nothing lies outside of q."""
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
        if self.least_rows > 0 and end - start >= self.least_rows:
            end = start
        queries = end - start if batch < sequences else Int32(0)
        return Rows(entry, start, end - start, queries, keys)

    @cute.jit
    def line(self) -> Line:
        """Nothing to do where sequences overlap so often that 32 bits do not count their units, or that their parts
        have no room."""
        counted, q_tiles, widest = Int64(0), Int32(0), Int32(0)
        for batch in cutlass.range(cute.arch.lane_idx(), self.sequences, 32, unroll=1):
            found = self.measure(batch)
            counted, q_tiles = counted + Int64(found.units), q_tiles + found.q_tiles
            widest = cutlass.max(widest, found.widest)
        low = cute.arch.warp_redux_sync(Int32(counted & 0xFFFF), "add")
        high = cute.arch.warp_redux_sync(Int32(counted >> 16), "add")
        q_tiles = cute.arch.warp_redux_sync(q_tiles, "add")
        widest = cute.arch.warp_redux_sync(widest, "max")
        counted = (Int64(high) << 16) + Int64(low)
        most = Int64(self.parts) if self.splits > 0 else Int64(MAX_UNITS)
        units = Int32(counted) if counted * self.heads <= most else Int32(0)
        return Line(units, q_tiles, widest)

    @cute.jit
    def seek(self, unit: Int32, extra: Int32) -> tuple[Int32, Int32]:
        lane = cute.arch.lane_idx()
        batch, base, before = Int32(0), Int32(0), Int32(0)
        for first in cutlass.range(0, self.sequences, 32, unroll=1):
            if before <= unit:
                units = Int32(0)
                if first + lane < self.sequences:
                    units = self.units(first + lane, extra)
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


@dsl_user_op
def prefetch(address: Int64, *, loc=None, ip=None) -> None:
    """Into L2. Nothing happens where nothing is mapped (PTX: prefetch)."""
    llvm.inline_asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "prefetch.global.L2 [$0];",
        "l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
