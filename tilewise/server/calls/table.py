"""The table of formats in which models call tools and write their reasoning.

A row is data: marks, where names and arguments stand, and how a model of this format is recognised.
A new format that is written in one of the ways of `json_objects`, `headed`, `elements` or
`expressions` is a row here and nothing else.

Sources: the chat templates that the models' authors publish; mistral-common's tokenizer versions;
DeepSeek's and Moonshot's guides to tool calls; Google's to Gemma 4 and FunctionGemma.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from tilewise.server.calls.elements import ElementCalls
from tilewise.server.calls.expressions import ExpressionCalls
from tilewise.server.calls.headed import NAME, NUMBER, HeadedCalls
from tilewise.server.calls.json_objects import JsonCalls
from tilewise.server.calls.literals import Dialect

__all__ = [
    "FORMATS",
    "REASONING",
    "Reasoning",
    "Syntax",
    "ToolFormat",
    "call_format",
    "format_in",
    "reasoning_in",
]

Syntax = JsonCalls | HeadedCalls | ElementCalls | ExpressionCalls


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format in which models write tool calls: one row of `FORMATS`.

    Attributes:
        name: the name of the format, for `--tool-call-parser`.
        syntax: the syntax of the calls.
        others: further names, which other servers use for it.
        seen: groups of texts; all of one group are in the chat templates of models with this
            format. The first row with such a group is taken.
        tokens: tokens of the vocabulary by which the format is recognised where the template
            writes tools and none of the marks.
        model_types: values of `model_type` by which it is recognised there, too.
        call_ids: the ids of calls in the history as the template wants them, with {name} and
            {number}, which counts all calls of the conversation; "" for the ids that clients send.
        kept_ids: a pattern of ids that are kept all the same.
    """

    name: str
    syntax: Syntax
    others: tuple[str, ...] = ()
    seen: tuple[tuple[str, ...], ...] = ()
    tokens: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    call_ids: str = ""
    kept_ids: str = ""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A format in which models write reasoning before an answer: one row of `REASONING`.

    Attributes:
        name: the name of the format, for `--reasoning-parser`.
        begin, end: the marks around it.
        label: a text after `begin` that is no part of it; "" for none.
        answer: marks that may stand around the answer behind it; empty for none.
        others: further names, which other servers use for it.
        seen: texts one of which is in the chat templates of models with this format; the first row
            with such a text is taken.
    """

    name: str
    begin: str
    end: str
    label: str = ""
    answer: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()


def _dsml(section: str) -> ElementCalls:
    return ElementCalls(
        (f"<｜DSML｜{section}>",),
        (f"</｜DSML｜{section}>",),
        open='<｜DSML｜invoke name="',
        open_end='">',
        close="</｜DSML｜invoke>",
        key='<｜DSML｜parameter name="',
        flag='" string="',
        key_end='">',
        value_end="</｜DSML｜parameter>",
        is_one=False,
    )


def _functions(begin: tuple[str, ...], end: str, pad: str = "") -> ElementCalls:
    return ElementCalls(
        begin,
        (end,),
        open="<function=",
        open_end=">",
        close="</function>",
        key="<parameter=",
        key_end=">",
        value_end="</parameter>",
        pad=pad,
    )


FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat(
        "gemma4",
        ExpressionCalls(
            ("<|tool_call>",),
            ("<tool_call|>", "<|tool_response>"),
            lead="call:",
            open="{",
            assign=":",
            close="}",
            dialect=Dialect('<|"|>'),
        ),
        seen=(("<|tool_call>call:",),),
        tokens=("<|tool_call>",),
        model_types=("gemma4", "gemma4_text"),
    ),
    ToolFormat(
        "functiongemma",
        ExpressionCalls(
            ("<start_function_call>",),
            ("<end_function_call>",),
            lead="call:",
            open="{",
            assign=":",
            close="}",
            dialect=Dialect("<escape>"),
        ),
        seen=(("<start_function_call>",),),
        tokens=("<start_function_call>",),
    ),
    ToolFormat(
        "minimax_m2",
        ElementCalls(
            ("<minimax:tool_call>",),
            ("</minimax:tool_call>",),
            open='<invoke name="',
            open_end='">',
            close="</invoke>",
            key='<parameter name="',
            key_end='">',
            value_end="</parameter>",
            is_one=False,
        ),
        seen=(("<minimax:tool_call>",),),
        tokens=("<minimax:tool_call>",),
        model_types=("minimax_m2",),
    ),
    ToolFormat(
        "seed_oss",
        _functions(("<seed:tool_call>",), "</seed:tool_call>"),
        seen=(("<seed:tool_call>",),),
        tokens=("<seed:tool_call>",),
        model_types=("seed_oss",),
    ),
    ToolFormat("deepseek_v32", _dsml("function_calls"), seen=(("｜DSML｜", "function_calls>"),)),
    ToolFormat("deepseek_v4", _dsml("tool_calls"), seen=(("｜DSML｜", "tool_calls>"),)),
    ToolFormat(
        "deepseek_v3",
        HeadedCalls(
            ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
            ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            head=("function", "<｜tool▁sep｜>", NAME, "\n```json\n"),
            header=re.compile(r"\s*function\s*<｜tool▁sep｜>\s*(?P<name>\S+?)\s*(?:```json\s*)?"),
            call="<｜tool▁call▁begin｜>",
            fence="\n```",
            call_end="<｜tool▁call▁end｜>",
        ),
        others=("deepseek_r1",),
        seen=(("<｜tool▁calls▁begin｜>", "```json"),),
    ),
    ToolFormat(
        "deepseek_v31",
        HeadedCalls(
            ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
            ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
            head=(NAME, "<｜tool▁sep｜>"),
            header=re.compile(r"\s*(?P<name>\S+?)\s*<｜tool▁sep｜>\s*"),
            call="<｜tool▁call▁begin｜>",
            call_end="<｜tool▁call▁end｜>",
        ),
        seen=(("<｜tool▁calls▁begin｜>",),),
        tokens=("<｜tool▁calls▁begin｜>",),
    ),
    ToolFormat(
        "kimi_k2",
        HeadedCalls(
            ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
            ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
            head=("functions.", NAME, ":", NUMBER, "<|tool_call_argument_begin|>"),
            header=re.compile(
                r"\s*(?:functions\.)?(?P<name>\S+?)\s*(?::\s*[0-9]+)?\s*"
                r"<\|tool_call_argument_begin\|>\s*"
            ),
            call="<|tool_call_begin|>",
            call_end="<|tool_call_end|>",
        ),
        seen=(("<|tool_calls_section_begin|>",),),
        tokens=("<|tool_calls_section_begin|>",),
        model_types=("kimi_k2",),
        call_ids="functions.{name}:{number}",
    ),
    ToolFormat(
        "glm45",
        ElementCalls(
            ("<tool_call>",),
            ("</tool_call>",),
            open="",
            open_end="",
            close="",
            key="<arg_key>",
            key_end="</arg_key>",
            value="<arg_value>",
            value_end="</arg_value>",
        ),
        others=("glm47", "glm4_moe", "glm"),
        seen=(("<arg_key>",),),
        tokens=("<arg_key>",),
        model_types=("glm4_moe", "glm4_moe_lite"),
    ),
    ToolFormat(
        "qwen3_coder",
        _functions(("<tool_call>", "<function="), "</tool_call>", pad="\n"),
        others=("qwen3_xml", "qwen3_next"),
        seen=(("<tool_call>", "<function=", "<parameter="),),
        model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    ),
    ToolFormat(
        "cohere",
        JsonCalls(
            ("<|START_ACTION|>",),
            ("<|END_ACTION|>",),
            keys=("parameters",),
            name_key="tool_name",
            id_key="tool_call_id",
            is_listed=True,
        ),
        others=("cohere_command3", "command_r7b"),
        seen=(("<|START_ACTION|>",),),
        tokens=("<|START_ACTION|>",),
        model_types=("cohere2",),
    ),
    ToolFormat(
        "olmo3",
        ExpressionCalls(("<function_calls>",), ("</function_calls>",), between="\n"),
        seen=(("<function_calls>",),),
        model_types=("olmo3",),
    ),
    ToolFormat(
        "lfm2",
        ExpressionCalls(
            ("<|tool_call_start|>",), ("<|tool_call_end|>",), bracket="[]", between=", "
        ),
        seen=(("<|tool_call_start|>",),),
        tokens=("<|tool_call_start|>",),
        model_types=("lfm2", "lfm2_moe"),
    ),
    ToolFormat(
        "nemotron_json",
        JsonCalls(("<TOOLCALL>",), ("</TOOLCALL>",), is_listed=True),
        seen=(("<TOOLCALL>",),),
    ),
    ToolFormat(
        "phi4_mini",
        JsonCalls(("<|tool_call|>",), ("<|/tool_call|>",), is_listed=None),
        seen=(("<|/tool_call|>",),),
        tokens=("<|/tool_call|>",),
    ),
    ToolFormat(
        "phi4_mini_json", JsonCalls(("functools[",), is_listed=True), seen=(("functools[",),)
    ),
    ToolFormat(
        "granite",
        JsonCalls(("<|tool_call|>", "<tool_call>"), is_listed=True),
        seen=(("<|tool_call|>",),),
        tokens=("<|tool_call|>",),
        model_types=("granite", "granitemoe"),
    ),
    ToolFormat(
        "mistral",
        HeadedCalls(
            ("[TOOL_CALLS]",),
            (),
            head=(NAME, "[ARGS]"),
            header=re.compile(r"\s*(?P<name>[^\s\[]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*"),
            listed=JsonCalls(is_listed=True),
        ),
        seen=(("[TOOL_CALLS]",),),
        tokens=("[TOOL_CALLS]",),
        call_ids="{number:09d}",
        kept_ids="[a-zA-Z0-9]{9}",
    ),
    ToolFormat(
        "hermes",
        JsonCalls(("<tool_call>",), ("</tool_call>",)),
        others=("qwen", "qwen25", "granite4", "ernie45", "exaone4"),
        seen=(("<tool_call>",),),
    ),
    ToolFormat(
        "llama3_json",
        JsonCalls(
            ("<|python_tag|>", "<|python_start|>"),
            ("<|python_end|>",),
            at_start=True,
            keys=("parameters", "arguments"),
            reads_lists=False,
        ),
        others=("llama4_json",),
        seen=(("<|python_tag|>",), ("<|python_start|>", '"parameters": ')),
    ),
    ToolFormat(
        "pythonic",
        ExpressionCalls(
            ("<|python_start|>",), ("<|python_end|>",), at_start=True, bracket="[]", between=", "
        ),
        others=("llama4_pythonic",),
        seen=(("[func_name1(",),),
        model_types=("llama4", "llama4_text"),
    ),
    # The format of models without one, when a call is asked for.
    ToolFormat("json", JsonCalls(at_start=True, keys=("parameters", "arguments"), is_listed=True)),
)

REASONING: tuple[Reasoning, ...] = (
    Reasoning("mistral", "[THINK]", "[/THINK]", seen=("[THINK]",)),
    Reasoning("gemma4", "<|channel>", "<channel|>", label="thought\n", seen=("<|channel>thought",)),
    Reasoning("seed_oss", "<seed:think>", "</seed:think>", seen=("<seed:think>",)),
    Reasoning(
        "cohere",
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        others=("cohere_command3", "command_r7b"),
        seen=("<|START_THINKING|>",),
    ),
    Reasoning(
        "granite",
        "Here is my thought process:",
        "Here is my response:",
        seen=("Here is my thought process:",),
    ),
    Reasoning(
        "think_response",
        "<think>",
        "</think>",
        answer=("<response>", "</response>"),
        others=("ernie45", "granite3.3"),
        seen=("<response>",),
    ),
    Reasoning(
        "think",
        "<think>",
        "</think>",
        others=(
            "deepseek_r1",
            "deepseek_v3",
            "qwen3",
            "glm45",
            "kimi_k2",
            "minimax_m2",
            "exaone4",
            "nemotron_v3",
            "step3",
            "olmo3",
        ),
        seen=("<think>", "</think>"),
    ),
)


def call_format(name: str) -> ToolFormat | None:
    """Return the format of tool calls that has this name here, or else in another server; None if
    none has."""
    found = next((form for form in FORMATS if name == form.name), None)
    return found or next((form for form in FORMATS if name in form.others), None)


def format_in(
    template: str, tokens: Collection[str] = (), model_type: str = ""
) -> ToolFormat | None:
    """Return the format in which a model calls tools; None if it is not known.

    It is found by marks in the templates, or, if the templates write tools without marks, by the
    vocabulary and then by the model's type.

    Args:
        template: the sources of the model's chat templates.
        tokens: the tokens that were added to its vocabulary.
        model_type: the value of this key in its config.json.
    """
    for form in FORMATS:
        if any(all(text in template for text in texts) for texts in form.seen):
            return form
    # Vocabularies have marks that no template uses: they count where the model is told of tools.
    if not re.search(r"\btools\b", template):
        return None
    for form in FORMATS:
        if any(token in tokens for token in form.tokens):
            return form
    return next((form for form in FORMATS if model_type in form.model_types), None)


def reasoning_in(template: str) -> Reasoning | None:
    """Return the format of a model's reasoning, by the marks in `template`, the sources of its chat
    templates; None if they have marks of no format."""
    for form in REASONING:
        has_think = form.name != "think_response" or "</think>" in template
        if has_think and any(text in template for text in form.seen):
            return form
    return None
