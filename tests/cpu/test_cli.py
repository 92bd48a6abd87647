"""`python -m fmha`: what each command prints, writes and returns, and that the demo notices wrong numbers."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import fmha
from fmha import cli, demo, problem
from fmha.jit import compile, launch, library, report, sass
from fmha.jit.store import Store
from fmha.problem import PagedProblem, Problem
from perf import resources
from schedules import simulate
from schedules.scores import SCORES
from schedules.tiling import PAGED_TABLES, TABLES, BlockConfig, TmemConfig, TmemPagedConfig, choose, rows

ARCH = "sm_90a"
ONE = ["--head-dim", "64", "--mask", "dense", "--dtype", "bfloat16"]
NAME = "sm_90a-d64-dense-bf16"
PAGED = "sm_90a-d64-paged-bf16"


def says(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> tuple[str, str]:
    assert cli.main(arguments) == status
    return capsys.readouterr()


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A cache with one kernel."""
    own = Store(tmp_path / "cache")
    monkeypatch.setattr(library, "STORE", own)
    library.object_file(Problem("bfloat16", 64, "dense"), choose(64, ARCH), ARCH)
    return own


# -- asking ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["demo", "compile", "inspect", "cache", "examples:"]),
        (["compile"], ["--arch", "--out", "--head-dim", "manifest.json"]),
        (["inspect"], ["--json", "--head-dim", "spills"]),
        (["cache"], ["ls", "verify", "clear", "FMHA_CACHE_DIR"]),
        (["demo"], ["simulator"]),
    ],
)
def test_help(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*arguments, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arch", "sm_100a", "--head-dim", "192"], ["head_dim 192", "multiples of 8 up to 128"]),
        (["--arch", "sm_100a", "--paged", "--head-dim", "264"], ["head_dim 264", "multiples of 8 up to 256"]),
        (["--arch", "sm_75"], ["sm_75", "sm_90a (Hopper)"]),
        (["--head-dim", "64", "100"], ["head_dim 100", "multiples of 8 up to 256"]),
        (["--head-dim", "264"], ["head_dim 264", "256"]),
    ],
)
def test_what_there_is_no_kernel_for_is_an_error_before_anything_is_written(
    arguments: list[str], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    error = says(capsys, "compile", "--out", str(out), *arguments, status=2)[1]
    assert [word for word in words if word not in error] == []
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments", [["cache"], ["cache", "purge"], ["compile"], ["inspect", "--dtype", "float32"], []]
)
def test_a_malformed_command_says_what_is_allowed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_a_missing_tool_is_an_error_that_names_its_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sass.TOOLS, "cuobjdump", "no-such-package-here")
    assert "no-such-package-here" in says(capsys, "inspect", *ONE, status=2)[1]


@pytest.mark.parametrize(
    ("head_dims", "widths"), [([8], {64}), ([72, 128], {96, 128}), (None, {64, 96, 128, 192, 256})]
)
def test_head_dims_select_the_kernels_that_serve_them(head_dims: list[int] | None, widths: set[int]) -> None:
    options = [] if head_dims is None else ["--head-dim", *map(str, head_dims)]
    chosen = cli.selection(cli.parser().parse_args(["inspect", "--mask", *problem.MASKS, *options]))
    assert {variant.config.head_dim for variant in chosen} == widths
    kernels = sum(row.config.head_dim in widths for row in TABLES[ARCH])
    assert len(chosen) == len(set(chosen)) == kernels * len(problem.MASKS) * len(problem.DTYPES)


@pytest.mark.parametrize(
    ("arguments", "masked", "paged"),
    [
        ([], True, True),
        (["--mask", "causal"], True, False),
        (["--ragged"], True, False),
        (["--paged"], False, True),
        (["--paged", "--score", "softcap"], False, True),
        (["--score", "alibi"], True, False),  # which no paged kernel has
    ],
)
def test_kernels_of_paged_caches_are_among_them_unless_others_are_asked_for(
    arguments: list[str], masked: bool, paged: bool
) -> None:
    chosen = cli.selection(cli.parser().parse_args(["inspect", *arguments]))
    assert {type(variant.problem) for variant in chosen} == set([Problem] * masked + [PagedProblem] * paged)
    scores = {"alibi"} if "alibi" in arguments else {"softcap"} if "softcap" in arguments else {"plain"}
    assert {variant.problem.score for variant in chosen} == scores


