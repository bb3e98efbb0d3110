"""What a checkpoint is for: to generate, to embed, to score pairs, to classify. No weights.

Its config.json names a class, and files of sentence-transformers may say the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise.engine.sentence_files import read_sentence_files
from tilewise.engine.steps.embedding import POOLINGS
from tilewise.engine.tokenizer import Tokenizer
from tilewise.errors import CheckpointError, RequestError, shown
from tilewise.models.causal_body import kind_of_decoder
from tilewise.models.config_fields import Json, object_of, read_object, text_or_none
from tilewise.models.encoder_families import Classifier, encoder_family, read_classifier
from tilewise.models.families import FAMILIES
from tilewise.models.transformers_encoder import why_no_encoder
from tilewise.models.vector_head import Stage, head_activation

__all__ = ["HEAD", "Purpose", "read_purpose"]

HEAD = "lm_head.weight"
"""The name of a decoder's output head, tied or not, in a stage of `Purpose`."""
# The one format of a pair that is known by its class: Qwen3-Reranker's, from its model card.
_PAIR_TEMPLATES = {
    "Qwen3ForCausalLM": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        "answer the query\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
}
_PARTS = ("{query}", "{document}")
_VERBS = {
    "generate": "generate text",
    "embed": "embed texts",
    "score": "score pairs of texts",
    "classify": "classify texts",
}


@dataclass(frozen=True, slots=True)
class Purpose:
    """The tasks that a model is for, and how they are done.

    Attributes:
        name: the class that config.json names.
        tasks: tasks of the model: some of "generate", "embed", "score" and "classify".
        is_encoder: True if each token sees the tokens before and after it.
        pooling: the way in which states become a vector, where a request says none.
        stages: the layers that are applied to the pooled vector, in order.
        labels: the names of what a classifier tells apart; empty without one.
        activation: the function of a classifier's logits: "sigmoid", "softmax" or "identity".
        prompts: the texts that are put before a text, by name.
        default_prompt: the name of the prompt that is put there if a request names none; None for
            none.
        pair_template: the text of a pair, with {query} and {document}; None joins the two as the
            tokenizer does.
        dimensions: the sizes to which vectors may be cut: None for none, () for any.
        similarity: the way in which two vectors are compared: "cosine", "dot", "euclidean" or
            "manhattan", of the last two the distance with a minus.
        max_length: the tokens of the longest text that its makers use; None for the model's own.
        is_lower: True if texts that are embedded are made lower case.
    """

    name: str = "the model"
    tasks: tuple[str, ...] = ("generate", "embed")
    is_encoder: bool = False
    pooling: str = "mean"
    stages: tuple[Stage, ...] = ()
    labels: tuple[str, ...] = ()
    activation: str = "identity"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pair_template: str | None = None
    dimensions: tuple[int, ...] | None = None
    similarity: str = "cosine"
    max_length: int | None = None
    is_lower: bool = False

    def check(self, task: str) -> None:
        """Refuse a task that the model cannot do.

        Raises:
            RequestError: the task is not one of `tasks`.
        """
        if task in self.tasks:
            return
        more = ""
        if task == "score" and "generate" in self.tasks:
            more = "; one that answers yes or no takes score_tokens"
        if task == "score" and "classify" in self.tasks:
            more = f", as it has {len(self.labels)} labels and not 1"
        raise RequestError(
            f"model must be one to {_VERBS[task]}, got {self.name}, which is to {self.verbs}{more}"
        )

    @property
    def verbs(self) -> str:
        """The tasks of the model as words of a message, e.g. "generate text and embed texts"."""
        return " and ".join(_VERBS[one] for one in self.tasks)

    @property
    def compares_vectors(self) -> bool:
        """Whether the score of a pair of texts is the similarity of their two embeddings."""
        return "embed" in self.tasks

    def check_pooling(self, pooling: str | None) -> str:
        """Return the pooling of a request, the model's own for None.

        Raises:
            ValueError: the pooling is none of those that are built.
        """
        if pooling is None:
            return self.pooling
        if pooling not in POOLINGS:
            raise ValueError(f"pooling must be {', '.join(POOLINGS)}, got {shown(pooling)}")
        return pooling

    def cut_to(self, dimensions: int | None, size: int) -> int:
        """Return the length to which vectors of `size` numbers are cut: `dimensions`, or `size` for
        None.

        Raises:
            RequestError: the model's vectors are not made to be cut to this length.
        """
        if dimensions is None or dimensions == size:
            return size
        allowed = self.dimensions
        if allowed is None:
            raise RequestError(f"dimensions must be {size}, as it has no others, got {dimensions}")
        if allowed and dimensions not in allowed:
            sizes = ", ".join(map(str, allowed))
            raise RequestError(f"dimensions must be one of {sizes}, got {dimensions}")
        if not 1 <= dimensions <= size:
            raise RequestError(f"dimensions must be in 1 ... {size}, got {dimensions}")
        return dimensions

    def size(self, hidden_size: int) -> int:
        """Return the length of a finished vector: of the last layer that changes it, else
        hidden_size."""
        sizes = [stage.size for stage in self.stages if stage.size is not None]
        return sizes[-1] if sizes else hidden_size

    def with_prompt(self, text: str, name: str | None) -> str:
        """Return a text with a named prompt put before it, in lower case if the model's texts are.

        A name of None is the default prompt; without one nothing is put before the text.

        Raises:
            RequestError: there is no prompt of this name.
        """
        name = self.default_prompt if name is None else name
        if self.is_lower:
            text = text.lower()
        if name is None:
            return text
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "absent, as the model has none"
            raise RequestError(f"prompt_name must be {known}, got {shown(name)}")
        prompt = self.prompts[name]
        return (prompt.lower() if self.is_lower else prompt) + text


