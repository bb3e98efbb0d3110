"""`tilewise bench train`: equal losses whoever attends, a process a row, a document after each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tilewise.bench import train
from tilewise.bench.trainers import worker
from tilewise.bench.trainers.batches import masked_batches, open_corpus, pack_masked

sys.path.insert(0, str(Path(__file__).parents[2] / "lab" / "plots"))

import training_plots


def spec(shape: str, way: str, **changes) -> dict:
    return {
        "shape": shape, "way": way, "N": 64, "B": 2, "device": "cpu", "text": None, "losses": 3,
        "seconds": 0.0, "lr": 1e-3, "seed": 0, "compile": "", "memory_gib": None,
    } | changes  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # of transformers, about ids that a tiny vocabulary lacks
@pytest.mark.parametrize("shape", ["gpt2-tiny", "llama-tiny", "bert-tiny"])
def test_all_ways_start_from_one_model_and_see_the_same_tokens(shape, monkeypatch):
    monkeypatch.setattr(worker, "_BLOCK", 1)
    monkeypatch.setattr(worker, "_BATCHES", 2)
    rows = {way: worker.measure(spec(shape, way)) for way in ("eager", "tilewise", "ours")}
    for row in rows.values():
        assert row["tokens/s"] > 0
        np.testing.assert_allclose(row["losses"], rows["eager"]["losses"], atol=5e-3)
        assert row["TFLOP/s"] * row["ms"] == pytest.approx(
            rows["eager"]["TFLOP/s"] * rows["eager"]["ms"]
        )


def test_packed_texts_are_the_padded_ones():
    corpus = open_corpus(None, 100, longest=32, seed=0)
    padded = masked_batches(corpus, 4, 32, 3, words=100, seed=0)
    packed = pack_masked(padded)
    assert len({(batch.ids.shape, batch.places.shape) for batch in packed}) == 1
    assert len({batch.documents.cu_seqlens.shape for batch in packed}) == 1
    for rows, batch in zip(padded, packed, strict=True):
        real = sum(rows.lengths)
        assert torch.equal(batch.ids[:real], rows.ids[rows.mask.bool()])
        wanted = rows.labels[rows.labels != -100]
        assert torch.equal(batch.targets[batch.targets != -100], wanted)
        assert batch.documents.cu_seqlens[: len(rows.lengths) + 1].diff().tolist() == list(
            rows.lengths
        )
        assert int(batch.documents.cu_seqlens.diff().max()) <= batch.documents.max_seqlen


def test_the_document_is_written_after_each_row_and_says_what_failed(tmp_path, monkeypatch, capsys):
    out, seen = tmp_path / "rows.json", []

    def run(groups, *_):
        for row in (row for group in groups for row in group):
            seen.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
            rates = {"tokens/s": 1e5, "sequences/s": 100.0, "ms": 1.0, "spread": 0.0}
            is_eager = row["way"] == "eager"
            yield row | ({"error": "out of memory"} if is_eager else rates | {"start_s": 1.0})

    monkeypatch.setattr(train, "_measure", run)
    options = ["--shapes", "gpt2-small", "bert-large", "--device", "cpu", "--json", str(out)]
    assert train.main([*options, "--ways", "eager", "sdpa", "ours-packed"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document == json.loads(out.read_text())
    names = [(row["shape"], row["way"], row["N"], row["B"]) for row in document["rows"]]
    assert names == [
        ("gpt2-small", "eager", 1024, 32),
        ("gpt2-small", "sdpa", 1024, 32),
        ("gpt2-small", "ours-packed", 1024, 32),
        ("bert-large", "eager", 512, 64),
        ("bert-large", "sdpa", 512, 64),
    ]
    assert seen == [0, 1, 2, 3, 4]
    assert train.main([*options, "--ways", "eager", "sdpa", "ours", "--together", "4"]) == 0
    capsys.readouterr()
    assert len(json.loads(out.read_text())["rows"]) == 6
    monkeypatch.setattr(train, "_measure", lambda groups, *_: ({**groups[0][0], "error": "no"},))
    assert train.main([*options, "--ways", "sdpa"]) == 1
    monkeypatch.undo()
    assert train.main([*options, "--ways", "sdpa", "--seconds", "0"]) == 0


def test_being_out_of_memory_is_a_row(monkeypatch):
    def step(index):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 70 GiB. More.")

    monkeypatch.setattr(worker, "make_step", lambda *_: (step, {}))
    row = worker.measure(spec("gpt2-tiny", "eager"))
    assert row == {"error": "out of memory", "asked": "CUDA out of memory"}


# What stands in for the process of a row; its way says what it does.
_STAND_IN = """
import json, sys, time
spec = json.loads(sys.argv[-1])
does = spec["way"]
sys.stdin.readline()
if does == "never":
    time.sleep(100)
