"""The server's metrics, under vLLM's names with another prefix, so that its dashboards can be
reused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tilewise.engine.record.ages import Histogram as SmallHistogram
from tilewise.engine.stats import SchedulerStats
from tilewise.errors import EngineClosedError

__all__ = ["Metrics"]

# Seconds; a first token may wait for a long queue, the next ones arrive within a step.
_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 100_000)
_FEW = (1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """The server's Prometheus metrics, in a registry of their own; a server has one.

    Args:
        model: the value of the label model_name.
        stats: a function that returns the engine's counters, see `EngineStats`.
    """

    def __init__(self, model: str, stats: Any) -> None:
        self.registry = CollectorRegistry()
        self._label = {"model_name": model}
        own: dict[str, Any] = {"registry": self.registry}

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tilewise:{name}", text, ["model_name", *labels], **own)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"tilewise:{name}", text, ["model_name"], buckets=buckets, **own)
            return made.labels(model)

        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.", "key")
        self.cached_tokens = counter("prompt_cached_tokens", "Of these, found cached.", "key")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.", "key")
        self.preemptions = counter(
            "request_preemptions", "Sequences of a key's requests that lost their blocks.", "key"
        )
        self.success = counter("request_success", "Samples ended, by reason.", "finished_reason")
        self.rejections = counter("admission_rejections", "Requests refused.", "key", "code")
        self.dropped = counter("dropped_streams", "Streams ended for their client.", "reason")
        self.first = histogram("time_to_first_token_seconds", "From arrival on.", _FIRST)
        self.queued = histogram("request_queue_time_seconds", "From arrival to running.", _FIRST)
        self.prefill = histogram(
            "request_prefill_time_seconds", "From running to the first token.", _FIRST
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From the first token to the last.", _WHOLE
        )
        self.inference = histogram(
            "request_inference_time_seconds", "From running to the last token.", _WHOLE
        )
        self.next = SmallHistogram(_NEXT)  # updated for each token, so it must be cheap
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean of a request.", _NEXT
        )
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end.", _WHOLE)
        self.request_prompt = histogram("request_prompt_tokens", "Of a request.", _TOKENS)
        self.request_generation = histogram("request_generation_tokens", "Of a request.", _TOKENS)
        self.params_n = histogram("request_params_n", "Samples asked for.", _FEW)
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "Most tokens asked for.", _TOKENS
        )
        self.http = Gauge(
            "tilewise:http_requests_in_flight", "Requests in the server.", ["model_name"], **own
        ).labels(model)
        self._engine = _EngineCollector(model, stats, self.next)
        self.registry.register(self._engine)

    def look(self) -> None:
        """Read the engine's counters; `text` reports those of the last successful read."""
        self._engine.look()

    def count(self, counter: Counter, *labels: str, by: float = 1) -> None:
        """Add `by` to a counter.

        Args:
            counter: one of this object's counters.
            labels: the values of the counter's labels beside model_name.
            by: the amount to add.
        """
        counter.labels(self._label["model_name"], *labels).inc(by)

    def text(self, key: str | None = None) -> bytes:
        """Return all metrics in Prometheus's text format.

        Args:
            key: the name of the only key whose metrics are returned; None returns all.
        """
        return generate_latest(self.registry if key is None else _OneKey(self.registry, key))


class _OneKey(Collector):
    """A view of a registry without the samples whose label `key` names another key."""

    def __init__(self, registry: CollectorRegistry, key: str) -> None:
        self._registry, self._key = registry, key

    def collect(self) -> Any:
        """Yield the metric families, each without the samples of other keys."""
        for family in self._registry.collect():
            own = [s for s in family.samples if s.labels.get("key", self._key) == self._key]
            family.samples = own  # a copy made for this call
            yield family


