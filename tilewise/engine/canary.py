"""Checksums of full cache blocks: taken when blocks are written, compared in steps drawn at random.

A full block never changes until it is given back. Of a share of the full blocks that the prefix
cache knows a checksum is kept with their content, so that it holds wherever the content is brought
back from: main memory, a swap, a copy. After some steps one watched content is read again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.cache.prefix import PrefixNode
from tilewise.cache.storage import KVStorage
from tilewise.engine.audit import Difference

__all__ = ["Canary", "checksum"]

MOST_WATCHED = 1 << 16
# 2^64 / the golden ratio, as an int64. No word is weighed as another: exchanged words show, too.
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)


class Canary:
    """Watches full blocks of a storage for bytes that change; on the engine's thread.

    Checkpoints of states are not watched.

    Args:
        storage: the cache on the device.
        share: the share of full blocks that are watched, in (0, 1].
        on_difference: a function that is called with the `Difference` of each block that has
            changed.
        seed: the seed of the choices.

    Attributes:
        num_checked: comparisons that were made.
        num_broken: the number of blocks whose check has failed.
    """

    def __init__(
        self,
        storage: KVStorage,
        share: float,
        on_difference: Callable[[Difference], None],
        *,
        seed: int = 0,
    ) -> None:
        self.storage, self.share, self.on_difference = storage, share, on_difference
        self.num_checked = self.num_broken = 0
        self._draw = random.Random(f"canary {seed}")
        self._fresh: list[PrefixNode] = []
        self._watched: list[tuple[PrefixNode, tuple[int, ...]]] = []
        self._at = 0

    def note(self, node: PrefixNode) -> None:
        """Begin to watch a newly filled block of the prefix cache, with the probability `share`."""
        if self._draw.random() < self.share:
            self._fresh.append(node)

    def after_step(self, step: int) -> None:
        """Take the checksums of newly noted blocks, and compare one watched block with its
        checksum.

        Args:
            step: the number of the step that ended, named in a report.
        """
        fresh, self._fresh = self._fresh, []
        for node in fresh:
            self._watched.append((node, self._sums(node)))
        if len(self._watched) > MOST_WATCHED:
            del self._watched[: len(self._watched) - MOST_WATCHED]
        self._check_next(step)

    def check_all(self, step: int) -> int:
        """Compare every watched block that is on the device; return how many blocks were watched.

        Args:
            step: the number of the last step, named in a report.
        """
        count = len(self._watched)
        self._at = 0
        for _ in range(count):
            if not self._watched:
                break
            self._check_next(step)
        return count

    def forget_all(self) -> None:
        """Stop watching all blocks; blocks that are filled later are watched again."""
        self._fresh, self._watched = [], []

    def _check_next(self, step: int) -> None:
        """Compare the next watched content that a block on the device holds.

        A content on the way that is neither on the device nor in main memory is watched no more;
        one in main memory is passed over, and ends this check.
        """
        while self._watched:
            self._at %= len(self._watched)
            node, wanted = self._watched[self._at]
            is_held = self._is_held(node)
            if not is_held and (max(node.slots) < 0 or node.is_forgotten):
                self._watched[self._at] = self._watched[-1]
                self._watched.pop()
                continue
            self._at += 1
            if is_held:
                self._compare(node, wanted, step)
            return

    def _is_held(self, node: PrefixNode) -> bool:
        """Return whether a node of the prefix cache has a block of keys and values in any group."""
        return any(block >= 0 for block in node.blocks[: len(self.storage.parts)])

    def _compare(self, node: PrefixNode, wanted: tuple[int, ...], step: int) -> None:
        self.num_checked += 1
        for group, (now, before) in enumerate(zip(self._sums(node), wanted, strict=True)):
            if now != before and node.blocks[group] >= 0 and before >= 0:
                self.num_broken += 1
                self._watched = [(n, sums) for n, sums in self._watched if n is not node]
                block = node.blocks[group]
                self.on_difference(
                    Difference(
                        "block",
                        "",
                        f"block {block} of group {group} has other bytes than when it was written",
                        (block,),
                        (step, step),
                    )
                )
                return

    def _sums(self, node: PrefixNode) -> tuple[int, ...]:
        """Return the checksum of a node's block in each group of layers; -1 where there is no
        block."""
        return tuple(
            -1 if block < 0 else checksum(part, block)
            for part, block in zip(self.storage.parts, node.blocks, strict=False)
        )


@torch.no_grad()
def checksum(storage: KVStorage, block: int) -> int:
    """Return a checksum, 0 ... 2^63 - 1, of a block's bytes in all layers of a group.

    Each word of 8 bytes is multiplied by an odd number of its own, and the products are added
    modulo 2^64. Sums of integers do not depend on the order of the additions. The lowest bit of the
    last sum is dropped.
    """
    total = 0
    for whole in storage.whole:
        own = whole[block :: storage.num_blocks]  # of each layer
        words = _words(own.reshape(-1))
        weights = torch.arange(len(words), device=words.device, dtype=torch.int64)
        weights = weights * 2 * _ODD + _ODD  # odd
        total = (total * 3 + int((words * weights).sum())) & ((1 << 64) - 1)
    return total >> 1


def _words(flat: Tensor) -> Tensor:
    """Return the bytes of a flat tensor as int64, flat, padded with zeros to whole words."""
    octets = flat.contiguous().view(torch.uint8)
    odd = -len(octets) % 8
    if odd:
        octets = torch.cat((octets, octets.new_zeros(odd)))
    return octets.view(torch.int64)
