"""Errors of log-probabilities with quantised weights, beside those of the formats' own libraries.

    python lab/weight_errors.py --json lab/results/weight_errors_cpu.json

The packaged model is written in each format, and reads its own samples. A row has the mean and the
largest distance of the log-probabilities of the tokens from those of the dequantised weights in
float32, of three ways in bfloat16 on this CPU: an engine, which keeps weights narrow; the products
of the format's own library, where it is installed (bitsandbytes, hqq, torchao), in the place of the
linear layers; and torch's products of the dequantised weights, as transformers computes with other
formats. What is no product is the same in the last two.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models.quantised_files import FORMATS, quantise
from tilewise import LLM, SamplingParams
from tilewise.bench.roofline import device_name
from tilewise.engine.settings import packaged_model
from tilewise.models import load_model

LENGTH, SEQUENCES = 256, 8
KEPT = ("lm_head", "embed_tokens", "norm")


class Called(nn.Module):
    """A linear layer by a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        return self.function(x)


Product = tuple[Tensor, Callable[[Tensor], Tensor]]


def by_bitsandbytes(name: str, weight: Tensor) -> Product:
    """Return the values in float32, and the product of `Linear4bit`."""
    import bitsandbytes.functional as library

    codes, state = library.quantize_4bit(
        weight, quant_type="nf4", blocksize=64, compress_statistics="nested" in name
    )
    values = library.dequantize_4bit(codes, state)
    return values, lambda x: F.linear(x, library.dequantize_4bit(codes, state).to(x.dtype))


def by_torchao(name: str, weight: Tensor) -> Product:
    """Return the values, and the product by the dispatch of torchao's tensor."""
    from torchao import quantization as library

    wide = weight.bfloat16()
    made: Any = {
        "torchao-int8": lambda: library.Int8Tensor.from_hp(wide, library.PerRow()),
        "torchao-fp8": lambda: library.Float8Tensor.from_hp(wide, granularity=library.PerRow()),
        "torchao-intx4": lambda: library.IntxUnpackedToInt8Tensor.from_hp(
            wide, (1, 32), torch.int4
        ),
    }[name]()
    return made.dequantize().float(), lambda x: F.linear(x, made)


def by_hqq(name: str, weight: Tensor) -> Product:
    """Return the values, and the product of `HQQLinear`."""
    from hqq.core.quantize import Quantizer

    codes, told = Quantizer.quantize(
        weight, nbits=8 if "8" in name else 4, group_size=64, axis=1, optimize=False, device="cpu"
    )
    wide, narrow = (
        Quantizer.cpu(codes.clone(), dict(told) | {"compute_dtype": dtype})
        for dtype in (torch.float32, torch.bfloat16)
    )
    return Quantizer.dequantize(*wide), lambda x: F.linear(x, Quantizer.dequantize(*narrow))


LIBRARIES = {
    "nf4": by_bitsandbytes, "nf4-nested": by_bitsandbytes, "torchao-int8": by_torchao,
    "torchao-fp8": by_torchao, "torchao-intx4": by_torchao, "hqq": by_hqq, "hqq-8bit": by_hqq,
}  # fmt: skip


def texts() -> Tensor:
    """Return tokens (SEQUENCES, LENGTH) of the packaged model's samples."""
    from tokenizers import Tokenizer

    folder = packaged_model()
    text = (folder / "samples.txt").read_text()
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    ids = ids * (1 + SEQUENCES * LENGTH // len(ids))
    return torch.tensor(ids[: SEQUENCES * LENGTH]).view(SEQUENCES, LENGTH)


@torch.no_grad()
def of_modules(model: Any, ids: Tensor) -> Tensor:
    """Return the log-probabilities (SEQUENCES, LENGTH - 1) of tokens by a model's modules."""
    logits = model.compute_logits(model(ids)).float()
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def of_engine(folder: Path, ids: Tensor) -> Tensor:
    """Return those of an engine in bfloat16."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(folder, dtype="bfloat16", num_blocks=256) as llm:
        made = llm.generate([{"prompt_token_ids": row.tolist()} for row in ids], params)
    rows = [
        [step[token] for step, token in zip(one.prompt_logprobs[1:], row, strict=True)]
        for one, row in zip(made, ids[:, 1:].tolist(), strict=True)
    ]
    return torch.tensor(rows)


def replaced(folder: Path, dtype: str, of: Callable[[Tensor], nn.Module]) -> Any:
    """Return a checkpoint's modules with others in the place of the linear layers."""
    model = load_model(folder, dtype=dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and not any(part in name for part in KEPT):
            above, _, own = name.rpartition(".")
            setattr(model.get_submodule(above), own, of(module.weight.detach().float()))
    return model


def distances(found: Tensor, wanted: Tensor) -> dict[str, float]:
    """Return the mean and the largest distance of log-probabilities."""
    apart = (found - wanted).abs()
    return {"mean": round(float(apart.mean()), 6), "most": round(float(apart.max()), 5)}


def row(name: str, ids: Tensor) -> dict[str, Any]:
    """Return the errors of a format."""
    plain = packaged_model()
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder)
        wide = quantise(plain, to, name, keep=KEPT)
        wanted = of_modules(load_model(wide, dtype="float32"), ids)
        found: dict[str, Any] = {
            "format": name,
            "engine": distances(of_engine(to / "narrow", ids), wanted),
            "torch": distances(of_modules(load_model(wide, dtype="bfloat16"), ids), wanted),
        }
    if name in LIBRARIES:
        by = LIBRARIES[name]
        try:
            products: list[Product] = []

            def values(weight: Tensor) -> nn.Module:
                products.append(by(name, weight))
                return Called(functools.partial(F.linear, weight=products[-1][0]))

            own = of_modules(replaced(plain, "float32", values), ids)
            turn = iter(products)
            model = replaced(plain, "bfloat16", lambda _: Called(next(turn)[1]))
            found["library"] = distances(of_modules(model, ids), own)
        except ImportError as error:
            found["library"] = f"{error}"
    return found


def main() -> None:
    """Measure, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=[*FORMATS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ids, rows = texts(), []
    for name in options.formats:
        rows.append(row(name, ids))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        told = {"device": device_name("cpu"), "torch": torch.__version__, "tokens": ids.numel()}
        options.json.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
