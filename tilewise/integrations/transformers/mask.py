"""transformers' mask functions as descriptions, which become matrices only when read.

transformers describes a mask by a Python function of two positions and a 2-D padding mask. If the
function is one of its own (causal, windowed or packed), tilewise needs no matrix: the mask made
here keeps the description and is O(N). To other code it is still a bool tensor (B, 1, Sq, Sk): a
model that indexes, changes or combines it gets the matrix that "sdpa" would have got.
"""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.masks.of_transformers import (
    Pattern,
    Visible,
    as_bias,
    hide_padding,
)

_DETACH = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_TO = torch.ops.aten._to_copy.default
# The attribute with the description of a mask. A tensor computed from a traced mask lacks it, so
# its matrix is used; an in-place change would keep it, but no model changes a mask that it did not
# make.
_NOTE = "visible"
# A matrix of so few elements costs next to nothing beside the rest of a layer.
_FEW = 256 * 256
_told: set[str] = set()


class AttentionMask(Tensor):
    """A bool mask (B, 1, Sq, Sk) whose matrix is computed only when an operation of torch reads it.

    `attention_mask` makes one for each kind of layers and forward pass; `attend` reads its
    description `visible` instead of the matrix.
    """

    visible: Visible | None
    why_dense: str
    _make_dense: Callable[[], Tensor]
    _dense: Tensor | None
    _is_shared: bool
    _biases: dict[torch.dtype, Tensor]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        device: torch.device,
        visible: Visible | None,
        make_dense: Callable[[], Tensor],
        why_dense: str = "",
    ) -> AttentionMask:
        """Make a mask from its description, None if there is only the matrix that `make_dense`
        returns.

        why_dense: the reason why the mask has no description, and what to do about it.
        """
        mask: AttentionMask = Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.bool, device=device
        )
        mask.visible, mask.why_dense, mask._make_dense = visible, why_dense, make_dense
        mask._dense, mask._is_shared, mask._biases = None, False, {}
        return mask

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"AttentionMask({tuple(self.shape)}, {self.visible})"

    def dense(self) -> Tensor:
        """Return the bool matrix (B, 1, Sq, Sk), which the first call computes and keeps."""
        if self._dense is None:
            self._dense = self._make_dense()
        return self._dense

    def bias(self, dtype: torch.dtype) -> Tensor:
        """Return the mask (B, 1 or H, S, T) as numbers: 0 for visible keys, -inf for others.

        The tensor is kept for each dtype, since all layers of a model use it, and must not be
        written to. Once views of the mask exist, it is computed anew at each call.
        """
        if self._is_shared:
            return as_bias(self.dense(), dtype)
        if dtype not in self._biases:
            self._biases[dtype] = as_bias(self.dense(), dtype)
        return self._biases[dtype]

    def _share(self) -> None:
        """Drop the description `visible`, as views may write to the matrix from now on: the matrix
        alone counts."""
        self.visible, self._is_shared = None, True
        self.why_dense = "the model takes views of it, or writes to it: no call can avoid that"

    def _moved(self, device: torch.device) -> AttentionMask:
        visible = self.visible and self.visible.to(device)
        source = self._make_dense if self._dense is None else self._dense.clone
        return AttentionMask(
            tuple(self.shape), device, visible, lambda: source().to(device), self.why_dense
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, AttentionMask):
            if func in _DETACH:
                return first._moved(first.device)
            if func is _TO and kwargs.get("dtype") in (None, torch.bool):
                return first._moved(kwargs.get("device") or first.device)
        schema = func._schema
        if schema.is_mutable or any(value.alias_info for value in schema.returns):
            _changed((args, kwargs), AttentionMask._share)
        if func.overloadpacket is torch.ops.aten.add:
            raise UnsupportedError(
                'attn_implementation must be "eager" for a model that adds its mask to the logits '
                'itself, got one of tilewise\'s masks, which are bool as those of "sdpa" are'
            )
        args, kwargs = _changed((args, kwargs), AttentionMask.dense)
        return func(*args, **kwargs)


def _changed(value: Any, change: Callable[[AttentionMask], Any]) -> Any:
    """Return `value`, arguments of an op, with each AttentionMask in it replaced by change(mask).

    Lists, tuples and dicts are searched as well.
    """
    if isinstance(value, AttentionMask):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_changed(each, change) for each in value])
    if isinstance(value, dict):
        return {key: _changed(each, change) for key, each in value.items()}
    return value


def visible_of(mask: Tensor) -> Visible | None:
    """Return the description of a mask that `attention_mask` made; None for any other matrix.

    A mask made there has None, too, if only its matrix says what is visible.
    """
    visible: Visible | None = getattr(mask, _NOTE, None)
    return visible


def made_here(mask: Tensor) -> bool:
    """Return whether `attention_mask` made the mask; False for a matrix that a caller gave."""
    return hasattr(mask, _NOTE)


