"""The block configs: the table fits its chip, and what does not fit is refused for the right reason."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, asdict, replace

import pytest

from schedules.domain import DOMAINS
from schedules.scores import SCORES
from schedules.tiling import (
    CHIPS,
    ONES,
    PAGED_TABLES,
    TABLES,
    BlockConfig,
    CopyConfig,
    Extent,
    TmemConfig,
    choose,
    config_of,
    for_pages,
    predicted_us,
    rivals,
    rows,
    tunable,
)

ROWS = [(arch, row) for arch, table in TABLES.items() for row in table]
BASE = BlockConfig(
    128, tile_n=128, stages=2, q_stages=2, consumers=2, producer_registers=24, consumer_registers=240
)  # fmt: skip
CHIP = CHIPS["sm_90a"]
DIMS = [(arch, d) for arch, table in TABLES.items() for d in range(8, table[-1].config.head_dim + 1, 8)]


@pytest.mark.parametrize(("arch", "row"), ROWS, ids=lambda x: x if isinstance(x, str) else str(x.config.head_dim))
def test_the_table_fits_its_chip(arch, row):
    assert row.config.check(CHIPS[arch]) is None
    assert len(row.reason) > 20


@pytest.mark.parametrize("arch", TABLES)
def test_the_table_is_sorted_and_reaches_as_far_as_accumulators_fit(arch):
    dims = [row.config.head_dim for row in TABLES[arch]]
    assert dims == sorted(dims) and dims[-1] == (128 if CHIPS[arch].tmem_columns else 256)
    assert len({row.config for row in TABLES[arch]}) == len(dims)


@pytest.mark.parametrize(("arch", "head_dim"), DIMS)
def test_choose_takes_the_narrowest_that_is_wide_enough(arch, head_dim):
    wide_enough = [row.config for row in TABLES[arch] if row.config.value_dim >= head_dim]
    narrowest = min(wide_enough, key=lambda config: config.head_dim)
    assert choose(head_dim, arch) == narrowest
    assert [row.config for row in rows(head_dim, arch)] == [c for c in wide_enough if c.head_dim == narrowest.head_dim]


@pytest.mark.parametrize(("arch", "head_dim"), DIMS)
def test_choose_takes_the_narrowest_that_both_head_dims_fit_in(arch, head_dim):
    for head_dim_v in (d for name, d in DIMS if name == arch):
        chosen = choose(head_dim, arch, head_dim_v=head_dim_v)
        assert chosen.head_dim >= head_dim and chosen.value_dim >= head_dim_v
        for other in (row.config for row in TABLES[arch]):
            if other.head_dim >= head_dim and other.value_dim >= head_dim_v:
                assert other.head_dim + other.value_dim >= chosen.head_dim + chosen.value_dim
        alike = [row.config for row in rows(head_dim, arch, head_dim_v)]
        assert {(config.head_dim, config.value_dim) for config in alike} == {(chosen.head_dim, chosen.value_dim)}


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dims"),
    [
        (192, 128, "d192v128"),
        (136, 8, "d192v128"),
        (192, 192, "d192"),
        (192, 136, "d192"),
        (128, 192, "d192"),
        (128, 64, "d128"),
        (64, 72, "d96"),
        (200, 128, "d256"),
    ],
)
def test_v_of_a_head_dim_of_its_own(head_dim, head_dim_v, dims):
    assert choose(head_dim, "sm_90a", head_dim_v=head_dim_v).dims == dims


def test_rows_of_192_and_128_store_o_through_v_and_are_taken_by_lse():
    ones, exact = rows(192, "sm_90a", 128)
    extent = Extent("causal", 4096, 4096, 128, 132)
    assert choose(192, "sm_90a", extent, 128) == ones.config and ones.config.ones == ONES
    assert choose(192, "sm_90a", replace(extent, lse=True), 128) == exact.config and exact.config.ones == 0
    for row in (ones, exact):
        assert row.config.lends and row.config.check(CHIP) is None
        wider = replace(row.config, tile_n=row.config.tile_n + 16)
        assert wider.check(CHIP) is not None, "the widest tile_n that fits"
        assert row.config.smem_bytes() < replace(row.config, head_dim_v=0).smem_bytes()
    assert {row.config.value_dim for row in rows(192, "sm_90a")} == {192}


def test_choose_refuses_a_head_dim_past_the_table():
    with pytest.raises(LookupError, match="no block config of sm_90a holds head dims 264 and 264"):
        choose(264, "sm_90a")
    with pytest.raises(LookupError, match="no block config of sm_90a holds head dims 64 and 264"):
        choose(64, "sm_90a", head_dim_v=264)
    with pytest.raises(LookupError, match="no block config of sm_100a holds head dims 136 and 136"):
        choose(136, "sm_100a")
    with pytest.raises(LookupError, match="no block config of sm_100a holds head dims 64 and 64"):
        rows(64, "sm_100a", paged=True)


@pytest.mark.parametrize("arch", [arch for arch in TABLES if not tunable(arch)])
@pytest.mark.parametrize("score", SCORES)
def test_with_tensor_memory_a_head_dim_has_one_kernel_for_every_call(arch, score):
    for row in TABLES[arch]:
        assert isinstance(row.config, TmemConfig) and row.config.exact and row.cost is None
        assert all(rivals(row.config.head_dim, arch, lse) == (row,) for lse in (False, True))
        for lse in (False, True):
            extent = replace(suite(row.config.head_dim, "causal", 1024), lse=lse)
            assert choose(row.config.head_dim, arch, extent, score=score) == row.config
            assert row.config.serves(lse) and row.config.holds(score)
        assert row.config.takes(0) and not row.config.takes(16) and for_pages(row.config) == row.config
        assert row.config.registers == (40, 72, 200) and row.config.scores_per_thread == 128


def test_fields_say_which_kind_a_config_is_of():
    every = [row.config for table in (*TABLES.values(), *PAGED_TABLES.values()) for row in table]
    assert all(config_of(asdict(config)) == config for config in every)
    for fields in ({}, asdict(CopyConfig()), asdict(BASE) | {"lanes": 3}):
        with pytest.raises(ValueError, match="no kind of block config has the fields"):
            config_of(fields)


def suite(head_dim: int, mask: str, seqlen: int) -> Extent:
    """B x S = 16k and H x D = 2048, on an H200. A window has 4096 keys and the query's own."""
    left = 4096 if mask == "window" else 0
    return Extent(mask, seqlen, seqlen, max(1, 16384 // seqlen) * 2048 // head_dim, 132, left=left)


def tile(head_dim: int, extent: Extent) -> tuple[int, int]:
    config = choose(head_dim, "sm_90a", extent)
    return config.tile_m, config.tile_n


@pytest.mark.parametrize("arch", TABLES)
def test_rivals_have_costs_and_all_of_them_win_somewhere(arch):
    for head_dim, head_dim_v in sorted({(row.config.head_dim, row.config.value_dim) for row in TABLES[arch]}):
        for lse in (False, True):
            found = rivals(head_dim, arch, lse, head_dim_v)
            assert all((row.cost is not None) == (len(found) > 1) for row in found)
            lengths = [2**i + more for i in range(18) for more in (0, 1)]
            extents = [replace(suite(head_dim, mask, s), lse=lse) for mask in DOMAINS for s in lengths]
            assert {choose(head_dim, arch, extent, head_dim_v) for extent in extents} == {row.config for row in found}
            for mask in DOMAINS:
                long = replace(suite(head_dim, mask, 147_456), lse=lse)
                assert choose(head_dim, arch, long, head_dim_v) == found[0].config, "the one for long ones"


@pytest.mark.parametrize("arch", [arch for arch in TABLES if tunable(arch)])
def test_calls_that_want_lses_get_sums_in_float32_and_others_get_ones_where_they_fit(arch):
    for head_dim, head_dim_v in sorted({(row.config.head_dim, row.config.value_dim) for row in TABLES[arch]}):
        exact, others = (rivals(head_dim, arch, lse, head_dim_v) for lse in (True, False))
        assert all(row.config.ones == 0 and row.config.serves(lse=True) for row in exact)
        assert all(bool(row.config.ones) == (head_dim_v + ONES <= 256) for row in others)
        assert all(row.config.serves(lse=False) for row in (*exact, *others))
        assert {*exact, *others} == set(rows(head_dim, arch, head_dim_v))


@pytest.mark.parametrize(
    ("head_dim", "mask", "seqlen", "fastest"),  # as measured on an H200
    [
        (64, "dense", 256, (128, 128)),
        (64, "dense", 1024, (192, 128)),
        (64, "dense", 4096, (192, 128)),
        (64, "causal", 256, (128, 128)),
        (64, "causal", 512, (128, 128)),
        (64, "causal", 1024, (128, 128)),
        (64, "causal", 4096, (192, 128)),
        (128, "dense", 512, (128, 128)),
        (128, "dense", 513, (128, 112)),
        (128, "dense", 528, (128, 112)),
        (128, "dense", 592, (128, 128)),
        (128, "dense", 4096, (128, 128)),
        (128, "causal", 1024, (128, 128)),
        (256, "dense", 256, (128, 64)),
        (256, "dense", 512, (128, 64)),
        (256, "dense", 1024, (128, 80)),
        (256, "dense", 2048, (128, 80)),
        (256, "causal", 256, (128, 64)),
        (256, "causal", 512, (128, 64)),
        (256, "causal", 1024, (128, 64)),
        (256, "causal", 2048, (128, 64)),
    ],
)
def test_the_prediction_agrees_with_what_was_measured(head_dim, mask, seqlen, fastest):
    assert tile(head_dim, suite(head_dim, mask, seqlen)) == fastest


def test_few_heads_get_the_tile_that_ends_first():
    """With a multiprocessor for each work tile, the smaller one is done earlier, though it is slower per query."""
    assert tile(64, Extent("dense", 2048, 2048, 1, 132)) == (128, 128)
    assert tile(64, Extent("dense", 2048, 2048, 256, 132)) == (192, 128)


@pytest.mark.parametrize("name", ["seqlen_q", "seqlen_k", "heads", "multiprocessors"])
def test_sizes_that_are_none_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} is 0; a positive number"):
        replace(suite(64, "dense", 1024), **{name: 0})
    with pytest.raises(ValueError, match="mask is 'banded'; one of 'dense', 'causal', 'window'"):
        suite(64, "banded", 1024)


def test_a_window_costs_what_it_visits():
    """As much as without its left side if that cuts nothing off; 129 of 4096 keys leave 2 tiles of 128, of 1 to 32."""
    (row, *_) = rivals(128, "sm_90a", lse=False)
    causal, window = suite(128, "causal", 4096), suite(128, "window", 4096)
    assert row.config.tile_m == row.config.tile_n == 128 and row.cost
    assert predicted_us(row, window) == predicted_us(row, causal)
    assert predicted_us(row, replace(window, left=128)) < (row.cost.start + 2 * row.cost.tile) * 32 * 64 / 132
    assert predicted_us(row, replace(window, left=128)) < predicted_us(row, causal) / 4
    dense = suite(128, "dense", 4096)
    assert predicted_us(row, replace(dense, mask="window", left=4096, right=4095)) == predicted_us(row, dense)


def test_a_row_without_costs_predicts_nothing():
    (row,) = rivals(96, "sm_90a", lse=False)
    with pytest.raises(ValueError, match="no measured cost"):
        predicted_us(row, suite(96, "dense", 1024))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tile_n": 120}, "tile_n 120 is not a multiple of 16"),
        ({"tile_n": 0}, "tile_n 0 is not"),
        ({"stages": 0}, "0 stages of K and V and 2 of Q: each ring needs 1"),
        ({"q_stages": -1}, "2 stages of K and V and -1 of Q"),
        ({"q_stages": 1, "stages": 1}, "q_stages 1: .* 2 stages are needed, .* 64 keys at least; not 1 of 128"),
        ({"q_stages": 1, "stages": 3}, "q_stages 1: .* 2 stages are needed, .* 64 keys at least; not 3 of 128"),
        ({"q_stages": 1, "tile_n": 48}, "q_stages 1: .* 2 stages are needed, .* 64 keys at least; not 2 of 48"),
        ({"rescale_above": 8.5}, "rescale_above 8.5: 0 to 8"),
        ({"ones": 16}, "ones 16: 0, or 8 columns"),
        ({"head_dim": 256, "tile_n": 16, "ones": 8}, "head_dim 256 and 8 columns of ones are more than 256"),
        ({"rescale_above": -1.0}, "rescale_above -1.0"),
        ({"rescale_above": float("nan")}, "rescale_above nan"),
        ({"tile_n": 272}, "tile_n 272 is not .* to 256"),
        ({"head_dim": 72}, "head_dim 72 is not a multiple of 16"),
        ({"head_dim": 272}, "head_dim 272 is not .* to 256"),
        ({"head_dim_v": 72}, "head_dim_v 72 is not a multiple of 16 up to 256"),
        ({"head_dim_v": -16}, "head_dim_v -16 is not"),
        ({"head_dim_v": 272}, "head_dim_v 272 is not"),
        ({"head_dim_v": 144}, r"head_dim_v 144: O is wider than Q, and has no place over it \(q_stages 1\)"),
        ({"head_dim": 64, "head_dim_v": 256, "tile_n": 64, "q_stages": 1, "ones": 8}, "head_dim 256 and 8 columns"),
        ({"consumers": 0}, "0 consumer warpgroups"),
        ({"consumers": 4}, "4 consumer warpgroups"),
        ({"stages": 4}, r"328704 bytes of shared memory, sm_90a has 232448"),
        ({"producer_registers": 20}, "setmaxnreg 20"),
        ({"producer_registers": 16}, "setmaxnreg 16"),
        ({"consumer_registers": 236}, "setmaxnreg 236"),
        ({"consumer_registers": 256}, "setmaxnreg 256"),
        ({"q_stages": 4}, r"263168 bytes of shared memory, sm_90a has 232448"),
        ({"producer_registers": 32}, "setmaxnreg wants 512 registers .* launched with 504"),
        ({"consumers": 3, "stages": 1, "consumer_registers": 168}, "setmaxnreg wants 528 .* launched with 512"),
        ({"consumers": 3, "stages": 1, "consumer_registers": 160}, "S, P and O need 160 registers, 160 leave too few"),
        ({"tile_n": 176, "stages": 1, "consumer_registers": 216}, "S, P and O need 196 registers, 216 leave too few"),
    ],
)
def test_what_does_not_fit_is_refused(changes, reason):
    assert BASE.check(CHIP) is None
    found = replace(BASE, **changes).check(CHIP)
    assert found is not None and re.match(reason, found), found


