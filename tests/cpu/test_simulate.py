"""The simulator: right numbers under every schedule, and the right objection to every kind of mistake."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import simulate
from schedules.domain import Bounds, Causal, Dense, Section, Visits, Window
from schedules.forward import Slot
from schedules.machine import POLICIES, CountError, Deadlock, Hazard, OrderError, RangeError, TileError
from schedules.rings import NumpyLendingRing, NumpyRing, NumpyTurn, NumpyWorkRing
from schedules.simulate import NumpyAttend, NumpyLoad
from schedules.tiling import BlockConfig, rivals
from schedules.work import RaggedWork, Work
from tests.cpu.simulation import (
    ADVERSARIES,
    NO_WINDOW,
    Problem,
    WrongNumbers,
    attention,
    broken,
    broken_rings,
    miscounted,
    miscounted_loans,
    packed,
    padded,
    run,
    small,
)

# -- numbers -----------------------------------------------------------------------------------------------------------


# With one Q slot V has a slot for each warpgroup; else any number will do.
DEPTHS = [(c, stages, 2) for c in (1, 2, 3) for stages in (1, 2, 3, 4)] + [(c, c, 1) for c in (1, 2, 3)]


MASKS = {
    "dense": (False, NO_WINDOW),
    "causal": (True, NO_WINDOW),
    "window": (False, (60, 7)),
    "narrower than a tile": (True, (3, None)),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("consumers", "stages", "q_stages"), DEPTHS)
@pytest.mark.parametrize("mask", MASKS)
def test_numbers_under_every_schedule(policy, consumers, stages, q_stages, mask):
    for ones in (0, 8):
        config = small(consumers, stages, q_stages, ones=ones)
        for seed, lengths in enumerate([(1, 1), (16 * consumers, 96), (33, 47), (70, 130), (50, 20)]):
            run(Problem(*lengths, *MASKS[mask], heads=2, config=config), seed, policy)


def of_any_depth(consumers: int, stages: int, q_stages: int, **rest) -> BlockConfig:
    """`stages` counts with several Q slots only."""
    return small(consumers, consumers if q_stages == 1 else stages, q_stages, **rest)


SIDES = st.none() | st.integers(-40, 110)


@settings(max_examples=500)
@given(
    lengths=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    causal=st.booleans(),
    window=st.just(NO_WINDOW) | st.tuples(SIDES, SIDES),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 16),
    config=st.builds(
        of_any_depth, consumers=st.integers(1, 3), stages=st.integers(1, 4), q_stages=st.integers(1, 3),
        tile_n=st.sampled_from([16, 32, 48]), ones=st.sampled_from([0, 8]),
    ),
    softcap=st.none() | st.floats(0.5, 50.0),
    sinks=st.booleans(),
    alibi=st.booleans(),
    multiprocessors=st.integers(1, 5),
    policy=st.sampled_from(ADVERSARIES),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_numbers_of_any_shape(
    lengths,
    causal,
    window,
    batch,
    kv_heads,
    group,
    head_dim,
    config,
    softcap,
    sinks,
    alibi,
    multiprocessors,
    policy,
    seed,
):
    heads = kv_heads * group
    problem = Problem(
        *lengths, causal, window, batch, heads, kv_heads, head_dim,
        config=config, softcap=softcap, sinks=sinks, alibi=alibi,
    )  # fmt: skip
    run(problem, seed, policy, multiprocessors=multiprocessors)


@pytest.mark.parametrize("head_dim", (64, 80, 128, 192, 256))
@pytest.mark.parametrize(
    ("causal", "window"), [(False, NO_WINDOW), (True, NO_WINDOW), (False, (260, 20)), (True, (30, None))]
)
@pytest.mark.parametrize("lse", (False, True))
def test_numbers_with_the_block_configs_of_the_kernels(head_dim, causal, window, lse):
    config = rivals(head_dim, "sm_90a", lse)[0].config
    run(Problem(200, 500, causal, window, heads=2, head_dim=head_dim, spread=2.0, config=config))


@pytest.mark.parametrize("ones", (0, 8))
@pytest.mark.parametrize(
    ("causal", "window", "seeing"),
    [
        (True, NO_WINDOW, range(70, 100)),
        (False, (-8, None), range(92)),  # they see keys 8 or more behind their own
        (False, (None, -8), range(78, 100)),
        (False, (-20, 25), range(45, 80)),
        (False, (7, -8), range(0)),
        (True, (-1, None), range(0)),
        (False, (5, 0), range(70, 100)),
    ],
)
def test_rows_that_see_nothing_are_zero_with_an_lse_of_minus_infinity(causal, window, seeing, ones):
    result = run(Problem(100, 30, causal, window, heads=2, config=small(ones=ones)))
    blind = np.setdiff1d(np.arange(100), seeing)
    assert (result.o[:, blind] == 0).all() and (result.lse[:, :, blind] == -math.inf).all()
    assert np.isfinite(result.lse[:, :, seeing]).all() and (result.o[:, seeing] != 0).all()


@pytest.mark.parametrize(("window", "causal"), [((59, 0), True), ((None, 0), True), ((99, 59), False)])
def test_a_window_that_cuts_nothing_off_is_none(window, causal):
    """The programs are those of the other mask, to the last operation."""
    windowed = run(Problem(60, 60, window=window), seed=3)
    plain = run(Problem(60, 60, causal), seed=3)
    np.testing.assert_array_equal(windowed.o, plain.o)
    assert windowed.trace == plain.trace


def test_a_window_visits_its_left_edge_last():
    """The first tile is whole: what its weights say of those to come holds of them."""
    trace = run(Problem(32, 112, window=(64, 0)), policy="steady").trace

    def tiles(what: str) -> list[int | None]:
        return [event.tile for event in trace if (event.lane, event.what) == ("attend0", what)]

    assert tiles("exponents") == [3, 4, 5, 6, 1, 2]
    assert tiles("mask") == [3, 5, 6, 1, 2]


def test_scale_and_the_order_of_work_change_nothing_else():
    problem = Problem(50, 50, causal=True, heads=4, batch=2, scale=0.3)
    orders = [(1, 1), (3, 1), (1, 5), (3, 100)]
    results = [run(problem, policy="steady", head_group=g, multiprocessors=m) for g, m in orders]
    for result in results[1:]:
        np.testing.assert_array_equal(result.o, results[0].o)
        assert result.trace != results[0].trace


@given(st.integers(0, 130), st.integers(1, 20), st.integers(0, 1000))
def test_every_work_tile_is_dealt_to_one_cta_in_order_and_then_none(total, multiprocessors, seed):
    shares = []
    for i, indices in enumerate(simulate.share_out(total, multiprocessors, seed)):
        share = list(itertools.takewhile(lambda index: index < total, indices))
        assert share[0] == i and share == sorted(share)
        assert all(next(indices) >= total for _ in range(3))
        shares.append(share)
    assert len(shares) == min(total, multiprocessors)
    assert sorted(itertools.chain(*shares)) == [*range(total)]


# -- ragged batches ----------------------------------------------------------------------------------------------------

SIZES = [(33, 47), (0, 20), (5, 0), (1, 1), (16, 96), (0, 0), (20, 50)]
USED = (30, 0, 2, 1, 0, 0, 20), (1, 20, 0, 0, 90, 0, 49)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("consumers", "stages", "q_stages"), DEPTHS)
def test_numbers_of_ragged_batches_under_every_schedule(policy, consumers, stages, q_stages):
    """The masks, the scores and what is ragged take turns."""
    masks = itertools.cycle(MASKS.values())
    for seed, ones in enumerate((0, 8)):
        options = {"heads": 2, "config": small(consumers, stages, q_stages, ones=ones)}
        causal, window = next(masks)
        run(packed(SIZES, 3, 40, causal=causal, window=window, **options), seed, policy)
        causal, window = next(masks)
        run(packed(SIZES, used=USED, causal=causal, window=window, alibi=True, sinks=True, **options), seed, policy)
        used = (40, 0, 17), (0, 70, 33)
        run(padded(3, 40, 70, *used, causal=True, softcap=5.0, **options), seed, policy)


LENGTHS = st.sampled_from([0, 0, 1, 15, 16, 17]) | st.integers(0, 60)


@st.composite
def ragged_problems(draw) -> Problem:
    causal, window = draw(st.sampled_from([*MASKS.values(), (False, (None, -8)), (False, (7, -8))]))
    kv_heads, depth = draw(st.integers(1, 2)), [draw(st.integers(1, most)) for most in (3, 4, 3)]
    rest = {
        "causal": causal,
        "window": window,
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 2)),
        "softcap": draw(st.none() | st.floats(0.5, 50.0)),
        "sinks": draw(st.booleans()),
        "alibi": draw(st.booleans()),
        "config": of_any_depth(*depth, ones=draw(st.sampled_from([0, 8]))),
    }

    def some_of(*counts: int) -> tuple[int, ...]:
        return draw(st.tuples(*(st.just(count) | st.integers(0, count) for count in counts)))

    which = draw(st.sampled_from(["q", "k", "qk"]))
    if draw(st.booleans()):
        batch, (rows, keys) = draw(st.integers(1, 4)), draw(st.tuples(*[st.integers(1, 60)] * 2))
        used = (some_of(*[n] * batch) if name in which else None for n, name in ((rows, "q"), (keys, "k")))
        return padded(batch, rows, keys, *used, **rest)
    sizes = draw(st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=5))
    before, behind = draw(st.tuples(*[st.sampled_from([0, 0, 1, 40])] * 2))
    which = draw(st.just("") | st.just(which))
    used = tuple(some_of(*(pair[i] for pair in sizes)) if name in which else None for i, name in enumerate("qk"))
    return packed(sizes, before, behind, used=used, **rest)


@settings(max_examples=400)
@given(ragged_problems(), st.integers(1, 5), st.integers(1, 4), st.sampled_from(ADVERSARIES), st.integers(0, 2**32))
def test_numbers_of_any_ragged_batch(problem, multiprocessors, head_group, policy, seed):
    run(problem, seed, policy, multiprocessors=multiprocessors, head_group=head_group)


@pytest.mark.parametrize("ones", (0, 8))
def test_rows_of_no_sequence_are_zero_with_an_lse_of_minus_infinity(ones):
    """And queries without a key have their sink."""
    result = run(packed(SIZES, 3, 40, sinks=True, heads=2, config=small(ones=ones)))
    nobodys = np.r_[0:3, 78:118]
    assert (result.o[0, nobodys] == 0).all() and (result.lse[0][:, nobodys] == -math.inf).all()
    blind = np.r_[36:41]
    assert (result.o[0, blind] == 0).all() and np.isfinite(result.lse[0][:, blind]).all()
    nobody = run(packed([], 3, 40, heads=2, config=small(ones=ones)))
    assert (nobody.o == 0).all() and (nobody.lse == -math.inf).all()


@pytest.mark.parametrize("ones", (0, 8))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("of", ("packed", "padded"))
def test_a_neighbour_full_of_nan_reaches_nobody(of, causal, ones):
    options = {"causal": causal, "heads": 2, "config": small(ones=ones), "alibi": True}
    problem = packed([(20, 30), (17, 21), (33, 47)], **options) if of == "packed" else (
        padded(3, 40, 50, (20, 17, 33), (30, 21, 47), **options)
    )  # fmt: skip
    given = {**problem.options, "config": problem.config}
    given |= {"cu_seqlens": problem.lengths.cu_seqlens, "seqused": problem.lengths.seqused}
    q, k, v = problem.inputs()
    clean = simulate.forward(q, k, v, **given)
    entry, queries, keys = problem.lengths.parts(problem)[1]
    q[entry, queries] = k[entry, keys] = v[entry, keys] = math.nan
    with np.errstate(invalid="ignore"):
        spoilt = simulate.forward(q, k, v, **given)
    assert np.isnan(spoilt.o[entry, queries]).all()
    others = np.ones(q.shape[:2], bool)
    others[entry, queries] = False
    np.testing.assert_array_equal(spoilt.o[others], clean.o[others])
    np.testing.assert_array_equal(spoilt.lse.transpose(0, 2, 1)[others], clean.lse.transpose(0, 2, 1)[others])


def test_equal_lengths_are_computed_as_a_batch_is():
    """The programs are the same, to the last operation of each work tile."""
    options = {"heads": 2, "causal": True}
    batch, ragged = Problem(40, 50, batch=3, **options), packed([(40, 50)] * 3, **options)
    q, k, v = batch.inputs()
    given = {**batch.options, "config": batch.config, "policy": "steady", "multiprocessors": 1}
    plain = simulate.forward(q, k, v, **given)
    flat = (x.reshape(1, -1, *x.shape[2:]) for x in (q, k, v))
    found = simulate.forward(*flat, cu_seqlens=ragged.lengths.cu_seqlens, **given)
    np.testing.assert_array_equal(found.o.reshape(plain.o.shape), plain.o)
    np.testing.assert_array_equal(found.lse.reshape(2, 3, 40), plain.lse.transpose(1, 0, 2))


@pytest.mark.parametrize("cu", [(0, 40, 20, 50), (0, 20, 60, 80), (-5, 60, 20, 50)])
def test_numbers_that_decrease_or_lie_outside_leave_no_tensor(cu):
    """Rows are written twice, or what is right for other numbers."""
    q, k, v = Problem(50, 50, heads=2).inputs()
    try:
        o, _, _ = simulate.forward(q, k, v, cu_seqlens=(cu, cu), config=small())
    except CountError as error:
        assert re.search(r"row \d+ was written [2-9] times", str(error)) and sorted(cu) != list(cu)
    else:
        inside = np.clip(cu, 0, 50)
        expected, _ = packed([(b - a, b - a) for a, b in itertools.pairwise(inside)], heads=2).answer(q, k, v)
        np.testing.assert_allclose(o, expected, rtol=1e-9, atol=1e-9)


# -- what the programs do ----------------------------------------------------------------------------------------------


def rescales(problem: Problem, policy: str, seed: int = 0) -> int:
    return sum(event.what == "rescale" for event in run(problem, seed, policy).trace)


def test_the_threshold_decides_who_rescales():
    """Without an adversary: at every new maximum, or never."""

    def steady(rescale_above: float) -> int:
        config = small(consumers=1, rescale_above=rescale_above)
        return rescales(Problem(16, 160, spread=1.0, config=config), "steady")

    assert steady(0.0) > 3 and steady(8.0) == 0


def mends(spread: float) -> int:
    """Tiles that an optimistic role mends, without an adversary."""
    config = small(consumers=1, ones=8)
    trace = run(Problem(16, 160, spread=spread, config=config), policy="steady").trace
    return sum(event.what == "mend" for event in trace)


def test_an_optimistic_role_mends_what_it_could_not_foresee():
    """The sharper the scores, the more of their row's sum is in a few weights."""
    assert [mends(spread) for spread in (0.1, 0.3)] == [0, 0] and 0 < mends(3.0) <= mends(8.0) <= 9


