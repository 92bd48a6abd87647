"""The order of work tiles: each exactly once, heavy ones first inside a group of heads."""

from __future__ import annotations

from itertools import groupby, product

from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.domain import DOMAINS
from schedules.work import Work, head_group, work_of

COUNTS = st.integers(1, 9)


@settings(max_examples=1000)
@given(COUNTS, COUNTS, COUNTS, st.integers(1, 100))
def test_every_work_tile_once_and_heavy_first(q_tiles, heads, batches, group):
    order = [work_of(i, q_tiles, heads, batches, group) for i in range(q_tiles * heads * batches)]
    assert sorted(order) == [Work(*w, valid=1) for w in product(range(q_tiles), range(heads), range(batches))]

    lanes = [work.batch * heads + work.head for work in order]
    blocks = [lane // group for lane in lanes]
    assert blocks == sorted(blocks), "groups of heads come one after another"
    for _, block in groupby(zip(blocks, order, strict=True), key=lambda pair: pair[0]):
        tiles = [work.q_tile for _, work in block]
        assert tiles == sorted(tiles, reverse=True), "inside a group the last Q tile of every head comes first"


@given(COUNTS, COUNTS, COUNTS, st.integers(1, 100), st.integers(0, 10_000))
def test_past_the_last_there_is_no_work_tile_and_its_batch_entry_does_not_exist(q_tiles, heads, batches, group, past):
    work = work_of(q_tiles * heads * batches + past, q_tiles, heads, batches, group)
    assert work.valid == 0 and work.batch >= batches and 0 <= work.head < heads
    for domain in DOMAINS.values():
        total, masked = domain(tile_m=64, tile_n=80).visits(work.q_tile, seqlen_q=q_tiles * 64, seqlen_k=1000)
        assert 1 <= masked <= total, "its first tile is loaded all the same"


@settings(max_examples=300)
@given(COUNTS, COUNTS, COUNTS, st.integers(1, 100), st.integers(0, 200))
def test_past_the_last_work_tile_there_is_none(q_tiles, heads, batches, group, past):
    """And its batch entry lies outside the tensors, so that nothing of them is loaded."""
    work = work_of(q_tiles * heads * batches + past, q_tiles, heads, batches, group)
    assert work.valid == 0 and work.batch == batches and 0 <= work.head < heads


def test_a_group_of_one_keeps_the_tiles_of_a_head_together():
    order = [work_of(i, q_tiles=3, heads=2, batches=1, group=1) for i in range(6)]
    assert [work.head for work in order] == [0, 0, 0, 1, 1, 1]
    assert [work.q_tile for work in order] == [2, 1, 0, 2, 1, 0]


L2 = 50 * 2**20  # bytes, of an H100
KEY_BYTES = 2 * 2 * 128  # K and V of one key: 16 bits, head dim 128
SOME = head_group(True, 10**9, KEY_BYTES, L2)  # however long the sequences: light tiles must not be left for last
MOST = head_group(True, 1, KEY_BYTES, L2)


def test_dense_heads_run_one_at_a_time_and_causal_ones_in_groups():
    assert head_group(False, 4096, KEY_BYTES, L2) == 1
    assert 1 < SOME < MOST
    assert SOME < head_group(True, 2048, KEY_BYTES, L2) < MOST


@given(st.integers(0, 10**6), st.integers(1, 4096))
def test_the_keys_of_a_causal_group_fit_in_l2(seqlen_k, key_bytes):
    group = head_group(True, seqlen_k, key_bytes, L2)
    assert SOME <= group <= MOST
    assert group.bit_count() == 1, "so that few counts of heads leave a small group for the end"
    assert group == SOME or group * seqlen_k * key_bytes <= L2
    assert group >= head_group(True, seqlen_k + 1, key_bytes, L2), "the longer, the fewer"
