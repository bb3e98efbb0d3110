"""A GPU's engine on a CPU, whose kernels are noted in place of run: what would be compiled, when.

Inside `on_hopper` tensors on a CPU take the path of those on an H200. A kernel that is launched
computes nothing; its name is kept together with all that Triton compiles it anew for: constants and
options, the dtype and alignment of addresses, of integers whether they are 1 or a multiple of 16
unless they are marked do_not_specialize. Sampled tokens are made up, and what begins and ends a
decode step is computed by its reference, so that schedules go on as they would.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.interpreter import InterpretedFunction

from tilewise.engine.captured.decode_step import DecodeStep
from tilewise.engine.captured.prompt_steps import PromptSteps
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.kernels import device
from tilewise.kernels.gluon.latent import plan as gluon_latent
from tilewise.kernels.gluon.paged import plan as gluon_paged
from tilewise.kernels.host import plan as gluon_plan
from tilewise.kernels.tiles.linear import pays
from tilewise.kernels.triton.step import decode_rows as triton_rows
from tilewise.kernels.triton.step import sampling as triton_sampling
from tilewise.nn import AttentionContext, layers
from tilewise.nn.context import StepPlans
from tilewise.nn.mla import MultiheadLatentAttention
from tilewise.ops import call, decode_rows, dispatch
from tilewise.ops.latent import expanded
from tilewise.ops.reference import decode_rows as reference_rows

__all__ = ["Launches", "on_hopper"]

Key = tuple[object, ...]
SM_COUNT = 132  # of an H200
_ALIGNMENT = 16


def _kind_of(value: Any, is_specialised: bool) -> object:
    """Return what Triton compiles in of an argument."""
    if isinstance(value, Tensor):
        return str(value.dtype), value.data_ptr() % _ALIGNMENT == 0
    if isinstance(value, TensorDescriptor):
        return str(value.base.dtype), tuple(value.block_shape), str(value.layout)
    if isinstance(value, bool) or value is None or isinstance(value, float):
        return type(value).__name__ if not isinstance(value, float) else "float"
    if isinstance(value, int):
        width = "i32" if -(2**31) <= value < 2**31 else "i64"
        if not is_specialised:
            return width
        return "1" if value == 1 else (width, value % 16 == 0)
    return tuple(_kind_of(v, is_specialised) for v in value)


class Launches:
    """What was launched.

    Attributes:
        keys: of each kernel what it would be compiled for.
        last: arguments of the launch that each key was first seen with, by name.
    """

    def __init__(self) -> None:
        self.keys: set[Key] = set()
        self.last: dict[Key, dict[str, Any]] = {}

    def note(self, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Keep one launch."""
        function = kernel.fn
        parameters = inspect.signature(function).parameters
        plain = kernel.kwargs.get("do_not_specialize") or ()
        given = dict(zip(parameters, arguments, strict=False))
        given |= {name: value for name, value in options.items() if name in parameters}
        key: list[object] = [f"{function.__module__}.{function.__name__}"]
        for place, (name, parameter) in enumerate(parameters.items()):
            if name not in given:
                continue
            if "constexpr" in str(parameter.annotation):
                key.append((name, str(given[name])))
            else:
                is_plain = name in plain or place in plain
                key.append((name, _kind_of(given[name], not is_plain)))
        key.append(tuple((n, str(v)) for n, v in sorted(options.items()) if n not in parameters))
        if tuple(key) not in self.keys:
            self.keys.add(tuple(key))
            self.last[tuple(key)] = {
                name: value for name, value in given.items() if isinstance(value, int | float)
            }

    def explain(self, key: Key) -> str:
        """Say how a launch differs from the most similar one before it."""
        others = [other for other in self.keys if other[0] == key[0] and other != key]
        if not others:
            return f"{key[0]} was never launched; {self.last[key]}"
        nearest = min(others, key=lambda other: len(set(key) - set(other)))
        return f"{key[0]}: {sorted(map(str, set(key) - set(nearest)))}; {self.last[key]}"


def _begins_and_finishes(patch: pytest.MonkeyPatch) -> None:
    for name in ("begin", "start", "finish"):
        noted, computed = getattr(triton_rows, name), getattr(reference_rows, name)

        def both(*args: Any, noted: Any = noted, computed: Any = computed, **kwargs: Any) -> Any:
            noted(*args, **kwargs)
            return computed(*args, **kwargs)

        patch.setattr(triton_rows, name, both)
    draw = triton_rows.draw

    def draw_and_finish(logits: Tensor, *rest: Any) -> None:
        drawn, is_finite = draw(logits, *rest)
        drawn, is_finite = _drawn(logits, rest[4], rest[5].counter, drawn, is_finite)
        reference_rows.finish(drawn, is_finite, *rest[-1])

    patch.setattr(triton_rows, "draw", draw_and_finish)