if does == "crash":
    sys.exit(3)
if does == "crowded" and (crowd := open(spec["text"]).read()) != "alone":
    open(spec["text"], "w").write("alone")
    print(json.dumps({"error": "out of memory"}), flush=True)
    sys.exit()
log = open(spec["shape"], "a")
log.write(does + " ready\\n")
log.flush()
print("ready", flush=True)
sys.stdin.readline()
if does == "hangs":
    time.sleep(100)
log.write(does + " timed\\n")
log.flush()
rates = {"tokens/s": 1.0, "sequences/s": 1.0, "start_s": 0.0}
print(json.dumps(rates), flush=True)
"""


def measured_by_stand_ins(monkeypatch, tmp_path, groups, *more):
    log, crowd = tmp_path / "log", tmp_path / "crowd"
    crowd.write_text("crowd")
    start = subprocess.Popen
    monkeypatch.setattr(
        train.subprocess, "Popen",
        lambda command, **how: start([sys.executable, "-c", _STAND_IN, command[-1]], **how),
    )  # fmt: skip
    options = train._parse(["--device", "none", *more])
    texts = train._Texts(None, tmp_path)
    monkeypatch.setattr(texts, "folder_for", lambda row: str(crowd))
    rows = [[{"shape": str(log), "way": way, "N": 1, "B": 1} for way in ways] for ways in groups]
    found = list(train._measure(rows, options, texts, None))
    return {row["way"]: row for row in found}, log.read_text().splitlines()


def test_rows_prepare_together_and_are_timed_one_after_the_other(monkeypatch, tmp_path):
    rows, log = measured_by_stand_ins(monkeypatch, tmp_path, [["a", "b", "crash"], ["c"]])
    assert sorted(log[:2]) == ["a ready", "b ready"]
    assert log[2:] == ["a timed", "b timed", "c ready", "c timed"]
    assert rows["crash"]["error"] == "ended with code 3 and without a result"
    assert [rows[way].get("error") for way in "abc"] == [None] * 3


def test_a_row_without_memory_beside_others_is_measured_alone(monkeypatch, tmp_path):
    rows, log = measured_by_stand_ins(monkeypatch, tmp_path, [["a", "crowded"], ["b"]])
    assert rows["crowded"]["tokens/s"] == 1.0
    assert log[-3:] == ["b timed", "crowded ready", "crowded timed"]


def test_rows_may_be_named_and_grouped(capsys):
    options = train._parse(
        ["--rows", "gpt2-small/ours/1024,bert-large/ours/512", "llama-1b/sdpa/4096"]
    )
    groups = [[(row["shape"], row["way"], row["N"], row["B"]) for row in group]
              for group in train._groups(options)]  # fmt: skip
    assert groups == [
        [("gpt2-small", "ours", 1024, 32), ("bert-large", "ours", 512, 64)],
        [("llama-1b", "sdpa", 4096, 4)],
    ]
    for name in (
        "gpt2-small/ours",
        "gpt2-small/theirs/1024",
        "gpt3/ours/1024",
        "gpt2-small/ours/x",
    ):
        with pytest.raises(SystemExit):
            train._parse(["--rows", name])
        assert "rows must be SHAPE/WAY/N" in capsys.readouterr().err


def test_a_row_that_takes_too_long_is_given_up(monkeypatch, tmp_path):
    groups = [["never", "hangs", "a"]]
    rows, log = measured_by_stand_ins(monkeypatch, tmp_path, groups, "--row-timeout", "3")
    assert rows["never"]["error"] == rows["hangs"]["error"] == "no result in 3 s"
    assert rows["a"]["tokens/s"] == 1.0
    assert log[-1] == "a timed"


def test_the_plots_show_rates_losses_and_lengths(tmp_path):
    rows = [
        {"shape": shape, "way": way, "N": n, "B": 1, "tokens/s": 1e5, "sequences/s": 10.0,
         "MFU": 0.3, "GiB": 20.0, "losses": [9.0, 8.0], "name": "a card", "torch": "2"}
        for shape in ("gpt2-small", "bert-large") for way in ("sdpa", "ours") for n in (512, 1024)
    ]  # fmt: skip
    rows.append(
        {"shape": "gpt2-small", "way": "eager", "N": 1024, "B": 1, "error": "out of memory"}
    )
    for draw in (
        training_plots.draw_rates,
        training_plots.draw_lengths,
        training_plots.draw_losses,
    ):
        path = tmp_path / f"{draw.__name__}.png"
        draw(rows, path)
        assert path.stat().st_size > 5000
        with pytest.raises(ValueError, match="rows must hold"):
            draw([], path)
