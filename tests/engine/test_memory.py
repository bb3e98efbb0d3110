"""What is free is asked before anything is taken, and a model that does not fit is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.models.tiny import config_of
from tilewise import cli
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.engine import loading, memory
from tilewise.engine.config import DraftModel
from tilewise.engine.llm import LLM
from tilewise.engine.memory import available_memory, check_memory, free_memory
from tilewise.engine.steps import draft_runner
from tilewise.models import ModelConfig, registry
from tilewise.models.registry import empty_model

SPEC = CacheSpec(2, 4, KVSpec(1, 8, 8, torch.float32))  # 512 bytes a block
GIB = 2**30


@pytest.fixture
def files(monkeypatch):
    """Files below /proc and /sys as a dict, for `available_memory`."""
    found = {}

    def read_text(path, encoding):
        if str(path) not in found:
            raise FileNotFoundError(path)
        return found[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    return found


def test_available_memory_is_a_plausible_part_of_the_machine():
    assert 2**20 < available_memory() < 2**50
    assert free_memory(torch.device("cpu"), 0.5) > 2**20


def test_the_smallest_of_kernel_and_control_group_counts(files):
    files["/proc/meminfo"] = "MemTotal: 9000 kB\nMemAvailable: 3000 kB\n"
    files["/sys/fs/cgroup/memory.max"] = "2000000\n"
    files["/sys/fs/cgroup/memory.current"] = "500000\n"
    assert available_memory() == 1_500_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_memory() == 3000 * 1024
    files["/sys/fs/cgroup/memory.max"] = "100000\n"
    assert available_memory() == 0
    files.clear()
    assert available_memory() > 2**20  # the physical pages that sysconf counts


def test_files_that_the_kernel_keeps_are_no_use_of_a_limit(files):
    files["/sys/fs/cgroup/memory.max"] = "2000000\n"
    files["/sys/fs/cgroup/memory.current"] = "1900000\n"
    files["/sys/fs/cgroup/memory.stat"] = "anon 100\ninactive_file 700000\nactive_file 300000\n"
    assert available_memory() == 1_100_000


@pytest.mark.parametrize(
    ("groups", "folder", "limit", "used", "stat"),
    [
        ("0::/a/b\n", "", "memory.max", "memory.current", "inactive_file"),
        (
            "5:cpu:/\n4:memory:/a/b\n0::/\n",
            "/memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ],
    ids=["v2", "v1"],
)
def test_limits_of_a_groups_parents_hold_too(files, groups, folder, limit, used, stat):
    root = f"/sys/fs/cgroup{folder}"
    files["/proc/self/cgroup"] = groups
    for place, most, taken in (("", 10**9, 4), ("/a", 700, 300), ("/a/b", 600, 290)):
        files[f"{root}{place}/{limit}"] = f"{most}\n"
        files[f"{root}{place}/{used}"] = f"{taken}\n"
    assert available_memory() == 310
    files[f"{root}/a/b/{limit}"] = f"{2**63 - 4096}\n"  # v1's "no limit"
    assert available_memory() == 400
    files[f"{root}/a/memory.stat"] = f"{stat} 50\n"
    assert available_memory() == 450


def model_of(**changes):
    _, model_class, fields = config_of("llama")
    config = {**fields, "architectures": [model_class.__name__], **changes}
    return empty_model(ModelConfig.from_hf(config), "float32", "meta")


def test_weights_packing_and_cache_are_summed():
    model, cpu = model_of(), torch.device("cpu")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    largest = 2 * max(p.nbytes for p in model.parameters() if p.dim() == 2)
    least = weights + largest + 512
    check_memory(model, SPEC, cpu, least)
    with pytest.raises(ValueError, match=r"model must fit the memory of cpu, got 0\.00 GiB"):
        check_memory(model, SPEC, cpu, least - 1)
    check_memory(model, SPEC, cpu, least + 511 * 512, num_blocks=512)
    message = "num_blocks must fit the memory of cpu at 512 bytes each, got 512: "
    with pytest.raises(ValueError, match=message):
        check_memory(model, SPEC, cpu, least + 510 * 512, num_blocks=512)
    check_memory(model, SPEC, cpu, 3 * least, num_processes=3)
    with pytest.raises(ValueError, match="of cpu, got .* .3 times 0.00 GiB of weights"):
        check_memory(model, SPEC, cpu, 3 * least - 1, num_processes=3)
    with pytest.raises(ValueError, match="swap_space_gib must fit .* 1.00 GiB of swap space"):
        check_memory(model, SPEC, cpu, GIB, swap_bytes=GIB)


def test_a_gpu_packs_nothing_and_swaps_to_the_host(monkeypatch):
    model, gpu = model_of(), torch.device("cuda", 1)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    check_memory(model, SPEC, gpu, weights + 512)
    with pytest.raises(ValueError, match="model must fit the memory of cuda:1"):
        check_memory(model, SPEC, gpu, weights + 511)
    monkeypatch.setattr(memory, "available_memory", lambda: GIB - 1)
    with pytest.raises(ValueError, match="swap_space_gib must fit the memory of the host"):
        check_memory(model, SPEC, gpu, weights + 512, swap_bytes=GIB)


def test_what_a_gpu_has_free_is_the_drivers_and_torchs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * GIB)
    gpu = torch.device("cuda")
    assert free_memory(gpu) == 35 * GIB
    assert free_memory(gpu, 0.75) == 15 * GIB
    assert free_memory(gpu, 0.25) == 0


@pytest.fixture
def big(tmp_path):
    """A directory with the configuration of a model of 131 GiB in bfloat16, and nothing else."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 8192,
        "intermediate_size": 28_672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, "135.33 GiB .131.42 GiB of weights, 3.91 GiB of packing them"),
        ({"weight_dtype": "int8"}, "135.33 GiB .131.42 GiB of weights"),
        ({"tensor_parallel_size": 2}, "135.33 GiB .2 times 65.71 GiB of weights"),
        ({"dtype": "float32"}, "270.66 GiB .262.83 GiB of weights"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_memory_is_taken(
    big, monkeypatch, settings, sizes
):
    monkeypatch.setattr(loading, "free_memory", lambda *given: 20 * GIB)
    monkeypatch.setattr(registry, "allocated", None)
    message = f"model must fit the memory of cpu, got {sizes}.* where 20.00 GiB are free"
    with pytest.raises(ValueError, match=message):
        LLM(big, device="cpu", random_weights=True, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_that_no_gpu_has_room_for_is_refused_before_memory_is_taken(big, size):
    if torch.cuda.device_count() < size:
        pytest.skip("needs two GPUs")
    file = big / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": 200}))
    before = torch.cuda.memory_allocated()
    with pytest.raises(ValueError, match=r"model must fit the memory of cuda.* GiB are free"):
        LLM(big, device="cuda", random_weights=True, tensor_parallel_size=size)
    assert torch.cuda.memory_allocated() == before


def test_the_command_line_says_so_in_one_sentence_and_exits_with_2(big, monkeypatch, capsys):
    monkeypatch.setattr(loading, "free_memory", lambda *given: 20 * GIB)
    arguments = ["serve", str(big), "--load-format", "dummy", "--port", "0", "--device", "cpu"]
    assert cli.main(arguments) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[-1].startswith(
        "tilewise: the model must fit the memory of cpu, got 135.33 GiB (131.42"
    )


def test_a_draft_model_is_counted_before_it_is_loaded(monkeypatch):
    monkeypatch.setattr(draft_runner, "free_memory", lambda *given: 2**20)
    with pytest.raises(ValueError, match="model must fit the memory of cpu"):
        LLM("story", device="cpu", num_blocks=8, speculative=DraftModel("story"))
