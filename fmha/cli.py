"""`python -m fmha`: the demo, ahead-of-time compilation, what the kernels cost, and the cache of compiled kernels."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track

from fmha import problem
from fmha.jit import compile, library, report, sass, store
from fmha.problem import PagedProblem, Problem, Unsupported, Variant, supports
from schedules.scores import SCORES
from schedules.tiling import choose, rows

EXAMPLES = """\
examples:
  python -m fmha demo                              the main job, on whatever machine this is
  python -m fmha compile --arch sm_90a --out DIR   every kernel's cubin, and a manifest.json
  python -m fmha inspect --head-dim 128            registers, spills and loop instructions
  python -m fmha inspect --arch sm_100a            those of another chip
  python -m fmha cache verify                      checks every cached kernel against its checksum
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status: 0, 1 if what it checks is wrong, 2 if it cannot be done."""
    chosen = parser().parse_args(arguments)
    try:
        return chosen.run(chosen)
    except (ValueError, LookupError, OSError, Unsupported, sass.MissingTool) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m fmha",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(title="commands", required=True, metavar="COMMAND")

    text = (
        "Computes attention and checks it: on a GPU with the kernels, against float64 and timed beside torch's own; "
        "without one, or on one whose kernels nobody has run, unless FMHA_ALLOW_UNRUN is 1, by running the kernels' "
        "role programs in a simulator. Shows what the kernels cost."
    )
    command = commands.add_parser("demo", help="the main job, checked", description=text)
    command.set_defaults(run=run_demo)

    text = "Compiles kernels into DIR: a cubin each, and manifest.json, a list of {name, arch, problem, config, cubin}."
    command = commands.add_parser("compile", help="write cubins", description=text)
    command.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder to write to, made if missing")
    add_selection(command)
    command.set_defaults(run=run_compile)

    text = "Compiles kernels and reads their machine code: registers, stack, spills, shared memory, loop instructions."
    command = commands.add_parser("inspect", help="what the kernels cost", description=text)
    command.add_argument("--json", action="store_true", help="print JSON, with all counts")
    add_selection(command)
    command.set_defaults(run=run_inspect)

    text = "The compiled kernels on disk, in $FMHA_CACHE_DIR or else the folder fmha of the user's cache folder."
    command = commands.add_parser("cache", help="list, verify or clear the kernels on disk", description=text)
    actions = command.add_subparsers(title="actions", required=True, metavar="ACTION")
    actions.add_parser("ls", help="list them").set_defaults(run=run_cache_ls)
    actions.add_parser("verify", help="check them; status 1 if any is damaged").set_defaults(run=run_cache_verify)
    actions.add_parser("clear", help="remove them").set_defaults(run=run_cache_clear)
    return top


# -- which kernels -----------------------------------------------------------------------------------------------------


def add_selection(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--arch", default="sm_90a", help=f"{' or '.join(problem.ARCHITECTURES)} (default: %(default)s)"
    )
    command.add_argument("--head-dim", metavar="N", type=int, nargs="+", help="only the kernels that serve these")
    command.add_argument("--mask", nargs="+", choices=problem.MASKS, help="only these")
    command.add_argument("--dtype", nargs="+", choices=problem.DTYPES, default=problem.DTYPES, help="only these")
    command.add_argument(
        "--score", nargs="+", choices=SCORES, default=["plain"], help="what is done to scores (default: plain)"
    )
    command.add_argument("--ragged", action="store_true", help="those for sequences with lengths of their own")
    command.add_argument("--paged", action="store_true", help="only those for paged caches, which serve every mask")


def selection(chosen: argparse.Namespace) -> list[Variant]:
    """Every kernel that the options ask for: those of paged caches, too, unless a mask or `--ragged` says which others.
    `fmha.Unsupported` if a head dim has none."""
    kind = PagedProblem if chosen.paged else Problem
    asked = (kind("bfloat16", head_dim) for head_dim in chosen.head_dim or (64,))
    for reason in filter(None, (supports(p, chosen.arch) for p in asked)):
        raise Unsupported(reason)
    found: list[Variant] = []
    if not chosen.paged:
        found += masked(chosen)
    if chosen.paged or not (chosen.mask or chosen.ragged):
        found += paged(chosen)
    return [variant for variant in found if variant.problem.dtype in chosen.dtype]


def masked(chosen: argparse.Namespace) -> list[Variant]:
    widths = {choose(head_dim, chosen.arch).head_dim for head_dim in chosen.head_dim or ()}
    return [
        variant
        for variant in problem.variants(chosen.arch, chosen.score, [chosen.ragged])
        if getattr(variant.problem, "mask", None) in (chosen.mask or problem.MASKS)
        and (not widths or variant.config.head_dim in widths)
    ]


def paged(chosen: argparse.Namespace) -> list[Variant]:
    """None where an architecture, or a head dim, has none."""
    every = [v for v in problem.paged_variants(chosen.arch) if v.problem.score in chosen.score]
    if not chosen.head_dim:
        return every
    served = [d for d in chosen.head_dim if supports(PagedProblem("bfloat16", d), chosen.arch) is None]
    widths = {rows(head_dim, chosen.arch, paged=True)[0].config.head_dim for head_dim in served}
    return [variant for variant in every if variant.config.head_dim in widths]


def compile_all(variants: Sequence[Variant], arch: str) -> dict[str, tuple[Variant, bytes]]:
    """Variants and cubins by name, from the cache or the compiler, with a progress bar."""
    found = {}
    for variant in track(variants, "Compiling", console=Console(stderr=True)):
        found[report.name(variant, arch)] = variant, compile.cubin(library.object_file(*variant, arch))
    return found


# -- commands ----------------------------------------------------------------------------------------------------------


def run_demo(chosen: argparse.Namespace) -> int:
    from fmha import demo

    return demo.run(console())


def run_compile(chosen: argparse.Namespace) -> int:
    variants = selection(chosen)
    chosen.out.mkdir(parents=True, exist_ok=True)  # before time is spent on what cannot be written
    manifest = []
    for name, (variant, cubin) in compile_all(variants, chosen.arch).items():
        file = f"{name}.cubin"
        (chosen.out / file).write_bytes(cubin)
        manifest.append({"name": name, "arch": chosen.arch, **_described(variant), "cubin": file})
    written = chosen.out / "manifest.json.tmp"
    written.write_text(json.dumps(manifest, indent=2) + "\n")
    os.replace(written, chosen.out / "manifest.json")
    print(f"{len(manifest)} cubins and manifest.json in {chosen.out}")
    return 0


def run_inspect(chosen: argparse.Namespace) -> int:
    found, variants = {}, {}
    for name, (variant, cubin) in compile_all(selection(chosen), chosen.arch).items():
        variants[name] = variant
        found[name] = report.of_cubin(cubin, variant.config)
    if chosen.json:
        rows = [
            {"name": name, "arch": chosen.arch, **_described(variants[name]), "spills": row.spills, **asdict(row)}
            for name, row in found.items()
        ]
        print(json.dumps(rows, indent=2))
    else:
        out = console()
        out.print(report.table(found, out.width))
    return 0


def _described(variant: Variant) -> dict[str, dict]:
    return {"problem": asdict(variant.problem), "config": asdict(variant.config)}


def run_cache_ls(chosen: argparse.Namespace) -> int:
    cache = library.STORE
    entries = cache.entries()
    shown = report.plain_table(f"Kernels in {cache.root}", ["kernel", "folder", "state"], ["KiB"])
    current = store.fingerprint()
    for entry in entries:
        folder = entry.path.parent.name
        state = f"damaged: {entry.damage}" if entry.damage else ("current" if folder == current else "of other sources")
        shown.add_row(describe(entry.text) or entry.path.name, folder, state, f"{entry.size / 1024:.0f}")
    if entries:
        console().print(shown)
    size = sum(entry.size for entry in entries)
    print(f"{len(entries)} kernels, {size / 2**20:.1f} MiB in {cache.root}")
    return 0


def run_cache_verify(chosen: argparse.Namespace) -> int:
    entries = library.STORE.entries()
    damaged = [entry for entry in entries if entry.damage]
    for entry in damaged:
        print(f"damaged: {entry.path}: {entry.damage}", file=sys.stderr)
    print(f"{len(entries)} kernels in {library.STORE.root}, {len(damaged)} of them damaged")
    return 1 if damaged else 0


def run_cache_clear(chosen: argparse.Namespace) -> int:
    print(f"{library.STORE.clear()} files removed from {library.STORE.root}")
    return 0


def describe(text: str) -> str:
    """A kernel's canonical text in a few words."""
    fields = {name: value.strip("'") for name, _, value in (line.partition(" = ") for line in text.splitlines())}
    if "paged problem.layout" in fields:
        fields |= {name.removeprefix("paged "): value for name, value in fields.items()}
        fields["problem.mask"] = f"paged {fields['problem.layout']}"
    names = ("arch", "problem.dtype", "problem.mask", "config.head_dim", "config.tile_n")
    return "{} {} {}, head dim {}, tile_n {}".format(*(fields.get(n, "?") for n in names)) if fields else ""


def console() -> Console:
    """Standard output; wide enough for every column where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else report.WIDE)
