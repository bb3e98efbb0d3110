"""Derivatives of registered ops in every mode: backward, forward, under torch.func, compiled.

torch.library.register_autograd knows the backward mode only: a dual number that enters its op comes
out without its tangent and without a word, and torch.func.grad is refused. The kernel registered
here at the same place, below the dispatcher's functorch layers and above every backend, runs one
autograd.Function with a jvp, so that one pair of formulas serves loss.backward(), create_graph,
torch.autograd.forward_ad, torch.func and a compiled graph alike. An op without a jvp refuses
forward mode.

Some names it needs are private to torch, though old: where they are missing, register_autograd
takes over and forward mode is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.errors import UnsupportedError
from tilewise.ops.library import LIBRARY, kernel_of

try:
    from torch._C import (
        _after_autograd_keyset,
        _any_requires_grad,
        _are_functorch_transforms_active,
        _AutoDispatchBelowAutograd,
        _get_tracing_state,
        _len_torch_dispatch_stack,
        _len_torch_function_stack,
    )
    from torch._C._autograd import _profiler_enabled
    from torch._C._functorch import is_legacy_batchedtensor
    from torch._functorch.utils import enable_single_level_autograd_function
    from torch.autograd.forward_ad import _set_fwd_grad_enabled
    from torch.autograd.function import _SingleLevelFunction

    FORWARD_MODE = hasattr(forward_ad, "_current_level")
except ImportError:  # a later torch
    FORWARD_MODE = False

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None  # type: ignore[assignment, misc]

Formula = Callable[..., Any]
_PLAIN = (Tensor, torch.nn.Parameter)
_nodes: dict[str, Callable[..., Any]] = {}  # what records the gradient of an op's call
# What the dispatcher would pass on as it is, by the type of a schema; it converts the rest.
_UNCHANGED: dict[str, tuple[type, ...]] = {
    "Tensor": _PLAIN,
    "Optional[Tensor]": (*_PLAIN, type(None)),
    "int": (int,),
    "SymInt": (int,),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
    "Optional[str]": (str, type(None)),
    "Optional[List[float]]": (tuple, list, type(None)),
}


def transforms_active() -> bool:
    """Whether a torch.func transform is running, so that tensors may be wrapped."""
    return FORWARD_MODE and _are_functorch_transforms_active()


def _forward_mode_active(x: Tensor | None) -> bool:
    """Return whether tensors of a call may carry tangents of forward-mode differentiation.

    Args:
        x: one of the call's tensors, which are all of one class; None where there is none to ask.
    """
    if getattr(forward_ad, "_current_level", -1) >= 0:
        return True
    # A graph that is being traced enters its level behind Python's back, on tensors of a subclass.
    return x is not None and type(x) not in _PLAIN and x.is_floating_point()


def lean(name: str) -> Callable[..., Any]:
    """Return a function that calls the registered op `name`, past torch's dispatcher if possible.

    The function takes the arguments of the op, all by position, and returns its results. It goes
    through the dispatcher only where a mode, transform, trace or profile watches, or where the
    dispatcher would convert an argument; gradients are recorded either way. The dispatcher takes
    15 to 30 us of host time to pass 24 arguments through Python twice, as much as all else of a
    short call on a GPU.
    """
    op, kernel = getattr(torch.ops.tilewise, name).default, kernel_of(name)
    types = [_UNCHANGED[str(argument.type)] for argument in op._schema.arguments]

    def call(*args: Any) -> Any:
        if not unwatched() or not _would_pass(args, types):
            return op(*args)
        if records(*args):
            return _nodes[name](*args, None) if name in _nodes else op(*args)
        return kernel(*args)

    return call


def unwatched() -> bool:
    """Return whether no transform, mode, trace or profile of torch wants to see ops.

    Recording of gradients in the backward mode does not count. It is False, too, where torch lacks
    the private names that tell.
    """
    if torch.compiler.is_compiling() or not FORWARD_MODE:
        return False
    if _len_torch_dispatch_stack() or _len_torch_function_stack():
        return False
    if _are_functorch_transforms_active():
        return False
    return not (_profiler_enabled() or _get_tracing_state() or forward_ad._current_level >= 0)


def records(*args: Any) -> bool:
    """Return whether autograd would record an op with these arguments."""
    return torch.is_grad_enabled() and _any_requires_grad(*args)


def are_plain(*tensors: Tensor) -> bool:
    """Return whether torch's dispatcher would pass all `tensors` on to a kernel as they are.

    The dispatcher would not do so for tensors of a subclass, which it shows to their class; for
    those that .conj().imag marks as negated, which it negates; for zeros of forward mode, which
    have no memory until it allocates some; and for the batched tensors that
    autograd.grad(is_grads_batched=True) hands to a backward formula, over which it maps.
    """
    for x in tensors:
        if type(x) not in _PLAIN or x.is_neg() or x._is_zerotensor():
            return False
        if is_legacy_batchedtensor(x):
            return False
    return True


def places_of(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Return the bitwise or of the addresses of three tensors; 0 if one is not plain.

    A tensor is plain as in `are_plain`, and has memory. This takes half of the time of `are_plain`:
    zeros of forward mode have address 0, and asking a batched tensor for its address is an error.
    """
    if not (type(q) in _PLAIN and type(k) in _PLAIN and type(v) in _PLAIN):
        return 0
    if q.is_neg() or k.is_neg() or v.is_neg():
        return 0
    try:
        a, b, c = q.data_ptr(), k.data_ptr(), v.data_ptr()
    except RuntimeError:
        return 0
    return a | b | c if a and b and c else 0


