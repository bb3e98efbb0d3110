"""The training step: accumulate gradients over batches, clip, AdamW; and its checkpoints.

Nothing in a step waits for the device: losses stay there until they are read.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise.models import Decoder
from tilewise.models.native import NativeDecoder
from tilewise.nn import RotaryEmbedding
from tilewise.training import decoder
from tilewise.training.encoder import Bert
from tilewise.training.flops import attention_flops, product_flops
from tilewise.training.loss import find_loss
from tilewise.training.packing import Batch

__all__ = ["Settings", "Trainer", "learning_rate", "model_flops"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a training run's steps.

    Attributes:
        lr: the highest learning rate.
        final_lr: the share of `lr` at the end of the cosine.
        warm_up: the number of steps until `lr` is reached.
        steps: the number of steps of the whole run; the cosine ends there.
        decay: AdamW's weight decay, of matrices only.
        betas, eps: the constants of AdamW.
        clip: the largest norm of all gradients together; 0 does not clip.
        dtype: the dtype of products and residual stream: "bfloat16" or "float32".
        loss: "chunked" or "liger", see `training.loss`.
        compile: the mode of torch.compile; "" does not compile.
        deterministic: True for the same bits in each run on a machine, which is slower.
    """

    lr: float = 6e-4
    final_lr: float = 0.1
    warm_up: int = 100
    steps: int = 1000
    decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    dtype: str = "bfloat16"
    loss: str = "chunked"
    compile: str = "default"
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype must be bfloat16 or float32, got {self.dtype!r}")
        if self.steps < 1:
            raise ValueError(f"steps must be positive, got {self.steps}")
        for name in ("lr", "warm_up", "decay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")
        find_loss(self.loss)


def learning_rate(settings: Settings, step: int) -> float:
    """Return the learning rate of a step, counted from 0: a linear warm-up, then a cosine from lr
    to lr * final_lr at the end."""
    if step < settings.warm_up:
        return settings.lr * (step + 1) / settings.warm_up
    progress = (step - settings.warm_up) / max(1, settings.steps - settings.warm_up)
    share = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return settings.lr * (settings.final_lr + (1 - settings.final_lr) * share)


def model_flops(model: Decoder | Bert, tokens: int, pairs: float) -> float:
    """Return the FLOPs of a forward and backward pass: products and visible attention; see
    `training.flops`.

    Args:
        model: the model, whose parameters may lie on the meta device.
        tokens: the number of tokens of all sequences.
        pairs: the sum of the sequences' squared lengths.
    """
    looked_up = ["embed_positions.weight"]
    if isinstance(model, Bert):
        # The head sees masked rows only; what it costs for them is left out.
        looked_up += ["embed_tokens.weight", "head.weight"]
        layers, channels = model.shape.num_layers, model.shape.hidden_size
    else:
        layers = model.config.num_layers
        channels = model.config.num_q_heads * model.config.head_dim
        if model.lm_head is not None:
            looked_up.append("embed_tokens.weight")
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    multiplied = sum(sizes.values()) - sum(sizes.get(name, 0) for name in looked_up)
    attention = attention_flops(
        pairs, num_layers=layers, channels=channels, causal=not isinstance(model, Bert)
    )
    return product_flops(multiplied) * tokens + attention


