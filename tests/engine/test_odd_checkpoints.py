"""LLM over checkpoints and settings that are rare, and allowed: the same tokens as transformers."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from contextlib import suppress

import pytest
import torch

from tests.engine.checkpoint import greedy_tokens, write_checkpoint
from tilewise.engine.llm import LLM
from tilewise.engine.prompts import listed, token_ids
from tilewise.engine.request import SamplingParams
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.settings import packaged_model
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.errors import CheckpointError, EngineClosedError, RequestError, UnsupportedError
from tilewise.models import load_model

PROMPT = [5, 17, 99, 4]


@pytest.mark.slow  # a compiled step is compiled anew for each dtype
@pytest.mark.parametrize("case", ["llama", "gpt2"])
def test_a_model_in_float64_says_what_it_says_in_transformers(tmp_path, case):
    peer = write_checkpoint(tmp_path, case).double()
    llm = LLM(tmp_path, device="cpu", dtype="float64", num_blocks=8, max_num_seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1)
    with llm as same:
        assert same is llm
        [output] = llm.generate({"prompt_token_ids": PROMPT}, params)
        with pytest.raises(TypeError, match="prompt must be one to stream, got list"):
            llm.stream([{"prompt_token_ids": PROMPT}] * 2)
    with pytest.raises(EngineClosedError):
        llm.generate({"prompt_token_ids": PROMPT}, params)
    assert output.outputs[0].token_ids == greedy_tokens(peer, PROMPT, 12)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs must be at least 1, got 0"),
        ({"long_prefill_token_threshold": 0}, ValueError, "long_prefill_token_threshold must be"),
        ({"enable_prefix_caching": "no"}, TypeError, "enable_prefix_caching must be True or False"),
        ({"batch_invariant": "x"}, TypeError, "batch_invariant must be True, False or None"),
    ],
)
def test_settings_are_refused_by_their_own_names_before_a_model_is_read(settings, error, message):
    with pytest.raises(error, match=message):
        LLM("no/such/model", device="cpu", **settings)


def test_prompts_of_odd_forms_are_refused():
    both = {"prompt": "the", "prompt_token_ids": PROMPT}
    assert token_ids(both, None) == ("the", PROMPT, [])
    typed = both | {"token_type_ids": [0, 0, 1, 1]}
    assert token_ids(typed, None) == ("the", PROMPT, [0, 0, 1, 1])
    with pytest.raises(RequestError, match="no keys but .* got 'multi_modal_data'"):
        token_ids({"prompt_token_ids": PROMPT, "multi_modal_data": {}}, None)
    for value in ({"max_tokens": 3}, "the", b"the"):
        with pytest.raises(TypeError, match="sampling_params must be one or a list of them"):
            listed("sampling_params", value)


def test_a_token_beyond_the_vocabulary_is_refused_where_it_is_asked_for(tmp_path):
    """Files often declare a padding token for which the model has no row."""
    pytest.importorskip("llguidance")
    shutil.copytree(packaged_model(), tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    names = {"pad_token": "[PAD]", "eos_token": "[END]"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **names}))
    with LLM(tmp_path, device="cpu", num_blocks=8, max_num_seqs=1) as llm:
        assert llm.tokenizer.eos_token_id == llm.config.vocab_size == llm.tokenizer.num_ids - 2
        params = SamplingParams(max_tokens=8, structured=StructuredOutputs(choice=("yes", "no")))
        [output] = llm.generate("Once", params)
        assert output.outputs[0].text in ("yes", "no")
        with pytest.raises(RequestError, match="must be below vocab_size 4096, got 4096"):
            llm.generate("Once [END]")


def test_a_tokenizer_that_cannot_be_read_is_refused_before_the_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"\n")
    with pytest.raises(CheckpointError, match="must hold tokenizer.json, got tokenizer.model"):
        LLM(tmp_path, device="cpu")


@pytest.mark.parametrize("named", ["module", "hub"])
def test_a_checkpoint_runs_nothing_that_it_names(tmp_path, monkeypatch, named):
    """Fields by which a library imports modules of the folder, or fetches kernels of a hub."""
    write_checkpoint(tmp_path, "llama")
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'ran')!r}).touch()"
    for name in ("evil", "modeling_evil", "tokenization_evil", "configuration_evil", "conftest"):
        (tmp_path / f"{name}.py").write_text(code)
    where = {"module": "", "hub": "someone/kernels--"}[named]
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {
        "auto_map": {
            "AutoConfig": f"{where}configuration_evil.Config",
            "AutoModelForCausalLM": f"{where}modeling_evil.Model",
            "AutoTokenizer": [f"{where}tokenization_evil.Tokenizer", None],
        },
        "_attn_implementation": "someone/kernels:evil",
        "_attn_implementation_internal": "someone/kernels:evil",
        "attn_implementation": "someone/kernels:evil",
        "custom_pipelines": {"x": {"impl": "evil.Pipeline"}},
        "trust_remote_code": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": config["auto_map"]}))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"custom_generate": "evil", "auto_map": config["auto_map"]})
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", None)
    known = set(sys.modules)
    # A config that says what is not understood may be refused; it is not followed.
    with suppress(CheckpointError, UnsupportedError):
        load_model(tmp_path)
        load_tokenizer(tmp_path)
        pytest.importorskip("tilewise.server.chat").read_template(tmp_path, None)
    assert not (tmp_path / "ran").exists()
    assert not {name for name in set(sys.modules) - known if "evil" in name}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_stretched_context_is_used_beyond_the_files_positions(tmp_path, device):
    """On a GPU positions are looked up in a table whose end nothing checks."""
    peer = write_checkpoint(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 64}
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    peer = type(peer).from_pretrained(tmp_path, dtype=torch.float32).eval()
    prompt = [7 + i * i % 280 for i in range(200)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(tmp_path, device=device, dtype="float32", num_blocks=32, max_num_seqs=2) as llm:
        assert llm.engine.scheduler.limits.max_model_len == 256
        [output] = llm.generate({"prompt_token_ids": prompt}, params)
    assert output.outputs[0].token_ids == greedy_tokens(peer, prompt, 12)
