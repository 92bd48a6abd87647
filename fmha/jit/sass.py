"""What a cubin costs, read from its machine code: registers, stack, spills, and the instructions of every loop.

`read` disassembles with `nvdisasm` and takes the resource usage from `cuobjdump`. Loops are the natural loops of the
control-flow graph (a branch back to a block that dominates it). A loop's *common path* is its shortest way round: rare
detours, such as the rescale behind a vote or the retries of a barrier wait, are not on it, wherever the compiler placed
them.
"""

from __future__ import annotations

import heapq
import json
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from fmha.jit.key import LISTER

TOOLS = {"nvdisasm": "nvidia-cuda-nvdisasm", "cuobjdump": "nvidia-cuda-cuobjdump"}  # tool: PyPI package
INSTRUCTION_BYTES = 16  # sm_70 and later

# The first pattern that matches "OPCODE operands" names the kind; none is "other".
KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("mma", r"[HQI]GMMA|UTC\w*MMA"),
        ("ex2", r"MUFU\.EX2"),
        ("move", r"U?MOV\b|IMAD\.MOV|[IU]\w*MAD\.\w+ \w+,RZ,RZ|HFMA2\S* \w+,-RZ,RZ|R2UR|CS2R"),
        ("fma", r"(FFMA|FADD|FMUL)2?\b"),
        ("max", r"FMNMX|VIMNMX"),
        ("convert", r"F2F|F2I|I2F"),
        ("tmem", r"LDTM|STTM"),  # tensor memory, which a Blackwell MMA writes
        ("compare", r"U?[FI]SETP"),
        ("select", r"FSEL"),  # of a float: a mask. An integer SEL advances a ring slot
        ("shuffle", r"SHFL|VOTE"),
        ("barrier", r"(UTC)?BAR\b|SYNCS|WARPGROUP|WARPSYNC|DEPBAR|MEMBAR|FENCE|NANOSLEEP"),
        ("local", r"LDL|STL"),
        ("branch", r"BRA\b|BRX|BSSY|BSYNC|CALL|RET|EXIT"),
    )
)


class MissingTool(RuntimeError):
    """A program that reads machine code is not installed."""


@dataclass(frozen=True)
class Wait:
    """A wait for the MMAs of a warpgroup (`WARPGROUP.DEPBAR`), and how far the softmax has come by then."""

    pending: int  # groups that may still be in flight after it
    maxima: int  # instructions for the row maximum on the loop's common path before it
    ex2: int  # exponentials before it


@dataclass(frozen=True)
class Loop:
    """A natural loop. Nested loops are counted in the outer one too."""

    address: int  # of its first instruction, in bytes from the start of the function
    instructions: int  # all of them
    common: int  # on the common path
    kinds: Mapping[str, int]  # of the common path, by kind
    all_kinds: Mapping[str, int]  # of all instructions, by kind
    waits: tuple[Wait, ...]  # on the common path
    innermost: bool  # it works on a KV tile, and holds no other loop that does
    opcodes: Mapping[str, int] = field(default_factory=dict)  # of the common path, by name without modifiers
    columns: int = 0  # of tensor memory that a thread loads on the common path

    @property
    def softmax(self) -> bool:
        """It exponentiates scores, of its own MMAs or from tensor memory: the loop over KV tiles."""
        return self.innermost and self.all_kinds["ex2"] > 0

    @property
    def masking(self) -> tuple[int, int]:
        """How much it masks: selects, then compares, for an integer SEL behind an ISETP can do the work of an FSEL."""
        return self.kinds["select"], self.kinds["compare"]

    @property
    def early_retire(self) -> bool:
        """It waits for every MMA before the first exponential, so that these do not overlap."""
        return any(wait.pending == wait.ex2 == 0 for wait in self.waits)


