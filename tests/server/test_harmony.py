"""The channels of gpt-oss: read from answers, written for its template, and in its grammars."""

from __future__ import annotations

import random

import pytest

from tests.server.test_strict_tools import BAD, SCHEMA, Walker
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.server.call_grammar import harmony_calls, harmony_lead
from tilewise.server.calls.rules import Tool
from tilewise.server.chat import ChatTemplate
from tilewise.server.chat_answer import Message
from tilewise.server.chat_format import format_of
from tilewise.server.engine_process.wire import sampling_of as of_told_sampling
from tilewise.server.engine_process.wire import told_sampling
from tilewise.server.errors import ApiError
from tilewise.server.harmony import HarmonyParser, prompt_end
from tilewise.server.protocol import ChatRequest, sampling_of
from tilewise.server.templates import Templates

NEXT = "<|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>Hm.<|end|>{NEXT}"
FINAL = "<|channel|>final<|message|>"
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"

# What a model writes behind <|start|>assistant: reasoning, content, calls.
ANSWERS = {
    "an answer": (f"{THOUGHT}{FINAL}Hello!", "Hm.", "Hello!", []),
    "an end that is shown": (f"{THOUGHT}{FINAL}Hello!<|return|>", "Hm.", "Hello!", []),
    "a call": (f'{THOUGHT}{CALL}{{"a": 1}}<|call|>', "Hm.", "", [("f", '{"a": 1}')]),
    "a call that ends unseen": (f'{THOUGHT}{CALL}{{"a": 1}}', "Hm.", "", [("f", '{"a": 1}')]),
    "to whom before the channel": (
        f"{THOUGHT} to=functions.f<|channel|>commentary json<|message|>{{}}", "Hm.", "",
        [("f", "{}")]),
    "a call of the analysis channel": (
        "<|channel|>analysis to=functions.f<|message|>{}", "", "", [("f", "{}")]),
    "a tool by its name alone": ("<|channel|>commentary to=f<|message|>{}", "", "", [("f", "{}")]),
    "a preamble": (f"<|channel|>commentary<|message|>A <b> <|x|><|end|>{NEXT}{CALL}", "",
                   "A <b> <|x|>", [("f", "{}")]),
    "several of a kind": (
        f"{THOUGHT}{THOUGHT}{FINAL}a<|end|>{NEXT}{FINAL}b", "Hm.\nHm.", "a\nb", []),
    "no channels": ("Hello there", "", "Hello there", []),
    "a mark and no header": ("<b>Hello</b> <|x|>", "", "<b>Hello</b> <|x|>", []),
    "no end before a channel": (f"<|channel|>analysis<|message|>Hm.{FINAL}a", "Hm.", "a", []),
    "text between messages": ("<|channel|>analysis<|message|>Hm.<|end|>so", "Hm.", "so", []),
    "a header without its end": ("<|channel|>final Hello", "", "<|channel|>final Hello", []),
    "one that ends without": ("<|channel|>final Hi<|return|>", "", "<|channel|>final Hi", []),
    "another channel": ("<|channel|>other<|message|>a", "", "a", []),
    "marks of other names": (f"{THOUGHT}<|channel2|>final<|message2|>a", "Hm.", "a", []),
    "another role": ("<|end|><|start|>user<|message|>a", "", "user<|message|>a", []),
    "a message to nobody": ("<|channel|>commentary to=python<|message|>1", "", "1", []),
    "cut in reasoning": ("<|channel|>analysis<|message|>Hm.<|e", "Hm.<|e", "", []),
    "cut in a header": (f"{THOUGHT}<|channel|>fin", "Hm.", "", []),
    "cut in a name": (f"{THOUGHT}<|channel|>commentary to=func", "Hm.", "", []),
    "cut in arguments": (f'{THOUGHT}{CALL}{{"a', "Hm.", "", [("f", '{"a')]),
    "a name longer than any": ("to=" + "x" * 300, "", "to=" + "x" * 300, []),
}  # fmt: skip


def read(text, sizes=None, names=("f",), begun=""):
    parser, message, place = HarmonyParser(names, begun), Message(), 0
    while place < len(text):
        size = sizes() if sizes else len(text)
        message.add(parser.push(text[place : place + size]))
        place += size
    message.add(parser.finish())
    return message.reasoning, message.content, message.calls


@pytest.mark.parametrize("case", ANSWERS)
def test_an_answer_is_read_however_it_is_cut_and_no_text_is_lost(case):
    text, *found = ANSWERS[case]
    assert list(read(text)) == found
    source = random.Random(39)
    for most in (1, 3, 9):
        assert list(read(text, lambda most=most: source.randint(1, most))) == found


