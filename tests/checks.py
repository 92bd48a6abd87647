"""What a right answer is: `check` calls an attention function on a case and compares everything it did with the oracle.

The bound on the output is twice the error of torch's own attention on the same inputs in the same dtype, whichever of
its own backends torch picks (cuDNN is left out: it builds a plan for every shape, for tens of milliseconds). Torch is
sometimes luckier than any kernel that rounds P to 16 bits can be (one visible key: its answer is exact; a mask can send
it to a float32 path), so its error counts as at least half a unit in the last place of the largest output: the error of
an exact result correctly rounded. The bound is thus never below one such unit.

The bound on the LSE is 1e-4 of max(1, |lse|). A score is a sum of D products in a float32 accumulator that tensor cores
truncate (about 2^-22 of the largest term an addition), scores here reach about 100, and base-2 exponentials and
logarithms are good to 2^-22: some 1e-5 in all. One key too many or too few among a thousand moves it by 1e-3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fmha
from fmha import reference
from tests.cases import Case, inputs, lengths, options, outside

POISON = 0x7FA5  # the bits of a NaN in bfloat16 and in float16 alike
GUARD = 64  # poisoned elements on either side of an output
LSE_TOLERANCE = 1e-4
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
TANH = 2.0**-10  # of a softcap, that a capped score may be off by: twice the error of the instruction
MAX_BATCH = 2**15  # torch's kernels put the batch in a mode of the grid that ends at 65,535

Attention = Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Verdict:
    """How far one right answer was from the oracle."""

    error: float  # max |out - oracle|
    allowance: float  # torch's own error, or half a unit in the last place of the largest output
    lse_error: float  # max |lse - oracle| / max(1, |oracle|), 0 where none was asked for

    @property
    def ratio(self) -> float:
        """Error as a multiple of torch's; at most 2 is right."""
        return self.error / self.allowance if self.allowance else 0.0


# -- outputs --------------------------------------------------------------------------------------------------------
def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fills a 16-bit tensor with a NaN whose bits no computation produces."""
    tensor.view(torch.int16).fill_(POISON)
    return tensor


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bitwise equality, NaN included. 16-bit and 32-bit dtypes."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


class Output:
    """A poisoned `out` inside a larger poisoned buffer, which `check_surroundings` expects to find unchanged.

    kind  "given": contiguous; "strided": the inside of a larger tensor; "unaligned": rows and base off 16 bytes
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, kind: str) -> None:
        if kind == "given":
            self.buffer = poison(torch.empty(2 * GUARD + math.prod(shape), dtype=dtype, device=device))
            self.view = self.buffer[GUARD : GUARD + math.prod(shape)].view(shape)
        else:
            b, s, h, d = shape
            margin = {"strided": 8, "unaligned": 3}[kind]
            self.buffer = poison(torch.empty(b, s + 2, h + 2, d + 2 * margin, dtype=dtype, device=device))
            self.view = self.buffer[:, 1 : 1 + s, 1 : 1 + h, margin : margin + d]

    def check_surroundings(self) -> None:
        written = self.view.clone()
        poison(self.view)
        outside = self.buffer.view(torch.int16) != POISON
        assert not outside.any(), f"{int(outside.sum())} elements outside out were written"
        self.view.copy_(written)


def lse_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[B, H, S] or packed [H, T], of an output [B, S, H, D] or [T, H, D]."""
    *batch, rows, heads, _ = shape
    return *batch, heads, rows


def poison_allocator(case: Case, device: torch.device | str) -> None:
    """Leaves NaN in the blocks that the allocator hands out next, for calls that allocate their own outputs."""
    shape = case.shapes[3]
    blocks = [poison(torch.empty(shape, dtype=case.torch_dtype, device=device)) for _ in range(2)]
    blocks += [torch.full(lse_shape(shape), math.nan, device=device) for _ in range(2)]
    del blocks


# -- the comparison -------------------------------------------------------------------------------------------------
def torch_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float | None,
    window: reference.Window = reference.NO_WINDOW,
) -> torch.Tensor:
    """Torch's scaled_dot_product_attention, in [B, S, H, D], causal and windows at the bottom right."""
    if q.shape[0] > MAX_BATCH:
        halves = zip(*(x.split(MAX_BATCH) for x in (q, k, v)), strict=True)
        return torch.cat([torch_attention(*part, causal=causal, scale=scale, window=window) for part in halves])
    group = q.shape[2] // k.shape[2]
    # Copies: a view that is contiguous by chance may be off 16 bytes, which torch's kernels do not check for.
    q, k, v = (x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    mask = None
    if window != reference.NO_WINDOW or (causal and q.shape[2] != k.shape[2]):
        mask = reference.visibility(q.shape[2], k.shape[2], causal, window)(torch.arange(q.shape[2], device=q.device))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale)
    return out.transpose(1, 2)


