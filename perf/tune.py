"""`python -m perf.tune CASE`: which block config is the fastest for one problem, on this GPU.

CASE is written as `perf.bench` prints it, "D128 causal S4096 B4 H16" (B and H may be left out). Candidates are the
table's block configs and the most promising others that fit the chip. They are compiled side by side, and those whose
machine code spills, waits too often or has a stack are dropped. The rest are compared with the float64 oracle, as in
`perf.bench`, and timed in turns. The fastest then meets the config that such a call gets at present once more, alone:
only this second run decides, since the best of many is also the luckiest of them.

With `--write` the winner goes into the user's own file ($FMHA_TUNED, else fmha/tuned.json in the user's config folder),
if the two ranges between quartiles do not overlap. `fmha` takes it for calls of exactly these sizes on such a GPU, and
`fmha.inspect(problem, extent=fmha.Extent(...)).reason` names the file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from fmha.cli import console
from fmha.jit import launch, library, report, sass, tuned
from fmha.jit.report import Report
from fmha.problem import Problem, Variant, supports
from perf import cases, environment, show
from perf.bench import Tensors, check, make_inputs
from perf.peers import OURS
from perf.resources import objections
from perf.suites import Case
from perf.timing import Call, CudaTimer, Timer, interleave, quartiles
from perf.workload import extent_of
from schedules.tiling import CHIPS, TABLES, BlockConfig, Choice, Cost, Extent, predicted_us, rivals

planning: Any = importlib.import_module("fmha.attention")  # `fmha.attention` is its function

MOST = 24  # candidates, unless there are more in the table
DEEPEST = 4  # K and V stages; the simulator runs every depth up to it, with 1 to 3 warpgroups
ONE_WARPGROUP = (40, 240)  # registers of the producer and of the only consumer; the table has no such row
WORKERS = 8  # compiling processes at most, each with about a gigabyte
HANG_AFTER = 60.0  # seconds for the first launch of a kernel

# -- candidates --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The problem that configs are measured for."""

    case: Case
    problem: Problem
    arch: str
    extent: Extent

    @classmethod
    def of(cls, case: Case, device: launch.Device) -> Target:
        return cls(case, case.problem, device.arch, extent_of(case, device.multiprocessors))

    @property
    def table(self) -> tuple[BlockConfig, ...]:
        """The table's configs for its head dim, and calls that want no LSE."""
        found = (row.config for row in rivals(self.problem.head_dim, self.arch, lse=False))
        return tuple(config for config in found if isinstance(config, BlockConfig))


def grid(target: Target) -> list[BlockConfig]:
    """The configs that fit the chip, each with the deepest K and V rings that its shared memory holds."""
    long = target.table[0]
    found = []
    for consumers in (1, 2, 3):
        for producer_registers, consumer_registers in splits(consumers, long.head_dim, target.arch):
            for tile_n in range(16, 257, 16):
                for q_stages in (1, 2):
                    depths = (
                        BlockConfig(
                            head_dim=long.head_dim,
                            tile_n=tile_n,
                            stages=stages,
                            q_stages=q_stages,
                            consumers=consumers,
                            producer_registers=producer_registers,
                            consumer_registers=consumer_registers,
                            ones=long.ones,
                            rescale_above=long.rescale_above,
                        )
                        for stages in range(DEEPEST, 1, -1)
                    )
                    found += [config for config in depths if config.check(CHIPS[target.arch]) is None][:1]
    return found


def splits(consumers: int, head_dim: int, arch: str) -> list[tuple[int, int]]:
    """Registers of producer and consumers: those of the table's rows with as many consumers, and with that head dim if
    there are any."""
    every = (row.config for row in TABLES[arch])
    alike = [config for config in every if isinstance(config, BlockConfig) and config.consumers == consumers]
    alike = [config for config in alike if config.head_dim == head_dim] or alike
    found = dict.fromkeys((config.producer_registers, config.consumer_registers) for config in alike)
    return list(found) or [ONE_WARPGROUP]


def estimate(config: BlockConfig, extent: Extent) -> float:
    """A time without unit, to order configs of one head dim by before anything is measured.

    Through the measured costs of the table's rivals (H200): a KV tile costs as much as its keys and 10 more, a work
    tile as much as 16 keys and one for each head dim; three warpgroups take 0.85 of that for a query, and one, alone
    with its exponentials, is guessed to take 1.5.
    """
    key = config.tile_m * {1: 1.5, 2: 1.0, 3: 0.85}[config.consumers]
    cost = Cost(tile=key * (config.tile_n + 10), start=key * (config.head_dim + 16))
    return predicted_us(Choice(config, "", cost), extent)


