"""From a problem to machine code, and from machine code to a function: two steps, with plain bytes between them.

The bytes are a host object file (ELF) that holds the GPU's cubin and the launch code around it. Compiling needs no
GPU and works for any architecture; loading touches no GPU either, since the driver is handed the cubin at the first
call. The two steps pass files that exist in memory only, because the DSL reads and writes objects by path.
"""

from __future__ import annotations

import importlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fmha.jit import key
from fmha.problem import AnyProblem, PagedProblem, WriteProblem
from schedules.tiling import AnyConfig

ENTRY = "fmha_forward"  # the name under which an object exports its launch function
EM_CUDA = 190  # the machine of a cubin in its ELF header

FOLDERS = {"sm_90a": "sm90", "sm_100a": "sm100", "sm_103a": "sm100"}  # of fmha.kernels

_tracing = threading.Lock()  # the DSL traces into state of the whole process


def compile_object(problem: AnyProblem, config: AnyConfig, arch: str, *, recorder: str | None = None) -> bytes:
    """Compiles the kernel of (problem, config) for `arch` into an object file, the same bytes in every process.

    Strides of q, k, v and o must be multiples of 8 elements and their bases of 16 bytes: the code relies on it.
    `recorder` names one of the architecture's `trace.KERNELS`, which record what their roles do; such an object is for
    a profiler and never comes near the cache.
    """
    import cutlass.cute as cute

    with _tracing, _memory_file() as path:
        kernel, arguments = _kernel(problem, config, arch, recorder)
        name = key.symbol(problem, config, arch) + (f"_{recorder}" if recorder else "")
        type(kernel).kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
        options = f"--enable-tvm-ffi --gpu-arch {arch}" + (" iket" if recorder == "iket" else "")
        cute.compile(kernel, *arguments, options=options).export_to_c(path, function_name=ENTRY)
        with open(path, "rb") as file:
            return file.read()


def load(object_file: bytes) -> Callable[..., None]:
    """The launch function of a compiled object, a `tvm_ffi.Function`.

    It is called as `function(sizes, q, k, v, o, lse, sinks, slopes, scale_log2, cap_factor, counter, base, stream,
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)`, all of them numbers: sizes is the address of an array that
    `fmha.jit.arguments` makes; q, k, v and o are addresses on the current device, multiples of 16 bytes; lse is that of
    a contiguous float32 [B, Hq, Sq], sinks that of an [Hq] and slopes that of a [B, Hq] or [Hq], or 0 for none; what
    scores are multiplied by the kernel says; `fmha.jit.counter` says what counter (an address, too) and base are;
    stream is a cudaStream_t. In a ragged batch counter is the address of `fmha.jit.arguments.listing_words` int32, and
    the last four are those of contiguous int32, or 0. None is checked: a plan is made of what has been. Bytes that are
    no such object raise whatever the DSL makes of them."""
    import cutlass.cute as cute

    with _memory_file(object_file) as path:
        return getattr(cute.runtime.load_module(path, enable_tvm_ffi=True), ENTRY)


def cubin(object_file: bytes) -> bytes:
    """The GPU code inside a compiled object: the ELF image whose machine is CUDA. ValueError if there is none."""
    at = object_file.find(b"\x7fELF", 1)  # the object itself starts with the first one
    while at >= 0:
        if int.from_bytes(object_file[at + 18 : at + 20], "little") == EM_CUDA:
            return object_file[at : at + _elf_bytes(object_file[at : at + 64])]
        at = object_file.find(b"\x7fELF", at + 1)
    raise ValueError(f"no cubin in an object file of {len(object_file)} bytes")


def _elf_bytes(header: bytes) -> int:
    """Size of a 64-bit ELF image: one of its two header tables is the last thing in it (ELF-64, version 1.5)."""
    programs, sections = struct.unpack_from("<QQ", header, 32)
    program_bytes, program_count, section_bytes, section_count = struct.unpack_from("<4H", header, 54)
    return max(programs + program_bytes * program_count, sections + section_bytes * section_count)


def _kernel(problem: AnyProblem, config: AnyConfig, arch: str, recorder: str | None) -> tuple[Any, tuple[Any, ...]]:
    """The kernel, of the folder that `arch` is lowered in, and any arguments of its types."""
    folder = f"fmha.kernels.{FOLDERS[arch]}"
    if isinstance(problem, WriteProblem):
        kind = importlib.import_module("fmha.kernels.common.writing").WriteKernel
        return kind(problem.layout, config), _abstract_arguments(addresses=6, factors=0)
    dtype = _element_type(problem.dtype)
    if isinstance(problem, PagedProblem):
        kind = importlib.import_module(f"{folder}.decode").DecodeKernel
        return kind(dtype, problem.score, problem.layout, config), _abstract_arguments(addresses=12)
    if recorder is not None:
        kind = importlib.import_module(f"{folder}.trace").KERNELS[recorder]
    else:
        kind = importlib.import_module(f"{folder}.forward").ForwardKernel
    kind.list_sequences.set_name_prefix(key.LISTER, remove_cutlass_symbol=True, keep_mangled_name=False)
    kernel = kind(dtype, problem.mask, problem.score, problem.ragged, config, problem.paged)
    return kernel, _abstract_arguments(addresses=8, behind=4)


def _element_type(dtype: str) -> Any:
    import cutlass

    return {"bfloat16": cutlass.BFloat16, "float16": cutlass.Float16}[dtype]


def _abstract_arguments(addresses: int, behind: int = 0, factors: int = 2) -> tuple[Any, ...]:
    """Of a launch function: addresses, the factors scale_log2 and cap_factor, with `behind` more the counter, the
    stream, and those addresses behind it."""
    import cutlass
    from cutlass.cute.runtime import make_fake_stream

    def address() -> Any:
        return cutlass.Int64(0)

    floats = [cutlass.Float32(1.0)] * factors
    counter = (address(), cutlass.Int32(0)) if behind else ()
    return *[address()] * addresses, *floats, *counter, make_fake_stream(), *[address()] * behind


@contextmanager
def _memory_file(content: bytes = b"") -> Iterator[str]:
    """The path of an anonymous file in memory: no disk to be full, no name to be taken."""
    descriptor = os.memfd_create("fmha")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
