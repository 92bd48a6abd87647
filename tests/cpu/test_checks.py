"""The checks that GPU tests rest on accept a kernel's arithmetic and object to every mistake planted here."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import cutlass
import pytest
import torch

from fmha import reference
from fmha.kernels.sm90 import softmax
from schedules.forward import FLOOR, LARGE_PART
from schedules.tiling import rivals
from tests.cases import CASES, GROWING, RAGGED, SHARP, Case, inputs, lengths, outside
from tests.checks import LENGTHS, Output, check, compare, half_ulp, poison, same_bits

TILE_N = 128
ELEMENT = {torch.bfloat16: cutlass.BFloat16, torch.float16: cutlass.Float16}
RESCALE_ABOVE = rivals(128, "sm_90a", lse=True)[0].config.rescale_above  # log2


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Of many small matrices several threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def flash(q, k, v, *, causal=False, window=(-1, -1), scale=None, out=None, return_lse=False, visible=None):
    """A kernel's arithmetic on the CPU: float32 accumulators, P rounded to 16 bits, base 2, tile after tile. With an
    LSE the row sums are of the weights before they are rounded, and rows are rescaled only where their maximum grew by
    more than a threshold. Without, they are of the rounded ones, and after the first tile only the weights say whether
    a row's reference must move."""
    attend = _with_lse if return_lse else _optimistic
    scale = (q.shape[3] ** -0.5 if scale is None else scale) * math.log2(math.e)
    group = q.shape[2] // k.shape[2]
    queries = q.float().transpose(1, 2)
    keys, values = (x.float().transpose(1, 2).repeat_interleave(group, 1) for x in (k, v))
    sides = tuple(None if side == -1 else side for side in window)
    seen = (visible or reference.visibility(q.shape[1], k.shape[1], causal, sides))(torch.arange(q.shape[1]))
    tiles = []
    for start in range(0, k.shape[1], TILE_N):
        tile = slice(start, min(start + TILE_N, k.shape[1]))
        scores = (queries @ keys[:, :, tile].mT).masked_fill(~seen[:, tile], -math.inf)
        tiles.append((scores * scale, values[:, :, tile]))
    nothing = torch.zeros_like(queries), torch.zeros_like(queries[..., :1]), torch.tensor(FLOOR)
    acc, total, maximum = attend(tiles, q.dtype) if tiles else nothing
    blind = ~seen.any(-1)
    result = (acc / total).masked_fill(blind[:, None], 0.0).transpose(1, 2).to(q.dtype)
    lse = ((maximum + total.log2()) * math.log(2.0)).masked_fill(blind[:, None], -math.inf).squeeze(-1)
    out = result if out is None else out.copy_(result)
    return (out, lse) if return_lse else out


def _with_lse(tiles, dtype):
    maximum, total, acc = FLOOR, 0.0, 0.0
    for scores, values in tiles:
        found = scores.amax(-1, keepdim=True).clamp(min=FLOOR)
        grown = torch.where(found > maximum + RESCALE_ABOVE, found, maximum)
        shrink, p = torch.exp2(maximum - grown), torch.exp2(scores - grown)
        total = total * shrink + p.sum(-1, keepdim=True)
        acc, maximum = acc * shrink + p.to(dtype).float() @ values, grown
    return acc, total, maximum


def _optimistic(tiles, dtype):
    limit, most = 2.0**softmax.LIMIT, 2.0 ** softmax.MOST[ELEMENT[dtype]]
    scores = tiles[0][0]
    reference = (scores.amax(-1, keepdim=True) - softmax.LIMIT).clamp(min=FLOOR)
    first = torch.exp2(scores - reference).sum(-1, keepdim=True)
    reference = reference + _steps(limit + (first - limit) * len(tiles), torch.full_like(first, limit))
    total, acc = torch.zeros_like(first), 0.0
    for nth, (scores, values) in enumerate(tiles):
        weights = torch.exp2(scores - reference)
        p, factor, top = weights.to(dtype).float(), torch.ones_like(total), weights.amax(-1, keepdim=True)
        if nth > 0:
            mends = top.to(dtype) >= limit
            steps = torch.where(mends, _steps(total, top), 0.0)
            exact = torch.where(mends & (top > total * LARGE_PART), top.to(dtype).float() / top, 1.0)
            anew = scores.amax(-1, keepdim=True) - softmax.LIMIT
            p = torch.where(top > most, torch.exp2(scores - anew).to(dtype).float(), p * torch.exp2(-steps))
            factor = torch.where(top > most, torch.exp2(reference - anew), exact * torch.exp2(-steps))
            reference = torch.where(top > most, anew, reference + steps - exact.log2())
        acc, total = acc * factor + p @ values, total * factor + p.sum(-1, keepdim=True)
    return acc, total, reference


