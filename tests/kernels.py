"""`python -m tests.kernels PART PARTS ARCH MULTIPROCESSORS`: compiles, into the disk cache, a part of the kernels that
the GPU tests use on such a GPU.

Needs no GPU. Several parts side by side take a minute, where one after another, as they are needed, they take ten.
"""

from __future__ import annotations

import sys

from fmha.jit import launch, library
from fmha.prefill import Call
from fmha.problem import PagedProblem, Problem, Variant, paged_variants, supports, variants
from schedules.domain import mask_of
from schedules.scores import score_of
from schedules.tiling import Extent
from tests import paged
from tests.cases import Case, lengths
from tests.drawn import PROBLEMS, draw

ARCH = launch.current_architecture() or "sm_90a"  # that tests run on, or would


def problem_of(case: Case) -> Problem:
    return _problem_and_bounds(case)[0]


def _problem_and_bounds(case: Case):
    rows = lengths(case).rows if case.ragged else (case.seqlen_q, case.seqlen_k)
    mask, bounds = mask_of(case.causal, case.sides, *rows)
    score = score_of(case.softcap is not None, bool(case.alibi))
    dtype = str(case.torch_dtype).removeprefix("torch.")
    return Problem(dtype, case.head_dim, mask, score, case.head_dim_v, case.ragged != ""), bounds, rows


def variant_of(case: Case, arch: str, multiprocessors: int) -> Variant:
    """The kernel that a call of the case gets."""
    problem, bounds, rows = _problem_and_bounds(case)
    about = [max(1, size // case.batch) for size in rows] if case.packed else rows
    heads = case.batch * case.heads_q
    sides = bounds.left, bounds.right
    extent = Extent(problem.mask, *about, heads, multiprocessors, case.return_lse, *sides)
    return Variant(problem, library.pick(problem, arch, extent).config)


def paged_problem_of(case: paged.PagedCase) -> PagedProblem:
    dtype = str(case.torch_dtype).removeprefix("torch.")
    score = "plain" if case.softcap is None else "softcap"
    layout = "vllm" if case.layout == "vllm" else "rows"
    return PagedProblem(dtype, case.head_dim, score, case.head_dim_v, layout)


def prefill_of(case: paged.PagedCase, arch: str, multiprocessors: int) -> Variant | None:
    """The kernel for its long sequences."""
    tokens = case.shape(1)[0] if case.packed else case.tokens[0]
    sizes = tokens, case.most_pages * case.page, case.heads, len(case.seq_lens), case.packed, case.page
    call = Call(*sizes, case.causal, paged.sides(case.window), case.return_lse)
    return call.variant(paged_problem_of(case), arch, multiprocessors)


def needed(arch: str, multiprocessors: int) -> list[Variant]:
    """All of them, in the same order in every process."""
    drawn = [case for case in map(draw, range(PROBLEMS)) if supports(problem_of(case), arch) is None]
    every = [*variants(arch), *paged_variants(arch), *(variant_of(case, arch, multiprocessors) for case in drawn)]
    for case in map(paged.draw, range(paged.PROBLEMS)):
        if supports(paged_problem_of(case), arch) is None and (long := prefill_of(case, arch, multiprocessors)):
            every.append(long)
    named = {library.key.canonical(*variant, arch): variant for variant in every}
    return [named[text] for text in sorted(named)]


def main(part: int, parts: int, arch: str, multiprocessors: int) -> None:
    for variant in needed(arch, multiprocessors)[part::parts]:
        library.object_file(*variant, arch)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), sys.argv[3], int(sys.argv[4]))