def eager_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """What torch's own attention has no argument for, step by step in the dtype of q, as models write it."""
    scale, softcap = options.get("scale"), options.get("softcap")
    group, (seqlen_q, seqlen_k) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.mT) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(seqlen_q, device=q.device)
    if (slopes := options.get("alibi_slopes")) is not None:
        own = rows[:, None] + seqlen_k - seqlen_q
        distances = (torch.arange(seqlen_k, device=q.device) - own).abs()
        scores = scores - (slopes.expand(q.shape[0], -1)[:, :, None, None] * distances).to(scores.dtype)
    seen = reference.visibility(seqlen_q, seqlen_k, options["causal"], options["window"])(rows)
    scores = scores.masked_fill(~seen, -math.inf)
    if (sinks := options.get("sinks")) is not None:
        beside = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, beside], dim=3)
    weights = torch.softmax(scores, dim=3)[..., :seqlen_k].nan_to_num(0.0)
    return (weights @ v).transpose(1, 2)


def half_ulp(largest: float, dtype: torch.dtype) -> float:
    """Half a unit in the last place of a number of this size."""
    if largest == 0:
        return 0.0
    return torch.finfo(dtype).eps / 2 * 2.0 ** math.floor(math.log2(largest))


def blind_rows(case: Case, rows: torch.Tensor) -> torch.Tensor:
    """Which of `rows` see no key."""
    seen = reference.visibility(case.seqlen_q, case.seqlen_k, case.causal, case.sides)
    return torch.cat([~seen(part).any(1) for part in rows.split(1024)]) if len(rows) else rows.bool()


def compare(
    case: Case,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    rows: torch.Tensor | None = None,
) -> Verdict:
    """Asserts that `out` (and `lse`, unless None) are right for these inputs; in the picked `rows` only, if given."""
    unwritten = out.contiguous().view(torch.int16) == POISON
    assert not unwritten.any(), f"{int(unwritten.sum())} of {out.numel()} elements of out were never written"
    if case.ragged:
        return _compare_parts(case, qkv, out, lse)
    given = options(case, out.device)
    return _compare(case, qkv, given, out, lse, rows)


def _compare_parts(case: Case, qkv: tuple[torch.Tensor, ...], out: torch.Tensor, lse: torch.Tensor | None) -> Verdict:
    """Every sequence by itself, and nothing in the rows of none."""
    given = {name: x for name, x in options(case, out.device).items() if name not in LENGTHS}
    slopes = given.get("alibi_slopes")
    nobodys = outside(case, "q").to(out.device)
    assert (out[nobodys] == 0).all(), "rows of no sequence are not 0"
    if lse is not None:
        assert (lse.transpose(-1, -2)[nobodys] == -math.inf).all(), "the LSE of rows of no sequence is not -inf"
    if case.packed:
        qkv, out, lse = tuple(x[None] for x in qkv), out[None], None if lse is None else lse[None]
    verdicts = [Verdict(0.0, 0.0, 0.0)]
    for b, (entry, _, queries, keys) in enumerate(lengths(case).parts):
        one = slice(entry, entry + 1)
        part = tuple(x[one, rows] for x, rows in zip(qkv, (queries, keys, keys), strict=True))
        mine = given | ({"alibi_slopes": slopes[b : b + 1]} if slopes is not None and slopes.dim() == 2 else {})
        sizes = {"batch": 1, "seqlen_q": queries.stop - queries.start, "seqlen_k": keys.stop - keys.start}
        short = replace(case, **sizes, ragged="")
        verdicts.append(_compare(short, part, mine, out[one, queries], None if lse is None else lse[one, :, queries]))
    worst = max(verdicts, key=lambda verdict: verdict.ratio)
    return replace(worst, lse_error=max(verdict.lse_error for verdict in verdicts))


