"""The domain policies against brute-force masks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.domain import DOMAINS, Bounds, Causal, Dense, Section, Visits, Window, mask_of
from tests.cpu.simulation import NO_WINDOW, visible

LENGTHS = st.integers(1, 300)
TILES_M = st.sampled_from([1, 3, 16, 64, 128, 192])
TILES_N = st.sampled_from([1, 7, 16, 48, 80, 112, 128, 176])
SIDES = st.none() | st.integers(-300, 300)
WINDOWS = st.just(NO_WINDOW) | st.tuples(SIDES, SIDES)
MORE = st.just((0, 0)) | st.tuples(LENGTHS, LENGTHS)  # than a sequence, of queries and keys, the tensors have


def sections(visits: Visits, nearest_first: bool = False) -> list[Section]:
    """That of each position."""
    body = [Section.BODY] * (visits.total - visits.right - visits.left)
    right, left = [Section.RIGHT] * visits.right, [Section.LEFT] * visits.left
    return [*right, *body, *left] if nearest_first else [*body, *right, *left]


def mask_in(
    more: tuple[int, int], causal: bool, window: tuple[int | None, int | None], seqlen_q: int, seqlen_k: int
) -> tuple[str, Bounds]:
    """The mask of a sequence in tensors that have `more` queries and keys: these decide which one it is."""
    mask, bounds = mask_of(causal, window, seqlen_q + more[0], seqlen_k + more[1])
    return mask, bounds._replace(seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def is_empty(causal: bool, window: tuple[int | None, int | None]) -> bool:
    """Whether a window shows no key, however long the sequences."""
    left, right = window
    if causal:
        right = min(0, right or 0)
    return left is not None and right is not None and left + right < 0


@settings(max_examples=4000)
@given(st.booleans(), WINDOWS, LENGTHS, st.just(0) | LENGTHS, MORE, TILES_M, TILES_N, st.data())
def test_visits_cover_the_mask_and_the_body_needs_none(causal, window, seqlen_q, seqlen_k, more, tile_m, tile_n, data):
    q_tile = data.draw(st.integers(0, (seqlen_q - 1) // tile_m))
    rows = range(q_tile * tile_m, min((q_tile + 1) * tile_m, seqlen_q))
    seen = visible(seqlen_q, seqlen_k, causal, window)[rows.start : rows.stop]
    mask, bounds = mask_in(more, causal, window, seqlen_q, seqlen_k)
    domain = DOMAINS[mask](tile_m, tile_n)
    visits = domain.visits(q_tile, bounds)

    assert min(visits.right, visits.left) >= 0 and visits.right + visits.left <= visits.total
    order = [domain.tile(visits, position) for position in range(visits.total)]
    visited = range(visits.first, visits.first + visits.total)
    assert sorted(order) == [*visited], "positions map to the tiles from `first` on, one to one"
    tiles = [seen[:, start : start + tile_n] for start in range(0, max(1, seqlen_k), tile_n)]
    assert 0 <= visited.start < visited.stop <= len(tiles), "there is always one, and none past the last key"
    needed = [i for i, tile in enumerate(tiles) if tile.any()]
    assert set(needed) <= set(visited), "every tile that somebody sees is visited"
    if not is_empty(causal, window):
        assert visits.total == max(1, len(needed)), "and no other, but for the one that always is"

    found: dict[Section, list[int]] = {section: [] for section in Section}
    for tile, section in zip(order, sections(visits), strict=True):
        found[section].append(tile)
    assert all(tiles == sorted(tiles) for tiles in found.values())
    assert found[Section.LEFT] + found[Section.BODY] + found[Section.RIGHT] == [*visited]
    whole = [i for i in visited if tiles[i].shape[1] == tile_n and tiles[i].all()]
    assert found[Section.BODY] == whole, "the body is what every row sees whole"
    reaching = max(domain.lo(row, bounds) for row in rows)
    assert all(tile * tile_n >= reaching for tile in found[Section.RIGHT]), "no key of RIGHT lies before a row's lo"
    assert {section for section, tiles in found.items() if tiles} <= set(domain.sections)
    assert mask != "dense" or visits.right <= 1, "a dense problem has one masked tile at most, whatever its lengths"


@settings(max_examples=4000)
@given(st.booleans(), WINDOWS, LENGTHS, st.just(0) | LENGTHS, MORE, TILES_M, TILES_N, st.data())
def test_nearest_first_visits_the_same_tiles_from_the_queries_on(
    causal, window, seqlen_q, seqlen_k, more, tile_m, tile_n, data
):
    q_tile = data.draw(st.integers(0, (seqlen_q - 1) // tile_m))
    rows = range(q_tile * tile_m, min((q_tile + 1) * tile_m, seqlen_q))
    seen = visible(seqlen_q, seqlen_k, causal, window)[rows.start : rows.stop]
    mask, bounds = mask_in(more, causal, window, seqlen_q, seqlen_k)
    domain, from_left = DOMAINS[mask](tile_m, tile_n, nearest_first=True), DOMAINS[mask](tile_m, tile_n)
    visits, others = domain.visits(q_tile, bounds), from_left.visits(q_tile, bounds)
    order = [domain.tile(visits, position) for position in range(visits.total)]
    visited = [from_left.tile(others, position) for position in range(others.total)]
    assert sorted(order) == sorted(visited)

    assert min(visits.right, visits.left) >= 0 and visits.right + visits.left <= visits.total
    own = range(rows.start + seqlen_k - seqlen_q, rows.stop + seqlen_k - seqlen_q)  # each query's own key
    body, left = [], []
    for tile, section in zip(order, sections(visits, nearest_first=True), strict=True):
        keys = range(tile * tile_n, (tile + 1) * tile_n)
        before, behind = keys[-1] <= own[0], keys[0] >= own[-1]
        if section is Section.BODY:
            assert keys[-1] < seqlen_k and seen[:, keys[0] : keys[-1] + 1].all(), "every row sees the body whole"
            assert before or behind, "of the body every tile lies on one side of all queries"
            body.append((tile, before))
        elif section is Section.RIGHT:
            assert keys[0] >= max(domain.lo(row, bounds) for row in rows), "no key of RIGHT lies before a row's lo"
        else:
            left.append(tile)
    nearer = [tile for tile, before in body if before]
    assert body[: len(nearer)] == [(tile, True) for tile in nearer], "first come those before the queries"
    assert nearer + left == sorted(nearer + left, reverse=True), "the farther, the later"
    whole = [tile for tile, section in zip(visited, sections(others), strict=True) if section is Section.BODY]
    masked = set(whole) - {tile for tile, _ in body}
    assert all((tile + 1) * tile_n - 1 > own[0] for tile in masked), "no tile before the queries is masked"
    if mask == "dense":
        assert all(tile * tile_n < own[-1] for tile in masked), "but where one query has keys on either side,"
        assert set(order[: len(masked)]) == masked, "and those are the first"
    else:
        assert order == sorted(order, reverse=True) and len(nearer) == len(body)


@settings(max_examples=1000)
@given(st.booleans(), WINDOWS, st.integers(0, 300), st.integers(0, 300), MORE, TILES_M, TILES_N, st.data())
def test_a_q_tile_without_a_query_visits_tiles_there_are(
    causal, window, seqlen_q, seqlen_k, more, tile_m, tile_n, data
):
    """Rows behind the queries of a sequence have work tiles, too: they come out as zero."""
    q_tile = data.draw(st.integers(-(-seqlen_q // tile_m), 2 + seqlen_q // tile_m))
    mask, bounds = mask_in(more, causal, window, seqlen_q, seqlen_k)
    for nearest_first in (False, True):
        domain = DOMAINS[mask](tile_m, tile_n, nearest_first)
        visits = domain.visits(q_tile, bounds)
        assert min(visits.right, visits.left) >= 0 and visits.right + visits.left <= visits.total
        order = [domain.tile(visits, position) for position in range(visits.total)]
        assert sorted(order) == [*range(visits.first, visits.first + visits.total)]
        assert min(order) >= 0 and max(order) * tile_n < max(1, seqlen_k)


@settings(max_examples=4000)
@given(st.booleans(), WINDOWS, LENGTHS, LENGTHS, MORE)
def test_the_bounds_of_a_row_are_those_of_the_definition(causal, window, seqlen_q, seqlen_k, more):
    mask, bounds = mask_in(more, causal, window, seqlen_q, seqlen_k)
    domain = DOMAINS[mask](64, 64)
    lo, hi = ([limit(row, bounds) for row in range(seqlen_q)] for limit in (domain.lo, domain.hi))
    seen = visible(seqlen_q, seqlen_k, causal, window)
    key = np.arange(seqlen_k)
    np.testing.assert_array_equal((np.array([lo]).T <= key) & (key < np.array([hi]).T), seen)
    blind = [end <= max(start, 0) for start, end in zip(lo, hi, strict=True)]
    assert blind == (~seen.any(axis=1)).tolist(), "who sees nothing is told by the two numbers"
    assert all(-(2**10) < number < 2**10 for number in (*bounds, *lo, *hi)), "no number is far from the lengths"


# -- masks -------------------------------------------------------------------------------------------------------------
def test_equal_masks_are_computed_alike():
    """Over all windows of short sequences: masks that show a key are the same one if they show the same keys. Not for
    a single query, which has a causal mask if the call says so, though it sees every key."""
    sides = [None, *range(-6, 7)]
    for seqlen_q, seqlen_k in itertools.product(range(2, 5), range(1, 5)):
        masks: dict[bytes, set] = {}
        for causal, left, right in itertools.product((False, True), sides, sides):
            seen = visible(seqlen_q, seqlen_k, causal, (left, right))
            if seen.any():
                masks.setdefault(seen.tobytes(), set()).add(mask_of(causal, (left, right), seqlen_q, seqlen_k))
        assert all(len(alike) == 1 for alike in masks.values())
        assert len(set.union(*masks.values())) == len(masks), "and others are others"
        (everything,) = masks[bytes([1] * (seqlen_q * seqlen_k))]
        assert everything[0] == "dense"


@pytest.mark.parametrize(
    ("causal", "window", "mask"),
    [
        (False, (None, None), "dense"),
        (False, (10**9, 10**9), "dense"),
        (False, (199, 99), "dense"),  # the first query sees the last key, the last query the first
        (False, (199, 98), "causal"),
        (False, (198, 99), "window"),
        (False, (None, 0), "causal"),
        (False, (None, 5), "causal"),  # above the diagonal, with the keys before it
        (False, (None, -5), "causal"),
        (False, (200, 0), "causal"),
        (False, (199, 0), "causal"),
        (False, (198, 0), "window"),
        (False, (0, None), "window"),
        (True, (None, None), "causal"),
        (True, (199, 7), "causal"),
        (True, (198, 7), "window"),
        (True, (None, -5), "causal"),
        (False, (7, -8), "window"),
    ],
)
def test_the_mask_of_a_call(causal, window, mask):
    assert mask_of(causal, window, 100, 200)[0] == mask


def test_causal_has_many_names():
    expected = "causal", Bounds(100, 200, left=0, right=0)
    assert mask_of(True, (None, None), 100, 200) == expected
    for causal, left, right in itertools.product((False, True), (None, 199, 200, 10**9), (0, 3, None)):
        if causal or right == 0:
            assert mask_of(causal, (left, right), 100, 200) == expected


def test_sides_below_every_key_are_one():
    """Numbers that the kernel adds to a row stay small."""
    assert mask_of(False, (-100, None), 100, 200) == ("window", Bounds(100, 200, left=-100, right=99))
    assert mask_of(False, (-(10**9), None), 100, 200) == ("window", Bounds(100, 200, left=-100, right=99))
    assert mask_of(True, (None, -(10**9)), 100, 200) == ("causal", Bounds(100, 200, left=0, right=-200))


# -- by hand -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("domain", "q_tile", "bounds", "expected"),
    [
        (Dense(128, 128), 0, (1, 1), Visits(1, 1)),
        (Dense(128, 128), 0, (1, 128), Visits(1, 0)),
        (Dense(128, 128), 0, (1, 129), Visits(2, 1)),
        (Dense(128, 176), 0, (147_600, 147_600), Visits(839, 1)),
        (Causal(128, 128), 0, (256, 256), Visits(1, 1)),  # the diagonal tile alone
        (Causal(128, 128), 1, (256, 256), Visits(2, 1)),
        (Causal(128, 64), 1, (256, 256), Visits(4, 2)),  # the diagonal crosses two tiles
        (Causal(128, 128), 0, (300, 100), Visits(1, 1)),  # no row of the tile sees a key
        (Causal(128, 128), 0, (1, 1000), Visits(8, 1)),  # one query at the end sees everything
        (Causal(128, 128), 1, (512, 512, 0, 1), Visits(3, 2)),  # the last row sees one key of the next tile
        (Causal(128, 128), 1, (512, 512, 0, -1), Visits(2, 1)),
        (Causal(128, 128), 1, (512, 512, 0, -129), Visits(1, 1)),
        (Window(128, 128), 4, (1024, 1024, 256, 0), Visits(3, 1, 1, 2)),  # one tile at either edge
        (Window(128, 128), 4, (1024, 1024, 257, 0), Visits(4, 1, 2, 1)),  # the first row sees one key more
        (Window(128, 128), 4, (1024, 1024, 384, 128), Visits(5, 1, 1, 1)),
        (Window(128, 128), 0, (1024, 1024, 256, 0), Visits(1, 1)),  # nothing is cut off at the left yet
        (Window(128, 128), 4, (1024, 1024, 10, 0), Visits(2, 0, 2, 3)),  # narrower than a tile: no body
        (Window(128, 64), 1, (256, 256, 0, 0), Visits(2, 0, 2, 2)),  # every query its own key
        (Window(128, 128), 0, (900, 100, 50, 0), Visits(1, 1)),  # no row of the tile sees a key
        (Window(128, 128), 1, (256, 1000, 110, 900), Visits(3, 1, 2, 5)),  # the right side reaches the tail
        (Window(128, 128), 7, (1024, 1024, -100, 127), Visits(1, 0, 1, 7)),  # most rows see no key
    ],
)
def test_visits_by_hand(domain, q_tile, bounds, expected):
    assert domain.visits(q_tile, Bounds(*bounds)) == expected


def test_the_left_edge_comes_last():
    window = Window(128, 128)
    visits = window.visits(6, Bounds(1024, 1024, left=384, right=0))
    assert visits == Visits(total=4, right=1, left=1, first=3)
    assert [window.tile(visits, position) for position in range(4)] == [4, 5, 6, 3]
    assert sections(visits) == [Section.BODY, Section.BODY, Section.RIGHT, Section.LEFT]
    assert [Causal(128, 128).tile(Visits(3, 1), position) for position in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("domain", "q_tile", "bounds", "right", "order"),
    [
        (Causal(128, 64, True), 1, (256, 256), 2, [3, 2, 1, 0]),
        (Causal(128, 64, True), 1, (512, 512, 0, 256), 6, [7, 6, 5, 4, 3, 2, 1, 0]),  # who sees far ahead
        (Dense(128, 64, True), 1, (384, 384), 2, [3, 2, 1, 0, 5, 4]),
        (Dense(128, 64, True), 1, (384, 382), 4, [3, 2, 1, 5, 0, 4]),  # the own keys lie in a third tile, and a tail
        (Dense(128, 128, True), 0, (384, 384), 1, [0, 2, 1]),
        (Dense(128, 128, True), 2, (384, 100), 1, [0]),  # the own keys lie where there are none
        (Dense(128, 128, True), 0, (128, 512), 1, [3, 2, 1, 0]),
        (Window(128, 128, True), 6, (1024, 1024, 384, 0), 1, [6, 5, 4, 3]),
        (Window(128, 128, True), 4, (1024, 1024, 384, 256), 3, [6, 5, 4, 3, 2, 1]),
    ],
)
def test_from_nearest_by_hand(domain, q_tile, bounds, right, order):
    visits = domain.visits(q_tile, Bounds(*bounds))
    assert [domain.tile(visits, position) for position in range(visits.total)] == order and visits.right == right
