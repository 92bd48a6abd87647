"""The problems that the GPU test draws, with the oracle in the kernel's place: the checks pass what is right, and
object to a call that forgets one of its options."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fmha import reference
from tests.cases import Case, options
from tests.checks import check
from tests.drawn import draw

SMALL = [
    (seed, case)
    for seed, case in ((seed, draw(seed)) for seed in range(300))
    if case.batch * case.heads_q * case.seqlen_q * case.seqlen_k < 2**17
]
FORGETFUL = ("causal", "window", "scale", "softcap", "sinks", "alibi_slopes")


def oracle(*qkv: torch.Tensor, out: torch.Tensor | None = None, return_lse: bool = False, **given: Any) -> Any:
    """With the signature of `fmha.attention`."""
    given["window"] = tuple(None if side == -1 else side for side in given.get("window", reference.NO_WINDOW))
    function = reference.attention_varlen if "cu_seqlens_q" in given else reference.attention
    exact, lse = function(*qkv, **given)
    o = exact.to(qkv[0].dtype)
    o = o if out is None else out.copy_(o)
    return (o, lse.float()) if return_lse else o


def forgetting(name: str) -> Any:
    def attention(*qkv: torch.Tensor, **given: Any) -> Any:
        given.pop(name, None)
        return oracle(*qkv, **given)

    return attention


def matters(case: Case, name: str) -> bool:
    """Whether a problem has the option at all, and rows that may show it."""
    given = options(case, "cpu").get(name)
    return (
        given is not None and given is not False and given != reference.NO_WINDOW and case.seqlen_q * case.seqlen_k > 64
    )


def test_a_seed_is_a_problem():
    assert draw(7) == draw(7) and len({draw(seed).name for seed in range(300)}) == 300


@pytest.mark.parametrize(("seed", "case"), SMALL[:60], ids=[str(seed) for seed, _ in SMALL[:60]])
def test_the_oracle_is_right(seed: int, case: Case) -> None:
    check(case, oracle, "cpu", seed)


@pytest.mark.parametrize("name", FORGETFUL)
def test_a_forgotten_option_is_found(name: str) -> None:
    cases = [(seed, case) for seed, case in SMALL if matters(case, name)][:20]
    found = 0
    for seed, case in cases:
        try:
            check(case, forgetting(name), "cpu", seed)
        except AssertionError:
            found += 1
    assert len(cases) == 20 and found >= 10, f"{found} of {len(cases)}"
