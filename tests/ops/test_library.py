"""The registered boundary: opcheck, fullgraph compilation, export, autocast."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import torch.utils.flop_counter
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewise import masks, ops
from tilewise.integrations.flash_attn import flash_attn_func
from tilewise.ops import derivatives as gradient
from tilewise.ops import library
from tilewise.ops.attention.op import AttentionOptions
from tilewise.testing import make_paged_cache, make_qkv

# Inductor and export of third parties warn about their own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


OPS = [f"attention_{name}" for name in ("fwd", "fwd_max", "bwd", "tangent", "second", "curve")]


def _options(**given) -> tuple:
    """The options of the registered ops in order: causal, nothing else, unless given."""
    plain = dict.fromkeys(AttentionOptions._fields)
    plain |= {"max_seqlen_q": 9, "max_seqlen_k": 9, "window_left": -1, "window_right": 0}
    plain |= {"softmax_scale": 0.25, "softcap": 0.0, "dropout_p": 0.0, "deterministic": False}
    return tuple(AttentionOptions(**plain | given))


def _calls(*, packed: bool) -> dict[str, tuple]:
    """Calls of the ops of attention with every optional argument, on leaves."""

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, requires_grad=True)

    rows, per_row = ((9,), (4, 9)) if packed else ((2, 9), (2, 4, 9))
    q, k, v, do = leaf(*rows, 4, 16), leaf(*rows, 2, 16), leaf(*rows, 2, 16), leaf(*rows, 4, 16)
    bias, sinks, dlse = leaf(1, 4, 9, 9), leaf(4), leaf(*per_row)
    mask = masks.dense(torch.rand(9, 9) < 0.8, tile=(64, 64)).tensors()
    names = [name for name in AttentionOptions._fields if name.startswith("mask")]
    given = dict(zip(names, mask, strict=True)) | {"softcap": 2.0, "dropout_p": 0.25}
    given |= {"bias": bias, "sinks": sinks, "alibi_slopes": torch.rand(2, 4)}
    given["philox"] = torch.tensor([3, 1])
    if packed:
        given["cu_seqlens_q"] = given["cu_seqlens_k"] = torch.tensor([0, 4, 9], dtype=torch.int32)
    else:
        given["seqlens_k"] = torch.tensor([9, 5], dtype=torch.int32)
    options = _options(**given)
    results = torch.ops.tilewise.attention_fwd(q, k, v, *options)
    call = (q, k, v, *(x.detach().requires_grad_() for x in results))
    along = (*(leaf(*x.shape) for x in (q, k)), None, leaf(1, 4, 9, 9), leaf(4))
    constants = [[x if x is None else x.detach() for x in xs] for xs in (call, along)]
    fixed, fixed_along = constants
    fixed_options = [x.detach() if isinstance(x, torch.Tensor) else x for x in options]
    do_, dlse_ = do.detach(), dlse.detach()
    return {
        "attention_fwd": (q, k, v, *options),
        "attention_fwd_max": (q, k, v, *options),
        "attention_bwd": (do, dlse, *call, True, *options),
        "attention_tangent": (*call, *along, *options),
        # No gradient is registered for these: a third derivative is refused.
        "attention_second": (do_, None, *fixed, do_, dlse_, *fixed_along, True, *fixed_options),
        "attention_curve": (*fixed, dlse_, dlse_, *fixed_along, *fixed_along, *fixed_options),
    }


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", OPS)
def test_ops_of_attention_with_every_argument_are_opcheck_clean(name, packed):
    op = getattr(torch.ops.tilewise, name).default
    torch.library.opcheck(op, _calls(packed=packed)[name])


def test_attention_without_options_is_opcheck_clean():
    q, k, v = make_qkv(2, 9, 9, 4, 2, 16, requires_grad=True)
    torch.library.opcheck(torch.ops.tilewise.attention_fwd.default, (q, k, v, *_options()))


def test_paged_ops_are_opcheck_clean():
    k_cache, v_cache, table, lengths = make_paged_cache([5, 9], 4, 2, 16)
    cu = torch.tensor([0, 1, 3], dtype=torch.int32)
    q = torch.randn(3, 4, 16)
    arguments = (
        q,
        k_cache,
        v_cache,
        table,
        lengths,
        cu,
        *[None] * 5,
        [],
        [],
        2,
        -1,
        0.25,
        0.0,
        False,
        None,
    )
    torch.library.opcheck(torch.ops.tilewise.paged_attention.default, arguments)
    lengths = torch.tensor([4], dtype=torch.int32)  # both share the first block
    level = [table[:1, :1], lengths, cu[[0, 2]], torch.arange(3, dtype=torch.int32)]
    table[1, 0] = table[0, 0]
    shared = [torch.full((2,), 4, dtype=torch.int32), *level]
    tree_mask = torch.ones(3, 2).tril().bool()
    torch.library.opcheck(
        torch.ops.tilewise.paged_attention.default,
        (*arguments[:10], tree_mask, shared, [3], *arguments[13:]),
        test_utils=("test_schema", "test_faketensor"),
    )
    k_cache, v_cache = torch.zeros(5, 4, 2, 16), torch.zeros(5, 4, 2, 16)
    rows = torch.randn(3, 2, 16)
    torch.library.opcheck(
        torch.ops.tilewise.write_kv_cache.default,
        (rows, rows, k_cache, v_cache, None, None, torch.tensor([3, -1, 8]), None),
    )
    torch.library.opcheck(
        torch.ops.tilewise.copy_blocks.default,
        (k_cache, v_cache, None, None, torch.tensor([[0, 2]]), None),
    )


def test_rope_and_merge_are_opcheck_clean():
    x = torch.randn(6, 2, 16, requires_grad=True)
    table = torch.randn(6, 8)
    torch.library.opcheck(torch.ops.tilewise.rope.default, (x, table, table, False, None))
    o_a, o_b = (torch.randn(6, 2, 16, requires_grad=True) for _ in range(2))
    lse_a, lse_b = (torch.randn(2, 6, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.tilewise.merge_states.default, (o_a, lse_a, o_b, lse_b, None))


def test_fullgraph_compilation_gives_the_eager_bits_and_gradients():
    def block(q, k, v, cos, sin):
        q, k = ops.apply_rope(q, cos, sin), ops.apply_rope(k, cos, sin)
        return ops.attention(q, k, v, causal=True).square().sum()

    angles = torch.randn(12, 8)
    tables = (angles.cos(), angles.sin())
    results = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        q, k, v = make_qkv(2, 12, 12, 4, 2, 16, requires_grad=True)
        loss = function(q, k, v, *tables)
        loss.backward()
        results.append((loss.detach(), q.grad, k.grad, v.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_one_graph_serves_growing_sequences():
    compiled = torch.compile(
        lambda q, k, v: ops.attention(q, k, v, causal=True),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for length in (5, 9, 17):
        q, k, v = make_qkv(1, length, length, 2, 2, 16)
        torch.testing.assert_close(compiled(q, k, v), ops.attention(q, k, v, causal=True))
    assert counters["stats"]["unique_graphs"] == 1


def test_export_keeps_the_op_as_one_node():
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return ops.attention(q, k, v, causal=True)

    q, k, v = make_qkv(1, 8, 8, 2, 2, 16)
    program = torch.export.export(Block(), (q, k, v))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("tilewise.attention_fwd.default") == 1
    torch.testing.assert_close(program.module()(q, k, v), ops.attention(q, k, v, causal=True))


def test_autocast_computes_in_the_low_precision_dtype():
    q, k, v = make_qkv(1, 8, 8, 2, 2, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = ops.attention(q, k, v)
    assert o.dtype == torch.bfloat16
    o.sum().backward()
    assert q.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone():
    q, k, v = make_qkv(1, 8, 8, 2, 2, 16, dtype=torch.float64, requires_grad=True)
    cu = torch.tensor([0, 8], dtype=torch.int32)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 8, "max_seqlen_k": 8}
    want = ops.attention(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ops.attention(q, k, v), want)
        assert torch.equal(ops.attention_varlen(q[0], k[0], v[0], **lengths), want[0])
        assert torch.equal(flash_attn_func(q, k, v), want)
        with pytest.raises(TypeError, match="k must have dtype float64, got bfloat16"):
            ops.attention(q, k.float(), v.float())


class TestPastTheDispatcher:
    """A call skips the dispatcher, but only where nobody would notice."""

    @staticmethod
    def unwatched(*args) -> bool:
        types = [*["Optional[Tensor]"] * 2, "float", "int", "bool", "Optional[str]"]
        rest = (None, 1.0, 3, True, None)[len(args) - 1 :]
        args = (*args, *rest)
        would_pass = gradient._would_pass(args, [gradient._UNCHANGED[t] for t in types])
        return gradient.unwatched() and would_pass and not gradient.records(*args)

    def test_where_nobody_watches(self):
        x, leaf = torch.zeros(2), torch.zeros(2, requires_grad=True)
        assert self.unwatched(x, x)
        with torch.no_grad():
            assert self.unwatched(x, leaf)

    def test_not_where_a_gradient_or_a_tangent_is_wanted(self):
        x = torch.zeros(2)
        assert not self.unwatched(x, torch.zeros(2, requires_grad=True))
        with torch.autograd.forward_ad.dual_level():
            assert not self.unwatched(x)

    def test_not_under_a_transform_a_mode_or_a_profiler(self):
        seen = []
        torch.func.vmap(lambda x: seen.append(self.unwatched(x)) or x)(torch.zeros(2, 2))
        x = torch.zeros(2)
        for watch in (
            FakeTensorMode(allow_non_fake_inputs=True),
            torch.utils.flop_counter.FlopCounterMode(display=False),
            torch.overrides.BaseTorchFunctionMode(),
            torch.profiler.profile(),
        ):
            with watch:
                seen.append(self.unwatched(x))
        assert seen == [False] * 5

    def test_not_where_there_is_no_data(self):
        assert not self.unwatched(torch.zeros(2, device="meta"))

    def test_not_on_subclasses_of_tensors(self):
        class Mine(torch.Tensor):
            pass

        assert not self.unwatched(torch.zeros(2), torch.zeros(2).as_subclass(Mine))

    def test_not_where_a_backward_formula_is_mapped_over(self):
        """autograd.grad(is_grads_batched=True) hands tensors on that have no storage."""

        class Own(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, do):
                return ops.attention(do, do, do)

        x = torch.randn(1, 6, 2, 16, requires_grad=True)
        dos = torch.randn(3, *x.shape)
        (batched,) = torch.autograd.grad(Own.apply(x), x, dos, is_grads_batched=True)
        for do, dx in zip(dos, batched, strict=True):
            assert torch.equal(dx, ops.attention(do, do, do))

    def test_not_where_the_dispatcher_would_convert(self):
        x = torch.zeros(2)
        assert self.unwatched(x, None, 2.0, 3, False, "triton")
        assert not self.unwatched(x, None, 2)
        assert not self.unwatched(x, torch.zeros(2, dtype=torch.complex64).conj().imag)
        assert not self.unwatched(x, None, 2.0, True)
        assert not self.unwatched(x, None, 2.0, np.int64(3))


class _OnAnotherGpu:
    """Stands in for a tensor of the second GPU."""

    is_cuda = True
    device = torch.device("cuda", 1)


def test_kernels_run_with_the_gpu_of_their_tensors_current(monkeypatch):
    current = [0]

    @contextlib.contextmanager
    def made_current(device):
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "device", made_current)
    kernel = library.where_its_tensors_are(lambda first, second: (current[-1], second))
    assert kernel(_OnAnotherGpu(), 5) == (1, 5)
    assert kernel(torch.ones(1), 5) == (0, 5)
    assert current == [0]


def test_every_op_says_by_its_first_argument_where_it_runs():
    for name in library._kernels:
        schema = getattr(torch.ops.tilewise, name).default._schema
        assert str(schema.arguments[0].type) == "Tensor", name


def _results_on(device: str) -> dict[str, torch.Tensor]:
    """Run an op of each kind on tensors of `device`; the same numbers everywhere."""
    torch.manual_seed(3)
    k_cache, v_cache, table, lengths = make_paged_cache([5, 19], 4, 2, 64)
    # What is written below lies in the first slots of the first sequence.
    slots = table[0, 0].long() * 4 + torch.arange(3)
    rows = torch.randn(3, 2, 64)
    q = torch.randn(3, 4, 64)
    angles = torch.randn(3, 32)
    lse_a, lse_b = torch.randn(2, 4, 3)
    latent, rope = torch.randn(3, 4, 512), torch.randn(3, 4, 64)
    latent_cache = torch.randn(8, 16, 576)
    blocks = torch.arange(8, dtype=torch.int32).view(2, 4)
    cu_seqlens = torch.tensor([0, 1, 3], dtype=torch.int32)
    leaves = [torch.randn(1, 150, 2, 64) for _ in range(3)]
    mask = masks.dense(torch.rand(150, 150) < 0.5, tile=128)
    (
        k_cache, v_cache, table, lengths, slots, rows, q, angles, lse_a, lse_b, latent, rope,
        latent_cache, blocks, cu_seqlens,
    ) = (
        x.to(device) for x in (
            k_cache, v_cache, table, lengths, slots, rows, q, angles, lse_a, lse_b, latent, rope,
            latent_cache, blocks, cu_seqlens,
        )
    )  # fmt: skip
    leaves = [x.to(device).requires_grad_() for x in leaves]
    ops.write_kv_cache(rows, rows, k_cache, v_cache, slots)
    packing = {"cu_seqlens_q": cu_seqlens, "max_seqlen_q": 2}
    o, lse = ops.paged_attention(
        q, k_cache, v_cache, block_table=table, seqlens_k=lengths, return_lse=True, **packing
    )
    o_rotated = ops.apply_rope(o, angles.cos(), angles.sin())
    merged, merged_lse = ops.merge_states(o, lse_a, o_rotated, lse_b)
    decoded = ops.mla_decode(
        latent, rope, latent_cache, block_table=blocks, seqlens_k=lengths, softmax_scale=0.05,
        **packing,
    )  # fmt: skip
    dense = ops.attention(*leaves, mask=mask.to(device), window=(70, 5))
    dense.sum().backward()
    found = {"o": o, "lse": lse, "rotated": o_rotated, "merged": merged, "merged_lse": merged_lse}
    found |= {"decoded": decoded, "dense": dense.detach()}
    return found | {f"d{name}": x.grad for name, x in zip("qkv", leaves, strict=True)}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ops_take_tensors_of_another_gpu_than_the_current_one():
    found, want = _results_on("cuda:1"), _results_on("cpu")
    assert torch.cuda.current_device() == 0
    for name, result in found.items():
        assert result.device == torch.device("cuda", 1), name
        torch.testing.assert_close(result.cpu(), want[name], rtol=1e-3, atol=1e-3, msg=name)


def test_a_compiled_call_writes_to_the_callers_output():
    q, cache = torch.randn(2, 4, 16), torch.randn(6, 4, 2, 16)
    options = {
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
        "seqlens_k": torch.tensor([5, 8], dtype=torch.int32),
        "cu_seqlens_q": torch.arange(3, dtype=torch.int32), "max_seqlen_q": 1,
    }  # fmt: skip
    out = torch.empty_like(q)

    def call(q, out):
        return ops.paged_attention(q, cache, cache, out=out, **options) + 0

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    want = ops.paged_attention(q, cache, cache, **options)
    assert torch.equal(compiled(q, out), want)
    assert torch.equal(out, want)
