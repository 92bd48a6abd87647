"""What happens before what: finds accesses that nothing orders, whatever order they came in.

Every role has a clock, which says of each thread of events how many of them it knows to be over: its own, and what
barriers have told it (vector clocks: Mattern 1988; for races: Flanagan and Freund, FastTrack, 2009). Who touches memory
must know that whatever conflicts with it is over. Asynchronous operations are threads of their own, which begin with
what their issuer knew and which nobody knows to be over before a barrier says so.

Two kinds of access are ordered by more than program order and barriers, and a role has a thread of events for each:

    tensor  of tensor memory: others know of them only after the role has handed over; and what barriers have told the
            role holds for them only after it has taken it (PTX: tcgen05.fence, tcgen05.wait)
    proxy   of shared memory, for the copy engine: it knows of them only after a fence (PTX: fence.proxy.async)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from schedules.machine import Flight, Hazard, Machine, Mbarrier

Clock = dict[str, int]


def join(clock: Clock, other: Mapping[str, int]) -> None:
    for thread, count in other.items():
        clock[thread] = max(clock.get(thread, 0), count)


class Region(NamedTuple):
    """Addresses `begin` to `end` of a memory, or of a part of it that others do not overlap."""

    memory: str
    begin: int = 0
    end: int = 1

    def overlaps(self, other: Region) -> bool:
        return self.memory == other.memory and self.begin < other.end and other.begin < self.end

    def __str__(self) -> str:
        return self.memory if (self.begin, self.end) == (0, 1) else f"{self.memory}[{self.begin}:{self.end}]"


class Access(NamedTuple):
    thread: str
    number: int  # in its thread
    what: str
    in_order: bool = True  # behind those of its thread before it


@dataclass
class History:
    """The last write of a region, and the reads since."""

    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)


class Causality:
    """The clocks of the roles of a CTA."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.known: defaultdict[str, Clock] = defaultdict(dict)  # of each role: by its ordinary instructions
        self.taken: defaultdict[str, Clock] = defaultdict(dict)  # by its operations on tensor memory
        self.counts: defaultdict[str, int] = defaultdict(int)  # events of each thread
        self.histories: dict[Region, History] = {}

    @property
    def me(self) -> str:
        return self.machine.actor.name

    # -- what roles do ---------------------------------------------------------------------------------------------
    def touch(self, reads: Iterable[Region] = (), writes: Iterable[Region] = (), kind: str = "") -> None:
        """By the running role: ordinary, or a kind of access that others do not know of yet."""
        me = self.me
        thread = f"{me} {kind}" if kind else me
        clock = self.taken[me] if kind == "tensor" else self.known[me]
        count = self.event(thread)
        self._check(reads, writes, clock, Access(thread, count, self.machine.actor.doing))
        if kind != "proxy":
            clock[thread] = count

    def learn(self, clock: Mapping[str, int], tensor: bool = False) -> None:
        """The running role was told; of copies into shared memory MMAs know as well."""
        join(self.known[self.me], clock)
        if tensor:
            join(self.taken[self.me], clock)

    def take(self) -> None:
        join(self.taken[self.me], self.known[self.me])

    def publish(self, kind: str) -> None:
        """What the role has done of this kind comes before what it says next."""
        thread = f"{self.me} {kind}"
        self.known[self.me][thread] = self.counts[thread]

    def told(self) -> Clock:
        """What the running role says by an arrival."""
        return dict(self.known[self.me])

    # -- what they start -------------------------------------------------------------------------------------------
    def start(
        self,
        thread: str,
        what: str,
        begin: Mapping[str, int],
        reads: Iterable[Region] = (),
        writes: Iterable[Region] = (),
        in_order: bool = False,
    ) -> Clock:
        """An asynchronous operation, which knows what `begin` says. What is known when it is over is returned."""
        clock = dict(begin)
        count = self.event(thread)
        self._check(reads, writes, clock, Access(thread, count, what, in_order))
        clock[thread] = count
        return clock

    def event(self, thread: str) -> int:
        self.counts[thread] += 1
        return self.counts[thread]

    def _check(self, reads: Iterable[Region], writes: Iterable[Region], clock: Clock, access: Access) -> None:
        reads, writes = list(reads), list(writes)
        for mine, does in [(region, "reads") for region in reads] + [(region, "writes") for region in writes]:
            for region, history in self.histories.items():
                if not region.overlaps(mine):
                    continue
                before = [history.write] if history.write else []
                before += history.reads.values() if does == "writes" else ()
                for other in before:
                    mine_too = access.in_order and other.thread == access.thread
                    if not mine_too and clock.get(other.thread, 0) < other.number:
                        problem = f"{access.what} {does} {mine}, and nothing says that {other.what} of {other.thread}"
                        self.machine.fail(Hazard, f"{problem} is over")
        for region in reads:
            self.histories.setdefault(region, History()).reads[access.thread] = access
        for region in writes:
            self.histories[region] = History(access)

    def settle(self) -> None:
        """At exit all roles meet: what has happened must be known to one of them."""
        clock: Clock = {}
        for known in self.known.values():
            join(clock, known)
        for thread, count in self.counts.items():
            if clock.get(thread, 0) < count:
                raise Hazard(f"exit: nothing says that the last operation of {thread} is over")


class ClockedBarrier(Mbarrier):
    """An mbarrier that also tells what those knew that have arrived."""

    def __init__(self, causality: Causality, name: str, count: int) -> None:
        super().__init__(causality.machine, name, count)
        self.causality = causality
        self.told: Clock = {}  # by the last complete phase
        self.telling: Clock = {}  # by the present one

    def tell(self, clock: Mapping[str, int], times: int = 1, expect_bytes: int = 0) -> None:
        join(self.telling, clock)
        self.arrive(times, expect_bytes)

    def land(self, clock: Mapping[str, int], landed: int) -> None:
        join(self.telling, clock)
        self.complete_bytes(landed)

    def _complete_phase(self) -> None:
        phase = self.phase
        super()._complete_phase()
        if self.phase > phase:
            self.told, self.telling = self.telling, {}

    def sync(self, doing: str, parity: int, tensor: bool = False) -> None:
        """The running role waits for a phase, and learns what was told."""
        self.machine.op(doing, until=self.completed(parity))
        self.causality.learn(self.told, tensor)


class TensorCore:
    """The MMAs of a CTA, which one warp issues: carried out in that order."""

    def __init__(self, causality: Causality) -> None:
        self.causality = causality
        self.machine = causality.machine
        self.last: Flight | None = None
        self.clock: Clock = {}  # when all so far are over

    def issue(self, what: str, tile: int | None, effect, reads: Iterable[Region], writes: Iterable[Region]) -> None:
        begin = dict(self.causality.taken[self.causality.me])
        join(begin, self.clock)
        self.clock = self.causality.start("the tensor core", what, begin, reads, writes, in_order=True)
        self._fly(what, tile, effect)

    def commit(self, barrier: ClockedBarrier, name: str) -> None:
        """PTX tcgen05.commit: arrives when all MMAs so far are over. What the warp itself has read by then is in its
        registers, and it writes nothing that others read."""
        clock = self.causality.told()
        join(clock, self.clock)
        self._fly(f"commit {name}", None, lambda: barrier.tell(clock))

    def _fly(self, what: str, tile: int | None, effect) -> None:
        def land() -> None:
            self.machine.retire([flight])
            effect()

        flight = self.machine.issue("mma", what, tile, land)
        flight.after = [self.last] if self.last is not None else []
        self.last = flight
