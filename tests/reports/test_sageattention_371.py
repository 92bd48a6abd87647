"""SageAttention#371: a CUDA graph that is replayed after its inputs changed computes with the new ones."""

import pytest
import torch

import fmha
from tests.cases import Case, inputs
from tests.checks import compare, poison

CASE = Case(2, 300, 333, 4, 2, 128, causal=True)


@pytest.mark.gpu
def test_a_replay_reads_what_the_inputs_hold_now() -> None:
    qkv, fresh = inputs(CASE, "cuda"), inputs(CASE, "cuda", seed=1)
    out = torch.empty_like(qkv[0])
    fmha.attention(*qkv, causal=True, out=out)  # a kernel must be in memory before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fmha.attention(*qkv, causal=True, out=out)
    for old, new in zip(qkv, fresh, strict=True):
        old.copy_(new)
    poison(out)
    graph.replay()
    compare(CASE, fresh, out, None)
