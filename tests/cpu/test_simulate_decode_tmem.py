"""The schedules of decoding in tensor memory give the right numbers, and the simulator objects to wrong orders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from schedules import simulate_decode_tmem
from schedules.machine import Deadlock, Hazard, TileError
from schedules.simulate_decode_tmem import SMALL, NumpyMultiply, NumpyTmemDecode, TmemDecodeCta
from tests.cpu.paged import NO_PAGE, drawn, run, whole
from tests.cpu.simulation import ADVERSARIES

LONG = whole([100, 40], heads=4, spread=20.0)


def simulate(problem: Any, seed: int = 0, policy: str = "random", cta: type[TmemDecodeCta] = TmemDecodeCta) -> Any:
    config = replace(SMALL, stages=problem.stages, q_stages=problem.q_stages)
    return run(problem, seed, policy, cta=cta, config=config)


def with_roles(**roles: Any) -> type[TmemDecodeCta]:
    return type("BrokenCta", (TmemDecodeCta,), roles)


@pytest.mark.parametrize("policy", ADVERSARIES)
@pytest.mark.parametrize("seed", range(60))
def test_drawn_problems(seed, policy):
    simulate(drawn(seed), seed, policy)


def test_rows_have_the_same_bits_whatever_else_is_in_the_batch():
    """With a fixed number of splits; nobody rescales at will."""
    alone = simulate(whole([60], splits=3), policy="steady")
    among = simulate(whole([60, 90, 1], splits=3, multiprocessors=5), policy="steady")
    assert (alone.o[0] == among.o[0]).all() and (alone.lse[0] == among.lse[0]).all()


# -- what is objected to -----------------------------------------------------------------------------------------------


def test_the_scores_of_two_tiles_are_not_more():
    """One stage of S: a QK writes over the P that the PV before has not read."""

    class One(simulate_decode_tmem.ClockedScores):
        stages = 1

    with pytest.raises((Hazard, Deadlock, TileError)):
        simulate(LONG, cta=with_roles(SCORES=One))


def test_k_is_not_released_before_its_mma_is_done():
    class Hasty(NumpyMultiply):
        def score(self, q_slot, slot, s):
            self.k.empty[slot.stage].tell(self.causality.told())
            self.issue_qk(q_slot, slot, s)
            self.scores.commit(s)

    with pytest.raises(Hazard, match="fetch.*writes K.*nothing says that QK of the tensor core is over"):
        simulate(LONG, policy="lazy", cta=with_roles(MULTIPLY_ROLE=Hasty))


def test_o_does_not_shrink_while_a_pv_adds_to_it():
    class Hasty(NumpyTmemDecode):
        def correct(self, before):
            if self.shrinks() and before > 0:
                self.rescale()

    with pytest.raises(Hazard, match="rescale reads tensor memory.*PV of the tensor core is over"):
        simulate(LONG, cta=with_roles(DECODE=Hasty))


def test_the_last_reads_of_tensor_memory_come_before_it_is_given_back():
    class Leaves(NumpyTmemDecode):
        def leave(self, split, place):
            super().leave(split, place)
            self.left.append(1)

        def hand_over(self):
            if not self.left:
                super().hand_over()

        def __init__(self, cta):
            super().__init__(cta)
            self.left = []

    with pytest.raises(Hazard, match="exit: nothing says that the last operation of decode tensor is over"):
        simulate(whole([20], multiprocessors=1), cta=with_roles(DECODE=Leaves))


def test_a_page_that_is_not_there_is_not_looked_up():
    problem = whole([40], page=4)
    problem.arguments["page_table"][0, 5] = NO_PAGE
    with pytest.raises(TileError, match=f"key 20 of sequence 0 is in page {NO_PAGE}"):
        simulate(problem)
