"""Timelines from NVIDIA's in-kernel event tracing (IKET), which comes with the CuTe DSL.

Its tool `run-iket` runs a workload twice, first to see how large a buffer it needs, and writes a trace for Perfetto and
one in JSON. The JSON names strings and places by their index in `stringTable` and `locationTable`; the documentation
shows an older form with the names and places themselves, which is read as well. Time stamps are of %globaltimer, in
nanoseconds, and step by 32.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.timeline import LOAD, Stamp, Timeline, build

WARPS_PER_WARPGROUP = 4
HERTZ = 1e9  # of what the time stamps count
EVENTS_PER_WARP = 1 << 15  # three times what `perf.workload` lets a warp do: work tiles per CTA vary from run to run


def command(out: Path, workload: Sequence[str]) -> list[str]:
    """The command line that traces the first CTA of every kernel that `workload` launches, into the folder `out`."""
    tool = "import sys; from iket.cli.main import entrypoint; sys.argv[0] = 'run-iket'; entrypoint()"
    options = ["--postprocess", "all", "--enabled-cluster", "0,0,0", "--max-ts-cnt-per-warp", str(EVENTS_PER_WARP)]
    return [sys.executable, "-c", tool, "--clobber", "--output-dir", str(out), "profile", *options, "--", *workload]


def read(path: Path) -> list[Timeline]:
    """The timelines in a decoded trace: of the first CTA of each launch that has one, in order."""
    document = json.loads(path.read_text())
    found = []
    for launch in document["launches"]:
        recorded = _recorded(document, launch)
        if LOAD in recorded and len(recorded) > 1:
            found.append(build(recorded, HERTZ))
    return found


def _recorded(document: Mapping[str, Any], launch: Mapping[str, Any]) -> dict[str, list[Stamp]]:
    """The stamps of the first warp of each role of CTA 0: the beginnings of ranges, and marks."""
    roles: dict[int, list[Stamp]] = {}
    for place, operation, clock in _events(document, launch):
        role, warp = divmod(place["warpId"], WARPS_PER_WARPGROUP)
        if warp == 0 and not any(place["ctaId"]):
            roles.setdefault(role, []).append(Stamp(clock, operation, None))
    return {
        f"attend{role - 1}" if role else LOAD: sorted(roles[role], key=lambda stamp: stamp.clock)
        for role in sorted(roles)
    }


def _events(document: Mapping[str, Any], launch: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], str, int]]:
    strings, places = document.get("stringTable", []), document.get("locationTable", [])
    for item in launch.get("ranges", []):
        name = item["rangeName"] if "rangeName" in item else strings[item["rangeNameIdx"]]
        place = item["warpLocs"][0] if "warpLocs" in item else places[item["warpLocIdxs"][0]]
        yield place, name, item["startTs"]
    for item in launch.get("markers", []):
        name = item["markerName"] if "markerName" in item else strings[item["markerNameIdx"]]
        place = item["location"] if "location" in item else places[item["locIdx"]]
        yield place, name, item["timestamp"]


def traces(out: Path) -> list[Path]:
    """The decoded traces in run-iket's folder, one for each process."""
    return sorted(out.glob("*.trace.json"))
