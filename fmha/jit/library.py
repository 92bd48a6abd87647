"""The kernels of this process, by problem and block config: in memory, else from disk, else compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import tvm_ffi  # noqa: F401  (loading a kernel needs it: 20 ms, better spent at import than in the first call)

from fmha.jit import compile, key, tuned
from fmha.jit.store import Store
from fmha.problem import AnyProblem, PagedProblem, Problem, TiledProblem, Unsupported, WriteProblem, supports, unrun
from schedules.tiling import AnyConfig, CopyConfig, Extent, TiledConfig, choose, for_pages, rows

if TYPE_CHECKING:
    from fmha.jit.sass import Resources

Function = Callable[..., None]

STORE = Store()
_functions: dict[tuple[AnyProblem, AnyConfig, str], Function] = {}
_missing = threading.Lock()  # of the threads that miss a kernel, one fetches it


class Pick(NamedTuple):
    """The block config of a call, and where it comes from: the table's reason for it, or "tuned: PATH"."""

    config: TiledConfig
    source: str


def pick(problem: TiledProblem, arch: str, extent: Extent | None = None) -> Pick:
    """The block config that calls of `problem` with these sizes get: that of the user's own file, else the table's.

    Without sizes it is the table's for long sequences. LookupError if the table holds no such head dim.
    """
    if isinstance(problem, PagedProblem):
        row = rows(problem.head_dim, arch, problem.head_dim_v, paged=True)[0]
        return Pick(row.config, row.reason)
    if (
        extent is not None
        and not problem.paged
        and (entry := tuned.find(problem, arch, extent))
        and _suits(entry.config, problem, extent)
    ):
        return Pick(entry.config, f"tuned: {tuned.file().path}")
    config = choose(problem.head_dim, arch, extent, problem.head_dim_v, problem.score)
    found = rows(problem.head_dim, arch, problem.head_dim_v)
    reason = next(row.reason for row in found if row.config == config)
    return Pick(for_pages(config) if problem.paged else config, reason)


def _suits(config: TiledConfig, problem: Problem, extent: Extent) -> bool:
    return config.serves(extent.lse) and config.holds(problem.score)


def loaded(problem: AnyProblem, config: AnyConfig, arch: str) -> Function | None:
    """The launch function of a kernel if it is in memory."""
    return _functions.get((key.padded(problem, config), config, arch))


def fetch(problem: AnyProblem, config: AnyConfig, arch: str) -> Function:
    """The launch function of a kernel, from memory, disk or the compiler. `fmha.Unsupported` if there is none."""
    _require(problem, arch)
    with _missing:
        function = loaded(problem, config, arch)
        if function is None:
            text, build = _recipe(problem, config, arch)
            function = STORE.get(text, build, compile.load)
            _functions[key.padded(problem, config), config, arch] = function
        return function


def object_file(problem: AnyProblem, config: AnyConfig, arch: str) -> bytes:
    """The compiled object of a kernel, from disk or the compiler; `compile.cubin` takes the GPU code out of it."""
    _require(problem, arch)
    text, build = _recipe(problem, config, arch)
    return STORE.get(text, build, bytes)


def warmup(problems: AnyProblem | Iterable[AnyProblem], arch: str | None = None) -> None:
    """Makes kernels ready, so that no later call waits for a compile and CUDA graphs can capture them.

    problems  those to make ready, each with the kernels for long and for short sequences and for calls that want LSEs,
              where these differ, and with those tuned on this machine; a kernel takes seconds to compile the first time
              and milliseconds from disk
    arch      such as "sm_90a"; by default that of the current CUDA device, on which each kernel is then launched once,
              for one query, to have the driver load it, unless calls would be refused one that was never run. Another
              architecture fills the disk cache for it.

    Raises `fmha.Unsupported` for the first problem without a kernel, before any is compiled.
    """
    from fmha.jit import launch

    problems = [problems] if isinstance(problems, AnyProblem) else list(problems)
    here = launch.current_architecture()
    arch = _architecture(arch)
    for problem in problems:
        _require(problem, arch)
    for problem in problems:
        for config in _configs(problem, arch):
            function = fetch(problem, config, arch)
            if arch == here and unrun(arch) is None:
                _touch(function, problem)


def _touch(function: Function, problem: AnyProblem) -> None:
    """Launches a kernel once."""
    from fmha import paged, writing  # which import this module
    from fmha.jit import launch

    if isinstance(problem, WriteProblem):
        writing.touch(problem)
    elif isinstance(problem, PagedProblem):
        paged.touch(problem)
    else:
        launch.touch(function, problem)


def _configs(problem: AnyProblem, arch: str) -> Sequence[AnyConfig]:
    """Those that calls of `problem` may get."""
    if isinstance(problem, WriteProblem):
        return [CopyConfig()]
    if isinstance(problem, PagedProblem):
        return [pick(problem, arch).config]
    found = [row.config for row in rows(problem.head_dim, arch, problem.head_dim_v)]
    if problem.paged:
        return [for_pages(config) for config in found if config.holds(problem.score) and config.takes(problem.paged)]
    return [c for c in dict.fromkeys([*found, *tuned.configs(problem, arch)]) if c.holds(problem.score)]


@dataclass(frozen=True)
class Inspection:
    """What is known of a kernel without running it."""

    problem: AnyProblem
    arch: str
    config: AnyConfig
    reason: str  # where the config comes from: why the table has it, or "tuned: PATH" where a file of the user's does
    key: str  # the canonical text that names it on disk
    smem_bytes: int  # dynamic shared memory of one CTA
    resources: Resources  # registers, stack, spills and loops, from the machine code


def inspect(problem: AnyProblem, arch: str | None = None, *, extent: Extent | None = None) -> Inspection:
    """Compiles `problem` if need be and reads its machine code. Needs no GPU.

    arch    such as "sm_90a"; by default that of the current CUDA device
    extent  an `fmha.Extent`, the sizes of a call: they decide between kernels, and whether one that was tuned on this
            machine applies; by default the table's kernel for long sequences is meant

    Raises `fmha.Unsupported` if there is no kernel, ValueError if the extent is that of another mask.
    """
    from fmha.jit import sass

    arch = _architecture(arch)
    _require(problem, arch)
    if extent is not None and isinstance(problem, Problem) and extent.mask != problem.mask:
        raise ValueError(f"extent.mask is {extent.mask!r}; it must be that of the problem, {problem.mask!r}")
    config: AnyConfig
    if isinstance(problem, WriteProblem):
        config, reason = CopyConfig(), "the only one"
    else:
        config, reason = pick(problem, arch, extent)
    cubin = compile.cubin(object_file(problem, config, arch))
    text = key.canonical(problem, config, arch)
    return Inspection(problem, arch, config, reason, text, config.smem_bytes(), sass.read(cubin))


def _architecture(arch: str | None) -> str:
    from fmha.jit import launch

    if arch is None and (arch := launch.current_architecture()) is None:
        raise ValueError("arch is None, and there is no CUDA device to take it from; name one, such as 'sm_90a'")
    return arch


def _require(problem: AnyProblem, arch: str) -> None:
    if reason := supports(problem, arch):
        raise Unsupported(reason)


def _recipe(problem: AnyProblem, config: AnyConfig, arch: str) -> tuple[str, Callable[[], bytes]]:
    """The canonical text of a kernel, and how to make it."""
    return key.canonical(problem, config, arch), lambda: compile.compile_object(problem, config, arch)
