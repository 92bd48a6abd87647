"""What rings and turns have of their own on Hopper: slots of V that O borrows, and named barriers."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fmha.kernels.common.rings import Copy, TileRing
from schedules.forward import LendingRing, Slot, Turn
from schedules.tiling import WARPGROUP


class ValueRing(TileRing, LendingRing):
    """V. Behind the barriers of its slots there is one for each warpgroup, for its O to have left one of them."""

    def __init__(self, barriers, stages, stage_bytes, consumer_warps, copy: Copy, heads_per_kv_head: Int32) -> None:
        super().__init__(barriers, stages, stage_bytes, consumer_warps, copy, heads_per_kv_head)
        self.left = barriers + 2 * stages
        self.warpgroups = consumer_warps * 32 // WARPGROUP

    def init(self) -> None:
        super().init()
        for warpgroup in range(self.warpgroups):
            cute.arch.mbarrier_init(self.left + warpgroup, self.release_arrivals // self.warpgroups)

    def borrow(self, slot: Slot) -> None:
        cute.arch.mbarrier_wait(self.empty + slot.stage, slot.parity ^ 1)

    def give_back(self, slot: Slot, index: Int32) -> None:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(self.left + index)

    def reclaim(self, index: Int32, parity: Int32) -> None:
        cute.arch.mbarrier_wait(self.left + index, parity ^ 1)


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
