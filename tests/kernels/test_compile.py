"""Every Triton kernel compiles for every architecture, fits it, and loops in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
import triton

from tests.kernels import (
    compile_cases,
    compile_cases_gluon,
    compile_cases_mma,
    compile_cases_paged,
    compile_cases_quantised,
    compile_cases_recurrent,
    compile_cases_step,
    compile_elsewhere,
    ptx_barriers,
    ptx_flags,
    sass,
    sass_budgets,
)
from tests.kernels.compile_cases import Case
from tests.kernels.compile_cases_gluon import GluonCase
from tests.kernels.compile_cases_mma import MmaCase

CASES = [
    *compile_cases.CASES, *compile_cases_paged.CASES, *compile_cases_quantised.CASES,
    *compile_cases_recurrent.CASES, *compile_cases_step.CASES,
]  # fmt: skip
HOPPER_CASES = compile_cases_gluon.CASES
MMA_CASES = compile_cases_mma.CASES
ELSEWHERE = compile_elsewhere.CASES

_ROOT = Path(__file__).parents[2]
_CACHE = _ROOT / ".cache" / "triton-compile"
# Shared memory that one program may have, bytes (CUDA programming guide, compute capabilities).
_SHARED_LIMIT = {
    80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 103: 232448, 120: 101376,
}  # fmt: skip
# Part of a loop's instructions that may touch local memory: none to speak of in the loop that runs
# most, the unmasked one; a few in the loops over boundary tiles.
_LOCAL_SHARE, _LOCAL_SHARE_MASKED = 0.01, 0.10
_MMA = dict.fromkeys((80, 86, 89, 120), "mma.sync") | {90: "wgmma.mma_async"}
_MMA |= dict.fromkeys((100, 103), "tcgen05.mma")


_compiled: dict[str, list[dict[str, Any]]] = {}  # what was said of each case


def _run_worker(names: list[str]) -> tuple[list[dict[str, Any]], int]:
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(_CACHE)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_worker", *names],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(done.stderr[-4000:])
    _read_machine_code([line for line in lines if "cubin" in line])
    return lines, done.returncode


def _read_machine_code(kernels: list[dict[str, Any]]) -> None:
    """Add what stands in the machine code: loops and operands are those of products."""
    for kernel in kernels:
        kernel |= {"local_shares": [], "loops": [], "operands": [], "unwritten": []}
    multiply = [kernel for kernel in kernels if kernel["mma"] and "cubin" in kernel]
    for arch in {kernel["arch"] for kernel in multiply}:
        some = [kernel for kernel in multiply if kernel["arch"] == arch]
        codes = sass.disassemble_all([Path(kernel["cubin"]) for kernel in some], arch)
        for kernel, (instructions, labels) in zip(some, codes, strict=True):
            loops = sass.innermost_loops(instructions, labels)
            kernel["local_shares"] = [loop.local / loop.length for loop in loops]
            kernel["loops"] = [asdict(loop) for loop in loops]
            kernel["operands"] = sass.overwritten_operands(instructions)
            if arch == 90:
                kernel["unwritten"] = sass.unwritten_registers(instructions, labels)


def run_cases(names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Compile cases, each once; when one aborts the process, go on after it."""
    waiting = [name for name in names if name not in _compiled]
    while waiting:
        lines, status = _run_worker(waiting)
        begun = [line["case"] for line in lines if "begins" in line]
        _compiled.update((name, []) for name in begun)
        for line in lines:
            if "begins" not in line:
                _compiled[line["case"]].append(line)
        if status != 0:
            _compiled[begun[-1]].append({"error": f"the compiler ended with status {status}"})
        waiting = waiting[len(begun) :]
    return {name: _compiled[name] for name in names}


# Cases of which the everyday run has a neighbour: the same kernel with other features, another part
# of the same pass, or the same loop for another architecture. Backward passes and recurrences take
# longest: `make compile-matrix` compiles them, and the interpreter and the emulator run them here.
_SELDOM = frozenset({
    "sm_80-dkdv-d128-causal-64x64x8x2", "sm_90-fwd-d128-causal-64x64x4x3",
    "sm_90-dq-everything-d128-64x64x4x2", "sm_90-dbias-everything-d128",
    "sm_90-fwd-odd-d20-10-64x64x4x3", "sm_90-fwd-odd-address-d64-16", "sm_90-dbias-bias-d32",
    "sm_100-dkdv-d128-causal-64x64x8x2", "sm_80-paged-decode", "sm_90-paged-decode-d512",
    "sm_90-paged-decode-int8", "sm_90-paged-tree", "sm_90-paged-shared",
    "sm_90-gluon-decode-e4m3", "sm_90-mla-128-heads", "sm_80-quantised-int4-row",
    "sm_90-quantised-early-1", "recurrent-kimi-sm_90", "sm_90-shared-sums-4096-4",
    "sm_90-linear-4096", "sm_90-invariant-linear-bfloat16", "sm_90-experts-300-bf16",
    "sm_90-adjust_logits-151936", "sm_90-gluon-linear-parts", "sm_90-gluon-linear-early",
    "sm_90-gluon-linear-odd", "sm_90-gluon-many-bias-fp16", "sm_80-mma-fwd-d64-full",
    "sm_89-mma-fwd-d128-everything", "sm_80-mma-bwd-d128-causal",
    # These took 57 of the 104 seconds of a core of the everyday cases.
    "recurrent-delta-sm_90", "recurrent-mamba-sm_80", "convolution-sm_90",
    "sm_90-dkdv-everything-d128-32x64x4x3", "sm_90-gluon-bwd-d128-causal",
    "sm_89-mma-bwd-d64-everything", "sm_90-gluon-mla-128-heads", "sm_90-experts-300-mxfp4",
    "sm_90-elementwise-d128", "sm_90-paged-prefill-e4m3", "sm_120-mma-fwd-d128-causal",
})  # fmt: skip


