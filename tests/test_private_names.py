"""docs/design/private-names.md lists the private names of other libraries that the source uses."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.private_names import names_of, private_names

ROOT = Path(__file__).parents[1]
LIST = ROOT / "docs" / "design" / "private-names.md"


def rows() -> list[list[str]]:
    """The cells of the list: names, files, what happens without them, what tells of a change."""
    lines = [line for line in LIST.read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def listed() -> set[tuple[str, str]]:
    return {
        (name, file)
        for names, files, *_ in rows()
        for name in re.findall(r"`([^`]+)`", names)
        for file in re.findall(r"`([^`]+)`", files)
    }


def used() -> set[tuple[str, str]]:
    root = ROOT / "tilewise"
    sources = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
    own = {name for source in sources.values() for name in names_of(source)}
    return {(name, file) for file, source in sources.items() for name in private_names(source, own)}


def test_each_private_name_that_is_used_stands_in_the_list():
    assert sorted(used() - listed()) == []


def test_what_the_list_names_is_used_where_it_says():
    """A name that this package has, too, is found by reading alone."""
    for name, file in listed():
        source = (ROOT / "tilewise" / file).read_text()
        assert re.search(rf"\b{name.split('.')[-1]}\b", source), (name, file)


def test_each_row_says_what_happens():
    for names, _, gone, otherwise in rows():
        assert gone, names
        assert otherwise, names
        for test in re.findall(r"`(tests/[^`]+)`", otherwise):
            assert (ROOT / test).exists(), test


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._C import _f", {"torch._C._f"}),
        ("import torch._functorch.config", {"torch._functorch.config"}),
        ("import torch\ntorch._C._f()", {"torch._C._f"}),
        ("import torch.cuda as c\nc._sleep(1)", {"torch.cuda._sleep"}),
        ("from torch.autograd import forward_ad as f\nf._l", {"torch.autograd.forward_ad._l"}),
        ("def f(x):\n    return x._is_it()", {"._is_it"}),
        ("def f(x):\n    return getattr(x, '_it', None)", {"._it"}),
        ("def f(x):\n    x._it = 1", {"._it"}),
        ("from numba.core.caching import FunctionCache", {"numba.core.caching.FunctionCache"}),
        ("import triton\ntriton.runtime.driver.active", {"triton.runtime.driver.active"}),
        ("def f():\n    from triton._C import ir", {"triton._C.ir"}),
        ("import torch\ntorch.zeros(1).__class__", set()),
        ("class A:\n    def f(self):\n        self._x = 1\n        return self._x", set()),
        ("def f(t):\n    return t._replace(a=f'{t}_row'), t.endswith('_it')", set()),
        ("import numba\nnumba.njit", set()),
        ("from os import _exit", set()),
    ],
)
def test_private_names_are_found(source, found):
    assert private_names(source, names_of(source)) == found
