"""Can the simulator of tensor memory fail? Each statement of `schedules.forward_tmem` is broken in turn, as
`tests.cpu.test_mutations` breaks those of `schedules.forward`, and so is each count of a barrier.

    python -m tests.cpu.test_mutations_tmem        prints what becomes of each
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from schedules import forward_tmem, simulate_tmem
from schedules.simulate_tmem import ClockedRing, ClockedSignal, TmemCta
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
from tests.cpu.simulation import Problem, packed, run, tmem

PROBLEMS = (  # a single CTA computes all work tiles
    Problem(30, 83, heads=3, config=tmem()),  # five body tiles and a tail
    Problem(70, 90, causal=True, config=tmem(stages=1)),
    Problem(40, 100, causal=True, heads=2, spread=20.0, config=tmem(stages=3, q_stages=2, o_stages=2)),
    Problem(20, 10, heads=3, config=tmem()),  # a single tile each
    Problem(20, 25, heads=5, config=tmem(o_stages=2)),  # two
    Problem(16, 16, causal=True, heads=2, config=tmem(q_stages=2)),  # a single one, of which every query sees a part
    Problem(60, 120, window=(70, 10), config=tmem()),  # two or three tiles in every section
    Problem(50, 60, window=(3, 2), config=tmem(), softcap=5.0),  # narrower than a tile: no body
    Problem(40, 130, True, (60, None), config=tmem(), softcap=5.0, sinks=True, alibi=True),
    Problem(40, 100, heads=2, alibi=True, config=tmem(stages=3)),
    Problem(60, 120, window=(70, 30), alibi=True, config=tmem(o_stages=2)),  # from the nearest tile on
    packed([(20, 30), (0, 5), (33, 50)], 3, 5, causal=True, heads=2, alibi=True, config=tmem()),
)
SEEDS = range(3)
ROLE_PROGRAMS = (forward_tmem.Multiply, forward_tmem.Softmax, forward_tmem.Correct, forward_tmem.Store)
SUBJECTS = (*ROLE_PROGRAMS, forward_tmem.TmemRole)
ATTRIBUTES = dict(zip(ROLE_PROGRAMS, ("MULTIPLY_ROLE", "SOFTMAX", "CORRECT", "STORE"), strict=True))
ROLES = dict(
    zip(
        ROLE_PROGRAMS,
        (
            simulate_tmem.NumpyMultiply,
            simulate_tmem.NumpySoftmax,
            simulate_tmem.NumpyCorrect,
            simulate_tmem.NumpyStore,
        ),
        strict=True,
    )
)
ALIKE = Alike(
    (
        ("q_slot", "slot", "ahead", "note"),
        ("position", "last"),
        ("parity", "done"),
        ("visits.right", "visits.left"),
        ("Section.BODY", "Section.RIGHT", "Section.LEFT"),
        ("sections[0]", "sections[1]"),
        ("self.k", "self.v"),
        ("self.scores[i]", "self.weights[i]", "self.outputs[i]"),
        ("self.scores[self.index]", "self.weights[self.index]"),
    ),
    {"parity": "parity ^ 1", "done": "done ^ 1", "self.index": "0"},
)
SECTIONS = "sections = ({}) if const_expr(nearest_first) else ({})"
NEAREST, FROM_LEFT = "Section.RIGHT, Section.BODY", "Section.BODY, Section.RIGHT"
WHOLE = SECTIONS.format(NEAREST, FROM_LEFT)
INNER = "inner = visits.right if const_expr(nearest_first) else visits.total - visits.right - visits.left"
LEFT = "if const_expr(Section.LEFT in domain.sections)"


def sections(nearest: str = NEAREST, from_left: str = FROM_LEFT) -> str:
    return f"Softmax.run: {WHOLE} as {SECTIONS.format(nearest, from_left)}"


HARMLESS: dict[str, tuple[str, ...]] = {
    "K and V have as many stages": (
        "Multiply.run: slot = k.first() as slot = v.first()",
        "Multiply.run: ahead = k.next(slot) as ahead = v.next(slot)",
        "Multiply.run: slot = k.next(slot) as slot = v.next(slot)",
    ),
    "before the first work tile every slot is Slot(0, 0)": (
        "Multiply.run: work = work(q_slot) as work = work(slot)",
        "Softmax.run: work = read_work(index, q_slot) as work = read_work(index, note)",
        "Correct.run: work = read_work(0, q_slot) as work = read_work(0, slot)",
        "Correct.run: work = read_work(0, q_slot) as work = read_work(0, note)",
        "Store.run: work = read_work(0, q_slot) as work = read_work(0, slot)",
    ),
    "a ring of one slot has it whatever the parity": (
        "Softmax.run: note = factors[index].next(note) before factors[index].commit(note)",
        "Correct.run: correct(i, note, position) as correct(i, slot, position)",
    ),
    "neither asks for the other": (
        "Multiply.run: v.wait(slot) before k.wait(ahead)",
        "Multiply.leave: k.release(ahead) before v.release(slot)",
        "Multiply.run: v.wait(slot) before leave_q(q_slot)",
        "Multiply.run: k.wait(slot) before last = visits(work).total - 1",
        f"Softmax.run: work = read_work(index, q_slot) before {WHOLE}",
        f"Softmax.run: take_up(work) before {INNER}",
        "Softmax.run: start() before take_up(work)",
        "Softmax.step: scores[index].wait(parity) before tile = domain.tile(visits, position)",
        "Softmax.step: factors[index].acquire(note) before row_max()",
        "Correct.run: outputs[i].wait(done) before factors[i].release(note)",
        "Correct.run: staged.acquire(slot) before take()",
        "Correct.run: publish_o() before hand_over()",
    ),
    "the factors are told later, or kept longer": (
        "Softmax.step: exponents(tile, section) before factors[index].commit(note)",
        "Correct.correct: if shrinks and position > 0 before factors[i].release(note)",
    ),
    "what is done to plain scores changes none": ("Softmax.step: if const_expr(not score.plain) as if True",),
    "the mask of a body tile masks nothing": (
        "Softmax.step: if const_expr(section is not Section.BODY) as if True",
        sections(from_left="Section.RIGHT, Section.RIGHT"),
        sections(from_left="Section.LEFT, Section.RIGHT"),
        sections(nearest="Section.RIGHT, Section.RIGHT"),
        sections(nearest="Section.RIGHT, Section.LEFT"),
    ),
    "no key of a tile on the right lies before a row's first": (
        sections(from_left="Section.BODY, Section.LEFT"),
        sections(nearest="Section.LEFT, Section.BODY"),
    ),
    "without a left section there is no tile in it": (
        f"Softmax.run: {LEFT} as if True",
        f"Softmax.run: {LEFT} as if const_expr(Section.BODY in domain.sections)",
        f"Softmax.run: {LEFT} as if const_expr(Section.RIGHT in domain.sections)",
    ),
    "O may always shrink, and the first PV writes over whatever it was": (
        "Correct.correct: if shrinks and position > 0 as if True",
    ),
}
REASONS = {name: reason for reason, names in HARMLESS.items() for name in names}


def broken(**changed: Any) -> type[TmemCta]:
    return type("BrokenCta", (TmemCta,), changed)


def cta_of(mutant: Mutant) -> type[TmemCta]:
    changed = ROLE_PROGRAMS if mutant.subject is forward_tmem.TmemRole else (mutant.subject,)
    return broken(**{ATTRIBUTES[role]: type("Mutated", (ROLES[role],), mutant.methods()) for role in changed})


@cache
def mutants() -> dict[str, Mutant]:
    return mutants_of(dict.fromkeys(SUBJECTS, ALIKE))


def miscounted(name: str, which: str, change: int) -> type[TmemCta]:
    """A CTA one of whose barriers counts other arrivals than there are: of rings and signals called `name`..."""

    class Ring(ClockedRing):
        def __init__(self, cta: Any, ring: str, *rest: Any) -> None:
            super().__init__(cta, ring, *rest)
            if ring.startswith(name):
                for barrier in getattr(self, which):
                    barrier.count += change
                    barrier.pending += change

    class Signal(ClockedSignal):
        def __init__(self, cta: Any, signal: str, count: int) -> None:
            super().__init__(cta, signal, count + (change if signal.startswith(name) else 0))

    return broken(RING=Ring, SIGNAL=Signal)


def counts() -> dict[str, type[TmemCta]]:
    rings = ("Q0", "Q1", "K", "V", "factors0", "factors1", "staged O")
    signals = ("S0", "S1", "P0", "P1", "O0", "O1")
    found = {}
    for change in (-1, 1):
        for name in signals:
            found[f"{name}: {change:+} arrivals"] = miscounted(name, "", change)
        for name in rings:
            for which in ("full", "empty"):
                found[f"{name} {which}: {change:+} arrivals"] = miscounted(name, which, change)
    return found


def objection(cta: type[TmemCta], seeds: Sequence[int] = SEEDS) -> Exception | None:
    return first_objection(lambda problem, *how: run(problem, *how, cta=cta, multiprocessors=1), PROBLEMS, seeds)


def test_the_programs_themselves_raise_no_objection():
    assert objection(TmemCta) is None


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
    reach_every_call(SUBJECTS, mutants())


if __name__ == "__main__":
    tell({name: cta_of(mutant) for name, mutant in mutants().items()} | counts(), objection, REASONS)
