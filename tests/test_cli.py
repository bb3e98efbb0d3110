"""The command line: text on stdout, one line about it on stderr, exit codes for scripts."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import tilewise
from tests import warm
from tests.engine.checkpoint import write_checkpoint
from tilewise.cli import main
from tilewise.engine.llm import LLM

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, "llama")
    LLM(directory, device="cpu", num_blocks=8)  # on a cold machine commands say that they compile
    return str(directory)


def generate(model, *arguments):
    return main(["generate", "--model", model, "--device", "cpu", *arguments])


def test_one_prompt_streams_and_one_line_follows(model, capsys):
    code = generate(model, "--prompt", "the quick", "--greedy", "--max-tokens", "12")
    out, err = capsys.readouterr()
    [wanted] = LLM(model, device="cpu", num_blocks=99).generate(
        "the quick", tilewise.SamplingParams(temperature=0.0, max_tokens=12)
    )
    assert code == 0
    assert out == f"the quick{wanted.outputs[0].text}\n"
    assert err.count("\n") == 1
    assert "prefill" in err
    assert "KV blocks" in err


def test_the_prompt_may_be_left_out(model, capsys):
    generate(model, "--prompt", "the quick", "--greedy", "--max-tokens", "4", "--no-echo")
    assert not capsys.readouterr().out.startswith("the quick")


def test_prompts_come_from_files_and_standard_input(model, capsys, tmp_path, monkeypatch):
    path = tmp_path / "prompt.txt"
    path.write_text("from a file\n", encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from a pipe\n")))
    code = generate(model, "--prompt-file", str(path), "--prompt-file", "-", "--max-tokens", "2")
    out = capsys.readouterr().out
    assert code == 0
    assert "--- prompt 1/2, sample 1/1 (length) ---\nfrom a file" in out
    assert "--- prompt 2/2, sample 1/1 (length) ---\nfrom a pipe" in out


def test_a_prompt_file_may_come_from_any_editor_but_must_be_utf_8(model, capsys, tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfthe\r\nquick\r\n")
    arguments = ["--prompt-file", str(path), "--max-tokens", "2", "--json"]
    assert generate(model, *arguments) == 0
    assert json.loads(capsys.readouterr().out)["outputs"][0]["prompt"] == "the\nquick"
    path.write_bytes(b"caf\xe9")
    assert generate(model, *arguments) == 2
    wanted = f"prompt file must be UTF-8, got byte 0xe9 at offset 3 of {str(path)!r}"
    assert capsys.readouterr().err == f"tilewise: {wanted}\n"


def test_json_has_every_sample_and_the_stats(model, capsys):
    arguments = ["--prompt", "the", "--prompt", "once", "-n", "2", "--seed", "3", "--json"]
    assert generate(model, *arguments, "--max-tokens", "5", "--top-k", "9") == 0
    record = json.loads(capsys.readouterr().out)
    assert [o["prompt"] for o in record["outputs"]] == ["the", "once"]
    assert [[c["index"] for c in o["outputs"]] for o in record["outputs"]] == [[0, 1], [0, 1]]
    assert record["outputs"][0]["outputs"][0]["finish_reason"] == "length"
    assert record["stats"]["scheduler"]["blocks_peak"] > 0


def test_main_memory_files_and_an_order_may_be_asked_for(model, capsys, tmp_path):
    prompts = [part for i in range(4) for part in ("--prompt", f"{i} the quick brown fox " * 2)]
    base = [*prompts, "--greedy", "--max-tokens", "30", "--block-size", "4", "--json"]
    assert generate(model, *base) == 0
    wanted = json.loads(capsys.readouterr().out)["outputs"]
    few = ["--num-blocks", "40", "--scheduling-policy", "fair", "--victim", "cheapest"]
    memory = ["--preemption", "swap", "--swap-space", "0.001", "--offload-dir", str(tmp_path)]
    assert generate(model, *base, *few, *memory, "--offload-gib", "0.01") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["stats"]["scheduler"]["num_swapped"] > 0
    for mine, theirs in zip(record["outputs"], wanted, strict=True):
        assert mine["outputs"][0]["text"] == theirs["outputs"][0]["text"]


def test_stop_strings_are_kept_out(model, capsys):
    base = ["--prompt", "the quick", "--greedy", "--max-tokens", "12", "--no-echo"]
    generate(model, *base)
    whole = capsys.readouterr().out.removesuffix("\n")
    stop = whole[3:5]
    generate(model, *base, "--stop", stop)
    assert capsys.readouterr().out.removesuffix("\n") == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--temperature", "-1"], "--temperature must be finite and at least 0, got -1.0"),
        (["--top-p", "2"], "--top-p must be in (0, 1], got 2.0"),
        (["--num-blocks", "1"], "prompt and --max-tokens must be at most 17 tokens together"),
        (["--kv-cache-dtype", "int3"], "--kv-cache-dtype must be auto"),
        (["--num-blocks", str(10**12)], "--num-blocks must fit the memory of cpu at"),
        (["--prompt-file", "no/such/file"], "no such file or directory: 'no/such/file'"),
        (["--prompt-file", "."], "prompt file must be readable, got is a directory: '.'"),
        (["--model", "no/such/model"], "no/such/model"),
        (["--model", "Qwen/Qwen3-0.6B"], "must be in the cache where HF_HUB_OFFLINE is set"),
        (["--model", ""], "--model must be a directory, a hub name or 'story', got ''"),
    ],
)
def test_wrong_requests_are_one_sentence_and_exit_2(model, capsys, arguments, sentence):
    assert generate(model, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("tilewise: ")
    assert sentence in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "serve", "explain cache story"])
def test_unknown_options_exit_2_with_the_usage_of_their_command(capsys, command):
    words = command.split()
    with pytest.raises(SystemExit) as caught:
        main([*words, "--tmperature", "1"])
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"usage: tilewise {' '.join(words[:2])} [-h]")
    assert "--tmperature" in err
    assert ("did you mean --temperature?" in err) == (command == "generate")


@pytest.mark.parametrize(
    ("words", "right"),
    [
        ("chat --max-token-s 3", "--max-tokens"),
        ("deploy --replcas 3", "--replicas"),
        ("deploy --max-modl-len 3", "--max-model-len"),
        ("explain attention --shape 1,4,4,2,2,8 --casual", "--causal"),
        ("precompile --head-dim-s 3", "--head-dims"),
        ("bench ops --seqlen-s 4", "--seqlens"),
        ("bench waste --request 4 --slotz 3", "--slots"),
        ("simulate --allocater 4", "--allocators"),
    ],
)
def test_every_command_names_the_option_that_is_like_an_unknown_one(capsys, words, right):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    assert f"did you mean {right}?" in capsys.readouterr().err


def test_a_word_that_nothing_takes_says_what_takes_it(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "story"])
    said = capsys.readouterr().err
    assert "nothing is expected here, got story; --model gives a model, --prompt a text" in said


@pytest.mark.parametrize("command", ["serve", "deploy", "explain cache"])
def test_a_model_may_stand_alone_or_with_its_flag_but_not_two(
    capsys, monkeypatch, tmp_path, command
):
    seen = []
    for module, name in (
        ("tilewise.server.command", "serve"),
        ("tilewise.cluster.command", "deploy"),
    ):
        fake = types.ModuleType(module)
        setattr(fake, name, lambda model, given: seen.append(model) or "model" in given)
        monkeypatch.setitem(sys.modules, module, fake)
    monkeypatch.setattr(
        "tilewise.engine.console.explain_cache", lambda model, *_: seen.append(model)
    )
    for arguments in ([], ["a"], ["--model", "b"], ["c", "--model", "c"], ["--model=d", "d"]):
        assert main([*command.split(), *arguments]) == 0
    assert seen == ["story", "a", "b", "c", "d"]
    assert main([*command.split(), "a", "--model", "b"]) == 2
    assert "--model must be the model that stands alone, 'a', got 'b'" in capsys.readouterr().err
    if command == "serve":
        (tmp_path / "serve.toml").write_text('model = "of-a-file"\n')
        assert main(["serve", "--config", str(tmp_path / "serve.toml")]) == 0
        monkeypatch.setenv("TILEWISE_MODEL", "of-a-variable")
        assert main(["serve"]) == 0
        assert seen[5:] == ["of-a-file", "of-a-variable"]


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("", "http://127.0.0.1:8000"),
        ("http://there:9", "http://there:9"),
        ("there:9", "http://there:9"),
        ("--url https://there/v1", "https://there/v1"),
        ("--port 9", "http://127.0.0.1:9"),
        ("127.0.0.1:9 --port 9 --url http://127.0.0.1:9", "http://127.0.0.1:9"),
    ],
)
def test_a_chat_finds_its_server_by_address_flag_or_port(monkeypatch, words, url):
    seen = []
    monkeypatch.setattr("tilewise.server.terminal.chat", lambda *given: seen.append(given) or 0)
    assert main(["chat", *words.split()]) == 0
    assert seen == [(url, None, {})]


def test_a_chat_has_one_server(capsys):
    assert main(["chat", "there", "--port", "9"]) == 2
    said = "--url must be one address, got http://127.0.0.1:9 and http://there"
    assert said in capsys.readouterr().err


def test_failures_exit_1_and_debug_shows_where(model, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("tilewise.engine.console.generate", fail)
    assert generate(model) == 1
    assert capsys.readouterr().err == "tilewise: out of luck (--debug shows where)\n"
    with pytest.raises(RuntimeError, match="out of luck"):
        generate(model, "--debug")


def test_an_interrupt_exits_130_quietly(model, capsys, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("tilewise.engine.console.generate", interrupt)
    assert generate(model) == 130
    assert capsys.readouterr() == ("", "")


def test_the_default_is_a_story_from_the_packaged_model(monkeypatch):
    calls = []
    monkeypatch.setattr("tilewise.engine.console.generate", lambda *a, **k: calls.append((a, k)))
    assert main(["generate"]) == 0
    [((model, prompts, params), settings)] = calls
    assert (model, prompts) == ("story", ["Once upon a time"])
    assert (params.max_tokens, params.temperature, params.n) == (200, 0.8, 1)
    assert settings["num_blocks"] is None


def test_bench_hands_its_options_on(monkeypatch):
    seen = []
    for name in ("ops", "engine"):
        module = types.ModuleType(f"tilewise.bench.{name}")
        module.main = lambda rest, name=name: seen.append((name, rest)) or 3
        monkeypatch.setitem(sys.modules, f"tilewise.bench.{name}", module)
    assert main(["bench", "ops", "--device", "cpu"]) == 3
    assert main(["bench", "engine"]) == 3
    assert seen == [("ops", ["--device", "cpu"]), ("engine", [])]


def test_explain_attention_prints_backend_and_cost(capsys):
    assert main(["explain", "attention", "--shape", "1,64,64,4,2,32", "--causal"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("attention: cpu")
    assert "FLOPs" in out
    assert main(["explain", "attention", "--shape", "1,64,64,4,3,32"]) == 2
    with pytest.raises(SystemExit):
        main(["explain", "attention", "--shape", "1,64"])
    assert "must be six sizes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--shape", "1,64,64,4,2,32", "--device", "gpu"],
            "--device must be cpu or cuda, got 'gpu'",
        ),
        (["--shape", "1,64,64,4,2,32", "--device", "cuda:99"], "--device must be one of"),
        (["--shape", "9,9999999,9999999,4,2,9999999"], "--shape must be of at most 2**48 elements"),
    ],
)
def test_explain_attention_refuses_in_one_sentence(capsys, arguments, sentence):
    assert main(["explain", "attention", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert sentence in err


def test_explain_cache_reads_the_configuration_only(model, capsys, tmp_path):
    (tmp_path / "config.json").write_text((Path(model) / "config.json").read_text())
    assert main(["explain", "cache", str(tmp_path), "--dtype", "bfloat16"]) == 0
    assert "128 B = 2 layers x 2 heads x (8 + 8) channels x 2 bytes" in capsys.readouterr().out
    assert main(["explain", "cache", str(tmp_path), "--dtype", "fp8_e4m3"]) == 0
    assert "96 B = 2 layers x 2 heads x ((8 + 8) channels x 1 byte + 8 of scales)" in (
        capsys.readouterr().out
    )


def test_help_has_examples_and_version_is_printed(capsys):
    for arguments, text in ((["--help"], "examples:"), (["--version"], tilewise.__version__)):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert text in capsys.readouterr().out


def test_help_shows_several_defaults_as_they_are_typed(capsys):
    with pytest.raises(SystemExit):
        main(["precompile", "--help"])
    assert "(default: 64 128 256)" in " ".join(capsys.readouterr().out.split())


def test_a_trace_that_is_not_there_or_empty_is_named(tmp_path, capsys):
    trace = tmp_path / "t.jsonl"
    assert main(["replay", str(trace)]) == 2
    assert capsys.readouterr().err == f"tilewise: {trace}: No such file or directory\n"
    trace.touch()
    assert main(["replay", str(trace)]) == 2
    assert f"{trace} must hold one event a line, got an empty file" in capsys.readouterr().err


def test_a_terminal_of_another_encoding_shows_what_it_can(model, monkeypatch):
    prompt, written = "caf\N{LATIN SMALL LETTER E WITH ACUTE} the", io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert generate(model, "--prompt", prompt, "--max-tokens", "4") == 0
    assert written.getvalue()[:8] == b"caf? the"


def test_json_is_ascii_for_a_terminal_of_any_encoding(model, monkeypatch):
    prompt, written = "caf\N{LATIN SMALL LETTER E WITH ACUTE}", io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    assert generate(model, "--prompt", prompt, "--max-tokens", "4", "--json") == 0
    assert json.loads(written.getvalue().decode("ascii"))["outputs"][0]["prompt"] == prompt


@pytest.mark.parametrize(
    ("name", "arguments", "code", "sentence"),
    [
        ("stdin", ["--prompt-file", "-"], 2, "standard input must be open for prompt file '-'"),
        ("stdout", ["--prompt", "the"], 0, "prefill"),
        ("stderr", ["--prompt", "the"], 0, ""),
        ("stderr", ["--prompt", "the", "--prompt", "once"], 0, ""),
        ("stderr", ["--prompt", ""], 2, ""),
    ],
)
def test_a_standard_stream_may_be_missing(
    model, capsys, monkeypatch, name, arguments, code, sentence
):
    monkeypatch.setattr(sys, name, None)
    assert generate(model, *arguments, "--max-tokens", "2") == code
    out, err = capsys.readouterr()
    assert sentence in err
    assert not any(word in out for word in ("prefill", "tilewise:"))


def test_a_process_ends_without_looking_for_garbage():
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count() > 0))\n"
        "from tilewise.cli import main; main(['simulate', '--requests', '2'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("True\n")


def _start(model, popen=subprocess.Popen):
    arguments = ["--model", model, "--device", "cpu", "--ignore-eos", "--max-tokens", "240"]
    return popen(
        [sys.executable, "-m", "tilewise", "generate", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_a_reader_that_goes_away_is_no_error(model):
    with _start(model) as process:
        process.stdout.close()  # before the first word: later ones all fit into the pipe
        process.wait(timeout=60)
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_control_c_ends_a_stream_quietly(model):
    with _start(model, warm.Popen) as process:
        assert process.stdout.read(1) == b"O"
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        assert process.stderr.read() == b""
    assert process.returncode == 130


def test_a_trace_that_cannot_be_written_is_told_before_a_model_is_read(tmp_path, capsys):
    trace = tmp_path / "nowhere" / "trace.jsonl"
    assert main(["generate", "--model", "no/such/model", "--trace", str(trace)]) == 2
    assert "trace.jsonl" in capsys.readouterr().err
