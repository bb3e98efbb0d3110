"""What has gone wrong in other servers, each with the test that it does not go wrong in this one.

The numbers are those of a list of public reports (issues, advisories) of vLLM, SGLang, TGI,
transformers, nano-vllm, mini-sglang, llama.cpp and others; `KNOWN` says what each was.
"""

from __future__ import annotations

import ast
import hmac
import json
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving, wait_for
from tests.test_failures_of_others import FAILURES
from tilewise.engine import structured
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server.keys import Caller, KeyRing, hash_of
from tilewise.server.messages import messages_router
from tilewise.server.responses import responses_router
from tilewise.server.templates import Templates

ROOT = Path(__file__).resolve().parents[2]
HERE = "server/test_failures.py"
LIFE, KEYS, OPEN = (
    "server/test_lifecycle.py", "server/test_keys_and_limits.py", "server/test_openai_client.py",
)  # fmt: skip
TEMPLATES, SCHEDULER, PREFIX = (
    "server/test_templates.py", "engine/test_scheduler.py", "cache/test_prefix.py",
)  # fmt: skip
FITS = f"{HERE}::test_what_can_never_fit_is_refused_at_once_and_hurts_nobody"
FULL = f"{HERE}::test_a_request_of_exactly_the_cache_is_served"
PICKLE = f"{HERE}::test_nothing_is_unpickled_and_no_socket_is_opened_but_the_servers_own"
ABSENT = "no part of this server"

