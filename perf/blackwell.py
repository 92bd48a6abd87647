"""`python -m perf.blackwell`: what the kernels for Blackwell should do on a B200, on paper, and their code.

Writes perf/blackwell.md with `--update`; without it, status 1 if that page is behind the code and
perf/resources-blackwell.json (`python -m perf.peers_blackwell`). `perf.blackwell_model` has the arithmetic.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from perf import peers_blackwell
from perf.blackwell_model import (
    CLOCK,
    DENSE_FLOPS_PER_SECOND,
    HBM_BYTES_PER_SECOND,
    HOP,
    HOPS,
    KEYS,
    L2_BYTES,
    LAUNCH,
    LOAD,
    MULTIPROCESSORS,
    Q_TILES,
    RATES,
    ROWS,
    Kernel,
    Problem,
    busy,
    duration,
    mma,
    peak,
    pipes,
    predict,
    tile_bytes,
)
from perf.peers_blackwell import MORE, PEERS, TILE, Code, Row
from perf.readme import table
from schedules.tiling import ELEMENT_BYTES, rows

PAGE = Path(__file__).with_name("blackwell.md")
NOTICE = "<!-- python -m perf.blackwell --update writes this page. -->"
HEAD_DIMS = (64, 128)
MASKS = ("dense", "causal")
SEQLENS = (4096, 8192, 16384, 32768, 147600)
TOKENS, WIDTH = 16384, 2048  # B S, where S is not longer; H D
POLYNOMIALS = (0, 16, 32, 48)


# -- what others have published ----------------------------------------------------------------------------------------


class Published(NamedTuple):
    """A time or a rate on a B200, or a chip of its kind, measured by others."""

    who: str
    row: str  # of the table of machine code, the nearest one
    problem: Problem
    source: str
    tflops: float = 0.0
    milliseconds: float = 0.0
    cycles: float = 0.0
    clock: float = 0.0  # Hz, if it was locked or is known

    @property
    def rate(self) -> float:
        """TFLOP/s; from cycles at `CLOCK`."""
        seconds = self.milliseconds / 1e3 or self.cycles / CLOCK
        return self.tflops or self.problem.flops / seconds / 1e12

    @property
    def share(self) -> float:
        return self.rate * 1e12 / peak(self.clock or CLOCK)


FA4_LOCKED = "Dao-AILab/flash-attention pull request 2869: B200, clocks locked at 1800 MHz, median of 20"
FA4_64 = "Dao-AILab/flash-attention pull request 2605, one of its tables; the clock is not given"
FLASHINFER = "flashinfer-ai/flashinfer pull request 5280: B200, elapsed cycles by ncu"


def published() -> list[Published]:
    found = []
    for seqlen, mask, milliseconds in (
        (2048, "dense", 0.813),
        (4096, "dense", 3.433),
        (2048, "causal", 0.580),
        (4096, "causal", 1.922),
    ):
        problem = Problem(128, mask, seqlen, 128, 4)
        found.append(
            Published("flash-attn-4", f"fa4-d128-{mask}", problem, FA4_LOCKED, milliseconds=milliseconds, clock=1.8e9)
        )
    for seqlen, batch, mask, fa4, cudnn in (
        (4096, 8, "dense", 1130, 1119),
        (16384, 2, "dense", 1236, 1159),
        (4096, 8, "causal", 963, 977),
        (16384, 2, "causal", 1229, 1117),
    ):
        problem = Problem(64, mask, seqlen, batch, 32)
        found.append(Published("flash-attn-4", f"fa4-d64-{mask}", problem, FA4_64, tflops=fa4))
        found.append(Published("cuDNN", "", problem, FA4_64, tflops=cudnn))
    at = Problem(128, "dense", 147600, 2, 40)
    before, after = "FlashInfer, mask in the loop", "FlashInfer, tail behind the loop"
    found.append(Published(before, "", at, FLASHINFER, cycles=1283e6))
    found.append(Published(after, "prims_ts-d128-dense-tail", at, FLASHINFER, cycles=1037e6))
    return found


BEST = (
    "The highest rates that are published for bfloat16 forward attention on a B200: flash-attn-4 up to 1613 TFLOP/s, "
    "which its authors count as 71% of the peak, and 1.3 times cuDNN 9.13's (arXiv:2603.05451, abstract)."
)


# -- the table of machine code -----------------------------------------------------------------------------------------


def names(rows: Mapping[str, Row]) -> list[str]:
    """By head dim and mask, ours before others'."""

    def key(name: str) -> tuple[int, int, list[str], bool]:
        _, head_dim, *what = name.split("-")
        return int(head_dim[1:]), ("dense", "causal", "window").index(what[0]), what, not name.startswith("fmha")

    return sorted(rows, key=key)


