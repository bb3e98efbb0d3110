"""A model by its name on a hub: on the loopback, in the cache, and what goes wrong."""

import errno
import hashlib
import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load

import tilewise
from tilewise import SamplingParams
from tilewise.engine.settings import model_directory
from tilewise.errors import CheckpointError
from tilewise.models import load_model
from tilewise.models.hub import (
    ADAPTER_FILES,
    HubName,
    _bars,
    adapter_folder,
    checkpoint_folder,
    fetch,
    hub_name,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"
STORY = Path(tilewise.__file__).parent / "assets" / "story"


class Hub:
    """A hub of one model, "owner/model", on the loopback.

    Attributes:
        files: the contents of its files by name.
        asked: the files that were asked for.
        error: the status and the error code of every answer, or None.
        cut: the bytes after which each file's transfer breaks off, or None.
    """

    def __init__(self) -> None:
        self.files = {x.name: x.read_bytes() for x in STORY.iterdir() if x.is_file()}
        self.files |= {"pytorch_model.bin": b"pickle", "modeling_own.py": b"raise SystemExit"}
        self.asked: list[str] = []
        self.error: tuple[int, str] | None = None
        self.cut: int | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(sends=False)

            def do_GET(self) -> None:
                self.answer(sends=True)

            def answer(self, *, sends: bool) -> None:
                parts = self.path.split("?")[0].strip("/").split("/")
                if hub.error is not None:
                    self.reply(b"", hub.error[0], {"X-Error-Code": hub.error[1]}, sends)
                elif parts[:2] == ["api", "models"]:
                    self.describe(parts[2:], sends)
                elif parts[:2] != ["owner", "model"]:
                    self.reply(b"", 404, {"X-Error-Code": "RepoNotFound"}, sends)
                else:
                    self.give("/".join(parts[4:]), sends)

            def describe(self, parts: list[str], sends: bool) -> None:
                if parts[:2] != ["owner", "model"]:
                    self.reply(b"", 404, {"X-Error-Code": "RepoNotFound"}, sends)
                elif len(parts) > 3 and parts[3] not in ("main", "v1", COMMIT):
                    self.reply(b"", 404, {"X-Error-Code": "RevisionNotFound"}, sends)
                elif parts[2:3] == ["tree"]:
                    files = [
                        {
                            "type": "file",
                            "path": x,
                            "size": len(y),
                            "oid": hashlib.sha1(y).hexdigest(),
                        }
                        for x, y in hub.files.items()
                    ]
                    self.reply(json.dumps(files).encode(), 200, {}, sends)
                else:
                    files = [{"rfilename": x, "size": len(y)} for x, y in hub.files.items()]
                    told = {"id": "owner/model", "sha": COMMIT, "siblings": files}
                    self.reply(json.dumps(told).encode(), 200, {}, sends)

            def give(self, file: str, sends: bool) -> None:
                if file not in hub.files:
                    self.reply(b"", 404, {"X-Error-Code": "EntryNotFound"}, sends)
                    return
                if sends:
                    hub.asked.append(file)
                body = hub.files[file]
                tag = {"ETag": f'"{hashlib.sha256(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
                begin = int(self.headers.get("Range", "bytes=0-")[6:].split("-")[0])
                if begin:
                    tag["Content-Range"] = f"bytes {begin}-{len(body) - 1}/{len(body)}"
                self.reply(body[begin:], 206 if begin else 200, tag, sends)

            def reply(self, body: bytes, status: int, headers: dict[str, str], sends: bool) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if sends:
                    self.wfile.write(body if hub.cut is None else body[: hub.cut])
                    self.close_connection = hub.cut is not None

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub, and an empty cache and current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    found = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", found.address)
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        found.address + "/{repo_id}/resolve/{revision}/{filename}",
    )
    yield found
    found.close()


def test_a_model_is_downloaded_once_and_answers_as_its_folder(hub):
    options = {"device": "cpu", "num_blocks": 32}
    params = SamplingParams(max_tokens=8, temperature=0.0)
    with tilewise.LLM("owner/model", **options) as llm:
        text = llm.generate("Once", params)[0].outputs[0].text
    with tilewise.LLM(STORY, **options) as llm:
        assert llm.generate("Once", params)[0].outputs[0].text == text
    assert "pytorch_model.bin" not in hub.asked
    assert "modeling_own.py" not in hub.asked
    assert sorted(hub.asked) == sorted({*hub.asked})
    count = len(hub.asked)
    hub.error = (500, "")  # a whole copy asks nothing
    assert (fetch(HubName("owner/model", None)) / "config.json").is_file()
    assert len(hub.asked) == count


def test_of_an_adapter_its_two_files_are_downloaded_once(hub):
    with pytest.raises(CheckpointError, match="adapter 'owner/model' must hold adapter_con"):
        adapter_folder("owner/model")
    hub.files |= {file: file.encode() for file in ADAPTER_FILES}
    folder = adapter_folder("owner/model")
    assert sorted(x.name for x in folder.iterdir()) == sorted(ADAPTER_FILES)
    assert sorted(hub.asked) == sorted(ADAPTER_FILES)
    hub.error = (500, "")  # a whole copy asks nothing
    assert adapter_folder("owner/model") == folder
    assert adapter_folder(folder) == folder


def test_a_revision_is_a_copy_of_its_own_name(hub):
    assert hub_name("owner/model@v1") == HubName("owner/model", "v1")
    assert (checkpoint_folder("owner/model@v1") / "config.json").is_file()
    with pytest.raises(CheckpointError, match="must name a branch, tag or commit of 'owner/model'"):
        checkpoint_folder("owner/model@v2")


def test_a_download_that_breaks_off_goes_on_later(hub):
    hub.cut = 1000
    with pytest.raises(CheckpointError, match="not downloaded .*; what has come is kept"):
        fetch(HubName("owner/model", None))
    hub.cut = None
    folder = fetch(HubName("owner/model", None))
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]


