"""Problems drawn over everything at once, against the float64 oracle."""

from __future__ import annotations

import pytest

from fmha.problem import supports
from tests.checks import attend, check
from tests.drawn import PROBLEMS, draw
from tests.kernels import ARCH, problem_of

PART = 50  # of them, a test


@pytest.mark.parametrize("start", range(0, PROBLEMS, PART))
def test_drawn_problems(start: int, record) -> None:
    """Those that are served. A failure names its seed: `tests.drawn.draw(seed)` is the case."""
    failed = {}
    for seed in range(start, start + PART):
        case = draw(seed)
        if supports(problem_of(case), ARCH):
            continue
        try:
            record(case, check(case, attend, "cuda", seed))
        except AssertionError as error:
            failed[seed] = f"{case.name}: {error}"
    assert not failed, failed
