"""Which kernels a call of `fmha.attention_paged` with long sequences of queries gets, and what they are told."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import fmha
from fmha.jit.arguments import PAGED_SIZES, SIZES
from fmha.prefill import LEAST_PAGE, LEAST_ROWS
from fmha.problem import PagedProblem, Problem
from tests.cpu.stand_in import pass_for_gpu

HEADS, KV_HEADS, DIM = 4, 2, 64


class Launches:
    """In the place of the library: what was launched, as (problem, arguments), one after the other."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, tuple[Any, ...]]] = []
        self.configs: list[tuple[Problem, Any]] = []  # of the forward kernels that were fetched

    def fetch(self, problem: Any, config: Any, arch: str) -> Any:
        if isinstance(problem, Problem):
            self.configs.append((problem, config))
        return lambda *arguments: self.seen.append((problem, arguments))

    def one(self, kind: type) -> tuple[Any, tuple[Any, ...], dict[str, int]]:
        """The only launch of a problem of this kind, and its numbers."""
        [(problem, arguments)] = [found for found in self.seen if isinstance(found[0], kind)]
        names = SIZES if kind is Problem else PAGED_SIZES
        array = (ctypes.c_int64 * len(names)).from_address(arguments[0])
        return problem, arguments, dict(zip(names, array, strict=True))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    pass_for_gpu(monkeypatch, found.fetch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **given: real(*shape, **given))
    return found


def call(
    tokens: int,
    page: int = 16,
    *,
    packed: bool = False,
    layout: str = "nhd",
    sequences: int = 2,
    most: int = 3,
    pages: int = 6,
    **options: Any,
):
    """Of sequences with `tokens` queries each, or all of them together, and `most` pages at most."""
    shape = (tokens, HEADS, DIM) if packed else (sequences, tokens, HEADS, DIM)
    q = torch.zeros(shape, dtype=torch.bfloat16)
    k, v = (torch.zeros(pages, page, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in range(2))
    if layout == "hnd":
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    elif layout == "vllm":
        k, v = k.unflatten(3, (-1, 8)).permute(0, 2, 3, 1, 4).contiguous(), v.permute(0, 2, 3, 1).contiguous()
    table = torch.zeros(sequences, most, dtype=torch.int32)
    lengths = torch.zeros(sequences, dtype=torch.int32)
    if packed:
        options["cu_seqlens_q"] = torch.zeros(sequences + 1, dtype=torch.int32)
    fmha.attention_paged(q, k, v, table, lengths, layout=layout, causal=True, **options)
    return q, k, v, table, lengths


def kinds(launches: Launches) -> set[type]:
    return {type(problem) for problem, _ in launches.seen}


def test_short_sequences_are_decoded(launches: Launches) -> None:
    call(LEAST_ROWS - 1)
    call(LEAST_ROWS - 1, packed=True)
    assert kinds(launches) == {PagedProblem}
    assert launches.seen[0][1][0] and len(launches.seen) == 2


def test_long_ones_get_the_forward_kernel(launches: Launches) -> None:
    q, k, v, table, lengths = call(LEAST_ROWS, page=32)
    assert kinds(launches) == {Problem}
    problem, arguments, numbers = launches.one(Problem)
    assert (problem.paged, problem.ragged, problem.mask) == (16, True, "causal")
    _, *addresses = arguments[:5]
    assert addresses[:3] == [q.data_ptr(), k.data_ptr(), v.data_ptr()]
    assert arguments[-4:] == (0, table.data_ptr(), 0, lengths.data_ptr())
    told = {name: numbers[name] for name in ("pages", "page", "page shift", "table row", "least rows", "seqlen_k")}
    assert told == {"pages": 6, "page": 32, "page shift": 5, "table row": 3, "least rows": 0, "seqlen_k": 96}


@pytest.mark.parametrize(("page", "piece"), [(16, 16), (32, 16), (64, 64), (256, 64)])
def test_pieces_are_as_long_as_pages_allow(launches: Launches, page: int, piece: int) -> None:
    call(LEAST_ROWS, page=page)
    problem, _, _ = launches.one(Problem)
    assert problem.paged == piece


@pytest.mark.parametrize("window", [(None, None), (20, None), (90, 3)])
def test_with_fixed_splits_the_kernel_does_not_depend_on_the_batch(launches: Launches, window: Any) -> None:
    for sequences, tokens, most in ((1, LEAST_ROWS, 3), (40, 200, 3), (2, 1000, 40)):
        call(tokens, sequences=sequences, most=most, num_splits=4, window=window)
    assert len(launches.configs) == 3
    assert len(set(launches.configs)) == 1


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_strides_of_pages(launches: Launches, layout: str) -> None:
    call(LEAST_ROWS, layout=layout)
    _, _, numbers = launches.one(Problem)
    row, head = (KV_HEADS * DIM, DIM) if layout == "nhd" else (DIM, 16 * DIM)
    assert [numbers[f"k {mode}"] for mode in ("batch", "row", "head")] == [16 * KV_HEADS * DIM, row, head]


def test_packed_ones_get_both_and_each_leaves_the_others(launches: Launches) -> None:
    call(3 * LEAST_ROWS, packed=True)
    assert kinds(launches) == {PagedProblem, Problem}
    for kind in (PagedProblem, Problem):
        _, arguments, numbers = launches.one(kind)
        assert numbers["least rows"] == LEAST_ROWS
        assert numbers["sequences"] == (4 if kind is PagedProblem else 2)  # two more, for the rows of none


@pytest.mark.parametrize(("page", "layout"), [(LEAST_PAGE // 2, "nhd"), (16, "vllm"), (1, "hnd")])
def test_pages_that_tma_does_not_take_are_decoded(launches: Launches, page: int, layout: str) -> None:
    call(4 * LEAST_ROWS, page=page, layout=layout)
    assert kinds(launches) == {PagedProblem}
    assert launches.one(PagedProblem)[2]["least rows"] == 0


def test_outputs_are_the_same_for_both(launches: Launches) -> None:
    call(2 * LEAST_ROWS, packed=True, return_lse=True)
    forward, decode = (launches.one(kind)[1] for kind in (Problem, PagedProblem))
    assert forward[4:6] == decode[4:6]  # the output and the LSEs
    assert 0 not in forward[4:6]


@pytest.mark.parametrize("none", [{"most": 0}, {"pages": 0}])
def test_without_a_page_or_an_entry_nothing_is_for_tma(launches: Launches, none: dict[str, int]) -> None:
    call(LEAST_ROWS, **none)
    assert kinds(launches) == {PagedProblem}
