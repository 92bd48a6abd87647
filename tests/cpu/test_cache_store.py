"""Kernels on disk: nothing that happens to a disk or a process gives a wrong kernel, and little costs a compile."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import filelock
import pytest

from fmha.jit import files, key, store
from fmha.jit.store import CacheWarning, Damaged, Store

TEXT = "arch = 'sm_90a'\nproblem.dtype = 'bfloat16'\n"
OBJECT = bytes(range(256)) * 8 + b"\n\n"  # any bytes, the separator of an entry among them


class Builder:
    """Stands for the compiler, and counts."""

    def __init__(self, result: bytes = OBJECT) -> None:
        self.result = result
        self.calls = 0

    def __call__(self) -> bytes:
        self.calls += 1
        return self.result


def load(object_file: bytes) -> tuple[str, bytes]:
    """Stands for the loader, and refuses nothing."""
    return "loaded", object_file


def get(root: Path, build=None, text: str = TEXT, loader=load, fingerprint: str = "f"):
    return Store(root, fingerprint).get(text, build or Builder(), loader)


def entry_of(root: Path, text: str = TEXT, fingerprint: str = "f") -> Path:
    return root / fingerprint / f"{key.digest(text)}.kernel"


def leftovers(root: Path) -> list[str]:
    return sorted(path.suffix for path in root.rglob("*") if path.is_file() and path.suffix not in (".kernel", ".lock"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def caught():
    """The cache's warnings, however often Python would show them."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield record


# -- entries -----------------------------------------------------------------------------------------------------------
def test_a_kernel_is_built_once_and_then_read(root, caught):
    build = Builder()
    assert get(root, build) == ("loaded", OBJECT)
    assert get(root, build) == ("loaded", OBJECT)
    assert build.calls == 1
    assert not caught
    assert leftovers(root) == []


def test_another_key_or_fingerprint_is_another_kernel(root):
    get(root, Builder(b"one"))
    assert get(root, Builder(b"two"), text=TEXT + "x = 1\n") == ("loaded", b"two")
    assert get(root, Builder(b"three"), fingerprint="g") == ("loaded", b"three")
    assert get(root, Builder(b"never")) == ("loaded", b"one")


def test_an_entry_shows_its_key_in_plain_text(root):
    get(root)
    assert TEXT.encode() in entry_of(root).read_bytes()
    (entry,) = Store(root, "f").entries()
    assert (entry.path, entry.text, entry.damage) == (entry_of(root), TEXT, None)
    assert entry.size == entry_of(root).stat().st_size


def test_encode_and_decode_are_inverse():
    for object_file in (b"", b"\n", b"\n\nx", OBJECT):
        assert store.decode(store.encode(TEXT, object_file)) == (TEXT, object_file)


