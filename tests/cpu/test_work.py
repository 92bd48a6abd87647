"""The order of work tiles: each exactly once, heavy ones first inside a group of heads."""

from __future__ import annotations

from itertools import groupby, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.work import Work, head_group, work_of

COUNTS = st.integers(1, 9)


@settings(max_examples=1000)
@given(COUNTS, COUNTS, COUNTS, st.integers(1, 100))
def test_every_work_tile_once_and_heavy_first(q_tiles, heads, batches, group):
    order = [work_of(i, q_tiles, heads, batches, group) for i in range(q_tiles * heads * batches)]
    assert sorted(order) == [Work(*w) for w in product(range(q_tiles), range(heads), range(batches))]

    lanes = [work.batch * heads + work.head for work in order]
    blocks = [lane // group for lane in lanes]
    assert blocks == sorted(blocks), "groups of heads come one after another"
    for _, block in groupby(zip(blocks, order, strict=True), key=lambda pair: pair[0]):
        tiles = [work.q_tile for _, work in block]
        assert tiles == sorted(tiles, reverse=True), "inside a group the last Q tile of every head comes first"


def test_a_group_of_one_keeps_the_tiles_of_a_head_together():
    order = [work_of(i, q_tiles=3, heads=2, batches=1, group=1) for i in range(6)]
    assert [work.head for work in order] == [0, 0, 0, 1, 1, 1]
    assert [work.q_tile for work in order] == [2, 1, 0, 2, 1, 0]


L2 = 50 * 2**20
KEY_BYTES = 2 * 2 * 128  # K and V of one key in 16 bits


@pytest.mark.parametrize(
    ("seqlen_k", "expected"),
    [
        (1, 64),  # the cap
        (512, 64),
        (2048, 50),  # as many heads as L2 holds
        (4096, 25),
        (16384, 8),  # the floor: light tiles must not be left for last
        (147_600, 8),
    ],
)
def test_causal_heads_side_by_side_fit_in_l2(seqlen_k, expected):
    assert head_group(True, seqlen_k, KEY_BYTES, L2) == expected


@given(st.integers(0, 10**6), st.integers(1, 4096))
def test_head_group_bounds(seqlen_k, key_bytes):
    assert head_group(False, seqlen_k, key_bytes, L2) == 1
    group = head_group(True, seqlen_k, key_bytes, L2)
    assert 8 <= group <= 64
    assert group == 8 or group * seqlen_k * key_bytes <= L2
