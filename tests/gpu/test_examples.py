"""The examples run, and find what they compare to be the same."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from fmha.problem import PagedProblem

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


@pytest.mark.needs(PagedProblem("bfloat16", 128))
@pytest.mark.parametrize(("layout", "page"), [("nhd", "16"), ("hnd", "1"), ("vllm", "16")])
def test_decoding(layout: str, page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Logits with a paged cache are those of the same model without one."""
    path = EXAMPLES / "decode.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--tokens", "20", "--layout", layout, "--page", page])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr().out
