"""How the KV tiles of a paged batch are split over the CTAs.

Decoding reads every key and value once for a few queries, so what counts is that all multiprocessors read at the same
time and end at the same time. The tiles of all Q tiles stand in one line of `units`, head by head, sequence by
sequence, and every CTA gets a segment of it, all of the same length but for one unit. A `Split` is what a segment has
of a Q tile. It may be all of it. Otherwise each split leaves a part, and the CTA that is the last to do so merges them.

Where all Q tiles have as many KV tiles, segments end where Q tiles do: a CTA then has one or more whole Q tiles, or one
split of one, though a few CTAs may have nothing (`WORTH`). Otherwise a Q tile has a few units more than KV tiles
(`EXTRA`), as who has many short ones takes longer.

With a fixed number of splits a unit is a split, whose tiles depend on nothing but the Q tile: then a row of the output
has the same bits whatever else is in the batch.

The lengths are on the device, and every CTA works its segment out for itself (`Splitter`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from schedules import program
from schedules.domain import Ascending, Bounds, Visits

UNLIMITED = 1 << 29  # of a window's sides, and of lengths: three of them are added up in 32 bits
MAX_UNITS = 2**31 - 2**20  # over all Q tiles and heads: they are counted in 32 bits
EXTRA = 2  # units that a Q tile has besides its KV tiles, for the time that its begin and end take
WORTH = 8  # units: what a CTA may have more than an even share, so that no Q tile is cut for others


class Rows(NamedTuple):
    """The queries of a sequence, and how many keys it has."""

    entry: int  # of q's batch mode
    start_q: int
    rows: int  # of the output
    seqlen_q: int  # those of them that are queries: all, or none
    seqlen_k: int


class Line(NamedTuple):
    """All sequences, for one head."""

    units: int
    q_tiles: int
    widest: int  # the units of the Q tile that has most


class Plan(NamedTuple):
    """How the units are dealt out: in stretches, of each to `ctas` a segment of `each`, to the first `more` one more.
    One stretch is all units, or as many whole Q tiles as a CTA has, or one that is split."""

    line: int  # units of a head
    extra: int  # those of a Q tile besides its KV tiles
    stretch: int
    ctas: int
    each: int
    more: int
    begin: int  # of this CTA's segment
    end: int


class Split(NamedTuple):
    """What a CTA attends to at a time: a Q tile, of the queries of all heads that share a KV head, and of the tiles
    that it visits those from position `begin` up to `end`. With `valid` 0 there is none.

    A Q tile's row `r` is query `r // group` and, of the heads of the group, `r % group`.
    """

    batch: int  # the sequence
    head: int  # of K and V
    q_tile: int
    valid: int
    entry: int
    start_q: int
    rows: int
    seqlen_q: int
    seqlen_k: int
    tile: int  # at position 0
    first_key: int  # that a query of the Q tile sees
    end_key: int  # one past the last
    begin: int
    end: int
    unit: int  # its first
    until: int  # one past its last
    base: int  # the first of its sequence, for its head
    width: int  # how many its Q tile has


class Place(NamedTuple):
    """Where the parts of a Q tile are kept, and this split's."""

    parts: int
    own: int
    first: int
    counter: int  # of those that have left a part


def together(lines: Iterable[Line]) -> Line:
    """The line of all sequences, of those of each."""
    each = list(lines)
    return Line(sum(x.units for x in each), sum(x.q_tiles for x in each), max((x.widest for x in each), default=0))


