"""The name of a compiled kernel: every value its code depends on, as text that a person can read.

Anything else (sizes, strides, scale) is a run-time argument. A field added to `Problem` or `BlockConfig` enters the
text by itself; one whose value cannot be written down exactly is an error, never a guess.
"""

from __future__ import annotations

import dataclasses
import hashlib

from fmha.problem import AnyProblem, PagedProblem, WriteProblem
from schedules.tiling import AnyConfig, CopyConfig

LISTER = "fmha_list_sequences"  # how the name of the kernel begins that runs before one for ragged batches


def canonical(problem: AnyProblem, config: AnyConfig, arch: str) -> str:
    """The text that names a kernel, one `name = value` a line.

    A head dim below that of the tile is padded by TMA when the kernel runs, so the text carries the config's.
    """
    lines = [f"arch = {_write(arch)}"]
    kind = {PagedProblem: "paged problem", WriteProblem: "write problem"}.get(type(problem), "problem")
    for prefix, values in ((kind, padded(problem, config)), ("config", config)):
        for field in dataclasses.fields(values):
            lines.append(f"{prefix}.{field.name} = {_write(getattr(values, field.name))}")
    return "\n".join(lines) + "\n"


def padded(problem: AnyProblem, config: AnyConfig) -> AnyProblem:
    """The problem with the head dims of the tiles, where there are any."""
    if isinstance(problem, WriteProblem):
        return problem
    assert not isinstance(config, CopyConfig), f"{problem} has tiles"
    return dataclasses.replace(problem, head_dim=config.head_dim, head_dim_v=config.value_dim)


def digest(text: str) -> str:
    """64 hexadecimal digits that stand for a canonical text in file names."""
    return hashlib.sha256(text.encode()).hexdigest()


def symbol(problem: AnyProblem, config: AnyConfig, arch: str) -> str:
    """The kernel's name in the cubin, as profilers show it. The same kernel has the same name in every process."""
    short = digest(canonical(problem, config, arch))[:8]
    if isinstance(problem, WriteProblem):
        return f"fmha_write_kv_{problem.layout}_{short}"
    assert not isinstance(config, CopyConfig), f"{problem} has tiles"
    if isinstance(problem, PagedProblem):
        return f"fmha_decode_{problem.dtype}_{problem.layout}_d{config.head_dim}_{short}"
    mask = problem.mask + ("_paged" if problem.paged else "_ragged" if problem.ragged else "")
    return f"fmha_forward_{problem.dtype}_{mask}_d{config.head_dim}_{short}"


def _write(value: object) -> str:
    """`value` as Python would read it back; only types whose text is exact and the same in every process."""
    if value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{value!r} of type {type(value).__name__} has no canonical text")
    return repr(value)
