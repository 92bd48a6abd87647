"""What the forward kernels for Blackwell should cost on a B200, in cycles: a model on paper, not confirmed.

Instructions come from compiled kernels (perf/resources-blackwell.json), visits and the order of work from `schedules`,
rates from `RATES`. Three steps:

    Pipes      busy cycles of each unit of a multiprocessor for a KV tile, 256 queries by 128 keys
    Stages     how long a Q tile's softmax takes on its own, and what of it only one of the two Q tiles can do at a time
    duration   of work tiles one behind the other, by the order in which `schedules.forward_tmem` issues and waits
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from perf.peers_blackwell import MULTIPROCESSORS, Code, Row
from schedules.domain import DOMAINS, Bounds
from schedules.tiling import ELEMENT_BYTES
from schedules.work import head_group, work_of

WARP = 32
Q_TILES, ROWS, KEYS = 2, 128, 128  # of a CTA; of a Q tile; of a KV tile
WARPS = 4  # of a Q tile's softmax, one on each scheduler, and of the correction
CLOCK = 1.85e9  # Hz
SCORE_BYTES = 4


class Rate(NamedTuple):
    """Of one multiprocessor, per cycle."""

    value: float
    unit: str
    source: str
    refuted: str  # by what, in a profile or a microbenchmark on a B200


PAPER = "FlashAttention-4, arXiv:2603.05451"
GUIDE = "CUDA C++ Programming Guide, throughput of arithmetic instructions"
RATES = {
    "tensor": Rate(
        8192,
        "FLOP, bf16",
        PAPER,
        "a kernel of nothing but 128x128x16 MMAs that takes other than 64 cycles for each",
    ),
    "MUFU": Rate(16, "EX2", f"{PAPER}; {GUIDE}", "a loop of MUFU.EX2 in 8 warps that takes other than 2 cycles a warp"),
    "FMA": Rate(
        128,
        "FP32 lanes; an FFMA2 takes two, an IMAD as well",
        GUIDE,
        "FFMA2 at more than one warp every 2 cycles of a scheduler; then the polynomial is cheaper than here",
    ),
    "ALU": Rate(
        64,
        "lanes: maxima, comparisons, selects, logic, conversions to 16 bits",
        f"{GUIDE}; that FMNMX3 and F2FP count as one of them each is assumed",
        "F2FP or FMNMX3 on the XU pipe, or at other than one warp every 2 cycles of a scheduler",
    ),
    "issue": Rate(4, "warp instructions", "four schedulers, one instruction each", "`smsp__issue_active` above 1"),
    "shared memory": Rate(
        128,
        "bytes: operands of MMAs, and what TMA writes",
        PAPER,
        "operands read once for several MMAs, or TMA writing beside their reads: less than counted here",
    ),
    "tensor memory": Rate(
        512,
        "bytes between it and registers: one column of 4 bytes for each of 128 lanes",
        "assumed; no figure of the vendor's",
        "an LDTM.x32 that takes more than 32 cycles of a scheduler",
    ),
    "L2": Rate(64, "bytes", "assumed to be a Hopper multiprocessor's", "`lts__t_bytes` a cycle at its limit"),
}
HBM_BYTES_PER_SECOND = 8e12  # NVIDIA's data sheet of the DGX B200, as the next
DENSE_FLOPS_PER_SECOND = 2.25e15  # bfloat16
L2_BYTES = 126 * 2**20  # as reported for a B200; only the order of work depends on it

# Assumed, all in cycles. Nobody publishes the first two; the page says how far the results depend on them.
HOP = 100  # from the MMA's end to the first score in a register, and from the last weight to the start of PV
HOPS = (50, 100, 200)
LOAD = 1000  # until a tile that TMA was told to load is there
LAUNCH = 4000  # of a kernel: barriers, tensor memory, the first loads from HBM

FMA_LANES = {"FFMA2": 2, "FADD2": 2, "FMUL2": 2, "IMAD": 2, "FFMA": 1, "FADD": 1, "FMUL": 1, "HFMA2": 1}
ALU = frozenset(
    "FMNMX FMNMX3 VIMNMX VIMNMX3 F2FP FSETP ISETP FSEL SEL LOP3 PLOP3 SHF LEA IADD IADD3 VIADD MOV PRMT R2P BMSK SGXT "
    "VIADDMNMX".split()
)


# -- busy cycles of a KV tile ------------------------------------------------------------------------------------------


def alu_cycles(opcodes: Mapping[str, int]) -> float:
    """Of a multiprocessor's ALU pipes, for one warp."""
    return sum(n for name, n in opcodes.items() if name in ALU) * WARP / RATES["ALU"].value


