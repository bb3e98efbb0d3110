"""Blocks in files: found by content, checked, bounded, and never worse than a miss."""

from __future__ import annotations

import gc
import warnings
import weakref
from pathlib import Path

import pytest
import torch

from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.contents import Content, content_of
from tilewise.cache.prefix import PrefixCache
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.tables import block_files
from tilewise.engine.tables.block_files import BlockFiles
from tilewise.engine.tables.host_cache import HostCache

SPEC = CacheSpec(2, 4, KVSpec(2, 8, 6, torch.int8))


def filled_host() -> HostCache:
    host = HostCache(KVStorage(SPEC, 3), 5)
    for tensor in host.blocks.whole:
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return host


def content(*blocks: int, salt: str = "") -> Content:
    """Blocks of one token each four times."""
    cache, node = PrefixCache([BlockAllocator(1)], [None], 4), None
    for token in blocks:
        node = cache.child(node, salt, [token] * 4)
    return content_of(node)


def files(path: Path, host: HostCache, model: bytes = b"model", most: int = 10**6) -> BlockFiles:
    return BlockFiles(path, host, model, most)


def block(host: HostCache, slot: int) -> bytes:
    return b"".join(part.tobytes() for part in host.read(slot))


def stored(path: Path, host: HostCache, *kept: Content) -> list[Path]:
    store = files(path, host)
    for slot, each in enumerate(kept):
        store.save(each, slot)
    store.flush()
    return sorted(path.glob("*.block"))


def test_a_block_comes_back_bit_for_bit_also_to_another_process(tmp_path):
    host = filled_host()
    want = block(host, 0)
    stored(tmp_path, host, content(1, 2))
    store = files(tmp_path, host)
    assert store.has(content(1, 2).digest)
    assert store.load(content(1, 2), 3)
    assert block(host, 3) == want
    assert store.num_bytes == sum(p.stat().st_size for p in tmp_path.iterdir())


def test_a_block_that_still_waits_to_be_written_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(BlockFiles, "_write_all", lambda self: None)
    host = filled_host()
    store = files(tmp_path, host)
    store.save(content(1), 0)
    assert store.has(content(1).digest)
    assert store.load(content(1), 4)
    assert block(host, 4) == block(host, 0)


@pytest.mark.parametrize("where", [0, 20, 60, 100, -1])
def test_a_changed_byte_is_a_miss_and_the_file_goes(tmp_path, where):
    host = filled_host()
    [path] = stored(tmp_path, host, content(1))
    raw = bytearray(path.read_bytes())
    raw[where] ^= 1
    path.write_bytes(raw)
    store = files(tmp_path, host)
    before = block(host, 3)
    assert not store.load(content(1), 3)
    assert block(host, 3) == before
    assert not path.exists()
    assert not store.has(content(1).digest)
    assert store.num_bytes == 0


@pytest.mark.parametrize("length", [0, 5, 40, 80, 150, -1])
def test_a_torn_file_is_a_miss(tmp_path, length):
    host = filled_host()
    [path] = stored(tmp_path, host, content(1))
    path.write_bytes(path.read_bytes()[:length])
    assert not files(tmp_path, host).load(content(1), 3)


def test_what_a_killed_writer_left_is_removed(tmp_path):
    part = tmp_path / "ab-cd.1.part"
    part.write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / "strange.block").write_text("not ours")
    store = files(tmp_path, filled_host())
    assert not part.exists()
    assert len(list(tmp_path.iterdir())) == 2
    assert store.num_bytes == 0


def test_other_models_salts_and_beginnings_are_misses_even_under_the_right_name(tmp_path):
    host = filled_host()
    [path] = stored(tmp_path, host, content(1, 2))
    assert not files(tmp_path, host, model=b"other").load(content(1, 2), 3)
    stored(tmp_path, host, content(1, 2))
    assert path.exists()
    for wrong in (content(3, 2), content(1, 2, salt="x"), content(2)):
        store = files(tmp_path, host)
        target = store.path(wrong.digest, wrong.parent)
        target.write_bytes(path.read_bytes())
        assert not files(tmp_path, host).load(wrong, 3)


def test_a_size_is_kept_to_and_the_longest_unused_goes_first(tmp_path):
    host = filled_host()
    [path] = stored(tmp_path, host, content(1))
    size = path.stat().st_size
    store = files(tmp_path, host, most=3 * size)
    store.save(content(2), 1)
    store.save(content(3), 2)
    store.flush()
    assert store.load(content(1), 4)
    store.save(content(4), 3)
    assert store.flush(float("inf"))
    assert [store.has(content(i).digest) for i in (1, 2, 3, 4)] == [True, False, True, True]
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) == store.num_bytes == 3 * size


