"""`fmha.write_kv` against the oracle, which writes token by token."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fmha
from fmha import reference
from fmha.problem import PAGED_LAYOUTS, PagedProblem, WriteProblem
from tests.checks import POISON, poison, same_bits
from tests.kernels import ARCH
from tests.writing import WriteCase, check, draw, slots, tensors

ROOT = Path(__file__).parent.parent.parent
PROBLEMS = 400  # drawn
MANY = 40  # drawn, of many tokens: threads have several
PART = 50  # of them, a test
LAYOUTS = ("nhd", "hnd", "vllm")
LONG_WAIT = 50_000_000  # GPU cycles, some 30 ms: work queued behind it has certainly not run yet
FAR = 2**31  # elements


def case_of(layout: str, tokens: int = 100) -> WriteCase:
    return WriteCase((tokens,), 4, 128, 16, layout=layout, skipped=0.1)


def failures(seeds: range, many: bool) -> dict[int, str]:
    found = {}
    for seed in seeds:
        case = draw(seed, many)
        try:
            check(case, "cuda", seed)
        except AssertionError as error:
            found[seed] = f"{case}: {error}"
    return found


@pytest.mark.parametrize("start", range(0, PROBLEMS, PART))
def test_drawn_problems(start: int) -> None:
    """A failure names its seed: `tests.writing.draw(seed)` is the case."""
    assert not failures(range(start, start + PART), many=False)


@pytest.mark.parametrize("start", range(0, MANY, 8))
def test_drawn_problems_of_many_tokens(start: int) -> None:
    """Likewise of `draw(seed, True)`."""
    assert not failures(range(start, start + 8), many=True)


@pytest.mark.needs(PagedProblem("bfloat16", 128))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_attention_reads_what_was_written(layout: str) -> None:
    tokens, page = 300, 16
    case = WriteCase((tokens,), 2, 128, page, layout=layout)
    k, v, k_pages, v_pages, _ = tensors(case, "cuda")
    table = torch.randperm(len(k_pages), device="cuda", dtype=torch.int32)[None, : -(-tokens // page)]
    j = torch.arange(tokens, device="cuda")
    fmha.write_kv(k, v, k_pages, v_pages, table[0, j // page].long() * page + j % page, layout=layout)
    q = torch.randn(1, 8, 128, device="cuda").bfloat16()
    lens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    out = fmha.attention_paged(q, k_pages, v_pages, table.contiguous(), lens, layout=layout)
    wanted, _ = reference.attention(q[:, None], k[None], v[None])
    torch.testing.assert_close(out.double(), wanted[:, 0], atol=2e-2, rtol=2e-2)


# -- offsets past 2^31 -------------------------------------------------------------------------------------------------
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.mem_get_info()[1] < 40 * 2**30, reason="needs a GPU with 40 GiB"
)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_past_2_to_31_elements(layout: str, wide: bool) -> None:
    """Both tensors contiguous, of more than 2^31 elements; slots at both ends and around the middle."""
    page, heads, dims = 16, 8, 128
    count = FAR // (page * heads * dims) + 40
    nhd = count, page, heads, dims
    hnd = count, heads, page, dims
    k_shape = {"nhd": nhd, "hnd": hnd, "vllm": (count, heads, dims // 8, page, 8)}[layout]
    v_shape = {"nhd": nhd, "hnd": hnd, "vllm": (count, heads, dims, page)}[layout]
    k_pages, v_pages = (poison(torch.empty(s, dtype=torch.bfloat16, device="cuda")) for s in (k_shape, v_shape))
    assert k_pages.numel() > FAR
    k, v = torch.randn(2, 80, heads, dims, device="cuda").bfloat16()
    near, far, ids = list(range(20)), list(range(count * page - 45, count * page - 5)), [count // 2 * page + 3]
    given = [*near, *far, *ids, *([-1, count * page] * 10)][:80]
    given += [-1] * (80 - len(given))
    slot_mapping = torch.tensor(given, dtype=torch.int64 if wide else torch.int32, device="cuda")
    fmha.write_kv(k, v, k_pages, v_pages, slot_mapping, layout=layout)
    used = sorted({slot // page for slot in given if 0 <= slot < count * page})
    where = {p: i for i, p in enumerate(used)}
    small = [poison(torch.empty(len(used), *x.shape[1:], dtype=x.dtype, device="cuda")) for x in (k_pages, v_pages)]
    moved = [where[s // page] * page + s % page if 0 <= s < count * page else -1 for s in given]
    reference.write_kv(k, v, *small, torch.tensor(moved), layout=layout)
    for pages, right in zip((k_pages, v_pages), small, strict=True):
        assert same_bits(pages[used], right)
        pages.view(torch.int16)[used] = POISON
        touched = sum(int((part != POISON).sum()) for part in pages.view(torch.int16).flatten().split(2**28))
        assert touched == 0, f"{touched} elements of other pages were written"


# -- streams and CUDA graphs -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_a_graph_replays_on_new_tokens_and_slots(layout: str, strided: bool) -> None:
    case = case_of(layout)
    check(case, "cuda")
    k, v, k_pages, v_pages, slot_mapping = tensors(case, "cuda")
    if strided:  # the copies are part of the graph
        k, slot_mapping = k.transpose(1, 2).contiguous().transpose(1, 2), torch.stack([slot_mapping] * 2, 1)[:, 0]
    fmha.write_kv(k, v, k_pages, v_pages, slot_mapping, layout=layout)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fmha.write_kv(k, v, k_pages, v_pages, slot_mapping, layout=layout)
    for seed in range(1, 5):
        fresh = tensors(case, "cuda", seed)
        for old, new in zip((k, v, k_pages, v_pages), fresh, strict=False):
            old.copy_(new)
        slot_mapping.copy_(slots(case, seed))
        wanted = fresh.k_pages, fresh.v_pages
        reference.write_kv(k, v, *wanted, slot_mapping, layout=layout)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(k_pages, wanted[0]) and same_bits(v_pages, wanted[1])


@pytest.mark.needs(PagedProblem("bfloat16", 128))
def test_a_graph_of_writing_and_attending_sees_each_token() -> None:
    """One kernel behind the other, steps of decoding: what is read is what the step has written."""
    page, steps, dims = 16, 40, 128
    k, v = torch.randn(2, steps, 1, 2, dims, device="cuda").bfloat16()
    q = torch.randn(steps, 1, 8, dims, device="cuda").bfloat16()
    k_pages, v_pages = (poison(torch.empty(8, page, 2, dims, dtype=torch.bfloat16, device="cuda")) for _ in range(2))
    table = torch.tensor([[5, 2, 7]], dtype=torch.int32, device="cuda")
    j = torch.arange(steps, device="cuda")
    slot_mapping = table[0, j // page] * page + (j % page).int()
    lens = torch.arange(1, steps + 1, dtype=torch.int32, device="cuda")[:, None]

    def run() -> list[torch.Tensor]:
        outs = []
        for i in range(steps):
            fmha.write_kv(k[i], v[i], k_pages, v_pages, slot_mapping[i : i + 1])
            outs.append(fmha.attention_paged(q[i], k_pages, v_pages, table, lens[i]))
        return outs

    def right(outs: list[torch.Tensor]) -> None:
        for i, out in enumerate(outs):
            keys, values = (x[: i + 1, 0][None] for x in (k, v))
            wanted, _ = reference.attention(q[i][:, None], keys, values)
            torch.testing.assert_close(out.double(), wanted[:, 0], atol=2e-2, rtol=2e-2)

    right(run())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = run()
    for pages in (k_pages, v_pages):
        poison(pages)
    graph.replay()
    torch.cuda.synchronize()
    right(outs)


def test_runs_on_the_current_stream_and_the_host_does_not_wait() -> None:
    case = case_of("nhd")
    check(case, "cuda")
    fresh, given = tensors(case, "cuda", 1), tensors(case, "cuda", 2)
    wanted = given.k_pages.clone(), given.v_pages.clone()
    reference.write_kv(fresh.k, fresh.v, *wanted, fresh.slot_mapping)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_WAIT)
        for name in ("k", "v", "slot_mapping"):
            getattr(given, name).copy_(getattr(fresh, name))
        fmha.write_kv(*given)
        assert not stream.query()
    stream.synchronize()
    assert same_bits(given.k_pages, wanted[0]) and same_bits(given.v_pages, wanted[1])


COLD_CAPTURE = """
import torch, fmha
k = torch.randn(3, 2, 64, device="cuda", dtype=torch.bfloat16)
pages = torch.full((2, 4, 16, 2, 64), 7.0, device="cuda", dtype=torch.bfloat16)
slots = torch.tensor([5, -1, 63], device="cuda")
torch.cuda.synchronize()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        fmha.write_kv(k, k, *pages, slots)
except RuntimeError as error:
    print("REFUSED", error)
