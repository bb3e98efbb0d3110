"""Train a GPT-2 or a Llama on a folder of text, on one GPU or on a CPU.

    python examples/train_gpt2.py --text FOLDER --out gpt2
    python examples/train_gpt2.py --text FOLDER --out llama --shape llama-124m
    tilewise generate --model gpt2 --prompt "Once upon a time"

FOLDER holds .txt files; a line <|endoftext|> parts the documents of a file. The first call writes
their tokens to OUT/data. Documents are packed end to end: no padding is computed and attention
stays within a document (`tilewise.attention_varlen`). --rows joins the documents and cuts rows of
--context tokens instead, as GPT-2's own training did.

Parameters and AdamW's moments are float32, products bfloat16; the forward and backward pass is one
graph of torch.compile; the loss is computed in chunks, so that logits are never all in memory. A
call that finds OUT/checkpoint.pt goes on from it, and gives the bits of a run that was never
interrupted where the machine's kernels do (--deterministic asks them to on a GPU). Ctrl-C and
SIGTERM end a run after its step, with a checkpoint; a loss that is no number any more ends it with
exit code 1, and OUT/checkpoint.pt stays the last good one. --fresh begins anew.

OUT is a checkpoint in Hugging Face's layout at the end: transformers, `tilewise generate` and
`tilewise serve` read it. On a CPU, in seconds:

    python examples/train_gpt2.py --text FOLDER --out tiny --shape gpt2-tiny --vocab 512 \\
        --context 128 --tokens 1024 --steps 20 --device cpu
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path

import torch

from tilewise.models import build_model
from tilewise.training.corpus import END, Corpus, prepare
from tilewise.training.loss import LOSSES
from tilewise.training.packing import Packer
from tilewise.training.parameters import export, pad_vocabulary
from tilewise.training.run import Plan, run
from tilewise.training.shapes import DECODER_SHAPES, decoder_config
from tilewise.training.terminal import run_script
from tilewise.training.trainer import Settings, Trainer


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    data = options.data or options.out / "data"
    corpus = prepare(
        options.text,
        data,
        tokenizer=options.tokenizer,
        words=options.vocab,
        fresh=options.fresh,
    )
    trained, held_out = corpus.split(options.held_out)
    trainer = make_trainer(corpus, options, device)
    packing = {"context": options.context, "seed": options.seed, "is_rows": options.rows}
    run(
        trainer,
        Packer(corpus, trained, tokens=options.tokens, **packing),
        options.out,
        Plan(
            accumulate=options.accumulate,
            log_every=options.log_every,
            evaluate_every=options.evaluate_every,
            save_every=options.save_every,
            stop_after=options.stop_after,
        ),
        held_out=(
            Packer(corpus, held_out, tokens=options.tokens, **packing) if len(held_out) else None
        ),
        resume=not options.fresh,
    )
    if trainer.steps == options.steps:
        write_checkpoint(trainer, corpus, data, options.out)


def make_trainer(corpus: Corpus, options: argparse.Namespace, device: torch.device) -> Trainer:
    """Build the model with random weights, its vocabulary padded for the tensor cores."""
    config = decoder_config(
        options.shape, words=corpus.words, context=options.context, end=corpus.special[END]
    )
    padded = dataclasses.replace(config, vocab_size=pad_vocabulary(corpus.words))
    generator = torch.Generator(device).manual_seed(options.seed)
    model = build_model(padded, device=device, generator=generator)
    compiles = options.compile if options.compile is not None else "default"
    if options.compile is None and device.type == "cpu":
        compiles = ""
    settings = Settings(
        lr=options.lr,
        steps=options.steps,
        warm_up=options.warm_up if options.warm_up is not None else min(100, options.steps // 10),
        decay=options.decay,
        dtype=options.dtype,
        loss=options.loss,
        compile=compiles,
        deterministic=options.deterministic,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{options.shape}: {count / 1e6:.1f} million parameters, {config.vocab_size:,} words; "
        f"{len(corpus):,} documents, {len(corpus.tokens) - 1:,} tokens; products in "
        f"{settings.dtype}; {settings.loss} loss; "
        f"{'compiled, ' + compiles if compiles else 'not compiled'}; on {device}",
        file=sys.stderr,
    )
    return Trainer(model, settings, words=corpus.words)


def write_checkpoint(trainer: Trainer, corpus: Corpus, data: Path, out: Path) -> None:
    """Write what Hugging Face's layout has: weights, configurations, tokenizer."""
    export(trainer.model, out, words=trainer.words)
    shutil.copyfile(data / "tokenizer.json", out / "tokenizer.json")
    end = corpus.special[END]
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
        },
        "generation_config.json": {"bos_token_id": end, "eos_token_id": end, "do_sample": True},
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {out}: tilewise generate --model {out}", file=sys.stderr)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, required=True, help="a .txt file, or a folder of them")
    add("--out", type=Path, required=True, help="folder of the checkpoint")
    add("--data", type=Path, help="folder of the tokens; default OUT/data")
    add("--tokenizer", type=Path, help="tokenizer.json or its folder; default: trained on the text")
    add("--vocab", type=int, default=50_257, help="words of a trained tokenizer at most")
    add("--shape", choices=DECODER_SHAPES, default="gpt2-small", help="default gpt2-small")
    add("--context", type=int, default=1024, help="tokens of the longest document; default 1024")
    add("--rows", action="store_true", help="joined documents, cut into rows; default: packed")
    add("--tokens", type=int, default=32_768, help="of a batch; default 32768")
    add("--accumulate", type=int, default=1, help="batches of a step; default 1")
    add("--steps", type=int, default=2000, help="of the whole run; default 2000")
    add("--lr", type=float, default=6e-4, help="highest learning rate; default 6e-4")
    add("--warm-up", type=int, help="steps; default a tenth of the run, at most 100")
    add("--decay", type=float, default=0.1, help="weight decay; default 0.1")
    add("--held-out", type=float, default=0.01, help="share of documents; default 0.01")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products")
    add("--loss", choices=LOSSES, default="chunked", help="liger needs tilewise[liger]")
    add("--compile", metavar="MODE", help="of torch.compile, '' does not; default: on a GPU")
    add("--deterministic", action="store_true", help="the same bits in each run, slower")
    add("--log-every", type=int, default=10, help="steps; default 10")
    add("--evaluate-every", type=int, default=250, help="steps; default 250")
    add("--save-every", type=int, default=500, help="steps; default 500")
    add("--stop-after", type=int, metavar="STEP", help="end there, to go on later")
    add("--fresh", action="store_true", help="begin anew: the tokens, too, and no checkpoint")
    add("--seed", type=int, default=0, help="of weights and order; default 0")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_script("train_gpt2", main)
