"""`fmha.write_kv` without a GPU: what it refuses, the oracle, the kernels' machine code, and, with a stand-in for the
kernel that has its threads one by one, all of the host side."""

from __future__ import annotations

import ctypes
import importlib

import pytest
import torch

import fmha
from fmha import reference
from fmha.jit import arguments, compile, key, launch, library, sass
from fmha.jit.store import Store
from fmha.problem import ARCHITECTURES, PAGED_LAYOUTS, WriteProblem
from schedules.tiling import CopyConfig
from tests.checks import POISON, poison, same_bits
from tests.writing import WriteCase, check, draw, tensors

ARCH = "sm_90a"
STREAM = 5
CONFIG = CopyConfig()
attention_module = importlib.import_module("fmha.attention")
writing = importlib.import_module("fmha.writing")
CASE = WriteCase((5,), 2, 16, 4)
VLLM = WriteCase((2, 5), 2, 16, 8, layout="vllm")


class Kernel:
    """Does what each thread would, with the numbers and addresses that the launch function gets."""

    def __init__(self) -> None:
        self.problem: WriteProblem | None = None
        self.calls: list[dict[str, int]] = []

    def fetch(self, problem: WriteProblem, config: CopyConfig, arch: str) -> Kernel:
        assert (config, arch) == (CONFIG, ARCH)
        self.problem = problem
        return self

    def __call__(self, sizes, k, v, k_pages, v_pages, slots, stream) -> None:
        assert stream == STREAM and (k | v | k_pages | v_pages) % 16 == 0
        names = arguments.WRITE_SIZES
        n = dict(zip(names, (ctypes.c_int64 * len(names)).from_address(sizes), strict=True))
        self.calls.append(n)
        kind = ctypes.c_int64 if n["slot bytes"] == 8 else ctypes.c_int32
        where = list((kind * n["tokens"]).from_address(slots))
        done = {"k": set(), "v": set()}
        for token, chunk in self.shares(n):
            for name, new, pages in (("k", k, k_pages), ("v", v, v_pages)):
                if chunk < n[f"{name} chunks"]:
                    assert (token, chunk) not in done[name]
                    done[name].add((token, chunk))
                    if 0 <= where[token] < n["slots"]:
                        self.move(name, n, new, pages, token, chunk, where[token])
        assert [len(done[name]) for name in "kv"] == [n["tokens"] * n[f"{name} chunks"] for name in "kv"]

    def shares(self, n: dict[str, int]):
        """Of all threads, token and chunk."""
        for block in range(n["ctas"]):
            for thread in range(CONFIG.threads):
                if self.problem.layout == "vllm":
                    column, local = divmod(thread, n["abreast"])
                else:
                    local, column = divmod(thread, n["width"])
                if local >= n["abreast"] or column >= n["width"]:
                    continue
                for i in range(CONFIG.at_once if n["several"] else 1):
                    token = (block + i * n["ctas"]) * n["abreast"] + local
                    if token < n["tokens"]:
                        yield from ((token, group * n["width"] + column) for group in range(n["chunk groups"]))

    def move(self, name, n, new, pages, token, chunk, slot) -> None:
        head, column = divmod(chunk, n[f"{name} columns"])
        source = new + 2 * (token * n[f"{name} token"] + head * n[f"{name} token head"] + 8 * column)
        page, inside = slot >> n["page shift"], slot & ((1 << n["page shift"]) - 1)
        single = name == "v" and self.problem.layout == "vllm"
        step = n[f"{name} chunk"]
        to = page * n[f"{name} outer"] + inside * n[f"{name} row"] + head * n[f"{name} head"]
        to = pages + 2 * (to + column * step * (8 if single else 1))
        assert source % 16 == 0 and (single or to % 16 == 0)
        for i in range(8 if single else 1):
            ctypes.memmove(to + 2 * i * step, source + 2 * i, 2 if single else 16)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Makes CPU tensors pass for tensors on a Hopper GPU with one multiprocessor: threads soon have several tokens."""
    stand_in = Kernel()
    monkeypatch.setattr(launch, "describe_device", lambda device: launch.Device(ARCH, 0, 1))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)  # the index of a CPU
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    monkeypatch.setattr(library, "loaded", lambda *kernel: None)
    monkeypatch.setattr(library, "fetch", stand_in.fetch)
    monkeypatch.setattr(launch, "PLANS", {})
    monkeypatch.setattr(writing, "PLANS", launch.PLANS)
    return stand_in


# -- what is written ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("start", range(0, 200, 50))
def test_drawn_problems(kernel: Kernel, start: int) -> None:
    for seed in range(start, start + 50):
        case = draw(seed)
        try:
            check(case, "cpu", seed)
        except (AssertionError, fmha.Unsupported) as error:
            raise AssertionError(f"seed {seed}: {case}") from error
    assert {bool(call["several"]) for call in kernel.calls} == {False, True}


@pytest.mark.parametrize("case", [CASE, VLLM])
def test_a_plan_is_made_once_and_takes_other_slots(kernel: Kernel, case: WriteCase) -> None:
    for seed in range(3):
        check(case, "cpu", seed)
    assert len(launch.PLANS) == 1 and len(kernel.calls) == 3


@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
def test_what_is_written_is_what_the_oracle_of_attention_gathers(kernel: Kernel, layout: str) -> None:
    case = WriteCase((20,), 2, 16, 8, layout=layout, order="runs")
    k, v, k_pages, v_pages, _ = tensors(case, "cpu")
    table = torch.tensor([[4, 1, 3]], dtype=torch.int32)
    slot_mapping = torch.tensor([int(table[0, j // 8]) * 8 + j % 8 for j in range(20)])
    fmha.write_kv(k, v, k_pages, v_pages, slot_mapping, layout=layout)
    assert torch.equal(reference.gather(k_pages, table[0], 20, layout, False), k)
    assert torch.equal(reference.gather(v_pages, table[0], 20, layout, True), v)


def test_strided_slots(kernel: Kernel) -> None:
    k, v, k_pages, v_pages, slots = tensors(CASE, "cpu")
    wanted = k_pages.clone(), v_pages.clone()
    reference.write_kv(k, v, *wanted, slots)
    fmha.write_kv(k, v, k_pages, v_pages, torch.stack([slots, slots + 1], 1)[:, 0])
    assert same_bits(k_pages, wanted[0]) and same_bits(v_pages, wanted[1])


@pytest.mark.parametrize(
    "change",
    [
        lambda k, v, kp, vp, s: (k[:0], v[:0], kp, vp, s[:0]),
        lambda k, v, kp, vp, s: (k, v, kp[:0], vp[:0], s),
        lambda k, v, kp, vp, s: (k[:, :0], v[:, :0], kp[:, :, :0], vp[:, :, :0], s),
    ],
)
def test_nothing_to_write(kernel: Kernel, change) -> None:
    given = tensors(CASE, "cpu")
    assert fmha.write_kv(*change(*given)) is None
    assert not kernel.calls and (given.k_pages.view(torch.int16) == POISON).all()


def test_arrays_of_numpy(kernel: Kernel) -> None:
    given = tensors(WriteCase((5,), 2, 16, 4, dtype="fp16"), "cpu")
    wanted = given.k_pages.clone(), given.v_pages.clone()
    reference.write_kv(given.k, given.v, *wanted, given.slot_mapping)
    fmha.write_kv(*(x.numpy() for x in given))
    assert same_bits(given.k_pages, wanted[0]) and same_bits(given.v_pages, wanted[1])


# -- what is refused ---------------------------------------------------------------------------------------------------
def swap(**changes):
    return lambda given: given | {name: change(given[name]) for name, change in changes.items()}


def inside(new: str, pages: str):
    """One of the tokens' tensors lies in the pages."""
    return lambda given: given | {new: given[pages].view(-1)[: given[new].numel()].view_as(given[new])}


