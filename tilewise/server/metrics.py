"""What the server counts, under vLLM's names with our prefix: one search-and-replace in a board."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

__all__ = ["Metrics"]

# Seconds; a first token may wait for a long queue, a next one comes within a step.
_FIRST = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_NEXT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5)
_WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 100_000)
_FEW = (1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """The server's metrics, in a registry of their own.

    Args:
        model: the label model_name.
        stats: returns what the engine reports about itself, see `EngineStats`.
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
        self.success = counter("request_success", "Samples ended, by reason.", "finished_reason")
        self.rejections = counter("admission_rejections", "Requests refused.", "key", "code")
        self.dropped = counter("dropped_streams", "Streams ended for their client.", "reason")
        self.first = histogram("time_to_first_token_seconds", "From arrival on.", _FIRST)
        self.next = histogram("inter_token_latency_seconds", "Between two outputs.", _NEXT)
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
        self.registry.register(_EngineCollector(model, stats))

    def count(self, counter: Counter, *labels: str, by: float = 1) -> None:
        """Add to a counter with these labels beside the model's."""
        counter.labels(self._label["model_name"], *labels).inc(by)

    def text(self) -> bytes:
        """Return everything in Prometheus's text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Reads the engine's own counts when they are asked for, so that a step pays nothing."""

    def __init__(self, model: str, stats: Any) -> None:
        self._model = model
        self._stats = stats

    def collect(self) -> Any:
        """Yield the families."""
        stats = self._stats().scheduler
        gauges = {
            "num_requests_running": ("Sequences that hold blocks.", stats.num_running),
            "num_requests_waiting": ("Sequences that wait.", stats.num_waiting),
            "kv_cache_usage_perc": (
                "Share of the cache's blocks that have an owner, 0 to 1.",
                stats.blocks_used / stats.num_blocks,
            ),
        }
        counters = {
            "prefix_cache_queries": ("Tokens looked up.", stats.prefix_query_tokens),
            "prefix_cache_hits": ("Tokens found.", stats.prefix_hit_tokens),
            "num_preemptions": ("Sequences that lost their blocks.", stats.num_preemptions),
        }
        for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in families.items():
                family = kind(f"tilewise:{name}", text, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family

    def describe(self) -> Any:
        """Name nothing beforehand: the engine is asked at each scrape only."""
        return []
