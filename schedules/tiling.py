"""Block configs: tiles, stages, warpgroups and registers, and the table that they are picked from.

Every row of the table carries its reason and its measured costs; a head dim may have several, and a problem gets the
one that its lengths make the fastest. `BlockConfig.check` compares a config with the chip and says what does not fit,
before anything is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass

from schedules.domain import DOMAINS

WARPGROUP = 128  # threads
ROWS_PER_WARPGROUP = 64  # M of one wgmma


@dataclass(frozen=True)
class Chip:
    """What one multiprocessor offers (CUDA programming guide, compute capabilities)."""

    name: str
    smem_bytes: int  # dynamic shared memory one CTA may have
    registers: int  # 32-bit registers per multiprocessor
    max_registers_per_thread: int = 255


CHIPS = {
    "sm_90a": Chip("sm_90a", smem_bytes=227 * 1024, registers=64 * 1024),
}


@dataclass(frozen=True)
class BlockConfig:
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
    # O and the row sum are rescaled only when a row maximum grows by more (log2). Emulated over Gaussian inputs, the
    # largest error grows by up to 1.5, 1.9 and 2.1 times with 2, 4 and 8; 8 is 1% faster than 2 (H200, D 128, dense).
    rescale_above: float = 2.0

    @property
    def tile_m(self) -> int:
        """Query rows per CTA."""
        return self.consumers * ROWS_PER_WARPGROUP

    @property
    def threads(self) -> int:
        return (self.consumers + 1) * WARPGROUP

    def smem_bytes(self, element_bytes: int = 2) -> int:
        """Shared memory of one CTA: the three rings (O is staged in Q's), their barriers and the work tiles posted."""
        q = self.q_stages * self.tile_m * self.head_dim * element_bytes
        kv = 2 * self.stages * self.tile_n * self.head_dim * element_bytes
        barriers = 8 * 2 * (self.q_stages + 2 * self.stages) + 16 * self.q_stages
        return q + kv + 1024 * -(-barriers // 1024)  # tiles are aligned to the 1024 bytes of a swizzle atom

    def check(self, chip: Chip) -> str | None:
        """Why this config cannot run on `chip`, or None."""
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            return f"tile_n {self.tile_n} is not a multiple of 16 from 16 to 256 (the K of the PV wgmma)"
        if self.head_dim % 16 or not 16 <= self.head_dim <= 256:
            return f"head_dim {self.head_dim} is not a multiple of 16 from 16 to 256 (the K of the QK wgmma)"
        if not 1 <= self.consumers <= 3:
            return f"{self.consumers} consumer warpgroups: 1 to 3 fit beside the producer"
        if min(self.stages, self.q_stages) < 1:
            return f"{self.stages} stages of K and V and {self.q_stages} of Q: each ring needs 1"
        if not 0 <= self.rescale_above <= 8:  # also refuses NaN
            return f"rescale_above {self.rescale_above}: 0 to 8, past which the error grows to more than 2.1 times"
        if (need := self.smem_bytes()) > chip.smem_bytes:
            return f"{need} bytes of shared memory, {chip.name} has {chip.smem_bytes}"
        for registers in (self.producer_registers, self.consumer_registers):
            if registers % 8 or not 24 <= registers <= chip.max_registers_per_thread:
                return f"setmaxnreg {registers}: a multiple of 8 from 24 to {chip.max_registers_per_thread}"
        # setmaxnreg trades registers inside what the CTA was launched with, and waits for ever for more.
        launched = chip.registers // self.threads // 8 * 8 * (self.consumers + 1)
        wanted = self.producer_registers + self.consumers * self.consumer_registers
        if wanted > launched:
            return f"setmaxnreg wants {wanted} registers over the warpgroups, the CTA is launched with {launched}"
        accumulators = (self.tile_n + self.head_dim) // 2 + self.tile_n // 4  # S and O in float32, P in 16 bits
        if accumulators + 24 > self.consumer_registers:
            return f"S, P and O need {accumulators} registers, {self.consumer_registers} leave too few for the rest"
        return None


@dataclass(frozen=True)
class Cost:
    """Microseconds on an H200 in bfloat16, fitted by hand to rates of the suite `dense` (head dim 64: S = 256 to 16k,
    256: S = 256 to 1k). Of use beside those of other rows of the same head dim only: their ratios decide which row a
    problem gets."""

    tile: float  # that a KV tile takes a CTA
    start: float  # that a work tile takes besides


@dataclass(frozen=True)
class Choice:
    """A row of the table: a config for head dims up to `config.head_dim`, why it is there, and, where it has rivals,
    what it costs."""

    config: BlockConfig
    reason: str
    cost: Cost | None = None


@dataclass(frozen=True)
class Extent:
    """The run-time sizes that decide between the rows of a head dim. ValueError for an unknown mask and for a size
    that is not positive."""

    mask: str
    seqlen_q: int
    seqlen_k: int
    heads: int  # of the queries, over all batch entries
    multiprocessors: int

    def __post_init__(self) -> None:
        if self.mask not in DOMAINS:
            raise ValueError(f"mask is {self.mask!r}; one of {', '.join(map(repr, DOMAINS))} is needed")
        for name in ("seqlen_q", "seqlen_k", "heads", "multiprocessors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a positive number is needed")


_TWO = {"consumers": 2, "producer_registers": 24, "consumer_registers": 240}
_WIDE = {"consumers": 2, "producer_registers": 40, "consumer_registers": 232}
_THREE = {"consumers": 3, "producer_registers": 32, "consumer_registers": 160}

# The rows of one head dim stand together, the one for long sequences first.
SM90 = (
    Choice(
        BlockConfig(head_dim=64, tile_n=128, stages=4, q_stages=2, **_THREE),
        "O is small, so three warpgroups of 160 registers fit and each K and V tile is read for 192 queries",
        Cost(tile=1.5, start=1.1),
    ),
    Choice(
        BlockConfig(head_dim=64, tile_n=128, stages=4, q_stages=2, **_TWO),
        "256 queries are two tiles of 128, and one and a third of 192; under a causal mask the narrower diagonal saves "
        "more: S = 256 1.28 (causal 1.39) times as fast as with 192 queries, S = 1024 0.96 (1.13), 16k 0.81",
        Cost(tile=1.2, start=0.7),
    ),
    Choice(
        BlockConfig(head_dim=96, tile_n=128, stages=3, q_stages=2, **_TWO),
        "S, P and O need 144 registers: too many for three warpgroups of 160",
    ),
    Choice(
        BlockConfig(head_dim=128, tile_n=128, stages=2, q_stages=2, **_TWO),
        "on an H200 tile_n 144, 160 and 176, and three warpgroups, were no faster",
    ),
    Choice(
        BlockConfig(head_dim=192, tile_n=80, stages=2, q_stages=2, **_WIDE),
        "the widest tile_n whose two stages fit beside two Q slots; the producer spills with 24 registers",
    ),
    Choice(
        BlockConfig(head_dim=256, tile_n=80, stages=2, q_stages=1, **_WIDE),
        "the widest tile_n whose two stages fit beside one Q slot; tile_n 64 was 3% slower on an H200; the producer "
        "spills with 24 registers",
        Cost(tile=1.67, start=5.65),
    ),
    Choice(
        BlockConfig(head_dim=256, tile_n=48, stages=2, q_stages=2, **_WIDE),
        "the widest tile_n that fits beside two Q slots, so that the next Q is there when a work tile ends: S = 512 "
        "1.05 (causal 1.04) times as fast as with tile_n 80, S = 1024 0.96",
        Cost(tile=1.06, start=5.0),
    ),
    Choice(
        BlockConfig(head_dim=256, tile_n=32, stages=3, q_stages=2, **_WIDE),
        "256 keys are eight whole tiles of 32: S = 256 1.12 (causal 1.11) times as fast as with tile_n 80",
        Cost(tile=0.79, start=4.7),
    ),
)

TABLES = {"sm_90a": SM90}
SAMPLED = 6  # Q tiles at most that `predicted_us` looks at: it runs for every new shape of a call


def rows(head_dim: int, arch: str) -> tuple[Choice, ...]:
    """The rows for `head_dim` on `arch`: those of the narrowest tile that holds it. LookupError if there are none."""
    found = [row for row in TABLES[arch] if head_dim <= row.config.head_dim]
    if not found:
        raise LookupError(f"no block config of {arch} holds head dim {head_dim}")
    return tuple(row for row in found if row.config.head_dim == found[0].config.head_dim)


def choose(head_dim: int, arch: str, extent: Extent | None = None) -> BlockConfig:
    """The block config for `head_dim` on `arch`: the one predicted to be fastest, or without sizes the one for long
    sequences. LookupError if there is none."""
    candidates = rows(head_dim, arch)
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
    visits = [domain.visits(q_tile, extent.seqlen_q, extent.seqlen_k).total for q_tile in sample]
    mean, longest = (row.cost.start + row.cost.tile * count for count in (sum(visits) / len(visits), max(visits)))
    return max(longest, mean * q_tiles * extent.heads / extent.multiprocessors)
