"""Docstrings as the site's generator reads them: names of a field on a line, options filled in."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # it is loaded by its path

from tools.site.fields import joined


class Docstrings(griffe.Extension):
    """What is done to each docstring before it is parsed."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Join names, and take from the object itself what is made when it is imported."""
        if obj.docstring is None:
            return
        if "<options>" in obj.docstring.value:
            module = importlib.import_module(obj.module.path)
            owner: Any = module
            for name in obj.path.removeprefix(f"{module.__name__}.").split("."):
                owner = getattr(owner, name)
            obj.docstring.value = inspect.getdoc(owner) or ""
        obj.docstring.value = joined(obj.docstring.value)
