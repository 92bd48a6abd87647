"""Model and kernel cannot drift apart: both subclass the same role programs, and neither may change one."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import subprocess
import sys

import pytest

import fmha.kernels
from schedules import forward, simulate
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
MODEL_CLASSES = lowered(simulate)


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


def test_the_programs_are_the_ones_meant():
    assert programs(Load) == {"run"}
    assert programs(Attend) == {"run", "first", "step", "softmax", "last"}
    assert programs(Ring) == {"first", "next"}


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

    class OtherRing(simulate.NumpyRing):
        def next(self, slot):
            return slot

    assert overridden(Between) == overridden(Below) == {"step"}
    assert overridden(OtherRing) == {"next"}


def test_a_role_refuses_to_change():
    load = next(cls for cls in KERNEL_CLASSES if issubclass(cls, Load))("q", "k", "v")
    assert (load.q, load.k, load.v) == ("q", "k", "v")
    for name in ("q", "anything"):
        with pytest.raises(AttributeError, match=rf"\.{name}: roles do not change; carry a local instead"):
            setattr(load, name, 1)


def test_a_subclass_of_a_role_seals_after_its_own_init():
    class More(simulate.NumpyLoad):
        def __init__(self):
            super().__init__(1, 2, 3)
            self.more = 4

    role = More()
    assert role.more == 4
    with pytest.raises(AttributeError, match="More.more: roles do not change"):
        role.more = 5


def test_the_kernel_is_imported_without_a_gpu_and_the_schedules_without_torch():
    code = "import schedules.simulate, schedules.render, sys; assert 'torch' not in sys.modules; "
    code += "import fmha.kernels.sm90.forward"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
