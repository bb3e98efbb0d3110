"""What test_compile.py compiles of the kernels between products: norms, activations, sampling."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tests.kernels.compile_cases import ARCHITECTURES, Case, meta
from tests.kernels.compile_cases_paged import launch_paged
from tests.kernels.planned import serving_spec


def launch_norms(dim: int, dtype: torch.dtype) -> None:
    """Call every launcher of norms and activations for rows of `dim` channels."""
    from tilewise.kernels.triton.step import activation, norm

    x, weight = meta(8, dim, dtype=dtype), meta(dim, dtype=dtype)
    norm.rms_norm(x, weight, 1e-6)
    norm.add_rms_norm(x, x, weight, 1e-6)
    norm.shifted_rms_norm(meta(8, 9, dim, dtype=dtype)[:, 1:5], weight, 1e-6)
    parts = meta(4, 8, dim, dtype=torch.float32)
    norm.add_parts_shifted_rms_norm(parts, x, weight, 1e-6)
    both, o = meta(8, 6 * dim, dtype=dtype), meta(8, 2 * dim, dtype=dtype)
    for function in ("silu", "gelu", "gelu_tanh"):
        activation.gated_mul(both, None, function)
    activation.gated_mul(both[:, : 2 * dim], o, "sigmoid")


def launch_shared_sums(
    dim: int, size: int, dtype: torch.dtype, *, is_whole: bool = True
) -> None:  # fmt: skip
    """Call the sums over GPUs of rows, and of parts of products and of embeddings."""
    from tilewise.kernels.triton.step import flagged_sum, shared_sum

    rows, weight = meta(256, dim, dtype=dtype), meta(dim, dtype=dtype)
    given: dict[str, Any] = {
        "inboxes": meta(size, dtype=torch.int64), "epochs": meta(256, dtype=torch.int32),
        "rank": 0, "size": size,
    }  # fmt: skip
    parts, ids = meta(4, 256, dim, dtype=torch.float32), meta(256, dtype=torch.int64)
    of_words = partial(shared_sum.launch, **given, is_dealt=True)
    of_flags = partial(flagged_sum.launch, **given, most_rows=256)
    of_flags(rows, rows, weight, 1e-6, rows, rows)
    of_words(rows, rows, weight, 1e-6, rows, rows)
    if is_whole:
        shared_sum.launch(rows, rows, weight, 1e-6, rows, rows, **given, is_dealt=False)
        of_words(parts, rows, weight, 1e-6, rows, rows, parts=4)
        of_flags(parts, rows, weight, 1e-6, rows, rows, parts=4)
        of_flags(rows, None, None, 0.0, rows, rows, ids=ids, first=0, end=256)


def launch_draws(vocab: int) -> None:
    """Call the sampler for floats, with and without truncation."""
    from tilewise.kernels.triton.step import sampling

    logits = meta(8, vocab, dtype=torch.float32)
    real, integer = meta(8, dtype=torch.float32), meta(8, dtype=torch.int32)
    stream = meta(8, dtype=torch.int64)
    sampling.sample_tokens(logits, real, integer, real, real, stream, stream)
    sampling.sample_tokens(logits, real, None, None, None, stream, stream)


def launch_sampling(vocab: int, *, is_whole: bool = True) -> None:
    """Call the sampler for logits as a head rounds them, and both kinds of log-probabilities."""
    from tilewise.kernels.triton.step import sampling

    logits = meta(8, vocab, dtype=torch.float32)
    real, integer = meta(8, dtype=torch.float32), meta(8, dtype=torch.int32)
    stream = meta(8, dtype=torch.int64)
    sampling.sample_tokens(logits, None, None, None, None, None, None)
    if is_whole:
        narrow = meta(8, vocab, dtype=torch.bfloat16)
        sampling.sample_tokens(narrow, real, integer, real, real, stream, stream)
    for count in (0, 20):
        sampling.token_logprobs(logits, stream, count)


def launch_adjust(vocab: int) -> None:
    """Call the adjustment of logits with every part that may be left out, and without."""
    from tilewise.kernels.triton.step import adjust_logits

    logits, rows = meta(8, vocab, dtype=torch.float32), meta(3, dtype=torch.int64)
    mask, which = meta(2, -(-vocab // 32), dtype=torch.int32), meta(3, dtype=torch.int32)
    counts, penalties = meta(4, vocab, dtype=torch.int32), meta(3, 3, dtype=torch.float32)
    biases = rows, rows, meta(3, dtype=torch.float32)
    nothing = (None,) * 3
    adjust_logits.launch(logits, rows, mask, which, *biases, counts, which, penalties)
    adjust_logits.launch(logits, rows, mask, which, *nothing, *nothing)
    adjust_logits.launch(logits, rows, None, None, *nothing, counts, which, penalties)


def launch_linear(outputs: int, channels: int) -> None:
    """Call the product of few rows on the tile that its table gives."""
    from tilewise.kernels.triton.step import linear

    weight, bias = (
        meta(*shape, dtype=torch.bfloat16) for shape in ((outputs, channels), (outputs,))
    )
    linear.launch(meta(4, channels, dtype=torch.bfloat16), weight, bias)


def launch_early(dim: int, mode: int) -> None:
    """Call what a decode step launches early, over 16 heads of 128 channels."""
    from tilewise.kernels import early
    from tilewise.kernels.triton.paged import rope_write
    from tilewise.kernels.triton.step import decode_rows

    with early.launching(dict.fromkeys(early.CHOSEN, mode)):
        launch_norms(dim, torch.bfloat16)
        launch_shared_sums(dim, 4, torch.bfloat16, is_whole=False)
        for outputs, channels in ((1024, 2048), (4096, 1024)):
            launch_linear(outputs, channels)
        # Truncation, 3 s of a core, is among what moves rows on.
        launch_sampling(4096, is_whole=False)
        spec = serving_spec(early=mode)
        launch_paged(spec, is_planned=True)
        heads = meta(16, 16, 128, dtype=torch.bfloat16)
        cache = meta(100, 16, 8, 128, dtype=torch.bfloat16)
        weight, angles = meta(128, dtype=torch.bfloat16), meta(16, 64, dtype=torch.float32)
        rope_write.launch(
            heads, heads[:, :8], heads[:, :8], cache, cache, meta(16, dtype=torch.int64),
            cos=angles, sin=angles, q_norm=weight, k_norm=weight,
        )  # fmt: skip
        rows = meta(16, dtype=torch.int64)
        active = meta(16, dtype=torch.int32)
        decode_rows.finish(
            rows,
            active.bool(),
            rows,
            rows,
            rows,
            active,
            rows[:1],
            meta(4, 16, 2, dtype=rows.dtype),
        )
        launch_around(dim)


def launch_around(dim: int) -> None:
    """Call what begins a decode step and looks up, and what draws and moves rows on."""
    from tilewise.kernels.triton.step import decode_rows

    long, int32 = meta(16, dtype=torch.int64), meta(16, dtype=torch.int32)
    real = meta(16, dtype=torch.float32)
    decode_rows.start(
        long, long, int32, meta(16, 128, dtype=torch.int32), long[:1], block_size=16, ring=4,
        positions=long, slot_mapping=long, seqlens_k=int32, token=long,
        embedding=meta(4096, dim, dtype=torch.bfloat16),
        angles=meta(4096, 128, dtype=torch.float32),
    )  # fmt: skip
    rows = decode_rows.Moved(long, long, long, long, long[:1], meta(4, 16, 2, dtype=torch.int64))
    logits = meta(16, 4096, dtype=torch.bfloat16)
    decode_rows.draw(logits, real, int32, real, real, long, rows)


def launch_invariant_linear(dtype: torch.dtype) -> None:
    """Call the product of fixed tiles."""
    from tilewise.kernels.triton.step import invariant_linear

    x, weight, bias = (meta(*shape, dtype=dtype) for shape in ((300, 4096), (6144, 4096), (6144,)))
    invariant_linear.launch(x, weight, bias)


def launch_low_rank(parts: int, rank: int, *, mode: int = 0) -> None:
    """Call what adapters add to a product, and to a part of one in float32, with mixed adapters."""
    from tilewise.kernels import early
    from tilewise.kernels.low_rank import TILE, LowRank, RowTiles
    from tilewise.kernels.triton.step import low_rank

    width, outputs, slots, dtype = 4096, 6144, 32, torch.bfloat16
    weights = LowRank(
        meta(slots, parts * rank, width, dtype=dtype),
        meta(slots, rank, outputs, dtype=dtype),
        meta(slots, parts, dtype=torch.float32),
        meta(slots, parts, dtype=torch.int32),
        meta(parts + 1, dtype=torch.int32),
    )
    tiles = RowTiles(meta(46, dtype=torch.int32), meta(46, TILE, dtype=torch.int32))
    x = meta(256, width, dtype=dtype)
    with early.launching(dict.fromkeys(early.CHOSEN, mode)):
        for kind in (dtype, torch.float32) if mode else (dtype,):  # parts are Hopper's
            low_rank.launch(meta(256, outputs, dtype=kind), x, weights, tiles)


def launch_experts(tokens: int, *, packed: bool) -> None:
    """Route and multiply in a mixture of gpt-oss-20b's shape, or of Qwen3-30B-A3B's."""
    from tilewise.kernels.triton.experts import choose, launch

    width, inner, experts, active = (2880, 2880, 32, 4) if packed else (2048, 768, 128, 8)
    dtype = torch.bfloat16
    given: dict[str, torch.Tensor | None] = {}
    for name, rows, columns in (("up", 2 * inner, width), ("down", width, inner)):
        given[f"{name}_bias"] = meta(experts, rows, dtype=dtype) if packed else None
        given[f"{name}_scale"] = None
        given[name] = meta(experts, rows, columns, dtype=dtype)
        if packed:
            given[name] = meta(experts, rows, columns // 32, 16, dtype=torch.uint8)
            given[f"{name}_scale"] = meta(experts, rows, columns // 32, dtype=torch.uint8)
    x, logits = meta(tokens, width, dtype=dtype), meta(tokens, experts, dtype=dtype)
    # As of Qwen3.5-35B-A3B a block of all tokens, with a gate.
    given["shared"] = None if packed else x
    given["shared_gate"] = None if packed else meta(tokens, 1, dtype=dtype)
    scores, groups = ("softmax", (1, 1, 1)) if packed else ("sigmoid", (8, 4, 2))
    correction = None if packed else meta(experts, dtype=torch.float32)
    chosen, weights = choose.launch(
        logits, correction, None, active, scores, True, 0.0, 1.0, *groups, jitter=0.01
    )
    launch.launch(
        x, chosen, weights, **given, activation="clamped" if packed else "silu",  # type: ignore[arg-type]
        interleaved=packed, limit=7.0, alpha=1.702, weighs_input=False, batch_invariant=False,
    )  # fmt: skip


def launch_key_bias(dtype: torch.dtype) -> None:
    """Make channels of a mask and of a float bias, for heads of 32 and of 20 channels."""
    from tilewise.kernels.triton.attention import key_bias

    for kind in (torch.bool, torch.float32):
        for dim in (32, 20):
            x, keys = meta(256, 256, 4, dim, dtype=dtype), meta(256, 256, dtype=kind)
            key_bias.key_bias_channels(x, x.transpose(1, 2), keys[:, :4], dim**-0.5)


def step_cases() -> Iterator[Case]:
    """Yield small and large widths for every architecture."""
    for arch in ARCHITECTURES:
        for dim, dtype in ((1024, torch.bfloat16), (16384, torch.bfloat16), (33, torch.float32)):
            yield Case(
                f"sm_{arch}-norms-{dim}",
                arch,
                lambda dim=dim, dtype=dtype: launch_norms(dim, dtype),  # type: ignore[misc]
                products=False,
                slow=True,  # every day they are compiled as they begin early
            )
        for dtype in (torch.bfloat16, torch.float32):
            yield Case(
                f"sm_{arch}-key-bias-{str(dtype)[6:]}",
                arch,
                partial(launch_key_bias, dtype),
                products=False,
                slow=arch != 90 or dtype != torch.bfloat16,
            )
        for dim, size, dtype in (
            (4096, 4, torch.bfloat16), (8192, 4, torch.bfloat16), (2880, 2, torch.float32),
        ):  # fmt: skip
            if arch >= 90:  # where it is used
                yield Case(
                    f"sm_{arch}-shared-sums-{dim}-{size}",
                    arch,
                    lambda dim=dim, size=size, dtype=dtype: launch_shared_sums(dim, size, dtype),  # type: ignore[misc]
                    products=False,
                    slow=arch != 90 or dim != 4096,
                )
        for outputs in (1024, 4096, 28672, 151_936):
            yield Case(
                f"sm_{arch}-linear-{outputs}",
                arch,
                lambda outputs=outputs: launch_linear(outputs, 4096),  # type: ignore[misc]
                mma="mma.sync",  # 16 rows are below what warp-group instructions multiply
                slow=arch != 90 or outputs != 4096,
            )
        for mode in (1, 2):
            if arch >= 90:
                yield Case(
                    f"sm_{arch}-early-{mode}",
                    arch,
                    lambda mode=mode: launch_early(1024, mode),  # type: ignore[misc]
                    products=False,
                    slow=arch != 90 or mode != 1,
                )
        for dtype in (torch.bfloat16, torch.float32):
            yield Case(
                f"sm_{arch}-invariant-linear-{str(dtype)[6:]}",
                arch,
                lambda dtype=dtype: launch_invariant_linear(dtype),  # type: ignore[misc]
                products=dtype == torch.bfloat16,
                slow=arch != 90 or dtype != torch.bfloat16,
            )
        for parts, rank, mode in ((3, 16, 0), (1, 512, 0), (2, 64, 2)):
            if mode == 0 or arch >= 90:
                yield Case(
                    f"sm_{arch}-low-rank-{parts}-{rank}-{mode}",
                    arch,
                    lambda parts=parts, rank=rank, mode=mode: launch_low_rank(  # type: ignore[misc]
                        parts, rank, mode=mode
                    ),
                    mma="mma.sync",
                    slow=arch != 90 or parts != 2,
                )
        # Tiles of 64 rows and more are multiplied by a warpgroup on Hopper.
        for tokens, packed, is_small in (
            (1, True, True), (300, True, False), (8192, True, False),
            (1, False, True), (300, False, True), (8192, False, False),
        ):  # fmt: skip
            yield Case(
                f"sm_{arch}-experts-{tokens}-{'mxfp4' if packed else 'bf16'}",
                arch,
                lambda tokens=tokens, packed=packed: launch_experts(tokens, packed=packed),  # type: ignore[misc]
                mma="mma.sync" if is_small else None,
                slow=arch != 90 or tokens != 300,
            )
        for vocab in (151_936, 1_000_001):
            yield Case(
                f"sm_{arch}-sampling-{vocab}",
                arch,
                lambda vocab=vocab: launch_sampling(vocab),  # type: ignore[misc]
                products=False,
                slow=True,  # every day they are compiled as they begin early
            )
            yield Case(
                f"sm_{arch}-draws-{vocab}",
                arch,
                lambda vocab=vocab: launch_draws(vocab),  # type: ignore[misc]
                products=False,
                slow=True,
            )
            yield Case(
                f"sm_{arch}-adjust_logits-{vocab}",
                arch,
                lambda vocab=vocab: launch_adjust(vocab),  # type: ignore[misc]
                products=False,
                slow=arch != 90 or vocab != 151_936,
            )


CASES = [*step_cases()]
