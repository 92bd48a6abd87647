"""`python -m perf.bench SUITE`: how fast, beside its peers, on this GPU.

Suites: `dense` (TFLOP/s over lengths, head dims and masks), `tail` (lengths that leave a partial tile), `window`
(causal sliding windows), `varlen` (packed sequences), `scores` (softcap, sinks and ALiBi beside the plain kernel),
`decode` (a paged KV cache, in GB/s) and `launch` (what a call costs the host, and what a first call costs). Every row
is checked against the float64 oracle before it is timed, and carries the rate of a cuBLAS product of 8192^3 measured
beside it. Quote ratios within a run: the card is power-limited, and absolute rates move with its temperature and its
neighbours.

Rates are of useful work: 4 D operations for each (query, key) pair that sees each other. A ratio `fmha/x` above 1 means
that fmha is ahead of x.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from fmha import reference
from fmha.jit.launch import current_architecture
from fmha.problem import supports, unrun
from perf import decode, environment, launch, show
from perf.peers import OURS, PEERS, PLAIN, US, Candidate, Peer, Prepare, load, scoring
from perf.suites import SUITES, Case, select
from perf.timing import CudaTimer, Timer, interleave, quartiles

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Row = dict[str, Any]

DEFAULT_PEERS = {
    "launch": ("sdpa", "fa4", "fa3", "flashinfer"),
    "window": ("fa4", "flashinfer"),
    "varlen": ("fa4", "fa3", "flashinfer"),
    "scores": (PLAIN, "fa4", "fa3"),
    "decode": (),  # it has candidates of its own
}
OTHER_SUITES = ("decode", "launch")
KERNEL_PEERS = ("cudnn", "flash", "fa4", "fa3", "flashinfer")
TOLERANCE = 1e-2  # of the norm: 16-bit P and output leave about 3e-3
CUBLAS = 8192


# -- the check ------------------------------------------------------------------------------------------------------
def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """||found - exact|| / ||exact||; infinite where a number is not finite."""
    error = (torch.linalg.vector_norm(found.double() - exact) / torch.linalg.vector_norm(exact.double())).item()
    return error if math.isfinite(error) else math.inf


def sample_rows(seqlen_q: int, count: int = 48) -> torch.Tensor:
    """The first and last 8 query rows, and others at random."""
    drawn = torch.randint(seqlen_q, (count,), generator=torch.Generator().manual_seed(seqlen_q))
    edges = [torch.arange(min(8, seqlen_q)), torch.arange(max(0, seqlen_q - 8), seqlen_q)]
    return torch.unique(torch.cat([drawn, *edges]))


def check(case: Case, qkv: Tensors, outputs: dict[str, torch.Tensor]) -> dict[str, str]:
    """Why an output is wrong, by candidate.

    Sampled rows of the first and last batch entry, or of the longest and the last sequence, are compared with the
    oracle; then every element of fmha's output with the peers' that passed. If all of those disagree with it, it is
    wrong; if only some do, they are."""
    wrong = {}
    for part in parts(case):
        rows = sample_rows(part.stop - part.start if case.packed else case.seqlen_q).to(qkv[0].device)
        ends = [x[None, part] if case.packed else x[part] for x in qkv]
        exact, _ = reference.attention(*ends, causal=case.causal, window=case.window, rows=rows, **scoring(case))
        for name, out in outputs.items():
            found = out[None, part] if case.packed else out[part]
            if (error := relative_error(found[:, rows], exact)) > TOLERANCE:
                wrong[name] = f"off by {error:.1e} of the oracle's norm"
    if OURS in wrong:
        return wrong
    apart = {
        name: error
        for name in outputs
        if name != OURS and name not in wrong
        if (error := relative_error(outputs[OURS], outputs[name])) > 2 * TOLERANCE
    }
    agreeing = len(outputs) - 1 - len(apart) - len(wrong)
    if apart and not agreeing:
        wrong[OURS] = "apart from every peer: " + ", ".join(
            f"{name} by {e:.1e} of its norm" for name, e in apart.items()
        )
    elif apart:
        wrong |= {name: f"{e:.1e} of its norm apart from {OURS}, with which others agree" for name, e in apart.items()}
    return wrong


def parts(case: Case) -> list[slice]:
    """The batch entries that are compared with the oracle, or the rows of the sequences."""
    if not case.packed:
        return [slice(0, 1), slice(case.batch - 1, case.batch)]
    ends = list(accumulate(case.packed))
    return [slice(ends[b] - case.packed[b], ends[b]) for b in (case.packed.index(max(case.packed)), -1)]


# -- one row --------------------------------------------------------------------------------------------------------
def make_inputs(case: Case, device: str = "cuda") -> Tensors:
    generator = torch.Generator(device).manual_seed(case.seqlen_k)
    shapes = [(case.seqlen_q, case.heads_q), (case.seqlen_k, case.heads_kv), (case.seqlen_k, case.heads_kv)]
    lead = [(sum(case.packed),) if case.packed else (case.batch, s) for s, _ in shapes]
    q, k, v = (
        torch.randn((*first, h, case.head_dim), generator=generator, device=device, dtype=getattr(torch, case.dtype))
        for first, (_, h) in zip(lead, shapes, strict=True)
    )
    return q, k, v


def prepare(case: Case, qkv: Tensors, loaded: dict[str, Prepare]) -> tuple[dict[str, Candidate], dict[str, str]]:
    """The candidates that take this case and are right on it, and why the others are left out."""
    candidates: dict[str, Candidate] = {}
    left_out: dict[str, str] = {}
    outputs: dict[str, torch.Tensor] = {}
    for name, make in loaded.items():
        if name != OURS and (reason := PEERS[name].refuses(case)):
            left_out[name] = reason
            continue
        try:
            candidate = make(case, *qkv)
            output = candidate.output(candidate.call())
            if name != PLAIN:  # which computes something else
                outputs[name] = output
        except Exception as error:  # a peer's refusal may be of any type; ours must not be hidden
            if name == OURS:
                raise
            left_out[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        candidates[name] = candidate
    for name, reason in check(case, qkv, outputs).items():
        left_out[name] = reason
        del candidates[name]
    return candidates, left_out


def measure(
    case: Case, candidates: dict[str, Candidate], timer: Timer, *, seconds: float, rounds: int | None
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Median TFLOP/s, and its quartiles, by candidate."""
    calls = {name: candidate.call for name, candidate in candidates.items()}
    times = interleave(calls, timer, seconds=seconds, rounds=rounds)
    rates, spread = {}, {}
    for name, taken in times.items():
        fast, middle, slow = quartiles(taken)
        rates[name] = case.flops / middle / 1e12
        spread[name] = [case.flops / slow / 1e12, case.flops / fast / 1e12]
    return rates, spread


