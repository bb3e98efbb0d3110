"""The Python blocks of the documents run as they stand.

Each runs alone, in an empty namespace: nothing is supplied. A block whose first line is CONTINUES
needs the blocks above it, which is what it tells its reader. What stands around a block is made for
it: the server of an address, and the environment that torchrun gives to one process.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.server.serving import serving
from tests.test_docs import DOCUMENTS, ROOT
from tilewise import LLM, AsyncLLM
from tilewise.server.messages import messages_router
from tilewise.server.responses import responses_router

CONTINUES = "# goes on from the block above\n"
SERVED = "http://127.0.0.1:8000"  # where documents have a server
# A part of a block: why it is not run every day.
SLOW = {"tensor_parallel_size=2": "two processes that load a model"}
ELSEWHERE = {"from ray import serve": "a Ray cluster; see tests/cluster"}


def chains(document: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the place of a block, and the block with those that go on from it."""
    text, found = document.read_text(), list[tuple[str, list[str]]]()
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        code = block.group(1)
        place = (
            f"{document.relative_to(ROOT).as_posix()}:{text[: block.start()].count(chr(10)) + 1}"
        )
        if code.startswith(CONTINUES):
            assert found, f"{place} must have a block above it"
            found[-1][1].append(code)
        else:
            found.append((place, [code]))
    yield from found


def rows() -> Iterator[Any]:
    for document in DOCUMENTS:
        for place, blocks in chains(document):
            whole = "".join(blocks)
            marks: list[pytest.MarkDecorator] = []
            marks += [pytest.mark.slow for part in SLOW if part in whole]
            marks += [
                pytest.mark.skip(reason=f"needs {what}")
                for part, what in ELSEWHERE.items()
                if part in whole
            ]
            yield pytest.param(place, blocks, id=place, marks=marks)


def run(code: str, name: str, space: dict[str, Any]) -> None:
    tree = compile(code, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if tree.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(tree, space))
    else:
        exec(tree, space)


@pytest.fixture
def as_torchrun(monkeypatch):
    """The environment of the only process of a group, whose groups end with the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for name, value in (one | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def address():
    """The address of a server of the packaged model."""
    llm = LLM("story", device="cpu", num_blocks=512, max_num_seqs=32)

    def routers(service):
        return [messages_router(service), responses_router(service)]

    with serving(AsyncLLM(llm), loop=llm.loop, tools="auto", routers=routers) as running:
        yield running.url
    llm.close()


@pytest.mark.usefixtures("as_torchrun")
@pytest.mark.parametrize(("place", "blocks"), list(rows()))
def test_a_block_runs_as_it_stands(place, blocks, monkeypatch, request):
    for module in ("flash_attn", "flash_attn_interface"):  # blocks put them there; this undoes it
        monkeypatch.setitem(sys.modules, module, sys.modules.get(module))
    space: dict[str, Any] = {"__name__": "__main__"}
    try:
        is_served = any(SERVED in code for code in blocks)
        url = request.getfixturevalue("address") if is_served else SERVED
        for code in blocks:
            run(code.replace(SERVED, url), place, space)
    finally:
        for engine in [x for x in space.values() if isinstance(x, LLM)]:
            engine.close()


def test_documents_have_blocks_to_run():
    places = [place for document in DOCUMENTS for place, _ in chains(document)]
    assert len(places) > 30
    assert {"README.md", "docs/guide/paged.md", "docs/guide/serve.md"} <= {
        p.split(":")[0] for p in places
    }
