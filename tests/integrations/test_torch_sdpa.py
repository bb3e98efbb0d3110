"""scaled_dot_product_attention() against torch's own, and in its place."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.integrations import torch_sdpa
from tilewise.integrations.torch_sdpa import replace_sdpa, scaled_dot_product_attention
from tilewise.testing import accumulator_scales, assert_within_budget

TORCHS_OWN = functional.scaled_dot_product_attention


@dataclass(frozen=True)
class Case:
    name: str
    query: tuple[int, ...] = (2, 4, 6, 16)
    key: tuple[int, ...] = (2, 4, 9, 16)
    value: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None  # a float mask; its gradient is compared as well
    visible: tuple[int, ...] | None = None  # a bool mask, whose second row sees nothing
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


CAUSAL, GQA, SCALE = {"is_causal": True}, {"enable_gqa": True}, {"scale": 1.0}
CASES = [
    Case("all_keys"),
    Case("two_dims", (6, 16), (9, 16)),
    Case("three_dims", (4, 6, 16), (4, 9, 16), options=CAUSAL),
    Case("five_dims", (2, 3, 4, 6, 16), (2, 3, 4, 9, 16), options=CAUSAL),
    Case("value_of_other_width", value=(2, 4, 9, 24)),
    Case("head_dim_that_no_tile_divides", (1, 2, 6, 13), (1, 2, 9, 13)),
    Case("scale", options={"scale": 0.5}),
    Case("causal_square", (2, 4, 9, 16), options=CAUSAL),
    Case("causal_fewer_queries", options=CAUSAL),
    Case("causal_more_queries", (2, 4, 12, 16), options=CAUSAL),
    Case("causal_one_query", (2, 4, 1, 16), options=CAUSAL),
    Case("gqa", (2, 4, 6, 16), (2, 2, 9, 16), options=GQA),
    Case("gqa_three_dims", (4, 6, 16), (2, 9, 16), options=GQA),
    Case("gqa_heads_of_their_own", (1, 4, 6, 16), (1, 2, 9, 16), (1, 1, 9, 16), options=GQA),
    Case("one_key_head_for_all", key=(2, 1, 9, 16)),
    Case("value_with_one_head", value=(2, 1, 9, 16)),
    Case("one_query_head_for_all", (2, 1, 6, 16)),
    Case("batches_broadcast", (2, 4, 6, 16), (1, 4, 9, 16), (4, 9, 16)),
    Case("float_mask", mask=(2, 4, 6, 9)),
    Case("float_mask_of_a_head", mask=(4, 1, 9)),
    Case("float_mask_of_a_matrix", mask=(6, 9), options=GQA),
    Case("float_mask_five_dims", (2, 3, 4, 6, 16), (2, 3, 4, 9, 16), mask=(3, 1, 6, 9)),
    Case("bool_mask", visible=(2, 4, 6, 9)),
    Case("bool_mask_for_all", visible=(6, 9)),
    Case("bool_mask_of_keys", visible=(2, 1, 1, 9)),
    Case("bool_mask_five_dims", (2, 3, 4, 6, 16), (2, 3, 4, 9, 16), visible=(2, 1, 1, 6, 9)),
    Case("no_keys", key=(2, 4, 0, 16)),
    Case("no_queries", (2, 4, 0, 16)),
    Case("no_batch", (0, 4, 6, 16), (0, 4, 9, 16)),
    Case("no_heads", (2, 0, 6, 16), (2, 0, 9, 16)),
    Case("no_head_dim", (2, 4, 6, 0), (2, 4, 9, 0), (2, 4, 9, 8), mask=(6, 9), options=SCALE),
    Case("no_head_dim_causal", (2, 4, 6, 0), (2, 4, 9, 0), (2, 4, 9, 8), options=CAUSAL | SCALE),
    Case("no_value_dim", value=(2, 4, 9, 0)),
    Case("nothing_at_all", (0, 0, 0, 0), (0, 0, 0, 0), options=SCALE),
    Case("no_head_dim_without_a_scale", (2, 4, 6, 0), (2, 4, 9, 0), (2, 4, 9, 8)),
]


def _draw(case: Case) -> dict[str, Tensor]:
    tensors = {
        "query": torch.randn(case.query),
        "key": torch.randn(case.key),
        "value": torch.randn(case.value or case.key),
    }
    if case.mask is not None:
        tensors["attn_mask"] = torch.randn(case.mask)
    if case.visible is not None:
        visible = torch.rand(case.visible) > 0.4
        if visible.shape[-2] > 1:
            visible[..., 1, :] = False
        tensors["attn_mask"] = visible
    return tensors


def _results(run, tensors: dict[str, Tensor], do: Tensor, **options) -> dict[str, Tensor]:
    leaves = {
        name: t.detach().clone().requires_grad_(t.is_floating_point())
        for name, t in tensors.items()
    }
    o = run(**leaves, **options)
    wanted = {f"d{name}": t for name, t in leaves.items() if t.requires_grad}
    grads = torch.autograd.grad(o, list(wanted.values()), do.to(o.dtype))
    return {"o": o.detach(), **dict(zip(wanted, grads, strict=True))}


def _plain(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor) -> Tensor:
    """The formula in the dtype of its inputs; torch's own widens half precision inside."""
    p = torch.softmax(query @ key.mT * query.shape[-1] ** -0.5 + attn_mask, -1)
    return p.to(value.dtype) @ value


