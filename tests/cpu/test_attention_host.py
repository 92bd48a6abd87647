"""`fmha.attention` up to the launch, on CPU tensors: a stand-in takes the kernel's place and checks its arguments."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import random
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

import fmha
from fmha import reference
from fmha.jit import arguments, launch, layout, library
from fmha.jit.counter import Counter
from fmha.problem import Problem, Unsupported
from schedules.tiling import TiledConfig
from schedules.work import in_order, keys_in_l2, sequences
from tests.cpu.stand_in import L2_BYTES, MULTIPROCESSORS, STREAM, pass_for_gpu, strided, vector

attention_module = importlib.import_module("fmha.attention")  # the attribute of that name is the function
BF16, FP16 = torch.bfloat16, torch.float16


def oracle(q, k, v, causal=False, scale=None, window=(None, None)):
    """Attention in float64, straight from its definition: output [B, Sq, Hq, D] and LSE [B, Hq, Sq]."""
    q, k, v = (t.double() for t in (q, k, v))
    (seqlen_q, heads), (seqlen_k, kv_heads) = q.shape[1:3], k.shape[1:3]
    k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[3] ** -0.5)
    past = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
    left, right = window
    for hidden in (causal and past > 0, left is not None and past < -left, right is not None and past > right):
        scores = scores.masked_fill(torch.as_tensor(hidden), -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


class Kernel:
    """Computes what the kernel would, after the checks that the compiled launch function makes."""

    def __init__(self, arch: str = "sm_90a") -> None:
        self.arch = arch
        self.calls: list[tuple] = []
        self.counter = Counter(torch.device("cpu"), STREAM)
        self.problem: Problem | None = None

    def current(self, device) -> Counter:
        assert device.type == "cpu"
        return self.counter

    def fetch(self, problem: Problem, config: TiledConfig, arch: str):
        assert arch == self.arch
        self.problem, self.config = problem, config
        return self

    def tensor(self, name: str, address: int, numbers: dict[str, int]) -> torch.Tensor:
        """What the launch function takes the address for."""
        shape = [numbers[size] for size in arguments.SHAPES[name]]
        strides = [numbers[f"{name} {mode}"] for mode in ("batch", "row", "head")] + [1]
        assert address % 16 == 0 and all(
            stride > 0 and stride % arguments.STRIDE_ELEMENTS == 0 for stride in strides[:3]
        )
        unit = numbers[f"{name} unit"]
        assert unit > 0 and unit % arguments.STRIDE_ELEMENTS == 0 and strides[1] % unit == 0
        assert shape[0] == 1 or strides[0] % unit == 0
        return strided(address, getattr(torch, self.problem.dtype), shape, strides)

    def __call__(self, sizes, *rest):
        q, k, v, o, lse, sinks, slopes, scale_log2, cap_factor, *taken, stream = rest[:12]
        assert all(type(number) is int for number in (sizes, q, k, v, o, lse, sinks, slopes, *taken, stream))
        assert type(scale_log2) is type(cap_factor) is float and stream == STREAM
        lengths = rest[12:]
        assert len(lengths) == 4 and all(type(number) is int for number in lengths)
        self.beside = sinks, slopes, cap_factor
        numbers = dict(zip(arguments.SIZES, (ctypes.c_int64 * len(arguments.SIZES)).from_address(sizes), strict=True))
        self.numbers = numbers
        assert numbers["multiprocessors"] == MULTIPROCESSORS
        q, k, v, o = (self.tensor(name, at, numbers) for name, at in zip("qkvo", (q, k, v, o), strict=True))
        head_group = numbers["head_group"]
        self.calls.append((q, k, v, o, lse, scale_log2, head_group))
        left = numbers["left"] if self.problem.mask == "window" else None
        right = None if self.problem.mask == "dense" else numbers["right"]
        options = {"scale": scale_log2 / math.log2(math.e), "window": (left, right)}
        if self.problem.ragged:
            out, out_lse = self.ragged(taken, lengths, (q, k, v), options)
        else:
            assert taken == [self.counter.address, self.counter.base] and lengths == (0, 0, 0, 0)
            assert (numbers["sequences"], numbers["packed"]) == (numbers["batch"], 0)
            out, out_lse = oracle(q, k, v, **options)
        o.copy_(out)
        if lse:
            memory = (ctypes.c_float * out_lse.numel()).from_address(lse)
            torch.frombuffer(memory, dtype=torch.float32).copy_(out_lse.flatten())

    def ragged(self, taken, lengths, qkv, options: dict[str, Any]):
        """The oracle over the lengths that lie at these addresses."""
        (listing, base), numbers = taken, self.numbers
        assert base == 0 and listing % 4 == 0
        sequences, heads, packed = numbers["sequences"], numbers["heads"], numbers["packed"]
        ctypes.memset(listing, 0xFF, 4 * arguments.listing_words(sequences))
        sinks, slopes, cap_factor = self.beside
        if sinks:
            options["sinks"] = vector(sinks, torch.float32, heads)
        if slopes:
            shape = (sequences, heads) if numbers["slopes batch"] else (heads,)
            options["alibi_slopes"] = vector(slopes, torch.float32, *shape)
        if self.problem.score in ("softcap", "both"):
            softcap = options["scale"]
            options |= {"softcap": softcap, "scale": cap_factor * softcap}
        assert bool(lengths[0]) == bool(lengths[1]) == bool(packed)
        cu = [vector(at, torch.int32, sequences + 1) for at in lengths[:2] if at]
        names = zip(("seqused_q", "seqused_k"), lengths[2:], strict=True)
        options |= {name: vector(at, torch.int32, sequences) for name, at in names if at}
        if not packed:
            return reference.attention(*qkv, **options)
        out, lse = reference.attention_varlen(*(x[0] for x in qkv), *cu, **options)
        return out[None], lse[None]


@pytest.fixture
def kernel(monkeypatch):
    """Makes CPU tensors pass for tensors on a Hopper GPU."""
    stand_in = Kernel()
    pass_for_gpu(monkeypatch, stand_in.fetch)
    monkeypatch.setattr(launch, "current", stand_in.current)
    return stand_in


def tensors(batch=2, seqlen_q=5, seqlen_k=7, heads=4, kv_heads=2, head_dim=16, dtype=BF16):
    torch.manual_seed(0)
    shapes = ((batch, seqlen_q, heads, head_dim), *2 * ((batch, seqlen_k, kv_heads, head_dim),))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def assert_right(out, q, k, v, lse=None, **options):
    expected, expected_lse = oracle(q, k, v, **options)
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=1e-2)
    if lse is not None:
        torch.testing.assert_close(lse.double(), expected_lse, atol=1e-4, rtol=1e-4)


# -- what comes back ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3, np.float32(0.3), 2])
def test_output_and_lse(kernel, dtype, causal, scale):
    q, k, v = tensors(dtype=dtype)
    out, lse = fmha.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    options = {"causal": causal, "scale": None if scale is None else float(scale)}
    assert_right(out, q, k, v, lse, **options)
    assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32
    assert kernel.problem == Problem(str(dtype).removeprefix("torch."), 16, "causal" if causal else "dense")
    torch.testing.assert_close(fmha.attention(q, k, v, **options), out)


@pytest.mark.parametrize(("seqlen_q", "q_tiles"), [(1, 1), (128, 1), (129, 2), (300, 3)])
def test_every_work_tile_is_counted(kernel, seqlen_q, q_tiles):
    fmha.attention(*tensors(batch=3, seqlen_q=seqlen_q, heads=4, head_dim=128))
    assert kernel.counter.base == 3 * 4 * q_tiles


@pytest.mark.parametrize(("batch", "seqlen", "tile_m"), [(64, 256, 128), (1, 16384, 192)])
def test_the_lengths_decide_which_kernel_answers(kernel, monkeypatch, batch, seqlen, tile_m):
    monkeypatch.setattr(Kernel, "__call__", lambda self, *arguments: None)
    q, k, v = torch.empty(3, batch, seqlen, 32, 64, dtype=BF16)
    fmha.attention(q, k, v)
    assert kernel.config.tile_m == tile_m
    assert kernel.counter.base == batch * 32 * -(-seqlen // tile_m)


def test_the_kernel_gets_the_address_of_the_lse_or_none(kernel):
    q, k, v = tensors()
    fmha.attention(q, k, v)
    _, lse = fmha.attention(q, k, v, return_lse=True)
    assert [call[4] for call in kernel.calls] == [0, lse.data_ptr()]


@pytest.mark.parametrize(
    "view",
    [
        lambda q: q,
        lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
        lambda q: q.as_strided(q.shape, (3, *q.stride()[1:])),  # contiguous to torch, since there is one batch entry
        lambda q: q.as_strided(q.shape, (0, *q.stride()[1:])),
    ],
)
def test_a_fresh_output_has_row_major_strides_whatever_q_has(kernel, view):
    q, k, v = tensors(batch=1)
    out = fmha.attention(view(q), k, v)
    assert out.shape == q.shape and out.stride() == layout.contiguous_strides(q.shape)
    assert_right(out, q, k, v)


def test_head_group_counts_the_kv_bytes_of_a_query_head(kernel):
    from schedules.work import head_group

    q, k, v = tensors(heads=4, kv_heads=2, head_dim=64, seqlen_k=3000)
    fmha.attention(q, k, v, causal=True)
    fmha.attention(q, k, v)
    assert [call[6] for call in kernel.calls] == [head_group(True, 3000, 128, L2_BYTES), 1]


# -- windows -----------------------------------------------------------------------------------------------------------
def of_numpy(window):
    return tuple(map(np.int64, window))


@pytest.mark.parametrize("kind", [tuple, list, of_numpy])
@pytest.mark.parametrize(
    ("causal", "window", "mask", "left", "right"),  # of 5 queries and 7 keys
    [
        (False, (-1, -1), "dense", 0, 4),
        (False, (100, 100), "dense", 0, 4),
        (False, (6, 4), "dense", 0, 4),
        (False, (3, 1), "window", 3, 1),
        (False, (3, -1), "window", 3, 4),
        (True, (3, -1), "window", 3, 0),
        (True, (3, 2), "window", 3, 0),
        (True, (3, -2), "window", 3, -2),
        (False, (5, 4), "window", 5, 4),
        (False, (0, 0), "window", 0, 0),
        (False, (-1, 0), "causal", 0, 0),
        (False, (6, 0), "causal", 0, 0),
        (True, (6, 3), "causal", 0, 0),
        (False, (-1, 2), "causal", 0, 2),
        (False, (-1, -3), "causal", 0, -3),
        (False, (-2, -1), "window", -2, 4),
        (False, (-50, -1), "window", -5, 4),  # below the least key that anybody could see
        (False, (2, -3), "window", 2, -3),  # nobody sees a key
        (False, (7, -8), "causal", 0, -7),
    ],
)
def test_a_window_selects_the_kernel_and_its_bounds_are_numbers(kernel, kind, causal, window, mask, left, right):
    q, k, v = tensors()
    out, lse = fmha.attention(q, k, v, causal=causal, window=kind(window), return_lse=True)
    sides = tuple(None if side == -1 else side for side in window)
    assert_right(out, q, k, v, lse, causal=causal, window=sides)
    assert (kernel.problem.mask, kernel.numbers["left"], kernel.numbers["right"]) == (mask, left, right)
    assert torch.equal(out, fmha.attention(q, k, v, causal=causal, window=sides))


def test_a_window_goes_to_the_kernel_of_other_libraries_arrays_too(kernel):
    q, k, v = tensors(dtype=FP16)
    out = fmha.attention(q.numpy(), k.numpy(), v.numpy(), window=[2, 1])
    assert kernel.problem.mask == "window"
    assert_right(torch.from_numpy(out), q, k, v, window=(2, 1))


def test_bounds_reach_the_kernel_where_sizes_are_made_anew(kernel):
    """A misaligned input is copied, and the numbers are those of its copy."""
    q, k, v = tensors()
    out = fmha.attention(misaligned(q), k, v, window=(2, 1))
    assert (kernel.numbers["left"], kernel.numbers["right"]) == (2, 1)
    assert_right(out, q, k, v, window=(2, 1))


def test_heads_of_a_window_run_one_at_a_time(kernel):
    """All their work tiles visit about as many keys, as those of a dense mask."""
    q, k, v = tensors(seqlen_q=3000, seqlen_k=3000, batch=1)
    groups = []
    for window in ((None, None), (100, 0), (None, 0)):
        fmha.attention(q, k, v, window=window)
        groups.append(kernel.numbers["head_group"])
    assert groups[:2] == [1, 1] and groups[2] > 1


def test_what_a_window_adds_to_a_row_must_fit_into_32_bits(kernel):
    """Keys are counted from the row's own, i + Sk - Sq."""
    most = attention_module.MAX_SIZE
    q = Q.new_zeros(16).expand(1, 5, 2, 16)

    def plan(seqlen_k: int, window: tuple[int | None, int | None]) -> launch.Launch:
        k = K.new_zeros(16).expand(1, seqlen_k, 2, 16)
        return attention_module._plan(q, k, k, attention_module.Options(window=window))

    assert plan(most - 5, (3, 1)).numbers[2:4] == (3, 1)
    assert plan(most, (None, None)).work_tiles == 2
    with pytest.raises(Unsupported, match=rf"with a window Sq \+ Sk up to {most} are supported"):
        plan(most - 4, (3, 1))


