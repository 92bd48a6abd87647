"""The suite `launch`: what a call costs besides its kernel.

Host time of an eager call, time of a CUDA-graph replay, and, in fresh processes, the first call: with an empty cache (a
compile), with the kernel on disk, and with it in memory but a shape not seen before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from perf.peers import OURS, PEERS, US, Candidate, Prepare
from perf.suites import Case
from perf.timing import quartiles

Row = dict[str, Any]
Samples = dict[str, list[float]]  # seconds, by candidate

ROOT = Path(__file__).resolve().parent.parent
TINY = Case(1, 128, 128, 8, 8, 128)
BURST = 50  # eager calls between two waits: few enough not to fill the driver's queue, which would block the host
BURSTS = 30
GRAPH_CALLS = 20
REPLAYS = 50
NEW_SHAPES = 30
WITH_DISK_CACHE = (OURS, "fa4")  # those that keep kernels on disk
PROBE_SECONDS = 180
PROBES = {
    # measure -> row name and unit
    "import": ("import", "s"),
    "first": ("{}, first kernel of the process", "s"),
    "next": ("{}, another kernel", "s"),
    "shape": ("kernel in memory, shape not seen before", "us"),
}
ROWS = 3 + 6
SCALE = {"s": 1.0, "ms": 1e3, "us": 1e6}


def run(loaded: dict[str, Prepare]) -> Iterator[Row]:
    """Yields `ROWS` rows, in which less is better."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 128, 8, 128, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    candidates, left_out = working(loaded, (q, k, v))
    yield row("eager call, host", "us", host_times(candidates), left_out)
    replays, device = graph_times(candidates, left_out)
    yield row("CUDA-graph replay of one call, host", "us", replays, left_out)
    yield row(f"call in a CUDA graph of {GRAPH_CALLS}, device", "us", device, left_out)
    yield from first_calls([name for name in loaded if name in WITH_DISK_CACHE])


def row(name: str, unit: str, samples: Samples, left_out: dict[str, str] | None = None) -> Row:
    """Medians and quartiles in `unit`. fmha must be among the samples."""
    found = {who: [SCALE[unit] * value for value in quartiles(values)] for who, values in samples.items()}
    medians = {who: middle for who, (_, middle, _) in found.items()}
    return {
        "case": {"name": name},
        "unit": unit,
        OURS: medians.pop(OURS),
        "peers": medians,
        "spread": {who: [low, high] for who, (low, _, high) in found.items()},
        "left_out": dict(left_out or {}),
    }


def working(
    loaded: dict[str, Prepare], qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """The candidates whose first call on the tiny problem succeeds, and why the others' did not."""
    candidates: dict[str, Candidate] = {}
    left_out: dict[str, str] = {}
    for name, make in loaded.items():
        try:
            candidate = make(TINY, *qkv)
            candidate.call()
        except Exception as error:  # a peer may raise anything; fmha's own errors are not for hiding
            if name == OURS:
                raise
            left_out[name] = f"{type(error).__name__}: {error}"[:300]
        else:
            candidates[name] = candidate
    return candidates, left_out


def host_times(
    candidates: dict[str, Candidate],
    *,
    wait: Callable[[], None] = torch.cuda.synchronize,
    clock: Callable[[], float] = time.perf_counter,
    bursts: int = BURSTS,
) -> Samples:
    """Seconds until a call returns, with nothing waited for; the first burst of each is thrown away."""
    times: Samples = {name: [] for name in candidates}
    order = random.Random(0)
    for burst in range(bursts + 1):
        for name in order.sample(list(candidates), len(candidates)):
            call = candidates[name].call
            wait()
            taken = []
            for _ in range(BURST):
                before = clock()
                call()
                taken.append(clock() - before)
            if burst:
                times[name] += taken
    wait()
    return times


def graph_times(candidates: dict[str, Candidate], left_out: dict[str, str]) -> tuple[Samples, Samples]:
    """Host seconds of a one-call graph's replay, and device seconds of one call in a graph of many."""
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph]] = {}
    for name, candidate in candidates.items():
        try:
            graphs[name] = capture(candidate.call, 1), capture(candidate.call, GRAPH_CALLS)
        except Exception as error:
            if name == OURS:
                raise
            left_out[name] = f"capture: {type(error).__name__}: {error}"[:300]
    host: Samples = {name: [] for name in graphs}
    device: Samples = {name: [] for name in graphs}
    for replay in range(REPLAYS + 3):
        for name, (one, many) in graphs.items():
            torch.cuda.synchronize()
            before = time.perf_counter()
            one.replay()
            taken = time.perf_counter() - before
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            many.replay()
            end.record()
            end.synchronize()
            if replay >= 3:
                host[name].append(taken)
                device[name].append(begin.elapsed_time(end) / 1e3 / GRAPH_CALLS)
    return host, device


