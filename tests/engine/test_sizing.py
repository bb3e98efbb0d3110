"""The number of cache blocks follows from memory, and the widest step is as wide as the limits."""

from __future__ import annotations

import pytest
import torch

from tests.engine.test_engine import CacheReader
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.engine import sizing
from tilewise.engine.captured.decode_step import buckets
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.sizing import blocks_on_cpu, run_once, warm_up, widest_batch

SPEC = CacheSpec(2, 4, KVSpec(1, 8, 8, torch.float32))  # 512 bytes a block


def test_blocks_are_what_full_contexts_need_and_at_most_a_quarter_of_the_memory(monkeypatch):
    monkeypatch.setattr(sizing, "available_memory", lambda: 512 * 400)
    assert blocks_on_cpu(SPEC, max_num_seqs=3, max_model_len=9) == 9
    assert blocks_on_cpu(SPEC, max_num_seqs=100, max_model_len=9) == 100
    monkeypatch.setattr(sizing, "available_memory", lambda: 512)
    with pytest.raises(ValueError, match="at least one cache block of 512 bytes"):
        blocks_on_cpu(SPEC, 1, 1)


KV = KVSpec(1, 8, 8, torch.float32)
GROUPED = CacheSpec.of_windows(4, KV, [None, 10, 10, 10, 10])  # blocks of 256 and 1,024 bytes


def test_groups_that_want_the_same_share_alike():
    """No sequence outgrows a block: each group wants as many."""
    assert sizing.split_blocks(GROUPED, 100 * 1280, max_model_len=4) == (100, 100)


