"""Draws what `perf.series` holds. The charts are light, and readable in grey: markers and dashes tell lines apart.

A PNG carries a stamp of the data and of the drawing code that made it, so that `python -m perf.report --check` can say
whether it is current without comparing pixels, which differ between versions of the libraries that draw.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from perf import series
from perf.fingerprint import meaning
from perf.series import PARTS, REST, YARDSTICK, Cost, Lead, Loop, Number, Panel
from perf.show import OURS

WIDTH = 10.0  # inches
DPI = 150  # 1500 pixels, twice what a README's column shows
COLORS = 128  # a palette: a third of the bytes, and no difference to be seen
STAMP = "fmha-data"  # the PNG's text field
INK, FAINT = "#222222", "#d9d9d9"
RC = {
    "font.family": ["DejaVu Sans"],  # comes with matplotlib: the same everywhere
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.minor.size": 0,
    "legend.frameon": False,
    "lines.markersize": 5,
    "hatch.linewidth": 0.6,
}


@dataclass(frozen=True)
class Style:
    """How a candidate looks in every chart. No two share a marker or dashes, and their colours differ in lightness."""

    color: str
    marker: str
    dashes: Any = "-"
    width: float = 1.3


STYLES = {
    OURS: Style("#0b2545", "o", "-", 2.4),
    "fa3": Style("#c0392b", "D", (0, (6, 1.5))),
    "fa4": Style("#2a8f6d", "s", (0, (3.5, 1.2))),
    "cudnn": Style("#d98e04", "^", (0, (1.2, 1.2))),
    "flash": Style("#8e6bbf", "v", (0, (6, 1.5, 1.2, 1.5))),
    "sdpa": Style("#b5651d", "P", (0, (2.5, 2.5))),
    "flashinfer": Style("#5aa9d6", "X", (0, (6, 1.2, 1.2, 1.2, 1.2, 1.2))),
    "plain": Style("#4d6480", "h", (0, (4, 1, 1, 1, 1, 1))),
    YARDSTICK: Style("#8c8c8c", "", (0, (1, 2)), 1.2),
}
SHADES = (("#1d3557", ""), ("#5b7ea6", ""), ("#a9bfd6", ""), ("#dfe7ee", ""), ("#c0392b", "xx"), ("#ffffff", "///"))
PART_LOOKS: Mapping[str, Any] = {  # a bar's parts get lighter from left to right
    part: {"facecolor": color, "hatch": hatch, "edgecolor": INK, "linewidth": 0.6}
    for part, (color, hatch) in zip((*PARTS, REST), SHADES, strict=True)
}


@dataclass(frozen=True)
class Chart:
    """A picture to be: `draw(data, **labels)` shows nothing else."""

    name: str  # of the file, without suffix
    draw: Callable[..., Figure]
    data: Any  # of dataclasses, mappings, sequences and numbers, as the labels
    labels: Mapping[str, Any]

    @property
    def stamp(self) -> str:
        """A digest of the data, the labels and this module's code without its comments."""
        code = " ".join(meaning(ast.parse(Path(__file__).read_bytes())))
        shown = json.dumps([self.name, _plain(self.data), _plain(self.labels)])
        return hashlib.sha256(f"{code}\n{shown}".encode()).hexdigest()[:16]

    def save(self, path: Path) -> None:
        """Writes the PNG, the same bytes for the same data, labels, code and libraries."""
        drawn = io.BytesIO()
        with matplotlib.style.context(["default", RC]):
            self.draw(self.data, **self.labels).savefig(drawn, format="png", dpi=DPI, facecolor="white")
        words = PngInfo()
        words.add_text(STAMP, self.stamp)
        with Image.open(drawn) as image:
            few = image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
        few.save(path, "PNG", optimize=True, pnginfo=words)

    def is_current(self, path: Path) -> bool:
        """Whether `path` is a PNG that `save` wrote, of what it would write today."""
        return path.exists() and stamp_of(path) == self.stamp


def stamp_of(path: Path) -> str | None:
    """The stamp in a PNG, None if it has none."""
    with Image.open(path) as image:
        found = image.info.get(STAMP)
    return found if isinstance(found, str) else None


def _plain(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_plain(item) for item in data]
    return _plain(asdict(data)) if hasattr(data, "__dataclass_fields__") else data


def style(who: str) -> Style:
    """ValueError for a candidate without a style: every peer of `perf.peers` needs one."""
    if who not in STYLES:
        raise ValueError(f"no style for {who!r}: give it one in perf/charts.py, which has {', '.join(STYLES)}")
    return STYLES[who]


