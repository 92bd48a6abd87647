"""Runs the role programs of `schedules.forward` on a CPU: NumPy numbers, and an objection to every race in them.

Each role of the forward kernel is subclassed with operations on the model of `schedules.machine`, as
`fmha.kernels.sm90.forward` subclasses it with CuTe ones; the programs are the same.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from schedules.domain import DOMAINS, Bounds, Dense, Section, Visits, mask_of
from schedules.forward import FLOOR, LARGE_PART, Attend, JointLoad, Load, Slot
from schedules.machine import (
    Buffer,
    CountError,
    Event,
    Fence,
    Flight,
    Hazard,
    Machine,
    NamedBarrier,
    RangeError,
    TileError,
    Until,
    Wgmma,
)
from schedules.rings import (
    Counts,
    NumpyJointRing,
    NumpyLendingRing,
    NumpyRing,
    NumpyTurn,
    NumpyWorkRing,
    Source,
    Turnstile,
)
from schedules.scores import SCORES, Score, score_of
from schedules.tiling import ELEMENT_BYTES, WARPGROUP, BlockConfig, TmemConfig
from schedules.work import RaggedWork, Work, in_order, sequences, work_of

AnyRing = TypeVar("AnyRing", bound=NumpyRing)

# Small problems in milliseconds.
SMALL = BlockConfig(16, tile_n=16, stages=2, q_stages=2, consumers=2, producer_registers=24, consumer_registers=240)

LIMIT = 1  # log2: what no weight of an optimistic role should reach

# Nominal times for the "steady" policy, of 64 queries and a 128 x 128 tile, in units of 64 cycles of an H100: an MMA is
# 2 * 64 * 128 * 128 operations at 4096 a cycle, as long as its 64 * 128 exponentials at 16 a cycle.
COSTS = {
    "QK": 8,
    "PV": 8,
    "mask": 1,
    "row_max": 3,
    "exponents": 8,
    "pack_p": 1,
    "foresee": 1,
    "mend": 1,
    "rescale": 2,
    "normalise": 2,
    "load": 6,
    "store": 4,
}


# -- roles -------------------------------------------------------------------------------------------------------------


class NumpyLoad(Load):
    """The producer warp, of whatever kind of CTA."""

    def __init__(self, cta: Any) -> None:
        self.cta = cta
        self.lends = cta.config.lends
        self.q, self.k, self.v = cta.q, cta.k, cta.v

    def first_work(self) -> Work:
        return next(self.cta.works)

    def ask(self) -> Work:
        self.cta.machine.op("ask")
        return next(self.cta.works)

    def next_work(self, asked: Work) -> Work:
        self.cta.machine.op("next_work")
        return asked

    def visits(self, work: Work) -> Visits:
        return self.cta.visits(work)

    def tile(self, visits: Visits, position: int) -> int:
        return self.cta.domain.tile(visits, position)


class NumpyJointLoad(JointLoad, NumpyLoad):
    """One of several producer warps."""

    cta: JointCta

    def __init__(self, cta: JointCta, index: int) -> None:
        NumpyLoad.__init__(self, cta)
        self.leads = index == 0

    def first_work(self) -> Work:
        return self.cta.opening

    def count(self) -> Work:
        self.cta.machine.op("ask")
        return next(self.cta.works)

    def nothing(self) -> None:
        return None

    def tell(self, number: Work) -> None:
        self.cta.machine.op("tell")
        self.cta.told = number

    def told(self) -> Work:
        self.cta.machine.op("told")
        if self.cta.told is None:
            self.cta.machine.fail(Hazard, "nobody has told which work tile is next")
        return self.cta.told

    def meet(self) -> None:
        self.cta.meeting.sync("meet", 32)

    def numbered(self, number: Work) -> Work:
        return number


class NumpyAttend(Attend):
    """A consumer warpgroup. Fragments: `s` (rows, tile_n), `weights` and `p` likewise, `o` (rows, head_dim and columns
    of ones), in float64."""

    q: NumpyWorkRing
    k: NumpyRing
    v: NumpyLendingRing
    turn: NumpyTurn

    def __init__(self, cta: Cta, index: int) -> None:
        config = cta.config
        self.cta, self.config, self.machine, self.tensors = cta, config, cta.machine, cta.tensors
        self.domain, self.score = cta.domain, cta.score
        self.q, self.k, self.v = cta.q[index], cta.k, cta.v
        self.turn = NumpyTurn(cta.turnstile, index)
        self.index = index
        self.mma = Wgmma(cta.machine)
        self.optimistic, self.lends = config.ones > 0, config.lends
        self.s, self.p, self.o = (
            Buffer(name, np.full((cta.rows, columns), math.nan), Fence.WGMMA)
            for name, columns in (("S", config.tile_n), ("P", config.tile_n), ("O", config.value_dim + config.ones))
        )
        self.weights = Buffer("the weights", self.s.data.copy(), Fence.WGMMA) if self.optimistic else self.s
        self.reference, self.grown, self.row_sum = np.zeros((3, cta.rows, 1))
        self.sink = np.zeros(1)
        self.excess = np.zeros(1)  # steps that weights were lowered by and need not have been
        self.stores: list[Flight] = []
        self.seen: defaultdict[tuple[str, object], list[int | None]] = defaultdict(list)

    def queries(self, work: Any) -> np.ndarray:
        """The rows of this warpgroup, past the last query too."""
        return work.q_tile * self.config.tile_m + self.index * self.cta.rows + np.arange(self.cta.rows)

    def limits(self, work: Any) -> tuple[np.ndarray, np.ndarray]:
        """The first key that each query sees and one past the last, as columns."""
        bounds = self.cta.bounds(work)
        ends = [f(int(row), bounds) for row in self.queries(work) for f in (self.domain.lo, self.domain.hi)]
        lo, hi = np.array(ends).reshape(-1, 2).T
        return lo[:, None], hi[:, None]

    def visits(self, work: Work) -> Visits:
        return self.cta.visits(work)

    def begin(self) -> None:
        """The first MMA of a warpgroup needs a fence whatever came before it (PTX: wgmma.fence)."""
        self.machine.touch(writes=[self.s, self.p, self.o])

    def start(self) -> None:
        self.machine.op("start")
        self.machine.touch(reads=[self.s], writes=[self.o])
        self.o.data[:] = 0
        self.reference[:], self.row_sum[:], self.excess[:] = np.fmax(self.needed(), FLOOR), 0, 0

    def fence(self) -> None:
        self.machine.op("fence")
        self.machine.fence(Fence.WGMMA)

    def issue_qk(self, q_slot: Slot, slot: Slot) -> None:
        here = self.k.at(slot)
        self.machine.op(f"issue QK {here.name}", here.tile)
        self.turn.check()
        q, k = self.q.read(q_slot), self.k.read(slot)
        if q.work != k.work:
            self.machine.fail(TileError, f"Q is of {q.work}, K of {k.work}")

        def effect() -> None:
            self.s.data[:] = q.data @ k.data.T

        self.mma.issue("QK", k.tile, effect, [q, k], self.s)
        self.s.tile, self.s.work = k.tile, k.work
        self.seen["QK", k.work].append(k.tile)

    def issue_pv(self, slot: Slot) -> None:
        here = self.v.at(slot)
        self.machine.op(f"issue PV {here.name}", here.tile)
        v = self.v.read(slot)
        if (self.p.tile, self.p.work) != (v.tile, v.work):
            self.machine.fail(TileError, f"P is of tile {self.p.tile} of {self.p.work}, V of {v.work}")
        limit = LIMIT + 1 if self.optimistic else self.config.rescale_above  # mended ones are under 4
        if (self.p.data > 2.0**limit).any():
            self.machine.fail(RangeError, f"a weight is {self.p.data.max()}, more than 2^{limit}")

        def effect() -> None:
            beside = np.ones((self.config.tile_n, self.config.ones))
            self.o.data += self.p.data @ np.hstack([v.data, beside])

        self.mma.issue("PV", v.tile, effect, [self.p, v], self.o)
        self.seen["PV", v.work].append(v.tile)

    def commit(self) -> None:
        self.machine.op("commit")
        self.mma.commit()

    def retire(self, pending: int) -> None:
        self.mma.retire(f"retire({pending})", pending)

    def take_up(self, work: Work) -> None:
        self.machine.op("take_up")
        self.sink[:] = -math.inf if self.tensors.sinks is None else self.tensors.sinks[work.head]

    def change_scores(self, work: Work, tile: int, section: Section) -> None:
        self.machine.op("change_scores", tile)
        self.machine.touch(reads=[self.s], writes=[self.s])
        if (self.s.tile, self.s.work) != (tile, work):
            self.machine.fail(TileError, f"S is of tile {self.s.tile} of {self.s.work}")
        if self.score.softcap:
            self.s.data[:] = np.tanh(self.s.data * self.tensors.cap_factor)
        if self.score.alibi:
            bounds = self.cta.bounds(work)
            own = self.queries(work)[:, None] + bounds.seqlen_k - bounds.seqlen_q
            distances = tile * self.config.tile_n + np.arange(self.config.tile_n) - own
            slopes = self.tensors.slopes
            slope = (
                slopes[work.batch if len(slopes) > 1 else 0, work.head] * math.log2(math.e) / self.tensors.scale_log2
            )
            if section is Section.BODY:  # whose keys are all on one side of a query
                distances = np.where(distances[:, :1] < 0, -distances, distances)
            else:
                distances = abs(distances)
            self.s.data[:] -= slope * distances

    def mask(self, work: Work, tile: int, section: Section) -> None:
        self.machine.op("mask", tile)
        self.machine.touch(reads=[self.s], writes=[self.s])
        if (self.s.tile, self.s.work) != (tile, work):
            self.machine.fail(TileError, f"S is of tile {self.s.tile} of {self.s.work}")
        keys = tile * self.config.tile_n + np.arange(self.config.tile_n)
        lo, hi = self.limits(work)
        self.s.data[(keys >= hi) | ((keys < lo) & (section is Section.LEFT))] = -math.inf

    def needed(self) -> np.ndarray:
        """The references that the rows would get for the present tile."""
        found = np.fmax.reduce(self.s.data, axis=1, keepdims=True)  # NaN is no maximum, as in PTX
        return found * self.tensors.scale_log2 - (LIMIT if self.optimistic else 0)

    def row_max(self) -> bool:
        self.machine.op("row_max", self.s.tile)
        self.machine.touch(reads=[self.s])
        self.grown[:] = np.fmax(self.needed(), self.reference)
        return self.perhaps((self.grown > self.reference + self.config.rescale_above).any())

    def perhaps(self, rescales: np.bool_) -> bool:
        """To rescale is always allowed, and small inputs would seldom ask for it."""
        return bool(rescales) or (self.machine.policy != "steady" and self.machine.random.random() < 0.125)

    def rescale(self) -> None:
        self.machine.op("rescale")
        self.machine.touch(reads=[self.o], writes=[self.o])
        shrink = np.exp2(self.reference - self.grown)
        self.reference[:] = self.grown
        self.row_sum[:] *= shrink
        self.o.data *= shrink

    def exponents(self, tile: int) -> None:
        self.machine.op("exponents", tile)
        self.machine.touch(reads=[self.s], writes=[self.weights])
        if self.s.tile != tile:
            self.machine.fail(TileError, f"S is of tile {self.s.tile}")
        self.weights.data[:] = np.exp2(self.s.data * self.tensors.scale_log2 - self.reference)
        self.weights.tile, self.weights.work = self.s.tile, self.s.work
        if not self.optimistic:
            self.row_sum[:] += self.weights.data.sum(axis=1, keepdims=True)

    def pack_p(self) -> None:
        self.machine.op("pack_p", self.weights.tile)
        self.machine.touch(reads=[self.weights], writes=[self.p])
        self.p.data[:] = self.weights.data
        self.p.tile, self.p.work = self.weights.tile, self.weights.work

    def foresee(self, tiles: int) -> None:
        self.machine.op("foresee", self.p.tile)
        self.machine.touch(reads=[self.weights], writes=[self.p])
        work = self.p.work
        visits = self.cta.visits(work) if isinstance(work, (Work, RaggedWork)) else None
        if visits is None or (self.p.tile, tiles) != (self.domain.tile(visits, 0), visits.total):
            self.machine.fail(TileError, f"P is of tile {self.p.tile}, of {tiles} tiles; the first of all is needed")
        total = self.weights.data.sum(axis=1, keepdims=True)
        self.lower(self.steps(2.0**LIMIT, 2.0**LIMIT + (total - 2.0**LIMIT) * tiles))

    def steps(self, top: np.ndarray | float, total: np.ndarray) -> np.ndarray:
        """See `fmha.kernels.sm90.forward`. An adversary takes one more at times, and numbers stay the same."""
        most = np.fmax(np.fmax(total * (1.5 * LARGE_PART), top), 2.0**LIMIT)
        finite = np.where(np.isfinite(most), most, 2.0**LIMIT)
        excess = self.perhaps(np.False_)
        self.excess[:] += excess
        return np.floor(np.log2(finite)) - LIMIT + excess

    def lower(self, steps: np.ndarray) -> None:
        self.reference[:] += steps
        self.p.data *= np.exp2(-steps)

    def outgrown(self) -> bool:
        self.machine.op("outgrown", self.p.tile)
        self.machine.touch(reads=[self.p])
        return self.perhaps((self.p.data >= 2.0**LIMIT).any())

    def mend(self, tile: int) -> None:
        """Nothing is rounded here, so that every weight is exact already; and a float64 has exponents enough, so that
        it is left to chance whether the weights are computed anew, but for rows that had seen no key before."""
        self.machine.op("mend", tile)
        self.machine.touch(reads=[self.s, self.o], writes=[self.p, self.o])
        if self.perhaps(np.isinf(self.p.data).any()):
            self.row_max()
            self.rescale()
            self.exponents(tile)
            self.pack_p()
        else:
            steps = self.steps(self.p.data.max(axis=1, keepdims=True), self.o.data[:, -1:])
            self.lower(steps)
            self.o.data *= np.exp2(-steps)

    def normalise(self, work: Work) -> None:
        self.machine.op("normalise")
        self.machine.touch(reads=[self.o], writes=[self.o])
        total, _, _, first, *_ = self.cta.visits(work)
        for mma in ("QK", "PV"):
            tiles = self.seen[mma, work]
            if sorted(tile for tile in tiles if tile is not None) != list(range(first, first + total)):
                last = first + total - 1
                self.machine.fail(TileError, f"{mma} visited the tiles {tiles}, not each of {first} to {last} once")
        lo, hi = self.limits(work)
        past = self.queries(work)[:, None] >= self.cta.bounds(work).seqlen_q
        blind = (hi <= np.maximum(lo, 0)) | past
        row_sum = self.o.data[:, -1:].copy() if self.optimistic else self.row_sum
        # A first maximum weighs 1; or it weighs 2, and a row is lowered no further than a sum of 2 over all tiles.
        least = (2 / total if self.optimistic else 1) * 2.0 ** -self.excess[0] * (1 - 1e-9)
        if (row_sum < least)[~blind].any():
            self.machine.fail(RangeError, f"the weights of a row add up to {row_sum[~blind].min()}, less than {least}")
        sink = self.sink * math.log2(math.e)
        largest = np.fmax(self.reference, sink)
        shrink = np.exp2(self.reference - largest)
        weights = row_sum * shrink + np.exp2(sink - largest)
        self.o.data[:] = np.where(blind, 0, self.o.data * shrink / weights)
        lse = np.where(blind, self.sink, (largest + np.log2(weights)) * math.log(2))
        lse[past] = -math.inf
        self.tensors.write("lse", work, self.queries(work), lse[:, 0])

    def staged(self, slot: Slot) -> Buffer:
        """O in the place of this warpgroup's rows of Q, or in a slot of V."""
        ring = self.v if self.lends else self.q
        return Buffer("the staged O", ring.read(slot).data[: self.cta.rows, : self.config.value_dim], Fence.PROXY)

    def stage_o(self, slot: Slot) -> None:
        self.machine.op("stage_o")
        staged = self.staged(slot)
        self.machine.touch(reads=[self.o], writes=[staged])
        staged.data[:] = self.o.data[:, : self.config.value_dim]

    def publish_o(self) -> None:
        self.machine.op("publish_o")
        self.machine.fence(Fence.PROXY)

    def store_o(self, slot: Slot, work: Work) -> None:
        self.machine.op("issue store O", work.q_tile)
        staged = self.staged(slot)

        def effect() -> None:
            self.tensors.write("o", work, self.queries(work), staged.data)

        self.stores.append(self.machine.issue("tma", "store O", work.q_tile, effect, reads=[staged]))

    def drain(self) -> None:
        """PTX cp.async.bulk.wait_group.read."""
        self.machine.op("drain", until=Until(lambda: all(f.landed for f in self.stores), lambda: "stores in flight"))
        self.machine.retire(self.stores)
        self.stores.clear()


