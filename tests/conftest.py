"""What every test shares: those under tests/gpu are skipped, with the reason, where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

GPU_TESTS = Path(__file__).parent / "gpu"

settings.register_profile("project", deadline=None)  # a shared two-core machine is no clock
settings.load_profile("project")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.path.is_relative_to(GPU_TESTS)]
    if gpu and not _has_gpu():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
