"""One row of `tilewise bench train`, in a process of its own: memory starts empty.

    python -m tilewise.bench.trainers.worker '{"shape": "gpt2-small", "way": "sdpa", ...}'

It loads its libraries and waits for a line of standard input, makes its first steps and writes
READY to standard output; after another line it times its steps and writes the row as JSON: rates.
What fails is a row, {"error": ...}.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.bench.roofline import device_name
from tilewise.bench.trainers.batches import (
    Padded,
    decoder_batches,
    masked_batches,
    open_corpus,
    pack_masked,
)
from tilewise.models import build_model
from tilewise.models.native import NativeDecoder
from tilewise.training.encoder import Bert
from tilewise.training.flops import peak_of
from tilewise.training.packing import Batch
from tilewise.training.parameters import load_parameters, pad_vocabulary
from tilewise.training.shapes import BERT_SHAPES, DECODER_SHAPES, decoder_config
from tilewise.training.trainer import Settings, Trainer, model_flops

__all__ = ["READY", "WAYS", "make_step", "measure"]

Json = dict[str, Any]
Step = Callable[[int], Tensor]

# Attention that transformers is asked for, and whether its model is compiled.
PEERS = {
    "eager": ("eager", False),
    "sdpa": ("sdpa", False),
    "tilewise": ("tilewise", False),
    "sdpa-compiled": ("sdpa", True),
    "tilewise-compiled": ("tilewise", True),
}
WAYS = (*PEERS, "ours", "ours-packed")
READY = "ready"
_BATCHES = 8  # different ones, in turns
_BLOCK = 5  # steps between two looks at the clock, fewer of long ones
_BLOCK_SECONDS = 1.0
_BETAS, _EPS = (0.9, 0.95), 1e-8


def measure(spec: Json, wait: Callable[[], object] = lambda: None) -> Json:
    """Train as `spec` says and return the numbers of the row: times, rates, memory and losses.

    Between the first steps and those that are timed it calls `wait`, and holds no more memory than
    the parameters and moments need meanwhile. Being out of GPU memory is a row with an "error".

    spec: shape, way (one of WAYS), N and B, device, text (a prepared folder, or None), losses (how
    many first steps' losses are returned), seconds (of measuring), lr, seed, compile (mode of our
    own step's torch.compile), memory_gib (a limit of the process, or None).
    """
    device = torch.device(spec["device"])
    if device.type == "cuda" and spec.get("memory_gib"):
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(spec["memory_gib"] * 2**30 / total)
    torch.set_float32_matmul_precision("high")
    started = time.perf_counter()
    try:
        step, facts = make_step(spec, device)
        losses = [step(index) for index in range(max(3, spec["losses"]))]
        values = torch.stack(losses).tolist()
        start = time.perf_counter() - started
        if device.type == "cuda":
            torch.cuda.empty_cache()
        wait()
        seconds, block = _time(step, device, spec["seconds"])
    except torch.OutOfMemoryError as error:
        return {"error": "out of memory", "asked": str(error).split(". ")[0][:200]}
    median = statistics.median(seconds)
    row = {
        "ms": median * 1e3,
        "spread": (max(seconds) - min(seconds)) / median,
        "steps": len(seconds) * block,
        "tokens/s": facts["tokens"] / median,
        "sequences/s": facts["sequences"] / median,
        "TFLOP/s": facts["flops"] / median / 1e12,
        "start_s": start,
        "losses": values[: spec["losses"]],
        "parameters": facts["parameters"],
        "mean_length": facts["tokens"] / facts["sequences"],
        "name": device_name(device.type),
        "torch": torch.__version__,
    }
    peak = peak_of(device)
    if peak is not None:
        row["MFU"] = row["TFLOP/s"] * 1e12 / peak
        row["GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
        row["GiB reserved"] = torch.cuda.max_memory_reserved(device) / 2**30
    return row


def _time(step: Step, device: torch.device, budget: float) -> tuple[list[float], int]:
    """Time blocks of steps until `budget` seconds have passed, three blocks at least.

    Returns:
        The seconds of a step in each block, and the number of steps of a block.
    """
    for index in range(2):  # memory is asked for anew
        begin = time.perf_counter()
        step(index).item()
        length = time.perf_counter() - begin
    block = max(1, min(_BLOCK, round(_BLOCK_SECONDS / max(length, 1e-9))))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    index, end = 0, time.perf_counter() + budget
    while len(seconds) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(block):
            loss = step(index)
            index += 1
        loss.item()  # waits
        seconds.append((time.perf_counter() - begin) / block)
    return seconds, block


def make_step(spec: Json, device: torch.device) -> tuple[Step, Json]:
    """Build the model and the batches of a row.

    Returns:
        A function from a step's index to its loss, which makes a training step on one of the
        batches in turn, and the mean tokens, sequences and FLOPs of a step, with the number of
        parameters.

    Raises:
        ValueError: the text has more words than the model's vocabulary.
    """
    is_masked = spec["shape"] in BERT_SHAPES
    if is_masked:
        shape = replace(BERT_SHAPES[spec["shape"]], max_positions=max(512, spec["N"]))
        words = shape.vocab_size
        with torch.device("meta"):
            counted: Any = Bert(shape)
    else:
        config = decoder_config(spec["shape"], context=spec["N"])
        words = config.vocab_size
        with torch.device("meta"):
            counted = NativeDecoder(config)
    corpus = open_corpus(
        spec["text"], words, longest=spec["N"] if is_masked else None, seed=spec["seed"]
    )
    if corpus.words > words:
        raise ValueError(f"text must have at most {words} words, got {corpus.words}")
    padded: list[Padded] = []
    batches: list[Batch] = []
    if is_masked:
        padded = masked_batches(
            corpus, spec["B"], spec["N"], _BATCHES, words=corpus.words, seed=spec["seed"]
        )
        batches = pack_masked(padded)
        tokens = [sum(each.lengths) for each in padded]
        sequences = spec["B"]
    else:
        batches = decoder_batches(
            corpus,
            spec["B"],
            spec["N"],
            _BATCHES,
            packed=spec["way"] == "ours-packed",
            seed=spec["seed"],
        )
        tokens = [spec["B"] * spec["N"]]
        sequences = statistics.fmean(b.count for b in batches)
        sequences = spec["B"] if spec["way"] != "ours-packed" else sequences
    mean_tokens = statistics.fmean(tokens)
    pairs = statistics.fmean(batch.pairs for batch in batches)
    facts = {
        "tokens": mean_tokens,
        "sequences": sequences,
        "flops": model_flops(counted, int(mean_tokens), pairs),
        "parameters": sum(p.numel() for p in counted.parameters()),
    }
    if spec["way"] in PEERS:
        rows = padded if is_masked else batches
        return _peer_step(spec, rows, device), facts
    return _our_step(spec, [batch.to(device) for batch in batches], device), facts


def hugging_face(spec: Json, attention: str, device: torch.device) -> Any:
    """Return transformers' model of the spec's shape on a device, for training, with random weights
    by the spec's seed, the same for each `attention`, its attn_implementation."""
    import transformers

    if attention == "tilewise":
        from tilewise.integrations.transformers import register

        register()
    name = spec["shape"]
    if name in BERT_SHAPES:
        shape = replace(BERT_SHAPES[name], max_positions=max(512, spec["N"]))
        fields = {key: value for key, value in shape.to_hf().items() if key != "architectures"}
        config = transformers.BertConfig(**fields)
        made = transformers.AutoModelForMaskedLM
    else:
        is_gpt2 = name.startswith("gpt2")
        fields = {key: v for key, v in DECODER_SHAPES[name].items() if key != "architectures"}
        fields["n_positions" if is_gpt2 else "max_position_embeddings"] = spec["N"]
        # No dropout: ours has none, and the figures of others were measured without.
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if is_gpt2 else {}
        family = "GPT2" if is_gpt2 else "Llama"
        config = getattr(transformers, f"{family}Config")(**fields, **none)
        made = transformers.AutoModelForCausalLM
    config.use_cache = False
    torch.manual_seed(spec["seed"])
    with device:
        model = made.from_config(config, attn_implementation=attention)
    return model.to(device).train()


def _peer_step(spec: Json, batches: Sequence[Any], device: torch.device) -> Step:
    attention, compiles = PEERS[spec["way"]]
    model = hugging_face(spec, attention, device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec["lr"], betas=_BETAS, eps=_EPS, weight_decay=0.0, fused=True
    )
    inputs = []
    for batch in batches:
        ids = batch.ids.to(device)
        given = {"input_ids": ids, "labels": ids}
        if isinstance(batch, Padded):
            given |= {"labels": batch.labels.to(device), "attention_mask": batch.mask.to(device)}
        elif compiles and attention == "tilewise":
            # In a compiled graph a mask must say that these are no packed sequences.
            given["attention_mask"] = torch.ones_like(ids)
        inputs.append(given)
    forward = torch.compile(model) if compiles else model

    def step(index: int) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = forward(**inputs[index % len(inputs)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _our_step(spec: Json, batches: list[Batch], device: torch.device) -> Step:
    settings = Settings(
        lr=spec["lr"],
        final_lr=1.0,
        warm_up=0,
        steps=1,
        decay=0.0,
        betas=_BETAS,
        eps=_EPS,
        clip=0.0,
        compile=spec["compile"],
    )
    if spec["shape"] in BERT_SHAPES:
        shape = replace(BERT_SHAPES[spec["shape"]], max_positions=max(512, spec["N"]))
        words = shape.vocab_size
        model: Any = Bert(shape, pad_vocabulary(words)).to(device)
    else:
        config = decoder_config(spec["shape"], context=spec["N"])
        words = config.vocab_size
        model = build_model(replace(config, vocab_size=pad_vocabulary(words)), device=device)
    # The peer's own weights, so that the losses can be compared.
    tensors = hugging_face(spec, "sdpa", device).state_dict()
    load_parameters(model, tensors)
    del tensors
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trainer = Trainer(model, settings, words=words)

    def step(index: int) -> Tensor:
        return trainer.step([batches[index % len(batches)]])

    return step


def main(text: str) -> None:
    """Run the process of a row: measure the row that a JSON text describes, and print it as JSON.

    It waits for a line of standard input twice, see the module; a failure is printed as a row with
    an "error". What libraries print goes to standard error.
    """
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def go_on() -> None:
        if not sys.stdin.readline():
            raise SystemExit("the parent does not wait for this row any more")

    def wait() -> None:
        out.write(READY + "\n")
        out.flush()
        go_on()

    try:
        import transformers  # noqa: F401  which takes seconds

        go_on()
        row = measure(json.loads(text), wait)
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}
        if not isinstance(error, (ImportError, ValueError)):
            import traceback

            traceback.print_exc()
    out.write(json.dumps(row) + "\n")
    out.flush()


if __name__ == "__main__":
    main(sys.argv[1])
