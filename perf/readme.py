"""`python -m perf.readme`: writes the parts of README.md that the code knows better, between their markers.

    <!-- support:begin -->  ...  <!-- support:end -->        what `fmha.supports` says
    <!-- resources:begin -->  ...  <!-- resources:end -->    perf/resources.json
    <!-- numbers:begin -->  ...  <!-- numbers:end -->        perf/results/

`--check` changes nothing and returns status 1 if the README is behind.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fmha.problem import ARCHITECTURES, DTYPES, MASKS, PLANNED, Problem, supports
from perf import resources, show

README = Path(__file__).resolve().parent.parent / "README.md"
RESULTS = Path(__file__).resolve().parent / "results"
SUITES = {
    "dense": "TFLOP/s of useful work, and how many times as fast as each peer",
    "tail": "Lengths that leave a partial last tile: the same, and the rate as a part of that at the whole length",
    "launch": "What a call costs besides its kernel; less is better, and ratios above 1 mean that fmha takes less",
}
PROBED = range(1, 513)  # head dims
REFUSED = (Problem("float32", 128), Problem("bfloat16", 100), Problem("bfloat16", 264))  # shown beside the table


def support() -> str:
    """What each architecture computes, found by asking `supports` for every head dim."""
    rows = []
    for arch, chip in (ARCHITECTURES | PLANNED).items():
        served: dict[tuple[str, str], list[str]] = {}  # (masks, head dims): dtypes
        for dtype in DTYPES:
            masks: dict[str, list[str]] = {}  # head dims: masks
            for mask in MASKS:
                dims = [d for d in PROBED if supports(Problem(dtype, d, mask), arch) is None]
                masks.setdefault(spans(dims), []).append(mask)
            for dims_, names in masks.items():
                served.setdefault((", ".join(names), dims_), []).append(dtype)
        rows += [(f"{chip} ({arch})", ", ".join(dtypes), *key) for key, dtypes in served.items()]
    reasons = [reason for p in REFUSED if (reason := supports(p, next(iter(ARCHITECTURES))))]
    return (
        table(("GPU", "dtypes", "masks", "head dims"), rows)
        + "\n\nAll else is an `fmha.Unsupported` that says why:\n"
        + "\n".join(f"`{reason}`," for reason in reasons)[:-1]
        + "."
    )


def spans(numbers: list[int]) -> str:
    """Evenly spaced numbers in words."""
    if not numbers:
        return "none"
    steps = {b - a for a, b in zip(numbers, numbers[1:], strict=False)}
    if len(numbers) < 3 or len(steps) > 1:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]} to {numbers[-1]} in steps of {steps.pop()}"


def resource_table() -> str:
    """The committed resources of every variant."""
    columns = ("kernel", "registers", "stack bytes", "spills", "KV loop", "per score", "masked KV loop")
    rows = []
    for name, row in resources.load().items():
        registers = "/".join(map(str, row.setmaxnreg))
        masked = ", ".join(map(str, row.masked))
        rows.append((name, registers, row.stack_bytes, row.spills, row.body, row.body_per_score, masked))
    return table(columns, rows)


def numbers(results: Path = RESULTS) -> str:
    """What was measured on each GPU: the GPU tests, then the suites of the benchmark."""
    parts = []
    for folder in sorted(path for path in results.glob("*") if path.is_dir()):
        if (tests := folder / "tests.json").exists():
            parts.append(tests_line(json.loads(tests.read_text())))
        for suite, meaning in SUITES.items():
            if (path := folder / f"{suite}.json").exists():
                parts += [f"### {suite.capitalize()}", f"{meaning}.", suite_table(json.loads(path.read_text()))]
    return "\n\n".join(parts)


def tests_line(record: dict[str, Any]) -> str:
    """What the GPU tests found."""
    outcomes, checked = record["tests"], record["cases"]
    worst = ", ".join(f"{entry['worst_ratio']:.2f} ({dtype})" for dtype, entry in checked.items())
    return (
        f"`python -m pytest tests/gpu` on an {record['gpu']}, driver {record['driver']}, {record['date']}, sources "
        f"`{record['source']}`: {outcomes['passed']} passed, {outcomes['failed']} failed, {outcomes['skipped']} "
        "skipped; "
        f"{sum(entry['checked'] for entry in checked.values())} problems against the float64 oracle, the largest error "
        f"as a multiple of torch's own: {worst}."
    )


def suite_table(result: dict[str, Any]) -> str:
    """A table of a suite's rows, and where and how they were measured."""
    meta = result["meta"]
    header, lines = show.cells(result["rows"])
    peers = ", ".join(f"{peer}: {meta['titles'][peer]}" for peer in meta["titles"] if peer != show.OURS)
    where = f"{meta['gpu']}, driver {meta['driver']}, {meta['date']}, sources `{meta['source']}`"
    return table(header, lines) + f"\n\n{where}; `{meta['command'].split(' --out')[0]}`. {peers}."


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
