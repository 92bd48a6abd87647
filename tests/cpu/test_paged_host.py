"""`fmha.attention_paged` up to the launch, on CPU tensors: a stand-in takes the kernel's place."""

from __future__ import annotations

import ctypes
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fmha
from fmha import paged, reference
from fmha.jit import arguments, launch, library, workspace
from fmha.problem import PagedProblem, Unsupported
from schedules.splits import MAX_UNITS, UNLIMITED, counters_needed, parts_needed
from schedules.tiling import ROWS_PER_WARPGROUP, TiledConfig
from tests.cpu.stand_in import MULTIPROCESSORS, STREAM, pass_for_gpu, strided, vector
from tests.paged import PagedCase, Tensors, call, compare, tensors

BF16 = torch.bfloat16
README = Path(__file__).resolve().parents[2] / "README.md"
CASE = PagedCase(seq_lens=(21, 3), tokens=(1, 1), heads_kv=2, group=2, head_dim=16, page=8)
CASES = {
    "one query": CASE,
    "several": replace(CASE, tokens=(3, 3), causal=True),
    "packed": replace(CASE, tokens=(2, 4), packed=True, outside=(1, 2), causal=True),
    "hnd": replace(CASE, layout="hnd", page=1),
    "hnd, packed": replace(CASE, layout="hnd", tokens=(5, 0), packed=True),
    "vllm": replace(CASE, layout="vllm"),
    "vllm, several": replace(CASE, layout="vllm", page=16, tokens=(2, 2), window=(4, 1)),
    "other head dim of v": replace(CASE, head_dim_v=24),
    "other head dim of v, vllm": replace(CASE, layout="vllm", head_dim_v=8, dtype="fp16"),
    "softcap, sinks": replace(CASE, softcap=3.0, sinks=True, window=(2, None)),
    "splits": replace(CASE, splits=3),
}


