"""What `tilewise bench attention` measures: one list of problems a table, scaled to the device.

The scheme is that of the FlashAttention papers: a fixed number of tokens in all, so that the batch
shrinks as N grows, and a fixed number of channels in all, so that heads get fewer as they grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tilewise.bench import second_order
from tilewise.bench.case import FEATURES
from tilewise.bench.peers import SQUARES
from tilewise.bench.problem import OPS, Problem


@dataclass(frozen=True, slots=True)
class Scale:
    """How large the problems of a device are.

    Attributes:
        tokens, hidden: B * N and H * D of every dense call.
        seqlens: N of the dense table.
        all_up_to: the longest N at which every peer runs forward, backward and both together. At
            longer N peers that hold N x N matrices run only forward, all others forward and
            backward, each by itself.
        ours_only: longer N, at which our forward pass runs alone.
        flex_seqlens: the N at which FlexAttention runs; each costs seconds of compilation.
        window_left: keys to the left of a query in the window table.
        rule_seqlens: N of the window table; the table of block masks takes the last of these N, and
            half of the last.
        feature_seqlen: N of features, head dims and second derivatives.
        varlen: (shortest, longest, tokens) of a packed batch: the limits of a sequence's length,
            and the number of tokens at which the batch is full.
        varlen_heads: the number of heads of that batch, of D 128.
        peers: the peers of the dense table, ours first.
        published_seqlens: N of the shapes that peers publish figures of; () leaves them out.
        published_heads: query heads of the shapes that peers publish figures of.
        fp8_head_dims: D of the table of 8 bits; () leaves it out.
    """

    tokens: int
    hidden: int
    seqlens: tuple[int, ...]
    all_up_to: int
    ours_only: tuple[int, ...]
    flex_seqlens: tuple[int, ...]
    window_left: int
    rule_seqlens: tuple[int, ...]
    feature_seqlen: int
    varlen: tuple[int, int, int]
    varlen_heads: int
    peers: tuple[str, ...]
    published_seqlens: tuple[int, ...] = ()
    published_heads: int = 64
    fp8_head_dims: tuple[int, ...] = ()


SCALES = {
    "cuda": Scale(
        tokens=16384,
        hidden=2048,
        seqlens=(512, 1024, 2048, 4096, 8192, 16384, 32768, 65536),
        all_up_to=65536,
        ours_only=(),
        flex_seqlens=(1024, 4096, 16384, 32768),
        window_left=1024,
        rule_seqlens=(4096, 16384),
        feature_seqlen=4096,
        varlen=(512, 8192, 24576),
        varlen_heads=16,
        peers=(
            "tilewise",
            "sdpa_flash",
            "sdpa_cudnn",
            "sdpa_efficient",
            "sdpa_math",
            "flex",
            "standard",
        ),
        published_seqlens=(2048, 4096, 8192, 16384, 32768),
        fp8_head_dims=(64, 128, 256),
    ),
    # A quarter of the tokens and an eighth of the channels, to take minutes on two cores.
    "cpu": Scale(
        tokens=4096,
        hidden=256,
        seqlens=(512, 1024, 2048, 4096, 8192, 16384),
        all_up_to=4096,
        ours_only=(65536,),
        flex_seqlens=(1024, 4096),
        window_left=1024,
        rule_seqlens=(4096,),
        feature_seqlen=1024,
        varlen=(256, 4096, 8192),
        varlen_heads=2,
        peers=("tilewise", "sdpa_flash", "sdpa_math", "flex", "standard"),
    ),
}
HEAD_DIMS = (
    (32, 32),
    (64, 64),
    (80, 80),
    (96, 96),
    (128, 128),
    (160, 160),
    (192, 128),
    (256, 256),
    (512, 512),
    (576, 512),
)


def _problem(
    scale: Scale, table: str, seqlen: int, head_dim: int, peers: tuple[str, ...], causal: bool
) -> Problem:
    batch, heads = max(1, scale.tokens // seqlen), max(1, scale.hidden // head_dim)
    return Problem(table, batch, seqlen, heads, heads, head_dim, head_dim, peers, causal)


def dense(scale: Scale) -> list[Problem]:
    """Return the problems of the dense table: D 64 and 128 over N, causal and not, beside every
    peer of the scale; the longest come last."""
    problems = []
    for n in scale.seqlens:
        peers = tuple(p for p in scale.peers if p != "flex" or n in scale.flex_seqlens)
        for d in (64, 128):
            for causal in (False, True):
                whole = _problem(scale, "dense", n, d, peers, causal)
                problems += [whole] if n <= scale.all_up_to else _fewer_passes(whole)
    for n in scale.ours_only:
        ours = _problem(scale, "dense", n, 128, ("tilewise",), True)
        problems.append(replace(ours, ops=("forward",)))
    return problems


def _fewer_passes(whole: Problem) -> list[Problem]:
    fused = tuple(peer for peer in whole.peers if peer not in SQUARES)
    square = tuple(peer for peer in whole.peers if peer in SQUARES)
    split = [replace(whole, peers=fused, ops=OPS[:2]), replace(whole, peers=square, ops=OPS[:1])]
    return [problem for problem in split if problem.peers]


def window(scale: Scale) -> list[Problem]:
    """Return the problems with a causal window: ours native and as a block mask, and
    FlexAttention's."""
    peers = ("tilewise", "tilewise_mask", "flex")
    return [
        replace(_problem(scale, "window", n, d, peers, True), window_left=scale.window_left)
        for n in scale.rule_seqlens
        for d in (64, 128)
    ]


