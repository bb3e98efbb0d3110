"""Guessed tokens, verified: what is generated stays the same, and no wrong guess leaves a trace."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.engine.beam_model import BeamModel
from tests.engine.checkpoint import greedy_tokens, write_checkpoint
from tests.engine.simulator import VOCAB, _digest, fingerprints
from tests.engine.test_beams import VOCAB as VOCAB_OF_MODELS
from tests.engine.test_beams import BeamStory, assert_idle, checked
from tilewise.cache.prefix import PrefixNode
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import Batch, SampledToken, ScheduledSequence
from tilewise.engine.config import MAX_DRAFTS, DraftModel, PromptLookup
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.engine.scheduling.draft_trees import depths, merge, num_in_place, path
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.scheduling.speculative import (
    Drafts,
    Ngrams,
    Pace,
    Speculation,
    accepted,
    with_rows_of_drafts,
)
from tilewise.engine.steps import runner as runners
from tilewise.engine.steps.draft_runner import DraftingRunner, Guesser, check_speculative
from tilewise.engine.steps.inputs import build_inputs, tree_mask
from tilewise.engine.steps.runner import ModelRunner
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.reference.sampling import target_distribution

STEPS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=STEPS, ignore_eos=True)


# --- random schedules ---------------------------------------------------------------------------


class Oracle(Speculation):
    """Guesses that are right about as often as wrong, for it can see the virtual model's draws."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(PromptLookup(num_tokens=rng.choice([1, 3, 7]), is_adaptive=False))
        self.rng = rng

    def propose(self, seq, most: int) -> Drafts:
        known, drafts = list(seq.token_ids), []
        while len(drafts) < min(most, self.params.num_tokens) and self.rng.random() < 0.9:
            drawn = len(known) - seq.num_prompt_tokens
            token = _digest(fingerprints(known, seq.request.salt)[-1], seq.seed, drawn) % VOCAB
            if self.rng.random() < 0.3:
                token = self.rng.randrange(VOCAB)
            known.append(token)
            drafts.append(token)
        return Drafts(tuple(drafts))


class TreeOracle(Oracle):
    """Guesses of several continuations, of which none, any or a later one may be right."""

    def propose(self, seq, most: int) -> Drafts:
        chains = [
            super(TreeOracle, self).propose(seq, most).token_ids
            for _ in range(self.rng.choice([1, 3]))
        ]
        return Drafts(*merge(chains, min(self._room, MAX_DRAFTS)))


class DraftStory(BeamStory):
    """A random run in which what is drawn is guessed before, beside beams, which are not."""

    oracle = Oracle

    def __init__(self, seed: int, **settings) -> None:
        super().__init__(seed, **settings)
        self.scheduler.speculation = self.oracle(random.Random(seed))
        self.model = BeamModel(self.scheduler, self.is_damaging)

    def play(self) -> None:
        super().play()
        self.check_what_is_findable()

    def check_what_is_findable(self) -> None:
        """A block is found by the tokens that were written to it, and no others."""
        prefix = self.scheduler.tables.prefix
        if prefix is None or self.damages:
            return
        value_of: dict[PrefixNode, int] = {}
        for node in prefix._all():  # each after its parent
            if node.parent is None:
                value_of[node] = _digest(node.salt) if node.salt else 0
                continue
            value, [block] = value_of[node.parent], node.blocks
            slots = self.model.slots[block] if block >= 0 else None
            for place, token in enumerate(memoryview(node.tokens).cast("i")):
                value = abs(hash((value, token)))
                assert slots is None or slots[place] == value, "a findable block holds its tokens"
            value_of[node] = value


class TreeStory(DraftStory):
    """The same with trees of guesses."""

    oracle = TreeOracle


