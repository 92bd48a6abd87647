"""Compiled kernels on disk, so that each is compiled once per machine and not once per process.

    <cache>/<fingerprint>/<digest>.kernel    one kernel: its key in plain text, a checksum, the object file
    <cache>/<fingerprint>/<digest>.lock      held from the look for that file until it is in place
    <cache>/<fingerprint>/<digest>.bad       what was found damaged, kept for whoever wants to know why

<cache> is $FMHA_CACHE_DIR, else $XDG_CACHE_HOME/fmha, else ~/.cache/fmha; <digest> is that of the key. An entry appears
whole or not at all: it is written under a temporary name and renamed. Its code will run in this process, so a folder
that others may write is refused. Whatever the disk does, kernels are compiled and calls are answered: a disk that
cannot be used costs one warning a process, and compile time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import stat
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from filelock import FileLock

from fmha.jit import files, key

FORMAT = "fmha kernel 1"  # the first line of an entry
LOCK_SECONDS = 600.0  # far above any compile: a holder that hangs must not hang everybody else
SOURCES = Path(__file__).resolve().parents[2]
PACKAGES = ("fmha", "schedules")

# Variables of the DSL that leave the generated code alone; any other CUTE_DSL_* one is taken to change it. The
# architecture is part of every key, and the runtime libraries follow from the DSL's version.
HARMLESS = frozenset(
    f"CUTE_DSL_{name}"
    for name in """
    ARCH CACHE_DIR DISABLE_FILE_CACHING DUMP_DIR FILTER_STACKTRACE JIT_CACHE_MAX_ELEMS JIT_TIME_PROFILING KEEP LIBS
    LOG_LEVEL LOG_TO_CONSOLE LOG_TO_FILE NO_CACHE PRINT_IR
    """.split()
)

T = TypeVar("T")


class CacheWarning(RuntimeWarning):
    """The disk cache is not used, or an entry of it was damaged. Results are right all the same."""


class Damaged(Exception):
    """An entry is not what was once written."""


class Store:
    """The kernels of one fingerprint, under `root`: by default the user's cache, and the fingerprint of this code.

    Any number of processes and threads may use one folder.
    """

    def __init__(self, root: Path | None = None, fingerprint: str | None = None) -> None:
        self._root = root
        self._fingerprint = fingerprint
        self._writable = True

    def get(self, text: str, build: Callable[[], bytes], load: Callable[[bytes], T]) -> T:
        """The kernel with the canonical text `text`: `load` of what is on disk, else of what `build` makes.

        Of all the processes that miss the same kernel at the same time, one builds it and the others wait. An entry
        that is damaged, or that `load` refuses, is set aside and built again.
        """
        if self.folder is None:
            return load(build())
        entry = self.folder / f"{key.digest(text)}.kernel"
        with suppress(FileNotFoundError, Damaged):
            return _load(entry, text, load)  # without the lock, since entries appear whole
        if not self._writable:
            return load(build())
        lock = FileLock(entry.with_suffix(".lock"), timeout=LOCK_SECONDS, mode=0o600)
        try:
            lock.acquire()
        except (OSError, NotImplementedError) as error:  # a time-out is an OSError; no flock here is the other
            self._stop_writing(error)
            return load(build())
        try:
            return self._get_locked(entry, text, build, load)
        finally:
            lock.release()

    def _get_locked(self, entry: Path, text: str, build: Callable[[], bytes], load: Callable[[bytes], T]) -> T:
        try:
            return _load(entry, text, load)  # whoever held the lock before may have built it
        except FileNotFoundError:
            damage = None
        except Damaged as error:
            damage = error
        object_file = build()
        try:
            if damage is not None:
                _set_aside(entry, damage)
            _write(entry, encode(text, object_file))
        except OSError as error:
            self._stop_writing(error)
        return load(object_file)

    @functools.cached_property
    def root(self) -> Path:
        """The folder of all fingerprints, whether or not it exists."""
        return self._root or default_root()

    @functools.cached_property
    def folder(self) -> Path | None:
        """The folder of this fingerprint, made if missing. None, after a warning, if it cannot be used."""
        try:
            folder = private_folder(self.root) / (self._fingerprint or fingerprint())
            folder.mkdir(mode=0o700, exist_ok=True)
            return folder
        except (OSError, RuntimeError) as error:  # no home directory is a RuntimeError
            _warn(f"the cache folder cannot be used, so kernels are kept in memory only: {error}")
            return None

    def _stop_writing(self, error: Exception) -> None:
        if self._writable:
            self._writable = False
            _warn(f"{self.folder} cannot be written, so kernels compiled from here on are kept in memory only: {error}")

    def entries(self) -> list[Entry]:
        """Every kernel on disk, of all fingerprints, checked; sorted by path."""
        return [_inspect(path) for path in sorted(self.root.glob("*/*.kernel"))]

    def clear(self) -> int:
        """Removes every kernel, what was set aside, and what killed processes left. Returns how many files.

        Locks stay: another process may be waiting for one.
        """
        doomed = [path for end in ("kernel", "bad", "tmp") for path in self.root.glob(f"*/*.{end}")]
        for path in doomed:
            path.unlink(missing_ok=True)
        return len(doomed)


@dataclass(frozen=True)
class Entry:
    """A kernel on disk: where, its canonical text, its size in bytes, and what is wrong with it, if anything is."""

    path: Path
    text: str
    size: int
    damage: str | None


def encode(text: str, object_file: bytes) -> bytes:
    """An entry: a format line, a checksum line over all that follows, the key's lines, an empty line, the object."""
    body = text.encode() + b"\n" + object_file
    return f"{FORMAT}\nsha256 = {hashlib.sha256(body).hexdigest()}\n".encode() + body


