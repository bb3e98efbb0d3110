"""A run that is interrupted ends with the bits of one that is not; its files say what it did."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.small import WORDS, make_bert, make_corpus, make_decoder, make_packer
from tilewise.models import load_model
from tilewise.training.parameters import export
from tilewise.training.run import Plan, draw, read_log, run
from tilewise.training.terminal import run_script
from tilewise.training.trainer import Settings, Trainer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import train_bert  # noqa: E402
import train_gpt2  # noqa: E402


def train(
    out: Path, *, stop_after: int | None = None, kind: type[Trainer] = Trainer,
    plan: dict | None = None, **settings,
) -> list[dict]:  # fmt: skip
    """Six steps of two batches each; return the log."""
    options = {"steps": 6, "compile": "", "warm_up": 2, "lr": 3e-3} | settings
    trainer = kind(make_decoder(), Settings(**options), words=WORDS)
    usual = {"accumulate": 2, "log_every": 1, "evaluate_every": 2, "save_every": 3}
    plan = Plan(**usual | (plan or {}), evaluation_batches=2, stop_after=stop_after)
    held_out = make_packer(make_corpus(seed=1), tokens=128)
    return run(trainer, make_packer(tokens=128), out, plan, held_out=held_out)


def test_three_steps_and_three_more_are_six(tmp_path):
    whole = train(tmp_path / "whole")
    train(tmp_path / "parts", stop_after=3)
    parts = train(tmp_path / "parts")
    states = [
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)
        for name in ("whole", "parts")
    ]
    assert states[0]["steps"] == states[1]["steps"] == 6
    assert states[0]["place"] == states[1]["place"]
    for name, tensor in states[0]["model"].items():
        assert torch.equal(tensor, states[1]["model"][name])
    for one, other in zip(*(s["optimizer"]["state"].values() for s in states), strict=True):
        for name, tensor in one.items():
            assert torch.equal(tensor, other[name])
    for kind in ("train", "held_out"):
        losses = [
            {r["step"]: r["loss"] for r in log if r["kind"] == kind} for log in (whole, parts)
        ]
        for step in losses[0].keys() & losses[1].keys():
            assert losses[0][step] == losses[1][step]
    assert [r["step"] for r in parts if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert parts == read_log(tmp_path / "parts" / "log.jsonl")
    assert (tmp_path / "parts" / "loss.png").stat().st_size > 1000


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    train(tmp_path, stop_after=3)
    with pytest.raises(ValueError, match=r"lr must be 0\.003 as in the checkpoint .* got 0\.1"):
        train(tmp_path, lr=0.1)


def test_a_log_that_was_cut_short_is_gone_on_from(tmp_path):
    train(tmp_path, stop_after=3)
    with (tmp_path / "log.jsonl").open("a") as log:
        log.write('{"kind": "tra')
    assert [r["step"] for r in train(tmp_path) if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_a_full_disk_leaves_the_last_checkpoint_and_says_so(tmp_path):
    train(tmp_path, stop_after=3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # as if there were no more room
    try:
        with pytest.raises(OSError, match=r"checkpoint\.pt must be written whole, got .*too large"):
            train(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "checkpoint.pt.partial").exists()
    assert [r["step"] for r in train(tmp_path) if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_checkpoint_is_named(tmp_path):
    train(tmp_path, stop_after=3)
    checkpoint = tmp_path / "checkpoint.pt"
    whole = checkpoint.read_bytes()
    for size in (0, 100, len(whole) - 100):
        checkpoint.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"checkpoint\.pt must be a whole checkpoint"):
            train(tmp_path)


def strict(path: Path) -> list[dict]:
    """Records of a log by RFC 8259, whose numbers are finite."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


class Diverging(Trainer):
    """A trainer of which parameters are not finite any more after its fourth step."""

    value = math.nan

    def step(self, batches):
        loss = super().step(batches)
        if self.steps == 4:
            next(self.model.parameters()).data[0, 0] = self.value
        return loss


