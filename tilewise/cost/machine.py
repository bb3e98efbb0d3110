"""Profiles of machines that serve a model: peaks, efficiencies and overheads.

A profile is data with the origin of every number. `tilewise bench machine` writes one for the
machine at hand. The profiles named here come from the measurements of docs/; the origin of a number
that was not measured says so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tilewise.cost.ops import DevicePeaks

__all__ = ["MACHINES", "Machine", "machine", "read_machine"]


@dataclass(frozen=True, slots=True)
class Machine:
    """The profile of a machine, as `StepCost` needs it; times are seconds, rates are per second.

    Attributes:
        name: the name of the device.
        flops: FLOP/s of a large matrix product, by dtype.
        read_bandwidth, copy_bandwidth: bytes/s of a kernel that only reads, and of a copy, read and
            written together.
        memory_bytes: the memory of the device.
        link_bandwidth: bytes/s between device and pinned main memory, one direction; 0 for a device
            that computes in main memory.
        link_s: the fixed time of a transfer, in addition to that of its bytes.
        peer_bandwidth: bytes/s from a GPU to the others of its host, one direction; 0 without
            others.
        small_sum_s, large_sum_s: the fixed time of a sum over several GPUs, in addition to that of
            its bytes. A small sum is one in which each GPU writes to all others at once: its time
            counts once for each of the others, in addition to the norm that is part of it. A large
            sum goes around a ring.
        stream_efficiency: the share of read_bandwidth at which a step's products read their
            weights.
        product_efficiency: the share of flops at which a step's products multiply.
        key_efficiency: the share of read_bandwidth at which attention reads keys and values.
        beside_efficiency: the share of read_bandwidth at which attention reads keys and values in
            steps with prompts on a GPU, where one kernel reads for prompts and decoding sequences.
        near_bytes: the bytes of a step's keys and values that stay in the GPU's caches until the
            next step; 0 if not known. Bytes beyond it are read at far_efficiency in addition.
        far_efficiency: the share of read_bandwidth for bytes beyond near_bytes.
        attention_efficiency: the share of flops at which attention of a prompt multiplies.
        element_efficiency: the share of copy_bandwidth at which norms, activations and rotations
            move their tensors.
        overlaps: True if reads and products overlap, so that the slower one decides; otherwise
            their times add up.
        attends_apart: True if reads and products of attention add up even if overlaps is True,
            because decoding sequences and prompts have separate kernels.
        factors: corrections of the predicted time of products, norms and kernels, by the kind of a
            step ("decode" or "prompts") and its rows; interpolated linearly between two numbers.
        reading_s: the additional time of a step's first keys and values on a GPU, until they keep
            the memory busy; proportionally less if there are few.
        kernel_s: the fixed time of a kernel on the device, in addition to that of its work.
        sample_s: the time to sample a token on the device, in addition to that of reading its
            logits.
        prompt_s: the fixed time of a step whose prompts have more than few_pairs pairs of a query
            and a key, since other kernels compute them.
        few_pairs: the number of pairs up to which prompt_s is not added.
        step_s, step_sequence_s: the host's time to schedule and submit a step, and the part of each
            of its sequences.
        token_s: the host's time for each token of a prompt.
        update_s, update_sequence_s: the host's time to process a step's tokens, and the part of
            each of its sequences.
        renew_s, renew_sequence_s, renewed_sequence_s: the host's additional time for a step whose
            rows differ from those of the step before (StepWork.renews): before the step, for each
            of its sequences, and for each token that is processed.
        launch_s: the host's time for a kernel of a step that is not captured.
        launch_sequence_s, launch_token_s, launch_draw_s: the host's additional time, in a step that
            is not captured, for each sequence, for each token, and once if any token is sampled.
        captures: True if decode steps are captured graphs.
        overlaps_steps: True if the next step is submitted while one runs.
        origins: the origin of each number, by the name of its field.

    Raises:
        ValueError: flops is empty, a rate, a size or a share is not above 0, a time is negative, or
            factors has another kind or an empty one.
    """

    name: str
    flops: Mapping[str, float]
    read_bandwidth: float
    copy_bandwidth: float
    memory_bytes: float
    link_bandwidth: float = 0.0
    link_s: float = 0.0
    peer_bandwidth: float = 0.0
    small_sum_s: float = 0.0
    large_sum_s: float = 0.0
    stream_efficiency: float = 1.0
    product_efficiency: float = 1.0
    key_efficiency: float = 1.0
    beside_efficiency: float = 1.0
    near_bytes: float = 0.0
    far_efficiency: float = 1.0
    attention_efficiency: float = 1.0
    element_efficiency: float = 1.0
    overlaps: bool = True
    attends_apart: bool = False
    factors: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    reading_s: float = 0.0
    kernel_s: float = 0.0
    sample_s: float = 0.0
    prompt_s: float = 0.0
    few_pairs: int = 0
    step_s: float = 0.0
    step_sequence_s: float = 0.0
    token_s: float = 0.0
    update_s: float = 0.0
    update_sequence_s: float = 0.0
    renew_s: float = 0.0
    renew_sequence_s: float = 0.0
    renewed_sequence_s: float = 0.0
    launch_s: float = 0.0
    launch_sequence_s: float = 0.0
    launch_token_s: float = 0.0
    launch_draw_s: float = 0.0
    captures: bool = False
    overlaps_steps: bool = False
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if not self.flops:
            raise ValueError("flops must hold at least one dtype, got none")
        for name in ("read_bandwidth", "copy_bandwidth", "memory_bytes"):
            _check(name, getattr(self, name), above=True)
        for each in fields(self):
            if each.name.endswith("_efficiency"):
                _check(each.name, getattr(self, each.name), above=True)
            elif each.name.endswith("_s") or each.name in (
                "link_bandwidth",
                "peer_bandwidth",
                "few_pairs",
                "near_bytes",
            ):
                _check(each.name, getattr(self, each.name), above=False)
        for dtype, rate in self.flops.items():
            _check(f"flops[{dtype!r}]", rate, above=True)
        for kind, told in self.factors.items():
            if kind not in ("decode", "prompts") or not told:
                raise ValueError(
                    f"factors must be of decode or prompts steps, got {kind!r}: {told}"
                )
            for rows, factor in told.items():
                _check(f"factors[{kind!r}][{rows}]", factor, above=True)

    def peaks(self, dtype: str) -> DevicePeaks:
        """Return the device's name, its FLOP/s in `dtype`, a key of `flops`, and its memory's
        bandwidths for reading and for copying, as `Cost.time` needs them.

        Raises:
            ValueError: the profile has no FLOP/s for this dtype.
        """
        if dtype not in self.flops:
            raise ValueError(f"dtype must be {', '.join(self.flops)} on {self.name}, got {dtype!r}")
        return DevicePeaks(self.name, self.flops[dtype], self.read_bandwidth, self.copy_bandwidth)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields by name as a dict that JSON can hold."""
        return asdict(self) | {"flops": dict(self.flops), "origins": dict(self.origins)}


