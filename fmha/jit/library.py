"""The kernels of this process, by problem: in memory, else from disk, else compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tvm_ffi  # noqa: F401  (loading a kernel needs it: 20 ms, better spent at import than in the first call)

from fmha.jit import compile, key
from fmha.jit.store import Store
from fmha.problem import Problem, Unsupported, supports
from schedules.tiling import BlockConfig, choose

if TYPE_CHECKING:
    from fmha.jit.sass import Resources

Function = Callable[..., None]

STORE = Store()
_functions: dict[tuple[str, str, BlockConfig, str], Function] = {}
_missing = threading.Lock()  # of the threads that miss a kernel, one fetches it


def loaded(problem: Problem, arch: str) -> Function | None:
    """The launch function of `problem` if it is in memory."""
    return _functions.get(_name(problem, arch))


def fetch(problem: Problem, arch: str) -> Function:
    """The launch function of `problem`, from memory, disk or the compiler. `fmha.Unsupported` if there is no kernel."""
    _require(problem, arch)
    with _missing:
        function = loaded(problem, arch)
        if function is None:
            text, build = _recipe(problem, arch)
            function = _functions[_name(problem, arch)] = STORE.get(text, build, compile.load)
        return function


def object_file(problem: Problem, arch: str) -> bytes:
    """The compiled object of `problem`, from disk or the compiler; `compile.cubin` takes the GPU code out of it."""
    _require(problem, arch)
    text, build = _recipe(problem, arch)
    return STORE.get(text, build, bytes)


def warmup(problems: Problem | Iterable[Problem], arch: str | None = None) -> None:
    """Makes kernels ready, so that no later call waits for a compile and CUDA graphs can capture them.

    problems  those to make ready; each takes seconds to compile the first time and milliseconds from disk
    arch      "sm_90a"; by default that of the current CUDA device, on which each kernel is then launched once, for one
              query, to have the driver load it. Another architecture fills the disk cache for it.

    Raises `fmha.Unsupported` for the first problem without a kernel, before any is compiled.
    """
    from fmha.jit import launch

    problems = [problems] if isinstance(problems, Problem) else list(problems)
    here = launch.current_architecture()
    arch = _architecture(arch)
    for problem in problems:
        _require(problem, arch)
    for problem in problems:
        function = fetch(problem, arch)
        if arch == here:
            launch.touch(function, problem)


@dataclass(frozen=True)
class Inspection:
    """What is known of a kernel without running it."""

    problem: Problem
    arch: str
    config: BlockConfig
    key: str  # the canonical text that names it on disk
    smem_bytes: int  # dynamic shared memory of one CTA
    resources: Resources  # registers, stack, spills and loops, from the machine code


def inspect(problem: Problem, arch: str | None = None) -> Inspection:
    """Compiles `problem` if need be and reads its machine code. Needs no GPU.

    arch  "sm_90a"; by default that of the current CUDA device

    Raises `fmha.Unsupported` if there is no kernel.
    """
    from fmha.jit import sass

    arch = _architecture(arch)
    cubin = compile.cubin(object_file(problem, arch))
    config = choose(problem.head_dim, arch)
    text = key.canonical(problem, config, arch)
    return Inspection(problem, arch, config, text, config.smem_bytes(), sass.read(cubin))


def _architecture(arch: str | None) -> str:
    from fmha.jit import launch

    if arch is None and (arch := launch.current_architecture()) is None:
        raise ValueError("arch is None, and there is no CUDA device to take it from; name one, such as 'sm_90a'")
    return arch


def _require(problem: Problem, arch: str) -> None:
    if reason := supports(problem, arch):
        raise Unsupported(reason)


def _name(problem: Problem, arch: str) -> tuple[str, str, BlockConfig, str]:
    return problem.dtype, problem.mask, choose(problem.head_dim, arch), arch


def _recipe(problem: Problem, arch: str) -> tuple[str, Callable[[], bytes]]:
    """The canonical text of a kernel, and how to make it."""
    config = choose(problem.head_dim, arch)
    return key.canonical(problem, config, arch), lambda: compile.compile_object(problem, config, arch)
