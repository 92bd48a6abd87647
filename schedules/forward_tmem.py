"""The role programs of forward kernels whose accumulators are in tensor memory, which all warps can reach.

A CTA attends to two Q tiles at a time, of 128 query rows each. The roles are warps or warpgroups of their own:

    Load      the producer of `schedules.forward`
    Multiply  one warp issues all MMAs: S = Q K^T for each Q tile, then O += P V and the next S = Q K^T, in turns
    Softmax   a warpgroup for each Q tile, a thread for each row: P over S, in place, and how far O must shrink
    Correct   a warpgroup lets O shrink, where it must, before the next PV comes on top; in the end it normalises O
    Store     one warp copies O to global memory

The tensor core carries out the MMAs of a thread in the order of their issue. So a QK that comes behind a PV may write
over the P that this reads, and who hears that the QK is done knows that the PV is, too: one `Signal` says both, that
the scores are there and that O may be touched.

The operations besides those of `schedules.forward`:

    signal.arrive()      one more part of what is waited for is done
    signal.wait(parity)  until all of it is, for the phase of this parity (PTX: mbarrier.try_wait.parity)
    signal.commit()      arrives when all MMAs issued so far are done (PTX: tcgen05.commit)
    ring.release(slot)   by `Multiply`: the same, at the ring's empty barrier
    take()               what was waited for comes before the tensor-memory operations that follow, of this role
                         (PTX: tcgen05.fence::after_thread_sync)
    hand_over()          those of this role so far come before what its next arrival says, of all its threads
                         (PTX: tcgen05.wait::ld, wait::st, fence::before_thread_sync)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from cutlass import const_expr

from schedules import program
from schedules.domain import Dense, Section, Visits
from schedules.forward import Ring, Role, Slot, WorkRing
from schedules.program import range
from schedules.scores import Score
from schedules.work import Work

Q_TILES = 2  # of a CTA
PAIR = (0, 1)  # their indices


class Signal(ABC):
    """An mbarrier, phase after phase."""

    @abstractmethod
    def arrive(self) -> None: ...

    @abstractmethod
    def wait(self, parity: int) -> None: ...

    @abstractmethod
    def commit(self) -> None: ...


class TensorMemoryRole(Role):
    """A role with operations on tensor memory."""

    @abstractmethod
    def take(self) -> None: ...

    @abstractmethod
    def hand_over(self) -> None: ...


class TmemRole(TensorMemoryRole):
    """What these roles have in common."""

    q: Sequence[WorkRing]  # of each Q tile
    scores: Sequence[Signal]  # S of a Q tile is there, and O has what came before
    weights: Sequence[Signal]  # P is there, S is read, and O is as it should be
    outputs: Sequence[Signal]  # O has the last PV of a work tile
    factors: Sequence[Ring]  # what `Softmax` tells `Correct`, a slot of a number or two a row
    staged: Ring  # O on its way to global memory

    @abstractmethod
    def visits(self, work: Work) -> Visits: ...

    @program.jit
    def read_work(self, index: int, q_slot: Slot) -> Work:
        """The work tile, posted for each Q tile. Whoever does not multiply need not keep the slot."""
        self.q[index].wait(q_slot)
        work = self.q[index].work(q_slot)
        self.q[index].release(q_slot)
        return work


class Multiply(TmemRole):
    """The warp that issues the MMAs."""

    k: Ring
    v: Ring

    @abstractmethod
    def alone(self) -> AbstractContextManager[Any]:
        """One thread does what is inside, always the same one: a commit is of its own MMAs."""

    @abstractmethod
    def issue_qk(self, i: int, q_slot: Slot, slot: Slot) -> None:
        """S = Q K^T of Q tile `i`."""

    @abstractmethod
    def issue_pv(self, i: int, slot: Slot, before: int) -> None:
        """O += P V of Q tile `i`, or O = P V if no tile came `before`."""

    @program.jit
    def run(self) -> None:
        q_slot = self.q[0].first()
        slot = self.k.first()
        parity = 0
        work = self.work(q_slot)
        while work.valid != 0:
            last = self.visits(work).total - 1
            self.k.wait(slot)
            self.begin(q_slot, slot)
            for position in range(0, last, unroll=1):
                ahead = self.k.next(slot)
                self.k.wait(ahead)
                self.v.wait(slot)
                for i in PAIR:
                    self.weights[i].wait(parity)
                    self.take()
                    self.advance(i, q_slot, slot, ahead, position)
                self.leave(slot, ahead)
                slot = ahead
                parity = parity ^ 1
            self.leave_q(q_slot)
            self.v.wait(slot)
            for i in PAIR:
                self.weights[i].wait(parity)
                self.take()
                self.close(i, slot, last)
            parity = parity ^ 1
            q_slot = self.q[0].next(q_slot)
            slot = self.k.next(slot)
            work = self.work(q_slot)
        self.k.wait(slot)  # behind the last work tile Q and K come all the same

    def work(self, q_slot: Slot) -> Work:
        for i in PAIR:
            self.q[i].wait(q_slot)
        return self.q[0].work(q_slot)

    def begin(self, q_slot: Slot, slot: Slot) -> None:
        """The first QK of a work tile."""
        with self.alone():
            for i in PAIR:
                self.issue_qk(i, q_slot, slot)
                self.scores[i].commit()
            self.k.release(slot)

    def advance(self, i: int, q_slot: Slot, slot: Slot, ahead: Slot, position: int) -> None:
        with self.alone():
            self.issue_pv(i, slot, position)
            self.issue_qk(i, q_slot, ahead)
            self.scores[i].commit()

    def leave(self, slot: Slot, ahead: Slot) -> None:
        with self.alone():
            self.v.release(slot)
            self.k.release(ahead)

    def leave_q(self, q_slot: Slot) -> None:
        with self.alone():
            for i in PAIR:
                self.q[i].release(q_slot)

    def close(self, i: int, slot: Slot, last: int) -> None:
        """A commit that somebody waits for comes last, lest the CTA end before one."""
        with self.alone():
            self.issue_pv(i, slot, last)
            if i == PAIR[-1]:
                self.v.release(slot)
            self.outputs[i].commit()


class Softmax(TmemRole):
    """The warpgroup of Q tile `index`: a row for each thread."""

    index: int
    domain: Dense
    score: Score

    @abstractmethod
    def take_up(self, work: Work) -> None:
        """Reads what the head of a work tile has of its own: its slope."""

    @abstractmethod
    def start(self) -> None:
        """No row has a sum yet, nor a reference."""

    @abstractmethod
    def load_s(self) -> None:
        """S comes into registers (PTX: tcgen05.ld)."""

    @abstractmethod
    def change_scores(self, work: Work, tile: int, section: Section) -> None:
        """`schedules.scores`: softcap and ALiBi."""

    @abstractmethod
    def mask(self, work: Work, tile: int, section: Section) -> None:
        """Scores of keys that a query does not see become minus infinity."""

    @abstractmethod
    def row_max(self) -> None:
        """Rows whose maximum has outgrown their reference get that as their reference, and a factor below 1."""

    @abstractmethod
    def write_factor(self) -> None:
        """What O, and the row sum, shrink by."""

    @abstractmethod
    def exponents(self, tile: int, section: Section) -> None:
        """The row sums shrink and grow, and the weights, in 16 bits, go where S was, as P (PTX: tcgen05.st)."""

    @abstractmethod
    def write_sum(self) -> None:
        """The row sums and the references."""

    @program.jit
    def run(self) -> None:
        q_slot = self.q[self.index].first()
        note = self.factors[self.index].first()
        parity = 0
        nearest_first = self.domain.nearest_first
        sections = (Section.RIGHT, Section.BODY) if const_expr(nearest_first) else (Section.BODY, Section.RIGHT)
        work = self.read_work(self.index, q_slot)
        while work.valid != 0:
            visits = self.visits(work)
            inner = visits.right if const_expr(nearest_first) else visits.total - visits.right - visits.left
            self.take_up(work)
            self.start()
            for position in range(0, inner, unroll=1):
                note = self.step(sections[0], work, visits, position, parity, note)
                parity = parity ^ 1
            for position in range(inner, visits.total - visits.left, unroll=1):
                note = self.step(sections[1], work, visits, position, parity, note)
                parity = parity ^ 1
            if const_expr(Section.LEFT in self.domain.sections):
                for position in range(visits.total - visits.left, visits.total, unroll=1):
                    note = self.step(Section.LEFT, work, visits, position, parity, note)
                    parity = parity ^ 1
            self.factors[self.index].acquire(note)
            self.write_sum()
            self.factors[self.index].commit(note)
            note = self.factors[self.index].next(note)
            q_slot = self.q[self.index].next(q_slot)
            work = self.read_work(self.index, q_slot)

    @program.jit
    def step(self, section: Section, work: Work, visits: Visits, position: int, parity: int, note: Slot) -> Slot:
        tile = self.domain.tile(visits, position)
        self.scores[self.index].wait(parity)
        self.take()
        self.load_s()
        if const_expr(not self.score.plain):
            self.change_scores(work, tile, section)
        if const_expr(section is not Section.BODY):
            self.mask(work, tile, section)
        self.row_max()
        self.factors[self.index].acquire(note)
        self.write_factor()
        self.factors[self.index].commit(note)
        self.exponents(tile, section)
        self.hand_over()
        self.weights[self.index].arrive()
        return self.factors[self.index].next(note)


class Correct(TmemRole):
    """The warpgroup that lets O shrink, and normalises it."""

    @abstractmethod
    def read_factor(self, i: int) -> Any:
        """True if there is an O already of Q tile `i`, and rows of this warp shrink."""

    @abstractmethod
    def rescale(self, i: int) -> None:
        """O shrinks."""

    @abstractmethod
    def read_sum(self, i: int) -> None:
        """The row sums and the references of Q tile `i`."""

    @abstractmethod
    def stage_o(self, i: int, slot: Slot, work: Work) -> None:
        """O / (row sum + the weight of the head's sink) goes into shared memory, and the LSE of each row is stored."""

    @abstractmethod
    def publish_o(self) -> None:
        """Makes that visible to the copy engine (PTX: fence.proxy.async)."""

    @program.jit
    def run(self) -> None:
        q_slot = self.q[0].first()
        note = self.factors[0].first()
        slot = self.staged.first()
        done = 0
        work = self.read_work(0, q_slot)
        while work.valid != 0:
            for position in range(0, self.visits(work).total, unroll=1):
                for i in PAIR:
                    self.factors[i].wait(note)
                    self.correct(i, note, position)
                    self.weights[i].arrive()
                note = self.factors[0].next(note)
            for i in PAIR:
                self.factors[i].wait(note)
                self.read_sum(i)
                self.factors[i].release(note)
                self.outputs[i].wait(done)
                self.take()
                self.staged.acquire(slot)
                self.stage_o(i, slot, work)
                self.hand_over()
                self.publish_o()
                self.staged.commit(slot)
                slot = self.staged.next(slot)
            note = self.factors[0].next(note)
            done = done ^ 1
            q_slot = self.q[0].next(q_slot)
            work = self.read_work(0, q_slot)

    @program.jit
    def correct(self, i: int, note: Slot, position: int) -> None:
        shrinks = self.read_factor(i)
        self.factors[i].release(note)
        if shrinks and position > 0:
            self.shrink(i)

    def shrink(self, i: int) -> None:
        self.take()
        self.rescale(i)
        self.hand_over()


class Store(TmemRole):
    """The warp that copies O to global memory."""

    @abstractmethod
    def store_o(self, i: int, slot: Slot, work: Work) -> None:
        """Starts an asynchronous copy of the staged O."""

    @abstractmethod
    def drain(self) -> None:
        """Waits until the copies have read shared memory (PTX: cp.async.bulk.wait_group.read)."""

    @program.jit
    def run(self) -> None:
        q_slot = self.q[0].first()
        slot = self.staged.first()
        work = self.read_work(0, q_slot)
        while work.valid != 0:
            for i in PAIR:
                self.staged.wait(slot)
                self.store_o(i, slot, work)
                self.drain()
                self.staged.release(slot)
                slot = self.staged.next(slot)
            q_slot = self.q[0].next(q_slot)
            work = self.read_work(0, q_slot)
