"""What is measured: the benchmark's problems, as tables. Another suite is another table."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `perf.launch` measures what the import takes
    from fmha.problem import Problem

TOKENS = 16384  # B x S of the dense suite
WIDTH = 2048  # H x D of the dense suite
HEAD_DIMS = (64, 128, 256)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Case:
    """One problem: shapes [B, S, H, D], mask and dtype."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    causal: bool = False  # aligned at the bottom right
    dtype: str = "bfloat16"
    left: int | None = None  # keys before its own that a query sees, with `causal`: a sliding window
    score: str = ""  # "softcap", "sinks" or "alibi"
    packed: tuple[int, ...] = ()  # the lengths of sequences one behind the other; seqlen_q and _k are the longest
    base: int | None = None  # the length whose rate this case's is compared with: what a partial tile costs

    @classmethod
    def of(cls, kept: Mapping[str, Any]) -> Case:
        """From JSON, which has no tuples."""
        return cls(**{**kept, "packed": tuple(kept.get("packed", ()))})

    @property
    def name(self) -> str:
        lengths = f"S{self.seqlen_k}" if self.seqlen_q == self.seqlen_k else f"S{self.seqlen_q}x{self.seqlen_k}"
        heads = f"H{self.heads_q}" if self.heads_q == self.heads_kv else f"H{self.heads_q}x{self.heads_kv}"
        dtype = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        mask = f"window{self.left}" if self.left is not None else "causal" if self.causal else "dense"
        lengths = f"varlen{sum(self.packed)}" if self.packed else lengths
        score = f" {self.score}" if self.score else ""
        return f"D{self.head_dim} {mask} {lengths} B{self.batch} {heads}{dtype}{score}"

    @property
    def problem(self) -> Problem:
        """What selects a kernel."""
        from fmha.problem import Problem
        from schedules.scores import SCORES

        mask = "window" if self.left is not None else "causal" if self.causal else "dense"
        score = self.score if self.score in SCORES else "plain"  # sinks are no matter of the kernel's
        return Problem(self.dtype, self.head_dim, mask, score, ragged=bool(self.packed))

    @property
    def window(self) -> tuple[int | None, int | None]:
        return self.left, None

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head of one batch entry in which the query sees the key; of all sequences, if
        they are packed."""
        if self.packed:
            alone = (replace(self, seqlen_q=n, seqlen_k=n, packed=()) for n in self.packed)
            return sum(case.visible_pairs for case in alone)
        if not self.causal:
            return self.seqlen_q * self.seqlen_k
        # Row i sees clamp(i + 1 + Sk - Sq, 0, Sk) keys: an arithmetic series that ends at Sk.
        seeing = min(self.seqlen_q, self.seqlen_k)
        pairs = seeing * (2 * self.seqlen_k - seeing + 1) // 2
        if self.left is None or self.left >= self.seqlen_k - 1:
            return pairs
        # The window hides max(0, i + Sk - Sq - left) of row i's.
        hiding = min(self.seqlen_q, self.seqlen_k - 1 - self.left)
        return pairs - hiding * (2 * (self.seqlen_k - 1 - self.left) - hiding + 1) // 2

    @property
    def flops(self) -> int:
        """Useful floating-point operations: a multiply and an add per head dim, for QK and for PV."""
        batch = 1 if self.packed else self.batch
        return 4 * batch * self.heads_q * self.head_dim * self.visible_pairs


def dense() -> list[Case]:
    """Constant work per row of the attention matrix: B x S = 16k, H x D = 2048."""
    return [
        Case(TOKENS // s, s, s, WIDTH // d, WIDTH // d, d, causal)
        for d, causal, s in itertools.product(HEAD_DIMS, (False, True), LENGTHS)
    ]


def tail() -> list[Case]:
    """Lengths a little past a multiple of every tile, and the 147,600 tokens of a video diffusion model."""
    cases = [
        Case(batch, base + extra, base + extra, 16, 16, 128, base=base)
        for (base, batch), extra in itertools.product(((512, 32), (4096, 1), (16384, 1)), (0, 1, 16, 64, 80, 127))
    ]
    return cases + [Case(1, s, s, 8, 8, 128, base=147_456) for s in (147_456, 147_600)]


def window() -> list[Case]:
    """Causal sliding windows, as models alternate them with whole layers."""
    return [
        Case(1, s, s, 16, 16, 128, causal=True, left=left)
        for s, left in itertools.product((16384, 65536), (512, 1024, 4096))
    ]


def varlen() -> list[Case]:
    """64 sequences, their lengths log-uniform from 128 to 16k; and many short ones."""
    rng = random.Random(64)
    drawn = [tuple(round(math.exp(rng.uniform(math.log(128), math.log(16384)))) for _ in range(64)) for _ in range(2)]
    short = tuple(rng.randint(1, 256) for _ in range(1024))
    return [
        Case(len(lengths), max(lengths), max(lengths), *heads, d, causal, packed=lengths)
        for lengths, causal in ((drawn[0], True), (drawn[1], True), (drawn[0], False), (short, True))
        for d, heads in ((64, (32, 32)), (128, (16, 16)), (128, (32, 8)))
    ]


def scores() -> list[Case]:
    """What is done to scores, beside the kernel that does nothing to them."""
    return [
        Case(TOKENS // 4096, 4096, 4096, WIDTH // d, WIDTH // d, d, causal, score=score)
        for d, causal, score in itertools.product(HEAD_DIMS, (False, True), ("softcap", "sinks", "alibi"))
    ]


SUITES = {
    "dense": tuple(dense()),
    "tail": tuple(tail()),
    "window": tuple(window()),
    "varlen": tuple(varlen()),
    "scores": tuple(scores()),
}

QUICK_LENGTHS = (512, 4096, 4097, 16384, 147_456, 147_600)


def select(suite: str, *, only: list[str], head_dims: list[int], quick: bool) -> list[Case]:
    """The suite's cases whose name contains one of `only`, with one of `head_dims` (empty: any)."""
    return [
        case
        for case in SUITES[suite]
        if (not only or any(text in case.name for text in only))
        and (not head_dims or case.head_dim in head_dims)
        and (not quick or case.seqlen_k in QUICK_LENGTHS)
    ]