def _check(name: str, value: object, *, above: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value < float("inf") and (value or not above)):  # type: ignore[operator]
        rule = "finite and above 0" if above else "finite and at least 0"
        raise ValueError(f"{name} must be {rule}, got {value!r}")


def read_machine(path: str | Path) -> Machine:
    """Read a profile from a JSON file that `tilewise bench machine` wrote.

    The file holds the fields of a Machine, or an object that has them under the key "machine".

    Raises:
        ValueError: the file is not JSON, or a field is missing, unknown or out of its range.
        OSError: the file cannot be read.
    """
    try:
        found = json.loads(Path(path).read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be a profile in JSON, got {error}") from None
    if isinstance(found, dict) and "machine" in found:
        found = found["machine"]
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold an object, got {type(found).__name__}")
    known = {each.name for each in fields(Machine)}
    unknown, needed = (
        set(found) - known,
        {"name", "flops", "read_bandwidth", "copy_bandwidth", "memory_bytes"},
    )
    if unknown or not needed <= set(found):
        wrong = ", ".join(sorted(unknown)) or "without " + ", ".join(sorted(needed - set(found)))
        raise ValueError(f"{path} must have the fields of a machine and no others, got {wrong}")
    if not isinstance(found["flops"], dict):
        raise ValueError(f"flops must be FLOP/s by dtype, got {found['flops']!r}")
    for name in ("overlaps", "attends_apart", "captures", "overlaps_steps"):
        if not isinstance(found.get(name, False), bool):
            raise ValueError(f"{name} must be true or false, got {found[name]!r}")
    found["factors"] = _factors(found.get("factors", {}))
    # Older profiles have one number for both.
    found.setdefault("beside_efficiency", found.get("key_efficiency", 1.0))
    return Machine(**found)


def _factors(told: object) -> dict[str, dict[int, float]]:
    """Return the `factors` of a profile in JSON, {kind: {rows: factor}}, with ints as row counts,
    which are strings in JSON.

    Raises:
        ValueError: `told` is not such a mapping.
    """
    try:
        return {
            kind: {int(rows): factor for rows, factor in of_rows.items()}
            for kind, of_rows in told.items()  # type: ignore[attr-defined]
        }
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"factors must be numbers by kind and rows, got {told!r}") from None


