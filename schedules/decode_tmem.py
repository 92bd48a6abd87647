"""The role programs of paged attention where accumulators are in tensor memory, which all warps can reach.

A CTA attends to one split after another, as in `schedules.decode`, of whose Q tiles every query has a thread:

    Fetch     the producer warpgroup of `schedules.decode`
    Multiply  one warp issues all MMAs
    Decode    a warpgroup makes P of S, lets O shrink where it must, and leaves what a split has

Memory is what all of them wait for, so one warpgroup does what two Q tiles' softmax and correction share in
`schedules.forward_tmem`. But nothing of it may wait for a QK: tensor memory has room for S of two tiles, and the QK of
a tile is issued as soon as its K is there, before P of the tile before is. Tiles are counted over all splits, and with
two of S the stage of a tile's is also the parity of all else that happens once a tile.

The tensor core carries MMAs out in the order of their issue. A QK writes over the P of two tiles before: that one's PV
was issued before it, and its S was read before that P was there.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from cutlass import const_expr

from schedules import program
from schedules.decode import SplitRole
from schedules.domain import Ascending, Section, Visits
from schedules.forward import Ring, Slot, WorkRing
from schedules.forward_tmem import Signal, TensorMemoryRole
from schedules.program import range
from schedules.scores import Score
from schedules.splits import Split


class TmemSplitRole(TensorMemoryRole):
    """What these roles have in common."""

    q: WorkRing
    scores: Ring  # S of a tile is there; nobody need release it
    weights: Signal  # P of a tile is there, and O is as it should be
    products: Signal  # O has the PV of a tile


class Multiply(TmemSplitRole):
    """The warp that issues the MMAs."""

    k: Ring
    v: Ring

    @abstractmethod
    def alone(self) -> AbstractContextManager[Any]:
        """One thread does what is inside, always the same one: a commit is of its own MMAs."""

    @abstractmethod
    def issue_qk(self, q_slot: Slot, slot: Slot, s: Slot) -> None:
        """S = Q K^T."""

    @abstractmethod
    def issue_pv(self, slot: Slot, s: Slot, before: int) -> None:
        """O += P V, or O = P V if no tile of the split came `before`."""

    @program.jit
    def run(self) -> None:
        q_slot = self.q.first()
        slot = self.k.first()
        s = self.scores.first()
        self.q.wait(q_slot)
        split = self.q.work(q_slot)
        while split.valid != 0:
            self.k.wait(slot)
            self.score(q_slot, slot, s)
            for position in range(split.begin + 1, split.end, unroll=1):
                ahead = self.k.next(slot)
                s_ahead = self.scores.next(s)
                self.k.wait(ahead)
                self.score(q_slot, ahead, s_ahead)
                self.weigh(slot, s, position - 1 - split.begin)
                slot = ahead
                s = s_ahead
            self.leave_q(q_slot)
            self.weigh(slot, s, split.end - 1 - split.begin)
            slot = self.k.next(slot)
            s = self.scores.next(s)
            q_slot = self.q.next(q_slot)
            self.q.wait(q_slot)
            split = self.q.work(q_slot)

    def score(self, q_slot: Slot, slot: Slot, s: Slot) -> None:
        with self.alone():
            self.issue_qk(q_slot, slot, s)
            self.scores.commit(s)
            self.k.release(slot)

    @program.jit
    def weigh(self, slot: Slot, s: Slot, before: int) -> None:
        self.v.wait(slot)
        self.weights.wait(s.stage)
        self.take()
        self.multiply(slot, s, before)

    def multiply(self, slot: Slot, s: Slot, before: int) -> None:
        """The commit that somebody waits for comes last, lest the CTA end before the other."""
        with self.alone():
            self.issue_pv(slot, s, before)
            self.v.release(slot)
            self.products.commit()

    def leave_q(self, q_slot: Slot) -> None:
        with self.alone():
            self.q.release(q_slot)


class Decode(SplitRole, TmemSplitRole):
    """The warpgroup of the Q tile: a row for each thread."""

    domain: Ascending
    score: Score

    @abstractmethod
    def take_up(self, split: Split) -> None:
        """Reads what the head of a split has of its own: its sink."""

    @abstractmethod
    def start(self) -> None:
        """No row has a sum yet, nor a reference."""

    @abstractmethod
    def load_s(self, s: Slot) -> None:
        """S comes into registers (PTX: tcgen05.ld)."""

    @abstractmethod
    def change_scores(self, split: Split, tile: int, section: Section) -> None:
        """`schedules.scores`: softcap."""

    @abstractmethod
    def mask(self, split: Split, tile: int, section: Section) -> None:
        """Scores of keys that a query does not see become minus infinity."""

    @abstractmethod
    def row_max(self) -> None:
        """Rows whose maximum has outgrown their reference get that as their reference, and a factor below 1."""

    @abstractmethod
    def exponents(self, s: Slot) -> None:
        """The row sums shrink and grow, and the weights, in 16 bits, go where S was, as P (PTX: tcgen05.st)."""

    @abstractmethod
    def shrinks(self) -> Any:
        """True if rows of this warp have a factor below 1."""

    @abstractmethod
    def rescale(self) -> None:
        """O shrinks."""

    def visits(self, split: Split) -> Visits:
        return self.splitter.visits(split, split.q_tile)

    @program.jit
    def run(self) -> None:
        q_slot = self.q.first()
        s = self.scores.first()
        plan = self.splitter.plan()
        split = self.read_split(q_slot)
        while split.valid != 0:
            visits = self.visits(split)
            place = self.splitter.place(plan, split)
            self.take_up(split)
            self.start()
            begin, right = split.begin, visits.total - visits.right
            for position in range(begin, min(split.end, visits.left), unroll=1):
                s = self.step(Section.LEFT, split, visits, position, s)
            for position in range(max(begin, visits.left), min(split.end, right), unroll=1):
                s = self.step(Section.BODY, split, visits, position, s)
            for position in range(max(begin, right), split.end, unroll=1):
                s = self.step(Section.RIGHT, split, visits, position, s)
            self.products.wait(s.stage ^ 1)
            self.take()
            self.leave(split, place)
            self.hand_over()
            q_slot = self.q.next(q_slot)
            split = self.read_split(q_slot)

    @program.jit
    def read_split(self, q_slot: Slot) -> Split:
        self.q.wait(q_slot)
        split = self.q.work(q_slot)
        self.q.release(q_slot)
        return split

    @program.jit
    def step(self, section: Section, split: Split, visits: Visits, position: int, s: Slot) -> Slot:
        tile = self.domain.tile(visits, position)
        self.scores.wait(s)
        self.take()
        self.load_s(s)
        if const_expr(not self.score.plain):
            self.change_scores(split, tile, section)
        if const_expr(section is not Section.BODY):
            self.mask(split, tile, section)
        self.row_max()
        self.exponents(s)
        self.products.wait(s.stage ^ 1)
        self.correct(position - split.begin)
        self.hand_over()
        self.weights.arrive()
        return self.scores.next(s)

    @program.jit
    def correct(self, before: int) -> None:
        if self.shrinks() and before > 0:
            self.shrink()

    def shrink(self) -> None:
        self.take()
        self.rescale()
