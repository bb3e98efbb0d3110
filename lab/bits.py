"""Hash the results of named calls, to see that a change of the house changed no bit of them.

    python lab/bits.py --write before.json
    ... change the code ...
    python lab/bits.py --compare before.json

Calls of attention, its gradient, paged attention and latents, dense and packed, with every
argument: on the CPU's kernels, and on Triton's in its interpreter; with `--device cuda` on the
GPU's, where `--part 3/8` is the third eighth of the calls, for processes side by side. Needs the
repository, whose tests repair the interpreter. The exit status is 1 where a hash is another one.
Hashes of two machines differ: kernels use what a machine's vector unit has.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "0" if "cuda" in sys.argv else "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from tests.kernels import interpreter
from tilewise import masks, ops
from tilewise.errors import UnsupportedError

_IS_ON_GPU = "cuda" in sys.argv
Options = dict[str, Any]
DENSE: dict[str, Callable[[int, int, int, int], Options]] = {
    "plain": lambda b, h, m, n: {},
    "causal": lambda b, h, m, n: {"causal": True},
    "window": lambda b, h, m, n: {"window": (20, 5)},
    "softcap": lambda b, h, m, n: {"causal": True, "softcap": 5.0},
    "alibi": lambda b, h, m, n: {"causal": True, "alibi_slopes": torch.linspace(0.1, 0.5, h)},
    "alibi_each": lambda b, h, m, n: {"alibi_slopes": torch.rand(b, h)},
    "sinks": lambda b, h, m, n: {"causal": True, "sinks": torch.randn(h, requires_grad=True)},
    "lengths": lambda b, h, m, n: {
        "causal": True, "seqlens_k": torch.tensor([n, n // 2 + 1], dtype=torch.int32),
    },
    "bias": lambda b, h, m, n: {"bias": torch.randn(b, h, m, n, requires_grad=True)},
    "bias_shared": lambda b, h, m, n: {"bias": torch.randn(1, h, m, n, requires_grad=True)},
    "bias_keys": lambda b, h, m, n: {"bias": torch.randn(b, 1, 1, n, requires_grad=True)},
    "bias_rows": lambda b, h, m, n: {
        "bias": torch.randn(b, h, m, 1, requires_grad=True), "sinks": torch.zeros(h),
    },
    "mask": lambda b, h, m, n: {"mask": masks.dense(torch.rand(1, 1, m, n) < 0.5)},
    "dropout": lambda b, h, m, n: {"dropout_p": 0.2, "seed": 7},
    "all": lambda b, h, m, n: {
        "window": (40, 0), "softcap": 8.0, "alibi_slopes": torch.rand(h), "dropout_p": 0.1,
        "seed": 3, "sinks": torch.randn(h, requires_grad=True),
        "bias": torch.randn(h, m, n, requires_grad=True),
    },
}  # fmt: skip
SHAPES = {"small": (2, 4, 2, 37, 50, 16, 24), "wide": (2, 2, 2, 70, 130, 64, 64)}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
_ON_A_CPU = ["cpu", "triton", "reference"]
DEVICE = "cuda" if _IS_ON_GPU else "cpu"
if _IS_ON_GPU:  # slow in the interpreter
    SHAPES["grouped"] = (2, 8, 2, 200, 333, 128, 128)
    SHAPES["separate_dq"] = (2, 4, 2, 200, 333, 192, 128)


def _dense(backend: str) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    for shape, (b, hq, hk, m, n, d, dv) in SHAPES.items():
        for kind, dtype in DTYPES.items():
            for name, options in DENSE.items():

                def call(sizes=(b, hq, hk, m, n, d, dv), dtype=dtype, options=options):
                    b, hq, hk, m, n, d, dv = sizes
                    q, k, v = (
                        torch.randn(size).to(dtype).requires_grad_()
                        for size in ((b, m, hq, d), (b, n, hk, d), (b, n, hk, dv))
                    )
                    given = options(b, hq, m, n)
                    if isinstance(given.get("bias"), Tensor):
                        given["bias"] = given["bias"].detach().to(dtype).requires_grad_()
                    return _both(q, k, v, given, backend)

                yield f"{backend}/{shape}/{kind}/{name}", call


def _both(q: Tensor, k: Tensor, v: Tensor, given: Options, backend: str) -> list[Tensor]:
    """Return results and gradients, of two calls alike: the later one must not differ."""
    q, k, v, *values = map(_moved, (q, k, v, *given.values()))
    given = dict(zip(given, values, strict=True), deterministic=backend == "gluon")
    leaves = [q, k, v, *(x for x in given.values() if isinstance(x, Tensor) and x.requires_grad)]
    weights: list[Tensor] = []
    first: list[Tensor] = []
    for _ in range(2):
        run = ops.attention_varlen if "cu_seqlens_q" in given else ops.attention
        o, lse = run(q, k, v, return_lse=True, backend=backend, **given)
        weights = weights or [_moved(torch.randn(x.shape).to(x.dtype)) for x in (o, lse)]
        lse = lse.masked_fill(lse.isinf(), 0.0)
        found = [o, lse, *torch.autograd.grad((o, lse), leaves, weights)]
        first = first or found
        assert all(map(torch.equal, first, found)), "a repeated call has other bits"
    return first


def _moved(x: Any) -> Any:
    """Return a tensor or a mask on the device of the calls: all is drawn on the CPU."""
    if isinstance(x, Tensor):
        return x.detach().to(DEVICE).requires_grad_(x.requires_grad)
    return x.to(DEVICE) if isinstance(x, masks.BlockMask) else x


def _packed(backend: str) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    edges = {"q": [0, 5, 5, 42], "k": [0, 9, 30, 70]}
    for kind, dtype in DTYPES.items():
        for name in ("plain", "causal", "alibi_each", "sinks", "softcap", "dropout"):

            def call(dtype=dtype, name=name):
                q = torch.randn(44, 4, 16).to(dtype).requires_grad_()
                k = torch.randn(70, 2, 16).to(dtype).requires_grad_()
                v = torch.randn(70, 2, 24).to(dtype).requires_grad_()
                given = DENSE[name](3, 4, 37, 40) | {
                    "cu_seqlens_q": torch.tensor(edges["q"], dtype=torch.int32),
                    "cu_seqlens_k": torch.tensor(edges["k"], dtype=torch.int32),
                    "max_seqlen_q": 37,
                    "max_seqlen_k": 40,
                }
                return _both(q, k, v, given, backend)

            yield f"{backend}/packed/{kind}/{name}", call


def _odd(backend: str) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    def call(b: int, m: int, n: int, heads_first: bool = False) -> list[Tensor]:
        q, k, v = (torch.randn(b, size, 4, 32) for size in (m, n, n))
        if heads_first:
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        return _both(*(x.requires_grad_() for x in (q, k, v)), {"causal": True}, backend)

    yield f"{backend}/odd/one_query", lambda: call(3, 1, 77)
    yield f"{backend}/odd/few_queries", lambda: call(1, 2, 5000)
    yield f"{backend}/odd/no_query", lambda: call(2, 0, 7)
    yield f"{backend}/odd/no_key", lambda: call(2, 7, 0)
    yield f"{backend}/odd/heads_first", lambda: call(2, 40, 50, heads_first=True)


def _paged(backend: str) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    def call(
        runs: list[int], dtype: torch.dtype, *, cache: torch.dtype | None = None,
        strided: bool = False, shared: bool = False, planned: bool = False, **more: Any,
    ) -> list[Tensor]:  # fmt: skip
        lengths = [50, 3, 0, 33][: len(runs)]
        starts = torch.tensor([0, *torch.tensor(runs).cumsum(0).tolist()], dtype=torch.int32)
        caches = [torch.randn(40, 16, 2, 32).to(dtype) for _ in "kv"]
        table = torch.randperm(40)[:16].view(4, 4)[: len(runs)].int()
        if shared:
            lengths = [50, 40, 36, 64]
            table[:, :2] = table[0, :2].clone()
            more["shared"] = ops.shared_prefixes(
                table, torch.tensor(lengths), starts, block_size=16, min_blocks=2, device=DEVICE
            )
        if cache is not None:
            caches = [(x.float() * 30).to(cache) for x in caches]
            more |= {f"{name}_scale": torch.rand(40, 16, 2) for name in "kv"}
        q = torch.randn(sum(runs), 4, 32).to(dtype)
        tensors = (q, *caches, table, torch.tensor(lengths, dtype=torch.int32), starts)
        q, k, v, block_table, seqlens_k, starts = map(_moved, tensors)
        if strided:
            q = torch.cat([q, q], -1)[..., :32]
            k, v = torch.stack([k, v], 1).unbind(1)
        given = {
            "block_table": block_table,
            "seqlens_k": seqlens_k,
            "cu_seqlens_q": starts,
            "max_seqlen_q": max(runs),
            "backend": backend,
            **{name: _moved(x) for name, x in more.items()},
        }
        plan = ops.plan_paged_attention(q, k, v, **given) if planned else None
        return _twice(lambda: ops.paged_attention(q, k, v, return_lse=True, plan=plan, **given))

    for kind, dtype in DTYPES.items():
        yield f"{backend}/paged/{kind}/decode", lambda t=dtype: call([1, 1, 0, 1], t)
        yield f"{backend}/paged/{kind}/chunks", lambda t=dtype: call([20, 1, 0, 9], t)
        yield (
            f"{backend}/paged/{kind}/window_sinks",
            lambda t=dtype: call([2, 1, 0, 9], t, window=9, sinks=torch.randn(4), softcap=3.0),
        )
        yield (
            f"{backend}/paged/{kind}/alibi",
            lambda t=dtype: call([1, 2, 0, 1], t, alibi_slopes=torch.rand(4), strided=True),
        )
        yield (
            f"{backend}/paged/{kind}/tree",
            lambda t=dtype: call([3, 2, 0, 1], t, tree_mask=torch.ones(6, 3).tril().bool()),
        )
        for runs in ([1, 1, 1, 1], [4, 1, 2, 1]):
            yield (
                f"{backend}/paged/{kind}/shared_{max(runs)}",
                lambda t=dtype, runs=runs: call(runs, t, shared=True, sinks=torch.randn(4)),
            )
        for name, runs in (("decode", [1, 1, 0, 1]), ("chunks", [20, 1, 0, 9])):
            yield (
                f"{backend}/paged/{kind}/invariant_{name}",
                lambda t=dtype, runs=runs: call(runs, t, batch_invariant=True),
            )
            yield (
                f"{backend}/paged/{kind}/planned_{name}",
                lambda t=dtype, runs=runs: call(runs, t, planned=True),
            )
            for cache in (torch.int8, torch.float8_e4m3fn):
                yield (
                    f"{backend}/paged/{kind}/{str(cache)[6:]}_{name}",
                    lambda t=dtype, runs=runs, cache=cache: call(runs, t, cache=cache),
                )


def _twice(call: Callable[[], tuple[Tensor, ...]]) -> list[Tensor]:
    """Return the results of two calls alike: the later one must not differ."""
    first, again = call(), call()
    assert all(map(torch.equal, first, again)), "a repeated call has other bits"
    return list(first)


def _latent(backend: str) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    def call(
        run: int, dtype: torch.dtype, cache: torch.dtype | None = None, **more: Any
    ) -> list[Tensor]:
        tensors = (
            torch.randn(2 * run, 4, 64).to(dtype),
            torch.randn(2 * run, 4, 16).to(dtype),
            torch.randn(20, 16, 80).to(dtype),
            torch.randperm(20)[:8].view(2, 4).int(),
            torch.tensor([50, 20], dtype=torch.int32),
            torch.tensor([0, run, 2 * run], dtype=torch.int32),
        )
        q, q_rope, latents, block_table, seqlens_k, starts = map(_moved, tensors)
        if cache is not None:
            latents = (latents.float() * 30).to(cache)
            more["latent_scale"] = _moved(torch.rand(20, 16, 2))
        return _twice(
            lambda: ops.mla_decode(
                q, q_rope, latents, block_table=block_table, seqlens_k=seqlens_k,
                cu_seqlens_q=starts, max_seqlen_q=run, softmax_scale=0.1, return_lse=True,
                backend=backend, **more,
            )
        )  # fmt: skip

    for kind, dtype in DTYPES.items():
        yield f"{backend}/latent/{kind}/decode", lambda t=dtype: call(1, t)
        yield f"{backend}/latent/{kind}/chunk", lambda t=dtype: call(5, t)
        yield f"{backend}/latent/{kind}/prompt", lambda t=dtype: call(20, t)
        yield f"{backend}/latent/{kind}/int8", lambda t=dtype: call(2, t, torch.int8)
        yield f"{backend}/latent/{kind}/e4m3", lambda t=dtype: call(1, t, torch.float8_e4m3fn)
        yield (
            f"{backend}/latent/{kind}/invariant",
            lambda t=dtype: call(3, t, batch_invariant=True),
        )


def _hash(tensors: list[Tensor]) -> str:
    total = hashlib.sha256()
    for x in tensors:
        x = x.detach().cpu().contiguous()
        total.update(f"{tuple(x.shape)} {x.dtype}".encode())
        total.update(x.view(torch.uint8).numpy().tobytes() if x.numel() else b"")
    return total.hexdigest()[:16]


def _calls(
    backends: list[str] | None, words: list[str]
) -> Iterator[tuple[str, Callable[[], list[Tensor]]]]:
    """Return all calls whose names hold one of the words."""
    for backend in backends or (["gluon", "triton"] if _IS_ON_GPU else _ON_A_CPU):
        for cases in (_dense, _packed, _odd, _paged, _latent):
            for name, call in cases(backend):
                if not words or any(word in name for word in words):
                    yield name, call


def main() -> int:
    """Hash all calls whose names hold one of the words."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of names; all calls without any")
    parser.add_argument("--backends", nargs="*", help="cpu, triton and reference; or the GPU's two")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--part", default="1/1", help="which part of the calls, of how many")
    parser.add_argument("--write", type=Path, help="file for the hashes")
    parser.add_argument("--compare", type=Path, help="file of hashes to compare with")
    options = parser.parse_args()
    if not _IS_ON_GPU:
        interpreter.repair()
    part, parts = map(int, options.part.split("/"))
    found: dict[str, str] = {}
    wanted = json.loads(options.compare.read_text()) if options.compare else {}
    changed = []
    for index, (name, call) in enumerate(_calls(options.backends, options.words)):
        if index % parts != part - 1:
            continue
        torch.manual_seed(0)
        try:
            found[name] = _hash(call())
        except UnsupportedError as error:
            found[name] = f"refused: {error}"
        if options.write:
            options.write.write_text(json.dumps(found, indent=1) + "\n")
        if name in wanted and wanted[name] != found[name]:
            changed.append(name)
            print(f"CHANGED {name}", flush=True)
    if options.compare:
        known = len(wanted.keys() & found.keys())
        print(f"{len(changed)} of {known} calls have other bits, {len(found) - known} are new")
    return min(1, len(changed))


if __name__ == "__main__":
    sys.exit(main())
