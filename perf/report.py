"""`python -m perf.report`: charts and pages from the JSON files of measurements.

For each GPU in perf/results/, from what `perf.bench`, `perf.sanitize` and the GPU tests wrote there:

    rate.png, ratio.png    dense.json: TFLOP/s over length with the peers and cuBLAS; the ratio to the fastest peer
    tail.png               tail.json: rate past a base length, relative to it
    launch.png             launch.json: host and first-call times
    README.md              all tables, versions, and the commands that repeat them

and perf/resources.png from perf/resources.json, beside the peers' machine code where perf/resources-peers.json has it
(`python -m perf.peer_code`). `--check` writes nothing and returns status 1 if a
file is behind its JSON. README.md at the root is for `python -m perf.readme`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from perf import readme, resources, series, show
from perf.readme import RESULTS, SUITES, command, folders, image, table, where

try:
    from perf import charts
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] not in ("matplotlib", "PIL"):
        raise
    sys.exit("perf.report draws with matplotlib, which is not installed: pip install '.[perf]'")

PEERS = resources.TABLE.with_name("resources-peers.json")
NOTICE = "<!-- python -m perf.report writes this page from the JSON files beside it. -->"
PREAMBLE = """\
Rates are of useful work: 4 D operations for each query and key that see each other. Compare within a row: candidates
take turns, call by call, and the card's clock moves with its temperature from row to row and from day to day, as the
column of cuBLAS shows. [How it is measured, and what each number means](../../README.md)."""


# -- charts ------------------------------------------------------------------------------------------------------------
def gpu_charts(results: series.Results) -> list[charts.Chart]:
    """Those that the results suffice for."""
    made = []
    for name, data in series.charts(results).items():
        run = results.runs[CHART_SUITES[name]]
        titles = run["meta"]["titles"] | {series.YARDSTICK: run["meta"]["yardstick"]}
        labels = {"titles": titles, "foot": foot(run["meta"])}
        labels |= {"shapes": series.in_common(run["rows"])} if name == "rate" else {}
        made.append(charts.Chart(name, DRAW[name], data, labels))
    return made


CHART_SUITES = {"rate": "dense", "ratio": "dense", "tail": "tail", "launch": "launch"}
DRAW: Mapping[str, Callable[..., Any]] = {
    "rate": charts.rates,
    "ratio": charts.leads,
    "tail": charts.tails,
    "launch": charts.costs,
}


def foot(meta: Mapping[str, Any]) -> str:
    """The line under a chart: where its numbers come from."""
    return f"{meta['gpu']}, driver {meta['driver']}, {meta['date']}, sources {meta['source']}: {command(meta)}"


def resources_chart(path: Path = resources.TABLE, peers: Path = PEERS) -> charts.Chart:
    """The machine code of the committed table, and of the peers' if there is one."""
    found = json.loads(path.read_text())["compiler"]
    command = "python -m perf.resources"
    if peers.exists():
        found |= json.loads(peers.read_text())["packages"]
        command += ", python -m perf.peer_code"
    packages = ", ".join(f"{name} {version}" for name, version in found.items())
    data = series.loops(resources.load(path), resources.load(peers))
    return charts.Chart("resources", charts.loops, data, {"foot": f"{packages}: {command}"})


# -- the page of a GPU -------------------------------------------------------------------------------------------------
def page(results: series.Results) -> str:
    """All that was measured on a GPU, in Markdown."""
    drawn = list(series.charts(results))
    parts = [NOTICE, f"# {results.gpu}", PREAMBLE, files(results)]
    parts += ["## To repeat", commands(results), "## Versions", versions(results)]
    if results.tests:
        parts += ["## GPU tests", tests(results.tests)]
    if results.sanitize:
        parts += ["## compute-sanitizer", sanitized(results.sanitize)]
    for suite in SUITES:
        pictures = [image(name, "") for name in drawn if CHART_SUITES[name] == suite]
        if suite in results.runs:
            parts += [f"## {suite.capitalize()}", f"{SUITES[suite]}.", *pictures, *suite_parts(results.runs[suite])]
        else:
            parts += [f"## {suite.capitalize()}", f"Not measured: `python -m perf.bench {suite}`."]
    others = {stem: run for stem, run in results.runs.items() if stem not in SUITES}
    for stem, run in others.items():
        parts += [f"## {stem}.json", *suite_parts(run)]
    return "\n\n".join(parts) + "\n"


def suite_parts(run: Mapping[str, Any]) -> Iterator[str]:
    """The table of a suite, and what has to be known to read it."""
    meta, rows = run["meta"], run["rows"]
    yield table(*show.cells(rows))
    yield where(meta)
    width = series.quartile_width(rows)
    if width is not None:
        yield f"Medians; fmha's quartiles are {100 * width:.1f}% from them in half of the rows, or nearer."
    notes = [f"{peer} ({meta['titles'][peer]}) was not measured: {why}" for peer, why in meta["missing_peers"].items()]
    notes += [f"wrong: {row['case']['name']}: {row['error']}" for row in rows if "error" in row]
    left_out: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for peer, why in row.get("left_out", {}).items():
            left_out.setdefault((peer, why), []).append(row["case"]["name"])
    notes += [f"{peer} was left out of {', '.join(names)}: {why}" for (peer, why), names in left_out.items()]
    if notes:
        yield "\n".join(f"- {' '.join(note.split())}" for note in notes)


