"""Profiles and steps: measured steps are met, more work is never cheaper, wrong ones refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tilewise.bench.engines.shapes import SHAPES
from tilewise.cost import (
    MACHINES,
    Cost,
    StepCost,
    StepWork,
    activation_cost,
    machine,
    norm_cost,
    product_cost,
    read_machine,
    read_sizes,
    recompute_seconds,
    swap_seconds,
)
from tilewise.cost.padding import buckets, padded_rows, prompt_sizes
from tilewise.engine.captured import decode_step, prompt_steps

DOCS, RESULTS = Path(__file__).parents[2] / "docs", Path(__file__).parents[2] / "lab" / "results"
QWEN, LLAMA = read_sizes(SHAPES["qwen3-0.6b"]), read_sizes(SHAPES["llama-3-8b"])
H200 = machine("h200")


def decode(rows: int, context: int) -> StepWork:
    return StepWork(rows, rows, rows, rows, rows * context, is_decode=True)


def prefill(tokens: int) -> StepWork:
    return StepWork(tokens, 1, 1, 1, tokens, tokens * (tokens + 1) // 2)


def test_products_norms_and_activations_are_counted_by_hand():
    assert product_cost(3, 4, 5) == Cost(120, 2 * (20 + 12), 2 * 15)
    assert product_cost(3, 4, 8, weight_itemsize=1.0625) == Cost(192, 34 + 24, 48)
    assert norm_cost(3, 4) == Cost(0, 2 * 24 + 8, 48)
    assert activation_cost(3, 5, itemsize=4) == Cost(0, 120, 60)


def test_the_committed_decode_steps_of_an_h200_are_met():
    rows = json.loads((RESULTS / "engine_h200.json").read_text())["rows"]
    steps = [r for r in rows if r["workload"] == "fixed"]
    assert [row["batch"] for row in steps] == [1, 32, 256]
    cost = StepCost(QWEN, H200)
    for row in steps:
        predicted = 1e3 * cost(decode(row["batch"], 1036)).device
        assert predicted == pytest.approx(row["ms a step"], rel=0.03)


def test_a_step_of_another_model_by_another_engine_is_near():
    rows = json.loads((RESULTS / "engine_vllm_h200.json").read_text())["rows"]
    [row] = [r for r in rows if r["shape"] == "llama-3-8b" and r.get("batch") == 1]
    predicted = 1e3 * StepCost(LLAMA, H200)(decode(1, 192)).device
    assert predicted == pytest.approx(row["ms a step"], rel=0.05)


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("overlaps", [True, False])
def test_more_work_never_takes_less_time(name, overlaps):
    cost = StepCost(QWEN, replace(machine(name), overlaps=overlaps))
    for works in (
        [decode(rows, 500) for rows in (1, 2, 16, 64, 65, 256)],
        [decode(8, context) for context in (1, 100, 5000, 100_000)],
        [prefill(tokens) for tokens in (2, 64, 512, 513, 8192)],
        [prefill(64)._replace(samples=n) for n in (1, 2, 6)],
        [prefill(64)._replace(copied_slots=n) for n in (0, 16, 160)],
    ):
        seconds = [cost(work).device for work in works]
        assert seconds == sorted(seconds)
        assert all(s > 0 for s in seconds)


@pytest.mark.parametrize("near", [0.0, 1e6])
def test_what_is_added_up_is_the_sum_of_its_parts(near):
    m = replace(
        H200, overlaps=False, sample_s=3e-6, element_efficiency=0.5, near_bytes=near,
        far_efficiency=0.3,
    )  # fmt: skip
    cost = StepCost(QWEN, m)
    for work in (decode(7, 300), prefill(700), StepWork(300, 4, 0, 0, 900, 40_000)):
        total = 0.0
        for name, part in cost.parts(work).items():
            weight = getattr(m, name)
            total += part * weight if name.endswith("_s") else part / weight
        assert cost.device(work) == pytest.approx(total, rel=1e-9)
    far = cost.parts(decode(7, 300))["far_efficiency"]
    assert far == (pytest.approx((2100 * cost.cache_bytes - 1e6) / m.read_bandwidth) if near else 0)


def test_only_steps_that_are_not_captured_are_launched():
    cost = StepCost(QWEN, H200)
    assert cost(decode(4, 10)).launching == 0
    mixed = cost(prefill(32))
    assert mixed.launching > 0
    assert mixed.alone == mixed.before + max(mixed.launching, mixed.device) + mixed.after


def test_captured_steps_run_the_next_size():
    """Of a GPU: 33 rows take what 40 do, and 520 tokens of a prompt what 576 do."""
    cost = StepCost(QWEN, H200)
    no_attention = replace(H200, key_efficiency=1e9, attention_efficiency=1e9)
    by_rows = StepCost(QWEN, replace(no_attention, captures=True)).by_rows
    for same in ((33, 40), (57, 64), (65, 80), (250, 256)):
        few, many = (by_rows(decode(rows, 100)) for rows in same)
        assert few == many
        assert few < by_rows(decode(same[1] + 1, 100))
    few, many = (by_rows(prefill(n)) for n in (520, 576))
    assert few == many < by_rows(prefill(577))
    assert cost.rows(decode(33, 9)) == (40, 40)
    assert cost.rows(prefill(520)) == (576, 1), "logits are of whoever draws"
    eager = StepCost(QWEN, replace(H200, captures=False))
    assert eager.rows(decode(33, 9)) == (33, 33)
    assert eager.by_rows(decode(33, 9)) < eager.by_rows(decode(40, 9))


def test_padding_is_the_engines():
    for most in (16, 100, 256, 2048):
        for rows in range(1, most + 1):
            for is_decode, sizes in ((True, buckets(most)), (False, prompt_sizes(most))):
                padded = next(size for size in sizes if size >= rows)
                told = padded_rows(rows, is_decode=is_decode)
                assert told == padded or (padded == most and told > most)
    assert decode_step.buckets is buckets
    assert prompt_steps.prompt_sizes is prompt_sizes


def test_the_host_takes_longer_when_rows_change_and_for_each_launch():
    m = replace(
        H200, renew_s=3e-4, renew_sequence_s=2e-6, renewed_sequence_s=1e-6, launch_sequence_s=1e-5,
        launch_token_s=1e-7, launch_draw_s=1e-3,
    )  # fmt: skip
    cost = StepCost(QWEN, m)
    goes_on, renews = (cost(decode(8, 100)._replace(renews=renews)) for renews in (False, True))
    assert renews.before - goes_on.before == pytest.approx(3e-4 + 8 * 2e-6)
    assert renews.after - goes_on.after == pytest.approx(8e-6)
    assert renews.device == goes_on.device
    usual = StepCost(QWEN, H200)
    whole, chunk = prefill(100), prefill(100)._replace(logits=0, samples=0)
    more = [cost(w).launching - usual(w).launching for w in (whole, chunk)]
    assert more == pytest.approx([1e-5 + 1e-5 + 1e-3, 1e-5 + 1e-5])


def test_each_time_of_a_launch_counts_alone():
    """Least squares may find that a step takes by its tokens alone, and a kernel nothing."""
    m = replace(H200, launch_s=0.0, launch_token_s=1e-7)
    cost = StepCost(QWEN, m)
    assert cost(prefill(100)).launching == pytest.approx(1e-5)
    assert cost(decode(8, 100)).launching == 0


def test_reads_that_begin_and_reads_beside_prompts():
    m = replace(H200, reading_s=2e-4, beside_efficiency=0.485)
    cost, usual = StepCost(QWEN, m), StepCost(QWEN, H200)
    few, many, more = (cost.device(decode(32, n)) - usual.device(decode(32, n))
                       for n in (10, 2000, 4000))  # fmt: skip
    assert 0 < few < many == pytest.approx(2e-4)
    assert more == pytest.approx(2e-4)
    mixed = StepWork(164, 65, 65, 65, 64 * 1000 + 100, 5050, renews=True)
    twice = mixed.keys * cost.cache_bytes / (H200.read_bandwidth * 0.97)
    assert cost.device(mixed) - usual.device(mixed) == pytest.approx(twice + 2e-4, rel=0.01)
    apart = StepCost(QWEN, replace(H200, attends_apart=True))
    long = mixed._replace(pairs=3_000_000)
    assert apart.device(long) > usual.device(long), "the longer of both, or their sum"


def test_factors_weigh_rows_and_go_through_a_file(tmp_path):
    m = replace(H200, factors={"decode": {8: 0.5, 16: 1.5}})
    cost, usual = StepCost(QWEN, m), StepCost(QWEN, H200)
    for rows, factor in ((1, 0.5), (8, 0.5), (16, 1.5), (200, 1.5)):
        assert cost.by_rows(decode(rows, 10)) == pytest.approx(
            factor * usual.by_rows(decode(rows, 10))
        )
    assert StepCost(QWEN, replace(m, captures=False)).by_rows(decode(12, 9)) == pytest.approx(
        StepCost(QWEN, replace(H200, captures=False)).by_rows(decode(12, 9))
    )
    keys = [c.device(decode(8, 900)) - c.device(decode(8, 100)) for c in (cost, usual)]
    assert keys[0] == pytest.approx(keys[1]), "keys are read as before"
    assert cost.device(prefill(100)) == usual.device(prefill(100))
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(m.as_dict()))
    assert read_machine(path) == m
    for wrong in ({"decode": {"x": 1.0}}, {"decode": 3}, [1]):
        path.write_text(json.dumps(H200.as_dict() | {"factors": wrong}))
        with pytest.raises(ValueError, match="factors must be numbers by kind and rows"):
            read_machine(path)
    for wrong, said in (
        ({"drafts": {"8": 1.0}}, "decode or prompts"),
        ({"decode": {8: 0}}, "above 0"),
    ):
        path.write_text(json.dumps(H200.as_dict() | {"factors": wrong}))
        with pytest.raises(ValueError, match=said):
            read_machine(path)


def test_swapping_and_recomputing_grow_with_the_context():
    cost = StepCost(LLAMA, H200)
    again = [recompute_seconds(cost, tokens, 8192) for tokens in (16, 1024, 8192, 16_384)]
    assert again == sorted(again)
    assert recompute_seconds(cost, 16_384, 16_384) == pytest.approx(again[-1], rel=0.05)
    assert swap_seconds(H200, 54e9, 1) == pytest.approx(1.0, rel=1e-4)
    assert swap_seconds(H200, 0, 100) == pytest.approx(1e-3)
    with pytest.raises(ValueError, match="must have a link"):
        swap_seconds(replace(H200, link_bandwidth=0.0), 1, 1)


def test_profiles_go_through_a_file_and_wrong_ones_are_refused(tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(H200.as_dict()))
    assert read_machine(path) == H200
    path.write_text(json.dumps({"machine": H200.as_dict(), "steps": []}))
    assert read_machine(path) == H200
    # One that was written before keys beside prompts had a rate of their own, and much else.
    new = {"beside_efficiency", "attends_apart", "factors", "reading_s", "renew_s",
           "renew_sequence_s", "renewed_sequence_s", "launch_sequence_s", "launch_token_s",
           "launch_draw_s"}  # fmt: skip
    old = {name: value for name, value in H200.as_dict().items() if name not in new}
    path.write_text(json.dumps(old | {"key_efficiency": 0.5}))
    assert read_machine(path) == replace(H200, key_efficiency=0.5, beside_efficiency=0.5)
    for changes, said in (
        ({"speed": 1}, "no others, got speed"),
        ({"flops": {}}, "at least one dtype"),
        ({"flops": 3.0}, "FLOP/s by dtype"),
        ({"flops": {"bfloat16": -1}}, r"flops\['bfloat16'\] must be finite and above 0"),
        ({"read_bandwidth": "fast"}, "read_bandwidth must be finite and above 0"),
        ({"kernel_s": -1e-6}, "kernel_s must be finite and at least 0"),
        ({"key_efficiency": 0}, "key_efficiency must be finite and above 0"),
        ({"captures": 1}, "captures must be true or false"),
    ):
        path.write_text(json.dumps(H200.as_dict() | changes))
        with pytest.raises(ValueError, match=said):
            read_machine(path)
    path.write_text('{"name": "x", "flops": {}}')
    with pytest.raises(ValueError, match="without copy_bandwidth, memory_bytes, read_bandwidth"):
        read_machine(path)
    path.write_text("name: x")
    with pytest.raises(ValueError, match="must be a profile in JSON"):
        read_machine(path)


def test_unknown_names_are_refused_with_those_known():
    with pytest.raises(ValueError, match="gpu must be one of h200, h100, a100.* got 'tpu'"):
        machine("tpu")
    with pytest.raises(ValueError, match="dtype must be bfloat16, float16 .* got 'int4'"):
        StepCost(QWEN, H200, dtype="int4")
    with pytest.raises(ValueError, match="config must have 'hidden_size'"):
        read_sizes({"model_type": "llama"})


@pytest.mark.parametrize("name", MACHINES)
def test_every_number_of_a_named_profile_has_an_origin(name):
    m = machine(name)
    plain = replace(m, name="x")
    for key, value in plain.as_dict().items():
        if isinstance(value, float) and value not in (0.0, 1.0):
            assert m.origins.get(key) or m.origins.get("fitted"), key


def test_a_shard_has_its_part_of_every_product():
    for sizes in (LLAMA, QWEN, read_sizes(SHAPES["llama-3-70b"])):
        for parallel in (1, 2, 4, 8):
            shard = sizes.shard(parallel)
            assert parallel * shard.layer_parameters == sizes.layer_parameters
            assert parallel * shard.cache_bytes() == sizes.cache_bytes()
            assert (shard.hidden, shard.vocab_size) == (sizes.hidden, sizes.vocab_size)
    repeated = LLAMA.shard(16)  # eight key heads: each on two ranks
    assert repeated.num_kv_heads == 1
    assert 16 * repeated.cache_bytes() == 2 * LLAMA.cache_bytes()
    for parallel in (0, 3, 24):
        with pytest.raises(ValueError, match=f"or be a multiple of them, got {parallel}"):
            LLAMA.shard(parallel)


HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"], "vocab_size": 1000, "hidden_size": 512,
    "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip


def test_layers_with_states_have_the_sizes_of_the_model_and_its_cache():
    import torch

    from tilewise.cache.states import checkpoint_bytes
    from tilewise.engine.settings import cache_spec
    from tilewise.models import ModelConfig
    from tilewise.models.registry import empty_model

    sizes, config = read_sizes(HYBRID), ModelConfig.from_hf(HYBRID)
    states = sizes.states
    assert (sizes.num_layers, states.count) == (2, 6)
    model = empty_model(config, torch.bfloat16, "meta")
    products = [p for n, p in model.named_parameters() if "proj" in n]
    own = sum(p.numel() for p in products) + 512 * 1000
    assert sizes.streamed_parameters == own
    spec = cache_spec(config, 16, torch.bfloat16)
    assert sizes.cache_bytes() == spec.bytes_per_token
    slots = sum(each.slot_bytes(keeps_tokens=True) for _, each in spec.states)
    assert states.slot_bytes == slots
    assert states.checkpoint_bytes == checkpoint_bytes(spec.states)
    half = sizes.shard(2)
    assert 2 * half.states.slot_bytes == states.slot_bytes
    assert 2 * (half.streamed_parameters - 512 * 500) == own - 512 * 1000
    with pytest.raises(ValueError, match="must divide 4 key heads and 8 heads of states, got 8"):
        replace(sizes, num_q_heads=8).shard(8)


def test_a_state_is_read_once_a_step_however_long_its_text_is():
    cost = StepCost(read_sizes(HYBRID), H200)
    short, long = (cost(decode(32, n)).device for n in (1, 1000))
    keys = StepCost(replace(read_sizes(HYBRID), states=None), H200)
    without = [keys(decode(32, n)).device for n in (1, 1000)]
    assert long - short == pytest.approx(without[1] - without[0])
    copied = cost(decode(32, 1)._replace(state_copies=3)).device - short
    states = cost.sizes.states
    assert copied == pytest.approx(6 * states.checkpoint_bytes / H200.copy_bandwidth)
    told = decode(1, 1)._replace(prompt_tokens=1000)
    prompts = cost.states(told) - cost.states(decode(1, 1))
    multiplied = 1000 * states.token_flops / H200.peaks("bfloat16").flops
    assert prompts == pytest.approx(multiplied / H200.attention_efficiency)


def test_a_shard_is_what_a_worker_loads(tmp_path):
    import torch

    from tilewise.bench.engines.shapes import model_directory
    from tilewise.distributed.shards import shard_config
    from tilewise.models.config import read_config
    from tilewise.models.registry import empty_model

    for name, parallel in (("llama-0.4b", 4), ("qwen3-0.6b", 2)):
        directory, _ = model_directory(name, tmp_path)
        config = shard_config(read_config(directory), parallel)
        model = empty_model(config, torch.bfloat16, "meta")
        layer = sum(p.numel() for n, p in model.layers[0].named_parameters() if "proj" in n)
        assert layer == read_sizes(SHAPES[name]).shard(parallel).layer_parameters


def test_sums_are_counted_by_hand():
    from tilewise.cost import sum_seconds

    small = sum_seconds(H200, 8192, 4)
    assert small == pytest.approx(3 * (H200.small_sum_s + 2 * 8192 / H200.peer_bandwidth))
    two = sum_seconds(H200, 768 << 10, 2)
    assert two == pytest.approx(H200.small_sum_s + 2 * (768 << 10) / H200.peer_bandwidth)
    flagged = sum_seconds(H200, 1 << 20, 4)
    assert flagged == pytest.approx(5 * H200.small_sum_s + 1.5 * (1 << 20) / H200.peer_bandwidth)
    large = sum_seconds(H200, 5 << 20, 4)
    assert large == pytest.approx(H200.large_sum_s + 1.5 * (5 << 20) / H200.peer_bandwidth)
    eight = sum_seconds(H200, 1 << 20, 8)
    assert eight == pytest.approx(H200.large_sum_s + 1.75 * (1 << 20) / H200.peer_bandwidth)
    work = decode(1, 1000)
    cost = StepCost(LLAMA, H200, tensor_parallel=4)
    logits = H200.large_sum_s + 0.75 * 4 * LLAMA.vocab_size / H200.peer_bandwidth
    assert cost.sums(work) == pytest.approx(65 * sum_seconds(H200, 2 * 4096, 4) + logits)
    assert StepCost(LLAMA, H200).sums(work) == 0
    with pytest.raises(ValueError, match="machine must have links to its peers, got Intel"):
        StepCost(LLAMA, machine("cpu"), dtype="float32", tensor_parallel=2)
    with pytest.raises(ValueError, match="machine must have links to its peers, got Intel"):
        sum_seconds(machine("cpu"), 1, 2)


def test_sums_are_near_those_measured():
    """Four H100s: steps with sums less those without, less the gather of logits."""
    from tilewise.cost import sum_seconds

    found = json.loads((RESULTS / "tensor_parallel_h100.json").read_text())["rows"]
    rows = [r for r in found if r["shape"] == "llama-3-8b"]
    ms = {(r["ranks"], r["batch"], r["way"]): r["ms"] for r in rows}
    gathers = {}
    for row in rows:
        times = row.get("by kernel", {}).items()
        key = row["ranks"], row["batch"], row["way"]
        gathers[key] = sum(k["us"] for name, k in times if "AllGather" in name) / 1e3
    for ranks, batch, way in (
        (2, 1, "inbox"), (2, 32, "inbox"), (2, 256, "before"),
        (4, 1, "inbox"), (4, 32, "inbox"), (4, 256, "before"),
    ):  # fmt: skip
        key, num_bytes = (ranks, batch, way), batch * 8192
        took = ms[key] - ms[ranks, batch, "alone"] - gathers[key]
        each = sum_seconds(H200, num_bytes, ranks)
        if way == "before":  # a sum that inboxes would take is NCCL's
            share = 2 * (ranks - 1) / ranks
            each = H200.large_sum_s + share * num_bytes / H200.peer_bandwidth
        assert 1e3 * 65 * each == pytest.approx(took, abs=0.04 * ms[key])


def test_more_gpus_take_less_time_and_more_of_it_in_all():
    for work in (decode(1, 1000), decode(256, 1000), prefill(8192)):
        seconds = [StepCost(LLAMA, H200, tensor_parallel=n).device(work) for n in (1, 2, 4, 8)]
        assert seconds == sorted(seconds, reverse=True)
        together = [n * s for n, s in zip((1, 2, 4, 8), seconds, strict=True)]
        assert together == sorted(together)


def test_sums_with_flags_are_near_those_measured():
    from tilewise.cost import sum_seconds

    found = json.loads((RESULTS / "tensor_parallel_flags_h200.json").read_text())
    for row in found["sums"]:
        if "flags" in row and not (row["ranks"] == 2 and row["KiB"] < 768):
            each = sum_seconds(H200, row["KiB"] * 1024, row["ranks"])
            assert 1e6 * each == pytest.approx(row["flags"], rel=0.1)


@pytest.mark.parametrize(("name", "shape"), [("8B", "llama-3-8b"), ("70B", "llama-3-70b")])
def test_the_page_of_the_clock_has_the_steps_that_the_clock_gives(name, shape):
    """Rows of `| Llama 8B, batch 1 | 4.9 ms | ...`; of each model 1, 32 and 256 rows."""
    lines = (DOCS / "design" / "clock.md").read_text().splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith(f"| Llama {name}, batch 1 |"))
    sizes = read_sizes(SHAPES[shape])
    for line, rows in zip(lines[place : place + 3], (1, 32, 256), strict=True):
        told = [cell.strip().removesuffix(" ms") for cell in line.split("|")[2:7]]
        work = decode(rows, 1024)
        costs = [StepCost(sizes, H200, tensor_parallel=n) for n in (1, 2, 4, 8)]
        found = [*(cost.device(work) for cost in costs), costs[-1].sums(work)]
        for cell, seconds in zip(told, found, strict=True):
            assert cell in ("", "(no room)", f"{1e3 * seconds:.1f}"), (rows, cell, seconds)


def test_sums_are_small_where_ranks_write_into_inboxes() -> None:
    pytest.importorskip("torch")
    from tilewise.cost.step import INBOX_SUM_BYTES
    from tilewise.distributed.inbox import FLAGGED_BYTES

    assert INBOX_SUM_BYTES == FLAGGED_BYTES