def test_every_single_flipped_bit_of_an_entry_is_noticed():
    good = store.encode("k = 1\n", b"object")
    for at in range(8 * len(good)):
        bad = bytearray(good)
        bad[at // 8] ^= 1 << at % 8
        with pytest.raises(Damaged):
            store.decode(bytes(bad))


def test_clear_removes_kernels_and_remains_but_no_lock(root):
    get(root)
    get(root, fingerprint="g")
    (root / "f" / "x.bad").touch()
    (root / "f" / "x.y.tmp").touch()
    assert Store(root, "f").clear() == 4
    assert {path.suffix for path in root.rglob("*") if path.is_file()} == {".lock"}
    assert Store(root, "f").entries() == []


# -- damage ------------------------------------------------------------------------------------------------------------
def truncated(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    return content[:-5] + bytes([content[-5] ^ 1]) + content[-4:]


def another(content: bytes) -> bytes:
    return store.encode(TEXT + "other = 1\n", OBJECT)


@pytest.mark.parametrize("damage", [truncated, flipped, another, lambda content: b"", lambda content: b"\x00" * 4096])
def test_a_damaged_entry_is_set_aside_and_built_again(root, damage, caught):
    get(root)
    bad = damage(entry_of(root).read_bytes())
    entry_of(root).write_bytes(bad)
    assert Store(root, "f").entries()[0].damage is not None

    build = Builder(b"again")
    assert get(root, build) == ("loaded", b"again")
    assert build.calls == 1
    assert entry_of(root).with_suffix(".bad").read_bytes() == bad
    assert [w.category for w in caught] == [CacheWarning]
    assert "damaged" in str(caught[0].message) and str(entry_of(root)) in str(caught[0].message)
    assert get(root, Builder(b"never")) == ("loaded", b"again")


def test_an_entry_that_does_not_load_is_set_aside_and_built_again(root, caught):
    get(root, Builder(b"unloadable"))

    def picky(object_file: bytes):
        if object_file == b"unloadable":
            raise RuntimeError("not an object file")
        return load(object_file)

    assert get(root, Builder(b"good"), loader=picky) == ("loaded", b"good")
    assert "not an object file" in str(caught[0].message)
    assert entry_of(root).with_suffix(".bad").exists()


def test_an_error_of_the_compiler_reaches_the_caller_and_leaves_nothing(root):
    def broken() -> bytes:
        raise OSError("the compiler failed")

    with pytest.raises(OSError, match="the compiler failed"):
        get(root, broken)
    assert leftovers(root) == [] and not entry_of(root).exists()
    assert get(root) == ("loaded", OBJECT)  # and the lock is free


# -- processes and threads ---------------------------------------------------------------------------------------------
def test_threads_that_miss_the_same_kernel_build_it_once(root):
    calls, results = [], []

    def build() -> bytes:
        calls.append(1)
        time.sleep(0.2)
        return OBJECT

    threads = [threading.Thread(target=lambda: results.append(get(root, build))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert results == [("loaded", OBJECT)] * 8


def child(root: Path, code: str) -> subprocess.Popen:
    script = f"import os, sys, time\nfrom pathlib import Path\nfrom fmha.jit import store\nroot = Path({str(root)!r})\n"
    return subprocess.Popen([sys.executable, "-c", script + code])


@pytest.mark.parametrize("moment", ["while it compiles", "while it writes"])
def test_a_killed_process_hurts_nobody(root, moment, caught):
    """A process is killed with SIGKILL while it holds the lock; the next one builds at once and cleans up."""
    hang = "def hang(*args): Path(root, 'here').touch(); time.sleep(600)\n"
    if moment == "while it compiles":
        code = hang + "build = hang\n"
    else:
        code = hang + "store.os.replace = hang\nbuild = lambda: b'half an export'\n"
    process = child(root, code + f"store.Store(root, 'f').get({TEXT!r}, build, bytes)\n")
    deadline = time.monotonic() + 60
    while not (root / "here").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (root / "here").unlink()
    assert not entry_of(root).exists()
    assert leftovers(root) == ([".tmp"] if moment == "while it writes" else [])

    began = time.monotonic()
    assert get(root) == ("loaded", OBJECT)
    assert time.monotonic() - began < 5
    assert leftovers(root) == []
    assert not caught


def test_a_lock_that_is_never_released_costs_a_compile_and_no_more(root, caught, monkeypatch):
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.1)
    user = Store(root, "f")
    holder = filelock.FileLock(user.folder / f"{key.digest(TEXT)}.lock")
    with holder:
        assert user.get(TEXT, Builder(), load) == ("loaded", OBJECT)
    assert [w.category for w in caught] == [CacheWarning]


# -- disks that do not work --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["replace", "open"])
def test_a_disk_that_cannot_be_written_costs_one_warning(root, number, call, caught, monkeypatch):
    get(root, Builder(b"written before"), text="before = 1\n")

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    owner, name = {"replace": (files.os, "replace"), "open": (files.tempfile, "mkstemp")}[call]
    monkeypatch.setattr(owner, name, fail)
    user = Store(root, "f")
    for i in range(3):
        assert user.get(f"k = {i}\n", Builder(), load) == ("loaded", OBJECT)
    assert user.get("before = 1\n", Builder(), load) == ("loaded", b"written before")  # what is there is still read
    assert len(caught) == 1
    assert os.strerror(number) in str(caught[0].message)
    assert leftovers(root) == []
    assert len(list(root.rglob("*.lock"))) == 2  # of the first two kernels: the others did not try again


def test_a_file_in_the_way_of_the_folder_costs_one_warning(root, caught):
    root.write_text("a file")
    user = Store(root, "f")
    for i in range(3):
        assert user.get(f"k = {i}\n", Builder(), load) == ("loaded", OBJECT)
    assert len(caught) == 1 and str(root) in str(caught[0].message)
    assert root.read_text() == "a file"


# -- permissions -------------------------------------------------------------------------------------------------------
def test_what_is_made_belongs_to_its_user_alone(root):
    before = os.umask(0)
    try:
        get(root)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (root, *root.rglob("*"))}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items()), modes


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777, 0o1777, 0o720])
def test_a_folder_that_others_may_write_is_refused(root, mode, caught):
    get(root, Builder(b"planted"))
    root.chmod(mode)
    assert get(root, Builder(b"built")) == ("loaded", b"built")
    assert len(caught) == 1 and "writable by others" in str(caught[0].message)


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750])
def test_a_folder_that_others_may_read_is_used(root, mode, caught):
    get(root, Builder(b"mine"))
    root.chmod(mode)
    assert get(root, Builder(b"never")) == ("loaded", b"mine")
    assert not caught


