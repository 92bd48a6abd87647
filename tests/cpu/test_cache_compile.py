"""The real compiler behind the cache: what it makes, how it loads, and how often it runs."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

import fmha
from fmha.jit import compile, key, library, sass
from fmha.jit.store import CacheWarning, Store
from fmha.problem import Problem, Unsupported
from schedules.tiling import Extent, choose, rows

ARCH = "sm_90a"
PROBLEM = Problem("bfloat16", 64, "dense")
CONFIG = choose(64, ARCH)
TEXT = key.canonical(PROBLEM, CONFIG, ARCH)


@pytest.fixture(scope="module")
def object_file() -> bytes:
    return compile.compile_object(PROBLEM, CONFIG, ARCH)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The library with nothing in memory and an empty disk."""
    monkeypatch.setattr(library, "STORE", Store(tmp_path / "cache"))
    monkeypatch.setattr(library, "_functions", {})
    return tmp_path / "cache"


def test_the_cubin_holds_the_kernel_under_its_name(object_file):
    cubin = compile.cubin(object_file)
    resources = sass.read(cubin)
    assert resources.function == f"{key.symbol(PROBLEM, CONFIG, ARCH)}_0"
    assert resources.setmaxnreg == (CONFIG.producer_registers, CONFIG.consumer_registers)
    assert len(cubin) < len(object_file)


def test_other_processes_make_the_same_bytes_whatever_their_environment(object_file, tmp_path):
    """Hash seed, the DSL's default architecture and the folder they run in have no say."""
    script = (
        "import sys; from fmha.jit import compile; from fmha.problem import Problem; from schedules.tiling import *\n"
        f"made = compile.compile_object({PROBLEM!r}, choose(64, {ARCH!r}), {ARCH!r})\n"
        "sys.stdout.buffer.write(made)\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7", "CUTE_DSL_ARCH": "sm_100a", "PYTHONPATH": os.getcwd()}
    made = subprocess.run(
        [sys.executable, "-c", script], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, check=True
    )
    assert made.stdout == object_file


def test_an_object_loads_without_a_gpu(object_file):
    assert callable(compile.load(object_file))


def test_the_loaded_function_checks_its_arguments(object_file):
    """Proof that it is the launch function: it refuses tensors, text and too few numbers."""
    import torch

    function = compile.load(object_file)
    tensor = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
    for arguments in ((0, tensor, 0, 0, 0, 0, 1.0, 0, 0, 0), (0, 0, 0, 0, 0, 0, "1.0", 0, 0, 0), (0, 0, 0)):
        with pytest.raises((ValueError, TypeError)):
            function(*arguments)


