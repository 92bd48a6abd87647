"""What a variant costs on its chip, as one row: from its config and its machine code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from fmha.jit import compile, sass
from fmha.problem import Problem
from schedules.tiling import WARPGROUP, BlockConfig, choose


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
    body_waits: tuple[tuple[int, int, int], ...]  # of each MMA wait: groups left, shuffles and exponentials before it
    masked: tuple[int, ...]  # instructions a masked KV tile, where those have a loop
    early_retire: bool  # a softmax loop waits for every MMA before its row maximum

    @property
    def spills(self) -> int:
        """Local loads and stores."""
        return self.local_loads + self.local_stores


def of_cubin(cubin: bytes | Path, config: BlockConfig | None = None) -> Report:
    """Reads a cubin; `config` is the one it was compiled from. Errors as `sass.read`, LookupError without a KV loop."""
    found = sass.read(cubin)
    body = found.body
    scores = config.tile_m * config.tile_n / (config.consumers * WARPGROUP) if config else None
    return Report(
        registers=found.registers,
        setmaxnreg=found.setmaxnreg,
        stack_bytes=found.stack_bytes,
        local_loads=found.local_loads,
        local_stores=found.local_stores,
        smem_bytes=config.smem_bytes() if config else None,
        instructions=found.instructions,
        body=body.common,
        body_per_score=round(body.common / scores, 2) if scores else None,
        body_kinds={kind: n for kind, n in body.kinds.items() if n},
        body_waits=tuple((wait.pending, wait.shuffles, wait.ex2) for wait in body.waits),
        masked=tuple(loop.common for loop in found.masked),
        early_retire=any(loop.early_retire for loop in found.softmax_loops),
    )


def of_problem(problem: Problem, arch: str) -> Report:
    """Compiles the kernel of `problem` for `arch` and reads it."""
    config = choose(problem.head_dim, arch)
    return of_cubin(compile.cubin(compile.compile_object(problem, config, arch)), config)


def name(problem: Problem, arch: str) -> str:
    """A variant's name for people and files: arch, tile's head dim, mask and dtype."""
    return f"{arch}-d{choose(problem.head_dim, arch).head_dim}-{problem.mask}-{problem.dtype}"


def table(reports: Mapping[str, Report], before: Mapping[str, Report] | None = None) -> Table:
    """The reports as a table; where `before` has another number, it follows in brackets."""
    shown = Table(title="Resources, from machine code", caption="loop, masked: instructions a KV tile")
    shown.add_column("variant", no_wrap=True)
    for column in ("registers", "stack", "spills", "smem KiB", "kernel", "loop", "a score", "masked", "mma", "moves"):
        shown.add_column(column, justify="right")
    for key, row in reports.items():
        old = (before or {}).get(key, row)
        shown.add_row(
            key,
            f"{_change(row.registers, old.registers)} ({'/'.join(map(str, row.setmaxnreg))})",
            _change(row.stack_bytes, old.stack_bytes),
            _change(row.spills, old.spills),
            f"{row.smem_bytes / 1024:.0f}" if row.smem_bytes else "?",
            _change(row.instructions, old.instructions),
            _change(row.body, old.body),
            f"{row.body_per_score:.2f}" if row.body_per_score else "?",
            " ".join(_change(new, was) for new, was in zip(row.masked, old.masked or row.masked, strict=False)),
            str(row.body_kinds.get("mma", 0)),
            _change(row.body_kinds.get("move", 0), old.body_kinds.get("move", 0)),
        )
    return shown


def _change(new: int, old: int) -> str:
    return str(new) if new == old else f"{new} \\[{old}]"
