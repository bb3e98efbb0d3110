"""Chat templates: what they are given, and that none takes the server's time, memory or secrets."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import httpx
import pytest

from tests.server.serving import serving
from tilewise.server import templates as templates_module
from tilewise.server.chat import (
    ChatTemplate,
    messages_of,
    named_templates,
    read_template,
    tool_names,
)
from tilewise.server.chat_format import format_of, unread
from tilewise.server.errors import ApiError
from tilewise.server.messages import messages_router
from tilewise.server.protocol import ChatRequest
from tilewise.server.responses import responses_router
from tilewise.server.templates import TemplateError, Templates

CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def templates():
    made = Templates(max_seconds=1.5, max_memory=400 * 2**20, max_output=10_000)
    yield made
    made.close()


@pytest.fixture(scope="module")
def templateless():
    def routers(service):
        service.template.source = None  # as of a checkpoint that has none
        return [messages_router(service), responses_router(service)]

    with serving(routers=routers) as server:
        yield server


def request(*contents, **more):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]
    return ChatRequest(messages=messages, **more)


def test_a_template_writes_messages_tools_and_special_tokens(templates):
    text = templates.render(
        "{{ bos_token }}{% for m in messages %}{{ m['content'] }}|{% endfor %}{{ tools | tojson }}",
        {"bos_token": "<s>", "messages": [{"content": "a<b>&"}], "tools": [{"é": "<x>"}]},
    )
    assert text == '<s>a<b>&|[{"é": "<x>"}]'  # nothing is escaped as in a page


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1.5 s"),
        ("{{ 'a' * 2000000000 }}", "400 MiB"),
        ("{{ 'a'.ljust(2000000000) }}", "400 MiB"),
        ("{% for i in range(99999) %}{{ i }}{% endfor %}", "10,000 characters"),
        ("{{ range(10000000) | list }}", "OverflowError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recurse"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ nothing.at.all }}", "UndefinedError"),
    ],
)
def test_a_template_that_does_wrong_is_an_error_and_the_next_one_works(
    templates, template, message
):
    began = time.monotonic()
    with pytest.raises(TemplateError, match=message):
        templates.render(template, {"messages": [1]})
    assert time.monotonic() - began < 10
    assert templates.render("{{ messages[0] }}", {"messages": ["fine"]}) == "fine"


def test_a_worker_that_somebody_ends_is_no_fault_of_the_template(templates):
    """A client was told that its template takes more than 512 MiB."""
    templates.start()
    first = templates._worker
    os.kill(first.pid, signal.SIGSTOP)  # in the midst of the work, whenever that comes
    ender = threading.Timer(0.05, first.kill)
    ender.start()
    assert templates.render("{{ messages[0] }}", {"messages": ["fine"]}) == "fine"
    assert templates._worker.pid != first.pid
    ender.join()


def test_a_worker_that_is_ended_again_and_again_is_the_servers_fault(templates, monkeypatch):
    def ended(worker, message, seconds):
        if "template" in message:
            worker.terminate()
            worker.wait()
            raise OSError("it has ended")
        return {}

    monkeypatch.setattr(templates_module, "ask", ended)
    with pytest.raises(ApiError, match="was ended from outside") as told:
        templates.render("{{ messages[0] }}", {"messages": ["fine"]})
    assert told.value.status == 500
    monkeypatch.undo()
    assert templates.render("{{ messages[0] }}", {"messages": ["fine"]}) == "fine"


def test_half_of_a_surrogate_pair_goes_there_and_back(templates):
    found = templates.render("{{ messages[0] }}", {"messages": ["\ud83d é"]})
    assert found == "\ud83d é"


def test_long_chats_go_there_and_back(templates):
    text = "x" * 9000
    assert templates.render("{{ a[:9000] }}", {"a": text * 200}) == text  # more than a pipe holds


def test_a_requests_own_template_needs_permission(templates):
    asked = request("Hello", chat_template="{{ messages[0].content }}!")
    with pytest.raises(ApiError, match="chat_template is not served here: start the server with"):
        ChatTemplate(CHATML, renderer=templates).render(asked)
    allowed = ChatTemplate(CHATML, allows_others=True, renderer=templates)
    assert allowed.render(asked) == "Hello!"
    with pytest.raises(ApiError, match="this one has none"):
        ChatTemplate(None, renderer=templates).render(request("Hello"))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "model": "story",
                          "max_tokens": 4}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hello"}],
                                       "model": "story"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "Hello"}]}),
    ],
)  # fmt: skip
def test_a_chat_with_a_model_that_has_no_template_is_refused_and_says_what_to_do(
    templateless, path, body, is_stream
):
    if path in ("/v1/messages/count_tokens", "/tokenize"):
        asked = body
    else:
        asked = {**body, "stream": is_stream}
    answer = httpx.post(f"{templateless.url}{path}", json=asked)
    assert answer.status_code == 400
    assert "--chat-template FILE gives one" in answer.json()["error"]["message"]
    plain = httpx.post(f"{templateless.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    assert plain.status_code == 200


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "tools", "bos_token"])
def test_arguments_of_a_template_may_not_replace_messages(templates, name):
    template = ChatTemplate(CHATML, {"bos_token": "<s>"}, renderer=templates)
    with pytest.raises(ApiError, match=f"must not hold {name}"):
        template.render(request("Hello", chat_template_kwargs={name: True}))
    source = ChatTemplate("{{ thinks }}", renderer=templates)
    assert source.render(request("Hello", chat_template_kwargs={"thinks": 3})) == "3"


def test_a_final_message_is_continued(templates):
    template = ChatTemplate(CHATML, renderer=templates)
    text = template.render(request("Hello", "I am", continue_final_message=True))
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nI am"
    with pytest.raises(ApiError, match="must follow an assistant's message"):
        template.render(request("Hello", continue_final_message=True))


def test_messages_become_what_templates_read():
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]
    made = messages_of(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"]},
            {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None},
            {"role": "tool", "content": "3", "tool_call_id": "1"},
            {"role": "assistant", "content": "so", "reasoning": "hm"},
        ]
    )
    assert made[0] == {"role": "user", "content": "a\nb"}
    assert made[1]["content"] == ""
    assert made[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert made[3]["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "king", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "colour": 1}, "messages[0].colour"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{'a'"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_wrong_message_is_named(message, param):
    with pytest.raises(ApiError) as caught:
        messages_of([message])
    assert caught.value.param == param
    assert caught.value.status == 400


def test_tools_are_functions_with_names_of_their_own():
    tool = {"type": "function", "function": {"name": "f"}}
    assert tool_names([tool]) == {"f": {"type": "object"}}
    assert tool_names(None) == {}
    for wrong in ([tool, tool], [{"type": "web"}], [{"type": "function"}]):
        with pytest.raises(ApiError, match="tools"):
            tool_names(wrong)


def test_a_template_is_found_where_checkpoints_have_it(tmp_path):
    def config(**content):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))

    assert read_template(tmp_path, None) == (None, {})
    config(chat_template="{{ 1 }}", bos_token={"content": "<s>"}, eos_token="</s>")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    assert read_template(tmp_path, None) == ("{{ 1 }}", tokens)
    config(chat_template=[{"name": "default", "template": "{{ 2 }}"}, {"name": "rag"}])
    assert read_template(tmp_path, None)[0] == "{{ 2 }}"
    (tmp_path / "chat_template.jinja").write_text("{{ 3 }}")
    assert read_template(tmp_path, None)[0] == "{{ 3 }}"
    assert read_template(tmp_path, "{{ 4 }}")[0] == "{{ 4 }}"
    with pytest.raises(ValueError, match="must be a file or a template"):
        read_template(tmp_path, "nowhere")


# Of Qwen's and Llama's ways to write white space, and a name that is set within.
GENERATION = [
    "{%- for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "a\n  {% generation %}\n  b {{ messages | length }}\n  {% endgeneration %}\nc",
    "a\n  {%- generation -%}\n  b\n  {%- endgeneration -%}\nc",
    "{% for m in messages %}{% generation %}{% set x = loop.index %}{{ x }}{% endgeneration %}|"
    "{{ x }}{% endfor %}",
    "{% generation %}{% if false %}{% endif %}{% endgeneration %}",
]


@pytest.mark.parametrize("source", GENERATION)
def test_the_tag_of_trainers_writes_what_transformers_writes(templates, source):
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": " so "}]
    [[right], _] = render_jinja_template([messages], chat_template=source)
    assert templates.render(source, {"messages": messages}) == right


def test_a_template_is_compiled_before_it_is_asked_for(templates):
    templates.check(CHATML)
    with pytest.raises(TemplateError, match="endgeneration"):
        templates.check("{% generation %}{{ 1 }}")
    broken = ChatTemplate("{% if %}", renderer=templates, named={"rag": "{{ nothing.at.all }}"})
    [said] = broken.faults()
    assert said.startswith("chats are refused that take the chat template 'default': chat template")
    deaf = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    [said] = ChatTemplate(deaf, renderer=templates).faults()
    assert said == "the chat template 'default' leaves messages of the system out"
    assert not list(ChatTemplate(CHATML, renderer=templates).faults())


def test_named_templates_are_found_and_taken(tmp_path, templates):
    def config(**content):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))

    assert named_templates(tmp_path) == {}
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"},
             {"name": "rag", "template": "rag"}, {"name": 3, "template": "x"}]  # fmt: skip
    config(chat_template=named)
    assert named_templates(tmp_path) == {"tool_use": "tools", "rag": "rag"}
    files = tmp_path / "additional_chat_templates"
    files.mkdir()
    (files / "tool_use.jinja").write_text("of a file")
    assert named_templates(tmp_path) == {"tool_use": "of a file", "rag": "rag"}
    config(chat_template="alone")
    assert named_templates(tmp_path) == {"tool_use": "of a file"}

    template = ChatTemplate("plain", renderer=templates, named={"tool_use": "tools", "rag": "rag"})
    tools = [{"type": "function", "function": {"name": "f"}}]
    for more, text in (({}, "plain"), ({"tools": tools}, "tools"), ({"tools": []}, "plain"),
                       ({"chat_template": "rag"}, "rag"),
                       ({"chat_template": "default", "tools": tools}, "plain")):  # fmt: skip
        assert template.render(request("Hi", **more)) == text
    with pytest.raises(ApiError, match="or name one of tool_use, rag"):
        template.render(request("Hi", chat_template="other"))
    template = ChatTemplate(None, renderer=templates, named={"tool_use": "tools"})
    assert template.render(request("Hi", tools=tools)) == "tools"
    with pytest.raises(ApiError, match="chat_template must be one of tool_use"):
        template.render(request("Hi"))


BRANCHES = (
    "{% for m in messages %}{% if m.role == 'system' %}S:{{ m.content }};"
    "{% elif m.role == 'user' %}U:{{ m.content }};{% endif %}{% endfor %}"
)
FIRST = (
    "{% if messages[0].role == 'system' %}S:{{ messages[0].content }};{% endif %}"
    "{% for m in messages if m.role == 'user' %}U:{{ m.content }};{% endfor %}"
)
KNOWS = BRANCHES.replace("m.role == 'system'", "m.role in ('system', 'developer')")
HI = {"role": "user", "content": "Hi"}


def roles(*roles):
    return [HI if role == "user" else {"role": role, "content": role[0]} for role in roles]


@pytest.mark.parametrize(
    ("source", "chat", "text"),
    [
        (BRANCHES, roles("developer", "user"), "S:d;U:Hi;"),
        (BRANCHES, roles("system", "developer", "user"), "S:s\n\nd;U:Hi;"),
        (BRANCHES, roles("developer", "system", "user"), "S:d\n\ns;U:Hi;"),
        (BRANCHES, roles("user", "developer"), "U:Hi;S:d;"),
        (BRANCHES, roles("system", "system"), "S:s;S:s;"),
        (FIRST, roles("developer", "user"), "S:d;U:Hi;"),
        (FIRST, roles("system", "developer", "user"), "S:s\n\nd;U:Hi;"),
        (FIRST, roles("user", "developer"), None),
        (KNOWS, roles("system", "developer", "user"), "S:s;S:d;U:Hi;"),
        (FIRST.replace("t }}", "t | upper }}"), roles("developer", "user"), "S:D;U:HI;"),
        ("{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
         roles("developer", "user"), "system:d;user:Hi;"),
        (BRANCHES.replace("'system'", "'none'"), roles("system", "user"), "U:Hi;"),
    ],
)  # fmt: skip
def test_a_developers_message_is_the_systems_where_a_template_does_not_know_it(
    templates, source, chat, text
):
    template = ChatTemplate(source, renderer=templates)
    if text is not None:
        assert template.render(ChatRequest(messages=chat)) == text
        return
    with pytest.raises(ApiError, match="must be one that the chat template writes") as caught:
        template.render(ChatRequest(messages=chat))
    assert caught.value.param == "messages[1]"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("", {}), ("  ", {}), ("null", {}), ("[]", {}), ("{}", {}), (None, {}),
        ({"a": 1}, {"a": 1}),
        ('{"city": "Par', {"city": "Par"}), ('{"city": "Paris"} ', {"city": "Paris"}),
    ],
)  # fmt: skip
def test_arguments_of_calls_are_objects_also_where_they_were_cut_off(written, read):
    call = {"function": {"name": "f", "arguments": written}}
    [made] = messages_of([{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert made["tool_calls"][0]["function"]["arguments"] == read


@pytest.mark.parametrize(
    ("template", "calls", "reasoning", "said"),
    [
        ("{{ tools }}<tool_call>", "hermes", "none", []),
        ("{{ tools }}", "none", "none", ["requests with tools are refused"]),
        ("{{ messages }}", "none", "none", []),
        ("{{ tools }}<tool_call>◁think▷", "hermes", "none", ["(◁think▷) is not known"]),
        ("<think>{{ tools }}<|python_tag|>", "llama3_json", "think", []),
    ],
)
def test_what_is_not_read_of_answers_is_said_at_the_start(template, calls, reasoning, said):
    form = format_of(template, "auto", "auto")
    assert (form.names, form.is_harmony) == ((calls, reasoning), False)
    told = list(unread(template, form))
    assert len(told) == len(said)
    assert all(part in one for part, one in zip(said, told, strict=True))
    [one] = unread("{{ messages }}", format_of("{{ messages }}", "hermes", "none"))
    assert "does not write tools" in one
