"""Write to and copy within the paged cache on the CPU.

What      write_kv_cache scatters new rows into their slots (those of an 8-bit cache are written by
          `rope_write`); copy_blocks copies whole blocks, and their scales.
Grid      one thread: a step of the engine moves kilobytes, less than waking a second one costs.
One call  k_cache and v_cache in place, by addresses and strides of any layout with rows of D
          contiguous elements.
Traffic   each row is read once and written once; adjacent rows are copied together.
Numerics  copies bits; rows of another dtype are first converted by torch, to nearest even.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from tilewise.kernels.cpu.machine.rows import why_not_dtype
from tilewise.kernels.cpu.machine.threads import inner, kernel
from tilewise.kernels.cpu.paged.ids import pairs_of, slots_of
from tilewise.kernels.cpu.paged.quantise import CACHE_CODES
from tilewise.kernels.cpu.paged.rope_write import write_quantised
from tilewise.kernels.spec import ElementSpec


def why_not(spec: ElementSpec) -> str | None:
    """Return why the CPU's functions that write to a cache cannot run `spec`, whose dtype is the
    cache's, or None if they can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return None if spec.dtype in CACHE_CODES else why_not_dtype(spec.dtype)


def write_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write new keys and values into their slots, in place; those of an 8-bit cache are quantised,
    and with (N, P, Hk) scales each row's scale is written, too.

    Args:
        k: (T, Hk, D).
        v: (T, Hk, Dv).
        k_cache: (N, P, Hk, D), written in its own dtype.
        v_cache: (N, P, Hk, Dv).
        slot_mapping: (T,) int64, block * P + offset of each row; -1 skips the row.
        k_scale, v_scale: (N, P, Hk) or (Hk,) float32 of an 8-bit cache.
    """
    if k_scale is not None and v_scale is not None:
        write_quantised(k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
        return
    slots = slots_of(slot_mapping, k_cache)
    for new, cache in ((k, k_cache), (v, v_cache)):
        rows = new.detach().to(cache.dtype)
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        size = cache.element_size()
        assert cache.stride(-1) == 1, "cache rows are contiguous"
        _scatter_rows(
            rows.data_ptr(),
            rows.stride(0) * size,
            rows.stride(1) * size,
            cache.data_ptr(),
            cache.stride(0) * size,
            cache.stride(1) * size,
            cache.stride(2) * size,
            cache.shape[1],
            cache.shape[2],
            cache.shape[3] * size,
            slots,
        )


def copy_blocks(
    k_cache: Tensor,
    v_cache: Tensor,
    block_pairs: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Copy whole blocks, in place: cache[destination] = cache[source] for both caches.

    Args:
        k_cache, v_cache: (N, P, Hk, D) and (N, P, Hk, Dv).
        block_pairs: (n, 2) int64, source and destination; no source is a destination.
        k_scale, v_scale: (N, P, Hk), copied too, or (Hk,), the same for all blocks.
    """
    pairs = pairs_of(block_pairs, k_cache)
    own = [scale.unsqueeze(-1) for scale in (k_scale, v_scale) if scale is not None]
    for cache in (k_cache, v_cache, *(scale for scale in own if scale.dim() == 4)):
        size = cache.element_size()
        assert cache.shape[-1] == 1 or cache.stride(-1) == 1, "cache rows are contiguous"
        _copy_pairs(
            cache.data_ptr(),
            cache.stride(0) * size,
            cache.stride(1) * size,
            cache.stride(2) * size,
            cache.shape[1],
            cache.shape[2],
            cache.shape[3] * size,
            pairs,
        )


@intrinsic
def _copy_bytes(typingctx, target, source, count):
    def codegen(context, builder, sig, args):
        pointer = ir.IntType(8).as_pointer()
        target_, source_ = (builder.inttoptr(address, pointer) for address in args[:2])
        cgutils.raw_memcpy(builder, target_, source_, args[2], 1)
        return context.get_dummy_value()

    index = types.int64
    return types.void(index, index, index), codegen


@inner
def _copy_heads(target, target_head, source, source_head, num_heads, row_size):
    """Copy one token's rows of all heads, of row_size bytes each, between two addresses;
    `target_head` and `source_head` are bytes from head to head."""
    if target_head == row_size and source_head == row_size:
        _copy_bytes(target, source, num_heads * row_size)
        return
    for head in range(num_heads):
        _copy_bytes(target + head * target_head, source + head * source_head, row_size)


@kernel
def _scatter_rows(
    source,
    source_row,
    source_head,
    cache,
    block_bytes,
    token_bytes,
    head_bytes,
    block_size,
    num_heads,
    row_size,
    slots,
):
    for token in range(len(slots)):
        slot = slots[token]
        if slot >= 0:
            block = slot // block_size
            target = cache + block * block_bytes + (slot - block * block_size) * token_bytes
            _copy_heads(
                target, head_bytes, source + token * source_row, source_head, num_heads, row_size
            )


@kernel
def _copy_pairs(
    cache, block_bytes, token_bytes, head_bytes, block_size, num_heads, row_size, pairs
):
    for pair in range(len(pairs)):
        source, target = cache + pairs[pair, 0] * block_bytes, cache + pairs[pair, 1] * block_bytes
        for token in range(block_size):
            _copy_heads(
                target + token * token_bytes,
                head_bytes,
                source + token * token_bytes,
                head_bytes,
                num_heads,
                row_size,
            )
