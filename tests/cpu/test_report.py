"""Charts and pages: the data that is drawn, what drawing makes of it, and that the committed files are current.

tests/data/results/small holds small results with round numbers: a peer that is not installed, one left out of a row,
and a row with an error in every suite.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import matplotlib.style
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fmha.jit import compile, library
from fmha.jit.report import Report
from perf import charts, peer_code, peers, readme, report, resources, series
from perf.show import OURS

ROOT = Path(__file__).resolve().parents[2]
SMALL = ROOT / "tests" / "data" / "results" / "small"


@pytest.fixture
def small() -> series.Results:
    return series.load(SMALL)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A results folder and a resource table of its own."""
    shutil.copytree(SMALL, tmp_path / "results" / "small")
    (tmp_path / "resources.json").write_text(resources.dump({"sm_90a-d128-causal-bf16": KERNEL}))
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    return report.main(list(arguments), folder / "results", folder / "resources.json")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


# -- what is committed -------------------------------------------------------------------------------------------------
def test_committed_charts_and_pages_are_current() -> None:
    outputs = report.outputs()
    assert len(outputs) >= 6
    behind = [str(path.relative_to(ROOT)) for path, wanted in outputs.items() if not report.is_current(path, wanted)]
    assert behind == [], "python -m perf.report writes them"


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "perf" / "README.md", *report.RESULTS.glob("*/README.md")])
def test_what_a_page_shows_and_links_to_exists(page: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in target]
    assert targets
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_readme_shows_no_more_than_three_charts_and_short_tables() -> None:
    block = readme.numbers()
    assert [Path(found).name for found in re.findall(r"\]\((.*?\.png)\)", block)] == ["rate.png", "tail.png"]
    assert sum(line.startswith("| D ") for line in block.splitlines()) == 24
    assert sum(line.startswith("| D128 B") for line in block.splitlines()) == 16
    assert len(block.splitlines()) < 95


# -- suites as series --------------------------------------------------------------------------------------------------
def test_rates_have_a_panel_for_each_head_dim_and_mask(small: series.Results) -> None:
    panels = series.rates(small.runs["dense"]["rows"])
    assert [panel.title for panel in panels] == ["D 64, dense", "D 128, dense", "D 64, causal"]
    lines = {line.who: line for line in panels[0].lines}
    assert list(lines) == [OURS, "cudnn", "fa3", "cublas"]
    assert all(line.x == (512, 1024) for line in lines.values())
    assert [line.y for line in lines.values()] == [(400.0, 450.0), (320.0, 500.0), (500.0, 400.0), (800.0, 780.0)]


def test_an_error_and_a_missing_peer_leave_gaps(small: series.Results) -> None:
    causal = {line.who: line.y for line in series.rates(small.runs["dense"]["rows"])[2].lines}
    assert causal == {OURS: (None, 300.0), "cudnn": (None, 240.0), "fa3": (None, None), "cublas": (None, 800.0)}


def test_leads_are_over_the_fastest_peer_of_each_length(small: series.Results) -> None:
    leads = series.leads(small.runs["dense"]["rows"])
    assert list(leads) == ["dense", "causal"]
    assert [lead.title for lead in leads["dense"]] == ["D 64", "D 128"]
    assert leads["dense"][0].ratio == (400 / 500, 450 / 500) and leads["dense"][0].best == ("fa3", "cudnn")
    assert leads["dense"][1].ratio == (500 / 625, 600 / 500) and leads["dense"][1].best == ("fa3", "cudnn")
    assert leads["causal"] == (series.Lead("D 64", (512, 1024), (None, 300 / 240), (None, "cudnn")),)


