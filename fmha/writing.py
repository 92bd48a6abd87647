"""`fmha.write_kv`: new tokens into the slots of a paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmha.attention import kernel_function
from fmha.checks import Operand, check_same, check_served, refuse_gradients
from fmha.jit import launch
from fmha.jit import layout as memory
from fmha.jit.arguments import WRITE_SIZES, HostNumbers
from fmha.jit.launch import PLANS
from fmha.jit.layout import ALIGNMENT
from fmha.paging import CHUNK, Pages, pages_of
from fmha.problem import DTYPES, HEAD_DIM_MULTIPLE, Unsupported, WriteProblem
from schedules.tiling import CopyConfig

NAMES = ("k", "v", "k_pages", "v_pages", "slot_mapping")
SLOT_BYTES = {"int32": 4, "int64": 8}
MAX_TOKENS = 2**28  # the kernels count them in 32 bits
MAX_CHUNK_GROUPS = 65535  # CTAs along the second mode of a grid (CUDA programming guide, compute capabilities)
TOKENS_ABREAST = 16  # of a CTA, in vLLM's layout: 2 bytes of V each are a sector of memory
RESIDENT = 8  # CTAs of a multiprocessor, about: with fewer, each thread has one token


def write_kv(k: Any, v: Any, k_pages: Any, v_pages: Any, slot_mapping: Any, *, layout: str = "nhd") -> None:
    """Writes keys and values of new tokens into their slots of a paged KV cache, for `fmha.attention_paged` to read.

    k, v          [T, Hkv, D] and [T, Hkv, Dv], or [B, S, Hkv, D] and [B, S, Hkv, Dv]: bfloat16 or float16, of head dims
                  that are multiples of 8. Any strides, such as those of slices of a packed QKV tensor; where the last
                  is not 1, or another no multiple of 8, they are copied first.
    k_pages, v_pages  the pages, of k's dtype, as `layout` says and `fmha.attention_paged` reads them:
                      nhd   [pages, page, Hkv, D]
                      hnd   [pages, Hkv, page, D]
                      vllm  K [pages, Hkv, D / 8, page, 8] and V [pages, Hkv, Dv, page]
    slot_mapping  int32 or int64, [T] or [B, S]: the token goes to slot s % page of page s // page. A token with a
                  negative slot, such as -1, is skipped, and so is one with a slot behind the last page: nothing outside
                  the cache is ever written. Where tokens share a slot, it is undefined which one's elements it holds.

    Returns None. The current stream does the work, and the host waits for nothing; a captured CUDA graph takes new
    tokens and slots at every replay. Slots that are not named keep their bits.

    Errors, before anything is written: TypeError for what is no array with `__dlpack__`, ValueError for shapes, dtypes
    or devices that do not fit together and for pages that share memory with k, v, slot_mapping or each other,
    `fmha.Unsupported` for what no kernel serves, a tensor that requires a gradient among it.
    """
    given = k, v, k_pages, v_pages, slot_mapping
    if not all(isinstance(x, Tensor) for x in given):
        tensors = (launch.from_dlpack(name, array) for name, array in zip(NAMES, given, strict=True))
        return write_kv(*tensors, layout=layout)
    if torch.is_grad_enabled() and (
        k.requires_grad or v.requires_grad or k_pages.requires_grad or v_pages.requires_grad
    ):
        refuse_gradients(k=k, v=v, k_pages=k_pages, v_pages=v_pages)
    # fmt: off
    signature = (
        "write",
        k.shape, k.stride(), k.dtype, k.get_device(),
        v.shape, v.stride(), v.dtype, v.get_device(),
        k_pages.shape, k_pages.stride(), k_pages.dtype, k_pages.get_device(),
        v_pages.shape, v_pages.stride(), v_pages.dtype, v_pages.get_device(),
        slot_mapping.shape, slot_mapping.stride(), slot_mapping.dtype, slot_mapping.get_device(),
        layout,
    )
    # fmt: on
    try:
        plan: Any = PLANS.get(signature)
    except TypeError:  # a layout that cannot be hashed: planning says so
        plan = None
    if plan is None:
        plan = _plan(k, v, k_pages, v_pages, slot_mapping, layout)
        launch.remember(signature, plan)
    plan(k, v, k_pages, v_pages, slot_mapping)
    return None


@dataclass(frozen=True, slots=True, eq=False)
class WriteLaunch:
    """The plan of a call."""

    device: torch.device
    function: Callable[..., None] | None  # None where there is nothing to write
    reach: tuple[int, ...]  # bytes from the first to the last element of each tensor
    sizes: HostNumbers
    copied: HostNumbers  # where both k and v are copied
    k_in_place: bool
    v_in_place: bool

    def __call__(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor) -> None:
        device = self.device
        if self.function is None:
            return
        if device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(k, v, k_pages, v_pages, slot_mapping)
        self.refuse_overlap(k, v, k_pages, v_pages, slot_mapping)
        k_at, v_at = k_pages.data_ptr(), v_pages.data_ptr()
        if (k_at | v_at) % ALIGNMENT:
            raise Unsupported(f"k_pages or v_pages is at no multiple of {ALIGNMENT} bytes")
        sizes = self.sizes
        aligned = (k.data_ptr() | v.data_ptr()) % ALIGNMENT == 0
        if not aligned:
            sizes = self.copied
        if not (aligned and self.k_in_place):
            k = k.clone(memory_format=torch.contiguous_format)
        if not (aligned and self.v_in_place):
            v = v.clone(memory_format=torch.contiguous_format)
        slot_mapping = slot_mapping.contiguous()
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        self.function(sizes.address, k.data_ptr(), v.data_ptr(), k_at, v_at, slot_mapping.data_ptr(), stream)

    def refuse_overlap(self, *tensors: Tensor) -> None:
        """ValueError if pages, which are written, share memory with anything else."""
        starts = [tensor.data_ptr() for tensor in tensors]
        ends = [start + reach for start, reach in zip(starts, self.reach, strict=True)]
        for pages, other in ((2, 0), (2, 1), (2, 3), (2, 4), (3, 0), (3, 1), (3, 4)):
            if (
                starts[other] < ends[pages]
                and starts[pages] < ends[other]
                and memory.share_memory(tensors[other], tensors[pages])
            ):
                raise ValueError(
                    f"{NAMES[pages]} overlaps {NAMES[other]} in memory; pages may share no element with anything else"
                )


def _plan(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slot_mapping: Tensor, layout: Any) -> WriteLaunch:
    """Validates a call, gets its kernel into memory, and decides everything that its data does not."""
    given = k, v, k_pages, v_pages, slot_mapping
    operands = {name: Operand.of(name, x) for name, x in zip(NAMES, given, strict=True)}
    places = [pages_of(n, operands[n].shape, operands[n].strides, layout, n[0] == "v") for n in ("k_pages", "v_pages")]
    check_shapes(operands, *places)
    device = launch.describe_device(k.device)
    problem = WriteProblem("vllm" if layout == "vllm" else "rows")
    check_served(problem, device.arch, operands["k"])
    config = CopyConfig()
    tokens, slots = k.shape[:-2].numel(), places[0].pages * places[0].page
    chunks = [pages.heads * pages.dims // CHUNK for pages in places]
    shares = _shares(layout == "vllm", tokens, max(chunks), config, device.multiprocessors)
    if shares["chunk groups"] > MAX_CHUNK_GROUPS or tokens > MAX_TOKENS:
        most = MAX_CHUNK_GROUPS * config.threads // TOKENS_ABREAST * CHUNK
        raise Unsupported(f"{operands['k']}: up to {MAX_TOKENS} tokens of {most} elements are supported")
    numbers = dict(zip(WRITE_SIZES, [0] * len(WRITE_SIZES), strict=True)) | shares
    numbers |= {"tokens": tokens, "slots": slots, "slot bytes": SLOT_BYTES[operands["slot_mapping"].dtype]}
    numbers |= {"page shift": places[0].page.bit_length() - 1}
    for name, pages, count in zip("kv", places, chunks, strict=True):
        numbers |= {f"{name} {mode}": getattr(pages, mode) for mode in ("outer", "row", "head", "chunk")}
        numbers |= {f"{name} columns": pages.dims // CHUNK, f"{name} chunks": count}

    def steps(x: Tensor, in_place: bool) -> tuple[int, int]:
        strides = x.stride() if in_place else memory.contiguous_strides(x.shape)
        found = token_steps(x.shape, strides)
        assert found is not None
        return found

    def sizes(k_in_place: bool, v_in_place: bool) -> HostNumbers:
        found = {"k": steps(k, k_in_place), "v": steps(v, v_in_place)}
        strides = {f"{n} token": token for n, (token, _) in found.items()}
        return HostNumbers((numbers | strides | {f"{n} token head": head for n, (_, head) in found.items()}).values())

    blank = tokens == 0 or slots == 0 or max(chunks) == 0
    in_place = [token_steps(x.shape, x.stride()) is not None for x in (k, v)]
    return WriteLaunch(
        k.device,
        None if blank else kernel_function(problem, config, device.arch, k.device),
        tuple(memory.reach(x) for x in given),
        sizes(*in_place),
        sizes(False, False),
        *in_place,
    )


def touch(problem: WriteProblem) -> None:
    """Launches a kernel on the current device for a token that is skipped."""
    k_shape, v_shape = ((1, 1, 1, 8, 8), (1, 1, 8, 8)) if problem.layout == "vllm" else ((1, 1, 1, 8),) * 2
    new, k_pages, v_pages = (torch.zeros(s, dtype=torch.float16, device="cuda") for s in ((1, 1, 8), k_shape, v_shape))
    slots = torch.full((1,), -1, dtype=torch.int32, device="cuda")
    write_kv(new, new, k_pages, v_pages, slots, layout="vllm" if problem.layout == "vllm" else "nhd")


def _shares(by_columns: bool, tokens: int, chunks: int, config: CopyConfig, multiprocessors: int) -> dict[str, int]:
    """How `tokens` of up to `chunks` times 16 bytes of K or V are divided: what the last of `WRITE_SIZES` say."""
    if by_columns:
        abreast = TOKENS_ABREAST
        width = config.threads // abreast
        chunk_groups = -(-chunks // width)
    else:
        chunk_groups = -(-chunks // config.threads)
        width = -(-chunks // max(1, chunk_groups))
        abreast = config.threads // max(1, width)
    groups = -(-tokens // abreast)
    several = 2 * groups * chunk_groups > multiprocessors * RESIDENT
    ctas = -(-groups // config.at_once) if several else groups
    shares = {"ctas": ctas, "chunk groups": chunk_groups, "abreast": abreast, "width": width, "several": int(several)}
    return shares


def token_steps(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, int] | None:
    """From a token to the next and from a head to the next, in elements, of [T, H, D] or [B, S, H, D]; None where the
    kernel cannot read it as it is: its steps are multiples of 16 bytes."""
    *lead, heads, dims = shape
    *tokens, head, last = strides
    token = next((step for size, step in zip(lead[::-1], tokens[::-1], strict=True) if size > 1), 0)
    head = head if heads > 1 else 0
    if min(lead) > 1 and len(lead) == 2 and tokens[0] != lead[1] * tokens[1]:
        return None
    return None if (dims > 1 and last != 1) or token % CHUNK or head % CHUNK else (token, head)


def check_shapes(operands: dict[str, Operand], k_pages: Pages, v_pages: Pages) -> None:
    """ValueError if tensors do not fit together, `fmha.Unsupported` if they do and no kernel takes them."""
    k, v, slot_mapping = operands["k"], operands["v"], operands["slot_mapping"]
    if len(k.shape) not in (3, 4):
        raise ValueError(f"k.shape is {list(k.shape)}; [T, Hkv, D] or [B, S, Hkv, D] is needed")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(f"v.shape is {list(v.shape)}; all its modes but the last must be those of k, {list(k.shape)}")
    for name in ("v", "k_pages", "v_pages"):
        check_same(operands[name], k, "dtype", "device")
    for new, pages, name in ((k, k_pages, "k_pages"), (v, v_pages, "v_pages")):
        for what, given, needed in (("heads", pages.heads, new.shape[-2]), ("head dim", pages.dims, new.shape[-1])):
            if given != needed:
                raise ValueError(f"{name} has {what} {given}; it must be that of {new.name}, {needed}")
        if memory.self_overlaps(operands[name].shape, operands[name].strides):
            strides = operands[name].strides
            raise ValueError(f"{name}.stride() is {strides}: elements share memory, and each needs its own")
    for mode, what in (("pages", "pages"), ("page", "slots a page")):
        if (found := getattr(v_pages, mode)) != getattr(k_pages, mode):
            raise ValueError(f"v_pages has {found} {what}; it must have those of k_pages, {getattr(k_pages, mode)}")
    if slot_mapping.shape != k.shape[:-2]:
        raise ValueError(f"slot_mapping.shape is {list(slot_mapping.shape)}; {list(k.shape[:-2])} is needed")
    if slot_mapping.dtype not in SLOT_BYTES:
        raise ValueError(f"slot_mapping.dtype is {slot_mapping.dtype}; {' or '.join(SLOT_BYTES)} is needed")
    check_same(slot_mapping, k, "device")
    if k.dtype not in DTYPES:
        raise Unsupported(f"dtype {k.dtype}: {' or '.join(DTYPES)} only ({k})")
    for operand in (k, v):
        if operand.shape[-1] % HEAD_DIM_MULTIPLE:
            raise Unsupported(f"{operand}: head dims that are multiples of {HEAD_DIM_MULTIPLE} only")
