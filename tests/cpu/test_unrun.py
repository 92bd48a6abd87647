"""Calls on GPUs whose kernels nobody has run: refused in plain words, or planned and launched as anywhere else."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fmha
from fmha import checks, paged, reference
from fmha.jit import arguments, compile, launch, library
from fmha.jit.store import Store, fingerprint
from fmha.problem import ALLOW_UNRUN, ARCHITECTURES, UNRUN, PagedProblem, Problem, Unsupported, WriteProblem, unrun
from schedules.tiling import PAGED_SM90, PAGED_TABLES, SM100, CopyConfig, TmemConfig
from tests.cpu.stand_in import pass_for_gpu
from tests.cpu.test_attention_host import Kernel, assert_right, tensors

BF16, FP16 = torch.bfloat16, torch.float16
ROWS = 256  # of a work tile: two Q tiles
NEVER = pytest.mark.parametrize("value", [None, "", "0", "true"])


@pytest.fixture(params=sorted(UNRUN))
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Makes CPU tensors pass for tensors on such a GPU; nobody has allowed anything yet."""
    stand_in = Kernel(request.param)
    pass_for_gpu(monkeypatch, stand_in.fetch, request.param)
    monkeypatch.setattr(launch, "current", stand_in.current)
    monkeypatch.delenv(ALLOW_UNRUN, raising=False)
    checks._warn_of_unrun.cache_clear()
    return stand_in


@pytest.fixture
def allowed(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setenv(ALLOW_UNRUN, "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", checks.UnrunWarning)
        yield kernel


def packed(dtype: torch.dtype = BF16) -> tuple[torch.Tensor, ...]:
    """Three sequences of 300, 0 and 5 queries, and as many keys."""
    q, k, v = (x[0] for x in tensors(batch=1, seqlen_q=305, seqlen_k=305, dtype=dtype))
    cu = torch.tensor([0, 300, 300, 305], dtype=torch.int32)
    return q, k, v, cu, cu


def write() -> None:
    new, pages = torch.zeros(2, 1, 8, dtype=BF16), torch.zeros(2, 4, 16, 1, 8, dtype=BF16)
    fmha.write_kv(new, new, *pages, torch.tensor([3, -1]))


CALLS: dict[str, Callable[[], Any]] = {
    "attention": lambda: fmha.attention(*tensors()),
    "no query": lambda: fmha.attention(*tensors(seqlen_q=0)),
    "seqused": lambda: fmha.attention(*tensors(batch=1), seqused_k=torch.tensor([3], dtype=torch.int32)),
    "packed": lambda: fmha.attention_varlen(*packed()),
    "write_kv": write,
}


# -- refused -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@NEVER
def test_a_call_is_refused_and_says_what_to_do(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any], value: str | None
) -> None:
    if value is not None:
        monkeypatch.setenv(ALLOW_UNRUN, value)
    monkeypatch.setattr(library, "fetch", lambda *kernel: pytest.fail("fetched"))
    with pytest.raises(Unsupported) as refused:
        call()
    said = str(refused.value)
    wanted = (kernel.arch, "compiled, simulated and inspected", "never run", "pytest tests/gpu", "FMHA_ALLOW_UNRUN=1")
    assert [words for words in wanted if words not in said] == []
    assert launch.PLANS == {}, "once it is allowed, the same call is planned"


def test_out_stays_as_it_was(kernel: Kernel) -> None:
    q, k, v = tensors()
    out = torch.full_like(q, 7.0)
    with pytest.raises(Unsupported, match="never run"):
        fmha.attention(q, k, v, out=out)
    assert (out == 7.0).all()


def test_where_kernels_were_run_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ALLOW_UNRUN, raising=False)
    assert {arch for arch in ARCHITECTURES if unrun(arch)} == UNRUN < set(ARCHITECTURES)


