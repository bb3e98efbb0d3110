"""Batches of packed documents: no padding, one shape, and a place to go on from.

A batch is T tokens. Shuffled documents fill it one after the other; one that is longer than the
context is cut into pieces, and so is the last of a batch, whose rest begins the next. Every piece
is a document of its own to attention, and every token has a target.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.training.corpus import Corpus
from tilewise.training.decoder import Documents

__all__ = ["Batch", "Packer", "mask_batch", "prefetch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Tensors of one forward and backward pass, on the device.

    Attributes:
        ids, targets: int64 (T,), or (B, S) for rows. A masked batch's targets are (K,), for its
            places.
        positions: int64 (T,), the position of each token in its piece; None for rows.
        documents: the edges of the packed pieces; None for rows.
        places: int64 (K,), the rows that a masked model predicts; None for a decoder.
        count: the number of documents, each piece of one counted.
        pairs: the sum of the squared lengths of the pieces, to which attention's FLOPs are
            proportional.
        state: the argument of `Packer.load_state` with which a packer continues after this batch.
    """

    ids: Tensor
    targets: Tensor
    positions: Tensor | None
    documents: Documents | None
    places: Tensor | None
    count: int
    pairs: int
    state: dict[str, int]

    def to(self, device: torch.device) -> Batch:
        """Return a copy of the batch on `device`; from pinned memory the host does not wait."""

        def move(x: Tensor | None) -> Any:
            return None if x is None else x.to(device, non_blocking=True)

        documents = self.documents
        if documents is not None:
            documents = Documents(move(documents.cu_seqlens), documents.max_seqlen)
        return replace(
            self,
            ids=move(self.ids),
            targets=move(self.targets),
            positions=move(self.positions),
            documents=documents,
            places=move(self.places),
        )

    def pin(self) -> Batch:
        """Return a copy of the batch in page-locked memory."""
        documents = self.documents
        if documents is not None:
            documents = Documents(documents.cu_seqlens.pin_memory(), documents.max_seqlen)
        return replace(
            self,
            ids=self.ids.pin_memory(),
            targets=self.targets.pin_memory(),
            positions=None if self.positions is None else self.positions.pin_memory(),
            documents=documents,
            places=None if self.places is None else self.places.pin_memory(),
        )


class Packer:
    """Fill batches with shuffled documents, epoch after epoch.

    Args:
        corpus: the corpus of the documents.
        indices: the numbers of the documents that are packed.
        tokens: T, the tokens of a batch.
        context: the tokens of the longest piece.
        seed: the seed of the order; epoch e shuffles with seed and e.
        is_rows: True if batches are (T / context, context) rows cut from the joined documents,
            without boundaries, as GPT-2's own training and nanoGPT have them.

    Raises:
        ValueError: a number is not positive, there is no document, or rows do not fill a batch.
    """

    def __init__(
        self,
        corpus: Corpus,
        indices: NDArray[np.int64],
        *,
        tokens: int,
        context: int,
        seed: int = 0,
        is_rows: bool = False,
    ) -> None:
        for name, value in (("tokens", tokens), ("context", context)):
            if value < 1:
                raise ValueError(f"{name} must be positive, got {value}")
        if len(indices) == 0:
            raise ValueError("indices must name at least one document, got none")
        if is_rows and tokens % context:
            raise ValueError(
                f"tokens must be a multiple of context {context} for rows, got {tokens}"
            )
        self.corpus, self.indices = corpus, indices
        self.tokens, self.context, self.seed, self.is_rows = tokens, context, seed, is_rows
        lengths = corpus.starts[indices + 1] - corpus.starts[indices]
        mean = max(1.0, float(np.minimum(lengths, context).mean()))
        # Twice what a batch holds on average, so that one shape serves nearly all of them.
        self.capacity = 1 << int(2 * tokens / mean + 4).bit_length()
        self.epoch = self.next = self.taken = 0
        self._order = self._shuffled()

    def state(self) -> dict[str, int]:
        """Return the place of the next batch, for `load_state`: epoch, document in the epoch's
        order, token in that document, and the number of edges of a batch."""
        return {
            "epoch": self.epoch,
            "next": self.next,
            "taken": self.taken,
            "capacity": self.capacity,
        }

    def load_state(self, state: dict[str, int]) -> None:
        """Continue at the place at which `state` was taken; the corpus and the seed must be the
        same."""
        self.epoch, self.next, self.taken = state["epoch"], state["next"], state["taken"]
        self.capacity = state["capacity"]
        self._order = self._shuffled()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.batch()

    def batch(self) -> Batch:
        """Return the next batch of T tokens, on the CPU; endless, as each epoch is shuffled
        anew."""
        pieces = self._pieces()
        starts = np.array([start for start, _ in pieces], np.int64)
        sizes = np.array([size for _, size in pieces], np.int64)
        ends = np.cumsum(sizes)
        positions = np.arange(self.tokens) - np.repeat(ends - sizes, sizes)
        places = positions + np.repeat(starts, sizes)
        ids = torch.from_numpy(self.corpus.tokens[places].astype(np.int64))
        targets = torch.from_numpy(self.corpus.tokens[places + 1].astype(np.int64))
        state = self.state()
        if self.is_rows:
            shape, pairs = (-1, self.context), self.tokens * self.context
            return Batch(
                ids.view(shape), targets.view(shape), None, None, None, len(sizes), pairs, state
            )
        while self.capacity < len(sizes):
            self.capacity *= 2  # another shape, which a compiler compiles for
            state = self.state()
        cu_seqlens = np.full(self.capacity + 1, self.tokens, np.int32)
        cu_seqlens[0] = 0
        cu_seqlens[1 : len(sizes) + 1] = ends
        documents = Documents(torch.from_numpy(cu_seqlens), min(self.context, self.tokens))
        where = torch.from_numpy(positions)
        pairs = int((sizes * sizes).sum())
        return Batch(ids, targets, where, documents, None, len(sizes), pairs, state)

    def _pieces(self) -> list[tuple[int, int]]:
        """Return the first token in the corpus and the size of each piece of the next batch;
        advance the packer."""
        pieces: list[tuple[int, int]] = []
        room, longest = self.tokens, self.tokens if self.is_rows else self.context
        while room > 0:
            index = self._order[self.next]
            first, last = (int(x) for x in self.corpus.starts[index : index + 2])
            size = min(room, longest, last - first - self.taken)
            pieces.append((first + self.taken, size))
            room -= size
            self.taken += size
            if first + self.taken == last:
                self.next, self.taken = self.next + 1, 0
                if self.next == len(self._order):
                    self.epoch, self.next = self.epoch + 1, 0
                    self._order = self._shuffled()
        return pieces

    def _shuffled(self) -> NDArray[np.int64]:
        order: NDArray[np.int64] = np.random.default_rng((self.seed, self.epoch)).permutation(
            self.indices
        )
        return order


