"""What test_compile.py compiles of the kernels by mma.sync: calls of their launchers, without data.

Every row of the tables, full and causal, and every feature by itself and in one mix, for a device
with 163 KiB of shared memory (sm_80) and one with 99 (sm_89); plain rows for sm_86 and sm_120,
which take the tiles of sm_89, and for sm_90, which only tests run them on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.compile_cases import Case, attention_spec, meta
from tests.kernels.compile_cases_gluon import _FEATURES, _tensors
from tests.kernels.planned import mma_results, tensors_of
from tilewise.kernels.gluon.mma.plan import add_bwd, tile_config_fwd, why_not_bwd
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.plan import GRADIENT_TENSORS, Call
from tilewise.kernels.spec import AttentionSpec


@dataclass(frozen=True)
class MmaCase(Case):
    """A call of a launcher of kernels by mma.sync.

    Attributes:
        most_spilled: bytes of a thread that may leave the registers, anywhere in the kernel.
        spills_in_loop: why some of them may do so in the loop that runs most; None: none may.
    """

    most_spilled: int = 0
    spills_in_loop: str | None = None


def launch_forward(arch: int, spec: AttentionSpec) -> None:
    """Call the launcher of the forward pass; of sm_90 by the tiles of sm_80."""
    tensors = _tensors(spec)
    q, k, v = (tensors.pop(name) for name in ("q", "k", "v"))
    is_copied = spec.has_bias and max(spec.head_dim, spec.v_head_dim) <= 128
    tile = tile_config_fwd(spec, 80 if arch == 90 else arch, bias_copied=is_copied)
    mma_results(q, k, v, spec, tile, **tensors)


# Rows of the tables: name -> (head dims, changes to the spec).
_ROWS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "d64": ((64,), {}),
    "d64-fp16": ((64,), {"dtype": torch.float16}),
    "d128": ((128,), {}),
    "d128-short": ((128,), {"max_seqlen_q": 512, "max_seqlen_k": 512}),
    "d256": ((256,), {}),
    "d256-short": ((256,), {"max_seqlen_q": 512, "max_seqlen_k": 512}),
    "d40": ((40,), {}),
    "d80": ((80,), {}),
    "d96": ((96,), {}),
    "d192-128": ((192, 128), {}),
    "d72-200": ((72, 200), {}),
    "d512": ((512,), {}),
    "d320": ((320,), {}),
}
_EVERY_DAY = {
    "sm_80-mma-fwd-d128-causal", "sm_80-mma-fwd-d64-full", "sm_89-mma-fwd-d128-everything",
    "sm_120-mma-fwd-d128-causal",
}  # fmt: skip
# Spills of more than `sass_budgets.SPILL_TOLERANCE`, or in the loop that runs most, by Triton 3.7:
# architecture, name -> (most bytes, why in that loop).
_TWO_MOVES = "two moves in 1,230 instructions or more"
_ALL_AT_ONCE = "every feature at once is for correctness, not for speed"
KNOWN: Mapping[tuple[int, str], tuple[int, str | None]] = {
    (80, "d256-bias"): (136, None),
    (80, "d128-everything"): (80, _ALL_AT_ONCE),
    (80, "d256-everything"): (304, _ALL_AT_ONCE),
    (89, "d64-lengths"): (36, None),
    (89, "d64-maxima"): (24, "four moves in 1,002 instructions"),
    (89, "d256-alibi"): (8, _TWO_MOVES),
    (89, "d256-mask"): (12, _TWO_MOVES),
    (89, "d256-dropout"): (16, _TWO_MOVES),
    (89, "d256-everything"): (320, _ALL_AT_ONCE),
    (120, "d96-causal"): (20, "three moves in 522 instructions"),
}


# In the backward pass a few moves of loop invariants are left in the loop: 10 of 1,007 instructions
# at most in plain calls of Triton 3.7, 66 of 1,984 with every feature.
_FULL = "dk, dv, p and ds fill the registers"
_BWD_SPILLS, _BWD_SPILLS_OF_ALL = 224, 720
_SPILLING = ("everything", "bias")  # of D 128 as sm_80 a bias that is loaded spills 300 bytes


def forward_cases() -> Iterator[MmaCase]:
    """Yield rows and features; see the module's docstring."""
    specs: dict[str, AttentionSpec] = {}
    for name, (dims, changes) in _ROWS.items():
        specs[f"{name}-full"] = attention_spec(*dims, causal=False, **changes)
        specs[f"{name}-causal"] = attention_spec(*dims, **changes)
    plain = set(specs)
    for name, changes in _FEATURES.items():
        if name not in ("fp16", "deterministic"):
            for head_dim in (64, 128, 256):
                specs[f"d{head_dim}-{name}"] = attention_spec(head_dim, **changes)  # type: ignore[arg-type]
    for head_dim in (64, 128):
        specs[f"d{head_dim}-maxima"] = attention_spec(head_dim, needs_max=True)
    for arch in (80, 89, 86, 120, 90):
        for name, spec in specs.items():
            if arch in (80, 89) or (name in plain and "-" in name and name.count("-") == 1):
                known = KNOWN.get((arch, name), (0, None))
                yield MmaCase(
                    f"sm_{arch}-mma-fwd-{name}",
                    arch,
                    functools.partial(launch_forward, arch, spec),
                    slow=f"sm_{arch}-mma-fwd-{name}" not in _EVERY_DAY,
                    mma="mma.sync",
                    most_spilled=known[0],
                    spills_in_loop=known[1],
                )