class Kernel:
    """Computes what the kernel would, of the numbers that it gets."""

    def __init__(self, arch: str = "sm_90a") -> None:
        self.arch = arch
        self.calls: list[dict[str, int]] = []
        self.problem: PagedProblem | None = None

    def fetch(self, problem: PagedProblem, config: TiledConfig, arch: str) -> Kernel:
        assert arch == self.arch
        self.problem, self.config = problem, config
        return self

    def __call__(self, sizes: int, *rest: Any) -> None:
        *given, scale_log2, cap_factor, stream = rest
        assert all(type(number) is int for number in (sizes, *given)) and len(given) == 11
        assert type(scale_log2) is type(cap_factor) is float and stream == STREAM
        q, k, v, o, lse, sinks, table, seq_lens, cu_seqlens_q, parts, counters = given
        taken = (ctypes.c_int64 * len(arguments.PAGED_SIZES)).from_address(sizes)
        numbers = dict(zip(arguments.PAGED_SIZES, taken, strict=True))
        self.calls.append(numbers | dict(zip(("q", "k", "v", "o", "lse"), given, strict=False)))
        assert all(at % 16 == 0 for at in (q, k, v, o)) and parts and counters
        assert numbers["ctas"] == MULTIPROCESSORS
        self.scale, self.cap_factor = scale_log2 / math.log2(math.e), cap_factor
        packed = cu_seqlens_q != 0
        batch = numbers["sequences"] - 2 * packed
        starts = vector(cu_seqlens_q, torch.int32, batch + 1).tolist() if packed else None
        lens = vector(seq_lens, torch.int32, batch).tolist()
        heads = numbers["kv_heads"] * numbers["group"]
        beside = vector(sinks, torch.float32, heads) if sinks else None
        tokens = numbers["tokens"]
        lses = strided_floats(lse, (1 if packed else batch, heads, tokens)) if lse else None
        for at in range(1 if packed else batch):
            rows = self.place("o", o, at)
            rows.zero_()
        if lses is not None:
            lses.fill_(-math.inf)
        for b, length in enumerate(lens):
            entry, one = (0, slice(starts[b], starts[b + 1])) if packed else (b, slice(0, tokens))
            pages = vector(table + 4 * b * numbers["table row"], torch.int32, -(-length // self.page))
            keys, values = (self.rows(name, at, pages, length) for name, at in (("k", k), ("v", v)))
            out, total = reference.attention(
                self.place("q", q, entry)[None, one], keys[None], values[None], **self.options(beside)
            )
            self.place("o", o, entry)[one] = out[0].to(self.dtype)
            if lses is not None:
                lses[entry, :, one] = total[0].float()

    @property
    def page(self) -> int:
        return 1 << self.calls[-1]["page shift"]

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.problem.dtype)

    def options(self, sinks: torch.Tensor | None) -> dict[str, Any]:
        numbers = self.calls[-1]
        given = {"window": (numbers["left"], numbers["right"]), "scale": self.scale, "sinks": sinks}
        if self.problem.score == "softcap":
            given |= {"softcap": self.scale, "scale": self.cap_factor * self.scale}
        return given

    def strides(self, name: str) -> list[int]:
        return [self.calls[-1][f"{name} {mode}"] for mode in ("row", "head", "chunk")]

    def place(self, name: str, address: int, entry: int) -> torch.Tensor:
        """Rows [tokens, heads, D] of a batch entry of q or the output."""
        numbers = self.calls[-1]
        row, head, chunk = self.strides(name)
        assert chunk == 8
        dims = numbers["head_dim" if name == "q" else "head_dim_v"]
        shape = numbers["tokens"], numbers["kv_heads"] * numbers["group"], dims
        return strided(address + 2 * entry * numbers[f"{name} outer"], self.dtype, shape, (row, head, 1))

    def rows(self, name: str, address: int, pages: torch.Tensor, length: int) -> torch.Tensor:
        """The keys or values of a sequence, [length, Hkv, D]."""
        numbers, (row, head, chunk) = self.calls[-1], self.strides(name)
        dims, heads = numbers["head_dim" if name == "k" else "head_dim_v"], numbers["kv_heads"]
        by_columns = name == "v" and self.problem.layout == "vllm"
        inner = ((dims,), (chunk,)) if by_columns else ((dims // 8, 8), (chunk, 1))
        shape, strides = (self.page, heads, *inner[0]), (row, head, *inner[1])
        found = [
            strided(address + 2 * page * numbers[f"{name} outer"], self.dtype, shape, strides).reshape(-1, heads, dims)
            for page in pages.tolist()
        ]
        return torch.cat([*found, torch.empty(0, heads, dims, dtype=self.dtype)])[:length]


def strided_floats(address: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_float * math.prod(shape)).from_address(address), dtype=torch.float32).view(shape)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    stand_in = Kernel()
    pass_for_gpu(monkeypatch, stand_in.fetch)
    return stand_in


def given(**changes: Any) -> dict[str, Any]:
    """The arguments of a call, of the case `of`."""
    case = changes.pop("of", CASE)
    made = tensors(case, "cpu")
    names = ("q", "k_pages", "v_pages", "page_table", "seq_lens")
    return {name: getattr(made, name) for name in names} | made.options(case) | changes


# -- what the kernel is told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_finds_every_element_where_it_is_told(kernel: Kernel, name: str) -> None:
    case, made = CASES[name], tensors(CASES[name], "cpu")
    compare(case, made, *call(case, made, fmha.attention_paged))
    dtype = str(case.torch_dtype).removeprefix("torch.")
    layout = "vllm" if case.layout == "vllm" else "rows"
    score = "softcap" if case.softcap else "plain"
    assert kernel.problem == PagedProblem(dtype, case.head_dim, score, case.head_dim_v, layout)


def test_sizes_of_each_layout(kernel: Kernel) -> None:
    """Strides, in elements, from a page, a slot, a head and 8 elements (of vLLM's V: an element) to the next."""
    steps = {
        "nhd": ((8 * 2 * 16, 2 * 16, 16, 8), (8 * 2 * 24, 2 * 24, 24, 8)),
        "hnd": ((2 * 8 * 16, 16, 8 * 16, 8), (2 * 8 * 24, 24, 8 * 24, 8)),
        "vllm": ((2 * 2 * 8 * 8, 8, 2 * 8 * 8, 8 * 8), (2 * 24 * 8, 1, 24 * 8, 8)),
    }
    for layout, (k, v) in steps.items():
        fmha.attention_paged(**given(of=replace(CASE, layout=layout, head_dim_v=24)))
        numbers = kernel.calls[-1]
        for name, expected in (("k", k), ("v", v)):
            assert tuple(numbers[f"{name} {mode}"] for mode in ("outer", "row", "head", "chunk")) == expected
        assert (numbers["page shift"], numbers["head_dim"], numbers["head_dim_v"]) == (3, 16, 24)
        assert (numbers["sequences"], numbers["tokens"], numbers["kv_heads"], numbers["group"]) == (2, 1, 2, 2)
        assert numbers["most keys"] == 8 * numbers["table row"] == 8 * 4


@pytest.mark.parametrize(
    ("options", "left", "right"),
    [
        ({}, UNLIMITED, UNLIMITED),
        ({"causal": True}, UNLIMITED, 0),
        ({"causal": True, "window": (5, 3)}, 5, 0),
        ({"causal": True, "window": (5, -3)}, 5, -3),
        ({"window": [-1, 2]}, UNLIMITED, 2),
        ({"window": (1 << 40, -(1 << 40))}, UNLIMITED, -UNLIMITED),
    ],
)
def test_sides_of_the_mask(kernel: Kernel, options: dict[str, Any], left: int, right: int) -> None:
    fmha.attention_paged(**given(**options))
    assert (kernel.calls[-1]["left"], kernel.calls[-1]["right"]) == (left, right)


def among_heads(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x], -2)[..., : x.shape[-2], :]


def odd_rows(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x[..., :4]], -1)[..., : x.shape[-1]]


