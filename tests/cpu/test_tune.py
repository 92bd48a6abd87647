"""The tuner without a GPU: which configs it tries, how it ranks them, when it writes, and what it says.

Kernels and clocks are fake; the numbers that they give are known.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fmha import reference
from fmha.jit import launch, library, sass, tuned
from perf import bench, cases, environment, resources, timing, tune
from perf.suites import Case
from perf.tune import Decision, Row, Target
from schedules.tiling import CHIPS, TABLES, BlockConfig, Choice, Extent, choose, rivals, tunable

ARCH = "sm_90a"
DEVICE = launch.Device(ARCH, 50 << 20, 132)
HEAD_DIMS = (64, 96, 128, 192, 256)
SMALL = Case(2, 40, 50, 4, 2, 16, True)
MEASURED = ("dense", "causal")  # of windows there are no rates that a cost was fitted to


def target(name: str | Case = "D128 causal S4096 B4 H16") -> Target:
    return Target.of(cases.parse(name) if isinstance(name, str) else name, DEVICE)


def table(head_dim: int) -> tuple[Choice, ...]:
    return rivals(head_dim, ARCH, lse=False)


# -- candidates --------------------------------------------------------------------------------------------------------
def test_a_target_is_the_call_that_the_library_sees() -> None:
    found = target("D72 causal S1000x2000 B3 H8x2 float16")
    assert (found.problem.dtype, found.problem.head_dim, found.problem.mask) == ("float16", 72, "causal")
    assert found.extent == Extent("causal", 1000, 2000, 24, 132)
    assert found.table == tuple(row.config for row in table(72)) and found.table[0].head_dim == 96


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_grid_fits_the_chip_with_rings_as_deep_as_they_go(head_dim: int) -> None:
    found = tune.grid(target(f"D{head_dim} S4096"))
    assert len(found) == len(set(found)) >= 10
    for config in found:
        assert config.check(CHIPS[ARCH]) is None and config.head_dim == head_dim
        assert 2 <= config.stages <= 4 and config.q_stages in (1, 2)
        assert config.ones == (0 if head_dim == 256 else 8)
        deeper = replace(config, stages=config.stages + 1)
        deepest = config.consumers if config.lends else 4
        assert config.stages == deepest or deeper.check(CHIPS[ARCH]) is not None
    shapes = {(config.consumers, config.tile_n, config.q_stages) for config in found}
    assert {consumers for consumers, _, _ in shapes} == ({1, 2} if head_dim == 256 else {1, 2, 3})
    for row in table(head_dim):  # what the table has grew on this grid
        assert (row.config.consumers, row.config.tile_n, row.config.q_stages) in shapes


def test_registers_are_the_tables() -> None:
    assert tune.splits(2, 64, ARCH) == tune.splits(2, 128, ARCH) == [(24, 240)]
    assert tune.splits(2, 192, ARCH) == tune.splits(2, 256, ARCH) == [(40, 232)]
    assert tune.splits(3, 64, ARCH) == tune.splits(3, 128, ARCH) == [(32, 160)]
    assert tune.splits(1, 64, ARCH) == [tune.ONE_WARPGROUP]


def test_the_estimate_is_near_what_was_measured_of_rivals() -> None:
    """The table's costs are microseconds; those of one head dim have one unit in common."""
    for head_dim in (64, 256):
        for extent in (Extent(m, s, s, 16384 // s * 2048 // head_dim, 132) for m in MEASURED for s in (256, 512, 1024)):
            ratios = [tune.predicted_us(row, extent) / tune.estimate(row.config, extent) for row in table(head_dim)]
            assert max(ratios) / min(ratios) < 1.12


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seqlen", [256, 16384])
def test_candidates_are_few_and_have_the_present_config_and_the_tables(head_dim: int, seqlen: int) -> None:
    found = target(f"D{head_dim} S{seqlen}")
    present = replace(found.table[0], tile_n=16)
    chosen = tune.candidates(found, present)
    assert chosen[: 1 + len(found.table)] == [present, *found.table]
    assert len(chosen) == len(set(chosen)) == min(tune.MOST, len({present, *found.table, *tune.grid(found)}))
    assert len({tune.label(config) for config in chosen}) == len(chosen)
    assert tune.candidates(found, found.table[0])[: len(found.table)] == list(found.table)
    assert tune.candidates(found, present, most=1) == [present, *found.table]


def test_the_most_promising_come_first() -> None:
    """Long sequences like wide tiles; 64 queries leave most of a tile of 128 empty."""
    long, short = (
        tune.candidates(found, found.table[0]) for found in (target("D64 S16384"), target("D64 S64x512 B512"))
    )
    assert all(config.tile_n >= 48 for config in long)
    assert short[2].consumers == 1 and sum(config.consumers == 1 for config in long) == 0
    for name in ("D128 S4096", "D128 causal S512"):
        found = target(name)
        others = tune.candidates(found, found.table[0])[len(found.table) :]
        times = [tune.estimate(config, found.extent) for config in others]
        assert times == sorted(times)
        left = set(tune.grid(found)) - set(tune.candidates(found, found.table[0]))
        assert left and min(tune.estimate(config, found.extent) for config in left) >= times[-1]


def test_labels_tell_configs_apart() -> None:
    base = choose(128, ARCH)
    assert tune.label(base) == "d128 128x128 kv2 q2 24/240 ones 8"
    assert tune.label(replace(base, ones=0)) == "d128 128x128 kv2 q2 24/240"
    assert tune.label(choose(192, ARCH, head_dim_v=128)) == "d192v128 128x112 kv2 q1 40/232 ones 8"
    for name in (field.name for field in dataclasses.fields(BlockConfig)):
        assert tune.label(replace(base, **{name: getattr(base, name) + 1})) != tune.label(base), name


# -- the resource check ------------------------------------------------------------------------------------------------
REPORT = next(iter(resources.load().values()))
CONFIG = resources.variants()[next(iter(resources.load()))].config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"local_loads": 3}, "spills: 3 local loads, 0 local stores"),
        ({"stack_bytes": 8}, "8 bytes of stack"),
        ({"early_retire": True}, "waits for every MMA"),
        ({"body_waits": ((0, 0, 0),) * 12}, "waits for MMAs 12 times, not twice"),
        ({"setmaxnreg": (24, 232)}, "setmaxnreg"),
    ],
)
def test_bad_machine_code_is_dropped_with_its_reason(change: dict, words: str) -> None:
    bad, broken = replace(CONFIG, tile_n=96), replace(CONFIG, tile_n=80)
    made = [(CONFIG, REPORT), (bad, replace(REPORT, **change)), (broken, ValueError("no such layout"))]
    lines: list[str] = []
    kept, dropped = tune.sift(made, lines.append)
    assert kept == {CONFIG: REPORT} and set(dropped) == {bad, broken}
    assert words in dropped[bad] and dropped[broken] == "does not compile: ValueError: no such layout"
    assert lines == [f"{tune.label(CONFIG)}: ok", *(f"{tune.label(c)}: {dropped[c]}" for c in (bad, broken))]


