"""OpenTelemetry spans, if the extra `otel` is installed and an endpoint is configured.

A request is one span, in the trace of the client's `traceparent`, with a child for each phase of
each prompt: queue, prefill, decode. Spans are written after the request has ended, from times that
the engine records anyway, so that a token pays nothing.

    request -+- queue     from its arrival until it got blocks
             +- prefill   until its first token
             +- decode    until its last
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import tilewise

if TYPE_CHECKING:
    from tilewise.engine.outputs import RequestOutput
    from tilewise.server.job import Job

__all__ = ["Spans", "open_spans"]

MISSING = "--otlp-traces-endpoint needs the package {}: pip install 'tilewise[otel]'"


class Spans:
    """Write OpenTelemetry spans of requests that have ended; a server with an endpoint has one.

    Args:
        provider: the OpenTelemetry TracerProvider.
        model: the model's name, an attribute of all spans.
    """

    def __init__(self, provider: Any, model: str) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace = trace
        self._provider = provider
        self._tracer = provider.get_tracer("tilewise", tilewise.__version__)
        self._propagator = TraceContextTextMapPropagator()
        self._model = model
        # Times of requests are of time.perf_counter, those of spans count from the epoch.
        self._epoch_ns = time.time_ns() - time.perf_counter_ns()

    def write(self, job: Job, carrier: Mapping[str, str], reason: str, key: str) -> None:
        """Write the span of a request that has ended, and those of its prompts' phases.

        Args:
            job: the request that has ended.
            carrier: the client's headers traceparent and tracestate, as far as it sent them.
            reason: the reason of its end, as in the log.
            key: the name of its key, "" without one.
        """
        outputs = job.outputs
        samples = [c for output in outputs.values() for c in output.outputs]
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": job.job_id.split("-", 1)[0],
            "gen_ai.request.id": job.job_id,
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": sum(len(o.prompt_token_ids) for o in outputs.values()),
            "gen_ai.usage.output_tokens": sum(len(c.token_ids) for c in samples),
            "gen_ai.response.finish_reasons": [c.finish_reason or "abort" for c in samples],
            "tilewise.cached_tokens": sum(o.num_cached_tokens for o in outputs.values()),
            "tilewise.preemptions": sum(o.num_preemptions for o in outputs.values()),
            "tilewise.recomputed_tokens": sum(o.num_tokens_lost for o in outputs.values()),
            "tilewise.reason": reason,
            "tilewise.key": key,
        }
        if job.first_token is not None:
            attributes["gen_ai.server.time_to_first_token"] = job.first_token - job.arrived
        parent = self._tracer.start_span(
            "request",
            context=self._propagator.extract(carrier),
            kind=self._trace.SpanKind.SERVER,
            start_time=self._ns(job.arrived),
            attributes=attributes,
        )
        if job.failure is not None:
            parent.set_status(self._trace.StatusCode.ERROR, job.failure)
        inside = self._trace.set_span_in_context(parent)
        end = time.perf_counter()
        for place, output in outputs.items():
            self._phases(inside, job, job.engine_ids[place], output)
        parent.end(self._ns(end))

    def _phases(self, inside: Any, job: Job, engine_id: str, output: RequestOutput) -> None:
        times = output.metrics
        first = times.first_token_time if job.tells_tokens else None
        marks = (job.arrived, times.scheduled_time, first, times.finished_time)
        made = sum(len(c.token_ids) for c in output.outputs)
        tokens = (None, len(output.prompt_token_ids), made)
        names = ("queue", "prefill", "decode")
        for name, (begun, ended), count in zip(names, pairwise(marks), tokens, strict=True):
            if begun is None or ended is None:
                return
            attributes: dict[str, Any] = {"gen_ai.request.id": engine_id}
            if count is not None:
                attributes["tilewise.tokens"] = count
            span = self._tracer.start_span(
                name, context=inside, start_time=self._ns(begun), attributes=attributes
            )
            span.end(self._ns(max(begun, ended)))

    def close(self) -> None:
        """Send the remaining spans to the collector, and stop the provider."""
        self._provider.shutdown()

    def _ns(self, seconds: float) -> int:
        return int(seconds * 1e9) + self._epoch_ns


def open_spans(endpoint: str, model: str) -> Spans:
    """Return a `Spans` that sends to a collector, in batches on a thread.

    Args:
        endpoint: the collector's address for OTLP over HTTP, such as
            http://localhost:4318/v1/traces.
        model: the name of the model.

    Raises:
        ValueError: a package is missing, or the endpoint is no address.
    """
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"--otlp-traces-endpoint must begin with http:// or https://, got {endpoint}"
        )
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        raise ValueError(MISSING.format(error.name)) from None
    resource = Resource.create(
        {"service.name": "tilewise", "service.version": tilewise.__version__}
    )
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Spans(provider, model)
