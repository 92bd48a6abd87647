"""The output and the LSE against the float64 oracle, over every case, and over sizes that only a GPU can take."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import fmha
from fmha.jit import launch
from fmha.jit.library import Pick
from fmha.problem import Problem, supports
from schedules.tiling import TiledConfig, rows
from tests.cases import CASES, DTYPES, GROWING, SHARP, Case, inputs
from tests.checks import call, check, compare, same_bits
from tests.kernels import ARCH, problem_of

planning: Any = importlib.import_module("fmha.attention")  # `fmha.attention` is its function


def each_kernel(cases: Iterable[Case]) -> pytest.MarkDecorator:
    """Every case that is served, with every block config of its head dim, whichever its lengths would get; without an
    LSE where the kernel writes none."""
    found = [
        (replace(case, return_lse=case.return_lse and row.config.serves(lse=True)), row.config)
        for case in cases
        if supports(problem_of(case), ARCH) is None
        for row in rows(case.head_dim, ARCH)
    ]
    names = [f"{case.name} {config.tile_m}x{config.tile_n}{' ones' * (not config.exact)}" for case, config in found]
    return pytest.mark.parametrize(("case", "config"), found, ids=names)


@pytest.fixture
def pin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[TiledConfig], None]]:
    """Makes `fmha.attention` use one block config."""

    def use(config: TiledConfig) -> None:
        launch.PLANS.clear()
        monkeypatch.setattr(planning, "pick", lambda problem, arch, extent: Pick(config, "pinned"))

    yield use
    launch.PLANS.clear()


@each_kernel(CASES)
def test_case(case: Case, config: TiledConfig, pin, record) -> None:
    pin(config)
    record(case, check(case, fmha.attention, "cuda"))


@each_kernel(SHARP)
def test_sharp_scores(case: Case, config: TiledConfig, pin, record) -> None:
    pin(config)
    record(case, check(case, fmha.attention, "cuda"))


@each_kernel(GROWING)
def test_growing_maxima(case: Case, config: TiledConfig, pin, record) -> None:
    pin(config)
    record(case, check(case, fmha.attention, "cuda"))


def test_the_lengths_of_a_call_choose_its_kernel(record) -> None:
    """The same head dim, unpinned, in turn long and short, and with and without LSEs."""
    for head_dim in (d for d in (64, 128, 256) if supports(Problem("bfloat16", d), ARCH) is None):
        for i, (batch, seqlen) in enumerate(((64, 256), (32, 513), (8, 2048), (64, 256), (32, 513))):
            case = Case(batch, seqlen, seqlen, 4, 4, head_dim, out="given", return_lse=i % 2 == 1)
            record(case, check(case, fmha.attention, "cuda"))


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("exponent", [-25, 25])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_small_and_large_values_keep_their_precision(head_dim: int, exponent: int, lse: bool, record) -> None:
    """In bfloat16: weights must not push the products with V out of float32's normal numbers."""
    case = Case(2, 300, 700, 4, 2, head_dim, causal=True, out="given", return_lse=lse)
    q, k, v = inputs(case, "cuda")
    qkv = q, k, v * 10.0**exponent
    record(case, compare(case, qkv, *call(case, fmha.attention, qkv)))


def some_rows(seqlen_q: int, count: int = 160) -> torch.Tensor:
    """The first and last rows, and others at random."""
    edges = torch.cat([torch.arange(min(16, seqlen_q)), torch.arange(max(0, seqlen_q - 16), seqlen_q)])
    others = torch.randint(seqlen_q, (count,), generator=torch.Generator().manual_seed(seqlen_q))
    return torch.unique(torch.cat([edges, others])).cuda()


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seqlen", [147_456, 147_600])
def test_video_lengths(seqlen: int, causal: bool, lse: bool, record) -> None:
    """Video diffusion: 147,600 tokens end 16 keys past a tile."""
    case = Case(1, seqlen, seqlen, 2, 2, 128, causal=causal, out="given", return_lse=lse)
    qkv = inputs(case, "cuda")
    out, lse = call(case, fmha.attention, qkv)
    record(case, compare(case, qkv, out, lse, rows=some_rows(seqlen)))


@each_kernel(
    Case(4, 2049, 4111, 16, 4, head_dim, causal=causal, out="given")
    for head_dim in (64, 96, 128, 192, 256)
    for causal in (False, True)
)
def test_full_gpu_is_right_and_repeatable_to_the_bit(case: Case, config: TiledConfig, pin, record) -> None:
    """Thousands of work tiles in flight: where a missing wait would show as an error that moves."""
    pin(config)
    qkv = inputs(case, "cuda")
    out, lse = call(case, fmha.attention, qkv)
    record(case, compare(case, qkv, out, lse, rows=some_rows(case.seqlen_q)))
    for _ in range(10):
        again, lse_again = call(case, fmha.attention, qkv)
        assert same_bits(out, again) and (lse is None or same_bits(lse, lse_again))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(("batch", "heads"), [(4096, 32), (1, 8192), (70_000, 1)])
def test_many_heads_and_batches(batch: int, heads: int, lse: bool, causal: bool, record) -> None:
    """More than 65,535 of them, the limit of a grid's second and third mode."""
    case = Case(batch, 16, 24, heads, heads, 64, causal=causal, out="given", return_lse=lse)
    record(case, check(case, fmha.attention, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_kernel_serves_many_shapes_in_turn(dtype: str, record) -> None:
    """Batch, lengths and heads are run-time arguments: no call may remember those of the last."""
    base = Case(1, 1, 1, 1, 1, 128, dtype)
    sizes = [(3, 700, 20, 2, 1), (1, 1, 900, 8, 8), (2, 129, 129, 4, 2), (1, 1, 1, 1, 1), (3, 700, 20, 2, 1)]
    for i, (batch, seqlen_q, seqlen_k, heads_q, heads_kv) in enumerate(sizes * 4):
        case = replace(
            base, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q, heads_kv=heads_kv, out="given"
        )
        case = replace(case, return_lse=i % 2 == 0)
        record(case, check(case, fmha.attention, "cuda", seed=1))


def test_each_draw_of_numbers_is_right(record) -> None:
    case = Case(2, 333, 777, 4, 2, 128, causal=True, out="given")
    for seed in range(20):
        case = replace(case, return_lse=seed % 2 == 0)
        record(case, check(case, fmha.attention, "cuda", seed))
