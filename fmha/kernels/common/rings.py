"""Rings lowered onto mbarriers and TMA, and the copies that fill them."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from schedules.forward import Ring, Slot, WorkRing
from schedules.tiling import WARPGROUP, producer_warps
from schedules.work import RaggedWork, Work


class Copy(NamedTuple):
    """A TMA copy between tiles in global and slots in shared memory."""

    atom: cute.CopyAtom
    shared: cute.Tensor  # (TMA, slot)
    tiles: cute.Tensor  # (TMA, tile, head, batch)

    def at(self, work: Work, tile: Int32, head: Int32) -> cute.Tensor:
        return self.tiles[None, tile, head, work.batch]

    def load(self, work: Work, tile: Int32, head: Int32, place: Int32, barrier: cute.Pointer) -> None:
        cute.copy(self.atom, self.at(work, tile, head), self.shared[None, place], tma_bar_ptr=barrier)


class RaggedCopy:
    """The same where the tiles of a work tile begin at the first row of its sequence, and end with the last: TMA fills
    up with zeros what lies behind, and clips it when O is stored.

    `tensor` is (row, D, end, wrap, head). Row `r` of a sequence of `n` is (`ROWS` - n + r, end of the sequence in
    units, `ROWS`): it ends where the mode does, whatever its length. The step of `wrap` is 2^64 / `ROWS` bytes (or a
    multiple) less a row, so that the rows too many are taken back when addresses wrap. (Triton's ragged descriptors
    do so, too. To begin with a base so many rows before the tensor's is no way: it must be mapped.)
    """

    ROWS = 1 << 30
    WRAP = 1 << 34  # elements of two bytes

    def __init__(self, atom: cute.CopyAtom, slots: cute.Tensor, tensor: cute.Tensor, cut, extent, units) -> None:
        """`cut` is the tile and where it lies in the first two modes; `extent` gives the n of a work tile and the row
        that its sequence ends before; `units` are those of a row and of an entry."""
        self.atom = atom
        self.slots = slots
        self.tensor = tensor
        self.tile, self.by = cut
        self.extent = extent
        self.units = units
        self.shared, _ = self.partition(tensor)

    def partition(self, tensor: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
        tiles = cute.group_modes(cute.local_tile(tensor, self.tile, (*self.by, None)), 0, 2)
        one = cute.make_layout(1)  # CTA: no multicast
        return cpasync.tma_partition(self.atom, 0, one, cute.group_modes(self.slots, 0, 2), tiles)

    def at(self, work: RaggedWork, tile: Int32, head: Int32) -> cute.Tensor:
        count, end = self.extent(work)
        of_row, of_entry = self.units
        before = self.ROWS - count
        first_two = (before, 0) if self.by[0] is None else (0, before)
        here = cute.domain_offset((*first_two, end * of_row + work.entry * of_entry, self.ROWS, 0), self.tensor)
        return self.partition(here)[1][None, tile, 0, 0, head]

    def load(self, work: RaggedWork, tile: Int32, head: Int32, place: Int32, barrier: cute.Pointer) -> None:
        cute.copy(self.atom, self.at(work, tile, head), self.shared[None, place], tma_bar_ptr=barrier)


class Table(NamedTuple):
    """A page table: int32, `row` entries from a sequence to the next, of pages of 2^shift slots."""

    address: Int64
    row: Int32
    shift: Int32


class PagedCopy(RaggedCopy):
    """The same of K or V in pages, of `piece` slots or more: a tile is put together from pieces, each a sequence of so
    many rows of which those behind the last key are zeros. A page is an entry of the tensor. Of several producer warps
    each copies every so many-th piece."""

    def __init__(self, atom, slots: cute.Tensor, tensor: cute.Tensor, cut, units, table: Table, piece: int) -> None:
        """`cut` is that of whole tiles."""
        self.piece = piece
        self.warps = producer_warps(piece)
        tile, self.by = cut
        self.keys = tile[0 if self.by[0] is None else 1]
        cut = tuple(piece if by is None else dims for by, dims in zip(self.by, tile, strict=False))
        slots = cute.local_tile(slots, cut, (*self.by[:2], None))
        super().__init__(atom, slots, tensor, (cut, self.by), None, units)
        self.table = table
        # What was looked up ahead, this lane's page, and for which sequence and tile.
        self.ahead = cute.make_rmem_tensor(3, Int32)
        self.ahead.fill(-1)

    @cute.jit
    def load(self, work: RaggedWork, tile: Int32, head: Int32, place: Int32, barrier: cute.Pointer):
        """Beside it the pages of the next tile are looked up. Tiles without an end are copied by a way of their own, of
        20 instructions a piece instead of 35."""
        pages = self.pages(work, tile)
        first = tile * self.keys
        if first + self.keys <= work.seqlen_k:
            self.copy_pieces(first, head, place, barrier, pages, None)
        else:
            self.copy_pieces(first, head, place, barrier, pages, work.seqlen_k)
        self.look_ahead(work, tile + 1)

    def look_ahead(self, work: RaggedWork, tile: Int32) -> None:
        self.ahead[0], self.ahead[1], self.ahead[2] = self.look_up(work, tile), work.batch, tile

    @cute.jit
    def pages(self, work: RaggedWork, tile: Int32) -> Int32:
        found = self.ahead[0]
        if self.ahead[1] != work.batch or self.ahead[2] != tile:
            found = self.look_up(work, tile)
        return found

    def copy_pieces(self, first: Int32, head: Int32, place: Int32, barrier: cute.Pointer, pages: Int32, end) -> None:
        """Those of the keys from `first` on, up to key `end` if that is not None."""
        pieces = self.keys // self.piece
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) if self.warps > 1 else 0
        for step in range(0, pieces, self.warps):
            to = place, barrier, pages
            if step + self.warps <= pieces:
                self.copy_piece(first, head, to, end, warp + step)
            else:
                self.copy_last(first, head, to, end, warp + step)

    @cute.jit
    def copy_last(self, first: Int32, head: Int32, to, end, piece: Int32):
        """A piece, if the tile has it."""
        if piece < self.keys // self.piece:
            self.copy_piece(first, head, to, end, piece)

    def copy_piece(self, first: Int32, head: Int32, to, end, piece: Int32) -> None:
        place, barrier, pages = to
        of_row, of_entry = self.units
        mask = (Int32(1) << self.table.shift) - 1
        page, key = cute.arch.shuffle_sync(pages, piece), first + piece * self.piece
        count = self.piece if end is None else cutlass.min(cutlass.max(end - key, 0), self.piece)
        before = self.ROWS - count
        first_two = (before, 0) if self.by[0] is None else (0, before)
        behind = ((key & mask) + count) * of_row + page * of_entry
        here = cute.domain_offset((*first_two, behind, self.ROWS, 0), self.tensor)
        source = self.partition(here)[1][None, 0, 0, 0, head]
        cute.copy(self.atom, source, self.shared[None, piece, place], tma_bar_ptr=barrier)

    @cute.jit
    def look_up(self, work: RaggedWork, tile: Int32) -> Int32:
        """The page of this lane's piece of a tile, 0 behind the last key."""
        found = Int32(0)
        key = tile * self.keys + cute.arch.lane_idx() * self.piece
        if key < work.seqlen_k and cute.arch.lane_idx() < self.keys // self.piece:
            at = work.batch * self.table.row + (key >> self.table.shift)
            entries = cute.make_ptr(Int32, self.table.address, cute.AddressSpace.gmem, assumed_align=4)
            found = cute.make_tensor(entries + at, cute.make_layout(1))[0]
        return found


class TmaRing(Ring):
    """A ring whose slots TMA fills. Barriers: `stages` full ones, then `stages` empty ones.

    A full barrier completes when the producer has arrived once and the bytes have landed; an empty one when
    `RELEASING_LANES` of each of `consumer_warps` warps have arrived.
    """

    RELEASING_LANES = 1

    def __init__(self, barriers: cute.Pointer, stages: int, stage_bytes: int, consumer_warps: int) -> None:
        self.stages = stages
        self.stage_bytes = stage_bytes
        self.release_arrivals = self.RELEASING_LANES * consumer_warps
        self.full = barriers
        self.empty = barriers + stages

    def init(self) -> None:
        """By one thread of the CTA, before the barrier that opens the roles."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, 1)
            cute.arch.mbarrier_init(self.empty + stage, self.release_arrivals)

    def acquire(self, slot: Slot) -> None:
        # The first pass finds the slots free: waiting for the parity before the barrier's first returns at once.
        cute.arch.mbarrier_wait(self.empty + slot.stage, slot.parity ^ 1)

    def load(self, slot: Slot, work: Work, tile: int) -> None:
        raise NotImplementedError

    def commit(self, slot: Slot) -> None:
        # Arriving after the copies were issued is sound: the phase cannot complete before this arrival, and the
        # count of outstanding bytes may pass through negative values (PTX: mbarrier, tx-count).
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + slot.stage, self.stage_bytes)

    def wait(self, slot: Slot) -> None:
        cute.arch.mbarrier_wait(self.full + slot.stage, slot.parity)

    def release(self, slot: Slot) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.empty + slot.stage)


class TileRing(TmaRing):
    """K or V: one copy a slot."""

    def __init__(self, barriers, stages, stage_bytes, consumer_warps, copy: Copy, heads_per_kv_head: Int32) -> None:
        super().__init__(barriers, stages, stage_bytes, consumer_warps)
        self.copy = copy
        self.heads_per_kv_head = heads_per_kv_head

    def load(self, slot: Slot, work: Work, tile: int) -> None:
        self.copy.load(work, tile, work.head // self.heads_per_kv_head, slot.stage, self.full + slot.stage)


class QueryRing(TmaRing, WorkRing):
    """The Q of one warpgroup: a slot holds 64 rows, and a work tile in a few integers beside it.

    Every lane reads those by an ordinary load, so every lane arrives when it releases them: an arrival orders only the
    reads of the thread that arrives.
    """

    RELEASING_LANES = 32

    def __init__(self, barriers, stages, stage_bytes, copy, posted: cute.Tensor, kind, index, warpgroups: int) -> None:
        super().__init__(barriers + index * 2 * stages, stages, stage_bytes, WARPGROUP // 32)
        self.copy = copy  # the slots of each warpgroup, one warpgroup after the other
        self.posted = posted  # (field, slot) in shared memory
        self.kind = kind  # of work tile: Work or RaggedWork
        self.index = index
        self.warpgroups = warpgroups

    def load(self, slot: Slot, work: Work, tile: int) -> None:
        q_tile = tile * self.warpgroups + self.index
        self.copy.load(work, q_tile, work.head, self.place(slot), self.full + slot.stage)

    def place(self, slot: Slot) -> Int32:
        """The slot among those of all warpgroups."""
        return self.index * self.stages + slot.stage

    def post(self, slot: Slot, work: Work) -> None:
        # The elected thread is the one that arrives in `commit`, and its arrival releases what it wrote.
        with cute.arch.elect_one():
            for i, field in enumerate(work):
                self.posted[i, self.place(slot)] = Int32(field)

    def release(self, slot: Slot) -> None:
        cute.arch.mbarrier_arrive(self.empty + slot.stage)

    def work(self, slot: Slot) -> Work:
        fields = (self.posted[i, self.place(slot)] for i in range(len(self.kind._fields)))
        return self.kind(*map(cute.arch.make_warp_uniform, fields))