class _EngineCollector(Collector):
    """A collector of the engine's counters, as they were when `look` last read them.

    Steps are not slowed by it. The gauge `engine_answers` is 0 while a read has begun and not
    ended.
    """

    def __init__(self, model: str, stats: Any, between: SmallHistogram) -> None:
        self._model = model
        self._stats = stats
        self._between = between
        self._told: Any = None
        self._num_open = 0

    def look(self) -> None:
        """Read the engine's counters for the next `collect`; with an engine that hangs this does
        not return, with one that has ended the last values are kept."""
        self._num_open += 1
        with suppress(EngineClosedError):  # the last values are kept
            self._told = self._stats()
            self._num_open = 0

    def collect(self) -> Any:
        """Yield the metric family `engine_answers`, and the engine's families once its counters
        have been read."""
        answers = GaugeMetricFamily(
            "tilewise:engine_answers", "1; 0 for one that hangs.", labels=["model_name"]
        )
        answers.add_metric([self._model], float(not self._num_open))
        yield answers
        if self._told is not None:
            yield from self._families(self._told)

    def _families(self, told: Any) -> Iterator[Any]:
        stats = told.scheduler
        gauges = {
            "num_requests_running": ("Sequences that hold blocks.", stats.num_running),
            "num_requests_waiting": ("Sequences that wait.", stats.num_waiting),
            "kv_cache_usage_perc": (
                "Share of the cache's blocks that have an owner, 0 to 1; of several groups of "
                "layers the highest.",
                stats.used_fraction,
            ),
            "swap_space_usage_blocks": (
                "Blocks of main memory that hold what was swapped out, or cold prefixes.",
                stats.swap_blocks_used + stats.swap_blocks_cold,
            ),
        }
        counters = {
            "prefix_cache_queries": ("Tokens looked up.", stats.prefix_query_tokens),
            "prefix_cache_hits": ("Tokens found.", stats.prefix_hit_tokens),
            "num_preemptions": ("Sequences that lost their blocks.", stats.num_preemptions),
            "num_swapped": ("Of these, kept in main memory.", stats.num_swapped),
            "recalled_tokens": (
                "Tokens of prefixes that came back from main memory or files.",
                stats.num_recalled_tokens,
            ),
            "recomputed_tokens": (
                "Tokens computed twice, as their blocks were taken away.",
                stats.num_tokens_lost,
            ),
            "prefill_step_tokens": ("Tokens of steps with prompts.", told.prefill_tokens),
            "prefill_step_seconds": ("Seconds of steps with prompts.", told.prefill_seconds),
            "decode_step_tokens": ("Tokens of steps without.", told.decode_tokens),
            "decode_step_seconds": ("Seconds of steps without.", told.decode_seconds),
            "stopped_steps": (
                "Steps that ended before their time for users who came beside a flood.",
                told.num_stopped_steps,
            ),
            "stopped_step_seconds": ("Seconds that these had taken.", told.stopped_seconds),
            "compilations_after_start": (
                "Kernels compiled while requests waited for them.",
                told.num_compilations,
            ),
            "audited_requests": ("Requests computed again, alone.", told.num_audited),
            "audited_requests_different": (
                "Of these, those that differed.",
                told.num_audits_different,
            ),
            "audited_requests_forgotten": (
                "Requests that were to be computed again, and never were.",
                told.num_audits_forgotten,
            ),
            "canary_blocks_checked": ("Full blocks looked at again.", told.num_blocks_checked),
            "canary_blocks_broken": (
                "Of these, those whose bytes had changed.",
                told.num_blocks_broken,
            ),
            "spec_decode_num_draft_tokens": ("Guesses that were verified.", stats.num_drafts),
            "spec_decode_num_accepted_tokens": (
                "Of these, right ones.",
                stats.num_accepted_drafts,
            ),
        }
        for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in families.items():
                family = kind(f"tilewise:{name}", text, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family
        reasons = GaugeMetricFamily(
            "tilewise:num_requests_waiting_by_reason",
            "Sequences that wait, by what for.",
            labels=["model_name", "reason"],
        )
        for reason, count in stats.waiting_by_reason.items():
            reasons.add_metric([self._model, reason], count)
        yield reasons
        config = GaugeMetricFamily(
            "tilewise:cache_config_info",
            "1; the labels say how large the cache is.",
            labels=["model_name", "block_size", "num_blocks", "bytes_per_token"],
        )
        sizes = (stats.block_size, stats.num_blocks, told.cache_bytes_per_token)
        config.add_metric([self._model, *map(str, sizes)], 1)
        yield config
        yield from self._histograms(stats)

    def _histograms(self, stats: SchedulerStats) -> Iterator[HistogramMetricFamily]:
        for name, text, found in (
            ("inter_token_latency_seconds", "Between two outputs.", self._between.read()),
            ("iteration_tokens_total", "Tokens of a step.", stats.step_tokens),
            ("kv_block_lifetime_seconds", "From findable to evicted.", stats.block_lifetime),
            ("kv_block_idle_before_evict_seconds", "Since its last use.", stats.block_idle),
            ("kv_block_reuse_gap_seconds", "Since its last use.", stats.block_reuse_gap),
        ):
            family = HistogramMetricFamily(f"tilewise:{name}", text, labels=["model_name"])
            sums = list(accumulate(found.counts))
            bounds = [*map(floatToGoString, found.bounds), "+Inf"]
            family.add_metric([self._model], list(zip(bounds, sums, strict=True)), found.total)
            yield family

    def describe(self) -> Any:
        """Return no description in advance, so that registering does not read the engine."""
        return []
