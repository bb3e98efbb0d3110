"""With TILEWISE_CHECK=1 every call looks at ids and lengths, also where kernels do not.

Interpreted kernels stand for those of a GPU: they cut what leads outside, and say nothing.
"""

from __future__ import annotations

import runpy

import pytest
import torch

pytest.importorskip("triton")

from tilewise import ops
from tilewise.kernels import device as devices
from tilewise.ops import values

pytestmark = pytest.mark.skipif(not devices.interpreting(), reason="kernels are compiled here")

BLOCKS, SIZE, ROWS = 6, 4, 4


def ints(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


_STEP = {
    "block_table": ints(0, 1, 2, 3).view(2, 2), "seqlens_k": ints(8, 5),
    "cu_seqlens_q": ints(0, 1, ROWS), "max_seqlen_q": 3,
}  # fmt: skip
# name: what is another in a step, and what is said
WRONG_STEPS = {
    "a block": ({"block_table": ints(0, 1, 2, BLOCKS).view(2, 2)}, "block_table must hold blocks"),
    "a length": ({"seqlens_k": ints(8, 9)}, r"seqlens_k must lie in \[0, 8\]"),
    "a negative length": ({"seqlens_k": ints(8, -9)}, "seqlens_k must lie in"),
    "edges that fall": ({"cu_seqlens_q": ints(0, 3, 2)}, "cu_seqlens_q must rise from 0"),
    "edges past the rows": ({"cu_seqlens_q": ints(0, 1, ROWS + 1)}, "cu_seqlens_q must rise"),
    "a longest run": ({"max_seqlen_q": 2}, "max_seqlen_q must be at least 3"),
}


def paged(**others):
    caches = (torch.zeros(BLOCKS, SIZE, 1, 16) for _ in range(2))
    ops.paged_attention(torch.zeros(ROWS, 1, 16), *caches, **_STEP | others, backend="triton")


def latents(**others):
    ops.mla_decode(
        torch.zeros(ROWS, 1, 16), torch.zeros(ROWS, 1, 16), torch.zeros(BLOCKS, SIZE, 32),
        softmax_scale=1.0, **_STEP | others, backend="triton",
    )  # fmt: skip


def packed(**others):
    x = torch.zeros(ROWS, 1, 16)
    edges = {"cu_seqlens_q": ints(0, ROWS), "cu_seqlens_k": ints(0, ROWS)}
    longest = {"max_seqlen_q": ROWS, "max_seqlen_k": ROWS}
    ops.attention_varlen(x, x, x, **edges | longest | others, backend="triton")


def dense(**others):
    x = torch.zeros(2, ROWS, 1, 16)
    ops.attention(x, x, x, **others, backend="triton")


def write(slots):
    caches, rows = (torch.zeros(BLOCKS, SIZE, 1, 16) for _ in range(2)), torch.ones(2, 1, 16)
    ops.write_kv_cache(rows, rows, *caches, slots, backend="triton")


def write_latents(slots):
    rows, cache = torch.ones(2, 8), torch.zeros(BLOCKS, SIZE, 16)
    ops.write_latent_cache(rows, rows, cache, slots, backend="triton")


def copy(pairs):
    ops.copy_blocks(*(torch.zeros(BLOCKS, SIZE, 1, 16) for _ in range(2)), pairs, backend="triton")


def experts(chosen):
    x, weights = torch.ones(len(chosen), 16), torch.ones(len(chosen), 1)
    up, down = torch.ones(3, 32, 16), torch.ones(3, 16, 16)
    ops.expert_mlp(x, chosen.view(-1, 1), weights, up, down, backend="triton")


WRONG = {
    **{f"paged: {name}": (paged, *case) for name, case in WRONG_STEPS.items()},
    **{f"latents: {name}": (latents, *case) for name, case in WRONG_STEPS.items()},
    "packed rows": (packed, {"cu_seqlens_q": ints(0, 9)}, "cu_seqlens_q must rise"),
    "packed keys": (packed, {"cu_seqlens_k": ints(-1, 3)}, "cu_seqlens_k must rise"),
    "a longest": (packed, {"max_seqlen_k": 2}, "max_seqlen_k must be at least 4"),
    "dense keys": (dense, {"seqlens_k": ints(4, 5)}, r"seqlens_k must lie in \[0, 4\]"),
    "a slot": (write, {"slots": ints(0, 24, dtype=torch.int64)}, "slot_mapping must lie in"),
    "a latent's slot": (
        write_latents, {"slots": ints(-2, 1, dtype=torch.int64)}, "slot_mapping must lie in",
    ),
    "an expert": (experts, {"chosen": ints(2, 3)}, r"chosen must lie in \[0, 2\], got 3"),
    "a pair": (copy, {"pairs": ints([0, 6], dtype=torch.int64)}, "block_pairs must lie in"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_checked_call_refuses_what_others_cut(name, monkeypatch):
    call, others, message = WRONG[name]
    call(**others)
    monkeypatch.setattr(values, "WAITS", True)
    with pytest.raises(ValueError, match=message):
        call(**others)


def test_right_calls_pass_the_checks(monkeypatch):
    monkeypatch.setattr(values, "WAITS", True)
    for call in (paged, latents, packed, dense):
        call()
    write(ints(-1, 23, dtype=torch.int64))
    copy(ints([0, 5], dtype=torch.int64))
    experts(ints(0, 2))


@pytest.mark.parametrize(("given", "waits"), [("1", True), ("0", False), ("", False)])
def test_the_environment_turns_checks_on(given, waits, monkeypatch):
    monkeypatch.setenv("TILEWISE_CHECK", given)
    assert runpy.run_path(values.__file__)["WAITS"] is waits


def test_a_slot_or_a_pair_outside_is_skipped_and_all_others_are_not():
    rows = torch.ones(4, 1, 16)
    caches = [torch.zeros(BLOCKS, SIZE, 1, 16) for _ in range(2)]
    slots = ints(23, 24, -(2**40), 2**40, dtype=torch.int64)
    ops.write_kv_cache(rows, rows, *caches, slots, backend="triton")
    assert all(cache.view(24, 16).any(1).nonzero().tolist() == [[23]] for cache in caches)
    ops.copy_blocks(*caches, ints([5, 0], [5, 6], [-1, 1], dtype=torch.int64), backend="triton")
    assert all(cache.flatten(1).any(1).nonzero().tolist() == [[0], [5]] for cache in caches)


def test_an_id_of_no_block_hurts_its_own_sequence_alone():
    q = torch.randn(2, 1, 16)
    caches = [torch.randn(BLOCKS, SIZE, 1, 16) for _ in range(2)]
    step = {**_STEP, "cu_seqlens_q": ints(0, 1, 2), "max_seqlen_q": 1}
    want = ops.paged_attention(q, *caches, **step, backend="triton")
    for block in (BLOCKS, -1, 2**31 - 1, -(2**31)):
        table = ints(0, 1, block, block).view(2, 2)
        found = ops.paged_attention(q, *caches, **step | {"block_table": table}, backend="triton")
        last = ints(0, 1, BLOCKS - 1, BLOCKS - 1).view(2, 2)
        other = ops.paged_attention(q, *caches, **step | {"block_table": last}, backend="triton")
        assert torch.equal(found[0], want[0])
        assert torch.equal(found[1], other[1])
