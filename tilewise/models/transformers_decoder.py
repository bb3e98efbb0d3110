"""A decoder whose layers are transformers' own modules; their attention runs over the paged cache.

A model of transformers hands every layer's queries, keys and values to an attention function. The
one registered here writes the new keys and values to the cache of a step and attends over it, so
the model needs no cache, no mask and no batch dim of its own: the rows of a step come as one packed
batch of one, with their positions. All else (norms, feed-forwards, routers, scales) is
transformers' code and stays what it is.

What the layers need of a cache is found by one pass over the model on the device "meta" (`survey`):
the heads of each call, its scale and soft cap, and the mask that transformers would have made for
it. A model whose layers keep anything else (a recurrence, an indexer, a mask of their own) is
refused, and `check` compares a short text with the model's own attention before it serves.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import ops
from tilewise.cache.spec import CacheLayer, CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.errors import CheckpointError, UnsupportedError
from tilewise.masks.of_transformers import Pattern
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.layer_config import AttentionConfig, FeedForwardConfig, LayerConfig
from tilewise.models.transformers_experts import (
    may_count_on_host,
    use_our_experts,
    use_their_experts,
)
from tilewise.nn.attention import attention_over
from tilewise.nn.context import AttentionContext
from tilewise.nn.packed import pack_linears

__all__ = ["AttentionCall", "TransformersDecoder", "can_run", "load_through_transformers"]

_PAGED, _SURVEYED = "tilewise_paged", "tilewise_surveyed"
_SURVEY_ROWS = 8
# What a layer passes to an attention function and no result depends on without a cache.
_INERT = frozenset(
    {
        "attention_mask",
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "use_cache",
    }
)
# A module that reads its cache but for adding keys to it computes something by the cache's length.
# What only cross-attention reads is not asked here, where there is no encoder.
_READS_CACHE = re.compile(
    r"(?<![\w.])(?:past_key_values?|cache)\."
    r"(?!(?:update|is_updated|(?:self|cross)_attention_cache)\b|layers\[[\w.]+\]\.(?:keys|values)\b)\w+"
    r"|cache_params\b"
)
# Rows of the steps of `check`: what a layer would have to remember is missed in each single row.
_CHECK_STEPS = (8, *[1] * 8)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function in a forward pass of the model.

    Attributes:
        module: name of the module that calls, for messages.
        num_q_heads, num_kv_heads: Hq and Hk.
        head_dim, v_head_dim: channels of a key and of a value.
        softmax_scale: factor of q . k.
        softcap: c of c tanh(logits / c); 0 has none.
        window: keys that a query sees, its own included; None is all before it.
    """

    module: str
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    softmax_scale: float
    softcap: float
    window: int | None

    @property
    def config(self) -> AttentionConfig:
        """The `AttentionConfig` of a layer that makes this call."""
        return AttentionConfig(
            self.num_q_heads,
            self.num_kv_heads,
            self.head_dim,
            self.softmax_scale,
            v_head_dim=self.v_head_dim,
            window=self.window,
            softcap=self.softcap,
        )


