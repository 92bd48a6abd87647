"""`python -m perf.peers_blackwell`: the machine code of kernels for Blackwell, ours and others', side by side.

Compiles for sm_100a, with one version of the DSL and without a GPU, our forward kernels, flash-attn-4's, those of
FlashInfer and the example in NVIDIA's CUTLASS, reads their softmax loops and writes perf/resources-blackwell.json, of
which `python -m perf.blackwell` makes a table and a model. Each kernel is compiled in a process of its own.

    pip install --no-deps --target PEERS flash-attn-4 quack-kernels flashinfer-python einops triton
    git clone https://github.com/NVIDIA/cutlass CUTLASS
    python -m perf.peers_blackwell --peers PEERS --cutlass CUTLASS --update

`--update` alone compiles ours and keeps the rows of the others. Without it our kernels are compiled and compared with
the file: status 1 if one spills, masks in its body, or has grown by more than 2%.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from fmha.jit import compile, sass
from fmha.problem import Problem
from perf.resources import GROWTH
from schedules.tiling import SM100, TmemConfig

TABLE = Path(__file__).with_name("resources-blackwell.json")
ARCH = "sm_100a"
MULTIPROCESSORS = 148  # of a B200: persistent kernels want their number when they are compiled
HEADS = 16
EXAMPLE = "examples/python/CuTeDSL"
MORE = 32  # exponentials by polynomial, of 128: what a first run should compare with the table's
TILE = 128  # keys that every one of these kernels has in a KV tile


# -- what is read ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Code:
    """A loop, once round on its shortest way, or with all detours."""

    instructions: int
    opcodes: Mapping[str, int]  # by name without modifiers
    kinds: Mapping[str, int]  # as in `sass.KINDS`

    @classmethod
    def of(cls, code: Sequence[sass.Instruction]) -> Code:
        opcodes = Counter(instruction.opcode.split(".")[0] for instruction in code)
        return cls(len(code), dict(sorted(opcodes.items())), dict(Counter(instruction.kind for instruction in code)))


@dataclass(frozen=True)
class Row:
    """One kernel. Its loops are of one warp and one KV tile."""

    registers: int  # per thread, as launched
    setmaxnreg: tuple[int, ...]  # per thread and role, ascending
    stack_bytes: int
    local_loads: int  # anywhere in the kernel
    local_stores: int
    instructions: int
    keys: int  # that a thread of the softmax loads of a KV tile
    body: Code
    masked: tuple[Code, ...]  # loops over tiles at the edges, if there are loops; one copy of each
    roles: Mapping[str, Code]  # loops besides the softmax, in our kernels

    @property
    def softmax_registers(self) -> int:
        return max(self.setmaxnreg, default=self.registers)

    @property
    def spills(self) -> int:
        return self.local_loads + self.local_stores

    @property
    def body_spills(self) -> int:
        """Local loads and stores of one KV tile."""
        return self.body.kinds.get("local", 0)


ROLES = {"correct": ("VOTE", "LDTM"), "multiply": ("UTCHMMA",), "load": ("UTMALDG",)}  # opcodes that tell them


def read(cubin: Path, ours: bool = False) -> Row:
    """Errors as `sass.read`; LookupError without a softmax loop, ValueError if its tiles are not of 128 keys."""
    found = sass.read(cubin)
    if found.body.columns != TILE:
        raise ValueError(f"{cubin.name}: the softmax loop has {found.body.columns} scores a thread, not {TILE}")
    graph = sass.Graph(sass.disassemble(cubin))
    loops = graph.loops()

    def common(loop: sass.Loop) -> Code:
        header = loop.address // sass.INSTRUCTION_BYTES
        return Code.of([one for block in graph.shortest_round(header, loops[header]) for one in graph.blocks[block]])

    copies = len(found.bodies)  # of each loop: a softmax warpgroup may have its own
    masked = sorted((common(loop) for loop in found.masked), key=lambda code: code.instructions)[::copies]
    return Row(
        registers=found.registers,
        setmaxnreg=found.setmaxnreg,
        stack_bytes=found.stack_bytes,
        local_loads=found.local_loads,
        local_stores=found.local_stores,
        instructions=found.instructions,
        keys=found.body.columns,
        body=common(found.body),
        masked=tuple(masked),
        roles=_roles(graph, loops) if ours else {},
    )


def _roles(graph: sass.Graph, loops: Mapping[int, set[int]]) -> dict[str, Code]:
    """Of each role the innermost loop with all detours, for what one elected thread does is one; and that of the
    correction on its shortest way, on which O does not shrink."""
    whole = {
        header: Code.of([one for block in members for one in graph.blocks[block]]) for header, members in loops.items()
    }
    found = {}
    for role, opcodes in ROLES.items():
        with_all = [header for header, code in whole.items() if all(opcode in code.opcodes for opcode in opcodes)]
        header = min(with_all, key=lambda header: whole[header].instructions)
        found[role] = whole[header]
        if role == "correct":
            path = graph.shortest_round(header, loops[header])
            found["watch"] = Code.of([one for block in path for one in graph.blocks[block]])
    return found


# -- our kernels -------------------------------------------------------------------------------------------------------


def ours() -> dict[str, tuple[Problem, TmemConfig]]:
    """Every config with every mask, with more exponentials by polynomial, and at the widest head dim with what is done
    to scores, and for ragged batches."""
    found = {}
    for config in (row.config for row in SM100 if isinstance(row.config, TmemConfig)):
        for mask in ("dense", "causal", "window"):
            found[f"fmha-d{config.head_dim}-{mask}"] = Problem("bfloat16", config.head_dim, mask), config
        problem = Problem("bfloat16", config.head_dim, "dense")
        found[f"fmha-d{config.head_dim}-dense-poly{MORE}"] = problem, replace(config, polynomials=MORE)
    plain, widest = found["fmha-d128-causal"]
    found["fmha-d128-causal-ragged"] = replace(plain, ragged=True), widest
    for score in ("softcap", "alibi"):
        found[f"fmha-d128-causal-{score}"] = replace(plain, score=score), widest
    return found


def measure(problem: Problem, config: TmemConfig) -> Row:
    """Compiles one of our kernels and reads it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compile.cubin(compile.compile_object(problem, config, ARCH)))
        return read(path, ours=True)


