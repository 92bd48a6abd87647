"""Loops, common paths and waits, on small hand-written programs and on what the tools say about bad input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fmha.jit import sass
from fmha.jit.sass import Instruction, Loop, Wait


def assemble(text: str) -> list[Instruction]:
    """`[label:] [@predicate] OPCODE [operands]` a line; a label as an operand becomes its byte address."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    labels = {m[1]: 16 * i for i, line in enumerate(lines) if (m := re.match(r"(\w+):", line))}
    code = []
    for i, line in enumerate(lines):
        m = re.fullmatch(r"(?:\w+:\s*)?(@!?\w+)?\s*(\S+)\s*(.*)", line)
        assert m
        operands = ",".join(hex(labels[o]) if o in labels else o for o in m[3].split(",")) if m[3] else ""
        code.append(Instruction(i, m[1] or "", m[2], operands))
    return code


def loops(text: str) -> tuple[Loop, ...]:
    return sass.find_loops(assemble(text))


# 10 instructions a round; 2 more when the vote says so.
BODY = """
    {name}: HGMMA.64x128x16.F32.BF16 R24,gdesc[UR8],RZ,!UPT
    WARPGROUP.DEPBAR.LE gsb0,0x1
    FMNMX R2,R2,R3,!PT
    SHFL.BFLY PT,R3,R2,0x1,0x1f
    VOTE.ANY P0,P0
    {rare}
    {name}common: MUFU.EX2 R4,R4
    {mask}
    WARPGROUP.DEPBAR.LE gsb0,0x0
    @P1 BRA {name}
"""
INLINE = "@!P0 BRA {name}common\n WARPGROUP.DEPBAR.LE gsb0,0x0\n FMUL R5,R5,R6"


def body(name: str = "L", rare: str = INLINE, mask: str = "NOP") -> str:
    return BODY.format(name=name, rare=rare.format(name=name), mask=mask)


def test_a_detour_in_line_is_not_on_the_common_path() -> None:
    (loop,) = loops(body() + "EXIT")
    assert (loop.instructions, loop.common) == (12, 10)
    assert (loop.kinds["fma"], loop.all_kinds["fma"]) == (0, 1)
    assert loop.waits == (Wait(pending=1, maxima=0, ex2=0), Wait(pending=0, maxima=1, ex2=1))
    assert loop.softmax and not loop.early_retire


def test_a_detour_out_of_line_counts_in_the_loop_but_not_on_the_common_path() -> None:
    away = "EXIT\n far: WARPGROUP.DEPBAR.LE gsb0,0x0\n FMUL R5,R5,R6\n BRA Lcommon"
    (loop,) = loops(body(rare="@P0 BRA far") + away)
    assert (loop.instructions, loop.common) == (13, 10)
    assert loop.kinds["fma"] == 0
    assert len(loop.waits) == 2


def test_a_conditional_branch_without_predicate_prefix_falls_through() -> None:
    (loop,) = loops(body(rare="BRA P0,far") + "EXIT\n far: FMUL R5,R5,R6\n BRA Lcommon")
    assert (loop.instructions, loop.common) == (12, 10)


def test_a_barrier_retry_inside_leaves_the_loop_innermost() -> None:
    retry = "spin: SYNCS.PHASECHK.TRANS64.TRYWAIT P0,[UR6],R10\n @!P0 BRA spin"
    inner, outer = sorted(loops(body(rare=retry) + "EXIT"), key=lambda loop: loop.instructions)
    assert (inner.instructions, inner.softmax) == (2, False)
    assert (outer.common, outer.softmax) == (11, True)


def test_a_loop_over_work_tiles_is_not_the_softmax_loop() -> None:
    text = "work: HGMMA R1\n MUFU.EX2 R1,R1\n" + body() + "@P2 BRA work\n EXIT"
    found = loops(text)
    assert [loop.softmax for loop in found] == [False, True]
    assert found[1].common == 10


