"""A training run from its first step, or from its checkpoint, to its end: progress and files.

checkpoint.pt  parameters, AdamW's moments, the place in the text; replaced whole, all finite
log.jsonl      one record for each interval and each evaluation; a "stopped" one says why it ended
loss.png       the losses, where matplotlib is installed

A run ends early where a loss is no number any more, and after the step in which Ctrl-C finds it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from tilewise.progress import Progress, say, time_left
from tilewise.training.flops import peak_of
from tilewise.training.packing import Batch, Packer, prefetch
from tilewise.training.terminal import interrupts
from tilewise.training.trainer import Trainer, learning_rate

__all__ = ["Plan", "draw", "read_log", "run"]

_UNCHANGEABLE = ("tokens", "context", "seed", "is_rows")
_INTERRUPTED = "the run ends after this step, with a checkpoint"


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a training run besides the `Settings` of its steps.

    Attributes:
        accumulate: the number of batches of a step.
        log_every, evaluate_every, save_every: the numbers of steps between two log records,
            evaluations and checkpoints; 0 is never. The first step is logged too, and the end
            logged, evaluated and saved.
        evaluation_batches: the number of held-out batches of an evaluation.
        stop_after: the number of the step after which the run ends early, with a checkpoint; None
            for no such end.
    """

    accumulate: int = 1
    log_every: int = 10
    evaluate_every: int = 250
    save_every: int = 500
    evaluation_batches: int = 8
    stop_after: int | None = None

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be positive, got {self.accumulate}")
        for name in ("log_every", "evaluate_every", "save_every", "evaluation_batches"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.stop_after is not None and self.stop_after < 1:
            raise ValueError(f"stop_after must be positive, got {self.stop_after}")


def run(
    trainer: Trainer,
    packer: Packer,
    out: Path,
    plan: Plan,
    *,
    held_out: Packer | None = None,
    change: Callable[[Batch], Batch] | None = None,
    resume: bool = True,
) -> list[dict[str, Any]]:
    """Train until `trainer.settings.steps`; return the records of the log.

    Writes checkpoint.pt, log.jsonl and loss.png to `out`, and progress to standard error.

    Args:
        packer: the packer of the text to train on.
        out: the folder of the run's files; a run with a checkpoint there continues from it.
        held_out: the packer of the text to evaluate on; None for no evaluation.
        change: a function applied to each batch, masking for instance.
        resume: False to begin anew even if there is a checkpoint.

    Raises:
        ValueError: the checkpoint was made with other settings, another packing or another text.
        FloatingPointError: a loss, a gradient or a parameter was not finite; the last checkpoint is
            left as it was.
        KeyboardInterrupt, SystemExit: SIGINT or SIGTERM came; the checkpoint is of the step that
            was being made.
    """
    out.mkdir(parents=True, exist_ok=True)
    checkpoint = out / "checkpoint.pt"
    log = _Log(out / "log.jsonl")
    packing = {name: getattr(packer, name) for name in _UNCHANGEABLE}
    packing["accumulate"] = plan.accumulate
    packing["corpus"] = f"{len(packer.corpus)} documents, {len(packer.corpus.tokens) - 1} tokens"
    if resume and checkpoint.is_file():
        state = trainer.load(checkpoint)
        _check_same(state, {"settings": asdict(trainer.settings), "packing": packing})
        packer.load_state(state["place"])
        log.keep(trainer.steps)
        say(f"goes on after step {trainer.steps} of {checkpoint}")
        kept = f"is left as it was after step {trainer.steps}"
    else:
        log.keep(0)
        kept = "has no step of this run"
    place = packer.state()
    peak = peak_of(trainer.device)
    batches = prefetch(iter(packer), trainer.device, change=change)
    last = trainer.settings.steps
    if plan.stop_after is not None:
        last = min(last, plan.stop_after)
    clock = _Clock(trainer.device)
    begin, since = trainer.steps, time.monotonic()
    try:
        with interrupts(_INTERRUPTED) as interrupted, Progress() as progress:
            while trainer.steps < last:
                step = list(islice(batches, plan.accumulate))
                loss = trainer.step(step)
                place = step[-1].state
                clock.add(step, trainer)
                done = trainer.steps
                first = clock.steps_in_all == 1
                ends = done == last or interrupted.signal is not None
                if first:  # it compiled: the time left is that of the others
                    since = time.monotonic()
                share = None if first else (done - begin - 1) / max(1, last - begin - 1)
                progress.show(f"step {done} of {last}", share)
                if first or ends or _is_due(plan.log_every, done):
                    trainer.check_finite()  # waits for the device
                    record = {"kind": "train", "step": done, "loss": float(loss)}
                    record |= clock.read(peak)
                    record["lr"] = learning_rate(trainer.settings, done - 1)
                    if first:  # it compiled
                        record.pop("mfu", None)
                        record.pop("tokens_per_s")
                    log.write(record, time_left(time.monotonic() - since, share))
                if held_out is not None and (_is_due(plan.evaluate_every, done) or done == last):
                    loss_there = _evaluate(trainer, held_out, plan.evaluation_batches, change)
                    log.write({"kind": "held_out", "step": done, "loss": loss_there})
                    clock.restart()
                if ends or _is_due(plan.save_every, done):
                    trainer.save(checkpoint, place=place, packing=packing)
                    kept = f"is left as it was after step {done}"
                    clock.restart()
                if ends:
                    break
        if interrupted.signal is not None:
            say(f"{checkpoint} is of step {trainer.steps}; the same command goes on from it")
        interrupted.end()
    except FloatingPointError as error:
        log.write({"kind": "stopped", "step": trainer.steps, "reason": str(error)})
        raise FloatingPointError(f"{error}; the run stops, and {checkpoint} {kept}") from error
    finally:
        batches.close()
        log.close()
    if draw(log.records, out / "loss.png") is None:
        say("loss.png is not drawn: it needs pip install 'tilewise[plot]'")
    return log.records


def _is_due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _evaluate(
    trainer: Trainer, held_out: Packer, count: int, change: Callable[[Batch], Batch] | None
) -> float:
    """Return the mean loss of `count` batches of `held_out`, whose place is then restored.

    So each evaluation has the same batches. Raises FloatingPointError if the loss is not finite.
    """
    begin = held_out.state()
    batches = (held_out.batch() for _ in range(count))
    changed = ((batch if change is None else change(batch)).to(trainer.device) for batch in batches)
    loss = trainer.evaluate(changed, count)
    held_out.load_state(begin)
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"held-out loss must be finite, got {loss} after step {trainer.steps}"
        )
    return loss


