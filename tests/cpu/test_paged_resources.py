"""The kernels of paged caches as machine code: no spills, no stack, and masks in loops of their own."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from fmha import problem
from fmha.jit import report
from fmha.jit.report import Report
from perf import resources
from schedules.domain import Ascending
from schedules.tiling import ROWS_PER_WARPGROUP

EVERY = problem.paged_variants(resources.ARCH)
VARIANTS = {report.name(variant, resources.ARCH): variant for variant in EVERY if variant.problem.dtype == "bfloat16"}
SOFTCAP = 2  # instructions a score: tanh and a product


@functools.cache
def measured(name: str) -> Report:
    return report.of_variant(VARIANTS[name], resources.ARCH)


def test_names_tell_variants_apart() -> None:
    assert len({report.name(variant, resources.ARCH) for variant in EVERY}) == len(EVERY) == 2 * len(VARIANTS)
    assert {"sm_90a-d128-paged-bf16", "sm_90a-d128v64-paged-bf16-softcap-vllm"} <= set(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_spills_nothing_and_masks_in_loops_of_their_own(name: str) -> None:
    config, found = VARIANTS[name].config, measured(name)
    assert (found.spills, found.stack_bytes) == (0, 0)
    # Two MMAs, 16 deep, an exponential a score, two scores a conversion, and a maximum and an addition.
    scores = config.tile_n // 2
    assert found.body_kinds["mma"] == config.head_dim // 16 + config.tile_n // 16
    assert found.body_kinds["ex2"] == scores
    assert found.body_kinds.get("convert", 0) == scores // 2
    assert scores <= found.body_kinds["max"] <= scores + 8
    assert found.body_kinds.get("select", 0) == 0
    assert not found.early_retire and len(found.body_waits) == 2
    sections = Ascending(ROWS_PER_WARPGROUP, config.tile_n).sections
    assert len(found.masked) == len(sections) - 1 == 2
    assert found.masked[0] > found.body + scores and found.masked[1] > found.masked[0] + scores


@pytest.mark.parametrize("name", VARIANTS)
def test_layouts_cost_the_body_nothing_and_a_softcap_what_it_takes(name: str) -> None:
    plain = measured(name.removesuffix("-vllm").removesuffix("-softcap"))
    scores = VARIANTS[name].config.tile_n // 2
    softcap = SOFTCAP * scores * (VARIANTS[name].problem.score == "softcap")
    assert abs(measured(name).body - softcap - plain.body) <= plain.body * (resources.GROWTH - 1)


PREFILL = {
    report.name(variant, resources.ARCH): variant
    for variant in problem.prefill_variants(resources.ARCH)
    if (variant.problem.dtype, variant.problem.mask, variant.problem.score) == ("bfloat16", "causal", "plain")
    and variant.config.value_dim in (64, 128, 256)
    and variant.config.ones
}


@pytest.mark.parametrize("name", PREFILL)
def test_long_sequences_cost_what_contiguous_keys_cost(name: str) -> None:
    """The forward kernel over pages spills nothing, in the producer neither, and its body is the one it has."""
    variant = PREFILL[name]
    found = report.of_variant(variant, resources.ARCH)
    assert (found.spills, found.stack_bytes) == (0, 0)
    contiguous = dataclasses.replace(variant.problem, paged=0, ragged=False)
    same = report.of_variant(variant._replace(problem=contiguous), resources.ARCH)
    assert abs(found.body - same.body) <= same.body * (resources.GROWTH - 1)


def test_names_of_long_sequences_tell_variants_apart() -> None:
    every = problem.prefill_variants(resources.ARCH)
    assert len({report.name(variant, resources.ARCH) for variant in every}) == len(every)
    assert {variant.problem.paged for variant in every} == {16, 64}


def test_float16_costs_the_same() -> None:
    name = "sm_90a-d128-paged-bf16"
    variant = VARIANTS[name]
    float16 = variant._replace(problem=dataclasses.replace(variant.problem, dtype="float16"))
    assert resources.objections("float16", report.of_variant(float16, resources.ARCH), measured(name)) == []
    assert (measured(name).body_kinds["mma"], measured(name).body_kinds["ex2"]) == (12, 32)