@pytest.mark.parametrize("overlap", [False, True])
def test_any_schedule_with_trees_gives_the_tokens_of_a_request_alone(monkeypatch, overlap: bool):
    seen = {"trees": 0, "branches that were right": 0}
    take = Speculation.take

    def taking(self, seq, run, drawn, tables):
        seen["trees"] += bool(run.draft_parents)
        before = seq.num_computed_tokens
        take(self, seq, run, drawn, tables)
        seen["branches that were right"] += seq.num_computed_tokens - before < len(drawn)

    monkeypatch.setattr(Speculation, "take", taking)
    for seed in range(120):
        story = TreeStory(seed, overlap=overlap, fails=seed % 4 == 3, damages=seed % 5 == 4)
        story.play()
        story.judge()
    assert all(count > 15 for count in seen.values()), seen


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_any_schedule_with_drafts_gives_the_tokens_of_a_request_alone(part: int, overlap: bool):
    for seed in range(part * 25, (part + 1) * 25):
        story = DraftStory(seed, overlap=overlap, fails=seed % 4 == 3, damages=seed % 5 == 4)
        story.play()
        story.judge()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_schedules_with_drafts_give_the_tokens_of_a_request_alone(part, overlap):
    for seed in range(10_000 + part * 500, 10_000 + (part + 1) * 500):
        story = DraftStory(seed, overlap=overlap, fails=seed % 4 == 3, damages=seed % 5 == 4)
        story.play()
        story.judge()


def test_the_random_schedules_reach_what_they_are_meant_to_test(monkeypatch):
    seen = dict.fromkeys(("right", "wrong", "blocks let go of", "preempted", "hits"), 0)
    truncate = BlockTables.truncate

    def truncating(tables, seq):
        before = len(seq.block_ids)
        truncate(tables, seq)
        seen["blocks let go of"] += before - len(seq.block_ids)

    monkeypatch.setattr(BlockTables, "truncate", truncating)
    for seed in range(60):
        story = DraftStory(seed, overlap=seed % 2 == 0)
        story.play()
        now = story.scheduler.stats()
        seen["right"] += now.num_accepted_drafts
        seen["wrong"] += now.num_drafts - now.num_accepted_drafts
        seen["preempted"] += now.num_preemptions
        seen["hits"] += now.prefix_hit_tokens
        if all(count > 10 for count in seen.values()):
            return
    pytest.fail(f"not all came often: {seen}")


# --- planted mistakes ---------------------------------------------------------------------------


TRUNCATE, TAKE = BlockTables.truncate, Speculation.take
DESCRIBE, REGISTER = Scheduler._describe, BlockTables.register


def take_all_drafts_for_right(self, seq, run, drawn, tables):
    seq.num_computed_tokens += run.num_drafts + 1 - len(drawn)
    TAKE(self, seq, run, drawn, tables)


def take_one_too_few(self, seq, run, drawn, tables):
    TAKE(self, seq, run, drawn, tables)
    if len(drawn) > 1:
        drawn.pop(0)


def take_a_branch_for_computed(self, seq, run, drawn, tables):
    TAKE(self, seq, run._replace(draft_parents=()), drawn, tables)


def take_the_one_after_for_computed(self, seq, run, drawn, tables):
    TAKE(self, seq, run, drawn, tables)
    seq.num_computed_tokens += 1
    seq.num_scheduled_tokens += 1


def free_one_block_too_many(tables, seq):
    TRUNCATE(tables, seq)
    if seq.num_scheduled_tokens % tables.block_size:
        tables.let_go(0, [seq.block_ids.pop()])


def free_the_block_and_keep_it(tables, seq):
    kept = tables.blocks_for(seq.num_scheduled_tokens)
    tables.let_go(0, seq.block_ids[kept:])


def free_nothing_but_forget_it(tables, seq):
    del seq.block_ids[tables.blocks_for(seq.num_scheduled_tokens) :]


def tell_nothing_of_what_is_freed(tables, seq):
    told = seq.num_told_blocks
    TRUNCATE(tables, seq)
    seq.num_told_blocks = told


def register_the_drafts(self, seq, n):
    run = DESCRIBE(self, seq, n)
    drafts = run.token_ids[1:] if run.num_drafts else ()
    if drafts and not self._steps:
        computed, known = seq.num_computed_tokens, len(seq.token_ids)
        seq.token_ids += drafts
        seq.num_computed_tokens = seq.num_scheduled_tokens
        REGISTER(self.tables, seq)
        seq.num_computed_tokens = computed
        del seq.token_ids[known:]
    return run


