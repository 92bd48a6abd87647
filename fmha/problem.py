"""What is computed: the static part of an attention problem, and for which of them there is a kernel."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from schedules.scores import SCORES
from schedules.tiling import PAGED_TABLES, TABLES, TiledConfig, for_pages

DTYPES = ("bfloat16", "float16")
MASKS = ("dense", "causal", "window")
PAGED_LAYOUTS = ("rows", "vllm")
PIECES = (16, 64)  # slots that TMA copies at a time, into tiles of a multiple of them
PAGED_SCORES = ("plain", "softcap")
HEAD_DIM_MULTIPLE = 8  # elements: rows are then multiples of the 16 bytes that TMA addresses

# Those with a table of block configs and a folder of kernels.
ARCHITECTURES = {"sm_90a": "Hopper", "sm_100a": "Blackwell", "sm_103a": "Blackwell"}
UNRUN = frozenset({"sm_100a", "sm_103a"})  # whose kernels were compiled, simulated and inspected, and never run
ALLOW_UNRUN = "FMHA_ALLOW_UNRUN"  # the environment variable that lets calls have them all the same, if it is 1


class Unsupported(NotImplementedError):
    """A well-formed request that no kernel serves; the message says which value, and which ones are served.

    A malformed one (shapes that do not fit together, an output that overlaps an input) is a ValueError or TypeError
    instead, so that a caller who falls back to another implementation on `Unsupported` does not hide its own mistakes.
    """


@dataclass(frozen=True)
class Problem:
    """The part of a call that selects a kernel. All else (sizes, strides, scale) is a run-time argument.

    dtype     of q, k, v and the output: "bfloat16" or "float16"
    head_dim  D, in elements: a multiple of 8, up to 256 on Hopper and 128 on Blackwell. Head dims that pad to the same
              block config share a kernel.
    mask      "dense"; "causal" with the diagonal at the bottom right, or a window without a left side; or "window"
    score     "plain", "softcap", "alibi", or "both"
    head_dim_v  of v and the output, likewise; 0 where it is that of q and k
    ragged    each sequence of the batch has lengths of its own, which the device knows
    paged     and its keys and values are in pages, of so many slots or more: 16 or 64; 0 where they are not
    """

    dtype: str
    head_dim: int
    mask: str = "dense"
    score: str = "plain"
    head_dim_v: int = 0
    ragged: bool = False
    paged: int = 0

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim


def supports(problem: AnyProblem, arch: str) -> str | None:
    """Why no kernel for `arch` (such as "sm_90a") computes `problem`, or None if one does.

    The one place that knows: errors, the support table and test skips all ask here. It is about kernels that can be
    compiled; `unrun` says of which architectures they were never run, so that calls are refused all the same.
    """
    if arch not in ARCHITECTURES:
        return f"architecture {arch}: {_names(ARCHITECTURES)} only"
    if isinstance(problem, WriteProblem):
        return _refuse(problem, {"layout": PAGED_LAYOUTS})
    if problem.dtype not in DTYPES:
        return f"dtype {problem.dtype}: {_either(DTYPES)} only"
    paged = isinstance(problem, PagedProblem)
    if paged and arch not in PAGED_TABLES:
        return f"attention over pages on {arch}: {_names(PAGED_TABLES)} only"
    configs = [row.config for row in (PAGED_TABLES if paged else TABLES)[arch]]
    widest = max(config.head_dim for config in configs)
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.value_dim)):
        if dim % HEAD_DIM_MULTIPLE or not 0 < dim <= widest:
            return f"{name} {dim}: multiples of {HEAD_DIM_MULTIPLE} up to {widest} only"
    if paged:
        return _refuse(problem, {"score": PAGED_SCORES, "layout": PAGED_LAYOUTS})
    pieces = [piece for piece in (0, *PIECES) if any(config.takes(piece) for config in configs)]
    return _refuse(problem, {"mask": MASKS, "score": tuple(SCORES), "paged": pieces})


def unrun(arch: str) -> str | None:
    """Why calls on GPUs of `arch` are refused though there are kernels: nobody has run them. None where somebody has,
    and where $FMHA_ALLOW_UNRUN is 1."""
    if arch not in UNRUN or os.environ.get(ALLOW_UNRUN) == "1":
        return None
    return (
        f"the kernels for {arch} ({ARCHITECTURES[arch]}) were compiled, simulated and inspected, but never run by "
        f"anyone: test them with `{ALLOW_UNRUN}=1 python -m pytest tests/gpu`, and set {ALLOW_UNRUN}=1 to use them"
    )


def _refuse(problem: AnyProblem, allowed: Mapping[str, Sequence[Any]]) -> str | None:
    """What `supports` says of fields with one of some values."""
    for name, values in allowed.items():
        if (given := getattr(problem, name)) not in values:
            return f"{name} {given!r}: {_either(map(repr, values))} only"
    return None


@dataclass(frozen=True)
class PagedProblem:
    """The same of a call of `fmha.attention_paged`, whose kernels serve every mask.

    dtype     of q, the pages and the output: "bfloat16" or "float16"
    head_dim  D, in elements: a multiple of 8 up to 256
    score     "plain" or "softcap"
    head_dim_v  of V's pages and the output, likewise; 0 where it is that of q and K
    layout    "rows", for those of `fmha.paging.LAYOUTS` in which a key's elements are side by side, or "vllm"
    """

    dtype: str
    head_dim: int
    score: str = "plain"
    head_dim_v: int = 0
    layout: str = "rows"

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim


@dataclass(frozen=True)
class WriteProblem:
    """The same of a call of `fmha.write_kv`, whose kernels take every head dim and both dtypes.

    layout    "rows", for those of `fmha.paging.LAYOUTS` in which a key's elements are side by side, or "vllm"
    """

    layout: str = "rows"


TiledProblem = Problem | PagedProblem  # those whose kernels have a block config
AnyProblem = TiledProblem | WriteProblem


class Variant(NamedTuple):
    """What a kernel is compiled from. A problem has one for each block config of its head dim."""

    problem: TiledProblem
    config: TiledConfig


def variants(arch: str, scores: Sequence[str] = ("plain",), ragged: Sequence[bool] = (False,)) -> tuple[Variant, ...]:
    """The kernels of `arch`: each dtype and mask with each block config of the table. Without more arguments those that
    do nothing to scores, for batches of equal lengths; `every_variant` has all."""
    return tuple(
        Variant(
            Problem(dtype, row.config.head_dim, mask, score, row.config.head_dim_v, own_lengths),
            row.config,
        )
        for own_lengths in ragged
        for score in scores
        for dtype in DTYPES
        for row in TABLES[arch]
        for mask in MASKS
        if row.config.holds(score)
    )


def every_variant(arch: str) -> tuple[Variant, ...]:
    """The whole table of features."""
    return variants(arch, tuple(SCORES), (False, True))


def paged_variants(
    arch: str, layouts: Sequence[str] = PAGED_LAYOUTS, scores: Sequence[str] = PAGED_SCORES
) -> tuple[Variant, ...]:
    """The kernels of `fmha.attention_paged`, if `arch` has any."""
    return tuple(
        Variant(PagedProblem(dtype, row.config.head_dim, score, row.config.head_dim_v, layout), row.config)
        for layout in layouts
        for score in scores
        for dtype in DTYPES
        for row in PAGED_TABLES.get(arch, ())
    )


def prefill_variants(arch: str) -> tuple[Variant, ...]:
    """The forward kernels that long sequences of queries get in `fmha.attention_paged`."""
    return tuple(
        Variant(Problem(dtype, row.config.head_dim, mask, score, row.config.head_dim_v, True, piece), config)
        for piece in PIECES
        for score in PAGED_SCORES
        for dtype in DTYPES
        for row in TABLES[arch]
        for mask in MASKS
        if (config := for_pages(row.config)).holds(score) and config.takes(piece)
    )


def _names(architectures: Iterable[str]) -> str:
    return _either(f"{name} ({ARCHITECTURES[name]})" for name in architectures)


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
