"""The head of a checkpoint that guesses the token after the next one (multi-token prediction).

h' = layer(eh_proj([enorm(embedding(t[p + 1])), hnorm(h[p])])), and norm(h') through the output head
gives the logits of t[p + 2]. The layer is one more like the model's last one with attention, with
keys of its own; the embedding and the output head are the model's. Sources: DeepSeek-AI, 2024,
"DeepSeek-V3 technical report", section 2.2; Qwen team, 2025, "Qwen3-Next".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from tilewise.cache.spec import CacheLayer
from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.families import FAMILIES
from tilewise.models.native import NativeLayer, for_device, new_norm, rows_of_sources
from tilewise.models.weight_table import Weight
from tilewise.models.weights import load_weights
from tilewise.nn.attention import attend_as_steps
from tilewise.nn.context import AttentionContext
from tilewise.nn.experts import Experts
from tilewise.nn.layers import project
from tilewise.nn.mla import MultiheadLatentAttention
from tilewise.nn.packed import pack_linears
from tilewise.nn.rope import RotaryEmbedding

__all__ = ["MultiTokenHead", "load_multi_token_head"]


@dataclass(frozen=True)
class HeadNames:
    """The checkpoint's names of a head's tensors.

    Attributes:
        own: the tensors of parameters outside of the layer, with {} for the number of the model's
            layers.
        layer: the beginning of the names of the layer's tensors, also with {} for that number.
        ignored: regular expressions of tensors that may be in the file besides.
    """

    own: Mapping[str, str]
    layer: str
    ignored: tuple[str, ...] = (".*",)


_DEEPSEEK = HeadNames(
    {
        "enorm.weight": "model.layers.{}.enorm.weight",
        "hnorm.weight": "model.layers.{}.hnorm.weight",
        "eh_proj.weight": "model.layers.{}.eh_proj.weight",
        "norm.weight": "model.layers.{}.shared_head.norm.weight",
    },
    "model.layers.{}",
)
_QWEN = HeadNames(
    {
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "norm.weight": "mtp.norm.weight",
    },
    "mtp.layers.0",
    (r"(?!mtp\.embed_tokens\.).*",),  # an embedding of the head's own is not read
)
HEADS = {
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Glm4MoeForCausalLM": _DEEPSEEK,
    "Glm4MoeLiteForCausalLM": _DEEPSEEK,
    "Qwen3NextForCausalLM": _QWEN,
    "Qwen3_5ForCausalLM": _QWEN,
    "Qwen3_5MoeForCausalLM": _QWEN,
}
"""The names of the heads that are read, by the architecture of the model."""


class MultiTokenHead(Decoder):
    """One layer behind a model, which maps hidden states and next tokens to hidden states.

    Args:
        config: the configuration of the model.

    Attributes:
        previous: (T, E), the hidden states of the rows that `forward` computes next.
    """

    previous: Tensor

    def __init__(self, config: ModelConfig) -> None:
        last = next(layer for layer in reversed(config.layers) if layer.attention is not None)
        super().__init__(replace(config, layers=(last,), tie_word_embeddings=True))
        del self.embed_tokens  # the model's, see `share`
        width, rope = config.hidden_size, config.attentions[-1].rope
        self._place, head = config.num_layers, HEADS[config.architecture]
        names = FAMILIES[config.architecture].names_of(config)
        self.names, self._own = names.but(layer=head.layer), head.own
        self.ignored_weights = head.ignored  # the model's own tensors
        self.weight_prefix, self.weight_renames = names.prefix, names.renames
        self.enorm, self.hnorm = new_norm(config.norm, width), new_norm(config.norm, width)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.rotary = None if rope is None else RotaryEmbedding(rope)
        self.layers = nn.ModuleList([NativeLayer(self.config, 0)])
        self.norm = new_norm(config.norm, width)

    def share(self, model: Decoder) -> None:
        """Use the embedding and the output head of `model`, which forward() and logits need."""
        self.embed_tokens = model.embed_tokens
        self.lm_head, self.packed_head = model.lm_head, model.packed_head

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        *,
        ctx: AttentionContext | None = None,
        kv: Sequence[CacheLayer] | None = None,
    ) -> Tensor:
        """Return normalised hidden states (T, E) of packed rows, one for each row of `previous`.

        The caller first sets the attribute `previous`, (T, E): the hidden states of T tokens.

        Args:
            ids: (T,), the token that follows each token of `previous`.
            positions: (T,), the positions of the tokens of `previous`; must be given.
            ctx: the AttentionContext, which says to which sequences the rows belong; must be given.
            kv: the cache of the head's only layer, as a sequence of one; must be given.
        """
        assert positions is not None
        assert ctx is not None
        assert kv is not None
        rope = None if self.rotary is None else self.rotary(positions)
        both = (self.enorm(self.embed_tokens(ids)), self.hnorm(self.previous))
        x = project(self.eh_proj, torch.cat(both, dim=-1))
        x, residual = self.layers[0](x, None, rope, ctx.of_layer(0), kv[0])
        y: Tensor = self.norm.add(x, residual)[0]
        return y

    def weight_table(self) -> tuple[Weight, ...]:
        """Return for each parameter its tensors in a Hugging Face checkpoint."""
        return tuple(self._weight(name, p) for name, p in self.named_parameters())

    def _weight(self, name: str, parameter: Tensor) -> Weight:
        if name in self._own:
            return Weight.of(name, self._own[name].format(self._place))
        rows = rows_of_sources(self.config.layers[0], name, tuple(parameter.shape))
        there = self.names.weight(f"layers.{self._place}.{name.removeprefix('layers.0.')}", rows)
        return replace(there, name=name)


def load_multi_token_head(
    directory: str | Path,
    model: Decoder,
    config: ModelConfig,
    *,
    random_weights: bool = False,
) -> MultiTokenHead:
    """Load the first head of a checkpoint, packed for inference like the model.

    Args:
        directory: the directory of the checkpoint.
        model: the model of the checkpoint, packed, whose embedding and output head the head uses.
        config: the configuration of the model.
        random_weights: True to draw the weights instead of reading them.

    Raises:
        CheckpointError: the checkpoint has no such head, or one of another shape.
        ValueError: the family has none.
    """
    if config.architecture not in HEADS:
        raise ValueError(
            f"speculative must be PromptLookup, DraftModel or None for {config.architecture}, "
            "of which no head that guesses is read, got OwnHead"
        )
    device = next(iter(model.parameters()), next(iter(model.buffers()), None))
    place = torch.device("cpu") if device is None else device.device
    with torch.device("meta"):
        head = MultiTokenHead(for_device(config, place))
    head.to(model.dtype).to_empty(device=place)
    if random_weights:
        head.init_weights(generator=torch.Generator(place).manual_seed(1))
    else:
        load_weights(head, directory)
    head.eval().requires_grad_(False)
    for module in list(head.modules()):
        if isinstance(module, Experts):
            module.pack_for_inference()
        if isinstance(module, MultiheadLatentAttention):
            module.pack_up_projections()
    pack_linears(head)
    attend_as_steps(head)
    head.share(model)
    return head
