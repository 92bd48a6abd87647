"""Merging attention over parts of the keys by the parts' LSEs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmha.jit.launch import from_dlpack, to_library_of


def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    """The attention over two disjoint sets of keys, from the attention over each.

    out_a, out_b  [B, S, H, D], or [T, H, D] of packed sequences, of one floating dtype and device
    lse_a, lse_b  [B, H, S], or [H, T]: natural logarithms, as `fmha.attention` returns them

    Returns (out, lse) in the dtypes of out_a and lse_a. With w = exp(lse_a - max), and likewise for b,

        out = (w_a out_a + w_b out_b) / (w_a + w_b)        lse = max + log(w_a + w_b)

    in float32 (float64 if an argument is). A part that sees no key (0, minus infinity) changes nothing, and two of them
    give (0, minus infinity). Associative up to rounding, so any number of parts can be merged. NaN spreads, and the
    gradient flows.

    The arrays may come from any library that speaks DLPack; the results go back to out_a's, as in `fmha.attention`.

    Raises TypeError for what is no such array, ValueError for shapes, dtypes or devices that do not fit together.

    Online softmax: Milakov and Gimelshein, 2018; merging partial results: FlashDecoding, Dao et al., 2023.
    """
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    merged = _merge(*(from_dlpack(name, array) for name, array in given.items()))
    return to_library_of(out_a, merged[0]), to_library_of(out_a, merged[1])


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    _check(out_a, lse_a, out_b, lse_b)
    wide = torch.float64 if torch.float64 in (out_a.dtype, lse_a.dtype) else torch.float32
    a, b = lse_a.to(wide), lse_b.to(wide)
    maximum = torch.maximum(a, b)
    finite = maximum.where(maximum != -torch.inf, 0.0)  # neither part sees a key
    weight_a, weight_b = torch.exp(a - finite), torch.exp(b - finite)
    total = weight_a + weight_b
    parts = [
        (_beside_heads(weight) * out.to(wide)).where(_beside_heads(weight) != 0, 0.0)  # 0 * NaN of a part without keys
        for weight, out in ((weight_a, out_a), (weight_b, out_b))
    ]
    out = (parts[0] + parts[1]) / _beside_heads(total.where(total != 0, 1.0))
    return out.to(out_a.dtype), (finite + torch.log(total)).to(lse_a.dtype)


def _beside_heads(row: Tensor) -> Tensor:
    """[..., H, S] as [..., S, H, 1]."""
    return row.transpose(-1, -2).unsqueeze(-1)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    if out_a.ndim not in (3, 4):
        raise ValueError(f"out_a.shape is {list(out_a.shape)}; [B, S, H, D] or [T, H, D] is needed")
    *batch, seqlen, heads, _ = out_a.shape
    for name, tensor, shape, like in (
        ("lse_a", lse_a, (*batch, heads, seqlen), lse_a),
        ("out_b", out_b, tuple(out_a.shape), out_a),
        ("lse_b", lse_b, (*batch, heads, seqlen), lse_a),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name}.shape is {list(tensor.shape)}; beside out_a, {list(out_a.shape)}, it must be {list(shape)}"
            )
        if tensor.dtype != like.dtype or not tensor.is_floating_point():
            raise ValueError(f"{name}.dtype is {tensor.dtype}; a floating one is needed, and {like.dtype} here")
        if tensor.device != out_a.device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on out_a's device, {out_a.device}")