def records(results: series.Results) -> dict[str, Mapping[str, Any]]:
    """What each file says about itself, by its name."""
    found = {f"{stem}.json": run["meta"] for stem, run in results.runs.items()}
    found |= {"tests.json": results.tests} if results.tests else {}
    return found | ({"sanitize.json": results.sanitize} if results.sanitize else {})


def files(results: series.Results) -> str:
    """Date, sources and driver of each file."""
    lines = [
        (f"[{name}]({name})", meta["date"], f"`{meta['source']}`", meta["driver"], show.number(meta.get("seconds")))
        for name, meta in records(results).items()
    ]
    return table(("file", "date", "sources", "driver", "seconds"), lines)


def commands(results: series.Results) -> str:
    """A line for each file, at the root of a checkout whose `python -m perf.fingerprint` is the file's `sources`."""
    place = f"perf/results/{results.folder.name}"
    lines = []
    for name, meta in records(results).items():
        if name == "tests.json":
            lines.append(f"python -m pytest tests/gpu tests/reports --record {place}/{name}")
        elif name == "sanitize.json":
            tools = " ".join(f"--tool {tool}" for tool in meta["tools"] if tool != "alone")
            lines.append(f"python -m perf.sanitize {tools} --out {place}/{name}")
        else:
            lines.append(f"{command(meta)} --out {place}/{name}")
    lines += ["python -m perf.report", "python -m perf.readme"]
    return (
        "At the root of a checkout whose `python -m perf.fingerprint` prints the file's `sources`:\n\n```\n"
        + "\n".join(lines)
        + "\n```"
    )


def versions(results: series.Results) -> str:
    """Of each package, and in which files, where not in all."""
    found: dict[tuple[str, str], list[str]] = {}
    about = records(results)
    for name, meta in about.items():
        for package, version in meta["versions"].items():
            found.setdefault((package, version), []).append(name)
    lines = [(*key, "all" if len(names) == len(about) else ", ".join(names)) for key, names in found.items()]
    return table(("package", "version", "files"), lines)


def tests(record: Mapping[str, Any]) -> str:
    """The outcome, and the worst problem of each dtype."""
    lines = [
        (
            dtype,
            entry["checked"],
            f"{entry['worst_ratio']:.2f}",
            f"`{entry['worst_case']}`",
            f"{entry['worst_lse_error']:.1e}",
        )
        for dtype, entry in record["cases"].items()
    ]
    columns = ("dtype", "problems", "largest error / torch's", "of the problem", "largest LSE error")
    parts = [readme.tests_line(record), table(columns, lines)]
    parts += ["Failed:\n" + "\n".join(f"- `{name}`" for name in record["failed"])] if record["failed"] else []
    return "\n\n".join(parts)


def sanitized(record: Mapping[str, Any]) -> str:
    """What each tool found, and what racecheck objects to."""
    lines = [
        (tool, "out of time" if found["exit"] is None else found["exit"], found["summary"] or "-", found["seconds"])
        for tool, found in record["tools"].items()
    ]
    shown = table(("tool", "exit code", "summary", "seconds"), lines)
    hazards = [f"- {n} x {words}" for found in record["tools"].values() for words, n in found["hazards"].items()]
    return "\n\n".join([f"{len(record['cases'])} small problems.", shown, *(["\n".join(hazards)] if hazards else [])])


# -- files -------------------------------------------------------------------------------------------------------------
def outputs(results: Path = RESULTS, table_path: Path = resources.TABLE) -> dict[Path, str | charts.Chart]:
    """What each generated file should hold: text, or a chart. Folders without results have none."""
    found: dict[Path, str | charts.Chart] = {}
    for folder in folders(results):
        if loaded := series.load(folder):
            found |= {folder / f"{chart.name}.png": chart for chart in gpu_charts(loaded)}
            found[folder / "README.md"] = page(loaded)
    if table_path.exists():
        found[table_path.with_suffix(".png")] = resources_chart(table_path, table_path.with_name(PEERS.name))
    return found


def is_current(path: Path, wanted: str | charts.Chart) -> bool:
    """Whether the file is what would be written."""
    if isinstance(wanted, charts.Chart):
        return wanted.is_current(path)
    return path.exists() and path.read_text() == wanted


def write(path: Path, wanted: str | charts.Chart) -> None:
    if isinstance(wanted, charts.Chart):
        wanted.save(path)
    else:
        path.write_text(wanted)


def main(arguments: list[str] | None = None, results: Path = RESULTS, table_path: Path = resources.TABLE) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say which files are behind")
    check = parser.parse_args(arguments).check
    try:
        return update(outputs(results, table_path), results, check)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def update(wanted: Mapping[Path, str | charts.Chart], results: Path, check: bool) -> int:
    """Writes what is behind, or only names it. The command's exit status."""
    if not any(path.is_relative_to(results) for path in wanted):
        example = os.path.relpath(results / "GPU" / "SUITE.json")
        print(f"no results: python -m perf.bench SUITE --out {example} writes some", file=sys.stderr)
        return 2
    behind = [path for path, content in wanted.items() if not is_current(path, content)]
    for path in behind:
        if not check:
            write(path, wanted[path])
        print(f"{'behind' if check else 'wrote'}: {os.path.relpath(path)}")
    print(f"{len(wanted) - len(behind)} of {len(wanted)} files were current")
    return int(check and bool(behind))


if __name__ == "__main__":
    sys.exit(main())
