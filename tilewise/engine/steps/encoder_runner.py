"""The runner of an encoder: texts packed end to end, each whole in one step, to one vector each.

There is no cache: a batch's blocks are seats, of which the scheduler gives one to each text, and
nothing is written to them. A vector comes with the only token of its request, which is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import BROKEN, Batch, SampledToken, ScheduledSequence
from tilewise.engine.steps.compilations import CpuCompilations
from tilewise.engine.steps.inputs import send
from tilewise.engine.steps.runner import Samples, is_device_lost
from tilewise.engine.tables.host_cache import HostCache
from tilewise.models.encoder import Encoder, Packed
from tilewise.models.transformers_encoder import TransformersEncoder

__all__ = ["EncoderRunner"]

Ids = NDArray[np.int64]


class _Handle:
    """A step whose vectors may still be computed."""

    def __init__(self, batch: Batch, vectors: Tensor) -> None:
        self._batch, self._vectors = batch, vectors

    def result(self) -> Samples:
        """Wait for the vectors and return the tokens of each text, which carry its vector.

        A text has `num_samples` equal tokens of id 0 with the vector as `prompt_state`, or BROKEN
        ones if the vector is not finite.
        """
        found = self._vectors.cpu()
        are_finite = found.isfinite().all(dim=1).tolist()
        samples = Samples()
        for run, vector, is_finite in zip(
            self._batch.sequences, found.tolist(), are_finite, strict=True
        ):
            token = SampledToken(0, prompt_state=tuple(vector)) if is_finite else BROKEN
            samples.append([token] * run.num_samples)
        return samples


class EncoderRunner:
    """Runs an encoder and its head; see `runner.Runner`.

    Args:
        model: the encoder, on its device.

    Attributes:
        storage, host: None: nothing is cached, and no block moves.
    """

    def __init__(self, model: Encoder | TransformersEncoder) -> None:
        self.model = model
        self.storage: KVStorage | None = None
        self.host: HostCache | None = None
        self.device = model.device
        self._compilations: CpuCompilations | None = None

    @property
    def num_compilations(self) -> int:
        """Kernels that were compiled since `warm_up`, on a CPU; else 0."""
        return 0 if self._compilations is None else self._compilations.count

    def warm_up(self) -> None:
        """Run two short texts, so that no request waits for kernels, and count from now on."""
        ids = np.zeros(3, dtype=np.int64)
        with torch.inference_mode():
            self.model(self._packed(ids, [1, 2], None))
        if self.device.type == "cpu":
            self._compilations = CpuCompilations()

    def submit(self, batch: Batch) -> _Handle:
        """Begin a step of whole texts and return its handle; the device may still compute it."""
        runs = batch.sequences
        assert all(run.start == 0 and run.asked is not None for run in runs)
        lengths = [len(run.token_ids) for run in runs]
        ids = np.fromiter(chain.from_iterable(run.token_ids for run in runs), dtype=np.int64)
        packed = self._packed(ids, lengths, _types(runs, len(ids)))
        with torch.inference_mode():
            vectors = self.model(packed)
            if not self.model.gives_vectors:
                vectors = _pooled(vectors, packed.cu_seqlens.long(), runs)
            if self.model.head is not None:
                vectors = self.model.head(vectors)
        return _Handle(batch, vectors)

    def _packed(self, ids: Ids, lengths: list[int], types: Ids | None) -> Packed:
        edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = np.arange(len(ids)) - np.repeat(edges[:-1], lengths)
        parts: list[NDArray[np.integer]] = [ids, positions.astype(np.int64), edges]
        sent = send(parts if types is None else [*parts, types], self.device)
        more = None if types is None else sent[3]
        return Packed(sent[0], sent[1], more, sent[2], max(lengths))

    def reset(self) -> None:
        """Do nothing: the runner knows nothing of a text beyond its step."""

    def is_lost(self) -> bool:
        """Whether the device can compute no more."""
        return is_device_lost(self.device)


def _types(runs: Sequence[ScheduledSequence], num_rows: int) -> Ids | None:
    """Return the type id of each row of the step (T,); None if no text has types.

    Rows of a text without types get 0.
    """
    told = [run.asked.token_type_ids for run in runs if run.asked is not None]
    if not any(told):
        return None
    types, row = np.zeros(num_rows, dtype=np.int64), 0
    for run, own in zip(runs, told, strict=True):
        if own:
            types[row : row + len(own)] = own
        row += len(run.token_ids)
    return types


def _pooled(states: Tensor, edges: Tensor, runs: Sequence[ScheduledSequence]) -> Tensor:
    """Return the vector of each text (B, E), float32; texts may be pooled in different ways."""
    kinds = [run.asked.pooling for run in runs if run.asked is not None]
    found: Tensor | None = None
    for kind in dict.fromkeys(kinds):
        vectors = _pooled_alike(states, edges, str(kind))
        if found is None:
            found = vectors
            continue
        places = [place for place, other in enumerate(kinds) if other == kind]
        index = torch.tensor(places, device=states.device)
        found = found.index_copy(0, index, vectors.index_select(0, index))
    assert found is not None, "a step has a text"
    return found


def _pooled_alike(states: Tensor, edges: Tensor, kind: str) -> Tensor:
    if kind == "cls":
        return states.index_select(0, edges[:-1]).float()
    if kind == "last":
        return states.index_select(0, edges[1:] - 1).float()
    wide = states.float()
    if kind == "weightedmean":
        counts = torch.diff(edges)
        starts = torch.repeat_interleave(edges[:-1], counts, output_size=len(states))
        weights = torch.arange(len(states), device=states.device) - starts + 1
        sums = _reduced(wide * weights[:, None], edges, "sum")
        return sums / (counts * (counts + 1) / 2)[:, None]
    return _reduced(wide, edges, kind)


def _reduced(rows: Tensor, edges: Tensor, kind: str) -> Tensor:
    """Return the sum, the mean or the largest of each channel over the rows of each text (B, E).

    `kind` is "sum", "mean" or "max"; text i has the rows edges[i] ... edges[i + 1] - 1.
    """
    # Lengths are known to be those of the rows: a check would wait for the device.
    return torch.segment_reduce(rows, kind, offsets=edges, axis=0, unsafe=True)
