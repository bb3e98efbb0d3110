"""The part of SGLang's Python interface that its attention backends meet, recorded, as modules.

`sglang_0_5_23.json` has the names that a backend overrides, calls and reads, as the sources of
SGLang 0.5.23 have them; `python -m tests.integrations.sglang_recorded FOLDER` reads them anew from
an unpacked wheel, which need not be importable. `install` puts stand-ins of that form where the
imports of `tilewise.integrations.sglang` look for them.
"""

from __future__ import annotations

import ast
import json
import sys
from dataclasses import make_dataclass
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

_FILE = Path(__file__).with_name("sglang_0_5_23.json")
RECORDED: dict[str, Any] = json.loads(_FILE.read_text()) if _FILE.exists() else {}

# What is recorded: of which file, in which class, functions with their parameters and other names.
WANTED: dict[tuple[str, str], tuple[list[str], list[str]]] = {
    ("layers/attention/base_attn_backend.py", "AttentionBackend"): (
        ["init_forward_metadata", "init_forward_metadata_out_graph", "init_cuda_graph_state",
         "get_cuda_graph_seq_len_fill_value", "forward", "forward_decode", "forward_extend"],
        ["needs_cpu_seq_lens", "forward_metadata"],
    ),
    ("layers/attention/attention_registry.py", ""): (
        ["register_attention_backend"], ["ATTENTION_BACKENDS"],
    ),
    ("arg_groups/choices.py", ""): (
        [],
        ["ATTENTION_BACKEND_CHOICES", "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
         "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND", "add_attention_backend_choices",
         "add_deterministic_attention_backend_choices",
         "add_radix_supported_deterministic_attention_backend_choices"],
    ),
    ("plugins/__init__.py", ""): (["load_plugins"], ["GENERAL_PLUGINS_GROUP"]),
    ("layers/radix_attention.py", "RadixAttention"): (
        ["forward"],
        ["tp_q_head_num", "tp_k_head_num", "qk_head_dim", "v_head_dim", "scaling", "layer_id",
         "logit_cap", "sliding_window_size", "is_cross_attention", "k_scale", "v_scale",
         "k_scale_float", "v_scale_float", "attn_type", "xai_temperature_len"],
    ),
    ("layers/radix_attention.py", "AttentionType"): (
        [], ["DECODER", "DECODER_BIDIRECTIONAL", "ENCODER_ONLY"],
    ),
    ("model_executor/forward_batch_info.py", "ForwardBatch"): (
        [],
        ["forward_mode", "batch_size", "req_pool_indices", "seq_lens", "seq_lens_cpu",
         "out_cache_loc", "extend_seq_lens", "extend_seq_lens_cpu", "out_cache_loc_is_physical"],
    ),
    ("model_executor/forward_batch_info.py", "ForwardMode"): (
        ["is_idle", "is_decode", "is_decode_or_idle", "is_extend_without_speculative",
         "is_dllm_extend"],
        ["EXTEND", "DECODE", "MIXED", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "DLLM_EXTEND"],
    ),
    ("mem_cache/memory_pool.py", "KVWriteLoc"): (["for_batch"], ["loc", "swa_loc", "physical"]),
    ("mem_cache/memory_pool.py", "ReqToTokenPool"): ([], ["req_to_token"]),
    ("mem_cache/memory_pool.py", "MHATokenToKVPool"): (["set_kv_buffer", "get_kv_buffer"], []),
    ("mem_cache/memory_pool.py", "MLATokenToKVPool"): (
        ["set_kv_buffer", "get_key_buffer"], ["kv_cache_dim"],
    ),
    ("mem_cache/swa_memory_pool.py", "SWAKVPool"): (
        ["translate_loc_from_full_to_swa", "set_kv_buffer", "get_kv_buffer"], ["layers_mapping"],
    ),
    ("speculative/spec_info.py", "SpeculativeAlgorithm"): (["is_none"], []),
    ("model_executor/model_runner.py", "ModelRunner"): (
        [],
        ["device", "page_size", "model_config", "kv_cache_dtype", "use_mla_backend",
         "spec_algorithm", "req_to_token_pool", "token_to_kv_pool"],
    ),
    ("runtime_context.py", ""): (["get_exec", "get_parallel"], []),
}  # fmt: skip


