"""`python -m perf.readme`: writes the parts of README.md that the code knows better, between their markers.

    <!-- support:begin -->  ...  <!-- support:end -->        what `fmha.supports` says
    <!-- resources:begin -->  ...  <!-- resources:end -->    perf/resources.json
    <!-- numbers:begin -->  ...  <!-- numbers:end -->        perf/results/

`--check` changes nothing and returns status 1 if the README is behind.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fmha.problem import ARCHITECTURES, DTYPES, MASKS, UNRUN, PagedProblem, Problem, supports
from perf import resources, series, show
from perf.show import OURS

README = Path(__file__).resolve().parent.parent / "README.md"
RESULTS = Path(__file__).resolve().parent / "results"
SUITES = {
    "dense": "TFLOP/s of useful work, and how many times as fast as each peer",
    "tail": "Lengths that leave a partial last tile: the same, and the rate as a part of that at the whole length",
    "window": "Causal sliding windows: TFLOP/s over the pairs that are seen",
    "varlen": "Packed sequences: 64 with lengths drawn log-uniformly from 128 to 16k, and 1024 of up to 256",
    "scores": "What softcap, sinks and ALiBi cost: the rate, and its part of the plain kernel's",
    "decode": "A paged KV cache: GB/s of K and V read, or TFLOP/s, beside a plain streaming read and the peers",
    "launch": "What a call costs besides its kernel; less is better, and ratios above 1 mean that fmha takes less",
}
CHARTS = {  # what each one shows, for those who cannot see it
    "rate": "TFLOP/s over sequence length for each head dim and mask: fmha, its peers and cuBLAS",
    "ratio": "fmha's rate over the fastest peer's at each sequence length, for each head dim and mask",
    "tail": "Rate at lengths a little past a multiple of every tile, relative to the rate at the multiple",
    "launch": "Host and first-call times of fmha and its peers",
    "resources": "Instructions of each KV loop for each score, registers, spills and stack: fmha beside its peers",
}
SHORT_LENGTHS = (512, 1024, 4096, 16384)
SHORT_TAIL = "The lowest rate past each base length, as a part of the same candidate's rate at it"
SHORT_LAUNCH = "What a call costs besides its kernel"
SHORT_LAUNCH_ROWS = (  # what a user meets first; the page has the others
    "eager call, host",
    "call in a CUDA graph of 20, device",
    "cold compile, first kernel of the process",
    "disk hit, first kernel of the process",
)
PROBED = range(1, 513)  # head dims
REFUSED = (Problem("float32", 128), Problem("bfloat16", 100), Problem("bfloat16", 264))  # shown beside the table


def support() -> str:
    """What each architecture computes; those that compute the same stand together."""
    alike: dict[tuple[Any, ...], list[str]] = {}
    for arch, chip in ARCHITECTURES.items():
        alike.setdefault((chip, arch in UNRUN, *served(arch)), []).append(arch)
    rows = [
        (f"{chip} ({', '.join(architectures)}){kind}" + ", never run" * unrun, *cells)
        for (chip, unrun, *found), architectures in alike.items()
        for kind, *cells in found
    ]
    reasons = [reason for p in REFUSED if (reason := supports(p, next(iter(ARCHITECTURES))))]
    return (
        table(("GPU", "dtypes", "masks", "head dims"), rows)
        + "\n\nAll else is an `fmha.Unsupported` that says why:\n"
        + "\n".join(f"`{reason}`," for reason in reasons)[:-1]
        + "."
    )


def served(arch: str) -> list[tuple[str, str, str, str]]:
    """Rows of the table, found by asking `supports` for every head dim: what kind of call, dtypes, masks, head dims."""
    found: dict[tuple[str, str], list[str]] = {}  # (masks, head dims): dtypes
    paged: dict[str, list[str]] = {}  # head dims: dtypes
    for dtype in DTYPES:
        masks: dict[str, list[str]] = {}  # head dims: masks
        for mask in MASKS:
            dims = [d for d in PROBED if supports(Problem(dtype, d, mask), arch) is None]
            masks.setdefault(spans(dims), []).append(mask)
        for dims_, names in masks.items():
            found.setdefault((", ".join(names), dims_), []).append(dtype)
        dims = [d for d in PROBED if supports(PagedProblem(dtype, d), arch) is None]
        paged.setdefault(spans(dims), []).append(dtype)
    rows = [("", ", ".join(dtypes), *key) for key, dtypes in found.items()]
    return rows + [(", paged", ", ".join(dtypes), ", ".join(MASKS), dims_) for dims_, dtypes in paged.items()]


def spans(numbers: list[int]) -> str:
    """Evenly spaced numbers in words."""
    if not numbers:
        return "none"
    steps = {b - a for a, b in zip(numbers, numbers[1:], strict=False)}
    if len(numbers) < 3 or len(steps) > 1:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]} to {numbers[-1]} in steps of {steps.pop()}"


def resource_table() -> str:
    """The committed resources of every variant: the chart, and its numbers folded away."""
    columns = ("kernel", "registers", "stack bytes", "spills", "KV loop", "per score", "masked KV loop")
    rows = []
    for name, row in resources.load().items():
        registers = "/".join(map(str, row.setmaxnreg))
        masked = ", ".join(map(str, row.masked))
        rows.append((name, registers, row.stack_bytes, row.spills, row.body, row.body_per_score, masked))
    chart = image("resources", "perf")
    return f"{chart}\n\n<details><summary>The same in numbers</summary>\n\n{table(columns, rows)}\n\n</details>"


# -- numbers -----------------------------------------------------------------------------------------------------------


def numbers(results: Path = RESULTS) -> str:
    """The short of what was measured on each GPU, and where the rest is."""
    return "\n\n".join(gpu_numbers(found) for folder in folders(results) if (found := series.load(folder)))


def folders(results: Path = RESULTS) -> list[Path]:
    """Those of the GPUs."""
    return sorted(path for path in results.glob("*") if path.is_dir())


def gpu_numbers(results: series.Results) -> str:
    """Three charts at most, and the rows of the tables that matter most."""
    parts = [f"### {results.gpu}"]
    place = f"perf/results/{results.folder.name}"
    drawn = series.charts(results)
    if results.tests:
        parts.append(tests_line(results.tests))
    if dense := results.runs.get("dense"):
        parts += [image("rate", place)] if "rate" in drawn else []
        parts += [f"{SUITES['dense']}.", short_table(dense["rows"]), where(dense["meta"])]
    if tail := results.runs.get("tail"):
        parts += [image("tail", place)] if "tail" in drawn else []
        parts += [f"{SHORT_TAIL}:", tail_table(tail["rows"]), where(tail["meta"])]
    for suite in ("window", "varlen", "scores"):
        if run := results.runs.get(suite):
            parts += [f"{SUITES[suite]}: {summary(run['rows'])}. {where(run['meta'])}"]
    if decode := results.runs.get("decode"):
        parts += [f"{SUITES['decode']}.", decode_table(decode["rows"]), where(decode["meta"])]
    if launch := results.runs.get("launch"):
        parts += [f"{SHORT_LAUNCH}:", launch_table(launch["rows"]), where(launch["meta"])]
    parts.append(f"Every row, with versions and the commands that repeat it: [{place}]({place}/README.md).")
    return "\n\n".join(parts)


def image(chart: str, place: str) -> str:
    """A chart, with words for those who cannot see it."""
    return f"![{CHARTS[chart]}]({place and place + '/'}{chart}.png)"


def tests_line(record: Mapping[str, Any]) -> str:
    """What the GPU tests found."""
    outcomes, checked = record["tests"], record["cases"]
    worst = ", ".join(f"{entry['worst_ratio']:.2f} ({dtype})" for dtype, entry in checked.items())
    return (
        f"`python -m pytest tests/gpu tests/reports` on an {record['gpu']}, driver {record['driver']}, "
        f"{record['date']}, sources `{record['source']}`: {outcomes['passed']} passed, {outcomes['failed']} failed, "
        f"{outcomes['skipped']} skipped; "
        f"{sum(entry['checked'] for entry in checked.values())} problems against the float64 oracle, the largest error "
        f"as a multiple of torch's own: {worst}."
    )


def short_table(rows: Sequence[series.Row]) -> str:
    """The rates at a few lengths, and their ratios to each peer's and the best one's."""
    peers = series.peers(rows)
    lines = []
    for name, group in series.groups(rows).items():
        for row in group:
            if row["case"]["seqlen_k"] in SHORT_LENGTHS:
                best = show.best_peer(row)
                ratios = [show.ratio(row, peer) for peer in peers] + [show.ratio(row, best) if best else None]
                rate = "wrong" if "error" in row else show.number(row[OURS])
                lines.append((name, row["case"]["seqlen_k"], rate, *map(two_digits, ratios)))
    return table(("problem", "S", "TFLOP/s", *(f"{OURS}/{peer}" for peer in peers), f"{OURS}/best"), lines)


def summary(rows: Sequence[series.Row]) -> str:
    """The least and the largest ratio to each peer."""
    found = {peer: [r for row in rows if (r := show.ratio(row, peer))] for peer in series.peers(rows)}
    spans_ = (f"{min(ratios):.2f} to {max(ratios):.2f} of {peer}" for peer, ratios in found.items() if ratios)
    return f"{', '.join(spans_)} ({len(rows)} problems)"


def decode_table(rows: Sequence[series.Row]) -> str:
    """Rates, what part of a streaming read they are, and times."""
    peers = series.peers(rows)
    lines = []
    for row in rows:
        if "error" in row:
            lines.append((row["case"]["name"], "wrong", *[""] * (4 + len(peers))))
            continue
        part = row[OURS] / row["read"] if row["unit"] == "GB/s" else None
        ratios = (two_digits(show.ratio(row, peer)) for peer in peers)
        rate = f"{show.number(row[OURS])} {row['unit']}"
        times = show.number(row["device_us"]), show.number(row["host_us"])
        lines.append((row["case"]["name"], rate, two_digits(part), *ratios, *times))
    columns = ("problem", "rate", "of a read", *(f"{OURS}/{peer}" for peer in peers), "device us", "host us")
    return table(columns, lines)


def tail_table(rows: Sequence[series.Row]) -> str:
    """The worst of each base length."""
    candidates = [OURS, *series.peers(rows)]
    lines = [(name, *(two_digits(worst.get(who)) for who in candidates)) for name, worst in series.worst_tails(rows)]
    return table(("lengths", *candidates), lines)


def launch_table(rows: Sequence[series.Row]) -> str:
    """What matters most of it."""
    candidates = [OURS, *series.peers(rows)]
    lines = [
        (row["case"]["name"], row.get("unit", "wrong"), *(show.number(series.rate(row, who)) for who in candidates))
        for row in rows
        if row["case"]["name"] in SHORT_LAUNCH_ROWS
    ]
    return table(("what", "unit", *candidates), lines)


def two_digits(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def where(meta: Mapping[str, Any]) -> str:
    """On what a suite was measured, how, and who is who."""
    others = {peer: title for peer, title in meta["titles"].items() if peer != OURS}
    who = ", ".join(f"{peer}: {title}" for peer, title in others.items() if peer not in meta["missing_peers"])
    missing = ", ".join(others[peer] for peer in meta["missing_peers"] if peer in others)
    place = f"{meta['gpu']}, driver {meta['driver']}, {meta['date']}, sources `{meta['source']}`"
    return f"{place}; `{command(meta)}`. {who or 'No peers'}." + (f" Not installed: {missing}." if missing else "")


def command(meta: Mapping[str, Any]) -> str:
    """The one that repeats a suite, without the file that it wrote."""
    return re.sub(r" --out[ =]\S+", "", meta["command"])


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines: list[Sequence[object]] = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


BLOCKS: Mapping[str, Callable[[], str]] = {"support": support, "resources": resource_table, "numbers": numbers}


def generate(text: str) -> str:
    """`text` with every block as the code has it. ValueError if one has no markers, or markers no block."""
    marked = re.findall(r"<!-- (\w+):begin -->", text)
    if sorted(marked) != sorted(BLOCKS):
        raise ValueError(f"the README has the blocks {sorted(marked)}, {sorted(BLOCKS)} are needed, each once")
    for name, write in BLOCKS.items():
        block = f"<!-- {name}:begin -->\n{write()}\n<!-- {name}:end -->"
        pattern = rf"<!-- {name}:begin -->.*?<!-- {name}:end -->"
        text, found = re.subn(pattern, lambda _, block=block: block, text, flags=re.DOTALL)  # type: ignore[misc]
        if found != 1:
            raise ValueError(f"the block {name!r} of the README does not end with <!-- {name}:end -->")
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.readme", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="only say whether the README is current")
    chosen = parser.parse_args(arguments)
    before = README.read_text()
    after = generate(before)
    if chosen.check:
        print("README.md is current" if after == before else "README.md is behind: python -m perf.readme")
        return int(after != before)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