def is_slow(case: Any) -> bool:
    """Whether a case is compiled with the slow tests alone."""
    return case.slow or case.name in _SELDOM


def _reports(slow: bool) -> dict[str, list[dict[str, Any]]]:
    """Compile all that are slow, or all others, in one process: torch and Triton load once."""
    cases = [*CASES, *HOPPER_CASES, *MMA_CASES, *ELSEWHERE]
    return run_cases([case.name for case in cases if is_slow(case) == slow])


def _marked(cases: list[Any]) -> list[Any]:
    return [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] if is_slow(case) else [])
        for case in cases
    ]


def test_cases_that_are_compiled_seldom_are_there() -> None:
    names = {case.name for case in [*CASES, *HOPPER_CASES, *MMA_CASES] if not case.slow}
    assert names > _SELDOM


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", _marked(CASES))
def test_compiles_without_a_gpu(case: Case) -> None:
    kernels = _reports(is_slow(case))[case.name]
    assert kernels, "the launcher launched nothing"
    for kernel in kernels:
        assert "error" not in kernel, kernel["error"]
        assert kernel["shared"] <= _SHARED_LIMIT[case.arch], kernel
        assert not kernel["unwritten"], kernel
        assert not kernel["bare_flags"], kernel
    if case.products:
        mma = case.mma or _MMA[case.arch]
        assert any(mma in kernel["mma"] for kernel in kernels), kernels
        # A kernel that needs more than there is can compile to nothing at all.
        assert any(kernel["local_shares"] for kernel in kernels), kernels
    if case.hot:
        version = ".".join(triton.__version__.split(".")[:2])
        hot_share = case.spills.get(version, _LOCAL_SHARE)
        for kernel in kernels:
            for share, limit in zip(
                kernel["local_shares"],
                (hot_share, *[_LOCAL_SHARE_MASKED] * len(kernel["local_shares"])),
                strict=False,
            ):
                assert share <= limit, kernel
            assert not kernel["complaints"], kernel


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", _marked(ELSEWHERE))
def test_compiles_for_a_gpu_that_nobody_has_measured(case: Case) -> None:
    """No more may leave the registers than did when `compile_elsewhere.json` was recorded."""
    kernels = _reports(is_slow(case))[case.name]
    assert kernels, "the launcher launched nothing"
    budget = compile_elsewhere.budgets().get(case.name, {})
    for kernel in kernels:
        assert "error" not in kernel, kernel["error"]
        assert kernel["shared"] <= compile_elsewhere.room(case, _SHARED_LIMIT), kernel
        most = budget.get(kernel["kernel"], 0) + sass_budgets.SPILL_TOLERANCE
        assert kernel["spilled_bytes"] <= most, kernel


