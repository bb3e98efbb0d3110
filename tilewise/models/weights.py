"""Load and save safetensors checkpoints by a table that each model declares.

Tensors are mapped from the file and copied one at a time into parameters that already have the
target dtype and device, so loading never holds the weights twice.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from tilewise import ops
from tilewise.errors import CheckpointError
from tilewise.models.causal_body import CLASSIFIER
from tilewise.models.config_fields import read_object
from tilewise.models.decoder import Decoder
from tilewise.models.encoder import Encoder
from tilewise.models.families.family import Names
from tilewise.models.gguf.checkpoint import GgufCheckpoint
from tilewise.models.gguf.folder import gguf_in
from tilewise.models.gguf.modules import GgufModules
from tilewise.models.mistral_files import MistralTensors
from tilewise.models.quantised import QuantisedModules, quantisation_of
from tilewise.models.text_part import renamed, text_architecture
from tilewise.models.weight_files import INDEX, SINGLE, open_weights, some, weight_files
from tilewise.models.weight_table import Part, Weight
from tilewise.nn.experts import Experts
from tilewise.nn.quantised import QuantisedEmbedding, QuantisedLinear
from tilewise.ops import QuantisedWeight
from tilewise.ops.mxfp4 import GROUP, unpack_mxfp4
from tilewise.progress import Show, silent

__all__ = [
    "check_weights",
    "has_own_head",
    "load_weights",
    "narrow",
    "read_tensor",
    "save_model",
    "save_tensors",
]

_ROWS = 8192  # rows of a table compared at a time


Found = dict[str, tuple[Path, Any]]  # tensor name -> its file and the file's open reader
CutOf = Callable[[Weight, int], Part | None]
HEAD = "lm_head.weight"


def has_own_head(directory: str | Path, names: Names) -> bool:
    """Return whether a checkpoint stores an output head that differs from its embedding.

    Fine-tunes that trained the head often leave tie_word_embeddings true. As in transformers, the
    stored tensors decide.

    Args:
        directory: the directory of the checkpoint.
        names: the checkpoint's names of the model's tensors.

    Raises:
        CheckpointError: a file is missing or cannot be read.
    """
    with ExitStack() as stack:
        found = _open_checkpoint(Path(directory), stack, names.renames)
        whole = names.embedding
        embedding = whole if whole in found else whole.removeprefix(names.prefix)
        if HEAD not in found or embedding not in found:
            return False  # the single tensor serves as both
        (file, head), (_, table) = found[HEAD], found[embedding]
        with _reading(file, HEAD):
            head, table = (r.get_slice(n) for r, n in ((head, HEAD), (table, embedding)))
            if head.get_shape() != table.get_shape():
                return True
            return any(
                not torch.equal(head[at : at + _ROWS].double(), table[at : at + _ROWS].double())
                for at in range(0, head.get_shape()[0], _ROWS)
            )


def check_weights(
    model: Decoder | Encoder, directory: str | Path, *, part: CutOf | None = None
) -> None:
    """Refuse a checkpoint whose tensors are not those of `model`, by names and shapes; none is
    read.

    Args, Raises: as of `load_weights`; the parameters may be on the device "meta".
    """
    with ExitStack() as stack:
        found = _open_checkpoint(Path(directory), stack, model.weight_renames)
        _check(model, found, part, _modules(model, directory, found))


def narrow(
    model: Decoder,
    directory: str | Path,
    *,
    part: CutOf | None = None,
    holds_tables: bool = False,
    holds_experts: bool = False,
) -> None:
    """Put a `QuantisedLinear` in the place of each projection that a checkpoint stores quantised,
    and check the checkpoint as `check_weights` does.

    The model's parameters are on "meta", and so are the weights; `load_weights` reads them. Other
    quantised weights (of most embeddings, of experts that no kernel reads so) are dequantised when
    they are read.

    Args:
        model, directory, part: as of `load_weights`.
        holds_tables: True to hold an embedding that is the output head, too, as it is stored.
        holds_experts: True to hold experts so where a GPU of this machine has a kernel for them.

    Raises:
        CheckpointError: as of `load_weights`.
    """
    with ExitStack() as stack:
        found = _open_checkpoint(Path(directory), stack, model.weight_renames)
        modules = _modules(model, directory, found)
        of_experts: dict[str, dict[str, Weight]] = defaultdict(dict)
        for weight in () if modules.format is None else model.weight_table():
            name, _, kind = weight.name.rpartition(".")
            linear = model.get_submodule(name)
            if isinstance(linear, Experts) and kind in ("up", "down") and holds_experts:
                of_experts[name][kind] = weight
            if holds_tables and linear is model.embed_tokens and model.lm_head is None:
                _narrow_table(model, weight, found, modules)
            if kind != "weight" or type(linear) is not nn.Linear or weight.transposed:
                continue
            sources = _names_of(model, weight, found)
            if not all(modules.has(source) for source in sources):
                continue
            weights = [modules.weight(source, is_meta=True) for source in sources]
            parts = _cut_all(model, weight, weights, part)
            place, _, own = name.rpartition(".")
            made = QuantisedLinear(parts, linear.bias, linear.weight.dtype)
            _check_size(name, made, linear)
            setattr(model.get_submodule(place), own, made)
        for name, both in of_experts.items():
            _narrow_experts(model, name, both, found, modules, part)
        _check(model, found, part, modules)


@torch.no_grad()
def load_weights(
    model: Decoder | Encoder,
    directory: str | Path,
    *,
    part: CutOf | None = None,
    show: Show = silent,
) -> None:
    """Fill the parameters of `model` from model.safetensors or its shards.

    Args:
        model: the model, whose parameters have their dtype and device.
        directory: the directory of the checkpoint.
        part: a function of a weight and the index of one of its sources, which returns the part of
            the source that is read; None reads all.
        show: a function that takes lines of progress.

    Raises:
        CheckpointError: a file or tensor is missing, truncated, of the wrong shape or dtype, or
            the checkpoint has tensors that the model does not know.
    """
    with ExitStack() as stack:
        found = _open_checkpoint(Path(directory), stack, model.weight_renames)
        modules = _modules(model, directory, found)
        _check(model, found, part, modules)
        done, total = 0, sum(parameter.numel() for parameter in model.parameters())
        for name, target, cut in _targets(model, found, part, modules):
            show(
                f"loading {done / 1e9:.2f} of {total / 1e9:.2f} billion weights",
                done / max(1, total),
            )
            done += target.numel()
            if modules.has(name):
                wide = _cut_narrow(modules.weight(name), cut).dequantise()
                target[: wide.shape[0], : wide.shape[1]].copy_(wide)
            elif name not in found:
                _unpack(name, found, target, cut)
            else:
                _copy(name, *found[name], target, cut)
        linears = _narrow_linears(model)
        for place, (name, linear) in enumerate(linears):
            show(f"loading {place} of {len(linears)} quantised weights", place / len(linears))
            assert isinstance(model, Decoder)
            weight = model.source_of(f"{name}.weight", linear)
            weights = [modules.weight(source) for source in _names_of(model, weight, found)]
            linear.hold(_cut_all(model, weight, weights, part))
        table = getattr(model, "embed_tokens", None)
        if isinstance(table, QuantisedEmbedding):
            assert isinstance(model.packed_head, QuantisedLinear)
            table.hold(model.packed_head.parts)


def read_tensor(
    directory: str | Path, names: Sequence[str], rows: Sequence[int] | None = None
) -> Tensor:
    """Return one tensor of a checkpoint, or some of its rows, in the dtype of the file.

    Args:
        directory: the directory of the checkpoint.
        names: the names that the tensor may have; the first one in the checkpoint counts.
        rows: the indices of the rows to return; None returns all.

    Raises:
        CheckpointError: the tensor is missing, or the file cannot be read.
    """
    with ExitStack() as stack:
        found = _open_checkpoint(Path(directory), stack)
        name = next((name for name in names if name in found), None)
        if name is None:
            raise CheckpointError(f"checkpoint must hold tensor {names[0]}, got none")
        file, reader = found[name]
        with _reading(file, name):
            if rows is None:
                whole: Tensor = reader.get_tensor(name)
                return whole
            part = reader.get_slice(name)
            return torch.cat([part[row : row + 1] for row in rows])


def _modules(model: Decoder | Encoder, directory: str | Path, found: Found) -> QuantisedModules:
    """Return the quantised modules of an open checkpoint, by its GGUF file or the format in its
    JSON files.

    Encoders have none of the latter.
    """
    reader = next((reader for _, reader in found.values()), None)
    if isinstance(reader, GgufCheckpoint):
        return GgufModules(reader)
    is_decoder = isinstance(model, Decoder)
    return QuantisedModules(quantisation_of(directory) if is_decoder else None, found)


def _narrow_table(model: Decoder, weight: Weight, found: Found, modules: QuantisedModules) -> None:
    """Replace a tied embedding and its head by quantised ones, if the checkpoint stores it
    quantised, with the table's shape."""
    (source,) = _names_of(model, weight, found)
    if not modules.has(source):
        return
    table = model.get_parameter(weight.name)
    parts = [modules.weight(source, is_meta=True)]
    head = QuantisedLinear(parts, None, table.dtype)
    if (head.out_features, head.in_features) == tuple(table.shape):
        model.embed_tokens = QuantisedEmbedding(parts, table.dtype)
        model.packed_head = head


