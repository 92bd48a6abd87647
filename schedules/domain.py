"""Which KV tiles a Q tile visits, and in which section: the domain policies.

Query row `i` sees the keys `j < hi(i)`. Over the rows of a Q tile, the KV tiles that every row sees whole are the
body; those at the right edge, where some row's `hi` falls inside the tile, are masked. Tiles are visited from left to
right: the first one is the row's only one, or whole, so that its weights say something about those to come.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from schedules import program


class Section(Enum):
    """A compile-time stage of the KV loop."""

    BODY = "body"  # every row sees every key: no mask, no length test
    RIGHT = "right"  # the residual tail, or the diagonal: keys at or past a row's `hi` are masked


class Visits(NamedTuple):
    """The KV tiles of one Q tile: 0 to `total - 1`, the last `masked` of them in RIGHT."""

    total: int
    masked: int


@dataclass(frozen=True)
class Dense:
    """Every query sees every key. One tile at most is masked, the tail, whose length is a run-time number."""

    tile_m: int
    tile_n: int

    def hi(self, row: int, seqlen_q: int, seqlen_k: int) -> int:
        """One past the last key that query `row` sees; 0 or less if it sees none."""
        return seqlen_k

    @program.jit
    def visits(self, q_tile: int, seqlen_q: int, seqlen_k: int) -> Visits:
        """At least one tile is visited, so that an empty row still meets the whole pipeline and comes out as zero."""
        total = max(1, (seqlen_k + self.tile_n - 1) // self.tile_n)
        return Visits(total=total, masked=total - seqlen_k // self.tile_n)


@dataclass(frozen=True)
class Causal:
    """Query `i` sees the keys up to `i + seqlen_k - seqlen_q`: causal, aligned at the bottom right."""

    tile_m: int
    tile_n: int

    def hi(self, row: int, seqlen_q: int, seqlen_k: int) -> int:
        """One past the last key that query `row` sees; 0 or less if it sees none."""
        return row + 1 + seqlen_k - seqlen_q

    @program.jit
    def visits(self, q_tile: int, seqlen_q: int, seqlen_k: int) -> Visits:
        """Tiles below the diagonal of the first row are the body, those up to the diagonal of the last are masked."""
        first = q_tile * self.tile_m
        last = min(first + self.tile_m, seqlen_q) - 1
        seen = max(0, self.hi(last, seqlen_q, seqlen_k))
        whole = max(0, self.hi(first, seqlen_q, seqlen_k)) // self.tile_n
        total = max(1, (seen + self.tile_n - 1) // self.tile_n)
        return Visits(total=total, masked=max(0, total - whole))


DOMAINS: dict[str, type[Dense] | type[Causal]] = {"dense": Dense, "causal": Causal}
