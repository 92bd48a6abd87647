"""Every kernel of the chip as machine code: no spills, no stack, no mask in the body loop, and no growth unnoticed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fmha.jit import compile, report, sass
from fmha.jit.report import Report
from fmha.problem import Problem, Variant
from perf import resources
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
    problem = Problem("bfloat16", TOO_FEW_REGISTERS.head_dim, "dense")
    return compile.cubin(compile.compile_object(problem, TOO_FEW_REGISTERS, resources.ARCH))


def test_the_table_has_every_variant_and_no_other(committed: dict[str, Report]) -> None:
    assert list(committed) == list(VARIANTS)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_compiles_to_what_the_table_allows(name: str, committed: dict[str, Report]) -> None:
    problem, config = VARIANTS[name]
    measured = resources.measure([name])[name]
    assert resources.objections(name, measured, committed.get(name), config) == []
    # What the reader of the machine code should find in any forward kernel: two MMAs, of tile_n and head_dim columns,
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
    assert len(measured.masked) == 1
    assert all(masked > measured.body + scores for masked in measured.masked)  # a select a score, and its compare


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