# number: (what it was, the tests that hold it off); a text in place of tests says why none applies.
KNOWN: dict[str, tuple[str, tuple[str, ...] | str]] = {
    "1": ("a request larger than the cache waits for ever", (FITS,)),
    "2": ("a small cache hangs", (FITS, FULL)),
    "3": (
        "capacity counted one block too many",
        (FULL, f"{SCHEDULER}::test_a_request_of_exactly_the_cache_ends_and_uses_every_block"),
    ),
    "4": (
        "all seats taken, and none is given again",
        (f"{HERE}::test_seats_that_were_all_taken_are_given_again",),
    ),
    "5": ("requests wait for another machine's cache", ABSENT),
    "6": ("engines made from such an engine do the same", (FITS,)),
    "7": (
        "health is good while nothing moves",
        (f"{LIFE}::test_health_is_bad_when_work_is_there_and_no_step_ends",),
    ),
    "8": (
        "a request too large ends the engine",
        (FITS, f"{SCHEDULER}::test_a_refused_request_hurts_nobody"),
    ),
    "9": ("a prompt too long is dropped and its client waits", (FITS,)),
    "10": (
        "a full swap space ends the engine",
        ("engine/test_swap_space.py::test_a_full_swap_space_falls_to_recomputing",),
    ),
    "11": (
        "main memory grows",
        ("server/test_chaos.py::test_memory_stays_while_clients_come_and_go",),
    ),
    "12": (
        "the check for leaks ends the server",
        ("engine/test_scheduler.py::test_a_failed_step_ends_only_the_requests_that_were_in_it",),
    ),
    "13": (
        "work goes on for a client that has left",
        (
            f"{LIFE}::test_a_client_that_leaves_ends_its_work_at_once",
            f"{LIFE}::test_a_client_that_leaves_the_queue_frees_its_place",
            "server/test_story.py::test_a_client_that_leaves_frees_its_blocks",
        ),
    ),
    "14": (
        "blocks freed while a step reads them",
        (
            "engine/test_scheduler_simulation.py::test_any_schedule_gives_the_tokens_of_a_request_alone",
            f"{SCHEDULER}::test_an_abort_in_flight_drops_its_results_and_keeps_those_of_others",
        ),
    ),
    "15": (
        "a preempted request loses its place",
        (f"{SCHEDULER}::test_a_preempted_request_keeps_its_place_in_the_queue",),
    ),
    "16": (
        "penalties beside guessed tokens end the engine",
        (
            "engine/test_speculative.py::test_guesses_beside_swapped_and_adjusted_requests_change_nothing",
        ),
    ),
    "17": (
        "memory counted wrong at the start",
        (
            "engine/test_sizing.py::test_what_does_not_fit_is_refused_with_the_sizes",
            "engine/test_sizing.py::test_the_widest_step_runs",
        ),
    ),
    "18": (
        "prompts made to collide read others' cache",
        (f"{PREFIX}::test_colliding_hashes_do_not_share",),
    ),
    "19": (
        "a salt that poses as something else",
        (
            f"{PREFIX}::test_a_salt_cannot_pose_as_a_block",
            f"{KEYS}::test_salts_of_different_callers_never_collide",
        ),
    ),
    "20": ("a weak hash with an unknown seed", (f"{PREFIX}::test_colliding_hashes_do_not_share",)),
    "21": (
        "a collision gives wrong text in silence",
        (f"{PREFIX}::test_colliding_hashes_do_not_share",),
    ),
    "22": (
        "64 bits without a look at the tokens",
        (f"{PREFIX}::test_the_boundaries_of_tokens_are_part_of_the_key",),
    ),
    "23": (
        "timing tells of other users' prompts",
        (f"{HERE}::test_no_key_finds_what_another_has_cached",),
    ),
    "24": ("pickle over a socket", (PICKLE,)),
    "25": ("pickle between machines", (PICKLE,)),
    "26": ("a store that listens everywhere", (PICKLE,)),
    "27": ("a publisher that listens everywhere", (PICKLE,)),
    "28": ("weights that run code", (PICKLE,)),
    "29": ("embeddings that run code", (PICKLE,)),
    "30": ("pickle through shared memory", (PICKLE,)),
    "31": ("pickle in a queue of messages", (PICKLE,)),
    "32": ("pickle in other servers", (PICKLE,)),
    "33": (
        "a template's argument blocks the server",
        (
            f"{HERE}::test_a_templates_arguments_are_its_own",
            f"{TEMPLATES}::test_arguments_of_a_template_may_not_replace_messages",
        ),
    ),
    "34": (
        "a request's template loops",
        (
            f"{HERE}::test_a_template_that_loops_stops_nobody",
            f"{TEMPLATES}::test_a_requests_own_template_needs_permission",
        ),
    ),
    "35": (
        "a checkpoint's template runs code",
        (f"{TEMPLATES}::test_a_template_that_does_wrong_is_an_error_and_the_next_one_works",),
    ),
    "36": ("n of a million", (f"{HERE}::test_counts_of_a_million_are_refused",)),
    "37": ("best_of of a million", (f"{HERE}::test_counts_of_a_million_are_refused",)),
    "38": (
        "an empty prompt ends the server",
        (f"{HERE}::test_an_empty_prompt_is_answered_or_refused",),
    ),
    "39": (
        "a header of megabytes",
        (
            f"{LIFE}::test_headers_over_the_limit_are_431",
            "server/test_sockets.py::test_headers_of_megabytes_are_not_read",
        ),
    ),
    "40": (
        "a wrong schema, expression or tool ends the engine",
        (f"{HERE}::test_a_description_that_explodes_is_refused_and_others_go_on",),
    ),
    "41": (
        "compiled grammars fill the disk",
        (f"{HERE}::test_compiled_descriptions_are_kept_within_a_bound",),
    ),
    "42": (
        "huge choices, and grammars that nest for ever",
        (f"{HERE}::test_a_description_that_explodes_is_refused_and_others_go_on",),
    ),
    "43": (
        "prompt_logprobs of everything",
        (
            f"{HERE}::test_prompt_logprobs_of_everything_are_refused",
            "engine/test_sampling_options.py::test_prompts_are_scored_in_slices_of_bounded_memory",
        ),
    ),
    "44": ("an advisory of 2026 of which no text was found", "what it was is not known"),
    "45": ("images and films of any size", (f"{HERE}::test_what_is_no_text_is_refused_by_name",)),
    "46": ("a negative count", (f"{HERE}::test_numbers_at_the_edges_are_never_the_servers_error",)),
    "46b": (
        "a key in other letters, and routes that need none",
        (f"{KEYS}::test_every_route_but_two_needs_a_key",),
    ),
    "47": (
        "a key found out by timing",
        (f"{HERE}::test_a_key_is_compared_whole_with_every_known_one",),
    ),
    "48": (
        "a key that guards only some routes",
        (
            f"{KEYS}::test_every_route_but_two_needs_a_key",
            "server/test_page.py::test_without_a_key_the_page_is_a_form_for_it",
        ),
    ),
    "49": ("a config that names modules or kernels runs them", ()),
    "50": (
        "a Host header moves the path, past the key",
        ("server/test_browsers.py::test_a_host_header_moves_no_path",),
    ),
    "51": (
        "salts do not reach the draft model's cache",
        (f"{HERE}::test_no_key_finds_what_another_has_cached",),
    ),
    "52": ("a schema compiles for hours, and nobody else's does", ()),
    "53": (
        "lists in a body are walked by the event loop",
        (
            "server/test_bodies.py::test_lists_of_every_body_are_counted_before_they_are_walked",
            "server/test_bodies.py::test_no_body_holds_the_event_loop",
        ),
    ),
    "54": (
        "many large bodies at once",
        ("server/test_bodies.py::test_room_for_bodies_is_bounded_shared_and_given_back",),
    ),
    "55": ("a server started in a strange folder runs its modules", ()),
    "56": ("weights outside of a checkpoint's folder are read", ()),
}