def draw_by_the_wrong_number(self, seq, n):
    run = DESCRIBE(self, seq, n)
    return run._replace(num_generated=run.num_generated + 1) if run.num_drafts else run


def guess_beyond_the_length(self, seq, room, tables, num_running):
    is_beam = isinstance(seq.request.sampling, BeamSearchParams)
    if is_beam or seq.num_tokens != seq.num_scheduled_tokens + 1:
        return 0
    self._drafts[seq.seq_id] = Drafts((0,) * max(min(room, 5), 0))
    return len(self._drafts[seq.seq_id].token_ids)


TREE_MISTAKES = [(Speculation, "take", take_a_branch_for_computed)]
MISTAKES = [
    (Speculation, "take", take_all_drafts_for_right),
    (Speculation, "take", take_one_too_few),
    (Speculation, "take", take_the_one_after_for_computed),
    (Scheduler, "_describe", register_the_drafts),
    (Scheduler, "_describe", draw_by_the_wrong_number),
    (Speculation, "draft", guess_beyond_the_length),
    (BlockTables, "truncate", free_one_block_too_many),
    (BlockTables, "truncate", free_the_block_and_keep_it),
    (BlockTables, "truncate", free_nothing_but_forget_it),
    (BlockTables, "truncate", tell_nothing_of_what_is_freed),
]


# --- real models --------------------------------------------------------------------------------


PROMPTS = [
    [random.Random(i).randrange(3, VOCAB_OF_MODELS) for _ in range(n)]
    for i, n in enumerate((1, 16, 17, 43))
]
PROMPTS += [PROMPTS[1] * 3, PROMPTS[3][:5] * 6]  # with n-grams to be found


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def checkpoint(request, tmp_path_factory):
    """A random model: its directory and what transformers generates."""
    directory = tmp_path_factory.mktemp(request.param)
    model = write_checkpoint(directory, request.param)
    return directory, [greedy_tokens(model, prompt, STEPS) for prompt in PROMPTS]


def guesses_of(kind: str, directory):
    if kind == "lookup":
        return PromptLookup(num_tokens=5, min_ngram=1, is_adaptive=False)
    if kind == "tree":
        return PromptLookup(num_tokens=5, min_ngram=1, is_adaptive=False, num_branches=3)
    return DraftModel(directory, num_tokens=3, is_adaptive=False)


def make(directory, speculative=None, **settings):
    settings = {"num_blocks": 200, "block_size": 4, **settings}
    return checked(LLM(directory, device="cpu", speculative=speculative, **settings))


def as_ids(prompts):
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def spy_on_branches(llm) -> list[int]:
    """Return a list that grows with each tree that is verified."""
    seen, submit = [], llm.engine.runner.submit

    def submitting(batch):
        seen.extend(run.num_drafts for run in batch.sequences if run.draft_parents)
        return submit(batch)

    llm.engine.runner.submit = submitting
    return seen


SETTINGS = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "preempted": {"num_blocks": 24, "max_num_batched_tokens": 32},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_seqs": 3},
}