@pytest.mark.parametrize(
    ("plan", "clip"), [({"log_every": 1}, 0.0), ({"log_every": 0, "evaluate_every": 0}, 1.0)]
)
def test_a_loss_that_is_no_number_ends_the_run_and_leaves_the_last_checkpoint(tmp_path, plan, clip):
    with pytest.raises(
        FloatingPointError,
        match=r"(held-out )?loss must be finite, got nan (at step 5|after step 4); the run stops, "
        r"and .*checkpoint\.pt is left as it was after step 3",
    ):
        train(tmp_path, kind=Diverging, plan=plan, clip=clip)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["steps"] == 3
    assert all(tensor.isfinite().all() for tensor in state["model"].values())
    records = strict(tmp_path / "log.jsonl")
    assert records[-1]["kind"] == "stopped"
    assert "got nan" in records[-1]["reason"]
    assert all(math.isfinite(r["loss"]) for r in records[:-1])
    log = train(tmp_path, clip=clip)  # with what was wrong mended it goes on
    assert [r["step"] for r in log if r["kind"] == "train"][-3:] == [4, 5, 6]
    assert {r["kind"] for r in strict(tmp_path / "log.jsonl")} == {"train", "held_out"}


def test_the_first_step_that_failed_is_named_however_seldom_the_host_looks(tmp_path):
    seldom = {"log_every": 0, "evaluate_every": 0, "save_every": 0}
    with pytest.raises(FloatingPointError, match=r"at step 2; .* has no step of this run"):
        train(tmp_path, lr=1e20, warm_up=0, plan=seldom)
    assert not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_parameters_that_are_not_finite_are_not_saved(tmp_path, value):
    """Of the last step no later loss tells."""
    trainer = Trainer(make_decoder(), Settings(compile=""), words=WORDS)
    trainer.save(tmp_path / "checkpoint.pt")
    before = (tmp_path / "checkpoint.pt").read_bytes()
    trainer.model.get_parameter("norm.weight").data[3] = value
    with pytest.raises(
        FloatingPointError, match=r"norm\.weight must be finite, got nan or inf after step 0"
    ):
        trainer.save(tmp_path / "checkpoint.pt")
    assert (tmp_path / "checkpoint.pt").read_bytes() == before


def test_a_checkpoint_that_is_not_finite_is_not_gone_on_from(tmp_path):
    train(tmp_path, stop_after=3)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    next(iter(state["optimizer"]["state"].values()))["exp_avg"][0] = math.nan
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"must be finite \(begin anew\), got .* in exp_avg of"):
        train(tmp_path)


def test_a_checkpoint_of_another_text_is_refused(tmp_path):
    train(tmp_path, stop_after=3)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    state["packing"]["corpus"] = "7 documents, 70 tokens"
    torch.save(state, tmp_path / "checkpoint.pt")
    with pytest.raises(
        ValueError, match=r"corpus must be '7 documents, 70 tokens' as in the check"
    ):
        train(tmp_path)
    del state["packing"]["corpus"]  # as older versions wrote it
    torch.save(state, tmp_path / "checkpoint.pt")
    train(tmp_path)


