"""`fmha.attention_paged` against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fmha
from fmha.problem import PagedProblem, supports
from tests.checks import half_ulp, poison, same_bits
from tests.gpu.conftest import in_a_cold_process
from tests.kernels import ARCH, paged_problem_of
from tests.paged import PROBLEMS, PagedCase, Tensors, check, compare, draw, tensors

PART = 50  # of them, a test

pytestmark = pytest.mark.needs(PagedProblem("bfloat16", 128))


@pytest.mark.parametrize("start", range(0, PROBLEMS, PART))
def test_drawn_problems(start: int, record) -> None:
    """Those that are served. A failure names its seed: `tests.paged.draw(seed)` is the case."""
    failed = {}
    for seed in range(start, start + PART):
        case = draw(seed)
        if supports(paged_problem_of(case), ARCH):
            continue
        try:
            record(case, check(case, "cuda", seed))
        except AssertionError as error:
            failed[seed] = f"{case}: {error}"
    assert not failed, failed


# -- splits ------------------------------------------------------------------------------------------------------------
DECODE = PagedCase((777, 0, 65, 1300), (1,) * 4, 2, 4, 128, 16, causal=True)
SEVERAL = PagedCase((300, 129, 1), (4,) * 3, 2, 3, 64, 8, "vllm", causal=True, sinks=True)
PACKED = PagedCase((511, 0, 200), (3, 2, 1), 3, 2, 192, 32, "hnd", head_dim_v=128, packed=True, outside=(1, 2))
ALL = {"decode": DECODE, "several": SEVERAL, "packed": PACKED}
ALL = {name: case for name, case in ALL.items() if supports(paged_problem_of(case), ARCH) is None}
LSE_ROUNDING = 1e-5


def attend(case: PagedCase, given: Tensors, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return fmha.attention_paged(
        given.q, given.k_pages, given.v_pages, given.page_table, given.seq_lens, return_lse=True,
        **given.options(case) | options
    )  # fmt: skip


def test_sequences_that_overlap_too_often_are_no_work() -> None:
    """Every second one spans all rows, and has a long table: their tiles together are more than 32 bits count."""
    rows, heads, keys = 120, 32, 1 << 18
    count = 2 * 2**31 // (rows * heads // 128 * keys // 128)
    q = torch.zeros((rows, heads, 128), dtype=torch.bfloat16, device="cuda")
    pages = torch.zeros((1, 256, 1, 128), dtype=torch.bfloat16, device="cuda")
    table = torch.zeros((1, keys // 256), dtype=torch.int32, device="cuda").expand(count, -1)
    lens = torch.full((count,), keys, dtype=torch.int32, device="cuda")
    cu = torch.zeros(count + 1, dtype=torch.int32, device="cuda")
    cu[1::2] = rows
    fmha.attention_paged(q, pages, pages, table, lens, cu_seqlens_q=cu)
    torch.cuda.synchronize()
    given = tensors(DECODE, "cuda")
    assert attend(DECODE, given)[0].isfinite().all()


@pytest.mark.parametrize("name", ALL)
def test_any_number_of_splits_gives_the_same_within_rounding(name: str) -> None:
    case, given = ALL[name], tensors(ALL[name], "cuda")
    one, one_lse = attend(case, given, num_splits=1)
    for splits in (None, 2, 7, 64, 256):
        out, lse = attend(case, given, num_splits=splits)
        compare(case, given, out, lse)
        rounding = 4 * half_ulp(one.abs().max().item(), case.torch_dtype)
        torch.testing.assert_close(out.float(), one.float(), rtol=0, atol=rounding)
        torch.testing.assert_close(lse, one_lse, rtol=LSE_ROUNDING, atol=LSE_ROUNDING)


@pytest.mark.parametrize("splits", [1, 5, 64])
@pytest.mark.parametrize("name", ["decode", "several"])
def test_with_fixed_splits_a_sequence_has_the_same_bits_alone(name: str, splits: int) -> None:
    case, given = ALL[name], tensors(ALL[name], "cuda")
    together = attend(case, given, num_splits=splits)
    for b in range(len(case.tokens)):
        one = slice(b, b + 1)
        own = replace(given, q=given.q[one], page_table=given.page_table[one], seq_lens=given.seq_lens[one])
        alone = attend(case, own, num_splits=splits)
        assert all(same_bits(x[one], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("splits", [None, 3])
@pytest.mark.parametrize("name", ALL)
def test_no_key_at_all(name: str, splits: int | None) -> None:
    case = replace(ALL[name], seq_lens=(0,) * len(ALL[name].seq_lens))
    given = tensors(case, "cuda")
    compare(case, given, *attend(case, given, num_splits=splits))


# -- streams and graphs ------------------------------------------------------------------------------------------------
def renew(given: Tensors, case: PagedCase, seed: int) -> Tensors:
    """Another problem in the same memory, for a graph; of other lengths, in other pages."""
    fresh = tensors(case, "cuda", seed)
    for name in ("q", "k_pages", "v_pages", "page_table", "seq_lens", "sinks", "cu_seqlens_q"):
        if (old := getattr(given, name)) is not None:
            old.copy_(getattr(fresh, name))
    return replace(given, keys=fresh.keys, values=fresh.values)


def shorter(case: PagedCase, by: int) -> PagedCase:
    """One whose page table has the same shape: the longest sequence stays."""
    longest = max(case.seq_lens)
    return replace(case, seq_lens=tuple(n if n == longest else max(0, n - by) for n in case.seq_lens))


@pytest.mark.parametrize("splits", [None, 5])
@pytest.mark.parametrize("name", ALL)
def test_a_graph_replays_on_new_lengths_pages_and_queries(name: str, splits: int | None) -> None:
    case = ALL[name]
    given = tensors(case, "cuda")
    attend(case, given, num_splits=splits)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(case, given, num_splits=splits)
    for seed in range(1, 4):
        other = shorter(case, 37 * seed)
        given = renew(given, other, seed)
        poison(out)
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        compare(other, given, out, lse)
        assert all(same_bits(a, b) for a, b in zip((out, lse), attend(case, given, num_splits=splits), strict=True))


def test_a_graph_of_many_calls_replays_to_the_bit_on_any_stream() -> None:
    problems = [(case, tensors(case, "cuda", seed), n) for seed in range(4) for case in ALL.values() for n in (None, 7)]
    eager = [attend(case, given, num_splits=n) for case, given, n in problems]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        graph.capture_begin()
        found = [attend(case, given, num_splits=n) for case, given, n in problems]
        graph.capture_end()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream(), side):
        for out, _ in found:
            poison(out)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            graph.replay()
            attend(*problems[0][:2])  # in the same stream's own workspace
        torch.cuda.synchronize()
        for a, b in zip(found, eager, strict=True):
            assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


def test_streams_at_once_do_not_disturb_each_other() -> None:
    problems = [(case, tensors(case, "cuda", seed)) for seed in range(3) for case in ALL.values()]
    alone = [attend(*problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        together = []
        for stream, problem in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                together.append(attend(*problem))
        torch.cuda.synchronize()
        for a, b in zip(alone, together, strict=True):
            assert all(same_bits(x, y) for x, y in zip(a, b, strict=True))


COLD_CAPTURE = """
import torch, fmha
q, pages = torch.randn(2, 8, 128, device="cuda").half(), torch.randn(4, 16, 2, 128, device="cuda").half()
table, lens = torch.arange(4, device="cuda").int().view(2, 2), torch.tensor([17, 32], device="cuda").int()
given = q, pages, pages, table, lens
out = torch.full_like(q, 7.0)
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fmha.attention_paged(*given, out=out)
except RuntimeError as error:
    print("REFUSED", error)
torch.cuda.synchronize()
assert (out == 7.0).all()
fmha.warmup(fmha.PagedProblem("float16", 128))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    fmha.attention_paged(*given, out=out)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(out, fmha.attention_paged(*given)) and not (out == 7.0).any()
print("RECOVERED")
"""


def test_a_capture_that_would_compile_is_refused_and_names_warmup(tmp_path: Path) -> None:
    said = in_a_cold_process(COLD_CAPTURE, tmp_path)
    assert "REFUSED" in said and "fmha.warmup(PagedProblem" in said and "RECOVERED" in said