def test_setmaxnreg_asks_for_no_more_than_the_launch_gives():
    """65536 registers are 170 a thread, of which a launch gives multiples of 8: 168 x 384, less than all of them."""
    assert replace(BASE, producer_registers=40, consumer_registers=232).check(CHIP) is None
    assert 128 * (32 + 2 * 240) == CHIP.registers and replace(BASE, producer_registers=32).check(CHIP) is not None


def test_shared_memory_is_three_rings_and_the_barriers():
    assert BASE.tile_m == 128 and BASE.threads == 384
    assert BASE.smem_bytes() == 2 * 128 * 128 * 2 + 2 * 2 * 128 * 128 * 2 + 1024
    assert replace(BASE, ones=8).smem_bytes() == BASE.smem_bytes() + 2 * 128 * 64 * 2, "a block of ones a slot"
    four = replace(BASE, head_dim=64, stages=4)
    assert replace(four, ones=8).smem_bytes() == four.smem_bytes() + 128 * 64 * 2, "one for all"


@pytest.mark.parametrize("row", TABLES["sm_90a"], ids=lambda row: str(row.config.head_dim))
def test_every_slot_of_v_reaches_ones_that_overlap_nothing(row):
    slots = row.config.value_slots
    starts = [slots.slot * stage + slots.block * i for stage in range(slots.stages) for i in range(slots.blocks)]
    taken = {*starts, *slots.ones_at()}
    assert len(taken) == len(starts) + len(slots.ones_at())
    assert all(at % slots.block == 0 and at + slots.block <= slots.bytes for at in taken)
    assert max(taken) + slots.block == slots.bytes
    if row.config.ones:
        reached = [slots.slot * stage + slots.leading(stage) * slots.blocks for stage in range(slots.stages)]
        assert {*reached} == {*slots.ones_at()}
    else:
        assert slots.ones_at() == []


def test_a_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        BASE.tile_n = 64
