"""One model as N shards: the heads, columns and rows of a rank, and how it reads only these.

q, k, v, gate and up   rows of the weight: a rank's heads, a rank's part of the intermediate size
o and down             columns of the weight; the ranks' outputs are summed (`RowParallel`)
embedding and head     rows: a rank's part of the vocabulary
experts                a rank's part of the intermediate size of every expert, and of the block that
                       all tokens use; the router is whole, and the mixture is summed once
layers with a state    a rank's heads of the recurrence (channels of a short convolution): rows of
                       their projections, channels of their convolution, columns of the last one
all else               whole on every rank

Experts are cut inside rather than dealt out: every rank then reads the same number of weights
whichever experts the tokens choose, needs no exchange of tokens, and sums as a dense block does.

Latent attention is cut at its heads: the up-projections of queries, keys and values by rows. The
down-projections, and so the cached latents, are whole on every rank.

A shard is a decoder of the same class with fewer heads and a smaller intermediate size. If there
are more ranks than key heads, consecutive ranks hold the same one. Source: Shoeybi et al. 2019
(Megatron-LM), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.distributed.shard_group import ShardGroup
from tilewise.models.adapters import Adapter, AdapterPart
from tilewise.models.config import ModelConfig, read_config
from tilewise.models.decoder import Decoder
from tilewise.models.layer_config import (
    AttentionConfig,
    FeedForwardConfig,
    LayerConfig,
    MixerConfig,
)
from tilewise.models.native import NativeLayer, for_device, rows_of_sources
from tilewise.models.registry import allocated, empty_model, read_checkpoint
from tilewise.models.weight_table import Part, Weight
from tilewise.models.weights import load_weights, narrow
from tilewise.nn.adapted import StepAdapters
from tilewise.nn.attention import Attention
from tilewise.nn.experts import Experts, ExpertsConfig
from tilewise.nn.gated_delta_net import GatedDeltaConfig
from tilewise.nn.gated_norm import GatedRMSNorm
from tilewise.nn.kimi_delta import KimiDeltaConfig
from tilewise.nn.layers import (
    GatedMLP,
    Parts,
    RankPart,
    RMSNorm,
    activate,
    project,
    project_in_parts,
)
from tilewise.nn.mamba2 import Mamba2, Mamba2Config
from tilewise.nn.short_conv import ShortConvConfig
from tilewise.nn.states import StateLayer
from tilewise.ops.mxfp4 import GROUP

__all__ = [
    "RowParallel",
    "SplitRMSNorm",
    "SummedExperts",
    "VocabularyEmbedding",
    "VocabularyHead",
    "check_shards",
    "head_of",
    "load_shard",
    "shard_adapter",
    "shard_config",
]

# A rank's rows of the vocabulary are a multiple of this, to be aligned for matrix products.
VOCABULARY_STEP = 64


def check_shards(config: ModelConfig, num_shards: int) -> None:
    """Raise ValueError unless `config`'s model can be cut into num_shards shards.

    Raises:
        ValueError: the number does not divide the heads, of attention or of a recurrence, or the
            intermediate size, or neither divides nor is a multiple of the key heads, or of the
            groups of Mamba-2; q and k have a norm over all heads that is no `RMSNorm`; experts read
            latents; or a layer shares keys or blocks, or has a scale, inputs or a second block.
    """
    if num_shards == 1:
        return
    if any(_is_of_its_own(layer) for layer in config.layers):
        raise ValueError(
            "tensor_parallel_size must be 1 for layers that share keys or blocks, or have a scale, "
            f"inputs or a second block of their own, got {num_shards}"
        )
    norms = [a.qk_norm for a in config.attentions if a.qk_norm_over == "heads"]
    for norm in norms:
        if norm is not None and not (norm.kind == "rms" and norm.has_weight):
            raise ValueError(
                "tensor_parallel_size must be 1 for norms over all heads of q and k that are no "
                f"RMS norms with a weight, got {num_shards}"
            )
    rule = "tensor_parallel_size must divide the model's"
    for layer in dict.fromkeys(config.layers):
        heads, block = layer.attention, layer.feed_forward
        sizes = {} if heads is None else {"num_q_heads": heads.num_q_heads}
        repeated = {} if heads is None else {"num_kv_heads": heads.num_kv_heads}
        if isinstance(block, ExpertsConfig):
            if block.latent_size:
                raise ValueError(
                    "tensor_parallel_size must be 1 for experts that read latents, got "
                    f"{num_shards}"
                )
            if block.shared_size:
                sizes["shared_size"] = block.shared_size
            if not _may_be_padded(block):
                sizes["intermediate_size of experts"] = block.intermediate_size
        elif block is not None:
            sizes["intermediate_size"] = block.intermediate_size
        if layer.mixer is not None:
            cut, shared = _sizes_of_mixer(layer.mixer)
            sizes, repeated = sizes | cut, repeated | shared
        for what, value in sizes.items():
            if value % num_shards:
                raise ValueError(f"{rule} {what} {value}, got {num_shards}")
        for what, value in repeated.items():
            if value % num_shards and num_shards % value:
                raise ValueError(f"{rule} {what} {value}, or be a multiple of it, got {num_shards}")


def _is_of_its_own(layer: LayerConfig) -> bool:
    """Return whether a layer has a scale, token inputs, a second block, shared blocks or shared
    keys, which cannot be divided among ranks."""
    has_more = layer.has_scale or layer.token_input_size > 0 or layer.experts is not None
    has_more = has_more or layer.shared is not None
    attention = layer.attention
    return has_more or (attention is not None and attention.kv_parts != 2)


def _sizes_of_mixer(mixer: MixerConfig) -> tuple[dict[str, int], dict[str, int]]:
    """Return the sizes that the number of ranks must divide, by name, and those that it may exceed.

    A size of the second kind may be smaller than the number of ranks: several ranks then hold the
    same part.
    """
    if isinstance(mixer, GatedDeltaConfig):
        return {
            "num_key_heads": mixer.num_key_heads,
            "num_value_heads": mixer.num_value_heads,
        }, {}
    if isinstance(mixer, KimiDeltaConfig):
        return {"heads of the recurrence": mixer.num_heads}, {}
    if isinstance(mixer, ShortConvConfig):
        return {"width of the convolution": mixer.width}, {}
    cut = {"heads of the recurrence": mixer.num_heads}
    if mixer.norm_groups > 1:
        cut["groups of the norm"] = mixer.norm_groups
    return cut, {"num_groups": mixer.num_groups}


def _rows_of_mixer(mixer: MixerConfig) -> dict[str, tuple[tuple[int, int, bool], ...]]:
    """Return, for each parameter of a mixer that is cut by rows, the parts that are stacked in it.

    A part is (number of heads, rows of a head, True if every rank holds all of them).
    """
    if isinstance(mixer, GatedDeltaConfig):
        keys = (mixer.num_key_heads, mixer.key_dim, False)
        values = (mixer.num_value_heads, mixer.value_dim, False)
        each = (mixer.num_value_heads, 1, False)
        return {
            "qkvz_proj": (keys, keys, values, values),
            "ba_proj": (each, each),
            "conv": (keys, keys, values),
            "a_log": (each,),
            "dt_bias": (each,),
        }
    if isinstance(mixer, KimiDeltaConfig):
        heads = (mixer.num_heads, mixer.head_dim, False)
        each, low = (mixer.num_heads, 1, False), (1, mixer.head_dim, True)
        return {
            "qkv_proj": (heads,) * 3,
            "a_proj": (each, low, low),
            "f_proj": (heads,),
            "z_proj": (heads,),
            "conv": (heads,) * 3,
            "a_log": (each,),
            "dt_bias": (heads,),
        }
    if isinstance(mixer, ShortConvConfig):
        channels = (mixer.width, 1, False)
        return {"in_proj": (channels,) * 3, "conv": (channels,), "conv_bias": (channels,)}
    heads, each = (mixer.num_heads, mixer.head_dim, False), (mixer.num_heads, 1, False)
    groups = (mixer.num_groups, mixer.state_dim, False)
    convolved = (heads, groups, groups)
    return {
        "in_proj": (heads, *convolved, each),
        "conv": convolved,
        "conv_bias": convolved,
        "a_log": (each,),
        "dt_bias": (each,),
        "d": (each,),
        "norm": (heads,),
    }


def _columns_of_mixer(mixer: MixerConfig) -> tuple[int, int]:
    """Return the number of heads that a mixer's output projection reads, and the columns of
    each."""
    if isinstance(mixer, GatedDeltaConfig):
        return mixer.num_value_heads, mixer.value_dim
    if isinstance(mixer, ShortConvConfig):
        return mixer.width, 1
    return mixer.num_heads, mixer.head_dim


def _spans(
    parts: Sequence[tuple[int, int, bool]], rank: int, num_shards: int
) -> tuple[tuple[int, int], ...]:
    """Return the ranges of rows that a rank holds of a tensor made of several parts.

    Args:
        parts: the parts in their order: the number of heads, the rows of a head, and whether every
            rank holds all of them.
        rank, num_shards: the rank and the number of ranks.
    """
    first, spans = 0, []
    for count, width, is_whole in parts:
        own = range(count) if is_whole else _heads_of(count, rank, num_shards)
        spans.append((first + own.start * width, first + own.stop * width))
        first += count * width
    return tuple(spans)


def _within(spans: Sequence[tuple[int, int]], first: int, end: int) -> tuple[tuple[int, int], ...]:
    """Return the parts of `spans` that lie within rows first ... end - 1, as ranges counted from
    `first`."""
    found = ((max(a, first) - first, min(b, end) - first) for a, b in spans)
    return tuple((a, b) for a, b in found if a < b)


def _shard_mixer(mixer: MixerConfig, num_shards: int) -> MixerConfig:
    """Return the config of the part of a mixer that each rank has: fewer heads, groups or
    channels."""
    if isinstance(mixer, GatedDeltaConfig):
        return replace(
            mixer,
            num_key_heads=mixer.num_key_heads // num_shards,
            num_value_heads=mixer.num_value_heads // num_shards,
        )
    if isinstance(mixer, KimiDeltaConfig):
        return replace(mixer, num_heads=mixer.num_heads // num_shards)
    if isinstance(mixer, ShortConvConfig):
        return replace(mixer, width=mixer.width // num_shards)
    return replace(
        mixer,
        num_heads=mixer.num_heads // num_shards,
        num_groups=max(mixer.num_groups // num_shards, 1),
        norm_groups=mixer.norm_groups and max(mixer.norm_groups // num_shards, 1),
    )


def shard_config(config: ModelConfig, num_shards: int, rank: int = 0) -> ModelConfig:
    """Return the configuration of one shard, the same for all ranks but for ALiBi's slopes.

    The vocab_size of the result is the number of rows of one rank, padded to a multiple of 64.

    Raises:
        ValueError: see `check_shards`.
    """
    check_shards(config, num_shards)
    return replace(
        config,
        layers=tuple(_shard_layer(layer, rank, num_shards) for layer in config.layers),
        vocab_size=_padded_rows(config.vocab_size, num_shards),
    )


def _shard_layer(layer: LayerConfig, rank: int, num_shards: int) -> LayerConfig:
    heads, block = layer.attention, layer.feed_forward
    if heads is not None:
        own = _heads_of(heads.num_q_heads, rank, num_shards)
        heads = replace(
            heads,
            num_q_heads=len(own),
            num_kv_heads=max(heads.num_kv_heads // num_shards, 1),
            alibi_slopes=heads.alibi_slopes[own.start : own.stop],
        )
    if isinstance(block, ExpertsConfig):
        inner, shared = _inner_size(block, num_shards), block.shared_size // num_shards
        block = replace(block, intermediate_size=inner, shared_size=shared)
    elif block is not None:
        block = replace(block, intermediate_size=_inner_size(block, num_shards))
    mixer = None if layer.mixer is None else _shard_mixer(layer.mixer, num_shards)
    return replace(layer, attention=heads, feed_forward=block, mixer=mixer)


def _may_be_padded(block: FeedForwardConfig | ExpertsConfig) -> bool:
    """Return whether ranks may have unequal parts of the intermediate size, filled up with zeros.

    MXFP4 is cut between groups. gpt-oss has 90 of them, which four or eight ranks do not divide.
    """
    return isinstance(block, ExpertsConfig) and block.is_packed and block.is_interleaved


def _inner_size(block: FeedForwardConfig | ExpertsConfig, num_shards: int) -> int:
    """Return the number of intermediate channels of a rank, padding included; MXFP4 is padded to
    whole groups."""
    step = GROUP if _may_be_padded(block) else 1
    return -(-block.intermediate_size // (num_shards * step)) * step


def _heads_of(count: int, rank: int, num_shards: int) -> range:
    """Return the range of a rank's heads among `count`; with fewer heads than ranks, several ranks
    have one head."""
    first = rank * count // num_shards  # rounded down for repeated key heads
    return range(first, first + max(count // num_shards, 1))


def _padded_rows(vocab_size: int, num_shards: int) -> int:
    return -(-vocab_size // (num_shards * VOCABULARY_STEP)) * VOCABULARY_STEP


def vocabulary_rows(vocab_size: int, rank: int, num_shards: int) -> tuple[int, int]:
    """Return the range of tokens (first, end) of which a rank has the rows; the last ranks may have
    fewer."""
    size = _padded_rows(vocab_size, num_shards)
    return min(rank * size, vocab_size), min((rank + 1) * size, vocab_size)


def load_shard(
    path: str | Path,
    group: ShardGroup,
    *,
    dtype: str | torch.dtype = "auto",
    random_weights: bool = False,
    is_int8: bool = False,
    read: Callable[[Decoder], None] | None = None,
    before: Callable[[Decoder], None] | None = None,
) -> Decoder:
    """Read one rank's shard of a checkpoint, packed for inference and connected to the other ranks.

    Only the rank's part of each tensor is read. All ranks call it.

    Args:
        path: the checkpoint, as `load_model` takes it.
        group: the ranks of the model.
        dtype: the dtype, as `load_model` takes it.
        random_weights: True to draw the weights, different ones on each rank except for tensors
            that are whole on all; config.json is then enough.
        is_int8: True for int8 weights, see `Decoder.pack_for_inference`.
        read: a function called with the shard before it is packed.
        before: a function called with the shard before memory is allocated, its parameters on
            "meta".

    Raises:
        CheckpointError: the checkpoint is incomplete or wrong.
        ValueError: see `check_shards`.
    """
    config = read_config(path) if random_weights else read_checkpoint(path)
    own = for_device(shard_config(config, group.size, group.rank), group.device)
    model = empty_model(own, dtype, "meta")
    cut = _Cut(config, group)
    if not random_weights:
        narrow(model, path, part=cut, holds_experts=group.device.type == "cuda")
    if before is not None:
        before(model)
    model = allocated(model, group.device)
    if random_weights:
        generator = torch.Generator(group.device).manual_seed(group.rank)
        model.init_weights(generator=generator)
        _share_whole(model, cut, group)
    else:
        _clear_padding(model)
        load_weights(model, path, part=cut)
    if group.rank > 0:
        _clear_biases(model)
    model = model.eval()
    if read is not None:
        read(model)
    model.pack_for_inference(is_int8=is_int8)
    if group.device.type == "cuda":
        model.place_on_gpu()
    _join(model, config, group)
    group.open_inbox(config.hidden_size, model.dtype, deals=_always_normalises(model))
    return model


def _always_normalises(model: Decoder) -> bool:
    """Return whether a norm follows every sum over ranks in the model's layers, so that it can add
    the parts."""
    layers: list[nn.Module] = list(getattr(model, "layers", []))
    blocks = [m for layer in layers for m in layer.modules() if _sums(m)]
    return bool(blocks) and all(getattr(block, "leaves_parts", False) for block in blocks)


def _sums(block: nn.Module) -> bool:
    if isinstance(block, SummedExperts):
        return True
    children = (getattr(block, name, None) for name in ("o_proj", "down_proj"))
    return any(isinstance(child, RowParallel) for child in children)


@torch.no_grad()
def _share_whole(model: Decoder, cut: _Cut, group: ShardGroup) -> None:
    """Copy rank 0's values of all parameters that are not cut into this rank's; all ranks call
    it."""
    if group.size == 1:
        return
    for weight in model.weight_table():
        if cut(weight, 0) is None:
            parameter = model.get_parameter(weight.name)
            parameter.copy_(group.stack(parameter.detach())[0])


@torch.no_grad()
def _clear_padding(model: Decoder) -> None:
    """Zero all parameters of embedding, head and experts before they are read: padding is not
    filled then."""
    for module in (model.embed_tokens, model.lm_head, *model.modules()):
        is_table = module is model.embed_tokens or module is model.lm_head
        if module is not None and (is_table or isinstance(module, Experts)):
            for parameter in module.parameters():
                parameter.zero_()


@torch.no_grad()
def _clear_biases(model: Decoder) -> None:
    """Zero the biases of the projections that are summed over ranks; called on all ranks but the
    first."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.bias", "down_proj.bias", "mlp.down_bias")):
            parameter.zero_()


