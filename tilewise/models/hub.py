"""A model by its name on the hub: its folder in this machine's cache, downloaded if need be."""

from __future__ import annotations

import errno
import fnmatch
import glob
import io
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import huggingface_hub as hub
from huggingface_hub import constants, errors
from tqdm.std import tqdm

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import read_object
from tilewise.models.gguf.file import parts_of
from tilewise.models.gguf.folder import gguf_choices, gguf_folder
from tilewise.models.mistral_files import has_mistral_files, mistral_folder
from tilewise.models.naming import like
from tilewise.progress import Progress, Show

__all__ = ["ADAPTER_FILES", "HubName", "adapter_folder", "checkpoint_folder", "fetch", "hub_name"]

_NAME = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(/[\w./-]+\.gguf|:[\w.-]+)?(?:@([\w./-]+))?", re.I
)
_SPLIT = re.compile(r"-\d{5}-of-(\d{5})\.gguf", re.I)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_WEIGHTS = "*.safetensors"
_PICKLED = "pytorch_model*.bin"  # taken where there is nothing else; only tensors are unpickled
_SHOWN = 12  # names listed in a message
# What is read of a checkpoint beside its weights. Code never is.
_READ = (
    "config.json",
    "generation_config.json",
    "*.safetensors.index.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "params.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
)


class HubName(NamedTuple):
    """The name of a model on the hub.

    Attributes:
        repo: the owner and the model, as "owner/model".
        revision: a branch, a tag or a commit; None for the main branch.
        part: the GGUF file of a repository: "/" and its name, or ":" and a quantisation as it
            stands in the name; "" for the only one, or for a checkpoint.
    """

    repo: str
    revision: str | None
    part: str = ""

    def __str__(self) -> str:
        name = f"{self.repo}{self.part}"
        return name if self.revision is None else f"{name}@{self.revision}"


def hub_name(given: str | Path) -> HubName | None:
    """Parse a model's name on the hub; return None for a path or anything that is no such name.

    Args:
        given: the model as the user wrote it; "owner/model" or "owner/model@revision" are names,
            unless there is a file or folder of that path. "owner/model/file.gguf" and
            "owner/model:Q4_K_M" name a GGUF file of the model.
    """
    found = _NAME.fullmatch(str(given))
    if found is None or Path(given).exists():
        return None
    if found[2] is None and found[1].lower().endswith(".gguf"):
        return None  # a file that is not there
    return HubName(found[1], found[3], found[2] or "")


def checkpoint_folder(given: str | Path) -> Path:
    """Return the local folder of a checkpoint; a name on the hub is downloaded if need be.

    For a GGUF file, or a folder with one and no config.json, it is the folder that `gguf_folder`
    makes of the file; for Mistral's own files that of `mistral_folder`. A path need not exist.

    Raises:
        CheckpointError: the download fails, a file is damaged, or a folder has several GGUF files.
    """
    name = hub_name(given)
    path = Path(given) if name is None else fetch(name)
    if path.is_file() and path.suffix.lower() == ".gguf":
        return gguf_folder(path)
    if path.is_dir() and has_mistral_files(path):
        return mistral_folder(path)
    if path.is_dir() and not (path / "config.json").is_file():
        choices = gguf_choices([x.name for x in path.iterdir()])
        if choices:
            return gguf_folder(path / _only(f"folder {str(path)!r}", choices, f"{path}/"))
    return path


def fetch(name: HubName) -> Path:
    """Return the folder of a model of the hub, and download what the cache on this machine lacks.

    For a repository of GGUF files return the file, the first part if it is split. A complete copy
    in the cache is used without a request to the hub. The variables HF_HOME, HF_HUB_CACHE,
    HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE have their meaning in `huggingface_hub`, which
    downloads, shows the progress, and resumes.

    Raises:
        CheckpointError: the hub does not know the name or the revision, asks for permission, cannot
            be reached, or the disk is too small; or the model has neither weights nor the GGUF file
            that is meant.
    """
    found = _cached(name)
    if found is not None:
        return found
    gguf: str | None = None

    def choose(files: list[str]) -> list[str]:
        nonlocal gguf
        gguf = _gguf_of(name, files)
        return _wanted(name, files) if gguf is None else _parts(gguf, files)

    folder = _downloaded("checkpoint", name, choose)
    return folder if gguf is None else folder / gguf


