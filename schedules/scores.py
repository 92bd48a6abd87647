"""What is done to scores between QK and the softmax: the compile-time part.

    softcap   s becomes c tanh(s / c): scores stay within the cap c (Gemma 2, 2024)
    alibi     s becomes s - slope |j - (i + Sk - Sq)|: a head's penalty on distance (Press, Smith and Lewis 2022)

With both, scores are capped first. `s` is scaled already; c and the slopes are run-time numbers. Sinks need no code of
their own: a logit of minus infinity adds nothing to a row's sum.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    softcap: bool = False
    alibi: bool = False

    @property
    def plain(self) -> bool:
        return not (self.softcap or self.alibi)


SCORES = {"plain": Score(), "softcap": Score(softcap=True), "alibi": Score(alibi=True), "both": Score(True, True)}


def score_of(softcap: bool, alibi: bool) -> str:
    """The name in `SCORES` of a call that has a softcap, or slopes."""
    return next(name for name, score in SCORES.items() if score == Score(softcap, alibi))
