"""What the tests of the simulator share: small problems, their exact answers, and ways to break a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from schedules import simulate
from schedules.machine import Machine
from schedules.rings import Counts, NumpyLendingRing, NumpyRing, NumpyWorkRing
from schedules.tiling import BlockConfig

ADVERSARIES = ("eager", "lazy", "random")


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


@dataclass(frozen=True)
class Problem:
    """Attention over normally distributed q, k and v."""

    seqlen_q: int
    seqlen_k: int
    causal: bool = False
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 8
    scale: float | None = None
    spread: float = 6.0  # of the scores: enough to make row maxima grow past the threshold
    config: BlockConfig = small()

    def inputs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        random = np.random.default_rng(self.seqlen_q * 1000 + self.seqlen_k)
        kv = (self.batch, self.seqlen_k, self.kv_heads, self.head_dim)
        q = random.standard_normal((self.batch, self.seqlen_q, self.heads, self.head_dim)) * self.spread
        return q, random.standard_normal(kv), random.standard_normal(kv)


class WrongNumbers(AssertionError):
    """The programs ran to their end and computed something else."""


def attention(q, k, v, causal: bool, scale: float | None) -> tuple[np.ndarray, np.ndarray]:
    """The definition, in float64: (o [B, Sq, Hq, D], lse [B, Hq, Sq])."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat(group, axis=2), v.repeat(group, axis=2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    query, key = np.indices(scores.shape[2:])
    seen = key - k.shape[1] <= query - q.shape[1] if causal else np.ones_like(query, bool)
    weights = np.where(seen, np.exp(np.where(seen, scores, 0)), 0)
    total = weights.sum(axis=3, keepdims=True)
    o = np.einsum("bhqk,bkhd->bqhd", weights / np.where(total == 0, 1, total), v)
    with np.errstate(divide="ignore"):
        return o, np.log(total[..., 0])


def run(problem: Problem, seed: int = 0, policy: str = "random", **changes) -> simulate.Result:
    """Simulates `problem`. Raises a `ScheduleError`, or `WrongNumbers` if the outputs are not those of `attention`."""
    q, k, v = problem.inputs()
    arguments = {"causal": problem.causal, "scale": problem.scale, "config": problem.config, **changes}
    with np.errstate(over="ignore", invalid="ignore"):  # a broken program may
        result = simulate.forward(q, k, v, seed=seed, policy=policy, **arguments)
    for name, found, expected in zip(
        ("o", "lse"), result, attention(q, k, v, problem.causal, problem.scale), strict=False
    ):
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
