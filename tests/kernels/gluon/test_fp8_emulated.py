"""Hopper's e4m3 kernel in the emulator: every protocol of its partitions, and its numbers."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon.emulator import EmulationError, Program, emulated
from tests.kernels.gluon.fp8_oracle import assert_within_format, dequantised_truth
from tests.kernels.gluon.mutations import Mutation
from tests.kernels.gluon.test_fp8 import in_product_order
from tilewise.kernels import device
from tilewise.kernels.gluon.attention import fp8 as attention_fp8
from tilewise.kernels.gluon.attention.quantise import Quantized
from tilewise.kernels.spec import AttentionSpec
from tilewise.reference import fp8
from tilewise.testing import make_qkv

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


def run(shape, window, lengths, *, seed=0, num_sms=3, program=None, per_token=False):
    """Return o, lse and what they should be; the kernel runs on three multiprocessors."""
    q, k, v = make_qkv(*shape, dtype=torch.bfloat16)
    seqlens = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    if per_token:  # which differ in size by 2**12
        q, k = (x * torch.exp2(torch.randint(-6, 7, (*x.shape[:3], 1))) for x in (q, k))
        q, k = (x.bfloat16() * shape[-1] ** -0.25 for x in (q, k))
    quantize = fp8.quantize_tokens if per_token else fp8.quantize_heads
    (q8, q_scale), (k8, k_scale) = (quantize(x, seqlens=s) for x, s in ((q, None), (k, seqlens)))
    v8, v_scale = fp8.quantize_heads(v, seqlens=seqlens)
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
        has_seqlens_k=lengths is not None,
    )
    counter = torch.zeros(1, dtype=torch.int32)
    with (
        mock.patch.object(device, "sm_count_of", return_value=num_sms),
        mock.patch.object(attention_fp8, "counter_of", return_value=counter),
        emulated(seed, program=program or Program(), resident=num_sms),
    ):
        o, lse = attention_fp8.run(ready, spec, seqlens_k=seqlens)
    assert counter.item() == 0  # ready for the next launch
    rule = {"window": window, "seqlens_k": seqlens}
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("name", ["causal", "causal, wide", "window", "lengths"])
def test_no_schedule_changes_a_bit(name, seed):
    o, lse, _ = run(*CASES[name])
    again, lse_again, _ = run(*CASES[name], seed=seed, num_sms=2)
    assert torch.equal(o, again)
    assert torch.equal(lse, lse_again)


TOKEN_MISTAKES = (
    Mutation(
        "forward/fp8/step:scaled_by_keys", "s = s * gl.expand_dims(scale, 0)", "pass", "causal"
    ),
    Mutation(
        "forward/fp8/step:next_tile", "of_keys.tile - count", "of_keys.tile", "causal"
    ),
    Mutation(
        "forward/fp8/kernel:_consume", "of_keys = next_tile(of_keys, skipped)", "pass", "causal"
    ),
    Mutation(
        "forward/fp8/kernel:_consume", "(batch_head // head_group)", "(batch_head)",
        "tails, grouped",
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
