"""What `import tilewise` offers, and what it does not cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tilewise
from tests.warm import run

ROOT = Path(__file__).resolve().parent.parent


def test_every_public_name_is_there():
    for name in tilewise.__all__:
        assert getattr(tilewise, name).__name__ == name
    assert set(tilewise.__all__) <= set(dir(tilewise))


def test_the_list_is_sorted_and_complete():
    # ruff's order: constants, then classes, then functions
    key = [(not n.isupper(), not n[0].isupper(), n) for n in tilewise.__all__]
    assert key == sorted(key)
    assert set(tilewise._LAZY) <= set(tilewise.__all__)


def _modules(folder: Path) -> set[str]:
    found = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    return {name for name in found if not name.startswith("_")} - {folder.name}


def test_every_package_and_module_is_an_attribute_of_a_process_that_imported_only_the_first():
    names = sorted(_modules(ROOT / "tilewise") - {"keywords"})
    assert set(names) == tilewise._MODULES
    inner = sorted(_modules(ROOT / "tilewise" / "integrations"))
    assert set(inner) == tilewise.integrations._MODULES
    paths = [*names, *(f"integrations.{name}" for name in inner), "masks.causal", "nn.Attention"]
    code = f"import tilewise; print(*({', '.join(f'tilewise.{path}' for path in paths)},), sep='|')"
    done = run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert len(done.stdout.split("|")) == len(paths)
    assert set(names) <= set(dir(tilewise))
    assert set(inner) <= set(dir(tilewise.integrations))


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        tilewise.atention  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'flash_atn'"):
        tilewise.integrations.flash_atn  # noqa: B018


@pytest.mark.parametrize("module", ["tilewise", "tilewise.cli", "tilewise.engine.request"])
def test_importing_loads_nothing_heavy(module):
    heavy = {"torch", "triton", "numba", "numpy", "tokenizers", "safetensors", "transformers"}
    code = f"import sys, {module}; print(*sorted({heavy} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == ""


def test_numba_is_loaded_with_the_first_kernel_of_a_cpu():
    code = "import sys, tilewise.ops, tilewise.ops.panels; print('numba' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "False"
