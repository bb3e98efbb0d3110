"""Read and write the rotary settings of a config.json, in all their spellings."""

from __future__ import annotations

from typing import Any

from tilewise.errors import CheckpointError, shown
from tilewise.models.config_fields import (
    MOST,
    Json,
    UnknownModelError,
    count_or,
    flag,
    number,
    object_of,
)
from tilewise.models.unread_fields import tell_unread
from tilewise.nn.rope import ROPE_TYPES, RopeConfig

__all__ = ["read_gemma_rope", "read_rope", "write_rope"]

_ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_ROPE_OPTIONS = (
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
)


_KNOWN = frozenset(
    (
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
        "short_factor",
        "long_factor",  # of texts that are refused
        *_ROPE_OPTIONS,
    )
)


def read_rope(
    config: Json,
    head_dim: int,
    positions: int,
    *,
    theta: float = 10_000.0,
    absent: Json | None = None,
    interleaved: bool = False,
    part: float | None = None,
) -> RopeConfig:
    """Return the rotary settings of a model that has the same for all layers.

    Args:
        config: the config.json of a model with one rule for all of its layers.
        head_dim: the number of channels that are rotated.
        positions: max_position_embeddings of the model.
        theta: the default of rope_theta.
        absent: the settings of a file without any; None for the unscaled default.
        interleaved: True if the family pairs channels as (2i, 2i + 1).
        part: the default of partial_rotary_factor of a family that rotates the first channels of a
            head alone; None for one that rotates all.

    Raises:
        CheckpointError: a setting is wrong, or two of them differ; UnknownModelError for an unknown
            rope_type.
    """
    # Read every field, so that one overruled by another is not reported as unknown.
    outer = config.get("original_max_position_embeddings")
    partial = number(config, "partial_rotary_factor", 1.0 if part is None else part)
    settings = _settings(config, theta) or dict(absent or {})
    inner = settings.get("original_max_position_embeddings")
    if outer not in (None, inner) and _kind(settings) in ("llama3", "yarn"):
        # transformers reads the inner field only, vLLM the outer one.
        raise CheckpointError(
            "original_max_position_embeddings must be that of the rotary settings, which have "
            f"{shown(inner)}, got {shown(outer)}"
        )
    settings.setdefault("rope_theta", number(config, "rope_theta", theta))
    if _kind(settings) == "proportional":  # of Gemma 4 alone
        known = ", ".join(name for name in ROPE_TYPES if name != "proportional")
        raise UnknownModelError(f"rope_type must be one of {known}, got 'proportional'")
    if settings.get("partial_rotary_factor") is None:
        settings["partial_rotary_factor"] = partial
    if part is not None:
        head_dim = int(head_dim * _share(settings, part))
        settings["partial_rotary_factor"] = None
    return _made(settings, head_dim, positions, interleaved=interleaved)


def read_gemma_rope(
    config: Json, head_dim: int, positions: int, kind: str, base: str, theta: float
) -> RopeConfig:
    """Return the rotary settings of one kind of Gemma's layers.

    Newer files have them in rope_parameters, by kind. In older ones the field `base` is rope_theta,
    and rope_scaling is only for "full_attention".

    Args:
        config: the fields of config.json.
        head_dim: the channels of a head.
        positions: the positions of the model's context.
        kind: the kind of layer, "full_attention" or "sliding_attention".
        base: the name of the field in older files.
        theta: the value of rope_theta if neither kind of file has one.
    """
    parameters, scaling = object_of(config, "rope_parameters"), object_of(config, "rope_scaling")
    kinds = ("full_attention", "sliding_attention")
    if any(name not in kinds for name in parameters):
        raise CheckpointError(
            f"rope_parameters must be objects by layer type ({', '.join(kinds)}), "
            f"got {shown(dict(parameters))}"
        )
    settings = dict(object_of(parameters, kind))
    if kind == "full_attention":
        settings.update(scaling)
    settings.setdefault("rope_theta", number(config, base, theta))
    return _made(settings, head_dim, positions, are_stretched=True)


def _share(settings: Json, default: float) -> float:
    """Return the part of a head's channels that is rotated, in [0, 1]; else raise
    CheckpointError."""
    share = number(settings, "partial_rotary_factor", default)
    if not 0 <= share <= 1:
        raise CheckpointError(f"partial_rotary_factor must lie in [0, 1], got {share:g}")
    return share


def _settings(config: Json, theta: float) -> dict[str, Any]:
    """Return the rotary settings of a config.json, {} when there are none.

    rope_scaling of older files counts for more than rope_parameters. transformers does the same:
    users who follow a model card add rope_scaling to a newer file.

    Raises:
        CheckpointError: this would lose a rope_theta that only rope_parameters has.
    """
    parameters = _one_of("rope_parameters", object_of(config, "rope_parameters"))
    scaling = _one_of("rope_scaling", object_of(config, "rope_scaling"))
    outer = config.get("rope_theta")
    if not scaling:
        return parameters
    lost = parameters.get("rope_theta")
    if lost not in (None, theta) and outer is None and scaling.get("rope_theta") is None:
        raise CheckpointError(
            f"rope_scaling must hold rope_theta (it takes the place of rope_parameters, where that "
            f"is {shown(lost)}), or be written into rope_parameters, got none"
        )
    return scaling


