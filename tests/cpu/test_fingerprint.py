"""The fingerprint of the sources follows code and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from perf.fingerprint import ROOT, fingerprint, meaning

SOURCE = '''"""Doc."""

LIMIT = 3  # rows


class Thing:
    """A thing."""

    def double(self, x: int) -> int:
        """Twice x."""
        return 2 * x
'''


def of(tmp_path: Path, source: str, name: str = "fmha/a.py") -> str:
    root = tmp_path / str(len(list(tmp_path.iterdir())))
    path = root / name
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return fingerprint(root)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# rows", "# columns, at most"),
        ('"""Doc."""', '"""Another text,\nof two lines."""'),
        ('"""Twice x."""', '"""Two times x."""'),
        ('        """Twice x."""\n', ""),
        ("2 * x", "(2 *\n            x)"),
    ],
)
def test_comments_docstrings_and_layout_leave_it(tmp_path: Path, old: str, new: str) -> None:
    assert SOURCE.replace(old, new) != SOURCE
    assert of(tmp_path, SOURCE) == of(tmp_path, SOURCE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2 * x", "x * 2"),
        ("2 * x", "2.0 * x"),
        ("LIMIT = 3", "LIMIT = 4"),
        ("double", "twice"),
        ("x: int", "x: float"),
        ("2 * x", "'Twice x.'"),
        ("class Thing", "@final\nclass Thing"),
        ("        return 2 * x", "        return 2 * x\n        return None"),
    ],
)
def test_code_changes_it(tmp_path: Path, old: str, new: str) -> None:
    assert SOURCE.replace(old, new) != SOURCE
    assert of(tmp_path, SOURCE) != of(tmp_path, SOURCE.replace(old, new))


def test_text_in_pieces_is_the_same_text() -> None:
    """Python 3.12 leaves the pieces of adjacent strings in an f-string, and empty ones; other versions join them."""

    def fstring(*texts: str) -> list[str]:
        value = ast.FormattedValue(ast.Name("x", ast.Load()), conversion=-1)
        return list(meaning(ast.JoinedStr([*map(ast.Constant, texts), value])))

    assert fstring("a", "b", "") == fstring("ab") == fstring("", "ab") != fstring("ba")
    assert fstring() == fstring("") != fstring("a")


def test_both_packages_and_file_names_count(tmp_path: Path) -> None:
    names = ["fmha/a.py", "fmha/b.py", "fmha/c/a.py", "schedules/a.py"]
    assert len({of(tmp_path, SOURCE, name) for name in names}) == len(names)


def test_a_folder_without_sources_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python files"):
        fingerprint(tmp_path)


def test_command_line_prints_it() -> None:
    done = subprocess.run([sys.executable, "-m", "perf.fingerprint"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == fingerprint()
    assert len(done.stdout.strip()) == 16
