"""Block configs: tiles, stages, warpgroups and registers, and the table that they are picked from.

Every row of the table carries its reason and its measured costs; a head dim may have several, and a problem gets the
one that its lengths make the fastest. `BlockConfig.check` compares a config with the chip and says what does not fit,
before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any, get_args

from schedules.domain import DOMAINS, Bounds
from schedules.splits import Split
from schedules.work import RaggedWork

WARPGROUP = 128  # threads
ONES = 8  # the smallest step of a wgmma's N
ROWS_PER_WARPGROUP = 64  # M of one wgmma
SWIZZLE_BYTES = (128, 64, 32)  # of the rows of a block in shared memory
ELEMENT_BYTES = 2
S_STAGES = 2  # tiles that paged attention has S or P of in tensor memory
TOLD_BYTES = 16  # of the number of the next work tile, where several producer warps need it
POSTED_BYTES = 4 * max(len(RaggedWork._fields), len(Split._fields))  # a work tile beside Q, at most


@dataclass(frozen=True)
class Chip:
    """What one multiprocessor offers (CUDA programming guide, compute capabilities)."""

    name: str
    smem_bytes: int  # dynamic shared memory one CTA may have
    registers: int  # 32-bit registers per multiprocessor
    max_registers_per_thread: int = 255
    tmem_columns: int = 0  # of tensor memory, 32 bits in each of 128 lanes


CHIPS = {
    name: Chip(name, smem_bytes=227 * 1024, registers=64 * 1024, tmem_columns=columns)
    for name, columns in (("sm_90a", 0), ("sm_100a", 512), ("sm_103a", 512))
}


def swizzle_bytes(elements: int) -> int:
    """The widest swizzle whose blocks `elements` are a multiple of, as CuTe's `make_smem_layout_a` and `_b` choose."""
    return next(width for width in SWIZZLE_BYTES if elements * ELEMENT_BYTES % width == 0)


def refuse_registers(chip: Chip, threads: int, registers: Sequence[int]) -> str | None:
    """Why the warpgroups of a CTA of so many threads cannot have these `setmaxnreg`, or None."""
    for count in registers:
        if count % 8 or not 24 <= count <= chip.max_registers_per_thread:
            return f"setmaxnreg {count}: a multiple of 8 from 24 to {chip.max_registers_per_thread}"
    # setmaxnreg trades registers inside what the CTA was launched with, and waits for ever for more.
    launched = chip.registers // threads // 8 * 8 * len(registers)
    if sum(registers) > launched:
        return f"setmaxnreg wants {sum(registers)} registers over the warpgroups, the CTA is launched with {launched}"
    return None


@dataclass(frozen=True)
class ValueSlots:
    """The slots of V in shared memory, in bytes from the first one's start.

    A slot is made of blocks, one behind the other: every key, and as many columns as a swizzle is wide. An MMA finds
    the next block of columns at a constant distance (PTX: leading dimension byte offset). With `ones` there is a block
    of ones at that distance from the last one: behind it in every slot, or, where a slot has one block only, once for
    all slots, at a distance that differs from slot to slot.
    """

    block: int
    blocks: int  # of V, a slot
    stages: int
    ones: bool

    @property
    def shared(self) -> bool:
        """There is one block of ones for all slots."""
        return self.ones and self.blocks == 1

    @property
    def slot(self) -> int:
        return self.block * (self.blocks + (self.ones and not self.shared))

    @property
    def bytes(self) -> int:
        return self.slot * self.stages + self.shared * self.block

    def leading(self, stage: int) -> int:
        """From a block of columns of a slot to the next."""
        return self.slot * (self.stages - stage) if self.shared else self.block

    def ones_at(self) -> list[int]:
        """Where blocks of ones begin."""
        ends = [self.bytes] if self.shared else [self.slot * (stage + 1) for stage in range(self.stages)]
        return [end - self.block for end in ends] if self.ones else []


