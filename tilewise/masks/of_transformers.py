"""The keys that a query sees, in tilewise's terms, from transformers' mask functions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visible:
    """The keys that each query sees, in the terms of `tilewise.attention`.

    Attributes:
        num_keys: the number of valid keys; the others are unused places of a static cache.
        left, right: the window, aligned to the bottom right of (Sq, num_keys); None is unlimited.
        seqlens_k: (B,) int32, the keys of each sequence, to which the window is aligned; None if
            all have num_keys.
        key_bias: float32 (B, 1, 1, num_keys), 0 or -inf, where padding hides keys; None if none are
            hidden so.
        cu_seqlens: (n + 1,) int32, the edges of packed sequences in the batch, laid out in one row;
            None if sequences are not packed.
        max_seqlen: the length of the longest packed sequence, 0 without cu_seqlens.
    """

    num_keys: int
    left: int | None = None
    right: int | None = None
    seqlens_k: Tensor | None = None
    key_bias: Tensor | None = None
    cu_seqlens: Tensor | None = None
    max_seqlen: int = 0

    def to(self, device: torch.device) -> Visible:
        """Return a copy with its tensors on `device`."""
        seqlens_k, key_bias, cu_seqlens = (
            None if tensor is None else tensor.to(device)
            for tensor in (self.seqlens_k, self.key_bias, self.cu_seqlens)
        )
        return replace(self, seqlens_k=seqlens_k, key_bias=key_bias, cu_seqlens=cu_seqlens)


def as_bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of `dtype`, 0 where `visible` is True and -inf where False; expanded
    dimensions (stride 0) have size 1 in the result, which broadcasts."""
    for dim, (size, stride) in enumerate(zip(visible.shape, visible.stride(), strict=True)):
        if stride == 0 and size > 1:
            visible = visible.narrow(dim, 0, 1)
    return visible.new_zeros(visible.shape, dtype=dtype).masked_fill(~visible, float("-inf"))


class Chunks(NamedTuple):
    """Chunked attention: positions are cut into pieces of `size` that do not see each other,
    counted from the first token after the left `padding` (B,) of each row."""

    size: int
    padding: Tensor


@dataclass(frozen=True)
class Pattern:
    """The rule of a mask function of transformers: a query at position q sees keys q - left ... q +
    right of the same packed sequence and chunk.

    Attributes:
        left, right: the window in positions; None is unlimited.
        packed: (B, S), a number for each token, the same for all tokens of a packed sequence.
        positions: (B, S), the position of each token, if it is not its index.
        chunks: the chunks that further separate keys; None without.
    """

    left: int | None = None
    right: int | None = None
    packed: Tensor | None = None
    positions: Tensor | None = None
    chunks: Chunks | None = None

    @staticmethod
    def traced(
        mask_function: Callable[..., Any],
        is_whole: bool,
        local_size: int | None,
        config: Any,
    ) -> Pattern | None:
        """Recognise a mask function while tracing, where closures cannot be opened: the causal, the
        bidirectional, or the causal window of `local_size` keys; None for all others.

        is_whole: True if transformers has added nothing to the function of this kind of layers.
        """
        from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

        if mask_function is causal_mask_function:
            return Pattern(right=0)
        if mask_function is bidirectional_mask_function:
            return Pattern()
        # Windows and chunks are both made by and_masks; only chunks have a size of their own.
        chunked = getattr(config, "attention_chunk_size", None) is not None
        window = getattr(config, "sliding_window", None)
        if is_whole and not chunked and local_size is not None and local_size == window:
            return Pattern(left=local_size - 1, right=0)
        return None

    @staticmethod
    def of(mask_function: Callable[..., Any]) -> Pattern | None:
        """Recognise a mask function that transformers' own factories made, from the contents of its
        closures; return None for a function that is not, or that `Pattern` cannot express."""
        from transformers import masking_utils as made

        kinds = _closures()
        left: list[int] = []
        right: list[int] = []
        packed: list[Tensor] = []
        positions: list[Tensor] = []
        chunks: list[Chunks] = []
        functions: list[tuple[Any, bool]] = [(mask_function, True)]
        while functions:
            function, by_index = functions.pop()
            kind = kinds.get(getattr(function, "__code__", None))
            if function is made.causal_mask_function:
                right.append(0)
            elif kind is None:
                if function is not made.bidirectional_mask_function:
                    return None
            else:
                cells = (cell.cell_contents for cell in function.__closure__)
                given = dict(zip(function.__code__.co_freevars, cells, strict=True))
                if kind == "moved":  # it calls another function with positions instead of indices
                    positions.append(given["position_ids"])
                    functions.append((given["mask_function"], False))
                elif kind == "chunks":
                    chunks.append(Chunks(given["chunk_size"], given["left_padding"]))
                else:
                    (value,) = given.values()  # the factory's one argument
                    if kind == "and":
                        functions.extend((part, by_index) for part in value)
                    elif kind == "packed" and by_index:
                        packed.append(value)
                    elif kind == "packed":
                        return None
                    else:
                        left.append(value - 1 if kind == "window" else value)
                        right.extend([] if kind == "window" else [value])
        if len(positions) > len(packed) or max(len(packed), len(chunks)) > 1:
            return None
        return Pattern(
            min(left, default=None),
            min(right, default=None),
            next(iter(packed), None),
            next(iter(positions), None),
            next(iter(chunks), None),
        )

    def visible(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor,
        kv_offset: int,
        look: bool,
        padded: bool,
    ) -> Visible | None:
        """Return which keys the pattern shows to q_length queries from index q_offset on, of
        kv_length keys from index kv_offset on; None if `Visible` cannot express the result.

        look: True if values of tensors may be read, which waits for the device. padded: True if
        padding is hidden as well; left padding then has a chunk of its own.
        """
        one_chunk = self.chunks is None or (padded and kv_offset + kv_length <= self.chunks.size)
        if self.packed is not None or not one_chunk:
            at_start = isinstance(q_offset, int) and q_offset == kv_offset == 0
            same = q_length == kv_length == getattr(self.packed, "shape", (kv_length,))[-1]
            return self._apart(batch_size, kv_length) if look and at_start and same else None
        if isinstance(q_offset, Tensor):
            if self.right != 0:
                return None
            seqlens_k = (q_offset + (q_length - kv_offset)).to(torch.int32).repeat(batch_size)
            return Visible(kv_length, self.left, self.right, seqlens_k=seqlens_k)
        diagonal = q_offset - kv_offset  # the key at the position of query 0
        num_keys = kv_length
        if self.right is not None:
            num_keys = min(kv_length, diagonal + q_length + self.right)
        if num_keys < 1:
            return None
        shift = diagonal - (num_keys - q_length)  # from the bottom right diagonal to this one
        left = None if self.left is None else self.left - shift
        right = None if self.right is None else self.right + shift
        if (left is not None and left < 0) or (right is not None and right < 0):
            return None
        if left is not None and left >= num_keys - 1:
            left = None  # even the last query's window begins at or before key 0
        if right is not None and right >= q_length - 1 and right > 0:
            right = None  # even the first query's window ends at or after the last key
        return Visible(num_keys, left, right)

    def _apart(self, batch_size: int, num_keys: int) -> Visible | None:
        """Return the parts that do not see each other (packed sequences, chunks, rows of the batch)
        as the packed sequences of a `Visible`; None if positions do not rise by one in a part or
        numbers of sequences fall. Reads values, which waits for the device."""
        source = self.packed if self.chunks is None else self.chunks.padding
        assert source is not None
        device, positions = source.device, self.positions
        if positions is None:
            positions = torch.arange(num_keys, device=device)[None]
        begins = torch.ones(batch_size, num_keys, dtype=torch.bool, device=device)
        begins[:, 1:] = False
        if self.packed is not None:
            begins[:, 1:] |= self.packed.diff() != 0
        # Windows count positions, which are indices as long as they increase by one.
        expressible = ((positions.diff() == 1) | begins[:, 1:]).all()
        if self.packed is not None:
            # otherwise two sequences with one number would become one
            expressible &= (self.packed.diff() >= 0).all()
        if self.chunks is not None:
            number = (positions - self.chunks.padding.view(-1, 1)) // self.chunks.size
            begins[:, 1:] |= number.diff() != 0
        starts = begins.flatten().nonzero().flatten()
        cu_seqlens = torch.cat([starts, starts.new_tensor([begins.numel()])])
        longest, can = torch.stack([cu_seqlens.diff().max(), expressible.long()]).tolist()
        if not can:
            return None
        return Visible(
            num_keys,
            self.left,
            self.right,
            cu_seqlens=cu_seqlens.to(torch.int32),
            max_seqlen=longest,
        )


