"""The profiler without a GPU: what it makes of stamps, traces and counters, and the kernels that leave the stamps."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmha.jit import compile, launch, library, sass
from fmha.jit.arguments import SIZES
from fmha.kernels.sm90 import trace
from fmha.problem import Problem
from perf import cases, evaluate, findings, iket, overlap, profile, roofline, timeline, workload
from perf.cases import slug
from perf.suites import SUITES, Case
from perf.timeline import KINDS, Span, Stamp, Timeline
from schedules.tiling import choose

ROOT = Path(__file__).resolve().parents[2]
ARCH = "sm_90a"
HERTZ = 1.6e9
CASE = cases.parse("D128 dense S4096")
META = {
    "gpu": "a GPU",
    "driver": "1",
    "date": "2026-01-02",
    "source": "abc",
    "command": "python -m perf.profile",
    "multiprocessors": 132,
}

# One warpgroup's share of a kernel: two tiles of a work tile. (clock, operation, argument)
ATTEND = (
    (10, "wait Q", 0),
    (100, "turn", 0),
    (110, "wait K", 0),
    (120, "issue QK", 0),
    (150, "retire(0)", 0),
    (700, "mask", 7),
    (710, "start", 0),
    (900, "exponents", 7),
    (1300, "pack_p", 0),
    (1350, "wait K", 1),
    (1360, "turn", 0),
    (1400, "issue QK", 1),
    (1420, "wait V", 0),
    (1430, "issue PV", 0),
    (1460, "retire(1)", 0),
    (1960, "row_max", 0),
    (2100, "exponents", 6),
    (2600, "pack_p", 0),
    (2640, "wait V", 1),
)
LOAD = ((0, "load K", 7), (40, "load Q", 3), (80, "next_work", 0), (130, "acquire K", 1), (300, "load K", 6))


def encode(roles, start: int = 2**33 - 700, hertz: float = HERTZ) -> bytes:
    """The buffer of a recording kernel: what `trace` says that it writes."""
    buffer = bytearray(trace.buffer_bytes(len(roles)))
    last = max(stamps[-1][0] for stamps in roles)
    struct.pack_into("<qq", buffer, trace.START, 10**18, start)
    struct.pack_into("<qq", buffer, trace.END, 10**18 + round(last / hertz * 1e9), start + last)
    for role, stamps in enumerate(roles):
        for i, (clock, operation, argument) in enumerate(stamps):
            at = trace.STAMPS + (role * trace.CAPACITY + i) * trace.STAMP_BYTES
            code = trace.OPERATIONS.index(operation) + 1 + trace.CODES * argument
            struct.pack_into("<II", buffer, at, (start + clock) % 2**32, code)
    return bytes(buffer)


def shifted(stamps, cycles: int):
    return tuple((clock + cycles, operation, argument) for clock, operation, argument in stamps)


# -- cases -------------------------------------------------------------------------------------------------------------
def test_a_case_is_named_as_the_benchmark_names_it():
    for case in (*SUITES["dense"], *SUITES["tail"]):
        assert cases.parse(case.name).name == case.name
        assert asdict(cases.parse(case.name)) | {"base": case.base} == asdict(case)
    assert cases.parse("S1000x3000 D64 H8x2 causal B2 float16") == Case(2, 1000, 3000, 8, 2, 64, True, "float16")
    assert cases.parse("D256 S8192") == Case(2, 8192, 8192, 8, 8, 256)
    assert slug(CASE) == "d128-dense-s4096-b4-h16"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("D128", "has no lengths"),
        ("D128 window512 S4096", "what is 'window512'?"),
        ("S128", "has no head_dim"),
        ("D128 S4096 fast", "what is 'fast'"),
        ("D128 S4096 D64", "a second head_dim, 'D64'"),
        ("D128 S0", "positive"),
        ("D128 S4096 H6x4", "the heads of K divide"),
    ],
)
def test_what_is_no_case_is_refused(name, said):
    with pytest.raises(ValueError, match=said):
        cases.parse(name)


# -- decoding ----------------------------------------------------------------------------------------------------------
def test_stamps_become_spans_from_each_to_the_next():
    made = timeline.decode(encode([LOAD, ATTEND]), roles=2)
    assert made.hertz == pytest.approx(HERTZ, rel=1e-3)
    assert made.lanes == ["load", "attend0", "mma attend0"]
    assert made.lane("load") == [
        Span("load", "load K", 0, 40, tile=7),
        Span("load", "load Q", 40, 80, tile=3),
        Span("load", "next_work", 80, 130),
        Span("load", "acquire K", 130, 300, slot=1),
    ]
    attend = made.lane("attend0")
    assert [(s.begin, s.end) for s in attend] == [(a[0], b[0]) for a, b in zip(ATTEND, ATTEND[1:], strict=False)]
    assert attend[2] == Span("attend0", "wait K", 110, 120, slot=0)
    assert [(s.what, s.tile) for s in attend if s.tile is not None] == [
        ("issue QK", 7),
        ("mask", 7),
        ("exponents", 7),
        ("pack_p", 7),
        ("issue QK", 6),
        ("issue PV", 7),
        ("row_max", 6),
        ("exponents", 6),
        ("pack_p", 6),
    ]


def test_mmas_fly_from_their_issue_to_the_wait_that_retires_them():
    """retire(1) leaves the younger one, PV; it has gone when P is rounded, which waits for it without a stamp."""
    made = timeline.decode(encode([LOAD, ATTEND]), roles=2)
    assert made.lane("mma attend0") == [
        Span("mma attend0", "QK", 120, 700, tile=7),
        Span("mma attend0", "QK", 1400, 1960, tile=6),
        Span("mma attend0", "PV", 1430, 2600, tile=7),
    ]


def test_the_rescale_retires_everything_where_it_happens():
    stamps = [("issue QK", 0), ("issue PV", 10), ("retire(1)", 20), ("row_max", 30), ("retire(0)", 40)]
    spans = timeline.build({"attend0": [Stamp(c, o, 0) for o, c in [*stamps, ("rescale", 60), ("exponents", 70)]]}, 1e9)
    assert [(s.what, s.begin, s.end) for s in spans.lane("mma attend0")] == [("QK", 0, 30), ("PV", 10, 60)]


def test_the_lower_half_of_the_clock_is_enough():
    """Stamps from before the clock was read, and from after its lower half has wrapped."""
    late = shifted(ATTEND, 2**20)
    made = timeline.decode(encode([shifted(LOAD, 300), late], start=2**32 - 100), roles=2)
    assert made.lane("load")[0].begin == 0 and made.lane("attend0")[0].begin == late[0][0] - 300
    early = timeline.decode(encode([LOAD, ((-50, "wait Q", 0), (20, "turn", 0), (90, "drain", 0))]), roles=2)
    assert early.lane("attend0")[0] == Span("attend0", "wait Q", 0, 70, slot=0)
    assert early.lane("load")[0].begin == 50


def test_a_full_buffer_and_an_empty_one():
    full = [(i, "turn", 0) for i in range(trace.CAPACITY)]
    assert len(timeline.decode(encode([LOAD, full]), roles=2).lane("attend0")) == trace.CAPACITY - 1
    with pytest.raises(ValueError, match="it did not record"):
        timeline.decode(bytes(trace.buffer_bytes(2)), roles=2)
    blank = bytearray(encode([LOAD, ATTEND]))
    blank[trace.STAMPS + trace.CAPACITY * trace.STAMP_BYTES :] = bytes(trace.CAPACITY * trace.STAMP_BYTES)
    with pytest.raises(ValueError, match="role 1 of 2 left no stamp"):
        timeline.decode(bytes(blank), roles=2)


def test_every_operation_has_a_kind_and_fits_into_iket():
    kinds = {Span("attend0", operation, 0, 1).kind for operation in trace.OPERATIONS}
    assert kinds == set(KINDS.values()) - {"QK", "PV"}
    assert len(trace.OPERATIONS) <= 30 and max(map(len, trace.OPERATIONS)) <= 32
    assert len(set(trace.OPERATIONS)) == len(trace.OPERATIONS) < trace.CODES


# -- Perfetto ----------------------------------------------------------------------------------------------------------
def test_the_perfetto_file_is_a_trace_of_nested_events_on_named_threads():
    made = timeline.decode(encode([LOAD, ATTEND, shifted(ATTEND, 400)]), roles=3)
    document = json.loads(json.dumps(timeline.to_perfetto(made, "D128", {"case": "D128"})))
    assert timeline.from_perfetto(document) == made
    events = [event for event in document["traceEvents"] if event["ph"] == "X"]
    named = {e["tid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert list(named.values()) == [
        "load",
        "attend0",
        "attend1",
        "mma attend0 PV",
        "mma attend0 QK",
        "mma attend1 PV",
        "mma attend1 QK",
    ]
    assert len(events) == len(made.spans) and {event["tid"] for event in events} == set(named)
    for event in events:
        assert {"name", "cat", "ts", "dur", "pid"} <= set(event)
        assert event["ts"] == pytest.approx(event["args"]["begin"] / (made.hertz / 1e6))
        assert event["dur"] > 0
    for thread in named:
        own = sorted((e["args"]["begin"], e["args"]["end"]) for e in events if e["tid"] == thread)
        assert all(a[1] <= b[0] for a, b in zip(own, own[1:], strict=False)), "events of a thread may not cross"
    assert document["otherData"]["case"] == "D128" and document["displayTimeUnit"] == "ns"


# -- overlap -----------------------------------------------------------------------------------------------------------
def sets(intervals):
    return {cycle for begin, end in intervals for cycle in range(begin, end)}


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple), max_size=6)


@given(intervals, intervals)
def test_intervals_behave_like_sets_of_cycles(a, b):
    joined, other = overlap.union(a), overlap.union(b)
    assert sets(joined) == sets(a)
    assert all(x[0] < x[1] for x in joined) and all(x[1] < y[0] for x, y in zip(joined, joined[1:], strict=False))
    assert sets(overlap.common(joined, other)) == sets(a) & sets(b)
    assert sets(overlap.outside(joined, (3, 20))) == set(range(3, 20)) - sets(a)
    assert overlap.cycles(joined) == len(sets(a))


def test_the_tensor_cores_take_one_mma_after_the_other():
    """A second one waits for the first, a later one starts when it is issued, and none outlives its retirement."""
    assert overlap.mma_cycles(tile_n=128, head_dim=128) == {"QK": 512, "PV": 512}
    assert overlap.mma_cycles(tile_n=128, head_dim=128, ones=8) == {"QK": 512, "PV": 544}
    mmas = [
        Span("mma attend0", "QK", 0, 700),
        Span("mma attend1", "QK", 100, 1100),
        Span("mma attend0", "PV", 2000, 2300),
    ]
    assert [(s.begin, s.end) for s in overlap.busy(mmas, {"QK": 512, "PV": 512})] == [
        (0, 512),
        (512, 1024),
        (2000, 2300),
    ]


def hand_made() -> Timeline:
    """Two warpgroups, 2000 cycles: MMAs of 512 cycles from 0, 1000 and 1200, softmax from 600 to 1000 and 1600 to 2000.

    busy 0-512, 1000-1512, 1512-1900 (retired); idle 512-1000 and 1900-2000, of which softmax 600-1000 and 1900-2000.
    """

    def lane(name, *stamps):
        return [Span(name, what, begin, end) for (begin, what), (end, _) in zip(stamps, stamps[1:], strict=False)]

    spans = [
        *lane("load", (0, "acquire K"), (500, "load K"), (600, "acquire V"), (2000, "")),
        *lane("attend0", (0, "issue QK"), (50, "retire(0)"), (600, "row_max"), (700, "exponents"), (1000, "issue PV")),
        *lane("attend0", (1000, "issue PV"), (1050, "turn"), (1250, "retire(0)"), (1700, "normalise"), (2000, "")),
        *lane("attend1", (0, "issue QK"), (0, "turn"), (1200, "issue QK"), (1250, "retire(0)"), (1600, "exponents")),
        *lane("attend1", (1600, "exponents"), (2000, "")),
        Span("mma attend0", "QK", 0, 600),
        Span("mma attend0", "PV", 1000, 1700),
        Span("mma attend1", "QK", 1200, 1900),
    ]
    return Timeline(tuple(spans), hertz=2e9)


def test_overlap_in_numbers():
    found = overlap.measure(hand_made(), tile_n=128, head_dim=128)
    assert found.window == (0, 2000) and found.as_dict()["microseconds"] == 1.0
    assert found.in_flight == (600 + 900) / 2000
    assert found.busy == (512 + 900) / 2000
    assert found.softmax == (400 + 400) / 2000
    assert found.softmax_exposed == (400 + 100) / 2000
    assert found.idle_else == (600 - 512) / 2000
    assert found.busy + found.softmax_exposed + found.idle_else == pytest.approx(1)
    assert (found.work_tiles, found.kv_tiles, found.tile_floor) == (1, 2, 2 * 2 * 512)
    assert found.shares["attend0"] == {
        "wait": (550 + 200 + 450) / 2000,
        "softmax": 400 / 2000,
        "store": 300 / 2000,
        "issue": 100 / 2000,
        "retire(0)": 1000 / 2000,
        "turn": 200 / 2000,
    }
    assert list(found.shares["load"])[:2] == ["wait", "load"] and found.shares["load"]["acquire V"] == 0.7
    assert all(
        sum(share for name, share in lane.items() if name in KINDS.values()) == 1 for lane in found.shares.values()
    )


def test_the_window_is_what_all_warpgroups_recorded():
    made = hand_made()
    longer = Timeline((*made.spans, Span("attend0", "start", 2000, 9000)), made.hertz)
    assert overlap.measure(longer, 128, 128) == overlap.measure(made, 128, 128)
    silent = Timeline(tuple(s for s in made.spans if s.lane != "attend1" or s.kind != "issue"), made.hertz)
    with pytest.raises(ValueError, match="not every warpgroup issued an MMA"):
        overlap.measure(silent, 128, 128)


def test_periods_are_between_unmasked_tiles():
    steps = [("mask", 0), ("exponents", 10), ("exponents", 1000), ("exponents", 3000), ("exponents", 5100)]
    spans = tuple(Span("attend0", what, at, at + 10) for what, at in steps)
    assert overlap.periods(Timeline(spans, 1e9)) == [2000, 2100]


def test_what_is_done_a_second_time_is_no_other_tile():
    again = ["exponents", "pack_p", "mend", "row_max", "rescale", "exponents", "pack_p"]
    stamps = [("mask", 2), ("exponents", 2), ("pack_p", 0)]
    for tile in (1, 0):
        stamps += [("issue QK", 0), *((what, tile if what in ("exponents", "mend") else 0) for what in again)]
    made = timeline.build({"attend0": [Stamp(i, *stamp) for i, stamp in enumerate([*stamps, ("drain", 0)])]}, 1e9)
    assert timeline.softmaxes(made.lane("attend0")) == [(2, 1, True), (1, 4, False), (0, 12, False)]
    assert overlap.periods(made) == [8]
    assert [s.tile for s in made.lane("attend0") if s.kind == "softmax"] == [2] * 3 + [1] * 7 + [0] * 7


def test_the_predicted_timeline_keeps_the_tensor_cores_busy():
    """The simulator's steady policy: a tile of each warpgroup in every 2048 cycles, all of them MMAs."""
    made = timeline.predict(choose(128, ARCH), causal=False)
    assert made.lanes == ["attend0", "attend1", "mma attend0", "mma attend1"]
    assert sorted(overlap.periods(made))[len(overlap.periods(made)) // 2] == 2048
    assert {span.what for span in made.spans} <= {*trace.OPERATIONS, "QK", "PV"}
    assert timeline.predict(choose(64, ARCH), causal=False) is None


# -- counters ----------------------------------------------------------------------------------------------------------
NCU = """\
==PROF== Connected to process 4242 (/usr/bin/python3.12)
==PROF== Profiling "fmha_forward_bfloat16_dense_d..." - 0: 0%....50%....100% - 38 passes
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"gpu__time_duration.sum","sm__cycles_elapsed.avg.per_second","sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",\
"dram__bytes_read.sum","dram__bytes_write.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed","lts__t_sectors.sum",\
"lts__throughput.avg.pct_of_peak_sustained_elapsed","launch__registers_per_thread",\
"smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio","smsp__issue_active.avg.pct_of_peak_sustained_active"
"","","","","","","","","","","","ns","cycle/nsecond","%","Mbyte","byte","%","sector","%","register/thread","inst","inst","inst","%"
"0","4242","python3.12","127.0.0.1","fmha_forward_bfloat16_dense_d128_336c12a2_0","1","7","(384, 1, 1)","(132, 1, 1)",\
"0","9.0","2,960,000","1.65","86.5","1,000.5","199,500,000","12.5","375,000,000","25","168","0.50","1.25","1.00","n/a"
"""


def test_the_raw_page_of_ncu_is_read_with_its_units():
    (launch,) = roofline.parse(NCU)
    assert launch.kernel == "fmha_forward_bfloat16_dense_d128_336c12a2_0"
    assert launch.metrics["gpu__time_duration.sum"] == pytest.approx(2.96e-3)
    assert launch.metrics["sm__cycles_elapsed.avg.per_second"] == pytest.approx(1.65e9)
    assert launch.metrics["dram__bytes_read.sum"] == pytest.approx(1000.5e6)
    assert "smsp__issue_active.avg.pct_of_peak_sustained_active" not in launch.metrics, "n/a is no number"
    assert not {"ID", "Device", "CC", "Kernel Name"} & set(launch.metrics)


def test_a_launch_is_summarised():
    (launch,) = roofline.parse(NCU)
    found = roofline.summarise(launch, flops=2_200_000_000_000)
    assert found["busy"] == {"tensor pipe": 86.5, "L2": 25.0, "DRAM": 12.5}
    assert list(found["stalls"].items()) == [("gmma", 1.25), ("barrier", 0.5)]
    assert found["flops_per_second"] == pytest.approx(743.2e12, rel=1e-3)
    assert found["bytes"] == {"DRAM": pytest.approx(1.2e9), "L2": pytest.approx(12e9)}
    assert found["roofline"]["L2"] == {
        "flops_per_byte": pytest.approx(2200 / 12),
        "bytes_per_second": pytest.approx(12e9 / 2.96e-3),
        "peak_bytes_per_second": pytest.approx(4 * 12e9 / 2.96e-3),
    }
    assert found["registers"] == 168 and "l2_hit_rate" not in found


@pytest.mark.parametrize(
    ("unit", "factor"),
    [("nsecond", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("Kbyte", 1e3), ("Gbyte", 1e9), ("hz", 1), ("Ghz", 1e9), ("%", 1)],
)
def test_units_of_ncu(unit, factor):
    text = NCU.replace('"ns"', f'"{unit}"')
    assert roofline.parse(text)[0].metrics["gpu__time_duration.sum"] == pytest.approx(2.96e6 * factor)


@pytest.mark.parametrize("text", ["", "==ERROR== ERR_NVGPUCTRPERM - no permission to access counters\n", '"a","b"\n'])
def test_output_without_a_table_is_refused_with_what_ncu_said(text):
    with pytest.raises(roofline.ProfilerError, match="ERR_NVGPUCTRPERM|no table"):
        roofline.parse(text)


def test_the_command_leaves_the_clocks_alone_and_profiles_the_kernel_only():
    made = roofline.command("ncu", Path("t.csv"), ["python", "-m", "x"])
    assert made[0] == "ncu" and made[-3:] == ["python", "-m", "x"]
    pairs = dict(zip(made, made[1:], strict=False))
    assert pairs["--clock-control"] == "none" and pairs["--profile-from-start"] == "off" and pairs["--page"] == "raw"
    assert pairs["--kernel-name"] == "regex:fmha_forward" and pairs["--log-file"] == "t.csv"
    assert pairs["--metrics"].split(",") == list(roofline.METRICS)
    assert "--metrics" not in roofline.command("ncu", Path("t.csv"), [], metrics=False)


# -- IKET --------------------------------------------------------------------------------------------------------------
def iket_document(indexed: bool) -> dict:
    """ATTEND and LOAD as run-iket writes them, beside another warp and another CTA, in either form of its JSON."""
    places = [{"smId": 3, "ctaId": [cta, 0, 0], "warpId": warp} for cta, warp in ((0, 0), (0, 4), (0, 5), (1, 0))]
    names = list(trace.OPERATIONS)
    ranges, marks = [], []
    for place, stamps in ((0, LOAD), (1, ATTEND), (2, ATTEND), (3, LOAD)):
        for clock, operation, _ in reversed(stamps):
            if operation == "exponents":
                marks.append((place, operation, 5000 + clock))
            else:
                ranges.append((place, operation, 5000 + clock))
    if indexed:
        launch = {
            "ranges": [
                {"rangeNameIdx": names.index(o), "startTs": t, "endTs": t + 9, "warpLocIdxs": [p, p]}
                for p, o, t in ranges
            ],
            "markers": [{"markerNameIdx": names.index(o), "timestamp": t, "locIdx": p} for p, o, t in marks],
        }
        return {"stringTable": names, "locationTable": places, "launches": [{"kernelName": "other"}, launch]}
    launch = {
        "ranges": [{"rangeName": o, "startTs": t, "endTs": t + 9, "warpLocs": [places[p]]} for p, o, t in ranges],
        "markers": [{"markerName": o, "timestamp": t, "location": places[p]} for p, o, t in marks],
    }
    return {"launches": [launch]}


@pytest.mark.parametrize("indexed", [True, False])
def test_a_trace_of_iket_is_the_timeline_of_its_first_cta(tmp_path, indexed):
    (tmp_path / "iket_pid_0x1.trace.json").write_text(json.dumps(iket_document(indexed)))
    (path,) = iket.traces(tmp_path)
    (made,) = iket.read(path)
    stamped = timeline.decode(encode([LOAD, ATTEND]), roles=2)
    assert made.hertz == 1e9
    assert [s[:4] for s in made.spans] == [s[:4] for s in stamped.spans], "all but the tiles, which IKET is not told"


def test_run_iket_is_told_where_and_what():
    made = iket.command(Path("out"), ["python", "x.py"])
    assert made[0] == sys.executable and made[-3:] == ["--", "python", "x.py"]
    from iket.cli.main import get_parser

    known, rest = get_parser().parse_known_args(made[3:])
    assert (known.output_dir, known.clobber, known.postprocess) == ("out", True, "all")
    assert (known.enabled_cluster, known.max_ts_cnt_per_warp) == ("0,0,0", iket.EVENTS_PER_WARP)
    assert rest == ["--", "python", "x.py"]


# -- the recording kernels ---------------------------------------------------------------------------------------------
def build(mask: str, recorder: str | None, head_dim: int = 128) -> bytes:
    config = choose(head_dim, ARCH)
    return compile.cubin(compile.compile_object(Problem("bfloat16", head_dim, mask), config, ARCH, recorder=recorder))


@pytest.fixture(scope="module")
def plain() -> sass.Resources:
    return sass.read(build("dense", None))


def retiring(resources: sass.Resources) -> list[tuple[int, bool]]:
    """The body loop's waits for MMAs, and whether each comes before most of the exponentials."""
    return [(wait.pending, wait.ex2 < resources.body.kinds["ex2"] // 2) for wait in resources.body.waits]


@pytest.mark.parametrize(("recorder", "mask"), [("stamps", "dense"), ("stamps", "causal"), ("iket", "dense")])
def test_a_recording_kernel_computes_and_waits_as_the_plain_one(plain, recorder, mask):
    """The same MMAs in the same groups, and the wait for PV among the exponentials, where the compiler has put it."""
    made = sass.read(build(mask, recorder))
    assert made.function.endswith(f"_{recorder}_0") and recorder not in plain.function
    assert made.body.kinds["mma"] == plain.body.kinds["mma"]
    assert made.body.kinds["ex2"] == plain.body.kinds["ex2"]
    assert retiring(made) == retiring(plain) == [(1, True), (0, True)]
    assert made.body.kinds["local"] == 0 and made.spills < 32  # in the rare branches, for the recorder's registers


def test_every_wait_moves_the_one_for_pv():
    """Where the exponentials are written over S, as at head dim 256."""
    plain, made = (sass.read(build("dense", recorder, head_dim=256)) for recorder in (None, "every_wait"))
    assert retiring(plain) == [(1, True), (0, True)] and retiring(made) == [(1, True), (0, False)]
    assert made.body.kinds["mma"] == plain.body.kinds["mma"]


class Written(trace.Recorder):
    def __init__(self, every_wait: bool) -> None:
        super().__init__(every_wait)
        self.said: list[str] = []

    def record(self, operation: str, argument: int) -> None:
        self.said.append(operation)

    def end(self) -> None:
        if not self.hidden:
            self.said.append("end")


@pytest.mark.parametrize("every_wait", [True, False])
def test_only_the_wait_after_the_exponentials_is_passed_over(every_wait):
    recorder = Written(every_wait)
    for operation in ("row_max", "retire(0)", "exponents", "retire(0)", "pack_p", "retire(0)"):
        recorder.begin(operation)
        recorder.end()
    hidden = ["retire(0)"] if every_wait else []
    expected = ["row_max", "retire(0)", "exponents", *hidden, "pack_p", "retire(0)"]
    assert recorder.said == [word for operation in expected for word in (operation, "end")]


def test_ikets_ranges_open_and_close_one_at_a_time(monkeypatch):
    """The exponentials are a mark, and an MMA's range is closed by its commit."""
    said = []
    monkeypatch.setattr(trace.iket, "mark", lambda name: said.append(f"mark {name}"))
    monkeypatch.setattr(trace.iket, "range_push", lambda name: said.append(f"({name}"))
    monkeypatch.setattr(trace.iket, "range_pop", lambda: said.append(")"))
    recorder = trace.Iket(every_wait=False)
    for operation in ("row_max", "exponents", "retire(0)", "pack_p"):
        recorder.begin(operation, 3)
        recorder.end()
    assert said == ["(row_max", ")", "mark exponents", "(pack_p", ")"]


def test_without_recording_the_object_is_that_of_a_tree_without_it(tmp_path):
    """Byte for byte: made in this process, which has made recording kernels, and by sources that have none."""
    for package in ("fmha", "schedules"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "trace.py"))
    script = (
        "import sys, fmha; from fmha.jit import compile; from fmha.problem import Problem\n"
        "from schedules.tiling import choose\n"
        f"assert fmha.__file__.startswith({str(tmp_path)!r})\n"
        f"made = compile.compile_object(Problem('bfloat16', 128, 'dense'), choose(128, {ARCH!r}), {ARCH!r})\n"
        "assert not [name for name in sys.modules if name.endswith('.trace') and name.startswith('fmha')]\n"
        "sys.stdout.buffer.write(made)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    without = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, check=True
    ).stdout
    problem, config = Problem("bfloat16", 128, "dense"), choose(128, ARCH)
    assert compile.compile_object(problem, config, ARCH, recorder="stamps") != without
    assert compile.compile_object(problem, config, ARCH) == without


# -- the workload ------------------------------------------------------------------------------------------------------
def test_a_workload_calls_the_kernel_as_the_library_does(monkeypatch):
    """Argument by argument, but for the counter, which is its own and has the buffer behind it."""
    import torch

    calls = []
    device = launch.Device(ARCH, l2_bytes=60 << 20, multiprocessors=132)
    monkeypatch.setattr(launch, "describe_device", lambda _: device)
    monkeypatch.setattr(library, "loaded", lambda *_: "the library's function")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(library, "object_file", lambda *_: b"")
    monkeypatch.setattr(compile, "load", lambda _: lambda *arguments: calls.append(arguments))
    qkv = tuple(torch.zeros(2, s, h, 64, dtype=torch.bfloat16) for s, h in ((200, 8), (300, 2), (300, 2)))
    kernel = workload.Kernel(Case(2, 200, 300, 8, 2, 64, True), qkv, None)
    kernel()
    kernel()
    assert kernel.plan.function == "the library's function"
    first, second = calls
    sizes, *addresses = first[:5]
    assert addresses == [tensor.data_ptr() for tensor in (*qkv, kernel.out)] and kernel.out.isnan().all()
    lse, sinks, slopes, scale_log2, cap_factor, counter, base, stream, *lengths = first[5:]
    assert lengths == [0] * 4
    assert (sizes, lse, sinks, slopes, base, stream) == (kernel.plan.sizes.address, 0, 0, 0, 0, 7)
    assert scale_log2 == pytest.approx(math.log2(math.e) / 8) and cap_factor == 1
    assert counter == kernel.buffer.data_ptr()
    numbers = dict(zip(SIZES, kernel.plan.sizes.numbers, strict=True))
    assert (numbers["head_group"], numbers["multiprocessors"], numbers["seqlen_k"]) == (64, 132, 300)
    assert second[11] == 2 * 8 * 2, "the counter goes on where the first launch left it: two tiles of 128 queries"
    assert kernel.buffer.numel() * 8 == trace.buffer_bytes(roles=3)


def test_a_case_is_made_small_for_iket():
    small = workload.shrunk(cases.parse("D128 causal S16384"), multiprocessors=132)
    assert (small.batch, small.heads_q, small.seqlen_q, small.causal) == (1, 2, 16384, True)
    assert workload.shrunk(cases.parse("D128 S512"), 132).heads_q == 66
    assert workload.shrunk(cases.parse("D128 S512 B1 H2"), 132).heads_q == 2


# -- the command -------------------------------------------------------------------------------------------------------
def leave(out: Path, case: Case = CASE, recorder: str = "stamps") -> None:
    """What the steps leave in `out`/raw."""
    raw = out / "raw"
    profile.remember(raw, [case], META)
    (raw / f"{slug(case)}.{recorder}.bin").write_bytes(encode([LOAD, ATTEND, shifted(ATTEND, 500)]))
    row = {
        "recorder": recorder,
        "roles": 3,
        "config": asdict(choose(128, ARCH)),
        "seconds": {"plain": 1e-3, "recording": 1.08e-3},
        "deviation": 0.0,
        "waits": {"plain": [{"pending": 0, "maxima": 68, "ex2": 8}], "recording": "no disassembler"},
    }
    (raw / f"{slug(case)}.{recorder}.json").write_text(json.dumps(row))
    (raw / f"{slug(case)}.counters.json").write_text(json.dumps(asdict(roofline.parse(NCU)[0])))
    made = timeline.decode(encode([LOAD, ATTEND]), roles=2)
    (raw / f"{slug(case)}.iket.json").write_text(json.dumps(timeline.to_perfetto(made, case.name, {})))


def png(path: Path) -> tuple[int, int]:
    """Width and height."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", content[16:24])


def test_what_the_steps_left_becomes_numbers_timelines_and_pictures(tmp_path, capsys):
    leave(tmp_path)
    assert profile.main(["--redo", "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    document = json.loads((tmp_path / "profile.json").read_text())
    (row,) = document["rows"]
    assert row["case"]["name"] == "D128 dense S4096 B4 H16" and document["meta"] == META
    assert row["stamps"]["kv_tiles"] == 4 and row["stamps"]["window"] == [620, 2640]
    assert row["counters"]["busy"]["tensor pipe"] == 86.5
    assert row["iket"]["nanoseconds"] == 2640
    lines = {line.split("  ")[0]: line.split()[-1] for line in table.splitlines()}
    assert lines["rate in turns"] == f"{CASE.flops / 1e-3 / 1e12:.0f}"
    assert lines["recording takes"] == "8"
    assert lines["exponentials before the wait for PV"] == "8" and "the same while recording" not in lines
    assert lines["stall 1"] == "1.25" and lines["busy: DRAM"] == "12.5"
    assert (
        lines["attend1: wait 1"] == f"{100 * 550 / 2020:.1f}" and lines["attend1: wait 2"] == f"{100 * 500 / 2020:.1f}"
    )
    name = slug(CASE)
    shown = timeline.from_perfetto(json.loads((tmp_path / f"{name}.timeline.json").read_text()))
    assert shown.lane("attend0") == timeline.decode(encode([LOAD, ATTEND]), 2).lane("attend0")
    for picture in ("timeline", "counters", "iket"):
        width, height = png(tmp_path / f"{name}.{picture}.png")
        assert width > 1000 and height > 300
    page = (tmp_path / "profile.md").read_text()
    assert f"]({name}.timeline.png)" in page and f"]({name}.every-wait.png)" not in page
    assert "| busy: DRAM | % | 12.5 |" in page


def test_a_damaged_part_costs_only_itself(tmp_path):
    leave(tmp_path)
    path = tmp_path / "raw" / f"{slug(CASE)}.stamps.bin"
    path.write_bytes(path.read_bytes()[:100])
    assert "stamps failed" in evaluate.evaluate(tmp_path, {"iket": "gone"})
    document = json.loads((tmp_path / "profile.json").read_text())
    assert document["failed"] == {"iket": "gone"}
    assert "error" in document["rows"][0]["stamps"] and "busy" in document["rows"][0]["counters"]


def test_without_matplotlib_there_are_numbers_and_no_pictures(tmp_path, monkeypatch):
    leave(tmp_path)
    for module in [name for name in sys.modules if name == "perf.picture" or name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    evaluate.evaluate(tmp_path, {})
    (row,) = json.loads((tmp_path / "profile.json").read_text())["rows"]
    assert row["stamps"]["not_drawn"] == row["counters"]["not_drawn"] == "matplotlib is not installed"
    assert row["stamps"]["kv_tiles"] == 4 and not list(tmp_path.glob("*.png"))


def test_raw_files_of_other_sources_go(tmp_path):
    raw = tmp_path / "raw"
    profile.remember(raw, [CASE], META)
    (raw / "file").touch()
    other = cases.parse("D64 S512")
    profile.remember(raw, [other, CASE], {**META, "date": "later"})
    kept = json.loads((raw / "profile.json").read_text())
    assert [Case.of(case) for case in kept["cases"]] == [CASE, other] and kept["meta"]["date"] == "later"
    profile.remember(raw, [other], {**META, "source": "new"})
    assert not (raw / "file").exists()
    assert [Case.of(case) for case in json.loads((raw / "profile.json").read_text())["cases"]] == [other]


def test_a_missing_ncu_is_said_and_the_rest_runs(tmp_path, monkeypatch, capsys):
    ran = []
    monkeypatch.setattr(roofline, "find", lambda: None)
    monkeypatch.setattr(profile, "run", lambda command, log, seconds: ran.append(log.name))
    (tmp_path / f"{slug(CASE)}.counters.json").touch()
    failed = profile.collect([CASE], ["counters", "stamps"], tmp_path)
    assert list(failed) == ["counters"] and "ncu is not on the PATH" in failed["counters"]
    assert ran == ["stamps.log"] and "ncu is not on the PATH" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "what an earlier run had counted is not passed off as this one's"


def test_ncu_is_asked_for_its_sections_if_it_does_not_know_a_metric(tmp_path, monkeypatch):
    asked = []

    def run(command, log, seconds):
        asked.append("--metrics" in command)
        text = "==ERROR== no such metric\n" if asked[-1] else NCU
        Path(command[command.index("--log-file") + 1]).write_text(text)

    monkeypatch.setattr(roofline, "find", lambda: "ncu")
    monkeypatch.setattr(profile, "run", run)
    assert profile.collect([CASE], ["counters"], tmp_path) == {}
    assert asked == [True, False]
    kept = json.loads((tmp_path / f"{slug(CASE)}.counters.json").read_text())
    assert roofline.Launch(**kept) == roofline.parse(NCU)[0]
    assert "2" in profile.collect([CASE, cases.parse("D64 S512")], ["counters"], tmp_path)["counters"]


def test_the_timelines_of_run_iket_are_kept_by_case(tmp_path, monkeypatch):
    def run(command, log, seconds):
        out = Path(command[command.index("--output-dir") + 1])
        out.mkdir()
        (out / "iket_pid_1.trace.json").write_text(json.dumps(iket_document(True)))

    monkeypatch.setattr(profile, "run", run)
    assert profile.collect([CASE], ["iket"], tmp_path) == {}
    kept = timeline.from_perfetto(json.loads((tmp_path / f"{slug(CASE)}.iket.json").read_text()))
    assert len(kept.lane("attend0")) == len(ATTEND) - 1
    assert not iket.traces(tmp_path / "iket")


def test_a_command_that_fails_or_hangs_is_reported_with_its_last_words(tmp_path):
    log = tmp_path / "log"
    profile.run([sys.executable, "-c", "print('fine')"], log, 60)
    assert log.read_text() == "fine\n"
    with pytest.raises(profile.StepFailed, match=r"exit code 3: last words .*log"):
        profile.run([sys.executable, "-c", "print('last words'); raise SystemExit(3)"], log, 60)
    with pytest.raises(profile.StepFailed, match="stopped after 1 s: begun"):
        profile.run([sys.executable, "-c", "import time; print('begun'); time.sleep(60)"], log, 1)


def test_what_a_command_has_started_ends_with_it(tmp_path):
    """A profiler's workload must not go on holding the GPU."""
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    with pytest.raises(profile.StepFailed, match="stopped"):
        profile.run([sys.executable, "-c", parent, child, str(tmp_path / "pid")], tmp_path / "log", 2)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"process {pid} is still there")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no CASE"),
        (["D128"], "has no lengths"),
        (["--head-dim", "128"], "together"),
        (["D128 S512", "--steps", "dance"], "dance"),
        (["D128 S512", "--collect", "--redo"], "one of them"),
    ],
)
def test_bad_arguments_are_refused(arguments, said, capsys):
    with pytest.raises(SystemExit):
        profile.parse([*arguments, "--out", "x"])
    assert said in capsys.readouterr().err


