"""The public function: validate, name the problem, plan, launch."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from fmha.jit import launch, layout, library
from fmha.jit.arguments import Layout, Sizes
from fmha.jit.launch import PLANS, Answer, Blank, Launch, Plan
from fmha.jit.library import pick
from fmha.problem import Problem, Unsupported, supports
from schedules.tiling import BlockConfig, Extent
from schedules.work import head_group

LOG2_E = math.log2(math.e)
FLOAT32 = torch.finfo(torch.float32)
MAX_SIZE = 2**31 - 2**16  # of a mode, and work tiles of a call: the kernels count in 32 bits
NO_WINDOW = (None, None)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] = NO_WINDOW,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    alibi_slopes: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention, `softmax(scale * q k^T + mask) v` for every batch entry and head.

    q           [B, Sq, Hq, D], bfloat16 or float16, on a GPU of `fmha.supports`. D is a multiple of 8 up to 256.
    k, v        [B, Sk, Hkv, D], likewise. Hkv divides Hq: query head h reads KV head h // (Hq / Hkv).
    causal      query i sees the keys up to i + Sk - Sq: the diagonal ends in the bottom right corner
    scale       a finite positive number; 1 / sqrt(D) by default
    out         [B, Sq, Hq, D] to write into, of q's dtype and device, sharing no memory with q, k or v
    return_lse  also return the logarithm of each row's sum of exponentials (natural; scaled and masked scores). Up to
                head dim 192 another, slower kernel then answers, which adds them up in float32: outputs of the two
                agree within rounding

    Returns the output, [B, Sq, Hq, D] in q's dtype (`out` if given, else contiguous), or (output, lse) with lse float32
    [B, Hq, Sq]. A query that sees no key gives 0, and minus infinity. Sizes may be 0.

    Any strides will do if the last one is 1. What TMA can address runs in place: a base and strides that are multiples
    of 16 bytes, and no stride of 0, in modes of more than one element. Other inputs are copied first, another `out`
    is filled by a copy.

    Infinities and NaN spread as in a plain softmax, 0 times either being NaN: one in v can also reach queries to which
    the causal mask hides it. One in a hidden k never does.

    The arrays may come from any library that speaks DLPack. torch tensors give torch tensors; for others the result
    returns to q's library if its array namespace has `from_dlpack`, and is a torch tensor otherwise. The launch is
    asynchronous, on the current stream of the tensors' device, and can be captured in a CUDA graph once the kernel is
    in memory (`fmha.warmup`).

    `window`, `softcap`, `sinks`, `alibi_slopes`, `seqused_q` and `seqused_k` must be left at their defaults.

    Raises TypeError or ValueError for arguments that are malformed or do not fit together, `fmha.Unsupported` for those
    that no kernel serves, and RuntimeError where a CUDA graph is being captured and the kernel is not yet in memory.
    Each names the argument, its value and what is allowed, and leaves `out` untouched.

    Online softmax: Milakov and Gimelshein, 2018. The kernels: FlashAttention-3, Shah et al., 2024.
    """
    if softcap is not None or sinks is not None or alibi_slopes is not None or window is not NO_WINDOW:
        _refuse_options(window=window, softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes)
    if seqused_q is not None or seqused_k is not None:
        _refuse_options(seqused_q=seqused_q, seqused_k=seqused_k)
    if type(causal) is not bool or type(return_lse) is not bool:
        _refuse_flags(causal=causal, return_lse=return_lse)
    if not (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and (out is None or isinstance(out, Tensor))
    ):
        return _through_dlpack(q, k, v, out, causal=causal, scale=scale, return_lse=return_lse)
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (out is not None and out.requires_grad)
    ):
        _refuse_gradients(q=q, k=k, v=v, out=out)

    # fmt: off
    signature = (
        q.shape, q.stride(), q.dtype, q.get_device(),
        k.shape, k.stride(), k.dtype, k.get_device(),
        v.shape, v.stride(), v.dtype, v.get_device(),
        None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
        causal, return_lse, scale, type(scale),  # the type, because True == 1.0
    )
    # fmt: on
    try:
        plan = PLANS.get(signature)
    except TypeError:  # a scale that cannot be hashed is no number: planning says so
        plan = None
    if plan is None:  # for calls that are refused there never is one
        plan = _plan(q, k, v, out, causal, scale, return_lse)
        launch.remember(signature, plan)
    return plan(q, k, v, out)


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    causal: bool,
    scale: Any,
    return_lse: bool,
    config: BlockConfig | None = None,
) -> Plan:
    """Validates a call, gets its kernel into memory, and decides everything that its data pointers do not.

    `config` is for measuring one that such a call does not get.
    """
    operands = [Operand.of(name, tensor) for name, tensor in zip("qkv", (q, k, v), strict=True)]
    check_inputs(*operands)
    problem = Problem(operands[0].dtype, q.shape[3], "causal" if causal else "dense")
    device = launch.describe_device(q.device)
    if reason := supports(problem, device.arch):
        raise Unsupported(f"{reason} ({operands[0]})")
    scale_log2 = check_scale(scale, problem.head_dim) * LOG2_E
    if out is not None:
        check_output(Operand.of("out", out), operands[0])

    answer = Answer(
        shape=tuple(q.shape),
        device=q.device,
        return_lse=return_lse,
        row_major=q.stride() == layout.contiguous_strides(q.shape),
        reach=tuple(0 if tensor is None else layout.reach(tensor) for tensor in (q, k, v, out)),
    )
    if 0 in q.shape or 0 in k.shape:
        return Blank(answer)
    heads = q.shape[0] * q.shape[2]
    if config is None:
        extent = Extent(problem.mask, q.shape[1], k.shape[1], heads, device.multiprocessors, return_lse)
        config = pick(problem, device.arch, extent).config
    assert config.serves(return_lse), "a kernel with columns of ones writes no LSE"
    work_tiles = -(-q.shape[1] // config.tile_m) * heads
    if work_tiles > MAX_SIZE:
        raise Unsupported(f"{operands[0]}: {work_tiles} tiles of queries; up to {MAX_SIZE} are supported")
    kv_bytes_per_key = 2 * q.element_size() * k.shape[2] * k.shape[3] // q.shape[2]  # K and V, for one query head
    group = head_group(causal, k.shape[1], kv_bytes_per_key, device.l2_bytes)
    o = Layout(q.shape, layout.contiguous_strides(q.shape))
    if out_in_place := out is not None and layout.in_place(out):
        o = Layout.of(out)
    return Launch(
        answer,
        function=_kernel(problem, config, device.arch, q.device),
        scale_log2=scale_log2,
        head_group=group,
        work_tiles=work_tiles,
        multiprocessors=device.multiprocessors,
        sizes=Sizes([*map(Layout.of, (q, k, v)), o], group, device.multiprocessors),
        inputs_in_place=layout.in_place(q) and layout.in_place(k) and layout.in_place(v),
        out_in_place=out_in_place,
    )


def _kernel(problem: Problem, config: BlockConfig, arch: str, device: torch.device) -> library.Function:
    """The launch function, fetched if it is not in memory and nothing forbids that."""
    function = library.loaded(problem, config, arch)
    if function is None:
        if launch.capturing(device):
            raise RuntimeError(
                f"the kernel for {problem} is not in memory, and a CUDA graph is being captured: call "
                f"fmha.warmup({problem}) before the capture"
            )
        function = library.fetch(problem, config, arch)
    return function


@dataclass(frozen=True)
class Operand:
    """What validation asks of a tensor: no data, so that any device's can be checked."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Operand:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, tuple(tensor.shape), tensor.stride(), dtype, str(tensor.device))

    def __str__(self) -> str:
        return f"{self.name} is {self.dtype} {list(self.shape)} on {self.device}"


def check_inputs(q: Operand, k: Operand, v: Operand) -> None:
    """ValueError if q, k and v do not fit together, whatever the kernels support."""
    for operand, modes in ((q, "B, Sq, Hq, D"), (k, "B, Sk, Hkv, D"), (v, "B, Sk, Hkv, D")):
        if len(operand.shape) != 4:
            raise ValueError(f"{operand.name}.shape is {list(operand.shape)}; four modes are needed, [{modes}]")
        if max(operand.shape) > MAX_SIZE:
            raise ValueError(f"{operand.name}.shape is {list(operand.shape)}; sizes up to {MAX_SIZE} are allowed")
        check_last_stride(operand)
    for operand in (k, v):
        for what, mode in (("batch", 0), ("head_dim", 3)):
            if operand.shape[mode] != q.shape[mode]:
                raise ValueError(
                    f"{operand.name}.shape[{mode}], the {what}, is {operand.shape[mode]}; "
                    f"it must be that of q, {q.shape[mode]}"
                )
        check_same(operand, q, "dtype", "device")
    check_same(v, k, "shape")
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; the heads of k must divide those of q")


def check_output(out: Operand, q: Operand) -> None:
    """ValueError if `out` cannot take a result like q."""
    check_same(out, q, "shape", "dtype", "device")
    check_last_stride(out)
    if layout.self_overlaps(out.shape, out.strides):
        raise ValueError(f"out.stride() is {out.strides}: elements of out share memory, and each needs its own")


def check_same(operand: Operand, other: Operand, *attributes: str) -> None:
    for attribute in attributes:
        given, needed = getattr(operand, attribute), getattr(other, attribute)
        if given != needed:
            raise ValueError(f"{operand.name}.{attribute} is {given}; it must be that of {other.name}, {needed}")


def check_last_stride(operand: Operand) -> None:
    if operand.strides[-1] != 1 and operand.shape[-1] > 1:
        raise ValueError(f"{operand.name}.stride() is {operand.strides}; the last one must be 1 (call .contiguous())")


def check_scale(scale: Any, head_dim: int) -> float:
    """The scale as a float: TypeError if it is no number, ValueError if it is not finite and positive in float32."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale is {scale!r} of type {type(scale).__name__}; a Python or NumPy number is needed")
    try:
        value = float(scale)
    except OverflowError:
        value = math.inf
    if (
        not FLOAT32.tiny <= value * LOG2_E <= FLOAT32.max
    ):  # false for NaN; this product is what the kernel multiplies by
        raise ValueError(f"scale is {scale!r}; a finite positive number is needed, between 1e-38 and 2e38")
    return value


