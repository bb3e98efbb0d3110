"""The code of a backward pass, chosen once for all lengths that are alike."""

from __future__ import annotations

import itertools

import pytest
import torch

pytest.importorskip("triton")

from tilewise.kernels.gluon.backward import plan
from tilewise.kernels.gluon.backward.plan import variant_of, variant_of_kind
from tilewise.kernels.spec import AttentionSpec


@pytest.mark.parametrize("width", [64, 128, 192, 256])
def test_lengths_of_a_kind_share_the_code_that_each_would_have(width, monkeypatch):
    """But for the ways of some lengths, see test_turns.py."""
    monkeypatch.setattr(plan, "WAYS", [])
    lengths, sides = (1, 2, 64, 127, 128, 129, 192, 1000), (-1, 0, 1, 63, 126, 127, 128, 999)
    for queries, keys, left, right in itertools.product(lengths, lengths, sides, sides):
        for deterministic in (False, True):
            spec = AttentionSpec(
                "cuda", torch.bfloat16, 2, queries, keys, 4, 2, width, min(width, 128), left, right,
                deterministic=deterministic,
            )  # fmt: skip
            assert variant_of(spec) == variant_of_kind.__wrapped__(spec)
