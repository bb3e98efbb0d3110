"""Adapters of an engine: each request has its own, loaded and unloaded while others run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.engine.adapter_files import SITES, merge, write_adapter
from tests.engine.checkpoint import greedy_tokens, write_checkpoint
from tilewise.engine.adapters import Adapters, salted
from tilewise.engine.captured.decode_step import DecodeStep
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.config import EngineConfig, PromptLookup, RequestTerms
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.engine.steps.cpu_step import CompiledRunner
from tilewise.engine.steps.runner import ModelRunner
from tilewise.engine.waiter import Waiter, raise_first
from tilewise.errors import CheckpointError, RequestError
from tilewise.models.adapters import MAX_RANK, adapter_sites
from tilewise.models.config import read_config
from tilewise.models.registry import empty_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=1)
PROMPTS = ["Once upon a time", "The little dog", "One day Tom saw a big red ball in the park"]
NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    attention = [name for name in SITES if name.endswith(("q_proj", "v_proj"))]
    return {
        "a": write_adapter(root / "a", 1),
        "b": write_adapter(root / "b", 2, rank=16),
        "c": write_adapter(root / "c", 3, names=attention),
    }


def make(folders: dict[str, Path], **settings: Any) -> LLM:
    given = {"device": "cpu", "dtype": "float32", "num_blocks": 200, "block_size": 4}
    return LLM("story", enable_lora=True, lora_modules=folders, **{**given, **settings})


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> Any:
    with make(folders) as llm:
        yield llm


def answers(llm: LLM, prompts: Any, params: Any = GREEDY, **terms: Any) -> list[Any]:
    """Return tokens and log-probabilities, to the bit."""
    return [
        [(c.token_ids, c.logprobs) for c in output.outputs]
        for output in llm.generate(prompts, params, **terms)
    ]


def together(llm: LLM, wanted: list[tuple[str, str]], params: SamplingParams = GREEDY) -> list[Any]:
    """Return what requests (prompt, adapter) in the same steps answer."""
    made = [llm.prepare(p, params, RequestTerms(lora_request=name)) for p, name in wanted]
    waiter = Waiter(made)
    llm.loop.submit(*made)
    while not waiter.is_over:
        waiter.wait()
    raise_first(made)
    return [[(c.token_ids, c.logprobs) for c in each.output.outputs] for each in made]


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_the_merged_model(
    name: str, llm: LLM, folders: dict[str, Path], tmp_path: Path
) -> None:
    with LLM(merge(folders[name], tmp_path / "merged"), device="cpu", dtype="float32") as merged:
        wanted = merged.generate(PROMPTS, GREEDY)
    plain = llm.generate(PROMPTS, GREEDY)
    found = llm.generate(PROMPTS, GREEDY, lora_request=name)
    for one, other, base in zip(wanted, found, plain, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].token_ids != base.outputs[0].token_ids
        for a, b in zip(one.outputs[0].logprobs, other.outputs[0].logprobs, strict=True):
            assert a.keys() == b.keys()
            for token in a:
                assert a[token] == pytest.approx(b[token], abs=5e-4)


def test_bits_do_not_depend_on_the_adapters_of_neighbours(llm: LLM) -> None:
    wanted = [(prompt, name) for prompt in PROMPTS for name in ("", *NAMES)]
    llm.reset_prefix_cache()
    mixed = together(llm, wanted)
    for (prompt, name), found in zip(wanted, mixed, strict=True):
        llm.reset_prefix_cache()
        assert answers(llm, [prompt], lora_request=name) == [found]


def test_blocks_are_shared_by_requests_of_one_adapter_alone(llm: LLM) -> None:
    llm.reset_prefix_cache()
    prompt = PROMPTS[2]
    cached = []
    for name in ("", "a", "b", "a", ""):
        [output] = llm.generate(prompt, GREEDY, lora_request=name)
        cached.append(output.num_cached_tokens)
    assert cached[:3] == [0, 0, 0]
    assert cached[3] > 0
    assert cached[4] > 0


def test_no_salt_of_a_caller_is_the_namespace_of_an_adapter(llm: LLM) -> None:
    adapters = llm._adapters
    assert adapters is not None
    adapter = adapters.get("a")
    own = salted("", adapter)
    assert salted("", None) == ""
    assert salted("x", None) == "x"
    assert len({own, salted("x", adapter), salted(own, None), salted(own, adapter)}) == 4


@pytest.mark.parametrize(
    "settings",
    [
        {"num_blocks": 14, "preemption": "recompute"},
        {"num_blocks": 14, "preemption": "swap", "swap_space_gib": 0.01},
        {"max_num_batched_tokens": 5, "max_num_seqs": 3},
        {"speculative": PromptLookup(num_tokens=3, is_adaptive=False)},
        {"max_loras": 1},
    ],
    ids=["recomputed", "swapped", "chunks", "drafts", "one_slot"],
)
def test_answers_stay_the_same(
    settings: dict[str, Any], llm: LLM, folders: dict[str, Path]
) -> None:
    wanted = [(prompt, name) for prompt in PROMPTS for name in ("a", "", "b", "c")]
    llm.reset_prefix_cache()
    expected = together(llm, wanted)
    with make(folders, **settings) as other:
        assert together(other, wanted) == expected


def test_samples_and_beams_of_a_request_use_its_adapter(llm: LLM) -> None:
    forks = SamplingParams(n=3, temperature=1.0, max_tokens=6, seed=3)
    beams = BeamSearchParams(beam_width=2, max_tokens=6)
    for params in (forks, beams):
        plain = [c.token_ids for c in llm.generate(PROMPTS[0], params)[0].outputs]
        own = [c.token_ids for c in llm.generate(PROMPTS[0], params, lora_request="a")[0].outputs]
        assert own != plain
        alone = together(llm, [(PROMPTS[0], "a"), (PROMPTS[0], "b")], params)
        assert [tokens for tokens, _ in alone[0]] == own


def test_embeddings_and_prompt_scores_are_of_the_adapter(llm: LLM) -> None:
    base, own = (llm.embed(PROMPTS[0], lora_request=name)[0].embedding for name in ("", "a"))
    assert base != own
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    base, own = (
        llm.generate(PROMPTS[0], params, lora_request=name)[0].prompt_logprobs for name in ("", "a")
    )
    assert base != own


def test_an_adapter_that_is_unloaded_stays_until_its_last_request_ends(
    llm: LLM, folders: dict[str, Path]
) -> None:
    expected = answers(llm, [PROMPTS[0]], lora_request="a")
    llm.load_lora_adapter("later", folders["a"])
    assert llm.lora_adapters["later"] == str(folders["a"])
    adapters = llm._adapters
    assert adapters is not None
    alive = weakref.ref(adapters.get("later"))
    text = llm.stream(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=12), lora_request="later"
    )
    first = next(text)
    llm.unload_lora_adapter("later")
    assert "later" not in llm.lora_adapters
    with pytest.raises(RequestError, match=r"lora_request must be an adapter that is loaded \(a, "):
        llm.generate(PROMPTS[0], GREEDY, lora_request="later")
    assert llm.tokenizer is not None
    whole = llm.tokenizer.decode(expected[0][0][0])
    assert first + "".join(text) == whole
    del text
    # A plain step is remembered until the next one.
    llm.generate(PROMPTS[1], SamplingParams(temperature=0, max_tokens=4))
    gc.collect()
    assert alive() is None


def test_an_adapter_takes_the_name_of_another(llm: LLM, folders: dict[str, Path]) -> None:
    llm.load_lora_adapter("name", folders["a"])
    before = answers(llm, [PROMPTS[0]], lora_request="name")
    with pytest.raises(RequestError, match="lora_name must be of no adapter that is loaded"):
        llm.load_lora_adapter("name", folders["b"])
    assert answers(llm, [PROMPTS[0]], lora_request="name") == before
    llm.load_lora_adapter("name", folders["b"], replaces=True)
    assert answers(llm, [PROMPTS[0]], lora_request="name") == answers(
        llm, [PROMPTS[0]], lora_request="b"
    )
    llm.unload_lora_adapter("name")
    with pytest.raises(RequestError, match="lora_name must be an adapter that is loaded"):
        llm.unload_lora_adapter("name")


def test_what_is_not_used_leaves_main_memory_and_is_read_again(tmp_path: Path) -> None:
    paths = {name: write_adapter(tmp_path / name, i) for i, name in enumerate(NAMES)}
    adapters = Adapters(SITES, max_rank=16, most_held=1)
    for name, path in paths.items():
        adapters.load(name, path)
    first = adapters.get("a")
    number, fingerprint = first.number, first.fingerprint
    adapters.get("b")
    assert adapters.get("a") is first  # a request holds it
    adapters.get("b")
    alive = weakref.ref(first)
    del first
    assert alive() is None
    again = adapters.get("a")
    assert (again.number, again.fingerprint) == (number, fingerprint)
    del again
    adapters.get("b")
    write_adapter(paths["a"], 9)
    with pytest.raises(RequestError, match="adapter 'a' must be as it was when it was loaded"):
        adapters.get("a")
    (paths["a"] / "adapter_model.safetensors").unlink()
    with pytest.raises(RequestError, match="adapter 'a' cannot be read again: .*got none"):
        adapters.get("a")


def test_a_wrong_adapter_leaves_the_engine_as_it_was(llm: LLM, tmp_path: Path) -> None:
    before = answers(llm, PROMPTS, lora_request="a")
    folder = write_adapter(tmp_path / "wide", rank=17)
    with pytest.raises(CheckpointError, match=r"'.*lora_A.weight' must have a rank of at most 16"):
        llm.load_lora_adapter("wide", folder)
    with pytest.raises(CheckpointError, match="adapter"):
        llm.load_lora_adapter("none", tmp_path / "nothing")
    folder = write_adapter(tmp_path / "dora", use_dora=True)
    with pytest.raises(CheckpointError, match="use_dora must be False, as DoRA"):
        llm.load_lora_adapter("dora", folder)
    with pytest.raises(RequestError, match="lora_name must be a name, got ''"):
        llm.load_lora_adapter("", folder)
    assert set(llm.lora_adapters) == set(NAMES)
    assert answers(llm, PROMPTS, lora_request="a") == before


def test_the_largest_rank_of_the_start_is_that_of_its_adapters(tmp_path: Path) -> None:
    wide = write_adapter(tmp_path / "wide", 1, rank=40)
    with make({"wide": wide}) as llm:
        assert answers(llm, PROMPTS[:1]) != answers(llm, PROMPTS[:1], lora_request="wide")
        with pytest.raises(CheckpointError, match="must have a rank of at most 40, got 41"):
            llm.load_lora_adapter("wider", write_adapter(tmp_path / "wider", 1, rank=41))
    with pytest.raises(CheckpointError, match="must have a rank of at most 8, got 40"):
        make({"wide": wide}, max_lora_rank=8)


def test_adapters_lie_over_narrow_weights(folders: dict[str, Path]) -> None:
    with make(folders, dtype="bfloat16", weight_dtype="int8") as llm:
        plain = answers(llm, PROMPTS)
        own = answers(llm, PROMPTS, lora_request="a")
        assert plain != own
        mixed = together(llm, [(PROMPTS[0], "a"), (PROMPTS[0], "")])
        assert mixed == [own[0], plain[0]]


def test_an_engine_without_adapters_refuses_their_names(tmp_path: Path) -> None:
    with LLM("story", device="cpu", num_blocks=50) as llm:
        assert llm.lora_adapters == {}
        with pytest.raises(RequestError, match="adapters must be enabled by enable_lora=True"):
            llm.generate("Once", GREEDY, lora_request="a")
        with pytest.raises(RequestError, match="adapters must be enabled by enable_lora=True"):
            llm.load_lora_adapter("a", tmp_path)


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"lora_modules": {"a": "b"}}, ValueError, "enable_lora must be True with lora_modules"),
    ({"lora_modules": ["a"]}, ValueError, "lora_modules must be name=path, got 'a'"),
    ({"lora_modules": ["a=b", "a=c"]}, ValueError, "each name once, got 'a' twice"),
    ({"lora_modules": {"": "b"}}, ValueError, "a name and a path"),
    ({"lora_modules": {1: "b"}}, TypeError, "paths by names"),
    ({"lora_modules": 3}, TypeError, "a dict, a list of name=path or None, got 3"),
    ({"max_lora_rank": 513}, ValueError, r"max_lora_rank must be in 1 \.\.\. 512, got 513"),
    ({"max_lora_rank": "8"}, TypeError, "max_lora_rank must be an integer or None"),
    ({"max_loras": 0}, ValueError, "max_loras must be at least 1"),
    ({"max_cpu_loras": 0}, ValueError, "max_cpu_loras must be at least 1"),
]


@pytest.mark.parametrize(("fields", "error", "message"), WRONG)
def test_wrong_options_are_named(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        EngineConfig("story", **fields)


def test_modules_are_a_dict_or_texts() -> None:
    given = EngineConfig("story", enable_lora=True, lora_modules=["a=x/y", "b=o/n=1"])  # type: ignore[arg-type]
    assert given.lora_modules == {"a": "x/y", "b": "o/n=1"}
    assert EngineConfig("story", max_lora_rank=MAX_RANK).max_lora_rank == MAX_RANK


class Replay:
    """A graph on a CPU: what was captured, done again."""

    def __init__(self, compute: Callable[[], None]) -> None:
        self.replay = compute


@pytest.mark.parametrize(
    ("most", "captures"),
    [(None, False), (64, False), (None, True)],
    ids=["as_they_are", "padded", "captured"],
)
def test_rows_on_the_device_have_the_answers_of_single_steps(
    most: int | None,
    captures: bool,
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def captured(self: DecodeStep, compute: Callable[[], None], *_: object) -> Replay:
        compute()
        return Replay(compute)

    monkeypatch.setattr(DecodeStep, "_captured", captured)
    monkeypatch.setattr(DeviceRunner, "_captured_in", lambda self: (None, None))
    wanted = [(prompt, name) for prompt in PROMPTS for name in ("a", "", "b", "c")]
    plain = SamplingParams(temperature=0, max_tokens=12)
    with make(folders, max_num_seqs=16, max_loras=2, max_num_batched_tokens=64) as llm:
        expected = [together(llm, wanted, params) for params in (plain, GREEDY)]
        runner = llm.engine.runner
        assert isinstance(runner, ModelRunner)
        on_device = DeviceRunner(
            llm.model,
            runner.storage,
            max_num_seqs=16,
            max_model_len=llm.engine.scheduler.limits.max_model_len,
            max_num_batched_tokens=most,
            adapters=runner.adapters,
        )
        on_device.captures = captures
        new_scheduler = llm.loop.new_scheduler
        assert new_scheduler is not None
        llm.engine = Engine(new_scheduler(), on_device, overlap=True)
        for params, found in zip((plain, GREEDY), expected, strict=True):
            for one, other in zip(together(llm, wanted, params), found, strict=True):
                assert [tokens for tokens, _ in one] == [tokens for tokens, _ in other]
        assert on_device.adapted_steps
        assert all(
            s.is_captured or s.is_model_captured for s in on_device.adapted_steps.values()
        ) == (captures)
        assert not on_device.steps
        llm.generate(PROMPTS, plain)
        assert on_device.steps  # those of an engine without adapters


def test_steps_without_adapters_are_those_of_an_engine_without(folders: dict[str, Path]) -> None:
    with make(folders) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, CompiledRunner)
        llm.generate(PROMPTS, GREEDY)
        assert runner._last is not None  # the compiled list has run, and no layer of the model
        calls: list[object] = []
        hook = llm.model.register_forward_hook(lambda *_: calls.append(None))  # type: ignore[union-attr]
        llm.reset_prefix_cache()
        llm.generate(PROMPTS, GREEDY)
        assert calls == []
        llm.generate(PROMPTS[0], GREEDY, lora_request="a")
        assert calls
        hook.remove()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_neighbour_changes_a_bit_on_a_gpu_and_graphs_give_the_tokens_of_single_ops(
    dtype: str, folders: dict[str, Path]
) -> None:
    wanted = [(prompt, name) for prompt in PROMPTS for name in ("", *NAMES)]
    found = []
    for graphs in ("off", "lazy", "auto"):
        options = {"device": "cuda", "dtype": dtype, "graphs": graphs, "batch_invariant": True}
        with make(folders, max_num_seqs=16, max_model_len=256, **options) as llm:
            found.append(together(llm, wanted))
            for (prompt, name), answer in zip(wanted, found[-1], strict=True):
                llm.reset_prefix_cache()
                assert answers(llm, [prompt], lora_request=name) == [answer]
    assert found[1] == found[2]  # graphs that were captured when needed, and before
    for single, captured in zip(found[0], found[1], strict=True):  # other kernels, other sums
        for (ids, logprobs), (other_ids, others) in zip(single, captured, strict=True):
            assert ids == other_ids
            for at, other in zip(logprobs, others, strict=True):
                assert at == pytest.approx(other, abs=1e-4 if dtype == "float32" else 5e-2)


@pytest.mark.gpu
def test_tokens_on_a_gpu_are_those_of_the_merged_model(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "graphs": "lazy"}
    options |= {"num_blocks": 200, "max_num_seqs": 16, "max_model_len": 256}
    with LLM(merge(folders["b"], tmp_path / "merged"), **options) as merged:
        wanted = [o.outputs[0].token_ids for o in merged.generate(PROMPTS, GREEDY)]
    with make(folders, **options) as llm:
        for _ in range(2):  # by graphs, and steps without adapters between
            found = llm.generate(PROMPTS, GREEDY, lora_request="b")
            assert [o.outputs[0].token_ids for o in found] == wanted
            llm.generate(PROMPTS, GREEDY)


FAMILIES = (
    "llama_mqa_biases", "mistral_window", "qwen3_norm_wide_heads", "gemma3", "gpt_oss", "gpt2",
    "deepseek", "deepseek_q_rank_biases",
)  # fmt: skip


@pytest.mark.parametrize("case", FAMILIES)
def test_adapters_of_each_kind_of_layer_are_merged_as_transformers_has_them(
    case: str, tmp_path: Path
) -> None:
    reference = write_checkpoint(tmp_path / "model", case)
    sites = adapter_sites(empty_model(read_config(tmp_path / "model"), "float32", "meta"))
    folder = write_adapter(tmp_path / "adapter", 7, rank=3, sites=sites)
    low = load_file(folder / "adapter_model.safetensors")
    for name in sites:
        a, b = (low[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
        linear, delta = reference.get_submodule(name), 0.5 * b @ a
        is_transposed = type(linear).__name__ == "Conv1D"  # GPT-2's
        linear.weight.data += delta.T if is_transposed else delta
    prompts = [[5, 17, 3, 88, 41, 9, 60, 22, 71, 13, 2], [7], [31, 4, 19, 99, 8]]
    settings = {"num_blocks": 60, "block_size": 4, "max_num_batched_tokens": 8, "max_num_seqs": 4}
    with LLM(
        tmp_path / "model", device="cpu", dtype="float32", enable_lora=True,
        lora_modules={"x": folder}, **settings,
    ) as llm:  # fmt: skip
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, lora_request="x")
    for prompt, output in zip(prompts, found, strict=True):
        assert output.outputs[0].token_ids == greedy_tokens(reference, prompt, 8)