def test_a_copy_without_its_weights_is_made_whole(hub):
    folder = fetch(HubName("owner/model", None))
    (folder / "model.safetensors").unlink()
    assert (fetch(HubName("owner/model", None)) / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        (403, "GatedRepo", "needs permission: accept its terms at .*/owner/model, then set HF_TOK"),
        (
            404,
            "RepoNotFound",
            "must be a folder or a model of the hub, got neither: .* or it is pri",
        ),
        (401, "RepoNotFound", "must be a folder or a model of the hub, got neither"),
        (503, "", "is no folder here, and was not downloaded from .*503"),
    ],
)
def test_what_a_hub_refuses_is_one_sentence(hub, monkeypatch, status, code, sentence):
    hub.error = (status, code)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        model_directory("owner/model")
    assert "\n" not in str(caught.value)


def test_a_hub_that_cannot_be_reached(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(CheckpointError, match="was not downloaded from http://127.0.0.1:1: "):
        fetch(HubName("owner/model", None))


def test_offline_only_the_cache_is_looked_at(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="in the cache where HF_HUB_OFFLINE is set, got none"):
        fetch(HubName("owner/model", None))
    assert hub.asked == []


def test_a_folder_of_the_same_name_comes_first(hub, tmp_path):
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert hub_name("owner/model") is None
    assert checkpoint_folder("owner/model") == Path("owner/model")


@pytest.mark.parametrize("given", ["./owner/model", "/owner/model", "model", "a/b/c", "x/y.json/"])
def test_paths_are_no_names(given):
    assert hub_name(given) is None


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (["model_index.json", "unet/x.safetensors"], "a pipeline of a diffusion model"),
        (["adapter_config.json", "adapter_model.safetensors"], r"an adapter \(LoRA\)"),
        (["config.json", "model.pt"], "pickles of other names than pytorch_model"),
        ([], "no files"),
    ],
)
def test_what_is_no_checkpoint_is_told_before_it_is_downloaded(hub, files, kind):
    hub.files = dict.fromkeys(files, b"{}")
    with pytest.raises(CheckpointError, match=f"must hold config.json and safetensors, got {kind}"):
        fetch(HubName("owner/model", None))
    assert hub.asked == []


