"""The oldest versions that pyproject.toml allows, as constraints for pip.

    python -m tests.lower_bounds > constraints.txt

`make test-oldest` installs them. Of a package that several extras name it is the highest bound.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

__all__ = ["lower_bounds"]

_REQUIREMENT = re.compile(r"(?P<name>[A-Za-z0-9._-]+)(?:\[[^]]*\])?>=(?P<version>[0-9.]+)")


def lower_bounds(pyproject: str) -> dict[str, str]:
    """Return the oldest version allowed of each package, by name.

    Raises:
        ValueError: a requirement has none.
    """
    project = tomllib.loads(pyproject)["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    found = dict[str, str]()
    for requirement in (one for group in groups for one in group):
        if requirement.startswith(project["name"] + "["):
            continue
        match = _REQUIREMENT.match(requirement)
        if match is None:
            raise ValueError(f"a requirement must begin with name>=version, got {requirement!r}")
        name, version = match["name"].lower(), match["version"]
        found[name] = max(found.get(name, version), version, key=_numbers)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


if __name__ == "__main__":
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for name, version in sorted(lower_bounds(text).items()):
        print(f"{name}=={version}")
