"""TransformerEngine#3528: causal with the window (-1, 0) is causal."""

import pytest

import fmha
from schedules.domain import mask_of
from tests.cases import Case, inputs
from tests.checks import same_bits


def test_it_is_the_same_mask() -> None:
    assert mask_of(True, (None, 0), 70, 90) == mask_of(True, (None, None), 70, 90)
    assert mask_of(False, (None, 0), 70, 90) == mask_of(True, (None, None), 70, 90)


@pytest.mark.gpu
def test_it_gives_the_same_bits() -> None:
    qkv = inputs(Case(2, 300, 333, 4, 2, 128), "cuda")
    assert same_bits(fmha.attention(*qkv, causal=True, window=(-1, 0)), fmha.attention(*qkv, causal=True))
