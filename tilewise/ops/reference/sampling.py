"""The launchers of sample_tokens and token_logprobs for backend="reference": the oracle."""

from __future__ import annotations

from tilewise.kernels.spec import ElementSpec
from tilewise.reference.sampling import sample_tokens, token_logprobs

__all__ = ["sample_tokens", "token_logprobs", "why_not"]


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None
