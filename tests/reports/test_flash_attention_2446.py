"""flash-attention PR 2446: head dim 256 is right over pages of 1, 16, 64 and 128 slots."""

import pytest

from fmha.problem import PagedProblem
from tests.paged import PagedCase, check


@pytest.mark.gpu
@pytest.mark.needs(PagedProblem("bfloat16", 256))
@pytest.mark.parametrize("page", [1, 16, 64, 128])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_pages_of_every_size(page: int, layout: str) -> None:
    check(PagedCase((1, 64, 129, 1000), (2,) * 4, 2, 4, 256, page, layout, causal=True), "cuda")
