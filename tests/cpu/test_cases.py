"""The shared list of cases covers what it promises, and each layout lies in memory as its name says."""

from __future__ import annotations

import itertools

import pytest
import torch

from schedules.tiling import TABLES
from tests.cases import (
    ALIGNMENT,
    CASES,
    DTYPES,
    GROUPS,
    GROWING,
    HEAD_DIMS,
    LAYOUTS,
    PRIMES,
    RAGGED,
    SHARP,
    TILE_HEAD_DIMS,
    Case,
    around,
    every_case,
    inputs,
    lengths,
    options,
    outside,
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
    every = [row.config for table in TABLES.values() for row in table]
    used = {config.tile_m for config in every} | {config.tile_n for config in every}
    assert used <= set(TILE_HEAD_DIMS), "a block config has a tile length that no case is drawn around"


def _case(layout: str, offset: int = 0) -> Case:
    return Case(2, 5, 5 if layout == "packed_qkv" else 7, 4, 2, 24, layout=layout, offset=offset)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_have_the_shapes_and_dtype_of_the_case(layout: str) -> None:
    for dtype in DTYPES:
        case = Case(2, 5, 5 if layout == "packed_qkv" else 7, 4, 2, 24, dtype, layout=layout)
        q, k, v = inputs(case, "cpu")
        assert (q.shape, k.shape, v.shape) == case.shapes[:3]
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


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("batch", [1, 2, 5])
def test_sequences_lie_apart_and_what_is_of_none_holds_nan(ragged: str, batch: int) -> None:
    for seqlen_q, seqlen_k in itertools.product((1, 40, 90), repeat=2):
        case = Case(batch, seqlen_q, seqlen_k, 4, 2, 8, ragged=ragged)
        assert lengths(case) == lengths(case), "drawn, the same every time"
        rows, given, parts = lengths(case)
        assert len(parts) == batch and [part.entry for part in parts] == [0 if case.packed else b for b in range(batch)]
        for which, x in zip("qkv", inputs(case, "cpu"), strict=True):
            assert x.shape == case.shapes["qkv".index(which)] and x.dim() == 4 - case.packed
            which = which.replace("v", "k")
            spans = [(part.entry, part.queries if which == "q" else part.keys) for part in parts]
            times = torch.zeros(1 if case.packed else batch, rows["qk".index(which)], dtype=torch.int64)
            for entry, span in spans:
                assert 0 <= span.start <= span.stop <= times.shape[1]
                times[entry, span] += 1
            assert (times <= 1).all(), "no row is of two sequences"
            nobodys = outside(case, which)
            assert torch.equal(nobodys, (times[0] if case.packed else times) == 0)
            assert x[nobodys].isnan().all() and x[~nobodys].isfinite().all()
            cu, used = given.get(f"cu_seqlens_{which}"), given.get(f"seqused_{which}")
            starts = [0] * batch if cu is None else cu[:-1]
            whole = [rows["qk".index(which)]] * batch if cu is None else [b - a for a, b in itertools.pairwise(cu)]
            assert [span.start for _, span in spans] == starts
            assert [span.stop - span.start for _, span in spans] == (whole if used is None else used)
            assert all(use <= size for use, size in zip(used or whole, whole, strict=True))
        names = {
            name for name, x in options(case, "cpu").items() if isinstance(x, torch.Tensor) and x.dtype == torch.int32
        }
        assert names == set(given) and len(names) == {"used_q": 1, "used_k": 1, "packed_used": 4}.get(ragged, 2)


def test_ragged_cases_meet_every_kind_of_length() -> None:
    cases = [Case(5, 40, 40 + i, 4, 2, 8, ragged=ragged) for ragged in RAGGED for i in range(20)]
    sizes = {kind: set() for kind in RAGGED}
    for case in cases:
        (rows_q, _), given, parts = lengths(case)
        for part in parts:
            sizes[case.ragged] |= {part.queries.stop - part.queries.start, part.keys.stop - part.keys.start}
        if case.packed:
            sizes[case.ragged] |= {f"before {given['cu_seqlens_q'][0]}", f"behind {rows_q - given['cu_seqlens_q'][-1]}"}
    for kind, found in sizes.items():
        assert 40 in found and len(found) > 20
        if kind.startswith("packed"):
            assert {0, 1, "before 0", "before 70", "behind 0", "behind 70"} <= found
