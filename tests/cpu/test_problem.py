"""What is supported, and that everything which says so says the same."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

import fmha
from fmha.jit import compile
from fmha.problem import (
    ARCHITECTURES,
    DTYPES,
    MASKS,
    PAGED_LAYOUTS,
    PIECES,
    UNRUN,
    PagedProblem,
    Problem,
    Unsupported,
    WriteProblem,
    every_variant,
    paged_variants,
    prefill_variants,
    supports,
    variants,
)
from schedules.domain import DOMAINS
from schedules.tiling import CHIPS, PAGED_TABLES, TABLES, rows

WIDEST = {"sm_90a": 256, "sm_100a": 128, "sm_103a": 128}


def test_the_lists_are_those_of_the_schedules():
    assert set(MASKS) == set(DOMAINS)
    assert set(ARCHITECTURES) == set(TABLES) == set(CHIPS)
    assert set(PAGED_TABLES) <= set(TABLES) and UNRUN < set(ARCHITECTURES)
    assert set(ARCHITECTURES) == set(compile.FOLDERS) == set(WIDEST)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_head_dim_up_to_the_widest_is_supported_in_steps_of_8(arch):
    every = range(-8, 300)
    dims = set(range(8, WIDEST[arch] + 1, 8))
    assert {d for d in every if supports(Problem("bfloat16", d), arch) is None} == dims
    assert {d for d in every if supports(Problem("bfloat16", 64, head_dim_v=d or 1), arch) is None} == dims


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_supported_problem_has_a_block_config_that_fits_the_chip(arch):
    for dtype in DTYPES:
        for mask in MASKS:
            for head_dim in range(8, WIDEST[arch] + 1, 8):
                problem = Problem(dtype, head_dim, mask)
                assert supports(problem, arch) is None
                for row in rows(head_dim, arch):
                    assert row.config.head_dim >= head_dim
                    assert row.config.check(CHIPS[arch]) is None


@pytest.mark.parametrize(
    ("problem", "arch", "given", "allowed"),
    [
        (Problem("float32", 64), "sm_90a", "dtype float32", "bfloat16 or float16"),
        (Problem("bfloat16", 12), "sm_90a", "head_dim 12", "multiples of 8 up to 256"),
        (Problem("bfloat16", 264), "sm_90a", "head_dim 264", "multiples of 8 up to 256"),
        (Problem("bfloat16", 0), "sm_90a", "head_dim 0", "multiples of 8 up to 256"),
        (Problem("bfloat16", 64, "banded"), "sm_90a", "mask 'banded'", "'dense' or 'causal' or 'window'"),
        (PagedProblem("float32", 64), "sm_90a", "dtype float32", "bfloat16 or float16"),
        (PagedProblem("bfloat16", 64, head_dim_v=260), "sm_90a", "head_dim_v 260", "multiples of 8 up to 256"),
        (PagedProblem("bfloat16", 64, "alibi"), "sm_90a", "score 'alibi'", "'plain' or 'softcap'"),
        (PagedProblem("bfloat16", 64, layout="nhd"), "sm_90a", "layout 'nhd'", "'rows' or 'vllm'"),
        (Problem("bfloat16", 64), "sm_80", "architecture sm_80", "sm_90a (Hopper)"),
        (Problem("bfloat16", 64), "cpu", "architecture cpu", "sm_90a (Hopper)"),
        (Problem("bfloat16", 64), "sm_100", "architecture sm_100", "sm_100a (Blackwell) or sm_103a (Blackwell)"),
        (Problem("bfloat16", 136), "sm_100a", "head_dim 136", "multiples of 8 up to 128"),
        (Problem("bfloat16", 64, head_dim_v=192), "sm_103a", "head_dim_v 192", "multiples of 8 up to 128"),
        (Problem("bfloat16", 64, ragged=True, paged=16), "sm_100a", "paged 16", "0 only"),
        (Problem("bfloat16", 64, ragged=True, paged=32), "sm_90a", "paged 32", "0 or 16 or 64 only"),
        (PagedProblem("bfloat16", 64), "sm_100a", "attention over pages on sm_100a", "sm_90a (Hopper) only"),
        (WriteProblem("nhd"), "sm_100a", "layout 'nhd'", "'rows' or 'vllm'"),
    ],
)
def test_a_reason_names_what_was_given_and_what_is_allowed(problem, arch, given, allowed):
    reason = supports(problem, arch)
    assert reason is not None
    assert reason.startswith(given + ":")
    assert allowed in reason


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_variants_are_all_the_kernels_and_each_once(arch):
    kernels = [(problem.dtype, problem.mask, config) for problem, config in variants(arch)]
    assert len(kernels) == len(set(kernels))
    dims = range(8, WIDEST[arch] + 1, 8)
    reachable = {
        (t, m, row.config)
        for t, m, d, dv in itertools.product(DTYPES, MASKS, dims, (0, *dims))
        for row in rows(d, arch, dv)
    }
    assert set(kernels) == reachable


def test_every_paged_problem_has_one_of_the_paged_kernels():
    kernels = paged_variants("sm_90a")
    assert len(kernels) == len(set(kernels))
    dims = range(8, 257, 8)
    every = (PagedProblem("bfloat16", d, "plain", dv) for d in dims for dv in dims)
    assert all(supports(problem, "sm_90a") is None for problem in every)
    reachable = {rows(d, "sm_90a", dv, paged=True)[0].config for d in dims for dv in (0, *dims)}
    assert {config for _, config in kernels} == reachable
    assert all(config.check(CHIPS["sm_90a"]) is None for config in reachable)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_variant_is_supported(arch):
    every = *every_variant(arch), *paged_variants(arch), *prefill_variants(arch)
    assert [variant for variant in every if supports(variant.problem, arch)] == []
    assert all(config.holds(problem.score) for problem, config in every)
    assert bool(paged_variants(arch)) == (arch in PAGED_TABLES)
    pieces = {piece for piece in PIECES if supports(Problem("bfloat16", 64, ragged=True, paged=piece), arch) is None}
    assert {variant.problem.paged for variant in prefill_variants(arch)} == pieces
    assert all(supports(WriteProblem(layout), arch) is None for layout in PAGED_LAYOUTS)


def test_paged_kernels_have_head_dims_of_their_own(monkeypatch):
    """A table is all it takes, and it may be wider or narrower than that of the forward kernels."""
    monkeypatch.setitem(PAGED_TABLES, "sm_100a", PAGED_TABLES["sm_90a"])
    assert supports(PagedProblem("bfloat16", 256), "sm_100a") is None
    assert len(paged_variants("sm_100a")) == len(paged_variants("sm_90a"))
    monkeypatch.setitem(PAGED_TABLES, "sm_90a", PAGED_TABLES["sm_90a"][:1])
    assert "multiples of 8 up to 64 only" in str(supports(PagedProblem("bfloat16", 128), "sm_90a"))
    assert supports(Problem("bfloat16", 128), "sm_90a") is None


def test_problems_are_values():
    assert Problem("float16", 64) == Problem("float16", 64, "dense")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Problem("float16", 64).head_dim = 8  # type: ignore[misc]


def test_unsupported_is_not_mistaken_for_a_malformed_call():
    assert issubclass(Unsupported, NotImplementedError)
    assert not issubclass(Unsupported, ValueError)
    assert fmha.Unsupported is Unsupported
