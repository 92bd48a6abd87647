"""`fmha.attention` up to the launch, on CPU tensors: a stand-in takes the kernel's place and checks its arguments."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import math
import random

import numpy as np
import pytest
import torch

import fmha
from fmha.jit import arguments, launch, layout, library
from fmha.jit.counter import Counter
from fmha.problem import Problem, Unsupported
from schedules.tiling import BlockConfig

attention_module = importlib.import_module("fmha.attention")  # the attribute of that name is the function
BF16, FP16 = torch.bfloat16, torch.float16
L2_BYTES = 50 << 20
MULTIPROCESSORS = 132
STREAM = 5


def oracle(q, k, v, causal=False, scale=None):
    """Attention in float64, straight from its definition: output [B, Sq, Hq, D] and LSE [B, Hq, Sq]."""
    q, k, v = (t.double() for t in (q, k, v))
    (seqlen_q, heads), (seqlen_k, kv_heads) = q.shape[1:3], k.shape[1:3]
    k, v = (t.repeat_interleave(heads // kv_heads, 2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[3] ** -0.5)
    if causal:
        i, j = torch.arange(seqlen_q)[:, None], torch.arange(seqlen_k)
        scores = scores.masked_fill(j > i + seqlen_k - seqlen_q, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


class Kernel:
    """Computes what the kernel would, after the checks that the compiled launch function makes."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.counter = Counter(torch.device("cpu"), STREAM)
        self.problem: Problem | None = None

    def current(self, device) -> Counter:
        assert device.type == "cpu"
        return self.counter

    def fetch(self, problem: Problem, config: BlockConfig, arch: str):
        assert arch == "sm_90a"
        self.problem, self.config = problem, config
        return self

    def tensor(self, name: str, address: int, numbers: dict[str, int]) -> torch.Tensor:
        """What the launch function takes the address for."""
        shape = [numbers[size] for size in arguments.SHAPES[name]]
        strides = [numbers[f"{name} {mode}"] for mode in ("batch", "row", "head")] + [1]
        assert address % 16 == 0 and all(
            stride > 0 and stride % arguments.STRIDE_ELEMENTS == 0 for stride in strides[:3]
        )
        reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_int16 * reach).from_address(address)
        return torch.frombuffer(memory, dtype=getattr(torch, self.problem.dtype)).as_strided(shape, strides)

    def __call__(self, sizes, *rest):
        q, k, v, o, lse, scale_log2, count, base, stream = rest
        assert all(type(number) is int for number in (sizes, q, k, v, o, lse, count, base, stream))
        assert type(scale_log2) is float and (count, base, stream) == (self.counter.address, self.counter.base, STREAM)
        numbers = dict(zip(arguments.SIZES, (ctypes.c_int64 * len(arguments.SIZES)).from_address(sizes), strict=True))
        assert numbers["multiprocessors"] == MULTIPROCESSORS
        q, k, v, o = (self.tensor(name, at, numbers) for name, at in zip("qkvo", (q, k, v, o), strict=True))
        head_group = numbers["head_group"]
        self.calls.append((q, k, v, o, lse, scale_log2, head_group))
        out, out_lse = oracle(q, k, v, self.problem.mask == "causal", scale_log2 / math.log2(math.e))
        o.copy_(out)
        if lse:
            memory = (ctypes.c_float * out_lse.numel()).from_address(lse)
            torch.frombuffer(memory, dtype=torch.float32).copy_(out_lse.flatten())


@pytest.fixture
def kernel(monkeypatch):
    """Makes CPU tensors pass for tensors on a Hopper GPU."""
    stand_in = Kernel()
    monkeypatch.setattr(launch, "describe_device", lambda device: launch.Device("sm_90a", L2_BYTES, MULTIPROCESSORS))
    monkeypatch.setattr(launch, "current", stand_in.current)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of a CPU
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    monkeypatch.setattr(library, "loaded", lambda *kernel: None)
    monkeypatch.setattr(library, "fetch", stand_in.fetch)
    monkeypatch.setattr(launch, "PLANS", {})
    monkeypatch.setattr(attention_module, "PLANS", launch.PLANS)
    return stand_in