def test_tails_are_relative_to_the_base(small: series.Results) -> None:
    first, second = series.tails(small.runs["tail"]["rows"])
    assert (first.title, second.title) == ("S = 512 + r", "S = 4,096 + r")
    ours, peer = first.lines
    assert ours == series.Line(OURS, (0, 1, 64), (1.0, 0.8, 0.9)) and peer == series.Line(
        "fa3", (0, 1, 64), (1.0, 0.75, None)
    )
    assert [line.y for line in second.lines] == [(1.0, None), (1.0, None)]
    assert series.worst_tails(small.runs["tail"]["rows"]) == [
        ("S = 512 + r", {OURS: 0.8, "fa3": 0.75}),
        ("S = 4,096 + r", {}),
    ]


def test_costs_are_seconds(small: series.Results) -> None:
    first, second, third = series.costs(small.runs["launch"]["rows"])
    assert first.seconds == pytest.approx({OURS: 10e-6, "sdpa": 20e-6, "fa3": 5e-6})
    assert second == series.Cost("import", {OURS: 2.0}) and third.seconds == {}
    with pytest.raises(ValueError, match=r"odd: unit 'TFLOP/s' is none of s, ms, us"):
        series.costs([{"case": {"name": "odd"}, "unit": "TFLOP/s", OURS: 1.0, "peers": {}}])


def test_what_the_problems_of_a_suite_share(small: series.Results) -> None:
    rows = small.runs["dense"]["rows"]
    assert series.in_common(rows) == "bfloat16, B x S = 16,384, H x D = 2,048"
    other = {"case": rows[0]["case"] | {"batch": 1, "dtype": "float16"}}
    assert series.in_common([*rows, other]) == "H x D = 2,048"


def test_quartile_width(small: series.Results) -> None:
    assert series.quartile_width(small.runs["dense"]["rows"]) == pytest.approx(0.01)
    assert series.quartile_width([{"case": {}, "error": "no"}]) is None


def test_two_rows_for_one_point_are_an_error(small: series.Results) -> None:
    rows = small.runs["dense"]["rows"]
    with pytest.raises(ValueError, match=r"D 64, dense: two rows for one length in \[512, 512, 1024\]"):
        series.rates([*rows, rows[0]])
    apart = {**rows[0], "case": rows[0]["case"] | {"dtype": "float16"}}
    assert "D 64, dense, float16" in [panel.title for panel in series.rates([*rows, apart])]


# -- machine code ------------------------------------------------------------------------------------------------------
KERNEL = Report(
    registers=168,
    setmaxnreg=(24, 240),
    stack_bytes=0,
    local_loads=0,
    local_stores=0,
    smem_bytes=1024,
    instructions=900,
    body=160,
    body_per_score=5.0,
    body_kinds={"ex2": 32, "fma": 64, "max": 16, "convert": 16, "move": 8, "mma": 4, "other": 20},
    body_waits=(),
    masked=(224,),
    early_retire=False,
)
PEER = dataclasses.replace(
    KERNEL,
    setmaxnreg=(),
    local_loads=3,
    local_stores=2,
    stack_bytes=8,
    body=200,
    body_kinds=KERNEL.body_kinds | {"local": 8, "ex2": 34},
    body_per_score=None,
    masked=(),
)


def test_loops_are_counted_a_score() -> None:
    (bar,) = series.loops({"sm_90a-d128-causal-bf16": KERNEL})
    parts = {"EX2": 1.0, "FMA pipe": 2.0, "max, convert": 1.0, "moves": 0.25, "spills": 0.0, "MMA, waits, rest": 0.75}
    assert bar.parts == parts and bar.total == KERNEL.body_per_score == 5.0
    assert (bar.group, bar.who, bar.registers, bar.spills, bar.masked) == ("D 128, causal", OURS, "24/240", 0, 7.0)


def test_committed_loops_agree_with_the_config() -> None:
    table = resources.load()
    for row, bar in zip(table.values(), series.loops(table), strict=True):
        assert round(bar.total, 2) == row.body_per_score