@pytest.mark.parametrize("kind", ["lookup", "tree", "draft"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_greedy_tokens_are_those_of_transformers(checkpoint, kind, settings):
    directory, wanted = checkpoint
    speculation = guesses_of(kind, directory)
    llm = make(directory, speculation, batch_invariant=kind != "tree", **settings)
    branches = spy_on_branches(llm)
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(as_ids(PROMPTS), GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == wanted
    now = llm.engine.stats().scheduler
    assert now.num_accepted_drafts > 0
    assert (kind == "tree") == (len(branches) > 0)
    assert (now.num_preemptions > 0) == (settings.get("num_blocks") == 24)
    assert_idle(llm)


@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_samples_stops_and_logprobs_are_those_without_guesses(checkpoint, kind):
    directory, _ = checkpoint
    params = [
        SamplingParams(n=3, seed=1, max_tokens=20, logprobs=2),
        SamplingParams(seed=2, max_tokens=30, temperature=0.3, stop=["e", "th"]),
        SamplingParams(temperature=0.0, max_tokens=30, logprobs=0, stop_token_ids=[7, 19, 30]),
        SamplingParams(seed=3, max_tokens=20, top_p=0.6, temperature=0.5),
        BeamSearchParams(3, max_tokens=8),
        SamplingParams(n=2, best_of=4, seed=4, max_tokens=9),
    ]
    found = []
    for speculative in (None, guesses_of(kind, directory)):
        llm = make(directory, speculative)
        found.append(llm.generate(as_ids(PROMPTS), params))
        assert_idle(llm)
    assert llm.engine.stats().scheduler.num_drafts > 0
    for one, other in zip(*found, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            assert (a.token_ids, a.text) == (b.token_ids, b.text)
            assert (a.finish_reason, a.stop_reason) == (b.finish_reason, b.stop_reason)
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", ["off", "lazy"])
def test_lookup_on_a_gpu_gives_the_same_tokens(graphs):
    settings = {"dtype": "float32", "num_blocks": 200, "device": "cuda", "graphs": graphs}
    lookup = PromptLookup(min_ngram=1, is_adaptive=False)
    plain, llm = LLM("story", **settings), LLM("story", speculative=lookup, **settings)
    params = [GREEDY, SamplingParams(max_tokens=40, seed=1, ignore_eos=True)]
    texts = ["Once upon a time, once upon a", "The dog said"]
    got, wanted = (x.generate(texts, params) for x in (llm, plain))
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in wanted]
    assert llm.engine.stats().scheduler.num_accepted_drafts > 0
    assert_idle(llm)


def test_a_model_that_drafts_for_itself_is_nearly_always_right():
    draft = DraftModel("story", dtype="float32", is_adaptive=False)
    llm = LLM("story", dtype="float32", num_blocks=80, speculative=draft)
    params = [SamplingParams(max_tokens=40, seed=i, ignore_eos=True) for i in range(4)]
    llm.generate(["Once upon a time", "The dog", "A cat said", "Once upon a time"], params)
    now = llm.engine.stats().scheduler
    assert now.num_accepted_drafts > 0.7 * now.num_drafts > 50


def test_an_unlike_draft_model_changes_nothing(tmp_path):
    for name, case in (("one", "llama"), ("other", "gpt2")):
        (tmp_path / name).mkdir()
        write_checkpoint(tmp_path / name, case)
    plain = make(tmp_path / "one", max_model_len=128)
    llm = make(
        tmp_path / "one", DraftModel(tmp_path / "other", is_adaptive=False), max_model_len=128
    )
    got, wanted = (x.generate(as_ids(PROMPTS), GREEDY) for x in (llm, plain))
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in wanted]
    now = llm.engine.stats().scheduler
    assert now.num_accepted_drafts < 0.2 * now.num_drafts
    assert_idle(llm)


# --- the distribution ---------------------------------------------------------------------------


class Table:
    """A model of five tokens, whose next one depends on the last; the cache is not used."""

    def __init__(self) -> None:
        self.logits = torch.randn((5, 5), generator=torch.Generator().manual_seed(3)) * 1.5

    def __call__(self, ids, positions, *, ctx, kv):
        return self.logits[ids]

    def compute_logits(self, hidden):
        return hidden


def transitions(runner, speculative, params, num_requests: int = 700):
    """Count (token, next token) over many requests with seeds of their own."""
    scheduler = Scheduler(
        4000, 4, max_num_seqs=256, max_num_batched_tokens=4096, max_model_len=64,
        enable_prefix_caching=False, speculative=speculative,
    )  # fmt: skip
    engine, texts = Engine(scheduler, runner), {}
    for i in range(num_requests):
        engine.add_request(Request(str(i), [i % 5, 0, i % 5], params(i)))
        texts[str(i)] = [i % 5]
    while engine.has_unfinished():
        for event in engine.step():
            texts[event.request_id].append(event.token.token_id)
    counts = torch.zeros((5, 5))
    for text in texts.values():
        for pair, count in Counter(pairwise(text)).items():
            counts[pair] += count
    return counts, texts, scheduler.stats()


def chi_square(observed, expected) -> float:
    """Return how likely counts at least as far from the expected ones are."""
    distance = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, distance / 2)) if freedom > 0 else 1.0