def test_a_block_larger_than_all_of_it_is_not_written(tmp_path):
    host = filled_host()
    store = files(tmp_path, host, most=10)
    store.save(content(1), 0)
    store.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_warns_once_and_loses_nothing(tmp_path, monkeypatch):
    host = filled_host()
    stored(tmp_path, host, content(1))
    store = files(tmp_path, host)

    def full(self, content, arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(BlockFiles, "_write", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(2, 6):
            store.save(content(i), 1)
        store.flush()
        store.save(content(9), 1)
        store.flush()
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "No space left" in str(caught[0].message)
    assert not store.is_writable
    assert store.load(content(1), 3)
    assert not store.has(content(2).digest)


def test_a_write_that_fails_midway_leaves_no_file(tmp_path, monkeypatch):
    host = filled_host()
    store = files(tmp_path, host)
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("gone")))
    store.save(content(1), 0)
    with pytest.warns(RuntimeWarning, match="gone"):
        store.flush()
    assert list(tmp_path.iterdir()) == []


def test_engines_that_share_a_directory_keep_each_other_from_nothing(tmp_path, monkeypatch):
    """Both write one block at once; and one begins, and removes what the other is writing."""
    host, replace = filled_host(), Path.replace
    stores, names = [files(tmp_path, host) for _ in range(2)], set()

    def note(self, target):
        names.add(self)
        return replace(self, target)

    def lose(self, target):
        files(tmp_path, host)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", note)
    for store in stores:
        store.save(content(1), 0)
        store.flush()
    assert len(names) == 2
    monkeypatch.setattr(Path, "replace", lose)
    stores[0].save(content(2), 1)
    stores[0].flush()
    assert stores[0].is_writable
    assert not stores[0].has(content(2).digest)
    monkeypatch.setattr(Path, "replace", replace)
    stores[0].save(content(2), 1)
    stores[0].flush()
    assert stores[0].load(content(2), 3)
    assert block(host, 3) == block(host, 1)


def test_forgetting_takes_all_that_follows_along(tmp_path):
    host = filled_host()
    stored(tmp_path, host, content(1), content(1, 2), content(1, 2, 3), content(4))
    store = files(tmp_path, host)
    store.forget(content(1).digest)
    assert len(list(tmp_path.iterdir())) == 1
    assert store.has(content(4).digest)
    store.clear()
    assert list(tmp_path.iterdir()) == []


def test_what_is_saved_after_everything_was_dropped_is_found_here_alone(tmp_path):
    """Weights have changed, and `model` tells of those before."""
    host = filled_host()
    stored(tmp_path, host, content(1))
    store = files(tmp_path, host)
    store.clear()
    store.save(content(1), 2)
    store.flush()
    assert store.load(content(1), 3)
    assert block(host, 3) == block(host, 2)
    assert not files(tmp_path, host).load(content(1), 3)


def test_a_block_that_was_being_written_when_everything_was_dropped_does_not_come_back(
    tmp_path, monkeypatch
):
    host = filled_host()
    store = files(tmp_path, host)
    head = store._head

    def interrupted(of):
        found = head(of)
        monkeypatch.setattr(store, "_head", head)
        store.clear()
        store.save(of, 2)  # what was computed since
        return found

    monkeypatch.setattr(store, "_head", interrupted)
    store.save(content(1), 0)
    store.flush()
    assert not store.load(content(1), 3) or block(host, 3) == block(host, 2)


def test_what_is_forgotten_while_it_waits_is_not_written(tmp_path, monkeypatch):
    host = filled_host()
    write_all = BlockFiles._write_all
    monkeypatch.setattr(BlockFiles, "_write_all", lambda self: None)
    store = files(tmp_path, host)
    store.save(content(1), 0)
    store.save(content(1, 2), 1)
    store.forget(content(1).digest)
    assert not store.has(content(1, 2).digest)
    store._queue.put(None)
    write_all(store)
    assert list(tmp_path.iterdir()) == []


def test_no_more_waits_than_may(tmp_path, monkeypatch):
    monkeypatch.setattr(BlockFiles, "_write_all", lambda self: None)
    monkeypatch.setattr(block_files, "MOST_QUEUED", 3)
    store = files(tmp_path, filled_host())
    for i in range(10):
        store.save(content(i), 0)
    assert sum(store.has(content(i).digest) for i in range(10)) == 3


def test_a_writer_without_work_ends_and_lets_go_of_main_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(block_files, "IDLE_S", 0.01)
    host = filled_host()
    store = files(tmp_path, host)
    for token in (1, 2):  # the second block begins another thread
        store.save(content(token), 0)
        writer = store._thread
        if writer is not None:
            writer.join(10)
            assert not writer.is_alive()
    assert len(list(tmp_path.glob("*.block"))) == 2
    memory = weakref.ref(host)
    del store, host
    gc.collect()
    assert memory() is None


def test_a_directory_that_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="offload_dir must be a directory"):
        files(tmp_path / "file", filled_host())
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        files(tmp_path, filled_host(), most=0)
