"""The offline facade: text or token ids in, finished texts out; an Engine and a tokenizer."""

from __future__ import annotations

import gc
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilewise.engine.cpu_step import CompiledRunner, runner_for
from tilewise.engine.device_runner import DeviceRunner
from tilewise.engine.draft_runner import DraftingRunner, check_speculative, draft_runner
from tilewise.engine.engine import Engine
from tilewise.engine.graphs import MODES, prepare
from tilewise.engine.outputs import Generation, RequestOutput
from tilewise.engine.prompts import Prompt, listed, token_ids
from tilewise.engine.report import Progress, terminal
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.runner import Runner
from tilewise.engine.scheduler import Scheduler
from tilewise.engine.settings import (
    DEFAULT_BATCHED_TOKENS,
    cache_dtype,
    cache_spec,
    check_integers,
    compute_device,
    context_length,
    model_directory,
    packaged_model,
    weights_are_int8,
)
from tilewise.engine.sizing import allocate, blocks_on_cpu, blocks_on_cuda, warm_up
from tilewise.engine.speculative import DraftModel, PromptLookup
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.errors import RequestError
from tilewise.models import load_model
from tilewise.models.config import ModelConfig

__all__ = ["LLM", "packaged_model"]

# Seconds until a thread that waits for another one's step looks whether that has served it, too:
# the time of a short step, so that no thread's text lags behind by more than one.
PATIENCE = 0.002


