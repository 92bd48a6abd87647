"""flash-attention#2396: softcap is c tanh(s / c) of scores s that are scaled already."""

import pytest
import torch

import fmha
from fmha import reference
from tests.cases import Case
from tests.checks import check


def test_the_oracles_definition_by_hand() -> None:
    """Two keys with scores 4 and 0 before the cap, by a scale of 2."""
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[2.0]], [[0.0]]]])
    v = torch.tensor([[[[1.0]], [[0.0]]]])
    out, _ = reference.attention(q, k, v, scale=2.0, softcap=3.0)
    capped = 3.0 * torch.tanh(torch.tensor(4.0 / 3.0, dtype=torch.float64))
    torch.testing.assert_close(out.squeeze(), torch.sigmoid(capped))


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_scores_are_scaled_before_they_are_capped(softcap: float, scale: float | None) -> None:
    check(Case(2, 200, 300, 4, 2, 128, causal=True, softcap=softcap, scale=scale, q_gain=3.0), fmha.attention, "cuda")
