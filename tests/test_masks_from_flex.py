"""masks.from_flex: what torch's BlockMask shows, for any block size, and no pair more is asked."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import (
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
    noop_mask,
    or_masks,
)

import tilewise
from tilewise import masks

DOCUMENTS = torch.tensor([0] * 70 + [1] * 141 + [2] * 89)
LENGTHS = torch.tensor([300, 111])


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() <= 37


def same_document(b, h, q, k):
    return DOCUMENTS[q] == DOCUMENTS[k]


def within_length(b, h, q, k):
    return k < LENGTHS[b]


def by_head(b, h, q, k):
    return (q + k + h) % 3 > 0


RULES = {
    "causal": causal,
    "documents": and_masks(causal, same_document),
    "either": or_masks(window, same_document),
    "lengths": within_length,
    "heads": by_head,
    "all": noop_mask,
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("block", [128, 64, (32, 96), (256, 48)], ids=str)
@pytest.mark.parametrize("tile", [64, (128, 64)], ids=str)
def test_it_shows_the_pairs_that_torch_shows(name, block, tile):
    rule, shape = RULES[name], (2, 3, 300, 300)
    flex = create_block_mask(rule, *shape, device="cpu", BLOCK_SIZE=block)
    ours = masks.from_flex(flex, tile=tile)
    assert ours.shape == shape
    assert torch.equal(ours.to_dense(), create_mask(rule, *shape, device="cpu"))


def test_sequences_and_heads_that_are_shared_stay_shared():
    flex = create_block_mask(causal, None, None, 130, 200, device="cpu")
    ours = masks.from_flex(flex)
    assert ours.shape == (1, 1, 130, 200)
    assert torch.equal(ours.to_dense()[0, 0], torch.ones(130, 200).tril().bool())


def test_full_blocks_are_not_asked_and_hidden_ones_neither():
    asked = []

    def rule(b, h, q, k):
        asked.append((q.flatten().unique(), k.flatten().unique()))
        return q >= k

    flex = create_block_mask(causal, None, None, 1024, 1024, device="cpu")
    flex = BlockMask.from_kv_blocks(
        flex.kv_num_blocks,
        flex.kv_indices,
        flex.full_kv_num_blocks,
        flex.full_kv_indices,
        mask_mod=rule,
        seq_lengths=(1024, 1024),
    )
    ours = masks.from_flex(flex)
    assert ours.same_as(masks.causal(1024))
    [(queries, keys)] = asked  # of the eight tiles on the diagonal, in one call
    assert len(queries) == len(keys) == 1024
    assert ours.tiles == masks.causal(1024).tiles


def test_blocks_without_a_rule_are_whole():
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    blocks = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    flex = BlockMask.from_kv_blocks(counts, blocks, BLOCK_SIZE=64)
    visible = torch.ones(128, 128, dtype=torch.bool)
    visible[:64, :64] = False
    assert torch.equal(masks.from_flex(flex, tile=64).to_dense()[0, 0], visible)


# Without a compiler it says so, once in a process.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_with_it_is_flex_attention():
    flex = create_block_mask(RULES["documents"], None, None, 300, 300, device="cpu")
    q, k, v = (torch.randn(1, 300, 2, 32) for _ in range(3))
    truth = flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=flex)
    o = tilewise.attention(q, k, v, mask=masks.from_flex(flex))
    torch.testing.assert_close(o, truth.transpose(1, 2), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("rule", "error", "said"),
    [
        (lambda b, h, q, k: q - k, TypeError, "mask_mod must return a bool tensor"),
        (lambda b, h, q, k: torch.ones(7).bool(), ValueError, "mask_mod must return what broad"),
    ],
)
def test_a_rule_that_returns_something_else_is_refused(rule, error, said):
    counts = torch.ones(1, 1, 1, dtype=torch.int32)
    flex = BlockMask.from_kv_blocks(
        counts, torch.zeros(1, 1, 1, 1, dtype=torch.int32), mask_mod=rule
    )
    with pytest.raises(error, match=said):
        masks.from_flex(flex)


@pytest.mark.parametrize("given", [causal, masks.causal(64), None])
def test_what_is_no_block_mask_of_torch_is_refused(given):
    with pytest.raises(TypeError, match="mask must be a BlockMask of torch"):
        masks.from_flex(given)
