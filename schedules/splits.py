"""How the KV tiles of a paged batch are split over the CTAs.

Decoding reads every key and value once for a few queries, so what counts is that all multiprocessors read at the same
time and end at the same time. The tiles of all Q tiles stand in one line of `units`, head by head, sequence by
sequence. It is cut into segments: one for every CTA, all of the same length, and behind these short ones, for whoever
is the first to be done, as multiprocessors do not read equally fast. A `Split` is what a segment has of a Q tile. It
may be all of it. Otherwise each split leaves a part, and the CTA that is the last to do so merges them.

With a fixed number of splits a unit is a split, whose tiles depend on nothing but the Q tile: then a row of the output
has the same bits whatever else is in the batch.

The lengths are on the device, and every CTA works its segments out for itself (`Splitter`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from schedules import program
from schedules.domain import Ascending, Bounds, Visits

UNLIMITED = 1 << 29  # of a window's sides, and of lengths: three of them are added up in 32 bits
MERGED = 24  # splits at most, or so, that short segments make of a Q tile: to merge more takes longer than they save
SHORT_PART = 12  # one part in so many of the line is for short segments
LEAST_UNITS = 16  # of a long segment, for each of a short one


class Rows(NamedTuple):
    """The queries of a sequence, and how many keys it has."""

    entry: int  # of q's batch mode
    start_q: int
    rows: int  # of the output
    seqlen_q: int  # those of them that are queries: all, or none
    seqlen_k: int


class Plan(NamedTuple):
    """How the units are dealt out: to each of `ctas` a segment of `each`, to the first `more` one more, and from unit
    `long` on `short` ones, of `piece` units."""

    line: int  # units of a head
    ctas: int
    each: int
    more: int
    long: int
    piece: int
    short: int


class Segment(NamedTuple):
    """Units from `begin` up to `end`."""

    begin: int
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


class Splitter(ABC):
    """Deals the units out. What a role carries are a `Plan`, a `Segment` and a `Split`."""

    domain: Ascending
    tile_m: int
    heads: int  # of K and V
    group: int  # heads of Q that share one
    left: int  # `schedules.domain.Bounds`
    right: int
    splits: int  # of every Q tile; 0: as the segments have it
    shorts: int  # short segments at most, for each CTA
    ctas: int
    cta: int

    @abstractmethod
    def rows(self, batch: int) -> Rows:
        """Of sequence `batch`."""

    @abstractmethod
    def line(self) -> tuple[int, int]:
        """The units of all sequences, for one head, and those of the widest Q tile."""

    @abstractmethod
    def seek(self, unit: int) -> tuple[int, int]:
        """The sequence that has unit `unit` of a head, and that one's first unit."""

    @program.jit
    def plan(self) -> Plan:
        line, widest = self.line()
        total = line * self.heads
        ctas = max(1, min(self.ctas, total))
        each = total // ctas
        long, piece, short = total, 1, 0
        least = max(2, (widest + MERGED - 1) // MERGED)
        if self.splits == 0 and self.shorts > 0 and each >= LEAST_UNITS * least:
            spare = total // SHORT_PART
            wanted = ctas * self.shorts
            piece = max(least, (spare + wanted - 1) // wanted)
            short = spare // piece
            long = total - short * piece
            each = long // ctas
        return Plan(line, ctas, each, long - each * ctas, long, piece, short)

    @program.jit
    def segment(self, plan: Plan, index: int) -> Segment:
        """Segment `index`; behind the last one there are no units."""
        short = min(max(0, index - plan.ctas), plan.short)
        at = plan.long + short * plan.piece
        end = at + (plan.piece if index - plan.ctas < plan.short else 0)
        begin = self.long_begin(plan, index)
        long = index < plan.ctas
        return Segment(begin if long else at, self.long_begin(plan, index + 1) if long else end)

    @program.jit
    def long_begin(self, plan: Plan, index: int) -> int:
        return index * plan.each + min(index, plan.more)

    @program.jit
    def segment_of(self, plan: Plan, unit: int) -> int:
        """The number of the segment that has it."""
        longer = plan.more * (plan.each + 1)
        long = plan.more + max(0, unit - longer) // max(1, plan.each)
        long = unit // (plan.each + 1) if unit < longer else long
        return plan.ctas + (unit - plan.long) // plan.piece if unit >= plan.long else long

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
    def width(self, rows: Rows) -> int:
        """Units of a Q tile: the same for all of a sequence's."""
        return self.splits if self.splits > 0 else self.span(rows).total

    @program.jit
    def units(self, batch: int) -> tuple[int, int]:
        """Of a sequence, for one head, and of a Q tile of it."""
        rows = self.rows(batch)
        width, q_tiles = self.width(rows), self.q_tiles(rows)
        return width * q_tiles, width if q_tiles > 0 else 0

    @program.jit
    def first(self, plan: Plan, segment: Segment) -> Split:
        split = self.none()
        if segment.begin < segment.end:
            head = segment.begin // plan.line
            batch, base = self.seek(segment.begin - head * plan.line)
            split = self.cut(segment, segment.begin, head, batch, base + head * plan.line)
        return split

    @program.jit
    def next(self, plan: Plan, segment: Segment, split: Split) -> Split:
        """The next one of a segment."""
        unit, head, batch, base = split.until, split.head, split.batch, split.base
        following = self.none()
        if unit < segment.end:
            if unit == (head + 1) * plan.line:
                head, batch, base = head + 1, 0, unit
            units, _ = self.units(batch)
            while unit >= base + units:
                base = base + units
                batch = batch + 1
                units, _ = self.units(batch)
            following = self.cut(segment, unit, head, batch, base)
        return following

    def none(self) -> Split:
        return Split(*[0] * len(Split._fields))

    @program.jit
    def cut(self, segment: Segment, unit: int, head: int, batch: int, base: int) -> Split:
        """What begins with `unit`, which is of sequence `batch`, whose first one is `base`."""
        rows = self.rows(batch)
        span, width = self.span(rows), self.width(rows)
        q_tile = 0
        if unit - base >= width:
            q_tile = (unit - base) // width
        at = (unit - base) - q_tile * width
        until = at + 1 if self.splits > 0 else min(width, at + segment.end - unit)

        begin, end = at, until
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
        """Of two splits that a segment shares with others, its first one's part comes before its last one's."""
        row = split.base + split.q_tile * split.width  # the first unit of the Q tile
        parts, own, first, counter = split.width, split.unit, row, row // split.width
        if self.splits == 0:
            parts, own, first, counter = 1, 0, 0, 0
            if split.until - split.unit < split.width:
                counter = self.segment_of(plan, row)
                parts = self.segment_of(plan, row + split.width - 1) - counter + 1
                mine = self.segment_of(plan, split.unit)
                own = 2 * mine + (0 if self.segment(plan, mine).begin == split.unit else 1)
                first = 2 * counter + (0 if self.segment(plan, counter).begin == row else 1)
        return Place(parts, own, first, counter)

    @program.jit
    def part(self, place: Place, index: int) -> int:
        """Where the part of the Q tile's split `index` is."""
        shared = place.first if index == 0 else 2 * (place.counter + index)
        return place.first + index if self.splits > 0 else shared


def shorts_of(rows: int) -> int:
    """Short segments for each CTA, where a part has so many rows: their room is kept small."""
    return 0


def parts_needed(ctas: int, shorts: int, q_rows: int, splits: int) -> int:
    """Parts at most, of so many Q tiles."""
    return q_rows * splits if splits else 2 * ctas * (1 + shorts)


def counters_needed(ctas: int, shorts: int, q_rows: int, splits: int) -> int:
    """Those of parts, behind the one of short segments."""
    return 1 + (q_rows if splits else ctas * (1 + shorts))


def sides(causal: bool, left: int | None, right: int | None) -> tuple[int, int]:
    """How many keys before and behind its own a query sees, with a window (`left`, `right`), None for all of them."""
    right = UNLIMITED if right is None else right
    left = UNLIMITED if left is None else left
    right = min(right, 0) if causal else right
    return max(-UNLIMITED, min(left, UNLIMITED)), max(-UNLIMITED, min(right, UNLIMITED))
