"""The simulator: right numbers under every schedule, and the right objection to every kind of mistake."""

from __future__ import annotations

import itertools
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules import simulate
from schedules.forward import Slot
from schedules.machine import POLICIES, CountError, Deadlock, Hazard, OrderError, RangeError, TileError
from schedules.rings import NumpyLendingRing, NumpyRing, NumpyTurn, NumpyWorkRing
from schedules.simulate import NumpyAttend, NumpyLoad
from schedules.tiling import BlockConfig, rivals
from schedules.work import Work, work_of
from tests.cpu.simulation import (
    ADVERSARIES,
    Problem,
    attention,
    broken,
    broken_rings,
    miscounted,
    miscounted_loans,
    run,
    small,
)

# -- numbers -----------------------------------------------------------------------------------------------------------


# With one Q slot V has a slot for each warpgroup; else any number will do.
DEPTHS = [(c, stages, 2) for c in (1, 2, 3) for stages in (1, 2, 3, 4)] + [(c, c, 1) for c in (1, 2, 3)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("consumers", "stages", "q_stages"), DEPTHS)
@pytest.mark.parametrize("causal", (False, True))
def test_numbers_under_every_schedule(policy, consumers, stages, q_stages, causal):
    for ones in (0, 8):
        config = small(consumers, stages, q_stages, ones=ones)
        for seed, (seqlen_q, seqlen_k) in enumerate([(1, 1), (16 * consumers, 96), (33, 47), (70, 130)]):
            run(Problem(seqlen_q, seqlen_k, causal, heads=2, config=config), seed, policy)


def of_any_depth(consumers: int, stages: int, q_stages: int, **rest) -> BlockConfig:
    """`stages` counts with several Q slots only."""
    return small(consumers, consumers if q_stages == 1 else stages, q_stages, **rest)


@settings(max_examples=200)
@given(
    lengths=st.tuples(st.integers(1, 100), st.integers(1, 100)),
    causal=st.booleans(),
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.integers(1, 16),
    config=st.builds(
        of_any_depth, consumers=st.integers(1, 3), stages=st.integers(1, 4), q_stages=st.integers(1, 3),
        tile_n=st.sampled_from([16, 32, 48]), ones=st.sampled_from([0, 8]),
    ),
    multiprocessors=st.integers(1, 5),
    policy=st.sampled_from(ADVERSARIES),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_numbers_of_any_shape(lengths, causal, batch, kv_heads, group, head_dim, config, multiprocessors, policy, seed):
    problem = Problem(*lengths, causal, batch, kv_heads * group, kv_heads, head_dim, config=config)
    run(problem, seed, policy, multiprocessors=multiprocessors)


@pytest.mark.parametrize("head_dim", (64, 80, 128, 192, 256))
@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("lse", (False, True))
def test_numbers_with_the_block_configs_of_the_kernels(head_dim, causal, lse):
    config = rivals(head_dim, "sm_90a", lse)[0].config
    run(Problem(200, 300, causal, heads=2, head_dim=head_dim, spread=2.0, config=config))


def test_rows_that_see_nothing_are_zero_with_an_lse_of_minus_infinity():
    result = run(Problem(100, 30, causal=True, heads=2))
    assert (result.o[:, :70] == 0).all() and (result.lse[:, :, :70] == -math.inf).all()
    assert np.isfinite(result.lse[:, :, 70:]).all() and (result.o[:, 70:] != 0).all()


def test_scale_and_the_order_of_work_change_nothing_else():
    problem = Problem(50, 50, causal=True, heads=4, batch=2, scale=0.3)
    orders = [(1, 1), (3, 1), (1, 5), (3, 100)]
    results = [run(problem, policy="steady", head_group=g, multiprocessors=m) for g, m in orders]
    for result in results[1:]:
        np.testing.assert_array_equal(result.o, results[0].o)
        assert result.trace != results[0].trace


@given(st.tuples(*[st.integers(1, 5)] * 4), st.integers(1, 20), st.integers(0, 1000))
def test_every_work_tile_is_dealt_to_one_cta_in_order_and_then_none(grid, multiprocessors, seed):
    total = grid[0] * grid[1] * grid[2]
    order = [work_of(index, *grid) for index in range(total)]
    shares = []
    for i, works in enumerate(simulate.share_out(grid, multiprocessors, seed)):
        share = list(itertools.takewhile(lambda work: work.valid, works))
        assert share[0] == order[i] and [*share] == sorted(share, key=order.index)
        assert not any(next(works).valid for _ in range(3))
        shares.append(share)
    assert len(shares) == min(total, multiprocessors)
    assert sorted(itertools.chain(*shares)) == sorted(order)


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
            NumpyAttend.mask(self, self.s.work, self.s.tile)

        def mask(self, work: Work, tile: int) -> None:
            if tile > 0:
                super().mask(work, tile)

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
    def mask(self, work: Work, tile: int) -> None:
        super().mask(work, max(0, tile - 1))


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
    def leave_q(self, tile: int, last: int, q_slot: Slot) -> None:
        super().leave_q(tile, last - 1, q_slot)


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


def visiting(change: int) -> type[simulate.Cta]:
    """All roles agree on `change` more tiles than there are."""

    def visits(self, work: Work):
        right = self.cta.visits(work)
        return right._replace(total=right.total + change)

    return broken(
        LOAD=type("Load", (NumpyLoad,), {"visits": visits}), ATTEND=type("Attend", (NumpyAttend,), {"visits": visits})
    )


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
    "a tile too few": (visiting(-1), TileError, r"normalise, .*QK visited the tiles \[0, 1, 2, 3, 4\], not each of 0"),
    "a tile too many": (visiting(1), TileError, r"load: issue load K\[0\], tile 6, .*K has tiles 0 to 5"),
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
        r"(load: issue load|attend\d: borrow) V\[(\d)\], .*refills V\[\2\], not released by attend\d",
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


@pytest.mark.parametrize("policy", ADVERSARIES)
@pytest.mark.parametrize("mistake", [*BROKEN, *BROKEN_LOANS])
def test_a_mistake_is_named_whatever_the_schedule(mistake, policy):
    cta, kind, message = (BROKEN | BROKEN_LOANS)[mistake]
    problem = Problem(30, 83, heads=3, config=small(q_stages=1 if mistake in BROKEN_LOANS else 2))
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