def table_runner(model, speculative):
    spec = CacheSpec(1, 4, KVSpec(1, 2, 2, torch.float32))
    runner = ModelRunner(model, KVStorage(spec, 4000))
    if not isinstance(speculative, DraftModel):
        return runner
    draft = Table()
    draft.logits = model.logits + 0.7 * torch.randn((5, 5))
    return DraftingRunner(runner, Guesser(ModelRunner(draft, KVStorage(spec, 4000)), 512))


def drawn_by(rule, i: int) -> SamplingParams:
    return SamplingParams(seed=i, max_tokens=6, ignore_eos=True, **rule)


@cache
def texts_without_guesses(rule):
    """What the same requests give without guesses; the model is the same every time."""
    return transitions(table_runner(Table(), None), None, partial(drawn_by, dict(rule)))[1]


@pytest.mark.parametrize(
    "speculative",
    [
        PromptLookup(num_tokens=3, min_ngram=1, is_adaptive=False),
        PromptLookup(num_tokens=3, min_ngram=1, is_adaptive=False, num_branches=3),
        DraftModel("table", num_tokens=3, is_adaptive=False),
    ],
    ids=["lookup", "tree", "draft"],
)
@pytest.mark.parametrize("rule", [{}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 3}])
def test_what_is_drawn_has_the_exact_distribution(speculative, rule):
    torch.manual_seed(11)
    model = Table()
    runner = table_runner(model, speculative)
    counts, texts, now = transitions(runner, speculative, partial(drawn_by, rule))
    assert 0.1 * now.num_drafts < now.num_accepted_drafts < 0.9 * now.num_drafts
    for row, truth in zip(counts, target_distribution(model.logits, **rule), strict=True):
        kept = truth > 0
        assert row[~kept].sum() == 0
        assert chi_square(row[kept].double(), truth[kept] * row.sum()) > 1e-4
    assert texts == texts_without_guesses(tuple(rule.items()))


def test_a_draw_that_is_not_verified_has_another_distribution(monkeypatch):
    """The test above finds a sampler that takes every guess for right."""
    monkeypatch.setattr(
        runners,
        "accepted",
        lambda batch, samples: [
            [*map(SampledToken, run.token_ids[1:]), *row[:1]] if run.num_drafts else row
            for run, row in zip(batch.sequences, _by_run(batch, samples), strict=True)
        ],
    )
    with pytest.raises(AssertionError):
        test_what_is_drawn_has_the_exact_distribution(
            PromptLookup(num_tokens=3, min_ngram=1, is_adaptive=False), {}
        )


def _by_run(batch, samples):
    rows = iter(samples)
    found = []
    for run in batch.sequences:
        drawn = [next(rows) for _ in range(run.num_drafts + 1)]
        found.append(drawn[-1])
    return found


# --- parts --------------------------------------------------------------------------------------


def a_batch() -> Batch:
    """A prompt's chunk, a run with two drafts, and one without."""
    params = SamplingParams()
    return Batch(
        (
            ScheduledSequence(1, (5, 6, 7), 0, [0], 0, params),
            ScheduledSequence(2, (4, 8, 9), 6, [1, 2, 3], 1, params, (11,), 2, num_drafts=2),
            ScheduledSequence(3, (3,), 2, [4], 1, params, (12,), 1),
        )
    )


def test_each_draft_has_a_row_of_logits_and_a_number_of_its_stream():
    batch = a_batch()
    inputs = build_inputs(batch, 4, torch.device("cpu"))
    assert inputs.logits_rows.tolist() == [3, 4, 5, 6]
    assert inputs.ctx.slot_mapping.tolist() == [0, 1, 2, 10, 11, 12, 18]
    rows = [(s.seq_id, s.num_generated) for s in with_rows_of_drafts(batch).sequences]
    assert rows == [(1, 0), (2, 2), (2, 3), (2, 4), (3, 1)]