def _steps(total, top):
    """Powers of two that a row's weights must go down."""
    most = torch.maximum(total * (1.5 * LARGE_PART), top).clamp(min=2.0**softmax.LIMIT)
    return most.log2().floor() - softmax.LIMIT


QUICK = [case for case in CASES if case.batch * case.heads_q * case.seqlen_q * case.seqlen_k < 2**17]
SAMPLE = random.Random(0).sample(QUICK, 40)


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: case.name)
def test_a_kernels_arithmetic_passes(case: Case) -> None:
    verdict = check(case, flash, "cpu")
    assert verdict.ratio <= 2.0
    assert verdict.lse_error == 0.0 or case.return_lse


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("case", SHARP + GROWING, ids=lambda case: case.name)
def test_sharp_and_growing_inputs_pass(case: Case, lse: bool) -> None:
    """With LSEs they test the rescale threshold: P at a row's maximum is exact only where the row was rescaled to it.
    Without, that a weight which was not foreseen is mended."""
    check(replace(case, seqlen_q=64, return_lse=lse), flash, "cpu")


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("exponent", [-25, 25])
def test_small_and_large_values_keep_their_precision(exponent: int, lse: bool) -> None:
    """V of 1e-25, which weights with too much headroom push out of float32's normal numbers, and of 1e25."""
    case = Case(1, 64, 300, 2, 2, 64, return_lse=lse)
    q, k, v = inputs(case, "cpu")
    v = v * 10.0**exponent
    out = flash(q, k, v, return_lse=lse)
    compare(case, (q, k, v), *(out if lse else (out, None)))


# -- planted mistakes -------------------------------------------------------------------------------------------------
def _drops_last_key(q, k, v, **kw):
    return flash(
        q, k, v, visible=lambda rows: _visible(q, k, kw, rows) & (torch.arange(k.shape[1]) < k.shape[1] - 1), **kw
    )


def _sees_one_key_more(q, k, v, **kw):
    return flash(q, k, v, visible=lambda rows: _visible(q, k, kw, rows + 1), **kw)


def _top_left_causal(q, k, v, **kw):
    return flash(q, k, v, visible=reference.visibility(k.shape[1], k.shape[1], kw["causal"]), **kw)


def _window_one_key_longer(q, k, v, *, window, **kw):
    return flash(q, k, v, window=(window[0] + 1, window[1]), **kw)


def _no_window(q, k, v, *, window, **kw):
    return flash(q, k, v, **kw)


def _minus_one_is_a_number(q, k, v, *, window, **kw):
    return flash(q, k, v, visible=reference.visibility(q.shape[1], k.shape[1], kw["causal"], window), **kw)


def _visible(q, k, kw, rows):
    return reference.visibility(q.shape[1], k.shape[1], kw["causal"])(rows)


def _scale_off_by_1_percent(q, k, v, **kw):
    return flash(q, k, v, **{**kw, "scale": 1.01 * (kw.get("scale") or q.shape[3] ** -0.5)})


def _heads_interleaved(q, k, v, **kw):
    group = q.shape[2] // k.shape[2]
    return flash(q, *(x.repeat(1, 1, group, 1) for x in (k, v)), **kw)


def _nan_in_blind_rows(q, k, v, **kw):
    out, lse = flash(q, k, v, **kw)
    blind = max(0, q.shape[1] - k.shape[1])
    out[:, :blind] = math.nan
    return out, lse


def _lse_of_blind_rows_finite(q, k, v, **kw):
    out, lse = flash(q, k, v, **kw)
    return out, lse.clamp(min=FLOOR)


