"""Shared test set-up: threads, seeds, Triton's interpreter on a CPU, NaN-poisoned allocations."""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# A machine whose caches are cold would say so where tests read what else is said.
os.environ.setdefault("TILEWISE_PROGRESS", "0")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks a hub but those that start one
# Before torch is imported: as many threads as `make test` gives each of its processes. More wait
# for one another on small tensors, in a loop. Tests of threads ask for theirs.
os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 4)))

# A shell without job control lets what it starts behind "&" ignore Ctrl-C. Processes that tests
# start inherit this, and some are to be ended so.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import torch

# Must be set before triton is imported; processes that tests start inherit it. On a machine with a
# GPU the kernels are compiled instead.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from torch.utils._python_dispatch import _disable_current_modes

from tests.brief import brief_of
from tests.card import turn_of
from tests.quick_rows import asks_for_gpu_alone, is_quick_row, names_a_gpu
from tests.slow_rows import is_slow_row
from tilewise.errors import UnsupportedError

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    from tests.kernels import interpreter

    interpreter.repair()

gc.disable()  # until all tests are collected, none of which is garbage

_HAS_GPU = torch.cuda.is_available()

# torch remembers at the first use of a device context which functions make tensors; that must
# happen before the poison below puts its own function in place of torch.empty.
with torch.device("meta"):
    torch.empty(0)


_TESTS = Path(__file__).parent
_unfreeze = gc.unfreeze
_is_unfrozen = False

# A machine that has what kernels and engines need and not the server's extra runs all other tests.
_HAS_SERVER = find_spec("fastapi") is not None
collect_ignore_glob = (
    []
    if _HAS_SERVER
    else [
        "server/*",
        "bench/test_serve*.py",
        "lab/test_serve*.py",
        "test_children.py",
        "test_doc_snippets.py",
    ]
)


def pytest_report_header() -> str | None:
    """Say which tests are not there."""
    return None if _HAS_SERVER else "tests of the server are left out: fastapi is not installed"


_END = 4_000_000  # elements at each end of a large tensor: of the packaged model 2,000 blocks


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read no file that names no GPU where only tests that need one run: two of three.

    The others' modules, and 8,000 tests to be left out again, take half of what collecting takes.
    """
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    skips = is_test and asks_for_gpu_alone(config.option.markexpr)
    return True if skips and not _names_a_gpu(collection_path) else None


@functools.cache
def _names_a_gpu(file: Path) -> bool:
    return names_a_gpu(file.read_text("utf-8"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the rows that slow_rows.py names, and of a GPU's what quick_rows.py leaves out.

    This is before tests are chosen by their marks.
    """
    if item.path.is_relative_to(_TESTS):
        file = item.path.relative_to(_TESTS).as_posix()
        needs_gpu = item.get_closest_marker("gpu") is not None
        if is_slow_row(file, item.name) or (needs_gpu and not is_quick_row(file, item.name)):
            item.add_marker(pytest.mark.slow)
        if needs_gpu and not _names_a_gpu(item.path):
            raise pytest.UsageError(
                f"`pytest -m gpu` would not see {item.nodeid}: its file must name a GPU, see "
                "names_a_gpu in tests/quick_rows.py"
            )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` runs, before tests are chosen by their marks."""
    for item in brief_of(items):
        item.add_marker(pytest.mark.brief)


if _HAS_GPU:

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
        """Let large tests take turns; to wait is before the clock of a test's own limit starts."""
        with turn_of(item):
            return (yield)


def pytest_collection_finish() -> None:
    # Modules and tests stay until the end: the collector need not look at them again and again.
    # Compilers and an interpreter of kernels make many objects, nearly all of which their counts
    # free: to look at them took a twelfth of some folders' time with a threshold of 10,000.
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 10, 10)
    gc.enable()


def _unfreeze_for_one_test() -> None:
    """Hide nothing from the collector until the test ends.

    A server does so when it ends, and some tests. Whoever collected all afterwards, as each trial
    of a cache's size does, walked all modules and tests: 0.6 to 0.9 s of a core each time.
    """
    global _is_unfrozen
    _is_unfrozen = True
    _unfreeze()


gc.unfreeze = _unfreeze_for_one_test


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Skip rows of float16 on a CPU without instructions for it, where every kernel refuses it."""
    try:
        return (yield)
    except UnsupportedError as refusal:
        if "(F16C)" not in str(refusal):
            raise
        pytest.skip(str(refusal))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    global _is_unfrozen
    try:
        return (yield)
    finally:
        if _is_unfrozen:
            _is_unfrozen = False
            gc.freeze()


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter add a product's channels one after another in every row.

    It asks numpy, whose library adds the last rows of a matrix in another order than the first on
    some processors: a row's bits depend on its place in the tile there, as on no GPU.
    """
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_dot", interpreter.dot_in_order)


def _called_from_tilewise() -> bool:
    name = sys._getframe(2).f_globals.get("__name__", "")
    return name.startswith("tilewise.") and name != "tilewise.testing"


def _poison(tensor: torch.Tensor) -> torch.Tensor:
    """An output that a kernel forgets to write must show, so fresh float memory is NaN."""
    if tensor.is_floating_point() and tensor.device.type != "meta":
        if type(tensor) is not torch.Tensor:
            return tensor.fill_(float("nan"))
        if not _is_watched():
            return _fill(tensor)
        with _disable_current_modes():  # who watches what the package does should not see it
            _fill(tensor)
    return tensor


def _fill(tensor: torch.Tensor) -> torch.Tensor:
    """Put NaN everywhere, in what is as large as a whole engine's cache at its both ends.

    A cache of a gigabyte, of which a test writes a few blocks, would take a second of a core, and
    have memory only for this.
    """
    if tensor.numel() <= 2 * _END or not tensor.is_contiguous():
        return tensor.fill_(float("nan"))
    flat = tensor.view(-1)
    flat[:_END].fill_(float("nan"))
    flat[-_END:].fill_(float("nan"))
    return tensor


def _is_watched() -> bool:
    """Whether a mode sees operations: to suspend none takes longer than the filling."""
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PreDispatch)
    )


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch.Tensor, "new_empty"),
    ):
        original = getattr(owner, name)

        def poisoned(*args, _original=original, **kwargs):
            tensor = _original(*args, **kwargs)
            if not torch.compiler.is_compiling() and _called_from_tilewise():
                return _poison(tensor)
            return tensor

        monkeypatch.setattr(owner, name, poisoned)


@pytest.fixture(autouse=True)
def as_new() -> None:
    """Begin each test with the same seed, and without plans.

    None runs plans of tables, kernels or machines that another one pretended.
    """
    call = sys.modules.get("tilewise.ops.call")
    if call is not None:
        call.forget()
    if _HAS_GPU:
        torch.manual_seed(0)
    else:  # the same, without a stack trace kept for each kind of device that may come later
        torch.default_generator.manual_seed(0)
