"""A family of checkpoints: what its config.json means, and how its tensors are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilewise.models.decoder_config import DecoderConfig
from tilewise.models.weight_table import RowOrder, Weight

__all__ = ["LLAMA_NAMES", "Family", "Names"]

Sources = str | tuple[str, ...]


@dataclass(frozen=True)
class Names:
    """The checkpoint's names of a decoder's modules and parameters.

    Attributes:
        prefix: the beginning of the names that a checkpoint of the bare model omits.
        layer: the beginning of the names of a layer's tensors, with {} for its index.
        outer: the sources of what lies outside of the layers, by our names.
        inner: the sources of what lies in a layer, by our names, relative to `layer`. Several
            sources follow one another in the parameter's rows. A name is a module's, whose sources
            have .weight and .bias, or a parameter's.
        ignored: regular expressions of tensors that are no parameters.
        transposed: our modules whose weight is stored as (..., in, out).
        either: the modules in `transposed` whose weight some files store as (..., out, in), as the
            shapes tell.
        orders: the order of the rows of the first source, by our modules; see `RowOrder`.
        unit_dims: the dims of size 1, ascending, that the stored tensors of our parameters have
            besides.
        renames: regular expressions of tensors' names, and what stands for them in those here.
        whole: our parameters that some files store as one tensor, and its name there; its rows are
            those of the parameter.
        cut_anywhere: our parameters whose sources some files cut at other rows than most, as
            transformers does where it saves unequal parts of one tensor as equal ones.
    """

    prefix: str
    layer: str
    outer: Mapping[str, str]
    inner: Mapping[str, Sources]
    ignored: tuple[str, ...] = (r".*rotary_emb\..*inv_freq", r".*rotary_emb\.inv_freq")
    transposed: frozenset[str] = frozenset()
    either: frozenset[str] = frozenset()
    orders: Mapping[str, RowOrder] | None = None
    unit_dims: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    renames: tuple[tuple[str, str], ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    cut_anywhere: frozenset[str] = frozenset()

    def but(self, inner: Mapping[str, Sources] | None = None, **changes: Any) -> Names:
        """Return a copy with other sources for some of `inner`, and other values of further
        attributes."""
        return replace(self, inner={**self.inner, **(inner or {})}, **changes)

    @property
    def embedding(self) -> str:
        """The checkpoint's name of the embedding's tensor."""
        return f"{self.outer['embed_tokens']}.weight"

    def weight(
        self, name: str, rows: Callable[[int], tuple[int, ...]], most: int | None = None
    ) -> Weight:
        """Return the Weight of a parameter: its name, its sources in the checkpoint and their rows.

        Args:
            name: the name of a parameter, e.g. "layers.3.attention.qkv_proj.weight".
            rows: a function of the number of sources, which returns the rows of each.
            most: the number of sources that this layer has, the first ones; None for all.

        Raises:
            KeyError: the family has no such parameter.
        """
        place, rest = "", name
        table: Mapping[str, Sources] = self.outer
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            place, table = f"{self.layer.format(index)}.", self.inner
        module, _, kind = rest.rpartition(".")
        whole = table.get(rest)
        found, end = (table[module], f".{kind}") if whole is None else (whole, "")
        sources = tuple(f"{place}{source}{end}" for source in _each(found))[:most]
        return Weight(
            name,
            sources,
            rows(len(sources)) if len(sources) > 1 else None,
            transposed=(module in self.transposed and kind == "weight") or rest in self.transposed,
            order=(self.orders or {}).get(module),
            either=rest in self.either,
            unit_dims=self.unit_dims.get(rest, ()),
            is_cut_anywhere=rest in self.cut_anywhere,
            whole=f"{place}{self.whole[rest]}" if rest in self.whole else None,
        )


def _each(sources: Sources) -> Iterator[str]:
    yield from (sources,) if isinstance(sources, str) else sources


@dataclass(frozen=True)
class Family:
    """A kind of checkpoint: one class of Hugging Face's, how its config.json is read, and its
    tensors' names.

    Attributes:
        architecture, model_type: the name of the class, and the model_type in its config.json.
        own_fields: fields that other families refuse unless they ask for nothing, and `read` reads.
        other_types: further values of model_type that published files have.
        read: a function of the contents of config.json, which returns keyword arguments of
            `DecoderConfig`: sizes and layers.
        names: the names of tensors, or a function of a `DecoderConfig` that returns them.
        write: a function of a `DecoderConfig`, which returns the fields that `read` reads; None if
            such models are not written.
        harmless: fields of config.json that change nothing in this family, separated by spaces.
        formats: the quantised formats that are read, by their `quant_method`.
    """

    architecture: str
    model_type: str
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: Names | Callable[[DecoderConfig], Names]
    write: Callable[[DecoderConfig], dict[str, Any]] | None = None
    harmless: str = ""
    formats: tuple[str, ...] = ()
    other_types: tuple[str, ...] = ()
    own_fields: tuple[str, ...] = ()

    def names_of(self, config: DecoderConfig) -> Names:
        """Return the checkpoint's names of the tensors of a model of this family."""
        return self.names if isinstance(self.names, Names) else self.names(config)


LLAMA_NAMES = Names(
    prefix="model.",
    layer="model.layers.{}",
    outer={"embed_tokens": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"},
    inner={
        "attention_norm": "input_layernorm",
        "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.o_proj": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.up_proj": "mlp.up_proj",
        "mlp.down_proj": "mlp.down_proj",
    },
)
"""The names in a Llama, which most families have taken over."""