def blocks(scale: Scale) -> list[Problem]:
    """Return the problems in which a random tenth of the 128 x 128 blocks is visible, ours and
    FlexAttention's, each after our dense call."""
    problems = []
    for n in (scale.rule_seqlens[-1] // 2, scale.rule_seqlens[-1]):
        problems.append(_problem(scale, "blocks", n, 128, ("tilewise",), False))
        sparse = _problem(scale, "blocks", n, 128, ("tilewise", "flex"), False)
        problems.append(replace(sparse, density=0.1, feature="random blocks"))
    return problems


def varlen(scale: Scale) -> list[Problem]:
    """Return one problem, in a list: a packed causal batch of sequences of random lengths."""
    shortest, longest, tokens = scale.varlen
    generator = torch.Generator().manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(int(torch.randint(shortest, longest + 1, (), generator=generator)))
    heads = scale.varlen_heads
    peers = ("tilewise", "varlen_attn", "sdpa_padded")
    whole = Problem("varlen", len(lengths), max(lengths), heads, heads, 128, 128, peers, True)
    return [replace(whole, lengths=tuple(lengths))]


def features(scale: Scale) -> list[Problem]:
    """Return the problems that compare each feature with the plain call: causal, D 128."""
    problems = []
    for feature in FEATURES:
        if feature == "random blocks":
            continue
        peers: tuple[str, ...] = ("tilewise",)
        if feature in ("plain", "dropout 0.1"):
            peers = ("tilewise", "sdpa_flash")
        plain = _problem(scale, "features", scale.feature_seqlen, 128, peers, True)
        if feature == "GQA 8:1":
            plain = replace(plain, num_kv_heads=max(1, plain.num_q_heads // 8))
        problems.append(replace(plain, feature=feature))
    return problems


def head_dims(scale: Scale) -> list[Problem]:
    """Return a causal problem for each kind of head: small, odd, wide, and values narrower than
    keys (MLA)."""
    peers = tuple(p for p in scale.peers if p not in ("flex", "standard", "sdpa_math"))
    return [
        replace(_problem(scale, "head_dims", scale.feature_seqlen, d, peers, True), v_head_dim=dv)
        for d, dv in HEAD_DIMS
    ]


def derivatives(scale: Scale) -> list[Problem]:
    """Return the problems of forward-mode and second derivatives of one causal sequence, beside
    SDPA's math."""
    peers = ("tilewise", "sdpa_math")
    one = _problem(scale, "derivatives", scale.feature_seqlen, 128, peers, True)
    return [replace(one, batch=1, ops=(op,)) for op in second_order.OPS]


def published(scale: Scale) -> list[Problem]:
    """Return the problems with shapes that peers publish figures of, causal, one sequence; [] if
    the scale has none.

    Groups of eight query heads at D 128 (Llama 3 70B) over N; the same at D 64 with a window
    (gpt-oss), and heads of 192 and 128 channels, twice as many (MLA's prefill), at the longest N
    up to 8,192. Passes are forward and backward, MLA's backward deterministic too.
    """
    if not scale.published_seqlens:
        return []
    heads = scale.published_heads
    groups = max(1, heads // 8)
    peers = ("tilewise", "sdpa_flash", "sdpa_cudnn")
    grouped = [
        Problem("published", 1, n, heads, groups, 128, 128, peers, True, ops=OPS[:2])
        for n in scale.published_seqlens
    ]
    windows = [
        replace(
            each,
            head_dim=64,
            v_head_dim=64,
            window_left=scale.window_left,
            peers=("tilewise", "flex"),
        )
        for each in grouped
        if each.seqlen in scale.rule_seqlens
    ]
    n = min(8192, scale.published_seqlens[-1])
    mla = Problem("published", 1, n, 2 * heads, 2 * heads, 192, 128, peers, True, ops=OPS[:2])
    return [*grouped, *windows, mla, replace(mla, feature="deterministic", ops=OPS[1:2])]


def fp8(scale: Scale) -> list[Problem]:
    """Return the problems of forward passes in 8 bits, beside ours in 16 bits: the kernel and the
    whole op, with a scale for each head and for each token; [] if the scale has none."""
    if not scale.fp8_head_dims:
        return []
    kinds = ("fp8_kernel", "fp8", "fp8_tokens_kernel", "fp8_tokens")
    peers = ("tilewise", *(f"tilewise_{kind}" for kind in kinds))
    return [
        replace(_problem(scale, "fp8", n, d, peers, causal), ops=OPS[:1])
        for n in scale.rule_seqlens
        for d in scale.fp8_head_dims
        for causal in (False, True)
    ]


def with_peers(problems: list[Problem], names: Sequence[str]) -> list[Problem]:
    """Return the problems with further peers: each that has a peer beside ours gets those named,
    except in the tables derivatives and fp8."""
    return [
        replace(each, peers=(*each.peers, *(name for name in names if name not in each.peers)))
        if len(each.peers) > 1 and each.table not in ("derivatives", "fp8")
        else each
        for each in problems
    ]


# In the order of measurement: should the time run out, it is the longest dense calls that miss.
TABLES: dict[str, Callable[[Scale], list[Problem]]] = {
    "features": features,
    "head_dims": head_dims,
    "window": window,
    "varlen": varlen,
    "blocks": blocks,
    "derivatives": derivatives,
    "published": published,
    "fp8": fp8,
    "dense": dense,
}