def read(folder: Path) -> dict[str, Any]:
    """Return the record of the sources in sglang/srt; a missing name is a KeyError."""
    record: dict[str, Any] = {}
    for (file, name), (functions, names) in WANTED.items():
        tree: Any = ast.parse((folder / file).read_text())
        if name:
            tree = next(x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == name)
        found = {x.name: x for x in tree.body if isinstance(x, ast.FunctionDef)}
        seen = {x.id for x in ast.walk(tree) if isinstance(x, ast.Name)}
        seen |= {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute)}
        if missing := [x for x in names if x not in seen]:
            raise KeyError(f"{file}: {name}: {missing}")
        record[f"{file}:{name}"] = {
            "functions": {x: _parameters(found[x]) for x in functions},
            "names": names,
        }
    return record


def _parameters(function: ast.FunctionDef) -> list[str]:
    given = function.args
    names = [x.arg for x in [*given.posonlyargs, *given.args, *given.kwonlyargs]]
    return [x for x in names if x not in ("self", "cls")]


def recorded(name: str) -> dict[str, list[str]]:
    """Return the functions of a class, or of a file, with their parameters."""
    (found,) = [x for key, x in RECORDED.items() if key.endswith(f":{name}")]
    return found["functions"]


def _enum(name: str) -> Any:
    (names,) = [x["names"] for key, x in RECORDED.items() if key.endswith(f":{name}")]
    return Enum(name, names)


class _Mode:
    """Ways of a step that answer as ForwardMode's members do."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_idle(self) -> bool:
        return self.name == "IDLE"

    def is_decode(self) -> bool:
        return self.name == "DECODE"

    def is_decode_or_idle(self) -> bool:
        return self.name in ("DECODE", "IDLE")

    def is_extend_without_speculative(self) -> bool:
        return self.name in ("EXTEND", "MIXED", "DLLM_EXTEND")

    def is_dllm_extend(self) -> bool:
        return self.name == "DLLM_EXTEND"


MODES = {name: _Mode(name) for name in ("EXTEND", "DECODE", "MIXED", "IDLE", "TARGET_VERIFY")}


class SWAKVPool:
    """A pool whose layers with windows have slots of their own."""


def install(monkeypatch) -> dict[str, Any]:
    """Install the modules; returns what is registered, by the backend's name."""
    registered: dict[str, Any] = {}

    def module(name: str, **names: Any) -> ModuleType:
        made = ModuleType(f"sglang.srt.{name}")
        made.__dict__.update(names)
        return made

    def register_attention_backend(name):
        return lambda made: registered.setdefault(name, made)

    fields = [("loc", Any), ("swa_loc", Any, None), ("physical", bool, False)]
    location = make_dataclass("KVWriteLoc", fields)
    location.for_batch = classmethod(
        lambda cls, batch, *, swa_loc=None, full_loc=None: cls(batch.out_cache_loc, swa_loc)
    )
    lists: dict[str, list[str]] = {
        name: [] for name in RECORDED["arg_groups/choices.py:"]["names"][:3]
    }
    adders = RECORDED["arg_groups/choices.py:"]["names"][3:]
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    modules = [
        module("arg_groups.choices", **lists,
               **dict(zip(adders, [x.extend for x in lists.values()], strict=True))),
        module("layers.attention.attention_registry",
               register_attention_backend=register_attention_backend),
        module("layers.attention.base_attn_backend", AttentionBackend=type("Base", (), {})),
        module("layers.radix_attention", AttentionType=_enum("AttentionType")),
        module("mem_cache.memory_pool", KVWriteLoc=location),
        module("mem_cache.swa_memory_pool", SWAKVPool=SWAKVPool),
        module("runtime_context", get_exec=lambda: SimpleNamespace(deterministic=deterministic),
               get_parallel=lambda: SimpleNamespace(dcp_enabled=False)),
    ]  # fmt: skip
    for made in modules:
        *folders, last = made.__name__.split(".")
        for end in range(1, len(folders) + 1):
            package = ".".join(folders[:end])
            if package not in sys.modules:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        monkeypatch.setitem(sys.modules, made.__name__, made)
        monkeypatch.setattr(sys.modules[".".join(folders)], last, made, raising=False)
    for name in ("step", "paged", "latent"):
        monkeypatch.delitem(sys.modules, f"tilewise.integrations.sglang.{name}", raising=False)
    return registered


if __name__ == "__main__":
    _FILE.write_text(json.dumps(read(Path(sys.argv[1]) / "sglang/srt"), indent=1) + "\n")
