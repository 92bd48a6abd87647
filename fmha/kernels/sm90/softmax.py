"""The online softmax of one warpgroup's accumulators, and the few PTX instructions it wants by name.

A thread of a wgmma holds the accumulators of two rows, 8 apart: element `4 * g + 2 * r + c` belongs to row `r` of the
two and to column `8 * g + 2 * (lane % 4) + c` (PTX: wgmma, D fragment). The 16-bit A fragment of the next wgmma has
the same order, so P is S converted in place.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from schedules.tiling import MOST_RESCALED_ABOVE

ROWS = 2  # per thread

# For optimistic roles, in log2: what no weight may pass, so that it is seen when one does, and the most by which a row
# maximum may grow until then. The largest weight of a row is thus 2^(LIMIT - RESCALE_ABOVE) or more, 2^95 and 2^13
# times the smallest normal number, so that those which count keep their precision. bfloat16 could do with any limit; 2
# keeps O as small as a plain softmax has it.
LIMIT = {cutlass.BFloat16: 1, cutlass.Float16: 15}
RESCALE_ABOVE = {cutlass.BFloat16: MOST_RESCALED_ABOVE, cutlass.Float16: 16.0}


@dsl_user_op
def pack_16bit(low: Float32, high: Float32, dtype: type[cutlass.Numeric], *, loc=None, ip=None) -> Int32:
    """Two floats as two 16-bit ones in a register, rounded to nearest even."""
    name = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}[dtype]
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)],
            f"cvt.rn.{name}.f32 $0, $1, $2;",
            "=r,f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


def pack(source: cute.Tensor, target: cute.Tensor, dtype: type[cutlass.Numeric]) -> None:
    """Rounds float32 registers to `dtype`, in the same order, into pairs."""
    for i in range(cute.size(target)):
        target[i] = pack_16bit(source[2 * i], source[2 * i + 1], dtype)


def largest(values: cute.Tensor, row: int) -> Float32:
    """A thread's largest value of a row, none of which is negative: their bits are then in the same order, and Hopper
    has a maximum of three integers (VIMNMX3). A NaN, positive as exponentials make it, is above all; no comparison
    finds it to be past a limit, but then its row is NaN anyway."""
    bits = cute.recast_tensor(values, Int32)
    found = integer_max(bits[element(row, 0)], bits[element(row, 1)])
    for column in range(2, columns(values), 2):
        at = element(row, column)
        found = integer_max(integer_max(found, bits[at]), bits[at + 1])
    return as_float(found)


@dsl_user_op
def integer_max(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    return Int32(arith.maxsi(Int32(a).ir_value(loc=loc, ip=ip), Int32(b).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def as_float(bits: Int32, *, loc=None, ip=None) -> Float32:
    return Float32(llvm.bitcast(T.f32(), Int32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def columns(accumulators: cute.Tensor) -> int:
    """Columns of each of its two rows that a thread holds."""
    return cute.size(accumulators) // ROWS


def element(row: int, column: int) -> int:
    """Index of the thread's `column`-th value of `row`."""
    return 4 * (column // 2) + 2 * row + column % 2


def row_reduce(values: cute.Tensor, row: int, combine) -> Float32:
    """Combines a thread's part of a row, in two chains."""
    chains = [values[element(row, 0)], values[element(row, 1)]]
    for column in range(2, columns(values)):
        chains[column % 2] = combine(chains[column % 2], values[element(row, column)])
    return combine(chains[0], chains[1])


def quad_reduce(value: Float32, combine) -> Float32:
    """Combines the four lanes that share a row."""
    for distance in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset=distance))
    return value


def mask_right(scores: cute.Tensor, limits: list[Int32], lane: Int32) -> None:
    """Scores at or past the row's limit (in columns of this tile) become minus infinity."""
    for row in range(ROWS):
        limit = limits[row] - 2 * (lane % 4)
        for column in range(columns(scores)):
            at = element(row, column)
            outside = limit <= 8 * (column // 2) + column % 2
            scores[at] = select(outside, Float32(-Float32.inf), scores[at])


@dsl_user_op
def select(condition: Boolean, yes: Float32, no: Float32, *, loc=None, ip=None) -> Float32:
    """`yes if condition else no`, without a branch."""
    return Float32(
        arith.select(
            Boolean(condition).ir_value(loc=loc, ip=ip),
            Float32(yes).ir_value(loc=loc, ip=ip),
            Float32(no).ir_value(loc=loc, ip=ip),
            loc=loc,
            ip=ip,
        )
    )


def either(a: Boolean, b: Boolean) -> Boolean:
    """Logical or of two run-time values."""
    return a | b


def add(a: Float32, b: Float32) -> Float32:
    return a + b
