"""attention() inside what else torch offers: traced, faked, checkpointed, hooked, sharded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, func, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tilewise import masks, ops
from tilewise.testing import make_qkv

# Tracers and wrappers of torch warn about their own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch._dynamo.reset()


def _everything(seqlen: int = 9) -> dict:
    """Every optional argument of a call of two sequences and four query heads."""
    visible = torch.rand(seqlen, seqlen) < 0.7
    return {
        "window": (5, 2),
        "softcap": 3.0,
        "bias": torch.randn(1, 4, seqlen, seqlen, requires_grad=True),
        "alibi_slopes": torch.rand(2, 4),
        "sinks": torch.randn(4, requires_grad=True),
        "mask": masks.dense(visible, tile=(64, 64)),
        "seqlens_k": torch.tensor([seqlen, 4], dtype=torch.int32),
        "dropout_p": 0.25,
        "seed": (7, 1),
    }


def _gradients(function: Callable, options: dict, seqlen: int = 9) -> list[Tensor]:
    """Run on fresh leaves; return o and every gradient."""
    leaves = list(make_qkv(2, seqlen, seqlen, 4, 2, 16, requires_grad=True))
    o = function(*leaves, **options)
    leaves += [options[name] for name in ("bias", "sinks") if name in options]
    return [o.detach(), *torch.autograd.grad(o.square().sum(), leaves)]


def _assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_one_graph_takes_every_argument():
    options = _everything()
    compiled = torch.compile(ops.attention, fullgraph=True, backend="aot_eager")
    _assert_same(_gradients(compiled, options), _gradients(ops.attention, options))


def test_dropout_without_a_seed_follows_the_generator_through_a_graph():
    q, k, v = make_qkv(1, 9, 9, 2, 2, 16)

    def call(q: Tensor) -> Tensor:
        return ops.attention(q, k, v, dropout_p=0.5)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    results = []
    for function in (call, compiled, compiled):
        torch.manual_seed(3)
        results.append(function(q))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[1], results[2])
    assert not torch.equal(compiled(q), results[1])


@pytest.mark.slow
def test_inductor_gives_the_eager_gradients():
    options = _everything()

    def block(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        return ops.attention(q.sin(), k * 2, v, **options).cos()

    compiled = torch.compile(block, fullgraph=True)
    _assert_same(_gradients(compiled, options), _gradients(block, options))


def _penalty(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The squared norm of the gradient, itself to be differentiated."""
    grads = func.grad(lambda *x: ops.attention(*x, causal=True).sin().sum(), (0, 1, 2))(q, k, v)
    return sum(g.square().sum() for g in grads)


def test_dynamic_lengths_share_one_graph_with_the_second_order():
    q, k, v = make_qkv(1, 33, 33, 2, 1, 8)
    function = func.grad(_penalty, (0, 1, 2))
    compiled = torch.compile(
        lambda *x: function(*x), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    counters = torch._dynamo.utils.counters
    counters.clear()
    for length in (5, 9, 33):
        arguments = [x[:, :length].contiguous() for x in (q, k, v)]
        _assert_same(list(compiled(*arguments)), list(function(*arguments)))
    assert counters["stats"]["unique_graphs"] == 1


def test_a_traced_graph_holds_the_second_order_ops_as_nodes():
    targets: list[str] = []

    def capture(graph: torch.fx.GraphModule, _inputs: list) -> Callable:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    q, k, v = make_qkv(1, 6, 6, 2, 2, 8)
    function = func.grad(_penalty, (0, 1, 2))
    compiled = torch.compile(
        lambda *x: function(*x), fullgraph=True, backend=aot_autograd(fw_compiler=capture)
    )
    _assert_same(list(compiled(q, k, v)), list(function(q, k, v)))
    for name in ("fwd", "bwd", "tangent", "second"):
        assert f"tilewise.attention_{name}.default" in targets


def test_vmap_and_per_sample_gradients_compile():
    q, k, v = make_qkv(3, 6, 6, 2, 2, 8)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q[None], k[None], v[None], causal=True).square().sum()

    per_sample = torch.vmap(func.grad(loss, (0, 1, 2)))
    compiled = torch.compile(lambda *x: per_sample(*x), fullgraph=True, backend="aot_eager")
    _assert_same(list(compiled(q, k, v)), list(per_sample(q, k, v)))


def test_export_with_a_free_length_keeps_mask_and_dropout():
    class Block(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, seed: Tensor) -> Tensor:
            return ops.attention(q, k, v, causal=True, dropout_p=0.5, seed=seed)

    q, k, v = make_qkv(1, 12, 12, 2, 2, 16)
    seed = torch.tensor([3, 0])
    length = torch.export.Dim("length", min=2, max=64)
    shapes = ({1: length}, {1: length}, {1: length}, None)
    program = torch.export.export(Block(), (q, k, v, seed), dynamic_shapes=shapes)
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("tilewise.attention_fwd.default") == 1
    q, k, v = make_qkv(1, 31, 31, 2, 2, 16)
    torch.testing.assert_close(program.module()(q, k, v, seed), Block()(q, k, v, seed))


def _shapes(function: Callable[[], tuple[Tensor, ...]]) -> list[tuple]:
    return [(tuple(x.shape), x.stride(), x.dtype) for x in function()]


