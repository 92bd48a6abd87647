"""Which CTA takes which work tile.

A work tile is one Q tile of one head of one batch entry. There are as many CTAs as multiprocessors; each starts with
the work tile of its own index and then takes the next one that nobody has, from a counter. So the order decides two
things: neighbours in time should share K and V in L2, and heavy tiles should not be left for last.
"""

from __future__ import annotations

from typing import NamedTuple

from schedules import program


class Work(NamedTuple):
    """The coordinates of one work tile; with `valid` 0 there is none: its batch entry lies outside the tensors, so that
    TMA fills its tiles with zeros."""

    q_tile: int
    head: int
    batch: int
    valid: int


@program.jit
def work_of(index: int, q_tiles: int, heads: int, batches: int, group: int) -> Work:
    """Work tile `index`: heads in groups of `group`, inside a group the last Q tile of every head first.

    Under a causal mask the last Q tile is the heaviest. A group of 1 keeps the Q tiles of a head together.
    """
    lanes = heads * batches  # a lane is one head of one batch entry
    block = index // (group * q_tiles)
    rest = index % (group * q_tiles)
    width = max(1, min(group, lanes - block * group))
    lane = block * group + rest % width
    valid = 1 if index < lanes * q_tiles else 0
    batch = lane // heads if index < lanes * q_tiles else batches
    return Work(q_tile=q_tiles - 1 - rest // width, head=lane % heads, batch=batch, valid=valid)


def head_group(causal: bool, seqlen_k: int, kv_bytes_per_key: int, l2_bytes: int) -> int:
    """How many heads run side by side.

    Dense tiles weigh the same: one head at a time, its K and V stay in L2 (two at a time: 10% slower at 1k tokens on an
    H200). Under a causal mask a group ends with its light tiles, and the K and V of a group should fit into two thirds
    of L2: twice as many heads as that were 3% slower at 4k tokens with head dim 128, 3% at 2k and 5% at 1k with head
    dim 256, and half as many no faster. Where fewer than four fit, any number was as fast (2 to 16 heads at 16k
    tokens). A power of two, which divides most counts of heads: the last group is then as large as the others (head dim
    256, 1k tokens: 32 heads 6% faster than 25).
    """
    if not causal:
        return 1
    fitting = 2 * l2_bytes // (3 * max(1, seqlen_k * kv_bytes_per_key))
    return min(64, max(4, 1 << (fitting.bit_length() - 1) if fitting else 0))
