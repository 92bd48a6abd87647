"""What a profile says, as a table and as a page: a quantity a line, a case a column."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perf import show
from perf.cases import slug
from perf.suites import Case
from perf.timeline import KINDS

Row = dict[str, Any]

PICTURES = ("timeline", "every-wait", "iket", "counters")


def text(rows: list[Row]) -> str:
    return show.plain(*cells(rows))


def cells(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and lines: a quantity a line, a case a column."""
    header = ["", "unit", *(row["case"]["name"] for row in rows)]
    lines = []
    for name, unit, get in QUANTITIES:
        values = [_value(get, row) for row in rows]
        if any(value != "-" for value in values):
            lines.append([name, unit, *values])
    for unit_name in dict.fromkeys(name for row in rows for name in row.get("counters", {}).get("busy", {})):
        values = [_value(lambda row: row["counters"]["busy"][unit_name], row) for row in rows]  # noqa: B023
        lines.append([f"busy: {unit_name}", "%", *values])
    for i in range(4):
        lines.append([f"stall {i + 1}", "cycles", *(_stall(row, i) for row in rows)])
    for lane in dict.fromkeys(lane for row in rows for lane in row.get("stamps", {}).get("shares", {})):
        for i in range(3):
            lines.append([f"{lane}: wait {i + 1}", "%", *(_wait(row, lane, i) for row in rows)])
    for part in ("stamps", "every_wait", "counters", "iket"):
        lines.append([f"{part} failed", "", *(str(row.get(part, {}).get("error", "-"))[:60] for row in rows)])
    return header, [line for line in lines if any(value != "-" for value in line[2:])]


def _percent(*path: str) -> Callable[[Row], float]:
    def get(row: Row) -> float:
        value: Any = row
        for key in path:
            value = value[key]
        return 100 * value

    return get


QUANTITIES: tuple[tuple[str, str, Callable[[Row], Any]], ...] = (
    ("rate under ncu", "TFLOP/s", lambda row: row["counters"]["flops_per_second"] / 1e12),
    ("clock under ncu", "GHz", lambda row: row["counters"]["hertz"] / 1e9),
    ("rate in turns", "TFLOP/s", lambda row: row["case"]["flops"] / row["stamps"]["seconds"]["plain"] / 1e12),
    (
        "recording takes",
        "%",
        lambda row: 100 * (row["stamps"]["seconds"]["recording"] / row["stamps"]["seconds"]["plain"] - 1),
    ),
    (
        "with every wait",
        "%",
        lambda row: 100 * (row["every_wait"]["seconds"]["recording"] / row["every_wait"]["seconds"]["plain"] - 1),
    ),
    ("exponentials before the wait for PV", "", lambda row: _before_pv(row["stamps"]["waits"]["plain"])),
    ("the same while recording", "", lambda row: _before_pv(row["stamps"]["waits"]["recording"])),
    ("clock while recording", "GHz", lambda row: row["stamps"]["hertz"] / 1e9),
    ("KV tiles recorded", "", lambda row: row["stamps"]["kv_tiles"]),
    ("cycles from tile to tile", "cycles", lambda row: row["stamps"]["tile_cycles"]),
    ("of which MMAs, at least", "cycles", lambda row: row["stamps"]["tile_floor"]),
    ("an MMA in flight", "%", _percent("stamps", "in_flight")),
    ("tensor cores busy, estimated", "%", _percent("stamps", "busy")),
    ("softmax", "%", _percent("stamps", "softmax")),
    ("softmax exposed, estimated", "%", _percent("stamps", "softmax_exposed")),
    ("idle without softmax, estimated", "%", _percent("stamps", "idle_else")),
    ("L2 hit rate", "%", lambda row: row["counters"]["l2_hit_rate"]),
    ("FLOP per byte of L2", "", lambda row: row["counters"]["roofline"]["L2"]["flops_per_byte"]),
    ("FLOP per byte of DRAM", "", lambda row: row["counters"]["roofline"]["DRAM"]["flops_per_byte"]),
)


def _before_pv(waits: Any) -> int:
    """Of the body loop's waits for MMAs: how many exponentials come before the one for all of them."""
    return [wait["ex2"] for wait in waits if wait["pending"] == 0][-1]


def _value(get: Callable[[Row], Any], row: Row) -> str:
    try:
        value = get(row)
    except (LookupError, TypeError, ZeroDivisionError):
        return "-"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _stall(row: Row, rank: int) -> str:
    stalls = list(row.get("counters", {}).get("stalls", {}).items())
    return f"{stalls[rank][0]} {stalls[rank][1]:.2f}" if rank < len(stalls) else "-"


def _wait(row: Row, lane: str, rank: int) -> str:
    shares = row.get("stamps", {}).get("shares", {}).get(lane, {})
    named = [(name, share) for name, share in shares.items() if name not in KINDS.values()]
    return f"{named[rank][0]} {100 * named[rank][1]:.1f}" if rank < len(named) else "-"


def page(document: Mapping[str, Any], out: Path) -> str:
    """The table, and the pictures that lie in `out`, in Markdown."""
    meta, rows = document["meta"], document["rows"]
    header, lines = cells(rows)
    parts = [
        "<!-- python -m perf.profile writes this page. -->\n\n# Profile",
        f"{meta['gpu']}, driver {meta['driver']}, {meta['date']}, sources `{meta['source']}`: `{meta['command']}`",
        "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *lines)),
        LEGEND,
    ]
    for row in rows:
        name = slug(Case.of({key: row["case"][key] for key in Case.__dataclass_fields__ if key in row["case"]}))
        pictures = [picture for picture in PICTURES if (out / f"{name}.{picture}.png").exists()]
        if pictures:
            parts.append(f"## {row['case']['name']}")
            parts += [f"![{row['case']['name']}, {picture}]({name}.{picture}.png)" for picture in pictures]
    return "\n\n".join(parts) + "\n"


LEGEND = (
    "Shares are of the time that one CTA recorded. *In flight*: issued, and not yet seen to be retired. *Estimated*: "
    "the tensor cores take the MMAs in the order of their issue, at their full rate. *Stalls*: cycles that a warp "
    "waits for that reason, per instruction issued."
)