def _narrow_experts(
    model: Decoder,
    name: str,
    both: Mapping[str, Weight],
    found: Found,
    modules: QuantisedModules,
    part: CutOf | None,
) -> None:
    """Replace the weights of a mixture by quantised ones, if a kernel can read both of them.

    Args:
        name: the name of the mixture in the model.
        both: the up and the down weights.
        found: the tensors of the checkpoint.
        modules: the quantised modules of the checkpoint.
        part: the rank's part of each weight; None for all.
    """
    experts = model.get_submodule(name)
    assert isinstance(experts, Experts)
    held: dict[str, QuantisedWeight] = {}
    for kind, weight in both.items():
        sources = _names_of(model, weight, found)
        if weight.transposed or not all(modules.has(source) for source in sources):
            return
        weights = [modules.weight(source, is_meta=True) for source in sources]
        try:
            parts = _cut_all(model, weight, weights, part)
        except ValueError:  # ranks cut a group
            return
        whole = QuantisedWeight.concatenate(parts)
        if whole is None or whole.padded() is not whole:
            return
        held[kind] = whole
    (_, _, width), (_, _, inner) = (getattr(experts, kind).shape for kind in ("up", "down"))
    dtype = experts.up.dtype
    if isinstance(ops.placed_experts(held["up"], held["down"], width, inner, dtype), str):
        return
    experts.hold(held["up"], held["down"], dtype)


