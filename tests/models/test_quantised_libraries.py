"""Quantised weights beside the values of the formats' own libraries, where these are installed.

They are no dependencies: compressed-tensors, torchao, bitsandbytes and hqq.
"""

from __future__ import annotations

import pytest
import torch

from tests.models.quantised_files import FORMATS, quantised_by
from tilewise.models.quantised import Stored
from tilewise.models.quantised.choose import format_of


@pytest.fixture
def weight():
    return torch.randn(192, 256, generator=torch.Generator().manual_seed(0)) * 0.1


def values(tensors, told):
    found = format_of(told).read(Stored("m", frozenset(tensors), lambda s: tensors[s]))
    found.check()
    return found.dequantise()


@pytest.mark.parametrize(
    "name",
    ["w4a16", "w4a16-zeros", "w8a16", "w8a8", "fp8-dynamic", "fp8-static", "nvfp4", "mxfp4",
     "mxfp8"],
)  # fmt: skip
def test_compressed_tensors(name, weight):
    base = pytest.importorskip("compressed_tensors.compressors.base")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    tensors, told = quantised_by(name, weight)
    scheme = dict(told["config_groups"]["group_0"]["weights"])
    if "scale_dtype" in scheme:
        scheme["scale_dtype"] = torch.uint8
    args = quantization.QuantizationArgs(**scheme)
    whole = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    reader = base.BaseCompressor.get_value_from_registry(told["format"])
    wanted = reader.decompress({k: v.clone() for k, v in tensors.items()}, whole)["weight"]
    assert torch.equal(values(tensors, told).to(wanted.dtype), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(kind, is_nested, dtype, weight):
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(
        weight.to(dtype), quant_type=kind, compress_statistics=is_nested, blocksize=64
    )
    parts = state.as_dict(packed=True)
    tensors = {"weight": codes} | {f"weight.{name}": part for name, part in parts.items()}
    told = FORMATS["nf4"][1] | {"bnb_4bit_quant_type": kind}
    assert torch.equal(values(tensors, told).to(dtype), functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("kind", ["int8", "fp8", "intx4"])
def test_torchao(kind, weight):
    made = pytest.importorskip("torchao.quantization")
    stored = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    wide = weight.bfloat16()
    found = {
        "int8": lambda: made.Int8Tensor.from_hp(wide, made.PerRow()),
        "fp8": lambda: made.Float8Tensor.from_hp(wide, granularity=made.PerRow()),
        "intx4": lambda: made.IntxUnpackedToInt8Tensor.from_hp(wide, (1, 32), torch.int4),
    }[kind]()
    tensors, _ = stored.flatten_tensor_state_dict({"m.weight": found})
    tensors = {name.removeprefix("m."): part for name, part in tensors.items()}
    told = FORMATS[f"torchao-{kind}"][1]
    assert torch.equal(values(tensors, told).bfloat16(), found.dequantize())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", [4, 8])
def test_hqq(bits, dtype, weight):
    library = pytest.importorskip("hqq.core.quantize")
    made = library.Quantizer.quantize(
        weight, nbits=bits, group_size=64, axis=1, optimize=False, device="cpu"
    )
    codes, told = library.Quantizer.cpu(made[0], made[1] | {"compute_dtype": dtype})
    parts = {name: library.encode_safetensor_type(part) for name, part in told.items()}
    found = values({"W_q": codes} | parts, FORMATS["hqq"][1])
    assert torch.equal(found, library.Quantizer.dequantize(codes, told))
