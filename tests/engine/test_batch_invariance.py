"""The packaged model's tokens and log-probabilities, bit for bit, whatever happens around them."""

from __future__ import annotations

import itertools
import random
from typing import NamedTuple

import pytest
import torch

from tests.engine.checkpoint import VOCAB, write_checkpoint
from tests.models.test_mixtures import make as make_mixture
from tests.models.test_state_families import make as make_state_model
from tests.models.tiny import VOCAB as HF_VOCAB
from tests.models.tiny import save_hf
from tilewise import ops
from tilewise.engine.llm import LLM, packaged_model
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.cpu_step import CompiledRunner
from tilewise.errors import UnsupportedError
from tilewise.models import load_model
from tilewise.ops.panels import why_not_pack

pytestmark = pytest.mark.skipif(
    why_not_pack(torch.empty(2, 2)) is not None, reason="needs packed weights, so an x86 CPU"
)
STEPS = 17  # every sequence ends in another block than its prompt
ADJECTIVES = ("big", "small", "red", "old", "kind", "sad", "happy", "lost")
NOUNS = ("dog", "cat", "bird", "tree", "king", "girl", "boy", "fox")
ENDINGS = ("", ", who lived in a forest", ". One day it rained, and all the animals came to see")
# More than two tiles of 16 rows and a part of one; 200 are more than run at once.
COUNTS = [35, pytest.param(200, marks=pytest.mark.slow)]
DTYPES = [torch.bfloat16, torch.float32]


class Asked(NamedTuple):
    prompts: list[dict[str, list[int]]]
    params: list[SamplingParams]


class Answer(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def make(dtype, **settings):
    # Room for all; what fits into memory is a gigabyte that a test fills with NaN.
    settings = {"enable_prefix_caching": False, "num_blocks": 1000, **settings}
    return LLM("story", dtype=dtype, device="cpu", **settings)


# Every day all this happens in half precision, and less of it in float32 (below).
@pytest.fixture(
    scope="module",
    params=[torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)],
    ids=str,
)
def llm(request):
    return make(request.param)


@pytest.fixture(scope="module", params=COUNTS)
def asked(request, llm):
    """Greedy and seeded requests in turn, prompts of 8 to 30 tokens."""
    words = itertools.product(ENDINGS, ADJECTIVES, NOUNS, ("ran", "slept"))
    prompts, params = [], []
    for i, (ending, adjective, noun, verb) in enumerate(itertools.islice(words, request.param)):
        text = f"Once upon a time a {adjective} {noun} {verb}{ENDINGS[i % 3]}{ending}"
        prompts.append({"prompt_token_ids": llm.tokenizer.encode(text)})
        params.append(
            SamplingParams(
                temperature=(0.0, 1.0, 0.8)[i % 3], top_p=0.9 if i % 3 == 2 else 1.0, seed=i,
                max_tokens=STEPS, ignore_eos=True, logprobs=0,
            )
        )  # fmt: skip
    return Asked(prompts, params)


def answers(llm, asked):
    return [answer(o.outputs[0]) for o in llm.generate(asked.prompts, asked.params)]


def answer(completion):
    tokens = tuple(completion.token_ids)
    found = zip(completion.logprobs, tokens, strict=True)
    return Answer(tokens, tuple(values[token] for values, token in found))


@pytest.fixture(scope="module")
def expected(llm, asked):
    return answers(llm, asked)


def test_it_is_the_default_on_a_cpu(llm):
    assert isinstance(llm.engine.runner, CompiledRunner)
    assert llm.engine.runner.batch_invariant


def test_alone(llm, asked, expected):
    # Every second one, in each tile of rows and by each of the three rules of drawing.
    some = Asked(*(each[::2] for each in asked))
    assert [answers(llm, Asked([p], [s]))[0] for p, s in zip(*some, strict=True)] == expected[::2]


@pytest.mark.parametrize("tokens", [7, 64])
def test_in_chunks(llm, asked, expected, tokens):
    other = make(llm.model.dtype, max_num_batched_tokens=tokens, max_num_seqs=min(tokens, 64))
    assert answers(other, asked) == expected


def test_preempted(llm, asked, expected):
    other = make(llm.model.dtype, num_blocks=11)
    assert answers(other, asked) == expected
    assert other.engine.scheduler.stats().num_preemptions >= 3


def test_with_a_prefix_cache_cold_and_warm(llm, asked, expected):
    other = make(llm.model.dtype, enable_prefix_caching=True)
    assert answers(other, asked) == expected
    assert answers(other, asked) == expected