def off_by_one(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape)


def both(x: torch.Tensor) -> torch.Tensor:
    return off_by_one(torch.cat([x, x], -2))[..., : x.shape[-2], :]


@pytest.mark.parametrize("view", [among_heads, odd_rows, off_by_one, both])
@pytest.mark.parametrize("which", ["q", "out", "both"])
@pytest.mark.parametrize("name", ["one query", "several", "packed"])
def test_strides_of_q_and_out(kernel: Kernel, name: str, which: str, view: Any) -> None:
    """What 16 bytes at a time can address is used as it is, other tensors through a copy."""
    case = CASES[name]
    made = tensors(case, "cpu")
    out = torch.full_like(made.q, 7.0)
    made.q, out = (view(x) if which in (part, "both") else x for x, part in ((made.q, "q"), (out, "out")))
    found, lse = fmha.attention_paged(**given(of=case, q=made.q), out=out, return_lse=True)
    assert found is out
    compare(case, made, out, lse)
    used, stays = kernel.calls[-1], view is among_heads
    assert (used["q"] == made.q.data_ptr()) == (stays or which == "out")
    assert (used["o"] == out.data_ptr()) == stays
    if stays:
        strides = [(0, *x.stride()) if case.packed else x.stride() for x in (made.q, out)]
        assert [used["q head"], used["o head"]] == [strides[0][-2], strides[1][-2]]
        assert [used["q outer"], used["o outer"]] == [strides[0][0], strides[1][0]]


def test_pages_and_tables_may_be_parts_of_larger_ones(kernel: Kernel) -> None:
    made = tensors(CASE, "cpu")
    wide = {name: torch.cat([x, x], 1) for name, x in (("k", made.k_pages), ("v", made.v_pages))}
    k, v = (wide[name][:, : CASE.page] for name in "kv")
    table = torch.cat([made.page_table, made.page_table], 1)[:, : made.page_table.shape[1]]
    lens = torch.stack([made.seq_lens, made.seq_lens], 1)[:, 0]
    out, lse = fmha.attention_paged(made.q, k, v, table, lens, return_lse=True)
    compare(CASE, made, out, lse)
    assert kernel.calls[-1]["table row"] == 2 * made.page_table.shape[1]
    assert kernel.calls[-1]["k outer"] == 2 * made.k_pages.stride(0)


def test_one_table_for_all_sequences(kernel: Kernel) -> None:
    made = tensors(replace(CASE, seq_lens=(21, 21), shared=True, page=1), "cpu")
    table = made.page_table[:1].expand(2, -1)
    out = fmha.attention_paged(made.q, made.k_pages, made.v_pages, table, made.seq_lens)
    assert kernel.calls[-1]["table row"] == 0
    compare(replace(CASE, seq_lens=(21, 21)), made, out, None)


def test_the_readmes_example(kernel: Kernel) -> None:
    _, example, *_ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {"torch": torch, "fmha": fmha, "q": torch.randn(2, 3, 32, 128).to(BF16)}
    exec(example.replace('"cuda"', '"cpu"'), names)
    q, k, table = names["q"], names["k_pages"], names["table"].long()
    assert kernel.calls[-1]["q"] == q.data_ptr() and len(kernel.calls) == 1
    for b, length in enumerate(names["lengths"].tolist()):
        keys = k[table[b]].flatten(0, 1)[None, :length]
        expected, _ = reference.attention(q[b : b + 1, :1], keys, keys)
        torch.testing.assert_close(names["out"][b].double(), expected[0, 0], rtol=1e-2, atol=1e-2)


