"""A worker of which the last rank has no memory left where the ranks meet."""

from __future__ import annotations

import sys

import torch

from tilewise.distributed.shard_group import ShardGroup
from tilewise.engine.tensor_parallel import worker

meet = ShardGroup.meet


def without_memory(self: ShardGroup) -> None:
    if self.rank == self.size - 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")
    meet(self)  # it waits for the others


if __name__ == "__main__":
    ShardGroup.meet = without_memory  # type: ignore[method-assign]
    worker.main(int(sys.argv[1]), sys.argv[2])
