"""The order of work tiles: each exactly once, heavy ones first inside a group of heads; and in a ragged batch the heavy
sequences first."""

from __future__ import annotations

import math
from collections import Counter
from itertools import accumulate, groupby, pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.domain import DOMAINS, Bounds
from schedules.work import (
    BUCKETS,
    RaggedWork,
    Sequence,
    Work,
    bucket,
    group_of,
    head_group,
    in_order,
    keys_in_l2,
    sequences,
    within,
    work_of,
)

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
    for kind in DOMAINS.values():
        domain, bounds = kind(tile_m=64, tile_n=80), Bounds(q_tiles * 64, seqlen_k=1000, left=200, right=0)
        visits = domain.visits(work.q_tile, bounds)
        assert 1 <= visits.right + visits.left <= visits.total
        assert domain.tile(visits, 0) in range(13), "its first tile is loaded all the same"


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


# -- ragged batches ----------------------------------------------------------------------------------------------------
SIZES = st.sampled_from([0, 0, 1, 2, 15, 16, 17, 40]) | st.integers(0, 200)
ANYTHING = st.integers(-(2**31), 2**31 - 1) | st.integers(-30, 300)
TILES_M = st.sampled_from([1, 16, 64, 128])


def rows_by_work(found: list[Sequence], heads: int, tile_m: int) -> Counter[tuple[int, int, int]]:
    """How often each (entry, row, head) of the outputs is in a work tile."""
    listing, times = in_order(found, tile_m), Counter()
    for index in range(listing.first[-1] * heads):
        work = listing.work(index, heads, tile_m)
        assert work.valid == 1
        start = work.q_tile * tile_m
        assert 0 <= start < work.rows, "no work tile lies behind its sequence's rows"
        rows = range(start, min(start + tile_m, work.rows))
        times.update((work.entry, work.start_q + row, work.head) for row in rows)
    return times


@st.composite
def packed(draw):
    """Lengths of packed sequences, with rows of nobody around them, and what of them is used."""
    lengths = draw(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=7))
    sides = [(draw(st.sampled_from([0, 0, 1, 70])), draw(st.sampled_from([0, 0, 1, 70]))) for _ in range(2)]
    sizes = [[pair[i] for pair in lengths] for i in range(2)]
    cu = [list(accumulate(counts, initial=before)) for counts, (before, _) in zip(sizes, sides, strict=True)]
    rows, keys = (sums[-1] + behind for sums, (_, behind) in zip(cu, sides, strict=True))
    used = [draw(st.none() | st.tuples(*(st.integers(0, size) for size in counts))) for counts in sizes]
    return rows, keys, (cu[0], cu[1]), (used[0], used[1])


@settings(max_examples=1000)
@given(packed(), st.integers(1, 3), TILES_M, st.sampled_from([0, 100, 10_000]))
def test_every_row_of_packed_sequences_is_in_one_work_tile_for_each_head(batch, heads, tile_m, keys_fit):
    rows, keys, (cu_q, cu_k), (used_q, used_k) = batch
    found = sequences(len(cu_q) - 1, rows, keys, (cu_q, cu_k), (used_q, used_k), keys_fit)
    for b, ((start, end), (first, last)) in enumerate(zip(pairwise(cu_q), pairwise(cu_k), strict=True)):
        seqlen_q = end - start if used_q is None else used_q[b]
        seqlen_k = last - first if used_k is None else used_k[b]
        group = group_of(seqlen_k, keys_fit)
        assert found[b] == Sequence(b, 0, start, end - start, seqlen_q, first, seqlen_k, group)
    *_, before, behind = found
    assert (before.start_q, before.rows, behind.start_q, behind.rows) == (0, cu_q[0], cu_q[-1], rows - cu_q[-1])
    assert before.seqlen_q == behind.seqlen_q == before.seqlen_k == behind.seqlen_k == 0
    assert rows_by_work(found, heads, tile_m) == Counter(product([0], range(rows), range(heads)))


@settings(max_examples=500)
@given(st.integers(1, 5), SIZES, SIZES, st.booleans(), st.booleans(), st.integers(1, 3), TILES_M, st.data())
def test_every_row_of_padded_sequences_is_in_one_work_tile_for_each_head(
    batch, rows, keys, some_q, some_k, heads, tile_m, data
):
    def drawn(size: int) -> list[int]:
        return data.draw(st.lists(st.integers(0, size), min_size=batch, max_size=batch))

    used = drawn(rows) if some_q else None, drawn(keys) if some_k else None
    found = sequences(batch, rows, keys, seqused=used)
    lengths = used[0] or [rows] * batch, used[1] or [keys] * batch
    expected = [Sequence(b, b, 0, rows, q, 0, k, 1) for b, (q, k) in enumerate(zip(*lengths, strict=True))]
    assert found == expected
    assert rows_by_work(found, heads, tile_m) == Counter(product(range(batch), range(rows), range(heads)))


