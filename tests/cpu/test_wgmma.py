"""Matrix descriptors against CuTe's own shared-memory layouts."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
import pytest
from cutlass.tensor_utils import LayoutEnum

from fmha.kernels.sm90 import wgmma
from schedules.tiling import ELEMENT_BYTES, ROWS_PER_WARPGROUP, SM90

CONFIGS = list(dict.fromkeys(row.config for row in SM90))
NAMES = [f"{config.head_dim}-{config.tile_m}x{config.tile_n}-{config.ones}" for config in CONFIGS]
ELEMENTS = wgmma.UNIT // ELEMENT_BYTES
SLOTS = 2


class At:
    """A tensor at an address."""

    def __init__(self, address: int) -> None:
        self.iterator = self
        self.address = address

    def toint(self) -> int:
        return self.address


@pytest.fixture
def operand(monkeypatch):
    """`along_k` and `across_k` over Python integers."""
    monkeypatch.setattr(wgmma, "Int32", int)
    monkeypatch.setattr(wgmma, "opaque", lambda value: value)
    return wgmma


def offsets(kind: str, head_dim: int, tile_n: int) -> tuple[dict[tuple[int, int, int], int], int]:
    """Element offsets, before the swizzle, of (row or key, element of it, slot) in the layout that the kernel gives an
    operand, and the swizzle's bytes."""
    found: dict[tuple[int, int, int], int] = {}
    swizzle = []

    @cute.jit
    def trace() -> None:
        shape = (ROWS_PER_WARPGROUP, tile_n, head_dim)
        if cutlass.const_expr(kind == "q"):
            layout = sm90.make_smem_layout_a(LayoutEnum.ROW_MAJOR, shape, cutlass.BFloat16, SLOTS)
        elif cutlass.const_expr(kind == "k"):
            layout = sm90.make_smem_layout_b(LayoutEnum.ROW_MAJOR, shape, cutlass.BFloat16, SLOTS)
        else:
            transposed = (ROWS_PER_WARPGROUP, head_dim, tile_n)
            layout = sm90.make_smem_layout_b(LayoutEnum.COL_MAJOR, transposed, cutlass.BFloat16, SLOTS)
        swizzle.append(16 << layout.inner.num_bits)
        rows = ROWS_PER_WARPGROUP if kind == "q" else tile_n
        for slot in cutlass.range_constexpr(SLOTS):
            for row in cutlass.range_constexpr(0, rows, 8):
                for element in cutlass.range_constexpr(0, head_dim, 8):
                    at = (element, row, slot) if kind == "v" else (row, element, slot)
                    found[row, element, slot] = cute.crd2idx(at, layout.outer)

    trace()
    return found, swizzle[0]


ADDRESS = 0x12400


def fields(low: int) -> tuple[int, int]:
    """Start address and leading offset of a lower half, in elements."""
    return (low & 0x3FFF) * ELEMENTS, (low >> 16) * ELEMENTS


@pytest.mark.parametrize("kind", ["q", "k"])
@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_descriptors_of_q_and_k_point_where_cute_puts_the_tiles(kind, config, operand) -> None:
    found, swizzle = offsets(kind, config.head_dim, config.tile_n)
    rows = ROWS_PER_WARPGROUP if kind == "q" else config.tile_n
    made = operand.along_k(At(ADDRESS), rows, config.head_dim)
    check_upper_half(made, found, swizzle)
    for slot in range(SLOTS):
        start, _ = fields(made.at(slot))
        assert start == ADDRESS // ELEMENT_BYTES + found[0, 0, slot]
    steps = [found[0, wgmma.K * k, 0] for k in range(config.head_dim // wgmma.K)]
    assert [step * ELEMENTS for step in made.steps] == steps


@pytest.mark.parametrize("config", CONFIGS, ids=NAMES)
def test_descriptors_of_v_point_where_cute_puts_the_tiles_and_the_ones_lie(config, operand) -> None:
    """CuTe's layout is that of a slot; the slots, and the ones, are where `ValueSlots` says."""
    found, swizzle = offsets("v", config.head_dim, config.tile_n)
    slots = config.value_slots
    made = operand.across_k(At(ADDRESS), config.tile_n, slots)
    check_upper_half(made, found, swizzle)
    width = swizzle // ELEMENT_BYTES  # columns of a block
    for slot in range(config.stages):
        assert 0 < made.at(slot) < 2**30
        start, leading = fields(made.at(slot))
        assert start * ELEMENT_BYTES == ADDRESS + slots.slot * slot
        assert [leading * i for i in range(slots.blocks)] == [found[0, width * i, 0] for i in range(slots.blocks)]
        if config.ones:
            assert (start + leading * slots.blocks) * ELEMENT_BYTES - ADDRESS in slots.ones_at()
    steps = [found[wgmma.K * k, 0, 0] for k in range(config.tile_n // wgmma.K)]
    assert [step * ELEMENTS for step in made.steps] == steps


def check_upper_half(made, found, swizzle: int) -> None:
    stride, field = made.high & 0x3FFF, made.high >> 30
    assert field == {128: 1, 64: 2, 32: 3}[swizzle]
    assert stride * ELEMENTS == found[8, 0, 0], "from eight rows, or keys, to the next eight"
