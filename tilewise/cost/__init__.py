"""Predict the cost of an operation or of a model's step on a machine, without running it. No torch.

ops.py       bytes and FLOPs of every operation, from the papers' formulas
memory.py    bytes of the cache, and slots that hold nothing
model.py     the sizes of a model on which the cost of a token depends
machine.py   a machine's measured peaks, efficiencies and overheads, each with its origin
padding.py   rows that a captured step runs
step.py      seconds of one step of the engine, from the four
"""

from tilewise.cost.machine import MACHINES, Machine, machine, read_machine
from tilewise.cost.memory import (
    WastedSlots,
    cache_bytes_by_kind,
    grouped_heads,
    kv_cache_bytes,
    latent_dims,
    mla_cache_bytes,
    wasted_slots,
    wasted_slots_contiguous,
)
from tilewise.cost.model import Sizes, read_sizes
from tilewise.cost.ops import (
    H200,
    Cost,
    DevicePeaks,
    Tiles,
    activation_cost,
    choose_tiles,
    copy_blocks_cost,
    flash_attention_backward_cost,
    flash_attention_cost,
    io_flash,
    io_standard,
    merge_states_cost,
    mla_decode_cost,
    norm_cost,
    on_chip_elements,
    paged_attention_cost,
    product_cost,
    rope_cost,
    standard_attention_cost,
    visible_pairs,
    write_kv_cache_cost,
)
from tilewise.cost.step import (
    StepCost,
    StepSeconds,
    StepWork,
    recompute_seconds,
    sum_seconds,
    swap_seconds,
)

__all__ = [
    "H200",
    "MACHINES",
    "Cost",
    "DevicePeaks",
    "Machine",
    "Sizes",
    "StepCost",
    "StepSeconds",
    "StepWork",
    "Tiles",
    "WastedSlots",
    "activation_cost",
    "cache_bytes_by_kind",
    "choose_tiles",
    "copy_blocks_cost",
    "flash_attention_backward_cost",
    "flash_attention_cost",
    "grouped_heads",
    "io_flash",
    "io_standard",
    "kv_cache_bytes",
    "latent_dims",
    "machine",
    "merge_states_cost",
    "mla_cache_bytes",
    "mla_decode_cost",
    "norm_cost",
    "on_chip_elements",
    "paged_attention_cost",
    "product_cost",
    "read_machine",
    "read_sizes",
    "recompute_seconds",
    "rope_cost",
    "standard_attention_cost",
    "sum_seconds",
    "swap_seconds",
    "visible_pairs",
    "wasted_slots",
    "wasted_slots_contiguous",
    "write_kv_cache_cost",
]
