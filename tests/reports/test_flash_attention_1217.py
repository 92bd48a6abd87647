"""flash-attention#1217: packed sequences give with splits what they give with one, within rounding."""

import pytest
import torch

import fmha
from fmha.problem import PagedProblem
from tests.checks import half_ulp
from tests.paged import PagedCase, call, compare, tensors

LSE_ROUNDING = 1e-5


@pytest.mark.gpu
@pytest.mark.needs(PagedProblem("bfloat16", 128))
@pytest.mark.parametrize("splits", [2, 3, 8, 64])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_splits_of_packed_sequences(splits: int, head_dim: int) -> None:
    case = PagedCase((1, 129, 0, 1300, 511), (1, 5, 2, 3, 0), 2, 3, head_dim, 16, packed=True, causal=True)
    given = tensors(case, "cuda")
    (one, one_lse), (out, lse) = (
        call(case, given, lambda *a, n=n, **b: fmha.attention_paged(*a, **b, num_splits=n)) for n in (1, splits)
    )
    compare(case, given, out, lse)
    rounding = 4 * half_ulp(one.abs().max().item(), case.torch_dtype)
    torch.testing.assert_close(out.float(), one.float(), rtol=0, atol=rounding)
    torch.testing.assert_close(lse, one_lse, rtol=LSE_ROUNDING, atol=LSE_ROUNDING)