def adapter_folder(given: str | Path) -> Path:
    """Return the local folder of an adapter; a name on the hub is downloaded if need be.

    Raises:
        CheckpointError: the download fails, or the repository has no adapter with safetensors.
    """
    name = hub_name(given)
    if name is None:
        return Path(given)
    found = [
        hub.try_to_load_from_cache(name.repo, file, revision=name.revision)
        for file in ADAPTER_FILES
    ]
    if not name.part and all(isinstance(file, str) for file in found):
        return Path(str(found[0])).parent

    def choose(files: list[str]) -> list[str]:
        if name.part or not set(ADAPTER_FILES) <= set(files):
            raise CheckpointError(
                f"adapter {str(name)!r} must hold {' and '.join(ADAPTER_FILES)}, got {_kind(files)}"
            )
        return list(ADAPTER_FILES)

    return _downloaded("adapter", name, choose)


def _downloaded(kind: str, name: HubName, choose: Callable[[list[str]], list[str]]) -> Path:
    """Download the files of a repository that `choose` takes, and return their folder in the cache.

    Args:
        kind: the noun for messages, such as "model".
        name: the repository and its revision.
        choose: a function from the names of all files to those that are wanted.

    Raises:
        CheckpointError: HF_HUB_OFFLINE is set, the repository cannot be read, or the disk is too
            small.
    """
    if constants.HF_HUB_OFFLINE:
        raise CheckpointError(
            f"{kind} {str(name)!r} must be in the cache where HF_HUB_OFFLINE is set, got none "
            f"that is whole in {constants.HF_HUB_CACHE!r}"
        )
    try:
        info = hub.HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        wanted = choose(list(sizes))
        total = sum(sizes[file] for file in wanted)
        _check_disk(name, total)
        with Progress() as progress:
            folder = hub.snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=[glob.escape(x) for x in wanted],
                tqdm_class=_bars(progress.show, f"downloading {name}", total),
            )
    except CheckpointError:
        raise
    except Exception as error:  # of huggingface_hub, of its HTTP library or of the disk
        raise CheckpointError(_reason(name, error)) from error
    return Path(folder)


def _bars(show: Show, what: str, total: int) -> type[Any]:
    """Return a class of progress bars for huggingface_hub that draw nothing and report bytes to
    `show`.

    Args:
        show: a function that takes a line of progress and the share that is done.
        what: the words before the sizes.
        total: bytes that are downloaded in all, including those in the cache already.
    """

    class Bar(tqdm):  # type: ignore[misc]
        """A progress bar that draws nothing; of those that count files or bytes only the latter
        report."""

        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options | {"file": io.StringIO(), "mininterval": 0.0})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.unit == "B" and total:
                done = min(int(self.n), total)
                show(f"{what}, {done / 1e9:.2f} of {total / 1e9:.2f} GB", done / total)

    return Bar


def _only(where: str, choices: list[str], before: str) -> str:
    """Return the only entry of a list of GGUF files; where there are several, refuse to choose.

    Args:
        where: the checkpoint, for the message.
        before: the text before each choice in the message.

    Raises:
        CheckpointError: there are several choices.
    """
    if len(choices) > 1:
        shown = ", ".join(f"{before}{x}" for x in choices[:_SHOWN])
        more = f" and {len(choices) - _SHOWN} more" if len(choices) > _SHOWN else ""
        raise CheckpointError(f"{where} has several GGUF files: give one of {shown}{more}")
    return choices[0]


def _gguf_of(name: HubName, files: list[str]) -> str | None:
    """Return the GGUF file to which a name refers; None if it refers to an ordinary checkpoint.

    Args:
        files: the files of the repository.

    Raises:
        CheckpointError: no file matches, or several do.
    """
    choices = gguf_choices(files)
    if not name.part:
        if "config.json" in files and any(fnmatch.fnmatch(x, _WEIGHTS) for x in files):
            return None
        return _only(f"checkpoint {str(name)!r}", choices, f"{name.repo}/") if choices else None
    kind = name.part[1:].casefold()
    if name.part.startswith("/"):
        found = [x for x in files if x.casefold() == kind]
    else:
        # the quantisation is a whole word of the name, or the name of a folder
        word = re.compile(rf"(?:^|[-._/]){re.escape(kind)}(?:$|[-./])")
        found = [x for x in choices if word.search(x.casefold())]
    if not found:
        told = f", got {', '.join(choices[:_SHOWN])}" if choices else f", got {_kind(files)}"
        raise CheckpointError(f"checkpoint {str(name)!r} must be a GGUF file of {name.repo}{told}")
    return _only(f"checkpoint {str(name)!r}", found, f"{name.repo}/")


