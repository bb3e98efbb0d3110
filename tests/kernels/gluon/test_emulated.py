"""Hopper's own attention kernels against float64, host and device code, in the emulator.

Each case runs the launchers of both directions on CPU tensors; a seed is a schedule of partitions
and copies. The cases are those of `test_triton_attention` at sizes that cross a tile or two.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, HALF, Call, assert_right, make_problem
from tests.kernels.gluon.problem import assert_forward_right, backward, forward, refusals
from tests.kernels.guarded import watched
from tests.kernels.planned import tensors_of
from tilewise import masks
from tilewise.kernels import plan as plans
from tilewise.kernels.gluon.attention.bias import copied_bias
from tilewise.kernels.gluon.backward import launch as attention_bwd_launch
from tilewise.kernels.gluon.backward import plan as attention_bwd_plan
from tilewise.kernels.gluon.backward import steps as attention_bwd_steps
from tilewise.kernels.gluon.forward import launch as attention_fwd_launch
from tilewise.kernels.gluon.forward import tiles as fwd_tiles
from tilewise.kernels.gluon.forward.kernel import Tile
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.spec import MaskTensors
from tilewise.reference import standard
from tools.gluon_emulator import emulated

CASES = {
    "every_tile_whole": Call(256, 256, dims=(128, 128), dtype=BRAIN),
    "no_tile_whole": Call(130, 77, (2, 2), (64, 64), 2, BRAIN),
    "causal": Call(200, 200, (2, 2), (128, 128), 1, BRAIN, CAUSAL),
    "causal_d64": Call(200, 330, (2, 2), (64, 64), 1, HALF, CAUSAL),
    "causal_fewer_queries": Call(70, 300, (2, 2), (64, 64), 1, BRAIN, CAUSAL),
    "causal_fewer_keys_leaves_empty_rows": Call(300, 70, (2, 2), (64, 64), 1, BRAIN, CAUSAL),
    "sliding_window": Call(200, 460, (2, 2), (128, 128), 1, BRAIN, (130, 0)),
    "window_on_both_sides": Call(260, 200, (2, 2), (64, 64), 1, BRAIN, (40, 17)),
    "window_to_the_right_only": Call(150, 150, (2, 2), (128, 128), 1, BRAIN, (-1, 20)),
    "window_of_the_own_key": Call(140, 140, dtype=BRAIN, window=(0, 0)),
    "one_query": Call(1, 300, (2, 2), (128, 128), 1, BRAIN, CAUSAL),
    "one_key": Call(90, 1, dtype=BRAIN),
    "grouped_heads": Call(150, 150, (4, 2), (64, 64), 1, BRAIN, CAUSAL),
    "one_key_head": Call(100, 140, (3, 1), (128, 128), 1, HALF),
    "softcap": Call(140, 140, softcap=3.0, window=CAUSAL, dtype=BRAIN),
    "alibi": Call(70, 200, alibi="heads", window=CAUSAL, dtype=BRAIN),
    "alibi_of_sequences": Call(150, 90, batch=2, alibi="sequences", dtype=HALF),
    "sinks_in_empty_rows": Call(200, 70, (4, 2), sinks=True, window=CAUSAL, dtype=BRAIN),
    "key_lengths": Call(
        130, 140, (1, 1), batch=4, seqlens_k=(0, 1, 77, 140), window=CAUSAL, dtype=BRAIN
    ),
    "bias": Call(150, 190, bias=(2, 150, 190), dtype=BRAIN),
    "bias_of_keys": Call(150, 190, bias=(2, 1, 1, 190), batch=2, dtype=HALF, window=CAUSAL),
    "dropout": Call(150, 190, dropout_p=0.3, dtype=BRAIN, window=CAUSAL),
    "mask": Call(200, 300, dims=(128, 128), mask=(1, 2), mask_tile=(128, 64), dtype=BRAIN),
    "mask_of_wide_tiles": Call(200, 300, mask=(1, 2), mask_tile=(128, 128), dtype=BRAIN),
    "mask_and_window": Call(
        200, 300, mask=(1, 1), mask_tile=(128, 128), window=(90, 30), dtype=HALF
    ),
    "wide_heads": Call(150, 200, (1, 1), (256, 256), 1, BRAIN, CAUSAL),
    "latent_heads": Call(130, 190, (1, 1), (192, 128), 1, BRAIN, CAUSAL),
    "padded_heads": Call(100, 150, (2, 1), (80, 72), 1, BRAIN, CAUSAL),
    "packed": Call(
        heads=(2, 2), dtype=BRAIN, lengths=((130, 130), (0, 50), (64, 64), (7, 0), (40, 150))
    ),
    "packed_with_a_window": Call(
        heads=(4, 2), dims=(128, 128), dtype=BRAIN, lengths=((130, 100), (64, 190)),
        window=(70, 0), sinks=True,
    ),
}  # fmt: skip
LONG_CASES = {
    "three_tiles_of_heads": Call(400, 520, (8, 2), (128, 128), 2, BRAIN, CAUSAL),
    "long_full": Call(700, 900, (2, 2), (128, 128), 1, HALF),
    "long_causal_d64": Call(900, 900, (2, 2), (64, 64), 1, BRAIN, CAUSAL),
    "long_window": Call(900, 1000, (2, 1), (64, 64), 1, BRAIN, (200, 0)),
    "wide_full": Call(300, 400, (2, 1), (256, 256), 1, BRAIN),
    "wide_window": Call(300, 400, (2, 1), (256, 256), 1, HALF, (100, 50)),
    "packed_many": Call(
        heads=(6, 2), dims=(128, 128), dtype=BRAIN, window=CAUSAL,
        lengths=((1, 1), (300, 300), (129, 400), (0, 0), (64, 10), (250, 251)),
    ),
    "every_feature": Call(
        190, 220, (4, 2), (48, 24), 2, BRAIN, (60, 5), softcap=8.0, alibi="heads", sinks=True,
        seqlens_k=(200, 45),
    ),
    "packed_causal_with_every_feature": Call(
        heads=(4, 2), lengths=((130, 100), (64, 190)), window=(70, 0), softcap=8.0,
        alibi="heads", sinks=True, dtype=HALF,
    ),
    "wide_packed": Call(
        heads=(2, 1), dims=(256, 256), dtype=BRAIN, window=CAUSAL,
        lengths=((130, 100), (64, 190), (0, 5)),
    ),
    "wide_mask": Call(
        200, 300, (2, 1), (256, 256), mask=(1, 1), mask_tile=(128, 128), dtype=BRAIN
    ),
    "wide_dropout": Call(150, 190, (2, 1), (256, 256), 1, BRAIN, CAUSAL, dropout_p=0.3),
    "wide_bias": Call(150, 190, (1, 1), (256, 256), bias=(1, 150, 190), dtype=BRAIN),
    "wide_bias_of_keys": Call(
        150, 190, (2, 1), (192, 128), 2, HALF, CAUSAL, bias=(2, 1, 1, 190)
    ),
    "wide_mask_of_heads": Call(
        200, 300, (4, 2), (192, 128), 2, HALF, CAUSAL, mask=(2, 4), mask_tile=(128, 128)
    ),
    "wide_mask_and_window": Call(
        300, 400, (2, 1), (256, 256), 2, BRAIN, (100, 30), mask=(1, 1), mask_tile=(128, 128),
        seqlens_k=(400, 150),
    ),
    "wide_packed_mask": Call(
        heads=(2, 1), dims=(256, 256), dtype=BRAIN, mask=(3, 1), mask_tile=(128, 128),
        window=CAUSAL, lengths=((130, 200), (64, 190), (0, 5)),
    ),
    "wide_dropout_of_everything": Call(100, 100, (1, 1), (256, 256), 1, BRAIN, dropout_p=1.0),
    "wide_heads_with_every_feature": Call(
        190, 220, (4, 2), (192, 128), 2, BRAIN, (60, 5), softcap=8.0, alibi="heads", sinks=True,
        dropout_p=0.1, mask=(1, 1), mask_tile=(128, 128), seqlens_k=(200, 45),
    ),
    "wide_bias_softcap_and_dropout": Call(
        190, 220, (2, 2), (256, 256), 2, HALF, CAUSAL, softcap=8.0, alibi="sequences",
        dropout_p=0.1, bias=(2, 2, 190, 220),
    ),
    "wide_key_lengths": Call(
        130, 140, (2, 2), (256, 256), 4, BRAIN, CAUSAL, seqlens_k=(0, 1, 77, 140)
    ),
    "packed_dropout": Call(
        heads=(4, 2), dtype=BRAIN, lengths=((130, 130), (64, 64), (40, 150)), dropout_p=0.7
    ),
    "packed_alibi_and_softcap": Call(
        heads=(4, 2), dtype=BRAIN, lengths=((130, 130), (64, 64), (40, 150)), alibi="heads",
        softcap=5.0,
    ),
    "mask_and_dropout": Call(
        300, 300, mask=(1, 2), mask_tile=(128, 128), dropout_p=0.2, dtype=BRAIN
    ),
    "masked_heads_of_128": Call(
        200, 300, (4, 2), (128, 128), 1, HALF, (200, 5), alibi="heads", dropout_p=0.2,
        mask=(1, 4), mask_tile=(128, 128),
    ),
    "latent_heads_packed": Call(
        heads=(2, 1), dims=(160, 96), dtype=BRAIN, window=(90, 0), sinks=True,
        lengths=((130, 100), (64, 190), (0, 5)),
    ),
    "latent_key_lengths": Call(
        130, 140, (2, 2), (192, 128), 4, BRAIN, CAUSAL, seqlens_k=(0, 1, 77, 140)
    ),
    "heads_of_96": Call(200, 260, (2, 1), (96, 96), 1, BRAIN, CAUSAL),
    "heads_of_160": Call(200, 260, (1, 1), (160, 160), 1, BRAIN, (50, 10)),
    "negative_scale": Call(200, 200, scale=-0.2, window=CAUSAL, dtype=BRAIN),
    "zero_scale": Call(200, 200, scale=0.0, window=CAUSAL, dtype=BRAIN),
    "window_wider_than_the_sequence": Call(60, 60, window=(500, 500), dtype=BRAIN),
}  # fmt: skip
FORWARD_ONLY = {"mask"}  # the backward kernels take mask tiles of 128 keys
REPRODUCIBLE = (
    "every_tile_whole", "grouped_heads", "causal_fewer_queries", "packed_with_a_window",
    "mask_of_wide_tiles", "masked_heads_of_128", "packed_dropout",
)  # fmt: skip


def judge(call: Call, seed: int, *, num_sms: int = 4) -> None:
    """Run both directions, as far as they take the call, and judge what they give."""
    problem = make_problem(call, "cpu")
    no_forward, no_backward = refusals(problem)
    assert no_forward is None
    results = forward(problem, seed, num_sms=num_sms)
    if no_backward is None:
        results |= backward(problem, **results, seed=seed, num_sms=num_sms)
        assert_right(problem, results)
    else:
        assert_forward_right(problem, results)


@pytest.mark.parametrize("name", CASES)
def test_both_directions_match_float64(name: str) -> None:
    judge(CASES[name], seed=zlib.crc32(name.encode()))


def test_the_backward_kernels_take_what_the_forward_ones_take() -> None:
    cases = CASES | LONG_CASES
    refused = {name: refusals(make_problem(call, "cpu"))[1] for name, call in cases.items()}
    assert {name for name, reason in refused.items() if reason is not None} == FORWARD_ONLY


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CASES | LONG_CASES)
def test_every_schedule_gives_the_same(name: str, seed: int) -> None:
    judge((CASES | LONG_CASES)[name], seed, num_sms=1 + seed % 4)


@pytest.mark.parametrize("window", [CAUSAL, (200, 0), (200, -1), (-1, -1)], ids=str)
def test_a_plan_has_every_tile_of_a_packed_batch_once(window: tuple[int, int]) -> None:
    lengths = ((113, 579), (1845, 82), (128, 2512), (0, 50), (700, 0), (500, 1))
    call = Call(heads=(1, 1), dtype=BRAIN, window=window, lengths=lengths)
    p = make_problem(call, "cpu")
    tile = attention_fwd_launch.tile_config_fwd(p.spec)
    bound = p.q.shape[0] // tile.rows + len(lengths)
    o, lse = torch.empty_like(p.q), torch.empty(p.q.shape[:2]).mT.contiguous()
    with emulated(0):
        tensors = tensors_of(p.q, p.k, p.v, **p.tensors)
        maker = Maker(plans.Call.of(p.spec, tensors))
        results = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (o, lse)]
        given = (maker.tensors, *results, p.spec, tile, bound, p.k.shape[0])
        parts = attention_fwd_launch.add_sorted_tiles(maker, *given)
        copies = [maker.copy(x) for x in parts]
        plan, size = maker.finish(copies).run(*tensors)
    tiles = plan.view(-1, 6)[: int(size)].tolist()
    first_q, first_k = p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist()
    wanted = [
        [b, row, first_q[b], queries, first_k[b], keys]
        for b, (queries, keys) in enumerate(lengths)
        for row in range(0, queries, tile.rows)
    ]
    assert sorted(tiles) == wanted

    def work(entry: list[int]) -> int:
        _, row, _, queries, _, keys = entry
        shift, last = keys - queries, min(row + tile.rows, queries) - 1
        end = keys if window[1] < 0 else max(0, min(keys, last + shift + window[1] + 1))
        begin = 0 if window[0] < 0 else max(0, row + shift - window[0])
        return max(0, -(-end // tile.keys) - begin // tile.keys)

    assert [work(entry) for entry in tiles] == sorted(map(work, tiles), reverse=True)


# Of a packed batch: edges of queries and of keys that no call has, of 200 and 300 rows.
_FAR = 2**31 - 1
HOSTILE = {
    "far_and_negative": ((-9, 60, _FAR, _FAR), (-_FAR, 130, _FAR, 301)),
    "nothing_lies_inside": ((_FAR, -1, _FAR, 201), (302, -_FAR, -1, -2)),
    "first_edges_lie_behind": ((_FAR, _FAR, 0, 200), (_FAR, _FAR, 0, 300)),
    "last_edges_lie_before": ((0, 200, -_FAR, -_FAR), (0, 300, -_FAR, -_FAR)),
}


@pytest.mark.parametrize("feature", ["plain", "bias", "mask", "separate_dq"])
@pytest.mark.parametrize("name", HOSTILE)
def test_edges_of_a_packed_batch_lead_outside_of_no_tensor(
    name: str, feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An address outside of its tensor is refused; the longest lengths are too short for some."""
    dims = (256, 256) if feature == "separate_dq" else (64, 64)
    mask = (1, 1) if feature == "mask" else None
    lengths = ((70, 140), (90, 130), (40, 30))
    call = Call(
        heads=(1, 1), dims=dims, dtype=HALF, lengths=lengths, mask=mask, mask_tile=(128, 128),
        bias=(1, 1, 90, 140) if feature == "bias" else None,
        window=CAUSAL if feature == "bias" else (-1, -1),
    )  # fmt: skip
    problem = make_problem(call, "cpu")
    edges = (torch.tensor(x, dtype=torch.int32) for x in HOSTILE[name])
    problem = replace(problem, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), edges, strict=True)))
    with watched(monkeypatch):
        results = forward(problem)
        backward(problem, **results)


