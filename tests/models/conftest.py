"""Lets `with torch.device("meta")` work while the fresh-memory poison replaces torch.empty."""

from __future__ import annotations

import torch

# torch remembers at the first use of a device context which functions make tensors; that must
# happen before the poison puts its own function in place of torch.empty.
with torch.device("meta"):
    torch.empty(0)
