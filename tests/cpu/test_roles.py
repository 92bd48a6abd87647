"""Model and kernel cannot drift apart: both subclass the same role programs, and neither may change one."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys

import pytest

import fmha.kernels
from fmha.kernels.sm90 import barriers
from schedules import forward, rings, simulate
from schedules.forward import Attend, Load, Ring, Role, Turn

SCHEDULES = (Load, Attend, Ring, Turn, Role)
ROLES = (Load, Attend)


def kernel_modules():
    names = [module.name for module in pkgutil.walk_packages(fmha.kernels.__path__, "fmha.kernels.")]
    return [importlib.import_module(name) for name in names]


def lowered(module):
    """The classes that `module` defines below one of the schedules'."""
    return [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls) and issubclass(cls, SCHEDULES) and cls.__module__ == module.__name__
    ]


KERNEL_CLASSES = [cls for module in kernel_modules() for cls in lowered(module)]
MODEL_CLASSES = lowered(rings) + lowered(simulate)


def programs(schedule: type) -> set[str]:
    """The methods that `schedule` writes down, as against the operations it leaves open."""
    methods = {name for name, value in vars(schedule).items() if inspect.isfunction(value)}
    return {name for name in methods if not name.startswith("__")} - schedule.__abstractmethods__


def overridden(cls: type) -> set[str]:
    """The programs of the schedules that `cls`, or a class between, defines anew."""
    schedules = [base for base in cls.__mro__ if base.__module__ == forward.__name__]
    below = [base for base in cls.__mro__ if base.__module__ != forward.__name__]
    written = set().union(*map(programs, schedules))
    return {name for name in written for base in below if name in vars(base)}


def test_programs_are_told_from_operations():
    assert "run" in programs(Load) and "run" in programs(Attend) and programs(Ring) == {"first", "next"}
    assert programs(Attend).isdisjoint({"issue_qk", "retire", "row_max", "store_o"})
    assert programs(Turn) == set()


def test_every_role_has_a_kernel_and_a_model():
    for role in ROLES:
        assert [cls for cls in KERNEL_CLASSES if issubclass(cls, role)], f"no kernel role is a {role.__name__}"
        assert [cls for cls in MODEL_CLASSES if issubclass(cls, role)], f"no model role is a {role.__name__}"


@pytest.mark.parametrize("cls", KERNEL_CLASSES + MODEL_CLASSES, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_no_program_is_overridden_and_no_operation_is_left_open(cls):
    assert overridden(cls) == set()
    assert cls.__abstractmethods__ == frozenset()


def test_an_overridden_program_is_found():
    class Between(simulate.NumpyAttend):
        def step(self, section, work, tile, before):
            return before

    class Below(Between):
        pass

    class OtherRing(rings.NumpyRing):
        def next(self, slot):
            return slot

    assert overridden(Between) == overridden(Below) == {"step"}
    assert overridden(OtherRing) == {"next"}


@pytest.fixture
def instructions(monkeypatch) -> list[tuple]:
    """What the kernel's rings and turns ask of the hardware: (instruction, barrier, argument)."""
    calls: list[tuple] = []

    def record(name: str):
        def call(*arguments, barrier_id=None, number_of_threads=None):
            calls.append((name, *arguments) if barrier_id is None else (name, barrier_id, number_of_threads))

        monkeypatch.setattr(barriers.cute.arch, name, call)

    for name in ("mbarrier_init", "mbarrier_wait", "mbarrier_arrive", "mbarrier_arrive_and_expect_tx"):
        record(name)
    record("barrier")
    record("barrier_arrive")
    monkeypatch.setattr(barriers.cute.arch, "elect_one", contextlib.nullcontext)
    return calls


@pytest.mark.parametrize(
    ("kernel_ring", "model_ring", "more"),
    [(barriers.TmaRing, rings.NumpyRing, ()), (barriers.QueryRing, rings.NumpyWorkRing, (None, None))],
)
def test_the_rings_of_kernel_and_model_count_alike(instructions, kernel_ring, model_ring, more):
    """An empty barrier waits for the arrivals of every consumer; parities are the same."""
    cta = simulate.Cta.__new__(simulate.Cta)
    cta.config = simulate.SMALL
    counts = cta.counts(model_ring, elements=256)
    warps = cta.config.consumers * 4
    ring = kernel_ring(100, 3, counts.slot_bytes, warps, *more)
    assert warps * kernel_ring.RELEASING_LANES == counts.empty_arrivals
    assert counts.empty_arrivals == cta.config.consumers * counts.release_arrivals
    ring.init()
    expected = {100: counts.full_arrivals, 103: counts.empty_arrivals}
    assert instructions == [
        ("mbarrier_init", first + stage, expected[first]) for stage in range(3) for first in (100, 103)
    ]
    instructions.clear()
    for operation in (ring.acquire, ring.commit, ring.wait, ring.release):
        operation(forward.Slot(stage=2, parity=1))
    assert instructions == [
        ("mbarrier_wait", 105, 0),
        ("mbarrier_arrive_and_expect_tx", 102, 512),
        ("mbarrier_wait", 102, 1),
        ("mbarrier_arrive", 105),
    ]


def test_the_turns_of_kernel_and_model_are_alike(instructions):
    """Each warpgroup syncs on its own barrier and arrives at the next one's; the last one's first arrival is extra."""
    threads = simulate.Cta.TURN_THREADS
    turns = [barriers.PingPong(index, 3) for index in range(3)]
    turns[-1].seed()
    for turn in turns:
        turn.take()
        turn.give()
    ids = [instruction[1] - barriers.PingPong.FIRST for instruction in instructions]
    assert ids == [0, 0, 1, 1, 2, 2, 0]
    assert [(name, n) for name, _, n in instructions] == [
        ("barrier_arrive", threads),
        *[("barrier", threads), ("barrier_arrive", threads)] * 3,
    ]
    instructions.clear()
    for operation in (barriers.PingPong(0, 1).take, barriers.PingPong(0, 1).give):
        operation()
    assert instructions == [], "a single warpgroup has nobody to take turns with"


@pytest.mark.parametrize("cls", [c for c in KERNEL_CLASSES + MODEL_CLASSES if issubclass(c, Role)])
def test_a_role_refuses_to_change(cls):
    class Small(cls):
        def __init__(self):
            self.q = "q"
            self.more = 4

    role = Small()
    assert (role.q, role.more) == ("q", 4)
    for name in ("q", "more", "anything"):
        with pytest.raises(AttributeError, match=rf"Small\.{name}: roles do not change; carry a local instead"):
            setattr(role, name, 1)


def test_a_role_is_sealed_by_its_own_init_and_not_by_that_of_its_base():
    class Base(simulate.NumpyLoad):
        def __init__(self):
            self.q = "q"

    class Below(Base):
        def __init__(self):
            super().__init__()
            self.more = 4

    assert Below().more == 4
    with pytest.raises(AttributeError, match=r"Below\.more: roles do not change"):
        Below().more = 5


def test_the_kernel_is_imported_without_a_gpu_and_the_schedules_without_torch():
    code = "import schedules.simulate, schedules.render, sys; assert 'torch' not in sys.modules; "
    code += "import fmha.kernels.sm90.forward"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
