"""torch.func over the ops: every order of grad, jvp and vmap, against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, func
from torch.autograd import forward_ad

from tilewise import masks, ops
from tilewise.errors import UnsupportedError
from tilewise.ops import derivatives as gradient
from tilewise.ops.library import LIBRARY, register
from tilewise.testing import make_paged_cache

pytestmark = pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr:UserWarning")

B, SQ, SK, HQ, HK, D, N = 1, 3, 4, 2, 1, 2, 3
ALL = (0, 1, 2, 3, 4)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _inputs(*front: int, seed: int = 0) -> tuple[Tensor, ...]:
    """q, k, v, bias and sinks, each with `front` dims before its own."""
    shapes = ((B, SQ, HQ, D), (B, SK, HK, D), (B, SK, HK, D), (1, HQ, SQ, SK), (HQ,))
    return tuple(_normal(*front, *shape, seed=seed + n) for n, shape in enumerate(shapes))


def ours(q, k, v, bias=None, sinks=None):
    o, lse = ops.attention(q, k, v, bias=bias, sinks=sinks, softcap=3.0, return_lse=True)
    return torch.cat([o.flatten(), lse.flatten()])


def plain(q, k, v, bias=None, sinks=None):
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = 3 * torch.tanh(torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5 / 3)
    s = s if bias is None else s + bias
    every = s
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        every = torch.cat([s, sink], -1)
    lse = torch.logsumexp(every, -1)
    o = torch.einsum("bhij,bjhd->bihd", torch.exp(s - lse.unsqueeze(-1)), v)
    return torch.cat([o.flatten(), lse.flatten()])


WEIGHTS = _normal(B * SQ * HQ * (D + 1), seed=9)


def _loss(f: Callable) -> Callable:
    return lambda *x: (f(*x) * WEIGHTS).sum()


def _along(f: Callable) -> Callable:
    """The derivative of f along a fixed direction, by forward mode."""
    direction = _inputs(seed=20)
    return lambda *x: func.jvp(f, x, direction[: len(x)])[1]


def _dual_of_grad(f: Callable) -> list[Tensor]:
    """Forward over reverse without torch.func."""
    with forward_ad.dual_level():
        leaves = [x.requires_grad_() for x in _inputs()]
        duals = [forward_ad.make_dual(x, t) for x, t in zip(leaves, _inputs(seed=20), strict=True)]
        grads = torch.autograd.grad(_loss(f)(*duals), leaves)
        return [forward_ad.unpack_dual(g).tangent for g in grads]


def _shared_bias(f: Callable) -> Callable:
    """A call of two sequences that share a bias of three dims."""

    def run(q, k, v, bias):
        twice = [torch.cat([x, 2 * x]) for x in (q, k, v)]
        return f(*twice, bias=bias)[: WEIGHTS.numel()]

    return run


TRANSFORMS: dict[str, Callable] = {
    "grad": lambda f: func.grad(_loss(f), ALL)(*_inputs()),
    "vjp": lambda f: func.vjp(f, *_inputs())[1](WEIGHTS),
    "jvp": lambda f: func.jvp(f, _inputs(), _inputs(seed=20)),
    "linearize": lambda f: func.linearize(f, *_inputs())[1](*_inputs(seed=20)),
    "jacrev": lambda f: func.jacrev(f, ALL)(*_inputs()),
    "jacfwd": lambda f: func.jacfwd(f, ALL)(*_inputs()),
    "hessian": lambda f: func.hessian(_loss(f), ALL)(*_inputs()),
    "reverse_over_reverse": lambda f: func.jacrev(func.jacrev(_loss(f), ALL), ALL)(*_inputs()),
    "reverse_over_forward": lambda f: func.jacrev(func.jacfwd(_loss(f), (0, 3)), (0, 1, 2, 3))(
        *_inputs()[:4]
    ),
    "forward_over_forward": lambda f: _along(_along(f))(*_inputs()),
    "dual_numbers_through_grad": _dual_of_grad,
    "vmap": lambda f: torch.vmap(f)(*_inputs(N)),
    "vmap_over_other_dims": lambda f: torch.vmap(f, (4, 1, 2, 4, None))(
        *(x.movedim(0, dim) for x, dim in zip(_inputs(N), (4, 1, 2, 4), strict=False)),
        _inputs()[4],
    ),
    "vmap_twice": lambda f: torch.vmap(
        torch.vmap(f, (0, None, None, None, None)), (None, 0, 0, 0, None)
    )(*_inputs(N)[:4], _inputs()[4]),
    "grad_of_vmap": lambda f: func.grad(lambda *x: torch.vmap(_loss(f))(*x).sum(), ALL)(
        *_inputs(N)
    ),
    "vmap_of_grad": lambda f: torch.vmap(func.grad(_loss(f), ALL))(*_inputs(N)),
    "vmap_of_grad_over_queries_only": lambda f: torch.vmap(
        func.grad(_loss(f), ALL), (0, None, None, None, None)
    )(_inputs(N)[0], *_inputs()[1:]),
    "vmap_of_grad_with_a_bias_for_each": lambda f: torch.vmap(
        func.grad(_loss(f), (0, 1, 2, 3)), (None, 0, None, 0)
    )(_inputs()[0], _inputs(N)[1], _inputs()[2], _inputs(N)[3]),
    "vmap_of_grad_with_a_shared_bias": lambda f: torch.vmap(
        func.grad(_loss(_shared_bias(f)), (0, 1, 2, 3)), (0, 0, None, None)
    )(*_inputs(N)[:2], _inputs()[2], _inputs()[3][0]),
    "vmap_of_grad_with_shared_sinks": lambda f: torch.vmap(
        func.grad(_loss(f), ALL), (0, 0, 0, None, None)
    )(*_inputs(N)[:3], *_inputs()[3:]),
    "vmap_of_hessian_vector_products_with_shared_sinks": lambda f: torch.vmap(
        _along(func.grad(_loss(f), ALL)), (0, 0, 0, None, None)
    )(*_inputs(N)[:3], *_inputs()[3:]),
    "gradient_penalty_of_each_sample": lambda f: func.grad(
        lambda *x: sum(
            g.square().sum()
            for g in torch.vmap(func.grad(_loss(f), ALL), (0, 0, 0, None, None))(*x)
        ),
        ALL,
    )(*_inputs(N)[:3], *_inputs()[3:]),
    "grad_of_vmap_of_jvp": lambda f: func.grad(
        lambda *x: torch.vmap(_loss(_along(f)))(*x).sum(), ALL
    )(*_inputs(N)),
    "vmap_of_hessian_vector_products": lambda f: torch.vmap(
        _along(func.grad(_loss(f), (0, 1, 2, 3)))
    )(*_inputs(N)[:4]),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_attention_agree_with_plain_torch(name):
    transform = TRANSFORMS[name]
    torch.testing.assert_close(transform(ours), transform(plain))


def test_vmap_brings_lengths_slopes_and_masks_along():
    q, k, v = (_normal(N, 2, 70, 2, 8, seed=n) for n in range(3))
    lengths = torch.tensor([[70, 3], [1, 0], [69, 5]], dtype=torch.int32)
    slopes = _normal(N, 2, seed=5).abs()
    mask = masks.dense(torch.rand(2, 1, 70, 70) < 0.5, tile=(64, 64))
    for options in (
        {"seqlens_k": lengths},
        {"alibi_slopes": slopes},
        {"alibi_slopes": slopes[:2]},
        {"mask": mask},
    ):
        batched = {
            name: value
            for name, value in options.items()
            if isinstance(value, Tensor) and len(value) == N
        }
        shared = {name: value for name, value in options.items() if name not in batched}

        def call(q, k, v, *own, names=tuple(batched), shared=shared):
            named = dict(zip(names, own, strict=True))
            return ops.attention(q, k, v, causal=True, **shared, **named)

        got = torch.vmap(call)(q, k, v, *batched.values())
        for n in range(N):
            own = [value[n] for value in batched.values()]
            torch.testing.assert_close(got[n], call(q[n], k[n], v[n], *own))


def test_vmap_of_a_packed_call_is_a_loop_over_it():
    cu = torch.tensor([0, 2, 5], dtype=torch.int32)
    sizes = {"max_seqlen_q": 3, "max_seqlen_k": 3, "cu_seqlens_q": cu, "cu_seqlens_k": cu}

    def loss(q, k, v):
        return ops.attention_varlen(q, k, v, **sizes, causal=True).square().sum()

    tensors = [_normal(N, 5, 2, 8, seed=n) for n in range(3)]
    got = torch.vmap(func.grad(loss, (0, 1, 2)))(*tensors)
    for n in range(N):
        want = func.grad(loss, (0, 1, 2))(*(x[n] for x in tensors))
        torch.testing.assert_close([x[n] for x in got], list(want))


def test_a_seed_under_vmap_is_everybodys_and_randomness_decides_without_one():
    q = _normal(1, 6, 2, 8).expand(N, 1, 6, 2, 8)
    options = {"dropout_p": 0.5}

    def same(x):
        return ops.attention(x, x, x, seed=4, **options)

    alone = same(q[0])
    torch.testing.assert_close(torch.vmap(same)(q), torch.stack([alone] * N))
    got = torch.vmap(func.grad(lambda x: same(x).square().sum()))(q)
    want = func.grad(lambda x: same(x).square().sum())(q[0])
    torch.testing.assert_close(got, torch.stack([want] * N))

    def drawn(x):
        return ops.attention(x, x, x, **options)

    different = torch.vmap(drawn, randomness="different")(q)
    assert not torch.equal(different[0], different[1])
    shared = torch.vmap(drawn, randomness="same")(q)
    assert torch.equal(shared[0], shared[1])
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(drawn)(q)


def test_ops_of_a_cache_say_that_their_batch_is_an_argument():
    k_cache, v_cache, block_table, seqlens_k = make_paged_cache([5, 7], 4, 2, 8)
    latents = torch.zeros(6, 4, 24)
    tables = {"block_table": block_table, "seqlens_k": seqlens_k, "max_seqlen_q": 1}
    tables["cu_seqlens_q"] = torch.tensor([0, 1, 2], dtype=torch.int32)
    slots = torch.arange(2)

    def attend(x):
        return ops.paged_attention(x, k_cache, v_cache, **tables)

    def write(x):
        ops.write_kv_cache(x, x, k_cache, v_cache, slots)
        return x

    def write_latents(x):
        ops.write_latent_cache(x, x[:, :8], latents, slots)
        return x

    calls = {
        "paged_attention": (attend, (N, 2, 4, 8)),
        "write_kv_cache": (write, (N, 2, 2, 8)),
        "write_latent_cache": (write_latents, (N, 2, 16)),
    }
    for name, (call, shape) in calls.items():
        with pytest.raises(UnsupportedError, match=f"{name} must be given all sequences in one"):
            torch.vmap(call)(torch.zeros(shape))


def _merge_parts(seed: int = 0) -> tuple[Tensor, ...]:
    o_a, o_b = _normal(2, 3, 2, 4, seed=seed), _normal(2, 3, 2, 4, seed=seed + 1)
    lse_a, lse_b = _normal(2, 2, 3, seed=seed + 2), _normal(2, 2, 3, seed=seed + 3)
    lse_a[0, 0, 0] = lse_b[1] = -torch.inf
    return o_a, lse_a, o_b, lse_b


def _merged_plainly(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    both = torch.stack([lse_a, lse_b])
    share = torch.softmax(both, 0).transpose(-1, -2).unsqueeze(-1)
    return share[0] * o_a + share[1] * o_b, both.logsumexp(0)


MERGES: dict[str, Callable] = {
    "grad": lambda f, parts, along: func.grad(f, (0, 1, 2, 3))(*parts),
    "jvp": lambda f, parts, along: func.jvp(f, parts, along)[1],
    "forward_over_reverse": lambda f, parts, along: func.jvp(
        func.grad(f, (0, 1, 2, 3)), parts, along
    ),
    "reverse_over_reverse": lambda f, parts, along: func.vjp(func.grad(f, (0, 1, 2, 3)), *parts)[1](
        along
    ),
    "vmap": lambda f, parts, along: torch.vmap(func.grad(f, (0, 1, 2, 3)), (0, 1, 0, None))(
        *(torch.stack([x, 2 * x], dim) for x, dim in zip(parts, (0, 1, 0), strict=False)), parts[3]
    ),
    "vmap_over_packed": lambda f, parts, along: torch.vmap(f)(*parts),
}


@pytest.mark.parametrize("name", MERGES)
def test_merge_states_is_differentiable_twice_and_in_forward_mode(name):
    parts = _merge_parts()
    along = tuple(x.nan_to_num(neginf=1.0) for x in _merge_parts(seed=10))

    def loss(f: Callable) -> Callable:
        def run(*x: Tensor) -> Tensor:
            o, lse = f(*x)
            return o.sin().sum() + lse.cos().sum()

        return run

    transform = MERGES[name]
    got, want = (transform(loss(f), parts, along) for f in (ops.merge_states, _merged_plainly))
    torch.testing.assert_close(got, want)


def test_merging_two_sides_without_keys_has_derivatives_of_zero():
    o_a, lse_a, o_b, lse_b = _merge_parts()
    lse_b[0, 0, 0] = -torch.inf
    o_a[0, 0, 0] = torch.nan  # whatever it holds
    parts = (o_a, lse_a, o_b, lse_b)

    def loss(*x: Tensor) -> Tensor:
        o, lse = ops.merge_states(*x)
        return o.square().sum() + torch.where(lse.isneginf(), 0.0, lse).square().sum()

    along = tuple(x.nan_to_num(0.0, neginf=1.0) for x in parts)
    first, second = func.jvp(func.grad(loss, (0, 1, 2, 3)), parts, along)
    for grads in (first, second):
        assert all(bool(g.isfinite().all()) for g in grads)
        assert float(grads[0][0, 0, 0].abs().sum() + grads[1][0, 0, 0].abs()) == 0.0


def test_rope_carries_tangents_and_refuses_those_of_its_tables():
    x, dot = _normal(2, 5, 2, 8), _normal(2, 5, 2, 8, seed=1)
    angles = _normal(5, 4, seed=2).float()
    tables = (angles.cos(), angles.sin())
    _, got = func.jvp(lambda x: ops.apply_rope(x, *tables), (x,), (dot,))
    torch.testing.assert_close(got, ops.apply_rope(dot, *tables))
    with pytest.raises(ValueError, match="cos and sin must not carry tangents"):
        func.jvp(lambda c: ops.apply_rope(x, c, tables[1]), (tables[0],), (tables[0],))


def _toy(name: str) -> Callable:
    toy = register(f"{name}(Tensor x) -> Tensor", torch.sin, torch.empty_like)
    gradient.register_gradient(
        name,
        lambda ctx, grad: (grad * ctx.saved_tensors[0].cos(),),
        lambda ctx, inputs, output: gradient.save(ctx, *inputs),
    )
    return toy


def test_an_op_without_a_jvp_refuses_dual_numbers_instead_of_losing_tangents():
    assert gradient.FORWARD_MODE, "this torch has renamed what derivatives.py needs"
    toy, x = _toy("toy_without_jvp"), torch.randn(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(toy(x).sum(), x)[0], x.cos())
    torch.testing.assert_close(func.grad(lambda x: toy(x).sum())(x), x.cos())
    with pytest.raises(UnsupportedError, match="toy_without_jvp must not be given dual numbers"):
        func.jvp(toy, (x.detach(),), (x.detach(),))


def test_a_torch_without_those_names_keeps_backward_mode(monkeypatch):
    monkeypatch.setattr(gradient, "FORWARD_MODE", False)
    toy, x = _toy("toy_without_forward_mode"), torch.randn(3, requires_grad=True)
    torch.testing.assert_close(torch.autograd.grad(toy(x).sum(), x)[0], x.cos())
    assert LIBRARY.ns == "tilewise"
