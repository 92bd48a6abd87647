"""`python -m perf.profile CASE... --out DIR`: what bounds the kernel, and what its warps do when, on this GPU.

A case is written as `perf.bench` prints it, "D128 causal S4096 B4 H16" (B and H may be left out), or as options:
`--head-dim 128 --seqlen 4096 --causal`. Steps, each in processes of its own and within its time:

    record     a build of the kernel that stamps what its roles do: one CTA's timeline, and the overlap in it
    counters   Nsight Compute (`ncu`): busy units, stalls, the roofline; left out, with a word, where there is no ncu
    iket       the same operations through NVIDIA's in-kernel event tracing, for its own trace; 32 ns is its clock tick

DIR gets profile.json and profile.md (all numbers), and for each case a NAME.timeline.json (for ui.perfetto.dev),
NAME.timeline.png and NAME.counters.png. What the steps left lies in DIR/raw: `--redo` evaluates and draws it again,
anywhere, and a step that is run later adds to it. `--collect` stops there, where time on the GPU is dear.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from perf import cases, iket, roofline
from perf.cases import slug
from perf.evaluate import evaluate
from perf.suites import Case
from perf.timeline import to_perfetto

ROOT = Path(__file__).resolve().parent.parent
STEPS = ("record", "counters", "iket")
IKET_NS = 100_000  # of a CTA that are kept of IKET's trace


class StepFailed(RuntimeError):
    """What a step said last."""


def run(command: Sequence[str], log: Path, seconds: float) -> None:
    """Runs a command, its output to `log`. StepFailed if it fails, or takes longer: its process group ends then."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            code = process.wait(seconds)
            verdict = f"exit code {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code, verdict = 1, f"stopped after {seconds:.0f} s"
    if code:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        raise StepFailed(f"{verdict}: {' | '.join(said[-6:])[-1000:]} ({log})")


def workload(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "perf.workload", *arguments]


# -- steps: each leaves a file for each case in `raw` ------------------------------------------------------------------
def record(chosen: Sequence[Case], raw: Path, recorder: str) -> None:
    names = [case.name for case in chosen]
    run(workload("record", recorder, str(raw), *names), raw / f"{recorder}.log", 60 + 20 * len(names))


def counters(chosen: Sequence[Case], raw: Path) -> None:
    ncu = roofline.find()
    if ncu is None:
        raise StepFailed("ncu is not on the PATH; it comes with the CUDA toolkit, and as Nsight Compute")
    for metrics in (True, False):  # another version may not know a metric; it knows the sections
        try:
            launches = _count(ncu, chosen, raw, metrics)
            break
        except StepFailed as error:
            if not metrics:
                raise
            print(f"counters: once more with sections only, since: {error}", flush=True)
    for case, launch in zip(chosen, launches, strict=True):
        (raw / f"{slug(case)}.counters.json").write_text(json.dumps(asdict(launch), indent=1) + "\n")


def _count(ncu: str, chosen: Sequence[Case], raw: Path, metrics: bool) -> list[roofline.Launch]:
    table = raw / "ncu.csv"
    table.unlink(missing_ok=True)
    command = roofline.command(ncu, table, workload("counters", *(case.name for case in chosen)), metrics=metrics)
    try:
        run(command, raw / "counters.log", 60 + 30 * len(chosen))
        launches = roofline.parse(table.read_text())
    except (StepFailed, OSError, roofline.ProfilerError) as error:
        raise StepFailed(f"{error} {table.read_text()[-600:] if table.exists() else ''}".strip()) from error
    if len(launches) != len(chosen):
        raise StepFailed(f"ncu profiled {len(launches)} launches, not {len(chosen)}; see {table}")
    return launches


def trace(chosen: Sequence[Case], raw: Path) -> None:
    out = raw / "iket"
    command = iket.command(out, workload("iket", *(case.name for case in chosen)))
    run(command, raw / "iket.log", 90 + 30 * len(chosen))
    made = [timeline for path in iket.traces(out) for timeline in iket.read(path)]
    if len(made) != len(chosen):
        raise StepFailed(f"run-iket left {len(made)} timelines in {out}, not {len(chosen)}; see {raw / 'iket.log'}")
    for case, found in zip(chosen, made, strict=True):
        document = to_perfetto(found.between(0, IKET_NS), case.name, {"case": case.name, "recorder": "iket"})
        (raw / f"{slug(case)}.iket.json").write_text(json.dumps(document) + "\n")
    for path in iket.traces(out):  # tens of megabytes; the file for Perfetto holds the same
        path.unlink()


