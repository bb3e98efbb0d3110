"""tilewise as a flash attention implementation of torch, below its dispatcher and its autograd.

torch picks this path itself, for CUDA tensors of half precision without a mask: everything that
its own flash kernels would have run, in F.scaled_dot_product_attention wherever it was imported
to, in torch.nn.attention.varlen and in compiled graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.ops import attention, attention_varlen, checks, paged_attention
from tilewise.ops.attention.arguments import AttentionSignature
from tilewise.ops.attention.dropout import philox_of, scaled_as_given
from tilewise.ops.attention.op import attention_bwd

__all__ = ["Registration", "register", "register_flash_attention"]

_Forward = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def register_flash_attention(name: str = "tilewise") -> None:
    """Offer tilewise to torch.nn.attention.activate_flash_attention_impl under `name`.

    Nothing changes until the name is activated; torch.nn.attention.restore_flash_attention_impl
    undoes the activation. torch decides which calls run here: CUDA, float16 or bfloat16, no mask,
    and as torch.nn.attention.sdpa_kernel allows. Other calls are not changed;
    `torch_sdpa.replace_sdpa` replaces all calls.

    Args:
        name: the name to activate.

    Raises:
        UnsupportedError: this torch has no such registry.

    Example:
        >>> register_flash_attention()
        >>> torch.nn.attention.activate_flash_attention_impl("tilewise")
    """
    # Looked up by name, since older versions of torch lack it.
    register: Any = getattr(torch.nn.attention, "register_flash_attention_impl", None)
    if register is None:
        raise UnsupportedError(
            "torch must be at least 2.11, with torch.nn.attention.register_flash_attention_impl, "
            f"got {torch.__version__}"
        )
    register(name, register_fn=_Activation)


class _Activation:
    """The replacement of torch's five flash attention operators by the functions of this module.

    It begins with the object and ends with `remove()` or the object.
    """

    def __init__(self, device_type: str = "CUDA") -> None:
        self.library: torch.library.Library | None = torch.library.Library("aten", "IMPL")
        for name, function in (
            ("_flash_attention_forward", flash_forward),
            ("_flash_attention_forward_no_dropout_inplace", flash_forward_into),
            ("_flash_attention_backward", flash_backward),
            ("_scaled_dot_product_flash_attention", sdpa_forward),
            ("_scaled_dot_product_flash_attention_backward", sdpa_backward),
        ):
            with warnings.catch_warnings():
                # torch warns about the first operator in a process whose kernel is replaced; this
                # replacement is intended.
                warnings.filterwarnings("ignore", "Warning only once for all operators")
                self.library.impl(name, function, device_type)

    def remove(self) -> None:
        """Restore torch's own kernels."""
        self.library = None


