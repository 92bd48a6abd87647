"""flash-attention#2367: over a paged cache head dims 192 and 128 are right for pages of any size, at lengths up to 128
and over."""

import pytest

from fmha.problem import PagedProblem
from tests.paged import PagedCase, check


@pytest.mark.gpu
@pytest.mark.needs(PagedProblem("bfloat16", 192, head_dim_v=128))
@pytest.mark.parametrize("page", [1, 16, 32, 128, 256])
@pytest.mark.parametrize("tokens", [1, 4])
def test_pages_that_are_no_tile(page: int, tokens: int) -> None:
    lengths = (1, 63, 64, 65, 127, 128, 129, 200, 257)
    case = PagedCase(lengths, (tokens,) * len(lengths), 2, 4, 192, page, head_dim_v=128, causal=True)
    check(case, "cuda")
