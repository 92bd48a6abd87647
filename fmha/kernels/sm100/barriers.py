"""Rings and signals lowered onto mbarriers where MMAs free slots and all that warps say goes through barriers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from fmha.kernels.common.rings import QueryRing, TileRing, TmaRing
from fmha.kernels.sm100 import tcgen05
from schedules.forward import Ring, Slot, WorkRing
from schedules.forward_tmem import Signal
from schedules.tiling import WARPGROUP

WARPS = WARPGROUP // 32


class Family:
    """What there is one of for each Q tile, found by an index that only the kernel knows."""

    def __init__(self, make: Callable[[Int32 | int], Any]) -> None:
        self.make = make

    def __getitem__(self, index: Int32 | int) -> Any:
        return self.make(index)


class Barrier(Signal):
    """An mbarrier that so many arrivals complete. A warp arrives when all of its lanes have come so far."""

    def __init__(self, barrier: cute.Pointer, arrivals: int) -> None:
        self.barrier = barrier
        self.arrivals = arrivals

    def init(self) -> None:
        cute.arch.mbarrier_init(self.barrier, self.arrivals)

    def arrive(self) -> None:
        arrive(self.barrier)

    def wait(self, parity: Int32) -> None:
        cute.arch.mbarrier_wait(self.barrier, parity)

    def commit(self) -> None:
        """By the one thread that issues MMAs."""
        tcgen05.commit(self.barrier)


def arrive(barrier: cute.Pointer) -> None:
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier)


class InTmem:
    """A role with operations on tensor memory, which begins at `tmem`."""

    tmem: Int32

    def take(self) -> None:
        tcgen05.fence_after()

    def hand_over(self) -> None:
        tcgen05.stored()
        tcgen05.fence_before()

    def lanes(self, column: Int32 | int) -> Int32:
        """The address of a column, in the lanes of this warp."""
        lane = cute.arch.warp_idx() % WARPS * 32
        return cute.arch.make_warp_uniform(self.tmem + (lane << 16) + column)


class HandedRing(Ring):
    """Slots of shared memory that warps fill and empty. Barriers: `stages` full ones, then `stages` empty ones."""

    def __init__(self, barriers: cute.Pointer, stages: int, full: int, empty: int) -> None:
        """`full` and `empty` are the arrivals, of a warp each."""
        self.stages = stages
        self.full, self.empty = barriers, barriers + stages
        self.arrivals = full, empty

    def init(self) -> None:
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, self.arrivals[0])
            cute.arch.mbarrier_init(self.empty + stage, self.arrivals[1])

    def acquire(self, slot: Slot) -> None:
        cute.arch.mbarrier_wait(self.empty + slot.stage, slot.parity ^ 1)

    def load(self, slot: Slot, work: Any, tile: int) -> None:
        raise NotImplementedError("warps fill it")

    def commit(self, slot: Slot) -> None:
        arrive(self.full + slot.stage)

    def wait(self, slot: Slot) -> None:
        cute.arch.mbarrier_wait(self.full + slot.stage, slot.parity)

    def release(self, slot: Slot) -> None:
        arrive(self.empty + slot.stage)


class TileRingOfMmas(TileRing):
    """K or V: the MMAs that read a slot release it."""

    def __init__(self, barriers, stages: int, stage_bytes: int, copy, heads_per_kv_head: Int32) -> None:
        super().__init__(barriers, stages, stage_bytes, 1, copy, heads_per_kv_head)

    def release(self, slot: Slot) -> None:
        commit(self, slot)


class QueryTileRing(QueryRing):
    """The Q of one Q tile. Besides the MMAs, `warps` warps release a slot, as soon as they know the work tile."""

    def __init__(self, barriers, stages: int, stage_bytes: int, copy, posted, kind, index, q_tiles: int, warps) -> None:
        super().__init__(barriers, stages, stage_bytes, copy, posted, kind, index, q_tiles)
        self.release_arrivals = 1 + self.RELEASING_LANES * warps


class ReleasedByMmas(WorkRing):
    """The same ring as `Multiply` sees it."""

    def __init__(self, ring: QueryTileRing) -> None:
        self.ring = ring
        self.stages = ring.stages

    def place(self, slot: Slot) -> Int32:
        return self.ring.place(slot)

    def wait(self, slot: Slot) -> None:
        self.ring.wait(slot)

    def work(self, slot: Slot) -> Any:
        return self.ring.work(slot)

    def release(self, slot: Slot) -> None:
        commit(self.ring, slot)

    def acquire(self, slot: Slot) -> None:
        raise NotImplementedError("the producer's")

    load = post = commit = acquire  # type: ignore[assignment]


def commit(ring: TmaRing, slot: Slot) -> None:
    """The slot is released when all MMAs so far are done, of the one thread that issues them."""
    tcgen05.commit(ring.empty + slot.stage)
