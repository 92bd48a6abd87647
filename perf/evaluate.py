"""From what the steps of `perf.profile` left in DIR/raw to numbers, timelines and pictures in DIR."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from perf import findings, overlap, roofline, timeline
from perf.cases import slug
from perf.suites import Case
from perf.timeline import Timeline

Row = dict[str, Any]

PERFETTO_CYCLES = 100_000  # the beginning of a CTA, some fifty KV tiles: half a megabyte


def evaluate(out: Path, failed: Mapping[str, str]) -> str:
    """Writes everything but DIR/raw, and returns the table. `failed` says why a part of this run has left nothing."""
    kept = json.loads((out / "raw" / "profile.json").read_text())
    rows = [_row(out, Case.of(case), kept["meta"]) for case in kept["cases"]]
    document = {"meta": kept["meta"], "failed": dict(failed), "rows": rows}
    (out / "profile.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / "profile.md").write_text(findings.page(document, out))
    return findings.text(rows)


def _row(out: Path, case: Case, meta: Mapping[str, Any]) -> Row:
    row: Row = {"case": {**vars(case), "name": case.name, "flops": case.flops}}
    for part, finish in FINISH.items():
        path = out / "raw" / f"{slug(case)}.{part}.json"
        if path.exists():
            try:
                row[part] = finish(out, case, json.loads(path.read_text()), meta)
            except (ValueError, TypeError, LookupError, OSError, ArithmeticError) as error:  # must not cost the others
                row[part] = {"error": f"{type(error).__name__}: {error}"[:600]}
    return row


# -- what is made of it ------------------------------------------------------------------------------------------------
def _recorded(out: Path, case: Case, row: Row, meta: Mapping[str, Any]) -> Row:
    recorder = row["recorder"]
    made = timeline.decode((out / "raw" / f"{slug(case)}.{recorder}.bin").read_bytes(), row["roles"])
    config = row["config"]
    measured = overlap.measure(made, config["tile_n"], config["head_dim"], config["ones"])
    name = f"{slug(case)}.{SUFFIXES[recorder]}"
    about = {"case": case.name, "recorder": recorder, "gpu": meta["gpu"], "source": meta["source"]}
    shown = timeline.to_perfetto(made.between(0, PERFETTO_CYCLES), case.name, about)
    (out / f"{name}.json").write_text(json.dumps(shown, separators=(",", ":")) + "\n")
    kept = {key: row[key] for key in ("recorder", "seconds", "deviation", "waits")}
    return {**kept, **measured.as_dict(), **_draw(lambda: _gantt(out / f"{name}.png", case, row, made, measured))}


def _counted(out: Path, case: Case, row: Row, meta: Mapping[str, Any]) -> Row:
    summary = roofline.summarise(roofline.Launch(**row), case.flops)

    def draw() -> None:
        from perf import picture

        seconds, rate = summary.get("seconds"), summary.get("flops_per_second")
        title = case.name + (f": {seconds * 1e3:.3g} ms, {rate / 1e12:.0f} TFLOP/s" if seconds and rate else "")
        picture.counters(title, summary, meta["multiprocessors"], out / f"{slug(case)}.counters.png")

    return {**summary, **_draw(draw)}


def _traced(out: Path, case: Case, row: Row, meta: Mapping[str, Any]) -> Row:
    made = timeline.from_perfetto(row)
    own = made.lane(made.attends[0])
    middle = own[len(own) // 2].begin

    def draw() -> None:
        from perf import picture

        panels = [
            picture.Panel("the first 10 us", made, 0, 10_000, "ns"),
            picture.Panel("4 us later on", made, middle, middle + 4_000, "ns"),
        ]
        picture.gantt(f"{case.name}, fewer heads: IKET", panels, out / f"{slug(case)}.iket.png")

    return {"spans": len(made.spans), "nanoseconds": max(s.end for s in made.spans), **_draw(draw)}


SUFFIXES = {"stamps": "timeline", "every_wait": "every-wait"}
FINISH: Mapping[str, Callable[[Path, Case, Row, Mapping[str, Any]], Row]] = {
    "stamps": _recorded,
    "every_wait": _recorded,
    "counters": _counted,
    "iket": _traced,
}


def _draw(draw: Callable[[], None]) -> Row:
    """Draws where matplotlib is installed; otherwise says so, and `--redo` draws elsewhere."""
    try:
        draw()
    except ModuleNotFoundError as error:
        return {"not_drawn": f"{(error.name or 'a package').split('.')[0]} is not installed"}
    return {}


def _gantt(path: Path, case: Case, row: Row, made: Timeline, measured: overlap.Overlap) -> None:
    from perf import picture

    config = row["config"]
    each = overlap.mma_cycles(config["tile_n"], config["head_dim"], config["ones"])
    working = tuple(overlap.busy((s for s in made.spans if s.kind in ("QK", "PV")), each))
    period = int(measured.tile_cycles) or 2 * sum(each.values())
    begin, end = measured.window
    middle = (begin + end) // 2

    def panel(title: str, at: int, tiles: float) -> picture.Panel:
        return picture.Panel(title, made, at, at + int(tiles * period), busy=working)

    panels = [panel("the first tiles of a CTA", 0, 9), panel("in the middle", middle, 3)]
    stored = [span.begin for span in made.lane(made.attends[0]) if span.what == "normalise"]
    if stored:
        panels.append(panel("from one work tile to the next", stored[0] - 2 * period, 5))
    if predicted := _predicted(case, config):
        at = max(span.end for span in predicted.spans) // 2
        panels.append(picture.Panel("the simulator's prediction", predicted, at, at + 3 * period))
    title = (
        f"{case.name}: tensor cores busy {measured.busy:.0%} (estimated), an MMA in flight {measured.in_flight:.0%}, "
        f"softmax exposed {measured.softmax_exposed:.0%}; {measured.tile_cycles:.0f} cycles a tile, "
        f"{measured.tile_floor} of MMAs"
    )
    picture.gantt(title, panels, path)


def _predicted(case: Case, config: Mapping[str, Any]) -> Timeline | None:
    """None as well where the simulator cannot run for want of a package."""
    from schedules.tiling import BlockConfig

    try:
        return timeline.predict(BlockConfig(**config), case.causal)
    except ModuleNotFoundError:
        return None