torch.cuda.synchronize()
assert (pages == 7.0).all()
fmha.warmup([fmha.WriteProblem("rows"), fmha.WriteProblem("vllm")])
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    fmha.write_kv(k, k, *pages, slots)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(pages[0].flatten(0, 1)[[5, 63]], k[[0, 2]]) and (pages == 7.0).sum() == (2 * 64 - 4) * 128
print("RECOVERED")
"""


def test_a_capture_that_would_compile_is_refused_and_names_warmup(tmp_path: Path) -> None:
    """In a process of its own, with an empty cache: nothing is in memory there."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"FMHA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, "-c", COLD_CAPTURE], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "REFUSED" in ran.stdout and "fmha.warmup" in ran.stdout
    assert "RECOVERED" in ran.stdout


@pytest.mark.parametrize("layout", PAGED_LAYOUTS)
def test_warmup_launches_without_harm(layout: str) -> None:
    problems = [WriteProblem(layout), PagedProblem("bfloat16", 128, layout=layout)]
    fmha.warmup([problem for problem in problems if fmha.supports(problem, ARCH) is None])
    torch.cuda.synchronize()


# -- arguments ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("view", ["packed", "heads first", "columns", "odd", "shifted", "one token"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_views(layout: str, view: str) -> None:
    check(WriteCase((3, 50), 4, 96, 16, layout=layout, view=view), "cuda")


def test_any_producer_of_dlpack_is_taken() -> None:
    class Producer:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.__dlpack__, self.__dlpack_device__ = tensor.__dlpack__, tensor.__dlpack_device__

    check(case_of("hnd"), "cuda", write=lambda *given, layout: fmha.write_kv(*map(Producer, given), layout=layout))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_device_than_the_current_one() -> None:
    with torch.cuda.device(0):
        check(case_of("nhd"), "cuda:1")


def test_slots_on_the_cpu_are_refused() -> None:
    given = tensors(case_of("nhd"), "cuda")
    with pytest.raises(ValueError, match="slot_mapping.device is cpu"):
        fmha.write_kv(given.k, given.v, given.k_pages, given.v_pages, given.slot_mapping.cpu())
    assert (given.k_pages.view(torch.int16) == POISON).all()
