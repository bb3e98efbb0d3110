"""The copy of the package whose Hopper kernels stall: where it stalls, and that it compiles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

import tilewise
from tests.kernels.gluon import delays as gluon_delays

ROOT = Path(__file__).parents[3]
KERNELS = Path(tilewise.__file__).parent / "kernels" / "gluon"
SMALL = """
from __future__ import annotations

@gluon.jit
def f(bars, x):
    mbarrier.wait(bars.index(0), 0)
    if x:
        y = x.load(
            layout
        )
        mbarrier.arrive(bars.index(0), count=1)
    return y

@triton.jit
def g(x):
    x.load(layout)

def host(x):
    x.load(layout)
"""


def test_stalls_are_put_around_waits_and_before_accesses_in_kernels_only() -> None:
    text, count = gluon_delays.delayed(SMALL)
    assert count == 4
    lines = [line for line in text.split("\n") if line.strip()]
    calls = [re.sub(r"\d+", "n", line) for line in lines]
    stall = "_delays_stall(n)"
    at = calls.index("def f(bars, x):")
    assert calls[at + 1 : at + 5] == [
        f"    {stall}", "    mbarrier.wait(bars.index(n), n)", f"    {stall}", "    if x:",
    ]  # fmt: skip
    assert calls[at + 5] == f"        {stall}"
    assert calls[at + 9] == f"        {stall}"
    numbers = re.findall(r"_delays_stall\((\d+)\)", text)
    assert len(set(numbers)) == len(numbers) == count


def test_the_product_itself_never_stalls() -> None:
    for file in KERNELS.rglob("*.py"):
        assert "nanosleep" not in file.read_text(), file.name


def test_every_kernel_of_the_copy_stalls(tmp_path: Path) -> None:
    count = gluon_delays.write_package(tmp_path)
    assert count > 400
    copies = tmp_path / "tilewise" / "kernels" / "gluon"
    for name in (
        "forward/loader", "forward/warpgroup", "forward/epilogue",
        "backward/consumer", "backward/loader", "backward/prepost",
        "backward/dkdv_warpgroups", "backward/dq_warpgroup", "forward/fp8/kernel",
        "forward/fp8/loader", "paged/decode", "latent/scores", "latent/values",
        "latent/bytes/loader", "latent/bytes/scores", "latent/bytes/values",
    ):  # fmt: skip
        assert "_delays_stall(" in (copies / f"{name}.py").read_text(), name


@pytest.mark.parametrize("chance", [0, 3, -8])
def test_chances_are_powers_of_two(chance: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be a power of two"):
        gluon_delays.write_package(tmp_path, chance)


def test_kernels_that_begin_early_stall_when_the_next_one_is_there(tmp_path: Path) -> None:
    gluon_delays.write_package(tmp_path)
    early = (tmp_path / "tilewise" / "kernels" / "triton" / "early.py").read_text().split("\n")
    for call, times in (("gdc_launch_dependents()", 2), ("gdc_wait()", 1)):
        at = [i for i, line in enumerate(early) if line.strip() == call]
        assert len(at) == times
        for line in at:
            assert re.fullmatch(r" {8}_stall\(\d+\)", early[line + 1])
    rows = (tmp_path / "tilewise" / "kernels" / "gluon" / "step" / "rows.py").read_text()
    assert re.search(r"await_previous\(shape.num_warps\)\n +_delays_stall", rows)


@pytest.mark.parametrize("given", ["copy", "package"])
def test_a_stress_with_stalls_is_of_the_copy(given: str, tmp_path: Path) -> None:
    """Once it was of the package itself, which PYTHONPATH's copy did not come before."""
    command = [sys.executable, str(ROOT / "lab" / "stress_kernels.py"), "--list"]
    command += ["--cases", "chain/chosen_small_8"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    if given == "copy":
        command += ["--delays", "8,4096"]
    else:
        environment["TILEWISE_DELAYED"] = str(tmp_path)
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    if given == "copy":
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("\nchain/chosen_small_8\n")
    else:
        assert done.returncode != 0
        assert f"kernels that stall must be those of {tmp_path}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["gluon-fwd-d128-varlen", "gluon-bwd-d128-causal", "gluon-fp8-d128-causal",
     "gluon-mla-128-heads", "gluon-linear-early", "early-1"],
)  # fmt: skip
def test_the_copy_compiles(name: str, tmp_path: Path) -> None:
    gluon_delays.write_package(tmp_path)
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_worker", f"sm_90-{name}"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=True,
    )  # fmt: skip
    assert '"error"' not in done.stdout, done.stdout[-2000:]
    compiled = [file.read_text() for file in (tmp_path / "cache").rglob("*.ptx")]
    if name == "early-1":  # where it lets the next one begin, and where it has waited
        assert {text.count("nanosleep") for text in compiled if "griddep" in text} == {2}
    else:
        assert max(text.count("nanosleep") for text in compiled) > (20 if "linear" in name else 50)