def test_an_answer_goes_on_where_its_prompt_ends():
    head = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    assert prompt_end(head) == ""
    assert prompt_end("<|im_start|>assistant\n") == ""
    begun = prompt_end(f"{head}{FINAL}Hel")
    assert read("lo<|end|>", begun=begun) == ("", "lo", [])
    begun = prompt_end(f"{head}<|channel|>analysis<|message|>")
    assert read(f"Hm.<|end|>{NEXT}{FINAL}a", begun=begun) == ("Hm.", "a", [])
    parser = HarmonyParser(begun=begun)
    assert parser.kind == "reasoning"


def test_a_call_is_content_where_no_tool_may_be_called():
    assert read(f"{THOUGHT}{CALL}{{}}", names=()) == ("Hm.", "{}", [])


# As the template of gpt-oss reads a chat, in fewer words.
TEMPLATE = """
{%- set first = messages[0] %}
{%- if first.role in ("developer", "system") %}{% set chat = messages[1:] %}
{%- else %}{% set chat = messages %}{% endif %}
{{- "<|start|>developer<|message|>" }}
{%- if chat != messages %}{{- first.content }}{% endif %}
{%- for t in tools or [] %}{{- "|" + t.function.description + t.function.name }}{% endfor %}
{{- "<|end|>" }}
{%- set called = namespace(name=none) %}
{%- for m in chat %}
{%- if m.role == "assistant" and "tool_calls" in m %}
{%- if m.content and m.thinking %}{{ raise_exception("both") }}{% endif %}
{%- set later = namespace(found=false) %}
{%- for n in chat[loop.index:] %}
{%- if n.role == "assistant" and "tool_calls" not in n %}{% set later.found = true %}{% endif %}
{%- endfor %}
{%- if (m.content or m.thinking) and not later.found %}
{{- "<|start|>assistant<|channel|>analysis<|message|>" + (m.content or m.thinking) + "<|end|>" }}
{%- endif %}
{%- set called.name = m.tool_calls[0].function.name %}
{{- "<|start|>assistant to=functions." + called.name + "<|channel|>commentary json<|message|>" }}
{{- m.tool_calls[0].function.arguments | tojson + "<|call|>" }}
{%- elif m.role == "assistant" %}
{{- "<|start|>assistant<|channel|>final<|message|>" + m.content }}
{{- "<|return|>" if loop.last and not add_generation_prompt else "<|end|>" }}
{%- elif m.role == "tool" %}
{%- if called.name is none %}{{ raise_exception("no call") }}{% endif %}
{{- "<|start|>functions." + called.name + " to=assistant<|channel|>commentary<|message|>" }}
{{- m.content | tojson + "<|end|>" }}
{%- elif m.role == "user" %}
{{- "<|start|>user<|message|>" + m.content + "<|end|>" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|start|>assistant" }}{% endif %}
"""
USER = {"role": "user", "content": "Hi"}


def called(*names, **more):
    calls = [
        {"id": n, "type": "function", "function": {"name": n, "arguments": "{}"}} for n in names
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls, **more}


def result(name):
    return {"role": "tool", "tool_call_id": name, "content": f"of {name}"}


@pytest.fixture(scope="module")
def template():
    renderer = Templates(max_seconds=60)
    yield ChatTemplate(TEMPLATE, renderer=renderer)
    renderer.close()


def render(template, *messages, **more):
    return template.render(ChatRequest(messages=list(messages), **more))


def to(name):
    return (
        f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>{{}}<|call|>"
    )


def back(name):
    return (
        f'<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"of {name}"<|end|>'
    )


def said(channel, text):
    return f"<|start|>assistant<|channel|>{channel}<|message|>{text}<|end|>"


def test_a_chat_is_written_as_its_template_reads_it(template):
    head = (
        "<|start|>developer<|message|>Be brief.\n\nBe kind.<|end|><|start|>user<|message|>Hi<|end|>"
    )
    roles = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Be kind."},
    ]
    spoke = called("f", content="Looking.", reasoning_content="Hm.")
    text = render(template, *roles, USER, spoke, result("f"))
    plan = said("analysis", "Hm.") + said("commentary", "Looking.")
    assert text == f"{head}{plan}{to('f')}{back('f')}{NEXT}"
    # Of a turn that is over the template leaves reasoning out, and nothing that was told.
    answered = {"role": "assistant", "content": "Done.", "reasoning": "So."}
    text = render(template, *roles, USER, spoke, result("f"), answered, USER)
    over = f"{said('commentary', 'Looking.')}{to('f')}{back('f')}{said('final', 'Done.')}"
    assert text == f"{head}{over}<|start|>user<|message|>Hi<|end|>{NEXT}"


