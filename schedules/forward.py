"""The role programs of the forward kernels: what each warp does, in which order, waiting for what.

One CTA computes one work tile. A producer warp (`Load`) moves Q, K and V into shared memory; two or three consumer
warpgroups (`Attend`), 64 query rows each, run the online softmax (Milakov and Gimelshein 2018; FlashAttention-2,
Dao 2023) between two MMAs. While one warpgroup exponentiates, another's MMAs fill the tensor cores (`turn`); inside a
warpgroup the QK of a tile is issued before the PV of the one before has retired (FlashAttention-3, Shah et al. 2024).

A program calls operations and never says how they are done: `fmha.kernels.sm90.forward` lowers them onto the chip,
`schedules.simulate` onto NumPy. Roles hold no state that changes: what a loop carries is a local (a `Slot`), what the
softmax carries lives in register tensors.

The operations and the hardware rule behind each:

    ring.acquire(slot)      wait until every consumer has released the slot
    ring.load(slot, ...)    start an asynchronous copy into it
    ring.commit(slot)       arrive, and announce the bytes that are on their way
    ring.wait(slot)         wait until those bytes have landed
    ring.release(slot)      arrive: this warpgroup will not read the slot again
    fence()                 order register writes before the MMAs that read them (PTX: wgmma.fence)
    issue_qk, issue_pv      start an asynchronous MMA
    commit()                close the group of MMAs issued so far (wgmma.commit_group)
    retire(pending)         wait until all but the last `pending` groups are done (wgmma.wait_group)
    turn.take, turn.give    named barriers that pass the right to issue MMAs from warpgroup to warpgroup
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

from schedules import program
from schedules.domain import Section, Visits
from schedules.program import range
from schedules.work import Work


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
        wraps = (slot.stage + 1) // self.stages
        return Slot(slot.stage + 1 - wraps * self.stages, slot.parity ^ wraps)

    @abstractmethod
    def acquire(self, slot: Slot) -> None: ...

    @abstractmethod
    def load(self, slot: Slot, work: Work, tile: int) -> None: ...

    @abstractmethod
    def commit(self, slot: Slot) -> None: ...

    @abstractmethod
    def wait(self, slot: Slot) -> None: ...

    @abstractmethod
    def release(self, slot: Slot) -> None: ...


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
    def run(self, work: Work, visits: Visits) -> None:
        """The program: everything this role does for one work tile."""


class Load(Role):
    """The producer: one warp that keeps the rings full."""

    q: Ring
    k: Ring
    v: Ring

    @program.jit
    def run(self, work: Work, visits: Visits) -> None:
        """Loads Q once, then K one tile ahead of V, the order in which the consumers ask for them."""
        q_slot = self.q.first()
        self.q.acquire(q_slot)
        self.q.load(q_slot, work, work.q_tile)
        self.q.commit(q_slot)

        last = visits.total - 1
        slot = self.k.first()
        self.k.acquire(slot)
        self.k.load(slot, work, last)
        self.k.commit(slot)
        for step in range(1, visits.total, unroll=1):
            ahead = self.k.next(slot)
            self.k.acquire(ahead)
            self.k.load(ahead, work, last - step)
            self.k.commit(ahead)
            self.v.acquire(slot)
            self.v.load(slot, work, last - step + 1)
            self.v.commit(slot)
            slot = ahead
        self.v.acquire(slot)
        self.v.load(slot, work, 0)
        self.v.commit(slot)


class Attend(Role):
    """A consumer warpgroup: 64 query rows against every visited KV tile.

    It holds S (then the exponentials) and O as float32 accumulators, P as the 16-bit operand of the PV MMA, and for
    each row its maximum and sum, all in registers.
    """

    q: Ring
    k: Ring
    v: Ring
    turn: Turn

    # -- operations ------------------------------------------------------------------------------------------------
    @abstractmethod
    def start(self, work: Work) -> None:
        """O = 0, row sum = 0, row maximum = a finite floor under every score."""

    @abstractmethod
    def fence(self) -> None: ...

    @abstractmethod
    def issue_qk(self, slot: Slot) -> None:
        """S = Q K^T."""

    @abstractmethod
    def issue_pv(self, slot: Slot) -> None:
        """O += P V."""

    @abstractmethod
    def commit(self) -> None: ...

    @abstractmethod
    def retire(self, pending: int) -> None: ...

    @abstractmethod
    def row_max(self, section: Section, work: Work, tile: int) -> Any:
        """Masks S where the section asks for it and finds its row maxima. True if one grew past the threshold."""

    @abstractmethod
    def rescale(self) -> None:
        """Moves every row to its present maximum: O and the row sum shrink by the difference."""

    @abstractmethod
    def exponents(self) -> None:
        """S = 2^(scale S - maximum), and the row sums grow by it."""

    @abstractmethod
    def pack_p(self) -> None:
        """P = S in 16 bits."""

    @abstractmethod
    def normalise(self, work: Work) -> None:
        """O = O / row sum, and the LSE of each row is stored."""

    @abstractmethod
    def stage_o(self) -> None:
        """Writes O over this warpgroup's rows of Q in shared memory."""

    @abstractmethod
    def publish_o(self) -> None:
        """Makes that visible to the copy engine: a proxy fence, then a barrier of the warpgroup."""

    @abstractmethod
    def store_o(self, work: Work) -> None:
        """Starts an asynchronous copy of the staged O to global memory."""

    @abstractmethod
    def drain(self) -> None:
        """Waits until that copy has read shared memory."""

    # -- the program -----------------------------------------------------------------------------------------------
    @program.jit
    def run(self, work: Work, visits: Visits) -> None:
        self.start(work)
        last = visits.total - 1
        slot = self.k.first()
        self.q.wait(self.q.first())
        self.first(work, last, slot)
        for step in range(1, visits.masked, unroll=1):
            slot = self.step(Section.RIGHT, work, last - step, slot)
        for step in range(visits.masked, visits.total, unroll=1):
            slot = self.step(Section.BODY, work, last - step, slot)
        self.last(slot)
        self.normalise(work)
        self.stage_o()
        self.publish_o()
        self.store_o(work)
        self.drain()

    @program.jit
    def first(self, work: Work, tile: int, slot: Slot) -> None:
        """The first tile: there is no PV to overlap with yet."""
        self.k.wait(slot)
        self.turn.take()
        self.fence()
        self.issue_qk(slot)
        self.commit()
        self.turn.give()
        self.retire(0)
        self.k.release(slot)
        self.softmax(Section.RIGHT, work, tile)
        self.pack_p()

    @program.jit
    def step(self, section: Section, work: Work, tile: int, before: Slot) -> Slot:
        """One tile: its QK runs before and its softmax beside the PV of the tile before."""
        slot = self.k.next(before)
        self.k.wait(slot)
        self.turn.take()
        self.fence()
        self.issue_qk(slot)
        self.commit()
        self.v.wait(before)
        self.issue_pv(before)
        self.commit()
        self.turn.give()
        self.retire(1)
        self.k.release(slot)
        self.softmax(section, work, tile)
        self.retire(0)
        self.v.release(before)
        self.pack_p()
        return slot

    @program.jit
    def softmax(self, section: Section, work: Work, tile: int) -> None:
        """The common path leaves O, the maxima and the sums' scale alone; only a maximum that grew by more than the
        threshold makes the warp retire its PV and rescale."""
        grew = self.row_max(section, work, tile)
        if grew:
            self.retire(0)
            self.rescale()
        self.exponents()

    @program.jit
    def last(self, slot: Slot) -> None:
        """The PV of the last tile."""
        self.v.wait(slot)
        self.fence()
        self.issue_pv(slot)
        self.commit()
        self.retire(0)
        self.v.release(slot)
