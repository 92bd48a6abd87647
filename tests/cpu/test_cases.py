"""The shared list of cases covers what it promises, and each layout lies in memory as its name says."""

from __future__ import annotations

import itertools

import pytest

from schedules.tiling import SM90
from tests.cases import (
    ALIGNMENT,
    CASES,
    DTYPES,
    GROUPS,
    GROWING,
    HEAD_DIMS,
    LAYOUTS,
    PRIMES,
    SHARP,
    TILE_HEAD_DIMS,
    Case,
    around,
    every_case,
    inputs,
)

OUTS = ("given", "strided", "unaligned")


def test_the_list_is_long_fixed_and_without_repetition() -> None:
    assert every_case() == CASES
    assert len(CASES) >= 400
    assert len({(c.shapes, c.causal, c.dtype) for c in CASES}) >= 400
    names = [c.name for c in (*CASES, *SHARP, *GROWING)]
    assert len(set(names)) == len(names)


def test_every_corner_is_hit() -> None:
    assert {(c.head_dim, c.dtype, c.causal) for c in CASES} == set(itertools.product(HEAD_DIMS, DTYPES, (False, True)))
    assert {c.heads_q // c.heads_kv for c in CASES} >= set(GROUPS)
    assert {c.batch for c in CASES} == {0, 1, 2, 3}
    assert {(c.layout, c.dtype, c.causal) for c in CASES} == set(itertools.product(LAYOUTS, DTYPES, (False, True)))
    assert {c.offset for c in CASES if c.layout == "offset"} == set(range(1, ALIGNMENT + 1))
    assert {(c.out, c.return_lse) for c in CASES} == set(itertools.product(("new", *OUTS), (False, True)))
    assert {c.scale is None for c in CASES} == {False, True}
    assert {c.seqlen_q for c in CASES} & set(PRIMES) and {c.seqlen_k for c in CASES} & set(PRIMES)
    for causal in (False, True):
        assert {(c.seqlen_q > c.seqlen_k) - (c.seqlen_q < c.seqlen_k) for c in CASES if c.causal == causal} == {
            -1,
            0,
            1,
        }


@pytest.mark.parametrize("tile", TILE_HEAD_DIMS)
def test_lengths_around_every_tile_meet_in_all_combinations(tile: int) -> None:
    low, high = TILE_HEAD_DIMS[tile]
    found = {(c.seqlen_q, c.seqlen_k, c.causal) for c in CASES if low <= c.head_dim <= high}
    assert found >= set(itertools.product(around(tile), around(tile), (False, True)))


def test_tiles_of_the_block_configs_are_among_those_covered() -> None:
    used = {row.config.tile_m for row in SM90} | {row.config.tile_n for row in SM90}
    assert used <= set(TILE_HEAD_DIMS), "a block config has a tile length that no case is drawn around"


def _case(layout: str, offset: int = 0) -> Case:
    return Case(2, 5, 5 if layout == "packed_qkv" else 7, 4, 2, 24, layout=layout, offset=offset)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_have_the_shapes_and_dtype_of_the_case(layout: str) -> None:
    for dtype in DTYPES:
        case = Case(2, 5, 5 if layout == "packed_qkv" else 7, 4, 2, 24, dtype, layout=layout)
        q, k, v = inputs(case, "cpu")
        assert (q.shape, k.shape, v.shape) == (case.shapes[0], case.shapes[1], case.shapes[1])
        for x in (q, k, v):
            assert x.dtype == DTYPES[dtype] and x.stride(3) == 1
            assert 0.5 < x.double().std() < 1.5


def test_layouts_lie_in_memory_as_they_say() -> None:
    q, k, v = inputs(_case("slice"), "cpu")
    assert not q.is_contiguous() and all(s % ALIGNMENT == 0 for s in q.stride()[:3])
    assert q.storage_offset() % ALIGNMENT == 0 and q.storage_offset() > 0
    q, k, v = inputs(_case("bhsd"), "cpu")
    assert q.transpose(1, 2).is_contiguous()
    q, k, v = inputs(_case("sbhd"), "cpu")
    assert k.transpose(0, 1).is_contiguous()
    q, k, v = inputs(_case("odd_rows"), "cpu")
    assert q.stride(2) == 25
    for offset in range(1, ALIGNMENT + 1):
        q, k, v = inputs(_case("offset", offset), "cpu")
        assert (v.data_ptr() % 16 == 0) == (offset == ALIGNMENT)
    q, k, v = inputs(_case("packed_qkv"), "cpu")
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    q, k, v = inputs(_case("packed_kv"), "cpu")
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() != q.untyped_storage().data_ptr()
    q, k, v = inputs(_case("expanded"), "cpu")
    assert k.stride(0) == v.stride(0) == 0 and q.stride(0) > 0


def test_gain_and_ramp_scale_q_and_k() -> None:
    plain = Case(1, 64, 64, 2, 2, 64)
    loud = Case(1, 64, 64, 2, 2, 64, q_gain=8.0, k_ramp=(0.25, 16.0))
    q, k, _ = inputs(plain, "cpu")
    loud_q, loud_k, _ = inputs(loud, "cpu")
    assert 7 < loud_q.std() / q.std() < 9
    assert 0.2 < loud_k[0, 0].std() < 0.35 and 13 < loud_k[0, -1].std() < 19
