"""A decode step's kernels are told apart by part of the model, and their time adds up."""

from __future__ import annotations

import json

import pytest
import torch

from tests.engine.checkpoint import write_checkpoint
from tests.lab.scripts import load
from tilewise.bench.engines.roof import Roof
from tilewise.bench.engines.shapes import SHAPES, read_sizes
from tilewise.cache.storage import KVStorage
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.settings import cache_spec
from tilewise.models import load_model

profile_decode = load("profile_decode")
Kernel = profile_decode.Kernel


def test_kernels_and_the_gaps_before_them_fill_the_time():
    kernels = [Kernel("a", 0, 4), Kernel("b", 3, 7), Kernel("c", 5, 6), Kernel("d", 9, 10)]
    found = profile_decode.slices(kernels)
    assert [(s.own, s.gap) for s in found] == [(4, 0), (3, 0), (0, 0), (1, 2)]
    assert sum(s.own + s.gap for s in found) == 10


def test_kernels_belong_to_the_part_that_began_before_them():
    marked = ["first", "spin_kernel", "x", "y", "spin_kernel", "z", "spin_kernel", "x"]
    parts = ["norm", "other", "head"]
    names = ["first", "x", "y", "z", "x"]
    labels = profile_decode.labels_of(names, marked, parts)
    assert labels == ["other", "norm", "norm", "other", "head"]
    assert profile_decode.labels_of(["x", "new", "y"], marked, parts) == ["norm", "unknown", "norm"]


def test_only_what_ran_on_the_device_is_read(tmp_path):
    events = [
        {"ph": "X", "cat": "kernel", "name": "late", "ts": 5, "dur": 2},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset", "ts": 1, "dur": 1},
        {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": 0, "dur": 9},
        {"ph": "f", "cat": "kernel", "name": "flow", "ts": 0},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert profile_decode.read_kernels(path) == [("Memset", 1.0, 2.0), ("late", 5.0, 7.0)]


def test_a_table_gives_time_and_roof_a_step():
    roof = Roof(read_sizes(SHAPES["qwen3-0.6b"]), 4.4e12, 750e12)
    kernels = [Kernel("begin", 0, 1), Kernel("gemm", 3, 103)] * 2
    kernels = [k._replace(start=k.start + 200 * (i // 2), end=k.end + 200 * (i // 2))
               for i, k in enumerate(kernels)]  # fmt: skip
    rows = profile_decode.table_of(
        profile_decode.slices(kernels), ["begin", "head"], 2, roof, 32, 1024
    )
    by_part = {row["part"]: row for row in rows}
    assert by_part["head"]["us"] == 100
    assert by_part["head"]["gap us"] == 2
    assert by_part["begin"]["gap us"] == 97 / 2
    bytes_ = 1024 * 151_936 * 2
    assert by_part["head"]["roof us"] == pytest.approx(bytes_ / 4.4e6)
    assert by_part["head"]["% roof"] == pytest.approx(bytes_ / 4.4e6)
    needed = profile_decode.costs(roof, 32, 1024)
    parts = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "head", "attention")
    assert sum(needed[part][0] for part in parts) / 4.4e12 == pytest.approx(
        roof.step(32, 32 * 1024)
    )


@pytest.mark.parametrize("rows", [1, 3])
def test_parts_of_a_step_are_marked(tmp_path, rows):
    write_checkpoint(tmp_path, "qwen3_norm_wide_heads")
    model = load_model(tmp_path)
    count = model.config.num_layers
    spec = cache_spec(model.config, 16, torch.float32, 64)
    storage = KVStorage(spec, 4 * rows, "cpu")
    runner = DeviceRunner(model, storage, max_num_seqs=rows, max_model_len=64)
    first = runner.submit(profile_decode.decoding(rows, 40, 3, 0)).result()
    assert [len(tokens) for tokens in first] == [1] * rows
    step, parts = runner.step_of(rows), []
    functions = (model.head_logits, profile_decode.ops.paged_attention)
    with torch.inference_mode(), profile_decode.marking(step, parts.append):
        step._compute()
    assert functions == (model.head_logits, profile_decode.ops.paged_attention)
    # Here the feed-forward block's second product is not `project`'s: that takes fused activations.
    layer = ["qkv_proj", "rope and write", "attention", "o_proj", "gate_up_proj"]
    assert [part for part in parts if part in layer] == layer * count
    assert parts[0] == "begin"
    for part in ("begin", "head", "sampling"):
        assert parts.count(part) == 1
    for part in ("angles", "embedding", "finish"):  # what begins and what draws does these
        assert part not in parts
    assert parts[-1] == "other"
    assert runner.rows.position.tolist() == [41] * rows