def test_what_is_foreseen_counts_the_tiles():
    """Of one tile more than there are, or of one that is not the first."""

    class Miscounts(NumpyAttend):
        def foresee(self, tiles: int) -> None:
            super().foresee(tiles + 1)

    class ForeseesLate(NumpyAttend):
        def pack_p(self) -> None:
            super().pack_p()
            if self.p.tile == 1:
                self.foresee(self.visits(self.p.work).total)

    for role, message in ((Miscounts, "of tile 0, of 11 tiles"), (ForeseesLate, "of tile 1")):
        with pytest.raises(TileError, match=f"foresee.*P is {message}"):
            run(Problem(16, 160, config=small(consumers=1, ones=8)), cta=broken(ATTEND=role))


def test_weights_out_of_range_are_noticed():
    """That nobody looks for scores that have outgrown their reference, or that a mask comes after the reference."""

    class Trusts(NumpyAttend):
        def outgrown(self) -> bool:
            return False

    class MasksLate(NumpyAttend):
        def start(self) -> None:
            super().start()
            NumpyAttend.mask(self, self.s.work, self.s.tile, self.domain.first_section)

        def mask(self, work: Work, tile: int, section: Section) -> None:
            if tile > 0:
                super().mask(work, tile, section)

    optimist = small(consumers=1, ones=8)
    with pytest.raises(RangeError, match=r"issue PV .*a weight is .*, more than 2\^2"):
        run(Problem(16, 160, config=optimist), policy="steady", cta=broken(ATTEND=Trusts))
    for config in (optimist, small(consumers=1)):
        with pytest.raises(RangeError, match="the weights of a row add up to .*, less than"):
            run(Problem(160, 160, causal=True, config=config), policy="steady", cta=broken(ATTEND=MasksLate))


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_an_adversary_also_rescales_where_it_need_not(policy):
    problem = Problem(16, 160, spread=1.0, config=small(consumers=1, rescale_above=8.0))
    assert max(rescales(problem, policy, seed) for seed in range(10)) > 1