def _compare(
    case: Case,
    qkv: tuple[torch.Tensor, ...],
    given: dict[str, Any],
    out: torch.Tensor,
    lse: torch.Tensor | None,
    rows: torch.Tensor | None = None,
) -> Verdict:
    exact, exact_lse = reference.attention(*qkv, **given, rows=rows)
    rows = torch.arange(case.seqlen_q, device=out.device) if rows is None else rows
    blind = blind_rows(case, rows)
    seeing, picked = rows[~blind], exact[:, ~blind]
    assert (out[:, rows[blind]] == 0).all(), f"rows that see no key are not 0 ({rows[blind].tolist()[:3]}...)"
    error = allowance = 0.0
    if picked.numel():
        found = out[:, seeing].double()
        assert found.isfinite().all(), f"out has {int((~found.isfinite()).sum())} elements that are not finite"
        torchs = own_attention(case, qkv, given)[:, seeing].double()
        error, torch_error = ((x - picked).abs().max().item() for x in (found, torchs))
        allowance = max(torch_error, half_ulp(picked.abs().max().item(), case.torch_dtype))
        assert error <= 2 * allowance, (
            f"max |out - oracle| is {error:.3e}, more than twice {allowance:.3e} (torch's is {torch_error:.3e}); "
            f"first at {_where((found - picked).abs() > 2 * allowance)} of rows {seeing.tolist()[:3]}..."
        )
    lse_error = 0.0 if lse is None else _compare_lse(lse, exact_lse, rows, blind, TANH * (case.softcap or 0.0))
    return Verdict(error, allowance, lse_error)


def own_attention(case: Case, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor], given: dict) -> torch.Tensor:
    """Torch's, to compare errors with."""
    if case.softcap is not None or case.sinks or case.alibi:
        return eager_attention(*qkv, **given)
    return torch_attention(*qkv, causal=given["causal"], window=given["window"], scale=given["scale"])


def _compare_lse(lse: torch.Tensor, exact: torch.Tensor, rows: torch.Tensor, blind: torch.Tensor, more: float) -> float:
    """`lse` [B, H, Sq] against `exact` [B, H, R] at `rows` [R], of which `blind` ones see no key; by `more` than usual
    they may differ."""
    assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
    found = lse[..., rows]
    assert found.shape == exact.shape, f"lse is {tuple(lse.shape)}"
    alike = torch.isclose(found[..., blind], exact[..., blind].float(), rtol=1e-6, atol=0.0)
    assert alike.all(), "the LSE of rows that see no key is not minus infinity, or the sink"
    found, exact = found[..., ~blind], exact[..., ~blind]
    if found.numel() == 0:
        return 0.0
    error = (((found.double() - exact).abs() - more) / exact.abs().clamp(min=1.0)).nan_to_num(math.inf)
    worst = max(0.0, error.max().item())
    assert worst <= LSE_TOLERANCE, (
        f"LSE is off by {worst:.3e} of max(1, |lse|), first at {_where(error > LSE_TOLERANCE)}"
    )
    return worst


def _where(wrong: torch.Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> Any:
    """`fmha.attention`, or `fmha.attention_varlen` where sequences are packed."""
    function = fmha.attention if "cu_seqlens_q" not in given else fmha.attention_varlen
    return function(q, k, v, **given)


def call(
    case: Case, attention: Attention, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls `attention` the way the case says, on poisoned outputs, and checks all but the numbers."""
    device = qkv[0].device
    given = options(case, device) | {"window": case.window, "return_lse": case.return_lse}
    target = None
    if case.out == "new":
        poison_allocator(case, device)
    else:
        target = Output(case.shapes[3], case.torch_dtype, device, case.out)
        given["out"] = target.view
    result = attention(
        *qkv, **{name: value for name, value in given.items() if value is not None and value != reference.NO_WINDOW}
    )
    out, lse = result if case.return_lse else (result, None)
    assert isinstance(out, torch.Tensor), f"out is a {type(out).__name__}"
    assert out.shape == case.shapes[3] and out.dtype == case.torch_dtype, f"out is {out.dtype} {tuple(out.shape)}"
    if target is not None:
        assert out.data_ptr() == target.view.data_ptr() and out.stride() == target.view.stride(), "out= was not used"
        target.check_surroundings()
    return out, lse


def check(case: Case, attention: Attention, device: torch.device | str, seed: int = 0) -> Verdict:
    """Asserts that `attention`, a function with the signature of `fmha.attention`, is right on `case`, and twice the
    same to the bit, and that it leaves its inputs alone."""
    qkv = inputs(case, device, seed)
    before = [x.clone() for x in qkv]
    out, lse = call(case, attention, qkv)
    for name, x, old in zip("qkv", qkv, before, strict=True):
        assert same_bits(x, old), f"the call changed {name}"
    verdict = compare(case, qkv, out, lse)
    again, lse_again = call(case, attention, qkv)
    assert same_bits(out, again), "a second run gave other bits in out"
    assert lse is None or lse_again is None or same_bits(lse, lse_again), "a second run gave other bits in lse"
    return verdict
