"""Runs the role programs of `schedules.forward` on a CPU: NumPy numbers, and an objection to every race in them.

Each role of the forward kernel is subclassed with operations on the model of `schedules.machine`, as
`fmha.kernels.sm90.forward` subclasses it with CuTe ones; the programs are the same. What the barriers say and what is
true are kept apart: a ring slot knows which consumers have waited for it and which have not released it, whatever its
barriers let pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from schedules.domain import Causal, Dense, Section, Visits
from schedules.forward import Attend, Load, Ring, Slot, Turn
from schedules.machine import (
    Buffer,
    CountError,
    Event,
    Fence,
    Flight,
    Hazard,
    Machine,
    Mbarrier,
    NamedBarrier,
    OrderError,
    TileError,
    Until,
    Wgmma,
)
from schedules.tiling import WARPGROUP, BlockConfig
from schedules.work import Work, work_of

SMALL = BlockConfig(16, tile_n=16, stages=2, consumers=2, producer_registers=24, consumer_registers=240)
FLOOR = -(2.0**120)  # below every score, and finite: a row that sees nothing subtracts it without producing NaN

# Nominal times for the "steady" policy, of 64 queries and a 128 x 128 tile, in units of 64 cycles of an H100: an MMA is
# 2 * 64 * 128 * 128 operations at 4096 a cycle, as long as its 64 * 128 exponentials at 16 a cycle.
COSTS = {
    "QK": 8,
    "PV": 8,
    "row_max": 3,
    "exponents": 8,
    "pack_p": 1,
    "rescale": 2,
    "normalise": 2,
    "load": 6,
    "store": 4,
}


# -- rings and turns ---------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class RingSlot:
    """A slot as it truly is, whatever its barriers say."""

    name: str
    parts: Sequence[Buffer]  # one copy each
    full: Mbarrier
    empty: Mbarrier
    announced: int = 0  # bytes of this use, until they are compared
    issued: int = 0
    owed: set[str] = field(default_factory=set)  # consumers that have not released this use
    readers: set[str] = field(default_factory=set)  # those of them that have waited for it

    @property
    def tile(self) -> int | None:
        return self.parts[0].tile

    def tally(self, machine: Machine, announced: int = 0, issued: int = 0) -> None:
        """Compares the bytes announced with those copied, whichever comes first."""
        self.announced += announced
        self.issued += issued
        if self.announced and self.issued:
            if self.announced != self.issued:
                machine.fail(CountError, f"{self.name}: {self.announced} bytes announced, {self.issued} copied")
            self.announced = self.issued = 0


class NumpyRing(Ring):
    """A ring of slots that asynchronous copies fill from `source(work, tile)`, one array for each part of a slot."""

    def __init__(
        self,
        cta: Cta,
        name: str,
        stages: int,
        parts: int,
        rows: int,
        source: Callable[[Work, int], list[np.ndarray]],
        tiles: int,
        once: bool = False,
    ) -> None:
        """`tiles` can be loaded, each into `parts` buffers of `rows`; filled only `once`, slots are never released."""
        self.machine = cta.machine
        self.name = name
        self.stages = stages
        self.source = source
        self.tiles = tiles
        self.once = once
        self.consumers = cta.names
        self.release_arrivals = cta.WARPS
        self.slots = [self._slot(cta, f"{name}[{stage}]", parts, rows) for stage in range(stages)]
        self.slot_bytes = cta.slot_bytes(self.slots[0].parts)

    def _slot(self, cta: Cta, name: str, parts: int, rows: int) -> RingSlot:
        names = [f"{name}.{i}" if parts > 1 else name for i in range(parts)]
        buffers = [Buffer(n, np.full((rows, cta.config.head_dim), math.nan), Fence.PROXY) for n in names]
        full = Mbarrier(cta.machine, f"{name} full", cta.FULL_ARRIVALS)
        return RingSlot(name, buffers, full, Mbarrier(cta.machine, f"{name} empty", cta.empty_arrivals()))

    def at(self, slot: Slot) -> RingSlot:
        if not 0 <= slot.stage < self.stages:
            self.machine.actor.doing = f"use {self.name}[{slot.stage}]"
            self.machine.fail(Hazard, f"{self.name} has stages 0 to {self.stages - 1}")
        return self.slots[slot.stage]

    def acquire(self, slot: Slot) -> None:
        here = self.at(slot)
        self.machine.op(f"acquire {here.name}", until=here.empty.completed(slot.parity ^ 1))

    def load(self, slot: Slot, work: Work, tile: int) -> None:
        """PTX cp.async.bulk.tensor: what the slot held is gone from now on, the tile is there when the bytes are."""
        here = self.at(slot)
        self.machine.op(f"issue load {here.name}", tile)
        if not 0 <= tile < self.tiles:
            self.machine.fail(TileError, f"{self.name} has tiles 0 to {self.tiles - 1}")
        if here.owed:
            self.machine.fail(Hazard, f"refills {here.name}, not released by {', '.join(sorted(here.owed))}")
        here.owed, here.readers = set(self.consumers), set()
        for part, rows in zip(here.parts, self.source(work, tile), strict=True):
            self._copy(here, part, rows, tile)
        here.tally(self.machine, issued=Cta.ELEMENT_BYTES * sum(part.data.size for part in here.parts))

    def _copy(self, here: RingSlot, part: Buffer, rows: np.ndarray, tile: int) -> None:
        def effect() -> None:
            part.data[:] = rows
            here.full.complete_bytes(Cta.ELEMENT_BYTES * part.data.size)
            self.machine.retire([flight])  # from here on the barrier knows

        flight = self.machine.issue("tma", f"load {part.name}", tile, effect, writes=[part])
        part.data[:], part.tile = math.nan, tile

    def commit(self, slot: Slot) -> None:
        """PTX mbarrier.arrive.expect_tx."""
        here = self.at(slot)
        self.machine.op(f"commit {here.name}")
        here.tally(self.machine, announced=self.slot_bytes)
        here.full.arrive(expect_bytes=self.slot_bytes)

    def wait(self, slot: Slot) -> None:
        here = self.at(slot)
        self.machine.op(f"wait {here.name}", until=here.full.completed(slot.parity))
        me = self.machine.actor
        me.tile = here.tile
        if me.name not in here.owed:
            self.machine.fail(Hazard, f"the wait passed, but nothing was loaded since {me.name} released {here.name}")
        here.readers.add(me.name)

    def read(self, slot: Slot, part: int = 0) -> Buffer:
        """What an MMA of the running role is about to read."""
        here = self.at(slot)
        if self.machine.actor.name not in here.readers:
            self.machine.fail(Hazard, f"reads {here.name} without having waited for it, or after releasing it")
        return here.parts[part]

    def release(self, slot: Slot) -> None:
        """PTX mbarrier.arrive, by one lane of every warp."""
        here = self.at(slot)
        self.machine.op(f"release {here.name}", here.tile)
        me = self.machine.actor.name
        for flight in self.machine.reading(here.parts):
            self.machine.fail(Hazard, f"releases {here.name} while {flight} is in flight")
        if me not in here.readers:
            self.machine.fail(CountError, f"releases {here.name} without holding it")
        here.owed.remove(me)
        here.readers.remove(me)
        here.empty.arrive(self.release_arrivals)

    def settle(self) -> None:
        """At exit every use has been released, and every arrival and every byte has found its phase."""
        for here in self.slots:
            for barrier in (here.full, here.empty):
                if not barrier.at_rest():
                    raise CountError(f"exit: {barrier}")
            if left := here.owed - (here.readers if self.once else set()):
                raise CountError(f"exit: {here.name}, tile {here.tile}, was not released by {', '.join(sorted(left))}")


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


# -- roles -------------------------------------------------------------------------------------------------------------


class NumpyLoad(Load):
    """The producer warp."""

    def __init__(self, q: NumpyRing, k: NumpyRing, v: NumpyRing) -> None:
        self.q, self.k, self.v = q, k, v


class NumpyAttend(Attend):
    """A consumer warpgroup. Fragments: `s` (rows, tile_n), `p` likewise, `o` (rows, head_dim), in float64."""

    q: NumpyRing
    k: NumpyRing
    v: NumpyRing
    turn: NumpyTurn

    def __init__(self, cta: Cta, index: int) -> None:
        config = cta.config
        self.config, self.machine, self.tensors, self.domain = config, cta.machine, cta.tensors, cta.domain
        self.q, self.k, self.v = cta.rings
        self.turn = NumpyTurn(cta.turnstile, index)
        self.index = index
        self.mma = Wgmma(cta.machine)
        rows = config.tile_m // config.consumers
        shapes = {"S": (rows, config.tile_n), "P": (rows, config.tile_n), "O": (rows, config.head_dim)}
        self.s, self.p, self.o = (Buffer(name, np.full(n, math.nan), Fence.WGMMA) for name, n in shapes.items())
        self.staged = Buffer("the staged O", self.q.slots[0].parts[index].data, Fence.PROXY)
        self.row_maximum, self.row_grown, self.row_sum = np.zeros((3, rows, 1))
        self.stores: list[Flight] = []
        self.seen: dict[str, list[int | None]] = {"QK": [], "PV": []}

    def rows(self, work: Work) -> np.ndarray:
        """The queries of this warpgroup, past the last one too."""
        rows = len(self.row_sum)
        return work.q_tile * self.config.tile_m + self.index * rows + np.arange(rows)

    def limits(self, work: Work) -> np.ndarray:
        """One past the last key that each query sees, as a column."""
        lengths = self.tensors.seqlen_q, self.tensors.seqlen_k
        return np.array([[self.domain.hi(int(row), *lengths)] for row in self.rows(work)])

    def start(self, work: Work) -> None:
        self.machine.op("start")
        # All fragments, for the first MMA of a warpgroup needs a fence whatever came before (PTX: wgmma.fence).
        self.machine.touch(writes=[self.s, self.p, self.o])
        self.o.data[:] = 0
        self.row_maximum[:], self.row_sum[:] = FLOOR, 0
        self.seen.update(QK=[], PV=[])

    def fence(self) -> None:
        self.machine.op("fence")
        self.machine.fence(Fence.WGMMA)

    def issue_qk(self, slot: Slot) -> None:
        here = self.k.at(slot)
        self.machine.op(f"issue QK {here.name}", here.tile)
        self.turn.check()
        q, k, tile = self.q.read(self.q.first(), self.index), self.k.read(slot), here.tile

        def effect() -> None:
            self.s.data[:] = q.data @ k.data.T

        self.mma.issue("QK", tile, effect, [q, k], self.s)
        self.s.tile = tile
        self.seen["QK"].append(tile)

    def issue_pv(self, slot: Slot) -> None:
        here = self.v.at(slot)
        self.machine.op(f"issue PV {here.name}", here.tile)
        v, tile = self.v.read(slot), here.tile
        if self.p.tile != tile:
            self.machine.fail(TileError, f"P holds tile {self.p.tile}")

        def effect() -> None:
            self.o.data += self.p.data @ v.data

        self.mma.issue("PV", tile, effect, [self.p, v], self.o)
        self.seen["PV"].append(tile)

    def commit(self) -> None:
        self.machine.op("commit")
        self.mma.commit()

    def retire(self, pending: int) -> None:
        self.mma.retire(f"retire({pending})", pending)

    def row_max(self, section: Section, work: Work, tile: int) -> bool:
        self.machine.op(f"row_max {section.value}", tile)
        self.machine.touch(reads=[self.s], writes=[self.s])
        if self.s.tile != tile:
            self.machine.fail(TileError, f"S holds tile {self.s.tile}")
        if section is not Section.BODY:
            keys = tile * self.config.tile_n + np.arange(self.config.tile_n)
            self.s.data[keys >= self.limits(work)] = -math.inf
        found = self.s.data.max(axis=1, keepdims=True) * self.tensors.scale_log2
        self.row_grown[:] = np.fmax(found, self.row_maximum)
        grew = bool((self.row_grown > self.row_maximum + self.config.rescale_above).any())
        # To rescale is always allowed, and small inputs would seldom ask for it.
        return grew or (self.machine.policy != "steady" and self.machine.random.random() < 0.125)

    def rescale(self) -> None:
        self.machine.op("rescale")
        self.machine.touch(reads=[self.o], writes=[self.o])
        shrink = np.exp2(self.row_maximum - self.row_grown)
        self.row_maximum[:] = self.row_grown
        self.row_sum[:] *= shrink
        self.o.data *= shrink

    def exponents(self) -> None:
        self.machine.op("exponents", self.s.tile)
        self.machine.touch(reads=[self.s], writes=[self.s])
        self.s.data[:] = np.exp2(self.s.data * self.tensors.scale_log2 - self.row_maximum)
        self.row_sum[:] += self.s.data.sum(axis=1, keepdims=True)

    def pack_p(self) -> None:
        self.machine.op("pack_p", self.s.tile)
        self.machine.touch(reads=[self.s], writes=[self.p])
        self.p.data[:], self.p.tile = self.s.data, self.s.tile

    def normalise(self, work: Work) -> None:
        self.machine.op("normalise")
        self.machine.touch(reads=[self.o], writes=[self.o])
        total = self.domain.visits(work.q_tile, self.tensors.seqlen_q, self.tensors.seqlen_k).total
        for mma, tiles in self.seen.items():
            if sorted(tile for tile in tiles if tile is not None) != list(range(total)):
                self.machine.fail(TileError, f"{mma} visited the tiles {tiles}, not each of 0 to {total - 1} once")
        blind = self.limits(work) <= 0
        self.o.data[:] = np.where(blind, 0, self.o.data / self.row_sum)
        lse = np.where(blind, -math.inf, (self.row_maximum + np.log2(self.row_sum)) * math.log(2))
        self.tensors.write("lse", work, self.rows(work), lse[:, 0])

    def stage_o(self) -> None:
        self.machine.op("stage_o")
        self.machine.touch(reads=[self.o], writes=[self.staged])
        self.staged.data[:] = self.o.data

    def publish_o(self) -> None:
        self.machine.op("publish_o")
        self.machine.fence(Fence.PROXY)

    def store_o(self, work: Work) -> None:
        self.machine.op("issue store O", work.q_tile)

        def effect() -> None:
            self.tensors.write("o", work, self.rows(work), self.staged.data)

        self.stores.append(self.machine.issue("tma", "store O", work.q_tile, effect, reads=[self.staged]))

    def drain(self) -> None:
        """PTX cp.async.bulk.wait_group.read."""
        self.machine.op("drain", until=Until(lambda: all(f.landed for f in self.stores), lambda: "stores in flight"))
        self.machine.retire(self.stores)
        self.stores.clear()


# -- a kernel ----------------------------------------------------------------------------------------------------------


class Tensors:
    """Global memory: q, k and v in float64, the outputs, and how often each row of them has been written."""

    def __init__(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None) -> None:
        self.q, self.k, self.v = (np.asarray(tensor, np.float64) for tensor in (q, k, v))
        self.batch, self.seqlen_q, self.heads, self.head_dim = self.q.shape
        self.seqlen_k, self.kv_heads = self.k.shape[1:3]
        self.scale_log2 = (self.head_dim**-0.5 if scale is None else scale) * math.log2(math.e)
        self.o = np.full(self.q.shape, math.nan)
        self.lse = np.full((self.batch, self.heads, self.seqlen_q), math.nan)
        self.writes = {"o": np.zeros(self.lse.shape, int), "lse": np.zeros(self.lse.shape, int)}

    def check(self, config: BlockConfig) -> None:
        kv_shape = (self.batch, self.seqlen_k, self.kv_heads, self.head_dim)
        if self.k.shape != kv_shape or self.v.shape != kv_shape or self.heads % self.kv_heads:
            raise ValueError(f"k {self.k.shape} and v {self.v.shape}: not [B, Sk, Hkv, D] to q {self.q.shape}")
        if min(self.batch, self.seqlen_q, self.seqlen_k) < 1 or self.head_dim > config.head_dim:
            raise ValueError(f"q {self.q.shape}, k {self.k.shape}: B, Sq, Sk > 0 and D <= {config.head_dim} only")

    @staticmethod
    def box(tensor: np.ndarray, start: int, rows: int, dims: int) -> np.ndarray:
        """`rows` of an (S, D) tensor from row `start`, filled up with zeros as TMA does."""
        inside = tensor[start : start + rows]
        return np.pad(inside, [(0, rows - inside.shape[0]), (0, dims - inside.shape[1])])

    def write(self, what: str, work: Work, rows: np.ndarray, values: np.ndarray) -> None:
        """Rows past the last query are clipped, and so are columns past the last dimension."""
        rows = rows[rows < self.seqlen_q]
        self.writes[what][work.batch, work.head, rows] += 1
        if what == "o":
            self.o[work.batch, rows, work.head] = values[: len(rows), : self.head_dim]
        else:
            self.lse[work.batch, work.head, rows] = values[: len(rows)]

    def settle(self) -> None:
        for what, count in self.writes.items():
            for batch, head, row in np.argwhere(count != 1)[:1]:
                times = count[batch, head, row]
                raise CountError(f"exit: {what}, batch {batch}, head {head}, row {row} was written {times} times")


class Cta:
    """The roles of one CTA, their shared memory and their barriers. Tests break one attribute or role at a time."""

    RING: type[NumpyRing] = NumpyRing
    LOAD: type[NumpyLoad] = NumpyLoad
    ATTEND: type[NumpyAttend] = NumpyAttend
    ELEMENT_BYTES = 2
    WARPS = WARPGROUP // 32  # of a consumer: one lane of each arrives when it releases a slot
    FULL_ARRIVALS = 1
    TURN_THREADS = 2 * WARPGROUP

    def __init__(self, tensors: Tensors, domain: Dense | Causal, config: BlockConfig, machine: Machine) -> None:
        self.tensors, self.domain, self.config, self.machine = tensors, domain, config, machine
        self.names = [f"attend{i}" for i in range(config.consumers)]
        rows, keys = config.tile_m // config.consumers, config.tile_n
        q_tiles, kv_tiles = -(-tensors.seqlen_q // config.tile_m), max(1, -(-tensors.seqlen_k // keys))
        k, v = self._key_source(tensors.k), self._key_source(tensors.v)
        self.rings = (
            self.RING(self, "Q", 1, config.consumers, rows, self._query_source, q_tiles, once=True),
            self.RING(self, "K", config.stages, 1, keys, k, kv_tiles),
            self.RING(self, "V", config.stages, 1, keys, v, kv_tiles),
        )
        self.turnstile = Turnstile(machine, self.names, self.TURN_THREADS)
        self.load = self.LOAD(*self.rings)
        self.attend = [self.ATTEND(self, i) for i in range(config.consumers)]

    def _query_source(self, work: Work, tile: int) -> list[np.ndarray]:
        queries, rows = self.tensors.q[work.batch, :, work.head], self.config.tile_m // self.config.consumers
        starts = range(tile * self.config.tile_m, (tile + 1) * self.config.tile_m, rows)
        return [self.tensors.box(queries, start, rows, self.config.head_dim) for start in starts]

    def _key_source(self, tensor: np.ndarray) -> Callable[[Work, int], list[np.ndarray]]:
        heads_per_kv_head = self.tensors.heads // self.tensors.kv_heads
        rows, dims = self.config.tile_n, self.config.head_dim

        def source(work: Work, tile: int) -> list[np.ndarray]:
            return [self.tensors.box(tensor[work.batch, :, work.head // heads_per_kv_head], tile * rows, rows, dims)]

        return source

    def slot_bytes(self, parts: Sequence[Buffer]) -> int:
        """What a commit announces."""
        return self.ELEMENT_BYTES * sum(part.data.size for part in parts)

    def empty_arrivals(self) -> int:
        """What frees a slot."""
        return self.WARPS * self.config.consumers

    def open_turns(self) -> None:
        """By the last warpgroup, before its program."""
        self.attend[-1].turn.seed()

    def run(self, work: Work, visits: Visits) -> None:
        """Every role's program for one work tile. Raises a `ScheduleError`."""

        def attend(role: NumpyAttend) -> None:
            if role is self.attend[-1]:
                self.open_turns()
            with np.errstate(all="ignore"):  # as on the chip, infinities and NaN spread in silence
                role.run(work, visits)

        self.machine.spawn("load", lambda: self.load.run(work, visits))
        for name, role in zip(self.names, self.attend, strict=True):
            self.machine.spawn(name, lambda role=role: attend(role))  # type: ignore[misc]
        self.machine.run()
        for part in (*self.rings, self.turnstile):
            part.settle()


