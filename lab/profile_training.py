"""Where the time of our training step goes: kernels by their time on the device.

python lab/profile_training.py --shape gpt2-small [--length 1024] [--rows 32] [--packed]
"""

from __future__ import annotations

import argparse

import torch
from torch.profiler import ProfilerActivity, profile

from tilewise.bench.trainers.worker import make_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="gpt2-small")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--packed", action="store_true", help="documents, of random lengths")
    parser.add_argument("--compile", default="default")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    spec = {
        "shape": options.shape, "way": "ours-packed" if options.packed else "ours",
        "N": options.length, "B": options.rows, "text": None, "lr": 1e-4, "seed": 0,
        "compile": options.compile,
    }  # fmt: skip
    step, facts = make_step(spec, torch.device(options.device))
    for index in range(5):
        loss = step(index)
    loss.item()
    is_cuda = options.device.startswith("cuda")
    activities = [ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]
    with profile(activities=activities) as record:
        for index in range(options.steps):
            loss = step(index)
        loss.item()
    averages = record.key_averages()
    order = "self_cuda_time_total" if is_cuda else "self_cpu_time_total"
    total = sum(getattr(e, "self_device_time_total" if is_cuda else order) for e in averages)
    print(f"{total / options.steps / 1e3:.2f} ms of kernels a step, {facts['tokens']:,.0f} tokens")
    print(averages.table(sort_by=order, row_limit=40, max_name_column_width=90))


if __name__ == "__main__":
    main()