def test_a_folder_of_another_user_is_refused(root, caught, monkeypatch):
    get(root, Builder(b"planted"))
    monkeypatch.setattr(store.os, "geteuid", lambda: root.stat().st_uid + 1)
    assert get(root, Builder(b"built")) == ("loaded", b"built")
    assert len(caught) == 1 and "belongs to user" in str(caught[0].message)


def test_a_folder_that_anyone_may_replace_is_refused(tmp_path, caught):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert get(shared / "cache", Builder(b"built")) == ("loaded", b"built")
    assert len(caught) == 1 and "anyone may replace it" in str(caught[0].message)
    shared.chmod(0o1777)  # sticky, as /tmp: only its owner may
    build = Builder()
    get(shared / "cache", build)
    get(shared / "cache", build)
    assert build.calls == 1


def test_a_symbolic_link_is_judged_by_what_it_points_to(tmp_path, caught):
    real = tmp_path / "real"
    get(real, Builder(b"mine"))
    link = tmp_path / "link"
    link.symlink_to(real)
    assert get(link, Builder(b"never")) == ("loaded", b"mine")
    assert not caught
    real.chmod(0o777)
    assert get(link, Builder(b"built")) == ("loaded", b"built")
    assert len(caught) == 1


def test_an_entry_that_is_a_link_is_replaced_not_followed(root, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    get(root)
    entry_of(root).unlink()
    entry_of(root).symlink_to(victim)
    with pytest.warns(CacheWarning):
        assert get(root) == ("loaded", OBJECT)
    assert victim.read_text() == "precious"
    assert not entry_of(root).is_symlink()


# -- where, and for which code -----------------------------------------------------------------------------------------
def test_the_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("FMHA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert store.default_root() == Path("/home/me/.cache/fmha")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    assert store.default_root() == Path("/home/me/.cache/fmha")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert store.default_root() == Path("/scratch/fmha")
    monkeypatch.setenv("FMHA_CACHE_DIR", "~/kernels")
    assert store.default_root() == Path("/home/me/kernels")


@pytest.fixture
def sources(tmp_path):
    for package in store.PACKAGES:
        shutil.copytree(
            store.SOURCES / package, tmp_path / package, ignore=lambda _, names: {n for n in names if "cache" in n}
        )
    return tmp_path


def test_the_fingerprint_changes_with_the_sources(sources):
    before = store.fingerprint(sources, {})
    assert store.fingerprint(sources, {}) == before
    seen = {before}
    for path in ("schedules/tiling.py", "fmha/kernels/sm90/forward.py", "fmha/jit/compile.py"):
        (sources / path).write_text((sources / path).read_text() + "# one more line\n")
        seen.add(store.fingerprint(sources, {}))
    (sources / "schedules/tiling.py").rename(sources / "schedules/tilings.py")
    seen.add(store.fingerprint(sources, {}))
    assert len(seen) == 5


def test_the_fingerprint_changes_with_versions_machine_and_settings(sources, monkeypatch):
    import cutlass
    import tvm_ffi

    before = store.fingerprint(sources, {})
    assert len(before) == 16 and int(before, 16) >= 0
    harmless = {"CUTE_DSL_ARCH": "sm_80", "CUTE_DSL_LOG_LEVEL": "9", "HOME": "/elsewhere", "CUTE_DSL_KEEP": "ptx"}
    assert store.fingerprint(sources, harmless) == before
    changed = [
        store.fingerprint(sources, {"CUTE_DSL_COMPILER_OPT": "iket"}),
        store.fingerprint(sources, {"CUTE_DSL_LINEINFO": "1"}),
        store.fingerprint(sources, {"CUTE_DSL_SOMETHING_OF_TOMORROW": "1"}),
    ]
    for owner, name in ((cutlass, "__version__"), (cutlass, "CUDA_VERSION"), (tvm_ffi, "__version__")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, "0.0")
            changed.append(store.fingerprint(sources, {}))
    monkeypatch.setattr(store, "host_instruction_set", lambda: "x86_64-v1")
    changed.append(store.fingerprint(sources, {}))
    assert len({before, *changed}) == 1 + len(changed)


def test_a_changed_fingerprint_leaves_old_entries_unused(root, sources, monkeypatch):
    get(root, Builder(b"old"), fingerprint=store.fingerprint(sources, {}))
    (sources / "schedules" / "forward.py").write_text("")
    assert get(root, Builder(b"new"), fingerprint=store.fingerprint(sources, {})) == ("loaded", b"new")
