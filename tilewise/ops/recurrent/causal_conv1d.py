"""causal_conv1d(): a short convolution of each channel with the tokens before it."""

from __future__ import annotations

from typing import Any, Never

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import refuse_gradient, register_gradient, save
from tilewise.ops.library import refuse_vmap, register, register_vmap
from tilewise.ops.recurrent.arguments import check_edges, check_lengths, check_places, check_state
from tilewise.ops.step import launched

WIDEST = 8  # taps; those of models are 2 to 7
ACTIVATIONS = (None, "silu")


@names
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_state: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve each channel with itself: y_t = f(bias + sum over j of weight_j x_{t - W + 1 + j}).

    Computed in float32 (float64 for float64), oldest token first, and rounded once. Differentiable
    once, in backward mode, in every tensor. A token's bits depend on its sequence alone.

    Args:
        x: (B, S, C), or packed (T, C), any float dtype, last dim contiguous.
        weight: (C, W), the dtype of x, W at most 8; the last column multiplies the token itself.
        bias: (C,), the dtype of x; zeros when None.
        activation: f, "silu" or None.
        cu_seqlens: int32 (N + 1,), the first row of each packed sequence, and the end of the last;
            None for dense rows.
        initial_state: (N, W - 1, C), the dtype of x, the tokens before the first, oldest first;
            zeros when None.
        return_state: True to also return the last W - 1 tokens, as `initial_state`.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        y, a new contiguous tensor of x's shape and dtype; with `return_state` also the state.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Dao and Gu, 2024, "Transformers are SSMs", section 7.

    Example:
        >>> y = causal_conv1d(torch.randn(1, 100, 64), torch.randn(64, 4), activation="silu")
    """
    if unknown:
        raise unknown_keyword(causal_conv1d, unknown)
    _check(x, weight, bias, activation, "(B, S, C)" if cu_seqlens is None else "(T, C)")
    sequences = check_lengths(cu_seqlens, x)
    shape = (sequences, weight.shape[1] - 1, x.shape[-1])
    check_state("initial_state", initial_state, shape, x.dtype, x)
    dispatch.check_backend_name(backend)
    y: Tensor
    y, state = _run(x, weight, bias, initial_state, cu_seqlens, activation == "silu", backend)
    return (y, state) if return_state else y


@names
def causal_conv1d_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    *,
    slots: Tensor,
    starts: Tensor,
    activation: str | None = None,
    cu_seqlens: Tensor | None = None,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor:
    """Convolve the next tokens of sequences whose last tokens are in slots.

    The results have the bits that `causal_conv1d` gives for the whole sequence, however it is cut.
    Nothing is differentiable.

    Args:
        x: (T, C), packed rows.
        weight, bias, activation: as in `causal_conv1d`.
        states: (slots, R, C), contiguous, the dtype of x, R at least W - 1: the last R tokens of
            each sequence, of which the one at position p lies in row p % R; updated in place. The
            next call may give a start that is up to R - W + 1 tokens smaller: what is in between is
            taken back.
        slots, starts, cu_seqlens: as in `gated_delta_step`.
        backend: as in `causal_conv1d`.

    Returns:
        y (T, C), a new contiguous tensor of x's dtype; 0 for a sequence without a slot.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: as `causal_conv1d`.

    Example:
        >>> y = causal_conv1d_step(x, weight, None, states, slots=slots, starts=starts)
    """
    if unknown:
        raise unknown_keyword(causal_conv1d_step, unknown)
    _check(x, weight, bias, activation, "(T, C)")
    edges = check_edges(cu_seqlens, x)
    checks.check_dims("states", states, "(slots, R, C)")
    num_kept = max(states.shape[1], weight.shape[1] - 1)
    check_state("states", states, (states.shape[0], num_kept, x.shape[-1]), x.dtype, x)
    if not states.is_contiguous():
        raise ValueError(f"states must be contiguous, got strides {states.stride()}")
    places = check_places(slots, starts, edges.shape[0] - 1, states.shape[0], x.device)
    dispatch.check_backend_name(backend)
    y: Tensor = _step(x, weight, bias, states, *places, edges, activation == "silu", backend)
    return y


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, layout: str
) -> None:
    checks.check_float("x", x)
    checks.check_dims("x", x, layout)
    checks.check_last_dim_contiguous("x", x)
    checks.check_same_dtype("weight", weight, x.dtype)
    checks.check_device("weight", weight, x.device)
    if weight.dim() != 2 or weight.shape[0] != x.shape[-1] or not 1 <= weight.shape[1] <= WIDEST:
        raise ValueError(
            f"weight must be (C, W) = ({x.shape[-1]}, 1 to {WIDEST}), got {tuple(weight.shape)}"
        )
    if bias is not None:
        check_state("bias", bias, (x.shape[-1],), x.dtype, x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")


def _spec(x: Tensor) -> ElementSpec:
    return ElementSpec(x.device.type, x.dtype)


def _module(x: Tensor, backend: str | None) -> Any:
    name = dispatch.choose("causal_conv1d", _spec(x), backend)
    return dispatch.kernel_module("causal_conv1d", name)


def _edges(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    if cu_seqlens is not None:
        return cu_seqlens
    batch, seqlen = x.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen


class _Taps:
    """The rows that each tap of a convolution multiplies, as indices into the tensor of `_rows_of`.

    That tensor has the W - 1 rows of each sequence's state first, then the T tokens.

    Args:
        edges: (N + 1,), see `causal_conv1d`.
        num_rows: the number of tokens T, also of those that no sequence has.
        width: the number of taps, W.

    Attributes:
        kept: the number of rows of states.
        is_used: bool (T,), True for tokens that some sequence has.
    """

    def __init__(self, edges: Tensor, num_rows: int, width: int) -> None:
        self.edges, self.width = edges.long(), width
        self.kept = (edges.shape[0] - 1) * (width - 1)  # rows of states, which come first
        self.rows = torch.arange(num_rows, device=edges.device)
        after = torch.searchsorted(self.edges, self.rows, right=True)
        self.is_used = (after > 0) & (after < edges.shape[0])
        self.sequences = (after - 1).clamp(0, max(edges.shape[0] - 2, 0))

    def of(self, back: int) -> Tensor:
        """Return for each token the index of the row `back` tokens before it, (T,)."""
        position = self.rows - self.edges[self.sequences] - back
        kept = self.sequences * (self.width - 1) + self.width - 1 + position
        return torch.where(position >= 0, self.kept + self.rows - back, kept)

    def last(self) -> Tensor:
        """Return the indices of the last W - 1 rows of each sequence, oldest first, (N, W - 1)."""
        starts, ends = self.edges[:-1, None], self.edges[1:, None]
        back = torch.arange(self.width - 1, device=starts.device) - (self.width - 1)
        position = ends - starts + back
        first = torch.arange(len(starts), device=starts.device)[:, None] * (self.width - 1)
        return torch.where(
            position >= 0, self.kept + ends + back, first + self.width - 1 + position
        )


def _rows_of(x: Tensor, width: int, state: Tensor | None, edges: Tensor) -> Tensor:
    """Return the rows of all states and then of all tokens as one tensor, which `_Taps` indexes:
    (N (width - 1) + T, C), where T is B S for a batch.

    Args:
        x: (T, C) or (B, S, C), the tokens.
        width: the taps of the convolution; a state has width - 1 rows.
        state: (N, width - 1, C), None for zeros.
        edges: (N + 1,), the edges of sequences, read only for N.
    """
    if state is None:
        state = x.new_zeros(edges.shape[0] - 1, width - 1, x.shape[-1])
    return torch.cat([state.flatten(0, 1), x.reshape(-1, x.shape[-1])])


def _last(x: Tensor, width: int, state: Tensor | None, edges: Tensor) -> Tensor:
    """Return the last width - 1 tokens of each sequence, (N, width - 1, C), oldest first.

    For a sequence with fewer tokens the last rows of its state come before them.

    Args:
        x: (T, C), packed tokens.
        width, state, edges: as in `_rows_of`.
    """
    return _rows_of(x, width, state, edges)[_Taps(edges, len(x), width).last()]


def _kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    has_silu: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    edges, rows = _edges(x, cu_seqlens), x.reshape(-1, x.shape[-1])
    module = _module(x, backend)
    y = launched(module.launch, rows, weight, bias, initial_state, edges, has_silu=has_silu)
    last = getattr(module, "last", _last)  # only a GPU has a kernel for it
    return y.view(x.shape), launched(last, rows, weight.shape[1], initial_state, edges)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return x.new_empty(x.shape), x.new_empty(batch, weight.shape[1] - 1, x.shape[-1])


def _has_kernels(x: Tensor, backend: str | None) -> bool:
    """Return whether Triton's kernels compute the gradient; otherwise torch's operations do.

    They do on a GPU unless the caller named another backend or Triton refuses x's dtype.
    """
    if backend not in (None, "triton") or x.device.type != "cuda":
        return False
    return dispatch.refusal("causal_conv1d", "triton", _spec(x)) is None


def _backward_kernel(
    dy: Tensor,
    dstate: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    has_silu: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, bias and initial_state, also of those that are None.

    Args:
        dy: the gradient of y.
        dstate: the gradient of the final states, or None.
        has_silu: True if y went through silu.
    """
    if _has_kernels(x, backend):
        dx, *grads = launched(
            dispatch.kernel_module("causal_conv1d", "triton").gradient,
            dy.reshape(-1, x.shape[-1]),
            dstate,
            x.reshape(-1, x.shape[-1]),
            weight,
            bias,
            initial_state,
            _edges(x, cu_seqlens),
            has_silu=has_silu,
        )
        return dx.view(x.shape), *grads
    wide = torch.promote_types(x.dtype, torch.float32)
    edges, width = _edges(x, cu_seqlens), weight.shape[1]
    rows = _rows_of(x, width, initial_state, edges).to(wide)
    taps = _Taps(edges, len(rows) - (edges.shape[0] - 1) * (width - 1), width)
    dy, columns = dy.reshape(-1, x.shape[-1]).to(wide), weight.to(wide).unbind(1)
    places = [taps.of(width - 1 - j) for j in range(width)]
    dy = torch.where(taps.is_used[:, None], dy, 0.0)
    if has_silu:
        y = torch.zeros_like(dy) if bias is None else bias.to(wide).expand_as(dy)
        for column, place in zip(columns, places, strict=True):
            y = y + column * rows[place]
        share = torch.sigmoid(y)
        dy = dy * share * (1 + y * (1 - share))
    drows = torch.zeros_like(rows)
    dweight = []
    for column, place in zip(columns, places, strict=True):
        dweight.append((dy * rows[place]).sum(0))
        # Each row is one tap of at most one token of a sequence; those of no sequence add 0.
        drows[place[taps.is_used]] += (column * dy)[taps.is_used]
    if dstate is not None:
        drows[taps.last()] += dstate.to(wide)
    kept = drows[: taps.kept].unflatten(0, (edges.shape[0] - 1, width - 1))
    dx = drows[taps.kept :].view(x.shape)
    dx, dkept = (rows.to(x.dtype, copy=True) for rows in (dx, kept))  # results share no memory
    return dx, torch.stack(dweight, 1).to(x.dtype), dy.sum(0).to(x.dtype), dkept


