"""One source for two readers: the CuTe compiler, which traces it, and the simulator, which runs it as plain Python.

A function marked `@program.jit` is compiled when a kernel is being traced and is ordinary Python otherwise. The DSL
rewrites the control flow of functions whose decorator is spelled `<something>.jit`, and only of those, so always write
`@program.jit`, never a bare `@jit`.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable
from typing import Any, TypeVar

import cutlass.cute as cute
from cutlass._mlir import ir

F = TypeVar("F", bound=Callable[..., Any])


def tracing() -> bool:
    """True while the DSL traces a kernel in this thread: calls then build IR instead of computing."""
    try:
        ir.InsertionPoint.current  # noqa: B018  (raises outside a trace)
    except ValueError:
        return False
    return True


def jit(function: F) -> F:
    """Traces `function` inside a kernel, runs it as plain Python elsewhere."""
    plain = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    plain.__kwdefaults__ = function.__kwdefaults__
    traced = cute.jit(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (traced if tracing() else plain)(*args, **kwargs)

    return call  # type: ignore[return-value]


def range(*bounds: int, unroll: int | None = None) -> builtins.range:
    """`range` whose unroll hint the compiler reads and Python ignores. The DSL knows dynamic loops by this name."""
    return builtins.range(*bounds)