def test_peers_code_stands_beside_ours() -> None:
    ours = {"sm_90a-d64-dense-bf16": KERNEL, "sm_90a-d128-causal-bf16": KERNEL}
    bars = series.loops(ours, {"folder/fa3-d64-dense.cubin": PEER, "odd.cubin": PEER})
    assert [(bar.group, bar.who) for bar in bars] == [
        ("D 64, dense", OURS),
        ("D 64, dense", "fa3"),
        ("D 128, causal", OURS),
        ("odd", "odd"),
    ]
    (short,) = series.loops({"sm_90a-d64-dense-bf16-128x48": KERNEL})
    assert short.group == "D 64, dense, 128x48"
    (ours,) = series.loops({"sm_90a-d192v128-window-bf16-lse": KERNEL})
    assert (ours.group, ours.who) == ("D 192/128, window, LSE", OURS)
    peer = bars[1]
    assert (peer.registers, peer.spills, peer.stack_bytes, peer.masked) == ("168", 5, 8, None)
    assert peer.parts["spills"] == 0.25 and peer.parts["EX2"] == 34 / 32 and peer.total == pytest.approx(200 / 32)


def test_a_loop_whose_scores_cannot_be_counted_is_an_error() -> None:
    with pytest.raises(ValueError, match="name: no conversion of P"):
        series.loops({"name": dataclasses.replace(KERNEL, body_kinds={"fma": 3})})


SYMBOL = (
    "_ZN7cutlass13device_kernelIN5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90INS1_25CollectiveMainloopFwdSm90ILi2EN"
    "4cute5tupleIJNS5_1CILi1EEES8_S8_EEENS6_IJ{tile}EEELi{value}ENS_{element}EfNS_4arch4Sm90E{flags}EENS1_21Collective"
)


@pytest.mark.parametrize(
    ("tile", "value", "element", "flags", "name"),
    [
        ("NS7_ILi128EEENS7_ILi176EEESA_", 128, "10bfloat16_t", "000000011000", "fa3-d128-dense"),
        ("NS7_ILi128EEESA_SA_", 128, "10bfloat16_t", "100000011000", "fa3-d128-causal"),
        ("NS7_ILi192EEENS7_ILi128EEENS7_ILi64EEE", 64, "10bfloat16_t", "100000011000", "fa3-d64-causal"),
        ("NS7_ILi64EEENS7_ILi96EEESB_", 96, "10bfloat16_t", "000000001000", "fa3-d96-dense"),
        ("NS7_ILi128EEESA_NS7_ILi192EEE", 128, "10bfloat16_t", "000000011000", None),  # values of another head dim
        ("NS7_ILi128EEENS7_ILi176EEESA_", 128, "6half_t", "000000011000", None),
        ("NS7_ILi128EEENS7_ILi176EEESA_", 128, "10bfloat16_t", "000100011000", None),  # varlen
        ("NS7_ILi128EEENS7_ILi176EEESA_", 128, "10bfloat16_t", "000000011010", None),  # split
        ("NS7_ILi128EEENS7_ILi176EEESA_", 128, "10bfloat16_t", "00000001100", None),  # a flag is missing
    ],
)
def test_a_peers_kernel_is_known_by_its_symbol(
    tile: str, value: int, element: str, flags: str, name: str | None
) -> None:
    bits = "".join(f"Lb{bit}E" for bit in flags)
    assert peer_code.variant(SYMBOL.format(tile=tile, value=value, element=element, flags=bits)) == name


