"""`fmha.attention_paged`: attention over a paged KV cache."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmha import prefill
from fmha.attention import NO_WINDOW, kernel_function
from fmha.checks import (
    LOG2_E,
    Operand,
    check_last_stride,
    check_output,
    check_ratio,
    check_same,
    check_scale,
    check_served,
    check_softcap,
    check_vector,
    check_window,
    refuse_flags,
    refuse_gradients,
)
from fmha.jit import launch, layout, workspace
from fmha.jit.arguments import PAGED_SIZES, HostNumbers
from fmha.jit.launch import PLANS, Answer, address
from fmha.jit.layout import ALIGNMENT
from fmha.jit.library import pick
from fmha.paging import CHUNK, Pages, pages_of
from fmha.prefill import Prefill
from fmha.problem import PagedProblem, Unsupported
from schedules.splits import EXTRA, MAX_UNITS, UNLIMITED, counters_needed, parts_needed, sides

MAX_SPLITS = 256
MAX_TOKENS = 2**28  # of a batch entry of q, and keys of a sequence


def attention_paged(
    q: Any,
    k_pages: Any,
    v_pages: Any,
    page_table: Any,
    seq_lens: Any,
    *,
    layout: str = "nhd",
    causal: bool = False,
    window: tuple[int | None, int | None] = NO_WINDOW,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    num_splits: int | None = None,
    cu_seqlens_q: Any = None,
    out: Any = None,
    return_lse: bool = False,
) -> Any:
    """Exact attention over a paged KV cache: decoding, speculative decoding, and prefill in chunks.

    q           [B, Hq, D], one query token a sequence; [B, Sq, Hq, D], a few; or [T, Hq, D] with `cu_seqlens_q`
    k_pages, v_pages  the pages of keys and values, as `layout` says, in q's dtype. v_pages may have another D, Dv.
                      nhd   [pages, page, Hkv, D]
                      hnd   [pages, Hkv, page, D]
                      vllm  K [pages, Hkv, D / 8, page, 8] and V [pages, Hkv, Dv, page]
                page, the slots of a page, is a power of two up to 1024; of `vllm` 8, 16 or 32. Hkv divides Hq.
    page_table  int32 [B, most pages]: key j of sequence b is in slot j % page of page page_table[b, j // page]. Entries
                past the end of a sequence are not read, and what slots past it hold reaches no result.
    seq_lens    int32 [B]: keys of each sequence, the new tokens' included. 0 is allowed, and gives 0.
    causal      query i of a sequence with Sq queries and Sk keys sees those up to i + Sk - Sq
    num_splits  None: every multiprocessor reads as much as the others. Or into how many splits (1 to 256) the keys of
                each sequence are divided: an output row then has the same bits whatever else is in the batch.
    cu_seqlens_q  int32 [B + 1]: sequence b has the queries from cu_seqlens_q[b] up to cu_seqlens_q[b + 1]. Rows of no
                sequence give 0.

    window, scale, softcap, sinks, out, return_lse, errors and results are those of `fmha.attention`; the LSE is
    [B, Hq], [B, Hq, Sq] or [Hq, T]. Lengths, page table and offsets are read on the device only: the host waits for
    nothing, and a captured CUDA graph takes new ones at every replay.

    Page tables and lengths must be right: what is read is what they say. Lengths are cut to what a table has room for.
    """
    if not (
        isinstance(q, Tensor)
        and isinstance(k_pages, Tensor)
        and isinstance(v_pages, Tensor)
        and isinstance(page_table, Tensor)
        and isinstance(seq_lens, Tensor)
        and (sinks is None or isinstance(sinks, Tensor))
        and (cu_seqlens_q is None or isinstance(cu_seqlens_q, Tensor))
        and (out is None or isinstance(out, Tensor))
    ):
        given = (q, k_pages, v_pages, page_table, seq_lens, sinks, cu_seqlens_q, out)
        return _through_dlpack(given, Options(layout, causal, window, scale, softcap, num_splits, return_lse))
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k_pages.requires_grad
        or v_pages.requires_grad
        or (out is not None and out.requires_grad)
        or (sinks is not None and sinks.requires_grad)
    ):
        refuse_gradients(q=q, k_pages=k_pages, v_pages=v_pages, out=out, sinks=sinks)
    if window is not NO_WINDOW:
        window = check_window(window)
    # fmt: off
    signature = (
        "paged",
        q.shape, q.stride(), q.dtype, q.get_device(),
        k_pages.shape, k_pages.stride(), k_pages.dtype, k_pages.get_device(),
        v_pages.shape, v_pages.stride(), v_pages.dtype, v_pages.get_device(),
        page_table.shape, page_table.stride(), page_table.dtype, page_table.get_device(),
        seq_lens.shape, seq_lens.dtype, seq_lens.get_device(),
        None if sinks is None else (sinks.shape, sinks.dtype, sinks.get_device()),
        None if cu_seqlens_q is None else (cu_seqlens_q.shape, cu_seqlens_q.dtype, cu_seqlens_q.get_device()),
        None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
        layout, causal, type(causal), window, scale, type(scale), softcap, type(softcap),
        num_splits, type(num_splits), return_lse, type(return_lse),
    )
    # fmt: on
    try:
        plan = PLANS.get(signature)
    except TypeError:  # an option that cannot be hashed: planning says so
        plan = None
    if plan is None:
        options = Options(layout, causal, window, scale, softcap, num_splits, return_lse)
        plan = _plan(q, k_pages, v_pages, page_table, seq_lens, sinks, cu_seqlens_q, out, options)
        launch.remember(signature, plan)
    return plan(q, k_pages, v_pages, page_table, seq_lens, sinks, cu_seqlens_q, out)


NAMES = ("q", "k_pages", "v_pages", "page_table", "seq_lens", "sinks", "cu_seqlens_q", "out")
NEEDED = NAMES[:5]
SIDES = ("left", "right")


class Options(NamedTuple):
    """Of a call, as the caller gives them."""

    layout: Any = "nhd"
    causal: Any = False
    window: Any = NO_WINDOW
    scale: Any = None
    softcap: Any = None
    num_splits: Any = None
    return_lse: Any = False


@dataclass(frozen=True, slots=True, eq=False)
class PagedLaunch:
    """The plan of a call."""

    answer: Answer
    lse_shape: tuple[int, ...]
    function: Callable[..., None] | None  # None where there is nothing to attend to
    scale_log2: float
    cap_factor: float
    counters: int
    floats: int  # of parts
    prefill: Prefill | None  # where sequences may be long
    decodes: bool  # and whether they may be short
    sizes: HostNumbers
    copied: HostNumbers  # where q is copied, or the output lies elsewhere than `out`
    q_in_place: bool
    out_in_place: bool

    def __call__(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        page_table: Tensor,
        seq_lens: Tensor,
        sinks: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        answer = self.answer
        device = answer.device
        if device.index != torch._C._cuda_getDevice():
            with torch.cuda.device(device):
                return self(q, k_pages, v_pages, page_table, seq_lens, sinks, cu_seqlens_q, out)
        if out is not None:
            answer.refuse_overlap(q, k_pages, v_pages, out, NAMES[:3])
        if self.function is None:
            o = (answer.new_output(q) if out is None else out).zero_()
            return (o, q.new_full(self.lse_shape, -math.inf, dtype=torch.float32)) if answer.return_lse else o
        k_at, v_at = k_pages.data_ptr(), v_pages.data_ptr()
        if (k_at | v_at) % ALIGNMENT:
            name, at = ("k_pages", k_at) if k_at % ALIGNMENT else ("v_pages", v_at)
            raise Unsupported(f"{name}.data_ptr() is {at:#x}; a multiple of {ALIGNMENT} bytes is supported")
        sizes = self.sizes
        if not self.q_in_place or q.data_ptr() % ALIGNMENT:
            q = q.clone(memory_format=torch.contiguous_format)
            sizes = self.copied
        if out is None:
            o = q.new_empty(answer.shape)
        elif not self.out_in_place or out.data_ptr() % ALIGNMENT or sizes is self.copied:
            o, q, sizes = q.new_empty(answer.shape), q.contiguous(), self.copied
        else:
            o = out
        lse = torch.empty(self.lse_shape, dtype=torch.float32, device=device) if answer.return_lse else None
        sinks = None if sinks is None else sinks.contiguous()
        cu_seqlens_q = None if cu_seqlens_q is None else cu_seqlens_q.contiguous()
        seq_lens = seq_lens.contiguous()
        tensors = q.data_ptr(), k_at, v_at, o.data_ptr(), address(lse), address(sinks)
        starts, table, lengths = address(cu_seqlens_q), page_table.data_ptr(), seq_lens.data_ptr()
        factors = self.scale_log2, self.cap_factor
        if self.prefill is not None:
            where = self.prefill.sizes if sizes is self.sizes else self.prefill.copied
            self.prefill((where.address, *tensors), factors, (starts, table, lengths))
        if self.decodes:
            space = workspace.current(device, self.counters, self.floats)
            kept = space.parts_at, space.counters_at
            self.function(sizes.address, *tensors, table, lengths, starts, *kept, *factors, space.stream)
        if out is not None and out is not o:
            o = out.copy_(o)
        return o if lse is None else (o, lse)


def _plan(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    cu_seqlens_q: Tensor | None,
    out: Tensor | None,
    options: Options,
) -> PagedLaunch:
    """Validates a call, gets its kernel into memory, and decides everything that its data does not."""
    given = (q, k_pages, v_pages, page_table, seq_lens, sinks, cu_seqlens_q, out)
    operands = {name: Operand.of(name, x) for name, x in zip(NAMES, given, strict=True) if x is not None}
    refuse_flags(causal=options.causal, return_lse=options.return_lse)
    k, v = (pages_of(n, operands[n].shape, operands[n].strides, options.layout, n[0] == "v") for n in NAMES[1:3])
    entries, tokens, sequences = check_shapes(operands, k, v)
    heads, head_dim = q.shape[-2:]
    window = check_window(options.window)
    softcap = check_softcap(options.softcap)
    scale = check_scale(options.scale, head_dim)
    splits = check_splits(options.num_splits)
    score, kind = "plain" if softcap is None else "softcap", "vllm" if options.layout == "vllm" else "rows"
    problem = PagedProblem(operands["q"].dtype, head_dim, score, 0 if v.dims == head_dim else v.dims, kind)
    device = launch.describe_device(q.device)
    check_served(problem, device.arch, operands["q"])
    cap_factor = check_ratio(scale, softcap)
    shape = (*q.shape[:-1], v.dims)
    if out is not None:
        check_output(operands["out"], replace(operands["q"], shape=shape))
    reach = tuple(0 if x is None else layout.reach(x) for x in (*given[:3], out))
    answer = Answer(shape, q.device, options.return_lse, row_major=False, reach=reach)
    packed = cu_seqlens_q is not None
    lse_shape = (heads, tokens) if packed else (*q.shape[:1], heads, *q.shape[1:-2])

    config = pick(problem, device.arch).config
    group = heads // k.heads if k.heads else 1
    q_tiles = -(-tokens * group // config.tile_m) * entries + packed * (sequences + 2)
    most_keys = min(page_table.shape[1] * k.page, UNLIMITED)
    width = splits or max(1, -(-most_keys // config.tile_n)) + EXTRA
    if q_tiles * k.heads * width > MAX_UNITS:
        raise Unsupported(f"{operands['q']} and {operands['page_table']}: too many tiles of keys for one call")
    blank = 0 in shape or sequences == 0
    rows = min(config.tile_m, tokens * group)
    need = device.multiprocessors, q_tiles * k.heads, splits
    parts = parts_needed(*need)
    most = sequences + 2 * packed, tokens, most_keys
    numbers = _numbers(most, (k, v), group, head_dim) | dict(zip(SIDES, sides(options.causal, *window), strict=True))
    numbers |= {
        "table row": page_table.stride(0) if sequences > 1 else 0,
        "splits": splits,
        "ctas": device.multiprocessors,
        "least rows": 0,
        "part rows": rows,
        "parts": parts,
    }
    plain, plain_o = (_steps_of(layout.contiguous_strides(x), packed) for x in (q.shape, shape))
    q_in_place = layout.in_place(q)
    out_in_place = out is not None and layout.in_place(out)
    q_steps = _steps_of(q.stride(), packed) if q_in_place else plain
    o_steps = _steps_of(out.stride(), packed) if out is not None and out_in_place else plain_o
    long = None
    if not blank:
        wanted = options.causal, window, options.return_lse, splits > 0
        strides = q.stride() if q_in_place else None, out.stride() if out is not None and out_in_place else None
        long = prefill.plan(problem, q, (k, v), page_table, wanted, strides, packed)
        if packed and long is not None:
            numbers["least rows"] = prefill.LEAST_ROWS
        if not launch.capturing(q.device):
            workspace.reserve(q.device)
    return PagedLaunch(
        answer,
        lse_shape,
        None if blank else kernel_function(problem, config, device.arch, q.device),
        scale_log2=(scale if softcap is None else softcap) * LOG2_E,
        cap_factor=cap_factor,
        counters=counters_needed(*need),
        floats=parts * rows * (config.value_dim + 2) + 2,
        prefill=long,
        decodes=packed or long is None,
        sizes=_sizes(numbers, q_steps, o_steps),
        copied=_sizes(numbers, plain, plain_o),
        q_in_place=q_in_place,
        out_in_place=out_in_place,
    )


def _numbers(most: tuple[int, int, int], pages: tuple[Pages, Pages], group: int, head_dim: int) -> dict[str, int]:
    """Sizes. `most` are the sequences, with those of rows of none, the tokens and the keys of one."""
    k, v = pages
    sequences, tokens, keys = most
    sizes = {
        "sequences": sequences,
        "tokens": tokens,
        "most keys": keys,
        "kv_heads": k.heads,
        "group": group,
        "head_dim": head_dim,
        "head_dim_v": v.dims,
        "page shift": k.page.bit_length() - 1,
    }
    return sizes | _steps("k", k) | _steps("v", v)


class Steps(NamedTuple):
    """Strides, as `fmha.jit.arguments.PAGED_SIZES` has them."""

    outer: int
    row: int
    head: int
    chunk: int = CHUNK


def _steps_of(strides: tuple[int, ...], packed: bool) -> Steps:
    """Of q or the output, [B, Hq, D], [B, S, Hq, D] or [T, Hq, D]."""
    *lead, head, _ = strides
    return Steps(0, lead[0], head) if packed else Steps(lead[0], lead[1] if len(lead) > 1 else 0, head)


def _steps(name: str, of: Pages | Steps) -> dict[str, int]:
    return {f"{name} {mode}": getattr(of, mode) for mode in Steps._fields}


def _sizes(numbers: dict[str, int], q: Steps, o: Steps) -> HostNumbers:
    """In the order of `PAGED_SIZES`."""
    found = numbers | _steps("q", q) | _steps("o", o)
    return HostNumbers(found[name] for name in PAGED_SIZES)


def check_shapes(operands: dict[str, Operand], k: Pages, v: Pages) -> tuple[int, int, int]:
    """q's batch entries, the tokens of each, and how many sequences there are. ValueError if tensors do not fit."""
    q, table = operands["q"], operands["page_table"]
    packed = "cu_seqlens_q" in operands
    if len(q.shape) not in ((3,) if packed else (3, 4)):
        modes = "[T, Hq, D]" if packed else "[B, Hq, D] or [B, Sq, Hq, D]"
        raise ValueError(f"q.shape is {list(q.shape)}; {modes} is needed")
    check_last_stride(q)
    for name in ("k_pages", "v_pages"):
        check_same(operands[name], q, "dtype", "device")
    if k.dims != q.shape[-1]:
        raise ValueError(f"k_pages has head dim {k.dims}; it must be that of q, {q.shape[-1]}")
    for mode in ("pages", "page", "heads"):
        if getattr(k, mode) != getattr(v, mode):
            what = "slots a page" if mode == "page" else mode
            raise ValueError(
                f"v_pages has {getattr(v, mode)} {what}; it must have those of k_pages, {getattr(k, mode)}"
            )
    heads = q.shape[-2]
    if heads % k.heads if k.heads else heads:
        raise ValueError(f"q has {heads} heads and k_pages {k.heads}; the heads of k_pages must divide those of q")
    if len(table.shape) != 2 or table.dtype != "int32":
        raise ValueError(f"page_table is {table.dtype} {list(table.shape)}; int32 [B, most pages] is needed")
    check_same(table, q, "device")
    if table.shape[1] > 1 and table.strides[1] != 1:
        raise ValueError(f"page_table.stride() is {table.strides}; the last one must be 1 (call .contiguous())")
    sequences = table.shape[0]
    if not packed and q.shape[0] != sequences:
        raise ValueError(f"page_table.shape[0], the batch, is {sequences}; it must be that of q, {q.shape[0]}")
    vectors = {"seq_lens": (sequences,), "sinks": (heads,), "cu_seqlens_q": (sequences + 1,)}
    for name, shape in vectors.items():
        if name in operands:
            check_vector(operands[name], [shape], "float32" if name == "sinks" else "int32", q)
    tokens = q.shape[0] if packed else q.shape[1] if len(q.shape) == 4 else 1
    if max(*q.shape, tokens * heads) > MAX_TOKENS:
        raise Unsupported(f"{q}: sizes and rows of heads up to {MAX_TOKENS} are supported")
    return 1 if packed else sequences, tokens, sequences


def touch(problem: PagedProblem) -> None:
    """Launches the kernel for one query and one key on the current device: the driver loads its code at the first
    launch, which must not be one that a CUDA graph captures."""
    device = torch.device("cuda", torch.cuda.current_device())
    by_columns, dim, value_dim = problem.layout == "vllm", problem.head_dim, problem.value_dim
    shapes: list[tuple[int, ...]] = [(1, 1, dim), (1, 1, 1, dim), (1, 1, 1, value_dim)]
    if by_columns:
        shapes[1:] = (1, 1, dim // CHUNK, CHUNK, CHUNK), (1, 1, value_dim, CHUNK)
    q, k, v = (torch.zeros(shape, dtype=getattr(torch, problem.dtype), device=device) for shape in shapes)
    lengths = torch.ones(1, dtype=torch.int32, device=device)
    softcap = 1.0 if problem.score == "softcap" else None
    layout = "vllm" if by_columns else "nhd"
    attention_paged(q, k, v, torch.zeros_like(lengths)[None], lengths, layout=layout, softcap=softcap)


def check_splits(given: Any) -> int:
    """The number of splits, 0 for None."""
    if given is None:
        return 0
    if isinstance(given, bool) or not isinstance(given, numbers.Integral):
        raise TypeError(f"num_splits is {given!r} of type {type(given).__name__}; an integer or None is needed")
    splits = int(given)
    if not 1 <= splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {given}; 1 to {MAX_SPLITS}, or None, is needed")
    return splits


def _through_dlpack(given: tuple[Any, ...], options: Options) -> Any:
    """The same call with torch tensors over the same memory; what it returns goes back to q's library."""
    arrays = dict(zip(NAMES, given, strict=True))
    tensors: dict[str, Any] = {
        name: None if array is None and name not in NEEDED else launch.from_dlpack(name, array)
        for name, array in arrays.items()
    }
    result = attention_paged(**tensors, **options._asdict())
    o, *lse = result if options.return_lse else (result,)
    o = launch.to_library_of(arrays["q"], o) if arrays["out"] is None else arrays["out"]
    return (o, *(launch.to_library_of(arrays["q"], tensor) for tensor in lse)) if lse else o
