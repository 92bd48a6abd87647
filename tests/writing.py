"""Cases of `fmha.write_kv`, drawn at random over everything at once, and what must be in the pages then."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

import fmha
from fmha import reference
from tests.checks import poison, same_bits
from tests.paged import PAGES, laid_out

TOKENS = (1, 1, 2, 3, 7, 8, 15, 16, 17, 40, 100, 260)
MANY_TOKENS = (500, 1100, 3000, 8192)  # threads have several
HEAD_DIMS = (8, 64, 64, 72, 96, 128, 128, 128, 192, 256)
HEADS = (1, 1, 2, 3, 8, 8, 16)
VIEWS = ("contiguous", "contiguous", "packed", "heads first", "columns", "odd", "shifted", "one token")
ORDERS = ("run", "runs", "shuffled")


@dataclass(frozen=True)
class WriteCase:
    """One problem. `shape` is that of slot_mapping, [T] or [B, S]."""

    shape: tuple[int, ...]
    heads: int
    head_dim: int
    page: int
    head_dim_v: int = 0
    layout: str = "nhd"
    dtype: str = "bf16"
    view: str = "contiguous"  # of k and v
    order: str = "runs"  # of slots
    skipped: float = 0.0  # so many tokens have no slot
    wide: bool = True  # slots are int64
    interleaved: bool = False  # k_pages and v_pages are slices of one tensor

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}[self.dtype]

    @property
    def tokens(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def pages(self) -> int:
        return 2 * -(-self.tokens // self.page) + 3


def draw(seed: int, many: bool = False) -> WriteCase:
    rng = random.Random(seed)
    layout = rng.choice(tuple(PAGES))
    tokens = rng.choice(MANY_TOKENS if many else TOKENS)
    shape = rng.choice([(tokens,), (tokens,), (1, tokens), (tokens, 1), (3, tokens)])
    return WriteCase(
        shape=shape,
        heads=rng.choice(HEADS),
        head_dim=rng.choice(HEAD_DIMS),
        page=rng.choice(PAGES[layout]),
        head_dim_v=rng.choice((0, 0, 0, 64, 128)),
        layout=layout,
        dtype=rng.choice(("bf16", "bf16", "fp16")),
        view=rng.choice(VIEWS),
        order=rng.choice(ORDERS),
        skipped=rng.choice((0.0, 0.0, 0.1, 0.5, 1.0)),
        wide=rng.random() < 0.5,
        interleaved=rng.random() < 0.3,
    )


@dataclass
class Tensors:
    k: torch.Tensor
    v: torch.Tensor
    k_pages: torch.Tensor
    v_pages: torch.Tensor
    slot_mapping: torch.Tensor

    def __iter__(self):
        return iter((self.k, self.v, self.k_pages, self.v_pages, self.slot_mapping))


def tensors(case: WriteCase, device: torch.device | str, seed: int = 0) -> Tensors:
    """Pages are poisoned; `check` compares all of their memory."""
    generator = torch.Generator(device).manual_seed(seed)
    k, v = (_view(case, case.head_dim, generator), _view(case, case.value_dim, generator))
    if case.view == "packed" and case.head_dim == case.value_dim:
        qkv = torch.randn(*case.shape, 3 * case.heads, k.shape[-1], generator=generator, device=device)
        _, k, v = qkv.to(case.torch_dtype).chunk(3, dim=-2)
    shape = case.pages, case.page, case.heads
    empty = (torch.empty(*shape, d, dtype=case.torch_dtype, device=device) for d in (case.head_dim, case.value_dim))
    pages = laid_out(*empty, case.layout)
    if case.interleaved and case.head_dim == case.value_dim:
        both = torch.empty(case.pages, 2, pages[0][0].numel(), dtype=case.torch_dtype, device=device)
        pages = tuple(both[:, i].view(x.shape) for i, x in enumerate(pages))
    return Tensors(k, v, *map(poison, pages), slots(case, seed).to(device))


def _view(case: WriteCase, dims: int, generator: torch.Generator) -> torch.Tensor:
    *lead, tokens = case.shape

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=generator.device).to(case.torch_dtype)

    shape = (*case.shape, case.heads, dims)
    if case.view == "heads first":
        return randn(*lead, case.heads, tokens, dims).transpose(-2, -3)
    if case.view == "columns":
        return randn(*case.shape, dims, case.heads).transpose(-1, -2)
    if case.view == "odd":
        return randn(*case.shape, case.heads, dims + 3)[..., :-3]
    if case.view == "shifted":  # strides are right, and addresses are not
        return randn(*case.shape, case.heads, dims + 8)[..., 1:-7]
    if case.view == "one token":
        return randn(case.heads, dims).expand(shape)
    if case.view == "packed":
        return randn(*case.shape, case.heads + 2, dims + 8)[..., 1:-1, :dims]
    return randn(*shape)


def slots(case: WriteCase, seed: int = 0) -> torch.Tensor:
    """Different ones, but for those of tokens that are skipped."""
    rng = random.Random(seed)
    count, tokens = case.pages * case.page, case.tokens
    if case.order == "run":
        start = rng.randrange(count - tokens)
        found = list(range(start, start + tokens))
    elif case.order == "shuffled":
        found = rng.sample(range(count), tokens)
    else:
        ids = rng.sample(range(case.pages), case.pages)
        start = rng.randrange(case.page)
        found = [ids[j // case.page] * case.page + j % case.page for j in range(start, start + tokens)]
    nowhere = [-1, -1, -2, -(2**31), count, count + 1, 2**31 - 1]
    if case.wide:
        nowhere += [-(2**63), 2**63 - 1, 2**32, -(2**32)]  # of the last two the low words are slots
    found = [rng.choice(nowhere) if rng.random() < case.skipped else slot for slot in found]
    return torch.tensor(found, dtype=torch.int64 if case.wide else torch.int32).view(case.shape)


def check(
    case: WriteCase, device: torch.device | str, seed: int = 0, write: Callable[..., None] = fmha.write_kv
) -> None:
    """Asserts that pages hold the tokens in their slots and what they held before elsewhere, to the bit."""
    given = tensors(case, device, seed)
    wanted = [x.clone() for x in (given.k_pages, given.v_pages)]
    reference.write_kv(given.k, given.v, *wanted, given.slot_mapping, layout=case.layout)
    before = [x.clone() for x in (given.k, given.v, given.slot_mapping.int())]
    result: object = write(*given, layout=case.layout)
    assert result is None
    for name, pages, right in zip(("k_pages", "v_pages"), (given.k_pages, given.v_pages), wanted, strict=True):
        assert same_bits(pages, right), f"{name}: {(pages != right).sum()} elements differ"
    after = given.k, given.v, given.slot_mapping.int()
    assert all(map(same_bits, before, after)), "an input was written"
