"""The options of `tilewise serve`: flags, TILEWISE_* variables, then a file; the first found is
used.

Names follow vLLM's. This file imports nothing heavy, since the command line reads it before it
knows the command.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewise.engine.config import engine_flags
from tilewise.flags import Flag, add_flag, hint

__all__ = [
    "FLAGS",
    "add_flags",
    "model_of",
    "nearest",
    "once",
    "resolve",
    "unknown_variables",
]

PREFIX = "TILEWISE_"


FLAGS: tuple[Flag, ...] = (
    Flag(
        "model",
        str,
        "story",
        "folder, GGUF file, owner/model[@revision] of the hub, or story, the packaged model",
        "the server",
        "MODEL",
    ),
    Flag("host", str, "127.0.0.1", "address to listen on", "the server", "ADDRESS"),
    Flag("port", int, 8000, "port to listen on; 0 is any that is free", "the server", "N"),
    Flag("served_model_name", list, None, "names of the model for clients", "the server", "NAME"),
    Flag(
        "shutdown_timeout", float, 30.0, "seconds for requests to end at SIGTERM", "the server", "S"
    ),
    Flag("stall_s", float, 30.0, "seconds without a step until /health is bad", "the server", "S"),
    Flag(
        "slow_reader_s",
        float,
        10.0,
        "seconds that a write may wait for its client",
        "the server",
        "S",
    ),
    Flag(
        "request_timeout", float, None, "seconds that a request may take at most", "the server", "S"
    ),
    Flag(
        "stream_share",
        float,
        None,
        "share of the time in which streams are written; above it "
        "tokens of several steps are one event (default: 0.04 on a CPU, else 0.5)",
        "the server",
        "SHARE",
    ),
    Flag("log_level", str, "info", "debug, info, warning or error", "the server", "LEVEL"),
    Flag("demo", bool, False, "open the page in a browser when it is ready", "the server"),
    Flag(
        "otlp_traces_endpoint",
        str,
        None,
        "OpenTelemetry collector for spans, such as http://localhost:4318/v1/traces",
        "the server",
        "URL",
    ),
    Flag("api_key", str, None, "key that every request needs", "who may ask", "KEY"),
    Flag("keys_file", str, None, "TOML with a table for each key", "who may ask", "FILE"),
    Flag(
        "enable_weight_updates",
        bool,
        False,
        "administrators may change the weights (/update_weights), and let the engine sleep",
        "who may ask",
    ),
    Flag("allow_open", bool, False, "listen on a public address without a key", "who may ask"),
    Flag(
        "allowed_origins",
        list,
        None,
        "other sites whose pages may ask and read answers, such as https://example.com; * is any",
        "who may ask",
        "ORIGIN",
    ),
    Flag(
        "show_text",
        bool,
        False,
        "let administrators read other keys' tokens on the page",
        "who may ask",
    ),
    Flag("ssl_keyfile", str, None, "private key for HTTPS", "who may ask", "FILE"),
    Flag("ssl_certfile", str, None, "certificate for HTTPS", "who may ask", "FILE"),
    Flag("chat_template", str, None, "file with a Jinja template for chats", "chats", "FILE"),
    Flag("trust_request_chat_template", bool, False, "run templates that requests bring", "chats"),
    Flag(
        "tool_call_parser",
        str,
        "auto",
        "how the model calls tools, a format of docs/guide/clients-and-tools.md or none; auto is "
        "by the template, the vocabulary and the type of the model",
        "chats",
        "NAME",
    ),
    Flag(
        "reasoning_parser",
        str,
        "auto",
        "how the model writes reasoning, a format of docs/guide/clients-and-tools.md or none; auto "
        "is by the template",
        "chats",
        "NAME",
    ),
    Flag(
        "generation_config",
        str,
        "auto",
        "auto: fields left out are those of the model's "
        "generation_config.json; none: OpenAI's defaults",
        "chats",
        "NAME",
    ),
    Flag(
        "engine_process",
        bool,
        None,
        "the engine in a process of its own, which shares no "
        "interpreter with HTTP (default: where it computes on a GPU)",
        "the engine",
    ),
    Flag(
        "load_format",
        str,
        "auto",
        "auto: read the model's weights; dummy: draw them, to measure "
        "speed, which needs a config.json only",
        "the engine",
        "NAME",
    ),
    *engine_flags(),
    Flag("max_body_bytes", int, 8 * 2**20, "of a request", "limits", "N"),
    Flag("max_prompt_tokens", int, None, "of a prompt (default: the context)", "limits", "N"),
    Flag("max_samples", int, 1024, "prompts of a request times n", "limits", "N"),
    Flag("max_num_queued_reqs", int, 2048, "requests that wait, in all", "limits", "N"),
    Flag(
        "max_num_queued_tokens", int, 16 * 2**20, "prompt tokens that wait, in all", "limits", "N"
    ),
    Flag("max_key_queued_reqs", int, 1024, "requests that wait for one key", "limits", "N"),
    Flag(
        "max_key_queued_tokens",
        int,
        8 * 2**20,
        "prompt tokens that wait for one key",
        "limits",
        "N",
    ),
)

# Every variable with this prefix that the package reads: the options, the file that contains them,
# and the one that `kernels/cpu/machine/telling.py` reads.
VARIABLES = frozenset(
    PREFIX + name
    for name in (
        *(flag.key.upper() for flag in FLAGS),
        "CONFIG",
        "CHECK",
        "PROGRESS",
        "COMPILE_PROCESSES",
    )
)
# Variables that Kubernetes and Docker set in all containers where a service is called tilewise.
_OF_A_SERVICE = re.compile(rf"{PREFIX}(SERVICE_(HOST|PORT)|PORT_\d)")
_ADDRESS = re.compile(r"(tcp|udp|sctp)://")  # TILEWISE_PORT with such a value is not our port

# The names of vLLM's options here, or the reason why there is none.
ELSEWHERE = {
    "--enforce-eager": "--graphs off does that here",
    "--num-gpu-blocks-override": "--num-blocks does that here",
    "--kv-cache-memory-bytes": "--num-blocks does that here",
    "--enable-chunked-prefill": "it is always so here",
    "--enable-auto-tool-choice": "it is so where --tool-call-parser is known",
    "--disable-log-requests": "--log-level warning does that here",
    "--enable-log-requests": "--log-level info does that here",
    "--uvicorn-log-level": "--log-level does that here",
    "--cpu-offload-gb": "--swap-space keeps caches in main memory; weights stay where they are",
    "--stream-interval": "--stream-share does that here, by time",
    "--trust-remote-code": "code of checkpoints is never run here",
    "--max-log-len": "texts are never logged here",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add all options of the server to a parser.

    Options that the user leaves out are absent from the parsed result.
    """
    groups: dict[str, Any] = {}
    for flag in FLAGS:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        add_flag(groups[flag.group], flag)
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="TOML or JSON with these options by name",
    )


