"""`tilewise bench engine`: tokens per second of the whole engine, beside transformers' generate.

Same weights, same prompts, greedy, a fixed number of new tokens. The prompts have one length, so
that the peer needs no padding. Prefill is the time to the first token, decode the rest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

import tilewise
from tilewise.bench.report import emit, format_table
from tilewise.bench.roofline import device_name
from tilewise.engine.llm import LLM, packaged_model
from tilewise.engine.request import SamplingParams

Row = dict[str, Any]
Generate = Callable[[list[list[int]], int], list[list[int]]]


def _prompts(batch: int, length: int, vocab_size: int) -> list[list[int]]:
    """Different prompts, so that the prefix cache has nothing to share."""
    generator = torch.Generator().manual_seed(0)
    ids: list[list[int]] = torch.randint(
        10, vocab_size, (batch, length), generator=generator
    ).tolist()
    return ids


def _ours(path: str, device: str, dtype: str, batch: int, tokens: int) -> Generate:
    llm = LLM(
        path,
        device=device,
        dtype=dtype,
        max_num_seqs=batch,
        max_model_len=tokens,
        num_blocks=batch * -(-tokens // 16),
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


def _transformers(path: str, device: str, dtype: str) -> Generate:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ImportError("the peer needs transformers: pip install transformers") from error
    model = cast(Any, AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)))
    model = model.to(device).eval()

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts, device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
            pad_token_id=0,
        )
        new: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return new

    return generate


def _measure(
    engines: dict[str, Generate], prompts: list[list[int]], new_tokens: int, repeats: int
) -> list[Row]:
    """Time one new token (prefill) and a whole run of each engine, in turns.

    The engines alternate, so that a machine whose speed drifts is unkind to both alike.
    """
    seconds: dict[tuple[str, int], list[float]] = {}
    for turn in range(repeats + 1):
        for name, generate in engines.items():
            for count in (1, new_tokens):
                start = time.perf_counter()
                generate(prompts, count)
                if turn > 0:  # the first turn warms up
                    seconds.setdefault((name, count), []).append(time.perf_counter() - start)
    batch, length = len(prompts), len(prompts[0])
    rows: list[Row] = []
    for name in engines:
        first = statistics.median(seconds[name, 1])
        whole = statistics.median(seconds[name, new_tokens])
        rows.append(
            {
                "engine": name,
                "batch": batch,
                "prefill tok/s": batch * length / first,
                "decode tok/s": batch * (new_tokens - 1) / (whole - first),
                "output tok/s": batch * new_tokens / whole,
            }
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tilewise bench engine", description=__doc__)
    parser.add_argument(
        "--model", default=None, help="checkpoint directory; default: the packaged one"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=None, help="default: cuda if any"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[1, 8, 64], help="sequences at once"
    )
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", action="store_true", help="do not run transformers beside it")
    parser.add_argument("--json", metavar="FILE", default=None, help="also write the results here")
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    path = options.model or str(packaged_model())
    rows: list[Row] = []
    peer = None if options.no_peer else _transformers(path, device, options.dtype)
    for batch in options.batch:
        total = options.prompt_tokens + options.new_tokens
        engines: dict[str, Generate] = {
            "tilewise": _ours(path, device, options.dtype, batch, total)
        }
        if peer is not None:
            engines["transformers"] = peer
        prompts = _prompts(batch, options.prompt_tokens, 1000)
        rows += _measure(engines, prompts, options.new_tokens, options.repeats)
    print(f"{device_name(device)}, torch {torch.__version__}, {options.dtype}, {path}")
    columns = ["batch", "engine", "prefill tok/s", "decode tok/s", "output tok/s"]
    print(format_table(rows, columns))
    document = {"version": tilewise.__version__, "device": device_name(device), "rows": rows}
    document |= {"torch": torch.__version__, "dtype": options.dtype}
    document |= {"prompt_tokens": options.prompt_tokens, "new_tokens": options.new_tokens}
    emit(document, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
