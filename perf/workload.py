"""`python -m perf.workload WHAT ...`: what `perf.profile` runs on the GPU, each in a process of its own.

    record RECORDER OUT CASE...   times each case's kernel beside one that records, and leaves in OUT what that wrote
    counters CASE...              launches each case's kernel once between the start and stop of a profiler
    iket CASE...                  launches kernels with IKET's ranges, for `run-iket`

They are processes of their own because a profiler attaches to a process, and because a kernel that hangs can only be
ended with the process that launched it.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from fmha.jit import compile, launch, library, sass
from fmha.problem import Problem, Unsupported
from perf.bench import Tensors, make_inputs, relative_error
from perf.cases import parse, slug
from perf.suites import Case
from perf.timing import CudaTimer, interleave
from schedules.tiling import BlockConfig, Extent

planning: Any = importlib.import_module("fmha.attention")  # `fmha.attention` is its function

WARM_SECONDS = 0.3  # under load, for the clock to settle
IKET_ROUNDS = 2  # work tiles per CTA: IKET's file has a few hundred bytes for every operation of every warp


class Kernel:
    """A case's kernel, launched as the library would, but with a work counter of its own that has room behind it for
    what a recording kernel writes."""

    def __init__(self, case: Case, qkv: Tensors, recorder: str | None) -> None:
        q, k, v = self.qkv = qkv
        self.arch = launch.describe_device(q.device).arch
        self.problem = case.problem
        self.config = config_of(case, self.arch, launch.describe_device(q.device).multiprocessors)
        self.plan = planning._plan(q, k, v, planning.Options(causal=case.causal))
        self.object_file = _object_file(self.problem, self.config, self.arch, recorder)
        self.function = compile.load(self.object_file)
        self.out = torch.full_like(q, torch.nan)
        self.buffer = torch.zeros(_buffer_words(self.config), dtype=torch.int64, device=q.device)
        self.base = 0

    def __call__(self) -> None:
        """One launch on the current stream."""
        plan = self.plan
        addresses = (tensor.data_ptr() for tensor in (*self.qkv, self.out))
        stream = torch.cuda.current_stream(self.out.device).cuda_stream
        factors = plan.scale_log2, plan.cap_factor
        counter = self.buffer.data_ptr(), self.base
        self.function(plan.sizes.address, *addresses, 0, 0, 0, *factors, *counter, stream, 0, 0, 0, 0)
        self.base += plan.work_tiles

    def record(self) -> bytes:
        """The counter and what a launch wrote behind it."""
        self.buffer[1:].zero_()
        self()
        torch.cuda.synchronize()
        return self.buffer.cpu().numpy().tobytes()


def extent_of(case: Case, multiprocessors: int) -> Extent:
    return Extent(case.problem.mask, case.seqlen_q, case.seqlen_k, case.batch * case.heads_q, multiprocessors)


def config_of(case: Case, arch: str, multiprocessors: int) -> BlockConfig:
    """The block config that a call of the case gets. `fmha.Unsupported` if it is of a kernel without a recorder."""
    config = library.pick(case.problem, arch, extent_of(case, multiprocessors)).config
    if not isinstance(config, BlockConfig):
        raise Unsupported(f"kernels for {arch} do not record what they do")
    return config


@functools.cache
def _object_file(problem: Problem, config: BlockConfig, arch: str, recorder: str | None) -> bytes:
    if recorder is None:
        return library.object_file(problem, config, arch)
    return compile.compile_object(problem, config, arch, recorder=recorder)


def _buffer_words(config: BlockConfig) -> int:
    from fmha.kernels.sm90 import trace

    return trace.buffer_bytes(config.consumers + 1) // 8


def warm_up(call: Callable[[], Any], seconds: float = WARM_SECONDS) -> None:
    """Keeps the GPU at it for so long."""
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(5):
            call()
        torch.cuda.synchronize()


def waits(object_file: bytes) -> list[dict[str, int]] | str:
    """Where the body loop waits for its MMAs, from the machine code, or why that cannot be read."""
    try:
        return [asdict(wait) for wait in sass.read(compile.cubin(object_file)).body.waits]
    except Exception as error:  # a disassembler older than the compiler fails in ways of its own
        return f"{type(error).__name__}: {error}"[:300]


def record(case: Case, recorder: str, out: Path) -> dict[str, Any]:
    """Times the case's kernel beside the recording one, in turns, and writes what the latter recorded."""
    qkv = make_inputs(case)
    plain, recording = Kernel(case, qkv, None), Kernel(case, qkv, recorder)
    times = interleave({"plain": plain, "recording": recording}, CudaTimer(), seconds=0.5, warm_seconds=WARM_SECONDS)
    seconds = {name: statistics.median(taken) for name, taken in times.items()}
    warm_up(recording)
    (out / f"{slug(case)}.{recorder}.bin").write_bytes(recording.record())
    return {
        "recorder": recorder,
        "roles": plain.config.consumers + 1,
        "config": asdict(plain.config),
        "seconds": seconds,
        "deviation": relative_error(recording.out, plain.out.double()),
        "waits": {"plain": waits(plain.object_file), "recording": waits(recording.object_file)},
    }


def count(cases: list[Case]) -> None:
    """A launch of each case between the start and the stop of a profiler, after others that made it warm."""
    kernels = [Kernel(case, make_inputs(case), None) for case in cases]
    for kernel in kernels:
        warm_up(kernel)
        torch.cuda.profiler.start()
        kernel()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def shrunk(case: Case, multiprocessors: int) -> Case:
    """The case with fewer heads, for about `IKET_ROUNDS` work tiles per CTA."""
    config = config_of(case, "sm_90a", multiprocessors)
    heads = max(1, IKET_ROUNDS * multiprocessors // -(-case.seqlen_q // config.tile_m))
    heads = min(heads, case.batch * case.heads_q)
    return replace(case, batch=1, heads_q=heads, heads_kv=heads)


def ranges(cases: list[Case]) -> None:
    """One launch of each case, made small, with IKET's ranges."""
    for case in cases:
        device = torch.device("cuda", torch.cuda.current_device())
        multiprocessors = launch.describe_device(device).multiprocessors
        small = shrunk(case, multiprocessors)
        Kernel(small, make_inputs(small), "iket")()
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.workload", description=__doc__)
    parser.add_argument("what", choices=["record", "counters", "iket"])
    parser.add_argument("rest", nargs="+")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("perf.workload: there is no CUDA device here", file=sys.stderr)
        return 2
    with torch.no_grad():
        if args.what == "record":
            recorder, out, *names = args.rest
            for case in map(parse, names):
                made = record(case, recorder, Path(out))
                (Path(out) / f"{slug(case)}.{recorder}.json").write_text(json.dumps(made, indent=1) + "\n")
        elif args.what == "counters":
            count([parse(name) for name in args.rest])
        else:
            ranges([parse(name) for name in args.rest])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
