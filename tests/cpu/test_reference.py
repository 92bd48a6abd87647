"""The float64 oracle against hand-written loops, torch's own attention in float64, and itself in pieces."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fmha import reference
from tests.cases import CASES, Case, inputs

INF, NAN = math.inf, math.nan


def by_hand(q, k, v, causal, scale):
    """Attention from the definition, one number at a time."""
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    out = [[[[0.0] * dim for _ in range(heads)] for _ in range(seqlen_q)] for _ in range(batch)]
    lse = [[[-INF] * seqlen_q for _ in range(heads)] for _ in range(batch)]
    for b in range(batch):
        for h in range(heads):
            for i in range(seqlen_q):
                seen = [j for j in range(seqlen_k) if not causal or j <= i + seqlen_k - seqlen_q]
                if not seen:
                    continue
                scores = [
                    scale * sum(float(q[b, i, h, d]) * float(k[b, j, h // group, d]) for d in range(dim)) for j in seen
                ]
                weights = [math.exp(s) for s in scores]
                lse[b][h][i] = math.log(sum(weights))
                for d in range(dim):
                    total = sum(w * float(v[b, j, h // group, d]) for w, j in zip(weights, seen, strict=True))
                    out[b][i][h][d] = total / sum(weights)
    return torch.tensor(out, dtype=torch.float64), torch.tensor(lse, dtype=torch.float64)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 5), (3, 7), (7, 3), (1, 6), (6, 1)])
def test_equals_loops_written_by_hand(seqlen_q: int, seqlen_k: int, causal: bool) -> None:
    q, k, v = randn(2, seqlen_q, 4, 8), randn(2, seqlen_k, 2, 8, seed=1), randn(2, seqlen_k, 2, 8, seed=2)
    expected, expected_lse = by_hand(q, k, v, causal, 0.3)
    out, lse = reference.attention(q, k, v, causal=causal, scale=0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)
    out_np, lse_np = reference.attention_numpy(q.numpy(), k.numpy(), v.numpy(), causal=causal, scale=0.3)
    np.testing.assert_allclose(out_np, expected.numpy(), rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse_np, expected_lse.numpy(), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(33, 33), (20, 45)])
@pytest.mark.parametrize("mask", ["dense", "causal"])
def test_equals_torchs_attention_in_float64(mask: str, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = randn(2, seqlen_q, 6, 40), randn(2, seqlen_k, 2, 40, seed=1), randn(2, seqlen_k, 2, 40, seed=2)
    visible = None
    if mask == "causal":
        visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).tril(seqlen_k - seqlen_q)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, enable_gqa=True).transpose(1, 2)
    out, lse = reference.attention(q, k, v, causal=mask == "causal")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert out.dtype == lse.dtype == torch.float64
    assert lse.shape == (2, 6, seqlen_q)


def options(rng: random.Random, batch: int, heads: int, seqlen_q: int, seqlen_k: int) -> dict:
    """Any of the parts of a score and of a mask, together."""
    left, right = rng.choices([None, None, -9, -2, 0, 1, 3, 8, 40], k=2)
    found: dict = {"causal": rng.random() < 0.5, "window": (left, right)}
    if rng.random() < 0.4:
        found["softcap"] = rng.choice([0.5, 3.0, 50.0])
    if rng.random() < 0.4:
        found["sinks"] = torch.tensor([rng.choice([-INF, -1.0, 0.0, 4.0]) for _ in range(heads)], dtype=torch.float64)
    if rng.random() < 0.4:
        shape = rng.choice([(heads,), (batch, heads)])
        found["alibi_slopes"] = randn(*shape, seed=rng.randrange(99)).abs()
    for name, length in (("seqused_q", seqlen_q), ("seqused_k", seqlen_k)):
        if rng.random() < 0.3:
            found[name] = torch.tensor([rng.randint(0, length) for _ in range(batch)], dtype=torch.int32)
    return found


def as_numpy(given: dict) -> dict:
    return {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in given.items()}


@pytest.mark.parametrize("seed", range(150))
def test_torch_and_numpy_oracles_agree_on_every_mask_and_score(seed: int) -> None:
    rng = random.Random(seed)
    batch, kv_heads, group = rng.randint(1, 3), rng.randint(1, 2), rng.randint(1, 3)
    seqlen_q, seqlen_k, dim, value_dim = (rng.randint(1, 12) for _ in range(4))
    heads = kv_heads * group
    q = randn(batch, seqlen_q, heads, dim)
    k = randn(batch, seqlen_k, kv_heads, dim, seed=1)
    v = randn(batch, seqlen_k, kv_heads, value_dim, seed=2)
    given = options(rng, batch, heads, seqlen_q, seqlen_k)
    out, lse = reference.attention(q, k, v, **given)
    out_np, lse_np = reference.attention_numpy(q.numpy(), k.numpy(), v.numpy(), **as_numpy(given))
    np.testing.assert_allclose(out.numpy(), out_np, rtol=0, atol=1e-12)
    np.testing.assert_allclose(lse.numpy(), lse_np, rtol=0, atol=1e-12)


def test_windows_say_what_they_mean() -> None:
    def seen(seqlen_q: int, seqlen_k: int, causal: bool, window: reference.Window) -> list[list[int]]:
        visible = reference.visibility(seqlen_q, seqlen_k, causal, window)(torch.arange(seqlen_q))
        return [row.nonzero().flatten().tolist() for row in visible]

    assert (
        seen(3, 5, False, (1, 0)) == seen(3, 5, True, (1, None)) == seen(3, 5, True, (1, 7)) == [[1, 2], [2, 3], [3, 4]]
    )
    assert seen(3, 5, False, (None, 1)) == [[0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert seen(2, 9, False, (7, -8)) == [[], []], "not the full matrix"
    assert seen(2, 9, False, (7, -7)) == [[0], [1]]
    assert seen(4, 2, False, (0, 0)) == [[], [], [0], [1]], "aligned at the bottom right"


def test_a_sink_takes_its_part_of_the_weights() -> None:
    q, k, v = randn(1, 3, 2, 8), randn(1, 5, 2, 8, seed=1), randn(1, 5, 2, 8, seed=2)
    sinks = torch.tensor([0.3, -INF], dtype=torch.float64)
    plain, plain_lse = reference.attention(q, k, v)
    out, lse = reference.attention(q, k, v, sinks=sinks)
    torch.testing.assert_close(lse, torch.logaddexp(plain_lse, sinks[None, :, None]))
    torch.testing.assert_close(out, plain * torch.exp(plain_lse - lse).transpose(1, 2)[..., None])
    _, blind = reference.attention(q, k[:, :0], v[:, :0], sinks=sinks)
    torch.testing.assert_close(blind, sinks[None, :, None].expand(1, 2, 3))


def test_packed_sequences_are_attended_one_by_one_and_never_meet() -> None:
    lengths_q, lengths_k = [3, 0, 5, 1], [4, 2, 0, 6]
    cu_q, cu_k = (torch.tensor([0, *np.cumsum(n)], dtype=torch.int32) for n in (lengths_q, lengths_k))
    q, k, v = randn(9, 4, 8), randn(12, 2, 8, seed=1), randn(12, 2, 6, seed=2)
    slopes = randn(4, 4, seed=3).abs()
    out, lse = reference.attention_varlen(q, k, v, cu_q, cu_k, causal=True, alibi_slopes=slopes)
    assert out.shape == (9, 4, 6) and lse.shape == (4, 9)
    for b in range(4):
        here, there = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        one, one_lse = reference.attention(
            q[None, here], k[None, there], v[None, there], causal=True, alibi_slopes=slopes[b]
        )
        assert torch.equal(out[here], one[0]) and torch.equal(lse[:, here], one_lse[0])
        spoilt_k, spoilt_v = k.clone(), v.clone()
        spoilt_k[: there.start], spoilt_k[there.stop :], spoilt_v[: there.start], spoilt_v[there.stop :] = (
            NAN,
            NAN,
            NAN,
            NAN,
        )
        again, _ = reference.attention_varlen(q, spoilt_k, spoilt_v, cu_q, cu_k, causal=True, alibi_slopes=slopes)
        assert torch.equal(again[here], out[here])


def test_what_lies_behind_the_used_part_of_a_sequence_is_not_read() -> None:
    q, k, v = randn(2, 5, 2, 8), randn(2, 7, 2, 8, seed=1), randn(2, 7, 2, 8, seed=2)
    used_q, used_k = torch.tensor([3, 5]), torch.tensor([7, 0])
    q[0, 3:], k[1], v[1] = NAN, NAN, NAN
    out, lse = reference.attention(q, k, v, causal=True, seqused_q=used_q, seqused_k=used_k)
    one, one_lse = reference.attention(q[:1, :3], k[:1], v[:1], causal=True)
    assert torch.equal(out[:1, :3], one) and torch.equal(lse[:1, :, :3], one_lse)
    assert (out[0, 3:] == 0).all() and (out[1] == 0).all()
    assert (lse[0, :, 3:] == -INF).all() and (lse[1] == -INF).all()


SMALL = [c for c in CASES if c.batch * c.heads_q * c.seqlen_q * c.head_dim < 2**15]


@pytest.mark.parametrize("case", random.Random(1).sample(SMALL, 40), ids=lambda case: case.name)
def test_torch_and_numpy_oracles_agree(case: Case) -> None:
    q, k, v = inputs(case, "cpu")
    out, lse = reference.attention(q, k, v, causal=case.causal, scale=case.scale)
    out_np, lse_np = reference.attention_numpy(
        *(x.double().numpy() for x in (q, k, v)), causal=case.causal, scale=case.scale
    )
    np.testing.assert_allclose(out.numpy(), out_np, rtol=0, atol=1e-12)
    np.testing.assert_allclose(lse.numpy(), lse_np, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 300, 5000, 40000])
def test_chunks_do_not_change_the_result(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = randn(3, 50, 6, 16), randn(3, 70, 3, 16, seed=1), randn(3, 70, 3, 16, seed=2)
    whole = reference.attention(q, k, v, causal=True)
    monkeypatch.setattr(reference, "CHUNK", chunk)
    assert len(list(reference._chunks(3, 3, 50, 2, 70, 16))) > 1
    pieces = reference.attention(q, k, v, causal=True)
    for a, b in zip(whole, pieces, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_picked_rows_equal_those_of_the_whole() -> None:
    q, k, v = randn(2, 50, 4, 16), randn(2, 30, 2, 16, seed=1), randn(2, 30, 2, 16, seed=2)
    rows = torch.tensor([49, 0, 21, 20, 19])
    out, lse = reference.attention(q, k, v, causal=True)
    some, some_lse = reference.attention(q, k, v, causal=True, rows=rows)
    torch.testing.assert_close(some, out[:, rows], rtol=0, atol=1e-14)
    torch.testing.assert_close(some_lse, lse[:, :, rows], rtol=0, atol=1e-14)
    assert (lse[:, :, :20] == -INF).all() and (out[:, :20] == 0).all() and lse[:, :, 20:].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 4, 5), (2, 0, 5), (2, 4, 0), (2, 0, 0)])
def test_empty_problems_give_zeros_and_an_lse_of_minus_infinity(shape: tuple[int, int, int]) -> None:
    b, sq, sk = shape
    for causal in (False, True):
        out, lse = reference.attention(randn(b, sq, 4, 8), randn(b, sk, 2, 8), randn(b, sk, 2, 8), causal=causal)
        assert out.shape == (b, sq, 4, 8) and lse.shape == (b, 4, sq)
        assert (out == 0).all() and (lse == -INF).all()


def test_a_score_function_sees_scaled_scores_and_their_rows() -> None:
    q, k, v = randn(1, 6, 2, 8), randn(1, 9, 2, 8, seed=1), randn(1, 9, 2, 8, seed=2)
    visible = reference.visibility(6, 9, False)

    def softcap(scores: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        assert scores.shape[-2] == len(rows)
        return 0.5 * torch.tanh(scores / 0.5)

    out, _ = reference.attend(q, k, v, visible=visible, score=softcap, scale=0.7)
    scores = 0.5 * torch.tanh(torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.7 / 0.5)
    torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), rtol=0, atol=1e-13)


# -- infinities and NaN ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("tensor", [0, 1, 2])
def test_infinities_and_nan_spread_as_in_a_plain_softmax(tensor: int, value: float, causal: bool) -> None:
    """Row by row over the visible keys alone, with torch's softmax in float64."""
    qkv = [randn(1, 6, 1, 8), randn(1, 8, 1, 8, seed=1), randn(1, 8, 1, 8, seed=2)]
    qkv[tensor][0, 4, 0, 3] = value
    out, lse = reference.attention(*qkv, causal=causal)
    out_np, lse_np = reference.attention_numpy(*(x.numpy() for x in qkv), causal=causal)
    q, k, v = (x[0, :, 0] for x in qkv)
    for i in range(6):
        hi = i + 3 if causal else 8
        scores = k[:hi] @ q[i] * 8**-0.5
        weights = scores.softmax(0)
        expected = (weights[:, None] * v[:hi]).sum(0)
        torch.testing.assert_close(out[0, i, 0], expected, rtol=0, atol=1e-14, equal_nan=True)
        torch.testing.assert_close(lse[0, 0, i], scores.logsumexp(0), rtol=0, atol=1e-14, equal_nan=True)
    np.testing.assert_allclose(out_np, out.numpy(), rtol=0, atol=1e-13)
    np.testing.assert_allclose(lse_np, lse.numpy(), rtol=0, atol=1e-13)


