"""The role programs of the forward kernels: what each warp does, in which order, waiting for what.

A CTA computes one work tile after another. A producer warp (`Load`) takes them from a counter that all CTAs share and
moves Q, K and V into shared memory; two or three consumer warpgroups (`Attend`), 64 query rows each, run the online
softmax (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023) between two MMAs. While one warpgroup exponentiates,
another's MMAs fill the tensor cores (`turn`); inside a warpgroup the QK of a tile is issued before the PV of the one
before has retired (FlashAttention-3, Shah et al. 2024), also where the one before belongs to another work tile.

A program calls operations and never says how they are done: `fmha.kernels.sm90.forward` lowers them onto the chip,
`schedules.simulate` onto NumPy. Roles hold no state that changes: what a loop carries is a local (a `Slot`), what the
softmax carries lives in register tensors.

The operations and the hardware rule behind each:

    ring.acquire(slot)      wait until every consumer has released the slot
    ring.load(slot, ...)    start an asynchronous copy into it
    ring.commit(slot)       arrive, and announce the bytes that are on their way
    ring.wait(slot)         wait until those bytes have landed
    ring.release(slot)      arrive: this warpgroup will not read the slot again
    v.borrow(slot)          wait until every consumer has released the slot, to write O there
    v.give_back(slot, i)    arrive: the O of warpgroup i has left
    v.reclaim(i, parity)    wait for that, for the work tile before
    q.post, q.work          write and read the work tile that a Q slot is for
    fence()                 order register writes before the MMAs that read them (PTX: wgmma.fence)
    issue_qk, issue_pv      start an asynchronous MMA
    commit()                close the group of MMAs issued so far (wgmma.commit_group)
    retire(pending)         wait until all but the last `pending` groups are done (wgmma.wait_group)
    turn.take, turn.give    named barriers that pass the right to issue MMAs from warpgroup to warpgroup
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from cutlass import const_expr

from schedules import program
from schedules.domain import Dense, Section, Visits
from schedules.program import range
from schedules.scores import Score
from schedules.work import Work

# Of a row's sum: a weight that is more should not be rounded as P rounds it.
LARGE_PART = 1 / 8
FLOOR = -(2.0**120)  # of references: under every score, and finite, so that a wholly masked row makes no NaN of it


class Slot(NamedTuple):
    """A position in a ring: the stage, and the parity of its use."""

    stage: int
    parity: int


class Ring(ABC):
    """A circular buffer of `stages` slots in shared memory with a full and an empty barrier each."""

    stages: int

    def first(self) -> Slot:
        return Slot(0, 0)

    def next(self, slot: Slot) -> Slot:
        return self.ahead(slot, 1)

    @program.jit
    def ahead(self, slot: Slot, steps: int) -> Slot:
        """So many slots on, at most once round."""
        stage = slot.stage + steps
        wraps = stage >= self.stages  # a comparison: a division of run-time numbers takes ten instructions
        stage = stage - self.stages if wraps else stage
        parity = slot.parity ^ 1 if wraps else slot.parity
        return Slot(stage, parity)

    @abstractmethod
    def acquire(self, slot: Slot) -> None: ...

    @abstractmethod
    def load(self, slot: Slot, work: Any, tile: int) -> None: ...

    @abstractmethod
    def commit(self, slot: Slot) -> None: ...

    @abstractmethod
    def wait(self, slot: Slot) -> None: ...

    @abstractmethod
    def release(self, slot: Slot) -> None: ...


class LendingRing(Ring):
    """The ring of V, whose slots O may leave through: between two work tiles they are free, one for each warpgroup.

    That O has left is another barrier's to say. If the empty one counted a loan as one more use, a producer that waits
    for the end of the loan would pass before its beginning: two phases apart, parities are equal.
    """

    @abstractmethod
    def borrow(self, slot: Slot) -> None: ...

    @abstractmethod
    def give_back(self, slot: Slot, index: int) -> None: ...

    @abstractmethod
    def reclaim(self, index: int, parity: int) -> None: ...


class WorkRing(Ring):
    """The ring of one warpgroup's Q tiles, which also carries the work tile that each is for: `Work`, or what a program
    has in its place."""

    @abstractmethod
    def post(self, slot: Slot, work: Any) -> None:
        """Writes the work tile beside Q, before `commit`."""

    @abstractmethod
    def work(self, slot: Slot) -> Any:
        """The work tile that was posted, after `wait`."""


class Turn(ABC):
    """The right to issue MMAs, which goes round the consumer warpgroups."""

    @abstractmethod
    def take(self) -> None: ...

    @abstractmethod
    def give(self) -> None: ...


class Role(ABC):
    """A warp or warpgroup with a program, `run`. Its attributes are set once, in `__init__`.

    A role that changed itself inside a compiled loop would be frozen at its traced value, so writing is an error.
    """

    _sealed = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        init = cls.__init__

        def sealing_init(self: Role, *args: Any, **kw: Any) -> None:
            init(self, *args, **kw)
            if type(self) is cls:
                object.__setattr__(self, "_sealed", True)

        cls.__init__ = sealing_init  # type: ignore[method-assign, assignment]

    def __setattr__(self, name: str, value: Any) -> None:
        if self._sealed:
            raise AttributeError(f"{type(self).__name__}.{name}: roles do not change; carry a local instead")
        object.__setattr__(self, name, value)

    @abstractmethod
    def run(self) -> None:
        """The program: everything this role does."""


class Load(Role):
    """The producer: one warp that takes work tiles and keeps the rings full."""

    lends: bool  # O leaves through V's slots
    q: Sequence[WorkRing]  # of each consumer warpgroup
    k: Ring
    v: LendingRing

    @abstractmethod
    def first_work(self) -> Work: ...

    @abstractmethod
    def ask(self) -> Any:
        """Takes the next work tile that no CTA has. Its number is a microsecond on its way."""

    @abstractmethod
    def next_work(self, asked: Any) -> Work:
        """What was asked for."""

    @abstractmethod
    def visits(self, work: Work) -> Visits: ...

    @abstractmethod
    def tile(self, visits: Visits, position: int) -> int:
        """The KV tile that is visited as number `position`."""

    @program.jit
    def run(self) -> None:
        """K runs one tile ahead of V, the order in which the consumers ask for them; also from one work tile to the
        next. That is asked for as late as its number may take to come: a work tile that was taken early waits for this
        CTA while others have none left."""
        q_slot = self.q[0].first()
        slot = self.k.first()
        parity = 0
        work = self.first_work()
        self.open(work, q_slot, slot)
        while work.valid != 0:
            visits = self.visits(work)
            last = visits.total - 1
            for position in range(1, last, unroll=1):
                slot = self.pair(work, visits, position, slot, parity)
            asked = self.ask()
            for position in range(max(1, last), last + 1, unroll=1):
                slot = self.pair(work, visits, position, slot, parity)
            if const_expr(self.lends):
                for index in range(last + 1, len(self.q), unroll=1):
                    self.v.reclaim(index, parity)
            self.load_v(work, visits, last, slot, parity)
            if const_expr(self.lends):
                parity = parity ^ 1
            upcoming = self.next_work(asked)
            q_slot = self.q[0].next(q_slot)
            slot = self.k.next(slot)
            self.open(upcoming, q_slot, slot)
            work = upcoming

    @program.jit
    def pair(self, work: Work, visits: Visits, position: int, slot: Slot, parity: int) -> Slot:
        """K of a tile, and V of the one before."""
        ahead = self.k.next(slot)
        self.k.acquire(ahead)
        self.k.load(ahead, work, self.tile(visits, position))
        self.commit_k(ahead)
        self.load_v(work, visits, position - 1, slot, parity)
        return ahead

    @program.jit
    def load_v(self, work: Work, visits: Visits, position: int, slot: Slot, parity: int) -> None:
        """The first V of a work tile comes where the O of the first warpgroup was, the second where that of the second
        was; `parity` is that of the work tiles so far."""
        if const_expr(self.lends):
            if position < len(self.q):
                self.v.reclaim(position, parity)
        self.v.acquire(slot)
        self.v.load(slot, work, self.tile(visits, position))
        self.commit_v(slot)

    @program.jit
    def open(self, work: Work, q_slot: Slot, slot: Slot) -> None:
        """The first K and the Q of a work tile. Past the last one they are zeros: the consumers then issue one MMA
        too many, but issue it without a branch, which the compiler wants of accumulators in flight."""
        self.k.acquire(slot)
        self.k.load(slot, work, self.tile(self.visits(work), 0))
        self.commit_k(slot)
        self.load_q(work, q_slot)

    def commit_k(self, slot: Slot) -> None:
        self.k.commit(slot)

    def commit_v(self, slot: Slot) -> None:
        self.v.commit(slot)

    @program.jit
    def load_q(self, work: Work, q_slot: Slot) -> None:
        for q in self.q:
            q.acquire(q_slot)
            q.post(q_slot, work)
            q.load(q_slot, work, work.q_tile)
            q.commit(q_slot)


class JointLoad(Load):
    """The producer where a tile takes more copies than one warp can issue in time: several warps, each of which loads
    its pieces of every K and V tile. They go through the same program, and one of them, who `leads`, does what is done
    once."""

    leads: Any

    @abstractmethod
    def count(self) -> Any:
        """Takes the number of the next work tile, or whatever says which one it is."""

    @abstractmethod
    def tell(self, number: Any) -> None:
        """Writes it where all of them find it."""

    @abstractmethod
    def told(self) -> Any: ...

    @abstractmethod
    def nothing(self) -> Any:
        """In the place of a number."""

    @abstractmethod
    def meet(self) -> None:
        """A barrier of all of them (PTX: bar.sync)."""

    @abstractmethod
    def numbered(self, number: Any) -> Work:
        """The work tile."""

    @program.jit
    def ask(self) -> Any:
        number = self.nothing()
        if self.leads:
            number = self.count()
        return number

    @program.jit
    def next_work(self, asked: Any) -> Work:
        """Nobody is told of the next one before all have read this one."""
        if self.leads:
            self.tell(asked)
        self.meet()
        number = self.told()
        self.meet()
        return self.numbered(number)

    @program.jit
    def commit_k(self, slot: Slot) -> None:
        """All bytes of the tile are announced; those that others copy may land before (PTX: mbarrier, tx-count)."""
        if self.leads:
            self.k.commit(slot)

    @program.jit
    def commit_v(self, slot: Slot) -> None:
        if self.leads:
            self.v.commit(slot)

    @program.jit
    def load_q(self, work: Work, q_slot: Slot) -> None:
        if self.leads:
            self.load_all_q(work, q_slot)

    def load_all_q(self, work: Work, q_slot: Slot) -> None:
        Load.load_q(self, work, q_slot)


class Attend(Role):
    """A consumer warpgroup: 64 query rows against every visited KV tile.

    It holds S and O as float32 accumulators, P as the 16-bit operand of the PV MMA, and for each row its sum and the
    reference that exponents count from, all in registers. A reference is a row's maximum as it was at the last rescale,
    give or take what `foresee` and `mend` moved it by. After the first tile an optimistic warpgroup looks for no
    maxima: it sees by P whether a weight must be attended to.
    """

    optimistic: bool
    lends: bool  # O leaves through V's slots, one for each warpgroup, and not through the Q slot it was computed from
    index: int  # among the consumers
    domain: Dense
    score: Score

    q: WorkRing  # this warpgroup's
    k: Ring
    v: LendingRing
    turn: Turn

    # -- operations ------------------------------------------------------------------------------------------------
    @abstractmethod
    def visits(self, work: Work) -> Visits: ...

    @abstractmethod
    def start(self) -> None:
        """O = 0, row sum = 0, and the references are those that S asks for."""

    @abstractmethod
    def fence(self) -> None: ...

    @abstractmethod
    def issue_qk(self, q_slot: Slot, slot: Slot) -> None:
        """S = Q K^T."""

    @abstractmethod
    def issue_pv(self, slot: Slot) -> None:
        """O += P V."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def retire(self, pending: int) -> None: ...

    @abstractmethod
    def take_up(self, work: Work) -> None:
        """Reads what the head of a work tile has of its own: its slope, and its sink."""

    @abstractmethod
    def change_scores(self, work: Work, tile: int, section: Section) -> None:
        """`schedules.scores`: softcap and ALiBi."""

    @abstractmethod
    def mask(self, work: Work, tile: int, section: Section) -> None:
        """Scores of keys that a query does not see become minus infinity."""

    @abstractmethod
    def row_max(self) -> Any:
        """Finds the row maxima of S. True if one has outgrown its row's reference."""

    @abstractmethod
    def rescale(self) -> None:
        """Moves every row's reference up to its maximum: O and the row sum shrink by the difference."""

    @abstractmethod
    def exponents(self, tile: int) -> None:
        """The weights, 2^(scale S - reference), in float32. An optimistic role keeps S for a second time; others write
        them over it, and the row sums grow by them."""

    @abstractmethod
    def pack_p(self) -> None:
        """P = the weights in 16 bits."""

    @abstractmethod
    def foresee(self, tiles: int) -> None:
        """After the first of `tiles` KV tiles: the references and P move by powers of two, so that a weight of 2 will
        be a large part of its row's sum, if the other tiles are like the first."""

    @abstractmethod
    def outgrown(self) -> Any:
        """True if a weight in P is 2 or more, or if the scores were capped by a polynomial that is for smaller ones."""

    @abstractmethod
    def mend(self, tile: int) -> None:
        """The references of such rows move, and with them O, the row sums and P, until no weight is 4. And what is a
        large part of its row's sum by now is made exact against the tiles before, as the largest score is where
        references are maxima: the error of O stays as small. Weights past the range of the dtype are computed anew, and
        those of scores that were not capped well.
        Who has mended several tiles of a work tile moves references ahead of the maxima, lest every tile be mended
        where these grow and grow; larger weights to come are then rounded."""

    @abstractmethod
    def normalise(self, work: Work) -> None:
        """O = O / (row sum + the weight of the head's sink), and the LSE of each row is stored: not by optimistic
        roles, whose sums are rounded."""

    @abstractmethod
    def stage_o(self, slot: Slot) -> None:
        """Writes O over Q, or over V, in shared memory."""

    @abstractmethod
    def publish_o(self) -> None:
        """Makes that visible to the copy engine: a proxy fence, then a barrier of the warpgroup."""

    @abstractmethod
    def store_o(self, slot: Slot, work: Work) -> None:
        """Starts an asynchronous copy of the staged O to global memory."""

    @abstractmethod
    def drain(self) -> None:
        """Waits until that copy has read shared memory."""

    # -- the program -----------------------------------------------------------------------------------------------
    @program.jit
    def run(self) -> None:
        """Work tiles in a row, until one comes that is not valid."""
        nearest_first = self.domain.nearest_first
        sections = (Section.RIGHT, Section.BODY) if const_expr(nearest_first) else (Section.BODY, Section.RIGHT)
        q_slot = self.q.first()
        slot = self.k.first()
        stored = self.q.first()
        storing = 0
        self.q.wait(q_slot)
        work = self.q.work(q_slot)
        self.turn.take()
        self.open(q_slot, slot)
        self.turn.give()
        while work.valid != 0:
            visits = self.visits(work)
            inner = visits.right if const_expr(nearest_first) else visits.total - visits.right - visits.left
            last = visits.total - 1
            tile = self.domain.tile(visits, 0)
            self.take_up(work)
            self.retire(0)
            self.k.release(slot)
            self.leave_q(0, last, q_slot)
            if const_expr(not self.score.plain):
                self.change_scores(work, tile, self.domain.first_section)
            self.mask(work, tile, self.domain.first_section)
            self.start()
            self.exponents(tile)
            self.pack_p()
            if const_expr(self.optimistic):
                self.foresee(visits.total)
            if storing != 0:
                self.drain()
                self.free(stored)
            for position in range(1, inner, unroll=1):
                slot = self.step(sections[0], work, visits, position, q_slot, slot)
            for position in range(max(1, inner), visits.total - visits.left, unroll=1):
                slot = self.step(sections[1], work, visits, position, q_slot, slot)
            if const_expr(Section.LEFT in self.domain.sections):
                for position in range(max(1, visits.total - visits.left), visits.total, unroll=1):
                    slot = self.step(Section.LEFT, work, visits, position, q_slot, slot)
            upcoming = self.close_and_open(q_slot, slot)
            stored = self.write_back(work, q_slot, slot)
            storing = 1
            q_slot = self.q.next(q_slot)
            slot = self.k.next(slot)
            work = upcoming
        self.retire(0)
        self.drain()

    @program.jit
    def open(self, q_slot: Slot, slot: Slot) -> None:
        """The first QK of a work tile."""
        self.k.wait(slot)
        self.fence()
        self.issue_qk(q_slot, slot)
        self.commit()

    @program.jit
    def close_and_open(self, q_slot: Slot, slot: Slot) -> Work:
        """The last PV of a work tile, and behind it the first QK of the next, beside which O is stored."""
        self.v.wait(slot)
        self.turn.take()
        self.fence()
        self.issue_pv(slot)
        self.commit()
        self.q.wait(self.q.next(q_slot))
        upcoming = self.q.work(self.q.next(q_slot))
        self.open(self.q.next(q_slot), self.k.next(slot))
        self.turn.give()
        self.retire(1)
        self.v.release(slot)
        return upcoming

    @program.jit
    def leave_q(self, position: int, last: int, q_slot: Slot) -> None:
        """Where O leaves through V, the next Q may come as soon as the last QK is done."""
        if const_expr(self.lends):
            if position == last:
                self.q.release(q_slot)

    @program.jit
    def write_back(self, work: Work, q_slot: Slot, slot: Slot) -> Slot:
        """O leaves, through the slot of Q that it was computed from, or through the slot of V that will be filled next
        (that of the second warpgroup, after next). Which one is returned: it is freed only after the next softmax, when
        the copy has long read it."""
        self.normalise(work)
        stored = q_slot
        if const_expr(self.lends):
            stored = self.v.ahead(slot, self.index + 1)
            self.v.borrow(stored)
        self.stage_o(stored)
        self.publish_o()
        self.store_o(stored, work)
        return stored

    @program.jit
    def free(self, stored: Slot) -> None:
        """The slot that O has left through."""
        if const_expr(self.lends):
            self.v.give_back(stored, self.index)
        else:
            self.q.release(stored)

    @program.jit
    def step(self, section: Section, work: Work, visits: Visits, position: int, q_slot: Slot, before: Slot) -> Slot:
        """One tile: its QK runs before and its softmax beside the PV of the tile before."""
        tile = self.domain.tile(visits, position)
        slot = self.k.next(before)
        self.k.wait(slot)
        self.turn.take()
        self.fence()
        self.issue_qk(q_slot, slot)
        self.commit()
        self.v.wait(before)
        self.fence()  # for ptxas: it puts one of its own after a wait, or takes every MMA for a pipeline of its own
        self.issue_pv(before)
        self.commit()
        self.turn.give()
        self.retire(1)
        self.k.release(slot)
        self.leave_q(position, visits.total - 1, q_slot)
        if const_expr(not self.score.plain):
            self.change_scores(work, tile, section)
        if const_expr(section is not Section.BODY):
            self.mask(work, tile, section)
        if const_expr(not self.optimistic):
            self.make_room()
        self.exponents(tile)
        self.retire(0)
        self.v.release(before)
        self.pack_p()
        if const_expr(self.optimistic):
            self.make_up(tile)
        return slot

    @program.jit
    def make_room(self) -> None:
        """Only a maximum that has outgrown its reference makes the warp retire its PV and rescale."""
        grew = self.row_max()
        if grew:
            self.retire(0)
            self.rescale()

    @program.jit
    def make_up(self, tile: int) -> None:
        """What nobody has looked at before the exponentials."""
        outgrown = self.outgrown()
        if outgrown:
            self.mend(tile)
