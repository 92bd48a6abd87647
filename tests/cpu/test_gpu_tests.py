"""Which GPU tests are skipped on which GPU, and which kernels are compiled for the others beforehand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fmha.problem import ALLOW_UNRUN, ARCHITECTURES, UNRUN, PagedProblem, Problem, supports
from schedules.tiling import PAGED_TABLES
from tests import kernels
from tests.cases import CASES, Case
from tests.conftest import why_not
from tests.paged import PagedCase, draw

SMALL = Case(1, 2, 3, 4, 2, 64)
PAGED = PagedCase((3,), (1,), 1, 1, 64, 16)


def item(*needed: Any, **params: Any) -> Any:
    """What `why_not` asks of a test."""
    marks = [SimpleNamespace(args=needed)] if needed else []
    return SimpleNamespace(iter_markers=lambda name: marks, callspec=SimpleNamespace(params=params))


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_UNRUN, "1")


EVERY = {
    "plain": (item(), "sm_90a sm_100a sm_103a"),
    "no parameters": (SimpleNamespace(iter_markers=lambda name: []), "sm_90a sm_100a sm_103a"),
    "wide": (item(head_dim=256), "sm_90a"),
    "narrow": (item(head_dim=128), "sm_90a sm_100a sm_103a"),
    "case": (item(case=SMALL), "sm_90a sm_100a sm_103a"),
    "wide case": (item(case=Case(1, 2, 3, 4, 2, 136)), "sm_90a"),
    "wide values": (item(case=Case(1, 2, 3, 4, 2, 64, head_dim_v=192)), "sm_90a"),
    "pages": (item(PagedProblem("bfloat16", 64)), "sm_90a"),
    "a case with pages": (item(case=PAGED), "sm_90a"),
    "either": (item(Problem("bfloat16", 64), PagedProblem("bfloat16", 64)), "sm_90a"),
    "wide, marked": (item(Problem("bfloat16", 256)), "sm_90a"),
}


@pytest.mark.parametrize("name", EVERY)
def test_a_test_is_skipped_where_no_kernel_serves_it(name: str) -> None:
    test, served = EVERY[name]
    assert {arch for arch in ARCHITECTURES if why_not(test, arch) is None} == set(served.split())
    assert why_not(test, None) == "needs a CUDA device"
    assert "architecture sm_80" in str(why_not(test, "sm_80"))


def test_the_reason_is_that_of_supports_and_a_marked_head_dim_is_the_tests() -> None:
    assert why_not(item(head_dim=192), "sm_100a") == supports(Problem("bfloat16", 192), "sm_100a")
    paged = item(PagedProblem("bfloat16", 64), head_dim=264)
    assert why_not(paged, "sm_90a") == supports(PagedProblem("bfloat16", 264), "sm_90a") is not None


def test_a_gpu_whose_kernels_nobody_has_run_needs_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_UNRUN)
    for arch in ARCHITECTURES:
        assert ("FMHA_ALLOW_UNRUN=1" in str(why_not(item(), arch))) == (arch in UNRUN)


def test_with_a_table_paged_tests_run(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = tuple(row for row in PAGED_TABLES["sm_90a"] if row.config.head_dim <= 128)
    monkeypatch.setitem(PAGED_TABLES, "sm_100a", narrow)
    assert why_not(item(case=PAGED), "sm_100a") is None
    assert "head_dim 192" in str(why_not(item(PagedProblem("bfloat16", 64), head_dim=192), "sm_100a"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_is_compiled_beforehand_is_served_and_what_calls_get(arch: str) -> None:
    needed = kernels.needed(arch, 148)
    assert needed == kernels.needed(arch, 148) and len(needed) == len(set(needed))
    assert [variant for variant in needed if supports(variant.problem, arch)] == []
    texts = {kernels.library.key.canonical(*variant, arch) for variant in needed}
    served = [case for case in CASES if case.batch * case.seqlen_q * case.seqlen_k > 0]
    served = [case for case in served if supports(kernels.problem_of(case), arch) is None]
    assert len(served) > 100
    assert {kernels.library.key.canonical(*kernels.variant_of(case, arch, 148), arch) for case in served} <= texts
    prefills = (kernels.prefill_of(draw(seed), arch, 148) for seed in range(200))
    assert any(prefills) == (arch == "sm_90a")
