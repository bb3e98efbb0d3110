"""The offline facade: text or token ids in, finished texts out; an Engine and a tokenizer."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch

from tilewise.cache.spec import CacheSpec
from tilewise.engine.adapters import Adapters, salted
from tilewise.engine.config import (
    LEAST_MAX_RANK,
    NO_TERMS,
    EngineConfig,
    RequestTerms,
    Terms,
    check_name,
    documented,
)
from tilewise.engine.engine import Engine
from tilewise.engine.loading import load, load_encoder_of, read_head
from tilewise.engine.loop import EngineLoop
from tilewise.engine.making import EncoderMaker, EngineMaker, StartSeconds
from tilewise.engine.options import Options
from tilewise.engine.outputs import Generation, RequestOutput
from tilewise.engine.prompts import Prompt, listed, token_ids
from tilewise.engine.purpose import read_purpose
from tilewise.engine.report import Progress, terminal
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.sampling_defaults import sampling_defaults
from tilewise.engine.scoring import (
    ClassifyOutput,
    RerankOutput,
    ScoreOutput,
    activated,
    classified,
    compared,
    pair_prompt,
    pairs_of,
    ranked,
)
from tilewise.engine.settings import (
    ResolvedConfig,
    check_groups,
    check_weights,
    compute_device,
    end_tokens,
    is_invariant,
    model_directory,
    packaged_model,
    runs_graphs,
)
from tilewise.engine.steps.draft_runner import check_speculative
from tilewise.engine.steps.embedding import (
    EMBEDDING_PARAMS,
    POOLINGS,
    EmbeddingOutput,
    embedding_of,
)
from tilewise.engine.tables.offload import fingerprint
from tilewise.engine.tensor_parallel.runner import (
    ParallelRunner,
    engine_of_workers,
)
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.engine.waiter import Waiter, progress_text, raise_first, share_done
from tilewise.errors import RequestError, shown
from tilewise.keywords import keywords_of, taking_fields_of
from tilewise.models.adapters import MAX_RANK, AdapterSite, adapter_sites
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.encoder import Encoder, EncoderShape
from tilewise.models.native import NativeDecoder
from tilewise.models.registry import empty_model
from tilewise.models.transformers_encoder import TransformersEncoder
from tilewise.models.vector_head import VectorHead

__all__ = ["LLM", "packaged_model"]


@documented(EngineConfig)
class LLM:
    """A model ready to continue prompts, many at a time.

    Threads may share it: their requests run in the same steps, on a thread of the engine's own,
    which ends with `close()`, or with the last reference to the LLM. An interrupt (Ctrl-C) ends the
    requests of the call that it interrupts.

    On a CPU the weights are packed for its matrix products, and a step of a Llama, Mistral or Qwen
    is one compiled call (`cpu_step.why_not` tells of others). It uses as many threads as its
    work is worth, at most those that torch has on the thread that makes the LLM (a later
    torch.set_num_threads there counts from the next request). On a machine that others
    use too, GOMP_SPINCOUNT=1000 in the environment before torch is imported keeps these threads
    from spinning while they wait; the command line sets it.

    Args:
        model: a Hugging Face checkpoint directory, or "story" for the small model of the package.
        <options>

    Attributes:
        default_params: the parameters of a call that gives none: temperature, top_p, top_k, min_p,
            repetition_penalty and max_new_tokens of the model's generation_config.json.
        purpose: the tasks of the model: generate(), embed(), score() and rerank(), classify().

    Raises:
        CheckpointError: the directory is incomplete or wrong.
        TypeError: an argument is not of its type.
        ValueError: an argument is out of its range, or the cache does not fit the memory.

    Example:
        >>> llm = LLM("story")
        >>> [output] = llm.generate("Once upon a time", SamplingParams(max_tokens=64))
        >>> print(output.outputs[0].text)
    """

    @taking_fields_of(EngineConfig)
    def __init__(self, config: EngineConfig) -> None:
        directory = model_directory(config.model)
        device = compute_device(config.device)
        check_weights(config, device)
        check_speculative(
            config.speculative,
            device,
            runs_graphs(config, device),
            is_invariant(config, device),
        )
        self.start_seconds = StartSeconds()
        self.tokenizer = load_tokenizer(directory)
        self.default_params = SamplingParams(**sampling_defaults(directory))
        self.purpose = read_purpose(
            directory,
            self.tokenizer,
            score_tokens=config.score_tokens,
            pair_template=config.pair_template,
        )
        self.model: Decoder | Encoder | TransformersEncoder
        self.config: ModelConfig | EncoderShape
        self.tensor_parallel_size = size = config.tensor_parallel_size
        self.devices = str(device) if size == 1 else f"{size} x {device.type}"
        self._num_threads = torch.get_num_threads()
        self._request_numbers, self._maker = itertools.count(), threading.get_ident()
        make_engine: Callable[[], Engine]
        head: VectorHead | None = None
        self._end_ids: tuple[int, ...] = ()
        self._adapters: Adapters | None = None
        if self.purpose.is_encoder:
            self.model, decided = load_encoder_of(config, directory, device, self.purpose)
            self.config = self.model.config
            make_engine = self._of_encoder(decided, self.model)
        else:
            model, spec, decided = load(config, directory, device)
            self.model, self.config = model, model.config
            check_groups(model.config, config.speculative)
            self._end_ids = end_tokens(self.config, self.tokenizer)
            head = read_head(self.purpose, directory, model, is_random=config.random_weights)
            sites: Mapping[str, AdapterSite] = {}
            if config.enable_lora:
                sites, rank = self._with_adapters(config, model)
                decided = replace(decided, max_lora_rank=rank)
            if size == 1:
                make_engine = self._with_weights(decided, directory, model, spec, sites)
            else:
                make_engine = functools.partial(
                    engine_of_workers, decided, directory, model, self._end_ids
                )
        self._options = Options(self.tokenizer, self.config.vocab_size, self._end_ids)
        self.loop = EngineLoop(make_engine)
        self.engine.head = head
        self._store = self.engine.store
        runner = self.engine.runner
        if isinstance(runner, ParallelRunner):
            runner.end_with_workers(self.loop)
            if self._adapters is not None:
                self._adapters.load_elsewhere(runner)
            self.start_seconds.end("workers made")

    def _of_encoder(
        self, config: ResolvedConfig, model: Encoder | TransformersEncoder
    ) -> EncoderMaker:
        """Return what makes the engine of an encoder."""
        self.start_seconds.end("weights loaded")
        is_cuda = config.device.type == "cuda"
        return EncoderMaker(
            config,
            model,
            self._num_threads,
            self.start_seconds,
            torch.cuda.current_device() if is_cuda else None,
        )

    def _with_adapters(
        self, config: EngineConfig, model: Decoder
    ) -> tuple[Mapping[str, AdapterSite], int]:
        """Read the adapters of the start; return the linear layers that adapters may change, and
        the largest rank of an adapter."""
        whole = model
        if isinstance(model, NativeDecoder):  # whose weights may be narrow
            whole = empty_model(model.config, "float32", "meta")
        sites = adapter_sites(whole)
        most = config.max_lora_rank or MAX_RANK
        self._adapters = adapters = Adapters(sites, max_rank=most, most_held=config.max_cpu_loras)
        for name, path in (config.lora_modules or {}).items():
            adapters.load(name, path)
        if config.max_lora_rank is None:
            adapters.max_rank = max(LEAST_MAX_RANK, adapters.largest_rank)
        return sites, adapters.max_rank

    def _with_weights(
        self,
        config: ResolvedConfig,
        directory: Path,
        model: Decoder,
        spec: CacheSpec,
        sites: Mapping[str, AdapterSite],
    ) -> EngineMaker:
        """Get the weights of this process ready; return what makes an engine of them."""
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        has_files = config.offload_dir is not None
        identity = fingerprint(model, spec, config.weight_dtype) if has_files else b""
        model.pack_for_inference(is_int8=config.is_int8)
        self.start_seconds.end("weights loaded")
        is_cuda = config.device.type == "cuda"
        if config.batch_invariant and is_cuda:
            model.use_invariant_linears()
        return EngineMaker(
            config,
            directory,
            model,
            spec,
            identity,
            num_parameters,
            self._num_threads,
            self.start_seconds,
            torch.cuda.current_device() if is_cuda else None,
            sites,
        )

    @property
    def engine(self) -> Engine:
        """The engine, which its own thread alone may change; see `EngineLoop.call`."""
        return self.loop.engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self.loop.engine = engine

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, timeout_s: float | None = None) -> bool:
        """Fail what is unfinished with EngineClosedError and end the engine's thread.

        Blocks that were given to offload_dir's files are written before this returns. Leaving a
        `with LLM(...) as llm:` does the same.

        Args:
            timeout_s: seconds to wait for the step that runs, and for the files; None waits for
                their end.

        Returns:
            Whether the thread has ended, and the files are written.
        """
        before = time.monotonic()
        has_ended = self.loop.close(timeout_s)
        runner = self.engine.runner
        if isinstance(runner, ParallelRunner):
            runner.close()
        if self._store is None:
            return has_ended
        left = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - before))
        return self._store.flush(left) and has_ended

    @keywords_of(RequestTerms)
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_progress: bool = False,
        **terms: Unpack[Terms],
    ) -> list[RequestOutput]:
        """Continue prompts and return when all are done.

        Args:
            prompts: a text, {"prompt": text}, {"prompt_token_ids": [...]}, or a list of these.
            sampling_params: the parameters for all prompts, or a list with one for each; None is
                `default_params`.
            use_progress: True writes a line of progress to stderr.
            terms: user, cache_salt, lora_request, priority, deadline_s and max_queue_s of each
                prompt, see `RequestTerms`.

        Returns:
            One output per prompt, in the order given.

        Raises:
            FloatingPointError: the model gave logits that are NaN or infinite, or the options of a
                prompt together allow no token.
            ImportError: structured text is asked for, and llguidance is not installed.
            RequestError: a prompt can never be served; no work has been done. The message has its
                place in the list.
            TypeError: prompts or sampling_params are something else.
            QueueFullError: as many requests or tokens wait as may.
            EngineClosedError: the engine was closed; DeviceLostError if its device is lost.
            Exception: what broke a step for this prompt alone, or what the tokenizer raised over
                its tokens: this, or logits that are not finite, ends one prompt. Its caller gets
                the exception, with a note that has its place in the list, and the rest of that
                call is let go of; requests of other calls go on.
        """
        mine = self._generations(
            prompts,
            sampling_params,
            RequestTerms.given_to(LLM.generate, terms),
        )
        waiter = Waiter(mine)
        progress = Progress(terminal(use_progress))
        if progress.is_shown:
            waiter.notice_changes()
        try:
            self._submit(mine)
            while not waiter.is_over:
                waiter.wait()
                progress.show(progress_text(mine), share_done(mine))
            raise_first(mine)
        finally:
            progress.close()
            self._drop(mine)
        return [g.output for g in mine]

    @keywords_of(RequestTerms)
    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        pooling: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        **terms: Unpack[Terms],
    ) -> list[EmbeddingOutput]:
        """Return one vector for each prompt: its hidden states after the last norm, pooled.

        mean: sum_p h_p / T over the T tokens of the prompt; last: h_T; cls: h_1; max: the largest
        of each channel; weightedmean: sum_p p h_p / sum_p p. Dense and Normalize layers of
        modules.json follow. The prompts run in the steps of all requests; those of a decoder in
        chunks. Vectors are of unit length only if the checkpoint normalises them.

        Args:
            prompts: see generate(); each leaves room for one more token in the context of a
                decoder.
            pooling: one of the names above; None is what 1_Pooling/config.json says, else "mean".
            prompt_name: the name of a text that config_sentence_transformers.json puts before each
                text; None is its default_prompt_name, if there is one.
            dimensions: the first numbers of each vector that are kept; None keeps all.
            truncate_prompt_tokens: the tokens of the beginning of each text that are kept, special
                tokens included; None refuses a text that is too long.
            terms: see generate().

        Returns:
            One output per prompt, in the order given, `embedding` of hidden_size floats, or as many
            as the last Dense layer gives.

        Raises:
            RequestError: the model is for something else, or there is no such prompt or size.
            ValueError: pooling is something else.
            TimeoutError: a deadline has passed.
            Exception: as of generate().

        Example:
            >>> [output] = LLM("story").embed("Once upon a time")
            >>> len(output.embedding)
        """
        self.purpose.check("embed")
        pooling = self.purpose.check_pooling(pooling)
        size = self.purpose.size(self.config.hidden_size)
        kept = self.purpose.cut_to(dimensions, size)
        asked = RequestTerms.given_to(LLM.embed, terms)
        given = self._prepared(prompts, prompt_name, truncate_prompt_tokens)
        found = self._pooled(given, pooling, asked)
        if kept == size:
            return found
        return [replace(one, embedding=one.embedding[:kept]) for one in found]

    @keywords_of(RequestTerms)
    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        **terms: Unpack[Terms],
    ) -> list[ScoreOutput]:
        """Return how well pairs of texts match.

        Args:
            text_1: a text, or a list of texts.
            text_2: the texts to compare with one, or as many as there are in text_1.
            use_activation: False returns the logits of a model that reads pairs.
            truncate_prompt_tokens: the tokens beyond which the second text of a pair is cut (of a
                model that embeds, either text); None refuses a pair that is too long.
            terms: see generate().

        Returns:
            One output per pair: the model's score, or of a model that embeds the cosine of two
            vectors.

        Raises:
            RequestError: the model scores no pairs, or a pair can never be served.
            Exception: as of embed().

        Example:
            >>> [good, bad] = LLM("bge-reranker-v2-m3").score("a cat", ["cats", "dogs"])
        """
        self.purpose.check("score")
        asked = RequestTerms.given_to(LLM.score, terms)
        return self._scored(text_1, text_2, use_activation, truncate_prompt_tokens, asked)

    @keywords_of(RequestTerms)
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate_prompt_tokens: int | None = None,
        **terms: Unpack[Terms],
    ) -> list[RerankOutput]:
        """Return documents in the order in which they match a query, the best one first.

        Args:
            query: the text that documents are scored against.
            documents: the texts that are scored.
            top_n: the number of documents returned; None returns all.
            truncate_prompt_tokens, terms: see score().

        Raises:
            RequestError: see score().
            Exception: as of embed().
        """
        self.purpose.check("score")
        if top_n is not None and (type(top_n) is not int or top_n < 1):
            raise RequestError(f"top_n must be a positive integer or None, got {shown(top_n)}")
        asked = RequestTerms.given_to(LLM.rerank, terms)
        if not isinstance(query, str) or isinstance(documents, str):
            raise RequestError("query must be a text and documents a list of texts, got others")
        scores = self._scored(query, documents, True, truncate_prompt_tokens, asked)
        return ranked(documents, scores, top_n)

    @keywords_of(RequestTerms)
    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        **terms: Unpack[Terms],
    ) -> list[ClassifyOutput]:
        """Return the probabilities of the model's labels for each prompt.

        Args:
            prompts, truncate_prompt_tokens, terms: see embed().

        Raises:
            RequestError: the model has no classifier, or a prompt can never be served.
            Exception: as of embed().
        """
        self.purpose.check("classify")
        asked = RequestTerms.given_to(LLM.classify, terms)
        given = self._prepared(prompts, None, truncate_prompt_tokens)
        found = self._pooled(given, self.purpose.pooling, asked)
        return [classified(self.purpose, one) for one in found]

    def _prepared(
        self, prompts: Prompt | Iterable[Prompt], name: str | None, most: int | None
    ) -> Prompt | list[Prompt]:
        """Return prompts with the text of this name before theirs, and cut to `most` tokens."""
        is_alone = isinstance(prompts, str | bytes | Mapping)
        many: list[Any] = [prompts] if is_alone else listed("prompts", prompts)
        made = [self._one_prepared(prompt, name, most) for prompt in many]
        return made[0] if is_alone else made

    def _one_prepared(self, prompt: Prompt, name: str | None, most: int | None) -> Prompt:
        if not isinstance(prompt, str):
            return prompt
        text = self.purpose.with_prompt(prompt, name)
        if most is None or self.tokenizer is None:
            return text
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode_cut(text, most)}

    def _scored(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        use_activation: bool,
        most: int | None,
        terms: RequestTerms,
    ) -> list[ScoreOutput]:
        pairs, purpose = pairs_of(text_1, text_2), self.purpose
        if purpose.compares_vectors:
            texts = list(dict.fromkeys(text for pair in pairs for text in pair))
            vectors = self._pooled(self._prepared(texts, None, most), purpose.pooling, terms)
            by_text = dict(zip(texts, vectors, strict=True))
            return [compared(purpose, by_text[a], by_text[b]) for a, b in pairs]
        prompts = [pair_prompt(purpose, self.tokenizer, pair, most) for pair in pairs]
        activation = purpose.activation if use_activation else "identity"
        return [
            ScoreOutput(activated(one.embedding, activation)[0], len(one.prompt_token_ids))
            for one in self._pooled(prompts, purpose.pooling, terms)
        ]

    def _pooled(
        self, prompts: Prompt | Iterable[Prompt], pooling: str, terms: RequestTerms
    ) -> list[EmbeddingOutput]:
        """Return what the states of prompts come to, behind the head."""
        mine = self._generations(prompts, EMBEDDING_PARAMS, terms, pooling)
        waiter = Waiter(mine)
        try:
            self._submit(mine)
            while not waiter.is_over:
                waiter.wait()
            raise_first(mine)
        finally:
            self._drop(mine)
        return [embedding_of(g.output, pooling) for g in mine]

    @keywords_of(RequestTerms)
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        **terms: Unpack[Terms],
    ) -> Iterator[str]:
        """Continue one prompt and yield its text as it becomes certain.

        Dropping the iterator aborts the request. Other requests may run meanwhile. The keywords are
        those of generate().

        Raises:
            RequestError: the prompt can never be served, or it has several samples.
            TypeError: it is several prompts, or sampling_params is something else.

        The iterator raises what ends the request alone, see generate(), after the text before it.
        """
        if not isinstance(prompt, str | bytes | Mapping):
            raise TypeError(f"prompt must be one to stream, got {type(prompt).__name__}")
        [generation] = self._generations(
            prompt,
            sampling_params,
            RequestTerms.given_to(LLM.stream, terms),
        )
        if generation.request.sampling.num_samples != 1:
            raise RequestError(
                "n, best_of and beam_width must be 1 to stream, "
                f"got {generation.request.sampling.num_samples}"
            )
        return self._stream(generation)

    def _stream(self, generation: Generation) -> Iterator[str]:
        waiter = Waiter([generation])
        waiter.notice_changes()
        try:
            self._submit([generation])
            is_finished = False
            while not is_finished:
                waiter.wait()
                is_finished = generation.output.finished  # before its last text is read
                delta = generation.unread_text()
                if delta:
                    yield delta
            raise_first([generation])
        finally:
            self._drop([generation])

    def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        terms: RequestTerms = NO_TERMS,
        *,
        request_id: str | None = None,
        pooling: str | None = None,
    ) -> Generation:
        """Return a request for `loop.submit()`, checked; nothing has changed.

        Args:
            prompt: see generate().
            sampling: the parameters with which the prompt is continued.
            terms: see generate().
            request_id: a name that is unique among unfinished requests; None makes one.
            pooling: one of `embedding.POOLINGS` for an embedding; None is for a text.

        Raises:
            RequestError: it can never be served.
            TypeError: sampling is something else.
        """
        if not isinstance(sampling, SamplingParams):
            raise TypeError(
                f"sampling_params must be SamplingParams, got {type(sampling).__name__}"
            )
        return self._generation(prompt, sampling, terms, pooling, request_id)

    def _generations(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None,
        terms: RequestTerms,
        pooling: str | None = None,
    ) -> list[Generation]:
        """Check everything and change nothing."""
        is_alone = isinstance(prompts, (str, bytes, Mapping))
        many = listed("prompts", [prompts] if is_alone else prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(many)
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
                generations.append(self._generation(prompt, sampling, terms, pooling))
            except RequestError as error:
                raise RequestError(str(error) if is_alone else f"prompts[{i}]: {error}") from None
        return generations

    def _generation(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        terms: RequestTerms,
        pooling: str | None,
        request_id: str | None = None,
    ) -> Generation:
        """Return a request that may be submitted, checked."""
        if request_id is not None:
            check_name("request_id", request_id)
        if pooling is None:
            self.purpose.check("generate")
        elif pooling not in POOLINGS:
            raise RequestError(f"pooling must be {', '.join(POOLINGS)}, got {shown(pooling)}")
        text, ids, types = token_ids(prompt, self.tokenizer)
        while request_id is None:
            name = f"request-{next(self._request_numbers)}"
            if name not in self.engine.scheduler.roster.requests:  # a caller may have chosen it
                request_id = name
        if self.tensor_parallel_size > 1 and sampling.logits_processors:
            raise RequestError(
                "logits_processors must be None with tensor_parallel_size above 1, as functions "
                f"do not leave their process, got {len(sampling.logits_processors)}"
            )
        adapter = None
        if terms.lora_request:
            adapter = self._named(terms.lora_request).get(terms.lora_request)
        request = Request(
            request_id,
            ids,
            sampling,
            self._end_ids,
            salt=salted(terms.cache_salt, adapter),
            adapter=adapter,
            user=terms.user,
            priority=terms.priority,
            deadline_s=terms.deadline_s,
            max_queue_s=terms.max_queue_s,
            pooling=pooling,
            token_type_ids=self._types(types),
            **self._options.prepare(sampling, terms.user),
        )
        self.engine.scheduler.limits.check(request)
        width, vocab_size = getattr(sampling, "beam_width", 0), self.config.vocab_size
        if width > vocab_size:
            raise RequestError(f"beam_width must be at most vocab_size {vocab_size}, got {width}")
        if max(ids) >= vocab_size:
            raise RequestError(
                f"prompt token ids must be below vocab_size {vocab_size}, got {max(ids)}"
            )
        return Generation(request, text, self.tokenizer)

    def _types(self, given: list[int]) -> tuple[int, ...]:
        """Return the types of a prompt's tokens, () where all are 0."""
        if not any(given):
            return ()
        known = self.config.num_types if isinstance(self.config, EncoderShape) else 0
        if min(given) < 0 or max(given) >= known:
            worst = min(given) if min(given) < 0 else max(given)
            rule = f"in 0 ... {known - 1}" if known else "absent, as the model has no such table"
            raise RequestError(f"token_type_ids must be {rule}, got {worst}")
        return tuple(given)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, in main memory and files, too, as after a change of weights.

        Returns:
            False if a request runs; nothing is forgotten then.
        """
        return self.loop.call(lambda: self.engine.reset_prefix_cache())

    def load_lora_adapter(self, name: str, path: str | Path, *, replaces: bool = False) -> None:
        """Load an adapter, which requests then use by its name (`lora_request`).

        Requests run meanwhile. Where anything is wrong nothing has changed.

        Args:
            name: the name under which requests ask for the adapter.
            path: a folder in PEFT's format (adapter_config.json, adapter_model.safetensors), or a
                hub name.
            replaces: True if another adapter of this name may be unloaded.

        Raises:
            CheckpointError: a file is missing or wrong, or belongs to another model; the message
                names the tensor.
            RequestError: the name is in use, or the engine has no adapters (`enable_lora`).

        Example:
            >>> llm.load_lora_adapter("pirate", "adapters/pirate")
            >>> llm.generate("Once upon a time", lora_request="pirate")
        """
        self._named(name).load(name, path, replaces=replaces)

    def unload_lora_adapter(self, name: str) -> None:
        """Forget an adapter by its name; requests that use it run to their ends.

        Raises:
            RequestError: there is no such adapter.
        """
        self._named(name).unload(name)

    @property
    def lora_adapters(self) -> dict[str, str]:
        """The adapters that requests may name, with the places that they came from."""
        return {} if self._adapters is None else self._adapters.paths()

    def holds_adapter(self, name: str) -> bool:
        """Whether an adapter is in main memory, so that no request waits for its files."""
        return self._adapters is not None and self._adapters.holds(name)

    def _named(self, name: str) -> Adapters:
        if self._adapters is None:
            raise RequestError(f"adapters must be enabled by enable_lora=True, got {shown(name)}")
        return self._adapters

    def _submit(self, generations: Sequence[Generation]) -> None:
        if self.loop.is_own_thread:
            raise RuntimeError("the engine's thread must not wait for requests of its own")
        if threading.get_ident() == self._maker:
            num_threads = torch.get_num_threads()
            if num_threads != self._num_threads:
                self._num_threads = num_threads
                self.loop.post(lambda: torch.set_num_threads(num_threads))
        self.loop.submit(*generations)

    def _drop(self, generations: Sequence[Generation]) -> None:
        """Let go of those that have not finished."""
        if not all(g.output.finished for g in generations):
            self.loop.drop(generations)