def _assert_equals_torch(tensors: dict[str, Tensor], plain=TORCHS_OWN, **options) -> None:
    doubles = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    with sdpa_kernel(SDPBackend.MATH):
        do = torch.randn_like(TORCHS_OWN(**tensors, **options))
        truth = _results(TORCHS_OWN, doubles, do, **options)
        eager = _results(plain, tensors, do, **options)
    got = _results(scaled_dot_product_attention, tensors, do, **options)
    q, k, v = (tensors[name] for name in ("query", "key", "value"))
    short = {"dquery": "dq", "dkey": "dk", "dvalue": "dv"}
    scale = options.get("scale", max(q.shape[-1], 1) ** -0.5)
    scales = accumulator_scales(q, k, v, do, scale)
    for name, result in got.items():
        scale = scales.get(short.get(name, name), 1.0)
        assert_within_budget(result, truth[name], eager[name], name=name, scale=scale)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_result_and_every_gradient_equal_torch(case):
    _assert_equals_torch(_draw(case), **case.options)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case):
    tensors = {name: t.cuda() for name, t in _draw(case).items()}
    with sdpa_kernel(SDPBackend.MATH):
        do = torch.randn_like(TORCHS_OWN(**tensors, **case.options))
        want = _results(TORCHS_OWN, tensors, do, **case.options)
    got = _results(scaled_dot_product_attention, tensors, do, **case.options)
    for name, result in got.items():
        torch.testing.assert_close(result, want[name], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_takes_masks_of_either_dtype(dtype):
    tensors = {name: t.to(dtype) for name, t in _draw(CASES[0]).items()}
    for mask_dtype in (dtype, torch.float32):
        tensors["attn_mask"] = torch.randn(4, 6, 9, dtype=mask_dtype)
        _assert_equals_torch(tensors, plain=_plain)


def test_arguments_may_be_positional_as_in_torch():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    mask = torch.randn(5, 7)
    want = TORCHS_OWN(q, k, k, mask, 0.0, False, scale=0.3)
    got = scaled_dot_product_attention(q, k, k, mask, 0.0, False, scale=0.3)
    torch.testing.assert_close(got, want)
    with pytest.raises(TypeError, match="positional"):
        scaled_dot_product_attention(q, k, k, mask, 0.0, False, 0.3)


def test_any_strides_and_expanded_masks():
    q = torch.randn(2, 4, 16, 6).mT
    kv = torch.randn(2, 9, 2, 4, 16).permute(2, 0, 3, 1, 4)
    mask = (torch.rand(2, 1, 1, 9) > 0.3).expand(2, 4, 6, 9)
    want = TORCHS_OWN(q, kv[0], kv[1], mask)
    torch.testing.assert_close(scaled_dot_product_attention(q, kv[0], kv[1], mask), want)


def test_gradient_of_an_expanded_mask_is_the_sum_of_its_copies():
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 4, 9, 16)
    mask = torch.randn(4, 1, 9, requires_grad=True)
    do = torch.randn(2, 4, 6, 16)
    grads = [
        torch.autograd.grad(run(q, k, k, mask.expand(2, 4, 6, 9)), mask, do)[0]
        for run in (TORCHS_OWN, scaled_dot_product_attention)
    ]
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("shape", [(4, 6), (2, 4, 6), (3, 2, 4, 6)])
def test_gradient_of_an_expanded_mask_has_a_number_for_each_element(shape):
    q, k = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 6, 8)
    do = torch.randn(3, 2, 4, 8)
    grads = []
    for run in (TORCHS_OWN, scaled_dot_product_attention):
        mask = torch.linspace(-1, 1, 6, requires_grad=True).expand(shape)
        grads.append(torch.autograd.grad(run(q, k, k, mask), mask, do)[0])
    assert grads[1].shape == shape
    torch.testing.assert_close(grads[1], grads[0])