class Tiles:
    """What block configs of every kind have."""

    head_dim: int  # of Q and K
    head_dim_v: int  # of V and O, 0 where it is that of Q and K

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def dims(self) -> str:
        """In names: "d192v128", or "d128" where there is one."""
        return f"d{self.head_dim}" + (f"v{self.head_dim_v}" if self.head_dim_v else "")

    @property
    def tmem_columns(self) -> int:
        """Of tensor memory, in use."""
        return 0

    @property
    def exact(self) -> bool:
        """Row sums are added up in float32, as LSEs need them."""
        return True

    def serves(self, lse: bool) -> bool:
        """Whether calls that want LSEs, or others, can have it."""
        return self.exact or not lse

    def holds(self, score: str) -> bool:
        """Whether its registers are enough for what is done to scores."""
        return True

    def takes(self, piece: int) -> bool:
        """Whether a forward kernel reads K and V from pages in pieces of so many keys, or if 0 not from pages."""
        return piece == 0


@dataclass(frozen=True)
class BlockConfig(Tiles):
    """How one cubin computes: part of the cache key.

    Lengths in elements. One producer warpgroup (one of its warps loads) and `consumers` warpgroups of 64 query rows.
    """

    head_dim: int  # of the tile; a smaller head dim is padded with zeros by TMA, in shared memory only
    tile_n: int  # keys per tile
    stages: int  # of the K ring and of the V ring
    q_stages: int  # of the Q ring: with 2, a work tile's O is stored beside the next one's first MMAs
    consumers: int  # warpgroups that attend
    producer_registers: int  # setmaxnreg, per thread
    consumer_registers: int
    # Columns of ones beside V's: the PV MMA then makes the row sums, of P as it was rounded. Without, they are added up
    # in float32 before P is rounded.
    ones: int = 0
    # Without ones, O and the row sum are rescaled only when a row maximum grows by more (log2). The weight of the
    # largest score is then rounded in O and not in the sum: emulated over Gaussian inputs, the largest error grows by
    # up to 1.5, 1.9 and 2.1 times with 2, 4 and 8.
    rescale_above: float = 2.0
    head_dim_v: int = 0  # of V and O, 0 where it is that of Q and K; padded like it

    @property
    def tile_m(self) -> int:
        """Query rows per CTA."""
        return self.consumers * ROWS_PER_WARPGROUP

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    @property
    def lends(self) -> bool:
        """O leaves through V's slots, one for each warpgroup: there is no second Q slot for it."""
        return self.q_stages == 1

    @property
    def q_slots(self) -> int:
        """Of 64 rows, over the warpgroups."""
        return self.consumers * self.q_stages

    @property
    def barriers(self) -> int:
        """A full and an empty one for each slot, and one for the O of each warpgroup to have left V."""
        return 2 * (self.q_slots + 2 * self.stages) + self.consumers

    @property
    def registers(self) -> tuple[int, ...]:
        """setmaxnreg of each role."""
        return self.producer_registers, self.consumer_registers

    @property
    def scores_per_thread(self) -> int:
        """Of a KV tile."""
        return self.tile_m * self.tile_n // (self.consumers * WARPGROUP)

    @property
    def exact(self) -> bool:
        return self.ones == 0

    def takes(self, piece: int) -> bool:
        return piece == 0 or self.tile_n % piece == 0

    def holds(self, score: str) -> bool:
        """160 are not for softcap and ALiBi together, nor for softcap where a row's maximum and sum are in registers,
        too."""
        return self.consumers < 3 or score in ("plain", "alibi") or (score == "softcap" and self.ones > 0)

    @property
    def value_slots(self) -> ValueSlots:
        width = swizzle_bytes(self.value_dim)
        return ValueSlots(self.tile_n * width, self.value_dim * ELEMENT_BYTES // width, self.stages, self.ones > 0)

    def smem_bytes(self) -> int:
        """Shared memory of one CTA: the rings (O is staged in Q's or V's), their barriers and the work tiles posted."""
        q = self.q_stages * self.tile_m * self.head_dim * ELEMENT_BYTES
        kv = self.stages * self.tile_n * self.head_dim * ELEMENT_BYTES + self.value_slots.bytes
        beside = 8 * self.barriers + POSTED_BYTES * self.q_slots + TOLD_BYTES
        return q + kv + 1024 * -(-beside // 1024)  # tiles are aligned to the 1024 bytes of a swizzle atom

    def check(self, chip: Chip) -> str | None:
        """Why this config cannot run on `chip`, or None."""
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            return f"tile_n {self.tile_n} is not a multiple of 16 from 16 to 256 (the K of the PV wgmma)"
        if self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            return f"head_dim {self.head_dim} is not a multiple of 16 from 16 to 256 (the K of the QK wgmma)"
        if self.head_dim_v % 16 or not 0 <= self.head_dim_v <= 256:
            return f"head_dim_v {self.head_dim_v} is not a multiple of 16 up to 256 (the N of the PV wgmma)"
        if self.value_dim > self.head_dim and not self.lends:
            return f"head_dim_v {self.head_dim_v}: O is wider than Q, and has no place over it (q_stages 1)"
        if not 1 <= self.consumers <= 3:
            return f"{self.consumers} consumer warpgroups: 1 to 3 fit beside the producer"
        if min(self.stages, self.q_stages) < 1:
            return f"{self.stages} stages of K and V and {self.q_stages} of Q: each ring needs 1"
        if self.lends and (self.stages != self.consumers or self.tile_n < ROWS_PER_WARPGROUP):
            return (
                f"q_stages 1: O leaves through V, so {self.consumers} stages are needed, one for each warpgroup, of "
                f"{ROWS_PER_WARPGROUP} keys at least; not {self.stages} of {self.tile_n}"
            )
        if self.ones not in (0, ONES):
            return f"ones {self.ones}: 0, or {ONES} columns"
        if not 0 <= self.rescale_above <= 8:  # also refuses NaN
            return f"rescale_above {self.rescale_above}: 0 to 8"
        if self.value_dim + self.ones > 256:
            return f"head_dim {self.value_dim} and {self.ones} columns of ones are more than 256, the N of the PV wgmma"
        if (need := self.smem_bytes()) > chip.smem_bytes:
            return f"{need} bytes of shared memory, {chip.name} has {chip.smem_bytes}"
        if reason := refuse_registers(
            chip, self.threads, (self.producer_registers, *[self.consumer_registers] * self.consumers)
        ):
            return reason
        accumulators = (self.tile_n + self.value_dim + self.ones) // 2 + self.tile_n // 4  # S and O, and P in 16 bits
        if accumulators + 24 > self.consumer_registers:
            return f"S, P and O need {accumulators} registers, {self.consumer_registers} leave too few for the rest"
        return None


@dataclass(frozen=True)
class CopyConfig:
    """The same of a kernel that only copies."""

    threads: int = 256  # of a CTA
    at_once: int = 4  # chunks of 16 bytes that a thread has in flight, where there are enough for all of the chip's

    def smem_bytes(self) -> int:
        return 0


@dataclass(frozen=True)
class Cost:
    """Microseconds on an H200 in bfloat16, fitted to rates at S = 256 to 2k, dense and causal; those of rows for LSEs
    to rates of earlier kernels. Of use beside those of other rows of the same head dim only: their ratios decide which
    row a problem gets."""

    tile: float  # that a KV tile takes a CTA
    start: float  # that a work tile takes besides


@dataclass(frozen=True)
class Choice:
    """A row of the table: a config for head dims up to `config.head_dim`, why it is there, and, where it has rivals,
    what it costs."""

    config: TiledConfig
    reason: str
    cost: Cost | None = None


@dataclass(frozen=True)
class TmemConfig(Tiles):
    """How one cubin computes whose accumulators are in tensor memory (`schedules.forward_tmem`): part of the cache key.
    Lengths in elements."""

    head_dim: int  # of the tile; a smaller head dim is padded with zeros by TMA, in shared memory only
    tile_n: int  # keys per tile
    stages: int  # of the K ring and of the V ring
    q_stages: int  # of the ring of each Q tile
    o_stages: int  # Q tiles of O on their way to global memory
    softmax_registers: int  # setmaxnreg, per thread, of the two warpgroups of the softmax,
    correct_registers: int  # of the one that corrects O,
    other_registers: int  # and of the warps that load, multiply and store
    # Of 128 exponentials those that the FMA pipe computes, by a polynomial.
    polynomials: int = 0
    # log2; by how much a row's maximum outgrows its reference before O shrinks: see `BlockConfig.rescale_above`.
    rescale_above: float = 2.0
    head_dim_v: int = 0  # of V and O, 0 where it is that of Q and K; padded like it
    q_rows: int = 128  # of one of the two Q tiles

    @property
    def tile_m(self) -> int:
        """Query rows per CTA."""
        return 2 * self.q_rows

    @property
    def lends(self) -> bool:
        """O leaves through slots of its own, not through V's."""
        return False

    @property
    def threads(self) -> int:
        return 4 * WARPGROUP

    @property
    def registers(self) -> tuple[int, ...]:
        """setmaxnreg of each role."""
        return self.softmax_registers, self.correct_registers, self.other_registers

    @property
    def scores_per_thread(self) -> int:
        """Of a KV tile: a row."""
        return self.tile_n

    @property
    def q_slots(self) -> int:
        """Over both Q tiles."""
        return 2 * self.q_stages

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """Slots in shared memory of Q, K, V and O, and the bytes of one."""
        row, value_row = self.head_dim * ELEMENT_BYTES, self.value_dim * ELEMENT_BYTES
        return (
            (self.q_slots, self.q_rows * row),
            (self.stages, self.tile_n * row),
            (self.stages, self.tile_n * value_row),
            (self.o_stages, self.q_rows * value_row),
        )

    @property
    def barriers(self) -> int:
        """A full and an empty one for each slot, and for the factors of each Q tile, and three signals for each."""
        return 2 * (self.q_slots + 2 * self.stages + self.o_stages + 2) + 6

    @property
    def tmem_columns(self) -> int:
        """S and O of both Q tiles; P is where S was."""
        return 2 * (self.tile_n + self.value_dim)

    def smem_bytes(self) -> int:
        """Shared memory of one CTA: tiles, barriers, the address of tensor memory, the work tiles posted, and two
        numbers a row for the correction."""
        beside = 8 * self.barriers + 16 + POSTED_BYTES * self.q_slots + 2 * 2 * 4 * self.q_rows
        return sum(count * size for count, size in self.tiles) + 1024 * -(-beside // 1024)

    def check(self, chip: Chip) -> str | None:
        """Why this config cannot run on `chip`, or None."""
        for name in ("head_dim", "value_dim"):
            if getattr(self, name) % 32 or not 32 <= getattr(self, name) <= 256:
                return f"{name} {getattr(self, name)} is not a multiple of 32 from 32 to 256"
        if self.q_rows != 128 or self.tile_n != 128:
            return f"tiles of {self.q_rows} queries and {self.tile_n} keys: 128 of each, a row a thread"
        if min(self.stages, self.q_stages, self.o_stages) < 1:
            return f"{self.stages}, {self.q_stages} and {self.o_stages} stages: each ring needs 1"
        if not 0 <= self.polynomials <= 128 or self.polynomials % 2:
            return f"{self.polynomials} exponentials of 128 by a polynomial: 0 to 128, in pairs"
        if not 0 <= self.rescale_above <= 8:  # also refuses NaN
            return f"rescale_above {self.rescale_above}: 0 to 8"
        if (columns := self.tmem_columns) > chip.tmem_columns:
            return f"{columns} columns of tensor memory, {chip.name} has {chip.tmem_columns}"
        if (need := self.smem_bytes()) > chip.smem_bytes:
            return f"{need} bytes of shared memory, {chip.name} has {chip.smem_bytes}"
        return refuse_registers(chip, self.threads, (self.softmax_registers, *self.registers))


@dataclass(frozen=True)
class TmemPagedConfig(Tiles):
    """The same of paged attention (`schedules.decode_tmem`): a warpgroup fetches, one decodes, and of another one a
    warp multiplies."""

    head_dim: int
    tile_n: int
    stages: int
    q_stages: int
    fetch_registers: int  # setmaxnreg, per thread
    decode_registers: int
    other_registers: int
    head_dim_v: int = 0
    rescale_above: float = 2.0
    tile_m: int = WARPGROUP  # query rows, one for each thread that decodes

    @property
    def registers(self) -> tuple[int, ...]:
        """setmaxnreg of each role."""
        return self.fetch_registers, self.decode_registers, self.other_registers

    @property
    def scores_per_thread(self) -> int:
        """Of a KV tile: a row."""
        return self.tile_n

    @property
    def threads(self) -> int:
        return 3 * WARPGROUP

    @property
    def tiles(self) -> tuple[tuple[int, int], ...]:
        """Slots in shared memory of Q, K and V, and the bytes of one."""
        row, value_row = self.head_dim * ELEMENT_BYTES, self.value_dim * ELEMENT_BYTES
        return (
            (self.q_stages, self.tile_m * row),
            (self.stages, self.tile_n * row),
            (self.stages, self.tile_n * value_row),
        )

    @property
    def barriers(self) -> int:
        """A full and an empty one for each slot, one for each S, and two signals."""
        return 2 * (self.q_stages + 2 * self.stages) + S_STAGES + 2

    @property
    def tmem_columns(self) -> int:
        """S, or P, of two tiles, and O."""
        return S_STAGES * self.tile_n + self.value_dim

    def smem_bytes(self) -> int:
        """Shared memory of one CTA: tiles, barriers, the address of tensor memory, the splits posted, and how many
        parts have arrived."""
        beside = 8 * self.barriers + 2 * 16 + POSTED_BYTES * self.q_stages
        return sum(count * size for count, size in self.tiles) + 1024 * -(-beside // 1024)

    def check(self, chip: Chip) -> str | None:
        """Why this config cannot run on `chip`, or None."""
        for name in ("head_dim", "value_dim"):
            if getattr(self, name) % 32 or not 32 <= getattr(self, name) <= 256:
                return f"{name} {getattr(self, name)} is not a multiple of 32 from 32 to 256"
        if self.tile_m != WARPGROUP:
            return f"tiles of {self.tile_m} queries: {WARPGROUP}, a row a thread"
        if self.tile_n % 32 or not 32 <= self.tile_n <= 128:
            return f"tiles of {self.tile_n} keys: 32, 64, 96 or 128, a quarter of them for each warp that fetches"
        if min(self.stages, self.q_stages) < 1:
            return f"{self.stages} and {self.q_stages} stages: each ring needs 1"
        if not 0 <= self.rescale_above <= 8:  # also refuses NaN
            return f"rescale_above {self.rescale_above}: 0 to 8"
        if (columns := self.tmem_columns) > chip.tmem_columns:
            return f"{columns} columns of tensor memory, {chip.name} has {chip.tmem_columns}"
        if (need := self.smem_bytes()) > chip.smem_bytes:
            return f"{need} bytes of shared memory, {chip.name} has {chip.smem_bytes}"
        return refuse_registers(chip, self.threads, self.registers)


TiledConfig = BlockConfig | TmemConfig | TmemPagedConfig
AnyConfig = TiledConfig | CopyConfig


def config_of(fields: Mapping[str, Any]) -> TiledConfig:
    """The block config with these fields, of the kind that has just these. ValueError if none has."""
    for kind in get_args(TiledConfig):
        if fields.keys() == {field.name for field in dataclass_fields(kind)}:
            return kind(**fields)
    raise ValueError(f"no kind of block config has the fields {', '.join(fields)}")


@dataclass(frozen=True)
class Extent:
    """What of a call decides between the rows of a head dim. ValueError for an unknown mask and for a size that is not
    positive."""

    mask: str
    seqlen_q: int
    seqlen_k: int
    heads: int  # of the queries, over all batch entries
    multiprocessors: int
    lse: bool = False  # LSEs are wanted: of row sums in float32, so without ones
    left: int = 0  # of a window: `schedules.domain.Bounds`
    right: int = 0

    def __post_init__(self) -> None:
        if self.mask not in DOMAINS:
            raise ValueError(f"mask is {self.mask!r}; one of {', '.join(map(repr, DOMAINS))} is needed")
        for name in ("seqlen_q", "seqlen_k", "heads", "multiprocessors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a positive number is needed")


_ONES: dict[str, Any] = {"ones": ONES}
_TWO = {"consumers": 2, "producer_registers": 24, "consumer_registers": 240}
_WIDE = {"consumers": 2, "producer_registers": 40, "consumer_registers": 232}
_THREE = {"consumers": 3, "producer_registers": 32, "consumer_registers": 160}

# The rows of one head dim stand together: first those with ones, then those for calls that want LSEs, and of either the
# one for long sequences first.
SM90 = (
    Choice(
        BlockConfig(head_dim=64, tile_n=128, stages=4, q_stages=2, **_ONES, **_THREE),
        "O is small, so three warpgroups of 160 registers fit and each K and V tile is read for 192 queries; with two "
        "warpgroups tile_n 176 and 192 were 0.87 and 0.86 times as fast",
        Cost(tile=1.3, start=1.6),
    ),
    Choice(
        BlockConfig(head_dim=64, tile_n=128, stages=4, q_stages=2, **_ONES, **_TWO),
        "256 queries are two tiles of 128, and one and a third of 192; under a causal mask the narrower diagonal saves "
        "more: causal S = 1024 1.12 times as fast as with 192 queries, dense 0.95, 16k 0.82",
        Cost(tile=1.0, start=1.4),
    ),
    Choice(
        BlockConfig(head_dim=64, tile_n=128, stages=4, q_stages=2, **_THREE),
        "for calls that want LSEs, of row sums in float32: the same without columns of ones",
        Cost(tile=1.5, start=1.1),
    ),
    Choice(
        BlockConfig(head_dim=64, tile_n=128, stages=4, q_stages=2, **_TWO),
        "for calls that want LSEs, of row sums in float32: the same without columns of ones. S = 256 1.28 (causal "
        "1.39) times as fast as with 192 queries, S = 1024 0.96 (1.13), 16k 0.81",
        Cost(tile=1.2, start=0.7),
    ),
    Choice(
        BlockConfig(head_dim=96, tile_n=128, stages=3, q_stages=2, **_ONES, **_TWO),
        "S, P and O need 148 registers: too many for three warpgroups of 160",
    ),
    Choice(
        BlockConfig(head_dim=96, tile_n=128, stages=3, q_stages=2, **_TWO),
        "for calls that want LSEs, of row sums in float32: the same without columns of ones",
    ),
    Choice(
        BlockConfig(head_dim=128, tile_n=128, stages=2, q_stages=2, **_ONES, **_TWO),
        "the widest tile_n that fits beside two Q slots and the ones",
        Cost(tile=1.26, start=2.6),
    ),
    Choice(
        BlockConfig(head_dim=128, tile_n=112, stages=2, q_stages=2, **_ONES, **_TWO),
        "513 to 560 keys are five tiles of either width: 1.08 times as fast, 592 (five against six) 0.94",
        Cost(tile=1.22, start=2.2),
    ),
    Choice(
        BlockConfig(head_dim=128, tile_n=128, stages=2, q_stages=2, **_TWO),
        "for calls that want LSEs, of row sums in float32: without columns of ones. tile_n 144, 160 and 176, and three "
        "warpgroups, were no faster",
    ),
    Choice(
        BlockConfig(head_dim=192, head_dim_v=128, tile_n=112, stages=2, q_stages=1, **_ONES, **_WIDE),
        "the widest tile_n that fits beside one Q slot and the ones; two Q slots would leave room for tile_n 80",
    ),
    Choice(
        BlockConfig(head_dim=192, head_dim_v=128, tile_n=128, stages=2, q_stages=1, **_WIDE),
        "for calls that want LSEs, of row sums in float32: the same without columns of ones",
    ),
    Choice(
        BlockConfig(head_dim=192, tile_n=64, stages=2, q_stages=2, **_ONES, **_WIDE),
        "the widest tile_n whose two stages fit beside two Q slots and the ones: 1.05 (causal 1.03) times as fast as "
        "tile_n 80 without ones",
    ),
    Choice(
        BlockConfig(head_dim=192, tile_n=80, stages=2, q_stages=2, **_WIDE),
        "for calls that want LSEs, of row sums in float32: the widest tile_n whose two stages fit beside two Q slots "
        "without columns of ones; the producer spills with 24 registers",
    ),
    Choice(
        BlockConfig(head_dim=256, tile_n=80, stages=2, q_stages=1, **_WIDE),
        "the widest tile_n whose two stages fit beside one Q slot; the producer spills with 24 registers. Columns of "
        "ones do not fit into one wgmma",
        Cost(tile=1.68, start=4.9),
    ),
    Choice(
        BlockConfig(head_dim=256, tile_n=64, stages=2, q_stages=1, **_WIDE),
        "the narrower diagonal and lengths that are multiples of 64: S = 256 1.07 (causal 1.04) times as fast as with "
        "tile_n 80, S = 512 1.02 (1.05), S = 1024 0.98 (1.01), 4k 1.00. Two Q slots beside tile_n 48 or 32 were slower",
        Cost(tile=1.37, start=5.1),
    ),
)

# With tensor memory. Registers, of the softmax, the correction and the others: with 192, 80 and 48 a window's softmax
# spills, with 200, 64 and 48 that and the correction at D 64. Of 128 exponentials the FMA pipe has 16. There is no row
# for D 256, whose two tiles of O alone have 512 columns. Nothing was measured, so a head dim has one row.
_TMEM = {"tile_n": 128, "q_stages": 1, "polynomials": 16}
_TMEM |= {"softmax_registers": 200, "correct_registers": 72, "other_registers": 40}
SM100 = (
    Choice(
        TmemConfig(head_dim=64, stages=5, o_stages=2, **_TMEM),
        "two Q tiles of 128, a row a thread, and as many stages as fit beside a slot of O for each",
    ),
    Choice(
        TmemConfig(head_dim=96, stages=3, o_stages=1, **_TMEM),
        "two Q tiles of 128, a row a thread, and as many stages as fit beside one slot of O",
    ),
    Choice(
        TmemConfig(head_dim=128, stages=2, o_stages=1, **_TMEM),
        "two Q tiles of 128, a row a thread: S and O fill tensor memory, two stages and a slot of O shared memory",
    ),
)

TABLES = {"sm_90a": SM90, "sm_100a": SM100, "sm_103a": SM100}

# For paged attention of a few queries: one warpgroup of 64 rows attends, one copies. Tiles of 32 KB or so, of which so
# many in flight hide the memory's latency (more make it longer, and the CTAs end less evenly: perf/NOTES.md). Neither
# warpgroup gives registers away.
_ONE = {"consumers": 1, "producer_registers": 248, "consumer_registers": 248}
_PAGED_REASON = (
    "about 128 KB of K and V in flight: at D 64, 128 and 256 at least as fast as 96 and 160 to 192 KB in most of the "
    "suite `decode` (perf/NOTES.md); with other head dims not compared"
)
PAGED_SM90 = tuple(
    Choice(BlockConfig(head_dim, tile_n, stages, q_stages=2, head_dim_v=head_dim_v, **_ONE), _PAGED_REASON)
    for head_dim, head_dim_v, tile_n, stages in (
        (64, 0, 128, 4),
        (128, 64, 64, 5),
        (128, 0, 64, 4),
        (192, 128, 64, 4),
        (192, 0, 32, 5),
        (256, 0, 32, 4),
    )
)

_PAGED_SM100_REASON = (
    "Blackwell reads 1.67 times as fast as Hopper, which has 128 KB in flight: about 160 KB, which is what fits beside "
    "the rows of Q at most head dims; reckoned, never measured"
)
PAGED_SM100 = tuple(
    Choice(TmemPagedConfig(head_dim, tile_n, stages, q_stages, 200, 208, 96, head_dim_v), _PAGED_SM100_REASON)
    for head_dim, head_dim_v, tile_n, stages, q_stages in (
        (64, 0, 128, 5, 2),
        (128, 64, 64, 6, 2),
        (128, 0, 64, 5, 2),
        (192, 128, 64, 4, 1),
        (192, 0, 32, 7, 1),
        (256, 0, 32, 5, 1),
    )
)
# Of the architectures that have kernels for it.
PAGED_TABLES = {"sm_90a": PAGED_SM90, "sm_100a": PAGED_SM100, "sm_103a": PAGED_SM100}
SAMPLED = 6  # Q tiles at most that `predicted_us` looks at: it runs for every new shape of a call


def tunable(arch: str) -> bool:
    """Whether the forward kernels of `arch` have block configs that were measured, and others that can be."""
    return all(isinstance(row.config, BlockConfig) for row in TABLES[arch])


def rows(head_dim: int, arch: str, head_dim_v: int = 0, paged: bool = False) -> tuple[Choice, ...]:
    """The rows for `head_dim`, of V `head_dim_v` if that is not 0, on `arch`: those of the narrowest tiles that hold
    them. LookupError if there are none."""

    def dims(row: Choice) -> tuple[int, int]:
        return row.config.head_dim, row.config.value_dim

    needed = head_dim, head_dim_v or head_dim
    table = (PAGED_TABLES if paged else TABLES).get(arch, ())
    found = [row for row in table if all(n <= has for n, has in zip(needed, dims(row), strict=True))]
    if not found:
        raise LookupError(f"no block config of {arch} holds head dims {needed[0]} and {needed[1]}")
    narrowest = min((dims(row) for row in found), key=sum)
    return tuple(row for row in found if dims(row) == narrowest)


def producer_warps(piece: int) -> int:
    """How many share the copies of a tile, of `piece` keys each, or 0 for whole ones. D 128 has 32 of 16 keys, and is
    0.89 as fast as with whole tiles if one warp issues them, 0.95 if four do; 8 of 64 keys are one warp's work."""
    return 4 if 0 < piece < 64 else 1


def for_pages(config: TiledConfig) -> TiledConfig:
    """The same where K and V are in pages: a producer that looks these up spills with 24 registers."""
    if not isinstance(config, BlockConfig) or config.producer_registers >= _THREE["producer_registers"]:
        return config
    return replace(config, **_WIDE)


def rivals(head_dim: int, arch: str, lse: bool, head_dim_v: int = 0) -> tuple[Choice, ...]:
    """Those of them for calls that want LSEs, or for others: exact ones, or those that are not, where there are any."""
    found = rows(head_dim, arch, head_dim_v)
    return tuple(row for row in found if row.config.exact == lse) or found


def choose(
    head_dim: int, arch: str, extent: Extent | None = None, head_dim_v: int = 0, score: str = "plain"
) -> TiledConfig:
    """The block config for `head_dim` on `arch`: the one predicted to be fastest, or without sizes the one for long
    sequences and no LSE. LookupError if there is none."""
    found = rivals(head_dim, arch, extent is not None and extent.lse, head_dim_v)
    candidates = [row for row in found if row.config.holds(score)]
    if extent is None or len(candidates) == 1:
        return candidates[0].config
    return min(candidates, key=lambda row: predicted_us(row, extent)).config


def predicted_us(row: Choice, extent: Extent) -> float:
    """Microseconds on an H200: the multiprocessors share the work tiles evenly, but none ends before its longest."""
    if row.cost is None:
        raise ValueError(f"{row.config} has no measured cost")
    domain = DOMAINS[extent.mask](row.config.tile_m, row.config.tile_n)
    q_tiles = -(-extent.seqlen_q // row.config.tile_m)
    sample = range(0, q_tiles, -(-q_tiles // SAMPLED))
    bounds = Bounds(extent.seqlen_q, extent.seqlen_k, extent.left, extent.right)
    visits = [domain.visits(q_tile, bounds).total for q_tile in sample]
    mean, longest = (row.cost.start + row.cost.tile * count for count in (sum(visits) / len(visits), max(visits)))
    return max(longest, mean * q_tiles * extent.heads / extent.multiprocessors)
