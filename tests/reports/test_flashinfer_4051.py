"""flashinfer#4051: merging two parts that saw no key gives a part that saw no key, and not NaN."""

import math

import torch

import fmha


def test_merging_empties() -> None:
    out, lse = torch.zeros(1, 3, 2, 8, dtype=torch.bfloat16), torch.full((1, 2, 3), -math.inf)
    merged, merged_lse = fmha.merge(out, lse, out, lse)
    assert (merged == 0).all() and (merged_lse == -math.inf).all()