@pytest.mark.parametrize("edges", [(0, 200, 0, 200, -(2**31)), (200, 0, _FAR, -9, 200)], ids=str)
def test_a_plan_of_sequences_that_overlap_has_no_more_tiles_than_room(
    edges: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = ((70, 140), (90, 130), (20, 15), (20, 15))
    call = Call(heads=(1, 1), dtype=BRAIN, lengths=lengths)
    p = make_problem(call, "cpu")
    spec = p.spec._replace(max_seqlen_q=10**6, max_seqlen_k=10**6)
    given = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor(edges, dtype=torch.int32))
    tile = attention_fwd_launch.tile_config_fwd(spec)
    bound = 2  # fewer than the sequences have
    o, lse = torch.empty_like(p.q), torch.empty(p.q.shape[:2]).mT.contiguous()
    with watched(monkeypatch), emulated(0):
        tensors = tensors_of(p.q, p.k, p.v, **p.tensors | given)
        maker = Maker(plans.Call.of(spec, tensors))
        results = [torch.empty(x.shape, dtype=x.dtype, device="meta") for x in (o, lse)]
        parts = attention_fwd_launch.add_sorted_tiles(
            maker, maker.tensors, *results, spec, tile, bound, p.k.shape[0]
        )
        plan, size = maker.finish([maker.copy(x) for x in parts]).run(*tensors)
    tiles = plan.view(-1, 6)[: int(size)].tolist()
    assert len(tiles) == bound
    for b, row, first_q, queries, first_k, keys in tiles:
        assert 0 <= b < len(lengths)
        assert 0 <= row < queries
        assert first_q + queries <= p.q.shape[0]
        assert first_k + keys <= p.k.shape[0]


