"""Predict the seconds of one step of the engine from a model's sizes and a machine. No torch.

    layers     each product at the slower of reading its weights and multiplying; norms, activations
               and rotations at the bandwidth of a copy
    attention  keys and values read once a sequence; prompts at the rate of products
    states     read once a sequence; recurrences of prompts at the rate of products; copies of
               states, as a step begins from them or keeps them
    head       a product for the rows that sample a token, whose logits are read again to sample
    kernels    a fixed time each, beside its work; one that is not captured is launched by the host
    padding    a captured step runs the next larger of a few numbers of rows (`padding.py`)
    sums       of tensor parallel shards: after attention, after the feed-forward block and after
               the embedding, and the concatenation of the logits

The host schedules and submits a step before it runs, and processes its tokens afterwards. Both take
longer for a step whose rows differ from those of the step before.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import NamedTuple

from tilewise.cost.machine import Machine
from tilewise.cost.model import Sizes
from tilewise.cost.ops import activation_cost, norm_cost, product_cost
from tilewise.cost.padding import padded_rows

__all__ = [
    "StepCost",
    "StepSeconds",
    "StepWork",
    "kind_of",
    "recompute_seconds",
    "sum_seconds",
    "swap_seconds",
]

# Kernels of a decode step of 28 layers on an H200: 320 at batch 1, where attention merges splits,
# 292 at 256 (lab/results/engine_h200.json).
KERNELS_OF_A_LAYER, KERNELS_OF_A_STEP = 11, 10
# Keys and values whose read takes less time do not keep all of a GPU's memory busy.
BEGINNING_S = 0.25e-3
LOGIT_BYTES = 4  # logits are float32 whatever the model is
# Number of GPUs -> (bytes of a sum up to which each GPU writes its whole part into the inboxes of
# the others, bytes up to which each writes there the sum of its share, with flags), as
# `distributed.inbox` does. Other numbers of GPUs use FEW_BYTES and 0.
INBOX_SUM_BYTES = {2: (768 << 10, 4 << 20), 4: (256 << 10, 4 << 20)}
FEW_BYTES = 512 << 10
# Fixed time of a sum with flags, in `small_sum_s`: 6 us. With it sums of 512 KiB to 2 MiB on two
# and four H200s are within a tenth (lab/results/tensor_parallel_flags_h200.json).
FLAGGED_SUM = 5


class StepWork(NamedTuple):
    """The work of a step, as far as its time depends on it.

    Attributes:
        tokens: the tokens that the step computes, which are the rows of its products before
            padding.
        sequences: the number of sequences with at least one token in the step.
        logits: the rows for which logits are computed.
        samples: the tokens that are sampled from the logits.
        keys: the tokens whose keys and values attention reads, summed over the sequences.
        pairs: the pairs of query and visible key in runs of more than one token; 0 if the step only
            decodes.
        copied_slots: the tokens in blocks that are copied within the cache.
        swapped_slots: the tokens in blocks that are swapped in or out before the step begins.
        is_decode: True if every sequence computes one token and samples one.
        state_copies: the copies of states in layers that keep states: restores from checkpoints,
            forks from slot to slot, and saves to checkpoints.
        prompt_tokens: the tokens in runs of more than one token.
        renews: True if the step's rows differ from those of the step before: some sequences compute
            a prompt, have ended, or sample their second token after their prompt in the step
            before.
    """

    tokens: int
    sequences: int
    logits: int
    samples: int
    keys: int
    pairs: int = 0
    copied_slots: int = 0
    swapped_slots: int = 0
    is_decode: bool = False
    renews: bool = False
    state_copies: int = 0
    prompt_tokens: int = 0


class StepSeconds(NamedTuple):
    """The predicted seconds of one step, as `StepCost` returns them.

    `before` is the host's time to schedule and submit the step, `launching` its time to launch
    kernels (0 for a captured step), `after` its time to process the sampled tokens. `device` counts
    from the launch of the first kernel; the device waits for the host if launching takes longer.
    """

    before: float
    launching: float
    device: float
    after: float

    @property
    def alone(self) -> float:
        """Seconds of the step if no other step overlaps with it."""
        return self.before + max(self.launching, self.device) + self.after


class StepCost:
    """A predictor for one model on one machine: called with a `StepWork`, it returns `StepSeconds`.

    Args:
        sizes: the sizes of the model.
        machine: the profile of the machine.
        dtype: the dtype of the products, one that the profile knows.
        weight_itemsize, cache_itemsize: the bytes of an element of the weights, and of the cache.
        tensor_parallel: the number of machines of this profile that hold a shard each and run every
            step together; the time is that of one of them, with the sums between them.

    Raises:
        ValueError: the profile has no FLOP/s for this dtype, or no peers; or the model does not
            divide, see `Sizes.shard`.

    Example:
        >>> cost = StepCost(sizes, machine("h200"))
        >>> cost(StepWork(tokens=32, sequences=32, logits=32, samples=32, keys=33_152)).device
    """

    def __init__(
        self,
        sizes: Sizes,
        machine: Machine,
        *,
        dtype: str = "bfloat16",
        weight_itemsize: float = 2,
        cache_itemsize: float = 2,
        tensor_parallel: int = 1,
    ) -> None:
        peaks = machine.peaks(dtype)
        if tensor_parallel > 1 and not machine.peer_bandwidth:
            raise ValueError(f"machine must have links to its peers, got {machine.name}")
        sizes = sizes.shard(tensor_parallel)
        self.sizes, self.machine, self.tensor_parallel = sizes, machine, tensor_parallel
        self.weight_itemsize = weight_itemsize
        self.itemsize = 4 if dtype == "float32" else 2
        self.cache_bytes = sizes.cache_bytes(cache_itemsize)
        self._flops = peaks.flops
        self._layers: dict[int, float] = {}  # seconds by number of rows
        self._heads: dict[int, float] = {}
        self._factors = {kind: _Curve(told) for kind, told in machine.factors.items()}
        states = sizes.states
        num_layers = sizes.num_layers + (0 if states is None else states.count)
        self.num_layers = num_layers
        self.kernels = KERNELS_OF_A_LAYER * num_layers + KERNELS_OF_A_STEP

    def __call__(self, work: StepWork) -> StepSeconds:
        """Return the predicted seconds of a step on the host and on the device."""
        m = self.machine
        before = m.step_s + m.step_sequence_s * work.sequences
        before += m.token_s * (work.tokens - work.sequences)
        after = m.update_s + m.update_sequence_s * work.samples
        if work.renews:
            before += m.renew_s + m.renew_sequence_s * work.sequences
            after += m.renewed_sequence_s * work.samples
        launching = 0.0
        if not (m.captures and work.is_decode):
            launching = m.launch_s * self.kernels + m.launch_token_s * work.tokens
            launching += m.launch_sequence_s * work.sequences
            if work.logits:
                launching += m.launch_draw_s
        return StepSeconds(before, launching, self.device(work), after)

    def device(self, work: StepWork) -> float:
        """Return the predicted seconds of a step on the device: products, sampling, sums over
        ranks, attention, recurrences, swapped and copied blocks."""
        m = self.machine
        seconds = self.by_rows(work) + m.sample_s * work.samples
        if work.pairs > m.few_pairs:
            seconds += m.prompt_s
        seconds += self.sums(work)
        is_beside = work.pairs > 0 and m.captures
        share = m.beside_efficiency if is_beside else m.key_efficiency
        reading = work.keys * self.cache_bytes / (m.read_bandwidth * share)
        if m.near_bytes:
            reading += self._far_seconds(work) / m.far_efficiency
        if m.reading_s:
            reading += m.reading_s * self._begun(work)
        if not work.pairs:
            seconds += reading
        else:
            flops = work.pairs * self.attention_flops
            multiplying = flops / (self._flops * m.attention_efficiency)
            is_longer_one = m.overlaps and not m.attends_apart
            seconds += max(reading, multiplying) if is_longer_one else reading + multiplying
        seconds += self.states(work)
        if work.swapped_slots:
            seconds += swap_seconds(m, work.swapped_slots * self.cache_bytes, transfers=1)
        if work.copied_slots:
            seconds += 2 * work.copied_slots * self.cache_bytes / m.copy_bandwidth
        return seconds

    def states(self, work: StepWork) -> float:
        """Return the predicted seconds of a step's recurrences in gated delta layers, and of copies
        of their states; 0.0 for a model without such layers."""
        states, m = self.sizes.states, self.machine
        if states is None:
            return 0.0
        reading = work.sequences * states.state_bytes / (m.read_bandwidth * m.key_efficiency)
        flops = work.prompt_tokens * states.token_flops
        multiplying = flops / (self._flops * m.attention_efficiency)
        copying = 2 * work.state_copies * states.checkpoint_bytes / m.copy_bandwidth
        return reading + multiplying + copying

    def by_rows(self, work: StepWork) -> float:
        """Return the predicted seconds of all work on the device whose size is the number of rows:
        products, norms, activations, the head and the fixed time of kernels, corrected by
        `Machine.factors`.

        Attention, recurrences, sampling, sums over ranks and copies are not included.
        """
        rows, logits = self.rows(work)
        layers = self._layers.get(rows)
        if layers is None:
            layers = self._layers[rows] = self._product_seconds(rows)
        head = self._heads.get(logits)
        if head is None:
            head = self._heads[logits] = self._head_seconds(logits)
        seconds = layers + head + self.machine.kernel_s * self.kernels
        factors = self._factors.get(kind_of(work))
        return seconds if factors is None else seconds * factors(rows)

    def rows(self, work: StepWork) -> tuple[int, int]:
        """Return the rows of a step's products and the rows of its logits, with padding if the
        machine captures steps; logits are padded only in steps of decoding."""
        if not self.machine.captures:
            return work.tokens, work.logits
        rows = padded_rows(work.tokens, is_decode=work.is_decode)
        return rows, rows if work.is_decode else work.logits

    def sums(self, work: StepWork) -> float:
        """Return the predicted seconds of a step's sums over tensor parallel ranks and of gathering
        logits; 0.0 for one rank."""
        if self.tensor_parallel == 1:
            return 0.0
        stream = work.tokens * self.sizes.hidden * self.itemsize
        count = 2 * self.num_layers + 1
        logits = work.logits * self.sizes.vocab_size * LOGIT_BYTES
        gathered = logits * (self.tensor_parallel - 1) / self.tensor_parallel
        seconds = count * sum_seconds(self.machine, stream, self.tensor_parallel)
        if logits:
            seconds += self.machine.large_sum_s + gathered / self.machine.peer_bandwidth
        return seconds

    @property
    def attention_flops(self) -> int:
        """FLOPs of one pair of a query and a key, in all layers with attention and all query
        heads."""
        return 4 * self.sizes.num_layers * self.sizes.num_q_heads * self.sizes.head_dim

    def parts(self, work: StepWork) -> dict[str, float]:
        """Return the terms whose weighted sum is a step's time on the device, before
        `Machine.factors`, if memory and products do not overlap.

        Keys are the fields of Machine that weight the terms. A field that is a time multiplies its
        term, a count (for reading_s the fraction of that time that the step takes); a field that is
        an efficiency divides its term, the seconds at full speed. The host's time, recurrent
        states, sums over ranks and copies are left out. `bench.fit` fits the fields to measured
        steps.
        """
        m, sizes = self.machine, self.sizes
        rows, logits = self.rows(work)
        weights, flops = self._streams(rows)
        parameters = sizes.head[0] * sizes.head[1]
        head_weights = int(parameters * self.weight_itemsize) if logits else 0
        reading = work.keys * self.cache_bytes / m.read_bandwidth
        is_beside = work.pairs > 0 and m.captures
        return {
            "kernel_s": self.kernels,
            "sample_s": work.samples,
            "prompt_s": float(work.pairs > m.few_pairs),
            "stream_efficiency": (weights + head_weights) / m.read_bandwidth,
            "product_efficiency": (flops + 2 * logits * parameters) / self._flops,
            "element_efficiency": self._element_bytes(rows, logits) / m.copy_bandwidth,
            "reading_s": self._begun(work),
            "key_efficiency": 0.0 if is_beside else reading,
            "beside_efficiency": reading if is_beside else 0.0,
            "far_efficiency": self._far_seconds(work),
            "attention_efficiency": work.pairs * self.attention_flops / self._flops,
        }

    def _begun(self, work: StepWork) -> float:
        """Return the fraction of `Machine.reading_s` that a step takes: the time to read its keys
        and values over BEGINNING_S, at most 1; 0 on a machine that does not capture steps."""
        full = work.keys * self.cache_bytes / self.machine.read_bandwidth
        return min(1.0, full / BEGINNING_S) if self.machine.captures else 0.0

    def _far_seconds(self, work: StepWork) -> float:
        """Return the seconds, at full read bandwidth, to read the part of a step's keys and values
        beyond `Machine.near_bytes`, which caches do not hold; 0 if near_bytes is not known."""
        m = self.machine
        far = work.keys * self.cache_bytes - m.near_bytes if m.near_bytes else 0.0
        return max(0.0, far) / m.read_bandwidth

    def _streams(self, rows: int) -> tuple[int, int]:
        """Return the bytes of weights that all layers read, and the FLOPs of their products with
        `rows` rows; without the head."""
        weights = flops = 0
        for count, products in self._kinds():
            each = [product_cost(rows, i, o, weight_itemsize=0) for i, o in products]
            parameters = sum(i * o for i, o in products)
            weights += count * int(parameters * self.weight_itemsize)
            flops += count * sum(product.flops for product in each)
        return weights, flops

    def _kinds(self) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """Return the number of layers of each kind and the shapes of the products of one such
        layer."""
        sizes, states = self.sizes, self.sizes.states
        kinds = [(sizes.num_layers, sizes.products)]
        return kinds if states is None else [*kinds, (states.count, states.products)]

    def _element_bytes(self, rows: int, logits: int) -> int:
        """Return the bytes that a step of `rows` rows and `logits` rows of logits moves beside
        weights, keys and values: norms, activations, rotations, inputs and outputs of products, and
        logits."""
        return self._layer_bytes(rows) + 2 * logits * self.sizes.vocab_size * LOGIT_BYTES

    def _layer_bytes(self, rows: int) -> int:
        sizes, width, total = self.sizes, self.itemsize, 0
        for count, products in self._kinds():
            around = norm_cost(rows, sizes.hidden, itemsize=width).bytes * 2
            around += activation_cost(rows, products[-1][0], itemsize=width).bytes
            for wide, narrow in products:
                around += rows * (wide + narrow) * width
            total += count * around
        heads = (sizes.num_q_heads + sizes.num_kv_heads) * sizes.head_dim
        total += sizes.num_layers * 2 * rows * heads * width  # rotated in place
        if sizes.states is not None:
            total += sizes.states.count * 2 * rows * sizes.states.products[0][1] * width
        return total

    def _product_seconds(self, rows: int) -> float:
        weights, flops = self._streams(rows)
        return self._slower(weights, flops) + self._element_seconds(self._layer_bytes(rows))

    def _head_seconds(self, rows: int) -> float:
        if not rows:
            return 0.0
        head = self.sizes.head
        weights = int(head[0] * head[1] * self.weight_itemsize)
        logits = 2 * rows * self.sizes.vocab_size * LOGIT_BYTES
        return self._slower(weights, 2 * rows * head[0] * head[1]) + self._element_seconds(logits)

    def _slower(self, weights: int, flops: int) -> float:
        m = self.machine
        reading = weights / (m.read_bandwidth * m.stream_efficiency)
        multiplying = flops / (self._flops * m.product_efficiency)
        return max(reading, multiplying) if m.overlaps else reading + multiplying

    def _element_seconds(self, moved: int) -> float:
        m = self.machine
        return moved / (m.copy_bandwidth * m.element_efficiency)


def kind_of(work: StepWork) -> str:
    """Return the kind of a step, a key of `Machine.factors`: "prompts" if it has pairs, that is
    runs of more than one token, else "decode"."""
    return "prompts" if work.pairs else "decode"


class _Curve:
    """A function of a number of rows: measured factors, interpolated linearly between two measured
    numbers of rows, and constant beyond the least and the largest."""

    def __init__(self, told: Mapping[int, float]) -> None:
        self._rows = sorted(told)
        self._factors = [told[rows] for rows in self._rows]

    def __call__(self, rows: int) -> float:
        place = bisect_left(self._rows, rows)
        if place == len(self._rows) or not place:
            return self._factors[min(place, len(self._rows) - 1)]
        below, above = self._rows[place - 1], self._rows[place]
        share = (rows - below) / (above - below)
        return self._factors[place - 1] * (1 - share) + self._factors[place] * share


def recompute_seconds(cost: Callable[[StepWork], StepSeconds], tokens: int, chunk: int) -> float:
    """Return the predicted seconds to recompute the keys and values of one sequence, alone, in
    chunks: for each chunk the longer of the device's time and the host's launching.

    Args:
        cost: the predictor of a step.
        tokens: the tokens of the sequence.
        chunk: the tokens of a step, at least 1.
    """
    seconds = 0.0
    for start in range(0, tokens, chunk):
        n = min(chunk, tokens - start)
        is_last = start + n == tokens
        pairs = n * start + n * (n + 1) // 2
        prompts = n if n > 1 else 0
        step = cost(
            StepWork(n, 1, int(is_last), int(is_last), start + n, pairs, prompt_tokens=prompts)
        )
        seconds += max(step.launching, step.device)
    return seconds


def sum_seconds(machine: Machine, num_bytes: float, parallel: int) -> float:
    """Return the predicted seconds of one sum of a tensor over the GPUs of a host (an all-reduce).

    In a small sum each GPU writes into the inboxes of the (N - 1) others at once, in words of which
    half are data, and waits for each of them; the norm after it is part of it, and counted with the
    step's kernels. In a larger sum each GPU adds up its share and sends the result; the largest
    sums go around a ring twice. These two move 2 (N - 1) / N of the message. `INBOX_SUM_BYTES` has
    the limits.

    Args:
        machine: a profile with links to peers.
        num_bytes: the size of the message.
        parallel: N, the number of GPUs.

    Raises:
        ValueError: the machine has no such links.
    """
    if not machine.peer_bandwidth:
        raise ValueError(f"machine must have links to its peers, got {machine.name}")
    small, flagged = INBOX_SUM_BYTES.get(parallel, (FEW_BYTES, 0))
    if num_bytes <= small:
        return (parallel - 1) * (machine.small_sum_s + 2 * num_bytes / machine.peer_bandwidth)
    fixed = FLAGGED_SUM * machine.small_sum_s if num_bytes <= flagged else machine.large_sum_s
    share = 2 * (parallel - 1) / parallel
    return fixed + share * num_bytes / machine.peer_bandwidth


def swap_seconds(machine: Machine, num_bytes: float, transfers: int) -> float:
    """Return the predicted seconds to move blocks of keys and values over the link between device
    and main memory, in one direction.

    Args:
        machine: a profile with a link.
        num_bytes: the size of all blocks together.
        transfers: the number of copies; each takes a fixed time beside its bytes.

    Raises:
        ValueError: the machine has no link.
    """
    if not machine.link_bandwidth:
        raise ValueError(f"machine must have a link to main memory, got {machine.name}")
    return num_bytes / machine.link_bandwidth + transfers * machine.link_s
