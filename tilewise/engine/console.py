"""What `tilewise generate`, `explain` and `precompile` do once their arguments are parsed."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from tilewise.cache.spec import KVSpec
from tilewise.engine.cache_table import CacheShape, cache_table, read_latent_shape
from tilewise.engine.captured.elsewhere import Task, compile_for
from tilewise.engine.llm import LLM
from tilewise.engine.outputs import RequestOutput
from tilewise.engine.recipe import options_of_recipe
from tilewise.engine.record.trace import write_trace
from tilewise.engine.report import cache_report, stats_line, stats_record
from tilewise.engine.request import SamplingParams
from tilewise.engine.settings import cache_dtype, cache_spec, compute_device, model_directory
from tilewise.errors import CheckpointError, RequestError
from tilewise.models.config import read_config
from tilewise.nn.packed import quantisation_error
from tilewise.ops import explain
from tilewise.ops import precompile as _precompile
from tilewise.ops.compile_ahead import check_triton, take
from tilewise.progress import Progress, is_wanted

__all__ = [
    "explain_attention",
    "explain_cache",
    "generate",
    "precompile",
    "precompile_for",
    "read_prompt",
    "take_kernels",
    "verify",
]

# Sequences that run at once at most; the cache is made no larger than the prompts at hand need.
MAX_NUM_SEQS = 256
# Elements of a tensor that `explain` takes: torch counts their bytes in int64, and no machine has
# half a PiB.
MAX_ELEMENTS = 2**48


def generate(
    model: str,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    as_json: bool = False,
    echoes_prompt: bool = True,
    trace: str | None = None,
    **settings: Any,
) -> None:
    """Continue prompts on standard output, then say on standard error how it went.

    One sample of one prompt streams; more are printed when all are done.

    Args:
        model: see LLM.
        as_json: True to print one JSON object instead of text.
        echoes_prompt: True to print the prompt before its continuation.
        trace: a file for what the scheduler decided, see `tilewise replay`.
        settings: further arguments of LLM.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal or pipe of another encoding shows what it can of a text, not an error.
        sys.stdout.reconfigure(errors="replace")
    if trace is not None:
        with open(trace, "a"):  # else hours of text end in a file that cannot be written
            pass
    max_num_seqs = min(len(prompts) * params.n, MAX_NUM_SEQS)
    with Progress() as progress:
        progress.show(f"loading {model} ...")
        llm = LLM(model, max_num_seqs=max_num_seqs, **settings)
    errors = quantisation_error(llm.model)
    if errors and sys.stderr is not None:
        worst = max(errors, key=errors.__getitem__)
        print(
            f"weights as int8: relative RMS error {mean(errors.values()):.2%} in the mean, "
            f"{errors[worst]:.2%} in {worst}",
            file=sys.stderr,
        )
    if len(prompts) == 1 and params.n == 1 and not as_json:
        _stream(llm, prompts[0], params, echoes_prompt)
    else:
        outputs = llm.generate(prompts, params, use_progress=is_wanted())
        if as_json:
            _print_json(llm, outputs)
        else:
            _print_samples(outputs, echoes_prompt)
    if trace is not None:
        write_trace(trace, llm.engine.trace())
    if sys.stderr is not None:  # print would take standard output instead
        print(stats_line(llm.engine.stats()), file=sys.stderr)


def explain_attention(
    shape: Sequence[int], *, dtype: str, device: str, causal: bool, window: int | None
) -> None:
    """Print the plan and the cost of one call of attention, which is not run.

    Args:
        shape: the numbers of sequences, queries, keys, query heads, key heads and channels.
        dtype: name of a torch dtype.
        device: the device of the call, or "auto".
        causal, window: the masks of the call, as of `ops.attention`.

    Raises:
        ValueError: a tensor would have more than 2**48 elements.
    """
    batch, seqlen_q, seqlen_k, num_q_heads, num_kv_heads, head_dim = shape
    widest = batch * max(seqlen_q, seqlen_k) * max(num_q_heads, num_kv_heads) * head_dim
    if widest > MAX_ELEMENTS:
        raise ValueError(f"shape must be of at most 2**48 elements a tensor, got {widest:,}")
    # Only shapes matter: one row stands for all, so that no tensor is too large to ask about.
    row = torch.empty(head_dim, dtype=getattr(torch, dtype), device=compute_device(device))
    q = row.expand(batch, seqlen_q, num_q_heads, head_dim)
    k = row.expand(batch, seqlen_k, num_kv_heads, head_dim)
    print(explain("attention", q, k, k, causal=causal, window=window))


def explain_cache(model: str, block_size: int, dtype: str) -> None:
    """Print the bytes of a model's cache for one token, one block and one full context.

    A table compares the bytes of a token with those that other kinds of attention would need. Only
    config.json is read.

    Args:
        model: the checkpoint or hub name.
        block_size: the tokens of a block.
        dtype: the dtype of the cache, or "auto".
    """
    directory = model_directory(model)
    latents = read_latent_shape(directory)
    if latents is not None and not _has_states(directory):
        own = cache_dtype(dtype, getattr(torch, latents.dtype))
        print(cache_table(latents, own.itemsize))
        return
    config = read_config(directory)
    spec = cache_spec(config, block_size, cache_dtype(dtype, getattr(torch, config.dtype)))
    print(cache_report(spec, config.context_length))
    if latents is not None or not config.attentions:
        return
    heads, dim = (config.num_q_heads, config.num_kv_heads), config.head_dim
    shape = CacheShape(len(config.attentions), *heads, dim, dim)
    assert isinstance(spec.kv, KVSpec)
    print(cache_table(shape, spec.kv.dtype.itemsize / spec.kv.channels_per_element))