@pytest.mark.parametrize(
    ("drawn", "kept"),
    [([8, 9, 1], [8, 9, 1]), ([8, 5, 9], [8, 5]), ([9, 9, 1], [9]), ([8, -2, 1], [8, -2])],
)
def test_drafts_are_right_up_to_the_first_that_was_not_drawn(drawn, kept):
    samples = [[], *([SampledToken(t)] for t in drawn), [SampledToken(2)]]
    found = accepted(a_batch(), samples)
    assert [[t.token_id for t in tokens] for tokens in found] == [[], kept, [2]]


def test_chains_become_a_tree_whose_first_chain_lies_in_its_place():
    tokens, parents = merge([(5, 6, 7), (5, 8), (9,), (5, 6, 1)], 16)
    assert (tokens, parents) == ((5, 6, 7, 8, 9, 1), (0, 1, 2, 1, 0, 2))
    assert depths(parents) == [0, 1, 2, 3, 2, 1, 3]
    assert merge([(5, 6), (5, 6, 7)], 16) == ((5, 6, 7), ())
    assert merge([(5, 6, 7), (8, 9)], 4) == ((5, 6, 7, 8), (0, 1, 2, 0))
    assert merge([], 4) == ((), ())


def test_what_is_drawn_leads_down_a_tree():
    tokens, parents = (5, 6, 7, 8, 9, 1), (0, 1, 2, 1, 0, 2)
    assert path(tokens, parents, [5, 6, 1, 0, 0, 0, 3]) == [0, 1, 2, 6]
    assert path(tokens, parents, [5, 8, 0, 0, 4, 0, 0]) == [0, 1, 4]
    assert path(tokens, parents, [4, 8, 0, 0, 4, 0, 0]) == [0]
    assert path(tokens, parents, [5, 8, 4]) == [0, 1, 4]  # of the path alone
    assert [num_in_place(rows) for rows in ([0], [0, 1, 2, 6], [0, 5], [0, 1, 2, 3])] == [
        1,
        3,
        1,
        4,
    ]


def test_a_row_of_a_tree_sees_its_ancestors():
    mask = tree_mask(np.array([2, 4]), {1: (1, (0, 0))})
    assert mask.astype(int).tolist() == [
        [1, 0, 0, 0], [1, 1, 0, 0],
        [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1],
    ]  # fmt: skip


def test_the_longest_ngram_that_was_there_last_is_followed():
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 9, 1, 2, 3]
    assert Ngrams(1, 3).find(tokens, 2) == (4, 9)  # after 1 2 3
    assert Ngrams(1, 2).find(tokens, 3) == (5, 9, 1)  # after the last 2 3
    assert Ngrams(4, 5).find(tokens, 3) == ()
    assert Ngrams(1, 3).find([7], 3) == ()
    assert Ngrams(1, 2, 3).find_all([1, 5, 1, 6, 7, 1], 1) == [(6,), (5,)]


def test_a_repetition_is_guessed_to_go_on():
    assert Ngrams(1, 2).find([5, 6, 7, 6, 7], 5) == (6, 7, 6, 7, 6)


def test_an_index_that_grows_finds_what_a_new_one_finds():
    rng = random.Random(1)
    tokens, index = [rng.randrange(3)], Ngrams(1, 3)
    for _ in range(200):
        tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
        assert index.find(tokens, 4) == Ngrams(1, 3).find(tokens, 4)


def steps_with(pace: Pace, count: int, gain: float, cost: float) -> int:
    """Run steps of which one with drafts gives `gain` tokens for `cost` seconds; return these."""
    num_on = 0
    for _ in range(count):
        is_on = pace.is_on(4)
        num_on += is_on
        pace.record(4, is_on, int(40 * gain) if is_on else 40, cost if is_on else 1.0)
    return num_on


