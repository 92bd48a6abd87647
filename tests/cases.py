"""The attention problems that CPU and GPU tests share, and how their inputs lie in memory.

`CASES` is a fixed list: corners picked by hand, then grids over lengths around each tile size, head dims, GQA ratios
and layouts, then random draws from a fixed seed. `inputs(case, ...)` makes q, k and v as the case's layout says, with
fresh random numbers.
"""

from __future__ import annotations

import itertools
import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = tuple(range(8, 257, 8))
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)  # query heads per KV head
PRIMES = (2, 3, 5, 7, 13, 31, 61, 97, 131, 251, 257, 383, 509, 641, 769, 1021)
ALIGNMENT = 8  # 16-bit elements in the 16 bytes that TMA wants rows and bases aligned to

TILE_HEAD_DIMS = {
    # tile lengths the kernels use, and the head dims whose block config has them: (first, last)
    32: (200, 256),
    48: (200, 256),
    64: (8, 256),  # rows of a warpgroup
    80: (136, 256),
    112: (104, 128),
    128: (72, 192),
    192: (8, 64),
    256: (8, 128),
}


Shape = tuple[int, ...]
RAGGED = ("used_q", "used_k", "used", "packed", "packed_used")


@dataclass(frozen=True)
class Case:
    """One call of `fmha.attention`: shape, mask, layout of the inputs, and what is asked for."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_kv: int
    head_dim: int
    dtype: str = "bf16"  # of DTYPES
    causal: bool = False
    layout: str = "contiguous"  # of LAYOUTS
    offset: int = 0  # elements by which layout "offset" moves the bases; below ALIGNMENT: not 16-byte aligned
    out: str = "new"  # "new": allocated by the call; else out=, of a kind that `tests.checks.Output` names
    return_lse: bool = True
    scale: float | None = None
    q_gain: float = 1.0  # q is multiplied by it: large values make the softmax sharp
    k_ramp: tuple[float, float] = (1.0, 1.0)  # keys are scaled from the first value at key 0 to the second at the last
    window: tuple[int | None, int | None] = (None, None)  # -1 stands for None, too
    softcap: float | None = None
    sinks: bool = False
    head_dim_v: int = 0  # of v and out; 0 is that of q and k
    alibi: str = ""  # "heads": a slope for each head; "entries": for each head of each batch entry
    ragged: str = ""  # of RAGGED: which of its lengths a sequence has of its own

    @property
    def name(self) -> str:
        """Unique among different cases."""
        parts = [
            f"b{self.batch}-q{self.seqlen_q}-k{self.seqlen_k}-h{self.heads_q}x{self.heads_kv}-d{self.head_dim}-{self.dtype}",
            "causal" if self.causal else "dense",
            self.layout + (str(self.offset) if self.offset else ""),
            f"out_{self.out}",
            "" if self.return_lse else "nolse",
            f"scale{self.scale:g}" if self.scale is not None else "",
            f"gain{self.q_gain:g}" if self.q_gain != 1.0 else "",
            f"ramp{self.k_ramp[0]:g}to{self.k_ramp[1]:g}" if self.k_ramp != (1.0, 1.0) else "",
            f"window{self.window[0]}to{self.window[1]}" if self.window != (None, None) else "",
            f"cap{self.softcap:g}" if self.softcap is not None else "",
            "sinks" if self.sinks else "",
            f"dv{self.head_dim_v}" if self.head_dim_v else "",
            f"alibi_{self.alibi}" if self.alibi else "",
            self.ragged,
        ]
        return "-".join(part for part in parts if part)

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """Of the window, as the oracle takes them."""
        left, right = (None if side == -1 else side for side in self.window)
        return left, right

    @property
    def packed(self) -> bool:
        return self.ragged.startswith("packed")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def shapes(self) -> tuple[Shape, Shape, Shape, Shape]:
        """[B, S, H, D] of q, k, v and out, or packed [T, H, D]."""
        queries: tuple[int, ...] = self.batch, self.seqlen_q, self.heads_q
        keys: tuple[int, ...] = self.batch, self.seqlen_k, self.heads_kv
        if self.packed:
            (rows_q, rows_k), *_ = lengths(self)
            queries, keys = (rows_q, self.heads_q), (rows_k, self.heads_kv)
        dims = self.head_dim, self.head_dim_v or self.head_dim
        return (*queries, dims[0]), (*keys, dims[0]), (*keys, dims[1]), (*queries, dims[1])


# -- ragged batches --------------------------------------------------------------------------------------------------
class Part(NamedTuple):
    """A sequence: its entry of the tensors, its rows of the output, and its queries and keys."""

    entry: int
    rows: slice
    queries: slice
    keys: slice


class Lengths(NamedTuple):
    """Of a ragged case. `given` are the arguments that say them, as lists."""

    rows: tuple[int, int]  # of q and of k, in an entry
    given: dict[str, list[int]]
    parts: list[Part]


def lengths(case: Case) -> Lengths:
    """The lengths of a ragged case's sequences, up to its own: drawn, the same every time."""
    rng = random.Random(zlib.crc32(case.name.encode()))
    pairs = [_pair(case, rng) if case.packed else (case.seqlen_q, case.seqlen_k) for _ in range(case.batch)]
    given: dict[str, list[int]] = {}
    starts, rows = [(0, 0)] * case.batch, (case.seqlen_q, case.seqlen_k)
    if case.packed:
        before, behind = ([rng.choice((0, 0, 0, 1, 70)) for _ in "qk"] for _ in range(2))
        counts = zip(*pairs, strict=True)
        sums = [list(accumulate(sizes, initial=first)) for sizes, first in zip(counts, before, strict=True)]
        given = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), sums, strict=True))
        starts = list(zip(*sums, strict=True))
        rows = sums[0][-1] + behind[0], sums[1][-1] + behind[1]
    used = [list(sizes) for sizes in zip(*pairs, strict=True)]
    for i, name in enumerate("qk"):
        if case.ragged in (f"used_{name}", "used", "packed_used"):
            used[i] = given[f"seqused_{name}"] = [rng.choice((size, rng.randint(0, size))) for size in used[i]]
    parts = []
    for b, ((start_q, start_k), (size, _)) in enumerate(zip(starts[: case.batch], pairs, strict=True)):
        queries, keys = slice(start_q, start_q + used[0][b]), slice(start_k, start_k + used[1][b])
        parts.append(Part(0 if case.packed else b, slice(start_q, start_q + size), queries, keys))
    return Lengths(rows, given, parts)


