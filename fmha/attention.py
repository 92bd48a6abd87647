"""The public functions: validate, name the problem, plan, launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmha import operator
from fmha.checks import (
    LENGTHS,
    LOG2_E,
    MAX_SIZE,
    Operand,
    check_hint,
    check_inputs,
    check_lengths,
    check_logits,
    check_output,
    check_ratio,
    check_scale,
    check_served,
    check_softcap,
    check_window,
    refuse_flags,
    refuse_gradients,
)
from fmha.jit import launch, layout, library
from fmha.jit.arguments import Layout, Sizes, listing_words
from fmha.jit.launch import NO_LENGTHS, PLANS, Answer, Blank, Launch, Lengths, Plan
from fmha.jit.library import pick
from fmha.problem import AnyProblem, Problem, Unsupported
from schedules.domain import mask_of
from schedules.scores import score_of
from schedules.tiling import AnyConfig, Extent, TiledConfig
from schedules.work import head_group, keys_in_l2

MAX_RAGGED = 2**30  # rows of an entry, where sequences have lengths of their own
MAX_SEQUENCES = 2**19 - 2  # of those: what counts them has 19 bits (`fmha.kernels.common.listing`)
NO_WINDOW = (None, None)
NO_HINTS = (0, 0)  # of how long the sequences of a packed batch are


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

    q           [B, Sq, Hq, D], bfloat16 or float16, on a GPU of `fmha.supports`. D is a multiple of 8, up to 256 on
                Hopper and 128 on Blackwell.
    k, v        [B, Sk, Hkv, D], likewise. Hkv divides Hq: query head h reads KV head h // (Hq / Hkv). v may have
                another D, Dv, of the same range.
    causal      query i sees the keys up to i + Sk - Sq: the diagonal ends in the bottom right corner
    window      (left, right): query i sees the keys from i + Sk - Sq - left to i + Sk - Sq + right, and with `causal`
                none past i + Sk - Sq. None is no limit, and so is -1; other negative numbers mean what they say.
    scale       a finite positive number; 1 / sqrt(D) by default
    softcap     c: scores s become c tanh(s / c), with s scaled already, within 2^-11 of tanh: by a polynomial where all
                of a warp's are below 0.375 c, else by an instruction. A finite positive number; None or 0 for none.
    sinks       float32 [Hq], on q's device: a logit more in each row's sum of exponentials, neither scaled nor capped,
                whose value is 0. Rows that see no key have it, too: their output is 0, and their LSE the sink.
    alibi_slopes  float32 [Hq] or [B, Hq], on q's device: the score of query i and key j, scaled and capped, loses slope
                times |j - (i + Sk - Sq)|
    seqused_q, seqused_k  int32 [B], on q's device: of entry b the first seqused_q[b] queries and seqused_k[b] keys are
                its sequence, with which `causal`, `window` and slopes are aligned (Sq and Sk above). What lies behind
                is neither read nor attended to, and gives 0 and minus infinity. Numbers out of range are brought into
                it.
    out         [B, Sq, Hq, Dv] to write into, of q's dtype and device, sharing no memory with q, k or v
    return_lse  also return the logarithm of each row's sum of exponentials (natural; of scores as the softmax takes
                them, the sink included). On Hopper, up to head dim 192, another, slower kernel then answers, which adds
                them up in float32: outputs of the two agree within rounding

    Returns the output, [B, Sq, Hq, Dv] in q's dtype (`out` if given, else contiguous), or (output, lse) with lse
    float32 [B, Hq, Sq]. A query that sees no key gives 0, and minus infinity or the sink. Sizes may be 0.

    Any strides will do if the last one is 1. What TMA can address runs in place: a base and strides that are multiples
    of 16 bytes, and no stride of 0, in modes of more than one element. Other inputs are copied first, another `out`
    is filled by a copy.

    Infinities and NaN spread as in a plain softmax, 0 times either being NaN: one in v can also reach queries to which
    the mask hides it. One in a hidden k never does, nor one in another sequence.

    The arrays may come from any library that speaks DLPack. torch tensors give torch tensors; for others the result
    returns to q's library if its array namespace has `from_dlpack`, and is a torch tensor otherwise. The launch is
    asynchronous, on the current stream of the tensors' device, and can be captured in a CUDA graph once the kernel is
    in memory (`fmha.warmup`).

    Raises TypeError or ValueError for arguments that are malformed or do not fit together, `fmha.Unsupported` for those
    that no kernel serves, or only one that nobody has run (unless $FMHA_ALLOW_UNRUN is 1), and RuntimeError where a
    CUDA graph is being captured and the kernel is not yet in memory. Each names the argument, its value and what is
    allowed, and leaves `out` untouched.

    Online softmax: Milakov and Gimelshein, 2018. The kernels: FlashAttention-3, Shah et al., 2024.
    """
    lengths = NO_LENGTHS
    if seqused_q is not None or seqused_k is not None:
        lengths = None, None, seqused_q, seqused_k
    return _attend(
        q, k, v, out, sinks, alibi_slopes, lengths, causal, window, scale, softcap, return_lse
    )  # fmt: skip