def never(*tensors: Tensor) -> bool:
    """Return False for any tensors: the check of a call where there is none to compare with."""
    return False


def check_of(*tensors: Tensor) -> Callable[..., bool]:
    """Return a function of as many tensors that says whether they would be dispatched as `tensors`.

    The function compares class, dtype, device, sizes, strides, requires_grad and dispatch keys,
    those of current modes and transforms included, but not addresses: the guards of torch's
    compiler, in a sixth of the time of the same questions in Python. It keeps no tensor alive, and
    returns False if one tensor is given twice. Modes that no dispatch key shows are found by
    `unseen`. Where torch has no such guards, the function is `never`.
    """
    if TensorGuards is None:
        return never
    sizes: Any = [[*x.shape] for x in tensors]
    strides: Any = [[*x.stride()] for x in tensors]
    try:
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        found: Callable[..., bool] = guards.check
    except (TypeError, AttributeError):  # of a later torch, which takes something else
        return never
    return found


def unseen() -> bool:
    """Return whether no function mode, profiler or forward-mode level is active.

    These have no dispatch key, so that a check of `check_of` cannot see them: ask both.
    """
    return (
        not (_len_torch_function_stack() or _profiler_enabled()) and forward_ad._current_level < 0
    )


def autocasts() -> bool:
    """Whether torch.autocast is on, on a CPU or on a GPU."""
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


def _would_pass(args: tuple[Any, ...], types: Sequence[tuple[type, ...]]) -> bool:
    """Return whether the dispatcher would pass all arguments of an op to its kernel unchanged.

    The first tensor must be on a CPU or a CUDA GPU, all tensors plain (`are_plain`), and numbers of
    the types that the dispatcher does not convert.

    Args:
        args: the op's arguments, a tensor first.
        types: the Python types that stay as they are, for each argument.
    """
    if not (args[0].is_cuda or args[0].is_cpu):
        return False
    for x, kinds in zip(args, types, strict=True):
        kind = type(x)
        if kind not in kinds or (kind in _PLAIN and not are_plain(x)):
            return False
    return True