def test_generated_blocks_that_are_found_again(llm, asked, expected):
    other = make(llm.model.dtype, enable_prefix_caching=True)
    answers(other, asked)
    longer = [
        {"prompt_token_ids": [*p["prompt_token_ids"], *e.tokens]}
        for p, e in zip(asked.prompts, expected, strict=True)
    ]
    follow_up = Asked(longer, asked.params)
    outputs = other.generate(*follow_up)
    assert all(o.num_cached_tokens >= len(p["prompt_token_ids"]) // 16 * 16
               for o, p in zip(outputs, asked.prompts, strict=True))  # fmt: skip
    assert sum(o.num_cached_tokens for o in outputs) > sum(
        len(p["prompt_token_ids"]) for p in asked.prompts
    )
    assert [answer(o.outputs[0]) for o in outputs] == answers(llm, follow_up)


def test_several_samples_of_a_prompt(llm, asked):
    params = SamplingParams(n=5, temperature=1.0, seed=3, max_tokens=STEPS, ignore_eos=True,
                            logprobs=0)  # fmt: skip
    alone = [llm.generate(prompt, params)[0] for prompt in asked.prompts[:8]]
    crowd = make(llm.model.dtype, max_num_batched_tokens=11, max_num_seqs=11, num_blocks=24)
    together = crowd.generate(asked.prompts[:8], params)
    for one, other in zip(alone, together, strict=True):
        assert [answer(c) for c in one.outputs] == [answer(c) for c in other.outputs]


def test_log_probabilities_are_those_of_the_forward_pass(llm, asked, expected):
    with torch.inference_mode():
        for prompt, found in zip(asked.prompts, expected, strict=True):
            ids = [*prompt["prompt_token_ids"], *found.tokens]
            logits = llm.model.compute_logits(llm.model(torch.tensor([ids])))[0]
            rows = logits[len(prompt["prompt_token_ids"]) - 1 : -1].log_softmax(-1)
            own = rows.gather(-1, torch.tensor(found.tokens)[:, None])[:, 0]
            assert tuple(own.tolist()) == found.logprobs


def log_probabilities(model, prompt, tokens):
    """Those of generated tokens, by one forward pass over the whole sequence."""
    ids = torch.tensor([[*prompt["prompt_token_ids"], *tokens]])
    logits = model.compute_logits(model(ids))[0, len(prompt["prompt_token_ids"]) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.fixture(scope="module")
def trained(llm):
    """The model with its parameters, as it is trained."""
    model = load_model(packaged_model(), dtype=llm.model.dtype, device="cpu")
    model.use_inference_bits()
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 7, "max_num_seqs": 7},
        {"max_num_batched_tokens": 64, "max_num_seqs": 64},
        {"num_blocks": 6, "preemption": "recompute"},
        {"num_blocks": 6, "preemption": "swap", "swap_space_gib": 0.05},
        {"enable_prefix_caching": True},
    ],
    ids=["batch", "alone", "chunks 7", "chunks 64", "preempted", "swapped", "prefix hit"],
)
def test_generated_log_probabilities_are_those_of_the_training_forward_pass(
    llm, trained, asked, settings
):
    """All that happens around a request, against torch's autograd over its whole sequence."""
    some = Asked(asked.prompts[::4], asked.params[::4])
    if settings.get("enable_prefix_caching"):  # the first halves of blocks are found, too
        some = Asked(
            [{"prompt_token_ids": [*p["prompt_token_ids"], *range(20, 40), i % 3 + 9, i + 3]}
             for i, p in enumerate(some.prompts) for _ in range(2)],
            [s for s in some.params for _ in range(2)],
        )  # fmt: skip
    other = make(llm.model.dtype, **settings)
    outputs = other.generate(*some)
    if "num_blocks" in settings:
        stats = other.engine.scheduler.stats()
        assert stats.num_swapped if "swap_space_gib" in settings else stats.num_preemptions
    if settings.get("enable_prefix_caching"):
        outputs = other.generate(*some)
        assert any(o.num_cached_tokens % 16 for o in outputs), "found inside a block"
    for prompt, output in zip(some.prompts, outputs, strict=True):
        found = answer(output.outputs[0])
        rows = log_probabilities(trained, prompt, found.tokens)
        assert rows.requires_grad
        assert tuple(rows.tolist()) == found.logprobs