def _narrow_linears(model: nn.Module) -> list[tuple[str, QuantisedLinear]]:
    """Return the quantised linear layers of a model with their names; a tied head has
    "embed_tokens"."""
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, QuantisedLinear)]
    return [("embed_tokens" if n == "packed_head" else n, m) for n, m in linears]


def _is_bare(model: Decoder | Encoder, found: Found) -> bool:
    """Return whether no name in a checkpoint begins with the model's prefix."""
    return not any(name.startswith(model.weight_prefix) for name in found)


def _names_of(model: Decoder, weight: Weight, found: Found) -> list[str]:
    """Return the names of a weight's sources in the file."""
    prefix = model.weight_prefix if _is_bare(model, found) else ""
    return [source.removeprefix(prefix) for source in weight.sources]


def _cut_all(
    model: Decoder, weight: Weight, sources: Sequence[QuantisedWeight], part: CutOf | None
) -> list[QuantisedWeight]:
    """Return the part of each quantised source that this rank's model has, in the order of its
    rows."""
    cuts = [None if part is None else part(weight, place) for place in range(len(sources))]
    if weight.order is not None:
        cuts = [
            _in_order(model, weight, source.shape[0]) if cut is None and place == 0 else cut
            for place, (source, cut) in enumerate(zip(sources, cuts, strict=True))
        ]
    return [_cut_narrow(source, cut) for source, cut in zip(sources, cuts, strict=True)]


