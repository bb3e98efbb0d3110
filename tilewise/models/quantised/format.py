"""What a quantised format is to the loader, and what its readers share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import CheckpointError
from tilewise.ops import QuantisedWeight

__all__ = [
    "Format",
    "Get",
    "Stored",
    "matches",
    "nibbles_of",
    "packed",
    "reordered",
    "settings",
    "unpacked",
]

Get = Callable[[str], Tensor]
"""A function of a suffix, as "weight_scale", that returns the tensor of a module."""


@dataclass(frozen=True)
class Stored:
    """The tensors of one module of a checkpoint.

    Attributes:
        module: the module's name in the checkpoint, as "model.layers.0.mlp.up_proj".
        names: the suffixes of the module's tensors, as "weight_scale".
        get: a function that returns the tensor of a suffix, on "meta" where only shapes are read.
    """

    module: str
    names: frozenset[str]
    get: Get

    def tensor(self, suffix: str) -> Tensor:
        """Return the tensor of a suffix; raise CheckpointError if the module has none."""
        if suffix not in self.names:
            raise CheckpointError(f"checkpoint must hold tensor {self.module}.{suffix}, got none")
        return self.get(suffix)

    def optional(self, suffix: str) -> Tensor | None:
        """Return the tensor of a suffix, or None if the module has none."""
        return self.get(suffix) if suffix in self.names else None

    def refuse(self, suffix: str, rule: str, got: object) -> CheckpointError:
        """Return, to be raised, the error of a tensor that breaks a rule: "tensor ... must `rule`,
        got `got`"."""
        return CheckpointError(f"tensor {self.module}.{suffix} must {rule}, got {got}")


@dataclass(frozen=True)
class Format:
    """A quantised format, as a checkpoint's configuration describes it.

    Attributes:
        name: the name that a user sees.
        marks: suffixes of tensors; a module that has any of them is quantised.
        read: a function of a module's tensors that returns its weight (N, K).
        extra: suffixes of tensors that are known and not needed, such as scales of inputs.
        small: suffixes of small tensors that say how the others are to be read; they are read even
            where others are on "meta".
    """

    name: str
    marks: tuple[str, ...]
    read: Callable[[Stored], QuantisedWeight]
    extra: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


def matches(rules: Iterable[str], module: str) -> bool:
    """Return whether one of some rules names a module.

    A rule is the whole name, its end or a part of it in whole words between dots; or "re:" and a
    regular expression that the name must begin with.
    """
    for rule in rules:
        if rule.startswith("re:"):
            if re.match(rule[3:], module):
                return True
        elif module == rule or module.endswith(f".{rule}") or f".{rule}." in f".{module}.":
            return True
    return False


def unpacked(words: Tensor, bits: int = 4) -> Tensor:
    """Return the codes of `bits` bits in int32 words (..., n), the lowest bits first, uint8 (..., n
    * 32 / bits)."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)


def packed(codes: Tensor) -> Tensor:
    """Return codes of 4 bits, uint8 (N, K), two a byte: uint8 (N, K / 2), the even column in the
    lower half."""
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).contiguous()


def nibbles_of(words: Tensor) -> Tensor:
    """Return int32 words (N, n) of 8 codes of 4 bits each, the lowest first, as bytes (N, 4 n) of
    two codes."""
    return words.contiguous().view(torch.uint8)


def reordered(
    stored: Stored, codes: Tensor, groups: Tensor | None, group_size: int
) -> tuple[Tensor, Tensor | None]:
    """Reorder the columns of codes (N, K) so that the columns of each group are neighbours.

    Args:
        stored: the tensors of the layer in the checkpoint, of which errors give the name.
        codes: (N, K), a code for each weight.
        groups: integers (K,), the group of each column; None if groups lie one after another.
        group_size: the number of columns of each group.

    Returns:
        The codes with groups in ascending order, and the permutation, int32 (K,): column k is
        column permutation[k] of the given codes. The permutation is None if no column moved. For
        groups on "meta" the codes are as given, and the permutation is on "meta".

    Raises:
        CheckpointError: a group has another number of columns than group_size.
    """
    if groups is None or groups.is_meta:
        moved = (
            None
            if groups is None
            else torch.empty(codes.shape[1], dtype=torch.int32, device="meta")
        )
        return codes, moved
    order = torch.argsort(groups.long(), stable=True)
    counts = torch.bincount(groups.long())
    if bool((counts != group_size).any()):
        raise stored.refuse("g_idx", f"give each group {group_size} columns", counts.tolist()[:4])
    if torch.equal(order, torch.arange(len(order))):
        return codes, None
    return codes[:, order].contiguous(), order.int()


def settings(config: Mapping[str, Any], **known: Any) -> None:
    """Refuse a configuration with a value that is not served; absent and null are allowed.

    Args:
        config: the quantisation's configuration.
        known: the values of each field that are served.

    Raises:
        CheckpointError: a value is another.
    """
    for name, allowed in known.items():
        value = config.get(name)
        if value is not None and value not in allowed:
            names = ", ".join(map(str, allowed))
            raise CheckpointError(f"{name} of the quantisation must be one of {names}, got {value}")