# -- a kernel ----------------------------------------------------------------------------------------------------------


class Tensors:
    """Global memory: q, k and v in float64, the outputs, and how often each row of them has been written."""

    def __init__(
        self,
        q: np.ndarray,
        k: np.ndarray,
        v: np.ndarray,
        scale: float | None,
        softcap: float | None = None,
        sinks: np.ndarray | None = None,
        slopes: np.ndarray | None = None,
    ) -> None:
        self.q, self.k, self.v = (np.asarray(tensor, np.float64) for tensor in (q, k, v))
        self.batch, self.seqlen_q, self.heads, self.head_dim = self.q.shape
        self.seqlen_k, self.kv_heads = self.k.shape[1:3]
        self.value_dim = self.v.shape[3]
        scale = self.head_dim**-0.5 if scale is None else scale
        self.scale_log2 = (scale if softcap is None else softcap) * math.log2(math.e)
        self.cap_factor = 1.0 if softcap is None else scale / softcap
        self.sinks = sinks
        self.slopes = np.atleast_2d(np.zeros(self.heads) if slopes is None else slopes)  # [B or 1, Hq]
        self.o = np.full((*self.q.shape[:3], self.value_dim), math.nan)
        self.lse = np.full((self.batch, self.heads, self.seqlen_q), math.nan)
        self.writes = {"o": np.zeros(self.lse.shape, int), "lse": np.zeros(self.lse.shape, int)}

    def check(self, config: BlockConfig | TmemConfig) -> None:
        kv_shape = (self.batch, self.seqlen_k, self.kv_heads)
        alike = self.k.shape == (*kv_shape, self.head_dim) and self.v.shape[:3] == kv_shape
        if not alike or self.heads % self.kv_heads:
            raise ValueError(f"k {self.k.shape} and v {self.v.shape}: not [B, Sk, Hkv, D] to q {self.q.shape}")
        fits = self.head_dim <= config.head_dim and self.value_dim <= config.value_dim
        if min(self.batch, self.seqlen_q, self.seqlen_k) < 1 or not fits:
            raise ValueError(f"q {self.q.shape}, k {self.k.shape}: B, Sq, Sk > 0 and D <= {config.head_dim} only")

    def box(
        self, tensor: np.ndarray, entry: int, head: int, sequence: slice, start: int, rows: int, dims: int
    ) -> np.ndarray:
        """`rows` from row `start` of a sequence, zeros wherever they lie outside of it, or of the tensor (PTX: tensor
        copies)."""
        box = np.zeros((rows, dims))
        if entry < self.batch:
            inside = tensor[entry, sequence, head][start : start + rows]
            box[: inside.shape[0], : inside.shape[1]] = inside
        return box

    def queries_of(self, work: Work | RaggedWork) -> slice:
        if isinstance(work, RaggedWork):
            return slice(work.start_q, work.start_q + work.seqlen_q)
        return slice(0, self.seqlen_q)

    def keys_of(self, work: Work | RaggedWork) -> slice:
        if isinstance(work, RaggedWork):
            return slice(work.start_k, work.start_k + work.seqlen_k)
        return slice(0, self.seqlen_k)

    def write(self, what: str, work: Work | RaggedWork, rows: np.ndarray, values: np.ndarray) -> None:
        """Rows past the last one are clipped, and so are columns past the last dimension."""
        if not work.valid:
            raise TileError(f"{what} of {work} is written, which is no work tile")
        start, count = (work.start_q, work.rows) if isinstance(work, RaggedWork) else (0, self.seqlen_q)
        rows = start + rows[rows < count]
        self.writes[what][work.entry, work.head, rows] += 1
        if what == "o":
            self.o[work.entry, rows, work.head] = values[: len(rows), : self.value_dim]
        else:
            self.lse[work.entry, work.head, rows] = values[: len(rows)]

    def settle(self) -> None:
        for what, count in self.writes.items():
            for batch, head, row in np.argwhere(count != 1)[:1]:
                times = count[batch, head, row]
                raise CountError(f"exit: {what}, batch {batch}, head {head}, row {row} was written {times} times")


