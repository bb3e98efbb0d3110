"""The wheel: builds, stays small, holds what it should, and works in an empty environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tilewise.server import page

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 20_000_000


def _run(*command: str | Path, **options) -> str:
    # Neither this checkout nor the interpreter switch may help the wheel along.
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    env["NUMBA_OPT"] = "0"  # kernels are compiled anew there; how well is tested elsewhere
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=env, **options
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    # What pip would ask to build it: pip alone takes a second of a core.
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (built,) = folder.glob("tilewise-*.whl")
    return built


def test_it_is_pure_python_and_small(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < MAX_BYTES


def test_it_holds_the_package_with_its_model_and_licence_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "tilewise/cli.py" in names
    assert "tilewise/py.typed" in names  # or checkers of types take every name for Any
    assert "tilewise/assets/story/model.safetensors" in names
    assert {f"tilewise/server/page/{name}" for name in page.FILES} <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [n for n in names if n.startswith(("tests/", "examples/", "docs/"))]


def _link_requirements(wheel: Path, folder: Path) -> None:
    """Put links to all that the wheel requires, and to what that requires, into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        lines = archive.read(name).decode().splitlines()
    waiting = [x.removeprefix("Requires-Dist: ") for x in lines if x.startswith("Requires-Dist: ")]
    known: set[str] = set()
    while waiting:
        need = Requirement(waiting.pop())
        if need.name in known or (need.marker and not need.marker.evaluate({"extra": ""})):
            continue
        known.add(need.name)
        try:
            found = distribution(need.name)
        except PackageNotFoundError:  # not of this platform
            continue
        waiting += found.requires or ()
        for top in {Path(file).parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).exists():
                (folder / top).symlink_to(found.locate_file(top))


def _share_compiled_kernels(folder: Path) -> None:
    """Put kernels that this checkout has compiled beside the same sources in a folder."""
    kernels = ROOT / "tilewise" / "kernels" / "cpu"
    for file in kernels.rglob("*.py"):
        there = folder / file.relative_to(ROOT)
        assert there.read_bytes() == file.read_bytes()
        shutil.copystat(file, there)  # numba knows sources by their times
    for file in kernels.rglob("__pycache__/*.nb[ci]"):
        there = folder / file.relative_to(ROOT)
        there.parent.mkdir(exist_ok=True)
        shutil.copy(file, there)


COMMAND = """#!{python}
from importlib.metadata import entry_points

[found] = entry_points(group="console_scripts", name="tilewise")
raise SystemExit(found.load()())
"""


# What pip would put there is what our metadata names: links to it take a tenth of the time, and a
# wheel of pure Python is an archive of what will be there. Its command is made of an entry point.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["linked", pytest.param("installed", marks=pytest.mark.slow)])
def test_it_generates_in_an_empty_environment(wheel, tmp_path, how):
    """Only the core dependencies come along: no triton, no transformers, no compiler."""
    python = tmp_path / "env" / "bin" / "python"
    if how == "installed":
        _run(sys.executable, "-m", "venv", tmp_path / "env")
        _run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
    else:
        _run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
        [packages] = (tmp_path / "env" / "lib").glob("python*/site-packages")
        zipfile.ZipFile(wheel).extractall(packages)
        command = tmp_path / "env" / "bin" / "tilewise"
        command.write_text(COMMAND.format(python=python))
        command.chmod(0o755)
        _link_requirements(wheel, packages)
        _share_compiled_kernels(packages)
        assert (packages / "torch").is_dir()
        assert not (packages / "transformers").exists()
    command = [tmp_path / "env" / "bin" / "tilewise", "generate", "--max-tokens", "8"]
    text = _run(*command, "--prompt", "One day", "--temperature", "0", cwd=tmp_path)
    assert len(text.split()) > 3
    assert "tilewise" not in _run(python, "-c", "import sys; print(*sys.path)").split()


USER = """
import torch
from torch import Tensor

import tilewise
from tilewise import LLM, BlockMask, RequestOutput, SamplingParams, masks
from tilewise.integrations.evoformer import triangle_attention


def attend(x: Tensor) -> Tensor:
    mask: BlockMask = masks.causal(64, 64)
    o: Tensor = tilewise.attention(x, x, x, mask=mask)
    o, lse = tilewise.attention(x, x, x, causal=True, return_lse=True)
    return o + lse.mean() + triangle_attention(x, x, x, x)


def tell(prompt: str) -> list[str]:
    outputs: list[RequestOutput] = LLM("story").generate([prompt], SamplingParams(max_tokens=8))
    return [output.outputs[0].text for output in outputs]


tilewise.attention(torch.zeros(1), torch.zeros(1), torch.zeros(1), causl=True)  # wrong
tell(3)  # wrong
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_users_file_is_checked_strictly_against_the_wheel(wheel, tmp_path):
    """Types of the public names are there, and a wrong keyword or argument is seen."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "packages")
    script = tmp_path / "user.py"
    script.write_text(USER)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", script]
    env = os.environ | {"MYPYPATH": str(tmp_path / "packages")}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    wrong = [line for line in USER.splitlines() if line.endswith("# wrong")]
    said = [line for line in done.stdout.splitlines() if ": error:" in line]
    at = [USER.splitlines()[int(line.split(":")[1]) - 1] for line in said]
    assert [*dict.fromkeys(at)] == wrong, done.stdout
