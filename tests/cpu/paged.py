"""What the tests of the decoding schedule share: small problems over pages, and their exact answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from schedules import simulate_decode
from tests.cpu.simulation import NO_WINDOW, Window, WrongNumbers, attention, visible

NO_PAGE = 10**6  # whoever looks it up is told


@dataclass(frozen=True)
class Ask:
    """A sequence: so many queries over so many keys. Its numbers are those of its seed."""

    queries: int
    keys: int
    seed: int = 0


@dataclass(frozen=True)
class PagedProblem:
    """Attention of a batch whose keys and values lie in pages. In slots that no query sees is NaN, and pages of such
    slots alone there are none, but for a sequence of which no query sees a key. Packed, there are `before` and `behind`
    rows of no sequence, and in them NaN."""

    asks: tuple[Ask, ...]
    packed: bool = False
    before: int = 0
    behind: int = 0
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 8
    value_dim: int = 8
    page: int = 8
    causal: bool = False
    window: Window = NO_WINDOW
    scale: float | None = None
    spread: float = 6.0  # of the scores
    softcap: float | None = None
    sinks: bool = False
    splits: int = 0
    stages: int = 2
    q_stages: int = 2
    multiprocessors: int = 3

    @property
    def options(self) -> dict[str, Any]:
        """What beside q, k and v decides the numbers."""
        sinks = 3 * np.random.default_rng(self.heads).standard_normal(self.heads)
        return {
            "causal": self.causal,
            "window": self.window,
            "scale": self.scale,
            "softcap": self.softcap,
            "sinks": sinks if self.sinks else None,
        }

    @cached_property
    def sequences(self) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """q, k and v of each."""
        found = []
        for ask in self.asks:
            draw = np.random.default_rng((ask.seed, ask.queries, ask.keys)).standard_normal
            q = draw((ask.queries, self.heads, self.head_dim)) * self.spread
            k, v = (draw((ask.keys, self.kv_heads, dims)) for dims in (self.head_dim, self.value_dim))
            found.append((q, k, v))
        return found

    @cached_property
    def starts(self) -> list[int]:
        return list(accumulate((ask.queries for ask in self.asks), initial=self.before))

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """q, pages, table and lengths, as `simulate_decode.paged` takes them. Pages are in no order."""
        seen = [visible(ask.queries, ask.keys, self.causal, self.window).any(axis=0) for ask in self.asks]
        most = max(-(-ask.keys // self.page) for ask in self.asks) + 1
        count = len(self.asks) * most + 1
        free = list(range(count))
        random.Random(count).shuffle(free)
        table = np.full((len(self.asks), most), NO_PAGE)
        k_pages, v_pages = (
            np.full((count, self.page, self.kv_heads, dims), np.nan) for dims in (self.head_dim, self.value_dim)
        )
        for b, (_, k, v) in enumerate(self.sequences):
            for key in np.flatnonzero(seen[b] | ~seen[b].any()):
                index, slot = divmod(key, self.page)
                if table[b, index] == NO_PAGE:
                    table[b, index] = free.pop()
                if seen[b][key]:
                    k_pages[table[b, index], slot], v_pages[table[b, index], slot] = k[key], v[key]
        nobody = [np.full((n, self.heads, self.head_dim), np.nan) for n in (self.before, self.behind)]
        queries = [q for q, _, _ in self.sequences]
        return {
            "q": np.concatenate([nobody[0], *queries, nobody[1]]) if self.packed else np.stack(queries),
            "k_pages": k_pages,
            "v_pages": v_pages,
            "page_table": table,
            "seq_lens": [ask.keys for ask in self.asks],
            "cu_seqlens_q": self.starts if self.packed else None,
        }

    @cached_property
    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each sequence by itself; rows of none are zeros, and their LSEs minus infinity."""
        rows = self.arguments["q"].shape[:-1]
        o, lse = np.zeros((*rows, self.value_dim)), np.full(rows, -np.inf)
        for b, (q, k, v) in enumerate(self.sequences):
            found, total = attention(q[None], k[None], v[None], **self.options)
            at = slice(*self.starts[b : b + 2]) if self.packed else b
            o[at], lse[at] = found[0], total[0].T
        return o, lse

    def of(self, result: simulate_decode.Result, b: int) -> tuple[np.ndarray, np.ndarray]:
        """What of a result is sequence `b`'s."""
        at = slice(*self.starts[b : b + 2]) if self.packed else b
        return result.o[at], result.lse[at]


def run(problem: PagedProblem, seed: int = 0, policy: str = "random", **changes: Any) -> simulate_decode.Result:
    """Simulates `problem`. Raises a `ScheduleError`, or `WrongNumbers` if the outputs are not the right ones."""
    config = replace(simulate_decode.SMALL, stages=problem.stages, q_stages=problem.q_stages)
    rest = {"splits": problem.splits, "multiprocessors": problem.multiprocessors, "config": config, **changes}
    result = simulate_decode.paged(**problem.arguments, **problem.options, seed=seed, policy=policy, **rest)
    for name, found, expected in zip(("o", "lse"), result, problem.answer, strict=False):
        if not np.allclose(found, expected, rtol=1e-9, atol=1e-9):
            raise WrongNumbers(f"{name} of {problem}")
    return result


def drawn(seed: int) -> PagedProblem:
    """A problem as random as it is small."""
    r = random.Random(seed)

    def length() -> int:
        return r.choice([0, 1, r.randint(1, 90), r.randint(1, 40)])

    def side() -> int | None:
        return r.choice([None, r.randint(-3, 3), r.randint(0, 60)])

    packed, kv_heads = r.random() < 0.5, r.choice([1, 2, 3])
    count, tokens = r.randint(1, 4), r.choice([1, 1, 2, 5])
    queries = [r.choice([0, 1, 1, 2, 7]) if packed else tokens for _ in range(count)]
    before, behind = (r.choice([0, 0, 1, 3]) if packed else 0 for _ in range(2))
    return PagedProblem(
        asks=tuple(Ask(n, length(), r.randrange(1000)) for n in queries),
        packed=packed,
        before=before,
        behind=behind + (sum(queries) + before + behind == 0),
        heads=kv_heads * r.choice([1, 2, 4, 5]),
        kv_heads=kv_heads,
        head_dim=r.choice([8, 16]),
        value_dim=r.choice([8, 16]),
        page=r.choice([1, 4, 8, 32]),
        causal=r.random() < 0.5,
        window=(side(), side()),
        softcap=r.choice([None, None, 2.0]),
        sinks=r.random() < 0.5,
        splits=r.choice([0, 0, 1, 2, 5]),
        stages=r.choice([1, 2, 4]),
        q_stages=r.choice([1, 2]),
        multiprocessors=r.choice([1, 2, 3, 7, 30]),
    )


def whole(lengths: Sequence[int], queries: int = 1, **rest: Any) -> PagedProblem:
    """A batch that is not packed."""
    return PagedProblem(tuple(Ask(queries, keys, seed) for seed, keys in enumerate(lengths)), **rest)