def test_a_peers_table_is_read_from_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = {"tile": "NS7_ILi128EEENS7_ILi176EEESA_", "value": 128, "element": "10bfloat16_t"}
    symbols = [SYMBOL.format(**plain, flags="Lb1E" + 11 * "Lb0E"), SYMBOL.format(**plain, flags=12 * "Lb0E")]
    for number, symbol in enumerate([*symbols, "_ZN7cutlass13device_kernelIN5flashOther"]):
        (tmp_path / f"{number}.cubin").write_bytes(b"\0" + symbol.encode() + b"\0")
    monkeypatch.setattr(peer_code, "cubins", lambda library, folder: sorted(tmp_path.glob("*.cubin")))

    def of_cubin(path: Path, function: str) -> Report:
        assert function.encode() in path.read_bytes()
        return dataclasses.replace(KERNEL, body=160 + int(path.stem))

    monkeypatch.setattr(peer_code.report, "of_cubin", of_cubin)
    rows = dict(peer_code.kernels(Path("library.so")))
    out = tmp_path / "peers.json"
    out.write_text(peer_code.dump("1.2", rows))
    read = resources.load(out)
    assert list(read) == ["fa3-d128-dense", "fa3-d128-causal"] and [row.body for row in read.values()] == [161, 160]
    assert json.loads(out.read_text())["packages"] == {"fa3-fwd": "1.2"}
    shutil.copy(tmp_path / "0.cubin", tmp_path / "9.cubin")
    with pytest.raises(ValueError, match="fa3-d128-causal: two kernels"):
        dict(peer_code.kernels(Path("library.so")))


def test_a_kernel_named_among_those_of_a_cubin_is_read_without_its_config() -> None:
    name = "sm_90a-d64-dense-bf16"
    cubin = compile.cubin(library.object_file(*resources.variants()[name], resources.ARCH))
    symbol = re.findall(rb"fmha_forward_\w+", cubin)[0].decode()
    found = peer_code.report.of_cubin(cubin, function=symbol)
    assert found == dataclasses.replace(resources.measure([name])[name], smem_bytes=None, body_per_score=None)
    with pytest.raises(ValueError, match="no_such_kernel"):
        peer_code.report.of_cubin(cubin, function="no_such_kernel")


def test_a_peer_that_is_not_installed_is_asked_for(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(peer_code, "PACKAGE", "no-such-package")
    assert peer_code.main(["--out", str(tmp_path / "out.json")]) == 2
    assert "pip install --no-deps no-such-package" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_resource_chart_names_the_peers_version(tmp_path: Path) -> None:
    (tmp_path / "resources.json").write_text(resources.dump({"sm_90a-d128-causal-bf16": KERNEL}))
    (tmp_path / "resources-peers.json").write_text(peer_code.dump("1.2", {"fa3-d128-causal": PEER}))
    chart = report.outputs(tmp_path / "none", tmp_path / "resources.json")[tmp_path / "resources.png"]
    assert isinstance(chart, charts.Chart)
    assert [bar.who for bar in chart.data] == [OURS, "fa3"] and "fa3-fwd 1.2" in chart.labels["foot"]
    alone = report.resources_chart(tmp_path / "resources.json", tmp_path / "none.json")
    assert [bar.who for bar in alone.data] == [OURS] and "fa3" not in alone.labels["foot"]


# -- labels ------------------------------------------------------------------------------------------------------------
@given(st.lists(st.floats(-10, 10), max_size=8), st.floats(0.01, 3))
def test_labels_keep_apart_and_in_order(positions: list[float], gap: float) -> None:
    placed = series.spread_labels(positions, gap)
    pairs = sorted(zip(positions, placed, strict=True))
    assert all(b[1] - a[1] >= gap * (1 - 1e-6) for a, b in zip(pairs, pairs[1:], strict=False))
    assert sum(placed) == pytest.approx(sum(positions), abs=1e-6)


def test_labels_that_do_not_touch_stay_where_they_are() -> None:
    assert series.spread_labels([5.0, 1.0, 3.0], 1.0) == [5.0, 1.0, 3.0]
    assert series.spread_labels([1.0, 1.2, 9.0], 1.0) == pytest.approx([0.6, 1.6, 9.0])


def test_spans_skip_what_is_missing() -> None:
    assert series.spans([(None, 2.0), (1.0, None)]) == (1.0, 2.0)
    with pytest.raises(ValueError, match="nothing was measured"):
        series.spans([(None,)])


@pytest.mark.parametrize(
    ("length", "words"), [(512, "512"), (1000, "1000"), (1024, "1k"), (1536, "1536"), (16384, "16k")]
)
def test_lengths_in_short(length: int, words: str) -> None:
    assert charts.short(length) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(1e-7, "100 ns"), (1e-5, "10 us"), (1e-3, "1 ms"), (0.1, "100 ms"), (10, "10 s")]
)
def test_durations(seconds: float, words: str) -> None:
    assert charts.duration(seconds) == words