def _cut_narrow(weight: QuantisedWeight, part: Part | None) -> QuantisedWeight:
    """Return the rows or columns of a quantised weight that `part` names; None is all of it."""
    if part is None:
        return weight
    rows, columns = weight.shape
    if part.dim == 1:
        (span,) = part.spans
        return weight.cut((0, rows), span)
    spans = [weight.cut(span, (0, columns)) for span in part.spans]
    joined = QuantisedWeight.concatenate(spans)
    assert joined is not None
    return joined


def _check_size(name: str, made: QuantisedLinear, linear: nn.Linear) -> None:
    found, wanted = (made.out_features, made.in_features), tuple(linear.weight.shape)
    if found != wanted:
        raise CheckpointError(f"weight of {name} must have shape {wanted}, got {found}")


def _targets(
    model: Decoder | Encoder, found: Found, part: CutOf | None, modules: QuantisedModules
) -> Iterator[tuple[str, Tensor, Part | None]]:
    """Yield for each tensor to read its name in the file, the view of a parameter to fill, and the
    part of the tensor, None for all.

    A name that is not in the file belongs to a quantised module, or to experts in MXFP4, which are
    stored as blocks and scales. A tensor that is missing raises CheckpointError.
    """
    prefix = model.weight_prefix if _is_bare(model, found) else ""
    for weight in model.weight_table():
        if weight.whole is not None and weight.whole.removeprefix(prefix) in found:
            weight = replace(weight, sources=(weight.whole,), rows=None)
        own = part
        usual = weight.rows
        if weight.is_cut_anywhere and usual is not None:
            rows = _rows_in_file(weight, prefix, found)
            if part is not None:
                own = _part_of_rows(part, rows)
                weight = replace(weight, rows=_rows_held(weight, own))
            elif sum(rows) == sum(usual):
                weight = replace(weight, rows=rows)
        parts = weight.parts(model.get_parameter(weight.name))
        for place, (source, target) in enumerate(parts):
            name = source.removeprefix(prefix)
            cut = None if own is None else own(weight, place)
            if name not in found and f"{name}_blocks" in found:
                yield name, target.mT if weight.transposed else target, cut
                continue
            if source == model.embedding_source and name not in found and model.lm_head is None:
                # a tied head that is stored under its own name only
                name = HEAD if HEAD in found else name
            if name not in found and not modules.has(name):
                raise CheckpointError(f"checkpoint must hold tensor {name}, got none")
            if cut is None and weight.order is not None and place == 0:
                cut = _in_order(model, weight, target.shape[0])
            if cut is not None and weight.transposed:
                cut = _transposed(cut, target)
            if weight.either and not modules.has(name):
                file, reader = found[name]
                with _reading(file, name):
                    shape = list(reader.get_slice(name).get_shape())
                other = None if cut is None else _transposed(cut, target)
                if shape == _wanted(target.mT, other) != _wanted(target, cut):
                    target, cut = target.mT, other
            yield name, target, cut


def _rows_in_file(weight: Weight, prefix: str, found: Found) -> tuple[int, ...]:
    """Return the number of rows in the files of each source of a weight; the usual ones if a source
    is missing."""
    assert weight.rows is not None
    rows = []
    for source in weight.sources:
        name = source.removeprefix(prefix)
        if name not in found:
            return weight.rows
        file, reader = found[name]
        with _reading(file, name):
            rows.append(reader.get_slice(name).get_shape()[0])
    return tuple(rows)


def _part_of_rows(part: CutOf, rows: tuple[int, ...]) -> CutOf:
    """Return a function like `part` for a weight whose sources have `rows` rows instead of the
    usual."""

    def of_rows(weight: Weight, place: int) -> Part | None:
        return part(replace(weight, rows=rows), place)

    return of_rows