@pytest.mark.parametrize("masked_first", [True, False])
def test_the_body_is_the_loop_that_selects_least(masked_first: bool) -> None:
    masked, plain = body("M", mask="FSEL R1,R1,-INF,P6"), body("B")
    code = assemble((masked + plain if masked_first else plain + masked) + "EXIT")
    usage = {"REG": 168, "STACK": 0, "LOCAL": 0, "SHARED": 1024}
    found = sass.analyse("kernel", code, usage)
    assert found.body.kinds["select"] == 0
    assert [loop.kinds["select"] for loop in found.masked] == [1]
    assert found.body.address == (0xC0 if masked_first else 0)


def test_waiting_for_every_mma_before_the_row_maximum_is_early() -> None:
    (loop,) = loops(body().replace("gsb0,0x1", "gsb0,0x0", 1) + "EXIT")
    assert loop.early_retire


def test_bsync_joins_where_bssy_says() -> None:
    # The predicated branch leaves for a second BSYNC of the same barrier, which joins past the first.
    text = """
        BSSY B0,join
        @P0 BRA other
        FADD R1,R1,R1
        BSYNC B0
        join: @P1 BRA join
        EXIT
        other: FMUL R2,R2,R2
        BSYNC B0
    """
    code = assemble(text)
    assert sass.successors(code)[3] == [4]
    assert sass.successors(code)[7] == [4]


def test_unreachable_code_has_no_loops() -> None:
    assert loops("EXIT\n pad: BRA pad\n NOP") == ()


def test_an_indirect_branch_is_an_error() -> None:
    with pytest.raises(ValueError, match="indirect"):
        loops("BRX R4\n EXIT")


def test_counts_of_a_function() -> None:
    text = (
        "USETMAXREG.TRY_ALLOC.CTAPOOL UP0,0xf0\n USETMAXREG.DEALLOC.CTAPOOL 0x18\n LDL R1,[R2]\n STL.64 [R2],R4\n EXIT"
    )
    usage = {"REG": 168, "STACK": 16, "LOCAL": 8, "SHARED": 1024}
    found = sass.analyse("kernel", assemble(text), usage)
    assert found.setmaxnreg == (24, 240)
    assert (found.local_loads, found.local_stores, found.spills) == (1, 1, 2)
    assert (found.registers, found.stack_bytes, found.static_smem_bytes) == (168, 24, 1024)
    with pytest.raises(LookupError, match="no loop of kernel"):
        _ = found.body


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("mma", "HGMMA.64x128x16.F32.BF16 R24,gdesc[UR8],R24,gsb0"),
        ("ex2", "MUFU.EX2 R4,R4"),
        ("other", "MUFU.RCP R4,R4"),
        ("fma", "FFMA R4,R4,UR7,-R8"),
        ("fma", "FADD.FTZ R4,R4,R8"),
        ("max", "FMNMX R4,R4,R5,!PT"),
        ("convert", "F2FP.BF16.F32.PACK_AB R4,R5,R6"),
        ("move", "MOV R4,R5"),
        ("move", "IMAD.MOV.U32 R4,RZ,RZ,R5"),
        ("move", "IMAD.U32 R4,RZ,RZ,UR5"),
        ("move", "R2UR UR8,R4"),
        ("other", "IMAD.SHL.U32 R4,R5,0x2,RZ"),
        ("other", "IMAD.IADD R4,R5,0x1,R6"),
        ("select", "FSEL R4,R5,-INF,P0"),
        ("other", "USEL UR4,UR5,URZ,UP0"),
        ("compare", "FSETP.GT.AND P0,PT,R4,R5,PT"),
        ("shuffle", "SHFL.BFLY PT,R4,R5,0x1,0x1f"),
        ("barrier", "BAR.SYNC.DEFER_BLOCKING R2,0x100"),
        ("barrier", "SYNCS.ARRIVE.TRANS64.A1T0 RZ,[UR6],RZ"),
        ("barrier", "WARPGROUP.ARRIVE"),
        ("local", "LDL.64 R4,[R1]"),
        ("local", "STL [R1+0x4],R4"),
        ("branch", "BRA 0x40"),
    ],
)
def test_kinds(kind: str, text: str) -> None:
    assert assemble(text)[0].kind == kind


