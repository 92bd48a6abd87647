"""What the charts and pages show, as data: from the JSON of `perf.bench`, `perf.resources` and the GPU tests.

Nothing here draws. A number that was not measured is None, so that a line has a gap there.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmha.jit.report import Report
from perf import show
from perf.show import OURS

Row = dict[str, Any]
Number = float | None

SUITES = ("dense", "tail", "launch")  # whose JSON files bear their names, and have charts
YARDSTICK = "cublas"  # stands beside candidates as the rate of a large matrix product
SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
# Kinds of instructions (`fmha.jit.sass.KINDS`) that a bar shows as one part; what is not listed is the last part.
PARTS = {
    "EX2": ("ex2",),
    "FMA pipe": ("fma",),
    "max, convert": ("max", "convert"),
    "moves": ("move",),
    "spills": ("local",),
}
REST = "MMA, waits, rest"
VARIANT = re.compile(r"[-_]?d(\d+)(?:v(\d+))?[-_](dense|causal|window)([-_]|$)")
TILE = re.compile(r"-(\d+x\d+)$")  # of a kernel that is not for long sequences


# -- files -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Results:
    """What lies in one GPU's folder."""

    folder: Path
    runs: Mapping[str, Mapping[str, Any]]  # `perf.bench`'s JSON, {"meta", "rows"}, by the file's stem
    tests: Mapping[str, Any] | None = None  # tests.json
    sanitize: Mapping[str, Any] | None = None  # sanitize.json

    def __bool__(self) -> bool:
        return bool(self.runs or self.tests or self.sanitize)

    @property
    def gpu(self) -> str:
        """The GPU's name; ValueError if the files are of several."""
        names = {run["meta"]["gpu"] for run in self.runs.values()}
        names |= {record["gpu"] for record in (self.tests, self.sanitize) if record}
        if len(names) != 1:
            raise ValueError(f"{self.folder}: results of one GPU are expected, found {sorted(names) or 'none'}")
        return names.pop()


def load(folder: Path) -> Results:
    """Reads a folder's JSON files; those of other tools are left alone. ValueError if a file is not JSON."""
    runs: dict[str, Mapping[str, Any]] = {}
    records: dict[str, Any] = {"tests": None, "sanitize": None}
    for path in sorted(folder.glob("*.json")):
        try:
            found = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if isinstance(found, dict) and "suite" in found.get("meta", {}):
            if path.stem in SUITES and found["meta"]["suite"] != path.stem:
                raise ValueError(f"{path} holds the suite {found['meta']['suite']!r}: its name is kept for its own")
            runs[path.stem] = found
        elif path.stem in records:
            records[path.stem] = found
    main = {suite: runs[suite] for suite in SUITES if suite in runs}
    return Results(folder, main | runs, **records)


# -- suites ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Line:
    """One candidate's numbers."""

    who: str  # fmha, a peer, or the yardstick
    x: tuple[float, ...]
    y: tuple[Number, ...]


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    lines: tuple[Line, ...]


def group_name(case: Mapping[str, Any]) -> str:
    """Head dim, mask and, unless it is bfloat16, dtype: what one line of a chart has in common."""
    dtype = "" if case.get("dtype", "bfloat16") == "bfloat16" else f", {case['dtype']}"
    return f"D {case['head_dim']}, {mask(case)}{dtype}"


def mask(case: Mapping[str, Any]) -> str:
    return "causal" if case["causal"] else "dense"


def peers(rows: Iterable[Row]) -> list[str]:
    """Those measured in any row, in order of appearance."""
    return list(dict.fromkeys(peer for row in rows for peer in row.get("peers", {})))


def rate(row: Row, who: str) -> Number:
    """A candidate's number in the row's unit; None where it was left out or the row has an error."""
    if "error" in row:
        return None
    if who in (OURS, YARDSTICK):
        return row.get(who)
    return row["peers"].get(who)