def test_ticks_that_would_touch_are_left_out() -> None:
    assert charts._apart([0, 1, 16, 64, 80, 127]) == [0, 16, 64, 80, 127]
    assert charts._apart([0]) == [0]


# -- drawing -----------------------------------------------------------------------------------------------------------
def draw(chart: charts.Chart) -> Figure:
    with matplotlib.style.context(["default", charts.RC]):
        figure = chart.draw(chart.data, **chart.labels)
        figure.canvas.draw()
    return figure


def drawn(ax: Any) -> list[tuple[list[float], list[float | None]]]:
    """Lines with markers or dashes of their own, gaps as None."""
    return [
        ([float(x) for x in line.get_xdata()], [None if math.isnan(y) else float(y) for y in line.get_ydata()])
        for line in ax.lines
    ]


@pytest.fixture
def by_name(small: series.Results) -> dict[str, charts.Chart]:
    found = {chart.name: chart for chart in report.gpu_charts(small)}
    assert list(found) == ["rate", "ratio", "tail", "launch"]
    return found


def test_the_rate_chart_draws_the_series(by_name: dict[str, charts.Chart]) -> None:
    chart = by_name["rate"]
    figure = draw(chart)
    for ax, panel in zip(figure.axes, chart.data, strict=True):
        assert ax.get_title(loc="left") == panel.title
        assert drawn(ax) == [(list(line.x), list(line.y)) for line in reversed(panel.lines)]
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["fmha", "torch SDPA, cuDNN", "FlashAttention-3", "cuBLAS bfloat16 8192^3"]
    words = [text.get_text() for text in figure.texts]
    assert words[0] == "Rate over sequence length: bfloat16, B x S = 16,384, H x D = 2,048"
    assert words[1] == "Small GPU, driver 1.2, 2026-01-02, sources 0123456789abcdef: python -m perf.bench dense --quick"
    assert "TFLOP/s" in figure.axes[0].get_ylabel() and "tokens" in figure.axes[2].get_xlabel()


def test_the_ratio_chart_marks_the_fastest_peer(by_name: dict[str, charts.Chart]) -> None:
    dense, causal = draw(by_name["ratio"]).axes
    lines = drawn(dense)
    assert lines[1:] == [
        ([512.0, 1024.0], [0.8, 0.9]),
        ([512.0], [0.8]),
        ([1024.0], [0.9]),
        ([512.0, 1024.0], [0.8, 1.2]),
        ([512.0], [0.8]),
        ([1024.0], [1.2]),
    ]
    assert [line.get_marker() for line in dense.lines[2:4]] == [charts.STYLES[who].marker for who in ("fa3", "cudnn")]
    assert drawn(causal)[1:] == [([512.0, 1024.0], [None, 1.25]), ([1024.0], [1.25])]
    assert [text.get_text() for text in dense.texts] == ["D 64", "D 128"]


def test_the_tail_chart_draws_the_series(by_name: dict[str, charts.Chart]) -> None:
    chart = by_name["tail"]
    for ax, panel in zip(draw(chart).axes, chart.data, strict=True):
        assert drawn(ax)[1:] == [(list(line.x), list(line.y)) for line in reversed(panel.lines)]


def test_the_launch_chart_has_a_row_for_each_cost(by_name: dict[str, charts.Chart]) -> None:
    (ax,) = draw(by_name["launch"]).axes
    assert [label.get_text() for label in ax.get_yticklabels()] == [cost.name for cost in by_name["launch"].data]
    ours = ax.lines[0]
    assert list(ours.get_xdata()) == pytest.approx([10e-6, 2.0]) and list(ours.get_ydata()) == [0, 1]


