"""The float64 oracle: exact attention, written to be read, that every test and benchmark compares with.

    out = softmax(scale * Q K^T + mask) V        lse = log(sum(exp(scale * Q K^T + mask)))

A key that a query does not see takes no part in either sum, whatever it holds; a query that sees no key gets 0 and an
LSE of minus infinity. Infinities and NaN otherwise spread as in a plain softmax. Which keys a query sees is a dense
[rows, Sk] matrix and what becomes of a score a function of it, so another mask or a softcap is one more function here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

Visible = Callable[[torch.Tensor], torch.Tensor]
"""Query indices [rows] -> bool [rows, Sk]: who sees whom."""

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Scaled scores [b, h, group, rows, Sk] and their query indices [rows] -> scores of the same shape."""

CHUNK = 2**25  # elements of the widest float64 temporary: 256 MiB, a handful of which are alive at a time


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in float64, on the device of the inputs.

    q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D], any floating dtype and strides; Hq is a multiple of Hkv, and query head
    `h` reads KV head `h // (Hq // Hkv)`. `causal` is aligned at the bottom right: query i sees the keys
    j <= i + Sk - Sq. `scale` defaults to 1 / sqrt(D). `rows` (int64 [R]) picks query rows, for problems too long to
    check in full.

    Returns out [B, Sq, Hq, D] and lse [B, Hq, Sq] (natural logarithm), float64, with R in the place of Sq if `rows` is
    given. ValueError names the argument whose shape does not fit.
    """
    _check_shapes(q, k, v)
    return attend(q, k, v, visible=visibility(q.shape[1], k.shape[1], causal), scale=scale, rows=rows)


def visibility(seqlen_q: int, seqlen_k: int, causal: bool) -> Visible:
    """Every key, or with `causal` those up to the diagonal that ends in the bottom right corner."""

    def visible(rows: torch.Tensor) -> torch.Tensor:
        keys = torch.arange(seqlen_k, device=rows.device)
        hi = rows + 1 + seqlen_k - seqlen_q if causal else torch.full_like(rows, seqlen_k)
        return keys[None, :] < hi[:, None]

    return visible


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    visible: Visible,
    score: Score | None = None,
    scale: float | None = None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` under any mask: `visible` says which keys a query sees, `score` changes the scaled scores."""
    batch, seqlen_q, heads, dim = q.shape
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    if rows is None:
        rows = torch.arange(seqlen_q, device=q.device)
    group = heads // max(1, k.shape[2])
    out = torch.zeros(batch, len(rows), heads, dim, dtype=torch.float64, device=q.device)
    lse = torch.full((batch, heads, len(rows)), -math.inf, dtype=torch.float64, device=q.device)
    if out.numel() == 0 or k.shape[1] == 0:
        return out, lse
    for b, kv, r in _chunks(batch, k.shape[2], len(rows), group, k.shape[1], dim):
        h = slice(kv.start * group, kv.stop * group)
        queries = q[b, rows[r], h].double().transpose(1, 2).unflatten(1, (-1, group))  # [b, kv, group, r, D]
        keys, values = (x[b, :, kv].double().transpose(1, 2) for x in (k, v))  # [b, kv, Sk, D]
        scores = (queries.flatten(2, 3) @ keys.mT).unflatten(2, (group, -1)) * scale
        if score is not None:
            scores = score(scores, rows[r])
        o, total = _softmax_times(scores, visible(rows[r]), values)
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
    scores: torch.Tensor, visible: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scores) V over the visible keys, and the LSE. scores [b, h, g, r, Sk], values [b, h, Sk, D]."""
    masked = scores.masked_fill(~visible, -math.inf)
    weights = torch.exp(masked - masked.amax(-1, keepdim=True)).masked_fill(~visible, 0.0)
    out = _weighted_sum(weights.flatten(2, 3), visible.repeat(scores.shape[2], 1), values).unflatten(
        2, scores.shape[2:4]
    )
    blind = ~visible.any(-1)
    out = (out / weights.sum(-1, keepdim=True)).masked_fill(blind[:, None], 0.0)
    return out, torch.logsumexp(masked, -1)


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
    q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False, scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The same contract on NumPy arrays, one query row at a time: the plainest statement of it, for small problems."""
    _check_shapes(q, k, v)
    batch, seqlen_q, heads, dim = q.shape
    seqlen_k, group = k.shape[1], heads // max(1, k.shape[2])
    scale = 1.0 / math.sqrt(dim) if scale is None else scale
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    lse = np.full((batch, heads, seqlen_q), -math.inf)
    for b, h, i in np.ndindex(batch, heads, seqlen_q):
        hi = i + 1 + seqlen_k - seqlen_q if causal else seqlen_k
        if hi <= 0:
            continue
        scores = k[b, :hi, h // group] @ q[b, i, h] * scale
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            maximum = scores.max()
            weights = np.exp(scores - maximum)
            out[b, i, h] = weights @ v[b, :hi, h // group] / weights.sum()
            lse[b, h, i] = maximum + np.log(weights.sum()) if np.isfinite(maximum) else maximum
    return out, lse


def _check_shapes(q: torch.Tensor | np.ndarray, k: torch.Tensor | np.ndarray, v: torch.Tensor | np.ndarray) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: 4 modes [B, S, H, D] are expected")
    if tuple(k.shape) != tuple(v.shape):
        raise ValueError(f"v has shape {tuple(v.shape)}, k has {tuple(k.shape)}: they must be equal")
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"k has shape {tuple(k.shape)}: batch and head dim must be those of q, {tuple(q.shape)}")
    if q.shape[2] % max(1, k.shape[2]) or (k.shape[2] == 0 and q.shape[2] > 0):
        raise ValueError(f"k has {k.shape[2]} heads: they must divide the {q.shape[2]} heads of q")