def read_purpose(
    directory: Path,
    tokenizer: Tokenizer | None,
    *,
    score_tokens: str | None = None,
    pair_template: str | None = None,
) -> Purpose:
    """Read the purpose of a checkpoint: generating text, embeddings, scores or classes.

    Args:
        directory: the directory of the checkpoint.
        tokenizer: the model's tokenizer; None where there is none.
        score_tokens: the texts of one or two tokens, with a comma between them, whose logits score
            a pair.
        pair_template: the text of a pair.

    Raises:
        CheckpointError: a file cannot be read, or asks for a part that is not supported.
        ValueError: score_tokens are no tokens, or the template lacks a part.
    """
    path = directory / "config.json"
    config: Json = read_object(path) if path.is_file() else {}
    files = read_sentence_files(directory)
    family = encoder_family(config)
    causal, kind = kind_of_decoder(config)
    is_encoder = family is not None or _is_unknown_encoder(config, causal)
    ids = _score_ids(score_tokens, tokenizer) or files.score_ids
    if pair_template is None and ids:
        pair_template = _PAIR_TEMPLATES.get(causal)
    if pair_template is not None and any(pair_template.count(part) != 1 for part in _PARTS):
        raise ValueError(
            f"pair_template must hold {' and '.join(_PARTS)} once, got {shown(pair_template)}"
        )
    names = config.get("architectures")
    known: dict[str, Any] = {
        "name": names[0] if isinstance(names, list) and names else "the model",
        "is_encoder": is_encoder,
        "pooling": files.pooling or "mean",
        "prompts": files.prompts,
        "default_prompt": files.default_prompt,
        "pair_template": pair_template,
        "similarity": files.similarity,
        "max_length": files.max_length,
        "is_lower": files.is_lower,
    }
    if ids:
        if is_encoder or kind != "generate":
            raise ValueError(
                f"score_tokens must be None for a model without an output head, got {score_tokens}"
            )
        if pair_template is None:
            raise ValueError("pair_template must be given with score_tokens, got None")
        stage = Stage("linear", HEAD, None, 1, rows=ids, is_difference=len(ids) > 1)
        head = {"stages": (stage,), "labels": ("score",), "activation": "sigmoid"}
        return Purpose(**known | head | {"tasks": ("score",), "pooling": "last"})
    if kind == "classify":
        return Purpose(**known | _classifier(config, is_encoder))
    is_made_to = kind == "embed" or is_encoder or files.pooling is not None
    tasks: tuple[str, ...] = () if kind == "embed" or is_encoder else ("generate",)
    tasks += ("embed", "score") if is_made_to else ("embed",)
    sizes = config.get("matryoshka_dimensions")
    sizes = tuple(sizes) if isinstance(sizes, list) else ()
    dimensions = sizes if is_made_to else None
    return Purpose(**known, tasks=tasks, stages=files.stages, dimensions=dimensions)


