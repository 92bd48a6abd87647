"""What the kernels of paged attention have in common: their arguments and launch, who fetches, and how splits end."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from fmha.jit.arguments import PAGED_SIZES
from fmha.kernels.common import numbers
from fmha.kernels.common.forward import LN2, LOG2_E, Logits
from fmha.kernels.common.memory import write
from fmha.kernels.common.paged import Pages, Place, WarpSplitter, Window
from schedules.decode import Fetch
from schedules.domain import Ascending
from schedules.forward import FLOOR
from schedules.scores import SCORES
from schedules.splits import Place as Kept
from schedules.splits import Split
from schedules.tiling import ELEMENT_BYTES, WARPGROUP, TiledConfig

MERGED_AT_ONCE = 24  # parts whose loads are in flight together: of 8 KV heads a multiprocessor each has 17


DECODING = 2  # the named barrier of the consumers


class PagedFetch(Fetch):
    """The producer warpgroup."""

    def __init__(self, rings, splitter: WarpSplitter, pages: Pages) -> None:
        self.q, self.k, self.v = rings
        self.splitter = splitter
        self.pages = pages

    def open(self, split: Split) -> Window:
        return self.pages.open(split)

    def turn(self, split: Split, position: Int32, pages: Window) -> Window:
        return self.pages.turn(split, position, pages)


class Leaving:
    """How a warpgroup leaves what its splits have, wherever their O is."""

    def set_out(self, kernel, splitter: WarpSplitter, logits: Logits, outputs: Outputs, parts: Parts) -> None:
        self.kernel = kernel
        self.splitter = splitter
        self.logits = logits
        self.outputs = outputs
        self.parts = parts

    def packed_row(self, split: Split, local: Int32) -> tuple[Int32, Int32]:
        """The query that a row of a Q tile is, and the head."""
        row = split.q_tile * self.kernel.config.tile_m + local
        query = row // self.splitter.group
        return query, split.head * self.splitter.group + row - query * self.splitter.group

    @cute.jit
    def sink_of(self, head: Int32) -> Float32:
        found = Float32(-Float32.inf)
        if self.logits.sinks != 0 and head < self.logits.heads:
            found = self.logits.read(self.logits.sinks, head)
        return found * LOG2_E

    def publish(self) -> None:
        """What other threads have written before they met is part of what this one's fence, and then its atomic, puts
        before whatever the last split does (PTX: causality order)."""
        self.meet()

    def meet(self) -> None:
        cute.arch.barrier(barrier_id=DECODING, number_of_threads=WARPGROUP)

    @cute.jit
    def arrive(self, place: Kept) -> Boolean:
        if self.thread == 0:
            self.parts.arrive(place.counter)
        self.meet()
        return self.parts.arrived[0] == place.parts - 1

    @cute.jit
    def merge(self, split: Split, place: Kept):
        cute.arch.fence_acq_rel_gpu()
        quads = self.kernel.config.value_dim // 4
        rows = cutlass.min(self.parts.rows, split.rows * self.splitter.group - split.q_tile * self.kernel.config.tile_m)
        for item in cutlass.range(self.thread, rows * quads, WARPGROUP, unroll=1):
            self.merge_quad(split, place, item // quads, item % quads)
        if self.thread == 0:
            write(self.parts.counters, place.counter, Int32(0))

    @cute.jit
    def merge_quad(self, split: Split, place: Kept, row: Int32, quad: Int32):
        """Four columns of a row."""
        reference, total = Float32(FLOOR), Float32(0.0)
        o = cute.make_rmem_tensor(4, Float32)
        o.fill(0.0)
        for begin in cutlass.range(0, place.parts, MERGED_AT_ONCE, unroll=1):
            found = []
            for i in cutlass.range_constexpr(MERGED_AT_ONCE):
                at = self.splitter.part(place, cutlass.min(begin + i, place.parts - 1))
                found.append((self.parts.load(at, row, quad), self.parts.load_sum(at, row)))
            largest = reference
            for i in cutlass.range_constexpr(MERGED_AT_ONCE):
                largest = cute.arch.fmax(largest, found[i][1][1])
            before = cute.math.exp2(reference - largest, fastmath=True)
            total = total * before
            self.scale(o, before)
            for i in cutlass.range_constexpr(MERGED_AT_ONCE):
                part, sums = found[i]
                weight = cute.math.exp2(sums[1] - largest, fastmath=True)
                weight = numbers.select(begin + i < place.parts, weight, Float32(0.0))
                total = total + sums[0] * weight
                self.add(o, part, weight)
            reference = largest
        query, head = self.packed_row(split, row)
        sink = self.sink_of(head)
        factor, lse = self.outputs.finish(split, query, total, reference, sink, self.splitter)
        words = [numbers.pack_16bit(o[i] * factor, o[i + 1] * factor, self.kernel.dtype) for i in (0, 2)]
        self.outputs.store(split, query, head, 4 * quad, words)
        if quad == 0:
            self.outputs.store_lse(split, query, head, lse)

    def scale(self, o: cute.Tensor, factor: Float32) -> None:
        for i in range(4):
            o[i] = o[i] * factor

    def add(self, o: cute.Tensor, part: cute.Tensor, weight: Float32) -> None:
        for i in range(4):
            o[i] = o[i] + part[i] * weight


class Outputs:
    """Where O and the LSEs go, straight from registers."""

    def __init__(self, place: Place, lse: Int64, heads: Int32, tokens: Int32, domain) -> None:
        self.place = place
        self.lse = lse
        self.heads = heads
        self.tokens = tokens
        self.domain = domain

    def finish(self, split: Split, query, total, reference, sink, splitter) -> tuple[Float32, Float32]:
        """What O is multiplied by, and the LSE. The sink is a logit more, whose value is 0."""
        bounds = splitter.bounds(split)
        blind = self.domain.hi(query, bounds) <= cutlass.max(self.domain.lo(query, bounds), 0)
        past = query >= split.seqlen_q
        blind = numbers.either(blind, past)
        largest = cute.arch.fmax(reference, sink)
        shrink = cute.math.exp2(reference - largest, fastmath=True)
        total = total * shrink + cute.math.exp2(sink - largest, fastmath=True)
        factor = numbers.select(blind, Float32(0.0), cute.arch.rcp_approx(total) * shrink)
        sink = numbers.select(past, Float32(-Float32.inf), sink)
        lse = numbers.select(blind, sink, largest + cute.math.log2(total, fastmath=True))
        return factor, lse * LN2

    @cute.jit
    def store(self, split: Split, query: Int32, head: Int32, column: Int32, words):
        """16-bit pairs, from `column` on."""
        if column < self.place.dims:
            self.put(self.place.at(split.entry, split.start_q + query, head, Int32(0)) + column * ELEMENT_BYTES, words)

    def put(self, address: Int64, words: list[Int32]) -> None:
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4 * len(words))
        values = cute.make_rmem_tensor(len(words), Int32)
        for i, word in enumerate(words):
            values[i] = word
        cute.autovec_copy(values, cute.make_tensor(pointer, cute.make_layout(len(words))))

    @cute.jit
    def store_lse(self, split: Split, query: Int32, head: Int32, value: Float32):
        if self.lse != 0:
            self.put_lse((Int64(split.entry) * self.heads + head) * self.tokens + split.start_q + query, value)

    def put_lse(self, index: Int64, value: Float32) -> None:
        pointer = cute.make_ptr(Float32, self.lse, cute.AddressSpace.gmem, assumed_align=4)
        cute.make_tensor(pointer + index, cute.make_layout(1))[0] = value


class Parts:
    """What splits leave, in global memory: of each part a sum and a reference a row, and behind those of all parts, of
    each part the rows of O."""

    def __init__(self, address: Int64, counters: Int64, rows: Int32, count: Int32, dims: int, arrived) -> None:
        self.address = address
        self.counters = counters
        self.rows = rows  # of a part
        self.o = address + (Int64(count) * rows + 1) // 2 * 16
        self.dims = dims
        self.arrived = arrived  # in shared memory

    def at(self, part: Int32, row: Int32, column: Int32) -> Int64:
        return self.o + ((Int64(part) * self.rows + row) * self.dims + column) * 4

    def put(self, address: Int64, floats: list[Float32]) -> None:
        values = cute.make_rmem_tensor(len(floats), Float32)
        for i, value in enumerate(floats):
            values[i] = value
        cute.autovec_copy(values, self.floats(address, len(floats)))

    def floats(self, address: Int64, count: int) -> cute.Tensor:
        pointer = cute.make_ptr(Float32, address, cute.AddressSpace.gmem, assumed_align=4 * count)
        return cute.make_tensor(pointer, cute.make_layout(count))

    def read(self, address: Int64, count: int) -> cute.Tensor:
        values = cute.make_rmem_tensor(count, Float32)
        cute.autovec_copy(self.floats(address, count), values)
        return values

    def store(self, part: Int32, row: Int32, column: Int32, floats: list[Float32]) -> None:
        """From `column` on, a multiple of how many."""
        self.put(self.at(part, row, column), floats)

    def store_sum(self, part: Int32, row: Int32, total: Float32, reference: Float32) -> None:
        self.put(self.address + (Int64(part) * self.rows + row) * 8, [total, reference])

    def load(self, part: Int32, row: Int32, quad: Int32) -> cute.Tensor:
        return self.read(self.at(part, row, 4 * quad), 4)

    def load_sum(self, part: Int32, row: Int32) -> cute.Tensor:
        return self.read(self.address + (Int64(part) * self.rows + row) * 8, 2)

    def arrive(self, counter: Int32) -> None:
        cute.arch.fence_acq_rel_gpu()
        pointer = cute.make_ptr(Int32, self.counters, cute.AddressSpace.gmem, assumed_align=4) + counter
        self.arrived[0] = Int32(cute.arch.atomic_add(pointer.llvm_ptr, Int32(1), sem="acq_rel", scope="gpu"))


class DecodeLaunch:
    """What a kernel of paged attention is made from, its arguments and its launch. `kernel` is the architecture's own.

    sizes                 the address on the host of `fmha.jit.arguments.PAGED_SIZES`, an int64 each
    q, o                  [B, S, Hq, D], or [T, Hq, D] where sequences are packed; 16-bit, by address, any strides whose
                          last is 1 and whose others are multiples of 16 bytes
    k, v                  pages of slots of heads: `fmha.paging` says what the strides are
    lse                   the address of a contiguous float32 [B, Hq, S] or [Hq, T], natural logarithm; 0 for none
    sinks                 the address of a contiguous [Hq] of float32; 0 for none
    table, seq_lens       the addresses of int32 [B, most pages] and [B]
    cu_seqlens_q          the address of int32 [B + 1] where sequences are packed; 0 otherwise
    parts                 the address of float32: of each part the sums and references of its rows, and then of each O
    counters              the address of int32, 0 before the kernel and behind it

    The CTAs, one a multiprocessor, share the KV tiles of the whole batch out among them (`schedules.splits`).
    """

    def __init__(self, dtype: type[cutlass.Numeric], score: str, layout: str, config: TiledConfig) -> None:
        self.dtype = dtype
        self.score = SCORES[score]
        self.by_columns = layout == "vllm"
        self.config = config
        self.domain = Ascending(config.tile_m, config.tile_n)

    def mmas(self) -> tuple:
        """What the kernel is given of its MMAs."""
        return ()

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
        table: Int64,
        seq_lens: Int64,
        cu_seqlens_q: Int64,
        parts: Int64,
        counters: Int64,
        scale_log2: Float32,
        cap_factor: Float32,
        stream,
    ):
        at = cute.make_ptr(Int64, sizes, cute.AddressSpace.generic, assumed_align=8)
        numbers = cute.make_tensor(at, cute.make_layout(len(PAGED_SIZES)))
        found = {name: numbers[i] for i, name in enumerate(PAGED_SIZES)}

        def of(*names):
            return tuple(Int32(found[name]) for name in names)

        def place(address, name, dims):
            strides = of(f"{name} row", f"{name} head", f"{name} chunk", dims)
            return (address, found[f"{name} outer"], *strides)

        places = [
            place(q, "q", "head_dim"),
            place(k, "k", "head_dim"),
            place(v, "v", "head_dim_v"),
            place(o, "o", "head_dim_v"),
        ]
        ctas = Int32(found["ctas"])
        self.kernel(
            tuple(places),
            self.mmas(),
            of(
                "sequences",
                "tokens",
                "most keys",
                "kv_heads",
                "group",
                "left",
                "right",
                "splits",
                "least rows",
                "parts",
            ),
            (table, *of("table row", "page shift")),
            (seq_lens, cu_seqlens_q),
            (scale_log2, cap_factor, sinks),
            lse,
            (parts, counters, *of("part rows", "parts")),
        ).launch(
            grid=(ctas, 1, 1),
            block=(self.config.threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )
