"""Weights changed over HTTP by administrators, and an engine that sleeps."""

from __future__ import annotations

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import warm
from tests.server.serving import serving
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM, packaged_model
from tilewise.errors import EngineClosedError
from tilewise.server.engine_process import remote as process_remote
from tilewise.server.engine_process.remote import RemoteEngine
from tilewise.server.keys import Caller, hash_of
from tilewise.server.weights import weights_router

SETTINGS = {"device": "cpu", "dtype": "float32", "num_blocks": 64}
ASK = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "model": "story"}
KEYS = {hash_of("a" * 20): Caller("user"), hash_of("b" * 20): Caller("boss", admin=True)}


def routers(service):
    return [weights_router(service)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Other weights of the story model, in a checkpoint's folder."""
    root = tmp_path_factory.mktemp("changed")
    generator = torch.Generator().manual_seed(2)
    [file] = packaged_model().glob("*.safetensors")
    tensors = {
        name: tensor.float() + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    (root / "config.json").write_text((packaged_model() / "config.json").read_text())
    return root


@pytest.fixture(scope="module", params=["in_process", "apart"])
def running(request):
    if request.param == "apart":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process_remote, "subprocess", warm)
            engine = RemoteEngine("story", SETTINGS)
            with serving(engine, routers=routers, keys=KEYS, changes_weights=True) as running:
                yield running
            engine.close(2.0)
    else:
        with LLM("story", **SETTINGS) as llm:
            engine = AsyncLLM(llm)
            with serving(
                engine, loop=llm.loop, routers=routers, keys=KEYS, changes_weights=True
            ) as running:
                yield running


def post(running, path, body, key="b" * 20):
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{running.url}{path}", json=body, timeout=60, headers=headers)


def text(running):
    answer = post(running, "/v1/completions", ASK, "a" * 20)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_weights_are_changed_by_administrators(running, folder):
    before = text(running)
    refused = post(running, "/update_weights", {"path": str(folder)}, "a" * 20)
    assert refused.status_code == 403
    assert text(running) == before
    done = post(running, "/update_weights", {"path": str(folder), "running": "keep"})
    assert done.json() == {"updated": True}
    assert text(running) != before
    assert post(running, "/update_weights", {"path": "story"}).status_code == 200
    assert text(running) == before


def test_a_folder_that_is_none_is_refused_and_the_old_weights_serve_on(running):
    before = text(running)
    refused = post(running, "/update_weights", {"path": "/nowhere/at/all"})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "path"
    for body in ({"path": ""}, {"path": "story", "running": "soon"}, {}):
        assert post(running, "/update_weights", body).status_code == 400
    assert text(running) == before


def test_an_engine_sleeps_and_wakes(running):
    before = text(running)
    assert post(running, "/wake_up", {}).status_code == 409
    assert post(running, "/sleep", {"level": 3}).status_code == 400
    assert post(running, "/sleep", {"level": 2}).json() == {"asleep": True}
    refused = post(running, "/v1/completions", ASK, "a" * 20)
    assert refused.status_code == 400
    assert "awake" in refused.json()["error"]["message"]
    assert post(running, "/wake_up", {}).json() == {"asleep": False}
    assert text(running) == before


def test_it_is_off_by_default():
    with serving(routers=routers) as running:
        for path, body in (
            ("/update_weights", {"path": "story"}),
            ("/sleep", {}),
            ("/wake_up", {}),
        ):
            refused = httpx.post(f"{running.url}{path}", json=body, timeout=60)
            assert refused.status_code == 403
            assert "--enable-weight-updates" in refused.json()["error"]["message"]


def test_an_engine_that_has_ended_is_no_conflict(monkeypatch):
    def ended(*_, **__):
        raise EngineClosedError("the engine has ended")

    with LLM("story", **SETTINGS) as llm:
        for name in ("sleep", "wake"):
            monkeypatch.setattr(llm, name, ended)
        with serving(
            AsyncLLM(llm), loop=llm.loop, routers=routers, keys=KEYS, changes_weights=True
        ) as running:
            for path in ("/sleep", "/wake_up"):
                response = post(running, path, {})
                assert (response.status_code, "ended" in response.text) == (503, True)