def tell_of_a_matrix(mask: Tensor) -> None:
    """Warn, once for each reason, that a mask is computed as a matrix; not for one query or a small
    mask."""
    if mask.shape[-2] < 2 or mask.shape[-2] * mask.shape[-1] < _FEW:
        return
    if isinstance(mask, AttentionMask):
        why = mask.why_dense
    elif made_here(mask):
        why = (
            "a compiler cannot see which function made it; give attention_mask, all ones if need "
            "be, so that position_ids are not taken for those of packed sequences"
        )
    else:
        why = "it was given with four dims; one of two dims, (B, S), stays a description"
    _warn_once(why)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_once(why: str) -> None:
    if why not in _told:
        _told.add(why)
        warnings.warn(
            "attention_mask is computed as a matrix, which takes memory and time of queries times "
            f"keys in every layer: {why} (docs/guide/integrations.md)",
            UserWarning,
            stacklevel=2,
        )


def _why_dense(pattern: Pattern | None) -> str:
    if pattern is None:
        return (
            "there is a function in it that is none of transformers' for causal, windowed, "
            "chunked, bidirectional or packed masks; leave out or_mask_function, and_mask_function "
            "and block_sequence_ids where they change nothing"
        )
    if pattern.packed is not None or pattern.chunks is not None:
        return (
            "packed sequences and chunks are described only without padding and without a cache; "
            "give use_cache=False, and no attention_mask"
        )
    return "the keys at hand lie outside of its window"


def attention_mask(
    batch_size: int,
    q_length: int | None = None,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    local_size: int | None = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Make the mask of one kind of layers; registered in transformers' AttentionMaskInterface.

    The arguments are transformers' own: query i is at position i + q_offset, key j at j +
    kv_offset, mask_function(batch, head, query, key) says what sees what, and attention_mask (B,
    positions) is False at padding. Early versions of 5 pass cache_position instead of q_offset.

    Whether padding hides any key is checked once, which waits for the device as transformers' own
    masks do; not while a graph is traced or captured.

    Returns:
        An AttentionMask. While tracing it is a plain bool (B, 1, Sq, Sk), which compilers remove
        again if the description suffices; so it is for the single query of a static cache, whose
        mask may be passed to a compiled graph.

    Raises:
        UnsupportedError: the model does not attend through transformers' AttentionInterface.
    """
    # The module's own names: torch 2.11 traces no import of a module from the lazy `transformers`.
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    if config is not None:
        _require_interface(type(config))
    if mask_function is None:
        mask_function = causal_mask_function
    tracing = is_tracing(attention_mask)
    capturing = tracing and not torch.compiler.is_compiling() and _is_capturing()
    tracing = tracing and not capturing
    own: dict[str, Any] = {"q_length": q_length, "q_offset": q_offset, "device": device}
    if cache_position is not None:
        own = {"cache_position": cache_position}
        device, q_length = cache_position.device, cache_position.shape[0]
        q_offset = cache_position[0] if tracing or capturing else int(cache_position[0])
    assert q_length is not None

    def make_dense() -> Tensor:
        mask: Tensor = sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            **own,
            **kwargs,
        )
        return mask

    visible: Visible | None = None
    if tracing:
        dense = make_dense()
        at_start = isinstance(q_offset, int) and q_offset == kv_offset == 0
        if at_start and q_length == kv_length:
            pattern = Pattern.traced(mask_function, allow_is_causal_skip, local_size, config)
            if pattern is not None:
                visible = Visible(kv_length, pattern.left, pattern.right)
                if attention_mask is not None:
                    visible = hide_padding(visible, attention_mask, kv_offset, look=False)
        setattr(dense, _NOTE, visible)
        return dense

    if q_length == 1 and not (allow_is_causal_skip or allow_is_bidirectional_skip):
        return make_dense()
    pattern = Pattern.of(mask_function)
    if pattern is not None:
        visible = pattern.visible(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            look=not capturing,
            padded=attention_mask is not None,
        )
    if visible is not None and attention_mask is not None:
        visible = hide_padding(visible, attention_mask, kv_offset, look=not capturing)
    shape = (batch_size, 1, q_length, kv_length)
    why = _why_dense(pattern) if visible is None else ""
    return AttentionMask(shape, torch.device(device), visible, make_dense, why)


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _require_interface(config_type: type) -> None:
    """Raise UnsupportedError for a model that would take a mask made here but not tilewise's
    attention.

    transformers accepts any registered name for such a model, though it refuses "sdpa". Models
    outside of transformers, whose class is not known here, are not checked.
    """
    stranger = _without_interface(config_type)
    if stranger is not None:
        raise UnsupportedError(
            'attn_implementation must be "eager" for a model that does not attend through '
            f"transformers' AttentionInterface, got tilewise's for {stranger}"
        )


@functools.cache
def _without_interface(config_type: type) -> str | None:
    """Return the name of the model class of `config_type` if it does not use the attention
    interface.

    None if it does, or if transformers does not know the class.
    """
    from transformers import MODEL_MAPPING

    if config_type not in MODEL_MAPPING:
        return None
    model: Any = MODEL_MAPPING[config_type]
    models = model if isinstance(model, tuple) else (model,)
    # Early releases of 5 look the function up by the second name.
    if any(
        one._can_set_attn_implementation()
        or "ALL_ATTENTION_FUNCTIONS[" in inspect.getsource(sys.modules[one.__module__])
        for one in models
    ):
        return None
    return str(models[0].__name__)