def test_drafts_are_turned_off_where_they_cost_and_on_where_they_gain():
    assert steps_with(Pace(), 2000, gain=1.2, cost=1.5) < 100
    assert steps_with(Pace(), 2000, gain=2.0, cost=1.5) > 1900
    pace = Pace()
    steps_with(pace, 500, gain=1.2, cost=1.5)
    assert steps_with(pace, 2000, gain=3.0, cost=1.5) > 1200  # what has changed is found


@pytest.mark.parametrize("gain", [1.2, 2.0], ids=["drafts lose", "drafts win"])
def test_the_slower_choice_is_tried_after_64_steps_and_then_after_twice_as_many(gain):
    pace, is_on = Pace(), []
    for _ in range(8 + 8 + 64 + 8 + 128 + 8):
        is_on.append(pace.is_on(4))
        steps_with(pace, 1, gain, cost=1.5)
    best = gain > 1.5
    trial = [not best] * 8
    assert is_on == [*[True] * 8, *[False] * 8, *[best] * 64, *trial, *[best] * 128, *trial]


def test_rare_long_steps_turn_nothing_off():
    pace, rng, num_on = Pace(), random.Random(0), 0
    for _ in range(2000):
        is_on = pace.is_on(4)
        num_on += is_on
        slow = 100.0 if rng.random() < 0.02 else 1.0
        pace.record(4, is_on, 80 if is_on else 40, 1.5 * slow if is_on else slow)
    assert num_on > 1500


def test_an_adaptive_engine_turns_useless_drafts_off(tmp_path):
    write_checkpoint(tmp_path, "llama")
    llm = make(tmp_path, PromptLookup(min_ngram=1))
    speculation = llm.engine.scheduler.speculation
    speculation.pace.record = lambda n, has, tokens, seconds, record=speculation.pace.record: (
        record(n, has, tokens, 9.0 if has else 1.0)
    )
    params = SamplingParams(max_tokens=120, temperature=2.0, seed=0, ignore_eos=True)
    llm.generate(as_ids([PROMPTS[4]]), params)
    assert not speculation.pace.is_on(1) or speculation.pace._kinds[1].is_trial
    assert speculation.pace._kinds[1].wait >= 64
    assert_idle(llm)


@pytest.mark.parametrize(
    ("make_it", "error", "message"),
    [
        (lambda: PromptLookup(num_tokens=0), ValueError, "num_tokens must be in 1 ... 16, got 0"),
        (lambda: PromptLookup(num_tokens="4"), TypeError, "num_tokens must be an integer"),
        (lambda: PromptLookup(min_ngram=0), ValueError, "min_ngram must be in 1 ... 16, got 0"),
        (lambda: PromptLookup(is_adaptive="no"), TypeError, "is_adaptive must be a bool, got 'no'"),
        (lambda: DraftModel("story", is_adaptive=None), TypeError, "is_adaptive must be a bool"),
        (
            lambda: DraftModel(7),
            TypeError,
            "model must be a directory, a hub name or 'story', got 7",
        ),
        (lambda: PromptLookup(min_ngram=5), ValueError, "min_ngram and max_ngram must be in"),
        (lambda: DraftModel("story", num_tokens=17), ValueError, "num_tokens must be in"),
        (
            lambda: PromptLookup(num_branches=5),
            ValueError,
            "num_branches must be in 1 ... 4, got 5",
        ),
        (lambda: PromptLookup(num_branches=2.0), TypeError, "num_branches must be an integer"),
        (
            lambda: LLM("story", device="cpu", speculative=PromptLookup(num_branches=2)),
            ValueError,
            "num_branches must be 1 with batch_invariant=True, the default on a CPU",
        ),
        (lambda: LLM("story", speculative=4), TypeError, "speculative must be PromptLookup"),
    ],
)
def test_what_is_out_of_range_is_refused(make_it, error, message):
    with pytest.raises(error, match=message):
        make_it()