class LLM:
    """A model ready to continue prompts, many at a time.

    Threads may share it: their requests run in the same steps, and whichever thread is free runs
    the next step for all.

    On a CPU the weights are packed for its matrix products, and a step of a Llama, Mistral or Qwen
    is one compiled call (`engine.cpu_step.why_not` tells of others). It uses as many of torch's
    threads as its work is worth. On a machine that others
    use too, GOMP_SPINCOUNT=1000 in the environment before torch is imported keeps these threads
    from spinning while they wait; the command line sets it.

    Args:
        model: a Hugging Face checkpoint directory, or "story" for the small model of the package.
        dtype: of the parameters, e.g. "bfloat16"; "auto" is the checkpoint's own.
        device: e.g. "cpu", "cuda", "cuda:1"; "auto" is a GPU if there is one.
        block_size: tokens per cache block.
        num_blocks: cache blocks; None is what max_num_seqs full contexts need, at most a quarter of
            the available main memory, or on a GPU what gpu_memory_utilization leaves.
        kv_cache_dtype: "float32", "float16", "bfloat16", or of half the memory "int8" or
            "fp8_e4m3", with a scale for each token and head; "auto" is the dtype of the parameters.
        weight_dtype: "int8" holds the weights of projections, and of an embedding tied to the
            head, in half of bfloat16's memory: int8 with a scale for every 64 inputs, on a CPU
            only. It is read faster and changes the model a little:
            `nn.packed.quantisation_error(llm.model)` tells how far each weight is from what was
            stored. "auto" holds them as stored.
        max_model_len: tokens of a sequence, prompt and generated; None is the model's own limit.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step; a longer prompt is computed in chunks.
        gpu_memory_utilization: share of a GPU's memory, in (0, 1], for weights, temporaries and
            cache together.
        enable_prefix_caching: prompts that begin alike compute the common blocks once.
        seed: from which requests without a seed draw theirs.
        random_weights: draw the weights instead of reading them, to measure a model's speed; the
            directory then needs only a config.json.
        graphs: on a GPU, steps in which every sequence draws its next token are CUDA graphs:
            captured before this returns ("auto") or when they are first needed ("lazy"), in which
            case the first ones take long. "off" computes every step op by op, and none ahead.
        use_progress: write a line of progress to stderr while graphs are captured.
        speculative: PromptLookup(...) or DraftModel(...): guess several tokens of a sequence and
            verify them in one step. What is generated stays the same. Not with CUDA graphs.

    Raises:
        CheckpointError: the directory is incomplete or wrong.
        TypeError: an argument is not of its type.
        ValueError: an argument is out of its range, or the cache does not fit the memory.

    Example:
        >>> llm = LLM("story")
        >>> [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=64))
        >>> print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_dtype: str | torch.dtype = "auto",
        weight_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        seed: int = 0,
        random_weights: bool = False,
        graphs: str = "auto",
        use_progress: bool | None = None,
        speculative: PromptLookup | DraftModel | None = None,
    ) -> None:
        check_integers(False, block_size=block_size, max_num_seqs=max_num_seqs, seed=seed)
        check_integers(
            True,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}"
            )
        if graphs not in MODES:
            raise ValueError(f"graphs must be one of {', '.join(MODES)}, got {graphs!r}")
        directory = model_directory(model)
        on = compute_device(device)
        is_int8 = weights_are_int8(weight_dtype, on)
        has_graphs = on.type == "cuda" and graphs != "off"
        check_speculative(speculative, on, has_graphs)
        self.tokenizer = load_tokenizer(directory)
        self.model = load_model(directory, dtype=dtype, device=on, random_weights=random_weights)
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.model.pack_for_inference(is_int8=is_int8)
        self.config: ModelConfig = self.model.config
        max_model_len = context_length(max_model_len, self.config)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(DEFAULT_BATCHED_TOKENS[on.type], max_num_seqs)
        parameter_dtype = self.model.dtype
        spec = cache_spec(self.config, block_size, cache_dtype(kv_cache_dtype, parameter_dtype))
        if num_blocks is None:
            num_blocks = (
                blocks_on_cpu(spec, max_num_seqs, max_model_len)
                if on.type == "cpu"
                else blocks_on_cuda(
                    self.model,
                    spec,
                    on,
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                    max_model_len=max_model_len,
                    gpu_memory_utilization=gpu_memory_utilization,
                    has_graphs=has_graphs,
                )
            )
        self._scheduler_seeds = itertools.count(seed)
        self._scheduler_settings: dict[str, Any] = {
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "enable_prefix_caching": enable_prefix_caching,
            "speculative": speculative,
        }
        storage = allocate(spec, num_blocks, on)
        runner: Runner
        if has_graphs:
            runner = on_device = DeviceRunner(
                self.model, storage, max_num_seqs=max_num_seqs, max_model_len=max_model_len
            )
            progress = Progress(terminal(use_progress))
            try:
                prepare(
                    on_device,
                    max_num_batched_tokens=max_num_batched_tokens,
                    is_lazy=graphs == "lazy",
                    show=progress.show,
                )
            finally:
                progress.close()
            # What lives now lives on: a collection that walks it again and again stops the host.
            gc.collect()
            gc.freeze()
        else:
            runner = plain = runner_for(self.model, storage, num_parameters=num_parameters)
            if isinstance(plain, CompiledRunner):
                plain.warm_up()
            else:
                warm_up(self.model, spec, on)
            if isinstance(speculative, DraftModel):
                draft = draft_runner(
                    speculative, num_blocks, block_size, self.config.vocab_size, max_model_len
                )
                runner = DraftingRunner(plain, draft, max_num_batched_tokens)
        self.engine = Engine(self._new_scheduler(), runner, overlap=has_graphs)
        end = () if self.tokenizer is None else (self.tokenizer.eos_token_id,)
        self._end_ids = tuple(
            dict.fromkeys(i for i in (*self.config.eos_token_ids, *end) if i is not None)
        )
        self._lock = threading.RLock()  # around whatever changes the engine
        self._arrived: deque[Generation] = deque()  # for the next step to add to the engine
        self._live: dict[str, Generation] = {}  # in the engine
        self._request_numbers = itertools.count()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts and return when all are done.

        Args:
            prompts: a text, {"prompt": text}, {"prompt_token_ids": [...]}, or a list of these.
            sampling_params: for all prompts, or one for each; None is SamplingParams().
            use_progress: write a line of progress to stderr.

        Returns:
            One output per prompt, in the order given.

        Raises:
            FloatingPointError: the model gave logits that are NaN or infinite.
            RequestError: a prompt can never be served; no work has been done. The message has its
                place in the list.
            TypeError: prompts or sampling_params are something else.
            ValueError: there are not as many sampling_params as prompts.
            Exception: a step has failed as a whole, as when memory is lacking: all who were in the
                engine get it. Or what the tokenizer raised over a prompt's tokens: this, or logits
                that are not finite, ends one prompt. Whoever asked for it gets the exception, with
                a note that has its place in the list, and the rest of that call is let go of;
                requests of other calls go on.
        """
        mine = self._generations(prompts, sampling_params)
        progress = Progress(terminal(use_progress))
        try:
            self._arrived.extend(mine)
            while not all(g.output.finished for g in mine):
                self._step()
                _raise_first(mine)
                progress.show(_progress_text(mine))
        finally:
            progress.close()
            self._abort(mine)
        return [g.output for g in mine]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[str]:
        """Continue one prompt and yield its text as it becomes certain.

        Dropping the iterator aborts the request. Other requests may run meanwhile.

        Raises:
            RequestError: the prompt can never be served, or n is not 1.

        The iterator raises what ends the request alone, see generate(), after the text before it.
        """
        [generation] = self._generations(prompt, sampling_params)
        if generation.request.sampling.num_samples != 1:
            raise RequestError(
                "n, best_of and beam_width must be 1 to stream, "
                f"got {generation.request.sampling.num_samples}"
            )
        return self._stream(generation)

    def _stream(self, generation: Generation) -> Iterator[str]:
        try:
            self._arrived.append(generation)
            while True:
                is_finished = generation.output.finished  # before its last text is read
                delta = generation.unread_text()
                if delta:
                    yield delta
                elif is_finished:
                    _raise_first([generation])
                    return
                else:
                    self._step()
        finally:
            self._abort([generation])

    def _generations(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
    ) -> list[Generation]:
        """Check everything and change nothing."""
        is_alone = isinstance(prompts, (str, bytes, Mapping))
        many = listed("prompts", [prompts] if is_alone else prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(many)
        given = listed("sampling_params", params)
        if len(given) != len(many):
            raise ValueError(
                f"sampling_params must be one or as many as the {len(many)} prompts, "
                f"got {len(given)}"
            )
        for sampling in given:
            if not isinstance(sampling, SamplingParams):
                raise TypeError(
                    f"sampling_params must be SamplingParams, got {type(sampling).__name__}"
                )
        generations = []
        for i, (prompt, sampling) in enumerate(zip(many, given, strict=True)):
            try:
                generations.append(self._generation(prompt, sampling))
            except RequestError as error:
                raise RequestError(str(error) if is_alone else f"prompts[{i}]: {error}") from None
        return generations

    def _generation(self, prompt: Prompt, sampling: SamplingParams) -> Generation:
        text, ids = token_ids(prompt, self.tokenizer)
        if sampling.stop_strings and self.tokenizer is None:
            raise RequestError("stop must be None for a model without tokenizer, got strings")
        request = Request(f"request-{next(self._request_numbers)}", ids, sampling, self._end_ids)
        self.engine.scheduler.limits.check(request)
        width = getattr(sampling, "beam_width", 0)
        if width > self.config.vocab_size:
            raise RequestError(
                f"beam_width must be at most vocab_size {self.config.vocab_size}, got {width}"
            )
        if max(ids) >= self.config.vocab_size:
            raise RequestError(
                f"prompt token ids must be below vocab_size {self.config.vocab_size}, "
                f"got {max(ids)}"
            )
        return Generation(request, text, self.tokenizer)

    def _step(self) -> None:
        """Run one step for everything that is live, or wait a moment for another thread's."""
        if not self._lock.acquire(timeout=PATIENCE):
            return
        try:
            self._step_all()
        except BaseException as error:
            live = list(self._live.values())
            if isinstance(error, Exception):  # whoever waits for one of these gets it, too
                for generation in live:
                    generation.fail(error)
            self._abort(live)
            if not isinstance(error, Exception):
                # An interrupt can come between any two instructions of the scheduler.
                self.engine.restart(self._new_scheduler())
            raise
        finally:
            self._lock.release()

    def _step_all(self) -> None:
        while self._arrived:
            generation = self._arrived[0]
            self._live[generation.request.request_id] = generation
            self._arrived.popleft()
            self.engine.add_request(generation.request)
        for event in self.engine.step():
            live = self._live.get(event.request_id)
            if live is None:
                continue  # somebody else's, given to the engine directly
            try:
                live.take(event)
            except Exception as error:  # of its tokenizer: nobody else's text is worse for it
                live.fail(error)
                self.engine.abort(event.request_id)
            completion = live.samples[event.index]
            if event.finish_reason is None and completion.finish_reason == FinishReason.STOP:
                self.engine.finish(
                    event.request_id, event.index, FinishReason.STOP, completion.stop_reason
                )
            if live.output.finished:
                self._live.pop(event.request_id)

    def _abort(self, generations: Sequence[Generation]) -> None:
        """Let go of those that have not finished."""
        if all(g.output.finished and not g.error for g in generations):
            return  # without waiting for the step of another thread
        with self._lock:
            for generation in generations:
                if generation in self._arrived:
                    self._arrived.remove(generation)
                if self._live.pop(generation.request.request_id, None) is not None:
                    self.engine.abort(generation.request.request_id)
                generation.abort()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(seed=next(self._scheduler_seeds), **self._scheduler_settings)


def _raise_first(generations: Sequence[Generation]) -> None:
    """Raise the error of the first that has failed, if one has."""
    for place, generation in enumerate(generations):
        if generation.error is not None:
            if len(generations) > 1:
                generation.error.add_note(f"This ended prompts[{place}].")
            raise generation.error


def _progress_text(generations: Sequence[Generation]) -> str:
    done = sum(g.output.finished for g in generations)
    tokens = sum(len(c.token_ids) for g in generations for c in g.output.outputs)
    return f"{done}/{len(generations)} prompts, {tokens:,} tokens"
