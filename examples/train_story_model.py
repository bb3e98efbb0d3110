"""Train the small story model that ships with tilewise, or your own, on plain text.

    python examples/train_story_model.py --text TEXT_DIR --data .data --out story --seconds 480
    python examples/story_card.py --run story --data .data

The first call cleans and tokenises TEXT_DIR into --data unless that folder is filled already (see
story_data.py), trains a Llama decoder with tilewise.attention forward and backward, and writes a
Hugging Face checkpoint to --out: model.safetensors (bfloat16), config.json, tokenizer.json,
tokenizer_config.json, generation_config.json, log.jsonl and samples.txt. The second adds loss.png
and the model card. `tilewise.LLM("story")` serves the folder.

How it trains: each epoch shuffles the documents, repeats those of a source as often as --weights
says, joins them and cuts rows at a random offset, half of them moved on to the next start of a
document, which is what a prompt looks like. Parameters are float32, products bfloat16 (CUDA).
AdamW, linear warm-up, cosine to zero over --steps or --seconds, gradient clipping, dropout on what
each block adds to the residual stream, an exponential average of the weights. The text is seen many
times over, so regularisation decides: whatever of weights and average has the least validation
loss, as the mean over the sources, is what is written.

--sweep tries settings one after the other and prints a table instead of writing checkpoints:

    python examples/train_story_model.py --data .data --out sweep --seconds 90 \\
        --sweep dropout=0.1 dropout=0.2,decay=0.5 lr=1.5e-3

--device cpu --tiny --steps 20 is a smoke run of a few seconds.

A run whose loss is no number any more, and one that Ctrl-C or SIGTERM ends, writes the best
weights so far; its exit code is 1, 130 or 143.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import platform
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from story_stream import Data, TokenStream
from tokenizers import Tokenizer
from torch import Tensor

from tilewise.models import Decoder, ModelConfig, build_model, save_model
from tilewise.training.terminal import interrupts, run_script

PROMPTS = (
    "",
    "Once upon a time",
    "One day, a little girl named Lily",
    "The old fox looked at the rabbit and said,",
    "There was once a king who had three sons.",
    '"Where are you going?" asked',
)
WARM_UP = 0.03  # of the run
LABEL_PADDING = -100  # cross_entropy's ignore_index


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What --sweep can vary; the defaults are the shipped model's."""

    layers: int = 9
    hidden: int = 256
    intermediate: int = 704
    heads: int = 8
    kv_heads: int = 4
    context: int = 1024
    batch: int = 32
    lr: float = 3e-3
    decay: float = 0.1
    dropout: float = 0.1
    ema: float = 0.998
    seed: int = 0


TINY = Settings(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, context=64, batch=8)


def make_config(settings: Settings, vocab_size: int) -> ModelConfig:
    """Return the Llama configuration of `settings`; embeddings are tied."""
    return ModelConfig.from_hf(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": vocab_size,
            "hidden_size": settings.hidden,
            "intermediate_size": settings.intermediate,
            "num_hidden_layers": settings.layers,
            "num_attention_heads": settings.heads,
            "num_key_value_heads": settings.kv_heads,
            "head_dim": settings.hidden // settings.heads,
            "max_position_embeddings": settings.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
    )


def add_dropout(model: Decoder, probability: float) -> None:
    """Drop from the embeddings and from what each block adds to the residual stream."""

    def drop(module: torch.nn.Module, _: object, output: Tensor) -> Tensor:
        return F.dropout(output, probability, module.training)

    if probability > 0:
        for name, module in model.named_modules():
            if name.endswith(("embed_tokens", ".attention", ".mlp")):
                module.register_forward_hook(drop)


def make_optimizer(model: Decoder, settings: Settings) -> torch.optim.AdamW:
    """Return AdamW that decays matrices, not the norms' gains."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    fused = matrices[0].is_cuda
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), fused=fused)


def learning_rate(progress: float) -> float:
    """Linear warm-up, then cosine to zero; `progress` and the result are in 0 ... 1."""
    if progress < WARM_UP:
        return progress / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARM_UP) / (1 - WARM_UP))))


def compute_loss(
    model: Decoder, forward: Callable[[Tensor], Tensor], ids: Tensor, targets: Tensor, how: str
) -> Tensor:
    """Cross-entropy in nats, `how` = "mean" or "sum", in bfloat16 products on CUDA."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        logits = model.compute_logits(forward(ids))
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=LABEL_PADDING, reduction=how
    )