def test_guesses_of_ranks_with_graphs_and_draft_models_for_several_gpus_are_refused():
    gpu = torch.device("cuda")
    with pytest.raises(
        ValueError, match="where tensor_parallel_size is above 1 and steps are CUDA"
    ):
        check_speculative(PromptLookup(), gpu, num_ranks=2, has_graphs=True)
    for speculative in (PromptLookup(), DraftModel("story")):
        check_speculative(speculative, gpu, has_graphs=True)
    with pytest.raises(ValueError, match="must be PromptLookup or None where GPUs share a model"):
        check_speculative(DraftModel("story"), gpu, num_ranks=2)


def test_a_draft_model_of_another_vocabulary_is_refused(checkpoint):
    with pytest.raises(ValueError, match="the draft model's vocab_size must be the model's 4096"):
        LLM("story", device="cpu", num_blocks=80, speculative=DraftModel(checkpoint[0]))


@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_guesses_beside_swapped_and_adjusted_requests_change_nothing(checkpoint, kind):
    """Main memory for blocks, penalties that forbid guesses, and scores of a prompt."""
    directory, wanted = checkpoint
    swapping = {"num_blocks": 24, "swap_space_gib": 0.01, "preemption": "swap"}
    penalized = replace(GREEDY, repetition_penalty=1.3, prompt_logprobs=1)
    params = [GREEDY, GREEDY, penalized, GREEDY, penalized, GREEDY]
    found = []
    for speculative in (None, guesses_of(kind, directory)):
        llm = make(directory, speculative, max_num_batched_tokens=32, **swapping)
        found.append(llm.generate(as_ids(PROMPTS), params))
        stats = llm.engine.stats().scheduler
        assert stats.num_swapped > 0
        assert (stats.num_drafts > 0) == (speculative is not None)
        assert_idle(llm)
    for i, (one, other) in enumerate(zip(*found, strict=True)):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.prompt_logprobs == other.prompt_logprobs
        assert (one.prompt_logprobs is not None) == (params[i] is penalized)
        if params[i] is GREEDY:
            assert other.outputs[0].token_ids == wanted[i]


@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_a_step_with_guesses_that_fails_is_run_again_in_parts(checkpoint, kind):
    directory, wanted = checkpoint
    llm = make(directory, guesses_of(kind, directory))
    runner = llm.engine.runner
    inner = getattr(runner, "runner", runner)
    forward, failed = inner.forward, []

    def failing(inputs):
        if len(inputs.ids) > 8 and len(inputs.logits_rows) > 6 and len(failed) < 3:
            failed.append(len(inputs.ids))  # the whole step, its half and again
            raise RuntimeError("the step failed")
        return forward(inputs)

    inner.forward = failing
    outputs = llm.generate(as_ids(PROMPTS), GREEDY)
    assert failed
    assert [o.outputs[0].token_ids for o in outputs] == wanted
    assert llm.engine.stats().scheduler.num_accepted_drafts > 0
    assert_idle(llm)


def test_a_draft_model_has_nothing_that_a_request_of_another_salt_has_left():
    """It keeps keys and values under the model's blocks, which are found by salt alone."""
    draft = DraftModel("story", dtype="float32", is_adaptive=False)
    llm = LLM("story", dtype="float32", num_blocks=80, block_size=4, speculative=draft)
    submit, computed = llm.engine.runner.guesser.draft.submit, []

    def submitting(batch):
        computed.append(sum(len(run.token_ids) for run in batch.sequences))
        return submit(batch)

    llm.engine.runner.guesser.draft.submit = submitting
    prompt = {"prompt_token_ids": [5 + i % 90 for i in range(40)]}
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    found = []
    for salt in ("alice", "alice", "bob"):
        computed.clear()
        [output] = llm.generate(prompt, params, cache_salt=salt)
        found.append((output.num_cached_tokens, sum(computed), output.outputs[0].token_ids))
    (first, of_alice, tokens), (again, _, same), (other, of_bob, too) = found
    assert (first, other) == (0, 0) != (again, again)
    assert of_bob == of_alice >= 40  # all of its prompt, and the same work as for the first
    assert tokens == same == too
    llm.close()