def test_the_resource_chart_draws_parts_and_numbers() -> None:
    bars = series.loops({"sm_90a-d128-causal-bf16": KERNEL}, {"fa3-d128-causal": PEER})
    (ax,) = draw(charts.Chart("resources", charts.loops, bars, {"foot": ""})).axes
    widths = [patch.get_width() for patch in ax.patches]
    assert sum(widths[:6]) == pytest.approx(5.0) and sum(widths[6:]) == pytest.approx(6.25)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["D 128, causal: fmha", "fa3"]
    assert {"5.00", "24/240", "6.25", "168", "5", "8"} <= {text.get_text() for text in ax.texts}


def test_styles_tell_everyone_apart_without_colour() -> None:
    assert set(peers.PEERS) | {OURS, series.YARDSTICK} == set(charts.STYLES)
    looks = [charts.STYLES[who] for who in charts.STYLES]
    assert len({look.marker for look in looks}) == len({str(look.dashes) for look in looks}) == len(looks)
    with pytest.raises(ValueError, match="no style for 'other'"):
        charts.style("other")


def test_a_legend_too_wide_takes_another_row(by_name: dict[str, charts.Chart]) -> None:
    chart = by_name["rate"]
    wide = chart.labels | {"titles": {who: 40 * who[0] for who in (OURS, "cudnn", "fa3", "cublas")}}
    figure = draw(dataclasses.replace(chart, labels=wide))
    (legend,) = figure.legends
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    assert legend.get_window_extent().y0 > figure.axes[0].get_window_extent().y1


# -- stamps and files --------------------------------------------------------------------------------------------------
def test_a_chart_is_the_same_bytes_each_time(by_name: dict[str, charts.Chart], tmp_path: Path) -> None:
    for name in ("one.png", "two.png"):
        by_name["tail"].save(tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "two.png").read_bytes()
    assert b"Software" not in (tmp_path / "one.png").read_bytes()


