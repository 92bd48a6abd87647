"""Runs the role programs of `schedules.forward_tmem` on a CPU: NumPy numbers, and an objection to every race in them.

As `schedules.simulate` does for those of `schedules.forward`; but what is ordered is found out by clocks
(`schedules.causality`), as here nearly everything is handed from role to role by barriers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np

from schedules.causality import Causality, Clock, ClockedBarrier, Region, TensorCore
from schedules.domain import Bounds, Dense, Section, Visits
from schedules.forward import FLOOR, Slot, WorkRing
from schedules.forward_tmem import PAIR, Correct, Multiply, Signal, Softmax, Store, TmemRole
from schedules.machine import CountError, Hazard, Machine, OrderError, RangeError, TileError, Until
from schedules.scores import Score
from schedules.simulate import NumpyLoad, Tensors
from schedules.tiling import ELEMENT_BYTES, TmemConfig
from schedules.work import RaggedWork, Work

WARPS = 4  # of a warpgroup: each arrives for itself
HALF = 2  # 16-bit values in a column of tensor memory


# -- rings and signals -------------------------------------------------------------------------------------------------


class ClockedCta(Protocol):
    """What rings and signals ask of a CTA."""

    MULTIPLY: str  # the name of the role whose releases are commits
    machine: Machine
    causality: Causality
    tensor_core: TensorCore

    def arrivals(self) -> int:
        """Of the running role, each time: every warp of it."""
        ...


class ClockedRing(WorkRing):
    """Slots of shared memory, of which `source` says what a copy brings. Who waits for a slot reads it, who releases it
    has; nothing but clocks says whether that is true."""

    def __init__(
        self,
        cta: ClockedCta,
        name: str,
        stages: int,
        shape: tuple[int, int],
        full: int,
        empty: int,
        source: Callable[[Any, int], np.ndarray] | None = None,
    ) -> None:
        """`full` and `empty` are the arrivals that the barriers count."""
        self.cta, self.machine, self.causality = cta, cta.machine, cta.causality
        self.name, self.stages, self.source = name, stages, source
        self.data = np.full((stages, *shape), math.nan)
        self.tiles: list[tuple[Any, int] | None] = [None] * stages  # the work tile and the tile that a slot is for
        self.posted: list[Any] = [None] * stages
        self.bytes = shape[0] * shape[1] * ELEMENT_BYTES
        self.full = [ClockedBarrier(cta.causality, f"{name}[{i}] full", full) for i in range(stages)]
        self.empty = [ClockedBarrier(cta.causality, f"{name}[{i}] empty", empty) for i in range(stages)]

    def region(self, slot: Slot) -> Region:
        if not 0 <= slot.stage < self.stages:
            self.machine.fail(Hazard, f"{self.name} has stages 0 to {self.stages - 1}, not {slot.stage}")
        return Region(f"{self.name}[{slot.stage}]")

    def acquire(self, slot: Slot) -> None:
        where = self.region(slot)
        self.empty[slot.stage].sync(f"acquire {where}", slot.parity ^ 1)

    def load(self, slot: Slot, work: Any, tile: int) -> None:
        """PTX cp.async.bulk.tensor."""
        where, stage = self.region(slot), slot.stage
        self.machine.op(f"issue load {where}", tile)
        begin = self.causality.told()
        clock = self.causality.start(f"load {where}", f"load {where}", begin, writes=[where])
        assert self.source is not None
        rows = self.source(work, tile)
        self.data[stage] = math.nan
        self.tiles[stage] = work, tile

        def land() -> None:
            self.machine.retire([flight])
            self.data[stage] = rows
            self.full[stage].land(clock, self.bytes)

        flight = self.machine.issue("tma", f"load {where}", tile, land)

    def commit(self, slot: Slot) -> None:
        self.machine.op(f"commit {self.region(slot)}")
        expected = self.bytes if self.source is not None else 0
        self.full[slot.stage].tell(self.causality.told(), self.cta.arrivals(), expected)

    def wait(self, slot: Slot) -> None:
        where = self.region(slot)
        self.full[slot.stage].sync(f"wait {where}", slot.parity, tensor=self.source is not None)

    def release(self, slot: Slot) -> None:
        """By `Multiply` when its MMAs are done, by others at once."""
        where = self.region(slot)
        empty = self.empty[slot.stage]
        self.machine.op(f"release {where}")
        if self.causality.me == self.cta.MULTIPLY:
            self.cta.tensor_core.commit(empty, str(where))
        else:
            empty.tell(self.causality.told(), self.cta.arrivals())

    def post(self, slot: Slot, work: Any) -> None:
        self.machine.op(f"post {self.region(slot)}", work.q_tile)
        self.causality.touch(writes=[self._posted(slot)])
        self.posted[slot.stage] = work

    def work(self, slot: Slot) -> Any:
        self.machine.op(f"work {self.region(slot)}")
        self.causality.touch(reads=[self._posted(slot)])
        if self.posted[slot.stage] is None:
            self.machine.fail(Hazard, f"nothing was posted in {self.region(slot)}")
        return self.posted[slot.stage]

    def _posted(self, slot: Slot) -> Region:
        return Region(f"the work tile of {self.region(slot)}")

    def settle(self) -> None:
        for full in self.full:
            if not full.at_rest():
                raise CountError(f"exit: {full}")


class ClockedSignal(Signal):
    def __init__(self, cta: ClockedCta, name: str, count: int) -> None:
        self.cta, self.name = cta, name
        self.barrier = ClockedBarrier(cta.causality, name, count)

    def arrive(self) -> None:
        self.cta.machine.op(f"arrive {self.name}")
        self.barrier.tell(self.cta.causality.told(), self.cta.arrivals())

    def wait(self, parity: int) -> None:
        self.barrier.sync(f"wait {self.name}", parity)

    def commit(self) -> None:
        self.cta.machine.op(f"commit {self.name}")
        self.cta.tensor_core.commit(self.barrier, self.name)

    def settle(self) -> None:
        if not self.barrier.at_rest():
            raise CountError(f"exit: {self.barrier}")


# -- roles -------------------------------------------------------------------------------------------------------------


class NumpyRole(TmemRole):
    machine: Machine
    causality: Causality

    def __init__(self, cta: TmemCta) -> None:
        self.cta, self.machine, self.causality = cta, cta.machine, cta.causality
        self.q, self.scores, self.weights, self.outputs = cta.q, cta.scores, cta.weights, cta.outputs
        self.factors, self.staged = cta.factors, cta.staged

    def visits(self, work: Work) -> Visits:
        return self.cta.visits(work)

    def take(self) -> None:
        self.machine.op("take")
        self.causality.take()

    def hand_over(self) -> None:
        self.machine.op("hand_over")
        self.causality.publish("tensor")


class NumpyMultiply(Multiply, NumpyRole):
    """S, P and O of a Q tile are arrays; P is where the first half of S is, and who writes one destroys the other."""

    def __init__(self, cta: TmemCta) -> None:
        NumpyRole.__init__(self, cta)
        self.k, self.v = cta.k, cta.v
        self.seen: defaultdict[tuple[str, int, Any], list[int]] = defaultdict(list)

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def issue_qk(self, i: int, q_slot: Slot, slot: Slot) -> None:
        q, k, tmem = self.cta.q[i], self.cta.k, self.cta.tmem[i]
        reads = [q.region(q_slot), k.region(slot)]
        found = k.tiles[slot.stage]
        self.machine.op(f"issue QK{i} {reads[1]}", found and found[1])

        def effect() -> None:
            tmem.s[:] = q.data[q_slot.stage] @ k.data[slot.stage].T
            tmem.p[:] = math.nan
            tmem.of_s = k.tiles[slot.stage]

        self.cta.tensor_core.issue(f"QK {i}", found and found[1], effect, reads, [tmem.where_s])
        self._note("QK", i, found)

    def issue_pv(self, i: int, slot: Slot, before: int) -> None:
        v, tmem = self.cta.v, self.cta.tmem[i]
        found = v.tiles[slot.stage]
        self.machine.op(f"issue PV{i} {v.region(slot)}", found and found[1])

        def effect() -> None:
            if tmem.of_p != v.tiles[slot.stage]:
                raise TileError(f"PV{i}: P is of {tmem.of_p}, V of {v.tiles[slot.stage]}")
            more = tmem.p @ v.data[slot.stage]
            tmem.o[:] = tmem.o + more if before > 0 else more

        self.cta.tensor_core.issue(
            f"PV {i}", found and found[1], effect, [v.region(slot), tmem.where_p, tmem.where_o], [tmem.where_o]
        )
        self._note("PV", i, found)

    def _note(self, mma: str, i: int, found: tuple[Any, int] | None) -> None:
        if found is None:
            self.machine.fail(TileError, f"{mma}{i} of a slot that nothing was loaded into")
        self.seen[mma, i, found[0]].append(found[1])

    def settle(self) -> None:
        """Each tile was visited once, by both Q tiles, in order."""
        for (mma, i, work), tiles in self.seen.items():
            visits = self.cta.visits(work)
            wanted = [self.cta.domain.tile(visits, position) for position in range(visits.total)]
            if tiles != wanted:
                raise TileError(f"exit: {mma}{i} of {work} visited the tiles {tiles}, not {wanted}")


class NumpyRows:
    """The softmax of a Q tile: a row's reference, sum and factor are a row of an array each."""

    machine: Machine
    causality: Causality

    def hold_rows(self, rows: int, columns: int, scale_log2: float, rescale_above: float) -> None:
        self.scale_log2, self.rescale_above = scale_log2, rescale_above
        self.s = np.zeros((rows, columns))
        self.reference, self.factor, self.row_sum = np.zeros((3, rows, 1))
        self.of: list[Any] = [None]

    def start(self) -> None:
        self.machine.op("start")
        self.reference[:], self.row_sum[:] = FLOOR, 0

    def load_rows(self, tmem: Scored) -> None:
        self.machine.op("load_s")
        self.causality.touch(reads=[tmem.where_s], kind="tensor")
        self.s[:] = tmem.s
        self.of[0] = tmem.of_s
        self.machine.actor.tile = self.of[0] and self.of[0][1]

    def hide(self, first: int, lo: np.ndarray, hi: np.ndarray, left: bool) -> None:
        """Keys from `hi` on, and with `left` those before `lo`; `first` is that of the tile."""
        keys = first + np.arange(self.s.shape[1])
        self.s[(keys >= hi) | ((keys < lo) & left)] = -math.inf

    def row_max(self) -> None:
        self.machine.op("row_max")
        most = np.fmax(np.fmax.reduce(self.s, axis=1, keepdims=True) * self.scale_log2, FLOOR)
        moves = most > self.reference + self.rescale_above
        if self.machine.policy != "steady" and self.machine.random.random() < 0.25:  # to rescale is always allowed
            moves = most > self.reference
        self.factor[:] = np.where(moves, np.exp2(self.reference - most), 1)
        self.reference[:] = np.where(moves, most, self.reference)

    def store_weights(self, tmem: Scored) -> None:
        self.s[:] = np.exp2(self.s * self.scale_log2 - self.reference)
        self.row_sum[:] = self.row_sum * self.factor + self.s.sum(axis=1, keepdims=True)
        self.causality.touch(writes=[tmem.where_p], kind="tensor")
        if (self.s > 2.0**self.rescale_above).any():
            self.machine.fail(RangeError, f"a weight is {self.s.max()}")
        tmem.p[:] = self.s
        tmem.s[:, : self.s.shape[1] // HALF] = math.nan
        tmem.of_p = self.of[0]


class NumpySoftmax(NumpyRows, Softmax, NumpyRole):
    def __init__(self, cta: TmemCta, index: int) -> None:
        NumpyRole.__init__(self, cta)
        self.index, self.domain, self.score = index, cta.domain, cta.score
        self.tmem, self.tensors, self.config = cta.tmem[index], cta.tensors, cta.config
        self.hold_rows(cta.rows, cta.config.tile_n, cta.tensors.scale_log2, cta.config.rescale_above)
        self.slope = np.zeros(1)

    def queries(self, work: Any) -> np.ndarray:
        return self.cta.queries(work, self.index)

    def take_up(self, work: Work) -> None:
        self.machine.op("take_up")
        slopes = self.tensors.slopes
        self.slope[:] = slopes[work.batch if len(slopes) > 1 else 0, work.head]

    def load_s(self) -> None:
        self.load_rows(self.tmem)

    def change_scores(self, work: Work, tile: int, section: Section) -> None:
        self.machine.op("change_scores", tile)
        if self.score.softcap:
            self.s[:] = np.tanh(self.s * self.tensors.cap_factor)
        if self.score.alibi:
            bounds = self.cta.bounds(work)
            own = self.queries(work)[:, None] + bounds.seqlen_k - bounds.seqlen_q
            distances = tile * self.config.tile_n + np.arange(self.config.tile_n) - own
            self.s[:] -= self.slope * math.log2(math.e) / self.tensors.scale_log2 * abs(distances)

    def mask(self, work: Work, tile: int, section: Section) -> None:
        self.machine.op("mask", tile)
        self.hide(tile * self.config.tile_n, *self.cta.limits(work, self.index), left=section is Section.LEFT)

    def write_factor(self) -> None:
        self.machine.op("write_factor")
        self._write(self.factor)

    def _write(self, *columns: np.ndarray) -> None:
        self.causality.touch(writes=[Region(f"factors{self.index}")])
        self.cta.notes[self.index] = np.hstack(columns)

    def exponents(self, tile: int, section: Section) -> None:
        self.machine.op("exponents", tile)
        if self.of[0] is None or self.of[0][1] != tile:
            self.machine.fail(TileError, f"S is of {self.of[0]}")
        self.store_weights(self.tmem)

    def write_sum(self) -> None:
        self.machine.op("write_sum")
        self._write(self.row_sum, self.reference)


class NumpyCorrect(Correct, NumpyRole):
    def __init__(self, cta: TmemCta) -> None:
        NumpyRole.__init__(self, cta)
        self.tensors = cta.tensors
        self.note = np.zeros((cta.rows, 2))

    def _read(self, i: int, columns: int) -> None:
        self.causality.touch(reads=[Region(f"factors{i}")])
        found = self.cta.notes[i]
        if found is None or found.shape[1] != columns:
            self.machine.fail(OrderError, f"finds {found is not None and found.shape[1]} numbers a row, not {columns}")
        self.note[:, :columns] = found

    def read_factor(self, i: int) -> bool:
        self.machine.op(f"read_factor {i}")
        self._read(i, 1)
        return bool((self.note[:, 0] < 1).any())

    def rescale(self, i: int) -> None:
        self.machine.op(f"rescale {i}")
        tmem = self.cta.tmem[i]
        self.causality.touch(reads=[tmem.where_o], writes=[tmem.where_o], kind="tensor")
        tmem.o *= self.note[:, :1]

    def read_sum(self, i: int) -> None:
        self.machine.op(f"read_sum {i}")
        self._read(i, 2)

    def stage_o(self, i: int, slot: Slot, work: Work) -> None:
        self.machine.op(f"stage_o {i}")
        tmem = self.cta.tmem[i]
        self.causality.touch(reads=[tmem.where_o], kind="tensor")
        row_sum, reference = self.note[:, :1], self.note[:, 1:]
        lo, hi = self.cta.limits(work, i)
        rows = self.cta.queries(work, i)
        past = rows[:, None] >= self.cta.bounds(work).seqlen_q
        blind = (hi <= np.maximum(lo, 0)) | past
        if (row_sum < 2.0**-self.cta.config.rescale_above * (1 - 1e-9))[~blind].any():
            self.machine.fail(RangeError, f"the weights of a row add up to {row_sum[~blind].min()}")
        sink = (-math.inf if self.tensors.sinks is None else self.tensors.sinks[work.head]) * math.log2(math.e)
        largest = np.fmax(reference, sink)
        shrink = np.exp2(reference - largest)
        total = row_sum * shrink + np.exp2(sink - largest)
        self.causality.touch(writes=[self.cta.staged.region(slot)], kind="proxy")
        self.cta.staged.data[slot.stage] = np.where(blind, 0, tmem.o * shrink / total)
        lse = np.where(blind, sink, largest + np.log2(total)) * math.log(2)
        lse[past] = -math.inf
        self.tensors.write("lse", work, rows, lse[:, 0])

    def publish_o(self) -> None:
        self.machine.op("publish_o")
        self.causality.publish("proxy")


class NumpyStore(Store, NumpyRole):
    def __init__(self, cta: TmemCta) -> None:
        NumpyRole.__init__(self, cta)
        self.stores: list[tuple[Any, Clock]] = []

    def store_o(self, i: int, slot: Slot, work: Work) -> None:
        where = self.cta.staged.region(slot)
        self.machine.op(f"issue store O{i}", work.q_tile)
        clock = self.causality.start(f"store {where}", f"store O{i}", self.causality.told(), reads=[where])
        rows = self.cta.queries(work, i)

        def land() -> None:
            self.machine.retire([flight])
            self.cta.tensors.write("o", work, rows, self.cta.staged.data[slot.stage])

        flight = self.machine.issue("tma", f"store O{i}", work.q_tile, land)
        self.stores.append((flight, clock))

    def drain(self) -> None:
        self.machine.op("drain", until=self.cta.until(lambda: all(flight.landed for flight, _ in self.stores)))
        for _, clock in self.stores:
            self.causality.learn(clock)
        self.stores.clear()


# -- a CTA -------------------------------------------------------------------------------------------------------------


class Scored:
    """Columns of tensor memory that have S of a Q tile, and then P in the first half of them."""

    def __init__(self, rows: int, tile_n: int, start: int) -> None:
        self.s, self.p = (np.full((rows, tile_n), math.nan) for _ in range(2))
        self.of_s: Any = None  # the work tile and the KV tile
        self.of_p: Any = None
        self.where_s = Region("tensor memory", start, start + tile_n)
        self.where_p = Region("tensor memory", start, start + tile_n // HALF)


class Tmem(Scored):
    """The tensor memory of a Q tile: S in some columns, O in others."""

    def __init__(self, index: int, rows: int, tile_n: int, value_dim: int) -> None:
        super().__init__(rows, tile_n, index * tile_n)
        self.o = np.full((rows, value_dim), math.nan)
        start = len(PAIR) * tile_n + index * value_dim
        self.where_o = Region("tensor memory", start, start + value_dim)


class TmemCta:
    """The roles of one CTA, their memory and their barriers. Tests break one of them at a time."""

    LOAD: type[NumpyLoad] = NumpyLoad
    MULTIPLY_ROLE: type[NumpyMultiply] = NumpyMultiply
    SOFTMAX: type[NumpySoftmax] = NumpySoftmax
    CORRECT: type[NumpyCorrect] = NumpyCorrect
    STORE: type[NumpyStore] = NumpyStore
    RING: type[ClockedRing] = ClockedRing
    SIGNAL: type[ClockedSignal] = ClockedSignal
    MULTIPLY = "multiply"

    def __init__(
        self,
        tensors: Tensors,
        domain: Dense,
        bounds: Bounds,
        score: Score,
        config: TmemConfig,
        machine: Machine,
        works: Iterator[Any],
    ) -> None:
        """`works` are the work tiles that this CTA gets when it asks; those after the last one are not valid."""
        self.tensors, self.domain, self.whole, self.score, self.config = tensors, domain, bounds, score, config
        self.machine, self.works = machine, works
        self.causality = Causality(machine)
        self.tensor_core = TensorCore(self.causality)
        self.rows = config.tile_m // len(PAIR)
        n, dims, value_dims = config.tile_n, config.head_dim, config.value_dim
        self.tmem = [Tmem(i, self.rows, n, value_dims) for i in PAIR]
        self.notes: list[np.ndarray | None] = [None for _ in PAIR]
        self.q = [self._query_ring(i) for i in PAIR]
        k, v = (self._source(tensor, size) for tensor, size in ((tensors.k, dims), (tensors.v, value_dims)))
        self.k = self.RING(self, "K", config.stages, (n, dims), 1, 1, k)
        self.v = self.RING(self, "V", config.stages, (n, value_dims), 1, 1, v)
        self.factors = [self.RING(self, f"factors{i}", 1, (1, 1), WARPS, WARPS) for i in PAIR]
        self.staged = self.RING(self, "staged O", config.o_stages, (self.rows, value_dims), WARPS, 1)
        self.scores = [self.SIGNAL(self, f"S{i} is there", 1) for i in PAIR]
        self.weights = [self.SIGNAL(self, f"P{i} is there", 2 * WARPS) for i in PAIR]
        self.outputs = [self.SIGNAL(self, f"O{i} is there", 1) for i in PAIR]

    def _query_ring(self, index: int) -> ClockedRing:
        """Released by the MMAs and by who reads the work tile: the softmax, and of the first one correction and
        store."""
        tensors, dims = self.tensors, self.config.head_dim

        def source(work: Any, tile: int) -> np.ndarray:
            start = tile * self.config.tile_m + index * self.rows
            return tensors.box(tensors.q, work.entry, work.head, tensors.queries_of(work), start, self.rows, dims)

        empty = 1 + WARPS + (WARPS + 1 if index == 0 else 0)
        return self.RING(self, f"Q{index}", self.config.q_stages, (self.rows, dims), 1, empty, source)

    def _source(self, tensor: np.ndarray, dims: int) -> Callable[[Any, int], np.ndarray]:
        def source(work: Any, tile: int) -> np.ndarray:
            head, n = work.head // (self.tensors.heads // self.tensors.kv_heads), self.config.tile_n
            return self.tensors.box(tensor, work.entry, head, self.tensors.keys_of(work), tile * n, n, dims)

        return source

    def arrivals(self) -> int:
        """Of the running role, each time: every warp of it."""
        return WARPS if self.causality.me.startswith(("softmax", "correct")) else 1

    def until(self, holds: Callable[[], bool]) -> Until:
        return Until(holds, lambda: "stores in flight")

    def bounds(self, work: Work | RaggedWork) -> Bounds:
        if isinstance(work, RaggedWork):
            return self.whole._replace(seqlen_q=work.seqlen_q, seqlen_k=work.seqlen_k)
        return self.whole

    def visits(self, work: Work | RaggedWork) -> Visits:
        return self.domain.visits(work.q_tile, self.bounds(work))

    def queries(self, work: Any, index: int) -> np.ndarray:
        """The rows of a Q tile, past the last query too."""
        return work.q_tile * self.config.tile_m + index * self.rows + np.arange(self.rows)

    def limits(self, work: Any, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The first key that each query sees and one past the last, as columns."""
        bounds = self.bounds(work)
        ends = [f(int(row), bounds) for row in self.queries(work, index) for f in (self.domain.lo, self.domain.hi)]
        lo, hi = np.array(ends).reshape(-1, 2).T
        return lo[:, None], hi[:, None]

    def roles(self) -> dict[str, Any]:
        found: dict[str, Any] = {"load": self.LOAD(self), self.MULTIPLY: self.MULTIPLY_ROLE(self)}
        found |= {f"softmax{i}": self.SOFTMAX(self, i) for i in PAIR}
        return found | {"correct": self.CORRECT(self), "store": self.STORE(self)}

    def run(self) -> None:
        """Every role's program, to its end. Raises a `ScheduleError`."""

        def run(role: Any) -> None:
            with np.errstate(all="ignore"):  # as on the chip, infinities and NaN spread in silence
                role.run()

        roles = self.roles()
        for name, role in roles.items():
            self.machine.spawn(name, lambda role=role: run(role))  # type: ignore[misc]
        self.machine.run()
        rings = (*self.q, self.k, self.v, *self.factors, self.staged)
        for thing in (*rings, *self.scores, *self.weights, *self.outputs, roles[self.MULTIPLY], self.causality):
            thing.settle()
