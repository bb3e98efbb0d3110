"""Earlier calls and their results, as templates of each kind expect them."""

from __future__ import annotations

import json

import pytest

from tests.server.calls.test_formats import ADD, NOW, TOOLS, WEATHER, calls_of, find
from tilewise.server.calls.table import FORMATS, call_format, format_in
from tilewise.server.chat import ChatTemplate
from tilewise.server.errors import ApiError
from tilewise.server.protocol import ChatRequest
from tilewise.server.templates import Templates

USER = {"role": "user", "content": "Hi"}


@pytest.fixture(scope="module")
def renderer():
    made = Templates(max_seconds=60)
    yield made
    made.close()


def asked(*calls, ids=None):
    made = [
        {"id": f"call_{i}" if ids is None else ids[i], "type": "function",
         "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]  # fmt: skip
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(content, call_id="call_0", **more):
    return {"role": "tool", "tool_call_id": call_id, "content": content, **more}


def render(renderer, source, *messages, calls=None, **more):
    form = None if calls is None else call_format(calls)
    template = ChatTemplate(source, {}, renderer=renderer, calls=form)
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in TOOLS.items()
    ]
    return template.render(ChatRequest(messages=[*messages], tools=tools, **more))


CALLS = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}"
ENDS = "{% endfor %}{% endfor %}{# tools #}"
# How templates of the formats write a call, in their authors' way; what is between calls is left
# out where the first call's mark begins it all.
WRITES = {
    "hermes": '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>\n",
    "deepseek_v31": "{{ '<｜tool▁calls▁begin｜>' if loop.first }}{{ '<｜tool▁call▁begin｜>' + "
    "c['function']['name'] + '<｜tool▁sep｜>' + c['function']['arguments'] + "
    "'<｜tool▁call▁end｜>' }}"
    "{{ '<｜tool▁calls▁end｜>' if loop.last }}",
    "deepseek_v3": "{{ '<｜tool▁calls▁begin｜>' if loop.first }}{{ '<｜tool▁call▁begin｜>' + "
    "c['type'] + '<｜tool▁sep｜>' + c['function']['name'] + '\n```json\n' + "
    "c['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}"
    "{{ '<｜tool▁calls▁end｜>' if loop.last }}",
    "kimi_k2": "{{ '<|tool_calls_section_begin|>' if loop.first }}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>"
    "{{ '<|tool_calls_section_end|>' if loop.last }}",
    "qwen3_coder": "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in "
    "c.function.arguments | items %}<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n"
    "</parameter>\n{% endfor %}</function>\n</tool_call>",
    "glm45": "\n<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n"
    "{% endfor %}</tool_call>",
    "minimax_m2": "{{ '\n<minimax:tool_call>\n' if loop.first }}"
    "<invoke name=\"{{ c.function.name }}\">\n{% for k, v in c.function.arguments | items %}"
    "<parameter name=\"{{ k }}\">{{ v if v is string else v | tojson }}</parameter>\n"
    "{% endfor %}</invoke>\n{{ '</minimax:tool_call>' if loop.last }}",
    "mistral": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
    "llama3_json": "{{ '; ' if not loop.first }}{\"name\": \"{{ c.function.name }}\", "
    "\"parameters\": {{ c.function.arguments | tojson }}}{# <|python_tag|> #}",
    "granite": "{{ '<|tool_call|>[' if loop.first else ', ' }}{\"name\": "
    "\"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}"
    "{{ ']' if loop.last }}",
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_calls_go_through_a_template_and_are_read_again(renderer, name):
    source = CALLS + WRITES[name] + ENDS
    assert format_in(source).name == name
    text = render(renderer, source, USER, asked(WEATHER, ADD, NOW), calls=name)
    found = find(name, [text.partition("assistant:")[2]])
    assert calls_of(found) == [WEATHER, ADD, NOW]
    assert found[0].strip() == ""


@pytest.mark.parametrize("name", [form.name for form in FORMATS])
def test_a_template_that_writes_no_calls_has_them_as_a_part_of_the_text(renderer, name):
    source = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    text = render(renderer, source, USER, asked(WEATHER, ADD, NOW), calls=name)
    found = find(name, [text.partition("assistant:")[2]])
    assert calls_of(found) == [WEATHER, ADD, NOW]


def test_arguments_are_texts_where_a_template_would_write_pythons_notation(renderer):
    source = CALLS + '{"arguments": {{ c.function.arguments }}}' + ENDS
    text = render(renderer, source, USER, asked(WEATHER))
    assert json.loads(text.partition("assistant:")[2])["arguments"] == WEATHER[1]
    # One that writes values in that notation, as Seed's does, was trained so.
    source = (
        CALLS + "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}" + ENDS
    )
    text = render(renderer, source, USER, asked(("f", {"a": {"b": "x"}})))
    assert text.endswith("a={'b': 'x'}")


def test_the_error_of_a_template_that_wants_neither_is_the_first_one(renderer):
    source = CALLS + "{{ raise_exception('no ' ~ (c.function.arguments is string)) }}" + ENDS
    with pytest.raises(ApiError, match="no False"):
        render(renderer, source, USER, asked(ADD))


def test_ids_are_those_of_the_format_whatever_clients_send(renderer):
    source = (
        "{% for m in messages %}{% for c in m.tool_calls %}<{{ c.id }}>{% endfor %}"
        "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% endfor %}{# tools #}"
    )
    turns = (
        USER, asked(ADD, NOW), result("1", "call_1"), result("2", "call_0"),
        asked(ADD, ids=["toolu_x"]), result("3", "toolu_x"), result("4", "lost"),
    )  # fmt: skip
    assert render(renderer, source, *turns, calls="kimi_k2") == (
        "<functions.add:0><functions.now:1>(functions.now:1)(functions.add:0)"
        "<functions.add:2>(functions.add:2)(lost)"
    )
    assert render(renderer, source, *turns, calls="mistral") == (
        "<000000000><000000001>(000000001)(000000000)<000000002>(000000002)(lost)"
    )
    kept = (USER, asked(ADD, ids=["abcDEF123"]), result("1", "abcDEF123"))
    assert render(renderer, source, *kept, calls="mistral") == "<abcDEF123>(abcDEF123)"
    assert render(renderer, source, *turns, calls="hermes").startswith("<call_0><call_1>(call_1)")


def test_results_stand_beside_their_calls_where_a_template_reads_them_there(renderer):
    source = (
        "{% for m in messages %}[{{ m.role }}{% for c in m.tool_calls %} {{ c.function.name }}"
        "{% endfor %}{% for r in m.tool_responses %} {{ r.name }}={{ r.response | tojson }}"
        "{% endfor %}]{% endfor %}{# tools #}"
    )
    turns = (
        USER, asked(ADD, NOW), result('{"sum": 1}'), result("[noon", "call_1"),
        {"role": "assistant", "content": "So."}, result("x", "lost"),
    )  # fmt: skip
    assert render(renderer, source, *turns, calls="gemma4") == (
        '[user][assistant add now add={"sum": 1} now="[noon"][assistant][tool]'
    )
    native = source + "{# tool_call_id #}"
    assert render(renderer, native, *turns, calls="gemma4") == (
        "[user][assistant add now][tool][tool][assistant][tool]"
    )
