"""Choose the backend of a call: a pure function of its spec, never silent.

A kernel module that plans its calls (of attention, in 8 bits too, over a paged cache, over latents)
returns a plan or a refusal; other modules have `why_not(spec)`, which returns in one sentence what
they cannot do, or None. Automatic choice takes the first backend of the device that can; a named
backend is obeyed or refused with its reason. The float64 `reference` backend is never chosen
automatically: it is slow and needs O(N^2) memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TypeVar

from tilewise.errors import UnsupportedError
from tilewise.kernels.plan import Call, Plan, Refusal
from tilewise.kernels.spec import AttentionSpec, ElementSpec

Spec = AttentionSpec | ElementSpec
T = TypeVar("T")

# The package, "tilewise" but where a copy of it has another name (tools/hub_kernel).
_ROOT = __name__.removesuffix(".ops.dispatch")
BACKENDS = ("reference", "cpu", "triton", "gluon")
_AUTOMATIC = {"cpu": ("cpu",), "cuda": ("gluon", "triton")}
_WITHOUT_KERNELS = {
    "quantize",
    "key_bias_channels",
}  # ops that `reference` computes if no backend can
# The module of an op's launcher in a backend's folder, if it differs from the op's name.
_MODULES = {
    "attention": "attention.plan",
    "attention_fp8": "attention.fp8",
    "quantize": "attention.quantise",
    "key_bias_channels": "attention.key_bias",
    "paged_attention": "paged.plan",
    "cache_ops": "paged.cache",
    "rope_write": "paged.rope_write",
    "mla_decode": "latent.plan",
    "norm": "step.norm",
    "activation": "step.activation",
    "elementwise": "step.elementwise",
    "linear": "step.linear",
    "row_linear": "step.row_linear",
    "invariant_linear": "step.invariant_linear",
    "quantised_linear": "quantised.linear",
    "low_rank": "step.low_rank",
    "choose_experts": "experts.choose",
    "expert_mlp": "experts.launch",
    "quantised_expert_mlp": "quantised.mixture",
    "adjust_logits": "step.adjust_logits",
    "sampling": "step.sampling",
    "decode_rows": "step.decode_rows",
    "recurrence": "recurrent.scan",
    "recurrence_bwd": "recurrent.backward",
    "causal_conv1d": "recurrent.convolution",
    "delta_inputs": "recurrent.inputs",
    "gated_norm": "step.gated_norm",
    "shifted_norm": "step.shifted_norm",
}


@functools.cache
def kernel_module(op: str, backend: str) -> ModuleType:
    """Import and return the module with the launcher of `op` in `backend`, see `_MODULES`.

    For "reference" it is the op's module in `ops/reference`. ImportError goes to the caller.
    """
    if backend == "reference":
        return import_module(f"{_ROOT}.ops.reference.{op}")
    return import_module(_path_of(op, backend))


def _path_of(op: str, backend: str) -> str:
    return f"{_ROOT}.kernels.{backend}.{_MODULES.get(op, op)}"


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the backend has no such folder either
        return False


def _module_or_reason(op: str, backend: str) -> ModuleType | str:
    if backend != "reference" and not _exists(_path_of(op, backend)):
        return "it has no kernel for this op"
    try:
        return kernel_module(op, backend)
    except ImportError as error:
        package = (error.name or _ROOT).split(".")[0]
        if package == _ROOT.split(".")[0]:
            raise
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            return f"needs the package {package!r}, which is not installed"
        return f"needs another version of {package!r}: {error}"


def refusal(op: str, backend: str, spec: Spec) -> str | None:
    """Return in one sentence why `backend` cannot compute a call of `op`, or None if it can.

    A backend without this op, or with a package that is not installed, refuses too. It serves the
    ops whose kernel modules have `why_not(spec)`; others are planned by `plan_by`.
    """
    module = _module_or_reason(op, backend)
    if isinstance(module, str):
        return module
    reason: str | None = module.why_not(spec)
    return reason


def plan_by(op: str, call: Call, backend: str) -> Plan | Refusal:
    """Return the plan by which `backend` runs a call of `op`, or a Refusal with the reason.

    A backend that does not exist, or has not this op, gives a Refusal too.
    """
    module = _module_or_reason(op, backend)
    if isinstance(module, str):
        return Refusal(module)
    plan: Plan | Refusal = module.plan_fwd(call)
    return plan


def check_backend_name(backend: str | None) -> None:
    """Raise ValueError unless `backend` is None or a known name."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)} or None, got {backend!r}")


@functools.lru_cache(maxsize=4096)
def choose(op: str, spec: Spec, backend: str | None) -> str:
    """Return the name of the first backend of the spec's device that computes `op`.

    Args:
        op: the name of an op whose kernel modules have `why_not(spec)`.
        spec: the hashable description of the call.
        backend: the name of the only backend to ask; None asks those of the device in their order.

    Raises:
        UnsupportedError: the named backend, or every automatic one, refuses; the message says why.
    """

    def ask(name: str) -> str | Refusal:
        reason = refusal(op, name, spec)
        return name if reason is None else Refusal(reason)

    return _first(op, spec.device_type, backend, ask)[1]


def choose_plan(op: str, call: Call, backend: str | None) -> tuple[str, Plan]:
    """Return the name of the first backend that can plan a call of `op`, and its plan.

    Args:
        backend: the name of the only backend to ask; None asks those of the device in their order.

    Raises:
        UnsupportedError: as `choose`.
    """
    ask = functools.partial(plan_by, op, call)
    return _first(op, call.spec.device_type, backend, ask)


def choose_for(op: str, call: Call, backend: str | None) -> str:
    """Return the name of the backend that `choose_plan` would return, without its plan.

    A backend with `why_not_call(call)` is asked by that; of another one a plan is made and dropped.
    Raises UnsupportedError as `choose_plan` does.
    """

    def ask(name: str) -> str | Refusal:
        module = _module_or_reason(op, name)
        if isinstance(module, str):
            return Refusal(module)
        if hasattr(module, "why_not_call"):
            reason: str | None = module.why_not_call(call)
            return name if reason is None else Refusal(reason)
        plan = module.plan_fwd(call)
        return plan if isinstance(plan, Refusal) else name

    return _first(op, call.spec.device_type, backend, ask)[1]


def _first(
    op: str, device_type: str, backend: str | None, ask: Callable[[str], T | Refusal]
) -> tuple[str, T]:
    """Return the name of the first backend that does not refuse, and what `ask` returned for it.

    Args:
        op, device_type: the op and the type of its device, which decide the order of backends.
        backend: the only backend to ask; None for those of the device. The reference is not among
            them, but for ops without kernels.
        ask: a function from a backend's name to the result, or to a Refusal.

    Raises:
        UnsupportedError: all that were asked refuse, and the message has their reasons; or no
            backend runs on such a device.
    """
    names = (backend,) if backend is not None else _AUTOMATIC.get(device_type, ())
    if backend is None and op in _WITHOUT_KERNELS:
        names = (*names, "reference")
    reasons = []
    for name in names:
        answer = ask(name)
        if not isinstance(answer, Refusal):
            return name, answer
        reasons.append(f"{name}: {answer.reason}")
    if backend is not None:
        raise UnsupportedError(
            f"backend {backend!r} cannot run {op}: {reasons[0].split(': ', 1)[1]}"
        )
    if not names:
        raise UnsupportedError(f"{op} must run on a cpu or cuda device, got {device_type!r}")
    raise UnsupportedError(
        f"no backend can run {op} on {device_type} ({'; '.join(reasons)}); "
        "backend='reference' computes anything, slowly, in float64 and O(N^2) memory"
    )
