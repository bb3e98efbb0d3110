"""Engines over a model of this process, weights changed while it serves, sleep and wake."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.adapter_files import SITES
from tests.engine.checkpoint import write_checkpoint
from tests.models.test_state_families import make as make_state_model
from tests.models.tiny import save_hf
from tilewise.engine.llm import LLM, packaged_model
from tilewise.engine.request import SamplingParams
from tilewise.engine.versions import unversioned, versioned
from tilewise.errors import CheckpointError, RequestError
from tilewise.models import load_model
from tilewise.models.adapters import AdapterTensors
from tilewise.models.decoder import Decoder

ASKED = SamplingParams(temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, logprobs=0)
PROMPTS = ["Once upon a time", "The little dog ran to the big red ball and"]


def live(dtype: str = "float32", **settings: Any) -> tuple[Decoder, LLM]:
    model = load_model(packaged_model(), dtype=dtype)
    settings = {"num_blocks": 128, "block_size": 4, "device": "cpu"} | settings
    return model, LLM(model, tokenizer=packaged_model(), **settings)


def answers(llm: LLM, prompts: Any = PROMPTS) -> list[Any]:
    found = llm.generate(prompts, ASKED)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in found]


def step(model: Decoder) -> None:
    """Change all weights a little."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator).to(parameter) * 0.02