def decode(content: bytes) -> tuple[str, bytes]:
    """(canonical text, object file) of an entry. Damaged if it is not as `encode` wrote it."""
    format_line, _, rest = content.partition(b"\n")
    if format_line != FORMAT.encode():
        raise Damaged(f"it does not start with {FORMAT!r}")
    checksum, _, body = rest.partition(b"\n")
    if checksum != f"sha256 = {hashlib.sha256(body).hexdigest()}".encode():
        raise Damaged("its checksum does not match its content")
    text, _, object_file = body.partition(b"\n\n")
    return text.decode() + "\n", object_file


def default_root() -> Path:
    """$FMHA_CACHE_DIR, else fmha in the user's cache folder (XDG base directory specification)."""
    if named := os.environ.get("FMHA_CACHE_DIR"):
        return Path(named).expanduser()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "fmha"  # a relative one is to be ignored


def private_folder(path: Path) -> Path:
    """`path` without symbolic links, made with mode 0700 if missing. PermissionError if others could put code there."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = path.resolve(strict=True)  # what is checked is what is used, wherever a link points later
    status = path.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to user {status.st_uid}, not to you ({os.geteuid()})")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{path} is writable by others (mode {status.st_mode & 0o777:o}); chmod 700 allows it")
    for parent in path.parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise PermissionError(f"{path} lies in {parent}, where anyone may replace it (mode {mode & 0o777:o})")
    return path


def fingerprint(sources: Path = SOURCES, environment: Mapping[str, str] = os.environ) -> str:
    """16 hexadecimal digits that change with whatever turns a key into code: these sources, the DSL, TVM-FFI, the
    DSL's settings, and the instruction set of this machine, for which the launch code is compiled."""
    import cutlass
    import tvm_ffi

    digest = hashlib.sha256()
    for line in (FORMAT, cutlass.__version__, cutlass.CUDA_VERSION, tvm_ffi.__version__, host_instruction_set()):
        digest.update(f"{line}\n".encode())
    for name in sorted(environment):
        if name.startswith("CUTE_DSL_") and name not in HARMLESS:
            digest.update(f"{name}={environment[name]}\n".encode())
    for path in sorted(path for package in PACKAGES for path in (sources / package).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(sources).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def host_instruction_set() -> str:
    """The machine, with the level of the x86-64 psABI: LLVM uses whatever the CPU it runs on has, AVX-512 included,
    and a home directory may be shared with older CPUs."""
    machine = platform.machine()
    if machine != "x86_64":
        return machine
    flags = set()
    with suppress(OSError), open("/proc/cpuinfo") as file:
        flags = set(next((line for line in file if line.startswith("flags")), "").split())
    levels = ((4, {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}), (3, {"avx2", "bmi2", "fma"}))
    return f"{machine}-v{next((level for level, needs in levels if needs <= flags), 2)}"


def _load(entry: Path, text: str, load: Callable[[bytes], T]) -> T:
    """FileNotFoundError if there is no such entry, Damaged if it cannot be read, is another's, or `load` refuses it."""
    try:
        found, object_file = decode(entry.read_bytes())
        if found != text:
            raise Damaged("it holds another kernel than its name says")
        return load(object_file)
    except (FileNotFoundError, Damaged):
        raise
    except Exception as error:  # of the disk, or whatever the loader makes of bad bytes
        raise Damaged(f"{type(error).__name__}: {error}") from error


def _inspect(path: Path) -> Entry:
    content, text, damage = b"", "", None
    try:
        content = path.read_bytes()
        text, _ = decode(content)
        if path.stem != key.digest(text):
            damage = "it holds another kernel than its name says"
    except (OSError, Damaged) as error:
        damage = str(error)
    return Entry(path, text, len(content), damage)


def _write(entry: Path, content: bytes) -> None:
    """Puts an entry in place, whole or not at all. The caller holds its lock."""
    for stale in entry.parent.glob(f"{entry.stem}.*.tmp"):  # their writers held this lock and were killed
        stale.unlink(missing_ok=True)
    files.replace(entry, content)


def _set_aside(entry: Path, damage: Damaged) -> None:
    with suppress(FileNotFoundError):  # someone cleared the cache meanwhile
        os.replace(entry, entry.with_suffix(".bad"))
    _warn(f"{entry} was damaged ({damage}); it is kept as {entry.stem}.bad and was compiled again")


def _warn(message: str) -> None:
    warnings.warn(f"fmha: {message}", CacheWarning, stacklevel=2)