@pytest.mark.parametrize(("head_dims", "widths"), [([72], {128}), ([8, 192], {64, 192}), (None, {64, 128, 192, 256})])
def test_head_dims_select_the_paged_kernels_that_serve_them(head_dims: list[int] | None, widths: set[int]) -> None:
    options = [] if head_dims is None else ["--head-dim", *map(str, head_dims)]
    chosen = cli.selection(cli.parser().parse_args(["inspect", "--paged", *options]))
    assert {variant.config.head_dim for variant in chosen} == widths
    kernels = sum(row.config.head_dim in widths for row in PAGED_TABLES[ARCH])
    assert len(chosen) == len(set(chosen)) == kernels * len(problem.PAGED_LAYOUTS) * len(problem.DTYPES)


@pytest.mark.parametrize("arch", sorted(problem.UNRUN))
@pytest.mark.parametrize(
    ("arguments", "forward", "paged"),
    [([], 18, 24), (["--ragged", "--score", *SCORES], 72, 0), (["--head-dim", "72"], 6, 8), (["--paged"], 0, 24)],
)
def test_every_kernel_of_another_architecture_is_among_them(
    arch: str, arguments: list[str], forward: int, paged: int
) -> None:
    chosen = cli.selection(cli.parser().parse_args(["inspect", "--arch", arch, *arguments]))
    assert len(chosen) == len(set(chosen)) == forward + paged
    assert sum(isinstance(variant.config, TmemConfig) for variant in chosen) == forward
    assert sum(isinstance(variant.config, TmemPagedConfig) for variant in chosen) == paged


def test_an_architecture_without_paged_kernels_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(PAGED_TABLES, "sm_100a")
    assert "attention over pages on sm_100a" in says(capsys, "inspect", "--arch", "sm_100a", "--paged", status=2)[1]
    chosen = cli.selection(cli.parser().parse_args(["inspect", "--arch", "sm_100a", "--head-dim", "64"]))
    assert {type(variant.config) for variant in chosen} == {TmemConfig}


def test_a_head_dim_that_paged_kernels_lack_is_served_by_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = tuple(row for row in PAGED_TABLES[ARCH] if row.config.head_dim <= 64)
    monkeypatch.setitem(PAGED_TABLES, ARCH, narrow)
    chosen = cli.selection(cli.parser().parse_args(["inspect", "--head-dim", "64", "128"]))
    assert {v.config.head_dim for v in chosen if isinstance(v.problem, PagedProblem)} == {64}
    assert {v.config.head_dim for v in chosen if isinstance(v.problem, Problem)} == {64, 128}


# -- compile and inspect -----------------------------------------------------------------------------------------------


def test_compile_writes_cubins_and_a_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    says(capsys, "compile", "--out", str(out), "--head-dim", "64", "--dtype", "bfloat16")
    every = json.loads((out / "manifest.json").read_text())
    manifest = [entry for entry in every if "paged" not in entry["name"]]
    assert [entry["name"] for entry in every[len(manifest) :]] == [f"{PAGED}{layout}" for layout in ("", "-vllm")]
    assert [entry["name"] for entry in manifest] == [
        f"sm_90a-d64-{mask}-bf16{lse}{tile}"
        for lse in ("", "-lse")
        for tile in ("", "-128x128")
        for mask in ("dense", "causal", "window")
    ]
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["manifest.json", *(entry["cubin"] for entry in every)]
    )
    for entry in every:
        paged = entry not in manifest
        assert set(entry) == {"name", "arch", "problem", "config", "cubin"}
        p, config = (PagedProblem if paged else Problem)(**entry["problem"]), BlockConfig(**entry["config"])
        assert entry["arch"] == ARCH and config in [row.config for row in rows(64, ARCH, paged=paged)]
        # The cubin is the one that this problem compiles to, not just any.
        assert (out / entry["cubin"]).read_bytes() == compile.cubin(compile.compile_object(p, config, ARCH))
    found, names = resources.folder(out), [entry["name"] for entry in manifest]
    assert {name: found[name] for name in names} == resources.measure(names)
    assert len(found) == len(every)