def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    *,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
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
    """`fmha.attention` of sequences packed one behind the other, of any lengths, 0 included.

    q           [Tq, Hq, D]
    k, v        [Tk, Hkv, D] and [Tk, Hkv, Dv]
    cu_seqlens_q, cu_seqlens_k  int32 [B + 1], on q's device: sequence b has the queries from cu_seqlens_q[b] up to
                cu_seqlens_q[b + 1], and the keys likewise. Rows of no sequence give 0 and minus infinity. The numbers
                must not decrease; where they do, or lie outside the tensors, results are wrong, but nothing outside of
                q, k, v and the outputs is read or written.
    max_seqlen_q, max_seqlen_k  how long a sequence may be: integers or tensors of one. A hint, for picking a kernel.
    seqused_q, seqused_k  int32 [B]: how much of each sequence, from its start, there is
    out         [Tq, Hq, Dv]

    Other arguments, errors and results are those of `fmha.attention`, with B sequences for its batch entries, but the
    output is [Tq, Hq, Dv] and the LSE [Hq, Tq]. The lengths are read on the device only: the host never waits for them,
    and a captured CUDA graph takes new ones at every replay.
    """
    for name, given in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if given is None:
            raise TypeError(f"{name} is None; int32 [B + 1] is needed")
    hints = check_hint("max_seqlen_q", max_seqlen_q), check_hint("max_seqlen_k", max_seqlen_k)
    lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
    return _attend(
        q, k, v, out, sinks, alibi_slopes, lengths, causal, window, scale, softcap, return_lse, hints
    )  # fmt: skip