# -- pieces ------------------------------------------------------------------------------------------------------------
def _figure(height: float, title: str, foot: str) -> Figure:
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    figure.text(0.012, 1 - 0.1 / height, title, va="top", ha="left", fontsize=12, fontweight="bold")
    figure.text(0.012, 0.07 / height, foot, va="bottom", ha="left", fontsize=8, color="#666666")
    return figure


def _margins(figure: Figure, *, left: float, right: float, top: float, bottom: float, **gaps: float) -> None:
    """Margins in inches."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(
        left=left / width, right=1 - right / width, top=1 - top / height, bottom=bottom / height, **gaps
    )


def _legend(figure: Figure, entries: Iterable[tuple[Any, str]], *, handle: float = 3.2) -> float:
    """Under the title, in as many rows as it takes; `handle` is the width of a sample in letters.

    Returns how far down the title and the legend reach, in inches.
    """
    handles, labels = zip(*entries, strict=True)
    height = figure.get_size_inches()[1]
    for rows in range(1, len(labels) + 1):
        legend = figure.legend(
            handles,
            labels,
            loc="upper left",
            bbox_to_anchor=(0.002, 1 - 0.36 / height),
            ncols=-(-len(labels) // rows),
            handlelength=handle,
            handletextpad=0.6,
            columnspacing=1.6,
            borderaxespad=0.2,
        )
        box = legend.get_window_extent()
        if box.x1 <= figure.bbox.x1 or rows == len(labels):
            break
        legend.remove()
    return float(height - box.y0 / figure.dpi)


def _look(who: str) -> dict[str, Any]:
    """A candidate's line, with filled markers for fmha and open ones for the rest."""
    look = style(who)
    face = look.color if who == OURS else "white"
    line = {"color": look.color, "linestyle": look.dashes, "linewidth": look.width}
    return line | {"marker": look.marker, "markerfacecolor": face, "markeredgewidth": 1.1}


def _sample(who: str) -> Line2D:
    return Line2D([], [], **_look(who))


def _plot(ax: Axes, who: str, x: Sequence[float], y: Sequence[Number]) -> None:
    ax.plot(x, _gaps(y), zorder=4 if who == OURS else 3, clip_on=False, **_look(who))


def _gaps(numbers: Iterable[Number]) -> list[float]:
    return [float("nan") if number is None else number for number in numbers]


def _measured(panels: Iterable[Panel]) -> list[str]:
    """Candidates with a number anywhere, in order."""
    lines = [line for panel in panels for line in panel.lines]
    return list(dict.fromkeys(line.who for line in lines if any(y is not None for y in line.y)))


def _lengths(ax: Axes, lengths: Iterable[float]) -> None:
    """A logarithmic axis with a tick for each length, in words such as 16k."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(sorted(set(lengths))))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short(int(x))))


def short(length: int) -> str:
    """512, 1k, 16k; 1000 stays 1000."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else str(length)


# -- charts ------------------------------------------------------------------------------------------------------------
def rates(panels: Sequence[Panel], titles: Mapping[str, str], foot: str, shapes: str = "") -> Figure:
    """TFLOP/s over length, a column for each head dim and a row for each mask; `shapes` is what they have in common."""
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(1.2 + 2.35 * rows, f"Rate over sequence length{shapes and ': '}{shapes}", foot)
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    reach = _legend(figure, [(_sample(who), titles.get(who, who)) for who in _measured(panels)])
    _margins(figure, left=0.62, right=0.22, top=reach + 0.28, bottom=0.72, hspace=0.22, wspace=0.07)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        ax.set_title(panel.title)
        for line in reversed(panel.lines):
            _plot(ax, line.who, line.x, line.y)
        _lengths(ax, (x for line in panel.lines for x in line.x))
    axes[0, 0].set_ylim(bottom=0)
    for ax in axes[:, 0]:
        ax.set_ylabel("TFLOP/s of useful work")
    for ax in axes[-1, :]:
        ax.set_xlabel("sequence length S (tokens)")
    return figure


LEAD_DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.5, 1.2, 1.5)))
LEAD_COLORS = ("#0b2545", "#3d6a9e", "#7d9dc0", "#5a5a5a")