class Registration:
    """The replacement of torch's flash attention operators on some types of device, as `register`
    makes it.

    It begins with the object and ends with `remove()`, or with the `with` block of the object.
    """

    def __init__(self, device_types: Sequence[str]) -> None:
        self._activations = [_Activation(device.upper()) for device in device_types]
        self._library: torch.library.Library | None = None
        if "cpu" in device_types:
            self._library = torch.library.Library("aten", "IMPL")
            self._library.impl("scaled_dot_product_attention", _sdpa_on_cpu, "AutogradCPU")

    def remove(self) -> None:
        """Restore torch's own kernels."""
        for activation in self._activations:
            activation.remove()
        self._library = None

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def register(device_types: Sequence[str] = ("cuda",)) -> Registration:
    """Let torch's flash attention operators run tilewise's kernels on these types of device.

    Functions of torch that use these operators run on them, too: F.scaled_dot_product_attention
    where it takes its flash path, torch.nn.attention.varlen, and
    torch.distributed.tensor.experimental.context_parallel. On a CPU, F.scaled_dot_product_attention
    uses other operators; there it calls tilewise when gradients are recorded (outside of
    torch.inference_mode), tensors have four dims and there is no mask.

    Args:
        device_types: the types of device, "cuda", "cpu" or both.

    Raises:
        ValueError: another type is named.

    Example:
        >>> with register(device_types=("cpu",)):
        ...     o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    unknown = [device for device in device_types if device not in ("cuda", "cpu")]
    if unknown or isinstance(device_types, str):
        raise ValueError(f"device_types must be of 'cuda' and 'cpu', got {device_types!r}")
    return Registration(device_types)


def _sdpa_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute aten.scaled_dot_product_attention on a CPU by the flash operators, which run
    tilewise.

    Calls with a mask, with fewer than four dims, or causal with unequal lengths run torch's own
    decomposition.
    """
    aten = torch.ops.aten
    heads = {t.shape[1] for t in (query, key, value)} if query.dim() == 4 else set()
    is_square = not is_causal or query.shape[-2] == key.shape[-2]  # torch aligns at the top left
    if attn_mask is None and is_square and heads and (enable_gqa or len(heads) == 1):
        o: Tensor = aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return o
    plain: Tensor = aten.scaled_dot_product_attention.default.decompose(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    return plain


def flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> _Forward:
    """Compute aten._flash_attention_forward: o, lse, the dropout seed and two unused tensors.

    Tensors are (B, S, H, D) or, with cum_seq_q, (T, H, D); causal and windows are aligned to the
    bottom right. With block_table, key and value are (pages, page size, H, D) of a paged cache, and
    cum_seq_q and seqused_k must be given. Raises UnsupportedError for what the kernels lack.
    """
    if return_debug_mask:
        raise UnsupportedError("return_debug_mask must be False, got True")
    q, k, v = _last_dim_contiguous(query, key, value)
    philox = None
    o: Tensor
    if block_table is not None:
        o, lse = _paged(
            (q, k, v),
            cum_seq_q,
            max_q,
            (is_causal, window_size_left, window_size_right),
            seqused_k,
            block_table=block_table,
            softmax_scale=scale,
            alibi_slopes=alibi_slopes,
            batch_invariant=num_splits == 1,
        )
    else:
        if dropout_p > 0.0:
            philox = philox_of(None, q.device)
        options: dict[str, Any] = {
            "causal": is_causal,
            "window": (window_size_left, window_size_right),
            "softmax_scale": scale,
            "alibi_slopes": alibi_slopes,
            "dropout_p": dropout_p,
            "seed": philox,
            "return_lse": True,
        }
        if cum_seq_q is None:
            o, lse = attention(q, k, v, seqlens_k=seqused_k, **options)
        elif cum_seq_k is None or seqused_k is not None:
            raise UnsupportedError(
                "cum_seq_k must be given, and seqused_k not, unless there is a block_table, "
                f"got cum_seq_k={'None' if cum_seq_k is None else 'a tensor'}"
            )
        else:
            o, lse = attention_varlen(
                q,
                k,
                v,
                cu_seqlens_q=cum_seq_q,
                cu_seqlens_k=cum_seq_k,
                max_seqlen_q=max_q,
                max_seqlen_k=max_k,
                **options,
            )
        # torch's kernel of flash-attn scales by the exact dropout_p
        o = scaled_as_given(o, dropout_p)
    # torch's schema: two uint64 of seed, one that is not read, and no debug mask.
    seed = torch.zeros(2, dtype=torch.int64, device=q.device) if philox is None else philox
    unused = torch.zeros((), dtype=torch.int64, device=q.device)
    return _like(o, query), lse, seed.view(torch.uint64), unused.view(torch.uint64), q.new_empty(0)


def _paged(
    qkv: tuple[Tensor, Tensor, Tensor],
    cum_seq_q: Tensor | None,
    max_q: int,
    visible: tuple[bool, int | None, int | None],
    seqused_k: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    is_causal, left, right = visible
    if cum_seq_q is None or seqused_k is None:
        raise UnsupportedError("cum_seq_q and seqused_k must come with a block_table, got None")
    if not (is_causal or right == 0 or max_q == 1):  # the alignment does not matter for one query
        raise UnsupportedError("is_causal must be set with a block_table, got False")
    o, lse = paged_attention(
        *qkv,
        seqlens_k=seqused_k,
        cu_seqlens_q=cum_seq_q,
        max_seqlen_q=max_q,
        window=None if left is None or left < 0 else left + 1,
        return_lse=True,
        **options,
    )
    return o, lse


def flash_forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute aten._flash_attention_forward_no_dropout_inplace: write o to `out`, return lse."""
    o, lse, *_ = flash_forward(*args, **kwargs)
    out.copy_(o)
    return lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute aten._flash_attention_backward: the gradients of query, key and value, each shaped as
    its tensor.

    The arguments are as in `flash_forward`, with its results `out`, `logsumexp` and the seed
    `rng_state`.
    """
    q, k, v, o, do = _last_dim_contiguous(query, key, value, out, grad_out)
    if dropout_p > 0.0:
        wide = scaled_as_given(torch.ones((), dtype=torch.float64), dropout_p).item()
        o, do = (o / wide, do * wide) if wide != 1.0 else (o, do)
    options: dict[str, Any] = {
        "causal": is_causal,
        "window": (window_size_left, window_size_right),
        "softmax_scale": scale,
        "dropout_p": dropout_p,
        "seed": rng_state.view(torch.int64) if dropout_p > 0.0 else None,
    }
    if cum_seq_q is not None and cum_seq_k is not None:
        options |= {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k}
        options |= {"max_seqlen_q": max_q, "max_seqlen_k": max_k}
    q, k, v, prepared = AttentionSignature(q, k, v, **options).bind()
    dq, dk, dv, _, _ = attention_bwd(do, None, q, k, v, o, logsumexp, False, *prepared)
    return _like(dq, query), _like(dk, key), _like(dv, value)


def sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, None, None, int, int, Tensor, Tensor, Tensor]:
    """Compute aten._scaled_dot_product_flash_attention, whose tensors are (B, H, S, D).

    Returns torch's nine results: o (B, H, Sq, Dv), lse, None twice, both lengths, the seed, and two
    that are not used.
    """
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    o, lse, seed, unused, debug_mask = flash_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        None,
        seqlen_q,
        seqlen_k,
        dropout_p,
        is_causal,
        return_debug_mask,
        scale=scale,
    )
    return o.transpose(1, 2), lse, None, None, seqlen_q, seqlen_k, seed, unused, debug_mask


def sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute aten._scaled_dot_product_flash_attention_backward: the gradients of query, key and
    value, (B, H, S, D)."""
    do, q, k, v, o = (t.transpose(1, 2) for t in (grad_out, query, key, value, out))
    dq, dk, dv = flash_backward(
        do,
        q,
        k,
        v,
        o,
        logsumexp,
        None,
        None,
        max_q,
        max_k,
        dropout_p,
        is_causal,
        philox_seed,
        philox_offset,
        scale=scale,
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _last_dim_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(checks.with_packed_rows(t) for t in tensors)


def _like(result: Tensor, original: Tensor) -> Tensor:
    """Return `result` in the memory layout of `original`, as compiled graphs expect; a copy if
    needed.

    A result of another shape is returned as it is.
    """
    if result.shape != original.shape:  # o with a head dim of its own
        return result
    laid_out = torch.empty_like(original)
    return result if laid_out.stride() == result.stride() else laid_out.copy_(result)
