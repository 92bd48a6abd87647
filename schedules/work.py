"""Which CTA takes which work tile.

A work tile is one Q tile of one head of one batch entry. CTAs start in the order of their index, so the order decides
two things: neighbours in time should share K and V in L2, and heavy tiles should not be left for last.
"""

from __future__ import annotations

from typing import NamedTuple

from schedules import program


class Work(NamedTuple):
    """The coordinates of one work tile."""

    q_tile: int
    head: int
    batch: int


@program.jit
def work_of(index: int, q_tiles: int, heads: int, batches: int, group: int) -> Work:
    """Work tile of CTA `index`: heads in groups of `group`, inside a group the last Q tile of every head first.

    Under a causal mask the last Q tile is the heaviest. A group of 1 keeps the Q tiles of a head together.
    """
    lanes = heads * batches  # a lane is one head of one batch entry
    block = index // (group * q_tiles)
    rest = index % (group * q_tiles)
    width = min(group, lanes - block * group)
    lane = block * group + rest % width
    return Work(q_tile=q_tiles - 1 - rest // width, head=lane % heads, batch=lane // heads)


def head_group(causal: bool, seqlen_k: int, kv_bytes_per_key: int, l2_bytes: int) -> int:
    """How many heads run side by side.

    Dense tiles weigh the same: one head at a time, its K and V stay in L2. Causal tiles do not, and a group of one
    head leaves its light tiles for last (8% slower on an H200); but the K and V of a whole group must stay in L2, and
    64 heads at 2k tokens were 9% slower than 32 there.
    """
    if not causal:
        return 1
    return min(64, max(8, l2_bytes // max(1, seqlen_k * kv_bytes_per_key)))
