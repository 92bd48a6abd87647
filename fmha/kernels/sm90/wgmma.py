"""wgmma by hand: matrix descriptors of operands in shared memory, and the instruction.

A descriptor (PTX: wgmma, matrix descriptor format) is 64 bits: the start address, the leading and the stride byte
offset, all in units of 16 bytes, and the swizzle. Only its lower half, start address and leading offset, depends on
the slot and on the k-step, so that half is computed once, outside of all loops, and then only added to. `cute.gemm`
computes all of it anew for every tile: some twenty instructions more, a dozen of them between a turn and its first MMA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from fmha.kernels.common.numbers import opaque
from schedules.tiling import ELEMENT_BYTES, ValueSlots, swizzle_bytes

K = 16  # of one instruction, with 16-bit elements
UNIT = 16  # bytes, of the fields
SWIZZLES = {128: 1, 64: 2, 32: 3, 16: 0}  # bytes that are swizzled (16: none are): the field's value
CORE_ROWS = 8  # of a core matrix, whose rows the swizzle permutes
# Of each operand of one MMA, so many descriptors may be computed ahead: they belong into uniform registers, and where
# more are wanted at a time than those hold, ptxas takes vector registers for every one, at two moves a half.
AHEAD = 8


@dataclass(frozen=True)
class Operand:
    """An operand in shared memory, slot behind slot. Offsets are in units of 16 bytes."""

    low: Int32  # lower half of the first slot's descriptor
    high: int  # upper half
    slot: int  # what `low` grows by from a slot to the next: the start address, and in bits 16 up the leading offset
    steps: tuple[int, ...]  # of each k-step in a slot
    across: bool = False  # whether its contiguous elements lie across k

    def at(self, place: Int32) -> Int32:
        """Lower half of a slot's descriptor."""
        return self.low + Int32(place) * self.slot

    def descriptor(self, low: Int32, step: int) -> Int64:
        return Int64(Uint32(low + self.steps[step])) | Int64(self.high << 32)


def along_k(tensor: cute.Tensor | cute.Pointer, rows: int, depth: int) -> Operand:
    """Q or K: `rows` rows of `depth` contiguous elements, which MMAs multiply along. Blocks of a swizzle's width follow
    one another, each with all rows."""
    width = swizzle_bytes(depth)
    inside = width // (K * ELEMENT_BYTES)  # k-steps in a block
    block, step = rows * width // UNIT, K * ELEMENT_BYTES // UNIT
    steps = tuple(k // inside * block + k % inside * step for k in range(depth // K))
    slot = rows * depth * ELEMENT_BYTES // UNIT
    return _operand(tensor, width, leading=1, slot=slot, steps=steps)  # the leading offset is not used


def in_blocks(tensor: cute.Tensor | cute.Pointer, rows: int, depth: int, width: int) -> Operand:
    """The same in blocks of `width` bytes, of 32 or 16: a k-step is one block, or two."""
    block = rows * width // UNIT
    steps = tuple(k * K * ELEMENT_BYTES // width * block for k in range(depth // K))
    return _operand(tensor, width, leading=block, slot=rows * depth * ELEMENT_BYTES // UNIT, steps=steps)


def across_k(tensor: cute.Tensor | cute.Pointer, depth: int, slots: ValueSlots) -> Operand:
    """V and the ones beside it: `depth` keys, which MMAs multiply along, of contiguous elements. The leading offset may
    shrink from slot to slot (`ValueSlots.leading`)."""
    width = slots.block // depth
    steps = tuple(k * K * width // UNIT for k in range(depth // K))
    shrinks = slots.leading(0) - slots.leading(1)
    slot = (slots.slot // UNIT) - (shrinks // UNIT << 16)
    return replace(_operand(tensor, width, slots.leading(0) // UNIT, slot, steps), across=True)


def _operand(
    tensor: cute.Tensor | cute.Pointer, width: int, leading: int, slot: int, steps: tuple[int, ...]
) -> Operand:
    start = tensor if isinstance(tensor, cute.Pointer) else tensor.iterator
    address = Int32(start.toint())
    low = opaque(((address & 0x3FFFF) // UNIT) | Int32(leading << 16))
    high = CORE_ROWS * width // UNIT | SWIZZLES[width] << 30
    return Operand(low, high, slot, steps)


def multiply_shared(d: cute.Tensor, a: Operand, a_place: Int32, b: Operand, b_place: Int32, dtype) -> None:
    """Issues d = A B, asynchronous: both in shared memory, along k."""
    a_low, b_low = a.at(a_place), b.at(b_place)
    for step in range(len(a.steps)):
        if step % AHEAD == 0 and step > 0:
            a_low, b_low = opaque(a_low), opaque(b_low)
        _store(d, _wgmma(_registers(d), a.descriptor(a_low, step), b.descriptor(b_low, step), step > 0, dtype))


def multiply_registers(d: cute.Tensor, a: cute.Tensor, b: Operand, b_place: Int32, dtype) -> None:
    """Issues d += A B, asynchronous: A's 16-bit fragments in registers, in pairs, B in shared memory."""
    low = b.at(b_place)
    for step in range(len(b.steps)):
        fragment = [a[4 * step + i] for i in range(4)]
        _store(d, _wgmma(_registers(d), fragment, b.descriptor(low, step), True, dtype, b.across))


def _registers(d: cute.Tensor) -> list[Float32]:
    return [d[i] for i in range(cute.size(d))]


def _store(d: cute.Tensor, values: Sequence[Float32]) -> None:
    for i, value in enumerate(values):
        d[i] = value


@dsl_user_op
def _wgmma(d, a, b: Int64, accumulate: bool, dtype: type[cutlass.Numeric], across=False, *, loc=None, ip=None):
    """One k-step, of 64 rows. `a` is a descriptor, or four registers."""
    name = {cutlass.BFloat16: "bf16", cutlass.Float16: "f16"}[dtype]
    n, float32 = len(d), T.f32()
    in_registers = isinstance(a, list)
    words = [Int32(word) for word in a] if in_registers else [Int64(a)]
    operands = [*words, Int64(b), Int32(accumulate), *(Float32(value) for value in d)]
    named = [f"${n + i}" for i in range(len(words) + 2)]
    first = "{" + ", ".join(named[:-2]) + "}" if in_registers else named[0]
    signs_and_majors = f"1, 1, {int(across)}" if in_registers else "1, 1, 0, 0"
    result = llvm.inline_asm(
        llvm.StructType.get_literal([float32] * n),
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        f"{{ .reg .pred p; setp.ne.b32 p, {named[-1]}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{2 * n}k{K}.f32.{name}.{name} "
        f"{{{', '.join(f'${i}' for i in range(n))}}}, {first}, {named[-2]}, p, {signs_and_majors}; }}",
        ",".join([*["=f"] * n, *(["r"] * 4 if in_registers else ["l"]), "l", "r", *map(str, range(n))]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Float32(llvm.extractvalue(float32, result, [i], loc=loc, ip=ip)) for i in range(n)]