def candidates(target: Target, present: BlockConfig, most: int = MOST) -> list[BlockConfig]:
    """The present config, the table's, and the most promising others, the one with more in shared memory first where
    two promise the same."""
    always = list(dict.fromkeys([present, *target.table]))
    others = [config for config in grid(target) if config not in always]
    others.sort(key=lambda config: (estimate(config, target.extent), -config.smem_bytes()))
    return always + others[: max(0, most - len(always))]


def label(config: BlockConfig) -> str:
    """Its head dims, tile of queries by keys, stages of K and V and of Q, registers, columns of ones, and threshold of
    the rescale where that is not the usual one."""
    tile = f"{config.dims} {config.tile_m}x{config.tile_n} kv{config.stages} q{config.q_stages}"
    ones = f" ones {config.ones}" if config.ones else ""
    usual = config.rescale_above == BlockConfig.rescale_above
    rescale = "" if usual else f" rescale {config.rescale_above:g}"
    return f"{tile} {config.producer_registers}/{config.consumer_registers}{ones}{rescale}"


# -- compiling, and the resource check ---------------------------------------------------------------------------------


def compile_all(target: Target, configs: Sequence[BlockConfig]) -> Iterator[tuple[BlockConfig, Report | Exception]]:
    """Each config with what its machine code takes, or why there is none, as it is ready. The kernels go to the disk
    cache, from where `bind` has them."""
    workers = max(1, min(WORKERS, len(configs), len(os.sched_getaffinity(0)) - 1))
    spawn = multiprocessing.get_context("spawn")  # a fork would inherit a CUDA context that it cannot use
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        jobs = {pool.submit(report.of_variant, Variant(target.problem, c), target.arch): c for c in configs}
        for job in as_completed(jobs):
            error = job.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield jobs[job], job.result() if error is None else error


def sift(
    made: Iterable[tuple[BlockConfig, Report | Exception]], advance: Callable[[str], None]
) -> tuple[dict[BlockConfig, Report], dict[BlockConfig, str]]:
    """Those that pass the resource check, with their resources, and what is wrong with the others. MissingTool where
    machine code cannot be read here."""
    kept, dropped = {}, {}
    for config, found in made:
        if isinstance(found, sass.MissingTool):
            raise found
        if isinstance(found, Exception):
            dropped[config] = f"does not compile: {type(found).__name__}: {found}"[:300]
        elif said := objections("", found, found, config):
            dropped[config] = "; ".join(words.removeprefix(": ") for words in said)
        else:
            kept[config] = found
        advance(f"{label(config)}: {dropped.get(config, 'ok')}")
    return kept, dropped


# -- measuring ---------------------------------------------------------------------------------------------------------


class WrongKernel(RuntimeError):
    """A kernel whose output is not that of the oracle. It is a fault of fmha's, not of the config's."""


def bind(target: Target, qkv: Tensors, config: BlockConfig) -> Call:
    """What `fmha.attention` does in a call of the case, with `config` instead of the one that it would take."""
    plan = planning._plan(*qkv, planning.Options(causal=target.case.causal), config=config)
    return lambda: plan(*qkv, None)


@contextlib.contextmanager
def watched(what: str, seconds: float = HANG_AFTER) -> Iterator[None]:
    """Ends the process if `what` never ends: a kernel that hangs cannot be ended otherwise."""

    def end() -> None:
        print(f"perf.tune: {what} has not ended after {seconds:.0f} s", file=sys.stderr, flush=True)
        os._exit(3)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def verify(target: Target, qkv: Tensors, calls: Mapping[str, Call], present: str) -> None:
    """WrongKernel if an output is not that of the oracle, or not that of the present config everywhere."""
    outputs = {}  # all at once: none may be written into memory where the right answer of another one lay
    for name, call in calls.items():
        with watched(name):
            outputs[OURS if name == present else name] = call()
            torch.cuda.synchronize()
    if wrong := check(target.case, qkv, outputs):
        said = [f"{present if name == OURS else name}: {reason}" for name, reason in wrong.items()]
        raise WrongKernel(f"{target.case.name}: " + "; ".join(said))


@dataclass(frozen=True)
class Row:
    """A measured config. Rates in TFLOP/s of useful work."""

    config: BlockConfig
    rate: float  # median
    quartiles: tuple[float, float]
    ratio: float  # how many times as fast as the present config
    present: bool
    table: bool  # a row of the table