# -- memory layouts ----------------------------------------------------------------------------------------------------
def in_place(kernel, call, *given) -> list[bool]:
    return [used.data_ptr() == tensor.data_ptr() for used, tensor in zip(kernel.calls[call], given, strict=False)]


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t,
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),  # [B, H, S, D] in memory
        lambda t: torch.cat([t, t], 3)[..., :16],
        lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
        lambda t: torch.cat([t, t], 1)[:, ::2],
        lambda t: t.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3),  # [S, B, H, D] in memory
    ],
)
def test_what_tma_can_address_runs_in_place(kernel, view):
    q, k, v = (view(t) for t in tensors())
    out = fmha.attention(q, k, v)
    assert_right(out, q, k, v)
    assert in_place(kernel, 0, q, k, v) == [True] * 3
    assert out.is_contiguous()


def expanded(t):
    return t[:, :, :1].expand(-1, -1, t.shape[2], -1)


def misaligned(t):
    flat = torch.empty(t.numel() + 1, dtype=t.dtype)[1:]
    return flat.view(t.shape).copy_(t)


def odd_stride(t):
    wide = torch.zeros(*t.shape[:3], t.shape[3] + 4, dtype=t.dtype)[..., : t.shape[3]]
    return wide.copy_(t)


@pytest.mark.parametrize("view", [expanded, misaligned, odd_stride])
def test_what_tma_cannot_address_is_copied(kernel, view):
    for which in itertools.product([False, True], repeat=3):
        q, k, v = (view(t) if changed else t for changed, t in zip(which, tensors(), strict=True))
        assert_right(fmha.attention(q, k, v), q, k, v)
        assert in_place(kernel, -1, q, k, v) == [not changed for changed in which]


def test_alignment_is_looked_at_in_every_call(kernel):
    q, k, v = tensors()
    bad = misaligned(q)
    assert (bad.shape, bad.stride()) == (q.shape, q.stride())
    for query in (q, bad, q):
        assert_right(fmha.attention(query, k, v), q, k, v)
    assert len(launch.PLANS) == 1
    assert [in_place(kernel, i, t)[0] for i, t in enumerate((q, bad, q))] == [True, False, True]


def test_a_mode_of_one_element_may_have_any_stride(kernel):
    q, k, v = tensors(batch=1, heads=1, kv_heads=1)
    for strides in ((0, 16, 0, 1), (3, 16, 5, 1), (1 << 45, 16, 1, 1)):
        q_odd, k_odd = q.as_strided(q.shape, strides), k.as_strided(k.shape, strides)
        assert_right(fmha.attention(q_odd, k_odd, v), q, k, v)
        assert in_place(kernel, -1, q, k, v) == [True] * 3


