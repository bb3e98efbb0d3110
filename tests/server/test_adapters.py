"""Adapters over HTTP: named as models, loaded and unloaded by administrators."""

from __future__ import annotations

from types import SimpleNamespace

import httpx
import pytest

from tests import warm
from tests.engine.adapter_files import write_adapter
from tests.server.serving import serving
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server.adapters import adapters_router
from tilewise.server.command import Steps, checked, new_service
from tilewise.server.embeddings import embeddings_router
from tilewise.server.engine_process import remote as process_remote
from tilewise.server.engine_process.remote import RemoteEngine
from tilewise.server.keys import Caller, hash_of
from tilewise.server.routes import admin_router

SETTINGS = {"device": "cpu", "dtype": "float32", "num_blocks": 64, "enable_lora": True}
ROUTERS = (admin_router, adapters_router, embeddings_router)
ASK = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def routers(service):
    return [router(service) for router in ROUTERS]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return SimpleNamespace(
        first=write_adapter(root / "first", 1),
        second=write_adapter(root / "second", 2),
        wide=write_adapter(root / "wide", 3, rank=20),
    )


@pytest.fixture(scope="module", params=["in_process", "apart"])
def running(request, folders):
    modules = {"first": str(folders.first)}
    if request.param == "apart":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process_remote, "subprocess", warm)
            told = [f"{name}={path}" for name, path in modules.items()]
            engine = RemoteEngine("story", {**SETTINGS, "lora_modules": told})
            with serving(engine, routers=routers, adapters=modules) as running:
                yield running
            engine.close(2.0)
    else:
        with LLM("story", lora_modules=modules, **SETTINGS) as llm:
            engine = AsyncLLM(llm)
            with serving(engine, loop=llm.loop, routers=routers, adapters=modules) as running:
                yield running


def post(running, path, body, **more):
    return httpx.post(f"{running.url}{path}", json=body, timeout=60, **more)


def text(running, model, **more):
    answer = post(running, "/v1/completions", {**ASK, "model": model, **more})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["text"]


def test_the_model_of_a_request_is_an_adapter(running):
    plain, own = text(running, "story"), text(running, "first")
    assert plain != own
    chats = [
        post(
            running,
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "Tell"}], "max_tokens": 6, "model": model}
            | {"temperature": 0},
        ).json()["choices"][0]["message"]["content"]
        for model in ("story", "first", "first")
    ]
    assert chats[0] != chats[1] == chats[2]
    vectors = [
        post(running, "/v1/embeddings", {"input": "a dog", "model": model}).json()["data"][0]
        for model in ("story", "first")
    ]
    assert vectors[0] != vectors[1]


def test_adapters_are_among_the_models(running, folders):
    told = {one["id"]: one for one in httpx.get(f"{running.url}/v1/models").json()["data"]}
    assert told["first"]["parent"] == "story"
    assert told["first"]["root"] == str(folders.first)
    assert told["story"]["parent"] is None
    assert httpx.get(f"{running.url}/v1/models/first").json()["id"] == "first"


def test_an_adapter_is_loaded_and_unloaded(running, folders):
    missing = post(running, "/v1/completions", {**ASK, "model": "second"})
    assert missing.status_code == 404
    body = {"lora_name": "second", "lora_path": str(folders.second)}
    answer = post(running, "/v1/load_lora_adapter", body)
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'second' added successfully.",
    )
    second = text(running, "second")
    assert second not in (text(running, "first"), text(running, "story"))
    again = post(running, "/v1/load_lora_adapter", body)
    assert again.status_code == 400
    assert "lora_name must be of no adapter" in again.json()["error"]["message"]
    body |= {"lora_path": str(folders.first), "load_inplace": True}
    assert post(running, "/v1/load_lora_adapter", body).status_code == 200
    assert text(running, "second") == text(running, "first")
    gone = post(running, "/v1/unload_lora_adapter", {"lora_name": "second", "lora_int_id": 3})
    assert (gone.status_code, gone.text) == (
        200,
        "Success: LoRA adapter 'second' removed successfully.",
    )
    assert post(running, "/v1/completions", {**ASK, "model": "second"}).status_code == 404
    assert post(running, "/v1/unload_lora_adapter", {"lora_name": "second"}).status_code == 404


def test_what_is_wrong_is_named_and_changes_nothing(running, folders):
    before = text(running, "first")
    for body, message in (
        ({"lora_name": "", "lora_path": "x"}, "lora_name must not be empty"),
        ({"lora_name": "x", "lora_path": ""}, "lora_path must not be empty"),
        ({"lora_name": "story", "lora_path": "x"}, "lora_name must not be the model's name"),
        ({"lora_name": "x", "lora_path": str(folders.wide)}, "must have a rank of at most 16"),
        ({"lora_name": "x", "lora_path": str(folders.wide / "no")}, "adapter"),
        ({"lora_name": "x"}, "lora_path"),
    ):
        answer = post(running, "/v1/load_lora_adapter", body)
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]
    assert text(running, "first") == before
    assert httpx.get(f"{running.url}/v1/models/x").status_code == 404


def test_keys_without_administration_load_nothing(folders):
    keys = {
        hash_of("administrator"): Caller("root", admin=True),
        hash_of("any caller"): Caller("b"),
    }
    with serving(keys=keys, routers=routers) as running:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            body = {"lora_name": "a", "lora_path": str(folders.first)}
            asked = {"authorization": "Bearer any caller"}
            assert post(running, path, body, headers=asked).status_code == 403
            assert post(running, path, body).status_code == 401
            # This engine has no adapters.
            asked = {"authorization": "Bearer administrator"}
            body = body if "unload" not in path else {"lora_name": "a"}
            assert post(running, path, body, headers=asked).status_code == 501


def test_an_adapter_may_not_have_the_models_name(folders):
    options, keys = checked(
        {"enable_lora": True, "lora_modules": [f"mine={folders.first}"], "device": "cpu"}
    )
    assert options["lora_modules"] == [f"mine={folders.first}"]
    options["served_model_name"] = ["mine"]
    with pytest.raises(ValueError, match="--lora-modules must have names that the model has not"):
        new_service("story", options, keys, Steps())
