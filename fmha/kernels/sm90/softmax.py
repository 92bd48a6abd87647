"""The online softmax of one warpgroup's accumulators, and the few PTX instructions it wants by name.

A thread of a wgmma holds the accumulators of two rows, 8 apart: element `4 * g + 2 * r + c` belongs to row `r` of the
two and to column `8 * g + 2 * (lane % 4) + c` (PTX: wgmma, D fragment). The 16-bit A fragment of the next wgmma has
the same order, so P is S converted in place.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import arith
from cutlass.cutlass_dsl import dsl_user_op

from fmha.kernels.common.numbers import as_bits, as_float, pack_16bit, select

ROWS = 2  # per thread

# For optimistic roles, in log2. From 2^1 on the highest exponent bit of bfloat16 and float16 is set, and of no smaller
# number. Past MOST a weight may be infinite: float16 ends at 2^16, float32 at 2^128.
LIMIT = 1
LIMIT_BITS = 0x40004000  # of a pair
MOST = {cutlass.BFloat16: 120, cutlass.Float16: 15}
# When a warp has mended so many tiles of a work tile, maxima seem to grow and grow, and references go ahead of them by
# AHEAD (log2): P keeps its precision down to 2^-126 in bfloat16, in float16 down to 2^-14.
MENDED_EXACTLY = 1
AHEAD = {cutlass.BFloat16: 64, cutlass.Float16: 4}
EXPONENT = {cutlass.BFloat16: (7, 127), cutlass.Float16: (10, 15)}  # where it begins, and its bias


def pack(source: cute.Tensor, target: cute.Tensor, dtype: type[cutlass.Numeric]) -> None:
    """Rounds float32 registers to `dtype`, in the same order, into pairs."""
    for i in range(cute.size(target)):
        target[i] = pack_16bit(source[2 * i], source[2 * i + 1], dtype)


def past_limit(pairs: cute.Tensor) -> Boolean:
    """Whether any of P, none of which is negative, is 2^LIMIT or more, or NaN."""
    seen = pairs[0]
    for i in range(1, cute.size(pairs)):
        seen = seen | pairs[i]
    return (seen & Int32(LIMIT_BITS)) != 0


def floor_log2(value: Float32) -> Int32:
    """Of a normal number."""
    return (as_bits(value) >> 23) - 127


def power_of_2(exponent: Int32) -> Float32:
    return as_float((exponent + 127) << 23)


def pair_of_powers_of_2(exponent: Int32, dtype: type[cutlass.Numeric]) -> Int32:
    start, bias = EXPONENT[dtype]
    return ((exponent + bias) << start) * 0x10001


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


def least(values: list[Float32]) -> Float32:
    """If it is positive; otherwise one that is not. Positive floats are in the order of their bits, and integers are
    compared three at a time."""
    chains = [as_bits(value) for value in values[:2]]
    for i in range(2, len(values), 2):
        chain = i // 2 % 2
        chains[chain] = integer_min(integer_min(chains[chain], as_bits(values[i])), as_bits(values[i + 1]))
    return as_float(integer_min(*chains))


@dsl_user_op
def integer_min(a: Int32, b: Int32, *, loc=None, ip=None) -> Int32:
    return Int32(arith.minsi(Int32(a).ir_value(loc=loc, ip=ip), Int32(b).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def penalise_side(scores: cute.Tensor, slope: Float32) -> None:
    """ALiBi where all keys lie before the queries (or, with its opposite, behind): scores grow from column to column.
    The distance to the thread's first column is left out."""
    for i in range(cute.size(scores)):
        scores[i] = scores[i] + slope * float(8 * (i // 4) + i % 2)


def penalise(scores: cute.Tensor, slope: Float32, distances: list[Int32], lane: Int32) -> None:
    """ALiBi: scores lose `slope` times their key's distance; `distances` are those of each row to column 0."""
    for row in range(ROWS):
        first = Float32(distances[row] + 2 * (lane % 4))
        for column in range(columns(scores)):
            at = element(row, column)
            past = first + float(8 * (column // 2) + column % 2)
            scores[at] = scores[at] - slope * cute.arch.fmax(past, -past)


def mask_right(scores: cute.Tensor, limits: list[Int32], lane: Int32) -> None:
    """Scores at or past the row's limit (in columns of this tile) become minus infinity."""
    for row in range(ROWS):
        limit = limits[row] - 2 * (lane % 4)
        for column in range(columns(scores)):
            at = element(row, column)
            outside = limit <= 8 * (column // 2) + column % 2
            scores[at] = select(outside, Float32(-Float32.inf), scores[at])


def mask_left(scores: cute.Tensor, limits: list[Int32], lane: Int32) -> None:
    """Scores before the row's limit become minus infinity."""
    for row in range(ROWS):
        limit = limits[row] - 2 * (lane % 4)
        for column in range(columns(scores)):
            at = element(row, column)
            outside = limit > 8 * (column // 2) + column % 2
            scores[at] = select(outside, Float32(-Float32.inf), scores[at])


def add(a: Float32, b: Float32) -> Float32:
    return a + b