def save(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors in `ctx` for the backward formula and, under forward mode, for the jvp.

    Both formulas read them from ctx.saved_tensors.
    """
    ctx.save_for_backward(*tensors)
    if transforms_active() or _forward_mode_active(tensors[0]):
        ctx.save_for_forward(*tensors)


def register_gradient(
    name: str, backward: Formula, setup_context: Formula, jvp: Formula | None = None
) -> None:
    """Attach derivatives to the registered op `name`, which is differentiable from then on.

    Where torch lacks the private names of forward mode, only the backward mode is registered.

    Args:
        backward: (ctx, *gradients of outputs) -> gradients of inputs.
        setup_context: (ctx, inputs, output); keeps tensors with `save`.
        jvp: (ctx, *tangents of inputs) -> tangents of outputs; None refuses forward mode.
    """
    if not FORWARD_MODE:
        torch.library.register_autograd(
            f"tilewise::{name}", backward, setup_context=setup_context, lib=LIBRARY
        )
        return
    LIBRARY.impl(
        name, _autograd_kernel(name, backward, setup_context, jvp), "Autograd", with_keyset=True
    )


def no_gradient(name: str) -> UnsupportedError:
    """Return the error for a gradient of the op `name`, which has none."""
    return UnsupportedError(
        f"{name} must be called under torch.no_grad() or on detached tensors: it has no gradient"
    )


def refuse_gradient(name: str) -> None:
    """Let backward() through the registered op `name`, or a dual number, raise UnsupportedError.

    Without this torch would end the gradient there with a warning at most, and drop the tangent.
    Inside a compiled graph the gradient is None instead. Nothing is registered for an op that
    writes to its arguments where torch lacks the private names of forward mode.
    """
    if not FORWARD_MODE and getattr(torch.ops.tilewise, name).default._schema.is_mutable:
        return

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.num_inputs = len(inputs)

    def backward(ctx: Any, *grads: Any) -> tuple[None, ...]:
        # Who compiles a model asks for the gradient of all that may have one, wanted or not.
        if torch.compiler.is_compiling() or not all(type(x) in _PLAIN for x in grads):
            nothing: tuple[None, ...] = (None,) * ctx.num_inputs
            return nothing
        raise no_gradient(name)

    register_gradient(name, backward, setup_context)


def _autograd_kernel(
    name: str, backward: Formula, setup_context: Formula, jvp: Formula | None
) -> Formula:
    op, run = getattr(torch.ops.tilewise, name).default, kernel_of(name)

    def below(keyset: Any, *args: Any) -> Any:
        if keyset is None:  # no mode watches, see `lean`
            return run(*args)
        with _AutoDispatchBelowAutograd():
            return op.redispatch(keyset & _after_autograd_keyset, *args)

    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, keyset = args
        if transforms_active():
            # autograd.Function has switched recording off; the levels below this one record too.
            with torch.enable_grad(), _set_fwd_grad_enabled(True):
                output = below(keyset, *inputs)
        else:
            output = below(keyset, *inputs)
        setup_context(ctx, inputs, output)
        return output

    def backward_and_keyset(ctx: Any, *grads: Any) -> Any:
        return (*backward(ctx, *grads), None)

    def jvp_but_keyset(ctx: Any, *tangents: Any) -> Any:
        if jvp is None:
            raise UnsupportedError(f"{name} must not be given dual numbers: it has no jvp")
        return jvp(ctx, *tangents[:-1])

    node = type(
        f"{name}_node",
        # Function.apply belongs above the dispatcher, where functorch's levels are not peeled off
        # yet. This class is what functorch itself makes of a Function for one of its levels.
        (_SingleLevelFunction,),
        {
            "forward": staticmethod(forward),
            "backward": staticmethod(backward_and_keyset),
            "jvp": staticmethod(jvp_but_keyset),
        },
    )
    apply: Callable[..., Any] = node.apply  # type: ignore[attr-defined]
    _nodes[name] = apply

    def kernel(keyset: Any, *args: Any) -> Any:
        if transforms_active():
            with enable_single_level_autograd_function():
                return apply(*args, keyset)
        if (torch.is_grad_enabled() and _any_requires_grad(*args)) or _forward_mode_active(args[0]):
            return apply(*args, keyset)
        return below(keyset, *args)

    return kernel
