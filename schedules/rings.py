"""The rings and turns of `schedules.forward` on the CPU model of `schedules.machine`.

What the barriers say and what is true are kept apart: a slot knows which consumers have waited for it and which have
not released it, whatever its barriers let pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schedules.forward import LendingRing, Ring, Slot, Turn, WorkRing
from schedules.machine import Buffer, CountError, Flight, Hazard, Machine, Mbarrier, NamedBarrier, OrderError, TileError
from schedules.tiling import ELEMENT_BYTES, WARPGROUP
from schedules.work import Work

Source = Callable[[Work, int], np.ndarray]
"""(work tile, tile) -> what is copied into a slot."""


@dataclass(frozen=True)
class Counts:
    """What the barriers of a ring count."""

    full_arrivals: int  # that fill a slot, beside its bytes
    slot_bytes: int  # announced by a commit
    empty_arrivals: int  # that free a slot
    release_arrivals: int  # of one consumer


@dataclass(eq=False)
class RingSlot:
    """A slot as it truly is, whatever its barriers say."""

    name: str
    buffer: Buffer
    full: Mbarrier
    empty: Mbarrier
    announced: int = 0  # bytes of this use, until they are compared
    issued: int = 0
    owed: set[str] = field(default_factory=set)  # consumers that have not released this use
    readers: set[str] = field(default_factory=set)  # those of them that have waited for it
    draft: Any = None  # posted, but not yet by a commit
    posted: Any = None
    lent: bool = False  # to a consumer, for its O
    flight: Flight | None = None  # a copy that no commit has followed
    written: set[str] = field(default_factory=set)  # of what is not written by one operation, what has been

    @property
    def tile(self) -> int | None:
        return self.buffer.tile

    @property
    def work(self) -> object:
        return self.buffer.work

    def tally(self, machine: Machine, announced: int = 0, issued: int = 0) -> None:
        """Compares the bytes announced with those copied, whichever comes first."""
        self.announced += announced
        self.issued += issued
        if self.announced and self.issued:
            if self.announced != self.issued:
                machine.fail(CountError, f"{self.name}: {self.announced} bytes announced, {self.issued} copied")
            self.announced = self.issued = 0


class NumpyRing(Ring):
    """A ring of slots that asynchronous copies fill from `source`."""

    kept = False  # whether the last use of a slot need not be released

    def __init__(
        self,
        machine: Machine,
        name: str,
        buffers: Sequence[Buffer],
        source: Source,
        tiles: int,
        consumers: Sequence[str],
        counts: Counts,
    ) -> None:
        """`buffers` are the stages; `tiles` can be loaded."""
        self.machine = machine
        self.name = name
        self.stages = len(buffers)
        self.source = source
        self.tiles = tiles
        self.consumers = consumers
        self.counts = counts
        self.slots = [self._slot(buffer) for buffer in buffers]

    def _slot(self, buffer: Buffer) -> RingSlot:
        full = Mbarrier(self.machine, f"{buffer.name} full", self.counts.full_arrivals)
        empty = Mbarrier(self.machine, f"{buffer.name} empty", self.counts.empty_arrivals)
        return RingSlot(buffer.name, buffer, full, empty)

    def at(self, slot: Slot) -> RingSlot:
        if not 0 <= slot.stage < self.stages:
            self.machine.actor.doing = f"use {self.name}[{slot.stage}]"
            self.machine.fail(Hazard, f"{self.name} has stages 0 to {self.stages - 1}")
        return self.slots[slot.stage]

    def acquire(self, slot: Slot) -> None:
        here = self.at(slot)
        self.machine.op(f"acquire {here.name}", until=here.empty.completed(slot.parity ^ 1))

    def load(self, slot: Slot, work: Any, tile: int) -> None:
        """PTX cp.async.bulk.tensor: what the slot held is gone from now on, the tile is there when the bytes are."""
        here = self.at(slot)
        self.machine.op(f"issue load {here.name}", tile)
        if work.valid and not 0 <= tile < self.tiles:
            self.machine.fail(TileError, f"{self.name} has tiles 0 to {self.tiles - 1}")
        self.check_released(here)
        here.owed, here.readers = set(self.consumers), set()
        here.buffer.tile, here.buffer.work = tile, work
        self._copy(here, self.source(work, tile))
        here.tally(self.machine, issued=ELEMENT_BYTES * here.buffer.data.size)

    def check_released(self, here: RingSlot) -> None:
        if here.owed:
            self.machine.fail(Hazard, f"refills {here.name}, not released by {', '.join(sorted(here.owed))}")

    def _copy(self, here: RingSlot, rows: np.ndarray) -> None:
        buffer = here.buffer

        def effect() -> None:
            buffer.data[:] = rows
            here.full.complete_bytes(ELEMENT_BYTES * buffer.data.size)
            self.machine.retire([flight])  # from here on the barrier knows

        flight = self.machine.issue("tma", f"load {buffer.name}", buffer.tile, effect, writes=[buffer])
        buffer.data[:] = math.nan

    def commit(self, slot: Slot) -> None:
        """PTX mbarrier.arrive.expect_tx."""
        here = self.at(slot)
        self.machine.op(f"commit {here.name}")
        here.tally(self.machine, announced=self.counts.slot_bytes)
        here.posted, here.draft = here.draft or here.posted, None
        here.full.arrive(expect_bytes=self.counts.slot_bytes)

    def wait(self, slot: Slot) -> None:
        here = self.at(slot)
        self.machine.op(f"wait {here.name}", until=here.full.completed(slot.parity))
        me = self.machine.actor
        me.tile = here.tile
        if me.name not in here.owed:
            self.machine.fail(Hazard, f"the wait passed, but nothing was loaded since {me.name} released {here.name}")
        here.readers.add(me.name)

    def read(self, slot: Slot) -> Buffer:
        """What the running role is about to read, or to write over."""
        here = self.at(slot)
        if self.machine.actor.name not in here.readers:
            self.machine.fail(Hazard, f"uses {here.name} without having waited for it, or after releasing it")
        return here.buffer

    def release(self, slot: Slot) -> None:
        """PTX mbarrier.arrive, by one lane of every warp."""
        here = self.at(slot)
        self.machine.op(f"release {here.name}", here.tile)
        me = self.machine.actor.name
        self.check_unread(here, "releases")
        if me not in here.readers or here.lent:
            self.machine.fail(CountError, f"releases {here.name} without holding it")
        here.owed.remove(me)
        here.readers.remove(me)
        if not here.owed:
            here.posted = None
        here.empty.arrive(self.counts.release_arrivals)

    def check_unread(self, here: RingSlot, does: str) -> None:
        for flight in self.machine.reading(here.buffer):
            self.machine.fail(Hazard, f"{does} {here.name} while {flight} is in flight")

    def settle(self) -> None:
        """At exit every use of a valid work tile has been released, every arrival and byte has found its phase."""
        for here in self.slots:
            if not here.full.at_rest():
                raise CountError(f"exit: {here.full}")
            kept = here.readers if self.kept or here.lent or not getattr(here.work, "valid", True) else set()
            if left := here.owed - kept:
                raise CountError(f"exit: {here.name}, tile {here.tile}, was not released by {', '.join(sorted(left))}")
            if not here.owed and not here.empty.at_rest():
                raise CountError(f"exit: {here.empty}")


class NumpyLendingRing(NumpyRing, LendingRing):
    """The ring of V. Each consumer has a barrier beside those of the slots, for its O to have left one of them."""

    def __init__(self, machine: Machine, name: str, *rest: Any) -> None:
        super().__init__(machine, name, *rest)
        arrivals = self.counts.release_arrivals
        self.left = [Mbarrier(machine, f"O of {consumer} left", arrivals) for consumer in self.consumers]

    def borrow(self, slot: Slot) -> None:
        here = self.at(slot)
        self.machine.op(f"borrow {here.name}", until=here.empty.completed(slot.parity ^ 1))
        self.check_released(here)
        me = self.machine.actor.name
        here.owed, here.readers, here.lent = {me}, {me}, True

    def give_back(self, slot: Slot, index: int) -> None:
        """PTX mbarrier.arrive, by one lane of every warp."""
        here = self.at(slot)
        self.machine.op(f"give_back {here.name}")
        self.check_unread(here, "gives back")
        if not here.lent or self.machine.actor.name not in here.readers:
            self.machine.fail(CountError, f"gives back {here.name}, which it has not borrowed")
        left = self.left_of(index)
        if self.consumers[index] != self.machine.actor.name:
            self.machine.fail(Hazard, f"says that the O of {self.consumers[index]} has left")
        here.owed, here.readers, here.lent = set(), set(), False
        left.arrive(self.counts.release_arrivals)

    def reclaim(self, index: int, parity: int) -> None:
        left = self.left_of(index)
        self.machine.op(f"reclaim {left.name}", until=left.completed(parity ^ 1))

    def left_of(self, index: int) -> Mbarrier:
        """The barrier of consumer `index`."""
        if not 0 <= index < len(self.left):
            self.machine.actor.doing = f"use {self.name}, O of consumer {index}"
            self.machine.fail(Hazard, f"{self.name} has consumers 0 to {len(self.left) - 1}")
        return self.left[index]

    def settle(self) -> None:
        super().settle()
        for left in self.left:
            if not left.at_rest():
                raise CountError(f"exit: {left}")


class NumpyJointRing(NumpyLendingRing):
    """A ring of K or V that several producer warps fill, each a share of the rows of every tile."""

    producers: Sequence[str]

    def load(self, slot: Slot, work: Any, tile: int) -> None:
        here = self.at(slot)
        me = self.machine.actor.name
        self.machine.op(f"issue load {here.name}", tile)
        if not here.written or me in here.written:  # whoever comes first begins a use of the slot
            self.check_released(here)
            here.owed, here.readers, here.written = set(self.consumers), set(), set()
            here.buffer.tile, here.buffer.work = tile, work
        elif (here.tile, here.work) != (tile, work):
            self.machine.fail(TileError, f"the others load tile {here.tile} of {here.work}")
        here.written.add(me)
        rows, index, count = self.source(work, tile), self.producers.index(me), len(self.producers)
        share = slice(index * len(rows) // count, (index + 1) * len(rows) // count)
        self._copy_share(here, share, rows[share])
        if len(here.written) == count:
            here.tally(self.machine, issued=ELEMENT_BYTES * rows.size)

    def _copy_share(self, here: RingSlot, share: slice, rows: np.ndarray) -> None:
        part = Buffer(here.name, here.buffer.data[share], here.buffer.fence)

        def effect() -> None:
            part.data[:] = rows
            here.full.complete_bytes(ELEMENT_BYTES * rows.size)
            self.machine.retire([flight])

        flight = self.machine.issue("tma", f"load {here.name}", here.tile, effect, writes=[part])
        part.data[:] = math.nan


class NumpyWorkRing(NumpyRing, WorkRing):
    """The ring of Q. What is posted beside Q becomes visible with the arrival of `commit` (PTX: mbarrier.arrive)."""

    kept = True  # nothing is loaded over the last O that leaves through a slot

    def post(self, slot: Slot, work: Any) -> None:
        here = self.at(slot)
        self.machine.op(f"post {here.name}", work.q_tile)
        if not here.issued:  # else it has been acquired and is on its way to the next commit
            self.check_released(here)
        here.draft = work

    def work(self, slot: Slot) -> Any:
        here = self.at(slot)
        self.machine.op(f"work {here.name}", here.tile)
        self.read(slot)
        if here.posted is None:
            self.machine.fail(Hazard, f"nothing was posted in {here.name}")
        return here.posted


class Turnstile:
    """The named barriers of a CTA's turns: each warpgroup syncs on its own, its predecessor arrives there."""

    def __init__(self, machine: Machine, names: Sequence[str], threads: int) -> None:
        self.machine = machine
        self.barriers = [NamedBarrier(machine, f"turn of {name}", threads) for name in names]
        self.holder: str | None = None

    def settle(self) -> None:
        """The token that opened the first turn is left, at the barrier of the first warpgroup."""
        left = [sum(barrier.arrived.values()) for barrier in self.barriers]
        if len(left) > 1 and left != [WARPGROUP] + [0] * (len(left) - 1):
            raise CountError(f"exit: {left} threads have arrived for another turn, only one warpgroup at the first may")