HEAD = """# What has gone wrong in other servers

The numbers are those of a list of public reports (issues and advisories of vLLM, SGLang, TGI,
transformers, nano-vllm, mini-sglang, llama.cpp and others, read 2026-11-20; those from 49 on were
found in 2026, some of them here). Each that can apply is
held off by the tests named beside it, of the server and of the engine below it, whose files are in
`tests/`; where the class itself has no place here, a sentence says so before what is nearest to it.
`tests/server/test_failures.py` holds this page to them.

| | what went wrong | test |
|---|---|---|
"""


def table():
    """docs/design/failures.md."""
    rows = []
    for number, (what, tests) in KNOWN.items():
        _, engines = FAILURES.get(int(number), ("", ())) if number.isdigit() else ("", ())
        named = () if isinstance(tests, str) else tests
        names = dict.fromkeys((*named, *(name.removeprefix("tests/") for name in engines)))
        told = [tests] if isinstance(tests, str) else []
        rows.append(
            f"| {number} | {what} | {'<br>'.join([*told, *(f'`{name}`' for name in names)])} |\n"
        )
    return HEAD + "".join(rows)


def test_the_page_lists_them_all():
    assert (ROOT / "docs" / "design" / "failures.md").read_text(encoding="utf-8") == table()


def test_every_failure_has_a_test_or_a_reason():
    assert set(KNOWN) == {*map(str, range(1, 57)), "46b"}
    for number, (what, tests) in KNOWN.items():
        assert what
        for name in () if isinstance(tests, str) else tests:
            file, _, function = name.partition("::")
            text = (ROOT / "tests" / file).read_text()
            assert f"def {function}(" in text, (number, name)


CALLERS = {
    hash_of("key-of-alice"): Caller("alice", group="team"),
    hash_of("key-of-anna"): Caller("anna", group="team"),
    hash_of("key-of-bob"): Caller("bob"),
    hash_of("key-of-root"): Caller("root", admin=True),
}