def test_each_of_several_calls_stands_before_its_result(template):
    text = render(template, USER, called("f", "g"), result("g"), result("f"))
    assert text.endswith(f"{to('f')}{back('f')}{to('g')}{back('g')}{NEXT}")
    assert render(template, USER, called("f"), result("f")).endswith(f"{to('f')}{back('f')}{NEXT}")
    text = render(template, USER, called("f", content="Looking."))
    assert f"{said('commentary', 'Looking.')}{to('f')}" in text


def test_a_tool_without_description_is_written(template):
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert "|f<|end|>" in render(template, USER, tools=tools)


def test_an_answer_is_continued_in_its_channel(template):
    begun = {"role": "assistant", "content": "Hel"}
    text = render(template, USER, begun, continue_final_message=True, add_generation_prompt=False)
    assert text.endswith(f"{NEXT}{FINAL}Hel")


def test_instructions_that_the_template_leaves_out_are_refused(template):
    late = {"role": "developer", "content": "Be rude."}
    with pytest.raises(ApiError, match=r"messages\[1\] must be one that the chat template writes"):
        render(template, USER, late, USER)


def test_the_format_is_found_by_the_template():
    form = format_of(TEMPLATE, "auto", "auto")
    assert (form.names, form.is_harmony, form.reads_calls) == (("harmony",) * 2, True, True)
    without = format_of(TEMPLATE, "none", "auto")
    assert (without.is_harmony, without.reads_calls) == (True, False)
    assert not format_of(TEMPLATE, "hermes", "none").is_harmony
    for calls, reasoning in (("hermes", "auto"), ("harmony", "think")):
        with pytest.raises(ValueError, match="must both be harmony"):
            format_of(TEMPLATE, calls, reasoning)


MARKS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
TOOLS = [Tool("weather", SCHEMA), Tool("any", None)]
TO = "<|channel|>commentary to=functions."
ROME, FIVE = '{"city": "Rome"}', '{"city": 5}'


def kept(walker, grammar, text):
    found, may_end = walker.walk(grammar, text, writes_special=bool(walker.ids))
    return found, may_end


@pytest.mark.parametrize("marks", [(), MARKS])
def test_calls_are_written_in_their_channel_and_by_their_schema(marks):
    walker = Walker(*marks)
    asked = {"special_id": walker.tokenizer.special_id, "is_open": False}
    must = harmony_calls(TOOLS, is_asked_for=True, **asked)
    may = harmony_calls(TOOLS, is_asked_for=False, **asked)
    for call in (f"{TO}weather <|constrain|>json<|message|>{ROME}", f"{TO}weather<|message|>{ROME}",
                 f" to=functions.weather<|channel|>commentary json<|message|>{ROME}",
                 f'{TO}any json<|message|>{{"x": 1}}'):  # fmt: skip
        for text in (call, THOUGHT + call, THOUGHT + THOUGHT + call):
            assert kept(walker, must, text) == (text, True)
            assert kept(walker, may, text) == (text, True)
    for text, end in ((f"{TO}weather<|message|>{FIVE}", "5"), (f"{TO}other<|message|>", "other")):
        for grammar in (must, may):
            assert kept(walker, grammar, THOUGHT + text) == (
                (THOUGHT + text).partition(f"{end}")[0], False
            )  # fmt: skip
    free = f"{THOUGHT}{FINAL}So {BAD}"
    assert kept(walker, may, free) == (free, True)
    assert not kept(walker, must, free)[1]
    assert not kept(walker, must, THOUGHT)[1]


@pytest.mark.parametrize("marks", [(), MARKS])
def test_a_schema_holds_for_the_final_channel(marks):
    walker = Walker(*marks)
    for is_open in (False, True):
        lead = harmony_lead(walker.tokenizer.special_id, is_open=is_open)
        asked = StructuredOutputs(choice=["yes", "no"], lead=lead)
        begun = f"Hm.<|end|>{NEXT}" if is_open else ""
        for thoughts in (begun, begun + THOUGHT):
            good = f"{thoughts}{FINAL}yes"
            assert kept(walker, asked, good) == (good, True)
            assert kept(walker, asked, f"{thoughts}{FINAL}so") == (f"{thoughts}{FINAL}", False)
            assert not kept(walker, asked, thoughts)[1]
        endless = begun + 3 * THOUGHT
        assert kept(walker, asked, endless)[0] == begun + 2 * THOUGHT + "<|channel|>"


def test_a_search_by_beams_shows_the_marks_of_channels():
    asked = ChatRequest(messages=[USER], use_beam_search=True, n=2)
    found = sampling_of(asked, defaults={}, max_tokens=4, skip_special_tokens=False)
    assert (found.beam_width, found.skip_special_tokens) == (2, False)
    assert sampling_of(asked, defaults={}, max_tokens=4).skip_special_tokens
    told = told_sampling(found)
    assert not of_told_sampling(told).skip_special_tokens, "also in an engine's own process"