def _is_unknown_encoder(config: Json, causal: str) -> bool:
    """Return whether a model without a decoder here is one that transformers can run as an encoder.

    Args:
        config: the fields of config.json.
        causal: the name of the class of the model as a decoder.
    """
    return causal not in FAMILIES and why_no_encoder(config) is None


def _score_ids(told: str | None, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Return the ids of the one or two tokens in a text with a comma between them; () for None.

    Raises:
        ValueError: a part is not one token, there are more than two, or there is no tokenizer.
    """
    if told is None:
        return ()
    texts = told.split(",")
    if tokenizer is None:
        raise ValueError(f"score_tokens must be None without a tokenizer, got {shown(told)}")
    ids = [tokenizer.encode_plain(text) for text in texts]
    if len(texts) > 2 or any(len(one) != 1 for one in ids):
        raise ValueError(
            "score_tokens must be one or two tokens with a comma between them, the one of a match "
            f"first, got {shown(told)}"
        )
    return tuple(one[0] for one in ids)


def _classifier(config: Json, is_encoder: bool) -> dict[str, Any]:
    """Return the arguments of `Purpose` that a checkpoint with a classifier decides: tasks,
    pooling, stages, labels and activation."""
    labels = _labels(config)
    score = Stage("linear", "score.weight", None, len(labels))
    read = Classifier("last", (score,))
    if encoder_family(config) is None and is_encoder:
        read = Classifier("cls", ())  # transformers runs the head
    elif is_encoder:
        read = read_classifier(config, len(labels))
    tasks = ("score", "classify") if len(labels) == 1 else ("classify",)
    return {
        "tasks": tasks,
        "pooling": read.pooling,
        "stages": read.stages,
        "labels": labels,
        "activation": _activation(config, len(labels)),
    }


def _labels(config: Json) -> tuple[str, ...]:
    """Return the names of a classifier's labels, by id2label, or LABEL_0, LABEL_1 ... by
    num_labels.

    Where the file says nothing there are two, as in transformers.

    Raises:
        CheckpointError: a label is no text, or the number is wrong.
    """
    told = object_of(config, "id2label")
    if told:
        found = tuple(told.get(str(i)) for i in range(len(told)))
        if any(not isinstance(label, str) for label in found):
            raise CheckpointError(
                f"id2label must have texts for 0 ... {len(told) - 1}, got {shown(dict(told))}"
            )
        return tuple(map(str, found))
    number = config.get("num_labels", 2)
    if type(number) is not int or number < 1:
        raise CheckpointError(f"num_labels must be a positive integer, got {shown(number)}")
    return tuple(f"LABEL_{i}" for i in range(number))


def _activation(config: Json, num_labels: int) -> str:
    """Return the function of a classifier's logits: "identity", "sigmoid" or "softmax".

    The fields of sentence-transformers decide first. Else one label has "sigmoid", and more what
    problem_type says, "softmax" by default, as in transformers.

    Raises:
        CheckpointError: the field of sentence-transformers names another function.
    """
    told = object_of(config, "sentence_transformers").get("activation_fn")
    field_name = "activation_fn of sentence_transformers"
    if told is None:
        field_name = "sbert_ce_default_activation_function"
        told = text_or_none(config, field_name)
    if told is not None:
        found = head_activation(str(told), field_name)
        if found not in ("identity", "sigmoid"):
            raise CheckpointError(f"{field_name} must be Identity or Sigmoid, got {told!r}")
        return found
    if num_labels == 1:
        return "sigmoid"
    by_type = {"regression": "identity", "multi_label_classification": "sigmoid"}
    return by_type.get(text_or_none(config, "problem_type") or "", "softmax")
