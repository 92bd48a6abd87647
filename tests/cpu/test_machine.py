"""The model of the hardware: barriers, fences, groups of MMAs, memory that aliases, and what a deadlock says."""

from __future__ import annotations

import numpy as np
import pytest

from schedules.machine import (
    Buffer,
    CountError,
    Deadlock,
    Fence,
    Hazard,
    Machine,
    Mbarrier,
    NamedBarrier,
    OrderError,
    Until,
    Wgmma,
)
from tests.cpu.simulation import ADVERSARIES


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
            machine.op("arrive", until=Until(lambda i=i: barriers[0].rounds == i))
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
        machine.op("store", until=Until(lambda: bool(fenced)))
        machine.issue("tma", "store", 0, lambda: None, reads=[buffer])

    def other(machine: Machine) -> None:
        machine.op("fence", until=Until(lambda: bool(machine.unordered)))
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
            machine.op("wait", until=Until(lambda: flight.landed))
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


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="policy 'worst': one of eager, lazy, random, steady"):
        Machine("worst")
