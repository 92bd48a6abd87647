"""Streams, CUDA graphs, threads and devices: where and when a call runs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import fmha
from tests.cases import Case, inputs
from tests.checks import compare, poison, same_bits
from tests.gpu.conftest import in_a_cold_process

CASE = Case(2, 300, 333, 4, 2, 64, causal=True)
LONG_WAIT = 50_000_000  # GPU cycles, some 30 ms: work queued behind it has certainly not run yet


def warm(*cases: Case) -> None:
    for case in cases:
        for return_lse in (False, True):
            fmha.attention(*inputs(case, "cuda"), causal=case.causal, return_lse=return_lse)
    torch.cuda.synchronize()


def test_runs_on_the_current_stream_after_what_was_queued_there() -> None:
    warm(CASE)
    fresh = inputs(CASE, "cuda", seed=1)
    qkv = [torch.full_like(x, float("nan")) for x in fresh]
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_WAIT)
        for old, new in zip(qkv, fresh, strict=True):
            old.copy_(new)
        out, lse = fmha.attention(*qkv, causal=True, return_lse=True)
    stream.synchronize()
    compare(CASE, fresh, out, lse)


def test_a_call_does_not_wait_for_the_gpu() -> None:
    """A host that waited would find the stream's work done."""
    warm(CASE)
    qkv = inputs(CASE, "cuda")
    torch.cuda._sleep(LONG_WAIT)
    out = fmha.attention(*qkv, causal=True)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    compare(CASE, qkv, out, None)


def test_two_streams_at_once_do_not_disturb_each_other() -> None:
    cases = [Case(1, 700, 900, 4, 2, 64, causal=causal) for causal in (False, True)]
    problems = [(case, inputs(case, "cuda", seed)) for seed in range(4) for case in cases]
    alone = [fmha.attention(*qkv, causal=case.causal) for case, qkv in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(20):
        together = []
        for stream, (case, qkv) in zip(streams, problems, strict=True):
            with torch.cuda.stream(stream):
                together.append(fmha.attention(*qkv, causal=case.causal))
        torch.cuda.synchronize()
        assert all(same_bits(a, b) for a, b in zip(alone, together, strict=True))


def test_threads_with_a_stream_each() -> None:
    cases = [Case(1, 129 + 64 * i, 200, 4, 2, 128, causal=bool(i % 2)) for i in range(4)]
    warm(*cases)
    failures: list[BaseException] = []

    def work(case: Case) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for seed in range(8):
                    qkv = inputs(case, "cuda", seed)
                    out, lse = fmha.attention(*qkv, causal=case.causal, return_lse=True)
                    compare(case, qkv, out, lse)
        except BaseException as error:  # an assertion in a thread would pass unseen
            failures.append(error)

    threads = [threading.Thread(target=work, args=(case,)) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


# -- CUDA graphs ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
def test_a_graph_replays_on_new_inputs(given: bool) -> None:
    warm(CASE)
    qkv = inputs(CASE, "cuda")
    target = torch.empty_like(qkv[0]) if given else None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fmha.attention(*qkv, causal=True, out=target, return_lse=True)
    assert not given or out.data_ptr() == target.data_ptr()
    for seed in range(1, 4):
        for old, new in zip(qkv, inputs(CASE, "cuda", seed), strict=True):
            old.copy_(new)
        poison(out)
        lse.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        compare(CASE, qkv, out, lse)


def test_a_graph_of_many_calls_replays_to_the_bit() -> None:
    """Calls in one graph follow each other closely: each must leave the next what it needs."""
    cases = [Case(2, n, n + 5, 4, 2, 128, causal=n % 2 == 0) for n in (1, 130, 515, 1030)]
    warm(*cases)
    problems = [(case, inputs(case, "cuda", seed=7)) for case in cases * 3]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [fmha.attention(*qkv, causal=case.causal) for case, qkv in problems]
    eager = [fmha.attention(*qkv, causal=case.causal) for case, qkv in problems]
    for _ in range(5):
        for out in outs:
            poison(out)
        graph.replay()
        torch.cuda.synchronize()
        assert all(same_bits(a, b) for a, b in zip(outs, eager, strict=True))


COLD_CAPTURE = """
import torch, fmha
q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.bfloat16)
out = torch.full_like(q, 7.0)
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fmha.attention(q, q, q, out=out)
except RuntimeError as error:
    print("REFUSED", error)
torch.cuda.synchronize()
assert (out == 7.0).all()
fmha.warmup(fmha.Problem("bfloat16", 64))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    fmha.attention(q, q, q, out=out)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(out, fmha.attention(q, q, q)) and not (out == 7.0).any()
print("RECOVERED")
"""


def test_a_capture_that_would_compile_is_refused_and_names_warmup(tmp_path: Path) -> None:
    said = in_a_cold_process(COLD_CAPTURE, tmp_path)
    assert "REFUSED" in said and "fmha.warmup" in said and "RECOVERED" in said


# -- devices --------------------------------------------------------------------------------------------------------
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_device_than_the_current_one() -> None:
    with torch.cuda.device(0):
        qkv = inputs(CASE, "cuda:1")
        out, lse = fmha.attention(*qkv, causal=True, return_lse=True)
        assert out.device == lse.device == torch.device("cuda:1")
        assert torch.cuda.current_device() == 0
        torch.cuda.synchronize(1)
        compare(CASE, qkv, out, lse)
        here = inputs(CASE, "cuda:0")
        compare(CASE, here, *fmha.attention(*here, causal=True, return_lse=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_current_stream_of_the_tensors_device_is_used() -> None:
    fresh = inputs(CASE, "cuda:1", seed=1)
    fmha.attention(*fresh, causal=True)
    qkv = [torch.full_like(x, float("nan")) for x in fresh]
    torch.cuda.synchronize(1)
    stream = torch.cuda.Stream("cuda:1")
    with torch.cuda.device(0), torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_WAIT)
        for old, new in zip(qkv, fresh, strict=True):
            old.copy_(new)
        with torch.cuda.device(0):
            out = fmha.attention(*qkv, causal=True)
    stream.synchronize()
    compare(CASE, fresh, out, None)