class _Cut:
    """A function that tells which part of a checkpoint's tensors a rank reads: `part` of
    `load_weights`.

    It takes a Weight of the model and the index of one of the weight's sources, and returns the
    Part of that source; None for all of it.

    Args:
        config: the configuration of the whole model.
        group: the ranks, of which this one reads.
    """

    def __init__(self, config: ModelConfig, group: ShardGroup) -> None:
        self.config, self.rank, self.size = config, group.rank, group.size
        experts = for_device(config, group.device).experts
        self.holds_packed = experts is not None and experts.is_packed

    def __call__(self, weight: Weight, place: int) -> Part | None:
        """Return the part that the rank reads of source number `place` of a parameter; None for all
        of it.

        A Part has the cut dim, its whole size, and the ranges that the rank reads.
        """
        module, kind = weight.name.rsplit(".", 1)
        name = module.rsplit(".", 1)[-1]
        if module in ("embed_tokens", "lm_head"):
            vocab = self.config.vocab_size
            return Part(0, vocab, (vocabulary_rows(vocab, self.rank, self.size),))
        if not module.startswith("layers."):
            return None
        layer = self.config.layers[weight.layer]
        if ".mixer." in weight.name:
            assert layer.mixer is not None
            return self._of_mixer(weight, place, layer)
        heads, block = layer.attention, layer.feed_forward
        if ".mlp." in weight.name:
            assert block is not None
            return self._of_block(weight, name, kind, block)
        return None if heads is None else self._of_heads(weight, place, name, kind, heads)

    def _of_mixer(self, weight: Weight, place: int, layer: LayerConfig) -> Part | None:
        """Return the part to read of source number `place` of a mixer's parameter; None for all of
        it."""
        mixer, parameter = layer.mixer, weight.name.partition(".mixer.")[2]
        assert mixer is not None
        own = parameter.partition(".")[0]
        if parameter == "o_proj.weight":
            return self._rows(1, *_columns_of_mixer(mixer))
        parts = _rows_of_mixer(mixer).get(own)
        if parts is None:
            return None
        total = sum(count * width for count, width, _ in parts)
        if weight.order is not None and place == 0:
            assert isinstance(mixer, GatedDeltaConfig)
            keys, values = map(self._heads, (mixer.num_key_heads, mixer.num_value_heads))
            return Part(0, total, weight.order(mixer, keys, values))
        rows = rows_of_sources(layer, weight.name, (total,))(len(weight.sources))
        if weight.is_cut_anywhere and weight.rows is not None and sum(weight.rows) == total:
            rows = weight.rows  # those of the files
        first, end = sum(rows[:place]), sum(rows[: place + 1])
        dim = 0
        for unit in weight.unit_dims:
            dim += unit <= dim
        return Part(dim, end - first, _within(_spans(parts, self.rank, self.size), first, end))

    def _of_block(
        self, weight: Weight, name: str, kind: str, block: FeedForwardConfig | ExpertsConfig
    ) -> Part | None:
        """Return the part to read of a source of a feed-forward block or a mixture of experts; None
        for all.

        `name` is that of the module, `kind` that of the parameter.
        """
        inner = block.intermediate_size
        if isinstance(block, ExpertsConfig):
            if kind in ("up", "up_scale", "up_bias", "down", "down_scale"):
                return self._of_experts(block, kind, len(weight.sources))
            inner = block.shared_size
        if name == "gate_up_proj" and len(weight.sources) == 1:
            span = self._heads(inner)
            halves = tuple((f + span.start, f + span.stop) for f in (0, inner))
            return Part(0, 2 * inner, halves)
        if name in ("gate_up_proj", "up_proj"):
            return self._rows(0, inner, 1)
        if kind == "weight" and name == "down_proj":
            return self._rows(1, inner, 1)
        return None

    def _of_heads(
        self, weight: Weight, place: int, name: str, kind: str, heads: AttentionConfig
    ) -> Part | None:
        """Return the part to read of source number `place` of an attention parameter; None for all
        of it.

        `name` is that of the module, `kind` that of the parameter.
        """
        latent, dim = heads.latent, heads.head_dim
        q, kv = self._heads(heads.num_q_heads), self._heads(heads.num_kv_heads)
        if name == "qkv_proj":
            if heads.has_gate and place == 0:
                assert weight.order is not None
                return Part(0, 2 * heads.num_q_heads * dim, weight.order(heads, q, kv))
            spans = tuple((part.start * dim, part.stop * dim) for part in (q, kv, kv))
            sizes = [n * dim for n in (heads.num_q_heads, *(heads.num_kv_heads,) * 2)]
            if len(weight.sources) > 1:
                return Part(0, sizes[place], (spans[place],))
            if weight.order is not None:
                return Part(0, sum(sizes), weight.order(heads, q, kv))
            firsts = (0, sizes[0], sizes[0] + sizes[1])
            spans = tuple((f + a, f + b) for f, (a, b) in zip(firsts, spans, strict=True))
            return Part(0, sum(sizes), spans)
        if name == "q_b_proj":
            return self._rows(0, heads.num_q_heads, dim)
        if name == "kv_b_proj" and latent is not None:
            return self._rows(0, heads.num_q_heads, latent.nope_dim + latent.v_head_dim)
        if name in ("q_norm", "k_norm") and heads.qk_norm_over == "heads":
            return self._rows(0, heads.num_q_heads if name == "q_norm" else heads.num_kv_heads, dim)
        if kind == "sinks":
            return self._rows(0, heads.num_q_heads, 1)
        if kind == "weight" and name == "o_proj":
            return self._rows(1, heads.num_q_heads, heads.v_head_dim or dim)
        return None

    def _of_experts(self, block: ExpertsConfig, kind: str, num_sources: int) -> Part:
        """Return the rank's part of a parameter of all experts, or of one expert's tensor."""
        inner, share = block.intermediate_size, _inner_size(block, self.size)
        first, end = (min(share * place, inner) for place in (self.rank, self.rank + 1))
        if kind.startswith("down"):
            if num_sources > 1:
                return Part(1, inner, ((first, end),))
            if self.holds_packed:  # columns are groups
                inner, first, end = (n // GROUP for n in (inner, first, end))
            return Part(2, inner, ((first, end),))
        if num_sources > 1:  # the gate of an expert, or its factor
            return Part(0, inner, ((first, end),))
        if block.is_interleaved:
            return Part(1, 2 * inner, ((2 * first, 2 * end),))
        return Part(1, 2 * inner, ((first, end), (inner + first, inner + end)))

    def _rows(self, dim: int, count: int, width: int) -> Part:
        """Return this rank's Part along `dim` of `count` heads of `width` rows or columns each."""
        part = self._heads(count)
        return Part(dim, count * width, ((part.start * width, part.stop * width),))

    def _heads(self, count: int) -> range:
        return _heads_of(count, self.rank, self.size)


def shard_adapter(adapter: Adapter, config: ModelConfig, rank: int, num_shards: int) -> Adapter:
    """Return a rank's part of an adapter of the whole model, cut as the rank's layers are.

    Of a projection with cut outputs a rank has all of A and its rows of B. Of one with cut inputs
    it has its columns of A and all of B; its term is then summed over ranks with the products.
    """
    parts = {}
    for module, whole in adapter.parts.items():
        layer = config.layers[int(module.split(".")[1])]
        rows, columns = _own_rows(module, layer, rank, num_shards)
        parts[module] = tuple(_part_of(part, rows, columns) for part in whole)
    return Adapter(parts, adapter.rank)


def _own_rows(
    module: str, layer: LayerConfig, rank: int, num_shards: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the indices of the rows and of the columns of a projection that a rank has; None for
    all.

    Args:
        module: the path of the projection in the model.
        layer: the config of its layer in the whole model.
        rank, num_shards: the rank and the number of ranks.
    """

    def own(*parts: tuple[int, int]) -> Tensor:
        spans = _spans([(*part, False) for part in parts], rank, num_shards)
        return torch.cat([torch.arange(first, end) for first, end in spans])

    name, heads, block = module.rpartition(".")[2], layer.attention, layer.feed_forward
    if ".mixer." in module:
        assert layer.mixer is not None
        if name == "o_proj":
            return None, own(_columns_of_mixer(layer.mixer))
        rows = _spans(_rows_of_mixer(layer.mixer)[name], rank, num_shards)
        return torch.cat([torch.arange(first, end) for first, end in rows]), None
    if ".mlp." in module:
        assert block is not None
        inner = (block.intermediate_size, 1)
        if name == "gate_up_proj":
            return own(inner, inner), None
        return (own(inner), None) if name == "up_proj" else (None, own(inner))
    assert heads is not None
    q, kv = (heads.num_q_heads, heads.head_dim), (heads.num_kv_heads, heads.head_dim)
    if name == "qkv_proj":
        return own(*[q] * (1 + heads.has_gate), kv, kv), None
    if name == "q_b_proj":
        return own(q), None
    if name == "o_proj":
        return None, own((heads.num_q_heads, heads.v_head_dim or heads.head_dim))
    return None, None


def _part_of(part: AdapterPart, rows: Tensor | None, columns: Tensor | None) -> AdapterPart:
    if columns is not None:
        return part._replace(a=part.a[:, columns].contiguous())
    if rows is None:
        return part
    is_own = (rows >= part.first) & (rows < part.first + len(part.b))
    first = int(is_own.nonzero()[0])  # the rows of a part stay one after another
    return part._replace(first=first, b=part.b[rows[is_own] - part.first].contiguous())


def _join(model: Decoder, config: ModelConfig, group: ShardGroup) -> None:
    """Connect a shard to the other ranks, in place: replace modules by ones with collectives.

    Output projections become `RowParallel`, experts `SummedExperts`, cut norms split ones, the
    embedding and the head `VocabularyEmbedding` and `VocabularyHead`.
    """
    modules = list(model.modules())
    shared = {id(module.shared) for module in modules if isinstance(module, Experts)}
    for module in modules:
        for name in ("o_proj", "down_proj"):
            child = getattr(module, name, None)
            if isinstance(child, nn.Module) and id(module) not in shared:
                setattr(module, name, RowParallel(child, group))
        if isinstance(module, NativeLayer) and not isinstance(module.mlp_norm, RMSNorm):
            for block in (module.attention, module.mixer, module.mlp):
                if isinstance(block, Attention | StateLayer | GatedMLP):
                    block.leaves_parts = False  # other norms do not add up over ranks
        if isinstance(module, NativeLayer) and isinstance(module.mlp, Experts):
            leaves_parts = bool(getattr(module.attention, "leaves_parts", False))
            module.mlp = SummedExperts(module.mlp, group, leaves_parts)  # type: ignore[assignment]
        if isinstance(module, Mamba2) and module.norm is not None and _norm_is_cut(config):
            module.norm = SplitGatedRMSNorm(module.norm, group)  # type: ignore[assignment]
        if isinstance(module, Attention) and module.norms_all_heads:
            module.q_norm, module.k_norm = (
                _norm_of_all_ranks(norm, group) for norm in (module.q_norm, module.k_norm)
            )
    head = model.packed_head or model.lm_head
    if head is None:
        head = nn.Linear(1, 1, bias=False, device="meta")
        head.weight = model.embed_tokens.weight  # type: ignore[assignment]
    model.packed_head = VocabularyHead(head, config.vocab_size, group)
    model.lm_head = None
    model.embed_tokens = VocabularyEmbedding(
        model.embed_tokens, vocabulary_rows(config.vocab_size, group.rank, group.size), group
    )


class RowParallel(nn.Module):
    """A projection whose inputs are cut: each rank multiplies its part, and the results are summed.

    Only the first rank has a bias that is not zero.
    """

    def __init__(self, linear: nn.Module, group: ShardGroup) -> None:
        super().__init__()
        self.linear, self.group = linear, group

    def forward(self, x: Tensor, adapters: StepAdapters | None = None) -> Tensor:
        """Map x (..., in / N) to (..., out), the same on every rank."""
        return self.group.sum(project(self.linear, x, adapters))

    def leave_sum(self, x: Tensor, adapters: StepAdapters | None = None) -> RankPart | None:
        """Return this rank's part of `forward`, for `RMSNorm.add` to sum; None if inboxes cannot
        add such rows.

        All ranks get None or all a part, since that depends on the number of rows and the model
        alone.
        """
        if not self.group.adds_rows(x.numel() // x.shape[-1], x.dtype):
            return None
        product = project_in_parts(self.linear, x, adapters)
        if isinstance(product, Parts):
            return RankPart(product.sums, len(product.sums), self.group)
        assert isinstance(product, Tensor)  # the linear is this rank's part
        return RankPart(product, 0, self.group)


class SummedExperts(nn.Module):
    """A mixture of experts whose intermediate sizes are cut: the ranks' results are summed.

    Args:
        experts: the mixture with this rank's part of each expert and of the block that all tokens
            use.
        group: the ranks with the other parts.
        leaves_parts: True if the norm right behind it may sum the parts, see `RankPart`.
    """

    def __init__(self, experts: Experts, group: ShardGroup, leaves_parts: bool) -> None:
        super().__init__()
        self.experts, self.group, self.leaves_parts = experts, group, leaves_parts

    def forward(self, x: Tensor) -> Tensor | RankPart:
        """Map x (..., E) to (..., E), the same on every rank, or to a RankPart for the next norm to
        sum."""
        y: Tensor = self.experts(x)
        if self.leaves_parts and self.group.adds_rows(y.numel() // y.shape[-1], y.dtype):
            return RankPart(y, 0, self.group)
        return self.group.sum(y)


class SplitRMSNorm(nn.Module):
    """RMSNorm whose channels are split evenly over ranks: squares are summed over the group.

    Args:
        norm: the norm with this rank's part of the weight, and the eps.
        group: the ranks that together have all channels. Where key heads are repeated on several
            ranks, each channel must be there equally often, so that the mean stays the same.
    """

    def __init__(self, norm: RMSNorm, group: ShardGroup) -> None:
        super().__init__()
        self.weight, self.eps, self.group = norm.weight, norm.eps, group

    def forward(self, x: Tensor) -> Tensor:
        """Return the rank's channels x (..., dim / N), normalised by the mean square over all
        ranks' channels."""
        wide = x if x.dtype == torch.float64 else x.float()
        squares = self.group.sum(wide.square().sum(-1, keepdim=True))
        mean = squares / (x.shape[-1] * self.group.size)
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight


class SplitGatedRMSNorm(nn.Module):
    """`GatedRMSNorm` of one group of channels, of which each rank has equally many.

    Args:
        norm: the norm with the weight of the rank's channels.
        group: the ranks with the other channels.
    """

    def __init__(self, norm: GatedRMSNorm, group: ShardGroup) -> None:
        super().__init__()
        self.norm, self.group = norm, group

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the rank's channels x (..., dim / N) normalised over all ranks' channels, and
        gated.

        `gate` has the shape of x; so has the result.
        """
        norm, wide = self.norm, x if x.dtype == torch.float64 else x.float()
        factor = activate(norm.function, gate.to(wide.dtype), on_cpu=True)
        if norm.gate_first:
            wide = wide * factor
        squares = self.group.sum(wide.square().sum(-1, keepdim=True))
        mean = squares / (x.shape[-1] * self.group.size)
        y = wide * torch.rsqrt(mean + norm.eps)
        y = (y.to(x.dtype) if norm.rounds_first else y) * norm.weight
        return (y if norm.gate_first else y * factor).to(x.dtype)


def _norm_is_cut(config: ModelConfig) -> bool:
    """Whether the norm after a Mamba-2 mixer averages over the channels of all ranks.

    True if a layer has a Mamba-2 mixer and all channels are one group of its norm: each rank has a
    part of these channels. False for several groups, for no norm, and without Mamba-2.
    """
    mixers = (layer.mixer for layer in config.layers)
    return any(isinstance(mixer, Mamba2Config) and mixer.norm_groups == 1 for mixer in mixers)


def _norm_of_all_ranks(norm: nn.Module | None, group: ShardGroup) -> SplitRMSNorm:
    assert isinstance(norm, RMSNorm)  # `check_shards` refuses all others
    return SplitRMSNorm(norm, group)


class VocabularyEmbedding(nn.Module):
    """An embedding whose rows are split over the ranks.

    Each rank looks up the tokens it has, takes zeros for the others, and the ranks add the results.

    Args:
        table: the rank's rows, the first of them for token rows[0].
        rows: the range of tokens that this rank has, the last not included.
        group: the ranks with the other rows.
    """

    def __init__(self, table: nn.Module, rows: tuple[int, int], group: ShardGroup) -> None:
        super().__init__()
        self.table, self.rows, self.group = table, rows, group

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embeddings."""
        return _dtype_of(self.table)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids (...,) to (..., E), the same on every rank."""
        first, end = self.rows
        table = self.table.weight if isinstance(self.table, nn.Embedding) else None
        if table is not None and self.group.adds_rows(ids.numel(), table.dtype):
            return self.group.embed(table, ids, self.rows)
        is_ours = (ids >= first) & (ids < end)
        x = self.table(torch.where(is_ours, ids - first, 0))
        return self.group.sum(x.masked_fill(~is_ours.unsqueeze(-1), 0))


def _dtype_of(table: nn.Module) -> torch.dtype:
    found = table.weight if isinstance(table, nn.Embedding) else table
    dtype: torch.dtype = found.dtype  # type: ignore[assignment]
    return dtype


class VocabularyHead(nn.Module):
    """The output head, whose rows are cut; the ranks' logits are concatenated.

    Args:
        linear: the rank's rows, with padding after the last rank's.
        vocab_size: the vocabulary of the whole model.
        group: the ranks with the other rows.

    Attributes:
        width: the rows of every rank, padding included.
        is_whole: True to return the logits of the whole vocabulary; False for the rank's own, for
            `most_likely` and for sampling from shares.
    """

    def __init__(self, linear: nn.Module, vocab_size: int, group: ShardGroup) -> None:
        super().__init__()
        self.linear, self.vocab_size, self.group = linear, vocab_size, group
        self.first, self.end = vocabulary_rows(vocab_size, group.rank, group.size)
        self.width = _padded_rows(vocab_size, group.size)
        self.is_whole = True

    def forward(self, hidden: Tensor) -> Tensor:
        """Map hidden states (R, E) to the logits of all tokens (R, vocab_size), or, without
        `is_whole`, of the rank's own tokens (R, n)."""
        logits = self._padded(hidden)
        if not self.is_whole:
            return logits[..., : self.end - self.first]
        return self.group.concatenate(logits)[..., : self.vocab_size].contiguous()

    def _padded(self, hidden: Tensor) -> Tensor:
        if type(self.linear) is nn.Linear:
            return F.linear(hidden, self.linear.weight, self.linear.bias)
        logits: Tensor = self.linear(hidden)
        return logits

    def greedy(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the most likely token of each row, int64 (R,), and whether its logit is finite,
        bool (R,).

        All ranks call it with the same hidden states (R, E). A row with a NaN is not finite.
        """
        best, tokens = self.most_likely(self._padded(hidden)[..., : self.end - self.first])
        return tokens, best.isfinite()

    def whole(self, logits: Tensor) -> Tensor:
        """Return the logits (R, vocab_size) of all tokens, given each rank's own (R, n); all ranks
        call it."""
        missing = self.width - logits.shape[1]
        padded = F.pad(logits, (0, missing)) if missing else logits
        return self.group.concatenate(padded)[..., : self.vocab_size].contiguous()

    def most_likely(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest logit of each row over all ranks and the first token that has it.

        Only a pair of numbers for each row and rank is sent.

        Args:
            logits: (R, n) float32, the rank's own.

        Returns:
            float64 (R,), NaN where a logit of the row is; int64 (R,).
        """
        rows = logits.shape[0]
        pair = torch.full((rows, 2), -torch.inf, dtype=torch.float64, device=logits.device)
        pair[:, 1] = self.vocab_size
        if logits.shape[1]:
            best, ids = logits.max(dim=-1)  # NaN when the row has one
            ids = (logits == best.unsqueeze(-1)).to(torch.uint8).argmax(dim=-1)  # the first of them
            pair[:, 0], pair[:, 1] = best, ids + self.first
        values, tokens = self.group.stack(pair).unbind(-1)  # (N, R) each
        best = values.amax(dim=0)
        first = torch.where(values == best, tokens, torch.inf).amin(dim=0)
        return best, first.nan_to_num(posinf=0).to(torch.int64)


def head_of(model: Decoder) -> VocabularyHead:
    """Return the head of a model that `load_shard` has made."""
    head = model.packed_head
    assert isinstance(head, VocabularyHead)
    return head