def who(name: str) -> str:
    key = name.split("-")[0]
    return PEERS[key].title if key in PEERS else "**fmha**"


def code_table(rows: Mapping[str, Row]) -> str:
    lines = []
    for name in names(rows):
        row, (_, head_dim, *what) = rows[name], name.split("-")
        kinds = row.body.kinds
        cells = [row.body.instructions, *(kinds.get(kind, 0) for kind in ("ex2", "fma", "max", "convert"))]
        cells += [kinds.get(kind, 0) for kind in ("barrier", "select")]
        masked = " ".join(str(code.instructions) for code in row.masked) or "none"
        spills = f"{row.local_loads} + {row.local_stores}" if row.spills else "0"
        scored = {"softcap", "alibi"} & set(what)
        model = "" if scored else f"{Kernel.of(row, int(head_dim[1:])).period:.0f}"
        lines.append((head_dim[1:], ", ".join(what), who(name), *cells, masked, spills, row.softmax_registers, model))
    head = ("D", "mask", "kernel", "loop", "EX2", "FMA pipe", "max", "convert", "barrier", "select")
    return table((*head, "masked loops", "spills", "registers", "model"), lines)


def code_section(rows: Mapping[str, Row], head: Mapping[str, Mapping[str, str]]) -> list[str]:
    of = ", ".join(f"{name} {version}" for name, version in {**head["compiler"], **head["packages"]}.items())
    parts = [
        "## Machine code",
        f"All compiled for sm_100a, without a GPU, by the same compiler: {of}. Instructions a KV tile of {TILE} keys "
        "for one warp of the softmax, whose threads have a row each, on the shortest way round the loop over "
        "unmasked tiles. *FMA pipe*: FFMA, FADD, FMUL, each on one number or two. *masked loops*: the same of tiles "
        "at an edge, where those have a loop of their own. *spills*: local loads and stores, anywhere in the "
        f"kernel. *registers*: of a softmax thread, by setmaxnreg. *model*: cycles a KV tile of {Q_TILES * ROWS} "
        "queries, by the model below, which does not know what is done to scores. `tail`: a K length of "
        f"{peers_blackwell.RAGGED} instead of {peers_blackwell.ALIGNED}, where that makes another kernel. Others' "
        "kernels are as their packages make them for a batch of equal lengths; nobody's was changed.",
        code_table(rows),
        code_words(rows),
    ]
    if head["left_out"]:
        parts.append("Left out: " + "; ".join(f"{name}: {why}" for name, why in head["left_out"].items()) + ".")
    return parts


def code_words(rows: Mapping[str, Row]) -> str:
    ours, fa4 = rows["fmha-d128-dense"], rows["fa4-d128-dense"]
    fewer = 1 - ours.body.instructions / fa4.body.instructions
    most = max(row.body.instructions for name, row in rows.items() if row.body.kinds["ex2"] > TILE)
    spilling = [f"`{name}`" for name, row in rows.items() if row.spills]
    said = (
        f"At D 128, dense, our loop has {ours.body.instructions} instructions, {100 * fewer:.0f}% fewer than "
        f"flash-attn-4's {fa4.body.instructions}, and {ours.body.kinds['ex2']} EX2 to its {fa4.body.kinds['ex2']}: it "
        "computes more of them by polynomial. Those that leave all to MUFU need the fewest, "
        f"{most} at most. By the model below it is EX2 that count, and not instructions, "
        f"so that more by polynomial should pay ([below](#exponentials-by-polynomial)). "
        f"With spills: {', '.join(spilling) or 'none'}."
    )
    if (tail := "prims_ts-d128-dense-tail") in rows and (even := "prims_ts-d128-dense") in rows:
        one, other = rows[even], rows[tail]
        said += (
            f" `prims_ts` has a cubin for each length of the tail: {one.instructions} instructions without one and "
            f"{other.instructions} with one, and {other.body.kinds['select']} selects in the loop with or without. "
            "This version has its tail behind the loop, as all kernels here; the revision that had not is among the "
            "published figures below."
        )
    return said


# -- the model ---------------------------------------------------------------------------------------------------------


