"""Cases drawn at random over everything at once: `draw(seed)` is the same case everywhere."""

from __future__ import annotations

import random
from dataclasses import replace

from tests.cases import RAGGED, Case

PROBLEMS = 2000  # that the GPU test draws
LENGTHS = (1, 2, 7, 63, 64, 65, 127, 128, 129, 200, 257, 300, 511, 640, 777, 1100)
HEAD_DIMS = (8, 16, 40, 64, 72, 96, 104, 128, 152, 192, 200, 256)
SIDES = (None, None, 0, 1, 3, 17, 63, 64, 100, 128, 255, 400, -1, -2, -40)


def draw(seed: int) -> Case:
    rng = random.Random(seed)
    kv_heads, group = rng.choice((1, 2, 3)), rng.choice((1, 1, 2, 4))
    seqlen_q = rng.choice(LENGTHS)
    case = Case(
        batch=rng.choice((1, 1, 2, 3)),
        seqlen_q=seqlen_q,
        seqlen_k=rng.choice((seqlen_q, rng.choice(LENGTHS))),
        heads_q=kv_heads * group,
        heads_kv=kv_heads,
        head_dim=rng.choice(HEAD_DIMS),
        dtype=rng.choice(("bf16", "bf16", "fp16")),
        causal=rng.random() < 0.4,
        out=rng.choice(("new", "given")),
        return_lse=rng.random() < 0.5,
        scale=rng.choice((None, None, 0.3)),
        q_gain=rng.choice((1.0, 1.0, 2.0, 5.0)),
    )
    return replace(
        case,
        window=(rng.choice(SIDES), rng.choice(SIDES)),
        softcap=rng.choice((None, None, 0.5, 5.0, 50.0)),
        sinks=rng.random() < 0.3,
        head_dim_v=rng.choice((0, 0, *HEAD_DIMS)),
        alibi=rng.choice(("", "", "heads", "entries")),
        ragged=rng.choice(("", "", "", *RAGGED)),
    )