def tensors(batch=2, seqlen_q=5, seqlen_k=7, heads=4, kv_heads=2, head_dim=16, dtype=BF16):
    torch.manual_seed(0)
    shapes = ((batch, seqlen_q, heads, head_dim), *2 * ((batch, seqlen_k, kv_heads, head_dim),))
    return tuple(torch.randn(shape).to(dtype) for shape in shapes)


def assert_right(out, q, k, v, **options):
    expected, _ = oracle(q, k, v, **options)
    assert out.dtype == q.dtype
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=1e-2)


# -- what comes back ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3, np.float32(0.3), 2])
def test_output_and_lse(kernel, dtype, causal, scale):
    q, k, v = tensors(dtype=dtype)
    out, lse = fmha.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    options = {"causal": causal, "scale": None if scale is None else float(scale)}
    assert_right(out, q, k, v, **options)
    torch.testing.assert_close(lse.double(), oracle(q, k, v, **options)[1], atol=1e-4, rtol=1e-4)
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
BAD = {
    "rank of q": ({"q": Q[0]}, ValueError, r"q\.shape is \[5, 4, 16\].*four modes.*B, Sq, Hq, D"),
    "rank of v": ({"v": V[None]}, ValueError, r"v\.shape is \[1, 2, 7, 2, 16\].*four modes"),
    "batch": ({"k": K[:1], "v": V[:1]}, ValueError, r"k\.shape\[0\], the batch, is 1; it must be that of q, 2"),
    "head dim": ({"v": V[..., :8]}, ValueError, r"v\.shape\[3\], the head_dim, is 8; it must be that of q, 16"),
    "lengths": ({"v": V[:, :6]}, ValueError, r"v\.shape is \(2, 6, 2, 16\); it must be that of k, \(2, 7, 2, 16\)"),
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
    "window": ({"window": (4, 0)}, Unsupported, r"window is \(4, 0\); only its default, \(None, None\)"),
    "softcap": ({"softcap": 0.0}, Unsupported, "softcap is 0.0; only its default, None"),
    "sinks": ({"sinks": torch.ones(4)}, Unsupported, "sinks is a Tensor; only its default, None"),
    "alibi_slopes": ({"alibi_slopes": torch.ones(4)}, Unsupported, "alibi_slopes is a Tensor"),
    "seqused_q": ({"seqused_q": torch.ones(2)}, Unsupported, "seqused_q is a Tensor"),
    "seqused_k": ({"seqused_k": torch.ones(2)}, Unsupported, "seqused_k is a Tensor"),
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


def test_gradients_are_no_matter_where_none_are_recorded(kernel):
    q, k, v = (t.clone().requires_grad_() for t in tensors())
    with torch.no_grad():
        assert_right(fmha.attention(q, k, v), q, k, v)
    with pytest.raises(Unsupported, match=r"q\.requires_grad"):  # though the call has a plan
        fmha.attention(q, k, v)


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_120a", "cpu"])
def test_other_devices_are_refused(kernel, monkeypatch, arch):
    monkeypatch.setattr(launch, "describe_device", lambda device: launch.Device(arch))
    with pytest.raises(Unsupported, match=rf"architecture {arch}: sm_90a \(Hopper\) only.*q is bfloat16 .* on cpu"):
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
    with pytest.raises(RuntimeError, match=r"fmha\.warmup\(Problem\(dtype='bfloat16', head_dim=16, mask='dense'\)\)"):
        fmha.attention(Q, K, V)
    monkeypatch.setattr(library, "loaded", kernel.fetch)
    assert_right(fmha.attention(Q, K, V), Q, K, V)


# -- plans -------------------------------------------------------------------------------------------------------------
def test_calls_that_differ_in_data_alone_share_a_plan(kernel, monkeypatch):
    planned = []
    real = attention_module._plan
    monkeypatch.setattr(attention_module, "_plan", lambda *args: planned.append(args) or real(*args))
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
