"""The user's file of tuned block configs: who is asked, what is refused and said, that nobody sees half of it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import fmha
from fmha.jit import compile, launch, library, tuned
from fmha.jit.counter import Counter
from fmha.jit.tuned import Call, Entry, TunedWarning
from fmha.problem import Problem
from perf import environment, workload
from perf.suites import Case
from schedules.tiling import Extent, choose, rows

attention_module = importlib.import_module("fmha.attention")  # the attribute of that name is the function
ARCH = "sm_90a"
PROBLEM = Problem("bfloat16", 64, "dense")
EXTENT = Extent("dense", 16384, 16384, 32, 132)
TABLE = choose(64, ARCH, EXTENT)
OTHER = replace(TABLE, tile_n=96)  # in no table
CALL = Call.of(PROBLEM, ARCH, EXTENT)
ENTRY = Entry(CALL, OTHER, {"tflops": 600.0, "gpu": "G"})


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where the user's file would be; the process has not looked yet."""
    where = tmp_path / "config" / "tuned.json"
    monkeypatch.setenv("FMHA_TUNED", str(where))
    tuned.forget()
    yield where
    tuned.forget()


@pytest.fixture
def caught():
    """The warnings, however often Python would show them."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield record


def put(path: Path, *items, version: object = 1) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"version": version, "entries": list(items)}))
    tuned.forget()


def picked(problem: Problem = PROBLEM, extent: Extent | None = EXTENT) -> library.Pick:
    return library.pick(problem, ARCH, extent)


# -- who is asked ------------------------------------------------------------------------------------------------------
def test_the_tests_run_without_the_users_file():
    assert tuned.path().name == "no-tuned.json" and not tuned.path().exists()


def test_without_a_file_the_table_decides_and_nothing_is_said(path, caught):
    for row in rows(64, ARCH):
        lse = row.config.ones == 0
        sizes = (replace(EXTENT, seqlen_k=s, seqlen_q=s, lse=lse) for s in (256, 16384))
        extent = next(extent for extent in sizes if choose(64, ARCH, extent) == row.config)
        assert picked(extent=extent) == (row.config, row.reason)
    assert picked(extent=None) == (rows(64, ARCH)[0].config, rows(64, ARCH)[0].reason)
    assert not caught and not path.parent.exists()


def test_an_entry_comes_back_as_it_was_written(path, caught):
    assert tuned.write(ENTRY) == path.resolve()
    assert tuned.read().entries == {CALL: ENTRY}
    tuned.forget()
    assert picked() == (OTHER, f"tuned: {path}")
    assert OTHER != TABLE and not caught


def test_a_call_that_wants_lses_gets_no_entry_that_writes_none(path):
    tuned.write(ENTRY)
    wanting = replace(EXTENT, lse=True)
    assert OTHER.ones and picked(extent=wanting).config == choose(64, ARCH, wanting)
    exact = replace(OTHER, ones=0)
    tuned.write(Entry(CALL, exact))
    tuned.forget()
    assert picked(extent=wanting).config == exact == picked().config


@pytest.mark.parametrize(
    "change", [{"seqlen_q": 16383}, {"seqlen_k": 16385}, {"heads": 64}, {"multiprocessors": 114}, {"mask": "causal"}]
)
def test_only_calls_of_exactly_these_sizes_get_it(path, change):
    tuned.write(ENTRY)
    problem = replace(PROBLEM, mask=change.get("mask", PROBLEM.mask))
    extent = replace(EXTENT, **change)
    assert picked(problem, extent).config == choose(64, ARCH, extent) != OTHER
    for other in (replace(PROBLEM, dtype="float16"), replace(PROBLEM, head_dim=56)):
        assert picked(other).config == TABLE
    assert picked(extent=None).config == TABLE
    assert picked().config == OTHER


def test_windows_get_none(path):
    """An entry would have to name their sides."""
    extent = replace(EXTENT, mask="window", left=128)
    tuned.write(Entry(replace(CALL, mask="window"), OTHER))
    assert picked(replace(PROBLEM, mask="window"), extent).config == choose(64, ARCH, extent) != OTHER


def test_a_later_entry_replaces_an_earlier_one_and_no_other(path):
    elsewhere = Entry(replace(CALL, heads=1), replace(TABLE, tile_n=80))
    third = Entry(CALL, replace(TABLE, tile_n=112))
    for entry in (ENTRY, elsewhere, third):
        tuned.write(entry)
    assert tuned.read().entries == {CALL: third, elsewhere.call: elsewhere}
    assert len(json.loads(path.read_text())["entries"]) == 2
    put(path, third.to_json(), ENTRY.to_json())  # by hand: of two, the last
    assert picked().config == OTHER


def test_what_cannot_be_used_stays_in_the_file(path):
    put(path, "strange", {"arch": "sm_100a"}, [])
    tuned.write(ENTRY)
    assert json.loads(path.read_text())["entries"] == ["strange", {"arch": "sm_100a"}, [], ENTRY.to_json()]


def test_the_file_is_read_once_a_process(path, monkeypatch):
    tuned.write(ENTRY)
    reads = []
    real = tuned.read
    monkeypatch.setattr(tuned, "read", lambda: reads.append(time.sleep(0.05)) or real())
    threads = [threading.Thread(target=picked) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    path.unlink()
    assert picked().config == OTHER and len(reads) == 1


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.setenv("FMHA_TUNED", "~/mine.json")
    assert tuned.path() == Path.home() / "mine.json"
    monkeypatch.setenv("FMHA_TUNED", "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert tuned.path() == tmp_path / "fmha" / "tuned.json"
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")  # to be ignored
    assert tuned.path() == Path.home() / ".config" / "fmha" / "tuned.json"


def test_a_user_without_a_home_has_no_file(monkeypatch, caught):
    monkeypatch.setenv("FMHA_TUNED", "")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert tuned.read().entries == {} and not caught
    with pytest.raises(RuntimeError, match="no home"):
        tuned.write(ENTRY)


# -- damage ------------------------------------------------------------------------------------------------------------
GOOD = ENTRY.to_json()
CONFIG = asdict(OTHER)
FILES = {
    "empty": ("", "it is no JSON"),
    "half": (json.dumps({"version": 1, "entries": [GOOD]})[:90], "it is no JSON"),
    "no text": (b"\xff\xfe\x00garbage", "it is no JSON"),
    "deep": ("[" * 100_000, "it is no JSON"),
    "a list": ("[]", "its version is None; 1 is read here"),
    "another version": (json.dumps({"version": 2, "entries": [GOOD]}), "its version is 2; 1 is read here"),
    "no entries": ('{"version": 1}', "it has no list of entries"),
    "entries of another kind": ('{"version": 1, "entries": {}}', "it has no list of entries"),
}
ITEMS = {
    "text": ("here", "it is 'here', and no object"),
    "unknown field": ({**GOOD, "batch": 1}, "its entry has unknown fields: batch"),
    "missing field": ({k: v for k, v in GOOD.items() if k != "heads"}, "its entry lacks heads"),
    "no config": ({k: v for k, v in GOOD.items() if k != "config"}, "its config is None, and no object"),
    "length as text": ({**GOOD, "seqlen_q": "16384"}, "seqlen_q = '16384'; int is needed"),
    "length as a flag": ({**GOOD, "seqlen_q": True}, "seqlen_q = True; int is needed"),
    "no length": ({**GOOD, "seqlen_k": 0}, "seqlen_k = 0; 1 or more is needed"),
    "other chip": ({**GOOD, "arch": "sm_80"}, "architecture sm_80: sm_90a"),
    "chip without measurements": ({**GOOD, "arch": "sm_100a"}, "no block config is tuned for sm_100a"),
    "dtype": ({**GOOD, "dtype": "float32"}, "dtype float32: bfloat16 or float16 only"),
    "mask": ({**GOOD, "mask": "banded"}, "mask 'banded'"),
    "head dim": ({**GOOD, "head_dim": 60}, "head_dim 60: multiples of 8"),
    "config: unknown field": ({**GOOD, "config": {**CONFIG, "clusters": 2}}, "its config has unknown fields: clusters"),
    "config: missing field": (
        {**GOOD, "config": {k: v for k, v in CONFIG.items() if k != "tile_n"}},
        "its config lacks tile_n",
    ),
    "config: type": ({**GOOD, "config": {**CONFIG, "tile_n": 96.0}}, "tile_n = 96.0; int is needed"),
    "config: does not fit": ({**GOOD, "config": {**CONFIG, "stages": 9}}, "its config: .* bytes of shared memory"),
    "config: registers": ({**GOOD, "config": {**CONFIG, "consumer_registers": 168}}, "its config: setmaxnreg wants"),
    "config: no stages": ({**GOOD, "config": {**CONFIG, "stages": 0}}, "stages = 0; 1 or more is needed"),
    "config: negative": ({**GOOD, "config": {**CONFIG, "ones": -8}}, "ones = -8; 0 or more is needed"),
    "config: threshold": ({**GOOD, "config": {**CONFIG, "rescale_above": 33.0}}, "its config: rescale_above 33"),
    "config: no threshold": (
        {**GOOD, "config": {**CONFIG, "rescale_above": float("nan")}},
        "its config: rescale_above nan",
    ),
    "config: head dim": (
        {**GOOD, "head_dim": 128},
        "its config holds head dims up to 64, not 128",
    ),
    "config: head dim of V": (
        {**GOOD, "config": {**CONFIG, "head_dim_v": 48}},
        "its config holds head dims up to 48, not 64",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_named_ignored_and_left_alone(path, caught, kind):
    content, reason = FILES[kind]
    path.parent.mkdir()
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = path.read_bytes()
    for _ in range(2):
        assert picked().config == TABLE
    (warning,) = caught
    assert issubclass(warning.category, TunedWarning) and issubclass(TunedWarning, UserWarning)
    assert f"{path} is ignored: {reason}" in str(warning.message)
    with pytest.raises(ValueError, match="is left as it is, and nothing was written"):
        tuned.write(ENTRY)
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_read_is_named(path, caught):
    path.mkdir(parents=True)
    assert picked().config == TABLE
    (warning,) = caught
    assert f"{path} is ignored: it cannot be read (Is a directory)" in str(warning.message)


@pytest.mark.parametrize("kind", ITEMS)
def test_a_damaged_entry_is_named_and_ignored_and_the_others_are_not(path, caught, kind):
    item, reason = ITEMS[kind]
    beside = Entry(replace(CALL, heads=7), OTHER)
    put(path, beside.to_json(), item)
    for _ in range(2):
        assert picked().config == TABLE
        assert picked(extent=replace(EXTENT, heads=7)).config == OTHER
    (warning,) = caught
    assert issubclass(warning.category, TunedWarning)
    assert str(warning.message).startswith(f"fmha: {path}: entry 2 of 2 is ignored: ")
    pytest.raises(ValueError, Entry.from_json, item).match(reason)
    assert str(pytest.raises(ValueError, Entry.from_json, item).value) in str(warning.message)


def test_what_a_config_may_leave_out_and_how_its_numbers_are_read(path, caught):
    shorter = {name: value for name, value in CONFIG.items() if name not in ("ones", "rescale_above")}
    put(path, {**GOOD, "config": shorter})
    assert picked().config == replace(OTHER, ones=0)
    put(path, {**GOOD, "config": {**CONFIG, "rescale_above": 4}, "measured": None})
    assert repr(picked().config.rescale_above) == "4.0"  # as the cache writes it: 4 would be another kernel
    assert not caught


# -- writing -----------------------------------------------------------------------------------------------------------
READER = """
import json, sys
from pathlib import Path
path, stop = map(Path, sys.argv[1:])
seen = 0
while not stop.exists():
    document = json.loads(path.read_bytes())
    assert document["version"] == 1 and len(document["entries"]) >= 1, document
    seen += 1