@pytest.mark.parametrize(
    ("number", "error", "code"),
    [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, SystemExit, 143)],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    tmp_path, capsys, number, error, code
):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]

    class Interrupted(Trainer):
        def step(self, batches):
            if self.steps == 3:
                signal.raise_signal(number)
            return super().step(batches)

    plan = {"save_every": 0}
    with pytest.raises(error) as raised:
        train(tmp_path / "parts", kind=Interrupted, plan=plan)
    assert getattr(raised.value, "code", None) == code
    said = capsys.readouterr().err
    assert f"{number.name}: the run ends after this step, with a checkpoint" in said
    assert "checkpoint.pt is of step 4; the same command goes on from it" in said
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    train(tmp_path / "parts", plan=plan)
    train(tmp_path / "whole", plan=plan)
    one, other = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"]
        for name in ("parts", "whole")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_second_signal_ends_the_run_at_once(tmp_path):
    class Impatient(Trainer):
        def step(self, batches):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second one must not be waited for")

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, kind=Impatient)
    assert not (tmp_path / "checkpoint.pt").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (FloatingPointError("loss must be finite"), "name: loss must be finite"),
        (ValueError("text must be"), "name: text must be"),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_script_that_fails_ends_with_another_code_than_0(error, code):
    def main() -> None:
        raise error

    with pytest.raises(SystemExit) as raised:
        run_script("name", main)
    assert raised.value.code == code


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_who_may_read_weights_says_the_umask(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        export(make_decoder(), tmp_path / "gpt2", words=WORDS)
        export(make_bert(), tmp_path / "bert", words=WORDS)
    finally:
        os.umask(before)
    for file in tmp_path.rglob("*.*"):
        assert file.stat().st_mode & 0o777 == mode, file
    assert load_model(tmp_path / "gpt2").config.vocab_size == WORDS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 0}, "accumulate must be positive, got 0"),
        ({"stop_after": 0}, "stop_after must be positive, got 0"),
        ({"save_every": -3}, "save_every must be at least 0, got -3"),
    ],
)
def test_wrong_plans_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Plan(**changes)


def test_without_matplotlib_nothing_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert draw([{"kind": "train", "step": 1, "loss": 2.0}], tmp_path / "loss.png") is None
    assert not (tmp_path / "loss.png").exists()


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    tales = (f"The {a} fox gave the {b} hen a {c}." * 3 for a in ("old", "small", "red")
             for b in ("blue", "warm") for c in ("cake", "stone", "lamp"))  # fmt: skip
    (folder / "tales.txt").write_text("\n<|endoftext|>\n".join(tales))
    return folder


SMALL = ["--vocab", "300", "--context", "64", "--tokens", "256", "--device", "cpu"]


@pytest.mark.parametrize("layout", ["gpt2", "llama"])
def test_the_script_trains_resumes_and_writes_what_the_engine_serves(text, tmp_path, layout):
    import transformers

    from tilewise import LLM, SamplingParams

    out = tmp_path / "out"
    options = ["--text", str(text), "--out", str(out), "--shape", f"{layout}-tiny", *SMALL,
               "--steps", "4", "--held-out", "0.1", "--log-every", "1"]  # fmt: skip
    train_gpt2.main([*options, "--stop-after", "2"])
    assert not (out / "model.safetensors").exists()
    train_gpt2.main(options)
    steps = [r["step"] for r in read_log(out / "log.jsonl") if r["kind"] == "train"]
    assert steps == [1, 2, 3, 4]
    words = json.loads((out / "config.json").read_text())["vocab_size"]
    assert words == json.loads((out / "data" / "corpus.json").read_text())["words"]
    (answer,) = LLM(str(out)).generate(["The old"], SamplingParams(max_tokens=5, temperature=0.0))
    assert 1 <= len(answer.outputs[0].token_ids) <= 5

    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = transformers.AutoTokenizer.from_pretrained(out)("The old fox")["input_ids"]
    assert tokens[0] == json.loads((out / "config.json").read_text())["bos_token_id"]
    assert theirs(torch.tensor([tokens])).logits.shape == (1, len(tokens), words)


def test_the_bert_script_writes_a_model_of_transformers(text, tmp_path):
    import transformers

    out = tmp_path / "out"
    options = ["--text", str(text), "--out", str(out), "--shape", "bert-tiny", *SMALL,
               "--steps", "4", "--held-out", "0.1"]  # fmt: skip
    train_bert.main([*options, "--stop-after", "2"])
    train_bert.main(options)
    theirs, info = transformers.AutoModelForMaskedLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    ids = tokenizer("The old [MASK] gave", return_tensors="pt")["input_ids"]
    assert (ids == tokenizer.mask_token_id).sum() == 1
    weights = load_file(out / "model.safetensors")
    state = torch.load(out / "checkpoint.pt", weights_only=True)["model"]
    embedding = weights["bert.embeddings.word_embeddings.weight"]
    assert torch.equal(embedding, state["embed_tokens.weight"][: len(embedding)])
    assert theirs(ids).logits.shape[-1] == len(embedding)