def rank(target: Target, present: BlockConfig, times: Mapping[BlockConfig, list[float]]) -> list[Row]:
    """The fastest first."""
    middle = {config: quartiles(taken) for config, taken in times.items()}
    return [
        Row(
            config,
            rate=target.case.flops / median / 1e12,
            quartiles=(target.case.flops / slow / 1e12, target.case.flops / fast / 1e12),
            ratio=middle[present][1] / median,
            present=config == present,
            table=config in target.table,
        )
        for config, (fast, median, slow) in sorted(middle.items(), key=lambda found: found[1][1])
    ]


@dataclass(frozen=True)
class Decision:
    """Whether the best config is worth keeping, and why, in words."""

    keep: bool
    why: str


def decide(present: Row, best: Row, duel: Mapping[BlockConfig, list[float]]) -> Decision:
    """The best replaces the present config if three quarters of its calls in the duel were faster than three quarters
    of the other's. `duel` is empty if both are the same."""
    if best.config == present.config:
        return Decision(False, f"the present config, {label(present.config)}, is the fastest")
    ours, theirs = quartiles(duel[best.config]), quartiles(duel[present.config])
    compared = f"{label(best.config)} is {theirs[1] / ours[1]:.3f} times as fast as the present {label(present.config)}"
    if ours[2] < theirs[0]:
        return Decision(True, f"{compared}, which is more than the spread")
    return Decision(False, f"{compared}, which is no more than the spread: the present one stays")


@dataclass(frozen=True)
class Result:
    """What was measured."""

    rows: list[Row]
    duel: dict[BlockConfig, list[float]]
    decision: Decision

    @property
    def best(self) -> Row:
        return self.rows[0]


def measure(target: Target, configs: Sequence[BlockConfig], present: BlockConfig, seconds: float) -> Result:
    """Checks all of them, then times them in turns, then the best against the present one."""
    qkv = make_inputs(target.case)
    calls = {label(config): bind(target, qkv, config) for config in configs}
    verify(target, qkv, calls, label(present))
    torch.cuda.empty_cache()
    timer = CudaTimer()
    rows = rank(target, present, timed(configs, calls, timer, seconds))
    best, now = rows[0], next(row for row in rows if row.present)
    duel = {} if best is now else timed([best.config, present], calls, timer, seconds)
    return Result(rows, duel, decide(now, best, duel))


def timed(
    configs: Sequence[BlockConfig], calls: Mapping[str, Call], timer: Timer, seconds: float
) -> dict[BlockConfig, list[float]]:
    """Seconds of every call, in rounds. Nothing is drawn meanwhile: it would delay launches."""
    times = interleave({label(config): calls[label(config)] for config in configs}, timer, seconds=seconds)
    return {config: times[label(config)] for config in configs}


# -- the user's file ---------------------------------------------------------------------------------------------------


def keep(target: Target, result: Result, present: BlockConfig, meta: Mapping[str, Any]) -> Path:
    """Writes the best config down and sees `fmha` pick it. Errors as `tuned.write`."""
    best = result.best
    measured = {key: meta[key] for key in ("gpu", "driver", "date", "source")} | {
        "case": target.case.name,
        "tflops": round(best.rate, 1),
        "ratio": round(quartiles(result.duel[present])[1] / quartiles(result.duel[best.config])[1], 4),
        "instead_of": label(present),
    }
    path = tuned.write(tuned.Entry(tuned.Call.of(target.problem, target.arch, target.extent), best.config, measured))
    tuned.forget()
    config, source = library.pick(target.problem, target.arch, target.extent)
    assert isinstance(config, BlockConfig), "others are not tuned"
    if config != best.config:
        raise ValueError(f"{path} was written, but fmha takes {label(config)}: {source}")
    return path


# -- the command -------------------------------------------------------------------------------------------------------


def table(target: Target, result: Result, reports: Mapping[BlockConfig, Report], where: str) -> Table:
    shown = report.plain_table(
        f"{target.case.name} on {where}", ["block config"], ["TFLOP/s", "quartiles", "of present", "loop a score", ""]
    )
    for row in result.rows:
        low, high = (show.number(rate) for rate in row.quartiles)
        marks = " ".join(word for word, given in (("present", row.present), ("table", row.table)) if given)
        per_score = reports[row.config].body_per_score
        cells = (show.number(row.rate), f"{low} to {high}", f"{row.ratio:.3f}", f"{per_score:.2f}", marks)
        shown.add_row(label(row.config), *cells)
    return shown


