"""The forward kernel with the operations of its roles recorded: for `perf.profile`, and in no other build.

Each operation worth seeing is preceded by a stamp: which operation, of which tile or slot, and the clock of the
multiprocessor. So a role does one thing from each stamp to its next. One lane of one warp of each role writes them, for
one CTA, into a buffer behind the work counter:

    byte  16   START, END: %globaltimer (ns) and %clock64 beside it, when the kernel starts and when O was last stored
    byte 128   for each role, the producer first: CAPACITY stamps of two int32, the lower half of %clock64 and a code

A code is the index of the operation, plus 1, and 256 times the tile or slot. A stamp is about ten instructions without
a branch: accumulators in flight must not meet a join of control flow. Waits and barriers keep their places between
stamps; arithmetic the compiler may still move a little across them.

With `Iket` in the place of `Stamps` the same operations become ranges of NVIDIA's in-kernel event tracing (IKET), which
its tool `run-iket` collects, for every warp and with a resolution of 32 ns.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cute.experimental import iket
from cutlass.cutlass_dsl import dsl_user_op

from fmha.kernels.sm90.forward import WARPS_PER_WARPGROUP, ForwardKernel, TmaLoad, WgmmaAttend
from schedules.domain import Section
from schedules.forward import LendingRing, Ring, Slot, Turn, WorkRing
from schedules.work import Work

CAPACITY = 8192  # stamps of a role; later ones are not written
START, END, STAMPS = 16, 48, 128  # bytes behind the counter
STAMP_BYTES = 8
CODES = 256

OPERATIONS = (  # at most 30: with more, IKET's events grow
    "acquire Q",
    "acquire K",
    "acquire V",
    "reclaim V",
    "load Q",
    "load K",
    "load V",
    "next_work",
    "wait Q",
    "wait K",
    "wait V",
    "borrow V",
    "turn",
    "issue QK",
    "issue PV",
    "retire(0)",
    "retire(1)",
    "start",
    "mask",
    "row_max",
    "rescale",
    "exponents",
    "pack_p",
    "foresee",
    "mend",
    "normalise",
    "stage_o",
    "publish_o",
    "store_o",
    "drain",
)


def buffer_bytes(roles: int) -> int:
    """Bytes of the counter and of the buffer behind it, for a producer and `roles - 1` warpgroups."""
    return STAMPS + roles * CAPACITY * STAMP_BYTES


@dsl_user_op
def write_stamp(stamps: Int64, index: Int32, limit: Int32, code: Int32, *, loc=None, ip=None) -> None:
    """Stamp `index` of those at address `stamps`, if it lies under `limit`."""
    _assemble(
        "{ .reg .pred inside; .reg .b32 now; .reg .b64 at; setp.lt.u32 inside, $1, $2; mov.u32 now, %clock; "
        f"mad.wide.u32 at, $1, {STAMP_BYTES}, $0; @inside st.global.v2.b32 [at], {{now, $3}}; }}",
        "l,r,r,r",
        [value.ir_value(loc=loc, ip=ip) for value in (Int64(stamps), Int32(index), Int32(limit), Int32(code))],
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def write_clocks(address: Int64, writes: Int32, *, loc=None, ip=None) -> None:
    """%globaltimer and %clock64 at `address`, if `writes` is not 0."""
    _assemble(
        "{ .reg .pred yes; .reg .b64 global, local; setp.ne.b32 yes, $1, 0; mov.u64 global, %globaltimer; "
        "mov.u64 local, %clock64; @yes st.global.v2.b64 [$0], {global, local}; }",
        "l,r",
        [Int64(address).ir_value(loc=loc, ip=ip), Int32(writes).ir_value(loc=loc, ip=ip)],
        loc=loc,
        ip=ip,
    )


def _assemble(text: str, constraints: str, operands: list, *, loc, ip) -> None:
    """PTX without a result. It keeps its place among other PTX with side effects, waits and barriers included."""
    llvm.inline_asm(
        None,
        operands,
        text,
        constraints,
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


class Recorder:
    """Takes down what a role does, in the order in which its program is traced.

    The wait for PV that follows the exponentials is passed over unless `every_wait`: the compiler puts it among them,
    where a stamp would hold it back behind the last one, and the timeline would be that of another kernel.
    """

    def __init__(self, every_wait: bool) -> None:
        self.every_wait = every_wait
        self.operation = ""  # the one being traced
        self.hidden = False  # whether it is passed over

    def begin(self, operation: str, argument: Int32 | int = 0) -> None:
        """`argument` is a tile or a slot, below 2^23."""
        self.hidden = (self.operation, operation) == ("exponents", "retire(0)") and not self.every_wait
        self.operation = operation
        if not self.hidden:
            self.record(operation, argument)

    def end(self) -> None:
        """The operation has been traced."""

    def record(self, operation: str, argument: Int32 | int) -> None:
        raise NotImplementedError

    def clocks(self, offset: int) -> None:
        """Puts both clocks into the buffer."""


class Stamps(Recorder):
    """Writes stamps, in the one thread of a role that has `writes` 1 and not 0."""

    def __init__(self, counter: Int64, role: Int32, writes: Int32, every_wait: bool) -> None:
        super().__init__(every_wait)
        self.counter = counter
        self.stamps = counter + STAMPS + Int64(role) * (CAPACITY * STAMP_BYTES)
        self.limit = writes * CAPACITY
        self.index = cute.make_rmem_tensor(1, Int32)
        self.index[0] = Int32(0)

    def record(self, operation: str, argument: Int32 | int) -> None:
        code = Int32(argument) * CODES + (OPERATIONS.index(operation) + 1)
        write_stamp(self.stamps, self.index[0], self.limit, code)
        self.index[0] = self.index[0] + 1

    def clocks(self, offset: int) -> None:
        write_clocks(self.counter + offset, self.limit)


class Iket(Recorder):
    """Makes each operation a range of IKET. The exponentials are a mark: the end of a range would hold back the wait
    that belongs among them."""

    def record(self, operation: str, argument: Int32 | int) -> None:
        if operation == "exponents":
            iket.mark(operation)
        else:
            iket.range_push(operation)

    def end(self) -> None:
        if self.operation != "exponents" and not self.hidden:
            iket.range_pop()


class RecordedRing(Ring):
    """Another ring, its waits and loads recorded."""

    def __init__(self, ring: Ring, name: str, recorder: Recorder) -> None:
        self.ring = ring
        self.name = name
        self.recorder = recorder
        self.stages = ring.stages

    def acquire(self, slot: Slot) -> None:
        self.recorder.begin(f"acquire {self.name}", slot.stage)
        self.ring.acquire(slot)
        self.recorder.end()

    def load(self, slot: Slot, work: Work, tile: int) -> None:
        self.recorder.begin(f"load {self.name}", tile)
        self.ring.load(slot, work, tile)
        self.recorder.end()

    def commit(self, slot: Slot) -> None:
        self.ring.commit(slot)

    def wait(self, slot: Slot) -> None:
        self.recorder.begin(f"wait {self.name}", slot.stage)
        self.ring.wait(slot)
        self.recorder.end()

    def release(self, slot: Slot) -> None:
        self.ring.release(slot)


class RecordedLendingRing(RecordedRing, LendingRing):
    """The same of V's."""

    def borrow(self, slot: Slot) -> None:
        self.recorder.begin(f"borrow {self.name}", slot.stage)
        self.ring.borrow(slot)
        self.recorder.end()

    def give_back(self, slot: Slot, index: Int32) -> None:
        self.ring.give_back(slot, index)

    def reclaim(self, index: Int32, parity: Int32) -> None:
        self.recorder.begin(f"reclaim {self.name}", index)
        self.ring.reclaim(index, parity)
        self.recorder.end()