def test_a_missing_disassembler_is_no_property_of_a_config() -> None:
    with pytest.raises(sass.MissingTool):
        tune.sift([(CONFIG, sass.MissingTool("nvdisasm"))], lambda line: None)


def test_kernels_are_compiled_and_read_in_processes_of_their_own() -> None:
    """The one kernel that is compiled here; another test has it in the cache, too."""
    found = target("D64 S4096")
    ((config, made),) = tune.compile_all(found, [found.table[0]])
    assert config == found.table[0] and isinstance(made, tune.Report) and made.setmaxnreg == (32, 160)
    assert tune.sift([(config, made)], lambda line: None)[0] == {config: made}


# -- ranking, and the decision -----------------------------------------------------------------------------------------
FOUND = target()
A, B, C = FOUND.table[0], replace(FOUND.table[0], tile_n=96), replace(FOUND.table[0], tile_n=80)


def test_the_fastest_comes_first_with_its_rate_and_its_ratio_to_the_present_one() -> None:
    times = {A: [4e-3, 2e-3, 3e-3], B: [1.5e-3] * 3, C: [6e-3] * 3}
    ranked = tune.rank(FOUND, A, times)
    assert [row.config for row in ranked] == [B, A, C]
    assert [row.ratio for row in ranked] == pytest.approx([2.0, 1.0, 0.5])
    assert [(row.present, row.table) for row in ranked] == [(False, False), (True, True), (False, False)]
    assert ranked[0].rate == pytest.approx(FOUND.case.flops / 1.5e-3 / 1e12)
    assert ranked[1].quartiles == pytest.approx(tuple(FOUND.case.flops / s / 1e12 for s in (3.5e-3, 2.5e-3)))