def _refuse_gradients(**given: Tensor | None) -> NoReturn:
    name = next(name for name, tensor in given.items() if tensor is not None and tensor.requires_grad)
    raise Unsupported(
        f"{name}.requires_grad is True, and fmha computes the forward pass only: "
        "call under torch.no_grad() or detach it"
    )


def _refuse_flags(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; True or False is needed")


def _refuse_options(**given: Any) -> None:
    for name, value in given.items():
        default = NO_WINDOW if name == "window" else None
        if not (value is default or (name == "window" and value == NO_WINDOW)):
            shown = repr(value) if isinstance(value, (int, float, str, tuple, list)) else f"a {type(value).__name__}"
            raise Unsupported(f"{name} is {shown}; only its default, {default}, is supported")


def _through_dlpack(q: Any, k: Any, v: Any, out: Any, **options: Any) -> Any:
    """The same call with torch tensors over the same memory; what it returns goes back to q's library."""
    tensors = [launch.from_dlpack(name, array) for name, array in (("q", q), ("k", k), ("v", v))]
    target = None if out is None else launch.from_dlpack("out", out)
    result = attention(*tensors, out=target, **options)
    o, *lse = result if options["return_lse"] else (result,)
    o = launch.to_library_of(q, o) if out is None else out
    return (o, *(launch.to_library_of(q, tensor) for tensor in lse)) if lse else o
