"""Small calls of every Hopper kernel whose hand-overs are run in thousands of schedules.

Each is one run of the emulator: its results are judged there, and what its warps did is replayed
(tools/gluon_emulator/replay.py). Calls are small, and CTAs few, so that a CTA has many tiles of few
steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from tests.kernels.attention_problem import BRAIN, CAUSAL, HALF, Call, make_problem
from tests.kernels.gluon import test_fp8_emulated as test_gluon_fp8_emulated
from tests.kernels.gluon import test_linear as test_gluon_linear
from tests.kernels.gluon import test_mla as test_gluon_mla
from tests.kernels.gluon import test_mla_bytes as test_gluon_mla_bytes
from tests.kernels.gluon import test_paged as test_gluon_paged
from tests.kernels.gluon import test_quantised as test_gluon_quantised
from tests.kernels.gluon.problem import assert_forward_right, backward, forward, in_turns
from tests.kernels.triton.test_mla import Case as Latents
from tests.kernels.triton.test_mla import make_inputs
from tilewise.kernels.gluon.backward import launch as attention_bwd_launch
from tilewise.kernels.gluon.backward import plan as attention_bwd_plan
from tilewise.kernels.gluon.forward import launch as attention_fwd_launch
from tools.gluon_emulator import Program, Recording, Replay, recorded

_UNCHANGED = Program()
PACKED = Call(
    heads=(2, 1), dims=(128, 128), dtype=BRAIN, window=CAUSAL,
    lengths=((100, 100), (40, 70), (128, 128), (190, 190)),
)  # fmt: skip
_LATENTS = Latents("", (2, 1, 1), (280, 10, 150), 2, test_gluon_mla.WIDTHS, 64, BRAIN)


@dataclass(frozen=True)
class Attention:
    """A call of the attention kernels.

    Attributes:
        kernels: those that are recorded: "forward" or "backward".
        tile: changes of the forward tile, for rows of the table that only long calls choose.
        prepost: the backward kernel does prepost of other heads, as it does of large calls.
        resident: CTAs of the backward kernel at a time.
        form: changes of its variant, for forms that only long calls choose.
        plan: constants of its plan, for forms that only calls with many heads choose. Calls have no
            `WAYS` but those that are given here: the others stand for long ones.
    """

    call: Call
    kernels: str = "forward"
    tile: tuple[tuple[str, Any], ...] = ()
    deterministic: bool = False
    prepost: bool = False
    resident: int = 1
    form: tuple[tuple[str, Any], ...] = ()
    plan: tuple[tuple[str, Any], ...] = ()

    def run(self, seed: int, program: Program) -> list[Recording]:
        torch.manual_seed(0)
        problem = make_problem(self.call, "cpu")
        problem.spec = problem.spec._replace(deterministic=self.deterministic)
        table = attention_fwd_launch.tile_config_fwd
        counter = torch.zeros(1, dtype=torch.int32)

        def tile_of(*arguments: Any, **options: Any) -> Any:
            tile = table(*arguments, **options)._replace(**dict(self.tile))
            return tile._replace(rows=64 * tile.warpgroups)

        with ExitStack() as stack:
            patch = stack.enter_context
            patch(mock.patch.object(attention_fwd_launch, "tile_config_fwd", tile_of))
            patch(mock.patch.object(attention_fwd_launch, "counter_of", return_value=counter))
            if self.prepost:
                patch(mock.patch.object(attention_bwd_plan, "L2_BYTES", 1))
                patch(mock.patch.object(attention_bwd_plan, "_FEW_WAVES", 0))
            for name, value in (("WAYS", ()), *self.plan):
                patch(mock.patch.object(attention_bwd_plan, name, value))
            if self.form:
                chosen = attention_bwd_launch.variant_of
                changed = lambda spec: chosen(spec)._replace(**dict(self.form))  # noqa: E731
                patch(mock.patch.object(attention_bwd_launch, "variant_of", changed))
            if self.kernels == "forward":
                with recorded() as recordings:
                    results = forward(problem, seed, program=program, num_sms=1)
                assert_forward_right(problem, results)
                return recordings
            if self not in _known_forward:
                _known_forward[self] = forward(problem, num_sms=1)
            results = {name: x.clone() for name, x in _known_forward[self].items()}
            with recorded() as recordings:
                gradients = backward(
                    problem, **results, seed=seed, program=program, num_sms=1,
                    resident=self.resident,
                )  # fmt: skip
            for name, gradient in gradients.items():
                truth = _gradients(self)[name]
                torch.testing.assert_close(gradient, truth, rtol=1e-2, atol=1e-2, msg=name)
            return recordings


_known: dict[Attention, dict[str, torch.Tensor]] = {}
_known_forward: dict[Attention, dict[str, torch.Tensor]] = {}  # o and lse by the unchanged kernel


def _gradients(case: Attention) -> dict[str, torch.Tensor]:
    """Return the gradients of a call by the unchanged kernels, which other tests judge."""
    if case not in _known:
        torch.manual_seed(0)
        problem = make_problem(case.call, "cpu")
        problem.spec = problem.spec._replace(deterministic=case.deterministic)
        _known[case] = backward(problem, **forward(problem), seed=1)
    return _known[case]


def _bytes(seed: int, program: Program) -> list[Recording]:
    with recorded() as recordings:
        o, lse, truth = test_gluon_fp8_emulated.run(
            (1, 200, 700, 1, 1, 64), (-1, 0), None, seed=seed, num_sms=1, program=program
        )
    test_gluon_fp8_emulated.assert_within_format(o, lse, truth)
    return recordings


def _packed_bytes(seed: int, program: Program) -> list[Recording]:
    with recorded() as recordings:
        o, lse, truth = test_gluon_fp8_emulated.run_packed(
            ((100, 100), (40, 70), (0, 3), (230, 230)), (1, 1), 64, (-1, 0), {}, seed=seed,
            num_sms=1, program=program,
        )  # fmt: skip
    test_gluon_fp8_emulated.assert_within_format(o, lse, truth)
    return recordings


def _masked_bytes(seed: int, program: Program) -> list[Recording]:
    torch.manual_seed(3)
    with recorded() as recordings:
        o, lse, truth = test_gluon_fp8_emulated.run(
            (1, 300, 500, 1, 1, 64), (-1, 0), None, {"mask": (1, 1)}, seed=seed, num_sms=1,
            program=program,
        )  # fmt: skip
    test_gluon_fp8_emulated.assert_within_format(o, lse, truth)
    return recordings


def _latents(seed: int, program: Program) -> list[Recording]:
    torch.manual_seed(0)
    inputs = make_inputs(_LATENTS, "cpu")
    with recorded() as recordings:
        results = test_gluon_mla.run_emulated(inputs, seed, program, num_sms=1)
    test_gluon_mla.check(inputs, *results)
    return recordings


def _latents_of_bytes(seed: int, program: Program) -> list[Recording]:
    torch.manual_seed(0)
    given = test_gluon_mla_bytes.Bytes(_LATENTS, torch.float8_e4m3fn)
    inputs = test_gluon_mla_bytes.make_bytes(given, "cpu")
    with recorded() as recordings:
        results = test_gluon_mla.run_emulated(inputs, seed, program, num_sms=1)
    test_gluon_mla_bytes.check(inputs, *results)
    return recordings


def _paged(seed: int, program: Program, *, has_plan: bool = False) -> list[Recording]:
    torch.manual_seed(0)
    case = test_gluon_paged.Case("", (380, 33), (1, 1), (4, 4), head_dim=64)
    with recorded() as recordings:
        test_gluon_paged.run_emulated(case, torch.int8, seed, program, has_plan=has_plan)
    return recordings


def _rounded_rows(seed: int, program: Program) -> list[Recording]:
    torch.manual_seed(0)
    with recorded() as recordings:
        test_gluon_quantised.check_rounded(
            140, 264, 640, torch.bfloat16, seed=seed, program=program
        )
    return recordings


def _rows(seed: int, program: Program, *, early: bool = False) -> list[Recording]:
    torch.manual_seed(0)
    x, weight, bias = test_gluon_linear.make_product(5, 704, 130)
    tile = test_gluon_linear.RowsTile(64, 64, 2, 2, early=early)
    with recorded() as recordings:
        y = test_gluon_linear.run_emulated(x, weight, bias, tile, seed, program, stages=3)
    truth = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(y.double(), truth, rtol=1e-2, atol=1e-2)
    return recordings


_SMALL_SECTIONS = (("L2_BYTES", 1), ("SHORT_BYTES", 1), ("_FEW_WAVES", 0))
_LITTLE = ((100, 100), (30, 60), (140, 140))
CASES: dict[str, Callable[[int, Program], list[Recording]]] = {
    "packed_causal": Attention(PACKED).run,
    "every_tile_alike": Attention(Call(200, 500, (2, 1), (128, 128), 1, BRAIN)).run,
    "short_tiles": Attention(Call(60, 200, (3, 1), (128, 128), 1, BRAIN)).run,
    "windows": Attention(Call(200, 300, (1, 1), (128, 128), 1, BRAIN, (70, 0))).run,
    "lengths": Attention(
        Call(100, 200, (1, 1), (64, 64), 3, BRAIN, CAUSAL, seqlens_k=(190, 0, 77))
    ).run,
    "three_warpgroups": Attention(
        Call(300, 200, (2, 1), (64, 64), 1, BRAIN, CAUSAL),
        tile=(("warpgroups", 3), ("stages", 3), ("release_together", True)),
    ).run,
    "wide": Attention(Call(150, 150, (2, 1), (256, 256), 1, BRAIN, CAUSAL)).run,
    "wide_scaled_late": Attention(
        Call(150, 150, (2, 1), (256, 256), 1, BRAIN, CAUSAL), tile=(("scale_late", True),)
    ).run,
    "latent_heads": Attention(
        Call(heads=(2, 1), dims=(192, 128), dtype=BRAIN, window=CAUSAL, lengths=_LITTLE)
    ).run,
    "masked": Attention(
        Call(130, 300, (2, 1), (64, 64), 1, HALF, mask=(1, 2), mask_tile=(128, 128))
    ).run,
    "biased_by_three": Attention(
        Call(200, 304, (2, 1), (64, 64), 1, BRAIN, CAUSAL, bias=(1, 2, 200, 304)),
        tile=(
            ("warpgroups", 3), ("stages", 3), ("release_together", True), ("bias_stages", 1),
            ("q_in_registers", False),
        ),
    ).run,
    "backward": Attention(Call(500, 130, (1, 1), (64, 64), 1, BRAIN), "backward").run,
    "backward_packed": Attention(
        Call(heads=(1, 1), dims=(128, 128), dtype=BRAIN, window=CAUSAL, lengths=_LITTLE[:2]),
        "backward",
    ).run,
    "backward_in_order": Attention(
        Call(150, 200, (1, 1), (64, 64), 1, BRAIN), "backward", deterministic=True, resident=2
    ).run,
    "backward_in_order_by_two": Attention(
        Call(400, 200, (1, 1), (64, 64), 1, BRAIN), "backward", deterministic=True, resident=2,
        form=(("senders", 2), ("prepost", "none")),
    ).run,
    "backward_flat_by_two": Attention(
        Call(300, 200, (1, 1), (128, 128), 1, BRAIN, CAUSAL), "backward", deterministic=True,
        resident=2, form=(("senders", 2), ("prepost", "none"), ("flat", True), ("together", True)),
    ).run,
    "backward_drawn_ahead": Attention(
        Call(400, 200, (2, 1), (64, 64), 1, BRAIN, CAUSAL, dropout_p=0.2), "backward"
    ).run,
    "backward_prepost": Attention(
        Call(100, 100, (3, 3), (64, 64), 1, BRAIN), "backward", prepost=True, resident=2
    ).run,
    "backward_apart": Attention(
        Call(200, 150, (1, 1), (192, 128), 1, BRAIN, CAUSAL), "backward"
    ).run,
    "backward_wide": Attention(
        Call(150, 100, (1, 1), (256, 256), 1, BRAIN, CAUSAL, dropout_p=0.2), "backward"
    ).run,
    "backward_by_query": Attention(
        Call(300, 130, (1, 1), (64, 64), 1, BRAIN), "backward",
        form=(("flat", True), ("by_query", True)),
    ).run,
    "backward_in_a_ring": Attention(
        Call(200, 130, (1, 1), (128, 128), 1, BRAIN), "backward",
        form=(("flat", True), ("by_query", True), ("ring", True)),
    ).run,
    "backward_together": Attention(
        Call(200, 260, (1, 1), (128, 128), 1, BRAIN, CAUSAL), "backward",
        form=(("flat", True), ("by_query", True), ("together", True)),
    ).run,
    "backward_in_one_loop": Attention(
        Call(200, 260, (1, 1), (128, 128), 1, BRAIN, CAUSAL), "backward",
        form=(("flat", True), ("by_query", True), ("together", True), ("two_loops", False)),
    ).run,
    "backward_in_turns": Attention(
        Call(250, 250, (3, 3), (64, 64), 1, BRAIN, CAUSAL), "backward", resident=2,
        plan=(*_SMALL_SECTIONS, ("WAYS", in_turns(64, diagonal=True))),
    ).run,
    "backward_in_turns_half_seen": Attention(
        Call(250, 250, (2, 2), (64, 64), 1, BRAIN, CAUSAL), "backward", resident=2,
        plan=(*_SMALL_SECTIONS, ("WAYS", in_turns(64, diagonal=True, passes_by=True))),
    ).run,
    "backward_in_turns_full": Attention(
        Call(200, 250, (2, 2), (128, 128), 1, BRAIN), "backward", resident=2,
        plan=(*_SMALL_SECTIONS, ("WAYS", in_turns(128))),
    ).run,
    "8_bits": _bytes,
    "8_bits_packed": _packed_bytes,
    "8_bits_masked": _masked_bytes,
    "paged_decode": _paged,
    "rounded_rows": _rounded_rows,
    "paged_decode_with_a_plan": functools.partial(_paged, has_plan=True),
    "latents": _latents,
    "latents_of_8_bits": _latents_of_bytes,
    "few_rows": _rows,
    "few_rows_early": functools.partial(_rows, early=True),
}  # fmt: skip


def replayed(recordings: Sequence[Recording], schedules: int, first: int = 0) -> None:
    """Replay each recorded kernel in so many schedules; raise what is wrong with one."""
    for recording in recordings:
        Replay(recording).run(first, schedules)