@pytest.mark.parametrize("bad", [b"", b"text", "truncated"])
def test_bytes_that_are_no_object_are_refused(object_file, bad):
    with pytest.raises(Exception, match="(?i)fail|not"):
        compile.load(object_file[: len(object_file) // 2] if bad == "truncated" else bad)


def test_an_object_without_a_cubin_is_refused(object_file):
    with pytest.raises(ValueError, match="no cubin"):
        compile.cubin(object_file[:2000])
    with pytest.raises(ValueError, match="no cubin"):
        compile.cubin(b"")


def test_the_library_compiles_once_keeps_on_disk_and_keeps_in_memory(cache, monkeypatch):
    compiled = []
    real = compile.compile_object
    monkeypatch.setattr(compile, "compile_object", lambda *args: compiled.append(args) or real(*args))
    assert library.loaded(PROBLEM, CONFIG, ARCH) is None
    function = library.fetch(PROBLEM, CONFIG, ARCH)
    assert library.loaded(PROBLEM, CONFIG, ARCH) is function
    assert library.fetch(Problem("bfloat16", 40, "dense"), CONFIG, ARCH) is function  # pads to the same config
    library._functions.clear()
    assert library.fetch(PROBLEM, CONFIG, ARCH) is not function
    assert compile.cubin(library.object_file(PROBLEM, CONFIG, ARCH))
    assert compiled == [(PROBLEM, CONFIG, ARCH)]
    (entry,) = library.STORE.entries()
    assert (entry.text, entry.damage) == (TEXT, None)


def test_a_kernel_is_compiled_and_loaded_with_no_disk_at_all(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(library, "STORE", Store(tmp_path / "file"))
    monkeypatch.setattr(library, "_functions", {})
    with pytest.warns(CacheWarning, match="memory only"):
        assert callable(library.fetch(PROBLEM, CONFIG, ARCH))


CHILD = f"""
import os, sys, time
from pathlib import Path
import cutlass
from fmha.jit import compile, library
from fmha.problem import Problem
from schedules.tiling import choose

log, go, ready = map(Path, sys.argv[1:])
real = compile.compile_object

def counted(*args):
    with open(log, "a") as file:
        file.write(f"{{os.getpid()}}\\n")
    return real(*args)

compile.compile_object = counted
ready.touch()
while not go.exists():
    time.sleep(0.01)
library.fetch({PROBLEM!r}, choose({PROBLEM.head_dim}, {ARCH!r}), {ARCH!r})
"""


def test_eight_processes_that_need_the_same_cold_kernel_compile_it_once(tmp_path):
    environment = {**os.environ, "FMHA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONWARNINGS": "error::RuntimeWarning"}
    log, go = tmp_path / "log", tmp_path / "go"
    ready = [tmp_path / f"ready{i}" for i in range(8)]
    children = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(log), str(go), str(path)], env=environment) for path in ready
    ]
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in ready):
        assert all(child.poll() is None for child in children) and time.monotonic() < deadline
        time.sleep(0.05)
    go.touch()
    assert [child.wait(timeout=120) for child in children] == [0] * 8
    assert len(log.read_text().splitlines()) == 1
    assert [entry.damage for entry in Store(tmp_path / "cache").entries()] == [None]


def test_inspect_reads_what_the_kernel_costs(cache):
    found = fmha.inspect(PROBLEM, ARCH)
    assert (found.problem, found.arch, found.config, found.key) == (PROBLEM, ARCH, CONFIG, TEXT)
    assert found.smem_bytes == CONFIG.smem_bytes()
    assert (found.resources.local_loads, found.resources.local_stores, found.resources.stack_bytes) == (0, 0, 0)
    assert found.resources.loops
    long, short, *_, exact = rows(PROBLEM.head_dim, ARCH)
    assert found.reason == long.reason
    for lse, row in ((False, short), (True, exact)):
        found = fmha.inspect(PROBLEM, ARCH, extent=Extent(PROBLEM.mask, 128, 128, 1, 132, lse))
        assert (found.config, found.reason) == (row.config, row.reason)


def test_warmup_fills_memory_and_refuses_before_it_compiles(cache, monkeypatch):
    monkeypatch.setattr(compile, "compile_object", lambda *args: pytest.fail("compiled"))
    with pytest.raises(Unsupported, match="float32"):
        fmha.warmup([PROBLEM, Problem("float32", 64)], ARCH)
    monkeypatch.undo()
    monkeypatch.setattr(library, "STORE", Store(cache))
    monkeypatch.setattr(library, "_functions", {})
    fmha.warmup(PROBLEM, ARCH)
    configs = [row.config for row in rows(PROBLEM.head_dim, ARCH)]
    assert len(configs) > 1 and all(library.loaded(PROBLEM, config, ARCH) is not None for config in configs)


def test_without_a_gpu_an_architecture_must_be_named(cache, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for call in (fmha.warmup, fmha.inspect):
        with pytest.raises(ValueError, match="arch is None.*'sm_90a'"):
            call(PROBLEM)
        with pytest.raises(Unsupported, match="sm_80"):
            call(PROBLEM, "sm_80")
