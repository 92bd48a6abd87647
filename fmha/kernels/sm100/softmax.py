"""The softmax of one row, which a thread has to itself: no shuffles.

Of the exponentials the unit for them (MUFU) computes most, and some a polynomial on the FMA pipe (Cody and Waite's
reduction; FlashAttention-4 divides them so, too): Blackwell's MMAs are twice as fast as Hopper's, and its MUFU is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from fmha.kernels.common import numbers
from fmha.kernels.sm100 import tcgen05
from schedules.forward import FLOOR

AT_ONCE = 32  # columns of tensor memory that a thread loads or stores by one instruction
FEW = 16  # where it has few registers
WORD = 32  # columns that are masked at a time
CHAINS = 4  # in which a row is gone through

# 2^x = 2^floor(x) p(x - floor(x)), with p(0) = 1 exactly. The relative error of p over [0, 1) is 2^-13.5.
POLYNOMIAL = (1.0, 0.69511682, 0.22764498, 0.07706705)
LEAST = -127.0  # whose power of two is 0 in float32, subnormal numbers being flushed
ROUND = 1.5 * 2.0**23  # added to a number of moderate size, leaves its integer part in the lowest bits


def largest(values: Sequence[Float32]) -> Float32:
    """Three are compared at a time."""
    chains = list(values[:CHAINS])
    for i in range(CHAINS, len(values)):
        chains[i % CHAINS] = cute.arch.fmax(chains[i % CHAINS], values[i])
    return cute.arch.fmax(cute.arch.fmax(chains[0], chains[1]), cute.arch.fmax(chains[2], chains[3]))


def power_of_2(value: Float32) -> Float32:
    return cute.math.exp2(value, fastmath=True)


def powers_of_2(pair: tcgen05.Pair) -> tcgen05.Pair:
    """By the polynomial."""
    x = tuple(cute.arch.fmax(value, Float32(LEAST)) for value in pair)
    both = lambda number: (Float32(number), Float32(number))  # noqa: E731
    rounded = tcgen05.add_down(x, both(ROUND))
    fraction = tcgen05.add(x, _negative(tcgen05.add(rounded, both(-ROUND))))
    found = both(POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        found = tcgen05.multiply_add(found, fraction, both(coefficient))
    low, high = (
        numbers.as_float(numbers.as_bits(value) + (numbers.as_bits(steps) << 23))
        for value, steps in zip(found, rounded, strict=True)
    )
    return low, high


class RowSoftmax:
    """What the thread of a row has in registers: `s`, a row, and its reference (log2), factor and sum (of even and of
    odd columns)."""

    def hold_row(self, columns: int, dtype: type[cutlass.Numeric], scale_log2: Float32, rescale_above: float) -> None:
        self.columns, self.dtype = columns, dtype
        self.scale_log2, self.rescale_above = scale_log2, rescale_above
        self.s = cute.make_rmem_tensor(columns, Float32)
        self.reference, self.factor = (cute.make_rmem_tensor(1, Float32) for _ in range(2))
        self.row_sum = cute.make_rmem_tensor(2, Float32)

    def start(self) -> None:
        self.reference.fill(FLOOR)
        self.row_sum.fill(0.0)

    def load_row(self, at: Int32) -> None:
        """From tensor memory."""
        found = []
        for column in range(0, self.columns, AT_ONCE):
            found += tcgen05.load(at + column, AT_ONCE)
        for column, score in enumerate(tcgen05.arrived(found)):
            self.s[column] = score

    def row_max(self) -> None:
        most = largest([self.s[i] for i in range(self.columns)]) * self.scale_log2
        before = self.reference[0]
        moves = most > before + self.rescale_above
        self.reference[0] = numbers.select(moves, most, before)
        self.factor[0] = power_of_2(before - self.reference[0])

    def store_weights(self, at: Int32, polynomials: int) -> None:
        """Into tensor memory, in 16 bits. Of 128 so many are by the polynomial."""
        factor = self.factor[0], self.factor[0]
        total = tcgen05.scale((self.row_sum[0], self.row_sum[1]), factor)
        step = min(2 * AT_ONCE, self.columns)
        for start in range(0, self.columns, step):
            words = []
            for i in range(start, start + step, 2):
                pair = self.exponentials(i, by_polynomial(i, polynomials))
                total = tcgen05.add(total, pair)
                words.append(numbers.pack_16bit(*pair, self.dtype))
            tcgen05.store(at + start // 2, words)
        self.row_sum[0], self.row_sum[1] = total

    def exponentials(self, i: int, by_polynomial: bool) -> tcgen05.Pair:
        """Of two columns."""
        scale, reference = self.scale_log2, -self.reference[0]
        pair = tcgen05.multiply_add((self.s[i], self.s[i + 1]), (scale, scale), (reference, reference))
        if by_polynomial:
            return powers_of_2(pair)
        return power_of_2(pair[0]), power_of_2(pair[1])

    def whole_sum(self) -> Float32:
        return self.row_sum[0] + self.row_sum[1]


def shrink(at: Int32, columns: int, factor: Float32) -> None:
    """Multiplies so many columns of this thread's lane."""
    for column in range(0, columns, FEW):
        found = tcgen05.arrived(tcgen05.load(at + column, FEW))
        shrunk = []
        for j in range(0, FEW, 2):
            shrunk += tcgen05.scale((found[j], found[j + 1]), (factor, factor))
        tcgen05.store(at + column, shrunk)


def _negative(pair: tcgen05.Pair) -> tcgen05.Pair:
    return -pair[0], -pair[1]


def mask(scores: cute.Tensor, end: Int32, begin: Int32 | None = None) -> None:
    """Scores at or past `end` (in columns of this tile), or before `begin`, become minus infinity. ptxas makes
    predicates of eight bits at a time (R2P), where comparisons would take an instruction each."""
    for first in range(0, cute.size(scores), WORD):
        seen = ones(end - first)
        if begin is not None:
            seen = seen & ~ones(begin - first)
        for i in range(WORD):
            bit = seen & (1 << i if i < WORD - 1 else -(1 << i))
            scores[first + i] = numbers.select(bit != 0, scores[first + i], Float32(-Float32.inf))


@dsl_user_op
def ones(count: Int32, *, loc=None, ip=None) -> Int32:
    """So many of the lowest bits, none if it is negative, all from 32 on (PTX: bmsk.clamp)."""
    count = cutlass.max(count, 0)
    found = llvm.inline_asm(
        T.i32(),
        [Int32(count).ir_value(loc=loc, ip=ip)],
        "bmsk.clamp.b32 $0, 0, $1;",
        "=r,r",
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return Int32(found)


def penalise(scores: cute.Tensor, slope: Float32, distance: Int32) -> None:
    """ALiBi: scores lose `slope` times their key's distance; `distance` is that of column 0 to the query's own key."""
    first = Float32(distance)
    for column in range(cute.size(scores)):
        past = first + float(column)
        scores[column] = scores[column] - slope * cute.arch.fmax(past, -past)


def by_polynomial(column: int, count: int) -> bool:
    """Whether of every 128 columns `count` include this one: pairs, as evenly spread as can be."""
    pair = column // 2
    return (pair + 1) * count // 128 > pair * count // 128