def test_resource_usage_is_read_by_function() -> None:
    text = (
        "Resource usage:\n Common:\n  GLOBAL:0\n"
        " Function a:\n  REG:168 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:1204 TEXTURE:0\n"
        " Function b:\n  REG:12 STACK:8 SHARED:0 LOCAL:4\n"
    )
    usage = sass.resource_usage(text)
    assert (usage["a"]["REG"], usage["a"]["SHARED"], usage["a"]["CONSTANT"]) == (168, 1024, 1204)
    assert (usage["b"]["STACK"], usage["b"]["LOCAL"]) == (8, 4)


@pytest.mark.parametrize("cubin", [b"", b"no ELF file", b"\x7fELF" + bytes(200)])
def test_what_is_no_cubin_is_an_error(cubin: bytes) -> None:
    with pytest.raises(ValueError, match="cannot read it"):
        sass.read(cubin)


def test_a_missing_file_is_an_error() -> None:
    with pytest.raises(ValueError, match="no such file"):
        sass.read("nowhere.cubin")


def test_a_tool_comes_from_its_package_or_the_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert sass.tool("nvdisasm").name == "nvdisasm"
    monkeypatch.setitem(sass.TOOLS, "nvdisasm", "no-such-package-here")
    with pytest.raises(sass.MissingTool, match="pip install no-such-package-here"):
        sass.tool("nvdisasm")
    (tmp_path / "nvdisasm").touch(mode=0o755)
    assert sass.tool("nvdisasm") == tmp_path / "nvdisasm"


# -- tensor memory, and indirect branches ---------------------------------------------------------------------------

LISTING = """
\t.section\t.text.other,"ax",@progbits
.L_x_1:
        /*0000*/                   EXIT ;
\t.section\t.text.kernel,"ax",@progbits
.text.kernel:
        /*0000*/                   LDC R2, c[0x2][R4] ;
.L_x_7:
        /*0010*/                   BRX R2 -0x20     (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);
.L_x_1:
        /*0020*/                   NOP ;
.L_x_2:
        /*0030*/                   EXIT ;
"""


def test_the_targets_of_an_indirect_branch_are_in_the_listing() -> None:
    assert sass.branch_targets(LISTING, "kernel") == {1: (2, 3)}


def test_softmax_and_correction_are_told_apart_without_an_mma() -> None:
    softmax = "S: LDTM.x8 R4,tmem[UR4]\n" + "FMNMX3 R1,R1,R4,R5,!PT\n" * 4 + "MUFU.EX2 R4,R4\n" * 8
    softmax += "F2FP.BF16.F32.PACK_AB R4,R5,R4\n" * 4 + "STTM.x4 tmem[UR4],R4\n @P0 BRA S\n"
    correction = "C: LDTM.x16 R4,tmem[UR4]\nMUFU.EX2 R2,R2\nFMUL2 R4,R4,R2\nSTTM.x16 tmem[UR4],R4\n @P0 BRA C\n"
    found = sass.find_loops(assemble(softmax + correction + "EXIT"))
    assert [(loop.softmax, loop.columns) for loop in found] == [(True, 8), (False, 16)]


def test_copies_of_the_body_are_no_masked_loops() -> None:
    def loop(name: str, masks: int) -> str:
        code = f"{name}: LDTM.x4 R4,tmem[UR4]\n" + "FMNMX3 R1,R1,R4,R5,!PT\n" * 2 + "MUFU.EX2 R4,R4\n" * 4
        return code + "ISETP.GT.AND P1,PT,R9,R8,PT\n" * masks + f" @P0 BRA {name}\n"

    code = assemble(loop("A", 0) + loop("B", 4) + loop("C", 0) + loop("D", 4) + "EXIT")
    usage = {"REG": 128, "STACK": 0, "LOCAL": 0, "SHARED": 0}
    found = sass.analyse("kernel", code, usage)
    assert len(found.bodies) == len(found.masked) == 2
    assert {loop.kinds["compare"] for loop in found.masked} == {4}
