"""Can the simulator fail? Each statement of the role programs is broken in turn, and it must object.

A mutant lacks a statement, or swaps it with the next one, or changes one expression in it: a constant, a ring, a slot,
a tile, a parity, a section, a condition. It must raise a `ScheduleError` or compute wrong numbers under some schedule,
or else stand in `HARMLESS` with the reason why nothing can go wrong; and what stands there must come through every
schedule.

    python -m tests.cpu.test_mutations        prints what becomes of each
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from schedules import forward, simulate
from schedules.machine import CountError, Deadlock, Hazard, OrderError
from tests.cpu.mutations import (
    Alike,
    Mutant,
    first_objection,
    is_not_stale,
    judge,
    mutants_of,
    reach_every_call,
    seeds_for,
    tell,
)
from tests.cpu.simulation import (
    Problem,
    broken,
    broken_rings,
    miscounted,
    miscounted_loans,
    packed,
    run,
    small,
)

PROBLEMS = (  # a single CTA computes all work tiles
    Problem(30, 83, heads=3),  # five body tiles and a tail; two stages, two consumers
    Problem(70, 90, causal=True, config=small(q_stages=1)),
    Problem(10, 40, heads=2, config=small(consumers=1, stages=1, q_stages=1)),
    Problem(40, 100, causal=True, heads=4, config=small(consumers=3, stages=3)),
    Problem(20, 10, heads=3),  # a single tile each
    Problem(20, 25, heads=2),  # two
    Problem(16, 16, causal=True, heads=2),  # a single one, of which every query sees another part
    Problem(30, 83, heads=3, config=small(ones=8)),
    Problem(40, 100, causal=True, heads=2, spread=20.0, config=small(q_stages=1, ones=8)),
    Problem(100, 40, causal=True, heads=2, config=small(consumers=3, stages=3, q_stages=1)),
    Problem(20, 10, heads=3, config=small(q_stages=1)),
    Problem(60, 120, window=(70, 10)),  # two or three tiles in every section
    Problem(50, 60, window=(3, 2), config=small(q_stages=1), softcap=5.0),  # narrower than a tile: no body
    Problem(40, 130, True, (60, None), config=small(q_stages=1, ones=8), softcap=5.0, sinks=True, alibi=True),
    Problem(60, 120, window=(70, 30), alibi=True),  # from the nearest tile on
    Problem(40, 100, heads=2, alibi=True, config=small(q_stages=1, ones=8)),
    packed([(20, 30), (0, 5), (33, 50)], 3, 5, causal=True, heads=2, alibi=True),
)
SEEDS = range(4)
SUBJECTS = (forward.Load, forward.JointLoad, forward.Attend, forward.Ring)
ALIKE = (  # one stands for the other, where both are bound
    ("q_slot", "slot", "ahead", "before", "stored"),
    ("tile", "position", "last", "index"),
    ("work", "upcoming"),
    ("visits.right", "visits.left"),
    ("Section.BODY", "Section.RIGHT", "Section.LEFT"),
)
RINGS = {forward.Load: ("self.q[0]", "q", "self.k", "self.v"), forward.Attend: ("self.q", "self.k", "self.v")}
INSTEAD = {
    "self.index": "0",
    "parity": "parity ^ 1",
    "self.q": "self.q[1:]",  # where that is the list of rings
    "self.domain.first_section": "Section.RIGHT",
}


def sections(nearest: str = "Section.RIGHT, Section.BODY", from_left: str = "Section.BODY, Section.RIGHT") -> str:
    """The statement that says which sections there are, in the order of their tiles."""
    return f"sections = ({nearest}) if const_expr(nearest_first) else ({from_left})"


HARMLESS = {
    "before the first work tile every slot is Slot(0, 0), and K and V have as many stages": (
        "Load.run: q_slot = q[0].first() as q_slot = k.first()",
        "Load.run: q_slot = q[0].first() as q_slot = v.first()",
        "Load.run: slot = k.first() as slot = q[0].first()",
        "Load.run: slot = k.first() as slot = v.first()",
        "Load.run: open(work, q_slot, slot) as open(work, slot, slot)",
        "Load.run: open(work, q_slot, slot) as open(work, q_slot, q_slot)",
        "Load.pair: ahead = k.next(slot) as ahead = v.next(slot)",
        "Load.run: slot = k.next(slot) as slot = v.next(slot)",
        "Attend.run: q_slot = q.first() as q_slot = k.first()",
        "Attend.run: q_slot = q.first() as q_slot = v.first()",
        "Attend.run: slot = k.first() as slot = q.first()",
        "Attend.run: slot = k.first() as slot = v.first()",
        "Attend.run: stored = q.first() as stored = k.first()",
        "Attend.run: stored = q.first() as stored = v.first()",
        "Attend.run: q.wait(q_slot) as q.wait(slot)",
        "Attend.run: q.wait(q_slot) as q.wait(stored)",
        "Attend.run: work = q.work(q_slot) as work = q.work(slot)",
        "Attend.run: work = q.work(q_slot) as work = q.work(stored)",
        "Attend.run: open(q_slot, slot) as open(slot, slot)",
        "Attend.run: open(q_slot, slot) as open(stored, slot)",
        "Attend.run: open(q_slot, slot) as open(q_slot, q_slot)",
        "Attend.run: open(q_slot, slot) as open(q_slot, stored)",
        "Attend.run: slot = k.next(slot) as slot = v.next(slot)",
        "Attend.close_and_open: open(q.next(q_slot), k.next(slot)) as open(q.next(q_slot), v.next(slot))",
        "Attend.step: slot = k.next(before) as slot = v.next(before)",
        "Attend.write_back: stored = v.ahead(slot, index + 1) as stored = k.ahead(slot, index + 1)",
    ),
    "position is last there": (
        "Load.run: slot = pair(work, visits, position, slot, parity)"
        " as slot = pair(work, visits, last, slot, parity)  [2]",
    ),
    "where nothing is lent parity stays 0, and a wait for the phase before the first one passes": (
        "Load.run: if const_expr(lends) as if True",
        "Load.load_v: if const_expr(lends) as if True",
    ),
    "where nothing is lent nobody looks at parity": ("Load.run: if const_expr(lends) as if True  [2]",),
    "an O that has left is waited for twice": (
        "Load.run: for index in range(last + 1, len(q), unroll=1) as for index in range(last + 0, len(q), unroll=1)",
    ),
    "O is written over V only once the next Q is there, and that is loaded after both": (
        "Load.run: load_v(work, visits, last, slot, parity) before if const_expr(lends)",
    ),
    "when it is asked for, and when the answer is waited for, is a matter of speed": (
        "Load.run: asked = ask() before for position in range(1, last, unroll=1)",
        "Load.run: for position in range(max(1, last), last + 1, unroll=1) before asked = ask()",
        "Load.run: upcoming = next_work(asked) before if const_expr(lends)",
    ),
    "any other number says as much": ("Attend.run: storing = 1 as storing = 2",),
    "bytes may be announced before their copy is issued": (
        "Load.load_v: commit_v(slot) before v.load(slot, work, tile(visits, position))",
        "Load.pair: commit_k(ahead) before k.load(ahead, work, tile(visits, position))",
        "Load.open: commit_k(slot) before k.load(slot, work, tile(visits(work), 0))",
        "Load.load_q: q.commit(q_slot) before q.load(q_slot, work, work.q_tile)",
    ),
    "K is announced later, but the slots that are waited for in between come free without it": (
        "Load.pair: load_v(work, visits, position - 1, slot, parity) before commit_k(ahead)",
        "Load.open: load_q(work, q_slot) before commit_k(slot)",
    ),
    "neither asks for the other": (
        "Load.load_q: q.load(q_slot, work, work.q_tile) before q.post(q_slot, work)",
        "Load.load_v: v.acquire(slot) before if const_expr(lends)",
        "Attend.run: turn.take() before work = q.work(q_slot)",
        "Attend.run: leave_q(0, last, q_slot) before k.release(slot)",
        "Attend.run: take_up(work) before tile = domain.tile(visits, 0)",
        "Attend.run: retire(0) before take_up(work)",
        "Attend.run: drain() before retire(0)",
        "Attend.close_and_open: open(q.next(q_slot), k.next(slot)) before upcoming = q.work(q.next(q_slot))",
        "Attend.step: leave_q(position, visits.total - 1, q_slot) before k.release(slot)",
    ),
    "a wait comes sooner than it must, and what it waits for needs nothing that comes between": (
        "Load.run: if const_expr(lends) before for position in range(max(1, last), last + 1, unroll=1)",
        "Attend.close_and_open: q.wait(q.next(q_slot)) before commit()",
        "Attend.close_and_open: retire(1) before turn.give()",
        "Attend.close_and_open: retire(1) as retire(0)",
        "Attend.step: v.wait(before) before commit()",
        "Attend.step: retire(1) before turn.give()",
        "Attend.step: retire(1) as retire(0)",
        "Attend.step: retire(0) before exponents(tile)",
    ),
    "the turn is held while a tile lands, and nobody needs a turn to release the slot it lands in": (
        "Attend.close_and_open: turn.take() before v.wait(slot)",
        "Attend.step: turn.take() before k.wait(slot)",
    ),
    "the turn passes the right to issue MMAs, and those of this warpgroup are issued": (
        "Attend.step: turn.give() before commit()",
    ),
    "no register is touched in between": (
        "Attend.open: fence() before k.wait(slot)",
        "Attend.close_and_open: fence() before turn.take()",
        "Attend.step: fence() before turn.take()",
        "Attend.step: fence() before v.wait(before)",
        "Attend.step: without fence()  [2]",
        "Attend.step: issue_pv(before) before fence()",
    ),
    "a slot is held longer than it must be": (
        "Attend.run: if const_expr(not score.plain) before leave_q(0, last, q_slot)",
        "Attend.step: if const_expr(not score.plain) before leave_q(position, visits.total - 1, q_slot)",
        "Attend.step: pack_p() before v.release(before)",
    ),
    "what is done to plain scores changes none": (
        "Attend.run: if const_expr(not score.plain) as if True",
        "Attend.step: if const_expr(not score.plain) as if True",
    ),
    "the mask of a body tile masks nothing": (
        f"Attend.run: {sections()} as {sections(from_left='Section.RIGHT, Section.RIGHT')}",
        f"Attend.run: {sections()} as {sections(from_left='Section.LEFT, Section.RIGHT')}",
        f"Attend.run: {sections()} as {sections(nearest='Section.RIGHT, Section.RIGHT')}",
        f"Attend.run: {sections()} as {sections(nearest='Section.RIGHT, Section.LEFT')}",
        "Attend.step: if const_expr(section is not Section.BODY) as if True",
    ),
    "no key of a tile on the right lies before a row's first": (
        f"Attend.run: {sections()} as {sections(from_left='Section.BODY, Section.LEFT')}",
        f"Attend.run: {sections()} as {sections(nearest='Section.LEFT, Section.BODY')}",
    ),
    "scores are changed alike in all sections but the body": (
        "Attend.run: change_scores(work, tile, domain.first_section) as change_scores(work, tile, Section.RIGHT)",
    ),
    "where the domain has no left edge no tile lies there": (
        "Attend.run: if const_expr(Section.LEFT in domain.sections) as if True",
        "Attend.run: if const_expr(Section.LEFT in domain.sections) as if const_expr(Section.BODY in domain.sections)",
        "Attend.run: if const_expr(Section.LEFT in domain.sections) as if const_expr(Section.RIGHT in domain.sections)",
    ),
    "an optimistic role may look for row maxima": ("Attend.step: if const_expr(not optimistic) as if True",),
    "who foresees nothing mends more": (
        "Attend.run: if const_expr(optimistic) as if False",
        "Attend.run: without foresee(visits.total)",
    ),
    "the stores of the last work tile are waited for sooner": (
        "Attend.run: if storing != 0 before if const_expr(optimistic)",
    ),
    "to rescale is always allowed": ("Attend.make_room: if grew as if True", "Attend.make_up: if outgrown as if True"),
}
REASONS = {name: reason for reason, names in HARMLESS.items() for name in names}


# -- mutants -----------------------------------------------------------------------------------------------------------


def cta_of(mutant: Mutant) -> type[simulate.Cta]:
    methods = mutant.methods()
    if mutant.subject is forward.Load:
        return broken(LOAD=type("Mutated", (simulate.NumpyLoad,), methods))
    if mutant.subject is forward.JointLoad:
        mutated = type("Mutated", (simulate.NumpyJointLoad,), methods)
        return type("BrokenCta", (simulate.JointCta,), {"JOINT_LOAD": mutated})
    if mutant.subject is forward.Attend:
        return broken(ATTEND=type("Mutated", (simulate.NumpyAttend,), methods))
    return broken_rings(**methods)


@cache
def mutants() -> dict[str, Mutant]:
    return mutants_of({subject: Alike((*ALIKE, RINGS.get(subject, ())), INSTEAD) for subject in SUBJECTS})


# -- counts ------------------------------------------------------------------------------------------------------------


def counts() -> dict[str, type[simulate.Cta]]:
    """CTAs in which one number of a barrier, or the token that opens the turns, is wrong."""

    def seed_twice(self: simulate.Cta) -> None:
        self.attend[-1].turn.seed()
        self.attend[-1].turn.seed()

    return {
        "a slot is free one arrival too early": miscounted(empty_arrivals=-1),
        "a slot is free when all consumers but one have released it": miscounted(
            empty_arrivals=lambda right: right.empty_arrivals - right.release_arrivals
        ),
        "a slot waits for one arrival too many": miscounted(empty_arrivals=1),
        "one warp of a warpgroup releases": miscounted(release_arrivals=lambda right: right.release_arrivals // 4),
        "O has left one arrival too early": miscounted_loans(-1),
        "O has left one arrival too late": miscounted_loans(1),
        "too few bytes are announced": miscounted(slot_bytes=-2),
        "too many bytes are announced": miscounted(slot_bytes=2),
        "a full barrier waits for two arrivals": miscounted(full_arrivals=1),
        "a turn opens with its own warpgroup alone": broken(TURN_THREADS=128),
        "a turn waits for three warpgroups": broken(TURN_THREADS=384),
        "nobody opens the first turn": broken(open_turns=lambda self: None),
        "the first turn is opened twice": broken(open_turns=seed_twice),
    }


# -- what becomes of them ----------------------------------------------------------------------------------------------


def objection(cta: type[simulate.Cta], seeds: Sequence[int] = SEEDS) -> Exception | None:
    return first_objection(lambda problem, *how: run(problem, *how, cta=cta, multiprocessors=1), PROBLEMS, seeds)


@pytest.mark.parametrize("cta", [simulate.Cta, simulate.JointCta])
def test_the_programs_themselves_raise_no_objection(cta):
    assert objection(cta) is None


@pytest.mark.parametrize("name", mutants())
def test_a_mutant_is_found_or_harmless(name):
    error = objection(cta_of(mutants()[name]), seeds_for(name, SEEDS, REASONS))
    judge(name, error, REASONS)


@pytest.mark.parametrize("name", counts())
def test_a_wrong_count_is_found(name):
    error = objection(counts()[name])
    assert isinstance(error, (CountError, Deadlock, Hazard, OrderError)), error


def test_no_harmless_mutant_is_stale():
    is_not_stale(HARMLESS, mutants())


def test_mutants_reach_every_method_and_every_call():
    reach_every_call(SUBJECTS, mutants())


if __name__ == "__main__":
    tell({name: cta_of(mutant) for name, mutant in mutants().items()} | counts(), objection, REASONS)
