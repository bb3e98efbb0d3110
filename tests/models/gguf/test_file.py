"""What a GGUF file says, and what a hostile one may not do."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
import torch

from tests.models.gguf.writer import Raw, encoded, write
from tilewise.errors import CheckpointError
from tilewise.models.gguf.file import read_gguf

METADATA = {
    "general.architecture": "llama",
    "a.flag": True,
    "a.number": 7,
    "a.real": 0.5,
    "a.texts": ["x", "", "\u00fc"],
    "a.array": np.arange(5, dtype=np.int32),
    "a.flags": np.array([True, False]),
}
TENSORS = {"w": encoded(torch.arange(6.0).view(2, 3)), "v": encoded(torch.ones(4), 1)}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_a_file_is_read_as_it_was_written(path, version, alignment):
    found = read_gguf(write(path, METADATA, TENSORS, version=version, alignment=alignment))
    for key, value in METADATA.items():
        got = found.metadata[key]
        assert (list(got) == list(value)) if isinstance(value, np.ndarray) else got == value
    assert found.tensors["w"].shape == (2, 3)
    assert found.tensors["w"].type.name == "F32"
    assert torch.equal(found.tensors["w"].data.clone().view(torch.float32), TENSORS_W)
    assert found.tensors["v"].shape == (4,)


TENSORS_W = torch.arange(6.0).view(2, 3)


def parts(folder, count=3, **changes):
    for i in range(count):
        split = {"split.no": i, "split.count": count, "split.tensors.count": count} | changes
        own = {**METADATA, **split} if i == 0 else split
        name = f"m-{i + 1:05d}-of-{count:05d}.gguf"
        write(folder / name, own, {f"t{i}": encoded(torch.full((2,), float(i)))})
    return folder / f"m-00002-of-{count:05d}.gguf"


def test_a_split_file_is_one(tmp_path):
    found = read_gguf(parts(tmp_path))
    assert sorted(found.tensors) == ["t0", "t1", "t2"]
    assert found.metadata["general.architecture"] == "llama"
    assert len(found.paths) == 3


def test_split_files_that_do_not_fit_are_refused(tmp_path):
    file = parts(tmp_path)
    (tmp_path / "m-00003-of-00003.gguf").unlink()
    with pytest.raises(CheckpointError, match="beside all its parts, got no m-00003-of-00003.gguf"):
        read_gguf(file)
    with pytest.raises(CheckpointError, match=r"must hold 9 tensors, got 3"):
        read_gguf(parts(tmp_path, **{"split.tensors.count": 9}))
    with pytest.raises(CheckpointError, match=r"split.no of .* must be 0, got 1"):
        read_gguf(parts(tmp_path, **{"split.no": 1}))
    alone = write(tmp_path / "x.gguf", {"split.count": 2, "split.no": 0}, TENSORS)
    with pytest.raises(CheckpointError, match="is one of 2 parts, and must be named as such"):
        read_gguf(alone)


def head(num_tensors=0, num_fields=0, body=b"", version=3):
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + body


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name="w", dims=(4,), kind=0, offset=0) -> bytes:
    sizes = b"".join(struct.pack("<Q", x) for x in dims)
    return text(name) + struct.pack("<I", len(dims)) + sizes + struct.pack("<IQ", kind, offset)


HUGE = 2**64 - 1
HOSTILE = {
    "empty": (b"", "must begin with GGUF|must be readable"),
    "other_magic": (b"GGML" + bytes(64), "must begin with GGUF, got"),
    "pointer": (b"version https://git-lfs.example/spec/v1\n", "a Git LFS pointer"),
    "version_1": (head(version=1), "must be of GGUF version 2 or 3, got 1"),
    "big_endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little endian, got big endian"),
    "cut_head": (head()[:12], "the file is cut off"),
    "many_tensors": (head(HUGE), "the file is cut off or damaged"),
    "many_fields": (head(0, HUGE), "the file is cut off or damaged"),
    "long_key": (head(0, 1, struct.pack("<Q", HUGE) + bytes(32)), "at most 65535 bytes"),
    "long_text": (
        head(0, 1, field("k", 8, struct.pack("<Q", 2**63))),
        "the file is cut off or damaged",
    ),
    "long_array": (
        head(0, 1, field("k", 9, struct.pack("<IQ", 10, 2**61 + 1)) + bytes(8)),
        "the file is cut off or damaged",
    ),
    "long_array_of_texts": (
        head(0, 1, field("k", 9, struct.pack("<IQ", 8, 2**61)) + bytes(64)),
        "the file is cut off or damaged",
    ),
    "nested": (head(0, 1, field("k", 9, struct.pack("<IQ", 9, 1)) + bytes(64)), "not hold arrays"),
    "unknown_type": (head(0, 1, field("k", 13, bytes(16))), "type to 12, got 13"),
    "bool_of_two": (head(0, 1, field("k", 7, b"\2") + bytes(16)), "must be 0 or 1, got 2"),
    "twice": (head(0, 2, field("k", 7, b"\1") * 2), "once, got it twice"),
    "no_utf8": (head(0, 1, field("k", 8, struct.pack("<Q", 1) + b"\xff") + bytes(9)), "be UTF-8"),
    "alignment": (
        head(0, 1, field("general.alignment", 4, struct.pack("<I", 12)) + bytes(9)),
        "must be a power of 2, got 12",
    ),
    "five_dims": (head(1, 0, tensor(dims=(1,) * 5)), "1 to 4 dims, got 5"),
    "no_dims": (head(1, 0, tensor(dims=()) + bytes(32)), "1 to 4 dims, got 0"),
    "zero_size": (head(1, 0, tensor(dims=(0, 4)) + bytes(64)), "positive sizes"),
    "product": (head(1, 0, tensor(dims=(2**32, 2**32, 1)) + bytes(64)), "the file is cut off"),
    "product_of_blocks": (
        head(1, 0, tensor(dims=(2**33, 2**31), kind=12) + bytes(64)),
        "the file is cut off",
    ),
    "offset": (head(1, 0, tensor(offset=2**64 - 32) + bytes(64)), "the file is cut off"),
    "unaligned": (head(1, 0, tensor(offset=4) + bytes(64)), "a multiple of 32, got 4"),
    "torn_data": (head(1, 0, tensor(dims=(64,)) + bytes(64)), "the file is cut off"),
    "rows_off_blocks": (head(1, 0, tensor(dims=(33,), kind=8) + bytes(99)), "a multiple of 32 num"),
    "overlap": (
        head(2, 0, tensor("a", (16,)) + tensor("b", (16,)) + bytes(256)),
        "must lie behind the one before, which ends at 64, got 0",
    ),
    "same_name": (
        head(2, 0, tensor("a", (8,)) + tensor("a", (8,), offset=32) + bytes(256)),
        "'a' once, got it twice",
    ),
    "iq2": (head(1, 0, tensor(kind=17) + bytes(64)), "got IQ2_XS"),
    "ternary": (head(1, 0, tensor(kind=34) + bytes(64)), "got TQ1_0"),
    "unknown_tensor_type": (head(1, 0, tensor(kind=99) + bytes(64)), "got type 99"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_cannot_be_is_refused_before_memory_is_taken(path, case):
    raw, message = HOSTILE[case]
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message):
            read_gguf(path)
        # What is claimed is 2 GiB and more; threads of other tests may read some of their own.
        assert tracemalloc.get_traced_memory()[1] < 16_000_000
    finally:
        tracemalloc.stop()


def mutated(rng: random.Random, raw: bytes) -> bytes:
    """Return bytes with some of them changed, cut, doubled, or made a large number."""
    found = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(found))
        kind = rng.randrange(5)
        if kind == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            found[at : at + 8] = struct.pack(
                "<Q", rng.choice((0, 1, 2**31, 2**32, 2**62, 2**63, HUGE, len(raw)))
            )
        elif kind == 2:
            del found[at:]
        elif kind == 3:
            found[at:at] = found[at : at + rng.randint(1, 40)]
        else:
            found[at : at + 4] = struct.pack("<I", rng.randrange(45))
        if not found:
            break
    return bytes(found)


def fuzz(path, seed, count):
    """Read mutations of a valid file; return how many were read and refused."""
    raw = write(path, METADATA, {**TENSORS, "q": Raw((8, (2, 32), bytes(68)))}).read_bytes()
    rng, read = random.Random(seed), 0
    tracemalloc.start()
    try:
        for _ in range(count):
            path.write_bytes(mutated(rng, raw))
            try:
                found = read_gguf(path)
            except CheckpointError:
                continue
            read += 1
            for info in found.tensors.values():  # whatever is mapped can be read
                assert info.data.sum() >= 0
        assert tracemalloc.get_traced_memory()[1] < 4_000_000
    finally:
        tracemalloc.stop()
    return read, count - read


def test_mutations_are_read_or_refused(path):
    read, refused = fuzz(path, 1, 500)
    assert read > 20
    assert refused > 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_mutations_are_read_or_refused(path, seed):
    fuzz(path, seed, 10_000)