def test_infinities_and_nan_spread_as_in_a_softmax():
    q, k, v = Problem(40, 50).inputs()
    q[0, 3, 0, 0], v[0, 7, 0, 2], k[0, 49, 0, 1] = math.nan, math.inf, math.inf
    with np.errstate(all="ignore"):
        o, lse, _ = simulate.forward(q, k, v, config=small())
    assert np.isnan(o[0, 3]).all() and np.isnan(lse[0, 0, 3])
    assert not np.isfinite(o).all(axis=(0, 2, 3)).any(), "every query meets the infinite key"
    q, k, v = Problem(40, 50).inputs()
    q[0, 3, 0, 0], v[0, 7, 0, 2] = math.nan, math.inf
    o = simulate.forward(q, k, v, config=small()).o
    others = np.arange(40) != 3
    np.testing.assert_array_equal(o[0, others, 0, 2], math.inf)
    assert np.isfinite(np.delete(o[:, others], 2, axis=3)).all()


def test_a_seed_and_a_policy_fix_the_schedule():
    problem = Problem(30, 60)
    for policy in POLICIES:
        assert run(problem, 1, policy).trace == run(problem, 1, policy).trace
    schedules = {tuple(run(problem, seed, policy).trace) for seed in range(5) for policy in ADVERSARIES}
    assert len(schedules) == 15
    assert len({tuple(run(problem, seed, "steady").trace) for seed in range(5)}) == 1


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((1, 4, 3, 8), (1, 4, 2, 8), (1, 4, 2, 8)), r"k \(1, 4, 2, 8\) .* not \[B, Sk, Hkv, D\]"),
        (((1, 4, 2, 8), (1, 4, 2, 8), (1, 5, 2, 8)), r"v \(1, 5, 2, 8\)"),
        (((1, 4, 2, 8), (1, 4, 2, 7), (1, 4, 2, 7)), r"k \(1, 4, 2, 7\)"),
        (((2, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)), r"k \(1, 4, 2, 8\)"),
        (((1, 0, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)), "B, Sq, Sk > 0"),
        (((1, 4, 2, 17), (1, 4, 2, 17), (1, 4, 2, 17)), "D <= 16"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        simulate.forward(*map(np.zeros, shapes), config=small())


# -- broken programs ---------------------------------------------------------------------------------------------------


def nothing(self, *arguments) -> None:
    """An operation that is left out."""


def without(*operations: str) -> type[simulate.Cta]:
    """Consumers whose `operations` do nothing."""
    return broken(ATTEND=type("Without", (NumpyAttend,), dict.fromkeys(operations, nothing)))


class ReadsScoresEarly(NumpyAttend):
    def issue_qk(self, q_slot: Slot, slot: Slot) -> None:
        super().issue_qk(q_slot, slot)
        self.exponents(self.k.at(slot).tile)


class OverwritesP(NumpyAttend):
    def exponents(self, tile: int) -> None:
        super().exponents(tile)
        self.pack_p()


class RescalesEarly(NumpyAttend):
    def issue_pv(self, slot: Slot) -> None:
        super().issue_pv(slot)
        self.rescale()


class ReleasesEarly(NumpyAttend):
    def issue_qk(self, q_slot: Slot, slot: Slot) -> None:
        super().issue_qk(q_slot, slot)
        self.k.release(slot)


class RetiresOneTooFew(NumpyAttend):
    def retire(self, pending: int) -> None:
        super().retire(pending + 1)


class ReadsAfterRelease(NumpyAttend):
    def close_and_open(self, q_slot: Slot, slot: Slot) -> Work:
        upcoming = super().close_and_open(q_slot, slot)
        self.issue_pv(slot)
        return upcoming


class StagesOverQueriesInUse(NumpyAttend):
    def issue_qk(self, q_slot: Slot, slot: Slot) -> None:
        super().issue_qk(q_slot, slot)
        self.stage_o(q_slot)


class StagesBesideItsQueries(NumpyAttend):
    def stage_o(self, slot: Slot) -> None:
        super().stage_o(self.q.next(self.q.next(self.q.next(slot)))._replace(stage=7))


class NamesTheWrongTile(NumpyAttend):
    def mask(self, work: Work, tile: int, section: Section) -> None:
        super().mask(work, max(0, tile - 1), section)


class ExponentiatesTheWrongTile(NumpyAttend):
    def exponents(self, tile: int) -> None:
        super().exponents(max(0, tile - 1))


class StoresTwice(NumpyAttend):
    def store_o(self, slot: Slot, work: Work) -> None:
        super().store_o(slot, work)
        super().store_o(slot, work)


class GivesTwice(NumpyTurn):
    def give(self) -> None:
        super().give()
        super().give()


class TakesTurnsCarelessly(NumpyAttend):
    def __init__(self, cta: simulate.Cta, index: int) -> None:
        super().__init__(cta, index)
        object.__setattr__(self, "turn", GivesTwice(cta.turnstile, index))


class TakesOneTurnTooMany(NumpyAttend):
    def run(self) -> None:
        super().run()
        if self.index == 0:
            self.turn.take()


class TakesAnothersQueries(NumpyAttend):
    def __init__(self, cta: simulate.Cta, index: int) -> None:
        super().__init__(cta, index)
        self.q = cta.q[0]


class ReleasesQueriesEarly(NumpyAttend):
    def issue_qk(self, q_slot: Slot, slot: Slot) -> None:
        super().issue_qk(q_slot, slot)
        self.q.release(q_slot)


class LeavesQueriesEarly(NumpyAttend):
    def leave_q(self, position: int, last: int, q_slot: Slot) -> None:
        super().leave_q(position, last - 1, q_slot)


class GivesBackEarly(NumpyAttend):
    def stage_o(self, slot: Slot) -> None:
        super().stage_o(slot)
        self.v.give_back(slot, self.index)


class GivesBackAnothers(NumpyAttend):
    def free(self, stored: Slot) -> None:
        super().free(self.v.next(stored))


class SaysThatAnothersHasLeft(NumpyAttend):
    def free(self, stored: Slot) -> None:
        self.v.give_back(stored, 1 - self.index)


class SaysThatNobodysHasLeft(NumpyAttend):
    def free(self, stored: Slot) -> None:
        self.v.give_back(stored, 2 + self.index)


class ReleasesWhatItBorrowed(NumpyAttend):
    def free(self, stored: Slot) -> None:
        self.v.release(stored)


class LoadsOnlyTheFirst(NumpyLoad):
    def run(self) -> None:
        self.open(self.first_work(), self.q[0].first(), self.k.first())


class AnnouncesTooMuch(NumpyLoad):
    def run(self) -> None:
        super().run()
        self.v.commit(self.v.first())


def visiting(change: Callable[[Visits], Visits]) -> type[simulate.Cta]:
    """All roles agree on the wrong tiles."""

    def visits(self, work: Work) -> Visits:
        return change(self.cta.visits(work))

    return broken(
        LOAD=type("Load", (NumpyLoad,), {"visits": visits}), ATTEND=type("Attend", (NumpyAttend,), {"visits": visits})
    )


def within(domain: type[Dense]) -> type[simulate.Cta]:
    """A CTA to which `domain` is the mask's."""

    def init(self, tensors: simulate.Tensors, right: Dense, *rest) -> None:
        simulate.Cta.__init__(self, tensors, domain(right.tile_m, right.tile_n), *rest)

    return broken(__init__=init)


def dealt(change: Callable[[Iterator[RaggedWork]], Iterator[RaggedWork]]) -> type[simulate.Cta]:
    """A CTA that gets other work tiles."""

    def init(self, *rest) -> None:
        simulate.Cta.__init__(self, *rest[:-1], change(rest[-1]))

    return broken(__init__=init)


def changed(change: Callable[[RaggedWork], RaggedWork]) -> type[simulate.Cta]:
    return dealt(lambda works: (change(work) if work.valid else work for work in works))


def loads_past_the_end(self: simulate.Cta, tensors: simulate.Tensors, *rest) -> None:
    simulate.Cta.__init__(self, tensors, *rest)
    tensors.keys_of = lambda work: slice(work.start_k, None)


def bounds_of_the_tensors(self: simulate.Cta, work: RaggedWork) -> Bounds:
    return self.whole


def bounds_of_all_rows(self: simulate.Cta, work: RaggedWork) -> Bounds:
    return simulate.Cta.bounds(self, work)._replace(seqlen_q=work.rows)


class MasksNoLeftEdge(NumpyAttend):
    def mask(self, work: Work, tile: int, section: Section) -> None:
        super().mask(work, tile, Section.RIGHT)


class MasksTheLeftEdgeAlone(NumpyAttend):
    def mask(self, work: Work, tile: int, section: Section) -> None:
        whole = self.s.data.copy()
        super().mask(work, tile, section)
        if section is Section.LEFT:
            keys = tile * self.config.tile_n + np.arange(self.config.tile_n)
            self.s.data[:] = np.where(keys < self.limits(work)[1], self.s.data, whole)


class SeesOneKeyMore(NumpyAttend):
    def limits(self, work: Work) -> tuple[np.ndarray, np.ndarray]:
        lo, hi = super().limits(work)
        return lo - 1, hi


class StopsBeforeTheLeftEdge(NumpyAttend):
    def __init__(self, cta: simulate.Cta, index: int) -> None:
        super().__init__(cta, index)
        self.domain = Causal(self.config.tile_m, self.config.tile_n)


class LoadsInOrder(NumpyLoad):
    def tile(self, visits: Visits, position: int) -> int:
        return visits.first + position


class InOrder(Window):
    def tile(self, visits: Visits, position: int) -> int:
        return visits.first + position


class FromTheFirstKey(Window):
    def tile(self, visits: Visits, position: int) -> int:
        return super().tile(visits, position) - visits.first


class StartsAtTheRight(Window):
    first_section = Section.RIGHT


def twice(operation: str, ring: type[NumpyRing] = NumpyRing) -> type[simulate.Cta]:
    """Rings that do `operation` twice."""

    def both(self, *arguments) -> None:
        getattr(ring, operation)(self, *arguments)
        getattr(ring, operation)(self, *arguments)

    return broken_rings(**{operation: both})


def wait_for_the_other_parity(self: NumpyRing, slot: Slot) -> None:
    NumpyRing.wait(self, slot._replace(parity=slot.parity ^ 1))


def borrow_by_the_other_parity(self: NumpyLendingRing, slot: Slot) -> None:
    NumpyLendingRing.borrow(self, slot._replace(parity=slot.parity ^ 1))


def reclaim_by_the_other_parity(self: NumpyLendingRing, index: int, parity: int) -> None:
    NumpyLendingRing.reclaim(self, index, parity ^ 1)


def reclaim_from_the_first(self: NumpyLendingRing, index: int, parity: int) -> None:
    NumpyLendingRing.reclaim(self, 0, parity)


def reclaim_from_nobody(self: NumpyLendingRing, index: int, parity: int) -> None:
    NumpyLendingRing.reclaim(self, index - 1, parity)


def load_of_another(self: NumpyRing, slot: Slot, work: Work, tile: int) -> None:
    NumpyRing.load(self, slot, work._replace(head=1 - work.head) if self.name == "K" else work, tile)


BROKEN = {
    "no fence before the first MMA": (
        without("fence"),
        Hazard,
        r"attend\d: issue QK K\[0\], tile 0, step \d+: QK uses S, touched without wgmma.fence since",
    ),
    "scores read under their MMA": (
        broken(ATTEND=ReadsScoresEarly),
        Hazard,
        r"attend\d: exponents, tile 0, .*writes S while QK of tile 0 by attend\d is in flight",
    ),
    "P overwritten under its MMA": (
        broken(ATTEND=OverwritesP),
        Hazard,
        r"attend\d: pack_p, tile \d, .*writes P while PV of tile \d by attend\d is in flight",
    ),
    "O rescaled under its MMA": (broken(ATTEND=RescalesEarly), Hazard, r"rescale.*writes O while PV of tile 0"),
    "MMAs never retired": (
        without("retire"),
        Hazard,
        r"attend\d: release K\[0\], tile 0, .*releases K\[0\] while QK of tile 0 by attend\d is in flight",
    ),
    "MMAs retired one group late": (broken(ATTEND=RetiresOneTooFew), Hazard, r"releases K\[0\] while QK of tile 0"),
    "MMAs never committed": (without("commit"), Hazard, r"releases K\[0\] while QK of tile 0"),
    "K released before its MMA has retired": (
        broken(ATTEND=ReleasesEarly),
        Hazard,
        r"attend\d: release K\[0\], tile 0, .*while QK of tile 0 by attend\d is in flight",
    ),
    "O staged over queries in use": (
        broken(ATTEND=StagesOverQueriesInUse),
        Hazard,
        r"stage_o, tile 0, .*writes the staged O while QK of tile 0 by attend\d is in flight",
    ),
    "O staged where there is no slot": (broken(ATTEND=StagesBesideItsQueries), Hazard, r"use Q\d\[7\].*stages 0 to 1"),
    "O stored before it is published": (
        without("publish_o"),
        Hazard,
        r"issue store O, tile 0, .*store O uses the staged O, touched without fence.proxy.async since",
    ),
    "a slot released while O leaves through it": (
        without("drain"),
        Hazard,
        r"attend(\d): release Q\1\[0\], tile 0, .*releases Q\1\[0\] while store O of tile 0 by attend\1 is in flight",
    ),
    "a slot refilled before it is released": (
        broken_rings(acquire=nothing),
        Hazard,
        r"load: issue load [KV]\[\d\], tile \d, step \d+: refills [KV]\[\d\], not released by attend",
    ),
    "a slot read before it is full": (
        broken_rings(wait=nothing),
        Hazard,
        r"attend(\d): work Q\1\[0\].*uses Q\1\[0\] without having waited for it",
    ),
    "a wait for the other parity": (
        broken_rings(wait=wait_for_the_other_parity),
        (Hazard, Deadlock),
        r"attend(\d): wait Q\1\[0\], .*the wait passed, but nothing was loaded since attend\1 released Q\1\[0\]",
    ),
    "a slot read after its release": (
        broken(ATTEND=ReadsAfterRelease),
        Hazard,
        r"attend\d: issue PV V\[1\], tile 5, .*uses V\[1\] without having waited for it, or after releasing it",
    ),
    "two copies into one slot": (twice("load"), Hazard, r"load: issue load K\[0\], tile 0, .*refills K\[0\]"),
    "a slot released twice": (twice("release"), CountError, r"attend\d: release K\[0\].*K\[0\] without holding it"),
    "a slot never released": (
        broken_rings(release=nothing),
        Deadlock,
        r"load: acquire K\[0\], tile \d \(K\[0\] empty, phase 0: 8 arrivals",
    ),
    "a slot announced twice": (twice("commit"), CountError, r"one arrival too many at (Q\d|K|V)\[\d\] full"),
    "bytes announced that nobody waits for": (
        broken(LOAD=AnnouncesTooMuch),
        CountError,
        r"exit: V\[0\] full, phase \d+: 0 arrivals and 512 bytes to come",
    ),
    "too many bytes announced": (
        miscounted(slot_bytes=1024),
        CountError,
        r"load: commit K\[0\], tile 0, .*K\[0\]: 1536 bytes announced, 512 copied",
    ),
    "Q of another warpgroup": (
        broken(ATTEND=TakesAnothersQueries),
        Hazard,
        r"attend1: wait Q0\[0\], .*nothing was loaded since attend1 released Q0\[0\]",
    ),
    "no work tile beside Q": (
        broken(WORK_RING=type("Silent", (NumpyWorkRing,), {"post": nothing})),
        Hazard,
        r"attend(\d): work Q\1\[0\], tile 0, .*nothing was posted in Q\1\[0\]",
    ),
    "K of another head": (
        broken_rings(load=load_of_another),
        TileError,
        r"issue QK K\[0\], tile 0, .*Q is of Work\(q_tile=0, head=(\d).*K of Work\(q_tile=0, head=(?!\1)",
    ),
    "a tile too few": (
        visiting(lambda right: right._replace(total=right.total - 1)),
        TileError,
        r"normalise, .*QK visited the tiles \[0, 1, 2, 3, 4\], not each of 0",
    ),
    "a tile too many": (
        visiting(lambda right: right._replace(total=right.total + 1)),
        TileError,
        r"load: issue load K\[0\], tile 6, .*K has tiles 0 to 5",
    ),
    "S of another tile": (broken(ATTEND=NamesTheWrongTile), TileError, r"mask, tile 4, .*S is of tile 5"),
    "weights of another tile": (
        broken(ATTEND=ExponentiatesTheWrongTile),
        TileError,
        r"exponents, tile 0, .*S is of tile 1",
    ),
    "P of another tile": (without("pack_p"), TileError, r"issue PV V\[0\], tile 0, .*P is of tile None"),
    "an output stored twice": (
        broken(ATTEND=StoresTwice),
        CountError,
        r"o, batch 0, head 0, row 0 was written 2 times",
    ),
    "an output not stored": (without("store_o"), CountError, r"o, batch 0, head 0, row 0 was written 0 times"),
    "an LSE not stored": (without("normalise"), CountError, r"lse, batch 0, head 0, row 0 was written 0 times"),
    "a turn given twice": (broken(ATTEND=TakesTurnsCarelessly), OrderError, r"attend0: turn.give, .*turn of nobody"),
    "a turn for two": (
        broken(TURN_THREADS=128),
        (OrderError, CountError),
        r"turn.take, .*takes the turn that attend\d holds",
    ),
    "a turn taken at the end": (
        broken(ATTEND=TakesOneTurnTooMany),
        CountError,
        r"exit: \[0, 0\] threads have arrived for another turn",
    ),
    "no turn to begin with": (
        broken(open_turns=nothing),
        Deadlock,
        r"attend0: turn.take, tile 0 .*; attend1: turn.take, tile 0 \(turn of attend1, 256 threads: 128 of attend1",
    ),
    "tiles that never come": (
        broken(LOAD=LoadsOnlyTheFirst),
        Deadlock,
        r"attend\d: wait K\[1\], tile 0 \(K\[1\] full, phase 0: 1 arrivals and 0 bytes to come\)",
    ),
}


BROKEN_LOANS = {  # with one Q slot
    "Q never released": (
        broken(ATTEND=type("StaysWithQueries", (NumpyAttend,), {"leave_q": nothing})),
        Deadlock,
        r"load: acquire Q(\d)\[0\], .*attend\1: wait Q\1\[0\], tile 5",
    ),
    "Q released before its MMA has retired": (
        broken(ATTEND=ReleasesQueriesEarly),
        Hazard,
        r"attend(\d): release Q\1\[0\], tile 0, .*releases Q\1\[0\] while QK of tile 0 by attend\1 is in flight",
    ),
    "Q released before its last MMA": (
        broken(ATTEND=LeavesQueriesEarly),
        Hazard,
        r"attend(\d): issue QK K\[1\], tile 5, .*uses Q\1\[0\] without having waited for it, or after releasing it",
    ),
    "O staged in a slot that was not borrowed": (
        broken_rings(borrow=nothing),
        Hazard,
        r"attend\d: stage_o, .*uses V\[\d\] without having waited for it, or after releasing it",
    ),
    "a slot borrowed before the others have released it": (
        broken_rings(borrow=borrow_by_the_other_parity),
        (Hazard, Deadlock),
        r"attend(\d): borrow V\[\d\], .*refills V\[\d\], not released by attend(?!\1)",
    ),
    "a slot borrowed twice": (
        twice("borrow", NumpyLendingRing),
        Hazard,
        r"attend(\d): borrow V\[(\d)\], .*refills V\[\2\], not released by attend\1",
    ),
    "O stored before it is published in V": (
        without("publish_o"),
        Hazard,
        r"issue store O, tile 0, .*store O uses the staged O, touched without fence.proxy.async since",
    ),
    "O stored from a slot that has been given back": (
        broken(ATTEND=GivesBackEarly),
        Hazard,
        r"issue store O, tile 0, .*uses V\[\d\] without having waited for it, or after releasing it",
    ),
    "a slot given back while O leaves through it": (
        without("drain"),
        Hazard,
        r"attend(\d): give_back V\[(\d)\], .*gives back V\[\2\] while store O of tile 0 by attend\1 is in flight",
    ),
    "a slot given back twice": (
        twice("give_back", NumpyLendingRing),
        CountError,
        r"attend\d: give_back V\[(\d)\], .*gives back V\[\1\], which it has not borrowed",
    ),
    "a slot of another given back": (
        broken(ATTEND=GivesBackAnothers),
        CountError,
        r"attend\d: give_back V\[(\d)\], .*gives back V\[\1\], which it has not borrowed",
    ),
    "a slot given back in another's name": (
        broken(ATTEND=SaysThatAnothersHasLeft),
        Hazard,
        r"attend(\d): give_back V\[\d\], .*says that the O of attend(?!\1)\d has left",
    ),
    "a slot given back in the name of nobody": (
        broken(ATTEND=SaysThatNobodysHasLeft),
        Hazard,
        r"attend\d: use V, O of consumer [23], .*V has consumers 0 to 1",
    ),
    "a slot reclaimed from nobody": (
        broken_rings(reclaim=reclaim_from_nobody),
        Hazard,
        r"load: use V, O of consumer -1, .*V has consumers 0 to 1",
    ),
    "a slot released that was borrowed": (
        broken(ATTEND=ReleasesWhatItBorrowed),
        CountError,
        r"attend\d: release V\[(\d)\], .*releases V\[\1\] without holding it",
    ),
    "a slot never given back": (
        broken_rings(give_back=nothing),
        Deadlock,
        r"load: reclaim O of attend0 left, tile 1 \(O of attend0 left, phase 0: 4 arrivals",
    ),
    "V loaded over O": (
        broken_rings(reclaim=nothing),
        Hazard,
        r"load: issue load V\[\d\], tile \d, .*refills V\[\d\], not released by attend\d",
    ),
    "V loaded over the O of the second warpgroup": (
        broken_rings(reclaim=reclaim_from_the_first),
        Hazard,
        r"load: issue load V\[\d\], tile 1, .*refills V\[\d\], not released by attend1",
    ),
    "a reclaim by the other parity": (
        broken_rings(reclaim=reclaim_by_the_other_parity),
        Deadlock,
        r"load: reclaim O of attend0 left, tile 1 \(O of attend0 left, phase 0: 4 arrivals",
    ),
}


BROKEN_WINDOWS = {
    "the left edge not masked": (broken(ATTEND=MasksNoLeftEdge), WrongNumbers, "^o of "),
    "a key too many at the left edge": (broken(ATTEND=SeesOneKeyMore), WrongNumbers, "^o of "),
    "tiles in the sections of others": (within(InOrder), WrongNumbers, "^o of "),
    "tiles at the left edge left out": (
        visiting(lambda right: right._replace(total=right.total - right.left, left=0, first=right.first + right.left)),
        TileError,
        r"normalise, .*QK visited the tiles \[4, 5, 6, 7\], not each of 1 to 7 once",
    ),
    "tiles at the left edge left out by the consumers": (
        broken(ATTEND=StopsBeforeTheLeftEdge),
        TileError,
        r"attend\d: mask, tile 0, .*S is of tile 4 of Work\(q_tile=1",
    ),
    "tiles loaded in another order": (
        broken(LOAD=LoadsInOrder),
        TileError,
        r"attend\d: mask, tile 4, .*S is of tile 1 of Work\(q_tile=1",
    ),
    "tiles counted from the first key": (
        within(FromTheFirstKey),
        TileError,
        r"normalise, .*QK visited the tiles \[3, 4, 5, 6, 0, 1, 2\], not each of 1 to 7 once",
    ),
    "tiles counted from another one": (
        visiting(lambda right: right._replace(first=right.first + 1)),
        TileError,
        r"load: issue load K\[\d\], tile 8, .*K has tiles 0 to 7",
    ),
}

BROKEN_NARROW_WINDOWS = {  # both edges cross a tile
    "the right edge not masked": (broken(ATTEND=MasksTheLeftEdgeAlone), WrongNumbers, "^o of "),
    "the left edge not masked in the first tile": (within(StartsAtTheRight), WrongNumbers, "^o of "),
    "the left edge not masked in tiles of the right one": (
        visiting(lambda right: right._replace(right=right.right + right.left, left=0)),
        WrongNumbers,
        "^o of ",
    ),
}

BROKEN_RAGGED = {  # with NaN around each sequence's part that is used
    "everybody's lengths are the tensors'": (broken(bounds=bounds_of_the_tensors), (TileError, WrongNumbers), ""),
    "rows that are no queries attended for": (broken(bounds=bounds_of_all_rows), WrongNumbers, "^(o|lse) of "),
    "values of a neighbour loaded": (broken(__init__=loads_past_the_end), WrongNumbers, "^o of "),
    "a key of the neighbour attended to": (
        changed(lambda work: work._replace(seqlen_k=work.seqlen_k + 1)),
        WrongNumbers,
        "^(o|lse) of ",
    ),
    "the last key left out": (
        changed(lambda work: work._replace(seqlen_k=max(0, work.seqlen_k - 1))),
        WrongNumbers,
        "^(o|lse) of ",
    ),
    "the keys of another": (
        changed(lambda work: work._replace(start_k={3: 33}.get(work.start_k, work.start_k))),
        WrongNumbers,
        "^(o|lse) of ",
    ),
    "the queries of another": (
        changed(lambda work: work._replace(start_q={3: 23, 23: 3}.get(work.start_q, work.start_q))),
        WrongNumbers,
        "^(o|lse) of ",
    ),
    "the slopes of another": (
        changed(lambda work: work._replace(batch=2 - work.batch)),
        WrongNumbers,
        "^(o|lse) of ",
    ),
    "a row of the neighbour written": (
        changed(lambda work: work._replace(rows=work.rows + (work.batch == 0 and work.seqlen_q > 0))),
        CountError,
        r"o, batch 0, head 0, row 23 was written 2 times",
    ),
    "rows of nobody forgotten": (
        dealt(lambda works: (work for work in works if work.seqlen_q or not work.valid)),
        CountError,
        r"o, batch 0, head 0, row 0 was written 0 times",
    ),
}
RAGGED = packed(
    [(20, 30), (20, 31), (33, 47)], 3, 5, used=((20, 17, 30), (30, 28, 40)), causal=True, heads=2, alibi=True
)  # fmt: skip

MISTAKES = {
    name: (*mistake, problem)
    for mistakes, problem in (
        (BROKEN, Problem(30, 83, heads=3)),
        (BROKEN_LOANS, Problem(30, 83, heads=3, config=small(q_stages=1))),
        (BROKEN_WINDOWS, Problem(60, 120, window=(70, 10), heads=2)),
        (BROKEN_NARROW_WINDOWS, Problem(60, 120, window=(3, 2), heads=2)),
        (BROKEN_RAGGED, RAGGED),
    )
    for name, mistake in mistakes.items()
}


@pytest.mark.parametrize("policy", ADVERSARIES)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_whatever_the_schedule(mistake, policy):
    cta, kind, message, problem = MISTAKES[mistake]
    errors = []
    for seed in range(10):
        try:
            run(problem, seed, policy, cta=cta, multiprocessors=1)
        except kind as error:
            errors.append(str(error))
    assert any(re.search(message, error) for error in errors), errors


def test_the_cta_does_not_exit_while_a_store_reads_shared_memory():
    with pytest.raises(Hazard, match="the CTA exits before store O of tile 0 by attend. has been waited for"):
        run(Problem(30, 83), cta=without("drain"))


def test_a_slot_is_released_even_if_nobody_waits_for_that():
    with pytest.raises(CountError, match=r"exit: K\[0\], tile 0, was not released by attend0, attend1"):
        run(Problem(20, 10), cta=broken_rings(release=nothing))


def test_a_release_is_counted_even_if_nobody_waits_for_it():
    with pytest.raises(CountError, match=r"exit: K\[0\] empty, phase 0: 1 arrivals and 0 bytes to come"):
        run(Problem(20, 10), cta=miscounted(empty_arrivals=1))


def test_a_loan_is_counted_even_if_nobody_waits_for_its_end():
    with pytest.raises(CountError, match=r"exit: O of attend0 left, phase 1: 2 arrivals and 0 bytes to come"):
        run(Problem(20, 10, heads=2, config=small(q_stages=1)), cta=miscounted_loans(-1), multiprocessors=1)


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_v_needs_a_slot_for_each_warpgroup_that_borrows_one(policy):
    with pytest.raises((Hazard, Deadlock)):
        run(Problem(40, 83, heads=3, config=small(consumers=3, stages=2, q_stages=1)), policy=policy, multiprocessors=1)


def test_with_one_slot_the_next_q_is_loaded_before_o_leaves():
    problem = Problem(16, 80, heads=2, config=small(consumers=1, stages=1, q_stages=1))
    what = [event.what for event in run(problem, policy="steady", multiprocessors=1).trace]
    _, second, _ = (i for i, name in enumerate(what) if name == "issue load Q0[0]")
    assert what.index("release Q0[0]") < second < what.index("normalise") < what.index("issue store O")


def test_a_work_tile_posted_long_ago_is_not_taken_for_a_new_one():
    """Three work tiles in two Q slots, and nothing is posted beside the third."""

    class Forgets(NumpyWorkRing):
        def post(self, slot: Slot, work: Work) -> None:
            if work.head < 2:
                super().post(slot, work)

    with pytest.raises(Hazard, match=r"attend(\d): work Q\1\[0\], tile 0, .*nothing was posted in Q\1\[0\]"):
        run(Problem(20, 10, heads=3), cta=broken(WORK_RING=Forgets), multiprocessors=1)


def test_what_is_no_work_tile_is_not_written():
    tensors = simulate.Tensors(*Problem(20, 10).inputs(), scale=None)
    with pytest.raises(TileError, match="lse of Work.*valid=0. is written, which is no work tile"):
        tensors.write("lse", Work(q_tile=0, head=0, batch=1, valid=0), np.arange(3), np.zeros(3))


@pytest.mark.parametrize("policy", ADVERSARIES)
def test_a_slot_holds_nan_while_a_copy_is_on_its_way(policy):
    seen = []

    def load(self: NumpyRing, slot: Slot, work: Work, tile: int) -> None:
        NumpyRing.load(self, slot, work, tile)
        seen.append(np.isnan(self.at(slot).buffer.data).all())

    def wait(self: NumpyRing, slot: Slot) -> None:
        NumpyRing.wait(self, slot)
        assert np.isfinite(self.at(slot).buffer.data).all()

    run(Problem(30, 83), policy=policy, cta=broken_rings(load=load, wait=wait))
    assert seen == [True] * (6 + 6 + 2 + 3), "K, V, both Qs, and the K and Qs of no work tile"


def test_the_oracle_by_hand():
    """One query, two keys whose scores differ by log 3: weights 1/4 and 3/4."""
    q, k, v = np.array([[[[1.0]]]]), np.array([[[[0.0]], [[math.log(3)]]]]), np.array([[[[4.0]], [[8.0]]]])
    o, lse = attention(q, k, v, causal=False, scale=1.0)
    assert o.item() == pytest.approx(7.0) and lse.item() == pytest.approx(math.log(4))
    o, lse = attention(np.ones((1, 3, 1, 1)), k, v, causal=True, scale=1.0)
    assert o.ravel() == pytest.approx([0.0, 4.0, 7.0]) and lse.ravel() == pytest.approx([-math.inf, 0.0, math.log(4)])
    o, lse = attention(np.ones((1, 3, 1, 1)), k, v, causal=False, scale=1.0, window=(0, 0))
    assert o.ravel() == pytest.approx([0.0, 4.0, 8.0]) and lse.ravel() == pytest.approx([-math.inf, 0.0, math.log(3)])
    o, lse = attention(np.ones((1, 2, 1, 1)), k, v, causal=False, scale=1.0, window=(-1, None))
    assert o.ravel() == pytest.approx([8.0, 0.0]) and lse.ravel() == pytest.approx([math.log(3), -math.inf])
