"""Public ops inside CUDA graphs: torch.compile's, captured by hand, and trained."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tilewise import masks, ops
from tilewise.kernels.host.lasting import lasting


def test_what_lasts_is_made_by_another_thread_on_a_gpu_and_errors_come_through(monkeypatch):
    """Pools of memory belong to threads, so a thread of its own allocates from none."""
    makers: list[int] = []

    def make() -> Tensor:
        makers.append(threading.get_ident())
        return torch.zeros(3)

    def fail() -> Tensor:
        raise MemoryError("no room")

    assert lasting(make, torch.device("cpu")).shape == (3,)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    assert lasting(make, torch.device("cuda", 0)).shape == (3,)
    assert makers[0] == threading.get_ident() != makers[1]
    with pytest.raises(MemoryError, match="no room"):
        lasting(fail, torch.device("cuda", 0))


class Case(NamedTuple):
    """A call of an op, and the tensors that it takes for a number of rows."""

    call: Callable[..., Tensor | tuple[Tensor, ...]]
    make: Callable[[int], tuple[Tensor, ...]]


def _draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=dtype)


def _qkv(rows: int, keys: int | None = None, head_dim: int = 128) -> tuple[Tensor, ...]:
    keys = keys or rows
    return tuple(_draw(2, *n, head_dim) for n in ((rows, 8), (keys, 2), (keys, 2)))


def _arange(count: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.arange(count, device="cuda", dtype=dtype)


def _cu_seqlens(rows: int) -> Tensor:
    return torch.tensor([0, rows // 3, rows], device="cuda", dtype=torch.int32)


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, **options) -> Tensor:
    longest = q.shape[0]
    return ops.attention_varlen(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest,
        causal=True, **options,
    )  # fmt: skip


def _packed(rows: int) -> tuple[Tensor, ...]:
    return _draw(rows, 8, 128), _draw(rows, 2, 128), _draw(rows, 2, 128), _cu_seqlens(rows)


def _cached(rows: int, heads: int = 2, head_dim: int = 128) -> tuple[Tensor, ...]:
    """A cache of 64 blocks, and two sequences of which one has `rows` keys."""
    caches = _draw(64, 16, heads, head_dim), _draw(64, 16, heads, head_dim)
    table = torch.randperm(64, device="cuda")[:64].view(2, 32).int()
    return *caches, table, torch.tensor([min(rows, 512), 77], device="cuda", dtype=torch.int32)


def _paged(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    each = q.shape[0] // 2
    cu = _arange(3) * each
    return ops.paged_attention(
        q, k, v, block_table=table, seqlens_k=lengths, cu_seqlens_q=cu, max_seqlen_q=each
    )


def _latent(q: Tensor, rope: Tensor, cache: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    return ops.mla_decode(
        q, rope, cache, block_table=table, seqlens_k=lengths, cu_seqlens_q=_arange(3),
        max_seqlen_q=1, softmax_scale=0.05,
    )  # fmt: skip


def _write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor):
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    ops.write_kv_cache(k, v, k_cache, v_cache, slots)
    ops.copy_blocks(k_cache, v_cache, slots[:2].view(1, 2) // 16 + _arange(2, torch.int64))
    return k_cache, v_cache


def _fp8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (q, q_scale), (k, k_scale), (v, v_scale) = map(ops.quantize_heads, (q, k, v))
    return ops.attention_fp8(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)


CASES = {
    "causal": Case(lambda q, k, v: ops.attention(q, k, v, causal=True), _qkv),
    "lse": Case(lambda q, k, v: ops.attention(q, k, v, window=90, return_lse=True), _qkv),
    "few queries": Case(ops.attention, lambda rows: _qkv(1, 16 * rows)),
    "narrow heads": Case(ops.attention, lambda rows: _qkv(rows, head_dim=64)),
    "wide heads": Case(ops.attention, lambda rows: _qkv(rows, head_dim=256)),
    "portable": Case(lambda q, k, v: ops.attention(q, k, v, backend="triton"), _qkv),
    "dropout": Case(
        lambda q, k, v: ops.attention(q, k, v, dropout_p=0.25, seed=7, softcap=9.0), _qkv
    ),
    "bias and sinks": Case(
        lambda q, k, v, bias, sinks: ops.attention(q, k, v, bias=bias, sinks=sinks),
        lambda rows: (*_qkv(rows), _draw(1, 8, rows, rows), _draw(8, dtype=torch.float32)),
    ),
    "packed": Case(_varlen, _packed),
    "8 bits": Case(_fp8, _qkv),
    "paged decode": Case(_paged, lambda rows: (_draw(2, 8, 128), *_cached(rows))),
    "paged prefill": Case(_paged, lambda rows: (_draw(66, 8, 128), *_cached(rows))),
    "latent": Case(
        _latent,
        lambda rows: (_draw(2, 16, 512), _draw(2, 16, 64), _draw(64, 16, 576), *_cached(rows)[2:]),
    ),
    "cache": Case(
        _write,
        lambda rows: (
            _draw(rows, 2, 128), _draw(rows, 2, 128), *_cached(rows)[:2],
            torch.randperm(1024, device="cuda")[:rows],
        ),
    ),
    "rope": Case(
        ops.apply_rope,
        lambda rows: (_draw(rows, 8, 128), *(_draw(rows, 64, dtype=torch.float32),) * 2),
    ),
    "norm": Case(
        lambda x, w: ops.rms_norm(x, w, 1e-6), lambda rows: (_draw(rows, 512), _draw(512))
    ),
    "add and norm": Case(
        lambda x, y, w: ops.add_rms_norm(x, y, w, 1e-6),
        lambda rows: (_draw(rows, 512), _draw(rows, 512), _draw(512))
    ),
    "activation": Case(ops.silu_mul, lambda rows: (_draw(rows, 1024),)),
    "output gate": Case(
        lambda gate, x: ops.gated_mul(gate, x, function="sigmoid"),
        lambda rows: (_draw(rows, 2048)[:, :1024], _draw(rows, 1024)),
    ),
    "merge": Case(
        ops.merge_states,
        lambda rows: (
            _draw(rows, 8, 64), _draw(8, rows, dtype=torch.float32),
            _draw(rows, 8, 64), _draw(8, rows, dtype=torch.float32),
        ),
    ),
    "linear": Case(ops.linear, lambda rows: (_draw(rows // 40, 4096), _draw(6144, 4096))),
    "sampling": Case(
        lambda x, t, s: ops.sample_tokens(x, temperature=t, seeds=s, counters=s),
        lambda rows: (
            _draw(rows // 40, 5000, dtype=torch.float32), torch.ones(rows // 40, device="cuda"),
            _arange(rows // 40, torch.int64),
        ),
    ),
    "log-probabilities": Case(
        lambda x, ids: ops.token_logprobs(x, ids, 3),
        lambda rows: (
            _draw(rows // 40, 5000, dtype=torch.float32), 300 * _arange(rows // 40, torch.int64)
        ),
    ),
    "experts": Case(
        lambda x, logits, up, down: ops.expert_mlp(x, *ops.choose_experts(logits, 2), up, down),
        lambda rows: (
            _draw(rows, 256), _draw(rows, 8), _draw(8, 256, 256) / 16, _draw(8, 256, 128) / 11
        ),
    ),
}  # fmt: skip


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what earlier calls of the process have left, as in a program that begins."""
    from tilewise.kernels.host.memory import launches

    torch.cuda.synchronize()
    monkeypatch.setattr(launches, "zeros", {})
    monkeypatch.setattr(launches, "tensors", {})
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _as_tuple(x: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)


