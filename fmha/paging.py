"""Caches of keys and values in pages: the layouts, as strides.

A page holds the keys (or values) of `page` tokens of a sequence, of all KV heads. Which page has which is in a table.

    nhd     [pages, page, Hkv, D]
    hnd     [pages, Hkv, page, D]
    vllm    K [pages, Hkv, D / x, page, x] and V [pages, Hkv, D, page], x being the elements of 16 bytes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fmha.problem import Unsupported

LAYOUTS = ("nhd", "hnd", "vllm")
CHUNK = 8  # elements of 16 bytes: vLLM's x
PAGE_SIZES = "1, 2, 4, ... 1024"
VLLM_PAGE_SIZES = (8, 16, 32)
LARGEST_PAGE = 1024
MAX_PAGE_ELEMENTS = 2**31  # the kernels count in 32 bits inside a page, and in 64 from page to page


class Pages(NamedTuple):
    """A tensor of pages. Strides are in elements."""

    pages: int
    page: int
    heads: int
    dims: int
    outer: int  # from a page to the next
    row: int  # from a slot to the next
    head: int
    chunk: int  # from 8 elements of a slot to the next 8; of vLLM's V from an element to the next


def pages_of(name: str, shape: Sequence[int], strides: Sequence[int], layout: str, values: bool) -> Pages:
    """What `layout` makes of a tensor of K, or with `values` of V. ValueError if its shape is not of the layout, and
    `fmha.Unsupported` if its strides are not those of memory that is read 16 bytes at a time."""
    modes = _modes(layout, values)
    if len(shape) != len(modes):
        raise ValueError(f"{name}.shape is {list(shape)}; layout {layout!r} needs [{', '.join(modes)}]")
    size, step = dict(zip(modes, shape, strict=True)), dict(zip(modes, strides, strict=True))
    if size.get("x", CHUNK) != CHUNK:
        raise ValueError(f"{name}.shape is {list(shape)}; its last mode must be {CHUNK}, the elements of 16 bytes")
    last = modes[-1]
    if step[last] != 1 and size[last] > 1:
        raise ValueError(f"{name}.stride() is {tuple(strides)}; the last one must be 1")
    for mode in modes[:-1]:
        if size[mode] > 1 and (step[mode] % CHUNK or step[mode] < 0):
            raise Unsupported(f"{name}.stride() is {tuple(strides)}; multiples of {CHUNK} elements are supported")
    page = size["page"]
    if layout == "vllm" and page not in VLLM_PAGE_SIZES:
        raise Unsupported(f"{name}: pages of {page} slots; layout 'vllm' has {', '.join(map(str, VLLM_PAGE_SIZES))}")
    if page & (page - 1) or not 1 <= page <= LARGEST_PAGE:
        raise Unsupported(f"{name}: pages of {page} slots; {PAGE_SIZES} are supported")
    dims = size["D"] if "D" in size else size["D / x"] * CHUNK
    chunk = step["D / x"] if "x" in size else step["D"] if last == "page" else CHUNK
    inside = sum((size[mode] - 1) * step[mode] for mode in modes[1:])
    if inside >= MAX_PAGE_ELEMENTS:
        raise Unsupported(f"{name}.stride() is {tuple(strides)}; a page of less than 2^31 elements is supported")
    return Pages(size["pages"], page, size["Hkv"], dims, step["pages"], step["page"], step["Hkv"], chunk)


def _modes(layout: str, values: bool) -> tuple[str, ...]:
    if layout not in LAYOUTS:
        raise ValueError(f"layout is {layout!r}; one of {', '.join(map(repr, LAYOUTS))} is needed")
    if layout == "nhd":
        return "pages", "page", "Hkv", "D"
    if layout == "hnd":
        return "pages", "Hkv", "page", "D"
    return ("pages", "Hkv", "D", "page") if values else ("pages", "Hkv", "D / x", "page", "x")
