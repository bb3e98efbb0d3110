"""What a layer remembers of a running sequence in place of keys and values: states in slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tilewise import ops
from tilewise.cache.spec import StateSpec
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.layers import Parts, RankPart, project, project_in_parts
from tilewise.ops import RecurrentStates

__all__ = ["LayerStates", "Memory", "StateLayer"]


class LayerStates(NamedTuple):
    """The state tensors of one layer with a slot for each running sequence; `StateLayer.allocate`
    makes them.

    Attributes:
        recurrence: the states of the layer's recurrence, see `ops.recurrent_states`; None for a
            layer without one.
        convolution: (slots, R, C), the dtype of the tokens: the last R >= W - 1 inputs of the
            convolution, see `ops.causal_conv1d_step`; None for a layer without one.
    """

    recurrence: RecurrentStates | None
    convolution: Tensor | None


class StateConfig(Protocol):
    """The interface of a `StateLayer`'s config: it gives the shapes of the layer's state."""

    def state(self, dtype: torch.dtype) -> StateSpec:
        """Return the spec of the state of one sequence in a layer whose tokens have this dtype."""


class Memory:
    """The arguments of one call of a `StateLayer` that say where its sequences start and continue.

    A layer calls the methods in place of the ops: they compute whole sequences if `states` is None,
    or else continue the sequences in slots, which are updated in place.

    Args:
        cu_seqlens: int32 (N + 1,), the edges of packed sequences; None for a dense batch.
        states: the slots of running sequences; None for whole sequences, which start from nothing.
        slots: int64 or int32 (N,), the slot of each sequence, -1 for one without.
        starts: int64 or int32 (N,), the tokens of each sequence before this call.
    """

    def __init__(
        self,
        cu_seqlens: Tensor | None = None,
        states: LayerStates | None = None,
        slots: Tensor | None = None,
        starts: Tensor | None = None,
    ) -> None:
        self.cu_seqlens, self.states, self.slots, self.starts = cu_seqlens, states, slots, starts

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """Return the causal convolution of x (..., C) along each sequence, in the same shape.

        Whole sequences go to `ops.causal_conv1d`, those in slots to `ops.causal_conv1d_step`, which
        updates the slots.

        Args:
            x: (..., C), the rows of the call.
            weight, bias: (C, W) and (C,) or None.
            activation: the function of the result, "silu"; None for none.
        """
        states, slots, starts = self.states, self.slots, self.starts
        if states is None or slots is None or starts is None:
            y = ops.causal_conv1d(
                x, weight, bias, activation=activation, cu_seqlens=self.cu_seqlens
            )
            assert isinstance(y, Tensor)  # states are not asked for
            return y
        convolution = states.convolution
        if convolution is None:  # of one tap, which reads no token before its own
            convolution = x.new_empty(slots.shape[0], 0, x.shape[-1])
        stepped: Tensor = ops.causal_conv1d_step(
            x,
            weight,
            bias,
            convolution,
            slots=slots,
            starts=starts,
            activation=activation,
            cu_seqlens=self.cu_seqlens,
        )
        return stepped

    def gated_delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Return o of the gated delta rule for q, k, v, g, beta: `ops.gated_delta` for whole
        sequences, `ops.gated_delta_step` for those in slots, whose states are updated in place."""
        if self.states is None or self.slots is None or self.starts is None:
            o = ops.gated_delta(q, k, v, g, beta, cu_seqlens=self.cu_seqlens)
            assert isinstance(o, Tensor)  # states are not asked for
            return o
        recurrence = self.states.recurrence
        assert recurrence is not None
        stepped: Tensor = ops.gated_delta_step(
            q,
            k,
            v,
            g,
            beta,
            recurrence,
            slots=self.slots,
            starts=self.starts,
            cu_seqlens=self.cu_seqlens,
        )
        return stepped

    def ssd(self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        """Return y of the state space dual for x, dt, a, b, c, d: `ops.ssd` for whole sequences,
        `ops.ssd_step` for those in slots, whose states are updated in place."""
        if self.states is None or self.slots is None or self.starts is None:
            y = ops.ssd(x, dt, a, b, c, d=d, cu_seqlens=self.cu_seqlens)
            assert isinstance(y, Tensor)  # states are not asked for
            return y
        recurrence = self.states.recurrence
        assert recurrence is not None
        stepped: Tensor = ops.ssd_step(
            x,
            dt,
            a,
            b,
            c,
            recurrence,
            slots=self.slots,
            starts=self.starts,
            d=d,
            cu_seqlens=self.cu_seqlens,
        )
        return stepped


class StateLayer(nn.Module):
    """The base of layers that remember a sequence in a state of fixed size instead of keys and
    values.

    `forward` computes whole sequences and is differentiable. `step` computes the next tokens of
    running sequences, whose states lie in slots, with the same bits however a sequence is cut:

        slots = layer.allocate(num_slots, dtype=x.dtype, device=x.device)
        y = layer.step(x, slots, slots=..., starts=..., cu_seqlens=...)

    Attributes:
        config: the sizes of the layer.
        wide: the names of parameters that stay float32 in a model of 16 bits, as they decide how
            fast a state decays.
        o_proj: the projection of the layer's output.
        leaves_parts: True if `forward` and `step` may return partial sums for the next norm's
            `add`, see `project_in_parts`.
    """

    config: StateConfig
    wide: tuple[str, ...] = ()
    o_proj: nn.Linear
    leaves_parts = False

    def allocate(
        self,
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        keeps: str | None = None,
    ) -> LayerStates:
        """Allocate slots for running sequences; on "meta" they have shapes and dtypes alone.

        The memory is not initialised: a slot is not read at the start of a sequence.

        Args:
            num_slots: the number of slots.
            dtype: the dtype of the layer's tokens; its states are float32 (float64 for float64).
            device: the device of the slots.
            keeps: "updates" or "tokens", the contents of a slot, see `ops.recurrent_states`; None
                chooses by the device.

        Raises:
            TypeError, ValueError: `dtype` is no float dtype, or an argument is out of range.
        """
        spec = self.config.state(dtype)
        recurrence = convolution = None
        if spec.num_heads:
            recurrence = ops.recurrent_states(
                num_slots,
                spec.num_heads,
                spec.key_dim,
                spec.value_dim,
                num_key_heads=spec.num_key_heads,
                by_channel=spec.by_channel,
                is_delta=spec.is_delta,
                dtype=dtype,
                device=device,
                keeps=keeps,
            )
        if spec.conv_width > 1:
            shape = (num_slots, spec.conv_width - 1, spec.conv_channels)
            convolution = torch.empty(shape, dtype=dtype, device=device)
        return LayerStates(recurrence, convolution)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None) -> Tensor | Parts | RankPart:
        """Return the layer's output for whole sequences, which start from an empty state.

        Args:
            x: (B, S, E) dense, or (T, E) packed with cu_seqlens.
            cu_seqlens: int32 (N + 1,), the first row of each packed sequence, and the end of the
                last; None for a dense batch.

        Returns:
            Same shape as x; with `leaves_parts` perhaps partial sums.

        Raises:
            ValueError, TypeError: cu_seqlens does not cut the rows of x; the message names it.
        """
        return self.mix(x, Memory(cu_seqlens))

    def step(
        self,
        x: Tensor,
        states: LayerStates,
        *,
        slots: Tensor,
        starts: Tensor,
        cu_seqlens: Tensor | None = None,
        adapters: StepAdapters | None = None,
    ) -> Tensor | Parts | RankPart:
        """Compute the next tokens of running sequences; nothing is differentiable.

        Args:
            x: (T, E), packed rows.
            states: this layer's slots, which are updated in place.
            slots: int64 or int32 (N,), the slot of each sequence; -1 for a sequence without one.
            starts: int64 or int32 (N,), the number of tokens of each sequence that came before this
                call.
            cu_seqlens: int32 (N + 1,), the first row of each sequence, and the end of the last;
                None where each row is a sequence.
            adapters: the adapters of the step's rows; None if no row uses one.

        Returns:
            (T, E); with `leaves_parts` perhaps partial sums.

        Raises:
            ValueError, TypeError: the slots, lengths or states do not match; the message names
                them.
        """
        return self.mix(x, Memory(cu_seqlens, states, slots, starts), adapters)

    def mix(
        self, x: Tensor, memory: Memory, adapters: StepAdapters | None = None
    ) -> Tensor | Parts | RankPart:
        """Return the layer's output for x (..., E), same shape: each row sees earlier rows of its
        sequence.

        Subclasses implement it, and `forward` and `step` call it. The slots of `memory`, if it has
        some, are updated in place.
        """
        raise NotImplementedError

    def out(self, x: Tensor, adapters: StepAdapters | None) -> Tensor | Parts | RankPart:
        """Return o_proj(x) plus the terms of `adapters`; with `leaves_parts` perhaps as parts."""
        projected = project_in_parts if self.leaves_parts else project
        return projected(self.o_proj, x, adapters)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> StateLayer:
        """Apply `fn` to all tensors as Module._apply does, but do not narrow the parameters named
        in `wide`.

        They keep their dtype if `fn` would cast them to fewer than 32 bits, and only move to the
        new device.
        """
        before = {name: self.get_parameter(name).data for name in self.wide}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, data in before.items():
            parameter = self.get_parameter(name)
            if parameter.dtype.itemsize < 4:
                parameter.data = data.to(parameter.device)
        return self
