"""New tokens into the slots of a paged KV cache: 16 bytes a thread and token, through registers. Nothing
in it is one chip's own; programmatic dependent launch is Hopper's and later ones'.

    sizes             the address on the host of `fmha.jit.arguments.WRITE_SIZES`, an int64 each
    k, v              the addresses of [T, Hkv, D], multiples of 16 bytes; strides whose last is 1 and whose others are
                      multiples of 16 bytes
    k_pages, v_pages  the addresses of pages of slots of heads: `fmha.paging` says what the strides are
    slots             the address of a contiguous [T] of int32 or int64

Elements are 16 bits wide, whatever they mean. CTAs are (tokens, chunks of a token, K or V). Where the elements of a
slot are side by side, neighbouring threads have neighbouring chunks; in vLLM's layout they have neighbouring tokens,
whose slots are mostly neighbours, too, so that the 2 bytes that each stores of V are a sector together.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int16, Int32, Int64, const_expr
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from fmha.jit.arguments import WRITE_SIZES
from fmha.kernels.common.memory import read
from schedules.tiling import ELEMENT_BYTES, CopyConfig

CHUNK = 8  # elements of 16 bytes
WORDS = 4  # of a chunk, int32


class Operand(NamedTuple):
    """K or V: its new tokens and its pages. Strides are in elements."""

    tokens: Int64  # an address
    token: Int64
    token_head: Int64
    pages: Int64  # an address
    outer: Int64
    row: Int32
    head: Int32
    chunk: Int32
    columns: Int32  # chunks of a head
    chunks: Int32  # of a token


class Slots:
    """Where tokens go."""

    def __init__(self, address: Int64, word_bytes: Int32, count: Int64, shift: Int32) -> None:
        self.address = address
        self.bytes = word_bytes  # 4 or 8
        self.count = count
        self.shift = Int64(shift)  # log2 of a page's slots
        self.mask = (Int64(1) << self.shift) - 1

    @cute.jit
    def of(self, token: Int32) -> Int64:
        """Its slot: an int64, or an int32, whose upper word is then itself."""
        at = self.address + Int64(token) * self.bytes
        low, high = read(at, Int32(0)), read(at + self.bytes - 4, Int32(0))
        wide = (Int64(high) << 32) | (Int64(low) & 0xFFFFFFFF)
        return wide if self.bytes == 8 else Int64(low)

    def has(self, slot: Int64) -> Boolean:
        return (slot >= 0) & (slot < self.count)


class Writer:
    """A thread's part of K or V: a chunk of some tokens."""

    def __init__(self, operand: Operand, slots: Slots, tokens: Int32, share, at_once: int, by_elements: bool) -> None:
        self.operand = operand
        self.slots = slots
        self.tokens = tokens
        self.first, self.step, self.several, self.chunk, self.busy = share
        self.at_once = at_once
        self.by_elements = by_elements

    @cute.jit
    def run(self):
        if self.busy and self.chunk < self.operand.chunks:
            if self.several != 0:
                self.move(self.at_once)
            else:
                self.move(1)

    def move(self, count: int) -> None:
        """All loads are on their way before the first store; those of tokens behind the last one are of the last."""
        operand = self.operand
        head = self.chunk // operand.columns
        column = self.chunk - head * operand.columns
        source = operand.tokens + (Int64(head) * operand.token_head + column * CHUNK) * ELEMENT_BYTES
        inside = head * operand.head + column * operand.chunk * (CHUNK if self.by_elements else 1)
        tokens = [self.first + i * self.step for i in range(count)]
        there = [cutlass.min(token, self.tokens - 1) for token in tokens]
        slots = [self.slots.of(token) for token in there]
        found = [load_16(source + Int64(token) * operand.token * ELEMENT_BYTES) for token in there]
        for token, slot, words in zip(tokens, slots, found, strict=True):
            self.store(token, slot, inside, words)

    def words_at(self, address: Int64) -> cute.Tensor:
        pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16)
        return cute.make_tensor(pointer, cute.make_layout(WORDS))

    @cute.jit
    def store(self, token: Int32, slot: Int64, inside: Int32, words):
        if (token < self.tokens) & self.slots.has(slot):
            self.put(slot, inside, words)

    def put(self, slot: Int64, inside: Int32, words: list[Int32]) -> None:
        operand = self.operand
        within = Int32(slot & self.slots.mask) * operand.row + inside
        address = operand.pages + ((slot >> self.slots.shift) * operand.outer + within) * ELEMENT_BYTES
        if const_expr(self.by_elements):
            step = Int64(operand.chunk) * ELEMENT_BYTES
            for i, word in enumerate(words):
                self.put_element(address + 2 * i * step, word)
                self.put_element(address + (2 * i + 1) * step, word >> 16)
            return
        values = cute.make_rmem_tensor(WORDS, Int32)
        for i, word in enumerate(words):
            values[i] = word
        cute.autovec_copy(values, self.words_at(address))

    def put_element(self, address: Int64, word: Int32) -> None:
        pointer = cute.make_ptr(Int16, address, cute.AddressSpace.gmem, assumed_align=ELEMENT_BYTES)
        cute.make_tensor(pointer, cute.make_layout(1))[0] = Int16(word)


