"""The suite `decode`: attention over a paged KV cache.

Rates are of what must be read, K and V once, in GB/s; of prefill in chunks, TFLOP/s over the pairs that see each other.
Device times are those of calls in a CUDA graph, host times those of eager calls. Every call of a graph reads another
copy of the cache, where one of them would stay in L2. Beside the rates stands that of a plain streaming read in the
same run.
"""

from __future__ import annotations

import importlib
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fmha import reference
from fmha.problem import PagedProblem
from perf.launch import host_times
from perf.peers import OURS, Candidate
from perf.timing import quartiles

Row = dict[str, Any]
Call = Callable[[], Any]

WRITTEN = ("nhd", "vllm")  # layouts that new tokens are written in
READ_BYTES = 2**33
COLD_BYTES = 6 * 10**8  # that the calls of a graph read before one of them reads the same again
TOLERANCE = 1e-2  # of the norm
REPLAYS = 15
GRAPH_SECONDS = 4e-3  # of one replay, about
MIXED = tuple(round(math.exp(random.Random(n).uniform(math.log(16), math.log(32768)))) for n in range(64))


@dataclass(frozen=True)
class PagedCase:
    """One problem: `lengths` keys of each sequence, and as many queries as `tokens` says."""

    lengths: tuple[int, ...]
    page: int
    heads_q: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    layout: str = "nhd"
    tokens: int = 1
    label: str = ""

    @property
    def name(self) -> str:
        batch = len(self.lengths)
        lengths = self.label or f"B{batch} L{self.lengths[0]}"
        heads = f"H{self.heads_q}x{self.heads_kv}"
        tokens = f" Sq{self.tokens}" if self.tokens > 1 else ""
        return f"D{self.head_dim} {lengths}{tokens} {heads} {self.layout} page {self.page}"

    @property
    def problem(self) -> PagedProblem:
        """What selects a kernel."""
        return PagedProblem("bfloat16", self.head_dim, layout="vllm" if self.layout == "vllm" else "rows")

    @property
    def bytes(self) -> int:
        """Of K and V."""
        return 2 * 2 * sum(self.lengths) * self.heads_kv * self.head_dim

    @property
    def flops(self) -> int:
        """Causal, aligned at the bottom right."""
        pairs = sum(self.tokens * n - self.tokens * (self.tokens - 1) // 2 for n in self.lengths)
        return 4 * self.heads_q * self.head_dim * pairs

    @property
    def work(self) -> float:
        """What the unit counts."""
        return self.bytes / 1e9 if self.tokens == 1 else self.flops / 1e12

    @property
    def unit(self) -> str:
        return "GB/s" if self.tokens == 1 else "TFLOP/s"


CASES = (
    *(PagedCase((8192,) * 128, page) for page in (16, 64)),
    *(PagedCase((4096,) * 64, page) for page in (16, 64, 128)),
    PagedCase((4096,) * 64, 16, heads_q=64),
    PagedCase((4096,) * 64, 16, heads_kv=32),
    PagedCase((4096,) * 16, 16),
    PagedCase((131072,), 16),
    *(PagedCase((8192,), page) for page in (16, 64)),
    PagedCase(MIXED, 16, label="B64 L16-32k"),
    PagedCase((4096,) * 64, 16, layout="vllm"),
    PagedCase((8192,), 16, layout="vllm"),
    PagedCase((4096,) * 64, 16, layout="hnd"),
    PagedCase((16384 + 512,) * 4, 16, tokens=512),
)


@dataclass
class Cache:
    """K and V in pages, and as often as it takes to read cold memory in every call."""

    k: torch.Tensor
    v: torch.Tensor
    tables: list[torch.Tensor]
    lengths: torch.Tensor
    q: torch.Tensor
    dense: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, case: PagedCase) -> Cache:
        generator = torch.Generator("cuda").manual_seed(len(case.lengths))
        pages = [-(-n // case.page) for n in case.lengths]
        copies = max(1, math.ceil(COLD_BYTES / case.bytes)) if case.bytes < COLD_BYTES else 1
        total = sum(pages) * copies
        shape = (total, case.page, case.heads_kv, case.head_dim)
        k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        order = torch.randperm(total, generator=generator, device="cuda").int()
        tables, at = [], 0
        for _ in range(copies):
            table = torch.zeros(len(pages), max(pages), dtype=torch.int32, device="cuda")
            for b, count in enumerate(pages):
                table[b, :count] = order[at : at + count]
                at += count
            tables.append(table)
        queries = (len(pages), *((case.tokens,) if case.tokens > 1 else ()), case.heads_q, case.head_dim)
        q = torch.randn(queries, generator=generator, device="cuda", dtype=torch.bfloat16)
        return cls(k, v, tables, torch.tensor(case.lengths, dtype=torch.int32, device="cuda"), q)

    def rows(self, copy: int, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a sequence, [length, Hkv, D]."""
        ids = self.tables[copy][batch].long()[: -(-length // self.k.shape[1])]
        return self.k[ids].flatten(0, 1)[:length], self.v[ids].flatten(0, 1)[:length]


@dataclass(frozen=True)
class Bound:
    """A candidate: a call for each copy of the cache, and what the first one returns as [B, S, Hq, D]."""

    calls: list[Call]
    output: Callable[[Any], torch.Tensor]


def _ours(case: PagedCase, cache: Cache) -> Bound:
    import fmha

    k, v = cache.k, cache.v
    if case.layout == "hnd":
        k, v = (x.transpose(1, 2).contiguous() for x in (k, v))
    elif case.layout == "vllm":
        k = k.unflatten(3, (-1, 8)).permute(0, 2, 3, 1, 4).contiguous()
        v = v.permute(0, 2, 3, 1).contiguous()

    def bind(table: torch.Tensor) -> Call:
        given = cache.q, k, v, table, cache.lengths
        return lambda: fmha.attention_paged(*given, layout=case.layout, causal=case.tokens > 1)

    return Bound([bind(table) for table in cache.tables], _four)


def _flashinfer(case: PagedCase, cache: Cache) -> Bound:
    """Decoding on tensor cores. Planned before it is timed, as a serving loop does once for all layers."""
    flashinfer = importlib.import_module("flashinfer")
    if case.layout != "nhd" or case.tokens > 1:
        raise NotImplementedError("decoding over nhd only is measured")
    pages = -(-cache.lengths // case.page)
    starts = torch.nn.functional.pad(torch.cumsum(pages, 0), (1, 0)).int()
    last = cache.lengths - (pages - 1) * case.page

    def bind(table: torch.Tensor) -> Call:
        workspace = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        used = torch.arange(table.shape[1], device="cuda")[None] < pages[:, None]
        sizes = case.heads_q, case.heads_kv, case.head_dim, case.page
        wrapper.plan(starts, table[used], last.int(), *sizes, q_data_type=torch.bfloat16)
        return lambda: wrapper.run(cache.q, (cache.k, cache.v))

    return Bound([bind(table) for table in cache.tables], _four)


def _flash_attn_3(case: PagedCase, cache: Cache) -> Bound:
    """Over contiguous K and V, split as it likes: this build reads no pages."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    if (major := torch.cuda.get_device_capability()[0]) != 9:
        raise RuntimeError(f"it is for compute capability 9, this is {major}")
    if case.layout != "nhd" or case.tokens > 1:
        raise NotImplementedError("decoding over nhd only is measured")
    q = cache.q.unsqueeze(1)

    def bind(k: torch.Tensor, v: torch.Tensor) -> Call:
        return lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=cache.lengths)

    return Bound([bind(k, v) for k, v in contiguous(case, cache)], _four)


def _contiguous(case: PagedCase, cache: Cache) -> Bound:
    """The same attention over contiguous K and V."""
    import fmha

    if case.tokens == 1:
        raise NotImplementedError("it is measured beside prefill in chunks")

    def bind(k: torch.Tensor, v: torch.Tensor) -> Call:
        return lambda: fmha.attention(cache.q, k, v, causal=True)

    return Bound([bind(k, v) for k, v in contiguous(case, cache)], _four)


def contiguous(case: PagedCase, cache: Cache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """[B, longest, Hkv, D] of each copy."""
    if not cache.dense:
        longest = max(case.lengths)
        for copy in range(len(cache.tables)):
            rows = [cache.rows(copy, b, n) for b, n in enumerate(case.lengths)]
            pads = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, longest - len(x))) for one in rows for x in one]
            cache.dense.append((torch.stack(pads[::2]), torch.stack(pads[1::2])))
    return cache.dense


