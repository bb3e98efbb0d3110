"""The offline facade: text or token ids in, finished texts out; an Engine and a tokenizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilewise.cache.storage import KVStorage
from tilewise.engine.engine import Engine
from tilewise.engine.outputs import Generation, RequestOutput
from tilewise.engine.report import Progress, terminal
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.runner import ModelRunner
from tilewise.engine.scheduler import Scheduler
from tilewise.engine.settings import (
    DEFAULT_BATCHED_TOKENS,
    cache_dtype,
    cache_spec,
    compute_device,
    context_length,
    model_directory,
    packaged_model,
)
from tilewise.engine.sizing import blocks_on_cpu, blocks_on_cuda, warm_up
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.errors import RequestError
from tilewise.models import load_model
from tilewise.models.config import ModelConfig

__all__ = ["LLM", "packaged_model"]

Prompt = str | Mapping[str, Any]


class LLM:
    """A model ready to continue prompts, many at a time.

    Args:
        model: a Hugging Face checkpoint directory, or "story" for the small model of the package.
        dtype: of the parameters, e.g. "bfloat16"; "auto" is the checkpoint's own.
        device: e.g. "cpu", "cuda", "cuda:1"; "auto" is a GPU if there is one.
        block_size: tokens per cache block.
        num_blocks: cache blocks; None is what max_num_seqs full contexts need, at most a quarter of
            the available main memory, or on a GPU what gpu_memory_utilization leaves.
        kv_cache_dtype: "float32", "float16" or "bfloat16"; "auto" is the dtype of the parameters.
        max_model_len: tokens of a sequence, prompt and generated; None is the model's own limit.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: tokens of one step; a longer prompt is computed in chunks.
        gpu_memory_utilization: share of a GPU's memory, in (0, 1], for weights, temporaries and
            cache together.
        enable_prefix_caching: prompts that begin alike compute the common blocks once.
        seed: from which requests without a seed draw theirs.

    Raises:
        CheckpointError: the directory is incomplete or wrong.
        ValueError: an argument is out of its range.

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
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        seed: int = 0,
    ) -> None:
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(
                f"gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}"
            )
        directory = model_directory(model)
        on = compute_device(device)
        self.tokenizer = load_tokenizer(directory)
        self.model = load_model(directory, dtype=dtype, device=on)
        self.config: ModelConfig = self.model.config
        max_model_len = context_length(max_model_len, self.config)
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max(DEFAULT_BATCHED_TOKENS[on.type], max_num_seqs)
        parameter_dtype = self.model.embed_tokens.weight.dtype
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
        }
        runner = ModelRunner(self.model, KVStorage(spec, num_blocks, on))
        self.engine = Engine(self._new_scheduler(), runner)
        warm_up(self.model, spec, on)
        end = () if self.tokenizer is None else (self.tokenizer.eos_token_id,)
        self._end_ids = tuple(
            dict.fromkeys(i for i in (*self.config.eos_token_ids, *end) if i is not None)
        )
        self._live: dict[str, Generation] = {}
        self._request_ids = (f"request-{i}" for i in itertools.count())

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue prompts and return when all are done.

        Args:
            prompts: a text, {"prompt_token_ids": [...]}, or a list of these.
            sampling_params: for all prompts, or one for each; None is SamplingParams().
            use_progress: write a line of progress to stderr.

        Returns:
            One output per prompt, in the order given.

        Raises:
            RequestError: a prompt can never be served; no work has been done. The message has its
                place in the list.
            ValueError: there are not as many sampling_params as prompts.
        """
        mine = self._generations(prompts, sampling_params)
        progress = Progress(terminal(use_progress))
        try:
            for generation in mine:
                self._start(generation)
            while not all(g.output.finished for g in mine):
                self._step()
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
        """
        if sampling_params is not None and sampling_params.n != 1:
            raise RequestError(f"n must be 1 to stream, got {sampling_params.n}")
        [generation] = self._generations(prompt, sampling_params)
        return self._stream(generation)

    def _stream(self, generation: Generation) -> Iterator[str]:
        try:
            self._start(generation)
            while True:
                delta = generation.unread_text()
                if delta:
                    yield delta
                elif generation.output.finished:
                    return
                else:
                    self._step()
        finally:
            self._abort([generation])

    def _generations(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Generation]:
        """Check everything and change nothing."""
        alone = isinstance(prompts, (str, Mapping))
        listed: Sequence[Prompt] = [prompts] if alone else prompts  # type: ignore[list-item,assignment]
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(listed)
        if len(params) != len(listed):
            raise ValueError(
                f"sampling_params must be one or as many as the {len(listed)} prompts, "
                f"got {len(params)}"
            )
        generations = []
        for i, (prompt, sampling) in enumerate(zip(listed, params, strict=True)):
            try:
                generations.append(self._generation(prompt, sampling))
            except RequestError as error:
                raise RequestError(str(error) if alone else f"prompts[{i}]: {error}") from None
        return generations

    def _generation(self, prompt: Prompt, sampling: SamplingParams) -> Generation:
        text, ids = self._token_ids(prompt)
        if sampling.stop_strings and self.tokenizer is None:
            raise RequestError("stop must be None for a model without tokenizer, got strings")
        request = Request(next(self._request_ids), ids, sampling, self._end_ids)
        self.engine.scheduler.limits.check(request)
        if max(ids) >= self.config.vocab_size:
            raise RequestError(
                f"prompt token ids must be below vocab_size {self.config.vocab_size}, "
                f"got {max(ids)}"
            )
        return Generation(request, text, self.tokenizer)

    def _token_ids(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "prompt must be token ids for a model without tokenizer, got text"
                )
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Mapping) and "prompt_token_ids" in prompt:
            ids = list(prompt["prompt_token_ids"])
            wrong = [i for i in ids if not isinstance(i, int) or isinstance(i, bool)]
            if wrong:
                raise RequestError(f"prompt token ids must be integers, got {wrong[0]!r}")
            return prompt.get("prompt"), ids
        raise RequestError(
            f'prompt must be a str or {{"prompt_token_ids": [...]}}, got {type(prompt).__name__}'
        )

    def _start(self, generation: Generation) -> None:
        self.engine.add_request(generation.request)
        self._live[generation.request.request_id] = generation

    def _step(self) -> None:
        """Run one step for everything that is live, whoever asked for it."""
        try:
            for event in self.engine.step():
                generation = self._live.get(event.request_id)
                if generation is None:
                    continue  # somebody else's, given to the engine directly
                generation.take(event)
                completion = generation.output.outputs[event.index]
                if event.finish_reason is None and completion.finish_reason is not None:
                    self.engine.finish(
                        event.request_id, event.index, FinishReason.STOP, completion.stop_reason
                    )
        except BaseException as error:
            self._abort(list(self._live.values()))
            if not isinstance(error, Exception):
                # An interrupt can come between any two instructions of the scheduler.
                self.engine.scheduler = self._new_scheduler()
            raise

    def _abort(self, generations: Sequence[Generation]) -> None:
        """Let go of generations, finished or not."""
        for generation in generations:
            if self._live.pop(generation.request.request_id, None) is not None:
                self.engine.abort(generation.request.request_id)
                generation.abort()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(seed=next(self._scheduler_seeds), **self._scheduler_settings)


def _progress_text(generations: Sequence[Generation]) -> str:
    done = sum(g.output.finished for g in generations)
    tokens = sum(len(c.token_ids) for g in generations for c in g.output.outputs)
    return f"{done}/{len(generations)} prompts, {tokens:,} tokens"