@torch.no_grad()
def evaluate(model: Decoder, data: Data, settings: Settings) -> dict[str, float]:
    """Return validation losses: nats a token and bits a character, per source and over all.

    "mean" is the mean of the sources' losses, "all" counts every token alike.
    """
    was_training, context = model.training, settings.context
    model.eval()
    result: dict[str, float] = {}
    total_loss, total_tokens, total_chars = 0.0, 0, 0
    for source, part in data.meta["val"].items():
        span = data.val[part["start"] : part["end"] + 1].long()
        rows = -(-(len(span) - 1) // context)
        ids = F.pad(span[:-1], (0, rows * context - len(span) + 1)).view(rows, context)
        targets = F.pad(span[1:], (0, rows * context - len(span) + 1), value=LABEL_PADDING)
        batches = zip(ids.split(32), targets.view(rows, context).split(32), strict=True)
        loss = sum(compute_loss(model, model, x, y, "sum").item() for x, y in batches)
        result[source] = loss / (len(span) - 1)
        result[f"{source}_bits_per_char"] = loss / math.log(2) / part["chars"]
        total_loss += loss
        total_tokens += len(span) - 1
        total_chars += part["chars"]
    result["mean"] = sum(result[source] for source in data.meta["val"]) / len(data.meta["val"])
    result["all"] = total_loss / total_tokens
    result["all_bits_per_char"] = total_loss / math.log(2) / total_chars
    model.train(was_training)
    return result


class Log:
    """JSON lines in a file, short lines on stderr."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w", encoding="utf-8")

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def write(self, kind: str, **values: Any) -> None:
        """Append one record; a training or validation record is shown too."""
        self.file.write(json.dumps({"kind": kind, **values}, allow_nan=False) + "\n")
        self.file.flush()
        if kind in ("train", "val"):
            shown = {k: round(v, 4) for k, v in values.items() if isinstance(v, int | float)}
            print(kind, *(f"{k} {v}" for k, v in shown.items()), file=sys.stderr, flush=True)


def train(
    data: Data,
    settings: Settings,
    log: Log,
    *,
    weights: dict[str, float],
    seconds: float | None,
    steps: int | None,
    evaluations: int = 40,
    compiles: bool = False,
) -> tuple[Decoder, dict[str, Any]]:
    """Train one model; return it with the best weights, and its record.

    A run that ends early has "stopped" in its record, the reason, and "signal" if it was one.

    Raises:
        FloatingPointError: no evaluation was finite.

    Args:
        weights: see TokenStream.
        seconds, steps: one of them; the schedule runs over it. The clock starts after a warm-up
            pass that compiles the kernels.
        evaluations: how often the run measures validation loss, before its end.
        compiles: run the forward and backward passes through torch.compile.
    """
    device = data.train.device
    torch.manual_seed(settings.seed)
    generator = torch.Generator(device).manual_seed(settings.seed)
    model = build_model(make_config(settings, data.meta["vocab_size"]), device=device)
    average = copy.deepcopy(model).eval()
    add_dropout(model, settings.dropout)
    forward = torch.compile(model) if compiles else model
    optimizer = make_optimizer(model, settings)
    stream = TokenStream(data.train, data.meta["train"], weights, settings.context, generator)
    parameters = sum(p.numel() for p in model.parameters())
    log.write(
        "run",
        settings=dataclasses.asdict(settings),
        weights=weights,
        seconds=seconds,
        steps=steps,
        compiles=compiles,
        parameters=parameters,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        torch=torch.__version__,
        data=data.meta,
    )
    compute_loss(model, forward, *next(stream.batches(settings.batch)), "mean").backward()
    optimizer.zero_grad()
    evaluate(model, data, settings)

    best: dict[str, Any] = {"mean": math.inf}
    stopped = ""
    failed = torch.zeros((), device=device)  # the first step whose loss or gradient was not finite
    tokens = step = evaluated = 0
    started = shown = time.perf_counter()
    shown_tokens = 0
    with interrupts("the run ends after this step and writes its best weights") as interrupted:
        for ids, targets in stream.batches(settings.batch):
            elapsed = time.perf_counter() - started
            progress = step / steps if steps else elapsed / (seconds or 1.0)
            if interrupted.signal is not None:
                stopped = f"{interrupted.signal.name} came after step {step}"
            if stopped or progress >= evaluated / evaluations or progress >= 1:
                evaluated = int(min(progress, 1.0) * evaluations) + 1
                for which, candidate in (("weights", model), ("average", average)):
                    losses = evaluate(candidate, data, settings)
                    if not math.isfinite(losses["mean"]):
                        stopped = f"validation loss was {losses['mean']} after step {step}"
                        break
                    values = {"elapsed": elapsed, "tokens": tokens, "which": which, **losses}
                    log.write("val", step=step, **values)
                    if losses["mean"] < best["mean"]:
                        best = {"step": step, "which": which, "tokens": tokens, **losses}
                        best_state = {k: v.clone() for k, v in candidate.state_dict().items()}
            if stopped or progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * learning_rate(max(progress, 1e-3))
            loss = compute_loss(model, forward, ids, targets, "mean")
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            tokens += ids.numel()
            with torch.no_grad():
                momentum = min(settings.ema, step / (9 + step))
                pairs = list(model.parameters())
                torch._foreach_lerp_(list(average.parameters()), pairs, 1 - momentum)
                is_first = ~(loss.isfinite() & norm.isfinite()) & (failed == 0)
                failed = torch.where(is_first, float(step), failed)
            if step % 50 == 0 or step == 1 or (steps is not None and steps <= 100):
                if failed:
                    stopped = f"loss or gradient was not finite at step {failed:.0f}"
                    break
                value, now = loss.item(), time.perf_counter()
                log.write(
                    "train",
                    step=step,
                    elapsed=now - started,
                    tokens=tokens,
                    loss=value,
                    norm=norm.item(),
                    lr=optimizer.param_groups[0]["lr"],
                    tokens_per_second=(tokens - shown_tokens) / (now - shown),
                )
                shown, shown_tokens = now, tokens
    if "step" not in best:
        raise FloatingPointError(f"validation loss must be finite once, got none; {stopped}")
    average.load_state_dict(best_state)
    seen = tokens / len(data.train)
    record: dict[str, Any] = {"parameters": parameters, "steps": step, "tokens": tokens}
    record["epochs"] = seen
    record["elapsed"] = time.perf_counter() - started
    if stopped:
        record["stopped"] = stopped
    if interrupted.signal is not None:
        record["signal"] = int(interrupted.signal)
    return average, record | {"best": best}


@torch.no_grad()
def sample(
    model: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    max_tokens: int = 200,
    temperature: float = 0.7,
    top_p: float = 0.95,
    seed: int = 0,
) -> str:
    """Continue `prompt` until the end token or `max_tokens`: nucleus sampling, no cache."""
    device = model.embed_tokens.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    for _ in range(max_tokens):
        window = torch.tensor([ids[-model.config.max_position_embeddings :]], device=device)
        logits = model.compute_logits(model(window)[0, -1])
        probs, order = (logits / temperature).softmax(-1).sort(descending=True)
        probs[probs.cumsum(-1) - probs > top_p] = 0
        token = int(order[torch.multinomial(probs, 1, generator=generator)])
        if token == 0:
            break
        ids.append(token)
    return tokenizer.decode(ids)


def write_checkpoint(model: Decoder, data: Data, out: Path) -> None:
    """Write the weights in bfloat16, the configuration and the tokenizer."""
    save_model(model.bfloat16(), out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(data.folder / name, out / name)
    generation = {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
    }
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def run_sweep(variants: Sequence[Settings], names: Sequence[str], run: Callable[..., Any]) -> None:
    """Train each variant and print how it did, best last line."""
    header = f"{'variant':44} {'params':>9} {'steps':>6} {'epochs':>6} {'best@':>6} {'mean':>7}"
    lines, means = [header], []
    for number, (name, settings) in enumerate(zip(names, variants, strict=True)):
        try:
            _, record = run(settings, f"sweep-{number}")
        except FloatingPointError as error:
            lines.append(f"{name:44} {error}")
            means.append(math.inf)
            print(lines[-1], flush=True)
            continue
        best = record["best"]
        sources = {k: round(v, 3) for k, v in best.items() if isinstance(v, float) and "_" not in k}
        lines.append(
            f"{name:44} {record['parameters']:9} {record['steps']:6} {record['epochs']:6.1f} "
            f"{best['step']:6} {best['mean']:7.4f} {best['which']} {sources} "
            f"{record.get('stopped', '')}".rstrip()
        )
        means.append(best["mean"])
        print(lines[-1], flush=True)
        if "signal" in record:
            raise SystemExit(128 + record["signal"])
    print("\n".join(lines))
    print("best:", names[means.index(min(means))])


def parse_settings(base: Settings, text: str) -> Settings:
    """Apply ``name=value,name=value`` to `base`; "default" changes nothing."""
    changes: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        if item == "default":
            continue
        name, _, value = item.partition("=")
        kinds = {field.name: type(getattr(base, field.name)) for field in dataclasses.fields(base)}
        if name not in kinds:
            raise ValueError(f"setting must be one of {', '.join(kinds)}, got {name!r}")
        changes[name] = kinds[name](value)
    return dataclasses.replace(base, **changes)


def parse_weights(text: str) -> dict[str, float]:
    """Read ``source=weight,source=weight``."""
    pairs = (item.partition("=") for item in filter(None, text.split(",")))
    return {name: float(value) for name, _, value in pairs}


def make_parser() -> argparse.ArgumentParser:
    """Return the command line; --set and --sweep take the fields of Settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, help="folder of stories; read when --data holds no meta.json")
    add("--data", type=Path, default=Path(".data"), help="prepared corpus; default .data")
    add("--out", type=Path, default=Path("story"), help="checkpoint folder; default story")
    add("--vocab", type=int, default=4096, help="tokens of a new tokenizer; default 4096")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seconds", type=float, help="training time; the schedule fits it")
    add("--steps", type=int, help="training steps, instead of --seconds")
    add("--weights", default="", help="documents an epoch repeats, as tinystories=2,books=1")
    add("--set", default="", help="changes to the defaults, as dropout=0.2,lr=2e-3,seed=1")
    add("--sweep", nargs="+", metavar="SET", help="one short run for each, in the form of --set")
    add("--evaluations", type=int, default=40, help="validations over the run; default 40")
    add("--compile", action="store_true", help="run the model through torch.compile")
    add("--tiny", action="store_true", help="two layers of 64, context 64: a smoke test")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare, train, write and show."""
    args = make_parser().parse_args(argv)
    if (args.seconds is None) == (args.steps is None):
        raise SystemExit("one of --seconds and --steps must be given")
    if not (args.data / "meta.json").is_file():
        if args.text is None:
            raise SystemExit(f"--text must be given while {args.data} holds no meta.json")
        from story_data import prepare

        prepare(args.text, args.data, args.vocab)
    base = parse_settings(TINY if args.tiny else Settings(), args.set)
    data = Data.load(args.data, torch.device(args.device))
    weights = parse_weights(args.weights)

    def run(settings: Settings, name: str) -> tuple[Decoder, dict[str, Any]]:
        with Log(args.out / f"{name}.jsonl") as log:
            model, record = train(
                data,
                settings,
                log,
                weights=weights,
                seconds=args.seconds,
                steps=args.steps,
                evaluations=args.evaluations,
                compiles=args.compile,
            )
            log.write("result", **record)
        return model, record

    if args.sweep:
        variants = [parse_settings(base, text) for text in args.sweep]
        run_sweep(variants, args.sweep, run)
        return
    model, record = run(base, "log")
    write_checkpoint(model, data, args.out)
    tokenizer = Tokenizer.from_file(str(data.folder / "tokenizer.json"))
    length = min(200, base.context)
    texts = [sample(model, tokenizer, p, max_tokens=length, seed=base.seed) for p in PROMPTS]
    (args.out / "samples.txt").write_text("\n\n---\n\n".join(texts) + "\n", encoding="utf-8")
    print("\n\n---\n\n".join(texts))
    if not sys.stdout.isatty():  # for a program
        print(json.dumps(record))
    if "stopped" in record:
        print(f"train_story_model: {record['stopped']}; {args.out} has the best weights before",
              file=sys.stderr)  # fmt: skip
        raise SystemExit(128 + record["signal"] if "signal" in record else 1)


if __name__ == "__main__":
    run_script("train_story_model", main)
