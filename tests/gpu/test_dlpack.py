"""Arrays of other libraries, by DLPack."""

from __future__ import annotations

import os

import pytest
import torch

import fmha
from tests.cases import Case, inputs
from tests.checks import compare

CASE = Case(2, 130, 200, 4, 2, 64, "fp16", causal=True)


class Producer:
    """Speaks DLPack and nothing else."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def as_torch(array) -> torch.Tensor:
    return array if isinstance(array, torch.Tensor) else torch.from_dlpack(array)


def test_any_producer_is_taken() -> None:
    qkv = inputs(CASE, "cuda")
    out, lse = fmha.attention(*map(Producer, qkv), causal=True, return_lse=True)
    compare(CASE, qkv, as_torch(out), as_torch(lse))


def test_a_producer_as_out_is_written_in_place() -> None:
    qkv = inputs(CASE, "cuda")
    out = torch.empty_like(qkv[0])
    fmha.attention(*qkv, causal=True, out=Producer(out))
    compare(CASE, qkv, out, None)


def test_torch_gets_torch_back() -> None:
    out, lse = fmha.attention(*inputs(CASE, "cuda"), return_lse=True)
    assert type(out) is torch.Tensor and type(lse) is torch.Tensor


def test_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    qkv = inputs(CASE, "cuda")
    out, lse = fmha.attention(*(cupy.from_dlpack(x) for x in qkv), causal=True, return_lse=True)
    compare(CASE, qkv, as_torch(out), as_torch(lse))


def test_jax() -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX takes most of the GPU otherwise
    jax = pytest.importorskip("jax")
    try:
        jax.devices("gpu")
    except RuntimeError:
        pytest.skip("JAX finds no GPU")
    case = Case(2, 130, 200, 4, 2, 64, "bf16", causal=True)
    qkv = inputs(case, "cuda")
    arrays = [jax.dlpack.from_dlpack(x) for x in qkv]
    assert all(str(x.dtype) == "bfloat16" for x in arrays)
    out, lse = fmha.attention(*arrays, causal=True, return_lse=True)
    compare(case, qkv, as_torch(out), as_torch(lse))