class _Step:
    """The state of a pass that all layers of a model read: set before the pass, cleared after it.

    Attributes:
        calls: the attention calls of a pass, in their order.
        ctx, kv: the context and the cache of the step; None while a dense batch runs.
        next: the number of the next call.
    """

    def __init__(self) -> None:
        self.calls: tuple[AttentionCall, ...] = ()
        self.ctx: AttentionContext | None = None
        self.kv: Sequence[CacheLayer] | None = None
        self.next = 0

    @contextmanager
    def running(
        self, ctx: AttentionContext | None, kv: Sequence[CacheLayer] | None
    ) -> Iterator[None]:
        """Let calls of the attention function belong to this step, from its first call on, in a
        `with` block."""
        self.ctx, self.kv, self.next = ctx, kv, 0
        try:
            yield
        finally:
            self.ctx = self.kv = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Compute the attention of the next call, from heads (B, H, S, D) to o (B, S, Hq, Dv).

        With a cache, the new keys and values are written to it first, B is 1, and keys are read
        from it.
        """
        number, self.next = self.next, self.next + 1
        call = self.calls[number]
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if self.ctx is None or self.kv is None:
            o: Tensor = ops.attention(
                *(ops.checks.with_packed_rows(x) for x in (q, k, v)),
                causal=True,
                window=call.window,
                softmax_scale=call.softmax_scale,
                softcap=call.softcap,
                sinks=sinks,
            )
            return o
        ctx = self.ctx.of_layer(number)
        kv: Any = self.kv[number]
        k_cache, v_cache, *rest = kv
        k_scale, v_scale = rest or (None, None)
        q, k, v = (ops.checks.with_packed_rows(x[0]) for x in (q, k, v))
        ops.write_kv_cache(
            k, v, k_cache, v_cache, ctx.slot_mapping, k_scale=k_scale, v_scale=v_scale
        )
        attend = attention_over(
            kv,
            window=call.window,
            softmax_scale=call.softmax_scale,
            softcap=call.softcap,
            sinks=sinks,
        )
        return ctx.attended(attend, q, v.shape[-1]).unsqueeze(0)


def _paged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """Return the attention of the model's next call, (B, S, Hq, Dv), and None for its
    probabilities.

    This is the function in transformers' AttentionInterface. The module's `paged_step`, which all
    layers share, counts the calls of a pass and computes each with the scale, window and softcap
    that `survey` found. The mask and the options are ignored, but for the sinks, `s_aux`.

    Args:
        module: the module of attention that calls.
        query, key, value: (B, H, S, D), each with its own number of heads.
        options: the options that the layer gives.
    """
    sinks = options.get("s_aux")
    step: Any = module.paged_step
    return step.attend(query, key, value, None if sinks is None else sinks.reshape(-1)), None


class TransformersDecoder(Decoder):
    """A causal language model of transformers behind the interface of all decoders.

    Args:
        inner: the model, an instance of a causal language model of transformers.
        config: the sizes that the engine reads.
        calls: the attention calls of a pass, from `survey`.
        can_pack: True if no module reads the weight of a projection other than by calling it.

    Attributes:
        inner: see Args.
        calls: the attention calls of a pass, in order; each is a layer of the cache.
    """

    def __init__(
        self,
        inner: nn.Module,
        config: ModelConfig,
        calls: tuple[AttentionCall, ...],
        *,
        can_pack: bool,
    ) -> None:
        nn.Module.__init__(self)
        self.inner = inner
        self.config = config
        self.calls = calls
        self.lm_head = None
        self.packed_head = None
        self.has_inference_bits = False
        self._can_pack = can_pack
        self._step = _Step()
        self._step.calls = calls
        for module in inner.modules():
            object.__setattr__(module, "paged_step", self._step)
        _use(inner, _PAGED)
        use_our_experts(inner)

    @property
    def hands_attention_over(self) -> bool:  # type: ignore[override]
        """Whether each layer calls attention once, so that outputs can be written in place."""
        return len({call.module for call in self.calls}) == len(self.calls)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return next(p.dtype for p in self.inner.parameters() if p.is_floating_point())

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        *,
        ctx: AttentionContext | None = None,
        kv: Sequence[CacheLayer] | None = None,
    ) -> Tensor:
        """Return the last hidden states, (B, S, E) dense or (T, E) with ctx and kv.

        The arguments are those of `Decoder.forward`.
        """
        if (ctx is None) != (kv is None):
            raise ValueError(f"ctx and kv must come together, got only {'kv' if kv else 'ctx'}")
        if positions is None:
            positions = torch.arange(self.dense_length(ids, ctx), device=ids.device)
        rows = ids.unsqueeze(0) if ctx is not None else ids
        places = positions.unsqueeze(0) if positions.dim() == 1 else positions
        with self._step.running(ctx, kv):
            hidden: Tensor = _hidden(self.inner, rows, places)
        return hidden[0] if ctx is not None else hidden

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., vocab_size), with the scaling or capping that the model's class
        applies."""
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        logits: Tensor = self._head(inputs_embeds=rows, use_cache=False, return_dict=True).logits
        return logits.reshape(*hidden.shape[:-1], logits.shape[-1])

    @functools.cached_property
    def _head(self) -> Any:
        """A copy of the model without its layers, made once: hidden states given as embeddings pass
        through to the output head."""
        inner: Any = self.inner
        head = copy.copy(inner)
        prefix = inner.base_model_prefix
        head.__dict__ = {**inner.__dict__, "_modules": {**inner._modules}}
        del head._modules[prefix]
        head.__dict__[prefix] = _PassedThrough()
        return head

    def pack_for_inference(self, *, is_int8: bool = False) -> None:
        """Pack the projections as this CPU reads them fastest, see `Decoder.pack_for_inference`.

        Nothing is done if a module reads a projection's weight other than by calling it.

        Raises:
            ValueError: `is_int8` in that case, or where a weight cannot be packed.
        """
        if is_int8:
            if not self._can_pack:
                raise ValueError(
                    "weights must be such that int8 can hold them; modules of "
                    f"{type(self.inner).__name__} read them past their projections"
                )
            self._check_int8()
        if self._can_pack:
            pack_linears(self.inner, is_int8=is_int8)

    def use_invariant_linears(self) -> None:
        """Raise UnsupportedError: bits of transformers' modules depend on the batch."""
        raise UnsupportedError(
            "batch_invariant must be False for a model that runs through transformers, got True"
        )

    def use_inference_bits(self) -> None:
        """Raise UnsupportedError: only decoders of this package can return the bits of
        inference."""
        raise UnsupportedError(
            "use_inference_bits needs a native decoder, got "
            f"{type(self.inner).__name__} through transformers"
        )

    @torch.no_grad()
    def init_weights(self, *, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Do nothing: `load_through_transformers` has drawn the weights by transformers' own
        rules."""

    @torch.inference_mode()
    def check(self) -> None:
        """Compare a short text, token by token over a cache, with the model's own attention.

        Raises:
            UnsupportedError: logits differ by more than rounding: the model keeps something that
                its calls of attention do not show.
        """
        device = next(self.inner.parameters()).device
        generator = torch.Generator().manual_seed(0)
        length = sum(_CHECK_STEPS)
        ids = torch.randint(self.config.vocab_size, (length,), generator=generator).to(device)
        expected = self._own_logits(ids)
        block_size = 16
        spec = self.cache_spec(block_size, self.dtype)
        storage = KVStorage(spec, -(-length // block_size), device)
        table = torch.arange(storage.num_blocks, dtype=torch.int32, device=device).unsqueeze(0)
        rows, start = [], 0
        for count in _CHECK_STEPS:
            slots = torch.arange(start, start + count, device=device)
            ctx = AttentionContext(
                cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
                max_seqlen_q=count,
                seqlens_k=torch.tensor([start + count], dtype=torch.int32, device=device),
                block_table=table,
                slot_mapping=slots,
            )
            part = ids[start : start + count]
            rows.append(self.compute_logits(self(part, slots, ctx=ctx, kv=storage.layers)))
            start += count
        got, expected = torch.cat(rows).double(), expected.double()
        wide = self.dtype.itemsize > 2
        errors = (got - expected).norm(dim=-1) / expected.norm(dim=-1)
        error = errors[_CHECK_STEPS[0] :].median().item()
        if not error <= (1e-3 if wide else 0.08):
            raise UnsupportedError(
                f"{type(self.inner).__name__} cannot run through transformers: its logits with "
                f"paged attention differ from its own by {error:.1%}, so it keeps more of a text "
                "than the keys and values of its attention"
            )

    def _own_logits(self, ids: Tensor) -> Tensor:
        """Return the logits (S, V) that transformers computes for a text, without a cache."""
        try:
            _use(self.inner, "eager")
            use_their_experts(self.inner)
            places = torch.arange(len(ids), device=ids.device).unsqueeze(0)
            return self.compute_logits(_hidden(self.inner, ids.unsqueeze(0), places)[0])
        finally:
            _use(self.inner, _PAGED)
            use_our_experts(self.inner)

    def cache_spec(self, block_size: int, dtype: torch.dtype) -> CacheSpec:
        """Return the spec of the cache: one layer for each attention call of a pass, in order.

        Calls with the same window are one group of layers.
        """
        kinds = [KVSpec(c.num_kv_heads, c.head_dim, c.v_head_dim, dtype) for c in self.calls]
        return CacheSpec.of_layers(block_size, kinds, [call.window for call in self.calls])


class _PassedThrough:
    """Stands for a model's layers: returns the embeddings that it gets as their last states."""

    def __call__(self, *_: Any, inputs_embeds: Tensor | None = None, **__: Any) -> _Output:
        assert inputs_embeds is not None
        return _Output(inputs_embeds)

    @property
    def decoder(self) -> _PassedThrough:
        """This object itself: the output heads of a few classes call the decoder within their
        model."""
        return self


class _Output:
    """The output of a model's layers: the last hidden states; other attributes are None."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _hidden(inner: Any, rows: Tensor, places: Tensor) -> Tensor:
    """Return the last hidden states (B, S, E) of token ids (B, S) at positions `places`.

    A packed batch of T rows has B of 1 and S of T.
    """
    options: dict[str, Any] = {"use_cache": False, "return_dict": True}
    output = inner.base_model(input_ids=rows, position_ids=places, **options)
    hidden: Tensor = output.last_hidden_state
    return hidden


def _use(inner: Any, name: str) -> None:
    """Let all attention modules of a model call the attention function registered under `name`.

    Raises:
        UnsupportedError: the model's layers call no attention function.
    """
    try:
        inner.set_attn_implementation(name)
    except ValueError as error:
        raise UnsupportedError(
            f"{type(inner).__name__} cannot run through transformers: its layers attend by "
            "themselves and call no attention function"
        ) from error


class _Weightless(nn.Module):
    """A projection of the right shape without a weight: reading it raises AttributeError."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = like.in_features, like.out_features

    def forward(self, x: Tensor) -> Tensor:
        """Return an uninitialised tensor of the shape of the projection's result."""
        return x.new_empty((*x.shape[:-1], self.out_features))


def survey(make: Any) -> tuple[tuple[AttentionCall, ...], bool]:
    """Find the attention calls of a model in one pass, and whether its projections can be packed.

    Args:
        make: a function that returns the model, without memory, on the device "meta".

    Returns:
        The calls in order; and True unless a module reads a projection's weight other than by
        calling it.

    Raises:
        UnsupportedError: a layer cannot run over a paged cache; the message names it.
        _NeedsNumbersError: a layer reads numbers, which no tensor on "meta" has.
    """
    try:
        return _survey(_without_weights(make())), True
    except AttributeError:  # a module reads the weight of a projection
        return _survey(make()), False


class _FromHost(TorchDispatchMode):
    """A mode that notes whether a tensor of the host is copied to the device of the model.

    Attributes:
        found: True once such a copy was made.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device.type == "cpu":
            device = kwargs.get("device")
            self.found |= device is not None and torch.device(device).type == "meta"
        return func(*args, **kwargs)


def copies_from_host(inner: Any) -> bool:
    """Return whether a pass copies tensors of the host: no CUDA graph can hold it.

    Args:
        inner: a model of transformers on the device "meta", where a pass needs no numbers.
    """

    def attend(
        _: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
    ) -> Any:
        b, h, s, _d = query.shape
        return query.new_empty((b, s, h, value.shape[-1])), None

    with _FromHost() as mode:
        _pass_over(inner, attend)
    is_found: bool = mode.found
    return is_found


def _pass_over(inner: Any, attend: Any) -> None:
    """Run a pass of a few rows through a model whose attention modules then call `attend`.

    The model stays in this setting, and in eval mode.
    """
    _register(_SURVEYED, attend, _described_mask)
    _use(inner, _SURVEYED)
    device = next(inner.parameters()).device
    if device.type == "meta" and hasattr(inner, "set_experts_implementation"):
        inner.set_experts_implementation("batched_mm")  # shapes that depend on no number
    places = torch.arange(_SURVEY_ROWS, device=device).unsqueeze(0)
    inner.eval().base_model(
        input_ids=places, position_ids=places, attention_mask=places + 1, use_cache=False
    )


class _NeedsNumbersError(Exception):
    """A pass on the device "meta" ended where a layer looked at a number."""


def _without_weights(inner: Any) -> Any:
    for module in list(inner.base_model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, _Weightless(child))
    return inner


@torch.no_grad()
def _survey(inner: Any) -> tuple[AttentionCall, ...]:
    who = type(inner).__name__
    _refuse_cache_readers(inner)
    if "position_ids" not in inspect.signature(type(inner.base_model).forward).parameters:
        raise UnsupportedError(f"{who} cannot run through transformers: it takes no position_ids")
    calls: list[AttentionCall] = []
    names = {module: name for name, module in inner.named_modules()}

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        name = f"{who}'s {names[module]} ({type(module).__name__})"
        unknown = [n for n, x in others.items() if n not in _INERT and x is not None]
        if unknown:
            raise UnsupportedError(f"{name} cannot run over a paged cache: it passes {unknown[0]}")
        if key.shape[2] != query.shape[2] or value.shape[2] != key.shape[2]:
            raise UnsupportedError(
                f"{name} cannot run over a paged cache: it has {key.shape[2]} keys for "
                f"{query.shape[2]} tokens"
            )
        window = _window(name, getattr(attention_mask, "pattern", None))
        if sliding_window is not None and window is not None and sliding_window != window:
            raise UnsupportedError(f"{name} has a window of {sliding_window}, its mask {window}")
        scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
        calls.append(
            AttentionCall(
                names[module],
                query.shape[1],
                key.shape[1],
                key.shape[3],
                value.shape[3],
                scale,
                softcap or 0.0,
                window,
            )
        )
        b, h, s, _ = query.shape
        return query.new_empty((b, s, h, value.shape[-1])), None

    device = next(inner.parameters()).device
    try:
        with torch.device(device):
            _pass_over(inner, attend)
    except (RuntimeError, NotImplementedError) as error:
        if isinstance(error, UnsupportedError):
            raise
        reason = " ".join(str(error).split())[:200]
        if device.type == "meta":
            raise _NeedsNumbersError(reason) from error
        raise UnsupportedError(
            f"{who} cannot run through transformers: {type(error).__name__}: {reason}"
        ) from error
    if not calls:
        raise UnsupportedError(
            f"{who} cannot run through transformers: its layers attend by themselves and call no "
            "attention function"
        )
    return tuple(calls)


def _window(name: str, pattern: Pattern | None) -> int | None:
    """Return the window of a causal mask, the query's own key included; None for all keys before
    it.

    Raises:
        UnsupportedError: the mask is unknown, not causal, or in chunks; the message begins with
            `name`.
    """
    if pattern is None:
        raise UnsupportedError(f"{name} cannot run over a paged cache: its mask is one of its own")
    if pattern.right != 0:
        raise UnsupportedError(f"{name} cannot run over a paged cache: it is not causal")
    if pattern.chunks is not None:
        raise UnsupportedError(
            f"{name} cannot run over a paged cache: it attends in chunks of {pattern.chunks.size}"
        )
    return None if pattern.left is None else pattern.left + 1


def _refuse_cache_readers(inner: Any) -> None:
    """Raise UnsupportedError if the code of one of the model's layers reads transformers' own
    cache."""
    for name, module in inner.base_model.named_modules():
        kind = type(module)
        is_whole = "inputs_embeds" in inspect.signature(kind.forward).parameters
        if is_whole or not kind.__module__.startswith("transformers.models."):
            continue
        match = _READS_CACHE.search(inspect.getsource(kind.forward))
        if match is not None:
            raise UnsupportedError(
                f"{type(inner).__name__}'s {name} ({kind.__name__}) cannot run over a paged cache: "
                f"it reads {match.group()}"
            )


def _described_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    mask_function: Any = None,
    **_: Any,
) -> Tensor:
    """Return a mask of ones that carries the Pattern of the mask function which transformers
    passed."""
    mask = torch.ones(batch_size, 1, q_length or _SURVEY_ROWS, kv_length, dtype=torch.bool)
    mask.pattern = Pattern.of(mask_function)  # type: ignore[attr-defined]
    return mask


def _register(name: str, attend: Any, mask: Any = None) -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attend)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)


def can_run(architecture: str) -> str | None:
    """Say why transformers has no causal language model of this class, or return None."""
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return "transformers is not installed: pip install 'tilewise[transformers]'"
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if architecture not in known or not hasattr(transformers, architecture):
        return f"transformers {transformers.__version__} has no causal language model of that name"
    return None


def load_through_transformers(
    path: Path,
    architecture: str,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    random_weights: bool,
    before: Any = None,
) -> TransformersDecoder:
    """Load a checkpoint as transformers does, to run over a paged cache.

    Args:
        path: a folder with config.json and safetensors.
        architecture: a class of transformers; see `can_run`.
        dtype: the dtype of the parameters; None takes the checkpoint's.
        device, random_weights, before: see `models.load_model`.

    Raises:
        CheckpointError: config.json is wrong, the weights are quantised, or tensors are missing or
            of another shape.
        UnsupportedError: a layer cannot run over a paged cache, or `TransformersDecoder.check`
            fails.
    """
    import transformers

    kind: Any = getattr(transformers, architecture)
    try:
        theirs: Any = kind.config_class.from_pretrained(path, local_files_only=True)
    except Exception as error:  # whatever its checks raise is about the file
        raise CheckpointError(f"config.json: {' '.join(str(error).split())[:300]}") from error
    if getattr(theirs, "quantization_config", None) is not None:
        raise CheckpointError(
            "quantization_config must be absent (float weights) for a model that runs through "
            "transformers, got one"
        )
    if architecture not in (theirs.architectures or [architecture]):
        theirs.tie_word_embeddings = True  # the file's class has no output head
    own = dtype
    if own is None:
        own = theirs.dtype if isinstance(theirs.dtype, torch.dtype) else torch.float32

    def empty() -> Any:
        with torch.device("meta"):
            return kind(copy.deepcopy(theirs)).to(own)

    _register(_PAGED, _paged)
    can_be_captured = False
    try:
        calls, can_pack = survey(empty)
    except _NeedsNumbersError:  # so that its weights come before it can be known what it caches
        inner = _inner(path, kind, theirs, own, device, random_weights)
        calls, can_pack = _survey(inner), False
    else:
        shape = empty()
        can_be_captured = not may_count_on_host(shape) and not copies_from_host(shape)
        if before is not None:
            config = _config(theirs, architecture, calls, own, can_be_captured=can_be_captured)
            before(TransformersDecoder(shape, config, calls, can_pack=False))
        inner = _inner(path, kind, theirs, own, device, random_weights)
    config = _config(theirs, architecture, calls, own, can_be_captured=can_be_captured)
    model = TransformersDecoder(inner.eval(), config, calls, can_pack=can_pack)
    model.check()
    return model


def _inner(
    path: Path,
    kind: Any,
    theirs: Any,
    dtype: torch.dtype,
    device: torch.device,
    random_weights: bool,
) -> Any:
    """Return transformers' model with its weights on the device.

    Args:
        path: the checkpoint's folder.
        kind, theirs: the class and config of transformers.
        dtype, device: the dtype and the device of the parameters.
        random_weights: True to draw weights instead of reading them.

    Raises:
        CheckpointError: the checkpoint lacks a tensor, or one has another shape.
    """
    if random_weights:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(0)
            return kind(theirs).to(dtype)
    with _progress_on_terminals():
        inner, report = kind.from_pretrained(
            path,
            config=theirs,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    lacking = sorted(report["missing_keys"]) + sorted(map(str, report["mismatched_keys"]))
    if lacking:
        raise CheckpointError(
            f"checkpoint must hold tensor {lacking[0]} of {kind.__name__}, got none that fits"
        )
    return inner.to(device)


@contextmanager
def _progress_on_terminals() -> Iterator[None]:
    """Let transformers draw no progress bar during a `with` block, unless stderr is a terminal."""
    from transformers.utils import logging

    hides = logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    if hides:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        if hides:
            logging.enable_progress_bar()


def _config(
    theirs: Any,
    architecture: str,
    calls: tuple[AttentionCall, ...],
    dtype: torch.dtype,
    *,
    can_be_captured: bool,
) -> ModelConfig:
    """Return the ModelConfig by which the engine knows a model that transformers runs.

    Args:
        theirs: the config of transformers.
        architecture: the name of the model's class.
        calls: the calls of attention, in order.
        can_be_captured: True if a step can be recorded in a CUDA graph.
    """
    text = theirs.get_text_config()
    ends = text.eos_token_id
    positions = getattr(text, "max_position_embeddings", None)
    if positions is None:
        raise CheckpointError("config.json must hold max_position_embeddings, got none")
    return ModelConfig(
        architecture=architecture,
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        max_position_embeddings=positions,
        layers=tuple(
            LayerConfig(call.config, FeedForwardConfig(text.hidden_size)) for call in calls
        ),
        is_native=False,
        can_be_captured=can_be_captured,
        bos_token_id=text.bos_token_id,
        eos_token_ids=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
        dtype=str(dtype).removeprefix("torch."),
    )
