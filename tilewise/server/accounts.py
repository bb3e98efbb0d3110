"""Metrics, log lines and trace spans of a request that has ended."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter

from tilewise.server.errors import ApiError, ClientLeft
from tilewise.server.job import Job
from tilewise.server.metrics import Metrics
from tilewise.server.spans import Spans
from tilewise.server.usage import Ledger

__all__ = ["account"]

LOG = logging.getLogger("tilewise.server")


def account(
    job: Job,
    failure: BaseException | None,
    *,
    metrics: Metrics,
    ledger: Ledger,
    spans: Spans | None,
) -> None:
    """Record one ended job: in `ledger`, in `metrics`, as a line of JSON in the log (level INFO),
    and as trace spans.

    If an exception ended the job, `job.failure` is set to its code, or to its class's name if it is
    no ApiError. An error while spans are written is logged and not raised.

    Args:
        job: the job that has ended.
        failure: the exception that ended it; None if the client got its answer.
        metrics: the server's metrics.
        ledger: the accounts of the keys.
        spans: the writer of spans; None writes none.
    """
    now, name = time.perf_counter(), job.caller.name
    outputs = list(job.outputs.values())
    prompt = sum(len(o.prompt_token_ids) for o in outputs)
    cached = sum(o.num_cached_tokens for o in outputs)
    made = job.num_drawn
    preempted = sum(o.num_preemptions for o in outputs)
    lost = sum(o.num_tokens_lost for o in outputs)
    queued = _observe_phases(metrics, job)
    reasons = [c.finish_reason or "abort" for o in outputs for c in o.outputs]
    error = failure if isinstance(failure, ApiError) else None
    has_left = isinstance(error, ClientLeft)
    is_refused = error is not None and not job.engine_ids and not has_left
    ledger.add(
        name,
        prompt=prompt,
        cached=cached,
        generated=made,
        preempted=preempted,
        refused=int(is_refused),
    )
    if is_refused and error is not None:
        metrics.count(metrics.rejections, name, error.code)
    for counter, amount in (
        (metrics.prompt_tokens, prompt),
        (metrics.cached_tokens, cached),
        (metrics.generation_tokens, made),
        (metrics.preemptions, preempted),
    ):
        if amount:
            metrics.count(counter, name, by=amount)
    for reason, count in Counter(reasons).items():
        metrics.count(metrics.success, reason, by=count)
    seconds = now - job.arrived
    if outputs:
        metrics.whole.observe(seconds)
        metrics.request_prompt.observe(prompt)
        metrics.request_generation.observe(made)
        if job.first_token is not None and made > len(reasons):
            per_token = (now - job.first_token) / max(1, made - len(reasons))
            metrics.per_token.observe(per_token)
    why = error.code if error else ",".join(sorted(set(reasons))) or "none"
    if has_left:
        metrics.count(metrics.dropped, "client_left")
    if failure is not None:
        job.failure = why if error is not None else type(failure).__name__
    if spans is not None:
        try:
            spans.write(job, job.trace_headers, why, name)
        except Exception:  # A failure to write spans must not fail the request.
            LOG.exception("the spans of %s could not be written", job.job_id)
    if not LOG.isEnabledFor(logging.INFO):
        return
    line = {
        "request": job.job_id,
        "key": name or None,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "tokens": made,
        "preemptions": preempted,
        "recomputed_tokens": lost,
        "queued_s": None if queued is None else round(queued, 4),
        "first_token_s": None
        if job.first_token is None
        else round(job.first_token - job.arrived, 4),
        "seconds": round(seconds, 4),
        "status": 200 if error is None else error.status,
        "reason": why,
    }
    LOG.info("%s", json.dumps(line))


def _observe_phases(metrics: Metrics, job: Job) -> float | None:
    """Add the queue, prefill, decode and whole inference times of each prompt of a job to the
    histograms of `metrics`.

    Returns:
        The shortest time that a prompt waited, in seconds from the job's arrival until it was
        scheduled; None if no prompt was scheduled.
    """
    waited = list[float]()
    for output in job.outputs.values():
        times = output.metrics
        began, first, ended = times.scheduled_time, times.first_token_time, times.finished_time
        first = first if job.tells_tokens else None
        if began is None:
            continue
        waited.append(max(0.0, began - job.arrived))
        metrics.queued.observe(waited[-1])
        if first is not None:
            metrics.prefill.observe(max(0.0, first - began))
        if ended is not None:
            metrics.inference.observe(max(0.0, ended - began))
            if first is not None:
                metrics.decode.observe(max(0.0, ended - first))
    return min(waited, default=None)
