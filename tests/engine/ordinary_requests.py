"""A process that makes and warms up an engine, serves ordinary requests and tells what it compiled.

It prints JSON: names of kernels that were there, compiled or from the disk, before the first
request, of those that came with requests, and what the engine counted.
"""

from __future__ import annotations

import gc
import json

from numba.core.dispatcher import Dispatcher

from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.usual_steps import warm_up

ONCE, LONG = "Once upon a time", "There was a little dog. " * 60
REQUESTS = [
    # Prompts of one call run in the same steps: a mixed step is one of long and short.
    (ONCE, {"temperature": 0.0}),
    (ONCE, {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05}),
    ([ONCE] * 20, {}),
    (ONCE, {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}),
    (ONCE, {"logit_bias": {5: 3.0}, "min_tokens": 2, "bad_words": ["dog"]}),
    (ONCE, {"logprobs": 5, "prompt_logprobs": 5}),
    (ONCE, {"n": 3}),
    (ONCE, {"structured": StructuredOutputs(json={"type": "object"})}),
    (LONG, {"temperature": 0.0}),
    ([ONCE, LONG, LONG[9:], ONCE[3:]], {"max_tokens": 40, "n": 2}),
]


def kernels() -> set[tuple[str, str]]:
    """Name and types of every kernel that this process has."""
    gc.unfreeze()  # what a process of tests/warm.py had before it began is hidden else
    return {
        (compiled.py_func.__name__, str(types))
        for compiled in gc.get_objects()
        if issubclass(type(compiled), Dispatcher)
        and compiled.py_func.__module__.startswith("tilewise.")
        for types in compiled.overloads
    }


def main() -> None:
    """Serve REQUESTS."""
    with LLM("story", device="cpu", num_blocks=500) as llm:
        warm_up(llm)
        before = kernels()
        for prompts, asked in REQUESTS:
            llm.generate(prompts, SamplingParams(**{"max_tokens": 4, **asked}))
        llm.embed([ONCE, LONG])
        after, told = kernels(), llm.engine.stats().num_compilations
    names = [sorted(name for name, _ in found) for found in (before, after - before)]
    print(json.dumps([*names, told]))


if __name__ == "__main__":
    main()