def _all_derivatives(device: str) -> tuple[Tensor, ...]:
    """o, lse, first and second gradients of a packed call with a bias and sinks."""
    cu = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    q, k, v, bias, sinks = (
        torch.randn(shape, device=device, requires_grad=True)
        for shape in ((5, 4, 8), (5, 2, 8), (5, 2, 16), (2, 1, 3, 3), (4,))
    )
    o, lse = ops.attention_varlen(
        *(q, k, v),
        **{"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 3, "max_seqlen_k": 3},
        bias=bias,
        sinks=sinks,
        dropout_p=0.5,
        seed=1,
        return_lse=True,
    )
    leaves = (q, k, v, bias, sinks)
    first = torch.autograd.grad(o.sum() + lse.sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    return o, lse, *first, *second


def test_fake_and_meta_tensors_have_the_real_shapes_and_strides():
    real = _shapes(lambda: _all_derivatives("cpu"))
    assert _shapes(lambda: _all_derivatives("meta")) == real
    with FakeTensorMode():
        assert _shapes(lambda: _all_derivatives("cpu")) == real


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputed_forward_drops_the_same_probabilities(use_reentrant):
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, causal=True, dropout_p=0.5)

    def checkpointed(*x: Tensor) -> Tensor:
        return checkpoint(call, *x, use_reentrant=use_reentrant)

    results = []
    for function in (call, checkpointed):
        leaves = make_qkv(1, 40, 40, 2, 2, 16, requires_grad=True)
        torch.manual_seed(5)
        o = function(*leaves)
        torch.manual_seed(6)  # whatever is drawn in between
        o.square().sum().backward()
        results.append([o.detach(), *(x.grad for x in leaves)])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_autocast_differentiates_twice_without_losing_accuracy():
    """Under autocast the products of our own second-order tiles must stay float32."""
    leaves = make_qkv(1, 40, 40, 2, 2, 16, requires_grad=True)

    def penalty() -> Tensor:
        o = ops.attention(*leaves, causal=True)
        grads = torch.autograd.grad(o.float().square().sum(), leaves, create_graph=True)
        return sum(g.square().sum() for g in grads)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(penalty(), leaves)
    assert all(g.dtype == torch.float32 for g in inside)
    rounded = [x.detach().bfloat16() for x in leaves]
    leaves = [x.float().requires_grad_() for x in rounded]
    for got, want in zip(inside, torch.autograd.grad(penalty(), leaves), strict=True):
        assert float((got - want).norm() / want.norm()) < 0.02
    with torch.autocast("cpu", dtype=torch.bfloat16):
        q, k, v = leaves
        o, lse = ops.attention(q, k, v, return_lse=True)
        tangents = func.jvp(lambda q: ops.attention(q, k, v), (q.detach(),), (torch.ones_like(q),))
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert tangents[1].dtype == torch.bfloat16


def test_saved_tensor_hooks_see_every_tensor_and_may_replace_it():
    leaves = make_qkv(1, 12, 12, 2, 2, 8, requires_grad=True)
    packed = []

    def pack(x: Tensor) -> tuple[Tensor]:
        packed.append(x.shape)
        return (x.clone(),)

    def penalty() -> Tensor:
        o = ops.attention(*leaves, causal=True)
        grads = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
        return sum(g.square().sum() for g in grads)

    want = torch.autograd.grad(penalty(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x[0]):
        got = torch.autograd.grad(penalty(), leaves)
    assert packed.count(leaves[0].shape) >= 3  # q, k, v and o, in the call and in its gradient
    _assert_same(list(got), list(want))
    with torch.autograd.graph.save_on_cpu():
        _assert_same(list(torch.autograd.grad(penalty(), leaves)), list(want))


def test_in_place_changes_between_forward_and_backward_are_noticed():
    q, k, v = make_qkv(1, 5, 5, 2, 2, 8, requires_grad=True)
    keys = k * 1.0
    o = ops.attention(q, keys, v)
    keys.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_backward_runs_under_a_graph_of_its_own():
    """Compiled autograd traces the backward pass of an eager call."""
    autograd = torch._dynamo.compiled_autograd
    results = []
    for compiled in (False, True):
        leaves = make_qkv(1, 8, 8, 2, 2, 16, requires_grad=True)
        loss = ops.attention(*leaves, causal=True).square().sum()
        if compiled:
            with autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
                loss.backward()
        else:
            loss.backward()
        results.append([x.grad for x in leaves])
    _assert_same(*results)


class Block(nn.Module):
    """A projection, attention with learnable sinks and dropout, a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.sinks = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).unbind(2)
        o = ops.attention(q, k, v, causal=True, sinks=self.sinks, dropout_p=0.3, seed=5)
        return self.out(o.flatten(2)).clone()


@pytest.fixture
def world_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _block_and_gradients() -> tuple[Block, Tensor, list[Tensor]]:
    block, x = Block(), torch.randn(2, 6, 16)
    return block, x, list(torch.autograd.grad(block(x).square().sum(), list(block.parameters())))


@pytest.mark.usefixtures("world_of_one")
def test_distributed_data_parallel_gives_the_same_gradients():
    block, x, want = _block_and_gradients()
    wrapped = DistributedDataParallel(copy.deepcopy(block))
    wrapped(x).square().sum().backward()
    _assert_same([p.grad for p in wrapped.parameters()], want)


@pytest.mark.usefixtures("world_of_one")
def test_fully_sharded_parameters_give_the_same_gradients():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    block, x, want = _block_and_gradients()
    sharded = copy.deepcopy(block)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    for _ in range(2):  # the second step gathers again what the first has freed
        sharded.zero_grad()
        sharded(x).square().sum().backward()
    _assert_same([p.grad.full_tensor() for p in sharded.parameters()], want)


def test_per_sample_gradients_of_a_module():
    block, x, _ = _block_and_gradients()
    parameters = {name: p.detach() for name, p in block.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return func.functional_call(block, parameters, (x.unsqueeze(0),)).square().sum()

    got = torch.vmap(func.grad(loss), (None, 0))(parameters, x)
    for n in range(len(x)):
        want = func.grad(loss)(parameters, x[n])
        _assert_same([got[name][n] for name in want], list(want.values()))
