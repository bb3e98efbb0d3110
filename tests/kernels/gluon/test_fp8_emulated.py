"""Hopper's e4m3 kernel in the emulator: every protocol of its partitions, and its numbers."""

from __future__ import annotations

from itertools import pairwise
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import starts
from tests.kernels.gluon.fp8_oracle import assert_within_format, dequantised_truth, packed_truth
from tests.kernels.gluon.mutations import Mutation
from tests.kernels.gluon.test_fp8 import in_product_order, rounds_e4m3  # noqa: F401, a fixture
from tests.kernels.planned import hopper_fp8, hopper_quantized
from tilewise import masks
from tilewise.kernels import device
from tilewise.kernels.gluon.attention import fp8 as attention_fp8
from tilewise.kernels.gluon.attention.quantise import Quantized
from tilewise.kernels.spec import AttentionSpec, AttentionTensors, MaskTensors
from tilewise.reference import fp8
from tilewise.testing import make_qkv
from tools.gluon_emulator import EmulationError, Program, emulated

# What a call adds: a cap, which lies within the logits, and a sink for each head.
CAP, SINK, BOTH = {"softcap": 2.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True}
# (B, Sq, Sk, Hq, Hk, D), window, key lengths, what the call adds
ADDED = {
    "cap": ((1, 192, 256, 1, 1, 128), (-1, -1), None, CAP),
    "cap, causal, wide": ((1, 300, 300, 1, 1, 256), (-1, 0), None, CAP),
    "sinks": ((1, 192, 256, 2, 1, 128), (-1, -1), None, SINK),
    "sinks, grouped, tails": ((2, 70, 150, 4, 2, 64), (-1, -1), None, SINK),
    "both, more queries than keys": ((1, 400, 130, 2, 1, 64), (-1, 0), None, BOTH),
    "both, window": ((1, 330, 500, 2, 1, 128), (150, 20), None, BOTH),
    "both, lengths": ((4, 100, 300, 2, 1, 128), (-1, 0), [300, 33, 0, 1], BOTH),
    "both, wide, window, lengths": ((2, 100, 300, 2, 1, 256), (60, 5), [280, 90], BOTH),
}
# (B, Sq, Sk, Hq, Hk, D), window, key lengths
CASES = {
    "whole tiles": ((1, 192, 256, 1, 1, 128), (-1, -1), None),
    "causal": ((1, 400, 400, 2, 2, 128), (-1, 0), None),
    "causal, wide": ((1, 300, 300, 1, 1, 256), (-1, 0), None),
    "tails, grouped": ((2, 70, 150, 4, 2, 64), (-1, -1), None),
    "more queries than keys": ((1, 400, 130, 1, 1, 64), (-1, 0), None),
    "window": ((1, 330, 500, 1, 1, 128), (150, 20), None),
    "left only": ((1, 200, 400, 1, 1, 64), (60, -1), None),
    "lengths": ((3, 100, 300, 2, 1, 128), (-1, 0), [300, 33, 0]),
}


# (queries, keys) of each sequence, (Hq, Hk), D, window, what the call adds
PACKED = {
    "packed": (((100, 100), (40, 70), (128, 128), (190, 190)), (2, 1), 128, (-1, 0), {}),
    "packed, of all lengths": (
        ((0, 5), (7, 0), (1, 1), (0, 0), (230, 40), (193, 193), (64, 300)), (2, 2), 64, (-1, 0), {}
    ),
    "packed, full": (((150, 260), (3, 129), (64, 128)), (2, 1), 128, (-1, -1), {}),
    "packed, window": (((300, 300), (90, 333)), (1, 1), 64, (100, 20), BOTH),
    "packed, wide": (((130, 200), (65, 65)), (2, 1), 256, (-1, 0), {}),
    "packed, wide, both": (((70, 70), (5, 0), (129, 140)), (2, 1), 256, (60, 0), BOTH),
    "packed, one query each": (((1, 1), (1, 250), (1, 128)), (4, 2), 128, (-1, 0), SINK),
}  # fmt: skip
# As ADDED and PACKED; a mask is for so many sequences and heads.
MASKED = {
    "mask": ((1, 300, 400, 2, 1, 128), (-1, -1), None, {"mask": (1, 1)}),
    "mask, heads, causal": ((2, 260, 260, 4, 2, 64), (-1, 0), None, {"mask": (1, 4)}),
    "mask, full, causal": ((1, 600, 600, 2, 1, 64), (300, 0), None, {"mask": (1, 2, "full")}),
    "mask, sequences, window": ((2, 300, 500, 2, 2, 64), (200, 30), None, {"mask": (2, 1)}),
    "mask, lengths, both": (
        (3, 140, 300, 2, 1, 128), (-1, 0), [300, 33, 0], BOTH | {"mask": (3, 2)}
    ),
    "mask, wide": ((1, 200, 700, 2, 1, 256), (-1, -1), None, BOTH | {"mask": (1, 2)}),
    "mask, empty tiles": ((1, 400, 400, 1, 1, 64), (-1, -1), None, {"mask": "documents"}),
}  # fmt: skip
MASKED_PACKED = {
    "packed, mask": (PACKED["packed"][0], (2, 1), 128, (-1, -1), {"mask": (1, 1)}),
    "packed, mask, causal, both": (
        ((230, 240), (0, 5), (7, 0), (64, 300)), (2, 1), 64, (-1, 0), BOTH | {"mask": (4, 2)}
    ),
}  # fmt: skip
SPARE = 3  # rows behind the last sequence


