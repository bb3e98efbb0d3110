"""Which backend computes which op on this machine, and why the others do not."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.kernels import device as facts
from tilewise.ops import explain
from tilewise.testing import make_paged_cache, make_qkv

__all__ = ["Support", "devices", "support"]

# The usual head of a model, and of DeepSeek's latents.
_HEAD_DIM, _RANK, _ROPE = 128, 512, 64


@dataclass(frozen=True, slots=True)
class Support:
    """The backend that an example call of one op gets on one type of device.

    Attributes:
        op: the name of the op.
        device: the type of the device, "cpu" or "cuda".
        dtype: the dtype of the call's tensors.
        backend: the backend that is chosen; None if all refuse.
        refusals: the reason of each backend that refuses the call, by its name.
    """

    op: str
    device: str
    dtype: str
    backend: str | None
    refusals: dict[str, str]


def devices() -> list[str]:
    """Return ["cuda", "cpu"] if there is a GPU and Triton works, else ["cpu"]."""
    return ["cuda", "cpu"] if torch.cuda.is_available() and facts.has_triton() else ["cpu"]


def support() -> list[Support]:
    """Return the backend of attention, paged_attention and mla_decode, on the GPU, if there is one,
    and on the CPU.

    The example calls are bfloat16 and causal, with heads of usual sizes. They are only planned:
    nothing is computed or compiled.
    """
    found = []
    for where in ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]:
        dtype = torch.bfloat16
        q, k, v = make_qkv(1, 128, 128, 8, 2, _HEAD_DIM, dtype=dtype, device=where)
        found.append(_support("attention", where, q, k, v, causal=True))
        k_cache, v_cache, table, lengths = make_paged_cache(
            [40, 7], 16, 2, _HEAD_DIM, dtype=dtype, device=where
        )
        step = {
            "block_table": table,
            "seqlens_k": lengths,
            "cu_seqlens_q": torch.tensor([0, 1, 2], dtype=torch.int32, device=where),
            "max_seqlen_q": 1,
        }
        q = torch.zeros(2, 8, _HEAD_DIM, dtype=dtype, device=where)
        found.append(_support("paged_attention", where, q, k_cache, v_cache, **step))
        latents = torch.zeros(k_cache.shape[0], 64, _RANK + _ROPE, dtype=dtype, device=where)
        q_latent = torch.zeros(2, 16, _RANK, dtype=dtype, device=where)
        q_rope = torch.zeros(2, 16, _ROPE, dtype=dtype, device=where)
        found.append(
            _support("mla_decode", where, q_latent, q_rope, latents, softmax_scale=0.1, **step)
        )
    return found


def _support(op: str, where: str, *args: torch.Tensor, **options: object) -> Support:
    told = explain(op, *args, **options)
    refusals = {name: why for name, why in told.refusals.items() if name != "reference"}
    dtype = str(args[0].dtype).removeprefix("torch.")
    return Support(op, where, dtype, told.backend, refusals)