@dataclass(frozen=True)
class Resources:
    """One kernel of a cubin."""

    function: str
    registers: int  # per thread, as launched
    setmaxnreg: tuple[int, ...]  # per thread, each distinct `setmaxnreg` of a role, ascending
    stack_bytes: int  # per thread
    static_smem_bytes: int  # dynamic shared memory is a launch argument: `BlockConfig.smem_bytes`
    instructions: int
    local_loads: int  # LDL: spills read back
    local_stores: int  # STL
    loops: tuple[Loop, ...]  # by address

    @property
    def softmax_loops(self) -> tuple[Loop, ...]:
        """The loops over KV tiles, the ones with the fewest selects first; of equals, the fewest compares."""
        return tuple(sorted((loop for loop in self.loops if loop.softmax), key=lambda loop: loop.masking))

    @property
    def body(self) -> Loop:
        """The loop over unmasked KV tiles: the one that selects least. LookupError if there is no softmax loop."""
        if not (loops := self.softmax_loops):
            raise LookupError(f"no loop of {self.function} has both an MMA and an EX2")
        return loops[0]

    @property
    def bodies(self) -> tuple[Loop, ...]:
        """The body, and its copies where each softmax warpgroup has code of its own."""
        return tuple(loop for loop in self.softmax_loops if loop.masking == self.body.masking)

    @property
    def masked(self) -> tuple[Loop, ...]:
        """The loops over masked KV tiles, which select per score."""
        return tuple(loop for loop in self.softmax_loops if loop.masking > self.body.masking)

    @property
    def spills(self) -> int:
        """Local loads and stores."""
        return self.local_loads + self.local_stores


def read(cubin: bytes | str | Path, function: str | None = None) -> Resources:
    """The resources of a cubin's only kernel beside the one that lists sequences, or of the one named `function`.

    `cubin` is the file's content or its path. ValueError if it is no cubin or holds other kernels than asked for,
    MissingTool if the disassembler is not installed.
    """
    if isinstance(cubin, bytes):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernel.cubin"
            path.write_bytes(cubin)
            return read(path, function)
    path = Path(cubin)
    name, code = _code(path, function)
    return analyse(name, code, resource_usage(_output("cuobjdump", "-res-usage", path))[name])


def disassemble(path: Path, function: str | None = None) -> list[Instruction]:
    """The instructions of the kernel that `read` would report on. Errors likewise."""
    return _code(path, function)[1]


def analyse(name: str, code: Sequence[Instruction], usage: Mapping[str, int]) -> Resources:
    """Resources of a disassembled function and its resource usage."""
    opcodes = Counter(instruction.opcode.split(".")[0] for instruction in code)
    return Resources(
        function=name,
        registers=usage["REG"],
        setmaxnreg=tuple(sorted({i.immediate() for i in code if i.opcode.startswith("USETMAXREG")})),
        stack_bytes=usage["STACK"] + usage["LOCAL"],
        static_smem_bytes=usage["SHARED"],
        instructions=len(code),
        local_loads=opcodes["LDL"],
        local_stores=opcodes["STL"],
        loops=find_loops(code),
    )


# -- disassembly -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """One SASS instruction. Branch targets are byte addresses, `index` counts instructions."""

    index: int
    predicate: str
    opcode: str
    operands: str
    targets: tuple[int, ...] = ()  # of an indirect branch, by index

    @classmethod
    def parse(cls, index: int, raw: Mapping[str, Any]) -> Instruction:
        """From an entry of `sass-instructions` in nvdisasm's JSON."""
        return cls(index, raw.get("predicate", ""), raw["opcode"], raw.get("operands", ""))

    @property
    def kind(self) -> str:
        text = f"{self.opcode} {self.operands}"
        return next((kind for kind, pattern in KINDS if pattern.match(text)), "other")

    def immediate(self) -> int:
        """The last operand as a number."""
        return int(self.operands.split(",")[-1], 0)

    @property
    def indirect(self) -> bool:
        return self.opcode.split(".")[0] in ("BRX", "BRXU", "JMX", "JMXU")

    def target(self) -> int:
        """Index of the instruction that a branch goes to. ValueError for an indirect branch."""
        try:
            if self.indirect:
                raise ValueError
            return self.immediate() // INSTRUCTION_BYTES
        except ValueError:
            raise ValueError(f"{self.opcode} {self.operands}: an indirect branch, its loops cannot be found") from None

    @property
    def conditional(self) -> bool:
        return bool(self.predicate) or "," in self.operands


def tool(name: str) -> Path:
    """The path of `nvdisasm` or `cuobjdump`: from PyPI, else a CUDA toolkit's on the PATH. MissingTool if neither."""
    package = TOOLS[name]
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == name and (path := Path(str(file.locate()))).is_file():
            return path
    if found := shutil.which(name):
        return Path(found)
    raise MissingTool(f"{name} is not installed; it comes with: python -m pip install {package}")


