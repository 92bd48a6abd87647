"""`python -m perf.gpu_check --out DIR`: everything that needs a GPU, in one command, each step within its time.

Steps: `tests` (the GPU tests), `sanitize` (compute-sanitizer on tiny problems), and the suites `dense`, `tail` and
`launch` of `perf.bench`. Each writes DIR/STEP.json and DIR/STEP.log. A step that fails or runs out of time does not
stop the rest.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from fmha.jit.launch import current_architecture
from fmha.problem import unrun

ROOT = Path(__file__).resolve().parent.parent
TAIL_LINES = 25  # of a step's log that are printed when it ends


@dataclass(frozen=True)
class Step:
    """A command that takes the path of its JSON as the last argument, and the seconds it may take."""

    command: tuple[str, ...]
    seconds: int
    quick: tuple[str, ...] = ()  # added by --quick


STEPS = {
    "tests": Step(("pytest", "tests/gpu", "tests/reports", "-q", "-p", "no:cacheprovider", "--record"), 420),
    "sanitize": Step(("perf.sanitize", "--tool", "memcheck", "--tool", "racecheck", "--out"), 540),
    "dense": Step(("perf.bench", "dense", "--out"), 540, ("--quick",)),
    "tail": Step(("perf.bench", "tail", "--out"), 300, ("--quick",)),
    "window": Step(("perf.bench", "window", "--out"), 120),
    "varlen": Step(("perf.bench", "varlen", "--out"), 180),
    "scores": Step(("perf.bench", "scores", "--out"), 180),
    "decode": Step(("perf.bench", "decode", "--out"), 180),
    "launch": Step(("perf.bench", "launch", "--out"), 300),
}


def run(name: str, step: Step, out: Path, quick: bool) -> tuple[int | None, float]:
    """Exit code (None: out of time) and seconds. The step's whole process group ends with it."""
    command = [sys.executable, "-m", *step.command, str(out / f"{name}.json"), *(step.quick if quick else ())]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    log = out / f"{name}.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=stream, stderr=subprocess.STDOUT, process_group=0
        )
        try:
            code: int | None = process.wait(step.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            code = None
    print(f"\n== {name}: {' '.join(command[1:])}")
    print("\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:]), flush=True)
    return code, time.monotonic() - began


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=_step_names, default=list(STEPS), metavar="A,B", help=f"of {', '.join(STEPS)}")
    parser.add_argument("--quick", action="store_true", help="fewer lengths in the suites")
    args = parser.parse_args(argv)
    if reason := unrun(current_architecture() or ""):
        print(f"perf.gpu_check: {reason}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    results = {name: run(name, STEPS[name], args.out.resolve(), args.quick) for name in args.steps}
    print()
    for name, (code, seconds) in results.items():
        verdict = "ok" if code == 0 else "out of time" if code is None else f"exit code {code}"
        print(f"{name:<10} {seconds:6.0f} s  {verdict}")
    return 0 if all(code == 0 for code, _ in results.values()) else 1


def _step_names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if name not in STEPS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: of {', '.join(STEPS)} only")
    return names


if __name__ == "__main__":
    raise SystemExit(main())
