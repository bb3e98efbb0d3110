"""The command line with workers: the text of one process; a server whose worker is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.engine.tensor_parallel.conftest import exists
from tilewise import cli
from tilewise.engine.tensor_parallel import processes

ROOT = Path(__file__).resolve().parents[3]


def _started(*arguments: object, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "tilewise", *map(str, arguments)],
        cwd=ROOT, text=True, stderr=subprocess.PIPE, **options,
    )  # fmt: skip


def _workers_of(pid: int) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid and processes.WORKER in (folder / "cmdline").read_text().split("\0"):
                found.append(int(folder.name))
        except (OSError, IndexError):
            continue
    return sorted(found)


@pytest.mark.timeout(600)
def test_generate_gives_the_text_of_one_process(checkpoint, capsys):
    texts = []
    for size in (1, 2):
        arguments = [
            "generate", "--model", checkpoint, "--tensor-parallel-size", size, "--device", "cpu",
            "--dtype", "float32", "--greedy", "--ignore-eos", "--max-tokens", 12, "--prompt",
            "the dog", "--prompt", "a", "--json",
        ]  # fmt: skip
        code = cli.main(list(map(str, arguments)))
        out, said = capsys.readouterr()
        assert code == 0, said
        texts.append([output["outputs"] for output in json.loads(out)["outputs"]])
    assert texts[0] == texts[1]
    assert [len(sample["token_ids"]) for [sample] in texts[0]] == [12, 12]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "must divide the model's num_q_heads 8, got 3"),
        (0, "--tensor-parallel-size must be at least 1, got 0"),
    ],
)
def test_a_size_that_cannot_be_is_one_sentence(checkpoint, size, message):
    with _started(
        "generate", "--model", checkpoint, "--tensor-parallel-size", size, "--device", "cpu"
    ) as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 2
    assert message in said
    assert "Traceback" not in said


@pytest.mark.timeout(600)
def test_a_server_whose_worker_is_killed_says_so_and_ends_with_exit_code_1(checkpoint, tmp_path):
    folder, told = tmp_path / "temporary", tmp_path / "stderr"
    folder.mkdir()
    with told.open("w") as stderr, subprocess.Popen(
        [
            sys.executable, "-m", "tilewise", "serve", str(checkpoint), "--tensor-parallel-size",
            "2", "--device", "cpu", "--port", "0", "--num-blocks", "64", "--max-model-len", "128",
        ],
        cwd=ROOT, stderr=stderr, env=os.environ | {"TMPDIR": str(folder)},
    ) as process:  # fmt: skip
        while (found := re.search(r"serving \S+ at (\S+)", told.read_text())) is None:
            assert process.poll() is None, told.read_text()
            time.sleep(0.1)
        workers = _workers_of(process.pid)
        assert len(workers) == 2
        body = {"prompt": "the dog", "max_tokens": 100, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(f"{found[1]}/v1/completions", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=60) as stream:
            assert stream.readline().startswith(b"data: ")
            killed = time.monotonic()
            os.kill(workers[1], signal.SIGKILL)
            rest = stream.read()
        assert b"ended by SIGKILL" in rest
        assert b"[DONE]" not in rest
        assert process.wait(30) == 1
        assert time.monotonic() - killed < 20
    assert "worker 1 of 2 ended by SIGKILL" in told.read_text()
    assert not any(map(exists, workers))
    assert not list(folder.glob("tilewise-*"))
