"""What is done to single numbers, and the few PTX instructions for it that are wanted by name."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32
from cutlass._mlir.dialects import arith, llvm
from cutlass.cutlass_dsl import T, dsl_user_op

# tanh(x) is x - CUBIC x^3 up to SMALL, within 2^-11 of it.
CUBIC, SMALL = 0.3185, 0.375


def pack_16bit(low: Float32, high: Float32, dtype: type[cutlass.Numeric]) -> Int32:
    """Two floats as two 16-bit ones in a register, rounded to nearest even."""
    return _pair(f"cvt.rn.{_PAIR[dtype]}.f32 $0, $1, $2;", "=r,f,f", Float32(high), Float32(low))


def multiply_pair(a: Int32, b: Int32, dtype: type[cutlass.Numeric]) -> Int32:
    """Two 16-bit floats by two."""
    return _pair(f"mul.rn.{_PAIR[dtype]} $0, $1, $2;", "=r,r,r", Int32(a), Int32(b))


_PAIR = {cutlass.BFloat16: "bf16x2", cutlass.Float16: "f16x2"}


@dsl_user_op
def _pair(text: str, constraints: str, a: cutlass.Numeric, b: cutlass.Numeric, *, loc=None, ip=None) -> Int32:
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [a.ir_value(loc=loc, ip=ip), b.ir_value(loc=loc, ip=ip)],
            text,
            constraints,
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


@dsl_user_op
def as_bits(value: Float32, *, loc=None, ip=None) -> Int32:
    return Int32(llvm.bitcast(T.i32(), Float32(value).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


@dsl_user_op
def as_float(bits: Int32, *, loc=None, ip=None) -> Float32:
    return Float32(llvm.bitcast(T.f32(), Int32(bits).ir_value(loc=loc, ip=ip), loc=loc, ip=ip))


def cap(scores: cute.Tensor, factor: Float32) -> None:
    """Scores become tanh(factor * s), by an instruction whose error is 2^-11 of the result (PTX: tanh.approx)."""
    for i in range(cute.size(scores)):
        scores[i] = tanh(scores[i] * factor)


@dsl_user_op
def tanh(value: Float32, *, loc=None, ip=None) -> Float32:
    return Float32(
        llvm.inline_asm(
            T.f32(),
            [Float32(value).ir_value(loc=loc, ip=ip)],
            "tanh.approx.f32 $0, $1;",
            "=f,f",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )


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


@dsl_user_op
def opaque(value: Int32, *, loc=None, ip=None) -> Int32:
    """The same value, of which the compiler does not know that it is the same."""
    return Int32(
        llvm.inline_asm(
            T.i32(),
            [Int32(value).ir_value(loc=loc, ip=ip)],
            "mov.b32 $0, $1;",
            "=r,r",
            has_side_effects=True,  # and it stays where it is
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
            loc=loc,
            ip=ip,
        )
    )
