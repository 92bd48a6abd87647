"""Files that others may read at any moment: they appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace(path: Path, content: bytes) -> None:
    """Writes a file in the place of what is there, through a temporary one beside it, STEM.*.tmp. OSError if it cannot
    be written; nothing is left behind then."""
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=".tmp", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