def nearest(
    unknown: Sequence[str], command: str = "serve", known: Iterable[str] | None = None
) -> str:
    """Return a message that an option is unknown.

    For an option of vLLM in `ELSEWHERE` the message says how to get the same here; otherwise it
    names the most similar option, if one is similar.

    Args:
        unknown: the unknown options, at least one; the first is named, without "=" and a value.
        command: the name of the command.
        known: options of the command beside those of serve; None for none.
    """
    asked = unknown[0].split("=", 1)[0]
    if asked in ELSEWHERE:
        return f"{asked} is not an option of {command}: {ELSEWHERE[asked]}"
    names = [flag.flag for flag in FLAGS] + ["--config", "--debug", "--help", *(known or ())]
    names += [f"--no-{flag.flag[2:]}" for flag in FLAGS if flag.kind is bool]
    return f"{asked} is not an option of {command}{hint(asked, names)}"


def unknown_variables(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return a message that names the variables with the prefix TILEWISE_ that are not read; None
    if there are none.

    Values are not repeated: one may be a key.
    """
    said = []
    if _ADDRESS.match(environment.get(f"{PREFIX}PORT", "")):
        said.append(f"{PREFIX}PORT is not read: it is the address of a service of that name")
    for name in sorted(environment):
        if not name.startswith(PREFIX) or name in VARIABLES or _OF_A_SERVICE.match(name):
            continue
        like = difflib.get_close_matches(name.upper(), VARIABLES, n=1, cutoff=0.8)
        hint = f", did you mean {like[0]}?" if like else ""
        said.append(f"{name[:80]} is not a variable of tilewise{hint}")
    return "; ".join(said) or None


def resolve(
    given: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the values of all options by `Flag.name`, the name under which a parser keeps a value.

    The command line comes before environment variables, variables before the file, and the file
    before defaults. --config or its variable names the file.

    Args:
        given: the values of the command line, by `Flag.name` or `Flag.key`; other names are
            ignored.
        environment: the environment variables; a variable of no option is ignored.

    Raises:
        ValueError: a variable or an entry of the file has a wrong type, or the file has an entry of
            no option.
    """
    by_key = {flag.key: flag for flag in FLAGS}
    values = {flag.name: flag.default for flag in FLAGS}
    config = given.get("config", environment.get(f"{PREFIX}CONFIG"))
    if config is not None:
        for name, value in _read(Path(config)).items():
            flag = by_key.get(name.replace("-", "_"))
            if flag is None:
                raise ValueError(f"{config}: {nearest(['--' + name])}")
            values[flag.name] = _typed(flag, value, f"{name} in {config}")
    for key, flag in by_key.items():
        text = environment.get(PREFIX + key.upper())
        if text is not None and not (key == "port" and _ADDRESS.match(text)):
            values[flag.name] = _parsed(flag, text)
    by_name = by_key | {flag.name: flag for flag in FLAGS}  # a parser's names, and a caller's
    values.update({by_name[name].name: value for name, value in given.items() if name in by_name})
    return values


def model_of(parsed: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the model of a parsed command line of serve or deploy, and its other options by name.

    The model is the argument or --model; if neither is given, it is the one that `resolve` finds.
    Options of the server that were not given are absent; deploy's own are there with their
    defaults.

    Raises:
        ValueError: the argument and --model differ, or neither is given and `resolve` finds a wrong
            value or name.
    """
    given = {n: v for n, v in parsed.items() if n not in ("MODEL", "run", "debug")}
    found = once(parsed["MODEL"], given.get("model"))
    model: str = resolve(given)["model"] if found is None else found
    given.pop("model", None)
    return model, given


def once(before: str | None, flag: str | None) -> str | None:
    """Return the model of the argument or of --model; None if neither is given.

    Args:
        before: the argument that stands without a flag; None if it is not given.
        flag: the value of --model; None if it is not given.

    Raises:
        ValueError: both are given, and differ.
    """
    if before is not None and flag is not None and before != flag:
        raise ValueError(f"--model must be the model that stands alone, {before!r}, got {flag!r}")
    return flag if before is None else before


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"--config must be a file of TOML or JSON, got {path}: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config must hold one table, got {path}")
    return content


def _typed(flag: Flag, value: Any, where: str) -> Any:
    wanted: tuple[type, ...] = (int, float) if flag.kind is float else (flag.kind,)
    is_bool = isinstance(value, bool) and flag.kind is not bool
    if flag.kind is list and isinstance(value, str):
        return [value]
    if flag.kind is list and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return value
    if is_bool or flag.kind is list or not isinstance(value, wanted):
        kind = "a list of str" if flag.kind is list else flag.kind.__name__
        raise ValueError(f"{where} must be {kind}, got {value!r}")
    return value


def _parsed(flag: Flag, text: str) -> Any:
    where = PREFIX + flag.key.upper()
    if flag.kind is bool:
        known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if text.lower() not in known:
            raise ValueError(f"{where} must be 1 or 0, got {text!r}")
        return known[text.lower()]
    if flag.kind is list:
        return text.split()
    try:
        return flag.kind(text)
    except ValueError:
        raise ValueError(f"{where} must be {flag.kind.__name__}, got {text!r}") from None
