"""Infinities and NaN spread as in a plain softmax over the keys that a row sees, and leave nothing behind.

In the rows that do not see key j, but share a Q tile with one that meets j's KV tile, an infinity or a NaN in v[j] is
unspecified: their weight for it is 0, and 0 * inf is NaN. In k[j] it is not: the mask replaces the score.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import fmha
from fmha import reference
from fmha.jit.launch import describe_device
from schedules.domain import DOMAINS, Bounds
from schedules.tiling import Extent, choose
from tests.cases import DTYPES, Case, inputs
from tests.checks import LSE_TOLERANCE, check

INF, NAN = math.inf, math.nan


def unspecified(case: Case, key: int, lse: bool) -> torch.Tensor:
    """bool [Sq]: rows that do not see `key` though their Q tile visits its KV tile."""
    mask, heads = "causal" if case.causal else "dense", case.batch * case.heads_q
    device = describe_device(torch.device("cuda", torch.cuda.current_device()))
    extent = Extent(mask, case.seqlen_q, case.seqlen_k, heads, device.multiprocessors, lse)
    config = choose(case.head_dim, device.arch, extent)
    domain = DOMAINS[mask](config.tile_m, config.tile_n)
    bounds, rows = Bounds(case.seqlen_q, case.seqlen_k), []
    for row in range(case.seqlen_q):
        visits = domain.visits(row // config.tile_m, bounds)
        sees = key < min(case.seqlen_k, domain.hi(row, bounds))
        rows.append(not sees and key // config.tile_n < visits.total)
    return torch.tensor(rows, device="cuda")


def assert_same_kind(found: torch.Tensor, exact: torch.Tensor, tolerance: float) -> None:
    """NaN where the oracle has NaN, the same infinity where it has one, close elsewhere."""
    assert torch.equal(found.isnan(), exact.isnan()), "NaN is not where the oracle has it"
    infinite = exact.isinf()
    assert torch.equal(found[infinite].double(), exact[infinite]), "infinities are not where the oracle has them"
    finite = exact.isfinite()
    assert found[finite].isfinite().all()
    if finite.any():
        assert (found[finite].double() - exact[finite]).abs().max().item() <= tolerance


@pytest.mark.parametrize("value", [INF, -INF, NAN], ids=str)
@pytest.mark.parametrize("tensor", ["q", "k", "v"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_one_value_spreads_as_in_a_plain_softmax(head_dim: int, dtype: str, causal: bool, tensor: str, value) -> None:
    case = Case(1, 300, 333, 2, 1, head_dim, dtype, causal)
    tolerance = (
        8 * torch.finfo(case.torch_dtype).eps
    )  # the largest finite outputs are about 4: 2 units of their last place
    for place in (0, 150, 299):  # in the first tile, inside, in the tail
        q, k, v = inputs(case, "cuda", seed=place)
        {"q": q, "k": k, "v": v}[tensor][0, place, 0, 5] = value
        exact, exact_lse = reference.attention(q, k, v, causal=causal)
        out, lse = fmha.attention(q, k, v, causal=causal, return_lse=True)
        for found, with_lse in ((out, True), (fmha.attention(q, k, v, causal=causal), False)):
            known = torch.ones(300, dtype=torch.bool, device="cuda")
            if tensor == "v":
                known = ~unspecified(case, place, with_lse)
            assert int(known.sum()) >= 30  # with tiles of 256 queries it is the 34 of the second one that see the key
            assert_same_kind(found[:, known], exact[:, known], tolerance)
        finite = exact_lse.isfinite()
        assert not lse[~finite].isfinite().any(), "the LSE is finite where the oracle's is not"
        assert ((lse - exact_lse)[finite].abs() <= 10 * LSE_TOLERANCE).all()


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("value", [INF, -INF, NAN], ids=str)
def test_wholly_non_finite_inputs_end(value: float, head_dim: int) -> None:
    """Every combination of tensors filled with it: nothing finite comes out, and the kernel ends."""
    for which in itertools.product((False, True), repeat=3):
        case = Case(1, 300, 333, 2, 1, head_dim, causal=True)
        qkv = inputs(case, "cuda")
        for spoil, x in zip(which, qkv, strict=True):
            if spoil:
                x.fill_(value)
        out = fmha.attention(*qkv, causal=True)
        torch.cuda.synchronize()
        if any(which):
            assert not out.isfinite().any()
        else:
            assert out.isfinite().all()


@pytest.mark.parametrize("head_dim", [40, 64, 72, 128, 136, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_of_an_earlier_call_stays_in_it(head_dim: int, causal: bool) -> None:
    """Shared memory still holds the last call's NaN: what fills up tails and padded head dims must be zeros."""
    spoilt = [x.fill_(NAN) for x in inputs(Case(4, 1024, 1024, 16, 16, head_dim), "cuda")]
    for lse in (False, True):
        found = fmha.attention(*spoilt, causal=causal, return_lse=lse)
        assert (found[0] if lse else found).isnan().all()
        for seqlen_q, seqlen_k in ((1, 1), (129, 131), (300, 17)):
            case = Case(4, seqlen_q, seqlen_k, 16, 16, head_dim, causal=causal, out="given", return_lse=lse)
            check(case, fmha.attention, "cuda")


def test_a_row_of_minus_infinity_scores_is_nan_and_its_lse_minus_infinity() -> None:
    q = torch.ones(1, 70, 1, 64, dtype=torch.bfloat16, device="cuda")
    k = torch.full((1, 200, 1, 64), -INF, dtype=torch.bfloat16, device="cuda")
    out, lse = fmha.attention(q, k, torch.ones_like(k), return_lse=True)
    assert out.isnan().all() and (lse == -INF).all()
    assert fmha.attention(q, k, torch.ones_like(k)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(dtype: str) -> None:
    """One key takes all the weight, by thousands: its value comes out."""
    case = Case(1, 130, 300, 2, 2, 64, dtype)
    q, k, v = inputs(case, "cuda")
    q.fill_(16.0)
    k.mul_(0.01)
    k[:, 123] = 16.0
    out, lse = fmha.attention(q, k, v, return_lse=True)
    for found in (out, fmha.attention(q, k, v)):
        assert torch.equal(found, v[:, 123:124].expand_as(out))
    assert ((lse - 16.0 * 16.0 * 64 / 8).abs() <= 0.01).all()
