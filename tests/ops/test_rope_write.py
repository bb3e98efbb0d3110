"""rope_write_kv_cache: the ops that it joins, in one kernel, on every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.reference import paged as oracle
from tilewise.reference import rope as rope_oracle
from tilewise.testing import assert_within_budget

on_each_backend = pytest.mark.parametrize(("backend", "place"), BACKENDS)
# name: (tokens, (Hq, Hk), (D, Dv), rotary dim, interleaved, whether there are norms)
CASES: dict[str, tuple[int, tuple[int, int], tuple[int, int], int, bool, bool]] = {
    "llama": (9, (6, 2), (64, 64), 64, False, False),
    "qwen3": (6, (4, 2), (128, 128), 128, False, True),
    "gpt_j": (5, (2, 2), (64, 64), 64, True, True),
    "partial": (5, (3, 1), (80, 24), 40, False, True),
    "partial_interleaved": (5, (3, 3), (24, 40), 8, True, False),
    "wide_heads": (3, (2, 1), (576, 512), 64, False, True),
    "many_heads": (2, (40, 5), (128, 64), 128, False, True),
    "no_rotation": (3, (4, 2), (16, 16), 0, False, True),
}


def _arguments(name: str, dtype: torch.dtype, place: str) -> tuple[list[Tensor], dict[str, Any]]:
    tokens, (num_q_heads, num_kv_heads), (dim, v_dim), rotary, interleaved, has_norms = CASES[name]
    fused = torch.randn(tokens, num_q_heads + num_kv_heads + 1, dim)
    q, k = fused[:, :num_q_heads], fused[:, num_q_heads:-1]
    v = torch.randn(tokens, 2, num_kv_heads, v_dim)[:, 1]
    slots = torch.randperm(tokens + 20)[:tokens]
    slots[1] = -1
    cos, sin = (
        t.to(place) for t in rope_oracle.rope_cos_sin(torch.arange(tokens) * 31 + 5, rotary)
    )
    options = {"cos": cos, "sin": sin, "interleaved": interleaved}
    if has_norms:
        weights = (1 + torch.randn(2, dim) / 4).to(place, dtype)
        options |= {"q_norm": weights[0], "k_norm": weights[1], "norm_eps": 1e-3}
    return [*(x.to(place, dtype) for x in (q, k, v)), slots.to(place)], options


def _caches(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    blocks = len(k) // 4 + 6
    return [
        torch.full((blocks, 4, *x.shape[1:]), math.nan, dtype=q.dtype, device=q.device)
        for x in (k, v)
    ]


def _eager(tensors: list[Tensor], options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What the separate ops give, each rounded to the dtype: q and k."""
    q, k = tensors[:2]
    if "q_norm" in options:
        q, k = (
            oracle.rms_norm(x, options[w], options["norm_eps"])
            for x, w in ((q, "q_norm"), (k, "k_norm"))
        )
    table = options["cos"], options["sin"]
    q, k = (rope_oracle.apply_rope(x, *table, interleaved=options["interleaved"]) for x in (q, k))
    return q, k


@on_each_backend
class TestRopeWrite:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("name", CASES)
    def test_q_and_the_cache_keep_the_budget(self, name, dtype, backend, place):
        (q, k, v, slots), options = _arguments(name, dtype, place)
        caches = _caches(q, k, v)
        before = [x.clone() for x in (q, k, v)]
        got = ops.rope_write_kv_cache(q, k, v, *caches, slots, **options, backend=backend)
        wide = {n: x.double() if isinstance(x, Tensor) else x for n, x in options.items()}
        want = [cache.double() for cache in caches]
        for cache in want:
            cache.fill_(math.nan)
        truth = oracle.rope_write_kv_cache(q.double(), k.double(), v.double(), *want, slots, **wide)
        eager_q, eager_k = _eager([q, k], options)
        assert got.dtype == dtype
        assert_within_budget(got, truth, eager_q, name="q")
        kept = slots >= 0
        at = slots[kept] // 4, slots[kept] % 4
        assert_within_budget(caches[0][at], want[0][at], eager_k[kept], name="k")
        assert torch.equal(caches[1][at], v[kept])
        for cache, x in zip(caches, (k, v), strict=True):
            assert int(cache.isfinite().sum()) == x[kept].numel()
        assert all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True))

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
    @pytest.mark.parametrize("fixed", [False, True], ids=["token_scales", "head_scales"])
    def test_an_8_bit_cache_holds_what_was_rotated(self, fixed, dtype, backend, place):
        (q, k, v, slots), options = _arguments("partial", torch.float32, place)
        blocks = len(k) // 4 + 6
        results = []
        for is_fused in (True, False):
            caches = [
                torch.zeros(blocks, 4, *x.shape[1:], dtype=torch.int8, device=place).view(dtype)
                for x in (k, v)
            ]
            shape = k.shape[1:2] if fixed else (blocks, 4, k.shape[1])
            scales = {n: torch.full(shape, 0.02, device=place) for n in ("k_scale", "v_scale")}
            if is_fused:
                ops.rope_write_kv_cache(
                    q, k, v, *caches, slots, **options, **scales, backend=backend
                )
            else:
                turned = _eager([q, k], options)[1]
                ops.write_kv_cache(turned, v, *caches, slots, **scales, backend=backend)
            results.append([*caches, *scales.values()])
        for fused, apart in zip(*results, strict=True):
            if fused.dtype == torch.float32:
                torch.testing.assert_close(fused, apart, rtol=1e-5, atol=0)
                continue
            # A rounding of float32 before may turn a tie: one step, and seldom.
            off = (fused.view(torch.int8).int() - apart.view(torch.int8).int()).abs()
            assert int(off.max()) <= 1
            assert int(off.count_nonzero()) <= 2

    def test_nothing_and_rows_to_skip(self, backend, place):
        (q, k, v, slots), options = _arguments("llama", torch.float32, place)
        caches = _caches(q, k, v)
        turned = ops.rope_write_kv_cache(
            q, k, v, *caches, torch.full_like(slots, -1), **options, backend=backend
        )
        assert all(bool(cache.isnan().all()) for cache in caches)
        assert bool(turned.isfinite().all())
        options |= {"cos": options["cos"][:0], "sin": options["sin"][:0]}
        nothing = ops.rope_write_kv_cache(
            q[:0], k[:0], v[:0], *caches, slots[:0], **options, backend=backend
        )
        assert nothing.shape == (0, 6, 64)


