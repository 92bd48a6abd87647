"""Every kernel of the chip as machine code: no spills, no stack, no mask in the body loop, and no growth unnoticed."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from fmha import problem
from fmha.jit import compile, report, sass
from fmha.jit.report import Report
from fmha.problem import Problem, Variant
from perf import resources
from schedules.domain import DOMAINS
from schedules.tiling import BlockConfig, choose, rivals

VARIANTS = resources.variants()
TOO_FEW_REGISTERS = BlockConfig(
    head_dim=64, tile_n=128, stages=4, q_stages=2, consumers=3, producer_registers=32, consumer_registers=104
)


@pytest.fixture(scope="module")
def committed() -> dict[str, Report]:
    return resources.load()


@pytest.fixture(scope="module")
def spilling_cubin() -> bytes:
    dense = Problem("bfloat16", TOO_FEW_REGISTERS.head_dim, "dense")
    return compile.cubin(compile.compile_object(dense, TOO_FEW_REGISTERS, resources.ARCH))


def test_names_tell_variants_apart() -> None:
    every = problem.variants(resources.ARCH)
    names = {report.name(variant, resources.ARCH): variant for variant in every}
    assert len(names) == len(every)
    assert names["sm_90a-d192v128-window-fp16"].config == choose(192, resources.ARCH, head_dim_v=128)
    assert names["sm_90a-d192-causal-bf16"].config == choose(192, resources.ARCH)
    (exact,) = rivals(192, resources.ARCH, True, 128)
    assert names["sm_90a-d192v128-dense-bf16-lse"].config == exact.config


def test_the_table_has_every_variant_and_no_other(committed: dict[str, Report]) -> None:
    assert list(committed) == list(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_compiles_to_what_the_table_allows(name: str, committed: dict[str, Report]) -> None:
    mask, config = VARIANTS[name].problem.mask, VARIANTS[name].config
    measured = resources.measure([name])[name]
    assert resources.objections(name, measured, committed.get(name), config) == []
    # What the reader of the machine code should find in any forward kernel: two MMAs, of tile_n and value_dim columns,
    # 16 deep, an exponential and an FMA a score and half a conversion; and without ones, a maximum and an addition.
    scores = config.tile_n // 2
    assert measured.body_kinds["mma"] == config.head_dim // 16 + config.tile_n // 16
    assert measured.body_kinds["ex2"] == scores
    assert measured.body_kinds["convert"] == scores // 2
    if config.ones:
        assert measured.body_kinds.get("max", 0) <= 1 and measured.body_kinds["fma"] == scores
    else:
        assert scores <= measured.body_kinds["max"] <= scores + 8
        assert 2 * scores <= measured.body_kinds["fma"] <= 2 * scores + 4
    assert len(measured.masked) == len(DOMAINS[mask].sections) - 1  # each section but the body
    assert all(masked > measured.body + scores for masked in measured.masked)  # a select a score, and its compare


def ragged() -> dict[str, Variant]:
    """Every block config once for sequences with lengths of their own, and every mask with one of them."""
    found = problem.variants(resources.ARCH, ragged=(True,))
    return {
        report.name(variant, resources.ARCH): variant
        for variant in found
        if variant.problem.dtype == "bfloat16" and (variant.problem.mask == "causal" or variant.config.head_dim == 128)
    }


def scored() -> dict[str, Variant]:
    """What is done to scores, with the masks that differ most and the block configs for long sequences."""
    found = problem.variants(resources.ARCH, ("softcap", "alibi", "both"))
    return {
        report.name(variant, resources.ARCH): variant
        for variant in found
        if variant.problem.dtype == "bfloat16"
        and variant.problem.mask == ("causal" if variant.config.tile_m == 128 else "window")
    }


@pytest.mark.parametrize(("name", "variant"), ragged().items(), ids=list(ragged()))
def test_a_ragged_body_is_that_of_equal_lengths(name: str, variant: Variant, committed: dict[str, Report]) -> None:
    """Lengths and their list cost the loop over KV tiles nothing."""
    equal = variant._replace(problem=dataclasses.replace(variant.problem, ragged=False))
    old = committed[report.name(equal, resources.ARCH)]
    assert resources.objections(name, report.of_variant(variant, resources.ARCH), old, variant.config) == []


@pytest.mark.parametrize("mask", DOMAINS)
def test_a_body_is_that_of_the_dense_mask(mask: str, committed: dict[str, Report]) -> None:
    for name, variant in VARIANTS.items():
        dense = variant._replace(problem=dataclasses.replace(variant.problem, mask="dense"))
        if variant.problem.mask == mask:
            most = math.ceil(committed[report.name(dense, resources.ARCH)].body * resources.GROWTH)
            assert committed[name].body <= most


@pytest.mark.parametrize(("name", "variant"), scored().items(), ids=list(scored()))
def test_what_is_done_to_scores_spills_nothing(name: str, variant: Variant, committed: dict[str, Report]) -> None:
    """And masks nothing in the body: ALiBi picks the sign of its slope, once a tile."""
    plain = variant._replace(problem=dataclasses.replace(variant.problem, score="plain"))
    old, new = committed[report.name(plain, resources.ARCH)], report.of_variant(variant, resources.ARCH)
    assert not new.spills and not new.stack_bytes
    assert new.body_kinds.get("select", 0) <= ("softcap" != variant.problem.score)
    assert new.setmaxnreg == old.setmaxnreg and new.body > old.body


def test_the_whole_table_is_named() -> None:
    every = problem.every_variant(resources.ARCH)
    assert len({report.name(variant, resources.ARCH) for variant in every}) == len(every)
    assert set(problem.variants(resources.ARCH)) < set(every)


@pytest.mark.parametrize("lse", [False, True])
def test_float16_costs_the_same(lse: bool, committed: dict[str, Report]) -> None:
    bfloat16 = Variant(Problem("bfloat16", 128, "dense"), rivals(128, resources.ARCH, lse)[0].config)
    float16 = bfloat16._replace(problem=dataclasses.replace(bfloat16.problem, dtype="float16"))
    measured = report.of_variant(float16, resources.ARCH)
    assert resources.objections("float16", measured, committed[report.name(bfloat16, resources.ARCH)]) == []


# -- the check itself must be able to fail -----------------------------------------------------------------------------


def test_it_objects_to_a_real_spill(spilling_cubin: bytes) -> None:
    found = sass.read(spilling_cubin)
    assert found.local_loads > 0 and found.local_stores > 0 and found.stack_bytes > 0
    measured = report.of_cubin(spilling_cubin, TOO_FEW_REGISTERS)
    said = "\n".join(resources.objections("spilling", measured, measured, TOO_FEW_REGISTERS))
    assert f"{found.local_loads} local loads, {found.local_stores} local stores" in said
    assert f"{found.stack_bytes} bytes of stack" in said
    assert measured.body_kinds["local"] > 0


def test_the_command_fails_on_a_spill(
    spilling_cubin: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "spilling.cubin"
    path.write_bytes(spilling_cubin)
    assert resources.main([str(path)]) == 1
    assert "local loads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"local_loads": 1}, "spills: 1 local loads"),
        ({"local_stores": 1}, "1 local stores"),
        ({"stack_bytes": 8}, "8 bytes of stack"),
        ({"body_kinds": {"select": 64}}, "masks: 64 selects"),
        ({"early_retire": True}, "waits for every MMA before its first exponential"),
        ({"body_waits": ((1, 0, 0), (0, 0, 0), (0, 4, 17))}, "waits for MMAs 3 times, not twice"),
        ({"setmaxnreg": (24, 232)}, "setmaxnreg"),
        ({"body": 409}, "grew from 400 to 409"),
        ({"body_waits": ((1, 0, 0), (0, 0, 3))}, "waits for PV after 3 exponentials, not 17"),
    ],
)
def test_it_objects_to(change: dict[str, object], words: str, committed: dict[str, Report]) -> None:
    name = "sm_90a-d128-dense-bf16"
    config = choose(128, resources.ARCH)
    good = dataclasses.replace(committed[name], body=400)
    assert resources.objections(name, good, good, config) == []
    assert resources.objections(name, dataclasses.replace(good, body=408), good, config) == []  # 2%
    said = resources.objections(name, dataclasses.replace(good, **change), good, config)
    assert len(said) == 1 and words in said[0] and said[0].startswith(name)


def test_it_objects_to_a_variant_that_the_table_lacks(committed: dict[str, Report]) -> None:
    name, row = next(iter(committed.items()))
    assert "--update" in resources.objections(name, row, None)[0]


def test_the_table_survives_writing_and_reading(committed: dict[str, Report], tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(resources.dump(committed))
    assert resources.load(path) == committed
    assert len(json.loads(path.read_text())["variants"]) == len(committed)


def test_a_folder_without_manifest_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert resources.main(["--compare", str(tmp_path)]) == 2
    assert "manifest.json" in capsys.readouterr().err
