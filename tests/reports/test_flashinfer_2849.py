"""flashinfer#2849: every number of query heads for one KV head, 1 to 32, is served and right."""

import pytest

import fmha
from tests.cases import Case
from tests.checks import check


@pytest.mark.gpu
@pytest.mark.parametrize("group", range(1, 33))
def test_every_ratio_of_heads(group: int) -> None:
    check(Case(1, 70, 130, 2 * group, 2, 128, causal=True), fmha.attention, "cuda")
