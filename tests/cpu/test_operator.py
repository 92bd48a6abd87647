"""`torch.compile` sees `fmha.attention` and `fmha.attention_varlen` as one opaque operator; eager calls do not go
through it. The float64 oracle takes the kernel's place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fmha
from fmha import operator, reference
from fmha.problem import Unsupported

SINKS, SLOPES = torch.tensor([0.5, -1.0]), torch.tensor([[0.25, 0.5], [0.125, 1.0]])
USED_Q, USED_K = torch.tensor([4, 2], dtype=torch.int32), torch.tensor([0, 6], dtype=torch.int32)
CU_Q, CU_K = torch.tensor([1, 5, 9], dtype=torch.int32), torch.tensor([0, 6, 12], dtype=torch.int32)


def stand_in(exact: Callable[..., Any]) -> Callable[..., Any]:
    """The oracle `exact` with the signature of the public function that it stands for."""

    def attention(q: torch.Tensor, *rest: torch.Tensor, return_lse: bool = False, **given: Any) -> Any:
        left, right = (None if side == -1 else side for side in given.pop("window", (None, None)))
        o, lse = exact(q, *rest, window=(left, right), **given)
        o = o.to(q.dtype)
        return (o, lse.float()) if return_lse else o

    return attention


ATTENTION = fmha.attention, fmha.attention_varlen
EXACT = stand_in(reference.attention), stand_in(reference.attention_varlen)


@pytest.fixture(autouse=True)
def oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the operators run; what is compiled is still `ATTENTION`."""
    monkeypatch.setattr(fmha, "attention", EXACT[0])
    monkeypatch.setattr(fmha, "attention_varlen", EXACT[1])
    torch._dynamo.reset()


def inputs(varlen: bool = False) -> tuple[torch.Tensor, ...]:
    """q, k and v, and with `varlen` also where their sequences begin, with a row before and one behind them."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((10, 2), (14, 1), (14, 1)) if varlen else ((2, 5, 2), (2, 7, 1), (2, 7, 1))
    qkv = tuple(torch.randn(*shape, 16, generator=generator).bfloat16() for shape in shapes)
    return (*qkv, CU_Q, CU_K) if varlen else qkv


def graph_of(function: Any, *arguments: Any) -> list[str]:
    """The operators that `torch.compile` sees, all in one graph."""
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    torch.compile(function, fullgraph=True, backend=backend)(*arguments)
    (graph,) = graphs
    return [name for name in graph if "fmha" in name]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"causal": True, "scale": 0.3},
    {"window": (3, -1), "softcap": 5.0},
    {"sinks": SINKS, "alibi_slopes": SLOPES, "return_lse": True},
    {"seqused_k": USED_K, "causal": True, "sinks": SINKS, "return_lse": True},
    {"seqused_q": USED_Q, "seqused_k": USED_K, "alibi_slopes": SLOPES[0]},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("varlen", [False, True])
def test_a_compiled_call_is_one_operator_and_gives_the_same(varlen: bool, options: dict[str, Any]) -> None:
    q, *rest = inputs(varlen)

    def function(q: torch.Tensor) -> Any:
        return ATTENTION[varlen](q * 2, *rest, **options)

    lse = options.get("return_lse", False)
    assert graph_of(function, q) == ["fmha.attention_with_lse" if lse else "fmha.attention"]
    found = torch.compile(function, fullgraph=True, backend="aot_eager")(q)
    torch.testing.assert_close(found, EXACT[varlen](q * 2, *rest, **options), rtol=0, atol=0)


@pytest.mark.parametrize("longest", [4, torch.tensor(4), torch.tensor([4])])
def test_hints_and_lengths_are_no_part_of_a_graph(longest: int | torch.Tensor) -> None:
    """One graph serves all lengths."""
    q, k, v, cu_q, cu_k = inputs(varlen=True)
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    @torch.compile(fullgraph=True, backend=backend)
    def function(cu_q: torch.Tensor, cu_k: torch.Tensor) -> Any:
        return ATTENTION[True](q, k, v, cu_q, cu_k, max_seqlen_q=longest, max_seqlen_k=longest)

    for shift in (0, 1, -1):
        others = cu_q + shift, cu_k + torch.tensor([0, shift, 0])
        torch.testing.assert_close(function(*others), EXACT[True](q, k, v, *others), rtol=0, atol=0)
    assert len(graphs) == 1


@pytest.mark.parametrize("varlen", [False, True])
def test_a_compiled_call_fills_out(varlen: bool) -> None:
    arguments = inputs(varlen)
    out = torch.zeros_like(arguments[0])
    found = torch.compile(lambda: ATTENTION[varlen](*arguments, out=out), fullgraph=True, backend="aot_eager")()
    assert torch.equal(found, out) and torch.equal(out, EXACT[varlen](*arguments))


@pytest.mark.parametrize("used", [(None, None), (USED_Q, USED_K), (None, USED_K)])
@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize("lse", [False, True])
def test_the_operators_hold_what_they_declare(lse: bool, varlen: bool, used: tuple[Any, Any]) -> None:
    q, k, v, *cu = inputs(varlen)
    strided = q.transpose(0, 1).contiguous().transpose(0, 1)
    vectors = SINKS, SLOPES, *(cu or (None, None)), *used
    arguments = (strided, k, v, *vectors, True, 3, None, None, 2.0)
    named = torch.ops.fmha.attention_with_lse if lse else torch.ops.fmha.attention
    torch.library.opcheck(named, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"))


@pytest.mark.parametrize("varlen", [False, True])
def test_eager_calls_do_not_go_through_it(monkeypatch: pytest.MonkeyPatch, varlen: bool) -> None:
    monkeypatch.setattr(operator, "call", lambda *_, **__: pytest.fail("an eager call went through the operator"))
    with pytest.raises(Unsupported, match="architecture cpu"):
        ATTENTION[varlen](*inputs(varlen))
