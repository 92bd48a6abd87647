"""`python -m perf.fingerprint`: which sources a result was measured on.

A hash of what `fmha/` and `schedules/` say to the interpreter: comments, docstrings and layout leave it alone, code
does not. It is the same under every Python version, so that a result recorded on one machine can be checked on another.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("fmha", "schedules")
DIGITS = 16


def fingerprint(root: Path = ROOT) -> str:
    """16 hexadecimal digits. `root` holds the folders `fmha` and `schedules`; ValueError if it has no such sources."""
    digest = hashlib.sha256()
    files = sorted(path for package in PACKAGES for path in (root / package).rglob("*.py"))
    if not files:
        raise ValueError(f"root {str(root)!r}: no Python files under {' or '.join(PACKAGES)}")
    for path in files:
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode())
        for word in meaning(ast.parse(path.read_bytes(), filename=str(path))):
            digest.update(f"{word}\n".encode())
    return digest.hexdigest()[:DIGITS]


def meaning(node: object) -> Iterator[str]:
    """A syntax tree as words, without strings that stand as statements (docstrings), positions and empty fields.

    Empty fields are left out because newer Pythons add some (`type_params`), which `ast.dump` would show.
    """
    if isinstance(node, ast.JoinedStr):
        node = ast.JoinedStr(_joined(node.values))
    if isinstance(node, ast.AST):
        yield f"({type(node).__name__}"
        for name, value in ast.iter_fields(node):
            if value is not None and value != [] and name not in ("kind", "type_comment"):
                yield name
                yield from meaning(value)
        yield ")"
    elif isinstance(node, list):
        for item in node:
            if not _is_text(item):
                yield from meaning(item)
    else:
        yield repr(node)


def _joined(parts: list[ast.expr]) -> list[ast.expr]:
    """The parts of an f-string with its text in as few pieces as can be: Python 3.12 leaves more."""
    joined: list[ast.expr] = []
    for part in parts:
        before = joined[-1] if joined else None
        if isinstance(part, ast.Constant) and isinstance(before, ast.Constant):
            joined[-1] = ast.Constant(before.value + part.value)  # type: ignore[operator]
        else:
            joined.append(part)
    return [part for part in joined if not (isinstance(part, ast.Constant) and part.value == "")]


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.fingerprint", description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT, help="a checkout (default: this one)")
    print(fingerprint(parser.parse_args().root))


if __name__ == "__main__":
    main()
