"""`python -m perf.sanitize --tool memcheck --tool racecheck`: tiny problems under NVIDIA's compute-sanitizer.

Without `--tool` it runs the problems alone, checking their numbers; with it, it runs itself so and then once under each
tool (memcheck: accesses out of bounds; racecheck: hazards in shared memory; synccheck, initcheck). Inputs are made and
outputs compared on the CPU, so that our kernels are all that is instrumented.

A tool's own start takes tens of seconds and a kernel under racecheck hundreds of times as long as alone: allow minutes,
and keep the problems tiny. Racecheck knows barriers between threads; what the copy engine and mbarriers order (TMA,
wgmma) it may report as a hazard where there is none. Whatever is reported is printed and recorded as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fmha import reference
from fmha.problem import AnyProblem, supports, unrun
from perf.bench import TOLERANCE, make_inputs, relative_error
from perf.peers import scoring, starts
from perf.suites import Case
from tests.kernels import ARCH, paged_problem_of
from tests.paged import PagedCase, tensors

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
FOUND_SOMETHING = 86  # our choice of exit code for a tool's findings
PRINTED = 5000  # findings that a tool may print
POISON = float("nan")

CASES = tuple(
    # tails on both sides, and more tiles than the rings have stages; then a single element
    Case(1, seqlen_q, seqlen_k, 2, 1, head_dim, causal)
    for head_dim in (64, 128, 256)
    for causal in (False, True)
    for seqlen_q, seqlen_k in ((200, 700), (1, 1))
) + (
    Case(1, 300, 120, 2, 2, 128, True),  # rows and whole tiles that see nothing
    Case(3, 130, 140, 32, 8, 128, False),  # more work tiles than multiprocessors
    Case(1, 130, 260, 2, 1, 72, True, "float16"),  # a padded head dim
    Case(1, 500, 500, 2, 1, 128, True, left=150),  # a window
    Case(1, 300, 300, 2, 1, 128, False, score="softcap"),
    Case(1, 300, 300, 2, 1, 64, True, score="alibi"),
    Case(4, 270, 270, 2, 1, 64, True, packed=(1, 270, 65, 130)),
    Case(3, 200, 200, 2, 1, 256, False, packed=(129, 3, 200)),
)


PAGED = (  # unused slots and entries of the page table are poison
    PagedCase((200, 0, 33), (1, 1, 1), 2, 4, 128, 16),  # several CTAs share a sequence, and merge what they find
    PagedCase((150, 7), (3, 3), 1, 2, 64, 8, "vllm", causal=True, sinks=True, splits=5),
    PagedCase((97, 300), (2, 5), 2, 2, 256, 1, "hnd", packed=True, outside=(1, 2), causal=True, softcap=5.0),
)


def run_cases() -> int:
    """Runs every problem once and prints its error. The number of wrong ones."""
    return run_dense() + run_paged()


def served(case: Case) -> bool:
    return _is_served(case.name, case.problem)


def paged_served(case: PagedCase) -> bool:
    return _is_served(case.name, paged_problem_of(case))


def _is_served(name: str, problem: AnyProblem) -> bool:
    """Says why, where it is not on this GPU."""
    if reason := supports(problem, ARCH):
        print(f"left out {name}: {reason}", flush=True)
    return reason is None


def run_dense() -> int:
    import fmha

    wrong = 0
    for case in filter(served, CASES):
        qkv = make_inputs(case, "cpu")
        cu_seqlens = (starts(case, "cpu"),) * 2 if case.packed else ()
        given = {"causal": case.causal, "window": case.window, **scoring(case, "cpu")}
        exact, _ = (reference.attention_varlen if case.packed else reference.attention)(*qkv, *cu_seqlens, **given)
        attention = fmha.attention_varlen if case.packed else fmha.attention
        given |= scoring(case)
        for return_lse in (False, True):  # two kernels, up to head dim 192
            out = torch.full_like(qkv[0], POISON).cuda()
            attention(*(x.cuda() for x in (*qkv, *cu_seqlens)), **given, out=out, return_lse=return_lse)
            torch.cuda.synchronize()
            error = relative_error(out.cpu(), exact)
            wrong += error > TOLERANCE
            verdict, lse = "ok   " if error <= TOLERANCE else "WRONG", ", with LSEs" if return_lse else ""
            print(f"{verdict} {case.name}{lse}: {error:.1e} of the oracle's norm", flush=True)
    return wrong


def run_paged() -> int:
    import fmha

    wrong = 0
    for case in filter(paged_served, PAGED):
        given = tensors(case, "cpu")
        arrays: dict[str, Any] = {
            name: getattr(given, name) for name in ("q", "k_pages", "v_pages", "page_table", "seq_lens")
        }
        arrays |= given.options(case)
        splits = arrays.pop("num_splits", None)
        exact, _ = reference.attention_paged(**arrays)
        out = torch.full(exact.shape, POISON, dtype=case.torch_dtype).cuda()
        on_gpu: dict[str, Any] = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arrays.items()}
        fmha.attention_paged(**on_gpu, num_splits=splits, out=out, return_lse=True)
        torch.cuda.synchronize()
        error = relative_error(out.cpu(), exact)
        wrong += not error <= TOLERANCE
        print(f"{'ok   ' if error <= TOLERANCE else 'WRONG'} {case.name}: {error:.1e} of the oracle's norm", flush=True)
    return wrong


def under(tool: str | None, timeout: float) -> dict[str, Any]:
    """This module in a process of its own, under `tool` if one is given: exit code, summary, output and seconds."""
    prefix = []
    if tool is not None:
        prefix = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            str(FOUND_SOMETHING),
            "--print-limit",
            str(PRINTED),
        ]
        prefix += ["--racecheck-report", "all"] if tool == "racecheck" else []
    began = time.monotonic()
    try:
        ran = subprocess.run(
            [*prefix, sys.executable, "-m", "perf.sanitize"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
        code, output = ran.returncode, ran.stdout
    except subprocess.TimeoutExpired as error:
        code = None
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        output += f"\nstopped after {timeout:.0f} s\n"
    seconds = round(time.monotonic() - began, 1)
    return {"exit": code, "summary": summary(output), "seconds": seconds, "hazards": hazards(output), "output": output}


def summary(output: str) -> str:
    """The tool's last line about its findings, "" if it has none."""
    found = re.findall(r"=+ (.*SUMMARY: .*)", output)
    return found[-1] if found else ""