class RecordedWorkRing(RecordedRing, WorkRing):
    """The same of Q's."""

    def post(self, slot: Slot, work: Work) -> None:
        self.ring.post(slot, work)

    def work(self, slot: Slot) -> Work:
        return self.ring.work(slot)

    def place(self, slot: Slot) -> Int32:
        return self.ring.place(slot)


class RecordedTurn(Turn):
    """Another turn, the wait for it recorded."""

    def __init__(self, turn: Turn, recorder: Recorder) -> None:
        self.turn = turn
        self.recorder = recorder

    def take(self) -> None:
        self.recorder.begin("turn")
        self.turn.take()
        self.recorder.end()

    def give(self) -> None:
        self.turn.give()


def record_k_and_v(k: Ring, v: Ring, recorder: Recorder) -> tuple[RecordedRing, RecordedLendingRing]:
    return RecordedRing(k, "K", recorder), RecordedLendingRing(v, "V", recorder)


class RecordedLoad(TmaLoad):
    """The producer."""

    def __init__(self, recorder: Recorder, rings, *rest) -> None:
        qs, *others = rings
        recorded = [RecordedWorkRing(q, "Q", recorder) for q in qs]
        super().__init__((recorded, *record_k_and_v(*others, recorder)), *rest)
        self.recorder = recorder

    def first_work(self) -> Work:
        self.recorder.clocks(START)
        return super().first_work()

    def next_work(self, asked: Int32) -> Work:
        self.recorder.begin("next_work")
        work = super().next_work(asked)
        self.recorder.end()
        return work


