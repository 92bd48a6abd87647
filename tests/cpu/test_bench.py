"""The benchmark without a GPU: its tables, its arithmetic, how it takes turns, what it writes.

Candidates and clocks are fake; the numbers that they give are known.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import statistics
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fmha import reference
from fmha.problem import ALLOW_UNRUN, PagedProblem, Problem
from perf import bench, decode, environment, gpu_check, launch, peers, sanitize, show, suites, timing
from perf.peers import OURS, Candidate, Peer
from perf.suites import Case


# -- suites -----------------------------------------------------------------------------------------------------------
def test_dense_suite_holds_work_per_row_constant() -> None:
    cases = suites.SUITES["dense"]
    assert len(cases) == 42 and len({case.name for case in cases}) == 42
    assert {case.batch * case.seqlen_q for case in cases} == {16384}
    assert {case.heads_q * case.head_dim for case in cases} == {2048}
    assert {(c.head_dim, c.causal, c.seqlen_k) for c in cases} == set(
        itertools.product((64, 128, 256), (False, True), (256, 512, 1024, 2048, 4096, 8192, 16384))
    )


def test_tail_suite_pairs_each_length_with_its_base() -> None:
    cases = suites.SUITES["tail"]
    assert len(cases) == 20 and len({case.name for case in cases}) == 20
    for base in (512, 4096, 16384):
        assert [c.seqlen_k - base for c in cases if c.base == base] == [0, 1, 16, 64, 80, 127]
    assert [(c.seqlen_k, c.heads_q) for c in cases if c.base == 147_456] == [(147_456, 8), (147_600, 8)]
    assert {(c.batch, c.heads_q, c.head_dim) for c in cases if c.base == 4096} == {(1, 16, 128)}


def test_window_suite_is_causal_and_cuts_something_off() -> None:
    cases = suites.SUITES["window"]
    assert len(cases) == len({case.name for case in cases}) == 6
    for case in cases:
        assert case.causal and case.window == (case.left, None) and case.name.split()[1] == f"window{case.left}"
        assert case.flops < replace(case, left=None).flops
    assert {(case.seqlen_k, case.left) for case in cases} == set(itertools.product((16384, 65536), (512, 1024, 4096)))


def test_flops_of_windows_count_the_pairs_that_see_each_other() -> None:
    for seqlen_q, seqlen_k, left in itertools.product((1, 5, 9, 33), (1, 7, 9, 33), (0, 1, 3, 8, 40)):
        visible = reference.visibility(seqlen_q, seqlen_k, True, (left, None))(torch.arange(seqlen_q))
        case = Case(3, seqlen_q, seqlen_k, 4, 2, 64, causal=True, left=left)
        assert case.flops == 4 * 3 * 4 * 64 * int(visible.sum())


@pytest.mark.parametrize("causal", [False, True])
def test_flops_count_visible_pairs(causal: bool) -> None:
    for seqlen_q, seqlen_k in itertools.product((1, 2, 7, 33), repeat=2):
        visible = reference.visibility(seqlen_q, seqlen_k, causal)(torch.arange(seqlen_q))
        case = Case(3, seqlen_q, seqlen_k, 4, 2, 64, causal)
        assert case.visible_pairs == int(visible.sum())
        assert case.flops == 4 * 3 * 4 * 64 * int(visible.sum())


def test_select_filters_by_name_head_dim_and_quick() -> None:
    assert len(suites.select("dense", only=[], head_dims=[], quick=False)) == 42
    picked = suites.select("dense", only=["causal S512", "causal S1024"], head_dims=[128], quick=False)
    assert [(c.seqlen_k, c.causal) for c in picked] == [(512, True), (1024, True)]
    quick = suites.select("tail", only=[], head_dims=[], quick=True)
    assert [c.seqlen_k for c in quick] == [512, 4096, 4097, 16384, 147_456, 147_600]


def test_names_tell_cases_apart() -> None:
    assert Case(1, 64, 128, 8, 2, 64, True, "float16").name == "D64 causal S64x128 B1 H8x2 float16"


# -- taking turns -----------------------------------------------------------------------------------------------------
class FakeTimer:
    """A card on which a call takes what `durations` says, times a slow-down that grows as time goes by."""

    def __init__(self, durations: dict[str, float], host: float = 1e-5, drift: float = 0.0) -> None:
        self.durations, self.host, self.drift = durations, host, drift
        self.clock = 0.0
        self.log: list[str] = []
        self.leads: list[float] = []
        self.unread = 0
        self.most_unread = 0

    def calls(self) -> dict[str, object]:
        return {name: (lambda name=name: name) for name in self.durations}

    def start(self, call):
        name = call()
        self.log.append(name)
        self.unread += 1
        self.most_unread = max(self.most_unread, self.unread)
        taken = self.durations[name] * (1 + self.drift * self.clock)
        self.clock += taken
        return timing.Sample(taken, self.host)

    def read(self, ticket):
        self.unread -= 1
        return ticket

    def lead(self, seconds: float) -> None:
        self.leads.append(seconds)

    def now(self) -> float:
        return self.clock


def test_every_round_calls_each_candidate_once_in_an_order_drawn_anew() -> None:
    timer = FakeTimer({"a": 0.01, "b": 0.02, "c": 0.03})
    times = timing.interleave(timer.calls(), timer, seconds=0, warm_seconds=0, rounds=20)
    assert {name: len(taken) for name, taken in times.items()} == {"a": 20, "b": 20, "c": 20}
    assert timer.unread == 0 and timer.most_unread <= 6
    rounds = [tuple(timer.log[i : i + 3]) for i in range(0, len(timer.log), 3)]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) >= 4
    assert Counter(order[0] for order in rounds).most_common(1)[0][1] < len(rounds) * 0.7


def test_warm_up_comes_first_and_is_thrown_away() -> None:
    timer = FakeTimer({"a": 0.01, "b": 0.01})
    times = timing.interleave(timer.calls(), timer, seconds=0, warm_seconds=0.5, rounds=4)
    assert len(times["a"]) == 4
    assert len(timer.log) >= 50 + 8


def test_rounds_fill_the_budget_and_never_fall_below_the_minimum() -> None:
    quick = FakeTimer({"a": 0.01, "b": 0.03})
    times = timing.interleave(quick.calls(), quick, seconds=1.0, warm_seconds=0)
    assert 25 <= len(times["a"]) == len(times["b"]) <= 27
    slow = FakeTimer({"a": 3.0, "b": 5.0})
    times = timing.interleave(slow.calls(), slow, seconds=1.0, warm_seconds=0, min_rounds=5)
    assert len(times["a"]) == len(times["b"]) == 5


def test_a_card_that_slows_down_does_not_favour_anyone() -> None:
    timer = FakeTimer({"a": 0.010, "b": 0.010}, drift=0.5)
    times = timing.interleave(timer.calls(), timer, seconds=3.0, warm_seconds=0.1)
    assert times["a"][-1] > 1.5 * times["a"][0]
    assert statistics.median(times["a"]) == pytest.approx(statistics.median(times["b"]), rel=0.02)


def test_the_gpu_idles_only_where_the_host_is_too_slow_for_it() -> None:
    short = FakeTimer({"a": 5e-5, "b": 6e-5}, host=1.5e-4)
    timing.interleave(short.calls(), short, seconds=0, warm_seconds=0, rounds=2)
    assert short.leads == [0.0, pytest.approx(1.5 * 1.5e-4)]
    long = FakeTimer({"a": 3e-3, "b": 4e-3}, host=1.5e-4)
    timing.interleave(long.calls(), long, seconds=0, warm_seconds=0, rounds=2)
    assert long.leads == [0.0, 0.0]


def test_quartiles() -> None:
    assert timing.quartiles([4.0]) == (4.0, 4.0, 4.0)
    assert timing.quartiles([5.0, 1.0, 3.0, 2.0, 4.0]) == (2.0, 3.0, 4.0)


# -- the check --------------------------------------------------------------------------------------------------------
SMALL = Case(2, 40, 50, 4, 2, 16, True)


def exact_output(case: Case, qkv) -> torch.Tensor:
    return reference.attention(*qkv, causal=case.causal)[0].to(torch.bfloat16)


def test_the_check_passes_right_outputs() -> None:
    qkv = bench.make_inputs(SMALL, "cpu")
    out = exact_output(SMALL, qkv)
    assert bench.check(SMALL, qkv, {OURS: out, "x": out.clone()}) == {}
    assert bench.check(SMALL, qkv, {OURS: out}) == {}


def test_the_check_finds_a_wrong_row_in_the_sample() -> None:
    qkv = bench.make_inputs(SMALL, "cpu")
    right = exact_output(SMALL, qkv)
    wrong = right.clone()
    wrong[-1, -1] *= 1.5
    assert list(bench.check(SMALL, qkv, {OURS: wrong, "x": right})) == [OURS]
    assert list(bench.check(SMALL, qkv, {OURS: right, "x": wrong})) == ["x"]
    wrong[-1, -1] = float("nan")
    assert "inf" in bench.check(SMALL, qkv, {OURS: wrong})[OURS]


def test_the_check_finds_an_error_outside_the_sample_by_the_peers() -> None:
    case = Case(3, 40, 50, 4, 2, 16, True)
    qkv = bench.make_inputs(case, "cpu")
    right = exact_output(case, qkv)
    wrong = right.clone()
    wrong[1] = 0  # neither the first nor the last batch entry
    assert list(bench.check(case, qkv, {OURS: wrong, "x": right})) == [OURS]
    assert list(bench.check(case, qkv, {OURS: wrong, "x": right, "y": right})) == [OURS]
    assert list(bench.check(case, qkv, {OURS: right, "x": wrong, "y": right})) == ["x"]


def test_sampled_rows_have_both_ends_and_stay_inside() -> None:
    for seqlen in (1, 5, 4096):
        rows = bench.sample_rows(seqlen)
        assert rows.min() == 0 and rows.max() == seqlen - 1 and len(rows) == len(set(rows.tolist()))


# -- a row ------------------------------------------------------------------------------------------------------------
def fake(gain: float = 1.0, seconds: float = 1e-3, fails: bool = False):
    """A candidate that gives `gain` times the right answer."""

    def prepare(case: Case, q, k, v) -> Candidate:
        if fails:
            raise RuntimeError("no such kernel")
        out = exact_output(case, (q, k, v)) * gain
        return Candidate(lambda: out, lambda result: result)

    return prepare


class CountingTimer(FakeTimer):
    """Knows calls by the order in which they are first seen."""

    def __init__(self, seconds: list[float]) -> None:
        super().__init__({})
        self.seconds, self.seen = seconds, {}

    def start(self, call):
        at = self.seen.setdefault(id(call), len(self.seen))
        self.clock += self.seconds[at]
        return timing.Sample(self.seconds[at], 1e-6)


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> dict:
    """fmha takes 2 ms, `x` 3 ms, `bad` is wrong and `gone` raises."""
    refusing = Peer("shy", "Shy", "shy", lambda: fake(), lambda case: "it is causal" if case.causal else None)
    listed = {name: Peer(name, name.title(), name, lambda: fake()) for name in ("x", "bad", "gone")} | {"shy": refusing}
    monkeypatch.setattr(bench, "PEERS", listed)
    seconds = {OURS: 2e-3, "x": 3e-3}
    monkeypatch.setattr(
        bench,
        "interleave",
        lambda calls, timer, **kw: {name: [seconds[name]] * 3 + [2 * seconds[name]] for name in calls},
    )
    loaded = {OURS: fake(), "x": fake(), "bad": fake(1.1), "gone": fake(fails=True), "shy": fake()}
    rates = iter([700.0, 710.0])
    return bench.run_row(
        SMALL, bench.make_inputs(SMALL, "cpu"), loaded, FakeTimer({}), lambda: next(rates), seconds=1.0, rounds=None
    )


def test_a_row_has_rates_spread_yardstick_and_what_was_left_out(row: dict) -> None:
    row = json.loads(json.dumps(row))
    assert row["case"]["name"] == SMALL.name and row["case"]["flops"] == SMALL.flops and row["case"]["causal"] is True
    assert row["unit"] == "TFLOP/s" and row["cublas"] == 705.0
    assert row[OURS] == pytest.approx(SMALL.flops / 2e-3 / 1e12)
    assert row["peers"] == {"x": pytest.approx(SMALL.flops / 3e-3 / 1e12)}
    assert row["spread"][OURS] == [pytest.approx(row[OURS] / 1.25), pytest.approx(row[OURS])]
    assert set(row["left_out"]) == {"bad", "gone", "shy"}
    assert row["left_out"]["gone"] == "RuntimeError: no such kernel" and row["left_out"]["shy"] == "it is causal"


def test_a_row_in_which_fmha_is_wrong_has_no_rates() -> None:
    wrong = bench.run_row(
        SMALL, bench.make_inputs(SMALL, "cpu"), {OURS: fake(1.1)}, FakeTimer({}), lambda: 1.0, seconds=1.0, rounds=None
    )
    assert "oracle" in wrong["error"] and OURS not in wrong


def test_fmhas_own_exceptions_are_not_hidden() -> None:
    with pytest.raises(RuntimeError, match="no such kernel"):
        bench.prepare(SMALL, bench.make_inputs(SMALL, "cpu"), {OURS: fake(fails=True)})


def test_measure_turns_seconds_into_rates() -> None:
    candidates = {name: Candidate(lambda: None, lambda out: out) for name in (OURS, "x")}
    timer = CountingTimer([1e-3, 1e-3])
    rates, spread = bench.measure(SMALL, candidates, timer, seconds=0.0, rounds=5)
    assert rates == {OURS: pytest.approx(SMALL.flops / 1e-3 / 1e12), "x": pytest.approx(SMALL.flops / 1e-3 / 1e12)}
    assert spread[OURS][0] <= rates[OURS] <= spread[OURS][1]


def tail_row(seqlen: int, ours: float, theirs: float, base: int = 4096) -> dict:
    case = {"name": f"S{seqlen}", "batch": 1, "heads_q": 16, "head_dim": 128, "causal": False, "seqlen_k": seqlen}
    return {"case": case | {"base": base}, "unit": "TFLOP/s", OURS: ours, "peers": {"x": theirs}, "cublas": 700.0}


def test_tail_rows_say_what_is_left_of_the_base_length() -> None:
    rows = [tail_row(4096, 600.0, 500.0), tail_row(4097, 570.0, 400.0), tail_row(16385, 1.0, 1.0, base=16384)]
    bench.add_relative(rows)
    assert rows[1]["relative"] == {"to": 4096, OURS: pytest.approx(0.95), "peers": {"x": pytest.approx(0.8)}}
    assert rows[0]["relative"][OURS] == 1.0 and "relative" not in rows[2]


# -- peers ------------------------------------------------------------------------------------------------------------
def test_a_peer_that_is_not_installed_is_named() -> None:
    def absent():
        raise ImportError("No module named 'nowhere'")

    found, missing = peers.load([Peer("a", "A", "a", lambda: fake()), Peer("b", "B", "b", absent)])
    assert list(found) == ["a"] and missing == {"b": "ImportError: No module named 'nowhere'"}


@pytest.mark.parametrize(("name", "heads_kv"), [("sdpa", 4), ("sdpa", 2), ("flash", 4)])
def test_torchs_attention_as_a_peer_is_right(name: str, heads_kv: int) -> None:
    case = Case(2, 40, 40, 4, heads_kv, 16, True)
    qkv = bench.make_inputs(case, "cpu")
    candidate = peers.PEERS[name].load()(case, *qkv)
    assert bench.check(case, qkv, {OURS: candidate.output(candidate.call())}) == {}


def test_torchs_attention_refuses_its_other_alignment() -> None:
    assert peers.PEERS["cudnn"].refuses(Case(1, 4, 8, 1, 1, 64, True)) is not None
    assert peers.PEERS["cudnn"].refuses(Case(1, 8, 8, 1, 1, 64, True)) is None
    assert peers.PEERS["fa3"].refuses(Case(1, 8, 8, 1, 1, 64, True, "float16")) is not None


# -- the terminal -----------------------------------------------------------------------------------------------------
LONG = "D128 causal S147600x147600 B1 H16x16 float16"
ROWS = [
    {"case": {"name": "one"}, "unit": "TFLOP/s", OURS: 660.0, "peers": {"x": 600.0, "y": 330.0}, "cublas": 700.0},
    {"case": {"name": "two"}, "unit": "us", OURS: 10.0, "peers": {"y": 5.0}},
    {"case": {"name": "three"}, "error": "off by 1e0 of the oracle's norm"},
]


def test_ratios_are_speeds_whatever_the_unit() -> None:
    assert show.ratio(ROWS[0], "x") == pytest.approx(1.1) and show.best_peer(ROWS[0]) == "x"
    assert show.ratio(ROWS[1], "y") == pytest.approx(0.5) and show.best_peer(ROWS[1]) == "y"
    assert show.ratio(ROWS[1], "x") is None and show.best_peer(ROWS[2]) is None


def test_the_table_has_a_ratio_for_each_peer_and_for_the_best() -> None:
    header, lines = show.cells(ROWS)
    assert header == ["case", "unit", OURS, "x", "y", f"{OURS}/x", f"{OURS}/y", f"{OURS}/best", "cuBLAS"]
    assert lines[0] == ["one", "TFLOP/s", "660", "600", "330", "1.100", "2.000", "1.100", "700"]
    assert lines[1] == ["two", "us", "10", "-", "5", "-", "0.500", "0.500", "-"]
    assert lines[2][:2] == ["three", "wrong"] and len(lines[2]) == len(header)
    relative = [tail_row(4096, 600.0, 500.0), tail_row(4097, 570.0, 400.0)]
    bench.add_relative(relative)
    header, lines = show.cells(relative)
    assert header[-2:] == [f"{OURS} of base", "x of base"] and lines[1][-2:] == ["0.950", "0.800"]


@pytest.mark.parametrize("rich", [True, False])
def test_a_run_is_shown_with_and_without_rich(rich: bool, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    if not rich:
        monkeypatch.setattr(show.importlib.util, "find_spec", lambda name: None)
    meta = {"suite": "dense", "gpu": "G", "driver": "1", "date": "d", "source": "s", "titles": {"z": "Zed"}}
    with show.progress("dense", 3) as advance:
        for row in ROWS:
            advance(show.one_line(row))
    long = {"case": {"name": LONG}, "unit": "TFLOP/s", OURS: 123.0, "peers": {"x": 1.0, "flashinfer": 2.0}}
    show.table(meta | {"missing_peers": {"z": "ImportError: gone"}}, [*ROWS, long])
    text = capsys.readouterr().out
    assert "one: 660 TFLOP/s, 1.100 of x (600)" in text and "three: off by" in text
    assert "…" not in text
    for part in (
        *show.cells([*ROWS, long])[0],
        LONG,
        "660",
        "1.100",
        "not measured: z (Zed): ImportError: gone",
        "WRONG: three",
    ):
        assert part in text, part


# -- the command ------------------------------------------------------------------------------------------------------
def test_the_command_line_says_what_is_wrong(capsys) -> None:
    for argv, complaint in (
        (["nothing"], "invalid choice"),
        (["dense", "--peers", "fa4,fa9"], "fa9"),
        (["dense", "--only", "D77"], "no case"),
        (["dense", "--rounds", "0"], "--rounds"),
    ):
        with pytest.raises(SystemExit):
            bench.parse(argv)
        assert complaint in capsys.readouterr().err
    args = bench.parse(["tail", "--quick", "--peers", "none"])
    assert args.peers == [] and args.seconds_per_row == 1.0


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main(["dense"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


UNSERVED = {  # of each suite on an architecture of head dims up to 128 that reads no pages
    "dense": 14,
    "tail": 0,
    "window": 0,
    "varlen": 0,
    "scores": 6,
    "decode": len(decode.CASES),
    "launch": 0,
}


@pytest.mark.parametrize("suite", UNSERVED)
def test_cases_without_a_kernel_are_left_out_with_the_reason(suite: str) -> None:
    args = bench.parse([suite])
    every = bench.count(args)
    assert bench.unserved(args, "sm_90a") == {}
    args.unserved = bench.unserved(args, "sm_100a")
    assert bench.count(args) == every - len(args.unserved) == every - UNSERVED[suite]
    wanted = "attention over pages" if suite == "decode" else "head_dim 256: multiples of 8 up to 128 only"
    assert all(wanted in reason for reason in args.unserved.values())
    assert not {case.name for case in bench.cases(args)} & set(args.unserved) if suite != "launch" else True


@pytest.mark.parametrize("main", [bench.main, sanitize.main, gpu_check.main])
def test_nothing_is_measured_that_nobody_has_run(main, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv(ALLOW_UNRUN, raising=False)
    for module in (bench, gpu_check):
        monkeypatch.setattr(module, "current_architecture", lambda: "sm_100a")
    monkeypatch.setattr(sanitize, "ARCH", "sm_100a")
    arguments = {bench.main: ["dense"], sanitize.main: [], gpu_check.main: ["--out", str(tmp_path / "out")]}
    assert main(arguments[main]) == 2
    assert "FMHA_ALLOW_UNRUN=1" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_what_a_case_selects_a_kernel_by() -> None:
    assert Case(1, 8, 8, 1, 1, 64, True, left=3).problem == Problem("bfloat16", 64, "window")
    assert Case(1, 8, 8, 1, 1, 64, True, "float16", score="sinks").problem == Problem("float16", 64, "causal")
    assert Case(1, 8, 8, 1, 1, 64, score="alibi", packed=(8,)).problem == Problem(
        "bfloat16", 64, "dense", "alibi", ragged=True
    )
    assert decode.PagedCase((8,), 16, layout="vllm").problem == PagedProblem("bfloat16", 128, layout="vllm")


def test_a_whole_run_writes_its_json(monkeypatch: pytest.MonkeyPatch, tmp_path, capsys) -> None:
    """Everything but the GPU: a row that is right, one that is wrong, one that raises, and one without a kernel."""
    cases = [Case(1, 20, 20, 2, 2, 16), Case(1, 21, 21, 2, 2, 16, base=20), Case(1, 22, 22, 2, 2, 16)]
    cases.append(Case(1, 23, 23, 2, 2, 192))
    monkeypatch.setattr(bench, "current_architecture", lambda: "sm_100a")
    monkeypatch.setenv(ALLOW_UNRUN, "1")
    monkeypatch.setattr(suites, "SUITES", {"dense": tuple(cases)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "CudaTimer", lambda: FakeTimer({}))
    monkeypatch.setattr(bench, "Cublas", lambda timer: SimpleNamespace(rate=lambda: 700.0))
    monkeypatch.setattr(bench, "interleave", lambda calls, timer, **kw: {name: [1e-3] * 5 for name in calls})
    inputs = bench.make_inputs
    monkeypatch.setattr(bench, "make_inputs", lambda case: inputs(case, "cpu"))
    monkeypatch.setattr(environment, "describe", lambda: {"gpu": "G", "driver": "1", "date": "d", "source": "s"})

    def ours(case: Case, q, k, v) -> Candidate:
        if case.seqlen_q == 22:
            raise TypeError("broken")
        return fake(1.2 if case.seqlen_q == 21 else 1.0)(case, q, k, v)

    monkeypatch.setattr(bench, "US", Peer(OURS, "fmha", "fmha", lambda: ours))
    path = tmp_path / "deep" / "rows.json"
    assert bench.main(["dense", "--out", str(path), "--peers", "sdpa,fa3"]) == 1
    written = json.loads(path.read_text())
    assert written["meta"]["suite"] == "dense" and written["meta"]["missing_peers"].keys() == {"fa3"}
    assert {"gpu", "driver", "versions", "date", "source", "command", "seconds"} <= written["meta"].keys()
    right, wrong, raised = written["rows"]
    assert right.keys() >= {"case", "unit", OURS, "peers", "spread", "cublas"} and right["peers"].keys() == {"sdpa"}
    assert "oracle" in wrong["error"] and raised["error"] == "TypeError: broken"
    said = capsys.readouterr().out
    assert "not measured: fa3" in said and f"not measured: {cases[-1].name}: head_dim 192" in said
    assert written["meta"]["unserved"].keys() == {cases[-1].name}


# -- the launch suite -------------------------------------------------------------------------------------------------
def test_host_times_are_those_of_single_calls_in_bursts() -> None:
    clock = itertools.count()
    waits = []
    candidates = {name: Candidate(lambda: None, lambda out: out) for name in (OURS, "x")}
    times = launch.host_times(candidates, wait=lambda: waits.append(1), clock=lambda: float(next(clock)), bursts=3)
    assert times == {OURS: [1.0] * 3 * launch.BURST, "x": [1.0] * 3 * launch.BURST}
    assert len(waits) == 4 * 2 + 1


def test_launch_rows_are_in_their_unit() -> None:
    row = launch.row("eager", "us", {OURS: [1e-5, 2e-5, 3e-5], "x": [4e-5]}, {"y": "gone"})
    assert row["case"] == {"name": "eager"} and row["unit"] == "us" and row["left_out"] == {"y": "gone"}
    assert row[OURS] == pytest.approx(20.0) and row["peers"] == {"x": pytest.approx(40.0)}
    assert row["spread"][OURS] == [pytest.approx(15.0), pytest.approx(25.0)]


def test_first_calls_tell_cold_from_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {
        OURS: iter(
            [{"import": [1.0], "first": [9.0], "next": [3.0], "shape": [5e-5]}]
            + 2 * [{"import": [1.0], "first": [0.2], "next": [0.04], "shape": [5e-5]}]
        ),
        "fa4": iter([{"error": "exit code 1"}] * 3),
    }
    monkeypatch.setattr(launch, "probe", lambda name, cache: next(reports[name]))
    rows = {row["case"]["name"]: row for row in launch.first_calls([OURS, "fa4"])}
    assert len(rows) == launch.ROWS - 3
    assert rows["cold compile, another kernel"][OURS] == 3.0
    assert rows["disk hit, another kernel"][OURS] == pytest.approx(40.0)
    assert rows["disk hit, another kernel"]["unit"] == "ms"
    assert all(row["peers"] == {} and row["left_out"] == {"fa4": "exit code 1"} for row in rows.values())


def test_a_probe_that_fails_says_why(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "exit code 1" in launch.probe(OURS, tmp_path)["error"]


# -- the environment --------------------------------------------------------------------------------------------------
def test_versions_name_what_is_installed() -> None:
    found = environment.versions(("torch", "surely-not-installed"))
    assert found.keys() == {"python", "torch"} and found["torch"].startswith(torch.__version__.split("+")[0])


def test_the_driver_is_read_from_the_kernel_where_nvidia_smi_is_missing(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    proc = tmp_path / "version"
    assert environment.driver_version(proc) == "unknown"
    proc.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\n")
    assert environment.driver_version(proc) == "580.159.04"


# -- sanitize and gpu_check -------------------------------------------------------------------------------------------
def test_a_sanitizers_summary_is_found() -> None:
    text = "========= COMPUTE-SANITIZER\nok x\n========= RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)\n"
    assert sanitize.summary(text) == "RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)"
    assert sanitize.summary("========= ERROR SUMMARY: 0 errors\n") == "ERROR SUMMARY: 0 errors"
    assert sanitize.summary("nothing") == ""


def test_hazards_are_counted_by_what_they_are() -> None:
    one = """========= Error: Potential WAR hazard detected at __shared__ {at} in block (2,0,0) :
