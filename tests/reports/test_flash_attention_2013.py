"""flash-attention#2013: `torch.compile(fullgraph=True)` sees one opaque operator."""

import pytest
import torch

import fmha
from tests.cases import Case, inputs
from tests.checks import compare

CASE = Case(2, 300, 333, 4, 2, 128, causal=True)


@pytest.mark.gpu
def test_a_compiled_model_calls_it() -> None:
    qkv = inputs(CASE, "cuda")
    torch._dynamo.reset()
    graphs = []

    def backend(module, _):
        graphs.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    out = torch.compile(lambda *x: fmha.attention(*x, causal=True), fullgraph=True, backend=backend)(*qkv)
    assert graphs == [["fmha.attention"]]
    compare(CASE, qkv, out, None)