class RecordedAttend(WgmmaAttend):
    """A consumer warpgroup."""

    def __init__(self, recorder: Recorder, kernel, rings, turn, *rest) -> None:
        q, *others = rings
        recorded = RecordedWorkRing(q, "Q", recorder), *record_k_and_v(*others, recorder)
        super().__init__(kernel, recorded, RecordedTurn(turn, recorder), *rest)
        self.recorder = recorder

    def start(self) -> None:
        self.recorder.begin("start")
        super().start()
        self.recorder.end()

    def issue_qk(self, q_slot: Slot, slot: Slot) -> None:
        self.recorder.begin("issue QK", slot.stage)
        super().issue_qk(q_slot, slot)

    def issue_pv(self, slot: Slot) -> None:
        self.recorder.begin("issue PV", slot.stage)
        super().issue_pv(slot)

    def commit(self) -> None:
        # Anything between an MMA and its commit would have ptxas close one group there and make an empty second one,
        # and `retire` counts groups.
        super().commit()
        self.recorder.end()

    def retire(self, pending: int) -> None:
        self.recorder.begin(f"retire({pending})")
        super().retire(pending)
        self.recorder.end()

    def change_scores(self, work: Work, tile: int, section: Section) -> None:
        self.recorder.begin("mask", tile)
        super().change_scores(work, tile, section)
        self.recorder.end()

    def mask(self, work: Work, tile: int, section: Section) -> None:
        self.recorder.begin("mask", tile)
        super().mask(work, tile, section)
        self.recorder.end()

    def row_max(self) -> Boolean:
        self.recorder.begin("row_max")
        grew = super().row_max()
        self.recorder.end()
        return grew

    def rescale(self) -> None:
        self.recorder.begin("rescale")
        super().rescale()
        self.recorder.end()

    def exponents(self, tile: int) -> None:
        self.recorder.begin("exponents", tile)
        super().exponents(tile)
        self.recorder.end()

    def pack_p(self) -> None:
        self.recorder.begin("pack_p")
        super().pack_p()
        self.recorder.end()

    def foresee(self, tiles: Int32) -> None:
        self.recorder.begin("foresee")
        super().foresee(tiles)
        self.recorder.end()

    def mend(self, tile: int) -> None:
        self.recorder.begin("mend", tile)
        super().mend(tile)
        self.recorder.end()

    def normalise(self, work: Work) -> None:
        self.recorder.begin("normalise")
        super().normalise(work)
        self.recorder.end()

    def stage_o(self, slot: Slot) -> None:
        self.recorder.begin("stage_o", slot.stage)
        super().stage_o(slot)
        self.recorder.end()

    def publish_o(self) -> None:
        self.recorder.begin("publish_o")
        super().publish_o()
        self.recorder.end()

    def store_o(self, slot: Slot, work: Work) -> None:
        self.recorder.begin("store_o", work.q_tile)
        super().store_o(slot, work)
        self.recorder.end()

    def drain(self) -> None:
        self.recorder.begin("drain")
        super().drain()
        self.recorder.end()
        self.recorder.clocks(END)


class StampedKernel(ForwardKernel):
    """The forward kernel that writes stamps behind its counter."""

    EVERY_WAIT = False

    def _roles(self, attend, load):
        counter = load[-1].counter
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        writer = (warp % WARPS_PER_WARPGROUP == 0) & (cute.arch.lane_idx() == 0) & (cute.arch.block_idx()[0] == 0)
        recorders = [
            Stamps(counter, warp // WARPS_PER_WARPGROUP, Int32(writer), self.EVERY_WAIT) for _ in ("attend", "load")
        ]
        return RecordedAttend(recorders[0], *attend), RecordedLoad(recorders[1], *load)


class EveryWaitKernel(StampedKernel):
    """The same with a stamp before every wait, which moves the one that retires PV behind the exponentials where these
    are written over S (head dim 256, and kernels that write LSEs)."""

    EVERY_WAIT = True


class IketKernel(ForwardKernel):
    """The forward kernel with IKET's ranges. Compiled without the option "iket" it is the forward kernel."""

    def _roles(self, attend, load):
        return RecordedAttend(Iket(every_wait=False), *attend), RecordedLoad(Iket(every_wait=False), *load)


KERNELS = {"stamps": StampedKernel, "every_wait": EveryWaitKernel, "iket": IketKernel}
