"""Render chat templates in a worker process that may be killed.

A template is a program from a checkpoint, or from a client where that is allowed. Jinja's
ImmutableSandboxedEnvironment keeps it from the interpreter, but a loop within a loop, or a string
multiplied, would still take all time and memory there is. So templates are rendered in a worker
process with a memory limit, which is killed when a rendering exceeds its time; the length of the
result is limited as well. The two processes exchange JSON, a line each way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

from tilewise.children import FROM_OUTSIDE, answer, ask, end, environment
from tilewise.server.errors import ApiError

__all__ = ["TemplateError", "Templates"]

START = "from tilewise.server import templates; templates.work()"  # the worker's code
MAX_SECONDS = 2.0
# bytes for the worker, its interpreter included (some 60 MiB of address space)
MAX_MEMORY = 512 * 2**20
MAX_OUTPUT = 4 * 2**20  # characters
START_SECONDS = 30.0  # for the worker's interpreter to start on a busy machine
MAX_COMPILED = 64


class TemplateError(ApiError):
    """A template could not be rendered: the client's messages or the template are at fault."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message, param="messages", code="template_error")


class Templates:
    """The worker process that renders chat templates, one at a time.

    It is started by `start` or by the first rendering, and again after it was killed.

    Args:
        max_seconds: the time limit of one rendering.
        max_memory: the limit of the worker's address space in bytes.
        max_output: the largest number of characters of a text.
    """

    def __init__(
        self,
        *,
        max_seconds: float = MAX_SECONDS,
        max_memory: int = MAX_MEMORY,
        max_output: int = MAX_OUTPUT,
    ) -> None:
        self._max_seconds = max_seconds
        self._settings = {"max_memory": max_memory, "max_output": max_output}
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the worker, so that the first request does not wait for it."""
        with self._lock:
            self._started()

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Return the text that the worker makes of a Jinja template and its variables.

        Raises:
            TemplateError: the template is wrong, refuses the messages, or exceeds a limit.
            ApiError: 500, the worker did not start or was killed from outside twice.
        """
        return self._ask({"template": template, "variables": variables})

    def check(self, template: str) -> None:
        """Compile a Jinja template in the worker, to find its errors.

        Raises:
            TemplateError: the template is no valid Jinja, or compiling it exceeds a limit.
        """
        self._ask({"template": template})

    def _ask(self, asked: dict[str, Any]) -> str:
        with self._lock:
            found = self._asked(asked) or self._asked(asked)
            if found is None:
                message = "the process that renders chat templates was ended from outside"
                raise ApiError(500, message)
        if "error" in found:
            raise TemplateError(f"chat template: {found['error']}")
        text: str = found["text"]
        return text

    def _asked(self, asked: dict[str, Any]) -> dict[str, Any] | None:
        """Return the worker's answer, {"text": ...} or {"error": ...}; None if the worker was
        killed from outside, not for its template.

        Raises:
            TemplateError: the template exceeds the time or the memory; the worker is killed.
        """
        worker = self._started()
        try:
            return ask(worker, asked, self._max_seconds)
        except TimeoutError:
            self._kill()
            limit = f"{self._max_seconds:g} s"
            raise TemplateError(f"chat template must render in {limit}") from None
        except OSError:
            if self._kill(is_ending=True) in FROM_OUTSIDE:
                return None
            limit = f"{self._settings['max_memory'] // 2**20} MiB"
            raise TemplateError(f"chat template must render within {limit}") from None
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """Stop the worker; a later rendering would start another one."""
        with self._lock:
            self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._worker is None or self._worker.poll() is not None:
            self._kill()
            self._worker = worker = subprocess.Popen(
                [sys.executable, "-P", "-c", START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={k: v for k, v in environment().items() if not k.startswith("TILEWISE_")},
                start_new_session=True,  # Ctrl-C in the terminal is handled by the server
            )
            try:
                ask(worker, self._settings, START_SECONDS)
            except (TimeoutError, OSError) as error:
                self._kill()
                message = f"the process that renders chat templates did not start: {error}"
                raise ApiError(500, message) from None
        return self._worker

    def _kill(self, *, is_ending: bool = False) -> int | None:
        """Stop the worker; return its exit code, or None if there is no worker.

        Args:
            is_ending: True if the worker is about to exit by itself; it is then given some seconds,
                so that the exit code is its own.
        """
        worker, self._worker = self._worker, None
        return None if worker is None else end(worker, is_ending=is_ending)


def work() -> None:
    """Run the worker process: answer each line of standard input with a line of JSON, until
    standard input is closed.

    The first line has the limits; each other one has a template, and the variables to render it
    with, or none to compile it only.
    """
    import resource

    lines = sys.stdin.buffer
    settings = json.loads(lines.readline())
    import jinja2.ext
    import jinja2.sandbox

    limit = settings["max_memory"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _generation_tag()],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = time.strftime
    compiled: dict[str, jinja2.Template] = {}
    answer({})
    while line := lines.readline():
        asked = json.loads(line)
        try:
            source = asked["template"]
            if source not in compiled:
                if len(compiled) >= MAX_COMPILED:
                    compiled.clear()
                compiled[source] = environment.from_string(source)
            text = ""
            for part in (
                compiled[source].generate(asked["variables"]) if "variables" in asked else ()
            ):
                text += part
                if len(text) > settings["max_output"]:
                    raise ValueError(f"must return at most {settings['max_output']:,} characters")
            answer({"text": text})
        except MemoryError:
            os._exit(1)  # the interpreter is out of memory and cannot go on
        except RecursionError:
            answer({"error": "must not recurse so deep"})
        except Exception as error:
            answer({"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]})


def _generation_tag() -> Any:
    """Return the class of the Jinja extension for {% generation %}, a tag that marks a model's own
    words for training.

    The tag renders its contents. As in transformers, it is a scope: variables set in it end with
    it.
    """
    import jinja2.ext
    import jinja2.nodes

    class GenerationTag(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            whole = self.call_method("_whole")
            return jinja2.nodes.CallBlock(whole, [], [], body).set_lineno(line)

        def _whole(self, caller: Any) -> Any:
            return caller()

    return GenerationTag


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    # Jinja's tojson escapes <, > and & for HTML; models were trained without that.
    separators = more.get("separators")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=tuple(separators) if separators else None,
        sort_keys=bool(more.get("sort_keys", False)),
    )


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)