PARTS: Mapping[str, tuple[str, Callable[[Sequence[Case], Path], None]]] = {  # what `perf.evaluate` reads: step, maker
    "stamps": ("record", lambda chosen, raw: record(chosen, raw, "stamps")),
    "every_wait": ("record", lambda chosen, raw: record(chosen, raw, "every_wait")),
    "counters": ("counters", counters),
    "iket": ("iket", trace),
}


def collect(chosen: Sequence[Case], parts: Sequence[str], raw: Path) -> dict[str, str]:
    """Measures the parts. Returns why those that failed did; the others go on."""
    failed = {}
    for part in parts:
        for case in chosen:
            (raw / f"{slug(case)}.{part}.json").unlink(missing_ok=True)
        began = time.monotonic()
        try:
            PARTS[part][1](chosen, raw)
            print(f"{part}: {time.monotonic() - began:.0f} s", flush=True)
        except (StepFailed, OSError, ValueError, TypeError, LookupError) as error:  # a tool's output may be of any form
            failed[part] = f"{type(error).__name__}: {error}"
            print(f"{part}: not measured: {failed[part]}", flush=True)
    return failed


# -- the command -------------------------------------------------------------------------------------------------------
def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.profile", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="*", metavar="CASE", help=f"such as {cases.EXAMPLE!r}")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--head-dim", type=int, metavar="D")
    parser.add_argument("--seqlen", type=int, metavar="S")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--batch", type=int, metavar="B", help="default: B x S = 16k")
    parser.add_argument("--heads", type=int, metavar="H", help="default: H x D = 2048")
    parser.add_argument("--steps", type=_step_names, default=list(STEPS), metavar="A,B", help=f"of {', '.join(STEPS)}")
    parser.add_argument(
        "--every-wait",
        action="store_true",
        help="also record a build that stamps the wait for PV beside the exponentials, which moves that wait",
    )
    parser.add_argument("--collect", action="store_true", help="only fill DIR/raw, and leave the rest to --redo")
    parser.add_argument("--redo", action="store_true", help="evaluate and draw DIR/raw again; needs no GPU")
    args = parser.parse_args(argv)
    args.argv = argv
    try:
        args.cases = [cases.parse(name) for name in args.case]
        if args.head_dim is not None and args.seqlen is not None:
            heads = None if args.heads is None else (args.heads,)
            args.cases.append(cases.make(args.head_dim, (args.seqlen,), args.causal, args.batch, heads))
        elif any((args.head_dim, args.seqlen, args.causal, args.batch, args.heads)):
            parser.error("--head-dim and --seqlen make a case together; --causal, --batch and --heads are of that case")
    except ValueError as error:
        parser.error(str(error))
    if not args.cases and not args.redo:
        parser.error(f"no CASE, such as {cases.EXAMPLE!r}")
    if args.collect and args.redo:
        parser.error("--collect measures, --redo does not: one of them")
    return args


def _step_names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in STEPS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: of {', '.join(STEPS)} only")
    return names


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    raw = args.out.resolve() / "raw"
    failed: dict[str, str] = {}
    if not args.redo:
        import torch

        if not torch.cuda.is_available():
            print("perf.profile: there is no CUDA device here; --redo draws what another machine left", file=sys.stderr)
            return 2
        remember(raw, args.cases, describe(args.argv))
        parts = [part for part, (step, _) in PARTS.items() if step in args.steps]
        failed = collect(args.cases, [part for part in parts if part != "every_wait" or args.every_wait], raw)
    if not (raw / "profile.json").exists():
        print(f"perf.profile: {raw} holds nothing to evaluate", file=sys.stderr)
        return 2
    if not args.collect:
        print(evaluate(args.out.resolve(), failed))
    return 1 if failed else 0


def describe(argv: Sequence[str]) -> dict[str, Any]:
    import torch

    from perf import environment

    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    command = " ".join(["python -m perf.profile", *(f"'{word}'" if " " in word else word for word in argv)])
    return environment.describe() | {"multiprocessors": multiprocessors, "command": command}


def remember(raw: Path, chosen: Sequence[Case], meta: Mapping[str, Any]) -> None:
    """Writes down which cases lie in `raw`. What other sources or another GPU left there goes."""
    path = raw / "profile.json"
    known = json.loads(path.read_text()) if path.exists() else {"meta": {}, "cases": []}
    if any(known["meta"].get(key) != meta[key] for key in ("gpu", "source")):
        shutil.rmtree(raw, ignore_errors=True)
        known = {"meta": {}, "cases": []}
    raw.mkdir(parents=True, exist_ok=True)
    before = [Case.of(case) for case in known["cases"]]
    listed = [asdict(case) for case in (*before, *(case for case in chosen if case not in before))]
    path.write_text(json.dumps({"meta": dict(meta), "cases": listed}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