def _lse_in_base_2(q, k, v, **kw):
    out, lse = flash(q, k, v, **kw)
    return out, lse * math.log2(math.e)


def _leaves_one_element(q, k, v, **kw):
    out, lse = flash(q, k, v, **kw)
    poison(out[-1, -1, -1, -1:])
    return out, lse


def _writes_past_the_end(q, k, v, **kw):
    out, lse = flash(q, k, v, **kw)
    out.as_strided(
        (1,), (1,), out.storage_offset() + (out.shape[0] - 1) * out.stride(0) + out.shape[1] * out.stride(1)
    ).fill_(0)
    return out, lse


def _ignores_out(q, k, v, *, out, **kw):
    return flash(q, k, v, **kw)


def _wrong_dtype(q, k, v, *, out=None, **kw):
    result, lse = flash(q, k, v, **kw)
    return result.float(), lse


def _changes_q(q, k, v, **kw):
    result = flash(q, k, v, **kw)
    q[0, 0, 0, 0] += 1
    return result


def _one_row_of_another_batch(q, k, v, **kw):
    out, lse = flash(q, k, v, **kw)
    out[1, -1] = out[0, -1]
    return out, lse


def _rounds_p_to_6_bits(q, k, v, **kw):
    coarse = torch.round(v.float() * 32) / 32  # errors as large as those of a coarser P
    return flash(q, k, coarse.to(v.dtype), **kw)