HALF = torch.Tensor.half
REFUSED = {
    "no tensor": (swap(k=lambda k: "k"), TypeError, "k is a str"),
    "no pages": (swap(v_pages=lambda v: None), TypeError, "v_pages is a NoneType"),
    "rank of k": (swap(k=lambda k: k[0]), ValueError, r"k.shape is \[2, 16\]"),
    "v unlike k": (swap(v=lambda v: v[:4]), ValueError, r"v.shape is \[4, 2, 16\]"),
    "v of another rank": (swap(v=lambda v: v[None]), ValueError, "v.shape"),
    "dtype of v": (swap(v=HALF), ValueError, "v.dtype is float16"),
    "dtype of pages": (swap(v_pages=HALF), ValueError, "v_pages.dtype is float16"),
    "rank of pages": (swap(k_pages=lambda k: k[0]), ValueError, "k_pages.shape is"),
    "heads of pages": (swap(v_pages=lambda v: v[:, :, :1]), ValueError, "v_pages has heads 1; it must be that of v, 2"),
    "head dim": (swap(k_pages=lambda k: k[..., :8]), ValueError, "k_pages has head dim 8"),
    "count of pages": (swap(v_pages=lambda v: v[:-1]), ValueError, "v_pages has .* pages"),
    "slots of a page": (swap(v_pages=lambda v: v[:, :2]), ValueError, "v_pages has 2 slots a page"),
    "page size": (
        swap(k_pages=lambda k: k[:, :3], v_pages=lambda v: v[:, :3]),
        fmha.Unsupported,
        "pages of 3 slots; 1, 2, 4",
    ),
    "strides of pages": (
        swap(k_pages=lambda k: torch.empty(*k.shape[:-1], 20, dtype=k.dtype)[..., :16]),
        fmha.Unsupported,
        "k_pages.stride",
    ),
    "expanded pages": (swap(k_pages=lambda k: k[:1].expand_as(k)), ValueError, "k_pages.stride.. is .* share memory"),
    "shape of slots": (swap(slot_mapping=lambda s: s[:4]), ValueError, r"slot_mapping.shape is \[4\]; \[5\] is needed"),
    "dtype of slots": (
        swap(slot_mapping=torch.Tensor.short),
        ValueError,
        "slot_mapping.dtype is int16; int32 or",
    ),
    "float32": (
        swap(**dict.fromkeys(("k", "v", "k_pages", "v_pages"), torch.Tensor.float)),
        fmha.Unsupported,
        "dtype float32: bfloat16 or float16 only",
    ),
    "odd head dim": (
        swap(k=lambda k: k[..., :12], k_pages=lambda k: k[..., :12]),
        fmha.Unsupported,
        "multiples of 8 only",
    ),
    "k in its pages": (inside("k", "k_pages"), ValueError, "k_pages overlaps k "),
    "v in its pages": (inside("v", "v_pages"), ValueError, "v_pages overlaps v "),
    "k in the pages of v": (inside("k", "v_pages"), ValueError, "v_pages overlaps k "),
    "v in the pages of k": (inside("v", "k_pages"), ValueError, "k_pages overlaps v "),
    "one cache twice": (lambda given: given | {"v_pages": given["k_pages"]}, ValueError, "k_pages overlaps v_pages"),
    "gradients": (swap(k=lambda k: k.requires_grad_()), fmha.Unsupported, "k.requires_grad"),
    "gradients of pages": (swap(v_pages=lambda v: v.requires_grad_()), fmha.Unsupported, "v_pages.requires_grad"),
    "layout": (lambda given: given | {"layout": "hdn"}, ValueError, "layout is 'hdn'; one of 'nhd', 'hnd', 'vllm'"),
    "layout of no kind": (lambda given: given | {"layout": ["nhd"]}, ValueError, "layout is"),
    "other layout": (lambda given: given | {"layout": "vllm"}, ValueError, "layout 'vllm' needs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_call_is_refused_and_writes_nothing(kernel: Kernel, name: str) -> None:
    change, error, words = REFUSED[name]
    given = tensors(CASE, "cpu")
    call = change(dict(zip(writing.NAMES, given, strict=True)))
    with pytest.raises(error, match=words):
        fmha.write_kv(**call)
    for pages in (given.k_pages, given.v_pages):
        assert (pages.detach().view(torch.int16) == POISON).all()


def test_pages_at_odd_addresses_are_refused(kernel: Kernel) -> None:
    given = tensors(CASE, "cpu")
    shifted = poison(torch.empty(given.k_pages.numel() + 1, dtype=torch.bfloat16))[1:].view(given.k_pages.shape)
    with pytest.raises(fmha.Unsupported, match="no multiple of 16 bytes"):
        fmha.write_kv(given.k, given.v, shifted, given.v_pages, given.slot_mapping)


def test_vllms_page_sizes_are_named(kernel: Kernel) -> None:
    with pytest.raises(fmha.Unsupported, match="pages of 64 slots; layout 'vllm' has 8, 16, 32"):
        check(WriteCase((5,), 2, 16, 64, layout="vllm"), "cpu")


def test_other_devices_are_refused() -> None:
    with pytest.raises(fmha.Unsupported, match="architecture cpu: sm_90a"):
        fmha.write_kv(*tensors(CASE, "cpu"))


def test_a_capture_that_would_compile_is_refused_and_names_warmup(kernel: Kernel, monkeypatch) -> None:
    monkeypatch.setattr(launch, "capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"fmha.warmup\(WriteProblem\(layout='rows'\)\)"):
        fmha.write_kv(*tensors(CASE, "cpu"))


# -- the kernels -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("layout", PAGED_LAYOUTS)
def test_a_kernel_compiles_without_spills(layout: str, arch: str) -> None:
    problem = WriteProblem(layout)
    found = sass.read(compile.cubin(compile.compile_object(problem, CONFIG, arch)))
    assert found.function == f"{key.symbol(problem, CONFIG, arch)}_0"
    assert found.function.startswith(f"fmha_write_kv_{layout}_")
    assert not found.spills and not found.stack_bytes and not found.static_smem_bytes
    assert found.registers <= 40  # six CTAs of 256 threads a multiprocessor


def test_the_key_is_text_that_can_be_read() -> None:
    text = "arch = 'sm_90a'\nwrite problem.layout = 'vllm'\nconfig.threads = 256\nconfig.at_once = 4\n"
    assert key.canonical(WriteProblem("vllm"), CONFIG, ARCH) == text


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(library, "STORE", Store(tmp_path / "cache"))
    monkeypatch.setattr(library, "_functions", {})


def test_warmup_fills_the_cache(cache) -> None:
    fmha.warmup([WriteProblem(layout) for layout in PAGED_LAYOUTS], ARCH)
    texts = {key.canonical(WriteProblem(layout), CONFIG, ARCH) for layout in PAGED_LAYOUTS}
    assert {entry.text for entry in library.STORE.entries()} == texts
    assert all(library.loaded(WriteProblem(layout), CONFIG, ARCH) for layout in PAGED_LAYOUTS)


def test_an_unknown_layout_or_chip_has_no_kernel() -> None:
    with pytest.raises(fmha.Unsupported, match="layout 'nhd': 'rows' or 'vllm' only"):
        fmha.warmup(WriteProblem("nhd"), ARCH)
    assert "architecture sm_80" in str(fmha.supports(WriteProblem(), "sm_80"))


def test_inspect(cache) -> None:
    found = fmha.inspect(WriteProblem(), ARCH)
    assert (found.config, found.smem_bytes, found.resources.spills) == (CONFIG, 0, 0)


# -- the oracle --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", ["nhd", "hnd", "vllm"])
def test_the_oracle_writes_elements_where_the_layout_has_them(layout: str) -> None:
    case = WriteCase((4,), 2, 16, 8, layout=layout)
    k, v, k_pages, v_pages, _ = tensors(case, "cpu")
    slots = [11, -1, len(k_pages) * 8, 2]
    reference.write_kv(k, v, k_pages, v_pages, torch.tensor(slots), layout=layout)
    for t, (page, s) in ((0, (1, 3)), (3, (0, 2))):
        for h in range(2):
            for d in range(16):
                at = {"nhd": (page, s, h, d), "hnd": (page, h, s, d), "vllm": (page, h, d // 8, s, d % 8)}[layout]
                assert k_pages[at] == k[t, h, d]
                assert v_pages[(page, h, d, s) if layout == "vllm" else at] == v[t, h, d]
    written = [int((x.view(torch.int16) != POISON).sum()) for x in (k_pages, v_pages)]
    assert written == [2 * 2 * 16] * 2


def test_the_last_of_tokens_with_one_slot_stays() -> None:
    k, v, k_pages, v_pages, _ = tensors(CASE, "cpu")
    reference.write_kv(k, v, k_pages, v_pages, torch.full((5,), 6))
    assert torch.equal(k_pages[1, 2], k[4]) and torch.equal(v_pages[1, 2], v[4])
