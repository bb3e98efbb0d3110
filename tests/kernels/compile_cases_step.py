"""What test_compile.py compiles of the kernels between products: norms, activations, sampling."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.kernels.compile_cases import ARCHITECTURES, Case, meta


def launch_norms(dim: int, dtype: torch.dtype) -> None:
    """Call every launcher of norms and activations for rows of `dim` channels."""
    from tilewise.kernels.triton import activation, norm

    x, weight = meta(8, dim, dtype=dtype), meta(dim, dtype=dtype)
    norm.rms_norm(x, weight, 1e-6)
    norm.add_rms_norm(x, x, weight, 1e-6)
    activation.silu_mul(meta(8, 6 * dim, dtype=dtype))


def launch_sampling(vocab: int) -> None:
    """Call the sampler with and without truncation, and both kinds of log-probabilities."""
    from tilewise.kernels.triton import sampling

    logits = meta(8, vocab, dtype=torch.float32)
    real, integer = meta(8, dtype=torch.float32), meta(8, dtype=torch.int32)
    stream = meta(8, dtype=torch.int64)
    sampling.sample_tokens(logits, real, integer, real, real, stream, stream)
    sampling.sample_tokens(logits, real, None, None, None, stream, stream)
    sampling.sample_tokens(logits, None, None, None, None, None, None)
    for count in (0, 20):
        sampling.token_logprobs(logits, stream, count)


def launch_linear(outputs: int, channels: int) -> None:
    """Call the product of few rows on the tile that its table gives."""
    from tilewise.kernels.triton import linear

    weight, bias = (
        meta(*shape, dtype=torch.bfloat16) for shape in ((outputs, channels), (outputs,))
    )
    linear.launch(meta(4, channels, dtype=torch.bfloat16), weight, bias)


def launch_invariant_linear(dtype: torch.dtype) -> None:
    """Call the product of fixed tiles."""
    from tilewise.kernels.triton import invariant_linear

    x, weight, bias = (meta(*shape, dtype=dtype) for shape in ((300, 4096), (6144, 4096), (6144,)))
    invariant_linear.launch(x, weight, bias)


def step_cases() -> Iterator[Case]:
    """Yield small and large widths for every architecture."""
    for arch in ARCHITECTURES:
        for dim, dtype in ((1024, torch.bfloat16), (16384, torch.bfloat16), (33, torch.float32)):
            yield Case(
                f"sm_{arch}-norms-{dim}",
                arch,
                lambda dim=dim, dtype=dtype: launch_norms(dim, dtype),  # type: ignore[misc]
                products=False,
                slow=arch != 90 or dim != 1024,
            )
        for outputs in (1024, 4096, 28672, 151_936):
            yield Case(
                f"sm_{arch}-linear-{outputs}",
                arch,
                lambda outputs=outputs: launch_linear(outputs, 4096),  # type: ignore[misc]
                mma="mma.sync",  # 16 rows are below what warp-group instructions multiply
                slow=arch != 90 or outputs > 4096,
            )
        for dtype in (torch.bfloat16, torch.float32):
            yield Case(
                f"sm_{arch}-invariant-linear-{str(dtype)[6:]}",
                arch,
                lambda dtype=dtype: launch_invariant_linear(dtype),  # type: ignore[misc]
                products=dtype == torch.bfloat16,
                slow=arch != 90,
            )
        for vocab in (151_936, 1_000_001):
            yield Case(
                f"sm_{arch}-sampling-{vocab}",
                arch,
                lambda vocab=vocab: launch_sampling(vocab),  # type: ignore[misc]
                products=False,
                slow=arch != 90 or vocab != 151_936,
            )


CASES = [*step_cases()]
