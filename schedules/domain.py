"""Which KV tiles a Q tile visits, and in which section: the domain policies.

Query row `i` sees the keys `lo(i) <= j < hi(i)`. Over the rows of a Q tile, the KV tiles that every row sees whole are
the body; those at the edges, where some row's `lo` or `hi` falls inside the tile, are masked. Tiles are visited from
left to right, but for those at the left edge, which come last: the first one is the row's only one, or whole, so that
its weights say something about those to come. Where scores fall with the distance (ALiBi) they are visited from the
nearest to the farthest, lest the maxima grow from tile to tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, NamedTuple

from cutlass import const_expr

from schedules import program


class Section(Enum):
    """A compile-time stage of the KV loop."""

    BODY = "body"  # every row sees every key: no mask, no length test
    RIGHT = "right"  # the residual tail, or the diagonal: keys at or past a row's `hi` are masked
    LEFT = "left"  # a window's left edge: keys before a row's `lo` are masked, too


class Bounds(NamedTuple):
    """The run-time numbers that decide who sees whom."""

    seqlen_q: int
    seqlen_k: int
    left: int = 0  # keys before a query's own that it sees, where the mask is a window
    right: int = 0  # and behind it, where the mask is not dense


class Visits(NamedTuple):
    """The KV tiles of one Q tile: `total` of them from tile `first` on. In the order of their visit: the body, `right`
    in RIGHT, and `left`, which lie before the body, in LEFT. With `nearest_first` RIGHT comes before the body, and,
    where every query sees every key, begins with the `crossing` ones from tile `first + near` on, in which one query
    has keys on either side."""

    total: int
    right: int
    left: int = 0
    first: int = 0
    near: int = 0
    crossing: int = 0


@dataclass(frozen=True)
class Dense:
    """Every query sees every key. One tile at most is masked, the tail, whose length is a run-time number."""

    tile_m: int
    tile_n: int
    nearest_first: bool = False

    first_section = Section.RIGHT  # which masks whatever the first tile of a work tile may need
    sections: ClassVar[tuple[Section, ...]] = (Section.BODY, Section.RIGHT)

    def lo(self, row: int, bounds: Bounds) -> int:
        """The first key that query `row` sees, or less."""
        return 0

    def hi(self, row: int, bounds: Bounds) -> int:
        """One past the last key that query `row` sees; not more than `lo`, or than 0, if it sees none."""
        return bounds.seqlen_k

    @program.jit
    def cut(self, q_tile: int, bounds: Bounds) -> Visits:
        """At least one tile is visited, so that an empty row still meets the whole pipeline and comes out as zero."""
        total = max(1, (bounds.seqlen_k + self.tile_n - 1) // self.tile_n)
        return Visits(total=total, right=total - bounds.seqlen_k // self.tile_n)

    @program.jit
    def visits(self, q_tile: int, bounds: Bounds) -> Visits:
        """The tiles that the Q tile visits."""
        found = self.cut(q_tile, bounds)
        if const_expr(self.nearest_first):
            found = self.nearest(found, q_tile, bounds)
        return found

    @program.jit
    def nearest(self, found: Visits, q_tile: int, bounds: Bounds) -> Visits:
        """The tiles that cross are in RIGHT, too."""
        n, past = self.tile_n, bounds.seqlen_k - bounds.seqlen_q
        last_row = min((q_tile + 1) * self.tile_m, bounds.seqlen_q) - 1
        end = (max(0, last_row + past) + n - 1) // n - found.first
        near, behind = self.near(found, q_tile, bounds), found.total - found.right
        crossing = max(near, min(end, behind)) - near
        return Visits(found.total, found.right + crossing, found.left, found.first, near, crossing)

    @program.jit
    def near(self, found: Visits, q_tile: int, bounds: Bounds) -> int:
        """The first tile of the body that does not end before the first query's own key, from `found.first` on."""
        place = max(0, q_tile * self.tile_m + bounds.seqlen_k - bounds.seqlen_q + 1) // self.tile_n - found.first
        return max(found.left, min(place, found.total - found.right))

    def tile(self, visits: Visits, position: int) -> int:
        """The KV tile that is visited as number `position`."""
        return self.from_nearest(visits, position) if self.nearest_first else self.from_left(visits, position)

    def from_left(self, visits: Visits, position: int) -> int:
        return position

    @program.jit
    def from_nearest(self, visits: Visits, position: int) -> int:
        """From the right to the left, but tiles that cross come first, and of the body those on their left."""
        right = visits.right - visits.crossing
        step = position - visits.right
        place = visits.near - 1 - step
        place = place if place >= visits.left else visits.total - right - 1 - (step - (visits.near - visits.left))
        place = place if position < visits.total - visits.left else visits.total - 1 - position
        crossing = position < visits.crossing
        masked = visits.near + visits.crossing if crossing else visits.total + visits.crossing
        return visits.first + (masked - 1 - position if position < visits.right else place)


