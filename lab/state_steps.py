"""What compiling the steps of a model with states saves on a CPU: seconds of a core, in turns.

    python lab/state_steps.py [--layers 24] [--vocab 248320] [--json FILE]

A random model of Qwen3.5-0.8B's shape decodes by the compiled list and module by module, over the
same packed weights. The tokens must be equal. A core's seconds count what the process used, whoever
else uses the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import cache_spec
from tilewise.engine.steps.cpu_step import CompiledRunner
from tilewise.engine.steps.runner import ModelRunner
from tilewise.models import ModelConfig, build_model

BLOCK, BLOCKS = 16, 64  # tokens of a block, blocks of a sequence
FIRST = 100  # tokens of each sequence before the first step


def shape(layers: int, vocab: int) -> dict[str, Any]:
    """Return the configuration of Qwen3.5-0.8B's layers."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": vocab, "hidden_size": 1024,
        "intermediate_size": 3584, "num_hidden_layers": layers, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
        "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "max_position_embeddings": 4096, "tie_word_embeddings": True,
    }  # fmt: skip


def storage_of(model: Any, rows: int) -> KVStorage:
    """Return a cache of zeros."""
    spec = cache_spec(model.config, BLOCK, model.dtype)
    storage = KVStorage(spec, BLOCKS * rows, num_slots=rows)
    assert storage.states is not None
    for tensor in storage.whole:
        tensor.zero_()
    for slots in storage.states.layers.values():
        for tensor in (*(slots.recurrence or ()), slots.convolution):
            if tensor is not None:
                tensor.zero_()
    return storage


def step_of(rows: int, position: int) -> Batch:
    """Return a step that decodes a token of each sequence."""
    sequences = (
        ScheduledSequence(
            i, (7 * i + position,), position, range(BLOCKS * i, BLOCKS * (i + 1)), 1,
            SamplingParams(temperature=0.0), (i,), state_slot=i,
        )
        for i in range(rows)
    )  # fmt: skip
    return Batch(tuple(sequences))


def main(argv: list[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--vocab", type=int, default=248_320)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    model = build_model(ModelConfig.from_hf(shape(args.layers, args.vocab)), dtype=torch.bfloat16)
    model.eval().init_weights()
    count = sum(parameter.numel() for parameter in model.parameters())
    model.pack_for_inference()
    found: dict[str, Any] = {"parameters": count, "threads": args.threads, "rows": {}}
    for rows in args.rows:
        runners = {
            "modules": ModelRunner(
                model, storage_of(model, rows), num_parameters=count, batch_invariant=True
            ),
            "compiled": CompiledRunner(model, storage_of(model, rows), batch_invariant=True),
        }
        seconds: dict[str, list[float]] = {name: [] for name in runners}
        tokens: dict[str, list[Any]] = {name: [] for name in runners}
        for turn in range(args.turns):
            for name, runner in runners.items():
                for step in range(3):
                    batch, start = step_of(rows, FIRST + 3 * turn + step), time.process_time()
                    drawn = runner.submit(batch).result()
                    if step:  # the first of a turn finds other caches
                        seconds[name].append(time.process_time() - start)
                    tokens[name].append([each[0].token_id for each in drawn])
        assert tokens["modules"] == tokens["compiled"]
        told = {name: round(1e3 * statistics.median(each), 1) for name, each in seconds.items()}
        found["rows"][rows] = {f"{name}_core_ms": each for name, each in told.items()}
        print(rows, found["rows"][rows], flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(found | {"torch": torch.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
