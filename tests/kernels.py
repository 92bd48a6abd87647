"""`python -m tests.kernels PART PARTS`: compiles, into the disk cache, a part of the kernels that the GPU tests use.

Needs no GPU. Several parts side by side take a minute, where one after another, as they are needed, they take ten.
"""

from __future__ import annotations

import sys

from fmha.jit import library
from fmha.prefill import Call
from fmha.problem import PagedProblem, Problem, Variant, paged_variants, variants
from schedules.domain import mask_of
from schedules.scores import score_of
from schedules.tiling import Extent
from tests import paged
from tests.cases import Case, lengths
from tests.drawn import PROBLEMS, draw

ARCH = "sm_90a"
MULTIPROCESSORS = 132


def variant_of(case: Case) -> Variant:
    """The kernel that a call of the case gets."""
    rows = lengths(case).rows if case.ragged else (case.seqlen_q, case.seqlen_k)
    mask, bounds = mask_of(case.causal, case.sides, *rows)
    score = score_of(case.softcap is not None, bool(case.alibi))
    dtype = str(case.torch_dtype).removeprefix("torch.")
    problem = Problem(dtype, case.head_dim, mask, score, case.head_dim_v, case.ragged != "")
    about = [max(1, size // case.batch) for size in rows] if case.packed else rows
    heads = case.batch * case.heads_q
    sides = bounds.left, bounds.right
    extent = Extent(mask, *about, heads, MULTIPROCESSORS, case.return_lse, *sides)
    return Variant(problem, library.pick(problem, ARCH, extent).config)


def prefill_of(case: paged.PagedCase) -> Variant | None:
    """The kernel for its long sequences."""
    dtype = str(case.torch_dtype).removeprefix("torch.")
    score = "plain" if case.softcap is None else "softcap"
    layout = "vllm" if case.layout == "vllm" else "rows"
    problem = PagedProblem(dtype, case.head_dim, score, case.head_dim_v, layout)
    tokens = case.shape(1)[0] if case.packed else case.tokens[0]
    sizes = tokens, case.most_pages * case.page, case.heads, len(case.seq_lens), case.packed, case.page
    call = Call(*sizes, case.causal, paged.sides(case.window), case.return_lse)
    return call.variant(problem, ARCH, MULTIPROCESSORS)


def needed() -> list[Variant]:
    """All of them, in the same order in every process."""
    drawn = (variant_of(draw(seed)) for seed in range(PROBLEMS))
    pages = (prefill_of(paged.draw(seed)) for seed in range(paged.PROBLEMS))
    every = (*variants(ARCH), *paged_variants(ARCH), *drawn, *(variant for variant in pages if variant))
    named = {library.key.canonical(*variant, ARCH): variant for variant in every}
    return [named[text] for text in sorted(named)]


def main(part: int, parts: int) -> None:
    for variant in needed()[part::parts]:
        library.object_file(*variant, ARCH)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
