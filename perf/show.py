"""Rows on a terminal: a line as each is measured, a table at the end. Plain text where rich is not installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

OURS = "fmha"
HIGHER_IS_BETTER = ("TFLOP/s", "GB/s")


def ratio(row: dict[str, Any], peer: str) -> float | None:
    """How many times as fast as `peer` fmha is in this row; None if the peer was not measured."""
    theirs = row.get("peers", {}).get(peer)
    if not theirs:
        return None
    return row[OURS] / theirs if row["unit"] in HIGHER_IS_BETTER else theirs / row[OURS]


def best_peer(row: dict[str, Any]) -> str | None:
    """The fastest one of this row."""
    ratios = {peer: found for peer in row.get("peers", {}) if (found := ratio(row, peer)) is not None}
    return min(ratios, key=lambda peer: ratios[peer]) if ratios else None


def number(value: float | None) -> str:
    """Three significant digits or more."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def one_line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['case']['name']}: {row['error']}"
    best = best_peer(row)
    beside = f", {ratio(row, best):.3f} of {best} ({number(row['peers'][best])})" if best else ""
    return f"{row['case']['name']}: {number(row[OURS])} {row['unit']}{beside}"


def cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Header and text of the table: rates, then fmha's ratio to each peer and to the best one."""
    peers = list(dict.fromkeys(peer for row in rows for peer in row.get("peers", {})))
    relative = any("relative" in row for row in rows)
    paged = any("read" in row for row in rows)
    header = ["case", "unit", OURS, *peers, *(f"{OURS}/{peer}" for peer in peers), f"{OURS}/best"]
    header += ["read", "us", "host us"] if paged else ["cuBLAS"]
    header += [f"{part} of base" for part in (OURS, *peers)] if relative else []
    lines = []
    for row in rows:
        if "error" in row:
            lines.append([row["case"]["name"], "wrong", *("-" for _ in header[2:])])
            continue
        best = best_peer(row)
        ratios = [ratio(row, peer) for peer in peers] + [ratio(row, best) if best else None]
        line = [row["case"]["name"], row["unit"], number(row[OURS]), *(number(row["peers"].get(p)) for p in peers)]
        line += ["-" if found is None else f"{found:.3f}" for found in ratios]
        beside = ("read", "device_us", "host_us") if paged else ("cublas",)
        line += [number(row.get(name)) for name in beside]
        if relative:
            to_base = row.get("relative", {"peers": {}})
            found = [to_base.get(OURS), *(to_base["peers"].get(peer) for peer in peers)]
            line += ["-" if value is None else f"{value:.3f}" for value in found]
        lines.append(line)
    return header, lines


def table(meta: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Prints all rows, what was left out of them, and where they were measured."""
    header, lines = cells(rows)
    title = f"{meta['suite']} on {meta['gpu']}, driver {meta['driver']}, {meta['date']}, source {meta['source']}"
    if importlib.util.find_spec("rich"):
        _rich_table(title, header, lines)
    else:
        print(title, plain(header, lines), sep="\n")
    for peer, reason in meta["missing_peers"].items():
        print(f"not measured: {peer} ({meta['titles'][peer]}): {reason}")
    for row in rows:
        for peer, reason in row.get("left_out", {}).items():
            print(f"left out of {row['case']['name']}: {peer}: {reason}")
        if "error" in row:
            print(f"WRONG: {row['case']['name']}: {row['error']}")


def plain(header: list[str], lines: list[list[str]]) -> str:
    """Columns as wide as their widest cell, the first two to the left and numbers to the right."""
    widths = [max(len(line[i]) for line in (header, *lines)) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            f"{cell:<{w}}" if i < 2 else f"{cell:>{w}}" for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in (header, *lines)
    )


def _rich_table(title: str, header: list[str], lines: list[list[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    grid = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(header):
        grid.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for line in lines:
        styled = [_styled(header[i], cell) for i, cell in enumerate(line)]
        grid.add_row(*styled)
    console = Console()
    needed = Measurement.get(console, console.options.update(max_width=10_000), grid).maximum
    if console.width < needed:
        console = Console(width=needed)  # a cut table is no table
    console.print(grid)


def _styled(column: str, cell: str) -> str:
    if not column.startswith(f"{OURS}/") or cell == "-":
        return cell
    return f"[green]{cell}[/green]" if float(cell) >= 1.0 else f"[red]{cell}[/red]"


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with a line after each row."""
    if not importlib.util.find_spec("rich"):
        done = 0

        def count(line: str) -> None:
            nonlocal done
            done += 1
            print(f"[{done}/{total}] {line}", flush=True)

        yield count
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), transient=True) as bar:
        task = bar.add_task(title, total=total)

        def advance(line: str) -> None:
            bar.console.print(line, highlight=False, markup=False, soft_wrap=True)
            bar.advance(task)

        yield advance
