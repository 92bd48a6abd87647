"""Cases of paged attention, drawn at random over everything at once, and what a right answer to one is.

Whatever must not reach a result is poison: slots past a sequence's end, pages of none, and, in the page table, entries
behind the last page, which are out of range.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fmha
from fmha import reference
from tests.cases import Case
from tests.checks import Output, Verdict, _compare, poison, same_bits

PROBLEMS = 2000  # that the GPU test draws
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 300, 511, 777, 1300)
HEAD_DIMS = (64, 64, 72, 96, 128, 128, 128, 152, 192, 256)
GROUPS = (1, 1, 2, 3, 4, 4, 5, 7, 8, 16, 32)
SIDES = (None, None, None, 0, 3, 17, 64, 100, 400, -1, -40)
PAGES = {"nhd": (1, 8, 16, 32, 64, 128, 256), "hnd": (1, 8, 16, 64, 128), "vllm": (8, 16, 32)}
NO_PAGE = 2**30  # an entry of the page table that nobody may follow


@dataclass(frozen=True)
class PagedCase:
    """One problem. `tokens` has the queries of each sequence, all the same unless `packed`; `outside` are rows of none
    before and behind them."""

    seq_lens: tuple[int, ...]
    tokens: tuple[int, ...]
    heads_kv: int
    group: int
    head_dim: int
    page: int
    layout: str = "nhd"
    dtype: str = "bf16"
    head_dim_v: int = 0
    packed: bool = False
    outside: tuple[int, int] = (0, 0)
    causal: bool = False
    window: tuple[int | None, int | None] = reference.NO_WINDOW
    softcap: float | None = None
    sinks: bool = False
    splits: int | None = None
    return_lse: bool = True
    out: str = "new"
    gain: float = 1.0
    shared: bool = False  # pages are shared between sequences

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]

    @property
    def name(self) -> str:
        dims = f"D{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v else "")
        told = f"paged {self.layout} {dims} page{self.page} H{self.heads}x{self.heads_kv} {self.dtype}"
        told += (
            f" queries{list(self.tokens)} keys{list(self.seq_lens)}" + " packed" * self.packed + " causal" * self.causal
        )
        for option in ("softcap", "splits"):
            told += f" {option}{value:g}" if (value := getattr(self, option)) else ""
        return told + f" window{self.window}" * (self.window != reference.NO_WINDOW) + " sinks" * self.sinks

    @property
    def heads(self) -> int:
        return self.heads_kv * self.group

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def most_pages(self) -> int:
        return max(1, max(-(-n // self.page) for n in self.seq_lens)) + 1

    def shape(self, dims: int) -> tuple[int, ...]:
        """Of q or the output."""
        if self.packed:
            return sum(self.tokens) + sum(self.outside), self.heads, dims
        one = self.tokens[0]
        return (len(self.tokens), *((one,) if one > 1 else ()), self.heads, dims)

    @property
    def starts(self) -> list[int]:
        found = [self.outside[0]]
        for count in self.tokens:
            found.append(found[-1] + count)
        return found


def draw(seed: int) -> PagedCase:
    rng = random.Random(seed)
    batch = rng.choice((1, 1, 2, 3, 5))
    packed = rng.random() < 0.35
    layout = rng.choice(tuple(PAGES))
    counts = (0, 1, 1, 2, 5, 33, 150) if packed else (rng.choice((1, 1, 1, 1, 2, 4, 130)),)
    return PagedCase(
        seq_lens=tuple(rng.choice(LENGTHS) for _ in range(batch)),
        tokens=tuple(rng.choice(counts) for _ in range(batch)),
        heads_kv=rng.choice((1, 2, 3, 8)),
        group=rng.choice(GROUPS),
        head_dim=rng.choice(HEAD_DIMS),
        page=rng.choice(PAGES[layout]),
        layout=layout,
        dtype=rng.choice(("bf16", "bf16", "fp16")),
        head_dim_v=rng.choice((0, 0, 0, 64, 128)),
        packed=packed,
        outside=(rng.choice((0, 0, 2)), rng.choice((0, 3))) if packed else (0, 0),
        causal=rng.random() < 0.5,
        window=(rng.choice(SIDES), rng.choice(SIDES)),
        softcap=rng.choice((None, None, 5.0, 50.0)),
        sinks=rng.random() < 0.3,
        splits=rng.choice((None, None, None, 1, 2, 5, 16)),
        return_lse=rng.random() < 0.5,
        out=rng.choice(("new", "given")),
        gain=rng.choice((1.0, 1.0, 3.0)),
        shared=rng.random() < 0.2,
    )


@dataclass
class Tensors:
    q: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    sinks: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    keys: list[torch.Tensor]  # of each sequence, [length, Hkv, D]
    values: list[torch.Tensor]

    def options(self, case: PagedCase) -> dict[str, Any]:
        given = {"layout": case.layout, "causal": case.causal, "window": case.window, "softcap": case.softcap,
                 "sinks": self.sinks, "num_splits": case.splits, "cu_seqlens_q": self.cu_seqlens_q}  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}


def tensors(case: PagedCase, device: torch.device | str, seed: int = 0) -> Tensors:
    generator = torch.Generator(device).manual_seed(seed)
    rng = random.Random(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.torch_dtype)

    batch, most = len(case.seq_lens), case.most_pages
    count = batch * most + 3
    ids = list(range(count))
    rng.shuffle(ids)
    table = torch.full((batch, most), NO_PAGE, dtype=torch.int32)
    k, v = (poison(torch.empty(count, case.page, case.heads_kv, d, dtype=case.torch_dtype, device=device))
            for d in (case.head_dim, case.value_dim))  # fmt: skip
    for b, length in enumerate(case.seq_lens):
        for index in range(-(-length // case.page)):
            sharing = case.shared and b > 0 and (index + 1) * case.page <= min(case.seq_lens[0], length)
            page = int(table[0, index]) if sharing else ids.pop()
            table[b, index] = page
            if not sharing:
                used = min(case.page, length - index * case.page)
                k[page, :used] = randn(used, case.heads_kv, case.head_dim)
                v[page, :used] = randn(used, case.heads_kv, case.value_dim)
    keys, values = ([_rows(x, table, b, n) for b, n in enumerate(case.seq_lens)] for x in (k, v))
    packed = torch.tensor(case.starts, dtype=torch.int32, device=device) if case.packed else None
    lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
    sinks = torch.randn(case.heads, generator=generator, device=device) if case.sinks else None
    q = randn(*case.shape(case.head_dim)) * case.gain
    return Tensors(q, *laid_out(k, v, case.layout), table.to(device), lens, sinks, packed, keys, values)


def _rows(pages: torch.Tensor, table: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """`fmha.reference.gather`, all tokens at a time."""
    page = pages.shape[1]
    ids = table[batch, : -(-length // page)].long().to(pages.device)
    return pages[ids].flatten(0, 1)[:length]


def laid_out(k: torch.Tensor, v: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages [pages, page, Hkv, D] in another layout."""
    if layout == "nhd":
        return k, v
    if layout == "hnd":
        return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    return k.unflatten(3, (-1, 8)).permute(0, 2, 3, 1, 4).contiguous(), v.permute(0, 2, 3, 1).contiguous()


