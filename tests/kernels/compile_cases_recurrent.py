"""What test_compile.py compiles of layers whose memory is a state, on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from tests.kernels.compile_cases import Case, meta
from tilewise.kernels.spec import CHUNK, RecurrentStates
from tilewise.kernels.triton.recurrent import backward, convolution, scan

_WIDE, _LONG, _INT = torch.float32, torch.int64, torch.int32
_TOKENS, _SEQUENCES, _SLOTS = 512, 4, 9


def launch_scan(
    heads: tuple[int, int, int, int], dtype: torch.dtype, is_delta: bool, by_channel: bool
) -> None:
    """Call the recurrence for whole sequences, with states before them, and for slots."""
    key_heads, num_heads, key_dim, value_dim = heads
    key, value = meta(_TOKENS, key_heads, key_dim, dtype=dtype), (num_heads, value_dim)
    gate = (num_heads, key_dim) if by_channel else (num_heads,)
    rows = (
        key, key, meta(_TOKENS, *value, dtype=dtype), meta(_TOKENS, *gate, dtype=_WIDE),
        meta(_TOKENS, num_heads, dtype=_WIDE),
    )  # fmt: skip
    edges, place = meta(_SEQUENCES + 1, dtype=_INT), meta(_SEQUENCES, dtype=_LONG)
    state = meta(_SEQUENCES, num_heads, key_dim, value_dim, dtype=_WIDE)
    options = {"q_scale": 0.5, "is_delta": is_delta}
    scan.launch(*rows, state, edges, **options)  # type: ignore[arg-type]
    states = RecurrentStates(
        meta(_SLOTS, num_heads, key_dim, value_dim, dtype=_WIDE),
        meta(_SLOTS, CHUNK, key_heads, key_dim, dtype=dtype),
        meta(_SLOTS, CHUNK, *gate, dtype=_WIDE),
        meta(_SLOTS, CHUNK, *value, dtype=dtype),
        meta(_SLOTS, CHUNK, num_heads, dtype=_WIDE),
        meta(_SLOTS, CHUNK, num_heads, CHUNK, dtype=dtype if dtype == torch.bfloat16 else _WIDE)
        if is_delta
        else None,
    )
    scan.step(*rows, states, place, place, edges, **options)  # type: ignore[arg-type]
    few = [x[:_SEQUENCES] for x in rows]
    scan.step(*few, states, place, place, edges, **options)  # type: ignore[arg-type]
    if not by_channel:
        backward.gradient(rows[2], *rows, state, state, edges, **options)  # type: ignore[arg-type]


def launch_convolution(channels: int, width: int, dtype: torch.dtype) -> None:
    """Call the convolution for whole sequences and for slots."""
    x, weight = meta(_TOKENS, channels, dtype=dtype), meta(channels, width, dtype=dtype)
    bias, states = meta(channels, dtype=dtype), meta(_SLOTS, width - 1, channels, dtype=dtype)
    edges, place = meta(_SEQUENCES + 1, dtype=_INT), meta(_SEQUENCES, dtype=_LONG)
    convolution.launch(x, weight, bias, states, edges, has_silu=True)
    convolution.last(x, width, states, edges)
    convolution.step(x, weight, None, states, place, place, edges, has_silu=False)
    few = x[:_SEQUENCES]
    convolution.step(few, weight, None, states, place, place, edges, has_silu=False)
    convolution.gradient(x, states, x, weight, bias, states, edges, has_silu=True)


# name -> (Hk, H, K, V), dtype, delta rule, decays by channel
_SCANS = {
    "delta": ((16, 32, 128, 128), torch.bfloat16, True, False),
    "delta-fp32": ((2, 2, 64, 64), torch.float32, True, False),
    "delta-wide": ((4, 4, 256, 256), torch.bfloat16, True, False),
    "kimi": ((32, 32, 128, 128), torch.bfloat16, True, True),
    "mamba": ((1, 48, 128, 64), torch.bfloat16, False, False),
    "mamba-fp16": ((8, 64, 256, 64), torch.float16, False, False),
}
_QUICK = (("delta", 90), ("mamba", 80), ("kimi", 90))


def _cases() -> Iterator[Case]:
    for name, call in _SCANS.items():
        for arch in (80, 90, 100):
            yield Case(
                f"recurrent-{name}-sm_{arch}", arch, partial(launch_scan, *call), hot=False,
                mma="mma.sync" if arch == 80 else None, slow=(name, arch) not in _QUICK,
            )  # fmt: skip
    for arch in (80, 90, 100):
        yield Case(
            f"convolution-sm_{arch}", arch,
            partial(launch_convolution, 8192, 4, torch.bfloat16), products=False, hot=False,
            slow=arch != 90,
        )  # fmt: skip


CASES = [*_cases()]