def mask_batch(
    batch: Batch, *, share: float, mask: int, words: int, special: frozenset[int], seed: int
) -> Batch:
    """Return the batch with rows chosen for a masked model to predict, and hidden.

    Of the chosen tokens 80 % become the mask token, 10 % a random word, and 10 % stay.

    The number of places depends on T alone, so that all batches have one shape. Special tokens are
    chosen only if there are too few others; they then have no target (-100) and stay.

    Args:
        share: the share of the rows that is chosen.
        mask: id of the mask token.
        words: the size of the vocabulary, below which random ids are drawn.
        special: the ids that are not predicted.
        seed: a seed, which with the batch's place in the corpus decides all draws.

    Returns:
        A batch whose targets are (K,), for its `places`.

    Source: Devlin et al., 2019 (BERT), section 3.1.
    """
    state = batch.state
    rng = np.random.default_rng((seed, state["epoch"], state["next"], state["taken"]))
    ids = batch.ids.numpy().copy()
    count = max(1, int(len(ids) * share))
    is_special = np.isin(ids, np.array(sorted(special), dtype=ids.dtype))
    order = rng.permutation(len(ids))
    order = order[np.argsort(is_special[order], kind="stable")]
    places = np.sort(order[:count])
    targets = np.where(is_special[places], -100, ids[places])
    draw = rng.random(count)
    hidden = places[(draw < 0.8) & ~is_special[places]]
    replaced = places[(draw >= 0.8) & (draw < 0.9) & ~is_special[places]]
    ids[hidden] = mask
    ids[replaced] = rng.integers(0, words, len(replaced))
    return replace(
        batch,
        ids=torch.from_numpy(ids),
        targets=torch.from_numpy(targets),
        places=torch.from_numpy(places),
    )


def prefetch(
    batches: Iterator[Batch],
    device: torch.device,
    *,
    ahead: int = 4,
    change: Callable[[Batch], Batch] | None = None,
) -> Generator[Batch, None, None]:
    """Yield batches on `device`, made by a thread while the device computes; ends when `batches`
    does.

    Args:
        batches: the batches, on the CPU.
        ahead: the largest number of batches that wait.
        change: a function applied to each batch on the thread, masking for instance.

    An error of the thread is raised where the next batch is asked for. Closing the iterator ends
    the thread.
    """
    ready: queue.Queue[Batch | BaseException | None] = queue.Queue(ahead)
    ended = threading.Event()

    def put(value: Batch | BaseException | None) -> None:
        while not ended.is_set():
            try:
                ready.put(value, timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for batch in batches:
                changed = batch if change is None else change(batch)
                put(changed.pin() if device.type == "cuda" else changed)
                if ended.is_set():
                    return
            put(None)
        except BaseException as error:  # whatever it is, the waiting thread raises it
            put(error)

    thread = threading.Thread(target=work, name="tilewise-batches", daemon=True)
    thread.start()
    try:
        while True:
            value = ready.get()
            if value is None:
                return
            if isinstance(value, BaseException):
                raise value
            yield value.to(device)
    finally:
        ended.set()
        thread.join()
