"""One row per refusal: the wrong argument, the exception, the words that name it."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.kernels import device


def _qkv(**changes):
    tensors = {n: torch.randn(2, 8, 4, 16) for n in "qkv"}
    tensors.update(changes)
    return tensors


ATTENTION = {
    "q_rank": (_qkv(q=torch.randn(8, 4, 16)), {}, ValueError, r"q must be \(B, S, H, D\)"),
    "int_dtype": (
        _qkv(q=torch.ones(2, 8, 4, 16, dtype=torch.int32)),
        {},
        TypeError,
        "q must be one",
    ),
    "mixed_dtype": (
        _qkv(k=torch.randn(2, 8, 4, 16).half()),
        {},
        TypeError,
        "k must have dtype float32",
    ),
    "batch": (
        _qkv(k=torch.randn(1, 8, 4, 16), v=torch.randn(1, 8, 4, 16)),
        {},
        ValueError,
        "batch of q",
    ),
    "head_dim": (_qkv(k=torch.randn(2, 8, 4, 8)), {}, ValueError, "head dim of q, 16, got 8"),
    "v_length": (_qkv(v=torch.randn(2, 7, 4, 16)), {}, ValueError, "v must have the shape of k"),
    "heads": (
        _qkv(k=torch.randn(2, 8, 3, 16), v=torch.randn(2, 8, 3, 16)),
        {},
        ValueError,
        "multiple",
    ),
    "strides": (_qkv(q=torch.randn(2, 8, 16, 4).transpose(2, 3)), {}, ValueError, "stride 1"),
    "window_zero": (_qkv(), {"window": 0}, ValueError, "window must be at least 1 key, got 0"),
    "window_pair": (_qkv(), {"window": (-2, 0)}, ValueError, "window left must be None, -1"),
    "window_triple": (_qkv(), {"window": (1, 2, 3)}, ValueError, r"integer or \(left, right\)"),
    "window_float": (_qkv(), {"window": 1.5}, TypeError, r"window must be None, an integer .*1\.5"),
    "window_bool": (_qkv(), {"window": True}, TypeError, "window must be None, an integer .*True"),
    "window_float_pair": (_qkv(), {"window": (1.5, 0)}, TypeError, r"window left must be .*1\.5"),
    "scale_text": (_qkv(), {"softmax_scale": "1"}, TypeError, "softmax_scale must be a number"),
    "scale_tensor": (
        _qkv(),
        {"softmax_scale": torch.ones((), requires_grad=True)},
        TypeError,
        "softmax_scale must be a number without a gradient, got a tensor",
    ),
    "scale_nan": (_qkv(), {"softmax_scale": math.nan}, ValueError, "must be finite, got nan"),
    "softcap_infinite": (_qkv(), {"softcap": math.inf}, ValueError, "softcap must be finite"),
    "softcap_none": (_qkv(), {"softcap": None}, TypeError, "softcap must be a number, got None"),
    "dropout_text": (_qkv(), {"dropout_p": "x"}, TypeError, "dropout_p must be a number, got str"),
    "seed_float": (_qkv(), {"dropout_p": 0.1, "seed": 1.5}, TypeError, "seed must be an integer"),
    "seed_three": (
        _qkv(),
        {"dropout_p": 0.1, "seed": (1, 2, 3)},
        ValueError,
        "seed must be an int",
    ),
    "no_q": (_qkv(q=None), {}, TypeError, "q must be of type Tensor, got NoneType"),
    "array": (_qkv(v=[1.0]), {}, TypeError, "v must be of type Tensor, got list"),
    "mask_tensor": (
        _qkv(),
        {"mask": torch.ones(8, 8, dtype=torch.bool)},
        TypeError,
        "mask must be a BlockMask, as masks.dense.visible. makes it, got Tensor",
    ),
    "lengths_list": (_qkv(), {"seqlens_k": [3, 4]}, TypeError, "seqlens_k must be of type Tensor"),
    "softcap": (_qkv(), {"softcap": -1.0}, ValueError, "softcap must be at least 0, got -1.0"),
    "backend": (_qkv(), {"backend": "cuda"}, ValueError, "backend must be one of reference, cpu"),
    "sinks_shape": (_qkv(), {"sinks": torch.zeros(3)}, ValueError, r"sinks must have shape \(4,\)"),
    "alibi_grad": (
        _qkv(),
        {"alibi_slopes": torch.zeros(4, requires_grad=True)},
        ValueError,
        "must not require a gradient",
    ),
    "bias_shape": (_qkv(), {"bias": torch.zeros(3, 8)}, ValueError, "bias must broadcast to"),
    "bias_dtype": (_qkv(), {"bias": torch.zeros(8, 8).half()}, TypeError, "bias must have dtype"),
    "lengths_dtype": (
        _qkv(),
        {"seqlens_k": torch.tensor([3.0, 4.0])},
        TypeError,
        "seqlens_k must have",
    ),
    "lengths_shape": (_qkv(), {"seqlens_k": torch.zeros(3).int()}, ValueError, r"shape \(2,\)"),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_refuses(name):
    tensors, options, error, words = ATTENTION[name]
    with pytest.raises(error, match=words):
        ops.attention(**tensors, **options)


def test_a_named_backend_is_never_replaced(monkeypatch):
    """A CPU tensor does not run on triton (outside its interpreter), and the message says so."""
    # Not the environment: kernels that are imported here would be compiled in all later tests.
    monkeypatch.setattr(device, "interpreting", lambda: False)
    tensors = _qkv()
    with pytest.raises(
        UnsupportedError, match="cannot run attention: a CPU runs Triton kernels only"
    ):
        ops.attention(**tensors, softmax_scale=0.111, backend="triton")


def test_a_meta_tensor_names_its_device():
    tensors = {n: t.to("meta") for n, t in _qkv().items()}
    assert ops.attention(**tensors).device.type == "meta"


def _paged(**changes):
    arguments = {
        "q": torch.randn(3, 4, 16),
        "k_cache": torch.randn(5, 8, 2, 16),
        "v_cache": torch.randn(5, 8, 2, 16),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "seqlens_k": torch.tensor([5, 9], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 3], dtype=torch.int32),
        "max_seqlen_q": 2,
    }
    arguments.update(changes)
    return arguments


PAGED = {
    "q_rank": ({"q": torch.randn(1, 3, 4, 16)}, ValueError, r"q must be \(T, Hq, D\)"),
    "cache_rank": ({"k_cache": torch.randn(5, 8, 32)}, ValueError, "k_cache must be"),
    "head_dim": ({"q": torch.randn(3, 4, 8)}, ValueError, "head dim of q, 8, got 16"),
    "heads": ({"q": torch.randn(3, 5, 16)}, ValueError, "multiple of key heads"),
    "v_blocks": ({"v_cache": torch.randn(4, 8, 2, 16)}, ValueError, "blocks and heads of k_cache"),
    "v_dtype": ({"v_cache": torch.randn(5, 8, 2, 16).half()}, TypeError, "v_cache must have dtype"),
    "table_dtype": ({"block_table": torch.zeros(2, 3)}, TypeError, "block_table must have"),
    "lengths": (
        {"seqlens_k": torch.zeros(3).int()},
        ValueError,
        r"seqlens_k must have shape \(2,\)",
    ),
    "cu": ({"cu_seqlens_q": torch.zeros(2).int()}, ValueError, r"shape \(3,\)"),
    "window": ({"window": 0}, ValueError, "window must be at least 1 key, got 0"),
    "window_pair": ({"window": (3, 0)}, TypeError, r"window must be None or an integer, got \(3"),
    "max_seqlen_float": ({"max_seqlen_q": 1.0}, TypeError, "max_seqlen_q must be an integer"),
    "scale_infinite": ({"softmax_scale": math.inf}, ValueError, "softmax_scale must be finite"),
    "max_seqlen": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0"),
}


@pytest.mark.parametrize("name", PAGED)
def test_paged_attention_refuses(name):
    changes, error, words = PAGED[name]
    arguments = _paged(**changes)
    tensors = [arguments.pop(n) for n in ("q", "k_cache", "v_cache")]
    with pytest.raises(error, match=words):
        ops.paged_attention(*tensors, **arguments)


def test_write_kv_cache_refuses_wrong_rows_and_slots():
    k = torch.randn(3, 2, 16)
    k_cache, v_cache = torch.zeros(5, 8, 2, 16), torch.zeros(5, 8, 2, 16)
    with pytest.raises(ValueError, match=r"k must have shape \(4, 2, 16\)"):
        ops.write_kv_cache(k, k, k_cache, v_cache, torch.arange(4))
    with pytest.raises(TypeError, match="slot_mapping must have dtype int32 or int64"):
        ops.write_kv_cache(k, k, k_cache, v_cache, torch.arange(3).short())


def test_copy_blocks_refuses_a_flat_list():
    cache = torch.zeros(5, 8, 2, 16)
    with pytest.raises(ValueError, match=r"block_pairs must be \(n, 2\)"):
        ops.copy_blocks(cache, cache.clone(), torch.tensor([1, 2]))


def test_rope_refuses_tables_that_do_not_fit():
    x, table = torch.randn(6, 2, 16), torch.randn(6, 8)
    with pytest.raises(ValueError, match="one row a position"):
        ops.apply_rope(x, table[:5], table[:5])
    with pytest.raises(ValueError, match="at most D / 2 = 8 columns, got 9"):
        ops.apply_rope(x, torch.randn(6, 9), torch.randn(6, 9))
    with pytest.raises(TypeError, match="cos must be float32"):
        ops.apply_rope(x, table.half(), table)


def test_merge_states_refuses_lse_of_another_layout():
    o = torch.randn(2, 5, 3, 16)
    with pytest.raises(ValueError, match=r"lse_a must have shape \(2, 3, 5\)"):
        ops.merge_states(o, torch.zeros(2, 5, 3), o, torch.zeros(2, 3, 5))


class TestTheReference:
    """The slowest backend refuses what a CPU's kernels refuse; torch's slices would take it."""

    @pytest.mark.parametrize("edges", [(1, 5), (0, 6), (0, 5, 2)])
    def test_edges(self, edges):
        q, cu = torch.randn(5, 2, 8), torch.tensor(edges, dtype=torch.int32)
        lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 6, "max_seqlen_k": 6}
        with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0 to at most 5"):
            ops.attention_varlen(q, q, q, **lengths, backend="reference")

    @pytest.mark.parametrize("length", [-1, 9])
    def test_lengths(self, length):
        q, lengths = torch.randn(1, 5, 2, 8), torch.tensor([length], dtype=torch.int32)
        with pytest.raises(ValueError, match=r"seqlens_k must lie in \[0, 5\]"):
            ops.attention(q, q, q, seqlens_k=lengths, backend="reference")

    @pytest.mark.parametrize(
        ("table", "length", "words"),
        [
            ((0, -1), 7, "block_table must hold blocks in .*, got -1 as block 1 of sequence 0"),
            ((0, 3), 7, "block_table must hold blocks in .*, got 3 as block 1 of sequence 0"),
            ((0, 1), 9, r"seqlens_k must lie in \[0, 8\]"),
        ],
    )
    def test_blocks(self, table, length, words):
        step = {
            "block_table": torch.tensor([table], dtype=torch.int32),
            "seqlens_k": torch.tensor([length], dtype=torch.int32),
            "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32),
            "max_seqlen_q": 2,
            "backend": "reference",
        }
        q, cache = torch.randn(2, 2, 8), torch.randn(3, 4, 2, 8)
        with pytest.raises(ValueError, match=words):
            ops.paged_attention(q, cache, cache, **step)
        with pytest.raises(ValueError, match=words):
            ops.mla_decode(q, q[..., :2], cache[..., 0, :].repeat(1, 1, 2)[..., :10],
                           **step, softmax_scale=1.0)  # fmt: skip
