"""What every test shares: a kernel cache of its own, no tuned block configs, and a reason for skipping those under
tests/gpu and those marked `gpu`: there is no GPU, nobody has run its kernels, or none serves what is tested."""

from __future__ import annotations

import os
from dataclasses import replace
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
    """Every run compiles its kernels afresh and leaves the user's cache alone, unless $FMHA_CACHE_DIR names another.
    Workers side by side share them: each is compiled once, whoever comes first."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    kernels = folder / "kernels"
    kernels.mkdir(mode=0o700, exist_ok=True)
    os.environ.setdefault("FMHA_CACHE_DIR", str(kernels))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu = [item for item in items if item.path.is_relative_to(GPU_TESTS) or item.get_closest_marker("gpu")]
    if gpu:
        from fmha.jit import launch

        arch = launch.current_architecture()
        for item in gpu:
            if reason := why_not(item, arch):
                item.add_marker(pytest.mark.skip(reason=reason))


def why_not(item: pytest.Item, arch: str | None) -> str | None:
    """Why a test is skipped on a GPU of this architecture. What it needs kernels for say its marks `needs`, and its
    parameters `case` and `head_dim`."""
    from fmha.problem import Problem, supports, unrun
    from tests.cases import Case
    from tests.kernels import paged_problem_of, problem_of
    from tests.paged import PagedCase

    if arch is None:
        return "needs a CUDA device"
    given = item.callspec.params if hasattr(item, "callspec") else {}
    needed = [problem for mark in item.iter_markers("needs") for problem in mark.args] or [Problem("bfloat16", 64)]
    if "head_dim" in given:
        needed = [replace(problem, head_dim=given["head_dim"]) for problem in needed]
    if isinstance(case := given.get("case"), Case):
        needed.append(problem_of(case))
    elif isinstance(case, PagedCase):
        needed.append(paged_problem_of(case))
    return next(filter(None, (supports(problem, arch) for problem in needed)), None) or unrun(arch)
