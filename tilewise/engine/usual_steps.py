"""Steps that need every kernel of ordinary requests, so that none of these waits for a compiler.

The start of an engine on a CPU runs the shortest prompt and the shortest decode: what everybody
needs. A long prompt alone takes a kernel that is compiled for 5 s, once on a machine; who serves
others runs these steps before the first of them asks (`warm_up`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tilewise.engine.batch import Asked, Batch, ScheduledSequence
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.cpu_step import MOST_WORK_BY_ROWS
from tilewise.engine.steps.draft_runner import DraftingRunner
from tilewise.engine.steps.runner import ModelRunner
from tilewise.engine.tables.admission import Limits
from tilewise.models.config import ModelConfig

if TYPE_CHECKING:
    from tilewise.engine.llm import LLM

__all__ = ["usual_steps", "warm_up"]

# A prompt that is told its log-probabilities; from its last row two samples are drawn.
_PROMPT = SamplingParams(n=2, top_p=0.9, min_p=0.01, logprobs=1, prompt_logprobs=1)
# A decode whose logits are changed, drawn by the compiled op.
_DECODE = SamplingParams(repetition_penalty=1.1, presence_penalty=0.1, logit_bias={0: 0.0})


def warm_up(llm: LLM) -> None:
    """Compile the kernels of ordinary requests on a CPU, by running `usual_steps` once.

    It does nothing for an encoder, for several processes and on a GPU, whose kernels are compiled
    when its engine is made. The caller sees to it that no request waits or runs: the runner is
    reset afterwards.
    """
    if llm.devices != "cpu" or llm.purpose.is_encoder:
        return
    limits, config = llm.engine.scheduler.limits, llm.config
    assert isinstance(config, ModelConfig), "encoders have none of these steps"

    def run() -> None:
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner | DraftingRunner)
        for batch in usual_steps(limits, config.num_q_heads * config.head_dim):
            runner.submit(batch).result()
        runner.reset()
        runner.count_compilations()

    llm.loop.call(run)
    llm.start_seconds.end("kernels of long prompts and options compiled")


def usual_steps(limits: Limits, width: int) -> list[Batch]:
    """Return the two steps that `warm_up` runs, with sequences that share blocks, as no real step
    does.

    The first step has prompts whose attention is an op of its own, if the limits allow such a step,
    beside a decode, and copies a block. In the second one its sequences have left. The runner's
    cache must be empty before, and reset afterwards.

    Args:
        limits: the limits of the scheduler.
        width: query heads times channels of one.
    """
    enough = math.isqrt(MOST_WORK_BY_ROWS // width) + 1
    num_blocks = min(limits.num_blocks, *limits.other_blocks, limits.num_blocks)
    most = max(1, limits.max_num_batched_tokens - 1)  # beside the decode
    length = min(enough, limits.max_model_len, num_blocks * limits.block_size, most)
    count = -(-(enough**2) // length**2)  # prompts whose work together is enough
    count = max(1, min(count, limits.max_num_seqs - 1, most // length))
    runs = [_run(-1 - i, length, _PROMPT, limits) for i in range(count)]
    runs.append(_run(-1 - count, 1, _DECODE, limits))
    copies = ((0, 1),) if num_blocks > 1 else ()  # of all groups
    left = tuple(run.seq_id for run in runs)
    last = _run(-2 - count, 1, SamplingParams(), limits)
    return [Batch(tuple(runs), copies), Batch((last,), (), left)]


def _run(seq_id: int, length: int, sampling: SamplingParams, limits: Limits) -> ScheduledSequence:
    blocks = tuple(range(-(-length // limits.block_size)))
    ids = (0,) * length
    adjusts = sampling.has_penalties
    return ScheduledSequence(
        seq_id=seq_id,
        token_ids=ids,
        start=0,
        block_ids=blocks,
        num_samples=sampling.n,
        sampling=sampling,
        seeds=tuple(range(sampling.n)),
        asked=Asked(adjusts, list(ids), length),
        others=((blocks, 0),) * len(limits.other_blocks),
    )
