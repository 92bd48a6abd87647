"""`python -m perf.peer_code`: FlashAttention-3's registers, spills and loops, from the library that is installed.

Writes perf/resources-peers.json, which `python -m perf.report` draws beside ours. It needs no GPU and does not load
the library: `pip install --no-deps fa3-fwd` is enough. The kernels read are those of plain bfloat16 attention: one
head dim for queries and values, batches of one length, contiguous K and V, no softcap, window, splits or packed heads.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from fmha.jit import report, sass
from fmha.jit.report import Report
from perf.report import PEERS

PACKAGE = "fa3-fwd"
LIBRARY = "fa3_fwd._C"
SYMBOL = re.compile(rb"_ZN7cutlass13device_kernelIN5flash[A-Za-z0-9_]+")
# CollectiveMainloopFwdSm90<stages, cluster, (tile_m, tile_n, head dim), value dim, element, accumulator, arch, flags>
# as the compiler mangles it. SA_ and SB_ stand for the tile's first and second size where another one is the same.
MAINLOOP = re.compile(
    r"CollectiveMainloopFwdSm90ILi\d+EN4cute5tupleIJNS5_1CILi1EEES8_S8_EEE"
    r"NS6_IJ(?P<tile>(?:NS7_ILi\d+EEE|S[AB]_){3})EEELi(?P<value_dim>\d+)E"
    r"NS_10bfloat16_tEfNS_4arch4Sm90E(?P<flags>(?:Lb[01]E)+)"
)
FLAGS = (
    "causal",
    "local",
    "softcap",
    "varlen",
    "paged",
    "append",
    "qv",
    "pv_from_registers",
    "overlap",
    "pack_gqa",
    "split",
    "v_transposed",
)
FREE = ("causal", "pv_from_registers", "overlap")  # the other flags are off in plain attention


def variant(symbol: str) -> str | None:
    """`fa3-d<head dim>-<mask>` for a kernel of plain attention, None for others."""
    found = MAINLOOP.search(symbol)
    if not found or "FlashAttnFwdSm90" not in symbol:
        return None
    bits = re.findall(r"Lb([01])E", found["flags"])
    if len(bits) != len(FLAGS):
        return None
    flags = {name: bit == "1" for name, bit in zip(FLAGS, bits, strict=True)}
    sizes = _sizes(found["tile"])
    if sizes[2] != int(found["value_dim"]) or any(on for name, on in flags.items() if name not in FREE):
        return None
    return f"fa3-d{sizes[2]}-{'causal' if flags['causal'] else 'dense'}"


def _sizes(tile: str) -> list[int]:
    sizes: list[int] = []
    for number, back in re.findall(r"NS7_ILi(\d+)EEE|S([AB])_", tile):
        sizes.append(int(number) if number else sizes["AB".index(back)])
    return sizes


def cubins(library: Path, folder: Path) -> list[Path]:
    """Takes the cubins for sm_90a out of a library. CalledProcessError if it has none."""
    subprocess.run([sass.tool("cuobjdump"), "-xelf", "sm_90a", library], cwd=folder, check=True, capture_output=True)
    return sorted(folder.glob("*.cubin"))


def kernels(library: Path) -> Iterator[tuple[str, Report]]:
    """Name and resources of each kernel of plain attention. ValueError if two have one name."""
    seen = set()
    with tempfile.TemporaryDirectory() as folder:
        for cubin in cubins(library, Path(folder)):
            for symbol in sorted(set(SYMBOL.findall(cubin.read_bytes()))):
                name = variant(symbol.decode())
                if name in seen:
                    raise ValueError(f"{name}: two kernels of {library.name} look like it")
                if name:
                    seen.add(name)
                    yield name, report.of_cubin(cubin, function=symbol.decode())


def dump(version: str, rows: dict[str, Report]) -> str:
    """As perf/resources.json, with the package in the compiler's place; by head dim, dense first."""
    order = sorted(rows, key=lambda name: (int(re.findall(r"-d(\d+)-", name)[0]), name.endswith("causal")))
    lines = ",\n".join(f'  "{name}": {json.dumps(asdict(rows[name]))}' for name in order)
    return f'{{\n "packages": {json.dumps({PACKAGE: version})},\n "variants": {{\n{lines}\n }}\n}}\n'


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m perf.peer_code", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=PEERS, metavar="PATH", help=f"default: perf/{PEERS.name}")
    chosen = parser.parse_args(arguments)
    try:
        version = metadata.version(PACKAGE)
        spec = importlib.util.find_spec(LIBRARY)
    except (metadata.PackageNotFoundError, ModuleNotFoundError):
        spec = None
    if spec is None or spec.origin is None:
        print(f"{PACKAGE} is not installed: pip install --no-deps {PACKAGE}", file=sys.stderr)
        return 2
    chosen.out.write_text(dump(version, dict(kernels(Path(spec.origin)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