def _pair(case: Case, rng: random.Random) -> tuple[int, int]:
    """The lengths of a packed sequence: at most those of the case, and often equal."""
    queries, keys = (rng.choice((0, 1, n, rng.randint(0, n))) for n in (case.seqlen_q, case.seqlen_k))
    return queries, rng.choice((keys, min(queries, case.seqlen_k)))


def outside(case: Case, which: str) -> torch.Tensor:
    """Bool [B, S] or packed [T]: the rows of q or k that are of no sequence."""
    index, ((rows_q, rows_k), _, parts) = "qk".index(which), lengths(case)
    rows = (rows_q, rows_k)[index]
    found = torch.ones(1 if case.packed else case.batch, rows, dtype=torch.bool)
    for part in parts:
        found[part.entry, part.keys if index else part.queries] = False
    return found[0] if case.packed else found


# -- layouts: how q, k and v lie in memory ---------------------------------------------------------------------------
Randn = Callable[..., torch.Tensor]


def _contiguous(case: Case, shape: Shape, randn: Randn) -> torch.Tensor:
    return randn(*shape)


def _slice(case: Case, shape: Shape, randn: Randn) -> torch.Tensor:
    """The inside of a tensor larger in every mode; rows and base stay 16-byte aligned."""
    b, s, h, d = shape
    return randn(b + 1, s + 3, h + 2, d + 2 * ALIGNMENT)[1:, 2 : 2 + s, 1 : 1 + h, ALIGNMENT : ALIGNMENT + d]


def _bhsd(case: Case, shape: Shape, randn: Randn) -> torch.Tensor:
    """Stored as [B, H, S, D], as torch's own attention wants it."""
    b, s, h, d = shape
    return randn(b, h, s, d).transpose(1, 2)


def _sbhd(case: Case, shape: Shape, randn: Randn) -> torch.Tensor:
    """Stored with the sequence first."""
    b, s, h, d = shape
    return randn(s, b, h, d).transpose(0, 1)


def _offset(case: Case, shape: Shape, randn: Randn) -> torch.Tensor:
    """Contiguous, but its base is moved by `case.offset` elements."""
    count = shape[0] * shape[1] * shape[2] * shape[3]
    return randn(case.offset + count)[case.offset :].view(shape)


def _odd_rows(case: Case, shape: Shape, randn: Randn) -> torch.Tensor:
    """Rows one element longer than they need be, so that no stride is a multiple of 16 bytes."""
    b, s, h, d = shape
    return randn(b, s, h, d + 1)[..., :d]


