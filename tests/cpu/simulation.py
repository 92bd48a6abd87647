"""What the tests of the simulator share: small problems, their exact answers, and ways to break a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from schedules import simulate
from schedules.machine import Machine
from schedules.rings import Counts, NumpyLendingRing, NumpyRing, NumpyWorkRing
from schedules.tiling import BlockConfig, TmemConfig

ADVERSARIES = ("eager", "lazy", "random")

Window = tuple[int | None, int | None]
NO_WINDOW: Window = (None, None)


@dataclass(frozen=True)
class SmallBlock(BlockConfig):
    """A block config whose warpgroups have fewer rows than a wgmma: more tiles in less time."""

    rows: int = 16

    @property
    def tile_m(self) -> int:
        return self.consumers * self.rows


def small(consumers: int = 2, stages: int = 2, q_stages: int = 2, tile_n: int = 16, **changes) -> SmallBlock:
    rest = {"head_dim": 16, "producer_registers": 24, "consumer_registers": 240, **changes}
    return SmallBlock(tile_n=tile_n, stages=stages, q_stages=q_stages, consumers=consumers, **rest)


def tmem(stages: int = 2, q_stages: int = 1, o_stages: int = 1, tile_n: int = 16, **changes) -> TmemConfig:
    rest = {"head_dim": 16, "softmax_registers": 192, "correct_registers": 80, "other_registers": 48, **changes}
    return TmemConfig(tile_n=tile_n, stages=stages, q_stages=q_stages, o_stages=o_stages, q_rows=8, **rest)


@dataclass(frozen=True)
class Lengths:
    """Of the sequences of a ragged batch, as `simulate.forward` takes them, of queries and of keys."""

    cu_seqlens: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    seqused: tuple[tuple[int, ...] | None, tuple[int, ...] | None] = (None, None)

    def parts(self, problem: Problem) -> list[tuple[int, slice, slice]]:
        """The entry of the tensors that a sequence lies in, its queries and its keys."""
        cu, whole = self.cu_seqlens, ((0, problem.seqlen_q), (0, problem.seqlen_k))
        spans = [list(pairwise(sums)) for sums in cu] if cu else [[span] * problem.batch for span in whole]
        for i, used in enumerate(self.seqused):
            if used is not None:
                spans[i] = [(start, start + count) for (start, _), count in zip(spans[i], used, strict=True)]
        return [(0 if cu else b, slice(*q), slice(*k)) for b, (q, k) in enumerate(zip(*spans, strict=True))]


@dataclass(frozen=True)
class Problem:
    """Attention over normally distributed q, k and v, with NaN in rows of no sequence."""

    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    window: Window = NO_WINDOW
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 8
    scale: float | None = None
    spread: float = 6.0  # of the scores: enough to make row maxima grow past the threshold
    config: BlockConfig | TmemConfig = small()
    softcap: float | None = None
    sinks: bool = False
    alibi: bool = False
    lengths: Lengths | None = None  # if the batch is ragged; `batch` is the number of sequences then

    @property
    def entries(self) -> int:
        """Of the tensors."""
        return 1 if self.lengths is not None and self.lengths.cu_seqlens is not None else self.batch

    @property
    def options(self) -> dict[str, Any]:
        """What beside q, k and v decides the numbers."""
        random = np.random.default_rng(self.seqlen_q * 1000 + self.seqlen_k + 1)
        sinks, slopes = 3 * random.standard_normal(self.heads), random.random((self.batch, self.heads)) ** 2
        return {
            "causal": self.causal,
            "window": self.window,
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": sinks if self.sinks else None,
            "alibi_slopes": slopes if self.alibi else None,
        }

    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        random = np.random.default_rng(self.seqlen_q * 1000 + self.seqlen_k)
        kv = (self.entries, self.seqlen_k, self.kv_heads, self.head_dim)
        q = random.standard_normal((self.entries, self.seqlen_q, self.heads, self.head_dim)) * self.spread
        k, v = random.standard_normal(kv), random.standard_normal(kv)
        if self.lengths is not None:
            outside_q, outside_k = (np.ones(x.shape[:2], bool) for x in (q, k))
            for entry, queries, keys in self.lengths.parts(self):
                outside_q[entry, queries] = outside_k[entry, keys] = False
            q[outside_q] = k[outside_k] = v[outside_k] = np.nan
        return q, k, v

    def answer(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The right one: of a ragged batch each sequence by itself."""
        if self.lengths is None:
            return attention(q, k, v, **self.options)
        o = np.zeros((*q.shape[:3], v.shape[3]))
        lse = np.full((q.shape[0], q.shape[2], q.shape[1]), -np.inf)
        options, slopes = self.options, self.options["alibi_slopes"]
        for b, (entry, queries, keys) in enumerate(self.lengths.parts(self)):
            one = (x[entry : entry + 1, rows] for x, rows in ((q, queries), (k, keys), (v, keys)))
            options["alibi_slopes"] = None if slopes is None else slopes[b : b + 1]
            found, total = attention(*one, **options)
            o[entry, queries], lse[entry, :, queries] = found[0], total[0]
        return o, lse


