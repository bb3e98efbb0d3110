"""A decode step's own kernels, launched as the engine launches them, as a case of the stress.

Kernels that begin before the one before them has ended have a class of races of their own: one may
read what another is still writing, or let a third begin that does. No case of a single kernel shows
that. So a chain is `DecodeStep` itself, over a model of two layers: embedding, angles, norms,
products, rotation and cache, attention, activation, head, sampling, the rows' next token; then the
same once more from where that left off. Whatever a kernel reads too early is poison or old.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.kernels.kernel_stress import Prepared, Results
from tilewise.bench.engines.shapes import SHAPES
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.captured.decode_step import DecodeStep
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import cache_spec
from tilewise.kernels import early
from tilewise.models import load_model

STEPS, BLOCK = 2, 16
# When each kernel lets the next one begin; None is as the engine chooses.
MODES: dict[str, dict[str, int] | None] = {
    "chosen": None,
    "first": dict.fromkeys(early.CHOSEN, early.FIRST),
    "after": dict.fromkeys(early.CHOSEN, early.AFTER),
}


class Model(NamedTuple):
    """A shape of `bench.engines.shapes`, and what is other here."""

    shape: str
    changes: dict[str, Any]


MODELS = {
    "small": Model("qwen3-0.6b", {}),
    "heads_of_64": Model("llama-1b", {"num_hidden_layers": 1}),
    "large": Model("llama-3-8b", {"num_hidden_layers": 1}),
}
# (model, rows, tokens of context): few and many rows, and keys that are split and that are not.
CHAINS = (
    ("small", 4, 200), ("small", 8, 1100), ("small", 32, 200), ("small", 64, 600),
    ("heads_of_64", 8, 200), ("heads_of_64", 32, 1100),
    ("large", 1, 1100), ("large", 8, 200), ("large", 32, 1100),
)  # fmt: skip


@contextmanager
def launched(modes: dict[str, int] | None) -> Iterator[None]:
    """Let kernels of a step begin as `modes` says; None is as the engine chooses, {} is never."""
    chosen, large = early.CHOSEN, early.CHOSEN_LARGE
    if modes is not None:
        early.CHOSEN = early.CHOSEN_LARGE = modes
    try:
        yield
    finally:
        early.CHOSEN, early.CHOSEN_LARGE = chosen, large


class Chain:
    """Two decode steps of some rows, from the same beginning each time.

    Args:
        config: of a model, as config.json has it.
        rows: sequences.
        context: tokens of the longest; the others have fewer.
        device: of all.
    """

    def __init__(self, config: dict[str, Any], rows: int, context: int, device: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config))
            model = load_model(folder, dtype="bfloat16", device=device, random_weights=True)
        longest = context + STEPS
        blocks = -(-longest // BLOCK)
        spec = cache_spec(model.config, BLOCK, torch.bfloat16, longest)
        self._storage = KVStorage(spec, rows * blocks, torch.device(device))
        draw = torch.Generator(device).manual_seed(rows)
        for tensor in self._storage.whole:
            tensor.normal_(generator=draw)
        self._runner = DeviceRunner(model, self._storage, max_num_seqs=rows, max_model_len=longest)
        self._runner.submit(_batch(rows, context, blocks)).result()
        state = self._runner.rows
        state.position.sub_(torch.arange(rows, device=device) * 7 % (context // 2) + 1)
        self._state = [state.token, state.position, state.counter, self._runner.results.place]
        self._begin = [x.clone() for x in self._state]
        positions = state.position[:, None] + torch.arange(STEPS, device=device)
        table = state.table.long().gather(1, positions // BLOCK)
        self._slots = (table * BLOCK + positions % BLOCK).flatten()
        self._caches = [
            x.view(spec.num_layers, -1, *x.shape[2:]).unbind(0) for x in self._storage.whole
        ]
        self._steps: dict[str, DecodeStep] = {}

    def run(self, name: str) -> Results:
        """Do the steps; name: one of MODES, or "off", one kernel after the other."""
        modes = {} if name == "off" else MODES[name]
        runner = self._runner
        if name not in self._steps:
            self._steps[name] = DecodeStep(
                runner.model, self._storage, runner.rows, runner.results, runner.rows.max_num_seqs,
                keeps_logits=True,
            )  # fmt: skip
        step, found = self._steps[name], {}
        with torch.inference_mode(), launched(modes):
            self._rewind()
            for number in range(STEPS):
                step.run()
                assert step.logits is not None
                found[f"logits {number}"] = step.logits
            drawn = runner.results.values[:, : runner.rows.max_num_seqs]
            found["tokens"] = drawn.float()  # of a vocabulary below 2^24, so each is exact
            for layer, caches in enumerate(zip(*self._caches, strict=True)):
                for which, cache in zip(("keys", "values"), caches, strict=True):
                    found[f"{which} {layer}"] = cache[self._slots]
        return found

    def _rewind(self) -> None:
        for x, begin in zip(self._state, self._begin, strict=True):
            x.copy_(begin)
        self._runner.results.values.fill_(-1)
        for cache in (cache for caches in self._caches for cache in caches):
            cache.index_fill_(0, self._slots, float("nan"))

    def check(self, name: str) -> None:
        """Compare steps whose kernels begin early with those of which none does."""
        alone = {key: x.clone() for key, x in self.run("off").items()}
        for key, x in self.run(name).items():
            assert bool(x.isfinite().all()), key
            assert torch.equal(x, alone[key]), (name, key)


def _batch(rows: int, context: int, blocks: int) -> Batch:
    """Return a step of sequences that decode, with all blocks that they will need."""
    sampling = SamplingParams(temperature=0.6)
    return Batch(
        tuple(
            ScheduledSequence(
                seq_id=row, token_ids=(7 * row % 1000,), start=context - 1,
                block_ids=range(row * blocks, (row + 1) * blocks), num_samples=1,
                sampling=sampling, seeds=(row,), num_generated=1,
            )
            for row in range(rows)
        ),
        left=(),
    )  # fmt: skip


def config_of(model: Model) -> dict[str, Any]:
    """Return the configuration of a model, with few layers and a small vocabulary."""
    few = {"num_hidden_layers": 2, "max_window_layers": 2, "vocab_size": 4096}
    return SHAPES[model.shape] | few | {"bos_token_id": 1, "eos_token_id": 2} | model.changes


def _prepared(mode: str, model: str, rows: int, context: int) -> Prepared:
    chain = Chain(config_of(MODELS[model]), rows, context, "cuda")
    return Prepared(partial(chain.run, mode), check=lambda _: chain.check(mode), is_alone=True)


def chain_cases() -> Iterator[tuple[str, Callable[[], Prepared]]]:
    """Yield "chain/name" and what prepares the case."""
    for mode in MODES:
        for model, rows, context in CHAINS:
            yield f"chain/{mode}_{model}_{rows}", partial(_prepared, mode, model, rows, context)
