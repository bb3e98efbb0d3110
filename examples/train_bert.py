"""Train a BERT as a masked language model on a folder of text, without computing padding.

    python examples/train_bert.py --text FOLDER --out bert
    python -c "from transformers import pipeline; print(pipeline('fill-mask', 'bert')('A [MASK].'))"

Texts of at most --context tokens, [CLS] and [SEP] among them, lie end to end in batches of --tokens
tokens, and each sees itself alone (`tilewise.attention_varlen`); the output head multiplies the
masked places only. For the rest see train_gpt2.py: files, checkpoints and options are the same. OUT
is a BertForMaskedLM of transformers; an encoder generates nothing, so `tilewise generate` cannot
serve it. There is no prediction of next sentences (Liu et al., 2019, found no use in it).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shutil
import sys
from pathlib import Path

import torch

from tilewise.training.corpus import prepare
from tilewise.training.encoder import Bert
from tilewise.training.packing import Packer, mask_batch
from tilewise.training.parameters import export, pad_vocabulary
from tilewise.training.run import Plan, run
from tilewise.training.shapes import BERT_SHAPES
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
        longest=options.context,
        fresh=options.fresh,
    )
    shape = dataclasses.replace(
        BERT_SHAPES[options.shape], vocab_size=corpus.words, max_positions=options.context
    )
    model = Bert(shape, pad_vocabulary(corpus.words)).to(device)
    model.init_weights(generator=torch.Generator(device).manual_seed(options.seed))
    compiles = options.compile if options.compile is not None else "default"
    if options.compile is None and device.type == "cpu":
        compiles = ""
    settings = Settings(
        lr=options.lr,
        steps=options.steps,
        warm_up=min(100, options.steps // 10),
        decay=0.01,
        betas=(0.9, 0.98),
        eps=1e-6,
        dtype=options.dtype,
        compile=compiles,
        deterministic=options.deterministic,
    )
    trainer = Trainer(model, settings, words=corpus.words)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(
        f"{options.shape}: {count / 1e6:.1f} million parameters; {len(corpus):,} texts, "
        f"{len(corpus.tokens) - 1:,} tokens; products in {settings.dtype}; {settings.loss} loss; "
        f"{'compiled, ' + compiles if compiles else 'not compiled'}; on {device}",
        file=sys.stderr,
    )
    trained, held_out = corpus.split(options.held_out)
    packing = {"tokens": options.tokens, "context": options.context, "seed": options.seed}
    run(
        trainer,
        Packer(corpus, trained, **packing),
        options.out,
        Plan(
            accumulate=options.accumulate,
            log_every=options.log_every,
            evaluate_every=options.evaluate_every,
            save_every=options.save_every,
            stop_after=options.stop_after,
        ),
        held_out=Packer(corpus, held_out, **packing) if len(held_out) else None,
        change=functools.partial(
            mask_batch,
            share=options.masked,
            mask=corpus.special["[MASK]"],
            words=corpus.words,
            special=frozenset(corpus.special.values()),
            seed=options.seed,
        ),
        resume=not options.fresh,
    )
    if trainer.steps == options.steps:
        export(
            model, options.out, words=corpus.words, dtype=torch.float32,
            pad_token_id=corpus.special["[PAD]"],
        )  # fmt: skip
        shutil.copyfile(data / "tokenizer.json", options.out / "tokenizer.json")
        tokens = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": options.context}
        config |= {f"{name}_token": token for name, token in tokens.items()}
        (options.out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        print(f"wrote {options.out}, a BertForMaskedLM of transformers", file=sys.stderr)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, required=True, help="a .txt file, or a folder of them")
    add("--out", type=Path, required=True, help="folder of the checkpoint")
    add("--data", type=Path, help="folder of the tokens; default OUT/data")
    add("--tokenizer", type=Path, help="tokenizer.json with BERT's special tokens")
    add("--vocab", type=int, default=30_522, help="words of a trained tokenizer at most")
    add("--shape", choices=BERT_SHAPES, default="bert-base", help="default bert-base")
    add("--context", type=int, default=512, help="tokens of the longest text; default 512")
    add("--masked", type=float, default=0.15, help="share of tokens; default 0.15")
    add("--tokens", type=int, default=32_768, help="of a batch; default 32768")
    add("--accumulate", type=int, default=1, help="batches of a step; default 1")
    add("--steps", type=int, default=2000, help="of the whole run; default 2000")
    add("--lr", type=float, default=2e-4, help="highest learning rate; default 2e-4")
    add("--held-out", type=float, default=0.01, help="share of texts; default 0.01")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products")
    add("--compile", metavar="MODE", help="of torch.compile, '' does not; default: on a GPU")
    add("--deterministic", action="store_true", help="the same bits in each run, slower")
    add("--log-every", type=int, default=10, help="steps; default 10")
    add("--evaluate-every", type=int, default=250, help="steps; default 250")
    add("--save-every", type=int, default=500, help="steps; default 500")
    add("--stop-after", type=int, metavar="STEP", help="end there, to go on later")
    add("--fresh", action="store_true", help="begin anew: the tokens, too, and no checkpoint")
    add("--seed", type=int, default=0, help="of weights, order and masks; default 0")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    run_script("train_bert", main)