@pytest.fixture(scope="module")
def llm():
    # 24 blocks of 16 tokens: less than the model's context.
    made = LLM("story", device="cpu", num_blocks=24, max_num_seqs=4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(llm):
    def routers(service):
        return [messages_router(service), responses_router(service)]

    with serving(AsyncLLM(llm), loop=llm.loop, keys=CALLERS, routers=routers) as server:
        yield server


@pytest.fixture(scope="module")
def http(running):
    headers = {"authorization": "Bearer key-of-alice"}
    with httpx.Client(base_url=running.url, headers=headers, timeout=60) as client:
        yield client


def ask(http, path="/v1/completions", key=None, **body):
    content = {"prompt": "Once", "max_tokens": 2} if path == "/v1/completions" else {}
    if path == "/v1/chat/completions":
        content = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return http.post(path, json={**content, **body}, headers=headers)


def alive(http):
    """A plain request is answered and health is good."""
    assert http.get("/health").status_code == 200
    assert ask(http).status_code == 200


def test_what_can_never_fit_is_refused_at_once_and_hurts_nobody(llm, http):
    found = []
    other = threading.Thread(
        target=lambda: found.append(ask(http, max_tokens=200, ignore_eos=True, temperature=0))
    )
    other.start()
    wait_for(lambda: llm.engine.scheduler.roster.running)
    for tokens, max_tokens in ((300, 200), (390, 1), (1000, 10)):
        begun = time.monotonic()
        answer = ask(http, prompt=[5] * tokens, max_tokens=max_tokens)
        assert answer.status_code == 400, (tokens, max_tokens)
        assert any(c.isdigit() for c in answer.json()["error"]["message"])
        assert time.monotonic() - begun < 5
    other.join(60)
    assert found[0].json()["usage"]["completion_tokens"] == 200
    wait_for(lambda: llm.engine.scheduler.stats().blocks_used == 0)


def test_a_request_of_exactly_the_cache_is_served(llm, http):
    answer = ask(http, prompt=[5] * 284, max_tokens=100, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"] == {
        "prompt_tokens": 284, "completion_tokens": 100, "total_tokens": 384,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    wait_for(lambda: llm.engine.scheduler.stats().blocks_used == 0)


def test_seats_that_were_all_taken_are_given_again(llm, running, http):
    """More requests than seats, of which half leave while they run or wait."""
    done = []

    def client(number):
        body = {"prompt": f"Number {number}", "max_tokens": 40, "ignore_eos": True, "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as answer:
            if number % 2:
                next(answer.iter_lines())
                return
            answer.read()
            done.append(answer.text.endswith("data: [DONE]\n\n"))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert done == [True] * 8
    wait_for(lambda: not running.bridge.jobs)
    wait_for(lambda: llm.engine.scheduler.stats().blocks_used == 0)
    alive(http)


def test_no_key_finds_what_another_has_cached(llm, http):
    prompt = [7 + i % 9 for i in range(100)]

    def cached(key, **more):
        answer = ask(http, key=key, prompt=prompt, max_tokens=1, **more).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached("key-of-alice") == 0
    assert cached("key-of-bob") == 0
    assert cached("key-of-root") == 0, "an administrator's requests are a user's like others"
    assert cached("key-of-alice") == cached("key-of-bob") == 96
    assert cached("key-of-anna") == 96, "of one group"
    # No salt of a request leads into another key's part, nor out of one's own.
    for salt in ("alice", "team", "group:4:team:", "key:5:alice:"):
        assert cached("key-of-bob", cache_salt=salt) == 0


def test_nothing_is_unpickled_and_no_socket_is_opened_but_the_servers_own():
    forbidden = {
        "pickle", "cloudpickle", "dill", "marshal", "shelve", "zmq", "multiprocessing.connection",
    }  # fmt: skip
    opened = []
    for file in sorted((ROOT / "tilewise").rglob("*.py")):
        name, text = str(file.relative_to(ROOT / "tilewise")), file.read_text()
        calls = ("torch.load", ".listen(", "_server(", ".bind(")
        if not any(word in text for word in (*forbidden, *calls)):
            continue  # parsing takes time
        for node in ast.walk(ast.parse(text)):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = node.func.value
                if node.func.attr == "load" and isinstance(of, ast.Name) and of.id == "torch":
                    safe = [k for k in node.keywords if k.arg == "weights_only"]
                    assert safe, f"{name}: torch.load runs what it reads"
                # What Ray calls bind takes what an application is made of, not an address.
                is_bind = node.func.attr == "bind" and len(node.args) == 1
                # A signature binds all arguments of a call.
                is_bind = is_bind and not isinstance(node.args[0], ast.Starred)
                if node.func.attr in ("listen", "create_server", "start_server") or is_bind:
                    opened.append(name)
            if name.split("/")[0] in ("server", "engine", "cache", "models", "cli.py"):
                assert not forbidden & set(modules), name
    assert set(opened) <= {"server/run.py"}, "one place binds"


def test_a_templates_arguments_are_its_own(http):
    """`tokenize: true` made another server encode on its event loop."""
    answer = ask(
        http, "/v1/chat/completions",
        chat_template_kwargs={"tokenize": True, "return_tensors": "pt", "chat_template": "x"},
    )  # fmt: skip
    plain = ask(http, "/v1/chat/completions")
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]
    wrong = ask(http, "/v1/chat/completions", chat_template_kwargs={"messages": []})
    assert wrong.status_code == 400


def test_a_template_that_loops_stops_nobody(running, http):
    template = running.service.template
    before = template.renderer, template.allows_others
    template.renderer, template.allows_others = Templates(max_seconds=0.5), True
    template.renderer.start()
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    found = []
    asking = threading.Thread(
        target=lambda: found.append(ask(http, "/v1/chat/completions", chat_template=loop))
    )
    try:
        asking.start()
        num_answered = 0
        while asking.is_alive():
            assert http.get("/health").status_code == 200
            assert ask(http).status_code == 200
            num_answered += 1
        assert num_answered > 2, "others are answered while it loops"
        assert found[0].status_code == 400
        assert found[0].json()["error"]["code"] == "template_error"
        assert ask(http, "/v1/chat/completions").status_code == 200
    finally:
        asking.join(60)
        template.renderer.close()
        template.renderer, template.allows_others = before


@pytest.mark.parametrize(
    ("path", "more"),
    [
        ("/v1/completions", {"n": 10**6}),
        ("/v1/completions", {"n": 10**30}),
        ("/v1/completions", {"best_of": 10**6}),
        ("/v1/completions", {"n": 600, "prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": ["a"] * 2000}),
        ("/v1/completions", {"logprobs": 10**6}),
        ("/v1/completions", {"stop": ["x"] * 10**5}),
        ("/v1/completions", {"stop": ["x" * 10**6]}),
        ("/v1/completions", {"stop_token_ids": list(range(10**5))}),
        ("/v1/completions", {"logit_bias": {str(i): 1 for i in range(2000)}}),
        ("/v1/completions", {"bad_words": ["x"] * 10**5}),
        ("/v1/chat/completions", {"n": 10**6}),
        ("/v1/chat/completions", {"top_logprobs": 10**6, "logprobs": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 10**4}),
    ],
)
def test_counts_of_a_million_are_refused(http, path, more):
    begun = time.monotonic()
    answer = ask(http, path, **more)
    assert answer.status_code == 400, answer.text[:300]
    error = answer.json()["error"]
    # best_of counts as samples, which are n.
    assert error["param"].split("[")[0] in (*more, "n" if "best_of" in more else None)
    assert len(error["message"]) < 400
    assert time.monotonic() - begun < 5


@pytest.mark.parametrize("prompt", ["", [], [[]], ["", ""], [""], [[], [5]], None, "\x00"])
def test_an_empty_prompt_is_answered_or_refused(http, prompt):
    for is_stream in (False, True):
        answer = ask(http, prompt=prompt, stream=is_stream)
        assert answer.status_code in (200, 400)
        if answer.status_code == 400:
            assert answer.json()["error"]["type"] == "invalid_request_error"
    for messages in ([], [{"role": "user", "content": ""}], [{"role": "user", "content": []}]):
        status = ask(http, "/v1/chat/completions", messages=messages).status_code
        assert status == (200 if messages else 400)
    alive(http)


def nested(depth):
    schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def tool(parameters):
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


FORCED = {"type": "function", "function": {"name": "f"}}
EXPLOSIONS = {
    "unknown type": {"structured_outputs": {"json": {"type": "rainbow"}}},
    "not a schema": {"structured_outputs": {"json": "{"}},
    "circle": {"structured_outputs": {"json": {"$ref": "#"}}},
    "missing definition": {"structured_outputs": {"json": {"$ref": "#/$defs/nothing"}}},
    "elsewhere": {"structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/schema"}}},
    "nested": {"structured_outputs": {"json": nested(150)}},
    "many choices": {"structured_outputs": {"choice": [f"c{i}" for i in range(20_000)]}},
    "no choice": {"structured_outputs": {"choice": []}},
    "huge enum": {"structured_outputs": {"json": {"enum": [f"e{i}" for i in range(6000)]}}},
    "expression": {"structured_outputs": {"regex": "(" * 50}},
    "look behind": {"structured_outputs": {"regex": "(?<=a)b"}},
    "states": {"structured_outputs": {"regex": "((a{1,500}){1,500}){1,500}"}},
    "grammar": {"structured_outputs": {"grammar": "start: start start |"}},
    "no grammar": {"structured_outputs": {"grammar": "::="}},
    "pattern": {"structured_outputs": {"json": {"type": "string", "pattern": "(((((("}}},
    "tool": {"tools": [tool({"type": "object", "properties": {"a": {"type": "no"}}})],
             "tool_choice": FORCED},
    "tool's pattern": {"tools": [tool({"type": "string", "pattern": "["})], "tool_choice": FORCED},
    "required": {"tools": [tool({"$ref": "#/nowhere"})], "tool_choice": "required"},
}  # fmt: skip