# -- parts, counters and splits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [None, 1, 5, 256])
@pytest.mark.parametrize("name", ["one query", "several", "packed", "long"])
def test_room_for_parts_and_counters(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, name: str, splits: Any) -> None:
    asked = []
    real = workspace.current
    monkeypatch.setattr(workspace, "current", lambda device, *room: asked.append(room) or real(device, *room))
    case = replace({**CASES, "long": replace(CASE, tokens=(70, 70))}[name], splits=splits)
    fmha.attention_paged(**given(of=case))
    rows = (sum(case.tokens) + sum(case.outside) if case.packed else case.tokens[0]) * case.group
    tiles = -(-rows // ROWS_PER_WARPGROUP) * (1 if case.packed else 2) + (4 if case.packed else 0)
    assert tiles == {"one query": 2, "several": 2, "packed": 5, "long": 6}[name]
    need = MULTIPROCESSORS, tiles * case.heads_kv, splits or 0
    numbers, ((counters, floats),) = kernel.calls[-1], asked
    assert counters == counters_needed(*need) and numbers["parts"] == parts_needed(*need)
    assert numbers["splits"] == (splits or 0)
    assert numbers["part rows"] == min(rows, ROWS_PER_WARPGROUP)
    sums = -(-numbers["parts"] * numbers["part rows"] * 2 // 4) * 4  # two a row; the rows of O begin at 16 bytes
    assert floats >= sums + numbers["parts"] * numbers["part rows"] * kernel.config.value_dim


def test_a_workspace_grows_and_stays(kernel: Kernel) -> None:
    many = given(num_splits=200)
    fmha.attention_paged(**given())
    (small,) = workspace._workspaces.values()
    fmha.attention_paged(**many)
    (large,) = workspace._workspaces.values()
    assert large is not small and large.parts.numel() > small.parts.numel()
    assert large.counters.numel() >= small.counters.numel() and (large.counters == 0).all()
    fmha.attention_paged(**given())
    assert list(workspace._workspaces.values()) == [large]


def test_a_capture_gets_counters_of_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    monkeypatch.setattr(workspace, "_reserves", {None: torch.zeros(100, dtype=torch.int32)})
    outside = workspace.current(device, 10, 4)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True)
    first, second, third = (workspace.current(device, n, 4) for n in (60, 30, 30))
    assert first.counters_at + 4 * 60 == second.counters_at  # of the reserve
    assert len({each.counters_at for each in (outside, first, second, third)}) == 4
    assert third.counters.numel() == 30 and (third.counters == 0).all()  # which has too few left
    assert workspace._workspaces == {(None, STREAM): outside}


def test_a_capture_needs_a_kernel_in_memory(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"fmha\.warmup\(PagedProblem\(dtype='bfloat16', head_dim=16, score='plain'"):
        fmha.attention_paged(**given())
    monkeypatch.setattr(library, "loaded", kernel.fetch)
    made = tensors(CASE, "cpu")
    compare(CASE, made, fmha.attention_paged(**given()), None)


@pytest.mark.parametrize("problem", [PagedProblem("bfloat16", 72), PagedProblem("float16", 64, "softcap", 16, "vllm")])
def test_warmup_launches_the_kernel_that_calls_get(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, problem: PagedProblem
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch, "device", lambda *_: "cpu")
    monkeypatch.setattr(launch, "current_architecture", lambda: "sm_90a")
    fmha.warmup(problem)
    assert len(kernel.calls) == 1 and kernel.problem == problem
    fmha.warmup(problem, "sm_90a")
    assert len(kernel.calls) == 2


# -- plans -------------------------------------------------------------------------------------------------------------


def test_calls_that_differ_in_data_alone_share_a_plan(kernel: Kernel) -> None:
    for seed in range(3):
        made = tensors(replace(CASE, seq_lens=(21, 3 + seed)), "cpu", seed)
        out = fmha.attention_paged(made.q, made.k_pages, made.v_pages, made.page_table, made.seq_lens)
        compare(replace(CASE, seq_lens=(21, 3 + seed)), made, out, None)
        assert len(launch.PLANS) == 1
    cu = torch.tensor([0, 1, 2], dtype=torch.int32)
    out = torch.empty_like(made.q)
    different = [
        {"causal": True}, {"window": (3, 1)}, {"window": (2, 1)}, {"scale": 1.0}, {"softcap": 2.0}, {"num_splits": 1},
        {"num_splits": 2}, {"return_lse": True}, {"sinks": torch.ones(4)}, {"cu_seqlens_q": cu}, {"out": out},
        {"out": among_heads(out)}, {"q": among_heads(made.q)}, {"of": replace(CASE, layout="hnd")},
        {"of": replace(CASE, dtype="fp16")}, {"of": replace(CASE, head_dim_v=8)}, {"of": replace(CASE, page=16)},
        {"of": replace(CASE, seq_lens=(21, 40))}, {"of": replace(CASE, tokens=(2, 2))},
    ]  # fmt: skip
    for i, changes in enumerate(different):
        for _ in range(2):
            fmha.attention_paged(**given(**changes))
            assert len(launch.PLANS) == 2 + i, changes


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"num_splits": 1}, {"num_splits": True}),
        ({"num_splits": 2}, {"num_splits": 2.0}),
        ({"scale": 1}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"causal": True}, {"causal": 1}),
        ({"return_lse": False}, {"return_lse": 0}),
        ({"window": (3, 1)}, {"window": (3, True)}),
    ],
)
def test_what_equals_an_option_that_has_a_plan_is_refused_all_the_same(kernel: Kernel, right: Any, wrong: Any) -> None:
    fmha.attention_paged(**given(**right))
    with pytest.raises(TypeError, match=next(iter(wrong))):
        fmha.attention_paged(**given(**wrong))


