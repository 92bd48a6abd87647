"""CPU tensors that pass for tensors on a GPU, for what takes a kernel's place in the tests of the host side."""

from __future__ import annotations

import ctypes
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fmha.jit import launch, library, workspace

L2_BYTES = 50 << 20
MULTIPROCESSORS = 132
STREAM = 5
PLANNERS = [importlib.import_module(f"fmha.{name}") for name in ("attention", "paged", "writing")]  # not the function


def pass_for_gpu(monkeypatch: pytest.MonkeyPatch, fetch: Callable[..., Any], arch: str = "sm_90a") -> None:
    """No plan is made yet, no kernel is in memory, and `fetch` has the kernels."""
    monkeypatch.setattr(launch, "describe_device", lambda device: launch.Device(arch, L2_BYTES, MULTIPROCESSORS))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of a CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    monkeypatch.setattr(workspace, "reserve", lambda device: None)
    monkeypatch.setattr(workspace, "_workspaces", {})
    monkeypatch.setattr(library, "loaded", lambda *kernel: None)
    monkeypatch.setattr(library, "fetch", fetch)
    monkeypatch.setattr(launch, "PLANS", {})
    for module in PLANNERS:
        monkeypatch.setattr(module, "PLANS", launch.PLANS)


def vector(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A copy of what lies there."""
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_int32 * math.prod(shape)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).view(shape).clone()


def strided(address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """The 16-bit tensor there."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_int16 * reach).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)