def objections(name: str, new: Row, old: Row | None) -> list[str]:
    """What is wrong with one of our kernels, in words; empty if nothing is. `old` is its committed row."""
    said = []
    if new.spills or new.stack_bytes:
        said.append(f"spills: {new.local_loads} local loads, {new.local_stores} local stores, {new.stack_bytes} bytes")
    if (selects := new.body.kinds.get("select", 0)) > 1:
        said.append(f"the body loop masks: {selects} selects")
    if old is None:
        said.append("not in the table to compare with")
    else:
        loops = [("body", new.body, old.body)]
        loops += [("masked", *pair) for pair in zip(new.masked, old.masked, strict=False)]
        for loop, now, before in loops:
            if now.instructions > math.ceil(before.instructions * GROWTH):
                said.append(f"the {loop} loop grew from {before.instructions} to {now.instructions} instructions")
        if new.body.kinds.get("ex2", 0) > old.body.kinds.get("ex2", 0):
            said.append(f"the body loop has {new.body.kinds['ex2']} EX2, not {old.body.kinds['ex2']}")
    return [f"{name}: {words}" for words in said]


# -- others': each function compiles one kernel, and the DSL leaves its cubin in a folder ------------------------------


class Chip:
    """A B200 that is not there, for kernels that ask the driver how many CTAs it holds."""

    def get_max_active_clusters(self, size: int, *_: Any) -> int:
        return MULTIPROCESSORS // size

    def get_device_multiprocessor_count(self) -> int:
        return MULTIPROCESSORS


def flash_attention_4(head_dim: int, mask: str, seqlen_k: int) -> None:
    """The kernel that its public function picks for a batch of equal lengths, with tensors that have no data."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    interface = importlib.import_module("flash_attn.cute.interface")
    with FakeTensorMode():
        q, k, v = (torch.empty(1, seqlen_k, HEADS, head_dim, dtype=torch.bfloat16) for _ in range(3))
        interface._flash_attn_fwd(q, k, v, causal=mask == "causal")


def cutlass_example(head_dim: int, mask: str, seqlen_k: int) -> None:
    """As its command line compiles it with `--is_persistent`: with a mask for the tail where the length needs one."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream

    helpers = importlib.import_module("helpers.fmha_helpers")
    vars(helpers)["HardwareInfo"] = Chip
    masks = helpers.MaskEnum
    kind = masks.RESIDUAL_MASK if mask == "dense" and seqlen_k % TILE else masks.WINDOW_MASK
    example = importlib.import_module("fmha").BlackwellFusedMultiHeadAttentionForward
    float32 = cutlass.Float32
    kernel = example(float32, float32, (TILE, TILE), head_dim, True, kind, False, True)
    batch, rows, keys, heads = (cute.sym_int() for _ in range(4))

    def tensor(length: Any) -> Any:
        shape = batch, length, heads, 1, head_dim
        return make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=(4, 3, 2, 1, 0), assumed_align=16)

    sizes = 1, seqlen_k, seqlen_k, seqlen_k, HEADS, HEADS, head_dim, head_dim
    scale = head_dim**-0.5
    right = cutlass.Int32(0) if mask == "causal" else None
    none = (None,) * 4
    q, k, v, o = tensor(rows), tensor(keys), tensor(keys), tensor(rows)
    scales = scale * math.log2(math.e), scale, 1.0
    rest = None, None, right, None, None, make_fake_stream(), False
    cute.compile(kernel, q, k, v, o, sizes, *none, *scales, *rest, options="--opt-level=2")