def leads(by_mask: Mapping[str, Sequence[Lead]], titles: Mapping[str, str], foot: str) -> Figure:
    """fmha's rate over the fastest peer's, a line for each head dim; the marker says who that peer is."""
    figure = _figure(3.9, "fmha / fastest peer of each length (above 1: fmha is faster)", foot)
    axes = figure.subplots(1, len(by_mask), sharex=True, sharey=True, squeeze=False)
    best = dict.fromkeys(peer for lines in by_mask.values() for lead in lines for peer in lead.best if peer)
    entries = [(_open_marker(style(peer).marker), titles.get(peer, peer)) for peer in best]
    reach = _legend(figure, [(_open_marker(""), "the fastest peer is"), *entries], handle=1.0)
    _margins(figure, left=0.62, right=0.62, top=reach + 0.28, bottom=0.72, wspace=0.22)
    low, high = series.spans(lead.ratio for lines in by_mask.values() for lead in lines)
    axes[0, 0].set_ylim(min(low, 1.0) - 0.03, max(high, 1.0) + 0.03)
    for ax, (mask, lines) in zip(axes.flat, by_mask.items(), strict=True):
        ax.set_title(mask)
        ax.axhline(1.0, color="#555555", linewidth=1.0, zorder=2)
        for number, lead in enumerate(lines):
            _lead(ax, lead, LEAD_COLORS[number % 4], LEAD_DASHES[number % 4])
        _lengths(ax, (x for lead in lines for x in lead.x))
        ax.set_xlabel("sequence length S (tokens)")
        _end_labels(ax, [(lead.title, lead.x, lead.ratio) for lead in lines])
    axes[0, 0].set_ylabel("ratio of rates")
    return figure


def _open_marker(marker: str) -> Line2D:
    return Line2D([], [], color=INK, marker=marker, markerfacecolor="white", linestyle="")


def _lead(ax: Axes, lead: Lead, color: str, dashes: Any) -> None:
    ax.plot(lead.x, _gaps(lead.ratio), color=color, linestyle=dashes, linewidth=1.7, zorder=3)
    for x, y, peer in zip(lead.x, lead.ratio, lead.best, strict=True):
        if y is not None and peer is not None:
            ax.plot([x], [y], marker=style(peer).marker, color=color, markerfacecolor="white", zorder=4)


def _end_labels(ax: Axes, lines: Iterable[tuple[str, Sequence[float], Sequence[Number]]]) -> None:
    """A line's name right of the axes, as high as its last point, moved where names would touch."""
    ends = []
    for name, x, y in lines:
        measured = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
        if measured:
            ends.append((name, measured[-1][1]))
    bottom, top = ax.get_ylim()
    inches = ax.get_figure().get_size_inches()[1] * ax.get_position().height  # type: ignore[union-attr]
    places = series.spread_labels([y for _, y in ends], gap=0.17 * (top - bottom) / inches)
    for (name, _), place in zip(ends, places, strict=True):
        ax.text(1.012, place, name, transform=ax.get_yaxis_transform(), va="center")


def tails(panels: Sequence[Panel], titles: Mapping[str, str], foot: str) -> Figure:
    """What a partial last tile leaves of the rate, a panel for each base length."""
    figure = _figure(3.9, "Rate at S = base + r, relative to the same candidate's at the base", foot)
    widths = [max(3, max(len(line.x) for line in panel.lines)) for panel in panels]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)
    reach = _legend(figure, [(_sample(who), titles.get(who, who)) for who in _measured(panels)])
    _margins(figure, left=0.62, right=0.22, top=reach + 0.28, bottom=0.72, wspace=0.08)
    low, high = series.spans(line.y for panel in panels for line in panel.lines)
    axes[0, 0].set_ylim(min(low, 1.0) - 0.03, max(high, 1.0) + 0.03)
    for ax, panel in zip(axes.flat, panels, strict=True):
        ax.set_title(panel.title)
        ax.axhline(1.0, color="#555555", linewidth=1.0, zorder=2)
        for line in reversed(panel.lines):
            _plot(ax, line.who, line.x, line.y)
        extras = sorted({x for line in panel.lines for x in line.x})
        ax.xaxis.set_major_locator(FixedLocator(_apart(extras)))
        ax.set_xlim(extras[0] - 0.04 * (extras[-1] or 1), extras[-1] * 1.04 or 1)
        ax.set_xlabel("r (tokens)")
    axes[0, 0].set_ylabel("relative rate")
    return figure


def _apart(ticks: Sequence[float], part: float = 0.1) -> list[float]:
    """Ticks that leave room for their labels: the first, the last, and those at least `part` of the span apart."""
    span = ticks[-1] - ticks[0]
    kept = [ticks[0]]
    for tick in ticks[1:-1]:
        if tick - kept[-1] >= part * span and ticks[-1] - tick >= part * span:
            kept.append(tick)
    return [*kept, ticks[-1]] if span else kept