def _masked() -> Case:
    """A mask is a constant of the graph, so it has one size."""
    mask = masks.prefix_lm(640, 250, tile=128, device="cuda")
    return Case(lambda q, k, v: ops.attention(q, k, v, mask=mask), lambda _: _qkv(640))


ROWS = (640, 640, 640, 400, 640, 400)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mode", "name"),
    [("reduce-overhead", name) for name in (*CASES, "mask")]
    + [("max-autotune", name) for name in ("causal", "linear", "paged decode", "sampling")],
)
def test_a_compiled_call_replays_the_plain_one_at_two_sizes(name, mode, nothing_allocated):
    call, make = _masked() if name == "mask" else CASES[name]
    skips = torch._dynamo.utils.counters["inductor"]
    skips.clear()
    compiled = torch.compile(lambda *x: call(*x), mode=mode, fullgraph=True, dynamic=False)
    torch.manual_seed(0)
    for rows in ROWS:
        given = make(rows)
        torch.compiler.cudagraph_mark_step_begin()
        got = [x.clone() for x in _as_tuple(compiled(*given))]
        for a, b in zip(got, _as_tuple(call(*given)), strict=True):
            torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    assert skips["cudagraph_skips"] == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["causal", "packed", "few queries"])
def test_a_length_that_varies_replays_the_plain_call(name, nothing_allocated):
    call, make = CASES[name]
    compiled = torch.compile(lambda *x: call(*x), mode="reduce-overhead", dynamic=True)
    for rows in (*ROWS, 512, 320):
        given = make(rows)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(*given).clone(), call(*given), rtol=0.02, atol=0.02)


