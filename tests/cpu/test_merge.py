"""`fmha.merge` against attention over all keys at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import fmha
from fmha import reference

INF = math.inf


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


Q, K, V = randn(2, 7, 4, 8), randn(2, 20, 2, 8, seed=1), randn(2, 20, 2, 8, seed=2)


def part(start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.attention(Q, K[:, start:end], V[:, start:end])


@pytest.mark.parametrize("cut", [0, 1, 13, 20])
def test_two_parts_give_the_whole(cut: int) -> None:
    out, lse = fmha.merge(*part(0, cut), *part(cut, 20))
    whole, whole_lse = part(0, 20)
    torch.testing.assert_close(out, whole, rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, whole_lse, rtol=0, atol=1e-14)


def test_many_parts_in_any_order_give_the_whole() -> None:
    merged = part(9, 9)
    for start, end in ((12, 20), (0, 5), (5, 12)):
        merged = fmha.merge(*merged, *part(start, end))
    torch.testing.assert_close(merged[0], part(0, 20)[0], rtol=0, atol=1e-14)


def test_packed_sequences_are_merged_too() -> None:
    (a, lse_a), (b, lse_b) = part(0, 6), part(6, 20)
    out, lse = fmha.merge(a[0], lse_a[0], b[0], lse_b[0])
    torch.testing.assert_close(out, part(0, 20)[0][0], rtol=0, atol=1e-14)
    assert lse.shape == (4, 7)


def test_two_empty_parts_are_an_empty_one() -> None:
    out, lse = torch.zeros(1, 3, 2, 8), torch.full((1, 2, 3), -INF)
    merged, merged_lse = fmha.merge(out, lse, out, lse)
    assert (merged == 0).all() and (merged_lse == -INF).all()


def test_what_a_part_without_keys_holds_does_not_matter() -> None:
    out, lse = (x.float() for x in part(0, 20))
    merged, merged_lse = fmha.merge(torch.full_like(out, math.nan), torch.full_like(lse, -INF), out, lse)
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)


def test_far_apart_logarithms_neither_overflow_nor_vanish() -> None:
    out, lse = torch.ones(1, 1, 1, 4), torch.tensor([[[500.0]]])
    merged, merged_lse = fmha.merge(out, lse, 3 * out, lse - 1000)
    assert torch.equal(merged, out) and torch.equal(merged_lse, lse)
    merged, merged_lse = fmha.merge(out, lse, 3 * out, lse)
    assert torch.equal(merged, 2 * out) and merged_lse.item() == pytest.approx(500 + math.log(2))


def test_a_row_of_nan_stays_one_and_alone() -> None:
    (a, lse_a), (b, lse_b) = part(0, 6), part(6, 20)
    a[0, 2, 1], lse_a[0, 1, 2] = math.nan, math.nan
    out, lse = fmha.merge(a, lse_a, b, lse_b)
    assert out[0, 2, 1].isnan().all() and lse[0, 1, 2].isnan()
    assert out.isnan().sum() == 8 and lse.isnan().sum() == 1


def test_numpy_arrays_give_numpy_arrays() -> None:
    parts = (*part(0, 6), *part(6, 20))
    out, lse = fmha.merge(*(x.numpy() for x in parts))
    expected, expected_lse = fmha.merge(*parts)
    assert type(out) is type(lse) is np.ndarray
    np.testing.assert_array_equal(out, expected.numpy())
    np.testing.assert_array_equal(lse, expected_lse.numpy())
    with pytest.raises(TypeError, match="lse_b is a list; a torch tensor or another array with __dlpack__"):
        fmha.merge(*parts[:3], [1.0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    (a, lse_a), (b, lse_b) = ((o.to(dtype), lse.float()) for o, lse in (part(0, 6), part(6, 20)))
    out, lse = fmha.merge(a, lse_a, b, lse_b)
    exact, _ = fmha.merge(a.double(), lse_a.double(), b.double(), lse_b.double())
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(out.double(), exact, rtol=1.01 * torch.finfo(dtype).eps / 2, atol=1e-6)


def test_the_gradient_is_that_of_the_whole() -> None:
    parts = [x.clone().requires_grad_() for x in (*part(0, 6), *part(6, 20))]
    assert torch.autograd.gradcheck(fmha.merge, parts)


A, LSE = torch.zeros(2, 3, 4, 8), torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((A[0, 0], LSE, A, LSE), r"out_a\.shape is \[4, 8\]; \[B, S, H, D\] or \[T, H, D\]"),
        ((A, LSE.mT, A, LSE), r"lse_a\.shape is \[2, 3, 4\]; .* must be \[2, 4, 3\]"),
        ((A, LSE, A[:, :2], LSE), r"out_b\.shape is \[2, 2, 4, 8\]"),
        ((A, LSE, A, LSE[:1]), r"lse_b\.shape is \[1, 4, 3\]"),
        ((A, LSE, A.half(), LSE), r"out_b\.dtype is torch\.float16; .* torch\.float32 here"),
        ((A, LSE.long(), A, LSE.long()), r"lse_a\.dtype is torch\.int64; a floating one"),
        ((A, LSE, A.to("meta"), LSE), r"out_b is on meta; it must be on out_a's device, cpu"),
    ],
)
def test_what_does_not_fit_is_named(arguments: tuple[torch.Tensor, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fmha.merge(*arguments)
