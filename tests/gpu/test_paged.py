"""`fmha.attention_paged` against the float64 oracle."""

from __future__ import annotations

import pytest

from tests.paged import PROBLEMS, check, draw

PART = 50  # of them, a test


@pytest.mark.parametrize("start", range(0, PROBLEMS, PART))
def test_drawn_problems(start: int, record) -> None:
    """A failure names its seed: `tests.paged.draw(seed)` is the case."""
    failed = {}
    for seed in range(start, start + PART):
        case = draw(seed)
        try:
            record(case, check(case, "cuda", seed))
        except AssertionError as error:
            failed[seed] = f"{case}: {error}"
    assert not failed, failed
