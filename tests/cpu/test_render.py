"""Pictures of a schedule, and that a steady one shows what the programs are written for: overlap."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from schedules import render
from schedules.machine import Event
from tests.cpu import paged
from tests.cpu.simulation import Problem, run


def steady_trace() -> list[Event]:
    return run(Problem(30, 60, heads=2), policy="steady").trace


def test_the_steady_policy_puts_one_softmax_beside_the_others_mmas():
    events = [event for event in steady_trace() if event.cta == 0]
    exponents = [event for event in events if event.lane == "attend0" and event.what == "exponents"]
    mmas = [event for event in events if event.lane == "mma attend1"]
    assert len(exponents) == 4 and len(mmas) == 4 + 4 + 1, "QK, PV, and the QK of the work tile that does not come"
    overlap = sum(max(0, min(e.end, m.end) - max(e.begin, m.begin)) for e in exponents for m in mmas)
    assert overlap >= sum(e.end - e.begin for e in exponents) / 2
    tensor_core = sorted((e.begin, e.end) for e in events if e.lane.startswith("mma"))
    assert all(a[1] <= b[0] for a, b in zip(tensor_core, tensor_core[1:], strict=False)), "there is one tensor core"


def test_the_timeline_has_a_lane_per_role_with_every_bar_in_its_place():
    trace = steady_trace()
    text = render.timeline(trace, cta=1, width=10_000, unit=3)
    header, *lanes = text.splitlines()
    assert header.strip() == "step 0"
    margin = len("mma attend0") + 2
    rows = {lane[:margin].strip(): lane[margin:] for lane in lanes}
    assert list(rows) == ["attend0", "attend1", "tma load", "mma attend0", "mma attend1", "tma attend0", "tma attend1"]
    shown = [event for event in trace if event.cta == 1 and event.end > event.begin and event.lane != "tma load"]
    assert len(shown) > 20
    for event in shown:
        bar = rows[event.lane][event.begin * 3 : event.end * 3]
        assert bar.startswith(f"{event.tile} {event.what}"[: len(bar) - 1]) and bar.endswith("│"), (event, bar)


def test_decoding_copies_as_many_tiles_as_there_are_slots_without_a_pause():
    """Five tiles and four stages: the last K and V wait for slots, and the copies before them run beside the first
    tile's MMAs and exponentials."""
    trace = paged.run(paged.whole([90, 40], stages=4, multiprocessors=2), policy="steady").trace
    events = [event for event in trace if event.cta == 0]
    copies = sorted((e.begin, e.end) for e in events if e.lane == "tma fetch")
    assert len(copies) == 5 + 5 + 1
    assert all(a[1] == b[0] for a, b in pairwise(copies[:9]))
    first = next(e for e in events if e.lane == "decode" and e.what == "exponents")
    assert first.end < copies[8][1]
    rows = render.timeline(trace, width=10_000).splitlines()[1:]
    assert [row[: len("mma decode")].strip() for row in rows] == ["decode", "tma fetch", "mma decode"]


def test_the_timeline_is_folded_at_its_width():
    trace = steady_trace()
    folded = render.timeline(trace, width=80)
    assert max(map(len, folded.splitlines())) <= 80
    lanes = [line[13:].ljust(67) for line in folded.splitlines() if line.strip().startswith("mma attend0")]
    whole = [line[13:] for line in render.timeline(trace, width=10_000).splitlines() if "mma attend0" in line]
    assert "".join(lanes).rstrip() == whole[0]


def test_mermaid_is_a_gantt_chart_with_every_bar():
    trace = steady_trace()
    lines = render.mermaid(trace, title="Two warpgroups").splitlines()
    assert lines[:4] == ["gantt", "    title Two warpgroups", "    dateFormat X", "    axisFormat %s"]
    bars = [line for line in lines if re.fullmatch(r"    [^:]+ : \d+, \d+", line)]
    sections = [line for line in lines if line.startswith("    section ")]
    assert len(bars) == sum(event.cta == 0 and event.end > event.begin for event in trace)
    assert len(bars) + len(sections) + 4 == len(lines)
    (qk,) = [e for e in trace if e.cta == 0 and e.lane == "mma attend0" and e.what == "QK" and e.tile == 2]
    assert f"    QK 2 : {qk.begin}, {qk.end}" in lines


def test_a_trace_without_the_cta_is_refused():
    with pytest.raises(ValueError, match="cta 9: the trace has no event of it"):
        render.timeline(steady_trace(), cta=9)
