"""Largest logits through a layer, and the example of docs/guide/training.md that clips by them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise import nn

DOCS = Path(__file__).parents[2] / "docs" / "guide" / "training.md"


def test_a_layer_hands_them_over_and_computes_the_same() -> None:
    torch.manual_seed(0)
    layer, x, found = nn.Attention(64, 4, 2, 16), torch.randn(2, 30, 64), []
    y = layer(x, on_max_logits=found.append)
    torch.testing.assert_close(y, layer(x))
    q, k, _ = layer.qkv_proj(x).unflatten(-1, (8, 16)).split((4, 2, 2), dim=2)
    s = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(2, 2)) / 4
    seen = torch.ones(30, 30, dtype=torch.bool).tril()
    torch.testing.assert_close(found[0], s.masked_fill(~seen, -torch.inf).amax((0, 2, 3)))


def test_a_layer_has_none_over_a_cache() -> None:
    layer = nn.Attention(64, 4, 2, 16)
    nothing: Any = object()
    with pytest.raises(ValueError, match="on_max_logits must be None with a cache"):
        layer(torch.randn(3, 64), ctx=nothing, kv=nothing, on_max_logits=print)


def test_the_example_of_the_documents_brings_logits_under_the_threshold() -> None:
    text = DOCS.read_text()
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "clip" in code]
    names: dict[str, Any] = {}
    torch.manual_seed(1)
    exec(example, names)
    layer, largest = names["layer"], names["largest"]
    x, after = torch.randn(2, 64, 256) * 3, []
    layer(x, on_max_logits=largest.copy_)
    assert (largest > 0.5).any()
    names["clip_queries"](layer, largest, threshold=0.5)
    layer(x, on_max_logits=after.append)
    torch.testing.assert_close(after[0], largest.clamp(max=0.5))