def test_float64_is_computed_in_float64():
    (q, k, v, slots), options = _arguments("qwen3", torch.float64, "cpu")
    caches, want = _caches(q, k, v), _caches(q, k, v)
    got = ops.rope_write_kv_cache(q, k, v, *caches, slots, **options, backend="cpu")
    truth = oracle.rope_write_kv_cache(q, k, v, *want, slots, **options)
    torch.testing.assert_close(got, truth, rtol=1e-13, atol=1e-13)
    for cache, expected in zip(caches, want, strict=True):
        torch.testing.assert_close(cache, expected, rtol=1e-13, atol=1e-13, equal_nan=True)


def test_many_tokens_on_any_number_of_threads():
    (q, k, v, _), options = _arguments("qwen3", torch.bfloat16, "cpu")
    q, k, v = (x.repeat(25, 1, 1) for x in (q, k, v))  # 150 tokens: three tasks
    options |= {name: options[name].repeat(25, 1) for name in ("cos", "sin")}
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            caches = _caches(q, k, v)
            turned = ops.rope_write_kv_cache(q, k, v, *caches, torch.arange(150), **options)
            results.append([turned, *(cache.flatten(0, 1)[:150] for cache in caches)])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    assert torch.equal(results[0][0][:6], results[0][0][-6:])


def test_it_is_one_clean_node_of_a_graph():
    (q, k, v, slots), options = _arguments("qwen3", torch.float32, "cpu")
    blocks = len(k) // 4 + 6
    caches = [torch.zeros(blocks, 4, 2, 128, dtype=torch.int8) for _ in range(2)]
    scales = [torch.zeros(blocks, 4, 2) for _ in range(2)]
    arguments = (
        q, k, v, *caches, *scales, slots, options["cos"], options["sin"], options["q_norm"],
        options["k_norm"], 1e-6, False, None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.tilewise.rope_write_kv_cache.default, arguments)
    torch.library.opcheck(
        torch.ops.tilewise.write_kv_cache.default, (k, v, *caches, *scales, slots, None)
    )


REFUSALS = {
    "other dtype": ({"q": torch.randn(9, 6, 64).half()}, "q must have dtype float32, got float16"),
    "other head dim": ({"q": torch.randn(9, 6, 32)}, "q must have shape"),
    "a row short": ({"cos": torch.randn(8, 32)}, r"cos must have shape \(9, 32\)"),
    "narrow tables": ({"cos": torch.randn(9, 32).half()}, "cos must have dtype float32"),
    "a wide table": ({"cos": torch.randn(9, 33), "sin": torch.randn(9, 33)}, "at most D / 2 = 32"),
    "half a norm": ({"q_norm": torch.ones(64)}, "q_norm and k_norm must come together"),
    "a short norm": ({"q_norm": torch.ones(9), "k_norm": torch.ones(9)}, "q_norm must have shape"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name):
    changes, message = REFUSALS[name]
    (q, k, v, slots), options = _arguments("llama", torch.float32, "cpu")
    given = {"q": q, "k": k, "v": v, "slot_mapping": slots} | options | changes
    k_cache, v_cache = _caches(q, k, v)
    with pytest.raises((ValueError, TypeError), match=message):
        ops.rope_write_kv_cache(k_cache=k_cache, v_cache=v_cache, **given)