def test_infinities_of_both_signs_in_v_give_nan_and_an_unseen_one_gives_nothing() -> None:
    q, k, v = randn(1, 4, 1, 8), randn(1, 4, 1, 8, seed=1), randn(1, 4, 1, 8, seed=2)
    v[0, 0, 0, 0], v[0, 1, 0, 0] = INF, -INF
    out, _ = reference.attention(q, k, v, causal=True)
    assert out[0, 0, 0, 0] == INF
    assert out[0, 1:, 0, 0].isnan().all()
    assert out[..., 1:].isfinite().all()


def test_a_row_whose_visible_scores_are_all_minus_infinity_is_nan() -> None:
    q, k, v = torch.ones(1, 1, 1, 8), torch.full((1, 3, 1, 8), -INF), torch.ones(1, 3, 1, 8)
    out, lse = reference.attention(q, k, v)
    assert out.isnan().all() and (lse == -INF).all()


# -- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("shapes", "name"),
    [
        (((2, 4, 8), (2, 4, 2, 8), (2, 4, 2, 8)), "q"),
        (((2, 4, 2, 8), (2, 4, 2, 8), (2, 5, 2, 8)), "v"),
        (((2, 4, 2, 8), (3, 4, 2, 8), (3, 4, 2, 8)), "k"),
        (((2, 4, 2, 8), (2, 4, 2, 16), (2, 4, 2, 16)), "k"),
        (((2, 4, 3, 8), (2, 4, 2, 8), (2, 4, 2, 8)), "k"),
        (((2, 4, 3, 8), (2, 4, 0, 8), (2, 4, 0, 8)), "k"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, name: str) -> None:
    tensors = [torch.zeros(shape) for shape in shapes]
    with pytest.raises(ValueError, match=f"^{name} has"):
        reference.attention(*tensors)
    with pytest.raises(ValueError, match=f"^{name} has"):
        reference.attention_numpy(*(x.numpy() for x in tensors))


# -- paged caches ------------------------------------------------------------------------------------------------------


def in_pages(x: torch.Tensor, table: torch.Tensor, count: int, page: int, layout: str, values: bool) -> torch.Tensor:
    """Keys or values [B, S, Hkv, D] put where the table says, one number of a key at a time; NaN everywhere else."""
    batch, length, heads, dim = x.shape
    shapes = {"nhd": (count, page, heads, dim), "hnd": (count, heads, page, dim)}
    shapes["vllm"] = (count, heads, dim, page) if values else (count, heads, dim // 8, page, 8)
    pages = torch.full(shapes[layout], NAN, dtype=torch.float64)
    for b, j, d in np.ndindex(batch, length, dim):
        at, slot = int(table[b, j // page]), j % page
        element = {"nhd": (slot, slice(None), d), "hnd": (slice(None), slot, d)}
        element["vllm"] = (slice(None), d, slot) if values else (slice(None), d // 8, slot, d % 8)
        pages[(at, *element[layout])] = x[b, j, :, d]
    return pages


@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
@pytest.mark.parametrize("queries", ["one", "several", "packed"])
@pytest.mark.parametrize("value_dim", [16, 8])
def test_paged_attention_is_that_of_the_keys_in_their_order(layout: str, queries: str, value_dim: int) -> None:
    batch, page, heads, kv_heads, dim, most = 3, 8, 4, 2, 16, 20
    k, v = randn(batch, most, kv_heads, dim, seed=1), randn(batch, most, kv_heads, value_dim, seed=2)
    table = torch.tensor([[5, 0, 9], [8, 2, 1], [3, 7, 6]], dtype=torch.int32)
    pages = [in_pages(x, table, 10, page, layout, x is v) for x in (k, v)]
    lens, starts = [17, 0, 20], [1, 4, 4, 5] if queries == "packed" else [0, 3, 6, 9]
    shape = {"one": (batch, heads, dim), "several": (batch, 3, heads, dim), "packed": (7, heads, dim)}[queries]
    q = randn(*shape, seed=3)
    options = {"causal": True, "window": (9, None), "softcap": 2.0, "sinks": randn(heads, seed=4)}
    cu_seqlens_q = torch.tensor(starts) if queries == "packed" else None
    given = {"layout": layout, "cu_seqlens_q": cu_seqlens_q, **options}
    out, lse = reference.attention_paged(q, *pages, table, torch.tensor(lens), **given)
    assert out.shape == (*shape[:-1], value_dim)
    assert lse.shape == {"one": (batch, heads), "several": (batch, heads, 3), "packed": (heads, 7)}[queries]
    for b, length in enumerate(lens):
        one = slice(starts[b], starts[b + 1])
        rows = {"one": (b, None), "several": b, "packed": one}[queries]
        expected, total = reference.attention(q[rows][None], k[b : b + 1, :length], v[b : b + 1, :length], **options)
        found = {"one": lse[b, :, None], "several": lse[b], "packed": lse[:, one]}[queries]
        torch.testing.assert_close(out[rows], expected[0], rtol=0, atol=1e-13)
        torch.testing.assert_close(found, total[0], rtol=0, atol=1e-13)
    if queries == "packed":  # rows of no sequence
        assert (out[[0, 5, 6]] == 0).all() and (lse[:, [0, 5, 6]] == -INF).all()


def test_of_a_paged_cache_only_the_pages_of_a_sequence_are_looked_at() -> None:
    """Entries of the table behind the last page are no pages."""
    k = randn(2, 8, 1, 8)
    table = torch.tensor([[1, 1 << 30], [0, -1]], dtype=torch.int32)
    out, _ = reference.attention_paged(randn(2, 2, 8), k, k, table, torch.tensor([8, 3]))
    changed = k.clone()
    changed[0, 3:] = NAN
    again, _ = reference.attention_paged(randn(2, 2, 8), changed, changed, table, torch.tensor([8, 3]))
    assert out.isfinite().all() and torch.equal(out, again)
