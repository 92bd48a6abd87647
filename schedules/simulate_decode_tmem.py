"""Runs the role programs of `schedules.decode_tmem` on a CPU, as `schedules.simulate_decode` runs those of
`schedules.decode`: CTA after CTA, and inside of one everything is ordered by clocks (`schedules.causality`)."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from schedules.causality import Causality, Clock, ClockedBarrier, Region, TensorCore
from schedules.decode import PagedRing
from schedules.decode_tmem import Decode, Multiply, TmemSplitRole
from schedules.domain import Section
from schedules.forward import Ring, Slot
from schedules.machine import Flight, Machine, TileError
from schedules.scores import Score
from schedules.simulate_decode import TILE_M, Batch, NumpyFetch, NumpySplitRole, NumpySplitter, PagedCta, Parts
from schedules.simulate_tmem import WARPS, ClockedRing, ClockedSignal, NumpyRows, Scored
from schedules.splits import Split
from schedules.tiling import S_STAGES, WARPGROUP, TmemPagedConfig

SMALL = TmemPagedConfig(16, 16, 2, 2, 200, 208, 96, tile_m=TILE_M)


# -- rings and signals -------------------------------------------------------------------------------------------------


class ClockedPagedRing(ClockedRing, PagedRing):
    """A ring whose slots asynchronous copies of single rows fill: every thread arrives when its own have landed."""

    pages: np.ndarray  # of K or V

    def __init__(
        self, cta: TmemDecodeCta, name: str, stages: int, shape: tuple[int, int], full: int, empty: int
    ) -> None:
        super().__init__(cta, name, stages, shape, full, empty)
        self.paged = cta
        self.flights: dict[int, tuple[Flight, Clock]] = {}  # that no commit has followed

    def gather(self, slot: Slot, split: Split, position: int, pages: Any) -> None:
        where = self.region(slot)
        self.machine.op(f"issue load {where}", position)
        rows = self.paged.gathered(self.pages, split, position, pages, self.data.shape[1:])
        self._copy(slot, rows, (split, split.tile + position))

    def _copy(self, slot: Slot, rows: np.ndarray, of: tuple[Any, int]) -> None:
        where, stage = self.region(slot), slot.stage
        clock = self.causality.start(f"load {where}", f"load {where}", self.causality.told(), writes=[where])
        self.data[stage] = math.nan
        self.tiles[stage] = of

        def land() -> None:
            self.machine.retire([flight])
            self.data[stage] = rows

        flight = self.machine.issue("tma", f"load {where}", of[1], land)
        self.flights[stage] = flight, clock

    def commit(self, slot: Slot) -> None:
        """PTX cp.async.mbarrier.arrive.noinc: an arrival is no earlier than the copies."""
        self.machine.op(f"commit {self.region(slot)}")
        full = self.full[slot.stage]
        flight, clock = self.flights.pop(slot.stage, (None, Clock()))
        if flight is None or flight.landed:
            full.tell(clock, WARPGROUP)
            return
        landed = flight.effect

        def effect() -> None:
            landed()
            full.tell(clock, WARPGROUP)

        flight.effect = effect

    def wait(self, slot: Slot) -> None:
        """What was copied is there for MMAs, too (PTX: fence.proxy.async)."""
        self.full[slot.stage].sync(f"wait {self.region(slot)}", slot.parity, tensor=True)


class ClockedSplitRing(ClockedPagedRing):
    """The ring of Q. One thread posts, and arrives for itself."""

    def post(self, slot: Slot, work: Split) -> None:
        super().post(slot, work)
        self.full[slot.stage].tell(self.causality.told())

    def load(self, slot: Slot, work: Split, tile: int) -> None:
        self.machine.op(f"issue load {self.region(slot)}", tile)
        self._copy(slot, self.paged.packed(work, tile, self.data.shape[1:]), (work, tile))


class ClockedScores(Ring):
    """S of two tiles."""

    stages = S_STAGES

    def __init__(self, cta: TmemDecodeCta) -> None:
        self.cta = cta
        self.full = [ClockedBarrier(cta.causality, f"S[{i}] is there", 1) for i in range(self.stages)]

    def commit(self, slot: Slot) -> None:
        self.cta.machine.op(f"commit S[{slot.stage}]")
        self.cta.tensor_core.commit(self.full[slot.stage], f"S[{slot.stage}]")

    def wait(self, slot: Slot) -> None:
        self.full[slot.stage].sync(f"wait S[{slot.stage}]", slot.parity)

    def acquire(self, slot: Slot) -> None:
        raise NotImplementedError("that S was read is known before")

    load = release = acquire  # type: ignore[assignment]


# -- roles -------------------------------------------------------------------------------------------------------------


class NumpyTmemRole(TmemSplitRole):
    cta: Any
    machine: Machine
    causality: Causality

    def join_cta(self, cta: TmemDecodeCta) -> None:
        self.cta, self.machine, self.causality = cta, cta.machine, cta.causality
        self.q, self.scores, self.weights, self.products = cta.q[0], cta.scores, cta.weights, cta.products

    def take(self) -> None:
        self.machine.op("take")
        self.causality.take()

    def hand_over(self) -> None:
        self.machine.op("hand_over")
        self.causality.publish("tensor")


class NumpyMultiply(NumpyTmemRole, Multiply):
    def __init__(self, cta: TmemDecodeCta) -> None:
        self.join_cta(cta)
        self.k, self.v = cta.k, cta.v

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext()

    def issue_qk(self, q_slot: Slot, slot: Slot, s: Slot) -> None:
        q, k, tmem = self.cta.q[0], self.cta.k, self.cta.tmem[s.stage]
        reads = [q.region(q_slot), k.region(slot)]
        found = k.tiles[slot.stage]
        self.machine.op(f"issue QK {reads[1]}", found and found[1])

        def effect() -> None:
            tmem.s[:] = q.data[q_slot.stage] @ k.data[slot.stage].T
            tmem.p[:] = math.nan
            tmem.of_s = k.tiles[slot.stage]

        self.cta.tensor_core.issue("QK", found and found[1], effect, reads, [tmem.where_s])
        self._note("QK", found)

    def issue_pv(self, slot: Slot, s: Slot, before: int) -> None:
        v, tmem, cta = self.cta.v, self.cta.tmem[s.stage], self.cta
        found = v.tiles[slot.stage]
        self.machine.op(f"issue PV {v.region(slot)}", found and found[1])

        def effect() -> None:
            if tmem.of_p != v.tiles[slot.stage]:
                raise TileError(f"PV: P is of {tmem.of_p}, V of {v.tiles[slot.stage]}")
            more = tmem.p @ v.data[slot.stage]
            cta.o[:] = cta.o + more if before > 0 else more

        reads = [v.region(slot), tmem.where_p, cta.where_o]
        cta.tensor_core.issue("PV", found and found[1], effect, reads, [cta.where_o])
        self._note("PV", found)

    def _note(self, mma: str, found: tuple[Any, int] | None) -> None:
        if found is None:
            self.machine.fail(TileError, f"{mma} of a slot that nothing was loaded into")
        self.cta.seen.setdefault((mma, found[0]), []).append(found[1])


class NumpyTmemDecode(NumpyTmemRole, NumpyRows, NumpySplitRole, Decode):
    def __init__(self, cta: TmemDecodeCta) -> None:
        self.join_cta(cta)
        self.leave_splits_of(cta)
        self.hold_rows(cta.rows, cta.config.tile_n, cta.batch.scale_log2, cta.config.rescale_above)
        self.domain, self.score, self.config, self.seen = cta.domain, cta.score, cta.config, cta.seen

    def load_s(self, s: Slot) -> None:
        self.load_rows(self.cta.tmem[s.stage])

    def change_scores(self, split: Split, tile: int, section: Section) -> None:
        self.machine.op("change_scores", tile)
        if self.score.softcap:
            self.s[:] = np.tanh(self.s * self.cta.batch.cap_factor)

    def mask(self, split: Split, tile: int, section: Section) -> None:
        self.machine.op("mask", tile)
        self.hide(tile * self.config.tile_n, *self.limits(split), left=section is Section.LEFT)

    def exponents(self, s: Slot) -> None:
        self.machine.op("exponents")
        self.store_weights(self.cta.tmem[s.stage])

    def shrinks(self) -> bool:
        self.machine.op("shrinks")
        return bool((self.factor < 1).any())

    def rescale(self) -> None:
        self.machine.op("rescale")
        self.causality.touch(reads=[self.cta.where_o], writes=[self.cta.where_o], kind="tensor")
        self.cta.o *= self.factor

    def read_o(self) -> np.ndarray:
        self.causality.touch(reads=[self.cta.where_o], kind="tensor")
        return self.cta.o


# -- a CTA -------------------------------------------------------------------------------------------------------------


class TmemDecodeCta(PagedCta):
    """The roles of one CTA, their memory and their barriers. Tests break one of them at a time."""

    FETCH: type[NumpyFetch] = NumpyFetch
    RING: type[ClockedPagedRing] = ClockedPagedRing
    WORK_RING: type[ClockedSplitRing] = ClockedSplitRing
    MULTIPLY_ROLE: type[NumpyMultiply] = NumpyMultiply
    DECODE: type[NumpyTmemDecode] = NumpyTmemDecode
    SIGNAL: type[ClockedSignal] = ClockedSignal
    SCORES: type[ClockedScores] = ClockedScores
    MULTIPLY = "multiply"

    def __init__(
        self,
        batch: Batch,
        splitter: NumpySplitter,
        parts: Parts,
        score: Score,
        config: TmemPagedConfig,
        machine: Machine,
    ) -> None:
        super().__init__(batch, splitter, parts, score, config, machine)
        self.causality = Causality(machine)
        self.tensor_core = TensorCore(self.causality)
        n, dims, value_dims = config.tile_n, config.head_dim, config.value_dim
        self.tmem = [Scored(self.rows, n, i * n) for i in range(S_STAGES)]
        self.o = np.full((self.rows, value_dims), math.nan)
        self.where_o = Region("tensor memory", S_STAGES * n, S_STAGES * n + value_dims)
        self.seen: dict[Any, list[Any]] = {}
        # One thread more says what was posted; the MMAs, and the warps that know the split, release Q.
        self.q = [self.WORK_RING(self, "Q", config.q_stages, (self.rows, dims), WARPGROUP + 1, 1 + WARPS)]
        self.k = self.RING(self, "K", config.stages, (n, dims), WARPGROUP, 1)
        self.v = self.RING(self, "V", config.stages, (n, value_dims), WARPGROUP, 1)
        self.k.pages, self.v.pages = batch.k_pages, batch.v_pages
        self.scores = self.SCORES(self)
        self.weights = self.SIGNAL(self, "P is there", WARPS)
        self.products = self.SIGNAL(self, "O is there", 1)

    def arrivals(self) -> int:
        """Of the running role, each time: every warp of it."""
        return WARPS if self.causality.me == "decode" else 1

    def roles(self) -> dict[str, Any]:
        return {"fetch": self.FETCH(self), self.MULTIPLY: self.MULTIPLY_ROLE(self), "decode": self.DECODE(self)}

    def run(self) -> None:
        def run(role: Any) -> None:
            with np.errstate(all="ignore"):
                role.run()

        for name, role in self.roles().items():
            self.machine.spawn(name, partial(run, role))
        self.machine.run()
        settling: tuple[Any, ...] = (*self.q, self.k, self.v, self.weights, self.products, self.causality)
        for thing in settling:
            thing.settle()
