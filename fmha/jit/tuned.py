"""Block configs that were the fastest in a measurement on this user's own GPU: a file that is asked before the table.
`python -m perf.tune CASE --write` makes it.

    {"version": 1, "entries": [
      {"arch": "sm_90a", "dtype": "bfloat16", "head_dim": 128, "mask": "causal", "seqlen_q": 4096, "seqlen_k": 4096,
       "heads": 64, "multiprocessors": 132, "config": {the fields of BlockConfig}, "measured": {for people}}]}

The file is $FMHA_TUNED, else fmha/tuned.json in the user's config folder (XDG base directory specification). An entry
is for calls of exactly its sizes, `heads` being those of the queries, over all batch entries; one whose config has
columns of ones is for those of them that want no LSE. The file is read once a process, when the first call is planned,
and appears whole or not at all. What cannot be used costs one `TunedWarning`, and the table decides; no file costs
nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fmha.jit import files
from fmha.problem import Problem, supports
from schedules.tiling import CHIPS, BlockConfig, Extent, tunable

VERSION = 1
LOCK_SECONDS = 60.0  # far above any writing
TYPES: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "str": (str,)}  # by annotation

T = TypeVar("T")


class TunedWarning(UserWarning):
    """The file of tuned block configs, or an entry of it, is not used. The table decides instead."""


@dataclass(frozen=True)
class Call:
    """The calls that an entry is for."""

    arch: str
    dtype: str
    head_dim: int
    mask: str
    seqlen_q: int
    seqlen_k: int
    heads: int  # of the queries, over all batch entries
    multiprocessors: int  # two GPUs of one architecture may share a home directory

    @classmethod
    def of(cls, problem: Problem, arch: str, extent: Extent) -> Call:
        sizes = extent.seqlen_q, extent.seqlen_k, extent.heads, extent.multiprocessors
        return cls(arch, problem.dtype, problem.head_dim, problem.mask, *sizes)


@dataclass(frozen=True)
class Entry:
    """A block config for some calls, and how it was measured: read by people only."""

    call: Call
    config: BlockConfig
    measured: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self.call), "config": asdict(self.config), "measured": dict(self.measured)}

    @classmethod
    def from_json(cls, item: Any) -> Entry:
        """ValueError, with the reason, if a call must not get its config."""
        if not isinstance(item, dict):
            raise ValueError(f"it is {item!r}, and no object")
        rest = dict(item)
        config = _typed(BlockConfig, rest.pop("config", None), "config")
        measured = rest.pop("measured", {})
        call = _typed(Call, rest, "entry")
        if reason := supports(Problem(call.dtype, call.head_dim, call.mask), call.arch):
            raise ValueError(reason)
        if not tunable(call.arch):
            raise ValueError(f"no block config is tuned for {call.arch}")
        if reason := config.check(CHIPS[call.arch]):
            raise ValueError(f"its config: {reason}")
        if (widest := min(config.head_dim, config.value_dim)) < call.head_dim:
            raise ValueError(f"its config holds head dims up to {widest}, not {call.head_dim}")
        return cls(call, config, measured if isinstance(measured, dict) else {})


@dataclass(frozen=True)
class File:
    """What of a file can be used."""

    path: Path
    entries: Mapping[Call, Entry]


_reading = threading.Lock()
_file: File | None = None


def find(problem: Problem, arch: str, extent: Extent) -> Entry | None:
    """The entry for calls of `problem` with these sizes. There are entries for plain scores, dense and causal, and one
    head dim, only."""
    if problem.mask == "window" or problem.score != "plain" or problem.head_dim_v:
        return None
    return file().entries.get(Call.of(problem, arch, extent))


def configs(problem: Problem, arch: str) -> list[BlockConfig]:
    """Those of `problem`'s entries, whatever their sizes."""
    return [
        entry.config
        for call, entry in file().entries.items()
        if (call.arch, call.dtype, call.head_dim, call.mask) == (arch, problem.dtype, problem.head_dim, problem.mask)
    ]


