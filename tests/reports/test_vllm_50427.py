"""vllm#50427: a page whose offset is beyond 2^31 elements is read from where it is."""

from dataclasses import replace

import pytest
import torch

import fmha
from fmha.problem import PagedProblem
from tests.checks import poison
from tests.paged import NO_PAGE, PagedCase, call, compare, tensors

FAR = 2**31 + 2**20  # elements


def far(pages: torch.Tensor) -> torch.Tensor:
    """The same pages at the end of a large cache, in front of which there is no number."""
    before = -(-FAR // pages[0].numel())
    cache = torch.empty(before + len(pages), *pages.shape[1:], dtype=pages.dtype, device=pages.device)
    poison(cache[: len(pages)])  # where an offset of 32 bits would come out
    cache[before:] = pages
    return cache


@pytest.mark.gpu
@pytest.mark.needs(PagedProblem("bfloat16", 128))
@pytest.mark.parametrize(("layout", "page"), [("nhd", 16), ("hnd", 16), ("vllm", 16), ("nhd", 1)])
def test_the_last_pages_of_a_large_cache(layout: str, page: int) -> None:
    case = PagedCase((300, 65), (2, 2), 8, 4, 128, page, layout, causal=True)
    given = tensors(case, "cuda")
    before = -(-FAR // given.k_pages[0].numel())
    table = torch.where(given.page_table == NO_PAGE, NO_PAGE, given.page_table + before)
    large = replace(given, k_pages=far(given.k_pages), v_pages=far(given.v_pages), page_table=table)
    compare(case, given, *call(case, large, fmha.attention_paged))