def _parts(gguf: str, files: list[str]) -> list[str]:
    """Return the names of all parts of a split GGUF file among `files`, sorted; [gguf] if it is
    whole."""
    split = _SPLIT.search(gguf)
    if split is None:
        return [gguf]
    begin, end = gguf[: split.start()], f"-of-{split[1]}.gguf"
    return sorted(x for x in files if x.startswith(begin) and x.endswith(end))


def _cached(name: HubName) -> Path | None:
    """Return the folder or the GGUF file of a model in the hub's cache; None if a file is missing
    there."""
    if name.part:
        return _cached_gguf(name)
    file = hub.try_to_load_from_cache(name.repo, "config.json", revision=name.revision)
    if not isinstance(file, str):  # None, or a mark of a file that the hub has not
        return None
    folder = Path(file).parent
    return folder if _is_whole(folder) else None


def _cached_gguf(name: HubName) -> Path | None:
    """Return the GGUF file in the cache to which a name refers; None unless exactly one matches and
    all of its parts are there."""
    repo = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"
    revision = name.revision or "main"
    named = repo / "refs" / revision
    commit = named.read_text().strip() if named.is_file() else revision
    folder = repo / "snapshots" / commit
    if not folder.is_dir():
        return None
    try:
        found = _gguf_of(name, [str(x.relative_to(folder)) for x in folder.rglob("*.gguf")])
        return None if found is None else parts_of(folder / found)[0]
    except CheckpointError:
        return None


def _is_whole(folder: Path) -> bool:
    """Return whether a folder has all files of weights that its index names; without an index, any
    file of weights."""
    kind = _WEIGHTS if any(folder.glob(f"{_WEIGHTS}*")) else _PICKLED
    indices = list(folder.glob(f"{kind}.index.json"))
    if not indices:
        return any(folder.glob(kind))
    for index in indices:
        files = read_object(index).get("weight_map")
        if not isinstance(files, dict):
            return False
        if not all(isinstance(x, str) and (folder / x).is_file() for x in files.values()):
            return False
    return True


def _wanted(name: HubName, files: Iterable[str]) -> list[str]:
    """Return the names of a repository's files that are downloaded: weights, settings and
    tokenizer.

    Raises:
        CheckpointError: there is no checkpoint among them.
    """
    files = sorted(files)
    weights = [x for x in files if fnmatch.fnmatch(x, _WEIGHTS) and "/" not in x]
    # Mistral's own files of the same numbers
    weights = [x for x in weights if not x.startswith("consolidated")] or weights
    weights = weights or [x for x in files if fnmatch.fnmatch(x, f"{_PICKLED}*")]
    if "config.json" not in files or not weights:
        raise CheckpointError(
            f"checkpoint {str(name)!r} must hold config.json and safetensors, got {_kind(files)}"
        )
    return [x for x in files if any(fnmatch.fnmatch(x, p) for p in _READ)] + weights


def _kind(files: list[str]) -> str:
    """Return the words of a message for what a repository without a checkpoint has instead."""
    if "model_index.json" in files:
        return "a pipeline of a diffusion model"
    if "adapter_config.json" in files:
        return "an adapter (LoRA), which must be merged into its model"
    if any(x.endswith((".bin", ".pt", ".pth", ".ckpt")) for x in files):
        return "pickles of other names than pytorch_model"
    return f"{len(files)} other files" if files else "no files"


def _check_disk(name: HubName, wanted: int) -> None:
    """Raise CheckpointError if the cache's disk has no room for `wanted` bytes."""
    cache = Path(constants.HF_HUB_CACHE)
    at = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(at).free
    if wanted > free:
        raise CheckpointError(
            f"the disk of {str(cache)!r} must have {wanted / 1e9:.1f} GB free for "
            f"{str(name)!r}, got {free / 1e9:.1f} GB; HF_HOME names another place"
        )


def _reason(name: HubName, error: Exception) -> str:
    """Return a message that says why a model was not downloaded, and what the user can do."""
    given, where = f"checkpoint {str(name)!r}", constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{given} needs permission: accept its terms at {where}/{name.repo}, then set HF_TOKEN "
            "to a token of that account"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{given} must name a branch, tag or commit of {name.repo!r}, got {name.revision!r}"
    if isinstance(error, errors.RepositoryNotFoundError):
        near = like(Path(str(name)))
        return (
            f"{given} must be a folder or a model of the hub, got neither: {where} has no model "
            f"{name.repo!r}, or it is private and HF_TOKEN does not open it"
            + ("" if near is None else f"; did you mean the folder {near!r}?")
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"{given} was not downloaded: the disk of {constants.HF_HUB_CACHE!r} is full"
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return (
        f"{given} is no folder here, and was not downloaded from {where}: {first}; what has come "
        "is kept, and the next call goes on there"
    )
