"""Draws what `perf.profile` found: a timeline as a Gantt chart, and a launch's counters with its roofline.

Light, and readable in grey: waits are hatched, MMAs dark, the softmax in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from perf.overlap import FLOPS_PER_CYCLE
from perf.timeline import Span, Timeline

WIDTH = 13.0  # inches
DPI = 130
INK, FAINT = "#222222", "#d9d9d9"
RC = {
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.titlelocation": "left",
    "axes.titlesize": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "hatch.linewidth": 0.5,
}
FILLS: Mapping[str, tuple[str, str]] = {  # colour and hatch of an operation, by its first word, else of its kind
    "wait": ("#ffffff", "/////"),
    "load": ("#b3d3ea", ""),
    "issue": ("#173f66", ""),
    "mask": ("#fdf1d8", ""),
    "row_max": ("#fbe3b5", ""),
    "softmax": ("#fbe3b5", ""),
    "rescale": ("#c4453b", ""),
    "exponents": ("#f0a860", ""),
    "pack_p": ("#d98032", ""),
    "foresee": ("#d98032", ""),
    "mend": ("#c4453b", ""),
    "store": ("#9ccb9a", ""),
    "QK": ("#4f4a8c", ""),
    "PV": ("#9d99cf", ""),
}
LEGEND = ("wait", "load", "issue", "mask", "row_max", "exponents", "pack_p", "rescale", "store", "QK", "PV")
LETTER = 0.0044  # of a panel's width: a span that has so much for each letter of its name shows it


@dataclass(frozen=True)
class Panel:
    """A stretch of a timeline, and what its times are counted in. `busy` is when the tensor cores are thought to work:
    MMAs in flight are then drawn as outlines behind it."""

    title: str
    timeline: Timeline
    begin: int
    end: int
    unit: str = "cycles"
    busy: tuple[Span, ...] = ()


def gantt(title: str, panels: Sequence[Panel], path: Path) -> None:
    """Writes a PNG with the panels below each other, a lane for each role and for each warpgroup's MMAs."""
    lanes = [len(panel.timeline.lanes) for panel in panels]
    with matplotlib.style.context(["default", RC]):
        height = 1.1 + sum(0.75 + 0.34 * count for count in lanes)
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[0.75 + 0.34 * count for count in lanes])
        for ax, panel in zip(axes[:, 0], panels, strict=True):
            _panel(ax, panel)
        drawn = {fill(span) for panel in panels for span in panel.timeline.between(panel.begin, panel.end).spans}
        names = [name for name in LEGEND if FILLS[name] in drawn]
        patches = [Patch(facecolor=FILLS[n][0], hatch=FILLS[n][1], edgecolor="#777777", label=n) for n in names]
        figure.legend(handles=patches, loc="outside lower left", ncols=len(names), fontsize=8)
        figure.savefig(path, dpi=DPI)


def _panel(ax: Axes, panel: Panel) -> None:
    order = panel.timeline.lanes
    place = {lane: len(order) - 1 - i for i, lane in enumerate(order)}
    for span in panel.timeline.between(panel.begin, panel.end).spans:
        mma = span.kind in ("QK", "PV")
        outline = mma and bool(panel.busy)
        _bar(ax, span, place[span.lane], panel, outline=outline)
    for span in panel.busy:
        if span.end > panel.begin and span.begin < panel.end:
            cut = span._replace(begin=max(span.begin, panel.begin), end=min(span.end, panel.end))
            _bar(ax, cut, place[cut.lane], panel, outline=False)
    ax.set_title(panel.title)
    ax.set_xlim(panel.begin, panel.end)
    ax.set_ylim(-0.6, len(order) - 0.4)
    ax.set_yticks(list(place.values()), list(place))
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(panel.unit, fontsize=8)
    ax.grid(axis="x")


