"""The key of a kernel: every field that changes its code changes the key, and nothing else does."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

from fmha.jit import key
from fmha.problem import MASKS, AnyProblem, PagedProblem, Problem
from schedules.tiling import choose

PROBLEM = Problem("bfloat16", 128, "causal")
PAGED = PagedProblem("bfloat16", 128)
CONFIG = choose(128, "sm_90a")
RUN_TIME = {"Problem.head_dim", "Problem.head_dim_v"}  # padded by TMA to the config's when the kernel runs


def perturbed(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    assert isinstance(value, str), f"say here how to perturb a {type(value).__name__}"
    return next(mask for mask in MASKS if mask != value) if value in MASKS else value + "x"


def fields_without_effect(canonical, problem: AnyProblem = PROBLEM) -> set[str]:
    """The fields of a problem and of BlockConfig that can change without `canonical` changing."""
    base = canonical(problem, CONFIG, "sm_90a")
    silent = set()
    for owner in (problem, CONFIG):
        for field in dataclasses.fields(owner):
            changed = dataclasses.replace(owner, **{field.name: perturbed(getattr(owner, field.name))})
            pair = (changed, CONFIG) if owner is problem else (problem, changed)
            if canonical(*pair, "sm_90a") == base:
                silent.add(f"{type(owner).__name__}.{field.name}")
    return silent


def test_every_field_but_the_run_time_ones_changes_the_key():
    assert fields_without_effect(key.canonical) == RUN_TIME
    assert fields_without_effect(key.canonical, PAGED) == {f"Paged{name}" for name in RUN_TIME}


def test_a_paged_problem_is_no_other_ones_kernel():
    assert key.canonical(PAGED, CONFIG, "sm_90a") != key.canonical(PROBLEM, CONFIG, "sm_90a")
    assert key.symbol(PAGED, CONFIG, "sm_90a").startswith("fmha_decode_bfloat16_rows_d128_")


@pytest.mark.parametrize("forgotten", ["config.stages", "config.rescale_above", "problem.mask", "problem.dtype"])
def test_that_check_notices_a_forgotten_field(forgotten):
    def forgetful(*args):
        return "".join(line for line in key.canonical(*args).splitlines(True) if not line.startswith(forgotten))

    assert len(fields_without_effect(forgetful)) == len(RUN_TIME) + 1


def test_the_architecture_changes_the_key():
    assert key.canonical(PROBLEM, CONFIG, "sm_90a") != key.canonical(PROBLEM, CONFIG, "sm_100a")


def test_head_dims_that_pad_to_one_config_share_a_kernel():
    texts = {key.canonical(Problem("float16", d), choose(d, "sm_90a"), "sm_90a") for d in range(104, 129, 8)}
    assert len(texts) == 1
    assert len({key.canonical(Problem("float16", d), choose(d, "sm_90a"), "sm_90a") for d in (96, 104)}) == 2


def test_the_text_can_be_read_and_is_exact():
    @dataclasses.dataclass(frozen=True)
    class Config:
        head_dim: int = 128
        third: float = 1 / 3
        flag: bool = True
        nothing: None = None
        value_dim = 64

    assert key.canonical(Problem("float16", 72, "dense"), Config(), "sm_90a") == (  # type: ignore[arg-type]
        "arch = 'sm_90a'\n"
        "problem.dtype = 'float16'\n"
        "problem.head_dim = 128\n"
        "problem.mask = 'dense'\n"
        "problem.score = 'plain'\n"
        "problem.head_dim_v = 64\n"
        "problem.ragged = False\n"
        "problem.paged = 0\n"
        "config.head_dim = 128\n"
        "config.third = 0.3333333333333333\n"
        "config.flag = True\n"
        "config.nothing = None\n"
    )


@pytest.mark.parametrize("value", [object(), [1], (1,), {1: 2}, b"x", type])
def test_a_value_without_exact_text_is_an_error(value):
    @dataclasses.dataclass(frozen=True)
    class Config:
        odd: object
        head_dim: int = 64
        value_dim = 64

    with pytest.raises(TypeError, match="no canonical text"):
        key.canonical(PROBLEM, Config(value), "sm_90a")  # type: ignore[arg-type]


def test_names_are_the_same_in_every_process():
    script = (
        "from fmha.jit import key; from fmha.problem import Problem; from schedules.tiling import choose\n"
        "a = Problem('bfloat16', 128, 'causal'), choose(128, 'sm_90a'), 'sm_90a'\n"
        "print(key.digest(key.canonical(*a)), key.symbol(*a))"
    )
    here = f"{key.digest(key.canonical(PROBLEM, CONFIG, 'sm_90a'))} {key.symbol(PROBLEM, CONFIG, 'sm_90a')}"
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    there = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert there.stdout.strip() == here
    assert key.symbol(PROBLEM, CONFIG, "sm_90a").startswith("fmha_forward_bfloat16_causal_d128_")