@pytest.mark.parametrize("value", ["0", "1"])
def test_what_no_kernel_serves_says_so_whatever_is_allowed(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(ALLOW_UNRUN, value)
    with pytest.raises(Unsupported, match="head_dim 136: multiples of 8 up to 128 only"):
        fmha.attention(*tensors(head_dim=136))
    q, pages = torch.zeros(1, 2, 64, dtype=BF16), torch.zeros(2, 4, 16, 1, 64, dtype=BF16)
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(Unsupported, match=rf"attention over pages on {kernel.arch}: sm_90a \(Hopper\) only"):
        fmha.attention_paged(q, *pages, one[None], one)


# -- allowed -----------------------------------------------------------------------------------------------------------
def test_one_warning_a_process(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOW_UNRUN, "1")
    with pytest.warns(checks.UnrunWarning, match=f"{kernel.arch} were never run") as seen:
        fmha.attention(*tensors())
        fmha.attention(*tensors(seqlen_q=3))
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "q_tiles"), [(1, 1), (256, 1), (257, 2), (700, 3)])
def test_numbers_and_work_tiles(allowed: Kernel, dtype: torch.dtype, causal: bool, seqlen_q: int, q_tiles: int) -> None:
    """A launch adds to the counter as many work tiles as the kernel will take: of 256 queries."""
    q, k, v = tensors(batch=3, seqlen_q=seqlen_q, seqlen_k=40, head_dim=72, dtype=dtype)
    out, lse = fmha.attention(q, k, v, causal=causal, return_lse=True)
    assert_right(out, q, k, v, lse, causal=causal)
    assert isinstance(allowed.config, TmemConfig) and allowed.config.tile_m == ROWS
    assert allowed.counter.base == 3 * 4 * q_tiles
    assert allowed.problem == Problem(str(dtype).removeprefix("torch."), 72, "causal" if causal else "dense")


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "width"), [(64, 0, 64), (8, 72, 96), (128, 64, 128), (16, 128, 128)]
)
def test_v_of_another_head_dim_gets_the_tile_that_holds_both(
    allowed: Kernel, head_dim: int, head_dim_v: int, width: int
) -> None:
    q, k, _ = tensors(head_dim=head_dim)
    _, _, v = tensors(head_dim=head_dim_v or head_dim)
    out = fmha.attention(q, k, v)
    assert_right(out, q, k, v)
    assert (allowed.config.head_dim, allowed.config.value_dim) == (width, width)
    assert (allowed.numbers["head_dim"], allowed.numbers["head_dim_v"]) == (head_dim, v.shape[-1])


def test_whoever_wants_lses_gets_the_same_kernel_at_every_length(allowed: Kernel, monkeypatch) -> None:
    monkeypatch.setattr(Kernel, "__call__", lambda self, *arguments: None)
    for batch, seqlen in ((64, 256), (1, 16384)):
        for lse in (False, True):
            fmha.attention(*torch.empty(3, batch, seqlen, 4, 128, dtype=BF16), return_lse=lse)
            assert allowed.config == SM100[-1].config


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_packed_sequences(allowed: Kernel, dtype: torch.dtype) -> None:
    given = packed(dtype)
    out, lse = fmha.attention_varlen(*given, causal=True, return_lse=True)
    exact, exact_lse = reference.attention_varlen(*given, causal=True)
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-4)
    assert allowed.problem.ragged and allowed.config.tile_m == ROWS
    assert (allowed.numbers["sequences"], allowed.numbers["packed"], allowed.numbers["least rows"]) == (3, 1, 0)


def test_as_many_work_tiles_as_a_packed_batch_may_have(allowed: Kernel) -> None:
    fmha.attention_varlen(*packed())
    (plan,) = launch.PLANS.values()
    assert plan.work_tiles == (2 + 3 + 2) * 4  # type: ignore[attr-defined]
    assert plan.listing_words == arguments.listing_words(3)  # type: ignore[attr-defined]


