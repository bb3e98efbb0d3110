"""What a training step must compute, and which share of a device's peak that is (MFU)."""

from __future__ import annotations

import torch

__all__ = ["PEAKS", "attention_flops", "peak_of", "product_flops"]

# Dense bfloat16 FLOP/s by the vendor's data sheets, by a part of the device's name. MFU is counted
# against them, as papers do, though no product reaches them (747e12 was measured on an H200).
PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "4090": 165e12,
}


def peak_of(device: torch.device) -> float | None:
    """Return the peak bfloat16 FLOP/s of a device by its name, see PEAKS; None for a CPU or an
    unknown GPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def product_flops(parameters: int) -> int:
    """Return the training FLOPs per token of products with `parameters` weights: 2 forward, 4
    backward each.

    The number should leave out an embedding that is only looked up, and count one that is the
    output head, too. Source: Kaplan et al., 2020, section 2.1.
    """
    return 6 * parameters


def attention_flops(pairs: float, *, num_layers: int, channels: int, causal: bool) -> float:
    """Return the FLOPs of attention, forward and backward, in all layers.

    Two products forward, four backward (the recomputed logits do not count), 2 FLOPs each; causal
    attention sees half of the pairs.

    Args:
        pairs: sum of the squared lengths of all sequences.
        channels: query heads times head_dim.
    """
    return 12.0 * num_layers * channels * pairs * (0.5 if causal else 1.0)
