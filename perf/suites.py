"""What is measured: the benchmark's problems, as tables. Another suite is another table."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

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
    base: int | None = None  # the length whose rate this case's is compared with: what a partial tile costs

    @property
    def name(self) -> str:
        lengths = f"S{self.seqlen_k}" if self.seqlen_q == self.seqlen_k else f"S{self.seqlen_q}x{self.seqlen_k}"
        heads = f"H{self.heads_q}" if self.heads_q == self.heads_kv else f"H{self.heads_q}x{self.heads_kv}"
        dtype = "" if self.dtype == "bfloat16" else f" {self.dtype}"
        return f"D{self.head_dim} {'causal' if self.causal else 'dense'} {lengths} B{self.batch} {heads}{dtype}"

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head of one batch entry in which the query sees the key."""
        if not self.causal:
            return self.seqlen_q * self.seqlen_k
        # Row i sees clamp(i + 1 + Sk - Sq, 0, Sk) keys: an arithmetic series that ends at Sk.
        seeing = min(self.seqlen_q, self.seqlen_k)
        return seeing * (2 * self.seqlen_k - seeing + 1) // 2

    @property
    def flops(self) -> int:
        """Useful floating-point operations: a multiply and an add per head dim, for QK and for PV."""
        return 4 * self.batch * self.heads_q * self.head_dim * self.visible_pairs


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


SUITES = {"dense": tuple(dense()), "tail": tuple(tail())}

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
