"""The decoding schedule computes attention, under every adversary, however its tiles are split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from schedules import simulate_decode
from schedules.machine import CountError, Hazard, TileError
from schedules.splits import Place, Split
from tests.cpu.paged import NO_PAGE, Ask, PagedProblem, drawn, run, whole
from tests.cpu.simulation import ADVERSARIES

SPLITS = (0, 1, 2, 5)


@pytest.mark.parametrize("policy", ADVERSARIES)
@pytest.mark.parametrize("hundred", range(2))
def test_a_random_problem_is_solved(policy, hundred):
    begin = 1000 * ADVERSARIES.index(policy) + 100 * hundred
    for seed in range(begin, begin + 100):
        run(drawn(seed), seed, policy)


def test_and_at_its_own_pace():
    for seed in range(5000, 5020):
        run(drawn(seed), seed, "steady")


def test_the_random_problems_have_everything():
    """What is random is easily not there."""
    found = [drawn(seed) for seed in range(100)]
    groups = {problem.heads // problem.kv_heads for problem in found}
    assert groups == {1, 2, 4, 5} and simulate_decode.TILE_M % 5
    assert {problem.splits for problem in found} == set(SPLITS)
    assert {keys for problem in found for keys in problem.arguments["seq_lens"]} >= {0, 1}
    assert any(problem.head_dim != problem.value_dim for problem in found)
    assert any(side is not None and side < 0 for problem in found for side in problem.window)
    assert any(problem.packed and problem.before and problem.behind for problem in found)
    assert any(ask.queries * (p.heads // p.kv_heads) > simulate_decode.TILE_M for p in found for ask in p.asks)
    for problem in found:
        assert (problem.arguments["page_table"] == NO_PAGE).any()
        assert np.isnan(problem.arguments["k_pages"]).any() and np.isnan(problem.arguments["v_pages"]).any()


@pytest.mark.parametrize("splits", SPLITS)
def test_a_batch_without_a_key(splits):
    result = run(whole([0, 0], queries=3, heads=2, splits=splits))
    assert not result.o.any() and np.isneginf(result.lse).all()
    result = run(whole([0, 0], queries=3, heads=2, splits=splits, sinks=True))
    assert not result.o.any() and np.isfinite(result.lse).all(), "the sink alone"


@pytest.mark.parametrize("splits", SPLITS)
def test_rows_of_no_sequence_are_zeros(splits):
    problem = PagedProblem((Ask(0, 30), Ask(2, 30)), packed=True, before=20, behind=40, sinks=True, splits=splits)
    result = run(problem)
    assert not result.o[:20].any() and not result.o[22:].any() and result.o[20:22].all()
    assert np.isneginf(result.lse[:20]).all() and np.isneginf(result.lse[22:]).all()


def test_what_no_query_sees_has_no_page():
    """Of 90 keys a window leaves 20; a page that it has left behind may be another sequence's by now."""
    problem = whole([90], window=(19, None), page=4)
    table = problem.arguments["page_table"][0]
    assert (table[:17] == NO_PAGE).all() and (table[17:23] != NO_PAGE).all() and table[23] == NO_PAGE
    run(problem)


# -- splits ------------------------------------------------------------------------------------------------------------


class Sure(simulate_decode.NumpyDecode):
    """Rescales where it must and nowhere else: weights against another reference round differently."""

    def perhaps(self, rescales: np.bool_) -> bool:
        return bool(rescales)


SURE = type("SureCta", (simulate_decode.DecodeCta,), {"DECODE": Sure})


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("packed", [False, True])
def test_with_fixed_splits_a_row_has_the_same_bits_in_any_batch(splits, packed):
    for seed in range(12):
        others = drawn(9000 + seed)
        mine = Ask(3 if packed else others.asks[0].queries, 25 + 7 * seed, 77)
        asks = tuple(ask if packed else replace(ask, queries=mine.queries) for ask in others.asks)
        place = seed % (len(asks) + 1)
        batch = replace(others, asks=(*asks[:place], mine, *asks[place:]), packed=packed, splits=splits)
        batch = batch if packed else replace(batch, before=0, behind=0)
        alone = replace(batch, asks=(mine,), before=0, behind=0, multiprocessors=seed % 4 + 1)
        (o, lse), (o_alone, lse_alone) = (
            problem.of(run(problem, seed, policy, cta=SURE), index)
            for problem, policy, index in ((batch, "random", place), (alone, "eager", 0))
        )
        assert np.array_equal(o, o_alone) and np.array_equal(lse, lse_alone), (seed, batch)