class Trainer:
    """A model, its optimizer and its compiled forward and backward pass.

    Args:
        model: the model with float32 parameters, on the device that trains.
        settings: the settings of training.
        words: the size of the vocabulary; further rows of the embedding are padding.

    Attributes:
        steps: the number of steps made so far, those before a loaded checkpoint included.
    """

    def __init__(self, model: Decoder | Bert, settings: Settings, *, words: int) -> None:
        self.model, self.settings, self.words = model, settings, words
        self.device = next(model.parameters()).device
        self.dtype: torch.dtype = getattr(torch, settings.dtype)
        self.steps = 0
        if isinstance(model, NativeDecoder):
            # Made here, since a compiled graph cannot keep what it makes.
            for rotary in model.rotaries:
                assert isinstance(rotary, RotaryEmbedding)
                rotary.reserve(model.config.max_position_embeddings, self.device)
        if settings.deterministic:
            # cuBLAS reads it when it is first used; torch asks for it.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self._failure = torch.zeros(3, dtype=torch.float64, device=self.device)
        self._loss_of = find_loss(settings.loss)
        self.optimizer = self._make_optimizer()
        self._compiled: Callable[..., Tensor] = self._forward
        if settings.compile:
            mode = None if settings.compile == "default" else settings.compile
            # Liger's kernels start outside of the graph; all else is one graph without a break.
            whole = settings.loss == "chunked"
            self._compiled = torch.compile(
                self._forward if whole else self._features_of,
                fullgraph=True,
                dynamic=False,
                mode=mode,
            )

    def flops(self, batch: Batch) -> float:
        """Return the FLOPs of a forward and backward pass over `batch`: products and visible
        attention."""
        return model_flops(self.model, batch.ids.numel(), batch.pairs)

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch's targets, in nats, a differentiable scalar on the
        device."""
        arguments = _inputs(batch)
        if self.settings.loss == "chunked" or not self.settings.compile:
            return self._compiled(*arguments, batch.targets)
        return self._loss(self._compiled(*arguments), batch.targets)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """Make one optimizer step with the mean gradient of `batches`, which all count alike.

        Gradients are clipped, the learning rate is set for the step, and gradients are zeroed after
        it.

        Returns:
            The mean loss of the batches before the step, on the device.
        """
        total: Tensor | None = None
        for batch in batches:
            loss = self.loss(batch) / len(batches)
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        assert total is not None
        norm = torch.zeros((), device=self.device)
        if self.settings.clip > 0:
            norm = torch.nn.utils.clip_grad_norm_(
                self.model.parameters(), self.settings.clip, foreach=self.device.type == "cuda"
            )
        self._note_failure(total, norm)
        self._set_learning_rate(learning_rate(self.settings, self.steps))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return total

    def _note_failure(self, loss: Tensor, norm: Tensor) -> None:
        """Keep, on the device, the number, loss and gradient norm of the first step in which one
        was not finite."""
        seen = torch.stack([loss, norm]).double()
        step = torch.full((1,), self.steps + 1, dtype=seen.dtype, device=self.device)
        is_first = ~seen.isfinite().all() & (self._failure[0] == 0)
        self._failure = torch.where(is_first, torch.cat([step, seen]), self._failure)

    def check_finite(self) -> None:
        """Wait for the device, and raise if a loss or gradient norm of any step so far was not
        finite.

        Raises:
            FloatingPointError: the loss or the norm of all gradients of a step was not finite.
        """
        step, loss, norm = self._failure.tolist()
        if step:
            name, value = ("gradient norm", norm) if math.isfinite(loss) else ("loss", loss)
            raise FloatingPointError(f"{name} must be finite, got {value} at step {step:.0f}")

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], count: int) -> float:
        """Return the mean loss of the first `count` batches, as a float; without gradients and not
        compiled."""
        losses = [self._plain_loss(batch) for _, batch in zip(range(count), batches, strict=False)]
        return float(torch.stack(losses).mean())

    def state(self) -> dict[str, Any]:
        """Return the state that `load_state` restores: steps, settings, model and optimizer;
        tensors are not copied."""
        return {
            "steps": self.steps,
            "settings": asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; the next step then gives the bits that it gave in the
        trainer that was saved."""
        self.model.load_state_dict(state["model"])
        rate = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.load_state_dict(state["optimizer"])
        for group, value in zip(self.optimizer.param_groups, rate, strict=True):
            group["lr"] = value  # the tensor that a step fills
        self.steps = state["steps"]

    def save(self, path: Path, **more: Any) -> None:
        """Write a checkpoint of the trainer's state and `more` to `path`, whole: the file is
        renamed at the end.

        An error leaves the old checkpoint.

        Raises:
            FloatingPointError: a step failed (`check_finite`), or a parameter or a moment of
                AdamW's is not finite.
            OSError: the file cannot be written, for want of room for instance.
        """
        self.check_finite()
        state = self.state()
        if name := _not_finite(state):
            raise FloatingPointError(
                f"{name} must be finite, got nan or inf after step {self.steps}"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("wb") as file:  # of its own files torch does not say what went wrong
                torch.save({**state, **more}, file)
        except (OSError, RuntimeError) as error:
            partial.unlink(missing_ok=True)  # so that there is room again
            reason: BaseException = error
            while isinstance(reason.__context__, OSError | RuntimeError):
                reason = reason.__context__
            raise OSError(f"{path} must be written whole, got {reason}") from error
        partial.replace(path)

    def load(self, path: Path) -> dict[str, Any]:
        """Read a checkpoint, restore the trainer's state from it, and return all that it holds,
        `more` of `save` included.

        Raises:
            ValueError: the checkpoint is damaged, not finite, or of a model with other parameters.
        """
        try:
            state: dict[str, Any] = torch.load(path, map_location=self.device, weights_only=True)
        except OSError:
            raise
        except Exception as error:  # what torch.load raises depends on where a file is damaged
            raise ValueError(f"{path} must be a whole checkpoint, got {error}") from error
        try:
            self.load_state(state)
        except (RuntimeError, KeyError) as error:
            raise ValueError(f"{path} must be of this model, got {error}") from error
        if name := _not_finite(state):
            raise ValueError(f"{path} must be finite (begin anew), got nan or inf in {name}")
        return state

    def _make_optimizer(self) -> torch.optim.AdamW:
        parameters = list(self.model.parameters())
        is_cuda = self.device.type == "cuda"
        # A rate on the device: a step that is captured, or only submitted, reads it there.
        rate = torch.tensor(0.0, device=self.device) if is_cuda else 0.0
        groups = [
            {
                "params": [p for p in parameters if p.dim() >= 2],
                "weight_decay": self.settings.decay,
            },
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            groups,
            lr=rate,
            betas=self.settings.betas,
            eps=self.settings.eps,
            fused=True,
            capturable=is_cuda,
        )

    def _set_learning_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _forward(
        self,
        ids: Tensor,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        longest: int,
        places: Tensor | None,
        targets: Tensor,
    ) -> Tensor:
        return self._loss(self._features_of(ids, positions, cu_seqlens, longest, places), targets)

    def _features_of(
        self,
        ids: Tensor,
        positions: Tensor | None,
        cu_seqlens: Tensor | None,
        longest: int,
        places: Tensor | None,
    ) -> Tensor:
        """Return the hidden states (R, E) that the output head multiplies: of all tokens, or of a
        BERT's masked places."""
        documents = None if cu_seqlens is None else decoder.Documents(cu_seqlens, longest)
        model, deterministic = self.model, self.settings.deterministic
        if isinstance(model, Bert):
            assert positions is not None
            assert places is not None
            features: Tensor = model(
                ids, positions, documents, places, dtype=self.dtype, deterministic=deterministic
            )
            return features
        x = decoder.hidden_states(
            model, ids, positions, documents, dtype=self.dtype, deterministic=deterministic
        )
        return x.flatten(0, -2)

    def _loss(self, x: Tensor, targets: Tensor) -> Tensor:
        model = self.model
        is_tied = isinstance(model, Bert) or model.lm_head is None
        weight = model.get_parameter("embed_tokens.weight" if is_tied else "lm_head.weight")
        bias = model.head_bias if isinstance(model, Bert) else None
        loss: Tensor = self._loss_of(x, weight, bias, targets.flatten(), self.words)
        return loss

    def _plain_loss(self, batch: Batch) -> Tensor:
        """Return the loss of a batch by the plain forward pass, so that nothing is compiled for
        evaluation."""
        return self._forward(*_inputs(batch), batch.targets)


def _not_finite(state: dict[str, Any]) -> str | None:
    """Return the name of the first parameter, or moment of AdamW, in `state` that is not finite;
    None if all are."""
    tensors = dict(state["model"])
    for index, moments in state["optimizer"]["state"].items():
        tensors |= {f"{name} of parameter {index}": x for name, x in moments.items()}
    names = list(tensors)
    if not names:
        return None
    finite = torch.stack([torch.isfinite(tensors[name]).all().cpu() for name in names])
    return None if finite.all() else names[int(finite.int().argmin())]


_Inputs = tuple[Tensor, Tensor | None, Tensor | None, int, Tensor | None]


def _inputs(batch: Batch) -> _Inputs:
    """Return ids, positions, cu_seqlens, max_seqlen and places of a batch, as the forward pass
    takes them; max_seqlen is 0 for rows."""
    documents = batch.documents
    cu_seqlens = None if documents is None else documents.cu_seqlens
    longest = 0 if documents is None else documents.max_seqlen
    return batch.ids, batch.positions, cu_seqlens, longest, batch.places
