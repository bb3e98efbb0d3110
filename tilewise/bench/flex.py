"""FlexAttention, the peer that must be compiled: once a shape, its block mask made beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tilewise.bench.case import Case
from tilewise.bench.problem import BLOCK


def compiled(case: Case, *, needs_gradient: bool) -> Callable[..., Tensor]:
    """Return a function of q, k, v (B, N, H, D) that computes o by flex_attention, compiled for
    exactly this case.

    The first call of the function compiles. A later case throws away what an earlier one compiled,
    as torch keeps only few shapes of one function.

    Args:
        case: the case, with the rule that becomes a block mask.
        needs_gradient: False detaches q, k and v.
    """
    import torch._functorch.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    # Timing the backward pass alone runs it again and again over the same saved tensors.
    torch._functorch.config.donated_buffer = False
    n, rule = case.problem.seqlen, _rule(case)
    mask = None if rule is None else create_block_mask(rule, None, None, n, n, device=case.device)
    # One kernel or two a shape: a pool of compiling processes costs more to start than they do.
    call: Callable[..., Any] = torch.compile(
        flex_attention, dynamic=False, options={"compile_threads": 1}
    )

    def function(*qkv: Tensor) -> Tensor:
        q, k, v = ((t if needs_gradient else t.detach()).transpose(1, 2) for t in qkv)
        gqa = q.shape[1] != k.shape[1]
        o: Tensor = call(q, k, v, block_mask=mask, enable_gqa=gqa).transpose(1, 2)
        return o

    return function


def _rule(case: Case) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """Return the problem's rule as a mask_mod of FlexAttention, None when everything is visible."""
    from torch.nn.attention.flex_attention import and_masks

    problem = case.problem
    rules: list[Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = []
    if problem.density:
        layout = problem.layout().to(case.device)
        rules.append(lambda b, h, i, j: layout[i // BLOCK, j // BLOCK])
    if problem.window_left >= 0:
        left = problem.window_left
        rules.append(lambda b, h, i, j: (i >= j) & (i - j <= left))
    elif problem.causal:
        rules.append(lambda b, h, i, j: i >= j)
    return and_masks(*rules) if len(rules) > 1 else rules[0] if rules else None