@settings(max_examples=2000)
@given(
    st.booleans(), st.lists(st.tuples(*[ANYTHING] * 4), min_size=1, max_size=6), ANYTHING, ANYTHING, SIZES, SIZES
)  # fmt: skip
def test_no_number_leads_outside_of_the_tensors(is_packed, numbers, last_q, last_k, rows, keys):
    cu_q, cu_k, used_q, used_k = (list(column) for column in zip(*numbers, strict=True))
    cu = ([*cu_q, last_q], [*cu_k, last_k]) if is_packed else None
    found = sequences(len(numbers), rows, keys, cu, (used_q, used_k))
    for sequence in found:
        assert sequence.batch in range(len(numbers))
        assert sequence.entry in (range(1) if is_packed else range(len(numbers)))
        assert 0 <= sequence.start_q <= sequence.start_q + sequence.seqlen_q <= sequence.start_q + sequence.rows <= rows
        assert 0 <= sequence.start_k <= sequence.start_k + sequence.seqlen_k <= keys
    rows_by_work(found, heads=2, tile_m=16)


@given(ANYTHING, ANYTHING, st.integers(0, 300))
def test_what_is_within_are_the_numbers_that_are_in_both(start, end, size):
    inside = set(range(max(start, -1), min(end, size + 1))) & set(range(size))
    first, behind = within(start, end, size)
    assert 0 <= first <= behind <= size and set(range(first, behind)) == inside


@settings(max_examples=500)
@given(packed(), st.integers(1, 5), TILES_M, st.sampled_from([0, 100, 10_000]))
def test_heavy_sequences_come_first_and_inside_one_the_order_is_that_of_a_batch(batch, heads, tile_m, keys_fit):
    rows, keys, cu, used = batch
    listing = in_order(sequences(len(cu[0]) - 1, rows, keys, cu, used, keys_fit), tile_m)
    order = [listing.work(index, heads, tile_m) for index in range(listing.first[-1] * heads)]
    weights = [bucket(work.seqlen_k) for work in order]
    assert weights == sorted(weights)
    runs = [list(run) for _, run in groupby(order, key=lambda work: work[2:])]
    assert len(runs) == len({(work.start_q, work.batch) for work in order}), "no sequence is interrupted by another"
    for run, sequence in zip(runs, listing.order, strict=True):
        q_tiles = -(-sequence.rows // tile_m)
        alone = [work_of(index, q_tiles, heads, 1, sequence.group) for index in range(q_tiles * heads)]
        assert [(work.q_tile, work.head) for work in run] == [(work.q_tile, work.head) for work in alone]
        assert {work[4:] for work in run} == {sequence[1:7]}


@given(packed(), st.integers(1, 5), st.integers(0, 10**6))
def test_past_the_last_work_tile_of_a_ragged_batch_there_is_none(batch, heads, past):
    rows, keys, cu, used = batch
    listing = in_order(sequences(len(cu[0]) - 1, rows, keys, cu, used), 16)
    work = listing.work(listing.first[-1] * heads + past, heads, 16)
    assert work == RaggedWork(0, 0, 0, 0, 0, 0, 0, 0, 0, 0), "and without a row nothing is loaded"
    for kind in DOMAINS.values():
        for nearest_first in (False, True):
            domain, bounds = kind(16, 16, nearest_first), Bounds(0, 0, left=200, right=0)
            visits = domain.visits(0, bounds)
            assert visits.total == 1 and domain.tile(visits, 0) == 0, "its first tile is loaded all the same"


@given(st.integers(0, 2**31 - 1), st.integers(1, 2**20))
def test_buckets_are_an_eighth_of_an_octave_and_heavier_ones_come_first(seqlen_k, more):
    assert 0 <= bucket(seqlen_k) < BUCKETS
    assert bucket(seqlen_k + more) <= bucket(seqlen_k)
    exponent = math.floor(math.log2(max(1, seqlen_k)))
    if seqlen_k < 2**24:  # those are floats
        step = int(8 * max(1, seqlen_k) / 2**exponent) - 8
        assert bucket(seqlen_k) == BUCKETS - 1 - (8 * exponent + step)


@given(st.booleans(), st.integers(0, 10**6), st.integers(1, 4096))
def test_a_sequence_gets_the_groups_of_a_batch_of_its_length(causal, seqlen_k, key_bytes):
    keys = keys_in_l2(causal, key_bytes, L2)
    assert group_of(seqlen_k, keys) == head_group(causal, seqlen_k, key_bytes, L2)
    assert (keys > 0) == causal and keys * key_bytes <= max(key_bytes, L2)
