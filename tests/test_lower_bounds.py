"""The lower bounds of pyproject.toml, as `make test-oldest` installs them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lower_bounds import lower_bounds

ROOT = Path(__file__).parents[1]
PROJECT = """
[project]
name = "tilewise"
dependencies = ["torch>=2.11", {more}]
[project.optional-dependencies]
a = ["numba>=0.9,<1", "ray[serve]>=2.60", "tilewise[b]"]
b = ["numba>=0.62"]
"""


def test_the_highest_bound_of_all_extras_is_taken():
    found = lower_bounds(PROJECT.format(more='"Jinja2>=3.1"'))
    assert found == {"torch": "2.11", "numba": "0.62", "ray": "2.60", "jinja2": "3.1"}


def test_a_requirement_without_a_bound_is_refused():
    with pytest.raises(ValueError, match="must begin with name>=version, got 'numpy'"):
        lower_bounds(PROJECT.format(more='"numpy"'))


def test_versions_that_are_known_to_be_wrong_are_not_allowed():
    found = lower_bounds((ROOT / "pyproject.toml").read_text())
    least = {
        "starlette": (1, 0, 1),
        "transformers": (5, 3),
        "llguidance": (1, 9),
        "pydantic": (2, 8),
    }
    for name, version in least.items():
        assert tuple(map(int, found[name].split("."))) >= version, name