def _attend(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    sinks: Any,
    slopes: Any,
    lengths: Any,
    causal: bool,
    window: Any,
    scale: Any,
    softcap: Any,
    return_lse: bool,
    hints: tuple[int, int] = NO_HINTS,
) -> Any:
    """Looks the call's plan up, or makes one, and carries it out."""
    if torch.compiler.is_compiling():
        options = Options(causal, window, scale, softcap, return_lse)
        return operator.call(q, k, v, out, sinks, slopes, *lengths, **options._asdict())
    if type(causal) is not bool or type(return_lse) is not bool:
        refuse_flags(causal=causal, return_lse=return_lse)
    if not (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and (out is None or isinstance(out, Tensor))
        and (sinks is None or isinstance(sinks, Tensor))
        and (slopes is None or isinstance(slopes, Tensor))
        and (lengths is NO_LENGTHS or all(x is None or isinstance(x, Tensor) for x in lengths))
    ):
        arrays = {"q": q, "k": k, "v": v, "out": out, "sinks": sinks, "alibi_slopes": slopes}
        arrays |= dict(zip(LENGTHS, lengths, strict=True))
        return _through_dlpack(arrays, Options(causal, window, scale, softcap, return_lse), hints)
    if torch.is_grad_enabled() and (
        q.requires_grad
        or k.requires_grad
        or v.requires_grad
        or (out is not None and out.requires_grad)
        or (sinks is not None and sinks.requires_grad)
        or (slopes is not None and slopes.requires_grad)
    ):
        refuse_gradients(q=q, k=k, v=v, out=out, sinks=sinks, alibi_slopes=slopes)

    if lengths is not NO_LENGTHS and 0 in k.shape[-3:-2] and 0 in v.shape[-3:-2] and q.numel() > 0:
        k, v, lengths = _with_a_key(q, k, v, lengths)
    if window is not NO_WINDOW:
        window = check_window(window)  # before it is looked up: (3, True) equals (3, 1)
    # fmt: off
    signature = (
        q.shape, q.stride(), q.dtype, q.get_device(),
        k.shape, k.stride(), k.dtype, k.get_device(),
        v.shape, v.stride(), v.dtype, v.get_device(),
        None if out is None else (out.shape, out.stride(), out.dtype, out.get_device()),
        None if sinks is None else (sinks.shape, sinks.dtype, sinks.get_device()),
        None if slopes is None else (slopes.shape, slopes.dtype, slopes.get_device()),
        None if lengths is NO_LENGTHS else tuple(_kind(x) for x in lengths),
        causal, window, scale, type(scale), softcap, type(softcap), return_lse,  # types, because True == 1.0
        hints,
    )
    # fmt: on
    try:
        plan = PLANS.get(signature)
    except TypeError:  # an option that cannot be hashed: planning says so
        plan = None
    if plan is None:  # for calls that are refused there never is one
        options = Options(causal, window, scale, softcap, return_lse)
        plan = _plan(q, k, v, options, out=out, sinks=sinks, slopes=slopes, lengths=lengths, hints=hints)
        launch.remember(signature, plan)
    return plan(q, k, v, out, sinks, slopes, lengths)


def _with_a_key(q: Tensor, k: Tensor, v: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor, Lengths]:
    """The same call with one key, which no sequence has: a tensor without any TMA does not take."""
    k, v = (x.new_zeros((*x.shape[:-3], 1, *x.shape[-2:])) for x in (k, v))
    sequences = q.shape[0] if lengths[0] is None else max(0, lengths[0].numel() - 1)
    none = q.new_zeros(sequences, dtype=torch.int32) if lengths[3] is None else torch.zeros_like(lengths[3])
    return k, v, (*lengths[:3], none)


def _kind(vector: Tensor | None) -> Any:
    return None if vector is None else (vector.shape, vector.dtype, vector.get_device())