def _one_of(name: str, settings: Json) -> dict[str, Any]:
    """Return the rotary settings in a field as those of all layers.

    Settings by layer type are accepted if all types have the same.

    Raises:
        CheckpointError: the types differ, or only some entries are settings of a type.
    """
    by_type = [value for value in settings.values() if isinstance(value, dict)]
    if not by_type:
        return dict(settings)
    if len(by_type) < len(settings):
        raise CheckpointError(
            f"{name} must be settings, or objects of them by layer type, got {dict(settings)}"
        )
    if any(value != by_type[0] for value in by_type):
        raise CheckpointError(f"{name} must be the same for all layer types, got {dict(settings)}")
    return dict(by_type[0])


def _kind(settings: Json) -> str:
    kind = settings.get("rope_type")
    kind = settings.get("type") if kind is None else kind
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise UnknownModelError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    return kind


def _made(
    settings: Json,
    head_dim: int,
    positions: int,
    *,
    are_stretched: bool = False,
    interleaved: bool = False,
) -> RopeConfig:
    """Return the RopeConfig of the settings.

    Linear and yarn scaling multiply the original length, since model cards tell users to add
    rope_scaling and nothing else; if that gives less than the file's positions, the file's are
    used. The positions of llama3 (and of Gemma 3, `are_stretched`) are already those of the scaled
    model.
    """
    kind = _kind(settings)
    unknown = [name for name, value in settings.items() if name not in _KNOWN and value is not None]
    tell_unread("rope_parameters of config.json", unknown)
    original = count_or(settings, "original_max_position_embeddings", positions)
    for name in _ROPE_NEEDS.get(kind, ()):
        if settings.get(name) is None:
            raise CheckpointError(f"rope_type {kind!r} must come with {name}, got none")
    given: dict[str, Any] = {
        name: number(settings, name, 0.0)
        for name in _ROPE_OPTIONS
        if settings.get(name) is not None and name != "truncate"
    }
    if settings.get("truncate") is not None:
        given["truncate"] = flag(settings, "truncate", True)
    partial = _share(settings, 1.0)
    # transformers 5.17 rotates whole heads of these architectures, and fails with other rope_types.
    if kind == "proportional":
        given["num_turning"] = int(partial * head_dim // 2)
    elif partial != 1.0 and kind != "default":
        raise CheckpointError(
            f"partial_rotary_factor must be 1 with rope_type {kind!r}, got {partial:g}"
        )
    factor = number(settings, "factor", positions / original if kind == "yarn" else 1.0)
    longest = original if kind == "longrope" else positions
    if kind == "longrope":
        given["short_factor"] = _numbers(settings, "short_factor")
        factor = number(settings, "factor", positions / original)
    if kind in ("linear", "yarn") and not are_stretched:
        longest = max(positions, int(min(original * factor, MOST)))
    try:
        return RopeConfig(
            rotary_dim=head_dim,
            theta=float(number(settings, "rope_theta", 10_000.0)),
            rope_type=kind,
            max_positions=longest,
            original_max_positions=original,
            factor=factor,
            interleaved=interleaved,
            **given,
        )
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _numbers(settings: Json, name: str) -> tuple[float, ...]:
    values = settings.get(name)
    if not isinstance(values, list) or not all(isinstance(x, int | float) for x in values):
        raise CheckpointError(f"{name} must be a list of numbers, got {shown(values)}")
    return tuple(float(x) for x in values)


def write_rope(rope: RopeConfig, head_dim: int, positions: int) -> dict[str, Any]:
    """Return the settings that `read_rope` reads as `rope`, for the same channels and positions.

    Raises:
        CheckpointError: a config.json cannot say them: not all channels are rotated, or the
            rope_type is longrope or dynamic.
    """
    # config.json has no field for this that transformers would follow
    if rope.rotary_dim != head_dim:
        raise CheckpointError(f"rotary_dim must be {head_dim}, got {rope.rotary_dim}")
    if rope.rope_type in ("longrope", "dynamic"):
        raise CheckpointError(f"rope_type must be one that is written, got {rope.rope_type!r}")
    fields: dict[str, Any] = {"rope_type": rope.rope_type, "rope_theta": rope.theta}
    if rope.rope_type != "default":
        fields["factor"] = rope.factor
    # the original length of linear scaling is the file's unless given
    is_linear = rope.rope_type == "linear"
    if rope.rope_type in ("llama3", "yarn") or (
        is_linear and rope.original_max_positions != positions
    ):
        fields["original_max_position_embeddings"] = rope.original_max_positions
    names = {"llama3": _ROPE_OPTIONS[:2], "yarn": _ROPE_OPTIONS[2:]}.get(rope.rope_type, ())
    options = {name: getattr(rope, name) for name in names}
    if rope.rope_type == "proportional":
        options["partial_rotary_factor"] = 2 * rope.num_turning / rope.rotary_dim
    return fields | {name: value for name, value in options.items() if value is not None}
