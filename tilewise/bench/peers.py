"""How each peer computes a case: ours, torch's SDPA by backend, its varlen_attn, and by the book.

A peer is a function from a case to a `Run`. It may raise: whatever a peer cannot do is an answer,
which the row shows. FlexAttention, which must be compiled, is in `flex`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import ops
from tilewise.bench import flex
from tilewise.bench.case import DROPOUT_P, Case, block_mask
from tilewise.errors import UnsupportedError
from tilewise.kernels.plan import Call
from tilewise.kernels.spec import AttentionTensors, Fp8Spec
from tilewise.ops.attention.arguments import AttentionSignature
from tilewise.ops.attention.fp8_op import E4M3
from tilewise.ops.attention.op import make_spec

OURS = "tilewise"  # names of our own rows start with it


Function = Callable[[Tensor, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Run:
    """A peer's way to compute a case, and how its tensors are compared.

    Attributes:
        function: a function that computes o, or o and lse, from q, k, v.
        leaves: the tensors by which it is differentiated: "q", "k", "v" first, then a feature's
            own.
        do, dlse: the weights of o, in the shape of the peer's o, and of lse where there is one.
        checked: a function that cuts the compared sequence (N, H, D) out of o, do or a gradient of
            q, k, v.
        has_own_dropout: True if it drops elements that the others cannot know.
        no_backward: the reason why it has no gradient, None when it has one.
        is_8_bit: True if the peer rounds its inputs to e4m3, so that its results are off by that.
    """

    function: Function
    leaves: dict[str, Tensor]
    do: Tensor
    checked: Callable[[Tensor], Tensor]
    dlse: Tensor | None = None
    has_own_dropout: bool = False
    no_backward: str | None = None
    is_8_bit: bool = False

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """The leaves q, k and v, which every call has."""
        return self.leaves["q"], self.leaves["k"], self.leaves["v"]

    def forward(self) -> Any:
        """Return o of the leaves, or (o, lse) where the peer's function returns both."""
        return self.function(*self.qkv)


def _run(case: Case, function: Function, **more: Any) -> Run:
    leaves = {"q": case.q, "k": case.k, "v": case.v} | case.learned
    return Run(function, leaves, case.do, case.checked, dlse=case.dlse, **more)


def _plain(case: Case, features: tuple[str, ...] = ()) -> None:
    """Raise UnsupportedError if a case has a rule or a feature that a peer cannot compute."""
    problem = case.problem
    known = ("plain", "deterministic", "GQA 8:1", *features)
    if problem.lengths or problem.density or problem.window_left >= 0:
        raise UnsupportedError("this peer must have a dense causal or full call")
    if problem.feature not in known:
        raise UnsupportedError(f"this peer must have no {problem.feature}")


def _tilewise(case: Case, backend: str | None = None) -> Run:
    problem = case.problem
    rule: dict[str, Any] = {"causal": problem.causal, **case.options}
    if backend is not None:
        rule["backend"] = backend
    if problem.lengths:
        longest = max(problem.lengths)
        rule |= {"cu_seqlens_q": case.cu_seqlens, "cu_seqlens_k": case.cu_seqlens}
        rule |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return _run(case, lambda q, k, v: ops.attention_varlen(q, k, v, **rule))
    if problem.window_left >= 0:
        rule["window"] = (problem.window_left, 0)
    if problem.density:
        rule["mask"] = block_mask(problem, case.device)
    return _run(case, lambda q, k, v: ops.attention(q, k, v, **rule))


def _tilewise_mask(case: Case) -> Run:
    """Return our run with the whole rule of the problem in a BlockMask, nothing native."""
    mask = block_mask(case.problem, case.device)
    return _run(case, lambda q, k, v: ops.attention(q, k, v, mask=mask, **case.options))


def _fp8(case: Case, *, per_token: bool = False) -> Run:
    """Return our run in 8 bits, the whole op: 16-bit tensors are quantised in each call.

    Args:
        per_token: True for a scale of each token, False for one of each head.

    Raises:
        UnsupportedError: the case has a rule or a feature beside causality.
    """
    _plain(case)
    is_causal = case.problem.causal

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.no_grad():
            return ops.attention_fp8(q, k, v, causal=is_causal, per_token=per_token)

    return _run(case, function, no_backward=_FP8_FORWARD, is_8_bit=True)


