"""What bounds a kernel, from the hardware counters that Nsight Compute (`ncu`) reads.

`command` runs a workload under ncu, `parse` reads the CSV of its raw page (a row for each launch, a column for each
metric, units in the second line), and `summarise` picks from that what is asked here: how busy each unit was, how much
was moved, and why warps did not issue.
"""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "WarpStateStats",
    "LaunchStats",
    "Occupancy",
)
# What is not in those sections, or not in every version's.
METRICS = (
    "gpu__time_duration.sum",
    "sm__cycles_elapsed.avg.per_second",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_bytes.sum",
    "lts__t_sector_hit_rate.pct",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
)
# How busy each unit was, in percent: the first metric that was collected counts.
UNITS: Mapping[str, tuple[str, ...]] = {
    "tensor pipe": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
    ),
    "XU pipe (exp2)": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",),
    "FMA pipe": (
        "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    ),
    "ALU pipe": ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",),
    "issue slots": (
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "sm__inst_issued.avg.pct_of_peak_sustained_active",
    ),
    "shared memory, loads and stores": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
        "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    ),
    "shared memory, banks read": (
        "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
        "l1tex__throughput.avg.pct_of_peak_sustained_active",
    ),
    "memory pipes": (
        "sm__memory_throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
    "L2": (
        "lts__throughput.avg.pct_of_peak_sustained_elapsed",
        "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    ),
    "DRAM": (
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
SCALES: Mapping[str, float] = (  # ncu's units as it has spelt them over the years; any other is left as it is
    {
        f"{prefix}{unit}": factor
        for unit in ("second", "s")
        for prefix, factor in (("n", 1e-9), ("u", 1e-6), ("m", 1e-3))
    }
    | {f"{prefix}{unit}": factor for unit in ("byte", "hz") for prefix, factor in (("K", 1e3), ("M", 1e6), ("G", 1e9))}
    | {"Tbyte": 1e12, "cycle/nsecond": 1e9, "cycle/ns": 1e9, "cycle/usecond": 1e6, "cycle/us": 1e6}
)


Metrics = dict[str, float]


@dataclass(frozen=True)
class Launch:
    """A profiled launch: its kernel, and every metric that is a number, in seconds, bytes, hertz, counts or percent."""

    kernel: str
    metrics: Metrics


class ProfilerError(RuntimeError):
    """ncu did not say what it was asked."""


def find() -> str | None:
    """The path of `ncu`: on the PATH, else the newest of a CUDA toolkit's or Nsight Compute's own; None without one."""
    places = (*Path("/usr/local").glob("cuda*/bin/ncu"), *Path("/opt/nvidia/nsight-compute").glob("*/ncu"))
    return shutil.which("ncu") or max(map(str, places), default=None)


def command(
    ncu: str, log: Path, workload: Sequence[str], *, kernels: str = "fmha_forward", metrics: bool = True
) -> list[str]:
    """The command line that profiles the launches of `kernels` (a regular expression) which `workload` makes between
    the start and the stop of a profiler. Without `metrics` it asks for the sections alone, which every version has.

    Clocks are left alone, so that the kernel runs as it does outside; each launch is repeated some ten times, with
    flushed caches, for all counters.
    """
    asked = [argument for section in SECTIONS for argument in ("--section", section)]
    asked += ["--metrics", ",".join(METRICS)] if metrics else []
    return [
        ncu,
        *("--clock-control", "none"),
        *("--profile-from-start", "off"),
        *("--kernel-name", f"regex:{kernels}"),
        *("--target-processes", "all"),
        *asked,
        *("--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)),
        *workload,
    ]


def parse(text: str) -> list[Launch]:
    """The launches in ncu's raw CSV, in order. ProfilerError, with what ncu said, if there are none."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    if len(rows) < 3 or "Kernel Name" not in rows[0]:
        said = [line for line in text.splitlines() if line.startswith("==")]
        raise ProfilerError(" ".join(said[-6:]) or "ncu wrote no table")
    header, units, *launches = rows
    return [_launch(dict(zip(header, row, strict=False)), dict(zip(header, units, strict=False))) for row in launches]


def _launch(row: Mapping[str, str], units: Mapping[str, str]) -> Launch:
    metrics = {}
    for name, text in row.items():
        value = number(text)
        if value is not None and "__" in name:
            metrics[name] = value * SCALES.get(units.get(name, ""), 1.0)
    return Launch(row["Kernel Name"], metrics)


def number(text: str) -> float | None:
    """ "1,234.5" as 1234.5; None for what is no number, such as "n/a"."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def first(metrics: Metrics, names: Iterable[str]) -> float | None:
    return next((metrics[name] for name in names if name in metrics), None)


def summarise(launch: Launch, flops: int) -> dict[str, Any]:
    """What is said of a launch that does `flops` useful operations: JSON. What was not collected is left out."""
    metrics = launch.metrics
    units = {unit: value for unit, names in UNITS.items() if (value := first(metrics, names)) is not None}
    stalls = {match[1]: value for name, value in metrics.items() if (match := STALL.fullmatch(name))}
    stalls.pop("selected", None)  # not a stall: the warp issued
    found: dict[str, Any] = {
        "kernel": launch.kernel,
        "busy": units,
        "stalls": dict(sorted(stalls.items(), key=lambda stall: -stall[1])),
        "l2_hit_rate": metrics.get("lts__t_sector_hit_rate.pct"),
        "hertz": first(metrics, ("sm__cycles_elapsed.avg.per_second", "smsp__cycles_elapsed.avg.per_second")),
        "registers": metrics.get("launch__registers_per_thread"),
    }
    seconds = metrics.get("gpu__time_duration.sum")
    moved = {"DRAM": _sum(metrics, "dram__bytes_read.sum", "dram__bytes_write.sum"), "L2": _l2_bytes(metrics)}
    found["bytes"] = {memory: count for memory, count in moved.items() if count}
    if seconds:
        found |= {"seconds": seconds, "flops_per_second": flops / seconds}
        found["roofline"] = {
            memory: {
                "flops_per_byte": flops / count,
                "bytes_per_second": count / seconds,
                "peak_bytes_per_second": count / seconds / (units[memory] / 100),
            }
            for memory, count in found["bytes"].items()
            if units.get(memory)
        }
    return {name: value for name, value in found.items() if value not in (None, {})}


def _sum(metrics: Metrics, *names: str) -> float | None:
    return sum(metrics[name] for name in names) if all(name in metrics for name in names) else None


def _l2_bytes(metrics: Metrics) -> float | None:
    sectors = first(metrics, ("lts__t_sectors.sum", "lts__t_sectors_op_read.sum"))
    return metrics.get("lts__t_bytes.sum") or (32 * sectors if sectors else None)