def row(config: BlockConfig, present: bool = False) -> Row:
    return Row(config, 600.0, (590.0, 610.0), 1.0, present, False)


@pytest.mark.parametrize(
    ("ours", "theirs", "keep", "words"),
    [
        ([1.0, 1.01, 1.02], [1.05, 1.06, 1.07], True, "1.050 times as fast"),
        ([1.0, 1.01, 1.06], [1.02, 1.06, 1.07], True, "more than the spread"),  # 1.035 against 1.04
        ([1.0, 1.01, 1.10], [1.02, 1.06, 1.07], False, "no more than the spread"),
        ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], False, "1.000 times as fast"),
        ([1.1, 1.1, 1.1], [1.0, 1.0, 1.0], False, "0.909 times as fast"),  # the first run had been luck
    ],
)
def test_only_a_lead_beyond_the_spread_is_kept(ours, theirs, keep: bool, words: str) -> None:
    found = tune.decide(row(A, True), row(B), {B: ours, A: theirs})
    assert found.keep is keep and words in found.why
    assert tune.label(A) in found.why and tune.label(B) in found.why


def test_the_present_config_is_not_written_again() -> None:
    found = tune.decide(row(A, True), row(A, True), {})
    assert found == Decision(False, f"the present config, {tune.label(A)}, is the fastest")


# -- the whole command -------------------------------------------------------------------------------------------------
class Card:
    """A GPU on which each config has a speed of its own, and an output."""

    def __init__(self) -> None:
        self.present = choose(16, ARCH, tune.extent_of(SMALL, 132))
        self.seconds: dict[BlockConfig, list[float]] = {}  # of a call, in the runs that it takes part in
        self.gain: dict[BlockConfig, float] = {}
        self.spilling: set[BlockConfig] = set()
        self.runs: list[list[BlockConfig]] = []
        self.bound: dict[int, BlockConfig] = {}
        self.checked: list[BlockConfig] = []

    def compile_all(self, found: Target, configs):
        for config in reversed(configs):
            setmaxnreg = config.producer_registers, config.consumer_registers
            yield config, replace(REPORT, local_loads=int(config in self.spilling), setmaxnreg=setmaxnreg)

    def bind(self, found: Target, qkv, config: BlockConfig):
        out = reference.attention(*qkv, causal=found.case.causal)[0].to(torch.bfloat16) * self.gain.get(config, 1.0)

        def call():
            self.checked.append(config)
            return out

        self.bound[id(call)] = config
        return call

    def interleave(self, calls, timer, *, seconds: float):
        assert seconds == 0.5
        configs = [self.bound[id(call)] for call in calls.values()]
        assert list(calls) == [tune.label(config) for config in configs]
        self.runs.append(configs)
        taken = {c: self.seconds.get(c, [1e-3] * 2)[len(self.runs) - 1] for c in configs}
        return {name: [taken[c] * k for k in (0.99, 1.0, 1.01)] for name, c in zip(calls, configs, strict=True)}


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    made = Card()
    monkeypatch.setenv("FMHA_TUNED", str(tmp_path / "config" / "tuned.json"))
    tuned.forget()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(launch, "describe_device", lambda device: DEVICE)
    monkeypatch.setattr(environment, "describe", lambda: {"gpu": "G", "driver": "1", "date": "d", "source": "s"})
    inputs = bench.make_inputs
    monkeypatch.setattr(tune, "make_inputs", lambda case: inputs(case, "cpu"))
    monkeypatch.setattr(tune, "CudaTimer", lambda: None)
    for name in ("compile_all", "bind", "interleave"):
        monkeypatch.setattr(tune, name, getattr(made, name))
    yield made
    tuned.forget()


ARGUMENTS = [SMALL.name, "--seconds", "0.5", "--candidates", "6"]


def others(card: Card) -> list[BlockConfig]:
    found = target(SMALL)
    return [config for config in tune.candidates(found, card.present, 6) if config not in found.table]


def entries() -> dict:
    tuned.forget()
    return dict(tuned.file().entries)


