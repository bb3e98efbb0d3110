"""Plans of Hopper's kernels over paged caches and latents start what new plans would start."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.gluon import test_mla as latents
from tests.kernels.gluon import test_paged as paged
from tests.kernels.gluon import test_plan
from tests.kernels.gluon.driver import AnyKernel, pretended_gpu
from tests.kernels.triton.test_mla import make_inputs
from tilewise.kernels import device
from tilewise.kernels.gluon.latent import plan as gluon_latent
from tilewise.kernels.gluon.paged import plan as gluon_paged
from tilewise.kernels.host import plan as host
from tilewise.kernels.plan import Call, Refusal
from tilewise.kernels.spec import LatentTensors, PagedTensors
from tilewise.kernels.triton.paged import decode as triton_decode
from tilewise.kernels.triton.paged import plan as triton_paged
from tilewise.kernels.triton.paged import rows as triton_rows
from tilewise.kernels.triton.paged import rows_merge as triton_rows_merge

PAGED = {
    "decode": paged.Case("", (430, 33, 130), (1, 1, 1), (8, 4), head_dim=64),
    "drafts_and_a_window": paged.EMULATED["drafts_and_a_window"],
    "a_scale_a_head_sinks": paged.Case(
        "", (290, 70), (1, 1), (4, 4), head_scales=True, options={"sinks": 3.0}
    ),
    "alone": paged.Case("", (29, 70), (1, 1), (64, 4)),
}
LATENTS = ("one_sequence", "drafts_in_wide_blocks", "small_blocks")


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(device, "sm_count_of", lambda _: 132)
    with pretended_gpu() as it:
        yield it


@pytest.fixture
def kernels(driver, monkeypatch):
    """Pretend that Triton compiled the kernels."""
    found = {}
    for module in (
        gluon_paged, gluon_latent, triton_decode, triton_paged, triton_rows, triton_rows_merge
    ):  # fmt: skip
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            found[name] = AnyKernel(driver)
            monkeypatch.setattr(module, name, found[name])
    return found


class Given:
    """A call's spec and tensors."""

    def __init__(self, module, spec, tensors) -> None:
        self.module, self.spec, self.tensors = module, spec, tensors

    def plan(self):
        return self.module.made_fwd(Call.of(self.spec, self.tensors))

    def named(self) -> dict[str, torch.Tensor]:
        return {name: x for name, x in self.tensors._asdict().items() if x is not None}


