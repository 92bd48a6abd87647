"""Work tiles spread evenly: list scheduling against cases that can be counted, and the groups that are in use."""

from __future__ import annotations

import math

import pytest

from schedules.balance import START, idle
from schedules.domain import DOMAINS, Bounds, Causal, Dense
from schedules.tiling import Extent, choose
from schedules.work import head_group

H200 = 132
L2 = 50 * 2**20  # bytes


def test_equal_work_tiles_that_fill_every_wave_leave_nothing_idle() -> None:
    assert idle(Dense(128, 128), 1280, 1280, heads=4, group=1, multiprocessors=8) == pytest.approx(0)
    assert idle(Dense(128, 128), 1280, 1280, heads=4, group=1, multiprocessors=8, lead=math.inf) == pytest.approx(0)


def test_a_last_wave_for_one_multiprocessor_is_counted() -> None:
    found = idle(Dense(128, 128), 128, 1280, heads=9, group=1, multiprocessors=8)
    assert found == pytest.approx(1 - 9 / 16)


@pytest.mark.parametrize(("lead", "makespan"), [(0.0, 8 + START), (math.inf, 9 + 2 * START)])
def test_a_work_tile_that_is_taken_early_waits_for_its_cta(lead: float, makespan: float) -> None:
    """Two CTAs, work tiles of 8, 1, 1 and 1 KV tiles: the first CTA takes the last one at its start, or never."""

    class Steps(Causal):
        def visits(self, q_tile: int, bounds: Bounds):
            return super().visits(q_tile, bounds)._replace(total=(1, 1, 1, 8)[q_tile])

    found = idle(Steps(128, 128), 512, 512, heads=1, group=1, multiprocessors=2, lead=lead)
    assert found == pytest.approx(1 - (11 + 4 * START) / (2 * makespan))


def suite(head_dim: int, seqlen: int, lead: float) -> float:
    """Idle time of a causal row of the suite `dense`, B x S = 16k and H x D = 2048."""
    heads = max(1, 16384 // seqlen) * 2048 // head_dim
    config = choose(head_dim, "sm_90a", Extent("causal", seqlen, seqlen, heads, H200))
    domain = DOMAINS["causal"](config.tile_m, config.tile_n)
    group = head_group(True, seqlen, 4 * head_dim, L2)
    return idle(domain, seqlen, seqlen, heads, group, H200, lead)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_suite_leaves_little_idle_and_asking_early_would_leave_more(head_dim: int) -> None:
    lengths = [2**i for i in range(8, 15)]
    late = {seqlen: suite(head_dim, seqlen, lead=4.0) for seqlen in lengths}
    early = {seqlen: suite(head_dim, seqlen, lead=math.inf) for seqlen in lengths}
    assert max(late.values()) < 0.035
    assert sum(early.values()) > 1.2 * sum(late.values())
