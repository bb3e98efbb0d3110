"""What is read from machine code is what stands there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels import sass_budgets
from tests.kernels.sass import (
    Loop,
    innermost_loops,
    overwritten_operands,
    unwritten_registers,
)

PRODUCT = "HGMMA.64x128x16.F32.BF16 R88, R184, gdesc[UR16].tnspB, R88, gsb0"
FROM_MEMORY = "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, !UPT, gsb0"
WAIT, WAIT_FOR_ALL_BUT_ONE = (
    "WARPGROUP.DEPBAR.LE gsb0, 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x1",
)  # fmt: skip


@pytest.mark.parametrize(
    ("code", "overwritten"),
    [
        ([PRODUCT, "FADD R184, R1, R2", WAIT], ["FADD R184, R1, R2"]),
        ([PRODUCT, "F2FP.BF16.F32.PACK_AB R187, R1, R2", WAIT], [
            "F2FP.BF16.F32.PACK_AB R187, R1, R2"
        ]),
        ([PRODUCT, WAIT, "FADD R184, R1, R2"], []),
        ([PRODUCT, "FADD R188, R184, R2", WAIT], []),  # another register; reading is allowed
        ([PRODUCT, "LDS.128 R181, [R5]", WAIT], ["LDS.128 R181, [R5]"]),  # R181 ... R184
        ([PRODUCT, "STS.128 [R184], R184", WAIT], []),
        ([PRODUCT, "ISETP.GE.AND P0, PT, R184, R3, PT", WAIT], []),
        ([PRODUCT, FROM_MEMORY, WAIT_FOR_ALL_BUT_ONE, "FADD R184, R1, R2"], []),
        ([FROM_MEMORY, PRODUCT, WAIT_FOR_ALL_BUT_ONE, "FADD R184, R1, R2"], ["FADD R184, R1, R2"]),
        ([PRODUCT, "@ BRA `(.L_x_1)", "FADD R184, R1, R2"], ["FADD R184, R1, R2"]),
        ([PRODUCT, "BRA `(.L_x_1)", "FADD R184, R1, R2"], []),  # not followed
        (["HGMMA.64x128x16.F32.BF16 R88, R184, gdesc[UR16], R88", "MOV R185, R1", PRODUCT], [
            "MOV R185, R1"
        ]),
    ],
)  # fmt: skip
def test_operands_must_hold_still_until_they_are_waited_for(
    code: list[str], overwritten: list[str]
) -> None:
    assert overwritten_operands(code) == overwritten


@pytest.mark.parametrize(
    ("code", "unwritten"),
    [
        (["UMOV UR4, 0x400", "UIADD3 UR5, UP0, UR4, 0x20, URZ"], []),
        (["UIADD3 UR5, UP0, UR5, 0x20, URZ"], ["UIADD3 UR5, UP0, UR5, 0x20, URZ"]),
        (["ULDC.64 UR4, c[0x0][0x208]", "UMOV UR6, UR5"], []),  # both of a pair
        (["ULDC UR4, c[0x0][0x208]", "UMOV UR6, UR5"], ["UMOV UR6, UR5"]),
        (["@ BRA `(.L_end)", "UMOV UR4, 0x400", "UMOV UR5, UR4"], ["UMOV UR5, UR4"]),  # 2: .L_end
        (["@ BRA `(.L_end)", "UMOV UR4, 0x400", "EXIT"], []),
        (["R2UR P0, UR8, R8", "UMOV UR6, UR8"], []),
        (["UMOV UR4, 0x1", "ULOP3.LUT UP0, UR8, UR4, 0x1, URZ, 0xc0, !UPT", "UMOV UR6, UR8"], []),
    ],
)  # fmt: skip
def test_uniform_registers_are_written_before_they_are_read(
    code: list[str], unwritten: list[str]
) -> None:
    assert unwritten_registers(code, {".L_end": 2}) == unwritten


def test_loops_are_innermost_and_multiply() -> None:
    code = [
        "MOV R1, R2",
        FROM_MEMORY,  # 1: .L_outer
        "LDL R3, [R1]",  # 2: .L_inner
        "@ BRA `(.L_wait)",
        PRODUCT,  # 4: .L_waited
        "@ BRA `(.L_inner)",
        "@ BRA `(.L_outer)",
        "FADD R1, R2, R3",  # 7: .L_sum, which multiplies nothing
        "@ BRA `(.L_sum)",
        "@ BRA `(.L_ahead)",
        "EXIT",  # 10: .L_ahead
        "SYNCS R1",  # 11: .L_wait, the body of a wait, out of line
        "@ BRA `(.L_wait)",
        "BRA `(.L_waited)",
    ]
    labels = {".L_outer": 1, ".L_inner": 2, ".L_waited": 4, ".L_sum": 7, ".L_ahead": 10}
    labels[".L_wait"] = 11
    assert innermost_loops(code, labels) == [Loop(length=4 + 3, local=1, products=1)]


def test_the_hot_loop_is_the_shortest_that_multiplies_much() -> None:
    loops = [
        {"length": 300, "local": 0, "products": 4},
        {"length": 450, "local": 0, "products": 16},
        {"length": 700, "local": 9, "products": 16},
    ]
    assert sass_budgets.hot_loop(loops) == Loop(450, 0, 16)
    assert sass_budgets.hot_loop([]) is None
    kernels = [{"kernel": "a", "loops": loops, "spilled_bytes": 8}, {"kernel": "b", "loops": []}]
    assert sass_budgets.measured(kernels) == {"a": [450, 16, 8]}