def _backward_fake(
    dy: Tensor,
    dstate: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    state = _fake(x, weight, bias, initial_state, cu_seqlens)[1]
    return (
        x.new_empty(x.shape),
        x.new_empty(weight.shape),
        x.new_empty(weight.shape[0]),
        state,
    )


def _step_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    cu_seqlens: Tensor,
    has_silu: bool,
    backend: str | None,
) -> Tensor:
    module = _module(x, backend)
    y: Tensor = launched(
        module.step, x, weight, bias, states, slots, starts, cu_seqlens, has_silu=has_silu
    )
    return y


_CALL = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens, "
    "bool has_silu"
)
_run = register(
    f"causal_conv1d({_CALL}, str? backend) -> (Tensor, Tensor)",
    _kernel,
    _fake,
)
_backward = register(
    f"causal_conv1d_bwd(Tensor dy, Tensor? dstate, {_CALL}, str? backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
_step = register(
    "causal_conv1d_step(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) states, Tensor slots, "
    "Tensor starts, Tensor cu_seqlens, bool has_silu, str? backend) -> Tensor",
    _step_kernel,
    lambda x, *_: x.new_empty(x.shape),
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.has_silu, ctx.backend = inputs
    save(ctx, *tensors)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, dy: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy is None and dstate is None:
        return (None,) * 7
    x, weight, bias, initial_state, cu_seqlens = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(x)
    dx, dweight, dbias, dinitial = _backward(
        dy, dstate, x, weight, bias, initial_state, cu_seqlens, ctx.has_silu, ctx.backend
    )
    return (
        dx,
        dweight,
        None if bias is None else dbias,
        None if initial_state is None else dinitial,
        *(None,) * 3,
    )


def _loop(op: Any) -> Any:
    """Return a rule for torch.vmap that calls `op` once for each index of the mapped dim."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        moved = [
            x if dim is None else x.movedim(dim, 0).contiguous()
            for x, dim in zip(args, in_dims, strict=True)
        ]
        results = [
            op(*(x if dim is None else x[n] for x, dim in zip(moved, in_dims, strict=True)))
            for n in range(info.batch_size)
        ]
        return tuple(torch.stack(each) for each in zip(*results, strict=True)), (0,) * len(
            results[0]
        )

    return rule


register_gradient("causal_conv1d", _gradient, _save)
refuse_gradient("causal_conv1d_bwd")
refuse_gradient("causal_conv1d_step")
register_vmap("causal_conv1d", _loop(_run))
register_vmap("causal_conv1d_bwd", _loop(_backward))
refuse_vmap("causal_conv1d_step")