def test_float32_together_alone_and_by_the_training_forward_pass():
    llm = make(torch.float32)
    trained = load_model(packaged_model(), dtype=torch.float32, device="cpu")
    trained.use_inference_bits()
    prompts = [
        {"prompt_token_ids": llm.tokenizer.encode("Once upon a time there was a dog"[:length])}
        for length in (6, 17, 32)
    ]
    params = [
        SamplingParams(temperature=float(i), seed=i, max_tokens=8, ignore_eos=True, logprobs=0)
        for i in range(3)
    ]
    asked = Asked(prompts, params)
    alone = [answers(llm, Asked([p], [s]))[0] for p, s in zip(*asked, strict=True)]
    assert answers(llm, asked) == alone
    for prompt, found in zip(prompts, alone, strict=True):
        rows = log_probabilities(trained, prompt, found.tokens)
        assert tuple(rows.tolist()) == found.logprobs


def test_the_training_forward_pass_has_the_gradients_of_torch(llm, trained):
    """Values are the engine's; gradients agree with those of the plain model to rounding."""
    plain = load_model(packaged_model(), dtype=llm.model.dtype, device="cpu")
    prompt, tokens = {"prompt_token_ids": [5, 9, 30, 12]}, (7, 50, 8, 31, 44)
    exact = load_model(packaged_model(), dtype=torch.float64, device="cpu")
    losses = [log_probabilities(m, prompt, tokens).sum() for m in (trained, plain, exact)]
    names = [name for name, _ in plain.named_parameters()]
    assert names == [name for name, _ in trained.named_parameters()]
    grads = [
        torch.autograd.grad(loss, list(m.parameters()))
        for loss, m in zip(losses, (trained, plain, exact), strict=True)
    ]
    ours, eager, true = (torch.cat([g.flatten().double() for g in some]) for some in grads)
    rounding = torch.finfo(llm.model.dtype).eps * true.norm()
    assert (ours - true).norm() <= 2 * (eager - true).norm() + rounding


def test_a_model_that_no_engine_packs_has_no_such_bits():
    model = load_model(packaged_model(), dtype=torch.float64, device="cpu")
    with pytest.raises(UnsupportedError, match="weights must be such that a CPU packs them"):
        model.use_inference_bits()
    assert not model.has_inference_bits


@pytest.mark.parametrize("case", ["deepseek_v3", "kimi_linear"])
def test_a_model_that_keeps_latents_has_no_such_bits(case, tmp_path):
    """Training expands latents to keys and values, and an engine multiplies them as they are."""
    made = make_state_model(case) if case == "kimi_linear" else make_mixture(case)
    model = load_model(save_hf(made, tmp_path), dtype="float32", device="cpu")
    with pytest.raises(UnsupportedError, match="must keep keys and values for these bits, got lat"):
        model.use_inference_bits()
    assert not model.has_inference_bits


@pytest.mark.parametrize(
    ("make_hf", "case", "dtype"),
    [
        (make_mixture, "qwen3_moe", torch.bfloat16),
        (make_mixture, "qwen2_moe", torch.float32),  # with a shared expert
        (make_state_model, "qwen3_5_moe", torch.bfloat16),
        (make_state_model, "granitemoehybrid", torch.float32),
        (make_state_model, "falcon_h1", torch.bfloat16),
        (make_state_model, "lfm2", torch.float32),
        (make_state_model, "zamba2", torch.bfloat16),
    ],
    ids=lambda value: getattr(value, "__module__", str(value)).rpartition(".")[2],
)
def test_mixtures_and_layers_with_states_in_the_loop(make_hf, case, dtype, tmp_path):
    """An engine over the model that is trained, before and after a change of all weights."""
    model = load_model(save_hf(make_hf(case), tmp_path), dtype=dtype, device="cpu")
    model.use_inference_bits()
    draw = random.Random(1)
    prompts = [
        {"prompt_token_ids": [draw.randrange(3, HF_VOCAB) for _ in range(draw.randrange(1, 40))]}
        for _ in range(5)
    ]
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=9, ignore_eos=True, logprobs=0)
        for i in range(5)
    ]
    settings = {"num_blocks": 60, "block_size": 4, "max_model_len": 64, "max_num_seqs": 8}
    with LLM(model, device="cpu", max_num_batched_tokens=13, **settings) as llm:
        for _ in range(2):
            for prompt, found in zip(prompts, answers(llm, Asked(prompts, params)), strict=True):
                rows = log_probabilities(model, prompt, found.tokens)
                assert rows.requires_grad
                assert tuple(rows.tolist()) == found.logprobs
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 1.01
            llm.update_weights()