@pytest.fixture(scope="module")
def story() -> Any:
    with LLM("story", dtype="float32", num_blocks=128, block_size=4, device="cpu") as llm:
        yield llm


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    """Other weights of the story model, by a checkpoint's names."""
    [file] = packaged_model().glob("*.safetensors")
    generator = torch.Generator().manual_seed(2)
    return {
        name: tensor.float() + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(file).items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_live_model_is_served_as_its_checkpoint_and_then_as_it_was_trained(dtype: str) -> None:
    model, llm = live(dtype)
    with LLM("story", dtype=dtype, num_blocks=128, block_size=4, device="cpu") as stored:
        assert answers(llm) == answers(stored)
    step(model)
    with pytest.raises(RuntimeError, match=r"update_weights\(\) must follow a change"):
        answers(llm)
    llm.update_weights()
    changed = answers(llm)
    with LLM(model, tokenizer="story", num_blocks=128, block_size=4, device="cpu") as fresh:
        assert answers(fresh) == changed
    llm.close()


def test_parameters_that_no_layout_changes_are_shared_and_stay_trainable() -> None:
    model, llm = live()
    assert llm.model.norm.weight is model.norm.weight
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.layers[0].attention.qkv_proj.weight.requires_grad
    model.compute_logits(model(torch.tensor([[5, 9, 3]]))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    llm.close()


def test_token_ids_are_enough_without_a_tokenizer() -> None:
    model = load_model(packaged_model(), dtype="float32")
    with LLM(model, num_blocks=32, device="cpu") as llm:
        [output] = llm.generate({"prompt_token_ids": [5, 9, 3]}, ASKED)
        assert len(output.outputs[0].token_ids) == 12


def test_a_model_made_in_inference_mode_is_served_too() -> None:
    with torch.inference_mode():
        model = load_model(packaged_model(), dtype="float32")
    with LLM(model, num_blocks=32, device="cpu") as llm:
        llm.generate({"prompt_token_ids": [5, 9, 3]}, ASKED)
        llm.update_weights()
        llm.generate({"prompt_token_ids": [5, 9, 3]}, ASKED)


def test_blocks_of_the_old_weights_are_found_no_more(story: LLM, tensors: Any) -> None:
    prompt = PROMPTS[1]
    story.generate(prompt, ASKED)
    assert story.generate(prompt, ASKED)[0].num_cached_tokens
    before = story.generate(prompt, ASKED)[0].outputs[0].logprobs
    story.update_weights(tensors)
    first, again = (story.generate(prompt, ASKED)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens > 0
    assert first.outputs[0].logprobs == again.outputs[0].logprobs != before
    story.update_weights(packaged_model())
    last = story.generate(prompt, ASKED)[0]
    assert last.num_cached_tokens == 0
    assert last.outputs[0].logprobs == before


def test_given_tensors_are_only_read_and_no_longer_needed_afterwards(
    story: LLM, tensors: Any
) -> None:
    story.update_weights(tensors)
    expected = answers(story)
    story.update_weights(packaged_model())
    before = answers(story)
    buffer = torch.empty(sum(x.numel() for x in tensors.values()) + 1)
    given, at = {}, 1
    for name, x in tensors.items():  # of one buffer, matrices by columns
        view = buffer[at : at + x.numel()].view(x.shape[::-1])
        given[name] = (view.mT if x.dim() > 1 else view).copy_(x)
        at += x.numel()
    story.update_weights(given)
    assert all(torch.equal(x, tensors[name]) for name, x in given.items())
    buffer.zero_()
    assert answers(story) == expected != before
    story.update_weights(packaged_model())


def test_the_engines_own_parameters_may_change_places(story: LLM, tensors: Any) -> None:
    def norm(layer: int) -> torch.Tensor:
        return story.model.get_parameter(f"layers.{layer}.attention_norm.weight")

    names = [f"model.layers.{i}.input_layernorm.weight" for i in (0, 1)]
    story.update_weights(tensors)
    story.update_weights(tensors | {names[0]: norm(1).clone(), names[1]: norm(0).clone()})
    expected = answers(story)
    story.update_weights(tensors)
    before = answers(story)
    places = [norm(i).data_ptr() for i in (0, 1)]
    story.update_weights(tensors | {names[0]: norm(1), names[1]: norm(0)})
    assert [norm(i).data_ptr() for i in (0, 1)] == places
    assert answers(story) == expected != before
    story.update_weights(packaged_model())


def test_a_bfloat16_engine_takes_parts_of_one_buffer_wherever_they_begin(tensors: Any) -> None:
    buffer = torch.empty(sum(x.numel() for x in tensors.values()) + 1, dtype=torch.bfloat16)
    given, at = {}, 1
    for name, x in tensors.items():
        given[name] = buffer[at : at + x.numel()].view(x.shape).copy_(x)
        at += x.numel()
    settings: dict[str, Any] = {"num_blocks": 128, "block_size": 4, "device": "cpu"}
    with LLM("story", dtype="bfloat16", **settings) as llm:
        llm.update_weights({name: x.clone() for name, x in given.items()})
        expected = answers(llm)
        llm.update_weights(packaged_model())
        before = answers(llm)
        llm.update_weights(given)
        assert answers(llm) == expected != before


def test_no_salt_of_a_caller_is_the_namespace_of_other_weights() -> None:
    assert versioned("a", "") == "a"
    assert unversioned(versioned("a", "0f"), "0f") == "a"
    assert len({versioned(s, v) for s in ("", "a", "\0a") for v in ("", "0f", "1e")}) == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "must hold tensor model.norm.weight"),
        (lambda t: t.update(odd=torch.zeros(2)), "only tensors of LlamaForCausalLM, got 'odd'"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(3)}),
            r"model.norm.weight must have shape \(256,\), got \(3,\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].bfloat16()}),
            "model.norm.weight must be torch.float32, got torch.bfloat16",
        ),
        (
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"] * float("nan")}),
            "model.norm.weight must be finite",
        ),
        (
            lambda t: t.update(
                {
                    "model.layers.0.input_layernorm.weight": t["model.norm.weight"],
                    "model.layers.1.input_layernorm.weight": t["model.norm.weight"],
                }
            ),
            "must have memory of their own",
        ),
    ],
    ids=["missing", "extra", "shape", "dtype", "nan", "one memory"],
)
def test_a_wrong_update_is_refused_whole_and_the_old_weights_serve_on(
    story: LLM, tensors: Any, change: Any, message: str
) -> None:
    before, given = answers(story), dict(tensors)
    change(given)
    with pytest.raises(CheckpointError, match=message):
        story.update_weights(iter(given.items()))
    assert answers(story) == before


def test_a_nan_in_a_live_model_is_refused_and_its_packed_weights_stay() -> None:
    model, llm = live()
    words = llm.model.layers[0].attention.qkv_proj.panels.words.clone()
    with torch.no_grad():
        model.layers[0].attention.qkv_proj.weight[3, 4] = float("nan")
    with pytest.raises(CheckpointError, match=r"layers.0.attention.qkv_proj.weight must be finite"):
        llm.update_weights()
    assert torch.equal(llm.model.layers[0].attention.qkv_proj.panels.words, words)
    llm.close()


