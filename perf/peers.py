"""Who is measured: fmha and its peers behind one interface. A peer that is not installed is named, not required.

Every candidate gets the same q [B, Sq, Hq, D], k and v [B, Sk, Hkv, D]; views in the order it wants are made outside
the timed call.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from perf.suites import Case

OURS = "fmha"


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
        return Candidate(lambda: fmha.attention(q, k, v, causal=case.causal), _first)

    return prepare


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
    if case.causal and case.seqlen_q != case.seqlen_k:
        return "its causal mask is aligned at the top left"
    return None


def _flash_attn_4() -> Prepare:
    from flash_attn.cute import flash_attn_func

    def prepare(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Candidate:
        return Candidate(lambda: flash_attn_func(q, k, v, causal=case.causal), _first)

    return prepare


def _flash_attn_3() -> Prepare:
    from fa3_fwd_interface import flash_attn_func

    def prepare(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Candidate:
        return Candidate(lambda: flash_attn_func(q, k, v, causal=case.causal), _first)

    return prepare


def _flash_attn_3_refuses(case: Case) -> str | None:
    return None if case.dtype == "bfloat16" else "this build has bfloat16 only"


def _flashinfer() -> Prepare:
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")

    def prepare(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Candidate:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        starts = torch.arange(case.batch + 1, dtype=torch.int32, device="cuda")
        wrapper.plan(
            starts * case.seqlen_q,
            starts * case.seqlen_k,
            case.heads_q,
            case.heads_kv,
            case.head_dim,
            causal=case.causal,
            q_data_type=q.dtype,
        )
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        return Candidate(lambda: wrapper.run(*flat), lambda out: out.view(q.shape))

    return prepare


PEERS = {
    peer.name: peer
    for peer in (
        Peer("cudnn", "torch SDPA, cuDNN", "nvidia-cudnn-cu13", _sdpa(SDPBackend.CUDNN_ATTENTION), _sdpa_refuses),
        Peer("flash", "torch SDPA, flash", "torch", _sdpa(SDPBackend.FLASH_ATTENTION), _sdpa_refuses),
        Peer("sdpa", "torch SDPA, its own choice", "torch", _sdpa(None), _sdpa_refuses),
        Peer("fa4", "flash-attn-4", "flash-attn-4", _flash_attn_4),
        Peer("fa3", "FlashAttention-3", "fa3-fwd", _flash_attn_3, _flash_attn_3_refuses),
        Peer("flashinfer", "FlashInfer", "flashinfer-python", _flashinfer),
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
