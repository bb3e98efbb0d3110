"""Kernels that begin early wait in every program, and do nothing before that others could see."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("triton")

from tests.kernels import ptx_early
from tests.kernels.test_compile import run_cases
from tilewise.kernels import early

# Launched as part of a step that is captured, in the order of a layer.
STEP = {
    "_norm_kernel", "_linear_kernel", "_prepare_kernel", "_split_kernel", "_gated_mul_kernel",
    "_chunk_kernel", "_draw_kernel", "_finish_kernel", "_sum_kernel", "_flagged_sum_kernel",
}  # fmt: skip


@pytest.mark.parametrize("mode", [early.FIRST, pytest.param(early.AFTER, marks=pytest.mark.slow)])
def test_nothing_is_written_and_no_program_ends_before_it_has_waited(mode):
    names = [f"sm_90-early-{mode}", "sm_90-gluon-linear-early"]
    found = run_cases(names)
    reports = [report for name in names for report in found[name]]
    assert not [report for report in reports if "error" in report]
    early_ones = [report for report in reports if report["waits"]]
    # What begins a step follows what is not captured with it: it lets the next one in alone.
    [start] = [report for report in reports if report["kernel"] == "_start_kernel"]
    assert (start["waits"], start["lets_go"]) == (0, mode == early.FIRST)
    assert {report["kernel"] for report in early_ones} == STEP | {"linear_rows_kernel"}
    for report in early_ones:
        assert report["effects_before_waiting"] == [], report["kernel"]
        assert not report["returns_before_waiting"], report["kernel"]
        assert report["lets_go"] == 1, report["kernel"]


@pytest.mark.parametrize("mode", [early.FIRST, pytest.param(early.AFTER, marks=pytest.mark.slow)])
def test_products_of_quantised_weights_write_nothing_before_they_have_waited(mode):
    name = f"sm_90-quantised-early-{mode}"
    reports = run_cases([name])[name]
    early_ones = {r["kernel"]: r for r in reports if r["waits"] or r["lets_go"]}
    assert early_ones.keys() >= {"quantised_few_kernel", "quantised_ring_kernel"}
    for name, report in early_ones.items():
        assert report["effects_before_waiting"] == [], name
        # Of products the warp that copies waits, and those that multiply.
        assert report["waits"] >= (2 if name.startswith("quantised") else 1), name
        assert report["lets_go"] == 1, name


def test_what_is_late_does_not_wait():
    [report] = run_cases(["sm_90-linear-4096"])["sm_90-linear-4096"]
    assert (report["waits"], report["lets_go"]) == (0, 0)


def test_a_store_or_an_end_before_the_wait_is_seen():
    good = ".entry f() {\n ld.global.u32 %r1, [%rd1];\n st.shared.b32 [%r2], %r1;\n"
    wait, end = " griddepcontrol.wait;\n st.global.b32 [%rd2], %r1;\n", " ret;\n}\n"
    assert ptx_early.effects_before_waiting(good + wait + end) == []
    assert not ptx_early.returns_before_waiting(good + wait + end)
    for bad in (" @%p1 st.global.b32 [%rd2], %r1;\n", " atom.global.add.u32 %r3, [%rd1], 1;\n",
                " red.relaxed.gpu.global.add.u32 [%rd1], 1;\n"):  # fmt: skip
        assert len(ptx_early.effects_before_waiting(good + bad + wait + end)) == 1
    assert ptx_early.returns_before_waiting(good + " @%p1 ret;\n" + wait + end)


def test_modes_are_those_of_the_innermost_block_and_of_its_thread():
    assert early.mode("norm") == early.OFF
    with early.launching():
        assert early.mode("norm") == early.CHOSEN["norm"]
        with early.launching({"norm": early.AFTER}):
            assert (early.mode("norm"), early.mode("rope")) == (early.AFTER, early.OFF)
            seen: list[int] = []
            thread = threading.Thread(target=lambda: seen.append(early.mode("norm")))
            thread.start()
            thread.join()
            assert seen == [early.OFF]
        assert early.mode("rope") == early.CHOSEN["rope"]
    assert early.mode("norm") == early.OFF
    with pytest.raises(RuntimeError), early.launching():
        raise RuntimeError
    assert early.mode("norm") == early.OFF