@dataclass(frozen=True)
class Causal(Dense):
    """Query `i` sees the keys up to `i + seqlen_k - seqlen_q + right`: with `right` 0 causal, aligned at the bottom
    right."""

    def nearest(self, found: Visits, q_tile: int, bounds: Bounds) -> Visits:
        """All tiles from the first that crosses on are in RIGHT: the mask lets few keys behind a query be seen."""
        right = found.total - self.near(found, q_tile, bounds)
        return Visits(found.total, right, found.left, found.first)

    def from_nearest(self, visits: Visits, position: int) -> int:
        """From the right to the left."""
        return visits.first + visits.total - 1 - position

    @program.jit
    def hi(self, row: int, bounds: Bounds) -> int:
        return min(bounds.seqlen_k, row + 1 + bounds.seqlen_k - bounds.seqlen_q + bounds.right)

    @program.jit
    def cut(self, q_tile: int, bounds: Bounds) -> Visits:
        """Tiles below the diagonal of the first row are the body, those up to the diagonal of the last are masked."""
        first = q_tile * self.tile_m
        last = min(first + self.tile_m, bounds.seqlen_q) - 1
        seen = max(0, self.hi(last, bounds))
        whole = max(0, self.hi(first, bounds)) // self.tile_n
        total = max(1, (seen + self.tile_n - 1) // self.tile_n)
        return Visits(total=total, right=max(0, total - whole))


@dataclass(frozen=True)
class Window(Causal):
    """Of the keys that `Causal` lets it see, query `i` sees those from `i + seqlen_k - seqlen_q - left` on."""

    first_section = Section.LEFT
    sections = (Section.BODY, Section.RIGHT, Section.LEFT)

    def lo(self, row: int, bounds: Bounds) -> int:
        return row + bounds.seqlen_k - bounds.seqlen_q - bounds.left

    @program.jit
    def cut(self, q_tile: int, bounds: Bounds) -> Visits:
        """Somebody sees the tiles from the first row's `lo` to the last row's `hi`, and everybody those from the last
        row's `lo` to the first row's `hi`."""
        first_row = q_tile * self.tile_m
        last_row = min(first_row + self.tile_m, bounds.seqlen_q) - 1
        return self.cut_rows(first_row, last_row, bounds)

    @program.jit
    def cut_rows(self, first_row: int, last_row: int, bounds: Bounds) -> Visits:
        """The tiles that the queries from `first_row` to `last_row` visit."""
        n = self.tile_n
        end = (max(0, self.hi(last_row, bounds)) + n - 1) // n
        first = max(0, min(max(0, self.lo(first_row, bounds)) // n, end - 1))
        total = max(1, end - first)
        left = min(total, max(0, (max(0, self.lo(last_row, bounds)) + n - 1) // n - first))
        body = max(0, min(total, max(0, self.hi(first_row, bounds)) // n - first) - left)
        return Visits(total=total, right=total - left - body, left=left, first=first)

    @program.jit
    def from_left(self, visits: Visits, position: int) -> int:
        place = visits.left + position
        place = place - visits.total if place >= visits.total else place
        return visits.first + place


@dataclass(frozen=True)
class Ascending(Window):
    """A window whose tiles are visited from the first to the last: LEFT, body, RIGHT. With sides as long as all keys it
    is any other mask, too."""

    def from_left(self, visits: Visits, position: int) -> int:
        return visits.first + position


DOMAINS: dict[str, type[Dense]] = {"dense": Dense, "causal": Causal, "window": Window}


def mask_of(causal: bool, window: tuple[int | None, int | None], seqlen_q: int, seqlen_k: int) -> tuple[str, Bounds]:
    """The mask of `DOMAINS` for a call, and its bounds.

    window  keys before and behind a query's own that it sees, None for all of them. A side that cuts nothing off is
            none, and one without a key is as good as any below it: equal masks are computed alike.
    """
    left, right = window
    if causal:
        right = 0 if right is None else min(right, 0)
    elif right is None or right >= seqlen_q - 1:  # the first query sees the last key
        right = None
    if left is None or left >= seqlen_k - 1:  # the last query sees the first key
        mask, left = "dense" if right is None else "causal", 0
    else:
        mask = "window"
    right = seqlen_q - 1 if right is None else right
    return mask, Bounds(seqlen_q, seqlen_k, max(left, -seqlen_q), max(right, -seqlen_k))
