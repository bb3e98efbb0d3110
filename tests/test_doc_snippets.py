"""The Python blocks of the documents run as they are written.

Those of one document share a namespace, as a session does. What they take for granted (an engine,
the tensors of a step) is in GIVEN; what one CPU cannot run is in ELSEWHERE, with the reason.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

import tilewise
from tests.test_docs import DOCUMENTS, ROOT, blocks
from tilewise import LLM

STORY = str(Path(tilewise.__file__).parent / "assets" / "story")
GIVEN = {
    "docs/batch-invariance.md": """
import torch
from tilewise import LLM
from tilewise.models import load_model
directory, ids = STORY, torch.arange(6).unsqueeze(0)
""",
    "docs/cpu-engine.md": """
from tilewise import LLM
llm = LLM("story", dtype="bfloat16", weight_dtype="int8")
""",
    "docs/decode.md": """
import torch
from tilewise.testing import make_paged_cache
caches = [make_paged_cache([5, 40, 17], 16, 2, 8, seed=seed)[:2] for seed in range(2)]
*_, table, lengths = make_paged_cache([5, 40, 17], 16, 2, 8)
q, starts = torch.randn(3, 4, 8), torch.arange(4, dtype=torch.int32)
""",
    "docs/fp8.md": """
import torch
q, k, v = (torch.randn(1, 64, 2, 64, dtype=torch.bfloat16) for _ in range(3))
""",
    "docs/integrations.md": """
import types
import torch
from transformers import AutoModelForCausalLM
path = STORY
q, k, v = (torch.randn(1, heads, 16, 32) for heads in (4, 2, 2))
batch, model = q, lambda q: types.SimpleNamespace(loss=q.sum())
""",
    "docs/mla.md": """
import torch
from tilewise import mla_decode, write_latent_cache
from tilewise.nn import AttentionContext, MultiheadLatentAttention, RopeConfig, RotaryEmbedding
num_blocks, block_size, rank, rope_dim = 4, 16, 64, 32
z, k_rope, slots = torch.randn(1, rank), torch.randn(1, rope_dim), torch.tensor([3])
q_latent, q_rope = torch.randn(1, 4, rank), torch.randn(1, 4, rope_dim)
tables = {
    "block_table": torch.tensor([[0]], dtype=torch.int32),
    "seqlens_k": torch.tensor([4], dtype=torch.int32),
    "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
    "max_seqlen_q": 1,
}
ctx = AttentionContext(**tables, slot_mapping=slots)
tables["softmax_scale"] = 0.1
attention = MultiheadLatentAttention(
    128, 4, q_rank=32, kv_rank=rank, nope_dim=32, rope_dim=rope_dim, v_head_dim=32
).requires_grad_(False)
x, rope = torch.randn(1, 128), RotaryEmbedding(RopeConfig(rotary_dim=rope_dim))(torch.tensor([3]))
""",
    "docs/paged.md": """
import torch
from tilewise.testing import make_paged_cache
k_cache, v_cache, table, lengths = make_paged_cache([40, 17], 16, 2, 8)
table[1, 0] = table[0, 0]
q, cu = torch.randn(2, 4, 8), torch.arange(3, dtype=torch.int32)
table_cpu, lengths_cpu, cu_cpu = table, lengths, cu
parents, cu_seqlens_q = torch.tensor([-1, -1], dtype=torch.int32), cu
""",
    "docs/search-and-guesses.md": "directory = smaller = STORY",
}
ELSEWHERE = {
    "docs/scale.md": "ranks, GPUs or Ray; see tests/distributed and tests/cluster",
    "docs/serve.md": "a server; see tests/server",
}
ON_A_GPU = {  # what a CPU runs in the place of a GPU's
    'llm = LLM("story", device="cuda", batch_invariant=True)': "",
    'block_size=16, device="cuda")': 'block_size=16, device="cpu")',
}


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


def run(code: str, name: str, space: dict[str, Any]) -> None:
    tree = compile(code, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if tree.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(tree, space))
    else:
        exec(tree, space)


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d, "python")], ids=name_of)
def test_blocks_run(document, monkeypatch):
    name = name_of(document)
    if name in ELSEWHERE:
        pytest.skip(f"needs {ELSEWHERE[name]}")
    for module in ("flash_attn", "flash_attn_interface"):  # blocks put them there; this undoes it
        monkeypatch.setitem(sys.modules, module, sys.modules.get(module))
    space: dict[str, Any] = {"STORY": STORY}
    try:
        run(GIVEN.get(name, ""), name, space)
        for code in blocks(document, "python"):
            for written, here in {"path/to/checkpoint": STORY, **ON_A_GPU}.items():
                code = code.replace(written, here)
            run(code, name, space)
    finally:
        for engine in [x for x in space.values() if isinstance(x, LLM)]:
            engine.close()