def test_layouts_have_their_limits():
    def takes(shape, strides):
        return layout.addressable_strides(shape, strides, 2)

    assert takes((2, 3, 4, 64), (768, 256, 64, 1)) == (768, 256, 64, 1)
    assert takes((2, 3, 4, 64), (768, 256, 60, 1)) is None
    assert takes((2, 3, 4, 64), (768, 256, 0, 1)) is None
    assert takes((2, 3, 4, 64), (1 << 39, 256, 64, 1)) is None  # 2^40 bytes
    assert takes((2, 3, 4, 64), ((1 << 39) - 8, 256, 64, 1)) is not None
    assert takes((1, 3, 4, 64), (1 << 39, 256, 64, 1)) == (768, 256, 64, 1)
    assert takes((1, 3, 4, 64), (8, 256, 64, 1)) == (8, 256, 64, 1)


# -- out ---------------------------------------------------------------------------------------------------------------
def test_out_is_written_in_place_and_returned(kernel):
    q, k, v = tensors()
    out = torch.full_like(q, torch.nan)
    result, lse = fmha.attention(q, k, v, out=out, return_lse=True)
    assert result is out and kernel.calls[0][3].data_ptr() == out.data_ptr()
    assert_right(out, q, k, v)
    assert fmha.attention(q, k, v, out=out) is out


@pytest.mark.parametrize("view", [misaligned, odd_stride])
def test_an_out_that_tma_cannot_address_is_filled_by_a_copy(kernel, view):
    q, k, v = tensors()
    out = view(torch.full_like(q, torch.nan))
    assert fmha.attention(q, k, v, out=out) is out
    assert_right(out, q, k, v)
    assert kernel.calls[0][3].data_ptr() != out.data_ptr()


def test_out_may_be_a_view_between_the_inputs(kernel):
    """Four interleaved slices of one buffer share no element, though each lies within the extent of the others."""
    buffer = torch.randn(2, 7, 4, 4, 16).to(BF16)
    q, k, v, out = buffer.unbind(2)
    expected = buffer[:, :, :3].clone()
    fmha.attention(q, k, v, out=out)
    assert_right(out, q, k, v)
    assert torch.equal(buffer[:, :, :3], expected)


def test_an_out_that_shares_memory_with_an_input_is_refused(kernel):
    q, k, v = tensors(heads=2, seqlen_q=7)
    buffer = torch.zeros(2 * q.numel(), dtype=BF16)
    for name, which in (("q", 0), ("k", 1), ("v", 2)):
        for shift in (-q.numel() + 1, -1, 0, 1, 16, q.numel() - 1):
            start = max(0, -shift)
            shared = buffer[start : start + q.numel()].view(q.shape).copy_((q, k, v)[which])
            out = buffer[start + shift : start + shift + q.numel()].view(q.shape)
            inputs = [shared if i == which else t for i, t in enumerate((q, k, v))]
            before = buffer.clone()
            with pytest.raises(ValueError, match=f"out overlaps {name} "):
                fmha.attention(*inputs, out=out)
            assert torch.equal(buffer, before)
    assert not kernel.calls
    shared, out = buffer[: q.numel()].view(q.shape), buffer[q.numel() :].view(q.shape)
    fmha.attention(shared.copy_(q), k, v, out=out)  # neighbours are not overlaps
    assert_right(out, q, k, v)


def random_layout(draw: random.Random):
    shape = [draw.choice([1, 2, 3]) for _ in range(4)]
    return shape, [draw.choice([0, 1, 2, 3, 4, 6, 8, 9, 12]) for _ in range(4)], draw.randrange(24)


def addresses(shape, strides, offset) -> list[int]:
    return [offset + sum(map(int.__mul__, index, strides)) for index in itertools.product(*map(range, shape))]


def test_shared_memory_is_told_exactly():
    draw, memory, outcomes = random.Random(0), torch.zeros(200), set()
    for _ in range(3000):
        a, b = random_layout(draw), random_layout(draw)
        shared = bool(set(addresses(*a)) & set(addresses(*b)))
        assert layout.share_memory(memory.as_strided(*a), memory.as_strided(*b)) == shared
        outcomes.add(shared)
    assert outcomes == {False, True}


def test_a_layout_said_not_to_overlap_itself_does_not():
    draw, said = random.Random(1), {False: 0, True: 0}
    for _ in range(3000):
        shape, strides, _ = random_layout(draw)
        places = addresses(shape, strides, 0)
        overlaps = layout.self_overlaps(shape, strides)
        assert overlaps or len(set(places)) == len(places)
        said[overlaps] += 1
    assert min(said.values()) > 100
    for order in itertools.permutations(range(4)):  # the layouts people have are all admitted
        assert not layout.self_overlaps(*(lambda t: (t.shape, t.stride()))(torch.empty(2, 3, 4, 5).permute(order)))


# -- ragged batches ----------------------------------------------------------------------------------------------------
LENGTHS = [(5, 9), (0, 4), (7, 0), (3, 3), (0, 0), (12, 5)]  # queries and keys of each sequence
USED_OF = [3, 0, 7, 1, 0, 10], [9, 2, 0, 2, 0, 1]


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def sums(sizes, first: int = 0) -> torch.Tensor:
    return ints(*accumulate(sizes, initial=first))


def packed(lengths=LENGTHS, before=2, behind=3, **sizes):
    """q, k and v of packed sequences with rows of nobody around them, in which there is NaN; and cu_seqlens."""
    cu_q, cu_k = (sums(counts, before) for counts in zip(*lengths, strict=True))
    sizes |= {"batch": 1, "seqlen_q": int(cu_q[-1]) + behind, "seqlen_k": int(cu_k[-1]) + behind}
    q, k, v = (x[0] for x in tensors(**sizes))
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        x[: cu[0]] = x[cu[-1] :] = torch.nan
    return q, k, v, cu_q, cu_k


def assert_equals(found, exact):
    """`found` are an output and an LSE, `exact` what the oracle says."""
    for x, expected, tolerance in zip(found, exact, (1e-2, 1e-4), strict=True):
        assert x.shape == expected.shape
        torch.testing.assert_close(x.double(), expected, atol=tolerance, rtol=tolerance)


SINKS, SLOPES = torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
RAGGED_OPTIONS = [
    {},
    {"causal": True},
    {"window": (3, 1), "scale": 0.3},
    {"sinks": SINKS, "softcap": 2.0},
    {"alibi_slopes": SLOPES, "causal": True},
    {"alibi_slopes": SLOPES[0], "window": (2, 0), "sinks": SINKS},
]