def costs(rows: Sequence[Cost], titles: Mapping[str, str], foot: str) -> Figure:
    """Seconds of each thing on a logarithmic axis, a row for each."""
    figure = _figure(1.45 + 0.3 * len(rows), "What a call costs besides its kernel (left is better)", foot)
    ax = figure.subplots()
    measured = list(dict.fromkeys(who for row in rows for who in row.seconds))
    reach = _legend(figure, [(Line2D([], [], **_dot(who)), titles.get(who, who)) for who in measured], handle=1.0)
    _margins(figure, left=3.1, right=0.3, top=reach + 0.1, bottom=0.75)
    for who in measured:
        points = [(row.seconds[who], y) for y, row in enumerate(rows) if who in row.seconds]
        ax.plot(*zip(*points, strict=True), zorder=3 if who == OURS else 4, **_dot(who))
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: duration(x)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_yticks(range(len(rows)), [row.name for row in rows])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlabel("time")
    ax.tick_params(axis="y", length=0)
    return figure


def _dot(who: str) -> dict[str, Any]:
    """Peers are rings, so that fmha shows through."""
    face = style(who).color if who == OURS else "none"
    return _look(who) | {"linestyle": "", "markersize": 7, "markerfacecolor": face, "markeredgewidth": 1.5}


def duration(seconds: float) -> str:
    """A power of ten in its unit: 10 us, 1 ms, 1 s."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.999 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def loops(bars: Sequence[Loop], foot: str) -> Figure:
    """Instructions a score of each KV loop by kind, and the kernel's registers, spills and stack."""
    alone = all(bar.who == OURS for bar in bars)
    firsts = [i == 0 or bars[i - 1].group != bar.group for i, bar in enumerate(bars)]
    names = [
        bar.group if alone else f"{bar.group}: {bar.who}" if first else bar.who
        for first, bar in zip(firsts, bars, strict=True)
    ]
    places = _places(bars)
    figure = _figure(1.45 + 0.27 * (places[-1] + 1), "Instructions of the KV loop, for each score of a thread", foot)
    ax = figure.subplots()
    parts = {part: look for part, look in PART_LOOKS.items() if any(bar.parts[part] for bar in bars)}
    samples: list[tuple[Any, str]] = [(Patch(**look), part) for part, look in parts.items()]
    if any(bar.masked is not None for bar in bars):
        samples.append((_open_marker("d"), "masked tile, in all"))
    reach = _legend(figure, samples, handle=2.2)
    _margins(figure, left=0.3 + 0.078 * max(map(len, names)), right=2.75, top=reach + 0.28, bottom=0.72)
    for y, bar in zip(places, bars, strict=True):
        left = 0.0
        for part, look in parts.items():
            ax.barh(y, bar.parts[part], left=left, height=0.72, **look)
            left += bar.parts[part]
        if bar.masked is not None:
            ax.plot([bar.masked], [y], marker="d", color=INK, markerfacecolor="white", linestyle="")
    ax.set_yticks(places, names)
    ax.set_ylim(places[-1] + 0.6, -0.6)
    ax.set_xlim(0, 1.02 * max(max(bar.total, bar.masked or 0.0) for bar in bars))
    ax.set_xlabel("instructions a score")
    ax.grid(axis="y", visible=False)
    ax.tick_params(axis="y", length=0)
    _columns(ax, bars)
    return figure


def _places(bars: Sequence[Loop]) -> list[float]:
    """Heights of the bars: those of one group touch where any has more than one."""
    paired = len({bar.group for bar in bars}) < len(bars)
    places = [0.0]
    for before, bar in zip(bars, bars[1:], strict=False):
        places.append(places[-1] + (0.74 if bar.group == before.group else 1.16 if paired else 1.0))
    return places


def _columns(ax: Axes, bars: Sequence[Loop]) -> None:
    """Numbers right of the bars."""
    columns: dict[str, tuple[float, Callable[[Loop], str]]] = {  # title: inches from the bars to its right edge, text
        "total": (0.6, lambda bar: f"{bar.total:.2f}"),
        "registers": (1.4, lambda bar: bar.registers),
        "spills": (1.95, lambda bar: str(bar.spills)),
        "stack": (2.5, lambda bar: str(bar.stack_bytes)),
    }
    inches = WIDTH * ax.get_position().width
    for title, (right, text) in columns.items():
        x = 1 + right / inches
        ax.text(x, 1.0, title, transform=ax.transAxes, ha="right", va="bottom", fontsize=9, color="#666666")
        for y, bar in zip(_places(bars), bars, strict=True):
            ax.text(x, y, text(bar), transform=ax.get_yaxis_transform(), ha="right", va="center_baseline")
