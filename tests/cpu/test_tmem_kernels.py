"""What can be seen of the kernels for Blackwell without one: that they compile, what they use, and that it fits."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from fmha.jit import compile, sass
from fmha.problem import PagedProblem, Problem
from perf import peers_blackwell
from schedules.tiling import CHIPS, PAGED_SM100, SM100, TmemConfig, TmemPagedConfig
from tests.cpu.simulation import tmem

CONFIGS, PAGED = ([row.config for row in table] for table in (SM100, PAGED_SM100))
ARCHITECTURES = [name for name, chip in CHIPS.items() if chip.tmem_columns]
FLASH_ATTENTION_4 = peers_blackwell.load()["fa4-d128-causal"].body  # with as many exponentials for MUFU
WHOLE = 128  # exponentials of a row, and one by which the row shrinks


def resources(problem: Problem | PagedProblem, config: TmemConfig | TmemPagedConfig, arch: str) -> sass.Resources:
    return sass.read(compile.cubin(compile.compile_object(problem, config, arch)))


def some() -> list[tuple[Problem, TmemConfig, str]]:
    """Each config with each mask, on one chip or the other; each score, and ragged batches, with one or two of them."""
    found = []
    for i, (config, mask) in enumerate(itertools.product(CONFIGS, ("dense", "causal", "window"))):
        dtype = ("bfloat16", "float16")[i % 2]
        found.append((Problem(dtype, config.head_dim, mask, ragged=i % 3 == 0), config, ARCHITECTURES[i % 2]))
    widest = CONFIGS[-1]
    for score, mask in (("softcap", "causal"), ("alibi", "dense"), ("both", "window")):
        found.append((Problem("bfloat16", 128, mask, score, ragged=score == "both"), widest, "sm_100a"))
    return found


@pytest.mark.parametrize("problem, config, arch", some())
def test_nothing_is_spilled_and_registers_are_those_of_the_config(problem, config, arch):
    found = resources(problem, config, arch)
    assert (found.local_loads, found.local_stores, found.stack_bytes) == (0, 0, 0)
    registers = config.other_registers, config.correct_registers, config.softmax_registers
    assert sorted(found.setmaxnreg) == list(registers)
    assert found.registers == 64 * 1024 // config.threads, "the launch's"
    body = found.body
    assert body.kinds["ex2"] == WHOLE - config.polynomials + 1 and body.columns == config.tile_n
    assert body.kinds["select"] <= 1, "no mask"
    if problem.score == "plain":
        assert body.common < FLASH_ATTENTION_4.instructions
    sections = {"dense": 1, "causal": 1, "window": 2}[problem.mask]
    assert len(found.masked) == sections and all(loop.kinds["ex2"] == WHOLE + 1 for loop in found.masked)
    mmas = [loop for loop in found.loops if loop.all_kinds["mma"] and loop.innermost]
    steps = 2 * (config.head_dim // 16 + config.tile_n // 16)
    assert [loop.all_kinds["mma"] for loop in mmas] == [steps]


def some_paged() -> list[tuple[PagedProblem, TmemPagedConfig, str]]:
    """Each config, with each dtype, score and layout one time or another."""
    kinds = [("bfloat16", "plain", "rows"), ("float16", "softcap", "vllm"), ("bfloat16", "softcap", "rows")]
    found = []
    for i, config in enumerate(PAGED):
        dtype, score, layout = kinds[i % len(kinds)]
        problem = PagedProblem(dtype, config.head_dim, score, config.head_dim_v, layout)
        found.append((problem, config, ARCHITECTURES[i % 2]))
    return found


@pytest.mark.parametrize("problem, config, arch", some_paged())
def test_decoding_spills_nothing_either(problem, config, arch):
    found = resources(problem, config, arch)
    assert (found.local_loads, found.local_stores, found.stack_bytes) == (0, 0, 0)
    assert found.setmaxnreg == tuple(sorted(config.registers))
    assert found.registers == 64 * 1024 // config.threads // 8 * 8, "the launch's"
    body = found.body
    assert body.kinds["ex2"] == config.tile_n + 1 and body.columns == config.tile_n
    assert body.kinds["select"] <= 1, "no mask"
    assert len(found.masked) == 2 and all(loop.kinds["ex2"] == config.tile_n + 1 for loop in found.masked)
    mmas = [loop for loop in found.loops if loop.all_kinds["mma"] and loop.innermost]
    assert [loop.all_kinds["mma"] for loop in mmas] == [config.head_dim // 16 + config.tile_n // 16]


@pytest.mark.parametrize("config", PAGED, ids=lambda config: f"{config.head_dim}-{config.value_dim}")
def test_configs_of_decoding_fit(config):
    in_flight = sum(config.stages * size for _, size in config.tiles[1:])
    assert 144 * 1024 <= in_flight <= 168 * 1024, "what the table says"


def test_what_does_not_fit_of_decoding_is_refused_with_its_reason():
    chip, config = CHIPS["sm_100a"], PAGED[2]
    for change, reason in (
        ({"head_dim": 100}, "multiple of 32"),
        ({"head_dim_v": 512}, "from 32 to 256"),
        ({"tile_m": 64}, "a row a thread"),
        ({"tile_n": 48}, "32, 64, 96 or 128"),
        ({"stages": 0}, "each ring needs 1"),
        ({"stages": 6}, "bytes of shared memory"),
        ({"rescale_above": 9.0}, "rescale_above"),
        ({"fetch_registers": 208}, "setmaxnreg wants 512 registers over the warpgroups"),
        ({"other_registers": 20}, "setmaxnreg 20"),
    ):
        assert reason in str(replace(config, **change).check(chip)), change
    few = replace(chip, tmem_columns=128)
    assert "256 columns of tensor memory, sm_100a has 128" in str(config.check(few))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.head_dim)
def test_configs_fit(config):
    deeper = replace(config, stages=config.stages + 1)
    assert "shared memory" in str(deeper.check(CHIPS["sm_100a"])), "as many stages as fit"


def test_what_does_not_fit_is_refused_with_its_reason():
    chip, config = CHIPS["sm_100a"], CONFIGS[-1]
    for change, reason in (
        ({"head_dim": 256, "stages": 1}, "768 columns of tensor memory, sm_100a has 512"),
        ({"stages": 3}, "bytes of shared memory"),
        ({"head_dim": 100}, "multiple of 32"),
        ({"softmax_registers": 208}, "setmaxnreg wants 528 registers over the warpgroups"),
        ({"correct_registers": 70}, "setmaxnreg 70"),
        ({"polynomials": 3}, "in pairs"),
        ({"polynomials": 130}, "0 to 128"),
        ({"q_stages": 0}, "each ring needs 1"),
        ({"tile_n": 64}, "a row a thread"),
        ({"rescale_above": float("nan")}, "rescale_above"),
    ):
        assert reason in str(replace(config, **change).check(chip)), change
    assert tmem().check(chip) is not None, "small ones are for the simulator"


# -- the polynomial for some of the exponentials -----------------------------------------------------------------------


def powers_of_2(x: np.ndarray) -> np.ndarray:
    """As `fmha.kernels.sm100.softmax.powers_of_2` computes them, step by step in float32."""
    from fmha.kernels.sm100.softmax import LEAST, POLYNOMIAL, ROUND

    x = np.maximum(x.astype(np.float32), np.float32(LEAST))
    exact = x.astype(np.float64) + ROUND
    rounded = np.floor(exact).astype(np.float32)  # at this size float32 has the integers, and rm rounds down
    fraction = x - (rounded - np.float32(ROUND))
    found = np.full_like(x, POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        product = found.astype(np.float64) * fraction.astype(np.float64) + coefficient  # fused: rounded once
        found = product.astype(np.float32)
    return (found.view(np.int32) + (rounded.view(np.int32) << np.int32(23))).view(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded to nearest even, as float64."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def test_the_polynomial_is_within_a_unit_in_the_last_place_of_bfloat16():
    x = np.concatenate([np.linspace(-126, 8, 2_000_001), -np.geomspace(1e-7, 126, 200_001), np.arange(-126.0, 9)])
    x = x.astype(np.float32)
    exact = np.exp2(x.astype(np.float64))
    unit = np.exp2(np.floor(np.log2(exact)) - 7)
    error = abs(to_bfloat16(powers_of_2(x)) - exact) / unit
    best = abs(to_bfloat16(exact.astype(np.float32)) - exact) / unit
    assert error.max() <= 1 and error.max() < 1.05 * best.max() < 0.6
    assert abs(powers_of_2(x) / exact - 1).max() < 2.0**-13.4


def test_the_polynomial_is_exact_for_integers_and_0_for_what_no_query_sees():
    whole = np.arange(-126, 9)
    assert (powers_of_2(whole.astype(np.float32)) == np.exp2(whole.astype(np.float64))).all()
    gone = powers_of_2(np.array([-np.inf, -127, -1000, -1e30], np.float32))
    assert (abs(gone) < 2.0**-126).all(), "0, or subnormal numbers, which are flushed"
