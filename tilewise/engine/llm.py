"""The offline facade: text or token ids in, finished texts out; an Engine and a tokenizer."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

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
from tilewise.engine.facts import facts_of
from tilewise.engine.live_adapter import LiveAdapter
from tilewise.engine.loading import load, load_encoder_of, read_head
from tilewise.engine.loop import RUNNING, EngineLoop
from tilewise.engine.making import EncoderMaker, EngineMaker, StartSeconds
from tilewise.engine.options import Options
from tilewise.engine.outputs import Generation, RequestOutput
from tilewise.engine.prompts import Prompt, listed, token_ids
from tilewise.engine.purpose import read_purpose
from tilewise.engine.recipe import (
    Facts,
    Verdict,
    check_recipe,
    prompt_of,
    recipe_of,
    sampling_of,
    verdict_of,
)
from tilewise.engine.request import Adapted, Request, SamplingParams
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
    device_of,
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
from tilewise.engine.versions import new_version
from tilewise.engine.waiter import Waiter, progress_text, raise_first, share_done
from tilewise.engine.weights import LiveWeights, NamedWeights, Unpacked, Weights, folder_weights
from tilewise.errors import RequestError, UnsupportedError, shown
from tilewise.keywords import keywords_of, taking_fields_of
from tilewise.models.adapters import MAX_RANK, AdapterSite, AdapterTensors, adapter_sites
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.encoder import Encoder, EncoderShape
from tilewise.models.native import NativeDecoder
from tilewise.models.registry import empty_model
from tilewise.models.sharing import move, refill, why_not_refill
from tilewise.models.transformers_encoder import TransformersEncoder
from tilewise.models.vector_head import VectorHead
from tilewise.progress import Progress

__all__ = ["LLM", "packaged_model"]

NO_FILES = Path(os.devnull)  # the folder of a model that lives in this process


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
        model: a Hugging Face checkpoint directory, or "story" for the small model of the package;
            or a decoder of load_model or build_model that lives in this process, and may be
            trained: its parameters are used where they lie, where layouts agree, and
            `update_weights` brings what is packed up to date. An adapter beside it
            (`models.train_adapter`) is that of all requests.
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
        live: LiveWeights | None = None
        if isinstance(config.model, nn.Module):
            live, directory = LiveWeights(config.model), NO_FILES
            device = device_of(config.model, config.device)
        else:
            directory = model_directory(config.model)
            device = compute_device(config.device)
        check_weights(config, device)
        check_speculative(
            config.speculative,
            device,
            is_invariant(config, device),
            num_ranks=config.tensor_parallel_size,
            has_graphs=runs_graphs(config, device),
        )
        self.start_seconds = StartSeconds()
        texts = directory if config.tokenizer is None else model_directory(config.tokenizer)
        self.tokenizer = load_tokenizer(texts)
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
        self._live_adapter: LiveAdapter | None = None
        if self.purpose.is_encoder:
            self.model, decided = load_encoder_of(config, directory, device, self.purpose)
            self.config = self.model.config
            make_engine = self._of_encoder(decided, self.model)
        else:
            model, spec, decided = load(config, directory, device, live)
            self.model, self.config = model, model.config
            check_groups(model.config, config.speculative)
            self._end_ids = end_tokens(self.config, self.tokenizer)
            head = read_head(self.purpose, directory, model, is_random=config.random_weights)
            sites: Mapping[str, AdapterSite] = {}
            if live is not None and live.has_adapter:
                if config.enable_lora:
                    raise ValueError(
                        "enable_lora must be False beside an adapter that is trained in this "
                        "process, got True"
                    )
                assert isinstance(live.model, Decoder)
                self._live_adapter = LiveAdapter(live.model, model.dtype, device)
            if config.enable_lora:
                sites, rank = self._with_adapters(config, model)
                decided = replace(decided, max_lora_rank=rank)
            self._sites, self._max_lora_rank = sites, decided.max_lora_rank
            if size == 1:
                make_engine = self._with_weights(decided, directory, model, spec, sites)
            else:
                make_engine = functools.partial(
                    engine_of_workers, decided, directory, model, self._end_ids
                )
        self._options = Options(self.tokenizer, self.config.vocab_size, self._end_ids)
        self._given, self._directory, self._device = config, directory, device
        self._decided, self._texts = decided, texts
        self._facts: tuple[str, Facts] | None = None
        self._live: LiveWeights | None = live
        self._make_engine: Callable[[], Engine] | None = make_engine
        self._sleep_level, self._changing = 0, threading.Lock()
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
        """Return the maker of an engine that runs an encoder; the start's seconds are noted."""
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
        """Load the adapters that the config names.

        Returns:
            The linear layers of the model that adapters may change, by name, and the largest rank
            that an adapter may have.
        """
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
        """Pack the weights of this process; return the object that makes engines with them.

        Args:
            config: the resolved config.
            directory: the checkpoint's folder.
            model: the model, with its weights.
            spec: the spec of its cache.
            sites: the layers to which adapters may be added.
        """
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        has_files = config.offload_dir is not None
        identity = fingerprint(model, spec, config.weight_dtype) if has_files else b""
        model.pack_for_inference(is_int8=config.is_int8)
        self.start_seconds.end("weights loaded")
        is_cuda = config.device.type == "cuda"
        if config.batch_invariant and is_cuda:
            model.use_invariant_linears()
        elif is_cuda:
            model.place_on_gpu()
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
            self._live_adapter,
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
        """End unfinished requests with EngineClosedError, and the engine's thread.

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
        progress = Progress(use_progress)
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
            dimensions: the count of each finished vector's first numbers that are kept; None keeps
                all. The shorter vector is not normalised again.
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
            One output per pair: the model's score, or of a model that embeds the similarity of two
            vectors, mostly the cosine.

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
        """Return prompts with the named instruction put before the texts, which are cut to `most`
        tokens.

        Prompts that are not texts are returned as they are. One prompt gives one, a list gives a
        list.

        Args:
            prompts: one prompt or several.
            name: see `Purpose.with_prompt`.
            most: the number of tokens that are kept of a text; None keeps all.
        """
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
        """Compute the embeddings of prompts, with the model's head if it has one, and wait
        for all."""
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
            TypeError: the argument is several prompts, or sampling_params is of another type.

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
        """Check a request and return it for `loop.submit()`; the engine is not changed.

        Args:
            prompt: the text or token ids, as for `generate`.
            sampling: the parameters with which the prompt is continued.
            terms: the request's user, priority, time limits, cache salt and adapter.
            request_id: a name that is unique among unfinished requests; None makes one.
            pooling: one of `embedding.POOLINGS` to return an embedding; None to generate text.

        Raises:
            RequestError: the engine can never serve the request, for example because it is too
                long.
            TypeError: sampling is not SamplingParams.
            RuntimeError: the parameters of a model in this process were changed without
                `update_weights`.
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
        """Return a checked generation for each prompt; none is started.

        Args:
            prompts: one prompt or several.
            params: the sampling parameters of all prompts, or of each; None for the defaults.
            terms: the terms of each request.
            pooling: one of POOLINGS for embeddings; None to generate text.

        Raises:
            RequestError: a prompt can never be served; the message has its place in the list.
            TypeError: prompts or params are of another type.
            ValueError: there are not as many parameters as prompts.
        """
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
        """Return a checked generation for one prompt, to be submitted.

        Raises:
            RequestError: the request can never be served.
            RuntimeError: the model's parameters were changed without `update_weights`.
        """
        adapter: Adapted | None = self._live_adapter
        has_changed = self._live_adapter is not None and self._live_adapter.has_changed
        if self._live is not None and (has_changed or self._live.has_changed):
            raise RuntimeError(
                "update_weights() must follow a change of the model's parameters, got none since"
            )
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
        """Return the types of a prompt's tokens as a tuple, () where all are 0 or none are given.

        Raises:
            RequestError: a type is not in the model's table of types, or the model has none.
        """
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

        Raises:
            EngineClosedError: the engine was closed; DeviceLostError if its device is lost.
        """
        return self.loop.call(lambda: self.engine.reset_prefix_cache())

    def update_weights(
        self,
        weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | str | Path | None = None,
        *,
        running: str = "wait",
    ) -> None:
        """Let requests to come be answered by other weights of the same model.

        All is checked before anything is written; after a refusal the old weights serve on. The
        new ones are written where the old ones lie: no address changes, and no graph. Blocks that
        the old weights computed are found no more. Adapters are replaced by `load_lora_adapter`.

        Args:
            weights: tensors by a checkpoint's names, all of them, of the dtype of the engine's
                parameters, each with memory of its own until this returns; or the folder of a
                checkpoint with safetensors. None, with a model that lives in this process: its
                parameters as they are now. Those that the engine shares with it need no copy.
                Where an adapter alone is trained (`models.train_adapter`) nothing else is read or
                written.
            running: the fate of requests that run: "wait" lets them end first, while those
                that come wait; "abort" ends them with finish_reason "abort"; "keep" lets them go
                on with the new weights over the keys and values of the old ones.

        Raises:
            CheckpointError: a tensor is missing or unknown, or has another shape or dtype, or is
                not finite; the message names it.
            UnsupportedError: the engine has other processes, or weights that are quantised in the
                checkpoint, or runs an encoder or the modules of transformers.
            ValueError: running is something else, or weights do not go with the model.
            RuntimeError: the engine sleeps.
            EngineClosedError: the engine was closed; DeviceLostError if its device is lost.

        Example:
            >>> model = load_model("path/to/checkpoint")
            >>> llm = LLM(model, tokenizer="path/to/checkpoint")
            >>> optimizer.step()
            >>> llm.update_weights()
        """
        if running not in RUNNING:
            raise ValueError(f"running must be one of {', '.join(RUNNING)}, got {running!r}")
        model = self._refillable()
        with self._changing:
            if self._sleep_level:
                raise RuntimeError("the engine must be awake to take weights: call wake()")
            shapes = self._unpacked.shapes
            source = self._source(weights, model)
            stays = isinstance(source, LiveWeights) and source.stays
            if not stays:
                source.check(shapes)
            adapter = self._live_adapter
            if adapter is not None:
                adapter.check()
            self._wait_for_device()
            engine = self.engine

            def write() -> None:
                if not stays:
                    refill(model, shapes, source.held)
                if adapter is not None:
                    adapter.write()
                engine.use_version(new_version())

            self.loop.between(write, running)
            self._wait_for_device()
            if self._live is not None:
                self._live.note()
            if adapter is not None:
                adapter.note()

    def _refillable(self) -> Decoder:
        """Return the decoder, if its weights can be changed in place.

        Raises:
            UnsupportedError: there are several processes, or weights that cannot be changed.
        """
        if self.tensor_parallel_size > 1:
            raise UnsupportedError(
                f"tensor_parallel_size must be 1 to change weights, got {self.tensor_parallel_size}"
            )
        reason = why_not_refill(self.model)
        if reason is not None:
            raise UnsupportedError(f"weights must be such that they can be changed: {reason}")
        assert isinstance(self.model, Decoder)
        return self.model

    def _source(self, weights: Any, model: Decoder) -> Weights:
        if self._live is not None:
            if weights is not None:
                raise ValueError(
                    "weights must be None with a model that lives in this process, whose own are "
                    f"taken, got {type(weights).__name__}"
                )
            return self._live
        if isinstance(weights, str | Path):
            return folder_weights(model_directory(weights), model.config, model.dtype)
        if weights is None:
            raise ValueError("weights must be tensors by name or a folder, got None")
        return NamedWeights(weights, self._unpacked, model)

    @functools.cached_property
    def _unpacked(self) -> Unpacked:
        """The engine's decoder before it was packed, made by the first update and kept."""
        model = self._refillable()
        return Unpacked(model.config, model.dtype)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def facts(self) -> Facts:
        """Return the facts, besides the request, on which the bits of an answer depend.

        Weights are read once for each version.

        Raises:
            UnsupportedError: bits depend on other requests, the engine has several processes, or
                its model is an encoder.
        """
        if self.tensor_parallel_size > 1 or not isinstance(self.model, Decoder):
            raise UnsupportedError("the engine must be a decoder's in one process for recipes")
        if not self._decided.batch_invariant:
            raise UnsupportedError(
                "batch_invariant must be True for recipes, as bits depend on neighbours, got False"
            )
        version = self.engine.version
        if self._facts is None or self._facts[0] != version:
            found = facts_of(self.model, self._decided, self._texts)
            self._facts = version, found
        return self._facts[1]

    def recipe(
        self, output: RequestOutput, sampling: SamplingParams, *, lora_request: str = ""
    ) -> dict[str, Any]:
        """Return the recipe of an answer of this engine's present weights: plain JSON.

        Args:
            output: the answer, finished.
            sampling: the parameters that it was asked for with: with a seed, or greedy, and with
                logprobs.
            lora_request: the name of its adapter; "" without one.

        Raises:
            RequestError: the answer cannot be computed again.
            UnsupportedError: see `facts`.

        Example:
            >>> params = SamplingParams(seed=1, logprobs=0)
            >>> [output] = llm.generate("Once upon a time", params)
            >>> assert llm.verify(llm.recipe(output, params)).is_equal
        """
        return recipe_of(self.facts(), output, sampling, self.fingerprint_of(lora_request))

    def verify(self, recipe: object) -> Verdict:
        """Compute a recipe's answer alone, and compare it to the bit.

        Nothing of the prefix cache is used.

        Raises:
            RequestError: the argument is no recipe, was changed, or is of other weights, another
                class, or an adapter that is not loaded; one sentence says which.
            UnsupportedError: see `facts`.
        """
        found = check_recipe(recipe, self.facts())
        sampling = sampling_of(found)
        by_print = {self.fingerprint_of(each): each for each in ("", *self.lora_adapters)}
        if found["adapter"] not in by_print:
            raise RequestError(
                f"recipe must be of an adapter that is loaded, got {shown(found['adapter'][:12])}"
            )
        name = by_print[found["adapter"]]
        salt = f"verify {new_version()}"  # no other request's blocks
        [output] = self.generate(prompt_of(found), sampling, lora_request=name, cache_salt=salt)
        return verdict_of(found, output)

    def fingerprint_of(self, adapter: str) -> str:
        """Return the digest of an adapter.

        Args:
            adapter: the adapter's name; "" for the one trained beside a model of this process, if
                any.

        Returns:
            The digest of the numbers that the adapter has now; "" for no adapter.

        Raises:
            RequestError: there is no such adapter.
        """
        if adapter:
            return self._named(adapter).get(adapter).fingerprint
        return "" if self._live_adapter is None else self._live_adapter.digest()

    def sleep(self, level: int = 1, *, running: str = "wait") -> None:
        """Free the memory of the cache and of the weights until `wake` is called.

        Requests that come meanwhile are refused. Cached prefixes are lost, except those in files. A
        model that was passed as an object of this process keeps its weights where they are.

        Args:
            level: 1 frees the cache, and moves weights from a GPU to main memory; 2 frees the
                weights as well, and `wake` reads them again from the checkpoint.
            running: the fate of running requests: "wait" lets them end first, "abort" ends them.

        Raises:
            UnsupportedError: the engine has several processes, or its model is an encoder.
            ValueError: level or running is none of these values.
            RuntimeError: the engine sleeps already.
            EngineClosedError: the engine was closed; DeviceLostError if its device is lost.
        """
        if type(level) is not int or level not in (1, 2):
            raise ValueError(f"level must be 1 or 2, got {shown(level)}")
        if running not in ("wait", "abort"):
            raise ValueError(f"running must be wait or abort, got {running!r}")
        if self.tensor_parallel_size > 1 or not isinstance(self.model, Decoder):
            raise UnsupportedError("the engine must be a decoder's in one process to sleep")
        with self._changing:
            if self._sleep_level:
                raise RuntimeError("the engine must be awake to sleep, got one that sleeps")
            engine = self.engine
            self.loop.between(engine.rest, running)
            model, self._sleep_level = self.model, level
            if level == 2:
                config = model.config
                self.model = empty_model(config, model.dtype, "meta")
                self._make_engine = None
            elif self._live is None and self._device.type == "cuda":
                move(model, torch.device("cpu"))
            del model
            gc.unfreeze()  # what a start has made so that collections pass over it
            gc.collect()

    def wake(self) -> None:
        """Take requests again after `sleep`.

        A GPU's graphs are captured again, as the cache may lie elsewhere. After level 2 weights
        are read as at the start: those of `update_weights` must be given once more.

        Raises:
            RuntimeError: the engine is awake.
            EngineClosedError: the engine was closed; DeviceLostError if its device is lost.
            Exception: as of `LLM`; the engine still sleeps then.
        """
        with self._changing:
            if not self._sleep_level:
                raise RuntimeError("the engine must sleep to wake, got one that is awake")
            make, version = self._make_engine, self.engine.version
            if make is None:
                version = "" if self._live is None else new_version()
                model, spec, decided = load(self._given, self._directory, self._device, self._live)
                decided = replace(decided, max_lora_rank=self._max_lora_rank)
                make = self._with_weights(decided, self._directory, model, spec, self._sites)
                self.model = model
                if self._live is not None:
                    self._live.note()
                if self._live_adapter is not None:
                    self._live_adapter.check()
                    self._live_adapter.write()
                    self._live_adapter.note()
            elif self._live is None and self._device.type == "cuda":
                assert isinstance(self.model, Decoder)
                move(self.model, self._device)
                if isinstance(make, EngineMaker) and not make.config.batch_invariant:
                    self.model.place_on_gpu()  # weights that lay one behind another do so again
            self.loop.replace(make, version)
            self._make_engine, self._store, self._sleep_level = make, self.engine.store, 0

    def load_lora_adapter(
        self, name: str, path: str | Path | AdapterTensors, *, replaces: bool = False
    ) -> None:
        """Load an adapter, which requests then use by its name (`lora_request`).

        Requests run meanwhile. Where anything is wrong nothing has changed.

        Args:
            name: the name under which requests ask for the adapter.
            path: a folder in PEFT's format (adapter_config.json, adapter_model.safetensors), or a
                hub name; or, as AdapterTensors, what these files would hold.
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
        """The adapters that requests may name: their folder or hub name, or "tensors", by name."""
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
        """End the generations that have not finished, and wait until they own no cache blocks."""
        if not all(g.output.finished for g in generations):
            self.loop.drop(generations)
