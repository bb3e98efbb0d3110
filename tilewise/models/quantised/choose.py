"""Which quantised format a checkpoint has, from whichever of its files says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tilewise.errors import CheckpointError
from tilewise.models.config_fields import read_object
from tilewise.models.quantised.bitsandbytes import bitsandbytes
from tilewise.models.quantised.compressed import compressed_tensors
from tilewise.models.quantised.float4 import modelopt_nvfp4
from tilewise.models.quantised.float8 import fbgemm, fp8, modelopt_fp8
from tilewise.models.quantised.format import Format
from tilewise.models.quantised.gptq import auto_round, awq, gptq
from tilewise.models.quantised.hqq import hqq
from tilewise.models.quantised.microscaling import modelopt_mxfp8, quark
from tilewise.models.quantised.torchao import torchao

__all__ = ["FORMATS", "format_of", "quantisation_of"]

FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Format]] = {
    "fp8": fp8,
    "fbgemm_fp8": fbgemm,
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
    "auto-round": auto_round,
    "bitsandbytes": bitsandbytes,
    "hqq": hqq,
    "quark": quark,
    "torchao": torchao,
}
_MODELOPT = {"FP8": modelopt_fp8, "NVFP4": modelopt_nvfp4, "MXFP8": modelopt_mxfp8}
_OF_MODELOPT = "hf_quant_config.json"
_OF_TOOLS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def quantisation_of(directory: str | Path) -> Format | None:
    """Return the quantised format of a checkpoint; None if its weights are floats.

    Formats that a family reads by itself (gpt-oss's MXFP4) are None, too.

    Raises:
        CheckpointError: the format is not served, or an option of it; the message names it.
    """
    directory = Path(directory)
    config = read_object(directory / "config.json")
    told = _of(config) or _of(config.get("text_config") or {})
    if told is None and (directory / _OF_MODELOPT).is_file():
        told = {"quant_method": "modelopt", **read_object(directory / _OF_MODELOPT)}
    for name, method in _OF_TOOLS.items():
        if told is None and (directory / name).is_file():
            told = {"quant_method": method, **read_object(directory / name)}
    if told is None or told.get("quant_method") == "mxfp4":
        return None
    return format_of(told)


def _of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    found = config.get("quantization_config")
    return dict(found) if isinstance(found, Mapping) else None


def format_of(told: Mapping[str, Any]) -> Format:
    """Return the format that a quantization_config describes.

    Args:
        told: the configuration, whose quant_method names a format.

    Raises:
        CheckpointError: the format is missing or not served, or an option of it is not; the message
            names the format or the option.
    """
    method = str(told.get("quant_method", "unknown"))
    if method == "modelopt":
        inner = told.get("quantization")
        inner = told if not isinstance(inner, Mapping) else inner
        name = str(inner.get("quant_algo"))
        if name in _MODELOPT:
            return _MODELOPT[name](inner)
        raise CheckpointError(
            f"quant_algo of ModelOpt must be one of {', '.join(_MODELOPT)}, got {name}"
        )
    if method not in FORMATS:
        names = ", ".join((*FORMATS, "modelopt"))
        raise CheckpointError(f"quant_method must be one of {names}, got {method!r}")
    return FORMATS[method](told)
