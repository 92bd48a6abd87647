"""Exact attention on NVIDIA GPUs: `fmha.attention(q, k, v)`."""

from fmha.attention import attention, attention_varlen
from fmha.jit.library import inspect, warmup
from fmha.merge import merge
from fmha.paged import attention_paged
from fmha.problem import PagedProblem, Problem, Unsupported, WriteProblem, supports
from fmha.writing import write_kv
from schedules.tiling import Extent

__all__ = [
    "Extent",
    "PagedProblem",
    "Problem",
    "Unsupported",
    "WriteProblem",
    "attention",
    "attention_paged",
    "attention_varlen",
    "inspect",
    "merge",
    "supports",
    "warmup",
    "write_kv",
]