def groups(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by `group_name`, dense before causal, then by head dim, each by length. ValueError if a length is twice."""
    found: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda r: (r["case"]["causal"], r["case"]["head_dim"], r["case"]["seqlen_k"])):
        found.setdefault(group_name(row["case"]), []).append(row)
    for name, group in found.items():
        lengths = [row["case"]["seqlen_k"] for row in group]
        if len(set(lengths)) < len(lengths):
            raise ValueError(f"{name}: two rows for one length in {lengths}; a chart has one point for each")
    return found


def rates(rows: Sequence[Row]) -> tuple[Panel, ...]:
    """TFLOP/s over length, of every candidate and the yardstick: a panel for each head dim and mask."""
    candidates = [OURS, *peers(rows), YARDSTICK]
    return tuple(
        Panel(name, tuple(_line(who, group, [rate(row, who) for row in group]) for who in candidates))
        for name, group in groups(rows).items()
    )


def _line(who: str, rows: Sequence[Row], y: Iterable[Number]) -> Line:
    return Line(who, tuple(row["case"]["seqlen_k"] for row in rows), tuple(y))


@dataclass(frozen=True)
class Lead:
    """How fmha stands to the fastest peer of each length."""

    title: str
    x: tuple[int, ...]
    ratio: tuple[Number, ...]
    best: tuple[str | None, ...]  # that peer


def leads(rows: Sequence[Row]) -> dict[str, tuple[Lead, ...]]:
    """By mask, a line for each head dim."""
    found: dict[str, list[Lead]] = {}
    for name, group in groups(rows).items():
        best = [show.best_peer(row) for row in group]
        ratios = [show.ratio(row, peer) if peer else None for row, peer in zip(group, best, strict=True)]
        lengths = tuple(row["case"]["seqlen_k"] for row in group)
        title = name.replace(f", {mask(group[0]['case'])}", "")
        found.setdefault(mask(group[0]["case"]), []).append(Lead(title, lengths, tuple(ratios), tuple(best)))
    return {key: tuple(lines) for key, lines in found.items()}


def relative(row: Row, who: str) -> Number:
    """A candidate's rate as a part of its own at the base length; None where one of them is missing."""
    found = row.get("relative", {"peers": {}})
    return found.get(OURS) if who == OURS else found["peers"].get(who)


def tails(rows: Sequence[Row]) -> tuple[Panel, ...]:
    """Rate relative to the base length's, over the tokens past it: a panel for each base, in order."""
    candidates = [OURS, *peers(rows)]
    by_base: dict[int, list[Row]] = {}
    for row in sorted((r for r in rows if r["case"]["base"]), key=lambda r: (r["case"]["base"], r["case"]["seqlen_k"])):
        by_base.setdefault(row["case"]["base"], []).append(row)
    return tuple(
        Panel(
            f"S = {base:,} + r",
            tuple(
                Line(
                    who,
                    tuple(row["case"]["seqlen_k"] - base for row in group),
                    tuple(relative(row, who) for row in group),
                )
                for who in candidates
            ),
        )
        for base, group in by_base.items()
    )


@dataclass(frozen=True)
class Cost:
    """What one thing costs, in seconds, by candidate; those that were not measured are left out."""

    name: str
    seconds: Mapping[str, float]


def costs(rows: Sequence[Row]) -> tuple[Cost, ...]:
    """The suite `launch`. ValueError for a unit that is not a time."""
    found = []
    for row in rows:
        if "error" in row:
            found.append(Cost(row["case"]["name"], {}))
            continue
        if row["unit"] not in SECONDS:
            raise ValueError(f"{row['case']['name']}: unit {row['unit']!r} is none of {', '.join(SECONDS)}")
        numbers = {who: rate(row, who) for who in (OURS, *row["peers"])}
        seconds = {who: value * SECONDS[row["unit"]] for who, value in numbers.items() if value is not None}
        found.append(Cost(row["case"]["name"], seconds))
    return tuple(found)


def charts(results: Results) -> dict[str, Any]:
    """The data of each chart that a GPU's results suffice for, by the chart's name."""
    rows = {suite: run["rows"] for suite, run in results.runs.items() if suite in SUITES}
    found: dict[str, Any] = {}
    if measured(dense := rows.get("dense", [])):
        found["rate"] = rates(dense)
        if peers(dense):
            found["ratio"] = leads(dense)
    if any(row.get("relative") for row in rows.get("tail", [])):
        found["tail"] = tails(rows["tail"])
    if measured(rows.get("launch", [])):
        found["launch"] = costs(rows["launch"])
    return found


def measured(rows: Iterable[Row]) -> bool:
    """Whether any row has numbers."""
    return any("error" not in row for row in rows)


# -- machine code ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Loop:
    """The KV loop of one kernel, in instructions for each score that a thread holds, and what the kernel needs."""

    group: str  # head dims and mask
    who: str  # fmha, or what the name of a peer's cubin begins with
    parts: Mapping[str, float]
    masked: Number  # the loop over masked tiles, where there is one
    registers: str  # of a producer / consumer thread
    spills: int
    stack_bytes: int

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def loops(ours: Mapping[str, Report], others: Mapping[str, Report] | None = None) -> tuple[Loop, ...]:
    """Ours in the table's order, the peers' of the same head dim and mask behind each, the rest of theirs last.

    Scores are counted by the conversions of P to 16 bits, which take two at a time: so tiles of any size compare.
    ValueError for a loop without any.
    """
    found = [_loop(OURS, name, row) for name, row in ours.items()]
    beside = [_loop(None, name, row) for name, row in (others or {}).items()]
    order = list(dict.fromkeys(loop.group for loop in (*found, *beside)))
    return tuple(sorted((*found, *beside), key=lambda loop: order.index(loop.group)))


def _loop(who: str | None, name: str, row: Report) -> Loop:
    scores = 2 * row.body_kinds.get("convert", 0)
    if not scores:
        raise ValueError(f"{name}: no conversion of P in its loop, so that its scores cannot be counted")
    parts = {part: sum(row.body_kinds.get(kind, 0) for kind in kinds) / scores for part, kinds in PARTS.items()}
    parts[REST] = row.body / scores - sum(parts.values())
    variant = VARIANT.search(stem := Path(name).stem)
    tile = TILE.search(stem)
    more = ["LSE"] * ("-lse" in stem) + ([tile[1]] if tile else [])
    return Loop(
        group=", ".join(["D " + "/".join(filter(None, variant.groups()[:2])), variant[3], *more]) if variant else stem,
        who=who or (stem[: variant.start()] if variant else "") or stem,
        parts=parts,
        masked=row.masked[0] / scores if row.masked else None,
        registers="/".join(map(str, row.setmaxnreg or (row.registers,))),
        spills=row.spills,
        stack_bytes=row.stack_bytes,
    )


# -- words for tables --------------------------------------------------------------------------------------------------
def worst_tails(rows: Sequence[Row]) -> list[tuple[str, dict[str, float]]]:
    """For each panel of `tails`, every candidate's lowest rate past the base length, as a part of that at it."""
    found = []
    for panel in tails(rows):
        lowest = {}
        for line in panel.lines:
            past = [y for x, y in zip(line.x, line.y, strict=True) if x and y is not None]
            if past:
                lowest[line.who] = min(past)
        found.append((panel.title, lowest))
    return found


def quartile_width(rows: Iterable[Row]) -> Number:
    """The median over rows of how far fmha's quartiles are from its median, as a part of it; None without any."""
    widths = [
        max(abs(edge / row[OURS] - 1) for edge in row["spread"][OURS])
        for row in rows
        if "error" not in row and OURS in row.get("spread", {})
    ]
    return statistics.median(widths) if widths else None


def in_common(rows: Iterable[Row]) -> str:
    """What every problem of a suite shares: dtype, B x S and H x D, as far as they do."""
    cases = [row["case"] for row in rows]
    found = {
        "": {case["dtype"] for case in cases},
        "B x S = ": {f"{case['batch'] * case['seqlen_q']:,}" for case in cases},
        "H x D = ": {f"{case['heads_q'] * case['head_dim']:,}" for case in cases},
    }
    return ", ".join(name + values.pop() for name, values in found.items() if len(values) == 1)


def spread_labels(positions: Sequence[float], gap: float) -> list[float]:
    """Where labels go so that neighbours are at least `gap` apart, each as near to its position as that allows.

    Labels that would touch form a block, whose middle is the mean of their positions; blocks that touch merge.
    """
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    blocks: list[tuple[list[int], float]] = []  # members in order, middle
    for i in order:
        members, middle = [i], positions[i]
        while blocks and middle - blocks[-1][1] < gap * (len(members) + len(blocks[-1][0])) / 2:
            members = blocks.pop()[0] + members
            middle = sum(positions[j] for j in members) / len(members)
        blocks.append((members, middle))
    placed = [0.0] * len(positions)
    for members, middle in blocks:
        for rank, i in enumerate(members):
            placed[i] = middle + gap * (rank - (len(members) - 1) / 2)
    return placed


def spans(lines: Iterable[Sequence[Number]]) -> tuple[float, float]:
    """The smallest and the largest number that was measured. ValueError if none was."""
    numbers = [y for y in itertools.chain.from_iterable(lines) if y is not None]
    if not numbers:
        raise ValueError("nothing was measured")
    return min(numbers), max(numbers)
