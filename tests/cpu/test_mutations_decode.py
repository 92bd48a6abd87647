"""Can the simulator of decoding fail? As `tests.cpu.test_mutations` does with the forward programs, each statement of
`Fetch`, of `Decode` and of `Splitter` is broken in turn.

    python -m tests.cpu.test_mutations_decode        prints what becomes of each
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from schedules import decode, splits
from schedules.forward import Slot
from schedules.machine import CountError, Deadlock, Hazard, ScheduleError
from schedules.rings import Counts
from schedules.simulate_decode import DecodeCta, NumpyDecode, NumpyFetch, NumpyPagedRing, NumpyPagedWorkRing
from schedules.simulate_decode import NumpySplitter as Splitter
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
from tests.cpu.simulation import ADVERSARIES

MANY = whole([100, 0, 37, 1, 64], heads=4, kv_heads=2)
PACKED = PagedProblem(
    (Ask(7, 60), Ask(0, 9), Ask(1, 80), Ask(9, 9)), packed=True, before=3, behind=18, heads=8, kv_heads=2, causal=True
)
PROBLEMS = (
    replace(MANY, multiprocessors=4),
    replace(MANY, multiprocessors=1, stages=1, q_stages=1),
    replace(MANY, multiprocessors=12, page=4),
    replace(MANY, multiprocessors=3, splits=3, q_stages=1),
    replace(MANY, multiprocessors=2, splits=1, stages=4),
    replace(PACKED, multiprocessors=3),
    replace(PACKED, multiprocessors=4, window=(20, 30), stages=3, softcap=3.0),
    replace(PACKED, multiprocessors=3, splits=2, window=(30, None), sinks=True),
    replace(PACKED, multiprocessors=7, causal=False, window=(17, 5), q_stages=1),
    whole([200], multiprocessors=5, stages=4),
    whole([16] * 6, multiprocessors=2, q_stages=1),  # a tile each
    whole([30, 90], queries=6, heads=5, multiprocessors=5, window=(5, 3), softcap=2.0),  # no body
    whole([90, 50], queries=12, heads=2, multiprocessors=4, window=(-4, 20)),
    whole([90, 50, 70], queries=16, heads=2, kv_heads=2, multiprocessors=1, window=(20, 3), stages=3, q_stages=1),
    whole([33, 49], queries=3, heads=3, kv_heads=3, multiprocessors=2, window=(30, -2), page=1),
    whole([33, 49], queries=3, heads=3, kv_heads=3, multiprocessors=2, causal=True),
    whole([51, 20], queries=35, multiprocessors=3, causal=True, page=1),  # three Q tiles, one sees a tile whole
    whole([36, 20], queries=10, heads=4, multiprocessors=3, causal=True),
    whole([60, 70], queries=35, multiprocessors=3, causal=True, splits=6, window=(40, None)),
    whole([40], queries=4, heads=4, multiprocessors=2),  # a whole Q tile
    PagedProblem((Ask(0, 5), Ask(2, 40), Ask(1, 9)), packed=True, heads=3, kv_heads=3, multiprocessors=1),
    PagedProblem((Ask(0, 0),), packed=True, behind=1, multiprocessors=2),
    PagedProblem((Ask(0, 9),), packed=True),  # nothing to do
    replace(MANY, multiprocessors=12, splits=2),
    whole([64] * 3, multiprocessors=2),  # alike: two Q tiles, and one
    whole([64] * 2, multiprocessors=7),  # three splits of each
    whole([320] * 3, multiprocessors=5),  # whole Q tiles are just worth it
    whole([336] * 3, multiprocessors=5),  # and just not
    PagedProblem((Ask(1, 20), Ask(0, 60), Ask(1, 20)), packed=True, multiprocessors=3),  # alike, and one without a row
)
SEEDS = range(2)
SUBJECTS = (decode.Fetch, decode.Decode, decode.SplitRole, splits.Splitter)
RINGS = ("self.q", "self.k", "self.v")
ROLES = Alike(
    (
        ("q_slot", "slot"),
        ("position", "split.begin", "split.end"),
        ("visits.left", "visits.right"),
        ("Section.LEFT", "Section.BODY", "Section.RIGHT"),
        ("min", "max"),
        RINGS,
    ),
    {},
    {ast.Add: ast.Sub, ast.Sub: ast.Add},
)
ARITHMETIC = Alike(
    (
        ("min", "max"),
        ("plan.begin", "plan.end"),
        ("begin", "end"),
        ("first_query", "last_query"),
        ("first", "last"),
        ("unit", "base"),
        ("at", "until"),
        ("split.unit", "split.until"),
        ("self.lo", "self.hi"),
        ("rows.rows", "rows.seqlen_q"),
        ("self.group", "self.heads"),
        ("self.left", "self.right"),
        ("plan.each", "plan.more"),
        ("each", "more"),
        ("visits.first", "span.first"),
        ("span.total", "width"),
    ),
    {"visits.total": "span.total"},
    {ast.Add: ast.Sub, ast.Sub: ast.Add},
)
NO_OPERATIONS = ("q.gather", "k.load", "v.load", "split = plan")  # of those rings, or no split
UNTIL = "until = at + 1 if splits > 0 else min(width, at + plan.end - unit)"
LAST = "last = min((q_tile * tile_m + tile_m - 1) // group, last)"
KEYS = "first_key, end_key = (max(domain.lo(first_query, bounds), 0), domain.hi(last_query, bounds))"
VISITS = "visits, bounds = (visits(rows, q_tile), bounds(rows))"
SPAN = "return domain.cut_rows(0, rows.seqlen_q - 1, bounds(rows))"
OWNER = "return stretch * plan.ctas + (inside // (plan.each + 1) if inside < longer else shorter)"
SHORTER = "shorter = plan.more + max(0, inside - longer) // max(1, plan.each)"
PLAN = "plan = Plan(units, extra, stretch, ctas, each, stretch - each * ctas, {})"
SPLIT = "return Split(batch, head, q_tile, {}, *rows, *where, unit, unit + until - at, base, width)"
PARTED = "if split.until - split.unit < split.width"
PART = "return place.first + index if splits > 0 else shared"
ALONE = "parts, own, first, counter = (1, 0, 0, 0)"


def step(section: str) -> str:
    return f"slot = step(Section.{section}, split, visits, position, q_slot, slot)"


HARMLESS = {
    "before the first split every slot is Slot(0, 0), and K and V have as many stages": (
        "Fetch.run: q_slot = q.first() as q_slot = k.first()",
        "Fetch.run: q_slot = q.first() as q_slot = v.first()",
        "Fetch.run: slot = k.first() as slot = q.first()",
        "Fetch.run: slot = k.first() as slot = v.first()",
        "Fetch.run: slot = k.next(slot) as slot = v.next(slot)",
        "Decode.run: q_slot = q.first() as q_slot = k.first()",
        "Decode.run: q_slot = q.first() as q_slot = v.first()",
        "Decode.run: slot = k.first() as slot = q.first()",
        "Decode.run: slot = k.first() as slot = v.first()",
        "Decode.run: q.wait(q_slot) as q.wait(slot)",
        "Decode.run: split = q.work(q_slot) as split = q.work(slot)",
        "Decode.run: slot = k.next(slot) as slot = v.next(slot)",
    ),
    "when pages are looked up is a matter of speed": (
        "Fetch.run: if position == split.begin before pages = turn(split, position + 1, pages)",
    ),
    "neither asks for the other": (
        "Fetch.run: q.commit(q_slot) before q.post(q_slot, split)",  # two arrivals
        "Fetch.load_q: q.load(q_slot, split, split.q_tile) before q.post(q_slot, split)",
        "Decode.run: q.wait(q_slot) before plan = splitter.plan()",
        "Decode.run: place = splitter.place(plan, split) before tile = domain.tile(visits, split.begin)",
        "Decode.run: take_up(split) before place = splitter.place(plan, split)",
        "Decode.run: open(q_slot, slot) before take_up(split)",
        "Decode.run: q.release(q_slot) before v.release(slot)",
        "Splitter.plan: end = min(begin(plan, cta + 1), units * heads)"
        " before begin = min(begin(plan, cta), units * heads)",
        f"Splitter.cut: {VISITS} before if splits > 0",
        f"Splitter.cut: first_query, last_query = queries(rows, q_tile) before {VISITS}",
        f"Splitter.cut: begin = max(begin + span.first - visits.first, 0) before {KEYS}",
        "Splitter.cut: end = min(end + span.first - visits.first, visits.total)"
        " before begin = max(begin + span.first - visits.first, 0)",
    ),
    "a slot is held longer than it must be": (
        "Decode.run: if const_expr(not score.plain) before k.release(slot)",
        "Decode.run: leave(split, place) before q.release(q_slot)",
    ),
    "what is done to plain scores changes none": ("Decode.run: if const_expr(not score.plain) as if True",),
    "without ALiBi scores are changed alike in all sections": (
        "Decode.run: change_scores(split, tile, Section.LEFT) as change_scores(split, tile, Section.BODY)",
        "Decode.run: change_scores(split, tile, Section.LEFT) as change_scores(split, tile, Section.RIGHT)",
    ),
    "the mask of a body tile masks nothing": (
        f"Decode.run: {step('BODY')} as {step('LEFT')}",
        f"Decode.run: {step('BODY')} as {step('RIGHT')}",
    ),
    "no key of a tile on the right lies before a row's first": (f"Decode.run: {step('RIGHT')} as {step('LEFT')}",),
    "no register is touched in between": ("Decode.run: fence() before v.wait(slot)",),
    "who asks for a unit's owner has dealt units out, one at least to a CTA": (
        f"Splitter.owner: {SHORTER} as {SHORTER.replace('max(1', 'max(0')}",
    ),
    "the first of the shorter segments begins after as many longer ones": (
        f"Splitter.owner: {OWNER} as {OWNER.replace('<', '<=')}",
    ),
    "no Q tile has less than `EXTRA` units": (
        "Splitter.measure: return Line(each * q_tiles, q_tiles, each if q_tiles > 0 else 0)"
        " as return Line(each * q_tiles, q_tiles, each if q_tiles > 0 else 1)",
        "Splitter.plan: if splits == 0 and units > 0 as if splits == 0 and units > 1",
    ),
    "the segment is not read before it is known": tuple(
        f"Splitter.plan: {PLAN.format('0, 0')} as {PLAN.format(other)}" for other in ("1, 0", "0, 1")
    ),
    "rows that are no queries are of no sequence, and have no keys": (
        "Splitter.bounds: return Bounds(rows.seqlen_q, rows.seqlen_k, left, right)"
        " as return Bounds(rows.rows, rows.seqlen_k, left, right)",
        "Splitter.queries: first, last = (0, rows.seqlen_q - 1) as first, last = (0, rows.rows - 1)",
        "Splitter.queries: if rows.rows * group > tile_m as if rows.seqlen_q * group > tile_m",
        f"Splitter.span: {SPAN} as {SPAN.replace('rows.seqlen_q', 'rows.rows')}",
    ),
    "a division is spared whose result is 0": (
        "Splitter.queries: if rows.rows * group > tile_m as if True",
        "Splitter.cut: if unit - base >= width as if True",
        "Splitter.cut: if unit - base >= width as if unit + base >= width",
    ),
    "where a window ends before the last key there is at most a unit more, without a tile": (
        f"Splitter.span: {SPAN} as {SPAN.replace('- 1', '- 0')}",
    ),
    "a single split has all tiles, as the whole of a Q tile has": (
        f"Splitter.cut: {UNTIL} as {UNTIL.replace('splits > 0', 'splits > 1')}",
        f"Splitter.part: {PART} as {PART.replace('splits > 0', 'splits > 1')}",
    ),
    "where splits are not fixed there is a unit for each tile": ("Splitter.cut: if splits > 0 as if True",),
    "any other number says as much": (f"Splitter.cut: {SPLIT.format(1)} as {SPLIT.format(2)}",),
    "a Q tile that is not split has no place": (
        f"Splitter.place: {ALONE} as {ALONE.replace('(1, 0, 0, 0)', '(1, 1, 0, 0)')}",
        f"Splitter.place: {ALONE} as {ALONE.replace('(1, 0, 0, 0)', '(1, 0, 1, 0)')}",
        f"Splitter.place: {ALONE} as {ALONE.replace('(1, 0, 0, 0)', '(1, 0, 0, 1)')}",
    ),
    "the owners of its first and of its last unit are the same then": (
        f"Splitter.place: {PARTED} as if True",
        f"Splitter.place: {PARTED} as {PARTED.replace('<', '<=')}",
        f"Splitter.place: {PARTED} as {PARTED.replace('split.until -', 'split.unit -')}",
        f"Splitter.place: {PARTED} as {PARTED.replace('- split.unit', '- split.until')}",
    ),
}
REASONS = {name: reason for reason, names in HARMLESS.items() for name in names}


# -- mutants -----------------------------------------------------------------------------------------------------------


class Endless(ScheduleError):
    """A role goes on and on, and the scheduler never gets to know."""


class Unequal(ScheduleError):
    """A CTA has more to do than another."""


class Patient(NumpyPagedWorkRing):
    """No CTA has thousands of splits."""

    uses = 0

    def next(self, slot: Slot) -> Slot:
        self.uses += 1
        if self.uses > 1000:
            raise Endless(f"{self.name}: {self.uses} uses")
        return super().next(slot)


class Watched(DecodeCta):
    """Numbers come out right whoever computes them: the first CTA looks at what all have to do."""

    WORK_RING = Patient

    def run(self) -> None:
        super().run()
        if self.machine.cta == 0:
            loads, right = [], shares(self.splitter)
            for cta in range(self.splitter.ctas):
                self.splitter.cta = cta
                plan = self.splitter.plan()
                loads.append(plan.end - plan.begin)
            if loads != right:
                raise Unequal(f"units of the CTAs: {loads}, not {right}")


def even(units: int, ctas: int) -> list[int]:
    return [units // ctas + (cta < units % ctas) for cta in range(ctas)]


def shares(splitter: Splitter) -> list[int]:
    """How many units each CTA should have."""
    tiles: list[int] = []  # of every Q tile
    for batch in range(splitter.batch.sequences):
        rows = splitter.rows(batch)
        tiles += [Splitter.span(splitter, rows).total] * Splitter.q_tiles(splitter, rows)
    tiles *= splitter.heads
    if splitter.splits:
        units = len(tiles) * splitter.splits
        found = even(units, max(1, min(splitter.ctas, units)))
    else:
        whole = -(-len(tiles) // splitter.ctas)
        cuts = min(splitter.ctas // len(tiles), tiles[0]) if 0 < len(tiles) < splitter.ctas else 1
        longest = max(even(whole * tiles[0], cuts)) if tiles else 0
        if tiles and len(set(tiles)) == 1 and longest <= sum(tiles) // splitter.ctas + splits.WORTH:
            found = [min(whole, len(tiles) - first) * tiles[0] for first in range(0, len(tiles), whole)]
            found = [share for q_tiles in found for share in even(q_tiles, cuts)]
        else:
            units = sum(tiles) + splits.EXTRA * len(tiles)
            found = even(units, max(1, min(splitter.ctas, units // (splits.EXTRA + 1))))
    return found + [0] * (splitter.ctas - len(found))


def broken(**changes: Any) -> type[DecodeCta]:
    return type("BrokenCta", (Watched,), changes)


def cta_of(mutant: Mutant) -> type[DecodeCta]:
    name, base = {
        decode.Fetch: ("FETCH", NumpyFetch),
        decode.Decode: ("DECODE", NumpyDecode),
        decode.SplitRole: ("DECODE", NumpyDecode),
        splits.Splitter: ("SPLITTER", Splitter),
    }[mutant.subject]
    return broken(**{name: type("Mutated", (base,), mutant.methods())})


@cache
def mutants() -> dict[str, Mutant]:
    alike = {subject: ARITHMETIC if subject is splits.Splitter else ROLES for subject in SUBJECTS}
    return mutants_of(alike, NO_OPERATIONS)


# -- counts ------------------------------------------------------------------------------------------------------------


def miscounted(which: type[NumpyPagedRing], **changes: int | Callable[[Counts], int]) -> type[DecodeCta]:
    """A CTA whose ring of Q, or whose other rings, count more or less than they should: by so many, or what a function
    says."""

    def counts(self: DecodeCta, kind: type[NumpyPagedRing]) -> Counts:
        right = DecodeCta.counts(self, kind)
        if issubclass(kind, NumpyPagedWorkRing) != issubclass(which, NumpyPagedWorkRing):
            return right
        return replace(right, **{n: c(right) if callable(c) else getattr(right, n) + c for n, c in changes.items()})

    return broken(counts=counts)


def counts() -> dict[str, type[DecodeCta]]:
    """CTAs in which one number of a barrier is wrong."""
    found = {}
    for name, kind in (("Q", NumpyPagedWorkRing), ("K or V", NumpyPagedRing)):
        found |= {
            f"{name} is there one arrival too early": miscounted(kind, full_arrivals=-1),
            f"{name} waits for one arrival too many": miscounted(kind, full_arrivals=1),
            f"{name} is free one arrival too early": miscounted(kind, empty_arrivals=-1),
            f"{name} is free one arrival too late": miscounted(kind, empty_arrivals=1),
            f"one warp of four releases {name}": miscounted(
                kind, release_arrivals=lambda right: right.release_arrivals // 4
            ),
        }
    return found


# -- what becomes of them ----------------------------------------------------------------------------------------------


def objection(
    cta: type[DecodeCta], policies: Sequence[str] = ADVERSARIES, seeds: Sequence[int] = SEEDS
) -> Exception | None:
    return first_objection(lambda problem, *how: run(problem, *how, cta=cta), PROBLEMS, seeds, policies, CRASHES)


def objection_to(mutant: Mutant, seeds: Sequence[int] = SEEDS) -> Exception | None:
    """What is done when does not depend on how units are dealt out."""
    return objection(cta_of(mutant), ("random",) if mutant.subject is splits.Splitter else ADVERSARIES, seeds)


def test_the_programs_themselves_raise_no_objection():
    assert objection(Watched) is None


@pytest.mark.parametrize("name", mutants())
def test_a_mutant_is_found_or_harmless(name):
    judge(name, objection_to(mutants()[name], seeds_for(name, SEEDS, REASONS)), REASONS)


@pytest.mark.parametrize("name", counts())
def test_a_wrong_count_is_found(name):
    error = objection(counts()[name])
    assert isinstance(error, (CountError, Deadlock, Hazard)), error


def test_no_harmless_mutant_is_stale():
    is_not_stale(HARMLESS, mutants())


def test_mutants_reach_every_call_of_the_roles():
    reach_every_call((decode.Fetch, decode.Decode, decode.SplitRole), mutants())


if __name__ == "__main__":
    tell(mutants(), objection_to, REASONS)
    tell(counts(), objection, REASONS)