def _four(result: Any) -> torch.Tensor:
    out = result[0] if isinstance(result, tuple) else result
    return out if out.dim() == 4 else out.unsqueeze(1)


CANDIDATES = {OURS: _ours, "flashinfer": _flashinfer, "fa3": _flash_attn_3, "contiguous": _contiguous}
TITLES = {
    OURS: "fmha",
    "flashinfer": "FlashInfer, tensor cores",
    "fa3": "FlashAttention-3, split, contiguous K and V",
    "contiguous": "fmha, contiguous K and V",
    "copy": "a copy of the new tokens",
}
PACKAGES = ("flashinfer-python", "fa3-fwd")


def check(case: PagedCase, cache: Cache, out: torch.Tensor) -> str | None:
    """Why it is wrong: the first and the last sequence are compared with the oracle."""
    for b in {0, len(case.lengths) - 1}:
        k, v = cache.rows(0, b, case.lengths[b])
        q = cache.q[b : b + 1] if case.tokens > 1 else cache.q[b : b + 1].unsqueeze(1)
        rows = torch.arange(min(16, case.tokens), device="cuda")
        exact, _ = reference.attention(q, k[None], v[None], causal=True, rows=rows)
        error = (out[b : b + 1, : len(rows)].double() - exact).norm() / exact.norm()
        if not error.item() <= TOLERANCE:
            return f"off by {error.item():.1e} of the oracle's norm"
    return None


