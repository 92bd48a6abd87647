"""Cases by name, as `perf.bench` prints them: "D128 causal S4096 B4 H16". Windows are for its own suite only."""

from __future__ import annotations

import re

from perf.suites import TOKENS, WIDTH, Case

EXAMPLE = "D128 causal S4096 B4 H16"
_WORDS = {
    "head_dim": r"D(\d+)",
    "mask": r"(dense|causal)",
    "lengths": r"S(\d+)(?:x(\d+))?",
    "batch": r"B(\d+)",
    "heads": r"H(\d+)(?:x(\d+))?",
    "dtype": r"(bfloat16|float16)",
}


def parse(name: str) -> Case:
    """The case of that name. Without B and H: so many that B x S = 16k and H x D = 2048.

    ValueError if a word is none of a case's, comes twice, or if D or S is missing.
    """
    found: dict[str, tuple[str, ...]] = {}
    for word in name.split():
        for part, pattern in _WORDS.items():
            if match := re.fullmatch(pattern, word):
                if part in found:
                    raise ValueError(f"case {name!r}: a second {part}, {word!r}")
                found[part] = tuple(group for group in match.groups() if group is not None)
                break
        else:
            raise ValueError(f"case {name!r}: what is {word!r}? A case is written like {EXAMPLE!r}")
    if missing := [part for part in ("head_dim", "lengths") if part not in found]:
        raise ValueError(f"case {name!r} has no {' and no '.join(missing)}; a case is written like {EXAMPLE!r}")
    return make(
        head_dim=int(found["head_dim"][0]),
        lengths=tuple(map(int, found["lengths"])),
        causal=found.get("mask") == ("causal",),
        batch=int(found["batch"][0]) if "batch" in found else None,
        heads=tuple(map(int, found["heads"])) if "heads" in found else None,
        dtype=found.get("dtype", ("bfloat16",))[0],
    )


def make(
    head_dim: int,
    lengths: tuple[int, ...],
    causal: bool = False,
    batch: int | None = None,
    heads: tuple[int, ...] | None = None,
    dtype: str = "bfloat16",
) -> Case:
    """`lengths` and `heads` are of Q, and of K and V where those differ. ValueError if one is not positive."""
    if head_dim < 1 or min(lengths) < 1:
        raise ValueError(f"head dim {head_dim}, lengths {lengths}: positive numbers are needed")
    batch = max(1, TOKENS // lengths[0]) if batch is None else batch
    heads = (max(1, WIDTH // head_dim),) if heads is None else heads
    if batch < 1 or min(heads) < 1 or heads[0] % heads[-1]:
        raise ValueError(f"batch {batch}, heads {heads}: positive numbers, the heads of K divide those of Q")
    return Case(batch, lengths[0], lengths[-1], heads[0], heads[-1], head_dim, causal, dtype)


def slug(case: Case) -> str:
    """The name as part of a file's: "d128-causal-s4096-b4-h16"."""
    return case.name.lower().replace(" ", "-")