def _rows_held(weight: Weight, part: CutOf) -> tuple[int, ...] | None:
    """Return the number of rows of each source that a part holds; the usual ones if one is held
    whole."""
    cuts = [part(weight, place) for place in range(len(weight.sources))]
    if any(cut is None for cut in cuts):
        return weight.rows
    return tuple(sum(end - first for first, end in cut.spans) for cut in cuts if cut is not None)


def _transposed(cut: Part, target: Tensor) -> Part:
    """Return a cut of matrices as the cut of the transposed matrices.

    Args:
        cut: rows or columns, of a matrix or of several one after another.
        target: a tensor with the dimensions of the parameter, 2 or 3.
    """
    return cut._replace(dim=2 * target.dim() - 3 - cut.dim)


def _wanted(target: Tensor, cut: Part | None) -> list[int]:
    """Return the shape of the whole tensor of which a part fills the target."""
    wanted = list(target.shape)
    if cut is not None:
        wanted[cut.dim] = cut.size
    return wanted


def _in_order(model: Decoder | Encoder, weight: Weight, rows: int) -> Part:
    """Return, as a Part, all rows of a fused source in the order of the parameter.

    Args:
        model: the decoder, whose config says the heads.
        weight: the parameter with its sources.
        rows: the number of rows of the source.
    """
    assert isinstance(model, Decoder)
    return Part(0, rows, weight.rows_in_order(model.config.layers[weight.layer]))