def pipes(code: Code) -> dict[str, float]:
    """Cycles of a multiprocessor that one warp's round of a loop takes of each pipe and of the issue slots."""
    lanes = sum(n * FMA_LANES.get(name, 0) for name, n in code.opcodes.items())
    return {
        "MUFU": code.opcodes.get("MUFU", 0) * WARP / RATES["MUFU"].value,
        "FMA": lanes * WARP / RATES["FMA"].value,
        "ALU": alu_cycles(code.opcodes),
        "issue": code.instructions / RATES["issue"].value,
    }


def mma(head_dim: int) -> float:
    """Cycles of one product of a Q tile and a KV tile: QK, or PV."""
    return 2 * ROWS * KEYS * head_dim / RATES["tensor"].value


def tile_bytes(head_dim: int) -> int:
    """Of K, or of V."""
    return KEYS * head_dim * ELEMENT_BYTES


def busy(row: Row, head_dim: int, masked: bool = False) -> dict[str, float]:
    """Cycles that each unit is busy with a KV tile of both Q tiles. Of other roles than the softmax our kernels alone
    have a row; O does not shrink."""
    softmax = pipes(row.masked[0] if masked else row.body)
    found = {"tensor": 2 * Q_TILES * mma(head_dim)}
    found |= {name: Q_TILES * WARPS * cycles for name, cycles in softmax.items()}
    beside = [(row.roles[role], warps) for role, warps in (("watch", WARPS), ("multiply", 1)) if role in row.roles]
    beside += [(row.roles["load"], 2)] if "load" in row.roles else []  # K and V
    for code, warps in beside:
        for name, cycles in pipes(code).items():
            found[name] += warps * cycles
    q, kv = ROWS * head_dim * ELEMENT_BYTES, tile_bytes(head_dim)
    found["shared memory"] = (Q_TILES * (q + 2 * kv) + 2 * kv) / RATES["shared memory"].value  # P is in tensor memory
    weights = KEYS * (SCORE_BYTES + ELEMENT_BYTES)
    found["tensor memory"] = Q_TILES * ROWS * weights / RATES["tensor memory"].value
    found["L2"] = 2 * kv / RATES["L2"].value
    return found


# -- a Q tile's softmax ------------------------------------------------------------------------------------------------


class Stages(NamedTuple):
    """Cycles of a Q tile's softmax of a KV tile, one behind the other."""

    before: float  # scores into registers, masks, the row maximum: the other Q tile's exponentials run meanwhile
    exponentials: float  # and what can be done beside them; one Q tile at a time, for it fills a pipe
    after: float  # the last weights into tensor memory


def stages(code: Code) -> Stages:
    """The maximum is what has FMNMX3, and masks are comparisons and selects; the weights are stored in halves."""
    kinds, alu = code.kinds, WARP / RATES["ALU"].value
    scores = ROWS * KEYS * SCORE_BYTES / RATES["tensor memory"].value
    first = (code.opcodes.get("FMNMX3", 0) + kinds.get("compare", 0) + kinds.get("select", 0)) * alu
    rest = pipes(code)
    rest["ALU"] -= min(first, rest["ALU"])
    weights = ROWS * KEYS * ELEMENT_BYTES / RATES["tensor memory"].value
    return Stages(scores + WARPS * first, WARPS * max(rest.values()), weights / 2)


@dataclass(frozen=True)
class Kernel:
    """What `duration` needs of one."""

    mma: float
    body: Stages
    masked: Stages
    floor: float  # the busiest unit's cycles a KV tile
    finish: float  # of the correction, for O of a Q tile
    hop: float = HOP

    @classmethod
    def of(cls, row: Row, head_dim: int, hop: float = HOP) -> Kernel:
        masked = stages(row.masked[0]) if row.masked else stages(row.body)
        finish = ROWS * head_dim * (SCORE_BYTES / 512 + ELEMENT_BYTES / 128)  # from tensor into shared memory
        return cls(mma(head_dim), stages(row.body), masked, max(busy(row, head_dim).values()), finish, hop)

    @property
    def period(self) -> float:
        """Cycles a KV tile in the steady state."""
        long, short = (duration(self, n, 0) for n in (24, 16))
        return (long - short) / 8