class TestTiles:
    """Rows of the table that only long sequences choose, on short ones."""

    @staticmethod
    def judge(monkeypatch: pytest.MonkeyPatch, call: Call, **changes: object) -> None:
        original = attention_fwd_launch.tile_config_fwd

        def changed(*arguments: object, **options: object) -> Tile:
            tile = original(*arguments, **options)._replace(**changes)
            return tile._replace(rows=64 * tile.warpgroups)

        monkeypatch.setattr(attention_fwd_launch, "tile_config_fwd", changed)
        problem = make_problem(call, "cpu")
        assert_forward_right(problem, forward(problem, seed=5))

    def test_three_warpgroups(self, monkeypatch: pytest.MonkeyPatch) -> None:
        call = Call(400, 300, (2, 1), (64, 64), 1, BRAIN, CAUSAL)
        self.judge(monkeypatch, call, warpgroups=3, stages=3, release_together=True)

    @pytest.mark.parametrize("dims", [(64, 64), (256, 256)])
    @pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"bias": (1, 2, 70, 300)}])
    def test_sums_that_are_rescaled_late_have_the_same_bits(
        self, dims: tuple[int, int], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call = Call(70, 300, (2, 1), dims, 1, BRAIN, (40, 30), **options)
        problem = make_problem(call, "cpu")
        now = forward(problem, seed=5)
        original = attention_fwd_launch.tile_config_fwd

        def late(*arguments: Any, **given: Any) -> Tile:
            return original(*arguments, **given)._replace(scale_late=True)

        monkeypatch.setattr(attention_fwd_launch, "tile_config_fwd", late)
        results = forward(problem, seed=6)
        assert_forward_right(problem, results)
        assert all(torch.equal(now[name], result) for name, result in results.items())

    @pytest.mark.parametrize(
        "call",
        [
            Call(70, 300, (2, 1), (64, 64), 1, BRAIN),
            Call(260, 130, (1, 1), (64, 64), 2, HALF, CAUSAL),
            Call(heads=(2, 1), dtype=BRAIN, window=CAUSAL, lengths=((200, 200), (10, 400), (0, 9))),
        ],
        ids=["short", "causal", "packed"],
    )
    @pytest.mark.parametrize("q_in_registers", [False, True])
    def test_warpgroups_without_rows_let_the_others_multiply(
        self, call: Call, q_in_registers: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        changes = {"warpgroups": 3, "stages": 2, "dynamic": True}
        self.judge(monkeypatch, call, q_in_registers=q_in_registers, **changes)

    @pytest.mark.parametrize(
        "call",
        [
            Call(200, 210, (1, 1), (256, 256), 1, BRAIN, CAUSAL),
            Call(200, 70, (1, 1), (256, 256), 1, BRAIN, CAUSAL),  # rows that see nothing
            Call(140, 300, (1, 1), (256, 256), 1, HALF, (20, 3)),
            Call(140, 300, (1, 1), (256, 256), 2, BRAIN, CAUSAL, seqlens_k=(190, 20)),
        ],
        ids=["causal", "fewer_keys", "window", "lengths"],
    )
    @pytest.mark.parametrize("ping_pong", [False, True])
    def test_blocks_hidden_from_a_warpgroup_are_passed_by(
        self, call: Call, ping_pong: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.judge(monkeypatch, call, ping_pong=ping_pong)

    @pytest.mark.parametrize("dynamic", [False, True])
    def test_tiles_in_any_order(self, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        call = Call(400, 300, (3, 1), (64, 64), 1, BRAIN, CAUSAL)
        self.judge(monkeypatch, call, dynamic=dynamic, stages=2)

    @pytest.mark.parametrize("ping_pong", [False, True])
    @pytest.mark.parametrize("q_in_registers", [False, True])
    def test_turns_and_queries_in_registers(
        self, ping_pong: bool, q_in_registers: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call = Call(200, 500, (1, 1), (128, 128), 1, BRAIN)
        self.judge(monkeypatch, call, ping_pong=ping_pong, q_in_registers=q_in_registers)


COPIED_BIAS = {
    "even": Call(256, 256, (4, 2), (128, 128), 1, BRAIN, bias=(1, 4, 256, 256)),
    "shared_by_sequences": Call(200, 328, (2, 2), (64, 64), 2, HALF, CAUSAL, bias=(2, 200, 328)),
    "shared_by_heads": Call(150, 200, (2, 1), (64, 64), 2, BRAIN, bias=(2, 1, 150, 200)),
    "causal_d128": Call(300, 400, (4, 2), (128, 128), 2, BRAIN, CAUSAL, bias=(2, 4, 300, 400)),
    "padded_heads": Call(100, 152, (2, 1), (80, 72), 1, BRAIN, CAUSAL, bias=(2, 100, 152)),
    "window": Call(150, 304, (1, 1), (64, 64), 1, BRAIN, (130, 20), bias=(1, 150, 304)),
    "alibi": Call(150, 192, (2, 2), (64, 64), 2, BRAIN, alibi="heads", bias=(2, 150, 192)),
    "zero_scale": Call(100, 104, scale=0.0, dtype=BRAIN, bias=(1, 100, 104)),
    "negative_scale": Call(130, 136, scale=-0.2, dtype=BRAIN, bias=(1, 130, 136)),
    "packed": Call(
        heads=(4, 2), dtype=BRAIN, bias=(2, 4, 330, 304), lengths=((330, 300), (64, 190))
    ),
    "mask": Call(
        200, 304, (2, 1), (128, 128), 2, BRAIN, CAUSAL, mask=(1, 2), mask_tile=(128, 128),
        bias=(1, 2, 200, 304),
    ),
    "mixed": Call(
        190, 224, (2, 1), (128, 128), 2, BRAIN, (60, 5), softcap=8.0, seqlens_k=(200, 45),
        bias=(1, 2, 190, 224), dropout_p=0.2, sinks=True,
    ),
}  # fmt: skip
# More of those that three warpgroups add.
THREE_ADD = {
    "shared_by_all": Call(
        131, 200, (4, 2), (64, 64), 3, BRAIN, bias=(1, 1, 131, 200), seqlens_k=(200, 0, 77),
        sinks=True,
    ),
    "narrow_heads": Call(193, 136, (2, 2), (40, 24), 2, HALF, bias=(2, 193, 136)),
}  # fmt: skip
# Whose sums of dq have fewer channels than a tile: those of attention with a bias of keys as eight
# more channels, and those of which the second half of a tile holds none.
NARROW_BIAS = {
    "narrow": Call(150, 200, (2, 2), (40, 32), 2, BRAIN, bias=(1, 2, 150, 200)),
    "half": Call(140, 136, (2, 1), (24, 32), 1, HALF, CAUSAL, bias=(2, 140, 136)),
}
QUICK_COPIED_BIAS = ("even", "mixed", "narrow")


class TestCopiedBias:
    """A bias whose tiles come by TMA."""

    @staticmethod
    def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Return a list of who took a bias so."""
        taken = list[str]()
        for name, module in (("fwd", attention_fwd_launch), ("bwd", attention_bwd_launch)):

            def noted(*arguments: Any, name: str = name) -> Any:
                found = copied_bias(*arguments)
                if found is not None:
                    taken.append(name)
                return found

            monkeypatch.setattr(module, "copied_bias", noted)
        return taken

    @pytest.mark.parametrize(
        "name",
        [
            pytest.param(name, marks=[] if name in QUICK_COPIED_BIAS else pytest.mark.slow)
            for name in COPIED_BIAS | NARROW_BIAS
        ],
    )
    def test_both_directions_match_float64(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        taken = self.noted(monkeypatch)
        judge((COPIED_BIAS | NARROW_BIAS)[name], seed=zlib.crc32(name.encode()))
        assert taken == ["fwd", "bwd"]

    @pytest.mark.parametrize("name", NARROW_BIAS)
    def test_sums_of_dq_have_the_channels_of_a_head(self, name: str) -> None:
        """Also where their order is fixed and a first tile is stored, not added."""
        torch.manual_seed(0)
        problem = make_problem(NARROW_BIAS[name], "cpu")
        problem.spec = problem.spec._replace(deterministic=True)
        seen = []
        allocate = Maker.empty

        def noted(self: Maker, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            seen.append((shape, dtype))
            return allocate(self, shape, dtype)

        with mock.patch.object(Maker, "empty", noted):
            results = forward(problem)
            assert_right(problem, results | backward(problem, **results))
        sums = [shape[-1] for shape, dtype in seen if dtype == torch.float32 and len(shape) == 3]
        assert problem.call.dims[0] in sums
        assert 64 not in sums

    @pytest.mark.parametrize(
        "name", ["shared_by_heads", "negative_scale", "zero_scale", "packed", *THREE_ADD]
    )
    def test_three_warpgroups_add_it(self, name: str) -> None:
        torch.manual_seed(0)
        problem = make_problem((COPIED_BIAS | THREE_ADD)[name], "cpu")
        tile = fwd_tiles.tile_config_fwd(problem.spec, bias_copied=True)
        assert (tile.warpgroups, tile.bias_stages) == (3, 1)
        assert_forward_right(problem, forward(problem, 5, num_sms=2))

    def test_only_a_bias_of_a_full_call_alone_has_three_warpgroups(self) -> None:
        spec = make_problem(COPIED_BIAS["shared_by_heads"], "cpu").spec
        changes: list[dict[str, Any]] = [
            {"dropout_p": 0.1}, {"softcap": 3.0}, {"has_alibi": True}, {"mask_tile": (128, 128)},
            {"head_dim": 128}, {"v_head_dim": 128}, {"window_right": 0}, {"window_left": 9},
        ]  # fmt: skip
        for change in changes:
            tile = fwd_tiles.tile_config_fwd(spec._replace(**change), bias_copied=True)
            assert tile.warpgroups == 2, change
        assert fwd_tiles.tile_config_fwd(spec).warpgroups == 2  # a bias by loads

    def test_nan_in_the_bias_of_hidden_keys_reaches_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        taken = self.noted(monkeypatch)
        call = Call(
            130, 272, (1, 1), (64, 64), 2, BRAIN, bias=(2, 1, 130, 272), seqlens_k=(40, 272)
        )
        problem = make_problem(call, "cpu")
        assert problem.bias is not None
        problem.bias[0, :, :, 40:] = math.nan
        results = forward(problem)
        gradients = backward(problem, **results)
        assert taken == ["fwd", "bwd"]
        problem.bias = problem.bias.nan_to_num(0.0)
        # The portable kernel's, which is not this test's matter.
        gradients["dbias"] = backward(problem, **results)["dbias"]
        assert_right(problem, results | gradients)

    @pytest.mark.parametrize(
        "bias",
        [(2, 150, 190), (2, 1, 192), (150, 1), (192,)],
        ids=["rows_apart_by_no_16_bytes", "of_keys", "of_queries", "of_keys_alone"],
    )
    def test_others_are_loaded(
        self, bias: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        taken = self.noted(monkeypatch)
        keys = 192 if bias[-1] == 1 else bias[-1]
        judge(Call(150, keys, (2, 1), (64, 64), 1, BRAIN, bias=bias), seed=3)
        assert taken == []


class TestMasks:
    @pytest.mark.parametrize("window", [CAUSAL, (300, 20)])
    def test_a_rule_hides_keys_of_full_tiles_at_its_edges_only(
        self, window: tuple[int, int]
    ) -> None:
        """Of seven tiles of keys the rule hides some, cuts some and leaves some whole."""
        call = Call(200, 896, (1, 1), mask=(1, 1), mask_tile=(128, 128), window=window, dtype=BRAIN)
        problem = make_problem(call, "cpu")
        problem.visible = torch.ones(1, 1, 200, 896, dtype=torch.bool)
        problem.visible[..., 600:610] = False
        mask = masks.dense(problem.visible, tile=call.mask_tile)
        problem.mask = MaskTensors(*mask.tensors())
        assert_forward_right(problem, forward(problem))


# Reproducible calls of more heads than are launched together, which they do not divide.
SIDE_BY_SIDE = {
    "full": Call(300, 500, (3, 3), (64, 64), 1, BRAIN),
    "causal": Call(300, 300, (6, 3), (128, 128), 1, BRAIN, CAUSAL),
    "window": Call(300, 300, (3, 3), (64, 64), 1, HALF, (100, 0)),
    "lengths": Call(150, 300, (2, 2), (64, 64), 2, BRAIN, CAUSAL, seqlens_k=(300, 70)),
    "packed": Call(
        heads=(4, 2), dtype=BRAIN, window=CAUSAL, lengths=((130, 130), (0, 50), (40, 150), (7, 0))
    ),
    "dropout": Call(300, 300, (3, 3), (64, 64), 1, BRAIN, CAUSAL, dropout_p=0.2),
}  # fmt: skip


class TestOrder:
    """What may depend on the schedule, and what may not."""

    @pytest.mark.parametrize(
        "name",
        ["causal", *(pytest.param(name, marks=pytest.mark.slow) for name in REPRODUCIBLE)],
    )
    def test_gradients_are_reproducible_where_asked(self, name: str) -> None:
        problem = make_problem((CASES | LONG_CASES)[name], "cpu")
        problem.spec = problem.spec._replace(deterministic=True)
        assert refusals(problem)[1] is None
        results = forward(problem)
        first = backward(problem, **results, seed=0)
        assert_right(problem, results | first)
        for seed in (1, 2):
            for gradient, value in backward(problem, **results, seed=seed).items():
                assert torch.equal(value, first[gradient]), gradient

    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("window", [(-1, -1), CAUSAL])
    def test_nobody_waits_for_who_does_not_run(
        self, window: tuple[int, int], deterministic: bool
    ) -> None:
        """Another stream may hold all multiprocessors but one."""
        call = Call(300, 500, (1, 1), (64, 64), 1, BRAIN, window)
        problem = make_problem(call, "cpu")
        problem.spec = problem.spec._replace(deterministic=deterministic)
        results = forward(problem)
        results |= backward(problem, **results, num_sms=8, resident=1)
        assert_right(problem, results)

    @pytest.mark.parametrize("call", SIDE_BY_SIDE.values(), ids=SIDE_BY_SIDE)
    def test_nobody_waits_where_heads_are_launched_side_by_side(self, call: Call) -> None:
        """Of one head the tiles are launched in their order, whatever stands between them."""
        problem = make_problem(call, "cpu")
        problem.spec = problem.spec._replace(deterministic=True)
        assert attention_bwd_plan.order_of(problem.spec)[0]
        tiles = -(-problem.spec.max_seqlen_k // 128)
        num_sms = 8 if call.batch == 1 else 9
        if not problem.spec.is_varlen:
            section = attention_bwd_plan.heads_per_section(384, problem.spec, tiles, 64, num_sms)
            assert section == num_sms // tiles
            assert call.batch * call.heads[1] % section > 0
        results = forward(problem)
        results |= backward(problem, **results, num_sms=num_sms, resident=1)
        assert_right(problem, results)

    @pytest.mark.parametrize("name", ["causal", pytest.param("packed", marks=pytest.mark.slow)])
    def test_only_sums_of_dq_depend_on_the_schedule(self, name: str) -> None:
        problem = make_problem(CASES[name], "cpu")
        results = forward(problem, seed=0)
        gradients = backward(problem, **results, seed=0)
        for seed, num_sms in ((1, 1), (2, 3)):
            again = forward(problem, seed, num_sms=num_sms)
            again |= backward(problem, **again, seed=seed, num_sms=num_sms)
            for key, value in (results | gradients).items():
                assert key == "dq" or torch.equal(again[key], value), key


CHORES = {
    "full": Call(130, 200, (3, 3), (64, 64), 1, BRAIN),
    "causal": Call(150, 200, (3, 3), (128, 128), 1, BRAIN, CAUSAL, sinks=True),
    "packed": Call(
        heads=(4, 2), dims=(96, 80), dtype=HALF, window=CAUSAL,
        lengths=((130, 130), (0, 50), (64, 64), (7, 0), (40, 150)),
    ),
    "full_groups": Call(200, 200, (6, 3), (128, 128), 2, BRAIN),
    "window": Call(200, 300, (3, 3), (64, 64), 2, BRAIN, (100, 0)),
}  # fmt: skip


class TestChores:
    """Row terms and dq of heads that CTAs of other heads make, on calls too small to have them."""

    @staticmethod
    def judge(
        monkeypatch: pytest.MonkeyPatch, call: Call, seed: int, deterministic: bool = False
    ) -> None:
        monkeypatch.setattr(attention_bwd_plan, "L2_BYTES", 1)
        monkeypatch.setattr(attention_bwd_plan, "_FEW_WAVES", 0)
        problem = make_problem(call, "cpu")
        problem.spec = problem.spec._replace(deterministic=deterministic)
        heads = problem.spec.batch * problem.spec.num_kv_heads
        assert attention_bwd_plan.prepost_of(problem.spec, 1, 2, 1).behind < heads
        results = forward(problem)
        results |= backward(problem, **results, seed=seed, num_sms=1, resident=1 + seed)
        assert_right(problem, results)

    @pytest.mark.parametrize("name", ["full", "causal"])
    def test_pre_and_postprocessing_match_float64(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.judge(monkeypatch, CHORES[name], seed=1)

    @pytest.mark.parametrize("width", [64, pytest.param(128, marks=pytest.mark.slow)])
    def test_short_calls_do_chores_in_every_cta(
        self, width: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(attention_bwd_plan, "SHORT_SHARE", 1)
        monkeypatch.setattr(attention_bwd_plan, "SHORT_AHEAD", 3)
        monkeypatch.setattr(attention_bwd_plan, "SHORT_BYTES", 1)
        monkeypatch.setattr(attention_bwd_plan, "_FEW_WAVES", 0)
        call = Call(200, 250, (4, 4), (width, width), 1, BRAIN, CAUSAL)
        problem = make_problem(call, "cpu")
        results = forward(problem)
        results |= backward(problem, **results, seed=2, num_sms=1, resident=2)
        assert_right(problem, results)

    @pytest.mark.slow
    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("name", CHORES)
    def test_every_schedule_gives_the_same(
        self, name: str, seed: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.judge(monkeypatch, CHORES[name], seed, deterministic)


SINKS = {
    "empty_rows": CASES["sinks_in_empty_rows"],
    "sequences": Call(130, 140, (4, 2), (64, 64), 2, BRAIN, CAUSAL, sinks=True),
    "packed": CASES["packed_with_a_window"],
    "separate_dq": Call(
        190, 220, (4, 2), (192, 128), 2, BRAIN, (60, 5), sinks=True, seqlens_k=(200, 45)
    ),
}


class TestSinks:
    """The gradient of sinks by one launch."""

    @pytest.mark.parametrize("rows", [128, 512, 4096])
    @pytest.mark.parametrize("name", SINKS)
    def test_it_matches_float64(
        self, name: str, rows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever part of a head's rows a step takes."""
        problem = make_problem(SINKS[name], "cpu")
        results = forward(problem)
        monkeypatch.setattr(attention_bwd_steps, "_SINK_ROWS", rows)
        assert_right(problem, results | backward(problem, **results))

    def test_sinks_of_no_weight_have_no_gradient(self) -> None:
        problem = make_problem(SINKS["empty_rows"], "cpu")
        assert problem.sinks is not None
        problem.sinks.fill_(-math.inf)
        found = backward(problem, **forward(problem))["dsinks"]
        assert torch.equal(found, torch.zeros_like(found))


class TestMemory:
    """Strides, poison and shapes without elements."""

    def test_inputs_may_be_slices_of_one_packed_projection(self) -> None:
        problem = make_problem(Call(150, 150, dtype=BRAIN, window=CAUSAL), "cpu")
        qkv = torch.stack([problem.q, problem.k, problem.v], dim=2)  # (B, S, 3, H, D)
        problem.q, problem.k, problem.v = qkv.unbind(2)
        results = forward(problem)
        assert_right(problem, results | backward(problem, **results))

    def test_rows_that_tma_cannot_address_are_copied(self) -> None:
        problem = make_problem(Call(70, 80, dtype=BRAIN), "cpu")
        for name in ("q", "k", "v"):
            wide = torch.nn.functional.pad(getattr(problem, name), (1, 2))
            setattr(problem, name, wide[..., 1:-2])
        results = forward(problem)
        assert_right(problem, results | backward(problem, **results))

    def test_a_gradient_may_be_expanded(self) -> None:
        problem = make_problem(Call(60, 60, dtype=BRAIN), "cpu")
        problem.do = torch.ones((), dtype=BRAIN).expand(problem.do.shape)
        results = forward(problem)
        assert_right(problem, results | backward(problem, **results))

    def test_keys_past_their_length_may_hold_nan(self) -> None:
        problem = make_problem(CASES["key_lengths"], "cpu")
        for row, length in enumerate(problem.call.seqlens_k):
            problem.k[row, length:] = math.nan
            problem.v[row, length:] = math.inf
        results = forward(problem)
        results |= backward(problem, **results)
        problem.k, problem.v = (x.nan_to_num(0.0, 0.0) for x in (problem.k, problem.v))
        assert_right(problem, results)

    @pytest.mark.parametrize("head_dim", [64, pytest.param(256, marks=pytest.mark.slow)])
    def test_keys_outside_every_window_may_hold_nan(self, head_dim: int) -> None:
        call = Call(100, 460, dims=(head_dim, head_dim), dtype=BRAIN, window=(20, 0))
        problem = make_problem(call, "cpu")
        hidden = 460 - 100 - 20 - 1  # the first query's window starts after it
        problem.k[:, :hidden] = math.nan
        problem.v[:, :hidden] = math.nan
        results = forward(problem)
        results |= backward(problem, **results)
        problem.k, problem.v = (x.nan_to_num(0.0) for x in (problem.k, problem.v))
        assert_right(problem, results)

    def test_a_packed_neighbour_may_hold_nan(self) -> None:
        call = replace(CASES["packed"], lengths=((100, 90), (70, 60), (90, 200)), window=CAUSAL)
        problem = make_problem(call, "cpu")
        clean = [x.clone() for x in (problem.q, problem.k, problem.v, problem.do)]
        problem.q[100:170], problem.k[90:150], problem.v[90:150] = math.nan, math.nan, math.nan
        problem.do[100:170] = math.nan
        results = forward(problem)
        results |= backward(problem, **results)
        problem.q, problem.k, problem.v, problem.do = clean
        truth = forward(problem)
        truth |= backward(problem, **truth)
        for name, rows in {
            "o": (100, 170),
            "dq": (100, 170),
            "dk": (90, 150),
            "dv": (90, 150),
        }.items():
            for part in (slice(0, rows[0]), slice(rows[1], None)):
                torch.testing.assert_close(results[name][part], truth[name][part], msg=name)

    def test_rows_that_see_a_nan_are_nan_in_lse(self) -> None:
        """As -inf it would say that they see nothing, and hide the NaN from their gradients."""
        problem = make_problem(Call(70, 70, (1, 1), (64, 64), 1, BRAIN, window=CAUSAL), "cpu")
        problem.k[0, 66, 0, 5] = math.nan
        lse = forward(problem)["lse"][0, 0]
        assert lse[66:].isnan().all()
        assert lse[:66].isfinite().all()

    @pytest.mark.parametrize(
        "call",
        [
            Call(40, 90, (1, 1), (64, 64), 1, BRAIN, seqlens_k=(75,)),
            Call(40, 90, (1, 1), (64, 64), 1, BRAIN, window=(20, 0)),
        ],
        ids=["padding", "before_every_window"],
    )
    def test_keys_that_nobody_sees_have_no_gradient_beside_a_nan(self, call: Call) -> None:
        problem = make_problem(call, "cpu")
        p = problem
        p.q[0, 3, 0, 5] = math.nan
        results = forward(p)
        gradients = backward(p, results["o"], results["lse"])
        visible = standard.visible_keys(p.q, p.k, window=call.window, seqlens_k=p.seqlens_k)
        unseen = ~visible.flatten(0, -2).any(0)
        assert unseen.any()
        assert gradients["dk"].isnan().any()
        for name in ("dk", "dv"):
            assert not gradients[name][:, unseen].any(), name

    def test_rows_of_no_sequence_have_no_gradient(self) -> None:
        problem = make_problem(Call(dtype=BRAIN, lengths=((40, 60), (9, 5))), "cpu")
        results = forward(problem)
        alone = backward(problem, **results)

        def padded(x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[:3] * math.nan, x, x[:5] * math.nan])

        for name in ("q", "k", "v", "do"):
            setattr(problem, name, padded(getattr(problem, name)))
        o, lse = padded(results["o"]), padded(results["lse"].T).T
        problem.dlse = padded(problem.dlse.T).T
        problem.cu_seqlens_q += 3
        problem.cu_seqlens_k += 3
        gradients = backward(problem, o, lse)
        for name, gradient in gradients.items():
            assert not gradient[:3].any(), name
            assert not gradient[-5:].any(), name
            torch.testing.assert_close(gradient[3:-5], alone[name], msg=name)

    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 40), (40, 0)])
    def test_empty_sequences(self, seqlen_q: int, seqlen_k: int) -> None:
        problem = make_problem(Call(seqlen_q, seqlen_k, dtype=BRAIN, window=CAUSAL), "cpu")
        results = forward(problem)
        results |= backward(problem, **results)
        for name, result in results.items():
            assert torch.all(result == (-math.inf if name == "lse" else 0)), name