def test_a_handover_without_a_barrier_is_seen() -> None:
    arrives = "@%p1 mbarrier.arrive.shared::cta.b64 _, [%r1];"
    loads = "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r2, %r3, %r4, %r5}, [%r6];"
    leaves = "@%p2 cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%rd1, {%r1}], [%r2];"
    waits = "cp.async.bulk.wait_group.read 0;"
    barrier = "bar.sync \t0, 128;"
    writes = "st.shared.v4.b32 [%r6], {%r2, %r3, %r4, %r5};"
    right = [loads, barrier, arrives, writes, barrier, leaves, waits, barrier, loads]
    assert ptx_barriers.bare_handovers("\n".join(right)) == []
    for place, line in enumerate(right):
        if line == barrier:
            wrong = "\n".join([*right[:place], writes, *right[place + 1 :]])
            assert len(ptx_barriers.bare_handovers(wrong)) == 1
    # A loop that touches nothing keeps the guard; one that may come from an access does not.
    asks = ["$L__BB0_2:", "ld.acquire.gpu.b32 %r7, [%rd1];", "@%p3 bra $L__BB0_2;"]
    assert ptx_barriers.bare_handovers("\n".join([writes, barrier, *asks, leaves])) == []
    # What is only read may leave, and may not be given back.
    assert ptx_barriers.bare_handovers("\n".join([barrier, loads, leaves])) == []
    assert ptx_barriers.bare_handovers("\n".join([barrier, loads, arrives])) == [arrives]
    skips = ["@%p4 bra $L__BB0_2;", barrier]
    assert ptx_barriers.bare_handovers("\n".join([loads, *skips, *asks, leaves])) == [leaves]
    jumps = [barrier, "bra.uni $L__BB0_1;", "$L__BB0_3:", leaves, "ret;", "$L__BB0_1:", writes]
    assert ptx_barriers.bare_handovers("\n".join([*jumps, "bra $L__BB0_3;"])) == [leaves]
    table = ["$L_brx_0: .branchtargets", "$L__BB0_4,", "$L__BB0_5;", "brx.idx %r1, $L_brx_0;"]
    parts = [barrier, *table, "$L__BB0_4:", leaves, "ret;", "$L__BB0_5:", barrier, *asks, leaves]
    assert ptx_barriers.bare_handovers("\n".join(parts)) == [leaves]
    turn = "bar.sync 9, 256; mov.b32 %r1, %r2;"  # with warps of other partitions
    assert ptx_barriers.bare_handovers("\n".join([loads, turn, arrives])) == [arrives]


def test_a_flag_without_barrier_and_fence_is_seen() -> None:
    stores, loads = (
        "@%p1 st.global.v4.b32 [%rd1], {%r1};",
        "@%p2 ld.global.cg.v4.b32 {%r1}, [%rd2];",
    )
    sends = [
        "bar.sync 	0;",
        "@wanted fence.acq_rel.sys;",
        "@wanted st.relaxed.sys.global.b32 [at], 1;",
    ]
    awaits = ["ld.acquire.sys.global.b32 seen, [at];", "bar.sync 	0;"]
    right = [stores, *sends, *awaits, loads, stores, *sends, *awaits, loads]
    assert ptx_flags.bare_flags("\n".join(right)) == []
    for place, line in enumerate(right):
        if line in (sends[0], sends[1]):
            assert ptx_flags.bare_flags("\n".join([*right[:place], *right[place + 1 :]]))
    assert ptx_flags.bare_flags("\n".join([stores, *reversed(sends), *awaits, loads]))


def test_hopper_kernels_take_every_case() -> None:
    assert not compile_cases_gluon.REFUSED


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", _marked(HOPPER_CASES))
def test_hopper_kernels_stay_in_registers(case: GluonCase) -> None:
    """Nothing may be wrong that its case does not list, with a reason."""
    kernels = _reports(is_slow(case))[case.name]
    assert kernels, "the launcher launched nothing"
    for kernel in kernels:
        assert "error" not in kernel, kernel["error"]
        assert kernel["shared"] <= _SHARED_LIMIT[case.arch], kernel
        assert kernel["bare_handovers"] == []  # what the emulator's replays count on
    assert any("wgmma.mma_async" in kernel["mma"] for kernel in kernels), kernels
    hot = [sass_budgets.hot_loop(kernel["loops"]) for kernel in kernels]
    # A kernel that needs more than there is can compile to nothing at all.
    assert any(hot), kernels
    wrong = {
        "complaints": any(kernel["complaints"] for kernel in kernels),
        "operands": any(kernel["operands"] for kernel in kernels),
        "hot spills": any(loop is not None and loop.local > 0 for loop in hot),
    }
    assert {what for what, so in wrong.items() if so} <= set(case.known), kernels
    budget = sass_budgets.recorded(case.name)
    if budget is not None:
        found = sass_budgets.measured(kernels)
        assert found.keys() == budget.keys()
        for name, (length, products, spilled) in found.items():
            most_length, same_products, most_spilled = budget[name]
            assert products == same_products, name
            assert length <= most_length * (1 + sass_budgets.TOLERANCE), name
            assert spilled <= most_spilled + sass_budgets.SPILL_TOLERANCE, name


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", _marked(MMA_CASES))
def test_kernels_by_mma_sync_stay_in_registers(case: MmaCase) -> None:
    """No more may leave the registers than the case says, and none of the hot loop unless it does.

    A version of Triton other than that which was recorded may spill a few bytes more.
    """
    kernels = [
        kernel
        for kernel in _reports(is_slow(case))[case.name]
        if "error" in kernel or kernel["mma"]
    ]
    assert kernels, "the launcher launched no product"
    for kernel in kernels:
        assert "error" not in kernel, kernel["error"]
        assert kernel["mma"] == ["mma.sync"], kernel
        assert kernel["shared"] <= _SHARED_LIMIT[case.arch], kernel
        assert kernel["spilled_bytes"] <= case.most_spilled + sass_budgets.SPILL_TOLERANCE
        hot = sass_budgets.hot_loop(kernel["loops"])
        assert hot is not None, kernel
        assert hot.local == 0 or case.spills_in_loop is not None, kernel
