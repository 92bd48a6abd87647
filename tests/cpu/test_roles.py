"""Model and kernel cannot drift apart: both subclass the same role programs, and neither may change one."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
from dataclasses import replace

import cutlass
import pytest

import fmha.kernels
from fmha.kernels.common.rings import TmaRing
from fmha.kernels.sm90 import barriers
from fmha.kernels.sm90.forward import ForwardKernel
from schedules import forward_tmem, rings, simulate, simulate_decode, simulate_tmem
from schedules.decode import Decode, Fetch, PagedRing
from schedules.domain import Bounds, Dense
from schedules.forward import Attend, JointLoad, Load, Ring, Role, Slot, Turn
from schedules.machine import Machine
from schedules.scores import SCORES
from schedules.splits import Splitter
from schedules.tiling import WARPGROUP, BlockConfig
from tests.cpu.simulation import Problem

TMEM_ROLES = (forward_tmem.Multiply, forward_tmem.Softmax, forward_tmem.Correct, forward_tmem.Store)
SCHEDULES = (Load, Attend, Ring, Turn, Role, Fetch, Decode, PagedRing, Splitter, forward_tmem.Signal, *TMEM_ROLES)
ROLES = (Load, JointLoad, Attend, Fetch, Decode, *TMEM_ROLES)
NO_PROGRAMS = {"load"}  # `PagedRing` has none
WRITTEN_IN = {schedule.__module__ for schedule in SCHEDULES}


def kernel_modules():
    names = [module.name for module in pkgutil.walk_packages(fmha.kernels.__path__, "fmha.kernels.")]
    return [importlib.import_module(name) for name in names]


def lowered(module):
    """The classes that `module` defines below one of the schedules', but for what several roles have in common."""
    return [
        cls
        for cls in vars(module).values()
        if inspect.isclass(cls)
        and issubclass(cls, SCHEDULES)
        and cls.__module__ == module.__name__
        and "run" not in getattr(cls, "__abstractmethods__", ())
    ]


KERNEL_CLASSES = [cls for module in kernel_modules() for cls in lowered(module)]
MODEL_CLASSES = [cls for module in (rings, simulate, simulate_decode, simulate_tmem) for cls in lowered(module)]


def programs(schedule: type) -> set[str]:
    """The methods that `schedule` writes down, as against the operations it leaves open."""
    methods = {name for name, value in vars(schedule).items() if inspect.isfunction(value)}
    return {name for name in methods if not name.startswith("__")} - schedule.__abstractmethods__


def overridden(cls: type) -> set[str]:
    """The programs of the schedules that are not what is called of `cls`, because it, or a class between, defines them
    anew."""
    schedules = [base for base in cls.__mro__ if base.__module__ in WRITTEN_IN]
    written = set().union(*map(programs, schedules))
    owners = {name: next(base for base in cls.__mro__ if name in vars(base)) for name in written}
    return {name for name, owner in owners.items() if owner.__module__ not in WRITTEN_IN and name not in NO_PROGRAMS}


def test_programs_are_told_from_operations():
    assert "run" in programs(Load) and "run" in programs(Attend) and programs(Ring) == {"first", "next", "ahead"}
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
        def step(self, section, work, visits, position, q_slot, before):
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
    """What the kernel's rings and turns ask of the hardware: (instruction, barrier, argument). "elected" is an arrival
    by one lane of each warp."""
    calls: list[tuple] = []
    elected: list[bool] = []

    @contextlib.contextmanager
    def elect_one():
        elected.append(True)
        yield
        elected.pop()

    def record(name: str):
        def call(*arguments, barrier_id=None, number_of_threads=None):
            if name == "mbarrier_arrive" and elected:
                calls.append(("elected", *arguments))
            else:
                calls.append((name, *arguments) if barrier_id is None else (name, barrier_id, number_of_threads))

        monkeypatch.setattr(barriers.cute.arch, name, call)

    for name in ("mbarrier_init", "mbarrier_wait", "mbarrier_arrive", "mbarrier_arrive_and_expect_tx"):
        record(name)
    record("barrier")
    record("barrier_arrive")
    monkeypatch.setattr(barriers.cute.arch, "elect_one", elect_one)
    return calls


