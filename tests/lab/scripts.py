"""Load a script of lab/, which is no module of a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def load(name: str) -> ModuleType:
    """Return lab/NAME.py as the module NAME, where dataclasses look it up."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "lab" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
