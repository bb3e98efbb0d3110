"""The folder of the kernel as the hub has it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from tilewise.version import __version__
from tools.hub_kernel.rewrite import ROOT, copy, modules

__all__ = ["BACKENDS", "NAME", "PYTHON_NAME", "VERSION", "build"]

NAME = "tilewise-attention"
PYTHON_NAME = NAME.replace("-", "_")
VERSION = 1  # of the kernel's interface, which the hub's branches are named after: v1
BACKENDS = ("cpu", "cuda")

_BUILD = f"""\
[general]
name = "{NAME}"
version = {VERSION}
license = "Apache-2.0"
backends = [{", ".join(f'"{backend}"' for backend in BACKENDS)}]

[torch-noarch]
"""

_INIT = '''\
"""Exact attention in flash-attn's names, on a CPU and on CUDA; see README.md."""

from .integrations.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from .masks import BlockMask
from .ops import attention, attention_varlen, mla_decode, paged_attention

__all__ = [
    "BlockMask",
    "attention",
    "attention_varlen",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "mla_decode",
    "paged_attention",
]
'''

_CARD = f"""\
---
license: apache-2.0
library_name: kernels
tags: [kernels, attention]
---

# {NAME}

Exact attention, forward and backward, in pure Python: kernels in Gluon for Hopper and for compute
capability 8.x and 12.x, in Triton for other GPUs, in numba for CPUs (`pip install numba` there).
Made of tilewise {__version__}.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(
    name, attn_implementation="ORG/{NAME}", allow_all_kernels=True
)
```

```python
from kernels import get_kernel

attention = get_kernel("ORG/{NAME}", version={VERSION}, trust_remote_code=["ORG/{NAME}"])
o = attention.flash_attn_func(q, k, v, causal=True)  # (batch, tokens, heads, head dim)
```

The functions are flash-attn 2.8's; grouped heads, windows, softcap, ALiBi, dropout, packed
sequences and paged caches included. `attention`, `attention_varlen`, `paged_attention` and
`mla_decode` are tilewise's own.
"""


def build(out: Path) -> Path:
    """Write the kernel's folder: build.toml, card, sources in torch-ext, a build for each backend.

    Args:
        out: a folder that is not there, or one that an earlier call wrote.

    Returns:
        out, in which `kernels.get_local_kernel(out)` finds the kernel.

    Raises:
        ValueError: out holds something else.
    """
    if out.exists():
        if not (out / "build.toml").exists():
            raise ValueError(f"out must be a new folder or an earlier kernel, got {out}")
        shutil.rmtree(out)
    identity = _identity()
    sources = out / "torch-ext" / PYTHON_NAME
    copy(sources, f"{PYTHON_NAME}_{identity}")
    (sources / "__init__.py").write_text(_INIT)
    shutil.copy(ROOT.parent / "LICENSE", out / "LICENSE")
    (out / "build.toml").write_text(_BUILD)
    (out / "README.md").write_text(_CARD)
    for backend in BACKENDS:
        variant = out / "build" / f"torch-{backend}"
        shutil.copytree(sources, variant)
        metadata = {
            "name": NAME,
            "id": f"_{PYTHON_NAME}_{backend}_{identity}",
            "version": VERSION,
            "license": "Apache-2.0",
            "python-depends": [],
            "backend": {"type": backend},
        }
        (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    return out


def _identity() -> str:
    """Return a name of the sources, so that two versions of the kernel may be in one process."""
    digest = hashlib.sha256(_INIT.encode())
    for relative in modules():
        digest.update(f"{relative.as_posix()}\0".encode())
        digest.update((ROOT / relative).read_bytes())
    return digest.hexdigest()[:10]