def _output(name: str, option: str | None, path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"cubin {str(path)!r}: no such file")
    done = subprocess.run([tool(name), *([option] if option else []), path], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ValueError(f"cubin {str(path)!r}: {name} cannot read it: {said[-1] if said else done.returncode}")
    return done.stdout


def _code(path: Path, function: str | None) -> tuple[str, list[Instruction]]:
    """The name of a cubin's only kernel, or of the one asked for, and its instructions."""
    functions: dict[str, Any] = {
        entry["function-name"]: entry for entry in json.loads(_output("nvdisasm", "--emit-json", path))[1]
    }
    others = [name for name in functions if not name.startswith(LISTER)]
    name = function if function or len(others) != 1 else others[0]
    if name is None or name not in functions:
        raise ValueError(f"function {function!r}: {path.name} holds {sorted(functions)}; name one of them")
    code = [Instruction.parse(i, raw) for i, raw in enumerate(functions[name]["sass-instructions"])]
    if any(instruction.indirect for instruction in code):
        targets = branch_targets(_output("nvdisasm", None, path), name)
        code = [replace(here, targets=targets.get(here.index, ())) for here in code]
    return name, code


def branch_targets(text: str, function: str) -> dict[int, tuple[int, ...]]:
    """Of a function in nvdisasm's listing: where each of its indirect branches may go, all by index.

    The JSON has no such thing, the listing has it as labels in a comment behind the branch.
    """
    labels: dict[str, int] = {}
    branches: dict[int, list[str]] = {}
    waiting: list[str] = []  # labels that stand before the next instruction
    inside = False
    for line in text.splitlines():
        if section := re.match(r"\s*\.section\s+([^\s,]+)", line):
            inside = section[1] == f".text.{function}"
        elif inside and (label := re.match(r"(\.L\w+):", line)):
            waiting.append(label[1])
        elif inside and (found := re.match(r"\s*/\*([0-9a-f]{4,})\*/\s+\S", line)):
            index = int(found[1], 16) // INSTRUCTION_BYTES
            labels.update(dict.fromkeys(waiting, index))
            waiting = []
            if names := re.search(r"BRANCH_TARGETS ([^\"]+)", line):
                branches[index] = [name.strip() for name in names[1].split(",")]
    return {index: tuple(sorted({labels[name] for name in names})) for index, names in branches.items()}


def resource_usage(text: str) -> dict[str, dict[str, int]]:
    """By function, the fields of `cuobjdump -res-usage`: REG, STACK, SHARED, LOCAL, ..."""
    found = re.findall(r"Function (\S+):\s*\n\s*(.+)", text)
    return {name: {field: int(n) for field, n in re.findall(r"(\w+)(?:\[\d+\])?:(\d+)", line)} for name, line in found}


# -- control flow ------------------------------------------------------------------------------------------------------


def successors(code: Sequence[Instruction]) -> list[list[int]]:
    """For each instruction those that may follow it, by index.

    A call is taken to return. BSYNC goes where the BSSY before it of the same barrier says, which is past that BSYNC.
    """
    follow: list[list[int]] = []
    joins: dict[str, int] = {}
    for here in code:
        name = here.opcode.split(".")[0]
        after = [here.index + 1] if here.index + 1 < len(code) else []
        if name == "BSSY":
            joins[here.operands.split(",")[0]] = here.target()
        if here.targets:
            after = [*here.targets, *(after if here.predicate else [])]
        elif here.indirect or name in ("BRA", "JMP"):
            after = ([here.target()] if here.target() < len(code) else []) + (after if here.conditional else [])
        elif name == "BSYNC":
            after = [joins[here.operands.split(",")[-1]]] + (after if here.predicate else [])
        elif name in ("EXIT", "RET", "KILL"):
            after = after if here.predicate else []
        follow.append(after)
    return follow


class Graph:
    """Basic blocks, by the index of their first instruction, reachable from the first one."""

    def __init__(self, code: Sequence[Instruction]) -> None:
        follow = successors(code)
        leaders = {0} | {to for i, after in enumerate(follow) if after != [i + 1] for to in after}
        leaders |= {i + 1 for i, after in enumerate(follow) if after != [i + 1] and i + 1 < len(code)}
        starts = sorted(leaders)
        self.blocks = {a: code[a:b] for a, b in zip(starts, [*starts[1:], len(code)], strict=True)}
        self.after = {start: follow[block[-1].index] for start, block in self.blocks.items()}
        self.order = self._reverse_postorder()
        self.before: dict[int, list[int]] = {start: [] for start in self.order}
        for start in self.order:
            for to in self.after[start]:
                self.before[to].append(start)

    def _reverse_postorder(self) -> list[int]:
        seen, order, stack = {0}, [], [(0, iter(self.after[0]))]
        while stack:
            start, rest = stack[-1]
            if (to := next((t for t in rest if t not in seen), None)) is None:
                order.append(start)
                stack.pop()
            else:
                seen.add(to)
                stack.append((to, iter(self.after[to])))
        return order[::-1]

    def dominators(self) -> dict[int, set[int]]:
        """For each block those through which every way to it leads, itself included."""
        found = {start: set(self.order) for start in self.order}
        found[0] = {0}
        changed = True
        while changed:
            changed = False
            for start in self.order[1:]:
                common = set.intersection(*(found[b] for b in self.before[start])) | {start}
                changed |= common != found[start]
                found[start] = common
        return found

    def loops(self) -> dict[int, set[int]]:
        """The blocks of each natural loop, by its header."""
        dominators = self.dominators()
        loops: dict[int, set[int]] = {}
        for latch in self.order:
            for header in set(self.after[latch]) & dominators[latch]:
                members = loops.setdefault(header, {header})
                todo = [latch]
                while todo:
                    if (block := todo.pop()) not in members:
                        members.add(block)
                        todo += self.before[block]
        return loops

    def shortest_round(self, header: int, members: set[int]) -> list[int]:
        """The way from the header back to it, inside the loop, that has the fewest instructions."""
        queue = [(len(self.blocks[header]), [header])]
        done = set()
        while queue:
            length, path = heapq.heappop(queue)
            if header in self.after[path[-1]]:
                return path
            if path[-1] in done:
                continue
            done.add(path[-1])
            for to in members.intersection(self.after[path[-1]]) - done:
                heapq.heappush(queue, (length + len(self.blocks[to]), [*path, to]))
        raise ValueError(f"no way round the loop at {header * INSTRUCTION_BYTES:#x}")


def find_loops(code: Sequence[Instruction]) -> tuple[Loop, ...]:
    """Every natural loop of a function, by address."""
    graph = Graph(code)
    loops = graph.loops()

    def instructions(blocks: Iterable[int]) -> list[Instruction]:
        return [instruction for block in blocks for instruction in graph.blocks[block]]

    rounds = {
        header: (instructions(members), instructions(graph.shortest_round(header, members)))
        for header, members in sorted(loops.items())
    }
    works = {header for header, (everything, common) in rounds.items() if _works(everything, common)}
    found = []
    for header, (everything, common) in rounds.items():
        found.append(
            Loop(
                address=header * INSTRUCTION_BYTES,
                instructions=len(everything),
                common=len(common),
                kinds=_kinds(common),
                all_kinds=_kinds(everything),
                waits=_waits(common),
                innermost=works & loops[header] == {header},
                opcodes=Counter(instruction.opcode.split(".")[0] for instruction in common),
                columns=sum(map(_columns, common)),
            )
        )
    return tuple(found)


def _kinds(code: Iterable[Instruction]) -> dict[str, int]:
    counts = Counter(instruction.kind for instruction in code)
    return {kind: counts[kind] for kind in [*(kind for kind, _ in KINDS), "other"]}


def _works(everything: Sequence[Instruction], common: Sequence[Instruction]) -> bool:
    """A loop works on KV tiles: it multiplies, or it loads scores from tensor memory on every round, and has an
    exponential or a maximum for every fourth of them. Correction loads as much, of O, but exponentiates once a row."""
    kinds, columns = _kinds(common), sum(map(_columns, common))
    softmax = kinds["ex2"] > 0 and 4 * (kinds["ex2"] + kinds["max"]) >= columns > 0
    return softmax or _kinds(everything)["mma"] > 0


def _columns(instruction: Instruction) -> int:
    """Columns of tensor memory that a thread gets from an LDTM; of another instruction, none."""
    found = re.match(r"LDTM(?:\.\w+)*?\.x(\d+)", instruction.opcode)
    return int(found[1]) if found else 0


def _waits(path: Iterable[Instruction]) -> tuple[Wait, ...]:
    waits, maxima, ex2 = [], 0, 0
    for instruction in path:
        maxima += instruction.kind == "max"
        ex2 += instruction.kind == "ex2"
        if instruction.opcode.startswith("WARPGROUP.DEPBAR"):
            waits.append(Wait(pending=instruction.immediate(), maxima=maxima, ex2=ex2))
    return tuple(waits)
