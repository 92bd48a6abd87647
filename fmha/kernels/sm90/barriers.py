"""Rings and turns lowered onto Hopper's mbarriers, TMA and named barriers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from schedules.forward import Ring, Slot, Turn
from schedules.tiling import WARPGROUP
from schedules.work import Work


class TmaRing(Ring):
    """A ring whose slots TMA fills. Barriers: `stages` full ones, then `stages` empty ones.

    A full barrier completes when the producer has arrived once and the bytes have landed; an empty one when one lane
    of each of `consumer_warps` warps has arrived.
    """

    def __init__(self, barriers: cute.Pointer, stages: int, stage_bytes: int, consumer_warps: int) -> None:
        self.stages = stages
        self.stage_bytes = stage_bytes
        self.consumer_warps = consumer_warps
        self.full = barriers
        self.empty = barriers + stages

    def init(self) -> None:
        """By one thread of the CTA, before the barrier that opens the roles."""
        for stage in range(self.stages):
            cute.arch.mbarrier_init(self.full + stage, 1)
            cute.arch.mbarrier_init(self.empty + stage, self.consumer_warps)

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

    def __init__(self, barriers, stages, stage_bytes, consumer_warps, atom, shared, tiles, heads_per_kv_head) -> None:
        super().__init__(barriers, stages, stage_bytes, consumer_warps)
        self.atom = atom
        self.shared = shared  # (TMA, stage)
        self.tiles = tiles  # (TMA, tile, kv_head, batch)
        self.heads_per_kv_head = heads_per_kv_head

    def load(self, slot: Slot, work: Work, tile: int) -> None:
        cute.copy(
            self.atom,
            self.tiles[None, tile, work.head // self.heads_per_kv_head, work.batch],
            self.shared[None, slot.stage],
            tma_bar_ptr=self.full + slot.stage,
        )


class QueryRing(TmaRing):
    """Q: one slot of a 64-row copy for each consumer warpgroup."""

    def __init__(self, barriers, stage_bytes, consumer_warps, atom, shared, tiles, warpgroups) -> None:
        super().__init__(barriers, 1, stage_bytes, consumer_warps)
        self.atom = atom
        self.shared = shared  # (TMA, warpgroup)
        self.tiles = tiles  # (TMA, 64 rows, head, batch)
        self.warpgroups = warpgroups

    def load(self, slot: Slot, work: Work, tile: int) -> None:
        for warpgroup in range(self.warpgroups):
            cute.copy(
                self.atom,
                self.tiles[None, tile * self.warpgroups + warpgroup, work.head, work.batch],
                self.shared[None, warpgroup],
                tma_bar_ptr=self.full + slot.stage,
            )


class PingPong(Turn):
    """One named barrier a warpgroup: it syncs on its own, its predecessor arrives there.

    Barrier ids from `FIRST`; id 0 is the CTA's. The last warpgroup's first arrival opens the first one's turn.
    """

    FIRST = 1

    def __init__(self, warpgroup: cutlass.Int32, warpgroups: int) -> None:
        self.warpgroup = warpgroup
        self.warpgroups = warpgroups

    def seed(self) -> None:
        """By the last warpgroup, once, before its first turn."""
        self.give()

    def take(self) -> None:
        if self.warpgroups > 1:
            cute.arch.barrier(barrier_id=self.FIRST + self.warpgroup, number_of_threads=2 * WARPGROUP)

    def give(self) -> None:
        if self.warpgroups > 1:
            after = (self.warpgroup + 1) % self.warpgroups
            cute.arch.barrier_arrive(barrier_id=self.FIRST + after, number_of_threads=2 * WARPGROUP)
