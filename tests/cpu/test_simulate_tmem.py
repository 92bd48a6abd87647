"""The role programs of kernels with tensor memory give the numbers of the oracle, and overlap what they should."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from schedules import simulate, simulate_tmem
from schedules.machine import POLICIES, Hazard
from schedules.simulate_tmem import TmemCta
from tests.cpu.simulation import Problem, packed, run, tmem


def drawn(seed: int) -> Problem:
    r = random.Random(seed)
    config = tmem(stages=r.choice([1, 2, 3]), q_stages=r.choice([1, 2]), o_stages=r.choice([1, 2]))
    window = r.choice([(None, None)] * 3 + [(r.randint(0, 60), None), (r.randint(0, 60), r.randint(-5, 60))])
    rest = {
        "causal": r.random() < 0.5,
        "window": window,
        "heads": r.choice([1, 2, 4]),
        "softcap": r.choice([None, None, 4.0]),
        "sinks": r.random() < 0.3,
        "alibi": r.random() < 0.3,
        "spread": r.choice([0.5, 6.0, 40.0]),
        "config": config,
    }
    if r.random() < 0.3:
        sequences = [(r.choice([0, 1, r.randint(1, 40)]), r.choice([0, 1, r.randint(1, 80)])) for _ in range(3)]
        return packed(sequences, r.randint(0, 3), r.randint(0, 5), **rest)
    kv_heads = r.choice([h for h in (1, 2, 4) if rest["heads"] % h == 0])
    return Problem(r.randint(1, 70), r.randint(1, 120), batch=r.choice([1, 2]), kv_heads=kv_heads, **rest)


@pytest.mark.parametrize("seed", range(60))
def test_numbers_are_those_of_the_oracle(seed):
    run(drawn(seed), seed, POLICIES[seed % len(POLICIES)], cta=TmemCta, multiprocessors=1 + seed % 3)


def test_it_is_seen_when_o_is_touched_too_early():
    """The adversary needs no luck: that nothing says the PV is over is enough."""

    class Hurries(simulate_tmem.NumpyCorrect):
        def shrink(self, i: int) -> None:
            self.rescale(i)  # without having taken what it was told
            self.hand_over()

    cta = type("Cta", (TmemCta,), {"CORRECT": Hurries})
    with pytest.raises(Hazard, match="correct: rescale .* reads tensor memory.*and nothing says that PV"):
        for seed in range(20):
            run(Problem(30, 83, heads=3, config=tmem()), seed, cta=cta)


def test_while_one_q_tile_is_exponentiated_the_other_ones_mmas_run():
    trace = run(Problem(16, 400, config=tmem()), policy="steady", cta=TmemCta, multiprocessors=1).trace
    spans = defaultdict(list)
    for event in trace:
        spans[event.lane].append((event.begin, event.end, event.what))
    mmas = [(begin, end) for begin, end, what in spans["mma multiply"] if what.startswith(("QK", "PV"))]
    exponents = [(begin, end) for begin, end, what in spans["softmax0"] if what == "exponents"]
    busy = sum(end - begin for begin, end in exponents)
    beside = sum(
        max(0, min(end, e) - max(begin, b)) for begin, end in exponents for b, e in mmas if e > begin and b < end
    )
    assert busy > 0 and beside > 0.5 * busy


def test_o_shrinks_only_where_a_maximum_has_outgrown_its_reference():
    """With small scores no row's reference moves after the first tile, but for what the adversary adds."""
    small = Problem(16, 200, spread=0.1, config=tmem())
    trace = run(small, policy="steady", cta=TmemCta, multiprocessors=1).trace
    assert not any(event.what.startswith("rescale") for event in trace)
    grows = np.linspace(0, 60, 200)[None, :, None, None]
    q, k, v = small.inputs()
    grown = np.ones_like(q), np.broadcast_to(grows, k.shape), v
    found = simulate.forward(*grown, config=small.config, policy="steady", cta=TmemCta, multiprocessors=1)
    assert any(event.what.startswith("rescale") for event in found.trace)
