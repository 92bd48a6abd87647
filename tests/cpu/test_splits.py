"""How paged batches are split over CTAs: every unit once, every KV tile once, and each part in a place of its own."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass

import pytest

from schedules.domain import Ascending
from schedules.splits import (
    EXTRA,
    UNLIMITED,
    WORTH,
    Line,
    Place,
    Plan,
    Rows,
    Split,
    Splitter,
    counters_needed,
    parts_needed,
    sides,
    together,
)

TILE_M, TILE_N = 16, 16


class ListSplitter(Splitter):
    """Of sequences that are simply listed."""

    def __init__(self, listed: list[Rows], heads: int, group: int, limits: tuple[int, int], splits: int, ctas: int):
        self.listed = listed
        self.domain, self.tile_m = Ascending(TILE_M, TILE_N), TILE_M
        self.heads, self.group = heads, group
        self.left, self.right = limits
        self.splits, self.ctas, self.cta = splits, ctas, 0

    def rows(self, batch: int) -> Rows:
        assert 0 <= batch < len(self.listed)
        return self.listed[batch]

    def line(self) -> Line:
        return together(self.measure(batch) for batch in range(len(self.listed)))

    def seek(self, unit: int, extra: int) -> tuple[int, int]:
        base = 0
        for batch in range(len(self.listed)):
            units = self.units(batch, extra)
            if unit < base + units:
                return batch, base
            base += units
        raise AssertionError(f"there is no unit {unit}")

    def walk(self, cta: int) -> tuple[Plan, list[tuple[Split, Place]]]:
        """A CTA's segment."""
        self.cta = cta
        plan, found = self.plan(), []
        split = self.first(plan)
        while split.valid:
            found.append((split, self.place(plan, split)))
            split = self.next(plan, split)
        assert split == self.none()
        return plan, found

    def sees(self, split: Split) -> set[int]:
        """The keys that the queries of a Q tile see, one by one."""
        found: set[int] = set()
        for row in range(split.q_tile * TILE_M, (split.q_tile + 1) * TILE_M):
            query = row // self.group
            if query < split.seqlen_q:
                own = query + split.seqlen_k - split.seqlen_q
                found.update(range(max(0, own - self.left), min(split.seqlen_k, own + self.right + 1)))
        return found


def drawn(seed: int) -> ListSplitter:
    r = random.Random(seed)
    most = r.choice([3, 40, 300])
    listed, start = [], 0
    for entry in range(r.randint(1, 9)):
        rows = r.choice([1, 1, 1, 0, 2, 5, r.randint(0, 40)])
        seqlen_q = r.choice([rows, rows, rows, 0])
        keys = r.choice([0, 1, r.randint(0, most), r.randint(0, most)]) if seqlen_q else 0
        listed.append(Rows(entry, start, rows, seqlen_q, keys))
        start += rows
    limits = sides(r.random() < 0.5, *(r.choice([None, None, r.randint(-3, 3), r.randint(0, 100)]) for _ in range(2)))
    ctas = r.choice([1, 2, 3, 5, 8, 30, 132])
    return ListSplitter(
        listed, r.choice([1, 2, 3]), r.choice([1, 2, 4, 5, 8]), limits, r.choice([0, 0, 0, 1, 2, 5]), ctas
    )


@dataclass
class Dealt:
    """What the CTAs of a problem have, in order."""

    splitter: ListSplitter
    plans: list[Plan]
    found: list[list[tuple[Split, Place]]]

    @property
    def q_tiles(self) -> dict[tuple[int, int, int], list[tuple[Split, Place]]]:
        tiles = defaultdict(list)
        for split, place in sum(self.found, []):
            tiles[split.head, split.batch, split.q_tile].append((split, place))
        return tiles

    @property
    def q_rows(self) -> int:
        """Q tiles of all sequences and heads."""
        return self.splitter.heads * sum(self.splitter.q_tiles(rows) for rows in self.splitter.listed)


THOUSANDS = range(3)


@pytest.fixture(scope="module", params=THOUSANDS)
def dealt(request) -> list[Dealt]:
    """A thousand problems."""
    problems = []
    for seed in range(1000 * request.param, 1000 * (request.param + 1)):
        splitter = drawn(seed)
        walks = [splitter.walk(cta) for cta in range(splitter.ctas)]
        problems.append(Dealt(splitter, [plan for plan, _ in walks], [found for _, found in walks]))
    return problems


def test_every_unit_comes_once_and_in_order(dealt):
    for problem in dealt:
        line = problem.plans[0].line
        spans = [(split.unit, split.until) for split, _ in sum(problem.found, [])]
        at = 0
        for unit, until in spans:
            assert unit == at < until
            at = until
        assert at == line * problem.splitter.heads
        assert all(plan[:4] == problem.plans[0][:4] for plan in problem.plans)
        for plan, found in zip(problem.plans, problem.found, strict=True):
            assert [plan.begin, plan.end] == ([found[0][0].unit, found[-1][0].until] if found else [plan.begin] * 2)


