"""Compare a decode step of each native family on a CPU with a Llama's of the same width.

    python lab/family_steps.py [--json FILE] [FAMILY ...]

What  for each family that runs as the compiled step, seconds of the process's clock for a step of
      1 and of 8 sequences, and its speed beside Llama: weights that are multiplied a second.
How   random weights in float32, one thread, transformers' defaults of the family but for the
      sizes; mixtures have as many experts as a token uses, so that all are read. A Llama that is
      made beside each family, so that both find memory alike, takes turns with it, and the least
      of the rounds counts. Other work on the machine takes none of the process's clock, but of its
      caches.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tilewise.bench.roofline import device_name
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import cache_spec
from tilewise.engine.steps.cpu_step import CompiledRunner, why_not
from tilewise.engine.steps.inputs import HostTables, build_inputs
from tilewise.errors import CheckpointError
from tilewise.models import ModelConfig, build_model
from tilewise.models.families import FAMILIES
from tools.site.models import CHANGES

CPU, BLOCK, LENGTH = torch.device("cpu"), 16, 64
BATCHES, STEPS, ROUNDS = (1, 8), 6, 4
SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "layer_types": None,
    "max_position_embeddings": 1024, "moe_intermediate_size": 704, "num_experts": 2,
    "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "shared_expert_intermediate_size": 704,
    "q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "intermediate_size_mlp": 1408, "global_head_dim": 128, "ffn_dim": 1408,
    "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 2048, "moe_num_experts": 2,
    "moe_k": 2, "word_embed_proj_dim": 512, "rotary_dim": 32, "num_kv_shared_layers": 0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def config_of(architecture: str) -> ModelConfig:
    """Return the configuration of a family in these sizes."""
    from transformers import CONFIG_MAPPING

    family = FAMILIES[architecture]
    kind = CONFIG_MAPPING[family.model_type]
    fields = kind().to_dict() | CHANGES.get(architecture, {})
    for name, value in SIZES.items():
        own = kind.attribute_map.get(name, name)
        if own in fields or own == "head_dim":
            fields[own] = value
    config = ModelConfig.from_hf(fields | {"architectures": [architecture]})
    return replace(config, layers=config.layers[: SIZES["num_hidden_layers"]])


class Steps:
    """A model that decodes the same step again and again."""

    def __init__(self, config: ModelConfig) -> None:
        model = build_model(config).eval()
        model.pack_for_inference()
        storage = KVStorage(cache_spec(config, BLOCK, model.dtype), 16 * max(BATCHES), CPU)
        self.reason = why_not(model, storage)
        if self.reason is not None:
            return
        self.runner = CompiledRunner(model, storage, batch_invariant=True)
        self.weights = int(self.runner._num_weights)
        groups = storage.spec.group_of
        more = max(groups, default=0)
        self.inputs = {}
        for count in BATCHES:
            runs = [self._run(i, more) for i in range(count)]
            batch = Batch(tuple(runs), other_copies=((),) * more)
            self.inputs[count] = build_inputs(
                batch,
                BLOCK,
                CPU,
                group_of=groups,
                other_tables=[HostTables() for _ in range(more)],
                batch_invariant=True,
            )
            self.seconds(count, 2)

    @staticmethod
    def _run(index: int, more: int) -> ScheduledSequence:
        blocks = range(8 * index, 8 * index + LENGTH // BLOCK)
        return ScheduledSequence(
            seq_id=index,
            token_ids=(5 + index,),
            start=LENGTH - 1,
            block_ids=tuple(blocks),
            num_samples=1,
            sampling=SamplingParams(),
            seeds=(index,),
            others=((tuple(blocks), 0),) * more,
        )

    def seconds(self, count: int, steps: int) -> float:
        """Return seconds of the process's clock for a step of so many sequences."""
        begun = time.process_time()
        for _ in range(steps):
            self.runner.forward(self.inputs[count])
        return (time.process_time() - begun) / steps


def main() -> None:
    """Print a line for each family."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="classes; all if none")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for name in options.families or sorted(FAMILIES):
        try:
            steps = Steps(config_of(name))
        except (CheckpointError, ValueError) as error:
            print(f"{name}: {error}", flush=True)
            continue
        row: dict[str, Any] = {"family": name}
        if steps.reason is not None:
            row["why_not_compiled"] = steps.reason
        else:
            llama = Steps(config_of("LlamaForCausalLM"))
            row["weights"] = steps.weights
            for count in BATCHES:
                times = [
                    [one.seconds(count, STEPS) for one in (llama, steps)] for _ in range(ROUNDS)
                ]
                theirs, own = (min(column) for column in zip(*times, strict=True))
                row[f"ms_{count}"] = 1e3 * own
                row[f"of_llama_{count}"] = theirs / own * steps.weights / llama.weights
        print(json.dumps(row), flush=True)
        rows.append(row)
        if options.json is not None:
            text = json.dumps(
                {"device": device_name("cpu"), "torch": torch.__version__, "rows": rows}
            )
            options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