@pytest.mark.parametrize("used", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("options", RAGGED_OPTIONS)
def test_packed_sequences_give_what_each_gives_alone(kernel, used, options):
    q, k, v, cu_q, cu_k = packed()
    names = zip(("seqused_q", "seqused_k"), used, USED_OF, strict=True)
    given = options | {name: ints(*numbers) for name, there, numbers in names if there}
    exact = reference.attention_varlen(q, k, v, cu_q, cu_k, **given)
    found = fmha.attention_varlen(q, k, v, cu_q, cu_k, **given, return_lse=True)
    assert_equals(found, exact)
    out, lse = found
    assert out.is_contiguous() and lse.shape == (4, len(q)) and lse.dtype == torch.float32
    assert (out[:2] == 0).all() and (out[-3:] == 0).all() and (lse[:, :2] == -math.inf).all()
    assert kernel.problem.ragged and kernel.calls[-1][4] == lse.data_ptr()
    assert (kernel.numbers["sequences"], kernel.numbers["packed"]) == (6, 1)

    mine = torch.full_like(q, 7.0)
    result, again = fmha.attention_varlen(q, k, v, cu_q, cu_k, **given, out=mine, return_lse=True)
    assert result is mine and torch.equal(mine, out) and torch.equal(again, lse)
    assert kernel.calls[-1][3].data_ptr() == mine.data_ptr()
    alone = fmha.attention_varlen(q, k, v, cu_q, cu_k, **given)
    assert torch.equal(alone, out) and kernel.calls[-1][4] == 0
    assert kernel.counter.base == 0, "a ragged batch has a counter of its own"


@pytest.mark.parametrize("used", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("options", RAGGED_OPTIONS)
def test_of_padded_sequences_nothing_behind_is_attended_to(kernel, used, options):
    q, k, v = tensors(batch=6, seqlen_q=12, seqlen_k=9)
    names = zip(("seqused_q", "seqused_k"), used, USED_OF, strict=True)
    given = {name: ints(*numbers) for name, there, numbers in names if there}
    for x, name in ((q, "seqused_q"), (k, "seqused_k"), (v, "seqused_k")):
        for b, count in enumerate(given.get(name, ())):
            x[b, count:] = torch.nan
    given |= options
    exact = reference.attention(q, k, v, **given)
    out, lse = fmha.attention(q, k, v, **given, return_lse=True)
    assert_equals((out, lse), exact)
    assert lse.shape == (6, 4, 12) and kernel.problem.ragged
    assert (kernel.numbers["sequences"], kernel.numbers["packed"]) == (6, 0)
    mine = torch.full_like(q, 7.0)
    assert fmha.attention(q, k, v, **given, out=mine) is mine and torch.equal(mine, out)
    assert kernel.counter.base == 0


def test_a_batch_of_equal_sequences_needs_no_list(kernel):
    fmha.attention(Q, K, V, seqused_q=None, seqused_k=None)
    assert not kernel.problem.ragged and kernel.counter.base > 0


def test_the_list_has_room_for_all_sequences_and_says_how_many_heads_run_together(kernel):
    q, k, v, cu_q, cu_k = packed(heads=4, kv_heads=2)
    for causal in (False, True):
        fmha.attention_varlen(q, k, v, cu_q, cu_k, causal=causal)
        assert kernel.numbers["head_group"] == keys_in_l2(causal, 32, L2_BYTES)
    assert {plan.listing_words for plan in launch.PLANS.values()} == {arguments.listing_words(6)}


@pytest.mark.parametrize("window", [(3, 1), (None, 4), (-50, None), (-5, 7), (23, None), (None, 29), (2, -3)])
def test_sides_of_a_window_hold_for_every_sequence(kernel, window):
    """Whatever of them the sum of all lengths would make superfluous."""
    q, k, v, cu_q, cu_k = packed()
    found = fmha.attention_varlen(q, k, v, cu_q, cu_k, window=window, return_lse=True)
    assert_equals(found, reference.attention_varlen(q, k, v, cu_q, cu_k, window=window))


def every_other(t):
    return torch.stack([t, t], 1)[:, 0]


def among_heads(t):
    return torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]]


def heads_first(t):
    return t.transpose(0, 1).contiguous().transpose(0, 1)


def one_for_all(t):
    return t[:, :1].expand(-1, t.shape[1], -1)


def odd_rows(t):
    return torch.nn.functional.pad(t, (0, 4))[..., : t.shape[2]]


@pytest.mark.parametrize(
    ("view", "stays"),
    [
        (every_other, True),
        (among_heads, True),
        (heads_first, True),
        (misaligned, False),
        (odd_rows, False),
        (one_for_all, False),
    ],
)
def test_packed_tensors_may_have_any_strides(kernel, view, stays):
    q, k, v, cu_q, cu_k = packed()
    for which in itertools.product([False, True], repeat=3):
        given = [view(t) if changed else t for changed, t in zip(which, (q, k, v), strict=True)]
        found = fmha.attention_varlen(*given, cu_q, cu_k, return_lse=True)
        assert_equals(found, reference.attention_varlen(*given, cu_q, cu_k))
        assert found[0].is_contiguous()
        assert in_place(kernel, -1, *given) == [stays or not changed for changed in which]


@pytest.mark.parametrize(("view", "stays"), [(among_heads, True), (heads_first, True), (misaligned, False)])
def test_a_packed_out_may_have_any_strides(kernel, view, stays):
    q, k, v, cu_q, cu_k = packed()
    out = view(torch.full_like(q, 7.0))
    assert fmha.attention_varlen(q, k, v, cu_q, cu_k, out=out) is out
    torch.testing.assert_close(out, fmha.attention_varlen(q, k, v, cu_q, cu_k), rtol=0, atol=0)
    assert (kernel.calls[0][3].data_ptr() == out.data_ptr()) == stays


def test_a_packed_out_that_shares_memory_with_an_input_is_refused(kernel):
    q, k, v, cu, _ = packed([(5, 5), (3, 3)], kv_heads=4)
    for name, shared in (("q", q), ("k", k), ("v", v)):
        with pytest.raises(ValueError, match=f"out overlaps {name} "):
            fmha.attention_varlen(q, k, v, cu, cu, out=shared)
    assert not kernel.calls


def test_lengths_may_have_strides(kernel):
    q, k, v, cu_q, cu_k = packed()
    used = ints(*USED_OF[1])
    exact = reference.attention_varlen(q, k, v, cu_q, cu_k, seqused_k=used)
    cu_q, cu_k, used = (torch.stack([x, x + 1], 1)[:, 0] for x in (cu_q, cu_k, used))
    assert_equals(fmha.attention_varlen(q, k, v, cu_q, cu_k, seqused_k=used, return_lse=True), exact)