def _check_same(state: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise ValueError if a value of `wanted` differs from that in the checkpoint `state`, so that
    the run would not continue as it was."""
    for part, values in wanted.items():
        for name, value in values.items():
            if name == "corpus" and name not in state[part]:
                continue  # checkpoints have it since 2026-11
            saved = state[part].get(name)
            saved = tuple(saved) if isinstance(saved, list) else saved
            if saved != value:
                raise ValueError(
                    f"{name} must be {saved!r} as in the checkpoint (or begin anew), got {value!r}"
                )


class _Clock:
    """A counter of tokens, documents and FLOPs since the last `read` or `restart`, and of the
    seconds since then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps_in_all = 0
        self.restart()

    def restart(self) -> None:
        self.begin = time.perf_counter()
        self.tokens = self.documents = 0
        self.flops = 0.0

    def add(self, batches: list[Batch], trainer: Trainer) -> None:
        self.steps_in_all += 1
        self.tokens += sum(batch.ids.numel() for batch in batches)
        self.documents += sum(batch.count for batch in batches)
        self.flops += sum(trainer.flops(batch) for batch in batches)

    def read(self, peak: float | None) -> dict[str, float]:
        """Return tokens_per_s and documents_per_s, and begin again; the caller must have waited for
        the device.

        With `peak`, the device's FLOP/s, also mfu, and peak_gib of memory.
        """
        seconds = time.perf_counter() - self.begin
        rates = {"tokens_per_s": self.tokens / seconds, "documents_per_s": self.documents / seconds}
        if peak is not None:
            rates["mfu"] = self.flops / seconds / peak
            rates["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self.restart()
        return rates


class _Log:
    """The log of a run: records in log.jsonl and in `records`, and a short line for each on
    standard error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._file: Any = None

    def keep(self, steps: int) -> None:
        """Open the file with the records of the first `steps` steps that it has; others are
        dropped. 0 empties it.

        It must be called before `write`.
        """
        old = read_log(self.path) if steps and self.path.is_file() else []
        self.records = [record for record in old if record["step"] <= steps and "loss" in record]
        kept = self.path.with_name(self.path.name + ".partial")  # a full disk leaves the old one
        kept.write_text("".join(map(_line, self.records)), encoding="utf-8")
        kept.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, record: dict[str, Any], left: str = "") -> None:
        """Append a record to the file and to `records`; print one with a loss, with `left`, the
        text of the time left, if given."""
        self.records.append(record)
        self._file.write(_line(record))
        self._file.flush()
        if "loss" not in record:
            return
        parts = [f"step {record['step']}", f"{record['kind']} loss {record['loss']:.4f}"]
        if "tokens_per_s" in record:
            parts.append(f"{record['tokens_per_s']:,.0f} tokens/s")
        if "mfu" in record:
            parts.append(f"MFU {record['mfu']:.1%}")
        if "peak_gib" in record:
            parts.append(f"{record['peak_gib']:.1f} GiB")
        if left:
            parts.append(left)
        say("  ".join(parts))

    def close(self) -> None:
        self._file.close()


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def read_log(path: Path) -> list[dict[str, Any]]:
    """Return the records of a log.jsonl; a last line that a crash or a full disk cut short is left
    out."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def draw(records: list[dict[str, Any]], path: Path) -> Path | None:
    """Draw the losses of `records` over the steps to the picture `path`; return `path`, or None
    without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for kind, colour, mark in (("train", "#1f77b4", ""), ("held_out", "#d62728", "o")):
        of_kind = [record for record in records if record["kind"] == kind]
        if of_kind:
            axes.plot(
                [record["step"] for record in of_kind],
                [record["loss"] for record in of_kind],
                color=colour,
                marker=mark,
                label=kind.replace("_", " "),
            )
    axes.set(xlabel="step", ylabel="loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path