def _packed_qkv(case: Case, randn: Randn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v are heads of one tensor [B, S, Hq + 2 Hkv, D], as a fused projection writes them."""
    heads = [case.heads_q, case.heads_kv, case.heads_kv]
    q, k, v = randn(case.batch, case.seqlen_q, sum(heads), case.head_dim).split(heads, dim=2)
    return q, k, v


def _packed_kv(case: Case, randn: Randn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """k and v are one tensor [B, Sk, 2, Hkv, D]."""
    k, v = randn(case.batch, case.seqlen_k, 2, case.heads_kv, case.head_dim).unbind(2)
    return randn(*case.shapes[0]), k, v


def _expanded(case: Case, randn: Randn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every batch entry shares one k and v: a batch stride of 0."""
    k, v = (randn(1, *shape[1:]).expand(case.batch, -1, -1, -1) for shape in case.shapes[1:3])
    return randn(*case.shapes[0]), k, v


_EACH: dict[str, Callable[[Case, Shape, Randn], torch.Tensor]] = {
    "contiguous": _contiguous,
    "slice": _slice,
    "bhsd": _bhsd,
    "sbhd": _sbhd,
    "offset": _offset,
    "odd_rows": _odd_rows,
}
_TOGETHER: dict[str, Callable[[Case, Randn], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "packed_qkv": _packed_qkv,
    "packed_kv": _packed_kv,
    "expanded": _expanded,
}
LAYOUTS = (*_EACH, *_TOGETHER)


def inputs(case: Case, device: torch.device | str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of `case`, standard normal, and NaN in rows of no sequence. A case and a seed always give the same
    numbers on one kind of device."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(f"{case.name} {seed}".encode()))

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=case.torch_dtype)

    if case.layout in _TOGETHER:
        q, k, v = _TOGETHER[case.layout](case, randn)
    else:
        q, k, v = (_EACH[case.layout](case, shape, randn) for shape in case.shapes[:3])
    if case.q_gain != 1.0:
        q.mul_(case.q_gain)
    if case.k_ramp != (1.0, 1.0):
        k.mul_(torch.linspace(*case.k_ramp, case.seqlen_k, device=device)[:, None, None].to(k.dtype))
    if case.ragged:
        for x, which in ((q, "q"), (k, "k"), (v, "k")):
            x[outside(case, which).to(device)] = math.nan
    return q, k, v


def options(case: Case, device: torch.device | str) -> dict[str, Any]:
    """The arguments beside q, k and v that decide the numbers, as the oracle takes them."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))
    given: dict[str, Any] = {"causal": case.causal, "window": case.sides, "scale": case.scale, "softcap": case.softcap}
    if case.sinks:
        given["sinks"] = 3 * torch.randn(case.heads_q, generator=generator, device=device)
    if case.alibi:
        shape = (case.batch,) * (case.alibi == "entries") + (case.heads_q,)
        given["alibi_slopes"] = torch.rand(shape, generator=generator, device=device) ** 4
    if case.ragged:
        numbers = lengths(case).given
        given |= {name: torch.tensor(found, dtype=torch.int32, device=device) for name, found in numbers.items()}
    return given


# -- the list --------------------------------------------------------------------------------------------------------
def around(tile: int) -> tuple[int, ...]:
    """Lengths at which a loop over tiles of this size changes its mind."""
    return (0, 1, tile - 1, tile, tile + 1)


def corners() -> list[Case]:
    """What a grid would miss."""
    base = Case(2, 130, 259, 4, 2, 128)
    shapes = [
        replace(base, batch=0),
        replace(base, seqlen_q=0),
        replace(base, seqlen_k=0),
        replace(base, seqlen_q=0, seqlen_k=0),
        replace(base, batch=0, seqlen_q=0, seqlen_k=0),
        replace(base, seqlen_q=1, seqlen_k=1),
        replace(base, seqlen_q=1, seqlen_k=2049),  # one query over a long cache
        replace(base, seqlen_q=2049, seqlen_k=1),  # nearly every row blind under causal
        replace(base, seqlen_q=640, seqlen_k=129),  # whole Q tiles blind under causal
        replace(base, seqlen_q=129, seqlen_k=640),
        replace(base, seqlen_q=1024, seqlen_k=1024),
        replace(base, heads_q=32, heads_kv=1),
        replace(base, heads_q=32, heads_kv=32, batch=1),
        replace(base, heads_q=33, heads_kv=11),
        replace(base, batch=3, seqlen_q=17, seqlen_k=515, heads_q=7, heads_kv=1, head_dim=72),
        replace(base, batch=1, seqlen_q=4097, seqlen_k=4097, heads_q=2, heads_kv=1),
    ]
    calls = [
        replace(base, scale=0.5),
        replace(base, scale=1e-3),
        replace(base, scale=0.125, return_lse=False, out="given"),
        replace(base, out="strided"),
        replace(base, out="strided", seqlen_q=1, head_dim=8),
        replace(base, out="unaligned"),
        replace(base, layout="packed_qkv", seqlen_q=259, heads_q=4, heads_kv=4),
    ]
    return [
        replace(case, causal=causal, dtype=dtype)
        for case, causal, dtype in itertools.product(shapes + calls, (False, True), DTYPES)
    ]


def _heads(rng: random.Random) -> tuple[int, int]:
    """Query and KV heads, few enough for the oracle to stay quick."""
    group = rng.choice(GROUPS)
    kv = rng.randint(1, max(1, min(3, 8 // group)))
    return group * kv, kv


def _call(rng: random.Random) -> dict[str, str | bool | float | None]:
    return {
        "out": rng.choice(("new", "given", "strided", "unaligned")),
        "return_lse": rng.random() < 0.7,
        "scale": rng.choice((None, None, None, 0.05, 0.3)),
    }


def around_tiles(rng: random.Random, tiles: Sequence[int]) -> list[Case]:
    """Sq and Sk around tile sizes, in all combinations, causal and not."""
    cases = []
    for tile in tiles:
        low, high = TILE_HEAD_DIMS[tile]
        for seqlen_q, seqlen_k, causal in itertools.product(around(tile), around(tile), (False, True)):
            heads_q, heads_kv = _heads(rng)
            cases.append(
                Case(
                    rng.randint(1, 3),
                    seqlen_q,
                    seqlen_k,
                    heads_q,
                    heads_kv,
                    rng.choice([d for d in HEAD_DIMS if low <= d <= high]),
                    rng.choice(tuple(DTYPES)),
                    causal,
                    **_call(rng),
                )
            )
    return cases


def head_dims(rng: random.Random) -> list[Case]:
    """Every head dim in both dtypes, causal and not, over lengths of two to four tiles."""
    cases = []
    for head_dim, dtype, causal in itertools.product(HEAD_DIMS, DTYPES, (False, True)):
        heads_q, heads_kv = _heads(rng)
        seqlen_q, seqlen_k = rng.randint(190, 400), rng.randint(190, 520)
        cases.append(Case(rng.randint(1, 2), seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, dtype, causal))
    return cases


def groups(rng: random.Random) -> list[Case]:
    """Every GQA ratio."""
    return [
        Case(2, rng.choice(PRIMES), rng.choice(PRIMES), group * 2, 2, rng.choice((64, 128)), causal=causal)
        for group, causal in itertools.product(GROUPS, (False, True))
    ]


def layouts(rng: random.Random) -> list[Case]:
    """Every layout, and every misalignment of the base."""
    cases = []
    for layout, dtype, causal in itertools.product(LAYOUTS, DTYPES, (False, True)):
        offsets = range(1, ALIGNMENT + 1) if layout == "offset" else (0,)
        for offset, head_dim in itertools.product(offsets, (rng.choice((40, 64)), rng.choice((96, 128, 176, 256)))):
            seqlen_q, seqlen_k = rng.randint(1, 300), rng.randint(1, 300)
            if layout == "packed_qkv":
                seqlen_k = seqlen_q
            heads_q, heads_kv = _heads(rng)
            case = Case(
                rng.randint(2, 3), seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, dtype, causal, layout, offset
            )
            cases.append(replace(case, **_call(rng)))
    return cases


def drawn(rng: random.Random, count: int) -> list[Case]:
    """Anything goes: primes and random lengths, every layout, every way to call."""
    cases = []
    for _ in range(count):
        heads_q, heads_kv = _heads(rng)
        seqlen_q, seqlen_k = (rng.choice((*PRIMES, rng.randint(1, 1100))) for _ in range(2))
        layout = rng.choice(LAYOUTS)
        case = Case(
            rng.randint(1, 3),
            seqlen_q,
            seqlen_q if layout == "packed_qkv" else seqlen_k,
            heads_q,
            heads_kv,
            rng.choice(HEAD_DIMS),
            rng.choice(tuple(DTYPES)),
            rng.random() < 0.5,
            layout,
            rng.randint(1, 7) if layout == "offset" else 0,
        )
        cases.append(replace(case, **_call(rng)))
    return cases


def every_case() -> tuple[Case, ...]:
    rng = random.Random(20240229)
    *tiles, widest = TILE_HEAD_DIMS
    parts = corners() + around_tiles(rng, tiles) + head_dims(rng) + groups(rng) + layouts(rng) + drawn(rng, 80)
    parts += around_tiles(rng, [widest])  # drawn last, so that the others are what they were without it
    return tuple(dict.fromkeys(parts))


CASES = every_case()

SHARP = tuple(
    Case(1, 300, 700, 4, 2, head_dim, dtype, causal, q_gain=gain)
    for head_dim, dtype, causal, gain in itertools.product((64, 128, 256), DTYPES, (False, True), (5.0, 8.0))
)
"""A few keys take all the weight, and running maxima jump."""

GROWING = tuple(
    Case(1, 300, 1500, 4, 2, head_dim, dtype, causal, q_gain=2.0, k_ramp=ramp)
    for head_dim, dtype, causal, ramp in itertools.product(
        (64, 128, 256), DTYPES, (False, True), ((16.0, 0.1), (0.1, 16.0))
    )
)
"""Running maxima grow from tile to tile, whichever way the tiles are visited."""