def test_numpy_integers_are_numbers_of_splits(kernel: Kernel) -> None:
    fmha.attention_paged(**given(num_splits=np.int64(7)))
    assert kernel.calls[-1]["splits"] == 7


@pytest.mark.parametrize("sizes", ["no batch", "no heads", "no query", "no sequence, but rows"])
def test_without_a_query_nothing_is_launched(kernel: Kernel, sizes: str) -> None:
    arguments = given(return_lse=True)
    q, k, v = (arguments[name] for name in ("q", "k_pages", "v_pages"))
    table, lens = arguments["page_table"], arguments["seq_lens"]
    if sizes == "no batch":
        q, table, lens = q[:0], table[:0], lens[:0]
    elif sizes == "no heads":
        q, k, v = q[:, :0], k[:, :, :0], v[:, :, :0]
    elif sizes == "no query":
        q = q[:, None][:, :0]
    else:
        table, lens = table[:0], lens[:0]
        arguments["cu_seqlens_q"] = torch.zeros(1, dtype=torch.int32)
    arguments |= {"q": q, "k_pages": k, "v_pages": v, "page_table": table, "seq_lens": lens}
    out, lse = fmha.attention_paged(**arguments)
    assert out.shape == q.shape and (out == 0).all() and not kernel.calls
    shape = (4, 2) if "cu_seqlens_q" in arguments else (q.shape[0], q.shape[-2], *q.shape[1:-2])
    assert lse.shape == shape and (lse == -math.inf).all()


def test_arrays_of_another_library(kernel: Kernel) -> None:
    case = replace(CASE, dtype="fp16")
    made: Tensors = tensors(case, "cpu")
    arrays = {name: x.numpy() if isinstance(x, torch.Tensor) else x for name, x in given(of=case).items()}
    out, lse = fmha.attention_paged(**arrays, return_lse=True)
    assert isinstance(out, np.ndarray) and isinstance(lse, np.ndarray)
    compare(case, made, torch.from_numpy(out), torch.from_numpy(lse))
    target = np.empty_like(out)
    assert fmha.attention_paged(**arrays, out=target) is target
    assert (target == out).all()


# -- what is refused ---------------------------------------------------------------------------------------------------

GIVEN = given()
Q, K, V, TABLE, LENS = (GIVEN[name] for name in ("q", "k_pages", "v_pages", "page_table", "seq_lens"))
VLLM = {name: x for name, x in given(of=CASES["vllm"]).items() if name in ("k_pages", "v_pages", "layout")}
CU = torch.tensor([0, 1, 2], dtype=torch.int32)
WIDE = torch.zeros(*K.shape[:-1], 20, dtype=BF16)


