"""Checkpoints in quantised formats, written as the formats' libraries write them.

Each writer takes a weight (N, K), float32, and returns the tensors of the module by their suffixes,
and the values that they stand for, computed element by element from the published layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that stands at each place of a word
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0)  # fmt: skip


def _words(codes: Tensor, bits: int) -> Tensor:
    """Return int32 (..., n) of codes (..., n * 32 / bits), the lowest first."""
    per = 32 // bits
    parts = codes.long().unflatten(-1, (-1, per)) << (bits * torch.arange(per))
    total = parts.sum(-1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def _groups(weight: Tensor, size: int) -> Tensor:
    return weight.unflatten(1, (-1, size))


def _asymmetric(weight: Tensor, size: int, bits: int, dtype: torch.dtype):
    """Return codes (N, K), zero points and scales (N, K / size) of unsigned integers."""
    groups, most = _groups(weight, size), 2**bits - 1
    low, high = groups.amin(-1), groups.amax(-1)
    scales = ((high - low).clamp(min=1e-3) / most).to(dtype)
    zeros = (-low / scales.float()).round().clamp(1, most)
    codes = (groups / scales.float().unsqueeze(-1) + zeros.unsqueeze(-1)).round().clamp(0, most)
    return codes.flatten(1), zeros, scales


def _values(codes: Tensor, zeros: Tensor, scales: Tensor, size: int) -> Tensor:
    """Return (code - zero) * scale in the dtype of the scales, as the formats' libraries do."""
    spread = (t.repeat_interleave(size, 1) for t in (zeros, scales))
    zero, scale = spread
    return ((codes - zero).to(scales.dtype) * scale).float()


def awq(weight: Tensor) -> Written:
    codes, zeros, scales = _asymmetric(weight, 32, 4, torch.float16)

    def laid(x: Tensor) -> Tensor:  # (rows, N) -> words of eight outputs in AWQ's order
        return _words(x.unflatten(1, (-1, 8))[..., list(_AWQ_PLACES)].flatten(1), 4)

    tensors = {"qweight": laid(codes.T), "qzeros": laid(zeros.T), "scales": scales.T.contiguous()}
    return tensors, _values(codes, zeros, scales, 32)


def _gptq(weight: Tensor, bits: int, *, less: int = 1, order: bool = False) -> Written:
    columns = weight.shape[1]
    group = torch.arange(columns) // 32
    if order:
        group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    by_group = torch.argsort(group, stable=True)
    codes, zeros, scales = _asymmetric(weight[:, by_group], 32, bits, torch.float16)
    back = torch.argsort(by_group)
    tensors = {
        # Packed along the inputs: a word has neighbours of one output.
        "qweight": _words(codes[:, back], bits).T.contiguous(),
        "qzeros": _words((zeros - less).T.contiguous(), bits),
        "scales": scales.T.contiguous(),
        "g_idx": group.int(),
    }
    return tensors, _values(codes, zeros, scales, 32)[:, back]


def gptq(weight: Tensor) -> Written:
    return _gptq(weight, 4)


def gptq_v2(weight: Tensor) -> Written:
    return _gptq(weight, 4, less=0)


def gptq_order(weight: Tensor) -> Written:
    return _gptq(weight, 4, order=True)


def gptq_8bit(weight: Tensor) -> Written:
    return _gptq(weight, 8)


