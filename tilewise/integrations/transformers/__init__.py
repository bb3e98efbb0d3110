"""attn_implementation="tilewise" for the models of transformers, in training and in generate."""

from __future__ import annotations

from functools import partial

from tilewise.integrations.transformers.forward import INERT, attend
from tilewise.integrations.transformers.mask import attention_mask

__all__ = ["register"]


def register(
    name: str = "tilewise", *, backend: str | None = None, ignored: tuple[str, ...] = ()
) -> None:
    """Make `attn_implementation=name` a choice for every model of transformers.

    Registers the attention function and the function that makes its masks. Supported are grouped
    heads, padding on either side, sliding windows, softcap, sinks (s_aux), position biases,
    bidirectional and cross-attention, packed sequences (by position_ids or cu_seq_lens), dropout,
    and static caches. A row that sees no key, such as left padding, gives 0 where "eager" gives a
    mean over everything; no other row can see it.

    Args:
        name: the name to register.
        backend: the backend as in `tilewise.attention`.
        ignored: names of further arguments that your models pass to attention functions and that
            do not change the result. Any other unknown argument is refused, never dropped.

    Raises:
        ImportError: transformers is not installed.

    Example:
        >>> register()
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="tilewise")
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "tilewise.integrations.transformers needs transformers 5: "
            "pip install 'tilewise[transformers]'"
        ) from error
    inert = INERT.union(ignored)
    AttentionInterface.register(name, partial(attend, _backend=backend, _inert=inert))
    AttentionMaskInterface.register(name, attention_mask)