def _drawn(
    logits: Tensor, seeds: Tensor, counters: Tensor, tokens: Tensor, is_finite: Tensor
) -> tuple[Tensor, Tensor]:
    """Return some token of each row, which a kernel that was only noted did not draw."""
    return tokens.copy_((31 * seeds + counters) % logits.shape[1]), is_finite.fill_(True)


def _draws(patch: pytest.MonkeyPatch) -> None:
    original = triton_sampling.sample_tokens

    def sample(logits: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return _drawn(logits, *rest[4:6], *original(logits, *rest))

    sample.write = original.write  # type: ignore[attr-defined]
    patch.setattr(triton_sampling, "sample_tokens", sample)


def _model_runs_where_graphs_are_captured(patch: pytest.MonkeyPatch) -> None:
    def capture(self: DecodeStep, *_: Any) -> None:
        self.run()

    def capture_model(self: DecodeStep, *_: Any) -> None:
        self.run_model()

    def capture_prompts(self: PromptSteps, size: int, *_: Any, adapted: bool) -> None:
        self.try_out(size, adapted=adapted)

    patch.setattr(DecodeStep, "capture", torch.inference_mode()(capture))
    patch.setattr(DecodeStep, "capture_model", torch.inference_mode()(capture_model))
    patch.setattr(PromptSteps, "capture", torch.inference_mode()(capture_prompts))
    patch.setattr(DeviceRunner, "_captured_in", lambda self: ())
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)


def _expanded_sequences(self: Any, ctx: AttentionContext) -> list[int] | None:
    """Which sequences attend expanded, as a GPU decides it: nothing is read."""
    num_seqs, longest = ctx.block_table.shape[0], ctx.max_seqlen_q
    is_even = ctx.slot_mapping.shape[0] == num_seqs * longest
    expands = is_even and longest >= self.expanding_run and not ctx.batch_invariant
    return list(range(num_seqs)) if expands else None


@contextmanager
def on_hopper(launches: Launches | None) -> Iterator[None]:
    """Let tensors on this CPU go where those on an H200 would, and note what is launched.

    Args:
        launches: None leaves kernels to Triton, where its interpreter is off.
    """

    def to_triton(self: Any, grid: Any) -> Callable[..., None]:
        assert launches is not None
        return lambda *args, **options: launches.note(self, args, options)

    def to_gluon(kernel: Any, grid: Any, *args: Any, **options: Any) -> None:
        assert launches is not None
        launches.note(kernel, args, options)

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return x.new_empty((*x.shape[:-1], weight.shape[0]))

    def product(equation: str, *operands: Tensor) -> Tensor:
        with torch.device("meta"):
            like = einsum(equation, *(x.to("meta") for x in operands))
        return operands[0].new_empty(like.shape)

    einsum, choose, module_of = torch.einsum, dispatch.choose, decode_rows._module
    automatic = dispatch._AUTOMATIC
    with pytest.MonkeyPatch.context() as patch:
        if launches is not None:
            patch.setattr(InterpretedFunction, "__getitem__", to_triton)
            patch.setattr(gluon_plan, "launch_now", to_gluon)
        patch.setattr(gluon_paged, "why_not", gluon_paged.why_not_decode)
        patch.setattr(gluon_latent, "why_not", gluon_latent.why_not_on_hopper)
        patch.setattr(device, "sm_count_of", lambda _: SM_COUNT)
        patch.setattr(dispatch, "_AUTOMATIC", {"cpu": automatic["cuda"]})
        patch.setattr(layers, "FUSED_ON", ("cpu",))
        patch.setattr(layers, "linear_pays", lambda w: w.itemsize == 2 and pays(*w.shape, 90))
        patch.setattr(StepPlans, "on", classmethod(lambda cls, _device: cls()))
        patch.setattr(
            decode_rows, "_module", lambda rows, backend: module_of(rows, backend or "triton")
        )
        patch.setattr(
            expanded,
            "_longest",
            lambda history, most, table, cache: table.shape[1] * cache.shape[1],
        )
        patch.setattr(MultiheadLatentAttention, "_expanded_sequences", _expanded_sequences)
        patch.setattr(torch.nn.functional, "linear", multiply)
        patch.setattr(torch, "einsum", product)
        if launches is not None:
            _begins_and_finishes(patch)
            _draws(patch)
        _model_runs_where_graphs_are_captured(patch)
        choose.cache_clear()
        patch.setattr(call, "_memory", call._Memory())
        try:
            yield
        finally:
            choose.cache_clear()
