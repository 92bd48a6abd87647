"""The instructions of Blackwell's tensor cores and their memory, and of its pairs of floats, one wrapper each.

An address of tensor memory is 32 bits: the lane in the upper half, a column of 32 bits in the lower one. A warp reaches
the 32 lanes from 32 times its number in its warpgroup on, and a thread the lane of its own (PTX: tcgen05, 32x32b).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from schedules.tiling import ELEMENT_BYTES, swizzle_bytes

K = 16  # of one MMA, with 16-bit elements
K_COLUMNS = K // 2  # of an operand in tensor memory
UNIT = 16  # bytes, of a descriptor's fields
SWIZZLES = {128: 2, 64: 4, 32: 6, 16: 0}  # bytes that are swizzled (16: none are): the field's value
CORE_ROWS = 8  # of a core matrix, whose rows the swizzle permutes
COLUMNS = 512
Pair = tuple[Float32, Float32]


def instruction(rows: int, columns: int, dtype: type[cutlass.Numeric], across: bool = False) -> int:
    """The descriptor of an MMA of 16-bit operands into float32 (PTX: tcgen05, instruction descriptor, kind::f16).
    `across` says whether B's contiguous elements lie across k."""
    kind = {cutlass.Float16: 0, cutlass.BFloat16: 1}[dtype]
    return 1 << 4 | kind << 7 | kind << 10 | across << 16 | (columns >> 3) << 17 | (rows >> 4) << 24


@dataclass(frozen=True)
class Operand:
    """An operand in shared memory, slot behind slot, by its descriptors (PTX: tcgen05, shared memory descriptor).

    They are 64 bits, and from one to the next a constant is added: one uniform instruction."""

    first: Int64
    slot: int  # from a slot to the next, in units
    steps: tuple[int, ...]  # of each k-step in a slot
    across: bool = False  # whether its contiguous elements lie across k

    def at(self, place: Int32) -> Int64:
        return self.first + Int64(Int32(place) * self.slot)