@pytest.mark.parametrize(
    ("given", "running", "error", "message"),
    [
        (None, "wait", ValueError, "weights must be tensors by name or a folder, got None"),
        ({}, "soon", ValueError, "running must be one of wait, abort, keep, got 'soon'"),
        ([3], "wait", TypeError, "weights must be pairs of a name and a tensor, got 3"),
        ("/nowhere/at/all", "wait", CheckpointError, "nowhere"),
    ],
)
def test_what_is_no_update_is_refused(
    story: LLM, given: Any, running: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        story.update_weights(given, running=running)


def test_a_live_model_takes_its_own_weights_alone() -> None:
    _, llm = live()
    with pytest.raises(ValueError, match="weights must be None with a model that lives"):
        llm.update_weights({})
    llm.close()
    with pytest.raises(ValueError, match="random_weights must be False with a model that lives"):
        live(random_weights=True)
    with pytest.raises(ValueError, match="tensor_parallel_size must be 1 with a model that lives"):
        live(tensor_parallel_size=2)


def test_a_checkpoint_of_another_model_is_refused(story: LLM, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", has_tokenizer=False)
    before = answers(story)
    with pytest.raises(CheckpointError, match="must be that of the engine's model"):
        story.update_weights(tmp_path)
    assert answers(story) == before


def start(llm: LLM, count: int = 2) -> Any:
    """Let long requests run; return a function that returns what they have become."""
    asked = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, logprobs=0)
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.extend(llm.generate([PROMPTS[1]] * count, asked))
    )
    before = llm.engine.stats().decode_tokens
    thread.start()
    while llm.engine.stats().decode_tokens < before + 20:
        time.sleep(0.001)

    def joined() -> list[Any]:
        thread.join(60)
        assert not thread.is_alive()
        return [o.outputs[0] for o in found]

    return joined


def test_running_requests_wait_are_aborted_or_go_on(story: LLM, tensors: Any) -> None:
    whole = start(story)()
    for running, reason, is_same in (
        ("wait", "length", True),
        ("abort", "abort", False),
        ("keep", "length", False),
    ):
        joined = start(story)
        story.update_weights(tensors, running=running)
        found = joined()
        assert [c.finish_reason for c in found] == [reason] * 2
        assert (found[0].token_ids == whole[0].token_ids) is is_same
        if running == "keep":
            assert len(found[0].token_ids) == 150
            assert found[0].token_ids[:15] == whole[0].token_ids[:15]
        story.update_weights(packaged_model())
    assert start(story)()[0].token_ids == whole[0].token_ids


def test_a_request_that_no_step_had_is_answered_by_the_new_weights_alone(tensors: Any) -> None:
    settings = {"dtype": "float32", "num_blocks": 128, "block_size": 4, "device": "cpu"}
    with LLM("story", max_num_seqs=1, **settings) as llm:
        llm.generate(PROMPTS[1], ASKED)  # whose blocks the old weights have computed
        joined = start(llm, 1)
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.extend(llm.generate(PROMPTS[1], ASKED)))
        waiting.start()
        while llm.loop.num_live < 2:
            time.sleep(0.001)
        llm.update_weights(tensors, running="keep")
        waiting.join(60)
        joined()
        assert found[0].num_cached_tokens == 0
        llm.reset_prefix_cache()
        [alone] = llm.generate(PROMPTS[1], ASKED)
        assert alone.outputs[0].logprobs == found[0].outputs[0].logprobs


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_has_slept_answers_as_before(level: int) -> None:
    model, llm = live(num_blocks=4096)
    before = answers(llm)
    tensor = llm.engine.runner.storage.whole[0]
    assert tensor.untyped_storage().nbytes() > 0
    llm.sleep(level)
    assert tensor.untyped_storage().nbytes() == 0
    with pytest.raises(RequestError, match="the engine must be awake to take requests"):
        answers(llm)
    with pytest.raises(RuntimeError, match="must be awake to sleep"):
        llm.sleep()
    with pytest.raises(RuntimeError, match="must be awake to take weights"):
        llm.update_weights()
    llm.wake()
    with pytest.raises(RuntimeError, match="must sleep to wake"):
        llm.wake()
    assert answers(llm) == before
    step(model)
    llm.update_weights()
    assert answers(llm) != before
    llm.close()


def test_a_level_that_drops_weights_reads_them_again() -> None:
    with LLM("story", dtype="float32", num_blocks=128, block_size=4, device="cpu") as llm:
        before = answers(llm)
        words = [m.panels.words for m in llm.model.modules() if hasattr(m, "panels")]
        assert words
        llm.sleep(2)
        assert all(parameter.is_meta for parameter in llm.model.parameters())
        llm.wake()
        assert answers(llm) == before
    with pytest.raises(ValueError, match="level must be 1 or 2, got 3"):
        llm.sleep(3)
    with pytest.raises(ValueError, match="running must be wait or abort, got 'keep'"):
        llm.sleep(1, running="keep")


def test_rounds_of_steps_updates_and_sleep_leave_nothing_behind() -> None:
    model, llm = live()
    words = {m.panels.words.data_ptr() for m in llm.model.modules() if hasattr(m, "panels")}
    gone = []
    for _ in range(3):
        step(model)
        llm.update_weights()
        answers(llm)
        gone.append(weakref.ref(llm.engine.runner))
        gone.append(weakref.ref(llm.engine.runner.storage.whole[0]))
        llm.sleep()
        llm.wake()
    gc.collect()
    assert [each() for each in gone] == [None] * 6
    assert words == {m.panels.words.data_ptr() for m in llm.model.modules() if hasattr(m, "panels")}
    llm.close()