def _check(
    model: Decoder | Encoder, found: Found, part: CutOf | None, modules: QuantisedModules
) -> None:
    """Refuse a checkpoint whose tensors' names or shapes, from the files' headers, are not the
    model's.

    Args:
        model, part: as of `load_weights`.
        found: the tensors of the checkpoint.
        modules: the quantised modules of the checkpoint.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not the model's.
    """
    known: set[str] = set()
    for name, linear in _narrow_linears(model):
        assert isinstance(model, Decoder)
        weight = model.source_of(f"{name}.weight", linear)
        known |= modules.known(_names_of(model, weight, found))
    for name, target, cut in _targets(model, found, part, modules):
        if modules.has(name):
            known |= modules.known((name,))
            continue
        wanted = _wanted(target, cut)
        if name in found:
            known.add(name)
            _check_shape(name, found, wanted)
            continue
        rows, groups = wanted[:-1], wanted[-1] // GROUP
        for kind, more in (("blocks", [GROUP // 2]), ("scales", [])):
            known.add(f"{name}_{kind}")
            _check_shape(f"{name}_{kind}", found, [*rows, groups, *more])
    ignored = [*model.ignored_weights]
    if model.lm_head is None:
        ignored.append(re.escape(HEAD))  # a checkpoint may store a tied head nevertheless
    if HEAD not in found:
        ignored.append(CLASSIFIER)  # in its place
    extra = [
        name
        for name in found
        if name not in known
        and not modules.is_extra(name)
        and not any(re.fullmatch(rule, name) for rule in ignored)
    ]
    if extra:
        raise CheckpointError(
            f"checkpoint must hold only tensors of {model.config.architecture}, got {some(extra)}"
        )


def _check_shape(name: str, found: Found, wanted: list[int]) -> None:
    if name not in found:
        raise CheckpointError(f"checkpoint must hold tensor {name}, got none")
    file, reader = found[name]
    with _reading(file, name):
        shape = list(reader.get_slice(name).get_shape())
    if shape != wanted:
        raise CheckpointError(
            f"tensor {name} of {file.name} must have shape {tuple(wanted)}, got {tuple(shape)}"
        )


@contextmanager
def _reading(file: Path, name: str) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise CheckpointError(f"{file.name} must be readable at {name}, got {error}") from error


def _copy(name: str, file: Path, reader: Any, target: Tensor, part: Part | None) -> None:
    with _reading(file, name):
        if part is None:
            tensor: Tensor = reader.get_tensor(name)
        else:
            tensor = _cut(reader.get_slice(name), part)
            target = target.narrow(part.dim, 0, tensor.shape[part.dim])
    if not tensor.is_floating_point() and tensor.dtype != target.dtype:
        raise CheckpointError(
            f"tensor {name} of {file.name} must be floating point, got {tensor.dtype}"
        )
    if not target.is_floating_point() and tensor.dtype != target.dtype:
        raise CheckpointError(
            f"tensor {name} of {file.name} must be {target.dtype}, got {tensor.dtype}"
        )
    target.copy_(tensor)


def _unpack(name: str, found: Found, target: Tensor, part: Part | None) -> None:
    """Fill a parameter from MXFP4 blocks, one matrix at a time: float32 takes 8 times the size.

    Args:
        name: the name of the tensor, without "_blocks" and "_scales".
        target: the view of the parameter.
        part: the rank's part of it; None for all.
    """
    if part is None:
        part = Part(1, target.shape[1], ((0, target.shape[1]),))
    spans = part.spans
    if part.dim == 2:
        spans = tuple((first // GROUP, end // GROUP) for first, end in spans)
    if any(edge % GROUP for span in part.spans for edge in span if part.dim == 2) or (
        target.shape[-1] % GROUP
    ):
        raise CheckpointError(
            f"tensor {name}_blocks must be of a multiple of {GROUP} columns, got {target.shape[-1]}"
        )
    file = found[f"{name}_blocks"][0]
    blocks, scales = (
        found[each][1].get_slice(each) for each in (f"{name}_blocks", f"{name}_scales")
    )
    cut = part._replace(spans=spans)
    for i, matrix in enumerate(target):
        try:
            values = unpack_mxfp4(_cut(blocks, cut, i), _cut(scales, cut, i), torch.float32)
        except (SafetensorError, TypeError) as error:
            raise CheckpointError(
                f"{file.name} must be readable at {name}_blocks, got {error}"
            ) from error
        matrix.narrow(part.dim - 1, 0, values.shape[part.dim - 1]).copy_(values)


def _cut(source: Any, part: Part, *before: int) -> Tensor:
    """Return a part of a file's tensor, of which the rest is not read.

    Args:
        source: the tensor in the file.
        part: the rows or columns.
        before: indices into the tensor's first dimensions.
    """
    index = (*before, *(slice(None),) * (part.dim - len(before)))
    spans = [source[*index, a:b] for a, b in part.spans]
    return spans[0] if len(spans) == 1 else torch.cat(spans, part.dim - len(before))


def _open_checkpoint(
    directory: Path, stack: ExitStack, renames: Sequence[tuple[str, str]] = ()
) -> Found:
    """Return a dict from each tensor's name to its file and the open reader of that file.

    Args:
        stack: the stack that closes the files.
        renames: pairs of a regular expression and its replacement, for tensors' names.

    Raises:
        CheckpointError: a file is missing or torn, or a name comes twice.
    """
    found = _open_files(directory, stack)
    for rule, to in renames:
        for old in [name for name in found if re.search(rule, name)]:
            new, (file, reader) = re.sub(rule, to, old), found.pop(old)
            if new in found:
                raise CheckpointError(f"tensor {new} must be in a file once, got {old}, too")
            found[new] = (file, _Renamed(reader, old))
    return found


def _open_files(directory: Path, stack: ExitStack) -> Found:
    """Return a dict from each tensor's name to its file and the open reader of that file.

    Of a checkpoint with other inputs only the tensors of its text part are in it, by the names of a
    model of text alone.

    Raises:
        CheckpointError: a file is missing or torn, or a tensor is in two files.
    """
    found: Found = {}
    gguf = gguf_in(directory)
    if gguf is not None and not any((directory / name).is_file() for name in (SINGLE, INDEX)):
        held = GgufCheckpoint(gguf)
        return dict.fromkeys(held.names(), (gguf, held))
    for file in weight_files(directory):
        reader = open_weights(file, stack)
        if file.name.startswith("consolidated"):
            reader = MistralTensors(file, reader)
        for name in reader.keys():  # noqa: SIM118 - a reader is no mapping
            own = _renamed_norm(name)
            if own in found:
                raise CheckpointError(
                    f"tensor {own} must be in one file, got {found[own][0].name} and {file.name}"
                )
            found[own] = (file, reader if own == name else _Renamed(reader, name))
    config = directory / "config.json"
    if config.is_file() and text_architecture(read_object(config)) is not None:
        parts = renamed(found)
        return {name: (found[old][0], _Renamed(found[old][1], old)) for name, old in parts.items()}
    return found


def _renamed_norm(name: str) -> str:
    """Return a tensor's name with "weight" and "bias" for "gamma" and "beta" of a norm, as the
    first BERT files have it."""
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


class _Renamed:
    """One tensor of an open file, as a reader that returns it whatever name is asked for."""

    def __init__(self, reader: Any, name: str) -> None:
        self._reader, self._name = reader, name

    def get_slice(self, _: str) -> Any:
        """Return the one tensor for reading by slices, whatever the name that is asked for."""
        return self._reader.get_slice(self._name)

    def get_tensor(self, _: str) -> Tensor:
        """Return the one tensor, whatever the name that is asked for."""
        tensor: Tensor = self._reader.get_tensor(self._name)
        return tensor


def save_model(
    model: Decoder, directory: str | Path, *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write config.json and safetensors under Hugging Face's names, so that transformers can load
    them.

    Each file is written under a temporary name and renamed, so a crash never leaves half a file.

    Args:
        directory: the directory, made if it does not exist; model weights already there are
            replaced, other files (a tokenizer) are left alone.
        max_shard_bytes: the largest size of a shard; 5 GB is Hugging Face's.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    shards = _shards(model, max_shard_bytes)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = names if len(shards) > 1 else [SINGLE]
    dtype = str(model.embed_tokens.weight.dtype).removeprefix("torch.")
    _save_json(model.config.to_hf() | {"dtype": dtype}, directory / "config.json")
    for name, shard in zip(names, shards, strict=True):
        _save_shard(shard, directory / name)
    if len(shards) > 1:
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        size = sum(part.nbytes for shard in shards for part in shard.values())
        _save_json({"metadata": {"total_size": size}, "weight_map": places}, directory / INDEX)
        (directory / SINGLE).unlink(missing_ok=True)
    else:
        (directory / INDEX).unlink(missing_ok=True)
    for stale in directory.glob("model-?????-of-?????.safetensors"):
        if stale.name not in names:
            stale.unlink()


def _shards(model: Decoder, max_shard_bytes: int) -> list[dict[str, Tensor]]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for weight in model.weight_table():
        parts = weight.parts(model.get_parameter(weight.name).detach())
        for place, (name, part) in enumerate(parts):
            if weight.order is not None and place == 0:
                part = _as_stored(part, _in_order(model, weight, part.shape[0]))
            if shards[-1] and size + part.nbytes > max_shard_bytes:
                shards.append({})
                size = 0
            shards[-1][name] = part
            size += part.nbytes
    return shards


def _as_stored(rows: Tensor, part: Part) -> Tensor:
    """Return the rows of a parameter put back into the order of its fused source, a new tensor.

    Args:
        rows: the rows in the order of the parameter.
        part: the ranges of the source that follow one another in the parameter, see `_in_order`.
    """
    stored, at = torch.empty_like(rows), 0
    for first, end in part.spans:
        stored[first:end] = rows[at : at + end - first]
        at += end - first
    return stored


def _save_shard(tensors: dict[str, Tensor], path: Path) -> None:
    # Copies, because safetensors refuses tensors that share memory, as parts of one product do.
    save_tensors({name: part.contiguous().clone().cpu() for name, part in tensors.items()}, path)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write safetensors under a temporary name and rename them; permissions follow the umask."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    mode = temporary.stat().st_mode
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.chmod(mode & 0o777)  # safetensors creates files that only their owner may read
    temporary.replace(path)


def _save_json(value: dict[str, Any], path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