def launch_backward(spec: AttentionSpec) -> None:
    """Call the launcher of the backward pass."""
    tensors = tensors_of(**_tensors(spec))
    o = meta(*tensors.q.shape[:-1], spec.v_head_dim, dtype=spec.dtype)
    rows = (spec.batch, spec.num_q_heads, spec.max_seqlen_q)
    if spec.is_varlen:
        rows = (spec.num_q_heads, o.shape[0])
    lse = meta(*rows, dtype=torch.float32)
    given = (o, None, o, lse, *tensors)
    maker = Maker(Call.of(spec, given), GRADIENT_TENSORS)
    do, dlse, o_given, lse_given = maker.inputs[:4]
    assert do is not None
    assert o_given is not None
    assert lse_given is not None
    results = add_bwd(maker, spec, do, dlse, o_given, lse_given, maker.tensors)
    maker.finish(results, dict).run(*given)


_BWD_FEATURES = (
    "window", "varlen", "softcap", "bias", "dropout", "mask", "everything", "deterministic",
)  # fmt: skip
_BWD_EVERY_DAY = {"sm_80-mma-bwd-d128-causal", "sm_89-mma-bwd-d64-everything"}


def backward_cases() -> Iterator[MmaCase]:
    """Yield rows of the tables, full and causal, and features that change the code."""
    specs: dict[str, AttentionSpec] = {}
    for head_dims in ((64,), (128,), (256,), (40,), (96,), (192, 128), (512,), (320,)):
        name = "-".join(map(str, head_dims))
        specs[f"d{name}-full"] = attention_spec(*head_dims, causal=False)
        specs[f"d{name}-causal"] = attention_spec(*head_dims)
    for feature in _BWD_FEATURES:
        for head_dim in (64, 128, 256):
            changes = _FEATURES[feature]
            specs[f"d{head_dim}-{feature}"] = attention_spec(head_dim, **changes)  # type: ignore[arg-type]
    for arch in (80, 89):
        for name, spec in specs.items():
            if name.endswith("deterministic") and why_not_bwd(spec) is not None:
                continue
            yield MmaCase(
                f"sm_{arch}-mma-bwd-{name}",
                arch,
                functools.partial(launch_backward, spec),
                slow=f"sm_{arch}-mma-bwd-{name}" not in _BWD_EVERY_DAY,
                mma="mma.sync",
                most_spilled=_BWD_SPILLS_OF_ALL if name.endswith(_SPILLING) else _BWD_SPILLS,
                spills_in_loop=_FULL,
            )


CASES: list[MmaCase] = [*forward_cases(), *backward_cases()]
