"""flash-attention#1133: the windows (S - 1, 0) and (S, 0) and the causal mask agree, at S = 16384 too."""

import pytest
import torch

import fmha
from schedules.domain import mask_of
from tests.cases import Case, inputs
from tests.checks import same_bits

S = 16384


def test_they_are_the_same_mask() -> None:
    assert mask_of(False, (S - 1, 0), S, S) == mask_of(False, (S, 0), S, S) == mask_of(True, (None, None), S, S)
    assert mask_of(False, (S - 2, 0), S, S)[0] == "window"


@pytest.mark.gpu
def test_they_give_the_same_bits() -> None:
    qkv = inputs(Case(1, S, S, 2, 1, 128), "cuda")
    causal = fmha.attention(*qkv, causal=True)
    for left in (S - 1, S):
        assert same_bits(fmha.attention(*qkv, window=(left, 0)), causal)
    narrower = fmha.attention(*qkv, window=(S - 2, 0))
    assert torch.allclose(narrower.float(), causal.float(), atol=2e-2)
    assert not same_bits(narrower[:, -1], causal[:, -1])  # which does not see the first key