def test_new_lengths_need_no_new_plan(kernel):
    """They are read on the device: a plan is the same whatever they are."""
    q, k, v, cu_q, cu_k = packed()
    for shift in range(3):
        cu = cu_q - shift, cu_k + shift
        found = fmha.attention_varlen(q.nan_to_num(), k.nan_to_num(), v.nan_to_num(), *cu, return_lse=True)
        assert_equals(found, reference.attention_varlen(q.nan_to_num(), k.nan_to_num(), v.nan_to_num(), *cu))
    assert len(launch.PLANS) == 1
    different = [
        {"cu_seqlens_q": cu_q[1:], "cu_seqlens_k": cu_k[1:]},
        {"seqused_q": ints(*USED_OF[0])},
        {"seqused_k": ints(*USED_OF[1])},
        {"seqused_q": ints(*USED_OF[0]), "seqused_k": ints(*USED_OF[1])},
        {"max_seqlen_q": 12},
        {"max_seqlen_k": 12},
    ]
    for i, changes in enumerate(different):
        for _ in range(2):
            fmha.attention_varlen(**{"q": q, "k": k, "v": v, "cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, **changes})
        assert len(launch.PLANS) == 2 + i


@pytest.mark.parametrize("hint", [None, torch.tensor(12), ints(12), torch.tensor(12, device="meta"), 0])
def test_a_hint_that_nobody_waits_for_is_as_good_as_none(kernel, hint):
    q, k, v, cu_q, cu_k = packed()
    fmha.attention_varlen(q, k, v, cu_q, cu_k)
    fmha.attention_varlen(q, k, v, cu_q, cu_k, max_seqlen_q=hint, max_seqlen_k=hint)
    assert len(launch.PLANS) == 1


@pytest.mark.parametrize("kind", [int, np.int64])
def test_hints_are_numbers_and_equal_ones_share_a_plan(kernel, kind):
    q, k, v, cu_q, cu_k = packed()
    exact = reference.attention_varlen(q, k, v, cu_q, cu_k)
    for longest in ((12, 9), (12, 9), (1, 1), (10**6, 10**6)):  # whether they are right or not
        hints = {"max_seqlen_q": kind(longest[0]), "max_seqlen_k": kind(longest[1])}
        assert_equals(fmha.attention_varlen(q, k, v, cu_q, cu_k, **hints, return_lse=True), exact)
    assert len(launch.PLANS) == 3


@pytest.mark.parametrize(("sequences", "longest", "tile_m"), [(64, None, 128), (1, None, 192), (64, 16384, 192)])
def test_lengths_are_guessed_for_picking_a_kernel(kernel, monkeypatch, sequences, longest, tile_m):
    monkeypatch.setattr(Kernel, "__call__", lambda self, *arguments: None)
    q, k, v = torch.empty(3, 16384, 32, 64, dtype=BF16)
    cu = torch.zeros(sequences + 1, dtype=torch.int32)
    fmha.attention_varlen(q, k, v, cu, cu, max_seqlen_q=longest, max_seqlen_k=longest)
    assert kernel.config.tile_m == tile_m


@pytest.mark.parametrize("lengths", [[(1, 1)], [(1, 1)] * 50, [(200, 1), (0, 1), (129, 1)], [(0, 0)] * 3])
def test_no_lengths_make_more_work_tiles_than_were_planned_for(kernel, lengths):
    q, k, v, cu_q, cu_k = packed(lengths)
    fmha.attention_varlen(q, k, v, cu_q, cu_k)
    (plan,) = launch.PLANS.values()
    found = sequences(len(lengths), len(q), len(k), (cu_q.tolist(), cu_k.tolist()))
    tiles = in_order(found, kernel.config.tile_m).first[-1]
    assert 0 < 4 * tiles <= plan.work_tiles


@pytest.mark.parametrize(
    ("rows", "heads", "message"),
    [(2**30 + 1, 1, "too large for ragged batches"), (2**25, 2**14, "tiles of queries; up to")],
)
def test_what_is_counted_in_32_bits_is_no_more(kernel, rows, heads, message):
    q = torch.zeros(16, dtype=BF16).expand(rows, heads, 16)
    with pytest.raises(Unsupported, match=message):
        fmha.attention_varlen(q, q, q, CU, CU)
    assert not launch.PLANS


def test_more_sequences_than_the_list_counts_are_refused(kernel):
    q = torch.zeros((4, 1, 16), dtype=BF16)
    cu = torch.zeros(attention_module.MAX_SEQUENCES + 2, dtype=torch.int32)
    with pytest.raises(Unsupported, match=f"up to {attention_module.MAX_SEQUENCES} are supported"):
        fmha.attention_varlen(q, q, q, cu, cu)
    fmha.attention_varlen(q, q, q, cu[1:], cu[1:])
    assert len(kernel.calls) == 1


@pytest.mark.parametrize("used", [{}, {"seqused_k": ints(5, 0, 9, 1, 1, 1)}, {"seqused_q": ints(*USED_OF[0])}])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_without_a_key_queries_have_their_sink_and_others_nothing(kernel, used, sinks):
    q, k, v, cu_q, cu_k = packed()
    options = {"sinks": sinks, "causal": True, **used}
    cu_of_none = torch.zeros_like(cu_k)
    exact = reference.attention_varlen(q, k[:0], v[:0], cu_q, cu_of_none, **options)
    for cu in (cu_of_none, cu_k):
        out, lse = fmha.attention_varlen(q, k[:0], v[:0], cu_q, cu, **options, return_lse=True)
        assert_equals((out, lse), exact)
    if sinks is not None:
        assert (lse == sinks[:, None]).any() and (lse[:, :2] == -math.inf).all()
    padded = torch.ones(6, 12, 4, 16, dtype=BF16), *torch.ones(2, 6, 0, 2, 16, dtype=BF16)
    options |= {} if used else {"seqused_k": ints(*[0] * 6)}
    found = fmha.attention(*padded, **options, return_lse=True)
    assert_equals(found, reference.attention(*padded, **options))
    assert len(kernel.calls) == 3


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_without_a_sequence_or_a_query_nothing_is_launched(kernel, sinks):
    q, k, v, cu_q, cu_k = packed()
    calls = [
        (q, k, v, cu_q[:1], cu_k[:1]),
        (q, k[:0], v[:0], cu_q[:1], cu_k[:1]),
        (q[:0], k, v, cu_q, cu_k),
        (q[:0], k[:0], v[:0], cu_q, cu_k),
        (q[:, :0], k, v, cu_q, cu_k),
    ]
    for given in calls[:1] + calls[2:]:
        out, lse = fmha.attention_varlen(*given, sinks=None if given[0].shape[1] == 0 else sinks, return_lse=True)
        assert out.shape == given[0].shape and lse.shape == (out.shape[1], out.shape[0])
        assert (out == 0).all() and (lse == -math.inf).all()
        mine = torch.full_like(given[0], 7.0)
        assert fmha.attention_varlen(*given, out=mine) is mine and (mine == 0).all()
    out, lse = fmha.attention_varlen(*calls[1], sinks=sinks, return_lse=True)
    assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = fmha.attention(Q[:0], K[:0], V[:0], seqused_k=ints(), sinks=sinks, return_lse=True)
    assert out.shape == (0, 5, 4, 16) and lse.shape == (0, 4, 5)
    assert not kernel.calls and kernel.problem is None


def test_packed_arrays_of_another_library(kernel):
    q, k, v, cu_q, cu_k = packed(dtype=FP16)
    exact = reference.attention_varlen(q, k, v, cu_q, cu_k, causal=True, seqused_k=ints(*USED_OF[1]))
    arrays = [x.numpy() for x in (q, k, v, cu_q, cu_k)]
    used = np.array(USED_OF[1], np.int32)
    options = {"causal": True, "max_seqlen_q": np.int64(12), "max_seqlen_k": 9, "seqused_k": used}
    out, lse = fmha.attention_varlen(*arrays, **options, return_lse=True)
    assert type(out) is type(lse) is np.ndarray and out.dtype == np.float16
    assert_equals(map(torch.from_numpy, (out, lse)), exact)
    assert in_place(kernel, 0, q, k, v) == [True] * 3
    mine = np.full(q.shape, np.nan, np.float16)
    assert fmha.attention_varlen(*arrays, **options, out=mine) is mine and np.array_equal(mine, out)
    fmha.attention_varlen(*arrays[:3], cu_q, cu_k, **options)  # lengths of torch's, tensors of others
    fmha.attention_varlen(q, k, v, *arrays[3:], **options)
    fmha.attention_varlen(q, k, v, cu_q, cu_k, **options | {"seqused_k": ints(*USED_OF[1])})
    assert len(kernel.calls) == 5 and len(launch.PLANS) == 3, "with an LSE, with an output, and with neither"


def test_padded_arrays_of_another_library(kernel):
    q, k, v = tensors(dtype=FP16)
    used = ints(3, 4)
    given = {"seqused_q": used.numpy(), "seqused_k": used, "return_lse": True}
    found = fmha.attention(q.numpy(), k.numpy(), v.numpy(), **given)
    assert_equals(map(torch.from_numpy, found), reference.attention(q, k, v, seqused_q=used, seqused_k=used))


# -- empty ones --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0},
        {"seqlen_q": 0},
        {"heads": 0},
        {"heads": 0, "kv_heads": 0},
        {"seqlen_k": 0},
        {"seqlen_k": 0, "seqlen_q": 0},
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_empty_calls_launch_nothing(kernel, sizes, causal):
    q, k, v = tensors(**sizes)
    out, lse = fmha.attention(q, k, v, causal=causal, return_lse=True)
    assert out.shape == q.shape and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert (out == 0).all() and (lse == -math.inf).all()
    mine = torch.full_like(q, torch.nan)
    assert fmha.attention(q, k, v, causal=causal, out=mine) is mine and (mine == 0).all()
    assert not kernel.calls and kernel.problem is None


def test_an_empty_call_refuses_an_overlap_too(kernel):
    q, k, v = tensors(seqlen_k=0)
    with pytest.raises(ValueError, match="out overlaps q"):
        fmha.attention(q, k, v, out=q)


# -- bad input ---------------------------------------------------------------------------------------------------------
Q, K, V = tensors()
CU, USED = torch.tensor([0, 4, 9], dtype=torch.int32), torch.tensor([2, 5], dtype=torch.int32)
BAD = {
    "rank of q": ({"q": Q[0]}, ValueError, r"q\.shape is \[5, 4, 16\].*four modes.*B, Sq, Hq, D"),
    "rank of v": ({"v": V[None]}, ValueError, r"v\.shape is \[1, 2, 7, 2, 16\].*four modes"),
    "batch": ({"k": K[:1], "v": V[:1]}, ValueError, r"k\.shape\[0\], the batch, is 1; it must be that of q, 2"),
    "head dim": ({"k": K[..., :8]}, ValueError, r"k\.shape\[3\], the head_dim, is 8; it must be that of q, 16"),
    "head dim of v": ({"v": V[..., :4]}, Unsupported, "head_dim_v 4: multiples of 8"),
    "lengths": ({"v": V[:, :6]}, ValueError, r"v\.shape is \(2, 6, 2, 16\); all its modes but the last .* \(2, 7, 2\)"),
    "heads": ({"q": Q[:, :, :3]}, ValueError, "q has 3 heads and k 2; the heads of k must divide"),
    "no kv heads": ({"k": K[:, :, :0], "v": V[:, :, :0]}, ValueError, "q has 4 heads and k 0"),
    "mixed dtypes": ({"k": K.half()}, ValueError, r"k\.dtype is float16; it must be that of q, bfloat16"),
    "mixed devices": ({"v": V.to("meta")}, ValueError, r"v\.device is meta; it must be that of q, cpu"),
    "float32": ({"q": Q.float(), "k": K.float(), "v": V.float()}, Unsupported, "dtype float32: bfloat16 or float16"),
    "odd head dim": (
        {"q": Q[..., :12], "k": K[..., :12], "v": V[..., :12]},
        Unsupported,
        "head_dim 12: multiples of 8",
    ),
    "no head dim": ({"q": Q[..., :0], "k": K[..., :0], "v": V[..., :0]}, Unsupported, "head_dim 0: multiples of 8"),
    "last stride": ({"q": Q.transpose(1, 3).contiguous().transpose(1, 3)}, ValueError, r"q\.stride\(\).*must be 1"),
    "too long": ({"k": K.new_empty(1).expand(2, 2**31, 2, 16)}, ValueError, r"k\.shape.*up to 2147418112"),
    "not a tensor": ({"k": [1, 2]}, TypeError, "k is a list; a torch tensor or another array with __dlpack__"),
    "no tensor": ({"v": None}, TypeError, "v is a NoneType"),
    "scale NaN": ({"scale": math.nan}, ValueError, "scale is nan; a finite positive number"),
    "scale infinite": ({"scale": math.inf}, ValueError, "scale is inf; a finite positive number"),
    "scale 0": ({"scale": 0}, ValueError, "scale is 0; a finite positive number"),
    "scale negative": ({"scale": -0.5}, ValueError, "scale is -0.5; a finite positive number"),
    "scale beyond float32": ({"scale": 1e300}, ValueError, "scale is 1e"),
    "scale beyond float64": ({"scale": 10**400}, ValueError, "scale is 1000"),
    "scale below float32": ({"scale": 1e-300}, ValueError, "scale is 1e-300"),
    "scale bool": ({"scale": True}, TypeError, "scale is True of type bool"),
    "scale text": ({"scale": "1"}, TypeError, "scale is '1' of type str"),
    "scale list": ({"scale": [1.0]}, TypeError, r"scale is \[1.0\] of type list"),
    "scale tensor": ({"scale": torch.ones(())}, TypeError, "scale is .* of type Tensor"),
    "causal": ({"causal": 1}, TypeError, "causal is 1 of type int; True or False"),
    "return_lse": ({"return_lse": None}, TypeError, "return_lse is None of type NoneType; True or False"),
    "window number": ({"window": 4}, TypeError, r"window is 4; a pair \(left, right\)"),
    "window triple": ({"window": (1, 2, 3)}, TypeError, r"window is \(1, 2, 3\); a pair"),
    "window single": ({"window": [1]}, TypeError, r"window is .1,?.; a pair"),
    "window None": ({"window": None}, TypeError, r"window is None; a pair"),
    "window of letters": ({"window": "12"}, TypeError, "window is '12'; a pair"),
    "window float": ({"window": (1.0, 2)}, TypeError, "its left side is of type float; an integer or None"),
    "window NumPy bool": ({"window": (1, np.True_)}, TypeError, "its right side is of type bool"),
    "window tensor": ({"window": (torch.tensor(1), 2)}, TypeError, "its left side is of type Tensor"),
    "window list": ({"window": ([1], 2)}, TypeError, "its left side is of type list"),
    "window text": ({"window": (1, "2")}, TypeError, "its right side is of type str; an integer or None"),
    "window bool": ({"window": (True, 2)}, TypeError, "its left side is of type bool; an integer or None"),
    "softcap negative": ({"softcap": -1.0}, ValueError, "softcap is -1.0; a finite positive number"),
    "softcap NaN": ({"softcap": math.nan}, ValueError, "softcap is nan; a finite positive number"),
    "softcap bool": ({"softcap": False}, TypeError, "softcap is False of type bool"),
    "softcap too small": ({"softcap": 1e-36, "scale": 1e36}, ValueError, "their ratio is too large"),
    "sinks": ({"sinks": torch.ones(3)}, ValueError, r"sinks\.shape is \[3\]; \[4\] is needed"),
    "sinks dtype": ({"sinks": torch.ones(4, dtype=BF16)}, ValueError, r"sinks\.dtype is bfloat16; float32 is needed"),
    "sinks device": (
        {"sinks": torch.ones(4, device="meta")},
        ValueError,
        r"sinks\.device is meta",
    ),
    "sinks list": ({"sinks": [1.0]}, TypeError, "sinks is a list"),
    "slopes": ({"alibi_slopes": torch.ones(4, 2)}, ValueError, r"alibi_slopes\.shape is \[4, 2\]; \[4\] or \[2, 4\]"),
    "seqused_q": ({"seqused_q": torch.ones(2)}, ValueError, r"seqused_q\.dtype is float32; int32 is needed"),
    "seqused_k": ({"seqused_k": USED.long()}, ValueError, r"seqused_k\.dtype is int64; int32 is needed"),
    "seqused_q length": ({"seqused_q": CU}, ValueError, r"seqused_q\.shape is \[3\]; \[2\] is needed"),
    "seqused_k modes": ({"seqused_k": USED[:, None]}, ValueError, r"seqused_k\.shape is \[2, 1\]; \[2\] is needed"),
    "seqused_k a number": ({"seqused_k": 3}, TypeError, "seqused_k is a int; a torch tensor or another array"),
    "seqused_q device": ({"seqused_q": USED.to("meta")}, ValueError, r"seqused_q\.device is meta; .* of q, cpu"),
    "gradient": ({"k": K.clone().requires_grad_()}, Unsupported, r"k\.requires_grad is True.*forward"),
    "out shape": ({"out": Q[:, :4].clone()}, ValueError, r"out\.shape is \(2, 4, 4, 16\); .* of q, \(2, 5, 4, 16\)"),
    "out dtype": ({"out": Q.float()}, ValueError, r"out\.dtype is float32; it must be that of q, bfloat16"),
    "out device": ({"out": Q.to("meta")}, ValueError, r"out\.device is meta; it must be that of q, cpu"),
    "out last stride": ({"out": torch.zeros(2, 16, 4, 5, dtype=BF16).transpose(1, 3)}, ValueError, r"out\.stride\(\)"),
    "out on itself": ({"out": Q[:1].clone().expand(2, -1, -1, -1)}, ValueError, r"out\.stride\(\).*share memory"),
    "out not a tensor": ({"out": "here"}, TypeError, "out is a str"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name_before_anything_happens(kernel, case):
    changes, error, message = BAD[case]
    out = changes.get("out", torch.full_like(Q, 7.0))
    before = out.clone() if isinstance(out, torch.Tensor) and out.device.type == "cpu" else None
    for _ in range(2):  # the second time as well: a refused call leaves no plan
        with pytest.raises(error, match=message) as caught:
            fmha.attention(**{"q": Q, "k": K, "v": V, "out": out, **changes})
        assert type(caught.value) is error
    assert not kernel.calls and kernel.problem is None and not launch.PLANS
    assert before is None or torch.equal(out, before)


PACKED_Q, PACKED_K, PACKED_V = (t.flatten(0, 1) for t in (Q, K, V))
BAD_VARLEN = {
    "rank of q": ({"q": Q}, ValueError, r"q\.shape is \[2, 5, 4, 16\]; three modes are needed, \[Tq, Hq, D\]"),
    "rank of k": ({"k": K}, ValueError, r"k\.shape is \[2, 7, 2, 16\]; three modes are needed, \[Tk, Hkv, D\]"),
    "rank of v": ({"v": V[0, 0]}, ValueError, r"v\.shape is \[2, 16\]; three modes are needed, \[Tk, Hkv, Dv\]"),
    "head dim": ({"k": PACKED_K[..., :8]}, ValueError, r"k\.shape\[2\], the head_dim, is 8; .* of q, 16"),
    "lengths": ({"v": PACKED_V[:6]}, ValueError, r"v\.shape is \(6, 2, 16\); .* those of k, \(14, 2\)"),
    "heads": ({"q": PACKED_Q[:, :3]}, ValueError, "q has 3 heads and k 2; the heads of k must divide"),
    "last stride": ({"q": PACKED_Q.mT.contiguous().mT}, ValueError, r"q\.stride\(\).*must be 1"),
    "out shape": ({"out": PACKED_Q[:4].clone()}, ValueError, r"out\.shape is \(4, 4, 16\); .* \(10, 4, 16\)"),
    "out of a batch": ({"out": Q.clone()}, ValueError, r"out\.shape is \(2, 5, 4, 16\); .* \(10, 4, 16\)"),
    "out on itself": ({"out": PACKED_Q[:1].expand(10, -1, -1)}, ValueError, r"out\.stride\(\).*share memory"),
    "no cu_seqlens_q": ({"cu_seqlens_q": None}, TypeError, r"cu_seqlens_q is None; int32 \[B \+ 1\] is needed"),
    "no cu_seqlens_k": ({"cu_seqlens_k": None}, TypeError, r"cu_seqlens_k is None; int32 \[B \+ 1\] is needed"),
    "cu_seqlens_q list": ({"cu_seqlens_q": [0, 4, 9]}, TypeError, "cu_seqlens_q is a list; a torch tensor"),
    "cu_seqlens_k list": ({"cu_seqlens_k": (0, 4, 9)}, TypeError, "cu_seqlens_k is a tuple; a torch tensor"),
    "cu_seqlens_q int64": ({"cu_seqlens_q": CU.long()}, ValueError, r"cu_seqlens_q\.dtype is int64; int32 is needed"),
    "cu_seqlens_k int64": ({"cu_seqlens_k": CU.long()}, ValueError, r"cu_seqlens_k\.dtype is int64; int32 is needed"),
    "cu_seqlens_k float": ({"cu_seqlens_k": CU.float()}, ValueError, r"cu_seqlens_k\.dtype is float32; int32"),
    "cu_seqlens_q modes": ({"cu_seqlens_q": CU[None]}, ValueError, r"cu_seqlens_q\.shape is \[1, 3\]; \[B \+ 1\]"),
    "cu_seqlens_q number": ({"cu_seqlens_q": CU[0]}, ValueError, r"cu_seqlens_q\.shape is \[\]; \[B \+ 1\]"),
    "cu_seqlens_q empty": ({"cu_seqlens_q": CU[:0]}, ValueError, r"cu_seqlens_q\.shape is \[0\]; \[B \+ 1\]"),
    "cu_seqlens_k modes": ({"cu_seqlens_k": CU[:, None]}, ValueError, r"cu_seqlens_k\.shape is \[3, 1\]; \[3\]"),
    "cu_seqlens_k length": ({"cu_seqlens_k": CU[:2]}, ValueError, r"cu_seqlens_k\.shape is \[2\]; \[3\] is needed"),
    "cu_seqlens_q device": ({"cu_seqlens_q": CU.to("meta")}, ValueError, r"cu_seqlens_q\.device is meta; .* of q, cpu"),
    "cu_seqlens_k device": ({"cu_seqlens_k": CU.to("meta")}, ValueError, r"cu_seqlens_k\.device is meta; .* of q, cpu"),
    "seqused_q": ({"seqused_q": CU}, ValueError, r"seqused_q\.shape is \[3\]; \[2\] is needed"),
    "seqused_k": ({"seqused_k": USED.long()}, ValueError, r"seqused_k\.dtype is int64; int32 is needed"),
    "slopes": ({"alibi_slopes": torch.ones(3, 4)}, ValueError, r"alibi_slopes\.shape .*; \[4\] or \[2, 4\] is needed"),
    "gradient": ({"v": PACKED_V.clone().requires_grad_()}, Unsupported, r"v\.requires_grad is True.*forward"),
    "hint float": ({"max_seqlen_q": 4.0}, TypeError, "max_seqlen_q is of type float; an integer or a tensor of one"),
    "hint bool": ({"max_seqlen_k": True}, TypeError, "max_seqlen_k is of type bool; an integer or a tensor of one"),
    "hint text": ({"max_seqlen_q": "4"}, TypeError, "max_seqlen_q is of type str; an integer or a tensor of one"),
    "hint list": ({"max_seqlen_k": [4]}, TypeError, "max_seqlen_k is of type list; an integer or a tensor of one"),
    "hint of many": (
        {"max_seqlen_k": USED},
        TypeError,
        "max_seqlen_k is of type Tensor; an integer or a tensor of one",
    ),
    "hint float tensor": ({"max_seqlen_q": torch.ones(1)}, TypeError, "max_seqlen_q is of type Tensor; an integer"),
    "hint negative": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1; 0 or more is needed"),
    "scale": ({"scale": 0}, ValueError, "scale is 0; a finite positive number"),
    "window": ({"window": 4}, TypeError, r"window is 4; a pair \(left, right\)"),
    "causal": ({"causal": 1}, TypeError, "causal is 1 of type int; True or False"),
}


@pytest.mark.parametrize("case", BAD_VARLEN)
def test_bad_input_of_packed_sequences_is_refused_by_name_before_anything_happens(kernel, case):
    changes, error, message = BAD_VARLEN[case]
    out = changes.get("out", torch.full_like(PACKED_Q, 7.0))
    before = out.clone()
    given = {"q": PACKED_Q, "k": PACKED_K, "v": PACKED_V, "cu_seqlens_q": CU, "cu_seqlens_k": CU, "out": out, **changes}
    for _ in range(2):
        with pytest.raises(error, match=message) as caught:
            fmha.attention_varlen(**given)
        assert type(caught.value) is error
    assert not kernel.calls and kernel.problem is None and not launch.PLANS
    assert torch.equal(out, before)
    fmha.attention_varlen(PACKED_Q, PACKED_K, PACKED_V, CU, CU, out=torch.empty_like(PACKED_Q))  # without the changes


def test_what_decides_the_numbers_reaches_the_kernel(kernel):
    """A stand-in that knows dense and causal only: what comes out is another matter."""
    q, k, v = tensors()
    sinks, slopes = torch.ones(4), torch.ones(2, 4)
    fmha.attention(q, k, v, causal=True, window=(3, -1), softcap=5.0, sinks=sinks, alibi_slopes=slopes, scale=0.5)
    assert kernel.problem == Problem("bfloat16", 16, "window", "both")
    assert (kernel.numbers["left"], kernel.numbers["right"], kernel.numbers["slopes batch"]) == (3, 0, 4)
    assert kernel.beside == (sinks.data_ptr(), slopes.data_ptr(), 0.5 / 5.0)
    assert kernel.calls[-1][5] == 5.0 * math.log2(math.e)
    fmha.attention(q, k, v, window=[2, None], sinks=sinks.expand(4), alibi_slopes=slopes[:1, :].squeeze(0))
    assert kernel.problem == Problem("bfloat16", 16, "window", "alibi")
    assert (kernel.numbers["left"], kernel.numbers["right"], kernel.numbers["slopes batch"]) == (2, 4, 0)
    fmha.attention(q, k, v, window=(-1, -1), softcap=0)
    assert kernel.problem == Problem("bfloat16", 16) and kernel.beside == (0, 0, 1.0)


def test_gradients_are_no_matter_where_none_are_recorded(kernel):
    q, k, v = (t.clone().requires_grad_() for t in tensors())
    with torch.no_grad():
        assert_right(fmha.attention(q, k, v), q, k, v)
    with pytest.raises(Unsupported, match=r"q\.requires_grad"):  # though the call has a plan
        fmha.attention(q, k, v)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120a", "cpu"])
def test_other_devices_are_refused(kernel, monkeypatch, arch):
    monkeypatch.setattr(launch, "describe_device", lambda device: launch.Device(arch))
    with pytest.raises(
        Unsupported, match=rf"architecture {arch}: sm_90a \(Hopper\) or .* only.*q is bfloat16 .* on cpu"
    ):
        fmha.attention(Q, K, V)


def test_cpu_and_meta_tensors_are_refused():
    for device in ("cpu", "meta"):
        with pytest.raises(Unsupported, match=f"architecture {device}: sm_90a"):
            fmha.attention(*(t.to(device) for t in (Q, K, V)))


@pytest.mark.parametrize(("version", "arch"), [((9, 0), "sm_90a"), ((8, 0), "sm_80"), ((10, 3), "sm_103a")])
def test_architectures_are_named_as_the_compiler_names_them(monkeypatch, version, arch):
    properties = type(
        "Properties", (), {"major": version[0], "minor": version[1], "L2_cache_size": 7, "multi_processor_count": 3}
    )
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert launch.describe_device.__wrapped__(torch.device("cuda", 0)) == launch.Device(arch, 7, 3)
    monkeypatch.setattr(torch.version, "cuda", None)  # an AMD build, where gfx90a says it is 9.0
    assert launch.describe_device.__wrapped__(torch.device("cuda", 0)) == launch.Device("cuda")


def test_a_compile_during_a_graph_capture_is_refused(kernel, monkeypatch):
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    monkeypatch.setattr(library, "fetch", lambda *kernel: pytest.fail("fetched"))
    with pytest.raises(RuntimeError, match=r"fmha\.warmup\(Problem\(dtype='bfloat16', head_dim=16, mask='dense'"):
        fmha.attention(Q, K, V)
    monkeypatch.setattr(library, "loaded", kernel.fetch)
    assert_right(fmha.attention(Q, K, V), Q, K, V)


# -- plans -------------------------------------------------------------------------------------------------------------
def test_calls_that_differ_in_data_alone_share_a_plan(kernel, monkeypatch):
    planned = []
    real = attention_module._plan
    monkeypatch.setattr(attention_module, "_plan", lambda *a, **b: planned.append(a) or real(*a, **b))
    q, k, v = tensors()
    for _ in range(3):
        q, k, v = q.clone(), k.clone(), v.clone() + 1
        assert_right(fmha.attention(q, k, v), q, k, v)
    assert len(planned) == 1
    different = [
        lambda: fmha.attention(q[:, :4], k, v),
        lambda: fmha.attention(q, k[:, 1:], v[:, 1:]),
        lambda: fmha.attention(q, k, v.transpose(1, 2).contiguous().transpose(1, 2)),
        lambda: fmha.attention(q.half(), k.half(), v.half()),
        lambda: fmha.attention(q, k, v, causal=True),
        lambda: fmha.attention(q, k, v, scale=1.0),
        lambda: fmha.attention(q, k, v, return_lse=True),
        lambda: fmha.attention(q, k, v, window=(3, 1)),
        lambda: fmha.attention(q, k, v, window=(2, 1)),
        lambda: fmha.attention(q, k, v, softcap=5.0),
        lambda: fmha.attention(q, k, v, sinks=torch.ones(4)),
        lambda: fmha.attention(q, k, v, alibi_slopes=torch.ones(4)),
        lambda: fmha.attention(q, k, v, alibi_slopes=torch.ones(2, 4)),
        lambda: fmha.attention(q, k, v[..., :8].contiguous()),
        lambda: fmha.attention(q, k, v, out=torch.empty_like(q)),
        lambda: fmha.attention(q, k, v, out=torch.empty_like(q).transpose(1, 2).contiguous().transpose(1, 2)),
    ]
    for i, call in enumerate(different):
        call()
        call()
        assert len(planned) == 2 + i
    for wrong in (True, math.nan):  # equal to a scale that has a plan, or to nothing
        with pytest.raises((TypeError, ValueError)):
            fmha.attention(q, k, v, scale=wrong)


@pytest.mark.parametrize("window", [(3, True), (3.0, 1), [3, True]])
def test_what_is_no_window_is_refused_though_it_equals_one_that_has_a_plan(kernel, window):
    fmha.attention(Q, K, V, window=(3, 1))
    with pytest.raises(TypeError, match="side is of type"):
        fmha.attention(Q, K, V, window=window)


def test_a_list_and_a_tuple_share_a_plan(kernel):
    for window in ((3, 1), [3, 1], (3, 1), [3, 1]):
        assert_right(fmha.attention(Q, K, V, window=window), Q, K, V, window=(3, 1))
    assert len(launch.PLANS) == 1 and len(kernel.calls) == 4


def test_plans_do_not_pile_up(kernel, monkeypatch):
    monkeypatch.setattr(launch, "MAX_PLANS", 4)
    q, k, v = tensors(seqlen_k=20)
    for seqlen in range(1, 21):
        assert_right(fmha.attention(q, k[:, :seqlen], v[:, :seqlen]), q, k[:, :seqlen], v[:, :seqlen])
        assert len(launch.PLANS) <= 4


def test_a_plan_holds_no_data(kernel):
    q, k, v = tensors()
    fmha.attention(q, k, v)
    (plan,) = launch.PLANS.values()
    held = [getattr(plan, name) for name in plan.__slots__ if isinstance(getattr(plan, name), torch.Tensor)]
    assert sum(tensor.numel() for tensor in held) == 0


# -- other libraries ---------------------------------------------------------------------------------------------------
class Array:
    """An array of a library that knows DLPack and nothing of torch."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class NamespacedArray(Array):
    def __array_namespace__(self):
        return type("namespace", (), {"from_dlpack": lambda tensor: NamespacedArray(torch.from_dlpack(tensor))})


def test_numpy_arrays_give_numpy_arrays(kernel):
    q, k, v = tensors(dtype=FP16)
    out, lse = fmha.attention(q.numpy(), k.numpy(), v.numpy(), return_lse=True)
    assert type(out) is np.ndarray and out.dtype == np.float16 and lse.dtype == np.float32
    assert_right(torch.from_numpy(out), q, k, v)
    assert in_place(kernel, 0, q, k, v) == [True] * 3


def test_the_result_returns_to_the_library_of_q(kernel):
    q, k, v = tensors()
    out = fmha.attention(NamespacedArray(q), k, Array(v), causal=True)
    assert type(out) is NamespacedArray
    assert_right(out.tensor, q, k, v, causal=True)
    assert type(fmha.attention(Array(q), NamespacedArray(k), v)) is torch.Tensor  # no namespace to return to
    assert type(fmha.attention(q, NamespacedArray(k), Array(v))) is torch.Tensor


def test_out_of_another_library_is_filled_and_returned(kernel):
    q, k, v = tensors()
    mine = Array(torch.full_like(q, torch.nan))
    out, lse = fmha.attention(NamespacedArray(q), k, v, out=mine, return_lse=True)
    assert out is mine and type(lse) is NamespacedArray
    assert_right(mine.tensor, q, k, v)


def test_an_array_that_torch_cannot_take_is_named(kernel):
    class Broken(Array):
        def __dlpack__(self, **options):
            raise BufferError("it is read-only")

    with pytest.raises(TypeError, match=r"k is a Broken that torch.from_dlpack does not take: it is read-only"):
        fmha.attention(Q, Broken(K), V)