def test_pickles_are_downloaded_where_there_is_nothing_else(hub):
    weights = [x for x in hub.files if x.endswith(".safetensors")]
    tensors = {k: v for x in weights for k, v in load(hub.files.pop(x)).items()}
    kept = io.BytesIO()
    torch.save(tensors, kept)
    hub.files |= {"pytorch_model.bin": kept.getvalue(), "training_args.bin": b"code"}
    folder = fetch(HubName("owner/model", None))
    assert "pytorch_model.bin" in hub.asked
    assert "training_args.bin" not in hub.asked
    assert load_model(folder).state_dict().keys() == load_model(STORY).state_dict().keys()


def test_a_disk_that_is_too_small_or_full(hub, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    with monkeypatch.context() as patch:
        patch.setattr("tilewise.models.hub.shutil.disk_usage", lambda _: usage)
        with pytest.raises(
            CheckpointError, match="must have .* GB free for 'owner/model', got 0.0"
        ):
            fetch(HubName("owner/model", None))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(CheckpointError, match="not downloaded: the disk of .* is full"):
        fetch(HubName("owner/model", None))


@pytest.fixture
def gguf_hub(hub, tmp_path, monkeypatch):
    """A hub of GGUF files alone, one of them in two parts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "mmproj-m-F16.gguf"]
    names += [f"big/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]
    hub.files = {name: name.encode() for name in names}
    return hub


@pytest.mark.parametrize(
    ("given", "files"),
    [
        ("owner/model:Q4_K_M", ["m-Q4_K_M.gguf"]),
        ("owner/model:q4_k_s", ["m-Q4_K_S.gguf"]),
        ("owner/model/m-Q4_K_M.gguf@v1", ["m-Q4_K_M.gguf"]),
        ("owner/model:Q8_0", [f"big/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]),
        ("owner/model/big/m-Q8_0-00001-of-00002.gguf",
         [f"big/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]),
    ],
)  # fmt: skip
def test_of_a_hub_of_gguf_files_the_one_that_is_meant_is_downloaded_once(gguf_hub, given, files):
    name = hub_name(given)
    assert name is not None
    assert str(name) == given
    for _ in range(2):
        assert fetch(name).read_bytes() == files[0].encode()
        assert sorted(gguf_hub.asked) == files


def test_several_gguf_files_are_named_and_a_missing_one_says_what_there_is(gguf_hub):
    with pytest.raises(CheckpointError, match="several GGUF files: give one of owner/model/big/"):
        fetch(HubName("owner/model", None))
    with pytest.raises(CheckpointError, match="must be a GGUF file of owner/model, got .*m-Q4_K_M"):
        fetch(HubName("owner/model", None, ":Q2_K"))
    assert gguf_hub.asked == []
    gguf_hub.files = {"only.gguf": b"GGUF"}
    assert fetch(HubName("owner/model", None)).name == "only.gguf"


def test_a_download_tells_its_bytes_and_draws_nothing(capfd):
    told = []
    bars = _bars(lambda *given: told.append(given), "downloading a/b", 2_000_000_000)
    with bars(total=3, unit="it", desc="Fetching 3 files") as files:
        files.update(1)
    assert told == []
    with bars(total=0, unit="B", unit_scale=True) as received:
        received.total = 2_000_000_000
        received.update(1_000_000_000)
        assert told[-1] == ("downloading a/b, 1.00 of 2.00 GB", 0.5)
        received.update(1_100_000_000)  # more than was announced
    assert told[-1] == ("downloading a/b, 2.00 of 2.00 GB", 1.0)
    assert capfd.readouterr() == ("", "")