class Cta:
    """The roles of one CTA, their shared memory and their barriers. Tests break one of them at a time."""

    RING: type[NumpyRing] = NumpyRing
    LENDING_RING: type[NumpyLendingRing] = NumpyLendingRing
    WORK_RING: type[NumpyWorkRing] = NumpyWorkRing
    LOAD: type[NumpyLoad] = NumpyLoad
    ATTEND: type[NumpyAttend] = NumpyAttend
    TURN_THREADS = 2 * WARPGROUP

    def __init__(
        self,
        tensors: Tensors,
        domain: Dense,
        bounds: Bounds,
        score: Score,
        config: BlockConfig,
        machine: Machine,
        works: Iterator[Any],
    ) -> None:
        """`works` are the work tiles that this CTA gets when it asks; those after the last one are not valid."""
        self.tensors, self.domain, self.whole, self.score, self.config = tensors, domain, bounds, score, config
        self.machine, self.works = machine, works
        self.names = [f"attend{i}" for i in range(config.consumers)]
        self.rows = config.tile_m // config.consumers  # of a consumer
        q_tiles, kv_tiles = -(-tensors.seqlen_q // config.tile_m), max(1, -(-tensors.seqlen_k // config.tile_n))
        q = self.WORK_RING, config.q_stages, self.rows
        self.q = [
            self._ring(q[0], f"Q{i}", *q[1:], self._query_source(i), q_tiles, [name], config.head_dim)
            for i, name in enumerate(self.names)
        ]
        rest = config.stages, config.tile_n
        dims, value_dims = config.head_dim, config.value_dim
        k, v = self._key_source(tensors.k, dims), self._key_source(tensors.v, value_dims)
        self.k = self._ring(self.RING, "K", *rest, k, kv_tiles, self.names, dims)
        self.v = self._ring(self.LENDING_RING, "V", *rest, v, kv_tiles, self.names, value_dims)
        self.turnstile = Turnstile(machine, self.names, self.TURN_THREADS)
        self.load = self.LOAD(self)
        self.attend = [self.ATTEND(self, i) for i in range(config.consumers)]

    def _ring(
        self,
        kind: type[AnyRing],
        name: str,
        stages: int,
        rows: int,
        source: Source,
        tiles: int,
        consumers: Sequence[str],
        dims: int,
    ) -> AnyRing:
        buffers = [Buffer(f"{name}[{i}]", np.full((rows, dims), math.nan), Fence.PROXY) for i in range(stages)]
        counts = self.counts(kind, rows * dims, len(consumers))
        return kind(self.machine, name, buffers, source, tiles, consumers, counts)

    def counts(self, kind: type[NumpyRing], elements: int, consumers: int) -> Counts:
        """What the barriers of a ring count whose slots hold so many elements.

        Who releases a slot has read it by MMAs, and one lane of each warp arrives. What is posted in a slot of Q every
        lane has read for itself, and every lane arrives.
        """
        releasing = WARPGROUP if issubclass(kind, NumpyWorkRing) else WARPGROUP // 32
        return Counts(
            full_arrivals=1,
            slot_bytes=elements * ELEMENT_BYTES,
            empty_arrivals=releasing * consumers,
            release_arrivals=releasing,
        )

    def _query_source(self, index: int) -> Source:
        def source(work: Work, tile: int) -> np.ndarray:
            start = tile * self.config.tile_m + index * self.rows
            tensors, sequence = self.tensors, self.tensors.queries_of(work)
            return tensors.box(tensors.q, work.entry, work.head, sequence, start, self.rows, self.config.head_dim)

        return source

    def _key_source(self, tensor: np.ndarray, dims: int) -> Source:
        def source(work: Work, tile: int) -> np.ndarray:
            head = work.head // (self.tensors.heads // self.tensors.kv_heads)
            n = self.config.tile_n
            return self.tensors.box(tensor, work.entry, head, self.tensors.keys_of(work), tile * n, n, dims)

        return source

    def bounds(self, work: Work | RaggedWork) -> Bounds:
        if isinstance(work, RaggedWork):
            return self.whole._replace(seqlen_q=work.seqlen_q, seqlen_k=work.seqlen_k)
        return self.whole

    def visits(self, work: Work | RaggedWork) -> Visits:
        return self.domain.visits(work.q_tile, self.bounds(work))

    def producers(self) -> dict[str, Load]:
        """By name."""
        return {"load": self.load}

    def open_turns(self) -> None:
        """By the last warpgroup, before its program."""
        self.attend[-1].turn.seed()

    def run(self) -> None:
        """Every role's program, to its end. Raises a `ScheduleError`."""

        def attend(role: NumpyAttend) -> None:
            role.begin()
            if role is self.attend[-1]:
                self.open_turns()
            with np.errstate(all="ignore"):  # as on the chip, infinities and NaN spread in silence
                role.run()

        for producer, load in self.producers().items():
            self.machine.spawn(producer, load.run)
        for name, role in zip(self.names, self.attend, strict=True):
            self.machine.spawn(name, lambda role=role: attend(role))  # type: ignore[misc]
        self.machine.run()
        for ring in (*self.q, self.k, self.v):
            ring.settle()
        self.turnstile.settle()


class JointCta(Cta):
    """With several producer warps."""

    RING = LENDING_RING = NumpyJointRing
    JOINT_LOAD: type[NumpyJointLoad] = NumpyJointLoad
    WARPS = 4

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.opening = next(self.works)
        self.told: Work | None = None
        self.loads = {f"load{warp}": self.JOINT_LOAD(self, warp) for warp in range(self.WARPS)}
        self.meeting = NamedBarrier(self.machine, "the producers' meeting", 32 * self.WARPS)
        for ring in (self.k, self.v):
            ring.producers = list(self.loads)  # type: ignore[attr-defined]

    def producers(self) -> dict[str, Load]:
        return dict(self.loads)


class Result(NamedTuple):
    """o [B, Sq, Hq, D] and lse [B, Hq, Sq] (natural logarithm) in float64, and what happened, CTA by CTA."""

    o: np.ndarray
    lse: np.ndarray
    trace: list[Event]


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    cu_seqlens: tuple[Sequence[int], Sequence[int]] | None = None,
    seqused: tuple[Sequence[int] | None, Sequence[int] | None] = (None, None),
    config: BlockConfig | TmemConfig = SMALL,
    head_group: int = 1,
    multiprocessors: int = 2,
    seed: int = 0,
    policy: str = "random",
    cta: Callable[..., Any] = Cta,
) -> Result:
    """Attention by the role programs of `schedules.forward`, on a CPU.

    q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D], of any float dtype; B, Sq, Sk > 0, D at most `config.head_dim`, Hkv
    divides Hq. `window` is that of `mask_of`. `scale` multiplies the scores; None is 1/sqrt(D). `softcap`, `sinks` [Hq]
    and `alibi_slopes` [Hq] or [B, Hq] are those of `fmha.attention`. With `seqused` (of queries and of keys) the batch
    is ragged; with `cu_seqlens` (likewise) it is packed, and B is 1. A CTA runs on each of the `multiprocessors`;
    `seed` and `policy` (one of `machine.POLICIES`) pick who gets which work tile, and the interleaving inside each CTA.
    Whatever they are, the numbers are those of a softmax in float64. Raises a `ScheduleError` where the programs race,
    ValueError for shapes that do not fit.
    """
    tensors = Tensors(q, k, v, scale, softcap, sinks, alibi_slopes)
    tensors.check(config)
    mask, bounds = mask_of(causal, window, tensors.seqlen_q, tensors.seqlen_k)
    score = SCORES[score_of(softcap is not None, alibi_slopes is not None)]
    domain = DOMAINS[mask](config.tile_m, config.tile_n, nearest_first=score.alibi)
    listing = None
    if cu_seqlens is not None or seqused != (None, None):
        batch = tensors.batch if cu_seqlens is None else len(cu_seqlens[0]) - 1
        found = sequences(batch, tensors.seqlen_q, tensors.seqlen_k, cu_seqlens, seqused, head_group * tensors.seqlen_k)
        listing = in_order(found, config.tile_m)
    q_tiles = -(-tensors.seqlen_q // config.tile_m)

    def work(index: int) -> Work | RaggedWork:
        if listing is not None:
            return listing.work(index, tensors.heads, config.tile_m)
        return work_of(index, q_tiles, tensors.heads, tensors.batch, head_group)

    total = tensors.heads * (q_tiles * tensors.batch if listing is None else listing.first[-1])
    trace: list[Event] = []
    for index, indices in enumerate(share_out(total, multiprocessors, seed)):
        works = map(work, indices)
        machine = Machine(policy, seed, index, COSTS)
        cta(tensors, domain, bounds, score, config, machine, works).run()
        trace += machine.trace
    tensors.settle()
    return Result(tensors.o, tensors.lse, trace)


def share_out(total: int, multiprocessors: int, seed: int) -> list[Iterator[int]]:
    """The work tiles that each CTA gets: the one of its own index, then whatever an atomic counter gives it.

    CTAs share nothing but that counter. So any way to deal out what it counts is a possible interleaving of theirs, and
    they can be simulated one after another.
    """
    shares = [[index] for index in range(min(total, multiprocessors))]
    dealer = random.Random(seed)
    for index in range(len(shares), total):
        dealer.choice(shares).append(index)
    return [itertools.chain(share, itertools.count(total + cta)) for cta, share in enumerate(shares)]
