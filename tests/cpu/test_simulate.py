"""The simulator: right numbers under every schedule, and the right objection to every kind of mistake."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import render, simulate
from schedules.domain import Section
from schedules.forward import Slot
from schedules.machine import (
    POLICIES,
    Buffer,
    CountError,
    Deadlock,
    Fence,
    Hazard,
    Machine,
    Mbarrier,
    NamedBarrier,
    OrderError,
    TileError,
    Wgmma,
)
from schedules.simulate import NumpyAttend, NumpyLoad, NumpyRing, NumpyTurn
from schedules.tiling import choose
from tests.cpu.simulation import ADVERSARIES, Problem, WrongNumbers, attention, broken, run, small

# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("consumers", (1, 2, 3))
@pytest.mark.parametrize("stages", (1, 2, 3, 4))
@pytest.mark.parametrize("causal", (False, True))
def test_numbers_under_every_schedule(policy, consumers, stages, causal):
    config = small(consumers, stages)
    for seed, (seqlen_q, seqlen_k) in enumerate([(1, 1), (16 * consumers, 96), (33, 47), (70, 130)]):
        run(Problem(seqlen_q, seqlen_k, causal, config=config), seed, policy)


@settings(max_examples=150)
@given(
    lengths=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    causal=st.booleans(),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 16),
    consumers=st.integers(1, 3),
    stages=st.integers(1, 4),
    tile_n=st.sampled_from([16, 32, 48]),
    policy=st.sampled_from(ADVERSARIES),
    seed=st.integers(0, 2**32),
)
def test_numbers_of_any_shape(
    lengths, causal, batch, kv_heads, group, head_dim, consumers, stages, tile_n, policy, seed
):
    config = small(consumers, stages, tile_n)
    run(Problem(*lengths, causal, batch, kv_heads * group, kv_heads, head_dim, config=config), seed, policy)


@pytest.mark.parametrize("head_dim", (64, 80, 128, 256))
@pytest.mark.parametrize("causal", (False, True))
def test_numbers_with_the_block_configs_of_the_kernels(head_dim, causal):
    run(Problem(200, 300, causal, heads=2, head_dim=head_dim, spread=2.0, config=choose(head_dim, "sm_90a")))


def test_rows_that_see_nothing_are_zero_with_an_lse_of_minus_infinity():
    result = run(Problem(100, 30, causal=True, heads=2))
    assert (result.o[:, :70] == 0).all() and (result.lse[:, :, :70] == -math.inf).all()
    assert np.isfinite(result.lse[:, :, 70:]).all() and (result.o[:, 70:] != 0).all()


def test_scale_and_the_order_of_work_change_nothing_else():
    problem = Problem(50, 50, causal=True, heads=4, batch=2, scale=0.3)
    one, three = (run(problem, policy="steady", head_group=group) for group in (1, 3))
    np.testing.assert_array_equal(one.o, three.o)
    assert one.trace != three.trace


def test_the_threshold_decides_who_rescales():
    """Without an adversary: at every new maximum, only to leave the floor, or never; the last overflows."""

    def rescales(rescale_above: float) -> int:
        problem = Problem(16, 160, spread=1.0, config=small(consumers=1, rescale_above=rescale_above))
        return sum(event.what == "rescale" for event in run(problem, policy="steady").trace)

    assert rescales(0.0) > 3
    assert rescales(8.0) == 1
    with pytest.raises(WrongNumbers):
        rescales(math.inf)


def test_infinities_and_nan_spread_as_in_a_softmax():
    q, k, v = Problem(40, 50).inputs()
    q[0, 3, 0, 0], v[0, 7, 0, 2], k[0, 49, 0, 1] = math.nan, math.inf, math.inf
    with np.errstate(all="ignore"):
        o, lse, _ = simulate.forward(q, k, v, config=small())
    assert np.isnan(o[0, 3]).all() and np.isnan(lse[0, 0, 3])
    assert not np.isfinite(o).all(axis=(0, 2, 3)).any(), "every query meets the infinite key"
    q, k, v = Problem(40, 50).inputs()
    q[0, 3, 0, 0], v[0, 7, 0, 2] = math.nan, math.inf
    o = simulate.forward(q, k, v, config=small()).o
    others = np.arange(40) != 3
    np.testing.assert_array_equal(o[0, others, 0, 2], math.inf)
    assert np.isfinite(np.delete(o[:, others], 2, axis=3)).all()


def test_a_seed_and_a_policy_fix_the_schedule():
    problem = Problem(30, 60)
    for policy in POLICIES:
        assert run(problem, 1, policy).trace == run(problem, 1, policy).trace
    schedules = {tuple(run(problem, seed, policy).trace) for seed in range(5) for policy in ADVERSARIES}
    assert len(schedules) == 15
    assert len({tuple(run(problem, seed, "steady").trace) for seed in range(5)}) == 1


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), r"k \(1, 4, 2, 8\) .* not \[B, Sk, Hkv, D\]"),
        (((1, 4, 2, 8), (1, 4, 2, 8), (1, 5, 2, 8)), r"v \(1, 5, 2, 8\)"),
        (((1, 4, 2, 8), (1, 4, 2, 7), (1, 4, 2, 7)), r"k \(1, 4, 2, 7\)"),
        (((2, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)), r"k \(1, 4, 2, 8\)"),
        (((1, 0, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "B, Sq, Sk > 0"),
        (((1, 4, 2, 17), (1, 4, 2, 17), (1, 4, 2, 17)), "D <= 16"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        simulate.forward(*map(np.zeros, shapes), config=small())


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="policy 'worst': one of eager, lazy, random, steady"):
        run(Problem(1, 1), policy="worst")


# -- broken programs ---------------------------------------------------------------------------------------------------


def without(base: type, operation: str) -> type:
    """A role or ring whose `operation` does nothing."""
    return type(f"Without_{operation}", (base,), {operation: lambda self, *arguments: None})


class ReadsScoresEarly(NumpyAttend):
    def issue_qk(self, slot: Slot) -> None:
        super().issue_qk(slot)
        self.exponents()


class OverwritesP(NumpyAttend):
    def exponents(self) -> None:
        super().exponents()
        self.pack_p()


class ReadsOutputEarly(NumpyAttend):
    def issue_pv(self, slot: Slot) -> None:
        super().issue_pv(slot)
        self.rescale()


class ReleasesEarly(NumpyAttend):
    def issue_qk(self, slot: Slot) -> None:
        super().issue_qk(slot)
        self.k.release(slot)


class ReleasesTwice(NumpyAttend):
    def last(self, slot: Slot) -> None:
        super().last(slot)
        self.v.release(slot)


class ReadsAfterRelease(NumpyAttend):
    def last(self, slot: Slot) -> None:
        super().last(slot)
        self.issue_pv(slot)


class StagesOverQueriesInUse(NumpyAttend):
    def issue_qk(self, slot: Slot) -> None:
        super().issue_qk(slot)
        self.stage_o()


class LeavesAnMmaBehind(NumpyAttend):
    def last(self, slot: Slot) -> None:
        self.v.wait(slot)
        self.fence()
        self.issue_pv(slot)


class VisitsTooFew(simulate.Cta):
    def run(self, work, visits) -> None:
        super().run(work, visits._replace(total=visits.total - 1))


class VisitsTooMany(simulate.Cta):
    def run(self, work, visits) -> None:
        super().run(work, visits._replace(total=visits.total + 1))


class NamesTheWrongTile(NumpyAttend):
    def row_max(self, section: Section, work, tile: int) -> bool:
        return super().row_max(section, work, max(0, tile - 1))


class StoresTwice(NumpyAttend):
    def store_o(self, work) -> None:
        super().store_o(work)
        super().store_o(work)


class LoadsPastTheEnd(NumpyRing):
    def load(self, slot, work, tile) -> None:
        super().load(slot, work, tile + 1)


class LoadsTwice(NumpyRing):
    def load(self, slot, work, tile) -> None:
        super().load(slot, work, tile)
        super().load(slot, work, tile)


class CommitsTwice(NumpyRing):
    def commit(self, slot) -> None:
        super().commit(slot)
        super().commit(slot)


class GivesTwice(NumpyTurn):
    def give(self) -> None:
        super().give()
        super().give()


class TakesTurnsCarelessly(NumpyAttend):
    def __init__(self, cta, index) -> None:
        super().__init__(cta, index)
        object.__setattr__(self, "turn", GivesTwice(cta.turnstile, index))


class TakesOneTurnTooMany(NumpyAttend):
    def last(self, slot: Slot) -> None:
        super().last(slot)
        if self.index == 0:
            self.turn.take()


class LoadsNoValues(NumpyLoad):
    def run(self, work, visits) -> None:
        slot = self.k.first()
        for ring, tile in ((self.q, work.q_tile), (self.k, visits.total - 1)):
            ring.load(slot, work, tile)
            ring.commit(slot)


BROKEN = {
    "no fence before the first MMA": (
        broken(ATTEND=without(NumpyAttend, "fence")),
        Hazard,
        r"attend\d: issue QK K\[0\], tile 5, step \d+: QK uses S, touched without wgmma.fence since",
    ),
    "scores read under their MMA": (
        broken(ATTEND=ReadsScoresEarly),
        Hazard,
        r"attend\d: exponents, tile 5, .*writes S while QK of tile 5 by attend\d is in flight",
    ),
    "P overwritten under its MMA": (
        broken(ATTEND=OverwritesP),
        Hazard,
        r"attend\d: pack_p, tile 3, .*writes P while PV of tile 4 by attend\d is in flight",
    ),
    "O rescaled under its MMA": (broken(ATTEND=ReadsOutputEarly), Hazard, r"rescale.*writes O while PV of tile 5"),
    "MMAs never retired": (
        broken(ATTEND=without(NumpyAttend, "retire")),
        Hazard,
        r"attend\d: release K\[0\], tile 5, .*releases K\[0\] while QK of tile 5 by attend\d is in flight",
    ),
    "MMAs never committed": (
        broken(ATTEND=without(NumpyAttend, "commit")),
        Hazard,
        r"releases K\[0\] while QK of tile 5",
    ),
    "K released before its MMA has retired": (
        broken(ATTEND=ReleasesEarly),
        Hazard,
        r"releases K\[0\] while QK of tile 5",
    ),
    "an MMA left behind": (
        broken(ATTEND=LeavesAnMmaBehind),
        Hazard,
        r"normalise.*writes O while PV of tile 0 by attend\d is in flight",
    ),
    "O staged over queries in use": (
        broken(ATTEND=StagesOverQueriesInUse),
        Hazard,
        r"stage_o, tile 5, .*writes the staged O while QK of tile 5 by attend\d is in flight",
    ),
    "O stored before it is published": (
        broken(ATTEND=without(NumpyAttend, "publish_o")),
        Hazard,
        r"issue store O, tile \d, .*store O uses the staged O, touched without fence.proxy.async since",
    ),
    "exit while a store reads shared memory": (
        broken(ATTEND=without(NumpyAttend, "drain")),
        Hazard,
        r"attend\d: issue store O, tile 0, .*the CTA exits before store O of tile 0 by attend\d has been waited for",
    ),
    "a slot refilled before it is released": (
        broken(RING=without(NumpyRing, "acquire")),
        Hazard,
        r"load: issue load [KV]\[\d\], tile \d, step \d+: refills [KV]\[\d\], not released by attend",
    ),
    "a slot read before it is full": (
        broken(RING=without(NumpyRing, "wait")),
        Hazard,
        r"attend\d: issue QK K\[0\].*reads Q\[0\] without having waited for it",
    ),
    "a slot read after its release": (broken(ATTEND=ReadsAfterRelease), Hazard, r"reads V\[\d\] .*after releasing it"),
    "two copies into one slot": (broken(RING=LoadsTwice), Hazard, r"load: .*refills Q\[0\]"),
    "a slot released twice": (broken(ATTEND=ReleasesTwice), CountError, r"releases V\[\d\] without holding it"),
    "a slot never released": (
        broken(RING=without(NumpyRing, "release")),
        Deadlock,
        r"load: acquire K\[0\], tile \d \(K\[0\] empty, phase 0: 8 arrivals",
    ),
    "a slot announced twice": (broken(RING=CommitsTwice), CountError, r"one arrival too many at [QKV]\[\d\] full"),
    "too many bytes announced": (
        broken(slot_bytes=lambda self, parts: 4096),
        CountError,
        r"load: commit Q\[0\], tile 0, .*Q\[0\]: 4096 bytes announced, 1024 copied",
    ),
    "a tile past the end": (
        broken(RING=LoadsPastTheEnd),
        TileError,
        r"load: issue load Q\[0\], tile 1, .*tiles 0 to 0",
    ),
    "a tile left out": (VisitsTooFew, TileError, r"normalise, .*QK visited the tiles \[4, 3, 2, 1, 0\], not each of 0"),
    "a tile too many": (VisitsTooMany, TileError, r"load: issue load K\[0\], tile 6, .*K has tiles 0 to 5"),
    "S of another tile": (broken(ATTEND=NamesTheWrongTile), TileError, r"row_max right, tile 4, .*S holds tile 5"),
    "P of another tile": (
        broken(ATTEND=without(NumpyAttend, "pack_p")),
        TileError,
        r"issue PV V\[0\], tile 5, .*P holds tile None",
    ),
    "an output stored twice": (
        broken(ATTEND=StoresTwice),
        CountError,
        r"o, batch 0, head 0, row 0 was written 2 times",
    ),
    "an output not stored": (broken(ATTEND=without(NumpyAttend, "store_o")), CountError, r"row 0 was written 0 times"),
    "an LSE not stored": (broken(ATTEND=without(NumpyAttend, "normalise")), CountError, r"lse, batch 0, head 0, row 0"),
    "a turn given twice": (broken(ATTEND=TakesTurnsCarelessly), OrderError, r"attend0: turn.give, .*turn of nobody"),
    "a turn for two": (
        broken(TURN_THREADS=128),
        (OrderError, CountError),
        r"turn.take, .*takes the turn that attend\d holds",
    ),
    "a turn taken at the end": (
        broken(ATTEND=TakesOneTurnTooMany),
        CountError,
        r"exit: \[0, 0\] threads have arrived for another turn",
    ),
    "no turn to begin with": (
        broken(open_turns=lambda self: None),
        Deadlock,
        r"attend0: turn.take, tile 5 .*; attend1: turn.take, tile 5 \(turn of attend1, 256 threads: 128 of attend1",
    ),
    "values that never come": (broken(LOAD=LoadsNoValues), Deadlock, r"attend\d: wait [KV]\[\d\], tile 5"),
}


@pytest.mark.parametrize("policy", ADVERSARIES)
@pytest.mark.parametrize("mistake", BROKEN)
def test_a_mistake_is_named_whatever_the_schedule(mistake, policy):
    cta, kind, message = BROKEN[mistake]
    errors = []
    for seed in range(10):
        try:
            run(Problem(30, 83), seed, policy, cta=cta)
        except kind as error:
            errors.append(str(error))
    assert errors and any(re.search(message, error) for error in errors), errors


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_a_slot_holds_nan_while_a_copy_is_on_its_way(policy):
    seen = []

    class Peek(NumpyRing):
        def load(self, slot, work, tile) -> None:
            super().load(slot, work, tile)
            seen.append(all(np.isnan(part.data).all() for part in self.at(slot).parts))

        def wait(self, slot) -> None:
            super().wait(slot)
            assert all(np.isfinite(part.data).all() for part in self.at(slot).parts)

    run(Problem(30, 83), policy=policy, cta=broken(RING=Peek))
    assert seen == [True] * 13


# -- the model of the hardware -----------------------------------------------------------------------------------------


def play(*programs, policy: str = "random", seed: int = 0) -> Machine:
    """Runs programs that take a machine, each as a role."""
    machine = Machine(policy, seed)
    for i, program in enumerate(programs):
        machine.spawn(f"role{i}", lambda program=program: program(machine))
    machine.run()
    return machine


def outside(machine: Machine) -> Machine:
    """A machine whose running role is a stand-in, for calls that do not switch."""
    machine.spawn("role", lambda: None)
    machine.actor = machine.actors[0]
    return machine


def fragment(name: str = "x", fence: Fence = Fence.WGMMA) -> Buffer:
    return Buffer(name, np.zeros(4), fence)


def test_mbarrier_phases_and_parity():
    barrier = Mbarrier(outside(Machine("lazy")), "b", count=2)
    assert barrier.completed(1).holds(), "the parity before the first phase"
    assert not barrier.completed(0).holds()
    barrier.arrive()
    assert not barrier.completed(0).holds() and not barrier.at_rest()
    barrier.arrive()
    assert barrier.completed(0).holds() and not barrier.completed(1).holds() and barrier.at_rest()
    barrier.arrive(times=2)
    assert barrier.completed(1).holds() and not barrier.completed(0).holds()


def test_mbarrier_bytes_may_land_before_they_are_announced():
    barrier = Mbarrier(outside(Machine("lazy")), "b", count=1)
    barrier.complete_bytes(64)
    barrier.complete_bytes(64)
    assert barrier.bytes == -128 and not barrier.completed(0).holds()
    barrier.arrive(expect_bytes=128)
    assert barrier.completed(0).holds() and barrier.at_rest()


def test_mbarrier_waits_for_bytes_after_the_last_arrival_and_refuses_another():
    barrier = Mbarrier(outside(Machine("lazy")), "b", count=1)
    barrier.arrive(expect_bytes=128)
    barrier.complete_bytes(64)
    assert not barrier.completed(0).holds()
    with pytest.raises(CountError, match="role: begin, step 0: one arrival too many at b, phase 0: 0 arrivals and 64"):
        barrier.arrive()


def test_mbarrier_does_not_complete_when_more_bytes_land_than_were_announced():
    barrier = Mbarrier(outside(Machine("lazy")), "b", count=1)
    barrier.arrive(expect_bytes=128)
    barrier.complete_bytes(192)
    assert not barrier.completed(0).holds() and str(barrier) == "b, phase 0: 0 arrivals and -64 bytes to come"


def test_a_named_barrier_opens_when_all_threads_have_arrived_and_starts_over():
    order = []

    def sync(machine: Machine) -> None:
        for i in range(3):
            barriers[0].sync("sync", 128)
            order.append(i)

    def arrive(machine: Machine) -> None:
        for i in range(3):
            machine.op("work")
            machine.op("arrive", until=simulate.Until(lambda i=i: barriers[0].rounds == i))
            order.append(f"arrive {i}")
            barriers[0].arrive(128)

    for seed in range(10):
        machine = Machine("random", seed)
        barriers = [NamedBarrier(machine, "b", 256)]
        order.clear()
        machine.spawn("sync", lambda: sync(machine))  # noqa: B023
        machine.spawn("arrive", lambda: arrive(machine))  # noqa: B023
        machine.run()
        assert [x for x in order if isinstance(x, int)] == [0, 1, 2]
        assert all(order.index(f"arrive {i}") < order.index(i) for i in range(3))


def test_a_named_barrier_refuses_a_second_arrival_and_too_many_threads():
    machine = outside(Machine("lazy"))
    barrier = NamedBarrier(machine, "b", 256)
    barrier.arrive(128)
    with pytest.raises(OrderError, match="arrives twice at b, 256 threads: 128 of role arrived"):
        barrier.arrive(128)
    with pytest.raises(CountError, match="too many threads at b"):
        NamedBarrier(machine, "b", 128).arrive(256)


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_wait_group_leaves_the_last_groups_in_flight(policy):
    def program(machine: Machine) -> None:
        mma, a, b = Wgmma(machine), fragment("a"), fragment("b")
        for accumulator in (a, b):
            mma.issue("MMA", 0, lambda: None, [], accumulator)
            mma.commit()
        mma.retire("retire(1)", 1)
        machine.touch(reads=[a])
        with pytest.raises(Hazard, match="reads b while MMA of tile 0 by role0 is in flight"):
            machine.touch(reads=[b])
        mma.retire("retire(0)", 0)
        machine.touch(reads=[b])

    play(program, policy=policy)


def test_wait_group_does_not_wait_for_what_was_not_committed():
    def program(machine: Machine) -> None:
        mma = Wgmma(machine)
        mma.issue("MMA", 3, lambda: None, [], fragment("a"))
        mma.retire("retire(0)", 0)

    with pytest.raises(Hazard, match="role0: retire.0., step .*the CTA exits before MMA of tile 3 by role0"):
        play(program, policy="eager")


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_mmas_into_one_accumulator_need_no_fence_between_them_and_keep_their_order(policy):
    order = []

    def program(machine: Machine) -> None:
        mma, accumulator = Wgmma(machine), fragment()
        for i in range(4):
            mma.issue("MMA", i, lambda i=i: order.append(i), [], accumulator)
            machine.op("go on")
        mma.commit()
        mma.retire("retire(0)", 0)

    for seed in range(5):
        order.clear()
        play(program, policy=policy, seed=seed)
        assert order == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("access", "fence"), [("reads", Fence.WGMMA), ("writes", Fence.WGMMA), ("writes", Fence.PROXY)]
)
def test_an_access_needs_its_fence_before_an_asynchronous_one(access, fence):
    def program(machine: Machine) -> None:
        buffer = fragment(fence=fence)
        machine.touch(**{access: [buffer]})
        machine.fence({Fence.WGMMA: Fence.PROXY, Fence.PROXY: Fence.WGMMA}[fence])
        with pytest.raises(Hazard, match=f"uses x, touched without {fence.value} since"):
            machine.issue("tma", "store", 0, lambda: None, reads=[buffer])
        machine.fence(fence)
        machine.retire([machine.issue("tma", "store", 0, lambda: None, reads=[buffer])])

    play(program)


def test_the_fence_of_another_role_orders_nothing():
    fenced = []

    def one(machine: Machine) -> None:
        buffer = fragment(fence=Fence.PROXY)
        machine.touch(writes=[buffer])
        machine.op("store", until=simulate.Until(lambda: bool(fenced)))
        machine.issue("tma", "store", 0, lambda: None, reads=[buffer])

    def other(machine: Machine) -> None:
        machine.op("fence", until=simulate.Until(lambda: bool(machine.unordered)))
        machine.fence(Fence.PROXY)
        fenced.append(True)

    with pytest.raises(Hazard, match="role0: store, step .*store uses x, touched without fence.proxy.async since"):
        play(one, other)


def test_reading_shared_memory_needs_no_fence():
    def program(machine: Machine) -> None:
        buffer = fragment(fence=Fence.PROXY)
        machine.touch(reads=[buffer])
        machine.retire([machine.issue("tma", "store", 0, lambda: None, reads=[buffer])])

    play(program)


def test_ranges_that_alias_are_the_same_memory():
    memory = np.zeros(100)
    low, high = Buffer("low", memory[:50], Fence.PROXY), Buffer("high", memory[50:], Fence.PROXY)
    middle = Buffer("middle", memory[40:60], Fence.PROXY)

    def program(machine: Machine) -> None:
        flight = machine.issue("tma", "load", 7, lambda: None, writes=[low])
        machine.touch(writes=[high])
        with pytest.raises(Hazard, match="writes middle while load of tile 7 by role0 is in flight"):
            machine.touch(writes=[middle])
        with pytest.raises(Hazard, match="reads middle while load of tile 7 by role0 is in flight"):
            machine.touch(reads=[middle])
        machine.retire([flight])

    play(program)


def test_an_operation_reads_its_operands_when_it_is_done_and_not_before():
    """The adversary of a lazy copy sees a later value than that of an eager one."""

    def copied(policy: str) -> float:
        result = []

        def program(machine: Machine) -> None:
            source = np.zeros(1)
            flight = machine.issue("tma", "copy", 0, lambda: result.append(source[0]))
            machine.op("write")
            source[0] = 1.0
            machine.op("wait", until=simulate.Until(lambda: flight.landed))
            machine.retire([flight])

        play(program, policy=policy)
        return result[0]

    assert (copied("eager"), copied("lazy")) == (0.0, 1.0)


def test_a_deadlock_names_every_role_that_waits():
    def program(machine: Machine) -> None:
        barrier = Mbarrier(machine, "b", count=1)
        machine.op("wait b", tile=4, until=barrier.completed(0))

    with pytest.raises(Deadlock) as caught:
        play(program, lambda machine: machine.op("work"), program)
    waits = "wait b, tile 4 (b, phase 0: 1 arrivals and 0 bytes to come)"
    assert str(caught.value) == f"role0: {waits}; role2: {waits}"


# -- pictures ----------------------------------------------------------------------------------------------------------


def steady_trace() -> list[simulate.Event]:
    return run(Problem(30, 60, heads=2), policy="steady").trace


def test_the_steady_policy_puts_one_softmax_beside_the_others_mmas():
    events = [event for event in steady_trace() if event.cta == 0]
    exponents = [event for event in events if event.lane == "attend0" and event.what == "exponents"]
    mmas = [event for event in events if event.lane == "mma attend1"]
    assert len(exponents) == 4 and len(mmas) == 8
    overlap = sum(max(0, min(e.end, m.end) - max(e.begin, m.begin)) for e in exponents for m in mmas)
    assert overlap >= sum(e.end - e.begin for e in exponents) / 2
    tensor_core = sorted((e.begin, e.end) for e in events if e.lane.startswith("mma"))
    assert all(a[1] <= b[0] for a, b in zip(tensor_core, tensor_core[1:], strict=False)), "there is one tensor core"


def test_the_timeline_has_a_lane_per_role_with_every_bar_in_its_place():
    trace = steady_trace()
    text = render.timeline(trace, cta=1, width=10_000, unit=3)
    header, *lanes = text.splitlines()
    assert header.strip() == "step 0"
    margin = len("mma attend0") + 2
    rows = {lane[:margin].strip(): lane[margin:] for lane in lanes}
    assert list(rows) == ["attend0", "attend1", "tma load", "mma attend0", "mma attend1", "tma attend0", "tma attend1"]
    shown = [event for event in trace if event.cta == 1 and event.end > event.begin and event.lane != "tma load"]
    assert len(shown) > 20
    for event in shown:
        bar = rows[event.lane][event.begin * 3 : event.end * 3]
        assert bar.startswith(f"{event.tile} {event.what}"[: len(bar) - 1]) and bar.endswith("│"), (event, bar)


def test_the_timeline_is_folded_at_its_width():
    trace = steady_trace()
    folded = render.timeline(trace, width=80)
    assert max(map(len, folded.splitlines())) <= 80
    lanes = [line[13:].ljust(67) for line in folded.splitlines() if line.strip().startswith("mma attend0")]
    whole = [line[13:] for line in render.timeline(trace, width=10_000).splitlines() if "mma attend0" in line]
    assert "".join(lanes).rstrip() == whole[0]


def test_mermaid_is_a_gantt_chart_with_every_bar():
    trace = steady_trace()
    lines = render.mermaid(trace, title="Two warpgroups").splitlines()
    assert lines[:4] == ["gantt", "    title Two warpgroups", "    dateFormat X", "    axisFormat %s"]
    bars = [line for line in lines if re.fullmatch(r"    [^:]+ : \d+, \d+", line)]
    sections = [line for line in lines if line.startswith("    section ")]
    assert len(bars) == sum(event.cta == 0 and event.end > event.begin for event in trace)
    assert len(bars) + len(sections) + 4 == len(lines)
    (first_qk,) = [e for e in trace if e.cta == 0 and e.lane == "mma attend0" and e.what == "QK" and e.tile == 3]
    assert f"    QK 3 : {first_qk.begin}, {first_qk.end}" in lines


def test_a_trace_without_the_cta_is_refused():
    with pytest.raises(ValueError, match="cta 9: the trace has no event of it"):
        render.timeline(steady_trace(), cta=9)


def test_the_oracle_by_hand():
    """One query, two keys whose scores differ by log 3: weights 1/4 and 3/4."""
    q, k, v = np.array([[[[1.0]]]]), np.array([[[[0.0]], [[math.log(3)]]]]), np.array([[[[4.0]], [[8.0]]]])
    o, lse = attention(q, k, v, causal=False, scale=1.0)
    assert o.item() == pytest.approx(7.0) and lse.item() == pytest.approx(math.log(4))
    o, lse = attention(np.ones((1, 3, 1, 1)), k, v, causal=True, scale=1.0)
    assert o.ravel() == pytest.approx([0.0, 4.0, 7.0]) and lse.ravel() == pytest.approx([-math.inf, 0.0, math.log(4)])