class Options(NamedTuple):
    """Of a call, as the caller gives them."""

    causal: bool = False
    window: Any = NO_WINDOW
    scale: Any = None
    softcap: Any = None
    return_lse: bool = False


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    *,
    out: Tensor | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    lengths: Lengths = NO_LENGTHS,
    hints: tuple[int, int] = NO_HINTS,
    config: TiledConfig | None = None,
) -> Plan:
    """Validates a call, gets its kernel into memory, and decides everything that its data pointers do not.

    `config` is for measuring one that such a call does not get.
    """
    operands = [Operand.of(name, tensor) for name, tensor in zip("qkv", (q, k, v), strict=True)]
    packed, ragged = lengths[0] is not None, lengths != NO_LENGTHS
    check_inputs(operands[0], operands[1], operands[2], packed)
    (*batch, rows, heads, head_dim), (*_, keys, kv_heads, value_dim) = q.shape, v.shape
    entries = batch[0] if batch else 1
    sequences = check_lengths(lengths, operands[0]) if ragged else entries
    window = check_window(options.window)
    mask, bounds = mask_of(options.causal, window, rows, keys)
    softcap = check_softcap(options.softcap)
    score = score_of(softcap is not None, slopes is not None)
    problem = Problem(operands[0].dtype, head_dim, mask, score, 0 if value_dim == head_dim else value_dim, ragged)
    shape = (*batch, rows, heads, value_dim)
    check_logits(sinks, slopes, sequences, heads, operands[0])
    device = launch.describe_device(q.device)
    check_served(problem, device.arch, operands[0])
    if window != NO_WINDOW and rows + keys > MAX_SIZE:
        raise Unsupported(f"{operands[0]}, {operands[1]}: with a window Sq + Sk up to {MAX_SIZE} are supported")
    scale = check_scale(options.scale, head_dim)
    cap_factor = check_ratio(scale, softcap)
    if out is not None:
        check_output(Operand.of("out", out), replace(operands[0], shape=shape))

    answer = Answer(
        shape=shape,
        device=q.device,
        return_lse=options.return_lse,
        row_major=q.shape == shape and q.stride() == layout.contiguous_strides(q.shape),
        reach=tuple(0 if tensor is None else layout.reach(tensor) for tensor in (q, k, v, out)),
    )
    if 0 in q.shape or 0 in v.shape or sequences == 0:
        return Blank(answer, ragged=ragged)
    if config is None:
        about = [hint or size // sequences for hint, size in zip(hints, (rows, keys), strict=True)]
        seqlen_q, seqlen_k = (max(1, length) for length in about) if packed else (rows, keys)
        many = sequences * heads, device.multiprocessors
        extent = Extent(mask, seqlen_q, seqlen_k, *many, options.return_lse, bounds.left, bounds.right)
        config = pick(problem, device.arch, extent).config
    assert config.serves(options.return_lse), "a kernel with columns of ones writes no LSE"
    q_tiles = -(-rows // config.tile_m) * entries + packed * (sequences + 2)
    o = Layout.padded(shape, layout.contiguous_strides(shape))
    if out_in_place := out is not None and layout.in_place(out):
        o = Layout.of(out)
    layouts = [*map(Layout.of, (q, k, v)), o]
    if sequences > MAX_SEQUENCES and ragged:
        raise Unsupported(f"{sequences} sequences of lengths of their own; up to {MAX_SEQUENCES} are supported")
    if ragged and (max(rows, keys) > MAX_RAGGED or max(each.units for each in layouts) > MAX_SIZE):
        raise Unsupported(f"{operands[0]}, {operands[1]}: too large for ragged batches")
    if (work_tiles := q_tiles * heads) > MAX_SIZE:
        raise Unsupported(f"{operands[0]}: {work_tiles} tiles of queries; up to {MAX_SIZE} are supported")
    kv_bytes_per_key = q.element_size() * kv_heads * (head_dim + value_dim) // heads  # for one query head
    how = mask == "causal", kv_bytes_per_key, device.l2_bytes
    group = keys_in_l2(*how) if ragged else head_group(how[0], keys, *how[1:])
    slopes_batch = heads if slopes is not None and slopes.dim() == 2 else 0
    others = group, device.multiprocessors, bounds.left, bounds.right, slopes_batch, sequences, int(packed)
    return Launch(
        answer,
        function=kernel_function(problem, config, device.arch, q.device),
        scale_log2=(scale if softcap is None else softcap) * LOG2_E,
        cap_factor=cap_factor,
        work_tiles=work_tiles,
        numbers=others,
        sizes=Sizes(layouts, *others),
        inputs_in_place=layout.in_place(q) and layout.in_place(k) and layout.in_place(v),
        out_in_place=out_in_place,
        listing_words=listing_words(sequences) if ragged else 0,
    )


def kernel_function(problem: AnyProblem, config: AnyConfig, arch: str, device: torch.device) -> library.Function:
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


def _through_dlpack(arrays: dict[str, Any], options: Options, hints: tuple[int, int]) -> Any:
    """The same call with torch tensors over the same memory; what it returns goes back to q's library."""
    tensors: dict[str, Any] = {
        name: None if array is None and name not in ("q", "k", "v") else launch.from_dlpack(name, array)
        for name, array in arrays.items()
    }
    if tensors["cu_seqlens_q"] is None:
        result = attention(**{n: x for n, x in tensors.items() if not n.startswith("cu")}, **options._asdict())
    else:
        tensors |= {"max_seqlen_q": hints[0], "max_seqlen_k": hints[1]}
        result = attention_varlen(**tensors, **options._asdict())
    o, *lse = result if options.return_lse else (result,)
    o = launch.to_library_of(arrays["q"], o) if arrays["out"] is None else arrays["out"]
    return (o, *(launch.to_library_of(arrays["q"], tensor) for tensor in lse)) if lse else o