def capture(call: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph


# -- first calls, each in a process of its own ------------------------------------------------------------------------
def first_calls(names: list[str]) -> Iterator[Row]:
    """One cold process, then two that find the kernels on disk."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as cache:
            found[name] = [probe(name, Path(cache)) for _ in range(3)]
    cold = {name: runs[:1] for name, runs in found.items()}
    warm = {name: runs[1:] for name, runs in found.items()}
    yield _probe_row("import", "", warm)
    for state, runs in (("cold compile", cold), ("disk hit", warm)):
        for measure in ("first", "next"):
            yield _probe_row(measure, state, runs)
    yield _probe_row("shape", "", warm)


def _probe_row(measure: str, state: str, runs: dict[str, list[dict[str, Any]]]) -> Row:
    name, unit = PROBES[measure]
    if state == "disk hit":
        unit = "ms"
    samples: Samples = {}
    left_out = {}
    for who, reports in runs.items():
        failed = [report["error"] for report in reports if "error" in report]
        if failed:
            left_out[who] = failed[0]
        else:
            samples[who] = [value for report in reports for value in report[measure]]
    title = name.format(state)
    if OURS not in samples:
        return {"case": {"name": title}, "error": left_out.get(OURS, "not measured"), "left_out": left_out}
    return row(title, unit, samples, left_out)


def probe(name: str, cache: Path) -> dict[str, Any]:
    """Runs `python -m perf.launch NAME` with its disk cache in `cache`; `{"error": ...}` if that failed."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "FMHA_CACHE_DIR": str(cache),
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache),
    }
    command = [sys.executable, "-m", "perf.launch", name]
    try:
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PROBE_SECONDS, check=True
        )
        return json.loads(ran.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        return {"error": f"exit code {error.returncode}: {error.stderr.strip()[-400:]}"}
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _probed(name: str) -> dict[str, list[float]]:
    """In a fresh process: seconds of the import, of a first and another kernel's first call, and of new shapes."""
    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    before = time.perf_counter()
    prepare = (US if name == OURS else PEERS[name]).load()
    imported = time.perf_counter() - before

    def first_call(length: int, head_dim: int, wait: bool = True) -> float:
        case = Case(1, length, length, 4, 4, head_dim)
        q, k, v = (torch.randn(1, length, 4, head_dim, device="cuda").to(torch.bfloat16) for _ in range(3))
        call = prepare(case, q, k, v).call
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        if wait:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    with torch.no_grad():
        return {
            "import": [imported],
            "first": [first_call(64, 64)],
            "next": [first_call(64, 128)],
            # one number a process, the median over lengths that it has not seen
            "shape": [statistics.median(first_call(65 + i, 128, wait=False) for i in range(NEW_SHAPES))],
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m perf.launch", description="Times the first calls of a candidate.")
    parser.add_argument("name", choices=[OURS, *PEERS])
    print(json.dumps(_probed(parser.parse_args().name)))