def test_a_description_that_explodes_is_refused_and_others_go_on(http):
    """All at once: no one of them holds the event loop or the engine."""
    found = {}

    def asking(name):
        path = "/v1/chat/completions" if "tools" in EXPLOSIONS[name] else "/v1/completions"
        found[name] = ask(http, path, **EXPLOSIONS[name])

    threads = [threading.Thread(target=asking, args=(name,)) for name in EXPLOSIONS]
    for thread in threads:
        thread.start()
    slowest = 0.0
    while any(thread.is_alive() for thread in threads):
        begun = time.process_time()  # of the server too: other processes do not count
        assert http.get("/health").status_code == 200
        slowest = max(slowest, time.process_time() - begun)
        time.sleep(0.01)
    assert slowest < 2.0
    for name, answer in found.items():
        assert answer.status_code in (200, 400), (name, answer.text[:300])
    # These may be followed after all: states are built as they are reached, and not for long.
    harmless = {"circle", "nested", "huge enum", "grammar", "states"}
    assert {name for name, answer in found.items() if answer.status_code == 200} <= harmless
    alive(http)


def test_a_body_that_nests_for_ever_is_no_error_of_the_server(http):
    for depth in (200, 5000):
        body = '{"prompt": "x", "structured_outputs": {"json": ' + '{"not": ' * depth + "{}"
        answer = http.post("/v1/completions", content=body + "}" * depth + "}}")
        assert answer.status_code == 400, depth
        chat = '{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": '
        answer = http.post("/v1/chat/completions", content=chat + "[" * depth + "]" * depth + "}")
        assert answer.status_code == 400, depth
    alive(http)