def test_the_stamp_follows_data_labels_and_code(
    by_name: dict[str, charts.Chart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chart = by_name["tail"]
    other = [
        dataclasses.replace(chart, data=chart.data[:1]),
        dataclasses.replace(chart, labels=chart.labels | {"foot": ""}),
        by_name["rate"],
    ]
    assert len({chart.stamp, *(one.stamp for one in other)}) == 4
    before = chart.stamp
    code = Path(charts.__file__).read_text()
    copy = tmp_path / "charts.py"
    monkeypatch.setattr(charts, "__file__", str(copy))
    copy.write_text("# a comment\n" + code)
    assert chart.stamp == before
    copy.write_text(code.replace("DPI = 150", "DPI = 151"))
    assert chart.stamp != before


def test_all_is_written_once_and_then_current(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(copied, "--check") == 1
    assert not list(copied.rglob("*.png"))
    assert run(copied) == 0
    assert "0 of 6 files were current" in capsys.readouterr().out
    written = {path: path.stat().st_mtime_ns for path in (*copied.rglob("*.png"), *copied.rglob("*.md"))}
    assert len(written) == 6
    assert run(copied) == run(copied, "--check") == 0
    assert {path: path.stat().st_mtime_ns for path in written} == written


@pytest.mark.parametrize(
    ("file", "old", "new", "behind"),
    [
        (
            "results/small/dense.json",
            '"fmha": 450.0, "peers"',
            '"fmha": 451.0, "peers"',
            {"rate.png", "ratio.png", "README.md"},
        ),
        ("results/small/tail.json", '"date": "2026-01-03"', '"date": "2026-01-04"', {"tail.png", "README.md"}),
        ("results/small/tests.json", '"passed": 7', '"passed": 8', {"README.md"}),
        ("results/small/README.md", "# Small GPU", "# Large GPU", {"README.md"}),
        ("resources.json", '"body": 160', '"body": 161', {"resources.png"}),
    ],
)
def test_what_is_behind_is_named(
    file: str, old: str, new: str, behind: set[str], copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(copied)
    edit(copied / file, old, new)
    capsys.readouterr()
    assert run(copied, "--check") == 1
    assert {Path(name).name for name in re.findall(r"behind: (\S+)", capsys.readouterr().out)} == behind
    assert run(copied) == 0 and run(copied, "--check") == 0


def test_a_png_without_a_stamp_is_behind(by_name: dict[str, charts.Chart], tmp_path: Path) -> None:
    path = tmp_path / "tail.png"
    assert not by_name["tail"].is_current(path)
    Figure(figsize=(1, 1)).savefig(path)
    assert charts.stamp_of(path) is None and not by_name["tail"].is_current(path)


# -- pages -------------------------------------------------------------------------------------------------------------
def test_the_page_has_every_row_and_what_is_missing(small: series.Results) -> None:
    page = report.page(small)
    for run_ in small.runs.values():
        for row in run_["rows"]:
            assert f"| {row['case']['name']} | {row.get('unit', 'wrong')} |" in page
    for line in (
        "# Small GPU",
        "| D64 dense S1024 B16 H32 | TFLOP/s | 450 | 500 | 400 | 0.900 | 1.125 | 0.900 | 780 |",
        "| [tail.json](tail.json) | 2026-01-03 | `0123456789abcdef` | 1.2 | 12.5 |",
        "| torch | 2.11.0 | dense.json, launch.json, tests.json, sanitize.json |",
        "| python | 3.12.3 | all |",
        "- flashinfer (FlashInfer) was not measured: ModuleNotFoundError: No module named 'flashinfer'",
        "- wrong: D64 causal S512 B32 H32: off by 1.0e+00 of the oracle's norm",
        "- fa3 was left out of D64 causal S1024 B16 H32: off by 2.0e-01 of the oracle's norm",
        "- `tests/gpu/test_streams.py::test_order`",
        "| bf16 | 5 | 1.25 | `b1-q3-k4` | 2.0e-06 |",
        "| racecheck | 99 | RACECHECK SUMMARY: 1 hazard displayed | 2.0 |",
        "- 32 x WAR, Read at f+0x10, Write at f+0x20",
    ):
        assert line in page.splitlines()
    assert "fmha's quartiles are 1.0% from them" in page
    assert re.findall(r"!\[.+\]\((.+)\)", page) == ["rate.png", "ratio.png", "tail.png", "launch.png"]


def test_the_commands_repeat_each_file(small: series.Results) -> None:
    page = report.page(small)
    for line in (
        "python -m perf.bench dense --quick --out perf/results/small/dense.json",
        "python -m perf.bench launch --out perf/results/small/launch.json",
        "python -m pytest tests/gpu tests/reports --record perf/results/small/tests.json",
        "python -m perf.sanitize --tool racecheck --out perf/results/small/sanitize.json",
    ):
        assert line in page.splitlines()


@pytest.mark.parametrize("given", ["--out a/b.json", "--out=a/b.json"])
def test_a_command_is_repeated_without_its_file(given: str) -> None:
    assert (
        readme.command({"command": f"python -m perf.bench dense {given} --quick"})
        == "python -m perf.bench dense --quick"
    )


def test_the_short_tables(small: series.Results) -> None:
    assert readme.short_table(small.runs["dense"]["rows"]).splitlines() == [
        "| problem | S | TFLOP/s | fmha/cudnn | fmha/fa3 | fmha/best |",
        "| --- | --- | --- | --- | --- | --- |",
        "| D 64, dense | 512 | 400 | 1.25 | 0.80 | 0.80 |",
        "| D 64, dense | 1024 | 450 | 0.90 | 1.12 | 0.90 |",
        "| D 128, dense | 512 | 500 | 1.25 | 0.80 | 0.80 |",
        "| D 128, dense | 1024 | 600 | 1.20 | 1.50 | 1.20 |",
        "| D 64, causal | 512 | wrong | - | - | - |",
        "| D 64, causal | 1024 | 300 | 1.25 | - | 1.25 |",
    ]
    assert "| S = 512 + r | 0.80 | 0.75 |" in readme.tail_table(small.runs["tail"]["rows"])
    assert "| S = 4,096 + r | - | - |" in readme.tail_table(small.runs["tail"]["rows"])
    launch = readme.launch_table(small.runs["launch"]["rows"]).splitlines()
    assert launch[2:] == [
        "| eager call, host | us | 10 | 20 | 5 |",
        "| disk hit, first kernel of the process | wrong | - | - | - |",
    ]
    block = readme.gpu_numbers(small)
    assert "Not installed: FlashInfer." in block and "(perf/results/small/README.md)" in block


# -- what is not there -------------------------------------------------------------------------------------------------
def test_an_empty_folder_is_an_error_that_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results" / "h1").mkdir(parents=True)
    (tmp_path / "results" / "h1" / "trace.json").write_text("[1]")  # another tool's
    assert run(tmp_path) == 2
    assert "no results: python -m perf.bench SUITE --out" in capsys.readouterr().err
    assert readme.numbers(tmp_path / "results") == "" and readme.numbers(tmp_path / "none") == ""


def test_what_was_not_measured_is_named_and_not_drawn(copied: Path) -> None:
    folder = copied / "results" / "small"
    for suite in ("dense", "tail", "launch"):
        (folder / f"{suite}.json").unlink()
    assert run(copied) == 0
    page = (folder / "README.md").read_text()
    assert "Not measured: `python -m perf.bench tail`." in page and ".png" not in page
    assert not list(folder.glob("*.png")) and ".png" not in readme.numbers(copied / "results")


def test_a_suite_that_failed_throughout_has_a_table_and_no_chart(small: series.Results) -> None:
    failed = {
        suite: run_ | {"rows": [{"case": row["case"], "error": "no"} for row in run_["rows"]]}
        for suite, run_ in small.runs.items()
    }
    results = dataclasses.replace(small, runs=failed)
    assert report.gpu_charts(results) == []
    assert "| D64 dense S512 B32 H32 | wrong | - | - |" in report.page(results)
    short = readme.gpu_numbers(results)
    assert "| D 64, dense | 512 | wrong | - |" in short and ".png" not in short


def test_without_peers_there_are_rates_and_no_ratios(small: series.Results) -> None:
    alone = small.runs["dense"] | {"rows": [row | {"peers": {}} for row in small.runs["dense"]["rows"]]}
    results = dataclasses.replace(small, runs={"dense": alone})
    assert [chart.name for chart in report.gpu_charts(results)] == ["rate"]
    draw(report.gpu_charts(results)[0])


def test_another_run_of_a_suite_has_its_own_table(copied: Path) -> None:
    folder = copied / "results" / "small"
    shutil.copy(folder / "tail.json", folder / "tail-again.json")
    page = report.page(series.load(folder))
    assert page.index("## Launch") < page.index("## tail-again.json")
    assert "python -m perf.bench tail --out perf/results/small/tail-again.json" in page


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tail.json", "{", "tail.json is not JSON"),
        ("tail.json", json.dumps({"meta": {"suite": "dense"}, "rows": []}), "tail.json holds the suite 'dense'"),
        ("tests.json", json.dumps({"gpu": "Other"}), "results of one GPU are expected, found"),
    ],
)
def test_files_that_do_not_belong(file: str, content: str, words: str, copied: Path, capsys) -> None:
    (copied / "results" / "small" / file).write_text(content)
    assert run(copied) == 2
    assert words in capsys.readouterr().err


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "perf.charts")
    monkeypatch.delattr("perf.charts")
    spec = importlib.util.spec_from_file_location("perf._again", report.__file__)
    assert spec and spec.loader
    with pytest.raises(SystemExit, match="matplotlib, which is not installed"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
