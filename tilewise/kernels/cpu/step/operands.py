"""What the operations of a list take: ranges of buffers, norms, and the places of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.kernels.cpu.step.panels import Panels

__all__ = ["Buffer", "Growth", "Heads", "Held", "Latents", "Mixture", "Norm", "Recurrence"]

Held = Callable[[], Tensor]
"""A function that returns a weight as its module holds it now."""


class Buffer(NamedTuple):
    """A buffer of a program, one row a token, or a range of columns of it, by name and offsets;
    made by `Program.buffer`.

    Attributes:
        name: the buffer's name.
        row: the bytes from row to row.
        start: the bytes from the start of a row to the range.
    """

    name: str
    row: int
    start: int = 0

    def at(self, column: int, size: int) -> Buffer:
        """Return the part of this buffer from `column` on, with elements of `size` bytes."""
        return self._replace(start=self.start + column * size)


class Norm(NamedTuple):
    """A norm of rows; see `layers.normalise_row`.

    Attributes:
        weight: a function that returns the weight (E,), or (parts, E) of a norm of parts.
        eps: the number that is added to the mean square.
        bias: a function that returns the bias, in the shape of the weight, or None.
        shift: the number that is added to the weight.
        rounds: True if the quotient is rounded before it is multiplied by the weight.
        centres: True if the mean is subtracted first.
    """

    weight: Held
    eps: float
    bias: Held | None = None
    shift: float = 0.0
    rounds: bool = False
    centres: bool = False


class Growth(NamedTuple):
    """The growth of queries with their position p: 1 + beta ln(1 + floor((p + first) / length)).

    Attributes:
        beta: the factor of the logarithm.
        length: the number of positions after which the factor grows again.
        first: the term that is added to a position.
    """

    beta: float
    length: int
    first: int


class Heads(NamedTuple):
    """How a layer's queries, keys and values lie in rows and in the cache.

    Attributes:
        kv: the layer's cache: keys (N, P, Hk, D), values (N, P, Hk, Dv) and, with 8 bits, their
            scales (N, P, Hk).
        num_q, num_kv: Hq and Hk; Hk is 0 for queries alone.
        q_at, k_at, v_at: the columns of a row at which queries, keys and values begin.
        q_step: the columns from a query head to the next.
        half: the pairs of channels that rotate; 0 for none.
        angles: the first column of the layer's angles among those of the tables.
        is_interleaved: True if the pairs are (2 i, 2 i + 1) rather than (i, i + half).
    """

    kv: Sequence[Tensor]
    num_q: int
    num_kv: int
    q_at: int
    k_at: int
    v_at: int
    q_step: int
    half: int = 0
    angles: int = 0
    is_interleaved: bool = False

    @classmethod
    def queries(cls, kv: Sequence[Tensor], num_q: int, *, first: int = 0, **options: Any) -> Heads:
        """Return the heads of a layer that computes queries alone, side by side from column `first`
        on, and attends to keys that another layer has cached in `kv`."""
        dim = kv[0].shape[-1]
        end = first + num_q * dim
        return cls(kv, num_q, 0, first, end, end, dim, **options)

    @classmethod
    def side_by_side(
        cls, kv: Sequence[Tensor], num_q: int, *, first: int = 0, **options: Any
    ) -> Heads:
        """Return heads whose q, k and v are columns of one product, in this order from column
        `first` on."""
        num_kv, dim = kv[0].shape[2:]
        start = first + num_q * dim
        return cls(kv, num_q, num_kv, first, start, start + num_kv * dim, dim, **options)

    @property
    def are_side_by_side(self) -> bool:
        """Whether q, k and v lie as `side_by_side` places them from column 0 on, and keys are as
        wide as values."""
        dims = {cache.shape[-1] for cache in self.kv[:2]}
        start = self.num_q * self.q_step
        places = (0, start, start + self.num_kv * self.q_step)
        return dims == {self.q_step} and (self.q_at, self.k_at, self.v_at) == places


class Latents(NamedTuple):
    """How a layer attends to latents.

    Attributes:
        cache: (N, P, R + Dr), and with 8 bits its scales (N, P, 2).
        num_heads: Hq, the number of heads.
        rank: R, the channels of a latent.
        scale: the factor of a product of a query and a key.
    """

    cache: Sequence[Tensor]
    num_heads: int
    rank: int
    scale: float


class Recurrence(NamedTuple):
    """A layer's recurrence, and the slots of its states; see `ops.gated_delta_step`.

    Attributes:
        kind: "delta", "channels" for the delta rule with a decay of each channel, or "time steps"
            for Mamba-2.
        states: the state, the keys, the gates and the updates of all slots, the first four fields
            of `RecurrentStates`.
        q_scale: the factor of the queries.
    """

    kind: str
    states: Sequence[Tensor]
    q_scale: float

    @property
    def heads(self) -> tuple[int, int]:
        """(Number of heads of values, number of heads of keys)."""
        return self.states[0].shape[1], self.states[1].shape[2]

    @property
    def dims(self) -> tuple[int, int]:
        """(Channels of a key, channels of a value), of one head."""
        key_dim, value_dim = self.states[0].shape[2:]
        return key_dim, value_dim


class Mixture(NamedTuple):
    """A mixture of experts, see `ops.choose_experts` and `ops.expert_mlp`.

    Attributes:
        up, down: the panels of each expert's two weights; with gates the rows of `up` are those of
            gate and up, interleaved as for a gated product.
        num_active: k, the number of experts of a row.
        scores: "softmax", "sigmoid" or "sparse_mixer".
        normalised, norm_eps, scale, num_groups, num_active_groups, best_in_group, jitter: see
            `ops.choose_experts`; `scale` is the factor of all weights.
        correction_bias, expert_scale: functions that return a tensor (N,), a number for each
            expert, or None.
        logit_scale: the factor of the logits.
        weighs_input: True if the weights multiply what enters the experts.
        function, limit, alpha: the function of the gate, see `Program.product`.
        is_gated: False if the function is applied to the product with `up` itself, which has no
            gate.
    """

    up: Sequence[Panels]
    down: Sequence[Panels]
    num_active: int
    scores: str = "softmax"
    normalised: bool = True
    norm_eps: float = 0.0
    scale: float = 1.0
    correction_bias: Held | None = None
    num_groups: int = 1
    num_active_groups: int = 1
    best_in_group: int = 1
    jitter: float = 0.01
    expert_scale: Held | None = None
    logit_scale: float = 1.0
    weighs_input: bool = False
    function: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0
    is_gated: bool = True
