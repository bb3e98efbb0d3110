"""Replicas of the story model on a Ray cluster: routed, killed, replaced, scaled."""

from __future__ import annotations

import json
import threading
import warnings

import pytest

from tests.cluster.conftest import wait_until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what Ray's own imports warn of is Ray's
    ray = pytest.importorskip("ray")
    from ray import serve

    from tilewise.cluster.application import APP, running_replicas
    from tilewise.distributed import serve_app

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]

SETTINGS = {"block_size": 16, "num_blocks": 512, "max_num_seqs": 8, "shutdown_timeout": 60.0}
TALE = "Once upon a time a small dragon lived in a cave behind the waterfall. " * 8


def deploy(**changes):
    app = serve_app("story", num_cpus=0.5, **{"replicas": 2, **SETTINGS, **changes})
    serve.run(app, name=APP, route_prefix="/")


@pytest.fixture(scope="module")
def address(cluster):
    deploy()
    yield cluster
    serve.delete(APP)


def complete(address, prompt, tokens=8, **more):
    status, headers, body = address.post(
        "/v1/completions", prompt=prompt, max_tokens=tokens, temperature=0, **more
    )
    assert status == 200, body
    return headers["x-tilewise-replica"], json.loads(body)


def kill(name):
    """End the process of a replica at once, as a machine that fails does."""
    [actor] = [
        a for a in ray.util.list_named_actors(all_namespaces=True) if a["name"].endswith(name)
    ]
    ray.kill(ray.get_actor(actor["name"], actor["namespace"]))


def replicas_of(address):
    """Return who answers, asked by a route that asks all."""
    status, body = address.get("/v1/usage")
    assert status == 200, body
    return sorted(json.loads(body)["replicas"])


def test_an_answer_is_that_of_one_server_whoever_gives_it(address):
    from tilewise.engine.llm import LLM
    from tilewise.engine.request import SamplingParams

    llm = LLM("story", num_blocks=64)
    [want] = llm.generate(["Once upon a time"], SamplingParams(temperature=0, max_tokens=12))
    llm.close()
    wait_until(lambda: len(replicas_of(address)) == 2)
    for name in replicas_of(address):
        with_name = {"x-tilewise-replica": name}
        connection = address.connect()
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0})
        connection.request("POST", "/v1/completions", body, with_name)
        answer = connection.getresponse()
        assert answer.getheader("x-tilewise-replica") == name
        assert json.loads(answer.read())["choices"][0]["text"] == want.outputs[0].text
        connection.close()


def test_equal_beginnings_are_found_in_one_cache(address):
    places = [complete(address, TALE + f"Chapter {i}.") for i in range(4)]
    assert len({name for name, _ in places}) == 1
    cached = [told["usage"]["prompt_tokens_details"]["cached_tokens"] for _, told in places]
    assert min(cached[1:]) > 100


def test_a_stream_comes_in_parts_and_all_routes_are_there(address):
    status, headers, body = address.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "Tell me of a dragon."}],
        max_tokens=6, stream=True,
    )  # fmt: skip
    if status == 200:
        assert headers["content-type"].startswith("text/event-stream")
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        assert b"chat template" in body  # the model has none
    assert address.get("/ready")[0] == 200
    assert b'replica="' in address.get("/metrics")[1]
    status, body = address.get("/v1/models")
    assert json.loads(body)["data"][0]["id"] == "story"
    status, _, body = address.post("/v1/completions", prompt="x", max_tokens=-1)
    assert status == 400
    assert b"max_tokens must be" in body


def stream(address, found, prompt, tokens):
    """Read a stream; note the replica, the events and whether it ended as it should."""
    connection = address.connect(timeout=120)
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True}  # fmt: skip
    connection.request("POST", "/v1/completions", json.dumps(body))
    answer = connection.getresponse()
    told = {"status": answer.status, "replica": answer.getheader("x-tilewise-replica"), "lines": []}
    found.append(told)
    while line := answer.readline():
        if line.startswith(b"data: "):
            told["lines"].append(line[6:].strip())
    told["over"] = True
    connection.close()


def test_a_replica_that_is_killed_cuts_its_streams_with_an_error_and_is_replaced(address):
    wait_until(lambda: len(replicas_of(address)) == 2)
    before = set(replicas_of(address))
    found: list = []
    thread = threading.Thread(target=stream, args=(address, found, TALE, 350))
    thread.start()
    wait_until(lambda: found and len(found[0]["lines"]) > 3, 60)
    name = found[0]["replica"]
    kill(name)
    thread.join(60)
    assert not thread.is_alive()
    error = json.loads(found[0]["lines"][-1])["error"]
    assert error["code"] == "replica_lost"
    assert name in error["message"]
    # What has not begun goes elsewhere: nobody else sees that one is missing.
    for i in range(3):
        assert complete(address, f"The {i}th king")[0] != name
    wait_until(lambda: len(set(replicas_of(address)) - {name}) == 2)
    assert set(replicas_of(address)) != before


def test_a_rolling_restart_loses_no_request(address):
    wait_until(lambda: len(replicas_of(address)) == 2)
    before = set(replicas_of(address))
    found, stop = [], threading.Event()

    def ask(number):
        while not stop.is_set():
            found.append(address.post("/v1/completions", prompt=f"{number} {TALE}", max_tokens=20))

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    try:
        deploy()  # again: other replicas of the same
        wait_until(lambda: not before & set(replicas_of(address)))
        wait_until(lambda: {headers["x-tilewise-replica"] for _, headers, _ in found} - before)
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert len(found) > 6
    assert {status for status, *_ in found} == {200}
    assert {headers["x-tilewise-replica"] for _, headers, _ in found} & before
    assert {headers["x-tilewise-replica"] for _, headers, _ in found} - before


def test_a_queue_brings_another_replica(address):
    serve.delete(APP)  # else the replicas that are there wait before they go
    deploy(replicas=1, max_replicas=2, upscale_delay_s=0.0, max_num_seqs=1)
    wait_until(lambda: running_replicas() == 1)
    threads = [
        threading.Thread(target=address.post, args=("/v1/completions",),
                         kwargs={"prompt": f"{n}", "max_tokens": 200, "ignore_eos": True})
        for n in range(40)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: running_replicas() == 2)
    finally:
        for thread in threads:
            thread.join(120)
