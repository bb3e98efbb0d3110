"""Files of kernels: compiled for a GPU that is not here, taken, and then found in the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("triton")
import torch
import triton

from tilewise.cli import main
from tilewise.kernels.host import first_run, kernel_file
from tilewise.kernels.host.requests import Request
from tilewise.version import __version__

_ROOT = Path(__file__).parents[2]
_HASH = "0123456789abcdef" * 4
# One op on a GPU that is not here: what it launches is compiled, or found, for sm_89.
_CALL = """
import sys
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from tilewise.ops import absent_gpu, compile_ahead, rms_norm
from tilewise.kernels.host.compile_worker import _compile
from tilewise.kernels.host.requests import kernel_of, work_of
if sys.argv[1] == "take":
    taken = compile_ahead.take(Path(sys.argv[2]))
    print(taken.num_taken, taken.num_there, taken.manifest.arch)
with absent_gpu.stand_in(GPUTarget("cuda", 89, 32), 128):
    with compile_ahead.noted_launches(lambda _: None) as found:
        x = torch.empty(4, 64, dtype=torch.bfloat16, device="cuda:0")
        y = rms_norm(x, x[0], eps=1e-6)
        assert y.device == x.device and y.shape == x.shape and y.is_cuda
(request,) = found.values()
print(request.is_on_disk)
_compile(request)
if sys.argv[1] == "make":
    manifest = compile_ahead.pack(Path(sys.argv[2]), [request], arch=89, about="a norm")
    print(*manifest.kernels.values())
"""


def _run(task, file, cache):
    done = subprocess.run(
        [sys.executable, "-c", _CALL, task, str(file)], cwd=_ROOT, capture_output=True, text=True,
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.timeout(300)
def test_a_kernel_that_another_machine_compiled_is_found_and_told(tmp_path):
    file = tmp_path / "kernels.zip"
    made = _run("make", file, tmp_path / "there")
    assert made.stdout.split() == ["False", "_norm_kernel"]
    assert made.stderr == ""
    taken = _run("take", file, tmp_path / "here")
    assert taken.stdout.split() == ["1", "0", "89", "True"]
    folders = [path for path in (tmp_path / "here").iterdir() if path.name != first_run.STAMPS]
    assert len(folders) == 1
    suffixes = sorted(path.suffix for path in folders[0].iterdir())
    assert suffixes == [".cubin", ".json", ".json", ".ptx"]
    want = "tilewise: 1 of 1 precompiled kernels were used, 0 were compiled anew\n"
    assert taken.stderr == want
    assert _run("call", file, tmp_path / "here").stderr == ""  # of the first run alone


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _file(path, *, entries=None, without=(), **changes):
    """Write a file of one kernel that is whole but for these changes."""
    manifest = {
        "tilewise": __version__, "torch": torch.__version__, "triton": triton.__version__,
        "arch": 89, "about": "a test", "kernels": {_HASH: "_kernel"}, "form": 1,
    } | changes  # fmt: skip
    if entries is None:
        entries = {f"{_HASH}/_kernel.json": "{}", f"{_HASH}/_kernel.cubin": "code"}
    with zipfile.ZipFile(path, "w") as file:
        if "manifest" not in without:
            file.writestr("manifest.json", json.dumps(manifest))
        for name, text in entries.items():
            file.writestr(name, text)
    return path


def test_the_command_takes_a_file_and_counts_its_kernels(cache, tmp_path, capsys):
    file = _file(tmp_path / "k.zip")
    for taken, there in ((1, 0), (0, 1)):
        assert main(["precompile", "--from", str(file)]) == 0
        said = f"{taken} kernels taken for sm89 (a test), {there} were there; the next run says"
        assert capsys.readouterr().out.startswith(said)
    assert [p.read_text() for p in cache.glob("*/_kernel.cubin")] == ["code"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"triton": "2.0.0"}, r"FILE must be of Triton .*, which is installed here, got 2\.0\.0"),
        ({"tilewise": "0.0.1"}, r"FILE must be of tilewise .*, got 0\.0\.1"),
        ({"form": 2}, "FILE must have layout 1, got 2"),
        ({"arch": "89"}, "FILE must be a file of kernels"),
        ({"kernels": [_HASH]}, "FILE must be a file of kernels"),
        ({"more": 1}, "FILE must be a file of kernels"),
        ({"without": ["manifest"]}, "FILE must be a file of kernels"),
        ({"entries": {}}, "FILE must have all 1 kernels of its manifest, got 0"),
        ({"entries": {f"{_HASH}/_kernel.cubin": ""}}, "one .json each"),
        ({"entries": {f"{_HASH}/../../x.json": ""}}, "entries of FILE must be files of its"),
        ({"entries": {"/tmp/x.json": ""}}, "entries of FILE must be files of its"),
        ({"entries": {f"{_HASH}/launcher.so": ""}}, "entries of FILE must be files of its"),
        ({"entries": {f"{_HASH}/__grp__k.json/x.json": ""}}, "entries of FILE must be files"),
        ({"entries": {f"{_HASH[::-1]}/_kernel.json": ""}}, "entries of FILE must be files of its"),
    ],
)
def test_a_file_that_is_none_or_another_machines_leaves_nothing(cache, tmp_path, changes, message):
    file = _file(tmp_path / "k.zip", **changes)
    with pytest.raises(ValueError, match=message):
        kernel_file.unpack(file, arch=None)
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_file_for_another_gpu_is_refused(cache, tmp_path):
    file = _file(tmp_path / "k.zip")
    with pytest.raises(ValueError, match="FILE must be for sm90, the GPU here, got sm89"):
        kernel_file.unpack(file, arch=90)
    assert kernel_file.unpack(file, arch=89).num_taken == 1


def test_a_cut_file_is_refused(cache, tmp_path):
    file = _file(tmp_path / "k.zip")
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(ValueError, match="FILE must be a whole file of kernels"):
        kernel_file.unpack(file, arch=None)


def test_kernels_that_nobody_compiled_make_no_file(cache, tmp_path):
    request = Request("module", "_kernel", _HASH, "_kernel", b"")
    with pytest.raises(ValueError, match="must have been compiled"):
        kernel_file.pack(tmp_path / "k.zip", [request], arch=89, about="a test")
    assert not (tmp_path / "k.zip").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--arch", "sm89"], "--arch and --to must come together"),
        (["--from", "a", "--to", "b"], "--from must come without --arch and --to"),
        (["--model", "story"], "--model must come with --arch and --to"),
        (["--arch", "ada", "--to", "x"], "arch must be a name such as sm89, got 'ada'"),
        (["--arch", "sm70", "--to", "x"], "arch must be one of sm80, "),
        (["--arch", "sm89", "--to", "x", "--sm-count", "0"], "must be at least 1, got 0"),
        (["--from", "no-such-file"], "no-such-file: No such file"),
    ],
)
def test_wrong_commands_are_refused_in_one_sentence(cache, capsys, line, message):
    assert main(["precompile", *line]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