def test_a_faster_config_is_written_and_used_and_then_beaten_by_none(card: Card, tmp_path: Path, capsys) -> None:
    best = others(card)[1]
    card.seconds = {best: [0.7e-3, 0.8e-3]}
    card.spilling = {others(card)[0]}
    out = tmp_path / "deep" / "rows.json"
    assert tune.main([*ARGUMENTS, "--write", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert f"gets {tune.label(card.present)} at present ({table(16)[1].reason})" in text
    assert "6 candidates" in text and "1 dropped" in text and "spills: 1 local loads" in text
    assert f"{tune.label(best)} is 1.250 times as fast as the present {tune.label(card.present)}" in text
    assert f"Written to {tuned.path()}" in text
    assert sorted(map(len, card.runs)) == [2, 5] and card.runs[1] == [best, card.present]

    (entry,) = entries().values()
    assert entry.config == best and entry.call == tuned.Call(ARCH, "bfloat16", 16, "causal", 40, 50, 8, 132)
    assert entry.measured["ratio"] == 1.25 and entry.measured["gpu"] == "G" and entry.measured["case"] == SMALL.name
    assert library.pick(target(SMALL).problem, ARCH, target(SMALL).extent) == (best, f"tuned: {tuned.path()}")

    written = json.loads(out.read_text())
    assert written["meta"].items() >= {"gpu": "G", "source": "s", "arch": ARCH, "multiprocessors": 132}.items()
    assert written["meta"]["command"].startswith(f"python -m perf.tune '{SMALL.name}' --seconds 0.5")
    assert written["case"]["name"] == SMALL.name and written["decision"]["keep"] is True
    assert written["rows"][0]["config"] == dataclasses.asdict(best)
    assert written["rows"][0]["rate"] == pytest.approx(SMALL.flops / 0.7e-3 / 1e12)
    assert written["rows"][0]["ratio"] == pytest.approx(1 / 0.7)
    assert [r["present"] for r in written["rows"]].count(True) == 1
    assert [r["table"] for r in written["rows"]].count(True) == 2
    assert list(written["dropped"]) == [tune.label(others(card)[0])]

    card.runs, before = [], tuned.path().read_bytes()
    card.present = best
    assert tune.main([*ARGUMENTS, "--write"]) == 0  # what it is compared with is what the call gets
    text = capsys.readouterr().out
    assert f"at present (tuned: {tuned.path()})" in text and "is the fastest" in text and "Nothing was written." in text
    assert len(card.runs) == 1 and tuned.path().read_bytes() == before


def test_the_table_prints_every_config_with_its_marks(card: Card, capsys) -> None:
    best = others(card)[0]
    card.seconds = {best: [0.5e-3, 0.5e-3], card.present: [1e-3, 1e-3]}
    assert tune.main(ARGUMENTS) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [line for line in lines if line[:1] == ["d64"] and "to" in line]
    assert len(shown) == 6 and shown[0][:7] == tune.label(best).split() and "2.000" in shown[0]
    (present,) = [line for line in shown if line[-2:] == ["present", "table"]]
    assert present[:7] == tune.label(card.present).split() and "1.000" in present
    assert sum(line[-1] == "table" for line in shown) == 2
    assert not tuned.path().exists()  # --write was not given


@pytest.mark.parametrize(
    ("second_run", "words"),
    [(0.999e-3, "no more than the spread"), (1.2e-3, "0.833 times as fast"), (0.9e-3, "--write would keep it")],
)
def test_the_second_run_decides(card: Card, capsys, second_run: float, words: str) -> None:
    card.seconds = {others(card)[0]: [0.5e-3, second_run]}
    arguments = ARGUMENTS if "--write" in words else [*ARGUMENTS, "--write"]
    assert tune.main(arguments) == 0
    text = capsys.readouterr().out
    assert words in text and "Nothing was written" in text and not tuned.path().exists()


@pytest.mark.parametrize("gain", [1.1, float("nan")])
@pytest.mark.parametrize("whose", ["present", "other"])
def test_a_wrong_kernel_is_an_error_and_nothing_is_timed(card: Card, capsys, gain: float, whose: str) -> None:
    wrong = card.present if whose == "present" else others(card)[2]
    card.gain = {wrong: gain}
    assert tune.main([*ARGUMENTS, "--write"]) == 1
    said = capsys.readouterr().err
    assert "WRONG, and nothing was timed" in said and f"{tune.label(wrong)}: off by" in said
    assert not card.runs and not tuned.path().exists()


def test_every_config_that_is_timed_was_checked(card: Card) -> None:
    assert tune.main(ARGUMENTS) == 0
    assert len(card.checked) == len(set(card.checked)) == 6 and set(card.runs[0]) == set(card.checked)


def test_a_spilling_present_config_is_no_yardstick(card: Card, capsys) -> None:
    card.spilling = {card.present}
    assert tune.main(ARGUMENTS) == 2
    assert "the present config fails the resource check: spills" in capsys.readouterr().err and not card.runs


def test_a_damaged_file_is_left_alone_and_the_result_is_shown(card: Card, capsys) -> None:
    card.seconds = {others(card)[0]: [0.5e-3, 0.5e-3]}
    tuned.path().parent.mkdir()
    tuned.path().write_text("mine")
    with pytest.warns(tuned.TunedWarning, match="is no JSON"):
        assert tune.main([*ARGUMENTS, "--write"]) == 1
    found = capsys.readouterr()
    assert "not written: " in found.err and "is left as it is" in found.err and "2.000" in found.out
    assert tuned.path().read_text() == "mine"


def test_what_was_written_must_be_what_is_picked(card: Card, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    card.seconds = {others(card)[0]: [0.5e-3, 0.5e-3]}
    monkeypatch.setattr(tuned, "write", lambda entry: tuned.path())
    assert tune.main([*ARGUMENTS, "--write"]) == 1
    assert f"was written, but fmha takes {tune.label(card.present)}" in capsys.readouterr().err


def test_a_call_is_bound_to_the_config_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bind` itself, with the library's own planning."""
    fetched = []
    monkeypatch.setattr(launch, "describe_device", lambda device: DEVICE)
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    monkeypatch.setattr(library, "loaded", lambda *kernel: None)
    monkeypatch.setattr(library, "fetch", lambda problem, config, arch: fetched.append(config) or (lambda *args: None))
    plans = []
    monkeypatch.setattr(tune.planning, "Launch", lambda *a, **k: plans.append(k) or (lambda *tensors: tensors))
    config = replace(choose(16, ARCH), tile_n=80)
    qkv = bench.make_inputs(SMALL, "cpu")
    assert tune.bind(target(SMALL), qkv, config)() == (*qkv, None)
    assert fetched == [config] and plans[0]["work_tiles"] == 8 * -(-40 // config.tile_m)


WATCHED = """
import sys, time
from perf import tune
with tune.watched("it", float(sys.argv[1])):
    time.sleep(float(sys.argv[2]))
time.sleep(float(sys.argv[3]))
"""


@pytest.mark.parametrize(("limit", "taken", "status", "said"), [(0.05, 30, 3, "it has not ended"), (1, 0, 0, "")])
def test_a_kernel_that_hangs_ends_the_process(limit: float, taken: float, status: int, said: str) -> None:
    command = [sys.executable, "-c", WATCHED, str(limit), str(taken), "1.5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(tune.__file__).parents[1])
    assert done.returncode == status and said in done.stderr


def test_the_command_line_says_what_is_wrong(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv, complaint in (
        ([], "CASE"),
        (["D128"], "no lengths"),
        (["D128 S64", "--seconds", "0"], "--seconds is 0.0"),
        (["D128 S64", "--seconds", "nan"], "--seconds is nan"),
        (["D128 S64", "--candidates", "0"], "--candidates is 0"),
    ):
        with pytest.raises(SystemExit):
            tune.parse(argv)
        assert complaint in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tune.main(["D128 S64"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_a_problem_without_kernels_is_refused(card: Card, capsys) -> None:
    assert tune.main(["D264 S64"]) == 2
    assert "head_dim 264" in capsys.readouterr().err


def test_an_architecture_without_measurements_is_refused(card: Card, capsys, monkeypatch) -> None:
    monkeypatch.setattr(launch, "describe_device", lambda device: replace(DEVICE, arch="sm_100a"))
    assert tune.main(ARGUMENTS) == 2
    assert "sm_100a has block configs of another kind" in capsys.readouterr().err


def test_the_simulator_ran_every_ring_that_the_grid_has() -> None:
    """tests/cpu/test_simulate.py: 1 to 3 consumers, 1 to 4 stages, 1 or 2 Q slots, all combinations."""
    for arch in filter(tunable, TABLES):
        for head_dim in HEAD_DIMS:
            for config in tune.grid(replace(target(f"D{head_dim} S64"), arch=arch)):
                assert config.consumers <= 3 and config.stages <= 4 and config.q_stages <= 2


def test_timing_goes_through_the_shared_clock() -> None:
    assert tune.interleave is timing.interleave and tune.quartiles is timing.quartiles and tune.check is bench.check
