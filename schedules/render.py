"""A trace of `schedules.simulate` as a picture: a Mermaid gantt chart, or lanes of text.

Only a trace of the "steady" policy is to scale; those of the others show an order of events, one step each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from schedules.machine import Event


def timeline(trace: Iterable[Event], cta: int = 0, width: int = 120, unit: int = 2) -> str:
    """A lane of text per role and per kind of operation in flight, `unit` characters a step, folded at `width`.

    A bar begins with its tile and operation, cut off where it is too short for them.
    """
    lanes = _lanes(trace, cta)
    margin = max(map(len, lanes)) + 2
    columns = width - margin
    length = unit * max(event.end for events in lanes.values() for event in events)
    painted = {lane: _paint(events, length, unit) for lane, events in lanes.items()}
    blocks = []
    for start in range(0, length, columns):
        rows = [f"{f'step {start // unit}':>{margin - 2}}"]
        rows += [f"{lane:>{margin - 2}}  {text[start : start + columns]}".rstrip() for lane, text in painted.items()]
        blocks.append("\n".join(rows))
    return "\n\n".join(blocks) + "\n"


def mermaid(trace: Iterable[Event], cta: int = 0, title: str = "One CTA") -> str:
    """A Mermaid gantt chart: a section per role and per kind of operation in flight, seconds standing for steps."""
    lines = ["gantt", f"    title {title}", "    dateFormat X", "    axisFormat %s"]
    for lane, events in _lanes(trace, cta).items():
        lines.append(f"    section {lane}")
        lines += [f"    {_named(event.what, event.tile)} : {event.begin}, {event.end}" for event in events]
    return "\n".join(lines) + "\n"


def _lanes(trace: Iterable[Event], cta: int) -> dict[str, list[Event]]:
    """The events of `cta` that take time, by lane, in the order of their beginnings. ValueError if there are none."""
    lanes: dict[str, list[Event]] = {}
    for event in sorted((e for e in trace if e.cta == cta and e.end > e.begin), key=lambda e: e.begin):
        lanes.setdefault(event.lane, []).append(event)
    if not lanes:
        raise ValueError(f"cta {cta}: the trace has no event of it that takes time")
    return dict(sorted(lanes.items(), key=lambda item: " " in item[0]))  # roles, then what flies for them


def _named(*words: object) -> str:
    return " ".join(str(word) for word in words if word is not None)


def _paint(events: Sequence[Event], length: int, unit: int) -> str:
    """Bars on one line; where they overlap, the later one covers the earlier."""
    line = [" "] * length
    for event in events:
        size = (event.end - event.begin) * unit - 1
        line[event.begin * unit : event.end * unit] = f"{_named(event.tile, event.what)[:size]:─<{size}}│"
    return "".join(line)