class Cublas:
    """The yardstick of the moment: a bfloat16 product of 8192^3 on random numbers."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self.a, self.b, self.c = (torch.randn(CUBLAS, CUBLAS, device="cuda").to(torch.bfloat16) for _ in range(3))

    def rate(self) -> float:
        """TFLOP/s, the median of 15."""
        calls = {"cublas": lambda: torch.mm(self.a, self.b, out=self.c)}
        times = interleave(calls, self.timer, seconds=0.0, warm_seconds=0.02, rounds=15)["cublas"]
        return 2 * CUBLAS**3 / quartiles(times)[1] / 1e12


def run_row(
    case: Case,
    qkv: Tensors,
    loaded: dict[str, Prepare],
    timer: Timer,
    cublas_rate: Callable[[], float],
    *,
    seconds: float,
    rounds: int | None,
) -> Row:
    """Check, then time. A row in which fmha is wrong has an `error` and no rates."""
    candidates, left_out = prepare(case, qkv, loaded)
    shown = asdict(case) | {"name": case.name, "flops": case.flops}
    if OURS not in candidates:
        return {"case": shown, "error": left_out[OURS], "left_out": left_out}
    before = cublas_rate()
    rates, spread = measure(case, candidates, timer, seconds=seconds, rounds=rounds)
    return {
        "case": shown,
        "unit": "TFLOP/s",
        OURS: rates.pop(OURS),
        "peers": rates,
        "spread": spread,
        "cublas": (before + cublas_rate()) / 2,
        "left_out": left_out,
    }


def add_relative(rows: list[Row]) -> None:
    """To rows with a base length: each rate as a fraction of the same candidate's at that length."""
    for row in rows:
        base = row["case"].get("base")
        if base is None or "error" in row:
            continue
        same = [
            other
            for other in rows
            if "error" not in other
            and other["case"]["seqlen_k"] == base
            and all(other["case"][key] == row["case"][key] for key in ("batch", "heads_q", "head_dim", "causal"))
        ]
        if same:
            peers = {
                name: rate / same[0]["peers"][name] for name, rate in row["peers"].items() if name in same[0]["peers"]
            }
            row["relative"] = {"to": base, OURS: row[OURS] / same[0][OURS], "peers": peers}


# -- the run --------------------------------------------------------------------------------------------------------
def run_suite(args: argparse.Namespace, loaded: dict[str, Prepare]) -> Iterator[Row]:
    """Yields rows as they are measured."""
    timer = CudaTimer()
    cublas = Cublas(timer)
    for case in cases(args):
        try:
            yield run_row(
                case,
                make_inputs(case),
                loaded,
                timer,
                cublas.rate,
                seconds=args.seconds_per_row,
                rounds=args.rounds,
            )
        except Exception as error:  # shown, recorded and counted: one bad row must not lose the others
            yield {"case": asdict(case) | {"name": case.name}, "error": f"{type(error).__name__}: {error}"[:500]}
        gc.collect()
        torch.cuda.empty_cache()


