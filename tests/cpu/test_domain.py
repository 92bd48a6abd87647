"""The domain policies against brute-force masks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedules.domain import DOMAINS, Causal, Dense

LENGTHS = st.integers(1, 300)
TILES_M = st.sampled_from([1, 3, 16, 64, 128, 192])
TILES_N = st.sampled_from([1, 7, 16, 48, 80, 112, 128, 176])


def mask(causal: bool, seqlen_q: int, seqlen_k: int) -> np.ndarray:
    """Who sees whom, bool [Sq, Sk], written down from the definition: bottom-right aligned."""
    query, key = np.indices((seqlen_q, seqlen_k))
    return key + seqlen_q <= query + seqlen_k if causal else np.ones((seqlen_q, seqlen_k), bool)


@settings(max_examples=1500)
@given(st.booleans(), LENGTHS, LENGTHS, TILES_M, TILES_N, st.data())
def test_visits_cover_the_mask_and_the_body_needs_none(causal, seqlen_q, seqlen_k, tile_m, tile_n, data):
    q_tile = data.draw(st.integers(0, (seqlen_q - 1) // tile_m))
    seen = mask(causal, seqlen_q, seqlen_k)[q_tile * tile_m : (q_tile + 1) * tile_m]
    total, masked = DOMAINS["causal" if causal else "dense"](tile_m, tile_n).visits(q_tile, seqlen_q, seqlen_k)

    tiles = [seen[:, start : start + tile_n] for start in range(0, seqlen_k, tile_n)]
    needed = [bool(tile.any()) for tile in tiles]
    whole = [tile.shape[1] == tile_n and bool(tile.all()) for tile in tiles]
    assert total == max(1, sum(needed)), "tiles that somebody sees, and no other, are visited"
    assert not any(needed[total:]), "and they are the first ones"
    assert 0 <= masked <= total
    assert all(whole[: total - masked]), "every row sees a body tile whole"
    assert masked == total - sum(whole[:total]), "a tile that every row sees whole is in the body"
    assert causal or masked <= 1, "a dense problem has one masked tile at most, whatever its lengths"


@settings(max_examples=1500)
@given(st.booleans(), LENGTHS, LENGTHS)
def test_hi_is_one_past_the_last_visible_key(causal, seqlen_q, seqlen_k):
    domain = DOMAINS["causal" if causal else "dense"](64, 64)
    hi = np.array([domain.hi(row, seqlen_q, seqlen_k) for row in range(seqlen_q)])
    assert (np.arange(seqlen_k) < hi[:, None]).tolist() == mask(causal, seqlen_q, seqlen_k).tolist()


@pytest.mark.parametrize(
    ("domain", "q_tile", "lengths", "expected"),
    [
        (Dense(128, 128), 0, (1, 1), (1, 1)),
        (Dense(128, 128), 0, (1, 128), (1, 0)),
        (Dense(128, 128), 0, (1, 129), (2, 1)),
        (Dense(128, 176), 0, (147_600, 147_600), (839, 1)),
        (Causal(128, 128), 0, (256, 256), (1, 1)),  # the diagonal tile alone
        (Causal(128, 128), 1, (256, 256), (2, 1)),
        (Causal(128, 64), 1, (256, 256), (4, 2)),  # the diagonal crosses two tiles
        (Causal(128, 128), 0, (300, 100), (1, 1)),  # no row of the tile sees a key
        (Causal(128, 128), 0, (1, 1000), (8, 1)),  # one query at the end sees everything
    ],
)
def test_visits_by_hand(domain, q_tile, lengths, expected):
    assert domain.visits(q_tile, *lengths) == expected
