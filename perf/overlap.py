"""How well a timeline overlaps MMAs with the softmax, in numbers.

An MMA is *in flight* from its issue to the wait that retires it. It need not be running: it may queue behind another
warpgroup's, and it may have been done for long when somebody waits for it. So when the tensor cores are *busy* is
estimated: they take MMAs in the order of their issue, one at a time, at the full rate, and an MMA is done at the latest
when it is seen to be retired.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf.timeline import LOAD, Span, Timeline, softmaxes

FLOPS_PER_CYCLE = 4096  # of one Hopper multiprocessor, dense 16-bit MMAs: 989 TFLOP/s at 132 x 1.83 GHz
ROWS = 64  # of one wgmma

Interval = tuple[int, int]


# -- sets of cycles: sorted, disjoint intervals ------------------------------------------------------------------------
def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The cycles in any of them."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif begin < end:
            merged.append((begin, end))
    return merged


def common(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """The cycles in both."""
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            found.append((begin, end))
        i, j = (i + 1, j) if a[i][1] < b[j][1] else (i, j + 1)
    return found


def outside(a: Sequence[Interval], window: Interval) -> list[Interval]:
    """The cycles of the window that are not in `a`."""
    edges = [window[0], *(edge for interval in common(a, [window]) for edge in interval), window[1]]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]


def cycles(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


# -- the tensor cores --------------------------------------------------------------------------------------------------
def mma_cycles(tile_n: int, head_dim: int, ones: int = 0) -> dict[str, int]:
    """Of the QK and the PV of a warpgroup, at the full rate: 2 * 64 * tile_n operations for each of head_dim columns,
    and in PV for each column of ones, too."""
    column = 2 * ROWS * tile_n
    return {"QK": column * head_dim // FLOPS_PER_CYCLE, "PV": column * (head_dim + ones) // FLOPS_PER_CYCLE}


def busy(mmas: Iterable[Span], each: Mapping[str, int]) -> list[Span]:
    """When the tensor cores work on each MMA that was in flight, at so many cycles: an estimate, see above."""
    free, spans = 0, []
    for mma in sorted(mmas, key=lambda mma: mma.begin):
        begin = max(mma.begin, free)
        free = max(begin, min(begin + each[mma.what], mma.end))
        spans.append(mma._replace(begin=begin, end=free))
    return spans


# -- the numbers -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Overlap:
    """Shares are of the window: from when every warpgroup has issued an MMA to the last stamp that all have."""

    window: Interval  # cycles of the timeline
    hertz: float
    work_tiles: int  # whose O was divided by its sum in the window, by any warpgroup
    kv_tiles: int  # whose softmax began in it, over all warpgroups
    in_flight: float  # share with an MMA in flight
    busy: float  # estimated share in which the tensor cores work
    softmax: float  # share in which some warpgroup is in its softmax
    softmax_exposed: float  # the part of that beside which the tensor cores are not busy
    idle_else: float  # not busy, and no softmax either
    tile_cycles: float  # from one unmasked tile to the next of a warpgroup, median
    tile_floor: int  # the cycles of all warpgroups' MMAs for one tile each
    shares: Mapping[str, Mapping[str, float]]  # lane: kind of operation, and each wait by name

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in vars(self).items() if name not in ("window", "shares")},
            "window": list(self.window),
            "microseconds": cycles([self.window]) / self.hertz * 1e6,
            "shares": {lane: dict(shares) for lane, shares in self.shares.items()},
        }


def measure(timeline: Timeline, tile_n: int, head_dim: int, ones: int = 0) -> Overlap:
    """The numbers of a timeline whose MMAs are of `tile_n` keys, `head_dim` and `ones`. ValueError if too short."""
    each = mma_cycles(tile_n, head_dim, ones)
    window = steady(timeline)
    length = cycles([window])
    inside = timeline.between(*window)
    mmas = [span for span in timeline.spans if span.kind in ("QK", "PV")]
    working = common(union((s.begin, s.end) for s in busy(mmas, each)), [window])
    roles = [span for span in inside.spans if span.lane in (LOAD, *timeline.attends)]
    softmax = union((s.begin, s.end) for s in roles if s.kind == "softmax")
    idle = outside(working, window)
    exposed = common(softmax, idle)
    return Overlap(
        window=window,
        hertz=timeline.hertz,
        work_tiles=sum(s.what == "normalise" for s in roles),
        kv_tiles=sum(len(softmaxes(inside.lane(lane))) for lane in timeline.attends),
        in_flight=cycles(common(union((s.begin, s.end) for s in mmas), [window])) / length,
        busy=cycles(working) / length,
        softmax=cycles(softmax) / length,
        softmax_exposed=cycles(exposed) / length,
        idle_else=(cycles(idle) - cycles(exposed)) / length,
        tile_cycles=statistics.median(periods(timeline) or [0]),
        tile_floor=len(timeline.attends) * sum(each.values()),
        shares=lane_shares(roles, length),
    )


def steady(timeline: Timeline) -> Interval:
    """From when every warpgroup has issued an MMA to the last cycle that every one of them has recorded."""
    lanes = {lane: timeline.lane(lane) for lane in timeline.attends}
    issued = {lane: [span for span in spans if span.kind == "issue"] for lane, spans in lanes.items()}
    if not lanes or not all(issued.values()):
        raise ValueError(f"{', '.join(timeline.lanes) or 'an empty timeline'}: not every warpgroup issued an MMA")
    begin = max(spans[0].begin for spans in issued.values())
    end = min(spans[-1].end for spans in lanes.values())
    if end <= begin:
        raise ValueError(f"cycles {begin} to {end}: the warpgroups recorded no time in common")
    return begin, end


def periods(timeline: Timeline) -> list[int]:
    """Cycles between the softmaxes of consecutive unmasked tiles, over all warpgroups."""
    found = []
    for lane in timeline.attends:
        softmax = softmaxes(timeline.lane(lane))
        for before, now in zip(softmax, softmax[1:], strict=False):
            if not (before.masked or now.masked):
                found.append(now.begin - before.begin)
    return found


def lane_shares(spans: Iterable[Span], length: int) -> dict[str, dict[str, float]]:
    """For each lane the share of each kind of operation, and after them that of each wait by name, largest first."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    return {
        lane: _shares(((s.kind, s.cycles) for s in own), length)
        | _shares(((s.what, s.cycles) for s in own if s.kind == "wait"), length)
        for lane, own in lanes.items()
    }


def _shares(parts: Iterable[tuple[str, int]], length: int) -> dict[str, float]:
    taken: dict[str, int] = defaultdict(int)
    for name, spent in parts:
        taken[name] += spent
    return {name: spent / length for name, spent in sorted(taken.items(), key=lambda part: -part[1])}