def test_no_cta_has_more_than_a_unit_more_than_another_of_the_same_stretch(dealt):
    for problem in dealt:
        loads = [plan.end - plan.begin for plan in problem.plans]
        ctas, stretch = problem.plans[0].ctas, problem.plans[0].stretch
        total = problem.plans[0].line * problem.splitter.heads
        for begin in range(0, total // stretch * ctas if stretch else 0, ctas):
            mine = loads[begin : begin + ctas]
            assert sum(mine) == stretch and max(mine) - min(mine) <= 1 and mine == sorted(mine, reverse=True)
        assert max(loads) <= total // problem.splitter.ctas + WORTH


def test_where_q_tiles_are_alike_segments_end_where_they_do(dealt):
    """If that leaves no CTA much more than an even share. A stretch is all units otherwise."""
    alike = 0
    for problem in dealt:
        splitter, plan = problem.splitter, problem.plans[0]
        widths = {split.width for split, _ in sum(problem.found, [])}
        total = plan.line * splitter.heads
        if splitter.splits or len(widths) != 1:
            assert plan.stretch == total
            continue
        width = widths.pop()
        whole, splits = -(-problem.q_rows // splitter.ctas), min(width, max(1, splitter.ctas // problem.q_rows))
        worth = -(-whole * width // splits) <= total // splitter.ctas + WORTH
        alike += worth
        assert plan.stretch == (whole * width if worth else total)
        for found in problem.found:
            assert not worth or len(found) <= 1 or all(place.parts == 1 for _, place in found)
    assert alike > 30


def shares(lengths: list[int], heads: int, ctas: int) -> tuple[Plan, list[list[tuple[int, int]]]]:
    """Of sequences of so many tiles: the units of each split, and how many parts its Q tile has."""
    listed = [Rows(entry, entry, 1, 1, tiles * TILE_N) for entry, tiles in enumerate(lengths)]
    splitter = ListSplitter(listed, heads, 1, sides(False, None, None), 0, ctas)
    walks = [splitter.walk(cta) for cta in range(ctas)]
    return walks[0][0], [[(split.until - split.unit, place.parts) for split, place in found] for _, found in walks]


def test_sequences_of_a_length_are_whole():
    """16 of them on 132 multiprocessors leave 4 idle, which would have had 62 tiles each where 128 have 64."""
    plan, found = shares([64] * 16, heads=8, ctas=132)
    assert found == [[(64, 1)]] * 128 + [[]] * 4
    assert shares([64] * 64, heads=8, ctas=132)[1] == [[(64, 1)] * 4] * 128 + [[]] * 4
    assert shares([8] * 5, heads=1, ctas=2)[1] == [[(8, 1)] * 3, [(8, 1)] * 2], "the last CTA may have less"


def test_one_long_sequence_is_cut_into_equal_splits():
    assert shares([128], heads=8, ctas=132)[1] == [[(8, 16)]] * 128 + [[]] * 4
    assert [found for found in shares([129], heads=8, ctas=132)[1] if found] == ([[(9, 16)]] + [[(8, 16)]] * 15) * 8


@pytest.mark.parametrize("lengths", [[128] * 128, [64] * 15 + [63], [500, 1]])
def test_where_that_costs_too_much_or_lengths_differ_shares_are_even(lengths):
    plan, found = shares(lengths, heads=8, ctas=132)
    loads = [sum(units for units, _ in each) for each in found]
    assert plan.stretch == 8 * sum(tiles + EXTRA for tiles in lengths) and min(loads) + 1 >= max(loads)


def test_the_owner_of_a_unit_is_the_cta_that_has_it(dealt):
    for problem in dealt:
        for cta, plan in enumerate(problem.plans):
            assert all(problem.splitter.owner(plan, unit) == cta for unit in range(plan.begin, plan.end))


def test_every_q_tile_of_every_head_comes(dealt):
    for problem in dealt:
        expected = {
            (head, batch, q_tile)
            for head in range(problem.splitter.heads)
            for batch, rows in enumerate(problem.splitter.listed)
            for q_tile in range(-(-rows.rows * problem.splitter.group // TILE_M))
        }
        assert set(problem.q_tiles) == expected and len(expected) == problem.q_rows
        for (_, batch, _), splits in problem.q_tiles.items():
            for split, _ in splits:
                rows = problem.splitter.listed[batch]
                assert (split.entry, split.start_q, split.rows, split.seqlen_q, split.seqlen_k) == rows


def test_every_kv_tile_that_a_q_tile_sees_is_in_one_of_its_splits(dealt):
    """And in no more than one; a tile that it does not see is there only where a split would be empty."""
    for problem in dealt:
        for splits in problem.q_tiles.values():
            seen = problem.splitter.sees(splits[0][0])
            tiles = [split.tile + position for split, _ in splits for position in range(split.begin, split.end)]
            inside = [tile for tile in tiles if {*range(tile * TILE_N, (tile + 1) * TILE_N)} & seen]
            assert inside == sorted({key // TILE_N for key in seen})
            for split, _ in splits:
                mine = [split.tile + position for position in range(split.begin, split.end)]
                assert mine and (set(mine) <= set(inside) or len(mine) == 1 or not seen)
                if seen:
                    assert (split.first_key, split.end_key) == (min(seen), max(seen) + 1)
                for tile in set(mine) - set(inside):
                    assert not seen or tile * TILE_N >= split.end_key, "behind all keys: nobody looks its pages up"


def test_all_splits_of_a_q_tile_agree_where_its_parts_are(dealt):
    for problem in dealt:
        for splits in problem.q_tiles.values():
            places = [place for _, place in splits]
            assert {(place.parts, place.first, place.counter) for place in places} == {
                (len(splits), places[0].first, places[0].counter)
            }
            if len(splits) > 1:
                for place in places:
                    parts = [problem.splitter.part(place, index) for index in range(place.parts)]
                    assert parts == [each.own for each in places]


def test_no_two_q_tiles_share_a_part_or_a_counter(dealt):
    for problem in dealt:
        splitter = problem.splitter
        parts, counters = [], []
        for splits in problem.q_tiles.values():
            if len(splits) > 1:
                parts += [place.own for _, place in splits]
                counters.append(splits[0][1].counter)
        assert len(set(parts)) == len(parts) and len(set(counters)) == len(counters)
        assert all(0 <= part < parts_needed(splitter.ctas, problem.q_rows, splitter.splits) for part in parts)
        needed = counters_needed(splitter.ctas, problem.q_rows, splitter.splits)
        assert all(0 <= counter < needed for counter in counters)


def test_fixed_splits_have_tiles_that_no_other_sequence_changes(dealt):
    for problem in dealt[:300]:
        splitter = problem.splitter
        if not splitter.splits:
            continue
        for batch, rows in enumerate(splitter.listed):
            alone = ListSplitter(
                [rows], splitter.heads, splitter.group, (splitter.left, splitter.right), splitter.splits, ctas=3
            )
            expected = [split for cta in range(3) for split, _ in alone.walk(cta)[1]]
            mine = [split for split, _ in sum(problem.found, []) if split.batch == batch]
            assert [(s.head, s.q_tile, s.tile, s.begin, s.end) for s in mine] == [
                (s.head, s.q_tile, s.tile, s.begin, s.end) for s in expected
            ]


@pytest.mark.parametrize("splits", [0, 1, 3])
def test_sequences_without_a_key_take_a_unit_and_those_without_a_row_none(splits):
    listed = [Rows(0, 0, 1, 1, 0), Rows(1, 1, 0, 0, 50), Rows(2, 1, 1, 1, 0)]
    splitter = ListSplitter(listed, 2, 1, sides(False, None, None), splits, ctas=4)
    found = [split for cta in range(4) for split, _ in splitter.walk(cta)[1]]
    assert [(split.head, split.batch) for split in found] == [
        (head, batch) for head in range(2) for batch in (0, 2) for _ in range(max(1, splits))
    ]
    assert {(split.first_key, split.end_key, split.begin, split.end) for split in found} <= {(0, 0, 0, 1), (0, 0, 1, 2)}


def test_without_a_row_there_is_no_unit():
    splitter = ListSplitter([Rows(0, 0, 0, 0, 0)], 2, 1, sides(False, None, None), 0, ctas=4)
    assert [splitter.walk(cta)[1] for cta in range(4)] == [[]] * 4


def test_the_tiles_of_a_long_sequence_are_dealt_out_evenly():
    """33 tiles over 4 CTAs, and the second sequence, of one, is whole. Each of both counts as two tiles more."""
    splitter = ListSplitter([Rows(0, 0, 1, 1, 33 * TILE_N), Rows(1, 1, 1, 1, 5)], 1, 1, sides(True, None, None), 0, 4)
    walks = [splitter.walk(cta)[1] for cta in range(4)]
    assert [[(split.batch, split.begin, split.end) for split, _ in found] for found in walks] == [
        [(0, 0, 8)],
        [(0, 8, 18)],
        [(0, 18, 27)],
        [(0, 27, 33), (1, 0, 1)],
    ]
    assert [place for _, place in walks[2]] == [Place(parts=4, own=4, first=0, counter=0)]
    assert walks[3][1][1].parts == 1


def test_the_sides_of_a_window():
    assert sides(False, None, None) == (UNLIMITED, UNLIMITED)
    assert sides(True, None, None) == (UNLIMITED, 0)
    assert sides(True, 5, 7) == (5, 0) and sides(False, 5, 7) == (5, 7)
    assert sides(True, 5, -2) == (5, -2), "a window may end before the query's own key"
    assert sides(False, 10**12, -(10**12)) == (UNLIMITED, -UNLIMITED)
    assert sides(False, -(10**12), 10**12) == (-UNLIMITED, UNLIMITED)
    assert 3 * UNLIMITED < 2**31, "their sum with two lengths is an int32"