=========     Read Thread (287,0,0) at kernel_0+0x4950
=========     Write Thread (0,0,0) at kernel_0+0x4300
=========     Current Value : 1, Incoming Value : 0
"""
    other = one.replace("WAR", "RAW").replace("0x4300", "0x10")
    output = "ok\n" + one.format(at="0x45d") + other.format(at="0x45d") + one.format(at="0x45e") + "========= done\n"
    assert sanitize.hazards(output) == {
        "WAR, Read at kernel_0+0x4950, Write at kernel_0+0x4300": 2,
        "RAW, Read at kernel_0+0x4950, Write at kernel_0+0x10": 1,
    }
    assert sanitize.hazards("ok\n========= ERROR SUMMARY: 0 errors\n") == {}


def test_sanitized_problems_are_tiny_and_cover_every_kernel_shape() -> None:
    assert {(c.head_dim, c.causal) for c in sanitize.CASES} >= set(itertools.product((64, 128, 256), (False, True)))
    assert sum(case.flops for case in sanitize.CASES) < 3e9
    assert len({case.name for case in sanitize.CASES}) == len(sanitize.CASES)


@pytest.mark.parametrize("error", [1.0, 1.2])
def test_sanitized_numbers_are_checked(error: float, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    import fmha

    asked = []

    def answer(oracle, *tensors, out, return_lse, **given):
        assert out.isnan().all()
        asked.append(return_lse)
        out.copy_(error * oracle(*tensors, **given)[0])

    def paged(*tensors, num_splits=None, **given):
        return answer(reference.attention_paged, *tensors, **given)

    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(fmha, name, functools.partial(answer, getattr(reference, name)))
    monkeypatch.setattr(fmha, "attention_paged", paged)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    cases = (*sanitize.CASES[:2], *(case for case in sanitize.CASES if case.packed or case.score == "softcap"))
    monkeypatch.setattr(sanitize, "CASES", cases)
    pages = len(sanitize.PAGED)
    assert sanitize.run_cases() == (0 if error == 1.0 else 2 * len(cases) + pages)
    assert asked == [False, True] * len(cases) + [True] * pages and len(cases) == 5 and pages == 3
    assert ("WRONG" in capsys.readouterr().out) == (error != 1.0)


def test_what_no_kernel_serves_is_not_sanitized(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(sanitize, "ARCH", "sm_100a")
    assert {case.head_dim for case in filter(sanitize.served, sanitize.CASES)} == {64, 72, 128}
    assert not any(map(sanitize.paged_served, sanitize.PAGED))
    assert capsys.readouterr().out.count("left out") == sum(c.head_dim == 256 for c in sanitize.CASES) + 3


def test_gpu_check_runs_every_step_and_reports_the_failed_ones(tmp_path, monkeypatch, capsys) -> None:
    steps = {
        "good": gpu_check.Step(("json.tool", "--help"), 60),
        "bad": gpu_check.Step(("json.tool", "/nowhere", "--no-such-option"), 60),
        "slow": gpu_check.Step(("http.server", "0", "--bind", "127.0.0.1", "--directory"), 1),
    }
    monkeypatch.setattr(gpu_check, "STEPS", steps)
    assert gpu_check.main(["--out", str(tmp_path), "--steps", "good,bad,slow"]) == 1
    text = capsys.readouterr().out
    for line in ("good .* ok", "bad .* exit code 2", "slow .* out of time"):
        assert re.search(line, text), line
    assert "usage" in (tmp_path / "good.log").read_text()
