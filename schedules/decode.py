"""The role programs of paged attention: a few queries a sequence, keys and values in pages.

A CTA attends to one split after another (`schedules.splits`). A producer warpgroup (`Fetch`) looks the pages of a tile
up and copies its keys and values into shared memory, row by row, while a consumer warpgroup (`Decode`) attends to the
tiles before as `schedules.forward` does: 64 rows, which are the queries of all heads that share a KV head, so that
these are read once. Memory is what this waits for; the rings hold as much of it as shared memory has room for.

The operations besides those of `schedules.forward`:

    ring.gather(slot, ...)  start asynchronous copies of a tile's rows from their pages; rows that nobody sees are zeros
    ring.commit(slot)       arrive when this thread's copies have landed (PTX: cp.async.mbarrier.arrive.noinc)
    ring.wait(slot)         wait for those of all, and order them before the MMAs that follow (PTX: fence.proxy.async)
    open, turn              begin to read which pages a tile is in, and go on to the next tile
    write_part, publish     a split's O, its rows' sums and references, for whoever is last
    arrive                  one more split has left its part: true for the last one
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from cutlass import const_expr

from schedules import program
from schedules.domain import Section, Visits
from schedules.forward import Attend, Ring, Role, Slot, WorkRing
from schedules.program import range
from schedules.splits import Place, Split, Splitter


class PagedRing(Ring):
    """A ring of K or V."""

    def load(self, slot: Slot, work: Any, tile: int) -> None:
        raise NotImplementedError("its tiles are gathered")

    @abstractmethod
    def gather(self, slot: Slot, split: Split, position: int, pages: Any) -> None: ...


class Fetch(Role):
    """The producer warpgroup."""

    q: WorkRing
    k: PagedRing
    v: PagedRing
    splitter: Splitter

    @abstractmethod
    def open(self, split: Split) -> Any:
        """Begins to read which pages the split's tiles are in, from the first on."""

    @abstractmethod
    def turn(self, split: Split, position: int, pages: Any) -> Any:
        """The pages of the tile at `position`, where `pages` are those of the tile before."""

    @program.jit
    def run(self) -> None:
        """Pages are looked up long before they are copied: memory has so much to do that an answer takes as long as the
        copies of a whole ring."""
        q_slot = self.q.first()
        slot = self.k.first()
        plan = self.splitter.plan()
        split = self.splitter.first(plan)
        while split.valid != 0:
            pages = self.open(split)
            for position in range(split.begin, split.end, unroll=1):
                self.k.acquire(slot)
                self.k.gather(slot, split, position, pages)
                self.k.commit(slot)
                self.v.acquire(slot)
                self.v.gather(slot, split, position, pages)
                self.v.commit(slot)
                slot = self.k.next(slot)
                pages = self.turn(split, position + 1, pages)
                if position == split.begin:  # K is on its way already
                    self.load_q(q_slot, split)
            q_slot = self.q.next(q_slot)
            split = self.splitter.next(plan, split)
        self.q.acquire(q_slot)
        self.q.post(q_slot, split)
        self.q.commit(q_slot)

    @program.jit
    def load_q(self, q_slot: Slot, split: Split) -> None:
        self.q.acquire(q_slot)
        self.q.post(q_slot, split)
        self.q.load(q_slot, split, split.q_tile)
        self.q.commit(q_slot)


class SplitRole(Role):
    """Who attends to splits, and leaves a part of each or the output."""

    splitter: Splitter

    @abstractmethod
    def write_part(self, split: Split, place: Place) -> None:
        """O, the sums and the references go where the last one finds them."""

    @abstractmethod
    def publish(self) -> None:
        """What all threads of the warpgroup have written comes before what one of them says next, for all CTAs."""

    @abstractmethod
    def arrive(self, place: Place) -> Any:
        """True if all other splits of the Q tile have left their parts: these can now be read."""

    @abstractmethod
    def merge(self, split: Split, place: Place) -> None:
        """Writes the output, of all parts. The counter is 0 again."""

    @abstractmethod
    def write(self, split: Split) -> None:
        """Writes the output of a Q tile that is not split."""

    @program.jit
    def leave(self, split: Split, place: Place) -> None:
        """The output, if this is the only split of its Q tile or the last one to end."""
        if place.parts == 1:
            self.write(split)
        else:
            self.write_part(split, place)
            self.publish()
            if self.arrive(place):
                self.merge(split, place)


class Decode(SplitRole, Attend):
    """The consumer warpgroup."""

    def visits(self, split: Split) -> Visits:  # type: ignore[override]
        return self.splitter.visits(split, split.q_tile)

    @program.jit
    def run(self) -> None:
        q_slot = self.q.first()
        slot = self.k.first()
        plan = self.splitter.plan()
        self.q.wait(q_slot)
        split = self.q.work(q_slot)
        while split.valid != 0:
            visits = self.visits(split)
            tile = self.domain.tile(visits, split.begin)
            place = self.splitter.place(plan, split)
            self.take_up(split)
            self.open(q_slot, slot)
            self.retire(0)
            self.k.release(slot)
            if const_expr(not self.score.plain):
                self.change_scores(split, tile, Section.LEFT)
            self.mask(split, tile, Section.LEFT)
            self.start()
            self.exponents(tile)
            self.pack_p()
            begin, right = split.begin + 1, visits.total - visits.right
            for position in range(begin, min(split.end, visits.left), unroll=1):
                slot = self.step(Section.LEFT, split, visits, position, q_slot, slot)
            for position in range(max(begin, visits.left), min(split.end, right), unroll=1):
                slot = self.step(Section.BODY, split, visits, position, q_slot, slot)
            for position in range(max(begin, right), split.end, unroll=1):
                slot = self.step(Section.RIGHT, split, visits, position, q_slot, slot)
            self.v.wait(slot)
            self.fence()
            self.issue_pv(slot)
            self.commit()
            self.retire(0)
            self.v.release(slot)
            self.q.release(q_slot)
            self.leave(split, place)
            slot = self.k.next(slot)
            q_slot = self.q.next(q_slot)
            self.q.wait(q_slot)
            split = self.q.work(q_slot)

    def leave_q(self, position: int, last: int, q_slot: Slot) -> None:
        """Not before the end: O leaves straight from registers."""
