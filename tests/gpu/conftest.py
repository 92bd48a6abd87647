"""What the GPU tests share: kernels compiled side by side beforehand, a watchdog, and the record of a run."""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fmha.jit.launch import describe_device
from tests.cases import Case
from tests.checks import Verdict

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
HANG_AFTER = 75  # seconds a test may take: a kernel that never ends must not hold the GPU for ever
MANY = 30  # so many tests use enough kernels to compile them side by side first


@dataclass
class Record:
    """What one run found."""

    path: Path
    environment: dict[str, Any]
    started: float = field(default_factory=time.monotonic)
    outcomes: dict[str, int] = field(default_factory=lambda: {"passed": 0, "failed": 0, "skipped": 0})
    failed: list[str] = field(default_factory=list)
    checked: dict[str, dict[str, Any]] = field(default_factory=dict)  # by dtype

    def add(self, case: Case, verdict: Verdict) -> None:
        entry = self.checked.setdefault(
            case.dtype, {"checked": 0, "worst_ratio": 0.0, "worst_case": "", "worst_lse_error": 0.0}
        )
        entry["checked"] += 1
        entry["worst_lse_error"] = max(entry["worst_lse_error"], verdict.lse_error)
        if verdict.ratio > entry["worst_ratio"]:
            entry.update(worst_ratio=verdict.ratio, worst_case=case.name)

    def write(self) -> None:
        """`worst_ratio` is the error as a multiple of torch's; `checked` counts problems compared with the oracle."""
        report = self.environment | {
            "tests": self.outcomes,
            "failed": self.failed,
            "cases": self.checked,
            "seconds": round(time.monotonic() - self.started, 1),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(report, indent=2) + "\n")


RECORD = pytest.StashKey[Record | None]()
STDERR = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="PATH", help="write what the GPU tests found there, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    with config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        config.stash[STDERR] = os.dup(2)
    path = config.getoption("--record", default=None)
    config.stash[RECORD] = None
    if path is not None:
        from perf.environment import describe

        if not torch.cuda.is_available():
            raise pytest.UsageError("--record: there is no CUDA device, so nothing would be recorded")
        config.stash[RECORD] = Record(Path(path), describe())
        config.pluginmanager.register(Recorder(config.stash[RECORD]), "fmha-recorder")


class Recorder:
    """Counts outcomes and writes the record when the run ends, however it ends."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.failed or report.skipped:
            self.record.outcomes[report.outcome] += 1
            if report.failed:
                self.record.failed.append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.record.write()


@pytest.fixture(scope="session", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    """All kernels in the disk cache, compiled by several processes: one after another they take ten minutes."""
    running = (item for item in request.session.items if not item.get_closest_marker("skip"))
    if sum(item.path.is_relative_to(HERE) for item in running) < MANY:
        return
    device = describe_device(torch.device("cuda", torch.cuda.current_device()))
    parts = max(1, min(16, os.cpu_count() or 1))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels", *map(str, (part, parts, device.arch, device.multiprocessors))],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for part in range(parts)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=300)
        if worker.returncode:
            warnings.warn(f"compiling kernels beforehand failed:\n{errors[-2000:]}", stacklevel=1)


def in_a_cold_process(code: str, tmp_path: Path) -> str:
    """What `code` prints in a process of its own, with an empty cache: nothing is in memory there."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"FMHA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


@pytest.fixture(autouse=True)
def watched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the process, with a traceback, if a test hangs; ends the run if it lost the CUDA context."""
    faulthandler.dump_traceback_later(HANG_AFTER, exit=True, file=request.config.stash[STDERR])
    yield
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        pytest.exit(f"{request.node.nodeid} lost the CUDA context, no later test could pass: {error}", 1)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[Case, Verdict], None]:
    """Notes a verdict for the run's record, if one is written."""
    kept = request.config.stash[RECORD]
    return kept.add if kept is not None else lambda case, verdict: None