def machine(name: str) -> Machine:
    """Return a profile of this module by its short name in MACHINES: h200, h100, a100, cpu.

    Raises:
        ValueError: no profile has that name.
    """
    if name not in MACHINES:
        raise ValueError(f"gpu must be one of {', '.join(MACHINES)}, got {name!r}")
    return MACHINES[name]


_ROOF = "docs/results/hopper.md, docs/design/decode.md: H200, torch 2.11.0, 2026-11-20 and 22"
_STEPS = (
    "fitted to the decode steps of Qwen3-0.6B's shape in lab/results/engine_h200.json, which "
    "it gives as 1.38, 2.27, 8.82 ms for 1.37, 2.29, 8.80 measured at batch 1, 32, 256"
)
_HOST = "lab/results/engine_h200.json, host parts at batch 1, 32 and 256"
_LINK = (
    "not measured: 64 GB/s of PCIe 5.0 x16, 0.85 of it as is usual for pinned memory, 10 us each"
)
_PEERS = "not measured: 450 GB/s of NVLink 4 one way, 0.8 of it as is usual for large collectives"
_SUMS = (
    "steps of Llama-3-8B's shape with and without sums, on H100s "
    "(lab/results/tensor_parallel_h100.json): with these and peer_bandwidth sums of 8 KiB, "
    "256 KiB and 2 MiB on two GPUs take 1.2, 2.7 and 12.9 us where 0.7, 1.4 and 17.1 were "
    "measured, of 8 and 256 KiB on four 3.7 and 8.0 where 3.6 and 6.9 were, and NCCL's of 2 MiB on "
    "two and four 30.8 and 33.7 where 36.4 and 32.1 were"
)

_H200 = Machine(
    name="NVIDIA H200",
    flops={"bfloat16": 747e12, "float16": 747e12},
    read_bandwidth=4.42e12,
    copy_bandwidth=4.27e12,
    memory_bytes=141e9,
    link_bandwidth=54e9,
    link_s=10e-6,
    peer_bandwidth=360e9,
    small_sum_s=1.2e-6,
    large_sum_s=25e-6,
    stream_efficiency=0.93,
    product_efficiency=0.93,
    key_efficiency=0.97,
    beside_efficiency=0.97,
    attention_efficiency=0.8,
    kernel_s=3.35e-6,
    step_s=160e-6,
    step_sequence_s=2.1e-6,
    token_s=90e-9,
    update_s=11e-6,
    update_sequence_s=1.3e-6,
    launch_s=30e-6,
    captures=True,
    overlaps_steps=True,
    origins={
        "flops": f"{_ROOF}; bf16 product of 8,192^3",
        "read_bandwidth": _ROOF,
        "copy_bandwidth": _ROOF,
        "memory_bytes": "data sheet",
        "link_bandwidth": _LINK,
        "link_s": _LINK,
        "peer_bandwidth": _PEERS,
        "small_sum_s": _SUMS,
        "large_sum_s": _SUMS,
        "stream_efficiency": "vLLM's step of Llama-3-8B at batch 1, 4.94 ms, which it gives as 4.9 "
        "(lab/results/engine_vllm_h200.json)",
        "product_efficiency": "vLLM's prefill of Llama-3-8B, 43,700 tokens/s, which it gives as "
        "43,400 (lab/results/engine_vllm_h200.json)",
        "key_efficiency": "docs/design/decode.md: 4.33 of 4.42 TB/s with blocks of 16",
        "beside_efficiency": "not measured: as key_efficiency",
        "attention_efficiency": "lab/results/attention_h200.json: 599 TFLOP/s causal, D 128, "
        "N 4,096",
        "kernel_s": _STEPS,
        "step_s": _HOST,
        "step_sequence_s": _HOST,
        "token_s": "a tuple's slice and a prefix block's bytes; measured on a CPU of this project",
        "update_s": _HOST,
        "update_sequence_s": _HOST,
        "launch_s": "lab/results/host_h200.json: 29.3 us for a forward pass",
    },
)