def bind(case: PagedCase, cache: Cache, names: list[str]) -> tuple[dict[str, Bound], dict[str, str]]:
    """The candidates that take this case and are right on it, and why the others are left out."""
    found: dict[str, Bound] = {}
    left_out: dict[str, str] = {}
    for name in names:
        try:
            bound = CANDIDATES[name](case, cache)
            wrong = check(case, cache, bound.output(bound.calls[0]()))
        except Exception as error:  # a peer may raise anything; fmha's own errors are not for hiding
            if name == OURS:
                raise
            left_out[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        if wrong:
            left_out[name] = wrong
        else:
            found[name] = bound
    return found, left_out


def capture(calls: list[Call], times: int) -> torch.cuda.CUDAGraph:
    """All calls, one after the other, so many times."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            for call in calls:
                call()
    return graph


def seconds_of(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def device_times(bounds: dict[str, Bound], replays: int = REPLAYS) -> dict[str, list[float]]:
    """Seconds of a call, by candidate: graphs are replayed in turns."""
    graphs, counts = {}, {}
    for name, bound in bounds.items():
        taken = seconds_of(capture(bound.calls, 1))
        again = max(1, round(GRAPH_SECONDS / taken))
        graphs[name], counts[name] = capture(bound.calls, again), again * len(bound.calls)
    times: dict[str, list[float]] = {name: [] for name in bounds}
    order = random.Random(0)
    for replay in range(replays + 2):
        for name in order.sample(list(graphs), len(graphs)):
            taken = seconds_of(graphs[name])
            if replay >= 2:
                times[name].append(taken / counts[name])
    return times


def write_row(layout: str, tokens: int = 8192, heads: int = 8, dim: int = 128, page: int = 16, copies: int = 8) -> Row:
    """New tokens into their slots, beside a copy of the same tensors: GB/s read and written."""
    import fmha

    generator = torch.Generator("cuda").manual_seed(tokens)
    every = torch.randn((copies, 2, tokens, heads, dim), generator=generator, device="cuda", dtype=torch.bfloat16)
    count = copies * tokens // page
    order = torch.randperm(count, generator=generator, device="cuda").view(copies, -1, 1)
    slots = (order * page + torch.arange(page, device="cuda")).flatten(1)  # pages anywhere, tokens in order
    shapes = _page_shapes(layout, count, page, heads, dim)
    k_pages, v_pages = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    target = torch.empty_like(every)

    def writing(copy: int) -> Call:
        k, v = every[copy]
        return lambda: fmha.write_kv(k, v, k_pages, v_pages, slots[copy], layout=layout)

    def copying(copy: int) -> Call:
        return lambda: target[copy].copy_(every[copy])

    bounds = {
        OURS: Bound([writing(copy) for copy in range(copies)], _four),
        "copy": Bound([copying(copy) for copy in range(copies)], _four),
    }
    for bound in bounds.values():
        bound.calls[0]()
    work = 4 * every[0].numel() / 1e9
    rates = {name: [work / t for t in quartiles(taken)] for name, taken in device_times(bounds).items()}
    host = host_times({OURS: Candidate(bounds[OURS].calls[0], lambda out: out)}, bursts=5)[OURS]
    ours = rates[OURS][1]
    return {
        "case": {"name": f"write_kv D{dim} T{tokens} H{heads} {layout} page {page}", "bytes": work * 1e9},
        "unit": "GB/s",
        "device_us": work / ours * 1e6,
        "host_us": statistics.median(host) * 1e6,
        OURS: ours,
        "peers": {"copy": rates["copy"][1]},
        "spread": {name: [slow, fast] for name, (fast, _, slow) in rates.items()},
        "read": read_rate(),
        "left_out": {},
    }


def _page_shapes(layout: str, count: int, page: int, heads: int, dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if layout == "vllm":
        return (count, heads, dim // 8, page, 8), (count, heads, dim, page)
    shape = (count, page, heads, dim) if layout == "nhd" else (count, heads, page, dim)
    return shape, shape


def read_rate() -> float:
    """GB/s of a plain streaming read."""
    words = torch.zeros(READ_BYTES // 8, dtype=torch.int64, device="cuda")
    graph = capture([words.sum], 1)
    taken = statistics.median(seconds_of(graph) for _ in range(7))
    return READ_BYTES / taken / 1e9


def run_row(case: PagedCase, names: list[str]) -> Row:
    cache = Cache.of(case)
    shown = {key: value for key, value in asdict(case).items() if key != "lengths"}
    shown |= {"name": case.name, "lengths": list(case.lengths), "bytes": case.bytes, "flops": case.flops}
    bounds, left_out = bind(case, cache, names)
    if OURS not in bounds:
        return {"case": shown, "error": left_out[OURS], "left_out": left_out}
    rates, spread = {}, {}
    for name, taken in device_times(bounds).items():
        fast, middle, slow = quartiles(taken)
        rates[name], spread[name] = case.work / middle, [case.work / slow, case.work / fast]
    host = host_times({OURS: Candidate(bounds[OURS].calls[0], lambda out: out)}, bursts=5)[OURS]
    return {
        "case": shown,
        "unit": case.unit,
        "device_us": case.work / rates[OURS] * 1e6,
        "host_us": statistics.median(host) * 1e6,
        OURS: rates.pop(OURS),
        "peers": rates,
        "spread": spread,
        "read": read_rate(),
        "left_out": left_out,
    }


def select(only: list[str]) -> list[PagedCase]:
    """Those whose name contains one of `only` (empty: all)."""
    return [case for case in CASES if not only or any(text in case.name for text in only)]


def run(cases: Sequence[PagedCase], write: bool) -> Iterator[Row]:
    """Yields rows as they are measured; with `write` those of new tokens, too."""
    warm_up()
    for case in cases:
        try:
            yield run_row(case, list(CANDIDATES))
        except Exception as error:  # shown, recorded and counted: one bad row must not lose the others
            yield {"case": {"name": case.name}, "error": f"{type(error).__name__}: {error}"[:500]}
        torch.cuda.empty_cache()
    if write:
        yield from map(write_row, WRITTEN)


def warm_up(seconds: float = 0.5) -> None:
    """For the clock to settle."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        torch.mm(a, a)
        torch.cuda.synchronize()