CONFIG = replace(simulate.SMALL, stages=3, consumers=3)
FIRST = 100  # the first barrier


def kernel_rings(config: BlockConfig) -> list[TmaRing]:
    """Q of each warpgroup, K, V, and once more Q, as the last warpgroup has it."""
    kernel = ForwardKernel(cutlass.BFloat16, "dense", "plain", False, config)
    (*q, last), k, v = kernel._rings(FIRST, None, [None] * 4, index=config.consumers - 1, heads_per_kv_head=1)
    return [*q, k, v, last]


def model_rings(config: BlockConfig) -> list[rings.NumpyRing]:
    tensors = simulate.Tensors(*Problem(20, 10).inputs(), scale=None)
    domain, bounds = Dense(config.tile_m, config.tile_n), Bounds(20, 10)
    cta = simulate.Cta(tensors, domain, bounds, SCORES["plain"], config, Machine("lazy"), iter(()))
    return [*cta.q, cta.k, cta.v, cta.q[-1]]


@pytest.mark.parametrize("q_stages", (1, 2))
def test_the_barriers_of_kernel_and_model_count_alike(instructions, q_stages):
    """The kernel initialises each of its barriers once, with the arrivals that the model waits for."""
    config = replace(CONFIG, q_stages=q_stages)
    expected = []
    for kernel, model in zip(kernel_rings(config)[:-1], model_rings(config)[:-1], strict=True):
        kernel.init()
        assert (kernel.stages, kernel.stage_bytes) == (model.stages, model.counts.slot_bytes)
        assert model.counts.empty_arrivals == len(model.consumers) * model.counts.release_arrivals
        expected += [barrier.count for slot in model.slots for barrier in (slot.full, slot.empty)]
        expected += [left.count for left in getattr(model, "left", ())]
    assert [count for _, _, count in instructions] == expected
    assert sorted(barrier for _, barrier, _ in instructions) == [*range(FIRST, FIRST + config.barriers)]


@pytest.mark.parametrize(("ring", "first"), [(1, 104), (2, 108), (3, 112), (4, 118), (-1, 108)])
def test_the_rings_of_kernel_and_model_are_alike(instructions, ring, first):
    """Full barriers come before empty ones, whose first wait passes at once, and as many lanes arrive."""
    kernel, model = kernel_rings(CONFIG)[ring], model_rings(CONFIG)[ring]
    for operation in (kernel.acquire, kernel.commit, kernel.wait, kernel.release):
        operation(Slot(stage=1, parity=1))
    full, empty = first + 1, first + kernel.stages + 1
    lanes = {"elected": 1, "mbarrier_arrive": 32}[instructions[-1][0]]
    assert WARPGROUP // 32 * lanes == model.counts.release_arrivals
    assert instructions == [
        ("mbarrier_wait", empty, 0),
        ("mbarrier_arrive_and_expect_tx", full, model.counts.slot_bytes),
        ("mbarrier_wait", full, 1),
        (instructions[-1][0], empty),
    ]


def test_the_loans_of_kernel_and_model_are_alike(instructions):
    """O is waited for and announced beside the slots of V, for each warpgroup, by a lane of each of its warps."""
    kernel, model = kernel_rings(CONFIG)[4], model_rings(CONFIG)[4]
    slot = Slot(stage=1, parity=1)
    kernel.borrow(slot)
    kernel.give_back(slot, 2)
    kernel.reclaim(2, 1)
    kernel.reclaim(0, 0)
    empty, left = 118 + 3 + 1, 118 + 2 * 3
    assert instructions == [
        ("mbarrier_wait", empty, 0),
        ("elected", left + 2),
        ("mbarrier_wait", left + 2, 0),
        ("mbarrier_wait", left, 1),
    ]
    assert [barrier.count for barrier in model.left] == [WARPGROUP // 32] * 3


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
