"""Decoders and their checkpoints: Llama, Mistral, Qwen2, Qwen3, GPT-2."""

from tilewise.models.config import ModelConfig
from tilewise.models.decoder import Decoder
from tilewise.models.registry import build_model, load_model
from tilewise.models.weights import save_model

__all__ = ["Decoder", "ModelConfig", "build_model", "load_model", "save_model"]