def packed(sizes: Sequence[tuple[int, int]], before: int = 0, behind: int = 0, **rest: Any) -> Problem:
    """A problem of sequences of these lengths one behind the other, with so many rows of nobody before and behind, of q
    as of k. With `used` those parts of the sequences are used."""
    cu_q, cu_k = (tuple(accumulate((pair[i] for pair in sizes), initial=before)) for i in range(2))
    lengths = Lengths((cu_q, cu_k), rest.pop("used", (None, None)))
    rows = max(1, cu_q[-1] + behind), max(1, cu_k[-1] + behind)
    return Problem(*rows, batch=len(sizes), lengths=lengths, **rest)


def padded(
    batch: int, seqlen_q: int, seqlen_k: int, used_q: Sequence[int] | None, used_k: Sequence[int] | None, **rest
):
    """A problem of sequences in an entry each, which use so much of it."""
    used = None if used_q is None else tuple(used_q), None if used_k is None else tuple(used_k)
    return Problem(seqlen_q, seqlen_k, batch=batch, lengths=Lengths(None, used), **rest)


class WrongNumbers(AssertionError):
    """The programs ran to their end and computed something else."""


def visible(seqlen_q: int, seqlen_k: int, causal: bool, window: Window = NO_WINDOW) -> np.ndarray:
    """Who sees whom, bool [Sq, Sk], written down from the definition: bottom-right aligned."""
    query, key = np.indices((seqlen_q, seqlen_k))
    left, right = window
    own = query + seqlen_k - seqlen_q
    seen = key <= own if causal else np.ones_like(key, bool)
    if left is not None:
        seen &= own - key <= left
    if right is not None:
        seen &= key - own <= right
    return seen


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool,
    scale: float | None,
    window: Window = NO_WINDOW,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The definition, in float64: (o [B, Sq, Hq, D], lse [B, Hq, Sq])."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat(group, axis=2), v.repeat(group, axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    if alibi_slopes is not None:
        query, key = np.indices(scores.shape[2:])
        distance = abs(key - (query + k.shape[1] - q.shape[1]))
        scores = scores - np.broadcast_to(alibi_slopes, scores.shape[:2])[..., None, None] * distance
    seen = visible(*scores.shape[2:], causal, window)
    weights = np.where(seen, np.exp(np.where(seen, scores, 0)), 0)
    total = weights.sum(axis=3, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks)[:, None, None]
    o = np.einsum("bhqk,bkhd->bqhd", weights / np.where(total == 0, 1, total), v)
    with np.errstate(divide="ignore"):
        return o, np.log(total[..., 0])


def run(problem: Problem, seed: int = 0, policy: str = "random", **changes) -> simulate.Result:
    """Simulates `problem`. Raises a `ScheduleError`, or `WrongNumbers` if the outputs are not the right ones."""
    q, k, v = problem.inputs()
    arguments = {**problem.options, "config": problem.config, **changes}
    if problem.lengths is not None:
        arguments |= {"cu_seqlens": problem.lengths.cu_seqlens, "seqused": problem.lengths.seqused}
    with np.errstate(over="ignore", invalid="ignore"):  # a broken program may
        result = simulate.forward(q, k, v, seed=seed, policy=policy, **arguments)
    right = problem.answer(q, k, v)
    for name, found, expected in zip(("o", "lse"), result, right, strict=False):
        if not np.allclose(found, expected, rtol=1e-9, atol=1e-9):
            raise WrongNumbers(f"{name} of {problem}")
    return result


def broken(**changes) -> type[simulate.Cta]:
    """A CTA with another LOAD or ATTEND, or other attributes."""
    return type("BrokenCta", (simulate.Cta,), changes)


def broken_rings(**methods) -> type[simulate.Cta]:
    """A CTA whose rings have other methods."""
    return broken(
        RING=type("BrokenRing", (NumpyRing,), methods),
        LENDING_RING=type("BrokenLendingRing", (NumpyLendingRing,), methods),
        WORK_RING=type("BrokenWorkRing", (NumpyWorkRing,), methods),
    )


def miscounted(**changes: int | Callable[[Counts], int]) -> type[simulate.Cta]:
    """A CTA whose rings count more or less than they should: by so many, or what a function says."""

    def counts(self: simulate.Cta, kind: type[NumpyRing], elements: int, consumers: int) -> Counts:
        right = simulate.Cta.counts(self, kind, elements, consumers)
        wrong = {n: c(right) if callable(c) else getattr(right, n) + c for n, c in changes.items()}
        return replace(right, **wrong)

    return broken(counts=counts)


def miscounted_loans(change: int) -> type[simulate.Cta]:
    """A CTA that is told an O has left V by so many arrivals more than there are."""

    class Miscounts(NumpyLendingRing):
        def __init__(self, machine: Machine, name: str, *rest) -> None:
            super().__init__(machine, name, *rest)
            for left in self.left:
                left.count += change
                left.pending += change

    return broken(LENDING_RING=Miscounts)