def paged_call(case: paged.Case, has_records: bool = False) -> Given:
    (q, k, v, k_scale, v_scale, *_), options = paged._inputs(case, torch.int8, "cpu")
    window = options.get("window")
    spec = replace(
        paged.BYTES, num_seqs=len(case.lengths), num_tokens=q.shape[0],
        max_seqlen_q=max(case.runs), num_q_heads=case.heads[0], num_kv_heads=case.heads[1],
        head_dim=case.head_dim, v_head_dim=case.head_dim, block_size=case.block_size,
        max_blocks=options["block_table"].shape[1], softmax_scale=0.25,
        window_left=-1 if window is None else window - 1, has_sinks="sinks" in options,
    )  # fmt: skip
    tensors = PagedTensors(
        q, k, v, *(options[name] for name in paged._TENSORS), sinks=options.get("sinks"),
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    if has_records:
        rows = gluon_paged.plan_pairs(spec, q.device)
        tensors = tensors._replace(records=torch.zeros(rows, 8, dtype=torch.int32))
    return Given(gluon_paged, spec, tensors)


def portable_call(runs: tuple[int, ...], lengths: tuple[int, ...], has_records=False) -> Given:
    """A call over a cache of 16 bits, which the portable kernels take."""
    block_size, (heads, kv_heads, width) = 16, (8, 4, 64)
    count = -(-max(lengths) // block_size)
    spec = replace(
        paged.BYTES, cache_dtype=torch.bfloat16, num_seqs=len(runs), num_tokens=sum(runs),
        max_seqlen_q=max(runs), num_q_heads=heads, num_kv_heads=kv_heads, head_dim=width,
        v_head_dim=width, block_size=block_size, max_blocks=count, softmax_scale=0.25,
    )  # fmt: skip
    caches = torch.zeros(2, len(runs) * count, block_size, kv_heads, width, dtype=spec.dtype)
    records = None
    if has_records:
        rows = triton_paged.plan_pairs(spec, caches.device)
        records = torch.zeros(rows, 8, dtype=torch.int32)
    tensors = PagedTensors(
        torch.zeros(sum(runs), heads, width, dtype=spec.dtype), *caches,
        torch.arange(len(runs) * count, dtype=torch.int32).view(len(runs), count),
        torch.tensor(lengths, dtype=torch.int32), torch.tensor([0, *runs]).cumsum(0).int(),
        None, None, None, None, None, records,
    )  # fmt: skip
    return Given(triton_paged, spec, tensors)


PROMPTS = ((1, 1, 90, 300), (50, 700, 90, 400))  # beside sequences that decode


def latent_call(name: str, cache_dtype: torch.dtype | None = None) -> Given:
    inputs = make_inputs(latents.CASES[name], "cpu")
    spec, cache, scale = inputs.spec, inputs.cache, None
    if cache_dtype is not None:
        cache, spec = cache.nan_to_num().to(cache_dtype), replace(spec, cache_dtype=cache_dtype)
        scale = torch.ones(*cache.shape[:2], 2)
    tensors = LatentTensors(
        inputs.q_latent, inputs.q_rope, cache, **inputs.tensors, latent_scale=scale
    )
    return Given(gluon_latent, spec, tensors)


CALLS = {
    **{name: lambda case=case: paged_call(case) for name, case in PAGED.items()},
    "planned": lambda: paged_call(PAGED["decode"], has_records=True),
    "portable_prompts": lambda: portable_call(*PROMPTS),
    "portable_prompts_planned": lambda: portable_call(*PROMPTS, has_records=True),
    "portable_decode": lambda: portable_call((1, 1), (500, 3000)),
    "portable_alone": lambda: portable_call((600,), (600,)),
    **{f"latent_{name}": lambda name=name: latent_call(name) for name in LATENTS},
    "latent_bytes": lambda: latent_call("one_sequence", torch.int8),
    "latent_bytes_drafts": lambda: latent_call("drafts_in_half_blocks", torch.float8_e4m3fn),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_plan_starts_for_others_what_a_new_one_would(driver, kernels, name):
    call, other = CALLS[name](), CALLS[name]()
    with mock.patch.object(test_plan, "tensors_of", Given.named):
        test_plan.assert_runs_like_a_new_plan(
            driver, kernels, Given.plan, lambda given: given.tensors, call, other
        )


@pytest.mark.parametrize("name", CALLS)
def test_later_runs_go_by_addresses_alone(driver, kernels, name):
    call = CALLS[name]()
    plan = call.plan()
    plan.run(*call.tensors)
    driver.seen.clear()
    with mock.patch.object(host, "launch_now", side_effect=AssertionError):
        o, lse = plan.run(*call.tensors)
    addresses = {value for launch in driver.seen for value in launch.values if type(value) is int}
    assert {o.data_ptr(), lse.data_ptr()} <= addresses
    assert call.tensors.cu_seqlens_q.data_ptr() in addresses


@pytest.mark.parametrize("name", ["decode", "portable_prompts_planned", "portable_alone"])
def test_the_first_result_lies_where_it_is_wanted(driver, kernels, name):
    call = CALLS[name]()
    plan = call.plan()
    for count in range(3):  # the first goes to Triton's launcher
        o = torch.empty(call.spec.num_tokens, call.spec.num_q_heads, call.spec.v_head_dim)
        o = o.to(call.spec.dtype)
        driver.seen.clear()
        results = plan.run(*call.tensors, out=o)
        assert results[0] is o
        values = [value for launch in driver.seen for value in launch.values]
        assert count == 0 or o.data_ptr() in values
    assert plan.run(*call.tensors)[0] is not o


def test_a_later_step_with_prompts_asks_triton_for_nothing(driver, kernels):
    """As many launches as one of other lengths has, all past Triton's launcher."""
    first, other = (
        portable_call(*PROMPTS, True),
        portable_call((1, 1, 1, 77), (9, 80, 700, 77), True),
    )
    first.plan().run(*first.tensors)
    before = {name: kernel.launches for name, kernel in kernels.items()}
    driver.seen.clear()
    plan = other.plan()
    plan.run(*other.tensors)
    assert {name: kernel.launches for name, kernel in kernels.items()} == before
    assert len(driver.seen) == len(plan.steps) >= 2


@pytest.mark.parametrize("name", CALLS)
def test_planning_computes_nothing(driver, kernels, name):
    call = CALLS[name]()
    planned = Call.of(call.spec, call.tensors)
    with test_plan.Watch() as watch:
        call.module.made_fwd(planned)
    assert watch.seen == []


def test_queries_whose_heads_lie_otherwise_are_copied(driver, kernels):
    call = latent_call("drafts_in_wide_blocks")
    q = call.tensors.q_latent
    odd = torch.empty(q.shape[1], q.shape[0], q.shape[2], dtype=q.dtype).transpose(0, 1)
    call.tensors = call.tensors._replace(q_latent=odd.copy_(q))
    plan = call.plan()
    assert [step.split()[0] for step in plan.steps] == ["torch:", "launch", "launch"]
    for _ in range(2):
        driver.seen.clear()
        plan.run(*call.tensors)
    addresses = [value[0] for value in driver.seen[0].values if type(value) is tuple]
    assert odd.data_ptr() not in addresses


def test_caches_and_scales_that_the_copy_engine_cannot_read_are_refused(monkeypatch):
    call = paged_call(PAGED["decode"])
    monkeypatch.setattr(gluon_paged, "why_not", gluon_paged.why_not_decode)
    k = call.tensors.k_cache
    odd = torch.empty(k.numel() + 1, dtype=k.dtype)[1:].view(k.shape)
    scale = call.tensors.k_scale
    odd_scale = torch.empty(scale.numel() + 1)[1:].view(scale.shape)
    assert not isinstance(gluon_paged.plan_fwd(Call.of(call.spec, call.tensors)), Refusal)
    for name, cache, words in (
        ("k_scale", odd_scale, "16-byte boundary"),
        ("v_scale", torch.empty(*scale.shape[:2], 5)[..., :4], "strides must be"),
        ("v_scale", torch.empty(*scale.shape, 4)[..., 0], "last stride must be 1"),
        ("v_cache", odd, "16-byte boundary"),
        ("k_cache", torch.empty(*k.shape[:3], 72, dtype=k.dtype)[..., :64], "strides must be"),
    ):
        plan = gluon_paged.plan_fwd(Call.of(call.spec, call.tensors._replace(**{name: cache})))
        assert isinstance(plan, Refusal)
        assert f"{name} must be addressable by TMA" in plan.reason
        assert words in plan.reason
