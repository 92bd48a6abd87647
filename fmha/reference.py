"""The float64 oracle: exact attention, written to be read, that every test and benchmark compares with.

    s = scale * q k^T;  s = softcap * tanh(s / softcap);  s = s - slope * |i + Sk - Sq - j|

    out = sum(exp(s) v) / (sum(exp(s)) + exp(sink))        lse = log(sum(exp(s)) + exp(sink))

with the parts that are asked for, over the keys j that query i sees. A key that a query does not see takes no part in
any sum, whatever it holds; a query that sees no key gets 0, and an LSE of minus infinity, or of the sink. Infinities
and NaN otherwise spread as in a plain softmax. Which keys a query sees is a dense [rows, Sk] matrix and what becomes of
a score a function of it, so another mask is one more function here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

Visible = Callable[[torch.Tensor], torch.Tensor]
"""Query indices [rows] -> bool [rows, Sk]: who sees whom."""

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Scaled scores [b, h, group, rows, Sk] and their query indices [rows] -> scores of the same shape."""

Window = tuple[int | None, int | None]
"""(left, right), keys on either side of the diagonal that a query still sees; None is no bound, -1 counts."""

NO_WINDOW: Window = (None, None)
CHUNK = 2**25  # elements of the widest float64 temporary: 256 MiB, a handful of which are alive at a time


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window: Window = NO_WINDOW,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64, on the device of the inputs.

    q [B, Sq, Hq, D], k [B, Sk, Hkv, D] and v [B, Sk, Hkv, Dv], any floating dtype and strides; Hq is a multiple of Hkv,
    and query head `h` reads KV head `h // (Hq // Hkv)`. The diagonal is aligned at the bottom right: `causal` shows
    query i the keys j <= i + Sk - Sq, `window` (left, right) those with -left <= j - (i + Sk - Sq) <= right, where None
    is no bound. `scale` defaults to 1 / sqrt(D). `sinks` [Hq] are logits, `alibi_slopes` [Hq] or [B, Hq]. With
    `seqused_q` or `seqused_k` (int [B]) the first so many rows of an entry are its sequence; what lies behind is
    neither read nor attended to, and gives 0 and minus infinity. `rows` (int64 [R]) picks query rows, for problems too
    long to check in full.

    Returns out [B, Sq, Hq, Dv] and lse [B, Hq, Sq] (natural logarithm), float64, with R in the place of Sq if `rows` is
    given. ValueError names the argument whose shape does not fit.
    """
    _check_shapes(q, k, v)
    scoring: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "alibi_slopes": alibi_slopes}
    if seqused_q is not None or seqused_k is not None:
        if rows is not None:
            raise ValueError("rows picks from whole sequences: it does not go with seqused_q or seqused_k")
        return _padded(q, k, v, seqused_q, seqused_k, causal=causal, window=window, **scoring)
    visible = visibility(q.shape[1], k.shape[1], causal, window)
    return attend(q, k, v, visible=visible, rows=rows, **scoring)


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    alibi_slopes: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` of packed sequences: q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv]; sequence b has the rows
    `cu_seqlens[b]` to `cu_seqlens[b + 1]` (int [B + 1]), and uses of them what `seqused` says. Returns out [Tq, Hq, Dv]
    and lse [Hq, Tq]; rows of no sequence give 0 and minus infinity."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), -math.inf, dtype=torch.float64, device=q.device)
    starts = [list(itertools.pairwise(cu.tolist())) for cu in (cu_seqlens_q, cu_seqlens_k)]
    for b, ((q0, q1), (k0, k1)) in enumerate(zip(*starts, strict=True)):
        slopes = _slopes_of(b, alibi_slopes)
        one = (x[None, start:end] for x, start, end in ((q, q0, q1), (k, k0, k1), (v, k0, k1)))
        used = (None if x is None else x[b : b + 1] for x in (seqused_q, seqused_k))
        given = options | dict(zip(("seqused_q", "seqused_k"), used, strict=True))
        o, total = attention(*one, alibi_slopes=slopes, **given)
        out[q0:q1], lse[:, q0:q1] = o[0], total[0]
    return out, lse


def attention_paged(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    layout: str = "nhd",
    cu_seqlens_q: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` over a paged cache, whose tokens are taken from their pages one by one: the arguments of
    `fmha.attention_paged`, out and lse of its shapes."""
    if cu_seqlens_q is None and q.ndim == 3:
        out, lse = attention_paged(q[:, None], k_pages, v_pages, page_table, seq_lens, layout=layout, **options)
        return out[:, 0], lse[..., 0]
    value_dim = v_pages.shape[2 if layout == "vllm" else 3]
    out = torch.zeros(*q.shape[:-1], value_dim, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:-1], -math.inf, dtype=torch.float64, device=q.device)
    starts = list(range(len(q) + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    for b, (length, start, end) in enumerate(zip(seq_lens.tolist(), starts[:-1], starts[1:], strict=True)):
        one = b if cu_seqlens_q is None else slice(start, end)
        keys = gather(k_pages, page_table[b], length, layout, values=False)
        values = gather(v_pages, page_table[b], length, layout, values=True)
        o, total = attention(q[one][None], keys[None], values[None], **options)
        out[one], lse[one] = o[0], total[0].T
    return out, lse.transpose(-1, -2)


def gather(pages: torch.Tensor, row: torch.Tensor, length: int, layout: str, values: bool) -> torch.Tensor:
    """The first `length` keys (or values) of the sequence with this row of the page table, [length, Hkv, D], token by
    token."""
    pages = _by_slot(pages, layout, values).flatten(3)
    page = pages.shape[1]
    tokens = [pages[int(row[j // page]), j % page] for j in range(length)]
    return torch.stack(tokens) if tokens else pages.new_empty(0, *pages.shape[2:])


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    layout: str = "nhd",
) -> None:
    """`fmha.write_kv`, in place and token by token; where tokens share a slot, the last of them stays."""
    slots = slot_mapping.flatten().tolist()
    page = k_pages.shape[{"nhd": 1, "hnd": 2, "vllm": 3}[layout]]
    for new, pages, values in ((k, k_pages, False), (v, v_pages, True)):
        by_slot = _by_slot(pages, layout, values)
        for token, slot in zip(new.flatten(0, -3), slots, strict=True):
            if 0 <= slot < len(pages) * page:
                to = by_slot[slot // page, slot % page]
                to.copy_(token.reshape(to.shape))


def _by_slot(pages: torch.Tensor, layout: str, values: bool) -> torch.Tensor:
    """A view [pages, page, Hkv, D] of pages, of vLLM's K [pages, page, Hkv, D / x, x]."""
    if layout == "hnd":
        return pages.transpose(1, 2)
    if layout == "vllm":  # K [pages, Hkv, D / x, page, x], V [pages, Hkv, D, page]
        return pages.permute(0, 3, 1, 2) if values else pages.permute(0, 3, 1, 2, 4)
    return pages


def _padded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    *,
    alibi_slopes: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` over the used part of each batch entry."""
    batch, seqlen_q, heads, _ = q.shape
    out = torch.zeros(batch, seqlen_q, heads, v.shape[3], dtype=torch.float64, device=q.device)
    lse = torch.full((batch, heads, seqlen_q), -math.inf, dtype=torch.float64, device=q.device)
    for b in range(batch):
        sq = seqlen_q if seqused_q is None else int(seqused_q[b])
        sk = k.shape[1] if seqused_k is None else int(seqused_k[b])
        slopes = _slopes_of(b, alibi_slopes)
        one = (q[b : b + 1, :sq], k[b : b + 1, :sk], v[b : b + 1, :sk])
        o, total = attention(*one, alibi_slopes=slopes, **options)
        out[b, :sq], lse[b, :, :sq] = o[0], total[0]
    return out, lse


def _slopes_of(b: int, alibi_slopes: torch.Tensor | None) -> torch.Tensor | None:
    """Those of one sequence, of [Hq] or [B, Hq]."""
    return alibi_slopes[b : b + 1] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes


def visibility(seqlen_q: int, seqlen_k: int, causal: bool, window: Window = NO_WINDOW) -> Visible:
    """Every key, but with `causal` those up to the diagonal that ends in the bottom right corner, and with `window`
    those near it."""
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)

    def visible(rows: torch.Tensor) -> torch.Tensor:
        past = torch.arange(seqlen_k, device=rows.device)[None, :] - (rows + seqlen_k - seqlen_q)[:, None]
        seen = torch.ones_like(past, dtype=torch.bool)
        if left is not None:
            seen &= past >= -left
        if right is not None:
            seen &= past <= right
        return seen

    return visible


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    visible: Visible,
    score: Score | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` under any mask: `visible` says which keys a query sees, `score` changes the scores before they are
    exponentiated."""
    batch, seqlen_q, heads, dim = q.shape
    value_dim = v.shape[3]
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    if rows is None:
        rows = torch.arange(seqlen_q, device=q.device)
    group = heads // max(1, k.shape[2])
    out = torch.zeros(batch, len(rows), heads, value_dim, dtype=torch.float64, device=q.device)
    logits = torch.full((heads,), -math.inf, device=q.device) if sinks is None else sinks.to(q.device)
    lse = logits.double()[None, :, None].expand(batch, heads, len(rows)).clone()
    if lse.numel() == 0 or k.shape[1] == 0:
        return out, lse
    slopes = None if alibi_slopes is None else alibi_slopes.double().expand(batch, heads)
    for b, kv, r in _chunks(batch, k.shape[2], len(rows), group, k.shape[1], max(dim, value_dim)):
        h = slice(kv.start * group, kv.stop * group)
        queries = q[b, rows[r], h].double().transpose(1, 2).unflatten(1, (-1, group))  # [b, kv, group, r, D]
        keys, values = (x[b, :, kv].double().transpose(1, 2) for x in (k, v))  # [b, kv, Sk, D]
        scores = (queries.flatten(2, 3) @ keys.mT).unflatten(2, (group, -1)) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            past = torch.arange(k.shape[1], device=q.device)[None, :] - (rows[r] + k.shape[1] - seqlen_q)[:, None]
            scores = scores - slopes[b, h].unflatten(1, (-1, group))[..., None, None] * past.abs()
        if score is not None:
            scores = score(scores, rows[r])
        o, total = _softmax_times(scores, visible(rows[r]), values, logits[h].double().unflatten(0, (-1, group)))
        out[b, r, h] = o.flatten(1, 2).transpose(1, 2)
        lse[b, h, r] = total.flatten(1, 2)
    return out, lse


def _chunks(
    batch: int, kv_heads: int, rows: int, group: int, seqlen_k: int, dim: int
) -> Iterator[tuple[slice, slice, slice]]:
    """Ranges of batch entries, KV heads and rows whose scores and operands stay within `CHUNK` elements."""
    row = group * (seqlen_k + dim)
    r = max(1, min(rows, CHUNK // row))
    head = r * row + seqlen_k * dim
    h = max(1, min(kv_heads, CHUNK // head))
    b = max(1, min(batch, CHUNK // (h * head)))
    return itertools.product(_ranges(batch, b), _ranges(kv_heads, h), _ranges(rows, r))


def _ranges(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _softmax_times(
    scores: torch.Tensor, visible: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scores) V over the visible keys, and the LSE. scores [b, h, g, r, Sk], values [b, h, Sk, D], sinks
    [h, g], minus infinity for none."""
    masked = scores.masked_fill(~visible, -math.inf)
    sink = sinks[None, :, :, None, None].expand(*masked.shape[:-1], 1)
    maximum = torch.maximum(masked.amax(-1, keepdim=True), sink)
    weights = torch.exp(masked - maximum).masked_fill(~visible, 0.0)
    beside = torch.exp(sink - maximum).masked_fill(sink == -math.inf, 0.0)
    out = _weighted_sum(weights.flatten(2, 3), visible.repeat(scores.shape[2], 1), values).unflatten(
        2, scores.shape[2:4]
    )
    blind = ~visible.any(-1)
    out = (out / (weights.sum(-1, keepdim=True) + beside)).masked_fill(blind[:, None], 0.0)
    return out, torch.logsumexp(torch.cat([masked, sink], -1), -1)


def _weighted_sum(weights: torch.Tensor, visible: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights @ values, but what an invisible key holds (0 * inf is NaN) stays out. weights [b, h, rows, Sk]."""
    finite = torch.isfinite(values)
    out = weights @ values.where(finite, 0.0)
    if finite.all():
        return out
    seen = visible.expand_as(weights).double()
    weighed = (weights > 0).double()
    positive = weighed @ (values == math.inf).double() > 0
    negative = weighed @ (values == -math.inf).double() > 0
    spoilt = seen @ values.isnan().double() + (seen - weighed) @ values.isinf().double() > 0  # 0 * inf spoils too
    out = torch.where(positive, out + math.inf, out)
    out = torch.where(negative, out - math.inf, out)
    return out.masked_fill(spoilt, math.nan)


def attention_numpy(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window: Window = NO_WINDOW,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    seqused_q: np.ndarray | None = None,
    seqused_k: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The same contract on NumPy arrays, one query row at a time: the plainest statement of it, for small problems."""
    _check_shapes(q, k, v)
    batch, seqlen_q, heads, dim = q.shape
    group = heads // max(1, k.shape[2])
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full((batch, heads, seqlen_q), -math.inf)
    for b, h, i in np.ndindex(batch, heads, seqlen_q):
        used_q = seqlen_q if seqused_q is None else int(seqused_q[b])
        used_k = k.shape[1] if seqused_k is None else int(seqused_k[b])
        if i >= used_q:
            continue
        sink = -math.inf if sinks is None else float(sinks[h])
        lse[b, h, i] = sink
        diagonal = i + used_k - used_q
        seen = np.arange(used_k)
        if causal:
            seen = seen[seen <= diagonal]
        if window[0] is not None:
            seen = seen[seen >= diagonal - window[0]]
        if window[1] is not None:
            seen = seen[seen <= diagonal + window[1]]
        if not len(seen):
            continue
        scores = k[b, seen, h // group] @ q[b, i, h] * scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        if alibi_slopes is not None:
            scores = scores - np.broadcast_to(alibi_slopes, (batch, heads))[b, h] * np.abs(diagonal - seen)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            maximum = max(scores.max(), sink) if not np.isnan(scores).any() else math.nan
            weights = np.exp(scores - maximum)
            total = weights.sum() + (0.0 if sink == -math.inf else np.exp(sink - maximum))
            out[b, i, h] = weights @ v[b, seen, h // group] / total
            lse[b, h, i] = maximum + np.log(total) if np.isfinite(maximum) else maximum
    return out, lse


def _check_shapes(q: torch.Tensor | np.ndarray, k: torch.Tensor | np.ndarray, v: torch.Tensor | np.ndarray) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: 4 modes [B, S, H, D] are expected")
    if tuple(k.shape[:3]) != tuple(v.shape[:3]):
        raise ValueError(f"v has shape {tuple(v.shape)}, k has {tuple(k.shape)}: all but their head dims must be equal")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"k has shape {tuple(k.shape)}: batch and head dim must be those of q, {tuple(q.shape)}")
    if q.shape[2] % max(1, k.shape[2]) or (k.shape[2] == 0 and q.shape[2] > 0):
        raise ValueError(f"k has {k.shape[2]} heads: they must divide the {q.shape[2]} heads of q")
