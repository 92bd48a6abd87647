"""Which CTA takes which work tile.

A work tile is one Q tile of one head of one batch entry. There are as many CTAs as multiprocessors; each starts with
the work tile of its own index and then takes the next one that nobody has, from a counter. So the order decides two
things: neighbours in time should share K and V in L2, and heavy tiles should not be left for last.

In a ragged batch every entry is a sequence with lengths of its own, which the host does not know. A small kernel lists
them before (`in_order` is what it does): those with the heaviest work tiles first, each with the number of its first Q
tile. The same order then holds inside a sequence as inside a batch of equal ones.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Sequence as List
from itertools import accumulate
from typing import NamedTuple

from schedules import program

BUCKETS = 256  # weights that sequences are told apart by, an eighth of an octave each
LARGEST_GROUP, SMALLEST_GROUP = 64, 4


class Work(NamedTuple):
    """The coordinates of one work tile; with `valid` 0 there is none: its batch entry lies outside the tensors, so that
    TMA fills its tiles with zeros."""

    q_tile: int
    head: int
    batch: int
    valid: int

    @property
    def entry(self) -> int:
        """Of the tensors' batch mode."""
        return self.batch


class RaggedWork(NamedTuple):
    """The same of a ragged batch, with the lengths of its sequence. With `valid` 0 these are 0, and all of its rows lie
    outside."""

    q_tile: int
    head: int
    batch: int  # the sequence
    valid: int
    entry: int
    start_q: int
    rows: int
    seqlen_q: int
    start_k: int
    seqlen_k: int


class Sequence(NamedTuple):
    """One of a ragged batch. Of entry `entry` of the tensors it has the output rows from `start_q` on; the first
    `seqlen_q` of those are its queries, the others are zeros. Its keys are the `seqlen_k` from `start_k` on."""

    batch: int
    entry: int
    start_q: int
    rows: int
    seqlen_q: int
    start_k: int
    seqlen_k: int
    group: int  # heads that run side by side


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


@program.jit
def ragged_work_of(index: int, sequence: Sequence, heads: int, tile_m: int) -> RaggedWork:
    """Work tile `index` of a sequence."""
    q_tiles = (sequence.rows + tile_m - 1) // tile_m
    work = work_of(index, q_tiles, heads, 1, sequence.group)
    return RaggedWork(work.q_tile, work.head, sequence.batch, 1, *sequence[1:7])


def head_group(causal: bool, seqlen_k: int, kv_bytes_per_key: int, l2_bytes: int) -> int:
    """How many heads run side by side.

    Dense tiles weigh the same: one head at a time, its K and V stay in L2 (two at a time: 10% slower at 1k tokens on an
    H200). Under a causal mask a group ends with its light tiles, and the K and V of a group should fit into two thirds
    of L2: twice as many heads as that were 3% slower at 4k tokens with head dim 128, 3% at 2k and 5% at 1k with head
    dim 256, and half as many no faster. Where fewer than four fit, any number was as fast (2 to 16 heads at 16k
    tokens). A power of two, which divides most counts of heads: the last group is then as large as the others (head dim
    256, 1k tokens: 32 heads 6% faster than 25).
    """
    return group_of(seqlen_k, keys_in_l2(causal, kv_bytes_per_key, l2_bytes))


def keys_in_l2(causal: bool, kv_bytes_per_key: int, l2_bytes: int) -> int:
    """Of all heads that run side by side together; 0 where one head at a time runs."""
    return max(1, 2 * l2_bytes // (3 * max(1, kv_bytes_per_key))) if causal else 0


@program.jit
def group_of(seqlen_k: int, keys: int) -> int:
    """How many heads of `seqlen_k` keys run side by side, where so many `keys` fit in L2 (0: one)."""
    fitting = keys // max(1, seqlen_k)
    group = SMALLEST_GROUP
    for power in (8, 16, 32, LARGEST_GROUP):
        group = power if fitting >= power else group
    return group if keys > 0 else 1


# -- the list of a ragged batch --------------------------------------------------------------------------------------
def sequences(
    batch: int,
    rows: int,
    keys: int,
    cu_seqlens: tuple[List[int], List[int]] | None = None,
    seqused: tuple[List[int] | None, List[int] | None] = (None, None),
    keys_fit: int = 0,
) -> list[Sequence]:
    """The sequences of a batch, of a tensor with so many `rows` of Q, and `keys`, an entry.

    cu_seqlens  of queries and keys, [batch + 1] each, if the sequences are packed in one entry. Output rows outside of
                all of them belong to two more, without a query.
    seqused     how much of each is used

    Whatever the numbers are, nothing lies outside the tensors.
    """
    used_q, used_k = seqused
    found = []
    for b in range(batch):
        start_q, end_q, start_k, end_k = 0, rows, 0, keys
        if cu_seqlens is not None:
            start_q, end_q = within(cu_seqlens[0][b], cu_seqlens[0][b + 1], rows)
            start_k, end_k = within(cu_seqlens[1][b], cu_seqlens[1][b + 1], keys)
        seqlen_q, seqlen_k = end_q - start_q, end_k - start_k
        seqlen_q = seqlen_q if used_q is None else min(max(used_q[b], 0), seqlen_q)
        seqlen_k = seqlen_k if used_k is None else min(max(used_k[b], 0), seqlen_k)
        entry = b if cu_seqlens is None else 0
        group = group_of(seqlen_k, keys_fit)
        found.append(Sequence(b, entry, start_q, end_q - start_q, seqlen_q, start_k, seqlen_k, group))
    if cu_seqlens is not None:
        for start, end in ((0, cu_seqlens[0][0]), (cu_seqlens[0][-1], rows)):
            start, end = within(start, end, rows)
            found.append(Sequence(0, 0, start, end - start, 0, 0, 0, 1))
    return found


@program.jit
def within(start: int, end: int, size: int) -> tuple[int, int]:
    """The part of [start, end) inside [0, size)."""
    first = min(max(start, 0), size)
    return first, min(max(end, first), size)


def bucket(seqlen_k: int) -> int:
    """Less is heavier: a work tile costs what it sees of the keys. The exponent of a float and the first bits behind
    it."""
    bits = struct.unpack("<i", struct.pack("<f", float(max(1, seqlen_k))))[0]
    return BUCKETS - 1 - min(BUCKETS - 1, (bits >> 20) - (127 << 3))


class Listing(NamedTuple):
    """The sequences that have rows, in the order of their work, and the number of each one's first Q tile; behind the
    last, how many there are."""

    order: list[Sequence]
    first: list[int]

    def work(self, index: int, heads: int, tile_m: int) -> RaggedWork:
        """Work tile `index` of the batch."""
        if index >= self.first[-1] * heads:
            return RaggedWork(*[0] * len(RaggedWork._fields))
        at = bisect_right(self.first, index // heads) - 1
        return ragged_work_of(index - self.first[at] * heads, self.order[at], heads, tile_m)


def in_order(found: List[Sequence], tile_m: int) -> Listing:
    """Those with the heaviest work tiles first. (On the GPU the order inside a bucket is anyhow.)"""
    order = sorted((sequence for sequence in found if sequence.rows), key=lambda sequence: bucket(sequence.seqlen_k))
    return Listing(order, list(accumulate((-(-sequence.rows // tile_m) for sequence in order), initial=0)))
