"""The portable Triton attention against float64: in the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    HALF,
    ON_CPU,
    ON_GPU,
    SINGLE,
    Call,
    assert_right,
    computed,
    make_problem,
)
from tilewise.kernels.spec import AttentionSpec
from tilewise.kernels.triton.attention import geometry
from tilewise.kernels.triton.attention import plan as kernels

CASES = {
    "every_tile_whole": Call(256, 256),
    "no_tile_whole": Call(130, 77, batch=2),
    "causal": Call(200, 200, window=CAUSAL),
    "causal_fewer_queries": Call(70, 200, window=CAUSAL),
    "causal_fewer_keys_leaves_empty_rows": Call(200, 70, window=CAUSAL),
    "sliding_window": Call(200, 260, window=(30, 0)),
    "window_on_both_sides": Call(260, 200, window=(40, 17)),
    "window_to_the_right_only": Call(150, 150, window=(-1, 20)),
    "window_of_the_own_key": Call(100, 100, window=(0, 0)),
    "window_wider_than_the_sequence": Call(60, 60, window=(500, 500)),
    "one_query": Call(1, 150, window=CAUSAL),
    "one_key": Call(90, 1),
    "grouped_heads": Call(150, 150, heads=(6, 2), window=CAUSAL),
    "one_key_head": Call(100, 140, heads=(5, 1)),
    "softcap": Call(140, 140, softcap=3.0, window=CAUSAL),
    "alibi": Call(70, 200, alibi="heads", window=CAUSAL),
    "alibi_both_sides": Call(150, 90, alibi="heads"),
    "sinks_in_empty_rows": Call(200, 70, heads=(4, 2), sinks=True, window=CAUSAL),
    "key_lengths": Call(130, 140, batch=4, seqlens_k=(0, 1, 77, 140), window=CAUSAL),
    "every_feature": Call(
        190, 220, (4, 2), (48, 24), 2, window=(60, 5), softcap=8.0, alibi="heads", sinks=True,
        seqlens_k=(200, 45),
    ),
    "latent_prefill_192_128": Call(100, 130, dims=(192, 128), window=CAUSAL),
    "padded_head_dims": Call(100, 100, dims=(80, 72), window=CAUSAL),
    "odd_head_dims": Call(100, 150, dims=(20, 10), dtype=BRAIN),
    "smallest_head_dim": Call(100, 100, dims=(16, 16)),
    "largest_head_dim": Call(90, 90, heads=(1, 1), dims=(256, 256), window=CAUSAL),
    "negative_scale": Call(100, 100, scale=-0.2, window=CAUSAL),
    "zero_scale": Call(100, 100, scale=0.0, window=CAUSAL),
    "packed": Call(heads=(4, 2), lengths=((130, 130), (0, 50), (64, 64), (7, 0), (40, 150))),
    "packed_causal_with_every_feature": Call(
        heads=(4, 2), lengths=((130, 100), (64, 190)), window=(70, 0), softcap=8.0, alibi="heads",
        sinks=True,
    ),
    "float16": Call(150, 170, heads=(2, 1), dtype=HALF, window=CAUSAL, sinks=True),
    "bfloat16": Call(150, 170, heads=(2, 1), dtype=BRAIN, window=CAUSAL, sinks=True),
    "packed_bfloat16": Call(dtype=BRAIN, lengths=((100, 100), (30, 90)), softcap=8.0),
}  # fmt: skip
# The same calls at sizes and dtypes that people run, where a GPU is at hand.
GPU_CASES = {
    "full_2k": Call(2048, 2048, (8, 8), (128, 128), dtype=BRAIN),
    "causal_2k": Call(2048, 2048, (8, 2), (128, 128), 2, BRAIN, CAUSAL),
    "causal_d64": Call(2000, 2000, (8, 8), (64, 64), 2, HALF, CAUSAL),
    "causal_d256": Call(1500, 1500, (4, 4), (256, 256), 1, BRAIN, CAUSAL),
    "window_2k": Call(2048, 2048, (8, 8), (128, 128), 1, BRAIN, (511, 0)),
    "latent_2k": Call(1536, 1536, (4, 4), (192, 128), 1, BRAIN, CAUSAL),
    "padded_d96": Call(1000, 1300, (4, 4), (96, 96), 2, BRAIN, CAUSAL),
    "padded_d40": Call(700, 900, (4, 4), (40, 40), 2, HALF),
    "odd_d20": Call(32, 4096, (6, 6), (20, 10), 1, BRAIN),
    "odd_d70": Call(300, 700, (4, 2), (70, 30), 1, HALF, CAUSAL),
    "odd_d150": Call(300, 700, (4, 2), (150, 9), 1, BRAIN),
    "softcap_2k": Call(1024, 2048, (8, 4), (128, 128), 1, BRAIN, CAUSAL, softcap=20.0),
    "alibi_sinks": Call(
        1024, 2048, (8, 4), (64, 64), 1, BRAIN, CAUSAL, alibi="heads", sinks=True
    ),
    "key_lengths_1k": Call(
        1000, 1000, (4, 4), (128, 128), 3, BRAIN, CAUSAL, seqlens_k=(0, 513, 1000)
    ),
    "float32_d64": Call(600, 600, (4, 4), (64, 64), 1, SINGLE, CAUSAL),
    "float32_d128": Call(600, 600, (4, 4), (128, 128), 1, SINGLE),
    "float32_d256": Call(300, 300, (2, 2), (256, 256), 1, SINGLE, CAUSAL),
    "packed_2k": Call(
        heads=(8, 2), dims=(128, 128), dtype=BRAIN, window=CAUSAL,
        lengths=((2000, 2000), (1, 1), (0, 0), (513, 513), (64, 1500)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("name", CASES)
def test_forward_and_gradients_match_float64(name: str, device: str) -> None:
    assert_right(make_problem(CASES[name], device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_forward_and_gradients_match_float64_at_size(name: str) -> None:
    assert_right(make_problem(GPU_CASES[name], "cuda"))


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
class TestMemory:
    """Strides, poison and shapes without elements."""

    def test_inputs_may_be_slices_of_one_packed_projection(self, device: str) -> None:
        problem = make_problem(Call(100, 100, window=CAUSAL), device)
        qkv = torch.stack([problem.q, problem.k, problem.v], dim=2)  # (B, S, 3, H, D)
        problem.q, problem.k, problem.v = qkv.unbind(2)
        assert not problem.q.is_contiguous()
        assert_right(problem)

    def test_heads_may_come_before_rows(self, device: str) -> None:
        problem = make_problem(Call(100, 120, heads=(4, 2)), device)
        problem.q, problem.k, problem.v, problem.do = (
            x.transpose(1, 2).contiguous().transpose(1, 2)
            for x in (problem.q, problem.k, problem.v, problem.do)
        )
        assert_right(problem)

    def test_rows_need_not_start_on_a_vector_boundary(self, device: str) -> None:
        problem = make_problem(Call(70, 80), device)
        for name in ("q", "k", "v"):
            wide = torch.nn.functional.pad(getattr(problem, name), (1, 2))
            setattr(problem, name, wide[..., 1:-2])
        assert problem.q.stride(1) % 4 != 0
        assert_right(problem)

    def test_small_vectors_may_be_strided(self, device: str) -> None:
        problem = make_problem(
            Call(60, 60, batch=2, alibi="heads", sinks=True, seqlens_k=(60, 31)), device
        )
        for name in ("alibi_slopes", "sinks", "seqlens_k"):
            vector = getattr(problem, name)
            setattr(problem, name, torch.stack([vector, -vector], dim=1)[:, 0])
        assert_right(problem)

    def test_a_gradient_may_be_expanded(self, device: str) -> None:
        problem = make_problem(Call(60, 60), device)
        problem.do = torch.ones((), device=device).expand(problem.do.shape)
        assert_right(problem)

    def test_keys_past_their_length_may_hold_nan(self, device: str) -> None:
        problem = make_problem(CASES["key_lengths"], device)
        for row, length in enumerate(problem.call.seqlens_k):
            problem.k[row, length:] = math.nan
            problem.v[row, length:] = math.inf
        results = computed(problem)
        problem.k, problem.v = (x.nan_to_num(0.0, 0.0) for x in (problem.k, problem.v))
        assert_right(problem, results)

    def test_keys_outside_every_window_may_hold_nan(self, device: str) -> None:
        problem = make_problem(Call(100, 260, window=(20, 0)), device)
        problem.k[:, :139] = math.nan  # the first query's window starts at key 160 - 20
        problem.v[:, :139] = math.nan
        results = computed(problem)
        problem.k, problem.v = (x.nan_to_num(0.0) for x in (problem.k, problem.v))
        assert_right(problem, results)

    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 40), (40, 0), (0, 0)])
    def test_empty_sequences(self, seqlen_q: int, seqlen_k: int, device: str) -> None:
        results = computed(make_problem(Call(seqlen_q, seqlen_k, window=CAUSAL), device))
        for name, result in results.items():
            assert torch.all(result == (-math.inf if name == "lse" else 0)), name

    def test_a_packed_batch_without_tokens(self, device: str) -> None:
        results = computed(make_problem(Call(lengths=((0, 0), (0, 0))), device))
        assert results["o"].shape == (0, 2, 64)
        assert results["dk"].shape == (0, 2, 64)

    def test_packed_rows_of_no_sequence_are_zero(self, device: str) -> None:
        problem = make_problem(Call(lengths=((50, 50), (30, 30))), device)
        problem.cu_seqlens_q[-1], problem.cu_seqlens_k[-1] = 70, 70
        results = computed(problem)
        for name in ("o", "dq", "dk", "dv"):
            assert not results[name][70:].any(), name
            assert results[name][:70].isfinite().all(), name
        assert torch.all(results["lse"][:, 70:] == -math.inf)


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
class TestNumbers:
    """Ranges, missing gradients, order of the tiles."""

    @pytest.mark.parametrize("size", [-120.0, 120.0])
    def test_logits_far_from_zero(self, size: float, device: str) -> None:
        problem = make_problem(Call(100, 101), device)
        direction = torch.nn.functional.normalize(torch.randn(64, device=device), dim=0)
        problem.q = problem.q * 0.1 + 8 * direction * math.copysign(1.0, size)
        problem.k = problem.k * 0.1 + abs(size) * direction
        assert_right(problem)

    def test_a_sink_of_minus_infinity_is_no_sink(self, device: str) -> None:
        problem = make_problem(replace(CASES["sinks_in_empty_rows"]), device)
        problem.sinks.fill_(-math.inf)
        results = computed(problem)
        assert not results.pop("dsinks").any()
        problem.sinks = None
        assert_right(problem, results)

    def test_the_gradient_of_lse_may_be_missing(self, device: str) -> None:
        problem = make_problem(Call(90, 90, sinks=True), device)
        problem.dlse = torch.zeros_like(problem.dlse)
        zeros = computed(problem)
        problem.dlse = None
        for name, result in computed(problem).items():
            assert torch.equal(result, zeros[name]), name

    def test_tiles_may_run_in_any_section_of_heads(
        self, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        problem = make_problem(Call(140, 140, heads=(6, 3), window=CAUSAL), device)
        whole = computed(problem)
        # Two key heads a section, so that the last section is shorter.
        monkeypatch.setattr(geometry, "SECTION_BYTES", 4 * 140 * 2 * 64 * 4)
        for name, result in computed(problem).items():
            assert torch.equal(result, whole[name]), name

    def test_runs_are_bitwise_equal(self, device: str) -> None:
        problem = make_problem(CASES["sinks_in_empty_rows"], device)
        first, second = computed(problem), computed(problem)
        for name in first:
            assert torch.equal(first[name], second[name]), name


@pytest.mark.gpu
class TestOnlyOnAGpu:
    """What the interpreter cannot show: races and addresses past 2**31 elements."""

    def test_a_hundred_runs_are_bitwise_equal(self) -> None:
        problem = make_problem(GPU_CASES["causal_2k"], "cuda")
        first = computed(problem)
        for _ in range(100):
            for name, result in computed(problem).items():
                assert torch.equal(result, first[name]), name

    @pytest.mark.large
    def test_offsets_may_pass_two_to_the_31_elements(self) -> None:
        # A thin view: 300 rows, 2**23 + 64 elements apart, reach past 2**31 elements (5 GB).
        rows, step = 300, (1 << 23) + 64
        problem = make_problem(Call(rows, rows, (1, 1), dtype=BRAIN, window=CAUSAL), "cuda")
        for name in ("q", "k", "v"):
            memory = torch.empty(rows * step, dtype=BRAIN, device="cuda")
            view = memory.as_strided((1, rows, 1, 64), (0, step, 64, 1))
            view.copy_(getattr(problem, name))
            setattr(problem, name, view)
        assert_right(problem)

    @pytest.mark.large
    def test_a_batch_stride_may_pass_two_to_the_31_elements(self) -> None:
        problem = make_problem(Call(100, 100, (1, 1), batch=2, dtype=BRAIN), "cuda")
        step = (1 << 31) + 64
        memory = torch.empty(step + 100 * 64, dtype=BRAIN, device="cuda")
        view = memory.as_strided((2, 100, 1, 64), (step, 64, 64, 1))
        view.copy_(problem.k)
        problem.k = view
        assert_right(problem)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float64}, "dtype must be"),
        ({"head_dim": 577}, "head_dim must be from 1 to 576"),
        ({"v_head_dim": 513}, "v_head_dim must be from 1 to 512"),
        ({"device_type": "xpu"}, "device must be cuda"),
    ],
)
def test_refusals_name_their_reason(changes: dict[str, object], reason: str) -> None:
    spec = AttentionSpec("cuda", HALF, 1, 8, 8, 1, 1, 64, 64)
    assert kernels.why_not(spec) is None
    assert reason in kernels.why_not(spec._replace(**changes))


def test_a_cpu_is_refused_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    spec = AttentionSpec("cpu", HALF, 1, 8, 8, 1, 1, 64, 64)
    assert "interpreter" in kernels.why_not(spec)