def chosen_peers(args: argparse.Namespace) -> list[Peer]:
    names = args.peers if args.peers is not None else DEFAULT_PEERS.get(args.suite, KERNEL_PEERS)
    return [PEERS[name] for name in names]


def describe(args: argparse.Namespace, peers: list[Peer], missing: dict[str, str]) -> dict[str, Any]:
    paged = args.suite == "decode"
    others = decode.PACKAGES if paged else [peer.package for peer in peers]
    packages = tuple(dict.fromkeys((*environment.PACKAGES, *others)))
    return environment.describe() | {
        "versions": environment.versions(packages),
        "suite": args.suite,
        "command": "python -m perf.bench " + " ".join(args.argv),
        "titles": decode.TITLES if paged else {OURS: US.title} | {peer.name: peer.title for peer in peers},
        "missing_peers": missing,
        "unserved": args.unserved,
        "yardstick": "a streaming read of 8 GiB, GB/s" if paged else f"cuBLAS bfloat16 {CUBLAS}^3",
    }


def write(path: Path | None, meta: dict[str, Any], rows: list[Row]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suite", choices=[*SUITES, *OTHER_SUITES])
    parser.add_argument("--out", type=Path, metavar="PATH", help="write the rows as JSON, after each one")
    parser.add_argument("--peers", type=_peer_names, metavar="A,B", help=f"of {', '.join(PEERS)} (none: alone)")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases whose name contains it")
    parser.add_argument("--head-dim", type=int, action="append", default=[], metavar="D")
    parser.add_argument("--quick", action="store_true", help="a few lengths, a second each")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds per row, instead of a time")
    parser.add_argument("--seconds-per-row", type=float, metavar="S", help="default 3, with --quick 1")
    args = parser.parse_args(argv)
    args.argv = argv
    args.unserved = {}
    if args.seconds_per_row is None:
        args.seconds_per_row = 1.0 if args.quick else 3.0
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}; at least 1 is needed")
    if not count(args):
        parser.error("no case of the suite is left by --only, --head-dim and --quick")
    return args


def cases(args: argparse.Namespace) -> list[Any]:
    """Those of the suite that fmha has kernels for on this GPU."""
    return [case for case in asked(args) if case.name not in args.unserved]


def asked(args: argparse.Namespace) -> list[Any]:
    """Those of the suite that the options leave."""
    if args.suite == "decode":
        return decode.select(args.only)
    return select(args.suite, only=args.only, head_dims=args.head_dim, quick=args.quick)


def count(args: argparse.Namespace) -> int:
    """Rows of the suite."""
    if args.suite == "launch":
        return launch.ROWS
    return len(cases(args)) + (len(decode.WRITTEN) if args.suite == "decode" and not args.only else 0)


def unserved(args: argparse.Namespace, arch: str) -> dict[str, str]:
    """Why fmha has no kernel for cases of the suite, by name."""
    every = [] if args.suite == "launch" else asked(args)
    return {case.name: reason for case in every if (reason := supports(case.problem, arch))}


def rows_of(args: argparse.Namespace, loaded: dict[str, Prepare]) -> Iterator[Row]:
    """Yields rows as they are measured."""
    if args.suite == "launch":
        return launch.run(loaded)
    return decode.run(cases(args), write=not args.only) if args.suite == "decode" else run_suite(args, loaded)


def _peer_names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name and name != "none"]
    if unknown := [name for name in names if name not in PEERS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: of {', '.join(PEERS)} only")
    return names


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    if not torch.cuda.is_available():
        print("perf.bench: there is no CUDA device here, and nothing else to measure", file=sys.stderr)
        return 2
    arch = current_architecture() or ""
    if reason := unrun(arch):
        print(f"perf.bench: {reason}", file=sys.stderr)
        return 2
    args.unserved = unserved(args, arch)
    for name, reason in args.unserved.items():
        print(f"not measured: {name}: {reason}")
    if not count(args):
        print("perf.bench: fmha has no kernel for any of these cases on this GPU", file=sys.stderr)
        return 2
    peers = chosen_peers(args)
    began = time.monotonic()
    rows: list[Row] = []
    with torch.no_grad(), contextlib.ExitStack() as stack:
        loaded, missing = load([US, *peers])
        if OURS in missing:
            print(f"perf.bench: fmha cannot be imported: {missing[OURS]}", file=sys.stderr)
            return 2
        meta = describe(args, peers, missing)
        progress = stack.enter_context(show.progress(args.suite, count(args)))
        for row in rows_of(args, loaded):
            rows.append(row)
            progress(show.one_line(row))
            write(args.out, meta, rows)
    add_relative(rows)
    meta["seconds"] = round(time.monotonic() - began, 1)
    write(args.out, meta, rows)
    show.table(meta, rows)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
