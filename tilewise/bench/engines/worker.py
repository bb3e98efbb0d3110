"""One engine in a process of its own: JSON lines in, JSON lines out.

    python -m tilewise.bench.engines.worker ENGINE

The first line in has the engine's settings, the answer says how long its start took. Each line
after that is {"do": "generate" | "profile" | "stop", ...}; see `Engine`. A failure is answered by
{"error": text}, and the process goes on. What libraries print goes to standard error. The peers'
environments need not have torch, so nothing here imports it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol, TextIO

__all__ = ["ENGINES", "Engine", "serve"]

ENGINES = {
    "tilewise": "tilewise.bench.engines.ours",
    "transformers": "tilewise.bench.engines.transformers",
    "transformers_cb": "tilewise.bench.engines.transformers",
    "vllm": "tilewise.bench.engines.vllm",
    "llamacpp": "tilewise.bench.engines.llamacpp",
}
"""Each engine's module; its class `Measured` is an `Engine` made from the settings."""


class Engine(Protocol):
    """The interface by which a worker runs an engine; each engine's module has a class `Measured`
    with it."""

    def generate(
        self, prompts: list[list[int]], new_tokens: list[int], temperature: float, n: int
    ) -> list[list[int]]:
        """Return the new token ids of each prompt's first sample, when all samples are done.

        Args:
            prompts: the token ids of each prompt.
            new_tokens: the number of tokens to generate for each prompt; none ends early.
            temperature: 0 is greedy.
            n: number of samples of each prompt.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """Return versions, and counts such as compilations, by name."""
        ...

    def profile(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the engine's own numbers about a workload, which no clock outside can see; {}
        without any."""
        ...


def serve(
    make: Callable[[dict[str, Any]], Engine],
    lines: TextIO,
    answer: Callable[[dict[str, Any]], None],
) -> None:
    """Make an engine from the settings in the first line, and answer the other lines until "stop"
    or the end.

    Args:
        make: a function from the settings to the engine.
        lines: the requests, one JSON object a line.
        answer: a function that sends one answer; a failure is answered by {"error": text}.

    Raises:
        Exception: the engine could not be made; that has been answered.
    """
    engine: Engine | None = None
    for line in lines:
        request = json.loads(line)
        if request.get("do") == "stop":
            return
        try:
            if engine is None:
                started = time.perf_counter()
                engine = make(request)
                seconds = time.perf_counter() - started
                answer({"start_s": seconds, **engine.facts()})
            elif request["do"] == "generate":
                answer(_generate(engine, request))
            else:
                answer(engine.profile(request))
        except Exception as error:
            text = " ".join(str(error).split())
            answer({"error": f"{type(error).__name__}: {text}"[:400]})
            if engine is None:
                raise


def _generate(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    arguments = (request["prompts"], request["new_tokens"], request["temperature"], request["n"])
    started = time.perf_counter()
    ids = engine.generate(*arguments)
    seconds = time.perf_counter() - started
    wanted, got = request["new_tokens"], [len(each) for each in ids]
    if got != wanted:
        raise RuntimeError(f"{sum(wanted)} new tokens were asked for, got {sum(got)}")
    return {"seconds": seconds, **engine.facts(), "ids": ids if request.get("ids") else None}


def main(name: str) -> None:
    """Serve the engine of this name on standard input and output."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers

    def answer(value: dict[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    def make(settings: dict[str, Any]) -> Engine:
        engine: Engine = import_module(ENGINES[name]).Measured({"engine": name, **settings})
        return engine

    serve(make, sys.stdin, answer)


if __name__ == "__main__":
    main(sys.argv[1])