def _has_states(directory: Path) -> bool:
    """Return whether layers of a checkpoint's model have recurrent states.

    The answer is False for a model that the package has no decoder for.
    """
    try:
        return read_config(directory).has_states
    except CheckpointError:
        return False


def precompile(*, dtypes: Sequence[str], **choice: Any) -> int:
    """Compile the usual kernels with a line of progress, and print the failures and a summary.

    Args:
        dtypes: names of torch dtypes.
        choice: the other arguments of `ops.precompile`.

    Returns:
        The exit code: 1 if a call could not be compiled, else 0.
    """
    dtypes_of = [getattr(torch, name) for name in dtypes]
    done = _precompile(dtypes=dtypes_of, shows_progress=is_wanted(), **choice)
    for failure in done.failures:
        print(failure, file=sys.stderr)
    print(
        f"{done.calls - len(done.failures)} of {done.calls} calls compiled in {done.seconds:.1f} s"
    )
    return 1 if done.failures else 0


def precompile_for(arch: str, to: str, **choice: Any) -> int:
    """Compile kernels for a GPU that is not here, into a file, and print a summary.

    Args:
        arch: a compute capability, such as "sm89".
        to: the file to write.
        choice: the other fields of `elsewhere.Task`.

    Returns:
        The exit code: 1 if a kernel could not be compiled, else 0.

    Raises:
        RequestError: arch is no such name.
    """
    check_triton()
    number = arch.removeprefix("sm").removeprefix("_")
    if not number.isdecimal():
        raise RequestError(f"arch must be a name such as sm89, got {arch!r}")
    began = time.monotonic()
    done = compile_for(Task(int(number), to, **choice))
    for failure in done.failures:
        print(failure, file=sys.stderr)
    seconds = time.monotonic() - began
    print(
        f"{done.num_kernels} kernels for sm{number} in {to}, {done.num_found} of which had been "
        f"compiled before, in {seconds:.1f} s"
    )
    return 1 if done.failures else 0


def take_kernels(source: str) -> int:
    """Put the compiled kernels of a file into Triton's cache, and print their number; return 0."""
    taken = take(Path(source))
    print(
        f"{taken.num_taken} kernels taken for sm{taken.manifest.arch} ({taken.manifest.about}), "
        f"{taken.num_there} were there; the next run says how many it used"
    )
    return 0


def read_prompt(path: str) -> str:
    """Return the text of a file, or of standard input for "-", without its last line break.

    A byte order mark, which some editors put first, is no part of it.

    Raises:
        RequestError: there is no such file, or it is not UTF-8.
    """
    try:
        data = _standard_input() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise RequestError(f"prompt file must be readable, got {reason}: {path!r}") from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"prompt file must be UTF-8, got byte 0x{data[error.start]:02x} at offset "
            f"{error.start} of {path!r}"
        ) from error
    return text.replace("\r\n", "\n").removesuffix("\n")


def _standard_input() -> bytes:
    if sys.stdin is None:
        raise RequestError("standard input must be open for prompt file '-', got none")
    return sys.stdin.buffer.read()


def _stream(llm: LLM, prompt: str, params: SamplingParams, echoes_prompt: bool) -> None:
    deltas = llm.stream(prompt, params)
    if echoes_prompt:
        print(prompt, end="", flush=True)
    for delta in deltas:
        print(delta, end="", flush=True)
    print(flush=True)


def _print_samples(outputs: Sequence[RequestOutput], echoes_prompt: bool) -> None:
    for i, output in enumerate(outputs, start=1):
        for completion in output.outputs:
            title = (
                f"prompt {i}/{len(outputs)}, sample {completion.index + 1}/{len(output.outputs)}"
            )
            text = completion.text
            if echoes_prompt and output.prompt is not None:
                text = output.prompt + text
            print(f"--- {title} ({completion.finish_reason}) ---\n{text}\n", flush=True)


def _print_json(llm: LLM, outputs: Sequence[RequestOutput]) -> None:
    record = {
        "outputs": [asdict(output) for output in outputs],
        "stats": stats_record(llm.engine.stats()),
    }
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    has_all = encoding.lower().replace("-", "") == "utf8"  # else escapes, which lose nothing
    print(json.dumps(record, ensure_ascii=not has_all, indent=2), flush=True)


def verify(
    path: str,
    model: str,
    *,
    device: str = "auto",
    lora_modules: Sequence[str] | None = None,
    as_json: bool = False,
) -> int:
    """Compute the answer of a recipe again, alone, and say whether it is equal to the bit.

    Args:
        path: a file with a recipe, or with a server's answer that has one; "-" is standard input.
        model: see LLM; dtypes and the size of blocks are the recipe's.
        device: the device that computes.
        lora_modules: the adapters that the recipe may name, "name=path".
        as_json: True to print one JSON object instead of a sentence.

    Returns:
        0 where it is equal, 1 where it differs.

    Raises:
        RequestError: the JSON is no recipe, was changed, or is of other weights or another class.
    """
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    try:
        recipe = json.loads(text)
    except ValueError as error:
        raise RequestError(f"recipe must be JSON, got {error}") from None
    if isinstance(recipe, dict) and isinstance(recipe.get("recipe"), dict):
        recipe = recipe["recipe"]
    settings = options_of_recipe(recipe)
    if lora_modules:
        settings |= {"enable_lora": True, "lora_modules": list(lora_modules)}
    with Progress() as progress:
        progress.show(f"loading {model} ...")
        llm = LLM(model, device=device, batch_invariant=True, graphs="lazy", **settings)
    with llm:
        found = llm.verify(recipe)
    print(json.dumps(asdict(found)) if as_json else found)
    return 0 if found.is_equal else 1
