"""Blackwell on paper: machine code as the committed table has it, the model's arithmetic, and the page made of both."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from pathlib import Path

import pytest

from fmha.jit import compile, sass
from perf import blackwell, blackwell_model, peers_blackwell
from perf.blackwell_model import Kernel, Problem, Stages, busy, duration, mma, peak, pipes, predict, stages
from perf.peers_blackwell import Code, Row

COMMITTED = peers_blackwell.load()
OURS = peers_blackwell.ours()
COMPILED = ("fmha-d64-dense", "fmha-d128-causal")  # by these tests; the others are as likely to have grown


@functools.cache
def cubin(name: str) -> bytes:
    return compile.cubin(compile.compile_object(*OURS[name], peers_blackwell.ARCH))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kernel.cubin"


# -- machine code ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPILED)
def test_a_kernel_compiles_to_what_the_table_allows_and_its_roles_are_found(name: str, path: Path) -> None:
    path.write_bytes(cubin(name))
    row, config = peers_blackwell.read(path, ours=True), OURS[name][1]
    assert peers_blackwell.objections(name, row, COMMITTED[name]) == []
    steps = 2 * (config.head_dim // 16 + config.tile_n // 16)  # QK and PV of both Q tiles
    assert row.roles["multiply"].opcodes["UTCHMMA"] == steps
    assert "LDTM" in row.roles["correct"].opcodes and "LDTM" not in row.roles["watch"].opcodes
    assert row.roles["load"].opcodes["UTMALDG"] and "UTCHMMA" not in row.roles["load"].opcodes
    assert row.softmax_registers == config.softmax_registers


def test_loops_are_read_as_they_are_and_those_of_other_tiles_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(cubin(COMPILED[0]))
    found, row = sass.read(path), COMMITTED[COMPILED[0]]
    assert row.body.instructions == found.body.common == sum(row.body.opcodes.values())
    assert row.body.kinds == {kind: n for kind, n in found.body.kinds.items() if n}
    assert [code.instructions for code in row.masked] == [loop.common for loop in found.masked]
    monkeypatch.setattr(peers_blackwell, "TILE", 64)
    with pytest.raises(ValueError, match="128 scores a thread, not 64"):
        peers_blackwell.read(path)


def test_the_table_has_every_kernel_and_no_other() -> None:
    left_out = set(peers_blackwell.head()["left_out"])
    assert list(COMMITTED) == [*OURS, *(name for name in peers_blackwell.kernels() if name not in left_out)]
    assert {"fa4-d128-dense", "cutlass-d128-dense", "flashinfer-d128-dense"} <= set(COMMITTED)


@pytest.mark.parametrize("name", OURS)
def test_ours_spill_nothing_and_mask_outside_of_the_body(name: str) -> None:
    row = COMMITTED[name]
    assert row.spills == row.stack_bytes == row.body_spills == 0
    assert row.body.kinds["ex2"] == 129 - OURS[name][1].polynomials <= 113
    assert row.keys == 128 and row.registers == 128
    assert row.body.kinds["select"] <= 1
    assert len(row.masked) == (2 if "window" in name else 1)


@pytest.mark.parametrize("mask", ["dense", "causal"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_ours_have_fewer_instructions_than_flash_attention_4(head_dim: int, mask: str) -> None:
    ours, theirs = COMMITTED[f"fmha-d{head_dim}-{mask}"], COMMITTED[f"fa4-d{head_dim}-{mask}"]
    assert ours.body.instructions < theirs.body.instructions
    assert theirs.keys == ours.keys == 128


def test_only_kernels_without_polynomial_have_fewer_instructions_than_ours() -> None:
    for name, row in COMMITTED.items():
        if row.body.instructions < COMMITTED["fmha-d128-dense"].body.instructions:
            assert row.body.kinds["ex2"] == 129, name


def grown(code: Code, by: float) -> Code:
    return dataclasses.replace(code, instructions=math.ceil(code.instructions * by))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda row: {"local_loads": 1}, "spills: 1 local loads"),
        (lambda row: {"local_stores": 2}, "2 local stores"),
        (lambda row: {"stack_bytes": 8}, "8 bytes"),
        (lambda row: {"body": grown(row.body, 1.03)}, "the body loop grew"),
        (lambda row: {"masked": tuple(grown(code, 1.03) for code in row.masked)}, "the masked loop grew"),
        (lambda row: {"body": kind(row.body, "select", 2)}, "masks: 2 selects"),
        (lambda row: {"body": kind(row.body, "ex2", 129)}, "129 EX2, not 113"),
    ],
)
def test_it_objects_to(change, words: str) -> None:
    name = "fmha-d128-causal"
    good = COMMITTED[name]
    assert peers_blackwell.objections(name, good, good) == []
    assert peers_blackwell.objections(name, dataclasses.replace(good, body=grown(good.body, 1.015)), good) == []
    said = peers_blackwell.objections(name, dataclasses.replace(good, **change(good)), good)
    assert len(said) == 1 and words in said[0] and said[0].startswith(name)
    assert "not in the table" in peers_blackwell.objections(name, good, None)[0]


def kind(code: Code, name: str, count: int) -> Code:
    return dataclasses.replace(code, kinds={**code.kinds, name: count})


def test_the_table_survives_writing_and_reading(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(peers_blackwell.dump({"a": "1"}, COMMITTED, {"b": "why"}))
    assert peers_blackwell.load(path) == COMMITTED
    assert peers_blackwell.head(path)["packages"] == {"a": "1"} and peers_blackwell.head(path)["left_out"]


def test_a_kernel_that_does_not_compile_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No module named"):
        peers_blackwell.compile_peer("flashinfer-d128-dense", [tmp_path])


# -- the model ---------------------------------------------------------------------------------------------------------

LOOP = Code(8, Counter(MUFU=3, FFMA2=2, FMNMX3=1, NOP=1, FADD=1), {"ex2": 3, "fma": 3, "max": 1, "other": 1})


def test_pipes_by_hand() -> None:
    assert pipes(LOOP) == {"MUFU": 3 * 2, "FMA": (2 * 2 + 1) / 4, "ALU": 1 / 2, "issue": 8 / 4}


def test_an_mma_of_128_by_128_by_16_takes_64_cycles() -> None:
    assert mma(16) == 64 and mma(128) == 512
    assert peak(1) == 148 * 8192


def test_busy_cycles_of_a_tile_by_hand() -> None:
    row = dataclasses.replace(COMMITTED["fmha-d128-dense"], body=LOOP, roles={})
    found = busy(row, 128)
    assert found["tensor"] == 4 * 128 * 128 * 128 * 2 / 8192
    assert found["MUFU"] == 8 * 6 and found["issue"] == 8 * 2
    assert found["shared memory"] == (2 * 3 + 2) * 128 * 128 * 2 / 128  # Q, K and V for each Q tile; K and V written
    assert found["tensor memory"] == 256 * 128 * (4 + 2) / 512
    assert (
        busy(COMMITTED["fmha-d128-dense"], 128)["issue"]
        > busy(dataclasses.replace(COMMITTED["fmha-d128-dense"], roles={}), 128)["issue"]
    )


def test_stages_by_hand() -> None:
    assert stages(LOOP) == Stages(before=128 + 4 * 0.5, exponentials=4 * 6, after=128 * 128 * 2 / 512 / 2)


def kernel(**changes) -> Kernel:
    return dataclasses.replace(Kernel(512, Stages(100, 700, 0), Stages(300, 700, 0), 2048, 0, 50), **changes)


def test_a_short_chain_leaves_the_tensor_core_the_bound() -> None:
    assert kernel().period == 4 * 512
    assert kernel(mma=100, floor=0).period == 2 * 700, "the exponentials take turns"


def test_a_long_chain_is_the_bound() -> None:
    assert kernel(hop=200).period == 2 * 512 + 2 * 200 + 100 + 700
    assert kernel(floor=5000).period == 5000


def test_work_tiles_cost_what_their_tiles_do_and_a_start() -> None:
    slow = kernel(hop=200)
    assert duration(slow, 40, 0) - duration(slow, 30, 0) == 10 * slow.period
    assert duration(slow, 40, 0) > 40 * slow.period
    assert duration(slow, 20, 2) > duration(slow, 22, 0)


def test_predictions_share_the_work_out() -> None:
    one = kernel()
    full = Problem(128, "dense", 256, 1, 148)  # a work tile for each multiprocessor
    cycles = blackwell_model.LAUNCH + duration(one, 2, 0)
    assert predict(one, full).cycles == cycles and predict(one, full).balance == 1
    assert predict(one, full).share == pytest.approx(4 * 128 * 256**2 / 8192 / cycles)
    assert predict(one, full._replace(heads=149)).cycles == pytest.approx(cycles + duration(one, 2, 0))
    long = [predict(one, Problem(128, "dense", seqlen, 1, 16)).share for seqlen in (4096, 16384, 65536)]
    assert sorted(long) == long and long[-1] <= 4 * 512 / one.period


def test_no_prediction_exceeds_its_busiest_unit() -> None:
    for head_dim in blackwell.HEAD_DIMS:
        row = COMMITTED[f"fmha-d{head_dim}-dense"]
        found = busy(row, head_dim)
        share = predict(Kernel.of(row, head_dim, hop=0), Problem(head_dim, "dense", 32768, 1, 16)).share
        assert share < found["tensor"] / max(found.values())


def test_useful_work_is_counted_as_in_the_benchmarks() -> None:
    assert Problem(128, "dense", 1000, 2, 3).flops == 4 * 128 * 1000 * 1000 * 6
    assert Problem(128, "causal", 3, 1, 1).flops == 4 * 128 * 6


def test_published_figures_are_put_in_proportion() -> None:
    by_cycles = next(one for one in blackwell.published() if one.cycles == 1037e6)
    assert by_cycles.share == pytest.approx(4 * 2 * 40 * 147600**2 * 128 / (1037e6 * 148 * 8192))
    by_time = next(one for one in blackwell.published() if one.milliseconds == 3.433)
    assert by_time.rate == pytest.approx(1281, abs=1) and by_time.share == pytest.approx(0.587, abs=1e-3)
    assert all(one.row in COMMITTED or not one.row for one in blackwell.published())


def test_polynomials_scale_from_what_is_compiled() -> None:
    name = "fmha-d128-dense"
    row: Row = COMMITTED[name]
    count = OURS[name][1].polynomials
    assert blackwell.polynomials(row, count, count) == dataclasses.replace(row.body, opcodes=dict(row.body.opcodes))
    assert blackwell.polynomials(row, 0, count).opcodes["MUFU"] == 129
    assert blackwell.polynomials(row, 2 * count, count).opcodes["MUFU"] == 129 - 2 * count


# -- the page ----------------------------------------------------------------------------------------------------------


def test_the_committed_page_is_what_the_script_writes() -> None:
    assert blackwell.PAGE.read_text() == blackwell.generate()
    assert "Nothing on this page was run on a Blackwell GPU" in blackwell.PAGE.read_text()


def test_a_page_that_is_behind_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(blackwell, "PAGE", tmp_path / "blackwell.md")
    monkeypatch.setattr(blackwell, "generate", lambda: "new\n")
    assert blackwell.main([]) == 1 and "blackwell.md is behind" in capsys.readouterr().err
    assert blackwell.main(["--update"]) == 0 and blackwell.main([]) == 0
    (tmp_path / "blackwell.md").write_text("old\n")
    assert blackwell.main([]) == 1
