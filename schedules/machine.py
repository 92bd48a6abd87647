"""A CPU model of one CTA: roles that take turns, asynchronous operations, and whatever would be a race on Hopper.

What an asynchronous operation does happens at some time between its issue and the moment it is waited for. A scheduler
picks that time, and which role goes next, by its policy and a seed:

    eager     an operation is done as soon as it is issued
    lazy      an operation is done only when no role can go on without it
    random    each role and each kind of operation is fast or slow
    steady    everything takes its nominal time: no adversary, but a picture of what overlaps with what

Whatever the policy, an operation counts as in flight until it has been waited for: what it reads must not be written
and what it writes must not be touched, even where it happens to be done. An error is a `ScheduleError` that names the
role, its operation, the tile and the step. Each rule cites the chapter of the PTX ISA that it comes from.

Nothing here knows about attention. A role is one warp, or one warpgroup in lockstep: races between the threads of a
role are outside this model, and compute-sanitizer's business.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NoReturn

import numpy as np
from greenlet import greenlet  # type: ignore[import-untyped]

POLICIES = ("eager", "lazy", "random", "steady")


class ScheduleError(Exception):
    """A program that would go wrong on the chip."""


class Hazard(ScheduleError):
    """Something is touched while an operation in flight uses it, or before it is there, or without its fence."""


class Deadlock(ScheduleError):
    """No role can go on and nothing is in flight that could help."""


class CountError(ScheduleError):
    """Arrivals, bytes, releases or writes do not add up."""


class OrderError(ScheduleError):
    """Something is done out of turn."""


class TileError(ScheduleError):
    """A tile is out of range, is visited twice or never, or meets another tile's data."""


class RangeError(ScheduleError):
    """A weight is larger, or a row's weights are smaller, than the threshold of the rescale allows."""


class Fence(Enum):
    """What orders an ordinary access before the asynchronous operations that follow it."""

    WGMMA = "wgmma.fence"  # registers, after any access (PTX: wgmma.fence)
    PROXY = "fence.proxy.async"  # shared memory, after a write (PTX: async proxy)


@dataclass(eq=False)
class Buffer:
    """A range of shared memory or a register fragment: a view of memory that other buffers may overlap."""

    name: str
    data: np.ndarray
    fence: Fence
    tile: int | None = None  # the tile it holds,
    work: object = None  # and the work tile that is for

    def overlaps(self, other: Buffer) -> bool:
        return np.may_share_memory(self.data, other.data)


class Until(NamedTuple):
    """What a role waits for, and how to describe it to who asks why it waits."""

    holds: Callable[[], bool]
    state: Callable[[], object] = lambda: "ready"


ALWAYS = Until(lambda: True)


@dataclass(eq=False)
class Actor:
    """A role that runs, and the operation it is about to do."""

    name: str
    program: greenlet
    until: Until = ALWAYS
    doing: str = "begin"
    tile: int | None = None
    due: int = 0  # when it is done with the operation before

    def __str__(self) -> str:
        return f"{self.name}: {self.doing}" + ("" if self.tile is None else f", tile {self.tile}")


@dataclass(eq=False)
class Flight:
    """An asynchronous operation, from its issue until it has been waited for."""

    actor: Actor
    unit: str  # what carries it out: "tma" or "mma"
    what: str
    tile: int | None
    reads: Sequence[Buffer]
    writes: Sequence[Buffer]
    effect: Callable[[], None]
    after: Sequence[Flight]  # those that are done before it
    begin: int
    due: int
    landed: bool = False

    @property
    def name(self) -> str:
        return f"{self.unit} {self.actor.name}"

    def can_land(self) -> bool:
        return not self.landed and all(flight.landed for flight in self.after)

    def __str__(self) -> str:
        return f"{self.what} of tile {self.tile} by {self.actor.name}"


class Event(NamedTuple):
    """A line of a trace: what `lane` (a role, or what is in flight for it) did from step `begin` to `end` of a CTA."""

    cta: int
    lane: str
    what: str
    tile: int | None
    begin: int
    end: int


