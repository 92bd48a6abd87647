"""What nothing orders is found, in whatever order it happened to come."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from schedules.causality import Causality, ClockedBarrier, Region, TensorCore
from schedules.machine import POLICIES, Hazard, Machine, Until

HERE, BESIDE = Region("memory", 0, 4), Region("memory", 4, 8)


def cta(policy: str = "random", seed: int = 0) -> Causality:
    return Causality(Machine(policy, seed))


def meet(causality: Causality, *roles: Callable[[], None]) -> None:
    """Runs the roles to their ends, and then looks whether all that they started is known to be over."""
    for i, role in enumerate(roles):
        causality.machine.spawn(f"role{i}", role)
    causality.machine.run()
    causality.settle()


def writes(causality: Causality, *regions: Region, kind: str = "") -> None:
    causality.machine.op("write")
    causality.touch(writes=regions, kind=kind)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_roles_may_not_write_one_place(policy):
    for seed in range(5):
        causality = cta(policy, seed)
        with pytest.raises(Hazard, match=r"write writes memory\[0:4\], and nothing says that write of role"):
            meet(causality, lambda c=causality: writes(c, HERE), lambda c=causality: writes(c, HERE))


def test_places_that_do_not_overlap_are_different_places():
    causality = cta()
    meet(causality, lambda: writes(causality, HERE), lambda: writes(causality, BESIDE))
    causality = cta()
    with pytest.raises(Hazard):
        meet(causality, lambda: writes(causality, HERE), lambda: writes(causality, Region("memory", 3, 5)))


def test_two_roles_may_read_one_place():
    causality = cta()

    def read() -> None:
        causality.machine.op("read")
        causality.touch(reads=[HERE])

    meet(causality, read, read)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("waits", [True, False])
def test_a_barrier_orders_what_came_before_it(seed, waits):
    causality = cta(seed=seed)
    barrier = ClockedBarrier(causality, "it is written", 1)

    def first() -> None:
        writes(causality, HERE)
        causality.machine.op("arrive")
        barrier.tell(causality.told())

    def second() -> None:
        if waits:
            barrier.sync("wait", 0)
        writes(causality, HERE)

    if waits:
        meet(causality, first, second)
    else:
        with pytest.raises(Hazard):
            meet(causality, first, second)


@pytest.mark.parametrize("without", ["hand over", "take", None])
def test_tensor_memory_is_handed_over_and_taken(without):
    causality = cta()
    barrier = ClockedBarrier(causality, "it is written", 1)

    def first() -> None:
        writes(causality, HERE, kind="tensor")
        if without != "hand over":
            causality.publish("tensor")
        causality.machine.op("arrive")
        barrier.tell(causality.told())

    def second() -> None:
        barrier.sync("wait", 0)
        if without != "take":
            causality.take()
        writes(causality, HERE, kind="tensor")
        causality.publish("tensor")

    if without is None:
        meet(causality, first, second)
    else:
        with pytest.raises(Hazard, match="of role0 tensor is over"):
            meet(causality, first, second)


def test_mmas_are_in_order_and_a_commit_tells_of_all():
    causality = cta()
    core, barrier = TensorCore(causality), ClockedBarrier(causality, "done", 1)
    done: list[str] = []

    def multiply() -> None:
        causality.machine.op("issue")
        core.issue("first", 0, lambda: done.append("first"), [BESIDE], [HERE])
        core.issue("second", 0, lambda: done.append("second"), [HERE], [BESIDE])
        core.commit(barrier, "done")

    def read() -> None:
        barrier.sync("wait", 0)
        causality.take()
        assert done == ["first", "second"]
        causality.touch(reads=[HERE, BESIDE], kind="tensor")
        causality.publish("tensor")

    meet(causality, multiply, read)


def test_what_is_under_way_at_exit_must_have_been_waited_for():
    causality = cta()
    core = TensorCore(causality)

    def multiply() -> None:
        causality.machine.op("issue")
        core.issue("it", 0, lambda: None, [], [HERE])
        causality.machine.op("go on", until=Until(lambda: core.last is not None and core.last.landed))

    with pytest.raises(Hazard, match="exit: nothing says that the last operation of the tensor core is over"):
        meet(causality, multiply)


def test_copies_into_one_place_are_not_in_order():
    causality = cta()

    def load() -> None:
        causality.machine.op("load")
        causality.start("copies", "load", causality.told(), writes=[HERE])
        causality.machine.op("load")
        causality.start("copies", "load", causality.told(), writes=[HERE])

    with pytest.raises(Hazard, match="load writes"):
        meet(causality, load)
