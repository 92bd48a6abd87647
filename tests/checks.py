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
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fmha import reference
from tests.cases import Case, inputs

POISON = 0x7FA5  # the bits of a NaN in bfloat16 and in float16 alike
GUARD = 64  # poisoned elements on either side of an output
LSE_TOLERANCE = 1e-4
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
        b, s, h, d = shape
        if kind == "given":
            self.buffer = poison(torch.empty(2 * GUARD + math.prod(shape), dtype=dtype, device=device))
            self.view = self.buffer[GUARD : GUARD + math.prod(shape)].view(shape)
        else:
            margin = {"strided": 8, "unaligned": 3}[kind]
            self.buffer = poison(torch.empty(b, s + 2, h + 2, d + 2 * margin, dtype=dtype, device=device))
            self.view = self.buffer[:, 1 : 1 + s, 1 : 1 + h, margin : margin + d]

    def check_surroundings(self) -> None:
        written = self.view.clone()
        poison(self.view)
        outside = self.buffer.view(torch.int16) != POISON
        assert not outside.any(), f"{int(outside.sum())} elements outside out were written"
        self.view.copy_(written)


def poison_allocator(case: Case, device: torch.device | str) -> None:
    """Leaves NaN in the blocks that the allocator hands out next, for calls that allocate their own outputs."""
    shape = case.shapes[0]
    blocks = [poison(torch.empty(shape, dtype=case.torch_dtype, device=device)) for _ in range(2)]
    blocks += [torch.full((shape[0], shape[2], shape[1]), math.nan, device=device) for _ in range(2)]
    del blocks


# -- the comparison -------------------------------------------------------------------------------------------------
def torch_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float | None
) -> torch.Tensor:
    """Torch's scaled_dot_product_attention, in [B, S, H, D], causal at the bottom right."""
    if q.shape[0] > MAX_BATCH:
        halves = zip(*(x.split(MAX_BATCH) for x in (q, k, v)), strict=True)
        return torch.cat([torch_attention(*part, causal=causal, scale=scale) for part in halves])
    group = q.shape[2] // k.shape[2]
    # Copies: a view that is contiguous by chance may be off 16 bytes, which torch's kernels do not check for.
    q, k, v = (x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    mask = None
    if causal and q.shape[2] != k.shape[2]:
        mask = reference.visibility(q.shape[2], k.shape[2], True)(torch.arange(q.shape[2], device=q.device))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None, scale=scale)
    return out.transpose(1, 2)


def half_ulp(largest: float, dtype: torch.dtype) -> float:
    """Half a unit in the last place of a number of this size."""
    if largest == 0:
        return 0.0
    return torch.finfo(dtype).eps / 2 * 2.0 ** math.floor(math.log2(largest))


def blind_rows(case: Case) -> int:
    """How many leading rows see no key."""
    if case.seqlen_k == 0:
        return case.seqlen_q
    return min(case.seqlen_q, max(0, case.seqlen_q - case.seqlen_k)) if case.causal else 0


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
    exact, exact_lse = reference.attention(*qkv, causal=case.causal, scale=case.scale, rows=rows)
    rows = torch.arange(case.seqlen_q, device=out.device) if rows is None else rows
    blind = rows < blind_rows(case)
    seeing, picked = rows[~blind], exact[:, ~blind]
    assert (out[:, rows[blind]] == 0).all(), f"rows that see no key are not 0 (the first {blind_rows(case)})"
    error = allowance = 0.0
    if picked.numel():
        found = out[:, seeing].double()
        assert found.isfinite().all(), f"out has {int((~found.isfinite()).sum())} elements that are not finite"
        torchs = torch_attention(*qkv, causal=case.causal, scale=case.scale)[:, seeing].double()
        error, torch_error = ((x - picked).abs().max().item() for x in (found, torchs))
        allowance = max(torch_error, half_ulp(picked.abs().max().item(), case.torch_dtype))
        assert error <= 2 * allowance, (
            f"max |out - oracle| is {error:.3e}, more than twice {allowance:.3e} (torch's is {torch_error:.3e}); "
            f"first at {_where((found - picked).abs() > 2 * allowance)} of rows {seeing.tolist()[:3]}..."
        )
    lse_error = 0.0 if lse is None else _compare_lse(lse, exact_lse, rows, blind)
    return Verdict(error, allowance, lse_error)


def _compare_lse(lse: torch.Tensor, exact: torch.Tensor, rows: torch.Tensor, blind: torch.Tensor) -> float:
    """`lse` [B, H, Sq] against `exact` [B, H, R] at `rows` [R], of which `blind` ones see no key."""
    assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
    found = lse[..., rows]
    assert found.shape == exact.shape, f"lse is {tuple(lse.shape)}"
    assert (found[..., blind] == -math.inf).all(), "the LSE of rows that see no key is not minus infinity"
    found, exact = found[..., ~blind], exact[..., ~blind]
    if found.numel() == 0:
        return 0.0
    error = ((found.double() - exact).abs() / exact.abs().clamp(min=1.0)).nan_to_num(math.inf)
    worst = error.max().item()
    assert worst <= LSE_TOLERANCE, (
        f"LSE is off by {worst:.3e} of max(1, |lse|), first at {_where(error > LSE_TOLERANCE)}"
    )
    return worst


def _where(wrong: torch.Tensor) -> tuple[int, ...]:
    return tuple(wrong.nonzero()[0].tolist())


def call(
    case: Case, attention: Attention, qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Calls `attention` the way the case says, on poisoned outputs, and checks all but the numbers."""
    device = qkv[0].device
    options: dict[str, object] = {"causal": case.causal, "scale": case.scale, "return_lse": case.return_lse}
    target = None
    if case.out == "new":
        poison_allocator(case, device)
    else:
        target = Output(case.shapes[0], case.torch_dtype, device, case.out)
        options["out"] = target.view
    result = attention(*qkv, **options)
    out, lse = result if case.return_lse else (result, None)
    assert isinstance(out, torch.Tensor), f"out is a {type(out).__name__}"
    assert out.shape == case.shapes[0] and out.dtype == case.torch_dtype, f"out is {out.dtype} {tuple(out.shape)}"
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
