"""Chat templates, rendered in a process of their own that may be killed.

A template is a program from a checkpoint, or from a client where that is allowed. Jinja's
ImmutableSandboxedEnvironment keeps it from the interpreter, but a loop within a loop, or a string
multiplied, would still take all time and memory there is. So it runs in a worker process with a
limit on its memory, gets a limit on its time, after which the process is killed, and may not return
more than a limit of text. The two speak JSON, a line each way.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from typing import Any, NoReturn

from tilewise.server.errors import ApiError

__all__ = ["TemplateError", "Templates"]

MAX_SECONDS = 2.0
MAX_MEMORY = 512 * 2**20  # of the worker, its interpreter included (some 60 MiB of address space)
MAX_OUTPUT = 4 * 2**20  # characters
START_SECONDS = 30.0  # for the worker's interpreter, on a busy machine
MAX_COMPILED = 64


class TemplateError(ApiError):
    """A template could not be rendered; the client's messages or the template are at fault."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message, param="messages", code="template_error")


class Templates:
    """Renders templates, one at a time.

    Args:
        max_seconds: of one rendering.
        max_memory: bytes of the worker's address space.
        max_output: characters of the text.
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
        """Start the worker, so that no request waits for that."""
        with self._lock:
            self._started()

    def render(self, template: str, variables: dict[str, Any]) -> str:
        """Return the text of a template.

        Raises:
            TemplateError: it is wrong, refuses the messages, or exceeds a limit.
        """
        return self._ask({"template": template, "variables": variables})

    def check(self, template: str) -> None:
        """Compile a template.

        Raises:
            TemplateError: it is wrong.
        """
        self._ask({"template": template})

    def _ask(self, asked: dict[str, Any]) -> str:
        line = json.dumps(asked).encode() + b"\n"
        with self._lock:
            worker = self._started()
            try:
                answer = _ask(worker, line, self._max_seconds)
            except (TimeoutError, OSError) as error:
                self._kill()
                if isinstance(error, TimeoutError):
                    limit = f"{self._max_seconds:g} s"
                    raise TemplateError(f"chat template must render in {limit}") from None
                limit = f"{self._settings['max_memory'] // 2**20} MiB"
                raise TemplateError(f"chat template must render within {limit}") from None
            except BaseException:
                self._kill()
                raise
        if "error" in answer:
            raise TemplateError(f"chat template: {answer['error']}")
        text: str = answer["text"]
        return text

    def close(self) -> None:
        """End the worker."""
        with self._lock:
            self._kill()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._worker is None or self._worker.poll() is not None:
            self._kill()
            self._worker = worker = subprocess.Popen(
                [sys.executable, "-c", "from tilewise.server import templates; templates.work()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={k: v for k, v in os.environ.items() if not k.startswith("TILEWISE_")},
                start_new_session=True,  # an interrupt of the terminal is the server's business
            )
            try:
                _ask(worker, json.dumps(self._settings).encode() + b"\n", START_SECONDS)
            except (TimeoutError, OSError) as error:
                self._kill()
                message = f"the process that renders chat templates did not start: {error}"
                raise ApiError(500, message) from None
        return self._worker

    def _kill(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()
            for stream in (worker.stdin, worker.stdout):
                assert stream is not None
                with contextlib.suppress(BrokenPipeError):  # what it had not read
                    stream.close()
            worker.wait()


def _ask(worker: subprocess.Popen[bytes], line: bytes, seconds: float) -> dict[str, Any]:
    """Write a line, return the answer.

    Raises:
        OSError: the worker has ended.
        TimeoutError: it takes too long.
    """
    assert worker.stdin is not None
    assert worker.stdout is not None
    end = time.monotonic() + seconds
    inward, outward = worker.stdin.fileno(), worker.stdout.fileno()
    os.set_blocking(inward, False)
    answer, rest = bytearray(), memoryview(line)
    # Not select(), which takes no descriptor above 1,023: a worker that is started again while a
    # thousand clients are connected has such ones.
    with selectors.PollSelector() as selector:
        selector.register(outward, selectors.EVENT_READ)
        selector.register(inward, selectors.EVENT_WRITE)
        while True:
            left = end - time.monotonic()
            ready = {key.fd for key, _ in selector.select(max(0.0, left))}
            if not ready:
                raise TimeoutError
            if inward in ready:
                rest = rest[os.write(inward, rest[:65536]) :]
                if not rest:
                    selector.unregister(inward)
            if outward not in ready:
                continue
            part = os.read(outward, 1 << 20)
            if not part:
                raise OSError("it has ended")
            answer += part
            if answer.endswith(b"\n"):
                parsed: dict[str, Any] = json.loads(answer)
                return parsed


def work() -> None:
    """Be the worker: answer lines of standard input until it ends."""
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
    _answer({})
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
            _answer({"text": text})
        except MemoryError:
            os._exit(1)  # what is left of the interpreter's memory is not worth to keep
        except RecursionError:
            _answer({"error": "must not recurse so deep"})
        except Exception as error:
            _answer({"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]})


def _generation_tag() -> Any:
    """Return the tag {% generation %}, by which trainers know a model's own words: it writes them.

    As in transformers, what stands in it is a block of its own: names that are set there end there.
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


def _answer(content: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(content).encode() + b"\n")
    sys.stdout.buffer.flush()


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    # Jinja's own escapes <, > and & for HTML; models were trained without that.
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