@pytest.mark.parametrize("longest", [5, 12, 40, 400, 10_000])
@pytest.mark.parametrize("windows", [[None, 10, 10, 10, 10], [None, 10], [None, None, 30, 10]])
def test_no_length_leaves_half_of_the_memory_to_nobody(longest, windows):
    """Sequences all of one length fill one of the groups when more than half is used."""
    spec = CacheSpec.of_windows(4, KV, windows)
    budget = 1_000_000 * spec.bytes_per_block
    counts = sizing.split_blocks(spec, budget, longest, max_run=3)
    sizes = [spec.group_block_bytes(i) for i in range(len(counts))]
    used = sum(size * count for size, count in zip(sizes, counts, strict=True))
    assert budget * 0.9999 < used <= budget
    for length in {1, 5, longest // 3 or 1, longest}:
        demands = sizing._demands(spec, length, 3)
        num_seqs = min(count / need for count, need in zip(counts, demands, strict=True))
        taken = sum(size * need for size, need in zip(sizes, demands, strict=True)) * num_seqs
        assert taken > budget / len(counts)


def test_a_cpu_gives_each_group_what_full_contexts_take_or_its_share(monkeypatch):
    monkeypatch.setattr(sizing, "available_memory", lambda: 4 * 1280 * 30)
    assert blocks_on_cpu(GROUPED, max_num_seqs=3, max_model_len=40, max_run=4) == (30, 30)
    counts = blocks_on_cpu(GROUPED, max_num_seqs=4, max_model_len=400, max_run=4)
    assert counts == sizing.split_blocks(GROUPED, 1280 * 30, 400, 4)
    assert counts[0] > counts[1]
    monkeypatch.setattr(sizing, "available_memory", lambda: 4 * 1279)
    with pytest.raises(ValueError, match=r"at least one cache block of 1280 bytes \(4 tokens x 5"):
        blocks_on_cpu(GROUPED, 1, 4)


def test_a_cache_that_does_not_fit_is_refused_with_each_groups_sizes(monkeypatch):
    def refuse(spec, num_blocks, device, **counts):
        raise MemoryError

    monkeypatch.setattr(sizing, "KVStorage", refuse)
    message = "at 256 and 1,024 bytes each, got 3,000 and 2,000"
    with pytest.raises(ValueError, match=message):
        sizing.allocate(GROUPED, (3000, 2000), torch.device("cpu"))
    with pytest.raises(ValueError, match="at 512 bytes each, got 7,000"):
        sizing.allocate(SPEC, 7000, torch.device("cpu"))


@pytest.mark.parametrize(
    ("seqs", "tokens", "lengths"),
    [(3, 8, [3, 3, 2]), (8, 3, [1, 1, 1]), (1, 9, [9]), (2, 99, [12, 12])],
)
def test_the_widest_step_has_every_token_and_every_sample(seqs, tokens, lengths):
    batch = widest_batch(seqs, tokens, max_model_len=12, block_size=4)
    assert [len(s.token_ids) for s in batch.sequences] == lengths
    assert batch.num_tokens == min(tokens, 12 * seqs)
    assert all(s.num_samples == 1 for s in batch.sequences)
    assert all(len(s.block_ids) == -(-len(s.token_ids) // 4) for s in batch.sequences)


def test_the_widest_step_runs():
    spec = CacheSpec(1, 4, KVSpec(1, 1, 1, torch.float32))
    model = CacheReader()
    run_once(model, spec, widest_batch(3, 8, 100, 4), torch.device("cpu"))
    assert model.steps == 1


@pytest.mark.parametrize("block_size", [1, 16])
def test_warming_up_runs_a_prompt_and_a_decode(block_size):
    model = CacheReader()
    warm_up(model, CacheSpec(1, block_size, KVSpec(1, 1, 1, torch.float32)), torch.device("cpu"))
    assert model.steps == 2


@pytest.mark.parametrize("is_invariant", [False, True])
def test_warming_up_runs_the_kernels_that_requests_will(is_invariant):
    """A decode that is batch-invariant is another kernel, half a minute to compile."""
    asked = []

    class Model(CacheReader):
        def __call__(self, ids, positions, *, ctx, kv):
            asked.append(ctx.batch_invariant)
            return super().__call__(ids, positions, ctx=ctx, kv=kv)

    spec = CacheSpec(1, 4, KVSpec(1, 1, 1, torch.float32))
    warm_up(Model(), spec, torch.device("cpu"), batch_invariant=is_invariant)
    assert asked == [is_invariant] * 2


GIB = 2**30
# Positions, slots, lengths and edges of `DecodeStep`; its table and its hidden states are shared.
KEPT_PER_ROW = 8 + 8 + 4 + 4


def uses(monkeypatch, *used):
    """Let a card say what is used, in GiB, one after the other; torch has given 1/4 of it out."""
    found = iter(sizing._Memory(int(x * GIB), int(x * GIB / 2), int(x * GIB / 4)) for x in used)
    monkeypatch.setattr(sizing, "_memory", lambda device: next(found))


@pytest.fixture
def card(monkeypatch):
    """A card of 10 GiB of which 4 are used, 5 with the widest step, 7 and 7.5 with two graphs."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6 * GIB, 10 * GIB))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    # Of the second graph 1/8 GiB are tensors that it keeps, 1/4 the driver's. Halves take nothing.
    uses(monkeypatch, 4, 5, 7, 7.5, 7.5, 7.5, 7.5)
    captured = []

    def capture(self, bucket, *, of_model=False):
        captured.append((bucket, of_model))

    monkeypatch.setattr(DeviceRunner, "capture", capture)
    return captured


BOTH = [(8, False), (4, False), (8, True), (4, True)]
# Of 1 and 2 rows: a quarter and half of what 4 rows keep, and the driver's nodes.
SMALL = (1 + 2) * GIB // 32 + 2 * (GIB // 4)


def blocks_on_card(**changes):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 12}
    share = changes.pop("gpu_memory_utilization", 0.9)
    spec = CacheSpec(1, 4, KVSpec(1, 1, 1, torch.float32))
    return sizing.blocks_on_cuda(
        CacheReader(),
        spec,
        torch.device("cpu"),
        gpu_memory_utilization=share,
        **(limits | changes),
    )


def test_a_cache_gets_what_step_and_graphs_leave(card):
    # Decode steps of 1, 2, 4 and 8 rows: 2.5 GiB for the two largest.
    wanted = int(10 * GIB * 0.9) - 5 * GIB - (2 * GIB + GIB // 2) - SMALL
    assert blocks_on_card(has_graphs=True) == wanted // 32
    assert card == BOTH


@pytest.mark.parametrize("captures", [True, False])
def test_a_trial_pads_steps_with_prompts_where_its_runner_will(card, monkeypatch, captures):
    """Over latents none does: the trial must not capture what never runs."""
    made = []

    class Trial(DeviceRunner):
        def __init__(self, *given, max_num_batched_tokens, **more):
            made.append(max_num_batched_tokens)
            super().__init__(*given, **more)

    monkeypatch.setattr(sizing, "DeviceRunner", Trial)
    blocks_on_card(has_graphs=True, captures_prompts=captures)
    assert made == [16 if captures else None]


def test_steps_that_share_prefixes_have_graphs_to_come(card, monkeypatch):
    class Trial(DeviceRunner):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            self.sharing_tokens = 100

    monkeypatch.setattr(sizing, "DeviceRunner", Trial)
    uses(monkeypatch, 4, 5, 6, 6.5, 6.5, 6.5, 6.5)
    four = GIB // 8 + GIB // 4
    wanted = int(10 * GIB * 0.9) - 5 * GIB - (GIB + GIB // 2) - 2 * SMALL
    wanted -= four + (2 * (GIB // 8) + GIB // 4)  # those of 4 and 8 rows that share
    assert blocks_on_card(has_graphs=True) == wanted // 32
    assert card == BOTH


def test_decode_steps_in_halves_have_graphs_to_come(card, monkeypatch):
    """They are captured when a sequence first asks for what a graph of the whole cannot give."""
    uses(monkeypatch, 4, 5, 7, 7, 7, 7.5, 7.5)
    wanted = int(10 * GIB * 0.9) - 5 * GIB - (2 * GIB + GIB // 2) - SMALL
    assert blocks_on_card(has_graphs=True) == wanted // 32


@pytest.mark.parametrize("from_rows", [8, 4, 1])
def test_greedy_steps_of_ranks_have_graphs_of_their_own(card, monkeypatch, from_rows):
    greedy = [rows for rows in (1, 2, 4, 8) if rows >= from_rows]

    def capture(self, bucket, *, of_model=False, is_greedy=False):
        card.append((bucket, "greedy" if is_greedy else of_model))

    monkeypatch.setattr(DeviceRunner, "greedy_buckets", greedy)
    monkeypatch.setattr(DeviceRunner, "capture", capture)
    uses(monkeypatch, 4, 5, *[6] * 4, *([7, 7.5] if len(greedy) > 1 else []), 7.5)
    wanted = int(10 * GIB * 0.9) - 5 * GIB - (2 * GIB + GIB // 2) - SMALL * (len(greedy) == 4)
    assert blocks_on_card(has_graphs=True) == wanted // 32
    assert card == [*BOTH, *[(rows, "greedy") for rows in greedy[:-3:-1]]]


MIB = 2**20


@pytest.mark.parametrize(("seats", "most"), [(4096, 3.5), (8192, 7.0)])
def test_the_graphs_of_many_seats_take_little_beside_the_largest(seats, most):
    """A Llama of 1 B has 1 GB of logits at 4,096 rows; each graph kept its own, 277 GiB in all.

    With 6 MiB of nodes a graph, and what a step keeps by its rows (see the test below).
    """
    sizes = buckets(seats)
    kept = KEPT_PER_ROW * sizes[-2]
    found = 2 * sizing.bytes_to_come(sizes, kept, 6 * MIB, count=2)  # whole ones and halves
    assert len(sizes) * 4 * 6 * MIB - 4 * 6 * MIB < found < most * GIB
    before = (2 * len(sizes) - 2) * 2 * 128_256 * sizes[-2]
    assert before > (270 if seats == 4096 else 1000) * GIB
    assert found < before / 50


def test_what_takes_nothing_more_has_nothing_to_come():
    assert sizing.bytes_to_come([1, 2, 4, 8], 0, 0, count=2) == 0
    assert sizing.bytes_to_come([4, 8], 400, 10) == 0
    assert sizing.bytes_to_come([4, 8], 400, 10, count=2) == 410 + 810
    assert sizing.bytes_to_come([1, 4, 8], 400, 10) == 110


def test_a_cache_without_graphs_gets_what_the_step_leaves(card):
    assert blocks_on_card() == (int(10 * GIB * 0.9) - 5 * GIB) // 32
    assert card == []


def test_what_does_not_fit_is_refused_with_the_sizes(card):
    with pytest.raises(ValueError, match="gpu_memory_utilization must leave room") as caught:
        blocks_on_card(has_graphs=True, gpu_memory_utilization=0.8)
    assert str(caught.value).endswith(
        "of 10.0 GiB, 3.0 GiB weights, 1.0 GiB other programs and the driver, 1.0 GiB the widest "
        "step, 3.1 GiB graphs, got 0.8"
    )
    assert "max_num_seqs and max_num_batched_tokens be lower" in str(caught.value)


def test_a_step_that_does_not_fit_is_refused(card, monkeypatch):
    def exhausted(*arguments):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(sizing, "run_once", exhausted)
    with pytest.raises(ValueError, match="must be of a step that fits the memory of 10.0 GiB"):
        blocks_on_card()


@pytest.mark.gpu
@pytest.mark.large
def test_a_gpus_cache_fills_what_the_step_leaves():
    device = torch.device("cuda")
    spec = CacheSpec(1, 4, KVSpec(1, 1, 1, torch.float32))
    _, total = torch.cuda.mem_get_info(device)
    num_blocks = sizing.blocks_on_cuda(
        CacheReader(),
        spec,
        device,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=8,
        gpu_memory_utilization=0.5,
    )
    assert 0 < num_blocks * spec.bytes_per_block <= 0.5 * total