def test_functional_gradient_of_an_expanded_mask_has_a_number_for_each_element():
    q, k = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 6, 8)
    mask = torch.randn(1, 6).expand(4, 6)

    def loss(mask):
        return scaled_dot_product_attention(q, k, k, mask).square().sum()

    leaf = mask.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(mask), leaf.grad)


@pytest.mark.parametrize("shape", [(9,), (1,), ()])
def test_masks_of_one_dim_or_none_broadcast(shape):
    q, k = torch.randn(2, 4, 6, 16), torch.randn(2, 4, 9, 16)
    mask, do = torch.randn(shape, requires_grad=True), torch.randn(2, 4, 6, 16)
    want = TORCHS_OWN(q, k, k, mask.expand(6, 9))
    got = scaled_dot_product_attention(q, k, k, mask)
    torch.testing.assert_close(got, want)
    grads = [torch.autograd.grad(o, mask, do)[0] for o in (got, want)]
    torch.testing.assert_close(*grads)
    visible = torch.rand(9) > 0.4
    want = TORCHS_OWN(q, k, k, visible.expand(6, 9))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, k, visible), want)


QUERIES = {
    "contiguous": lambda: torch.randn(2, 3, 4, 8),
    "tokens_first": lambda: torch.randn(2, 4, 3, 8).transpose(1, 2),
    "of_one_projection": lambda: torch.randn(2, 4, 3, 3, 8)[:, :, 0].transpose(1, 2),
    "tokens_before_batch": lambda: torch.randn(4, 2, 3, 8).permute(1, 2, 0, 3),
    "heads_before_batch": lambda: torch.randn(3, 2, 4, 8).transpose(0, 1),
    "strided_channels": lambda: torch.randn(2, 3, 8, 4).mT,
    "expanded": lambda: torch.randn(1, 3, 4, 8).expand(2, 3, 4, 8),
    "three_dims": lambda: torch.randn(4, 3, 8).transpose(0, 1),
    "two_dims": lambda: torch.randn(8, 4).mT,
    "five_dims": lambda: torch.randn(2, 2, 4, 3, 8).transpose(-2, -3),
}


