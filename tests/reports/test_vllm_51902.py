"""vllm#51902: with a fixed number of splits a sequence's result has the same bits whatever its neighbour's length."""

import pytest
import torch

import fmha
from fmha.problem import PagedProblem
from tests.checks import same_bits
from tests.paged import PagedCase, tensors


@pytest.mark.gpu
@pytest.mark.needs(PagedProblem("bfloat16", 128))
@pytest.mark.parametrize("splits", [1, 4, 16])
@pytest.mark.parametrize("layout", ["nhd", "vllm"])
def test_a_neighbour_changes_no_bit(splits: int, layout: str) -> None:
    given = tensors(PagedCase((777, 1300, 200), (1, 1, 1), 2, 4, 128, 16, layout), "cuda")

    def attend(lengths: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = len(lengths)
        return fmha.attention_paged(
            given.q[:count], given.k_pages, given.v_pages, given.page_table[:count], lengths, layout=layout,
            num_splits=splits, return_lse=True
        )  # fmt: skip

    alone = attend(given.seq_lens[:1])
    for neighbour in (0, 1, 64, 650, 1300):
        lengths = given.seq_lens.clone()
        lengths[1] = neighbour
        assert all(same_bits(a[0], b[0]) for a, b in zip(alone, attend(lengths), strict=True))
