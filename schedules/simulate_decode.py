"""Runs the role programs of `schedules.decode` on a CPU, as `schedules.simulate` runs those of the forward kernels.

CTAs are simulated one after another, in any order: what they share are the parts of split Q tiles, and counters. So
any of them may be the last to leave its part, and what a split tells others must be there when it tells them.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from schedules.decode import Decode, Fetch, PagedRing, SplitRole
from schedules.domain import Ascending, Bounds, Visits
from schedules.forward import Slot
from schedules.machine import Buffer, CountError, Event, Fence, Hazard, Machine, RangeError, TileError
from schedules.rings import Counts, NumpyRing, NumpyWorkRing, RingSlot, Turnstile
from schedules.scores import SCORES, Score, score_of
from schedules.simulate import COSTS, NumpyAttend, Result
from schedules.splits import Line, Place, Rows, Split, Splitter, counters_needed, parts_needed, sides, together
from schedules.tiling import WARPGROUP, BlockConfig, TmemPagedConfig

AnyRing = TypeVar("AnyRing", bound="NumpyPagedRing")

SMALL = BlockConfig(16, tile_n=16, stages=2, q_stages=2, consumers=1, producer_registers=248, consumer_registers=248)
TILE_M = 16  # rows of a small Q tile


@dataclass(frozen=True)
class Batch:
    """Global memory: q [B, S, Hq, D] (B is 1 where sequences are packed), pages of K and V [pages, page, Hkv, D], and
    the outputs. `starts` are those of packed sequences, else None."""

    q: np.ndarray
    k_pages: np.ndarray
    v_pages: np.ndarray
    table: np.ndarray  # [sequences, most pages]
    seq_lens: Sequence[int]
    starts: Sequence[int] | None
    scale_log2: float
    cap_factor: float
    sinks: np.ndarray | None
    o: np.ndarray
    lse: np.ndarray
    written: np.ndarray  # how often each row of the output was

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k_pages.shape[2]

    @property
    def page(self) -> int:
        return self.k_pages.shape[1]

    def rows(self, batch: int) -> Rows:
        """Packed, two more sequences have the rows of none."""
        tokens, count = self.q.shape[1], len(self.seq_lens)
        if self.starts is None:
            return Rows(batch, 0, tokens, tokens, self.seq_lens[batch])
        if batch == count:
            return Rows(0, 0, self.starts[0], 0, 0)
        if batch > count:
            return Rows(0, self.starts[-1], tokens - self.starts[-1], 0, 0)
        start, end = self.starts[batch : batch + 2]
        return Rows(0, start, end - start, end - start, self.seq_lens[batch])

    @property
    def sequences(self) -> int:
        return len(self.seq_lens) + (0 if self.starts is None else 2)


@dataclass
class Part:
    """What a split has left."""

    o: np.ndarray
    row_sum: np.ndarray
    reference: np.ndarray
    published: bool = False


@dataclass
class Parts:
    """Of all CTAs, in global memory, and the counters of those that have arrived."""

    room: int  # parts
    counters: list[int]
    left: dict[int, Part] = field(default_factory=dict)

    def settle(self) -> None:
        for counter, arrived in enumerate(self.counters):
            if arrived:
                raise CountError(f"exit: counter {counter} is {arrived}, and not 0 for the next launch")
        for part in self.left:
            raise CountError(f"exit: part {part} was not merged")


class NumpySplitter(Splitter):
    """Looks at one sequence after another."""

    def __init__(self, batch: Batch, domain: Ascending, tile_m: int, limits: tuple[int, int], splits: int, ctas: int):
        self.batch, self.domain, self.tile_m = batch, domain, tile_m
        self.heads, self.group = batch.k_pages.shape[2], batch.group
        self.left, self.right = limits
        self.splits, self.ctas = splits, ctas
        self.cta = 0

    def rows(self, batch: int) -> Rows:
        if not 0 <= batch < self.batch.sequences:
            raise TileError(f"sequence {batch}, of {self.batch.sequences}")
        return self.batch.rows(batch)

    @property
    def q_rows(self) -> int:
        """Q tiles of all sequences and heads."""
        return self.heads * sum(self.q_tiles(self.rows(batch)) for batch in range(self.batch.sequences))

    def line(self) -> Line:
        return together(self.measure(batch) for batch in range(self.batch.sequences))

    def seek(self, unit: int, extra: int) -> tuple[int, int]:
        base = 0
        for batch in range(self.batch.sequences):
            units = self.units(batch, extra)
            if unit < base + units:
                return batch, base
            base += units
        raise TileError(f"unit {unit}, of {base} for a head")


class NumpyPagedRing(NumpyRing, PagedRing):
    """A ring whose slots asynchronous copies of single rows fill: done when all have landed, and not counted in bytes.

    A wait orders them before what the waiting role does next.
    """

    pages: np.ndarray  # of K or V
    cta: DecodeCta

    def gather(self, slot: Slot, split: Split, position: int, pages: Any) -> None:
        here = self.at(slot)
        self.machine.op(f"issue load {here.name}", position)
        rows = self.cta.gathered(self.pages, split, position, pages, here.buffer.data.shape)
        self.check_released(here)
        here.owed, here.readers = set(self.consumers), set()
        here.buffer.tile, here.buffer.work = split.tile + position, split
        self._copy(here, rows)

    def _copy(self, here: RingSlot, rows: np.ndarray) -> None:
        buffer = here.buffer

        def effect() -> None:
            buffer.data[:] = rows
            self.machine.retire([flight])

        flight = self.machine.issue("tma", f"load {buffer.name}", buffer.tile, effect, writes=[buffer])
        here.flight = flight
        buffer.data[:] = math.nan

    def commit(self, slot: Slot) -> None:
        """PTX cp.async.mbarrier.arrive.noinc: each thread arrives when the copies that it has issued have landed."""
        here = self.at(slot)
        self.machine.op(f"commit {here.name}")
        flight, here.flight = here.flight, None
        if flight is None or flight.landed:
            here.full.arrive(WARPGROUP)
            return
        landed = flight.effect

        def effect() -> None:
            landed()
            here.full.arrive(WARPGROUP)

        flight.effect = effect


class NumpyPagedWorkRing(NumpyPagedRing, NumpyWorkRing):
    """The ring of Q. One thread posts, and arrives for itself: a slot is full when Q is there and the split, too."""

    kept = False

    def post(self, slot: Slot, work: Split) -> None:
        here = self.at(slot)
        self.machine.op(f"post {here.name}", work.q_tile)
        self._write(here, "the split", work)
        here.posted = work
        here.full.arrive()

    def load(self, slot: Slot, work: Split, tile: int) -> None:
        here = self.at(slot)
        self.machine.op(f"issue load {here.name}", tile)
        self._write(here, "Q", work)
        here.buffer.tile = tile
        self._copy(here, self.cta.packed(work, tile, here.buffer.data.shape))

    def _write(self, here: RingSlot, what: str, work: Split) -> None:
        """Whichever comes first begins a use of the slot, and what comes a second time another one."""
        if what in here.written or not here.written:
            self.check_released(here)
            here.owed, here.readers, here.written = set(self.consumers), set(), set()
        here.written.add(what)
        here.buffer.work = work


class NumpyFetch(Fetch):
    """The producer warpgroup."""

    def __init__(self, cta: PagedCta) -> None:
        self.cta = cta
        self.q, self.k, self.v = cta.q[0], cta.k, cta.v
        self.splitter = cta.splitter

    def open(self, split: Split) -> Any:
        self.cta.machine.op("open", split.begin)
        return self.pages(split, split.begin)

    def turn(self, split: Split, position: int, pages: Any) -> Any:
        self.cta.machine.op("turn", position)
        return self.pages(split, position)

    def pages(self, split: Split, position: int) -> Any:
        """Of each key of the tile, None where nobody sees it."""
        batch, n = self.cta.batch, self.cta.config.tile_n
        tile = split.tile + position
        found: list[int | None] = []
        for key in range(tile * n, tile * n + n):
            page = None
            if split.first_key <= key < split.end_key and split.begin <= position < split.end:
                at = split.batch, key // batch.page
                page = int(batch.table[at]) if at[0] < batch.table.shape[0] and at[1] < batch.table.shape[1] else -1
                if not 0 <= page < len(batch.k_pages):
                    self.cta.machine.fail(TileError, f"key {key} of sequence {split.batch} is in page {page}")
            found.append(page)
        return (split, position), found


class NumpySplitRole(SplitRole):
    """Who has the rows of a Q tile: their references, their sums and, somewhere, O."""

    cta: PagedCta
    machine: Machine
    config: Any
    reference: np.ndarray
    row_sum: np.ndarray
    seen: Mapping[Any, list[Any]]  # the tiles that each kind of MMA has visited, of each split

    def leave_splits_of(self, cta: PagedCta) -> None:
        self.splitter = cta.splitter
        self.sinks = np.zeros((cta.rows, 1))
        self.unpublished: list[Part] = []

    @abstractmethod
    def read_o(self) -> np.ndarray: ...

    def queries(self, work: Split) -> np.ndarray:
        return np.array([token for token, _ in self.cta.queries(work)])

    def limits(self, work: Split) -> tuple[np.ndarray, np.ndarray]:
        """The first key that each query sees and one past the last, as columns."""
        bounds, domain = self.cta.bounds(work), self.cta.domain
        ends = [f(int(row), bounds) for row in self.queries(work) for f in (domain.lo, domain.hi)]
        lo, hi = np.array(ends).reshape(-1, 2).T
        return lo[:, None], hi[:, None]

    def take_up(self, work: Split) -> None:
        self.machine.op("take_up")
        sinks = self.cta.batch.sinks
        for row, (_, head) in enumerate(self.cta.queries(work)):
            self.sinks[row] = -math.inf if sinks is None else sinks[head]

    def write(self, split: Split) -> None:
        self.machine.op("write")
        o = self.read_o()
        self._check(split)
        self._output(split, o, self.row_sum, self.reference)

    def _check(self, split: Split) -> None:
        """The tiles that it should, in order, and no row has weights so small that they might vanish in 32 bits."""
        fail = self.machine.fail
        first = self.cta.visits(split).first
        wanted = list(range(first + split.begin, first + split.end))
        for mma in ("QK", "PV"):
            if (tiles := self.seen[mma, split]) != wanted:
                fail(TileError, f"{mma} visited the tiles {tiles}, not {wanted}")
        if split.q_tile * self.cta.rows >= split.rows * self.splitter.group:
            fail(TileError, f"Q tile {split.q_tile} has no row")
        lo, hi = self.limits(split)
        seeing = (hi > np.maximum(lo, 0)) & (self.queries(split)[:, None] < split.seqlen_q)
        n = self.config.tile_n
        for tile in wanted if seeing.any() and len(wanted) > 1 else ():
            if not ((lo < tile * n + n) & (hi > tile * n) & seeing).any():
                fail(TileError, f"tile {tile} is visited, of which no query sees a key")
        if ((self.row_sum > 0) & (self.row_sum < 1 - 1e-9)).any():  # the largest weighs 1 or more
            fail(RangeError, f"the weights of a row add up to {self.row_sum[self.row_sum > 0].min()}, less than 1")

    def _output(self, split: Split, o: np.ndarray, row_sum: np.ndarray, reference: np.ndarray) -> None:
        batch = self.cta.batch
        sink = self.sinks * math.log2(math.e)
        largest = np.fmax(reference, sink)
        shrink = np.exp2(reference - largest)
        weights = row_sum * shrink + np.exp2(sink - largest)
        lo, hi = self.limits(split)
        for row, (token, head) in enumerate(self.cta.queries(split)):
            if token >= split.rows:
                continue
            at = split.entry, split.start_q + token, head
            batch.written[at] += 1
            if batch.written[at] > 1:
                self.machine.fail(CountError, f"row {at} was written before")
            blind = hi[row, 0] <= max(lo[row, 0], 0) or token >= split.seqlen_q
            batch.o[at] = 0 if blind else (o[row] * shrink[row] / weights[row])[: batch.o.shape[3]]
            sunk = -math.inf if token >= split.seqlen_q else self.sinks[row, 0]
            batch.lse[at] = sunk if blind else (largest[row, 0] + np.log2(weights[row, 0])) * math.log(2)

    def write_part(self, split: Split, place: Place) -> None:
        self.machine.op("write_part")
        o = self.read_o()
        self._check(split)
        parts = self.cta.parts
        if not 0 <= place.own < parts.room:
            self.machine.fail(TileError, f"part {place.own}, of {parts.room}")
        if place.own in parts.left:
            self.machine.fail(Hazard, f"part {place.own} is still there")
        part = parts.left[place.own] = Part(o.copy(), self.row_sum.copy(), self.reference.copy())
        self.unpublished.append(part)

    def publish(self) -> None:
        self.machine.op("publish")
        for part in self.unpublished:
            part.published = True
        self.unpublished.clear()

    def arrive(self, place: Place) -> bool:
        """What is said to be there must be: another CTA may read it at once."""
        self.machine.op("arrive")
        counters = self.cta.parts.counters
        if not 0 <= place.counter < len(counters):
            self.machine.fail(TileError, f"counter {place.counter}, of {len(counters)}")
        self._find(place.own)
        counters[place.counter] += 1
        if counters[place.counter] > place.parts:
            self.machine.fail(CountError, f"{counters[place.counter]} parts have arrived at counter {place.counter}")
        return counters[place.counter] == place.parts

    def _find(self, part: int) -> None:
        left = self.cta.parts.left
        if part not in left or not left[part].published:
            self.machine.fail(Hazard, f"part {part} is not there yet")

    def merge(self, split: Split, place: Place) -> None:
        self.machine.op("merge")
        parts = self.cta.parts
        at = [self.splitter.part(place, index) for index in range(place.parts)]
        for part in at:
            self._find(part)
        found = [parts.left.pop(part) for part in at]
        reference = np.maximum.reduce([part.reference for part in found])
        shrink = [np.exp2(part.reference - reference) for part in found]
        o = sum(part.o * by for part, by in zip(found, shrink, strict=True))
        row_sum = sum(part.row_sum * by for part, by in zip(found, shrink, strict=True))
        self._output(split, o, row_sum, reference)
        parts.counters[place.counter] = 0


class NumpyDecode(Decode, NumpySplitRole, NumpyAttend):  # type: ignore[misc]  # `Decode` has its own `visits`
    """The consumer warpgroup."""

    cta: DecodeCta  # type: ignore[assignment]
    q: NumpyPagedWorkRing
    k: NumpyPagedRing
    v: NumpyPagedRing  # type: ignore[assignment]

    def __init__(self, cta: DecodeCta) -> None:
        NumpyAttend.__init__(self, cta, 0)  # type: ignore[arg-type]
        self.leave_splits_of(cta)

    def read_o(self) -> np.ndarray:
        self.machine.touch(reads=[self.o])
        return self.o.data


def _no_source(work: Any, tile: int) -> np.ndarray:
    raise NotImplementedError("tiles are gathered")


class PagedCta(ABC):
    """What a CTA knows, whatever its roles are made of."""

    FETCH: type[NumpyFetch]
    SPLITTER: type[NumpySplitter] = NumpySplitter
    q: Sequence[Any]
    k: Any
    v: Any

    def __init__(
        self, batch: Batch, splitter: NumpySplitter, parts: Parts, score: Score, config: Any, machine: Machine
    ) -> None:
        self.batch, self.tensors, self.splitter, self.parts = batch, batch, splitter, parts
        self.domain, self.score, self.config, self.machine = splitter.domain, score, config, machine
        self.rows = splitter.tile_m

    @abstractmethod
    def run(self) -> None:
        """Every role's program, to its end. Raises a `ScheduleError`."""

    def bounds(self, split: Split) -> Bounds:
        return self.splitter.bounds(split)

    def visits(self, split: Split) -> Visits:
        return self.splitter.visits(split, split.q_tile)

    def gathered(self, source: np.ndarray, split: Split, position: int, pages: Any, shape: Any) -> np.ndarray:
        """The rows of a tile of K or V, which `source` has the pages of; those that nobody sees are zeros."""
        if pages[0] != (split, position):
            self.machine.fail(TileError, f"the pages looked up are those of {pages[0]}")
        rows, n = np.zeros(shape), self.config.tile_n
        first = (split.tile + position) * n
        for row, (page, key) in enumerate(zip(pages[1], range(first, first + n), strict=True)):
            if page is not None:
                found = source[page, key % self.batch.page, split.head]
                rows[row, : len(found)] = found
        return rows

    def packed(self, split: Split, tile: int, shape: Any) -> np.ndarray:
        """The rows of a Q tile."""
        rows = np.zeros(shape)
        for row, (token, head) in enumerate(self.queries(split._replace(q_tile=tile))):
            if token < split.seqlen_q:
                found = self.batch.q[split.entry, split.start_q + token, head]
                rows[row, : len(found)] = found
        return rows

    def queries(self, split: Split) -> list[tuple[int, int]]:
        """(query, head) of each row of a Q tile."""
        rows = range(split.q_tile * self.rows, (split.q_tile + 1) * self.rows)
        return [(row // self.batch.group, split.head * self.batch.group + row % self.batch.group) for row in rows]


class DecodeCta(PagedCta):
    """The roles of one CTA, their shared memory and their barriers. Tests break one of them at a time."""

    RING: type[NumpyPagedRing] = NumpyPagedRing
    WORK_RING: type[NumpyPagedWorkRing] = NumpyPagedWorkRing
    FETCH: type[NumpyFetch] = NumpyFetch
    DECODE: type[NumpyDecode] = NumpyDecode

    def __init__(
        self,
        batch: Batch,
        splitter: NumpySplitter,
        parts: Parts,
        score: Score,
        config: BlockConfig,
        machine: Machine,
    ) -> None:
        super().__init__(batch, splitter, parts, score, config, machine)
        self.names = ["decode"]
        self.turnstile = Turnstile(machine, self.names, 2 * WARPGROUP)
        dims, value_dims = config.head_dim, config.value_dim
        self.q = [self._ring(self.WORK_RING, "Q", config.q_stages, self.rows, dims)]
        self.k = self._ring(self.RING, "K", config.stages, config.tile_n, dims)
        self.v = self._ring(self.RING, "V", config.stages, config.tile_n, value_dims)
        self.k.pages, self.v.pages = batch.k_pages, batch.v_pages
        self.decode = self.DECODE(self)
        self.fetch = self.FETCH(self)

    def _ring(self, kind: type[AnyRing], name: str, stages: int, rows: int, dims: int) -> AnyRing:
        buffers = [Buffer(f"{name}[{i}]", np.full((rows, dims), math.nan), Fence.PROXY) for i in range(stages)]
        ring = kind(self.machine, name, buffers, _no_source, 0, self.names, self.counts(kind))
        ring.cta = self
        return ring

    def counts(self, kind: type[NumpyPagedRing]) -> Counts:
        """What the barriers of a ring count. Who releases a slot has read it by MMAs, and one lane of each warp
        arrives. What is posted beside Q every lane has read for itself, and every lane arrives; it is one arrival more
        that fills the slot."""
        posted = issubclass(kind, NumpyWorkRing)
        releasing = WARPGROUP if posted else WARPGROUP // 32
        return Counts(WARPGROUP + posted, 0, releasing, releasing)

    def run(self) -> None:
        def decode() -> None:
            self.decode.begin()
            with np.errstate(all="ignore"):
                self.decode.run()

        self.machine.spawn("fetch", self.fetch.run)
        self.machine.spawn("decode", decode)
        self.machine.run()
        for ring in (*self.q, self.k, self.v):
            ring.settle()


def paged(
    q: np.ndarray,
    k_pages: np.ndarray,
    v_pages: np.ndarray,
    page_table: np.ndarray,
    seq_lens: Sequence[int],
    *,
    cu_seqlens_q: Sequence[int] | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    splits: int = 0,
    config: BlockConfig | TmemPagedConfig = SMALL,
    multiprocessors: int = 3,
    seed: int = 0,
    policy: str = "random",
    cta: type[PagedCta] = DecodeCta,
) -> Result:
    """Paged attention by the role programs of `schedules.decode`, or those of another `cta`, on a CPU.

    q [B, Sq, Hq, D], or [T, Hq, D] with `cu_seqlens_q`; pages [pages, page, Hkv, D]; the rest is as in
    `fmha.attention_paged`, `splits` 0 being its None. o is like q, lse [B, Sq, Hq] or [T, Hq].
    """
    q4 = np.asarray(q if cu_seqlens_q is None else q[None], np.float64)
    factor = q4.shape[3] ** -0.5 if scale is None else scale
    o = np.full((*q4.shape[:3], v_pages.shape[3]), math.nan)
    batch = Batch(
        q4,
        np.asarray(k_pages, np.float64),
        np.asarray(v_pages, np.float64),
        page_table,
        seq_lens,
        cu_seqlens_q,
        (factor if softcap is None else softcap) * math.log2(math.e),
        1.0 if softcap is None else factor / softcap,
        sinks,
        o,
        np.full(o.shape[:3], math.nan),
        np.zeros(o.shape[:3], int),
    )
    domain = Ascending(TILE_M, config.tile_n)
    splitter = cta.SPLITTER(batch, domain, TILE_M, sides(causal, *window), splits, multiprocessors)
    needs = multiprocessors, splitter.q_rows, splits
    parts, trace = Parts(parts_needed(*needs), [0] * counters_needed(*needs)), list[Event]()
    order = list(range(multiprocessors))
    random.Random(seed).shuffle(order)
    for index in order:
        splitter.cta = index
        machine = Machine(policy, seed, index, COSTS)
        score = SCORES[score_of(softcap is not None, False)]
        cta(batch, splitter, parts, score, config, machine).run()
        trace += machine.trace
    parts.settle()
    for at in np.argwhere(batch.written != 1)[:1]:
        raise CountError(f"exit: row {tuple(at)} was written {batch.written[tuple(at)]} times")
    return Result(o, batch.lse, trace) if cu_seqlens_q is None else Result(o[0], batch.lse[0], trace)