def test_kernels_of_another_architecture_are_compiled_and_inspected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--arch", "sm_100a", *ONE]
    says(capsys, "compile", "--out", str(tmp_path), *options)
    (entry,) = json.loads((tmp_path / "manifest.json").read_text())
    config = choose(64, "sm_100a")
    assert entry["name"] == "sm_100a-d64-dense-bf16" and entry["config"] == dataclasses.asdict(config)
    says(capsys, "compile", "--out", str(tmp_path / "paged"), "--arch", "sm_100a", "--paged", *ONE[:2], *ONE[4:])
    paged = resources.folder(tmp_path / "paged")
    assert paged.keys() == {"sm_100a-d64-paged-bf16", "sm_100a-d64-paged-bf16-vllm"}
    assert all(found.tmem_columns == 320 and not found.spills for found in paged.values())
    (row,) = json.loads(says(capsys, "inspect", "--json", *options)[0])
    assert (row["arch"], row["spills"], row["stack_bytes"]) == ("sm_100a", 0, 0)
    assert row["setmaxnreg"] == sorted(config.registers)
    assert (row["smem_bytes"], row["tmem_columns"]) == (config.smem_bytes(), config.tmem_columns) == (232448, 384)
    assert row["body_per_score"] == round(row["body"] / 128, 2)
    (found,) = resources.folder(tmp_path).values()
    assert json.loads(json.dumps(dataclasses.asdict(found))).items() <= row.items()
    table = says(capsys, "inspect", *options)[0]
    assert "40/72/200" in table and " tmem " in table and " 384 " in table


def test_inspect_prints_what_the_machine_code_says(capsys: pytest.CaptureFixture[str]) -> None:
    row, short, *exact = json.loads(says(capsys, "inspect", "--json", *ONE)[0])
    found = sass.read(compile.cubin(library.object_file(Problem("bfloat16", 64, "dense"), choose(64, ARCH), ARCH)))
    assert short["name"] == f"{NAME}-128x128"
    assert [each["name"] for each in exact] == [f"{NAME}-lse", f"{NAME}-lse-128x128"]
    assert (row["name"], row["arch"]) == (NAME, ARCH)
    assert (row["stack_bytes"], row["spills"]) == (found.stack_bytes, found.spills) == (0, 0)
    assert (row["registers"], row["instructions"]) == (found.registers, found.instructions)
    assert row["body"] == found.body.common
    assert row["smem_bytes"] == choose(64, ARCH).smem_bytes()
    assert row["problem"] == dataclasses.asdict(Problem("bfloat16", 64, "dense"))


def test_inspect_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    text = says(capsys, "inspect", *ONE)[0]
    body = resources.load()[NAME].body
    assert NAME in text and "spills" in text and f" {body} " in text


# -- the cache ---------------------------------------------------------------------------------------------------------