def test_compiled_descriptions_are_kept_within_a_bound(llm, http, monkeypatch):
    # The first one makes what holds them.
    assert ask(http, structured_outputs={"choice": ["word"]}).status_code == 200
    grammars = next(
        found for holder in vars(llm).values() if (found := getattr(holder, "_grammars", None))
    )
    grammars._compiled.clear()
    monkeypatch.setattr(structured, "MAX_KEPT", 3)
    for number in range(6):
        answer = ask(http, structured_outputs={"choice": [f"word {number}"]})
        assert answer.status_code == 200
    assert len(grammars._compiled) == 3


def test_prompt_logprobs_of_everything_are_refused(http):
    for value in (-1, 10**6, 4096):
        answer = ask(http, prompt_logprobs=value)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt_logprobs"
    most = ask(http, prompt=[5] * 300, prompt_logprobs=20, logprobs=20, echo=True, max_tokens=1)
    [choice] = most.json()["choices"]
    assert len(choice["prompt_logprobs"]) == 300
    assert choice["prompt_logprobs"][0] is None
    assert all(20 <= len(entry) <= 21 for entry in choice["prompt_logprobs"][1:])


@pytest.mark.parametrize("kind", ["image_url", "input_image", "video_url", "input_audio", "file"])
def test_what_is_no_text_is_refused_by_name(http, kind):
    part = {"type": kind, kind: {"url": "http://127.0.0.1:1/x.png"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    answer = ask(http, "/v1/chat/completions", messages=messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[1].type"
    blocks = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    answer = ask(http, "/v1/messages", model="story", max_tokens=2, messages=blocks)
    assert answer.status_code == 400
    item = {"role": "user", "content": [part]}
    assert ask(http, "/v1/responses", input=[item]).status_code == 400


NUMBERS = (
    "max_tokens", "n", "top_k", "seed", "min_tokens", "prompt_logprobs", "best_of", "priority",
    "truncate_prompt_tokens", "temperature", "top_p", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "length_penalty", "timeout", "logprobs",
)  # fmt: skip


def test_numbers_at_the_edges_are_never_the_servers_error(llm, http):
    edges = (-1, 0, -(2**31), 2**31, 2**63, -(2**63) - 1, 10**40, 1e308, -1e308, 1e-320, 0.5)
    for name in NUMBERS:
        for value in edges:
            answer = ask(http, **{name: value})
            assert answer.status_code in (200, 400, 504), (name, value, answer.text[:200])
            if answer.status_code == 400:
                named = (name, None, "n" if name == "best_of" else None)
                assert answer.json()["error"]["param"] in named, (name, value)
    ids = [-1, 4096, 2**31, 2**63, 10**40]
    for value in ids:
        for more in (
            {"prompt": [value]}, {"stop_token_ids": [value]}, {"logit_bias": {str(value): 1}},
            {"allowed_token_ids": [value]},
        ):  # fmt: skip
            answer = ask(http, **more)
            assert answer.status_code in (200, 400), (more, answer.text[:200])
        assert http.post("/detokenize", json={"tokens": [value]}).status_code == 400
    wait_for(lambda: llm.engine.scheduler.stats().blocks_used == 0)
    alive(http)


def test_a_key_is_compared_whole_with_every_known_one(monkeypatch):
    """The time to refuse a key says neither how much of it is right nor which one is near."""
    ring = KeyRing(CALLERS)
    compared = []
    real = hmac.compare_digest
    monkeypatch.setattr(hmac, "compare_digest", lambda a, b: compared.append((a, b)) or real(a, b))
    keys = ("key-of-alice", "key-of-root", "key-of-alicf", "x", "", "k" * 10**5)
    for key in keys:
        compared.clear()
        found = ring.find(key)
        assert (found is not None) == (key in ("key-of-alice", "key-of-root"))
        assert len(compared) == len(CALLERS), "it stops at none"
        assert {len(part) for pair in compared for part in pair} == {32}, "hashes, not keys"


def test_an_error_tells_nothing_of_the_servers_inside(running):
    with serving(FakeEngine()) as plain:
        plain.engine.fails_at = 0
        texts = [
            httpx.post(f"{plain.url}/v1/completions", json={"prompt": "x"}).text,
            httpx.post(f"{plain.url}/v1/completions", content=b"\xff\xfe").text,
            httpx.get(f"{plain.url}/../../etc/passwd").text,
        ]
    for text in texts:
        assert "Traceback" not in text
        assert str(ROOT) not in text
        assert json.loads(text)["error"]["message"]
