"""What the roles of one CTA did when: from a recorded kernel to spans, and to a file for Perfetto.

A timeline has a lane for each role, "load" and "attend0" onwards, on which one operation follows the other without a
gap, and a lane for the MMAs of each warpgroup, "mma attend0" onwards: from issue to the wait that retires them. Times
are cycles of the multiprocessor's clock from the first stamp on. Operations have the names that the simulator gives
them, so that a predicted timeline (`predict`) and a measured one can be laid side by side.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

SIMULATED_CYCLES = 64  # one step of the simulator's "steady" policy, for tiles of 128 keys and head dim 128
LOAD = "load"

KINDS: Mapping[str, str] = {  # the first word of an operation: what it is to the reader of a timeline
    "acquire": "wait",
    "reclaim": "wait",
    "wait": "wait",
    "borrow": "wait",
    "turn": "wait",
    "retire": "wait",
    "drain": "wait",
    "publish_o": "wait",
    "load": "load",
    "next_work": "load",
    "issue": "issue",
    "start": "softmax",
    "mask": "softmax",
    "row_max": "softmax",
    "rescale": "softmax",
    "exponents": "softmax",
    "pack_p": "softmax",
    "foresee": "softmax",
    "mend": "softmax",
    "normalise": "store",
    "stage_o": "store",
    "store_o": "store",
    "store": "store",
    "QK": "QK",
    "PV": "PV",
}


class Span(NamedTuple):
    """`lane` did `what`, of a KV tile (for Q and O: a Q tile) or of a slot of a ring, from cycle `begin` to `end`."""

    lane: str
    what: str
    begin: int
    end: int
    tile: int | None = None
    slot: int | None = None

    @property
    def kind(self) -> str:
        """One of the values of `KINDS`. KeyError for an operation that is not there."""
        return KINDS[re.split(r"[ (.]", self.what)[0]]

    @property
    def cycles(self) -> int:
        return self.end - self.begin


class Stamp(NamedTuple):
    """A role begins an operation; `argument` is its tile or slot, as the operation has it."""

    clock: int
    operation: str
    argument: int | None


@dataclass(frozen=True)
class Timeline:
    """Spans by lane and time, and the clock they are counted by."""

    spans: tuple[Span, ...]
    hertz: float

    def lane(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.lane == name]

    @property
    def lanes(self) -> list[str]:
        """Roles first, then MMAs."""
        return sorted({span.lane for span in self.spans}, key=lambda lane: (" " in lane, lane != LOAD, lane))

    @property
    def attends(self) -> list[str]:
        return [lane for lane in self.lanes if lane.startswith("attend")]

    def between(self, begin: int, end: int) -> Timeline:
        """The spans that lie in part between two cycles, cut off there."""
        cut = (s._replace(begin=max(s.begin, begin), end=min(s.end, end)) for s in self.spans)
        return replace(self, spans=tuple(span for span in cut if span.begin < span.end))


# -- decoding ----------------------------------------------------------------------------------------------------------
def decode(buffer: bytes, roles: int) -> Timeline:
    """The timeline in what `fmha.kernels.sm90.trace` wrote behind the counter, for a producer and `roles - 1`
    warpgroups. ValueError if that is nothing."""
    from fmha.kernels.sm90 import trace

    clocks = np.frombuffer(buffer, np.int64, 6, trace.START).reshape(3, 2)  # START, what lies between, END
    (begin_ns, begin), (end_ns, end) = clocks[0].tolist(), clocks[2].tolist()
    if end_ns <= begin_ns or end <= begin:
        raise ValueError(f"the kernel left the clocks {begin_ns} ns, {begin} and {end_ns} ns, {end}: it did not record")
    recorded = {}
    for role in range(roles):
        start = trace.STAMPS + role * trace.CAPACITY * trace.STAMP_BYTES
        words = np.frombuffer(buffer, np.uint32, 2 * trace.CAPACITY, start).reshape(-1, 2).astype(np.int64)
        written = words[: int(np.argmin(words[:, 1] != 0)) if (words[:, 1] == 0).any() else None]
        if not len(written):
            raise ValueError(f"role {role} of {roles} left no stamp")
        name = LOAD if role == 0 else f"attend{role - 1}"
        recorded[name] = [_stamp(clock, code, begin, trace.OPERATIONS) for clock, code in written.tolist()]
    return build(recorded, hertz=(end - begin) / (end_ns - begin_ns) * 1e9)


def _stamp(clock: int, code: int, begin: int, operations: Sequence[str]) -> Stamp:
    """A stamp has the lower half of the clock: the whole one is that within 2^31 cycles of `begin`."""
    from fmha.kernels.sm90.trace import CODES

    since = (clock - begin) % 2**32
    return Stamp(since - 2**32 if since >= 2**31 else since, operations[code % CODES - 1], code // CODES)


def build(recorded: Mapping[str, Sequence[Stamp]], hertz: float) -> Timeline:
    """A timeline of the stamps of each role. The last one of each has no end, and is left out."""
    first = min(stamps[0].clock for stamps in recorded.values())
    spans: list[Span] = []
    for lane, stamps in recorded.items():
        moved = [stamp._replace(clock=stamp.clock - first) for stamp in stamps]
        done = list(_spans(lane, moved) if lane == LOAD else name_tiles(list(_spans(lane, moved))))
        spans += done
        if lane != LOAD:
            spans += flights(done)
    return Timeline(tuple(spans), hertz)


TILED = ("load", "mask", "exponents", "mend", "store_o")  # whose argument is a tile
SLOTTED = ("acquire", "wait", "borrow", "issue", "stage_o")  # and whose is a slot


def _spans(lane: str, stamps: Sequence[Stamp]) -> Iterator[Span]:
    for now, then in zip(stamps, stamps[1:], strict=False):
        word = now.operation.split()[0]
        tile = now.argument if word in TILED else None
        slot = now.argument if word in SLOTTED else None
        yield Span(lane, now.operation, now.clock, then.clock, tile, slot)


def name_tiles(spans: Sequence[Span]) -> list[Span]:
    """A warpgroup's spans with the tiles of its MMAs and its softmax: the n-th QK, and the n-th PV, are of the n-th
    tile that is exponentiated."""
    order = [span.tile for span in softmaxes(spans)]
    tiles = {what: iter(order) for what in ("issue QK", "issue PV")}
    exponents = [i for i, span in enumerate(spans) if span.what == "exponents"]
    named = []
    for i, span in enumerate(spans):
        before, after = (spans[j].tile if j is not None else None for j in _around(exponents, i))
        if span.what in tiles:
            span = span._replace(tile=next(tiles[span.what], None))
        elif span.what in ("row_max", "rescale"):
            span = span._replace(tile=after)
        elif span.what == "pack_p":
            span = span._replace(tile=before)
        named.append(span)
    return named


def _around(places: Sequence[int], i: int) -> tuple[int | None, int | None]:
    """The last of the ascending `places` before i and the first one behind it."""
    at = bisect.bisect_left(places, i)
    return places[at - 1] if at else None, places[at] if at < len(places) else None


class Softmax(NamedTuple):
    """The softmax of a KV tile, from its first exponential on."""

    tile: int | None
    begin: int
    masked: bool


def softmaxes(spans: Sequence[Span]) -> list[Softmax]:
    """Those of a warpgroup. What an optimistic one mends by doing it a second time is no other tile: it then looks for
    row maxima."""
    found = []
    masked = mends = again = False
    for span in spans:
        if span.what == "exponents":
            if not again:
                found.append(Softmax(span.tile, span.begin, masked))
            masked = mends = again = False
        masked |= span.what == "mask"
        again |= span.what == "row_max" and mends
        mends = span.what == "mend"
    return found


def flights(spans: Sequence[Span]) -> Iterator[Span]:
    """The MMAs of a warpgroup: in flight from their issue to the end of the wait that retires them.

    `retire(n)` retires all but the last n. The wait for PV among the exponentials has no stamp; the rounding of P comes
    after it. MMAs that are never seen to retire are left out.
    """
    pending: list[Span] = []
    for span in spans:
        if span.what.startswith("issue"):
            pending.append(span)
            continue
        if match := re.fullmatch(r"retire\((\d+)\)", span.what):
            keep, end = int(match[1]), span.end
        elif span.what == "pack_p":
            keep, end = 0, span.begin
        else:
            continue
        retired, pending = pending[: len(pending) - keep], pending[len(pending) - keep :]
        for mma in retired:
            yield Span(f"mma {mma.lane}", mma.what.removeprefix("issue "), mma.begin, end, mma.tile)


# -- prediction --------------------------------------------------------------------------------------------------------
def predict(config: Any, causal: bool, tiles: int = 12, q_tiles: int = 4) -> Timeline | None:
    """What the simulator's "steady" policy makes of one CTA that computes `q_tiles` work tiles of `tiles` KV tiles.

    None where the simulator's nominal times do not hold: they are those of 128 keys at head dim 128. Waits are the gaps
    between spans. The clock is nominal, 1 GHz.
    """
    if (config.tile_n, config.head_dim) != (128, 128):
        return None
    from schedules import simulate

    random = np.random.default_rng(0)
    k = random.standard_normal((1, tiles * config.tile_n, 1, config.head_dim))
    rows = q_tiles * config.tile_m
    q = random.standard_normal((1, rows, 1, config.head_dim))
    trace = simulate.forward(q, k, k, causal=causal, config=config, policy="steady", multiprocessors=1).trace
    spans = [
        Span(
            e.lane, re.sub(r"^issue store O", "store_o", e.what), e.begin * SIMULATED_CYCLES, e.end * SIMULATED_CYCLES
        )._replace(tile=e.tile)
        for e in trace
        if e.end > e.begin and not e.lane.startswith("tma")
    ]
    return Timeline(tuple(spans), hertz=1e9)


# -- Perfetto ----------------------------------------------------------------------------------------------------------
def to_perfetto(timeline: Timeline, title: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Chrome's trace event format (JSON), which ui.perfetto.dev and chrome://tracing open: a thread for each lane.

    QK and PV of a warpgroup are in flight at the same time, so they have a thread each. Times are in microseconds.
    """
    lanes = {(span.lane, span.what if span.lane.startswith("mma") else "") for span in timeline.spans}
    order = {name: i for i, name in enumerate(timeline.lanes)}
    threads = {lane: i for i, lane in enumerate(sorted(lanes, key=lambda lane: (order[lane[0]], lane[1])))}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": title}}]
    for (lane, what), thread in threads.items():
        common = {"ph": "M", "pid": 0, "tid": thread}
        events.append({**common, "name": "thread_name", "args": {"name": f"{lane} {what}".strip()}})
        events.append({**common, "name": "thread_sort_index", "args": {"sort_index": thread}})
    microsecond = timeline.hertz / 1e6
    for span in timeline.spans:
        arguments = {"begin": span.begin, "end": span.end, "lane": span.lane, "tile": span.tile, "slot": span.slot}
        events.append(
            {
                "ph": "X",
                "name": span.what if span.tile is None else f"{span.what} {span.tile}",
                "cat": span.kind,
                "ts": span.begin / microsecond,
                "dur": span.cycles / microsecond,
                "pid": 0,
                "tid": threads[span.lane, span.what if span.lane.startswith("mma") else ""],
                "args": {"what": span.what} | {key: value for key, value in arguments.items() if value is not None},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {**about, "hertz": timeline.hertz}}


def from_perfetto(document: Mapping[str, Any]) -> Timeline:
    """The timeline that `to_perfetto` wrote."""
    arguments: Iterable[dict[str, Any]] = (e["args"] for e in document["traceEvents"] if e["ph"] == "X")
    spans = tuple(Span(a["lane"], a["what"], a["begin"], a["end"], a.get("tile"), a.get("slot")) for a in arguments)
    return Timeline(spans, document["otherData"]["hertz"])