def test_it_can_be_turned_off():
    assert not make(torch.bfloat16, batch_invariant=False).engine.runner.batch_invariant


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("qwen3_norm_wide_heads", torch.bfloat16),
        ("gpt2", torch.float32),
        ("gpt2", torch.bfloat16),
        ("gpt2_untied", torch.float32),  # a width that is no multiple of 32, as the next two
        ("gemma3", torch.float32),
        ("gpt_oss", torch.float32),
        ("gemma3", torch.bfloat16),
        ("gpt_oss", torch.bfloat16),
    ],
    ids=str,
)
def test_other_models_alone_preempted_and_by_both_forward_passes(case, dtype, tmp_path):
    write_checkpoint(tmp_path, case)
    draw = random.Random(1)
    prompts = [
        {"prompt_token_ids": [draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, 40))]}
        for _ in range(9)
    ]
    params = [
        SamplingParams(temperature=float(i % 2), seed=i, max_tokens=11, ignore_eos=True, logprobs=0)
        for i in range(9)
    ]
    asked = Asked(prompts, params)
    settings = {"device": "cpu", "block_size": 4, "dtype": dtype}
    roomy = LLM(tmp_path, num_blocks=400, enable_prefix_caching=False, **settings)
    alone = [answers(roomy, Asked([p], [s]))[0] for p, s in zip(*asked, strict=True)]
    assert answers(roomy, asked) == alone
    tight = LLM(tmp_path, num_blocks=15, max_num_batched_tokens=13, max_num_seqs=8, **settings)
    assert answers(tight, asked) == alone
    assert tight.engine.scheduler.stats().num_preemptions
    trained = load_model(tmp_path, dtype=dtype, device="cpu")
    trained.use_inference_bits()
    for prompt, found in zip(prompts, alone, strict=True):
        with torch.inference_mode():
            rows = log_probabilities(roomy.model, prompt, found.tokens)
        assert tuple(rows.tolist()) == found.logprobs
        rows = log_probabilities(trained, prompt, found.tokens)
        assert rows.requires_grad
        assert tuple(rows.tolist()) == found.logprobs


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu(dtype):
    encode = LLM("story", device="cpu", num_blocks=8).tokenizer.encode
    words = [
        {"prompt_token_ids": encode(f"Once upon a time a {a} {n}")}
        for a in ADJECTIVES
        for n in NOUNS
    ]
    params = [
        SamplingParams(temperature=float(i % 2), seed=i, max_tokens=STEPS, ignore_eos=True,
                       logprobs=0)
        for i in range(len(words))
    ]  # fmt: skip

    def on_gpu(num_blocks=2000, **settings):  # several share the memory
        settings |= {"num_blocks": num_blocks, "batch_invariant": True}
        return LLM("story", dtype=dtype, device="cuda", **settings)

    roomy = on_gpu(enable_prefix_caching=False)
    asked = Asked(words, params)
    alone = [answers(roomy, Asked([p], [s]))[0] for p, s in zip(*asked, strict=True)]
    assert answers(roomy, asked) == alone
    for settings in ({"num_blocks": 40}, {"max_num_batched_tokens": 64, "max_num_seqs": 64}):
        assert answers(on_gpu(**settings), asked) == alone
    warm = on_gpu()
    assert answers(warm, asked) == answers(warm, asked) == alone
    # The model itself over each whole sequence, without a cache, and the one that is trained.
    trained = load_model(packaged_model(), dtype=dtype, device="cuda")
    trained.use_inference_bits()
    for asked_for, found in list(zip(words, alone, strict=True))[::8]:
        prompt = asked_for["prompt_token_ids"]
        ids = torch.tensor([[*prompt, *found.tokens]], device="cuda")
        with torch.inference_mode():
            hidden = roomy.model(ids)
            logits = [roomy.model.compute_logits(hidden)]
        logits.append(trained.compute_logits(trained(ids)))
        assert logits[1].requires_grad
        for each in logits:
            # Not torch's log_softmax, which rounds otherwise than the engine's kernel.
            rows = each[0, len(prompt) - 1 : -1].detach().contiguous()
            own = ops.token_logprobs(rows, ids[0, len(prompt) :].contiguous(), 0)[0]
            assert tuple(own.tolist()) == found.logprobs