class Machine:
    """One CTA: the roles that run, the operations in flight, and the scheduler that picks what happens next."""

    def __init__(self, policy: str, seed: int = 0, cta: int = 0, costs: Mapping[str, int] | None = None) -> None:
        """`costs` are the nominal times of operations, by the first word of their names; those of others are 0."""
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r}: one of {', '.join(POLICIES)}")
        self.policy = policy
        self.random = random.Random(f"{policy} {seed} {cta}")
        self.cta = cta
        self.costs = costs or {}
        self.now = 0
        self.actors: list[Actor] = []
        self.actor: Actor  # who runs
        self.flights: list[Flight] = []
        self.unordered: list[tuple[Actor, Buffer]] = []  # accesses that no fence has ordered yet
        self.trace: list[Event] = []
        self._speeds: dict[str, float] = {}
        self._busy: dict[str, int] = {}  # until when each unit has work

    # -- the scheduler ---------------------------------------------------------------------------------------------
    def spawn(self, name: str, program: Callable[[], None]) -> None:
        self.actors.append(Actor(name, greenlet(program)))

    def run(self) -> None:
        """Runs every role to its end. Raises a `ScheduleError`."""
        while running := [actor for actor in self.actors if not actor.program.dead]:
            ready = [actor for actor in running if actor.until.holds()]
            landing = [flight for flight in self.flights if flight.can_land()]
            if not ready and not landing:
                raise Deadlock("; ".join(f"{actor} ({actor.until.state()})" for actor in running))
            chosen = self._choose(ready, landing)
            if isinstance(chosen, Flight):
                self._land(chosen)
            else:
                self.actor = chosen
                chosen.program.switch()
        for flight in self.flights:
            raise Hazard(f"{flight.actor}, step {self.now}: the CTA exits before {flight} has been waited for")

    def _choose(self, ready: Sequence[Actor], landing: Sequence[Flight]) -> Actor | Flight:
        choices: Sequence[Actor | Flight] = [*ready, *landing]
        if self.policy == "steady":
            for actor in ready:
                actor.due = max(actor.due, self.now)
            chosen = min(choices, key=lambda choice: choice.due)
            self.now = max(self.now, chosen.due)
            return chosen
        self.now += 1
        if self.policy == "eager" and landing:
            choices = landing
        elif self.policy == "lazy" and ready:
            choices = ready
        speeds = [self._speeds.setdefault(c.name, self.random.choice((0.02, 0.2, 1.0))) for c in choices]
        return self.random.choices(choices, speeds)[0]

    def _cost(self, what: str) -> int:
        return self.costs.get(what.split()[0], 0) if self.policy == "steady" else 1

    def op(self, doing: str, tile: int | None = None, until: Until = ALWAYS) -> None:
        """The running role is about to do an operation: others go first, for as long as the scheduler likes."""
        actor = self.actor
        actor.doing, actor.until = doing, until
        actor.tile = actor.tile if tile is None else tile
        actor.program.parent.switch()
        actor.due = self.now + self._cost(doing)
        self.trace.append(Event(self.cta, actor.name, doing, actor.tile, self.now, actor.due))

    def fail(self, kind: type[ScheduleError], problem: str) -> NoReturn:
        raise kind(f"{self.actor}, step {self.now}: {problem}")

    # -- memory ----------------------------------------------------------------------------------------------------
    def touch(self, reads: Sequence[Buffer] = (), writes: Sequence[Buffer] = ()) -> None:
        """The running role reads and writes by ordinary instructions."""
        self._conflicts(reads, writes)
        self.unordered += [(self.actor, b) for b in (*reads, *writes) if b in writes or b.fence is Fence.WGMMA]

    def fence(self, fence: Fence) -> None:
        """Orders the running role's accesses before the asynchronous operations that follow."""
        self.unordered = [(a, b) for a, b in self.unordered if a is not self.actor or b.fence is not fence]

    def issue(
        self,
        unit: str,
        what: str,
        tile: int | None,
        effect: Callable[[], None],
        reads: Sequence[Buffer] = (),
        writes: Sequence[Buffer] = (),
    ) -> Flight:
        """Starts an asynchronous operation. `effect` runs when it is done, and reads its operands only then."""
        after = self._conflicts(reads, writes, unit)
        for mine in (*reads, *writes):
            for _, other in self.unordered:
                if mine.overlaps(other):
                    self.fail(Hazard, f"{what} uses {mine.name}, touched without {other.fence.value} since")
        begin = max(self.now, self._busy.get(unit, 0)) if self.policy == "steady" else self.now
        due = self._busy[unit] = begin + self._cost(what)
        flight = Flight(self.actor, unit, what, tile, reads, writes, effect, after, begin, due)
        self.flights.append(flight)
        return flight

    def _conflicts(self, reads: Sequence[Buffer], writes: Sequence[Buffer], unit: str = "") -> list[Flight]:
        """Objects to a read of what is being written and to a write of what is being used.

        Not to MMAs into the same accumulators: they are done in order (PTX: wgmma.fence). Those in flight are returned.
        """
        earlier = []
        for flight in self.flights:
            for mine in writes:
                if unit == flight.unit == "mma" and mine in flight.writes:
                    earlier.append(flight)
                elif any(mine.overlaps(other) for other in (*flight.reads, *flight.writes)):
                    self.fail(Hazard, f"writes {mine.name} while {flight} is in flight")
            for mine in reads:
                if any(mine.overlaps(other) for other in flight.writes):
                    self.fail(Hazard, f"reads {mine.name} while {flight} is in flight")
        return earlier

    def _land(self, flight: Flight) -> None:
        flight.landed = True
        flight.effect()
        self.trace.append(Event(self.cta, flight.name, flight.what, flight.tile, flight.begin, self.now))

    def retire(self, flights: Iterable[Flight]) -> None:
        """These have been waited for."""
        for flight in flights:
            self.flights.remove(flight)

    def reading(self, buffer: Buffer) -> list[Flight]:
        """What the running role has in flight that reads `buffer`."""
        mine = [flight for flight in self.flights if flight.actor is self.actor]
        return [f for f in mine if any(buffer.overlaps(read) for read in f.reads)]


