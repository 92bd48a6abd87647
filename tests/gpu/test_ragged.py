"""Ragged batches on the device: packed and padded sequences, whatever their neighbours hold."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

import fmha
from fmha import reference
from tests.cases import RAGGED, Case, inputs, options
from tests.checks import attend, check, same_bits

BASE = Case(4, 300, 420, 4, 2, 128, causal=True, ragged="packed")


def packed(sizes: list[int], heads: int = 4, dim: int = 128, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """q, k and v of packed sequences of these lengths, one KV head for two of the queries', and cu_seqlens."""
    generator = torch.Generator("cuda").manual_seed(seed)
    cu = torch.tensor(list(accumulate(sizes, initial=0)), dtype=torch.int32, device="cuda")
    shapes = [(sum(sizes), h, dim) for h in (heads, heads // 2, heads // 2)]
    qkv = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    return *qkv, cu


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
def test_every_head_dim(ragged: str, head_dim: int, causal: bool, record) -> None:
    for return_lse in (False, True):
        case = replace(BASE, head_dim=head_dim, causal=causal, ragged=ragged, return_lse=return_lse)
        record(case, check(case, attend, "cuda"))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_nothing_of_a_sequence_reaches_another(head_dim: int) -> None:
    q, k, v, cu = packed([200, 77, 1, 300], dim=head_dim)
    rest = torch.ones(len(q), dtype=torch.bool, device="cuda")
    rest[200:277] = False
    clean, lse = fmha.attention_varlen(q, k, v, cu, cu, return_lse=True)
    for bad in (math.nan, math.inf, -math.inf):
        for tensors in ((q,), (k,), (v,), (q, k, v)):
            spoilt = [x.clone() for x in (q, k, v)]
            for x, given in zip(spoilt, (q, k, v), strict=True):
                if any(given is tensor for tensor in tensors):
                    x[200:277] = bad
            out, lse_now = fmha.attention_varlen(*spoilt, cu, cu, return_lse=True)
            assert same_bits(out[rest], clean[rest]) and same_bits(lse_now[:, rest], lse[:, rest])


@pytest.mark.parametrize("causal", [False, True], ids=["dense", "causal"])
@pytest.mark.parametrize("window", [(None, None), (100, 0)], ids=str)
def test_equal_lengths_give_the_bits_of_a_batch(causal: bool, window: tuple) -> None:
    q, k, v, cu = packed([515] * 6)
    out, lse = fmha.attention_varlen(q, k, v, cu, cu, causal=causal, window=window, return_lse=True)
    batch = [x.unflatten(0, (6, 515)) for x in (q, k, v)]
    expected, expected_lse = fmha.attention(*batch, causal=causal, window=window, return_lse=True)
    assert same_bits(out, expected.flatten(0, 1)) and same_bits(lse, expected_lse.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1023, 1025, 5000])
def test_many_sequences(count: int) -> None:
    rng = random.Random(count)
    sizes = [rng.choice((0, 1, 2, 5, 64, 65, 130, 200)) for _ in range(count)]
    sizes[rng.randrange(count)] = 3000
    q, k, v, cu = packed(sizes, heads=2, dim=64)
    out = fmha.attention_varlen(q, k, v, cu, cu, causal=True)
    exact, _ = reference.attention_varlen(q, k, v, cu, cu, causal=True)
    assert (out.double() - exact).abs().max() < 3e-2 and out.isfinite().all()


def test_the_host_waits_for_nothing() -> None:
    q, k, v, cu = packed([100, 200, 300])
    longest = torch.tensor(300, device="cuda")
    fmha.attention_varlen(q, k, v, cu, cu)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fmha.attention_varlen(q, k, v, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest)
        fmha.attention(*(x[None] for x in (q, k, v)), seqused_k=cu[1:2])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_takes_new_lengths_at_every_replay() -> None:
    q, k, v, cu = packed([100, 200, 300])
    fmha.attention_varlen(q, k, v, cu, cu, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fmha.attention_varlen(q, k, v, cu, cu, causal=True)
    for sizes in ([300, 200, 100], [0, 0, 600], [1, 598, 1], [10, 20, 30]):
        cu.copy_(torch.tensor(list(accumulate(sizes, initial=0))))
        out.fill_(math.nan)
        graph.replay()
        assert same_bits(out, fmha.attention_varlen(q, k, v, cu, cu, causal=True))
        assert (out[sum(sizes) :] == 0).all()


@pytest.mark.parametrize(
    "numbers", [[0, 700, 300, 600], [-5, 100, 200, 9999], [600, 0, 600, 0], [2**31 - 1, -(2**31), 5, 6]], ids=str
)
def test_numbers_that_are_wrong_reach_nothing_else(numbers: list[int]) -> None:
    """The outputs' surroundings stay as they were, and nothing hangs."""
    q, k, v, cu = packed([100, 200, 300])
    wrong = torch.tensor(numbers, dtype=torch.int32, device="cuda")
    room = torch.full((800, 4, 128), 7.0, dtype=torch.bfloat16, device="cuda")
    fmha.attention_varlen(q, k, v, wrong, wrong, out=room[100:700])
    used = torch.tensor([-4, 5, 2**31 - 1], dtype=torch.int32, device="cuda")
    fmha.attention_varlen(q, k, v, cu, cu, seqused_q=used, seqused_k=used, out=room[100:700])
    assert (room[:100] == 7).all() and (room[700:] == 7).all()
    out = fmha.attention_varlen(q, k, v, cu, cu)
    assert same_bits(out, fmha.attention_varlen(q, k, v, cu, cu)) and out.isfinite().all()


def test_sequences_that_overlap_too_often_are_no_work() -> None:
    """Every second one spans all rows: their tiles together are more than 32 bits count."""
    count, rows = 500_000, 1 << 22
    q = torch.zeros((rows, 1, 8), dtype=torch.bfloat16, device="cuda")
    cu = torch.zeros(count + 1, dtype=torch.int32, device="cuda")
    cu[1::2] = rows
    fmha.attention_varlen(q, q, q, cu, cu)
    torch.cuda.synchronize()
    mine, k, v, few = packed([100, 200, 300])
    assert fmha.attention_varlen(mine, k, v, few, few).isfinite().all()


def test_no_keys_and_no_queries() -> None:
    q, k, v, _ = packed([8])
    none = torch.zeros(3, dtype=torch.int32, device="cuda")
    cu = torch.tensor([0, 5, 8], dtype=torch.int32, device="cuda")
    sinks = torch.randn(4, device="cuda")
    for keys in (k, k[:0]):
        out, lse = fmha.attention_varlen(q, keys, keys, cu, none, sinks=sinks, return_lse=True)
        assert (out == 0).all() and torch.allclose(lse, sinks[:, None].expand(4, 8))
    out, lse = fmha.attention_varlen(q, k, v, none, cu, sinks=sinks, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()


def test_strided_tensors_and_a_given_output() -> None:
    q, k, v, cu = packed([100, 200, 300])
    together = torch.cat([q, k, v], dim=1)
    parts = together.split([4, 2, 2], dim=1)
    room = torch.full((600, 8, 128), math.nan, dtype=torch.bfloat16, device="cuda")
    out = fmha.attention_varlen(*parts, cu, cu, causal=True, out=room[:, 2:6])
    assert out.data_ptr() == room[:, 2:6].data_ptr() and room[:, :2].isnan().all() and room[:, 6:].isnan().all()
    assert same_bits(out.contiguous(), fmha.attention_varlen(q, k, v, cu, cu, causal=True))


@pytest.mark.parametrize("which", ["q", "k", "out"])
def test_a_tensor_at_the_start_of_its_memory(which: str) -> None:
    """Descriptors whose base lay before the tensor faulted here, where nothing is mapped before it."""
    q, k, v, cu = packed([100, 200, 300])
    expected = fmha.attention_varlen(q, k, v, cu, cu, causal=True)
    torch.cuda.empty_cache()
    room = torch.full((64 << 20,), math.nan, dtype=torch.bfloat16, device="cuda")  # a segment of its own
    given = {"q": q, "k": k, "out": torch.empty_like(q)}
    given[which] = room[: given[which].numel()].view(given[which].shape).copy_(given[which])
    out = fmha.attention_varlen(given["q"], given["k"], v, cu, cu, causal=True, out=given["out"])
    assert same_bits(out, expected)


def test_slopes_of_each_sequence() -> None:
    case = replace(BASE, alibi="entries", batch=3)
    qkv, given = inputs(case, "cuda"), options(case, "cuda")
    del given["window"]
    out = fmha.attention_varlen(*qkv, **given)
    flipped = fmha.attention_varlen(*qkv, **(given | {"alibi_slopes": given["alibi_slopes"].flip(0)}))
    assert not same_bits(out, flipped)