class Result(NamedTuple):
    """o [B, Sq, Hq, D] and lse [B, Hq, Sq] (natural logarithm) in float64, and what happened, CTA by CTA."""

    o: np.ndarray
    lse: np.ndarray
    trace: list[Event]


def forward(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    scale: float | None = None,
    config: BlockConfig = SMALL,
    head_group: int = 1,
    seed: int = 0,
    policy: str = "random",
    cta: type[Cta] = Cta,
) -> Result:
    """Attention by the role programs of `schedules.forward`, on a CPU.

    q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D], of any float dtype; B, Sq, Sk > 0, D at most `config.head_dim`, Hkv
    divides Hq. `scale` multiplies the scores; None is 1/sqrt(D). `seed` and `policy` (one of `machine.POLICIES`) pick
    the interleaving; whatever they are, the numbers are those of a softmax in float64. Raises a `ScheduleError` where
    the programs race, ValueError for shapes that do not fit.
    """
    tensors = Tensors(q, k, v, scale)
    tensors.check(config)
    domain = (Causal if causal else Dense)(config.tile_m, config.tile_n)
    q_tiles = -(-tensors.seqlen_q // config.tile_m)
    trace: list[Event] = []
    for index in range(q_tiles * tensors.heads * tensors.batch):
        work = work_of(index, q_tiles, tensors.heads, tensors.batch, head_group)
        visits = domain.visits(work.q_tile, tensors.seqlen_q, tensors.seqlen_k)
        machine = Machine(policy, seed, index, COSTS)
        cta(tensors, domain, config, machine).run(work, visits)
        trace += machine.trace
    tensors.settle()
    return Result(tensors.o, tensors.lse, trace)
