"""What every test shares: a kernel cache of its own, no tuned block configs, and a reason for skipping, without a
GPU, those under tests/gpu and those marked `gpu`."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault(
    "OPENBLAS_NUM_THREADS", "1"
)  # before NumPy: the simulator's matrices are small, threads only wait

# Before anything reads it: what somebody tuned on this machine must not decide what is tested.
os.environ["FMHA_TUNED"] = str(Path(__file__).with_name("no-tuned.json"))

import pytest
from hypothesis import settings

GPU_TESTS = Path(__file__).parent / "gpu"

settings.register_profile("project", deadline=None)  # a shared two-core machine is no clock
settings.load_profile("project")


@pytest.fixture(scope="session", autouse=True)
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every run compiles its kernels afresh and leaves the user's cache alone, unless $FMHA_CACHE_DIR names another."""
    os.environ.setdefault("FMHA_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.path.is_relative_to(GPU_TESTS) or item.get_closest_marker("gpu")]
    if gpu and not _has_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