def _fp8_kernel(case: Case, *, per_token: bool = False) -> Run:
    """Return our run in 8 bits, the kernel alone: tensors are quantised and laid out before.

    Raises:
        UnsupportedError: there is no GPU with this kernel, or as of `_fp8`.
    """
    _plain(case)
    if case.device.type != "cuda":
        raise UnsupportedError(f"this peer must have a GPU, got {case.device.type}")
    from tilewise.kernels.gluon.attention import fp8, quantise

    q, k, v = (x.detach() for x in (case.q, case.k, case.v))
    options = AttentionSignature(q, k, v, causal=case.problem.causal).bind().options
    spec = make_spec(q, k, v, options)._replace(dtype=E4M3)
    reason = fp8.why_not(spec)
    if reason is not None:
        raise UnsupportedError(reason)
    nothing = AttentionTensors(None, None, None)
    given = (*quantise.quantize_qkv(q, k, v, per_token=per_token), *nothing)
    plan = fp8.plan_quantized(Call.of(Fp8Spec(spec, q.dtype), given))

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o = plan.run(*given)[0]
        assert o is not None
        return o

    return _run(case, function, no_backward=_FP8_FORWARD, is_8_bit=True)


_FP8_FORWARD = "8 bits are for the forward pass"


def _sdpa(backend: SDPBackend, case: Case) -> Run:
    _plain(case, ("dropout 0.1",))
    problem = case.problem
    dropout_p = DROPOUT_P if "dropout_p" in case.options else 0.0
    rule: dict[str, Any] = {"is_causal": problem.causal, "dropout_p": dropout_p}
    if problem.num_q_heads != problem.num_kv_heads:
        rule["enable_gqa"] = True

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, **rule).transpose(1, 2)

    return _run(case, function, has_own_dropout=dropout_p > 0)


def _sdpa_padded(case: Case) -> Run:
    """Return the run of SDPA over sequences padded at their end, where a causal mask hides the
    padding; only for packed causal batches."""
    problem = case.problem
    if not problem.lengths or not problem.causal:
        raise UnsupportedError("this peer must have a packed causal batch")

    def pad(tensor: Tensor) -> Tensor:
        sequences = tensor.detach().split(list(problem.lengths))
        return torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)

    q, k, v, do = (pad(t) for t in (case.q, case.k, case.v, case.do))
    leaves = {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_()}

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return Run(function, leaves, do, lambda tensor: tensor[-1, : case.checked_length])


def _varlen_attn(case: Case) -> Run:
    from torch.nn.attention.varlen import varlen_attn  # from torch 2.10 on

    lengths, cu_seqlens = case.problem.lengths, case.cu_seqlens
    if not lengths:
        raise UnsupportedError("this peer must have a packed batch")
    rule: dict[str, Any] = {}
    if case.problem.causal:  # the argument was is_causal at first
        has_window = "window_size" in inspect.signature(varlen_attn).parameters
        rule = {"window_size": (-1, 0)} if has_window else {"is_causal": True}
    longest = max(lengths)
    call: Callable[..., Any] = varlen_attn
    packed = (cu_seqlens, cu_seqlens, longest, longest)
    return _run(case, lambda q, k, v: call(q, k, v, *packed, **rule))


def _fa3(case: Case) -> Run:
    """Return the run of FlashAttention-3, where its `flash_attn_interface` is installed."""
    problem, cu_seqlens = case.problem, case.cu_seqlens
    if case.options or problem.density:
        raise UnsupportedError("this peer must have no feature beside causality and a window")
    interface = import_module("flash_attn_interface")
    rule: dict[str, Any] = {"causal": problem.causal}
    if problem.window_left >= 0:
        rule["window_size"] = (problem.window_left, 0)
    if problem.lengths:
        longest = max(problem.lengths)
        packed = (cu_seqlens, cu_seqlens, longest, longest)

        def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return _first_of(interface.flash_attn_varlen_func(q, k, v, *packed, **rule))
    else:

        def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return _first_of(interface.flash_attn_func(q, k, v, **rule))

    reason = None if hasattr(interface, "_flash_attn_backward") else "it was built without one"
    return _run(case, function, no_backward=reason)