class Mbarrier:
    """PTX mbarrier: a phase completes when `count` arrivals and all announced bytes have come; then the next begins.

    Bytes that land before they are announced take the transaction count below zero; the phase stays open all the
    same, for the arrival that announces them is pending (PTX: mbarrier, expect-tx and complete-tx).
    """

    def __init__(self, machine: Machine, name: str, count: int) -> None:
        self.machine = machine
        self.name = name
        self.count = count
        self.phase = 0
        self.pending = count
        self.bytes = 0

    def arrive(self, times: int = 1, expect_bytes: int = 0) -> None:
        self.bytes += expect_bytes
        for _ in range(times):
            if not self.pending:
                self.machine.fail(CountError, f"one arrival too many at {self}")
            self.pending -= 1
            self._complete_phase()

    def complete_bytes(self, landed: int) -> None:
        self.bytes -= landed
        self._complete_phase()

    def _complete_phase(self) -> None:
        if not self.pending and not self.bytes:
            self.phase += 1
            self.pending = self.count

    def completed(self, parity: int) -> Until:
        """PTX mbarrier.try_wait.parity: waits while the present phase has this parity, else passes.

        So a wait for the parity before the first phase passes at once.
        """
        return Until(lambda: self.phase % 2 != parity, lambda: self)

    def at_rest(self) -> bool:
        return self.pending == self.count and not self.bytes

    def __str__(self) -> str:
        return f"{self.name}, phase {self.phase}: {self.pending} arrivals and {self.bytes} bytes to come"


class NamedBarrier:
    """PTX bar.sync and bar.arrive: opens when `threads` threads have arrived, and starts over."""

    def __init__(self, machine: Machine, name: str, threads: int) -> None:
        self.machine = machine
        self.name = name
        self.threads = threads
        self.rounds = 0
        self.arrived: dict[str, int] = {}

    def arrive(self, threads: int) -> None:
        who = self.machine.actor.name
        if who in self.arrived:
            self.machine.fail(OrderError, f"arrives twice at {self}")
        self.arrived[who] = threads
        total = sum(self.arrived.values())
        if total > self.threads:
            self.machine.fail(CountError, f"too many threads at {self}")
        if total == self.threads:
            self.rounds += 1
            self.arrived = {}

    def sync(self, doing: str, threads: int) -> None:
        self.machine.op(f"{doing} (arrives)")
        rounds = self.rounds
        self.arrive(threads)
        self.machine.op(doing, until=Until(lambda: self.rounds > rounds, lambda: self))

    def __str__(self) -> str:
        arrived = ", ".join(f"{threads} of {who}" for who, threads in self.arrived.items())
        return f"{self.name}, {self.threads} threads: {arrived or 'none'} arrived"


class Wgmma:
    """The asynchronous MMAs of one warpgroup, in groups (PTX: wgmma.mma_async, .commit_group, .wait_group)."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.open: list[Flight] = []
        self.groups: list[list[Flight]] = []

    def issue(
        self, what: str, tile: int | None, effect: Callable[[], None], reads: Sequence[Buffer], accumulator: Buffer
    ) -> None:
        self.open.append(self.machine.issue("mma", what, tile, effect, reads, [accumulator]))

    def commit(self) -> None:
        self.groups.append(self.open)
        self.open = []

    def retire(self, doing: str, pending: int) -> None:
        """Waits until all groups but the last `pending` are done. An MMA that belongs to no group is not waited for."""
        kept = max(0, len(self.groups) - pending)
        flights = [flight for group in self.groups[:kept] for flight in group]
        self.machine.op(doing, until=Until(lambda: all(f.landed for f in flights), lambda: "MMAs in flight"))
        self.machine.retire(flights)
        self.groups = self.groups[kept:]
