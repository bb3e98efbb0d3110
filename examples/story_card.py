"""Draw the loss curve of a training run and write its model card.

    python examples/story_card.py --run story --notes tilewise/assets/story/DATA.md

Reads log.jsonl, samples.txt and model.safetensors of --run; writes loss.png and README.md beside
them. The card's numbers are the log's; --notes is appended and should say whose text it was trained
on and under which licences. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Record = dict[str, Any]


def read_log(path: Path) -> dict[str, list[Record]]:
    """Return the records of a training log by kind: run, train, val, result."""
    records: dict[str, list[Record]] = {"run": [], "train": [], "val": [], "result": []}
    for line in path.read_text("utf-8").splitlines():
        record = json.loads(line)
        records[record.pop("kind")].append(record)
    return records


def draw_losses(log: dict[str, list[Record]], path: Path) -> None:
    """Plot training loss and each source's validation loss of the written weights over tokens."""
    best = log["result"][0]["best"]
    val = [record for record in log["val"] if record["which"] == best["which"]]
    figure, axes = plt.subplots(figsize=(7.0, 4.0), layout="constrained")
    axes.plot(
        [record["tokens"] / 1e6 for record in log["train"]],
        [record["loss"] for record in log["train"]],
        color="0.75",
        linewidth=0.8,
        label="training batches (with dropout)",
    )
    for source in log["run"][0]["data"]["val"]:
        axes.plot(
            [record["tokens"] / 1e6 for record in val],
            [record[source] for record in val],
            label=f"validation, {source}",
        )
    axes.axvline(best["tokens"] / 1e6, color="0.4", linestyle=":", label="written weights")
    axes.set(xlabel="training tokens, millions", ylabel="loss, nats a token")
    top = max(record["mean"] for record in val[1:] or val)
    axes.set_ylim(top=top + 0.5)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Return a Markdown table whose columns after the first are right-aligned."""
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def retrain_command(run: Record, steps: int) -> str:
    """Return the command lines that repeat the run, with as many steps as it made."""
    changes = [f"{name}={value}" for name, value in run["settings"].items()]
    weights = ",".join(f"{name}={value:g}" for name, value in run["weights"].items())
    parts = [
        f"python examples/train_story_model.py --text TEXT_DIR --data .data --steps {steps}",
        *([f"    --weights {weights}"] if weights else []),
        f"    --set {','.join(changes[:6])},\\\n{','.join(changes[6:])}",
    ]
    return " \\\n".join(parts) + "\npython examples/story_card.py --run story"


def shape_section(run: Record, parameters: int, megabytes: float) -> str:
    """Return the table of the model's sizes."""
    settings = run["settings"]
    heads, kv_heads = settings["heads"], settings["kv_heads"]
    head_dim = settings["hidden"] // heads
    widths = f"{settings['layers']}, {settings['hidden']}, {settings['intermediate']}"
    rows = [
        ("parameters, embedding and output head being one matrix", f"{parameters:,}"),
        ("weights, bfloat16", f"{megabytes:.1f} MB"),
        ("layers, width, feed-forward width", widths),
        ("query heads, key-value heads, head dim", f"{heads}, {kv_heads}, {head_dim}"),
        ("context, tokens", f"{settings['context']:,}"),
        ("byte-level BPE, tokens", f"{run['data']['vocab_size']:,}"),
    ]
    return table(("", "size"), rows)


def training_section(run: Record, result: Record) -> str:
    """Say in one paragraph how the weights were made."""
    settings, best = run["settings"], result["best"]
    kind = "averaged weights" if best["which"] == "average" else "weights"
    return textwrap.fill(
        f"{result['steps']:,} steps of {settings['batch']} rows, {result['tokens']:,} tokens "
        f"({result['epochs']:.1f} times the training text), took {result['elapsed']:.0f} s on one "
        f"{run['device']}, validation included: {result['tokens'] / result['elapsed']:,.0f} tokens "
        f"a second. AdamW (0.9, 0.95), learning rate {settings['lr']:g} with linear warm-up and "
        f"cosine to zero, weight decay {settings['decay']:g}, dropout {settings['dropout']:g}, "
        f"gradient norm at most 1, seed {settings['seed']}. Written are the {kind} of step "
        f"{best['step']:,}, where the mean validation loss of the sources was least.",
        width=100,
    )


def data_table(run: Record) -> str:
    """Return the sizes of both splits by source."""
    header = ("source", "documents", "characters", "tokens", "held-out tokens", "weight")
    rows = []
    for source, part in run["data"]["train"].items():
        held_out = run["data"]["val"].get(source, {"start": 0, "end": 0})
        counts = (part["documents"], part["chars"], part["end"] - part["start"])
        counts += (held_out["end"] - held_out["start"],)
        weight = run["weights"].get(source, 1)
        rows.append((source, *(f"{count:,}" for count in counts), f"{weight:g}"))
    return table(header, rows)


def loss_table(run: Record, best: Record) -> str:
    """Return the validation losses of the written weights."""
    rows = [(f"{name}", best[name], best[f"{name}_bits_per_char"]) for name in run["data"]["val"]]
    rows.append(("all tokens", best["all"], best["all_bits_per_char"]))
    shown = [(name, f"{loss:.3f}", f"{bits:.3f}") for name, loss, bits in rows]
    return table(("validation", "nats a token", "bits a character"), shown)


def write_card(log: dict[str, list[Record]], folder: Path, notes: str) -> str:
    """Return README.md: what it is, how it was trained, how well, samples, whose text."""
    run, result = log["run"][0], log["result"][0]
    megabytes = (folder / "model.safetensors").stat().st_size / 1e6
    samples = (folder / "samples.txt").read_text("utf-8").strip().split("\n\n---\n\n")
    quoted = "\n\n---\n\n".join("> " + text.replace("\n", "\n>\n> ") for text in samples)
    return f"""# A small story model

A Llama decoder that continues little stories in plain English. It ships with tilewise so that the
engine, the server and the examples run at once, offline, on any machine. It was trained from
scratch, on the text named below alone, with `tilewise.attention` forward and backward.

It knows a few thousand words and how sentences follow one another. It does not know facts, follow
instructions or keep a plot for long, and what it writes can be odd, sad or old-fashioned.

## Shape

{shape_section(run, result["parameters"], megabytes)}

The end token `<|endoftext|>` also begins a text; `tokenizer.json` puts it in front of a prompt.

## Training

{training_section(run, result)}

```
{retrain_command(run, result["steps"])}
```

![training and validation loss](loss.png)

{data_table(run)}

Of a folder of books every 20th, whole, and of any other source every 50th story is held out of
training and of the tokenizer; training text that repeats held-out text is dropped.

{loss_table(run, result["best"])}

## Samples

Temperature 0.7, top-p 0.95, at most 200 tokens, the first that came; the first has no prompt.

{quoted}

{notes.strip()}
"""


def main() -> None:
    """Read the run, write the picture and the card."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run", type=Path, default=Path("story"), help="default: story")
    parser.add_argument("--notes", type=Path, help="Markdown on the data and its licences")
    args = parser.parse_args()
    log = read_log(args.run / "log.jsonl")
    draw_losses(log, args.run / "loss.png")
    notes = args.notes.read_text("utf-8") if args.notes else ""
    (args.run / "README.md").write_text(write_card(log, args.run, notes), encoding="utf-8")


if __name__ == "__main__":
    main()
