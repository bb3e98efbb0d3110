"""Decoders and their checkpoints: Llama, Mistral, Qwen2, Qwen3, GPT-2."""

from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.registry import build_model, load_model
from tilewise.models.trained_adapter import adapter_tensors, train_adapter
from tilewise.models.weights import save_model

__all__ = [
    "Decoder",
    "ModelConfig",
    "adapter_tensors",
    "build_model",
    "load_model",
    "save_model",
    "train_adapter",
]