@pytest.mark.parametrize("v_head_dim", [8, 6])
@pytest.mark.parametrize("name", QUERIES)
def test_the_result_lies_in_memory_as_torchs(name, v_head_dim):
    q = QUERIES[name]()
    k = torch.randn(*q.shape[:-2], 5, 8)
    v = torch.randn(*q.shape[:-2], 5, v_head_dim)
    want, got = TORCHS_OWN(q, k, v), scaled_dot_product_attention(q, k, v)
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("as_float", [False, True])
def test_rows_that_see_nothing_give_zero_and_zero_gradients(as_float):
    visible = torch.ones(6, 9, dtype=torch.bool)
    visible[2] = False
    mask = torch.zeros(6, 9).masked_fill(~visible, -torch.inf) if as_float else visible
    q = torch.randn(1, 2, 6, 16, requires_grad=True)
    k = torch.randn(1, 2, 9, 16, requires_grad=True)
    o = scaled_dot_product_attention(q, k, k, mask)
    assert torch.equal(o[:, :, 2], torch.zeros_like(o[:, :, 2]))
    o.sum().backward()
    assert torch.equal(q.grad[:, :, 2], torch.zeros_like(q.grad[:, :, 2]))
    assert bool(k.grad.isfinite().all())


@pytest.mark.parametrize("corner", [causal_upper_left, causal_lower_right])
def test_causal_bias_objects_choose_their_corner(corner):
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    want = TORCHS_OWN(q, k, k, corner(5, 7))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, k, corner(5, 7)), want)
    with pytest.raises(RuntimeError, match=r"attn_mask must be a CausalBias of lengths \(5, 7\)"):
        scaled_dot_product_attention(q, k, k, corner(5, 6))
    for attend in (TORCHS_OWN, scaled_dot_product_attention):
        with pytest.raises(ValueError):
            attend(q, k, k, corner(5, 7), is_causal=True)


def test_parameters_are_masks():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    mask = torch.nn.Parameter(torch.randn(5, 7))
    want = TORCHS_OWN(q, k, k, mask)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, k, mask), want)


def test_dropout_follows_torchs_generator():
    q, k = torch.randn(2, 4, 32, 16), torch.randn(2, 4, 40, 16)
    seed = torch.manual_seed(3) and torch.randint(0, 2**62, (2,), dtype=torch.int64)
    keep = ops.dropout_keep_mask((2, 4, 32, 40), dropout_p=0.25, seed=seed)
    p = torch.softmax(q @ k.mT / 4, -1) * keep / 0.75
    torch.manual_seed(3)
    first = scaled_dot_product_attention(q, k, k, dropout_p=0.25)
    torch.testing.assert_close(first, p @ k)
    assert not torch.equal(scaled_dot_product_attention(q, k, k, dropout_p=0.25), first)


def test_autocast_lowers_the_dtype_as_in_torch():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = scaled_dot_product_attention(q, k.bfloat16(), k), TORCHS_OWN(q, k, k)
    assert got.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_autocast_leaves_float64_alone_as_torch_does():
    q, k = torch.randn(1, 2, 5, 8).double(), torch.randn(1, 2, 7, 8).double()
    mask = torch.randn(5, 7).double()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = scaled_dot_product_attention(q, k, k, mask), TORCHS_OWN(q, k, k, mask)
        for run in (scaled_dot_product_attention, TORCHS_OWN):
            with pytest.raises(RuntimeError, match="dtype"):
                run(q, k.float(), k.float())
    assert got.dtype == want.dtype == torch.float64
    torch.testing.assert_close(got, want)


def test_autocast_lowers_masks_of_the_other_half_precision():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    mask = torch.randn(5, 7).half()
    with torch.autocast("cpu", torch.bfloat16):
        got, want = scaled_dot_product_attention(q, k, k, mask), TORCHS_OWN(q, k, k, mask)
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


def test_compiles_into_one_graph():
    q, k = torch.randn(1, 2, 12, 8, requires_grad=True), torch.randn(1, 2, 7, 8)

    def run(q, k):
        return scaled_dot_product_attention(q, k, k, is_causal=True).square().sum()

    got, want = torch.compile(run, backend="aot_eager", fullgraph=True)(q, k), run(q, k)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, q), torch.autograd.grad(want, q))


