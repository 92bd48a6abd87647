"""flashinfer#4452: under a causal mask with more queries than keys, rows that see no key give 0 and minus infinity."""

import math

import pytest
import torch

import fmha
from tests.cases import Case, inputs
from tests.checks import compare


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_more_queries_than_keys(head_dim: int) -> None:
    case = Case(2, 300, 130, 4, 2, head_dim, causal=True)
    qkv = inputs(case, "cuda")
    out, lse = fmha.attention(*qkv, causal=True, return_lse=True)
    assert (out[:, :170] == 0).all() and (lse[:, :, :170] == -math.inf).all()
    assert torch.isfinite(lse[:, :, 170:]).all()
    compare(case, qkv, out, lse)
