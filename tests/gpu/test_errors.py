"""Bad input on a GPU: the error names the argument, and `out` and the device stay as they were."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch

import fmha
from tests.cases import Case, inputs
from tests.checks import POISON, compare, poison

CASE = Case(2, 40, 50, 4, 2, 64)
EXPECTED = (ValueError, TypeError, fmha.Unsupported)


def _with(**changes: Callable[[torch.Tensor], object] | object) -> Callable[[dict], None]:
    def apply(call: dict) -> None:
        for name, change in changes.items():
            call[name] = change(call[name]) if callable(change) else change

    return apply


BAD = {
    "q of rank 3": (_with(q=lambda q: q[0]), "q"),
    "k of rank 3": (_with(k=lambda k: k[0]), "k"),
    "v of rank 5": (_with(v=lambda v: v[None]), "v"),
    "no tensor": (_with(q="attention"), "q"),
    "nothing": (_with(k=None), "k"),
    "float32": (
        _with(q=torch.Tensor.float, k=torch.Tensor.float, v=torch.Tensor.float, out=torch.Tensor.float),
        "float32",
    ),
    "k of another dtype": (_with(k=torch.Tensor.half), "k"),
    "v of another dtype": (_with(v=torch.Tensor.half), "v"),
    "k on the CPU": (_with(k=torch.Tensor.cpu), "k"),
    "v on the CPU": (_with(v=torch.Tensor.cpu), "v"),
    "all on the CPU": (_with(q=torch.Tensor.cpu, k=torch.Tensor.cpu, v=torch.Tensor.cpu, out=None), "cpu"),
    "another batch": (_with(k=lambda k: k[:1], v=lambda v: v[:1]), "k"),
    "v of another length": (_with(v=lambda v: v[:, :-1]), "v"),
    "heads that do not divide": (_with(q=lambda q: q[:, :, :3], out=lambda out: out[:, :, :3]), "heads"),
    "k of another head dim": (_with(k=lambda k: k[..., :56], v=lambda v: v[..., :56]), "k"),
    "head dim 60": (_with(**{n: lambda x: x[..., :60].contiguous() for n in ("q", "k", "v", "out")}), "head_dim 60"),
    "head dim 264": (
        _with(**{n: lambda x: x.repeat(1, 1, 1, 5)[..., :264].contiguous() for n in ("q", "k", "v", "out")}),
        "head_dim 264",
    ),
    "out of another shape": (_with(out=lambda out: out[:, :-1]), "out"),
    "out of another dtype": (_with(out=lambda out: out.half()), "out"),
    "out on the CPU": (_with(out=lambda out: out.cpu()), "out"),
    "out that is no tensor": (_with(out=[1]), "out"),
    "scale 0": (_with(scale=0.0), "scale"),
    "scale below 0": (_with(scale=-1.0), "scale"),
    "scale NaN": (_with(scale=math.nan), "scale"),
    "scale infinite": (_with(scale=math.inf), "scale"),
    "scale that is no number": (_with(scale="1"), "scale"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_out_left_alone(name: str) -> None:
    change, named = BAD[name]
    q, k, v = inputs(CASE, "cuda")
    out = poison(torch.empty_like(q))
    call = {"q": q, "k": k, "v": v, "out": out, "scale": None}
    change(call)
    given = call["out"] if isinstance(call["out"], torch.Tensor) else out
    before = given.clone()
    with pytest.raises(EXPECTED, match=rf"\b{re.escape(named)}\b"):
        fmha.attention(call["q"], call["k"], call["v"], out=call["out"], scale=call["scale"])
    torch.cuda.synchronize()
    bits = torch.int16 if given.element_size() == 2 else torch.int32
    assert torch.equal(given.contiguous().view(bits), before.contiguous().view(bits))
    assert (out.view(torch.int16) == POISON).all()
    compare(CASE, (q, k, v), fmha.attention(q, k, v), None)  # and the next call is served


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_out_that_overlaps_an_input_is_refused(name: str) -> None:
    case = Case(2, 40, 40, 2, 2, 64)
    storage = torch.randn(2, 80, 2, 64, device="cuda", dtype=torch.bfloat16)
    tensors = dict(zip("qkv", inputs(case, "cuda"), strict=True))
    tensors[name] = storage[:, :40]
    before = storage.clone()
    for out in (storage[:, :40], storage[:, 39:79]):
        with pytest.raises(ValueError, match=r"\bout\b"):
            fmha.attention(**tensors, out=out)
    torch.cuda.synchronize()
    assert torch.equal(storage, before)
    beside = storage[:, 40:]
    compare(case, (tensors["q"], tensors["k"], tensors["v"]), fmha.attention(**tensors, out=beside), None)


def test_empty_problems_with_bad_input_are_refused_too() -> None:
    q = torch.empty(0, 4, 3, 64, device="cuda", dtype=torch.bfloat16)
    k = torch.empty(0, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="heads"):
        fmha.attention(q, k, k)
