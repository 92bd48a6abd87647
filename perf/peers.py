"""Who is measured: fmha and its peers behind one interface. A peer that is not installed is named, not required.

Every candidate gets the same q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D], packed sequences as [T, H, D]; views in the
order it wants are made outside the timed call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from perf.suites import Case

OURS = "fmha"
PLAIN = "plain"  # fmha without what is done to scores


@dataclass(frozen=True)
class Candidate:
    """An attention function bound to a problem."""

    call: Callable[[], Any]  # what is timed
    output: Callable[[Any], torch.Tensor]  # what `call` returned -> [B, Sq, Hq, D]


Prepare = Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], Candidate]


@dataclass(frozen=True)
class Peer:
    """How to get at one: `load` imports it and raises what an import raises if it is not there."""

    name: str
    title: str
    package: str  # whose version is noted
    load: Callable[[], Prepare]
    refuses: Callable[[Case], str | None] = lambda case: None  # why it is left out of a case


def _first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _fmha() -> Prepare:
    import fmha

    def prepare(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Candidate:
        given = scoring(case)
        if case.packed:
            cu = starts(case)
            return Candidate(lambda: fmha.attention_varlen(q, k, v, cu, cu, causal=case.causal, **given), _first)
        return Candidate(lambda: fmha.attention(q, k, v, causal=case.causal, window=case.window, **given), _first)

    return prepare


def _plain() -> Prepare:
    prepare = _fmha()
    return lambda case, *qkv: prepare(replace(case, score=""), *qkv)


def scoring(case: Case, device: str = "cuda") -> dict[str, Any]:
    """The arguments that change scores, as models have them."""
    heads = range(1, case.heads_q + 1)
    if case.score == "softcap":
        return {"softcap": 30.0}
    if case.score == "sinks":
        return {"sinks": torch.linspace(-2, 2, case.heads_q, device=device)}
    if case.score == "alibi":
        return {"alibi_slopes": torch.tensor([2.0 ** (-8 * i / case.heads_q) for i in heads], device=device)}
    return {}


def starts(case: Case, device: str = "cuda") -> torch.Tensor:
    """cu_seqlens of its sequences."""
    lengths = case.packed or (case.seqlen_q,) * case.batch
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def _sdpa(backend: SDPBackend | None) -> Callable[[], Prepare]:
    """Torch's attention; on whichever backend it picks if None."""

    def prepare(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Candidate:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        grouped = case.heads_q != case.heads_kv

        def call() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)

        def output(out: torch.Tensor) -> torch.Tensor:
            return out.transpose(1, 2)

        return Candidate(call if backend is None else _on_backend(backend, call), output)

    return lambda: prepare


def _on_backend(backend: SDPBackend, call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    def pinned() -> torch.Tensor:
        with sdpa_kernel(backend):
            return call()

    return pinned


def _sdpa_refuses(case: Case) -> str | None:
    if case.left is not None or case.packed or case.score:
        return "it has no windows, no packed sequences and nothing for scores"
    if case.causal and case.seqlen_q != case.seqlen_k:
        return "its causal mask is aligned at the top left"
    return None


def _flash_attn_4() -> Prepare:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    def prepare(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Candidate:
        if case.packed:
            cu, longest = starts(case), case.seqlen_q
            lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
            return Candidate(lambda: flash_attn_varlen_func(q, k, v, causal=case.causal, **lengths), _first)
        if case.score == "softcap":
            return Candidate(lambda: flash_attn_func(q, k, v, causal=case.causal, **scoring(case)), _first)
        if case.left is None:
            return Candidate(lambda: flash_attn_func(q, k, v, causal=case.causal), _first)
        return Candidate(lambda: flash_attn_func(q, k, v, window_size=(case.left, 0)), _first)

    return prepare


def _flash_attn_3() -> Prepare:
    from fa3_fwd_interface import flash_attn_func, flash_attn_varlen_func

    if (major := torch.cuda.get_device_capability()[0]) != 9:
        raise RuntimeError(f"it is for compute capability 9, this is {major}")

    def prepare(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Candidate:
        if case.packed:
            lengths = starts(case), starts(case), case.seqlen_q, case.seqlen_k
            return Candidate(lambda: flash_attn_varlen_func(q, k, v, *lengths, causal=case.causal), _first)
        return Candidate(lambda: flash_attn_func(q, k, v, causal=case.causal, **scoring(case)), _first)

    return prepare


def _flash_attn_3_refuses(case: Case) -> str | None:
    if case.left is not None:
        return "this build has no windows"
    if case.score not in ("", "softcap"):
        return "it has softcap only"
    return None if case.dtype == "bfloat16" else "this build has bfloat16 only"


def _flashinfer() -> Prepare:
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")

    def prepare(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Candidate:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        each = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda")
        lengths = (starts(case),) * 2 if case.packed else (each * case.seqlen_q, each * case.seqlen_k)
        wrapper.plan(
            *lengths,
            case.heads_q,
            case.heads_kv,
            case.head_dim,
            causal=case.causal,
            window_left=-1 if case.left is None else case.left,
            q_data_type=q.dtype,
        )
        flat = [x.flatten(0, -3) for x in (q, k, v)]
        return Candidate(lambda: wrapper.run(*flat), lambda out: out.view(q.shape))

    return prepare


def _flash_attn_4_refuses(case: Case) -> str | None:
    return "its sinks are bfloat16, its ALiBi a function of the caller's" if case.score in ("sinks", "alibi") else None


def _flashinfer_refuses(case: Case) -> str | None:
    return "these modules were built for plain scores" if case.score else None


PEERS = {
    peer.name: peer
    for peer in (
        Peer("cudnn", "torch SDPA, cuDNN", "nvidia-cudnn-cu13", _sdpa(SDPBackend.CUDNN_ATTENTION), _sdpa_refuses),
        Peer("flash", "torch SDPA, flash", "torch", _sdpa(SDPBackend.FLASH_ATTENTION), _sdpa_refuses),
        Peer("sdpa", "torch SDPA, its own choice", "torch", _sdpa(None), _sdpa_refuses),
        Peer("fa4", "flash-attn-4", "flash-attn-4", _flash_attn_4, _flash_attn_4_refuses),
        Peer("fa3", "FlashAttention-3", "fa3-fwd", _flash_attn_3, _flash_attn_3_refuses),
        Peer("flashinfer", "FlashInfer", "flashinfer-python", _flashinfer, _flashinfer_refuses),
        Peer(PLAIN, "fmha, plain", "fmha", _plain, lambda case: None if case.score else "nothing is done to scores"),
    )
}

US = Peer(OURS, "fmha", "fmha", _fmha)


def load(peers: list[Peer]) -> tuple[dict[str, Prepare], dict[str, str]]:
    """What could be loaded, by name, and why the rest could not."""
    found: dict[str, Prepare] = {}
    missing: dict[str, str] = {}
    for peer in peers:
        try:
            found[peer.name] = peer.load()
        except Exception as error:  # a compiled extension for another torch fails in ways of its own
            missing[peer.name] = f"{type(error).__name__}: {error}"
    return found, missing