class _Unsteady:
    """Another bit at every call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, q, k, v, **kw):
        out, lse = flash(q, k, v, **kw)
        self.calls += 1
        out.view(torch.int16)[0, 0, 0, 0] ^= self.calls % 2
        return out, lse


DENSE = Case(2, 70, 259, 4, 2, 64, out="given")
CAUSAL = Case(2, 70, 259, 4, 2, 64, causal=True, out="strided")
BLIND = Case(2, 259, 70, 4, 2, 64, causal=True, out="given")
WINDOW = Case(2, 70, 259, 4, 2, 64, window=(100, -1), out="given")
NARROW = Case(2, 140, 259, 4, 2, 64, causal=True, window=(3, None), out="given")
BLIND_AT_THE_END = Case(2, 70, 259, 4, 2, 64, window=(-30, None), out="given")


@pytest.mark.parametrize(
    ("case", "mistake", "complaint"),
    [
        (DENSE, _drops_last_key, "oracle"),
        (CAUSAL, _sees_one_key_more, "oracle"),
        (BLIND, _sees_one_key_more, "not 0|oracle"),
        (CAUSAL, _top_left_causal, "oracle"),
        (BLIND, _top_left_causal, "not 0"),
        (WINDOW, _window_one_key_longer, "oracle"),
        (NARROW, _window_one_key_longer, "oracle"),
        (BLIND_AT_THE_END, _window_one_key_longer, "not 0"),
        (WINDOW, _no_window, "oracle"),
        (BLIND_AT_THE_END, _no_window, "not 0"),
        (WINDOW, _minus_one_is_a_number, "oracle"),
        (DENSE, _scale_off_by_1_percent, "oracle"),
        (DENSE, _heads_interleaved, "oracle"),
        (BLIND, _nan_in_blind_rows, "not 0"),
        (BLIND, _lse_of_blind_rows_finite, "minus infinity"),
        (DENSE, _lse_in_base_2, "LSE is off"),
        (CAUSAL, _leaves_one_element, "1 of .* never written"),
        (DENSE, _writes_past_the_end, "1 elements outside out"),
        (CAUSAL, _writes_past_the_end, "1 elements outside out"),
        (DENSE, _ignores_out, "out= was not used"),
        (DENSE, _wrong_dtype, "out is torch.float32"),
        (DENSE, _changes_q, "changed q"),
        (DENSE, _one_row_of_another_batch, "oracle"),
        (DENSE, _rounds_p_to_6_bits, "oracle"),
        (DENSE, _Unsteady(), "other bits in out"),
    ],
)
def test_a_planted_mistake_is_seen(case: Case, mistake, complaint: str) -> None:
    check(case, flash, "cpu")
    with pytest.raises(AssertionError, match=complaint):
        check(case, mistake, "cpu")


def test_a_call_that_allocates_leaves_poison_unwritten_if_it_forgets_an_element() -> None:
    with pytest.raises(AssertionError, match="never written|not finite"):
        check(replace(DENSE, out="new"), _leaves_one_element, "cpu")


# -- ragged batches ---------------------------------------------------------------------------------------------------
def _exact(q, k, v, *, window=(-1, -1), return_lse=False, **kw):
    sides = tuple(None if side == -1 else side for side in window)
    out, lse = reference.attention(q, k, v, window=sides, **kw)
    return (out.to(q.dtype), lse.float()) if return_lse else out.to(q.dtype)


def parts_of(q, k, given):
    """Entry, queries and keys of each sequence, of tensors [B, S, H, D], as the arguments say."""
    count = next(len(given[name]) - name.startswith("cu") for name in LENGTHS if name in given)
    spans = []
    for name, x in (("q", q), ("k", k)):
        cu, used = given.get(f"cu_seqlens_{name}"), given.get(f"seqused_{name}")
        starts = [0] * count if cu is None else cu[:-1].tolist()
        sizes = [x.shape[1]] * count if cu is None else cu.diff().tolist()
        sizes = sizes if used is None else used.tolist()
        spans.append([slice(start, start + size) for start, size in zip(starts, sizes, strict=True)])
    entries = [0] * count if "cu_seqlens_q" in given else range(count)
    return list(zip(entries, *spans, strict=True))


def ragged(change=lambda parts: parts, function=flash, spoil=lambda out, lse, nobodys: None):
    """An attention function that calls `function` for each sequence by itself: for those that `change` says."""

    def attention(q, k, v, *, out=None, return_lse=False, alibi_slopes=None, **given):
        is_packed = "cu_seqlens_q" in given
        q, k, v = (x[None] if is_packed else x for x in (q, k, v))
        parts = parts_of(q, k, given)
        options = {name: x for name, x in given.items() if name not in LENGTHS}
        result = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
        lse, nobodys = torch.full(q.shape[:3], -math.inf), torch.ones(q.shape[:2], dtype=torch.bool)
        for b, (entry, queries, keys) in enumerate(change(parts)):
            one = (x[entry : entry + 1, rows] for x, rows in ((q, queries), (k, keys), (v, keys)))
            mine = options | ({} if alibi_slopes is None else {"alibi_slopes": alibi_slopes[b : b + 1]})
            found, *total = function(*one, return_lse=True, **mine) if return_lse else (function(*one, **mine),)
            result[entry, queries] = found[0]
            if total:
                lse[entry, queries] = total[0][0].T
        for entry, queries, _ in parts:
            nobodys[entry, queries] = False
        spoil(result, lse, nobodys)
        result, lse = (x[0] if is_packed else x for x in (result, lse))
        result = result if out is None else out.copy_(result)
        return (result, lse.transpose(-1, -2).contiguous()) if return_lse else result

    return attention


def _exchanged(parts):
    """The keys of the two sequences with the most queries."""
    a, b, *rest = sorted(parts, key=lambda part: part[1].start - part[1].stop)
    return [(*a[:2], b[2]), (*b[:2], a[2]), *rest] if a[0] == b[0] else [(b[0], a[1], b[2]), (a[0], b[1], a[2]), *rest]


def _one_key(more):
    """Everybody sees one more, of a neighbour or of nobody, or one less."""

    def change(parts):
        return [(entry, q, slice(k.start, max(k.start, k.stop + more))) for entry, q, k in parts]

    return change


def _answers_for_one_row_more(parts):
    return [(entry, slice(q.start, q.stop + 1), k) for entry, q, k in parts]


def _outside(of, value):
    """Rows of no sequence hold `value`."""

    def spoil(out, lse, nobodys):
        (out if of == "out" else lse)[nobodys] = value

    return spoil


def _slopes_of_others(q, k, v, *, alibi_slopes, **given):
    return ragged(function=_exact)(q, k, v, alibi_slopes=alibi_slopes.flip(0), **given)


PACKED = Case(5, 90, 140, 4, 2, 64, ragged="packed")
GIVEN = Case(5, 90, 140, 4, 2, 64, causal=True, ragged="packed_used", out="given")
PADDED = Case(3, 90, 140, 4, 2, 64, ragged="used", out="strided")
SLOPES = Case(5, 90, 140, 4, 2, 64, ragged="packed", alibi="entries")


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", RAGGED)
def test_a_kernels_arithmetic_passes_on_ragged_batches(which: str, causal: bool, lse: bool) -> None:
    cases = PACKED, replace(PACKED, window=(40, -1)), replace(PACKED, heads_q=6, head_dim=72, seqlen_k=40)
    changes = {"ragged": which, "causal": causal, "return_lse": lse}
    verdicts = [check(replace(case, **changes), ragged(), "cpu") for case in cases]
    assert 0 < max(verdict.ratio for verdict in verdicts) <= 2.0
    assert any(verdict.lse_error > 0 for verdict in verdicts) == lse


def test_the_cases_have_rows_of_nobody_and_neighbours() -> None:
    for case in (PACKED, GIVEN, PADDED):
        assert outside(case, "q").any() and outside(case, "k").any()
        sizes = sorted((q.stop - q.start, k.stop - k.start) for _, _, q, k in lengths(case).parts)
        assert sizes[-1][0] > 1 and sizes[-2][0] > 1 and sizes[-1][1] != sizes[-2][1]


@pytest.mark.parametrize(
    ("case", "mistake", "complaint"),
    [
        *((case, ragged(_exchanged), "oracle|not finite|not 0") for case in (PACKED, GIVEN, PADDED)),
        (PACKED, ragged(_one_key(1)), "oracle|not finite"),
        (GIVEN, ragged(_one_key(1)), "oracle|not finite"),
        (PADDED, ragged(_one_key(1)), "not finite"),
        *((case, ragged(_one_key(-1)), "oracle") for case in (PACKED, GIVEN, PADDED)),
        *((case, ragged(_answers_for_one_row_more), "rows of no sequence are not 0") for case in (GIVEN, PADDED)),
        *(
            (case, ragged(spoil=_outside("out", value)), "rows of no sequence are not 0")
            for case in (PACKED, GIVEN, PADDED)
            for value in (1.0, math.nan)
        ),
        *(
            (case, ragged(spoil=_outside("lse", value)), "rows of no sequence is not -inf")
            for case in (PACKED, GIVEN, PADDED)
            for value in (0.0, math.nan)
        ),
        (SLOPES, _slopes_of_others, "oracle"),
    ],
)
def test_a_mistake_in_a_ragged_batch_is_seen(case: Case, mistake, complaint: str) -> None:
    check(case, ragged(function=_exact if case.alibi else flash), "cpu")
    with pytest.raises(AssertionError, match=complaint):
        check(case, mistake, "cpu")


# -- the pieces -------------------------------------------------------------------------------------------------------
def test_poison_is_nan_in_both_dtypes() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert poison(torch.zeros(3, dtype=dtype)).isnan().all()


def test_half_ulp_is_the_error_of_rounding() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for value in (1.0, 1.99, 3.7, 0.013):
            spread = torch.linspace(value, value * 1.001, 4096, dtype=torch.float64)
            error = (spread.to(dtype).double() - spread).abs().max().item()
            assert error <= half_ulp(spread.max().item(), dtype)
    assert half_ulp(1.5, torch.bfloat16) == 2.0**-8
    assert half_ulp(4.0, torch.float16) == 2.0**-9


def test_same_bits_tells_signed_zeros_apart_and_nans_alike() -> None:
    a = torch.tensor([0.0, math.nan])
    assert same_bits(a, a.clone())
    assert not same_bits(a, torch.tensor([-0.0, math.nan]))


def test_surroundings_of_an_output_survive_a_proper_write() -> None:
    for kind in ("given", "strided", "unaligned"):
        target = Output((2, 3, 2, 16), torch.bfloat16, "cpu", kind)
        assert (target.view.data_ptr() % 16 == 0) == (kind != "unaligned")
        target.view.copy_(torch.ones(2, 3, 2, 16))
        target.check_surroundings()
        assert (target.view == 1).all()


def test_inputs_are_fresh_for_each_seed_and_repeatable() -> None:
    a, b, c = (inputs(DENSE, "cpu", seed)[0] for seed in (0, 0, 1))
    assert same_bits(a, b) and not same_bits(a, c)