def along_k(start: cute.Pointer, rows: int, depth: int) -> Operand:
    """Q or K: `rows` rows of `depth` contiguous elements, which MMAs multiply along. Blocks of a swizzle's width follow
    one another, each with all rows."""
    width = swizzle_bytes(depth)
    inside = width // (K * ELEMENT_BYTES)  # k-steps in a block
    block, step = rows * width // UNIT, K * ELEMENT_BYTES // UNIT
    steps = tuple(k // inside * block + k % inside * step for k in range(depth // K))
    return Operand(_first(start, width, 1), rows * depth * ELEMENT_BYTES // UNIT, steps)


def in_blocks(start: cute.Pointer, rows: int, depth: int, width: int) -> Operand:
    """The same in blocks of `width` bytes, of 32 or 16: a k-step is one block, or two."""
    block = rows * width // UNIT
    steps = tuple(k * K * ELEMENT_BYTES // width * block for k in range(depth // K))
    return Operand(_first(start, width, block), rows * depth * ELEMENT_BYTES // UNIT, steps)


def across_k(start: cute.Pointer, depth: int, columns: int) -> Operand:
    """V: `depth` keys, which MMAs multiply along, of `columns` contiguous elements, in blocks of a swizzle's width."""
    width = swizzle_bytes(columns)
    steps = tuple(k * K * width // UNIT for k in range(depth // K))
    slot = depth * columns * ELEMENT_BYTES // UNIT
    return Operand(_first(start, width, depth * width // UNIT), slot, steps, across=True)


def _first(start: cute.Pointer, width: int, leading: int) -> Int64:
    """Start address, leading offset, stride offset, a constant, and the swizzle."""
    low = Uint32(((Int32(start.toint()) & 0x3FFFF) // UNIT) | Int32(leading << 16))
    high = CORE_ROWS * width // UNIT | 1 << 14 | SWIZZLES[width] << 29
    return Int64(low) | Int64(high << 32)


@dsl_user_op
def multiply(d: Int32, a: Int64 | Int32, b: Int64, kind: int, accumulate, *, loc=None, ip=None) -> None:
    """One k-step, by one thread: `a` is a descriptor, or an Int32 address of tensor memory, like `d`."""
    in_tmem = isinstance(a, Int32)
    _asm(
        None,
        [Int32(d), a, Int64(b), Int32(kind), Int32(accumulate)],
        "{ .reg .pred p; setp.ne.b32 p, $4, 0; "
        f"tcgen05.mma.cta_group::1.kind::f16 [$0], {'[$1]' if in_tmem else '$1'}, $2, $3, p; }}",
        f"r,{'r' if in_tmem else 'l'},l,r,r",
        loc,
        ip,
    )


@dsl_user_op
def commit(barrier: cute.Pointer, *, loc=None, ip=None) -> None:
    """The barrier gets an arrival when all MMAs of this thread so far are done."""
    _asm(
        None,
        [Int32(barrier.toint())],
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];",
        "r",
        loc,
        ip,
    )


@dsl_user_op
def load(address: Int32, columns: int, *, loc=None, ip=None) -> list[Float32]:
    """So many columns of this thread's lane, which `arrived` makes ready."""
    names = ", ".join(f"${i}" for i in range(columns))
    kind = llvm.StructType.get_literal([T.f32()] * columns)
    found = _asm(
        kind,
        [Int32(address)],
        f"tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {{{names}}}, [${columns}];",
        ",".join(["=f"] * columns + ["r"]),
        loc,
        ip,
    )
    return [Float32(llvm.extractvalue(T.f32(), found, [i], loc=loc, ip=ip)) for i in range(columns)]


@dsl_user_op
def arrived(values: Sequence[Float32], *, loc=None, ip=None) -> list[Float32]:
    """The same, of all loads of this thread so far: nothing can be done with them before (PTX: tcgen05.wait::ld)."""
    count = len(values)
    kind = llvm.StructType.get_literal([T.f32()] * count)
    ties = ",".join(["=f"] * count + [str(i) for i in range(count)])
    found = _asm(kind, list(values), "tcgen05.wait::ld.sync.aligned;", ties, loc, ip)
    return [Float32(llvm.extractvalue(T.f32(), found, [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def store(address: Int32, words: Sequence[Int32 | Float32], *, loc=None, ip=None) -> None:
    """Into this thread's lane, from a column on."""
    names = ", ".join(f"${i + 1}" for i in range(len(words)))
    kinds = ["f" if isinstance(word, Float32) else "r" for word in words]
    _asm(
        None,
        [Int32(address), *words],
        f"tcgen05.st.sync.aligned.32x32b.x{len(words)}.b32 [$0], {{{names}}};",
        ",".join(["r", *kinds]),
        loc,
        ip,
    )


@dsl_user_op
def stored(*, loc=None, ip=None) -> None:
    """All stores of this thread so far are done."""
    _asm(None, [], "tcgen05.wait::st.sync.aligned;", "", loc, ip)


@dsl_user_op
def fence_before(*, loc=None, ip=None) -> None:
    """What this thread has done in tensor memory comes before what it tells others next."""
    _asm(None, [], "tcgen05.fence::before_thread_sync;", "", loc, ip)


@dsl_user_op
def fence_after(*, loc=None, ip=None) -> None:
    """What it was told comes before what it does next in tensor memory."""
    _asm(None, [], "tcgen05.fence::after_thread_sync;", "", loc, ip)


@dsl_user_op
def multiply_add(a: Pair, b: Pair, c: Pair, *, loc=None, ip=None) -> Pair:
    return _pair("fma.rn.ftz.f32x2", (a, b, c), loc, ip)


@dsl_user_op
def add(a: Pair, b: Pair, *, loc=None, ip=None) -> Pair:
    return _pair("add.rn.ftz.f32x2", (a, b), loc, ip)


@dsl_user_op
def add_down(a: Pair, b: Pair, *, loc=None, ip=None) -> Pair:
    """Rounded towards minus infinity."""
    return _pair("add.rm.ftz.f32x2", (a, b), loc, ip)


@dsl_user_op
def scale(a: Pair, b: Pair, *, loc=None, ip=None) -> Pair:
    return _pair("mul.rn.ftz.f32x2", (a, b), loc, ip)


def _pair(name: str, operands: Sequence[Pair], loc, ip) -> Pair:
    kind = llvm.StructType.get_literal([T.f32()] * 2)
    flat = [Float32(value) for pair in operands for value in pair]
    names = [f"p{i}" for i in range(len(operands))]
    moves = " ".join(f"mov.b64 p{i}, {{${2 + 2 * i}, ${3 + 2 * i}}};" for i in range(len(operands)))
    text = f"{{ .reg .b64 d, {', '.join(names)}; {moves} {name} d, {', '.join(names)}; mov.b64 {{$0, $1}}, d; }}"
    found = _asm(kind, flat, text, ",".join(["=f", "=f"] + ["f"] * len(flat)), loc, ip, effects=False)
    low, high = (Float32(llvm.extractvalue(T.f32(), found, [i], loc=loc, ip=ip)) for i in range(2))
    return low, high


@dsl_user_op
def write_shared(address: Int32, words: Sequence[Int32], *, loc=None, ip=None) -> None:
    """16 bytes."""
    _asm(None, [Int32(address), *words], "st.shared.v4.b32 [$0], {$1, $2, $3, $4};", "r,r,r,r,r", loc, ip)


def _asm(result, operands, text: str, constraints: str, loc, ip, effects: bool = True):
    return llvm.inline_asm(
        result,
        [operand.ir_value(loc=loc, ip=ip) for operand in operands],
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