def test_an_adapter_is_replaced_by_tensors_of_this_process() -> None:
    def adapter(seed: int) -> AdapterTensors:
        generator, given = torch.Generator().manual_seed(seed), {}
        for name, site in SITES.items():
            for half, shape in ("A", (4, site.in_features)), ("B", (site.out_features, 4)):
                given[f"base_model.model.{name}.lora_{half}.weight"] = (
                    torch.randn(shape, generator=generator) / shape[1] ** 0.5
                )
        return AdapterTensors(
            {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "target_modules": list(SITES)}, given
        )

    _, llm = live(enable_lora=True, max_cpu_loras=1)
    plain = answers(llm)
    found = []
    for seed in (1, 2, 1):
        given = adapter(seed)
        llm.load_lora_adapter("policy", given, replaces=True)
        for tensor in given.tensors.values():
            tensor.zero_()  # the caller's own are not read again
        llm.load_lora_adapter(f"other {len(found)}", adapter(9))
        [output] = llm.generate(PROMPTS[1], ASKED, lora_request="policy")
        found.append(output.outputs[0].logprobs)
    assert found[0] == found[2] != found[1]
    assert answers(llm) == plain
    broken = adapter(3)
    next(iter(broken.tensors.values()))[0] = float("nan")
    with pytest.raises(CheckpointError, match="must be finite"):
        llm.load_lora_adapter("policy", broken, replaces=True)
    [output] = llm.generate(PROMPTS[1], ASKED, lora_request="policy")
    assert output.outputs[0].logprobs == found[2]
    llm.close()


@pytest.mark.parametrize("case", ["qwen3_5", "kimi_linear"])
def test_a_model_whose_layers_keep_states_takes_weights_sleeps_and_is_audited(
    case: str, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"max_model_len": 256, "device": "cpu", "num_blocks": 200}
    for name, factor in (("a", 1.0), ("b", 1.03)):
        model = make_state_model(case)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        save_hf(model, tmp_path / name)
    prompts = [{"prompt_token_ids": list(range(3, 3 + count))} for count in (20, 70)]
    with (
        LLM(tmp_path / "a", audit=1.0, canary=1.0, **settings) as llm,
        LLM(tmp_path / "b", **settings) as other,
    ):
        old, new = answers(llm, prompts), answers(other, prompts)
        llm.update_weights(tmp_path / "b")
        assert answers(llm, prompts) == new != old
        llm.sleep()
        llm.wake()
        assert answers(llm, prompts) == new
        stats = llm.engine.stats()
        assert not stats.num_audits_different + stats.num_blocks_broken


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu_parameters_are_shared_graphs_stay_and_memory_is_flat(dtype: str) -> None:
    model = load_model(packaged_model(), dtype=dtype, device="cuda")
    model.use_inference_bits()
    settings: dict[str, Any] = {"num_blocks": 2048, "graphs": "lazy", "batch_invariant": True}
    llm = LLM(model, tokenizer=packaged_model(), **settings)
    shared = llm.model.layers[0].attention.qkv_proj.weight
    assert shared.data_ptr() == model.layers[0].attention.qkv_proj.weight.data_ptr()
    held = []
    for _ in range(12):
        step(model)
        with pytest.raises(RuntimeError, match="must follow a change"):
            answers(llm)
        llm.update_weights()
        found = answers(llm)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= held[2]
    with LLM(model, tokenizer=packaged_model(), **settings) as fresh:
        assert answers(fresh) == found
    before = torch.cuda.memory_allocated()
    num_bytes = llm.engine.runner.storage.num_bytes
    llm.sleep()
    assert torch.cuda.memory_allocated() <= before - num_bytes
    llm.wake()
    assert answers(llm) == found
    llm.close()


@pytest.mark.gpu
def test_on_a_gpu_weights_of_a_checkpoint_move_to_main_memory_and_back() -> None:
    with LLM("story", device="cuda", num_blocks=512, graphs="lazy") as llm:
        before, held = answers(llm), torch.cuda.memory_allocated()
        llm.sleep()
        assert all(parameter.device.type == "cpu" for parameter in llm.model.parameters())
        assert torch.cuda.memory_allocated() < held / 4
        llm.wake()
        assert answers(llm) == before
        llm.update_weights(packaged_model())
        assert answers(llm) == before