@dsl_user_op
def load_16(address: Int64, *, loc=None, ip=None) -> list[Int32]:
    """16 bytes, here and now: a plain load is moved behind the test of the slot, which waits for another load."""
    result = llvm.inline_asm(
        llvm.StructType.get_literal([T.i32()] * WORDS),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Int32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(WORDS)]


class WriteKernel:
    """Compiles to one cubin for (layout, config)."""

    def __init__(self, layout: str, config: CopyConfig) -> None:
        self.by_columns = layout == "vllm"
        self.config = config

    @cute.jit
    def __call__(self, sizes: Int64, k: Int64, v: Int64, k_pages: Int64, v_pages: Int64, slots: Int64, stream):
        at = cute.make_ptr(Int64, sizes, cute.AddressSpace.generic, assumed_align=8)
        numbers = cute.make_tensor(at, cute.make_layout(len(WRITE_SIZES)))
        found = {name: numbers[i] for i, name in enumerate(WRITE_SIZES)}

        def of(*names):
            return tuple(Int32(found[name]) for name in names)

        def operand(name, tokens, pages):
            new = tokens, found[f"{name} token"], found[f"{name} token head"]
            inner = of(*(f"{name} {what}" for what in ("row", "head", "chunk", "columns", "chunks")))
            return *new, pages, found[f"{name} outer"], *inner

        tokens, groups, chunk_groups, abreast, width, several = of(
            "tokens", "ctas", "chunk groups", "abreast", "width", "several"
        )
        self.kernel(
            operand("k", k, k_pages),
            operand("v", v, v_pages),
            (slots, *of("slot bytes"), found["slots"], *of("page shift")),
            (tokens, abreast, width, several),
        ).launch(
            grid=(groups, chunk_groups, 2),
            block=(self.config.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, k, v, slots, numbers):
        tokens, abreast, width, several = numbers
        share = self._share(abreast, width, several)
        how = Slots(*slots), tokens, share, self.config.at_once
        Cta(Writer(Operand(*k), *how, False), Writer(Operand(*v), *how, self.by_columns)).run()

    def _share(self, abreast: Int32, width: Int32, several: Int32):
        """The first token of this thread and the step to its next one, whether it has several, its chunk of them, and
        whether it has any: `abreast` tokens of a CTA are side by side, and `width` chunks of each."""
        thread = cute.arch.thread_idx()[0]
        block, chunk_group, _ = cute.arch.block_idx()
        if const_expr(self.by_columns):
            column = thread // abreast
            local = thread - column * abreast
        else:
            local = thread // width
            column = thread - local * width
        first, step = block * abreast + local, cute.arch.grid_dim()[0] * abreast
        return first, step, several, chunk_group * width + column, (local < abreast) & (column < width)


class Cta:
    """One of K or V."""

    def __init__(self, k: Writer, v: Writer) -> None:
        self.k = k
        self.v = v

    @cute.jit
    def run(self):
        # The kernel before may still be writing the tokens, or reading the pages; the one behind waits here, too.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if cute.arch.block_idx()[2] == 0:
            self.k.run()
        else:
            self.v.run()