def document(
    target: Target, result: Result, dropped: Mapping[BlockConfig, str], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """The result as JSON. Rates in TFLOP/s, the duel in seconds."""
    return {
        "meta": dict(meta),
        "case": asdict(target.case) | {"name": target.case.name, "flops": target.case.flops},
        "unit": "TFLOP/s",
        "rows": [asdict(row) | {"label": label(row.config)} for row in result.rows],
        "duel": {label(config): quartiles(taken) for config, taken in result.duel.items()},
        "dropped": {label(config): reason for config, reason in dropped.items()},
        "decision": asdict(result.decision),
    }


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", metavar="CASE", help=f"such as {cases.EXAMPLE!r}")
    parser.add_argument("--write", action="store_true", help="keep the winner for such calls in the user's own file")
    parser.add_argument("--seconds", type=float, default=5.0, metavar="S", help="of each of the two runs (default 5)")
    parser.add_argument("--candidates", type=int, default=MOST, metavar="N", help=f"at most (default {MOST})")
    parser.add_argument("--out", type=Path, metavar="PATH", help="write what was measured as JSON")
    args = parser.parse_args(argv)
    args.argv = argv
    try:
        args.case = cases.parse(args.case)
    except ValueError as error:
        parser.error(str(error))
    if not args.seconds > 0:
        parser.error(f"--seconds is {args.seconds}; more than 0 are needed")
    if args.candidates < 1:
        parser.error(f"--candidates is {args.candidates}; at least 1 is needed")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(sys.argv[1:] if argv is None else argv)
    if not torch.cuda.is_available():
        return refuse("there is no CUDA device here, and nothing else to measure")
    target = Target.of(args.case, launch.describe_device(torch.device("cuda", torch.cuda.current_device())))
    if reason := supports(target.problem, target.arch):
        return refuse(reason)
    config, source = library.pick(target.problem, target.arch, target.extent)
    if not isinstance(config, BlockConfig):
        return refuse(f"{target.arch} has block configs of another kind, and one for each head dim")
    chosen = candidates(target, config, args.candidates)
    print(f"{target.case.name} gets {label(config)} at present ({source})")
    print(f"{len(chosen)} candidates, the most promising of {len(grid(target))} that fit {target.arch}")
    try:
        with torch.no_grad(), show.progress("compiling", len(chosen)) as advance:
            kept, dropped = sift(compile_all(target, chosen), advance)
        if config in dropped:
            return refuse(f"the present config fails the resource check: {dropped[config]}")
        print(
            f"{len(dropped)} dropped by the resource check; measuring {len(kept)}, twice {args.seconds:g} s", flush=True
        )
        with torch.no_grad():
            result = measure(target, list(kept), config, args.seconds)
    except sass.MissingTool as error:
        return refuse(str(error))
    except WrongKernel as error:
        return refuse(f"WRONG, and nothing was timed: {error}", status=1)
    return finish(args, target, (config, source), result, kept, dropped)


def finish(
    args: argparse.Namespace,
    target: Target,
    present: tuple[BlockConfig, str],
    result: Result,
    kept: Mapping[BlockConfig, Report],
    dropped: Mapping[BlockConfig, str],
) -> int:
    """Shows, decides and writes. `present` is the config that such calls have now, and where it comes from."""
    config, source = present
    command = " ".join(["python -m perf.tune", *(f"'{word}'" if " " in word else word for word in args.argv)])
    meta = environment.describe() | {"command": command, "arch": target.arch, "present": source}
    meta["multiprocessors"] = target.extent.multiprocessors
    out = console()
    out.print(table(target, result, kept, f"{meta['gpu']}, driver {meta['driver']}, {meta['date']}"))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document(target, result, dropped, meta), indent=1) + "\n")
    print(result.decision.why)
    if not result.decision.keep:
        print("Nothing was written.")
        return 0
    if not args.write:
        print("Nothing was written; --write would keep it for such calls.")
        return 0
    try:
        path = keep(target, result, config, meta)
    except (OSError, ValueError, RuntimeError) as error:
        return refuse(f"not written: {error}", status=1)
    print(f"Written to {path}, for calls of exactly these sizes from processes that start after this one.")
    return 0


def refuse(words: str, status: int = 2) -> int:
    print(f"perf.tune: {words}", file=sys.stderr)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
