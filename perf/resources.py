"""`python -m perf.resources`: registers, spills and loop instructions of every variant, from its machine code.

Compiles every variant, prints a table and compares it with `perf/resources.json`, the committed one. It objects (exit
status 1) to a spilled register, a byte of stack, a select in the unmasked loop body, a wait for all MMAs before the
first exponential or before half as many of them as in the table, and a loop body that grew by more than 2%; `--update`
writes the new numbers down. `--compare DIR` compares with the cubins of `python -m fmha compile --out DIR` instead, and
cubins named on the command line are read as they are.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from fmha import problem
from fmha.cli import console
from fmha.jit import report, sass
from fmha.jit.report import Report
from fmha.problem import Variant
from schedules.tiling import TiledConfig, config_of

TABLE = Path(__file__).with_name("resources.json")
ARCH = "sm_90a"
GROWTH = 1.02  # of the loop body, before it needs an `--update`


def objections(name: str, new: Report, old: Report | None, config: TiledConfig | None = None) -> list[str]:
    """What is wrong with a variant, in words; empty if nothing is. `old` is its row of the committed table."""
    said = []
    if new.spills:
        said.append(f"spills: {new.local_loads} local loads, {new.local_stores} local stores")
    if new.stack_bytes:
        said.append(f"{new.stack_bytes} bytes of stack")
    if selects := new.body_kinds.get("select", 0):
        said.append(f"the body loop masks: {selects} selects")
    if new.early_retire:
        said.append("a softmax loop waits for every MMA before its first exponential, so that they do not overlap")
    if len(new.body_waits) > 2:
        said.append(
            f"the body loop waits for MMAs {len(new.body_waits)} times, not twice: the compiler serialised them"
        )
    if config and new.setmaxnreg != (wanted := config.registers):
        said.append(f"setmaxnreg {new.setmaxnreg}, the config says {wanted}")
    if old is None:
        said.append("not in the table to compare with; python -m perf.resources --update adds it")
        return [f"{name}: {words}" for words in said]
    if new.body > math.ceil(old.body * GROWTH):
        said.append(f"the body loop grew from {old.body} to {new.body} instructions")
    if (now := overlapped(new)) < overlapped(old) / 2:
        said.append(f"the body loop waits for PV after {now} exponentials, not {overlapped(old)}")
    return [f"{name}: {words}" for words in said]


def overlapped(report: Report) -> int:
    """Exponentials of the body loop before it waits for its last MMA."""
    return report.body_waits[-1][-1] if report.body_waits else 0


def variants(dtypes: tuple[str, ...] = ("bfloat16",)) -> dict[str, Variant]:
    """The variants in the table, by name: of batches of equal lengths, with plain scores. float16 differs from bfloat16
    in the names of two instructions."""
    return {report.name(found, ARCH): found for found in problem.variants(ARCH) if found.problem.dtype in dtypes}


def measure(names: Iterable[str] | None = None, progress: bool = False) -> dict[str, Report]:
    """Compiles variants, those of the table unless named, and reads their cubins."""
    return compiled({name: variant for name, variant in variants().items() if names is None or name in names}, progress)


def compiled(chosen: Mapping[str, Variant], progress: bool = False) -> dict[str, Report]:
    shown = track(chosen.items(), "Compiling", len(chosen), console=Console(stderr=True), disable=not progress)
    return {name: report.of_variant(variant, ARCH) for name, variant in shown}


def every(progress: bool = False) -> int:
    """Compiles the whole table of features and the kernels of paged caches, which takes a quarter of an hour, and says
    how many variants there are and what is wrong with them. Status 1 if one spills, or masks in its body."""
    every_variant = (*problem.every_variant(ARCH), *problem.paged_variants(ARCH), *problem.prefill_variants(ARCH))
    found = compiled({report.name(variant, ARCH): variant for variant in every_variant}, progress)
    wrong = {
        name: row
        for name, row in found.items()
        if row.spills or row.stack_bytes or row.body_kinds.get("select", 0) > 1  # one of ALiBi's, a tile
    }
    early = sum(row.early_retire for row in found.values())
    print(
        f"{len(found)} variants: {len(wrong)} spill, or mask in the body; {early} wait for PV before the exponentials"
    )
    for name in wrong:
        print(name, file=sys.stderr)
    return 1 if wrong else 0


# -- tables on disk ----------------------------------------------------------------------------------------------------


def load(path: Path = TABLE) -> dict[str, Report]:
    """The rows of a table, by variant; none if there is no such file."""
    if not path.exists():
        return {}
    rows = json.loads(path.read_text())["variants"]
    return {name: Report(**{key: _tuples(value) for key, value in row.items()}) for name, row in rows.items()}


def dump(reports: Mapping[str, Report]) -> str:
    """A table as JSON, a variant a line, with the compiler that the numbers belong to."""
    compiler = json.dumps({"nvidia-cutlass-dsl": metadata.version("nvidia-cutlass-dsl")})
    rows = ",\n".join(f'  "{name}": {json.dumps(asdict(row))}' for name, row in reports.items())
    return f'{{\n "compiler": {compiler},\n "variants": {{\n{rows}\n }}\n}}\n'


def folder(path: Path) -> dict[str, Report]:
    """The variants that `python -m fmha compile --out` left in a folder. ValueError if it has no manifest."""
    if not (manifest := path / "manifest.json").is_file():
        raise ValueError(f"--compare {str(path)!r}: no manifest.json; python -m fmha compile --out DIR writes one")
    entries = json.loads(manifest.read_text())
    return {e["name"]: report.of_cubin(path / e["cubin"], config_of(e["config"])) for e in entries}


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


# -- the command line --------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.resources", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cubin", nargs="*", type=Path, help="read these instead of compiling the variants")
    parser.add_argument("--compare", metavar="DIR", type=Path, help="a folder of `fmha compile` to compare with")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--all", action="store_true", help="compile all features; says how many variants there are")
    parser.add_argument("--update", action="store_true", help=f"write {TABLE.name}")
    chosen = parser.parse_args(arguments)
    if chosen.update and (chosen.cubin or chosen.compare):
        parser.error("--update writes the numbers of freshly compiled variants: give no cubin and no --compare")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    if chosen.all:
        return every(progress=True)
    try:
        if chosen.cubin:
            reports = {str(path): report.of_cubin(path) for path in chosen.cubin}
            before = reports
        else:
            before = folder(chosen.compare) if chosen.compare else load()
            reports = measure(progress=True)
    except (ValueError, LookupError, sass.MissingTool) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_reports(reports, before, as_json=chosen.json)
    if chosen.update:
        TABLE.write_text(dump(reports))
        before = reports
    configs = {} if chosen.cubin else {name: variant.config for name, variant in variants().items()}
    said = [
        words for name, row in reports.items() for words in objections(name, row, before.get(name), configs.get(name))
    ]
    print("\n".join(said), file=sys.stderr, end="\n" if said else "")
    return 1 if said else 0


def print_reports(reports: Mapping[str, Report], before: Mapping[str, Report], as_json: bool) -> None:
    if as_json:
        print(dump(reports), end="")
        return
    out = console()
    out.print(report.table(reports, out.width, before))


if __name__ == "__main__":
    sys.exit(main())