class Splitter(ABC):
    """Deals the units out. What a role carries are a `Plan` and a `Split`."""

    domain: Ascending
    tile_m: int
    heads: int  # of K and V
    group: int  # heads of Q that share one
    left: int  # `schedules.domain.Bounds`
    right: int
    splits: int  # of every Q tile; 0: as the segments have it
    ctas: int
    cta: int

    @abstractmethod
    def rows(self, batch: int) -> Rows:
        """Of sequence `batch`."""

    @abstractmethod
    def line(self) -> Line:
        """What there is."""

    @abstractmethod
    def seek(self, unit: int, extra: int) -> tuple[int, int]:
        """The sequence that has unit `unit` of a head, and that one's first unit."""

    @program.jit
    def plan(self) -> Plan:
        line = self.line()
        units, extra = line.units, EXTRA if self.splits == 0 else 0
        stretch, ctas = units * self.heads, max(1, min(self.ctas, units * self.heads // (extra + 1)))
        if self.splits == 0 and units > 0:
            tiles, q_tiles = line.widest - extra, line.q_tiles * self.heads
            whole = (q_tiles + self.ctas - 1) // self.ctas  # Q tiles of a CTA
            cuts = max(1, min(self.ctas // q_tiles, tiles))
            alike = units // line.widest == line.q_tiles and units % line.widest == 0
            if alike and (whole * tiles + cuts - 1) // cuts <= q_tiles * tiles // self.ctas + WORTH:
                units, extra, stretch, ctas = line.q_tiles * tiles, 0, whole * tiles, cuts
        each = stretch // ctas
        plan = Plan(units, extra, stretch, ctas, each, stretch - each * ctas, 0, 0)
        begin = min(self.begin(plan, self.cta), units * self.heads)
        end = min(self.begin(plan, self.cta + 1), units * self.heads)
        return Plan(units, extra, stretch, ctas, each, stretch - each * ctas, begin, end)

    @program.jit
    def begin(self, plan: Plan, cta: int) -> int:
        """The first unit of a CTA's segment; behind all units for those that have none."""
        at = cta % plan.ctas
        return cta // plan.ctas * plan.stretch + at * plan.each + min(at, plan.more)

    @program.jit
    def owner(self, plan: Plan, unit: int) -> int:
        """The CTA that has it."""
        stretch = unit // plan.stretch
        inside = unit - stretch * plan.stretch
        longer = plan.more * (plan.each + 1)
        shorter = plan.more + max(0, inside - longer) // max(1, plan.each)
        return stretch * plan.ctas + (inside // (plan.each + 1) if inside < longer else shorter)

    @program.jit
    def bounds(self, rows: Rows | Split) -> Bounds:
        return Bounds(rows.seqlen_q, rows.seqlen_k, self.left, self.right)

    @program.jit
    def queries(self, rows: Rows | Split, q_tile: int) -> tuple[int, int]:
        """The first and the last query of a Q tile."""
        first, last = 0, rows.seqlen_q - 1
        if rows.rows * self.group > self.tile_m:
            first = q_tile * self.tile_m // self.group
            last = min((q_tile * self.tile_m + self.tile_m - 1) // self.group, last)
        return first, last

    @program.jit
    def visits(self, rows: Rows | Split, q_tile: int) -> Visits:
        """The KV tiles of a Q tile."""
        first, last = self.queries(rows, q_tile)
        return self.domain.cut_rows(first, last, self.bounds(rows))

    @program.jit
    def span(self, rows: Rows) -> Visits:
        """Those of all of a sequence's queries."""
        return self.domain.cut_rows(0, rows.seqlen_q - 1, self.bounds(rows))

    @program.jit
    def q_tiles(self, rows: Rows) -> int:
        return (rows.rows * self.group + self.tile_m - 1) // self.tile_m

    @program.jit
    def width(self, rows: Rows, extra: int) -> int:
        """Units of a Q tile: the same for all of a sequence's."""
        return self.splits if self.splits > 0 else self.span(rows).total + extra

    @program.jit
    def units(self, batch: int, extra: int) -> int:
        """Of a sequence, for one head."""
        rows = self.rows(batch)
        return self.width(rows, extra) * self.q_tiles(rows)

    @program.jit
    def measure(self, batch: int) -> Line:
        """The line of a sequence."""
        rows = self.rows(batch)
        each, q_tiles = self.width(rows, EXTRA), self.q_tiles(rows)
        return Line(each * q_tiles, q_tiles, each if q_tiles > 0 else 0)

    @program.jit
    def first(self, plan: Plan) -> Split:
        split = self.none()
        if plan.begin < plan.end:
            head = plan.begin // plan.line
            batch, base = self.seek(plan.begin - head * plan.line, plan.extra)
            split = self.cut(plan, plan.begin, head, batch, base + head * plan.line)
        return split

    @program.jit
    def next(self, plan: Plan, split: Split) -> Split:
        """The one behind it."""
        unit, head, batch, base = split.until, split.head, split.batch, split.base
        following = self.none()
        if unit < plan.end:
            if unit == (head + 1) * plan.line:
                head, batch, base = head + 1, 0, unit
            units = self.units(batch, plan.extra)
            while unit >= base + units:
                base = base + units
                batch = batch + 1
                units = self.units(batch, plan.extra)
            following = self.cut(plan, unit, head, batch, base)
        return following

    def none(self) -> Split:
        return Split(*[0] * len(Split._fields))

    @program.jit
    def cut(self, plan: Plan, unit: int, head: int, batch: int, base: int) -> Split:
        """What begins with `unit`, which is of sequence `batch`, whose first one is `base`."""
        rows = self.rows(batch)
        span, width = self.span(rows), self.width(rows, plan.extra)
        q_tile = 0
        if unit - base >= width:
            q_tile = (unit - base) // width
        at = (unit - base) - q_tile * width
        until = at + 1 if self.splits > 0 else min(width, at + plan.end - unit)

        begin, end = max(at - plan.extra, 0), max(until - plan.extra, 0)
        if self.splits > 0:
            begin, end = span.total * at // width, span.total * until // width
        visits, bounds = self.visits(rows, q_tile), self.bounds(rows)
        first_query, last_query = self.queries(rows, q_tile)
        first_key, end_key = max(self.domain.lo(first_query, bounds), 0), self.domain.hi(last_query, bounds)
        begin = max(begin + span.first - visits.first, 0)
        end = min(end + span.first - visits.first, visits.total)
        empty = end <= begin  # one tile then, behind all keys
        begin = visits.total if empty else begin
        end = visits.total + 1 if empty else end
        where = visits.first, first_key, end_key, begin, end
        return Split(batch, head, q_tile, 1, *rows, *where, unit, unit + until - at, base, width)

    @program.jit
    def place(self, plan: Plan, split: Split) -> Place:
        """A CTA's first part comes before that of its last split."""
        row = split.base + split.q_tile * split.width  # the first unit of the Q tile
        parts, own, first, counter = split.width, split.unit, row, row // split.width
        if self.splits == 0:
            parts, own, first, counter = 1, 0, 0, 0
            if split.until - split.unit < split.width:
                counter = self.owner(plan, row)
                parts = self.owner(plan, row + split.width - 1) - counter + 1
                own = 2 * self.cta + (0 if split.unit == plan.begin else 1)
                first = 2 * counter + (0 if self.begin(plan, counter) == row else 1)
        return Place(parts, own, first, counter)

    @program.jit
    def part(self, place: Place, index: int) -> int:
        """Where the part of the Q tile's split `index` is."""
        shared = place.first if index == 0 else 2 * (place.counter + index)
        return place.first + index if self.splits > 0 else shared


def parts_needed(ctas: int, q_rows: int, splits: int) -> int:
    """Parts at most, of so many Q tiles."""
    return q_rows * splits if splits else 2 * ctas


def counters_needed(ctas: int, q_rows: int, splits: int) -> int:
    return q_rows if splits else ctas


def sides(causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    """How many keys before and behind its own a query sees, with a window (`left`, `right`), None for all of them."""
    right = UNLIMITED if right is None else right
    left = UNLIMITED if left is None else left
    right = min(right, 0) if causal else right
    return max(-UNLIMITED, min(left, UNLIMITED)), max(-UNLIMITED, min(right, UNLIMITED))