def call(case: PagedCase, given: Tensors, attention: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = case.shape(case.value_dim)
    options = given.options(case) | {"return_lse": case.return_lse}
    target = None
    if case.out == "given":
        target = Output(shape, case.torch_dtype, given.q.device, "given")
        options["out"] = target.view
    else:
        blocks = [poison(torch.empty(shape, dtype=case.torch_dtype, device=given.q.device)) for _ in range(2)]
        del blocks
    result = attention(given.q, given.k_pages, given.v_pages, given.page_table, given.seq_lens, **options)
    out, lse = result if case.return_lse else (result, None)
    assert out.shape == shape and out.dtype == case.torch_dtype, f"out is {out.dtype} {tuple(out.shape)}"
    if target is not None:
        assert out.data_ptr() == target.view.data_ptr(), "out= was not used"
        target.check_surroundings()
    return out, lse


def check(
    case: PagedCase, device: torch.device | str, seed: int = 0, attention: Callable[..., Any] = fmha.attention_paged
) -> Verdict:
    """Asserts that the answer is right, sequence by sequence, and twice the same to the bit."""
    given = tensors(case, device, seed)
    out, lse = call(case, given, attention)
    verdict = compare(case, given, out, lse)
    again, lse_again = call(case, given, attention)
    assert same_bits(out, again), "a second run gave other bits in out"
    assert lse is None or lse_again is None or same_bits(lse, lse_again), "a second run gave other bits in lse"
    return verdict


def compare(case: PagedCase, given: Tensors, out: torch.Tensor, lse: torch.Tensor | None) -> Verdict:
    flat_q, flat = given.q.reshape(-1, case.heads, case.head_dim), out.reshape(-1, case.heads, case.value_dim)
    flat_lse = None
    if lse is not None:
        wanted = (case.heads, len(flat)) if case.packed else (len(case.tokens), case.heads, *out.shape[1:-2])
        assert lse.shape == wanted, f"lse is {tuple(lse.shape)}"
        flat_lse = lse if case.packed else lse.movedim(1, 0).reshape(case.heads, -1)
    nobodys = torch.ones(len(flat), dtype=torch.bool)
    nobodys[case.starts[0] : case.starts[-1]] = False
    assert (flat[nobodys] == 0).all(), "rows of no sequence are not 0"
    if flat_lse is not None:
        assert (flat_lse[:, nobodys] == -math.inf).all(), "the LSE of rows of no sequence is not -inf"
    worst = Verdict(0.0, 0.0, 0.0)
    options = {"causal": case.causal, "window": sides(case.window), "scale": None, "softcap": case.softcap,
               "sinks": given.sinks}  # fmt: skip
    for b, (count, keys) in enumerate(zip(case.tokens, case.seq_lens, strict=True)):
        if count == 0:
            continue
        one = slice(case.starts[b], case.starts[b] + count)
        sizes = 1, count, keys, case.heads, case.heads_kv, case.head_dim
        how = {name: getattr(case, name) for name in ("causal", "dtype", "window", "softcap", "sinks", "head_dim_v")}
        short = Case(*sizes, **how)
        parts = flat_q[None, one], given.keys[b][None], given.values[b][None]
        found = _compare(short, parts, options, flat[None, one], None if flat_lse is None else flat_lse[None, :, one])
        worst = max(worst, found, key=lambda verdict: verdict.ratio)
    return worst


def sides(window: tuple[int | None, int | None]) -> reference.Window:
    """As `fmha` takes them: -1 is no limit."""
    return tuple(None if side == -1 else side for side in window)  # type: ignore[return-value]
