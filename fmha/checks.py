"""What a call may be: every argument is checked here, before anything is launched or written."""

from __future__ import annotations

import functools
import math
import numbers
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from fmha.jit import layout
from fmha.jit.launch import Lengths
from fmha.problem import UNRUN, AnyProblem, Unsupported, supports, unrun

LOG2_E = math.log2(math.e)
FLOAT32 = torch.finfo(torch.float32)
MAX_SIZE = 2**31 - 2**16  # of a mode, and work tiles of a call: the kernels count in 32 bits
NO_LIMIT = -1  # a side of a window, as other libraries write None
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


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


class UnrunWarning(UserWarning):
    """Calls get kernels that nobody is known to have run."""


def check_served(problem: AnyProblem, arch: str, operand: Operand) -> None:
    """`fmha.Unsupported` if no kernel for `arch` computes `problem`, or one that was never run and that nobody allows;
    one warning a process where somebody does."""
    if reason := supports(problem, arch):
        raise Unsupported(f"{reason} ({operand})")
    if reason := unrun(arch):
        raise Unsupported(f"{operand}: {reason}")
    if arch in UNRUN:
        _warn_of_unrun(arch)


@functools.cache
def _warn_of_unrun(arch: str) -> None:
    words = f"fmha: the kernels for {arch} were never run before they were published; what they compute may be wrong"
    warnings.warn(words, UnrunWarning, stacklevel=2)


def check_inputs(q: Operand, k: Operand, v: Operand, packed: bool = False) -> None:
    """ValueError if q, k and v do not fit together, whatever the kernels support."""
    lead, count = ("T", "three") if packed else ("B, S", "four")
    for operand, modes in ((q, f"{lead}q, Hq, D"), (k, f"{lead}k, Hkv, D"), (v, f"{lead}k, Hkv, Dv")):
        if len(operand.shape) != 4 - packed:
            raise ValueError(f"{operand.name}.shape is {list(operand.shape)}; {count} modes are needed, [{modes}]")
        if max(operand.shape) > MAX_SIZE:
            raise ValueError(f"{operand.name}.shape is {list(operand.shape)}; sizes up to {MAX_SIZE} are allowed")
        check_last_stride(operand)
    last = 3 - packed
    for operand, what, mode in ((k, "batch", 0), (k, "head_dim", last), (v, "batch", 0)):
        if not (packed and mode == 0) and operand.shape[mode] != q.shape[mode]:
            raise ValueError(
                f"{operand.name}.shape[{mode}], the {what}, is {operand.shape[mode]}; "
                f"it must be that of q, {q.shape[mode]}"
            )
    for operand in (k, v):
        check_same(operand, q, "dtype", "device")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v.shape is {v.shape}; all its modes but the last must be those of k, {k.shape[:-1]}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; the heads of k must divide those of q")


def check_lengths(lengths: Lengths, q: Operand) -> int:
    """How many sequences there are. ValueError if a tensor of their lengths is not what it should be."""
    cu_seqlens_q, *_ = lengths
    if cu_seqlens_q is None:
        sequences = q.shape[0]
    elif cu_seqlens_q.dim() != 1 or len(cu_seqlens_q) == 0:
        raise ValueError(f"cu_seqlens_q.shape is {list(cu_seqlens_q.shape)}; [B + 1] is needed")
    else:
        sequences = len(cu_seqlens_q) - 1
    for name, vector in zip(LENGTHS, lengths, strict=True):
        if vector is not None:
            count = sequences + name.startswith("cu")
            check_vector(Operand.of(name, vector), [(count,)], "int32", q)
    return sequences


def check_output(out: Operand, q: Operand) -> None:
    """ValueError if `out` cannot take a result of q's dtype, and of its shape but for v's head dim."""
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


def check_window(window: Any) -> tuple[int | None, int | None]:
    """The sides of the window, None for none. TypeError if it is no pair, or a side neither None nor an integer."""
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window is {window!r}; a pair (left, right) is needed, each an integer or None")
    sides = []
    for name, side in zip(("left", "right"), window, strict=True):
        if isinstance(side, bool) or not (side is None or isinstance(side, numbers.Integral)):
            raise TypeError(
                f"window is {window!r}: its {name} side is of type {type(side).__name__}; an integer or None is needed"
            )
        sides.append(None if side is None or side == NO_LIMIT else int(side))
    return sides[0], sides[1]


def check_scale(scale: Any, head_dim: int) -> float:
    """The scale as a float: TypeError if it is no number, ValueError if it is not finite and positive in float32."""
    return 1.0 / math.sqrt(head_dim) if scale is None else check_factor("scale", scale)


def check_softcap(softcap: Any) -> float | None:
    """The softcap as a float, None for none: raises as `check_scale` does."""
    none = softcap is None or (isinstance(softcap, numbers.Real) and not isinstance(softcap, bool) and softcap == 0)
    return None if none else check_factor("softcap", softcap)


def check_ratio(scale: float, softcap: float | None) -> float:
    """What scores are multiplied by before the tanh of a softcap; 1 without one."""
    ratio = 1.0 if softcap is None else scale / softcap
    if not ratio <= FLOAT32.max:
        raise ValueError(f"softcap is {softcap!r}, and the scale {scale}: their ratio is too large")
    return ratio


def check_factor(name: str, given: Any) -> float:
    if isinstance(given, bool) or not isinstance(given, numbers.Real):
        raise TypeError(f"{name} is {given!r} of type {type(given).__name__}; a Python or NumPy number is needed")
    try:
        value = float(given)
    except OverflowError:
        value = math.inf
    # False for NaN; this product is what the kernel multiplies by.
    if not FLOAT32.tiny <= value * LOG2_E <= FLOAT32.max:
        raise ValueError(f"{name} is {given!r}; a finite positive number is needed, between 1e-38 and 2e38")
    return value


def check_logits(sinks: Tensor | None, slopes: Tensor | None, sequences: int, heads: int, q: Operand) -> None:
    """ValueError if what adds to scores is not one number a head, or a sequence and head."""
    by_heads, by_sequences = (heads,), (sequences, heads)
    for name, vector, shapes in (("sinks", sinks, [by_heads]), ("alibi_slopes", slopes, [by_heads, by_sequences])):
        if vector is not None:
            check_vector(Operand.of(name, vector), shapes, "float32", q)


def check_vector(vector: Operand, shapes: Sequence[tuple[int, ...]], dtype: str, q: Operand) -> None:
    """ValueError if it is no `dtype` of one of `shapes` on q's device."""
    if vector.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{vector.name}.shape is {list(vector.shape)}; {allowed} is needed")
    if vector.dtype != dtype:
        raise ValueError(f"{vector.name}.dtype is {vector.dtype}; {dtype} is needed")
    check_same(vector, q, "device")


def check_hint(name: str, given: Any) -> int:
    """A longest length as a number; 0 where it is not given, or on a device, where nobody will wait for it."""
    if given is None or (isinstance(given, Tensor) and given.numel() == 1 and not given.is_floating_point()):
        return 0
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        raise TypeError(f"{name} is of type {type(given).__name__}; an integer or a tensor of one is needed")
    if given < 0:
        raise ValueError(f"{name} is {given}; 0 or more is needed")
    return int(given)


def refuse_gradients(**given: Tensor | None) -> NoReturn:
    name = next(name for name, tensor in given.items() if tensor is not None and tensor.requires_grad)
    raise Unsupported(
        f"{name}.requires_grad is True, and fmha computes the forward pass only: "
        "call under torch.no_grad() or detach it"
    )


def refuse_flags(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; True or False is needed")
