"""flash-attention#2665: a [1, 32, 8192, 256] tensor transposed in place gives what its contiguous copy gives."""

import pytest
import torch

import fmha
from fmha.problem import Problem
from tests.checks import same_bits


@pytest.mark.gpu
@pytest.mark.needs(Problem("bfloat16", 256))
def test_strides_of_a_transposed_tensor() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, 32, 8192, 256)
    q, k, v = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).transpose_(1, 2) for _ in range(3)
    )
    out = fmha.attention(q, k, v, causal=True)
    assert same_bits(out, fmha.attention(q.contiguous(), k.contiguous(), v.contiguous(), causal=True))