@functools.cache
def _closures() -> dict[Any, str]:
    """Return the kind ("and", "window", "packed", "chunks" ...) by the code object of the functions
    that each of transformers' factories makes; a factory that the release lacks has none."""
    from transformers import masking_utils as made

    named = {
        "and": made.and_masks(made.causal_mask_function),
        "window": made.sliding_window_overlay(1),
        "packed": made.packed_sequence_mask_function(torch.zeros(1, 1)),
    }
    zeros = torch.zeros(1, 1)
    for kind, factory, arguments in (  # not in the first releases of 5
        ("window both ways", "sliding_window_bidirectional_overlay", (1,)),
        ("chunks", "chunked_overlay", (1, zeros)),
        ("moved", "remap_positions_for_packed_sequence", (made.causal_mask_function, zeros)),
    ):
        if hasattr(made, factory):
            named[kind] = getattr(made, factory)(*arguments)
    return {function.__code__: kind for kind, function in named.items()}


def hide_padding(visible: Visible, padding: Tensor, kv_offset: int, look: bool) -> Visible | None:
    """Return `visible` with the keys hidden at which `padding`, (B, keys) from index 0 on, is
    False: unchanged if there are none, else by seqlens_k if only the ends of rows are padding and
    the window is unlimited, else by key_bias. None if packed sequences have padding, or cannot be
    looked at.

    look: True if values of tensors may be read, which waits for the device; else key_bias is used.
    """
    apart = visible.cu_seqlens is not None
    if apart and not look:
        return None
    missing = kv_offset + visible.num_keys - padding.shape[-1]
    if missing > 0:
        padding = torch.nn.functional.pad(padding, (0, missing))
    padding = padding[:, kv_offset : kv_offset + visible.num_keys].to(torch.bool)
    if look:
        falls = (padding[:, 1:] <= padding[:, :-1]).all()  # True never follows False
        hides_nothing, only_on_the_right = torch.stack([padding.all(), falls]).tolist()
        if hides_nothing or apart:
            return visible if hides_nothing else None
        unlimited = visible.left is None and visible.right is None and visible.seqlens_k is None
        if unlimited and only_on_the_right:
            return replace(visible, seqlens_k=padding.sum(-1, dtype=torch.int32))
    return replace(visible, key_bias=as_bias(padding, torch.float32)[:, None, None])