def _bar(ax: Axes, span: Span, y: float, panel: Panel, outline: bool) -> None:
    """QK in the upper and PV in the lower half of a lane: they are in flight side by side."""
    colour, hatch = fill(span)
    low, high = {"QK": (0.02, 0.38), "PV": (-0.38, -0.02)}.get(span.kind, (-0.36, 0.36))
    ax.broken_barh(
        [(span.begin, span.cycles)],
        (y + low, high - low),
        facecolor="none" if outline else colour,
        hatch=None if outline else hatch,
        edgecolor="#888888",
        linewidth=0.4,
    )
    text = label(span)
    if not outline and span.cycles > LETTER * len(text) * (panel.end - panel.begin):
        dark = sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) < 380
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.6} if hatch else None
        ax.text(
            span.begin + span.cycles / 2,
            y + (low + high) / 2,
            text,
            ha="center",
            va="center",
            fontsize=6.5,
            color="white" if dark else INK,
            clip_on=True,
            bbox=box,
        )


def fill(span: Span) -> tuple[str, str]:
    word = span.what.split()[0]
    return FILLS.get(word) or FILLS[span.kind]


def label(span: Span) -> str:
    name = {"exponents": "exp", "row_max": "max"}.get(span.what, span.what)
    return name if span.tile is None else f"{name} {span.tile}"


# -- counters ----------------------------------------------------------------------------------------------------------
def counters(title: str, summary: Mapping[str, Any], multiprocessors: int, path: Path) -> None:
    """Writes a PNG of what `perf.roofline.summarise` found: busy units, stalls, and the roofline."""
    with matplotlib.style.context(["default", RC]):
        figure = Figure(figsize=(WIDTH, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        units, stalls, roof = figure.subplots(1, 3, width_ratios=[1, 0.9, 1])
        _bars(units, summary["busy"], "busy, % of its peak", limit=100.0)
        top = dict(list(summary.get("stalls", {}).items())[:8])
        _bars(stalls, top, "why warps wait, cycles per instruction issued")
        _roofline(roof, summary, multiprocessors)
        figure.savefig(path, dpi=DPI)


def _bars(ax: Axes, values: Mapping[str, float], title: str, limit: float | None = None) -> None:
    names = list(values)[::-1]
    ax.barh(names, [values[name] for name in names], color="#6f8fb3", edgecolor=INK, linewidth=0.4, height=0.65)
    ax.set_title(title)
    ax.tick_params(axis="y", length=0, labelsize=8)
    right = limit or max([*values.values(), 1e-9]) * 1.15
    ax.set_xlim(0, right)
    for i, name in enumerate(names):
        value = values[name]
        inside = value > 0.85 * right
        ax.text(value, i, f" {value:.3g} ", va="center", ha="right" if inside else "left", fontsize=8)


def _roofline(ax: Axes, summary: Mapping[str, Any], multiprocessors: int) -> None:
    points: Mapping[str, Mapping[str, float]] = summary.get("roofline", {})
    ax.set_title("useful TFLOP/s over FLOP per byte moved")
    if not points or "hertz" not in summary:
        ax.text(0.5, 0.5, "bytes or clock were not collected", ha="center", transform=ax.transAxes)
        return
    peak = FLOPS_PER_CYCLE * multiprocessors * summary["hertz"] / 1e12
    rate = summary["flops_per_second"] / 1e12
    for (memory, point), dash, marker in zip(points.items(), ("-", "--"), ("o", "s"), strict=False):
        slope = point["peak_bytes_per_second"] / 1e12
        knee = peak / slope
        reach = [min(knee, point["flops_per_byte"]) / 4, knee]
        ax.plot(reach, [x * slope for x in reach], dash, color=INK, lw=1, label=f"{memory}, {slope:.3g} TB/s")
        ax.plot(point["flops_per_byte"], rate, marker, color="#173f66", ms=7)
        ax.annotate(f" {memory}", (point["flops_per_byte"], rate), fontsize=8, va="top")
    right = 4 * max([peak, *(point["flops_per_byte"] for point in points.values())])
    left = min(peak / (p["peak_bytes_per_second"] / 1e12) for p in points.values())
    ax.plot([left, right], [peak, peak], "-", color=INK, lw=1.5)
    ax.text(right, peak, f"tensor cores at {summary['hertz'] / 1e9:.3g} GHz: {peak:.0f}", ha="right", va="bottom")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("{x:g}")
    ax.grid(which="both")
    ax.legend(loc="lower right", fontsize=8)