# -- work tiles --------------------------------------------------------------------------------------------------------


@functools.cache
def duration(kernel: Kernel, body: int, masked: int) -> float:
    """Cycles from one work tile to the next of so many KV tiles. Long ones go on at their steady pace."""
    steady = 24
    if body > steady:
        return duration(kernel, steady, masked) + (body - steady) * kernel.period
    tiles = [kernel.body] * body + [kernel.masked] * masked
    once, twice = (_run(kernel, tiles, times) for times in (2, 3))
    return max(twice - once, kernel.floor * len(tiles))


def _run(kernel: Kernel, tiles: list[Stages], times: int) -> float:
    """When the last of `times` equal work tiles is done.

    The tensor core does what was issued in its order (`Multiply`): QK of both Q tiles, then PV and the next QK of
    either, in turns. The exponentials of the Q tiles take turns, too.
    """
    tensor = exponentials = correct = loaded = 0.0
    scores, free = [0.0] * Q_TILES, [0.0] * Q_TILES  # S is there; O has been read
    for _ in range(times):
        for i in range(Q_TILES):
            tensor = scores[i] = max(tensor, loaded) + kernel.mma
        for position, tile in enumerate(tiles):
            weights = []
            for i in range(Q_TILES):
                start = max(exponentials, scores[i] + kernel.hop + tile.before)
                exponentials = start + tile.exponentials
                weights.append(exponentials + tile.after + kernel.hop)
            for i in range(Q_TILES):
                tensor = max(tensor, weights[i], free[i] if position == 0 else 0.0) + kernel.mma
                if position + 1 < len(tiles):
                    tensor = scores[i] = tensor + kernel.mma
                else:
                    correct = free[i] = max(correct, tensor + kernel.hop) + kernel.finish
            if position + 2 == len(tiles) or len(tiles) == 1:
                loaded = tensor + LOAD  # Q is free behind its last QK
    return max(free)


class Problem(NamedTuple):
    head_dim: int
    mask: str
    seqlen: int
    batch: int
    heads: int

    @property
    def flops(self) -> int:
        pairs = self.seqlen * (self.seqlen + 1) // 2 if self.mask == "causal" else self.seqlen**2
        return 4 * self.head_dim * pairs * self.batch * self.heads


class Prediction(NamedTuple):
    cycles: float
    share: float  # of the tensor cores' peak
    balance: float  # mean load of a multiprocessor over that of the busiest

    @property
    def tflops(self) -> float:
        return self.share * peak() / 1e12


def peak(clock: float = CLOCK) -> float:
    return MULTIPROCESSORS * RATES["tensor"].value * clock


@functools.cache
def predict(kernel: Kernel, problem: Problem) -> Prediction:
    """CTAs take work tiles in the kernel's order, each the next one when it is through with its own."""
    domain = DOMAINS[problem.mask](Q_TILES * ROWS, KEYS)
    bounds = Bounds(problem.seqlen, problem.seqlen)
    q_tiles = -(-problem.seqlen // domain.tile_m)
    bytes_per_key = 2 * problem.head_dim * ELEMENT_BYTES
    group = head_group(problem.mask == "causal", problem.seqlen, bytes_per_key, L2_BYTES)
    visits = [domain.visits(q_tile, bounds) for q_tile in range(q_tiles)]
    costs = [duration(kernel, found.total - found.right, found.right) for found in visits]
    ctas = [float(LAUNCH)] * MULTIPROCESSORS
    for index in range(q_tiles * problem.heads * problem.batch):
        work = work_of(index, q_tiles, problem.heads, problem.batch, group)
        heapq.heapreplace(ctas, ctas[0] + costs[work.q_tile])
    cycles = max(ctas)
    share = problem.flops / (cycles * MULTIPROCESSORS * RATES["tensor"].value)
    return Prediction(cycles, share, sum(ctas) / len(ctas) / cycles)
