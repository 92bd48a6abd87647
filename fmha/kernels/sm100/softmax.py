"""The softmax of one row, which a thread has to itself: no shuffles.

Of the exponentials the unit for them (MUFU) computes most, and some a polynomial on the FMA pipe (Cody and Waite's
reduction; FlashAttention-4 divides them so, too): Blackwell's MMAs are twice as fast as Hopper's, and its MUFU is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass.cute as cute
from cutlass import Float32, Int32

from fmha.kernels.sm90 import softmax as common
from fmha.kernels.sm100 import tcgen05

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
        common.as_float(common.as_bits(value) + (common.as_bits(steps) << 23))
        for value, steps in zip(found, rounded, strict=True)
    )
    return low, high


def _negative(pair: tcgen05.Pair) -> tcgen05.Pair:
    return -pair[0], -pair[1]


def mask_right(scores: cute.Tensor, limit: Int32) -> None:
    """Scores at or past the limit (in columns of this tile) become minus infinity."""
    for column in range(cute.size(scores)):
        scores[column] = common.select(limit <= column, Float32(-Float32.inf), scores[column])


def mask_left(scores: cute.Tensor, limit: Int32) -> None:
    """Scores before the limit become minus infinity."""
    for column in range(cute.size(scores)):
        scores[column] = common.select(limit > column, Float32(-Float32.inf), scores[column])


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