def _derived(
    name: str, flops: float, read: float, memory: float, link: float, peers: float
) -> Machine:
    """Return the profile of a GPU that was not measured: its data sheet times an H200's
    efficiencies.

    `flops` and `read` are the data sheet's FLOP/s and bytes/s (an H200's are 989e12 and 4.8e12),
    `memory` its bytes, `link` and `peers` the bytes/s of its links to main memory and to other
    GPUs. Fixed times are the H200's.
    """
    what = "not measured: its data sheet, times the share of its own that an H200 reached"
    shares = {"flops": flops / 989e12, "read": read / 4.8e12}
    rates = ("flops", "read_bandwidth", "copy_bandwidth", "link_bandwidth", "peer_bandwidth")
    origins = dict.fromkeys(rates, what)
    rest = "not measured: as on an H200"
    return replace(
        _H200,
        name=name,
        flops={dtype: rate * shares["flops"] for dtype, rate in _H200.flops.items()},
        read_bandwidth=_H200.read_bandwidth * shares["read"],
        copy_bandwidth=_H200.copy_bandwidth * shares["read"],
        memory_bytes=memory,
        link_bandwidth=0.85 * link,
        peer_bandwidth=0.8 * peers,
        origins=dict.fromkeys(_H200.origins, rest) | origins | {"memory_bytes": "data sheet"},
    )


_FITTED = (
    "lab/results/simulate_live_cpu.json, fitted to 164 steps of the story model in bfloat16 by "
    "processor time; shares are of the peaks here, above 1 where that part hardly weighs"
)
_PEAK = "one thread of the machine of docs/results/engine.md, torch 2.13.0+cpu, 2026-11-22"

_CPU = Machine(
    name="Intel Xeon with AMX, 1 thread",
    flops={"float32": 169e9, "bfloat16": 1.10e12, "float16": 159e9},
    read_bandwidth=17.0e9,
    copy_bandwidth=12.6e9,
    memory_bytes=23e9,
    # weights come from the caches: their time is part of the kernels' time
    stream_efficiency=100.0,
    product_efficiency=0.159,
    key_efficiency=0.437,
    attention_efficiency=1.29,
    element_efficiency=100.0,
    overlaps=False,
    kernel_s=20.3e-6,
    sample_s=73.9e-6,
    step_s=24.5e-6,
    step_sequence_s=1.5e-6,
    token_s=95e-9,
    update_s=34.6e-6,
    update_sequence_s=2.3e-6,
    origins={
        "fitted": _FITTED,
        "flops": _PEAK,
        "read_bandwidth": _PEAK,
        "copy_bandwidth": _PEAK,
        "memory_bytes": _PEAK,
    },
)

MACHINES: dict[str, Machine] = {
    "h200": _H200,
    "h100": _derived("NVIDIA H100 SXM", 989e12, 3.35e12, 80e9, 64e9, 450e9),
    "a100": _derived("NVIDIA A100 SXM 40 GB", 312e12, 1.555e12, 40e9, 32e9, 300e9),
    "cpu": _CPU,
}
"""Profiles by the name that the command line takes."""
