"""Where a result was measured: the GPU, its driver, the versions, the date and the sources."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "nvidia-cutlass-dsl", "apache-tvm-ffi", "numpy")


def describe() -> dict[str, Any]:
    """`{gpu, driver, versions, date, source}` of the current CUDA device and the sources in this checkout; and `tuned`,
    a path, where a file of the user's has block configs for some calls."""
    import torch

    from fmha.jit import tuned
    from perf.fingerprint import fingerprint

    own = {"tuned": str(tuned.file().path)} if tuned.file().entries else {}
    return own | {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver_version(),
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "source": fingerprint(),
    }


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed versions by package, Python's own first; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def driver_version(proc: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The display driver's version, "unknown" if neither nvidia-smi nor the kernel tells."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    try:
        found = re.search(r"\d+\.\d+(\.\d+)?", proc.read_text())
    except OSError:
        return "unknown"
    return found.group() if found else "unknown"