def file() -> File:
    """The user's file as the first look at it found it."""
    global _file
    if _file is None:
        with _reading:
            if _file is None:  # no other thread has read it meanwhile
                _file = read()
    return _file


def forget() -> None:
    """Has the file read again by whoever asks next. Plans that were made stay."""
    global _file
    _file = None


def path() -> Path:
    """Where the file is, or would be. RuntimeError if the user has no home directory to look for it in."""
    if named := os.environ.get("FMHA_TUNED"):
        return Path(named).expanduser()
    xdg = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".config") / "fmha" / "tuned.json"  # a relative one is ignored


def read() -> File:
    """Reads the file; warns of everything in it that cannot be used. Of entries for the same calls the last counts."""
    try:
        where = path()
    except RuntimeError:  # no home directory, no file
        return File(Path(), {})
    try:
        items = _items(where)
    except ValueError as error:
        _warn(f"{where} is ignored: {error}")
        return File(where, {})
    entries = {}
    for number, item in enumerate(items, 1):
        try:
            entry = Entry.from_json(item)
        except ValueError as error:
            _warn(f"{where}: entry {number} of {len(items)} is ignored: {error}")
            continue
        entries[entry.call] = entry
    return File(where, entries)


def write(entry: Entry) -> Path:
    """Puts an entry into the user's file, in the place of those for the same calls, and returns the file's path.

    ValueError if what is there cannot be read: it is left alone. OSError if it cannot be written, RuntimeError without
    a home directory.
    """
    from filelock import FileLock

    where = path().resolve()  # where the file is a link, the link stays
    where.parent.mkdir(parents=True, exist_ok=True)
    call = asdict(entry.call)
    with FileLock(where.with_name(f"{where.name}.lock"), timeout=LOCK_SECONDS):  # or one of two writers is lost
        try:
            items = _items(where)
        except ValueError as error:
            raise ValueError(f"{where} is left as it is, and nothing was written: {error}") from error
        kept = [
            item for item in items if not (isinstance(item, dict) and call == {name: item.get(name) for name in call})
        ]
        document = {"version": VERSION, "entries": [*kept, entry.to_json()]}
        files.replace(where, (json.dumps(document, indent=1) + "\n").encode())
    return where


def _items(where: Path) -> list[Any]:
    """The entries as they stand in the file; none without a file. ValueError, with the reason, if there is no reading
    them."""
    try:
        document = json.loads(where.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from error
    version = document.get("version") if isinstance(document, dict) else None
    if version != VERSION:
        raise ValueError(f"its version is {version!r}; {VERSION} is read here")
    if not isinstance(document.get("entries"), list):
        raise ValueError("it has no list of entries")
    return document["entries"]


def _typed(kind: type[T], values: Any, what: str) -> T:
    """A dataclass of numbers and strings from JSON. ValueError for a name or a type that it does not have, for a number
    that is not positive, and for a missing one that has no default."""
    if not isinstance(values, dict):
        raise ValueError(f"its {what} is {values!r}, and no object")
    known = {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - known.keys()):
        raise ValueError(f"its {what} has unknown fields: {', '.join(unknown)}")
    needed = {name for name, each in known.items() if each.default is dataclasses.MISSING}
    if missing := sorted(needed - values.keys()):
        raise ValueError(f"its {what} lacks {', '.join(missing)}")
    for name, value in values.items():
        annotation = str(known[name].type)
        if type(value) not in TYPES[annotation]:  # True is an int to isinstance
            raise ValueError(f"its {what} has {name} = {value!r}; {annotation} is needed")
        if annotation == "int" and value < (least := 0 if known[name].default == 0 else 1):
            raise ValueError(f"its {what} has {name} = {value}; {least} or more is needed")
    return kind(**{name: float(value) if known[name].type == "float" else value for name, value in values.items()})


def _warn(message: str) -> None:
    warnings.warn(f"fmha: {message}", TunedWarning, stacklevel=2)
