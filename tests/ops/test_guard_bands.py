"""No kernel reads or writes outside of its tensors, whatever ids, lengths and slots hold.

A CPU refuses what leads outside; on a GPU, which would have to be waited for, lengths are cut,
slots and pairs skipped, and an id of no block read as another's. A seed is a call: an op, its
features and sizes, and hostile numbers in some of its small tensors. A GPU compiles kernels for
each, so it is given several draws of these numbers. In the interpreter each address is looked at;
everywhere the bands about a tensor stay as they were, and where ids or lengths alone are wrong no
NaN of a band reaches a result.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests import warm
from tests.kernels.guarded import Banded, watched
from tilewise import masks, ops
from tilewise.kernels import device as devices

_FAR = (2**31 - 1, -(2**31), 10**6, -1)


def _hostile(draw: random.Random, given: Tensor, most: int) -> Tensor:
    """The tensor with some numbers that no call has; `most` is the largest that one has."""
    flat = given.flatten().tolist()
    for at in range(len(flat)):
        if draw.random() < 0.5:
            flat[at] = draw.choice([*_FAR, most + 1, most + 2, draw.randint(-9, most + 9)])
    return torch.tensor(flat, dtype=given.dtype).view(given.shape)


class _Call:
    """What the calls of a seed are made of.

    Attributes:
        draw, hostile: what draws features and sizes, and the numbers that no call has.
    """

    def __init__(
        self, seed: int, backend: str | None, place: str, dtype: torch.dtype, numbers: int
    ) -> None:
        self.draw, self.backend, self.place, self.dtype = random.Random(seed), backend, place, dtype
        self.hostile = random.Random(1000 * seed + numbers)
        self.banded, self._generator = Banded(), torch.Generator().manual_seed(seed)
        self.spoils_edges = self.draw.random() < 0.4

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(shape, generator=self._generator).to(dtype or self.dtype)
        return self.banded(x.to(self.place))

    def ints(self, given: Any, most: int, *, spoils: bool, dtype: Any = torch.int32) -> Tensor:
        tensor = torch.as_tensor(given, dtype=dtype)
        if spoils:
            tensor = _hostile(self.hostile, tensor, most)
        return self.banded(tensor.to(self.place))

    def edges(self, lengths: list[int], total: int) -> Tensor:
        starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        return self.ints(starts, total, spoils=self.spoils_edges)

    def lengths(self, count: int, most: int) -> list[int]:
        return [self.draw.choice([0, 1, self.draw.randint(1, most), most]) for _ in range(count)]


def _step(call: _Call, width: int) -> tuple[dict[str, Any], int, int, int]:
    """The small tensors of a step over a cache; its rows, blocks and slots of a block."""
    draw = call.draw
    size, batch = draw.choice([1, 4, 16, 64]), draw.choice([1, 3, 5])
    columns, blocks = draw.randint(1, width), draw.randint(1, 9)
    runs = [draw.choice([1, draw.randint(0, 9)]) for _ in range(batch)]
    rows = max(1, sum(runs) + draw.choice([0, 3]))
    table = torch.randint(blocks, (batch, columns), generator=torch.Generator().manual_seed(1))
    options = {
        "block_table": call.ints(table, blocks, spoils=draw.random() < 0.7),
        "seqlens_k": call.ints(
            call.lengths(batch, columns * size), columns * size, spoils=draw.random() < 0.7
        ),
        "cu_seqlens_q": call.edges(runs, rows),
        "max_seqlen_q": draw.choice([1, max(1, *runs), max(1, *runs)]),
    }
    return options, rows, blocks, size


def _paged(call: _Call) -> list[Tensor]:
    draw, dim, heads = call.draw, call.draw.choice([16, 64]), call.draw.choice([2, 4, 8])
    options, rows, blocks, size = _step(call, 70)
    caches = [call.floats(blocks, size, 2, dim) for _ in range(2)]
    feature = draw.choice(["plain", "window", "more", "tree", "bytes", "invariant", "plan"])
    if feature == "window":
        options["window"] = draw.choice([1, 5, 40])
    elif feature == "more":
        options |= {"sinks": call.floats(heads), "alibi_slopes": call.floats(heads), "softcap": 5.0}
    elif feature == "tree":
        tree = torch.rand(rows, options["max_seqlen_q"]) < 0.7
        options["tree_mask"] = call.banded(tree.to(call.place))
    elif feature == "bytes":
        caches = [call.banded((x * 9).to(torch.int8)) for x in caches]
        scales = [call.floats(blocks, size, 2, dtype=torch.float32).abs_() for _ in range(2)]
        options |= {"k_scale": scales[0], "v_scale": scales[1]}
    elif feature == "invariant":
        options["batch_invariant"] = True
    q = call.floats(rows, heads, dim)
    given = (q, *caches)
    if feature == "plan":
        plan = ops.plan_paged_attention(*given, **options, backend=call.backend)
        options["plan"] = plan
    o = ops.paged_attention(*given, **options, backend=call.backend)
    return [] if call.spoils_edges else [o[: int(options["cu_seqlens_q"][-1])]] * _is_long(options)


def _is_long(options: dict[str, Any]) -> bool:
    """Whether max_seqlen_q is no less than the longest run, so that every row is computed."""
    return int(options["cu_seqlens_q"].diff().max()) <= options["max_seqlen_q"]


def _shared(call: _Call) -> list[Tensor]:
    draw, size, batch, columns = call.draw, 4, 4, 14
    table = torch.arange(columns).repeat(batch, 1)
    table[:, 9:] = 9 + torch.arange(batch * 5).view(batch, 5)
    lengths, edges = torch.full((batch,), 50), torch.arange(batch + 1)
    shared = ops.shared_prefixes(
        table.int(), lengths.int(), edges.int(), block_size=size, device=call.place
    )
    assert shared is not None
    for tensor in shared.tensors:
        if call.hostile.random() < 0.5:
            tensor.copy_(_hostile(call.hostile, tensor.cpu(), 40))
    q, caches = call.floats(batch, 4, 16), [call.floats(40, size, 2, 16) for _ in range(2)]
    ops.paged_attention(
        q, *caches, block_table=call.ints(table, 40, spoils=draw.random() < 0.5),
        seqlens_k=call.ints(lengths, 56, spoils=draw.random() < 0.5),
        cu_seqlens_q=call.ints(edges, batch, spoils=False), max_seqlen_q=1, shared=shared,
        backend=call.backend,
    )  # fmt: skip
    return []


def _latent(call: _Call) -> list[Tensor]:
    options, rows, blocks, size = _step(call, 30)
    heads = call.draw.choice([4, 16])
    rank, rope_dim = 32, 16
    if call.place == "cuda" and call.draw.random() < 0.5:  # what Hopper's own kernels take
        rank, rope_dim = 512, 64
    o = ops.mla_decode(
        call.floats(rows, heads, rank), call.floats(rows, heads, rope_dim),
        call.floats(blocks, size, rank + rope_dim),
        softmax_scale=0.1, batch_invariant=call.draw.random() < 0.3, backend=call.backend,
        **options,
    )  # fmt: skip
    return [] if call.spoils_edges else [o[: int(options["cu_seqlens_q"][-1])]] * _is_long(options)


def _write(call: _Call) -> list[Tensor]:
    draw, rows, blocks, size = call.draw, 7, 3, 4
    slots = call.ints(
        torch.randperm(blocks * size)[:rows], blocks * size, spoils=True, dtype=torch.int64
    )
    k, v = (call.floats(rows, 2, 16) for _ in range(2))
    caches = [call.floats(blocks, size, 2, 16) for _ in range(2)]
    scales: dict[str, Tensor] = {}
    if draw.random() < 0.4:
        caches = [call.banded(x.to(torch.int8)) for x in caches]
        scales = {
            name: call.floats(blocks, size, 2, dtype=torch.float32)
            for name in ("k_scale", "v_scale")
        }
    if draw.random() < 0.5:
        ops.write_kv_cache(k, v, *caches, slots, **scales, backend=call.backend)
        return []
    angles = {name: call.floats(rows, 8, dtype=torch.float32) for name in ("cos", "sin")}
    q = call.floats(rows, 4, 16)
    return [
        ops.rope_write_kv_cache(q, k, v, *caches, slots, **angles, **scales, backend=call.backend)
    ]


def _copy(call: _Call) -> list[Tensor]:
    caches = [call.floats(6, 4, 2, 16) for _ in range(2)]
    pairs = call.ints([[0, 3], [1, 4], [2, 5]], 6, spoils=True, dtype=torch.int64)
    ops.copy_blocks(*caches, pairs, backend=call.backend)
    return []


def _attention(call: _Call) -> list[Tensor]:
    draw, dim, packed = call.draw, call.draw.choice([16, 64]), call.draw.random() < 0.6
    most, batch = draw.choice([9, 70, 140]), draw.choice([1, 3])
    runs, keys = (call.lengths(batch, most) for _ in range(2))
    rows = (max(1, sum(runs)), max(1, sum(keys))) if packed else (most, most)
    shape = () if packed else (batch,)
    q, k, v = (
        call.floats(*shape, n, h, dim) for n, h in ((rows[0], 4), (rows[1], 2), (rows[1], 2))
    )
    options: dict[str, Any] = {}
    attend = ops.attention
    if packed:
        attend = ops.attention_varlen
        longest = max(1, *runs), max(1, *keys)
        options = {
            "cu_seqlens_q": call.edges(runs, rows[0]), "cu_seqlens_k": call.edges(keys, rows[1]),
            "max_seqlen_q": draw.choice([longest[0], max(1, longest[0] // 2), 10**6]),
            "max_seqlen_k": draw.choice([longest[1], max(1, longest[1] // 2), 10**6]),
        }  # fmt: skip
    else:
        options["seqlens_k"] = call.ints(keys, most, spoils=True)
    covered = (options.get("max_seqlen_q", most), options.get("max_seqlen_k", most))
    feature = draw.choice(["plain", "causal", "window", "bias", "mask", "dropout", "sinks"])
    if feature in ("bias", "mask") and max(covered) > 1000:
        feature = "causal"
    options |= {
        "plain": {}, "causal": {"causal": True}, "window": {"window": (9, 2)},
        "dropout": {"dropout_p": 0.25, "seed": 3},
    }.get(feature, {})  # fmt: skip
    if feature == "bias":
        options["bias"] = call.floats(1, 4, *covered)
    elif feature == "mask":
        options["mask"] = masks.dense(torch.rand(*covered) < 0.6, tile=64, device=call.place)
    elif feature == "sinks":
        options["sinks"] = call.floats(4)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(*leaves, **options, backend=call.backend)
    gradients = torch.autograd.grad(o, leaves, call.floats(*o.shape))
    return [] if packed else [o, *gradients]


def _experts(call: _Call) -> list[Tensor]:
    draw, experts, width, inner = call.draw, call.draw.choice([3, 40]), 32, 16
    rows, active = draw.choice([1, 5, 40]), draw.choice([1, 3])
    chosen = torch.rand(rows, experts).topk(active).indices
    y = ops.expert_mlp(
        call.floats(rows, width),
        call.ints(chosen, experts, spoils=True, dtype=draw.choice([torch.int32, torch.int64])),
        call.floats(rows, active, dtype=torch.float32),
        call.floats(experts, 2 * inner, width), call.floats(experts, width, inner),
        up_bias=call.floats(experts, 2 * inner), down_bias=call.floats(experts, width),
        weighs_input=draw.random() < 0.3, backend=None if call.backend == "gluon" else call.backend,
    )  # fmt: skip
    return [y]


_OPS = (_paged, _paged, _shared, _latent, _write, _copy, _attention, _attention, _experts)
_EACH = len(_OPS)


def run_seed(
    seed: int,
    backend: str | None,
    place: str,
    dtype: torch.dtype = torch.float32,
    numbers: int = 0,
) -> bool:
    """Make the call of a seed; return whether it ran, which a CPU refuses where it leads outside.

    Ops that a named backend has no kernel for are given to the one that runs them there.
    """
    call = _Call(seed, backend, place, dtype, numbers)
    try:
        results = _OPS[seed % len(_OPS)](call)
    except (ValueError, NotImplementedError) as refusal:
        is_named = backend == "cpu" and " must " in str(refusal)
        if isinstance(refusal, NotImplementedError) or is_named:
            return False
        raise
    if place == "cuda":
        torch.cuda.synchronize()
    call.banded.check()
    assert not any(bool(x.isnan().any()) for x in results)
    return True


interpreted = pytest.mark.skipif(not devices.interpreting(), reason="kernels are compiled here")


_FIRST = [0, 4 * _EACH] + [
    pytest.param(n * _EACH, marks=pytest.mark.slow) for n in range(40) if n not in (0, 4)
]


@interpreted
@pytest.mark.parametrize("first", _FIRST)
def test_interpreted_kernels_stay_inside_of_their_tensors(first, monkeypatch):
    with watched(monkeypatch):
        ran = sum(run_seed(seed, "triton", "cpu") for seed in range(first, first + _EACH))
        assert ran >= _EACH - 2


@pytest.mark.parametrize("count", [16, pytest.param(1600, marks=pytest.mark.slow)])
def test_kernels_of_a_cpu_stay_inside_of_their_tensors(count):
    """In a process of its own, which an address outside would end."""
    code = (
        "from tests.ops.test_guard_bands import run_seed\n"
        f"ran = sum(run_seed(seed, 'cpu', 'cpu') for seed in range({count}))\n"
        f"assert ran >= {count} // 8, ran"
    )
    warm.run([sys.executable, "-c", code], check=True, timeout=3000)


# The calls of a test compile some 30 kernels, whatever the draws.
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(None, torch.bfloat16), (None, torch.float16), ("triton", torch.bfloat16),
     ("triton", torch.float32)],
    ids=["bfloat16", "float16", "portable-bfloat16", "portable-float32"],
)  # fmt: skip
@pytest.mark.parametrize("first", range(0, 12 * _EACH, _EACH))
def test_kernels_of_a_gpu_stay_inside_of_their_tensors(first, backend, dtype):
    for seed in range(first, first + _EACH):
        for numbers in range(12):
            run_seed(seed, backend, "cuda", dtype, numbers)
