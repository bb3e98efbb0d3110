"""The interface of every decoder to the engine, the trainer and the weight loader."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.cache.spec import CacheLayer
from tilewise.models.config import ModelConfig
from tilewise.models.cpu_program import CpuProgram
from tilewise.models.weight_table import Weight
from tilewise.nn.attention import attend_as_steps
from tilewise.nn.context import AttentionContext
from tilewise.nn.invariant import use_invariant_linears
from tilewise.nn.invariant_linear import InvariantLinear
from tilewise.nn.layers import fuse_on_cpu
from tilewise.nn.packed import PackedEmbedding, PackedLinear, can_pack, pack_linears
from tilewise.nn.quantised import QuantisedLinear
from tilewise.nn.same_bits import product, use_inference_bits
from tilewise.nn.states import LayerStates
from tilewise.ops.panels import why_not_pack

__all__ = ["Decoder"]


class Decoder(nn.Module):
    """A causal language model: token ids to hidden states, hidden states to logits.

    Attributes:
        config: the configuration of the model.
        embed_tokens: the embedding (vocab_size, E); also the output head if lm_head is None (tied).
        packed_head: the tied head in packed or fixed-tile form, see `pack_for_inference` and
            `use_invariant_linears`; None otherwise.
        has_inference_bits: True after `use_inference_bits`.
        weight_prefix: the prefix of tensor names that a checkpoint of the bare model omits.
        weight_renames: regular expressions of tensors' names in some files, and what stands for
            them in `weight_table`.
        embedding_source: the embedding's name in a checkpoint.
        ignored_weights: regular expressions of checkpoint tensors that are no parameters.
        residual_projections: suffixes of the parameters that write to the residual stream.
        hands_attention_over: True if every layer calls its attention by `AttentionContext.attend`,
            once.
    """

    weight_prefix: str = ""
    weight_renames: tuple[tuple[str, str], ...] = ()
    embedding_source: str = "model.embed_tokens.weight"
    ignored_weights: tuple[str, ...] = ()
    residual_projections: tuple[str, ...] = ("o_proj.weight", "down_proj.weight")
    hands_attention_over: bool = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.lm_head: nn.Linear | PackedLinear | None = None
        self.packed_head: nn.Module | None = None
        self.has_inference_bits = False
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        *,
        ctx: AttentionContext | None = None,
        kv: Sequence[CacheLayer] | None = None,
    ) -> Tensor:
        """Return the last hidden states, normalised.

        Args:
            ids: int64, (B, S) dense and differentiable, or (T,) packed when ctx and kv are given.
            positions: int64, same shape as ids; None means 0 ... S - 1 of a dense batch.
            ctx: the AttentionContext, which says to which sequences the packed rows belong.
            kv: the k_cache and v_cache of each layer with attention (and scales of an 8-bit cache)
                that the new tokens' keys and values are written to, and that attention reads.

        Returns:
            (B, S, E) or (T, E), in the dtype of the model.

        Raises:
            ValueError: packed rows come without positions, or only one of ctx and kv is given.
        """
        raise NotImplementedError

    def dense_length(self, ids: Tensor, ctx: AttentionContext | None) -> int:
        """Return S of a dense batch that comes without positions.

        Raises:
            ValueError: `ctx` is given: packed rows need positions.
        """
        if ctx is not None:
            raise ValueError("positions must be given with ctx, got None")
        return ids.shape[-1]

    def weight_table(self) -> tuple[Weight, ...]:
        """Return a row for each parameter: the tensors of a Hugging Face checkpoint that make it.

        No tensor is read; the rows have names, and how the tensors are joined.
        """
        raise NotImplementedError

    def source_of(self, name: str, linear: QuantisedLinear) -> Weight:
        """Return the weight of a Hugging Face checkpoint from which a quantised weight was made.

        Args:
            name: the name that the parameter of a linear layer would have.
            linear: the layer that has the weight.
        """
        raise NotImplementedError

    def why_no_cpu_program(self) -> str | None:
        """Say why there is no `cpu_program` of this model, or return None where there is one."""
        return f"the model must be a NativeDecoder, got {type(self).__name__}"

    def cpu_program(
        self,
        caches: Sequence[CacheLayer],
        states: Mapping[int, LayerStates],
        *,
        batch_invariant: bool,
    ) -> CpuProgram:
        """Return a step of this model as a list of operations for a CPU.

        Args:
            caches: the keys and values or the latents of each layer with attention, which the list
                writes and reads.
            states: the slots of each layer with a state, by its number in the model; the list reads
                and writes them, too.
            batch_invariant: True if the bits of a row must depend neither on its place in the step
                nor on the rows beside it.
        """
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        table = self.embed_tokens
        dtype: torch.dtype = (
            table.weight.dtype if isinstance(table, nn.Embedding) else table.dtype  # type: ignore[assignment]
        )
        return dtype

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., vocab_size), float32 (float64 for a float64 model)."""
        logits = self.head_logits(hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., vocab_size) in the head's dtype; `compute_logits` widens them."""
        head = self.lm_head if self.packed_head is None else self.packed_head
        if head is None:
            assert isinstance(self.embed_tokens, nn.Embedding)
            multiply = product if self.has_inference_bits else F.linear
            return multiply(hidden, self.embed_tokens.weight)
        logits: Tensor = head(hidden)
        return logits

    def pack_for_inference(self, *, is_int8: bool = False) -> None:
        """Replace the weights of all projections by the layout that this CPU reads fastest.

        The parameters of the projections are removed: the model can be neither trained nor saved
        afterwards. An embedding that is tied to the output head is looked up in the packed head, so
        that its weights are stored once. Where packing gains nothing (`nn.packed.can_pack`),
        nothing changes.

        Args:
            is_int8: True to store them as int8 with a scale for every 64 inputs, a tied embedding
                included; `nn.packed.quantisation_error` returns the error.

        Raises:
            ValueError: `is_int8` where a weight cannot be packed; the model is unchanged then.
        """
        if is_int8:
            self._check_int8()
        pack_linears(self, is_int8=is_int8)
        if any(isinstance(module, PackedLinear) for module in self.modules()):
            fuse_on_cpu(self)
            attend_as_steps(self)
        table = self.embed_tokens
        if self.lm_head is None and isinstance(table, nn.Embedding) and can_pack(table.weight):
            self.packed_head = PackedLinear(table.weight, is_int8=is_int8)
        if self.lm_head is None and isinstance(self.packed_head, PackedLinear):
            self.embed_tokens = PackedEmbedding(self.packed_head)

    def place_on_gpu(self) -> None:
        """Rearrange quantised weights, in place, into the order in which this GPU's kernels read
        them.

        They are no parameters afterwards. Decoders without quantised weights change nothing, as
        here.
        """

    def use_invariant_linears(self) -> None:
        """Compute all projections in tiles of one size, so that a row's bits do not depend on
        others.

        This is for inference on a GPU; on a CPU `pack_for_inference` does it. The parameters of the
        projections are removed: the model can be neither trained nor saved afterwards.
        """
        use_invariant_linears(self)
        table = self.embed_tokens
        if self.lm_head is None and isinstance(table, nn.Embedding):
            self.packed_head = InvariantLinear(table.weight)

    def use_inference_bits(self) -> None:
        """Make the differentiable forward pass return the bits of inference on the model's device.

        The log-probability of each token of a sequence is then, bit for bit, the one that a
        batch-invariant engine on this device returned for it, and can be differentiated; see
        `nn.same_bits` for the cost. The parameters are unchanged.

        Raises:
            UnsupportedError: an engine on a CPU would not pack the weights, or the model keeps
                latents.
        """
        table = self.embed_tokens
        is_tied = self.lm_head is None and isinstance(table, nn.Embedding)
        use_inference_bits(self, *((table.weight,) if is_tied else ()))
        self.has_inference_bits = True

    def _check_int8(self) -> None:
        """Raise ValueError, which names the weight, if a projection or a tied embedding cannot be
        packed as int8."""
        weights = {f"{n}.weight": m.weight for n, m in self.named_modules() if type(m) is nn.Linear}
        table = getattr(self, "embed_tokens", None)
        if self.lm_head is None and isinstance(table, nn.Embedding):
            weights["embed_tokens.weight"] = table.weight
        for name, weight in weights.items():
            reason = why_not_pack(weight)
            if reason is None and not weight.isfinite().all():
                reason = "it must be finite"
            if reason is not None:
                raise ValueError(f"weights must be such that int8 can hold them; {name}: {reason}")

    @torch.no_grad()
    def init_weights(self, *, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Fill the parameters for training: matrices from normal(0, std), norms with 1, biases with
        0.

        Projections onto the residual stream are drawn with std / sqrt(2 * layers), so that its
        variance does not grow with depth. Source: Radford et al., 2019 (GPT-2), section 2.3.
        """
        residual_std = std / math.sqrt(2 * self.config.num_layers)
        for name, parameter in self.named_parameters():
            if not parameter.is_floating_point():
                continue  # packed parameters are drawn by the module that owns them
            if parameter.dim() >= 2:
                is_residual = name.endswith(self.residual_projections)
                parameter.normal_(0.0, residual_std if is_residual else std, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