def rate_section() -> list[str]:
    lines = [(name, f"{rate.value:g} {rate.unit}", rate.source, rate.refuted) for name, rate in RATES.items()]
    return [
        "## Rates",
        f"A multiprocessor's, per cycle. A B200 has {MULTIPROCESSORS}; the peak is {MULTIPROCESSORS} x "
        f"{RATES['tensor'].value:g} FLOP x the clock, {peak() / 1e15:.2f} PFLOP/s at {CLOCK / 1e9:g} GHz. Cycles and "
        "shares of the peak do not depend on the clock, and TFLOP/s do: under a power limit it is lower. NVIDIA's data "
        f"sheet has {DENSE_FLOPS_PER_SECOND / 1e15:g} PFLOP/s, the same rate at "
        f"{DENSE_FLOPS_PER_SECOND / peak(1e9):.2f} GHz.",
        table(("unit", "rate", "source", "refuted by"), lines),
        table(
            ("assumed", "cycles", "refuted by"),
            [
                (
                    "from the end of an MMA to the first score in a register, and from the last weight to the start "
                    "of PV",
                    f"{HOP} each ({HOPS[0]} to {HOPS[-1]} below)",
                    "a timeline of one CTA: the wait for `scores` behind an MMA that is done",
                ),
                ("until a tile is there that TMA was told to load", LOAD, "the wait for Q behind a work tile"),
                ("of a launch", LAUNCH, "a launch of one KV tile for each CTA"),
                (
                    "O never shrinks after the first tiles",
                    0,
                    "counting the warps whose vote says yes; each costs the correction "
                    "an O in and out of tensor memory, beside the softmax",
                ),
            ],
        ),
    ]


def pipe_section(rows: Mapping[str, Row]) -> list[str]:
    kinds = [(d, mask, masked) for d in (64, 96, 128) for mask, masked in (("dense", False), ("causal", True))]
    lines = []
    for head_dim, mask, masked in kinds:
        found = busy(rows[f"fmha-d{head_dim}-{mask}"], head_dim, masked)
        most = max(found, key=lambda unit: found[unit])
        what = "at the diagonal" if masked else "body"
        lines.append((head_dim, what, *(f"{found[unit]:.0f}" for unit in RATES), most))
    return [
        "## Busy cycles of a KV tile",
        f"Of {Q_TILES * ROWS} queries and {KEYS} keys, which one CTA works on at a time. Instructions are those of "
        "the compiled kernels: eight warps of the softmax, four of the correction, the one that issues MMAs and the "
        "one that loads. Operands of QK (Q and K) and of PV (V alone, as P is in tensor memory) are read from "
        f"shared memory once for each of the {Q_TILES} Q tiles, and K and V written once.",
        table(("D", "tile", *RATES, "busiest"), lines),
        "At D 64 MUFU is busiest by far. At D 128 QK reads as many bytes of shared memory a cycle as it has, and TMA's "
        "writes come on top: over a KV tile as many cycles as the tensor core's. " + memory_words(rows),
    ]