class NumpyTurn(Turn):
    """The turn of one warpgroup. A single warpgroup has nobody to take turns with."""

    def __init__(self, turnstile: Turnstile, index: int) -> None:
        self.turnstile = turnstile
        self.machine = turnstile.machine
        self.barrier = turnstile.barriers[index]
        self.after = turnstile.barriers[(index + 1) % len(turnstile.barriers)]
        self.alone = self.after is self.barrier

    def seed(self) -> None:
        """By the last warpgroup, once, before its first turn: opens the first one's."""
        if not self.alone:
            self.after.arrive(WARPGROUP)

    def take(self) -> None:
        if not self.alone:
            self.barrier.sync("turn.take", WARPGROUP)
            if self.turnstile.holder:
                self.machine.fail(OrderError, f"takes the turn that {self.turnstile.holder} holds")
            self.turnstile.holder = self.machine.actor.name

    def give(self) -> None:
        if not self.alone:
            self.machine.op("turn.give")
            self.check()
            self.turnstile.holder = None
            self.after.arrive(WARPGROUP)

    def check(self) -> None:
        """QK MMAs are issued in turn: that is what puts one warpgroup's softmax beside another's MMAs."""
        if not self.alone and self.turnstile.holder != self.machine.actor.name:
            self.machine.fail(OrderError, f"it is the turn of {self.turnstile.holder or 'nobody'}")
