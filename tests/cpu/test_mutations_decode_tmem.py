"""Can the simulator of decoding in tensor memory fail? As `tests.cpu.test_mutations_tmem`, with the roles of
`schedules.decode_tmem`. `Fetch` and what a split leaves are those of `tests.cpu.test_mutations_decode`, but ordered by
other barriers here, so they are broken once more.

    python -m tests.cpu.test_mutations_decode_tmem        prints what becomes of each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from schedules import decode, decode_tmem
from schedules.simulate_decode import NumpyFetch
from schedules.simulate_decode_tmem import (
    SMALL,
    ClockedPagedRing,
    ClockedScores,
    ClockedSignal,
    NumpyMultiply,
    NumpyTmemDecode,
    TmemDecodeCta,
)
from tests.cpu.mutations import (
    CRASHES,
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
from tests.cpu.paged import Ask, PagedProblem, run, whole

MANY = whole([100, 0, 37, 1, 64], heads=4, kv_heads=2)
PACKED = PagedProblem(
    (Ask(7, 60), Ask(0, 9), Ask(1, 80), Ask(9, 9)), packed=True, before=3, behind=18, heads=8, kv_heads=2, causal=True
)
PROBLEMS = (
    replace(MANY, multiprocessors=2, spread=20.0),
    replace(MANY, multiprocessors=1, stages=1, q_stages=1),
    replace(MANY, multiprocessors=12, page=4),
    replace(MANY, multiprocessors=3, splits=3, q_stages=1, stages=4),
    replace(PACKED, multiprocessors=3, stages=3, softcap=3.0, window=(20, 30)),
    replace(PACKED, multiprocessors=3, splits=2, window=(30, None), sinks=True),
    whole([200], multiprocessors=5, stages=4, spread=20.0),
    whole([16] * 6, multiprocessors=2, q_stages=1),  # a tile each
    whole([30, 90], queries=6, heads=5, multiprocessors=5, window=(5, 3), softcap=2.0),  # no body
    whole([90, 50], queries=12, heads=2, multiprocessors=4, window=(-4, 20)),
    whole([90, 50, 70], queries=16, heads=2, kv_heads=2, multiprocessors=1, window=(20, 3), stages=3),
    whole([51, 20], queries=35, multiprocessors=3, causal=True, page=1),
    PagedProblem((Ask(0, 5), Ask(2, 40), Ask(1, 9)), packed=True, heads=3, kv_heads=3, multiprocessors=1),
    PagedProblem((Ask(0, 9),), packed=True),  # nothing to do
)
SEEDS = range(2)
ROLES: dict[type, tuple[str, type]] = {
    decode.Fetch: ("FETCH", NumpyFetch),
    decode.SplitRole: ("DECODE", NumpyTmemDecode),
    decode_tmem.Multiply: ("MULTIPLY_ROLE", NumpyMultiply),
    decode_tmem.Decode: ("DECODE", NumpyTmemDecode),
}
RINGS = {
    decode.Fetch: ("self.q", "self.k", "self.v"),
    decode_tmem.Multiply: ("self.q", "self.k", "self.v", "self.scores"),
    decode_tmem.Decode: ("self.q", "self.scores"),
}
ALIKE = (
    ("q_slot", "slot", "ahead", "s", "s_ahead"),
    ("position", "split.begin", "split.end"),
    ("visits.left", "visits.right"),
    ("Section.LEFT", "Section.BODY", "Section.RIGHT"),
    ("min", "max"),
    ("self.weights", "self.products"),
)
IMPOSSIBLE = ("q.gather", "k.load", "v.load", "scores.release", "split = plan")  # of those rings, or no split


def step(section: str) -> str:
    return f"s = step(Section.{section}, split, visits, position, s)"


FIRST_SLOTS = (
    ("Fetch", "q_slot", "q", ("k", "v")),
    ("Fetch", "slot", "k", ("q", "v")),
    ("Multiply", "q_slot", "q", ("k", "v", "scores")),
    ("Multiply", "slot", "k", ("q", "v", "scores")),
    ("Multiply", "s", "scores", ("q", "k", "v")),
    ("Decode", "q_slot", "q", ("scores",)),
    ("Decode", "s", "scores", ("q",)),
)
HARMLESS: dict[str, tuple[str, ...]] = {
    "before the first split every slot is Slot(0, 0)": (
        *(
            f"{role}.run: {slot} = {ring}.first() as {slot} = {other}.first()"
            for role, slot, ring, others in FIRST_SLOTS
            for other in others
        ),
        "Multiply.run: q.wait(q_slot) as q.wait(slot)",
        "Multiply.run: q.wait(q_slot) as q.wait(s)",
        "Multiply.run: split = q.work(q_slot) as split = q.work(slot)",
        "Multiply.run: split = q.work(q_slot) as split = q.work(s)",
        "Decode.run: split = read_split(q_slot) as split = read_split(s)",
    ),
    "K and V have as many stages": (
        "Fetch.run: slot = k.next(slot) as slot = v.next(slot)",
        "Multiply.run: ahead = k.next(slot) as ahead = v.next(slot)",
        "Multiply.run: slot = k.next(slot) as slot = v.next(slot)",
    ),
    "when pages are looked up, or a QK is issued, is a matter of speed": (
        "Fetch.run: if position == split.begin before pages = turn(split, position + 1, pages)",
        "Multiply.run: weigh(slot, s, position - 1 - split.begin) before score(q_slot, ahead, s_ahead)",
    ),
    "neither asks for the other": (
        "Fetch.run: q.commit(q_slot) before q.post(q_slot, split)",  # two arrivals
        "Fetch.load_q: q.load(q_slot, split, split.q_tile) before q.post(q_slot, split)",
        "Multiply.score: k.release(slot) before scores.commit(s)",
        "Multiply.weigh: weights.wait(s.stage) before v.wait(slot)",
        "Decode.run: split = read_split(q_slot) before plan = splitter.plan()",
        "Decode.run: place = splitter.place(plan, split) before visits = visits(split)",
        "Decode.run: take_up(split) before place = splitter.place(plan, split)",
        "Decode.run: start() before take_up(split)",
        "Decode.step: scores.wait(s) before tile = domain.tile(visits, position)",
        "Decode.step: products.wait(s.stage ^ 1) before exponents(s)",
    ),
    "the mask of a body tile masks nothing": (
        f"Decode.run: {step('BODY')} as {step('LEFT')}",
        f"Decode.run: {step('BODY')} as {step('RIGHT')}",
        "Decode.step: if const_expr(section is not Section.BODY) as if True",
    ),
    "no key of a tile on the right lies before a row's first": (f"Decode.run: {step('RIGHT')} as {step('LEFT')}",),
    "where nothing is masked, it is of no use which tile it is": (
        f"Decode.run: {step('BODY')} as {step('BODY').replace('position', 'split.end')}",
    ),
    "what is done to plain scores changes none": ("Decode.step: if const_expr(not score.plain) as if True",),
    "O may always shrink, and the first PV writes over whatever it was": (
        "Decode.step: correct(position - split.begin) as correct(split.end - split.begin)",
        "Decode.correct: if shrinks() and before > 0 as if True",
    ),
}
REASONS = {name: reason for reason, names in HARMLESS.items() for name in names}


def broken(**changed: Any) -> type[TmemDecodeCta]:
    return type("BrokenCta", (TmemDecodeCta,), changed)


def cta_of(mutant: Mutant) -> type[TmemDecodeCta]:
    name, base = ROLES[mutant.subject]
    return broken(**{name: type("Mutated", (base,), mutant.methods())})


@cache
def mutants() -> dict[str, Mutant]:
    alike = {role: Alike((*ALIKE, RINGS.get(role, ())), {"s.stage": "s.stage ^ 1"}) for role in ROLES}
    return mutants_of(alike, IMPOSSIBLE)


def miscounted(name: str, which: str, change: int) -> type[TmemDecodeCta]:
    """A CTA one of whose barriers counts other arrivals than there are."""

    def count(barriers: Any) -> None:
        for barrier in barriers:
            barrier.count += change
            barrier.pending += change

    class Ring(ClockedPagedRing):
        def __init__(self, cta: Any, ring: str, *rest: Any) -> None:
            super().__init__(cta, ring, *rest)
            count(getattr(self, which) if ring == name else ())

    class WorkRing(Ring, TmemDecodeCta.WORK_RING):  # type: ignore[name-defined, misc]
        pass

    class Scores(ClockedScores):
        def __init__(self, cta: Any) -> None:
            super().__init__(cta)
            count(self.full if name == "S" else ())

    class Signal(ClockedSignal):
        def __init__(self, cta: Any, signal: str, arrivals: int) -> None:
            super().__init__(cta, signal, arrivals + (change if signal.startswith(name) else 0))

    return broken(RING=Ring, WORK_RING=WorkRing, SCORES=Scores, SIGNAL=Signal)


def counts() -> dict[str, type[TmemDecodeCta]]:
    found = {}
    for change in (-1, 1):
        for name in ("S", "P is", "O is"):
            found[f"{name}: {change:+} arrivals"] = miscounted(name, "", change)
        for name in ("Q", "K", "V"):
            for which in ("full", "empty"):
                found[f"{name} {which}: {change:+} arrivals"] = miscounted(name, which, change)
    return found


def objection(cta: type[TmemDecodeCta], seeds: Sequence[int] = SEEDS) -> Exception | None:
    def simulate(problem: PagedProblem, seed: int, policy: str) -> None:
        config = replace(SMALL, stages=problem.stages, q_stages=problem.q_stages)
        run(problem, seed, policy, cta=cta, config=config)

    return first_objection(simulate, PROBLEMS, seeds, crashes=CRASHES)


def test_the_programs_themselves_raise_no_objection():
    assert objection(TmemDecodeCta) is None


@pytest.mark.parametrize("name", mutants())
def test_a_mutant_is_found_or_harmless(name):
    error = objection(cta_of(mutants()[name]), seeds_for(name, SEEDS, REASONS))
    judge(name, error, REASONS)


@pytest.mark.parametrize("name", counts())
def test_a_wrong_count_is_found(name):
    error = objection(counts()[name])
    assert error is not None


def test_no_harmless_mutant_is_stale():
    is_not_stale(HARMLESS, mutants())


def test_mutants_reach_every_method_and_every_call():
    reach_every_call(ROLES, mutants())


if __name__ == "__main__":
    tell({name: cta_of(mutant) for name, mutant in mutants().items()} | counts(), objection, REASONS)