def test_softcap_windows_slopes_and_sinks(allowed: Kernel) -> None:
    q, k, v = tensors(batch=2)
    used = torch.tensor([3, 7], dtype=torch.int32)
    given = {"window": (2, 1), "softcap": 4.0, "sinks": torch.randn(4), "alibi_slopes": torch.rand(2, 4)}
    out = fmha.attention(q, k, v, seqused_k=used, **given)
    exact, _ = reference.attention(q, k, v, seqused_k=used, **given)
    torch.testing.assert_close(out.double(), exact, atol=2e-2, rtol=1e-2)
    assert (allowed.problem.mask, allowed.problem.score) == ("window", "both")


def test_new_tokens_are_written(allowed: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    monkeypatch.setattr(library, "fetch", lambda *kernel: fetched.append(kernel) or (lambda *args: None))
    write()
    assert fetched == [(WriteProblem("rows"), CopyConfig(), allowed.arch)]


def test_paged_attention_needs_no_more_than_a_table(allowed: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are then the paged kernel's as well: the forward kernel reads no pages there."""
    monkeypatch.setitem(PAGED_TABLES, allowed.arch, PAGED_SM90)
    assert fmha.supports(PagedProblem("bfloat16", 128), allowed.arch) is None
    assert "paged 16" in str(fmha.supports(Problem("bfloat16", 128, ragged=True, paged=16), allowed.arch))
    q, pages = torch.zeros(1, 300, 2, 64, dtype=BF16), torch.zeros(2, 40, 16, 1, 64, dtype=BF16)
    table = torch.zeros(1, 30, dtype=torch.int32)
    fetched = []
    monkeypatch.setattr(library, "fetch", lambda *kernel: fetched.append(kernel) or (lambda *args: None))
    plan = paged._plan(q, *pages, table, torch.ones(1, dtype=torch.int32), None, None, None, paged.Options())
    assert [kernel[0] for kernel in fetched] == [PagedProblem("bfloat16", 64)]
    assert plan.prefill is None and plan.decodes


# -- without running anything ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", ["0", "1"])
def test_warmup_launches_only_what_is_allowed(kernel: Kernel, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(ALLOW_UNRUN, value)
    touched: list[Any] = []
    monkeypatch.setattr(launch, "current_architecture", lambda: kernel.arch)
    monkeypatch.setattr(library, "fetch", lambda *kernel: kernel)
    monkeypatch.setattr(library, "_touch", lambda function, problem: touched.append(problem))
    problems = [Problem("bfloat16", 64), WriteProblem()]
    fmha.warmup(problems)
    assert touched == (problems if value == "1" else [])


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[library.Inspection]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(ALLOW_UNRUN, raising=False)
        patch.setattr(library, "STORE", Store(tmp_path_factory.mktemp("cache")))
        fmha.warmup(Problem("float16", 40, "causal"), "sm_100a")
        patch.setattr(compile, "compile_object", lambda *args: pytest.fail("compiled again"))
        yield fmha.inspect(Problem("float16", 64, "causal"), "sm_100a")


def test_warmup_and_inspect_need_no_permission(inspected: library.Inspection) -> None:
    config = SM100[0].config
    assert (inspected.config, inspected.reason) == (config, SM100[0].reason)
    assert inspected.smem_bytes == config.smem_bytes()
    assert inspected.resources.setmaxnreg == config.registers and inspected.resources.spills == 0
    assert "arch = 'sm_100a'\n" in inspected.key and "config.polynomials = 16\n" in inspected.key


def test_the_variable_is_of_calls_and_not_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """What can be compiled, and where it is kept, is the same whether it is set or not."""
    found = []
    for value in ("0", "1"):
        monkeypatch.setenv(ALLOW_UNRUN, value)
        found.append((fmha.supports(Problem("bfloat16", 64), "sm_100a"), fingerprint()))
    assert found[0] == found[1] and found[0][0] is None