def test_without_they_have_not():
    """Else the test above would say nothing."""
    mine = Ask(1, 90, 77)
    alone = PagedProblem((mine,), multiprocessors=3)
    batch = replace(alone, asks=(mine, Ask(1, 40, 1)))
    o, o_alone = (problem.of(run(problem, cta=SURE), 0)[0] for problem in (batch, alone))
    assert not np.array_equal(o, o_alone) and np.allclose(o, o_alone, rtol=1e-12)


def test_however_it_is_split_the_numbers_agree():
    for seed in range(20):
        problem = drawn(8000 + seed)
        results = [
            run(replace(problem, splits=splits, multiprocessors=ctas), seed)
            for splits, ctas in zip(SPLITS, (5, 2, 3, 4), strict=True)
        ]
        for result in results[1:]:
            np.testing.assert_allclose(result.o, results[0].o, rtol=1e-11, atol=1e-11)
            np.testing.assert_allclose(result.lse, results[0].lse, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("splits", SPLITS)
def test_ctas_share_the_tiles(splits):
    """One sequence of 12 tiles over 4 CTAs: three each, or as many splits as there are."""
    trace = run(whole([12 * 16], splits=splits, multiprocessors=4)).trace
    tiles = [sum(event.what.startswith("issue QK") for event in trace if event.cta == cta) for cta in range(4)]
    assert sum(tiles) == 12
    assert sorted(tiles, reverse=True) == {0: [3] * 4, 1: [12, 0, 0, 0], 2: [6, 6, 0, 0], 5: [4, 3, 3, 2]}[splits]
    merged = sum(event.what == "merge" for event in trace)
    assert merged == (splits != 1)


# -- what is objected to -----------------------------------------------------------------------------------------------


def decoding(**methods: Any) -> type[simulate_decode.DecodeCta]:
    """A CTA whose consumer does some things differently."""
    role = type("Broken", (simulate_decode.NumpyDecode,), methods)
    return type("BrokenCta", (simulate_decode.DecodeCta,), {"DECODE": role})


SHARED = whole([100], multiprocessors=3)


def test_a_part_that_is_not_published_is_not_there():
    with pytest.raises(Hazard, match="decode: arrive.*part . is not there yet"):
        run(SHARED, cta=decoding(publish=lambda self: None))


def test_a_counter_must_be_0_again():
    class Forgets(simulate_decode.NumpyDecode):
        def merge(self, split: Split, place: Place) -> None:
            super().merge(split, place)
            self.cta.parts.counters[place.counter] = place.parts

    with pytest.raises(CountError, match="exit: counter 0 is 3, and not 0 for the next launch"):
        run(SHARED, cta=type("BrokenCta", (simulate_decode.DecodeCta,), {"DECODE": Forgets}))


def test_a_part_must_be_merged_and_a_row_written():
    with pytest.raises(CountError, match="exit: (counter 0 is|part . was not merged)"):
        run(SHARED, cta=decoding(merge=lambda self, split, place: None))
    with pytest.raises(CountError, match="exit: row .* was written 0 times"):
        run(whole([10]), cta=decoding(write=lambda self, split: None))


def test_rows_are_not_written_twice():
    def write(self: simulate_decode.NumpyDecode, split: Split) -> None:
        simulate_decode.NumpyDecode.write(self, split)
        simulate_decode.NumpyDecode.write(self, split)

    with pytest.raises(CountError, match="row .* was written before"):
        run(whole([10]), cta=decoding(write=write))


def test_a_page_that_is_not_there_is_not_looked_up():
    problem = whole([40], page=4)
    problem.arguments["page_table"][0, 5] = NO_PAGE
    with pytest.raises(TileError, match=f"key 20 of sequence 0 is in page {NO_PAGE}"):
        run(problem)
