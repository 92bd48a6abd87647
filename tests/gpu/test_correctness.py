"""The output and the LSE against the float64 oracle, over every case, and over sizes that only a GPU can take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fmha
from tests.cases import CASES, DTYPES, GROWING, SHARP, Case, inputs
from tests.checks import call, check, compare, same_bits


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, record) -> None:
    record(case, check(case, fmha.attention, "cuda"))


@pytest.mark.parametrize("case", SHARP, ids=lambda case: case.name)
def test_sharp_scores(case: Case, record) -> None:
    record(case, check(case, fmha.attention, "cuda"))


@pytest.mark.parametrize("case", GROWING, ids=lambda case: case.name)
def test_growing_maxima(case: Case, record) -> None:
    record(case, check(case, fmha.attention, "cuda"))


def some_rows(seqlen_q: int, count: int = 160) -> torch.Tensor:
    """The first and last rows, and others at random."""
    edges = torch.cat([torch.arange(min(16, seqlen_q)), torch.arange(max(0, seqlen_q - 16), seqlen_q)])
    others = torch.randint(seqlen_q, (count,), generator=torch.Generator().manual_seed(seqlen_q))
    return torch.unique(torch.cat([edges, others])).cuda()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [147_456, 147_600])
def test_video_lengths(seqlen: int, causal: bool, record) -> None:
    """Video diffusion: 147,600 tokens end 16 keys past a tile."""
    case = Case(1, seqlen, seqlen, 2, 2, 128, causal=causal, out="given")
    qkv = inputs(case, "cuda")
    out, lse = call(case, fmha.attention, qkv)
    record(case, compare(case, qkv, out, lse, rows=some_rows(seqlen)))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_full_gpu_is_right_and_repeatable_to_the_bit(head_dim: int, causal: bool, record) -> None:
    """Thousands of work tiles in flight: where a missing wait would show as an error that moves."""
    case = Case(4, 2049, 4111, 16, 4, head_dim, causal=causal, out="given")
    qkv = inputs(case, "cuda")
    out, lse = call(case, fmha.attention, qkv)
    record(case, compare(case, qkv, out, lse, rows=some_rows(case.seqlen_q)))
    for _ in range(10):
        again, lse_again = call(case, fmha.attention, qkv)
        assert same_bits(out, again) and same_bits(lse, lse_again)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(4096, 32), (1, 8192), (70_000, 1)])
def test_many_heads_and_batches(batch: int, heads: int, causal: bool, record) -> None:
    """More than 65,535 of them, the limit of a grid's second and third mode."""
    case = Case(batch, 16, 24, heads, heads, 64, causal=causal, out="given")
    record(case, check(case, fmha.attention, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_kernel_serves_many_shapes_in_turn(dtype: str, record) -> None:
    """Batch, lengths and heads are run-time arguments: no call may remember those of the last."""
    base = Case(1, 1, 1, 1, 1, 128, dtype)
    sizes = [(3, 700, 20, 2, 1), (1, 1, 900, 8, 8), (2, 129, 129, 4, 2), (1, 1, 1, 1, 1), (3, 700, 20, 2, 1)]
    for batch, seqlen_q, seqlen_k, heads_q, heads_kv in sizes * 2:
        case = replace(
            base, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q, heads_kv=heads_kv, out="given"
        )
        record(case, check(case, fmha.attention, "cuda", seed=1))


def test_each_draw_of_numbers_is_right(record) -> None:
    case = Case(2, 333, 777, 4, 2, 128, causal=True, out="given")
    for seed in range(20):
        record(case, check(case, fmha.attention, "cuda", seed))
