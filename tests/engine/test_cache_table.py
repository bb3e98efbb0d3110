"""Four kinds of attention side by side, for models with and without latents."""

from __future__ import annotations

import json

import pytest

from tilewise.cli import main
from tilewise.engine.cache_table import CacheShape, cache_table, read_latent_shape
from tilewise.errors import CheckpointError

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def numbers(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines()[1:])
    return {row[0]: int(row[1].replace(",", "")) for row in rows}


def test_a_model_with_groups_is_compared_with_what_it_could_have_been():
    text = cache_table(CacheShape(32, 32, 8, 128, 128), 2)
    assert numbers(text) == {
        "MHA": 32 * 32 * 256 * 2,
        "GQA": 32 * 8 * 256 * 2,
        "MQA": 32 * 256 * 2,
        "MLA": 32 * (512 + 64) * 2,
    }
    [own] = [line for line in text.splitlines() if "this model" in line]
    assert own.split() == ["GQA", "131,072", "B", "25.0%", "32", "x", "8", "x", "(128", "+", "128)",
                           "channels", "(this", "model)"]  # fmt: skip


@pytest.mark.parametrize(("num_kv_heads", "kind"), [(12, "MHA"), (4, "GQA"), (1, "MQA")])
def test_the_model_s_own_kind_is_marked(num_kv_heads, kind):
    text = cache_table(CacheShape(2, 12, num_kv_heads, 64, 64), 4)
    [own] = [line for line in text.splitlines() if "this model" in line]
    assert own.split()[0] == kind


def test_explain_cache_reads_latents_from_their_own_fields(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert main(["explain", "cache", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert numbers(text)["MLA"] == 61 * 576 * 2 == 70272  # the 70 KB of DeepSeek-V3's report
    assert numbers(text)["MHA"] == 61 * 128 * (192 + 128) * 2
    [own] = [line for line in text.splitlines() if "this model" in line]
    assert "61 x (512 + 64) channels" in own


def test_explain_cache_compares_the_packaged_model(capsys):
    assert main(["explain", "cache", "story"]) == 0
    text = capsys.readouterr().out
    table = text[text.index("one token would take") :]
    assert set(numbers(table)) == {"MHA", "GQA", "MQA", "MLA"}
    first = next(line for line in text.splitlines() if line.startswith("one token"))
    [own] = [line for line in table.splitlines() if "this model" in line]
    assert own.split()[1] in first


def test_a_missing_size_is_named(tmp_path):
    assert read_latent_shape(tmp_path) is None
    for text in ("{", "[1]", '{"num_hidden_layers": 2}'):
        (tmp_path / "config.json").write_text(text)
        assert read_latent_shape(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | {"torch_dtype": "fp7"}))
    with pytest.raises(CheckpointError, match="dtype must be one of float32, .* got 'fp7'"):
        read_latent_shape(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3 | {"v_head_dim": None}))
    with pytest.raises(CheckpointError, match="v_head_dim must be a positive integer, got None"):
        read_latent_shape(tmp_path)