def _fa4(case: Case) -> Run:
    """Return the run of FlashAttention-4, where its `flash_attn.cute` is installed."""
    problem, cu_seqlens = case.problem, case.cu_seqlens
    asked = {name: value for name, value in case.options.items() if name != "deterministic"}
    if asked or problem.density:
        raise UnsupportedError("this peer must have no feature beside causality and a window")
    interface = import_module("flash_attn.cute")
    rule: dict[str, Any] = {"causal": problem.causal}
    if "deterministic" in case.options:
        rule["deterministic"] = case.options["deterministic"]
    if problem.window_left >= 0:
        rule["window_size"] = (problem.window_left, 0)
    if problem.lengths:
        longest = max(problem.lengths)
        rule |= {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
        rule |= {"max_seqlen_q": longest, "max_seqlen_k": longest}

        def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return _first_of(interface.flash_attn_varlen_func(q, k, v, **rule))
    else:

        def function(q: Tensor, k: Tensor, v: Tensor) -> Any:
            return _first_of(interface.flash_attn_func(q, k, v, **rule))

    return _run(case, function)


def _first_of(result: Any) -> Any:
    """Return o of a call's result, which in some builds of FlashAttention is (o, lse)."""
    return result[0] if isinstance(result, tuple) else result


def _standard(case: Case) -> Run:
    """Return the run of standard attention, softmax(Q K^T) V in torch, in the dtype of the
    inputs."""
    _plain(case)
    problem = case.problem
    n, scale = problem.seqlen, problem.head_dim**-0.5
    hidden = None
    if problem.causal:
        hidden = torch.ones(n, n, dtype=torch.bool, device=case.device).triu_(1)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        s = (q * scale) @ k.transpose(-1, -2)
        if hidden is not None:
            s.masked_fill_(hidden, -torch.inf)
        o: Tensor = s.softmax(-1) @ v
        return o.transpose(1, 2)

    return _run(case, function)


def _flex(case: Case) -> Run:
    if case.options or case.problem.lengths:
        raise UnsupportedError("this peer must have a dense call and no feature beside its mask")
    has_backward = case.device.type != "cpu"
    function = flex.compiled(case, needs_gradient=has_backward)
    reason = None if has_backward else "FlexAttention has no backward pass on a CPU"
    return _run(case, function, no_backward=reason)


PEERS: dict[str, Callable[[Case], Run]] = {
    "tilewise": _tilewise,
    "tilewise_mask": _tilewise_mask,
    "tilewise_triton": partial(_tilewise, backend="triton"),
    "tilewise_fp8": _fp8,
    "tilewise_fp8_tokens": partial(_fp8, per_token=True),
    "tilewise_fp8_kernel": _fp8_kernel,
    "tilewise_fp8_tokens_kernel": partial(_fp8_kernel, per_token=True),
    "sdpa_flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
    "sdpa_efficient": partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION),
    "sdpa_math": partial(_sdpa, SDPBackend.MATH),
    "sdpa_padded": _sdpa_padded,
    "varlen_attn": _varlen_attn,
    "flex": _flex,
    "fa3": _fa3,
    "fa4": _fa4,
    "standard": _standard,
}
# What has to be installed for a peer that no table asks for by itself, by its module.
OPTIONAL = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}


def is_installed(peer: str) -> bool:
    """Return whether a peer's package can be imported; True for peers that need none."""
    if peer not in OPTIONAL:
        return True
    try:
        import_module(OPTIONAL[peer])
    except ImportError:
        return False
    return True


# Bytes of all the N x N matrices that a pass of these holds, over those of one in bfloat16:
# counted with the float32 copies that SDPA's math makes of half precision.
SQUARES = {"sdpa_math": 8.0, "standard": 4.0}
