"""A runner before whose steps a smaller model guesses tokens.

The draft model keeps its keys and values under the same block ids, in a storage of its own. What a
sequence has there may lag behind: the first guess computes what is missing, in chunks, and nothing
else is computed for the draft model. Wrong contents cost accepted guesses, never a token, for the
model verifies each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tilewise.cache.prefix import first_block
from tilewise.cache.spec import CacheSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.config import DraftModel, OwnHead, PromptLookup
from tilewise.engine.memory import check_memory, free_memory
from tilewise.engine.scheduling.speculative import DRAFT
from tilewise.engine.settings import cache_spec, model_directory
from tilewise.engine.sizing import allocate
from tilewise.engine.steps.cpu_step import CompiledRunner, runner_for
from tilewise.engine.steps.head_guesser import HeadGuesser
from tilewise.engine.steps.runner import Finished, ModelRunner
from tilewise.engine.steps.verifying import VerifyingRunner
from tilewise.engine.tables.host_cache import HostCache
from tilewise.models import Decoder, load_model
from tilewise.nn import Attention

__all__ = [
    "DraftingRunner",
    "Guesser",
    "captured_guesser_of",
    "check_speculative",
    "draft_spec",
    "guesser_of",
    "load_draft",
]


def check_speculative(
    speculative: PromptLookup | DraftModel | OwnHead | None,
    device: torch.device,
    batch_invariant: bool = False,
    *,
    num_ranks: int = 1,
    has_graphs: bool = False,
) -> None:
    """Refuse a way to guess tokens that the engine does not have, or cannot verify.

    Args:
        speculative: the way to guess tokens that the config names.
        device: the device of the model.
        batch_invariant: whether a row's bits must not depend on others.
        num_ranks: the number of devices that share the model.
        has_graphs: whether steps are CUDA graphs.

    Raises:
        TypeError: speculative is neither None nor an object of one of the three classes.
        ValueError: ranks share a model whose steps are CUDA graphs, a draft model would guess for
            several GPUs, or guesses are trees where a row's bits must not depend on them.
    """
    if speculative is None:
        return
    if not isinstance(speculative, PromptLookup | DraftModel | OwnHead):
        raise TypeError(
            f"speculative must be PromptLookup, DraftModel, OwnHead or None, got {speculative!r}"
        )
    if num_ranks > 1 and has_graphs:
        raise ValueError(
            "speculative must be None where tensor_parallel_size is above 1 and steps are CUDA "
            f"graphs (graphs='off' computes them op by op), got {speculative!r}"
        )
    if isinstance(speculative, DraftModel) and device.type != "cpu" and num_ranks > 1:
        raise ValueError(
            "speculative must be PromptLookup or None where GPUs share a model, "
            f"got {speculative!r}"
        )
    if batch_invariant and getattr(speculative, "num_branches", 1) > 1:
        raise ValueError(
            "num_branches must be 1 with batch_invariant=True, the default on a CPU: the rows of a "
            f"branch add keys in an order of their own, got {speculative!r}"
        )


def guesser_of(
    speculative: DraftModel,
    num_blocks: int,
    block_size: int,
    vocab_size: int,
    max_model_len: int,
    max_chunk: int,
    window: int | None = None,
) -> Guesser:
    """Load a draft model that runs on the CPU, with as many cache blocks as the target model.

    Args:
        speculative: the options of the draft model, from the config.
        num_blocks, block_size: the sizes of the cache of the target's first group of layers.
        vocab_size: the target model's vocabulary, which the draft model must have too.
        max_model_len: the most tokens of a sequence, for which the draft model must have positions.
        max_chunk: tokens of one sequence that the draft model computes at a time.
        window: the window of the target's first group of layers, in tokens; None is unlimited.

    Raises:
        CheckpointError: the draft model's directory is incomplete or wrong.
        ValueError: its vocabulary is another, it has fewer positions than sequences may have, or
            memory does not hold its cache.
    """
    device = torch.device("cpu")

    def fits(model: Decoder) -> None:
        spec = cache_spec(model.config, block_size, model.dtype)
        check_memory(model, spec, device, free_memory(device), num_blocks=num_blocks)

    model = load_draft(speculative, device, vocab_size, max_model_len, window, fits)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    model.pack_for_inference(is_int8=False)
    storage = _storage_of(model, num_blocks, block_size, window)
    runner = runner_for(model, storage, num_parameters=num_parameters)
    if isinstance(runner, CompiledRunner):
        runner.warm_up()
    return Guesser(runner, max_chunk, window)


def captured_guesser_of(
    model: Decoder,
    num_blocks: int,
    block_size: int,
    max_chunk: int,
    window: int | None,
    *,
    max_num_seqs: int,
    max_model_len: int,
    has_graphs: bool,
) -> Guesser:
    """Return the guesser of a draft model whose short runs are CUDA graphs.

    A short run of the draft model has one row, the last token that was drawn; or two, if before it
    stands a guess that the model has found right and the draft model has not computed yet.

    Args:
        model: the draft model, on its device.
        num_blocks, block_size, max_chunk, window: see `guesser_of`.
        max_num_seqs, max_model_len: see `VerifyingRunner`.
        has_graphs: whether the draft model's steps are captured; else they run op by op.

    Raises:
        ValueError: there is no memory for the cache.
    """
    runner = VerifyingRunner(
        model,
        _storage_of(model, num_blocks, block_size, window),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_drafts=1,
        pads=has_graphs,
    )
    return Guesser(runner, max_chunk, window)


def draft_spec(model: Decoder, block_size: int) -> CacheSpec:
    """Return the cache spec of a draft model: all its layers in one group, for whole block tables.

    So the draft model can use the block tables of the model's first group of layers.
    """
    spec = cache_spec(model.config, block_size, model.dtype)
    return CacheSpec(spec.num_layers, block_size, spec.kv, sources=spec.sources)


def _storage_of(model: Decoder, num_blocks: int, block_size: int, window: int | None) -> KVStorage:
    device = next(iter(model.parameters())).device
    storage = allocate(draft_spec(model, block_size), num_blocks, device)
    for tensor in storage.whole if window is not None else ():
        tensor.zero_()  # the first tokens behind a window see keys that were never written
    return storage


def load_draft(
    speculative: DraftModel,
    device: torch.device,
    vocab_size: int,
    max_model_len: int,
    window: int | None,
    before: Callable[[Decoder], None],
) -> Decoder:
    """Load a draft model, check that it fits the model for which it guesses, and narrow its
    windows.

    Args:
        speculative: the way to guess tokens that the config names.
        device: the device that it computes on.
        vocab_size, max_model_len: the model's vocabulary, and the most tokens of a sequence.
        window: the window of the model's first group of layers; the draft model does not see the
            keys behind it either.
        before: a function that is called with the model before its weights are read, see
            `load_model`.

    Raises:
        CheckpointError: its directory is incomplete or wrong.
        ValueError: its vocabulary is another, or it has fewer positions than sequences may have.
    """
    model = load_model(
        model_directory(speculative.model), dtype=speculative.dtype, device=device, before=before
    )
    config = model.config
    if config.vocab_size != vocab_size:
        raise ValueError(
            f"the draft model's vocab_size must be the model's {vocab_size}, "
            f"got {config.vocab_size}"
        )
    if config.context_length < max_model_len:
        raise ValueError(
            f"the draft model's positions must be at least max_model_len {max_model_len}, "
            f"got {config.context_length}"
        )
    if window is not None:
        narrow_windows(model, window)
    return model


def narrow_windows(model: Decoder, window: int) -> None:
    """Narrow the window of every layer of a model to at most `window` keys, in place.

    Raises:
        ValueError: a layer of the model does not keep keys and values.
    """
    windows = tuple(window if own is None else min(own, window) for own in model.config.windows)
    model.config = model.config.with_windows(windows)
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    if len(attentions) != len(windows):
        raise ValueError(
            "the draft model must keep keys and values in every layer for a model all of whose "
            f"layers have windows, got {type(model).__name__}"
        )
    for attention, own in zip(attentions, windows, strict=True):
        attention.window = own


class Guesser:
    """Fills in the guesses of batches by a draft model.

    Args:
        draft: the runner of the draft model, over a storage of as many blocks of the same size as
            the model's.
        max_chunk: tokens of one sequence that the draft model computes at a time.
        window: the window of the model's first group of layers, by whose tables the draft model
            reads. A block behind it may belong to another sequence: the draft model begins with the
            keys that the next query sees, and its first guesses are the worse for it.
    """

    def __init__(self, draft: ModelRunner, max_chunk: int, window: int | None = None) -> None:
        self.draft, self.max_chunk, self.window = draft, max_chunk, window
        self._num_known: dict[int, int] = {}  # tokens that the draft model has of a sequence
        self._left: list[int] = []

    def reset(self) -> None:
        """Forget all sequences, here and in the runner of the draft model."""
        self._num_known, self._left = {}, []
        self.draft.reset()

    def guess(self, batch: Batch) -> Batch:
        """Return the batch with the draft model's guesses in place of DRAFT; itself if none are
        asked for.

        Before it guesses, the draft model copies the batch's blocks in its own cache, and computes
        the known tokens that it lacks. One pass of the draft model gives one guess of each
        sequence.
        """
        if batch.block_copies:
            pairs = torch.tensor(batch.block_copies, dtype=torch.int64)
            self.draft.copy(pairs.to(self.draft.device))
        for seq_id in batch.left:
            self._num_known.pop(seq_id, None)
        self._left += batch.left
        size, num_known = self.draft.block_size, self._num_known
        asking = []
        for run in batch.sequences:
            if run.seq_id in num_known:  # blocks that changed hold what another has put there
                kept = min(run.first_new_block * size, run.start)
                num_known[run.seq_id] = min(num_known[run.seq_id], kept)
            if DRAFT in run.token_ids:
                asking.append(run)
        if not asking:
            return batch
        self._catch_up(asking)
        guesses: dict[int, list[int]] = {run.seq_id: [] for run in asking}
        for i in range(max(run.num_drafts for run in asking)):
            runs = [self._run_of(run, guesses[run.seq_id]) for run in asking if run.num_drafts > i]
            drawn = self._submit(runs).result()
            for run, tokens in zip(runs, drawn, strict=True):
                guesses[run.seq_id].append(max(tokens[0].token_id, 0))
                num_known[run.seq_id] = run.start + len(run.token_ids)
        return replace(
            batch,
            sequences=tuple(
                run._replace(token_ids=(run.token_ids[0], *guesses[run.seq_id]))
                if run.seq_id in guesses
                else run
                for run in batch.sequences
            ),
        )

    def _catch_up(self, asking: list[ScheduledSequence]) -> None:
        """Run the draft model over known tokens that it lacks, `max_chunk` tokens of one sequence
        in a pass.

        The last of each sequence, at most `max_chunk`, are left for the pass of its first guess.
        Tokens in blocks that the window has passed are left out: another sequence may have these
        blocks.
        """
        for run in asking:
            size, most = self.draft.block_size, self.max_chunk
            kept = first_block(run.start, self.window, size) * size
            first = max(self._num_known.get(run.seq_id, 0), kept)
            while len(run.known) - first > most:
                tokens = tuple(run.known[first : first + most])
                self._submit([run._replace(token_ids=tokens, start=first, num_samples=0, seeds=())])
                first += most
            self._num_known[run.seq_id] = first

    def _run_of(self, run: ScheduledSequence, guesses: list[int]) -> ScheduledSequence:
        """Return the run by which the draft model draws the next guess of a sequence.

        Its tokens are those that the draft model has not computed yet: of the known ones, and of
        `guesses`, the guesses so far. The guess is drawn by the random number with which the
        model that verifies it will draw the token at that position.

        Args:
            run: the sequence's run in the batch of the model that verifies the guesses.
            guesses: the guesses after the known tokens, in order.
        """
        first = self._num_known[run.seq_id]
        tokens = (*run.known[first:], *guesses[max(first - len(run.known), 0) :])
        return run._replace(
            token_ids=tokens, start=first, num_generated=run.num_generated + len(guesses)
        )

    def _submit(self, runs: list[ScheduledSequence]) -> Finished:
        left, self._left = tuple(self._left), []
        plain = tuple(
            run._replace(first_new_block=0, num_drafts=0, known=(), others=()) for run in runs
        )
        return self.draft.submit(Batch(plain, (), left))


class DraftingRunner:
    """A runner that fills in the guesses of a batch, and then runs it by the model's own runner.

    Args:
        runner: the runner of the model.
        guesser: the guesser, with a draft model or with the model's own head, to which each step's
            hidden states are shown.

    Attributes:
        storage: the paged cache of the model.
    """

    def __init__(self, runner: ModelRunner, guesser: Guesser | HeadGuesser) -> None:
        self.runner, self.guesser = runner, guesser
        if isinstance(guesser, HeadGuesser):
            runner.watch = guesser.note
        self.storage: KVStorage = runner.storage

    @property
    def num_compilations(self) -> int:
        """Kernels that were compiled since the runner was ready."""
        return self.runner.num_compilations

    def count_compilations(self) -> None:
        """Begin to count compiled kernels at 0, in the model's runner."""
        self.runner.count_compilations()

    @property
    def host(self) -> HostCache | None:
        """Main memory for blocks of the model; the draft model's are not moved there but computed
        again."""
        return self.runner.host

    @host.setter
    def host(self, host: HostCache | None) -> None:
        self.runner.host = host

    def submit(self, batch: Batch) -> Finished:
        """Fill in the guesses of a batch, then submit it to the model's runner; return its
        handle."""
        return self.runner.submit(self.guesser.guess(batch))

    def reset(self) -> None:
        """Forget all sequences, in the model's runner and in the guesser."""
        self.runner.reset()
        self.guesser.reset()

    def is_lost(self) -> bool:
        """Whether the device can compute no more."""
        return self.runner.is_lost()
