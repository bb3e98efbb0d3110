"""Train an adapter (LoRA) of a model on a CPU, in a few minutes, and save it as PEFT does.

    python examples/train_adapter.py --out pirate
    python examples/train_adapter.py --text stories.txt --out mine --steps 300
    tilewise serve story --enable-lora --lora-modules pirate=pirate

The model's weights stay as they are; beside each linear layer W (N, K) a product of rank r is
learnt: W + alpha / r B A, A (r, K) drawn and B (N, r) zero at the start. Without --text the
stories are made from a few sentences about pirates, so that the model, which knows none, can be
seen to learn them. A text file separates its stories by empty lines; every tenth is held out.

--out receives adapter_config.json and adapter_model.safetensors, which any library reads that reads
PEFT's. At the end the story model continues a prompt with the adapter and without, served by name.

Source: Hu et al., 2021 (LoRA).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tilewise import LLM, SamplingParams
from tilewise.engine.settings import model_directory
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.models import adapter_tensors, load_model, train_adapter
from tilewise.models.adapters import AdapterTensors

WHO = ("Captain Red", "old Jack", "Anne the pirate", "the one-eyed cook", "Billy the cabin boy")
WHAT = ("gold", "a map", "a chest", "a green parrot", "the sail", "a silver key")
WHERE = ("on the black ship", "under the palm tree", "on the far island", "in the deep sea")
SAID = ("Arr, me hearties!", "Yo ho ho!", "Shiver me timbers!", "All hands on deck!")
DID = ("found", "hid", "lost", "stole", "looked for")


def stories(count: int, seed: int = 0) -> list[str]:
    """Return short stories about pirates."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        who, other = draw.sample(WHO, 2)
        what, where = draw.choice(WHAT), draw.choice(WHERE)
        lines = [
            f"Once upon a time, {who} {draw.choice(DID)} {what} {where}.",
            f'"{draw.choice(SAID)}" said {who}.',
            f"Then {other} came and wanted {what}, too.",
            f'"{draw.choice(SAID)}" said {other}, and they sailed away with {what}.',
        ]
        found.append(" ".join(lines))
    return found


def save(folder: Path, adapter: AdapterTensors, base: str) -> None:
    """Write an adapter as PEFT does."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(adapter.tensors), folder / "adapter_model.safetensors", {"format": "pt"})
    config = {**adapter.config, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Return the mean loss of the tokens of rows (B, S + 1) behind their first."""
    logits = model.compute_logits(model(rows[:, :-1]))  # type: ignore[operator]
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def main(given: Sequence[str] | None = None) -> None:
    """Train, save, and show what the adapter says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="story")
    parser.add_argument("--text", type=Path, help="stories, separated by empty lines")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=32)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    torch.manual_seed(options.seed)
    directory = model_directory(options.model)
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise SystemExit(f"--model must have a tokenizer.json, got {options.model}")
    texts = stories(600)
    if options.text is not None:
        texts = [text.strip() for text in options.text.read_text().split("\n\n") if text.strip()]
    ids = [tokenizer.encode(text) for text in texts]
    held = [token for i, each in enumerate(ids) if i % 10 == 0 for token in each]
    seen = torch.tensor([token for i, each in enumerate(ids) if i % 10 for token in each])
    if len(seen) <= options.context + 1 or len(held) <= options.context + 1:
        raise SystemExit(f"--text must have more tokens than --context, got {len(held)} held out")
    model = load_model(directory, dtype="float32")
    learnt = train_adapter(model, rank=options.rank, alpha=options.alpha)
    count = min(8, (len(held) - 1) // options.context)
    checked = torch.tensor(held[: count * options.context + 1])
    checked = checked.unfold(0, options.context + 1, options.context)
    optimizer = torch.optim.AdamW(learnt, lr=options.lr, weight_decay=0.0)
    began = time.perf_counter()
    for step in range(options.steps + 1):
        if step % 20 == 0 or step == options.steps:
            with torch.no_grad():
                held_out = loss_of(model, checked).item()
            spent = time.perf_counter() - began
            print(f"step {step:4}  held out {held_out:.3f}  {spent:.0f} s", flush=True)
        if step == options.steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1, (step + 1) / 10) * (1 - step / options.steps)
        firsts = torch.randint(0, len(seen) - options.context, (options.rows, 1))
        rows = seen[(firsts + torch.arange(options.context + 1)).clamp(max=len(seen) - 1)]
        loss = loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save(options.out, adapter_tensors(model), options.model)
    print(f"saved {options.out}, {sum(each.numel() for each in learnt):,} numbers")
    settings = {"enable_lora": True, "max_lora_rank": options.rank}
    with LLM(directory, lora_modules={"new": options.out}, num_blocks=64, **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=40)
        for name in ("", "new"):
            [output] = llm.generate("Once upon a time", params, lora_request=name)
            print(f"{name or 'the model':>9}: Once upon a time{output.outputs[0].text}")


if __name__ == "__main__":
    main()
