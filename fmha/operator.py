"""`fmha.attention` and `fmha.attention_varlen` as two operators of torch, `fmha::attention` and
`fmha::attention_with_lse`.

`torch.compile` cannot trace a launch, so while it traces, the functions call one of these: opaque, with a shape and a
dtype for what it returns. Eager calls go past them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? alibi_slopes, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? seqused_q, Tensor? seqused_k, bool causal, SymInt? left, SymInt? right, float? scale, float? softcap)"
)


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    *vectors: Tensor | None,
    causal: bool,
    window: tuple[int | None, int | None],
    scale: float | None,
    softcap: float | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """What `fmha.attention` does while it is traced: one operator, and a copy into `out` where there is one. `vectors`
    are the tensors of the operators behind q, k and v."""
    options = causal, *window, scale, softcap
    lse = None
    if return_lse:
        o, lse = torch.ops.fmha.attention_with_lse(q, k, v, *vectors, *options)
    else:
        o = torch.ops.fmha.attention(q, k, v, *vectors, *options)
    o = o if out is None else out.copy_(o)
    return o if lse is None else (o, lse)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    alibi_slopes: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    causal: bool,
    left: int | None,
    right: int | None,
    scale: float | None,
    softcap: float | None,
    return_lse: bool = False,
) -> Any:
    import fmha  # which imports this module

    given: dict[str, Any] = {"causal": causal, "window": (left, right), "scale": scale, "softcap": softcap}
    given |= {"sinks": sinks, "alibi_slopes": alibi_slopes, "seqused_q": seqused_q, "seqused_k": seqused_k}
    given |= {"return_lse": return_lse}
    if cu_seqlens_q is None:
        return fmha.attention(q, k, v, **given)
    return fmha.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, **given)


@torch.library.custom_op("fmha::attention", mutates_args=(), schema=f"{ARGUMENTS} -> Tensor")
def _attention(*arguments: Any) -> Tensor:
    return _run(*arguments)


@torch.library.custom_op("fmha::attention_with_lse", mutates_args=(), schema=f"{ARGUMENTS} -> (Tensor, Tensor)")
def _attention_with_lse(*arguments: Any) -> tuple[Tensor, Tensor]:
    return _run(*(*arguments, True))


@_attention.register_fake
def _empty(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((*q.shape[:-1], v.shape[-1]))


@_attention_with_lse.register_fake
def _empty_with_lse(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *batch, seqlen_q, heads, _ = q.shape
    return _empty(q, k, v), q.new_empty((*batch, heads, seqlen_q), dtype=torch.float32)
