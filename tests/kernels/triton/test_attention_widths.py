"""Head dims of the Triton attention kernels: from 1 to 512 channels, and 576 for q and k."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    ON_CPU,
    ON_GPU,
    Call,
    assert_right,
    everyday,
    make_problem,
)
from tilewise.kernels import device as facts
from tilewise.kernels.spec import AttentionSpec
from tilewise.kernels.triton.attention import plan as kernels

CASES = {
    "8": Call(36, 40, (2, 1), (8, 8), window=CAUSAL),
    "one_head_of_8": Call(36, 40, (1, 1), (8, 8), dtype=BRAIN, window=CAUSAL),
    "12_and_5": Call(20, 36, (2, 1), (12, 5), window=CAUSAL, bias=(2, 20, 36)),
    "one_channel": Call(20, 36, (2, 1), (1, 1)),
    "8_and_512": Call(20, 36, (1, 1), (8, 512)),
    "264": Call(20, 36, (1, 1), (264, 264), window=CAUSAL),
    "512": Call(36, 36, (2, 1), (512, 512), window=CAUSAL),
    "64_and_512": Call(36, 40, (1, 1), (64, 512), window=CAUSAL),
    "576_and_512": Call(36, 40, (2, 1), (576, 512), window=CAUSAL),
    "520_and_8": Call(20, 36, (1, 1), (520, 8)),
    "544_with_everything": Call(
        36, 70, (2, 1), (544, 512), 2, mask=(1, 2), bias=(2, 1, 36, 70), seqlens_k=(40, 70),
        alibi="heads", softcap=5.0, sinks=True, window=(50, 3), dropout_p=0.3,
    ),
    "packed_576_and_512": Call(
        heads=(2, 1), dims=(576, 512), lengths=((20, 36), (7, 0), (20, 20)), window=CAUSAL
    ),
    "bfloat16": Call(70, 70, (1, 1), (576, 512), dtype=BRAIN, window=CAUSAL),
}  # fmt: skip
EVERYDAY = ("8", "12_and_5", "one_head_of_8", "576_and_512", "544_with_everything")
NAMES = everyday(CASES, EVERYDAY)


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_gradients_match_float64(name: str, device: str) -> None:
    assert_right(make_problem(CASES[name], device))


def test_every_width_is_taken_up_to_the_widest() -> None:
    spec = AttentionSpec("cuda", torch.float16, 1, 8, 8, 1, 1, 64, 64)
    for width in range(1, 577):
        assert kernels.why_not(spec._replace(head_dim=width)) is None
        refusal = kernels.why_not(spec._replace(v_head_dim=width))
        assert (refusal is None) == (width <= 512)


def test_wide_float32_heads_need_more_shared_memory_than_small_devices_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide = AttentionSpec("cuda", torch.float32, 1, 8, 8, 1, 1, 264, 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(facts, "arch_of", lambda _: 86)
    assert "132 KiB of shared memory" in kernels.why_not(wide)
    assert kernels.why_not(wide._replace(head_dim=256)) is None
    assert kernels.why_not(wide._replace(dtype=torch.bfloat16)) is None
    monkeypatch.setattr(facts, "arch_of", lambda _: 90)
    assert kernels.why_not(wide) is None
