"""Tensors whose element offsets pass 2^31."""

from __future__ import annotations

import pytest
import torch

import fmha
from tests.cases import Case, inputs
from tests.checks import POISON, compare, poison

FAR = 2**31  # elements

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 40 * 2**30, reason="needs a GPU with 40 GiB"
)


def far_view(shape: tuple[int, ...], mode: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned buffer and a view of it that reaches past 2^31 elements along one mode, or starts there."""
    b, s, h, d = shape
    strides = [s * h * d, h * d, d, 1]
    offset = 8 + (FAR if mode == "base" else 0)
    if mode != "base":
        axis = ("batch", "row", "head").index(mode)
        strides[axis] = -(-FAR // (shape[axis] - 1) // 8) * 8
    end = offset + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    assert end > FAR
    buffer = poison(torch.empty(end + 8, dtype=torch.bfloat16, device="cuda"))
    return buffer, buffer.as_strided(shape, strides, offset)


@pytest.mark.parametrize("mode", ["batch", "row", "head", "base"])
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_offsets_past_2_to_31(name: str, mode: str) -> None:
    case = Case(2, 200, 300, 4, 2, 64, causal=True)
    tensors = dict(zip("qkv", inputs(case, "cuda"), strict=True))
    tensors["out"] = poison(torch.empty_like(tensors["q"]))
    buffer, view = far_view(tuple(tensors[name].shape), mode)
    view.copy_(tensors[name])
    tensors[name] = view
    qkv = tensors["q"], tensors["k"], tensors["v"]
    compare(case, qkv, *fmha.attention(*qkv, causal=True, out=tensors["out"], return_lse=True))
    poison(tensors["out"])
    compare(case, qkv, fmha.attention(*qkv, causal=True, out=tensors["out"]), None)
    view.view(torch.int16).fill_(POISON)
    touched = sum(int((part != POISON).sum()) for part in buffer.view(torch.int16).split(2**28))
    assert touched == 0, f"{touched} elements around {name} were written"


@pytest.mark.parametrize("causal", [False, True])
def test_more_than_2_to_31_elements(causal: bool) -> None:
    """Contiguous, every tensor just past 2^31 elements; the batch entries at both ends are checked."""
    batch, ends = 2049, 2
    case = Case(batch, 256, 256, 64, 64, 64, causal=causal)
    assert batch * 256 * 64 * 64 > FAR
    q, k, v = inputs(case, "cuda")
    out = poison(torch.empty_like(q))
    fmha.attention(q, k, v, causal=causal, out=out)
    for start in range(0, batch, 256):
        assert not (out[start : start + 256].view(torch.int16) == POISON).any()
    few = Case(ends, 256, 256, 64, 64, 64, causal=causal)
    compare(few, (q[:ends], k[:ends], v[:ends]), out[:ends], None)
    compare(few, (q[-ends:], k[-ends:], v[-ends:]), out[-ends:], None)