def mask_of(kind, seqlen_q, seqlen_k):
    """Return what a mask shows, and the mask: tiles that are empty, full and random."""
    if kind == "documents":  # queries of the third see nothing
        document = torch.arange(seqlen_q)[:, None] // 150
        visible = (document == torch.arange(seqlen_k)[None] // 128) & (document < 2)
        visible = visible[None, None]
    else:
        kinds = torch.randint(0, 3, (*kind[:2], seqlen_q // 128 + 1, seqlen_k // 128 + 1))
        kinds = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)
        kinds = kinds[:, :, :seqlen_q, :seqlen_k]
        visible = (kinds == 1) | ((kinds == 2) & (torch.rand(kinds.shape) < 0.4))
        visible[:, :, seqlen_q // 2] = False
        if len(kind) > 2:  # "full": the rule alone hides keys of nearly all tiles
            visible = (kinds > 0) | (kinds == 0) & (torch.rand(kinds.shape) < 0.99)
    return visible, MaskTensors(*masks.dense(visible).tensors())


def run_packed(
    lengths, heads, head_dim, window, added, *, seed=0, num_sms=3, program=None, per_token=False
):  # fmt: skip
    """Do what `run` does with sequences that lie one behind another."""
    cu_q, cu_k = (starts([pair[i] for pair in lengths], "cpu") for i in (0, 1))
    rows, keys = (int(cu[-1]) + SPARE for cu in (cu_q, cu_k))
    q, k, v = (x[0] for x in make_qkv(1, rows, keys, *heads, head_dim, dtype=torch.bfloat16))
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):  # sequences differ in size
        scale = torch.exp2(torch.arange(cu.shape[0]) % 3 - 1.0)
        x *= scale[fp8.sequence_of_rows(cu, x.shape[0]), None, None]
    added = dict(added)
    if added.get("sinks"):
        added["sinks"] = torch.linspace(-2.0, 9.0, heads[0])
    mask = None
    if "mask" in added:
        longest = (max(pair[i] for pair in lengths) for i in (0, 1))
        added["mask"], mask = mask_of(added["mask"], *longest)
    if per_token:
        (q8, q_scale), (k8, k_scale) = (fp8.quantize_tokens(x) for x in (q, k))
    else:
        (q8, q_scale), (k8, k_scale) = (
            fp8.quantize_heads(x, cu_seqlens=cu) for x, cu in ((q, cu_q), (k, cu_k))
        )
    v8, v_scale = fp8.quantize_heads(v, cu_seqlens=cu_k)
    for x8, cu in ((q8, cu_q), (k8, cu_k)):  # nor does memory behind the sequences
        x8.view(torch.uint8)[cu[-1] :] = 0x7F
    ready = Quantized(q8, k8, packed_columns(v8, cu_k), q_scale, k_scale, v_scale)
    spec = AttentionSpec(
        "cuda", torch.float8_e4m3fn, len(lengths), max(n for n, _ in lengths),
        max(n for _, n in lengths), *heads, head_dim, head_dim, *window, head_dim**-0.5,
        softcap=added.get("softcap", 0.0), is_varlen=True, has_sinks="sinks" in added,
        mask_tile=None if mask is None else (128, 128),
    )  # fmt: skip
    tensors = _tensors(mask, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, sinks=added.get("sinks"))
    o, lse = _started(ready, spec, tensors, seed, num_sms, program)
    rule = {"window": window} | added
    return o, lse, packed_truth(q, k, v, cu_q, cu_k, per_token=per_token, **rule)


def packed_columns(v8, cu_k):
    """Return values as the product wants them: those of each sequence in columns of its own."""
    count = v8.shape[0] // 128 + cu_k.shape[0] - 1
    columns = torch.full((1, *v8.shape[1:], 128 * count), 0x7F, dtype=torch.uint8)
    for b, (first, last) in enumerate(pairwise(cu_k.tolist())):
        start, own = (first // 128 + b) * 128, in_product_order(v8[None, first:last])[0]
        columns[0, ..., start : start + max(128, -(-(last - first) // 128) * 128)] = 0
        columns[0, ..., start : start + own.shape[-1]] = own
    return columns.view(torch.float8_e4m3fn)


def _tensors(mask, **given):
    tensors = AttentionTensors(None, None, None, **given)
    if mask is None:
        return tensors
    return tensors._replace(**{f"mask_{name}": x for name, x in mask._asdict().items()})


def _started(ready, spec, tensors, seed, num_sms, program):
    """Run the kernel; the counter is left ready for the next launch."""
    counter = torch.zeros(1, dtype=torch.int32)
    with (
        mock.patch.object(device, "sm_count_of", return_value=num_sms),
        mock.patch.object(attention_fp8, "counter_of", return_value=counter),
        emulated(seed, program=program or Program(), resident=num_sms),
    ):
        results = hopper_quantized(ready, tensors, spec)
    assert counter.item() == 0
    return results


def run(
    shape, window, lengths, added=None, *, seed=0, num_sms=3, program=None, per_token=False,
    size=1.0,
):  # fmt: skip
    """Return o, lse and what they should be; the kernel runs on three multiprocessors.

    size: of q and k.
    """
    q, k, v = make_qkv(*shape, dtype=torch.bfloat16)
    q, k = q * size, k * size
    seqlens = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    if per_token:  # which differ in size by 2**12
        q, k = (x * torch.exp2(torch.randint(-6, 7, (*x.shape[:3], 1))) for x in (q, k))
        q, k = (x.bfloat16() * shape[-1] ** -0.25 for x in (q, k))
    quantize = fp8.quantize_tokens if per_token else fp8.quantize_heads
    (q8, q_scale), (k8, k_scale) = (quantize(x, seqlens=s) for x, s in ((q, None), (k, seqlens)))
    v8, v_scale = fp8.quantize_heads(v, seqlens=seqlens)
    added = dict(added or {})
    if added.get("sinks"):  # from hardly any weight to more than all keys have
        added["sinks"] = torch.linspace(-2.0, 9.0, shape[3])
    mask = None
    if "mask" in added:
        added["mask"], mask = mask_of(added["mask"], *shape[1:3])
    columns = in_product_order(v8).contiguous().view(torch.float8_e4m3fn)
    ready = Quantized(q8, k8, columns, q_scale, k_scale, v_scale)
    batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim = shape
    spec = AttentionSpec(
        device_type="cuda",
        dtype=torch.float8_e4m3fn,
        batch=batch,
        max_seqlen_q=seqlen_q,
        max_seqlen_k=seqlen_k,
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        window_left=window[0],
        window_right=window[1],
        softmax_scale=head_dim**-0.5,
        softcap=added.get("softcap", 0.0),
        has_seqlens_k=lengths is not None,
        has_sinks="sinks" in added,
        mask_tile=None if mask is None else (128, 128),
    )
    tensors = _tensors(mask, seqlens_k=seqlens, sinks=added.get("sinks"))
    o, lse = _started(ready, spec, tensors, seed, num_sms, program)
    rule = {"window": window, "seqlens_k": seqlens} | added
    return o, lse, dequantised_truth(q, k, v, per_token=per_token, **rule)


@pytest.mark.parametrize(("shape", "window", "lengths"), CASES.values(), ids=CASES.keys())
def test_the_kernel_computes_the_rule(shape, window, lengths):
    o, lse, truth = run(shape, window, lengths)
    assert_within_format(o, lse, truth)


@pytest.mark.parametrize("name", CASES)
def test_queries_and_keys_have_scales_of_their_own(name):
    torch.manual_seed(2)
    o, lse, truth = run(*CASES[name], per_token=True)
    assert_within_format(o, lse, truth)


@pytest.mark.parametrize("name", ADDED)
@pytest.mark.parametrize("per_token", [False, True], ids=["heads", "tokens"])
def test_logits_are_capped_and_heads_have_sinks(name, per_token):
    torch.manual_seed(3)
    o, lse, truth = run(*ADDED[name], per_token=per_token)
    assert_within_format(o, lse, truth)


# Sizes of q and k. With the first, 2^8 is half of the last bit of logits of some rows.
HUGE = {"causal": 6e3, "tails, grouped": 1e8, "lengths": 1e14}


def check_huge(name, per_token, program=None):
    """Hold rows of logits beyond 2^24 to the values of their largest keys."""
    torch.manual_seed(3)  # by which no two keys of a row are nearly level
    case = CASES[name]
    sinks = {"sinks": True} if case[0][3] > 1 else None
    o, lse, truth = run(*case, sinks, per_token=per_token, size=HUGE[name], program=program)
    torch.testing.assert_close(o.double(), truth.o, rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(lse.double(), truth.lse, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("per_token", [False, True], ids=["heads", "tokens"])
@pytest.mark.parametrize("name", HUGE)
def test_logits_may_have_any_size(name, per_token):
    check_huge(name, per_token)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gl.where(is_far, nearest_power_of_two(scale), scale)", "scale"),
        ("gl.where(is_far, 0.0, P_LOG2)", "P_LOG2"),
    ],
    ids=["factor", "2^8"],
)
def test_shifts_that_round_are_seen(old, new):
    mistake = Mutation("forward/fp8/step:softmax", old, new, "")
    with pytest.raises(AssertionError):
        check_huge("causal", False, mistake.program())


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("per_token", [False, True], ids=["heads", "tokens"])
def test_sequences_may_be_packed(name, per_token):
    torch.manual_seed(3)
    o, lse, truth = run_packed(*PACKED[name], per_token=per_token)
    assert_within_format(o, lse, truth)
    assert not bool(o[-SPARE:].any())
    assert bool((lse[:, -SPARE:] == -torch.inf).all())


@pytest.mark.skipif(torch.cuda.is_available(), reason="quantises in the interpreter")
@pytest.mark.parametrize("kind", ["heads", "tokens", "e4m3"])
@pytest.mark.parametrize("lengths", [((100, 100), (0, 3), (130, 250)), ((5, 0), (70, 0))], ids=str)
def test_a_packed_call_is_quantised_listed_and_computed(kind, lengths, rounds_e4m3):  # noqa: F811
    """The launcher's whole way, from 16-bit tensors or from e4m3."""
    cu_q, cu_k = (starts([pair[i] for pair in lengths], "cpu") for i in (0, 1))
    q = torch.randn(int(cu_q[-1]) + SPARE, 2, 64).bfloat16()
    k, v = (torch.randn(int(cu_k[-1]), 1, 64).bfloat16() for _ in range(2))
    longest = (max(pair[i] for pair in lengths) for i in (0, 1))
    spec = AttentionSpec(
        "cuda", torch.float8_e4m3fn, len(lengths), *longest, 2, 1, 64, 64, -1, 0, 0.125,
        is_varlen=True,
    )  # fmt: skip
    given, scales = (q, k, v), None
    if kind == "e4m3":
        edges = (cu_q, cu_k, cu_k)
        parts = [fp8.quantize_heads(x, cu_seqlens=cu) for x, cu in zip(given, edges, strict=True)]
        given, scales = zip(*parts, strict=True)
    counter = torch.zeros(1, dtype=torch.int32)
    with (
        mock.patch.object(device, "sm_count_of", return_value=2),
        mock.patch.object(attention_fp8, "counter_of", return_value=counter),
        emulated(0, program=Program(), resident=2),
    ):
        tensors = AttentionTensors(*given, cu_q, cu_k)
        o, lse = hopper_fp8(tensors, spec, scales=scales, per_token=kind == "tokens")
    truth = packed_truth(q, k, v, cu_q, cu_k, per_token=kind == "tokens", window=(-1, 0))
    assert_within_format(o, lse, truth)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("name", ["packed", "packed, window", "packed, wide"])
def test_no_schedule_changes_a_bit_of_packed_sequences(name, seed):
    o, lse, _ = run_packed(*PACKED[name])
    again, lse_again, _ = run_packed(*PACKED[name], seed=seed, num_sms=2)
    assert torch.equal(o, again)
    assert torch.equal(lse, lse_again)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("name", ["causal", "causal, wide", "window", "lengths", "both, window"])
def test_no_schedule_changes_a_bit(name, seed):
    case = (CASES | ADDED)[name]
    o, lse, _ = run(*case)
    again, lse_again, _ = run(*case, seed=seed, num_sms=2)
    assert torch.equal(o, again)
    assert torch.equal(lse, lse_again)


TOKEN_MISTAKES = (
    Mutation(
        "forward/fp8/step:logits_of", "s = s * gl.expand_dims(key_scales, 0)", "pass", "causal"
    ),
    Mutation(
        "forward/fp8/step:next_tile", "of_keys.tile - count", "of_keys.tile", "causal"
    ),
    Mutation(
        "forward/fp8/kernel:_consume", "of_keys = next_tile(of_keys, skipped)", "pass", "causal"
    ),
    Mutation(
        "forward/fp8/kernel:_consume", "kv_head * (gl.cdiv(seqlen_k, 4) * 4)\nlast_key",
        "batch_head * (gl.cdiv(seqlen_k, 4) * 4)\nlast_key", "tails, grouped",
    ),
    Mutation(
        "forward/fp8/kernel:_scales_of_rows", "scale * gl.load(", "scale + gl.load(",
        "tails, grouped",
    ),
    Mutation("forward/fp8/loader:produce", "if not C.PER_TOKEN:", "if True:", "tails, grouped"),
)  # fmt: skip


@pytest.mark.parametrize("mistake", TOKEN_MISTAKES, ids=lambda m: f"{m.place} {m.old[:40]}")
def test_mistakes_with_scales_of_tokens_are_seen(mistake):
    torch.manual_seed(2)
    with pytest.raises((EmulationError, AssertionError)):
        assert_within_format(*run(*CASES[mistake.call], program=mistake.program(), per_token=True))


ADDED_MISTAKES = (
    Mutation("forward/fp8/step:logits_of", "gl.expand_dims(ratio, 1)", "1.0", "cap"),
    Mutation(
        "forward/fp8/kernel:_with_cap", "scale = gl.full_like(scale, 0.0) + softcap", "pass", "cap"
    ),
    Mutation("forward/fp8/kernel:_consume", "scale, _ = _with_cap(scale, softcap, C)", "pass",
             "cap"),
    Mutation("forward/fp8/kernel:_consume", "gl.load(sinks_ptr + h)", "gl.load(sinks_ptr)",
             "sinks"),
    Mutation("forward/fp8/kernel:_consume", "finish(m * scale - P_LOG2,", "finish(m * scale,",
             "sinks"),
    Mutation("forward/fp8/kernel:_consume", "inverse = inverse * v_scale", "pass", "sinks"),
)  # fmt: skip


@pytest.mark.parametrize("mistake", ADDED_MISTAKES, ids=lambda m: f"{m.place} {m.old[:40]}")
def test_mistakes_with_caps_and_sinks_are_seen(mistake):
    with pytest.raises((EmulationError, AssertionError)):
        assert_within_format(*run(*ADDED[mistake.call], program=mistake.program()))


MASKED_MISTAKES = (
    Mutation("forward/fp8/step:words_of", "bits.row, 0", "0, 0", "mask"),
    Mutation("forward/fp8/masked:attend_masked",
             "hide_by_bits(logits_of(s, scales, ratio, C), words)",
             "logits_of(s, scales, ratio, C)", "mask"),
    Mutation("forward/fp8/step:step", "s = hide_by_bits(s, words)", "pass", "mask"),
    Mutation("forward/fp8/step:softmax", "or HAS_END or HIDDEN", "or HAS_END", "mask"),
    Mutation("forward/fp8/masked:attend_masked", "if RULED:", "if False:", "mask, full, causal"),
    Mutation("forward/fp8/masked:attend_masked", "if C.HAS_RIGHT:", "if False:",
             "mask, heads, causal"),
    Mutation("forward/fp8/masked:attend_masked", "if LEFT:", "if False:",
             "mask, sequences, window"),
    Mutation("forward/fp8/loader:produce", "column = block * C.TILE_N", "column = j * C.TILE_N",
             "mask"),
    Mutation("forward/fp8/kernel:_consume", "row0 - CONSUMER * 64, 0", "row0, 0",
             "mask, full, causal"),
)  # fmt: skip


@pytest.mark.parametrize("mistake", MASKED_MISTAKES, ids=lambda m: f"{m.place} {m.old[:40]}")
def test_mistakes_with_masks_are_seen(mistake):
    torch.manual_seed(3)
    with pytest.raises((EmulationError, AssertionError)):
        assert_within_format(*run(*MASKED[mistake.call], program=mistake.program()))


@pytest.mark.parametrize("name", [*MASKED, *MASKED_PACKED])
@pytest.mark.parametrize("per_token", [False, True], ids=["heads", "tokens"])
def test_masks_hide_keys(name, per_token):
    torch.manual_seed(3)
    start = run if name in MASKED else run_packed
    o, lse, truth = start(*(MASKED | MASKED_PACKED)[name], per_token=per_token)
    assert_within_format(o, lse, truth)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("name", ["mask, sequences, window", "mask, lengths, both", "mask, wide"])
def test_no_schedule_changes_a_bit_beside_a_mask(name, seed):
    results = []
    for case in ({}, {"seed": seed, "num_sms": 2}):
        torch.manual_seed(3)
        results.append(run(*MASKED[name], **case))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


PACKED_MISTAKES = (
    Mutation("forward/fp8/loader:_load_q", "first_row += first_q", "pass", "packed"),
    Mutation("forward/fp8/loader:produce", "key += rows.first_k", "pass", "packed"),
    Mutation("forward/fp8/loader:produce", "column += first_column(rows.first_k, of_b)", "pass",
             "packed"),
    Mutation("forward/fp8/loader:produce", "kv_head = of_b *", "kv_head = b *", "packed"),
    Mutation("forward/fp8/loader:produce", "(of_b * heads + h)", "batch_head", "packed"),
    Mutation("forward/fp8/kernel:_consume", "seqlen_q + first_q", "seqlen_q", "packed"),
    Mutation("forward/fp8/kernel:_length_of", "if C.packed:", "if False:", "packed"),
    Mutation("forward/fp8/kernel:_consume", "gl.where(row0 < length_q, skipped, count - 1)",
             "count - 1", "packed, full"),
    Mutation("forward/fp8/kernel:_consume", "masked_until = gl.maximum(masked_until, skipped + 1)",
             "pass", "packed, full"),
)  # fmt: skip


@pytest.mark.parametrize("mistake", PACKED_MISTAKES, ids=lambda m: f"{m.place} {m.old[:40]}")
def test_mistakes_with_packed_sequences_are_seen(mistake):
    with pytest.raises((EmulationError, AssertionError)):
        assert_within_format(*run_packed(*PACKED[mistake.call], program=mistake.program()))


@pytest.mark.parametrize("where", ["scales of keys", "values"])
def test_packed_sequences_keep_apart(where):
    """What one sequence says of its keys reaches no other."""
    place, old, new = {
        "scales of keys": (
            "forward/fp8/kernel:_consume",
            "key_scales_at += read_note(smem.sequences, slot * SEQUENCE + FIRST_K)",
            "pass",
        ),
        "values": ("forward/fp8/loader:first_column", "+ b) *", "+ 0 * b) *"),
    }[where]
    mistake = Mutation(place, old, new, "packed")
    with pytest.raises((EmulationError, AssertionError)):
        assert_within_format(
            *run_packed(*PACKED["packed"], program=mistake.program(), per_token=True)
        )


_CAUSAL, _WHOLE = "causal", "whole tiles"
MISTAKES = (
    Mutation(
        "forward/fp8/step:step",
        "mbarrier.arrive(bars.v_empty.index(last), count=1)",
        "pass",
        _CAUSAL,
    ),
    Mutation(
        "forward/fp8/step:step",
        "mbarrier.wait(bars.k_full.index(stage), (count // C.STAGES) & 1)",
        "pass",
        _CAUSAL,
    ),
    Mutation("forward/fp8/step:skip", "wait_scheduler(CONSUMER)", "pass", _CAUSAL),
    Mutation(
        "forward/fp8/loader:_load_q",
        "mbarrier.wait(bars.q_empty.index(w), (visit & 1) ^ 1)",
        "pass",
        _CAUSAL,
    ),
    Mutation("forward/fp8/loader:notes_of", "(visit & 1) * C.NUM_CONSUMERS + w", "w + 0", _CAUSAL),
    Mutation("forward/fp8/kernel:_store", "fence_async_shared()", "pass", _WHOLE),
)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: f"{m.place} {m.old[:40]}")
def test_mistakes_are_seen(mistake):
    def judge() -> None:
        for seed in range(3):
            o, lse, truth = run(
                *CASES[mistake.call], seed=seed, num_sms=1, program=mistake.program()
            )
            assert_within_format(o, lse, truth)

    with pytest.raises((EmulationError, AssertionError)):
        judge()
