"""What the package requires, by its own metadata, against what is installed. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

__all__ = ["Package", "packages"]

_OURS = "tilewise"
# Extras whose packages are for those who change the package.
_OF_DEVELOPERS = frozenset(("test", "clients", "dev"))


@dataclass(frozen=True, slots=True)
class Package:
    """One requirement of tilewise, and the installed version of the required package.

    Attributes:
        name: the name of the package on an index.
        wanted: the versions that are allowed, such as ">=2.11", empty for any.
        installed: the installed version, None where there is none.
        extra: the extra of tilewise that requires the package; None if tilewise itself does.
        fits: True where the installed version is one of those that are allowed.
    """

    name: str
    wanted: str
    installed: str | None
    extra: str | None
    fits: bool


def packages() -> list[Package] | None:
    """Return every requirement of tilewise, or None if tilewise has no metadata here.

    A checkout that is only on Python's path has no metadata. Requirements for other platforms and
    those of developers' extras are left out.
    """
    try:
        lines = requires(_OURS) or []
    except PackageNotFoundError:
        return None
    needs = [Requirement(line) for line in lines]
    found = [_package(need, None) for need in needs if _is_for(need, "")]
    for extra in _extras(lines):
        found += [_package(need, extra) for need in _of_extra(needs, extra)]
    return found


def _is_for(need: Requirement, extra: str) -> bool:
    """Return whether a requirement counts on this platform for `extra`; "" is tilewise without
    extras."""
    return need.marker is None or need.marker.evaluate({"extra": extra})


def _extras(lines: list[str]) -> list[str]:
    """Return the names of tilewise's extras, in the order of the metadata, without those of
    developers."""
    names = re.findall(r"extra == ['\"]([\w.-]+)['\"]", "\n".join(lines))
    return [name for name in dict.fromkeys(names) if name not in _OF_DEVELOPERS]


def _of_extra(needs: list[Requirement], extra: str) -> Iterator[Requirement]:
    """Yield the requirements of an extra that tilewise alone does not have, with those of other
    extras of tilewise that the extra names."""
    for need in needs:
        if _is_for(need, "") or not _is_for(need, extra):
            continue
        if need.name == _OURS:
            for inner in sorted(need.extras):
                yield from _of_extra(needs, inner)
        else:
            yield need


def _package(need: Requirement, extra: str | None) -> Package:
    try:
        installed = version(need.name)
    except PackageNotFoundError:
        installed = None
    # A build of a version, such as 2.13.0+cpu, and a release candidate count as the version.
    fits = installed is not None and need.specifier.contains(installed, prereleases=True)
    return Package(need.name, str(need.specifier), installed, extra, fits)
