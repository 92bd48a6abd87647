"""What a variant costs on its chip, as one row: from its config and its machine code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fmha.jit import compile, library, sass
from fmha.problem import PagedProblem, Variant
from schedules.tiling import TiledConfig, choose, rivals

SHORT = {"bfloat16": "bf16", "float16": "fp16"}
WIDE = 140  # characters, from which a table has every column


@dataclass(frozen=True)
class Report:
    """The resources of one kernel. Numbers of the body loop are of its common path, once round: one KV tile."""

    registers: int  # per thread, as launched
    setmaxnreg: tuple[int, ...]  # per thread and role, ascending
    stack_bytes: int
    local_loads: int  # spilled registers read back
    local_stores: int
    smem_bytes: int | None  # dynamic, for each CTA; None where the config is not known
    instructions: int  # of the kernel
    body: int  # instructions
    body_per_score: float | None  # body / scores of a KV tile that one thread holds; None likewise
    body_kinds: Mapping[str, int]  # instructions by kind, as in `sass.KINDS`
    body_waits: tuple[tuple[int, int, int], ...]  # of each MMA wait: groups left, maxima and exponentials before it
    masked: tuple[int, ...]  # instructions a masked KV tile, where those have a loop
    early_retire: bool  # a softmax loop waits for every MMA before its first exponential
    tmem_columns: int = 0  # of tensor memory, for each CTA

    @property
    def spills(self) -> int:
        """Local loads and stores."""
        return self.local_loads + self.local_stores


def of_cubin(cubin: bytes | Path, config: TiledConfig | None = None, function: str | None = None) -> Report:
    """Reads a cubin, of several kernels the one named `function`; `config` is the one it was compiled from.

    Errors as `sass.read`, LookupError without a KV loop.
    """
    found = sass.read(cubin, function)
    body = found.body
    return Report(
        registers=found.registers,
        setmaxnreg=found.setmaxnreg,
        stack_bytes=found.stack_bytes,
        local_loads=found.local_loads,
        local_stores=found.local_stores,
        smem_bytes=config.smem_bytes() if config else None,
        instructions=found.instructions,
        body=body.common,
        body_per_score=round(body.common / config.scores_per_thread, 2) if config else None,
        body_kinds={kind: n for kind, n in body.kinds.items() if n},
        body_waits=tuple((wait.pending, wait.maxima, wait.ex2) for wait in body.waits),
        masked=tuple(loop.common for loop in found.masked),
        early_retire=any(loop.early_retire for loop in found.softmax_loops),
        tmem_columns=config.tmem_columns if config else 0,
    )


def of_variant(variant: Variant, arch: str) -> Report:
    """A kernel for `arch`, from the cache or the compiler. `fmha.Unsupported` if there is none."""
    return of_cubin(compile.cubin(library.object_file(*variant, arch)), variant.config)


def name(variant: Variant, arch: str) -> str:
    """A variant's name for people and files: arch, tile's head dim, and V's if it has its own, mask, dtype, what is
    done to scores, "ragged", or of what pages; "lse" if calls that want none get another; behind it the tile, of
    queries by keys, unless it is that for long sequences. Paged kernels, which serve every mask, have "paged" in its
    place."""
    problem, config = variant
    if isinstance(problem, PagedProblem):
        parts = arch, config.dims, "paged", SHORT[problem.dtype], problem.score, problem.layout
        return "-".join(part for part in parts if part not in ("plain", "rows"))
    base = f"{arch}-{config.dims}-{problem.mask}-{SHORT[problem.dtype]}"
    base += f"-{problem.score}" * (problem.score != "plain")
    base += f"-pages{problem.paged}" if problem.paged else "-ragged" * problem.ragged
    if config.exact and not choose(config.head_dim, arch, head_dim_v=config.head_dim_v).exact:
        base += "-lse"
    long = rivals(config.head_dim, arch, config.exact, config.head_dim_v)[0].config
    return base if config == long else f"{base}-{config.tile_m}x{config.tile_n}"


def table(reports: Mapping[str, Report], width: int, before: Mapping[str, Report] | None = None) -> Table:
    """The reports as a table for `width` characters; where `before` has another number, it follows in brackets."""
    tmem = ["tmem"] * any(row.tmem_columns for row in reports.values())
    columns = ["registers", "stack", "spills", "smem", *tmem, "loop", "a score", "masked"]
    columns += ["kernel", "mma", "ex2", "fma", "max", "moves", "MMA waits"] if width >= WIDE else []
    shown = plain_table("Resources, from machine code", ["variant"], columns)
    shown.caption = "registers: of each role's threads; loop, masked: instructions a KV tile"
    shown.caption += "; tmem: columns of tensor memory in use" * len(tmem)
    if width >= WIDE:
        shown.caption += "; waits: groups left, after how many instructions for the maximum and exponentials"
    for key, row in reports.items():
        cells = _cells(row, (before or {}).get(key, row))
        shown.add_row(key, *(cells[column] for column in columns))
    return shown


def plain_table(title: str, left: list[str], right: list[str]) -> Table:
    """An empty table with columns that align left, then columns that align right."""
    shown = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    shown.caption_justify = "left"
    for column in left:
        shown.add_column(column, no_wrap=True)
    for column in right:
        shown.add_column(column, no_wrap=True, justify="right")
    return shown


def _cells(row: Report, old: Report) -> dict[str, str]:
    kinds, were = row.body_kinds, old.body_kinds
    cells = {kind: _change(kinds.get(kind, 0), were.get(kind, 0)) for kind in ("mma", "ex2", "fma", "max")}
    masked = zip(row.masked, old.masked if len(old.masked) == len(row.masked) else row.masked, strict=True)
    return cells | {
        "registers": "/".join(map(str, row.setmaxnreg or (row.registers,))),
        "stack": _change(row.stack_bytes, old.stack_bytes),
        "spills": _change(row.spills, old.spills),
        "smem": f"{row.smem_bytes / 1024:.0f}K" if row.smem_bytes else "?",
        "tmem": str(row.tmem_columns),
        "loop": _change(row.body, old.body),
        "a score": f"{row.body_per_score:.2f}" if row.body_per_score else "?",
        "masked": " ".join(_change(new, was) for new, was in masked),
        "kernel": _change(row.instructions, old.instructions),
        "moves": _change(kinds.get("move", 0), were.get("move", 0)),
        "MMA waits": " ".join(f"{left}@{maxima}+{ex2}" for left, maxima, ex2 in row.body_waits),
    }


def _change(new: int, old: int) -> str:
    return str(new) if new == old else f"{new} \\[{old}]"