def test_cache_ls_names_the_kernels(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    text = says(capsys, "cache", "ls")[0]
    assert "sm_90a bfloat16 dense, head dim 64, tile_n 128" in text
    assert "current" in text and "1 kernels" in text


def test_a_paged_kernel_is_named_by_its_layout() -> None:
    paged = PagedProblem("float16", 128, layout="vllm")
    text = library.key.canonical(paged, library.pick(paged, ARCH).config, ARCH)
    assert cli.describe(text) == "sm_90a float16 paged vllm, head dim 128, tile_n 64"


def test_cache_verify_finds_a_damaged_kernel(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0 of them damaged" in says(capsys, "cache", "verify")[0]
    (entry,) = store.entries()
    content = bytearray(entry.path.read_bytes())
    content[-1] ^= 1
    entry.path.write_bytes(content)
    out, error = says(capsys, "cache", "verify", status=1)
    assert "1 of them damaged" in out and str(entry.path) in error
    assert "damaged" in says(capsys, "cache", "ls")[0]


def test_cache_clear_removes_them(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    says(capsys, "cache", "clear")
    assert store.entries() == []
    assert "0 kernels" in says(capsys, "cache", "ls")[0]


# -- the demo ----------------------------------------------------------------------------------------------------------


def test_the_demo_without_a_gpu(tmp_path: Path) -> None:
    empty = {"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "fmha", "demo"], env=os.environ | empty, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" equal") == len(demo.SIMULATED) + sum(case.head_dim <= 128 for case in demo.SIMULATED)
    assert "No GPU ran anything" in done.stdout
    count = len(resources.variants()) + len(PAGED_TABLES[ARCH])
    assert f"{count} kernels compiled for sm_90a (Hopper), none spills a register" in done.stdout
    words = "15 kernels compiled for sm_100a (Blackwell), none spills a register. Nobody has run any of them on a GPU."
    assert words in done.stdout.replace("\n", " ") and "sm_103a" not in done.stdout
    assert resources.variants().keys() <= set(done.stdout.split())


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=report.WIDE)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("arch", [None, "sm_80", "sm_100a", "sm_103a"])
def test_the_demo_says_why_nothing_runs(arch: str | None, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []
    monkeypatch.setattr(launch, "current_architecture", lambda: arch)
    monkeypatch.setattr(demo, "simulate", lambda console, one: done.append(f"simulate {one}") or 0)
    monkeypatch.setattr(demo, "show_resources", lambda console, one: done.append(f"compile {one}") or 0)
    monkeypatch.delenv(problem.ALLOW_UNRUN, raising=False)
    assert demo.run(console) == 0
    assert done == [f"{what} {one}" for what in ("simulate", "compile") for one in ("sm_90a", "sm_100a")]
    said = " ".join(printed(console).split())
    assert "No GPU ran anything" in said and (arch or "no CUDA device") in said
    assert ("FMHA_ALLOW_UNRUN=1" in said) == (arch in problem.UNRUN)


@pytest.mark.parametrize(("arch", "cases"), [("sm_90a", 8), ("sm_100a", 7)])
def test_the_demo_runs_what_there_are_kernels_for(
    arch: str, cases: int, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, where it may: all of its cases but those of head dim 256 on Blackwell."""
    monkeypatch.setenv(problem.ALLOW_UNRUN, "1")
    monkeypatch.setattr(launch, "current_architecture", lambda: arch)
    monkeypatch.setattr(demo, "ON_GPU", tuple(dataclasses.replace(c, batch=0) for c in demo.ON_GPU))
    monkeypatch.setattr(demo, "DEVICE", "cpu")
    monkeypatch.setattr(fmha, "attention", lambda q, k, v, causal: q)
    monkeypatch.setattr(demo, "torch_attention", lambda q, k, v, causal: q)
    monkeypatch.setattr(demo, "max_error", lambda *call: 1.0)
    monkeypatch.setattr(demo, "median_ms", lambda *functions: (1.0, 2.0))
    monkeypatch.setattr(demo, "show_resources", lambda console, arch: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    assert demo.run(console) == 0
    assert printed(console).count(" right") == cases + 1  # "right is at most"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("what", ["o", "lse"])
def test_the_demo_notices_one_wrong_number(
    what: str, arch: str, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = simulate.forward

    def wrong(*args: object, **kwargs: object) -> simulate.Result:
        found = right(*args, **kwargs)  # type: ignore[arg-type]
        getattr(found, what).flat[-1] += 1e-6
        return found

    monkeypatch.setattr(demo, "SIMULATED", demo.SIMULATED[:1])
    assert demo.simulate(console, arch) == 0
    monkeypatch.setattr(simulate, "forward", wrong)
    assert demo.simulate(console, arch) == 1
    assert "DIFFERENT" in printed(console)


def test_the_demo_notices_a_spill(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    spilling = dataclasses.replace(resources.load()[NAME], local_loads=4)
    monkeypatch.setattr(report, "of_variant", lambda variant, arch: spilling)
    assert demo.show_resources(console, ARCH) == 1
    assert "spill registers" in printed(console)


def test_torch_attention_aligns_causal_at_the_bottom_right() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 3, 4, 8), torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 8)
    out = demo.torch_attention(q, k, v, causal=True)
    for i in range(3):  # query i sees the keys up to i + 2
        alone = demo.torch_attention(q[:, i : i + 1], k[:, : i + 3], v[:, : i + 3], causal=False)
        torch.testing.assert_close(out[:, i : i + 1], alone)


@pytest.mark.parametrize(("times", "status"), [(1.0, 0), (1.1, 1)])
def test_the_demo_on_a_gpu_checks_the_kernels(
    times: float, status: int, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's half of the demo, with torch's attention on the CPU in the kernels' place."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        return times * demo.torch_attention(q, k, v, causal)

    monkeypatch.setattr(fmha, "attention", attention, raising=False)
    monkeypatch.setattr(demo, "DEVICE", "cpu")
    monkeypatch.setattr(demo, "ON_GPU", (demo.Case(1, 70, 70, 4, 2, 64, causal=True),))
    monkeypatch.setattr(demo, "median_ms", lambda *functions: (1.0, 2.0))
    monkeypatch.setattr(demo, "show_resources", lambda console, arch: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "none")
    assert demo.run_on_gpu(console, ARCH) == status
    assert ("WRONG" if status else "right") in printed(console)
    assert "2.00" in printed(console)  # the ratio of the times


def test_flops_of_a_causal_case_count_the_scores_that_are_seen() -> None:
    assert demo.Case(1, 3, 5, 1, 1, 1, causal=True).flops == 4 * (3 + 4 + 5)
    assert demo.Case(2, 3, 5, 4, 2, 8, causal=False).flops == 4 * 2 * 4 * 8 * 15