def test_a_case_may_be_given_as_options():
    args = profile.parse(["--head-dim", "128", "--seqlen", "4096", "--causal", "--heads", "8", "--out", "x"])
    assert [case.name for case in args.cases] == ["D128 causal S4096 B4 H8"]
    assert args.steps == ["record", "counters", "iket"]


def test_without_a_gpu_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert profile.main([CASE.name, "--out", str(tmp_path)]) == 2
    assert workload.main(["counters", CASE.name]) == 2
    assert "no CUDA device" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert profile.main(["--redo", "--out", str(tmp_path)]) == 2


def test_collecting_leaves_the_evaluation_to_another_time(tmp_path, monkeypatch, capsys):
    def collect(chosen, parts, raw):
        leave(tmp_path)
        return {}

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(profile, "describe", lambda argv: META)
    monkeypatch.setattr(profile, "collect", collect)
    assert profile.main([CASE.name, "--collect", "--out", str(tmp_path)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["raw"] and not capsys.readouterr().out
    assert profile.main(["--redo", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "profile.md").exists()


def test_the_table_leaves_out_what_no_case_has():
    header, lines = findings.cells([{"case": {"name": "a", "flops": 1}}, {"case": {"name": "b", "flops": 1}}])
    assert header == ["", "unit", "a", "b"] and lines == []
