"""The README says what the code says, and its example is real."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import fmha
from fmha.problem import ALLOW_UNRUN, ARCHITECTURES, DTYPES, MASKS, UNRUN, AnyProblem, PagedProblem, supports
from perf import readme

ROOT = Path(__file__).resolve().parents[2]
TEXT = readme.README.read_text()


def test_the_generated_parts_are_current() -> None:
    assert readme.generate(TEXT) == TEXT, "python -m perf.readme writes them"


def test_a_stale_part_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "README.md"
    monkeypatch.setattr(readme, "README", copy)
    copy.write_text(TEXT)
    assert readme.main(["--check"]) == 0
    stale = TEXT.replace("8 to 256 in steps of 8", "8 to 512 in steps of 8")
    assert stale != TEXT
    copy.write_text(stale)
    assert readme.main(["--check"]) == 1
    assert copy.read_text() == stale
    assert readme.main([]) == 0
    assert copy.read_text() == TEXT


def test_the_support_table_follows_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrower(problem: AnyProblem, arch: str) -> str | None:
        if isinstance(problem, PagedProblem):
            return "no" if problem.head_dim > 64 else supports(problem, arch)
        refused = (problem.dtype, problem.mask) == ("float16", "causal") and problem.head_dim > 128
        return "no" if refused else supports(problem, arch)

    row = "| Hopper (sm_90a) | bfloat16, float16 | dense, causal, window | 8 to 256 in steps of 8 |"
    paged = row.replace("(sm_90a)", "(sm_90a), paged")
    assert row in readme.support() and paged in readme.support()
    monkeypatch.setattr(readme, "supports", narrower)
    assert row not in readme.support() and paged.replace("256", "64") in readme.support()
    assert "| Hopper (sm_90a) | float16 | causal | 8 to 128 in steps of 8 |" in readme.support()


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([], "none"), ([8], "8"), ([8, 16], "8, 16"), ([8, 16, 24], "8 to 24 in steps of 8"), ([1, 2, 4], "1, 2, 4")],
)
def test_spans(numbers: list[int], words: str) -> None:
    assert readme.spans(numbers) == words


@pytest.mark.parametrize("text", ["", TEXT.replace("<!-- support:end -->", ""), TEXT + "<!-- other:begin -->"])
def test_missing_or_unknown_markers_are_errors(text: str) -> None:
    with pytest.raises(ValueError, match="block"):
        readme.generate(text)


def test_the_example_calls_what_exists() -> None:
    example = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert example
    code = compile(example[1], "README.md", "exec")
    assert {"torch", "fmha", "attention"} <= set(code.co_names)
    assert set(re.findall(r"fmha\.(\w+)\(", TEXT)) <= set(fmha.__all__)
    arguments = set(re.findall(r"(\w+)=", example[1])) - {"dtype", "device"}
    assert arguments <= set(inspect.signature(fmha.attention).parameters)


def test_what_it_opens_with() -> None:
    order = ["Exact attention", "```python", "make demo", "make test", "<!-- support:begin -->"]
    places = [TEXT.index(words) for words in order]
    assert places == sorted(places)
    table = TEXT[TEXT.index("<!-- support:begin -->") : TEXT.index("<!-- support:end -->")]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    for arch, chip in ARCHITECTURES.items():
        mine = [line for line in lines if chip in line and arch in line]
        assert len(mine) == 2 and all(("never run" in line) == (arch in UNRUN) for line in mine)
    assert ALLOW_UNRUN in TEXT
    assert all(word in TEXT for word in (*DTYPES, *MASKS))


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md"])
def test_files_and_targets_that_it_names_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    names = set(re.findall(r"`((?:schedules|fmha|tests|perf|\.ci)/[\w./]*)`", text))
    assert names
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []
    makefile = (ROOT / "Makefile").read_text()
    targets = {a or b for a, b in re.findall(r"`make (\w+)`|^make (\w+)", text, re.MULTILINE)}
    assert targets
    assert [target for target in sorted(targets) if f"\n{target}:" not in makefile] == []
