"""`python -m fmha demo`: the main job on whatever machine this is, checked against somebody else's numbers.

On a GPU with kernels, `fmha.attention` runs, is compared with float64 and timed beside torch's own. Elsewhere the role
programs that the kernels are compiled from run in the simulator, and the kernels are compiled and read but not run; so
it is on a GPU whose kernels nobody has run, unless $FMHA_ALLOW_UNRUN is 1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.progress import track
from torch.nn.functional import scaled_dot_product_attention

from fmha import problem, reference
from fmha.jit import launch, report
from fmha.jit.report import Report
from fmha.problem import Problem
from schedules.tiling import BlockConfig, TiledConfig, TmemConfig, choose


@dataclass(frozen=True)
class Case:
    """One call of attention."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def cells(self) -> tuple[str, ...]:
        """For a table: what it is in five columns."""
        heads = str(self.heads) if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        lengths = f"{self.seqlen_q} x {self.seqlen_k}"
        return str(self.batch), lengths, heads, str(self.head_dim), "causal" if self.causal else "dense"

    @property
    def problem(self) -> Problem:
        return Problem("bfloat16", self.head_dim, "causal" if self.causal else "dense")

    @property
    def flops(self) -> float:
        """Of the two matrix products, counting only the scores that a causal mask leaves."""
        scores = self.seqlen_q * self.seqlen_k - (self.seqlen_q * (self.seqlen_q - 1) // 2 if self.causal else 0)
        return 4.0 * self.batch * self.heads * self.head_dim * scores

    def tensors(self, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Normally distributed q, k and v in bfloat16, the same every time."""
        generator = torch.Generator(device).manual_seed(0)
        q, kv = (self.seqlen_q, self.heads), (self.seqlen_k, self.kv_heads)
        shapes = [(self.batch, *q, self.head_dim)] + [(self.batch, *kv, self.head_dim)] * 2
        q_, k_, v_ = (torch.randn(s, generator=generator, device=device, dtype=torch.bfloat16) for s in shapes)
        return q_, k_, v_


CASE_COLUMNS = ("B", "Sq x Sk", "heads", "D", "mask")  # of `Case.cells`


def run(console: Console) -> int:
    """Returns the exit status: 0 if every number agrees, 1 if one does not."""
    arch = launch.current_architecture()
    if arch in problem.ARCHITECTURES and problem.unrun(arch) is None:
        return run_on_gpu(console, arch)
    if arch is None:
        console.print("There is no CUDA device here, so nothing below runs on a GPU.\n")
        where = "no CUDA device"
    elif arch in problem.ARCHITECTURES:
        console.print(f"Nothing below runs on this GPU: {problem.unrun(arch)}.\n")
        where = f"{arch}, whose kernels nobody has run"
    else:
        console.print(f"There are no kernels for this GPU ({arch}), so nothing below runs on it.\n")
        where = f"{arch}, which has no kernels"
    status = 0
    for one in shown():
        status |= simulate(console, one)
    for one in shown():
        status |= show_resources(console, one)
    console.print(
        f"[bold]No GPU ran anything:[/bold] this machine has {where}. Schedules were simulated, kernels compiled."
    )
    return status


def shown() -> list[str]:
    """The first architecture of each chip: others of it have the same schedules, and nearly the same machine code."""
    return list({chip: arch for arch, chip in reversed(problem.ARCHITECTURES.items())}.values())[::-1]


# -- without a GPU -----------------------------------------------------------------------------------------------------

SIMULATED = (
    Case(1, 256, 256, 2, 2, 64, causal=False),  # whole tiles
    Case(1, 200, 257, 2, 2, 64, causal=False),  # one key past a tile
    Case(2, 129, 383, 2, 1, 64, causal=True),
    Case(1, 1, 1000, 4, 1, 80, causal=False),  # one query; head dim 80 in a tile of 96
    Case(1, 300, 300, 4, 2, 128, causal=False),
    Case(1, 300, 449, 8, 2, 128, causal=True),
    Case(1, 257, 257, 2, 2, 192, causal=True),
    Case(1, 131, 211, 2, 1, 256, causal=False),
)
EQUAL = 1e-9  # both sides compute in float64


def simulate(console: Console, arch: str) -> int:
    """Role programs of `arch` on a CPU against torch's attention. The tiles are those of the kernels."""
    title = f"Role programs of {problem.ARCHITECTURES[arch]} in the simulator, against torch's attention in float64"
    table = report.plain_table(title, [], [*CASE_COLUMNS, "tile", "steps", "out error", "LSE error", ""])
    began, status = time.monotonic(), 0
    cases = served(SIMULATED, arch)
    for seed, case in enumerate(track(cases, "Simulating", console=Console(stderr=True))):
        config = choose(case.head_dim, arch)
        events, *errors = simulate_case(case, config, seed)
        equal = all(error <= EQUAL for error in errors)
        status |= not equal
        tile = f"{config.tile_m}x{config.tile_n}"
        verdict = "equal" if equal else "[red]DIFFERENT"
        table.add_row(*case.cells, tile, str(events), *(f"{error:.1e}" for error in errors), verdict)
    console.print(table)
    console.print(
        "Copies and MMAs complete at adversarial times; a race, a deadlock or a tile visited twice would have stopped "
        f"this. {time.monotonic() - began:.1f} s\n"
    )
    return status


def served(cases: Sequence[Case], arch: str) -> list[Case]:
    """Those that there are kernels for."""
    return [case for case in cases if problem.supports(case.problem, arch) is None]


def simulate_case(case: Case, config: TiledConfig, seed: int) -> tuple[int, float, float]:
    """(operations simulated, largest error of the output, largest error of the LSE)."""
    from schedules import simulate, simulate_tmem

    assert isinstance(config, BlockConfig | TmemConfig), f"{config} is not of a forward kernel"
    q, k, v = case.tensors("cpu")
    arrays = (tensor.double().numpy() for tensor in (q, k, v))
    cta = simulate_tmem.TmemCta if isinstance(config, TmemConfig) else simulate.Cta
    found = simulate.forward(*arrays, causal=case.causal, config=config, seed=seed, cta=cta)
    out = torch_attention(q.double(), k.double(), v.double(), case.causal)
    _, lse = reference.attention(q, k, v, causal=case.causal)
    errors = (torch.from_numpy(a).sub(b).abs().max().item() for a, b in ((found.o, out), (found.lse, lse)))
    return len(found.trace), *errors  # type: ignore[return-value]


def show_resources(console: Console, arch: str) -> int:
    """Compiles every bfloat16 kernel that does nothing to scores, and shows what it costs. Returns 1 if one spills."""
    every = (*problem.variants(arch), *problem.paged_variants(arch, ("rows",), ("plain",)))
    variants = [variant for variant in every if variant.problem.dtype == "bfloat16"]
    found: dict[str, Report] = {}
    for variant in track(variants, f"Compiling for {arch}", console=Console(stderr=True)):
        found[report.name(variant, arch)] = report.of_variant(variant, arch)
    console.print(report.table(found, console.width))
    spilling = [name for name, row in found.items() if row.spills or row.stack_bytes]
    verdict = f"[red]{', '.join(spilling)} spill registers" if spilling else "none spills a register"
    unrun = " Nobody has run any of them on a GPU." if arch in problem.UNRUN else ""
    console.print(f"{len(found)} kernels compiled for {arch} ({problem.ARCHITECTURES[arch]}), {verdict}.{unrun}\n")
    return bool(spilling)


# -- on a GPU ----------------------------------------------------------------------------------------------------------

ON_GPU = (
    Case(4, 4096, 4096, 16, 16, 128, causal=False),
    Case(4, 4096, 4096, 16, 16, 128, causal=True),
    Case(4, 4097, 4097, 16, 16, 128, causal=False),  # a tail of one key
    Case(4, 4096, 4096, 32, 8, 128, causal=True),
    Case(4, 4096, 4096, 32, 32, 64, causal=True),
    Case(4, 4096, 4096, 8, 8, 256, causal=False),
    Case(32, 500, 500, 16, 16, 128, causal=True),
    Case(1, 16384, 16384, 16, 16, 128, causal=False),
)
DEVICE = "cuda"
TIMES_TORCH = 2.0  # an error may be at most this many times torch's own, in the same dtype
CHECKED_ROWS = 256  # queries compared with float64: all of a long sequence would take minutes


def run_on_gpu(console: Console, arch: str) -> int:
    import fmha

    title = f"fmha.attention on {torch.cuda.get_device_name()} ({arch}), bfloat16"
    columns = [*CASE_COLUMNS, "error", "torch's", "ms", "TFLOP/s", "torch's", "ratio", ""]
    table = report.plain_table(title, [], columns)
    status = 0
    for case in track(served(ON_GPU, arch), "Running", console=Console(stderr=True)):
        q, k, v = case.tensors(DEVICE)
        ours = partial(fmha.attention, q, k, v, causal=case.causal)
        torchs = partial(torch_attention, q, k, v, case.causal)
        error, torch_error = (max_error(case, out, q, k, v) for out in (ours(), torchs()))
        right = error <= TIMES_TORCH * torch_error
        status |= not right
        ms, torch_ms = median_ms(ours, torchs)
        rates = [f"{case.flops / t / 1e9:.0f}" for t in (ms, torch_ms)]
        numbers = (f"{error:.1e}", f"{torch_error:.1e}", f"{ms:.3f}", *rates, f"{torch_ms / ms:.2f}")
        table.add_row(*case.cells, *numbers, "right" if right else "[red]WRONG")
    console.print(table)
    console.print(
        f"Errors are against float64 on {CHECKED_ROWS} queries; right is at most {TIMES_TORCH:g} times torch's own. "
        "Times are medians, taken in turns with torch's scaled_dot_product_attention.\n"
    )
    return status | show_resources(console, arch)


def max_error(case: Case, out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    rows = torch.linspace(0, case.seqlen_q - 1, min(CHECKED_ROWS, case.seqlen_q), device=q.device).long()
    exact, _ = reference.attention(q, k, v, causal=case.causal, rows=rows)
    return (out[:, rows] - exact).abs().max().item()


def median_ms(*functions: Callable[[], object], rounds: int = 20) -> Iterator[float]:
    """Milliseconds of device time of each function, called in turns, after warming up."""
    times: list[list[float]] = [[] for _ in functions]
    for round_ in range(-3, rounds):
        for function, taken in zip(functions, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            if round_ >= 0:
                taken.append(start.elapsed_time(end))
    return map(statistics.median, times)


def torch_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """torch's own, on [B, S, H, D]. Its `is_causal` aligns at the top left: with Sq != Sk it needs a mask."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    square = q.shape[2] == k.shape[2]
    mask = None
    if causal and not square:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
    gqa = q.shape[1] != k.shape[1]
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and square, enable_gqa=gqa)
    return out.transpose(1, 2)