Q, K = torch.zeros(2, 4, 6, 16), torch.zeros(2, 4, 9, 16)
BAD = {
    "mask_and_causal": (
        (Q, K, K),
        {"attn_mask": torch.zeros(6, 9), "is_causal": True},
        "attn_mask must be None when is_causal is set, got both",
    ),
    "one_dim": ((Q[0, 0, 0], K, K), {}, "query must have at least 2 dims, got 1"),
    "integers": ((Q.int(), K, K), {}, "query must be a float tensor, got torch.int32"),
    "key_dtype": ((Q, K.half(), K), {}, "key must have dtype torch.float32, got"),
    "value_device": ((Q, K, K.to("meta")), {}, "value must be on cpu, got meta"),
    "head_dim": ((Q, K[..., :8], K), {}, "key must have the head dim of query, 16"),
    "lengths": ((Q, K, K[:, :, :5]), {}, "value must have as many keys as key, 9"),
    "heads": ((Q, K[:, :2], K[:, :2]), {}, "same number of heads, or enable_gqa"),
    "gqa_heads": (
        (Q, K[:, :3], K[:, :3]),
        {"enable_gqa": True},
        "key must have heads that divide 4, got 3",
    ),
    "batch": (
        (Q, K.repeat(2, 1, 1, 1)[:3], K),
        {},
        "must have batch dims that broadcast, got",
    ),
    "mask_dtype": (
        (Q, K, K),
        {"attn_mask": torch.zeros(6, 9, dtype=torch.int64)},
        "attn_mask must have dtype bool, float32 or that of query, got torch.int64",
    ),
    "mask_shape": (
        (Q, K, K),
        {"attn_mask": torch.zeros(6, 8)},
        r"attn_mask must broadcast to \(2, 4, 6, 9\), got \(6, 8\)",
    ),
    "mask_one_dim": ((Q, K, K), {"attn_mask": torch.zeros(8)}, "must broadcast to"),
    "mask_dims": ((Q[0, 0], K[0, 0], K[0, 0]), {"attn_mask": torch.zeros(1, 6, 9)}, "broadcast to"),
    "mask_device": (
        (Q, K, K),
        {"attn_mask": torch.zeros(6, 9, device="meta")},
        "attn_mask must be on cpu, got meta",
    ),
    "dropout": ((Q, K, K), {"dropout_p": 1.5}, r"dropout_p must lie in \[0, 1\]"),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals_are_of_torchs_kind(name):
    tensors, options, message = BAD[name]
    with pytest.raises(RuntimeError, match=message):
        scaled_dot_product_attention(*tensors, **options)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    nested = torch.nested.nested_tensor([torch.zeros(2, 4, 8)], layout=torch.jagged)
    with pytest.raises(UnsupportedError, match="query must not be a nested tensor"):
        scaled_dot_product_attention(nested, K, K)


@pytest.fixture
def calls(monkeypatch):
    """Count the calls that reach tilewise's attention."""
    seen = []
    original = torch_sdpa.attention

    def counted(*args, **kwargs):
        seen.append(kwargs)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch_sdpa, "attention", counted)
    return seen