def memory_words(rows: Mapping[str, Row]) -> str:
    """What the whole chip draws from L2 and from memory, at the pace that is predicted."""
    kernel = Kernel.of(rows["fmha-d128-dense"], 128)
    from_l2 = MULTIPROCESSORS * 2 * tile_bytes(128) / kernel.period * CLOCK
    problem = Problem(128, "dense", TOKENS, 1, WIDTH // 128)
    once = 4 * TOKENS * WIDTH * ELEMENT_BYTES / HBM_BYTES_PER_SECOND
    takes = predict(kernel, problem).cycles / CLOCK
    return (
        f"At the pace predicted below all multiprocessors together draw {from_l2 / 1e12:.1f} TB/s of K and V from L2 "
        f"at D 128; memory has {1e6 * once:.0f} us to do in the {1e6 * takes:.0f} us of S = {TOKENS}, if each of Q, "
        "K, V and O passes once."
    )


def chain_section(rows: Mapping[str, Row]) -> list[str]:
    lines = []
    for head_dim in HEAD_DIMS:
        for mask, masked in (("dense", False), ("causal", True)):
            row = rows[f"fmha-d{head_dim}-{mask}"]
            kernel = Kernel.of(row, head_dim)
            of = kernel.masked if masked else kernel.body
            chain = 2 * kernel.mma + 2 * HOP + sum(of)
            what = "at the diagonal" if masked else "body"
            cells = [2 * kernel.mma, *of, 2 * HOP, chain]
            lines.append((head_dim, what, *(f"{cell:.0f}" for cell in cells)))
    return [
        "## What bounds",
        "Not the busiest unit alone. P is written over S, so a Q tile's next QK waits for its PV, that for its "
        "weights, and those for its QK: a chain, while the tensor core has only the other Q tile to go on with. Its "
        "links, in cycles:",
        table(
            ("D", "tile", "QK and PV", "to the maximum", "exponentials", "last weights", "hand-overs", "chain"), lines
        ),
        "The chain is longer than the busiest unit's time, at either head dim: latency should bound the kernel. What "
        "shortens it: PV that starts on the first weights before the last are there, P beside S instead of over it, "
        "fewer exponentials on MUFU, shorter hand-overs.",
    ]


def prediction_section(rows: Mapping[str, Row]) -> list[str]:
    lines = []
    for head_dim in HEAD_DIMS:
        for mask in MASKS:
            row = rows[f"fmha-d{head_dim}-{mask}"]
            kernels = [Kernel.of(row, head_dim, hop) for hop in HOPS]
            for seqlen in SEQLENS:
                problem = Problem(head_dim, mask, seqlen, max(1, TOKENS // seqlen), WIDTH // head_dim)
                low, middle, high = (predict(kernel, problem) for kernel in (kernels[2], kernels[1], kernels[0]))
                shares = f"{100 * low.share:.0f} to {100 * high.share:.0f}%"
                lines.append(
                    (
                        head_dim,
                        mask,
                        f"{seqlen:,}",
                        problem.batch,
                        problem.heads,
                        f"{-(-seqlen // (Q_TILES * ROWS)) * problem.batch * problem.heads / MULTIPROCESSORS:.1f}",
                        f"{middle.cycles:,.0f}",
                        f"{100 * middle.balance:.1f}%",
                        f"**{100 * middle.share:.1f}%**",
                        shares,
                        f"{middle.tflops:.0f}",
                    )
                )
    return [
        "## Predictions",
        f"Of our kernels, B S = {TOKENS} or B = 1, H D = {WIDTH}, queries as long as keys. Work tiles are taken as "
        "`schedules.work` orders them; a causal one has the tiles of its diagonal masked, as `schedules.domain` "
        "says. *waves*: work tiles a multiprocessor. *balance*: mean load of a multiprocessor over that of the one "
        f"that ends last. *range*: with hand-overs of {HOPS[-1]} to {HOPS[0]} cycles. TFLOP/s at {CLOCK / 1e9:g} GHz.",
        table(("D", "mask", "S", "B", "H", "waves", "cycles", "balance", "of peak", "range", "TFLOP/s"), lines),
        border_words(rows),
        "To confirm or to refute: `sm__cycles_elapsed.max` of ncu, beside *cycles*; each unit's counter "
        "(`perf.roofline` names them) over the KV tiles visited, beside the table of busy cycles; a timeline, "
        "beside the chain.",
    ]


def border_words(rows: Mapping[str, Row]) -> str:
    said = []
    for head_dim in HEAD_DIMS:
        kernel = Kernel.of(rows[f"fmha-d{head_dim}-dense"], head_dim)
        border = duration(kernel, 24, 0) - 24 * kernel.period
        said.append(f"{border:.0f} cycles at D {head_dim}, {border / kernel.period:.2f} KV tiles")
    return (
        f"Between two work tiles of a CTA the model loses {', and '.join(said)}: O leaves while the next first "
        "scores are computed, but neither Q tile has weights yet to multiply."
    )


def check_section(rows: Mapping[str, Row]) -> list[str]:
    """The same model for others' kernels, beside what was published of them."""
    lines = []
    for one in published():
        problem = one.problem
        said = ["", ""]
        if one.row in rows:
            model = predict(Kernel.of(rows[one.row], problem.head_dim), problem).share
            said = [f"{100 * model:.1f}%", f"{one.share / model:.2f}"]
        shape = f"D {problem.head_dim} {problem.mask}, S {problem.seqlen:,}, B {problem.batch}, H {problem.heads}"
        lines.append((one.who, shape, f"{one.rate:.0f}", f"{100 * one.share:.1f}%", *said, one.source))
    head = ("kernel", "problem", "TFLOP/s", "of peak", "model of it", "published / model", "source")
    return [
        "## Published by others",
        "Measured by others, on other days and under other limits; nothing of this was measured here. Shares are of "
        f"the peak above, at the clock of the source or {CLOCK / 1e9:g} GHz. *model of it*: what this page's model "
        "says of that kernel's own machine code, where it is in the table (the revision measured may be another). "
        "How far the ratio is from 1 is how far the model is to be trusted.",
        table(head, lines),
        BEST,
        check_words(rows),
    ]


def trust(rows: Mapping[str, Row], head_dim: int) -> list[float]:
    """Published share over the model's, of each measurement at a head dim."""
    found = []
    for one in published():
        if one.problem.head_dim == head_dim and one.row in rows:
            found.append(one.share / predict(Kernel.of(rows[one.row], head_dim), one.problem).share)
    return sorted(found)


def check_words(rows: Mapping[str, Row]) -> str:
    said = []
    for head_dim in HEAD_DIMS:
        low, *_, high = trust(rows, head_dim)
        ours = predict(
            Kernel.of(rows[f"fmha-d{head_dim}-dense"], head_dim),
            Problem(head_dim, "dense", TOKENS, 1, WIDTH // head_dim),
        )
        said.append(
            f"at D {head_dim} others reached {low:.2f} to {high:.2f} of what the model says of them. Our dense "
            f"kernel at S = {TOKENS}, {100 * ours.share:.0f}% by the model, is then to be expected at "
            f"{100 * low * ours.share:.0f} to {100 * high * ours.share:.0f}%"
        )
    words = ". ".join(sentence[0].upper() + sentence[1:] for sentence in said)
    return words + ". The model is closest where MUFU decides, and too kind where it does not."


def polynomials(row: Row, count: int, config: int) -> Code:
    """The body with so many exponentials by polynomial instead of `config`: opcodes in proportion to what these add to
    the masked loop, which has none."""
    plain = row.masked[0]
    masks = ("ISETP", "FSEL")
    names_ = sorted(set(row.body.opcodes) - set(masks))
    step = {name: (row.body.opcodes[name] - plain.opcodes.get(name, 0)) / config for name in names_}
    opcodes = {name: row.body.opcodes[name] + round(step[name] * (count - config)) for name in names_}
    opcodes |= {name: row.body.opcodes[name] for name in masks if name in row.body.opcodes}
    return replace(row.body, opcodes=opcodes, instructions=sum(opcodes.values()))


def polynomial_section(rows: Mapping[str, Row]) -> list[str]:
    lines = []
    for head_dim in HEAD_DIMS:
        name = f"fmha-d{head_dim}-dense"
        config = peers_blackwell.ours()[name][1]
        for count in POLYNOMIALS:
            compiled = name if count == config.polynomials else f"{name}-poly{count}"
            row = rows.get(compiled) or replace(rows[name], body=polynomials(rows[name], count, config.polynomials))
            how = "as it is" if compiled == name else "compiled" if compiled in rows else "estimated"
            kernel, of = Kernel.of(row, head_dim), pipes(row.body)
            share = 2 * Q_TILES * mma(head_dim) / kernel.period
            most = max(of, key=lambda unit: of[unit])
            said = row.body.instructions, most, f"{kernel.period:.0f}", f"{100 * share:.1f}%"
            lines.append((head_dim, count, how, *said))
    tried = [row for name, row in rows.items() if name.endswith(f"-poly{MORE}")]
    return [
        "## Exponentials by polynomial",
        "Of 128, in the loop over unmasked tiles. *estimated*: instructions in proportion to those that 16 of them "
        "add.",
        table(("D", "by polynomial", "", "loop", "busiest pipe of the softmax", "cycles a KV tile", "of peak"), lines),
        f"With {MORE} the kernels compile, with {sum(row.spills for row in tried)} spills. The model would have more "
        "of them throughout, for it takes nothing from a warp whose neighbour uses another pipe. FlashInfer's "
        "source says of its kernel on a B200 that the dense path at D 128 is bound by MUFU and takes a quarter by "
        "polynomial, and that the causal one is bound by issue slots and takes none. So a first run should compare "
        f"0, {peers_blackwell.ours()['fmha-d128-dense'][1].polynomials} and {MORE}, for each mask.",
    ]


def decode_section() -> list[str]:
    per_cycle = HBM_BYTES_PER_SECOND / MULTIPROCESSORS / CLOCK
    of_warp = RATES["MUFU"].value / RATES["issue"].value / 32  # EX2 of a warp, a cycle: each has a scheduler to itself
    lines, slack = [], []
    for head_dim in HEAD_DIMS:
        config = rows(head_dim, peers_blackwell.ARCH, paged=True)[0].config
        kv, exponentials = 2 * tile_bytes(head_dim), KEYS / of_warp
        memory, multiplied = kv / per_cycle, 2 * mma(head_dim)
        slack.append(memory / max(multiplied, exponentials))
        in_flight = config.stages * 2 * tile_bytes(head_dim) * config.tile_n // KEYS
        cycles = (memory, multiplied, exponentials, kv / RATES["L2"].value)
        lines.append((head_dim, f"{kv:,}", *(f"{cost:.0f}" for cost in cycles), config.tile_n, f"{in_flight:,}"))
    flight = per_cycle * LOAD
    head = ("D", "bytes of K and V", "HBM", "QK and PV", "EX2 of a warp", "L2", "keys a tile", "bytes in flight")
    return [
        "## Paged decode",
        "A thread has each of 128 rows of Q, of which the heads that share K and V fill a few; every key is read once. "
        f"Cycles of a multiprocessor for {KEYS} keys, with {HBM_BYTES_PER_SECOND / 1e12:g} TB/s (NVIDIA's data sheet) "
        f"shared by {MULTIPROCESSORS}: {per_cycle:.1f} bytes a cycle each.",
        table(head, lines),
        f"Memory should bound it, if not by much at D {HEAD_DIMS[0]}: by a factor of {min(slack):.1f} to "
        f"{max(slack):.1f} over what is busiest besides, the exponentials of a warp whatever rows it has. To keep the "
        f"memory busy over a latency of {LOAD} cycles a multiprocessor needs {flight / 1024:.0f} KB in flight, and "
        "several times that under load: 128 KB were best on an H200 (NOTES.md), whose multiprocessors get less each. "
        "Refuted by: a plain streaming read that stays well below the data sheet, which is then the bound; or a rate "
        "that grows when exponentials are left out, which a polynomial for some of them would then help.",
    ]


UNCERTAIN = """\
## Uncertain

- Latencies (hand-overs between tensor core and softmax, tensor memory, TMA) are assumed; the range in the predictions
  is theirs alone.
- Units are taken to overlap as far as dependencies allow. Warps of the two Q tiles, of the correction and of the MMA
  warp share four schedulers, and what they lose to each other is in no number here.
- The clock. At a power limit it falls, most where the tensor cores are busiest: D 128 more than D 64. The authors of
  flash-attn-4 call its 1600 TFLOP/s about what a matrix product reaches, a limit that is not in this model.
- Shared memory at D 128: if reads of operands and TMA's writes share one port as counted here, QK is slowed by every
  write that falls into it, and a CTA pair (`cta_group::2`), which halves the reads of K and V, would gain.
- L2 and memory: that neighbours in time share K and V in L2 is assumed, and the two dies' L2 taken for one.
- How often O must shrink depends on the data; random inputs say little about a model's.
- Masked loops of others that are not loops are counted as their body; their corrections and MMA warps are not
  counted.
- sm_103a, whose MUFU is twice as fast, is another balance."""


def page(rows: Mapping[str, Row], head: Mapping[str, Mapping[str, str]]) -> str:
    parts: list[str] = [
        NOTICE,
        "# Blackwell, on paper",
        "**Nothing on this page was run on a Blackwell GPU.** The kernels for sm_100a have been compiled, simulated "
        "and read as machine code. The model below says what they should do on a B200; the first run on one "
        "confirms it or refutes it, and beside every assumption stands what would refute it. Figures of others are "
        f"marked as theirs. (The order of work is that of an L2 of {L2_BYTES >> 20} MB.)",
    ]
    parts += code_section(rows, head)
    sections: Iterable[Sequence[str]] = (
        rate_section(),
        pipe_section(rows),
        chain_section(rows),
        prediction_section(rows),
        check_section(rows),
        polynomial_section(rows),
        decode_section(),
    )
    for section in sections:
        parts += section
    return "\n\n".join([*parts, UNCERTAIN]) + "\n"


def generate() -> str:
    """The page, from the committed table."""
    return page(peers_blackwell.load(), peers_blackwell.head())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.blackwell", description=__doc__)
    parser.add_argument("--update", action="store_true", help=f"write perf/{PAGE.name}")
    chosen = parser.parse_args(arguments)
    text = generate()
    if chosen.update:
        PAGE.write_text(text)
        return 0
    if not PAGE.exists() or PAGE.read_text() != text:
        print(f"perf/{PAGE.name} is behind: python -m perf.blackwell --update", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