def _without_package(*names: str) -> None:
    """Packages whose own `__init__` asks for a driver, or for packages that no kernel needs: their modules alone."""
    for name in names:
        module = types.ModuleType(name)
        places = (Path(place, *name.split(".")) for place in sys.path)
        module.__path__ = [str(place) for place in places if place.is_dir()]
        sys.modules[name] = module


def _stand_in(name: str, **content: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(content)
    sys.modules[name] = module


def _undecorated(*_: Any, **__: Any) -> Callable[[Any], Any]:
    return lambda function: function


def _flashinfer() -> None:
    _without_package("flashinfer", "flashinfer.cute_dsl", "flashinfer.cute_dsl.attention")
    _without_package("flashinfer.cute_dsl.attention.wrappers", "flashinfer.attention", "flashinfer.attention.prims_ts")
    _stand_in("flashinfer.utils", get_compute_capability=lambda _: (10, 0), require_cute_dsl_arch=None)
    _stand_in("flashinfer.api_logging", flashinfer_api=_undecorated, flashinfer_experimental_api=_undecorated)
    _stand_in("flashinfer.trace.templates.attention", cute_dsl_batch_prefill_run_trace=None)


def flashinfer_cute_dsl(head_dim: int, mask: str, seqlen_k: int) -> None:
    """`flashinfer.cute_dsl`: the persistent prefill kernel, which serves any length."""
    import cutlass

    _flashinfer()
    wrapper = importlib.import_module("flashinfer.cute_dsl.attention.wrappers.batch_prefill")
    spec = wrapper.MaskSpec(has_window_right=mask == "causal")
    dtype = cutlass.BFloat16
    wrapper._get_compiled_prefill_kernel(dtype, dtype, HEADS, HEADS, head_dim, spec, True, None, None)


def flashinfer_prims_ts(head_dim: int, mask: str, seqlen_k: int) -> None:
    """`flashinfer.attention.prims_ts`: the persistent context kernel, compiled for one length, with the scheduler that
    its plans pick for equal lengths at D 128."""
    import contextlib

    import torch

    _flashinfer()
    vars(torch.cuda).update(get_device_capability=lambda _: (10, 0), device=contextlib.nullcontext)
    context = importlib.import_module("flashinfer.attention.prims_ts.context")
    spec = context._ContextCompileSpec(
        device_index=0,
        max_seq_len_q=seqlen_k,
        max_seq_len_k=seqlen_k,
        num_qo_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=head_dim,
        qk_dtype_key="bfloat16",
        pv_dtype_key="bfloat16",
        output_dtype_key="bfloat16",
        mask_type=mask,
        window_left=-1,
        packed=False,
        head_paired=False,
        uniform_packed_lengths=False,
        has_q_offset=False,
        causal_single_kv_tile=False,
        packed_dense_k_mask=False,
        scheduler="clc_dynamic_persistent",
    )
    context._get_compiled_context(spec)


@dataclass(frozen=True)
class Peer:
    title: str
    compile: Callable[[int, str, int], None]
    head_dims: tuple[int, ...] = (64, 128)
    masks: tuple[str, ...] = ("dense", "causal")
    tail: bool = False  # a length that is no multiple of 128 makes another kernel


ALIGNED, RAGGED = 4096, 1040
PEERS = {
    "fa4": Peer("flash-attn-4", flash_attention_4, (64, 96, 128)),
    "cutlass": Peer("CUTLASS example", cutlass_example, tail=True),
    "flashinfer": Peer("FlashInfer, cute_dsl", flashinfer_cute_dsl),
    "prims_ts": Peer("FlashInfer, prims_ts", flashinfer_prims_ts, (128,), tail=True),
}


def kernels() -> dict[str, tuple[str, int, str, int]]:
    """By name the peer, head dim, mask and length of keys of each kernel."""
    found = {}
    for key, peer in PEERS.items():
        for head_dim in peer.head_dims:
            for mask in peer.masks:
                found[f"{key}-d{head_dim}-{mask}"] = key, head_dim, mask, ALIGNED
            if peer.tail:
                found[f"{key}-d{head_dim}-dense-tail"] = key, head_dim, "dense", RAGGED
    return found


def compile_one(name: str, paths: Iterable[Path]) -> None:
    """In a process that ends with it: the DSL writes the cubin where its environment says."""
    sys.path += [str(path) for path in paths]
    sys.modules.pop("fmha", None)  # NVIDIA's example has this name, too
    sys.path[:] = [place for place in sys.path if not (Path(place or ".") / "fmha" / "problem.py").exists()]
    import cutlass.utils

    vars(cutlass.utils)["HardwareInfo"] = Chip
    key, head_dim, mask, seqlen_k = kernels()[name]
    PEERS[key].compile(head_dim, mask, seqlen_k)


def compile_peer(name: str, paths: Sequence[Path]) -> Row:
    """ValueError, with the last that was said, if it leaves no cubin."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"CUTE_DSL_ARCH": ARCH, "CUTE_DSL_KEEP": "cubin", "CUTE_DSL_DUMP_DIR": folder}
        environment |= {"FLASH_ATTENTION_ARCH": "sm_100", "FLASH_ATTENTION_NUM_SMS": str(MULTIPROCESSORS)}
        environment |= {"PYTHONPATH": str(root)}
        command = [sys.executable, "-m", "perf.peers_blackwell", "--one", name, *map(str, paths)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        cubins = list(Path(folder).glob("*.cubin"))  # a launcher may fail behind it, for want of a driver
        if len(cubins) != 1:
            said = [line for line in (done.stderr + done.stdout).splitlines() if "rror" in line]
            raise ValueError(said[-1].strip() if said else f"{len(cubins)} cubins")
        return read(cubins[0])


# -- the file ----------------------------------------------------------------------------------------------------------


@functools.cache
def load(path: Path = TABLE) -> dict[str, Row]:
    """The committed rows, by name."""
    return {name: _row(found) for name, found in json.loads(path.read_text())["variants"].items()}


def head(path: Path = TABLE) -> dict[str, dict[str, str]]:
    """What the rows belong to: the compiler, the packages, and what was left out for which reason."""
    found = json.loads(path.read_text())
    return {key: found[key] for key in ("compiler", "packages", "left_out")}


def _row(found: Mapping[str, Any]) -> Row:
    loops = {
        "body": Code(**found["body"]),
        "masked": tuple(Code(**code) for code in found["masked"]),
        "roles": {role: Code(**code) for role, code in found["roles"].items()},
    }
    return Row(**(dict(found) | loops | {"setmaxnreg": tuple(found["setmaxnreg"])}))


def versions(peers: Path, cutlass: Path) -> dict[str, str]:
    found = {one.metadata["Name"]: one.version for one in metadata.distributions(path=[str(peers)])}
    wanted = ("flash-attn-4", "quack-kernels", "flashinfer-python")
    revision = subprocess.run(
        ["git", "-C", cutlass, "rev-parse", "--short=9", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return {name: found[name] for name in wanted} | {"NVIDIA/cutlass": revision}


def dump(packages: Mapping[str, str], rows: Mapping[str, Row], left_out: Mapping[str, str]) -> str:
    """As JSON, a kernel a line, with the compiler and the packages that the numbers belong to."""
    head = {"compiler": {"nvidia-cutlass-dsl": metadata.version("nvidia-cutlass-dsl")}, "packages": dict(packages)}
    head |= {"left_out": dict(left_out)}
    lines = ",\n".join(f'  "{name}": {json.dumps(asdict(row))}' for name, row in rows.items())
    return json.dumps(head, indent=1)[:-2] + f',\n "variants": {{\n{lines}\n }}\n}}\n'


# -- the command line --------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m perf.peers_blackwell",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--update", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument("--peers", type=Path, help="a folder with the packages")
    parser.add_argument("--cutlass", type=Path, help="a clone of NVIDIA/cutlass")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)  # a kernel and where its packages are
    chosen = parser.parse_args(arguments)
    if bool(chosen.peers) != bool(chosen.cutlass):
        parser.error("the peers are in both --peers and --cutlass")
    return chosen


def update(peers: Path | None, cutlass: Path | None) -> None:
    rows = {name: measure(*variant) for name, variant in ours().items()}
    if peers is None or cutlass is None:
        before = head()
        rows |= {name: row for name, row in load().items() if name in kernels()}
        TABLE.write_text(dump(before["packages"], rows, before["left_out"]))
        return
    example = cutlass.resolve() / EXAMPLE
    paths = [peers.resolve(), example, example / "cute/blackwell/kernel/attention/fmha"]
    left_out = {}
    for name in kernels():
        print(name, file=sys.stderr)
        try:
            rows[name] = compile_peer(name, paths)
        except (ValueError, LookupError) as error:
            left_out[name] = str(error)
            print(f"  {error}", file=sys.stderr)
    TABLE.write_text(dump(versions(peers, cutlass), rows, left_out))


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    if chosen.one:
        compile_one(chosen.one[0], map(Path, chosen.one[1:]))
        return 0
    if chosen.update:
        update(chosen.peers, chosen.cutlass)
        return 0
    committed = load()
    said = [
        words for name, variant in ours().items() for words in objections(name, measure(*variant), committed.get(name))
    ]
    print("\n".join(said), file=sys.stderr, end="\n" if said else "")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