def pages(*shape: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=BF16) for name in ("k_pages", "v_pages")}


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "rank of q": ({"q": Q[0]}, ValueError, r"q\.shape is \[4, 16\]; \[B, Hq, D\] or \[B, Sq, Hq, D\] is needed"),
    "rank of packed q": (
        {"q": Q[:, None], "cu_seqlens_q": CU}, ValueError, r"q\.shape is \[2, 1, 4, 16\]; \[T, Hq, D\] is needed"
    ),
    "last stride of q": ({"q": Q.mT.contiguous().mT}, ValueError, r"q\.stride\(\) is .*; the last one must be 1"),
    "float32": ({"q": Q.float(), "k_pages": K.float(), "v_pages": V.float()}, Unsupported, "dtype float32: bfloat16"),
    "head dim": ({"q": Q[..., :12], "k_pages": K[..., :12]}, Unsupported, "head_dim 12: multiples of 8 up to 256"),
    "head dim of v": ({"v_pages": V[..., :12]}, Unsupported, "head_dim_v 12: multiples of 8 up to 256"),
    "too wide": ({"q": Q.new_zeros(2, 4, 264), **pages(9, 8, 2, 264)}, Unsupported, "head_dim 264: .* up to 256"),
    "rank of k": ({"k_pages": K[0]}, ValueError, r"k_pages\.shape is \[8, 2, 16\]; layout 'nhd' needs \[pages, page"),
    "rank of v": ({"v_pages": V[None]}, ValueError, r"v_pages\.shape is .*; layout 'nhd' needs \[pages, page"),
    "rank of hnd": ({"layout": "hnd", "k_pages": K[0]}, ValueError, r"layout 'hnd' needs \[pages, Hkv, page, D\]"),
    "rank of vllm k": ({"layout": "vllm"}, ValueError, r"k_pages.* 'vllm' needs \[pages, Hkv, D / x, page, x\]"),
    "rank of vllm v": (
        VLLM | {"v_pages": VLLM["k_pages"]}, ValueError, r"v_pages\.shape .* 'vllm' needs \[pages, Hkv, D, page\]"
    ),
    "last mode of vllm k": (
        VLLM | {"k_pages": torch.zeros(9, 2, 4, 8, 4, dtype=BF16)}, ValueError, "its last mode must be 8, the elements"
    ),
    "layout": ({"layout": "bshd"}, ValueError, "layout is 'bshd'; one of 'nhd', 'hnd', 'vllm' is needed"),
    "layout list": ({"layout": ["nhd"]}, ValueError, r"layout is \['nhd'\]; one of 'nhd'"),
    "dtype of k": ({"k_pages": K.half()}, ValueError, r"k_pages\.dtype is float16; it must be that of q, bfloat16"),
    "dtype of v": ({"v_pages": V.half()}, ValueError, r"v_pages\.dtype is float16; it must be that of q, bfloat16"),
    "device of k": ({"k_pages": K.to("meta")}, ValueError, r"k_pages\.device is meta; it must be that of q, cpu"),
    "device of v": ({"v_pages": V.to("meta")}, ValueError, r"v_pages\.device is meta; it must be that of q, cpu"),
    "page of 12": (pages(9, 12, 2, 16), Unsupported, "k_pages: pages of 12 slots; 1, 2, 4, ... 1024 are supported"),
    "page of 2048": (pages(2, 2048, 2, 16), Unsupported, "k_pages: pages of 2048 slots; 1, 2, 4, ... 1024 are"),
    "page of 0": (pages(9, 0, 2, 16), Unsupported, "k_pages: pages of 0 slots; 1, 2, 4, ... 1024 are supported"),
    "vllm page of 64": (
        VLLM | {"k_pages": torch.zeros(9, 2, 2, 64, 8, dtype=BF16)},
        Unsupported, "k_pages: pages of 64 slots; layout 'vllm' has 8, 16, 32"
    ),
    "stride of k": ({"k_pages": WIDE[..., :16]}, Unsupported, r"k_pages\.stride\(\) is .*; multiples of 8 elements"),
    "stride of v": ({"v_pages": WIDE[..., :16]}, Unsupported, r"v_pages\.stride\(\) is .*; multiples of 8 elements"),
    "last stride of k": (
        {"k_pages": K.mT.contiguous().mT}, ValueError, r"k_pages\.stride\(\) is .*; the last one must be 1"
    ),
    "large page": (
        {"k_pages": torch.empty_strided((1, 1024, 2, 16), (1 << 32, 1 << 22, 16, 1), dtype=BF16, device="meta")},
        Unsupported, r"k_pages\.stride\(\) is .*; a page of less than 2\^31 elements is supported"
    ),
    "pages of another head dim": (
        {"k_pages": K[..., :8], "v_pages": V[..., :8]}, ValueError, "k_pages has head dim 8; it must be that of q, 16"
    ),
    "number of pages": ({"v_pages": V[:3]}, ValueError, "v_pages has 3 pages; it must have those of k_pages, 11"),
    "slots": ({"v_pages": V[:, :4]}, ValueError, "v_pages has 4 slots a page; it must have those of k_pages, 8"),
    "heads of v": ({"v_pages": V[:, :, :1]}, ValueError, "v_pages has 1 heads; it must have those of k_pages, 2"),
    "heads": ({"q": Q[:, :3]}, ValueError, "q has 3 heads and k_pages 2; the heads of k_pages must divide those of q"),
    "no KV heads": ({"k_pages": K[:, :, :0], "v_pages": V[:, :, :0]}, ValueError, "q has 4 heads and k_pages 0"),
    "table int64": ({"page_table": TABLE.long()}, ValueError, r"page_table is int64 \[2, 4\]; int32 \[B, most pages\]"),
    "rank of table": ({"page_table": TABLE[0]}, ValueError, r"page_table is int32 \[4\]; int32 \[B, most pages\] is"),
    "stride of table": (
        {"page_table": TABLE.mT.contiguous().mT}, ValueError, r"page_table\.stride\(\) is \(1, 2\); the last one must"
    ),
    "device of table": ({"page_table": TABLE.to("meta")}, ValueError, r"page_table\.device is meta; it must .* q, cpu"),
    "batch": ({"page_table": TABLE[:1]}, ValueError, r"page_table\.shape\[0\], the batch, is 1; it must be .* of q, 2"),
    "no table": ({"page_table": None}, TypeError, "page_table is a NoneType; a torch tensor or another array"),
    "lengths": ({"seq_lens": LENS[:1]}, ValueError, r"seq_lens\.shape is \[1\]; \[2\] is needed"),
    "lengths int64": ({"seq_lens": LENS.long()}, ValueError, r"seq_lens\.dtype is int64; int32 is needed"),
    "modes of lengths": ({"seq_lens": LENS[:, None]}, ValueError, r"seq_lens\.shape is \[2, 1\]; \[2\] is needed"),
    "device of lengths": ({"seq_lens": LENS.to("meta")}, ValueError, r"seq_lens\.device is meta; it must be that of q"),
    "lengths list": ({"seq_lens": [21, 3]}, TypeError, "seq_lens is a list; a torch tensor or another array"),
    "sinks": ({"sinks": torch.ones(2)}, ValueError, r"sinks\.shape is \[2\]; \[4\] is needed"),
    "sinks dtype": ({"sinks": torch.ones(4, dtype=BF16)}, ValueError, r"sinks\.dtype is bfloat16; float32 is needed"),
    "sinks device": ({"sinks": torch.ones(4, device="meta")}, ValueError, r"sinks\.device is meta; it must be that"),
    "starts": ({"cu_seqlens_q": CU[:2]}, ValueError, r"cu_seqlens_q\.shape is \[2\]; \[3\] is needed"),
    "starts int64": ({"cu_seqlens_q": CU.long()}, ValueError, r"cu_seqlens_q\.dtype is int64; int32 is needed"),
    "splits 0": ({"num_splits": 0}, ValueError, "num_splits is 0; 1 to 256, or None, is needed"),
    "splits -1": ({"num_splits": -1}, ValueError, "num_splits is -1; 1 to 256, or None, is needed"),
    "splits 300": ({"num_splits": 300}, ValueError, "num_splits is 300; 1 to 256, or None, is needed"),
    "splits bool": ({"num_splits": True}, TypeError, "num_splits is True of type bool; an integer or None is needed"),
    "splits float": ({"num_splits": 1.5}, TypeError, "num_splits is 1.5 of type float; an integer or None is needed"),
    "splits text": ({"num_splits": "2"}, TypeError, "num_splits is '2' of type str; an integer or None is needed"),
    "splits list": ({"num_splits": [2]}, TypeError, r"num_splits is \[2\] of type list; an integer or None is needed"),
    "window": ({"window": 4}, TypeError, r"window is 4; a pair \(left, right\)"),
    "window float": ({"window": (1.5, 0)}, TypeError, "its left side is of type float; an integer or None is needed"),
    "scale": ({"scale": 0}, ValueError, "scale is 0; a finite positive number is needed"),
    "scale NaN": ({"scale": math.nan}, ValueError, "scale is nan; a finite positive number is needed"),
    "scale text": ({"scale": "1"}, TypeError, "scale is '1' of type str; a Python or NumPy number is needed"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0; a finite positive number is needed"),
    "ratio": ({"softcap": 1e-36, "scale": 1e36}, ValueError, "softcap is 1e-36, and the scale 1e.36: their ratio is"),
    "causal": ({"causal": 1}, TypeError, "causal is 1 of type int; True or False is needed"),
    "return_lse": ({"return_lse": None}, TypeError, "return_lse is None of type NoneType; True or False is needed"),
    "out shape": ({"out": Q[:1].clone()}, ValueError, r"out\.shape is \(1, 4, 16\); it must be .* \(2, 4, 16\)"),
    "out shape, of v": (
        {"v_pages": V[..., :8].contiguous(), "out": Q.clone()}, ValueError, r"out\.shape .* that of q, \(2, 4, 8\)"
    ),
    "out dtype": ({"out": Q.float()}, ValueError, r"out\.dtype is float32; it must be that of q, bfloat16"),
    "out device": ({"out": Q.to("meta")}, ValueError, r"out\.device is meta; it must be that of q, cpu"),
    "out last stride": ({"out": Q.mT.contiguous().mT}, ValueError, r"out\.stride\(\) is .*; the last one must be 1"),
    "out on itself": ({"out": Q[:1].clone().expand(2, -1, -1)}, ValueError, r"out\.stride\(\).*share memory"),
    "out not a tensor": ({"out": "here"}, TypeError, "out is a str; a torch tensor or another array"),
    "gradient of q": ({"q": Q.clone().requires_grad_()}, Unsupported, r"q\.requires_grad is True.*forward"),
    "gradient of k": ({"k_pages": K.clone().requires_grad_()}, Unsupported, r"k_pages\.requires_grad is True"),
    "gradient of v": ({"v_pages": V.clone().requires_grad_()}, Unsupported, r"v_pages\.requires_grad is True"),
    "gradient of sinks": ({"sinks": torch.ones(4).requires_grad_()}, Unsupported, r"sinks\.requires_grad is True"),
    "gradient of out": ({"out": Q.clone().requires_grad_()}, Unsupported, r"out\.requires_grad is True"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_by_name_before_anything_happens(kernel: Kernel, case: str) -> None:
    changes, error, message = BAD[case]
    out = changes.get("out", torch.full_like(Q, 7.0))
    before = out.detach().clone() if isinstance(out, torch.Tensor) and out.device.type == "cpu" else None
    for _ in range(2):  # the second time as well: a refused call leaves no plan
        with pytest.raises(error, match=message) as caught:
            fmha.attention_paged(**{**GIVEN, "out": out, **changes})
        assert type(caught.value) is error
    assert not kernel.calls and kernel.problem is None and not launch.PLANS
    assert before is None or torch.equal(out, before)


@pytest.mark.parametrize("name", ["q", "k_pages", "v_pages"])
@pytest.mark.parametrize("empty", [False, True])
def test_an_out_that_shares_memory_with_an_input_is_refused(kernel: Kernel, name: str, empty: bool) -> None:
    arguments = {**GIVEN, name: GIVEN[name].clone()}
    out = arguments[name].view(-1)[: Q.numel()].view(Q.shape)
    before = arguments[name].clone()
    if empty:  # nothing would be launched
        arguments |= {"cu_seqlens_q": CU[:1], "page_table": TABLE[:0], "seq_lens": LENS[:0]}
    with pytest.raises(ValueError, match=f"out overlaps {name} in memory; .* with q, k_pages or v_pages"):
        fmha.attention_paged(**arguments, out=out)
    assert not kernel.calls and torch.equal(arguments[name].view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("name", ["k_pages", "v_pages"])
def test_pages_at_no_multiple_of_16_bytes_are_refused(kernel: Kernel, name: str) -> None:
    out = torch.full_like(Q, 7.0)
    with pytest.raises(Unsupported, match=rf"{name}\.data_ptr\(\) is 0x\w+2; a multiple of 16 bytes is supported"):
        fmha.attention_paged(**{**GIVEN, name: off_by_one(GIVEN[name])}, out=out)
    assert not kernel.calls and (out == 7.0).all()


def test_more_than_the_kernels_count_is_refused(kernel: Kernel) -> None:
    q = Q.new_zeros(16).expand(1, paged.MAX_TOKENS // 4 + 1, 4, 16)
    with pytest.raises(Unsupported, match=f"q is bfloat16 .* rows of heads up to {paged.MAX_TOKENS} are supported"):
        fmha.attention_paged(q, K, V, TABLE[:1], LENS[:1])
    q = q[:, : 1 << 20]
    table = TABLE[:1, :1].expand(1, 1 << 20).contiguous()
    with pytest.raises(Unsupported, match=r"q is .* and page_table is .*: too many tiles of keys for one call"):
        fmha.attention_paged(q, K, V, table, LENS[:1])


def test_what_a_q_tile_counts_besides_its_keys_is_counted(kernel: Kernel) -> None:
    q = Q.new_zeros(16).expand(1, paged.MAX_TOKENS // 4, 4, 16)
    q_tiles = paged.MAX_TOKENS // 64
    tiles = MAX_UNITS // q_tiles  # these alone would be few enough
    table = TABLE[:1, :1].expand(1, tiles * 128 // K.shape[1]).contiguous()
    with pytest.raises(Unsupported, match="too many tiles of keys for one call"):
        fmha.attention_paged(q, K, V, table, LENS[:1])


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(Unsupported, match="architecture cpu: sm_90a"):
        fmha.attention_paged(**GIVEN)