def hazards(output: str) -> dict[str, int]:
    """What racecheck objects to, by kind and the two instructions, and how often."""
    found: Counter[str] = Counter()
    for block in re.split(r"=+ (?=Error|Warning)", output)[1:]:
        kind = re.match(r"\w+: Potential (\w+) hazard", block)
        places = re.findall(r"(Read|Write) Thread \(\d+,\d+,\d+\) at (\S+)", block)
        if kind:
            found[", ".join([kind[1], *(f"{access} at {place}" for access, place in places)])] += 1
    return dict(found.most_common())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.sanitize", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", action="append", choices=TOOLS, default=[])
    parser.add_argument("--timeout", type=float, default=240.0, metavar="S", help="seconds a tool may take")
    parser.add_argument("--out", type=Path, metavar="PATH", help="write the findings as JSON")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("perf.sanitize: there is no CUDA device here", file=sys.stderr)
        return 2
    if reason := unrun(ARCH):
        print(f"perf.sanitize: {reason}", file=sys.stderr)
        return 2
    if not args.tool:
        return 1 if run_cases() else 0
    if shutil.which("compute-sanitizer") is None:
        print("perf.sanitize: compute-sanitizer is not on the PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    from perf.environment import describe

    report: dict[str, Any] = describe() | {
        "cases": [*(case.name for case in CASES), *(case.name for case in PAGED)],
        "tools": {},
    }
    failed = False
    for tool in (None, *args.tool):  # alone first: it compiles what is missing, and wrong numbers need no tool
        found = under(tool, args.timeout)
        print(found["output"][:3000])
        for hazard, times in found["hazards"].items():
            print(f"{times} x {hazard}")
        print(
            f"{tool or 'alone'}: exit code {found['exit']} after {found['seconds']} s. {found['summary']}", flush=True
        )
        found["output"] = found["output"][:20_000]
        report["tools"][tool or "alone"] = found
        failed |= found["exit"] != 0
        if args.out:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(report, indent=1) + "\n")
        if tool is None and failed:
            break
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
