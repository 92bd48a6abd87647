"""The list of a ragged batch's sequences, made on the device by one CTA before the forward kernel reads it.

What is listed, and in which order, `schedules.work.in_order` says. The list is an array of int32:

    COUNTER                 work tiles taken by the forward kernel, 0 before it starts
    TOTAL, LISTED           Q tiles of all sequences, and how many sequences have any
    FIRST + i               the number of the first Q tile of sequence i of the list, and behind the last TOTAL
    records_at(batch) + 8i  sequence i, a `schedules.work.Sequence`
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from fmha.jit.arguments import COUNTER, FIRST, LISTED, RECORD, TOTAL, records_at
from fmha.kernels.common import numbers
from fmha.kernels.common.memory import at, read, write
from schedules.work import BUCKETS, RaggedWork, Sequence, group_of, ragged_work_of, within

THREADS = BUCKETS  # a bucket each where they are added up
TILE_BITS = 44  # of a count of tiles; behind them sequences are counted. Both fit, whatever the lengths are.
ONE_SEQUENCE = 1 << TILE_BITS


class Lengths:
    """Where the lengths of the sequences come from: addresses of int32 arrays, 0 for none."""

    def __init__(self, addresses, batch, rows, keys, keys_fit, most: Int32, least: Int32, tile_m: int) -> None:
        self.cu_q, self.cu_k, self.used_q, self.used_k = addresses
        self.batch = batch
        self.rows, self.keys = rows, keys  # of an entry of the tensors
        self.keys_fit = keys_fit
        self.most = most  # Q tiles that there can be
        self.least = least  # queries of a sequence: the rows of shorter ones are another kernel's
        self.tile_m = tile_m

    @cute.jit
    def sequence(self, index: Int32) -> Sequence:
        """`schedules.work.sequences`, of which it is number `index`; a packed batch has two more than `batch`."""
        start_q, end_q, start_k, end_k = Int32(0), self.rows, Int32(0), self.keys
        entry, group = index, Int32(1)
        if self.cu_q != 0:
            entry = Int32(0)
            before = cutlass.min(index, self.batch)  # the row that ends or starts with it, always inside the array
            behind = index + 1 if index < self.batch else Int32(0)
            start_q = read(self.cu_q, before) if index != self.batch else Int32(0)
            end_q = read(self.cu_q, behind) if index <= self.batch else self.rows
            start_q, end_q = within(start_q, end_q, self.rows)
            if self.cu_k != 0:
                start_k, end_k = within(read(self.cu_k, before), read(self.cu_k, behind), self.keys)
        seqlen_q, seqlen_k = end_q - start_q, end_k - start_k
        if index < self.batch:
            if self.used_q != 0:
                seqlen_q = cutlass.min(cutlass.max(read(self.used_q, index), 0), seqlen_q)
            if self.used_k != 0:
                seqlen_k = cutlass.min(cutlass.max(read(self.used_k, index), 0), seqlen_k)
            group = group_of(seqlen_k, self.keys_fit)
        else:
            seqlen_q, seqlen_k = Int32(0), Int32(0)
        batch = cutlass.min(index, self.batch - 1)
        if end_q - start_q < self.least:
            end_q, seqlen_q = start_q, Int32(0)
        return Sequence(batch, entry, start_q, end_q - start_q, seqlen_q, start_k, seqlen_k, group)

    def tiles(self, sequence: Sequence) -> Int32:
        return (sequence.rows + self.tile_m - 1) // self.tile_m

    def bucket(self, sequence: Sequence) -> Int32:
        bits = numbers.as_bits(cutlass.Float32(cutlass.max(sequence.seqlen_k, 1)))
        return BUCKETS - 1 - cutlass.min(BUCKETS - 1, (bits >> 20) - (127 << 3))


class List:
    """Makes the list, by sorting the sequences into buckets."""

    def __init__(self, lengths: Lengths, listing: Int64, packed: Int32) -> None:
        self.lengths = lengths
        self.listing = listing
        self.count = lengths.batch + 2 * packed
        self.records = records_at(lengths.batch)
        self.thread = cute.arch.thread_idx()[0]
        self.buckets = SmemAllocator().allocate_tensor(Int64, cute.make_layout(BUCKETS), 8)

    @cute.jit
    def make(self):
        self.buckets[self.thread] = Int64(0)
        cute.arch.sync_threads()
        for index in cutlass.range(self.thread, self.count, THREADS):
            self.add(self.lengths.sequence(index))
        cute.arch.sync_threads()
        total = self.add_up()
        for index in cutlass.range(self.thread, self.count, THREADS):
            self.place(self.lengths.sequence(index))
        if self.thread == 0:
            tiles, listed = total & (ONE_SEQUENCE - 1), Int32(total >> TILE_BITS)
            tiles = Int32(tiles) if tiles <= Int64(self.lengths.most) else Int32(0)  # sequences overlap: no work
            write(self.listing, COUNTER, Int32(0))
            write(self.listing, TOTAL, tiles)
            write(self.listing, LISTED, listed)
            write(self.listing, FIRST + listed, tiles)

    @cute.jit
    def add(self, sequence: Sequence) -> Int64:
        """Counts it in its bucket. What was counted there before."""
        tiles, before = self.lengths.tiles(sequence), Int64(-1)
        if tiles > 0:
            bucket = self.buckets.iterator + self.lengths.bucket(sequence)
            before = Int64(cute.arch.atomic_add(bucket, Int64(tiles) + ONE_SEQUENCE, scope="cta"))
        return before

    @cute.jit
    def add_up(self) -> Int64:
        """Makes of each bucket what lies before it. What lies in all of them."""
        own = self.buckets[self.thread]
        step = 1
        for _ in cutlass.range_constexpr(BUCKETS.bit_length() - 1):
            before = Int64(0)
            if self.thread >= step:
                before = self.buckets[self.thread - step]
            cute.arch.sync_threads()
            self.buckets[self.thread] = self.buckets[self.thread] + before
            cute.arch.sync_threads()
            step = 2 * step
        total = self.buckets[BUCKETS - 1]
        cute.arch.sync_threads()
        self.buckets[self.thread] = self.buckets[self.thread] - own
        cute.arch.sync_threads()
        return total

    @cute.jit
    def place(self, sequence: Sequence):
        before = self.add(sequence)
        if before >= 0:
            place = Int32(before >> TILE_BITS)
            write(self.listing, FIRST + place, Int32(before & (ONE_SEQUENCE - 1)))
            for field in cutlass.range_constexpr(RECORD):
                write(self.listing, self.records + place * RECORD + field, sequence[field])


class RaggedGrid:
    """The work tiles of the list, by the producer warp, all lanes together."""

    def __init__(self, listing: Int64, batch: Int32, heads: Int32, tile_m: int, bounds) -> None:
        self.listing = listing
        self.records = records_at(batch)
        self.heads = heads
        self.tile_m = tile_m
        self.whole = bounds  # of the tensors, with the sides of a window
        self.lane = cute.arch.lane_idx()

    def bounds(self, work: RaggedWork):
        return self.whole._replace(seqlen_q=work.seqlen_q, seqlen_k=work.seqlen_k)

    def first(self) -> RaggedWork:
        return self.work(cute.arch.block_idx()[0])

    def count(self) -> Int32:
        return atomic_increment(self.listing)

    def work_taken(self, taken: Int32) -> RaggedWork:
        return self.work(cute.arch.grid_dim()[0] + taken)

    @cute.jit
    def work(self, index: Int32) -> RaggedWork:
        """Work tile `index`: the last sequence that begins at or before it, found with 32 looks at a time."""
        found = RaggedWork(*(Int32(0),) * len(RaggedWork._fields))
        tile = index // self.heads
        if tile < read(self.listing, TOTAL):
            low, span = Int32(0), read(self.listing, LISTED)
            while span > 1:
                step = (span + 31) // 32
                at = self.lane * step
                begins = Int32(2**31 - 1)
                if at < span:
                    begins = read(self.listing, FIRST + low + at)
                skipped = (cute.arch.popc(cute.arch.vote_ballot_sync(begins <= tile)) - 1) * step
                low = low + skipped
                span = cutlass.min(step, span - skipped)
            field = read(self.listing, self.records + low * RECORD + self.lane % RECORD)
            sequence = Sequence(*(cute.arch.shuffle_sync(field, i) for i in range(RECORD)))
            rest = index - read(self.listing, FIRST + low) * self.heads
            found = ragged_work_of(rest, sequence, self.heads, self.tile_m)
        return found


def atomic_increment(address: Int64) -> Int32:
    return Int32(cute.arch.atomic_add(at(address, 0).llvm_ptr, Int32(1)))
