"""Tokens drawn by processes that have a share of the vocabulary each: gathered logits or shares.

`ShardedRunner` gathers the logits of a step up to `GATHERED_BYTES` and draws from shares above it.
This times both for rows of one kind, of several processes with gloo between them, and refuses a
number where the tokens of the two differ.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tilewise
from tilewise.bench.report import emit, format_table
from tilewise.bench.roofline import device_name
from tilewise.distributed.shard_group import ShardGroup
from tilewise.distributed.shards import VocabularyHead
from tilewise.engine.batch import Batch, ScheduledSequence
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.runner import Samples
from tilewise.engine.steps.sampler import sample
from tilewise.engine.tensor_parallel.drawing import draw_from_shares

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {"temperature": 1.0},
    "top_k 40": {"temperature": 1.0, "top_k": 40},
    "top_p 0.9": {"temperature": 1.0, "top_p": 0.9},
}


def _batch(kind: str, rows: int) -> Batch:
    return Batch(
        tuple(
            ScheduledSequence(
                seq_id=i, token_ids=(1,), start=0, block_ids=[0], num_samples=1,
                sampling=SamplingParams(**KINDS[kind]), seeds=(i,), num_generated=3 * i,
            )
            for i in range(rows)
        )
    )  # fmt: skip


def _tokens(samples: Samples) -> list[list[int]]:
    return [[token.token_id for token in own] for own in samples]


def _work(rank: int, options: argparse.Namespace, folder: str) -> None:
    size, vocab = options.ranks, options.vocab
    torch.set_num_threads(max(torch.get_num_threads() // size, 1))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    group = ShardGroup(rank, size, torch.device("cpu"))
    head = VocabularyHead(torch.nn.Linear(1, 1, bias=False), vocab, group)
    found: list[dict[str, Any]] = []
    for count in options.rows:
        generator = torch.Generator().manual_seed(count)
        whole = torch.randn(count, vocab, generator=generator)
        whole += 12 * (torch.rand(count, vocab, generator=generator) > 0.9995)  # some 60 stand out
        own = whole[:, head.first : head.end].contiguous()
        for kind in KINDS:
            batch = _batch(kind, count)
            row: dict[str, Any] = {"rows": count, "kind": kind}
            drawn = {}
            for name in ("gathered", "shares"):
                seconds = []
                for _ in range(options.repeats + 1):
                    dist.barrier()
                    started = time.perf_counter()
                    if name == "gathered":
                        drawn[name] = _tokens(sample(head.whole(own), batch))
                    else:
                        drawn[name] = _tokens(draw_from_shares(head, own, batch))
                    seconds.append(time.perf_counter() - started)
                row[f"{name} ms"] = 1e3 * statistics.median(seconds[1:])
            if drawn["gathered"] != drawn["shares"]:
                row = {"rows": count, "kind": kind, "error": "other tokens"}
            found.append(row)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", default=None)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _work, (options, folder), nprocs=options.ranks
        )
        rows = json.loads(Path(folder, "rows.json").read_text())
    document = {
        "version": tilewise.__version__, "device": device_name("cpu"), "torch": torch.__version__,
        "ranks": options.ranks, "vocabulary": options.vocab, "repeats": options.repeats,
        "rows": rows,
    }  # fmt: skip
    print(format_table(rows, ["rows", "kind", "gathered ms", "shares ms", "error"]))
    emit(document, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