print(seen)
"""


def test_a_reader_never_sees_half_a_file(path, tmp_path):
    tuned.write(ENTRY)
    stop = tmp_path / "stop"
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, str(path), str(stop)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for heads in range(1, 150):
        tuned.write(Entry(replace(CALL, heads=heads), OTHER))
    time.sleep(0.3)
    stop.touch()
    assert all(int(reader.communicate(timeout=30)[0]) > 10 for reader in readers)
    assert [reader.returncode for reader in readers] == [0, 0]
    assert sorted(found.name for found in path.parent.iterdir()) == ["tuned.json", "tuned.json.lock"]


def test_of_many_writers_none_is_lost(path):
    entries = [Entry(replace(CALL, heads=heads), OTHER) for heads in range(1, 17)]
    threads = [threading.Thread(target=tuned.write, args=(entry,)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tuned.read().entries == {entry.call: entry for entry in entries}


def test_a_write_that_fails_leaves_the_old_file(path, monkeypatch):
    tuned.write(ENTRY)
    before = path.read_bytes()
    monkeypatch.setattr(tuned.os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        tuned.write(Entry(replace(CALL, heads=1), OTHER))
    assert path.read_bytes() == before and not list(path.parent.glob("*.tmp"))


def test_a_link_to_the_file_stays_a_link(path, tmp_path):
    target = tmp_path / "elsewhere.json"
    path.parent.mkdir()
    path.symlink_to(target)
    tuned.write(ENTRY)
    assert path.is_symlink() and target.is_file() and tuned.read().entries == {CALL: ENTRY}


# -- those who ask -----------------------------------------------------------------------------------------------------
@pytest.fixture
def fetched(monkeypatch):
    """Makes CPU tensors pass for tensors on a Hopper GPU, and notes the configs whose kernels are fetched."""
    counter = Counter(torch.device("cpu"), 0)
    configs = []
    monkeypatch.setattr(launch, "describe_device", lambda device: launch.Device(ARCH, 50 << 20, 132))
    monkeypatch.setattr(launch, "current", lambda device: counter)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(launch, "capturing", lambda device: False)
    monkeypatch.setattr(library, "loaded", lambda *kernel: None)
    monkeypatch.setattr(library, "fetch", lambda problem, config, arch: configs.append(config) or (lambda *args: None))
    monkeypatch.setattr(launch, "PLANS", {})
    monkeypatch.setattr(attention_module, "PLANS", launch.PLANS)
    return configs, counter


def test_attention_takes_the_tuned_config_and_counts_its_work_tiles(path, fetched):
    configs, counter = fetched
    wide = replace(choose(64, ARCH, replace(EXTENT, seqlen_q=256, seqlen_k=256)), tile_n=96)
    assert wide.tile_m == 128 and TABLE.tile_m == 192
    tuned.write(Entry(replace(CALL, seqlen_q=1000, seqlen_k=1000, heads=2 * 3), wide))
    q, k, v = torch.zeros(3, 2, 1000, 3, 64, dtype=torch.bfloat16)
    for _ in range(3):
        fmha.attention(q, k, v)
    assert configs == [wide] and counter.base == 3 * 6 * 8
    fmha.attention(q, k, v, causal=True)
    fmha.attention(q[:, :999], k, v)
    assert wide not in configs[1:] and len(configs) == 3


def test_a_planned_call_looks_into_no_file(path, fetched, monkeypatch):
    q, k, v = torch.zeros(3, 1, 128, 1, 64, dtype=torch.bfloat16)
    fmha.attention(q, k, v)
    monkeypatch.setattr(tuned, "file", lambda: pytest.fail("asked"))
    fmha.attention(q, k, v)


def test_warmup_fetches_tuned_kernels_too(path, fetched, monkeypatch):
    tuned.write(ENTRY)
    tuned.write(Entry(replace(CALL, heads=1), OTHER))
    tuned.write(Entry(replace(CALL, mask="causal"), replace(OTHER, tile_n=80)))
    monkeypatch.setattr(launch, "current_architecture", lambda: None)
    fmha.warmup(PROBLEM, ARCH)
    assert fetched[0] == [*(row.config for row in rows(64, ARCH)), OTHER]


def test_inspect_names_the_file(path, monkeypatch):
    """The one kernel that is compiled here."""
    tuned.write(ENTRY)
    found = fmha.inspect(PROBLEM, ARCH, extent=fmha.Extent("dense", 16384, 16384, 32, 132))
    assert (found.config, found.reason) == (OTHER, f"tuned: {path}")
    assert "config.tile_n = 96" in found.key and found.resources.local_loads == 0
    monkeypatch.setattr(compile, "compile_object", lambda *args: pytest.fail("compiled"))
    with pytest.raises(ValueError, match=r"extent\.mask is 'causal'; it must be that of the problem, 'dense'"):
        fmha.inspect(PROBLEM, ARCH, extent=replace(EXTENT, mask="causal"))


def test_measurements_follow_the_same_decision_and_say_so(path, monkeypatch):
    case = Case(1, 16384, 16384, 32, 8, 64)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "G")
    assert workload.config_of(case, ARCH, 132) == TABLE and "tuned" not in environment.describe()
    tuned.write(ENTRY)
    tuned.forget()
    assert workload.config_of(case, ARCH, 132) == OTHER
    assert environment.describe()["tuned"] == str(path)