def _packed(weight: Tensor, bits: int, *, symmetric: bool, order: bool = False) -> Written:
    columns, half = weight.shape[1], 2 ** (bits - 1)
    group = torch.arange(columns) // 32
    if order:
        group = group[torch.randperm(columns, generator=torch.Generator().manual_seed(1))]
    by_group = torch.argsort(group, stable=True)
    back = torch.argsort(by_group)
    codes, zeros, scales = _asymmetric(weight[:, by_group], 32, bits, torch.bfloat16)
    if symmetric:
        zeros = torch.full_like(zeros, half)
        largest = _groups(weight[:, by_group], 32).abs().amax(-1)
        scales = (largest / (half - 1)).to(torch.bfloat16)
        wide = _groups(weight[:, by_group], 32) / scales.float().unsqueeze(-1)
        codes = (wide.round() + half).clamp(0, 2 * half - 1).flatten(1)
    tensors = {
        "weight_packed": _words(codes[:, back], bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = _words(zeros.T.contiguous(), bits).T.contiguous()
    if order:
        tensors["weight_g_idx"] = group.int()
    return tensors, _values(codes, zeros, scales, 32)[:, back]


def pack_4(weight: Tensor) -> Written:
    return _packed(weight, 4, symmetric=True)


def pack_4_zeros(weight: Tensor) -> Written:
    return _packed(weight, 4, symmetric=False)


def pack_4_order(weight: Tensor) -> Written:
    return _packed(weight, 4, symmetric=True, order=True)


def pack_8(weight: Tensor) -> Written:
    return _packed(weight, 8, symmetric=True)


def int8_rows(weight: Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    codes = (weight / scales.float()).round().clamp(-128, 127)
    values = (codes.to(torch.bfloat16) * scales).float()
    return {"weight": codes.to(torch.int8), "weight_scale": scales}, values


def fp8_blocks(weight: Tensor) -> Written:
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // 32), -(-columns // 32))
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    values = torch.empty(rows, columns)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(32 * i, 32 * i + 32), slice(32 * j, 32 * j + 32)
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
            values[at] = codes[at].float() * scales[i, j]
    return {"weight": codes, "weight_scale_inv": scales}, values


def _fp8(weight: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    codes = (weight / scales.float()).to(torch.float8_e4m3fn)
    return codes, codes.float() * scales.float()


def fp8_tensor(weight: Tensor) -> Written:
    scale = (weight.abs().max() / 448).reshape(())
    codes, values = _fp8(weight, scale)
    return {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, values


def fp8_rows(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes, values = _fp8(weight, scales)
    return {"weight": codes, "weight_scale": scales}, values


def _fp4(weight: Tensor, whole: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return bytes, e4m3 scales and values; W = fp4 * scale * whole."""
    groups = _groups(weight, 16)
    scales = (groups.abs().amax(-1) / 6 / whole).to(torch.float8_e4m3fn)
    factor = scales.float() * torch.tensor(whole)
    table = torch.tensor([*_FP4, *(-x for x in _FP4)])
    small = groups / factor.clamp(min=1e-12).unsqueeze(-1)
    codes = (small.unsqueeze(-1) - table).abs().argmin(-1)
    values = (table[codes] * factor.unsqueeze(-1)).flatten(1)
    flat = codes.flatten(1).to(torch.uint8)
    return flat[:, 0::2] | flat[:, 1::2] << 4, scales, values


def nvfp4_modelopt(weight: Tensor) -> Written:
    whole = 2.0**-9
    codes, scales, values = _fp4(weight, whole)
    tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": torch.tensor(whole),
               "input_scale": torch.tensor(1.0)}  # fmt: skip
    return tensors, values


def nvfp4_packed(weight: Tensor) -> Written:
    whole = 2.0**-9
    codes, scales, values = _fp4(weight, whole)
    tensors = {"weight_packed": codes, "weight_scale": scales,
               "weight_global_scale": torch.tensor([1 / whole])}  # fmt: skip
    return tensors, values


def _nf4(weight: Tensor, *, nested: bool) -> Written:
    rows, columns = weight.shape
    blocks = weight.reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16",
                             "shape": [rows, columns]}  # fmt: skip
    tensors = {"weight.quant_map": torch.tensor(_NF4)}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32",
                  "nested_offset": absmax.mean().item()}  # fmt: skip
        table = torch.linspace(-1, 1, 256)
        centred = absmax - state["nested_offset"]
        parts = [p.abs().max() for p in centred.split(256)]
        factors = torch.stack(parts)
        scaled = centred / factors.repeat_interleave(256)[: len(centred)]
        index = (scaled.unsqueeze(1) - table).abs().argmin(1)
        tensors |= {"weight.absmax": index.to(torch.uint8), "weight.nested_absmax": factors,
                    "weight.nested_quant_map": table}  # fmt: skip
        absmax = table[index] * factors.repeat_interleave(256)[: len(index)]
        absmax = absmax + state["nested_offset"]
    else:
        tensors["weight.absmax"] = absmax
    codes = ((blocks / absmax.unsqueeze(1)).unsqueeze(-1) - torch.tensor(_NF4)).abs().argmin(-1)
    values = (torch.tensor(_NF4)[codes] * absmax.unsqueeze(1)).view(rows, columns)
    flat = codes.flatten().to(torch.uint8)
    tensors["weight"] = (flat[0::2] << 4 | flat[1::2]).unsqueeze(1)
    told = json.dumps(state).encode()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(told), dtype=torch.uint8)
    return tensors, values


def nf4(weight: Tensor) -> Written:
    return _nf4(weight, nested=False)


def nf4_nested(weight: Tensor) -> Written:
    return _nf4(weight, nested=True)


def bnb_int8(weight: Tensor) -> Written:
    largest = weight.abs().amax(1)
    codes = (weight * 127 / largest.unsqueeze(1)).round()
    values = codes * (largest / 127).unsqueeze(1)
    return {"weight": codes.to(torch.int8), "SCB": largest}, values


def _hqq(weight: Tensor, bits: int) -> Written:
    rows, columns = weight.shape
    groups, most = weight.reshape(-1, 64), 2**bits - 1
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    factor = most / (high - low)
    zeros, scales = (-low * factor).to(torch.float16), (1 / factor).to(torch.float16)
    codes = (groups / scales.float() + zeros.float()).round().clamp(0, most).to(torch.uint8)
    half = len(codes) // 2
    stored = codes if bits == 8 else codes[:half] << 4 | codes[half:]
    flag = torch.tensor(1, dtype=torch.uint8)
    tensors = {
        "W_q": stored, "scale": scales, "zero": zeros, "shape": torch.tensor([rows, columns]),
        "nbits": torch.tensor(bits, dtype=torch.int32), "axis": torch.tensor(1, dtype=torch.int32),
        "group_size": torch.tensor(64, dtype=torch.int32), "view_as_float": flag * 0,
        "packing": torch.tensor(list(f"{bits}bit_u8".encode()), dtype=torch.uint8),
        "encoded_state_dict": flag, "stores_quant_config": flag, "round_zero": flag * 0,
    }  # fmt: skip
    values = (codes.to(torch.float16) - zeros) * scales
    return tensors, values.reshape(rows, columns).float()


def hqq_4(weight: Tensor) -> Written:
    return _hqq(weight, 4)


def hqq_8(weight: Tensor) -> Written:
    return _hqq(weight, 8)


def _powers(groups: Tensor, largest: int) -> Tensor:
    """Return exponents (N, K / 32), a power of two for each group, with a bias of 127."""
    return (groups.abs().amax(-1).log2().floor() - largest + 127).to(torch.uint8)


def mxfp4(weight: Tensor) -> Written:
    groups = _groups(weight, 32)
    exponents = _powers(groups, 2)
    factor = torch.exp2(exponents.float() - 127).unsqueeze(-1)
    table = torch.tensor([*_FP4, *(-x for x in _FP4)])
    codes = ((groups / factor).unsqueeze(-1) - table).abs().argmin(-1)
    flat = codes.flatten(1).to(torch.uint8)
    tensors = {"weight_packed": flat[:, 0::2] | flat[:, 1::2] << 4, "weight_scale": exponents}
    return tensors, (table[codes] * factor).flatten(1)


def mxfp4_quark(weight: Tensor) -> Written:
    tensors, values = mxfp4(weight)
    return {"weight": tensors["weight_packed"], "weight_scale": tensors["weight_scale"]}, values


def mxfp8(weight: Tensor) -> Written:
    groups = _groups(weight, 32)
    exponents = _powers(groups, 8)
    factor = torch.exp2(exponents.float() - 127).unsqueeze(-1)
    codes = (groups / factor).clamp(-448, 448).to(torch.float8_e4m3fn)
    values = (codes.float() * factor).flatten(1)
    return {"weight": codes.flatten(1), "weight_scale": exponents}, values


def torchao_int4(weight: Tensor) -> Written:
    """Int4Tensor: signed codes about the middle of a group, scales and middles transposed."""
    groups = _groups(weight, 32)
    low, high = groups.amin(-1), groups.amax(-1)
    scales = (high - low).clamp(min=1e-6) / 16
    middles = low + 8 * scales
    codes = ((groups - low.unsqueeze(-1)) / scales.unsqueeze(-1)).round().clamp(0, 15) - 8
    scales, middles = scales.to(torch.bfloat16), middles.to(torch.bfloat16)
    flat = codes.flatten(1).to(torch.int8)
    packed = (flat[:, 0::2] & 15) | (flat[:, 1::2] << 4)
    tensors = {"_weight_qdata": packed, "_weight_scale": scales.T.contiguous(),
               "_weight_zero_point": middles.T.contiguous()}  # fmt: skip
    values = codes * scales.float().unsqueeze(-1) + middles.float().unsqueeze(-1)
    return tensors, values.flatten(1)


def torchao_tiles(weight: Tensor) -> Written:
    """Int4TilePackedTo4dTensor: what a lane of the tensor cores takes lies in one word."""
    tensors, values = torchao_int4(weight)
    rows, columns = weight.shape
    signed = tensors["_weight_qdata"]
    codes = torch.stack((signed & 15, (signed >> 4) & 15), -1).flatten(1)
    codes = ((codes + 8) & 15).long()  # from -8 ... 7 to 0 ... 15
    words = torch.zeros(rows // 8, columns // 128, 32, 4, dtype=torch.long)
    for lane in range(32):
        for pair in range(4):
            k = 32 * pair + 2 * (lane % 4)
            v = [codes[lane // 4 :: 8, k + j :: 128] for j in (0, 1, 8, 9, 16, 17, 24, 25)]
            for place, one in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
                words[:, :, lane, pair] |= v[one] << (4 * place)
    signed_words = torch.where(words >= 2**31, words - 2**32, words).int()
    both = torch.stack((tensors["_weight_scale"], tensors["_weight_zero_point"]), -1)
    return {"_weight_qdata": signed_words, "_weight_scale_and_zero": both}, values


def torchao_intx(weight: Tensor) -> Written:
    codes, zeros, scales = _asymmetric(weight, 32, 4, torch.bfloat16)
    tensors = {"_weight_qdata": (codes - 8).to(torch.int8), "_weight_scale": scales,
               "_weight_zero_point": (zeros - 8).to(torch.int8)}  # fmt: skip
    return tensors, _values(codes, zeros, scales, 32)


def torchao_int8(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round().clamp(-128, 127)
    tensors = {"_weight_qdata": codes.to(torch.int8), "_weight_scale": scales,
               "_weight_zero_point": torch.zeros_like(scales, dtype=torch.int8)}  # fmt: skip
    return tensors, codes * scales


def torchao_fp8(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes, values = _fp8(weight, scales)
    return {"_weight_qdata": codes, "_weight_scale": scales}, values


def _hqq_config(bits: int) -> dict[str, Any]:
    weights = {"nbits": bits, "group_size": 64, "axis": 1, "channel_wise": True, "optimize": True}
    scheme = {"weight_quant_params": weights, "scale_quant_params": None, "offload_meta": False}
    return {"quant_method": "hqq", "quant_config": scheme, "skip_modules": ["lm_head"]}


def _quark(**weight: Any) -> dict[str, Any]:
    scheme = {"weight": weight | {"symmetric": True}, "input_tensors": None, "bias": None}
    return {"quant_method": "quark", "global_quant_config": scheme, "exclude": ["lm_head"],
            "layer_type_quant_config": {}, "layer_quant_config": {},
            "export": {"kv_cache_group": []}}  # fmt: skip


def _torchao(name: str) -> dict[str, Any]:
    kind = {"default": {"_type": name, "_version": 2, "_data": {}}}
    return {"quant_method": "torchao", "quant_type": kind, "modules_to_not_convert": ["lm_head"]}


def _compressed(name: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": name, "ignore": ["lm_head"],
            "config_groups": {"group_0": group}, "quantization_status": "compressed"}  # fmt: skip


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FORMATS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True,
                  "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False,
                    "sym": False}),
    "gptq-v2": (gptq_v2, {"quant_method": "gptq", "bits": 4, "group_size": 32,
                          "checkpoint_format": "gptq_v2"}),
    "gptq-order": (gptq_order, {"quant_method": "gptq", "bits": 4, "group_size": 32,
                                "desc_act": True}),
    "gptq-8bit": (gptq_8bit, {"quant_method": "gptq", "bits": 8, "group_size": 32}),
    "auto-round": (gptq, {"quant_method": "auto-round", "bits": 4, "group_size": 32,
                          "packing_format": "auto_round:auto_gptq"}),
    "auto-round-awq": (awq, {"quant_method": "auto-round", "bits": 4, "group_size": 32,
                             "packing_format": "auto_round:auto_awq"}),
    "w4a16": (pack_4, _compressed("pack-quantized", **_INT4, symmetric=True)),
    "w4a16-zeros": (pack_4_zeros, _compressed("pack-quantized", **_INT4, symmetric=False)),
    "w4a16-order": (pack_4_order, _compressed("pack-quantized", **_INT4, actorder="group")),
    "w8a16": (pack_8, _compressed("pack-quantized", **(_INT4 | {"num_bits": 8}))),
    "w8a8": (int8_rows, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "fp8-dynamic": (fp8_rows, _compressed("float-quantized", num_bits=8, type="float",
                                          strategy="channel")),
    "fp8-static": (fp8_tensor, _compressed("float-quantized", num_bits=8, type="float",
                                           strategy="tensor")),
    "fp8-blocks": (fp8_blocks, {"quant_method": "fp8", "fmt": "e4m3",
                                "activation_scheme": "dynamic", "weight_block_size": [32, 32]}),
    "fp8": (fp8_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fbgemm": (fp8_rows, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "modelopt-fp8": (fp8_tensor, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt-nvfp4": (nvfp4_modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4": (nvfp4_packed, _compressed("nvfp4-pack-quantized", num_bits=4, type="float",
                                        strategy="tensor_group", group_size=16)),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True,
                  "bnb_4bit_quant_type": "nf4"}),
    "nf4-nested": (nf4_nested, {"quant_method": "bitsandbytes", "load_in_4bit": True,
                                "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}),
    "bnb-int8": (bnb_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "hqq": (hqq_4, _hqq_config(4)),
    "hqq-8bit": (hqq_8, _hqq_config(8)),
    "mxfp4": (mxfp4, _compressed("mxfp4-pack-quantized", num_bits=4, type="float",
                                 strategy="group", group_size=32, scale_dtype="torch.uint8")),
    "mxfp8": (mxfp8, _compressed("mxfp8-quantized", num_bits=8, type="float", strategy="group",
                                 group_size=32, scale_dtype="torch.uint8")),
    "modelopt-mxfp8": (mxfp8, {"quant_method": "modelopt", "quant_algo": "MXFP8"}),
    "quark-mxfp4": (mxfp4_quark, _quark(dtype="fp4", qscheme="per_group", group_size=32,
                                        scale_format="e8m0")),
    "quark-fp8": (fp8_tensor, _quark(dtype="fp8_e4m3", qscheme="per_tensor")),
    "torchao-int4": (torchao_int4, _torchao("Int4WeightOnlyConfig")),
    "torchao-intx4": (torchao_intx, _torchao("IntxWeightOnlyConfig")),
    "torchao-int8": (torchao_int8, _torchao("Int8WeightOnlyConfig")),
    "torchao-fp8": (torchao_fp8, _torchao("Float8WeightOnlyConfig")),
}  # fmt: skip
"""By name: the writer, and the quantization_config of config.json."""


def quantised_by(name: str, weight: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a module's tensors in a format, and the quantization_config."""
    writer, told = FORMATS[name]
    return writer(weight)[0], told


def quantise(
    plain: Path, to: Path, name: str, *, keep: tuple[str, ...] = ("lm_head", "embed_tokens", "norm")
) -> Path:
    """Write a float checkpoint in a format; return a float checkpoint of the values it stands for.

    Args:
        plain: a checkpoint of one file.
        to: a folder for two checkpoints, "narrow" and "wide".
        name: of FORMATS.
        keep: parts of names of weights that stay wide.
    """
    writer, told = FORMATS[name]
    tensors = load_file(plain / "model.safetensors")
    narrow, wide = {}, {}
    for source, tensor in tensors.items():
        is_matrix = source.endswith(".weight") and tensor.dim() == 2
        if not is_matrix or any(part in source for part in keep):
            narrow[source], wide[source] = tensor, tensor
            continue
        module = source.removesuffix(".weight")
        parts, wide[source] = writer(tensor.float())
        narrow |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    config = json.loads((plain / "config.json").read_text())
    for folder, held, more in (
        ("narrow", narrow, {"quantization_config": told}),
        ("wide", wide, {}),
    ):
        (to / folder).mkdir()
        save_file({k: v.clone() for k, v in held.items()}, to / folder / "model.safetensors")
        (to / folder / "config.json").write_text(json.dumps(config | more))
    return to / "wide"
