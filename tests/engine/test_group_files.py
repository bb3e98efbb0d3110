"""Files of blocks behind windows and of several groups: found again, torn, and forgotten."""

from __future__ import annotations

import pytest

from tests.engine.checkpoint import greedy_tokens, write_checkpoint
from tests.engine.simulator import VirtualModel, VirtualStore
from tests.engine.test_group_models import COUNT, GREEDY, asked, prompts, tokens_of
from tests.engine.test_scheduler import ask
from tilewise.cache.prefix import pack
from tilewise.engine.llm import LLM

SMALL = {"block_size": 4, "num_blocks": 24, "max_num_batched_tokens": 16, "max_num_seqs": 2}


@pytest.fixture(scope="module", params=["mistral_window", "gemma3"])
def saved(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    hf = write_checkpoint(directory, request.param, has_tokenizer=False)
    return directory, greedy_tokens(hf, prompts()[0], COUNT)


def test_blocks_of_all_groups_outlive_the_engine(saved, tmp_path):
    """What one engine's main memory gave away another finds; what is torn is computed again."""
    directory, expected = saved
    files = tmp_path / "files"

    def run(texts):
        # Room for a few blocks, so that most go to files.
        llm = LLM(directory, device="cpu", swap_space_gib=3e-5, offload_dir=files, **SMALL)
        try:
            outputs = [llm.generate(asked([text]), GREEDY)[0] for text in texts]
            llm.loop.call(llm.engine.scheduler.check_integrity)
            stores = llm.engine.scheduler.tables.memory.stores
            return outputs, [(store.num_hits, store.num_misses) for store in stores]
        finally:
            assert llm.close()

    others = [[7 + i] * 60 for i in range(4)]
    first, hits = run([prompts()[0], *others])
    assert tokens_of(first[:1]) == [expected]
    groups = sorted(files.iterdir())
    assert [group.name for group in groups] == [f"group-{i}" for i in range(len(hits))]
    assert all(list(group.glob("*.block")) for group in groups)
    [again], hits = run([prompts()[0]])
    assert again.num_cached_tokens >= 28
    assert all(found > 0 for found, _ in hits)
    assert tokens_of([again]) == [expected]
    for path in files.glob("*/*.block"):
        path.write_bytes(path.read_bytes()[:-1])
    [torn], hits = run([prompts()[0]])
    assert torn.num_cached_tokens == 0
    assert all(found == 0 for found, _ in hits)
    assert sum(missed for _, missed in hits) == 1  # one that is none ends it
    assert tokens_of([torn]) == [expected]


def test_of_a_window_only_what_is_seen_is_read(tmp_path):
    """A prompt of 37 tokens sees 6 of them behind a window of 7: two or three blocks of 4."""
    write_checkpoint(tmp_path, "mistral_window", has_tokenizer=False)
    settings = SMALL | {"swap_space_gib": 3e-5, "offload_dir": tmp_path / "files"}
    for round in range(2):
        llm = LLM(tmp_path, device="cpu", **settings)
        [output] = llm.generate(asked([prompts()[0]]), GREEDY)
        if round == 0:
            for i in range(4):
                llm.generate(asked([[7 + i] * 60]), GREEDY)
        [store] = llm.engine.scheduler.tables.memory.stores
        llm.close()
    assert output.num_cached_tokens == 36
    assert store.num_hits == 2


def test_a_reset_drops_files_and_a_failure_those_behind_its_first_block():
    import random

    from tilewise.engine.scheduling.scheduler import Scheduler

    stores = [VirtualStore(lambda: 0.5, group) for group in range(2)]
    scheduler = Scheduler([6, 6], 2, windows=(None, 3), num_swap_blocks=2, store=stores,
                          max_num_seqs=1, max_num_batched_tokens=16, max_model_len=20)  # fmt: skip
    model = VirtualModel(scheduler)
    for store in stores:
        store.model = model
    draw = random.Random(0)
    texts = [[draw.randrange(9) for _ in range(7)] for _ in range(5)]
    for i, text in enumerate(texts):
        scheduler.add(ask(str(i), text, max_tokens=1))
        while scheduler.has_unfinished():
            batch = scheduler.schedule()
            model.submit(batch)
            scheduler.update(batch, model.result(batch))
    assert all(store.files for store in stores)
    family = [
        type(
            "Seq",
            (),
            {"num_tokens": 7, "token_ids": texts[0], "request": ask("x", texts[0], max_tokens=1)},
        )()
    ]
    kept = [len(store.files) for store in stores]
    scheduler.tables.forget(family, [])
    begin = pack(texts[0][:2])
    for store, count in zip(stores, kept, strict=True):
        assert not [c for c, _ in store.files.values() if c.tokens.startswith(begin)]
        assert len(store.files) < count
    assert any(store.files for store in stores)
    scheduler.reset_prefix_cache()
    assert not any(store.files for store in stores)


def test_what_is_at_hand_is_looked_for_once_however_many_hits_files_have(monkeypatch):
    from tilewise.engine.scheduling.scheduler import Scheduler

    stores = [VirtualStore(lambda: 0.0, group) for group in range(2)]
    scheduler = Scheduler([40, 40], 2, windows=(None, 3), num_swap_blocks=40, store=stores,
                          max_num_seqs=1, max_num_batched_tokens=80, max_model_len=80)  # fmt: skip
    for store in stores:
        monkeypatch.setattr(store, "has", lambda digest: True)
        monkeypatch.setattr(store, "load", lambda content, slot: False)
    calls, find = [], scheduler.tables.prefix.find
    monkeypatch.setattr(
        scheduler.tables.prefix, "find", lambda *args, **kw: calls.append(args) or find(*args, **kw)
    )
    scheduler.add(ask("long", list(range(61)), max_tokens=1))
    assert scheduler.schedule() is not None
    assert len(calls) < 10


def test_there_is_a_store_for_each_group():
    from tilewise.engine.scheduling.scheduler import Scheduler

    with pytest.raises(ValueError, match="store must be one for each of 2 groups, got 1"):
        Scheduler(
            8, 2, windows=(None, 3), num_swap_blocks=2, store=[VirtualStore(lambda: 0.5)],
            max_num_seqs=1, max_num_batched_tokens=16, max_model_len=20,
        )  # fmt: skip