class Block(nn.Module):
    """Attention with a residual; packed where there are lengths."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.qkv, self.options = nn.Linear(512, 3 * 512, bias=False), options
        self.out = nn.Linear(512, 512, bias=False)

    def forward(self, x: Tensor, cu: Tensor | None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 8, 64).unbind(-3)
        if cu is None:
            o = ops.attention(q, k, v, causal=True, **self.options)
        else:
            o = _varlen(q, k, v, cu, **self.options)
        return x + self.out(o.flatten(-2))


class Net(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(**options) for _ in range(2)])

    def forward(self, x: Tensor, cu: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, cu)
        return x


TRAINED = {
    "dense": {},
    "deterministic": {"deterministic": True},
    "softcap": {"softcap": 30.0},
    "portable": {"backend": "triton"},
    "dropout": {"dropout_p": 0.25, "seed": 3},
}

# Packed sequences have kernels of their own, on each backend.
TRAININGS = [(name, False) for name in TRAINED] + [("dense", True), ("portable", True)]


def _nets(options: dict) -> tuple[Net, Net]:
    torch.manual_seed(1)
    net = Net(**options).to("cuda", torch.bfloat16)
    return net, copy.deepcopy(net)


def _step(net: Callable, parameters: list[Tensor], x: Tensor, cu: Tensor | None) -> Tensor:
    loss = net(x, cu).float().square().mean()
    grads = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        torch._foreach_add_(parameters, grads, alpha=-0.01)
    return loss


def _inputs(rows: int, packed: bool) -> tuple[Tensor, Tensor | None]:
    return (_draw(2 * rows, 512), _cu_seqlens(2 * rows)) if packed else (_draw(2, rows, 512), None)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "packed"), TRAININGS)
def test_training_under_reduce_overhead_follows_plain_training(name, packed, nothing_allocated):
    net, plain = _nets(TRAINED[name])
    compiled = torch.compile(net, mode="reduce-overhead", fullgraph=True, dynamic=False)
    for rows in ROWS:
        x, cu = _inputs(rows, packed)
        torch.compiler.cudagraph_mark_step_begin()
        got = _step(compiled, [*net.parameters()], x, cu).clone()
        want = _step(plain, [*plain.parameters()], x, cu)
        torch.testing.assert_close(got, want, rtol=0.01, atol=1e-3)
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "packed"), TRAININGS)
def test_a_captured_training_step_follows_plain_training(name, packed, nothing_allocated):
    net, plain = _nets(TRAINED[name])
    static, cu = _inputs(640, packed)
    parameters = [*net.parameters()]
    before = [p.detach().clone() for p in parameters]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            _step(net, parameters, static, cu)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.no_grad():
        torch._foreach_copy_(parameters, before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = _step(net, parameters, static, cu)
    for _ in range(4):
        x, _ = _inputs(640, packed)
        static.copy_(x)
        graph.replay()
        want = _step(plain, [*plain.parameters()], x, cu)
        torch.testing.assert_close(loss, want, rtol=0.01, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_a_packaged_model_gives_the_plain_result(packed, tmp_path):
    """Compiled ahead of time, loaded, and run for other numbers: the ops are called as they are.

    On a CPU: the loader of torch 2.11 ends the process on a GPU for models of torch's alone, too.
    """
    torch.manual_seed(1)
    net, cu = Net(), torch.tensor([0, 21, 64], dtype=torch.int32) if packed else None
    shape = (64, 512) if packed else (2, 64, 512)
    with torch.no_grad():
        program = torch.export.export(net, (torch.randn(shape), cu))
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "net.pt2")
        )
        loaded = torch._inductor.aoti_load_package(path)
        for _ in range(2):
            x = torch.randn(shape)
            torch.testing.assert_close(loaded(x, cu), net(x, cu), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_what_a_call_keeps_is_outside_of_a_pool_that_is_in_use(nothing_allocated):
    given = {name: CASES[name].make(640) for name in ("causal", "packed", "few queries", "linear")}
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        for name, tensors in given.items():
            CASES[name].call(*tensors)
    torch.cuda.synchronize()
    blocks = [block for segment in pool.snapshot() for block in segment["blocks"]]
    assert blocks
    assert not [block for block in blocks if block["state"] == "active_allocated"]