class TestReplaceSdpa:
    def test_takes_the_name_and_gives_it_back(self, calls):
        q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
        want = functional.scaled_dot_product_attention(q, k, k)
        assert not calls
        with replace_sdpa():
            got = functional.scaled_dot_product_attention(q, k, k)
        assert len(calls) == 1
        torch.testing.assert_close(got, want)
        assert functional.scaled_dot_product_attention is TORCHS_OWN
        assert torch.backends.mha.get_fastpath_enabled()

    def test_nests_and_restores_after_an_exception(self):
        def fail_inside():
            with replace_sdpa():
                with replace_sdpa():
                    pass
                assert functional.scaled_dot_product_attention is scaled_dot_product_attention
                raise RuntimeError("inside")

        with pytest.raises(RuntimeError, match="inside"):
            fail_inside()
        assert functional.scaled_dot_product_attention is TORCHS_OWN

    def test_the_last_thread_out_restores(self):
        entered, leave = threading.Event(), threading.Event()

        def stay():
            with replace_sdpa():
                entered.set()
                leave.wait(10)

        thread = threading.Thread(target=stay)
        thread.start()
        assert entered.wait(10)
        with replace_sdpa():
            pass
        assert functional.scaled_dot_product_attention is scaled_dot_product_attention
        leave.set()
        thread.join()
        assert functional.scaled_dot_product_attention is TORCHS_OWN

    def test_compiled_functions_follow(self, calls):
        q = torch.randn(1, 2, 5, 8)
        torch._dynamo.reset()
        run = torch.compile(
            lambda q: functional.scaled_dot_product_attention(q, q, q), backend="eager"
        )
        want = run(q)
        with replace_sdpa():
            assert not torch.equal(run(q), torch.zeros_like(want))
            assert len(calls) == 1  # traced through
        torch.testing.assert_close(run(q), want)
        assert len(calls) == 1

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
    def test_scripts_call_it(self, calls):
        def attend(q, k):
            return functional.scaled_dot_product_attention(q, k, k, None, 0.0, True, scale=0.5)

        q, k = torch.randn(1, 2, 5, 8, requires_grad=True), torch.randn(1, 2, 7, 8)
        mha = torch.nn.MultiheadAttention(16, 2)
        x = torch.randn(5, 3, 16)
        wanted = attend(q, k), mha(x, x, x, need_weights=False)[0]
        with replace_sdpa():
            scripts = torch.jit.script(attend), torch.jit.script(mha)
        got = scripts[0](q, k)
        assert len(calls) == 1
        torch.testing.assert_close(got, wanted[0])
        (grad,) = torch.autograd.grad(got.sum(), q)
        torch.testing.assert_close(grad, torch.autograd.grad(wanted[0].sum(), q)[0])
        torch.testing.assert_close(scripts[1](x, x, x, need_weights=False)[0], wanted[1])
        assert len(calls) == 2

    @pytest.mark.parametrize("training", [False, True])
    def test_multihead_attention_runs_on_it(self, calls, training):
        mha = torch.nn.MultiheadAttention(16, 2, batch_first=True).train(training)
        x = torch.randn(3, 5, 16)
        padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 4 + [True]])
        with torch.set_grad_enabled(training):
            want, _ = mha(x, x, x, key_padding_mask=padding, need_weights=False)
            with replace_sdpa():
                got, _ = mha(x, x, x, key_padding_mask=padding, need_weights=False)
        assert len(calls) == 1
        torch.testing.assert_close(got, want)

    def test_transformer_layers_in_evaluation_run_on_it(self, calls):
        layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        x = torch.randn(3, 5, 16)
        mask = torch.nn.Transformer.generate_square_subsequent_mask(5)
        with torch.inference_mode():
            want = layer(x, src_mask=mask, is_causal=True)
            with replace_sdpa():
                got = layer(x, src_mask=mask, is_causal=True)
        assert len(calls) == 1
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("shape", [(2, 3, 1, 2, 0, 1), (2, 1, 3, 2, 4, 0), (0, 3, 1, 2, 4, 1)])
def test_a_mask_of_several_batch_dims_may_have_no_elements(shape):
    batch, seqlen_q = shape[:4], 4 if shape[-2] == 4 else 0
    q = torch.randn(2 if shape[0] else 0, *batch[1:], seqlen_q, 8)
    k = torch.randn(*q.shape[:-2], 0 if shape[-1] == 0 else 5, 8)
    want = TORCHS_OWN(q, k, k, torch.zeros(shape))
    torch.testing.assert_close(scaled_dot_product_attention(q, k, k, torch.zeros(shape)), want)


def test_keys_without_elements_may_lie_anyhow():
    q = torch.randn(2, 2, 3, 8)
    k = torch.randn(2, 2, 0, 16)[..., ::2]
    assert k.contiguous().stride(-1) == 2  # why contiguous() is not enough
    assert torch.equal(scaled_dot_product_attention(q, k, k), torch.zeros(2, 2, 3, 8))
